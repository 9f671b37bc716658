"""The learning rate depends on committed tokens alone; each schedule has the shape of its name."""

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from elastic.train.schedule import WARMUP_START, share_of_peak

TOTAL = 1_000_000


def settings(schedule="wsd", **changes) -> SimpleNamespace:
    values = {
        "learning_rate": 0.004,
        "schedule": schedule,
        "warmup_fraction": 0.1,
        "decay_fraction": 0.2,
        "final_lr_fraction": 0.1,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("schedule", "tokens", "share"),
    [
        ("wsd", 0, WARMUP_START),
        ("wsd", 50_000, (1 + WARMUP_START) / 2),
        ("wsd", 100_000, 1.0),
        ("wsd", 800_000, 1.0),
        ("wsd", 900_000, 0.55),
        ("wsd", 1_000_000, 0.1),
        ("cosine", 100_000, 1.0),
        ("cosine", 550_000, 0.55),
        ("cosine", 1_000_000, 0.1),
        ("constant", 0, WARMUP_START),
        ("constant", 100_000, 1.0),
        ("constant", 1_000_000, 1.0),
    ],
)
def test_the_rate_at_the_corners_of_each_schedule(schedule, tokens, share):
    assert share_of_peak(tokens / TOTAL, settings(schedule)) == pytest.approx(share)


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_the_rate_keeps_its_final_value_beyond_the_last_token(schedule):
    assert share_of_peak(3.0, settings(schedule)) == share_of_peak(1.0, settings(schedule))


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_without_warmup_the_first_step_has_the_full_rate(schedule):
    assert share_of_peak(0.0, settings(schedule, warmup_fraction=0.0)) == 1.0


fractions = st.floats(0, 1)


@given(st.sampled_from(["wsd", "cosine", "constant"]), fractions, fractions, fractions)
def test_any_fractions_give_a_rate_that_rises_to_its_top_and_then_falls(
    schedule, warmup, decay, final
):
    chosen = settings(
        schedule, warmup_fraction=warmup, decay_fraction=decay, final_lr_fraction=final
    )
    rates = [share_of_peak(tokens / TOTAL, chosen) for tokens in range(0, TOTAL + 1, 10_000)]
    top = rates.index(max(rates))
    assert rates == sorted(rates[:top]) + sorted(rates[top:], reverse=True)
    assert all(0 <= rate <= 1 for rate in rates)
