"""Processes are killed, stopped and told to go, at many moments: nothing committed is lost.

Most tests share one run and leave it as they found it: two workers, training. At the end no sample
may have been committed twice; a run that has to end complete is further below.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.people import status
from elastic.run.membership import Slot
from elastic.run.records import Delta
from helpers import elastic, environment, wait_until
from running import TESTS, Running, members, running, second_master

TWO = {"elastic.max": 2, "elastic.max_failures": 50}
PACE_S = 0.06  # of an inner step: faster than this, commits alone keep a core busy


# ---- one run, many faults -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Running]:
    settings = {
        **TWO, "local_sgd.inner_steps": 10, "local_sgd.min_deadline": "20s",
        "local_sgd.inner_state_max_age": 1000, "health.stall_after": "4s",
        # A new server waits for two heartbeats and a second before it takes a lease for lost.
        "health.heartbeat": "0.5s", "health.lease": "6s",
    }
    home = tmp_path_factory.mktemp("shared")
    with running(home, settings, samples=1_000_000, step_s=PACE_S) as run:
        yield run
        run.pace(2)  # so that nothing is pruned while it is looked at
        run.audit()


@pytest.fixture
def run(shared: Running) -> Iterator[Running]:
    """The shared run with both workers in training."""
    shared.even_pace()
    for pid in shared.pids("trainer"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    shared.workers(2)
    shared.versions(1)
    shared.witness()
    yield shared
    shared.witness()


def deltas_after(run: Running, version: int) -> list[dict]:
    commits = [run.run.commits.of(number) for number in range(version + 1, run.version + 1)]
    return [delta for commit in commits for delta in commit.deltas]


def delta_waits(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # pruned while looking
        return any(folder.glob("*/*"))
    return False


def moment(draw: random.Random, run: Running) -> None:
    """Wait for a moment of the run: any one, or one of those when something is half done."""
    kind = draw.choice(["any", "any", "commit", "draft", "delta"])
    seen = {"commit": lambda: run.run.commits.path(version + 1).exists(),
            "draft": lambda: any((run.run.path / "versions").glob(".*")),
            "delta": lambda: delta_waits(run.run.path / "deltas")}
    delay_s, version = draw.uniform(0, 1.0), run.version
    deadline = time.monotonic() + (delay_s if kind == "any" else 3.0)
    while time.monotonic() < deadline and not (kind != "any" and seen[kind]()):
        time.sleep(0.001)
    time.sleep(0 if kind == "any" else draw.uniform(0, 0.03))


def test_any_process_may_be_killed_at_any_moment(run: Running):
    draw, epoch = random.Random(2), run.run.masters.newest()
    victims = ["trainer", "agent", "master", "redis"]
    draw.shuffle(victims)
    for victim in victims:
        run.witness()
        moment(draw, run)
        trainers = set(run.pids("trainer"))
        pid = run.kill(victim)
        survivors = trainers - {pid} - (trainers if victim == "agent" else set())
        run.versions(1)
        assert survivors <= set(run.pids("trainer")), f"{victim} took others with it"
    assert run.run.masters.newest() > epoch


def test_a_flushed_redis_costs_no_process_and_no_commit(run: Running):
    draw, trainers, epoch = random.Random(4), set(run.pids("trainer")), run.run.masters.newest()
    for _ in range(3):
        moment(draw, run)
        run.flush()
        run.versions(1)
    assert set(run.pids("trainer")) == trainers
    assert run.run.masters.newest() == epoch


@pytest.mark.parametrize("fault", ["killed", "flushed", "silent"])
def test_a_round_waits_for_those_whose_leases_a_redis_took_with_it(run: Running, fault: str):
    """They train on, and none of their work is lost, nor are their samples given to others."""
    before = len(run.run.events())
    run.pace(0.6, slot=1)
    run.until(lambda: _begins_a_round(run, slot=1), 60, "slot 1 has begun a round")
    version = run.version
    run.until(lambda: any(e["base"] == version and e["slot"] == 0 for e in run.events("delta")),
              30, "slot 0 has delivered")
    if fault == "killed":
        run.kill("redis")
    elif fault == "flushed":
        run.flush()
    else:
        server = run.kill("redis", signal.SIGSTOP)
        time.sleep(run.config.health.lease_s + 1)
        os.kill(server, signal.SIGCONT)
    run.until(lambda: run.version > version, 60, "the round closes")
    run.even_pace()
    slots = {delta.slot for delta in run.run.commits.of(version + 1).deltas}
    assert slots == {0, 1}, run.story()
    run.versions(2)
    bad = [e for e in run.run.events()[before:] if e["kind"] in ("lost", "reject")]
    if fault == "flushed":  # with the bytes of slot 0's delta, so that it trained the round again
        bad = [e for e in bad if not e.get("reason", "").startswith("unreadable")]
    assert not bad, run.story()


@pytest.mark.parametrize("state", ["training", "waiting"])
def test_a_stopped_trainer_is_stalled_and_the_round_goes_on_without_it(run: Running, state: str):
    run.pace(0.3, slot=1 if state == "waiting" else 0)
    pid = run.trainer_of(0)
    run.until(lambda: run.slots()[0].state == state, 30, f"slot 0 is {state}")
    os.kill(pid, signal.SIGSTOP)

    def states() -> dict[int, str]:
        return {w["slot"]: w["state"] for w in status.observe(run.run)["workers"]}

    run.until(lambda: states().get(0) == "stalled", 30, "slot 0 is seen as stalled")
    run.versions(3)
    assert {delta.slot for delta in run.run.commits.of(run.version).deltas} == {1}
    os.kill(pid, signal.SIGCONT)
    run.even_pace()
    before = run.version
    run.until(lambda: any(d.slot == 0 for d in deltas_after(run, before)), 30, "slot 0 trains")
    assert run.trainer_of(0) == pid


def test_a_master_that_hangs_is_told_of_and_nobody_stays_with_its_redis(run: Running):
    """As on a node whose filesystem hangs: its Redis answers, and so nobody looked for another."""
    hanging, older = run.pids("master")[0], run.jobs()["master", 0].job_id
    trainers = set(run.pids("trainer"))

    def reason() -> str:
        return status.observe(run.run)["reason"]

    os.kill(hanging, signal.SIGSTOP)
    run.until(lambda: "the master has stood still for" in reason(), 30, "status tells it")
    assert f"end its job {older}" in reason()
    second = second_master(run)
    try:
        run.versions(3)
        assert set(run.pids("trainer")) == trainers
        assert "stood still" not in reason()
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert run.ended(older)["outcome"] == "fenced"
    run.until(lambda: second.poll() is not None, 60, "the one that was started by hand is fenced")
    run.versions(1)


def test_steps_of_a_worker_told_to_go_count_and_its_slot_keeps_its_inner_state(run: Running):
    """Its successor is told to go while it loads, which is no crash either."""
    other, before = run.trainer_of(1), len(run.events("preempt"))
    run.pace(0.8, slot=0)
    run.until(lambda: 1 <= run.slots()[0].step <= 2, 60, "slot 0 is in the middle of a round")
    slot, job = run.slot(0), run.jobs()["worker", 0]
    run.scheduler.preempt(job.job_id)
    record = run.ended(job.job_id)
    assert (record["outcome"], record["code"]) == ("yielded", 0)
    run.even_pace()
    successor = run.until(lambda: _loading(run), 30, "a trainer that loads")
    run.scheduler.preempt(successor)
    assert run.ended(successor)["outcome"] == "yielded"
    run.until(lambda: run.version > slot.version, 60, "the round closes")
    delta = next(d for d in run.run.commits.of(slot.version + 1).deltas if d.slot == 0)
    assert slot.step <= delta.steps < 10
    assert delta.tokens == delta.steps * 4
    assert {event["slot"] for event in run.events("preempt")[before:]} == {0}

    def heir() -> Delta | None:
        deltas = deltas_after(run, slot.version)
        return next((d for d in deltas if d.slot == 0 and d.attempt > slot.attempt), None)

    assert run.until(heir, 60, "the next attempt").inner == f"own of version {slot.version}"
    assert run.trainer_of(1) == other


def _loading(run: Running) -> str | None:
    return next((slot.job_id for slot in run.slots().values() if slot.state == "loading"), None)


def test_what_a_worker_that_left_while_it_waited_has_delivered_survives_its_master(run: Running):
    other = run.trainer_of(1)
    run.pace(2.0, slot=1)
    run.until(lambda: _begins_a_round(run, slot=1), 60, "slot 1 has begun a round")
    slot = run.until(lambda: _waits_for_slot_1(run), 30, "slot 0 waits for slot 1")
    job = run.jobs()["worker", 0]
    run.scheduler.preempt(job.job_id)
    assert run.ended(job.job_id)["outcome"] == "yielded"
    run.kill("master")
    assert run.version == slot.version
    run.even_pace()
    run.until(lambda: run.version > slot.version, 60, "the round closes")
    deltas = run.run.commits.of(slot.version + 1).deltas
    mine = [d for d in deltas if (d.slot, d.attempt) == (0, slot.attempt)]
    assert [delta.steps for delta in mine] == [10]
    assert run.trainer_of(1) == other


def _begins_a_round(run: Running, slot: int) -> bool:
    begun = run.slots()[slot]
    return begun.step in (1, 2) and begun.version == run.version


def _waits_for_slot_1(run: Running) -> Slot | None:
    """Slot 0, if it has delivered what it has trained on the newest version, and slot 1 has not."""
    slots, newest = run.slots(), run.version
    there = [(slots[number].state, slots[number].version) for number in (0, 1)]
    return slots[0] if there == [("waiting", newest), ("training", newest)] else None


def test_an_old_attempt_that_comes_back_after_a_flush_does_not_stop_the_run(run: Running):
    """It may claim the slot in the moment before the master says again which attempt is newest."""
    run.run.slots.claim(2, {"job_id": "old"})
    run.run.slots.claim(2, {"job_id": "new"})
    fields = {"job_id": "", "node": "", "pid": 0, "state": "loading", "version": -1, "step": 0,
              "steps_total": 0, "loss": 0, "tokens_per_s": 0}
    with run.store() as store:
        assert store.lease(2, 2, fields, 0.5)
        run.versions(1)
        run.flush()
        store.lease(2, 1, fields, 0.5)
        run.until(lambda: store.attempts().get(2) == 2, 30, "the old attempt is fenced again")
    run.versions(3)


def test_a_run_without_workers_waits_and_goes_on_with_one(run: Running):
    run.set_capacity(0)
    for place, job in run.jobs().items():
        if place[0] == "worker":
            run.scheduler.kill(job.job_id)
    run.until(lambda: not run.slots(), 30, "both leases run out")
    assert status.observe(run.run)["state"] == "waiting"
    run.set_capacity(1)
    run.versions(2)
    assert len(run.slots()) == 1


def test_a_stopped_run_keeps_every_step_and_goes_on_when_it_is_scaled(shared: Running):
    """With whatever workers there are."""
    run = shared
    run.set_capacity(1)
    run.even_pace()
    run.versions(1)
    run.pace(0.2)
    run.until(lambda: run.slots() and min(slot.step for slot in run.slots().values()) >= 2, 30,
              "steps")
    run.pace(5)  # longer than a lease, and than a worker may stand still
    workers = run.slots()
    stopped = elastic("stop", "tiny", "--wait", env=environment(run.home))
    assert stopped.returncode == 0, stopped.stderr
    assert not run.jobs()
    assert not members(run.home)
    for number, slot in workers.items():
        mine = {"slot": number, "attempt": slot.attempt}
        deltas = [d for d in deltas_after(run, -1) if (d.slot, d.attempt) == (number, slot.attempt)]
        void = [event for event in run.events("reject") if mine.items() <= event.items()]
        steps = run.run.jobs.ending(slot.job_id)["steps"]
        assert steps >= slot.steps_total
        assert sum(delta.steps for delta in deltas) == steps or void, (deltas, steps)
    run.pace(PACE_S)
    scaled = elastic("scale", "tiny", "--max", 2, env=environment(run.home))
    assert scaled.returncode == 0, scaled.stderr
    run.versions(1)


# ---- runs of their own --------------------------------------------------------------------------


def test_one_may_join_in_a_last_call_and_the_last_samples_come_back_from_the_lost(tmp_path: Path):
    """Slot 1 stands still with samples in its hands: its round calls, and closes without it."""
    settings = {**TWO, "elastic.max": 3, "local_scheduler.gpus": 2, "local_sgd.last_call": "20s",
                "health.stall_after": "10s"}
    with running(tmp_path, settings, samples=300, step_s=0.3) as run:
        run.workers(2)
        while not _stopped_in_a_round(run, slot=1):
            os.kill(run.trainer_of(1), signal.SIGCONT)
        run.until(lambda: _called(run), 30, "the last call")
        run.set_capacity(3)
        run.until(lambda: run.slots().get(2) and run.slots()[2].state == "waiting", 30, "slot 2")
        run.pace(0.02)
        left = 5 * 4  # samples: what slot 1 holds
        run.until(lambda: run.run.commits.newest().tokens >= 300 - left, 60, "all but its own")
        assert not run.run.done()
        run.set_capacity(0)
        run.scheduler.kill(run.jobs()["worker", 1].job_id)
        run.finish()
        assert run.run.slots.latest(1) == 1
        assert any(d.slot == 2 for commit in run.commits() for d in commit.deltas)


def _stopped_in_a_round(run: Running, slot: int) -> bool:
    """Stop the slot's trainer; does it hold samples? Its state is told before it delivers them."""
    run.until(lambda: run.slots()[slot].state == "training", 30, f"slot {slot} trains")
    os.kill(run.trainer_of(slot), signal.SIGSTOP)
    with run.store() as store:
        stopped = store.now()
    run.until(lambda: run.slots()[slot].beat > stopped + 0.5, 30, "what it said has come")
    held = run.slot(slot)
    return held.state == "training" and held.step > 0


def _called(run: Running) -> bool:
    with run.store() as store:
        master = store.master()
    return master.get("call") == master.get("version")


def test_masters_that_see_new_names_late_leave_nobody_waiting(tmp_path: Path):
    """As on NFS: the older one goes on for a while, and the newer one sees what it commits late."""
    late, settings = TESTS / "late", {"elastic.max": 1, "elastic.reconcile_interval": "1h"}
    with running(tmp_path, settings, late, samples=100_000, step_s=0.1) as run:
        run.workers(1)
        run.versions(1)
        older, before = run.jobs()["master", 0].job_id, run.version
        trainers = set(run.pids("trainer"))
        second_master(run, late)  # and no third one: from here on no pass is made

        def is_fenced() -> bool:
            return (run.run.jobs.ending(older) or {}).get("outcome") == "fenced"

        wait_until(is_fenced, 30, "the older one is fenced")
        goal = run.version + 3
        wait_until(lambda: run.version >= goal, 30, "the newer one goes on")
        assert [commit.master_epoch for commit in run.run.commits.all(goal)][0] == 2
        assert set(run.pids("trainer")) == trainers
        bad = [e for e in run.events("reject") if e["base"] > before]
        assert bad == [], run.story()
        assert (run.run.path / "missed").exists(), "the stand-in has remembered nothing"
        run.pace(2)
        run.audit()
