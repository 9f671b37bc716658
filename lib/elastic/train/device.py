"""How a model runs here: on which device, in which precision, sharded over which ranks.

Used by both modes: within a worker's node, and over all ranks of a synchronous job. With
several ranks the model is sharded by FSDP2, one unit per layer.
"""

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta
from hashlib import blake2b
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.base.config import Config
from elastic.base.environment import env, keep_compiled
from elastic.base.errors import ElasticError, UnfitNode
from elastic.train.group import Group, own_part, part_like
from elastic.train.health import check_nccl_health, require_gpu
from elastic.train.peers import meet

DEVICES = Path("/dev")
PING_S = 600.0  # NCCL may take minutes to start where there are many nodes


def choose_device(config: Config) -> torch.device:
    """This rank's device. Raises UnfitNode if the run is to have CUDA and there is none."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    wanted, is_there = config.train.device, torch.cuda.is_available()
    if not is_there and (wanted == "cuda" or (wanted == "auto" and _holds_gpus(config))):
        what = f"torch {torch.__version__} can use no GPU of this node"
        raise UnfitNode(what, 'nvidia-smi shows why; train.device = "cpu" does without')
    if wanted == "cpu" or not is_there:
        return torch.device("cpu")
    # There may be fewer GPUs than ranks to see: a rank may see its own alone.
    torch.cuda.set_device(int(env("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _holds_gpus(config: Config) -> bool:
    """Does this job hold GPUs, also where torch does not see them?"""
    asks = config.run.scheduler == "slurm" and config.slurm.gres
    return bool(asks) and any(DEVICES.glob("nvidia[0-9]*"))


def join(config: Config, rank: int, world: int, timeout_s: float) -> Group:
    """Join the group of this rank's job, on a device that is fit to compute on."""
    device = choose_device(config)
    require_gpu(device)
    return join_group(rank, world, device, timeout_s)


def join_group(rank: int, world: int, device: torch.device, timeout_s: float) -> Group:
    """Meet the other ranks of this job at MASTER_ADDR:MASTER_PORT, and try a sum over all.

    Raises ElasticError naming the ranks or nodes that are missing, or that do not reach
    each other.
    """
    group = Group(rank, world, device, timeout_s)
    if world > 1:
        timeout = timedelta(seconds=timeout_s)
        store = meet(rank, world, timeout)
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=store, rank=rank, world_size=world, timeout=timeout)
        if problem := check_nccl_health(group, min(PING_S, timeout_s)):
            raise ElasticError(problem, "NCCL_DEBUG=INFO says more, in the ranks' logs")
    return group


def build_model(task, config: Config, device: torch.device, group: Group) -> torch.nn.Module:
    """The task's model on the device, sharded, in training mode. The same seed gives the
    same parameters.

    Its layers go to the device one by one. If the task has `initial_values`, the model is
    built without values: a version or a checkpoint is loaded, or `set_initial_values`
    sets them. Raises ElasticError.
    """
    seed(config.run.seed)
    is_bare = hasattr(task, "initial_values")
    with torch.device("meta") if is_bare else contextlib.nullcontext():
        model = task.model()
    if is_bare:
        _require_loadable(model)
    if config.train.compile:
        keep_compiled()
        # Across the hooks of FSDP2 nothing is compiled where activations are recomputed.
        layers = layers_of(model) if group.world > 1 else []
        for part in layers or [model]:
            part.compile()
    if group.world > 1:
        shard(model, config, device)
    model = model.to_empty(device=device) if is_bare else model.to(device)
    # from_pretrained() of some libraries leaves the whole of it in the other mode.
    return model if model.training else model.train()


def _require_loadable(model: torch.nn.Module) -> None:
    """Raise ElasticError if the model has buffers or tied parameters: what its
    constructor has computed or tied is lost with the memory."""
    buffers = [name for name, _ in model.named_buffers()]
    names = {name for name, _ in model.named_parameters()}
    if odd := buffers or sorted(names ^ set(model.state_dict())):
        what = f"the task has initial_values(), and its model's {odd[0]}"
        hint = "without initial_values() the whole model is built on every rank"
        raise ElasticError(f"{what} is a buffer or tied", hint)


@torch.no_grad()
def set_initial_values(task, model: torch.nn.Module) -> None:
    """Set the values that `build_model` has left open, from the seed; every rank keeps
    its own part. Raises ElasticError if the task does not give a tensor of the model, or
    gives one that the model does not have."""
    if not hasattr(task, "initial_values"):
        return
    missing = model.state_dict()
    for name, values in task.initial_values(model):
        if name not in missing or missing[name].shape != values.shape:
            raise ElasticError(f"initial_values() gives {name} {[*values.shape]}: not in the model")
        tensor = missing.pop(name)
        own_part(tensor).copy_(part_like(tensor, values))
    if missing:
        raise ElasticError(f"initial_values() gives no {next(iter(missing))}")


def seed_by(place: str) -> None:
    """Random numbers that follow from `place`."""
    seed(int.from_bytes(blake2b(place.encode(), digest_size=7).digest()))


def seed(number: int) -> None:
    """Random numbers that follow from `number`: torch's on all devices, Python's and
    numpy's."""
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):  # nothing here needs it
        numpy.random.seed(number % 2**32)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of `model.layers`, where these are modules."""
    layers = getattr(model, "layers", None)
    # `children` names a layer once that is there twice.
    each = layers.children() if isinstance(layers, torch.nn.Module) else ()
    no_unit = torch.nn.ModuleList | torch.nn.ModuleDict
    return [layer for layer in each if not isinstance(layer, no_unit)]


def shard(model: torch.nn.Module, config: Config, device: torch.device) -> None:
    """FSDP2, one unit per layer and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = torch.bfloat16 if config.train.precision == "bf16" else None
    # Inputs as times or positions must not be rounded: without sharding they are not either.
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    for unit in [*layers_of(model), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)


def precision(name: str, device: torch.device):
    """What makes the context manager of a forward pass: bf16 autocast, or nothing."""
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


def to_device(batch, device: torch.device):
    """A collated batch on the device: its tensors, and other objects that have a `to` of
    their own (a BatchEncoding, a graph), also inside of lists and tables."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else moved  # of a namedtuple
    return batch


def leave(code: int) -> None:
    """End this process at once. All is delivered and saved by now, and to take torch
    apart would take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # as of a full disk
        shutil.rmtree(get_temp_dir())  # of processes that load samples
    os._exit(code)
