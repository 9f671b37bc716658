"""Local SGD for one worker: between the run's global parameters and any training loop.

    with elastic.LocalSGD.from_env(model, inner_optimizer) as sgd:
        for batch in sgd.batches(dataset):
            value = loss(model, batch)
            value.backward()
            inner_optimizer.step(); inner_optimizer.zero_grad()
            sgd.step(value)

A step is a step of the optimizer, on as many batches as `train.accumulate` says
(`ends_step` at the last of them). Before it the learning rate is set, unless
`train.schedule` is "own". At the end the model holds the final version, if `outcome` is
"done".

`batches` is the life of a worker: adopt the newest version, train up to K inner steps on
samples leased from the ledger, deliver the delta, wait for the next version, and so on
until the run is over or a notice arrives. A round ends early, with the steps there are,
when it is due (so that all finish together), at the last call, at a notice, when the
master went on without us, and when no samples are left.

Of the ranks of a worker only rank 0 has a line to the master; it decides, the others are
told. What the worker knows is in in_hand.py; deliver.py, adopt.py and moments.py do what
is done in a round.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import torch
from torch.utils.data import Dataset, default_collate

from elastic.base.config import Config
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.signals import Notice, install
from elastic.jobs.slurm_info import kill_at
from elastic.local.worker.adopt import Adoption, layout_of_run
from elastic.local.worker.deliver import Delivery
from elastic.local.worker.exchange import Exchange
from elastic.local.worker.in_hand import InHand
from elastic.local.worker.line import LOOK_S, Line, Place, RankLine
from elastic.local.worker.moments import Moments
from elastic.local.worker.validation import Validation
from elastic.run.records import Outcome
from elastic.saved.replica import Replica, Statistics, refuse_inexact
from elastic.train import loading
from elastic.train.device import seed_by, to_device
from elastic.train.group import Group
from elastic.train.inner_optimizer import InnerOptimizer, refuse_odd


class LocalSGD:
    def __init__(self, model, optimizer, place: Place, notice: Notice, group: Group):
        self.model, self.group, self.place = model, group, place
        config = place.run.config()
        self.optimizer = InnerOptimizer(optimizer, sets_rates=config.train.schedule != "own")
        self.ends_step = False  # is the batch at hand the last of its step?
        self.tokens_per_sample = 1  # counts if step() is not told the tokens
        self.outcome = ""  # at the end: done | stopped | yielded
        notice.window_s, notice.ask = place.notice_s, kill_at
        self.line = Line(place, notice) if group.leads else RankLine(place, notice)
        self._hand = InHand(self.line, config)
        self._last_step_at = 0.0
        self._statistics = Statistics(model)
        self._validation: Validation | None = None

    @classmethod
    def from_env(cls, model, inner_optimizer) -> "LocalSGD":
        """For a training process that an agent started (`run.command`). A list of
        optimizers may train the model together, as a GAN's."""
        place, device = Place.from_env(), next(model.parameters()).device
        return cls(model, inner_optimizer, place, install(), Group.here(place.world, device))

    def __enter__(self) -> "LocalSGD":
        self.line.open()
        self.line.say(state="loading")
        return self

    def __exit__(self, kind, *_exc_info) -> None:
        if kind is None:
            self.line.say(end=self.outcome)
        elif issubclass(kind, TryAgain):  # a filesystem was silent for as long as it could wait
            self._leave_offers()
        self.line.close()

    @property
    def slot(self) -> int:
        return self.place.slot

    @property
    def config(self) -> Config:
        return self._hand.config

    @property
    def accumulate(self) -> int:
        """Batches of a step."""
        return self.config.train.accumulate

    @property
    def expected_tokens(self) -> float:
        """Of this rank's batches of a step, with those that fill them up."""
        return self.config.step_samples * self.tokens_per_sample / self.group.world

    @property
    def progress(self) -> float:
        """How much of the run is trained, from 0 to 1, as far as this worker can tell:
        before the first batch, nothing."""
        return self._hand.progress if self._hand.commit else 0.0

    def validate_by(self, task) -> None:
        """Let `task.validate(model)`, which returns numbers by name, score versions, as
        often as `train.validate_every` says."""
        self._validation = Validation(self._hand, task, self.group, self.slot)

    # ---- the life of a worker

    def batches(self, dataset: Dataset, collate: Callable = default_collate) -> Iterator:
        """Batches of the worker's samples until the run is over or a notice has come, on
        the device of the model's parameters.

        All are whole: the last one is filled up with samples that do not count again.
        """
        device = next(self.model.parameters()).device
        return (to_device(batch, device) for batch in self.batches_on_cpu(dataset, collate))

    def batches_on_cpu(self, dataset: Dataset, collate: Callable = default_collate) -> Iterator:
        """The same batches on the CPU, where they were loaded."""
        if self._hand.commit and not self.outcome:
            once = "iterate over it once; what is to be done now and then belongs into that loop"
            raise ElasticError("sgd.batches() was left before the run was over", once)
        self.open(loading.check(dataset))
        if self.place.progress_fd >= 0:  # else there is no agent, which would send notices
            with contextlib.suppress(ValueError):  # only the main thread may listen
                self.line.notice.listen()
        is_on_gpu = next(self.model.parameters()).is_cuda
        loader = loading.Loader(dataset, collate, self.config, self.group, is_on_gpu)
        while not (outcome := self._adoption.newest()):
            if self._validation:
                self._validation.if_due(self._delivery.exchange.replica)
            yield from self._train(loader)
            if courier := self._delivery.send_ahead():
                yield from self._train_ahead(loader, courier)
            else:
                self.line.say(state="delivering")
                self._delivery.deliver(self._hand.round)
            self._moments.save_if_due()
        self._leave(outcome)

    def open(self, dataset: Dataset) -> None:
        """Refuse what cannot be averaged, find version 0 or make it, and build what the
        rounds need."""
        refuse_inexact(self.model)
        refuse_odd(self.model, self.optimizer.each)
        for doubt in self.optimizer.doubts(self.model):
            self.line.warn(doubt)
        layout = layout_of_run(
            self.line, self.group, self.model, len(dataset), self.tokens_per_sample
        )
        replica, moved = Replica(self.model, layout), self.line.moved
        exchange = Exchange(self.place.run, self.config, replica, self.group, moved)
        self.train_with(exchange, Moments(self._hand, exchange, self.optimizer))
        # Another seed for each worker: only noise that they do not share is averaged out.
        seed_by(f"{self.config.run.seed}/{self.slot}/{self.place.attempt}/{self.group.rank}")

    def train_with(self, exchange: Exchange, moments: Moments) -> None:
        """Take these from now on, to move tensors and to keep inner state. Tests, too,
        put in theirs by this."""
        self._moments = moments
        self._delivery = Delivery(self._hand, exchange, moments)
        self._adoption = Adoption(self._hand, moments, self._delivery, self.model)

    def _train_ahead(self, loader: loading.Loader, courier: Future) -> Iterator:
        """Batches while a courier is under way with the delta."""
        yield from self._train(loader, courier)
        self.line.say(state="waiting")
        while wait([courier], LOOK_S).not_done:
            self._hand.tell_new_master()
        self._delivery.come_back(*courier.result())

    def _leave(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._leave_offers()
        if outcome is Outcome.DONE:
            self._adoption.final()
        elif self._hand.steps_total:
            self._moments.save()

    def _leave_offers(self) -> None:
        """Leave the headers in the run directory, for a master with a new Redis: this
        worker will not offer the deltas again."""
        for done in (self._hand.sent, self._hand.round):
            if self.group.leads and done and done.header and done.steps:
                self.place.run.offers.leave(done.header)

    # ---- steps

    def _train(self, loader: loading.Loader, courier: Future | None = None) -> Iterator:
        """Batches of the open round; with a courier under way, until it is back."""
        hand = self._hand
        while step := self.group.decide(lambda: hand.next_step(courier)):
            hand.round.pending, plan = step
            if plan is not None:
                loader.plan(plan)
            self._moments.set_rates()
            self.line.say(state="training")  # it may have been waiting
            if not hand.round.has_stepped and self._last_step_at:
                hand.round.stall_s += time.monotonic() - self._last_step_at
            yield from self._batches_of_step(loader)
            self._last_step_at = time.monotonic()

    def _batches_of_step(self, loader: loading.Loader) -> Iterator:
        done = self._hand.round
        before = done.steps
        self._statistics.note()
        for left in reversed(range(self.accumulate)):
            self.ends_step = not left
            yield loader.next()
            if (calls := done.steps - before) != self.ends_step:
                batch = f"batch {self.accumulate - left} of {self.accumulate} (train.accumulate)"
                hint = "once, after the last batch of a step; sgd.skip() if it is to have no effect"
                raise ElasticError(f"sgd.step() was called {calls} times up to {batch}", hint)

    def step(self, loss: torch.Tensor | float = 0.0, tokens: int | None = None) -> None:
        """An inner step is done, on `tokens` of this rank's batches (default: its
        samples). All ranks call it alike."""
        rates = (float(group["lr"]) for group in self.optimizer.groups)
        self._count(loss, tokens, max(rates, default=0.0))

    def skip(self) -> None:
        """Count a batch whose gradient is not finite, so that it is to have no effect: it
        was seen, and weighs nothing."""
        self._count(math.nan, 0, rate=0.0)
        self._statistics.put_back()
        self.line.warn("a step was skipped, as for a gradient that is not finite: its samples"
                       " are left out")

    def _count(self, loss: torch.Tensor | float, tokens: int | None, rate: float) -> None:
        if not self._hand.commit:
            raise ElasticError("sgd.step() without a batch", "iterate over sgd.batches(dataset)")
        loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        hand, own, has_loss = self._hand, self._own_tokens(tokens), math.isfinite(loss)
        loss, losses, tokens = self.group.sum(loss if has_loss else 0.0, has_loss, own)
        loss = loss / losses if losses else math.nan
        # Samples that have filled up the run's last batch do not count. A step of nothing
        # but padding counts as one token: a delta without tokens would be none.
        tokens = max(1, round(tokens * hand.round.pending / self.config.step_samples))
        hand.count(loss, tokens, rate, time.monotonic())
        self.line.warn(self.optimizer.contested())
        self._adoption.probe.check(self.optimizer.each)
        self.line.say(
            state="training", version=hand.round.base, step=hand.round.steps,
            loss=loss if losses else hand.round.mean_loss, steps_total=hand.steps_total,
            step_s=round(hand.step_s, 3), tokens_per_s=round(hand.tokens_per_s, 1),
        )

    def _own_tokens(self, told: int | None) -> float:
        """The tokens of this rank's batches of the step, with those that fill them up."""
        if told is None:
            return self.expected_tokens
        if not (0 <= told < math.inf and int(told) == told):
            raise ElasticError(f"sgd.step(loss, tokens): {told} is no count of tokens",
                               "give those of the step's own batches")
        return float(told)
