"""A trace of preemptions played to a run in local mode: its workers, its master, its
passes. Pure.

The play goes from one moment to the next: a node comes or goes, a worker is done with
what it does, a pass is made, a round is over. See forecast.py for what is played and what
is not.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf

from elastic.jobs.history import MASTER, WORKER, Job, Memory
from elastic.jobs.plan import AFTER_LEAVE_S, SUBMIT, Limits, World, plan
from elastic.lab.played import Change, Costs
from elastic.local import rounds
from elastic.local.master.open_round import OpenRound
from elastic.local.master.recipe import Checked
from elastic.local.rounds import Facts
from elastic.run.goodput import Allocation, Work, ledger
from elastic.run.ledger import Ledger
from elastic.run.ledger import Offer as Key
from elastic.run.records import Commit, Header

LATE_S = 0.01  # that the master looks after a deadline has passed
OVER = -inf  # nothing of a worker is left
MANY = 2**60  # samples: more than are trained
THE_MASTER = Job("master", MASTER, 0, "RUNNING", started_at=0.0)

State = Enum("State", "QUEUED LOADING TRAINING DELIVERING WAITING READING KILLED")


@dataclass(eq=False)
class Worker:
    """A job with a slot, and its round."""

    slot: int
    submitted: float
    node: str = ""  # that it is on, or about to start on
    state: State = State.QUEUED
    life: Iterator[float] = iter(())  # see Local._life
    until: float = inf  # then it goes on with it
    attempt: int = 0
    joined: float | None = None
    notice: float | None = None
    killed: float = inf  # at the end of its notice
    base: int = -1  # version that it trains on
    began: float = 0.0
    steps: int = 0
    stopped: float | None = None  # the end of its last step
    stall_s: float = 0.0  # between its last step and its round


class Master:
    """The run's real rounds, of the workers that there are. A step is a sample, and a
    token."""

    def __init__(self, settings, total_steps: float):
        self.attempts: Counter[int] = Counter()  # by slot, the newest
        self.merged = inf  # when there is the next version
        commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(),
                        deltas=(), total_tokens=total_steps or inf)  # fmt: skip
        facts = Facts("", 0, "", {"": ()}, settings.max_staleness, self.attempts, frozenset())
        # The first worker opens the first round.
        self.round = OpenRound(commit, inf, True, Ledger(MANY, 0), facts, settings, {})
        self._trained = 0  # steps so far
        self._work: dict[Key, Work] = {}  # of the deltas that have come
        self._offers: list[Header] = []  # that it has not looked at

    def deliver(self, worker: Worker, now: float) -> None:
        """Its delta is there, or its word that it has none."""
        first, self._trained = self._trained, self._trained + worker.steps
        header = Header(
            run="", slot=worker.slot, attempt=worker.attempt, job_id="", base=worker.base,
            layout="", codec="", steps=worker.steps, tokens=worker.steps,
            samples=((0, first, self._trained),) if worker.steps else (), loss=0.0,
            first_loss=0.0, fragments=(), seconds=now - worker.began,
            stall_s=worker.stall_s,
        )  # fmt: skip
        times = (worker.began, worker.stopped, worker.steps, worker.stall_s)
        self._work[header.key] = Work(header.key[:2], *times)
        self._offers.append(header)

    def moments(self, now: float) -> list[float]:
        """When it has to look."""
        called, opened = self.round.called, self.round.opened
        over = inf if called is None else called + self.round.settings.last_call_s
        deadline = opened + rounds.deadline_s(self.round.due_s, self.round.settings)
        late = (time + LATE_S for time in (deadline, over))
        return [self.merged, *(time for time in late if time > now)]

    def look(self, workers: Sequence[Worker], now: float, average_s: float) -> None:
        """Judge what has come; wait, call, or close the round."""
        for header in self._offers:
            if self.round.hear(header)[0].verdict is rounds.Verdict.ACCEPT:
                self.round.accept(Checked(header), now)
        self._offers.clear()
        newest = {worker.slot: worker for worker in workers if worker.attempt}
        there = {slot: w for slot, w in newest.items() if w.state is not State.LOADING}
        move, _ = self.round.decide(there, newest, 0, -inf, now)
        if move is rounds.Move.CLOSE:
            for key in self.round.superseded():
                self.round.forget(key)
            self.merged = now + average_s

    def publish(self, now: float) -> list[Work]:
        """There is a new version, of this work."""
        merged = sorted(self.round.accepted)
        commit = self.round.close(can_revert=False, epoch=1, now=now).commit
        self.round, self.merged = self.round.after(commit, now), inf
        return [self._work.pop(key) for key in merged]


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
                jobs.append(Job("", WORKER, worker.slot, state))
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
        attempts = ((worker.joined, (worker.slot, worker.attempt)),)
        return Allocation(self.gpus, worker.submitted, worker.joined, self.now, outcome, attempts,
                          worker.notice)  # fmt: skip

    # ---- workers

    def step_s(self, _worker: Worker) -> float:
        return self.costs.step_s

    def _life(self, worker: Worker) -> Iterator[float]:
        """What a worker does once it has been in the queue; each time, until when."""
        costs, master = self.costs, self.master
        master.attempts[worker.slot] += 1
        worker.attempt, worker.joined = master.attempts[worker.slot], self.now
        worker.state = State.LOADING
        yield self.now + costs.startup_s
        while worker.notice is None:
            worker.state, worker.base = State.TRAINING, master.round.version
            worker.began = self.now
            worker.stall_s = self.now - (worker.stopped or self.now)
            master.round.opened = min(master.round.opened, self.now)
            master.round.forget_pass((worker.slot, worker.attempt))
            yield inf  # it is planned anew whenever something happens, see _look
            worker.steps = round((self.now - worker.began) / self.step_s(worker))
            if worker.steps:
                worker.state, worker.stopped = State.DELIVERING, self.now
                alone = worker.notice is not None
                yield self.now + (costs.deliver_alone_s if alone else costs.deliver_s)
            worker.state = State.WAITING
            master.deliver(worker, self.now)
            if worker.notice is None and worker.base == master.round.version:
                yield inf  # this, too
            if worker.notice is None and worker.base < master.round.version:
                worker.state = State.READING
                yield self.now + costs.pull_s
        yield self.now + costs.leave_s
        self._end(worker, "yielded")

    def _next_round(self, worker: Worker) -> float:
        """When the next version is there; or now, if its steps are wanted after all: it
        came too late to have one, but nobody had."""
        is_wanted = not worker.steps and self.master.round.due_at((), self.now) == inf
        return self.now if is_wanted else self.master.merged

    def _steps(self, worker: Worker) -> int:
        """Of its round, as things are."""
        round_, step_s = self.master.round, self.step_s(worker)
        most = round_.inner_steps
        steps = min(most, max(0, ceil((self.now - worker.began) / step_s - 1e-6)))
        is_called = round_.called is not None or worker.base < round_.version
        if is_called or worker.notice is not None:
            return steps
        left_s = round_.due_at((), self.now) - self.costs.deliver_s - worker.began
        return bisect_left(range(most), True, steps, key=lambda steps: rounds.is_due(
            left_s - steps * step_s, steps, steps * step_s))  # fmt: skip
