"""A trace of preemptions played to a run that is one job: requeued, or resized by itself. Pure.

Events happen in the order of their time. Between two events of a trainer nothing is decided, so its
steps and checkpoints are laid out by arithmetic when it ends, with the cadence of its start. What a
position in its training is counts in GPU-seconds: a job of another size goes on from it at its own
speed. See forecast.py for what is played and what is not.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from elastic import cadence, sizing
from elastic.goodput import Allocation, Work, ledger
from elastic.history import TRAINER, JobSeen, Memory
from elastic.plan import CANCEL, SUBMIT, Limits, World, plan

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
        self._planned: list[tuple] = [(inf, next(self._numbers), nothing, ())]
        for change in trace:
            self.at(change.at, self.change, change)

    def at(self, time: float, do: Callable, *args) -> None:
        """Plan an event; those of one moment happen in the order in which they were planned."""
        heapq.heappush(self._planned, (max(time, self.now), next(self._numbers), do, args))

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        while self._planned[0][0] < until:
            self.now, _, do, args = heapq.heappop(self._planned)
            do(*args)
            if self._planned[0][0] > self.now:
                self.settle()
        self.now = until
        self.close()
        return ledger(self.had, self.work)

    def change(self, change: Change) -> None:
        if change.gpus:
            self.there[change.node] = change.gpus
        elif self.there.pop(change.node, 0):
            self.taken(change.node)

    def each(self, every_s: float, do: Callable) -> None:
        """Do it now and again."""
        do()
        self.at(self.now + every_s, self.each, every_s, do)


def nothing() -> None:
    """An event after which things are looked at."""


# ---- a job that goes as a whole


@dataclass
class Gang:
    """A job of whole nodes, which goes when one of them goes."""

    nodes: list[str]
    gpus: int
    submitted: float
    start: float
    attempt: int
    every_s: float  # between checkpoints
    notice: float | None = None
    cancelled: float | None = None


class Requeue(Play):
    """A job of `nodes` nodes, requeued. A position in its training is in GPU-seconds."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs, counts: Sequence[int]):
        super().__init__(trace, config, costs)
        self.counts = counts  # of nodes, that the job may have
        self.job: Gang | None = None
        self.queued: float | None = 0.0  # since when one waits
        self.attempts = 0
        self.saved = self.furthest = 0.0
        self._may_start, self._is_starting = 0.0, False

    @property
    def per_node(self) -> int:
        return self.config.slurm.gpus_per_node

    @property
    def stall_s(self) -> float:
        """A plain script stands still while it saves."""
        return self.costs.save_s

    def spare(self) -> list[str]:
        """Nodes that the run does not use, those first that are longest there."""
        mine = self.job.nodes if self.job else ()
        return [n for n, gpus in self.there.items() if gpus >= self.per_node and n not in mine]

    def settle(self) -> None:
        is_free = self.job is None and self.queued is not None and self.now >= self._may_start
        if is_free and not self._is_starting and sizing.fit(self.counts, len(self.spare())):
            self._is_starting = True
            self.at(self.now + self.costs.queue_s, self._start)

    def _start(self) -> None:
        self._is_starting = False
        if count := sizing.fit(self.counts, len(self.spare())):
            nodes, self.attempts = self.spare()[:count], self.attempts + 1
            self.job = Gang(nodes, count * self.per_node, self.queued, self.now, self.attempts,
                            self._every_s(count * self.per_node))  # fmt: skip
            self.queued = None

    def _every_s(self, gpus: int) -> float:
        """checkpoint.interval in seconds, for a job of that size."""
        number, unit = cadence.parse(self.config.checkpoint.interval)
        if unit:
            return number * (self._step_s(gpus) if unit == "steps" else 1.0)
        return best_every_s(self.costs, self.stall_s, cadence.observed_mtbi_s(self._endings()))

    def _endings(self) -> list[dict]:
        """Exit records as `cadence` wants them; nobody ended by himself."""
        return [{"role": TRAINER, "started": job.start, "time": job.end} for job in self.had]

    def _step_s(self, gpus: int) -> float:
        return self.costs.step_s * self.config.elastic.max / gpus

    def taken(self, node: str) -> None:
        if self.job and node in self.job.nodes and self.job.notice is None:
            self.job.notice = self.now
            self.leave()

    def leave(self) -> None:
        """Trains on until it is killed: a script that leaves within the notice has ended, for
        Slurm, and is not requeued."""
        end = self.now + self.costs.notice_s
        self.at(end, self.end, "killed", end, False)

    def end(self, outcome: str, stop: float, is_saved: bool) -> None:
        """The job is over, after training until `stop`; what comes next is in the queue."""
        self._account(outcome, stop, is_saved)
        self.job, self.queued = None, self.now
        self._may_start = self.now + self.costs.requeue_s
        self.at(self._may_start, nothing)

    def close(self) -> None:
        if self.job:
            self._account("", self.now, True)

    def _account(self, outcome: str, stop: float, is_saved: bool) -> None:
        job = self.job
        who = (0, job.attempt)
        self.had.append(Allocation(job.gpus, job.submitted, job.start, self.now, outcome,
                                   ((job.start, who),), job.notice))  # fmt: skip
        position, begun = self.saved, job.start + self.costs.startup_s
        for start, end in _stretches(begun, stop, job.every_s, self.stall_s):
            new = position + (end - start) * job.gpus
            self.work += _trained(who, start, end, position, new, self.furthest)
            self.furthest, position = max(self.furthest, new), new
            if (end < stop and end + self.costs.save_s <= self.now) or is_saved:
                self.saved = position


def best_every_s(costs: Costs, stall_s: float, mtbi_s: float) -> float:
    """Between checkpoints: as a trainer chooses it, but the one before has to be done."""
    return max(cadence.interval(stall_s, mtbi_s)[0], costs.save_s)


def _stretches(start: float, stop: float, every_s: float, stall_s: float) -> Iterator[tuple]:
    """(start, end) of training; at every end but the last a checkpoint begins."""
    marked = start
    while start < stop:
        marked = max(start, marked + every_s)
        yield start, min(marked, stop)
        start = marked + stall_s


def _trained(who: tuple, start: float, end: float, position: float, new: float, furthest: float):
    """The work of a stretch; up to `furthest` it is done again."""
    again = min(max((furthest - position) / (new - position), 0.0), 1.0) if new > position else 0.0
    turn = start + again * (end - start)
    if turn > start:
        yield Work(who, start, turn, 0, inf, True)
    if turn < end:
        yield Work(who, turn, end, round(new - max(position, furthest)), inf)


class Sync(Requeue):
    """The trainer of a run, and its successor."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        limits = (config.elastic.min, config.elastic.max)
        counts = sizing.node_counts(limits, config.slurm.gpus_per_node, config.sync.sizes)
        super().__init__(trace, config, costs, counts)
        self.queued = None
        self.at(0.0, self.each, CRON_S, self._pass)

    @property
    def stall_s(self) -> float:
        return self.costs.stall_s

    def leave(self) -> None:
        """After the step, with a checkpoint, if there is time to make one."""
        costs, begun = self.costs, self.job.start + self.costs.startup_s
        trains = self.now >= begun
        stop = self.now + self._step_s(self.job.gpus) / 2 if trains else self.now
        left_s = costs.notice_s if self.job.cancelled is None else inf
        is_saved = trains and stop + costs.save_s <= self.now + left_s
        end = stop + is_saved * costs.save_s + costs.leave_s
        self.at(min(end, self.now + left_s), self.end, "yielded", stop, is_saved)

    def end(self, outcome: str, stop: float, is_saved: bool) -> None:
        queued = self.queued
        super().end(outcome, stop, is_saved)
        self.queued, self._may_start = queued, self.now
        self._pass()

    def _pass(self) -> None:
        limits = Limits(self.config.elastic.max_pending)
        memory = Memory(born=0.0, jobs=tuple(self._seen()))
        for action in plan(World(0, memory, limits, "sync", self._growth()), self.now):
            if action.verb == SUBMIT:
                self.queued = self.now
            elif action.verb == CANCEL and self.job.notice is None:
                self.job.notice = self.job.cancelled = self.now
                self.leave()

    def _seen(self) -> Iterator[JobSeen]:
        if job := self.job:
            start = job.start or 1e-9  # 0 is none
            yield JobSeen(str(job.attempt), TRAINER, 0, "RUNNING", submitted_at=job.submitted,
                          started_at=start, cancelled_at=job.cancelled)  # fmt: skip
        if self.queued is not None:
            yield JobSeen("queued", TRAINER, 0, "PENDING", submitted_at=self.queued)

    def _growth(self) -> sizing.Growth | None:
        job, most = self.job, self.config.elastic.max
        if job is None or job.notice is not None or job.gpus >= most:
            return None
        now = {"role": TRAINER, "started": job.start, "time": self.now}
        horizon_s = cadence.observed_mtbi_s([*self._endings(), now])
        nodes = sizing.fit(self.counts, len(job.nodes) + len(self.spare()))
        return sizing.Growth(job.gpus, nodes * self.per_node, {}, self.costs.startup_s, horizon_s,
                             self.config.sync.grow_after_s)  # fmt: skip
