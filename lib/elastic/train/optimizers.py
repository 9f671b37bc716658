"""The inner optimizers that come with the toolkit: `train.optimizer`.

    adamw    AdamW; matrices decay, the gains of norms do not
    muon     Muon (muon.py) for the weights of linear layers, AdamW for all the rest:
             embeddings, the last linear layer, which is the head, and the gains of norms

Muon's deltas agree better between workers than AdamW's (MuLoCo, arXiv 2505.23725), and
its state is half as large.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from elastic.train import muon
from elastic.train.group import is_sharded, own_part
from elastic.train.inner_optimizer import refuse_odd


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
    """Of matrices that are whole, or sharded by rows over one group of ranks."""

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

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
        if is_sharded(matrices[0]):
            shapes = [param.shape for param in matrices]
            updates = muon.orthogonal_rows(smooth, shapes, matrices[0].device_mesh.get_group())
        else:
            updates = map(muon.orthogonal, smooth)
        for param, update in zip(matrices, updates, strict=True):
            own = own_part(param).mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(update, alpha=-group["lr"] * muon.scale(param.shape))

    def _smoothed(self, param: nn.Parameter, momentum: float) -> torch.Tensor:
        """This rank's part of the gradient with Nesterov momentum, after an update of the
        momentum."""
        state, grad = self.state[param], own_part(param.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        held = own_part(state["momentum_buffer"]).lerp_(grad, 1 - momentum)
        return muon.for_products(grad.lerp(held, momentum))


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
    hidden = hidden_matrices(model) if train.optimizer == "muon" else []
    chosen = {id(param) for param in hidden}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    if not hidden:
        return _adamw(others, train)
    made = Muon(hidden, train.learning_rate, train.weight_decay)
    return Together(made, _adamw(others, train)) if others else made


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, but for the head's: the last one, or one that is an
    embedding's, too; and but for one that is no parameter, as of weight_norm, or no matrix,
    as of several experts."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = [*tables, *linear[-1:]]
    left = {id(param) for module in others for param in module.parameters(recurse=False)}
    named = (each for module in linear for each in module.named_parameters(recurse=False))
    weights = dict.fromkeys(param for name, param in named if name == "weight" and param.dim() == 2)
    return [each for each in weights if each.requires_grad and id(each) not in left]


def _adamw(parameters, train) -> EagerAdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return EagerAdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate, betas=(train.beta1, train.beta2),
        fused=True if all(p.is_cuda for p in parameters) else None,
    )  # fmt: skip
