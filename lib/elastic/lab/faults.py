"""Faults that are done to a run on purpose: when, and what each has cost. Pure.

A fault's cost follows from later commits: the steps that its victims had done and that
were never committed, the time until anything was committed again, and the time until
every victim has part in a commit with work that it began after the fault.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean, median

from elastic.run.goodput import Work, tokens_per_s
from elastic.run.membership import Slot
from elastic.run.records import Commit


@dataclass(frozen=True)
class Fault:
    """What was done, when, to whom, and the work that was at stake (in sync mode one
    `Slot` stands for all ranks, and its version is the step they were at)."""

    kind: str
    time: float
    what: str
    at_stake: tuple[Slot, ...]


@dataclass(frozen=True)
class Cost:
    """What a fault cost. A time of inf: not yet, or never."""

    steps_lost: int
    next_commit_s: float
    back_s: float


def schedule(kinds: Sequence[str], every_s: float, for_s: float, draw) -> list:
    """[(seconds after the start, kind)]: pauses of `every_s` on average, and the kinds in
    turns, each turn shuffled, so that none is forgotten. `draw`: a random.Random."""
    at, turn, planned = 0.0, [], []
    while (at := at + every_s * draw.uniform(0.5, 1.5)) < for_s:
        turn = turn or draw.sample(kinds, len(kinds))
        planned.append((at, turn.pop()))
    return planned


def cost_in_local_mode(fault: Fault, commits: Iterable[Commit]) -> Cost:
    after = [commit for commit in commits if commit.time > fault.time]
    deltas = [(commit.time, delta) for commit in after for delta in commit.deltas
              if delta.base is not None]  # fmt: skip
    saved = {(delta.slot, delta.attempt, delta.base) for _, delta in deltas}
    lost = sum(s.step for s in fault.at_stake if (s.slot, s.attempt, s.version) not in saved)
    again = [
        # When work of the slot was committed that it began after the fault.
        min((at for at, d in deltas if d.slot == s.slot and d.base > s.version), default=inf)
        for s in fault.at_stake
    ]
    next_s = after[0].time - fault.time if after else inf
    return Cost(lost, next_s, max(again, default=fault.time) - fault.time)


def cost_in_sync_mode(fault: Fault, metrics: Sequence[Mapping]) -> Cost:
    """The cost by the lines that rank 0 writes, one per step: steps that the next attempt
    does again were lost."""
    hit = fault.at_stake[0]
    after = [line for line in metrics if line["time"] > fault.time]
    later = [line for line in after if line["attempt"] > hit.attempt]
    later = [line for line in later if line["attempt"] == later[0]["attempt"]]
    reached = max((line["step"] for line in metrics if line["attempt"] <= hit.attempt), default=0)
    again = {line["step"] for line in later if line["step"] <= reached}
    least = reached if later else hit.version  # the same attempt was not stopped
    further = (line["time"] for line in later or after if line["step"] > least)
    next_s = after[0]["time"] - fault.time if after else inf
    return Cost(len(again), next_s, next(further, inf) - fault.time)


def by_kind(faults: Sequence[tuple[Fault, Cost]], work: Sequence[Work],
            end: float) -> Iterator[dict]:  # fmt: skip
    """A row per kind: how often, median and worst of what it cost, and the rate of
    training from each to the next fault."""
    times = [fault.time for fault, _ in faults]
    windows = dict(zip(times, [*times, end][1:], strict=True))
    kinds = defaultdict(list)
    for fault, cost in faults:
        kinds[fault.kind].append((cost, tokens_per_s(work, fault.time, windows[fault.time])))
    for kind, outcomes in sorted(kinds.items()):
        costs = [cost for cost, _ in outcomes]
        yield {
            "kind": kind, "count": len(outcomes),
            "steps_lost": sum(cost.steps_lost for cost in costs),
            "next_commit_s": _middle_and_worst(cost.next_commit_s for cost in costs),
            "back_s": _middle_and_worst(cost.back_s for cost in costs),
            "tokens_per_s": mean(rate for _, rate in outcomes),
        }  # fmt: skip


def _middle_and_worst(seconds: Iterable[float]) -> list[float | None]:
    times_s = sorted(seconds)
    return [None if s == inf else round(s, 2) for s in (median(times_s), times_s[-1])]
