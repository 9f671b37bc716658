"""The demos end well by themselves: all samples once, loss below the bound, nothing left running.

pytest tests/test_demo.py
"""

import contextlib
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT, environment


def play(folder: Path, *options: str) -> str:
    """Run the demo in `folder`; its output, if it ended well."""
    answer = subprocess.run(
        [ROOT / "bin" / "elastic-demo", *options], cwd=folder, env=environment(folder),
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes whose environment leads to the demo in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if bytes(folder / "build" / "demo") in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--slurm",), marks=pytest.mark.slurm)], ids=["local", "slurm"]
)
def test_the_demo_survives_all_it_does_and_leaves_nothing_running(options, tmp_path):
    told = play(tmp_path, *options)
    assert "audit of demo (finished): ok" in told
    assert "to be below 2.6: ok" in told
    for fault in ("SIGKILL of a trainer", "preemption with notice", "SIGKILL of the master"):
        assert f"## {fault}" in told
    assert processes_of(tmp_path) == []
