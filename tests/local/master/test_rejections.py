"""Deltas that must not be merged: each is refused with its reason, and the run goes on.

One run with one worker in slot 0. Fake workers from slot 7 on offer what broken ones might: each
holds the lease of its slot, and never trains.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic.local.store import Ask
from elastic.local.transport import Transport, fragment_name
from elastic.people import status
from elastic.run.ledger import count
from elastic.run.records import Header
from elastic.saved.versions import read_layout
from running import Running, running
from stores import BothSides

SLOT = 7
LEASE = {"job_id": "fake", "node": "here", "pid": 1, "state": "loading", "version": 0, "step": 0,
         "steps_total": 0, "loss": 0.0, "tokens_per_s": 0.0}


BATCH = 16


class Fake:
    """A worker of the test's own, and the delta it would deliver."""

    def __init__(self, run: Running, store: BothSides, slot: int = SLOT):
        self.run, self.store, self.slot = run, store, slot
        self.attempt = run.run.slots.claim(slot, {"job_id": "fake"})
        assert store.lease(slot, self.attempt, LEASE, 600.0)
        self.base, self.asked = run.version, 0
        self.sizes = [4 * numel for numel in read_layout(run.run, self.base).numels]
        self.bytes = [bytes(size) for size in self.sizes]

    def samples(self) -> tuple:
        """The samples of a step that the master grants."""
        self.asked += 1
        ask = Ask(self.slot, self.attempt, self.asked, BATCH, ())
        self.store.ask(ask)
        return tuple(self.run.until(lambda: self.store.granted(ask, 0.2), 30, "samples"))

    def header(self, **changes) -> dict:
        """Put the bytes where the master looks for them; the header that announces them."""
        key = (self.slot, self.attempt, self.base)
        transport = Transport(self.run.run)
        parts = [transport.put(key, i, memoryview(data))
                 for i, data in enumerate(self.bytes)]
        whole = Header(
            run=self.run.run.key, slot=self.slot, attempt=self.attempt, job_id="fake",
            base=self.base, layout=self.run.run.commits.of(0).layout, codec="none", steps=1,
            tokens=BATCH, samples=self.samples(), loss=0.1, first_loss=0.1, fragments=tuple(parts),
        )
        return asdict(whole) | changes

    def offer(self, body: dict | str) -> None:
        """Announce a delta as the store would, whatever it says."""
        text = body if isinstance(body, str) else json.dumps(body)
        attempt = self.attempt if isinstance(body, str) else body.get("attempt", self.attempt)
        key, name = self.store._key("offers", self.base), f"{self.slot}:{attempt}"
        sealed = self.store._mark(key, name, text.encode()) + text.encode()
        self.store._redis.hset(key, name, sealed)
        self.store._redis.publish(self.store._key("wake"), f"offer {self.slot}")

    def file(self) -> Path:
        """Of its first fragment, where the master looks for it."""
        name = fragment_name((self.slot, self.attempt, self.base), 0)
        return self.run.run.path / "deltas" / name


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Running]:
    settings = {"local_sgd.compression": "none", "local_sgd.inner_steps": 10,
                "train.optimizer": "adamw",  # whose moments know how many steps they are of
                "local_sgd.min_deadline": "10m", "local_sgd.max_staleness": 1,
                "health.stall_after": "10m", "checkpoint.keep": 50,
                "train.batch_size": BATCH,  # a round's loss is that of 160 samples
                "elastic.max_failures": 50}
    with running(tmp_path_factory.mktemp("run"), settings, samples=400_000) as run:
        yield run
        run.pace(2)
        run.audit()


@pytest.fixture
def run(shared: Running) -> Iterator[Running]:
    shared.even_pace()
    for pid in shared.pids("master") + shared.pids("trainer"):
        os.kill(pid, signal.SIGCONT)
    shared.workers(1)
    trainers = shared.pids("trainer")
    yield shared
    shared.versions(1)
    assert shared.pids("trainer") == trainers


@pytest.fixture
def fake(run: Running) -> Iterator[Fake]:
    """A fake worker, while the real one is held amid a round: that does not close before
    `go_on`."""
    run.hold()
    with run.store() as store:
        yield Fake(run, store)
        store.release(SLOT, run.run.slots.latest(SLOT))
    run.go_on()


def other_bytes(fake: Fake, change: Callable[[bytes], bytes]) -> dict:
    """A header of good bytes, and then other ones in their place."""
    header = fake.header()
    fake.file().write_bytes(change(fake.file().read_bytes()))
    return header


def not_a_number(fake: Fake) -> dict:
    fake.bytes[0] = b"\xff" * fake.sizes[0]
    return fake.header()


def too_old(fake: Fake) -> dict:
    fake.base -= 2
    return fake.header()


def lost_bytes(fake: Fake) -> dict:
    header = fake.header()
    fake.file().unlink()
    return header


def wrong_size(fake: Fake) -> dict:
    fake.bytes[0] += b"\0\0\0\0"
    return fake.header()


REFUSED = {
    "a stale base": ("stale", too_old),
    "a delta for another run": ("other-run", lambda fake: fake.header(run="another")),
    "another layout": ("shape", lambda fake: fake.header(layout="0123456789abcdef")),
    "another codec": ("shape", lambda fake: fake.header(codec="bf16")),
    "another size": ("shape", wrong_size),
    "NaN in the bytes": ("non-finite", not_a_number),
    "NaN as the loss": ("non-finite", lambda fake: fake.header(loss=float("nan"))),
    "truncated bytes": ("truncated", lambda fake: other_bytes(fake, lambda data: data[:-1])),
    "altered bytes": ("altered", lambda fake: other_bytes(fake, lambda data: b"\1" + data[1:])),
    "no bytes": ("unreadable", lost_bytes),
    "samples of others": ("samples", lambda fake: fake.header(samples=[[0, 0, 4]])),
    "samples that do not exist": ("samples", lambda fake: fake.header(samples=[[9, 0, 4]])),
    "no JSON": ("malformed", lambda _: "}{"),
    "endless JSON": ("malformed", lambda _: "[" * 100_000),
    "a missing field": ("malformed", lambda _: {"run": "tiny"}),
    "a field of a wrong type": ("malformed", lambda fake: fake.header(steps="many")),
    "a name that is not its own": ("malformed", lambda fake: fake.header(slot=0)),
    "an attempt that never claimed": ("fenced", lambda fake: fake.header(attempt=fake.attempt + 1)),
}


def test_each_broken_delta_is_refused_with_its_reason(run: Running):
    """All of them in one round, which is made of the good one alone."""
    run.until(lambda: run.version >= 3, 30, "version 3")
    run.hold()
    version = run.version
    with run.store() as store:
        fakes = [Fake(run, store, slot) for slot, _ in enumerate(REFUSED, SLOT)]
        for fake, (rule, make) in zip(fakes, REFUSED.values(), strict=True):
            fake.offer(make(fake))
            event = rejection(run, rule, slot=fake.slot)
            assert event["rule"] == rule
            assert event in status.observe(run.run)["events"]
        run.go_on()
        run.versions(1)
        for fake in fakes:
            store.release(fake.slot, fake.attempt)
    committed = [run.run.commits.of(number) for number in range(version + 1, run.version + 1)]
    rejected = sum((Counter(commit.rejected) for commit in committed), Counter())
    assert rejected == Counter(rule for rule, _ in REFUSED.values())
    assert {delta.slot for commit in committed for delta in commit.deltas} == {0}


def accepted(fake: Fake) -> None:
    """Wait until the master has taken its delta."""
    mine = {"slot": SLOT, "attempt": fake.attempt, "base": fake.base}.items()
    fake.run.until(lambda: any(mine <= e.items() for e in fake.run.events("delta")), 30, "accepted")


def rejection(run: Running, rule: str, **whose) -> dict:
    """Wait for the event."""

    def found() -> dict | None:
        mine = [event for event in run.events("reject") if whose.items() <= event.items()]
        return next((e for e in mine if e["reason"].startswith(f"{rule}: ")), None)

    return run.until(found, 30, f"a delta is rejected by {rule}")


def test_samples_are_for_those_whose_lease_is_there(run: Running):
    """Given to a trainer that is quicker than its agent, they would be taken back at once."""
    with run.store() as store:
        attempt = run.run.slots.claim(SLOT, {"job_id": "fake"})
        ask = Ask(SLOT, attempt, 1, 4, ())
        store.ask(ask)
        run.versions(2)  # the master has seen it
        assert store.granted(ask, 0.1) is None
        assert store.lease(SLOT, attempt, LEASE, 600.0)
        store.ask(ask)
        granted = run.until(lambda: store.granted(ask, 0.2), 30, "samples")
        assert count(granted) == 4
        store.release(SLOT, attempt)


def test_a_delta_that_is_one_version_late_is_merged_and_counts_once(fake: Fake):
    run = fake.run
    fake.base = run.version - 1
    header = fake.header()
    fake.offer(header)
    accepted(fake)
    fake.offer(header | {"loss": 0.2})
    rejection(run, "duplicate", slot=SLOT, attempt=fake.attempt)
    run.go_on()
    run.versions(1)
    deltas = [d for commit in run.commits() for d in commit.deltas
              if (d.slot, d.attempt) == (SLOT, fake.attempt)]
    assert [(delta.base, delta.loss) for delta in deltas] == [(fake.base, 0.1)]
    newer = run.run.slots.claim(SLOT, {"job_id": "newer"})
    assert fake.store.lease(SLOT, newer, LEASE, 600.0)
    assert not fake.store.offer(SLOT, fake.attempt, run.version, header), "it has been replaced"


@pytest.mark.parametrize("flushed", [False, True])
def test_a_worker_whose_delta_is_damaged_on_the_way_trains_the_round_again(
    run: Running, flushed: bool
):
    """And so it does if Redis forgets the verdict before the worker has read it."""
    (master,), (trainer,) = run.pids("master"), run.pids("trainer")
    run.hold()
    os.kill(master, signal.SIGSTOP)
    run.go_on()
    slot = run.slot(0)
    key = (0, slot.attempt, slot.version)
    path = run.run.path / "deltas" / fragment_name(key, 0)
    with run.store() as store:
        run.until(lambda: store.offered(*key), 30, "the worker delivers")
        if flushed:
            os.kill(trainer, signal.SIGSTOP)
        path.write_bytes(b"\1" + path.read_bytes()[1:])
        os.kill(master, signal.SIGCONT)
        rejection(run, "altered", slot=0, base=key[2])
        if flushed:
            run.flush()
            os.kill(trainer, signal.SIGCONT)
    run.until(lambda: run.version > key[2], 30, "the round closes all the same")
    commit = run.run.commits.of(key[2] + 1)
    assert commit.rejected["altered"] == 1 + flushed  # it offers them once more
    assert [(d.slot, d.attempt) for d in commit.deltas] == [key[:2]]


def outer(run: Running, version: int) -> dict[str, torch.Tensor]:
    return load_file(run.folder(version) / "outer-00.safetensors")


def test_a_version_that_makes_the_loss_rise_is_taken_back(run: Running):
    """By what its workers say of a whole round. Their deltas do not count, their samples are
    trained again, and the run goes on from the version before."""
    run.until(lambda: run.version > 12, 90, "it is known what is usual")
    run.hold()
    with run.store() as store:
        fake = Fake(run, store)
        bad = fake.base
        fake.offer(fake.header(loss=1e6))
        accepted(fake)
        run.go_on()
        run.until(lambda: run.version > bad, 30, "the round closes")
        store.release(SLOT, fake.attempt)
    before, commit = run.run.commits.of(bad), run.run.commits.of(bad + 1)
    assert commit.taken_back == bad
    assert (commit.samples, commit.deltas) == ((), ())
    assert commit.tokens == before.tokens
    good, again = outer(run, bad - 1), outer(run, bad + 1)
    for name, tensor in again.items():
        kept = good[name] if name.startswith("param") else torch.zeros_like(tensor)
        assert torch.equal(tensor, kept)
    samples = sum(stop - start for _, start, stop in before.samples)
    assert run.audit()["taken_back"] == [(bad, samples)]
    (event,) = run.until(lambda: run.events("taken-back"), 30, "the master says so")
    assert event["version"] == bad
    assert "the loss rose" in event["reason"]
    rejection(run, "taken-back", slot=SLOT, base=bad)
    run.versions(3)
    later = [run.run.commits.of(version) for version in range(bad + 2, run.version + 1)]
    assert all(commit.deltas and commit.taken_back is None for commit in later)
