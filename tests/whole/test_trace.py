"""Real processes against the simulator: what a run commits is what the algorithm makes of the same
participation, bit for bit. The strongest test of all: one wrong weight, learning rate, base, inner
state or random number, anywhere in worker, transport or master, and the parameters differ.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.people.evaluation import evaluate
from elastic.run.rundir import RunDir
from merging import read_outer
from running import Running, running
from validate import records
from validate.noisy_task import Bytes, Noisy
from validate.simulator import Simulator

STEPS = 16
HEARD_S = 0.6  # what was said is heard by then: by the master of a worker, by a worker of a notice
SETTINGS = {
    "run.task": "validate.noisy_task:Noisy",
    "run.seed": 3,
    "elastic.min": 1,
    "elastic.max": 2,
    "train.schedule": "cosine",
    "local_sgd.inner_steps": STEPS,
    "local_sgd.join_ramp": 20,
    "local_sgd.inner_state_every": 0,  # only on notice: before that, who joins finds none
    "local_sgd.inner_state_max_age": 1000,
    "local_sgd.deadline_k": 0,  # a standstill makes rounds long
    "local_sgd.min_deadline": "3s",
    "local_sgd.last_call": "6s",
    "local_sgd.fragment": "1kb",  # several of them
    "checkpoint.keep": 1000,
    "health.stall_after": "5m",
    "health.lease": "60s",  # a machine that has no time for an agent takes nobody's samples
    "local_scheduler.grace": "30s",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> RunDir:
    return record(tmp_path_factory.mktemp("trace"), "int8")


def record(home: Path, compression: str) -> RunDir:
    """A run whose workers join, are preempted with notice, killed, and late."""
    gate = home / "gate"
    with at_work(home, {"local_sgd.compression": compression}, samples=10**6) as run:
        run.until(lambda: run.version >= 2, 60, "two versions")
        with joining(run, gate, slot=2, attempt=1):
            run.run.set_control(max=3)
        preempt(run, gate, slot=0)
        with joining(run, gate, slot=1, attempt=2):
            os.kill(run.trainer_of(1), 9)
        leave_late(run, gate, slot=2)
    return run.run


@contextlib.contextmanager
def at_work(home: Path, settings: dict, samples: int) -> Iterator[Running]:
    """All join version 0 before anybody moves: who joins while a round closes is late for it."""
    gate, settings = home / "gate", SETTINGS | settings
    gate.touch()
    with running(home, settings, samples=samples, gate=str(gate)) as run:
        all_there = [("training", 0)] * settings["elastic.max"]
        run.until(lambda: places(run) == all_there, 60, "all workers at version 0")
        gate.unlink()
        yield run


def places(run: Running) -> list[tuple[str, int]]:
    return [(slot.state, slot.version) for slot in run.slots().values()]


@contextlib.contextmanager
def standstill(run: Running, gate: Path) -> Iterator[None]:
    """Every worker is in the first part of a round, and cannot move on."""

    def all_train() -> bool:
        gate.touch()
        time.sleep(HEARD_S)
        place = {
            (slot.state, slot.version, slot.step < STEPS // 2) for slot in run.slots().values()
        }
        if place == {("training", run.version, True)}:
            return True
        gate.unlink()
        time.sleep(0.1)
        return False

    run.until(all_train, 60, "a standstill")
    yield
    gate.unlink()


@contextlib.contextmanager
def joining(run: Running, gate: Path, slot: int, attempt: int) -> Iterator[None]:
    """A worker joins a round while nobody moves, so that it is late for none."""

    def has_joined() -> bool:
        worker = run.slots().get(slot)
        return worker and (worker.attempt, worker.state) == (attempt, "training")

    with standstill(run, gate):
        yield
        run.until(has_joined, 60, f"attempt {attempt} of slot {slot}")
    run.until(lambda: deltas(run.run, slot, attempt), 60, f"slot {slot} contributes")


def preempt(run: Running, gate: Path, slot: int) -> None:
    """With notice, in the middle of a round; and its replacement joins."""
    with standstill(run, gate):
        notice(run, slot)
    run.until(lambda: run.run.slots.latest(slot) == 2, 60, "its replacement")
    with joining(run, gate, slot, attempt=2):
        pass


def leave_late(run: Running, gate: Path, slot: int) -> None:
    """The others go on without a worker; then it is preempted, and delivers after all."""
    mine = gate.with_name(f"{gate.name}-{slot}")
    with standstill(run, gate):
        mine.touch()
        version = run.version
    run.until(lambda: run.version > version, 60, "a version without it")
    notice(run, slot)
    mine.unlink()
    run.until(lambda: version in deltas(run.run, slot, 1), 60, "its delta is merged")


def notice(run: Running, slot: int) -> None:
    run.scheduler.preempt(run.jobs()["worker", slot].job_id)
    time.sleep(HEARD_S)


def deltas(run: RunDir, slot: int, attempt: int) -> list[int]:
    """The bases of what an attempt has contributed."""
    found = [delta for commit in run.commits.all() for delta in commit.deltas]
    return [d.base for d in found if (d.slot, d.attempt) == (slot, attempt)]


# ---- the replay


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers
    yield
    torch.set_num_threads(before)


def differs(run: RunDir, kind: type[Simulator] = Simulator, task=None) -> int:
    """The first version in which the replay's parameters or momentum are not the run's; 0: none."""
    config = run.config()
    simulator = kind.of(run, task or Noisy({}))
    for version in simulator.replay(list(run.commits.all())[1:]):
        outer = read_outer(run, run.commits.of(version), config.local_sgd.outer_momentum)
        mine = [*simulator.outer.params, *simulator.outer.momentum]
        theirs = [*outer.params, *outer.momentum]
        if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            return version
    return 0


def test_the_recorded_run_has_everything_that_can_happen_to_a_worker(recorded):
    every = [(commit, delta) for commit in recorded.commits.all() for delta in commit.deltas]
    origins = {delta.inner.split(" of ")[0] for _, delta in every}
    assert origins == {"fresh", "fresh with a ramp", "own"}
    assert len({delta.tokens for _, delta in every}) > 1, "a partial delta"
    assert any(delta.base < commit.version - 1 for commit, delta in every), "a late delta"
    assert not [event for event in recorded.events() if event["kind"] == "reject"]


def test_the_processes_end_in_exactly_the_parameters_of_the_simulator(recorded):
    assert recorded.commits.newest_version() > 5
    assert differs(recorded) == 0


def test_adamw_a_cold_start_int4_and_validations_on_the_way_end_there_too(tmp_path):
    """The recorded run has Muon and int8, the defaults, and no cold start."""
    settings = {"elastic.max": 1, "train.optimizer": "adamw", "train.validate_every": STEPS,
                "local_sgd.cold_start": 0.35, "local_sgd.compression": "int4"}
    with at_work(tmp_path, settings, samples=300) as run:
        run.finish()
        assert len(run.run.scores.read()) > 1
        assert differs(run.run) == 0


@pytest.mark.parametrize("name", records.ARMS)
def test_an_arm_of_the_records_is_what_real_processes_make_of_it(tmp_path, name):
    """From random parameters, on fewer tokens. A round of local mode has the same bits; sync mode
    begins and ends in float32, the records in bf16, as local mode publishes: 0.002 nats here."""
    size = replace(records.SIZES["0.5M"], tokens=16 * records.GLOBAL_BATCH * records.CONTEXT)
    trial = records.Trial(name, records.Point(4, "2"), 0, size)
    mode = "sync" if records.ARMS[name].synchronous else "local"
    settings = SETTINGS | {
        "run.task": "validate.noisy_task:Bytes", "run.mode": mode, "train.epochs": 0,
        "train.optimizer": "adamw", "elastic.max": 1 if mode == "sync" else 2,
        "local_sgd.cold_start": 0.35, "local_sgd.fragment": "1mb",
        **dict(map(setting, trial.settings))}
    with running(tmp_path, settings) as run:
        run.finish()
        if mode == "sync":
            loss = evaluate(run.run)["validation_loss"]
            assert loss == pytest.approx(records.run(trial)["loss"], abs=0.005)
        else:
            assert run.version > 2
            assert differs(run.run, task=Bytes(run.run.config().task)) == 0


def setting(text: str) -> tuple[str, object]:
    """Of "section.key=value"."""
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


# ---- and it would notice


class Unweighted(Simulator):
    def share(self, shares):
        return [clip / len(shares) for _, clip in shares]


class WithoutMomentum(Simulator):
    def step(self, means, lr):
        for param, mean in zip(self.outer.params, means, strict=True):
            param.sub_(mean, alpha=lr)


class MomentumOfTheRoundBefore(Simulator):
    before = 0.0

    def step(self, means, lr):
        self.before, self.outer.mu = self.outer.mu, self.before
        super().step(means, lr)


class LearningRateByLocalSteps(Simulator):
    def factor(self, version, steps, tokens):
        return super().factor(replace(version, tokens=64 * steps), steps, tokens)


class NeverRamped(Simulator):
    def inner_before(self, work):
        return replace(super().inner_before(work), ramp=0)


class RandomNumbersNotInherited(Simulator):
    def inner_before(self, work):
        return replace(super().inner_before(work), rng=self.first_rng())


class BaseRelativeWhenLate(Simulator):
    def anchor(self, delta, index):
        return None


class AnchoredAsPublished(Simulator):
    def anchor(self, delta, index):
        late = delta.base < self.version
        return self.versions[delta.base].published[index] if late else None


@pytest.mark.parametrize(
    "wrong",
    [
        Unweighted,
        WithoutMomentum,
        MomentumOfTheRoundBefore,
        LearningRateByLocalSteps,
        NeverRamped,
        RandomNumbersNotInherited,
        BaseRelativeWhenLate,
        AnchoredAsPublished,
    ],
)
def test_a_simulator_that_is_wrong_in_one_thing_ends_elsewhere(recorded, wrong):
    assert differs(recorded, wrong) > 0
