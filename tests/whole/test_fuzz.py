"""What a broken or hostile worker may write into Redis: nonsense is refused, and nothing else.

The headers go through the master's own intake; only what lies behind it (Redis, the check of the
bytes) is a recorder. The bytes go through its own averager, from real files and a real Redis.
Everything is drawn from fixed seeds. pytest tests/whole/test_fuzz.py
"""

import json
import math
import random
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from xxhash import xxh3_128_hexdigest as checksum

from elastic.local import transport
from elastic.local.master.averaging import Averager
from elastic.local.master.intake import MOST_REASON, Intake
from elastic.local.master.open_round import OpenRound
from elastic.local.rounds import Facts
from elastic.local.store import Ask
from elastic.local.transport import Damaged, fragment_name
from elastic.run.ledger import Ledger
from elastic.run.records import Fragment, Header
from elastic.saved.codec import CODECS
from helpers import commit_of
from merging import Rounds

HEADERS = 30_000
DELTAS = 1_000  # for each codec
MORE_MEMORY = 64 << 20
GOOD = {
    "run": "a", "slot": 3, "attempt": 2, "job_id": "17", "base": 5, "layout": "abc",
    "codec": "none", "steps": 10, "tokens": 640, "samples": [[0, 64, 96]], "loss": 2.5,
    "first_loss": 2.6, "fragments": [{"bytes": 400, "xxh3": "0" * 32}] * 2, "inner": "fresh",
    "seconds": 3.5, "stall_s": 0.1, "trained_s": 3.0, "lr_sum": 0.01,
}
JUNK = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**400, -0.0, 0.5, 1e308, math.inf, -math.inf,
    math.nan, "", "a", "7", "../../etc/passwd", "\0", "\ud800", "x" * 10_000, [], {}, [[]], [None],
    [[0, 1]], [[0, 0, 2**61]], [[0, 5, 2]], [[2**61, 0, 1]], [[0, 0, 1]] * 3, [[0.5, 0, 1]],
    [["0", "0", "1"]], [{"bytes": -1, "xxh3": ""}], [{"bytes": 2**62, "xxh3": "0" * 32}],
    [{"bytes": 400}], {"a": {"b": []}},
]


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


class Peak:
    """The most memory that this process has had since this was made."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): forgets the old peak
        self._before = self._read("VmRSS")

    @staticmethod
    def _read(name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024

    def grown(self) -> int:
        return self._read("VmHWM") - self._before


class FakeStore:
    """It remembers what is rejected."""

    def __init__(self):
        self.rejected: list[dict] = []

    def set_verdict(self, name: str, verdict: dict) -> None:
        self.rejected.append(verdict)

    def drop_offers(self, base: int, names: list[str]) -> None:
        pass


@pytest.fixture
def intake() -> Intake:
    """Of a master in version 5 of a run. What would be checked is in its `checks`."""
    settings = SimpleNamespace(inner_steps=20, cold_start=0)
    facts = Facts("a", 5, "abc", "none", (400, 400), 2, {3: 2},
                  most_steps=20, most_samples=160)
    round_ = OpenRound(commit_of(5), 0.0, True, Ledger(1000, 1), facts, settings, {})
    run = SimpleNamespace(event=lambda kind, **fields: None)
    server = SimpleNamespace(store=FakeStore(), run=run)
    averager = SimpleNamespace(drop=lambda keys: None, check_later=lambda header: header)
    return Intake(server, averager, round_)


def test_all_broken_headers_are_refused_and_a_good_one_is_taken(intake: Intake):
    draw, rules = random.Random(1), set()
    peak, rejected = Peak(), intake.server.store.rejected
    free = list(intake.round.ledger.free)
    for _ in range(HEADERS):
        intake.take(5, "3:2", broken(draw))
        for header in list(intake.checks):  # harmless junk: other words, the same delta
            assert (header.tokens, header.samples) != (0, ()), header
            assert math.isfinite(header.loss + header.first_loss)
            json.dumps(asdict(header), allow_nan=False)
            intake.round.forget(header.key)
        intake.checks.clear()
        assert all(len(refused["reason"]) <= MOST_REASON for refused in rejected)
        rules |= {refused["rule"] for refused in rejected}
        rejected.clear()
    assert rules == {"malformed", "shape", "samples", "non-finite", "other-run"}
    assert peak.grown() < MORE_MEMORY
    assert list(intake.round.ledger.free) == free
    intake.take(5, "3:2", json.dumps(GOOD).encode())
    assert [header.key for header in intake.checks] == [(3, 2, 5)]


def test_the_header_that_is_broken_here_is_a_good_one():
    assert asdict(Header.from_json(GOOD)) == {
        **GOOD, "samples": ((0, 64, 96),), "fragments": tuple(GOOD["fragments"])
    }


def test_broken_asks_are_dropped_and_good_ones_are_answered(store):
    draw, asks = random.Random(2), store._key("asks")
    good = Ask(4, 1, 7, 32, ((0, 0, 8),))
    for number in range(2000):
        body = json.dumps([draw.choice([good, *JUNK]) for good in (7, 32, [[0, 0, 8]])]).encode()
        if draw.random() < 0.3:
            body = body[: draw.randrange(len(body))]
        name = draw.choice([f"{number}:1", "x:1", "1", ":", "1:2:3", "é:1"])
        text = body if draw.random() < 0.1 else store._mark(asks, name, body) + body
        store._redis.hset(asks, name.encode(), text)
    store.ask(good)
    found = store.take_asks()
    assert good in found
    assert all(type(number) is int for ask in found for each in ask.held for number in each)
    assert store.take_asks() == []


def test_a_slot_with_a_broken_record_is_nobodys(store, make_run):
    lease = {"job_id": "1", "node": "n", "pid": 1, "state": "training", "version": 0, "step": 0,
             "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0}
    for slot in (1, 2):
        assert store.lease(slot, 1, lease, 60.0)
    store._redis.hset(store._key("slot", 1), "step", "many")
    assert list(store.slots()) == [2]


def test_names_and_numbers_that_are_none_stop_no_master(store, intake):
    names = [b"", b"x", b":", b"\xff\xfe:1", "²:1".encode(), b"9" * 5000 + b":1", b"\0", b"3:2:1"]
    for name in names:
        sealed = store._sealed(store._key("offers", 5), name.decode("latin-1"), {})
        store._redis.hset(store._key("offers", 5), name, sealed)
        store._redis.hset(store._key("attempts"), name, b"1")
    store._redis.hset(store._key("attempts"), "4", b"many")
    store.set_attempts({7: 1})
    found = store.offers([5])[5]
    assert len(found) == len(names)
    for name, body in found.items():
        intake.take(5, name, body)
    assert len(intake.server.store.rejected) == len(names)
    store.drop_offers(5, found)
    assert store.offers([5]) == {5: {}}
    assert (store.attempts(), store.slots()) == ({7: 1}, {})


# ---- bytes --------------------------------------------------------------------------------------

SPECIAL = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, -0.0, 0.0, 1.0]
# What was done to a fragment -> the first words of what the master may say; "" is a finite delta.
SAID = {
    "truncated": {"truncated"}, "longer": {"truncated"}, "missing": {"unreadable"},
    "altered": {"altered"}, "lying": {"altered"}, "another dtype": {"truncated", "non-finite", ""},
    "noise": {"non-finite", ""}, "special": {"non-finite", ""}, "good": {""},
}


def spoilt(draw: random.Random, kind: str, good: bytes) -> tuple[bytes | None, Fragment]:
    """What is stored instead of a fragment (None: nothing), and what its header says."""
    data, at = bytearray(good), draw.randrange(len(good))
    if kind == "truncated":
        return bytes(data[:at]), Fragment(len(good), checksum(good))
    if kind == "longer":
        more = draw.randbytes(draw.choice([1, 4, len(good), 4096]))
        return good + more, Fragment(len(good), checksum(good))
    if kind == "missing":
        return None, Fragment(len(good), checksum(good))
    if kind == "altered":
        data[at] ^= 1 << draw.randrange(8)
        return bytes(data), Fragment(len(good), checksum(good))
    if kind == "lying":
        said = draw.choice(["", "0" * 32, "x", "\ud800", checksum(good).upper() + " ", "9" * 5000])
        return good, Fragment(len(good), said)
    if kind == "another dtype":
        form = draw.choice("bhdqe")
        count = len(good) // draw.choice([2, 4, struct.calcsize(form)])
        data = struct.pack(f"<{count}{form}", *(draw.randint(-99, 99) for _ in range(count)))
    elif kind == "noise":
        data = draw.randbytes(len(good))
    elif kind == "special":
        word = struct.pack("<f", draw.choice(SPECIAL))
        data[at & ~3 : (at & ~3) + 4] = word
        data = data[: len(good)]
    # A header with another size than the model's is refused before anybody looks at the bytes.
    return bytes(data), Fragment(len(good), checksum(bytes(data)))


@pytest.fixture
def deltas(make_run, monkeypatch):
    """deltas(compression) -> rounds, and what stores a fragment's bytes."""
    monkeypatch.setattr(transport, "AGAIN_S", (0.0,))  # a second look helps nobody here

    def make(compression: str):
        run = make_run(f"local_sgd.compression={compression}")
        rounds = Rounds(run, torch.zeros(12), [("weight", (3, 4))])

        def put(name: str, data: bytes | None) -> None:
            if data is None:
                (run.path / "deltas" / name).unlink(missing_ok=True)
            else:
                (run.path / "deltas" / name).write_bytes(data)

        return rounds, put

    return make


def first_header(rounds: Rounds, put) -> tuple[Header, str, bytes]:
    """A good delta of one worker, in place, and its only fragment's name and bytes."""
    header = rounds.put(0, torch.full((12,), 0.5), tokens=4)
    name = fragment_name(header.key, 0)
    path = rounds.run.path / "deltas" / name
    good = path.read_bytes()
    path.unlink()
    put(name, good)
    return header, name, good


@pytest.mark.parametrize("compression", CODECS)
def test_broken_bytes_are_refused_and_a_good_delta_is_merged_as_ever(deltas, compression):
    rounds, put = deltas(compression)
    averager: Averager = rounds.averager
    header, name, good = first_header(rounds, put)
    draw, peak, seen = random.Random(3), Peak(), set()
    for _ in range(DELTAS):
        kind = draw.choice(list(SAID))
        stored, fragment = spoilt(draw, kind, good)
        put(name, stored)
        said, checked = "", None
        try:
            checked = averager.check(replace(header, fragments=(fragment,)))
        except Damaged as error:
            said = error.why.rule
        assert said in SAID[kind], (kind, stored, checked)
        assert said or 0 <= checked.norm < math.inf, (kind, stored, checked)
        seen.add((kind, said))
    put(name, good)
    expected = {(kind, said) for kind, words in SAID.items() for said in words}
    if compression == "none":
        assert expected == seen
    assert peak.grown() < MORE_MEMORY
    assert rounds.close([averager.check(header)]).clipped == 0
    assert torch.all(rounds.theta > 0)


def test_of_a_fragment_of_a_gigabyte_where_a_few_bytes_belong_nothing_is_read(deltas):
    rounds, put = deltas("none")
    header, name, _ = first_header(rounds, put)
    path = rounds.run.path / "deltas" / name
    with path.open("ab") as file:
        file.truncate(1 << 30)
    peak = Peak()
    with pytest.raises(Damaged, match="^truncated: "):
        rounds.averager.check(header)
    assert peak.grown() < MORE_MEMORY
