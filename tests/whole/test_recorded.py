"""Runs that an older version has left, stopped in the middle, are read and go on.

tests/recorded has one of each mode: two workers (or ranks) of tiny_task, of which one was killed.
@HOME@ stands for the folder that they were in.
"""

import contextlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.base.durable import draft_of
from elastic.run.rundir import RunDir
from helpers import ROOT, elastic_here, environment
from running import TESTS, Running, kill_all

COMMANDS = (
    ("status", "tiny"), ("status", "tiny", "--json"), ("status",), ("audit", "tiny", "--files"),
    ("audit", "tiny", "--json"), ("logs", "tiny"), ("report", "tiny"), ("evaluate", "tiny"),
    ("metrics", "--prometheus", "runs.prom"), ("reconcile", "tiny", "--dry-run"),
)


@pytest.fixture(params=["local", "sync"])
def left(request, tmp_path: Path) -> Iterator[Running]:
    """The run, where this version is the one that goes on with it."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(mode=0o700, parents=True)
    with tarfile.open(ROOT / "tests" / "recorded" / f"{request.param}.tar.gz") as tar:
        tar.extractall(folder)
    given = environment(tmp_path, PYTHONPATH=str(TESTS))
    for path in (path for path in folder.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes().replace(b"@HOME@", os.fsencode(tmp_path)))
    (folder / "environment.json").write_text(json.dumps({**given, "ELASTIC_HOME": str(ROOT)}))
    (tmp_path / "registry" / "runs").mkdir(mode=0o700, parents=True)
    (tmp_path / "registry" / "runs" / "tiny").symlink_to(folder)
    (tmp_path / "pace").write_text("0")
    before = os.environ.copy()
    os.environ.update(given)
    try:
        yield Running(tmp_path, RunDir(folder), tmp_path / "pace")
    finally:
        os.environ.clear()
        os.environ.update(before)
        kill_all(tmp_path)


def test_every_command_reads_a_run_of_an_older_version(left, tmp_path):
    with contextlib.chdir(tmp_path):
        for words in COMMANDS:
            done = elastic_here(*words)
            assert (done.exit_code, done.stderr) == (0, ""), words


@pytest.mark.parametrize("left", ["local"], indirect=True)
def test_a_version_whose_folder_was_not_named_yet_is_evaluated(left):
    """Its writer died between its commit and the rename: "no longer on disk"."""
    commit = left.run.commits.newest()
    folder = left.run.version_path(commit.version)
    folder.rename(draft_of(folder, commit.writer))
    said = elastic_here("evaluate", "tiny", "--json").stdout
    assert json.loads(said)["version"] == commit.version


def test_a_run_of_an_older_version_goes_on_and_trains_what_was_left(left):
    commits = sorted((left.run.path / "commits").glob("*.json"))
    known = {path: path.read_bytes() for path in commits}
    begun = elastic_here("scale", "tiny")
    assert begun.exit_code == 0, begun.stderr
    left.until(lambda: left.run.done() and not left.jobs(), 80, "the end of the run")
    report = json.loads(elastic_here("audit", "tiny", "--json").stdout)
    assert (report["problems"], report["committed"]) == ([], 600)
    assert {path: path.read_bytes() for path in commits} == known
