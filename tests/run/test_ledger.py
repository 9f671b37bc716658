"""The ledger against a model that knows every position by name.

    pytest tests/run/test_ledger.py

A random master's life: grants, offers, commits, withdrawals, workers that vanish, masters that
vanish with everything but the commits. After each step every position is in exactly one place, and
what was committed once is never committed again.
"""

import itertools
import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic.run.ledger import Ledger, Ranges, count, take

spans = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30))


def positions(ranges):
    """Every position of `ranges`, once or more often."""
    return Counter((epoch, at) for epoch, start, stop in ranges for at in range(start, stop))


# ---- sets of ranges -----------------------------------------------------------------------------


class RangesMachine(RuleBasedStateMachine):
    """`Ranges` does what a set of positions does, in the fewest ranges."""

    def __init__(self):
        super().__init__()
        self.ranges, self.model = Ranges(), set()

    @rule(some=st.lists(spans, max_size=3))
    def add(self, some):
        self.ranges.add(some)
        self.model |= set(positions(some))

    @rule(some=st.lists(spans, max_size=3))
    def remove(self, some):
        self.ranges.remove(some)
        self.model -= set(positions(some))

    @rule(want=st.integers(-1, 40))
    def take(self, want):
        first = take(list(self.ranges), want)
        self.ranges.remove(first)
        taken = positions(first)
        assert sorted(taken) == sorted(self.model)[: max(0, want)]
        assert set(taken.values()) <= {1}
        self.model -= set(taken)

    @rule(some=st.lists(spans, max_size=3))
    def look(self, some):
        here = set(positions(some)) & self.model
        assert set(positions(self.ranges.common(some))) == here

    @invariant()
    def is_the_set(self):
        assert positions(self.ranges) == Counter(self.model)
        assert len(self.ranges) == len(self.model)
        alone = Ranges([(epoch, at, at + 1) for epoch, at in self.model])
        assert list(self.ranges) == list(alone)

    @invariant()
    def is_in_the_fewest_ranges(self):
        listed = list(self.ranges)
        for (epoch, _, stop), (next_epoch, start, _) in zip(listed, listed[1:], strict=False):
            assert (epoch, stop) < (next_epoch, start)


TestRanges = RangesMachine.TestCase
TestRanges.settings = settings(max_examples=40, stateful_step_count=25)


# ---- the ledger ---------------------------------------------------------------------------------

OWNERS = [(0, 1), (0, 2), (1, 1), (2, 1)]
owners = st.sampled_from(OWNERS)
likely = st.builds(lambda e, start, more: (e, start, start + more),
                   st.integers(0, 1), st.integers(0, 20), st.integers(1, 6))


class LedgerMachine(RuleBasedStateMachine):
    """A master, workers with memories of their own, and a list of everything ever committed."""

    SAMPLES, EPOCHS = 23, 2

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(self.SAMPLES, self.EPOCHS)
        self.workers = {owner: Ranges() for owner in OWNERS}  # what each believes it holds
        self.offers = {}
        self.history = []  # committed ranges, in order
        self.base = 0

    @rule(owner=owners, want=st.integers(1, 15), sharers=st.integers(0, 4))
    def grant(self, owner, want, sharers):
        before = len(self.ledger.free)
        granted = self.ledger.grant(owner, want, sharers)
        assert count(granted) <= want
        assert granted or not before
        self.workers[owner].add(granted)

    @rule(owner=owners, part=st.integers(1, 15), base=st.integers(0, 1))
    def offer_what_is_held(self, owner, part, base):
        """A worker trains on some of what it believes it holds; the master may have other ideas."""
        mine = list(Ranges(self.workers[owner]))
        self.offer(owner, take(mine, part), base)

    @rule(owner=owners, ranges=st.lists(spans | likely, min_size=1, max_size=2))
    def offer_anything(self, owner, ranges):
        self.offer(owner, ranges, 0)

    def offer(self, owner, ranges, late):
        refused = self.ledger.refusal(owner, ranges)
        assert bool(refused) == bool(self.why_not(owner, ranges)), (refused, ranges)
        self.workers[owner].remove(ranges)
        key = (*owner, self.base - late)
        if not refused and ranges and key not in self.offers:
            self.ledger.offer(key, ranges)
            self.offers[key] = ranges

    def why_not(self, owner, ranges):
        wanted = positions(ranges)
        legal = all(
            0 <= e < self.EPOCHS and 0 <= start < stop <= self.SAMPLES for e, start, stop in ranges
        )
        taken = positions(self.history)
        for offered in self.offers.values():
            taken += positions(offered)
        for other, held in self.ledger.held.items():
            taken += positions(held) if other != owner else Counter()
        return not legal or max(wanted.values(), default=1) > 1 or wanted & taken

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def withdraw(self, data):
        key = data.draw(st.sampled_from(sorted(self.offers)))
        del self.offers[key]
        self.ledger.withdraw(key)

    @rule()
    def commit_the_round(self):
        for key, ranges in sorted(self.offers.items()):
            self.ledger.commit(key)
            self.history += ranges
        self.offers.clear()
        self.base += 1

    @rule(owner=owners)
    def a_worker_is_lost(self, owner):
        """The master takes back what it had; the worker itself may come again and believe more."""
        self.ledger.give_back(owner)
        assert owner not in self.ledger.held

    @rule(owner=owners)
    def a_worker_forgets(self, owner):
        self.workers[owner] = Ranges()

    @rule(owner=owners)
    def a_worker_tells(self, owner):
        """After `keep` the ledger's idea is the worker's, less what others got meanwhile."""
        self.ledger.keep(owner, self.workers[owner])
        held = set(positions(self.ledger.held[owner]))
        assert held <= set(positions(self.workers[owner]))

    @rule(owner=owners)
    def an_ask(self, owner):
        """A worker says what it holds, and wants more: as the master answers it."""
        self.a_worker_tells(owner)
        self.workers[owner] = Ranges(self.ledger.held[owner])
        granted = positions(self.ledger.grant(owner, 5, 2))
        assert not granted & positions(self.workers[owner])
        self.workers[owner].add(self.ledger.held[owner])

    @rule()
    def a_new_master(self):
        """Nothing but the commits survives."""
        self.ledger = Ledger(self.SAMPLES, self.EPOCHS, self.history)
        self.offers.clear()

    @invariant()
    def every_position_is_in_exactly_one_place(self):
        ledger = self.ledger
        everywhere = positions(ledger.free) + positions(ledger.committed)
        for held in (*ledger.held.values(), *ledger.offered.values()):
            everywhere += positions(held)
        assert set(everywhere.values()) <= {1}
        first = {(0, at) for at in range(self.SAMPLES)}
        rest = {(1, at) for at in range(self.SAMPLES)}
        assert set(everywhere) in (first, first | rest)

    @invariant()
    def nothing_is_committed_twice(self):
        assert positions(self.history) == positions(self.ledger.committed)

    @invariant()
    def it_is_complete_when_everything_is_committed(self):
        assert self.ledger.complete == (len(self.history_set()) == self.SAMPLES * self.EPOCHS)

    def history_set(self):
        return set(positions(self.history))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=30)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=60)
def test_workers_that_come_and_go_train_every_sample_exactly_once(samples, epochs, seed):
    rng, base = random.Random(seed), 0
    ledger, committed = Ledger(samples, epochs), Counter()
    while not ledger.complete:
        base += 1
        assert base < 5000, f"stuck with {len(ledger.free)} free"
        owner = (rng.randrange(4), 1)
        ranges = ledger.grant(owner, rng.randint(1, 9), sharers=4)
        if rng.random() < 0.3 or not ranges:
            ledger.give_back(owner)
            continue
        assert not ledger.refusal(owner, ranges)
        ledger.offer((*owner, base), ranges)
        if rng.random() < 0.3:
            ledger.withdraw((*owner, base))
        else:
            ledger.commit((*owner, base))
            committed += positions(ranges)
    assert committed == Counter({(e, at): 1 for e in range(epochs) for at in range(samples)})


# ---- stories ------------------------------------------------------------------------------------


def test_samples_go_out_in_order_and_come_back_to_the_front():
    ledger = Ledger(100, 1)
    assert ledger.grant((0, 1), 10) == [(0, 0, 10)]
    assert ledger.grant((1, 1), 10) == [(0, 10, 20)]
    ledger.give_back((0, 1))
    assert ledger.grant((2, 1), 15) == [(0, 0, 10), (0, 20, 25)]


def test_the_next_epoch_opens_when_this_one_runs_short():
    ledger = Ledger(10, 0)
    assert ledger.grant((0, 1), 25) == [(0, 0, 10), (1, 0, 10), (2, 0, 5)]
    assert not ledger.complete


def test_the_rest_of_the_last_epoch_is_shared():
    ledger = Ledger(10, 1)
    assert count(ledger.grant((0, 1), 100, sharers=4, least=2)) == 4
    assert count(ledger.grant((1, 1), 100, sharers=4, least=2)) == 2
    assert count(ledger.grant((2, 1), 100, sharers=4, least=4)) == 4
    assert ledger.grant((3, 1), 100, sharers=4, least=4) == []


@pytest.mark.parametrize(
    ("ranges", "word"),
    [
        ([(0, 0, 5)], "already committed"),
        ([(0, 12, 14)], "another delta"),
        ([(0, 24, 26)], "handed to slot 1"),
        ([(0, 40, 45), (0, 44, 46)], "twice in one delta"),
        ([(0, 99, 101)], "outside"),
        ([(2, 0, 1)], "outside"),
        ([(0, 5, 5)], "outside"),
        ([(0, 30, 40)], ""),  # its own
        ([(0, 90, 100), (1, 0, 3)], ""),  # nobody has them (any more): its lease lapsed
    ],
)
def test_why_samples_are_refused(ranges, word):
    ledger = Ledger(100, 2, committed=[(0, 0, 10)])
    ledger.hold((0, 1), [(0, 10, 20)])
    ledger.offer((0, 1, 7), [(0, 10, 20)])
    ledger.hold((1, 1), [(0, 20, 30)])
    ledger.hold((2, 1), [(0, 30, 40)])
    refused = ledger.refusal((2, 1), ranges)
    assert word in refused
    assert bool(word) == bool(refused)


def test_a_delta_of_an_epoch_that_a_new_master_has_not_opened_yet_stays_committed_once():
    ledger = Ledger(10, 0, committed=[(0, 0, 9)])
    assert ledger.refusal((0, 1), [(1, 0, 4)]) == ""
    ledger.offer((0, 1, 3), [(1, 0, 4)])
    ledger.commit((0, 1, 3))
    assert ledger.grant((1, 1), 10) == [(0, 9, 10), (1, 4, 10), (2, 0, 3)]


def test_a_new_master_believes_what_workers_hold_unless_it_has_been_handed_out():
    ledger = Ledger(20, 1, committed=[(0, 0, 5)])
    ledger.keep((0, 1), [(0, 3, 8)])
    assert list(ledger.held[(0, 1)]) == [(0, 5, 8)]
    ledger.keep((1, 1), [(0, 7, 9)])
    assert list(ledger.held[(1, 1)]) == [(0, 8, 9)]
    ledger.keep((0, 1), [(0, 5, 6)])  # it says that it gave some up
    assert list(ledger.free) == [(0, 6, 8), (0, 9, 20)]


@pytest.mark.parametrize("nonsense", [(10**15, 0, 1), (0, 5, 3), (-1, 0, 4), (0, -3, 4)])
def test_nonsense_that_is_said_to_be_held_changes_nothing(nonsense):
    ledger = Ledger(10, 0)
    ledger.keep((0, 1), [nonsense])
    assert ledger.refusal((0, 1), [nonsense])
    assert len(ledger.held[(0, 1)]) == 0
    assert list(ledger.free) == [(0, 0, 10)]


def test_what_a_new_master_does_grows_with_the_epochs_not_with_their_square():
    """Of 16,000 epochs of a small data set the start took a minute and a half."""

    def calls(epochs: int) -> int:
        counted = itertools.count()
        sys.setprofile(lambda _frame, event, _argument: event == "call" and next(counted))
        try:
            Ledger(10, 0, [(epoch, 0, 10) for epoch in range(epochs)])
        finally:
            sys.setprofile(None)
        return next(counted)

    assert calls(400) < 5 * calls(100)


def test_an_epoch_that_has_begun_is_trained_to_its_end_though_fewer_are_wanted_now():
    """Somebody lowers train.epochs in run.toml: the run was never complete, and granted nothing."""
    ledger = Ledger(10, 1, [(0, 0, 10), (1, 0, 4)])
    assert ledger.grant((0, 1), 20) == [(1, 4, 10)]
    ledger.offer((0, 1, 0), [(1, 4, 10)])
    ledger.commit((0, 1, 0))
    assert ledger.complete


def test_an_empty_data_set_grants_nothing():
    assert Ledger(0, 0).grant((0, 1), 5) == []
    assert Ledger(0, 1).complete


@given(
    st.integers(1, 30), st.integers(0, 3), st.integers(1, 70),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 29), st.integers(1, 30))),
)
def test_one_owner_is_handed_all_that_is_free_in_order(samples, epochs, size, over):
    """As the trainer takes its global batches, on top of what others have committed."""
    over = [(epoch, start, min(stop, samples)) for epoch, start, stop in over
            if epoch < (epochs or 3)]
    ledger, seen = Ledger(samples, epochs, over), []
    while batch := positions(ledger.grant((0, 0), size)):
        seen += batch
        assert len(batch) == size or ledger.grant((0, 0), size) == []
        if not epochs and seen[-1][0] >= 3:
            break
    taken = set(positions(over))
    whole = [(epoch, at) for epoch in range(epochs or 99) for at in range(samples)]
    free = [place for place in whole if place not in taken]
    assert seen == (free if epochs else free[: len(seen)])
