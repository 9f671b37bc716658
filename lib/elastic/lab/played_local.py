"""A trace of preemptions played to a run in local mode: its workers, its master, its
passes. Pure.

The play goes from one moment to the next: a node comes or goes, a worker is done with
what it does, a pass is made, a round is over. See forecast.py for what is played and what
is not.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, inf

from elastic.jobs.history import MASTER, WORKER, JobSeen, Memory
from elastic.jobs.plan import SUBMIT, Limits, World, plan
from elastic.lab.played import Change, Costs
from elastic.local import rounds
from elastic.run.goodput import Allocation, Work, ledger
from elastic.run.records import Commit

AFTER_LEAVE_S = 2.0  # from a worker's leave to the pass that replaces it, as the master has it
LATE_S = 0.01  # that the master looks after a deadline has passed
OVER = -inf  # nothing of a worker is left
THE_MASTER = JobSeen("master", MASTER, 0, "RUNNING", started_at=0.0)

State = Enum("State", "QUEUED LOADING TRAINING DELIVERING WAITING READING KILLED")


@dataclass(eq=False)
class Worker:
    """A job with a slot, and its round as rounds.py reads it in a header."""

    slot: int
    submitted: float
    node: str = ""  # that it is on, or about to start on
    state: State = State.QUEUED
    life: Iterator[float] = iter(())  # see Local._life
    until: float = inf  # then it goes on with it
    attempt: int = 0
    started: float | None = None
    notice: float | None = None
    killed: float = inf  # at the end of its notice
    base: int = -1  # version that it trains on
    began: float = 0.0
    steps: int = 0
    stopped: float | None = None  # the end of its last step
    seconds: float = 0.0  # from the start of its round to the delivery
    stall_s: float = 0.0  # between its last step and its round
    answered: int = -1  # version of which the master has heard from it


class Master:
    """The rounds: what rounds.py makes of the workers that there are."""

    def __init__(self, settings, total_steps: float):
        self.settings = settings
        self.commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(), deltas=(),
                             total_tokens=total_steps or inf)  # fmt: skip
        self.opened = self.due_s = inf  # the first worker opens the first round
        self.called: float | None = None
        self.merged = inf  # when there is the next version
        self._paces_s: dict[int, float] = {}  # by slot
        self._accepted: list[Worker] = []  # copies, as they were when they delivered
        self._merging: list[Worker] = []

    @property
    def version(self) -> int:
        return self.commit.version

    @property
    def inner_steps(self) -> int:
        """K of the round."""
        return rounds.inner_steps(self.commit, self.settings)

    def accept(self, worker: Worker, now: float) -> None:
        """Its delta has come, and been checked."""
        behind, worker.answered = self.version - worker.base, worker.base
        if worker.steps and behind <= self.settings.max_staleness:
            worker.seconds = now - worker.began
            self._accepted.append(copy(worker))
            since = worker.began if behind or self._merging else self.opened
            self._paces_s[worker.slot] = rounds.pace_s(worker, now - since, self.inner_steps)

    def deadline(self) -> float:
        return self.opened + rounds.deadline_s(self.due_s, self.settings)

    def due(self, now: float) -> float:
        """When the round is due; as the master says it."""
        is_lost = now > self.deadline() and not (self._accepted or self._merging)
        return inf if is_lost else self.opened + self.due_s

    def moments(self, now: float) -> list[float]:
        """When it has to look."""
        over = inf if self.called is None else self.called + self.settings.last_call_s
        late = (time + LATE_S for time in (self.deadline(), over))
        return [self.merged, *(time for time in late if time > now)]

    def look(self, workers: Sequence[Worker], now: float, average_s: float) -> None:
        """Wait, call, or close the round."""
        newest = {worker.slot: worker for worker in workers if worker.attempt}
        paces_s = [pace_s for slot, pace_s in self._paces_s.items() if slot in newest]
        self.due_s = min(self.due_s, rounds.due_s(paces_s, self.inner_steps, self.settings))
        there = [worker for worker in newest.values() if worker.state is not State.LOADING]
        answered = frozenset(w.slot for w in there if w.answered == self.version)
        view = rounds.View(self.opened, self.called, {w.slot: w.started for w in there}, answered,
                           len(self._accepted), 0, self.due_s)  # fmt: skip
        move, _ = rounds.decide(view, self.settings, now)
        if move is rounds.Move.CALL:
            self.called = now
        elif move is rounds.Move.CLOSE:
            late = rounds.superseded(self._accepted)
            self._merging = [delta for delta in self._accepted if delta not in late]
            self._accepted, self.merged = [], now + average_s

    def publish(self, now: float) -> list[Work]:
        """There is a new version, of this work."""
        deltas = self._merging
        steps = self.commit.tokens + sum(delta.steps for delta in deltas)
        self.commit = replace(self.commit, version=self.version + 1, tokens=steps)
        self.opened, self.called, self.due_s, self.merged, self._merging = now, None, inf, inf, []
        return [Work((delta.slot, delta.attempt), delta.began, delta.stopped, delta.steps,
                     delta.stall_s) for delta in deltas]  # fmt: skip


class Local:
    """The run's jobs on the nodes of a trace, and what they do."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        self.config, self.costs, self.now = config, costs, 0.0
        self.gpus = config.slurm.gpus_per_worker
        self.master = Master(config.local_sgd, costs.total_steps)
        self.jobs: list[Allocation] = []
        self.work: list[Work] = []
        self.workers: list[Worker] = []
        self._changes, self._there = [*trace], {}  # node -> its GPUs
        self._attempts: Counter[int] = Counter()  # by slot
        self._next_pass = 0.0

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        while self.now < until:
            self._look()
            moments = [min(worker.until, worker.killed) for worker in self.workers]
            moments += [change.at for change in self._changes[:1]]
            moments += [until, self._next_pass, *self.master.moments(self.now)]
            self.now = max(self.now, min(moments))
        self.jobs += [self._job(worker, "") for worker in self.workers
                      if worker.state not in (State.QUEUED, State.KILLED)]  # fmt: skip
        return ledger(self.jobs, self.work)

    def _look(self) -> None:
        """All that happens at this moment."""
        while self._changes and self._changes[0].at <= self.now:
            self._change(self._changes.pop(0))
        if self.master.merged <= self.now:
            self.work += self.master.publish(self.now)
        for worker in self.workers:
            if worker.killed <= self.now:
                self._end(worker, "killed")
            elif worker.until <= self.now:
                worker.until = next(worker.life, OVER)
        self.workers = [worker for worker in self.workers if worker.until != OVER]
        if self._next_pass <= self.now:
            self._pass()
        self._fill()
        if self.master.merged == inf:
            self.master.look(self.workers, self.now, self.costs.average_s)
        for worker in self.workers:
            if worker.state is State.TRAINING:
                worker.until = worker.began + self._steps(worker) * self.step_s(worker)
            elif worker.state is State.WAITING and worker.notice is None:
                worker.until = self._next_round(worker)

    # ---- jobs

    def _change(self, change: Change) -> None:
        self._there.pop(change.node, 0)
        if change.gpus:
            self._there[change.node] = change.gpus
            return
        for worker in (worker for worker in self.workers if worker.node == change.node):
            if worker.state is State.QUEUED:
                worker.node, worker.until = "", inf
            elif worker.notice is None:
                worker.notice, worker.killed = self.now, self.now + self.costs.notice_s
                if worker.state not in (State.TRAINING, State.DELIVERING):
                    worker.until = self.now

    def _pass(self) -> None:
        jobs = [THE_MASTER]
        for worker in self.workers:
            if worker.state is not State.KILLED:
                state = "PENDING" if worker.state is State.QUEUED else "RUNNING"
                jobs.append(JobSeen("", WORKER, worker.slot, state))
        limits = Limits(self.config.elastic.max_pending)
        world = World(self.config.elastic.max // self.gpus, Memory(0.0, tuple(jobs)), limits)
        self.workers += [Worker(action.slot, self.now) for action in plan(world, self.now)
                         if (action.verb, action.role) == (SUBMIT, WORKER)]  # fmt: skip
        self._next_pass = self.now + self.config.elastic.reconcile_interval_s

    def _fill(self) -> None:
        """Give free nodes to the jobs that wait."""
        used = Counter(worker.node for worker in self.workers)
        free = (node for node, gpus in self._there.items()
                for _ in range(gpus // self.gpus - used[node]))  # fmt: skip
        waiting = (w for w in self.workers if w.state is State.QUEUED and not w.node)
        for worker, node in zip(waiting, free, strict=False):
            worker.node, worker.until = node, self.now + self.costs.queue_s
            worker.life = self._life(worker)

    def _end(self, worker: Worker, outcome: str) -> None:
        self.jobs.append(self._job(worker, outcome))
        worker.until = self.now
        if outcome == "yielded":
            self._next_pass = min(self._next_pass, self.now + AFTER_LEAVE_S)
        elif worker.state is not State.LOADING:  # the master takes it for live
            worker.until += self.config.health.lease_s
        worker.life, worker.killed = iter(()), inf
        worker.state, worker.node = State.KILLED, ""

    def _job(self, worker: Worker, outcome: str) -> Allocation:
        attempts = ((worker.started, (worker.slot, worker.attempt)),)
        return Allocation(self.gpus, worker.submitted, worker.started, self.now, outcome, attempts,
                          worker.notice)  # fmt: skip

    # ---- workers

    def step_s(self, _worker: Worker) -> float:
        return self.costs.step_s

    def _life(self, worker: Worker) -> Iterator[float]:
        """What a worker does once it has been in the queue; each time, until when."""
        costs, master = self.costs, self.master
        self._attempts[worker.slot] += 1
        worker.attempt, worker.started = self._attempts[worker.slot], self.now
        worker.state = State.LOADING
        yield self.now + costs.startup_s
        while worker.notice is None:
            worker.state, worker.base, worker.began = State.TRAINING, master.version, self.now
            worker.stall_s, worker.answered = self.now - (worker.stopped or self.now), -1
            master.opened = min(master.opened, self.now)
            yield inf  # it is planned anew whenever something happens, see _look
            worker.steps = round((self.now - worker.began) / self.step_s(worker))
            if worker.steps:
                worker.state, worker.stopped = State.DELIVERING, self.now
                alone = worker.notice is not None
                yield self.now + (costs.deliver_alone_s if alone else costs.deliver_s)
            worker.state = State.WAITING
            master.accept(worker, self.now)
            if worker.notice is None and worker.base == master.version:
                yield inf  # this, too
            if worker.notice is None and worker.base < master.version:
                worker.state = State.READING
                yield self.now + costs.pull_s
        yield self.now + costs.leave_s
        self._end(worker, "yielded")

    def _next_round(self, worker: Worker) -> float:
        """When the next version is there; or now, if its steps are wanted after all: it
        came too late to have one, but nobody had."""
        is_wanted = not worker.steps and self.master.due(self.now) == inf
        return self.now if is_wanted else self.master.merged

    def _steps(self, worker: Worker) -> int:
        """Of its round, as things are."""
        step_s, most = self.step_s(worker), self.master.inner_steps
        steps = min(most, max(0, ceil((self.now - worker.began) / step_s - 1e-6)))
        is_called = self.master.called is not None or worker.base < self.master.version
        if is_called or worker.notice is not None:
            return steps
        left_s = self.master.due(self.now) - self.costs.deliver_s - worker.began
        return bisect_left(range(most), True, steps, key=lambda steps: rounds.is_due(
            left_s - steps * step_s, steps, steps * step_s))  # fmt: skip
