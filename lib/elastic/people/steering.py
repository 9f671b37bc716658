"""What a person does to a run: start it, wait for its end, resize it, stop it.

`prepare` checks all that can be known to be wrong and makes nothing; `start` makes the
run, and if the scheduler refuses its jobs the run is gone again. `scale` and `stop`
change the run's control file: the reconcile pass that acts on it is the caller's.
"""

import contextlib
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.base.config import Config, load
from elastic.base.environment import cron_line, runs_root
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.jobs.reconcile import PERSON_S, run_pass
from elastic.jobs.sched import Elsewhere, jobs_of, scheduler_of
from elastic.people import dial, submission
from elastic.run import estimate, wording
from elastic.run.rundir import RunDir

WAIT_S = 2.0  # between two looks at what is waited for


@dataclass(frozen=True)
class Prepared:
    """A run that could start; `warnings` are no reason not to."""

    config: Config
    model: estimate.Model | None  # None: it cannot be known here, and `reason` says why
    reason: str
    warnings: list[str]
    rates: estimate.Rates = estimate.Rates()
    chosen: Sequence[dial.Choice] = ()


def prepare(path: Path, settings: Sequence[str], tries: bool, is_dry: bool) -> Prepared:
    """Check the run that the file describes; `tries`: try a first step of its task, too.
    Raises ElasticError saying what would stop it. A dry run may be on a laptop, without a
    site file."""
    left_open = {"slurm.partition"} if is_dry else frozenset()
    config = load(path, settings, left_open=left_open)
    warnings = submission.check(config, runs_root(), is_dry)
    is_looked_at = not config.run.command and (is_dry or tries)
    is_here = tries and not is_dry and config.run.scheduler == "local"
    how = ["--try"] * tries + ["--here"] * is_here
    model, reason = submission.described(path, settings, *how) if is_looked_at else (None, "")
    if reason:
        warnings.append(f"no step of the task was tried here: {reason}")
    if not config.slurm.partition and config.run.scheduler == "slurm":
        warnings.append("slurm.partition is not set: a submission needs it")
    ready = Prepared(config, model, reason, warnings)
    if not model or config.run.mode != "local":
        return ready
    has_choice = tries and dial.has_choice(config, model)
    if is_dry or has_choice:
        ready = replace(ready, rates=dial.rates(config, submission.nearest(runs_root())))
    return _dialled(ready, path, settings, left_open) if has_choice else ready


def _dialled(ready: Prepared, path: Path, settings: Sequence[str], left_open: Set) -> Prepared:
    """The same run, with what the files leave open chosen by the dial."""
    chosen = dial.choose(ready.config, ready.model, ready.rates)
    settings = [*settings, *(f"{each.key}={each.value}" for each in chosen)]
    after = load(path, settings, left_open=left_open)
    chosen += dial.outer_step(after)
    origins = {each.key: f"{estimate.CHOSEN}: {each.reason}" for each in chosen}
    after = replace(after, origins={**after.origins, **origins})
    codecs = (each.local_sgd.compression for each in (ready.config, after))
    return replace(ready, config=after, model=dial.coded(ready.model, *codecs), chosen=chosen)


def on_paper(ready: Prepared) -> str:
    """What would start, and what a round of it would move and take, if its model is
    known."""
    config, name = ready.config, ready.config.run.name
    limits = f"{config.elastic.min}..{config.elastic.max} GPUs"
    text = f"would start run {name} on {limits} in {runs_root() / name}"
    if config.run.mode != "local" or config.run.command:
        return text
    if not ready.model:
        return f"{text}\n  model             cannot be known here: {ready.reason}"
    workers = config.workers(config.elastic.max)
    paper = estimate.report(ready.model, workers, config, ready.rates)
    return "\n".join([text, *_chosen(ready), paper])


def _chosen(ready: Prepared) -> list[str]:
    return [f"  chosen            {each.key}={each.value}: {each.reason}" for each in ready.chosen]


def start(ready: Prepared) -> tuple[RunDir, list[str]]:
    """Make the run and its first reconcile pass; also why some of its jobs wait.
    ElasticError: it cannot start, and is gone again."""
    run = submission.start(ready.config, runs_root(), ready.model)
    report = run_pass([run], time.time(), wait_s=PERSON_S)
    failed = run.failed()
    if failed or report.errors:
        submission.undo(run)
        words = (failed["reason"], failed["detail"]) if failed else report.errors[:1]
        raise ElasticError(*words)
    waits = [report.unknown, *(reason for one in report.runs for reason in one.waiting)]
    return run, [reason for reason in waits if reason]


def started_text(run: RunDir, ready: Prepared) -> str:
    """What was chosen, and which commands come next."""
    return ("\n".join([f"run {run.name} started in {run.path}", *_chosen(ready), ""]) +
            f"  watch it:  elastic-status {run.name} --watch\n"
            f"  its logs:  elastic-logs {run.name} -f\n"
            f"  resize it: elastic-scale {run.name} --max N\n"
            f"  end it:    elastic-stop {run.name}\n"
            f"  cron line: {cron_line()}")


def wait_for_end(run: RunDir) -> None:
    """Reconcile as cron would until the run is done. ElasticError: it has failed or was
    stopped."""
    from elastic.people import views

    interval_s = run.config().elastic.reconcile_interval_s
    next_pass = time.monotonic() + interval_s
    with views.busy(f"run {run.name}") as shown:
        while not is_done(run):
            shown.update(progress_of(run))
            time.sleep(WAIT_S)
            if time.monotonic() >= next_pass:
                run_pass([run], time.time())
                next_pass = time.monotonic() + interval_s


def is_done(run: RunDir) -> bool:
    """Raises ElasticError if it has failed, or was stopped. False if the filesystem does
    not answer now."""
    what = f"run {run.name}"
    with contextlib.suppress(TryAgain):
        over = run.closing()
        if over == "failed" and (failed := run.failed()):
            raise ElasticError(f"{what} failed: {failed['reason']}", f"elastic-logs {run.path}")
        if over == "stopped":
            raise ElasticError(f"{what} was stopped", f"elastic-scale {run.path}: it goes on")
        return over == "done"
    return False


def progress_of(run: RunDir) -> str:
    """How much of the run is trained."""
    newest, of_sync = None, run.jobs.progress() or {}
    with contextlib.suppress(TryAgain):  # it is only shown: no reason to end the command
        newest = run.commits.newest()
    tokens = max(newest.tokens if newest else 0, of_sync.get("tokens", 0))
    goal = of_sync.get("total_tokens") or (newest.total_tokens if newest else 0)
    unit = wording.unit(newest.deltas if newest else (), of_sync)
    return f"run {run.name}: {wording.si(tokens)} {unit}" + f" of {wording.si(goal)}" * bool(goal)


def scale(run: RunDir, fewest: int | None, most: int | None, mode: str | None) -> list[str]:
    """Set the limits and the mode of a run, which then runs; None leaves one as it is.
    Returns what has changed, in words. UsageError: the run cannot have them, or another
    run has its name."""
    run.register()
    if run.done():
        raise UsageError(f"run {run.name} is done", "submit a new one")
    before, words = run.control(), []
    fewest = before.min if fewest is None else fewest
    most = before.max if most is None else most
    mode = mode or before.mode
    if (fewest, most, mode) != (before.min, before.max, before.mode):
        submission.check_change(run, fewest, most, mode)
    if mode != before.mode:
        words.append(f"run {run.name}: {before.mode} mode -> {mode} mode")
    if failed := run.failed():
        words.append(f"run {run.name} had failed ({failed['reason']}): it tries again")
        run.clear_failed()
    if before.state == "stopped":
        words.append(f"run {run.name} was stopped: it starts again")
    run.set_control(state="running", mode=mode, min=fewest, max=most)
    run.event("scale", mode=mode, min=fewest, max=most)
    return [*words, f"run {run.name}: {before.min}..{before.max} GPUs -> {fewest}..{most}"]


def stop(run: RunDir, now: bool) -> None:
    """Stop a run that is not done; `now`: kill its jobs."""
    refused: OSError | None = None
    if not run.done():
        try:
            run.set_control(state="stopped")
            run.event("stop", now=now)
        except OSError as error:  # a full disk: its GPUs are freed all the same
            refused = error
    scheduler = scheduler_of(run)
    for job in jobs_of(run.name, scheduler) if now else []:
        with contextlib.suppress(OSError):  # of the same disk
            scheduler.cancel(job.job_id, kill=True)
    if refused:
        hint = "make room and stop it again" + "; --now kills its jobs all the same" * (not now)
        raise ElasticError(f"not noted, so jobs may come back: {refused}", hint)


def wait_until_gone(run: RunDir) -> None:
    """Reconcile as cron would until a run that stops has no job left, however long the
    scheduler is silent."""
    while True:
        try:
            if not jobs_of(run.name, scheduler_of(run)):
                return
        except TryAgain as silence:
            if isinstance(silence, Elsewhere):  # nobody here will ever know
                raise
        time.sleep(WAIT_S)
        run_pass([run], time.time())
