"""The dial of elastic-submit: what a run leaves open of local mode is chosen by the size
of its model, the speed of the filesystem and the time of a step.

    inner_steps    the fewest for which workers stand still for less than ENOUGH of a
                   round: fewer steps learn more (docs/records.md)
    compression    int4 where int8 needs more than MOST_STEPS
    overlap        rebase where int4 does, too: steps ahead cost some of the loss, the
                   less the longer a round is (docs/measurements.md)

    outer step     follows from the optimizer, from inner_steps and from the workers of a
                   round (docs/algorithm.md); its line says how far it goes

What a file or the command line sets is left as it is.
"""

import contextlib
import math
import os
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from elastic.base.config import Config
from elastic.base.units import size
from elastic.local import rounds
from elastic.run import estimate
from elastic.run.estimate import AHEAD, ENOUGH, Model, Rates

LEAST_STEPS, LEAST_AHEAD, MOST_STEPS = 30, 100, 200  # of a round, with and without overlap
CODED = {"none": 4.0, "int8": 258 / 256, "int4": 66 / 128}  # bytes an element of a large tensor
PROBE_BYTES = 64 << 20
DIALLED = ("inner_steps", "compression", "overlap")  # keys of [local_sgd]


class Choice(NamedTuple):
    """A key, its value, and why it has that."""

    key: str
    value: object
    reason: str


def is_open(config: Config, name: str) -> bool:
    return config.origin(name) == "default"


def has_choice(config: Config, model: Model) -> bool:
    """Is anything left open, and is the time of a step known?"""
    # Without plan.step it is worked out for a GPU, which a local run may not have.
    is_known = model.tokens_per_sample and config.run.scheduler == "slurm"
    is_any = any(is_open(config, f"local_sgd.{name}") for name in DIALLED)
    return is_any and bool(is_known or config.plan.step_s)


def rates(config: Config, folder: Path) -> Rates:
    """What the site says of its filesystem, else what writing to `folder` shows."""
    one, most = config.plan.process_bytes, config.plan.filesystem_bytes
    if is_open(config, "plan.process"):
        with contextlib.suppress(OSError):
            one = written_per_s(folder)
    if is_open(config, "plan.filesystem"):
        most = max(one, most)
    return Rates(process=min(one, most), filesystem=most)


def written_per_s(folder: Path) -> float:
    """Bytes a second of one process that writes durably. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        data = os.urandom(PROBE_BYTES)  # which no filesystem can compress
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - began)


def choose(config: Config, model: Model, rates: Rates) -> list[Choice]:
    """A value for each key that a run that `has_choice` leaves open. Pure."""
    step_s, sgd = estimate.step_s(model, config), config.local_sgd
    is_free = is_open(config, "local_sgd.inner_steps")
    most = MOST_STEPS if is_free else sgd.inner_steps
    ways = [_way(config, model, rates, *allowed) for allowed in _allowed(config)]
    chosen = next((way for way in ways if way.steps <= most), ways[-1])
    is_off = chosen.overlap == "off"
    steps = max(chosen.steps, LEAST_STEPS if is_off else LEAST_AHEAD)
    part = "less" if is_free or chosen.steps <= most else "more"
    with_int8 = next(way.steps for way in ways if way.overlap == chosen.overlap)
    found = {
        "inner_steps": (steps, f"a round is {steps * step_s:.2g} s of steps and"
                               f" {chosen.stall_s:.2g} s to deliver, merge, publish and pull,"
                               f" where one process writes {size(rates.process)}/s"),
        "compression": (chosen.codec, f"with int8 a round has to take {with_int8} steps"),
        "overlap": (chosen.overlap,
                    f"workers wait for {part} than {ENOUGH:.0%} of a round" if is_off else
                    f"without it workers would wait for more than {ENOUGH:.0%} of a round of"
                    f" {most} steps"),
    }
    return [Choice(f"local_sgd.{name}", *found[name]) for name in DIALLED
            if is_open(config, f"local_sgd.{name}")]


def outer_step(config: Config) -> list[Choice]:
    """How far the outer step goes, where that is left open. Pure."""
    if not is_open(config, "local_sgd.outer_momentum"):
        return []
    sgd, workers = config.local_sgd, config.workers(config.elastic.max)
    mu = rounds.momentum(sgd.inner_steps, [1 / workers] * workers, sgd)
    lr = rounds.outer_lr(mu, 1.0, rounds.Running(), sgd)
    why = (f"for rounds of {sgd.inner_steps} steps" if config.train.optimizer == "adamw" else
           f"{mu:.2g} where a round has {workers} workers") + f", with outer_lr {lr:.2g}"
    return [Choice("local_sgd.outer_momentum", sgd.outer_momentum, why)]


def coded(model: Model, before: str, codec: str) -> Model:
    """The model whose deltas were compressed in one way, with another."""
    ratio = CODED[codec] / CODED[before]
    return replace(model, delta_bytes=round(ratio * model.delta_bytes),
                   largest_bytes=round(ratio * model.largest_bytes))


class Way(NamedTuple):
    """A codec, with or without overlap, and a round of it."""

    codec: str
    overlap: str
    steps: int  # the fewest
    stall_s: float  # for which its workers stand still or, with overlap, train ahead


def _allowed(config: Config) -> list[tuple[str, str]]:
    """Codec and overlap, the best for the loss first."""
    sgd = config.local_sgd
    codecs = ["int8", "int4"] if is_open(config, "local_sgd.compression") else [sgd.compression]
    overlaps = ["off", "rebase"] if is_open(config, "local_sgd.overlap") else [sgd.overlap]
    is_short = not is_open(config, "local_sgd.inner_steps") and sgd.inner_steps < LEAST_AHEAD
    if config.slurm.gpus_per_worker > 1 or is_short:
        overlaps = overlaps[:1]  # not for ranks that share a model
    return [(codec, overlap) for overlap, codec in product(overlaps, codecs)]


def _way(config: Config, model: Model, rates: Rates, codec: str, overlap: str) -> Way:
    model = coded(model, config.local_sgd.compression, codec)
    cpus = config.slurm.master_cpus or 16
    stall_s = estimate.cost(model, config.workers(config.elastic.max), cpus, rates).stall_s
    share = ENOUGH if overlap == "off" else 1 / AHEAD
    steps = math.ceil(stall_s / share / estimate.step_s(model, config))
    return Way(codec, overlap, steps, stall_s)
