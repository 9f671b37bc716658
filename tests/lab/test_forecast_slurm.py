"""A forecast against what a private Slurm then makes of the same trace: goodput within 5 points.

First comes a calm part: there it is measured what things cost in sync mode. Then nodes are taken,
and come back. What a start-up costs is measured all the time, and so is everything of local mode
and of the plain script: it depends on who else is busy on this machine, and no forecast knows that.

    pytest tests/lab/test_forecast_slurm.py    local mode; the other ways, too: make matrix
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

import shown_costs
from elastic.base import config as configuration
from elastic.lab.forecast import Way, costs, ways_of
from elastic.lab.played import Change, Costs, Nodes
from elastic.lab.sandbox import Sandbox
from elastic.run import goodput
from elastic.run.goodput import Allocation, Work
from helpers import ROOT, elastic, wait_until
from running import TESTS
from slurm_sandbox import _folder, _require_slurm, _up
from test_sync_slurm import Cluster

pytestmark = pytest.mark.slurm

NEAR = 0.05
GRACE_S = 8
NODES = ("n1", "n2", "n3", "n4")
COMMON = {
    "task.samples": 10**6, "slurm.signal": "", "elastic.min": 1, "elastic.max": 4,
    "checkpoint.interval": "10m", "sync.grow_after": "10m",
    # What a sandbox has: GRACE_S and KillWait, no queue, little to save and nothing to tear down.
    "plan.notice": "10s", "plan.queue": "0.5s", "plan.save": "0.5s", "plan.leave": "0.5s",
}
LOCAL = COMMON | {
    "run.mode": "local", "slurm.master_partition": "cpu", "local_sgd.inner_steps": 12,
    "local_sgd.min_deadline": "2s", "local_sgd.last_call": "2s",
}
SYNC = COMMON | {"run.mode": "sync"}
STEP_S, SAVE_EVERY = 0.2, 5  # of the plain script
AWAY_S = 8.0  # between two of its steps: it was not there


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    _require_slurm()
    with _folder() as folder:
        yield _up(folder, nodes=len(NODES), gpus=1, grace_s=GRACE_S)


@pytest.fixture
def stage(box, tmp_path) -> Iterator["Stage"]:
    stage = Stage(box, tmp_path)
    yield stage
    if stage.run.path.exists():
        elastic("stop", "story", "--now", env=stage.env)
    for partition in ("preempt", "cpu", "high"):
        box.run("scancel", f"--partition={partition}")
    wait_until(lambda: box.idle_nodes() == {*NODES, "c1"}, 30, "all nodes are idle again")


class Stage:
    """A sandbox whose nodes come and go by a script, and what runs on it."""

    def __init__(self, box: Sandbox, home: Path):
        self.box, self.home, self.cluster = box, home, Cluster(box, home)
        self.run, self.env = self.cluster.run, self.cluster._cron
        self.changes: list[Change] = []  # as they were made
        self.began = 0.0
        self._takers: dict[str, str] = {}

    def begin(self, there: Sequence[str]) -> None:
        """Only these nodes are there at first."""
        for node in set(NODES) - set(there):
            self._take(node)
        self.changes = [Change(0.0, node, 1) for node in there]
        self.began = time.time()

    @property
    def now(self) -> float:
        return time.time() - self.began

    def play(self, *moments: tuple[float, str], look: Callable = lambda: None) -> None:
        """At each time the nodes that are named are taken, or given back if they are not there."""
        for at, names in moments:
            while self.now < at:
                look()
                time.sleep(min(0.2, max(0.0, at - self.now)))
            for node in names.split():
                self.changes.append(Change(self.now, node, int(node in self._takers)))
                if node in self._takers:
                    self.box.run("scancel", self._takers.pop(node))
                else:
                    self._take(node)

    def _take(self, node: str) -> None:
        where = ("--partition=high", "--exclusive", f"--nodelist={node}", "--chdir=/")
        taker = self.box.run("sbatch", "--parsable", "--output=/dev/null", *where,
                             "--wrap=exec sleep 3600")
        self._takers[node] = taker.strip()

    def forecast(self, mode: str, shown: dict[str, float]) -> Way:
        config, startup_s = self.run.config(), shown_costs.measured(self.run)["startup_s"]
        print(f"start-up: {shown['startup_s']:.1f} s at first, {startup_s:.1f} s in all")
        found = replace(costs(config, None), **shown | {"startup_s": startup_s})
        return self.of(mode, config, found)

    def of(self, mode: str, config, price: Costs) -> Way:
        ways = ways_of(Nodes(self.changes), self.now, config, price)
        return next(way for way in ways if way["mode"] == mode)

    def measured(self) -> dict[str, float]:
        """The run's ledger until now."""
        elastic("reconcile", env=self.env)  # sees the ends of jobs
        jobs = goodput.allocations(self.run.events(), self.run.jobs.endings(), 1, time.time())
        work = goodput.work_in(self.run.commits.all(), self.run.lines("metrics.jsonl"))
        return goodput.ledger(jobs, work)


def comes_out_as(predicted: dict, measured: dict[str, float]) -> None:
    """Within NEAR; what was predicted and what was is printed, part by part."""
    was = measured["training"] / (measured["allocated"] - measured["open"])
    print(f"{predicted['mode']}: predicted {predicted['goodput']:.1%}, was {was:.1%}")
    for part, seconds in measured.items():
        print(f"  {part:10} {predicted[part]:8.1f} {seconds:8.1f}")
    assert measured["training"] > 0
    assert was == pytest.approx(predicted["goodput"], abs=NEAR)


def local(stage: Stage) -> None:
    stage.begin(NODES[:1])
    stage.cluster.submit(1, len(NODES), **LOCAL)
    stage.play((5, "n2"), (10, "n3"), (15, "n4"), (28, "n2"), (34, "n2"), (40, "n3 n4"), (46, "n3"))
    stage.play((60, ""))
    measured = stage.measured()
    comes_out_as(stage.forecast("local", shown_costs.measured(stage.run)), measured)


def sync(stage: Stage) -> None:
    stage.begin(NODES[:2])
    stage.cluster.submit(1, 2, **SYNC)
    stage.play((40, ""))
    shown = shown_costs.measured(stage.run)
    stage.play((40, "n2"), (130, ""))
    comes_out_as(stage.forecast("sync", shown), stage.measured())


class Plain:
    """A job of two nodes, requeued by Slurm, whose script saves now and then."""

    def __init__(self, stage: Stage):
        self.box, self.path = stage.box, stage.home / "steps.log"
        script = [TESTS / "bench" / name for name in ("plain_requeue.sh", "plain_steps.py")]
        argv = [script[0], sys.executable, script[1], stage.home, STEP_S, SAVE_EVERY]
        where = ("--partition=preempt", "--nodes=2", "--gres=gpu:1", f"--chdir={TESTS / 'bench'}",
                 "--export=ALL,OMP_NUM_THREADS=1")
        self.job = self.box.run("sbatch", "--parsable", f"--output={stage.home}/log", *where,
                                *map(str, argv)).strip()
        self.had: list[list[float]] = []  # start and end of what it was given
        self._is_there = False

    def look(self) -> None:
        """Note whether it has its nodes now."""
        state = self.box.run("squeue", "--noheader", f"--jobs={self.job}", "--format=%T").strip()
        was_there, self._is_there = self._is_there, state == "RUNNING"
        if self._is_there and not was_there:
            self.had.append([time.time(), 0.0])
        if self._is_there:
            self.had[-1][1] = time.time()

    def steps(self) -> list[tuple[int, float]]:
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [(int(number), float(at)) for number, at in map(str.split, lines)]

    def gaps(self) -> dict[float, float]:
        """When a step ended -> the seconds since the one before, unless it came after a restart."""
        times = [at for _, at in self.steps()]
        return {at: at - before for before, at in pairwise(times) if at - before < AWAY_S}

    def shown(self) -> dict[str, float]:
        gaps_s = [(step % SAVE_EVERY == 1, self.gaps().get(at)) for step, at in self.steps()]
        step_s, save_s = (fmean(s for saves, s in gaps_s if s and saves == kind)
                          for kind in (False, True))
        starts = [start for start, _ in self.had]
        waits_s = [min(at for _, at in self.steps() if at > start) - start for start in starts]
        return {"step_s": step_s, "startup_s": fmean(waits_s) - step_s,
                "save_s": max(0.0, save_s - step_s)}

    def measured(self, step_s: float) -> dict[str, float]:
        jobs = [Allocation(2, start, start, end, "killed", ((start, (0, number)),))
                for number, (start, end) in enumerate(self.had)]
        work, furthest, gaps = [], 0, self.gaps()
        for step, at in self.steps():
            number = max(n for n, (start, _) in enumerate(self.had) if start <= at)
            again, furthest = step <= furthest, max(step, furthest)
            took_s = step_s if step % SAVE_EVERY == 1 else gaps.get(at, step_s)
            work.append(Work((0, number), at - took_s, at, 1, AWAY_S, again))
        return goodput.ledger(jobs, work)


def requeue(stage: Stage) -> None:
    stage.begin(NODES[:2])
    plain = Plain(stage)
    stage.play((20, "n1"), (23, "n1"), (130, ""), look=plain.look)
    shown = plain.shown()
    settings = ["run.scheduler=local", "elastic.min=2", "elastic.max=2", "plan.requeue=12s",
                f"plan.notice={GRACE_S}", f"checkpoint.interval={SAVE_EVERY} steps"]
    config = configuration.load(ROOT / "etc/demo.toml", settings, Path(os.devnull))
    predicted = stage.of("requeue", config, replace(costs(config, None), **shown))
    assert predicted["gpus"] == [2, 2]
    comes_out_as(predicted, plain.measured(shown["step_s"]))


WAYS = (local, sync, requeue)


@pytest.mark.parametrize("way", WAYS if os.environ.get("ELASTIC_FULL_MATRIX") == "1" else WAYS[:1])
def test_a_run_comes_out_as_forecast(way, stage):
    way(stage)
