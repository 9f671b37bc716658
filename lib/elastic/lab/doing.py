"""What `elastic plan`, `validate` and `chaos` do with what the laboratory has."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from elastic.base.config import load
from elastic.base.environment import runs_root
from elastic.base.errors import UsageError
from elastic.lab import chaos, faults, trace, validation
from elastic.lab.chaos import Say
from elastic.lab.forecast import costs, forecast
from elastic.people import submission
from elastic.people.steering import progress_of
from elastic.run import rundir
from elastic.run.audit import has_ledger
from elastic.run.rundir import RunDir


def advise(
    path: Path, overrides: Sequence[str], source: str, measured: str | None, say: Say, tell: Say
) -> dict:
    """The forecast of a run for a trace, at the costs that the run `measured` has shown.
    What is not known is said; `tell` hears how far it is. UsageError: a step's time is
    not known."""
    overrides = ("slurm.partition=any", *overrides)  # nothing is submitted
    config = load(path, overrides)
    slurm = config.slurm
    changes, end = trace.read(source, max(slurm.gpus_per_worker, slurm.gpus_per_node))
    shown = trace.measured(rundir.find(measured)) if measured else {}
    for name in ("step", "startup", "leave"):
        if config.origin(f"plan.{name}") == "command line":
            shown.pop(f"{name}_s", None)
    model, reason = None, "only run.command knows the model"
    if not config.run.command:
        model, reason, _ = submission.described(path, overrides)
    price = costs(config, model, shown)
    if not price.step_s:
        raise UsageError(f"how long a step takes cannot be known: {reason}",
                         "give --set plan.step=SECONDS, or --measured RUN")  # fmt: skip
    if not model:
        say(f"saves and deltas are taken to cost no time: {reason}")
    return forecast(changes, end, config, price, tell)


def compare(
    path: Path, overrides: Sequence[str], arms: Sequence[str], seeds: int, at_once: int,
    metric: str, margin: float, tell: Callable[[tuple[float, str]], None],
) -> tuple[dict, dict[str, list[float]], bool]:  # fmt: skip
    """Train what is not trained yet. Returns losses and verdicts, loss curves by arm, and
    whether every arm is ok; `tell` hears how far it is. ElasticError: a run failed."""
    from elastic.saved import evaluation

    base = load(path, overrides)
    evaluation.load(base)  # what cannot be evaluated need not be trained
    trials = [*validation.trials(lambda more: load(path, [*overrides, *more]), arms, seeds)]
    folder, count = runs_root() / f"{base.run.name}-validate", len(trials)
    runs = validation.train(trials, folder, at_once, lambda r: tell(progress_of(r, count)))
    losses, curves = {}, {}
    for trial in trials:
        loss = validation.final_loss(runs[trial], metric)
        losses.setdefault(trial.arm, {})[trial.seed] = loss
        curves.setdefault(trial.arm, validation.curve(runs[trial]))
    verdicts = [*validation.verdicts(losses, margin)]
    bounds = [verdict.bound for verdict in verdicts if verdict.arm != validation.BASELINE]
    is_ok = all(bound is not None and bound <= margin for bound in bounds)
    data = {"runs": str(folder), "losses": losses, "verdicts": [*map(asdict, verdicts)]}
    return data, curves, is_ok


def harm(
    run: RunDir, every_s: float, for_s: float, before_s: float, seed: int, kinds: str, say: Say
) -> dict:
    """Do a fault to the run every so often, saying each of them, after a time to compare
    with; the report. UsageError: there is nobody to hit."""
    if not every_s:
        raise UsageError("--every 0: faults need time between them", "give --every 10s")
    if over := run.closing():
        what = f"run {run.name} is {over}: there is nobody to hit"
        raise UsageError(what, f"elastic-scale {run.name} starts a stopped or failed run")
    if not has_ledger(run):
        what = f"what a fault costs run {run.name} cannot be known: run.command counts its steps"
        raise UsageError(what, f"preempt it by hand: elastic-status {run.name} names its job")
    agent = chaos.Chaos(run, seed)
    chosen, refused = chaos.choose(agent, kinds)
    for kind, why in refused.items():
        say(f"not done: {kind}: {why}")
    began = time.time()
    time.sleep(before_s)
    baseline = (began, time.time()) if before_s else None
    planned = faults.schedule(chosen, every_s, for_s, random.Random(seed))
    chaos.unleash(agent, planned, lambda text: say(f"{time.time() - began:7.1f}s  {text}"))
    return agent.report(baseline[1] if baseline else began, baseline)
