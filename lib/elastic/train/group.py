"""The ranks of one worker: one process per GPU of a node, or just this one.

Rank 0 talks to the outside and tells the others what to do, one small JSON message at a
time. Messages are tensors of bytes: torch's own object broadcast would unpickle.
"""

import json
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.base import errors
from elastic.base.durable import UNREAD_S
from elastic.base.errors import ElasticError


def is_sharded(tensor: torch.Tensor) -> bool:
    """Is it a DTensor, as FSDP2 makes them? To import that class would take a second."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which may be sharded: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor.data


def part_like(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, which has the values of all ranks; nothing is
    communicated."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import distribute_tensor

    there, mesh = whole.to(own_part(param).device), param.device_mesh
    return distribute_tensor(there, mesh, param.placements, src_data_rank=None).to_local()


def sharded_like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded as `param` is, of which this rank has `part`."""
    whole = {"shape": param.shape, "stride": param.stride()}
    return type(param.data).from_local(part, param.device_mesh, param.placements, **whole)


def drop_copies(model: torch.nn.Module) -> None:
    """Forget the copies of parameters that a forward pass has made: others are in the
    model. Autocast keeps its copies until it is left, and FSDP2 those of the root until a
    backward pass."""
    torch.clear_autocast_cache()
    for unit in fsdp_units(model):
        unit.reshard()


def fsdp_units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What FSDP2 has sharded. To import its class would take a second."""
    return [module for module in model.modules() if hasattr(module, "unshard")]


def clip_gradients(model: torch.nn.Module, most: float) -> float:
    """Scale the gradients to at most the norm `most` (0: any); their norm before, as
    every rank has it."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)
    return (norm.full_tensor() if is_sharded(norm) else norm).item()


@torch.no_grad()
def rescale_gradients(model: torch.nn.Module, factor: float) -> None:
    """Mend the gradients of a step that had other tokens than expected. Mostly it had
    not, and the factor is 1."""
    if factor != 1.0:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        torch._foreach_mul_(grads, factor)


class Group:
    """`world` ranks; with one, every call is a no-op."""

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu",
                 timeout_s: float = math.inf):
        self.rank, self.world, self.device = rank, world, torch.device(device)
        # So long a rank may wait for bytes while the others wait for the rank.
        self.patience_s = min(UNREAD_S, timeout_s / 4)

    @classmethod
    def here(cls, world: int, device: torch.device | str) -> "Group":
        """This process among the `world` ranks of its worker, as its own code has joined
        them, with its model on `device`."""
        if world == 1:
            return cls()
        if not dist.is_initialized():
            what = f"this worker has {world} ranks (slurm.gpus_per_worker)"
            call = "call torch.distributed.init_process_group(), and use DDP or FSDP2"
            raise ElasticError(f"{what}, and they are no group yet", f"{call}, before LocalSGD")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def decide(self, decision: Callable[[], object]) -> object:
        """What `decision()` returns to rank 0 (anything JSON), on every rank; the others
        do not call it. Collective. Its error is raised by every rank: else the others
        would wait."""
        outcome, error = _tried(decision) if self.leads else (None, None)
        return _answers([self.broadcast(outcome)], {0: error})[0]

    def all_do(self, action: Callable[[], object]) -> list:
        """What `action()`, in which no ranks meet, returns to each rank (anything JSON),
        by rank, on every rank. Collective. The first error, by rank, is raised by every
        rank: all go the same way then."""
        outcome, error = _tried(action)
        return _answers(self.gather(outcome), {self.rank: error})

    def broadcast(self, message: object = None, source: int = 0) -> object:
        """The `source` rank's message (anything JSON), on every rank."""
        if self.world == 1:
            return message
        data = json.dumps(message).encode() if self.rank == source else b""
        size = int(self.hand_out(torch.tensor([len(data)]), source))
        body = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        return json.loads(self.hand_out(body, source).cpu().numpy().tobytes())

    def hand_out(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The `source` rank's tensor, on every rank; the others bring one of its shape
        and type, which may be overwritten."""
        dist.broadcast(there := tensor.to(self.device), src=source)
        return there

    def sum(self, *numbers: float) -> list[float]:
        """The sums of every rank's numbers, on every rank. Collective."""
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def gather(self, message: object) -> list:
        """Every rank's message, by rank, on every rank."""
        return [self.broadcast(message, source) for source in range(self.world)]


def _tried(action: Callable[[], object]) -> tuple[list, Exception | None]:
    """What `action()` has returned, and its error, as JSON for the other ranks; and the
    error itself."""
    try:
        return [action(), None], None
    except (OSError, ElasticError) as error:
        return [None, [type(error).__name__, getattr(error, "errno", None), str(error)]], error


def _answers(outcomes: list[list], own: dict[int, Exception | None]) -> list:
    """What the ranks have returned. If one had an error, the first is raised: this rank's
    `own`, or one made again from its words."""
    for rank, (_, told) in enumerate(outcomes):
        if told:
            kind, errno, what = told
            of_ours = getattr(errors, kind, None)
            raise own.get(rank) or (of_ours(what) if of_ours else OSError(errno, what))
    return [answer for answer, _ in outcomes]
