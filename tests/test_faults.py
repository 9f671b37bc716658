"""Processes are killed, stopped and told to go, at many moments: nothing committed is lost.

    pytest tests/test_faults.py

Every test ends with a complete run whose audit is clean.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers import elastic, environment
from running import Running, members, running, second_master

from elastic import status

TWO = {"elastic.max": 2, "elastic.max_failures": 50}


# ---- SIGKILL, at any moment ---------------------------------------------------------------------


def moment(draw: random.Random, run: Running) -> None:
    """Wait for a moment of the run: any one, or one of those when something is half done."""
    kind = draw.choice(["any", "any", "commit", "draft", "delta"])
    seen = {"commit": lambda: run.run.commit_path(version + 1).exists(),
            "draft": lambda: any((run.run.path / "versions").glob(".*")),
            "delta": lambda: any((run.run.path / "deltas").glob("*/*"))}  # fmt: skip
    delay_s, version = draw.uniform(0, 1.0), run.version
    deadline = time.monotonic() + (delay_s if kind == "any" else 3.0)
    while time.monotonic() < deadline and not (kind != "any" and seen[kind]()):
        time.sleep(0.001)
    time.sleep(0 if kind == "any" else draw.uniform(0, 0.03))


@pytest.mark.parametrize(
    ("seed", "transport"), [(1, "filesystem"), (2, "filesystem"), (3, "redis")]
)
def test_any_process_may_be_killed_at_any_moment(tmp_path: Path, seed: int, transport: str):
    draw = random.Random(seed)
    victims = ["trainer", "agent", "master", "redis"] * 4
    draw.shuffle(victims)
    settings = {**TWO, "local_sgd.transport": transport}
    with running(tmp_path, settings, samples=8000, step_s=0.03) as run:
        run.until(lambda: run.version >= 2, 60, "the first versions")
        for victim in victims:
            run.witness()
            moment(draw, run)
            trainers = set(run.pids("trainer"))
            pid = run.kill(victim)
            survivors = trainers - {pid} - (trainers if victim == "agent" else set())
            run.versions(1)
            assert survivors <= set(run.pids("trainer")), f"{victim} took others with it"
        report = run.finish()
        assert report["masters"] >= 3


def test_a_flushed_redis_costs_no_process_and_no_commit(tmp_path: Path):
    draw = random.Random(4)
    with running(tmp_path, TWO, samples=4000) as run:
        run.until(lambda: len(run.slots()) == 2 and run.version >= 2, 60, "two workers")
        trainers = set(run.pids("trainer"))
        for _ in range(8):
            moment(draw, run)
            flush(run)
            run.versions(1)
        assert set(run.pids("trainer")) == trainers
        assert run.finish()["masters"] == 1


def flush(run: Running) -> None:
    with run.store() as store:
        store._redis.flushall()


def test_an_old_attempt_that_comes_back_after_a_flush_does_not_stop_the_run(tmp_path: Path):
    """It may claim the slot in the moment before the master says again which attempt is newest."""
    with running(tmp_path, TWO, samples=2000) as run:
        run.until(lambda: run.version >= 2, 60, "two versions")
        run.until(lambda: 1 in run.slots(), 60, "slot 1")
        job = run.jobs()["worker", 1]
        run.run.claim_attempt(1, {"job_id": "old"})
        run.run.claim_attempt(1, {"job_id": "new"})
        with run.store() as store:
            assert store.claim(1, 3, {"state": "loading"}, 1.0)
            run.until(lambda: run.run.ending(job.job_id)["state"] == "ended", 30, "1 is fenced")
            assert run.run.ending(job.job_id)["outcome"] == "fenced"
            store._redis.flushall()
            store.claim(1, 2, {"state": "loading"}, 1.0)
        run.finish()


# ---- masters ------------------------------------------------------------------------------------


def test_of_two_masters_the_older_is_fenced_and_every_version_is_committed_once(tmp_path: Path):
    with running(tmp_path, TWO, samples=4000) as run:
        run.until(lambda: run.version >= 2, 60, "two versions")
        first = run.jobs()["master", 0].job_id
        trainers = set(run.pids("trainer"))
        second = second_master(run)
        run.until(lambda: run.run.ending(first)["state"] == "ended", 30, "the older one left")
        assert run.run.ending(first)["outcome"] == "fenced"
        run.versions(2)
        run.witness()
        assert trainers <= set(run.pids("trainer"))
        assert run.finish()["masters"] >= 2
        second.wait(30)


def test_workers_that_wait_for_a_version_get_it_from_the_next_master(tmp_path: Path):
    """All have delivered, one is slow, and the master goes: what was offered is offered again."""
    settings = {**TWO, "local_sgd.min_deadline": "60s", "local_sgd.inner_steps": 5}
    with running(tmp_path, settings, samples=400) as run:
        run.until(lambda: run.version >= 2 and len(run.slots()) == 2, 60, "two workers")
        slow = run.trainer_of(1)
        os.kill(slow, signal.SIGSTOP)
        run.until(lambda: run.slots()[0].state == "waiting", 30, "slot 0 waits")
        version, steps = run.version, run.slots()[0].steps_total
        run.kill("master")
        run.until(lambda: len(run.run.events()) and run.run.newest_epoch() == 2, 30, "a new master")
        run.until(lambda: run.slots().get(0), 30, "slot 0 is back")
        os.kill(slow, signal.SIGCONT)
        run.versions(1)
        delta = next(d for d in run.run.commit(version + 1)["deltas"] if d["slot"] == 0)
        assert delta["steps"] == 5
        assert steps <= run.slots()[0].steps_total
        run.finish()


# ---- stalled, told to go, gone ------------------------------------------------------------------


def test_a_stopped_trainer_is_stalled_and_the_round_goes_on_without_it(tmp_path: Path):
    with running(tmp_path, {**TWO, "health.stall_after": "1s"}, samples=3000) as run:
        run.until(lambda: len(run.slots()) == 2 and run.version >= 1, 60, "two workers")
        pid = run.trainer_of(0)
        os.kill(pid, signal.SIGSTOP)

        def states() -> dict[int, str]:
            return {w["slot"]: w["state"] for w in status.observe(run.run)["workers"]}

        run.until(lambda: states().get(0) == "stalled", 30, "slot 0 is seen as stalled")
        run.versions(3)
        assert {d["slot"] for d in run.run.commit(run.version)["deltas"]} == {1}
        os.kill(pid, signal.SIGCONT)
        before = run.version

        def is_back() -> bool:
            news = [run.run.commit(v) for v in range(before + 1, run.version + 1)]
            return any(delta["slot"] == 0 for commit in news for delta in commit["deltas"])

        run.until(is_back, 30, "slot 0 trains again")
        assert run.trainer_of(0) == pid
        run.finish()


def test_steps_of_a_worker_told_to_go_count_and_its_slot_keeps_its_inner_state(tmp_path: Path):
    settings = {**TWO, "local_sgd.inner_steps": 40, "local_sgd.min_deadline": "30s"}
    with running(tmp_path, settings, samples=3000, step_s=0.05) as run:
        run.until(lambda: run.version >= 1 and len(run.slots()) == 2, 60, "two workers")
        other = run.trainer_of(1)
        run.until(lambda: 5 <= run.slots()[0].step <= 25, 30, "slot 0 is in the middle of a round")
        slot, job = run.slots()[0], run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        record = run.until(lambda: _ended(run, job.job_id), 30, "its exit record")
        assert (record["outcome"], record["code"]) == ("yielded", 0)
        assert record["steps"] >= slot.steps_total
        run.until(lambda: run.version > slot.version, 60, "the round closes")
        delta = next(d for d in run.run.commit(slot.version + 1)["deltas"] if d["slot"] == 0)
        assert slot.step <= delta["steps"] < 40
        assert delta["tokens"] == delta["steps"] * 4
        assert any(event["slot"] == 0 for event in run.events("preempt"))

        def heir() -> dict | None:
            deltas = [d for commit in run.commits() for d in commit["deltas"]]
            return next((d for d in deltas if (d["slot"], d["attempt"]) == (0, 2)), None)

        run.pace(0.01)
        assert run.until(heir, 60, "the next attempt")["inner"] == f"own of version {slot.version}"
        assert run.trainer_of(1) == other
        run.finish()


def _ended(run: Running, job_id: str) -> dict | None:
    record = run.run.ending(job_id) or {}
    return record if record.get("state") == "ended" else None


def test_a_worker_told_to_go_while_it_loads_is_no_crash(tmp_path: Path):
    with running(tmp_path, {**TWO, "elastic.max": 1}, samples=200) as run:
        run.until(lambda: run.pids("trainer"), 30, "a trainer")
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        record = run.until(lambda: _ended(run, job.job_id), 30, "its exit record")
        assert record["outcome"] == "yielded", record
        run.finish()


def test_a_worker_told_to_go_while_it_waits_leaves_at_once_and_its_delta_counts(tmp_path: Path):
    with running(tmp_path, {**TWO, "local_sgd.min_deadline": "60s"}, samples=400) as run:
        run.until(lambda: run.version >= 1 and len(run.slots()) == 2, 60, "two workers")
        slow = run.trainer_of(1)
        os.kill(slow, signal.SIGSTOP)
        run.until(lambda: run.slots()[0].state == "waiting", 30, "slot 0 waits")
        version, job = run.version, run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        record = run.until(lambda: _ended(run, job.job_id), 30, "its exit record")
        assert record["outcome"] == "yielded"
        os.kill(slow, signal.SIGCONT)
        run.versions(1)
        owners = {(d["slot"], d["attempt"]) for d in run.run.commit(version + 1)["deltas"]}
        assert (0, 1) in owners
        run.finish()


def test_the_last_samples_come_back_from_a_lost_worker_to_those_that_are_dry(tmp_path: Path):
    with running(tmp_path, {**TWO, "health.stall_after": "1s"}, samples=300) as run:
        run.until(lambda: run.version >= 1 and len(run.slots()) == 2, 60, "two workers")
        os.kill(run.trainer_of(1), signal.SIGSTOP)
        run.until(lambda: _quiet(run), 60, "slot 0 has nothing left to train")
        assert not run.run.done()
        run.scheduler.set_capacity(0)
        run.scheduler.kill(run.jobs()["worker", 1].job_id)
        run.finish()
        assert run.run.latest_attempt(1) == 1


def _quiet(run: Running, seconds: float = 1.5) -> bool:
    newest = run.run.commit(run.version)
    return time.time() - newest["time"] > seconds


def test_a_worker_may_join_during_the_last_call(tmp_path: Path):
    settings = {**TWO, "elastic.max": 3, "local_sgd.last_call": "20s", "local_scheduler.gpus": 2}
    with running(tmp_path, settings, samples=800) as run:
        run.until(lambda: run.version >= 2 and len(run.slots()) == 2, 60, "two workers")
        slow = run.trainer_of(1)
        os.kill(slow, signal.SIGSTOP)
        run.until(lambda: _called(run), 30, "the last call")
        run.scheduler.set_capacity(3)
        run.until(lambda: run.slots().get(2) and run.slots()[2].state == "waiting", 30, "slot 2")
        os.kill(slow, signal.SIGCONT)
        run.versions(2)
        run.finish()
        assert any(d["slot"] == 2 for commit in run.commits() for d in commit["deltas"])


def _called(run: Running) -> bool:
    with run.store() as store:
        master = store.master()
    return master.get("call") == master.get("version")


def test_a_run_without_workers_waits_and_goes_on_with_one(tmp_path: Path):
    with running(tmp_path, TWO, samples=1000) as run:
        run.until(lambda: run.version >= 2 and len(run.slots()) == 2, 60, "two workers")
        run.scheduler.set_capacity(0)
        for place, job in run.jobs().items():
            if place[0] == "worker":
                run.scheduler.kill(job.job_id)
        run.until(lambda: not run.slots(), 30, "both leases run out")
        version = run.version
        assert status.observe(run.run)["state"] == "waiting"
        run.scheduler.set_capacity(1)
        run.until(lambda: run.version > version, 60, "one worker goes on alone")
        run.finish()


# ---- stop, scale --------------------------------------------------------------------------------


def test_a_stopped_run_keeps_what_its_workers_had_and_goes_on_when_scaled(tmp_path: Path):
    with running(tmp_path, {**TWO, "local_sgd.inner_steps": 40}, samples=1500) as run:
        env = environment(tmp_path)
        run.until(lambda: run.version >= 1 and len(run.slots()) == 2, 60, "two workers")
        run.until(lambda: all(s.step >= 3 for s in run.slots().values()), 30, "some steps")
        version, slots = run.version, run.slots()
        stopped = elastic("stop", "tiny", "--wait", env=env)
        assert stopped.returncode == 0, stopped.stderr
        assert not run.jobs()
        assert not members(tmp_path)
        assert run.version == version + 1
        deltas = {d["slot"]: d["steps"] for d in run.run.commit(run.version)["deltas"]}
        assert all(deltas[n] >= slots[n].step for n in slots)
        assert elastic("scale", "tiny", "--max", 1, env=env).returncode == 0
        run.versions(1)
        assert set(run.slots()) == {0}
        run.finish()
