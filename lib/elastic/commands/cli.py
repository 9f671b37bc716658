"""The commands that people and cron type. What they print comes from views, what they know from
status, audit and reconcile; here are only options, checks before a run starts, and exit codes.

A command changes at most the run's control file and runs one reconcile pass, so it may be repeated
at any time. Errors (ElasticError, OSError) become "error: what", "hint: way out" and a code, in one
place. torch, and everything that needs it, is imported by `evaluate` and `validate` alone: the
others run under cron and on login nodes, where seconds and memory count.
"""

import contextlib
import dataclasses
import functools
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from elastic import __version__
from elastic.base import config as configuration
from elastic.base.durable import checksum, write_atomic
from elastic.base.environment import cron_line, runs_root
from elastic.base.errors import ElasticError, Exit, UsageError
from elastic.base.keys import NAME, TIME, check_value, parse
from elastic.jobs import reconcile as reconciling
from elastic.jobs.sched import scheduler_of
from elastic.lab.sandbox import Sandbox, Shape, default_folder
from elastic.people import submission
from elastic.people.submission import jobs_of
from elastic.run import estimate, rundir, wording
from elastic.run.audit import audit as audit_ledger
from elastic.run.audit import gpu_seconds, has_ledger
from elastic.run.rundir import RunDir

JITTER_S = 20.0  # spread the cron passes of many users over this time
WATCH_S = 2.0
FOLLOW_S = 10.0
LISTED_S = 30.0  # in a loop, jobs may be those of so long ago: sites count who asks Slurm
WAIT_S = 2.0
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


class Commands(click.Group):
    """A group that lists its commands as written and turns errors into messages and codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context):
        try:
            check_folder()
            return super().invoke(ctx)
        except ElasticError as error:
            say(f"error: {error}", err=True)
            ctx.exit(error.code)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise  # click's own affair: nobody reads on
            where = f": {error.filename}" if error.filename else ""
            say(f"error: {error.strerror or error}{where}", err=True)
            ctx.exit(Exit.ERROR)


def say(text: str, err: bool = False) -> None:
    """Print words, of which some may be anybody's."""
    click.echo(wording.plain(text), err=err)


def check_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory cannot be used: {error.strerror}",
                         "cd to a folder that is there") from None  # fmt: skip


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, message="%(version)s")
def elastic():
    """Train on preemptible Slurm partitions without losing work.

    Every command is also a program: elastic-submit. "elastic demo" shows it all.
    """


def command(*examples: str, cls: type[click.Command] | None = None) -> Callable:
    """A command of the group, with its examples below the help."""
    lines = "\n".join(["\b", "Example:", *(f"  elastic {example}" for example in examples)])
    name = examples[0].split()[0]
    return elastic.command(name, cls=cls, epilog=lines, context_settings=SETTINGS)


overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="SEC.KEY=VALUE",
    help="Set any key of the configuration (repeatable; submit also takes --SEC.KEY=VALUE).",
)  # fmt: skip


def runs_like(_ctx: click.Context, _argument: click.Parameter, typed: str) -> list[str]:
    return [run.name for run in rundir.registered() if run.name.startswith(typed)]


run_argument = functools.partial(click.argument, "run", shell_complete=runs_like)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


# ---- submit -------------------------------------------------------------------------------------


class Overridable(click.Command):
    """Takes --SEC.KEY=VALUE for --set SEC.KEY=VALUE."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        keys = re.compile(r"--[a-z_]+\.[a-z_0-9]+=", re.ASCII)
        args = [f"--set={arg[2:]}" if keys.match(arg) else arg for arg in args]
        return super().parse_args(ctx, args)


@command("submit 7b.toml --min 8 --max 32", "submit etc/demo.toml --train.epochs=2 --wait",
         cls=Overridable)  # fmt: skip
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--min", "elastic_min", type=int, metavar="GPUS", help="Fewest GPUs wanted.")
@click.option("--max", "elastic_max", type=int, metavar="GPUS", help="Most GPUs to use.")
@click.option("--mode", "run_mode", metavar="local|sync", help="How the GPUs train together.")
@click.option("--scheduler", "run_scheduler", metavar="slurm|local", help="Who runs the jobs.")
@click.option("--name", "run_name", help="Name of the run (default: that of CONFIG).")
@overrides_option
@click.option("--dry-run", is_flag=True,
              help="Check everything, say what a round would cost, start nothing.")
@click.option("--no-try", is_flag=True, help="Do not try a first step of the task here.")
@click.option("--parsable", is_flag=True, help="Print the name of the run and nothing else.")
@click.option("--wait", "wait_for_it", is_flag=True, help="Return when the run has ended.")
def submit(config: Path, overrides, dry_run: bool, no_try: bool, parsable: bool,
           wait_for_it: bool, **named):  # fmt: skip
    """Start the run that CONFIG describes and return.

    Makes the run directory below $ELASTIC_RUNS (default ./runs), then runs the
    first reconcile pass. Everything is checked before anything is made: the
    task's model, a batch, loss and backward are tried here (of a model of more
    than 30 million parameters only the making and the batch).
    """
    named = {key.replace("_", ".", 1): value for key, value in named.items() if value is not None}
    settings = [*overrides, *(f"{key}={value}" for key, value in named.items())]
    anywhere = ["slurm.partition=any"] * dry_run  # a laptop has no site file
    resolved = configuration.load(config, [*anywhere, *settings])
    root = runs_root()
    warnings = submission.check(resolved, root, dry_run)
    model, reason, untried = None, "", ""
    if not resolved.run.command and (dry_run or not no_try):
        model, reason, untried = submission.described(config, settings, tries=not no_try)
    for each in (*warnings, *([f"the task was not tried: {untried}"] if untried else [])):
        say(f"warning: {each}", err=True)
    if dry_run:
        limits = f"{resolved.elastic.min}..{resolved.elastic.max} GPUs"
        click.echo(f"would start run {resolved.run.name} on {limits} in {root / resolved.run.name}")
        if resolved.run.mode == "local" and not resolved.run.command:
            say(on_paper(resolved, model, reason))
        return
    run = submission.start(submission.with_shares(resolved, model), root)
    report = one_pass([run])
    if failed := run.failed() or (report.errors and {"reason": report.errors[0], "detail": ""}):
        submission.undo(run)
        raise ElasticError(failed["reason"], failed["detail"])
    waits = [report.unknown, *(each for one in report.runs for each in one.waiting)]
    for each in filter(None, waits):
        say(f"waits: {each}", err=True)
    click.echo(run.name if parsable else started_text(run))
    if wait_for_it:
        wait_for_end(run)


def on_paper(resolved, model: estimate.Model | None, reason: str) -> str:
    """What a round of the run would move and take, if its model is known."""
    if not model:
        return f"  model             cannot be known here: {reason}"
    workers = resolved.elastic.max // resolved.slurm.gpus_per_worker
    return estimate.report(model, workers, resolved)


def started_text(run: RunDir) -> str:
    return (f"run {run.name} started in {run.path}\n"
            f"  watch it:  elastic-status {run.name} --watch\n"
            f"  its logs:  elastic-logs {run.name} -f\n"
            f"  resize it: elastic-scale {run.name} --max N\n"
            f"  end it:    elastic-stop {run.name}\n"
            f"  cron line: {cron_line()}")  # fmt: skip


def wait_for_end(run: RunDir) -> None:
    """Reconcile as cron would until the run is done. ElasticError: it has failed or was stopped."""
    from elastic.people import views

    interval_s = run.config().elastic.reconcile_interval_s
    next_pass = time.monotonic() + interval_s
    with views.progress() as tell:
        while not run.done():
            if failed := run.failed():
                what = f"run {run.name} failed: {failed['reason']}"
                raise ElasticError(what, f"elastic-logs {run.name}")
            if run.control().state == "stopped":
                raise ElasticError(f"run {run.name} was stopped", f"elastic-scale {run.name}")
            tell(progress_of([run], 1))
            time.sleep(WAIT_S)
            if time.monotonic() >= next_pass:
                one_pass([run])
                next_pass = time.monotonic() + interval_s


def progress_of(runs: list[RunDir], count: int) -> tuple[float, str]:
    """How much of `count` runs is trained, of which some are not begun; words on the newest."""
    shares, words = [], ""
    for run in runs:
        newest, of_sync = run.newest_commit() or {}, run.progress() or {}
        tokens = max(newest.get("tokens", 0), of_sync.get("tokens", 0))
        goal = of_sync.get("total_tokens") or newest.get("total_tokens")
        shares.append(1.0 if run.done() else tokens / goal if goal else 0.0)
        words = f"{run.name}: {wording.si(tokens)} {wording.unit(newest, of_sync)}"
    return sum(shares) / count, words


# ---- reconcile ----------------------------------------------------------------------------------


@command("reconcile", "reconcile demo --dry-run", "reconcile --jitter    # as cron calls it")
@click.argument("runs", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Print the plan with its reasons, do nothing.")
@click.option("--jitter", is_flag=True, help="Sleep up to 20 s first, so that users take turns.")
@click.option("--within", default=0.0, metavar="SECONDS", type=click.FloatRange(0),
              help="Take an answer of the scheduler that is so old.")
@json_option
def reconcile(runs: tuple[str, ...], dry_run: bool, jitter: bool, within: float, as_json: bool):
    """Run one pass over all runs (or those named).

    Compares what should be there with what the scheduler says, and submits or
    cancels the difference. Prints nothing when there is nothing to do. Exits 75
    when the scheduler did not answer: then nothing was done.
    """
    if jitter:
        time.sleep(random.uniform(0, JITTER_S))
    found = [rundir.find(name) for name in runs] if runs else rundir.registered()
    report = one_pass(found, dry_run, within)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        for line in report.lines():
            say(line)
    sys.exit(Exit.TRY_AGAIN if report.unknown else Exit.ERROR if report.errors else Exit.OK)


def one_pass(runs: list[RunDir], dry_run: bool = False, within_s: float = 0.0):
    return reconciling.run_pass(runs, time.time(), dry_run, within_s=within_s)


def echo_pass(run: RunDir) -> None:
    """Let a change take effect now, and say what that came to."""
    report = one_pass([run])
    for line in report.lines():
        say(line)
    if report.unknown and not report.lines():
        say(f"nothing done yet: {report.unknown}")


# ---- status, logs -------------------------------------------------------------------------------


@command("status", "status demo --watch", "status demo --json")
@run_argument(required=False)
@click.option("--watch", is_flag=True, help="Redraw every 2 s until Ctrl-C.")
@json_option
def show_status(run: str | None, watch: bool, as_json: bool):
    """Show all runs, or all about one.

    One run: its progress, its workers and jobs, why it waits, what the next
    reconcile pass will do, and the last events.
    """
    from elastic.people import status, views  # and with them redis and rich: a pass needs neither

    found = [rundir.find(run)] if run else rundir.registered()
    view = views.run_view if run else views.runs_table

    def seen() -> dict | list[dict]:
        every = status.observe_all(found, not (run or as_json), LISTED_S if watch else 0.0)
        return every[0] if run else every

    if watch and as_json:
        raise UsageError("--watch is for a screen, and --json for a script", "give one of them")
    if not watch:
        with views.busy("asking the scheduler and the masters"):
            observed = seen()
        show(as_json, observed, view)
        return
    with contextlib.suppress(KeyboardInterrupt), views.live(view) as draw:
        while True:
            draw(seen())
            time.sleep(WATCH_S)


def show(as_json: bool, data: Any, view: Callable[[Any], Any]) -> None:
    """Print data for a script, or the view of it for a person."""
    if as_json:
        click.echo(json.dumps(finite(data), indent=1, allow_nan=False))
    else:
        from elastic.people import views

        views.show(view, data)


def finite(data: Any) -> Any:
    """The same data with null for a number that JSON has none for."""
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def put(path: Path, data: bytes) -> None:
    """Replace a file as a whole; what is none (a pipe, /dev/stdout) is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_atomic(path, data)


@command("logs demo", "logs demo 3 -f", "logs demo master")
@run_argument()
@click.argument("slot", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on printing what is added.")
@click.option("-n", "--lines", default=200, show_default=True, help="Lines of each log.")
def logs(run: str, slot: str | None, follow: bool, lines: int):
    """Print the logs of RUN.

    SLOT is a number, or "master"; without it, all logs are printed.
    """
    found = rundir.find(run)
    if slot is None:
        paths = sorted((found.path / "logs").glob("*.log"))
    elif slot == "master" or slot.isdecimal():
        role = "master" if slot == "master" else "worker"
        paths = [found.log_path(role, 0 if role == "master" else int(slot))]
    else:
        raise UsageError(f"no slot {slot!r}", 'a slot is a number, or "master"')
    paths = [path for path in paths if path.exists()]
    if not paths:
        raise ElasticError(f"no log of {slot or 'any job'} yet", f"elastic-status {found.name}")
    follows = ["-F"] if follow and not (found.done() or found.failed()) else []
    command = ["tail", "-n", str(lines), *follows, "--", *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        try:
            for line in tail.stdout:
                say(line.removesuffix("\n"))
        except BaseException:  # Ctrl-C, or nobody reads on
            tail.terminate()
            raise
    sys.exit(tail.returncode)


# ---- scale, stop --------------------------------------------------------------------------------


@command("scale demo --max 16", "scale demo --min 4 --max 4", "scale demo --mode sync")
@run_argument()
@click.option("--min", "fewest", type=int, metavar="GPUS", help="Fewest GPUs wanted.")
@click.option("--max", "most", type=int, metavar="GPUS", help="Most GPUs to use.")
@click.option("--mode", type=click.Choice(["local", "sync"]), help="How the GPUs train together.")
def scale(run: str, fewest: int | None, most: int | None, mode: str | None):
    """Change how many GPUs RUN may have, or how they train together.

    In the other mode it goes on from what is committed when its jobs have left.
    A run that was stopped or has failed starts again.
    """
    found = rundir.find(run)
    if found.done():
        raise UsageError(f"run {found.name} is done", "submit a new one")
    before = found.control()
    fewest = before.min if fewest is None else fewest
    most = before.max if most is None else most
    for name, count in (("elastic.min", fewest), ("elastic.max", most)):
        check_value(name, count)
    if fewest > most:
        raise UsageError(f"min {fewest} is above max {most}", "give both")
    slurm = found.config().slurm
    if most < slurm.gpus_per_worker and found.config().run.scheduler != "local":
        raise UsageError(f"max {most} is below one worker: slurm.gpus_per_worker is "
                         f"{slurm.gpus_per_worker}", "give a larger --max")  # fmt: skip
    mode = mode or before.mode
    if mode != before.mode:
        submission.check_mode(found, mode)
        click.echo(f"run {found.name}: {before.mode} mode -> {mode} mode")
    if found.failed():
        say(f"run {found.name} had failed ({found.failed()['reason']}): it tries again")
        found.clear_failed()
    if before.state == "stopped":
        click.echo(f"run {found.name} was stopped: it starts again")
    found.set_control(state="running", mode=mode, min=fewest, max=most)
    found.event("scale", mode=mode, min=fewest, max=most)
    click.echo(f"run {found.name}: {before.min}..{before.max} GPUs -> {fewest}..{most}")
    echo_pass(found)


@command("stop demo", "stop demo --now", "stop demo --wait")
@run_argument()
@click.option("--now", is_flag=True, help="Kill the jobs: steps of the open round are lost.")
@click.option("--wait", "wait_for_it", is_flag=True, help="Return when its jobs are gone.")
def stop(run: str, now: bool, wait_for_it: bool):
    """Stop RUN; nothing committed is lost.

    Its workers deliver what they have and leave. "elastic scale RUN" lets the
    run go on.
    """
    found = rundir.find(run)
    if not found.done():
        found.set_control(state="stopped")
        found.event("stop", now=now)
    scheduler = scheduler_of(found)
    if now:
        for job in jobs_of(found.name, scheduler):
            scheduler.cancel(job.job_id, now=True)
    echo_pass(found)
    while wait_for_it and jobs_of(found.name, scheduler):
        time.sleep(WAIT_S)
        one_pass([found])
    state = "is done" if found.done() else "is stopped" if wait_for_it else "stops"
    click.echo(f"run {found.name} {state}")


# ---- audit, evaluate, config --------------------------------------------------------------------


@command("audit demo", "audit demo --files --json")
@run_argument()
@click.option("--files", is_flag=True, help="Check the checksums of all kept files, too.")
@json_option
def audit(run: str, files: bool, as_json: bool):
    """Prove that RUN trained every sample once.

    Reads the commit records alone. Exits 1 if anything is wrong: a sample
    committed twice or never, tokens that do not add up, a file that is gone.
    Also says what the GPUs were used for, to the second.
    """
    from elastic.people import views

    found = rundir.find(run)
    if not has_ledger(found):
        raise UsageError(f"run {found.name} has no ledger: in sync mode run.command keeps count of "
                         "its samples itself", f"elastic-logs {found.name}")  # fmt: skip
    report = audit_ledger(found.path, found.config().checkpoint.keep, checksum if files else None)
    report["gpu_seconds"] = gpu_seconds(found)
    show(as_json, report, functools.partial(views.audit_view, found.name))
    sys.exit(Exit.ERROR if report["problems"] else Exit.OK)


@command("report demo")
@run_argument()
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to (default: RUN.html, here).")
def report(run: str, out: Path | None):
    """Draw RUN: loss, speed, jobs, goodput, incidents.

    One HTML file that needs nothing else and no network; every curve and bar
    comes from the run directory, so it works for runs that have ended, too.
    """
    from elastic.people import report as drawing
    from elastic.people import views

    found = rundir.find(run)
    path = out or Path(f"{found.name}.html")
    with views.busy(f"drawing {found.name}"):
        put(path, drawing.page(drawing.gather(found)).encode())
    click.echo(path)


@command("metrics --prometheus /var/lib/node_exporter/elastic.prom",
         "metrics demo --jsonl demo.jsonl", "metrics demo --tensorboard tb --follow")
@run_argument(required=False)
@click.option("--prometheus", type=click.Path(path_type=Path), metavar="FILE",
              help="Write all runs (or RUN) as they are now.")
@click.option("--jsonl", type=click.Path(path_type=Path), metavar="FILE",
              help="Append a line per version (sync mode: step) of RUN.")
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="DIR",
              help="Likewise; needs the package tensorboard.")
@click.option("--wandb", metavar="PROJECT", help="Likewise; needs the package wandb.")
@click.option("--follow", is_flag=True, help="Go on until RUN has ended, or for ever.")
def metrics(run: str | None, prometheus: Path | None, follow: bool, **series):
    """Hand the numbers of runs to other tools.

    May be stopped and started again at any time: a file goes on where it
    ends, and so does the run of TensorBoard or W&B, whatever was preempted.
    """
    from elastic.people import metrics as numbers

    if not (prometheus or any(series.values())):
        raise UsageError("nowhere to write to", "elastic-metrics --help lists the formats")
    if any(series.values()) and not run:
        raise UsageError("of which RUN? Only --prometheus takes all of them", "elastic-status")
    found = rundir.find(run) if run else None
    sinks = numbers.sinks(found, **series) if found else []

    def step() -> bool:
        if prometheus:
            from elastic.people import status

            runs = [found] if found else rundir.registered()
            every = status.observe_all(runs, within_s=LISTED_S if follow else 0.0)
            put(prometheus, numbers.prometheus(every).encode())
        is_over = bool(found and found.closing())
        if sinks:
            numbers.feed(found, sinks)
        return follow and not is_over

    with contextlib.suppress(KeyboardInterrupt):
        while step():
            time.sleep(FOLLOW_S)


@command("evaluate demo", "evaluate demo --version 0 --json")
@run_argument()
@click.option("--version", type=int, metavar="V", help="A version still on disk (default: newest).")
@json_option
def evaluate(run: str, version: int | None, as_json: bool):
    """Validate what RUN has trained.

    Loads the run's task here and prints what its validate() says of the
    newest checkpoint of sync mode, else of the newest version, or of V.
    """
    from elastic.saved.evaluation import evaluate as score

    scores = score(rundir.find(run), version)
    show(as_json, scores, lambda each: "  ".join(f"{k} {v:.6g}" for k, v in each.items()))


@command("validate etc/demo.toml", "validate 7b.toml --arms int8,topk --seeds 5 --at-once 8")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--arms", default="int8", show_default=True, metavar="A,B",
              help="Compressions of local mode to try.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 10),
              help="Runs of each; the noise is judged by them.")
@click.option("--margin", default=0.02, show_default=True,
              help="How much more loss is still as good, in its unit.")
@click.option("--metric", default="", help="Of validate() (default: the first that says loss).")
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(1),
              help="Runs at a time.")  # fmt: skip
@overrides_option
@json_option
def validate(config: Path, arms: str, seeds: int, overrides, as_json: bool, **how):
    """Compare local mode with sync mode at equal tokens.

    Trains CONFIG in both, with the same samples and seeds on elastic.max
    GPUs, and says how much loss local mode costs, with its noise. Goes on
    where it was if it is started again. Exits 1 unless every arm is ok.
    """
    from elastic.lab import validation
    from elastic.people import views
    from elastic.saved.evaluation import load

    base = configuration.load(config, overrides)
    load(base)  # what cannot be evaluated need not be trained
    every = [*validation.trials(lambda more: configuration.load(config, [*overrides, *more]),
                                arms.split(","), seeds)]  # fmt: skip
    root = runs_root() / f"{base.run.name}-validate"
    with views.progress() as tell:
        done = validation.train(
            every, root, how["at_once"], lambda runs: tell(progress_of(runs, len(every)))
        )
    losses, curves = {}, {}
    for trial in every:
        score = validation.final_loss(done[trial], how["metric"])
        losses.setdefault(trial.arm, {})[trial.seed] = score
        curves.setdefault(trial.arm, validation.curve(done[trial]))
    rows = list(validation.verdicts(losses, how["margin"]))
    found = {"runs": str(root), "losses": losses,
             "verdicts": [dataclasses.asdict(row) for row in rows]}  # fmt: skip
    show(as_json, found, functools.partial(views.validation_view, curves=curves))
    is_ok = all(row.words.startswith("ok") for row in rows if row.gap is not None)
    sys.exit(Exit.OK if is_ok else Exit.ERROR)


@command("config etc/7b.toml", "config etc/7b.toml --set train.epochs=2 --json")
@click.argument("config", type=click.Path(path_type=Path))
@overrides_option
@json_option
def show_config(config: Path, overrides: tuple[str, ...], as_json: bool):
    """Print every value of CONFIG, with unit and origin."""
    from elastic.people import views

    rows = configuration.load(config, overrides).explain()
    show(as_json, [row._asdict() for row in rows], views.config_view)


# ---- doctor -------------------------------------------------------------------------------------


@command("doctor", "doctor 7b.toml --try", "doctor --init    # an admin, once")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@overrides_option
@json_option
@click.option("--try", "tries", is_flag=True, help="Also run a job: two nodes, about a minute.")
@click.option("--init", is_flag=True, help="Write the site file from what is found here.")
@click.option("--force", is_flag=True, help="With --init: replace one that sets something.")
def doctor(config: Path | None, overrides: tuple[str, ...], as_json: bool, **how: bool):
    """Look at this cluster and say what will work.

    Every line is OK, WARN (works, and could do better), FAIL (does not start,
    or loses work), or SKIP (could not look). For the run that CONFIG describes,
    or for what the site file says. Exits 1 if there is a FAIL.
    """
    from elastic.people import doctor as examining
    from elastic.people import tryout, views

    if how["init"]:
        path, text = examining.init(how["force"])
        click.echo(f"{text}\nwritten to {path}")
        return
    with views.progress() as tell:
        report = examining.report(config, overrides, tell, [("tried", tryout.tried)] * how["tries"])
    show(as_json, report, views.doctor_view)
    sys.exit(Exit.ERROR if report["FAIL"] else Exit.OK)


# ---- plan ---------------------------------------------------------------------------------------


@command("plan 7b.toml --trace spot.csv", "plan 7b.toml --trace last-run --measured last-run")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--trace", "source", required=True, metavar="FILE|RUN",
              help="When nodes came and went: a CSV file, an events.jsonl, a run.")
@click.option("--measured", metavar="RUN", help="Take costs from what this run has shown.")
@overrides_option
@json_option
def plan(config: Path, source: str, measured: str | None, overrides: tuple[str, ...],
         as_json: bool):  # fmt: skip
    """Forecast how CONFIG would fare with preemptions.

    Plays a trace to plain --requeue, sync mode and local mode, and says which
    to take, and with what settings. What things cost is in section [plan].
    A line of a CSV file is MILLISECONDS,add|remove,NODE.
    """
    from elastic.lab import trace
    from elastic.lab.forecast import costs, forecast
    from elastic.people import views

    overrides = ("slurm.partition=any", *overrides)  # nothing is submitted
    resolved = configuration.load(config, overrides)
    slurm = resolved.slurm
    changes, end = trace.read(source, max(slurm.gpus_per_worker, slurm.gpus_per_node))
    shown = trace.measured(rundir.find(measured)) if measured else {}
    said = {f"{key}_s" for key in ("step", "startup", "leave")
            if resolved.origin(f"plan.{key}") == "command line"}  # fmt: skip
    shown = {name: seconds for name, seconds in shown.items() if name not in said}
    model, reason = None, "only run.command knows the model"
    if not resolved.run.command:
        model, reason, _ = submission.described(config, overrides)
    found = costs(resolved, model, shown)
    if not found.step_s:
        raise UsageError(f"how long a step takes cannot be known: {reason}",
                         "give --set plan.step=SECONDS, or --measured RUN")  # fmt: skip

    tell = functools.partial(say, err=True)
    if not model:
        tell(f"saves and deltas are taken to cost no time: {reason}")
    found = forecast(changes, end, resolved, found, *[tell] * sys.stderr.isatty())
    show(as_json, found, views.plan_view)


# ---- chaos --------------------------------------------------------------------------------------


def seconds(_ctx: click.Context, _option: click.Parameter, text: str) -> float:
    """What an option that takes a duration says."""
    try:
        return parse(TIME, text)
    except UsageError as error:
        raise click.BadParameter(error.what) from None


@command("chaos demo --every 29s --for 30m", "chaos demo --faults kill-worker,preempt --seed 7")
@run_argument()
@click.option("--every", default="29s", callback=seconds, show_default=True,
              help="A fault so often, on average.")  # fmt: skip
@click.option("--for", "lasting", default="10m", callback=seconds, show_default=True,
              help="How long.")  # fmt: skip
@click.option("--before", default="0s", callback=seconds, show_default=True,
              help="Look on for so long first, to compare with.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="The same faults in the same order.")
@click.option("--faults", default="", metavar="A,B,...", help="Of these kinds only.")
@json_option
def chaos(run: str, every: float, lasting: float, before: float, seed: int, faults: str,
          as_json: bool):  # fmt: skip
    """Do real faults to RUN, and report what they cost.

    Kills and stops the run's own processes and jobs, and what else can be
    done here. Nothing that is committed can be lost by it.
    """
    from elastic.lab import chaos as doing
    from elastic.lab.faults import schedule
    from elastic.people import views

    if not every:
        raise UsageError("--every 0: faults need time between them", "give --every 10s")
    found = rundir.find(run)
    if over := found.closing():
        what = f"run {found.name} is {over}: there is nobody to hit"
        raise UsageError(what, f"elastic-scale {found.name}, if it was stopped or has failed")
    agent = doing.Chaos(found, seed)
    kinds, refused = doing.choose(agent, faults)
    for kind, why in refused.items():
        say(f"not done: {kind}: {why}", err=True)
    began = time.time()
    time.sleep(before)
    baseline = (began, time.time()) if before else None

    def tell(text: str) -> None:
        say(f"{time.time() - began:7.1f}s  {text}", err=True)

    doing.unleash(agent, schedule(kinds, every, lasting, random.Random(seed)), tell)
    report = agent.report(baseline[1] if baseline else began, baseline)
    show(as_json, report, views.chaos_view)
    sys.exit(Exit.ERROR if report["audit"]["problems"] else Exit.OK)


# ---- sandbox ------------------------------------------------------------------------------------


@command("sandbox up --nodes 4", "sandbox env    # for eval", "sandbox preempt", cls=click.Group)
def sandbox():
    """Run a private multi-node Slurm on this machine."""


def _of_sandbox(method: Callable[..., str | None], *parameters: Callable) -> None:
    """Make a subcommand of a function of a sandbox; what it returns is printed."""

    @functools.wraps(method)
    def call(name: str, folder: Path | None, **given: Any) -> None:
        from elastic.people import views

        if not (name and NAME.holds(name)):  # it is a path, say
            raise UsageError(f"unfit name of a sandbox: {name!r}", NAME.text)
        box = Sandbox((folder or default_folder()).absolute() / name)
        with views.busy(f"sandbox {name}: {method.__name__.strip('_').replace('_', ' ')}"):
            said = method(box, **given)
        if said:
            click.echo(said)

    call = click.option("--dir", "folder", type=Path, help="Folder of sandboxes.")(call)
    call = click.option("--name", default="default", show_default=True, help="Which one.")(call)
    for parameter in reversed(parameters):
        call = parameter(call)
    sandbox.command(method.__name__.strip("_").replace("_", "-"))(call)


def _up(box: Sandbox, **shape: Any) -> str:
    """Start it and wait until its nodes are idle."""
    box.up(Shape(**shape))
    return f"up; to use it:\n{box.env()}"


def _number(flag: str, default: float, least: float, what: str) -> Callable:
    kind = click.IntRange(least) if isinstance(default, int) else click.FloatRange(least)
    return click.option(*flag.split(), type=kind, default=default, show_default=True, help=what)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
_NODE, _SECONDS = click.argument("node"), _number("--seconds", 30.0, 0.0, "For how long.")
_of_sandbox(
    _up,
    _number("--nodes", Shape.nodes, 1, "Nodes with GPUs."),
    _number("--gpus", Shape.gpus, 0, "GPUs of each."),
    _number("--grace grace_s", Shape.grace_s, 0, "Seconds of notice before a preemption."),
    click.option("--accounting", is_flag=True, help="With slurmdbd and MariaDB, for sacct."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="In slurm.conf."),
    click.option("--job-submit", type=_FILE, help="A job_submit.lua that judges all jobs."),
    click.option("--host-names", is_flag=True, help="Nodes call themselves NAME.cluster.local."),
    click.option("--stale", type=_FOLDER, help="Nodes see it through a cache (root, bindfs)."),
)
_of_sandbox(Sandbox.env)
_of_sandbox(Sandbox.status)
_of_sandbox(Sandbox.preempt, _number("--nodes", 1, 1, "How many."), _SECONDS)
_of_sandbox(Sandbox.kill_node, _NODE)
_of_sandbox(Sandbox.revive_node, _NODE)
_of_sandbox(Sandbox.hang_controller, _SECONDS)
_of_sandbox(Sandbox.down)


def main() -> None:
    elastic(prog_name="elastic")


if __name__ == "__main__":
    main()
