"""What jobs leave in files for processes that cannot ask them: exit records, progress,
headers of deltas, scores of validations."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic.base.durable import append_line, insist, names, replace_quickly, to_json, write_atomic
from elastic.base.errors import TryAgain
from elastic.run.membership import NAME
from elastic.run.records import Header
from elastic.run.sound import ENDING, SCORES, Part, hint


class Jobs(Part):
    """Exit records, and how far the ranks of sync mode are."""

    def write_ending(self, job_id: str, record: dict) -> None:
        """Record that a job started, or how it ended.

        A full disk costs the record and nothing else: the job then counts as killed.
        """
        now, path = time.time(), self.run.path / "exit" / f"{job_id}.json"
        before = {} if record["state"] == "started" else _at_best(path)
        times = {"time": now, "started": before.get("started", now)}  # ids come back: start anew
        data = to_json({"job_id": job_id, **times, **record})
        try:
            insist(write_atomic, path, data)
        except (OSError, TryAgain) as error:
            print(f"{record['role']}  no exit record: {error}", file=sys.stderr, flush=True)

    def ending(self, job_id: str) -> dict | None:
        """The job's record of itself; None if there is none, or if it is damaged. Raises
        TryAgain if it cannot be read now: it may tell of a clean end."""
        path = self.run.path / "exit" / f"{job_id}.json"
        return hint(path, ENDING) if NAME.fullmatch(job_id) else None

    def endings(self) -> list[dict]:
        """All exit records that can be read now, for statistics."""
        paths = sorted((self.run.path / "exit").glob("[!.]*.json"))
        told = ((path.stem, _at_best(path, ENDING)) for path in paths)
        return [record for job_id, record in told if record.get("job_id") == job_id]  # no copy

    def write_progress(self, progress: dict) -> None:
        """How far the ranks are, for status: a hint, lost with the next one."""
        with contextlib.suppress(OSError):
            replace_quickly(self.run.path / "progress.json", to_json(progress))

    def progress(self) -> dict | None:
        return _at_best(self.run.path / "progress.json") or None


class Offers(Part):
    """Headers that workers have left behind, with the deltas."""

    def leave(self, header: Header) -> None:
        """Leave the header of a delta that a leaving worker has delivered, for a master
        that has not heard of the delta."""
        slot, attempt, base = header.key
        path = self.run.path / "deltas" / f"{base:06d}" / f"{slot}.{attempt}.left"
        with contextlib.suppress(OSError, TryAgain):  # merged by now, and its folder removed
            insist(write_atomic, path, json.dumps(asdict(header)).encode())

    def left(self, base: int) -> list[tuple[str, bytes]]:
        """("slot:attempt", header) of the workers that have left."""
        folder = self.run.path / "deltas" / f"{base:06d}"
        paths = sorted(folder.glob("*.left")) if folder.name in names(folder.parent) else ()
        return [(path.stem.replace(".", ":"), insist(path.read_bytes)) for path in paths]


@dataclass(frozen=True)
class Score:
    """The result of a validation: `values` by name, of the model after `tokens` committed
    tokens."""

    time: float
    tokens: int
    values: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """The first value whose name says loss."""
        return next((value for name, value in self.values.items() if "loss" in name), None)


class Scores(Part):
    """The scores of validations during the run: scores.jsonl, a line each."""

    def add(self, tokens: int, values: Mapping[str, float], **where) -> None:
        """Add a line; `where`: the version or the step, and who has validated."""
        line = {"time": time.time(), "tokens": tokens, "scores": values, **where}
        with contextlib.suppress(OSError):  # a full disk loses the line, and nothing else
            append_line(self.run.path / SCORES, line)

    def read(self, last: int = 0) -> list[Score]:
        """The `last` scores (0: all), oldest first."""
        lines = self.run.lines(SCORES, last)
        return [Score(line["time"], line["tokens"], line["scores"]) for line in lines]


def _at_best(path: Path, needed: str = "") -> dict:
    """The hint in a file that nothing depends on; {} if there is none."""
    with contextlib.suppress(TryAgain):
        return hint(path, needed) or {}
    return {}
