"""Workers of unlike speed: each does as many steps as fit into a round, and holds nobody up.

First the real decisions, played by the book; then real processes.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

import pytest

from elastic.local import rounds
from elastic.local.master.open_round import Checked, OpenRound
from elastic.local.rounds import Facts
from elastic.run.goodput import Work
from elastic.run.ledger import Key, Ledger
from elastic.run.records import Commit, Header
from running import Running, running
from test_forecast import run_of

INNER_STEPS = 40
SETTINGS = {
    "elastic.min": 1,
    "elastic.max": 2,
    "local_scheduler.gpus": 1,
    "local_sgd.inner_steps": INNER_STEPS,
    "local_sgd.min_deadline": "0.5s",
    "local_sgd.deadline_k": 40,  # three times what a round takes: no last call of a busy machine
}
JOIN_S, SETTLED_S, END_S = 300.0, 600.0, 3000.0
PART_S = 0.5  # to deliver, to average, to read

# ---- played


class Claim(NamedTuple):
    """What a round asks of a slot."""

    joined: float
    attempt: int


class Uneven:
    """The real rounds of workers that are not as fast: `first` of them begin, the others join
    later. Slot n takes `paces[n]` seconds for a step, times `varies(n, version)`."""

    def __init__(self, paces: Sequence[float], first: int, varies: Callable[[int, int], float]):
        self._paces, self._varies, self.now = paces, varies, 0.0
        self._settings = run_of(local_sgd__inner_steps=INNER_STEPS).local_sgd
        self._joined = {slot: JOIN_S * (slot >= first) for slot in range(len(paces))}
        self._wakes = dict(self._joined)  # by slot
        self._lives = {slot: self._life(slot) for slot in self._joined}
        commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(), deltas=(),
                        total_tokens=inf)
        facts = Facts("", 0, "", "", (), 2, dict.fromkeys(self._joined, 1))
        self._round = OpenRound(commit, 0.0, True, Ledger(2**60, 0), facts, self._settings, {})
        self._offers: list[Header] = []  # that the master has not looked at
        self._merged = inf  # when there is the next version
        self._trained = 0
        self._came: dict[Key, Work] = {}
        self.work: list[Work] = []  # that is in a version

    def play(self, until: float) -> None:
        while self.now < until:
            for slot, life in self._lives.items():
                if self._wakes[slot] <= self.now:
                    self._wakes[slot] = next(life)
            self._look()
            self.now = max(self.now, min(*self._wakes.values(), *self._moments(), until))

    # ---- a worker

    def _life(self, slot: int) -> Iterator[float]:
        """What it does; each time, until when."""
        stopped = self.now
        while True:
            base, began, steps = self._round.version, self.now, 0
            step_s = self._paces[slot] * self._varies(slot, base)
            while not self._is_over(base, began, steps):
                yield self.now + step_s
                steps += 1
            work = Work((slot, 1), began, self.now, steps, began - stopped)
            stopped = self.now
            if steps:
                yield self.now + PART_S
            self._offer(work, base)
            while base == self._round.version:
                yield inf
            yield self.now + PART_S

    def _is_over(self, base: int, began: float, steps: int) -> bool:
        round_, trained_s = self._round, self.now - began
        if steps == INNER_STEPS or base < round_.version or round_.called is not None:
            return True
        left_s = round_.said(self._joined, self.now)["due"] - PART_S - self.now
        return rounds.is_due(left_s, steps, trained_s)

    def _offer(self, work: Work, base: int) -> None:
        """Its delta, or its word that it has none. A step is a sample, and a token."""
        first, self._trained = self._trained, self._trained + work.tokens
        header = Header(
            run="", slot=work.attempt[0], attempt=1, job_id="", base=base, layout="", codec="",
            steps=work.tokens, tokens=work.tokens, loss=0.0, first_loss=0.0, fragments=(),
            samples=((0, first, self._trained),) if work.tokens else (),
            seconds=self.now - work.start, stall_s=work.stall_s,
        )
        self._came[header.key] = work
        self._offers.append(header)

    # ---- the master

    def _moments(self) -> list[float]:
        """When it has to look, a moment after each deadline."""
        round_, called = self._round, self._round.called
        deadline = round_.opened + rounds.deadline_s(round_.due_s, self._settings)
        over = inf if called is None else called + self._settings.last_call_s
        late = (time + 0.01 for time in (deadline, over))
        return [self._merged, *(time for time in late if time > self.now)]

    def _look(self) -> None:
        if self._merged <= self.now:
            self._publish()
        if self._merged < inf or not (self._offers or self._round.accepted):
            return
        for header in self._offers:
            if not (self._round.hear(header)[0] or header.is_pass):
                self._round.accept(Checked(header), self.now)
        self._offers.clear()
        there = {slot: Claim(joined, 1) for slot, joined in self._joined.items()
                 if joined <= self.now}
        move, _ = self._round.decide(there, there, 0, -inf, self.now)
        if move is rounds.Move.CLOSE:
            self._merged = self.now + PART_S

    def _publish(self) -> None:
        self.work += [self._came.pop(key) for key in sorted(self._round.accepted)]
        commit, _, _ = self._round.close(can_revert=False, epoch=1, now=self.now)
        self._round, self._merged = self._round.after(commit, self.now), inf
        # Those that wait see it; the others look when they are done.
        self._wakes = {slot: self.now if at == inf else at for slot, at in self._wakes.items()}

    # ---- what came of it

    def shares(self) -> list[float]:
        """By slot: the part of its time that it trains, once all are there and known."""
        trained, whole = Counter(), Counter()
        for work in self.work:
            if work.start > SETTLED_S:
                trained[work.attempt[0]] += work.stop - work.start
                whole[work.attempt[0]] += work.stop - work.start + work.stall_s
        return [trained[slot] / whole[slot] for slot in sorted(whole)]

    def last_steps(self) -> list[int]:
        """By pace: the steps of the last round that is committed."""
        last = self.work[-len(self._paces) :]
        assert len({work.attempt[0] for work in last}) == len(self._paces)
        return [work.tokens for work in sorted(last, key=lambda w: self._paces[w.attempt[0]])]


def evenly(_slot: int, _version: int) -> float:
    return 1.0


def swinging(slot: int, version: int) -> float:
    return random.Random(f"{slot} {version}").uniform(0.7, 1.3)


def one_stops(slot: int, version: int) -> float:
    return 120.0 if (slot, version) == (1, 20) else 1.0


def all_become_slower(_slot: int, version: int) -> float:
    return 1.0 if version < 20 else 2.0


@pytest.mark.parametrize(
    ("paces", "steps"),
    [((1, 5, 5, 5), [40, 8, 8, 8]), ((1, 1, 1, 5), [40, 40, 40, 8]), ((1, 1, 1, 1), [40] * 4)],
)
@pytest.mark.parametrize("varies", [evenly, one_stops, all_become_slower])
def test_everybody_trains_nine_tenths_of_the_time_whoever_came_first(paces, steps, varies):
    for order, first in ((paces, 1), (paces, 3), (paces[::-1], 1), (paces[::-1], 3)):
        play = Uneven(order, first, varies)
        play.play(END_S)
        assert len(play.shares()) == len(paces)
        assert min(play.shares()) >= 0.9, (order, first)
        assert play.last_steps() == steps, (order, first)


@pytest.mark.parametrize(
    ("paces", "least"),
    [((1,) * 4, 0.92), ((1,) * 8, 0.92), ((1,) * 32, 0.91), ((1, 5, 5, 5), 0.88)],
)
def test_of_workers_whose_pace_swings_by_a_third_none_waits_for_long(paces, least):
    """Whose pace all follow, and who is itself now faster, now slower, waits the longest. What
    others tell in a round does not put it off for those that are still at it."""
    for order in (paces, paces[::-1]):
        play = Uneven(order, 2, swinging)
        play.play(END_S)
        assert min(play.shares()) >= least, order


# ---- real


def test_unlike_workers_stop_together_and_without_them_a_round_is_due_no_more(tmp_path):
    """The fast one sets the pace, and nobody waits for the other one to do as many steps. When
    both are dead, whoever comes does all steps: it would wait for ever for those that are gone."""
    (tmp_path / "pace.0").write_text("0.08")
    with running(tmp_path, SETTINGS, samples=10**6, step_s=0.4) as run:
        run.until(lambda: run.version >= 1, 120, "a version that tells the pace of the first")
        run.set_capacity(2)
        run.until(lambda: len(whole(run)) >= 6, 120, "six rounds of both")
        commits = whole(run)[2:]
        for pid in run.pids("trainer"):
            os.kill(pid, signal.SIGKILL)
        version = run.version
        run.until(lambda: run.version >= version + 2, 60, "the run goes on")
        alone = run.run.commits.of(version + 2).deltas
    fast, slow = middle_steps(commits[1:])
    assert 25 <= fast <= 40, (fast, slow)
    assert 5 <= slow <= 20, (fast, slow)
    assert min(shares(commits)) >= 0.8, shares(commits)
    # Of two that come one after the other, the later one may have time for a step.
    assert max(delta.steps for delta in alone) > 1


def whole(run: Running) -> list[Commit]:
    """The rounds of both."""
    return [commit for commit in run.commits() if len({d.slot for d in commit.deltas}) == 2]


def middle_steps(commits: list[Commit]) -> list[float]:
    """By slot, of all rounds: in one of them the machine may have been away."""
    found = [{delta.slot: delta.steps for delta in commit.deltas} for commit in commits]
    return [median(steps[slot] for steps in found) for slot in (0, 1)]


def shares(commits: list[Commit]) -> list[float]:
    """By slot: the part of its time that it trains or pays what a round costs anybody, which is
    the shortest standstill of the round: that depends on how busy this machine is. The middle of
    all rounds: in one of them the machine may have been away."""
    found = [{delta.slot: delta for delta in commit.deltas} for commit in commits]

    def share(before: dict, now: dict, slot: int) -> float:
        whole_s = now[slot].delivered - before[slot].delivered
        cost_s = min(delta.stall_s for delta in now.values())
        return 1 - (now[slot].stall_s - cost_s) / whole_s

    return [median(share(*two, slot) for two in pairwise(found)) for slot in (0, 1)]
