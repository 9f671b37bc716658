"""How the ranks of a synchronous job share a step. Pure.

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
