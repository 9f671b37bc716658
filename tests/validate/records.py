"""`make records`: DiLoCo on two cores. How well does each way of training learn at equal tokens?

    make records RECORDS_ARGS='--seeds 3 --points 30x4 --arms adamw,muon'

A point is a number of inner steps K and of workers M (`swing`: one to eight, others every round),
from random parameters; an arm is a way to train. All train ByteText's model on the standard
library's sources, 4,096 tokens per global step, cosine schedule. The arms of a seed are paired:
they begin with the same parameters and see the same samples in the same order. Each arm has its own
best learning rate for each size of the model, which `--tune` finds on a seed that no table has.
Processes share a GPU where there is one.

Workers and master are played in one process (simulator.py) by the product's own training loop,
replica, codec, cold start, weights and outer step; tests/whole/test_trace.py shows that this gives
the bits of real processes. What ran is kept in build/records.jsonl, and not run again.

The table: final validation loss in nats per byte, mean over the seeds; its paired difference from
synchronous AdamW with the one-sided 95 % bound above it; versions made; bytes that all workers send
per token; minutes of one core. A second table has the loss on the way. `--publish` writes both into
docs/records.md.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean

import torch

from elastic.base import config as configuration
from elastic.lab.validation import half_width
from elastic.saved.codec import CODECS
from elastic.tasks import ByteText
from helpers import commit_of
from validate import report, rig
from validate.simulator import Planned, Simulator, Version

KEPT = "records.jsonl"
GLOBAL_BATCH, CONTEXT = 32, 128  # samples of a global step, and bytes of a sample
MOST_WORKERS, TUNING_SEED = 8, 100
REFERENCE = "sync-adamw"
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
PARTS = 5  # of the tokens: after each the loss is measured


@dataclass(frozen=True)
class Arm:
    """A way to train. A synchronous one is a single worker with the whole batch, and no rounds."""

    title: str
    settings: tuple[str, ...] = ()
    synchronous: bool = False


PLAIN = ("local_sgd.cold_start=0", "local_sgd.compression=none")
SYNCHRONOUS = (*PLAIN, "local_sgd.outer_lr=1.0", "local_sgd.outer_momentum=0.0")
MUON = ("train.optimizer=muon",)
ARMS = {
    REFERENCE: Arm("synchronous AdamW", SYNCHRONOUS, synchronous=True),
    "sync-muon": Arm("synchronous Muon", (*MUON, *SYNCHRONOUS), synchronous=True),
    "diloco": Arm("DiLoCo as published (0.7, 0.9)", (
        *PLAIN, "local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9", "local_sgd.clip_norm=0",
        "local_sgd.thin_rounds=false")),
    "adamw": Arm("local mode, AdamW"),
    "muon": Arm("local mode, Muon", MUON),
}


@dataclass(frozen=True)
class Size:
    """A model, the tokens that it is trained on, and the best of RATES for each arm."""

    name: str  # its parameters
    tokens: int
    settings: tuple[str, ...]
    learning_rates: dict[str, float] = field(hash=False)


SIZES = {size.name: size for size in (
    Size("0.5M", 3_276_800, (), {
        REFERENCE: 4e-3, "sync-muon": 8e-3, "diloco": 4e-3, "adamw": 4e-3, "muon": 8e-3}),
    Size("3M", 6_553_600, ("task.dim=256", "task.layers=4", "task.heads=8"), {
        REFERENCE: 2e-3, "sync-muon": 8e-3, "diloco": 1e-3, "adamw": 1e-3, "muon": 8e-3}),
)}


@dataclass(frozen=True)
class Point:
    """K, and M: a number, or "swing"."""

    steps: int
    workers: str

    @classmethod
    def read(cls, text: str) -> "Point":
        steps, _, workers = text.partition("x")
        return cls(int(steps), workers)

    def __str__(self) -> str:
        return f"{self.steps}x{self.workers}"

    @property
    def most(self) -> int:
        return MOST_WORKERS if self.workers == "swing" else int(self.workers)

    @property
    def batch(self) -> int:
        """Samples of a worker's step: all workers together have the global batch."""
        return GLOBAL_BATCH // self.most

    def crews(self, seed: int):
        """The slots that train in each round, without an end."""
        rng = Random(seed)
        while True:
            if self.workers == "swing":
                yield sorted(rng.sample(range(MOST_WORKERS), rng.randint(1, MOST_WORKERS)))
            else:
                yield list(range(int(self.workers)))


POINTS = tuple(map(Point.read, ("10x4", "30x4", "100x4", "30x1", "30x8", "30xswing")))


@dataclass(frozen=True)
class Trial:
    arm: str
    point: Point
    seed: int
    size: Size
    more: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.size.tokens

    @property
    def settings(self) -> list[str]:
        """A synchronous arm is the same at every point."""
        arm, point = ARMS[self.arm], self.point
        steps, batch = point.steps, point.batch
        if arm.synchronous:
            steps, batch = self.tokens // (GLOBAL_BATCH * CONTEXT), GLOBAL_BATCH
        rate = self.size.learning_rates[self.arm]
        return [f"run.seed={self.seed}", f"train.max_tokens={self.tokens}", "train.threads=1",
                f"train.batch_size={batch}", f"train.learning_rate={rate}",
                "train.warmup_fraction=0.05", f"local_sgd.inner_steps={steps}",
                "local_sgd.compression=int8", *self.size.settings, *arm.settings,
                *self.more]

    @property
    def key(self) -> str:
        crew = "" if ARMS[self.arm].synchronous else self.point.workers
        return json.dumps([*self.settings, crew, torch.__version__])


class Watched(Simulator):
    """A Simulator that notes the loss on the way."""

    def __init__(self, *args):
        super().__init__(*args)
        self.curve: list[float] = []

    def watch(self, tokens: int) -> None:
        """Note the model's loss when another part of the tokens is done, or several are."""
        if more := tokens * PARTS // self.total_tokens - len(self.curve):
            self.curve += more * [self.task.validate(self.model)["validation_loss"]]


class Synchronous(Watched):
    """One round from the first step to the last: watched between steps."""

    def before_step(self, version: Version, tokens: int) -> None:
        self.watch(tokens)


def run(trial: Trial) -> dict:
    """Train to the end of the tokens."""
    torch.set_num_threads(1)
    began = time.process_time()
    config = configuration.load(rig.HERE / "parity.toml", trial.settings, rig.NO_SITE)
    task = ByteText(config.task)
    start = rig.untrained(task, config)
    alone = ARMS[trial.arm].synchronous
    kind = Synchronous if alone else Watched
    simulator = kind(task, config, start, len(task.dataset()), trial.tokens)
    crews = iter(lambda: [0], None) if alone else trial.point.crews(trial.seed)
    sent, encoded = 0, sum(map(CODECS[config.local_sgd.compression].size_bytes,
                               simulator.outer.layout.numels))
    while deltas := works(simulator, next(crews)):
        sent += len(deltas) * encoded
        for version in simulator.replay([commit_of(deltas=tuple(deltas))]):
            simulator.adopt(simulator.versions[version].published)
            simulator.watch(simulator.versions[version].tokens)
    if alone:  # of one worker: a ring moves each gradient twice, every step
        sent = 2 * 4 * sum(map(torch.numel, simulator.outer.params)) * config.local_sgd.inner_steps
    return {"key": trial.key, "arm": trial.arm, "point": str(trial.point), "seed": trial.seed,
            "loss": simulator.curve[-1], "curve": simulator.curve, "versions": simulator.version,
            "bytes_per_token": sent / trial.tokens, "minutes": (time.process_time() - began) / 60}


def works(simulator: Simulator, crew: list[int]) -> list[Planned]:
    """What the crew trains in the next round; of the last round what is left."""
    now, batch = simulator.versions[simulator.version], simulator.config.train.batch_size
    left = (simulator.total_tokens - now.tokens) // (CONTEXT * batch)
    first, deltas = now.tokens // CONTEXT, []
    for slot in crew:
        steps = min(now.steps, left)
        left -= steps
        if steps:
            samples = [(0, first, first + steps * batch)]
            first += steps * batch
            deltas.append(Planned(slot=slot, attempt=1, base=simulator.version, steps=steps,
                                  samples=samples, inner="start"))
    return deltas


# ---- all of them -------------------------------------------------------------------------


def kept(build: Path) -> dict[str, dict]:
    lines = (build / KEPT).read_text().splitlines() if (build / KEPT).exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def run_all(trials: list[Trial], processes: int, build: Path) -> dict[Trial, dict]:
    """What came of each: those that are kept, and the others, which are run now."""
    known = kept(build)
    waiting = {trial.key: trial for trial in trials if trial.key not in known}
    print(f"{len(trials)} trials, {len(waiting)} to run", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(run, trial) for trial in waiting.values()]):
            row = future.result()
            known[row["key"]] = row
            build.mkdir(exist_ok=True)
            with (build / KEPT).open("a") as file:
                file.write(json.dumps(row) + "\n")
            what = f"{row['arm']:12} {row['point']:9} seed {row['seed']:<4}"
            print(what, f"{row['loss']:.4f}, {row['versions']} versions", flush=True)
    return {trial: known[trial.key] for trial in trials}


HEADER = """\
| K | M | | loss | − synchronous AdamW | bound | versions | bytes per token | minutes |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def table(results: dict[Trial, dict]) -> str:
    """Markdown: of each point, its arms."""
    groups = grouped(results)
    return HEADER + "".join(_row(point, arm, by_seed, groups.get((point, REFERENCE), {}))
                            for (point, arm), by_seed in groups.items())


def curves(results: dict[Trial, dict]) -> str:
    """Markdown: the loss on the way, a mean over the seeds."""
    parts = [f"{100 * part // PARTS} %" for part in range(1, PARTS + 1)]
    rows = [f"| K | M | | {' | '.join(parts)} |", "| --- " * (PARTS + 3) + "|"]
    for (point, arm), by_seed in grouped(results).items():
        along = zip(*(row["curve"] for row in by_seed.values()), strict=True)
        losses = " | ".join(f"{mean(part):.3f}" for part in along)
        rows.append(f"| {point.steps} | {point.workers} | {ARMS[arm].title} | {losses} |")
    return "\n".join(rows) + "\n"


def grouped(results: dict[Trial, dict]) -> dict[tuple[Point, str], dict[int, dict]]:
    """Of each point and arm, what came of each seed; the arms of a point are together."""
    groups = {}
    for point in dict.fromkeys(trial.point for trial in results):
        for trial, row in results.items():
            if trial.point == point:
                groups.setdefault((point, trial.arm), {})[trial.seed] = row
    return groups


def _row(point: Point, arm: str, by_seed: dict[int, dict], reference: dict[int, dict]) -> str:
    def average(name: str) -> float:
        return mean(row[name] for row in by_seed.values())

    gaps = [row["loss"] - reference[seed]["loss"]
            for seed, row in by_seed.items() if seed in reference]
    half = half_width(gaps)
    gap = f"{mean(gaps):+.4f}" if gaps and arm != REFERENCE else ""
    bound = f"{mean(gaps) + half:+.4f}" if half is not None and arm != REFERENCE else ""
    loss, sent = average("loss"), average("bytes_per_token")
    versions = f"{average('versions'):.0f}"
    if ARMS[arm].synchronous:
        versions, sent = "", sent * point.most
    cells = [str(point.steps), point.workers, ARMS[arm].title, f"{loss:.4f}", gap, bound,
             versions, f"{sent:,.0f}", f"{average('minutes'):.1f}"]
    return f"| {' | '.join(cells)} |\n"


def to_tune(size: Size, arms: list[str], more: tuple[str, ...]) -> list[Trial]:
    """Every arm at K = 30, M = 4 with each learning rate; ARMS has the best, set by hand."""
    return [Trial(arm, Point(30, "4"), TUNING_SEED, size, (*more, f"train.learning_rate={rate}"))
            for rate in RATES for arm in arms]


def main() -> int:
    options = parse(sys.argv[1:])
    arms, more, size = options.arms.split(","), tuple(options.set), SIZES[options.size]
    if options.tokens:
        size = replace(size, tokens=options.tokens)
    if options.tune:
        tried = run_all(to_tune(size, arms, more), options.processes, options.build)
        for trial, row in tried.items():
            print(f"{trial.arm:12} {trial.more[-1]:30} {row['loss']:.4f}")
        return 0
    points = [Point.read(text) for text in options.points.split(",")]
    trials = [Trial(arm, point, seed, size, more)
              for seed in range(options.seeds) for point in points for arm in arms]
    results = run_all(trials, options.processes, options.build)
    found = {f"records, {size.name}": table(results),
             f"records, {size.name}, on the way": curves(results)}
    print("\n".join(found.values()))
    if options.publish:
        page = rig.HERE.parents[1] / "docs" / "records.md"
        for mark, text in found.items():
            page.write_text(report.replaced(page.read_text(), text, mark))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="records")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", default=",".join(map(str, POINTS)))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--size", choices=SIZES, default="0.5M")
    parser.add_argument("--tokens", type=int, help="others than the size has")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--build", type=Path, default=rig.BUILD, help="where what ran is kept")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--publish", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
