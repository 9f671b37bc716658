"""A run of local SGD whose every decision is the product's, on a problem that takes milliseconds.

Workers do Adam on a noisy quadratic with eigenvalues from 0.01 to 1; K, the learning rate, guards,
shares, the outer step and the canary are the product's own functions. A fault is a function that is
given a delta of a chosen worker in chosen rounds. What the guards did is counted.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch

from elastic.local import rounds
from elastic.local.rounds import Running
from elastic.run.records import Delta
from elastic.saved import merge
from elastic.saved.layout import Layout
from elastic.train.schedule import share_of_peak
from helpers import commit_of
from merging import Outer

SIZE, BATCH = 256, 8
LAYOUT = Layout.of([("x", (SIZE,))], 1 << 30)
SPECTRUM = np.logspace(-2, 0, SIZE, dtype=np.float32)
NOISE = 0.5  # of a gradient, per element
ODD, ODD_LOSS = 0.01, 6.0  # share of odd documents, and by how much their loss is higher
Fault = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class World:
    """What the run is like."""

    workers: int = 4
    steps: int = 2000  # of a worker, in all
    inner_steps: int = 50
    cold_start: float = 0.35
    warmup_fraction: float = 0.01
    learning_rate: float = 0.01
    swinging: bool = False  # workers come and go, with deltas of any length
    seed: int = 0
    fault: Fault | None = None
    faulty_rounds: tuple[int, ...] = ()


@dataclass
class Told:
    """What the guards did."""

    clips: list[float] = field(default_factory=list)  # of each round: what is left of its mean
    faulty_clips: list[float] = field(default_factory=list)  # of the faulty deltas that were merged
    taken_back: list[str] = field(default_factory=list)
    refused: int = 0  # deltas that are not finite
    versions: int = 0
    losses: list[float] = field(default_factory=list)


class Worker:
    """One slot: Adam's moments. In numpy, whose calls cost a third of torch's on so few numbers."""

    def __init__(self, noise: torch.Generator):
        self.noise = noise
        self.forget()

    def forget(self) -> None:
        self.m, self.v = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self.t = 0

    def train(self, base: torch.Tensor, rates: list[float]) -> tuple[torch.Tensor, float]:
        """base - local after steps of these learning rates; the mean loss of a batch."""
        x, total, m, v = base.numpy().copy(), 0.0, self.m, self.v
        noise = torch.empty(len(rates), SIZE)
        noise.normal_(0, NOISE / math.sqrt(BATCH), generator=self.noise)
        for rate, drawn in zip(rates, noise.numpy(), strict=True):
            gradient = SPECTRUM * x
            total += 0.5 * float(gradient @ x)
            gradient += drawn
            self.t += 1
            m *= 0.9
            m += 0.1 * gradient
            v *= 0.95
            v += 0.05 * gradient * gradient
            root = np.sqrt(v / (1 - 0.95**self.t)) + 1e-8
            x -= rate / (1 - 0.9**self.t) * m / root
        return base - torch.from_numpy(x), total / len(rates)


class Run:
    def __init__(self, world: World):
        self.world, self.told = world, Told()
        self.draw, self.faulty_rounds = random.Random(world.seed), set(world.faulty_rounds)
        noise = torch.Generator().manual_seed(world.seed)
        start = torch.empty(SIZE).normal_(0, 1, generator=noise)
        momentum = 0.9 if world.inner_steps >= 100 else 0.8
        self.settings = SimpleNamespace(
            inner_steps=world.inner_steps, cold_start=world.cold_start,
            outer_momentum=momentum, outer_lr=0.7, thin_rounds=True,
            learning_rate=world.learning_rate, schedule="cosine",
            warmup_fraction=world.warmup_fraction, decay_fraction=0.2, final_lr_fraction=0.1,
        )
        self.outer = Outer(LAYOUT, [start], [torch.zeros(SIZE)], momentum)
        self.workers = [Worker(noise) for _ in range(world.workers)]
        self.running, self.version, self.samples, self.present = Running(), 0, 0, 1
        self.before = None  # parameters of the version before
        self.total = world.steps * world.workers * BATCH

    def train(self) -> Told:
        while self.samples < self.total:
            self.round()
        self.told.versions = self.version
        return self.told

    def round(self) -> None:
        commit = commit_of(self.version, tokens=self.samples, total_tokens=self.total)
        steps = rounds.inner_steps(commit, self.settings)
        crew = self.workers
        if self.world.swinging:
            crew = self.draw.sample(crew, self.draw.randint(1, len(crew)))
        is_faulty = self.version in self.faulty_rounds
        self.faulty_rounds.discard(self.version)  # once: who is refused trains again, rightly
        found = [self.delta(worker, steps, is_faulty and worker is crew[0]) for worker in crew]
        sent = [each for each in found if each is not None]
        if sent:
            self.merge(sent, steps)

    def delta(self, worker: Worker, most: int, is_faulty: bool):
        """A worker's delta as it is sent, or None if it refuses to."""
        steps = self.draw.randint(1, most) if self.world.swinging else most
        cap = most * BATCH * self.present
        at = [self.samples + min(i * BATCH * self.present, cap) for i in range(steps)]
        peak = self.settings.learning_rate
        rates = [peak * share_of_peak(tokens / self.total, self.settings) for tokens in at]
        delta, loss = worker.train(self.outer.params[0], rates)
        if is_faulty:
            delta = self.world.fault(delta)
        norm = merge.norm(delta)
        if not math.isfinite(norm):
            self.told.refused += 1
            worker.forget()
            return None
        return worker, delta, (norm, steps, sum(rates)), loss + self.odd(steps), is_faulty

    def odd(self, steps: int) -> float:
        """What odd documents add to a mean loss."""
        count = sum(self.draw.random() < ODD for _ in range(steps * BATCH))
        return ODD_LOSS * count / (steps * BATCH)

    def merge(self, sent: list, steps: int) -> None:
        deltas = [self.recorded(each) for each in sent]
        loss = rounds.round_loss(deltas, self.version)
        self.samples += sum(delta.tokens for delta in deltas)
        if self.before is not None and (why := rounds.canary(loss, self.running, 0.3)):
            self.told.taken_back.append(why)
            self.outer.params[0].copy_(self.before)
            self.outer.momentum[0].zero_()
            self.running = replace(self.running, loss=0.0)
            self.before = None
        else:
            self.step(sent, deltas, steps)
            self.told.losses.append(sum(delta.loss for delta in deltas) / len(deltas))
        self.version, self.present = self.version + 1, len(sent)

    def step(self, sent: list, deltas: list[Delta], steps: int) -> None:
        weights = rounds.weights(deltas, self.version)
        clips = rounds.clips(deltas, 2.0, self.running.reach)
        total = sum(weights)
        parts = [(weight / total, clip) for weight, clip in zip(weights, clips, strict=True)]
        self.told.clips.append(sum(part * clip for part, clip in parts))
        self.told.faulty_clips += [
            clip for (_, clip), each in zip(parts, sent, strict=True) if each[4]
        ]
        self.before = self.outer.params[0].clone()
        mean = sum(part * clip * each[1] for (part, clip), each in zip(parts, sent, strict=True))
        self.outer.mu = rounds.momentum(steps, [part for part, _ in parts], self.settings)
        lr = rounds.outer_lr(self.outer.mu, total, self.running, self.settings)
        self.outer.step(0, mean, lr)
        loss = rounds.round_loss(deltas, self.version)
        self.running = self.running.after(deltas, total, loss)

    def recorded(self, each) -> Delta:
        worker, _, (norm, steps, lr_sum), loss, _ = each
        slot, tokens = self.workers.index(worker), steps * BATCH
        return Delta(slot=slot, attempt=1, base=self.version, steps=steps, tokens=tokens, loss=loss,
                     samples=((0, 0, tokens),), norm=norm, lr_sum=lr_sum)
