"""Numbers of runs for dashboards that are there already: `elastic-metrics`.

    prometheus          how all runs are now, as a file for node_exporter's textfile collector
    jsonl               a line per version of one run (per step of sync mode), appended
    tensorboard, wandb  the same, by packages that nothing else here needs

A run is the same one across restarts and modes, and another one that has its name is not.
Each of the last three knows the run (by its key) and how many committed tokens it has
been told of, and is told what came after, however often the command is started again.
"""

import importlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic.base.durable import naming, own, read_json, to_json, write_atomic
from elastic.base.environment import user_name
from elastic.base.errors import ElasticError, UsageError
from elastic.base.units import finite
from elastic.run.records import Commit
from elastic.run.rundir import RunDir
from elastic.run.told import Score

GAUGES = {
    "version": ("version", "Newest version; in sync mode the newest step."),
    "tokens": ("tokens", "Committed tokens; samples, of a task without tokens()."),
    "tokens_goal": ("tokens_goal", "Tokens at which the run is done."),
    "loss": ("loss", "Mean training loss of the newest version."),
    "tokens_per_second": ("tokens_per_s", "Committed tokens, over ten versions."),
    "preemptions_per_hour": ("preemptions_per_h", "Preempted jobs, by the last half hour."),
    "gpus": ("gpus", "GPUs at work."),
    "gpus_min": ("min", "Fewest GPUs wanted."),
    "gpus_max": ("max", "Most GPUs to use."),
}
SERIES = ("version", "time", "tokens", "loss", "workers", "inner_steps",
          "outer_lr", "outer_momentum", "agreement")  # of a commit
START = b'{"run": "'  # of a line of JSON
STATES = ("running", "waiting", "stopped", "done", "failed", "damaged", "unknown")


def prometheus(observations: Sequence[dict]) -> str:
    """The text format, of what `status.observe_all` says. What is not known is left
    out."""
    lines, jobs, states = [], [], []
    for name, (key, words) in GAUGES.items():
        lines += _gauge(name, words, [(seen, "", seen[key]) for seen in observations])
    for seen in observations:
        counts = Counter(job["state"] for job in seen["jobs"])
        jobs += [(seen, state, counts[state]) for state in sorted(counts)]
        states += [(seen, state, int(state == seen["state"])) for state in STATES]
    lines += _gauge("jobs", "Jobs in the scheduler.", jobs)
    lines += _gauge("state", "1 for the state a run is in.", states)
    return "\n".join([*lines, ""])


def _gauge(name: str, words: str, samples: Iterable[tuple]) -> Iterator[str]:
    """The lines of one gauge. A sample is (run, state or "", number)."""
    yield f"# HELP elastic_{name} {words}"
    yield f"# TYPE elastic_{name} gauge"
    user = user_name().replace("\\", "\\\\")  # a Windows domain's
    for seen, state, value in samples:
        more = f',state="{state}"' if state else ""
        if value is not None:
            yield f'elastic_{name}{{run="{seen["run"]}",user="{user}"{more}}} {value}'


# ---- one run, version by version


def tell(run: RunDir, sinks: Sequence[Any]) -> None:
    """Give each sink what it has not been told yet."""
    found = [*rows(run, min(sink.told[0] for sink in sinks))]
    for sink in sinks:
        if news := [row for row in found if _reached(row) > sink.told]:
            sink.add(news)
            sink.told = _reached(news[-1])


def rows(run: RunDir, after: int) -> Iterator[dict]:
    """Numbers of every version and every step of sync mode, beyond `after` committed
    tokens and in their order. If a step was done again, its first line counts. If the run
    is done, the last row comes again, with the last validation."""
    steps = [{**{name: line[name] for name in ("step", "time", "tokens", "loss")},
              "workers": line["world"]}
             for line in run.lines("metrics.jsonl") if line["tokens"] >= after]
    versions = [{name: value for name in SERIES if (value := getattr(commit, name)) is not None}
                for commit in _since(run, after)]
    firsts = {row["tokens"]: row for row in reversed(versions + steps)}
    news, row = deque(run.scores.read()), {}
    for tokens, row in sorted(firsts.items()):
        said = {}  # by the newest validation since the row before
        while news and news[0].time <= row["time"]:
            said = _said(news.popleft())
        if tokens > after:
            yield {**row, **said}
    if row and news and run.done():
        yield {**row, **_said(news[-1])}


def _said(score: Score) -> dict:
    values = {**score.values, "tokens": score.tokens}
    return {f"score/{name}": value for name, value in values.items()}


def _since(run: RunDir, after: int) -> list[Commit]:
    """The versions beyond `after` tokens, oldest first, and the one before them, since
    which validations are news."""
    newest_first: list[Commit] = []
    for commit in map(run.commits.of, range(run.commits.newest_version(), 0, -1)):
        newest_first += [commit] if commit else []
        if not commit or commit.tokens <= after:
            break
    return newest_first[::-1]


def sinks(run: RunDir, jsonl: Path | None, tensorboard: Path | None, wandb: str | None):
    """One for each that is wanted. Raises ElasticError for a package that is not
    there."""
    kinds = ((JsonLines, jsonl), (TensorBoard, tensorboard), (WandB, wandb))
    return [kind(place, run) for kind, place in kinds if place]


def _told(place: Path, told: dict, run: RunDir) -> tuple[int, int]:
    """What was told last: (tokens, tokens of a score). UsageError if that was of another
    run. (An older Elastic did not note which.)"""
    if told.get("run", run.key) != run.key:
        raise UsageError(f"{place} is of another run: {told['run']}", "name a new one")
    return _reached(told)


def _reached(row: dict) -> tuple[int, int]:
    """The tokens of a row, and those of the score in it, if there is one."""
    return row["tokens"], row.get("score/tokens", -1)


class JsonLines:
    """A line per row. One that is torn, by a crash or a full disk, is cut off before the next."""

    def __init__(self, path: Path, run: RunDir):
        self.path, self._run = path, run.key
        open(path, "ab", opener=own).close()
        whole, end, torn = path.read_bytes().rpartition(b"\n")
        try:
            told = json.loads(whole.splitlines()[-1]) if whole else {"tokens": 0}
            self.told = _told(path, told, run)
            if not whole and not torn.startswith(START[: len(torn)]):
                raise ValueError("no line of it")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path} has something else in it", "name a new file") from None
        self._size = len(whole + end)

    def add(self, rows: Sequence[dict]) -> None:
        os.truncate(self.path, self._size)
        with naming(self.path), self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps(finite({"run": self._run, **row}), allow_nan=False) + "\n")
        self._size = self.path.stat().st_size


class TensorBoard:
    """Scalars by committed tokens. Those after the mark in elastic.json are written again."""

    def __init__(self, folder: Path, run: RunDir):
        self._package = _package("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._mark, self._run = folder / "elastic.json", run.key
        told = {"tokens": 0, **(read_json(self._mark) or {})}
        self.told = _told(folder, told, run)

    def add(self, rows: Sequence[dict]) -> None:
        folder, first = str(self._mark.parent), self.told[0] + 1
        with self._package.SummaryWriter(folder, purge_step=first) as writer:
            for row in rows:
                for name, value in _numbers(row).items():
                    writer.add_scalar(name, value, row["tokens"], row["time"])
        write_atomic(self._mark, to_json(finite({"run": self._run, **rows[-1]})))


class WandB:
    """The run in a project: made, or gone on with, by its key."""

    def __init__(self, project: str, run: RunDir):
        wandb = _package("wandb", "Weights & Biases", "wandb")
        key = run.key.replace(":", "-")  # an id must not have a colon
        self._run = wandb.init(project=project, id=key, name=run.name, resume="allow")
        told = self._run.summary
        self.told = int(told.get("tokens") or 0), int(told.get("score/tokens") or 0)

    def add(self, rows: Sequence[dict]) -> None:
        for row in rows:
            self._run.log(_numbers(row), step=row["tokens"])


def _package(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ElasticError(f"no {name}: {error}", f"pip install {package}") from None


def _numbers(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items()
            if name != "time" and isinstance(value, int | float)}
