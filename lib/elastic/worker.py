"""The built-in training process of a worker: `python -m elastic.worker`, started by the agent.

Model, data and loss come from `run.task`; the rest is local_sgd.py. On CUDA it trains in bf16 where
the run says so; with several ranks (`slurm.gpus_per_worker`) the model is sharded by FSDP2 within
the node.
"""

import faulthandler
import math
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.device import (
    build_model,
    choose_device,
    join_group,
    leave,
    precision,
    to_device,
)
from elastic.errors import EXIT_ERROR, EXIT_OK, EXIT_TRY_AGAIN, ElasticError, Fenced
from elastic.group import is_sharded
from elastic.health import NaNDetector, require_gpu
from elastic.link import Place
from elastic.local_sgd import LocalSGD
from elastic.signals import install
from elastic.tasks import count_tokens, default_optimizer, load_task


def main() -> int:
    faulthandler.enable()  # the agent asks for the stacks of one that hangs
    notice = install()
    place = Place.from_env()
    config = place.run.config()
    try:
        device = choose_device(config)
        require_gpu(device, lambda problem: print(f"worker  {problem}", file=sys.stderr))
        # Rank 0 may wait for the master for days, and the others for it; the agent sees a hang.
        group = join_group(place.rank, place.world, device, timedelta(days=30))
        task = load_task(config.run.task, config.task, Path(config.run.folder))
        model = build_model(task, config, device, group)
        make = getattr(task, "optimizer", None)
        optimizer = make(model) if make else default_optimizer(model, config.train)
        with LocalSGD(model, optimizer, place, notice, group) as sgd:
            train(task, model, optimizer, sgd, device)
    except Fenced as error:
        print(f"worker  {error}", file=sys.stderr)
        return error.code
    except ElasticError as error:
        print(f"worker  error: {error}", file=sys.stderr)
        return EXIT_TRY_AGAIN if notice else error.code
    except Exception:
        traceback.print_exc()
        return EXIT_ERROR
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return EXIT_OK


def train(task, model, optimizer, sgd: LocalSGD, device: torch.device) -> None:
    """The inner loop."""
    settings, health = sgd.config.train, sgd.config.health
    dataset = task.dataset()
    sample = torch.utils.data.default_collate([dataset[0]])
    sgd.tokens_per_sample = count_tokens(task, sample)
    autocast = precision(settings.precision, device)
    nans = NaNDetector(health.nan_action, sgd.group, health.max_bad_batches)
    for batch in sgd.batches(dataset):
        tokens = count_tokens(task, batch) if sgd.group.world == 1 else None
        with autocast():
            loss = task.loss(model, to_device(batch, device))
        (loss * sgd.loss_scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip or math.inf)
        if is_sharded(norm):
            norm = norm.full_tensor()  # every rank must decide the same
        said = nans.judge(not math.isfinite(norm))
        if said == "ok":
            optimizer.step()
            sgd.step(loss.detach(), tokens)
        elif said == "skip":
            sgd.skip()
        else:
            raise ElasticError(
                f"the gradient is not finite (loss {loss.item():g}): {nans.reason}",
                "lower train.learning_rate, or look at the data",
            )
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    leave(main())
