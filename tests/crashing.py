"""Death, or an error, at every single operation at the edges of a process; then what comes next.

    world = World(folder, server)       a folder, and the Redis server that goes with it
    tally = try_all(world, act, check)  act() once for every operation in it and every way for it
                                        to go wrong, each time in the same world; then check(point)

An operation is a call that changes a file or a directory (also those of pathlib, shutil and torch,
which end in them), a lock, a file that safetensors writes, a connection to Redis, a command (or a
pipeline, or a script) that is sent to it, its answer; and whatever a test adds with `also`. `act`
and `check` run in a forked child each, so that nothing is mended by a `finally` and nothing is
remembered; both return nothing and raise what is wrong. What goes wrong:

    killed       SIGKILL before the operation, which is after the one before (tried once, if that
                 changed nothing). Before the answer of Redis: the command has been executed
    torn         SIGKILL when half of the bytes are written
    lost         the machine is gone: Redis is empty, and what was not fsynced is cut off. Names
                 survive in the order in which they were made, as in any journal. (Without Redis,
                 where all is fsynced, that is what `killed` is)
    refused      ENOSPC or EIO (with half of the bytes written), no connection to Redis
    unanswered   it was done, and the caller hears of an error: EIO, or a connection lost

The first run only counts; an audit hook sees to it that nothing which changes a file passes by. A
run in which the nth operation is not the one that was counted is an error of the test.
"""

import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import io
import json
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.connection import AbstractConnection

from elastic.base.errors import ElasticError
from forks import stay_alone

KILLED, TORN, LOST, REFUSED, UNANSWERED = "killed", "torn", "lost", "refused", "unanswered"
DEATHS = (KILLED, TORN, LOST)
NAMES = ("link", "rename", "replace", "symlink", "unlink", "remove", "mkdir", "rmdir")
WAYS = {
    "write": (KILLED, TORN, LOST, REFUSED),
    "save": (KILLED, TORN, LOST, REFUSED),
    "fsync": (KILLED, LOST, REFUSED),
    **dict.fromkeys(NAMES, (KILLED, LOST, REFUSED, UNANSWERED)),
    **dict.fromkeys(("open", "chmod", "fchmod", "utime"), (KILLED, REFUSED)),
    **dict.fromkeys(("flock", "connect", "send"), (KILLED, REFUSED)),
    "answer": (KILLED, UNANSWERED),
}
UNCHANGING = ("fsync", "flock", "connect", "answer", "list")  # for who comes after a death
ON_DISK = ("open", "write", "save", "fsync", *NAMES)
BROKEN = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "flock")  # EIO, not ENOSPC
CHANGES = {f"os.{name}" for name in (*NAMES, "chmod", "truncate", "chown", "utime", "mkfifo")}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
UNCOUNTED = ("line",)  # threads that only read
PATIENCE_S = 60
HUGE, MADV_COLLAPSE = 2 << 20, 25  # madvise(2), of Linux 6.1


@dataclass(frozen=True)
class Point:
    """The operation that goes wrong, by number and by name, and how."""

    at: int
    name: str
    way: str

    def __str__(self) -> str:
        return f"{self.way} at {self.at} ({self.name})"


NOWHERE = Point(0, "", "")


class Edge:
    """Every operation of this process from now on; the one at `point` goes wrong."""

    def __init__(self, point: Point, world: "World"):
        self.point, self.world = point, world
        self.names: list[str] = []
        self.loses: list[bool] = []  # by operation: would the machine's end lose something?
        self.passed_by: list[str] = []
        self._mine = threading.local()  # a thread's: is it in an operation, has it asked Redis
        self._down = False
        self._synced: dict[tuple[int, int], int] = {}  # inode -> bytes of it that are durable

    # ---- the operations

    def install(self, also: Callable[["Edge"], None]) -> None:
        for name in (*NAMES, "chmod", "fchmod", "utime", "fsync"):
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        fcntl.flock = self._wrapped("flock", fcntl.flock)
        self._os_open, self._open = os.open, io.open
        os.open, io.open, builtins.open = self._open_descriptor, self._open_file, self._open_file
        if inner := sys.modules.get("elastic.saved.inner_state"):  # else there is no torch here
            self._save_file, inner.save_file = inner.save_file, self._save
        for name in ("connect", "send_packed_command", "read_response"):
            setattr(AbstractConnection, name, self._of_redis(name))
        also(self)
        _ACTIVE.append(self)
        sys.addaudithook(self._audit)

    def operation(self, name: str, do: Callable, half: Callable | None = None, error=None):
        """do(), unless this is the one. `half` does a part of it; `error` is what it raises."""
        if getattr(self._mine, "busy", False) or threading.current_thread().name in UNCOUNTED:
            return do()
        self._mine.busy = True
        try:
            self.names.append(name)
            self.loses.append(bool(self._synced or self.world.client))
            if len(self.names) != self.point.at:
                return do()
            if name != self.point.name:
                sys.stderr.write(f"no longer {self.point}: it is {name}\n")
                os._exit(3)
            return self._go_wrong(do, half, error or self._error_of(name))
        finally:
            self._mine.busy = False

    def _go_wrong(self, do: Callable, half: Callable | None, error: Exception):
        way = self.point.way
        if way == LOST:
            self._lose()
        if way == UNANSWERED:
            do()
        elif half and way in (TORN, REFUSED):
            half()
        if way in DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    def _error_of(self, name: str) -> OSError:
        broken = name in BROKEN or self.point.way == UNANSWERED
        number = errno.EIO if broken else errno.ENOSPC
        return OSError(number, os.strerror(number))

    def _audit(self, event: str, arguments: tuple) -> None:
        if getattr(self._mine, "busy", False) or threading.current_thread().name in UNCOUNTED:
            return
        opens = event == "open" and not isinstance(arguments[0], int)
        writes = opens and (arguments[2] or 0) & WRITING
        if writes or event in CHANGES or event == "fcntl.flock":
            self.passed_by.append(f"{event} {arguments[0]}")

    # ---- files

    def _wrapped(self, name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):
            def do():
                if name == "fsync":
                    self._fsynced(*args)
                return real(*args, **kwargs)

            return self.operation(name, do)

        return call

    def _open_descriptor(self, path, flags, mode=0o777, *, dir_fd=None):
        def do():
            return self._os_open(path, flags, mode, dir_fd=dir_fd)

        return self.operation("open", do) if flags & WRITING else do()

    def _open_file(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None,
                   closefd=True, opener=None):
        if not set(mode) & set("wax+"):
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)

        def do() -> _File:
            return _File(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)

        raw = do() if isinstance(file, int) else self.operation("open", do)
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        text = "b" not in mode
        return io.TextIOWrapper(buffered, encoding, errors, newline) if text else buffered

    def _save(self, tensors: dict, path: Path, metadata=None) -> None:
        def do() -> None:
            self._save_file(tensors, path, metadata)
            self.wrote(os.stat(path), 0)

        def half() -> None:
            do()
            os.truncate(path, os.stat(path).st_size // 2)

        self.operation("save", do, half)

    # ---- what a machine forgets

    def wrote(self, file: os.stat_result, durable: int) -> None:
        self._synced.setdefault((file.st_dev, file.st_ino), durable)

    def _fsynced(self, descriptor: int) -> None:
        file = os.fstat(descriptor)
        self._synced.pop((file.st_dev, file.st_ino), None)

    def _lose(self) -> None:
        for path in self.world.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                file = path.stat()
                durable = self._synced.get((file.st_dev, file.st_ino), file.st_size)
                if durable < file.st_size:
                    os.truncate(path, durable)
        if self.world.client:
            self.world.client().flushall()

    # ---- Redis

    def _of_redis(self, name: str) -> Callable:
        real = getattr(AbstractConnection, name)

        def connect(connection):
            there = connection._sock is not None  # the pool asks for it before every command
            return None if there else self._line("connect", connection, lambda: real(connection))

        def send(connection, *args, **kwargs):
            self._mine.asked = True
            return self._line("send", connection, lambda: real(connection, *args, **kwargs))

        def answer(connection, *args, **kwargs):
            def do():
                return real(connection, *args, **kwargs)

            if not getattr(self._mine, "asked", False) or getattr(self._mine, "busy", False):
                return do()
            if threading.current_thread().name in UNCOUNTED:
                return do()
            self._mine.asked = False
            select.select([connection._sock], [], [], 5.0)  # the command has been executed
            return self._line("answer", connection, do)

        return {"connect": connect, "send_packed_command": send, "read_response": answer}[name]

    def _line(self, name: str, connection, do: Callable):
        """Refused, it is so twice: redis-py tries once more by itself."""
        again, self._down = self._down, False
        if again and threading.current_thread().name not in UNCOUNTED:
            connection.disconnect()
            raise redis.ConnectionError("refused again")
        try:
            return self.operation(name, do, error=redis.ConnectionError(self.point.way))
        except redis.ConnectionError:
            if len(self.names) == self.point.at and not getattr(self._mine, "busy", False):
                self._down = self.point.way == REFUSED
                connection.disconnect()
            raise


class _File(io.FileIO):
    """A file whose writes are operations: what a buffer in front of it holds back is one of them
    when it goes to the kernel."""

    def __init__(self, edge: Edge, file, mode: str, closefd: bool, opener):
        self._edge = edge
        super().__init__(file, mode, closefd, opener)
        self._durable = os.fstat(self.fileno()).st_size

    def write(self, data) -> int:
        def do(data=data) -> int:
            self._edge.wrote(os.fstat(self.fileno()), self._durable)
            return super(_File, self).write(data)

        return self._edge.operation("write", do, lambda: do(bytes(data)[: len(data) // 2]))


_ACTIVE: list[Edge] = []


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What a test's own stand-in does in here is no operation."""
    mine = _ACTIVE[-1]._mine if _ACTIVE else threading.local()
    before, mine.busy = getattr(mine, "busy", False), True
    try:
        yield
    finally:
        mine.busy = before


# ---- worlds and children ------------------------------------------------------------------------


class World:
    """All that outlives a process here. `freeze` it, and every `thaw` brings it back."""

    def __init__(self, folder: Path, client: Callable[[], redis.Redis] | None = None):
        self.folder, self.client = folder, client
        self._frozen = folder.with_name(f"{folder.name}.frozen")
        self._keys: list[tuple[bytes, int, bytes]] = []

    def freeze(self) -> None:
        shutil.copytree(self.folder, self._frozen, symlinks=True)
        if self.client:
            client = self.client()
            names = client.scan_iter()
            self._keys = [(key, max(0, client.pttl(key)), client.dump(key)) for key in names]
            client.close()

    def thaw(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._frozen, self.folder, symlinks=True)
        if self.client:
            client = self.client()
            pipe = client.pipeline()
            pipe.flushall()
            for key, left_ms, body in self._keys:
                pipe.restore(key, left_ms, body)
            pipe.execute()
            client.close()


@dataclass
class Ended:
    """How a child ended: its signal, or what it said (`error`: a traceback)."""

    signal: int
    said: dict

    @property
    def error(self) -> str:
        if self.signal:
            return f"ended by {signal.Signals(self.signal).name}"
        return self.said["error"]


def fold_memory() -> None:
    """Let this process have huge pages, if the kernel can give them: it copies a fork's table of
    pages, and undoes it, for most of the time of a child."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode == "rw-p" and name in ([], ["[heap]"]):
            start, stop = (int(each, 16) for each in span.split("-"))
            for at in range(-(-start // HUGE) * HUGE, stop - HUGE + 1, HUGE):
                libc.madvise(at, HUGE, MADV_COLLAPSE)


def in_child(action: Callable[[], object]) -> Ended:
    """Fork, run, and hear what it returned or raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        gc.disable()  # it would touch, and so copy, all that torch has made
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        said = {"error": "", "known": True}
        try:
            stay_alone()
            said["result"] = action()
        except BaseException as error:
            known = isinstance(error, ElasticError | OSError)
            said |= {"error": traceback.format_exc(), "known": known}
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return Ended(os.WTERMSIG(status), {})
    return Ended(0, json.loads(data) if data else {"error": "it said nothing", "known": False})


# ---- all points ---------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was tried, by operation and by way, and what was wrong afterwards."""

    operations: int = 0
    tried: Counter = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        return self.tried.total()

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in self.tried.items())
        wrong = len(self.violations)
        return f"{self.operations} operations, {self.points} points ({ways}), {wrong} violations"


def points(names: list[str], loses: list[bool]) -> Iterator[Point]:
    """Every one, but for deaths that leave the same world as the one before."""
    changed = {KILLED: True, LOST: True}
    for at, (name, is_lost) in enumerate(zip(names, loses, strict=True), 1):
        for way in WAYS[name]:
            if changed.get(way, True) and (is_lost or way != LOST):
                yield Point(at, name, way)
        for way, changes in (KILLED, name not in UNCHANGING), (LOST, name in ON_DISK):
            changed[way] = changes or (changed[way] and way not in WAYS[name])


def try_all(
    world: World,
    act: Callable[[], object],
    check: Callable[[Point], object],
    also: Callable[[Edge], None] = lambda edge: None,
    most: int = sys.maxsize,
    ways: tuple[str, ...] = (*DEATHS, REFUSED, UNANSWERED),
) -> Tally:
    """Every point of act() that goes wrong in one of these ways; the first `most` violations are
    enough."""

    def watched(point: Point) -> dict:
        edge = Edge(point, world)
        edge.install(also)
        act()
        return {"names": edge.names, "loses": edge.loses, "passed_by": edge.passed_by}

    def wrong_after(point: Point) -> str:
        return in_child(lambda: check(point) and None).error

    fold_memory()
    world.freeze()
    for _ in range(2):  # the first time, Redis does not have the scripts
        world.thaw()
        counted = in_child(lambda: watched(NOWHERE))
        assert not counted.error, counted.error
    names, loses, passed_by = counted.said["result"].values()
    assert names, "nothing happens"
    assert not passed_by, f"uncounted: {passed_by}"
    tally = Tally(len(names))
    unharmed = wrong_after(NOWHERE)
    assert not unharmed, unharmed
    for point in points(names, loses):
        if point.way not in ways:
            continue
        world.thaw()
        died = in_child(lambda point=point: watched(point))
        tally.tried[point.way] += 1
        if wrong := _unexpected(point, died) or wrong_after(point):
            tally.violations.append(f"{point}: {wrong}")
        if len(tally.violations) >= most:
            break
    world.thaw()
    return tally


def _unexpected(point: Point, died: Ended) -> str:
    """What is wrong with how it ended: a death is a death, an error is survived or a clear one."""
    if point.way in DEATHS:
        return "" if died.signal == signal.SIGKILL else f"not reached: {died}"
    return "" if not died.error or (not died.signal and died.said["known"]) else died.error


def report(request: pytest.FixtureRequest, tally: Tally) -> None:
    """Say and record what was tried; fail with the first violations, if any."""
    request.node.user_properties.append(("crash points", tally.points))
    print(f"{request.node.name}: {tally}")
    assert not tally.violations, "\n\n".join([str(tally), *tally.violations[:5]])
