"""Any program as the ranks of a synchronous job: what it is told, and where it goes on. Pure.

    command = ["python", "train.py", "--checkpoint_dir", "{checkpoints}", "--resume", "{resume}"]
    command = ["torchrun", "--nnodes={nodes}", "--nproc-per-node={gpus_per_node}",
               "--rdzv-backend=c10d", "--rdzv-endpoint={master_addr}:{master_port}", "train.py"]

The same values are in the environment (ELASTIC_RESUME, ELASTIC_CHECKPOINTS, …) beside torch's own
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Where there is nothing to resume from
yet, the argument that says {resume} is left out, and the option before it.
"""

import re
from collections.abc import Mapping, Sequence

from elastic.errors import UsageError

_NAME = re.compile(r"{([a-z_]+)}")


def expand(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """`command` with every {name} replaced. UsageError for a name that there is not."""
    words: list[str] = []
    for word in command:
        names = _NAME.findall(word)
        if unknown := [name for name in names if name not in values]:
            legal = ", ".join(f"{{{name}}}" for name in values)
            raise UsageError(f"run.command says {{{unknown[0]}}}", f"it may say {legal}")
        if "resume" in names and not values["resume"]:
            if word == "{resume}" and words and words[-1].startswith("-"):
                words.pop()
            continue
        words.append(_NAME.sub(lambda match: values[match[1]], word))
    return words

