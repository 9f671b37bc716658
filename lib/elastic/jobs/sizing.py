"""How many GPUs a synchronous job asks for, when more are worth a restart, and how its
ranks share a step. Pure.

Step s trains the global batch, the next `global_batch_size` samples that are free in the
ledger, in the order of the shuffled epochs, whatever the number of ranks: a rank's part
depends on (step, rank, world) only through a partition of that batch, so a run that is
resized trains the same samples in the same steps as one that never was.

Parts differ by at most one sample. All ranks make equally many passes over the model,
because each pass is a collective: a rank that has fewer samples than passes makes one
over a sample that counts nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def part(whole: Sequence, index: int, count: int) -> Sequence:
    """Part `index` of `count` nearly equal contiguous ones, the longer ones first."""
    size, longer = divmod(len(whole), count)
    start = index * size + min(index, longer)
    return whole[start : start + size + (index < longer)]


def passes(batch: Sequence, rank: int, world: int, most: int) -> list[Sequence]:
    """The rank's part in passes of at most `most` samples, equally many on every rank.

    An empty one is a pass over a sample that counts nothing.
    """
    largest = -(-len(batch) // world)
    count = max(1, -(-largest // most))
    mine = part(batch, rank, world)
    return [part(mine, index, count) for index in range(count)]


def node_counts(gpus: tuple[int, int], gpus_per_node: int, sizes: Sequence[int] = ()) -> list[int]:
    """How many whole nodes a job may have, for a range of GPUs and, if any of them is in
    it, the `sizes` (in GPUs) that are allowed; [1] where a node has more than wanted."""
    most = max(1, gpus[1] // gpus_per_node)
    counts = range(min(most, max(1, -(-gpus[0] // gpus_per_node))), most + 1)
    return [count for count in counts if count * gpus_per_node in sizes] or list(counts)


def fit(counts: Sequence[int], available: int) -> int:
    """The largest of `counts` that is available; 0: none is."""
    return max((count for count in counts if count <= available), default=0)


WORTH = 2.0  # a restart must gain so many times what it costs


@dataclass(frozen=True)
class Growth:
    """What a job on `gpus` GPUs would win by a restart on `more`. Speeds were measured,
    by GPUs."""

    gpus: int
    more: int
    speeds: Mapping[int, float]  # tokens per second
    restart_s: float  # from the last step to the first on the new GPUs
    horizon_s: float  # how long the new size is likely to last
    least_age_s: float  # not twice in a row quickly

    def pays(self, age_s: float) -> tuple[bool, str]:
        """Is it worth it for a job of this age; and why. An unknown size is taken as
        linear."""
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
