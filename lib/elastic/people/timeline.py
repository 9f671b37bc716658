"""What happened to a run, in the order of time, for the page of report.py. Pure.

Everything follows from the run's events, its commits and its steps of sync mode.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.run.goodput import job_key
from elastic.run.records import SURPRISES, Commit
from elastic.run.wording import EventKind

INCIDENTS = (
    EventKind.CHAOS, EventKind.LOST, EventKind.HANG, EventKind.RESTART, EventKind.REJECT,
    EventKind.TAKEN_BACK, EventKind.REDIS_LOST, EventKind.DISK, EventKind.WARNING,
    EventKind.NODES_LOST, EventKind.FAIL,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A version, or a step of sync mode, with the rate since the one before. A loss that is
    not known is NaN."""

    time: float
    tokens: int
    loss: float
    tokens_per_s: float


def incidents(events: Sequence[Mapping]) -> list[Mapping]:
    """What a reader should know of, oldest first."""
    # A job that a pass asked to leave was not preempted.
    asked = {job_key(event) for event in events if event["kind"] == EventKind.CANCEL}
    return [event for event in events if event["kind"] in INCIDENTS
            or (event["kind"] == EventKind.END and event["outcome"] in SURPRISES)
            or (event["kind"] == EventKind.PREEMPT and job_key(event) not in asked)]  # fmt: skip


def points(commits: Iterable[Commit], metrics: Iterable[Mapping] = ()) -> list[Point]:
    """Loss and speed along the run, over versions of local mode and steps of sync mode."""
    versions = [(commit.time, commit.tokens, commit.loss) for commit in commits]
    steps = [(line["time"], line["tokens"], line.get("loss")) for line in metrics]
    # By tokens, not by time: machines may disagree about that. Of a step that was trained
    # twice the later line counts.
    rows = {row[1]: row for row in versions + steps}
    return list(_rates([rows[tokens] for tokens in sorted(rows)]))


def _rates(rows: Sequence[tuple]) -> Iterator[Point]:
    for (before, fewer, _), (time, tokens, loss) in pairwise(rows):
        passed_s = time - before if time > before else math.nan
        loss = math.nan if loss is None else loss
        yield Point(time, tokens, loss, (tokens - fewer) / passed_s)
