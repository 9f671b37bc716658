"""A trace of preemptions played to a run in local mode: its workers, its master, its passes. Pure.

A worker loads, trains, delivers and waits; the master calls, closes and commits; a pass submits
what is missing. See forecast.py for what is played and what is not.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, inf

from elastic import rounds
from elastic.goodput import Allocation, Work
from elastic.history import MASTER, WORKER, JobSeen, Memory
from elastic.plan import SUBMIT, Limits, World, plan
from elastic.played import Change, Costs, Play, nothing

AFTER_LEAVE_S = 2.0  # from a worker's leave to the pass that replaces it, as the master has it
LATE_S = 0.01  # that it looks after a deadline has passed
LOADING, TRAINING, DELIVERING, WAITING = "loading", "training", "delivering", "waiting"


@dataclass(eq=False)
class Worker:
    slot: int
    attempt: int
    node: str
    submitted: float
    start: float
    state: str = LOADING
    base: int = -1  # version that it trains on
    began: float = 0.0  # its round
    steps: int = 0
    stopped: float | None = None  # the end of its last step
    seconds: float = 0.0  # from the start of its round to the delivery, as a header has it
    stall_s: float = 0.0  # between that and its round
    notice: float | None = None
    turn: int = 0  # an event planned for an earlier one is off


class Local(Play):
    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        super().__init__(trace, config, costs)
        self.sgd = config.local_sgd
        self.slots = config.elastic.max // config.slurm.gpus_per_worker
        self.workers: list[Worker] = []
        self.queue: list[tuple[int, float]] = []  # slots with a job that waits, and since when
        self.starting: list[tuple[int, float, str]] = []  # … that has a node
        self.attempts: dict[int, int] = {}
        self.silent: dict[int, float] = {}  # slot of a killed worker -> when it joined
        self.commit = {"version": 0, "tokens": 0, "total_tokens": costs.total_steps or inf}
        self.opened, self.called = inf, None
        self.accepted: list[Worker] = []  # copies, as they were when they delivered
        self.merging: list[Worker] = []
        self.answered: set[tuple[int, int]] = set()
        self.paces_s: dict[int, float] = {}  # by slot
        self.most = rounds.inner_steps(self.commit, self.sgd)  # K of the round
        self.due_s = self.due = inf
        self._look = 0.0
        self._is_news = True  # for a pass
        self.at(0.0, self.each, config.elastic.reconcile_interval_s, self._pass)

    # ---- jobs

    def _pass(self) -> None:
        if self._is_news:
            self._is_news = False
            limits = Limits(self.config.elastic.max_pending)
            memory = Memory(born=0.0, jobs=tuple(self._seen()))
            for action in plan(World(self.slots, memory, limits), self.now):
                if (action.verb, action.role) == (SUBMIT, WORKER):
                    self.queue.append((action.slot, self.now))

    def _seen(self) -> Iterator[JobSeen]:
        yield JobSeen("master", MASTER, 0, "RUNNING", started_at=0.0)
        for worker in self.workers:
            yield JobSeen("worker", WORKER, worker.slot, "RUNNING", started_at=worker.start)
        for slot, since, *_ in (*self.queue, *self.starting):
            yield JobSeen("queued", WORKER, slot, "PENDING", submitted_at=since)

    def _fill(self) -> None:
        """Give free nodes to the jobs that wait."""
        if not self.queue:
            return
        each = self.config.slurm.gpus_per_worker
        used = [worker.node for worker in self.workers] + [node for *_, node in self.starting]
        free = [node for node, gpus in self.there.items()
                for _ in range(gpus // each - used.count(node))]  # fmt: skip
        for node in free[: len(self.queue)]:
            job = (*self.queue.pop(0), node)
            self.starting.append(job)
            self.at(self.now + self.costs.queue_s, self._start, job)

    def _start(self, job: tuple[int, float, str]) -> None:
        slot, submitted, node = job
        if job not in self.starting:  # its node was taken: it waits again
            return
        self.starting.remove(job)
        self.silent.pop(slot, None)
        self.attempts[slot] = self.attempts.get(slot, 0) + 1
        worker = Worker(slot, self.attempts[slot], node, submitted, self.now)
        self.workers.append(worker)
        self._is_news = True  # there is room in the queue
        self.at(self.now + self.costs.startup_s, self._begin, worker, worker.turn)

    def taken(self, node: str) -> None:
        for job in [job for job in self.starting if job[2] == node]:
            self.starting.remove(job)
            self.queue.append(job[:2])
        for worker in [w for w in self.workers if w.node == node and w.notice is None]:
            worker.notice = self.now
            self.at(self.now + self.costs.notice_s, self._kill, worker)
            if worker.state in (LOADING, WAITING):
                self._leave(worker)
            elif worker.state == TRAINING:
                self._plan_end(worker)

    def _leave(self, worker: Worker) -> None:
        worker.turn += 1
        self.at(self.now + self.costs.leave_s, self._end, worker, "yielded")

    def _end(self, worker: Worker, outcome: str) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._account(worker, outcome)
            self._is_news = True
            if outcome == "yielded":
                self.at(self.now + AFTER_LEAVE_S, self._pass)

    def _kill(self, worker: Worker) -> None:
        """Its notice is over. Until its lease is, too, the master takes it for live."""
        if worker in self.workers:
            worker.turn += 1
            if worker.state != LOADING:
                self.silent[worker.slot] = worker.start
                self.at(self.now + self.config.health.lease_s, self._miss, worker)
            self._end(worker, "killed")

    def _miss(self, worker: Worker) -> None:
        if self.silent.get(worker.slot) == worker.start:
            del self.silent[worker.slot]

    def _account(self, worker: Worker, outcome: str) -> None:
        who = ((worker.start, (worker.slot, worker.attempt)),)
        gpus = self.config.slurm.gpus_per_worker
        self.had.append(Allocation(gpus, worker.submitted, worker.start, self.now, outcome, who,
                                   worker.notice))  # fmt: skip

    def close(self) -> None:
        for worker in self.workers:
            self._account(worker, "")

    # ---- workers

    def _begin(self, worker: Worker, turn: int) -> None:
        """It has the newest version."""
        if worker.turn == turn:
            worker.state, worker.base, worker.began = TRAINING, self.commit["version"], self.now
            worker.stall_s = self.now - (worker.stopped or self.now)
            self.opened = min(self.opened, self.now)  # by the first, who makes version 0
            self._plan_end(worker)

    def _plan_end(self, worker: Worker) -> None:
        """When its round's steps will be over, as things are."""
        worker.turn += 1
        steps = self._steps(worker)
        at = worker.began + steps * self.costs.step_s
        self.at(at, self._stop, worker, worker.turn, steps)

    def _steps(self, worker: Worker) -> int:
        step_s, most = self.costs.step_s, self.most
        steps = min(most, max(0, ceil((self.now - worker.began) / step_s - 1e-6)))
        is_over = worker.notice is not None or self.called is not None
        if is_over or worker.base < self.commit["version"]:
            return steps
        due = self.due - self.costs.deliver_s - worker.began
        if due < inf:
            steps = max(steps, min(most, int(due / step_s) - 1))
            while steps < most and not rounds.is_due(due - steps * step_s, steps, steps * step_s):
                steps += 1
            return steps
        return most

    def _stop(self, worker: Worker, turn: int, steps: int) -> None:
        if worker.turn == turn:
            worker.steps, worker.state = steps, DELIVERING
            worker.stopped = self.now if steps else worker.stopped
            worker.turn += 1
            costs, alone = self.costs, worker.notice is not None
            wait_s = costs.deliver_alone_s if alone else costs.deliver_s
            self.at(self.now + wait_s * (steps > 0), self._arrive, worker, worker.turn)

    def _arrive(self, worker: Worker, turn: int) -> None:
        """Its delta is with the master, and has been checked."""
        if worker.turn != turn:
            return
        worker.state, version = WAITING, self.commit["version"]
        is_late = worker.base < version
        if worker.steps and version - worker.base <= self.sgd.max_staleness:
            self._accept(worker, is_late)
        if not (is_late or self.merging):
            self.answered.add((worker.slot, worker.attempt))
        if worker.notice is not None:
            self._leave(worker)
        elif is_late:
            self._pull(worker)

    def _pull(self, worker: Worker) -> None:
        worker.turn += 1
        self.at(self.now + self.costs.pull_s, self._begin, worker, worker.turn)

    # ---- the master

    def _accept(self, worker: Worker, is_late: bool) -> None:
        worker.seconds = self.now - worker.began
        delta = copy(worker)
        self.accepted.append(delta)
        took_s = delta.seconds if is_late or self.merging else self.now - self.opened
        self.paces_s[worker.slot] = rounds.pace_s(delta, took_s, self.most)

    def _due_s(self) -> float:
        live = self.silent.keys() | {worker.slot for worker in self.workers}
        paces_s = [pace_s for slot, pace_s in self.paces_s.items() if slot in live]
        self.due_s = min(self.due_s, rounds.due_s(paces_s, self.most, self.sgd))
        return self.due_s

    def _due(self) -> float:
        """When the round is due; as the master says it."""
        due_s = self._due_s()
        if not self.accepted and self.now - self.opened > rounds.deadline_s(due_s, self.sgd):
            return inf
        return self.opened + due_s

    def settle(self) -> None:
        self._fill()
        if self.merging:
            return
        if (due := self._due()) != self.due:
            self.due = due
            self._plan_ends()
        present = [w for w in self.workers if w.state != LOADING]
        view = rounds.View(
            opened=self.opened, called=self.called,
            expected=self.silent | {w.slot: w.start for w in present},
            answered=frozenset(w.slot for w in present if (w.slot, w.attempt) in self.answered),
            accepted=len(self.accepted), preparing=0, due_s=self._due_s(),
        )  # fmt: skip
        move, _ = rounds.decide(view, self.sgd, self.now)
        if move is rounds.Move.CLOSE:
            self._close()
        elif move is rounds.Move.CALL:
            self.called = self.now
            self._plan_ends()
            self.at(self.now + self.sgd.last_call_s + LATE_S, nothing)
        elif self.accepted and view.due_s < inf:
            self._look_at(self.opened + rounds.deadline_s(view.due_s, self.sgd) + LATE_S)

    def _look_at(self, time: float) -> None:
        if self._look != time > self.now:
            self._look = time
            self.at(time, nothing)

    def _plan_ends(self) -> None:
        for worker in self.workers:
            if worker.state == TRAINING:
                self._plan_end(worker)

    def _close(self) -> None:
        late = rounds.superseded(self.accepted)
        self.merging = [delta for delta in self.accepted if delta not in late]
        self.accepted = []
        self.at(self.now + self.costs.average_s, self._commit)

    def _commit(self) -> None:
        """There is a new version: whoever waits gets it, whoever trains on an older one stops."""
        for delta in self.merging:
            who = (delta.slot, delta.attempt)
            self.work.append(Work(who, delta.began, delta.stopped, delta.steps, delta.stall_s))
        steps = self.commit["tokens"] + sum(delta.steps for delta in self.merging)
        self.commit |= {"version": self.commit["version"] + 1, "tokens": steps}
        self.most = rounds.inner_steps(self.commit, self.sgd)
        self.opened, self.called, self.merging, self.answered = self.now, None, [], set()
        self.due_s = inf
        self.due = self._due()
        for worker in self.workers:
            if worker.state == WAITING and worker.notice is None:
                self._pull(worker)
        self._plan_ends()
