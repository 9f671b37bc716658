"""The start of a run: everything that can be known to be wrong is found before anything
is made.

Checked: space and permission below the run root, the task (its first step is tried in a
process of its own: see describe.py) or the run's own program, a redis-server, a scheduler
that answers, and no jobs left over from an earlier run of that name. The last word is the
scheduler's: if it refuses the jobs, the run is undone again.
"""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastic.base.config import Config, load_written
from elastic.base.durable import check_private
from elastic.base.environment import clean_environment, environment, registry_dir, torch_program
from elastic.base.errors import ElasticError, Exit, TryAgain, UsageError
from elastic.jobs.command import NAMES, expand
from elastic.jobs.sched import CLUSTER, end_jobs, jobs_of, open_scheduler, scheduler_of
from elastic.jobs.sched_local import VISIBLE
from elastic.run import estimate
from elastic.run.rundir import Control, RunDir, place_of
from elastic.run.wording import EventKind

TRY_S = 60.0  # for a first step of the task
# Threads that wait for others sleep: else a first step takes five times as long on a busy node.
PATIENTLY = ("env", "OMP_WAIT_POLICY=passive")
LAST_LINES = 12  # of a traceback, which are shown
MASTER_GB = 3  # for Python, torch and Redis
MASTER_MARGIN = 1.25  # times what the master holds


def check(config: Config, root: Path, is_dry: bool = False) -> list[str]:
    """Raise ElasticError saying what would stop the run from starting; make nothing.

    A dry run, which may be on a laptop, returns what this machine lacks instead.
    """
    if config.run.command:
        _check_command(config.run)
    lacking = []
    for look in (lambda: _check_root(root, config), lambda: _check_redis(config),
                 lambda: _check_name(root, config)):
        try:
            look()
        except ElasticError as error:
            if not is_dry or isinstance(error, UsageError):
                raise
            lacking.append(str(error))
    return lacking


def described(
    config: Path, settings: Sequence[str], *how: str
) -> tuple[estimate.Model | None, str]:
    """The run's model, or None; why it cannot be known here, or why a first step was not
    tried. `how`: "--try" that step; "--here": its jobs run here, so what is lacking
    counts. Raises ElasticError with the end of the traceback if the task fails."""
    command = [*PATIENTLY, *torch_program("describe"), *how, str(config), "slurm.partition=any",
               *settings]
    try:
        trial = subprocess.run(command, capture_output=True, errors="replace", timeout=TRY_S)
    except subprocess.TimeoutExpired:
        return None, f"it takes more than {TRY_S:g} s here"
    lines = trial.stderr.strip().splitlines()
    if trial.returncode == Exit.USAGE:
        what = "\n".join(["the task fails:", *lines[-LAST_LINES:]])
        raise ElasticError(what, "correct it; --no-try submits the run all the same")
    answers = re.findall(r'(?m)^{"model": .*', trial.stdout)
    if trial.returncode or not answers:  # its task may print, and end the process, too
        errors = [line for line in lines if not line.startswith("  hint: ")]
        is_told = errors and trial.returncode >= 0  # a signal leaves stacks, in many lines
        return None, errors[-1] if is_told else f"exit {trial.returncode}"
    answer = json.loads(answers[-1])
    return estimate.Model(**answer["model"]), answer["untried"]


def _check_name(root: Path, config: Config) -> None:
    name = config.run.name
    place_of(root, name)
    if jobs := jobs_of(name, open_scheduler(config)):
        what = f"a job of another run {name!r} is still there: {jobs[0].job_id}"
        raise UsageError(what, "choose another --name, or wait until it is gone")


def check_change(run: RunDir, fewest: int, most: int, mode: str) -> None:
    """Raise ElasticError if the run cannot go on in `mode` on so many GPUs. All rules for
    a configuration at submission hold then, too."""
    is_other = mode != run.control().mode
    if run.config().run.command and is_other:
        what = f"run {run.name} keeps its mode: its run.command is a loop for one mode"
        raise UsageError(what, "only a run of a task (run.task) can change it")
    changes = [f"elastic.min={fewest}", f"elastic.max={most}", f"run.mode={mode}"]
    try:
        config = load_written(run.path / "run.toml", changes)
    except UsageError as error:
        what = f"run {run.name} cannot have {', '.join(changes)}: {error.what}"
        raise UsageError(what) from None
    if is_other:
        _check_redis(config)


def with_shares(config: Config, model: estimate.Model | None) -> Config:
    """`config`, with CPUs and memory filled in if neither the user nor Slurm says how
    much: for a GPU its part of the node, for the master what it holds."""
    slurm = config.slurm
    if config.run.scheduler != "slurm":
        return config
    from elastic.jobs.sched_slurm import share_of_gpu

    cpus, memory = 0, ""
    with contextlib.suppress(TryAgain):
        cpus, memory = share_of_gpu(slurm)
    is_said = re.search("--mem(?!-bind)", " ".join(slurm.master_options))
    held = 0.0 if is_said or not model else estimate.held_bytes(model, slurm.master_cpus or 1)
    master = f"{math.ceil(MASTER_GB + MASTER_MARGIN * held / 1e9)}G" if held else ""
    return replace(config, slurm=replace(
        slurm, cpus_per_gpu=slurm.cpus_per_gpu or cpus,
        mem_per_gpu=slurm.mem_per_gpu or memory, master_mem=slurm.master_mem or master,
    ))


def start(config: Config, root: Path, model: estimate.Model | None = None) -> RunDir:
    """Make the run directory; its first reconcile pass is the caller's."""
    config, limits = with_shares(config, model), config.elastic
    control = Control(config.run.mode, "running", limits.min, limits.max)
    run = RunDir.create(root, config, control, clean_environment() | _where(config))
    run.event(EventKind.SUBMIT, min=limits.min, max=limits.max, scheduler=config.run.scheduler)
    return run


def _where(config: Config) -> dict[str, str]:
    """Variables that say where the run's jobs are: the cluster, because a pass on another
    cluster may share this home; for local jobs the GPUs (they may be inside an
    allocation) and the folder that lists them."""
    if config.run.scheduler == "local":
        gpus = {name: value for name, value in environment().items() if name == VISIBLE}
        return {"ELASTIC_HOME_DIR": str(registry_dir()), **gpus}
    from elastic.jobs.sched_slurm import cluster

    with contextlib.suppress(ElasticError):  # such a run is taken to be everywhere
        return {CLUSTER: cluster()["ClusterName"]}
    return {}


def undo(run: RunDir) -> None:
    """Remove a run that the scheduler refused: its jobs, its directory, its name."""
    if end_jobs(run.name, scheduler_of(run)):  # else it stays, and says why it failed
        shutil.rmtree(run.path)
        (registry_dir() / "runs" / run.name).unlink(missing_ok=True)


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def cannot_write(there: Path, why: str = "") -> ElasticError:
    hint = "set ELASTIC_RUNS to a folder on the shared filesystem"
    return ElasticError(f"cannot write to {there}{why}", hint)


def _check_root(root: Path, config: Config) -> None:
    there = nearest(root)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise cannot_write(there)
    check_private(there, is_above=True)
    if short := RunDir(there).shortage(config.checkpoint.min_free_bytes):
        raise ElasticError(short, "or set ELASTIC_RUNS to a folder on another filesystem")


def _check_redis(config: Config) -> None:
    if config.run.mode == "local" and not config.redis.url:
        from elastic.local.master import redis_server  # and redis, of no use for a pass

        redis_server.find(config.redis.server)


def _check_command(run) -> None:
    """Is what the first start would run there, and are its {names} known?"""
    values = dict.fromkeys(NAMES[run.mode], "0") | {"python": sys.executable}
    words = expand(run.command, values)
    scripts = [word for word in words[1:2] if word.endswith((".py", ".sh"))]
    for number, program in enumerate([*words[:1], *scripts]):
        is_path = number > 0 or "/" in program
        found = Path(run.folder, program).is_file() if is_path else shutil.which(program)
        if not found:
            place = f"into {run.folder}" if is_path else "on PATH"
            what = f"no program {program!r}, which run.command names"
            raise ElasticError(what, f"put it {place}, or write its whole path")
