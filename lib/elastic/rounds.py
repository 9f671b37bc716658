"""A round: the work that turns version v into v+1. All of its decisions, none of its I/O.

    judge(header, facts)    may this delta be merged?        -> Verdict with its reason
    decide(view, now)       wait, call, or close the round?  -> Move with its reason
    shares(accepted, ...)   how much does each delta weigh?  -> weights and clips
    outer_lr(...)           the step of a thin round

Equations: DiLoCo (arXiv 2311.08105); weights by tokens, staleness discount, median clip and the
thin-round rule as in the README's section "The algorithm". Everything is keyed and sorted by
(slot, attempt, base), so that the order in which deltas arrive cannot matter.
"""

import math
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import median

from elastic.ledger import Range

MAX_FRAGMENTS = 100_000
STALE_DISCOUNT = 0.25  # w = tokens / (1 + 0.25 versions late)
MEMORY_ROUNDS = 20  # horizon of the running means
NOTHING = "no steps to give"
DOUBLES_ROUNDS, COLD = 10, 0.05  # of a cold start: K doubles in so many, until so much is trained
FEW_STEPS, EARLY_MOMENTUM = 20, 0.5
STRAYS = 10.0  # times the usual norm: a delta that its worker takes for broken itself
OUTLIER, KNOWN_DELTAS = 3.0, 120  # standard deviations; of so many deltas at least (EDiT)
STANDS_OUT = 1.5  # medians: the longest delta of a version that is taken back
MOST_MEAN = 3.0  # running means: no mean delta is longer
CANARY_SIGMAS, KNOWN_ROUNDS = 6.0, 10


@dataclass(frozen=True)
class Fragment:
    """How to know the bytes of one fragment; where they are follows from the delta's key."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Header:
    """A delta's metadata, as its worker announced it. The delta is base minus local."""

    run: str
    slot: int
    attempt: int
    job_id: str
    base: int
    layout: str
    codec: str
    steps: int
    tokens: int
    samples: tuple[Range, ...]
    loss: float
    first_loss: float
    fragments: tuple[Fragment, ...]
    inner: str = ""  # where the inner optimizer state came from, for the record
    seconds: float = 0.0  # from the start of the round to the delivery, on the worker's clock
    stall_s: float = 0.0  # from the last inner step on the base before to the first on this one

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.slot, self.attempt, self.base)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Header":
        """Check every field's type and sign. Raises ValueError naming what is wrong."""
        if not isinstance(data, dict):
            raise ValueError("a header is a table")
        kinds = cls.__annotations__ | {"samples": list, "fragments": list}
        fields = {"inner": "", "seconds": 0.0, "stall_s": 0.0, **data}
        if set(fields) != set(kinds):
            raise ValueError(f"fields differ: {sorted(set(fields) ^ set(kinds))}")
        for name, kind in kinds.items():
            value = fields[name]
            if kind is float and type(value) is int and abs(value) < 2**62:
                value = fields[name] = float(value)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, not {kind.__name__}")
            if kind is int and not 0 <= value < 2**62:
                raise ValueError(f"{name} is {value}")
            if name in ("seconds", "stall_s") and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}")
        samples = tuple(_range(each) for each in fields.pop("samples"))
        fragments = fields.pop("fragments")
        if len(fragments) > MAX_FRAGMENTS:
            raise ValueError(f"{len(fragments)} fragments")
        parsed = tuple(_fragment(each) for each in fragments)
        return cls(**fields, samples=samples, fragments=parsed)


def _range(each: object) -> Range:
    whole = isinstance(each, list | tuple) and len(each) == 3
    if not whole or any(type(number) is not int or number < 0 for number in each):
        raise ValueError(f"not a sample range: {each!r}")
    return tuple(each)


def _fragment(each: object) -> Fragment:
    whole = isinstance(each, dict) and set(each) == {"bytes", "xxh3"}
    if not whole or type(each["bytes"]) is not int or not isinstance(each["xxh3"], str):
        raise ValueError(f"not a fragment: {each!r}")
    return Fragment(**each)


# ---- may this delta be merged? ------------------------------------------------------------------


class Verdict(Enum):
    ACCEPT = "accept"
    PASS = "pass"  # the worker answered, and has nothing to give
    REJECT = "reject"


@dataclass(frozen=True)
class Facts:
    """What the master knows when it judges."""

    run: str
    version: int
    layout: str
    fragment_bytes: dict[str, tuple[int, ...]]  # by codec, of those that are accepted
    max_staleness: int
    attempts: dict[int, int]  # slot -> newest attempt that ever claimed it
    judged: frozenset  # keys of the headers judged so far
    taken_back: frozenset = frozenset()  # versions that the canary found bad


def judge(header: Header, facts: Facts, samples_refused: str) -> tuple[Verdict, str]:
    """Accept, pass or reject a delta by its header alone. The reason's first word names the rule.

    `samples_refused` is the ledger's answer for the header's samples; empty if it has none.
    """
    base, behind = header.base, facts.version - header.base
    attempt, claimed = header.attempt, facts.attempts.get(header.slot, 0)
    sizes = tuple(fragment.bytes for fragment in header.fragments)
    losses, known = header.loss + header.first_loss, facts.fragment_bytes
    rules = [
        (header.run != facts.run, f"other-run: it is a delta of run {header.run!r}"),
        (header.key in facts.judged, f"duplicate: slot {header.slot} delivered it before"),
        (behind < 0, f"future: based on version {base}"),
        (behind > facts.max_staleness, f"stale: based on version {base}, {behind} behind"),
        (base in facts.taken_back, f"taken-back: version {base} has made the loss rise"),
        (attempt > claimed, f"fenced: attempt {attempt} never claimed slot {header.slot}"),
        (header.tokens == 0 or header.steps == 0, NOTHING),
        (header.layout != facts.layout, f"shape: layout {header.layout}, not {facts.layout}"),
        (header.codec not in known, f"shape: codec {header.codec}, not {' or '.join(known)}"),
        (sizes != known.get(header.codec), "shape: the fragments' sizes are not the model's"),
        (not math.isfinite(losses), f"non-finite: the loss is {losses}"),
        (bool(samples_refused), f"samples: {samples_refused}"),
    ]
    broken = next((reason for is_broken, reason in rules if is_broken), "")
    if not broken:
        return Verdict.ACCEPT, f"{header.tokens} tokens in {header.steps} steps"
    return Verdict.PASS if broken is NOTHING else Verdict.REJECT, broken


# ---- wait, call, or close? ----------------------------------------------------------------------


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
    durations_s: tuple[float, ...]  # how long workers took, this round and recently


def inner_steps(commit: dict, settings) -> int:
    """K of the round on top of `commit`: few steps from a cold start, where workers drift apart.

    min(K, 10 · 2^(v/10)), and all of K once a twentieth of the tokens is committed.
    """
    most, first = settings.inner_steps, settings.cold_start_steps
    if not first:
        return most
    by_version = first * 2 ** min(commit["version"] / DOUBLES_ROUNDS, 60.0)
    by_tokens = most * commit["tokens"] / (COLD * max(1, commit["total_tokens"]))
    return max(1, min(most, int(max(by_version, by_tokens))))


def momentum(steps: int, settings) -> float:
    """mu of a round of that many inner steps: less while they are few only because it is early."""
    is_early = steps < min(FEW_STEPS, settings.inner_steps)
    return min(settings.outer_momentum, EARLY_MOMENTUM) if is_early else settings.outer_momentum


def whole_s(header: Header, took_s: float, inner_steps: int) -> float | None:
    """How long a round of all `inner_steps` takes this worker, by a delta that came `took_s` after
    the round was opened; None by one of so few steps that it says little."""
    if 2 * header.steps < inner_steps:
        return None
    return took_s + (inner_steps - header.steps) * header.seconds / header.steps


def due_s(durations_s: tuple[float, ...], settings) -> float | None:
    """When a round is due, after its opening: by then the faster quarter have done all their steps.

    Whoever is slower, or came later, stops there with fewer steps, so that all finish together
    (as DyLU, arXiv 2401.09135, but with a quantile that one odd worker cannot move).
    """
    if not durations_s:
        return None
    return max(settings.min_deadline_s, sorted(durations_s)[len(durations_s) // 4])


def without_the_quickest(durations_s: tuple[float, ...]) -> tuple[float, ...]:
    """After a round in which nobody came far: the quickest quarter of what was known is no longer
    true, or a round that is due too early would keep itself so."""
    by_length = sorted(range(len(durations_s)), key=durations_s.__getitem__)
    kept = sorted(by_length[-(-len(durations_s) // 4) :])
    return tuple(durations_s[at] for at in kept)


def is_due(left_s: float, steps: int, trained_s: float) -> bool:
    """Would one more step end later than now by more than it is worth? `left_s`: until the round
    is due; `steps` took `trained_s`. Stopping at the nearest step is as often early as late."""
    return left_s < (trained_s / steps / 2 if steps else 0.0)


def deadline_s(durations_s: tuple[float, ...], settings) -> float:
    """median + k MAD of the workers' times, the MAD no less than a twentieth of the median."""
    middle = median(durations_s)
    spread = max(median(abs(d - middle) for d in durations_s), middle / 20)
    return max(settings.min_deadline_s, middle + settings.deadline_k * spread)


def decide(view: View, settings, now: float) -> tuple[Move, str]:
    """What to do with the open round, and why. One worker is enough; with none it stays open.

    Of `settings` (config section local_sgd) count quorum, deadline_k, min_deadline_s, last_call_s.
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
        return Move.CALL, f"only workers that joined late are still at it: slots {_some(missing)}"
    enough = max(1, math.ceil(settings.quorum * len(view.expected)))
    answered = len(view.expected) - len(missing)
    if answered < enough or not view.durations_s:
        return Move.WAIT, f"waiting for slots {_some(missing)}"
    wait_s = deadline_s(view.durations_s, settings)
    if now - view.opened >= wait_s:
        return Move.CALL, f"slots {_some(missing)} took longer than {wait_s:.1f} s"
    return Move.WAIT, f"waiting for slots {_some(missing)}, at most {wait_s:.1f} s"


def _some(slots: list[int]) -> str:
    """A list of slots short enough for a log line."""
    shown = ", ".join(map(str, slots[:8]))
    return shown if len(slots) <= 8 else f"{shown} and {len(slots) - 8} more"


# ---- how much does each delta weigh? ------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one delta contributes: weight * clip * delta / total weight."""

    weight: float
    clip: float


@dataclass(frozen=True)
class Running:
    """Means over recent rounds; part of every commit, so that a new master goes on with them."""

    norm: float = 0.0  # of accepted deltas
    weight: float = 0.0  # of whole rounds
    spread: float = 0.0  # variance of those norms
    deltas: int = 0
    first_loss: float = 0.0  # of workers on the newest version but one, before their first step
    unrest: float = 0.0  # mean square of its change from round to round
    rounds: int = 0  # that have told such a change

    def after(self, norms: list[float], weight: float, first_loss: float) -> "Running":
        norm, change = sum(norms) / len(norms), first_loss - self.first_loss
        off = sum((each - (self.norm or norm)) ** 2 for each in norms) / len(norms)
        told = bool(self.first_loss and first_loss)
        return Running(
            blend(self.norm, norm), blend(self.weight, weight), blend(self.spread, off),
            self.deltas + len(norms), first_loss,
            blend(self.unrest, change**2) if told else self.unrest, self.rounds + told,
        )  # fmt: skip


def blend(mean: float, value: float) -> float:
    """A running mean, one value later; 0: none yet."""
    return value if mean == 0.0 else mean + (value - mean) / MEMORY_ROUNDS


def strays(norm: float, usual: float) -> str:
    """Why a worker should not send a delta of that norm; `usual`: the mean of its own, or 0."""
    if not math.isfinite(norm):
        return "non-finite: its own delta"
    if usual and norm > STRAYS * usual:
        return f"outlier: its own delta, of norm {norm:.3g}; usual is {usual:.3g}"
    return ""


def outliers(
    headers: list[Header], norms: list[float], clip_norm: float, running: Running
) -> list[tuple[Header, str]]:
    """Deltas to be left out: longer than what is clipped, and by far longer than they ever were.

    z > 3 (EDiT, arXiv 2412.07210), but by both measures: a rising learning rate lifts all norms,
    and with them the median.
    """
    sigma, reference = math.sqrt(running.spread), _reference(headers, norms, running)
    if running.deltas < KNOWN_DELTAS or not sigma or not clip_norm:
        return []
    z = [(norm - running.norm) / sigma for norm in norms]
    return [
        (header, f"outlier: norm {norm:.3g}, {each:.1f} sigma above the mean {running.norm:.3g}")
        for header, norm, each in zip(headers, norms, z, strict=True)
        if each > OUTLIER and norm > clip_norm * reference
    ]


def first_loss(headers: list[Header], version: int) -> float:
    """What workers saw on their first batch of a version, by tokens; 0: none did."""
    fresh = [header for header in headers if header.base == version and header.first_loss]
    tokens = sum(header.tokens for header in fresh)
    return sum(h.first_loss * h.tokens for h in fresh) / tokens if tokens else 0.0


def suspect(deltas: list[dict]) -> tuple[int, int] | None:
    """Slot and attempt of the longest of a commit's deltas, where it stands out."""
    if len(deltas) < 2:
        return None
    longest = max(deltas, key=lambda delta: delta["norm"])
    stands_out = longest["norm"] > STANDS_OUT * median(delta["norm"] for delta in deltas)
    return (longest["slot"], longest["attempt"]) if stands_out else None


def canary(first_loss: float, running: Running, most_rise: float) -> str:
    """Why the version that workers have just seen for the first time is to be taken back, or "".

    Its loss has risen by more than `most_rise`, and more than chance explains.
    """
    rise = first_loss - running.first_loss
    if not most_rise or running.rounds < KNOWN_ROUNDS or not (first_loss and running.first_loss):
        return ""
    bound = max(most_rise, CANARY_SIGMAS * math.sqrt(running.unrest))
    if rise <= bound:
        return ""
    return (f"the first losses rose from {running.first_loss:.3f} to {first_loss:.3f},"
            f" by more than {bound:.3f}")  # fmt: skip


def superseded(headers: list[Header]) -> list[Header]:
    """Those of which the same attempt has delivered one with a newer base."""
    newest: dict[tuple[int, int], int] = {}
    for header in headers:
        owner = (header.slot, header.attempt)
        newest[owner] = max(newest.get(owner, 0), header.base)
    return [h for h in headers if h.base != newest[(h.slot, h.attempt)]]


def shares(
    headers: list[Header], norms: list[float], version: int, clip_norm: float, running: Running
) -> list[Share]:
    """Weight by tokens, discount staleness, clip what is longer than `clip_norm` x the median.

    With fewer than three whole deltas the reference is the running mean; clip_norm 0 never clips.
    """
    late = [version - header.base for header in headers]
    weights = [h.tokens / (1 + STALE_DISCOUNT * s) for h, s in zip(headers, late, strict=True)]
    reference = _reference(headers, norms, running)
    clips = [
        min(1.0, clip_norm * reference / norm) if clip_norm and reference and norm else 1.0
        for norm in norms
    ]
    if running.deltas < KNOWN_DELTAS or not clip_norm:
        return [Share(w, c) for w, c in zip(weights, clips, strict=True)]
    # The mean is at most as long as the mean of the lengths.
    total = sum(weights)
    length = sum(w * c * n for w, c, n in zip(weights, clips, norms, strict=True)) / (total or 1.0)
    most = MOST_MEAN * running.norm
    cap = most / length if length > most else 1.0
    return [Share(w, c * cap) for w, c in zip(weights, clips, strict=True)]


def _reference(headers: list[Header], norms: list[float], running: Running) -> float:
    """The norm that others are measured by."""
    whole = whole_norms(headers, norms)
    return median(whole) if len(whole) >= 3 else running.norm


def whole_norms(headers: list[Header], norms: list[float]) -> list[float]:
    """The norms of deltas that are not partial: at least half as many steps as the longest."""
    most = max((header.steps for header in headers), default=0)
    return [norm for h, norm in zip(headers, norms, strict=True) if 2 * h.steps >= most]


def outer_lr(lr: float, weight: float, running: Running, thin_rounds: bool) -> float:
    """eta * min(1, sqrt(W / mean W)): a round with little work behind it steps less."""
    if not thin_rounds or running.weight <= 0:
        return lr
    return lr * min(1.0, math.sqrt(weight / running.weight))


def outer_gain(lr: float, momentum: float, cos: float) -> float:
    """Steady-state multiplier of one round's progress, eta (1 + mu / (1 - mu rho))."""
    return lr * (1 + momentum / (1 - momentum * min(cos, 0.999)))
