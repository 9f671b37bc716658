"""`make validate`: does local SGD learn what synchronous training learns, and would we notice if not?

Every arm is one way to spend the same tokens, simulated (simulator.py) on the byte-level model from
the same warm start, with the same data order: arms of a seed are paired. RULES say how far apart
arms may be; a rule holds if the one-sided 95 % bound of the paired difference over the seeds is
within its margin (non-inferiority). FAULTS are wrong implementations, planted in the place of a
right one: each must break the rule that is there to catch it, or the rule proves nothing.

    PYTHONPATH=lib:tests .venv/bin/python -m validate.rig --seeds 0,1,2 --arms base,dp

Prints a table, writes build/validate.json; exit 1 if a rule is broken or a fault goes unseen.
What the rules were tuned on, and the sizes of the effects: README.md, "Validation".
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev

import torch
from safetensors.torch import load_file, save_file

from elastic import config as configuration
from elastic.config import Config
from elastic.layout import Layout
from elastic.replica import Replica, shapes
from elastic.tasks import ByteText
from elastic.versions import checksum
from validate.simulator import RAMPED, Inner, Simulator, Start, seeded_model

HERE = Path(__file__).resolve().parent
NO_SITE = Path(os.devnull)
BUILD = HERE.parents[1] / "build"
WORKERS = 4
T95 = {1: 0.0, 2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13}  # Student's t, one-sided 95 %, by seeds
UNIFORM = math.log(256)  # nats per byte of knowing nothing

Work = tuple[int, int, int, int, str]  # slot, attempt, base, steps, where the inner state is from
Crew = Callable[[int], list[Work]]  # who trains what between version v and v + 1


# ---- who takes part -----------------------------------------------------------------------------


def steady(workers: int, steps: int) -> Crew:
    """Everybody, all the time."""
    return lambda version: [(slot, 1, version, steps, "start") for slot in range(workers)]


def cut(steps: int, seed: int) -> Crew:
    """Two of five workers are preempted with notice at some step of the round."""
    rng = Random(seed)

    def crew(version: int) -> list[Work]:
        ends = [rng.randint(1, steps - 1) if rng.random() < 0.4 else steps for _ in range(WORKERS)]
        return [(slot, 1, version, end, "start") for slot, end in enumerate(ends)]

    return crew


def churn(steps: int, seed: int, inner: str) -> Crew:
    """One to eight workers, others every round. `inner`: own, fresh, ramp or donor, on return."""
    rng = Random(seed)
    attempts, present = dict.fromkeys(range(2 * WORKERS), 1), set(range(2 * WORKERS))

    def origin(slot: int, version: int) -> str:
        donor = min(present - {slot}, default=slot)
        donated = f"donor slot {donor} of version {version - 1}"
        return {"fresh": "fresh", "ramp": f"fresh{RAMPED}", "donor": donated}[inner]

    def crew(version: int) -> list[Work]:
        nonlocal present
        slots = sorted(rng.sample(range(2 * WORKERS), rng.randint(1, 2 * WORKERS)))
        works = []
        for slot in slots:
            returns = inner != "own" and slot not in present
            attempts[slot] += returns
            state = origin(slot, version) if returns else "start"
            works.append((slot, attempts[slot], version, steps, state))
        present = set(slots)
        return works

    return crew


def forgetful(steps: int) -> Crew:
    """Everybody's inner optimizer starts anew every round."""
    return lambda version: [(s, version, version, steps, "fresh") for s in range(WORKERS)]


def late(steps: int) -> Crew:
    """All deltas are merged one version late."""
    return lambda version: [(s, 1, max(0, version - 1), steps, "start") for s in range(WORKERS)]


# ---- arms: participation, settings, and what is wrong with the implementation --------------------


class WrongSign(Simulator):
    def delta(self, work, index):
        return -super().delta(work, index)


class Sum(Simulator):
    def share(self, shares):
        return [len(shares) * share for share in super().share(shares)]


class NeverReload(Simulator):
    """A worker goes on from where it was; its delta is what it added since."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = {}

    def base(self, work):
        return list(self.mine.get(work["slot"], {}).values()) or super().base(work)

    def delta(self, work, index):
        fragment = self.replica.whole(index).to(torch.bfloat16)
        self.mine.setdefault(work["slot"], {})[index] = fragment
        return super().delta(work, index)


class HeavyBall(Simulator):
    def step(self, means, lr):
        for param, b, g in zip(self.outer.params, self.outer.momentum, means, strict=True):
            b.mul_(self.config.local_sgd.outer_momentum).add_(g)
            param.sub_(b, alpha=lr)


class CommitTwice(Simulator):
    """Every fifth commit is applied again."""

    def step(self, means, lr):
        again = [mean.clone() for mean in means] if self.version % 5 == 4 else []
        super().step(means, lr)
        if again:
            super().step(again, lr)


class StaleAnchor(Simulator):
    """Deltas are measured from the version before the one that was trained."""

    def delta(self, work, index):
        anchors = [self.versions[max(0, work["base"] - late)].published[index] for late in (1, 0)]
        return super().delta(work, index) + (anchors[0].float() - anchors[1].float())


class Poison(Simulator):
    """In every fifth round the delta of slot 0 is not finite, and in others 50 times too long."""

    def delta(self, work, index):
        bad = {2: math.nan, 4: 50.0}.get(work["base"] % 5) if work["slot"] == 0 else None
        return super().delta(work, index) * (bad or 1.0)


class Unguarded(Poison):
    def refuse(self, delta):
        return False


@dataclass(frozen=True)
class Arm:
    """`share` of the tokens, spent by `crew(steps of a round, seed)`; a round of 0 never ends."""

    crew: Callable[[int, int], Crew]
    settings: tuple[str, ...] = ()
    share: float = 1.0
    rounds: bool = True
    kind: type[Simulator] = Simulator


PLAIN = ("local_sgd.outer_lr=1.0", "local_sgd.outer_momentum=0.0")


def alone(steps: int, _seed: int) -> Crew:
    return steady(1, steps)


def all_four(steps: int, _seed: int) -> Crew:
    return steady(WORKERS, steps)


def churning(inner: str) -> Callable[[int, int], Crew]:
    return lambda steps, seed: churn(steps, seed, inner)


ARMS = {
    "dp": Arm(alone, (*PLAIN, "train.batch_size=8"), rounds=False),
    "base": Arm(all_four),
    "quarter": Arm(alone, PLAIN, share=1 / WORKERS, rounds=False),
    "plain": Arm(all_four, PLAIN),
    "lone": Arm(alone),
    "lone_plain": Arm(alone, PLAIN, rounds=False),
    "bf16": Arm(all_four, ("local_sgd.compression=bf16",)),
    "cut": Arm(lambda steps, seed: cut(steps, seed)),
    "churn": Arm(churning("own")),
    "churn_ramp": Arm(churning("ramp")),
    "churn_donor": Arm(churning("donor")),
    "poison": Arm(all_four, share=1.05, kind=Poison),  # one delta of twenty is refused
    "no_clip": Arm(all_four, ("local_sgd.clip_norm=0",)),
    # wrong implementations
    "wrong_sign": Arm(all_four, kind=WrongSign),
    "sum": Arm(all_four, kind=Sum),
    "never_reload": Arm(all_four, kind=NeverReload),
    "heavy_ball": Arm(all_four, kind=HeavyBall),
    "adam_reset": Arm(lambda steps, seed: forgetful(steps), ("local_sgd.join_ramp=0",)),
    "commit_twice": Arm(all_four, kind=CommitTwice),
    "stale_anchor": Arm(all_four, kind=StaleAnchor),
    "one_late": Arm(lambda steps, seed: late(steps), ("local_sgd.reanchor=0",)),
    "churn_fresh": Arm(churning("fresh")),
    "unguarded": Arm(all_four, kind=Unguarded),
}

# ---- running one ---------------------------------------------------------------------------------


def settings_of(seed: int, overrides: tuple[str, ...] = ()) -> Config:
    return configuration.load(HERE / "parity.toml", [f"run.seed={seed}", *overrides], NO_SITE)


def trace(crew: Crew, first: int, steps: int, batch: int) -> Iterator[dict]:
    """Commits of what `crew` does, until `steps` inner steps are done; samples from `first` on."""
    version, cursor = 0, first
    while steps > 0:
        deltas = []
        for slot, attempt, base, wanted, inner in crew(version):
            done = min(wanted, steps)
            steps -= done
            if done:
                ranges = [(0, cursor, cursor + done * batch)]
                cursor += done * batch
                deltas.append({"slot": slot, "attempt": attempt, "base": base, "steps": done,
                               "samples": ranges, "inner": inner})  # fmt: skip
        yield {"deltas": deltas}
        version += 1


def simulate(arm: Arm, seed: int, start: Start | None, tokens: int) -> Simulator:
    """Spend the tokens; stops early when the parameters are not finite any more."""
    torch.set_num_threads(1)
    config = settings_of(seed, arm.settings)
    task = ByteText(config.task)
    batch, context = config.train.batch_size, task.shape.context
    steps = int(arm.share * tokens) // (batch * context)
    if not arm.rounds:
        config = settings_of(seed, (*arm.settings, f"local_sgd.inner_steps={steps}"))
    start = start or untrained(task, config)
    simulator = arm.kind(task, config, start, len(task.dataset()), config.train.max_tokens)
    crew = arm.crew(config.local_sgd.inner_steps, seed)
    for _ in simulator.replay(trace(crew, start.tokens // context, steps, batch)):
        if not all(param.isfinite().all() for param in simulator.outer.params):
            break
    return simulator


def untrained(task, config: Config) -> Start:
    model = seeded_model(task, config)
    layout = Layout.of(shapes(model), config.local_sgd.fragment_bytes)
    replica = Replica(model, layout)
    inner = Inner([], torch.Generator().manual_seed(config.run.seed + 1).get_state())
    return Start([replica.whole(index) for index in range(len(layout.fragments))], inner=inner)


def warm_tokens() -> int:
    return settings_of(0).train.max_tokens // 2


def warm(seed: int) -> Start:
    """Half of the schedule, synchronously: what every arm of the seed begins with. Cached."""
    path = BUILD / f"warm-{seed}-{checksum(HERE / 'parity.toml')[:8]}-{torch.__version__}.bin"
    if not path.exists():
        simulator = simulate(ARMS["dp"], seed, None, warm_tokens())
        inner = simulator.inner(0)
        tensors = {f"param/{i}": param for i, param in enumerate(simulator.outer.params)}
        tensors |= {f"inner/{i}/{name}": value for i, state in enumerate(inner.state)
                    for name, value in state.items()}  # fmt: skip
        BUILD.mkdir(exist_ok=True)
        save_file(tensors | {"rng": inner.rng}, path)
    return read_start(load_file(path))


def read_start(tensors: dict[str, torch.Tensor]) -> Start:
    rng, params = tensors.pop("rng"), {}
    states: dict[int, dict] = {}
    for name, value in tensors.items():
        kind, index, *rest = name.split("/")
        if kind == "param":
            params[int(index)] = value
        else:
            states.setdefault(int(index), {})[rest[0]] = value
    inner = Inner([states[index] for index in sorted(states)], rng)
    return Start([params[index] for index in sorted(params)], warm_tokens(), WORKERS, inner)
