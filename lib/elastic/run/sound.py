"""Records of a run directory, as they are read: whole, or refused with the reason.

Anybody's disk, editor or older version may have been at them. What a field is to be is
said by the record's type, where it has one (records.py); else its name says it, in
whatever record it is, and what else such a record holds is taken as it is.
"""

from pathlib import Path
from typing import TypeVar

from elastic.base.durable import damaged, names, read_json
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.records import restored

T = TypeVar("T")

NUMBER = (int, float)
# What a field is in every record that has no type of its own.
KINDS = {name: kind for kind, names in (
    (NUMBER, "time started ended submitted seconds stall_s delivered loss"),
    (int, "slot attempt base version step steps tokens epoch workers min max"),
    (int, "gpus code total_tokens world"),
    (str, "kind role job_id node reason outcome state mode detail fault"),
    (list, "samples"), (dict, "scores"),
) for name in names.split()}  # fmt: skip
# What is always there; and in an event or the record of a job, by its kind or its state.
ENDING = "job_id role slot time started state"
SCORES = "scores.jsonl"
LOGS = {"events.jsonl": "time kind", SCORES: "time tokens scores",
        "metrics.jsonl": "time step seconds tokens attempt world loss"}  # fmt: skip
MORE = {"start": "role slot attempt job_id", "ended": "role slot outcome reason", "join": "slot",
        "end": "role slot job_id outcome reason gpus submitted ended", "master": "epoch",
        "outer-step": "version tokens", "fail": "reason", "reject": "reason"}  # fmt: skip


class Part:
    """What a run directory holds of one kind."""

    def __init__(self, run):
        self.run = run  # its path may be resolved later


def typed(kind: type[T], path: Path, record: dict | None) -> T | None:
    """What a file's table tells as a `kind` of records.py. Raises ElasticError if it is
    damaged."""
    try:
        return None if record is None else restored(kind, record)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def whole(path: Path, record: dict | None, needed: str = "") -> dict | None:
    """The record. Raises ElasticError if it is damaged."""
    if record is not None and (said := fault(record, needed)):
        raise damaged(path, said)
    return record


def hint(path: Path, needed: str = "") -> dict | None:
    """The table in a file that was not synced: a crash may have left nothing of it. That
    it is not there may be what a network filesystem remembers: its folder is listed.
    Raises TryAgain where the filesystem does not say."""
    try:
        return whole(path, read_json(path) or announced(path), needed)
    except TryAgain:
        raise
    except ElasticError:
        return None


def announced(path: Path) -> dict | None:
    """The table in a file that another machine may be about to write."""
    return read_json(path) if path.name in names(path.parent) else None


def fault(record: object, needed: str = "") -> str:
    """What is wrong with a record: a field that is not there, or another thing than it is
    to be."""
    if not isinstance(record, dict):
        return "not a JSON table"
    names = {*f"{needed} {MORE.get(str(record.get('kind', record.get('state'))), '')}".split()}
    for name in KINDS.keys() & (names | record.keys()):
        value, kind = record.get(name), KINDS[name]
        sound = isinstance(value, kind) and not isinstance(value, bool)
        is_loss = name == "loss" and isinstance(value, float)  # one that is not finite is said
        sound = sound and (is_loss or kind not in (int, NUMBER) or abs(value) < 2**62)
        if not sound and (value is not None or name in names or name not in ("loss", "started")):
            return f"{name} is {str(value)[:80]!r}" if name in record else f"no {name} in it"
    return ""
