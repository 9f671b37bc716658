"""Crash-only everything: each operation of a turn, a slot's life, a checkpoint, a pass goes wrong.

pytest tests/whole/test_crash_points.py

crashing.py says what can happen at a point. After it the next master, attempt, trainer or pass goes
on, without faults, to the end of the run; then the invariants are checked: no commit is lost or
changed, every sample is in exactly one committed delta, numbers of epochs and attempts are used
once, the thing that was interrupted happened wholly or not at all, and what was begun is cleared
away. Only small records on their way (a temporary name, see durable.py) may stay, one per death.
"""

import functools
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from redis import utils
from torch import nn

from conftest import start_redis
from crashing import KILLED, LOST, REFUSED, UNANSWERED, Point, World, report, try_all
from elastic.base import config, durable
from elastic.base.durable import checksum
from elastic.base.signals import Notice
from elastic.jobs.history import End
from elastic.local.master import averaging, journal, master, server as master_server
from elastic.local.master.averaging import Averager
from elastic.local.master.master import Master
from elastic.local.store import Ask
from elastic.local.transport import Transport
from elastic.local.worker import agent, exchange, line
from elastic.local.worker.agent import Agent
from elastic.local.worker.line import Place
from elastic.local.worker.local_sgd import LocalSGD
from elastic.run.audit import audit
from elastic.run.records import Header, Outcome
from elastic.run.rundir import Control, Endpoint, RunDir
from elastic.saved import drafts, inner_state, versions
from elastic.saved.checkpoint import Checkpoints
from elastic.saved.versions import read_layout, read_params
from elastic.train.group import Group
from stores import BothSides
from tiny_task import Samples

SAMPLES, BATCH, STEPS = 20, 2, 2  # three rounds of two workers, the last a short one
pytestmark = pytest.mark.timeout(1800)
SETTINGS = [
    f"train.batch_size={BATCH}", f"local_sgd.inner_steps={STEPS}", "local_sgd.fragment=64",
    "local_sgd.compression=none", "local_sgd.max_staleness=0", "local_sgd.min_deadline=1d",
    "local_sgd.cold_start=0",
    "checkpoint.min_free=0mb", "checkpoint.keep=1", "health.lease=600s",
]
SMALL = 65536  # bytes of a record on its way
LEASE = {"job_id": "7", "node": "n", "pid": 1, "state": "training", "version": 0, "step": 0,
         "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0}


class Inline:
    """A pool that works at once: operations come in an order that can be repeated."""

    def __init__(self, *_):
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_exc_info) -> None:
        pass

    def submit(self, action: Callable, *args) -> Future:
        future = Future()
        try:
            future.set_result(action(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_) -> None:
        pass


NO_PASSES = SimpleNamespace(soon=lambda: None, close=lambda: None)


class Turns(Master):
    """A master that is told when to take a turn, and never waits."""

    def __init__(self, run: RunDir):
        super().__init__(run, Notice())
        self.server.wait = lambda *_: []
        self.samples.shut = lambda *_: None  # the workers have said what they hold

    def turn(self) -> None:
        self.step()


class Worker:
    """What a worker says and writes, without training: it never dies, and says it all again."""

    def __init__(self, run: RunDir, slot: int):
        self.run, self.slot, self.base, self.header = run, slot, -1, None
        self.attempt = run.slots.claim(slot, {"job_id": "7"})
        self.asked: Ask | None = None
        self._numbers = iter(range(1, 1000))

    def turn(self, store: BothSides) -> None:
        who = {"slot": self.slot, "attempt": self.attempt}
        assert store.lease(self.slot, self.attempt, LEASE | who, 600.0)
        version = int(store.master().get("version", -1))
        verdict = store.take_verdict(self.slot, self.attempt)
        if version > self.base or verdict:
            self.base, self.header, self.asked = max(version, self.base), None, None
        if self.base < 0:
            return
        if self.asked and (granted := store.granted(self.asked, 0.01)) is not None:
            self.asked, self.header = None, self.deliver(granted)
        if self.header and not store.offered(self.slot, self.attempt, self.base):
            store.offer(self.slot, self.attempt, self.base, asdict(self.header))
        if not (self.header and self.header.steps):  # or it was dry: samples may have come back
            number = self.asked.sequence if self.asked else next(self._numbers)
            self.asked = Ask(self.slot, self.attempt, number, BATCH * STEPS, ())
            store.ask(self.asked)

    def deliver(self, samples: list) -> Header:
        layout, transport = read_layout(self.run, self.base), Transport(self.run)
        key = (self.slot, self.attempt, self.base)
        parts = [transport.put(key, i, memoryview(bytes(4 * numel)))
                 for i, numel in enumerate(layout.numels)]
        tokens = sum(stop - start for _, start, stop in samples)
        return Header(
            run=self.run.key, slot=self.slot, attempt=self.attempt, job_id="7", base=self.base,
            layout=layout.hash, codec="none", steps=tokens // BATCH, tokens=tokens,
            samples=tuple(samples), loss=1.0, first_loss=1.0, fragments=tuple(parts),
        )


def go_on(run: RunDir, workers: list[Worker], until: Callable[[], object]) -> Turns:
    """A new master takes over and turns with the workers until something is so."""
    one = Turns(run)
    one.program.record("started")
    one.take_over()
    for _ in range(60):
        if until():
            break
        one.turn()
        for worker in workers:
            worker.turn(one.server.store)
    assert until(), "\n".join(map(str, run.events(last=20)))
    one.close()
    return one


# ---- what has to be so --------------------------------------------------------------------------


def commits(run: RunDir) -> dict[str, bytes]:
    folder = run.path / "commits"
    return {path.name: path.read_bytes() for path in folder.glob("[0-9]*.json")}


def assert_sound(run: RunDir) -> dict:
    """The ledger adds up, and the newest version is there to its last bit."""
    found = audit(run.path, 1, checksum)
    assert found["problems"] == []
    newest = run.commits.newest()
    layout = read_layout(run, newest.version)
    for index in range(len(layout.fragments)):
        assert read_params(run, newest, layout, index).isfinite().all()
    return found


def assert_cleared(run: RunDir, *more: str) -> None:
    """Nothing is left of what was begun, but for small records; `more` are names that may be."""
    record = re.compile(r"\..+\.[0-9a-f]{32}")
    left = [path for path in run.path.rglob(".*")
            if not (record.fullmatch(path.name) and path.is_file()
                    and path.stat().st_size < SMALL)]
    newest = run.commits.newest_version()
    left += [p for p in (run.path / "versions").glob("[0-9]*") if int(p.name) != newest]
    left += [p for p in (run.path / "deltas").glob("[0-9]*") if int(p.name) < newest]
    names = [str(path.relative_to(run.path)) for path in left]
    assert [name for name in names if not name.startswith(more or ("-",))] == []


def assert_numbered(folder: Path) -> int:
    """Records 1, 2, 3, … without a gap, each of its own number; how many."""
    names = sorted(path.name for path in folder.glob("[0-9]*.json"))
    assert names == [f"{number:06d}.json" for number in range(1, len(names) + 1)]
    for number, name in enumerate(names, 1):
        assert json.loads((folder / name).read_text())["number"] == number
    return len(names)


# ---- worlds -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = start_redis(tmp_path_factory.mktemp("redis"))
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture
def world(tmp_path, server, monkeypatch) -> World:
    folder = tmp_path / "world"
    folder.mkdir()
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(folder / "registry"))
    monkeypatch.setenv("ELASTIC_RUNS", str(folder / "runs"))
    monkeypatch.setenv("ELASTIC_SITE", "/dev/null")
    monkeypatch.setenv("ELASTIC_JOB_ID", "4711")
    monkeypatch.setattr(master, "Passes", lambda *_: NO_PASSES)
    monkeypatch.setattr(master, "reconcile_now", lambda *_: None)
    monkeypatch.setattr(master_server, "MasterStore", BothSides)  # workers speak through it, too
    for module in (averaging, exchange):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)
    for module, name in ((master_server, "TICK_S"), (master, "TICK_S"), (journal, "STUCK_S"),
                         (durable, "STUCK_S"),
                         (line, "RETRY_S"), (line, "LOOK_S"),
                         (line, "UNSEEN_S")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(durable, "AGAIN_S", (0.01, 0.01))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what it is for, crashing.py plays
    torch.set_num_threads(1)
    # What every child would do again: import torch's compiler, and read redis-py's version.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    monkeypatch.setattr(utils, "get_lib_version", functools.cache(utils.get_lib_version))
    tempfile.gettempdir()  # finds out by writing a file, the first time somebody in torch asks
    client = server.client()
    client.flushall()
    client.close()
    return World(folder, server.client)


@pytest.fixture
def settings(world, server) -> config.Config:
    path = world.folder.with_name("run.toml")
    url = f"redis://:{server.password}@127.0.0.1:{server.endpoint.port}"
    path.write_text('[run]\nname = "tiny"\nscheduler = "local"\n[train]\nepochs = 1\n'
                    f'[redis]\nurl = "{url}"\n')
    return config.load(path, SETTINGS)


@pytest.fixture
def run(world, settings) -> RunDir:
    """A run of which nothing but the directory is there."""
    made = RunDir.create(world.folder / "runs", settings, Control("local", "running", 1, 2), {})
    made.set_endpoint(Endpoint("", 0, 1, settings.redis.url))
    return made


def learner(run: RunDir, slot: int, attempt: int, notice: Notice) -> LocalSGD:
    torch.default_generator.manual_seed(3)  # and of no GPU: that takes ten times as long
    model = nn.Linear(8, 1)  # two fragments
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    place = Place(run, slot, attempt, "4711", notice_s=6.0)
    return LocalSGD(model, optimizer, place, notice, Group())


def create_version_0(run: RunDir, slot: int = 0, attempt: int = 1) -> None:
    with learner(run, slot, attempt, Notice()) as sgd:
        sgd.open(Samples(SAMPLES, -1))


# ---- a master's turn ----------------------------------------------------------------------------


@pytest.fixture
def delivered(run) -> tuple[RunDir, list[Worker]]:
    """Version 1 is committed, and both workers have offered a delta on top of it."""
    create_version_0(run)
    workers = [Worker(run, slot) for slot in (0, 1)]
    go_on(run, workers, lambda: run.commits.newest_version() == 1)
    store = BothSides.open(run)
    go_on(run, workers, lambda: all(worker.header and worker.base == 1 for worker in workers))
    assert store.offers([1])[1].keys() == {"0:1", "1:1"}
    store.close()
    return run, workers


def test_a_masters_turn(world, delivered, request):
    """It takes over, judges two deltas, commits version 2, clears away version 1, and leaves."""
    run, workers = delivered
    before = commits(run)
    epochs = run.masters.newest()

    def act() -> None:
        one = Turns(run)
        real = Averager.clean_up

        def then_leave(*args) -> None:
            try:
                real(*args)
            finally:
                one.notice.arrived(SIGTERM)

        with mock.patch.object(Averager, "clean_up", then_leave):
            assert one.main() == 0

    def check(point: Point) -> None:
        done = run.commits.newest_version()
        assert done in (1, 2)
        kept = commits(run)
        assert before.items() <= kept.items()
        assert_sound(run)
        used = assert_numbered(run.path / "masters")
        assert used in (epochs, epochs + 1)
        one = go_on(run, workers, run.done)
        assert one.epoch == used + 1
        assert kept.items() <= commits(run).items()
        assert assert_sound(run)["committed"] == SAMPLES
        assert run.commits.newest_version() > done
        assert_cleared(run)

    report(request, try_all(world, act, check))


# ---- a slot's life ------------------------------------------------------------------------------


def live(run: RunDir, slot: int) -> None:
    """A job of a slot: claim it, train and deliver a round, save the inner state, give it up."""
    notice = Notice()
    one = Agent(run, slot, notice)
    one.program.record("started")
    one.program.claim(notice)
    training = agent.Training([SimpleNamespace(pid=1)], -1)
    one.beat(training)
    with learner(run, slot, one.program.attempt, notice) as sgd:
        for step, (x, y) in enumerate(sgd.batches(Samples(SAMPLES, -1)), 1):
            loss = nn.functional.mse_loss(sgd.model(x).squeeze(-1), y)
            loss.backward()
            sgd.optimizer.each[0].step()
            sgd.step(loss)
            if step == STEPS:
                notice.arrived(SIGTERM)
    assert sgd.outcome == "yielded"
    training.report |= {"state": "delivering", "steps_total": STEPS}
    one.beat(training)
    one.end(End(Outcome.YIELDED, "notice"), training)


def inner(run: RunDir, slot: int) -> str:
    """Why the slot's inner state cannot be used, if it cannot."""
    pointer, origin = inner_state.choose(run, slot, 1, 3)
    optimizer = learner(run, slot, 1, Notice()).optimizer.each
    return inner_state.load(run, pointer, optimizer, 0) if pointer else origin


@pytest.fixture
def waiting(run) -> RunDir:
    """Version 1 is committed; whoever gets slot 0 next is granted samples of the next round."""
    create_version_0(run)
    workers = [Worker(run, slot) for slot in (0, 1)]
    go_on(run, workers, lambda: run.commits.newest_version() == 1)
    store = BothSides.open(run)
    for _ in range(5):  # a master grants as often as it is asked; the first word only tells it
        store.grant({(0, attempt): (2, [(0, 8, 12)]) for attempt in (2, 3)})
    store.close()
    return run


def test_a_slots_life(world, waiting, request):
    """Claim, beat, a round of training, the delta's bytes, the offer, inner state, release."""
    run, before = waiting, commits(waiting)

    def check(point: Point) -> None:
        assert commits(run) == before
        assert_sound(run)
        used = assert_numbered(run.path / "slots" / "0000")
        assert used in (1, 2)
        assert point.way == LOST or inner(run, 0) in ("", "fresh")
        if point.way != LOST:  # else nobody is there to grant samples
            live(run, 0)
            assert inner(run, 0) == ""
        workers = [Worker(run, slot) for slot in (0, 1)]
        assert workers[0].attempt == used + 1 + (point.way != LOST)
        go_on(run, workers, run.done)
        assert assert_sound(run)["committed"] == SAMPLES
        assert before.items() <= commits(run).items()
        kept = [path.name for path in run.slots.path(0).glob("*inner-*")]
        assert point.way == LOST or kept == [f"inner-000001.{used + 1}.0.safetensors"]
        assert_cleared(run, "slots/" if point.way == LOST else "-")

    report(request, try_all(world, lambda: live(run, 0), check))


def test_the_making_of_version_0(world, run, request):
    def check(point: Point) -> None:
        before = commits(run)
        assert run.commits.newest_version() in (-1, 0)
        create_version_0(run, slot=1)
        assert before in ({}, commits(run))
        assert run.commits.newest_version() == 0
        go_on(run, [Worker(run, slot) for slot in (0, 1)], run.done)
        assert assert_sound(run)["committed"] == SAMPLES
        assert_cleared(run)

    report(request, try_all(world, lambda: create_version_0(run), check))


# ---- a checkpoint of sync mode ------------------------------------------------------------------


def test_a_checkpoint(world, run, request):
    """The fourth one is written in the background and committed; the second one goes."""
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states: dict[int, torch.Tensor] = {}

    def train(step: int) -> dict:
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states[step] = model.weight.detach().clone()
        return {"tokens": step}

    def files() -> dict[str, bytes]:
        found = (run.path / "checkpoints").glob("step-00000003*/**/*")
        found = [*found, *(run.path / "checkpoints").glob("step-00000003.json")]
        return {str(path): path.read_bytes() for path in found if path.is_file()}

    for step in (1, 2, 3):
        extra = train(step)
        Checkpoints(run, Group(), "job1").save(step, model, optimizer, extra)
    before, extra = files(), train(4)
    assert len(before) == 4
    came_out = {step: world.folder.with_name(f"was-{step}") for step in (3, 4)}

    def act() -> None:
        saving = Checkpoints(run, Group(), "job1")
        saving.begin(4, model, optimizer, extra)
        assert saving.finish() == 4

    def check(point: Point) -> None:
        assert before == files()
        after = Checkpoints(run, Group(), "job2")
        saved, reasons = after.load(model, optimizer)
        assert saved.step in (3, 4)
        came_out[saved.step].touch()
        assert saved.extra == {"tokens": saved.step}
        assert [reason for reason in reasons if point.way not in (REFUSED, UNANSWERED)] == []
        assert torch.equal(model.weight, states[saved.step])
        for step in range(saved.step + 1, 7):
            after.save(step, model, optimizer, train(step))
        assert Checkpoints(run, Group(), "job3").load(model, optimizer)[0].step == 6
        assert torch.equal(model.weight, states[6])
        found = sorted(path.name for path in (run.path / "checkpoints").iterdir())
        assert found == [f"step-0000000{n}{end}" for n in (5, 6) for end in ("", ".json")]

    report(request, try_all(World(world.folder), act, check))  # it knows no Redis
    assert all(path.exists() for path in came_out.values())


# ---- the harness can fail -----------------------------------------------------------------------


def test_bytes_that_are_not_durable_before_the_commit_are_found(world, run, monkeypatch):
    monkeypatch.setattr(drafts.Measured, "close", io.BufferedWriter.close)  # without its fsync

    def check(_: Point) -> None:
        if run.commits.newest_version() == 0:
            assert_sound(run)

    tally = try_all(world, lambda: create_version_0(run), check, most=1, ways=(LOST,))
    (violation,) = tally.violations
    assert violation.startswith(f"{LOST} at")
    assert "committed file is damaged" in violation


def test_a_version_that_never_gets_its_name_is_found(world, run, monkeypatch):
    monkeypatch.setattr(versions, "verified", lambda run, commit, name: run.path / next(
        entry["path"] for entry in commit.files if entry["path"].endswith(name)))

    def check(_: Point) -> None:
        if run.commits.newest_version() == 0:
            read_layout(run, 0)

    tally = try_all(world, lambda: create_version_0(run), check, most=1, ways=(KILLED,))
    assert tally.violations
