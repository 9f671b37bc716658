"""Files that are either not there or whole: the ways in which this project writes small files.

    write_atomic      replace a file durably: temporary name, fsync, rename
    replace_quickly   the same without fsync, for hints: a crash may lose them
    create_once       a name that only one process can ever make: temporary name, fsync, link
    append_line       one more line of a log that several processes write

Files that become true together are a draft until `create_once` makes their record:
drafts.py.

How long a caller waits for a filesystem that fails for now:

    insist            three seconds
    patiently         minutes, or as long as it says
    until_written     until there is room
    in_background     not at all: a thread waits

A reader that waits for a file of another machine looks for its name in the folder
(`names`), and opens the file only when the name is there.

Files and folders are made with a mode of their own, whatever umask and default ACLs say:
folders by `make_folder`, files by the four above or opened with `own`. `check_private` is
for folders that others have made.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import shlex
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import xxhash

from elastic.base import proc
from elastic.base.errors import ElasticError, TryAgain

STUCK_S = 2.0  # between two tries of what a process cannot go on without
LOCK_S, LINE_S = 0.02, 0.1  # between two tries to lock a file; most that a line waits for it
AGAIN_S = (0.1, 0.5, 2.0)  # before each further try where the filesystem fails for now
UNREAD_S = 300.0  # most that a reader waits for bytes that the filesystem does not give out
# Errors that a network filesystem reports now and then although the file is sound: its
# server was replaced, or the file was replaced between two calls.
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR,
           errno.EBUSY, errno.ESHUTDOWN, errno.ENOTCONN, errno.ECONNRESET,
           errno.EREMOTEIO, errno.ECOMM)  # the last two are BeeGFS's
# Errors that pass as soon as somebody makes room, raises a limit or mounts the filesystem anew.
FULL = (*PASSING, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EROFS)

T = TypeVar("T")


def make_folder(path: Path, mode: int = 0o755, parents: bool = False) -> None:
    """Make the folder `path` (and its `parents`) unless it is there. Raises ElasticError
    where somebody else could take its place.

    The new folder does not inherit a default ACL: by it others could make files in here.
    """
    if exists(path):
        return
    if parents:
        make_folder(path.parent, parents=True)
    check_private(path.parent, is_above=True)
    with contextlib.suppress(FileExistsError):  # another process was faster
        path.mkdir(0o700)
        with contextlib.suppress(OSError):  # there is none, or no such thing
            os.removexattr(path, "system.posix_acl_default")
        # Below a project's folder all files belong to the project's group, and to its quota.
        path.chmod(mode | path.stat().st_mode & stat.S_ISGID)


def own(path: str, flags: int) -> int:
    """`open(…, opener=own)`: a new file is its owner's to write and anybody's to read."""
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    # A lock is an empty file that is opened often, and a full quota may refuse even a
    # chmod that changes nothing.
    if not status.st_size and stat.S_IMODE(status.st_mode) != 0o644:
        os.fchmod(descriptor, 0o644)
    return descriptor


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` with `data`; after a crash it holds the old bytes or the new, whole."""
    with _temporary(path, data, mode) as temporary:
        os.replace(temporary, path)
    sync_path(path.parent)


def replace_quickly(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, whole for every reader; after a crash the file may be lost."""
    with _temporary(path, data, synced=False) as temporary:
        os.replace(temporary, path)


def create_once(path: Path, data: bytes) -> bool:
    """Make `path` with `data` unless the name exists. True for the one process that made it.

    An NFS server may carry out a link and lose its answer. So the error does not decide:
    the number of links of the temporary file does.
    """
    with _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if os.stat(temporary).st_nlink != 2:
                if error.errno == errno.EEXIST:
                    return False
                raise
    with contextlib.suppress(OSError):  # the name is made, whatever comes now
        sync_path(path.parent)
    return True


def append_line(path: Path, record: dict) -> None:
    """Append `record` as one JSON line.

    Between the nodes of an NFS only a lock keeps two lines apart; elsewhere O_APPEND
    does. The lock's holder may be suspended, or its node dead: rather a torn line than a
    wait for that.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with open(path, "a+b", buffering=0, opener=own) as file:
        lock(file.fileno(), LINE_S)
        size = os.fstat(file.fileno()).st_size
        # The last line is torn if the disk was full.
        torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(b"\n" * bool(torn) + line)


def lock(descriptor: int, for_s: float) -> bool:
    """Lock a file for as long as it is open. False if another process keeps its lock for
    `for_s`. True on a filesystem that has no locks."""
    until = time.monotonic() + for_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOCK_S)
        except OSError:
            return True


class _Lossy(io.FileIO):
    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def log_what_fits() -> None:
    """Jobs log into the run directory: from now on a full disk costs words of the log,
    and nothing else."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_Lossy(number, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, errors="replace", line_buffering=True))


def insist(action: Callable[..., T], *args) -> T:
    """What `action(*args)` returns, called up to four times while the filesystem fails
    for now (AGAIN_S). Raises TryAgain if it goes on failing."""
    waits_s = iter(AGAIN_S)
    while True:
        try:
            return action(*args)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if (wait_s := next(waits_s, None)) is None:
                raise TryAgain(f"the filesystem fails for now: {error}") from None
            time.sleep(wait_s)


def patiently(action: Callable[..., T], *args, hurry: Callable = lambda: False,
              for_s: float = 0.0, passing: tuple = (), tell: Callable = lambda _: None) -> T:
    """What `action(*args)` returns, called again while it raises TryAgain, or an OSError
    whose number is in `passing`; `tell(error)` in between. Raises TryAgain after `for_s`
    (0: UNREAD_S), or once `hurry()` is true.

    For bytes that somebody needs: without them work would be lost.
    """
    until = time.monotonic() + (for_s or UNREAD_S)
    while True:
        try:
            return action(*args)
        except (OSError, TryAgain) as error:
            if isinstance(error, OSError) and error.errno not in passing:
                raise
            if hurry() or time.monotonic() > until:
                raise error if isinstance(error, TryAgain) else TryAgain(str(error)) from None
            tell(error)
            time.sleep(STUCK_S)


def until_written(write: Callable[[], T], hurry: Callable, tell: Callable = lambda _: None) -> T:
    """What `write()` returns, called again while the disk is full or fails for now, also
    for what write() reads before it writes; `tell(error)` in between. Raises TryAgain
    once `hurry()` is true."""
    told = set()

    def say(error: OSError | TryAgain) -> None:
        if str(error) not in told:
            print(f"waiting to write, will try on: {error}", flush=True)
        told.add(str(error))
        tell(error)

    return patiently(write, hurry=hurry, for_s=math.inf, passing=FULL, tell=say)


def in_background(action: Callable[[], T]) -> Future[T]:
    """What `action()` will return, or raise. It runs in a daemon thread: the process does
    not wait for it at its end."""
    result: Future = Future()

    def act() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # result() raises it
            result.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return result


def names(folder: Path) -> list[str]:
    """The names in a folder; none if there is no such folder. Raises TryAgain if the
    filesystem does not answer.

    A process that waits for a file of another machine looks for its name here first. A
    network filesystem may remember for a minute that a name was not there when somebody
    asked for it, but it looks again when the folder is listed.
    """
    try:
        return insist(os.listdir, folder)
    except FileNotFoundError:
        return []


def exists(path: Path) -> bool:
    """Is the name there? No answer is not a no: raises TryAgain."""
    try:
        insist(os.stat, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_json(path: Path) -> dict | None:
    """The table in `path`, or None if the file is not there. Raises ElasticError if
    damaged, and TryAgain if the filesystem does not answer."""
    try:
        data = json.loads(insist(path.read_bytes))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(data, dict):
        raise damaged(path, "not a JSON table")
    return data


def damaged(path: Path, why: str) -> ElasticError:
    return ElasticError(f"damaged file: {path}: {why}", "restore it, or remove it")


def check_private(path: Path, is_above: bool = False) -> Path:
    """The folder `path`, with links resolved. Raises ElasticError if another user could put
    files into it, or replace it. `is_above`: something of the user's is to be made in it.

    The folder and all above it must be root's or the user's own, and nobody else may write
    to them. A sticky folder above is allowed: nobody can move another user's files in it.
    """
    path = path.resolve()
    for folder in (path, *path.parents):
        check_folder(folder, may_be_sticky=folder != path or is_above)
    return path


def check_folder(folder: Path, may_be_sticky: bool = False) -> Path:
    """As check_private, but for this folder alone: those above it are known to be private."""
    status = insist(folder.lstat)
    if not is_ours(status.st_uid, is_above=may_be_sticky):
        what = f"{folder} is another user's (uid {status.st_uid}, not {os.getuid()})"
        own_folders = "folders that are root's or your own (ELASTIC_RUNS)"
        raise ElasticError(what, f"work below {own_folders}, or as that user")
    if status.st_mode & 0o022 and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        what = f"others may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
        else_ways = ", or +t, or choose another place" * may_be_sticky
        raise ElasticError(what, f"chmod go-w {shlex.quote(str(folder))}{else_ways}")
    return folder


def is_ours(owner: int, is_above: bool) -> bool:
    """Is `owner` (a uid) the user, or root? In a user namespace without root, root's
    folders above belong to the number that stands for all unknown users: there nobody can
    tell them from another user's."""
    if owner in (0, os.getuid()) or not is_above:
        return owner in (0, os.getuid())
    known = sum(map(int, proc.read("/proc/self/uid_map").split()[2::3]))
    is_unknown = proc.read("/proc/sys/kernel/overflowuid").strip() == str(owner)
    # Outside of a container all numbers are known; 0: there is no such file.
    return is_unknown and 0 < known < 2**32 - 1


def to_json(data: dict) -> bytes:
    """`data` as the bytes of a small human-readable file."""
    return json.dumps(data, indent=1).encode() + b"\n"


def sync_path(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(place: Path | str) -> Iterator[None]:
    """An OSError names the place that the caller asked for: the error of a flush names no
    file, and others name a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


@contextlib.contextmanager
def _temporary(path: Path, data: bytes, mode: int = 0o644, synced: bool = True) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with naming(path):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.write(data)
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            yield temporary
    finally:
        with contextlib.suppress(OSError):  # gone, or left behind: no reason to fail
            temporary.unlink()


def checksum(path: Path) -> str:
    """xxh3 (128 bit) of a file's bytes."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def damage(path: Path, entry: dict, of: Callable[[Path], str] | None = checksum) -> str:
    """What is wrong with a committed file, as its commit's `entry` says it; "" if
    nothing. `of` computes its checksum (None: only the size is compared). Raises TryAgain
    if the filesystem does not answer."""
    try:
        size = insist(path.stat).st_size
        xxh3 = insist(of, path) if of else entry.get("xxh3")
    except OSError as error:
        why = "it is gone" if isinstance(error, FileNotFoundError) else str(error)
        return f"committed file cannot be read: {path}: {why}"
    if (size, xxh3) == (entry.get("bytes"), entry.get("xxh3")):
        return ""
    said = f"the commit says {entry.get('bytes')} bytes, xxh3 {entry.get('xxh3')}"
    return f"committed file is damaged: {path}: {size} bytes, xxh3 {xxh3}; {said}"


def draft_of(final: Path, writer: str) -> Path:
    """The folder in which `writer` writes what will be `final` once it is committed."""
    return final.with_name(f".{final.name}.{writer}")
