"""Workers of unlike speed: each does as many steps as fit into a round, and holds nobody up.

First the real decisions, played by the book; then real processes.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from elastic.lab.played_local import Local
from elastic.run.records import Commit
from running import Running, running
from test_forecast import COSTS, run_of, there

SETTINGS = {
    "elastic.min": 1,
    "elastic.max": 4,
    "local_sgd.inner_steps": 20,
    "local_sgd.min_deadline": "0.5s",
    "local_sgd.deadline_k": 1000,  # no last call because of slowness
}
INNER_STEPS = 40
JOIN_S, SETTLED_S, END_S = 300.0, 600.0, 3000.0

# ---- played


class Uneven(Local):
    """`first` workers begin, the others join later. Slot n takes `paces[n]` seconds for a step,
    times `varies(n, version)`."""

    def __init__(self, paces: Sequence[float], first: int, varies: Callable[[int, int], float]):
        nodes = [(f"n{n}", JOIN_S * (n >= first), END_S) for n in range(len(paces))]
        config = run_of(elastic__max=len(paces), local_sgd__inner_steps=INNER_STEPS)
        costs = replace(COSTS, deliver_s=0.5, average_s=0.5, pull_s=0.5)
        super().__init__(there(*nodes), config, costs)
        self._paces, self._varies = paces, varies

    def step_s(self, worker):
        return self._paces[worker.slot] * self._varies(worker.slot, worker.base)

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


def test_a_slow_worker_does_fewer_steps_and_the_round_does_not_wait_for_more(tmp_path):
    (tmp_path / "pace.3").write_text("0.4")
    with running(tmp_path, SETTINGS, samples=10**6, step_s=0.1) as run:
        run.until(lambda: run.version >= 7, 120, "seven versions")
    # In the first round nobody knows a pace; before the first, not all four were there.
    steps = [
        {delta.slot: delta.steps for delta in commit.deltas}
        for commit in run.run.commits.all(3)
        if len(commit.deltas) == 4
    ]
    assert len(steps) >= 3
    for each in steps:
        assert 1 <= each[3] <= 10 < each[0] <= 20, steps
    calls = [event for event in run.run.events() if event["kind"] == "last-call"]
    assert not [call for call in calls if "took longer" in call["reason"]]


def test_a_round_whose_workers_died_is_due_no_more(tmp_path):
    """Whoever comes then does all steps: it would wait for ever for those that are gone."""
    settings = SETTINGS | {"elastic.max": 2, "local_sgd.deadline_k": 0}
    with running(tmp_path, settings, samples=10**6, step_s=0.1) as run:
        run.until(lambda: run.version >= 3, 120, "three versions, and so a pace")
        for slot in (0, 1):
            run.kill("trainer", slot)
        version = run.version
        run.until(lambda: run.version >= version + 2, 60, "the run goes on")
    assert run.run.commits.of(version + 2).deltas[0].steps > 1


def shares(commits: list[Commit], slots: range) -> list[float]:
    """By slot: the part of its time that it trains or pays what a round costs anybody, which is
    the shortest standstill of the round: that depends on how busy this machine is. The middle of
    all rounds: in one of them the machine may have been away."""
    found = [{delta.slot: delta for delta in commit.deltas} for commit in commits]

    def share(before: dict, now: dict, slot: int) -> float:
        whole_s = now[slot].delivered - before[slot].delivered
        cost_s = min(delta.stall_s for delta in now.values())
        return 1 - (now[slot].stall_s - cost_s) / whole_s

    return [median(share(*two, slot) for two in pairwise(found)) for slot in slots]


@pytest.mark.parametrize(("fast", "first"), [(0, 1), (3, 3)], ids=["fast-first", "slow-first"])
def test_what_a_round_is_does_not_depend_on_who_came_first(tmp_path, fast, first):
    (tmp_path / f"pace.{fast}").write_text("0.08")
    settings = SETTINGS | {"local_sgd.inner_steps": INNER_STEPS, "local_scheduler.gpus": first}
    slots = range(4)

    def whole(run: Running) -> list[dict]:
        return [commit for commit in run.commits()
                if {delta.slot for delta in commit.deltas} == set(slots)]  # fmt: skip

    with running(tmp_path, settings, samples=10**6, step_s=0.4) as run:
        run.until(lambda: run.version >= 1, 120, "a version that tells the pace of the first")
        run.set_capacity(len(slots))
        run.until(lambda: len(whole(run)) >= 6, 120, "six rounds of all")
        commits = whole(run)[2:]
    for commit in commits[1:]:
        for delta in commit.deltas:
            least, most = (25, 40) if delta.slot == fast else (5, 15)
            assert least <= delta.steps <= most, commit.deltas
    assert min(shares(commits, slots)) >= 0.9, shares(commits, slots)
