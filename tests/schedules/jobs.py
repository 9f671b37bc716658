"""Jobs: real reconcile passes against a scheduler that answers late, wrongly or not at all.

Real: `run_pass`, `_Pass` and all that it decides with, `parse_squeue` for a damaged answer. Not
real: the scheduler, the run directory, the kernel's lock, the clock.

What must always hold is checked where it would break: at the moment a job comes to be, against
the jobs that there really are, whatever a listing has said.
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from elastic.base.errors import TryAgain
from elastic.jobs import history, reconcile, sched_slurm
from elastic.jobs.history import TRAINER, WORKER, Job
from elastic.jobs.plan import CANCEL, SUBMIT
from elastic.jobs.reconcile import run_pass
from elastic.jobs.sched import Refused, RetryLater
from elastic.run import told
from elastic.run.rundir import Control, RunDir
from schedules.actors import Actor, Cast, Violation, must, operations

ENDED = ("COMPLETED", "FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "CANCELLED by 0",
         "OUT_OF_MEMORY")
QUEUED = ("PENDING",)
KNOWN_STATES = (*QUEUED, "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")  # of living jobs
LAG_S = 25.0  # that a listing may be behind: less than history.LISTING_LAG_S
HANG_S = 500.0  # that a controller may take to act on a submission: less than reconcile.UNSURE_S
DYING_S = 25.0  # that sbatch may take whose pass is killed: less than reconcile.DYING_S
PASS_S = 4.0  # that a pass may take between two looks of the world
CALM_S = 700.0
CALM_PASSES = 30
LIMITS = SimpleNamespace(max_pending=3, max_failures=3, backoff_s=5.0)
CONFIG = SimpleNamespace(
    elastic=LIMITS, run=SimpleNamespace(scheduler="slurm", command=()),
    health=SimpleNamespace(hang_timeout_s=0.0),
    slurm=SimpleNamespace(gpus_per_worker=1, gpus_per_node=1), workers=int,
    sync=SimpleNamespace(sizes=(), grow_after_s=1e9),
)
TABLE = (
    *["pass"] * 24, *["turn"] * 10, *["time"] * 12, *["job"] * 24, *["fault"] * 8, "kill", "kill",
    *["listing"] * 5, "scale", "scale", "mode", "stop", "done", "ids", "twice", "twice",
)
FAULTS = ("unsure, nothing submitted", "unsure, submitted", "unsure, submitted later", "refused",
          "later", "no answer")


@dataclass(frozen=True)
class Row:
    """A job as it really is."""

    job_id: str
    role: str
    slot: int
    state: str
    submitted: float
    started: float | None = None
    node: str = ""
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def queued(self) -> bool:
        return self.state in QUEUED


class MemoryRun(RunDir):
    """A run directory of which only reconcile's part is there."""

    def __init__(self, world: "Jobs"):
        super().__init__(Path("/nowhere/run-a"))
        self.private = self.path
        self.jobs = MemoryJobs(self)
        self.world, self.records = world, {}
        self.wanted = Control("local", "running", 1, 3)
        self.is_done = self.has_failed = None
        self.notes = None

    def config(self):
        return CONFIG

    def environment(self):
        return {}

    def control(self):
        return self.wanted

    def done(self):
        return self.is_done

    def failed(self):
        return self.has_failed

    def mark_failed(self, reason, detail=""):
        self.has_failed = {"reason": reason}

    def event(self, kind, **fields):
        pass


class MemoryJobs(told.Jobs):
    """Exit records, likewise."""

    def ending(self, job_id):
        return self.run.records.get(job_id)

    def endings(self):
        return list(self.run.records.values())


class Pass(reconcile._Pass):
    """A pass whose notes are kept in memory."""

    def save(self) -> None:
        self.run.world.cast.edge("write reconcile.json")
        self.run.notes = self.memory


class Slurm:
    """The scheduler of one pass. What the pass has seen is remembered, to judge what it does."""

    def __init__(self, world: "Jobs"):
        self.world = world
        self.silent, self.did = False, []
        self.slots = self.mode = self.closing = None

    def jobs(self, within_s: float = 0.0) -> list[Job]:
        world = self.world
        world.cast.edge("squeue")
        self.look()
        if world.listing == "silent":
            self.silent = True
            raise TryAgain("squeue: Socket timed out")
        if world.listing == "cut":
            self.silent = True
            return sched_slurm.parse_squeue("17\x1fRUNNING\x1f1")
        rows = world.rows if world.listing == "fresh" else world.as_of(world.now - LAG_S)
        return [Job(r.job_id, r.role, r.slot, r.state, r.reason, r.submitted, r.started, r.node,
                    run="run-a") for r in rows.values()]

    def look(self) -> None:
        wanted = self.world.run.control()
        self.mode, self.slots, self.closing = wanted.mode, wanted.max, self.world.run.closing()

    def submit(self, spec) -> str:
        world, fault = self.world, self.take_fault()
        must(not self.silent, "a job is submitted though the scheduler did not answer")
        must(not self.closing, f"a job is submitted for a run that is {self.closing}")
        self.did.append((SUBMIT, spec.role, spec.slot))
        if world.cast.acting:
            world.dying = (world.now + DYING_S, spec.role, spec.slot)
        world.cast.edge("sbatch")
        world.dying = None
        if fault == "refused":
            raise Refused("sbatch: Invalid account")
        if fault == "later":
            raise RetryLater("sbatch: MaxSubmitJobLimit")
        if fault == "no answer":
            raise TryAgain("sbatch gave no answer in 25 s")
        if fault == "unsure, nothing submitted":
            raise TryAgain("sbatch: Socket timed out")
        if fault == "unsure, submitted later":
            # A pass that may die before it has noted that: so long the note before counts.
            delay_s = DYING_S if world.cast.acting else HANG_S
            world.arrivals.append((world.now + delay_s, spec.role, spec.slot))
            raise TryAgain("sbatch: Socket timed out")
        job_id = world.add(spec.role, spec.slot, self)
        if fault:
            raise TryAgain("sbatch: Zero Bytes were transmitted")
        world.cast.edge("sbatch has submitted")
        return job_id

    def take_fault(self) -> str:
        return self.world.faults.pop() if self.world.faults else ""

    def cancel(self, job_id: str, kill: bool = False) -> None:
        world = self.world
        must(not self.silent, "a job is cancelled though the scheduler did not answer")
        self.did.append((CANCEL, job_id))
        world.cast.edge("scancel")
        if self.take_fault() == "no answer":
            raise TryAgain("scancel: Socket timed out")
        row = world.rows.get(job_id)
        if row and row.queued:
            world.change(job_id, state="CANCELLED by 0")
        elif row and not row.ended:
            world.change(job_id, state="CANCELLED by 0" if kill else "COMPLETING")

    def spare_gpus(self, spec, most: int) -> int:
        return 0


class Jobs:
    """The world of one schedule."""

    def __init__(self, schedule: bytes):
        self.cast, self.log, self.now = Cast(), [], 100_000.0
        self.run = MemoryRun(self)
        self.rows: dict[str, Row] = {}
        self.past: list[tuple[float, dict[str, Row]]] = [(0.0, {})]
        self.arrivals: list[tuple[float, str, int]] = []
        self.dying: tuple[float, str, int] | None = None  # what a pass is just submitting
        self.faults: list[str] = []
        self.listing, self.locked = "fresh", False
        self.next_id = 1
        self.began: dict[Actor, float] = {}
        if schedule[0] > 170:
            self.run.wanted = replace(self.run.wanted, mode="sync")
        self._schedule = schedule[1:]

    def play(self) -> None:
        """The schedule, and then a good end. Raises Violation."""
        try:
            for name, how in operations(self._schedule, TABLE):
                if note := getattr(self, "on_" + name)(how):
                    self.log.append(f"{name}: {note}")
                self.check()
            self.end_well()
        finally:
            self.cast.close()

    # ---- the scheduler's truth

    def live(self, role: str = "") -> list[Row]:
        return [row for row in self.rows.values() if not row.ended and role in ("", row.role)]

    def as_of(self, then: float) -> dict[str, Row]:
        return next(rows for at, rows in reversed(self.past) if at <= then)

    def changed(self) -> None:
        self.past.append((self.now, dict(self.rows)))

    def change(self, job_id: str, **changes) -> None:
        self.rows[job_id] = replace(self.rows[job_id], **changes)
        self.changed()

    def add(self, role: str, slot: int, slurm: Slurm | None) -> str:
        """A job comes to be. `slurm`: by a pass that knows of it (else later than it thought)."""
        live = self.live()
        beside = [r for r in live if (r.role, r.slot) == (role, slot)]
        if role == TRAINER:  # one may wait behind the one at work
            beside = [row for row in beside if row.queued]
        who = f"{role} {slot} is submitted"
        must(not beside, f"{who} beside job {beside and beside[0]}")
        if slurm:
            workers = sum(row.role == WORKER for row in live)
            must(role != WORKER or workers < slurm.slots, f"{who}: {workers} of {slurm.slots}")
            queued = sum(row.queued for row in live)
            must(role != WORKER or queued < LIMITS.max_pending, f"{who} behind {queued} queued")
            must((role == TRAINER) == (slurm.mode == "sync"), f"{who} in {slurm.mode} mode")
            others = [r for r in live if (r.role == TRAINER) != (role == TRAINER)]
            must(not others, f"{who} beside the other mode's {others}")
        while str(self.next_id) in self.rows:
            self.next_id += 1
        job_id = str(self.next_id)
        self.next_id += 1
        self.rows[job_id] = Row(job_id, role, slot, "PENDING", self.now)
        self.changed()
        return job_id

    # ---- what goes on

    def reconcile(self) -> Slurm:
        slurm = Slurm(self)
        report = run_pass([self.run], self.now, scheduler=lambda *_: slurm)
        must(not any("a fault of Elastic" in each for each in report.errors), str(report.errors))
        return slurm

    def on_pass(self, how: int) -> str:
        """Cron starts a pass: at once to its end, or only as far as to a certain edge."""
        if how % 4:
            slurm = self.reconcile()
            return f"{slurm.did}"
        actor = self.cast.enter(Actor(f"pass {len(self.cast.actors)}", self.reconcile))
        self.began[actor] = self.now
        self.cast.turn(actor, how // 4 % 8)
        return f"{actor.name} gets to {actor.where!r}"

    def on_turn(self, how: int) -> str:
        actors = [actor for actor in self.cast.actors if actor.alive]
        if not actors:
            return ""
        actor = actors[how % len(actors)]
        self.cast.turn(actor, how // 8 % 8)
        return f"{actor.name} gets to {actor.where!r}"

    def on_kill(self, how: int) -> str:
        actors = [actor for actor in self.cast.actors if actor.alive]
        if not actors:
            return ""
        actor, dying = actors[how % len(actors)], self.dying
        where = actor.where
        self.cast.kill(actor)
        if dying and where == "sbatch" and how // 8 % 2 and dying[0] >= self.now:
            self.arrivals.append(dying)  # its sbatch lives on
        self.dying = None
        return f"{actor.name} at {where!r}"

    def on_time(self, how: int) -> str:
        seconds = (1.0, 5.0, 20.0, 40.0, 70.0, 130.0, 400.0, 700.0)[how % 8]
        self.pass_time(seconds)
        return f"{seconds} s"

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for actor in self.began:  # no command takes longer
            while actor.alive and until - self.began[actor] > PASS_S:
                self.cast.turn(actor, 99)
        for at, role, slot in sorted(self.arrivals):
            if at <= until:
                self.now = max(self.now, at)
                self.add(role, slot, None)
        self.arrivals = [each for each in self.arrivals if each[0] > until]
        self.now = until

    def on_job(self, how: int) -> str:
        """Something happens to a job."""
        live = self.live()
        if not live:
            return ""
        row, what = live[how % len(live)], how // 8 % 16
        return f"{row.role} {row.slot} job {row.job_id} {row.state} -> {self.happens(row, what)}"

    def happens(self, row: Row, what: int) -> str:
        if row.queued and what < 10:
            if any(r.role == TRAINER and r.started and not r.ended for r in self.live()):
                return "waits behind another"  # singleton
            state = "CONFIGURING" if what == 9 else "RUNNING"
            self.record(row, "started")
            self.change(row.job_id, state=state, started=self.now, node=f"n{what % 3}")
            return state
        if what in (10, 11) and row.queued:
            self.change(row.job_id, reason="launch failed requeued held")
            return "held"
        if what in (10, 11):
            state = ("SUSPENDED", "COMPLETING")[what - 10]
            self.change(row.job_id, state=state)
            return state
        if what == 12 and row.started:
            self.change(row.job_id, state="A_STATE_OF_2031")
            return "A_STATE_OF_2031"
        state = ENDED[what % len(ENDED)]
        outcome = (None, "yielded", "failed", "started")[what // 4] if row.started else None
        self.record(row, outcome)
        self.change(row.job_id, state=state)
        return f"{state}, says {outcome}"

    def record(self, row: Row, outcome: str | None) -> None:
        if outcome is None:
            return
        record = {"job_id": row.job_id, "role": row.role, "slot": row.slot, "time": self.now,
                  "steps": 1, "state": "started"}
        if outcome != "started":
            record |= {"state": "ended", "outcome": outcome}
        self.run.records[row.job_id] = record

    def on_fault(self, how: int) -> str:
        self.faults.append(FAULTS[how % len(FAULTS)])
        return self.faults[-1]

    def on_listing(self, how: int) -> str:
        self.listing = ("fresh", "fresh", "stale", "silent", "cut")[how % 5]
        return self.listing

    def on_scale(self, how: int) -> str:
        self.run.wanted = replace(self.run.wanted, max=how % 5)
        return f"{how % 5} slots"

    def on_mode(self, how: int) -> str:
        self.run.wanted = replace(self.run.wanted, mode=("local", "sync")[how % 2])
        return self.run.wanted.mode

    def on_stop(self, how: int) -> str:
        state = ("stopped", "running", "running")[how % 3]
        self.run.wanted, self.run.has_failed = replace(self.run.wanted, state=state), None
        return state

    def on_done(self, how: int) -> str:
        self.run.is_done = {} if how % 4 == 0 else None
        return f"{self.run.is_done}"

    def on_ids(self, how: int) -> str:
        """The controller starts anew: it has forgotten what ended, and may give its ids again."""
        self.rows = {key: row for key, row in self.rows.items() if not row.ended}
        self.past = [(0.0, dict(self.rows))]  # nobody else answers for it
        if how % 2:
            self.next_id = 1
        return "start anew" if how % 2 else "go on"

    def on_twice(self, how: int) -> str:
        """A second pass right after one that met no trouble has nothing to do."""
        if self.faults or self.locked or self.listing != "fresh":
            return ""
        first = self.reconcile()
        second = self.reconcile()
        again = second.did
        if any(verb == CANCEL for verb, *_ in first.did):  # a queued job is gone at once
            again = set(first.did) & set(second.did)
        must(not again, f"after {first.did} the next pass does {second.did}")
        return f"{first.did}"

    # ---- what must hold

    def check(self) -> None:
        at_work = [row for row in self.live(TRAINER) if row.started and row.state != "COMPLETING"]
        must(len(at_work) <= 1, f"{len(at_work)} trainers at work")

    def end_well(self) -> None:
        """Slurm answers, the user wants the run: all that is missing comes, and then no more."""
        for actor in self.cast.actors:
            self.cast.kill(actor)
        self.faults.clear()
        self.listing = "fresh"
        self.run.is_done = self.run.has_failed = None
        self.run.wanted = replace(self.run.wanted, state="running")
        self.log.append("all is quiet")
        did = []
        for number in range(CALM_PASSES):
            self.pass_time(CALM_S if number < 3 else 65.0)
            for row in self.live():
                self.gets_on(row)
            did = self.reconcile().did
            if number > 4 and not did and self.is_whole():
                break
            self.run.has_failed = None
        must(self.is_whole() and not did, f"in the end there are {self.live()}")

    def gets_on(self, row: Row) -> None:
        if row.state == "COMPLETING":
            self.change(row.job_id, state="COMPLETED")
        elif row.queued and not row.reason:
            busy = any(r.role == TRAINER and not r.queued for r in self.live())
            if not busy:
                self.change(row.job_id, state="RUNNING", started=self.now, node="n1")
        elif row.state not in ("RUNNING", "PENDING"):
            self.change(row.job_id, state="RUNNING", started=self.now, node="n1")

    def is_whole(self) -> bool:
        """Every place has its job, a trainer its successor, and nobody else is there."""
        there = sorted((row.role, row.slot, row.state) for row in self.live())
        if self.run.wanted.mode == "sync":
            return there == [(TRAINER, 0, "PENDING"), (TRAINER, 0, "RUNNING")]
        workers = [each for each in there if each[0] == WORKER]
        slots, at_work = self.run.wanted.max, all(state == "RUNNING" for *_, state in there)
        return at_work and len(set(workers)) == len(workers) == slots == len(there) - 1


class Clock:
    """`time`, of the world that is being played."""

    world: Jobs

    def monotonic(self) -> float:
        return self.world.now


CLOCK = Clock()


@contextlib.contextmanager
def lock(run: MemoryRun, wait_s: float):
    """The kernel's: of one pass at a time, and gone with its process."""
    world = run.world
    is_mine = not world.locked
    world.locked = True
    try:
        yield is_mine
    finally:
        if is_mine:
            world.locked = False


@contextlib.contextmanager
def in_memory():
    """The outside of reconcile.py replaced by that of `CLOCK.world`, for the time of the tests."""

    def remembered(run, now):
        return run.notes or history.Memory(born=now)

    names = {"_Pass": Pass, "remembered": remembered, "_lock": lock, "time": CLOCK}
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(reconcile, name, value))
        yield


def play(schedule: bytes) -> Jobs:
    """The world after a schedule. A Violation carries what happened as `log`."""
    CLOCK.world = world = Jobs(schedule)
    try:
        world.play()
    except Violation as violation:
        violation.log = world.log
        raise
    return world
