"""Waits that follow what a run measures and what the scheduler's notice leaves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastic.base.signals import Notice
from elastic.jobs.history import Job
from elastic.jobs.reconcile import run_pass
from elastic.jobs.sched import JobSpec
from elastic.jobs.sched_slurm import sbatch_argv
from elastic.local.master.master import Master
from elastic.local.master.samples import Samples
from elastic.local.worker.agent import SILENT, Agent, Training
from elastic.run import membership
from elastic.run.membership import Slot
from elastic.run.rundir import Control, RunDir
from helpers import PATIENCE, ROOT, commit_of, delta_of, wait_until
from running import running

HEALTH = SimpleNamespace(lease_s=15.0, hang_timeout_s=600.0, stall_after_s=60.0, heartbeat_s=5.0)


def notice_of(ago_s: float, window_s: float) -> Notice:
    notice = Notice()
    notice.since, notice.window_s = time.time() - ago_s, window_s
    return notice


@pytest.mark.parametrize(
    ("ago_s", "window_s", "has_run_out"),
    [(1.0, 30.0, False), (29.0, 30.0, True), (29.0, 600.0, False), (599.0, 600.0, True)],
)
def test_a_worker_tries_to_deliver_for_as_long_as_its_notice_leaves(ago_s, window_s, has_run_out):
    assert notice_of(ago_s, window_s).has_run_out() == has_run_out
    assert not Notice().has_run_out()


def test_an_agent_leaves_a_trainer_that_moves_to_the_scheduler(make_run):
    """The step that is under way at the notice takes 45 s; the grace is ten minutes."""
    one = Agent(make_run(), 0, notice_of(45.0, 600.0))
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            now = time.monotonic()
            said = SILENT | {"state": "training", "step": 3}
            training = Training([process], -1, said, moved=now - 45, heard=now - 45)
            one.lease = SimpleNamespace(store=True)
            one.kill_if_hung(training)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        finally:
            process.kill()


def a_slot(state: str, moved: float) -> Slot:
    return Slot(0, 1, "7", "n", 1, state, 5, 3, 3, 0.0, 0.0, beat=moved, moved=moved, joined=0.0)


@pytest.mark.parametrize(
    ("step_s", "still_s", "expected"),
    [(0.0, 59.0, "training"), (0.0, 61.0, "stalled"), (1.0, 61.0, "stalled"),
     (90.0, 269.0, "training"), (90.0, 271.0, "stalled")],
)
def test_a_worker_whose_steps_are_long_is_not_stalled_in_one(step_s, still_s, expected):
    """With steps of 90 s rounds closed without it, and status called it stalled."""
    slot = replace(a_slot("training", 100.0), step_s=step_s)
    assert membership.state(slot, 100.0 + still_s, 60.0) == expected


def test_a_worker_says_how_long_its_steps_take_also_after_steps_ahead(tmp_path):
    """Then it said far too little. A step is of four samples."""
    settings = {"elastic.max": 1, "local_sgd.inner_steps": 8, "local_sgd.overlap": "rebase",
                "local_sgd.min_deadline": "30s"}
    with running(tmp_path, settings, samples=10**6, step_s=0.2) as run:
        said = set()

        def has_trained() -> bool:
            said.update(slot for slot in run.slots().values() if slot.steps_total > 1)
            return run.version >= 4

        run.until(has_trained, 60, "version 4")
    assert min(slot.step_s for slot in said) >= 0.2
    assert min(slot.tokens_per_s for slot in said) > 0
    assert max(slot.tokens_per_s for slot in said) <= 4 / 0.2


@pytest.fixture
def master() -> Master:
    one = Master.__new__(Master)
    one.config = SimpleNamespace(health=HEALTH)
    one.intake = SimpleNamespace(checks={}, round=SimpleNamespace(accepted={}))
    one.state, one.ending_since = "stopping", 100.0
    return one


@pytest.mark.parametrize(
    ("state", "slot", "waited_s", "over"),
    [
        ("stopping", a_slot("training", 100.0), 30.0, False),  # a step of 35 s
        ("stopping", a_slot("delivering", 100.0), 300.0, False),
        ("stopping", a_slot("waiting", 10.0), 30.0, False),  # for samples, with steps done
        ("stopping", a_slot("training", 10.0), 601.0, True),  # it hangs: its agent ends it
        ("stopping", a_slot("loading", 100.0), 1.0, True),  # there is nothing to deliver
        ("done", a_slot("training", 100.0), 10.0, False),
        ("done", a_slot("training", 100.0), 16.0, True),  # of no use
    ],
)
def test_at_a_stop_the_master_waits_for_whoever_beats_and_moves(
    master, state, slot, waited_s, over
):
    master.state = state
    master.finish_if_over({0: slot}, 100.0 + waited_s)
    assert (master.state == "over") == over


def test_at_a_stop_one_damaged_delta_does_not_cost_the_others(master):
    """The first try finds it, as its bytes went bad after they were checked."""
    accepted, merged = master.intake.round.accepted, []
    accepted |= {"good": 1, "bad": 2}

    def close(_why: str) -> None:
        if accepted.pop("bad", None):
            return
        merged.append(dict(accepted))
        master.intake = SimpleNamespace(checks={}, round=SimpleNamespace(accepted={}))

    master.close_round = close
    for _ in range(3):
        master.finish_if_over({}, 101.0)
    assert (merged, master.state) == ([{"good": 1}], "over")


def settling() -> Samples:
    one = Samples()
    one.begin(commit_of(dataset_samples=100, epochs=1))
    one.shut(1000.0, (delta_of(seconds=350.0, steps=10),), HEALTH)
    return one


def test_a_new_master_waits_for_whoever_may_hold_samples_and_no_longer():
    one, slots = settling(), {0: a_slot("training", 990.0)}
    one.open_early(slots, 1035.0)
    assert one.open_at > 1035.0, "in the middle of its step of 35 s"
    one.hear((0, 1), 1, [])
    one.open_early(slots, 1005.0)
    assert one.open_at > 1011.0, "others may not have claimed their leases yet"
    one.open_early(slots, 1036.0)
    assert one.open_at == 1036.0
    one = settling()
    one.open_early({0: a_slot("loading", 990.0)}, 1012.0)
    assert one.open_at == 1012.0, "it holds none"


def test_a_notice_that_is_too_short_is_reported_before_and_after_it_came(tmp_path):
    """Also in rounds of one step, of which a worker did not say how long they take."""
    settings = {"elastic.max": 1, "local_scheduler.grace": "1s", "local_sgd.inner_steps": 1}
    with running(tmp_path, settings, step_s=1.5, samples=2000) as run:
        def warnings() -> list[dict]:
            return [e for e in run.events("warning") if "notice of 1 s is too short" in e["reason"]]

        warning = run.until(warnings, 60, "a warning")[0]
        assert "take" in warning["reason"]
        slot = run.slot(warning["slot"])
        assert slot.step_s >= 1.5
        assert 0 < slot.tokens_per_s <= 2.7  # a step is of four samples
        job_id = run.jobs()["worker", slot.slot].job_id
        run.scheduler.preempt(job_id, 8)  # this machine may be too busy for a word in one second

        def last_word() -> dict | None:
            found = run.run.jobs.ending(job_id)
            return found if "too short" in found.get("reason", "") else None

        word = run.until(last_word, 30, "a word in the exit record")
        assert word["state"] in ("leaving", "ended")
        run.pace(0)


def test_a_worker_without_a_master_leaves_its_gpus(tmp_path):
    """It held them without bound while the next one waited in a long queue."""
    settings = {"elastic.max": 1, "health.master_wait": "3s", "local_sgd.inner_steps": 10,
                "local_scheduler.grace": "6s"}
    with running(tmp_path, settings, samples=1200) as run:
        run.workers(1)
        run.versions(2)
        job_id = run.jobs()["worker", 0].job_id
        run.hold()  # it has heard of the newest version
        run.kill("master")  # and no pass brings another one
        run.go_on()
        wait_until(lambda: run.run.jobs.ending(job_id)["state"] == "ended", 40, "the worker leaves")
        record = run.run.jobs.ending(job_id)
        assert record["outcome"] == "yielded"
        assert re.fullmatch(r"no master for \d+ s \(health.master_wait\)", record["reason"])
        base = run.version
        run.versions(1)  # by the next one, which no worker has told of it
        deltas = run.run.commits.of(base + 1).deltas
        assert record["attempt"] in [delta.attempt for delta in deltas]
        run.audit()


def test_a_notice_while_the_master_is_silent_costs_no_step(tmp_path):
    """Its node was off the network: the worker went on to offer its delta until it was killed."""
    settings = {"elastic.max": 1, "local_sgd.inner_steps": 10, "local_scheduler.grace": "10s"}
    with running(tmp_path, settings, samples=1200) as run:
        run.workers(1)
        run.versions(2)
        job_id = run.jobs()["worker", 0].job_id
        run.hold()
        silent = [*run.pids("master"), *run.pids("redis")]
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        run.go_on()
        run.scheduler.preempt(job_id, 20)  # this machine may be too busy for ten seconds
        wait_until(lambda: run.run.jobs.ending(job_id)["state"] == "ended", 40, "the worker leaves")
        record = run.run.jobs.ending(job_id)
        assert (record["outcome"], record["steps"] > 0) == ("yielded", True)
        for pid in silent:
            os.kill(pid, signal.SIGCONT)
        run.workers(1)
        base = run.version
        run.versions(1)
        merged = [delta.attempt for number in range(base, run.version + 1)
                  for delta in run.run.commits.of(number).deltas]
        assert record["attempt"] in merged
        run.audit()


EVALUATES = """
import sys, time
sys.path.append(sys.argv.pop(1))
import own_loop

own_loop.main(*sys.argv[1:])
time.sleep(6)
print("evaluated", flush=True)
"""


def test_a_loop_that_has_ended_may_go_on_without_a_master(tmp_path):
    """Its evaluation was ended as if it waited, and recorded as a preemption."""
    program = [sys.executable, "-c", EVALUATES, str(ROOT / "tests")]
    settings = {"run.command": [*program, str(tmp_path / "pace"), "400"], "elastic.max": 1,
                "health.master_wait": "3s"}
    with running(tmp_path, settings, samples=400) as run:
        run.workers(1)
        run.versions(2)
        job_id = run.jobs()["worker", 0].job_id
        run.pace(0)
        record = run.ended(job_id)
        assert (record["outcome"], record["code"]) == ("done", 0)
        assert "evaluated" in run.run.log_path("worker", 0).read_text()
        warned = [each["reason"] for each in run.events("warning") if each["job_id"] == job_id]
        assert not [reason for reason in warned if "no master" in reason]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this node is fit")
def test_a_node_that_is_not_fit_is_left_and_the_run_goes_on_elsewhere(tmp_path):
    """A GPU that had fallen off the bus failed the whole run, before others had a version."""
    with running(tmp_path, {"train.device": "cuda", "elastic.max": 1}) as run:
        job_id = run.jobs()["worker", 0].job_id
        record = run.ended(job_id)
        assert record["outcome"] == "failed"
        assert "can use no GPU of this node" in record["reason"]
        assert not run.events("restart")
        assert run.run.failed() is None


def test_workers_wait_in_the_queue_for_a_master_that_is_there(tmp_path, make_config):
    control = Control("local", "running", 1, 1)
    run = RunDir.create(tmp_path, make_config("elastic.max=1"), control, {})
    asked = []

    class Queue:
        """Jobs that wait."""

        def jobs(self, within_s: float = 0.0) -> list[Job]:
            return [Job(str(n), spec.role, spec.slot, "PENDING", run=spec.run)
                    for n, spec in enumerate(asked, 1)]

        def submit(self, spec: JobSpec) -> str:
            asked.append(spec)
            return str(len(asked))

    run_pass([run], time.time(), scheduler=lambda *_: Queue())
    assert [(spec.role, spec.after) for spec in asked] == [("master", ""), ("worker", "1")]
    assert "--dependency=singleton,after:1" in sbatch_argv(asked[1], tmp_path, "python3")


@pytest.mark.parametrize(("kill_after_s", "window_s"), [
    (300.0, 300.0),  # slurm.signal has warned of the time limit
    (86_400.0, 30.0),  # a pass has told the job to leave: Slurm would end it tomorrow
    (None, 30.0),  # Slurm does not say
])
def test_slurm_is_asked_once_half_way_to_the_end_of_a_notice(kill_after_s, window_s):
    notice, asked = Notice(), []
    assert not notice.has_run_out()
    notice.since, answered = time.time() - 10.0, threading.Event()

    def ask() -> float | None:
        asked.append(notice.since)
        answered.set()
        return kill_after_s and notice.since + kill_after_s

    notice.ask = ask
    assert (notice.has_run_out(), asked) == (False, [])
    notice.since -= 10.0
    assert not notice.has_run_out()
    assert answered.wait(10 * PATIENCE)
    wait_until(lambda: notice.window_s == pytest.approx(window_s), 10, "the answer counts")
    notice.since -= 15.0
    assert notice.has_run_out() == (window_s < 60)
    assert len(asked) == 1
