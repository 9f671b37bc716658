"""What a run trains: the user's task, found by its name, and defaults for the methods
that it does not have.

A task says what the model, the samples and the loss are, and nothing about how they are
distributed: it sees no ranks, no versions, no other workers. Sample i has to be the same
on every machine and in every attempt, because the ledger hands out samples by number and
the audit counts them. Two tasks come with the toolkit: tasks.py.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastic.base.durable import insist
from elastic.base.errors import ElasticError
from elastic.train.group import drop_copies, fsdp_units

REQUIRED = ("model", "dataset", "loss")


class Task(Protocol):
    """What `run.task` names. Its constructor gets the [task] table of the run file.

    It may also have:

        optimizer(model)        else the optimizer is the one that `train.optimizer` names
        tokens(batch)           an int, the unit of the schedule and of the weight of a
                                delta; else the samples of the batch are counted
        validate(model)         a dict of numbers by name; it gets the global parameters
        initial_values(model)   yields name and values of all that is in a model's state;
                                `model()` is then called under torch.device("meta"), and
                                no rank ever has the whole model
    """

    def model(self) -> nn.Module:
        """A new model; the same parameters whenever torch has been seeded the same."""

    def dataset(self) -> Dataset:
        """Map-style, with a length; sample i is the same on every machine."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over a batch, which is on the model's device."""


def load_task(spec: str, table: dict, search: Path | None = None) -> Task:
    """An instance of the class `spec` ("package.module:Class"), given the [task] table.

    The module is looked for on PYTHONPATH, then in `search`, the folder of the run file.
    Raises ElasticError saying what is wrong with the user's code, and where.
    """
    module_name, _, class_name = spec.partition(":")
    folder = str(search.resolve()) if search else ""
    if folder and folder not in sys.path:
        sys.path.append(folder)
    looked = f"looked for modules on PYTHONPATH{f' and in {folder}' if folder else ''}"
    with _blaming(f"task module {module_name} does not import", looked):
        module = importlib.import_module(module_name)
    task = getattr(module, class_name, None)
    if not isinstance(task, type):
        names = sorted(k for k, v in vars(module).items() if isinstance(v, type) and k[0] != "_")
        hint = f"classes there: {', '.join(names) or 'none'}"
        raise ElasticError(f"task {spec}: no class {class_name} in {module.__file__}", hint)
    if missing := [name for name in REQUIRED if not callable(getattr(task, name, None))]:
        hint = f"a task needs {', '.join(REQUIRED)}"
        raise ElasticError(f"task {spec} has no method {', '.join(missing)}", hint)
    with _blaming(f"task {spec} cannot be made"):
        return task(table)


def go_to(folder: Path) -> None:
    """Go to the folder of the run file, where a task's relative paths begin; where it is
    gone, a task that needs it says so."""
    with suppress(FileNotFoundError):
        insist(os.chdir, folder)


@contextmanager
def _blaming(what: str, hint: str = ""):
    """Report anything that the user's code raises as an ElasticError that names its
    line."""
    try:
        yield
    except ElasticError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f" ({inside[-1].filename}:{inside[-1].lineno})" if inside else ""
        raise ElasticError(f"{what}: {type(error).__name__}: {error}{where}", hint) from error


def count_tokens(task: Task, batch: Any) -> int:
    """Tokens in a batch: as the task counts them, or else its samples."""
    if own := getattr(task, "tokens", None):
        return own(batch)
    if tensors := _tensors(batch):
        return len(tensors[0])
    raise ElasticError("a batch has no tensor to count its samples by", "give the task tokens()")


def weighed(loss: Tensor, tokens: int) -> Tensor:
    """A batch's loss times its tokens, and these: two float64. Zeros, if it is nothing
    but padding and has no loss."""
    told = tokens * torch.stack([loss.detach().double().sum(), loss.new_ones(()).double()])
    return told.where(loss.isfinite(), 0.0)


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch that have samples, in their order."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [each for part in batch for each in _tensors(part)]
    return [batch] if isinstance(batch, Tensor) and batch.dim() else []


class Interrupted(BaseException):  # that no program takes for its own
    """Ends a validation, or a step, at a notice. `wish`: what the ranks of a synchronous
    job want to do now; 0 in local mode."""

    def __init__(self, wish: int = 0):
        self.wish = wish


def score(
    task: Task, model: nn.Module, before_pass: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """What the task's validate() says of the model. `before_pass` is called before each
    pass over the model; if it raises, that ends the validation. Afterwards the random
    numbers, and the mode of each part of the model, are as if there had been none.

    After each pass the copies that it made of parameters are dropped: validate() may put
    others into the model.
    """
    # FSDP makes its tensors in the first pass: under inference_mode() they would never train.
    for unit in fsdp_units(model):
        unit.unshard()
        unit.reshard()
    hooks = [model.register_forward_pre_hook(lambda *_: before_pass()),
             model.register_forward_hook(lambda *_: drop_copies(model))]
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            said = task.validate(model)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    try:  # many return tensors
        return {name: float(value) for name, value in said.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        what = f"validate() has returned {said!r:.200}"
        raise ElasticError(what, "names and their numbers are needed") from error
