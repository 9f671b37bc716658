"""Local SGD on quadratics, where every rate and fixed point is known, through the real merge code.

    pytest tests/local/test_quadratics.py

Worker m minimises (x - c_m)' H (x - c_m) / 2 with H diagonal; K inner steps of gradient descent
take it from A to c_m + (1 - D)(A - c_m), with D = 1 - (1 - lr H)^K. So a round is linear, and what
it does is computed by hand beside it. Each fault that a loss curve would hide is planted once, and
shown to break the check that is there to find it.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from elastic.local import rounds
from elastic.saved import merge
from elastic.saved.layout import Layout
from merging import Outer
from test_rounds import moved

SIZE = 4
LAYOUT = Layout.of([("x", (SIZE,))], 1 << 20)


@dataclass(frozen=True)
class Problem:
    """What the workers do, and the outer optimizer. `works` is D, per dimension."""

    centres: tuple[torch.Tensor, ...]
    tokens: tuple[int, ...]
    works: torch.Tensor
    eta: float = 0.7
    mu: float = 0.9
    late: int = 0  # versions that every worker is behind
    kappa: float = 0.5

    @property
    def optimum(self):
        weighted = zip(self.tokens, self.centres, strict=True)
        return sum(n * centre for n, centre in weighted) / sum(self.tokens)

    def deltas(self, base):
        return [self.works * (base - centre) for centre in self.centres]


def train(problem, versions, start=None, deltas=Problem.deltas, tokens=None, forget=False):
    """Every version's parameters, beginning with the start. The last arguments plant faults."""
    theta = torch.zeros(SIZE) if start is None else start.clone()
    outer = Outer(LAYOUT, [theta], [torch.zeros(SIZE)], problem.mu)
    history = [theta.clone()]
    for version in range(versions):
        base = max(0, version - problem.late)
        sent = deltas(problem, history[base])
        counts = tokens or problem.tokens
        told = [moved(1.0, tokens=tokens, base=base) for tokens in counts]
        weights = rounds.weights(told, version)
        total = sum(weights)
        anchor = history[base] if base < version else None
        terms = [
            merge.Term([(0, delta)], weight / total, anchor)
            for delta, weight in zip(sent, weights, strict=True)
        ]
        if forget:
            outer = Outer(LAYOUT, [theta], [torch.zeros(SIZE)], problem.mu)
        mean = merge.mean_delta(theta, terms, problem.kappa, torch.empty(SIZE))
        outer.step(0, mean, problem.eta)
        history.append(theta.clone())
    return history


def rate(history, optimum, dimension=0):
    """By what the distance to `optimum` shrinks (or grows) per version, over the second half."""
    half = len(history) // 2
    first, last = (history[at] - optimum for at in (half, -1))
    ratio = (last.norm() / first.norm()).item()
    return ratio ** (1 / (len(history) - 1 - half))


def spectral_radius(work, eta, mu, late=0, kappa=0.0):
    """Of one dimension's linear map on (e_v, e_{v-1}, b): the rate that theory gives."""
    now, before = (kappa, work - kappa) if late else (work, 0.0)  # g = now e_v + before e_{v-1}
    g = torch.tensor([now, before, 0.0], dtype=torch.float64)
    e, b = torch.eye(3, dtype=torch.float64)[0], torch.eye(3, dtype=torch.float64)[2]
    momentum = mu * b + g
    after = e - eta * (g + mu * momentum)
    return torch.linalg.eigvals(torch.stack([after, e, momentum])).abs().max().item()


def unequal(**changes):
    torch.manual_seed(4)
    works = 1 - (1 - 0.05 * torch.tensor([1.0, 2.0, 4.0, 8.0])) ** 20
    centres = tuple(torch.randn(3, SIZE))
    return replace(Problem(centres, (100, 300, 700), works), **changes)


def alike(work=0.4, **changes):
    """Two workers that agree on where to go: only the rate matters."""
    centre = torch.ones(SIZE)
    problem = Problem((centre, centre), (100, 100), torch.full((SIZE,), work))
    return replace(problem, **changes)


# ---- the fixed point ----------------------------------------------------------------------------


def test_training_ends_at_the_token_weighted_mean():
    problem = unequal()
    assert (train(problem, 300)[-1] - problem.optimum).abs().max() < 1e-5


def test_planted_unweighted_averaging_ends_at_a_predictable_wrong_point():
    problem = unequal()
    wrong = train(problem, 300, tokens=(1, 1, 1))[-1]
    plain_mean = torch.stack(problem.centres).mean(0)
    assert (wrong - plain_mean).abs().max() < 1e-5
    assert (wrong - problem.optimum).abs().max() > 1e-3


def test_planted_sum_instead_of_mean_diverges():
    def sums(problem, base):
        return [len(problem.centres) * delta for delta in problem.deltas(base)]

    problem = unequal(mu=0.0)
    assert (train(problem, 300)[-1] - problem.optimum).norm() < 1e-4
    assert not (train(problem, 300, deltas=sums)[-1] - problem.optimum).norm() < 1.0


def test_planted_wrong_sign_diverges():
    def negated(problem, base):
        return [-delta for delta in problem.deltas(base)]

    problem = unequal()
    assert not (train(problem, 50, deltas=negated)[-1] - problem.optimum).norm() < 1e3


# ---- the rate -----------------------------------------------------------------------------------


RATES = [(0.4, 1.0, 0.0), (0.3, 0.7, 0.0), (0.02, 0.7, 0.5)]


@pytest.mark.parametrize(("work", "eta", "mu"), RATES)
def test_the_distance_shrinks_at_the_rate_of_theory(work, eta, mu):
    problem = alike(work, eta=eta, mu=mu)
    measured = rate(train(problem, 20 if mu == 0 else 60), problem.optimum)
    assert measured == pytest.approx(spectral_radius(work, eta, mu), abs=2e-3)


def test_planted_ghost_worker_halves_the_contraction():
    """A worker that did nothing and yet counts in the divisor."""

    def with_ghost(problem, base):
        return [*problem.deltas(base)[:1], torch.zeros(SIZE)]

    problem = alike(eta=1.0, mu=0.0)
    honest = 1 - rate(train(problem, 12), problem.optimum)
    diluted = 1 - rate(train(problem, 12, deltas=with_ghost), problem.optimum)
    assert honest == pytest.approx(0.4, abs=1e-3)
    assert diluted == pytest.approx(0.2, abs=1e-3)


def test_a_ghost_that_counts_no_tokens_dilutes_nothing():
    def with_ghost(problem, base):
        return [*problem.deltas(base)[:1], torch.zeros(SIZE)]

    problem = alike(eta=1.0, mu=0.0)
    spared = 1 - rate(train(problem, 12, deltas=with_ghost, tokens=(100, 0)), problem.optimum)
    assert spared == pytest.approx(0.4, abs=1e-3)


def speed(history):
    return ((history[-1] - history[-2]).norm() / SIZE**0.5).item()


def test_momentum_multiplies_progress_where_rounds_agree():
    """On a long slope every round pulls by g: eta g (1 + mu / (1 - mu)) a version."""
    slope = 1e-3
    problem = alike(1e-6, centres=(torch.full((SIZE,), slope / 1e-6),) * 2)
    assert speed(train(problem, 200)) == pytest.approx(0.7 * slope / (1 - 0.9), rel=1e-2)


def test_planted_loss_of_momentum_is_seen_in_the_rate():
    """As when a new master starts with b = 0 every time: 1 + mu is left of 1 / (1 - mu)."""
    slope = 1e-3
    problem = alike(1e-6, centres=(torch.full((SIZE,), slope / 1e-6),) * 2)
    forgetful = speed(train(problem, 200, forget=True))
    assert forgetful == pytest.approx(0.7 * slope * 1.9, rel=1e-2)
    assert forgetful < 0.2 * speed(train(problem, 200))


def test_planted_plain_averaging_is_seen_in_the_rate():
    slope = 1e-3
    problem = alike(1e-6, centres=(torch.full((SIZE,), slope / 1e-6),) * 2)
    assert speed(train(replace(problem, mu=0.0, eta=1.0), 200)) < 0.2 * speed(train(problem, 200))


# ---- late deltas --------------------------------------------------------------------------------

STALE = [
    (work, mu, kappa)
    for work in (0.1, 0.2, 0.4, 0.6, 0.75, 0.99)
    for mu in (0.0, 0.5, 0.9)
    for kappa in (0.0, 0.5, 1.0)
]


@pytest.mark.parametrize(("work", "mu", "kappa"), STALE)
def test_late_deltas_are_stable_where_theory_says_so(work, mu, kappa):
    """Every worker one version behind, for each curvature, momentum and re-anchoring."""
    problem = alike(work, mu=mu, late=1, kappa=kappa)
    predicted = spectral_radius(work, 0.7, mu, late=1, kappa=kappa)
    assert abs(predicted - 1) > 0.01, "too close to call"
    history = train(problem, 200)
    first, last = ((history[at] - problem.optimum).norm().item() for at in (0, -1))
    assert (last < first) == (predicted < 1)


def test_base_relative_merging_of_late_deltas_diverges_where_reanchored_ones_converge():
    """The fault that costs most and shows last: at eta 0.7, mu 0.9 and workers that converge."""
    relative, anchored = (alike(0.8, late=1, kappa=kappa) for kappa in (0.0, 1.0))
    assert rate(train(relative, 60), relative.optimum) > 1.15
    assert rate(train(anchored, 20), anchored.optimum) < 0.8
    fresh = alike(0.8, late=0)
    assert rate(train(fresh, 60), fresh.optimum) < 0.97


def test_the_stability_limit_without_momentum_is_where_it_is_computed():
    """e_{v+1} = e_v - eta D e_{v-1} is stable up to eta D = 1."""
    below, above = (alike(0.99, eta=eta, mu=0.0, late=1, kappa=0.0) for eta in (0.95, 1.07))
    assert rate(train(below, 80), below.optimum) < 1
    assert rate(train(above, 80), above.optimum) > 1
