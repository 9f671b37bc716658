"""`make validate`: does local SGD learn what synchronous training does, and would we notice if not?

An arm is one way to spend the same tokens, simulated (simulator.py) on the byte-level model, from
the same warm start and with the same samples: arms of a seed are paired. RULES say how far apart
arms may be; a rule holds if the one-sided 95 % bound of the paired difference over the seeds is
within its margin. FAULTS are wrong implementations put in the place of right ones: each must break
the rule that is there to catch it, or the rule proves nothing.

    make validate VALIDATE_ARGS='--seeds 0 --arms base,dp,heavy_ball'

It prints tables, writes build/validate.json, .md and .svg (report.py), and exits with 1 if a rule
is broken or a fault goes unseen. Margins were set once, from three seeds, at three times the spread
or more. What loss cannot show at this size (weights, ghosts, a local learning-rate schedule, a
joiner without a ramp: +0.007) is for tests/local/master/test_merge.py and test_trace.py.
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
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from statistics import mean

import torch
from safetensors.torch import load_file, save_file

from elastic.base import config as configuration
from elastic.base.config import Config
from elastic.base.durable import checksum
from elastic.base.errors import ElasticError
from elastic.lab.validation import half_width
from elastic.local.worker.in_hand import AHEAD
from elastic.run.records import Commit
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.tasks import ByteText
from helpers import commit_of
from validate import report
from validate.simulator import RAMPED, Inner, Planned, Simulator, Start, seeded_model

HERE = Path(__file__).resolve().parent
NO_SITE = Path(os.devnull)
BUILD = HERE.parents[1] / "build"
WORKERS = 4
WARM_TOKENS = 409_600
CURVE_TOKENS = 40_960  # between two points of a curve: two rounds of four workers
UNIFORM = math.log(256)  # nats per byte of knowing nothing

Work = tuple[int, int, int, int, str]  # slot, attempt, base, steps, where the inner state is from
Crew = Callable[[int], list[Work]]  # who trains what between version v and v + 1
Curve = list[tuple[int, float]]  # tokens, nats per byte
Curves = dict[str, dict[int, Curve]]  # arm -> seed
Look = Callable[[Simulator, int], None]  # the model is what so many tokens have made of it


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
    """One to eight workers, others every round. `inner`: own or ramp, on return."""
    rng = Random(seed)
    attempts, present = dict.fromkeys(range(2 * WORKERS), 1), set(range(2 * WORKERS))

    def crew(version: int) -> list[Work]:
        nonlocal present
        slots = sorted(rng.sample(range(2 * WORKERS), rng.randint(1, 2 * WORKERS)))
        works = []
        for slot in slots:
            returns = inner == "ramp" and slot not in present
            attempts[slot] += returns
            state = f"fresh{RAMPED}" if returns else "start"
            works.append((slot, attempts[slot], version, steps, state))
        present = set(slots)
        return works

    return crew


def forgetful(steps: int) -> Crew:
    """Everybody's inner optimizer starts anew every round."""
    return lambda version: [(s, version, version, steps, "fresh") for s in range(WORKERS)]


def late(steps: int) -> Crew:
    """All deltas are merged one version late: the second round trains version 0 once more."""

    def crew(version: int) -> list[Work]:
        attempt, inner = (2, "own of version 0") if version else (1, "start")
        return [(s, attempt, max(0, version - 1), steps, inner) for s in range(WORKERS)]

    return crew


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
        return list(self.mine.get(work.slot, {}).values()) or super().base(work)

    def delta(self, work, index):
        fragment = self.replica.whole(index).to(torch.bfloat16)
        self.mine.setdefault(work.slot, {})[index] = fragment
        return super().delta(work, index)


class HeavyBall(Simulator):
    def step(self, means, lr):
        for param, b, g in zip(self.outer.params, self.outer.momentum, means, strict=True):
            b.mul_(self.config.local_sgd.outer_momentum).add_(g)
            param.sub_(b, alpha=lr)


class CommitTwice(Simulator):
    """Every third commit is applied again."""

    def step(self, means, lr):
        again = [mean.clone() for mean in means] if self.version % 3 == 2 else []
        super().step(means, lr)
        if again:
            super().step(again, lr)


class StaleAnchor(Simulator):
    """Deltas are measured from the version before the one that was trained."""

    def delta(self, work, index):
        anchors = [self.versions[max(0, work.base - late)].published[index] for late in (1, 0)]
        return super().delta(work, index) + (anchors[0].float() - anchors[1].float())


class Poison(Simulator):
    """In every fifth round the delta of slot 0 is not finite, and in others 50 times too long."""

    def delta(self, work, index):
        bad = {2: math.nan, 4: 50.0}.get(work.base % 5) if work.slot == 0 else None
        return super().delta(work, index) * (bad or 1.0)


class Unguarded(Poison):
    def refuse(self, delta):
        return False


class LateApply(Simulator):
    """What a version changed is added to what the worker has by then. Its own last delta is part
    of that change: it counts twice."""

    def rebase(self, index, published, sent):
        super().rebase(index, published, torch.zeros_like(sent))


@dataclass(frozen=True)
class Arm:
    """`share` of the tokens, spent by `crew(steps of a round, seed)`."""

    crew: Callable[[int, int], Crew]
    settings: tuple[str, ...] = ()
    share: float = 1.0
    rounds: bool = True  # else it is one, without an end
    ahead: float = 0.0  # of a round's steps: done while the delta travels
    kind: type[Simulator] = Simulator
    once: bool = False  # the first seed only


# One round without an end is training as usual. Each side of a comparison has its own best learning
# rate: of 4, 8 and 12e-3 for synchronous training, of 2, 3 and 4e-3 for all others.
SYNCHRONOUS = ("train.batch_size=8", "train.learning_rate=8e-3")
PLAIN = ("local_sgd.outer_lr=1.0", "local_sgd.outer_momentum=0.0")
REBASE = ("local_sgd.overlap=rebase",)
MOST, LESS = 1 / AHEAD, 1 / 10  # of a round is done ahead


def alone(steps: int, _seed: int) -> Crew:
    return steady(1, steps)


def all_four(steps: int, _seed: int) -> Crew:
    return steady(WORKERS, steps)


def churning(inner: str) -> Callable[[int, int], Crew]:
    return lambda steps, seed: churn(steps, seed, inner)


ARMS = {
    "dp": Arm(alone, (*PLAIN, *SYNCHRONOUS), rounds=False),
    "base": Arm(all_four),
    "quarter": Arm(alone, PLAIN, share=1 / WORKERS, rounds=False),
    "plain": Arm(all_four, PLAIN),
    "lone": Arm(alone, ("train.learning_rate=2e-3",)),
    "lone_plain": Arm(alone, (*PLAIN, "train.learning_rate=4e-3"), rounds=False),
    **{name: Arm(all_four, (f"local_sgd.compression={name}",))
       for name in ("int8", "int4")},
    "rebase": Arm(all_four, REBASE, ahead=MOST),
    "rebase_less": Arm(all_four, REBASE, ahead=LESS),
    "cut": Arm(lambda steps, seed: cut(steps, seed)),
    "churn": Arm(churning("own")),
    "churn_ramp": Arm(churning("ramp")),
    "poison": Arm(all_four, share=1.05, kind=Poison),  # one delta of twenty is refused
    "no_clip": Arm(all_four, ("local_sgd.clip_norm=0",), once=True),
    # wrong implementations
    "wrong_sign": Arm(all_four, kind=WrongSign, once=True),
    "sum": Arm(all_four, kind=Sum, once=True),
    "never_reload": Arm(all_four, kind=NeverReload, once=True),
    "heavy_ball": Arm(all_four, kind=HeavyBall, once=True),
    "adam_reset": Arm(lambda steps, seed: forgetful(steps), ("local_sgd.join_ramp=0",), once=True),
    "commit_twice": Arm(all_four, kind=CommitTwice, once=True),
    "stale_anchor": Arm(all_four, kind=StaleAnchor, once=True),
    "one_late": Arm(lambda steps, seed: late(steps), ("local_sgd.reanchor=0",), once=True),
    "unguarded": Arm(all_four, kind=Unguarded, once=True),
    "late_apply": Arm(all_four, REBASE, ahead=MOST, kind=LateApply, once=True),
}

# The arms of the table and of the picture, in their order, and what a reader calls them.
SHOWN = {
    "dp": "synchronous training",
    "base": "local SGD, dense, no overlap",
    "int8": "int8",
    "int4": "int4",
    "rebase": "rebase, a quarter ahead",
    "rebase_less": "rebase, a tenth ahead",
}

# ---- running one ---------------------------------------------------------------------------------


def settings_of(seed: int, overrides: tuple[str, ...] = ()) -> Config:
    # Crews say how long a round is, that of synchronous training too.
    settings = [f"run.seed={seed}", "local_sgd.cold_start=0", *overrides]
    return configuration.load(HERE / "parity.toml", settings, NO_SITE)


def trace(crew: Crew, first: int, steps: int, batch: int) -> Iterator[Commit]:
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
                deltas.append(Planned(slot=slot, attempt=attempt, base=base, steps=done,
                                      samples=ranges, inner=inner))
        yield commit_of(deltas=tuple(deltas))
        version += 1


def overlapping(commits: Iterator[Commit], samples: int) -> Iterator[Commit]:
    """The same, where so many samples of a worker's next delta are trained ahead."""
    for commit, later in pairwise(chain(commits, [commit_of()])):
        following = {(each.slot, each.attempt): each.samples for each in later.deltas}
        deltas = []
        for delta in commit.deltas:
            upcoming = following.get((delta.slot, delta.attempt), ())
            ahead = tuple((epoch, first, min(stop, first + samples))
                          for epoch, first, stop in upcoming)
            deltas.append(replace(delta, ahead=ahead))
        yield replace(commit, deltas=tuple(deltas))


def simulate(
    arm: Arm, seed: int, start: Start | None, tokens: int, look: Look = lambda _s, _t: None
) -> Simulator:
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
    if arm.rounds:
        simulator.adopt(simulator.versions[0].published)
        look(simulator, start.tokens)
    else:  # there are no versions on the way
        simulator.before_step = lambda version, done: look(simulator, version.tokens + done)
    commits = trace(
        arm.crew(config.local_sgd.inner_steps, seed), start.tokens // context, steps, batch
    )
    ahead = int(arm.ahead * config.local_sgd.inner_steps)
    for version in simulator.replay(overlapping(commits, ahead * batch)):
        if not all(param.isfinite().all() for param in simulator.outer.params):
            break
        simulator.adopt(simulator.versions[version].published)
        look(simulator, simulator.versions[version].tokens)
    return simulator


def untrained(task, config: Config) -> Start:
    model = seeded_model(task, config)
    layout = Layout.of(shapes(model), config.local_sgd.fragment_bytes)
    replica = Replica(model, layout)
    return Start([replica.whole(index) for index in range(len(layout.fragments))])


def warm(seed: int) -> Start:
    """What every arm of the seed begins with: some synchronous training. Cached."""
    path = BUILD / f"warm-{seed}-{checksum(HERE / 'parity.toml')[:8]}-{torch.__version__}.bin"
    if not path.exists():
        arm = Arm(alone, (*PLAIN, "train.batch_size=8"), rounds=False)
        simulator = simulate(arm, seed, None, WARM_TOKENS)
        inner = simulator.inner(0)
        tensors = {f"param/{i}": param for i, param in enumerate(simulator.outer.params)}
        tensors |= {f"inner/{i}/{name}": value for i, state in enumerate(inner.state)
                    for name, value in state.items()}
        BUILD.mkdir(exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        save_file(tensors | {"rng": inner.rng}, temporary)
        os.replace(temporary, path)
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
    return Start([params[index] for index in sorted(params)], WARM_TOKENS, WORKERS, inner)


def run_arm(name: str, seed: int) -> Curve:
    """Validation losses of what is shown on the way, and of the published parameters at the end, in
    nats per byte; nan if the arm got lost."""
    total, curve = settings_of(seed).train.max_tokens, []

    def look(simulator: Simulator, tokens: int) -> None:
        if name in SHOWN and tokens % CURVE_TOKENS == 0 and tokens < total:
            loss = simulator.task.validate(simulator.model)["validation_loss"]
            curve.append((tokens, loss))

    try:
        simulator = simulate(ARMS[name], seed, warm(seed), total - WARM_TOKENS, look)
        return [*curve, (total, simulator.validate()["validation_loss"])]
    except ElasticError:  # the worker's own guard: its gradients are not finite any more
        return [*curve, (total, math.nan)]


# ---- rules and faults ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """`arm` minus `against` is at most, or at least, `margin`, as far as the seeds can tell."""

    name: str
    what: str
    arm: str
    against: str
    margin: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.margin if self.at_least else value <= self.margin

    def bound(self, differences: list[float]) -> float:
        """The end of the one-sided 95 % interval of the mean that is nearer to breaking it."""
        if not all(map(math.isfinite, differences)):
            return sum(differences) / len(differences)
        half = half_width(differences) or 0.0  # of a single seed
        return mean(differences) + (-half if self.at_least else half)


RULES = [
    Rule("R1", "as good as synchronous training", "base", "dp", 0.03),
    Rule("R2", "better than a worker by itself", "quarter", "base", 0.08, at_least=True),
    Rule("R3", "outer momentum helps", "plain", "base", 0.04, at_least=True),
    Rule("R4", "the outer step helps one worker, too", "lone", "lone_plain", -0.015),
    Rule("R5", "int8 deltas are as good", "int8", "base", 0.005),
    Rule("R5", "and int4", "int4", "base", 0.005),
    Rule("R6", "preempted workers' steps count", "cut", "base", 0.03),
    Rule("R6", "one to eight workers, changing", "churn", "base", 0.15),
    Rule("R7", "who joins with a ramp loses nothing", "churn_ramp", "churn", 0.03),
    Rule("R8", "bad deltas do no harm", "poison", "base", 0.01),
    Rule("R8", "the guards change nothing else", "no_clip", "base", 0.0),
    Rule("R8", "the guards change nothing else", "no_clip", "base", 0.0, at_least=True),
    Rule("R10", "steps ahead, put on top, cost some", "rebase", "base", 0.03),
    Rule("R10", "and a few of them", "rebase_less", "base", 0.02),
]
# Against synchronous training each may cost what local SGD does, too.
RULES += [
    Rule("R1", f"nor is {rule.arm} worse", rule.arm, "dp", round(RULES[0].margin + rule.margin, 3))
    for rule in RULES
    if rule.arm in SHOWN and rule.against == "base"
]


@dataclass(frozen=True)
class Fault:
    """`arm` in the place of `instead_of` breaks the rule."""

    what: str
    arm: str
    instead_of: str
    rule: str


FAULTS = [
    Fault("the delta has the wrong sign", "wrong_sign", "base", "R1"),
    Fault("deltas are added, not averaged", "sum", "base", "R1"),
    Fault("workers never reload the parameters", "never_reload", "base", "R1"),
    Fault("plain averaging, no outer momentum", "plain", "base", "R3"),
    Fault("heavy ball instead of Nesterov", "heavy_ball", "base", "R1"),
    Fault("the inner optimizer is reset every round", "adam_reset", "base", "R1"),
    Fault("every third commit is applied twice", "commit_twice", "base", "R1"),
    Fault("deltas from the version before", "stale_anchor", "base", "R1"),
    Fault("rounds are applied one round late", "one_late", "base", "R1"),
    Fault("nothing is exchanged", "quarter", "base", "R2"),
    Fault("one worker alone skips the outer step", "lone_plain", "lone", "R4"),
    Fault("bad deltas are let through", "unguarded", "poison", "R8"),
    Fault("a version's change is applied late", "late_apply", "rebase", "R10"),
]

Losses = dict[str, dict[int, float]]  # arm -> seed -> nats per byte


def differences(losses: Losses, arm: str, against: str) -> list[float]:
    """Paired, over the seeds that both have."""
    one, other = losses.get(arm, {}), losses.get(against, {})
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def check_rules(losses: Losses) -> list[dict]:
    """Every rule whose arms were run."""
    checked = []
    for rule in RULES:
        if found := differences(losses, rule.arm, rule.against):
            bound = rule.bound(found)
            checked.append({
                "rule": rule.name, "what": rule.what, "arm": rule.arm, "against": rule.against,
                "mean": mean(found), "bound": bound, "margin": rule.margin, "seeds": len(found),
                "limit": "at least" if rule.at_least else "at most", "ok": rule.holds(bound),
            })
    wrong = {fault.arm for fault in FAULTS}
    healthy = [loss for arm in losses.keys() - wrong for loss in losses[arm].values()]
    if healthy:
        checked.append({
            "rule": "R9", "what": "never worse than knowing nothing", "arm": "all", "against": "",
            "mean": max(healthy), "bound": max(healthy), "margin": UNIFORM, "seeds": 0,
            "limit": "at most", "ok": all(loss <= UNIFORM for loss in healthy),
        })
    return checked


def check_faults(losses: Losses) -> list[dict]:
    """Is every fault that was planted seen by its rule?"""
    checked = []
    for fault in FAULTS:
        for rule in RULES:
            swap = {fault.instead_of: fault.arm}
            arm, against = swap.get(rule.arm, rule.arm), swap.get(rule.against, rule.against)
            concerned = rule.name == fault.rule and fault.instead_of in (rule.arm, rule.against)
            found = differences(losses, arm, against) if concerned else []
            if found:
                checked.append({
                    "fault": fault.what, "arm": fault.arm, "rule": rule.name, "mean": mean(found),
                    "margin": rule.margin, "limit": "at least" if rule.at_least else "at most",
                    "seeds": len(found), "ok": not rule.holds(mean(found)),
                })
                break
    return checked


# ---- the program ---------------------------------------------------------------------------------


def main() -> int:
    options, began = parse(sys.argv[1:]), time.monotonic()
    BUILD.mkdir(exist_ok=True)
    curves = train(options, kept() if options.resume else {})
    found = judged(curves)
    save(found)
    table = report.table(SHOWN, found["losses"], found["rules"])
    (BUILD / "validate.md").write_text(table)
    report.draw(SHOWN, curves, BUILD / "validate.svg")
    if options.publish:
        report.publish(BUILD)
    print("\n".join(tables(found["losses"], found["rules"], found["faults"])))
    seconds, verdict = time.monotonic() - began, "ok" if found["ok"] else "VIOLATED"
    print(f"\n{table}\n{verdict} after {seconds:.0f} s; see build/validate.*")
    return 0 if found["ok"] else 1


def train(options: argparse.Namespace, curves: Curves) -> Curves:
    """The curves, with those of the arms and seeds that are asked for and not there yet."""
    began = time.monotonic()
    work = [(arm, seed) for seed in options.seeds for arm in options.arms
            if wanted(arm, seed) and seed not in curves.get(arm, {})]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        list(pool.map(warm, {seed for _, seed in work}))
        futures = {pool.submit(run_arm, *each): each for each in work}
        for done, future in enumerate(as_completed(futures), 1):
            arm, seed = futures[future]
            curves.setdefault(arm, {})[seed] = future.result()
            save(judged(curves))
            at = f"{time.monotonic() - began:6.0f} s  {done:3}/{len(work)}"
            print(f"{at}  {arm} seed {seed}: {future.result()[-1][1]:.4f}", flush=True)
    return {arm: curves[arm] for arm in ARMS if arm in curves}


def judged(curves: Curves) -> dict:
    losses = {arm: {seed: curve[-1][1] for seed, curve in by_seed.items()}
              for arm, by_seed in curves.items()}
    rules, faults = check_rules(losses), check_faults(losses)
    ok = all(each["ok"] for each in rules + faults)
    return {"ok": ok, "losses": losses, "rules": rules, "faults": faults, "curves": curves}


def save(found: dict) -> None:
    temporary = BUILD / "validate.json.new"
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, BUILD / "validate.json")


def kept() -> Curves:
    """What earlier runs have found."""
    path = BUILD / "validate.json"
    found = json.loads(path.read_text())["curves"] if path.exists() else {}
    return {arm: {int(seed): curve for seed, curve in by_seed.items()}
            for arm, by_seed in found.items()}


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("validate", description=__doc__.partition("\n")[0])
    numbers = {"type": lambda text: [int(each) for each in text.split(",")]}
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--seeds", default=[0, 1, 2], **numbers, help="default: 0,1,2")
    parser.add_argument("--arms", default=list(ARMS), **names, help=f"of {', '.join(ARMS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="keep what build/validate.json has")
    parser.add_argument("--publish", action="store_true", help="table and picture into the docs")
    options = parser.parse_args(args)
    if unknown := set(options.arms) - set(ARMS):
        parser.error(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    return options


def wanted(arm: str, seed: int) -> bool:
    """One seed is enough for an effect that is large, or exact."""
    return seed == 0 or not ARMS[arm].once


def tables(losses: Losses, rules: list[dict], faults: list[dict]) -> Iterator[str]:
    yield "\narm           loss by seed, nats per byte     against base"
    for arm, by_seed in losses.items():
        values = "  ".join(f"{by_seed[seed]:.4f}" for seed in sorted(by_seed))
        found = differences(losses, arm, "base")
        yield f"{arm:<13} {values:<30} {mean(found):+.4f}" if found else f"{arm:<13} {values}"
    yield "\nrule                                              mean    bound   margin"
    for each in rules:
        yield (
            f"{each['rule']}  {each['what']:<40} {each['mean']:+8.4f} {each['bound']:+8.4f} "
            f"{each['limit']:>8} {each['margin']:+.3f}  {'ok' if each['ok'] else 'BROKEN'}"
        )
    yield "\nplanted fault                                    rule    mean   margin"
    for each in faults:
        yield (
            f"{each['fault']:<48} {each['rule']} {each['mean']:+8.4f} "
            f"{each['limit']:>8} {each['margin']:+.3f}  {'seen' if each['ok'] else 'UNSEEN'}"
        )


if __name__ == "__main__":
    sys.exit(main())
