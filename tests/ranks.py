"""Ranks of a program in tests/: real processes, which always end.

    python ranks.py WORLD PROGRAM ARGUMENTS...

imports torch once, and forks a rank for each of WORLD; a test calls run_ranks.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path


def run_ranks(world: int, program: str, *arguments: str) -> None:
    """All ranks of a program in tests/, over gloo, to their end, which must be a good one."""
    from elastic.base.network import free_port
    from helpers import PATIENCE, ROOT

    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port("127.0.0.1")), "OMP_NUM_THREADS": "1",
           "PYTHONPATH": f"{ROOT}/lib:{ROOT}/tests"}
    command = [sys.executable, __file__, str(world), str(ROOT / "tests" / program), *arguments]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True,
                               process_group=0)
    try:
        said = process.communicate(timeout=120 * PATIENCE)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said


def fork(world: int, program: Path) -> int:
    """Fork the ranks and wait for them; 1 if one of them has failed."""
    import torch.distributed.fsdp  # noqa: F401  # what takes longest, once for all of them

    pids = []
    for rank in range(world):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ["RANK"], code = str(rank), 1
        try:
            runpy.run_path(str(program), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return int(any([os.waitpid(pid, 0)[1] for pid in pids]))


if __name__ == "__main__":
    worlds, path, *sys.argv[1:] = sys.argv[1:]
    sys.exit(fork(int(worlds), Path(path)))
