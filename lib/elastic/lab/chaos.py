"""Chaos: real faults on a live run, and what they cost it.

    plan      schedule: seeded, every kind in its turn
    do        DO: one method per kind, which says in words what it has hit
    report    by_kind, from the commits; the audit; the goodput ledger

Only the run's own jobs and processes are touched. On this machine (the local scheduler, a
sandbox) processes are killed and stopped one by one; on a cluster jobs are, through its
scheduler, and what cannot be done there is left out by name (`choose`). What ends by
itself, a stopped process say, is ended by a detached shell, also if chaos is killed
meanwhile.

A fault's cost follows from later commits: the steps that its victims had done and that
were never committed, the time until anything was committed again, and the time until
every victim has part in a commit with work that it began after the fault.
"""

import contextlib
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from signal import SIGKILL
from statistics import mean, median
from typing import NamedTuple

from elastic.base.environment import elastic_home
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.base.proc import read, send
from elastic.jobs.history import MASTER, Job
from elastic.jobs.sched import jobs_of, scheduler_of
from elastic.jobs.sched_local import detached
from elastic.lab.sandbox import Sandbox
from elastic.local.store import MasterStore
from elastic.run import goodput
from elastic.run.audit import audit, gpu_seconds
from elastic.run.membership import Slot
from elastic.run.records import Commit
from elastic.run.rundir import RunDir

TAKEN_S = 5.0  # a preemptor keeps a node this long
HUNG_S = 10.0  # a process stands still this long
GONE_S = 15.0  # a killed node stays away this long
LOOK_S = 0.5
BACK_S = 120.0  # so long we wait for the end of the last faults
HITS_ONE = ("kill-worker", "preempt", "hang-worker", "kill-node")
HERE_ONLY = ("kill-redis", "hang-worker", "kill-node")
ELSEWHERE = "its processes are on other machines"  # why one of these cannot be done


class Fault(NamedTuple):
    """What was done, when, to whom, and the work that was at stake."""

    kind: str
    time: float
    what: str
    at_stake: tuple[Slot, ...]


class Cost(NamedTuple):
    """What a fault cost. A time of inf: not yet, or never."""

    steps_lost: int
    next_commit_s: float
    back_s: float


def schedule(kinds: Sequence[str], every_s: float, for_s: float, draw) -> list:
    """[(seconds after the start, kind)]: pauses of `every_s` on average, and the kinds in
    turns, each turn shuffled, so that none is forgotten. `draw`: a random.Random."""
    at, turn, planned = 0.0, [], []
    while (at := at + every_s * draw.uniform(0.5, 1.5)) < for_s:
        turn = turn or draw.sample(kinds, len(kinds))
        planned.append((at, turn.pop()))
    return planned


def cost_of(fault: Fault, commits: Iterable[Commit]) -> Cost:
    later = [commit for commit in commits if commit.time > fault.time]
    trained = [(commit.time - fault.time, delta) for commit in later for delta in commit.deltas
               if delta.base is not None]
    kept = {(delta.slot, delta.attempt, delta.base) for _, delta in trained}
    lost = sum(w.step for w in fault.at_stake if (w.slot, w.attempt, w.version) not in kept)

    def back_s(worker: Slot) -> float:
        """Until work of its slot was committed that it began after the fault."""
        return min((after_s for after_s, delta in trained
                    if delta.slot == worker.slot and delta.base > worker.version), default=inf)

    next_s = later[0].time - fault.time if later else inf
    return Cost(lost, next_s, max(map(back_s, fault.at_stake), default=0.0))


def by_kind(faults: Sequence[tuple[Fault, Cost]], work: Sequence[goodput.Work],
            end: float) -> Iterator[dict]:
    """A row per kind: how often, median and worst of what it cost, and the rate of
    training from each to the next fault."""
    kinds, ends = defaultdict(list), [*(fault.time for fault, _ in faults[1:]), end]
    for (fault, cost), until in zip(faults, ends, strict=False):
        kinds[fault.kind].append((cost, goodput.tokens_per_s(work, fault.time, until)))
    for kind, outcomes in sorted(kinds.items()):
        costs = [cost for cost, _ in outcomes]
        yield {
            "kind": kind, "count": len(outcomes),
            "steps_lost": sum(cost.steps_lost for cost in costs),
            "next_commit_s": _middle_and_worst(cost.next_commit_s for cost in costs),
            "back_s": _middle_and_worst(cost.back_s for cost in costs),
            "tokens_per_s": mean(rate for _, rate in outcomes),
        }


def _middle_and_worst(seconds: Iterable[float]) -> list[float | None]:
    times_s = sorted(seconds)
    return [None if s == inf else round(s, 2) for s in (median(times_s), times_s[-1])]


class Chaos:
    """What can be done to one run, and the record of what was done."""

    def __init__(self, run: RunDir, seed: int = 0):
        self.run, self.config, self.draw = run, run.config(), random.Random(seed)
        self.scheduler = scheduler_of(run)
        self.is_local = self.config.run.scheduler == "local"
        conf = "" if self.is_local else run.environment().get("SLURM_CONF", "")
        box = Sandbox(Path(conf).parent)
        self.box = box if conf and box.daemons.members("slurmctld") else None
        self.is_here = self.is_local or bool(self.box)  # and so are the run's processes
        self.done: list[Fault] = []
        self._began = max(0, run.commits.newest_version())

    # ---- what there is to hit

    def training(self) -> list[Slot]:
        """The workers that train on the newest version now, those with most steps first."""
        with contextlib.suppress(TryAgain), self._store() as store:
            version = self.run.commits.newest_version()
            job_ids = {job.job_id for job in self._jobs()}
            victims = [slot for slot in store.slots().values() if slot.state == "training"
                       and slot.version == version and self._is(slot, job_ids)]
            return sorted(victims, key=lambda slot: -slot.step)
        return []

    def _is(self, slot: Slot, job_ids: set[str]) -> bool:
        """Is the slot's job one of this run, and its process, if it is on this machine,
        too? Leases are not believed."""
        names = {"RUN_DIR": self.run.path, "SLOT": slot.slot, "ATTEMPT": slot.attempt}
        own = {f"ELASTIC_{name}={value}" for name, value in names.items()}
        around = read(f"/proc/{slot.pid}/environ").split("\0") if self.is_here else own
        return slot.job_id in job_ids and own <= {*around}

    def _store(self):
        return contextlib.closing(MasterStore.open(self.run))

    def _pids(self, program: str) -> list[int]:
        """The run's processes on this machine that run `program`: master or redis-server."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            words = read(folder / "cmdline").split("\0")
            names = [Path(word.partition(" ")[0]).name for word in words]
            if program in names and not names[0].endswith("sh"):  # no wrapper of it
                with contextlib.suppress(OSError):  # it is another user's, or gone
                    place = Path(os.readlink(folder / "cwd")).parent  # a Redis is known by it
                    if place == self.run.path or str(self.run.path) in words:
                        pids.append(int(folder.name))
        return sorted(pids)

    # ---- doing it

    def inject(self, kind: str, until: float = inf) -> Fault:
        """Do a fault of this kind as soon as a worker trains.

        Raises ElasticError if that turns out to be impossible, or if no worker trains
        before the time `until`.
        """
        while not (victims := self.training()):
            time.sleep(LOOK_S)
            if over := self.run.closing():
                raise ElasticError(f"no worker to hit: the run is {over}")
            if time.time() > until:
                raise ElasticError("no worker to hit: none of the run's trains")
        hits_one = kind in HITS_ONE and (kind != "preempt" or not self.box)
        victim = self.draw.choice(victims) if hits_one else victims[0]
        now = time.time()
        what = DO[kind](self, victim)
        fault = Fault(kind, now, what, (victim,) if hits_one else tuple(victims))
        self.done.append(fault)
        self.run.event("chaos", fault=kind, what=what)
        return fault

    def _kill_worker(self, victim: Slot) -> str:
        if not self.is_here:
            self.scheduler.cancel(victim.job_id, kill=True)
            return f"job {victim.job_id} of slot {victim.slot}"
        send([victim.pid], SIGKILL)
        return _process(victim)

    def _preempt(self, victim: Slot) -> str:
        if self.box:  # a job of higher priority takes a node; Slurm chooses whose
            self.box.preempt(nodes=1, seconds=TAKEN_S)
            return "one node is needed elsewhere"
        # Slurm's cancel sends the signals of a preemption without GraceTime.
        preempt = self.scheduler.preempt if self.is_local else self.scheduler.cancel
        preempt(victim.job_id)
        return f"job {victim.job_id} of slot {victim.slot}"

    def _kill_master(self, _victim: Slot) -> str:
        if not self.is_here:
            job_ids = [job.job_id for job in self._jobs() if job.role == MASTER]
            for job_id in job_ids:
                self.scheduler.cancel(job_id, kill=True)
            return f"jobs {job_ids}"
        pids = self._pids("master") + self._pids("redis-server")
        send(pids, SIGKILL)
        return f"master and Redis, processes {pids}"

    def _kill_redis(self, _victim: Slot) -> str:
        send(self._pids("redis-server"), SIGKILL)
        return "Redis alone"

    def _flush_redis(self, _victim: Slot) -> str:
        with self._store() as store:
            return f"{store.forget_everything()} keys removed"

    def _hang_worker(self, victim: Slot) -> str:
        script = 'kill -STOP "$0"; sleep "$1"; kill -CONT "$0"'
        detached(["/bin/sh", "-c", script, str(victim.pid), str(HUNG_S)])
        return f"{_process(victim)} stands still for {HUNG_S:g} s"

    def _kill_node(self, victim: Slot) -> str:
        if self.is_local:
            self.scheduler.kill(victim.job_id)
            return f"all processes of job {victim.job_id}, slot {victim.slot}"
        node = next((job.node for job in self._jobs() if job.job_id == victim.job_id), "")
        self.box.kill_node(node)  # by Slurm's name: its processes see this machine's
        revive = (elastic_home() / "bin/elastic-sandbox", "revive-node", node,
                  "--dir", self.box.path.parent, "--name", self.box.path.name)
        detached(["/bin/sh", "-c", 'sleep "$0"; exec "$@"', *map(str, (GONE_S, *revive))])
        return f"node {node}, for {GONE_S:g} s"

    def _jobs(self) -> list[Job]:
        return jobs_of(self.run.name, self.scheduler)

    # ---- what came of it

    def costs(self) -> list[tuple[Fault, Cost]]:
        """Every fault so far with its cost so far."""
        commits = list(self.run.commits.all(self._began))
        return [(fault, cost_of(fault, commits)) for fault in self.done]

    def report(self, began: float, before_s: float = 0.0) -> dict:
        """What the faults cost since the time `began`, compared with the `before_s`
        seconds before."""
        work = goodput.work_in(self.run.commits.all(), self.run.lines("metrics.jsonl"))
        costs = self.costs()
        end = min(time.time(), (self.run.done() or {}).get("time", inf))
        before = goodput.tokens_per_s(work, began - before_s, began) if before_s else None
        rate = goodput.tokens_per_s(work, began, end)
        kinds = list(by_kind(costs, work, end))
        for row in kinds:
            row["kept"] = row["tokens_per_s"] / before if before else None
        proof = audit(self.run.path, self.config.checkpoint.keep)
        return {
            "run": self.run.name, "seconds": round(end - began, 1), "faults": len(costs),
            "kinds": kinds, "tokens_per_s": rate, "baseline_tokens_per_s": before,
            "kept": rate / before if before else None,
            "steps_lost": sum(cost.steps_lost for _, cost in costs),
            "audit": {**proof, "gpu_seconds": gpu_seconds(self.run)},
        }


DO = {"kill-worker": Chaos._kill_worker, "preempt": Chaos._preempt,
      "kill-master": Chaos._kill_master, "kill-redis": Chaos._kill_redis,
      "flush-redis": Chaos._flush_redis, "hang-worker": Chaos._hang_worker,
      "kill-node": Chaos._kill_node}

Say = Callable[[str], object]


def harm(run: RunDir, every_s: float, for_s: float, before_s: float, seed: int, kinds: str,
         say: Say) -> dict:
    """Look on for `before_s`, then do faults to the run for `for_s`, one every `every_s`
    on average, and say each. Returns the report. UsageError: there is nobody to hit."""
    if not every_s:
        raise UsageError("--every 0: faults need time between them", "give --every 10s")
    if over := run.closing():
        what = f"run {run.name} is {over}: there is nobody to hit"
        raise UsageError(what, f"elastic-scale {run.name} starts a stopped or failed run")
    if run.control().mode == "sync":
        what = f"run {run.name} is in sync mode: chaos is for the many jobs of local mode"
        raise UsageError(what, "elastic-doctor --try does to ranks what happens to ranks")
    agent = Chaos(run, seed)
    chosen, refused = choose(agent, kinds)
    for kind, why in refused.items():
        say(f"not done: {kind}: {why}")
    began = time.time()
    time.sleep(before_s)
    planned = schedule(chosen, every_s, for_s, random.Random(seed))
    unleash(agent, planned, lambda text: say(f"{time.time() - began:7.1f}s  {text}"))
    return agent.report(began + before_s, before_s)


def unleash(chaos: Chaos, planned: Sequence[tuple[float, str]], say: Say) -> None:
    """Do what is planned, each when its time has come, and wait until everybody is back,
    or the run is over."""
    began = time.time()
    last = began + (planned[-1][0] if planned else 0.0) + BACK_S
    for at, kind in planned:
        while time.time() - began < at and not chaos.run.closing():
            time.sleep(LOOK_S)
        if chaos.run.closing():
            return
        try:
            say(f"{kind}: {chaos.inject(kind, until=last).what}")
        except ElasticError as error:
            say(f"{kind}: not done: {error.what}")
    while time.time() < last and not chaos.run.closing():
        if all(cost.back_s < inf for _, cost in chaos.costs()):
            return
        time.sleep(LOOK_S)


def choose(chaos: Chaos, wanted: str) -> tuple[list[str], dict[str, str]]:
    """The kinds of a comma-separated list (empty: all that can be done), and why others
    cannot."""
    named = [kind for kind in wanted.split(",") if kind] or list(DO)
    if unknown := [kind for kind in named if kind not in DO]:
        raise UsageError(f"no such fault: {unknown[0]!r}", f"there are {', '.join(DO)}")
    refused = {kind: ELSEWHERE for kind in named if kind in HERE_ONLY and not chaos.is_here}
    if wanted and refused:
        kind = next(iter(refused))
        raise UsageError(f"{kind} cannot be done to run {chaos.run.name}: {ELSEWHERE}")
    return [kind for kind in named if kind not in refused], refused


def _process(victim: Slot) -> str:
    return f"process {victim.pid} of slot {victim.slot}, at step {victim.step}"
