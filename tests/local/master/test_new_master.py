"""What a new master, or one with a new Redis, learns of workers; real files and a real Redis.

    pytest tests/local/master/test_new_master.py

The world is that of test_crash_points.py: a master that takes turns, and two workers.
"""

import contextlib
import functools
import math
import os
import re
import select
import socket
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import test_crash_points as played
from elastic.base.errors import TryAgain
from elastic.local.master import intake, master
from elastic.local.master.averaging import Averager
from elastic.local.master.samples import Samples
from elastic.local.store import Ask
from elastic.local.transport import Transport
from elastic.local.worker.agent import Lease
from elastic.run.membership import Slot
from elastic.run.records import Header
from elastic.run.rundir import RunDir
from helpers import commit_of
from stores import BothSides
from test_crash_points import LEASE, Turns, Worker, create_version_0

server, world, settings = played.server, played.world, played.settings
run, delivered = played.run, played.delivered


def leave(run: RunDir, workers: list[Worker]) -> list[tuple[int, int, int]]:
    """All workers leave, and Redis with them; the keys of their deltas."""
    for worker in workers:
        run.offers.leave(worker.header)
    store = BothSides.open(run)
    store.forget_everything()
    store.close()
    return [worker.header.key for worker in workers]


def merged(run: RunDir, version: int) -> list[tuple[int, int, int]]:
    return [(delta.slot, delta.attempt, delta.base) for delta in run.commits.of(version).deltas]


def test_what_cancelled_workers_have_left_counts_after_a_scale_down(delivered):
    run, workers = delivered
    left = leave(run, workers)
    run.set_control(max=1)
    played.go_on(run, [], lambda: run.commits.newest_version() > 1)
    assert merged(run, 2) == left
    assert run.commits.of(2).rejected == {}


def test_what_workers_have_left_counts_though_redis_has_forgotten_it(run):
    """Their offers came while the master was busy: it has not seen one of them."""
    create_version_0(run)
    workers, one = [Worker(run, slot) for slot in (0, 1)], Turns(run)
    one.take_over()
    for _ in range(20):
        one.turn()
        for worker in workers:
            worker.turn(one.server.store)
        if all(worker.header for worker in workers):
            break
    left = leave(run, workers)
    for _ in range(5):
        one.turn()
    one.close()
    assert merged(run, 1) == left
    assert run.commits.of(1).rejected == {}


class CutOff(Worker):
    """Its node loses the way to Redis while it trains: it leaves its delta in the run directory."""

    left: Header | None = None

    def turn(self, store: BothSides) -> None:
        with contextlib.suppress(TryAgain):
            if not self.left:
                super().turn(store)

    def deliver(self, samples: list) -> Header:
        self.left = super().deliver(samples)
        self.run.offers.leave(self.left)
        raise TryAgain("no way to Redis")


def test_what_a_worker_could_not_offer_counts_with_the_same_master(run):
    """Only a new master read what is left: others trained the samples again."""
    create_version_0(run)
    gone, other, one = CutOff(run, 0), Worker(run, 1), Turns(run)
    one.take_over()
    for _ in range(20):
        one.turn()
        for worker in (gone, other):
            worker.turn(one.server.store)
        if gone.left:
            one.server.store.release(0, gone.attempt)  # as if it had lapsed
    one.close()
    assert gone.left.key in merged(run, 1)
    assert run.commits.of(1).rejected == {}


def test_what_is_left_after_the_lease_has_lapsed_is_read_and_refused_once(run):
    """It was read only in the turn in which its worker was gone, or in every one."""
    create_version_0(run)
    one, bad, good = Turns(run), Worker(run, 0), CutOff(run, 1)
    one.take_over()
    one.turn()
    bad.base = good.base = 0
    run.offers.leave(replace(bad.deliver([(0, 0, 4)]), loss=math.nan))
    for turn in range(10):
        if turn == 5:
            with contextlib.suppress(TryAgain):
                good.deliver([(0, 4, 8)])
        one.meets_at = 0.0  # a while later
        one.turn()
    one.close()
    assert [event["rule"] for event in run.events() if event["kind"] == "reject"] == ["non-finite"]
    assert good.left.key in merged(run, 1)


def test_a_delta_that_is_unreadable_when_it_is_to_be_merged_holds_no_round_open(run, monkeypatch):
    """Its check was good. The round was closed again and again, and nobody was told why."""
    create_version_0(run)
    workers, one, reads = [Worker(run, slot) for slot in (0, 1)], Turns(run), Counter()
    read = Transport.get

    def get(self, key, index, *how) -> None:
        reads[key, index] += 1
        if key[0] == 0 and reads[key, index] > 1 and not rejected():
            raise TryAgain("Input/output error")
        read(self, key, index, *how)

    def rejected() -> list[str]:
        return [event["rule"] for event in run.events() if event["kind"] == "reject"]

    monkeypatch.setattr(Transport, "get", get)
    monkeypatch.setattr(intake, "UNREAD_S", 0.0)
    one.take_over()
    for _ in range(60):
        one.turn()
        for worker in workers:
            if run.commits.newest_version() < 1:
                worker.turn(one.server.store)
    one.close()
    assert rejected() == ["unreadable"]
    came = [event["slot"] for event in run.events()
            if event["kind"] == "delta" and event["base"] == 0]
    assert came.count(1) == 1  # it was checked again, and came once
    assert [slot for slot, *_ in merged(run, 1)] == [0, 1]  # it has delivered the delta again


def test_a_worker_whose_node_refuses_to_write_keeps_its_samples_only_for_a_while():
    """It holds its lease: when all others were done the run waited for these samples, for ever."""
    samples, slots = Samples(), {}
    samples.begin(commit_of(dataset_samples=100, epochs=1))
    for slot, state in enumerate(("blocked", "blocked", "training")):
        samples.ledger.hold((slot, 1), [(0, 8 * slot, 8 * slot + 8)])
        moved = 100.0 if slot == 0 else 200.0
        told = {"slot": slot, "attempt": 1, "beat": 300, "moved": moved, "joined": 0}
        slots[slot] = Slot.from_fields({**LEASE, **told, "state": state})
    samples.reclaim(slots, blocked_at=150.0)
    assert set(samples.ledger.held) == {(1, 1), (2, 1)}


def test_a_sites_server_without_a_master_is_no_service(run):
    """The agent took the words of its own worker, which waited, for a sign of a master."""
    program = SimpleNamespace(run=run, slot=0, attempt=run.slots.claim(0, {"job_id": "7"}))
    lease, who = Lease(program), {"slot": 0, "attempt": 1}
    before = lease.served
    lease.renew(LEASE | who)
    assert (bool(lease.store), lease.served) == (True, before)
    create_version_0(run)
    one = Turns(run)
    one.take_over()
    one.turn()
    lease.renew(LEASE | who)
    assert lease.served > before
    one.state = "over"
    run.mark_done({"reason": "trained", "time": time.time()})
    one.close()
    assert lease.store.master()["state"] == "done"  # "over" told workers nothing


def test_what_a_worker_declares_once_is_heard_though_that_turn_fails(run, monkeypatch):
    """Else its samples are free: others get them, and its delta is refused."""
    create_version_0(run)
    who = {"slot": 0, "attempt": run.slots.claim(0, {"job_id": "7"})}
    one = Turns(run)
    one.take_over()
    one.turn()
    store, held = one.server.store, (0, 4, 8)
    assert store.lease(0, 1, LEASE | who, 600.0)
    store.ask(Ask(0, 1, sequence=1, want=0, held=(held,)))
    with monkeypatch.context() as patch:
        def silent(_bases):
            raise TryAgain("no answer")

        patch.setattr(store, "offers", silent)
        one.turn()
        assert store.take_asks() == []
    one.turn()
    one.close()
    assert list(one.samples.ledger.held[0, 1]) == [held]


def test_what_a_new_master_takes_to_load_is_no_time_to_be_told_what_workers_hold(run, monkeypatch):
    """It hears nobody while it loads: it gave samples away of which a worker had not said yet
    that it holds them, and then refused its delta."""
    create_version_0(run)
    run.masters.claim({})
    one, loaded = Turns(run), []

    def load(*how) -> Averager:
        averager = Averager(*how)
        time.sleep(0.5)
        loaded.append(one.server.now())
        return averager

    monkeypatch.setattr(master, "Averager", load)
    monkeypatch.setattr(one.samples, "shut", functools.partial(Samples.shut, one.samples))
    one.take_over()
    one.turn()
    one.close()
    health = one.config.health
    settling_s = 2 * health.heartbeat_s + 1.0 + health.stall_after_s
    assert one.samples.open_at >= loaded[0] + settling_s


def test_a_master_waits_for_the_room_of_a_version(delivered, monkeypatch):
    """With more than checkpoint.min_free it filled a disk that others use, again and again."""
    run, workers = delivered
    needed, versions = sum(entry["bytes"] for entry in run.commits.of(1).files), []

    def disk(_path) -> SimpleNamespace:
        versions.append(run.commits.newest_version())
        free = needed if len(versions) > 20 else needed - 1
        return SimpleNamespace(f_flag=0, f_frsize=1, f_bavail=free, f_favail=1 << 20, f_files=0)

    monkeypatch.setattr(os, "statvfs", disk)
    played.go_on(run, workers, lambda: run.commits.newest_version() > 1)
    assert versions[:21] == [1] * 21


def test_a_master_tells_again_of_its_version(delivered, monkeypatch):
    """One before it that had hung told of its own, older one last: new workers could not start."""
    run, _ = delivered
    monkeypatch.setattr(master, "CONTROL_S", 0.0)
    one = Turns(run)
    one.take_over()
    one.turn()
    run.commits.tell(0)
    one.turn()
    one.close()
    assert run.commits.told_version() == one.commit.version == 2


@pytest.mark.parametrize(("epochs", "max_tokens", "total"), [(3, 0, 60), (0, 500, 500)])
def test_a_run_ends_where_its_run_toml_says_now(delivered, epochs, max_tokens, total):
    """The goal of version 0 stayed for ever: beyond its tokens nothing was learned (the rate was
    0), and more epochs were not begun."""
    run, workers = delivered
    path = run.path / "run.toml"
    text = re.sub(r"\nepochs = .*", f"\nepochs = {epochs}", path.read_text())
    path.write_text(re.sub(r"\nmax_tokens = .*", f"\nmax_tokens = {max_tokens}", text))
    played.go_on(RunDir(run.path), workers, lambda: run.commits.newest_version() > 1)
    assert run.commits.of(2).epochs == epochs
    assert run.commits.of(2).total_tokens == total


def test_commits_are_read_while_the_master_before_still_works(run, monkeypatch):
    """Of 100,000 versions that takes minutes, in which nobody trained; and they were read again
    whenever another master had committed."""
    create_version_0(run)
    one, known, read = Turns(run), [], []
    claim, of = type(run.masters).claim, type(run.commits).known
    monkeypatch.setattr(type(run.masters), "claim", lambda masters, record: (
        known.append(one.samples.known), claim(masters, record))[1])
    monkeypatch.setattr(type(run.commits), "known", lambda commits, version: (
        read.append(version), of(commits, version))[1])
    one.take_over()
    assert (known, read) == ([1], [0])
    one.samples.known = 7
    one.read_commits(6)
    assert read == [0]


def test_who_takes_the_port_of_a_dead_redis_hears_no_password(make_run):
    """Its client connected again by itself, and gave the password to whoever listened there."""
    run = make_run()
    one = Turns(run)
    del one.server.wait
    one.take_over()
    one.turn()
    before = run.endpoint()
    one.server._redis.process.kill()
    one.server._redis.process.wait()
    one.server.disown_older = lambda: None  # it says a worker's password, which is of no use now
    with socket.create_server((before.host, before.port)) as stranger:
        one.turn()
        assert run.endpoint() != before
        assert select.select([stranger], [], [], 0)[0] == []
    one.close()
