"""What a run's model is, as JSON:
`python -m elastic.train.start describe [--try [--here]] CONFIG KEY=VALUE...`.

A process of its own, because it needs torch and the user's code, and `elastic-submit
--dry-run` is to say what it can without either. Nothing is allocated: the model is made
on the meta device.

With --try it also does a worker's first step, on the CPU: one batch and, if the model has
at most MOST_TRIED parameters, loss and backward. A failure for lack of something on this
machine (a file, a module, a GPU) says nothing of the task, unless its jobs are to run
--here; every other exception is the task's own: exit USAGE, and a traceback.
"""

import json
import os
import re
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.utils.data import default_collate

from elastic.base import config as configuration
from elastic.base.errors import ElasticError, Exit
from elastic.base.signals import Notice
from elastic.run import wording
from elastic.run.estimate import Model
from elastic.saved.codec import CODECS
from elastic.saved.layout import Layout
from elastic.saved.replica import shapes
from elastic.train.device import precision
from elastic.train.loading import check
from elastic.train.optimizers import optimizer_of
from elastic.train.task import count_tokens, go_to, load_task

# Parameters: seconds of two cores, 0.5 GB with gradients and the rest.
MOST_TRIED = 30_000_000
MOST_SHOWN = 80  # characters of what a task returns
LACKING = (OSError, ImportError, MemoryError)


def measured(config, task) -> Model:
    """What the task's model is. No memory is allocated for it."""
    with torch.device("meta"):
        model = task.model()
    if not isinstance(model, torch.nn.Module):
        found = wording.one_line(repr(model), MOST_SHOWN)
        raise ElasticError(f"model() is to return a torch.nn.Module, not {found}")
    ranks = config.elastic.max if config.run.mode == "sync" else config.slurm.gpus_per_worker
    scalars = [name for name, param in model.named_parameters() if not param.dim()]
    if scalars and ranks > 1:
        what = f"parameter {scalars[0]} is a scalar, which FSDP2 cannot share out"
        raise ElasticError(what, "give it the shape (1,), or train on one GPU")
    layout = Layout.of(shapes(model), config.local_sgd.fragment_bytes)
    if not layout.fragments:
        raise ElasticError("the model has no parameters that are trained")
    sizes = list(map(CODECS[config.local_sgd.compression].size_bytes, layout.numels))
    context = getattr(getattr(task, "shape", None), "context", 0)
    return Model(numel=sum(layout.numels), largest_numel=max(layout.numels),
                 delta_bytes=sum(sizes), largest_bytes=max(sizes),
                 fragments=len(sizes), tokens_per_sample=context)


def attempt(config, task, numel: int, is_here: bool) -> tuple[str, int]:
    """Do a worker's first step. Returns why it was left out ("": it was not), and the
    tokens of a sample, if the task counts any. Raises the task's own errors."""
    per_sample = 0
    try:
        dataset = check(task.dataset())
        batch = default_collate([dataset[index] for index in (0, len(dataset) - 1)])
        tokens = count_tokens(task, batch)
        if not isinstance(tokens, int) or tokens < 1:
            raise ElasticError(f"tokens(batch) is {tokens!r}: an integer above 0 is needed")
        per_sample = -(-tokens // 2) if hasattr(task, "tokens") else 0
        if config.train.validate_every and hasattr(task, "validation_windows"):
            task.windows(held_out=True)  # a LanguageTask's: a file may be missing
        if numel > MOST_TRIED:
            return f"{numel:,} parameters are too many", per_sample
        torch.manual_seed(config.run.seed)
        model = task.model().train()
        optimizer = optimizer_of(task, model, config.train)
        with precision(config.train.precision, torch.device("cpu"))():
            loss = task.loss(model, batch)
        _one_number(loss).backward()
        optimizer.step()
    except Exception as error:
        if not _is_lacking(error, is_here):
            raise
        return str(error), per_sample
    return "", per_sample


def _one_number(loss: object) -> torch.Tensor:
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.isfinite()):
        found = wording.one_line(repr(loss), MOST_SHOWN)
        raise ElasticError(f"loss() is to return one finite number as a tensor, not {found}")
    return loss


def _is_lacking(error: BaseException, is_here: bool) -> bool:
    """Has it failed for lack of something that the run's jobs may find elsewhere, or
    since the model cannot be made without memory?"""
    cause = error.__cause__ or error
    wants_gpu = re.search("CUDA|NVIDIA", str(cause)) and not torch.cuda.is_available()
    needs_memory = isinstance(cause, RuntimeError) and re.search(r"\b[Mm]eta\b", str(cause))
    lacks = isinstance(cause, LACKING) or bool(wants_gpu)
    return bool(needs_memory) or (lacks and not is_here)


def run(_notice: Notice) -> int:
    """Say what the model is, and why a first step was left out; the exit status. What is
    wrong with the task is on stderr."""
    path, *settings = (argument for argument in sys.argv[1:] if argument[:2] != "--")
    config = configuration.load(Path(path), settings)
    tries, is_here = "--try" in sys.argv, "--here" in sys.argv
    try:
        go_to(Path(config.run.folder))
        task = load_task(config.run.task, config.task, Path(config.run.folder))
        model = measured(config, task)
        untried, counted = attempt(config, task, model.numel, is_here) if tries else ("", 0)
        model = replace(model, tokens_per_sample=model.tokens_per_sample or counted)
    except (Exception, SystemExit) as error:
        frames = error.__traceback__
        while frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # to the task's own
        words = "".join(traceback.format_exception(type(error), error, frames))
        print(error if isinstance(error, ElasticError) else words, file=sys.stderr)
        # A task whose own module is missing is missing everywhere.
        missing, module = getattr(error.__cause__, "name", ""), config.run.task.split(":")[0]
        is_own = f"{module}.".startswith(f"{missing}.") or not _is_lacking(error, is_here)
        return Exit.USAGE if tries and is_own else Exit.ERROR
    answer = json.dumps({"model": asdict(model), "untried": untried})
    os.write(1, f"\n{answer}\n".encode())  # whatever the task has made of sys.stdout
    return Exit.OK
