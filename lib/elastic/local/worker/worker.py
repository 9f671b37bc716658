"""The built-in training process of a worker: started by the agent.

Model, data and loss come from `run.task`; the rest is local_sgd.py. On CUDA it trains in
bf16 where the run says so; with several ranks (`slurm.gpus_per_worker`) the model is
sharded by FSDP2 within the node.
"""

import math
from pathlib import Path

import torch
from torch.utils.data import default_collate

from elastic.base.errors import ElasticError, Exit
from elastic.base.signals import Notice
from elastic.local.worker.line import Place
from elastic.local.worker.local_sgd import LocalSGD
from elastic.train.device import build_model, join, precision, set_initial_values, to_device
from elastic.train.group import clip_gradients, rescale_gradients
from elastic.train.health import NaNDetector
from elastic.train.loading import check
from elastic.train.optimizers import optimizer_of
from elastic.train.task import count_tokens, go_to, load_task, weighed

# Rank 0 may wait for the master for days, and the others for it.
PATIENCE_S = 30 * 86400.0


def run(notice: Notice) -> int:
    """Train in the slot that the environment names, until the run is over or a notice
    comes."""
    place = Place.from_env()
    config = place.run.config()
    # No timeout of the group's: the agent finds hangs.
    group = join(config, place.rank, place.world, PATIENCE_S)
    go_to(Path(config.run.folder))
    task = load_task(config.run.task, config.task, Path(config.run.folder))
    model = build_model(task, config, group.device, group)
    # This worker may have to make version 0 from the initial values.
    if group.decide(lambda: place.run.commits.told_version() < 0):
        set_initial_values(task, model)
    optimizer = optimizer_of(task, model, config.train)
    notice.exit_code = None
    with LocalSGD(model, optimizer, place, notice, group) as sgd:
        if hasattr(task, "validate"):
            sgd.validate_by(task)
        train(task, model, optimizer, sgd, group.device)
    return Exit.OK


def train(task, model, optimizer, sgd: LocalSGD, device: torch.device) -> None:
    """The inner loop."""
    settings, health = sgd.config.train, sgd.config.health
    dataset = check(task.dataset())
    sgd.tokens_per_sample = max(1, count_tokens(task, default_collate([dataset[0]])))
    autocast = precision(settings.precision, device)
    nans = NaNDetector(health.nan_action, sgd.group, health.max_bad_batches)
    losses, tokens = [], 0  # of the step's batches
    for batch in sgd.batches_on_cpu(dataset):  # where tokens() counts
        count = count_tokens(task, batch)
        with autocast():
            loss = task.loss(model, to_device(batch, device))
        # So gradients are those of a mean over the tokens of all batches, and of all
        # ranks: FSDP takes the mean over ranks.
        (loss * (count / sgd.expected_tokens)).backward()
        losses.append(weighed(loss, count))
        tokens += count
        if not sgd.ends_step:
            continue
        [told] = sgd.group.sum(tokens)
        rescale_gradients(model, sgd.expected_tokens * sgd.group.world / max(told, 1))
        norm = clip_gradients(model, settings.grad_clip)
        action = nans.judge(not math.isfinite(norm))
        if action == "ok":
            optimizer.step()
            # A batch of nothing but padding has no loss, and gradients of 0.
            sgd.step(torch.div(*sum(losses)), tokens)
        elif action == "skip":
            sgd.skip()
        else:
            what = f"the gradient is not finite (loss {loss.item():g}): {nans.reason}"
            raise ElasticError(what, "lower train.learning_rate, or look at the data")
        optimizer.zero_grad(set_to_none=True)
        losses, tokens = [], 0
