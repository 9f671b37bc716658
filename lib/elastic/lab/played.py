"""A trace of preemptions played to a run that is one job: requeued, or resized by itself. Pure.

Between two alarms of a play nothing is decided, so a trainer's steps and checkpoints are laid out
by arithmetic when it ends. What a position in its training is counts in GPU-seconds: a job of
another size goes on from it at its own speed. See forecast.py for what is played and what is not.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from elastic.base import units
from elastic.jobs import cadence, sizing
from elastic.jobs.history import TRAINER, JobSeen, Memory
from elastic.jobs.plan import CANCEL, SUBMIT, Action, Limits, World, plan
from elastic.run.goodput import Allocation, Work, ledger

CRON_S = 120.0  # between two passes, where no master makes any


@dataclass(frozen=True)
class Change:
    """From then on a node has so many GPUs for the run; 0: it is taken."""

    at: float  # seconds from the trace's start
    node: str
    gpus: int


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds: section [plan], estimate.cost, or what a run has shown."""

    step_s: float  # an inner step of one worker
    startup_s: float = 60.0
    queue_s: float = 2.0
    requeue_s: float = 121.0
    notice_s: float = 30.0
    leave_s: float = 2.0
    save_s: float = 0.0  # a checkpoint, until it is committed
    stall_s: float = 0.0  # … the part of it in which nothing is trained
    deliver_s: float = 0.0  # by all workers at once
    deliver_alone_s: float = 0.0  # at a notice
    average_s: float = 0.0  # from the close of a round to the next version
    pull_s: float = 0.0
    total_steps: float = 0.0  # of all workers, in the whole run; 0: not known


@dataclass(eq=False)
class Job:
    """A job of the run; it waits in the queue until it has a start."""

    slot: int
    submitted: float
    attempt: int = 0
    gpus: int = 0
    start: float | None = None
    notice: float | None = None
    cancelled: float | None = None

    def seen(self, role: str) -> JobSeen:
        """The job as a pass sees it."""
        is_queued = self.start is None
        return JobSeen(f"{self.slot}.{self.attempt}", role, self.slot,
                       "PENDING" if is_queued else "RUNNING", submitted_at=self.submitted,
                       started_at=None if is_queued else self.start or 1e-9,  # to a plan 0 is none
                       cancelled_at=self.cancelled)  # fmt: skip

    def until(self, now: float, outcome: str) -> Allocation:
        """What the job had."""
        attempts = ((self.start, (self.slot, self.attempt)),)
        return Allocation(self.gpus, self.submitted, self.start, now, outcome, attempts,
                          self.notice)  # fmt: skip


class Play:
    """The nodes of a trace, the run's jobs on them, and what came of both.

    A way to train has `taken(node)`: it has to be left; `settle()`: all that happens at this moment
    has happened; `close()`: account for the jobs at work at the end.
    """

    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        self.config, self.costs, self.now = config, costs, 0.0
        self.there: dict[str, int] = {}  # node -> its GPUs
        self.had: list[Allocation] = []
        self.work: list[Work] = []
        self._numbers = itertools.count()
        self.alarms: dict[Hashable, tuple] = {}  # by what they are for
        self._planned: list[tuple] = []  # a heap of these, and of some that are off
        for change in trace:
            self.at(change.at, change, self._change, change)

    def at(self, time: float, what: Hashable, do: Callable, *args) -> None:
        """Set the alarm for `what`, in place of the one before. Alarms of one moment go off in the
        order in which they were set."""
        self.alarms[what] = alarm = (max(time, self.now), next(self._numbers), what, do, args)
        heapq.heappush(self._planned, alarm)

    def each(self, every_s: float, do: Callable) -> None:
        """Do it now and again."""
        do()
        self.at(self.now + every_s, do, self.each, every_s, do)

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        self.at(until, "end", nothing)
        while self._planned[0][0] < until:
            alarm = heapq.heappop(self._planned)
            self.now, _, what, do, args = alarm
            if self.alarms.get(what) is alarm:
                del self.alarms[what]
                do(*args)
            if self._planned[0][0] > self.now:
                self.settle()
        self.now = until
        self.close()
        return ledger(self.had, self.work)

    def _change(self, change: Change) -> None:
        if change.gpus:
            self.there[change.node] = change.gpus
        elif self.there.pop(change.node, 0):
            self.taken(change.node)

    def actions(self, jobs: Iterable[JobSeen], **world) -> list[Action]:
        """What a pass that sees these jobs would do."""
        limits = Limits(self.config.elastic.max_pending)
        memory = Memory(born=0.0, jobs=tuple(jobs))
        return plan(World(memory=memory, limits=limits, **world), self.now)


def nothing() -> None:
    """An alarm after which things are looked at."""


# ---- a job that goes as a whole


class Requeue(Play):
    """A job of whole nodes, which is requeued when one of them goes."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs, counts: Sequence[int]):
        super().__init__(trace, config, costs)
        self.counts, self.per_node = counts, config.slurm.gpus_per_node  # nodes a job may have
        self.job: Job | None = None
        self.nodes: list[str] = []  # the job's
        self.queued: Job | None = None
        self.saved = self.furthest = 0.0
        self.stall_s = costs.save_s  # a plain script stands still while it saves
        self.submit(0.0)

    def submit(self, since: float) -> None:
        self.queued = Job(0, since)

    def spare(self) -> list[str]:
        """Nodes that the run does not use, those first that are longest there."""
        return [node for node, gpus in self.there.items()
                if gpus >= self.per_node and node not in self.nodes]  # fmt: skip

    def settle(self) -> None:
        if self.queued and not self.job and "start" not in self.alarms and self._fit():
            self.at(self.now + self.costs.queue_s, "start", self._start)

    def _fit(self) -> int:
        """Nodes that a job has if it starts now."""
        return sizing.fit(self.counts, len(self.nodes) + len(self.spare()))

    def _start(self) -> None:
        if count := self._fit():
            self.job, self.queued, self.nodes = self.queued, None, self.spare()[:count]
            job = self.job
            job.attempt, job.start, job.gpus = len(self.had) + 1, self.now, count * self.per_node

    def taken(self, node: str) -> None:
        if node in self.nodes and self.job.notice is None:
            self.job.notice = self.now
            self.leave()

    def leave(self) -> None:
        """Trains on until it is killed: a script that leaves within the notice has ended, for
        Slurm, and is not requeued."""
        end = self.now + self.costs.notice_s
        self.at(end, "end of the job", self.end, "killed", end, False)

    def end(self, outcome: str, stop: float, is_saved: bool) -> None:
        """The job is over, after training until `stop`."""
        self._account(outcome, stop, is_saved)
        self.job, self.nodes = None, []
        self.follow()

    def follow(self) -> None:
        """What comes next is in the queue."""
        self.at(self.now + self.costs.requeue_s, "requeue", self.submit, self.now)

    def close(self) -> None:
        if self.job:
            self._account("", self.now, True)

    def _account(self, outcome: str, stop: float, is_saved: bool) -> None:
        """Lay out its training: at the end of every stretch but the last a checkpoint begins, and
        until it is as far as one was before, it trains again."""
        job, every_s, position = self.job, self._every_s(), self.saved
        self.had.append(job.until(self.now, outcome))
        start = marked = job.start + self.costs.startup_s
        while start < stop:
            marked = max(start, marked + every_s)
            end, again_s = min(marked, stop), max(0.0, self.furthest - position) / job.gpus
            turn, position = min(end, start + again_s), position + (end - start) * job.gpus
            self.work += [Work((0, job.attempt), start, turn, 0, inf, True),
                          Work((0, job.attempt), turn, end, 0, inf)]  # fmt: skip
            self.furthest = max(self.furthest, position)
            if (end < stop and end + self.costs.save_s <= self.now) or is_saved:
                self.saved = position
            start = marked + self.stall_s

    def _every_s(self) -> float:
        """checkpoint.interval in seconds, as the job has known it since its start."""
        number, unit = units.interval(self.config.checkpoint.interval)
        if unit:
            return number * (self.step_s if unit == "steps" else 1.0)
        return best_every_s(self.costs, self.stall_s, cadence.observed_mtbi_s(self.endings()))

    def endings(self) -> list[dict]:
        """Exit records as `cadence` wants them; nobody ended by himself."""
        return [{"role": TRAINER, "started": job.start, "time": job.end} for job in self.had]

    @property
    def step_s(self) -> float:
        """Of the job there is."""
        return self.costs.step_s * self.config.elastic.max / self.job.gpus


def best_every_s(costs: Costs, stall_s: float, mtbi_s: float) -> float:
    """Between checkpoints: as a trainer chooses it."""
    return cadence.interval(stall_s, mtbi_s, costs.save_s)[0]


class Sync(Requeue):
    """The trainer of a run, and its successor."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        limits = (config.elastic.min, config.elastic.max)
        counts = sizing.node_counts(limits, config.slurm.gpus_per_node, config.sync.sizes)
        super().__init__(trace, config, costs, counts)
        self.queued, self.stall_s = None, costs.stall_s
        self.at(0.0, "first pass", self.each, CRON_S, self.follow)

    def leave(self) -> None:
        """After the step, with a checkpoint, if there is time to make one."""
        costs, trains = self.costs, self.now >= self.job.start + self.costs.startup_s
        stop = self.now + self.step_s / 2 if trains else self.now
        left_s = costs.notice_s if self.job.cancelled is None else inf
        is_saved = trains and stop + costs.save_s <= self.now + left_s
        end = stop + is_saved * costs.save_s + costs.leave_s
        self.at(min(end, self.now + left_s), "end of the job", self.end, "yielded", stop, is_saved)

    def follow(self) -> None:
        """A pass: it submits a successor, and has the job leave where more GPUs are worth it."""
        jobs = [job.seen(TRAINER) for job in (self.job, self.queued) if job]
        for action in self.actions(jobs, slots=0, mode="sync", growth=self._growth()):
            if action.verb == SUBMIT:
                self.submit(self.now)
            elif action.verb == CANCEL:
                self.job.notice = self.job.cancelled = self.now
                self.leave()

    def _growth(self) -> sizing.Growth | None:
        job = self.job
        if job is None or job.notice is not None or job.gpus >= self.config.elastic.max:
            return None
        now = {"role": TRAINER, "started": job.start, "time": self.now}
        horizon_s = cadence.observed_mtbi_s([*self.endings(), now])
        return sizing.Growth(job.gpus, self._fit() * self.per_node, {}, self.costs.startup_s,
                             horizon_s, self.config.sync.grow_after_s)  # fmt: skip
