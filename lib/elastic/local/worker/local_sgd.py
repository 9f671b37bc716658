"""Local SGD for one worker: the loop between the run's global parameters and any training loop.

    with elastic.LocalSGD.from_env(model, inner_optimizer) as sgd:
        for batch in sgd.batches(dataset):
            loss(model, batch).backward()
            inner_optimizer.step(); inner_optimizer.zero_grad()
            sgd.step()

A step is a step of the optimizer, on as many batches as `train.accumulate` says (`ends_step` at the
last of them). Before it the learning rate is set, unless `train.schedule` is "own". At the end the
model holds the final version, if `outcome` is "done".

`batches` is the life of a worker: adopt the newest version, train up to K inner steps on samples
leased from the ledger, deliver the delta, wait for the next version, and so on until the run is
over or a notice arrives. A round ends early, with the steps there are, when it is due (so that all
finish together), at the last call, at a notice, when the master went on without us, and when no
samples are left.

Of the ranks of a worker only rank 0 has a line to the master; it decides, the others are told.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils.data import Dataset, default_collate

from elastic.base.durable import insist, until_written
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.signals import Notice, install
from elastic.local import guards, rounds
from elastic.local.transport import Transport, fragment_name
from elastic.local.worker.courier import Courier
from elastic.local.worker.exchange import Exchange
from elastic.local.worker.link import Link, Place
from elastic.run import estimate
from elastic.run.ledger import Range, count, take
from elastic.run.records import Fragment, Header
from elastic.saved import inner_state
from elastic.saved.layout import Layout
from elastic.saved.merge import norm
from elastic.saved.replica import Replica, refuse_inexact, shapes
from elastic.saved.versions import Draft, read_layout, settle
from elastic.train import loading
from elastic.train.device import Profile, seed_by
from elastic.train.group import Group
from elastic.train.inner_optimizer import InnerOptimizer, Probe
from elastic.train.loading import Loader
from elastic.train.schedule import learning_rate, tokens_at

DRY_S = 0.5  # between two asks when no samples are free
UNSEEN_S = 120.0  # how long a filesystem may hide a version
AHEAD = 4  # of a round's steps, a quarter at most is done while its delta travels


class LocalSGD:
    def __init__(self, model, inner_optimizer, place: Place, notice: Notice, group: Group):
        self.model, self.slot = model, place.slot
        self.place, self.run, self.notice, self.group = place, place.run, notice, group
        self.config = self.run.config()
        train = self.config.train
        self.optimizer = InnerOptimizer(inner_optimizer, sets_rates=train.schedule != "own")
        self.accumulate = train.accumulate
        self.ends_step = False  # is the batch at hand the last of its step?
        self.tokens_per_sample = 1  # where step() is not told the tokens
        self.outcome = ""  # done | stopped | yielded
        self._link = Link(place, notice) if group.leads else None
        is_traced = group.leads and place.slot == 0
        self._profile = Profile(train.profile if is_traced else "", self.run.path / "profile")
        self._probe = Probe(model)
        self._told: set[str] = set()
        self._round = _Round(base=-1)
        self._queue: list[Range] = []
        self._planned: list[Range] = []  # what of it the loader has been told
        self._steps_total = 0
        self._ramp = 0  # inner steps still to go of a joiner's learning-rate ramp
        self._inner_from = ""
        self._dry = False
        self._told_epoch = -1  # the master epoch that knows what we hold
        self._bad_rounds = self._delivered = 0
        self._was_void = False  # its last delta was not merged
        self._reach = guards.Reach()  # of its own deltas
        self._strayed = False  # it has refused its last delta, and will send the next
        self._last_step_at = self._step_s = self._deliver_s = self._save_s = 0.0
        self._moves = 0  # fragments that went out or came in: a sign of life
        notice.window_s = place.notice_s
        self._sent: _Round | None = None  # on its way, with a courier
        self._ahead: _Ahead | None = None
        self._snapshots: list[torch.Tensor] = []  # kept: fresh memory costs more than the copy

    @classmethod
    def from_env(cls, model, inner_optimizer) -> "LocalSGD":
        """For a training process that elastic-agent started (`run.command`). A list of optimizers
        may train the model together, as a GAN's."""
        place = Place.from_env()
        return cls(model, inner_optimizer, place, install(), Group.here(place.world))

    def __enter__(self) -> "LocalSGD":
        if self._link:
            self._link.__enter__()
            self._link.say(state="loading")
        return self

    def __exit__(self, kind, *_exc_info) -> None:
        if self._link:
            if kind is None:
                self._link.say(end=self.outcome)
            self._link.__exit__()

    # ---- the user's side

    def batches(self, dataset: Dataset, collate: Callable = default_collate) -> Iterator:
        """Batches of the worker's samples until the run is over or a notice has come.

        All are whole: the last one of a run is filled up with samples that do not count again.
        """
        self._open(loading.check(dataset))
        is_on_gpu = next(self.model.parameters()).is_cuda
        loader = Loader(dataset, collate, self.config, self.group, is_on_gpu)
        while self._adopt_newest():
            yield from self._train(loader)
            began = time.monotonic()
            deltas = self._snapshot()
            if deltas:
                with self._send_ahead(deltas) as courier:
                    yield from self._train(loader, courier)
                    self._link.say(state="waiting")
                    while not courier.wait(DRY_S):
                        self._tell_new_master()
                self._come_back(courier)
            else:
                if self._link:
                    self._link.say(state="delivering")
                self._deliver(self._round, self._replica.delta)
                self._deliver_s = time.monotonic() - began
            self._save_inner_if_due()

    def _train(self, loader: Loader, courier=None) -> Iterator:
        """Batches of the open round; with a courier under way, until it is back."""
        while step := self.group.broadcast(self._next_step(courier) if self._link else None):
            pending, plan = step
            if plan is not None:
                loader.plan(plan)
            self._set_learning_rate()
            if self._link:
                self._link.say(state="training")  # it may have said that it waits
            self._profile.at(self._steps_total)
            round_ = self._round
            round_.pending, steps = pending, round_.steps
            if not round_.has_begun and self._last_step_at:
                round_.stall_s += time.monotonic() - self._last_step_at
            for left in reversed(range(self.accumulate)):
                self.ends_step = not left
                yield loader.next()
                if round_.steps != steps + self.ends_step:
                    raise ElasticError(
                        "sgd.step() was called before the last batch of its step" if left else
                        "sgd.step() was not called after the batch",
                        f"a step of the optimizer is {self.accumulate} batches, train.accumulate;"
                        " sgd.skip() is for one that is to have no effect",
                    )  # fmt: skip
            self._last_step_at = time.monotonic()

    def step(self, loss: torch.Tensor | float = 0.0, tokens: int | None = None) -> None:
        """An inner step is done. `tokens` it covered on this worker (default: its samples)."""
        rates = (float(group["lr"]) for group in self.optimizer.groups)
        self._count(loss, tokens, max(rates, default=0.0))

    def _count(self, loss: torch.Tensor | float, tokens: int | None, rate: float) -> None:
        done = self._round
        if tokens is None:
            tokens = done.pending * self.tokens_per_sample
        elif not (0 <= tokens < math.inf and int(tokens) == tokens):
            raise ElasticError(f"sgd.step(loss, tokens): {tokens} is no count of tokens",
                               "give the tokens of the step's batches on this worker")  # fmt: skip
        elif done.pending < self.config.step_samples:  # what filled it up does not count
            tokens = max(1, round(tokens * done.pending / self.config.step_samples))
        done.steps += 1
        done.lr_sum += rate
        done.seen += done.pending
        done.tokens += int(tokens)
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        now = time.monotonic()
        if not done.has_begun:
            done.first_loss, done.first_step, done.has_begun = value, (done.tokens, now), True
        if done.steps > 1:
            self._step_s = (now - done.first_step[1]) / (done.steps - 1)
        done.loss_sum += value
        self._steps_total += 1
        self._ramp = max(0, self._ramp - 1)
        self._look_at_optimizer()
        if self._link:
            tokens, since = done.first_step
            rate = (done.tokens - tokens) / max(now - since, 1e-9)
            self._link.say(
                state="training", version=done.base, step=done.steps, loss=value,
                steps_total=self._steps_total, tokens_per_s=round(rate, 1),
            )  # fmt: skip

    def _look_at_optimizer(self) -> None:
        self._warn(self.optimizer.contested())
        if self._probe.stepped():
            names = ", ".join(type(each).__name__ for each in self.optimizer.each)
            raise ElasticError(
                f"{names} does not train from the parameters of a version: its first step brings"
                " them back to where they were before",
                "it keeps copies of its own (master weights): give LocalSGD one without",
            )

    def _warn(self, reason: str) -> None:
        """Say it once, where people look."""
        if reason and self._link and reason not in self._told:
            self._told.add(reason)
            print(f"worker  {reason}", flush=True)
            self.run.event("warning", slot=self.slot, reason=reason)

    def skip(self) -> None:
        """The batch is to have no effect (a loss that is not finite): count it as seen."""
        self._count(self._round.mean_loss, None, rate=0.0)

    # ---- the life of a worker

    def _open(self, dataset: Dataset) -> None:
        """Find version 0, or be the worker that makes it."""
        refuse_inexact(self.model)
        self._warn(self.optimizer.untrained(self.model))
        first = self.run.told_version() < 0 if self.group.leads else None
        if self.group.broadcast(first):
            self._create_first_version(len(dataset))
        newest = self._commit_of(self.run.told_version())
        settle(self.run, newest)
        layout = read_layout(self.run, newest["version"])
        self._replica = Replica(self.model, layout)
        self._transport = Transport(self.run)
        self._exchange = Exchange(self.run, self.config, self._replica, self.group)
        self._exchange.moved = self._has_moved
        samples = newest["dataset_samples"]
        if samples != len(dataset):
            raise ElasticError(
                f"this machine's data set has {len(dataset)} samples, the run's has {samples}",
                "every worker must see the same data: the same files, the same Python",
            )
        found, mine = sum(layout.to_json(), []), shapes(self.model)
        if found not in (mine, [each for each in mine if len(each) == 2]):  # before: no buffers
            raise ElasticError(
                f"this model is not the run's: {len(mine)} parameters, the run has {len(found)}",
                "a run keeps its model; submit a new run for another one",
            )
        # Noise that workers do not share is what averaging takes out.
        seed_by(f"{self.config.run.seed}/{self.slot}/{self.place.attempt}/{self.group.rank}")

    def _has_moved(self) -> None:
        """A fragment went out or came in: for the agent and the master, which look for a hang."""
        if self._link:
            self._moves += 1
            self._link.say(moves=self._moves)

    def _create_first_version(self, samples: int) -> None:
        layout = Layout.of(shapes(self.model), self.config.local_sgd.fragment_bytes)
        replica = Replica(self.model, layout)
        draft = None
        if self.group.leads:
            draft = Draft(self.run, 0, f"slot{self.place.slot}.{self.place.attempt}")
        files = []
        for index in range(len(layout.fragments)):
            params = replica.whole(index)
            if draft:
                zeros = torch.zeros_like(params)
                files += self._written(partial(draft.write_fragment, layout, index, params, zeros))
        if draft:
            record = self._first_record(layout, samples)
            self._warn_of_short_runs(record["total_tokens"])
            self._written(lambda: draft.commit(layout, files, record))
        self.group.broadcast("version 0 is there")

    def _first_record(self, layout: Layout, samples: int) -> dict:
        train = self.config.train
        total = max(1, train.max_tokens or train.epochs * samples * self.tokens_per_sample)
        return {
            "master_epoch": 0, "time": time.time(), "tokens": 0, "samples": [], "deltas": [],
            "layout": layout.hash, "dataset_samples": samples, "epochs": train.epochs,
            "total_tokens": total, "workers": 1,
        }  # fmt: skip

    def _warn_of_short_runs(self, total_tokens: int) -> None:
        sgd, per_step = self.config.local_sgd, self.config.step_samples * self.tokens_per_sample
        steps = total_tokens / max(1, per_step * self.run.control().max)
        self._warn(estimate.too_short_for_topk(self.config, steps / sgd.inner_steps))

    def _adopt_newest(self) -> bool:
        """Wait for a version newer than the last one and load it. False: it is time to leave."""
        waited = None
        if self._link:
            waited = [*self._wait_for_version(), self._round.steps, self._was_void]
        version, outcome, steps, was_void = self.group.broadcast(waited)
        if was_void:
            self._was_void = False
            self._exchange.encoder.residuals.clear()  # most of that delta would come again
        if outcome:
            self.outcome = outcome
            self._profile.end()
            if self._round.answered and self._round.steps:
                self._leave_behind(self._round)
            if outcome == "done":
                self._load_final()
            elif self._steps_total:
                self._save_inner()
            return False
        if version == self._round.base:
            if not steps:  # a no-op unless the last round was void, which rank 0 has found out
                self._round = self._round if self._link else _Round(base=version)
                self._replica.restore()
            return True
        commit = self._commit_of(version)
        self._probe.before(self._steps_total and self._round.steps)
        while trouble := [each for each in self.group.gather(self._load(commit)) if each]:
            before, newest = version, self.run.told_version() if self._link else None
            if (version := self.group.broadcast(newest)) <= before:
                raise ElasticError(trouble[0])
            commit = self._commit_of(version)  # it was pruned: this worker slept, or its master
        if self._round.base < 0:
            self._adopt_inner_state(version)
        else:
            self._heed_what_was_taken_back(version)
        if self._round.steps:
            self._bad_rounds = 0
        if version > self._round.base + 1:
            self._queue.clear()  # others may have it by now; what is free is asked for again
        self._probe.placed()
        self._commit = commit
        self._round = self._after_ahead(version)
        if self._link:
            self._link.say(state="training", version=version, step=0)
        return True

    def _load_final(self) -> None:
        """The run is done: what comes after the loop finds its last version in the model."""
        self._ahead = None
        version = self.group.broadcast(self.run.told_version() if self._link else None)
        if trouble := self._load(self._commit_of(version)):
            raise ElasticError(trouble)

    def _heed_what_was_taken_back(self, version: int) -> None:
        """Versions up to this one may have taken others back, and say whose moments are suspect."""
        for each in map(self._commit_of, range(self._round.base + 1, version + 1)):
            if "taken_back" in each:
                self._exchange.encoder.residuals.clear()
                if each.get("suspect") == [self.place.slot, self.place.attempt]:
                    self._ramp = self.config.local_sgd.join_ramp
                    self.optimizer.forget()

    def _commit_of(self, version: int) -> dict:
        """Of a version that somebody has seen: on NFS others may see it only half a minute later.
        Raises ElasticError after two."""
        until = time.monotonic() + UNSEEN_S
        while (commit := self.run.commit(version)) is None:
            if self.notice or time.monotonic() > until:
                raise ElasticError(f"version {version} is announced, and not to be seen here",
                                   f"is {self.run.path} the same folder on all nodes?")  # fmt: skip
            if self._link:
                self._link.say(state="loading")
            time.sleep(DRY_S)
        return commit

    def _load(self, commit: dict) -> str:
        """Load a version's parameters. Returns why it cannot be; empty if it was."""
        ahead = self._ahead
        try:
            fetched = ahead.fetched.get(commit["version"]) if ahead else None
            if ahead and ahead.round.steps:  # all of it first: no rebase by halves
                self._exchange.rebase(ahead.deltas, fetched or self._exchange.fetch(commit))
            else:
                self._exchange.adopt(commit, fetched)
        except ElasticError as error:
            return str(error)
        return ""

    def _wait_for_version(self) -> tuple[int, str]:
        """Rank 0: (newest version, "") once there is one to train on, or (-1, outcome) to leave."""
        link, base = self._link, self._round.base
        if base >= 0:
            link.say(state="waiting")
        while True:
            news = link.wait(lambda n: n.version > base or n.over, DRY_S)
            if self.notice:
                return -1, "yielded"
            if news.over:
                return -1, "done" if news.state == "done" else "stopped"
            if news.version > base:
                return news.version, ""
            if base >= 0 and self._may_go_on():
                return base, ""

    def _may_go_on(self) -> bool:
        """Is there something to do on the same base? Brings a forgotten offer again, too."""
        round_, link = self._round, self._link
        if not round_.answered:
            return True
        self._tell_new_master()
        if not self._stands(round_):
            self._void_round("were rejected")  # the samples are others' by now
            return True
        if round_.steps or self._round_is_over():
            return False
        # It was dry: samples of a lost worker may have come back.
        granted = link.ask(self.config.step_samples, self._queue, self._round_is_over)
        if granted is None:
            return False
        self._queue += granted
        round_.answered = not self._queue
        return not round_.answered

    def _stands(self, round_: "_Round") -> bool:
        """Was its delta not rejected? One that a new server has never heard of is brought again."""
        place, link = self.place, self._link
        offered = link.reach(lambda s: s.offered(place.slot, place.attempt, round_.base))
        verdict = link.reach(lambda s: s.take_verdict(place.slot, place.attempt))
        if verdict and verdict["base"] == round_.base and round_.steps:
            print(f"worker  delta rejected: {verdict['reason']}", flush=True)
            if verdict.get("rule") == rounds.Rule.SAMPLES:
                self._queue.clear()  # what came with them is others' as well
            return False
        if not offered and link.refresh().version <= round_.base and not link.news.over:
            self._offer(round_)
        return True

    def _void_round(self, what: str) -> None:
        """This round's steps are void: train from the base again."""
        self._round, self._was_void = _Round(base=self._round.base), True
        self._bad_rounds += 1
        if self._bad_rounds > self.config.health.max_bad_batches:
            raise ElasticError(
                f"{self._bad_rounds} deltas in a row {what}",
                "elastic-status shows the reasons; lower train.learning_rate, or look at the data",
            )

    # ---- samples

    @property
    def _inner_steps(self) -> int:
        return rounds.inner_steps(self._commit, self.config.local_sgd)

    def _next_step(self, courier: Courier | None = None) -> list:
        """Rank 0: how many samples the next step has, and the samples to come where that is news;
        empty ends the round, or the steps ahead."""
        batch = self.config.step_samples
        most = self._inner_steps
        left = (max(1, most // AHEAD) if courier else most) - self._round.steps
        if left <= 0 or self._round_is_over() or (courier and courier.is_back):
            return []
        self._tell_new_master()
        if count(self._queue) < batch and not self._dry:
            want = left * batch - count(self._queue)
            granted = self._link.ask(want, self._held(), self._round_is_over)
            if granted is None:
                return []
            self._queue += granted
            self._dry = count(granted) < want
        plan = list(self._queue) if self._queue != self._planned else None
        taken = take(self._queue, batch)
        self._planned = list(self._queue)
        self._round.samples += taken
        return [count(taken), plan] if taken else []

    def _held(self) -> list[Range]:
        """What the ledger must not give to others; a new one does not know what was offered."""
        rounds_ = [each for each in (self._sent, self._round) if each]
        return self._queue + [each for round_ in rounds_ for each in round_.samples]

    def _tell_new_master(self) -> None:
        """What this worker holds. It may know what the master does not yet: a newer version; but if
        that is gone, put back to what it was by hand, say, nobody would ever merge what it does."""
        if self._told_epoch < self._link.news.epoch:
            self._told_epoch = self._link.declare(self._held())
            self._commit_of(self._round.base)

    def _round_is_over(self) -> bool:
        news = self._link.news
        base = self._round.base
        if self.notice or news.over or news.version > base:
            return True
        return self._sent is None and (news.called == base or self._is_due())

    def _is_due(self) -> bool:
        """Time to stop, so that the delta is there when the others' are?"""
        news, round_, now = self._link.news, self._round, time.monotonic()
        if news.version != round_.base:
            return False  # the master speaks of another round
        left_s = news.due - self._deliver_s - now
        return rounds.is_due(left_s, round_.steps, now - round_.started)

    def _set_learning_rate(self) -> None:
        settings, ramp_steps = self.config.train, self.config.local_sgd.join_ramp
        if not self.optimizer.sets_rates:
            return
        factor = learning_rate(self.progress, 1.0, settings) / settings.learning_rate
        if self._ramp:
            factor *= (ramp_steps - self._ramp + 1) / ramp_steps
        self.optimizer.set_rates(factor)

    @property
    def progress(self) -> float:
        """How much of the run is trained, from 0 to 1, as far as this worker can tell: what the
        newest version holds, and by its own steps since what the others have done.

        By epochs it is samples that count, whatever a loop says of tokens.
        """
        commit, rounds_ = self._commit, [each for each in (self._round, self._sent) if each]
        workers, total = max(1, commit["workers"]), commit["total_tokens"]
        seen, tokens = sum(r.seen for r in rounds_), sum(r.tokens for r in rounds_)
        each = tokens / seen if seen else 1.0
        if commit["epochs"]:
            each = total / (commit["epochs"] * commit["dataset_samples"])
        most = self._inner_steps * self.config.step_samples * workers
        return tokens_at(commit["tokens"], seen * each, workers, most * each) / total

    # ---- the delta

    def _deliver(self, round_: "_Round", delta_of: Callable[[int], torch.Tensor]) -> None:
        """Send base - local with the steps there are. Collective among the worker's ranks."""
        self._dry, said, began = False, None, time.monotonic()
        if self._link:
            said = [bool(self.notice) or self._link.news.over, self._is_too_late(round_)]
        round_.is_last, is_too_late = self.group.broadcast(said)
        if is_too_late:
            return
        fragments = []
        if round_.steps:
            fragments = self._send_fragments(round_, delta_of)
        if self._link and fragments is not None:
            round_.header = self._header(round_, fragments)
            self._offer(round_)
            round_.answered = True
            if round_.steps:
                self._delivered += 1
                needs_s = self._step_s + time.monotonic() - began + self._save_s
                self._link.say(delivered=self._delivered, needs_s=round(needs_s, 1))

    def _is_too_late(self, round_: "_Round") -> bool:
        """Rank 0: would the delta be refused as stale? Then its bytes stay here."""
        base, behind = round_.base, self._link.news.version - round_.base
        if not round_.steps or behind <= self.config.local_sgd.max_staleness:
            return False
        reason = f"stale: based on version {base}, {behind} behind"
        self.run.event("reject", slot=self.place.slot, attempt=self.place.attempt, base=base,
                       rule=rounds.Rule.STALE, reason=reason)  # fmt: skip
        return True

    def _send_fragments(self, round_: "_Round", delta_of: Callable) -> list | None:
        """Encode and store every fragment; None, and back to the base, if it is no good."""
        key = (self.place.slot, self.place.attempt, round_.base)

        def put(index: int, data: memoryview) -> Fragment:
            return self._put(fragment_name(key, index), data)

        fragments, length = self._exchange.send(delta_of, round_.is_last, put)
        moved = guards.Moved(length, round_.steps, round_.lr_sum)
        reason = self._why_not_sent(moved)
        if 2 * round_.steps >= self._inner_steps and math.isfinite(length):
            self._reach = self._reach.after([moved])
        self._strayed = bool(reason)
        if reason:
            self._drop_delta(round_, reason)
            return None
        return fragments

    def _why_not_sent(self, moved: guards.Moved) -> str:
        """A delta that is too long is trained again; one that comes out so again is sent."""
        return guards.stray(moved, guards.Reach() if self._strayed else self._reach)

    def _put(self, name: str, data: memoryview) -> Fragment:
        """Store a fragment's bytes; a full disk is waited out. Raises TryAgain at a notice."""
        if self._link and not self._sent:  # else it trains on, and tells by itself
            self._tell_new_master()
        return self._written(partial(self._transport.put, name, data))

    def _written(self, write: Callable):
        say = self._link.say if self._link else lambda **_said: None
        return until_written(
            write, self.notice.has_run_out, lambda e: say(state="blocked", trouble=str(e))
        )

    def _drop_delta(self, round_: "_Round", reason: str) -> None:
        """Never sent: back to the base, with fresh moments, and its samples again."""
        self._exchange.encoder.residuals.clear()
        if self._link:
            self.run.event("reject", slot=self.place.slot, reason=reason, base=round_.base)
            self._queue = round_.samples + self._queue
        self._replica.restore()
        self.optimizer.forget()
        self._ramp = self.config.local_sgd.join_ramp
        self._void_round("were no good")

    def _header(self, done: "_Round", fragments: list) -> Header:
        place = self.place
        return Header(
            run=self.run.key, slot=place.slot, attempt=place.attempt, job_id=place.job_id,
            base=done.base, layout=self._replica.layout.hash,
            codec=self._exchange.encoder.chosen(done.is_last).name,
            steps=done.steps, tokens=done.tokens, samples=tuple(_joined(done.samples)),
            loss=done.mean_loss, first_loss=done.first_loss, fragments=tuple(fragments),
            inner=self._inner_from, seconds=round(time.monotonic() - done.started, 3),
            stall_s=round(done.stall_s, 4), lr_sum=done.lr_sum,
        )  # fmt: skip

    def _leave_behind(self, done: "_Round") -> None:
        """What has been delivered outlives the master's Redis: nobody will offer it again."""
        with contextlib.suppress(OSError):
            self.run.leave_offer(done.header)

    def _offer(self, round_: "_Round") -> None:
        """Announce a delta, now or again."""
        slot, attempt, header = self.place.slot, self.place.attempt, round_.header.to_json()
        self._link.offer(lambda store: store.offer(slot, attempt, round_.base, header))

    # ---- training on while the delta travels

    def _snapshot(self) -> list[torch.Tensor]:
        """The deltas, to be sent while training goes on; none where that is not to be."""
        if self.config.local_sgd.overlap == "off" or not self._round.steps:
            return []
        if self.notice or self._link.news.over or self._link.news.version > self._round.base:
            return []
        if not self._snapshots:
            self._snapshots = [torch.empty(numel) for numel in self._replica.layout.numels]
        deltas = [self._replica.delta(i, into) for i, into in enumerate(self._snapshots)]
        judged = (norm(each) for i, each in enumerate(deltas)
                  if not self._replica.layout.has_buffers(i))  # fmt: skip
        moved = guards.Moved(math.hypot(*judged), self._round.steps, self._round.lr_sum)
        return [] if self._why_not_sent(moved) else deltas

    def _send_ahead(self, deltas: list[torch.Tensor]) -> Courier:
        sent = self._sent = self._round
        self._round = _Round(sent.base)
        self._ahead = _Ahead(self._round, deltas)
        return Courier(
            lambda: self._deliver(sent, deltas.__getitem__), lambda: self._bring_version(sent)
        )

    def _bring_version(self, sent: "_Round") -> dict[int, list[torch.Tensor]]:
        """In the courier's thread: wait for the next version, and read it. Empty: there is none
        to come, or the delta was rejected."""
        link = self._link
        while sent.answered and not (self.notice or link.news.over):
            version = link.wait(lambda n: n.version > sent.base or n.over, DRY_S).version
            if version > sent.base:
                with contextlib.suppress(ElasticError):
                    return {version: self._exchange.fetch(self._commit_of(version))}
                break  # pruned meanwhile, or damaged: who adopts it finds out
            if not self._stands(sent):
                sent.is_void = True
                break
        return {}

    def _come_back(self, courier: Courier) -> None:
        """The delta is delivered, and maybe the next version here: adopt it at this step."""
        ahead, self._round, self._sent = self._round, self._sent, None
        self._ahead.fetched = courier.brought
        if self._round.is_void:
            self._queue = ahead.samples + self._queue
            self._ahead = None
            self._void_round("were rejected")

    def _after_ahead(self, version: int) -> "_Round":
        """The round on top of a version just adopted, with the steps ahead."""
        round_, ahead, self._ahead = _Round(version), self._ahead, None
        if ahead:
            round_.stall_s = ahead.round.stall_s
        if ahead and ahead.round.steps:
            before = ahead.round
            round_.steps, round_.tokens, round_.seen = before.steps, before.tokens, before.seen
            round_.lr_sum = before.lr_sum
            round_.samples, round_.loss_sum = before.samples, before.loss_sum
            round_.started = before.started
        return round_

    # ---- inner state

    def _adopt_inner_state(self, version: int) -> None:
        pointer, origin = None, "fresh"
        if self._link:
            offered = self._link.reach(lambda s: s.inner())
            oldest = self.config.local_sgd.inner_state_max_age
            pointer, origin = inner_state.choose(
                self.run, self.place.slot, offered, version, oldest
            )
        pointer, origin = self.group.broadcast([pointer, origin])
        if pointer:
            own = pointer["slot"] == self.place.slot
            left_out: dict[int, torch.Tensor] = {}
            refused = inner_state.load(
                self.run, pointer, self.optimizer.each, self.group.rank, left_out if own else None
            )
            if not self._delivered_after(pointer["version"], version):
                self._exchange.encoder.residuals = left_out
            if any(self.group.gather(refused)):
                self.optimizer.forget()
                pointer, origin = None, f"fresh: {refused}"
        if pointer is None and version > 0:
            self._ramp = self.config.local_sgd.join_ramp
        self._inner_from = f"{origin} with a ramp" if self._ramp else origin

    def _delivered_after(self, base: int, newest: int) -> bool:
        """Is a later delta of the slot committed? It took along what was left out at `base`."""
        later = (self.run.commit(version) for version in range(base + 2, newest + 1))
        slot = self.place.slot
        return any(delta["slot"] == slot for commit in later for delta in commit["deltas"])

    def _save_inner_if_due(self) -> None:
        every = self.config.local_sgd.inner_state_every
        leaving = self.group.broadcast(bool(self.notice) if self._link else None)
        if not leaving and every and self._round.steps and self._round.base % every == 0:
            self._save_inner()

    def _save_inner(self) -> None:
        """Save the state after this round's steps. Collective; a failure costs only a ramp."""
        place, version, began = self.place, self._round.base, time.monotonic()
        try:
            entry = insist(
                inner_state.save, self.run.slot_path(place.slot),
                f"inner-{version:06d}.{place.attempt}", self.optimizer.each, self.group.rank,
                self._exchange.encoder.residuals,
            )  # fmt: skip
        except (OSError, TryAgain) as error:
            entry = None
            self.run.event("inner-state", slot=place.slot, reason=f"not saved: {error}")
        except inner_state.UNFIT as error:
            entry = None
            self._warn(f"the optimizer's state is not saved, a restart begins it anew: {error}")
        entries = self.group.gather(entry)
        self._save_s = time.monotonic() - began
        # A successor has saved its own, or will.
        if self._link and all(entries) and self.run.latest_attempt(place.slot) == place.attempt:
            # Not announced, the slot's own file is there all the same.
            with contextlib.suppress(OSError, TryAgain):
                who = (place.slot, place.attempt)
                pointer = insist(inner_state.publish, self.run, *who, version, entries)
                self._link.reach(lambda s: s.set_inner(place.slot, pointer))


class _Round:
    """What this worker has done since it adopted `base`."""

    def __init__(self, base: int):
        self.base = base
        self.steps = self.tokens = self.seen = self.pending = 0  # seen: samples, as pending
        self.samples: list[Range] = []
        self.loss_sum = self.lr_sum = 0.0
        self.first_loss = self.stall_s = 0.0
        self.first_step = (0, 0.0)  # tokens and time at its end
        self.has_begun = False  # a step was done on this base
        self.answered = self.is_last = self.is_void = False
        self.header: Header | None = None
        self.started = time.monotonic()

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.steps if self.steps else 0.0


class _Ahead:
    """Steps that were done on an older base while its delta travelled."""

    def __init__(self, round_: _Round, deltas: list[torch.Tensor]):
        self.round, self.deltas = round_, deltas
        self.fetched: dict[int, list[torch.Tensor]] = {}  # version -> its fragments


def _joined(ranges: list[Range]) -> list[Range]:
    """The same positions in the same order, neighbours joined."""
    joined: list[Range] = []
    for epoch, start, stop in ranges:
        if joined and joined[-1][0] == epoch and joined[-1][2] == start:
            joined[-1] = (epoch, joined[-1][1], stop)
        else:
            joined.append((epoch, start, stop))
    return joined
