"""Numbers of runs for dashboards that are there already: `elastic-metrics`.

    prometheus          how all runs are now, as a file for node_exporter's textfile collector
    jsonl               a line per version of one run (per step of sync mode), appended
    tensorboard, wandb  the same, by packages that nothing else here needs

A run is the same one across restarts and modes: each of the last three knows how many committed
tokens it has heard of, and is told what came after, however often the command is started again.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from elastic.config import user_name
from elastic.durable import own, read_json, to_json, write_atomic
from elastic.errors import ElasticError, UsageError
from elastic.rundir import RunDir

GAUGES = {
    "version": ("version", "Newest version; in sync mode the newest step."),
    "tokens": ("tokens", "Committed tokens; samples, of a task without tokens()."),
    "tokens_goal": ("tokens_goal", "Tokens at which the run is done."),
    "loss": ("loss", "Mean training loss of the newest version."),
    "tokens_per_second": ("tokens_per_s", "Committed tokens per second, over ten versions."),
    "preemptions_per_hour": ("preemptions_per_h", "Jobs that the scheduler took away, by the last"
                             " half hour."),
    "gpus": ("gpus", "GPUs at work."),
    "gpus_min": ("min", "Fewest GPUs wanted."),
    "gpus_max": ("max", "Most GPUs to use."),
}
SERIES = ("version", "time", "tokens", "loss", "workers", "cos", "outer_gain", "outer_lr",
          "inner_steps")  # of a commit
STARTS = (b'{"version": ', b'{"step": ')  # of the lines of JSON
STATES = ("running", "waiting", "stopped", "done", "failed", "damaged")


def prometheus(observations: Sequence[dict]) -> str:
    """The text format, of what `status.observe_all` says. What is not known is left out."""
    lines = []
    for name, (field, words) in GAUGES.items():
        lines += [f"# HELP elastic_{name} {words}", f"# TYPE elastic_{name} gauge"]
        lines += [f"elastic_{name}{{{_label(seen)}}} {seen[field]}" for seen in observations
                  if seen[field] is not None]  # fmt: skip
    lines += ["# HELP elastic_jobs Jobs in the scheduler.", "# TYPE elastic_jobs gauge"]
    for seen in observations:
        states = [job["state"] for job in seen["jobs"]]
        for state in sorted(set(states)):
            lines.append(f'elastic_jobs{{{_label(seen)},state="{state}"}} {states.count(state)}')
    lines += ["# HELP elastic_state 1 for the state a run is in.", "# TYPE elastic_state gauge"]
    lines += [f'elastic_state{{{_label(seen)},state="{state}"}} {int(state == seen["state"])}'
              for seen in observations for state in STATES]  # fmt: skip
    return "\n".join([*lines, ""])


def _label(seen: dict) -> str:
    name = seen["run"].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'run="{name}",user="{user_name()}"'


# ---- one run, version by version


class Sink(Protocol):
    newest: int  # committed tokens of the last row that it has

    def add(self, row: dict) -> None: ...

    def flush(self) -> None: ...


def feed(run: RunDir, sinks: Sequence[Sink]) -> int:
    """Give each sink what it does not have yet. Returns how many rows that were."""
    count = 0
    for row in rows(run, min(sink.newest for sink in sinks)):
        for sink in sinks:
            if row["tokens"] > sink.newest:
                sink.add(row)
                sink.newest = row["tokens"]
                count += 1
    for sink in sinks:
        sink.flush()
    return count


def rows(run: RunDir, after: int) -> Iterator[dict]:
    """Numbers of every version and every step of sync mode beyond so many tokens, in their order.

    Of a step that was done again the first line counts.
    """
    steps = [{"step": line["step"], "time": line["time"], "tokens": line["tokens"],
              "loss": line["loss"], "workers": line["world"]}
             for line in run.lines("metrics.jsonl")]  # fmt: skip
    found = [{name: commit[name] for name in SERIES if name in commit}
             for commit in _commits_beyond(run, after)]  # fmt: skip
    for row in sorted(found + steps, key=lambda row: row["tokens"]):
        if row["tokens"] > after:
            yield row
            after = row["tokens"]


def _commits_beyond(run: RunDir, tokens: int) -> list[dict]:
    """Oldest first; looked for from the newest on: of a long run few are new."""
    found, version = [], run.newest_version()
    while (commit := run.commit(version)) and commit["tokens"] > tokens:
        found.append(commit)
        version -= 1
    return found[::-1]


def sinks(
    run: RunDir, jsonl: Path | None, tensorboard: Path | None, wandb: str | None
) -> list[Sink]:
    """One for each that is wanted. Raises ElasticError for a package that is not there."""
    found: list[Sink] = [JsonLines(jsonl)] if jsonl else []
    found += [TensorBoard(tensorboard)] if tensorboard else []
    return found + ([WandB(wandb, run.name)] if wandb else [])


class JsonLines:
    """A line per row. A last line that is torn, by a crash or a full disk, is cut off."""

    def __init__(self, path: Path):
        self.path, self.newest = path, 0
        open(path, "ab", opener=own).close()
        whole, end, torn = path.read_bytes().rpartition(b"\n")
        try:
            if whole:
                self.newest = json.loads(whole.splitlines()[-1])["tokens"]
            if torn and not any(torn.startswith(start[: len(torn)]) for start in STARTS):
                raise ValueError("no line of it")
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} has something else in it", "name a new file") from None
        os.truncate(path, len(whole + end))

    def add(self, row: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        pass


class TensorBoard:
    """Scalars by committed tokens; what came after the last flush is written again."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ElasticError(f"no TensorBoard: {error}", "pip install tensorboard") from None
        self._mark = folder / "elastic.json"
        self.newest = (read_json(self._mark) or {}).get("tokens", 0)
        self._writer = SummaryWriter(str(folder), purge_step=self.newest + 1)

    def add(self, row: dict) -> None:
        for name, value in _numbers(row):
            self._writer.add_scalar(name, value, row["tokens"], row["time"])

    def flush(self) -> None:
        self._writer.flush()
        write_atomic(self._mark, to_json({"tokens": self.newest}))


class WandB:
    """The run of the same name in a project: made, or gone on with."""

    def __init__(self, project: str, run: str):
        try:
            import wandb
        except ImportError as error:
            raise ElasticError(f"no Weights & Biases: {error}", "pip install wandb") from None
        self._run = wandb.init(project=project, id=run, name=run, resume="allow")
        self.newest = int(self._run.summary.get("tokens") or 0)

    def add(self, row: dict) -> None:
        self._run.log(dict(_numbers(row)), step=row["tokens"])

    def flush(self) -> None:
        pass


def _numbers(row: dict) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in row.items()
            if name != "time" and isinstance(value, int | float)]  # fmt: skip
