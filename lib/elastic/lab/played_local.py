"""A trace of preemptions played to a run in local mode: first its jobs, then its rounds.
Pure.

The trace says when a node goes, so a job's notice is known when it starts. Rounds follow
one another: what a worker does in one is laid out by arithmetic, and the master decides
whenever something has come. All workers are equally fast, so a round is due when a worker
that was there at its opening has done all steps. See forecast.py for what is played and
what is not.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from elastic.jobs.history import MASTER, WORKER, Job, Memory
from elastic.jobs.plan import AFTER_LEAVE_S, SUBMIT, World, plan
from elastic.lab.played import Costs, Nodes, job_until
from elastic.local import rounds
from elastic.run.goodput import Allocation, Work, ledger
from elastic.run.records import Commit

LATE_S = 0.01  # that the master looks after a deadline has passed
THE_MASTER = Job("master", MASTER, 0, "RUNNING", started_at=0.0)


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
        self.jobs: list[Allocation] = []
        self.work: list[Work] = []

    def play(self, until: float) -> dict[str, float]:
        """The goodput ledger at that time."""
        workers = list(self._workers(until))
        self._coming = deque(worker for worker in workers if worker.free < worker.notice)
        self._there: list[Worker] = []
        commit = Commit(version=0, master_epoch=1, time=0.0, tokens=0, samples=(), deltas=(),
                        total_tokens=self.costs.total_steps or inf)  # fmt: skip
        opened = self._coming[0].free if self._coming else inf
        while opened < until:
            commit, opened = self._round(commit, opened, until)
        self.jobs = [job_until(until, self.gpus, w.submitted, w.start, w.end, w.key, w.notice)
                     for w in workers if w.start < until]  # fmt: skip
        return ledger(self.jobs, self.work)

    # ---- jobs

    def _workers(self, until: float) -> Iterator[Worker]:
        """All workers of the run: passes submit jobs, and free nodes are given to jobs that
        wait."""
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
                      if nodes.gone({node}, now) > now + costs.queue_s)  # fmt: skip
            for (slot, submitted), node in zip([*queued], places, strict=False):
                start, notice = now + costs.queue_s, nodes.gone({node}, now)
                free, leaves_s = start + costs.startup_s, costs.leave_s
                leaves_s += (notice > free) * (costs.step_s / 2 + costs.deliver_alone_s)
                worker = Worker((slot, count), node, submitted, start, free, notice,
                                notice + min(leaves_s, costs.notice_s),
                                notice + costs.notice_s + self.config.health.lease_s)  # fmt: skip
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
                      self.config.elastic.max_pending)  # fmt: skip
        return [action.slot for action in plan(world, now)
                if (action.verb, action.role) == (SUBMIT, WORKER)]  # fmt: skip

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
                     for worker in self._there if worker.notice > opened}  # fmt: skip
            deltas = [at for work, at in turns.values() if work.tokens and at < inf]
            answers = {worker.key[0]: at for worker, (_, at) in turns.items()}
            view = rounds.View(
                opened, None if called == inf else called,
                {worker.key[0]: worker.start for worker in self._there if worker.live > now},
                frozenset(slot for slot, at in answers.items() if at <= now),
                sum(at <= now for at in deltas), 0, due_s,
            )  # fmt: skip
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
                           *answers.values(), *(worker.live for worker in self._there))  # fmt: skip
                now = min(time for time in moments if time > now)
        return commit, until

    def _turn(
        self, worker: Worker, steps: int, opened: float, due: float, called: float
    ) -> tuple[Work, float]:
        """What a worker does of a round's steps, and when it has answered; inf: its delta is
        lost."""
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
