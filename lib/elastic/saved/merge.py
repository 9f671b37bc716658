"""Merging: the weighted mean of deltas, and the outer step. The master and the simulator
share it.

    d_i   = decoded delta, re-anchored if it is late:  d_i + kappa (Theta_v - A_base)
    g     = sum_i w_i c_i d_i / sum_i w_i
    b     = mu b + g ;  Theta = Theta - eta (g + mu b)              torch.optim.SGD(nesterov=True)

(DiLoCo, arXiv 2311.08105; late deltas: Decoupled DiLoCo, arXiv 2604.21428.) The caller
passes the deltas sorted by (slot, attempt, base): float addition is not associative, and
a fixed order is what makes the result independent, bit for bit, of the order of arrival.
One fragment at a time; nothing is held twice.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from elastic.saved.codec import TILE


class Term(NamedTuple):
    """One delta of a fragment in the mean, and the factor that it is multiplied by:
    weight times clip over total weight."""

    # Where each tile starts, and its elements (float32).
    tiles: Iterable[tuple[int, torch.Tensor]]
    factor: float
    anchor: torch.Tensor | None = None  # the late delta's base parameters; None: not late


def norm(delta: torch.Tensor) -> float:
    """Euclidean norm of one fragment; inf or nan if any element is not finite."""
    return torch.linalg.vector_norm(delta).item()


def length_squared(norm: float, has_buffers: bool) -> float:
    """What a fragment with this norm adds to the square of a delta's length. Buffers add
    nothing, but those that are not finite make it nan: 0 times inf."""
    return 0.0 * norm**2 if has_buffers else norm**2


def mean_delta(
    params: torch.Tensor, terms: Iterable[Term], reanchor: float, mean: torch.Tensor
) -> torch.Tensor:
    """The fragment's g, in `mean`. `params` is the current Theta; `reanchor` is kappa."""
    mean.zero_()
    for term in terms:
        for start, tile in term.tiles:
            mean[start : start + tile.numel()].add_(tile, alpha=term.factor)
        if term.anchor is not None:  # inf - inf is a constant's, which has not moved: 0
            moved = (params - term.anchor).nan_to_num_(0.0)
            mean.add_(moved, alpha=term.factor * reanchor)
    return mean


def outer_step(
    params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, lr: float, mu: float
) -> torch.Tensor:
    """Apply the outer optimizer to a fragment, in place; consumes its `mean`. The bits
    are those of torch.optim.SGD. Returns g b, g g and b b of before, for `cosine`.

    Written by hand, because torch.optim imports torch's compiler, which takes a new
    master a second and a half; and in pieces that fit a cache.
    """
    products = torch.zeros(3)
    for param, b, g in zip(*(part.split(TILE) for part in (params, momentum, mean)), strict=True):
        products += torch.stack([g.dot(b), g.dot(g), b.dot(b)])
        b.mul_(mu).add_(g)
        param.add_(g.add_(b, alpha=mu), alpha=-lr)
    return products


def cosine(products: torch.Tensor) -> float | None:
    """Of g and b, by what `outer_step` returned of each fragment (fragments, 3); None if
    either is zero, or not finite."""
    both, mean, momentum = products.sum(0).tolist()
    length = math.sqrt(mean * momentum)
    return both / length if 0 < length < math.inf else None
