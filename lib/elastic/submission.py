"""The start of a run: everything that can be known to be wrong is found before anything is made.

Checked: space and permission below the run root, the task's module (looked for, not imported: it
may need what only a compute node has), a redis-server, a scheduler that answers, and no jobs left
over from an earlier run of that name. The last word is the scheduler's: if it refuses the jobs, the
run is undone again.
"""

import importlib.machinery
import os
import shutil
import sys
import time
from pathlib import Path

from elastic import config as configuration
from elastic.command import NAMES, expand
from elastic.config import Config
from elastic.durable import check_private
from elastic.errors import ElasticError, UsageError
from elastic.rundir import Control, RunDir
from elastic.sched import Job, Scheduler, open_scheduler, parse_job_name, scheduler_of

UNDO_S = 30.0  # how long the jobs of a run that is undone may take to go


def check(config: Config, root: Path) -> None:
    """Raise ElasticError saying what would stop the run from starting; make nothing."""
    _check_root(root, config)
    _check_task(config)
    _check_redis(config)
    name = config.run.name
    if jobs := jobs_of(name, open_scheduler(config.run.scheduler, config)):
        raise UsageError(
            f"a job of another run {name!r} is still there: {jobs[0].job_id}",
            "choose another --name, or wait until it is gone",
        )


def check_mode(run: RunDir, mode: str) -> None:
    """Raise ElasticError saying why the run cannot go on in `mode`."""
    settings = [f"run.mode={mode}"]
    config = configuration.load(run.path / "run.toml", settings, site=Path(os.devnull))
    if config.run.command:
        raise UsageError(
            f"run {run.name} keeps its mode: run.command is a loop for {run.control().mode} mode",
            "only a run of a task (run.task) can change it",
        )
    _check_redis(config)


def start(config: Config, root: Path) -> RunDir:
    """Make the run directory; its first reconcile pass is the caller's."""
    limits = config.elastic
    control = Control(config.run.mode, "running", limits.min, limits.max, time.time())
    run = RunDir.create(root, config, control, configuration.clean_environment())
    run.event("submit", min=limits.min, max=limits.max, scheduler=config.run.scheduler)
    return run


def undo(run: RunDir) -> None:
    """Remove a run that the scheduler refused: its jobs, its directory, its name."""
    scheduler = scheduler_of(run)
    deadline = time.monotonic() + UNDO_S
    while jobs := jobs_of(run.name, scheduler):
        if time.monotonic() > deadline:
            return  # the directory stays, and says why the run failed
        for job in jobs:
            scheduler.cancel(job.job_id, now=True)
        time.sleep(0.5)
    shutil.rmtree(run.path)
    (configuration.registry_dir() / "runs" / run.name).unlink(missing_ok=True)


def jobs_of(run: str, scheduler: Scheduler) -> list[Job]:
    """The jobs of the run of that name that have not ended. Raises TryAgain."""
    named = [(parse_job_name(job.name), job) for job in scheduler.jobs() if not job.ended]
    return [job for name, job in named if name and name[0] == run]


def _check_root(root: Path, config: Config) -> None:
    there = next(path for path in (root, *root.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ElasticError(
            f"cannot write to {there}", "set ELASTIC_RUNS to a folder on the shared filesystem"
        )
    check_private(there, is_above=True)
    if short := RunDir(there).shortage(config.checkpoint.min_free_bytes):
        raise ElasticError(short, "or set ELASTIC_RUNS to a folder on another filesystem")


def _check_redis(config: Config) -> None:
    if config.run.mode == "local" and not config.redis.url:
        from elastic import redis_server  # and with it redis, which a cron pass has no use for

        redis_server.find(config.redis.server)


def _check_command(run) -> None:
    """Is what the first start would run there, and are its {names} known?"""
    values = {**dict.fromkeys(NAMES[run.mode], "0"), "resume": "", "python": sys.executable}
    words = expand(run.command, {name: values[name] for name in NAMES[run.mode]})
    programs = [*words[:1], *(word for word in words[1:2] if word.endswith((".py", ".sh")))]
    for number, program in enumerate(programs):
        is_path = number > 0 or "/" in program
        if not (Path(run.folder, program).is_file() if is_path else shutil.which(program)):
            raise ElasticError(
                f"no program {program!r}, which run.command names",
                f"put it {f'into {run.folder}' if is_path else 'on PATH'}, or write its whole path",
            )


def _check_task(config: Config) -> None:
    if config.run.command:
        _check_command(config.run)
        return
    module = config.run.task.partition(":")[0]
    parts = module.split(".")
    search = [*sys.path, config.run.folder]
    for depth, part in enumerate(parts, 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), search)
        if spec is None:
            raise ElasticError(
                f"no module {module} for the task {config.run.task} (looked for {part!r})",
                f"put it on PYTHONPATH or into {config.run.folder}",
            )
        search = list(spec.submodule_search_locations or [])
