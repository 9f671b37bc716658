"""Guards: how long a delta may be, and which version is bad. Pure.

    clips(moves, ...)         how much of each delta is merged?
    canary(loss, ...)         has the newest version made the loss rise?

A length is judged by what its steps could have moved. k steps whose learning rates sum to
S move c S if they all go one way, and c S / sqrt(k) if each goes its own; a healthy delta
is in between. `Reach` knows both constants, and expects the longer one: so no healthy
delta looks long because the learning rate rises, or because a round has more or fewer
steps. No guard stops a run: every mean follows what was seen, as optimizers that find
their own step size make deltas a hundred times as long within a few rounds. A useless
delta (it moved nothing, or goes back) is merged: it costs its part of one round, no more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic.run.records import Commit, Measured, restored

MEMORY_ROUNDS = 20  # horizon of the running means
# The mean learning rate per step is believed up to this many times the usual one. A worker
# that joins has a lower rate (its ramp), never one so much higher.
MOST_RATE = 4.0
CANARY_SAMPLES = 128  # the fewest of a round whose mean loss says anything
CANARY_SIGMAS = 6.0  # of the loss's change from round to round: no chance explains more
KNOWN_ROUNDS = 10  # of which that change has to be known


@dataclass(frozen=True)
class Moved:
    """How far a delta goes: its norm, its steps, and the sum of their learning rates."""

    norm: float
    steps: int
    lr_sum: float


@dataclass(frozen=True)
class Reach:
    """How far steps usually go: norm / S and norm sqrt(k) / S, as geometric means over
    rounds."""

    straight: Measured = 0.0
    wandering: Measured = 0.0
    rounds: int = 0
    rate: Measured = 0.0  # learning rate of a step, in the last round

    def length(self, moved: Moved) -> float:
        """The norm that is expected of such steps; 0: unknown."""
        wandering = self.wandering / math.sqrt(max(1, moved.steps))
        return moved.lr_sum * max(self.straight, wandering)

    def after(self, moves: Sequence[Moved]) -> "Reach":
        """One round later. Only whole deltas count: a few steps say little of what all of
        a round's steps do."""
        if not (known := whole(moves)):
            return self
        now, blend = _reach(known), 1 / min(MEMORY_ROUNDS, self.rounds + 1)
        return Reach(
            (self.straight or 1.0) ** (1 - blend) * now.straight**blend,
            (self.wandering or 1.0) ** (1 - blend) * now.wandering**blend,
            self.rounds + 1,
            now.rate,
        )


def _reach(known: Sequence[Moved]) -> Reach:
    """The reach of one round's deltas: the medians."""
    return Reach(
        median(each.norm / each.lr_sum for each in known),
        median(each.norm * math.sqrt(each.steps) / each.lr_sum for each in known),
        rate=median(each.lr_sum / each.steps for each in known),
    )


def whole(moves: Sequence[Moved]) -> list[Moved]:
    """Those that have moved, with at least half as many steps as the longest."""
    most = max((each.steps for each in moves), default=0)
    moved = [each for each in moves if min(each.norm, each.steps, each.lr_sum) > 0]
    return [each for each in moved if 2 * each.steps >= most]


@dataclass(frozen=True)
class Running:
    """Means over recent rounds; part of every commit, so that a new master goes on with
    them."""

    reach: Reach = Reach()
    weight: Measured = 0.0  # of a round: the sum of its deltas'
    loss: Measured = 0.0  # of the last round
    unrest: Measured = 0.0  # mean square of the loss's change from round to round
    rounds: int = 0  # from which such a change is known

    @classmethod
    def of(cls, commit: Commit) -> "Running":
        """As a commit has them; what an older commit does not have begins anew."""
        return restored(cls, commit.running or {})

    def after(self, moves: Sequence[Moved], weight: float, loss: float) -> "Running":
        """One round later; `loss`: `round_loss`."""
        told, change = bool(self.loss and loss), loss - self.loss
        return Running(
            self.reach.after(moves), blend(self.weight, weight), loss,
            blend(self.unrest, change**2) if told else self.unrest, self.rounds + told,
        )  # fmt: skip


def blend(mean: float, value: float) -> float:
    """A running mean, one value later; 0: none yet."""
    return value if mean == 0.0 else mean + (value - mean) / MEMORY_ROUNDS


def clips(moves: Sequence[Moved], clip_norm: float, reach: Reach) -> list[float]:
    """The factor that shortens each delta to `clip_norm` times the norm that is expected
    of its steps; 1 if it is not longer. What is expected is known from three or more whole
    deltas of this round, else from three or more rounds before it. If three agree, a
    learning rate more than MOST_RATE times theirs is not believed. `clip_norm` 0 never
    clips."""
    known = whole(moves)
    now = _reach(known) if len(known) >= 3 else Reach()
    usual = now if now.rate else reach if reach.rounds >= 3 else now
    # Of only two, nobody knows which one lies.
    rate = MOST_RATE * max(now.rate, reach.rate) if now.rate else math.inf
    told = [replace(each, lr_sum=min(each.lr_sum, rate * each.steps)) for each in moves]
    most = [clip_norm * usual.length(each) for each in told]
    return [min(1.0, m / each.norm) if m and each.norm else 1.0
            for m, each in zip(most, moves, strict=True)]  # fmt: skip


def round_loss(headers: Sequence, version: int) -> float:
    """Mean training loss on a version, weighted by tokens; 0: too few samples to tell."""
    fresh = [header for header in headers if header.base == version and header.loss]
    tokens = sum(header.tokens for header in fresh)
    samples = sum(stop - start for header in fresh for _, start, stop in header.samples)
    if samples < CANARY_SAMPLES:
        return 0.0
    return sum(header.loss * header.tokens for header in fresh) / tokens


def canary(loss: float, running: Running, most_rise: float) -> str:
    """Why the version that a whole round has been trained on is to be reverted, or "": the
    round's loss has risen by more than `most_rise`, and by more than chance explains.
    """
    if not most_rise or running.rounds < KNOWN_ROUNDS or not (loss and running.loss):
        return ""
    most = max(most_rise, CANARY_SIGMAS * math.sqrt(running.unrest))
    if loss - running.loss <= most:
        return ""
    return f"the loss rose from {running.loss:.3f} to {loss:.3f}, by more than {most:.3f}"
