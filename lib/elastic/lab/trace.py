"""What `elastic plan` does: read a trace of preemptions, and say what each way to train
would make of it.

A trace file has lines `milliseconds,add|remove,node`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elastic.base.config import load
from elastic.base.errors import UsageError
from elastic.lab.forecast import costs, forecast
from elastic.lab.played import Change
from elastic.people import submission

MOST_MS = 366 * 86400 * 1000
LINE = "a line is MILLISECONDS,add|remove,NODE"


def advise(path: Path, overrides: Sequence[str], trace: Path,
           say: Callable[[str], object]) -> dict:
    """The forecast of a run for a trace; `say` is told what is not known. UsageError if
    the time of a step is not known."""
    overrides = ("slurm.partition=any", *overrides)  # nothing is submitted
    config = load(path, overrides)
    changes, end = read(trace, max(config.slurm.gpus_per_worker, config.slurm.gpus_per_node))
    model, reason = None, "only run.command knows the model"
    if not config.run.command:
        model, reason = submission.described(path, overrides)
    price = costs(config, model)
    if not price.step_s:
        raise UsageError(f"how long a step takes cannot be known: {reason}",
                         "give --set plan.step=SECONDS")
    if not model:
        say(f"saves and deltas are taken to cost no time: {reason}")
    return forecast(changes, end, config, price)


# ---- traces


def read(path: Path, gpus_per_node: int) -> tuple[list[Change], float]:
    """The changes of a trace file, and how many seconds it has."""
    changes = sorted(_of_lines(path, gpus_per_node), key=lambda change: change.at)
    end = changes[-1].at if changes else 0.0
    if not end or not any(change.gpus for change in changes):
        what = "no end" if not end else "no GPUs: nothing is added in it"
        raise UsageError(f"trace {path} has {what}", LINE)
    return changes, end


def _of_lines(path: Path, gpus: int) -> Iterator[Change]:
    for number, line in enumerate(path.read_text("utf-8-sig", "replace").splitlines(), 1):
        try:
            milliseconds, verb, node = line.split(",")
            if not 0 <= int(milliseconds) <= MOST_MS:
                raise ValueError("no time of a trace")
            yield Change(int(milliseconds) / 1000, node, {"add": gpus, "remove": 0}[verb])
        except (ValueError, KeyError):
            what = f"{path}:{number}: {line[:80]!r} is no line of a trace (of at most a year)"
            raise UsageError(what, LINE) from None
