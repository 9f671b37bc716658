"""The commands that start, change and end runs. Each changes at most the run's control
file and runs one reconcile pass, so it may be repeated at any time."""

import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from elastic.base.errors import Exit
from elastic.commands import shared
from elastic.commands.shared import command, flag, say, say_json, warn
from elastic.jobs import reconcile as reconciling
from elastic.jobs.reconcile import PassReport
from elastic.people import steering
from elastic.run import rundir
from elastic.run.rundir import RunDir

JITTER_S = 20.0  # spread the cron passes of many users over this time


@command("submit 7b.toml --min 8 --max 32", "submit etc/demo.toml --set train.epochs=2 --wait")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--min", "elastic_min", type=int, metavar="GPUS", help="Fewest GPUs wanted.")
@click.option("--max", "elastic_max", type=int, metavar="GPUS", help="Most GPUs to use.")
@click.option("--mode", "run_mode", metavar="local|sync", help="How the GPUs train together.")
@click.option("--scheduler", "run_scheduler", metavar="slurm|local", help="Who runs the jobs.")
@click.option("--name", "run_name", help="Name of the run (default: that of CONFIG).")
@shared.overrides_option
@flag("--dry-run", help="Check everything, say what a round would cost, start nothing.")
@flag("--no-try", help="Do not try a first step of the task here.")
@flag("--parsable", help="Print the name of the run and nothing else.")
@flag("--wait", "wait_for_it", help="Return when the run has ended.")
def submit(config: Path, overrides, dry_run: bool, no_try: bool, parsable: bool,
           wait_for_it: bool, **named):
    """Start the run that CONFIG describes and return.

    Makes the run directory below $ELASTIC_RUNS (default ./runs), then runs the
    first reconcile pass. Everything is checked before anything is made: the
    task's model, a batch, loss and backward are tried here (of a model of more
    than 30 million parameters only its shapes and a batch). What the files leave
    open of local_sgd.inner_steps, compression and overlap is chosen.
    """
    ready = steering.prepare(config, [*overrides, *settings(named)], not no_try, dry_run)
    warn(*(f"warning: {each}" for each in ready.warnings))
    if dry_run:
        say(steering.on_paper(ready))
        return
    run, waits = steering.start(ready)
    warn(*(f"waits: {reason}" for reason in waits))
    click.echo(run.name if parsable else steering.started_text(run, ready))
    if wait_for_it:
        steering.wait_for_end(run)


def settings(named: dict) -> list[str]:
    """Options that stand for a key (elastic_min) as settings of that key."""
    return [f"{name.replace('_', '.', 1)}={value}" for name, value in named.items()
            if value is not None]


@command("reconcile", "reconcile demo --dry-run", "reconcile --jitter  # as cron does")
@click.argument("runs", nargs=-1)
@flag("--dry-run", help="Print the plan with its reasons, do nothing.")
@flag("--jitter", help="Sleep up to 20 s first, so that users take turns.")
@click.option("--within", default=0.0, metavar="SECONDS", type=click.FloatRange(0),
              help="Accept a listing of jobs that is up to SECONDS old.")
@shared.json_option
def reconcile(runs: tuple[str, ...], dry_run: bool, jitter: bool, within: float, as_json: bool):
    """Run one pass over all runs (or those named).

    Compares what should be there with what the scheduler says, and submits or
    cancels the difference. Prints nothing when there is nothing to do. Exits 75
    when a scheduler did not answer: the next pass does what is left.
    """
    if jitter:
        time.sleep(random.uniform(0, JITTER_S))
    found = [rundir.find(name) for name in runs] or rundir.registered()
    report = reconciling.run_pass(found, time.time(), dry_run, within_s=within)
    if as_json:
        say_json(asdict(report))
    else:
        say(*report.lines())
    sys.exit(code_of(report))


def code_of(report: PassReport) -> Exit:
    if report.unknown:
        return Exit.TRY_AGAIN
    return Exit.ERROR if report.errors else Exit.OK


def take_effect(run: RunDir) -> Exit:
    """Run a pass so that a change takes effect now; say what it did. Its exit code."""
    report = reconciling.run_pass([run], time.time(), wait_s=reconciling.PERSON_S)
    if report.unknown:
        report.unknown_is_new = False  # the line below says it, news or not
        warn(f"run {run.name}: noted, and left to the next pass: {report.unknown}")
    say(*report.lines())
    return code_of(report)


@command("scale demo --max 16", "scale demo --min 4 --max 4", "scale demo --mode sync")
@shared.run_argument()
@click.option("--min", "fewest", type=int, metavar="GPUS", help="Fewest GPUs wanted.")
@click.option("--max", "most", type=int, metavar="GPUS", help="Most GPUs to use.")
@click.option("--mode", type=click.Choice(["local", "sync"]), help="How the GPUs train together.")
def scale(run: str, fewest: int | None, most: int | None, mode: str | None):
    """Change how many GPUs RUN may have, or how they train together.

    In the other mode it goes on from what is committed when its jobs have left.
    A run that was stopped or has failed starts again. After its folder was moved,
    RUN is the new folder. Exits 75 when the scheduler did not answer: the next
    pass does it then.
    """
    resized = rundir.find(run)
    say(*steering.scale(resized, fewest, most, mode))
    sys.exit(take_effect(resized))


@command("stop demo", "stop demo --now", "stop demo --wait")
@shared.run_argument()
@flag("--now", help="Kill the jobs: lost is what they have not delivered (sync mode: all"
      " since the last checkpoint).")
@flag("--wait", "wait_for_it", help="Return when its jobs are gone.")
def stop(run: str, now: bool, wait_for_it: bool):
    """Stop RUN; nothing committed is lost.

    Its workers deliver what they have and leave. "elastic scale RUN" lets the
    run go on. Exits 75 when the scheduler did not answer: the next pass stops
    it then.
    """
    stopped = rundir.find(run)
    steering.stop(stopped, now)
    code = take_effect(stopped)
    if wait_for_it:
        steering.wait_until_gone(stopped)
        code = Exit.OK
    state = "is done" if stopped.done() else "is stopped" if wait_for_it else "stops"
    say(f"run {stopped.name} {state}")
    sys.exit(code)
