"""What a worker has in hand, its state: the open round, the round whose delta is under
way, the samples to come.

Rank 0 decides from it when the round is over, and what the next step is.
"""

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from elastic.base.config import Config
from elastic.base.errors import ElasticError
from elastic.local import rounds
from elastic.local.worker.line import Line
from elastic.run.estimate import AHEAD
from elastic.run.ledger import Range, count, take
from elastic.run.records import Commit, Header

MEAN_STEPS = 10  # the newest, of which `step_s` is the mean


@dataclass
class WorkerRound:
    """What this worker has done since it adopted `base`; times are of its own clock."""

    base: int
    started: float
    steps: int = 0
    tokens: int = 0
    sample_count: int = 0
    samples: list[Range] = field(default_factory=list)  # only rank 0 knows which
    pending: int = 0  # samples of the step under way
    losses: int = 0  # steps that had a loss
    loss_sum: float = 0.0
    lr_sum: float = 0.0
    first_loss: float = 0.0
    has_stepped: bool = False  # on this base: steps ahead were done on the one before
    stall_s: float = 0.0
    trained_s: float = 0.0  # what the steps took
    header: Header | None = None  # of its delta, once that is offered

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.losses if self.losses else 0.0

    def count(self, loss: float, tokens: int, rate: float) -> None:
        """Count a step that has ended, on the samples pending and at the learning rate
        `rate`. A loss that is not finite, as of a batch of nothing but padding, is none."""
        self.steps += 1
        self.tokens += tokens
        self.sample_count += self.pending
        self.lr_sum += rate
        if math.isfinite(loss):
            self.losses, self.loss_sum = self.losses + 1, self.loss_sum + loss
            self.first_loss = loss if self.losses == 1 else self.first_loss
        self.has_stepped = True


@dataclass
class Ahead:
    """Steps that are done while a delta is under way: their round, the delta they come
    after, and the fragments of newer versions that the courier has fetched."""

    round: WorkerRound
    deltas: list[torch.Tensor]
    fetched: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by version


class InHand:
    def __init__(self, line: Line, config: Config):
        # The ranks that do not lead have a RankLine: they never get to what it lacks.
        self.line, self.config = line, config
        self.commit: Commit | None = None  # of the base
        self.round = WorkerRound(-1, time.monotonic())
        self.sent: WorkerRound | None = None  # its delta is under way, with a courier
        self.ahead: Ahead | None = None
        self.queue: list[Range] = []  # granted, and not trained yet
        self.is_dry = False  # the master had fewer samples than were asked for
        self.was_void = False  # the last delta was not merged
        self.steps_total = 0  # of this process
        self.step_s = self.deliver_s = 0.0
        self._step_began = 0.0
        self._planned: list[Range] = []  # the part of the queue that the loader knows
        self._told_epoch = -1  # the master epoch that knows what is held
        self._void_rounds = 0  # in a row

    # ---- rounds

    def begin(self, commit: Commit, round_: WorkerRound) -> None:
        """A version is adopted: train on top of it."""
        if self.round.steps:
            self._void_rounds = 0
        if commit.version > self.round.base + 1:
            self.queue.clear()  # others may have it by now; ask again for what is free
        self.commit, self.round = commit, round_

    def count(self, loss: float, tokens: int, rate: float, now: float) -> None:
        """A step has ended."""
        took_s = now - self._step_began
        self.round.count(loss, tokens, rate)
        self.round.trained_s += took_s
        self.steps_total += 1
        if self.steps_total > 1:  # what the first one takes (a compilation) says nothing
            self.step_s += (took_s - self.step_s) / min(self.steps_total - 1, MEAN_STEPS)

    def void(self, what: str) -> None:
        """This round's steps are void: train from the base again."""
        self.round, self.was_void = WorkerRound(self.round.base, time.monotonic()), True
        self._void_rounds += 1
        if self._void_rounds > self.config.health.max_bad_batches:
            hint = "elastic-status says why; lower train.learning_rate, or look at the data"
            raise ElasticError(f"{self._void_rounds} deltas in a row {what}", hint)

    def is_over(self) -> bool:
        """Is there nothing more to do in the open round?"""
        news, base = self.line.news, self.round.base
        if self.line.notice or news.over or news.version > base:
            return True
        return self.sent is None and (news.called == base or self._is_due())

    def _is_due(self) -> bool:
        """Is it time to stop, so that the delta is there when the others' are?"""
        news, round_, now = self.line.news, self.round, time.monotonic()
        if news.version != round_.base:
            return False  # the master speaks of another round
        left_s = news.due - self.deliver_s - now
        return rounds.is_due(left_s, round_.steps, now - round_.started)

    @property
    def tokens_per_s(self) -> float:
        """Of the open round, as far as it is known what a step takes."""
        took_s = self.round.steps * self.step_s
        return self.round.tokens / took_s if took_s else 0.0

    @property
    def inner_steps(self) -> int:
        return rounds.inner_steps(self.commit, self.config.local_sgd)

    @property
    def progress(self) -> float:
        """How much of the run is trained, from 0 to 1, as far as this worker can tell:
        what the newest version holds, and what all workers have done since, if they do as
        much as this one.

        If the run counts epochs, samples count, whatever a loop says of tokens.
        """
        commit, own = self.commit, [done for done in (self.round, self.sent) if done]
        workers, total = max(1, commit.workers), commit.total_tokens
        samples = sum(done.sample_count for done in own)
        tokens = sum(done.tokens for done in own)
        per_sample = tokens / samples if samples else 1.0
        if commit.epochs:
            per_sample = total / (commit.epochs * commit.dataset_samples)
        # At most one full round, however long it is open.
        most = self.inner_steps * self.config.step_samples * workers * per_sample
        return (commit.tokens + min(samples * per_sample * workers, most)) / total

    # ---- samples, which rank 0 alone has

    def next_step(self, courier: Future | None = None) -> list:
        """[number of samples of the next step, the samples to come (None: as planned)].
        Empty: the round ends, or with a `courier` under way the steps ahead."""
        batch, most = self.config.step_samples, self.inner_steps
        left = (max(1, most // AHEAD) if courier else most) - self.round.steps
        if left <= 0 or self.is_over() or (courier and courier.done()):
            return []
        self.tell_new_master()
        wanted = left * batch
        if count(self.queue) < batch and not self.is_dry:
            if not self._ask(wanted - count(self.queue)):
                return []
            self.is_dry = count(self.queue) < wanted
        plan = list(self.queue) if self.queue != self._planned else None
        taken = take(self.queue, batch)
        self._planned = list(self.queue)
        self.round.samples += taken
        self._step_began = time.monotonic()
        return [count(taken), plan] if taken else []

    def _ask(self, wanted: int) -> bool:
        """Ask for samples. False: the round is over before there is an answer."""
        granted = self.line.ask(wanted, self.held(), self.is_over)
        self.queue += granted or []
        return granted is not None

    def ask_again(self) -> bool:
        """Ask for samples after a round without steps, as a lost worker's may be free by
        now. True if some came: the round is not over after all."""
        if not self._ask(self.config.step_samples) or not self.queue:
            return False
        self.round.header = None  # it said that there was nothing to give
        return True

    def held(self) -> list[Range]:
        """The samples that the ledger must not give to others; also those of offered
        deltas, which a new ledger does not know."""
        return sum([done.samples for done in (self.sent, self.round) if done], self.queue)

    def tell_new_master(self) -> None:
        """Rank 0: tell a new master which samples this worker holds. Raises ElasticError
        if the base is no more: somebody has restored an older run directory, and nothing
        that is trained on that base would ever be merged."""
        if self._told_epoch < self.line.news.epoch and not self.line.is_leaving():
            told_epoch = self.line.declare(self.held())
            if told_epoch is not None:
                self._told_epoch = told_epoch
                self.line.commit(self.round.base)


def joined(ranges: list[Range]) -> list[Range]:
    """The same positions in the same order, which a replay needs; neighbours joined."""
    result: list[Range] = []
    for epoch, start, stop in ranges:
        if result and result[-1][0] == epoch and result[-1][2] == start:
            result[-1] = (epoch, result[-1][1], stop)
        else:
            result.append((epoch, start, stop))
    return result
