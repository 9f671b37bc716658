"""Files that fail now and then: every read, write and close of a process says EIO, ESTALE, … once.

pytest tests/whole/test_failing_files.py    a sample, half a minute
With ELASTIC_FILE_SWEEP=1: all operations, all errors, all processes

A run is played as test_crash_points.py plays it: a master that takes turns, and two workers. The
kth filesystem operation of a process fails once. It must not even notice, but for a pause: the run
ends in its one life, with the same parameters, and a clean audit.
"""

import builtins
import errno
import functools
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import test_crash_points as played
from crashing import World, fold_memory, in_child
from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.signals import Notice
from elastic.local.master import intake
from elastic.local.transport import Damaged, Transport
from elastic.local.worker.line import Place, RankLine
from elastic.run.records import Fragment
from elastic.run.rundir import RunDir
from elastic.saved import versions
from elastic.saved.checkpoint import Checkpoints, steps
from elastic.saved.versions import read_layout, read_params
from elastic.train.group import Group
from stores import BothSides
from test_crash_points import SAMPLES, Turns, Worker, assert_sound, create_version_0, inner, live

server, world, settings = played.server, played.world, played.settings
run, waiting, delivered = played.run, played.waiting, played.delivered
pytestmark = pytest.mark.timeout(1800)
ERRORS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)
SWEEP = bool(os.environ.get("ELASTIC_FILE_SWEEP"))
CHANGES = ("mkdir", "rename", "replace", "link", "unlink")
EACH = 24  # operations that are tried of each process, in the sample
NAMES = ("stat", "mkdir", "rename", "replace", "link", "fsync", "statvfs", "scandir", "unlink",
         "close")


ACTIVE: "Failing"


class Failing:
    """Below `folder` the kth operation raises; `count` is how many there were."""

    def __init__(self, folder: Path, kth: int, number: int):
        self.folder, self.kth, self.number = str(folder), kth, number
        self.names: list[str] = []
        self._busy = threading.local()

    def install(self) -> None:
        global ACTIVE
        ACTIVE = self
        for name in NAMES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        self._open, self._load = io.open, versions.load_file
        os.open = self._wrapped("open", os.open)
        io.open = builtins.open = self._open_file
        versions.load_file = self._wrapped("load", versions.load_file)

    def _wrapped(self, name: str, real: Callable) -> Callable:
        def call(path, *args, **kwargs):
            def do():
                return real(path, *args, **kwargs)

            return self.operation(name, do) if self._is_ours(path) else do()

        return call

    def _is_ours(self, path) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return os.fspath(path).startswith(self.folder)

    def operation(self, name: str, do: Callable):
        if getattr(self._busy, "now", False):
            return do()
        self.names.append(name)
        fails = len(self.names) == self.kth
        self._busy.now = True
        try:
            if name == "close" or not fails:  # a close that fails leaves nothing open
                done = do()
        finally:
            self._busy.now = False
        if fails:
            raise OSError(self.number, os.strerror(self.number))
        return done

    def _open_file(self, file, mode="r", *args, **kwargs):
        if not self._is_ours(file):
            return self._open(file, mode, *args, **kwargs)
        real = file if isinstance(file, int) else self.operation(
            "open", lambda: os.open(file, _flags(mode), 0o666))
        raw = _File(self, real, mode.replace("b", "").replace("t", "").replace("x", "w"))
        if 0 in (*args[:1], kwargs.get("buffering")):
            return raw
        kinds = {"+": io.BufferedRandom, "r": io.BufferedReader}
        kind = next((each for sign, each in kinds.items() if sign in mode), io.BufferedWriter)
        return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), kwargs.get("encoding"))


def _flags(mode: str) -> int:
    if "r" in mode:
        return os.O_RDWR if "+" in mode else os.O_RDONLY
    kind = os.O_RDWR if "+" in mode else os.O_WRONLY
    how = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}
    return kind | os.O_CREAT | next(flag for sign, flag in how.items() if sign in mode)


class _File(io.FileIO):
    def __init__(self, failing: Failing, descriptor: int, mode: str):
        self._failing = failing
        super().__init__(descriptor, mode)

    def readinto(self, into):
        return self._failing.operation("read", lambda: super(_File, self).readinto(into))

    def readall(self):
        return self._failing.operation("read", super().readall)

    def write(self, data):
        return self._failing.operation("write", lambda: super(_File, self).write(data))

    def close(self):
        if not self.closed:
            self._failing.operation("close", super().close)


def points(count: int, what: str) -> Iterator[tuple[int, int]]:
    """(k, errno): all, or a sample that is the same each time."""
    every = list(itertools.product(range(1, count + 1), ERRORS))
    step = 1 if SWEEP else max(1, len(every) // EACH)
    return every[len(what) % step :: step]


def read_only(names: list[str]) -> list[tuple[int, int]]:
    """(k, EROFS) of what changes a folder: all, or a sample."""
    every = [(k, errno.EROFS) for k, name in enumerate(names, 1) if name in CHANGES]
    return every[:: 1 if SWEEP else max(1, len(every) // 6)]


def try_each(world: World, act: Callable[[], object], check: Callable[[], object],
             more: Callable = lambda names: ()) -> None:
    def failing(kth: int = 0, number: int = 0) -> dict:
        files = Failing(world.folder, kth, number)
        files.install()
        act()
        return {"names": files.names}

    fold_memory()
    world.freeze()
    world.thaw()
    counted = in_child(failing)
    assert not counted.error, counted.error
    names = counted.said["result"]["names"]
    assert len(names) > 20
    wrong = []
    for kth, number in (*points(len(names), act.__name__), *more(names)):
        world.thaw()
        where = f"{errno.errorcode[number]} at {kth} ({names[kth - 1]})"
        ended = in_child(lambda kth=kth, number=number: failing(kth, number))
        error = ended.error or in_child(lambda: check() and None).error
        wrong += [f"{where}: {error}"] if error else []
    world.thaw()
    assert not wrong, f"{len(wrong)} of {len(names)} operations\n" + "\n\n".join(wrong[:4])


def outside(act: Callable, *args):
    """What the test does for others is no operation of the process."""
    ACTIVE._busy.now = True
    try:
        return act(*args)
    finally:
        ACTIVE._busy.now = False


def parameters(run: RunDir) -> torch.Tensor:
    newest = run.commits.newest()
    layout = read_layout(run, newest.version)
    return torch.cat([read_params(run, newest, layout, i) for i in range(len(layout.fragments))])


def test_a_master_lives_through_any_one_of_them(world, run):
    """From its first look at the run to DONE, with two workers that deliver zeros."""
    create_version_0(run)
    workers = [Worker(run, slot) for slot in (0, 1)]
    before = parameters(run)

    def be_master() -> None:
        one = Turns(run)
        one.take_over()
        for _ in range(60):
            if outside(run.done):
                break
            one.turn()
            for worker in workers:
                outside(worker.turn, one.server.store)
        one.close()

    def check() -> None:
        assert run.done()
        assert run.masters.newest() == 1
        assert assert_sound(run)["committed"] == SAMPLES
        assert torch.equal(parameters(run), before)

    try_each(world, be_master, check, more=read_only)


def test_an_agent_and_its_trainer_live_through_any_one_of_them(world, waiting):
    """A slot's life: claim it, beat, train and deliver a round, save the inner state, leave."""
    run, delivered = waiting, {}

    def be_worker() -> None:
        live(run, 0)

    def check() -> None:
        assert run.slots.latest(0) == 2
        deltas = (run.path / "deltas" / "000001").glob("0000.2.*")
        found = {path.name: path.read_bytes() for path in deltas}
        assert found
        assert delivered in ({}, found)
        delivered.update(found)
        assert inner(run, 0) == ""
        assert run.jobs.ending("4711")["outcome"] == "yielded"

    try_each(world, be_worker, check)


def test_a_checkpoint_is_there_or_refused_at_any_one_of_them(world, run):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    Checkpoints(run, Group(), "job1").save(1, model, optimizer, {})

    def be_trainer() -> None:
        was_refused = False
        try:
            Checkpoints(run, Group(), "job2").save(2, model, optimizer, {})
        except OSError:
            was_refused = True
        assert was_refused == (2 not in outside(steps, run))

    def check() -> None:
        saved, reasons = Checkpoints(run, Group(), "job3").load(model, optimizer)
        assert (saved.step, reasons) == (steps(run)[0], [])

    try_each(world, be_trainer, check)


@pytest.mark.parametrize("number", ERRORS)
def test_what_fails_once_is_read_again_and_what_goes_on_failing_is_not_known(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(durable, "AGAIN_S", (0.0, 0.0))
    path = tmp_path / "control.json"
    path.write_text("{}")
    errors = [OSError(number, os.strerror(number))]

    def read(_self=None) -> bytes:
        if errors:
            raise errors.pop()
        return b'{"state": "running"}'

    monkeypatch.setattr(Path, "read_bytes", read)
    assert durable.read_json(path) == {"state": "running"}
    errors += [OSError(number, os.strerror(number))] * 3
    with pytest.raises(TryAgain, match="the filesystem fails for now"):
        durable.read_json(path)


def test_a_delta_is_read_a_second_time_before_it_is_refused(tmp_path, monkeypatch):
    run, data, into = RunDir(tmp_path), memoryview(b"delta"), bytearray(5)
    (tmp_path / "deltas").mkdir()
    (tmp_path / "old").write_bytes(b"del")
    transport = Transport(run)
    found = transport.put((0, 1, 1), 0, data)
    path, opens = tmp_path / "deltas/000001/0000.1.000", []
    real = Path.open

    def stale(self, *args):
        opens.append(self)
        if len(opens) == 1:  # what this machine had kept of it
            return real(tmp_path / "old", *args)
        return real(self, *args)

    monkeypatch.setattr(Path, "open", stale)
    transport.get((0, 1, 1), 0, found, memoryview(into))
    assert (bytes(into), len(opens)) == (b"delta", 2)
    with real(path, "wb") as file:
        file.write(b"dElta")
    with pytest.raises(Damaged, match="altered"):
        transport.get((0, 1, 1), 0, found, memoryview(into))
    assert len(opens) == 4
    with pytest.raises(Damaged, match="truncated"):
        transport.get((0, 1, 1), 0, Fragment(6, found.xxh3), memoryview(bytearray(6)))


class _Flaky(io.FileIO):
    """A file of which the first reads fail, of all files together."""

    fails_yet = 0

    def readinto(self, into):
        if _Flaky.fails_yet > 0:
            _Flaky.fails_yet -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(into)


@pytest.fixture
def reads_of(monkeypatch) -> Callable[[str, int], None]:
    """reads_of(name, fails): of what is below a folder of that name so many reads fail."""

    def install(name: str, fails: int) -> None:
        real, _Flaky.fails_yet = Path.open, fails

        def flaky(self, mode="r", *args, **kwargs):
            if name in self.parts and mode == "rb":
                return io.BufferedReader(_Flaky(self))
            return real(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", flaky)

    yield install
    assert not _Flaky.fails_yet


def test_that_a_delta_cannot_be_read_now_says_nothing_of_it(tmp_path, monkeypatch, reads_of):
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    (tmp_path / "deltas").mkdir()
    transport, into, name = Transport(RunDir(tmp_path)), bytearray(5), "000001/0000.1.000"
    found = transport.put((0, 1, 1), 0, memoryview(b"delta"))
    reads_of("deltas", 3)
    with pytest.raises(TryAgain, match=f"fails for now: .*{name}"):
        transport.get((0, 1, 1), 0, found, memoryview(into))
    transport.get((0, 1, 1), 0, found, memoryview(into))  # once more it is read a beat later
    assert bytes(into) == b"delta"


def test_a_delta_is_written_though_its_folder_gives_no_answer_for_a_while(tmp_path, monkeypatch):
    """Six seconds in which no folder can be listed: more than a look-up alone waits."""
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    (tmp_path / "deltas").mkdir()
    fails, real = [errno.ESTALE, errno.EIO, errno.ECOMM] * 3, os.listdir

    def listdir(path):
        if fails:
            raise OSError(fails.pop(), "no answer", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    run = RunDir(tmp_path)
    put = functools.partial(Transport(run).put, (0, 1, 1), 0, memoryview(b"delta"))
    assert RankLine(Place(run, 0, 1, "7"), Notice()).written(put).bytes == 5
    assert not fails


@pytest.mark.parametrize("has_left", [False, True])
def test_a_delta_is_merged_though_it_could_not_be_read_for_a_while(delivered, reads_of, has_left):
    """Also that of a worker that has left, and of which Redis knows nothing."""
    run, workers = delivered
    wanted = [(slot, workers[slot].attempt, 1) for slot in (0, 1)]
    if has_left:
        for worker in workers:
            run.offers.leave(worker.header)
        store = BothSides.open(run)
        store.forget_everything()
        store.close()
        workers = []
    reads_of("deltas", 20)
    played.go_on(run, workers, lambda: run.commits.newest_version() > 1)
    merged = run.commits.of(2)
    assert [(delta.slot, delta.attempt, delta.base) for delta in merged.deltas] == wanted
    assert (merged.rejected, _Flaky.fails_yet) == ({}, 0)


def test_a_delta_that_cannot_be_read_for_long_is_refused(delivered, reads_of, monkeypatch):
    """A bad block would keep the round open for ever."""
    monkeypatch.setattr(intake, "UNREAD_S", -1.0)
    run, workers = delivered
    reads_of("deltas", 20)
    played.go_on(run, workers, lambda: any(e["kind"] == "reject" for e in run.events()))
    (first, *_) = (event["reason"] for event in run.events() if event["kind"] == "reject")
    assert first.startswith("unreadable: the filesystem fails for now")
    _Flaky.fails_yet = 0


@pytest.mark.parametrize("name", ["manifest.json", "outer-00.safetensors"])
def test_a_version_that_cannot_be_read_now_is_not_damaged(delivered, monkeypatch, name):
    """A master tries again; before it gave the run up."""
    run, workers = delivered
    fails, real = [errno.ESTALE] * 7, os.stat

    def stat(path, **how):
        if fails and not isinstance(path, int) and os.fspath(path).endswith(name):
            raise OSError(fails.pop(), "no answer", str(path))
        return real(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    played.go_on(run, workers, lambda: run.commits.newest_version() > 1)
    assert (fails, run.failed()) == ([], None)


def test_checksums_are_of_the_bytes_in_memory_and_not_of_what_came_to_the_disk(
    tmp_path, monkeypatch, run
):
    """A write-back that fails leaves holes, and says so to a descriptor that is closed by then."""
    real = os.fsync

    def lossy(descriptor: int) -> None:
        real(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/params-00" in name:
            with Path(name).open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(bytes(8))

    monkeypatch.setattr(os, "fsync", lossy)
    create_version_0(run)
    with pytest.raises(ElasticError, match="damaged"):
        parameters(run)
