"""The commands that look: at runs, at what they trained, at the cluster."""

import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from elastic.base import config as configuration
from elastic.base.durable import checksum
from elastic.base.errors import ElasticError, Exit, UsageError
from elastic.commands import shared
from elastic.commands.shared import command, flag, say, say_json, show
from elastic.run import rundir
from elastic.run.audit import audit as audit_ledger, gpu_seconds, has_ledger
from elastic.run.rundir import RunDir

WATCH_S = 2.0
LISTED_S = 30.0  # --watch takes a listing of jobs that is so old: squeue is costly for sites

file_option = functools.partial(click.option, type=click.Path(path_type=Path), metavar="FILE")


@command("status", "status demo --watch", "status demo --json")
@shared.run_argument(required=False)
@flag("--watch", help="Redraw every 2 s until Ctrl-C.")
@shared.json_option
def status(run: str | None, watch: bool, as_json: bool):
    """Show all runs, or all about one.

    One run: its progress, its workers and jobs, why it waits, what the next
    reconcile pass will do, and the last events.
    """
    from elastic.people import views  # and with it rich: a pass needs it not

    if watch and as_json:
        raise UsageError("--watch is for a screen, --json for a script", "give one of them")
    read = functools.partial(look, run, not (run or as_json))
    view = views.run_view if run else views.runs_table
    if watch:
        with contextlib.suppress(KeyboardInterrupt), views.live(view) as draw:
            while True:
                draw(read(LISTED_S))
                time.sleep(WATCH_S)
        return
    with views.busy("asking the scheduler and the masters"):
        observed = read(0.0)
    show(as_json, observed, view)


def look(run: str | None, is_table: bool, within_s: float) -> dict | list[dict]:
    """The observation of the run, or those of all runs. A listing of jobs that is
    `within_s` old will do."""
    from elastic.people import status  # and with it redis

    runs = [rundir.find(run)] if run else rundir.registered()
    observed = status.observe_all(runs, is_table, within_s, is_named=bool(run))
    return observed[0] if run else observed


@command("logs demo", "logs demo 3 -f", "logs demo master")
@shared.run_argument()
@click.argument("slot", required=False)
@flag("-f", "--follow", help="Go on printing what is added, until Ctrl-C.")
@click.option("-n", "--lines", default=200, help="Lines of each log.")
def logs(run: str, slot: str | None, follow: bool, lines: int):
    """Print the logs of RUN.

    SLOT is a number (in sync mode a rank's), or "master"; without it, all logs
    are printed.
    """
    logged = rundir.find(run)
    follows = follow and not (logged.done() or logged.failed())
    coming = logs_to_come(logged) if follows else []
    paths = [path for path in logs_of(logged, slot, coming) if path in coming or path.exists()]
    if not paths:
        there = ", ".join(path.name for path in logs_of(logged, None, [])) or "none"
        what = f"no log of {slot or 'a job'} yet; there are: {there}"
        raise ElasticError(what, f"elastic-status {logged.name}")
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(tail(["-n", str(lines), *["-F"] * follows, "--", *paths], follows))


def logs_to_come(run: RunDir) -> list[Path]:
    """The logs that jobs of the run write, whether they have begun or not."""
    control = run.control()
    if control.mode == "sync":
        return [run.log_path("trainer", 0)]
    workers = range(run.config().workers(control.max))
    return [run.log_path("master", 0), *(run.log_path("worker", slot) for slot in workers)]


def logs_of(run: RunDir, slot: str | None, coming: Sequence[Path]) -> list[Path]:
    if slot is None:
        return sorted({*coming, *(run.path / "logs").glob("*.log")})
    if slot == "master":
        return [run.log_path("master", 0)]
    if slot.isdecimal() and run.control().mode == "sync":
        return [run.path / "logs" / "ranks" / f"rank-{int(slot):03d}.log"]
    if slot.isdecimal():
        return [run.log_path("worker", int(slot))]
    raise UsageError(f"no slot {slot!r}", 'a slot is a number, or "master"')


def tail(words: Sequence[str | Path], follows: bool) -> int:
    """Print what `tail` says, and return its exit status; without complaints on files
    that are still to come, where it follows them."""
    with subprocess.Popen(["tail", *words], stdout=subprocess.PIPE, text=True, errors="replace",
                          stderr=subprocess.DEVNULL if follows else None) as process:
        try:
            for line in process.stdout:
                say(line.removesuffix("\n"))
        except BaseException:  # Ctrl-C, or nobody reads on
            process.terminate()
            raise
    return process.returncode


@command("audit demo", "audit demo --files --json")
@shared.run_argument()
@flag("--files", help="Check the checksums of all kept files, too.")
@shared.json_option
def audit(run: str, files: bool, as_json: bool):
    """Prove that RUN trained every sample once.

    Reads the commit records alone. Exits 1 if anything is wrong: a sample
    committed twice or never, tokens that do not add up, a file that is gone.
    Also says what the GPUs were used for, to the second.
    """
    from elastic.people import views

    audited = rundir.find(run)
    if not has_ledger(audited):
        what = f"run {audited.name} has no ledger: run.command counts its samples itself"
        raise UsageError(what, f"elastic-logs {audited.name}")
    keep = audited.config().checkpoint.keep
    report = audit_ledger(audited.path, keep, checksum if files else None)
    report["gpu_seconds"] = gpu_seconds(audited)
    show(as_json, report, functools.partial(views.audit_view, audited.name))
    sys.exit(Exit.ERROR if report["problems"] else Exit.OK)


@command("report demo")
@shared.run_argument()
@file_option("-o", "--out", show_default="RUN.html, here", help="The file to write.")
def report(run: str, out: Path | None):
    """Draw RUN: loss, speed, jobs, goodput, incidents.

    One HTML file that needs nothing else and no network; every curve and bar
    comes from the run directory, so it works for runs that have ended, too.
    """
    from elastic.people import report as drawing, views

    drawn = rundir.find(run)
    path = out or Path(f"{drawn.name}.html")
    with views.busy(f"drawing {drawn.name}"):
        shared.put(path, drawing.page(drawing.gather(drawn)).encode())
    click.echo(path)


@command("metrics --prometheus /var/lib/node_exporter/elastic.prom",
         "metrics demo --jsonl demo.jsonl", "metrics demo --tensorboard tb")
@shared.run_argument(required=False)
@file_option("--prometheus", help="Write all runs (or RUN) as they are now.")
@file_option("--jsonl", help="Append a line per version (sync mode: step) of RUN.")
@file_option("--tensorboard", metavar="DIR", help="Likewise; needs the package tensorboard.")
@click.option("--wandb", metavar="PROJECT", help="Likewise; needs the package wandb.")
def metrics(run: str | None, prometheus: Path | None, **series):
    """Hand the numbers of runs to other tools.

    Writes what is new and ends: call it again as often as you like, from cron
    for one. A file goes on where it ends, and so does the run of TensorBoard
    or W&B, whatever was preempted.
    """
    from elastic.people import metrics as numbers, status

    if not (prometheus or any(series.values())):
        raise UsageError("no file to write to", "elastic-metrics --help lists the formats")
    if any(series.values()) and not run:
        raise UsageError("which RUN? Only --prometheus takes all of them", "elastic-status")
    measured = rundir.find(run) if run else None
    sinks = numbers.sinks(measured, **series) if measured else []
    if prometheus:
        runs = [measured] if measured else rundir.registered()
        observed = status.observe_all(runs, is_named=bool(run))
        shared.put(prometheus, numbers.prometheus(observed).encode())
    if sinks:
        numbers.tell(measured, sinks)


@command("evaluate demo", "evaluate demo --version 0 --json")
@shared.run_argument()
@click.option("--version", type=int, metavar="V", show_default="newest",
              help="A version that is still on disk.")
@shared.json_option
def evaluate(run: str, version: int | None, as_json: bool):
    """Validate what RUN has trained.

    Loads the run's task here and prints what its validate() says of the
    newest checkpoint of sync mode, else of the newest version, or of V.
    """
    from elastic.people import evaluation

    with contextlib.redirect_stdout(sys.stderr):  # the task may print
        scores = evaluation.evaluate(rundir.find(run), version)
    show(as_json, scores, lambda each: "  ".join(f"{k} {v:.6g}" for k, v in each.items()))


@command("config etc/7b.toml", "config etc/7b.toml --set train.epochs=2 --json")
@click.argument("config", type=click.Path(path_type=Path))
@shared.overrides_option
@shared.json_option
def config(config: Path, overrides: tuple[str, ...], as_json: bool):
    """Print every value of CONFIG, with its origin.

    The output is a file for elastic-submit, too, but for a password in redis.url.
    etc/keys.toml says what each key means, its unit and its default.
    """
    shown = configuration.load(config, overrides).shown()
    if as_json:
        say_json([row._asdict() for row in shown.rows()])
    else:
        say(*shown.to_toml().splitlines())


@command("doctor", "doctor 7b.toml --try")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@shared.overrides_option
@shared.json_option
@flag("--try", "tries", help="Also run a job: two nodes, about a minute.")
def doctor(config: Path | None, overrides: tuple[str, ...], as_json: bool, tries: bool):
    """Look at this cluster and say what will work.

    Every line is OK, WARN (works, and could do better), FAIL (does not start,
    or loses work), or SKIP (could not look). For the run that CONFIG describes,
    or for what the site file says. Exits 1 if there is a FAIL.
    """
    from elastic.people import doctor as examining, tryout, views

    more = [("tried", tryout.tried)] if tries else []
    with views.busy("looking at this cluster") as shown:
        report = examining.report(config, overrides, shown.update, more)
    show(as_json, report, views.doctor_view)
    sys.exit(Exit.ERROR if report["FAIL"] else Exit.OK)
