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
    metrics.jsonl scores.jsonl           the steps of sync mode; what validations have said

Parts: run.commits (commits.py), run.slots and run.masters (claims.py: who fences whom),
run.jobs, run.offers and run.scores (told.py: what jobs leave behind). sound.py says what
a record is.

Rules: bytes before the record that names them, and one winner per name (durable.py).
Folders are listed to find names, and to prune; a file is opened by its exact path.
"""

import contextlib
import errno
import functools
import hmac
import json
import os
import secrets
import shutil
import time
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elastic.base import config as configuration, durable
from elastic.base.config import Config
from elastic.base.durable import append_line, to_json, write_atomic
from elastic.base.environment import registry_dir
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.base.keys import NAME, TEXT
from elastic.base.units import size
from elastic.run.claims import Masters, Slots
from elastic.run.commits import Commits
from elastic.run.sound import LOGS, announced, fault, typed, whole
from elastic.run.told import Jobs, Offers, Scores

FOLDERS = ("versions", "commits", "slots", "checkpoints", "logs", "exit", "masters", "deltas")
PRIVATE = 0o600
SECRETS = {"master": "secret", "worker": "secret-worker", "reader": "secret-reader",
           "seal": "secret-seal"}  # of what workers and the master tell each other: no password
LOOK_S = 5.0  # at all runs, before those whose filesystem does not answer are left alone
MOST_LINE = 2048  # bytes of a log's line, on average, that are looked at
LEAST_FILES = 32  # inodes: a version makes a few
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Control:
    """What the user wants now."""

    mode: str
    state: str  # running | stopped
    min: int  # GPUs
    max: int


@dataclass(frozen=True)
class Endpoint:
    """Where the newest master's Redis is."""

    host: str
    port: int
    epoch: int
    url: str = ""  # a server that the site provides
    certificate: str = ""  # PEM, where the server speaks TLS
    nonce: str = ""  # of one start of the server, or of one master on the site's


class RunDir:
    """One run's directory. Cheap to make; reads and writes happen in the methods."""

    def __init__(self, path: Path, is_silent: bool = False):
        self.path, self.is_silent = Path(path), is_silent
        self.name = self.path.name
        self._config: Config | None = None
        self.commits, self.slots, self.masters = Commits(self), Slots(self), Masters(self)
        self.jobs, self.offers, self.scores = Jobs(self), Offers(self), Scores(self)

    @classmethod
    def create(
        cls, root: Path, config: Config, control: Control, environment: dict[str, str]
    ) -> "RunDir":
        """Make the directory of a new run and register its name. UsageError if it is
        taken."""
        run = cls(place_of(root, config.run.name))
        draft = cls(run.path.with_name(f".{run.name}.{secrets.token_hex(16)}"))
        try:
            run.register()  # first: nobody finds a run without its name
            durable.make_folder(draft.path, 0o700, parents=True)
            for folder in FOLDERS:
                durable.make_folder(draft.path / folder)
            write_atomic(draft.path / "run.toml", config.to_toml().encode(), PRIVATE)
            write_atomic(draft.path / "environment.json", to_json(environment), PRIVATE)
            write_atomic(draft.path / "id", secrets.token_hex(8).encode())
            for name in SECRETS.values():
                write_atomic(draft.path / name, secrets.token_hex(24).encode(), PRIVATE)
            write_atomic(draft.path / "control.json", to_json(asdict(control)))
            os.rename(draft.path, run.path)  # the one of several who try at once that made it
        except OSError as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            place_of(root, config.run.name)  # somebody else may have taken the name by now
            hint = "ELASTIC_RUNS and ELASTIC_HOME_DIR must be writable, on the shared filesystem"
            raise ElasticError(f"cannot make the run directory: {error}", hint) from None
        return run

    def register(self) -> None:
        """Have the run's name lead to this folder, which may have been moved. UsageError
        if it leads to another run, or is none."""
        check_name(self)
        link, here = registry_dir() / "runs" / self.name, os.path.realpath(self.path)
        if os.path.realpath(link) == here:
            return
        if not NAME.holds(self.name):
            what = f"no name for a run: {self.name!r}"
            raise UsageError(what, f"the name of its folder has to have {NAME.rule}")
        durable.make_folder(link.parent, parents=True)
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # of several at once one makes it
            link.symlink_to(here)

    # ---- what the user wants

    @functools.cached_property
    def private(self) -> Path:
        """The path, checked: nobody else can write there. For files that decide what is
        executed, and for those that this process makes. Raises ElasticError."""
        self.path = durable.check_private(self.path)  # resolved: a link may change later
        for folder in filter(Path.exists, (self.path / name for name in FOLDERS)):
            durable.check_private(folder)
        return self.path

    def config(self) -> Config:
        """The resolved configuration, as it was submitted, or has been mended since."""
        if self._config is None:
            self._config = configuration.load_written(self.private / "run.toml")
        return self._config

    @functools.cached_property
    def key(self) -> str:
        """The run's unique name on a shared Redis: its name and a random id. Another
        user, or an earlier run, may have had the name."""
        return f"{self.name}:{(self.private / 'id').read_text(errors='replace').strip()}"

    def environment(self) -> dict[str, str]:
        """The environment that every job of this run starts from."""
        return durable.read_json(self.private / "environment.json") or {}

    def secret(self, role: str = "master") -> str:
        """The secret that the passwords of a role are made of: master, worker, reader; or
        `seal`, with which workers and the master sign."""
        return durable.insist((self.private / SECRETS[role]).read_text).strip()

    def password(self, role: str, endpoint: Endpoint) -> str:
        """The password of `role` on that one server: it says nothing of the next server's.
        For `seal`: the proof that a server is this run's, never the seal itself."""
        secret, nonce = self.secret(role), endpoint.nonce  # "": a master of an older Elastic
        is_bare = not nonce and role != "seal"
        return secret if is_bare else hmac.digest(secret.encode(), nonce.encode(), "sha256").hex()

    def control(self) -> Control:
        found = durable.read_json(self.private / "control.json")
        if found is None:
            raise ElasticError(f"not a run directory: {self.path}", "elastic-status lists the runs")
        return typed(Control, self.path / "control.json", found)

    def set_control(self, **changes) -> Control:
        control = replace(self.control(), **changes)
        write_atomic(self.private / "control.json", to_json(asdict(control)))
        return control

    # ---- masters

    def endpoint(self) -> Endpoint | None:
        path = self.private / "endpoint.json"
        return typed(Endpoint, path, announced(path))

    def set_endpoint(self, endpoint: Endpoint) -> None:
        write_atomic(self.path / "endpoint.json", to_json(asdict(endpoint)), PRIVATE)

    # ---- the end

    def closing(self, mode: str = "") -> str:
        """Why the run does not go on (in this mode): done, failed, stopped, or the other
        mode; "" if it goes on."""
        if self.done():
            return "done"
        if self.failed():
            return "failed"
        control = self.control()
        if control.state == "stopped":
            return "stopped"
        return f"going on in {control.mode} mode" if mode not in ("", control.mode) else ""

    def done(self) -> dict | None:
        return announced(self.private / "DONE")

    def mark_done(self, record: dict) -> None:
        write_atomic(self.path / "DONE", to_json({"time": time.time(), **record}))
        self.event("done", **record)

    def failed(self) -> dict | None:
        path = self.private / "failed.json"
        return whole(path, announced(path), "reason")

    def mark_failed(self, reason: str, detail: str = "") -> None:
        record = {"time": time.time(), "reason": reason, "detail": detail}
        write_atomic(self.path / "failed.json", to_json(record))
        self.event("fail", reason=reason)

    def clear_failed(self) -> None:
        (self.path / "failed.json").unlink(missing_ok=True)

    # ---- what happened

    def event(self, kind: str, **fields) -> None:
        """Append an event. A full disk loses the event, and nothing else."""
        with contextlib.suppress(OSError):
            append_line(self.path / "events.jsonl", {"time": time.time(), "kind": kind, **fields})

    def events(self, last: int = 0) -> list[dict]:
        """The newest `last` events (all of them for 0), oldest first."""
        return self.lines("events.jsonl", last)

    def lines(self, name: str, last: int = 0) -> list[dict]:
        """The newest `last` records of a log of JSON lines (0: all). Lines that are torn,
        as by a full disk, and lines that are no records are left out."""
        try:
            with (self.path / name).open("rb") as file:
                if last:  # from a place within a line
                    file.seek(max(0, file.seek(0, os.SEEK_END) - last * MOST_LINE))
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [record for record in found if not fault(record, LOGS.get(name, ""))][-last:]

    def log_path(self, role: str, slot: int) -> Path:
        name = "master.log" if role == "master" else f"{role}-{slot:04d}.log"
        return self.path / "logs" / name

    def version_path(self, version: int) -> Path:
        return self.path / "versions" / f"{version:06d}"

    def shortage(self, least_bytes: int) -> str:
        """What the filesystem is short of, and the way out; "" if there is enough room."""
        disk = durable.insist(os.statvfs, self.path)
        if disk.f_flag & os.ST_RDONLY:  # the kernel remounts a failing filesystem so
            return f"the filesystem of {self.path} is read-only here: ask its admin"
        free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
        # Some filesystems count no inodes.
        if free >= least_bytes and (files >= LEAST_FILES or not disk.f_files):
            return ""
        left = f"{size(free)} and {files} inodes are free"
        left += f"; {size(least_bytes)} are needed: checkpoint.min_free, or a version"
        return f"no space on the filesystem of {self.path} ({left}): remove files there"


def place_of(root: Path, name: str) -> Path:
    """The path of a new run of that name. UsageError if the name is taken."""
    path, link = Path(root).resolve() / name, registry_dir() / "runs" / name
    if not TEXT.accepts(str(path)):
        what = f"the folder {str(root)!r} has a name that is not UTF-8"
        raise UsageError(what, "set ELASTIC_RUNS to another one")
    if path.exists() or (link.is_symlink() and link.readlink() != path):
        where = path if path.exists() else Path(os.readlink(link))
        folder = where if where.exists() else link
        is_done = not where.exists() or (where / "DONE").exists()
        goes_on = "" if is_done else f"go on with it (mend its run.toml; elastic-scale {where}), "
        hint = f"choose another --name, {goes_on}or remove {folder}"
        raise UsageError(f"run name taken: {name!r} is {where}", hint)
    return path


# ---- all runs of this user ----------------------------------------------------------------------


def registered() -> list[RunDir]:
    """Every run of this user that still has its directory, by name. All are opened at once,
    so that one on a dead file server does not delay the others (see check_answers)."""
    folder = registry_dir() / "runs"
    links = [folder / name for name in sorted(durable.names(folder))]
    looks = [durable.in_background(functools.partial(_run_at, link)) for link in links]
    wait(looks, LOOK_S)
    runs = (look.result() if look.done() else RunDir(link, is_silent=True)
            for link, look in zip(links, looks, strict=True))
    return [run for run in runs if run]


def check_answers(run: RunDir) -> None:
    """Raise TryAgain if the run's filesystem has not answered `registered`."""
    if run.is_silent:
        raise TryAgain(f"the filesystem has not answered for {LOOK_S:g} s")


def check_name(run: RunDir) -> None:
    """Raise UsageError if the run's name leads to another run, of which this may be a
    copy: jobs go by the name."""
    link, here = registry_dir() / "runs" / run.name, os.path.realpath(run.path)
    if (there := os.path.realpath(link)) != here and _run_at(link):
        hint = "rename this folder: jobs go by the name, and the other run may have some"
        raise UsageError(f"run name taken: {run.name!r} is {there}", hint)


def find(name_or_path: str) -> RunDir:
    """The run of that name or directory. UsageError names the runs there are."""
    for path in (registry_dir() / "runs" / name_or_path, Path(name_or_path)):
        if run := _run_at(path):
            return run
    names = ", ".join(run.name for run in registered()) or "none"
    raise UsageError(f"no such run: {name_or_path!r}", f"runs: {names}")


def _run_at(path: Path) -> RunDir | None:
    """The run at a path; None if there is none. A path that cannot be read counts as a
    run: whoever reads it is told why that fails."""
    try:
        (path / "control.json").read_bytes()
    except ValueError:  # the name has a NUL: no path can
        return None
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
    return RunDir(path.resolve())
