"""Local SGD in one process, without a clock: what a run's commits say, done again.

    commits of a run ──▶ Simulator.replay ──▶ the parameters of every version, bit for bit
    commits made up  ──▶ Simulator.replay ──▶ what that participation would have led to

A trace is a list of commits. Of each delta it needs slot, attempt, base, steps, the samples in the
order they were trained, and where the inner state came from; everything else follows. A delta that
is made up may also say which samples its worker trained `ahead`, while it travelled; the worker's
next delta begins with them. The worker's training loop, replica, codec, shuffle and schedule, and
the merging, are the product's own. The life of a worker and of the master are not: they are stated
here a second time, as the algorithm has them, so that a run and its replay agree only if the
processes did nothing else.

A fault is a subclass that overrides one of the small methods without an underscore. A delta whose
inner state depends on work that no commit shows cannot be replayed: `Untold`.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils.data import default_collate

from elastic.base.config import Config
from elastic.local import rounds
from elastic.local.rounds import Running
from elastic.local.worker.worker import train
from elastic.run import shuffle
from elastic.run.ledger import Range
from elastic.run.records import Commit, Delta as Merged
from elastic.run.rundir import RunDir
from elastic.saved import merge
from elastic.saved.codec import CODECS, codec_of
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.train.device import choose_device, seed_by
from elastic.train.group import Group
from elastic.train.optimizers import optimizer_of
from elastic.train.schedule import share_of_peak
from elastic.train.task import count_tokens
from helpers import commit_of
from merging import Outer, decoded, read_outer, step

RAMPED = " with a ramp"  # how a delta's `inner` ends where the learning rate rose from nothing
ORIGIN = re.compile(r"own of version (\d+)")

Key = tuple[int, int, int]  # slot, attempt, base
Done = tuple[int, int, float]  # steps, tokens and sum of learning rates since a base


class Untold(Exception):
    """The trace does not say what a delta was made from."""


@dataclass
class Ahead:
    """Steps that were done on an older base while a delta travelled; by default none."""

    done: Done = (0, 0, 0.0)
    base: list[torch.Tensor] = field(default_factory=list)  # its published fragments
    sent: list[torch.Tensor] = field(default_factory=list)  # the delta, before it was encoded
    params: list[torch.Tensor] = field(default_factory=list)  # float32 fragments, after the steps


@dataclass
class Inner:
    """A worker's inner state between rounds."""

    state: list[dict]  # of the inner optimizer, per parameter; empty: fresh
    rng: torch.Tensor
    ramp: int = 0  # inner steps still to go
    ahead: Ahead = field(default_factory=Ahead)


@dataclass(frozen=True)
class Delta:
    """What `rounds` reads of a delta's header, and the decoded fragments."""

    slot: int
    attempt: int
    base: int
    steps: int
    tokens: int
    lr_sum: float
    fragments: list[torch.Tensor] = field(repr=False)
    norm: float

    @property
    def key(self) -> Key:
        return (self.slot, self.attempt, self.base)


@dataclass(frozen=True, kw_only=True)
class Planned(Merged):
    """One that is made up: nobody says its tokens, but what of it was trained `ahead`."""

    tokens: int | None = None
    ahead: tuple[Range, ...] = ()


@dataclass
class Version:
    """What there is of a version: workers see what is published."""

    params: list[torch.Tensor]  # float32 fragments
    published: list[torch.Tensor]  # bf16
    tokens: int
    workers: int
    steps: int  # K of the round on top


@dataclass
class Start:
    """Version 0: what a run is before its first round."""

    params: list[torch.Tensor]  # float32 fragments
    tokens: int = 0
    workers: int = 1
    inner: Inner | None = None  # of a worker whose inner state is from the "start"; None: fresh


class Script:
    """Stands in for LocalSGD: hands the worker's own training loop the batches it is given."""

    group, ends_step, tokens_per_sample = Group(), True, 1

    def __init__(self, config: Config, batches: list[list[int]], prepare):
        self.config, self._batches, self._prepare = config, batches, prepare
        self.steps = self.tokens = self._pending = 0
        self.lr_sum = self._rate = 0.0

    def batches_on_cpu(self, dataset) -> Iterator:
        for indices in self._batches:
            self._pending, self._size = sum(index >= 0 for index in indices), len(indices)
            self._rate = self._prepare(self.steps, self.tokens)
            yield default_collate([dataset[max(index, ~index)] for index in indices])

    @property
    def expected_tokens(self) -> float:
        return self._size * self.tokens_per_sample

    def step(self, _loss=0.0, tokens: int | None = None) -> None:
        self.lr_sum += self._rate
        self.steps += 1
        tokens = self._size * self.tokens_per_sample if tokens is None else tokens
        self.tokens += round(tokens * self._pending / self._size)

    def skip(self) -> None:
        self._rate = 0.0
        self.step()


class Simulator:
    """The global parameters, and the inner state of everybody who trained them."""

    def __init__(self, task, config: Config, start: Start, samples: int, total_tokens: int):
        self.task, self.config, self.samples = task, config, samples
        self.total_tokens, self.start = total_tokens, start
        self.device = choose_device(config)
        self.model = seeded_model(task, config).to(self.device)
        layout = Layout.of(shapes(self.model), config.local_sgd.fragment_bytes)
        self.replica = Replica(self.model, layout)
        self.optimizer = optimizer_of(task, self.model, config.train)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        params = [param.clone() for param in start.params]
        momentum = [torch.zeros_like(param) for param in params]
        self.outer = Outer(layout, params, momentum, config.local_sgd.outer_momentum)
        self.running = Running()
        self._sample_tokens = count_tokens(task, default_collate([task.dataset()[0]]))
        self.version, self.clipped = 0, 0
        self.versions = {0: self._publish(start.tokens, start.workers)}
        self._codec = CODECS[config.local_sgd.compression]
        self._inner: dict[Key, Inner] = {}  # after a delta
        self._trained: dict[Key, Delta] = {}  # and not merged yet
        self._untrained: dict[Key, Merged] = {}

    @classmethod
    def of(cls, run: RunDir, task) -> "Simulator":
        """At version 0 of a run."""
        first, config = run.commits.of(0), run.config()
        params = read_outer(run, first, config.local_sgd.outer_momentum).params
        start = Start(params, first.tokens, first.workers)
        return cls(task, config, start, first.dataset_samples, first.total_tokens)

    def replay(self, commits: Iterable[Commit]) -> Iterator[int]:
        """Do again what `commits` (of versions 1, 2 ...) say; yields each version when it is."""
        commits = list(commits)
        for commit in commits:
            self._untrained |= {_key(work): work for work in commit.deltas}
        for commit in commits:
            self._merge([self._delta(_key(work)) for work in commit.deltas])
            yield self.version

    def validate(self) -> dict[str, float]:
        """What the task says of the published parameters of the newest version."""
        self.adopt(self.versions[self.version].published)
        return self.task.validate(self.model)

    def inner(self, slot: int) -> Inner:
        """The newest inner state of a slot."""
        return self._newest(slot, self.version, 0, math.inf)

    # ---- the worker

    def _delta(self, key: Key) -> Delta:
        """Train the delta, unless another one needed its inner state before."""
        if key not in self._trained:
            self._trained[key] = self._train(self._untrained.pop(key))
        return self._trained.pop(key)

    def _train(self, work: Merged) -> Delta:
        inner = self.inner_before(work)
        before = self._start_from(work, inner.ahead)
        for param, state in zip(self._params(), inner.state, strict=False):
            self.optimizer.state[param] = state
        torch.set_rng_state(inner.rng)
        done = self._run(work, inner, self._batches(work)[before[0] :], before)
        steps, tokens, lr_sum = done
        sent = [self.delta(work, index) for index in range(len(self.outer.params))]
        fragments = self._arrived(sent)
        inner.ahead = self._go_ahead(work, inner, sent, done)
        self._remember(work, inner)
        norm = sum(merge.norm(fragment) ** 2 for fragment in fragments) ** 0.5
        if work.tokens not in (None, tokens):
            raise Untold(f"{_key(work)}: {tokens} tokens, its commit says {work.tokens}")
        return Delta(*_key(work), steps, tokens, lr_sum, fragments, norm)

    def _start_from(self, work: Merged, ahead: Ahead) -> Done:
        """Adopt the work's base, below the steps ahead. Returns what is done."""
        if not ahead.sent:
            self.adopt(self.base(work))
            return Ahead().done
        self.adopt(ahead.base)
        for index, fragment in enumerate(self.base(work)):
            self.replica.load(index, ahead.params[index])
            self.rebase(index, fragment, ahead.sent[index])
        return ahead.done

    def _run(self, work: Merged, inner: Inner, batches: list[list[int]], before: Done) -> Done:
        """Train on the work's base, after what was done on it before. Returns what is done then."""
        version = self.versions[work.base]

        def prepare(more_steps: int, more_tokens: int) -> float:
            steps, tokens = before[0] + more_steps, before[1] + more_tokens
            self.before_step(version, tokens)
            ramp = max(0, inner.ramp - more_steps)
            factor = self.factor(version, steps, tokens) * self._ramp(ramp)
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * factor
            return max(self._peaks) * factor

        script = Script(self.config, batches, prepare)
        self.model.train()
        train(self.task, self.model, self.optimizer, script, self.device)
        inner.ramp = max(0, inner.ramp - script.steps)
        return before[0] + script.steps, before[1] + script.tokens, before[2] + script.lr_sum

    def _arrived(self, sent: list[torch.Tensor]) -> list:
        """The fragments of a delta, as the master decodes them."""
        fragments = []
        for index, delta in enumerate(sent):
            chosen = codec_of(self.outer.layout.has_buffers(index), self._codec)
            data = torch.frombuffer(chosen.encode(delta), dtype=torch.uint8)
            fragments.append(decoded(chosen, data, delta.numel()))
        return fragments

    def _go_ahead(
        self, work: Merged, inner: Inner, sent: list[torch.Tensor], before: Done
    ) -> Ahead:
        """Train on while the delta travels, with the samples that the trace says, if any."""
        batches = self._cut(getattr(work, "ahead", ()))
        if not batches:
            return Ahead()
        after = self._run(work, inner, batches, before)
        done = tuple(now - then for now, then in zip(after, before, strict=True))
        params = [self.replica.whole(index) for index in range(len(sent))]
        return Ahead(done, self.base(work), sent, params)

    def before_step(self, version: Version, tokens: int) -> None:
        """Called before each step, with the tokens done on the version."""

    def rebase(self, index: int, published: torch.Tensor, sent: torch.Tensor) -> None:
        """Put the steps since a fragment of a delta was taken on top of a published fragment."""
        self.replica.rebase(index, published, sent)

    def base(self, work: Merged) -> list[torch.Tensor]:
        """The published fragments that the worker starts from."""
        return self.versions[work.base].published

    def factor(self, version: Version, steps: int, tokens: int) -> float:
        """The learning rate, of its peak, after `steps` of `tokens` on the version."""
        train, workers = self.config.train, max(1, version.workers)
        round_samples = version.steps * train.batch_size * workers
        now = version.tokens + min(tokens * workers, round_samples * self._sample_tokens)
        return share_of_peak(now / self.total_tokens, train)

    def delta(self, work: Merged, index: int) -> torch.Tensor:
        """base - local of a fragment, when the round's steps are done."""
        return self.replica.delta(index)

    def _ramp(self, left: int) -> float:
        whole = self.config.local_sgd.join_ramp
        return (whole - left + 1) / whole if left else 1.0

    def adopt(self, fragments: list[torch.Tensor]) -> None:
        for index, fragment in enumerate(fragments):
            self.replica.adopt(index, fragment)

    def _batches(self, work: Merged) -> list[list[int]]:
        batches = self._cut(work.samples)
        if len(batches) != work.steps:
            raise Untold(f"{_key(work)}: {work.steps} steps, samples for {len(batches)}")
        return batches

    def _cut(self, samples: list) -> list[list[int]]:
        """Dataset indices, in full batches. What fills the last one up, from the beginning of its
        epoch, is below 0 (~index): it does not count."""
        indices = [i for each in samples for i in self._indices(*each)]
        size = self.config.train.batch_size
        if short := len(indices) % size:
            epochs = [epoch for epoch, start, stop in samples for _ in range(start, stop)]
            places = (at % self.samples for at in range(size - short))
            indices += [~self._indices(epochs[-short], at, at + 1)[0] for at in places]
        return [indices[at : at + size] for at in range(0, len(indices), size)]

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        seed = self.config.run.seed
        return [shuffle.index(self.samples, seed, epoch, at) for at in range(start, stop)]

    # ---- inner state

    def inner_before(self, work: Merged) -> Inner:
        """The inner state that the delta's first step found."""
        slot, attempt, base = _key(work)
        if before := self._newest(slot, base - 1, attempt, attempt):
            return copy.deepcopy(before)
        origin, fresh = work.inner, Inner([], self.first_rng(slot, attempt))
        if origin == "start":
            return copy.deepcopy(self.start.inner) or fresh
        if origin.startswith("fresh"):
            fresh.ramp = self.config.local_sgd.join_ramp if origin.endswith(RAMPED) else 0
            return fresh
        before = self._newest(slot, int(ORIGIN.fullmatch(origin)[1]), 0, attempt - 1)
        if before is None:
            raise Untold(f"{_key(work)}: inner state {origin!r}, which no commit shows")
        return Inner(copy.deepcopy(before.state), fresh.rng)

    def _newest(self, slot: int, base: int, low: int, high: int) -> Inner | None:
        """After the slot's last delta up to `base`, of attempts low ... high; trains it if due."""
        found = [key for key in (*self._inner, *self._untrained) if key[0] == slot]
        found = [key for key in found if key[2] <= base and low <= key[1] <= high]
        if not found:
            return None
        key = max(found, key=lambda key: (key[2], key[1]))
        if key in self._untrained:
            self._trained[key] = self._train(self._untrained.pop(key))
        return self._inner[key]

    def _remember(self, work: Merged, inner: Inner) -> None:
        state = [self.optimizer.state.pop(param, {}) for param in self._params()]
        rng = torch.get_rng_state()
        self._inner[_key(work)] = Inner(state, rng, inner.ramp, inner.ahead)

    def first_rng(self, slot: int = 0, attempt: int = 1) -> torch.Tensor:
        seed_by(f"{self.config.run.seed}/{slot}/{attempt}/0")
        return torch.get_rng_state()

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    # ---- the master

    def _merge(self, deltas: list[Delta]) -> None:
        settings = self.config.local_sgd
        deltas = sorted((d for d in deltas if not self.refuse(d)), key=lambda delta: delta.key)
        weights = rounds.weights(deltas, self.version)
        clips = rounds.clips(deltas, settings.clip_norm, self.running.reach)
        total = sum(weights)
        shares = list(zip(weights, clips, strict=True))
        means = [self._mean(index, deltas, shares) for index in range(len(self.outer.params))]
        parts = [weight / total for weight in weights]
        self.outer.mu = rounds.momentum(self.versions[self.version].steps, parts, settings)
        self.step(means, rounds.outer_lr(self.outer.mu, total, self.running, settings))
        self.running = self.running.after(deltas, total, 0.0)
        self.clipped += sum(clip < 1 for clip in clips)
        tokens = self.versions[self.version].tokens + sum(delta.tokens for delta in deltas)
        self.version += 1
        self.versions[self.version] = self._publish(tokens, len({delta.slot for delta in deltas}))
        self._forget()

    def _mean(self, index: int, deltas: list[Delta], shares: list) -> torch.Tensor:
        terms = [
            merge.Term([(0, delta.fragments[index])], factor, self.anchor(delta, index))
            for delta, factor in zip(deltas, self.share(shares), strict=True)
        ]
        params, kappa = self.outer.params[index], self.config.local_sgd.reanchor
        return merge.mean_delta(params, terms, kappa, torch.empty_like(params))

    def anchor(self, delta: Delta, index: int) -> torch.Tensor | None:
        """The master's parameters as of the version that a late delta's worker started from."""
        late = delta.base < self.version
        return self.versions[delta.base].params[index] if late else None

    def refuse(self, delta: Delta) -> bool:
        """Is the delta not finite?"""
        return not delta.norm < math.inf

    def share(self, shares: list[tuple[float, float]]) -> list[float]:
        """What each delta is multiplied with."""
        total = sum(weight for weight, _ in shares)
        return [weight * clip / total for weight, clip in shares]

    def step(self, means: list[torch.Tensor], lr: float) -> None:
        """The outer step."""
        step(self.outer, means, lr)

    def _publish(self, tokens: int, workers: int) -> Version:
        commit = commit_of(self.version, tokens=tokens, total_tokens=self.total_tokens)
        steps = rounds.inner_steps(commit, self.config.local_sgd)
        params = [fragment.clone() for fragment in self.outer.params]
        published = [fragment.to(torch.bfloat16) for fragment in params]
        return Version(params, published, tokens, workers, steps)

    def _forget(self) -> None:
        """Drop what no later delta can refer to."""
        settings = self.config.local_sgd
        oldest = self.version - settings.max_staleness - settings.inner_state_max_age - 1
        for version in [version for version in self.versions if version < oldest]:
            del self.versions[version]
        newest = {key[:1]: key for key in sorted(self._inner, key=lambda key: key[::-1])}
        for key in [key for key in self._inner if key[2] < oldest and newest[key[:1]] != key]:
            del self._inner[key]


def seeded_model(task, config: Config) -> torch.nn.Module:
    """The model as every worker makes it."""
    torch.manual_seed(config.run.seed)
    return task.model()


def _key(work: Merged) -> Key:
    return (work.slot, work.attempt, work.base)
