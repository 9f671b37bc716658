"""How a round's deltas, or the version before the newest, become the next version. Pure.

A recipe is what averaging does; with it come the fields of the commit that tell of it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from elastic.local import rounds
from elastic.local.rounds import Judgement, Moved, Running
from elastic.run.records import Commit, Delta, Header

UNTOLD = ("run", "layout", "fragments")  # in a commit, of a delta's header


@dataclass(frozen=True)
class Checked:
    """A delta whose bytes were read once: what was measured of them, or why it is
    refused."""

    header: Header
    norm: float = 0.0
    refused: Judgement | None = None
    arrived: float = 0.0  # Redis TIME

    @property
    def moved(self) -> Moved:
        return Moved(self.norm, self.header.steps, self.header.lr_sum)

    @property
    def delta(self) -> Delta:
        """What the commit says of it."""
        told = {name: it for name, it in vars(self.header).items() if name not in UNTOLD}
        return Delta(**told, norm=self.norm, delivered=round(self.arrived, 3))


@dataclass(frozen=True)
class Recipe:
    """How version `base` becomes the next one: each delta times its factor."""

    base: int
    headers: tuple[Header, ...] = ()
    factors: tuple[float, ...] = ()
    lr: float = 0.0
    momentum: float = 0.0  # mu
    restore: int = -1  # the version to go back to, with momentum 0, instead


def merged(deltas: Sequence[Checked], commit: Commit, settings) -> tuple[Recipe, dict]:
    """How deltas become the version after `commit`; in which order they came does not
    matter."""
    deltas = sorted(deltas, key=lambda checked: checked.header.key)
    headers, moves = [each.header for each in deltas], [each.moved for each in deltas]
    base, running = commit.version, Running.of(commit)
    shares = rounds.weights_and_clips(headers, moves, base, settings.clip_norm, running.reach)
    total = sum(weight for weight, _ in shares)
    factors = [weight * clip / total for weight, clip in shares]
    steps = rounds.inner_steps(commit, settings)
    momentum = rounds.momentum(steps, [weight / total for weight, _ in shares], settings)
    lr = rounds.outer_lr(momentum, total, running, settings)
    said = {
        "outer_lr": lr, "outer_momentum": momentum, "inner_steps": steps,
        "clipped": sum(clip < 1 for _, clip in shares),
        "running": asdict(running.after(moves, total, rounds.round_loss(headers, base))),
        "bytes": sum(part.bytes for header in headers for part in header.fragments),
    }  # fmt: skip
    return Recipe(base, tuple(headers), tuple(factors), lr, momentum), said


def reverted(commit: Commit) -> tuple[Recipe, dict]:
    """How the version before `commit` becomes the one after it. Without momentum, which
    may hold what made this version bad."""
    base = commit.version
    # There is no loss to compare the next round's with.
    running = replace(Running.of(commit), loss=0.0)
    said = {"taken_back": base, "running": asdict(running), "bytes": 0}
    return Recipe(base, restore=base - 1), said
