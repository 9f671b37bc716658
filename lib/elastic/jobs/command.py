"""Any program as the ranks of a synchronous job: what it is told, and where it goes on.
Pure.

    command = ["{python}", "train.py", "--checkpoint_dir", "{checkpoints}",
               "--resume", "{resume}"]
    command = ["{python}", "train.py", "--out_dir={checkpoints}",
               "{resume?--init_from=resume}"]
    command = ["torchrun", "--nnodes={nodes}", "--nproc-per-node={gpus_per_node}",
               "--rdzv-backend=c10d", "--rdzv-endpoint={master_addr}:{master_port}",
               "train.py"]

The same values are in the environment (ELASTIC_RESUME, ELASTIC_CHECKPOINTS, …) beside
torch's own RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Where there is
nothing to resume from yet, the argument that says {resume} is left out, and the option
before it; {resume?WORDS} is WORDS where there is. {python} is the Python of this
installation. In local mode a program is told less.
"""

import re
from collections.abc import Mapping, Sequence

from elastic.base.errors import UsageError

NAMES = {
    "sync": ("resume", "checkpoints", "python", "run", "attempt", "mtbi_s", "master_addr",
             "master_port", "nodes", "gpus_per_node", "gpus"),
    "local": ("python", "run", "slot", "attempt"),
}
_NAME = re.compile(r"(\$?){([a-z_]+)(?:\?([^{}]*))?}")


def expand(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """`command` with every {name} replaced. UsageError for an unknown name."""
    words: list[str] = []
    for word in command:
        named = list(_NAME.finditer(word))
        if unknown := [match[0] for match in named if match[1] or match[2] not in values]:
            legal = ", ".join(f"{{{name}}}" for name in values)
            hint = f"it may say {legal}; a variable of a shell is $NAME, without braces"
            raise UsageError(f"run.command says {unknown[0]}", hint)
        if not all(values[match[2]] for match in named):
            if word == "{resume}" and words and words[-1].startswith("-"):
                words.pop()
            continue
        words.append(_NAME.sub(lambda match: match[3] or values[match[2]], word))
    return words
