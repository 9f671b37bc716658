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
import struct
from hashlib import blake2b

from elastic.base.errors import ElasticError

PASSES = 4  # two half-steps each; with 2, samples a row apart are visibly related, from 3 not
MASK = (1 << 64) - 1
MULTIPLIER = 0xBF58476D1CE4E5B9  # odd and well mixed: the first constant of SplitMix64


@functools.cache
def _network(size: int, seed: int, epoch: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Rows and columns of an epoch's grid, and the two keys of each pass."""
    rows = math.isqrt(size - 1) + 1  # the square root, rounded up
    digest = blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=16 * PASSES).digest()
    return rows, -(-size // rows), list(struct.iter_unpack("<QQ", digest))


def index(size: int, seed: int, epoch: int, position: int) -> int:
    """The sample at a position in the order of an epoch, a bijection on range(size): the
    same in both modes."""
    if not 0 <= position < size:
        raise IndexError(f"position {position} of {size} samples")
    rows, columns, keys = _network(size, seed, epoch)
    while True:  # a trip through the network is a bijection on range(rows * columns)
        left, right = divmod(position, columns)
        for left_key, right_key in keys:
            mixed = (right + left_key) * MULTIPLIER & MASK
            left = (left + ((mixed ^ mixed >> 32) * MULTIPLIER >> 24 & MASK)) % rows
            mixed = (left + right_key) * MULTIPLIER & MASK
            right = (right + ((mixed ^ mixed >> 32) * MULTIPLIER >> 24 & MASK)) % columns
        position = left * columns + right
        if position < size:
            return position


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
