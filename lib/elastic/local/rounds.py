"""A round: the work that turns version v into v+1. All of its decisions, none of its I/O.
Pure.

    judge(header, ...)       may this delta be merged?        -> None, or the Refusal
    decide(view, now)        wait, call, or close the round?  -> Move with its reason
    weights(moves, version)  how much does each delta weigh?
    clips(moves, ...)        how much of each is merged, if it is too long?
    momentum(...), outer_lr(...)   the outer step
    canary(loss, ...)        has the newest version made the loss rise?

Equations: DiLoCo (arXiv 2311.08105); weights by tokens, staleness discount and the
thin-round rule as in docs/algorithm.md.
Everything is keyed and sorted by (slot, attempt, base), so that the order in which deltas
arrive cannot matter.

A delta's length is judged by what its steps could have moved. k steps whose learning rates
sum to S move c S if they all go one way, and c S / sqrt(k) if each goes its own; a healthy
delta is in between. `Reach` knows both constants, and expects the longer one: so no healthy
delta looks long because the learning rate rises, or because a round has more or fewer
steps. No guard stops a run: every mean follows what was seen, as optimizers that find
their own step size make deltas a hundred times as long within a few rounds. A useless
delta (it moved nothing, or goes back) is merged: it costs its part of one round, no more.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from statistics import median
from typing import NamedTuple

from elastic.run.ledger import Key, count
from elastic.run.records import Commit, Delta, Header, Measured, restored

# The most tokens believed of one sample: MORE_TOKENS times the run's mean, or MOST_TOKENS
# while that is not known.
MOST_TOKENS, MORE_TOKENS = 2**24, 16
STALE_DISCOUNT = 0.25  # w = tokens / (1 + 0.25 versions late)
DOUBLES_ROUNDS = 40  # in which K doubles in the cold start of a long run
FEW_STEPS, EARLY_MOMENTUM, MOST_MOMENTUM = 20, 0.5, 0.8
SHORTENS = 0.4  # how much less the outer learning rate is for each 1 of outer momentum
MEMORY_ROUNDS = 20  # horizon of the running means
# The mean learning rate per step is believed up to this many times the usual one. A
# worker that joins has a lower rate (its ramp), never one so much higher.
MOST_RATE = 4.0
CANARY_SAMPLES = 128  # the fewest of a round whose mean loss says anything
CANARY_SIGMAS = 6.0  # of the loss's change from round to round: no chance explains more
KNOWN_ROUNDS = 10  # of which that change has to be known


# ---- guards ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reach:
    """How far steps usually go: norm / S and norm sqrt(k) / S, as geometric means over
    rounds."""

    straight: Measured = 0.0
    wandering: Measured = 0.0
    rounds: int = 0
    rate: Measured = 0.0  # learning rate of a step, in the last round

    def length(self, moved: Delta) -> float:
        """The norm that is expected of such steps; 0: unknown."""
        wandering = self.wandering / math.sqrt(max(1, moved.steps))
        return moved.lr_sum * max(self.straight, wandering)

    def after(self, moves: Sequence[Delta]) -> "Reach":
        """One round later. Only whole deltas count: a few steps say little of what all of
        a round's steps do."""
        if not (known := whole(moves)):
            return self
        now, blend = _reach(known), 1 / min(MEMORY_ROUNDS, self.rounds + 1)
        return Reach(
            (self.straight or 1.0) ** (1 - blend) * now.straight**blend,
            (self.wandering or 1.0) ** (1 - blend) * now.wandering**blend,
            self.rounds + 1,
            now.rate,
        )


def _reach(known: Sequence[Delta]) -> Reach:
    """The reach of one round's deltas: the medians."""
    return Reach(
        median(each.norm / each.lr_sum for each in known),
        median(each.norm * math.sqrt(each.steps) / each.lr_sum for each in known),
        rate=median(each.lr_sum / each.steps for each in known),
    )


def whole(moves: Sequence[Delta]) -> list[Delta]:
    """Those that have moved, with at least half as many steps as the longest."""
    most = max((each.steps for each in moves), default=0)
    moved = [each for each in moves if min(each.norm, each.steps, each.lr_sum) > 0]
    return [each for each in moved if 2 * each.steps >= most]


@dataclass(frozen=True)
class Running:
    """Means over recent rounds; part of every commit, so that a new master goes on with
    them."""

    reach: Reach = Reach()
    weight: Measured = 0.0  # of a round: the sum of its deltas'
    loss: Measured = 0.0  # of the last round
    unrest: Measured = 0.0  # mean square of the loss's change from round to round
    rounds: int = 0  # from which such a change is known

    @classmethod
    def of(cls, commit: Commit) -> "Running":
        """As a commit has them; what an older commit does not have begins anew."""
        return restored(cls, commit.running or {})

    def after(self, moves: Sequence[Delta], weight: float, loss: float) -> "Running":
        """One round later; `loss`: `round_loss`."""
        told, change = bool(self.loss and loss), loss - self.loss
        return Running(
            self.reach.after(moves), blend(self.weight, weight), loss,
            blend(self.unrest, change**2) if told else self.unrest, self.rounds + told,
        )


def blend(mean: float, value: float) -> float:
    """A running mean, one value later; 0: none yet."""
    return value if mean == 0.0 else mean + (value - mean) / MEMORY_ROUNDS


def clips(moves: Sequence[Delta], clip_norm: float, reach: Reach) -> list[float]:
    """The factor that shortens each delta to `clip_norm` times the norm that is expected
    of its steps; 1 if it is not longer. What is expected is known from three or more
    whole deltas of this round, else from three or more rounds before it. If three agree,
    a learning rate more than MOST_RATE times theirs is not believed. `clip_norm` 0 never
    clips."""
    known = whole(moves)
    now = _reach(known) if len(known) >= 3 else Reach()
    usual = now if now.rate else reach if reach.rounds >= 3 else now
    # Of only two, nobody knows which one lies.
    rate = MOST_RATE * max(now.rate, reach.rate) if now.rate else math.inf
    told = [replace(each, lr_sum=min(each.lr_sum, rate * each.steps)) for each in moves]
    most = [clip_norm * usual.length(each) for each in told]
    return [min(1.0, m / each.norm) if m and each.norm else 1.0
            for m, each in zip(most, moves, strict=True)]


def round_loss(headers: Sequence, version: int) -> float:
    """Mean training loss on a version, weighted by tokens; 0: too few samples to tell."""
    fresh = [header for header in headers if header.base == version and header.loss]
    tokens = sum(header.tokens for header in fresh)
    samples = sum(stop - start for header in fresh for _, start, stop in header.samples)
    if samples < CANARY_SAMPLES:
        return 0.0
    return sum(header.loss * header.tokens for header in fresh) / tokens


def canary(loss: float, running: Running, most_rise: float) -> str:
    """Why the version that a whole round has been trained on is to be reverted, or "":
    the round's loss has risen by more than `most_rise`, and by more than chance explains.
    """
    if not most_rise or running.rounds < KNOWN_ROUNDS or not (loss and running.loss):
        return ""
    most = max(most_rise, CANARY_SIGMAS * math.sqrt(running.unrest))
    if loss - running.loss <= most:
        return ""
    return f"the loss rose from {running.loss:.3f} to {loss:.3f}, by more than {most:.3f}"


# ---- may this delta be merged? ---------------------------------------------------------


class Rule(StrEnum):
    """The rule that a delta breaks which is not merged. It is the first word of the
    reason that people read."""

    OTHER_RUN = "other-run"
    DUPLICATE = "duplicate"
    STALE = "stale"
    TAKEN_BACK = "taken-back"
    FENCED = "fenced"
    SHAPE = "shape"
    SAMPLES = "samples"
    NON_FINITE = "non-finite"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"  # this and the next two: the bytes
    ALTERED = "altered"
    UNREADABLE = "unreadable"


class Refusal(NamedTuple):
    """Why a delta is not merged: the rule that it breaks, and words for people."""

    rule: Rule
    reason: str


def refusal(rule: Rule, what: str) -> Refusal:
    return Refusal(rule, f"{rule}: {what}")


@dataclass(frozen=True)
class Facts:
    """What the master knows of its run and the open round when it judges a delta."""

    run: str
    version: int
    layout: str
    codec: str
    fragment_bytes: tuple[int, ...]  # what a delta's fragments take in that codec
    max_staleness: int
    # Slot -> newest attempt that ever claimed it: the server's own table, which grows
    # while the round is open.
    attempts: Mapping[int, int]
    reverted: frozenset[int] = frozenset()  # versions that the canary found bad
    most_steps: float = math.inf  # of a round
    most_samples: float = math.inf


def credited(header: Header, tokens_per_sample: float) -> Header:
    """The header, with no more tokens than its samples can hold. `tokens_per_sample`: the
    run's mean so far; 0: nobody knows yet."""
    most = MORE_TOKENS * tokens_per_sample or MOST_TOKENS
    tokens = math.ceil(most * count(header.samples))
    return replace(header, tokens=min(header.tokens, tokens))


def judge(header: Header, facts: Facts, judged: Collection[Key], refused: str) -> Refusal | None:
    """Why a delta is not merged, by its header alone; None: it is good so far.

    `judged`: the keys of those that were accepted before. `refused`: why the ledger
    refuses the header's samples, or "".
    """
    slot, attempt, steps = header.slot, header.attempt, header.steps
    claimed = facts.attempts.get(slot, 0)
    base, behind = f"version {header.base}", facts.version - header.base
    layout, codec, trained = header.layout, header.codec, count(header.samples)
    sizes = tuple(fragment.bytes for fragment in header.fragments)
    losses = header.loss + header.first_loss  # finite only if both are
    is_foreign = [
        (header.run != facts.run, Rule.OTHER_RUN, f"it is a delta of run {header.run!r}"),
        (header.key in judged, Rule.DUPLICATE, f"slot {slot} delivered it before"),
        (behind > facts.max_staleness, Rule.STALE, f"based on {base}, {behind} behind"),
        (header.base in facts.reverted, Rule.TAKEN_BACK, f"{base} has made the loss rise"),
        (attempt > claimed, Rule.FENCED, f"attempt {attempt} never claimed slot {slot}"),
    ]
    is_unfit = [
        (layout != facts.layout, Rule.SHAPE, f"layout {layout}, not {facts.layout}"),
        (codec != facts.codec, Rule.SHAPE, f"codec {codec}, not {facts.codec}"),
        (sizes != facts.fragment_bytes, Rule.SHAPE, "the fragments' sizes are not the run's"),
        (not 0 < trained <= facts.most_samples, Rule.SAMPLES,
         f"{trained} are not those of a round"),
        (steps > facts.most_steps, Rule.SHAPE, f"{steps} steps, a round has fewer"),
        (not math.isfinite(losses), Rule.NON_FINITE, f"the loss is {losses}"),
        (bool(refused), Rule.SAMPLES, refused),
    ]
    rules = is_foreign if header.is_pass else is_foreign + is_unfit
    return next((refusal(rule, what) for is_broken, rule, what in rules if is_broken), None)


# ---- wait, call, or close? -------------------------------------------------------------


class Move(Enum):
    WAIT = "wait"
    CALL = "last call"
    CLOSE = "close"


@dataclass(frozen=True)
class View:
    """The round as the master sees it. Times are Redis TIME in seconds."""

    opened: float
    called: float | None  # when the last call went out
    expected: dict[int, float]  # live slots past start-up -> when they joined
    answered: frozenset[int]  # slots with a judged header based on this version
    accepted: int  # deltas that would be merged if the round closed now
    preparing: int  # deltas whose bytes are still being checked
    due_s: float  # how long after its opening it is due; inf: nobody knows yet


def inner_steps(commit: Commit, settings) -> int:
    """K of the round on top of `commit`: few steps after a cold start, when workers drift
    apart fast.

    With c = cold_start, K grows in proportion to the tokens until it is whole at a share
    of c / ln K of all tokens: from K = 1 on that takes c times as many rounds as the
    whole run would take with K. In a run of many rounds 2^(v/40) grows faster.
    """
    most, more = settings.inner_steps, settings.cold_start
    if not more:
        return most
    by_version = 2 ** min(commit.version / DOUBLES_ROUNDS, 60.0)
    by_tokens = math.log(most) / more * most * commit.tokens / max(1, commit.total_tokens)
    return max(1, round(min(most, max(by_version, by_tokens))))


def momentum(steps: int, parts: Sequence[float], settings) -> float:
    """mu of a round of that many inner steps; `parts`: how much of the mean each delta is.

    "auto": (n - 1) / (n + 2) for n equal parts, at most 0.8. What differs between deltas
    cancels out in their mean, which is shorter the more they are; momentum makes up for
    that. Less while steps are few only because it is early.
    """
    mu = settings.outer_momentum
    if mu == "auto":
        one_in_n = sum(part**2 for part in parts)
        mu = min(MOST_MOMENTUM, (1 - one_in_n) / (1 + 2 * one_in_n))
    is_early = steps < min(FEW_STEPS, settings.inner_steps)
    return min(mu, EARLY_MOMENTUM) if is_early else mu


def pace_s(delta: Header, took_s: float, inner_steps: int) -> float:
    """Seconds that each of `inner_steps` takes a worker, by its delta, which came
    `took_s` after the round was opened.

    A delta of few steps says too much, never too little: what happens once (a compilation, a
    delivery) counts as part of each step. So a round may be due too late once, and then the
    next delta has all steps; a round that is due too early does not stay so.
    """
    # A worker that joined late has had no stall.
    late_s = min(took_s - delta.seconds, delta.stall_s)
    return delta.seconds / delta.steps + late_s / inner_steps


def due_s(paces_s: list[float], inner_steps: int, settings) -> float:
    """How long after its opening a round is due: when the fastest quarter of the workers
    have done all their steps. `paces_s`: of the live workers whose pace is known; if
    there are none, inf.

    A worker that is slower, or came later, stops then with fewer steps, so that all
    finish together (as in DyLU, arXiv 2401.09135, but with a quantile: one odd worker of
    many sets no pace).
    """
    if not paces_s:
        return math.inf
    pace_s = sorted(paces_s)[(len(paces_s) - 1) // 4]
    return max(settings.min_deadline_s, inner_steps * pace_s)


def is_due(left_s: float, steps: int, trained_s: float) -> bool:
    """Is it time to stop, as one more step would end further from the moment at which the
    round is due than now is? `left_s`: until that moment; `steps` took `trained_s`. So
    workers stop early as often as late."""
    return left_s < (trained_s / steps / 2 if steps else 0.0)


def deadline_s(due_s: float, settings) -> float:
    """How long after its opening a round that is due after `due_s` waits for late
    workers. Those that know when it is due stop then, whatever their pace, and so differ
    by no more than a step and a delivery."""
    return due_s * (1 + settings.deadline_k / 20)


def decide(view: View, settings, now: float) -> tuple[Move, str]:
    """What to do with the open round, and why. One worker is enough; with none it stays
    open.

    It reads quorum, deadline_k and last_call_s of `settings`, the section local_sgd.
    """
    missing = sorted(set(view.expected) - view.answered)
    if view.preparing:
        return Move.WAIT, "checking the bytes of a delta"
    if not view.accepted:
        return Move.WAIT, "no delta yet" if view.expected else "no worker"
    if not missing:
        return Move.CLOSE, f"all {len(view.expected)} live workers have answered"
    if view.called is not None:
        if now - view.called >= settings.last_call_s:
            return Move.CLOSE, f"last call is over, without slots {_some(missing)}"
        return Move.WAIT, f"last call: waiting for slots {_some(missing)}"
    if all(view.expected[slot] > view.opened for slot in missing):
        return Move.CALL, f"only workers that joined late are missing: slots {_some(missing)}"
    enough = max(1, math.ceil(settings.quorum * len(view.expected)))
    answered = len(view.expected) - len(missing)
    if answered < enough or view.due_s == math.inf:
        return Move.WAIT, f"waiting for slots {_some(missing)}"
    wait_s = deadline_s(view.due_s, settings)
    if now - view.opened >= wait_s:
        return Move.CALL, f"slots {_some(missing)} took longer than {wait_s:.1f} s"
    return Move.WAIT, f"waiting for slots {_some(missing)}, at most {wait_s:.1f} s"


def _some(slots: list[int]) -> str:
    """A list of slots short enough for a log line."""
    shown = ", ".join(map(str, slots[:8]))
    return shown if len(slots) <= 8 else f"{shown} and {len(slots) - 8} more"


# ---- how much does each delta weigh? ---------------------------------------------------


def weights(deltas: Sequence[Delta], version: int) -> list[float]:
    """Of each delta: its tokens, discounted by staleness. With its clip (see `clips`), it
    contributes weight * clip * delta / total weight."""
    return [d.tokens / (1 + STALE_DISCOUNT * (version - d.base)) for d in deltas]


def outer_lr(momentum: float, weight: float, running: Running, settings) -> float:
    """eta * min(1, sqrt(W / mean W)): a round with little work behind it steps less.
    "auto": eta = 1 - 0.4 mu. So a round of one delta applies it as it is."""
    lr = 1 - SHORTENS * momentum if settings.outer_lr == "auto" else settings.outer_lr
    is_thin = settings.thin_rounds and weight < running.weight
    return lr * math.sqrt(weight / running.weight) if is_thin else lr
