"""What `elastic plan` does: traces of preemptions, from files and runs, and what each way to
train would make of them.

A trace file has lines `milliseconds,add|remove,node`. A run's jobs make one, too: a job's
GPUs are there from its start to its notice or its end, unless it had nothing left to do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from elastic.base.config import load
from elastic.base.errors import UsageError
from elastic.lab.forecast import costs, forecast
from elastic.lab.played import Change
from elastic.people import submission
from elastic.run import goodput, rundir
from elastic.run.goodput import Allocation
from elastic.run.records import WANTED

MOST_MS = 366 * 86400 * 1000
LINE = "a line is MILLISECONDS,add|remove,NODE"


def advise(path: Path, overrides: Sequence[str], source: str,
           say: Callable[[str], object]) -> dict:  # fmt: skip
    """The forecast of a run for a trace; `say` is told what is not known. UsageError if the
    time of a step is not known."""
    overrides = ("slurm.partition=any", *overrides)  # nothing is submitted
    config = load(path, overrides)
    per_node = max(config.slurm.gpus_per_worker, config.slurm.gpus_per_node)
    changes, end = read(source, per_node)
    model, reason = None, "only run.command knows the model"
    if not config.run.command:
        model, reason = submission.described(path, overrides)
    price = costs(config, model)
    if not price.step_s:
        raise UsageError(f"how long a step takes cannot be known: {reason}",
                         "give --set plan.step=SECONDS")  # fmt: skip
    if not model:
        say(f"saves and deltas are taken to cost no time: {reason}")
    return forecast(changes, end, config, price)


# ---- traces


def read(source: str, gpus_per_node: int) -> tuple[list[Change], float]:
    """The changes of a trace file or a run; and how many seconds it has."""
    path = Path(source)
    if path.is_file():
        changes = sorted(_of_lines(path, gpus_per_node), key=lambda change: change.at)
        end = changes[-1].at if changes else 0.0
    else:
        run = rundir.find(source, "file or run")
        changes, end = of_events(run.events(), run.jobs.endings(), gpus_per_node)
    if not end or not any(change.gpus for change in changes):
        what = "no end" if not end else "no GPUs: nothing is added in it"
        raise UsageError(f"trace {source} has {what}", LINE)
    return changes, end


def _of_lines(path: Path, gpus: int) -> Iterator[Change]:
    for number, line in enumerate(path.read_text("utf-8-sig", "replace").splitlines(), 1):
        try:
            milliseconds, verb, node = line.split(",")
            if not 0 <= int(milliseconds) <= MOST_MS:
                raise ValueError("no time of a trace")
            yield Change(int(milliseconds) / 1000, node, {"add": gpus, "remove": 0}[verb])
        except (ValueError, KeyError):
            what = f"{path}:{number}: {line[:80]!r} is no change in a year"
            raise UsageError(what, LINE) from None


def of_events(events: Sequence[Mapping], endings: Sequence[Mapping],
              gpus: int) -> tuple[list[Change], float]:  # fmt: skip
    """The changes that a run has seen, on nodes of so many GPUs; and the time of its last
    event."""
    if not events:
        return [], 0.0
    began, now = events[0]["time"], events[-1]["time"]
    jobs = goodput.allocations(events, endings, gpus, now)
    gpus = min([gpus, *(job.gpus for job in jobs if job.gpus)])  # its jobs may be smaller
    return sorted(_of_jobs(jobs, began, gpus), key=lambda change: change.at), now - began


def _of_jobs(jobs: Iterable[Allocation], began: float, gpus: int) -> Iterator[Change]:
    for job in jobs:
        slot = job.attempts[0][1][0] if job.attempts else -1
        for part in range(job.gpus // gpus):
            yield Change(max(0.0, job.start - began), f"{slot}.{part}", gpus)
            if job.outcome and job.outcome not in WANTED:
                yield Change((job.notice or job.end) - began, f"{slot}.{part}", 0)
