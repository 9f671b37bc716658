"""A trace of preemptions played to a run in local mode: its workers, its master, its passes. Pure.

A worker loads, trains, delivers and waits; the master calls, closes and commits; a pass submits
what is missing. See forecast.py for what is played and what is not.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, inf

from elastic.jobs.history import MASTER, WORKER, JobSeen
from elastic.jobs.plan import SUBMIT
from elastic.lab.played import Change, Costs, Job, Play, nothing
from elastic.local import rounds
from elastic.run.goodput import Work

AFTER_LEAVE_S = 2.0  # from a worker's leave to the pass that replaces it, as the master has it
LATE_S = 0.01  # that it looks after a deadline has passed
THE_MASTER = JobSeen("master", MASTER, 0, "RUNNING", started_at=0.0)
QUEUED, LOADING, TRAINING, DELIVERING, WAITING = range(5)


@dataclass(eq=False)
class Worker(Job):
    state: int = QUEUED
    node: str = ""  # that it is on, or about to start on
    base: int = -1  # version that it trains on
    began: float = 0.0  # its round
    steps: int = 0
    stopped: float | None = None  # the end of its last step
    seconds: float = 0.0  # from the start of its round to the delivery, as a header has it
    stall_s: float = 0.0  # between that and its round


class Local(Play):
    def __init__(self, trace: Sequence[Change], config, costs: Costs):
        super().__init__(trace, config, costs)
        self.sgd, self.gpus = config.local_sgd, config.slurm.gpus_per_worker
        self.workers: list[Worker] = []
        self.silent: dict[int, Worker] = {}  # by slot: killed, and not yet missed by the master
        self.attempts: Counter[int] = Counter()  # by slot
        self.paces_s: dict[int, float] = {}  # by slot
        self.commit = {"version": 0, "tokens": 0, "total_tokens": costs.total_steps or inf}
        self.most = rounds.inner_steps(self.commit, self.sgd)  # K of the round
        self.opened = self.due = self.due_s = inf
        self.called: float | None = None
        self.accepted: list[Worker] = []  # copies, as they were when they delivered
        self.merging: list[Worker] = []
        self._is_news = True  # for a pass
        self.at(0.0, "first pass", self.each, config.elastic.reconcile_interval_s, self._pass)

    # ---- jobs

    def _pass(self) -> None:
        if self._is_news:
            self._is_news = False
            jobs = [THE_MASTER, *(worker.seen(WORKER) for worker in self.workers)]
            for action in self.actions(jobs, slots=self.config.elastic.max // self.gpus):
                if (action.verb, action.role) == (SUBMIT, WORKER):
                    self.workers.append(Worker(action.slot, self.now, gpus=self.gpus))

    def _fill(self) -> None:
        """Give free nodes to the jobs that wait."""
        used = Counter(worker.node for worker in self.workers)
        free = (node for node, gpus in self.there.items()
                for _ in range(gpus // self.gpus - used[node]))  # fmt: skip
        waiting = (worker for worker in self.workers if not worker.node)
        for worker, node in zip(waiting, free, strict=False):
            worker.node = node
            self.at(self.now + self.costs.queue_s, worker, self._start, worker)

    def _start(self, worker: Worker) -> None:
        if not worker.node:  # it was taken: the job waits again
            return
        self.silent.pop(worker.slot, None)
        self.attempts[worker.slot] += 1
        worker.attempt, worker.start = self.attempts[worker.slot], self.now
        worker.state = LOADING
        self._is_news = True  # there is room in the queue
        self.at(self.now + self.costs.startup_s, worker, self._begin, worker)

    def taken(self, node: str) -> None:
        for worker in [w for w in self.workers if w.node == node and w.notice is None]:
            if worker.state == QUEUED:
                worker.node = ""
                continue
            worker.notice = self.now
            self.at(self.now + self.costs.notice_s, ("kill", worker), self._end, worker, "killed")
            if worker.state == TRAINING:
                self._plan_end(worker)
            elif worker.state != DELIVERING:
                self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        self.at(self.now + self.costs.leave_s, worker, self._end, worker, "yielded")

    def _end(self, worker: Worker, outcome: str) -> None:
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self.had.append(worker.until(self.now, outcome))
        self._is_news = True
        if outcome == "yielded":
            self.at(self.now + AFTER_LEAVE_S, worker, self._pass)
            return
        self.at(inf, worker, nothing)
        if worker.state != LOADING:  # until its lease is over, the master takes it for live
            lease_s, self.silent[worker.slot] = self.config.health.lease_s, worker
            self.at(self.now + lease_s, worker.slot, self.silent.pop, worker.slot, None)

    def close(self) -> None:
        self.had += [w.until(self.now, "") for w in self.workers if w.state != QUEUED]

    # ---- workers

    def _begin(self, worker: Worker) -> None:
        """It has the newest version."""
        worker.state, worker.base, worker.began = TRAINING, self.commit["version"], self.now
        worker.stall_s = self.now - (worker.stopped or self.now)
        self.opened = min(self.opened, self.now)  # by the first, who makes version 0
        self._plan_end(worker)

    def _plan_end(self, worker: Worker) -> None:
        """When its round's steps will be over, as things are."""
        steps = self._steps(worker)
        self.at(worker.began + steps * self.costs.step_s, worker, self._stop, worker, steps)

    def _steps(self, worker: Worker) -> int:
        step_s = self.costs.step_s
        steps = min(self.most, max(0, ceil((self.now - worker.began) / step_s - 1e-6)))
        is_over = worker.notice is not None or self.called is not None
        if is_over or worker.base < self.commit["version"]:
            return steps
        due_s = self.due - self.costs.deliver_s - worker.began
        return bisect_left(range(self.most), True, steps, key=lambda steps: rounds.is_due(
            due_s - steps * step_s, steps, steps * step_s))  # fmt: skip

    def _stop(self, worker: Worker, steps: int) -> None:
        worker.steps, worker.state = steps, DELIVERING
        worker.stopped = self.now if steps else worker.stopped
        costs, alone = self.costs, worker.notice is not None
        wait_s = costs.deliver_alone_s if alone else costs.deliver_s
        self.at(self.now + wait_s * (steps > 0), worker, self._arrive, worker)

    def _arrive(self, worker: Worker) -> None:
        """Its delta is with the master, and has been checked."""
        worker.state, behind = WAITING, self.commit["version"] - worker.base
        if worker.steps and behind <= self.sgd.max_staleness:
            worker.seconds = self.now - worker.began
            self.accepted.append(copy(worker))
            since = worker.began if behind or self.merging else self.opened
            self.paces_s[worker.slot] = rounds.pace_s(worker, self.now - since, self.most)
        if worker.notice is not None:
            self._leave(worker)
        elif behind:
            self._pull(worker)

    def _pull(self, worker: Worker) -> None:
        self.at(self.now + self.costs.pull_s, worker, self._begin, worker)

    # ---- the master

    def _due(self) -> float:
        """When the round is due; as the master says it."""
        live = self.silent.keys() | {w.slot for w in self.workers if w.state != QUEUED}
        paces_s = [pace_s for slot, pace_s in self.paces_s.items() if slot in live]
        self.due_s = min(self.due_s, rounds.due_s(paces_s, self.most, self.sgd))
        is_late = self.now - self.opened > rounds.deadline_s(self.due_s, self.sgd)
        return inf if is_late and not self.accepted else self.opened + self.due_s

    def settle(self) -> None:
        self._fill()
        if self.merging:
            return
        if (due := self._due()) != self.due:
            self.due = due
            self._plan_ends()
        there = [worker for worker in self.workers if worker.state > LOADING]
        answered = [w for w in there if w.state == WAITING and w.base == self.commit["version"]]
        view = rounds.View(
            opened=self.opened, called=self.called,
            expected={w.slot: w.start for w in (*self.silent.values(), *there)},
            answered=frozenset(worker.slot for worker in answered),
            accepted=len(self.accepted), preparing=0, due_s=self.due_s,
        )  # fmt: skip
        move, _ = rounds.decide(view, self.sgd, self.now)
        if move is rounds.Move.CLOSE:
            self._close()
        elif move is rounds.Move.CALL:
            self.called = self.now
            self._plan_ends()
            self.at(self.now + self.sgd.last_call_s + LATE_S, "last call", nothing)
        elif self.accepted:
            look = self.opened + rounds.deadline_s(self.due_s, self.sgd) + LATE_S
            self.at(look if look > self.now else inf, "deadline", nothing)

    def _plan_ends(self) -> None:
        for worker in self.workers:
            if worker.state == TRAINING:
                self._plan_end(worker)

    def _close(self) -> None:
        late = rounds.superseded(self.accepted)
        self.merging = [delta for delta in self.accepted if delta not in late]
        self.accepted = []
        self.at(self.now + self.costs.average_s, "commit", self._commit)

    def _commit(self) -> None:
        """There is a new version: whoever waits gets it, whoever trains on an older one stops."""
        for delta in self.merging:
            who = (delta.slot, delta.attempt)
            self.work.append(Work(who, delta.began, delta.stopped, delta.steps, delta.stall_s))
        steps = self.commit["tokens"] + sum(delta.steps for delta in self.merging)
        self.commit |= {"version": self.commit["version"] + 1, "tokens": steps}
        self.most = rounds.inner_steps(self.commit, self.sgd)
        self.opened, self.called, self.merging, self.due_s = self.now, None, [], inf
        self.due = self._due()
        for worker in self.workers:
            if worker.state == WAITING and worker.notice is None:
                self._pull(worker)
        self._plan_ends()
