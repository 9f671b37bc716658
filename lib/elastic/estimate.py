"""What a round of local mode moves, and how long that takes, on paper. Pure.

    deliver    every worker writes its delta, and the master reads it, to check it
    merge      the master reads the deltas again, adds them up, and steps
    publish    the master writes a version durably: bfloat16 for workers, float32 and momentum
    pull       every worker reads the parameters

A transfer takes as long as its narrowest place: one process, or the filesystem as a whole. Without
overlap the four follow each other, and workers stand still for their sum.
"""

from dataclasses import dataclass

PUBLISHED, KEPT = 2, 8  # bytes an element of a version that workers read, that the master does
ROUNDS_OF_TOPK = 1000  # ten times until a hundredth has been everything
ENOUGH = 0.05  # of a round; to stand still for longer is worth a word


@dataclass(frozen=True)
class Model:
    """What there is to move; as `elastic.describe` finds it."""

    numel: int
    delta_bytes: int
    fragments: int
    largest_bytes: int  # of a delta's fragment
    has_feedback: bool
    tokens_per_sample: int = 0  # 0: not known


@dataclass(frozen=True)
class Rates:
    """Bytes and elements a second. Where nothing was measured: a middling cluster's filesystem, and
    what tests/bench/bench_codec.py found for int8 on a busy core."""

    process: float = 5e9
    filesystem: float = 20e9
    redis: float = 1e9  # its one thread copies every byte in, and out
    merged: float = 1.1e9  # elements, per core
    stepped: float = 0.6e9  # elements, per core


@dataclass(frozen=True)
class Cost:
    """Seconds of a round's four parts."""

    deliver_s: float
    merge_s: float
    publish_s: float
    pull_s: float

    @property
    def stall_s(self) -> float:
        return self.deliver_s + self.merge_s + self.publish_s + self.pull_s

    @property
    def master_s(self) -> float:
        return self.merge_s + self.publish_s


def cost(
    model: Model, workers: int, cores: int = 16, shards: int = 1,
    rates: Rates = Rates(), through_redis: bool = False,
) -> Cost:  # fmt: skip
    """Of one round, averaged by `shards` processes of `cores` cores, each on a node of its own."""
    up, wide = workers * model.delta_bytes, min(rates.filesystem, shards * rates.process)
    read_s = up / wide
    deliver_s = max(model.delta_bytes / rates.process, up / rates.filesystem, read_s)
    if through_redis:
        deliver_s, read_s = 2 * up / rates.redis, up / rates.redis
    add_s = workers * model.numel / (rates.merged * cores * shards)
    step_s = model.numel / (rates.stepped * cores * shards)
    down = PUBLISHED * model.numel
    return Cost(
        deliver_s, max(read_s, add_s) + step_s, (PUBLISHED + KEPT) * model.numel / wide,
        max(down / rates.process, workers * down / rates.filesystem),
    )  # fmt: skip


def shards_for(model: Model, workers: int, budget_s: float, most: int = 64, **how) -> int | None:
    """The fewest shards with which the master's part stays within `budget_s`; None: not by `most`.

    `how`: as of `cost`.
    """
    costs = ((n, cost(model, workers, shards=n, **how)) for n in range(1, most + 1))
    return next((n for n, one in costs if one.master_s <= budget_s), None)


def warnings(model: Model, workers: int, config, rounds: float) -> list[str]:
    """What is likely to hurt, with the way out. `config`: the run's; `rounds`: 0: not known."""
    sgd, up = config.local_sgd, workers * model.delta_bytes
    version = (PUBLISHED + KEPT) * model.numel
    space = version * (config.checkpoint.keep + 1) + up * (sgd.max_staleness + 1)
    found = {
        f"a round's deltas need {size(up)} of Redis, redis.maxmemory is"
        f" {size(config.redis.maxmemory_bytes)}: use local_sgd.transport = \"filesystem\"":
            sgd.transport == "redis" and up > config.redis.maxmemory_bytes,
        f"versions and deltas take up to {size(space)}, checkpoint.min_free is only"
        f" {size(config.checkpoint.min_free_bytes)}: commits would wait for space":
            config.checkpoint.min_free_bytes < version,
        f"topk needs some {ROUNDS_OF_TOPK} rounds to send everything once, the run has"
        f" {rounds:.0f}: use int4, or fewer inner_steps":
            sgd.compression == "topk" and 0 < rounds < ROUNDS_OF_TOPK,
        f"the run has {rounds:.0f} rounds, and the outer optimizer wants a hundred:"
        " lower local_sgd.inner_steps": 0 < rounds < 100,
    }  # fmt: skip
    return [text for text, holds in found.items() if holds]


def report(model: Model, workers: int, config, rates: Rates = Rates()) -> str:
    """The plan of a run at its largest, as people read it."""
    sgd = config.local_sgd
    cores = config.slurm.master_cpus or 16
    one = cost(model, workers, cores, 1, rates, sgd.transport == "redis")
    per_step = config.train.batch_size * config.slurm.gpus_per_worker * model.tokens_per_sample
    per_round = per_step * sgd.inner_steps * workers
    rounds = config.train.max_tokens / per_round if per_round else 0
    up, down = model.delta_bytes, PUBLISHED * model.numel
    host = down + model.largest_bytes + (4 * model.numel if model.has_feedback else 0)
    step_s = one.stall_s / ENOUGH / sgd.inner_steps
    lines = [
        ("model", f"{model.numel:,} parameters in {model.fragments} fragments"),
        ("a round", f"{workers} workers, {sgd.inner_steps} steps each; a delta is {size(up)}"
                    f" ({sgd.compression}), the parameters are {size(down)}"),
        ("it moves", f"{size(workers * up)} up, read twice; {size(workers * down)} down;"
                     f" a version on disk is {size((PUBLISHED + KEPT) * model.numel)}"),
        ("it takes", f"{one.stall_s:.3g} s: deliver {one.deliver_s:.3g}, merge {one.merge_s:.3g},"
                     f" publish {one.publish_s:.3g}, pull {one.pull_s:.3g}"),
        ("", f"less than {ENOUGH:.0%} of a round if an inner step takes {step_s:.2g} s or more"),
        ("memory", f"worker {size(host)} of its host's, beside training; master"
                   f" {size(12 * model.numel + cores * model.largest_bytes)}"),
        ("taken for granted", f"{size(rates.process)}/s per process, {size(rates.filesystem)}/s for"
                              f" the filesystem, {cores} cores for the master"),
    ]  # fmt: skip
    if rounds:
        lines.insert(2, ("rounds", f"{rounds:,.0f} of {per_round:,} tokens each"))
    lines += [("warning", text) for text in warnings(model, workers, config, rounds)]
    return "\n".join(f"  {name:18}{text}" for name, text in lines)


def size(amount: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
