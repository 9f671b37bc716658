"""What a round of local mode moves, and how long that takes, on paper. Pure.

    deliver    every worker writes its delta, and the master reads it, to check it
    merge      the master reads the deltas again, adds them up, and steps
    publish    the master writes a version durably: bfloat16 for workers, float32 and momentum
    pull       every worker reads the parameters

A transfer takes as long as its narrowest place: one process, or the filesystem as a
whole. Without overlap the four follow each other, and workers stand still for their sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic.base.units import size

KEPT = 8  # bytes per parameter of a version that the master alone reads: float32, momentum
DOWN = 2  # bytes per parameter of a version that workers read: bfloat16
# averaging.py and in_hand.py act by these two.
THREADS = 16  # most threads that average; each holds a fragment of a delta and of a mean
AHEAD = 4  # of a round's steps, a quarter at most is done while its delta travels
ENOUGH = 0.05  # share of a round for which workers may stand still
# An origin that begins so says that a key was left open, and elastic-submit chose it.
CHOSEN = "elastic-submit"
PASS_FLOPS = 6  # per parameter and token, forth and back


@dataclass(frozen=True)
class Model:
    """What a run has to move, as `elastic.people.describe` finds it."""

    numel: int  # parameters
    delta_bytes: int
    fragments: int
    largest_numel: int  # of a fragment
    largest_bytes: int  # of a delta's fragment
    tokens_per_sample: int = 0  # 0: not known


@dataclass(frozen=True)
class Rates:
    """Bytes and elements a second. The defaults: the filesystem of a middling cluster,
    and what tests/bench/bench_codec.py measured for int8 on a busy core."""

    process: float = 5e9
    filesystem: float = 20e9
    merged: float = 1.1e9  # elements, per core
    stepped: float = 0.6e9  # elements, per core


class Save(NamedTuple):
    """What a job has to put on disk after a notice, and how much of that is its work."""

    work_bytes: float
    whole_bytes: float


class Cost(NamedTuple):
    """Seconds of a round's four parts."""

    deliver_s: float
    merge_s: float
    publish_s: float
    pull_s: float

    @property
    def stall_s(self) -> float:
        return self.deliver_s + self.merge_s + self.publish_s + self.pull_s


def step_s(model: Model, config) -> float:
    """Of an inner step: what the site says, else what a GPU takes for the arithmetic."""
    passes = config.train.accumulate * config.train.batch_size  # of a GPU's step
    flops = PASS_FLOPS * model.numel * passes * (model.tokens_per_sample or 1)
    return config.plan.step_s or flops / config.plan.flops


def cost(model: Model, workers: int, cores: int = 16, rates: Rates = Rates()) -> Cost:
    """Of one round, which `cores` cores of the master average."""
    up, cores = workers * model.delta_bytes, min(cores, THREADS)
    wide = min(rates.filesystem, rates.process)
    read_s = up / wide  # by the master; no worker writes its own for longer
    add_s = workers * model.numel / (rates.merged * cores)
    step_s = model.numel / (rates.stepped * cores)
    down = DOWN * model.numel
    pull_s = max(down / rates.process, workers * down / rates.filesystem)
    return Cost(read_s, max(read_s, add_s) + step_s, version_bytes(model) / wide, pull_s)


def version_bytes(model: Model) -> int:
    """What the master writes of a version."""
    return (DOWN + KEPT) * model.numel


def save_of(model: Model, config) -> Save:
    """In local mode a worker's delta, and then AdamW's moments (Muon has fewer), without
    which the learning rate ramps up again. In sync mode a node's part of a checkpoint of
    the smallest job, at most: that of AdamW."""
    if config.run.mode == "local":
        return Save(model.delta_bytes, model.delta_bytes + 8 * model.numel)
    part = 12 * model.numel / max(1, config.elastic.min // config.slurm.gpus_per_node)
    return Save(part, part)


def warnings(model: Model, workers: int, config, rounds: float) -> Iterator[str]:
    """What is likely to hurt, with the way out. `rounds`: of the whole run; 0: not
    known."""
    sgd, up = config.local_sgd, workers * model.delta_bytes
    version = version_bytes(model)
    space = version * (config.checkpoint.keep + 1) + up * (sgd.max_staleness + 1)
    space += workers * 8 * model.numel  # inner states
    least = config.checkpoint.min_free_bytes
    if least < version:
        yield (f"the run takes up to {size(space)} of disk, and would start with"
               f" {size(least)} free: raise checkpoint.min_free")
    if 0 < rounds < 100 and not config.origin("local_sgd.inner_steps").startswith(CHOSEN):
        yield (f"the run has {rounds:.0f} rounds, and the outer optimizer wants a hundred:"
               " lower local_sgd.inner_steps")


def report(model: Model, workers: int, config, rates: Rates = Rates()) -> str:
    """The plan of a run at its largest, as people read it."""
    sgd = config.local_sgd
    cores = config.slurm.master_cpus or 16
    one = cost(model, workers, cores, rates)
    per_round = config.step_samples * model.tokens_per_sample * sgd.inner_steps * workers
    rounds = config.train.max_tokens / per_round if per_round else 0
    up, down = model.delta_bytes, DOWN * model.numel
    host = DOWN * model.numel + model.largest_bytes
    step_s = one.stall_s / ENOUGH / sgd.inner_steps
    lines = [
        ("model", f"{model.numel:,} parameters in {model.fragments} fragments"),
        ("a round", f"{workers} workers, {sgd.inner_steps} steps each; a delta is {size(up)}"
                    f" ({sgd.compression}), a version {size(down)} (bf16)"),
        ("it moves", f"{size(workers * up)} up, read twice; {size(workers * down)} down;"
                     f" a version on disk is {size(version_bytes(model))}"),
        ("it takes", f"{one.stall_s:.3g} s: deliver {one.deliver_s:.3g}, merge {one.merge_s:.3g},"
                     f" publish {one.publish_s:.3g}, pull {one.pull_s:.3g}"),
        ("", f"less than {ENOUGH:.0%} of a round if an inner step takes {step_s:.2g} s or more"
             f"{', and less with overlap' if sgd.overlap != 'off' else ''}"),
        ("memory", f"worker {size(host)} of its host's, beside training; master"
                   f" {size(held_bytes(model, cores))}"),
        ("counted with", f"{size(rates.process)}/s per process, {size(rates.filesystem)}/s for"
                          f" the filesystem, {cores} cores for the master"),
    ]
    if rounds:
        whole = f"{rounds:,.0f} of {per_round:,} tokens each, if all were whole"
        lines.insert(2, ("rounds", whole))
    lines += [("warning", text) for text in warnings(model, workers, config, rounds)]
    return "\n".join(f"  {name:18}{text}" for name, text in lines)


def held_bytes(model: Model, cores: int) -> float:
    """Memory of the master: parameters and momentum, and for each thread the largest
    fragment of a delta and of a mean, because in time each thread has had that one."""
    fragment = model.largest_bytes + 4 * model.largest_numel
    return KEPT * model.numel + min(cores, THREADS) * fragment
