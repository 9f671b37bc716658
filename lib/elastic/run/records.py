"""The records of a run: what one part of the toolkit hands to another, with its types.
Pure."""

import enum
import math
import re
from dataclasses import asdict, dataclass

from elastic.run.ledger import Range

MAX_FRAGMENTS = 100_000
MOST_CHARACTERS = 200  # of a header's words


class Outcome(enum.StrEnum):
    """How a job ended, as exit records and events spell it. A job writes the first five
    itself; the others are what a pass concludes where a job wrote nothing. But killed is
    also what a worker or a trainer says that had no answer."""

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
    UNKNOWN = "unknown"  # a word of another version

    @classmethod
    def _missing_(cls, value: object) -> "Outcome":
        return cls.UNKNOWN

    @property
    def is_wanted(self) -> bool:
        """The job had delivered everything: nobody wanted more of it."""
        return self in (Outcome.DONE, Outcome.STOPPED)

    @property
    def is_orderly(self) -> bool:
        """The job delivered what it had before it left."""
        return self.is_wanted or self is Outcome.YIELDED

    @property
    def is_preemption(self) -> bool:
        """The scheduler took the job's nodes away."""
        return self in (Outcome.YIELDED, Outcome.KILLED, Outcome.LOST)

    @property
    def is_surprise(self) -> bool:
        """An end that no event of the job itself has told."""
        return self in (Outcome.KILLED, Outcome.LOST, Outcome.FAILED, Outcome.REFUSED, Outcome.HELD)

    @property
    def is_interruption(self) -> bool:
        """By the exit record of a trainer, which says nothing of its end if it was
        killed."""
        return self in (Outcome.AT_WORK, Outcome.YIELDED, Outcome.FAILED, Outcome.KILLED)


class EventKind(enum.StrEnum):
    """What events.jsonl tells of; run/wording.py has the sentence of each."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    START = "start"
    JOIN = "join"
    NOTICE = "notice"
    PREEMPT = "preempt"
    LEAVE = "leave"
    LOST = "lost"
    END = "end"
    RESTART = "restart"
    HANG = "hang"
    DELTA = "delta"
    LAST_CALL = "last-call"
    OUTER_STEP = "outer-step"
    REJECT = "reject"
    TAKEN_BACK = "taken-back"
    INNER_STATE = "inner-state"
    MASTER = "master"
    REDIS_LOST = "redis-lost"
    SCALE = "scale"
    STOP = "stop"
    FAIL = "fail"
    DONE = "done"
    MODE = "mode"
    CHAOS = "chaos"
    WARNING = "warning"
    DISK = "disk"
    NODES_LOST = "nodes-lost"
    NODES_RELEASED = "nodes-released"
    RESTORE = "restore"
    CHECKPOINT_REFUSED = "checkpoint-refused"
    CHECKPOINT_FAILED = "checkpoint-failed"
    NOT_FINITE = "not-finite"
    VALIDATE = "validate"


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
    loss: float
    first_loss: float
    fragments: tuple[Fragment, ...]
    inner: str = ""  # where the inner optimizer state came from, for the record
    seconds: float = 0.0  # from the start of the round to the delivery, on the worker's clock
    stall_s: float = 0.0  # from the last inner step on the base before to the first on this one
    lr_sum: float = 0.0  # of the steps' learning rates; 0: unknown

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.slot, self.attempt, self.base)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Header":
        """Check every field's type and sign. Raises ValueError naming what is wrong."""
        if not isinstance(data, dict):
            raise ValueError("a header is a table")
        kinds = cls.__annotations__ | {"samples": list, "fragments": list}
        fields = {"inner": "", "seconds": 0.0, "stall_s": 0.0, "lr_sum": 0.0, **data}
        if set(fields) != set(kinds):
            raise ValueError(f"fields differ: {sorted(set(fields) ^ set(kinds))}")
        for name, kind in kinds.items():
            value = fields[name]
            if kind is float and type(value) is int and abs(value) < 2**62:
                value = fields[name] = float(value)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, not {kind.__name__}")
            if name == "inner":  # it quotes what went wrong
                words = (c if c.isprintable() else " " for c in value[:MOST_CHARACTERS])
                value = fields[name] = "".join(words)
            if kind is str and not (len(value) <= MOST_CHARACTERS and value.isprintable()):
                raise ValueError(f"{name} is {value!r}")
            if kind is int and not 0 <= value < 2**62:
                raise ValueError(f"{name} is {value}")
            if name in ("seconds", "stall_s", "lr_sum") and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}")
        samples = tuple(_range(each) for each in fields.pop("samples"))
        fragments = fields.pop("fragments")
        if len(fragments) > MAX_FRAGMENTS:
            raise ValueError(f"{len(fragments)} fragments")
        parsed = tuple(_fragment(each) for each in fragments)
        return cls(**fields, samples=samples, fragments=parsed)


def _range(each: object) -> Range:
    whole = isinstance(each, list | tuple) and len(each) == 3
    if not whole or any(type(number) is not int or not 0 <= number < 2**53 for number in each):
        raise ValueError(f"not a sample range: {each!r}")
    return tuple(each)


def _fragment(each: object) -> Fragment:
    whole = isinstance(each, dict) and set(each) == {"bytes", "xxh3"} and len(str(each)) < 100
    if not whole or type(each["bytes"]) is not int or not isinstance(each["xxh3"], str):
        raise ValueError(f"not a fragment: {each!r}")
    return Fragment(**each)


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
    loss: float | None = None
    first_loss: float | None = None
    inner: str | None = None
    seconds: float | None = None
    stall_s: float | None = None
    lr_sum: float | None = None
    norm: float | None = None
    delivered: float | None = None  # Redis TIME

    @classmethod
    def of(cls, record: dict) -> "Delta":
        samples = tuple(map(tuple, record["samples"]))
        return cls(**{**known(cls, record), "samples": samples})


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What is true of a version, as `commits/000123.json` has it. None is not told."""

    version: int
    writer: str = ""
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
    loss: float | None = None
    step: int | None = None  # the checkpoint's that it was
    rejected: dict[str, int] | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    inner_steps: int | None = None
    clipped: int | None = None
    taken_back: int | None = None  # the version that it reverts
    suspect: tuple[int, int] | None = None  # slot and attempt that made that one bad
    running: dict | None = None
    bytes: int | None = None
    cos: float | None = None
    outer_gain: float | None = None
    files: tuple[dict, ...] = ()

    @classmethod
    def of(cls, record: dict) -> "Commit":
        """Of a sound record; what a later version may have added is left out."""
        suspect = record.get("suspect")
        parts = {
            "samples": tuple(map(tuple, record["samples"])),
            "deltas": tuple(map(Delta.of, record["deltas"])),
            "suspect": tuple(suspect) if isinstance(suspect, list) else None,
            "files": tuple(record.get("files", ())),
        }
        return cls(**{**known(cls, record), **parts})

    def to_json(self) -> dict:
        return {**_told(self), "deltas": [*map(_told, self.deltas)]}

    def following(self, **told) -> "Commit":
        """The next version's: it takes over what is the same in all of a run."""
        carried = {name: getattr(self, name) for name in CARRIED}
        return Commit(**{"version": self.version + 1, **carried, **told})


CARRIED = ("layout", "dataset_samples", "epochs", "total_tokens")


def known(kind: type, record: dict) -> dict:
    """Without what a later version may have added."""
    return {name: record[name] for name in kind.__annotations__ if name in record}


def _told(record: Delta | Commit) -> dict:
    return {name: value for name, value in vars(record).items() if value is not None}


@dataclass(frozen=True)
class Node:
    """A node in a partition, as Slurm lists it."""

    partition: str
    name: str
    host: str
    address: str
    state: str
    gres: str


def gpus_of(gres: str, wanted: str) -> int:
    """How many of `wanted` ("gpu", or with a type "gpu:a100") a node's Gres has."""
    found = re.findall(r"([\w:.-]+):(\d+)(?=\(|,|$)", gres)
    return sum(int(n) for kind, n in found if kind == wanted or kind.startswith(f"{wanted}:"))
