"""A seeded shuffle of the samples, computed by position: no list is ever in memory. Pure.

A position in the shuffled order is written as a pair (left, right) on a grid of `rows` x
`columns` cells, the smallest nearly square one that holds all samples. Each pass of a
keyed Feistel network adds to one half a pseudo-random function of the other half, modulo
its side of the grid; that can be undone, so the whole is a bijection of the grid (Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002). A result outside the dataset
is sent through the network again until it falls inside ("cycle walking"), which makes it
a bijection of the dataset. The grid has few spare cells, so for large datasets that is
almost never needed.

Every machine and every Python version computes the same order: the keys come from BLAKE2,
the rest is integer arithmetic. It shuffles well; it is not meant to keep secrets.
"""

import functools
import math
from hashlib import blake2b

from elastic.base.errors import ElasticError

PASSES = 4  # two half-steps each; with 2, samples a row apart are visibly related, from 3 not
MASK = (1 << 64) - 1
MULTIPLIER = 0xBF58476D1CE4E5B9  # odd and well mixed: the first constant of SplitMix64


class Shuffle:
    """The order of one epoch: `shuffle[position]` is a sample index, a bijection on
    range(size)."""

    def __init__(self, size: int, seed: int, epoch: int):
        self.size = size
        self._rows = math.isqrt(max(size, 1) - 1) + 1  # the square root, rounded up
        self._columns = -(-max(size, 1) // self._rows)
        digest = blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=16 * PASSES).digest()
        words = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]
        self._keys = tuple(zip(words[::2], words[1::2], strict=True))

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of {self.size} samples")
        index = self._permute(position)
        while index >= self.size:
            index = self._permute(index)
        return index

    def _permute(self, cell: int) -> int:
        """One trip through the network: a bijection on range(rows * columns)."""
        rows, columns = self._rows, self._columns
        left, right = divmod(cell, columns)
        for left_key, right_key in self._keys:
            mixed = (right + left_key) * MULTIPLIER & MASK
            left = (left + ((mixed ^ mixed >> 32) * MULTIPLIER >> 24 & MASK)) % rows
            mixed = (left + right_key) * MULTIPLIER & MASK
            right = (right + ((mixed ^ mixed >> 32) * MULTIPLIER >> 24 & MASK)) % columns
        return left * columns + right


_shuffle = functools.cache(Shuffle)


def index(size: int, seed: int, epoch: int, position: int) -> int:
    """The sample at a position in the order of an epoch: the same in both modes."""
    return _shuffle(size, seed, epoch)[position]


def check_size(size: int, of_run: int | None) -> None:
    """Raise ElasticError if a data set is not of the run's size: its order would be
    another, and what the run has trained would stand for other samples. None: not known
    yet."""
    if of_run not in (None, size):
        raise ElasticError(
            f"this machine's data set has {size} samples, the run's has {of_run}",
            "every job of a run must see the same data: the same files, the same Python;"
            " submit a new run for other data",
        )
