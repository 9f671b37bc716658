"""What a launcher makes of its ranks, and what its record says. The ranks are small programs.

pytest tests/sync/test_launcher.py
"""

import os
import subprocess
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from elastic.base import durable
from elastic.base.errors import TryAgain
from elastic.base.signals import Notice
from elastic.jobs import history, sched_slurm
from elastic.jobs.history import TRAINER, End, Job
from elastic.jobs.program import Program
from elastic.run.records import Outcome
from elastic.sync import launch
from elastic.sync.launch import Launcher, Ranks
from helpers import wait_until

SAYS = """
Traceback (most recent call last):
  File "task.py", line 3, in loss
ValueError: sample 17 has no label
srun: error: n1: task 5: Exited with exit code 1
"""


JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
       "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_PARTITION": "gpu", "SLURM_CONF": os.devnull}


def test_the_log_of_a_job_begins_with_what_slurm_gave_it(make_run, monkeypatch, capsys):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    launcher = Launcher(make_run(), Notice())
    monkeypatch.setattr(launcher, "_release_nodes", Mock(side_effect=TryAgain("its nodes")))
    with pytest.raises(TryAgain, match="its nodes"):  # are what comes next
        launcher.main()
    assert capsys.readouterr().out.startswith(
        "trainer  job 12, restarts 0: 2 nodes x 2 GPUs, partition gpu, time left unknown"
    )


@pytest.fixture
def one_that_hangs():
    """srun, with a rank that waits for another one: what that died of was said before."""
    said = f"cat >&2 <<'END'{SAYS}END\nexec sleep 60"
    srun = subprocess.Popen(["sh", "-c", said], stderr=subprocess.PIPE, text=True, process_group=0)
    ranks = Ranks([srun], None, 0.0, None, set())
    yield ranks
    ranks.end(0)


def test_ranks_that_hang_died_of_what_the_first_one_said(one_that_hangs, monkeypatch):
    """A killed srun has said nothing itself: "signal SIGKILL" it was."""
    monkeypatch.setattr(launch, "LINGER_S", 0.0)
    wait_until(one_that_hangs.are_stuck, 10, "srun says that one has crashed")
    assert one_that_hangs.error_of(-9) == "ValueError: sample 17 has no label"


def test_a_job_that_is_killed_has_said_when_it_was_last_at_work(make_run, monkeypatch):
    """Else each had lasted no time, and checkpoints came every few minutes."""
    monkeypatch.setattr(launch, "PASSES_S", 0.0)
    launcher, times = Launcher(make_run(), Notice()), []
    launcher.program.record("started", gpus=0)

    def code() -> int | None:
        said = launcher.run.jobs.ending(launcher.program.job_id)
        times.append((said["state"], said["time"] - said["started"]))
        return 0 if len(times) > 5 else None

    no = dict.fromkeys(("are_silent", "are_stuck"), lambda: False)
    assert launcher._wait(SimpleNamespace(code=code, end=lambda _: None, **no)) == 0
    assert (times[0][0], times[-1][0]) == ("started", "training")
    assert times[-1][1] > 0.2


def test_a_trainer_that_took_no_step_has_not_worked(make_run):
    """The step of the run, that its record had, was that of the jobs before."""
    run, now = make_run(), time.time()
    program = Program(run, TRAINER)
    program.record("started", gpus=1)
    program.end(End(Outcome.YIELDED, "notice"), 500, progressed=False)
    job = Job(program.job_id, TRAINER, 0, "COMPLETED", submitted_at=now, started_at=now)
    assert not history.ending(job, run.jobs.ending(program.job_id), now).worked


def slurm_says(answers: list, monkeypatch) -> None:
    """What it answers, one time after the other, when it is asked which nodes start a step."""

    def answering(_nodes: list[str]) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, TryAgain):
            raise answer
        return answer

    monkeypatch.setattr(sched_slurm, "answering", answering)


def test_a_crash_while_slurm_is_silent_costs_no_node(make_run, monkeypatch):
    launcher, answers = Launcher(make_run(), Notice()), [TryAgain("no step"), ["n1", "n2"]]
    slurm_says(answers, monkeypatch)
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    launcher._nodes = ["n1", "n2"]
    assert launcher._lost_nodes() == []
    assert (launcher._nodes, answers) == (["n1", "n2"], [])


def test_where_the_launchers_own_node_is_unfit_the_job_has_failed(make_run, monkeypatch):
    """All may be so: a job that had only left its nodes was followed at once, for ever."""
    monkeypatch.setattr(sched_slurm, "answering", lambda nodes: nodes)
    monkeypatch.setattr(launch, "node_name", lambda: "n1")
    launcher = Launcher(make_run(), Notice())
    launcher._nodes, launcher._unfit = ["n1", "n2"], {"n1", "n2"}
    ranks = SimpleNamespace(began=time.time(), error="no GPU", last_words=lambda: "error: no GPU")
    end = launcher._after_crash(End(Outcome.CRASHED, "no GPU"), ranks, {})
    assert end.outcome == Outcome.FAILED


def test_a_node_that_was_lost_while_slurm_was_silent_is_not_forgotten(monkeypatch):
    """Its line is told of once: the other ranks waited for it until NCCL gave up."""
    lines, answers = ["n2", "", ""], [TryAgain("no step"), []]
    slurm_says(answers, monkeypatch)
    ranks = Ranks([], SimpleNamespace(lost=lambda: lines.pop(0)), 0.0, None, set())
    assert (ranks.are_stuck(), ranks.are_stuck()) == (False, True)
    assert ranks.error == "node n2 is silent"
