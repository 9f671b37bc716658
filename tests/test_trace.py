"""Real processes against the simulator: what a run commits is what the algorithm makes of the same
participation, bit for bit. The strongest test of all: one wrong weight, learning rate, base, inner
state or random number, anywhere in worker, transport or master, and the parameters differ.
"""

import pytest
import torch
from running import Running, running
from validate.noisy_task import Noisy
from validate.simulator import Simulator

from elastic.rundir import RunDir
from elastic.versions import read_outer

SETTINGS = {
    "run.task": "validate.noisy_task:Noisy",
    "run.seed": 3,
    "elastic.min": 1,
    "elastic.max": 2,
    "train.schedule": "cosine",
    "local_sgd.inner_steps": 8,
    "local_sgd.join_ramp": 12,
    "local_sgd.inner_state_every": 0,  # only on notice: until then a worker that joins is fresh
    "local_sgd.inner_state_max_age": 1000,
    "local_sgd.min_deadline": "30s",
    "local_sgd.fragment": "1kb",  # several
    "checkpoint.keep": 1000,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> RunDir:
    """A run in which workers join, one is preempted with notice, and one is killed."""
    with running(tmp_path_factory.mktemp("trace"), SETTINGS, samples=10**6, step_s=0.1) as run:
        run.versions(more=2)
        grow(run, 3)  # nobody has saved an inner state yet
        preempt(run, 0)  # and its replacement finds its own
        grow(run, 4)  # takes the donor's
        run.kill("trainer")
        run.versions(more=2)
    return run.run


def grow(run: Running, workers: int) -> None:
    run.run.set_control(max=workers)
    slot = workers - 1
    run.until(lambda: contributes(run, slot, attempt=1), 40, f"slot {slot} contributes")


def preempt(run: Running, slot: int) -> None:
    """With notice, in the middle of a round."""
    run.until(lambda: 2 <= run.slots()[slot].step <= 5, 30, "the middle of a round")
    run.scheduler.preempt(run.jobs()["worker", slot].job_id)
    run.until(lambda: contributes(run, slot, attempt=2), 40, f"slot {slot} is back")


def contributes(run: Running, slot: int, attempt: int) -> bool:
    deltas = [delta for commit in run.commits() for delta in commit["deltas"]]
    return any((d["slot"], d["attempt"]) == (slot, attempt) for d in deltas)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers
    yield
    torch.set_num_threads(before)


def differs(run: RunDir, kind: type[Simulator] = Simulator) -> int:
    """The first version in which the replay's parameters or momentum are not the run's; 0: none."""
    config = run.config()
    simulator = kind.of(run, Noisy(config.task | {"pace": ""}))
    commits = [run.commit(version) for version in range(1, run.newest_version() + 1)]
    for version in simulator.replay(commits):
        outer = read_outer(run, run.commit(version), config.local_sgd.outer_momentum)
        pairs = zip(
            [*simulator.outer.params, *simulator.outer.momentum],
            [*outer.params, *outer.momentum],
            strict=True,
        )
        if not all(torch.equal(mine, its) for mine, its in pairs):
            return version
    return 0


def test_the_simulator_ends_in_exactly_the_parameters_of_the_processes(recorded):
    deltas = [delta for commit in recorded.commits() for delta in commit["deltas"]]
    origins = {delta["inner"].split(" of ")[0] for delta in deltas}
    assert {"fresh", "fresh with a ramp", "own", "donor slot 0"} <= origins
    assert len({delta["tokens"] for delta in deltas}) > 1  # some were partial
    assert differs(recorded) == 0
