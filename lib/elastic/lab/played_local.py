"""A trace of preemptions played to a run in local mode: its workers, its rounds, its
passes. Pure.

The play goes from one moment to the next: a node comes or goes, a worker is done with
what it does, a pass is made, a round is over. All workers are as fast, so a round is due
when whoever was there at its opening has done all steps. See forecast.py for what is
played and what is not.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil, inf

from elastic.jobs.history import MASTER, WORKER, Job, Memory
from elastic.jobs.plan import AFTER_LEAVE_S, SUBMIT, Limits, World, plan
from elastic.lab.played import Change, Costs
from elastic.local import rounds
from elastic.run.goodput import Allocation, Work, ledger
from elastic.run.records import Commit

LATE_S = 0.01  # that the master looks after a deadline has passed
OVER = -inf  # nothing of a worker is left
THE_MASTER = Job("master", MASTER, 0, "RUNNING", started_at=0.0)

State = Enum("State", "QUEUED LOADING TRAINING DELIVERING WAITING KILLED")


@dataclass(eq=False)
class Worker:
    """A job with a slot, and what it does."""

    slot: int
    attempt: int
    submitted: float
    node: str = ""  # that it is on, or about to start on
    state: State = State.QUEUED
    life: Iterator[float] = iter(())  # see Local._life
    until: float = inf  # then it goes on with it
    joined: float = inf
    notice: float | None = None
    killed: float = inf  # at the end of its notice
    began: float = inf  # to train in its round


@dataclass
class Round:
    """The open one, or the one that is opened when there is a version."""

    opened: float  # inf: once a worker comes
    inner_steps: int
    due_s: float  # after its opening
    wait_s: float  # for those that are late, after its opening
    called: float | None = None
    answered: set[int] = field(default_factory=set)  # slots


class Local:
    """The run's jobs on the nodes of a trace, and its rounds. A step is a token."""

    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        self.config, self.costs, self.now = config, costs, 0.0
        self.gpus = config.slurm.gpus_per_worker
        self.jobs: list[Allocation] = []
        self.work: list[Work] = []
        self.workers: list[Worker] = []
        self._changes, self._there = [*trace], {}  # node -> its GPUs
        self._next_pass = 0.0
        self._commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(),
                              deltas=(), total_tokens=costs.total_steps or inf)  # fmt: skip
        self._deltas: list[Work] = []
        self._round = self._next_round(inf)

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        while self.now < until:
            self._look()
            moments = [min(worker.until, worker.killed) for worker in self.workers]
            moments += [change.at for change in self._changes[:1]]
            self.now = max(self.now, min([*moments, *self._deadlines(), self._next_pass, until]))
        for worker in self.workers:
            if worker.state not in (State.QUEUED, State.KILLED):
                self._end(worker, "")
        return ledger(self.jobs, self.work)

    def _look(self) -> None:
        """All that happens at this moment."""
        while self._changes and self._changes[0].at <= self.now:
            self._change(self._changes.pop(0))
        for worker in self.workers:
            if worker.killed <= self.now:
                self._end(worker, "killed")
            elif worker.until <= self.now:
                worker.until = next(worker.life, OVER)
        self.workers = [worker for worker in self.workers if worker.until != OVER]
        if self._next_pass <= self.now:
            self._pass()
        self._fill()
        if self._round.opened <= self.now:
            self._decide()

    def _all(self, state: State) -> list[Worker]:
        return [worker for worker in self.workers if worker.state is state]

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
                if worker.state is State.TRAINING:
                    self._stop(worker)
                elif worker.state is not State.DELIVERING:
                    worker.until = self.now

    def _pass(self) -> None:
        there = [Job("", WORKER, worker.slot, "RUNNING" if worker.joined < inf else "PENDING")
                 for worker in self.workers if worker.state is not State.KILLED]  # fmt: skip
        jobs = (THE_MASTER, *there)
        limits = Limits(self.config.elastic.max_pending)
        world = World(self.config.elastic.max // self.gpus, Memory(0.0, jobs), limits)
        self.workers += [Worker(action.slot, len(self.jobs), self.now)
                         for action in plan(world, self.now)
                         if (action.verb, action.role) == (SUBMIT, WORKER)]  # fmt: skip
        self._next_pass = self.now + self.config.elastic.reconcile_interval_s

    def _fill(self) -> None:
        """Give free nodes to the jobs that wait."""
        used = Counter(worker.node for worker in self.workers)
        free = (node for node, gpus in self._there.items()
                for _ in range(gpus // self.gpus - used[node]))  # fmt: skip
        waiting = (worker for worker in self._all(State.QUEUED) if not worker.node)
        for worker, node in zip(waiting, free, strict=False):
            worker.node, worker.until = node, self.now + self.costs.queue_s
            worker.life = self._life(worker)

    def _end(self, worker: Worker, outcome: str) -> None:
        attempts = ((worker.joined, (worker.slot, worker.attempt)),)
        self.jobs.append(Allocation(self.gpus, worker.submitted, worker.joined, self.now,
                                    outcome, attempts, worker.notice))  # fmt: skip
        worker.until = OVER
        if outcome == "yielded":
            self._next_pass = min(self._next_pass, self.now + AFTER_LEAVE_S)
        elif worker.state is not State.LOADING:  # the master takes it for live
            worker.until = self.now + self.config.health.lease_s
        worker.life, worker.killed = iter(()), inf
        worker.state, worker.node = State.KILLED, ""

    # ---- workers

    def _life(self, worker: Worker) -> Iterator[float]:
        """What a worker does once it has been in the queue; each time, until when."""
        costs, key, stopped = self.costs, (worker.slot, worker.attempt), 0.0
        worker.state, worker.joined = State.LOADING, self.now
        yield self.now + costs.startup_s
        while worker.notice is None:
            if self.now < self._round.opened < inf:
                yield self._round.opened + costs.pull_s
                continue
            worker.state, worker.began, version = State.TRAINING, self.now, self._commit.version
            self._round.opened = min(self._round.opened, self.now)
            self._round.answered.discard(worker.slot)
            yield self.now + self._steps() * costs.step_s
            if steps := round((self.now - worker.began) / costs.step_s):
                work = Work(key, worker.began, self.now, steps, worker.began - stopped)
                worker.state, stopped = State.DELIVERING, self.now
                is_alone = worker.notice is not None
                yield self.now + (costs.deliver_alone_s if is_alone else costs.deliver_s)
                self._deltas.append(work)
            worker.state = State.WAITING
            is_current = version == self._commit.version
            if is_current:
                self._round.answered.add(worker.slot)
            if worker.notice is None:
                yield inf if is_current else self.now + costs.pull_s
        yield self.now + costs.leave_s
        self._end(worker, "yielded")

    def _steps(self) -> int:
        """Of a round that is begun now: so many that the delta is there when it is due."""
        round_, costs = self._round, self.costs
        due = inf if self._is_lost() else round_.opened + round_.due_s
        steps = (due - costs.deliver_s - self.now) / costs.step_s
        return round(min(max(steps, 0), round_.inner_steps)) if round_.called is None else 0

    def _stop(self, worker: Worker) -> None:
        """Let it end the step it is at, and deliver."""
        step_s = self.costs.step_s
        steps = ceil((self.now - worker.began) / step_s - 1e-6)
        worker.until = min(worker.until, worker.began + steps * step_s)

    # ---- rounds

    def _deadlines(self) -> list[float]:
        """When the master has to look: after the deadline, and after the last call."""
        round_, last_call_s = self._round, self.config.local_sgd.last_call_s
        over = inf if round_.called is None else round_.called + last_call_s
        late = (time + LATE_S for time in (round_.opened + round_.wait_s, over))
        return [time for time in late if time > self.now]

    def _is_lost(self) -> bool:
        """Has nobody delivered by the deadline? Then those that come do all steps."""
        return not self._deltas and self.now > self._round.opened + self._round.wait_s

    def _decide(self) -> None:
        """Wait, call, or close the round."""
        round_, newest = self._round, {w.slot: w for w in self.workers if w.joined < inf}
        there = {slot: w.joined for slot, w in newest.items() if w.state is not State.LOADING}
        view = rounds.View(round_.opened, round_.called, there, frozenset(round_.answered),
                           len(self._deltas), 0, round_.due_s)  # fmt: skip
        move, _ = rounds.decide(view, self.config.local_sgd, self.now)
        if move is rounds.Move.CALL:
            round_.called = self.now
            for worker in self._all(State.TRAINING):
                self._stop(worker)
        elif move is rounds.Move.CLOSE:
            self._close()
            self._round = self._next_round(self.now + self.costs.average_s)
            self._go_on(self._round.opened + self.costs.pull_s)
        elif self._is_lost():
            self._go_on(self.now)

    def _close(self) -> None:
        """There will be a next version, of the deltas that have come."""
        self.work += self._deltas
        tokens = self._commit.tokens + sum(work.tokens for work in self._deltas)
        self._commit = replace(self._commit, version=self._commit.version + 1, tokens=tokens)
        self._deltas.clear()

    def _next_round(self, opened: float) -> Round:
        settings, costs = self.config.local_sgd, self.costs
        steps = rounds.inner_steps(self._commit, settings)
        pace_s = costs.step_s + (costs.pull_s + costs.deliver_s) / steps
        due_s = rounds.due_s([pace_s], steps, settings)
        return Round(opened, steps, due_s, rounds.deadline_s(due_s, settings))

    def _go_on(self, at: float) -> None:
        """Let those that wait for a round train then."""
        for worker in self._all(State.WAITING):
            if worker.until == inf:
                worker.until = at
