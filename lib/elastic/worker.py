"""The built-in training process of a worker: `python -m elastic.worker`, started by the agent.

Model, data and loss come from `run.task`; the rest is local_sgd.py. On CUDA it trains in bf16 where
the run says so; with several ranks (`slurm.gpus_per_worker`) the model is sharded by FSDP2 within
the node.
"""

import contextlib
import math
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.config import Config, env
from elastic.errors import EXIT_ERROR, EXIT_OK, EXIT_TRY_AGAIN, ElasticError, Fenced
from elastic.group import Group
from elastic.link import Place
from elastic.local_sgd import LocalSGD
from elastic.signals import install
from elastic.tasks import count_tokens, default_optimizer, load_task


def main() -> int:
    notice = install()
    place = Place.from_env()
    config = place.run.config()
    try:
        device = choose_device(config)
        group = join_group(place, device)
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
    bad_in_a_row = 0
    for batch in sgd.batches(dataset):
        tokens = count_tokens(task, batch) if sgd.group.world == 1 else None
        with autocast():
            loss = task.loss(model, to_device(batch, device))
        (loss * sgd.loss_scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip or math.inf)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # every rank must decide the same
        if math.isfinite(norm):
            optimizer.step()
            sgd.step(loss.detach(), tokens)
            bad_in_a_row = 0
        else:
            bad_in_a_row += 1
            if health.nan_action == "stop" or bad_in_a_row > health.max_bad_batches:
                raise ElasticError(
                    f"{bad_in_a_row} batches in a row gave a gradient that is not finite "
                    f"(loss {loss.item():g})",
                    "lower train.learning_rate, or look at the data",
                )
            sgd.skip()
        optimizer.zero_grad(set_to_none=True)


def choose_device(config: Config) -> torch.device:
    """This rank's device. Raises ElasticError if the run wants CUDA and there is none."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ElasticError(
            'train.device = "cuda", and this node has no usable GPU', "nvidia-smi shows why"
        )
    torch.cuda.set_device(int(env("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def join_group(place: Place, device: torch.device) -> Group:
    if place.world > 1:
        # Rank 0 may wait for the master for days, and the others for it; the agent sees a hang.
        kind = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, timeout=timedelta(days=30))
    return Group(place.rank, place.world, device)


def build_model(task, config: Config, device: torch.device, group: Group) -> torch.nn.Module:
    """The task's model, the same parameters for the same seed, on the device, sharded."""
    torch.manual_seed(config.run.seed)
    model = task.model().to(device)
    torch.manual_seed(config.run.seed + 1 + group.rank)
    if group.world > 1:
        shard(model, config, device)
    if config.train.compile:
        model.compile()
    return model


def shard(model: torch.nn.Module, config: Config, device: torch.device) -> None:
    """FSDP2, one unit per layer (`model.layers`, where the model has them) and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = torch.bfloat16 if config.train.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def precision(name: str, device: torch.device):
    """A context manager for the forward pass: bf16 autocast, or nothing."""
    if name == "bf16":
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext


def to_device(batch, device: torch.device):
    """A collated batch (tensors in lists and tables) on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is delivered and saved; taking torch apart takes seconds
