"""How often to save: Young's interval from what was measured, within bounds, and said in words."""

import pytest

from elastic.base import units
from elastic.jobs.cadence import LEAST_S, MOST_S, interval, is_due, observed_mtbi_s


@pytest.mark.parametrize(("save_s", "mtbi_s"), [(2.0, 7200.0), (10.0, 3600.0), (1.0, 600.0)])
def test_no_other_interval_loses_less(save_s, mtbi_s):
    def lost(interval_s):
        return save_s / interval_s + interval_s / 2 / mtbi_s

    best_s, _ = interval(save_s, mtbi_s)
    assert all(lost(best_s) <= lost(best_s * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_saves_that_are_dear_or_cheap_stay_within_bounds():
    assert interval(60.0, 300.0)[0] == 600.0  # never more than a tenth of the time
    assert interval(3.0, 3600.0, 60.0)[0] == 600.0  # nor of the filesystem's: it was 147 s
    assert interval(1.0, 4 * 3600.0, 900.0)[0] == 9000.0  # not even of saves that take minutes
    assert interval(1e-4, 60.0)[0] == LEAST_S
    assert interval(100.0, 1e9)[0] == MOST_S


def test_the_reason_names_cost_and_rate():
    assert interval(2.0, 7200.0)[1] == (
        "every 170 s: a save stalls 2 s, an interruption comes every 120 min"
    )


def test_interruptions_shorten_the_mean_and_none_leaves_a_guess():
    def job(lasted_s, **said):
        return {"role": "trainer", "started": 0.0, "time": lasted_s, **said}

    quiet, at_work = observed_mtbi_s([]), job(86400.0)
    often = observed_mtbi_s([job(3600.0, outcome="yielded")] * 6 + [job(0.0)])
    assert often < quiet < observed_mtbi_s([at_work])


@pytest.mark.parametrize(
    ("setting", "parsed"),
    [("500 steps", (500.0, "steps")), ("10m", (600.0, "s")), ("90s", (90.0, "s")),
     ("2h", (7200.0, "s"))],
)
def test_a_fixed_interval_is_steps_or_time(setting, parsed):
    assert units.interval(setting) == parsed


def test_due_by_steps_by_time_and_by_what_was_measured():
    assert is_due("3 steps", 3, 0.0, 99.0)
    assert not is_due("3 steps", 2, 1e9, 99.0)
    assert is_due("1m", 0, 60.0, 99.0)
    assert not is_due("1m", 10**9, 59.0, 0.0)
    assert is_due("auto", 1, 99.0, 99.0)
    assert not is_due("auto", 10**9, 98.0, 99.0)
