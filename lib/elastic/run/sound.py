"""Reading the records of a run directory: a record is whole, or is refused with the reason.

A bad disk, an editor or another version may have damaged it. Where the record has a type
(records.py), that says what its fields are. Else the name of a field says what it is, the
same in all records, and fields of other names are taken as they are.
"""

from pathlib import Path

from elastic.base.durable import damaged, names, read_json
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.records import T, restored

NUMBER = (int, float)
# The kind of a field, in every record that has no type of its own.
KINDS = {name: kind for kind, names in (
    (NUMBER, "time started ended submitted seconds stall_s delivered loss"),
    (int, "slot attempt base version step steps tokens epoch workers min max"),
    (int, "gpus code total_tokens world"),
    (str, "kind role job_id node reason outcome state mode detail fault"),
    (list, "samples"), (dict, "scores"),
) for name in names.split()}
# Fields that are always there; MORE: by an event's kind, or by the state of a job's record.
ENDING = "job_id role slot time started state"
SCORES = "scores.jsonl"
LOGS = {"events.jsonl": "time kind", SCORES: "time tokens scores",
        "metrics.jsonl": "time step seconds tokens attempt world loss"}
MORE = {"start": "role slot attempt job_id", "ended": "role slot outcome reason", "join": "slot",
        "end": "role slot job_id outcome reason gpus submitted ended", "master": "epoch",
        "outer-step": "version tokens", "fail": "reason", "reject": "reason"}


class Part:
    """One kind of what a run directory holds."""

    def __init__(self, run):
        self.run = run  # its path may be resolved later


def typed(kind: type[T], path: Path, record: dict | None) -> T | None:
    """A file's table as a record of type `kind`. Raises ElasticError if it is damaged."""
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
    """The table in a file that was not synced; None if it is not there or damaged, as
    after a crash. A network filesystem may only remember that the file was not there: so
    its folder is listed, too. Raises TryAgain if the filesystem does not answer."""
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
    """What is wrong with a record: a field is missing, or is of another kind; "" if
    nothing. `needed`: the names of fields that must be there."""
    if not isinstance(record, dict):
        return "not a JSON table"
    names = {*f"{needed} {MORE.get(str(record.get('kind', record.get('state'))), '')}".split()}
    for name in KINDS.keys() & (names | record.keys()):
        value, kind = record.get(name), KINDS[name]
        sound = isinstance(value, kind) and not isinstance(value, bool)
        is_loss = name == "loss" and isinstance(value, float)  # a loss may be nan or inf
        sound = sound and (is_loss or kind not in (int, NUMBER) or abs(value) < 2**62)
        may_be_null = name in ("loss", "started") and name not in names
        if not sound and not (value is None and may_be_null):
            return f"{name} is {str(value)[:80]!r}" if name in record else f"no {name} in it"
    return ""
