"""Does local mode learn what synchronous training does, on one's own model?
`elastic-validate`.

    baseline   the run of CONFIG in sync mode, with the batch that all workers together have
    arms       the same tokens and seeds in local mode, an arm per compression
    verdict    paired by seed: the mean difference of the final validation loss, and the one-sided
               95 % bound of it (Student's t), against the margin that one is ready to pay

The runs are ordinary ones, one after the other, in their own folder, on whatever
scheduler CONFIG names. Started again, it goes on: a run that is done is not done again,
one that was stopped or has failed tries again. What it costs: arms x seeds whole runs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev

from elastic.base.config import Config, load
from elastic.base.durable import patiently
from elastic.base.environment import runs_root
from elastic.base.errors import ElasticError, UsageError
from elastic.jobs.reconcile import run_pass
from elastic.people import evaluation, report, steering, submission
from elastic.run.rundir import RunDir

BASELINE = "sync"
# Student's t, one-sided 95 %, by the number of seeds.
T95 = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89, 9: 1.86, 10: 1.83}

Trial = tuple[str, int, Config]  # an arm, a seed, and the run to make of them


def compare(path: Path, overrides: Sequence[str], arms: Sequence[str], seeds: int, metric: str,
            margin: float) -> tuple[dict, dict[str, list[float]], bool]:
    """Train what is not trained yet. Returns losses and verdicts, loss curves by arm, and
    whether every arm is ok. ElasticError: a run failed."""
    base = load(path, overrides)
    evaluation.load(base)  # what cannot be evaluated need not be trained
    every = [*trials(lambda more: load(path, [*overrides, *more]), arms, seeds)]
    folder = runs_root() / f"{base.run.name}-validate"
    losses, curves = {}, {}
    for arm, seed, run in train(every, folder):
        losses.setdefault(arm, {})[seed] = final_loss(run, metric)
        curves.setdefault(arm, curve(run))
    rows = [*verdicts(losses, margin)]
    bounds = [verdict["bound"] for verdict in rows if verdict["arm"] != BASELINE]
    is_ok = all(bound is not None and bound <= margin for bound in bounds)
    return {"runs": str(folder), "losses": losses, "verdicts": rows}, curves, is_ok


def trials(config: Callable[[list[str]], Config], arms: Sequence[str],
           seeds: int) -> Iterator[Trial]:
    """Every run there is to make. `config` is CONFIG with settings on top of it."""
    base = config([])
    samples = base.workers(base.elastic.max) * base.step_samples
    for seed in range(seeds):
        for arm in (BASELINE, *arms):
            settings = [f"run.name={base.run.name}-{arm}-{seed}", f"run.seed={seed}",
                        f"elastic.min={base.elastic.max}"]
            if arm == BASELINE:
                settings += ["run.mode=sync", f"sync.global_batch_size={samples}"]
            else:
                settings += ["run.mode=local", f"local_sgd.compression={arm}"]
            yield arm, seed, config(settings)


# ---- running them


def train(every: Iterable[Trial], root: Path) -> list[tuple[str, int, RunDir]]:
    """Bring every trial to its end, one after the other: the run of each arm and seed.
    Raises ElasticError if one fails."""
    runs = []
    for arm, seed, config in every:
        begin = partial(_begin, config, root)
        run = patiently(begin, for_s=inf) if runs else begin()  # hours of work wait for an answer
        _finish(run)
        runs.append((arm, seed, run))
    return runs


def _begin(config: Config, root: Path) -> RunDir:
    """Begin the run of a trial, or go on with it."""
    run = RunDir(root / config.run.name)
    if not run.path.exists():
        submission.check(config, root)
        return submission.start(config, root)
    mine = run.config().slurm  # with its share of a node
    same = replace(config.slurm, cpus_per_gpu=mine.cpus_per_gpu, mem_per_gpu=mine.mem_per_gpu,
                   master_mem=mine.master_mem)
    if run.config() != replace(config, slurm=same):
        raise UsageError(f"{run.path} was trained with another configuration",
                         "remove that folder, or give --set run.name=NAME")
    if not run.done():  # it goes on, also if it was stopped or has failed
        steering.scale(run, None, None, None)
    return run


def _finish(run: RunDir) -> None:
    """Train it to its end. At an error, and at Ctrl-C, it is stopped."""
    try:
        if errors := run_pass([run], time.time()).errors:
            raise ElasticError(errors[0], "elastic-reconcile")
        steering.wait_for_end(run)
    except BaseException:
        patiently(partial(run.set_control, state="stopped"))
        run_pass([run], time.time())
        raise


# ---- what came out


def final_loss(run: RunDir, metric: str = "") -> float:
    """The task's own validation loss at the end."""
    scores = evaluation.evaluate(run)
    names = [name for name in scores if name not in ("version", "step")]
    chosen = metric or next((name for name in names if "loss" in name), names[0] if names else "")
    if chosen not in scores:
        raise ElasticError(f"validate() of {run.name} says no {chosen or 'number'}",
                           f"--metric: {', '.join(names) or 'none'}")
    return scores[chosen]


def curve(run: RunDir) -> list[float]:
    """The training loss along the run."""
    points = report.points(list(run.commits.all()), run.lines("metrics.jsonl"))
    return [point.loss for point in points]


def verdicts(losses: Mapping[str, Mapping[int, float]], margin: float) -> Iterator[dict]:
    """The baseline's row, then one for each arm; `losses`: final ones, by arm and seed.
    `gap` and `bound` are in the unit of the loss; the gap is below the bound, with
    95 %."""
    for arm, by_seed in losses.items():
        average, gap, bound = mean(by_seed.values()), None, None
        spread = stdev(by_seed.values()) if len(by_seed) > 1 and isfinite(average) else None
        gaps = [loss - losses[BASELINE][seed] for seed, loss in by_seed.items()]
        if not isfinite(mean(gaps)):
            words = "a loss is not finite"
        elif arm == BASELINE:
            words = "what the others are compared with"
        else:
            gap, half = mean(gaps), half_width(gaps)
            bound = None if half is None else gap + half
            words = _words_on(gap, half, margin)
        yield {"arm": arm, "loss": average, "spread": spread, "gap": gap, "bound": bound,
               "words": words}


def half_width(gaps: Sequence[float]) -> float | None:
    """Half the width of the one-sided 95 % interval of the gaps' mean; None for a single
    gap."""
    if len(gaps) < 2:
        return None
    return T95[min(len(gaps), max(T95))] * stdev(gaps) / len(gaps) ** 0.5


def _words_on(gap: float, half: float | None, margin: float) -> str:
    if half is None:
        return "one seed tells nothing of the noise: --seeds 3"
    if gap + half <= margin:
        return f"ok: within {margin:g}"
    if gap - half > margin:
        return f"WORSE by more than {margin:g}"
    return "undecided: the noise is larger than the margin; more seeds or tokens"
