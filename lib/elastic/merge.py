"""Merging: the weighted mean of deltas, and the outer step. Shared by master and simulator.

    d_i   = decoded delta, re-anchored if it is late:  d_i + kappa (Theta_v - A_base)
    g     = sum_i w_i c_i d_i / sum_i w_i
    b     = mu b + g ;  Theta = Theta - eta (g + mu b)              torch.optim.SGD(nesterov=True)

(DiLoCo, arXiv 2311.08105; late deltas: Decoupled DiLoCo, arXiv 2604.21428.) The caller passes the
deltas sorted by (slot, attempt, base): float addition is not associative, and a fixed order is what
makes the result independent, bit for bit, of the order of arrival. One fragment at a time; nothing
is held twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from elastic.layout import Layout


@dataclass
class Outer:
    """What the master holds per fragment: float32 parameters and outer momentum, flat."""

    layout: Layout
    params: list[torch.Tensor]
    momentum: list[torch.Tensor]


@dataclass(frozen=True)
class Term:
    """One delta of a fragment in the mean: its share (weight times clip over total weight)."""

    delta: torch.Tensor  # float32, flat
    share: float
    anchor: torch.Tensor | None = None  # the late delta's base parameters; None: not late


def norm(delta: torch.Tensor) -> float:
    """Euclidean norm of one fragment; inf or nan if any element is not finite."""
    return torch.linalg.vector_norm(delta).item()


def mean_delta(params: torch.Tensor, terms: Iterable[Term], reanchor: float) -> torch.Tensor:
    """The fragment's g. `params` is the current Theta; `reanchor` is kappa."""
    mean = torch.zeros_like(params)
    for term in terms:
        mean.add_(term.delta, alpha=term.share)
        if term.anchor is not None:
            mean.add_(params, alpha=term.share * reanchor)
            mean.add_(term.anchor.float(), alpha=-term.share * reanchor)
    return mean


def outer_step(outer: Outer, index: int, mean: torch.Tensor, lr: float, momentum: float) -> None:
    """Apply the outer optimizer to one fragment, in place."""
    params = outer.params[index]
    params.grad = mean
    sgd = torch.optim.SGD([params], lr=lr, momentum=momentum, nesterov=momentum > 0)
    if momentum > 0:
        sgd.state[params]["momentum_buffer"] = outer.momentum[index]
    sgd.step()
    params.grad = None


def cosine(outer: Outer, means: list[torch.Tensor]) -> float:
    """cos(g, b) over the whole model, before the step: how far rounds agree (0 at the first)."""
    dot = sum((b @ g).item() for b, g in zip(outer.momentum, means, strict=True))
    sizes = [sum(norm(x) ** 2 for x in xs) ** 0.5 for xs in (outer.momentum, means)]
    return dot / (sizes[0] * sizes[1]) if all(sizes) else 0.0
