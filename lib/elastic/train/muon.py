"""Muon's update: a matrix whose directions all move alike (Jordan et al., 2024).

    b  = m b + (1 - m) g                             momentum
    u  = O((1 - m) g + m b)                          O: the nearest orthogonal matrix, about
    W  = (1 - lr decay) W - 0.2 lr sqrt(max(rows, columns)) u

The last factor makes the update as large as AdamW's, so that the same learning rate
serves both (Liu et al., arXiv 2502.16982).

O needs the whole matrix. Of a sharded one each rank has some rows, and torch's own Muon
(2.13) gathers every matrix on every rank, several times. Here the ranks take one matrix
each: rank i gets the rows of the i-th, and returns those of its update. So of all
products a rank has its share, and every element travels twice in a step.

Products are of bfloat16 on a GPU, and of float32 on a CPU: one without instructions for
bfloat16 needs 18 times as long for it; one that has them, a quarter to a half
(tests/bench/bench_muon.py). So none is far too slow.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

STEPS = 5
A, B, C = 3.4445, -4.775, 2.0315  # make small singular values grow fastest
TINY = 1e-7


def scale(shape: torch.Size) -> float:
    """What makes an update of this shape as large as AdamW's: an RMS of 0.2."""
    return 0.2 * math.sqrt(max(shape))


def for_products(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, in the type in which it is multiplied."""
    return matrix.to(torch.float32 if matrix.is_cpu else torch.bfloat16)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values between about 0.7 and 1.2, but for tiny ones: a few
    steps of x = (A + B x x' + C (x x')^2) x."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # x x' is the smaller product
    x = x / x.norm().clamp_min(TINY)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


def orthogonal_rows(rows: Sequence[torch.Tensor], shapes: Sequence[torch.Size],
                    group: dist.ProcessGroup) -> list[torch.Tensor]:  # fmt: skip
    """`orthogonal` of matrices of these shapes, at most as many as the group has ranks: this
    rank's rows of them, cut as FSDP2 does, for those that it brings. Collective."""
    world, rank = group.size(), group.rank()
    own = shapes[rank] if rank < len(shapes) else torch.Size((0, 0))
    most = -(-own[0] // world)  # rows of a rank; the last ones have fewer, or none
    coming = [own[1] * max(0, min(most, own[0] - most * each)) for each in range(world)]
    going = [part.numel() for part in rows] + [0] * (world - len(rows))
    parts = torch.cat([part.flatten() for part in rows])
    whole = parts.new_empty(own.numel())
    dist.all_to_all_single(whole, parts, coming, going, group=group)
    if len(whole):
        whole = orthogonal(whole.view(own)).flatten()
    dist.all_to_all_single(parts, whole, going, coming, group=group)
    each = parts.split(going[: len(rows)])
    return [part.view_as(shape) for part, shape in zip(each, rows, strict=True)]
