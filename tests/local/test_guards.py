"""Guards: what is damaged is caught, and what is healthy is left alone, in runs of every kind."""

import itertools
import math
import random
from dataclasses import asdict, replace

import pytest
import torch

from elastic.local import rounds
from elastic.local.rounds import Reach, Running
from guarded import Run, Told, World
from helpers import commit_of
from running import running
from test_rounds import header, moved

LR = 1e-3


# ---- how long a delta may be --------------------------------------------------------------------

KNOWN = Reach().after([moved(1.0)])


@pytest.mark.parametrize(
    ("steps", "lr", "expected"),
    [
        (20, LR, 1.0),
        (20, 100 * LR, 100.0),  # the learning rate has risen
        (200, LR, 10.0),  # more steps, which may all go one way
        (5, LR, 0.5),  # fewer, which may each have gone its own
    ],
)
def test_a_length_is_judged_by_what_its_steps_could_have_moved(steps, lr, expected):
    assert KNOWN.length(moved(0.0, steps, lr)) == pytest.approx(expected)


def test_one_delta_of_a_hundred_times_the_length_hardly_moves_what_is_usual():
    reach = KNOWN
    for _ in range(30):
        reach = reach.after([moved(1.0)])
    assert reach.after([moved(100.0)]).length(moved(0.0)) < 1.3


def test_what_is_usual_follows_what_was_seen():
    reach = KNOWN
    for _ in range(60):
        reach = reach.after([moved(50.0)])
    assert reach.length(moved(0.0)) == pytest.approx(50.0, rel=0.2)


def test_partial_deltas_do_not_say_what_is_usual():
    moves = [moved(3.0), moved(3.0), moved(9.0), *[moved(0.1, steps=9)] * 3]
    assert rounds.whole(moves) == moves[:3]
    assert rounds.clips(moves, 2.0, Reach()) == [1.0, 1.0, pytest.approx(2 / 3), 1.0, 1.0, 1.0]
    assert rounds.whole([moved(0.0), moved(1.0, lr=0.0)]) == []  # they compare with nothing


def test_few_deltas_are_clipped_by_the_rounds_before_once_there_are_three():
    early, late = KNOWN.after([moved(1.0)]), KNOWN.after([moved(1.0)]).after([moved(1.0)])
    assert rounds.clips([moved(8.0)], 2.0, early) == [1.0]
    assert rounds.clips([moved(8.0)], 2.0, late) == [pytest.approx(0.25)]
    assert rounds.clips([moved(8.0)], 0.0, late) == [1.0]
    assert rounds.clips([moved(0.0)] * 3, 2.0, late) == [1.0] * 3


# ---- the canary ---------------------------------------------------------------------------------

SEEN = Running(loss=2.0, unrest=0.0001, rounds=50)


@pytest.mark.parametrize(
    ("loss", "running", "most", "bad"),
    [
        (2.31, SEEN, 0.3, True),
        (2.29, SEEN, 0.3, False),
        (1.0, SEEN, 0.3, False),
        (2.7, replace(SEEN, unrest=0.01), 0.3, True),
        (2.5, replace(SEEN, unrest=0.01), 0.3, False),  # six times what is usual is 0.6
        (99.0, replace(SEEN, rounds=9), 0.3, False),  # too early to tell
        (99.0, replace(SEEN, loss=0.0), 0.3, False),
        (0.0, SEEN, 0.3, False),  # nobody has seen it
        (99.0, SEEN, 0.0, False),
    ],
)
def test_the_canary_sees_a_loss_that_rises_by_more_than_chance(loss, running, most, bad):
    assert bool(rounds.canary(loss, running, most)) == bad


def test_a_loss_counts_by_tokens_of_the_newest_version_and_of_enough_samples():
    fresh = [header(0, tokens=100), header(1, tokens=300), header(2, base=4, tokens=999)]
    told = [
        replace(each, loss=loss, samples=((0, 0, 64),))
        for each, loss in zip(fresh, (1.0, 2.0, 9.0), strict=True)
    ]
    assert rounds.round_loss(told, 7) == 1.75
    assert rounds.round_loss(told[1:], 7) == 0.0
    silent = replace(told[0], slot=3, loss=0.0)
    assert rounds.round_loss([*told, silent], 7) == 1.75, "who has told none has none"


def test_means_of_a_commit_are_read_back_and_those_of_an_older_one_begin_anew():
    running = Running().after([moved(1.0)] * 3, 10.0, 2.0).after([moved(2.0)], 10.0, 1.9)
    assert Running.of(commit_of(running=asdict(running))) == running
    assert Running.of(commit_of()) == Running()
    more = asdict(running) | {"apart": 0.1, "compared": 3}  # a mean that is kept no more
    assert Running.of(commit_of(running=more)) == running
    older = {"norm": 0.5, "weight": 7.0, "spread": 0.1, "deltas": 200, "first_loss": 2.0}
    assert Running.of(commit_of(running=older)) == Running(weight=7.0)


# ---- healthy runs of every kind -----------------------------------------------------------------

AXES = {
    "workers": (1, 2, 4, 16), "swinging": (False, True), "cold_start": (0, 0.35, 1),
    "warmup_fraction": (0.0, 0.01, 0.1), "learning_rate": (1e-3, 1e-2, 1e-1),
    "steps": (500, 3000), "inner_steps": (20, 200),
}
MOST_STEPS = 6000  # of all workers of a case
LONG = {"workers": 1, "steps": 100_000, "inner_steps": 200, "cold_start": 0.35}
SAMPLE = 36


def healthy() -> list[dict]:
    """A sample of all combinations, the same every time, and one long run."""
    every = itertools.product(*AXES.values())
    cases = [dict(zip(AXES, each, strict=True)) for each in every]
    short = [case for case in cases if case["workers"] * case["steps"] <= MOST_STEPS]
    return [LONG, *random.Random(14).sample(short, SAMPLE)]


@pytest.mark.parametrize("case", healthy(), ids=lambda case: "-".join(map(str, case.values())))
def test_no_guard_touches_a_healthy_run(case: dict):
    told = trained(World(**case))
    assert told.taken_back == []
    assert min(told.clips) > 0.9
    assert told.losses[-1] < told.losses[0]


def trained(world: World) -> Told:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Run(world).train()
    finally:
        torch.set_num_threads(threads)


# ---- planted faults -----------------------------------------------------------------------------


def flipped(bit: int):
    """The largest element with one bit of its float32 the other way round."""

    def flip(delta: torch.Tensor) -> torch.Tensor:
        delta = delta.clone()
        delta.view(torch.int32)[delta.abs().argmax()] ^= 1 << bit
        return delta

    return flip


FAULTS = {
    "not a number": (lambda delta: delta.index_fill(0, torch.tensor([3]), math.nan), True),
    "too long": (lambda delta: 100 * delta, False),
    "a bit of its exponent": (flipped(30), True),
    "nothing": (torch.zeros_like, False),  # these two only cost their own part of a round
    "wrong sign": (lambda delta: -delta, False),
}


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_delta_is_refused_and_the_run_learns_as_before(name: str, workers: int):
    """Or it is merged, and costs little."""
    fault, is_refused = FAULTS[name]
    steps = 1600 if workers < 3 else 800
    world = World(workers, steps, cold_start=0, learning_rate=1e-3)
    sound, told = trained(world), trained(replace(world, fault=fault, faulty_rounds=(12,)))
    assert told.refused == is_refused
    assert sum(told.losses[-3:]) < 1.3 * sum(sound.losses[-3:])


@pytest.mark.parametrize("bit", range(31))
def test_no_flipped_bit_carries_a_mean_away(bit: int):
    """It is refused, or the delta is no longer than twice what its steps make."""
    world = World(2, steps=700, cold_start=0, fault=flipped(bit), faulty_rounds=(9,))
    told = trained(world)
    assert told.refused or told.faulty_clips
    assert not told.taken_back
    assert told.losses[-1] < 0.5 * told.losses[0]


# ---- the same with processes --------------------------------------------------------------------


def test_a_run_with_nothing_but_defaults_refuses_none_of_its_deltas(tmp_path):
    """Two thousand steps, in rounds that grow from one step to two hundred."""
    defaults = {"local_sgd.cold_start": 0.35, "local_sgd.inner_steps": 200,
                "train.learning_rate": 0.02, "elastic.max": 2,
                "health.lease": "30s"}
    with running(tmp_path, defaults, step_s=0, samples=8_000) as run:
        run.finish()
        # Two workers of a busy machine are not always in step.
        refused = [event["reason"] for event in run.events("reject")]
        assert [reason for reason in refused if not reason.startswith("stale")] == []
        assert run.events("restart") == []
        commits = list(run.run.commits.all())
        assert not [commit.version for commit in commits if commit.clipped]
        assert commits[-1].loss < 0.1 * commits[1].loss


def test_learning_rates_that_nobody_else_has_loosen_no_clip():
    """A delta a thousand times as long as the others', that claims to have had the rates for it."""
    liar = moved(1000.0, 20, 1000 * LR)
    honest = [moved(1.0)] * 3
    reach = Reach().after(honest)
    assert rounds.clips([*honest, liar], 2.0, reach) == [1.0] * 3 + [pytest.approx(0.008)]
    assert rounds.clips([*honest, moved(1000.0)], 2.0, reach)[3] == pytest.approx(0.002)


def test_who_has_ten_times_the_rate_of_those_that_join_with_a_ramp_is_not_clipped():
    old, new = moved(10.0, 10, 1.0), moved(1.0, 10, 0.1)
    reach = Reach().after([old] * 3)
    assert rounds.clips([old, new, new, new], 2.0, reach) == [1.0] * 4
