"""The reconcile pass: a scheduler that is told what to answer, then the local one for real.

pytest tests/jobs/test_reconcile.py
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from signal import SIGKILL

import pytest

from elastic.base import proc
from elastic.base.errors import TryAgain
from elastic.jobs import reconcile, sched_local
from elastic.jobs.history import Job
from elastic.jobs.reconcile import run_pass
from elastic.jobs.sched import Elsewhere, Refused, RetryLater, job_name, parse_job_name
from elastic.jobs.sched_local import LocalScheduler
from elastic.run.rundir import Control, RunDir
from helpers import PATIENCE, ROOT, wait_until

NOW = 1_800_000_000.0


class Answers:
    """A scheduler without processes. `on_submit` may raise, before or after the job exists."""

    def __init__(self):
        self.listed: dict[str, Job] = {}
        self.now, self.asked, self.cancelled, self.specs = NOW, 0, [], []
        self.silent = False
        self.on_submit = self.on_cancel = lambda *_: None

    def open(self, *_):
        return self

    def jobs(self, within_s=0.0):
        self.asked += 1
        if self.silent:
            raise TryAgain("squeue: Socket timed out")
        return list(self.listed.values())

    def submit(self, spec):
        self.on_submit(spec)
        self.specs.append(spec)
        return self.add(spec.name)

    def add(self, name, state="PENDING"):
        job_id = str(len(self.listed) + 100)
        run, *place = parse_job_name(name)
        self.listed[job_id] = Job(job_id, *place, state, "", self.now, run=run)
        return job_id

    def cancel(self, job_id, kill=False):
        self.on_cancel(job_id)
        self.cancelled.append((job_id, kill))

    def becomes(self, state, *names):
        for job in list(self.listed.values()):
            if not job.ended and (not names or (job.role, job.slot) in names):
                started = {"started_at": self.now, "node": "n1"} if state == "RUNNING" else {}
                self.listed[job.job_id] = replace(job, state=state, **started)

    def places(self):
        return [job.place for job in self.listed.values() if not job.ended]


@pytest.fixture
def slurm():
    return Answers()


@pytest.fixture
def again(run, slurm):
    """again(seconds) -> the report of one pass, so many seconds later."""

    def one(seconds=20.0, runs=(run,), **options):
        slurm.now += seconds
        return run_pass(list(runs), slurm.now, scheduler=slurm.open, **options)

    return one


def did(report):
    return [(a.verb, a.role, a.slot) for each in report.runs for a in each.actions]


def notes(run):
    return json.loads((run.path / "reconcile.json").read_text())


def kinds(run):
    return [event["kind"] for event in run.events()]


def until_running(again, slurm):
    again()
    slurm.becomes("RUNNING")
    again()


# ---- doing it, once


class Shared(Answers):
    """Others have asked, too: it answers with what it listed `within_s` ago."""

    def jobs(self, within_s=0.0):
        then = [job for job in super().jobs() if job.submitted_at <= self.now - within_s]
        self.asked -= bool(within_s)
        return then


def test_what_an_old_answer_does_not_know_yet_is_not_submitted_again(run):
    slurm = Shared()
    run_pass([run], slurm.now, scheduler=slurm.open)
    submitted, asked = len(slurm.specs), slurm.asked
    for _ in range(20):
        slurm.now += 7.0
        report = run_pass([run], slurm.now, scheduler=slurm.open, within_s=30.0)
        assert did(report) == []
    assert submitted == len(slurm.specs) > 0
    assert slurm.asked == asked
    slurm.listed.clear()
    slurm.now += 1.0
    run_pass([run], slurm.now, scheduler=slurm.open)
    assert kinds(run).count("end") == submitted


def test_the_first_pass_submits_the_master_and_all_workers_and_the_second_is_silent(
    run, slurm, again
):
    report = again()
    assert did(report) == [("submit", "master", 0), *(("submit", "worker", s) for s in range(4))]
    assert report.lines()[0] == "run-a: submit master 0 job 100: no job is there"
    assert kinds(run) == ["submit"] * 5
    before = (run.path / "reconcile.json").stat()
    slurm.becomes("RUNNING")
    assert did(again()) == []
    assert again().lines() == []
    assert kinds(run) == ["submit"] * 5
    assert before.st_size < (run.path / "reconcile.json").stat().st_size
    unchanged = (run.path / "reconcile.json").stat().st_ino
    again()
    assert (run.path / "reconcile.json").stat().st_ino == unchanged, "nothing new: not written"


def test_a_job_is_submitted_with_the_runs_own_settings_and_environment(run, slurm, again):
    again()
    spec = slurm.specs[-1]
    assert (spec.run_dir, spec.run, spec.role, spec.slot) == (run.path, "run-a", "worker", 3)
    assert spec.environment == {"A": "b"}
    assert spec.name == job_name("run-a", "worker", 3)
    assert (spec.gpus, slurm.specs[0].gpus) == ((1, 1), (0, 0))


def test_slots_are_max_divided_by_the_gpus_of_a_worker(make_run, slurm, again):
    run = make_run("slurm.gpus_per_worker=2", "elastic.max=4", name="pairs")
    report = again(runs=[run])
    assert did(report) == [
        ("submit", "master", 0),
        ("submit", "worker", 0),
        ("submit", "worker", 1),
    ]


def test_one_question_is_enough_for_all_runs_and_jobs_are_told_apart(make_run, slurm, again):
    a, b = make_run(name="a"), make_run(name="b")
    slurm.add(job_name("a", "worker", 1))
    slurm.add(job_name("another", "worker", 1))
    again(runs=[a, b])
    assert slurm.asked == 1
    assert Counter((job.run, job.place) for job in slurm.listed.values()).most_common(1)[0][1] == 1
    assert len(slurm.listed) == 11


def test_a_lost_or_damaged_memory_makes_no_second_job(run, slurm, again):
    again()
    for damage in (b"", b"{", b'{"memory": {"jobs": [{"no": 1}]}}', b'{"memory": 3}'):
        (run.path / "reconcile.json").write_bytes(damage)
        assert did(again()) == []
    (run.path / "reconcile.json").unlink()
    assert did(again()) == []


def test_what_a_later_version_notes_besides_is_left_out(run, slurm, again):
    """After a step back: the pass that crashed on it, or took it for nothing, forgot all."""
    until_running(again, slurm)
    for slot in range(2):
        ending(run, slurm, slot, "failed", reason="exit 1")
    again()
    before = notes(run)
    slurm.becomes("RUNNING")
    told = before["memory"]
    assert told["jobs"]
    assert told["ended"]
    later = {name: [{**row, "later": [1]} for row in told[name]] for name in ("jobs", "ended")}
    unsure = [{"role": "worker", "slot": 0, "until": NOW + 600, "later": None}]
    (run.path / "reconcile.json").write_text(
        json.dumps({"memory": {**told, **later, "unsure": unsure, "later": {}}, "later": 1})
    )
    memory = reconcile.remembered(run, NOW)
    assert memory.born == told["born"]
    assert json.loads(json.dumps(asdict(memory))) == {**told, "unsure": [
        {name: value for name, value in unsure[0].items() if name != "later"}]}


@pytest.mark.parametrize("damage", ['{"memory": {"jobs": 3}}', "", '{"memory": []}'])
def test_a_run_whose_memory_is_damaged_is_no_new_one(run, slurm, again, damage):
    """A new run whose first job is refused has failed; one that is at work waits."""
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 2))

    def refuse(spec):
        raise Refused("sbatch: Access/permission denied")

    slurm.on_submit = refuse
    (run.path / "reconcile.json").write_text(damage)
    again()
    assert run.failed() is None


def test_a_dry_run_tells_the_plan_and_changes_nothing(run, slurm, again):
    before = sorted(run.path.rglob("*"))
    report = again(dry_run=True)
    assert len(did(report)) == 5
    assert report.lines()[0] == "run-a: would submit master 0: no job is there"
    assert sorted(run.path.rglob("*")) == before
    assert slurm.listed == {}
    assert json.loads(json.dumps(asdict(report)))["runs"][0]["actions"][0]["verb"] == "submit"


# ---- not knowing


def test_an_unreachable_scheduler_means_no_actions_and_is_said_once(run, slurm, again):
    again()
    slurm.listed.clear()
    slurm.silent = True
    report = again(100)
    assert (did(report), report.unknown) == ([], "squeue: Socket timed out")
    assert report.lines() == ["nothing done: squeue: Socket timed out"]
    report = again()
    assert report.unknown
    assert report.lines() == []


def test_a_cancel_without_an_answer_is_tried_again(run, slurm, again):
    until_running(again, slurm)
    run.set_control(max=3)

    def hang(*_):
        raise TryAgain("scancel: timed out")

    slurm.on_cancel = hang
    assert again().unknown == "run-a: scancel: timed out"
    slurm.on_cancel = lambda *_: None
    assert did(again()) == [("cancel", "worker", 3)]
    assert did(again()) == []


def test_a_pass_skips_a_run_that_another_pass_is_at_work_on(run, slurm, again):
    with open(run.path / "reconcile.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = again()
        assert (did(report), report.lines(), report.errors) == ([], [], [])
        assert slurm.asked == 0
    assert len(did(again())) == 5


def test_a_pass_that_a_person_asked_for_waits_for_another_one(run, slurm, again):
    with open(run.path / "reconcile.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another pass is at work" in again(wait_s=0.3).unknown
        release = threading.Timer(0.3, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        assert len(did(again(wait_s=30.0))) == 5
        release.join()


def test_a_filesystem_without_locks_has_passes_too(run, again, monkeypatch):
    """Lustre without `-o flock`."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(did(again())) == 5


def test_the_lock_is_taken_before_the_scheduler_is_asked(run, slurm):
    """Else the answer could be older than what another pass did in between."""

    class Meeting(Answers):
        def jobs(self, within_s=0.0):
            inner = run_pass([run], NOW, scheduler=slurm.open)
            assert did(inner) == []
            return super().jobs()

    assert len(did(run_pass([run], NOW, scheduler=Meeting().open))) == 5


def test_a_submission_that_may_have_succeeded_is_not_repeated_before_ten_minutes(run, slurm, again):
    def lost(spec):
        if spec.role == "worker":
            raise TryAgain("sbatch: Socket timed out")

    slurm.on_submit = lost
    report = again()
    assert did(report) == [("submit", "master", 0)]
    assert "unsure whether worker 0" in report.lines()[1]
    assert "unsure whether worker 0" in report.runs[0].waiting[0], "who submits a run is told"
    slurm.on_submit = lambda spec: None
    assert did(again()) == [("submit", "worker", s) for s in (1, 2, 3)]
    assert did(again(500)) == []
    assert did(again(100)) == [("submit", "worker", 0)]


def test_a_submission_that_had_succeeded_turns_up_by_its_name(run, slurm, again):
    def lost(spec):
        if spec.slot == 2:
            slurm.add(spec.name)
            raise TryAgain("sbatch: Socket timed out")

    slurm.on_submit = lost
    again()
    slurm.on_submit = lambda spec: None
    assert did(again()) == [("submit", "worker", 3)]
    assert notes(run)["memory"]["unsure"] == []
    assert did(again(700)) == []


@pytest.mark.parametrize("submitted", [True, False])
def test_a_pass_that_dies_in_the_middle_of_a_submission_makes_no_second_job(
    run, slurm, again, submitted
):
    class Killed(BaseException):
        pass

    def die(spec):
        if spec.slot == 1:
            raise Killed

    slurm.on_submit = die
    with pytest.raises(Killed):
        again()
    slurm.on_submit = lambda spec: None
    assert did(again(1)) == [("submit", "worker", 2), ("submit", "worker", 3)]
    if submitted:
        slurm.add(job_name("run-a", "worker", 1))
    later = did(again(60))
    assert later == ([] if submitted else [("submit", "worker", 1)])


# ---- what a scheduler does not take


def test_a_refused_run_fails_with_the_reason_and_the_way_out(run, slurm, again):
    def refuse(spec):
        if spec.role == "worker":
            raise Refused("sbatch: invalid partition specified: nosuch", "see [slurm]")

    slurm.on_submit = refuse
    report = again()
    assert did(report) == [("submit", "master", 0), ("cancel", "master", 0)]
    assert run.failed()["reason"] == "worker refused: sbatch: invalid partition specified: nosuch"
    assert run.failed()["detail"] == "see [slurm]"
    assert any("failed: worker refused" in line for line in report.lines())
    slurm.on_submit = lambda spec: None
    assert did(again()) == []


def test_a_refusal_does_not_end_a_run_that_is_at_work(run, slurm, again):
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 1))

    def refuse(spec):
        raise Refused("sbatch: Invalid account")

    slurm.on_submit = refuse
    assert did(again()) == []
    assert run.failed() is None
    assert again().runs[0].waiting == ["worker 1: worker refused: sbatch: Invalid account"]
    slurm.on_submit = lambda spec: None
    assert did(again(600)) == [("submit", "worker", 1)]


def test_a_later_refusal_is_tried_again_ever_more_seldom_and_ends_no_run(run, slurm, again):
    """Also one of which no job runs: a plugin may refuse today, or a host be no submit host."""
    again()
    for job_id, job in slurm.listed.items():
        slurm.listed[job_id] = replace(job, state="PREEMPTED")
    asked = []

    def refuse(spec):
        asked.append(slurm.now)
        raise Refused("sbatch: You must specify an account; Unspecified error")

    slurm.on_submit = refuse
    for _ in range(120):
        again(60)
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    for gap, delay_s in zip(gaps, [60, 120, 240, 480, 960, 1800, 1800], strict=False):
        assert delay_s <= gap <= delay_s + 61  # a pass a minute
    assert len(gaps) >= 5
    assert run.failed() is None
    slurm.on_submit = lambda spec: None
    assert again(1800).runs[0].actions


def test_a_worker_too_many_does_not_hold_up_those_before_it(run, slurm, again):
    """A site that lets a run have two workers: nobody replaced its master, for half an hour."""
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 2), ("worker", 3))

    def refuse(spec):
        if spec.role == "worker" and spec.slot >= 2:
            raise Refused("sbatch: you may have two jobs with GPUs")

    slurm.on_submit = refuse
    assert did(again()) == []
    slurm.becomes("PREEMPTED", ("master", 0), ("worker", 1))
    assert did(again()) == [("submit", "master", 0), ("submit", "worker", 1)]
    assert "worker refused" in again().runs[0].waiting[0]
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 0))
    refused = []

    def refuse_all(spec):
        refused.append(spec.slot)
        raise Refused("sbatch: Access/permission denied")

    slurm.on_submit = refuse_all
    assert did(again()) == []
    assert refused == [0]
    assert notes(run)["memory"]["later_host"] == reconcile.node_name(), "it may be this host alone"


def test_a_host_that_may_not_submit_does_not_hold_up_one_that_may(run, slurm, again, monkeypatch):
    """AllocNodes=login: the master's pass is refused each time, and cron's is obeyed."""
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 1))

    def from_login(spec):
        if reconcile.node_name() != "login":
            raise Refused("sbatch: Access/permission denied")

    slurm.on_submit = from_login
    monkeypatch.setattr(reconcile, "node_name", lambda: "c1")
    assert did(again()) == []
    monkeypatch.setattr(reconcile, "node_name", lambda: "login")
    assert did(again()) == [("submit", "worker", 1)]
    slurm.becomes("PREEMPTED", ("worker", 2))
    monkeypatch.setattr(reconcile, "node_name", lambda: "c1")
    assert did(again()) == []
    assert again().runs[0].waiting == ["worker 2: worker refused: sbatch: Access/permission denied"]


def test_two_hosts_that_are_refused_leave_each_other_their_pause(run, slurm, again, monkeypatch):
    """Each took the other's refusal for none of its business, and forgot its own: all passes of
    both tried again."""
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 1))
    asked = []

    def refuse(spec):
        asked.append(slurm.now)
        raise Refused("sbatch: Invalid account")

    slurm.on_submit = refuse
    for host in ["c1", "login"] * 120:  # four hours
        monkeypatch.setattr(reconcile, "node_name", lambda host=host: host)
        again(60)
    assert len(asked) < 30
    slurm.on_submit = lambda spec: None
    assert did(again(1900)) == [("submit", "worker", 1)]
    assert notes(run)["memory"]["later_s"] == 0


def test_a_master_that_no_other_node_can_take_is_submitted_for_the_avoided_one(run, slurm, again):
    def refuse(spec):
        asked.append((spec.role, spec.exclude))
        if spec.exclude:
            raise Refused("sbatch: Requested node configuration is not available")

    asked = []
    again()
    slurm.on_submit = refuse
    for _ in range(2):
        master = next(job for job in slurm.listed.values()
                      if job.role == "master" and not job.ended)
        slurm.listed[master.job_id] = replace(master, state="FAILED", node="c1")
        again(10)
        again(120)
    assert asked == [("master", ()), ("master", ("c1",)), ("master", ())]
    assert not run.failed()


def test_a_submit_limit_is_waited_for_and_said_once(run, slurm, again):
    def limit(spec):
        if len(slurm.listed) >= 3:
            raise RetryLater("sbatch: QOSMaxSubmitJobPerUserLimit")

    slurm.on_submit = limit
    assert len(did(again())) == 3
    assert again().lines() == ["run-a: worker 2 and 1 more: sbatch: QOSMaxSubmitJobPerUserLimit"]
    lines = [again(70).lines() for _ in range(4)]
    assert lines == [[]] * 4
    slurm.on_submit = lambda spec: None
    assert len(did(again(70))) == 2


def trains(run, slurm, job: Job) -> None:
    """The trainer's job runs, and is at work on one GPU."""
    record = {"role": "trainer", "slot": 0, "state": "training", "gpus": 1, "time": slurm.now}
    run.jobs.write_ending(job.job_id, record)
    slurm.listed[job.job_id] = replace(job, state="RUNNING", started_at=slurm.now)


def test_a_growth_that_never_comes_true_is_tried_ever_more_seldom(run, slurm, again):
    """Nodes are idle, and a limit of the user's keeps him from them: the job left its GPUs for
    nothing every hour."""
    tried, waiting = [], set()

    def wait_for(job_id, spec):
        tried.append(slurm.now)
        waiting.add(job_id)

    slurm.wait_for, slurm.spare_gpus = wait_for, lambda spec, most: most
    run.set_control(mode="sync")
    for _ in range(30 * 24):  # a day
        again(120)
        for job_id, _ in slurm.cancelled:
            slurm.listed[job_id] = replace(slurm.listed[job_id], state="CANCELLED")
        there = [job for job in slurm.listed.values() if not (job.ended or job.job_id in waiting)]
        if there and not any(job.started for job in there):
            trains(run, slurm, there[0])
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert len(gaps) >= 3
    assert all(after > 1.5 * before for before, after in itertools.pairwise(gaps))


def test_a_limit_of_gpus_is_found_and_tried_again_later(run, slurm, again):
    """On an idle cluster the run waited for ever; and what colleagues used for a while is to be
    had again when they have gone."""
    run.set_control(mode="sync", max=16)
    slurm.spare_gpus = lambda spec, most: 0

    def passes(count: int, most: int) -> list[int]:
        """What trainers had asked for at most, and the GPUs of the one that starts last."""
        for _ in range(count):
            again(120)
            for job_id, _ in slurm.cancelled:
                slurm.listed[job_id] = replace(slurm.listed[job_id], state="CANCELLED")
            asked = slurm.specs[-1].gpus[1]
            there = [job for job in slurm.listed.values() if not job.ended]
            if len(there) == 1 and there[0].state == "PENDING" and asked > most:
                limited = replace(there[0], reason="QOSGrpGRES")
                slurm.listed[there[0].job_id] = limited
            elif len(there) == 1 and there[0].state == "PENDING":
                trains(run, slurm, there[0])
                record = run.jobs.ending(there[0].job_id)
                run.jobs.write_ending(there[0].job_id, record | {"gpus": asked})
        return list(dict.fromkeys(spec.gpus[1] for spec in slurm.specs))

    assert passes(20, most=6) == [16, 12, 9, 7, 5]
    (job,) = [job for job in slurm.listed.values() if job.started]
    slurm.listed[job.job_id] = replace(job, state="PREEMPTED")
    slurm.specs.clear()
    for other in [job for job in slurm.listed.values() if not job.ended]:
        slurm.listed[other.job_id] = replace(other, state="CANCELLED")
    assert passes(4, most=6) == [5], "within the hour it asks for no more"
    assert 16 in passes(40, most=16)


def test_a_growth_of_which_slurm_said_nothing_keeps_no_job_waiting(run, slurm, again):
    """It was carried out: the successor waited for exactly as many nodes, which had gone."""
    waiting = []

    def wait_for(job_id, spec):
        waiting.append(job_id)
        raise TryAgain("scontrol gave no answer in 30 s")

    slurm.wait_for, slurm.spare_gpus = wait_for, lambda spec, most: most
    run.set_control(mode="sync")
    again()
    (job,) = slurm.listed.values()
    trains(run, slurm, job)
    for _ in range(60):
        again(120)
        if waiting:
            break
    slurm.spare_gpus = lambda spec, most: 0
    slurm.listed[job.job_id] = replace(slurm.listed[job.job_id], state="PREEMPTED")
    for _ in range(5):
        again(120)
    assert waiting[0] in {job_id for job_id, _ in slurm.cancelled}


def test_where_nobody_knows_what_is_free_a_trainer_has_its_successor(run, slurm, again):
    """A site showed its nodes to nobody: passes failed as soon as a growth was thought of."""

    def spare_gpus(spec, most):
        raise TryAgain("sinfo failed: slurm_load_node: Access/permission denied")

    slurm.spare_gpus = spare_gpus
    run.set_control(mode="sync")
    again()
    (job,) = slurm.listed.values()
    trains(run, slurm, job)
    report = again(24 * 3600)
    assert (report.unknown, report.errors) == (None, [])
    assert len(slurm.listed) == 2


def test_growths_that_come_true_do_not_wait_for_each_other_ever_longer(run, slurm, again):
    """One more GPU comes free, again and again: the successor starts with it each time."""
    tried, gpus = [], {}

    def wait_for(job_id, spec):
        tried.append(slurm.now)
        gpus[job_id] = spec.gpus[0]

    slurm.wait_for, slurm.spare_gpus = wait_for, lambda spec, most: min(1, most)
    run.set_control(mode="sync", max=9)
    for _ in range(30 * 12):  # half a day
        again(120)
        for job_id in {job_id for job_id, _ in slurm.cancelled}:
            slurm.listed[job_id] = replace(slurm.listed[job_id], state="CANCELLED")
        there = [job for job in slurm.listed.values() if not job.ended]
        if there and not any(job.started for job in there):
            record = {"role": "trainer", "slot": 0, "state": "training",
                      "gpus": gpus.get(there[0].job_id, 1)}
            run.jobs.write_ending(there[0].job_id, {**record, "time": slurm.now})
            slurm.listed[there[0].job_id] = replace(there[0], state="RUNNING", started_at=slurm.now)
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert max(gpus.values()) == 9
    assert max(gaps) < 3 * min(gaps)


# ---- ends


def ending(run, slurm, slot, outcome, **fields):
    place = ("worker", slot)
    (job,) = [job for job in slurm.listed.values() if job.place == place and not job.ended]
    record = {"job_id": job.job_id, "role": "worker", "slot": slot, "state": "ended", "steps": 0}
    times = {"time": slurm.now + 1, "started": slurm.now}
    run.jobs.write_ending(job.job_id, {**record, "outcome": outcome, **times, **fields})
    slurm.listed[job.job_id] = replace(job, state="FAILED")


def test_the_exit_record_tells_how_a_job_ended_once(run, slurm, again):
    until_running(again, slurm)
    ending(run, slurm, 2, "yielded", reason="notice SIGTERM", steps=7)
    assert did(again()) == [("submit", "worker", 2)]
    (end,) = [event for event in run.events() if event["kind"] == "end"]
    assert (end["slot"], end["outcome"], end["reason"]) == (2, "yielded", "notice SIGTERM")
    again()
    assert kinds(run).count("end") == 1


@pytest.mark.parametrize("outcome", ["yielded", "failed"])
@pytest.mark.parametrize("place", [("master", 0), ("worker", 2)])
def test_a_job_whose_epilog_hangs_is_over_by_its_own_word(run, slurm, again, place, outcome):
    """It may be COMPLETING until somebody mends its node; without a master the run would wait for
    that. Its end is told once, whatever Slurm says of it later."""
    until_running(again, slurm)
    (stuck,) = [job for job in slurm.listed.values() if job.place == place]
    record = {"role": place[0], "slot": place[1], "state": "ended", "outcome": outcome}
    run.jobs.write_ending(stuck.job_id, {**record, "reason": "SIGTERM", "time": slurm.now})
    slurm.becomes("COMPLETING", place)
    assert did(again(60)) == []
    done = did(again(61))
    done += did(again(40))  # after a failure it is waited a little
    assert done == [("submit", *place)]
    assert did(again(600)) == []
    slurm.listed[stuck.job_id] = replace(stuck, state="FAILED")
    assert did(again(600)) == []
    slurm.listed.pop(stuck.job_id)
    assert did(again(600)) == []
    ends = [each for each in run.events() if each["kind"] == "end"]
    assert [(end["job_id"], end["outcome"]) for end in ends] == [(stuck.job_id, outcome)]


def leaves_without_a_word(run, slurm, job):
    """It was killed, and is COMPLETING: a process of it waits for a disk, and cannot be killed."""
    record = {"role": job.role, "slot": job.slot, "state": "training", "time": slurm.now}
    run.jobs.write_ending(job.job_id, record)
    slurm.listed[job.job_id] = replace(job, state="COMPLETING", ended_at=slurm.now)


@pytest.mark.parametrize("place", [("master", 0), ("worker", 2)])
def test_a_job_that_can_not_be_killed_is_over_a_while_after_its_end(run, slurm, again, place):
    until_running(again, slurm)
    (stuck,) = [job for job in slurm.listed.values() if job.place == place]
    leaves_without_a_word(run, slurm, stuck)
    assert did(again(299)) == []
    assert did(again(1)) == [("submit", *place)]
    slurm.listed[stuck.job_id] = replace(stuck, state="PREEMPTED")
    assert did(again(600)) == []
    ends = [each for each in run.events() if each["kind"] == "end"]
    assert [(end["job_id"], end["outcome"]) for end in ends] == [(stuck.job_id, "killed")]


def test_the_successor_of_a_trainer_that_can_not_be_killed_has_one_of_its_own(run, slurm, again):
    """`singleton` does not wait for who is COMPLETING; the run had no third job, ever."""
    run.set_control(mode="sync")
    until_running(again, slurm)
    slurm.becomes("RUNNING")
    leaves_without_a_word(run, slurm, slurm.listed["100"])
    assert did(again(299)) == []
    assert did(again(1)) == [("submit", "trainer", 0)]


def test_a_job_whose_epilog_hangs_does_not_keep_a_stopped_run_open(run, slurm, again):
    until_running(again, slurm)
    run.set_control(state="stopped")
    again()
    for job in list(slurm.listed.values()):
        record = {"role": job.role, "slot": job.slot, "state": "ended", "outcome": "stopped"}
        run.jobs.write_ending(job.job_id, {**record, "reason": "stopped", "time": slurm.now})
    slurm.becomes("COMPLETING")
    again(600)
    asked = slurm.asked
    assert again(600).runs == []
    assert slurm.asked == asked


def unreadable(monkeypatch, name):
    """Files of this name, or in a folder of it, cannot be read for now."""
    monkeypatch.setattr("elastic.base.durable.AGAIN_S", ())
    real = Path.read_bytes

    def stale(self):
        if name in (self.name, self.parent.name):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", stale)


def test_a_word_that_cannot_be_read_now_is_waited_for(run, slurm, again, monkeypatch):
    """A network filesystem fails now and then: a clean end would be a crash for good."""
    until_running(again, slurm)
    ending(run, slurm, 2, "yielded", reason="notice SIGTERM", steps=7)
    before = notes(run)
    with monkeypatch.context() as patch:
        unreadable(patch, "exit")
        report = again()
    assert (did(report), report.errors, notes(run)) == ([], [], before)
    assert "fails for now" in report.unknown
    assert did(again()) == [("submit", "worker", 2)]
    assert [each["outcome"] for each in run.events() if each["kind"] == "end"] == ["yielded"]


def test_notes_that_cannot_be_read_now_are_not_those_of_a_new_run(run, slurm, again, monkeypatch):
    """A new run whose first job is refused has failed; one that is at work waits."""
    until_running(again, slurm)
    slurm.becomes("PREEMPTED", ("worker", 2))

    def refuse(spec):
        raise Refused("sbatch: Access/permission denied")

    slurm.on_submit = refuse
    with monkeypatch.context() as patch:
        unreadable(patch, "reconcile.json")
        report = again()
    assert (did(report), report.errors) == ([], [])
    assert "fails for now" in report.unknown
    again()
    assert run.failed() is None


@pytest.mark.parametrize("lasted_s", [1, 2400])
def test_a_crash_loop_ends_the_run_with_the_last_log_lines(run, slurm, again, lasted_s):
    """Also one of jobs that hang: each is found out in ten minutes, and tried again twice."""
    def fail() -> None:
        words = {"reason": "exit 1", "detail": "ValueError: step 3"}
        ending(run, slurm, 0, "failed", **words, started=slurm.now - lasted_s)

    run.set_control(max=1)
    until_running(again, slurm)
    for pause in (30, 60):
        fail()
        assert did(again(1)) == []
        assert did(again(pause - 1)) == []
        assert did(again(2)) == [("submit", "worker", 0)]
        slurm.becomes("RUNNING")
        again(1)
    fail()
    report = again(1)
    assert report.lines() == ["run-a: failed: worker 0 failed 3 times in a row: exit 1"]
    assert run.failed()["detail"] == "ValueError: step 3"
    assert kinds(run)[-1] == "fail"
    slurm.becomes("CANCELLED")
    assert did(again(200)) == []
    run.clear_failed()
    assert did(again()) == [("submit", "master", 0), ("submit", "worker", 0)]


def test_a_reason_to_wait_is_said_when_it_changes(run, slurm, again):
    run.set_control(max=1)
    until_running(again, slurm)
    ending(run, slurm, 0, "failed", reason="exit 1")
    assert again(1).lines() == ["run-a: worker 0: waits 30 s after failure 1: exit 1"]
    assert again(1).lines() == []
    assert again(1).runs[0].waiting == ["worker 0: waits 30 s after failure 1: exit 1"]


def test_a_run_that_is_over_is_looked_after_until_its_last_job_is_gone_then_never_again(
    run, slurm, again
):
    until_running(again, slurm)
    run.mark_done({"reason": "all tokens trained"})
    assert did(again()) == []
    assert len(did(again(run.config().health.hang_timeout_s + 60))) == 4
    slurm.becomes("CANCELLED", *(("worker", slot) for slot in range(4)))
    assert did(again(run.config().health.hang_timeout_s + 60)) == [("cancel", "master", 0)]
    slurm.becomes("COMPLETED")
    again()
    asked = slurm.asked
    assert again().lines() == []
    assert slurm.asked == asked, "nothing to look after: the scheduler is left in peace"


def test_stop_and_start_again(run, slurm, again):
    until_running(again, slurm)
    run.set_control(state="stopped")
    assert did(again()) == []
    assert len(did(again(run.config().health.hang_timeout_s + 60))) == 4
    slurm.becomes("CANCELLED")
    again()
    run.set_control(state="running")
    assert len(did(again())) == 5


def test_one_broken_run_does_not_keep_the_others_waiting(make_run, run, slurm, again):
    broken, fine = make_run(name="broken"), make_run(name="fine")
    (broken.path / "control.json").write_text("{")
    gone = make_run(name="gone")
    for path in (gone.path / "control.json", gone.path / "run.toml"):
        path.unlink()
    report = again(runs=[broken, gone, fine])
    assert len(did(report)) == 5
    assert [line.split(":")[0] for line in report.errors] == ["broken", "gone"]
    assert report.lines()[:2] == report.errors


def test_a_pass_over_a_copy_of_a_run_does_not_touch_its_jobs(run, slurm, again):
    again()
    copy = run.path.parent / "elsewhere" / run.name
    shutil.copytree(run.path, copy)
    RunDir(copy).set_control(state="stopped")
    report = again(runs=[RunDir(copy)])
    assert (did(report), slurm.cancelled) == ([], [])
    assert f"run name taken: {run.name!r} is {run.path}" in report.errors[0]


def test_a_run_that_cannot_keep_its_notes_is_named_and_the_others_keep_theirs(
    make_run, slurm, again, monkeypatch
):
    broken, fine = make_run(name="broken"), make_run(name="fine")
    slurm.silent, real = True, reconcile.write_atomic

    def full(path, data):
        if path.parent == broken.path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        real(path, data)

    monkeypatch.setattr(reconcile, "write_atomic", full)
    report = again(runs=[fine, broken])
    assert [line.split(":")[0] for line in report.errors] == ["broken"]
    assert "nothing done: squeue: Socket timed out" in report.lines()


def test_runs_on_a_dead_server_keep_no_other_waiting(make_run):
    """One cron line passes over all runs of a user."""
    runs = [make_run("elastic.max=1", name=name) for name in ("hung", "hung-too", "other")]
    for run in runs[:2]:
        (run.path / "control.json").unlink()
        os.mkfifo(run.path / "control.json")  # who reads it waits for ever
    runs[2].mark_done({"reason": "enough"})
    code = "from elastic.run import rundir; rundir.LOOK_S = 3;"
    code += "from elastic.commands.main import elastic; elastic(['reconcile'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, timeout=30 * PATIENCE)
    why = "the filesystem has not answered for 3 s"
    assert done.stdout == f"nothing done: hung: {why}; hung-too: {why}\n"
    assert (done.returncode, done.stderr) == (75, "")
    with open(runs[2].path / reconcile.LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_pass_that_cannot_note_its_time_is_made(run, slurm, again, monkeypatch):
    def full(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "utime", full)
    report = again()
    assert (len(did(report)), report.errors) == (5, [])


def test_every_run_is_looked_for_on_the_cluster_it_was_submitted_to(make_run, slurm):
    """Whatever SLURM_CONF cron has. A cluster that is gone keeps no run of another one waiting."""
    runs = {name: make_run("run.scheduler=slurm", "slurm.partition=p", name=name) for name in "abc"}
    for name, cluster in zip(runs, ("gone", "here", "here"), strict=True):
        (runs[name].path / "environment.json").write_text(json.dumps({"SLURM_CONF": cluster}))
    clusters = {"gone": Answers(), "here": slurm}
    clusters["gone"].silent = True

    def scheduler(config, environment):
        return clusters[environment["SLURM_CONF"]]

    report = run_pass(list(runs.values()), NOW, scheduler=scheduler)
    assert ([each.run for each in report.runs], slurm.asked) == (["b", "c"], 1)
    assert (len(did(report)), report.unknown) == (10, "squeue: Socket timed out")


def test_a_pass_on_another_cluster_changes_nothing_and_says_nothing(run, slurm, again):
    """Both have the user's home, and a crontab: it would mail all day."""
    until_running(again, slurm)
    before, at = notes(run), run.path / reconcile.LOCK
    os.utime(at, (1, 1))

    def elsewhere(within_s):
        raise Elsewhere("this is cluster a, and the run's jobs are on b")

    slurm.jobs = elsewhere
    report = again(600)
    assert (report.lines(), report.runs, notes(run)) == ([], [], before)
    assert "the run's jobs are on b" in report.unknown
    assert at.stat().st_mtime == 1  # status went on to say that the run's own passes do come
    del slurm.jobs
    again(600)
    assert at.stat().st_mtime > 1


# ---- many passes at once, for real

PASSES = """
import sys, time
from pathlib import Path
from elastic.jobs import sched_local
from elastic.jobs.reconcile import run_pass
from elastic.run.rundir import RunDir
run, state = map(Path, sys.argv[1:3])
def scheduler(config, environment):
    return sched_local.LocalScheduler(config, state)
print("ready", flush=True)
while True:
    report = run_pass([RunDir(run)], time.time(), scheduler=scheduler)
    assert not report.errors, report.errors
    time.sleep(0.01)
"""


@contextlib.contextmanager
def passes(run, home):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    command = [sys.executable, "-c", PASSES, str(run.path), str(home / "state")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def local(make_run, home):
    """A run of four workers on the local scheduler whose jobs write exit records and sleep."""
    run = make_run("local_scheduler.grace=1s", "elastic.backoff=1s", name="local")
    (home / "bin").mkdir()
    path = home / "bin" / "elastic"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = agent ] && role=worker || role=master\n'
        """printf '{"role": "%s", "slot": %s, "state": "started", "time": %s}' """
        '"$role" "${3:-0}" "$(date +%s)" > "$2/exit/$ELASTIC_JOB_ID.new"\n'
        'mv "$2/exit/$ELASTIC_JOB_ID.new" "$2/exit/$ELASTIC_JOB_ID.json"\n'
        "while :; do sleep 0.05; done\n"
    )
    path.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "ELASTIC_HOME": str(home)}
    run.environment = lambda: environment
    (run.path / "environment.json").write_text(json.dumps(environment))
    scheduler = LocalScheduler(run.config(), home / "state")
    yield run, scheduler
    for job in scheduler.jobs():
        scheduler.cancel(job.job_id, kill=True)
    left = (sched_local.MARK, scheduler.state)
    wait_until(lambda: not proc.families(*left), 10, "nothing is left behind")


def test_many_passes_at_once_some_killed_make_one_job_per_place(local, home):
    run, scheduler = local
    rng = random.Random(3)
    everyone = [("master", 0), *(("worker", slot) for slot in range(4))]

    def live():
        jobs = [job for job in scheduler.jobs() if not job.ended]
        places = Counter(job.place for job in jobs)
        assert not places or max(places.values()) == 1, places
        return jobs

    with passes(run, home), passes(run, home):
        for _ in range(6):
            with passes(run, home) as third:
                jobs = live()
                if len(jobs) > 2:
                    scheduler.kill(rng.choice(jobs).job_id)
                time.sleep(rng.uniform(0, 0.3))
                live()
                third.send_signal(SIGKILL)

        def complete():
            running = [j.place for j in live() if j.state == "RUNNING"]
            return sorted(running) == everyone

        wait_until(complete, 90, "a master and four workers")
    assert run.failed() is None


def test_a_control_that_says_stop_empties_the_local_scheduler(local, home):
    run, scheduler = local

    def again(now):
        return run_pass([run], now, scheduler=lambda *_: scheduler)

    assert len(did(again(time.time()))) == 5
    run.set_control(state="stopped", min=1)
    assert run.control() == Control("local", "stopped", 1, 4)
    again(time.time())
    again(time.time() + run.config().health.hang_timeout_s + 130)
    wait_until(lambda: all(job.ended for job in scheduler.jobs()), 10, "all jobs end")
