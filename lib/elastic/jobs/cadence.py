"""How often to save a checkpoint. Pure. Measured costs and the past come in.

A checkpoint every T seconds costs stall_s / T of the time, and an interruption without
notice T / 2 on average. The sum is least at T = sqrt(2 stall_s mtbi) (Young, CACM 17(9),
1974; Daly's higher terms, FGCS 22, 2006, matter only where stall_s comes near mtbi).
mtbi, the mean time between interruptions, is what this run has seen, with one imagined
interruption in PRIOR_S: so a run that has seen none does not stop saving, and one bad
first hour does not rule for weeks.
"""

import math
from collections.abc import Mapping, Sequence

from elastic.base import units
from elastic.run.records import INTERRUPTIONS

PRIOR_S = 4 * 3600.0
# An interval is at least so many saves: a tenth of the time, of the disk's too.
LEAST_SAVES = 10.0
LEAST_S, MOST_S = 5.0, 3600.0


def observed_mtbi_s(endings: Sequence[Mapping]) -> float:
    """Mean seconds between interruptions of a run's trainer jobs. The last job may still
    be at work."""
    ends = [end for end in endings if end.get("role") == "trainer" and "started" in end]
    broken = sum(end.get("outcome", "") in INTERRUPTIONS for end in ends)
    lasted_s = sum(end["time"] - end["started"] for end in ends)
    return (lasted_s + PRIOR_S) / max(1, broken)


def interval(stall_s: float, mtbi_s: float, save_s: float = 0.0) -> tuple[float, str]:
    """Seconds between checkpoints, and why. Training stands still for `stall_s` of
    `save_s`."""
    best_s = math.sqrt(2 * stall_s * mtbi_s)
    chosen_s = max(min(max(best_s, LEAST_S), MOST_S), LEAST_SAVES * max(stall_s, save_s))
    return chosen_s, (f"every {chosen_s:.0f} s: a save stalls {stall_s:.2g} s, "
                      f"an interruption comes every {mtbi_s / 60:.0f} min")


def is_due(setting: str, steps: int, seconds: float, auto_s: float) -> bool:
    """Is a checkpoint due, so many steps and seconds after the last one?

    `setting` is `checkpoint.interval`: "auto", "500 steps" or "10m".
    """
    if setting == "auto":
        return seconds >= auto_s
    number, unit = units.interval(setting)
    return steps >= number if unit == "steps" else seconds >= number
