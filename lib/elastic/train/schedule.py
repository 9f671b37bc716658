"""The inner learning rate, a function of the tokens that the whole run has committed.
Pure.

Workers come and go and steps are lost with them, so a step counter says nothing about how
far the run is; the committed tokens do, and they are the same for every worker. Nothing
here depends on how many workers there are, on local steps, or on time: losing half the
workers makes training slower and leaves the schedule alone.

Three schedules share a linear warm-up: `wsd` (warm-up, stable, decay: constant until the
last `decay_fraction` of the tokens, then a straight line down), `cosine` and `constant`.
`settings` is anything with learning_rate, schedule, warmup_fraction, decay_fraction and
final_lr_fraction.
"""

import math

WARMUP_START = 0.01  # of the peak; not 0, so that no step is without effect


def share_of_peak(progress: float, settings) -> float:
    """The learning rate where `progress` (1: all) of the run's tokens are trained, as a
    share of its peak; it stays at its final value beyond the end."""
    progress = min(max(progress, 0.0), 1.0)
    return min(_rise(progress, settings), _fall(progress, settings))


def _rise(progress: float, settings) -> float:
    if progress >= settings.warmup_fraction:
        return 1.0
    return WARMUP_START + (1 - WARMUP_START) * progress / settings.warmup_fraction


def _fall(progress: float, settings) -> float:
    if settings.schedule == "constant":
        return 1.0
    final = settings.final_lr_fraction
    if settings.schedule == "wsd":
        left = 1.0 - progress
        share = 1.0 if left >= settings.decay_fraction else left / settings.decay_fraction
    else:  # cosine
        start = settings.warmup_fraction
        along = max(progress - start, 0.0) / (1.0 - start) if start < 1.0 else 0.0
        share = (1.0 + math.cos(math.pi * along)) / 2
    return final + (1.0 - final) * share
