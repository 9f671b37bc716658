"""Chaos: planned by seed, done for real, and nothing of the run is lost; what each fault cost.

pytest tests/lab/test_chaos.py
"""

import math
import os
import random
import re
import subprocess
import time
from dataclasses import replace

import pytest

import soak
from elastic.base import config
from elastic.base.errors import ElasticError, UsageError
from elastic.lab import chaos
from elastic.lab.chaos import Cost, Fault, by_kind, cost_of, schedule
from elastic.run.goodput import PARTS, Work
from elastic.run.membership import Slot
from elastic.run.records import Commit
from elastic.run.rundir import Control, RunDir
from helpers import ROOT, commit_of, delta_of
from running import Running, running

pytest_plugins = ["slurm_sandbox"]
KINDS = ["a", "b", "c"]


def slot(number: int, version: int, step: int, attempt: int = 1) -> Slot:
    return Slot(number, attempt, "7", "n1", 1, "training", version, step, step, 0, 0, 0, 0, 0)


# ---- the plan


def test_the_same_seed_plans_the_same_faults():
    plans = [schedule(KINDS, 29, 1800, random.Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert {kind for _, kind in plans[0]} == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_faults_come_as_often_as_asked_and_each_kind_in_its_turn(seed):
    planned = schedule(KINDS, 10, 3000, random.Random(seed))
    times = [at for at, _ in planned]
    assert 270 < len(planned) < 330
    assert all(5 <= b - a <= 15 for a, b in zip([0, *times], times, strict=False))
    assert times[-1] < 3000
    for first in range(0, len(planned) - 2, 3):
        assert {kind for _, kind in planned[first : first + 3]} == set(KINDS)


# ---- the costs


def commit(time: float, *deltas: tuple[int, int, int]) -> Commit:
    """A commit of deltas (slot, attempt, base)."""
    made = (delta_of(slot, attempt=attempt, base=base) for slot, attempt, base in deltas)
    return commit_of(time=time, deltas=tuple(made))


def test_steps_are_lost_if_the_delta_of_that_round_never_comes():
    fault = Fault("kill-worker", 100, "", (slot(0, version=5, step=9),))
    others = commit(103, (1, 1, 5))
    assert cost_of(fault, [others]) == Cost(9, 3, math.inf)
    saved = [others, commit(104, (0, 1, 5)), commit(112, (0, 2, 7))]
    assert cost_of(fault, saved) == Cost(0, 3, 12)
    assert cost_of(fault, [commit(99, (0, 1, 5))]).next_commit_s == math.inf


def test_kinds_are_told_apart_by_what_was_trained_until_the_next_fault():
    work = [Work((0, 1), 0, 10, 100), Work((0, 1), 10, 20, 50)]
    hits = [(Fault("a", 0, "", ()), Cost(1, 2.0, 3.0)), (Fault("b", 10, "", ()), Cost(2, 4.0, 5.0)),
            (Fault("a", 20, "", ()), Cost(4, 1.0, math.inf))]
    a, b = by_kind(hits, work, 30)
    assert (a["kind"], a["count"], a["steps_lost"], a["tokens_per_s"]) == ("a", 2, 5, 5)
    assert (a["next_commit_s"], a["back_s"]) == ([1.5, 2.0], [None, None])
    assert (b["kind"], b["tokens_per_s"], b["back_s"]) == ("b", 5, [5.0, 5.0])


def test_of_no_fault_there_is_no_row():
    assert list(by_kind([], [], 30)) == []


# ---- on a local run


def test_a_fault_that_cannot_be_done_is_refused_or_left_out_by_name(run):
    agent = chaos.Chaos(run)
    kinds, refused = chaos.choose(agent, "")
    assert (set(kinds), refused) == (set(chaos.DO), {})
    agent.is_here = False
    kinds, refused = chaos.choose(agent, "")
    assert set(refused) == {"kill-redis", "hang-worker", "kill-node"}
    assert "kill-worker" in kinds
    with pytest.raises(UsageError, match="kill-node cannot be done.*on other machines"):
        chaos.choose(agent, "kill-worker,kill-node")
    with pytest.raises(UsageError, match="no such fault: 'kill-all'"):
        chaos.choose(agent, "kill-all")


def test_to_a_run_in_sync_mode_no_fault_is_done(tmp_path, monkeypatch):
    """It has one job, which elastic-doctor --try plays."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    path = tmp_path / "own.toml"
    path.write_text('[run]\nname = "own"\nmode = "sync"\nscheduler = "local"\n'
                    'command = ["{python}", "train.py"]\n')
    settings = config.load(path, [])
    run = RunDir.create(tmp_path / "runs", settings, Control("sync", "running", 1, 1), {})
    with pytest.raises(UsageError, match="run own is in sync mode"):
        chaos.harm(run, 1.0, 1.0, 0.0, 0, "", print)


def test_the_command_does_faults_to_a_live_run_and_reports_them(tmp_path):
    """The kinds that no other test does to jobs of this machine."""
    options = ["--every", "4s", "--for", "8s", "--before", "2s", "--seed", "11"]
    done_here = {"kill-node", "flush-redis"}
    settings = {"elastic.max": 2, "local_sgd.inner_steps": 20}
    with running(tmp_path, settings, samples=3_000, step_s=0.1) as run:
        run.workers(2)
        only_processes_and_jobs_of_the_run_are_hit(run)
        command = [ROOT / "bin/elastic-chaos", "tiny", *options, "--faults", ",".join(done_here)]
        doing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        run.until(lambda: doing.poll() is not None, 200, "the end of the chaos")
        said, told = doing.communicate()
        assert doing.returncode == 0, told
        events = [event["fault"] for event in run.events("chaos")]
        assert set(events) == done_here
        for kind in done_here:
            assert re.search(rf"^{kind} +[1-9]", said, re.M), said
        assert "audit of tiny (not finished): ok" in said
        assert re.search(r"goodput: training [0-9.]+% of", said)
        assert [end["outcome"] for end in run.events("end")] == ["killed"]
        run.finish()


def only_processes_and_jobs_of_the_run_are_hit(run: Running) -> None:
    """Whatever a lease says."""
    agent, lease = chaos.Chaos(run.run), run.slots()[0]
    job_ids = {job.job_id for job in agent._jobs()}
    assert agent._is(lease, job_ids)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        for pid in (-1, 0, 1, os.getpid(), bystander.pid, run.pids("agent")[0]):
            assert not agent._is(replace(lease, pid=pid), job_ids)
    finally:
        bystander.kill()
        bystander.wait()
    for job_id in ("--me", "--user=root", "", "99"):
        assert not agent._is(replace(lease, job_id=job_id), job_ids)
    assert not agent._is(replace(lease, attempt=2), job_ids)
    agent.training = list  # nobody
    with pytest.raises(ElasticError, match="none of the run's trains"):
        agent.inject("kill-worker", until=time.time() + 1)


# ---- everything at once, on a sandbox: the short form of `make soak`


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_run_under_all_faults_commits_every_sample_once(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "CALM_S", 8.0)  # the controller hangs, and clocks are off
    monkeypatch.setattr(soak, "SKEWED_S", 10.0)
    everything = {"before": "5s", "every": "4s", "for": "33s", "seed": 4}
    with soak.stage(workers=3) as there:
        report = soak.soak(there, "all", 0.4, {"local_sgd.inner_steps": 5}, **everything)
        slurm = allocated_by_slurm(there)
    audit, told = report["audit"], report["audit"]["gpu_seconds"]
    assert audit["problems"] == []
    assert audit["finished"]
    assert audit["repeated"] == audit["missing"] == 0
    assert {row["kind"] for row in report["kinds"]} == set(chaos.DO)
    assert sum(told[part] for part in PARTS) == pytest.approx(told["allocated"], rel=1e-6)
    assert told["allocated"] == pytest.approx(slurm, rel=0.01)


def allocated_by_slurm(there: soak.Stage) -> float:
    """GPU-seconds of all workers by Slurm's own books, which still have every job."""
    lines = there.box.run("squeue", "--states=all", "--noheader", "--format=%j %T %S %e")
    jobs = [line.split() for line in lines.splitlines() if "/w" in line]
    assert not {"PENDING", "RUNNING"} & {state for _, state, *_ in jobs}
    times = [(float(start), float(end)) for *_, start, end in jobs if "N/A" not in (start, end)]
    return sum(end - start for start, end in times)
