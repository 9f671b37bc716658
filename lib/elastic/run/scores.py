"""What validations on the way have said of the model: scores.jsonl, a line each."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.base.durable import append_line
from elastic.run.rundir import RunDir
from elastic.run.sound import SCORES
from elastic.run.wording import EventKind


@dataclass(frozen=True)
class Score:
    """`values` by name, of the model as so many committed tokens have made it."""

    time: float
    tokens: int
    values: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """The first that is called a loss."""
        return next((value for name, value in self.values.items() if "loss" in name), None)


def add(run: RunDir, tokens: int, values: Mapping[str, float], **where) -> None:
    """`where`: the version or the step, and who has validated. A task may call its values
    what it likes."""
    run.event(EventKind.VALIDATE, tokens=tokens, scores=values, **where)
    line = {"time": time.time(), "tokens": tokens, "scores": values}
    with contextlib.suppress(OSError):  # a full disk loses the line, and nothing else
        append_line(run.path / SCORES, line)


def read(run: RunDir, last: int = 0) -> list[Score]:
    """In the order of time; the `last` ones, or all."""
    return [Score(line["time"], line["tokens"], line["scores"]) for line in run.lines(SCORES, last)]
