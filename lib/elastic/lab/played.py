"""A trace of preemptions played to a run that is one job: requeued, or resized by itself.
Pure.

One job after the other: it starts when it fits, and ends when one of its nodes is taken.
Its steps and checkpoints are laid out by arithmetic. A position in its training is
counted in GPU-seconds: a job of another size goes on from it at its own speed. See
forecast.py for what is played.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from elastic.base import units
from elastic.jobs import cadence, sizing
from elastic.jobs.history import TRAINER
from elastic.run.goodput import Allocation, Work, ledger

CRON_S = 120.0  # between two passes, where no master makes any


@dataclass(frozen=True)
class Change:
    """From then on a node has so many GPUs for the run; 0: it is taken."""

    at: float  # seconds from the trace's start
    node: str
    gpus: int


Trace = Sequence[Change]


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds: section [plan], estimate.cost, or what a run has
    shown."""

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


@dataclass(frozen=True)
class Leave:
    """How a job goes: told at `notice`, it trains until `stop`, and is gone at `end`."""

    notice: float
    stop: float
    end: float
    is_saved: bool  # it made a checkpoint after its last step


class Requeue:
    """A job of whole nodes, which is requeued when one of them goes."""

    def __init__(self, trace: Trace, config, costs: Costs, counts: Sequence[int]):
        self.config, self.costs, self.counts = config, costs, counts  # of nodes of a job
        self.per_node = config.slurm.gpus_per_node
        self.stall_s = costs.save_s  # a plain script stands still while it saves
        self.jobs: list[Allocation] = []
        self.work: list[Work] = []
        self._saved = self._furthest = 0.0  # positions
        self._moments, self._nodes = [0.0], [[]]  # there from then on, the oldest first
        for change in trace:
            there = [node for node in self._nodes[-1] if node != change.node]
            self._moments.append(change.at)
            self._nodes.append(there + [change.node] * (change.gpus >= self.per_node))

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        submitted = free = 0.0
        while (start := self._start(free)) < until:
            gpus, taken = self._fit(start) * self.per_node, self._taken(start)
            every_s = self._every_s(gpus)
            leave, outcome = self._leave(start, gpus, taken, until), "killed"
            if leave.end >= until:
                leave, outcome = Leave(leave.notice, min(leave.stop, until), until, True), ""
            notice = leave.notice if leave.notice < until else None
            attempts = ((start, (0, len(self.jobs) + 1)),)
            job = Allocation(gpus, submitted, start, leave.end, outcome, attempts, notice)
            self.jobs.append(job)
            self._train(job, leave, every_s)
            submitted, free = self._follow(start, leave.end)
        return ledger(self.jobs, self.work)

    # ---- the nodes

    def _fit(self, time: float) -> int:
        """Nodes that a job has if it starts then."""
        nodes = self._nodes[bisect_right(self._moments, time) - 1]
        return sizing.fit(self.counts, len(nodes))

    def _start(self, free: float) -> float:
        """When a job starts that may since then: once it fits, and fits still after the
        queue."""
        later = self._moments[bisect_right(self._moments, free) :]
        starts = (time + self.costs.queue_s for time in (free, *later) if self._fit(time))
        return next(filter(self._fit, starts), inf)

    def _taken(self, start: float) -> float:
        """When a node is taken from the job that started then."""
        index = bisect_right(self._moments, start)
        mine = {*self._nodes[index - 1][: self._fit(start)]}
        later = zip(self._moments[index:], self._nodes[index:], strict=True)
        return next((time for time, nodes in later if not mine <= {*nodes}), inf)

    # ---- the job

    def _step_s(self, gpus: int) -> float:
        return self.costs.step_s * self.config.elastic.max / gpus

    def _leave(self, _start: float, _gpus: int, taken: float, _until: float) -> Leave:
        """Trains on until it is killed: a script that leaves within the notice has ended,
        for Slurm, and is not requeued."""
        end = taken + self.costs.notice_s
        return Leave(taken, end, end, False)

    def _follow(self, _start: float, end: float) -> tuple[float, float]:
        """Since when the next job is in the queue, and since when it may start."""
        return end, end + self.costs.requeue_s

    def _every_s(self, gpus: int) -> float:
        """checkpoint.interval in seconds, as the next job knows it from its start."""
        number, unit = units.interval(self.config.checkpoint.interval)
        if unit:
            return number * (self._step_s(gpus) if unit == "steps" else 1.0)
        mtbi_s = cadence.observed_mtbi_s(self._endings())
        return cadence.interval(self.stall_s, mtbi_s, self.costs.save_s)[0]

    def _endings(self) -> list[dict]:
        """Exit records as `cadence` wants them; nobody ended by himself."""
        return [{"role": TRAINER, "started": job.start, "time": job.end} for job in self.jobs]

    def _train(self, job: Allocation, leave: Leave, every_s: float) -> None:
        """At the end of every stretch but the last a checkpoint begins; until the job is
        as far as one was before, it trains again."""
        attempt, position = job.attempts[0][1], self._saved
        start = marked = job.start + self.costs.startup_s
        while start < leave.stop:
            marked = max(start, marked + every_s)
            end, again_s = min(marked, leave.stop), max(0.0, self._furthest - position) / job.gpus
            turn, position = min(end, start + again_s), position + (end - start) * job.gpus
            self.work += [Work(attempt, start, turn, 0, inf, again=True),
                          Work(attempt, turn, end, 0, inf)]  # fmt: skip
            self._furthest = max(self._furthest, position)
            is_complete = end < leave.stop and end + self.costs.save_s <= leave.end
            if is_complete or leave.is_saved:
                self._saved = position
            start = marked + self.stall_s


class Sync(Requeue):
    """The trainer of a run, and its successor, which waits behind it since the next
    pass."""

    def __init__(self, trace: Trace, config, costs: Costs):
        limits = (config.elastic.min, config.elastic.max)
        counts = sizing.node_counts(limits, config.slurm.gpus_per_node, config.sync.sizes)
        super().__init__(trace, config, costs, counts)
        self.stall_s = costs.stall_s

    def _leave(self, start: float, gpus: int, taken: float, until: float) -> Leave:
        """After the step, with a checkpoint, if there is time to make one."""
        costs, grown = self.costs, self._grown(start, gpus, min(taken, until))
        notice, left_s = (grown, inf) if grown < taken else (taken, costs.notice_s)
        trains = notice >= start + costs.startup_s
        stop = notice + trains * self._step_s(gpus) / 2
        is_saved = trains and stop + costs.save_s <= notice + left_s
        end = stop + is_saved * costs.save_s + costs.leave_s
        return Leave(notice, stop, min(end, notice + left_s), is_saved)

    def _grown(self, start: float, gpus: int, taken: float) -> float:
        """When a pass has the job leave because more GPUs are worth it; inf: it does
        not."""
        passes = itertools.takewhile(lambda time: time < taken, self._passes(start + CRON_S))
        for time in passes if gpus < self.config.elastic.max else ():
            now = {"role": TRAINER, "started": start, "time": time}
            horizon_s = cadence.observed_mtbi_s([*self._endings(), now])
            growth = sizing.Growth(
                gpus, self._fit(time) * self.per_node, {}, self.costs.startup_s, horizon_s,
                self.config.sync.grow_after_s,
            )  # fmt: skip
            if growth.pays(time - start)[0]:
                return time
        return inf

    def _passes(self, since: float) -> Iterator[float]:
        return (number * CRON_S for number in itertools.count(since // CRON_S + 1))

    def _follow(self, start: float, end: float) -> tuple[float, float]:
        return min(end, next(self._passes(start))), end
