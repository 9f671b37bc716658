"""Ranks of a program in tests/: real processes, which always end."""

import os
import subprocess
import sys

from elastic.base.network import free_port
from helpers import PATIENCE, ROOT


def run_ranks(world: int, program: str, *arguments: str) -> None:
    """All ranks of a program in tests/, over gloo, to their end, which must be a good one."""
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port("127.0.0.1")), "OMP_NUM_THREADS": "1",
           "PYTHONPATH": str(ROOT / "lib")}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / program), *arguments]
    processes = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=120 * PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(said)
