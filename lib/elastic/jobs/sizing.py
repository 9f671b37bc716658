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

from collections.abc import Sequence


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
    """The largest of `counts` that is available; 0 if none is."""
    return max((count for count in counts if count <= available), default=0)


WORTH = 2.0  # a restart must gain so many times what it costs


def pays(gpus: int, more: int, restart_s: float, horizon_s: float) -> bool:
    """Is it worth a restart of `restart_s` to train on `more` GPUs instead of `gpus`, if that
    is likely to last for `horizon_s`?"""
    gain = more / gpus
    return horizon_s * (gain - 1) > WORTH * restart_s * gain
