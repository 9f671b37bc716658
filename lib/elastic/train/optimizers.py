"""The inner optimizers that come with the toolkit: `train.optimizer`.

    adamw    AdamW; matrices decay, the gains of norms do not
    muon     Muon for the weights of linear layers, AdamW for all the rest:
             embeddings, the last linear layer, which is the head, and the gains of norms

Muon's deltas agree better between workers than AdamW's (MuLoCo, arXiv 2505.23725), and
its state is half as large. Its update is a matrix whose directions all move alike (Jordan
et al., 2024):

    b  = m b + (1 - m) g                             momentum
    u  = O((1 - m) g + m b)                          O: the nearest orthogonal matrix, about
    W  = (1 - lr decay) W - 0.2 lr sqrt(max(rows, columns)) u

The last factor makes the update as large as AdamW's, so that the same learning rate
serves both (Liu et al., arXiv 2502.16982).

A layer that stacks several matrices, as of q, k and v, moves each of them for itself: its
`matrix_rows` are the rows of each, one number if all have as many.

O needs the whole matrix. Of a sharded one each rank has some rows, and torch's own Muon
(2.13) gathers every matrix on every rank, several times. Here the ranks take one matrix
each: rank i gets the rows of the i-th, and returns those of its update. So of all
products a rank has its share, and every element travels twice in a step.

Products are of bfloat16 on a GPU, and of float32 on a CPU: one without instructions for
bfloat16 needs 18 times as long for it; one that has them, a quarter to a half
(tests/bench/bench_muon.py). So none is far too slow.
"""

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from elastic.base.errors import ElasticError
from elastic.train.group import is_sharded, own_part
from elastic.train.inner_optimizer import refuse_odd

STEPS = 5
A, B, C = 3.4445, -4.775, 2.0315  # make small singular values grow fastest
TINY = 1e-7


class Eager:
    """torch's own methods, without the calls by which they import torch's compiler at the
    first step: a second and a half, and a thousand files of a shared filesystem, at every
    start of a worker."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class EagerAdamW(Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(Eager, Optimizer):
    """Of weights that are whole, or sharded by rows over one group of ranks, with the
    rows of each matrix that they stack."""

    def __init__(self, weights: Mapping[nn.Parameter, list[int]], lr: float, weight_decay: float):
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self._matrix_rows = weights

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = [param for param in group["params"] if param.grad is not None]
            # The ranks take one each at a time: those that are of about a size.
            matrices.sort(key=torch.Tensor.numel, reverse=True)
            first = group["params"][0]
            at_once = first.device_mesh.size() if is_sharded(first) else 1
            for start in range(0, len(matrices), at_once):
                self._move(matrices[start : start + at_once], group)

    def _move(self, matrices: list[nn.Parameter], group: dict) -> None:
        smooth = [self._smoothed(param, group["momentum"]) for param in matrices]
        stacked = [self._matrix_rows[param] for param in matrices]
        if is_sharded(matrices[0]):
            shapes = [param.shape for param in matrices]
            updates = update_rows(smooth, shapes, stacked, matrices[0].device_mesh.get_group())
        else:
            updates = map(update_of, smooth, stacked)
        for param, update in zip(matrices, updates, strict=True):
            own = own_part(param).mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(update, alpha=-group["lr"])

    def _smoothed(self, param: nn.Parameter, momentum: float) -> torch.Tensor:
        """This rank's part of the gradient with Nesterov momentum, in the type in which
        it is multiplied, after an update of the momentum."""
        state, grad = self.state[param], own_part(param.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        held = own_part(state["momentum_buffer"]).lerp_(grad, 1 - momentum)
        return grad.lerp(held, momentum).to(torch.float32 if grad.is_cpu else torch.bfloat16)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values between about 0.7 and 1.2, but for tiny ones: a
    few steps of x = (A + B x x' + C (x x')^2) x."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # x x' is the smaller product
    x = x / x.norm().clamp_min(TINY)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


def update_of(weight: torch.Tensor, matrix_rows: list[int]) -> torch.Tensor:
    """The `orthogonal` of each matrix that the weight stacks, as large as AdamW's update:
    its RMS is about 0.2."""
    parts = weight.split(matrix_rows)
    return torch.cat([orthogonal(part) * (0.2 * math.sqrt(max(part.shape))) for part in parts])


def update_rows(rows: Sequence[torch.Tensor], shapes: Sequence[torch.Size],
                stacked: Sequence[list[int]],
                group: dist.ProcessGroup) -> list[torch.Tensor]:
    """`update_of` weights of these shapes, at most as many as the group has ranks: this
    rank's rows of them, cut as FSDP2 does, for those that it brings. Collective."""
    world, rank = group.size(), group.rank()
    own = shapes[rank] if rank < len(shapes) else torch.Size((0, 0))
    most = -(-own[0] // world)  # rows of a rank; the last ones have fewer, or none
    coming = [own[1] * max(0, min(most, own[0] - most * each)) for each in range(world)]
    going = [part.numel() for part in rows] + [0] * (world - len(rows))
    parts = torch.cat([part.flatten() for part in rows])
    whole = parts.new_empty(own.numel())
    dist.all_to_all_single(whole, parts, coming, going, group=group)
    if len(whole):
        whole = update_of(whole.view(own), stacked[rank]).flatten()
    dist.all_to_all_single(parts, whole, going, coming, group=group)
    each = parts.split(going[: len(rows)])
    return [part.view_as(shape) for part, shape in zip(each, rows, strict=True)]


class Together(Eager, Optimizer):
    """Several, as one optimizer with the groups and the state of them all."""

    def __init__(self, *parts: Optimizer):
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        self._share()

    def step(self, closure: None = None) -> None:
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict) -> None:
        """What `load_state_dict` ends with: other groups, and another state."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def optimizer_of(task, model: nn.Module, train) -> Optimizer:
    """The task's own, which may be a list of several, or the default one. Raises
    ElasticError as `refuse_odd`."""
    make = getattr(task, "optimizer", None)
    made = make(model) if make else default_optimizer(model, train)
    optimizer = Together(*made) if isinstance(made, list | tuple) else made
    refuse_odd(model, [optimizer])
    return optimizer


def default_optimizer(model: nn.Module, train) -> Optimizer:
    """The one that the [train] section names."""
    hidden = hidden_matrices(model) if train.optimizer == "muon" else {}
    chosen = {id(param) for param in hidden}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    if not hidden:
        return _adamw(others, train)
    made = Muon(hidden, train.learning_rate, train.weight_decay)
    return Together(made, _adamw(others, train)) if others else made


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The weights of linear layers, but for the head's: the last one, or one that is an
    embedding's, too; and but for one that is no parameter, as of weight_norm, or no
    matrix, as of several experts. With each, the rows of the matrices that it stacks.
    Raises ElasticError."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = [*tables, *linear[-1:]]
    left = {id(param) for module in others for param in module.parameters(recurse=False)}
    hidden = {}
    for module in linear:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        is_matrix = weight is not None and weight.dim() == 2 and weight.requires_grad
        is_matrix = is_matrix and not weight.is_complex()  # a step is computed in bfloat16
        if is_matrix and id(weight) not in left:
            hidden[weight] = _rows_of_each(module, weight.shape[0])
    return hidden


def _rows_of_each(module: nn.Linear, rows: int) -> list[int]:
    """The rows of each matrix that a layer's weight of `rows` stacks. Raises ElasticError."""
    given = getattr(module, "matrix_rows", rows)
    each = [given] * (rows // max(1, given)) if isinstance(given, int) else list(given)
    if sum(each) != rows or min(each) < 1:
        what = f"a layer has {rows} rows, and its matrix_rows are {given}"
        raise ElasticError(what, "give the rows of each matrix, as a number or as a list")
    return each


def _adamw(parameters, train) -> EagerAdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return EagerAdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate, betas=(train.beta1, train.beta2),
        fused=True if all(p.is_cuda for p in parameters) else None,
    )
