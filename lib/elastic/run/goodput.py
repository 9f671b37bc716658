"""The goodput ledger: what every second of every allocated GPU went into. Pure.

    training   steps that are in a commit (sync mode: that took the run further)
    replay     steps trained a second time (sync mode)
    start-up   from the start of a job, or of an attempt in it, to its first round or step
    waiting    between rounds: validating, delivering, the others, the next version; between
               steps of sync mode: saving, validating, loading samples
    notice     from the notice to the end of the job, but for steps taken and delivered meanwhile
    lost       steps that no commit has, and all that came after a worker had died or hung
    open       since the newest commit, in jobs at work: undecided yet

A job's time is cut at the marks that it left in the run directory (its start and end, its
attempts, its notice) and by its committed work. Each piece is counted once, so the parts
add up to what was allocated. `queued` stands beside them: GPU-seconds that were asked for
and not yet given.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from elastic.run.records import WANTED, Commit, Outcome
from elastic.run.wording import EventKind

PARTS = ("training", "replay", "start-up", "waiting", "notice", "lost", "open")


class Work(NamedTuple):
    """A round of a worker, or a step of a trainer, that counts. Times are wall-clock
    seconds."""

    attempt: tuple[int, int]  # (slot, attempt)
    start: float
    stop: float
    tokens: int
    stall_s: float = 0.0  # the worker's own measure of the wait before it; inf: all of it
    again: bool = False
    trained_s: float = math.inf  # what its steps took; the rest is validation and delivery

    def tokens_between(self, start: float, stop: float) -> float:
        """Its tokens as if they had come evenly."""
        covered_s = max(0.0, min(stop, self.stop) - max(start, self.start))
        return self.tokens * covered_s / max(self.stop - self.start, 1e-9)


class Allocation(NamedTuple):
    """A job that had GPUs. `outcome` is empty while it has them; `attempts` as in
    `Work`."""

    gpus: int
    submitted: float
    start: float
    end: float
    outcome: str = ""
    attempts: tuple[tuple[float, tuple[int, int]], ...] = ()  # with their starts, oldest first
    notice: float | None = None


def work_in(commits: Iterable[Commit], metrics: Iterable[Mapping] = ()) -> list[Work]:
    """All work that counts: deltas of local mode, steps of sync mode."""
    deltas = (delta for commit in commits for delta in commit.deltas if delta.delivered)
    work = [Work((d.slot, d.attempt), d.delivered - (d.seconds or 0.0), d.delivered, d.tokens,
                 d.stall_s or 0.0, trained_s=d.trained_s or math.inf) for d in deltas]
    furthest = tokens = 0
    for line in metrics:
        again = line["step"] <= furthest
        attempt, start = (0, line["attempt"]), line["time"] - line["seconds"]
        grown = 0 if again else line["tokens"] - tokens
        # A trainer that dies or hangs goes on in another attempt: in one, it only waits.
        work.append(Work(attempt, start, line["time"], grown, math.inf, again))
        furthest, tokens = max(furthest, line["step"]), max(tokens, line["tokens"])
    return work


def tokens_per_s(work: Iterable[Work], start: float, stop: float) -> float:
    """The rate at which tokens were trained in a window."""
    return sum(piece.tokens_between(start, stop) for piece in work) / max(stop - start, 1e-9)


def job_key(record: Mapping) -> tuple:
    """Whose an event or an exit record is."""
    return record.get("job_id"), record.get("role"), record.get("slot")


def jobs_in(events: Iterable[Mapping], endings: Iterable[Mapping], now: float) -> list[Mapping]:
    """Every job that has had nodes, as the event of its end tells of it. A job at work
    has no outcome, and lasts until `now`."""
    jobs: dict[tuple, Mapping] = {}
    for end in endings:
        if "started" in end:  # no pass may have noted yet that it has ended
            until = {"ended": now, "outcome": Outcome.AT_WORK, "reason": ""}
            until = {"ended": end["time"]} if end.get("state") == "ended" else until
            jobs[job_key(end)] = {**end, "submitted": end["started"], **until}
    for event in events:
        if event["kind"] == EventKind.END and event.get("started"):
            jobs.pop(job_key(event), None)
            jobs[*job_key(event), event["started"]] = event  # a requeued job has its id again
    return list(jobs.values())


def allocations(
    events: Sequence[Mapping], endings: Iterable[Mapping], gpus: int, now: float
) -> list[Allocation]:
    """Every job that had GPUs, by its events and exit record. `gpus`: how many a worker
    has; a trainer says how many it has, once it has ranks."""
    starts, notices = defaultdict(list), {}
    for event in events:
        if event["kind"] == EventKind.START:
            starts[job_key(event)].append((event["time"], (event["slot"], event["attempt"])))
        elif event["kind"] == EventKind.NOTICE:
            notices[job_key(event)] = event["time"]
    jobs = {job_key(job): job for job in jobs_in(events, endings, now) if job["role"] != "master"}
    names = ("submitted", "started", "ended", "outcome")
    return [Allocation(job.get("gpus", gpus if job["role"] == "worker" else 0),
                       *(job[name] for name in names), tuple(starts[key]),
                       notices.get(key)) for key, job in jobs.items()]


def ledger(jobs: Iterable[Allocation], work: Iterable[Work]) -> dict[str, float]:
    """GPU-seconds by part, their sum as `allocated`, and `queued`."""
    works = defaultdict(list)
    for piece in work:
        works[piece.attempt].append(piece)
    total = Counter(dict.fromkeys((*PARTS, "allocated", "queued"), 0.0))
    for job in jobs:
        mine = [piece for _, attempt in job.attempts for piece in works[attempt]]
        for part, seconds in _divided(job, sorted(mine, key=lambda piece: piece.start)):
            total[part] += job.gpus * seconds
        total["allocated"] += job.gpus * (job.end - job.start)
        total["queued"] += job.gpus * max(0.0, job.start - job.submitted)
    return dict(total)


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """A ledger's parts as shares of what was allocated; goodput is that of training."""
    return {part: seconds[part] / (seconds["allocated"] or 1.0) for part in PARTS}


def _divided(job: Allocation, work: Sequence[Work]) -> Iterator[tuple[str, float]]:
    """(part, seconds) from the job's start to its end, without gap or overlap."""
    at, begun, is_late = job.start, None, False
    for piece in work:
        is_next = piece.attempt == begun
        is_late = is_next and piece.stop > job.end  # a later master took it
        start, stop = _within(job, piece, at, is_late)
        if is_next:
            waited_s = min(start - at, max(piece.stall_s, 0.0))
            yield "waiting", waited_s
            yield "lost", start - at - waited_s  # rounds in between that were rejected
        else:
            yield from _restart(job, at, start, begun)
        trained_s = min(piece.trained_s, stop - start)
        yield "replay" if piece.again else "training", trained_s
        yield "waiting", stop - start - trained_s
        at, begun = stop, piece.attempt
    yield from _last_stretch(job, at, begun, is_late)


def _within(job: Allocation, piece: Work, at: float, is_late: bool) -> tuple[float, float]:
    """When the piece began and ended in the job, not before `at`. A late piece was done
    before the job ended, whenever a master took it: it is moved to `at`."""
    start = at if is_late else min(max(piece.start, at), job.end)
    stop = start + piece.stop - piece.start if is_late else piece.stop
    return start, min(max(stop, start), job.end)


def _last_stretch(
    job: Allocation, at: float, begun: tuple[int, int] | None, is_late: bool
) -> Iterator[tuple[str, float]]:
    """From the last piece of work to the job's end."""
    noticed = min(max(job.notice or job.end, at), job.end)
    if not job.outcome:
        yield "open" if begun else "start-up", noticed - at
    elif begun and (is_late or job.outcome in WANTED):
        yield "waiting", noticed - at
    else:
        yield from _restart(job, at, noticed, begun, "lost" if begun else "start-up")
    yield "notice", job.end - noticed


def _restart(
    job: Allocation, at: float, until: float, begun: tuple[int, int] | None, last: str = "start-up"
) -> Iterator[tuple[str, float]]:
    """A stretch in which attempts began: what was before the last of them is lost."""
    begins = [time for time, attempt in job.attempts if at < time < until and attempt != begun]
    if begun and begins:
        yield "lost", begins[-1] - at
        at, last = begins[-1], "start-up"
    yield last, until - at
