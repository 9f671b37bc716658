"""The records of a run: what one part of the toolkit hands to another, with its types.
Pure.
"""

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NewType, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from elastic.run.ledger import Range

MOST_CHARACTERS = 200  # of a header's words
MOST = 2**62  # of any number

T = TypeVar("T")
Measured = NewType("Measured", float)  # nobody's decision: it may be not finite


class Outcome(enum.StrEnum):
    """How a job ended, as exit records and events spell it. A job writes the first five
    itself; the others are what a pass concludes where a job wrote nothing. A worker or a
    trainer that had no answer writes killed, too."""

    DONE = "done"  # the run is finished
    STOPPED = "stopped"  # by elastic-stop, or the run goes on in the other mode
    YIELDED = "yielded"  # left in time, after a notice
    FENCED = "fenced"  # a higher attempt has its place
    FAILED = "failed"
    CRASHED = "crashed"  # an attempt, never a job: it is started again, or the job has failed
    LOST = "lost"  # the scheduler names the cause: preemption, time limit, dead node
    KILLED = "killed"  # nobody knows the cause
    CANCELLED = "cancelled"  # by a pass, or by the job's owner
    HELD = "held"  # would never have started
    REFUSED = "refused"  # never had a node
    AT_WORK = ""  # the job has not ended

# A word of another version is in none of these.
# The job had delivered everything: nobody wanted more of it.
WANTED = (Outcome.DONE, Outcome.STOPPED)
# The job delivered what it had before it left.
ORDERLY = (*WANTED, Outcome.YIELDED)
# The scheduler took the job's nodes away.
PREEMPTIONS = (Outcome.YIELDED, Outcome.KILLED, Outcome.LOST)
# Ends that no event of the job itself has told.
SURPRISES = (Outcome.KILLED, Outcome.LOST, Outcome.FAILED, Outcome.REFUSED, Outcome.HELD)
# By the exit record of a trainer, which says nothing of its end if it was killed.
INTERRUPTIONS = (Outcome.AT_WORK, Outcome.YIELDED, Outcome.FAILED, Outcome.KILLED)


Name = NewType("Name", str)  # of a file, or in one
Place = NewType("Place", str)  # in the run directory
# A lone surrogate can be written nowhere.
WORDS = {str: "[^\ud800-\udfff]*", Name: r"(?a)[\w.-]{0,100}", Place: r"(?a)(?!/|.*\.\.)[\w./-]+"}
# What JSON has for a value that is no record: what is 1.0 may be written as 1.
PLAIN = {bool: (bool,), int: (int,), float: (float, int), Measured: (float, int), dict: (dict,)}


def restored(kind: type[T], raw: object) -> T:
    """The record in a table from JSON. What it does not tell has its default, and what a
    later version may have added is left out. Raises ValueError naming what is wrong."""
    read = _reader(kind)
    try:
        return read(raw)
    except TypeError:
        raise ValueError("not a JSON table") from None


@functools.cache
def _reader(kind: Any) -> Callable:
    """Of a value. Raises TypeError for one of another kind, and ValueError naming a field
    in it that is. A tuple's parts are of one kind."""
    parts = get_args(kind)
    if kind in WORDS:
        return functools.partial(_word, re.compile(WORDS[kind]))
    if kind in PLAIN:
        return functools.partial(_plain, kind, PLAIN[kind])
    if type(None) in parts:
        read = _reader(parts[0])
        return lambda raw: None if raw is None else read(raw)
    if get_origin(kind) is tuple:
        return functools.partial(_tuple, _reader(parts[0]), 0 if ... in parts else len(parts))
    readers = {name: _reader(part) for name, part in get_type_hints(kind).items()}
    return functools.partial(_record, kind, readers)


def _plain(kind: Any, types: tuple[type, ...], raw: Any) -> Any:
    if type(raw) not in types or (kind in (int, float) and not abs(raw) < MOST):
        raise TypeError
    return float(raw) if float in types else raw


def _word(pattern: re.Pattern, raw: Any) -> str:
    if not pattern.fullmatch(raw):
        raise TypeError
    return raw


def _tuple(read: Callable, length: int, raw: object) -> tuple:
    """Of so many parts; 0: of any number."""
    if not isinstance(raw, list | tuple) or len(raw) != (length or len(raw)):
        raise TypeError
    return tuple([read(each) for each in raw])


def _record(kind: type, readers: dict[str, Callable], raw: object) -> Any:
    told, table = {}, _plain(dict, (dict,), raw)
    for name, read in readers.items():
        if name in table:
            try:
                told[name] = read(table[name])
            except (TypeError, OverflowError):
                raise ValueError(f"{name} is {str(table[name])[:80]!r}") from None
        elif not hasattr(kind, name):
            raise ValueError(f"no {name} in it")
    return kind(**told)


@dataclass(frozen=True)
class Fragment:
    """How to know the bytes of one fragment; where they are follows from the delta's
    key."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Header:
    """A delta's metadata, as its worker announced it. The delta is base minus local."""

    run: str
    slot: int
    attempt: int
    job_id: str
    base: int
    layout: str
    codec: str
    steps: int
    tokens: int
    samples: tuple[Range, ...]
    loss: Measured
    first_loss: Measured
    fragments: tuple[Fragment, ...]
    inner: str = ""  # where the inner optimizer state came from, for the record
    seconds: float = 0.0  # from the start of the round to the delivery, on the worker's clock
    stall_s: float = 0.0  # from the last inner step on the base before to the first on this one
    trained_s: float = 0.0  # of `seconds`, what the steps took; 0: unknown
    lr_sum: float = 0.0  # of the steps' learning rates; 0: unknown

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.slot, self.attempt, self.base)

    @property
    def is_pass(self) -> bool:
        """The worker answers, and has nothing to give."""
        return self.tokens == 0 or self.steps == 0

    @classmethod
    def from_json(cls, data: object) -> "Header":
        """Who has a worker's password may have written it; what a newer worker tells more
        is passed over. Raises ValueError naming what is wrong."""
        header = restored(cls, data)
        # It quotes what went wrong.
        words = (c if c.isprintable() else " " for c in header.inner[:MOST_CHARACTERS])
        header = replace(header, inner="".join(words))
        for name, value in vars(header).items():
            is_word = isinstance(value, str) and len(value) <= MOST_CHARACTERS
            is_amount = isinstance(value, int | float) and ("loss" in name or value >= 0)
            if not (isinstance(value, tuple) or is_amount or (is_word and value.isprintable())):
                raise ValueError(f"{name} is {value!r}")
        if any(not 0 <= number < 2**53 for each in header.samples for number in each):
            raise ValueError(f"no sample ranges: {header.samples!r}")
        return header


class File(TypedDict):
    """A file of a commit, as the commit tells of it."""

    path: Place
    bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A delta that is in a version, or what stands for one of sync mode, as the commit
    tells of it. None is not told: by sync mode, or by a version of before."""

    role: str | None = None  # of sync mode: trainer
    slot: int
    attempt: int
    job_id: str | None = None
    base: int | None = None  # None: sync mode's
    codec: str | None = None
    steps: int
    tokens: int
    samples: tuple[Range, ...]
    loss: Measured | None = None
    first_loss: Measured | None = None
    inner: str | None = None
    seconds: float | None = None
    stall_s: float | None = None
    trained_s: float | None = None
    lr_sum: float | None = None
    norm: Measured | None = None
    delivered: float | None = None  # Redis TIME


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What is true of a version, as `commits/000123.json` has it. None is not told."""

    version: int
    writer: Name = ""
    master_epoch: int
    time: float
    layout: str = ""
    dataset_samples: int = 0
    epochs: int = 0
    total_tokens: int = 0  # that the run comes to
    tokens: int
    samples: tuple[Range, ...]
    deltas: tuple[Delta, ...]
    workers: int = 1
    loss: Measured | None = None
    step: int | None = None  # the checkpoint's that it was
    rejected: dict | None = None  # by rule, how many deltas
    outer_lr: float | None = None
    outer_momentum: float | None = None
    agreement: float | None = None  # cosine of the mean delta and the momentum before it
    inner_steps: int | None = None
    clipped: int | None = None
    taken_back: int | None = None  # the version that it reverts
    running: dict | None = None
    bytes: int | None = None
    files: tuple[File, ...] = ()

    def to_json(self) -> dict:
        return {**_told(self), "deltas": [*map(_told, self.deltas)]}

    def following(self, **told) -> "Commit":
        """The next version's: it takes over what is the same in all of a run."""
        carried = {name: getattr(self, name) for name in CARRIED}
        return Commit(**{"version": self.version + 1, **carried, **told})


CARRIED = ("layout", "dataset_samples", "epochs", "total_tokens")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Commit):
    """One of sync mode, as the version that it could be made."""

    base_version: int = 0
    step: int
    skipped: tuple[Range, ...] = ()  # whose batches were not finite


def as_commit(record: object) -> dict:
    """A checkpoint's table as a commit has it, for `restored`: its trainer's state is
    left out. Raises ValueError."""
    table = restored(dict, record)
    told = {**restored(dict, table.get("extra")), **table}
    return {"version": 0, "master_epoch": 0, "time": 0.0, "step": None, "files": None, **told}


def _told(record: Delta | Commit) -> dict:
    return {name: value for name, value in vars(record).items() if value is not None}
