"""The demos end well by themselves: all samples once, loss below the bound, nothing left running.

pytest tests/whole/test_demo.py
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic.lab.demo import unexplained
from forks import NOBODY
from helpers import ROOT, checkout, environment
from running import TESTS


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
        ("reject", "truncated: 000017/0000.1.000 has 7 of 479494 bytes", True),
        ("reject", "unreadable: 000017/0000.1.000: [Errno 2] No such file or directory", False),
        ("delta", "outlier: no", False),
    ],
)
def test_a_refusal_that_no_fault_explains_is_wrong(kind, reason, is_wrong):
    event = {"kind": kind, "rule": reason.partition(":")[0], "reason": reason}
    events = [{"kind": "join"}, event]
    assert unexplained(events) == (events[1:] if is_wrong else [])


def refused(folder: Path, what: str) -> None:
    """The demo says so there, and all that is below `folder` stays as it is."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = subprocess.run([ROOT / "bin" / "elastic-demo"], cwd=folder / "here", text=True,
                          env=environment(folder), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {folder / 'here' / 'build' / 'demo'} {what}")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("planted", ["build", "demo"])
def test_a_link_in_the_demos_place_leads_nowhere(tmp_path, planted):
    """It led to what was truncated (a lock), and to what was removed (earlier runs)."""
    mine = tmp_path / "home" / "demo"
    for name in ("runs", "home"):
        (mine / name).mkdir(parents=True)
        (mine / name / "thesis").write_text("years")
    (mine / "lock").write_text("years")
    (mine / ".elastic-demo").touch()
    here = tmp_path / "here"
    here.mkdir()
    if planted == "build":
        (here / "build").symlink_to(mine.parent)
    else:
        (here / "build").mkdir()
        (here / "build" / "demo").symlink_to(mine)
    refused(tmp_path, "is a link, another user's, or others may write to it")


def test_a_folder_that_no_demo_has_made_is_left_alone(tmp_path):
    place = tmp_path / "here" / "build" / "demo"
    (place / "runs").mkdir(parents=True)
    (place / "runs" / "thesis").write_text("years")
    refused(tmp_path, "is no demo's folder")
    (place / ".elastic-demo").touch()
    place.chmod(0o775)
    refused(tmp_path, "is a link, another user's, or others may write to it")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_what_another_user_has_put_in_the_demos_place_is_left_alone(tmp_path):
    place = tmp_path / "here" / "build" / "demo"
    place.mkdir(parents=True)
    (tmp_path / "important").write_text("years")
    (place / ".elastic-demo").touch()
    (place / "lock").symlink_to(tmp_path / "important")
    os.chown(place, NOBODY, NOBODY)
    refused(tmp_path, "is a link, another user's, or others may write to it")


def test_one_demo_at_a_time(tmp_path):
    place = tmp_path / "here" / "build" / "demo"
    place.mkdir(parents=True)
    (place / ".elastic-demo").touch()
    folder = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        done = subprocess.run([ROOT / "bin" / "elastic-demo"], cwd=tmp_path / "here", text=True,
                              env=environment(tmp_path), capture_output=True)
    finally:
        os.close(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: another demo runs in {place}\n")


def train_a_tiny_task(clone: Path) -> None:
    """On Slurm the demo shows what Slurm does, which does not know what is learned."""
    pace, config = clone / "pace", clone / "etc/demo.toml"
    pace.write_text("0.05")
    shutil.copy(TESTS / "tiny_task.py", config.parent)
    text = config.read_text()
    for shipped, cheap in (("elastic.tasks:ByteText", "tiny_task:Tiny"),
                           ('data = "stdlib"', f'pace = "{pace}"')):
        assert shipped in text
        text = text.replace(shipped, cheap)
    config.write_text(text)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "target", ["demo", pytest.param("demo-slurm", marks=pytest.mark.slurm)]
)
def test_the_demo_survives_all_it_does_and_leaves_nothing_running(target, tmp_path):
    clone = checkout(tmp_path)
    if target == "demo-slurm":
        train_a_tiny_task(clone)
    env = {name: os.environ[name] for name in ("PATH", "HOME")}
    told = play(["make", target], clone, env)
    assert "audit of demo (finished): ok" in told
    assert re.search(r"to be below \d\.\d\d: ok", told)
    assert "WRONG" not in told
    for fault in ("kill-worker", "preempt", "kill-master"):
        assert f"## {fault}" in told
    assert processes_of(clone) == []
