"""Which of a job's nodes still start a step, where Slurm itself does not know yet.

pytest tests/jobs/test_answering.py
"""

from pathlib import Path

import pytest

from elastic.base.errors import TryAgain
from elastic.jobs.sched_slurm import PROBES_AT_ONCE, answering
from elastic.sync.launch import BAD_EXIT

# A busy controller: each node's first try fails. Node n0 is gone. Notes how many run at a time.
SRUN = """#!/bin/sh
for word; do case "$word" in --nodelist=*) node="${word#--nodelist=}";; esac; done
cd "$(dirname "$0")"
echo "$node" >>tries
mkdir "running.$node" && ls -d running.* | wc -l >>at_once
sleep 0.05
rmdir "running.$node"
[ "$node" != n0 ] && [ -e "seen.$node" ] && exit 0
touch "seen.$node"
exit 1
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")  # where the launcher is
    return tmp_path


def test_a_node_is_lost_when_two_tries_have_failed(busy: Path):
    nodes = [f"n{number}" for number in range(4)]
    assert answering(nodes) == ["n1", "n2", "n3"]
    assert sorted((busy / "tries").read_text().split()) == sorted(2 * nodes)


def test_where_its_own_node_starts_no_step_slurm_is_silent_and_no_node_lost(busy, monkeypatch):
    """The job gave all its nodes away, as slurmctld was started anew when a rank crashed."""
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    with pytest.raises(TryAgain, match="on this node either"):
        answering(["n1", "n2"])


def test_many_nodes_are_asked_in_waves(busy: Path):
    nodes = [f"n{number}" for number in range(1, 3 * PROBES_AT_ONCE)]
    assert answering(nodes) == nodes
    assert 1 < max(map(int, (busy / "at_once").read_text().split())) <= PROBES_AT_ONCE


@pytest.mark.parametrize(("said", "is_bad"), [
    ("srun: error: Node failure on n2", True),
    ("srun: error: n1: task 3: Killed", True),
    ("srun: error: n1: tasks 0-2: Exited with exit code 1", True),
    ("srun: error: n1: task 3: Out Of Memory", True),
    ("srun: error: n1: task 3: Exited with exit code 75", False),
    ("srun: Job 7 step creation temporarily disabled, retrying", False),
])
def test_srun_says_that_a_node_or_a_rank_is_gone(said: str, is_bad: bool):
    assert bool(BAD_EXIT.match(said)) == is_bad
