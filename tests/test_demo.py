"""The demos end well by themselves: all samples once, loss below the bound, nothing left running.

pytest tests/test_demo.py
"""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from elastic.demo import unexplained
from helpers import checkout


def play(command: list, folder: Path, env: dict[str, str]) -> str:
    """Run a demo in `folder`; its output, if it ended well."""
    answer = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
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


@pytest.mark.parametrize(
    ("kind", "reason", "is_wrong"),
    [
        ("reject", "outlier: its own delta, of norm 5.66; usual is 0.545", True),
        ("reject", "non-finite: the loss is nan", True),
        ("reject", "shape: codec none, not int8", True),
        ("taken-back", "the loss rose to 9.1", True),
        ("reject", "stale: based on version 4, 3 behind", False),
        ("reject", "fenced: attempt 9 never claimed slot 1", False),
        ("reject", "samples: samples were handed to slot 2 since", False),
        ("reject", "superseded: the slot delivered a newer delta", False),
        ("reject", "truncated: 000017/0000.1.000:0 has nothing of 479494 bytes", False),
        ("delta", "outlier: no", False),
    ],
)
def test_a_refusal_that_no_fault_explains_is_wrong(kind, reason, is_wrong):
    events = [{"kind": "join"}, {"kind": kind, "reason": reason}]
    assert unexplained(events) == (events[1:] if is_wrong else [])


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "target", ["demo", pytest.param("demo-slurm", marks=pytest.mark.slurm)]
)
def test_the_demo_survives_all_it_does_and_leaves_nothing_running(target, tmp_path):
    clone = checkout(tmp_path)
    env = {name: os.environ[name] for name in ("PATH", "HOME")}
    told = play(["make", target], clone, env)
    assert "audit of demo (finished): ok" in told
    assert re.search(r"to be below 3\.\d\d: ok", told)
    assert "WRONG" not in told
    for fault in ("kill-worker", "preempt", "kill-master"):
        assert f"## {fault}" in told
    assert processes_of(clone) == []
