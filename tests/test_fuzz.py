"""What a broken or hostile worker may write into Redis: nonsense is refused, and nothing else.

The headers go through the master's own `_judge`; only what lies behind it (Redis, the check of the
bytes) is a recorder. Everything is drawn from fixed seeds. pytest tests/test_fuzz.py
"""

import json
import math
import random
import resource
from types import SimpleNamespace

import pytest

from elastic.ledger import Ledger
from elastic.master import MOST_HEADER_BYTES, MOST_REASON, Master, Round
from elastic.rounds import Header
from elastic.store import Ask

HEADERS = 100_000
MORE_MEMORY = 64 << 20
GOOD = {
    "run": "a", "slot": 3, "attempt": 2, "job_id": "17", "base": 5, "layout": "abc",
    "codec": "none", "steps": 10, "tokens": 640, "samples": [[0, 64, 96]], "loss": 2.5,
    "first_loss": 2.6, "fragments": [{"bytes": 400, "xxh3": "0" * 32}] * 2, "inner": "fresh",
    "seconds": 3.5, "stall_s": 0.1,
}  # fmt: skip
JUNK = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**400, -0.0, 0.5, 1e308, math.inf, -math.inf,
    math.nan, "", "a", "7", "../../etc/passwd", "\0", "\ud800", "x" * 10_000, [], {}, [[]], [None],
    [[0, 1]], [[0, 0, 2**61]], [[0, 5, 2]], [[2**61, 0, 1]], [[0, 0, 1]] * 3, [[0.5, 0, 1]],
    [["0", "0", "1"]], [{"bytes": -1, "xxh3": ""}], [{"bytes": 2**62, "xxh3": "0" * 32}],
    [{"bytes": 400}], {"a": {"b": []}},
]  # fmt: skip


def broken(draw: random.Random) -> bytes:
    """A header in which one to three things are wrong, as it may come out of Redis."""
    header = dict(GOOD)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(list(header) or ["run"])
        kind = draw.random()
        if kind < 0.7:
            header[name] = draw.choice(JUNK)
        elif kind < 0.85:
            header.pop(name, None)
        else:
            header[draw.choice(["more", "", name.upper()])] = draw.choice(JUNK)
    body = bytearray(json.dumps(header).encode(errors="surrogatepass"))
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
    if draw.random() < 0.1:
        del body[draw.randrange(len(body)) :]
    if draw.random() < 0.01:
        body = bytearray(b"[" * 100_000)
    return bytes(body)


@pytest.fixture
def master() -> Master:
    """One in version 5 of a run, that remembers what it rejects and what it would check."""
    found = Master.__new__(Master)
    found.config = SimpleNamespace(local_sgd=SimpleNamespace(compression="none", max_staleness=2))
    found.run = SimpleNamespace(name="a", event=lambda kind, **fields: None)
    found._attempts, found._round, found._ledger = {3: 2}, Round(5, 0.0), Ledger(1000, 1)
    found._averager = SimpleNamespace(
        layout=SimpleNamespace(hash="abc"), fragment_bytes=(400, 400), drop=lambda keys: None,
        check=None,
    )  # fmt: skip
    found._pool = SimpleNamespace(submit=lambda _, header: header)
    found.rejected = []
    found._store = SimpleNamespace(
        set_verdict=lambda name, verdict: found.rejected.append(verdict["reason"]),
        drop_offers=lambda base, names: None, add_event=lambda record: None,
    )  # fmt: skip
    return found


def test_a_hundred_thousand_broken_headers_are_refused_and_a_good_one_is_taken(master: Master):
    draw, rules = random.Random(1), set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    free = list(master._ledger.free)
    for _ in range(HEADERS):
        master._judge(5, "3:2", broken(draw))
        for key in list(master._round.checking):  # harmless junk: other words, the same delta
            header = master._round.checking[key]
            assert (header.tokens, header.samples) != (0, ()), header
            assert math.isfinite(header.loss + header.first_loss)
            json.dumps(header.to_json(), allow_nan=False)
            master._forget(key)
        assert all(len(reason) <= MOST_REASON for reason in master.rejected)
        rules |= {reason.partition(":")[0] for reason in master.rejected}
        master.rejected.clear()
    assert rules == {"malformed", "shape", "samples", "non-finite", "other-run"}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MORE_MEMORY, f"{grown} bytes"
    assert list(master._ledger.free) == free
    master._judge(5, "3:2", json.dumps(GOOD).encode())
    assert list(master._round.checking) == [(3, 2, 5)]


def test_a_header_that_is_too_long_is_not_even_parsed(master: Master):
    master._judge(5, "3:2", b" " * MOST_HEADER_BYTES + json.dumps(GOOD).encode())
    assert master.rejected == [f"malformed: {MOST_HEADER_BYTES + len(json.dumps(GOOD))} bytes"]


def test_the_header_that_is_broken_here_is_a_good_one():
    assert Header.from_json(GOOD).to_json() == {
        **GOOD, "samples": ((0, 64, 96),), "fragments": tuple(GOOD["fragments"])
    }  # fmt: skip


def test_broken_asks_are_dropped_and_good_ones_are_answered(store):
    draw, asks = random.Random(2), store._key("asks")
    good = Ask(4, 1, 7, 32, ((0, 0, 8),))
    for number in range(2000):
        body = json.dumps([draw.choice([good, *JUNK]) for good in (7, 32, [[0, 0, 8]])]).encode()
        if draw.random() < 0.3:
            body = body[: draw.randrange(len(body))]
        name = draw.choice([f"{number}:1", "x:1", "1", ":", "1:2:3", "é:1"])
        store._redis.hset(asks, name.encode(), body)
    store.ask(good)
    found = store.take_asks()
    assert good in found
    assert all(type(number) is int for ask in found for each in ask.held for number in each)
    assert store.take_asks() == []


def test_a_slot_with_a_broken_record_is_nobodys(store, make_run):
    lease = {"job_id": "1", "node": "n", "pid": 1, "state": "training", "version": 0, "step": 0,
             "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0}  # fmt: skip
    for slot in (1, 2):
        assert store.claim(slot, 1, lease, 60.0)
    store._redis.hset(store._key("slot", 1), "step", "many")
    assert list(store.slots()) == [2]
