"""How many GPUs a synchronous job asks for, when more are worth a restart, and how its ranks share
a step. Pure.

The run has one stream of samples: the shuffled epochs, one after the other. Step s trains the
global batch, the next `global_batch_size` positions of the stream, whatever the number of ranks:
a rank's share depends on (step, rank, world) only through a partition of that batch, so a run that
is resized trains the same samples in the same steps as one that never was.

Shares differ by at most one sample. All ranks make equally many passes over the model, because
each pass is a collective: a rank that has fewer samples than passes makes one over a sample that
counts nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int, int]  # epoch, first position, one past the last position


@dataclass(frozen=True)
class Stream:
    """`epochs` times `samples` positions in a row (epochs 0: without an end)."""

    samples: int
    epochs: int = 0

    @property
    def end(self) -> int | None:
        return self.samples * self.epochs or None

    def batch(self, cursor: int, size: int) -> range:
        """The next `size` positions, fewer at the end of the stream."""
        stop = cursor + size if self.end is None else min(cursor + size, self.end)
        return range(min(cursor, stop), stop)

    def place(self, position: int) -> tuple[int, int]:
        """(epoch, position in its shuffled order)."""
        return divmod(position, self.samples)

    def ranges(
        self, start: int, stop: int, without: Sequence[Sequence[int]] = ()
    ) -> list[Range]:
        """Positions as the ledger writes them, by epoch, but for `without` ([start, stop) each)."""
        found = []
        while start < stop:
            gap = next(((a, b) for a, b in sorted(without) if b > start), (stop, stop))
            epoch, first = self.place(start)
            count = min(stop - start, self.samples - first, max(0, gap[0] - start))
            if count:
                found.append((epoch, first, first + count))
            start = start + count if start + count < gap[0] else max(gap[1], start + count)
        return found


def share(batch: range, rank: int, world: int) -> range:
    """The rank's contiguous part of a global batch."""
    return _part(batch, rank, world)


def passes(batch: range, rank: int, world: int, most: int) -> list[range]:
    """The rank's share in passes of at most `most` samples, equally many on every rank.

    An empty range is a pass over a sample that counts nothing.
    """
    largest = -(-len(batch) // world)
    count = max(1, -(-largest // most))
    mine = share(batch, rank, world)
    return [_part(mine, index, count) for index in range(count)]


def _part(whole: range, index: int, count: int) -> range:
    """Part `index` of `count` nearly equal ones, the longer ones first."""
    size, longer = divmod(len(whole), count)
    start = whole.start + index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def nodes(least_gpus: int, most_gpus: int, gpus_per_node: int) -> tuple[int, int]:
    """The range of whole nodes for a range of GPUs; (1, …) where a node has more than wanted."""
    most = max(1, most_gpus // gpus_per_node)
    return min(most, max(1, -(-least_gpus // gpus_per_node))), most


WORTH = 2.0  # a restart must gain so many times what it costs


@dataclass(frozen=True)
class Growth:
    """What a job on `gpus` GPUs would win by a restart on `more`. Speeds were measured, by GPUs."""

    gpus: int
    more: int
    speeds: Mapping[int, float]  # tokens per second
    restart_s: float  # from the last step to the first on the new GPUs
    horizon_s: float  # how long the new size is likely to last
    least_age_s: float  # not twice in a row quickly

    def pays(self, age_s: float) -> tuple[bool, str]:
        """Is it worth it for a job of this age; and why. An unknown size is taken as linear."""
        if self.more <= self.gpus:
            return False, f"no more than {self.gpus} GPUs are to be had"
        if age_s < self.least_age_s:
            return False, f"it started {age_s:.0f} s ago: not yet"
        now, then = self.speeds.get(self.gpus), self.speeds.get(self.more)
        gain = then / now if now and then else self.more / self.gpus
        won_s, cost_s = self.horizon_s * (gain - 1), self.restart_s * gain
        words = f"{self.gpus} to {self.more} GPUs are {gain:.2f} times as fast"
        for_s = f"for {self.horizon_s:.0f} s, a restart takes {self.restart_s:.0f} s"
        return won_s > WORTH * cost_s, f"{words} {for_s}"
