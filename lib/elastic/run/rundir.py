"""The run directory: the durable truth of a run, on the shared filesystem.

Everything a run needs to go on is here; Redis can be emptied and every process killed at
any moment. The names, and who writes them:

    run.toml environment.json secret*    elastic-submit, once; nobody else may read them
    id                                   likewise; in every key of the run's in Redis
    control.json                         elastic-scale, elastic-stop: what the user wants
    endpoint.json  masters/000004.json   the master: where its Redis is; its epoch, by link()
    versions/000123/ commits/000123.json the master: versions.py says how a version is committed
    slots/0007/                          worker of the slot: attempts by link(), inner state
    deltas/000123/                       bytes of deltas on their way (transport.py), and headers
                                         of those whose workers have left (SLOT.ATTEMPT.left)
    exit/JOB.json                        one record per job: started, ended, why
    events.jsonl logs/ DONE failed.json  what happened

Rules: bytes before pointer, one winner per name (durable.py), exact paths. Only `exit/`,
small and read by reconcile and status alone, and what workers have left, by a new master,
is ever listed.
"""

import contextlib
import functools
import hmac
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elastic.base import config as configuration
from elastic.base.config import Config
from elastic.base.durable import (
    append_line,
    check_folder,
    check_private,
    create_once,
    exists,
    insist,
    make_folder,
    names,
    read_json,
    replace_quickly,
    to_json,
    write_atomic,
)
from elastic.base.environment import registry_dir
from elastic.base.errors import ElasticError, Fenced, TryAgain, UsageError
from elastic.base.units import size
from elastic.run.membership import NAME
from elastic.run.records import Commit, Header, known

FOLDERS = ("versions", "commits", "slots", "checkpoints", "logs", "exit", "masters", "deltas")
PRIVATE = 0o600
SECRETS = {"master": "secret", "worker": "secret-worker", "reader": "secret-reader",
           "seal": "secret-seal"}  # of what workers and the master tell each other: no password
LEAST_FILES = 32  # inodes: a version makes a few
NUMBER = (int, float)
# What a field is in every record that has it; what else a record holds is taken as it is.
KINDS = {name: kind for kind, names in (
    (NUMBER, "time started ended submitted seconds stall_s delivered loss"),
    (int, "slot attempt base version step steps tokens epoch master_epoch workers min max port"),
    (int, "gpus code dataset_samples epochs total_tokens world"),
    (str, "kind role job_id node reason outcome state mode host url certificate layout writer"),
    (str, "detail fault"),
    (list, "samples deltas files"), (dict, "extra"),
) for name in names.split()}  # fmt: skip
# What is always there; and in an event or the record of a job, by its kind or its state.
CONTROL, ENDPOINT, ENDING = "mode state min max", "host port epoch", (
    "job_id role slot time started state")
COMMIT = "version master_epoch time tokens samples deltas"
LOGS = {"events.jsonl": "time kind", "metrics.jsonl": "time step seconds tokens attempt world loss"}
DELTA = "slot attempt steps tokens samples"
MORE = {"start": "role slot attempt job_id", "ended": "role slot outcome reason", "join": "slot",
        "end": "role slot job_id outcome reason gpus submitted ended", "master": "epoch",
        "outer-step": "version tokens", "fail": "reason", "reject": "reason"}  # fmt: skip
MOST_LINE = 2048  # bytes of a log's line, on average, that are looked at


@dataclass(frozen=True)
class Control:
    """What the user wants now."""

    mode: str
    state: str  # running | stopped
    min: int  # GPUs
    max: int
    time: float = 0.0  # when it was last changed


@dataclass(frozen=True)
class Endpoint:
    """Where the newest master's Redis is."""

    host: str
    port: int
    epoch: int
    url: str = ""  # a server that the site provides
    certificate: str = ""  # PEM, where the server speaks TLS
    nonce: str = ""  # of one start of the server


class RunDir:
    """One run's directory. Cheap to make; reads and writes happen in the methods."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.name = self.path.name
        self._config: Config | None = None

    @classmethod
    def create(
        cls, root: Path, config: Config, control: Control, environment: dict[str, str]
    ) -> "RunDir":
        """Make the directory of a new run and register its name. UsageError if it is
        taken."""
        run = cls(Path(root).resolve() / config.run.name)
        link = registry_dir() / "runs" / run.name
        if run.path.exists() or (link.is_symlink() and link.readlink() != run.path):
            where = run.path if run.path.exists() else Path(os.readlink(link))
            folder = where if where.exists() else link
            raise UsageError(
                f"run name taken: {run.name!r} is {where}",
                f"choose another --name; of a run that is over remove {folder}",
            )
        draft = cls(run.path.with_name(f".{run.name}.{secrets.token_hex(16)}"))
        try:
            make_folder(draft.path, 0o700, parents=True)
            for folder in FOLDERS:
                make_folder(draft.path / folder)
            write_atomic(draft.path / "run.toml", config.to_toml().encode(), PRIVATE)
            write_atomic(draft.path / "environment.json", to_json(environment), PRIVATE)
            write_atomic(draft.path / "id", secrets.token_hex(8).encode())
            for name in SECRETS.values():
                write_atomic(draft.path / name, secrets.token_hex(24).encode(), PRIVATE)
            write_atomic(draft.path / "control.json", to_json(asdict(control)))
            make_folder(link.parent, parents=True)
            with contextlib.suppress(FileExistsError):  # somebody who died made it for this path
                link.symlink_to(run.path)
            os.rename(draft.path, run.path)  # the one of several who try at once that made it
        except OSError as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            raise ElasticError(
                f"cannot make the run directory {run.path}: {error.strerror}",
                "set ELASTIC_RUNS to a writable folder on the shared filesystem",
            ) from None
        return run

    # ---- what the user wants

    @functools.cached_property
    def private(self) -> Path:
        """The path, of what says what is run. ElasticError: others could have written
        there."""
        self.path = check_private(self.path)  # a link that leads here may change
        for folder in filter(Path.exists, (self.path / name for name in FOLDERS)):
            check_private(folder)
        return self.path

    def config(self) -> Config:
        """The resolved configuration, as it was at submission."""
        if self._config is None:  # it is written once
            self._config = configuration.load_written(self.private / "run.toml")
        return self._config

    @functools.cached_property
    def key(self) -> str:
        """What the run is on a Redis that others use, too: a name may be another user's,
        or have been another run's. Without an id in runs from before there was one."""
        path = self.private / "id"
        return f"{self.name}:{path.read_text().strip()}" if path.exists() else self.name

    def environment(self) -> dict[str, str]:
        """The environment that every job of this run starts from."""
        return read_json(self.private / "environment.json") or {}

    def secret(self, role: str = "master") -> str:
        """What passwords of `role` (master, worker, reader) are made of; or `seal`."""
        return insist((self.private / SECRETS[role]).read_text).strip()

    def password(self, role: str, endpoint: Endpoint) -> str:
        """Of `role` on that one server: who was told it knows nothing of the next
        one's."""
        secret, nonce = self.secret(role), endpoint.nonce  # none: of a master of before
        return hmac.digest(secret.encode(), nonce.encode(), "sha256").hex() if nonce else secret

    def control(self) -> Control:
        found = read_json(self.private / "control.json")
        if found is None:
            raise ElasticError(f"not a run directory: {self.path}", "elastic-status lists the runs")
        return Control(**known(Control, whole(self.path / "control.json", found, CONTROL)))

    def set_control(self, **changes) -> Control:
        control = replace(self.control(), **changes, time=time.time())
        write_atomic(self.private / "control.json", to_json(asdict(control)))
        return control

    # ---- masters

    def endpoint(self) -> Endpoint | None:
        found = whole(self.private / "endpoint.json", self._read("endpoint.json"), ENDPOINT)
        return Endpoint(**known(Endpoint, found)) if found else None

    def set_endpoint(self, endpoint: Endpoint) -> None:
        write_atomic(self.path / "endpoint.json", to_json(asdict(endpoint)), PRIVATE)

    def claim_epoch(self, record: dict) -> int:
        """The next master epoch; a lower one is fenced from now on."""
        return _next_number(self.path / "masters", record)

    def newest_epoch(self) -> int:
        """The higher of what the records and the endpoint of the newest master say."""
        endpoint = self.endpoint()
        return max(_newest_number(self.path / "masters"), endpoint.epoch if endpoint else 0)

    # ---- slots

    def slot_path(self, slot: int) -> Path:
        path = self.private / "slots" / f"{slot:04d}"
        make_folder(path)
        return check_folder(path)

    def claim_attempt(self, slot: int, record: dict) -> int:
        """The next attempt of `slot`; a lower one is fenced from now on."""
        return _next_number(self.slot_path(slot), record)

    def latest_attempt(self, slot: int) -> int:
        return _newest_number(self.path / "slots" / f"{slot:04d}")

    def fence(self, slot: int, attempt: int) -> None:
        """Raise Fenced if there is a higher attempt. Redis may say so, and believes
        anybody."""
        if (newest := self.latest_attempt(slot)) > attempt:
            raise Fenced(f"slot {slot} has attempt {newest}, which is higher than {attempt}")

    # ---- the end

    def closing(self, mode: str = "") -> str:
        """Why the run does not go on (in this mode): done, failed, stopped, the other
        mode; ""."""
        if self.done():
            return "done"
        if self.failed():
            return "failed"
        control = self.control()
        if control.state == "stopped":
            return "stopped"
        return f"going on in {control.mode} mode" if mode not in ("", control.mode) else ""

    def done(self) -> dict | None:
        return self._read("DONE")

    def mark_done(self, record: dict) -> None:
        write_atomic(self.path / "DONE", to_json(record))

    def failed(self) -> dict | None:
        return whole(self.path / "failed.json", self._read("failed.json"), "reason")

    def mark_failed(self, reason: str, detail: str = "") -> None:
        record = {"time": time.time(), "reason": reason, "detail": detail}
        write_atomic(self.path / "failed.json", to_json(record))
        self.event("fail", reason=reason)

    def _read(self, name: str) -> dict | None:
        """The table in a file that another machine may be about to write."""
        return read_json(self.path / name) if name in names(self.path) else None

    def clear_failed(self) -> None:
        (self.path / "failed.json").unlink(missing_ok=True)

    def leave_offer(self, header: Header) -> None:
        """Say what a worker that leaves has delivered, for a master that does not know it
        yet."""
        slot, attempt, base = header.key
        path = self.path / "deltas" / f"{base:06d}" / f"{slot}.{attempt}.left"
        with contextlib.suppress(OSError, TryAgain):  # it is merged by now, and the folder gone
            insist(write_atomic, path, json.dumps(header.to_json()).encode())

    def left_offers(self, base: int) -> list[tuple[str, bytes]]:
        """("slot:attempt", header) of the workers that have left."""
        folder = self.path / "deltas" / f"{base:06d}"
        paths = sorted(folder.glob("*.left")) if folder.name in names(folder.parent) else ()
        return [(path.stem.replace(".", ":"), insist(path.read_bytes)) for path in paths]

    def write_ending(self, job_id: str, record: dict) -> None:
        """Say what became of a job: first that it started, then how it ended.

        A full disk costs the record, and no more: the job counts as killed.
        """
        now, path = time.time(), self.path / "exit" / f"{job_id}.json"
        before = {} if record["state"] == "started" else _hint(path) or {}
        times = {"time": now, "started": before.get("started", now)}  # ids come back: start anew
        data = to_json({"job_id": job_id, **times, **record})
        try:
            insist(write_atomic, path, data)
        except (OSError, TryAgain) as error:
            print(f"{record['role']}  no exit record: {error}", file=sys.stderr, flush=True)

    def ending(self, job_id: str) -> dict | None:
        """What the job has said of itself; a record that is damaged says nothing."""
        path = self.path / "exit" / f"{job_id}.json"
        return _hint(path, ENDING) if NAME.fullmatch(job_id) else None

    def endings(self) -> list[dict]:
        paths = sorted((self.path / "exit").glob("[!.]*.json"))
        return [record for path in paths if (record := self.ending(path.stem))]

    # ---- sync mode

    def write_progress(self, progress: dict) -> None:
        """How far the ranks are, for status: a hint, lost with the next one."""
        with contextlib.suppress(OSError):
            replace_quickly(self.path / "progress.json", to_json(progress))

    def progress(self) -> dict | None:
        return _hint(self.path / "progress.json")

    # ---- what happened

    def event(self, kind: str, **fields) -> None:
        """Note what happened. A full disk loses the note, and nothing else."""
        with contextlib.suppress(OSError):
            append_line(self.path / "events.jsonl", {"time": time.time(), "kind": kind, **fields})

    def events(self, last: int = 0) -> list[dict]:
        """The newest `last` events (all of them for 0), oldest first."""
        return self.lines("events.jsonl", last)

    def lines(self, name: str, last: int = 0) -> list[dict]:
        """The newest records of a log of JSON lines."""
        try:
            with (self.path / name).open("rb") as file:
                if last:  # the first line is torn, then
                    file.seek(max(0, file.seek(0, os.SEEK_END) - last * MOST_LINE))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        records = []
        for line in lines[-last:]:
            # A torn line, by a full disk for one; or whatever else somebody has put
            # there.
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
        return [record for record in records if not fault(record, LOGS.get(name, ""))]

    def log_path(self, role: str, slot: int) -> Path:
        name = "master.log" if role == "master" else f"{role}-{slot:04d}.log"
        return self.path / "logs" / name

    # ---- commits (the records; versions.py has the tensors)

    def version_path(self, version: int) -> Path:
        return self.path / "versions" / f"{version:06d}"

    def commit_path(self, version: int) -> Path:
        return self.path / "commits" / f"{version:06d}.json"

    def commit(self, version: int) -> Commit | None:
        return read_commit(self.commit_path(version))

    def told_version(self) -> int:
        """Number of the newest commit that is told of, for those who follow a master.
        They look for none after it, as `newest_version` does: see `durable.names`."""
        with contextlib.suppress(ElasticError):
            if hint := whole(self.path / "newest.json", self._read("newest.json"), "version"):
                return hint["version"]
        return max((int(name[:-5]) for name in _numbered(self.path / "commits")), default=-1)

    def newest_version(self) -> int:
        """Number of the newest commit, -1 if there is none. `newest` is a hint; names
        decide."""
        version = (_hint(self.path / "newest.json", "version") or {"version": -1})["version"]
        while exists(self.commit_path(version + 1)):
            version += 1
        return version

    def newest_commit(self) -> Commit | None:
        version = self.newest_version()
        return self.commit(version) if version >= 0 else None

    def commits(self, version: int = 0) -> Iterator[Commit]:
        """Every commit from a version on, oldest first."""
        while (commit := self.commit(version)) is not None:
            yield commit
            version += 1

    def link_commit(self, commit: Commit) -> bool:
        """Commit a version whose files are all durable. False if another master was
        first."""
        with contextlib.suppress(OSError):  # else a worker makes it: two that did would clash
            make_folder(self.path / "deltas" / f"{commit.version:06d}")
        if not create_once(self.commit_path(commit.version), to_json(commit.to_json())):
            return False
        self.tell_version(commit.version)
        return True

    def tell_version(self, version: int) -> None:
        """Name the newest commit, for `told_version`."""
        with contextlib.suppress(OSError):  # it is committed; this is only the hint
            replace_quickly(self.path / "newest.json", to_json({"version": version}))

    def shortage(self, least_bytes: int) -> str:
        """What the filesystem is short of, and the way out; "" if there is room to go
        on."""
        disk = insist(os.statvfs, self.path)
        free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
        if free >= least_bytes and (files >= LEAST_FILES or not disk.f_files):  # some count none
            return ""
        left = f"{size(free)} and {files} inodes are free"
        left += f", checkpoint.min_free = {size(least_bytes)}"
        return f"no space on the filesystem of {self.path} ({left}): remove files there"


def read_commit(path: Path) -> Commit | None:
    """What a version's record says. Raises ElasticError if it is damaged."""
    record = whole(path, read_json(path), COMMIT)
    return None if record is None else Commit.of(record)


def _hint(path: Path, needed: str = "") -> dict | None:
    """The table in a file that was not synced: a crash may have left nothing of it."""
    with contextlib.suppress(ElasticError):
        return whole(path, read_json(path), needed)
    return None


def whole(path: Path, record: dict | None, needed: str = "") -> dict | None:
    """The record. Raises ElasticError if it is damaged."""
    if record is not None and (said := fault(record, needed)):
        raise ElasticError(f"damaged file: {path}: {said}", "restore it, or remove it")
    return record


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
    # A trainer's metrics have positions instead.
    if "samples" in names and not all(map(_is_range, record["samples"])):
        return "samples are no ranges"
    return next((s for delta in record.get("deltas") or () if (s := fault(delta, DELTA))), "")


def _is_range(each: object) -> bool:
    return isinstance(each, list) and [int] * 3 == [type(number) for number in each]


def _number_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _newest_number(folder: Path) -> int:
    """Highest n whose record exists; 0: none."""
    if folder.name not in names(folder.parent):
        return 0
    return max((int(name[:-5]) for name in _numbered(folder)), default=0)


def _numbered(folder: Path) -> list[str]:
    return [name for name in names(folder) if re.fullmatch(r"\d{6,}\.json", name)]


def _next_number(folder: Path, record: dict) -> int:
    number = _newest_number(folder) + 1
    while not create_once(_number_path(folder, number), to_json({**record, "number": number})):
        number += 1
    return number


# ---- all runs of this user ----------------------------------------------------------------------


def registered() -> list[RunDir]:
    """Every run of this user that still has its directory, by name."""
    folder = registry_dir() / "runs"
    links = sorted(folder.iterdir()) if folder.is_dir() else []
    return [RunDir(link.resolve()) for link in links if (link / "control.json").exists()]


def find(name_or_path: str, what: str = "run") -> RunDir:
    """The run of that name or directory. UsageError names the runs there are."""
    for path in (registry_dir() / "runs" / name_or_path, Path(name_or_path)):
        if os.path.exists(path / "control.json"):  # False for a name that no path can have
            return RunDir(path.resolve())
    names = ", ".join(run.name for run in registered()) or "none"
    raise UsageError(f"no such {what}: {name_or_path!r}", f"runs: {names}")
