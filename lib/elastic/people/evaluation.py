"""What a run's own task says of what was trained: of a committed version, or of the
newest checkpoint of sync mode. Loads torch and the task into this process.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from elastic.base.config import Config
from elastic.base.durable import exists
from elastic.base.errors import UsageError
from elastic.run.claims import FOLDER, numbers
from elastic.run.records import Commit
from elastic.run.rundir import RunDir
from elastic.saved import versions
from elastic.saved.checkpoint import Saved, find_newest, reader_of
from elastic.saved.replica import Replica
from elastic.train.device import precision, seed
from elastic.train.group import Group
from elastic.train.task import Task, load_task, score


def evaluate(run: RunDir, version: int | None = None) -> dict:
    """{"version" or "step": which, and the task's scores};
    by default of the newest there is."""
    _refuse_program(run.config())
    commit = run.commits.newest() if version is None else run.commits.of(version)
    if version is None:
        saved, _, _ = find_newest(run, Group(), commit.version if commit else 0)
        if saved:
            return {"step": saved.step, **of_checkpoint(run, saved)}
    if commit is None:
        wanted = "no version" if version is None else f"no version {version}"
        raise UsageError(f"{wanted} of {run.name} is committed", f"elastic-status {run.name}")
    if not exists(versions.folder_of(run, commit)):
        kept = sorted(numbers(run.path / "versions", FOLDER))
        hint = f"there are versions {', '.join(map(str, kept))}; see checkpoint.keep_every"
        raise UsageError(f"version {commit.version} is no longer on disk", hint)
    return {"version": commit.version, **of_version(run, commit)}


def of_version(run: RunDir, commit: Commit) -> dict[str, float]:
    """Scores of a version's published parameters."""
    with _task(run) as (task, model):
        replica = Replica(model, versions.read_layout(run, commit.version))
        for index in range(len(replica.layout.fragments)):
            replica.adopt(index, versions.read_params(run, commit, replica.layout, index))
        return score(task, model)


def of_checkpoint(run: RunDir, saved: Saved) -> dict[str, float]:
    """Scores of a checkpoint."""
    with _task(run) as (task, model):
        state = {"model": get_model_state_dict(model)}  # in its own types
        reader_of(run, saved).fill(state, no_dist=True)
        set_model_state_dict(model, state["model"])
        return score(task, model)


@contextlib.contextmanager
def _task(run: RunDir) -> Iterator[tuple[Task, nn.Module]]:
    """The task and its model, while the run's folder is the current one: there the
    relative paths of the run begin."""
    with contextlib.chdir(run.config().run.folder):
        task = load(run.config())
        seed(run.config().run.seed)  # as where it was trained: a random buffer, a random split
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = task.model().to(device)
        with precision(run.config().train.precision, device)():  # as on the way
            yield task, model


def _refuse_program(config: Config) -> None:
    if config.run.command:
        what = f"run {config.run.name} has a program of its own (run.command)"
        raise UsageError(what, "only a run of a task (run.task) can be evaluated")


def load(config: Config) -> Task:
    """The task of a run, if it can say how good a model is. UsageError: it cannot."""
    _refuse_program(config)
    task = load_task(config.run.task, config.task, Path(config.run.folder))
    if not hasattr(task, "validate"):
        raise UsageError(f"task {config.run.task} has no validate()", "add one to the task")
    return task
