"""What happened to a run, in the order of time, for the page of report.py. Pure.

Everything follows from the run's events, its commits and its steps of sync mode.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.run import wording
from elastic.run.goodput import job_key
from elastic.run.records import SURPRISES, Commit
from elastic.run.wording import EventKind

INCIDENTS = (
    EventKind.CHAOS, EventKind.LOST, EventKind.HANG, EventKind.RESTART, EventKind.REJECT,
    EventKind.TAKEN_BACK, EventKind.REDIS_LOST, EventKind.DISK, EventKind.WARNING,
    EventKind.NODES_LOST, EventKind.FAIL,
)  # fmt: skip


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, or was made to. `kind`: the fault or the outcome, where
    the event has one. `back_s`: seconds until all was as before. `is_masters`: the whole
    run waited."""

    time: float
    event: str
    kind: str
    words: str
    back_s: float | None = None
    is_masters: bool = False


@dataclass(frozen=True)
class Point:
    """A version, or a step of sync mode; the rate is that since the one before. A loss
    that nobody told is not a number."""

    time: float
    tokens: int
    loss: float
    tokens_per_s: float


def incidents(events: Sequence[Mapping]) -> list[Incident]:
    """What a reader should know of, oldest first."""
    newest_first: list[Incident] = []
    joins, commit_at = {}, None  # the next ones after the event that is looked at
    # What a pass has asked to leave is gone by its user's will.
    asked = {job_key(event) for event in events if event["kind"] == EventKind.CANCEL}
    for event in reversed(events):
        if event["kind"] == EventKind.JOIN:
            joins[event["slot"]] = event["time"]
        elif event["kind"] == EventKind.OUTER_STEP:
            commit_at = event["time"]
        if _is_incident(event, asked):
            kind = event.get("fault") or event.get("outcome") or event["kind"]
            is_masters = event.get("role") == "master" or event["kind"] == EventKind.REDIS_LOST
            back = commit_at if is_masters else _next_join(event, joins)  # all is as before
            back_s = None if back is None else back - event["time"]
            what = (event["kind"], kind, wording.event_words(event))
            newest_first.append(Incident(event["time"], *what, back_s, is_masters))
    return newest_first[::-1]


def _is_incident(event: Mapping, asked: Collection[tuple]) -> bool:
    if event["kind"] == EventKind.END:
        return event["outcome"] in SURPRISES
    if event["kind"] == EventKind.PREEMPT:
        return job_key(event) not in asked
    return event["kind"] in INCIDENTS


def _next_join(event: Mapping, joins: Mapping[int, float]) -> float | None:
    """When the place was filled again."""
    is_workers = event.get("role", "worker") == "worker"
    is_loss = event["kind"] in (EventKind.PREEMPT, EventKind.LOST, EventKind.END)
    return joins.get(event.get("slot")) if is_workers and is_loss else None


def points(commits: Iterable[Commit], metrics: Iterable[Mapping] = ()) -> list[Point]:
    """The way of loss and speed, over versions of local mode and steps of sync mode."""
    versions = [(commit.time, commit.tokens, commit.loss) for commit in commits]
    steps = [(line["time"], line["tokens"], line.get("loss")) for line in metrics]
    # By tokens, not by time: machines may disagree about that.
    return list(_rates(_growing(sorted(versions + _growing(steps), key=lambda row: row[1]))))


def _growing(rows: Iterable[tuple]) -> list[tuple]:
    """Without what was trained again: of equal tokens the newest counts."""
    kept: list[tuple] = []
    for row in rows:
        while kept and kept[-1][1] >= row[1]:
            kept.pop()
        kept.append(row)
    return kept


def _rates(rows: Sequence[tuple]) -> Iterator[Point]:
    for (before, fewer, _), (time, tokens, loss) in pairwise(rows):
        passed_s = time - before if time > before else math.nan
        loss = math.nan if loss is None else loss
        yield Point(time, tokens, loss, (tokens - fewer) / passed_s)
