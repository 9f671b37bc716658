"""Random schedules: the real decisions in worlds where everything is late, lost or said twice.

    pytest -s tests/test_random_schedules.py         ELASTIC_SCHEDULES=100000 for more of them

A schedule is bytes that hypothesis draws and shrinks; a failing one is printed as what happened.
Each decision is then broken in one place, and some schedule must notice.
"""

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from elastic import master, rounds
from elastic.averaging import Averager
from elastic.ledger import Ledger, Ranges
from elastic.master import Master
from elastic.rounds import Facts, Verdict
from schedules import training
from schedules.actors import Violation

SCHEDULES = int(os.environ.get("ELASTIC_SCHEDULES", "10500"))
TRAINING_BYTES = 120
MOST_UNTIL_CAUGHT = 600


def over_schedules(count: int, length: int):
    """Call the test with so many schedules, the same ones every time."""

    def decorate(test):
        drawn = st.binary(min_size=length, max_size=length)
        every = settings(max_examples=count, deadline=None, derandomize=True, database=None,
                         suppress_health_check=list(HealthCheck))  # fmt: skip
        return every(given(drawn)(test))

    return decorate


# ---- broken decisions


def judge_without(rule: str):
    """`judge`, but for the reasons that begin with `rule`."""
    judge = rounds.judge

    def broken(header, facts, refused):
        verdict, reason = judge(header, facts, refused)
        blind = verdict is Verdict.REJECT and reason.startswith(rule)
        return (Verdict.ACCEPT, "it looks good") if blind else (verdict, reason)

    return {(rounds, "judge"): broken}


class Nothing(dict):
    """A table that loses what is put into it, but answers."""

    def values(self):
        return []

    def items(self):
        return []


def refusal_blind_to(name: str):
    refusal = Ledger.refusal

    def broken(self, owner, ranges):
        kept = getattr(self, name)
        setattr(self, name, Ranges() if name == "committed" else {})
        try:
            return refusal(self, owner, ranges)
        finally:
            setattr(self, name, kept)

    return {(Ledger, "refusal"): broken}


def offer_leaves_it_free(self, offer, ranges):
    REAL_OFFER(self, offer, ranges)
    self.free.add(self.offered[offer])


def loser_goes_on(self, epoch, record, on_full_disk):
    won = REAL_COMMIT(self, epoch, record, on_full_disk)
    if won is None:
        self._commit = self.run.commit(record_version(self))
    return won or self._commit


def record_version(averager):
    return averager._commit["version"] + 1


def replaces_the_commit(self, record):
    self.world.changes("link a commit")
    self.linked[record["version"]] = training.json.dumps(record)
    return True


def forgets_what_is_granted(self, owner, want, sharers=1, least=1):
    ranges = REAL_GRANT(self, owner, want, sharers, least)
    self.free.add(self.held.pop(owner))
    return ranges


REAL_OFFER, REAL_COMMIT, REAL_GRANT = Ledger.offer, Averager.commit, Ledger.grant
TRAINING = {
    "judge: any attempt": judge_without("fenced"),
    "judge: any run": judge_without("other-run"),
    "judge: any base": judge_without("stale"),
    "judge: the same delta again": judge_without("duplicate"),
    "judge: whatever the ledger says": judge_without("samples"),
    "refusal: committed samples": refusal_blind_to("committed"),
    "refusal: samples of this round": refusal_blind_to("offered"),
    "refusal: samples of another worker": refusal_blind_to("held"),
    "ledger: frees what is offered": {(Ledger, "offer"): offer_leaves_it_free},
    "ledger: forgets what it granted": {(Ledger, "grant"): forgets_what_is_granted},
    "ledger: forgets what workers say they hold": {(Ledger, "hold"): lambda *_: None},
    "ledger: keeps what is withdrawn": {
        (Ledger, "withdraw"): lambda self, offer: self.offered.pop(offer, None)
    },
    "ledger: keeps what the lost held": {(Ledger, "give_back"): lambda self, owner: 0},
    "master: no fence": {(Master, "_fence"): lambda self: None},
    "master: does not settle": {(Master, "_settle"): lambda self: None},
    "master: superseded deltas count": {(rounds, "superseded"): lambda headers: []},
    "commit: replaces one that is there": {
        (training.MemoryRun, "link_commit"): replaces_the_commit
    },
    "commit: the loser goes on": {(Averager, "commit"): loser_goes_on},
}


@pytest.fixture(scope="module", autouse=True)
def _in_memory():
    with training.in_memory():
        yield


def caught(play, length: int) -> tuple[int, Violation]:
    """How many schedules it takes until one is violated."""
    draw = random.Random(1)
    for number in range(1, MOST_UNTIL_CAUGHT + 1):
        try:
            play(draw.randbytes(length))
        except Violation as violation:
            return number, violation
    raise AssertionError(f"not noticed in {MOST_UNTIL_CAUGHT} schedules")


@pytest.mark.parametrize("name", TRAINING)
def test_a_broken_decision_of_local_mode_is_noticed(name, monkeypatch):
    for (target, attribute), broken in TRAINING[name].items():
        monkeypatch.setattr(target, attribute, broken)
    number, violation = caught(training.play, TRAINING_BYTES)
    print(f"after {number} schedules: {violation}")
