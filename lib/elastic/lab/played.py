"""A trace of preemptions played to a run: as one job, requeued or resized by itself, and
in local mode. Pure.

One job after the other starts when it fits, and ends when one of its nodes is taken.
Its steps and checkpoints are laid out by arithmetic. A position in its training is
counted in GPU-seconds: a job of another size goes on from it at its own speed.

In local mode first the jobs are played, then the rounds. The trace says when a node goes,
so a job's notice is known when it starts. Rounds follow one another: what a worker does
in one is laid out by arithmetic, and the master decides whenever something has come. All
workers are equally fast, so a round is due when a worker that was there at its opening
has done all steps. See forecast.py for what is played and what is not.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf

from elastic.base import units
from elastic.jobs import cadence, sizing
from elastic.jobs.history import MASTER, TRAINER, WORKER, Job, Memory
from elastic.jobs.plan import AFTER_LEAVE_S, SUBMIT, World, plan
from elastic.local import rounds
from elastic.run.goodput import Allocation, Work, ledger
from elastic.run.records import Commit

CRON_S = 120.0  # between two passes, where no master makes any
LATE_S = 0.01  # that the master looks after a deadline has passed
THE_MASTER = Job("master", MASTER, 0, "RUNNING", started_at=0.0)


@dataclass(frozen=True)
class Change:
    """From `at` on a node has `gpus` GPUs for the run; 0: it is taken."""

    at: float  # seconds from the trace's start
    node: str
    gpus: int


Trace = Sequence[Change]


class Nodes:
    """Which nodes of a trace are there at each time."""

    def __init__(self, trace: Trace):
        self.moments, self.there = [0.0], [{}]  # node -> its GPUs, since then; the oldest first
        for change in trace:
            there = {node: n for node, n in self.there[-1].items() if node != change.node}
            self.moments.append(change.at)
            self.there.append(there | {change.node: change.gpus} if change.gpus else there)

    def at(self, time: float) -> dict[str, int]:
        return self.there[bisect_right(self.moments, time) - 1]

    def next(self, time: float) -> float:
        """The time of the first change after `time`; inf: there is none."""
        return next(iter(self.moments[bisect_right(self.moments, time) :]), inf)

    def gone(self, nodes: set[str], time: float) -> float:
        """When the first of `nodes`, which are there at `time`, is taken; inf: never."""
        since = bisect_right(self.moments, time)
        later = zip(self.moments[since:], self.there[since:], strict=True)
        return next((moment for moment, there in later if not nodes <= there.keys()), inf)

    def spans(self, end: float) -> Iterator[tuple[int, float]]:
        """(GPUs that are there, seconds for which that is so), until `end`."""
        times = pairwise([*self.moments, inf])
        for there, (since, until) in zip(self.there, times, strict=True):
            if since < min(until, end):
                yield sum(there.values()), min(until, end) - since


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


def job_until(until: float, gpus: int, submitted: float, start: float, end: float, key: tuple,
              notice: float) -> Allocation:
    """The allocation of a job that was taken, or is at work, as it is at the time `until`."""
    outcome, told = ("killed", notice) if end < until else ("", notice if notice < until else None)
    return Allocation(gpus, submitted, start, min(end, until), outcome, ((start, key),), told)


class Requeue:
    """A job of whole nodes, which is requeued when one of them goes."""

    def __init__(self, nodes: Nodes, config, costs: Costs, counts: Sequence[int]):
        self.config, self.costs, self.counts = config, costs, counts  # of nodes of a job
        self.nodes, self.per_node = nodes, min(config.slurm.gpus_per_node, config.elastic.max)
        self.stall_s = costs.save_s  # a plain script stands still while it saves
        self.requeue_s = costs.requeue_s
        self.jobs: list[Allocation] = []
        self.work: list[Work] = []
        self._saved = self._furthest = 0.0  # positions

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        submitted = free = 0.0
        while (start := self._start(free)) < until:
            mine = self._fit(start)
            gpus, taken = len(mine) * self.per_node, self.nodes.gone({*mine}, start)
            every_s = self._every_s(gpus)
            notice, stop, end, is_saved = self._leave(start, gpus, min(taken, until))
            key = (0, len(self.jobs))
            self.jobs.append(job_until(until, gpus, submitted, start, end, key, notice))
            self._train(self.jobs[-1], min(stop, until), is_saved, every_s)
            submitted, free = end, end + self.requeue_s
        return ledger(self.jobs, self.work)

    # ---- the nodes

    def _fit(self, time: float) -> list[str]:
        """The nodes that a job has if it starts at `time`."""
        there = [node for node, gpus in self.nodes.at(time).items() if gpus >= self.per_node]
        return there[: sizing.fit(self.counts, len(there))]

    def _start(self, free: float) -> float:
        """When a job starts that may start from `free` on: once it fits, and still fits
        after its time in the queue. inf: never."""
        later = (moment for moment in self.nodes.moments if moment > free)
        starts = (time + self.costs.queue_s for time in (free, *later) if self._fit(time))
        return next(filter(self._fit, starts), inf)

    # ---- the job

    def _step_s(self, gpus: int) -> float:
        return self.costs.step_s * self.config.elastic.max / gpus

    def _leave(self, _start: float, _gpus: int, taken: float) -> tuple[float, float, float, bool]:
        """The times at which a job gets its notice, stops training, and is gone; and
        whether it saves at its end. This one trains until it is killed: a script that
        leaves within the notice has ended, for Slurm, and is not requeued."""
        end = taken + self.costs.notice_s
        return taken, end, end, False

    def _every_s(self, gpus: int) -> float:
        """checkpoint.interval in seconds, as the next job knows it from its start."""
        number, unit = units.interval(self.config.checkpoint.interval)
        if unit:
            return number * (self._step_s(gpus) if unit == "steps" else 1.0)
        return cadence.interval(self.stall_s, self._mtbi_s(), self.costs.save_s)[0]

    def _mtbi_s(self, *now: dict) -> float:
        """The mean time between interruptions, as `cadence` has it from exit records."""
        ends = [{"role": TRAINER, "started": job.start, "time": job.end} for job in self.jobs]
        return cadence.observed_mtbi_s([*ends, *now])

    def _train(self, job: Allocation, stop: float, is_saved: bool, every_s: float) -> None:
        """Lay out what a job trains. At the end of every stretch but the last a checkpoint
        begins. Until the job is as far as an earlier one was, it trains again."""
        attempt, position = job.attempts[0][1], self._saved
        start = marked = job.start + self.costs.startup_s
        while start < stop:
            marked = max(start, marked + every_s)
            end, again_s = min(marked, stop), max(0.0, self._furthest - position) / job.gpus
            turn, position = min(end, start + again_s), position + (end - start) * job.gpus
            self.work += [Work(attempt, start, turn, 0, inf, again=True),
                          Work(attempt, turn, end, 0, inf)]
            self._furthest = max(self._furthest, position)
            if is_saved or (end < stop and end + self.costs.save_s <= job.end):
                self._saved = position
            start = marked + self.stall_s


class Sync(Requeue):
    """The trainer of a run, and its successor, which waits behind it."""

    def __init__(self, nodes: Nodes, config, costs: Costs):
        limits = (config.elastic.min, config.elastic.max)
        counts = sizing.node_counts(limits, config.slurm.gpus_per_node, config.sync.sizes)
        super().__init__(nodes, config, costs, counts)
        self.stall_s, self.requeue_s = costs.stall_s, 0.0

    def _leave(self, start: float, gpus: int, taken: float) -> tuple[float, float, float, bool]:
        """The same for a trainer: it leaves after its step, with a checkpoint if there is
        time for one. A pass may have it leave earlier, for more GPUs."""
        costs, grown = self.costs, self._grown(start, gpus, taken)
        notice, left_s = (grown, inf) if grown < taken else (taken, costs.notice_s)
        trains = notice >= start + costs.startup_s
        stop = notice + trains * self._step_s(gpus) / 2
        is_saved = trains and stop + costs.save_s <= notice + left_s
        end = stop + is_saved * costs.save_s + costs.leave_s
        return notice, stop, min(end, notice + left_s), is_saved

    def _grown(self, start: float, gpus: int, taken: float) -> float:
        """When a pass has the job leave because more GPUs are worth it; inf: never."""
        time = start // CRON_S * CRON_S + CRON_S
        while gpus < self.config.elastic.max and (time := time + CRON_S) < taken:
            horizon_s = self._mtbi_s({"role": TRAINER, "started": start, "time": time})
            more, is_old = self._fit(time), time - start >= self.config.sync.grow_after_s
            if is_old and sizing.pays(gpus, len(more) * self.per_node, self.costs.startup_s,
                                      horizon_s):
                return time
        return inf


# ---- local mode


@dataclass(eq=False)
class Worker:
    """A job with a slot, on a node."""

    key: tuple[int, int]  # (slot, attempt)
    node: str
    submitted: float
    start: float
    free: float  # from when on it can train
    notice: float
    end: float  # about then; see Local._close
    live: float  # until then the master takes it for a live worker


class Local:
    """The run's jobs on the nodes of a trace, and its rounds. A step is a token."""

    def __init__(self, nodes: Nodes, config, costs: Costs):
        self.config, self.costs, self.nodes = config, costs, nodes
        self.gpus = config.slurm.gpus_per_worker
        self.work: list[Work] = []

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        workers = list(self._workers(until))
        self._coming = deque(worker for worker in workers if worker.free < worker.notice)
        self._there: list[Worker] = []
        commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(), deltas=(),
                        total_tokens=self.costs.total_steps or inf)
        opened = self._coming[0].free if self._coming else inf
        while opened < until:
            commit, opened = self._round(commit, opened, until)
        self.jobs = [job_until(until, self.gpus, w.submitted, w.start, w.end, w.key, w.notice)
                     for w in workers if w.start < until]
        return ledger(self.jobs, self.work)

    # ---- jobs

    def _workers(self, until: float) -> Iterator[Worker]:
        """All workers of the run: passes submit jobs, and free nodes are given to jobs
        that wait."""
        costs, nodes = self.costs, self.nodes
        now, next_pass, count, alive, queued = 0.0, 0.0, 0, [], []
        while now < until:
            alive = [worker for worker in alive if worker.end + AFTER_LEAVE_S > now]
            if next_pass <= now:
                queued += [(slot, now) for slot in self._missing(queued, alive, now)]
                next_pass = now + self.config.elastic.reconcile_interval_s
            used = Counter(worker.node for worker in alive)
            places = (node for node, gpus in nodes.at(now).items()
                      for _ in range(gpus // self.gpus - used[node])
                      if nodes.gone({node}, now) > now + costs.queue_s)
            for (slot, submitted), node in zip([*queued], places, strict=False):
                start, notice = now + costs.queue_s, nodes.gone({node}, now)
                free, leaves_s = start + costs.startup_s, costs.leave_s
                leaves_s += (notice > free) * (costs.step_s / 2 + costs.deliver_alone_s)
                worker = Worker((slot, count), node, submitted, start, free, notice,
                                notice + min(leaves_s, costs.notice_s),
                                notice + costs.notice_s + self.config.health.lease_s)
                yield worker
                alive.append(worker)
                queued.pop(0)
                count += 1
            leaves = (w.end + AFTER_LEAVE_S for w in alive if w.end < w.notice + costs.notice_s)
            next_pass = min([next_pass, *leaves])
            now = min(next_pass, nodes.next(now), until)

    def _missing(self, queued: Sequence, alive: Sequence[Worker], now: float) -> list[int]:
        """Slots that a pass submits jobs for."""
        jobs = [Job("", WORKER, slot, "PENDING") for slot, _ in queued]
        jobs += [Job("", WORKER, worker.key[0], "RUNNING") for worker in alive]
        world = World(self.config.elastic.max // self.gpus, Memory(0.0, (THE_MASTER, *jobs)),
                      self.config.elastic.max_pending)
        return [action.slot for action in plan(world, now)
                if (action.verb, action.role) == (SUBMIT, WORKER)]

    # ---- rounds

    def _round(self, commit: Commit, opened: float, until: float) -> tuple[Commit, float]:
        """The version that a round makes of `commit`, and when the next round is opened."""
        sgd, costs = self.config.local_sgd, self.costs
        steps = rounds.inner_steps(commit, sgd)
        due_s = rounds.due_s([costs.step_s + (costs.pull_s + costs.deliver_s) / steps], steps, sgd)
        deadline = opened + rounds.deadline_s(due_s, sgd) + LATE_S
        now, called = opened, inf
        self._there = [worker for worker in self._there if worker.live > opened]
        while now < until:
            while self._coming and self._coming[0].free <= now:
                self._there.append(self._coming.popleft())
            turns = {worker: self._turn(worker, steps, opened, opened + due_s, called)
                     for worker in self._there if worker.notice > opened}
            deltas = [at for work, at in turns.values() if work.tokens and at < inf]
            answers = {worker.key[0]: at for worker, (_, at) in turns.items()}
            view = rounds.View(
                opened, None if called == inf else called,
                {worker.key[0]: worker.start for worker in self._there if worker.live > now},
                frozenset(slot for slot, at in answers.items() if at <= now),
                sum(at <= now for at in deltas), 0, due_s,
            )
            move, _ = rounds.decide(view, sgd, now)
            coming = self._coming[0].free if self._coming else until
            if move is rounds.Move.CLOSE:
                return self._close(commit, now, turns)
            if move is rounds.Move.CALL:
                called = now
            elif deadline <= now and not deltas:  # no delta: the round begins anew
                return commit, now if any(w.notice > now for w in self._there) else coming
            else:
                moments = (deadline, called + sgd.last_call_s + LATE_S, coming, until,
                           *answers.values(), *(worker.live for worker in self._there))
                now = min(time for time in moments if time > now)
        return commit, until

    def _turn(
        self, worker: Worker, steps: int, opened: float, due: float, called: float
    ) -> tuple[Work, float]:
        """What a worker does of a round's steps, and when it has answered; inf: its delta
        is lost."""
        costs, began = self.costs, max(worker.free, opened)
        steps = min(steps, round((due - costs.deliver_s - began) / costs.step_s))
        told = (min(worker.notice, called) - began) / costs.step_s
        steps = max(0, ceil(min(steps, told) - 1e-6))  # it finishes the step it is at
        stop = began + steps * costs.step_s
        deliver_s = costs.deliver_alone_s if worker.notice <= stop else costs.deliver_s
        answered = stop + deliver_s * (steps > 0)
        is_lost = answered > worker.notice + costs.notice_s
        return Work(worker.key, began, stop, steps, inf), inf if is_lost else answered

    def _close(self, commit: Commit, now: float, turns: dict) -> tuple[Commit, float]:
        """Make the next version of all deltas that have come. Returns it, and when it is
        there."""
        costs, opened, tokens = self.costs, now + self.costs.average_s, commit.tokens
        for worker, (work, at) in turns.items():
            if at < inf:
                self.work += [work] * bool(work.tokens)
                tokens += work.tokens
                worker.free = max(at, opened) + costs.pull_s
                if worker.notice < worker.free:
                    leaves_s = max(0.0, at - worker.notice) + costs.leave_s
                    worker.end = worker.live = worker.notice + min(leaves_s, costs.notice_s)
        return replace(commit, version=commit.version + 1, tokens=tokens), opened
