"""What a run's own record says that things cost, for forecasts that are held against it."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, median

from elastic.run import goodput
from elastic.run.goodput import Allocation, Work
from elastic.run.records import Outcome
from elastic.run.rundir import RunDir


def measured(run: RunDir) -> dict[str, float]:
    """Costs, by their names in played.Costs: means of what the run has done so far. For the
    pauses between rounds it is the median, because in some a worker waited for others."""
    config, events = run.config(), run.events()
    now = events[-1]["time"] if events else 0.0
    jobs = goodput.allocations(events, run.jobs.endings(), config.slurm.gpus_per_worker, now)
    commits, metrics = list(run.commits.all()), run.lines("metrics.jsonl")
    works: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for piece in sorted(goodput.work_in(commits, metrics), key=lambda piece: piece.start):
        works[piece.attempt].append(piece)
    gaps_s = [after.start - before.stop for work in works.values()
              for before, after in pairwise(work)]
    firsts = [(job.start, works[job.attempts[0][1]]) for job in jobs
              if job.attempts and job.attempts[0][1] in works]
    deltas = [delta for commit in commits for delta in commit.deltas if delta.delivered]
    samples = {
        "startup_s": [work[0].start - start for start, work in firsts],
        "leave_s": [job.end - max([job.notice, *_stops(job, works)]) for job in jobs
                    if job.notice and job.outcome == Outcome.YIELDED],
        "step_s": [delta.seconds / delta.steps for delta in deltas if delta.steps and delta.seconds]
                  or [line["seconds"] * line["world"] / config.elastic.max for line in metrics],
    }
    # Slurm tells whole seconds, and clocks of nodes differ: a mean may come out negative.
    shown = {name: max(0.0, fmean(values)) for name, values in samples.items() if values}
    if deltas and gaps_s:  # a pause holds all four parts: it counts as the pull alone
        shown |= dict.fromkeys(("deliver_s", "deliver_alone_s", "average_s"), 0.0)
        shown |= {"pull_s": max(0.0, median(gaps_s))}
    if deltas:
        steps, tokens = sum(d.steps for d in deltas), sum(d.tokens for d in deltas)
        shown["total_steps"] = commits[-1].total_tokens * steps / tokens
    return shown


def _stops(job: Allocation, works: Mapping) -> list[float]:
    return [work.stop for _, attempt in job.attempts for work in works.get(attempt, ())]
