"""The inner optimizers that come with the toolkit: `train.optimizer`.

    adamw    AdamW; matrices decay, the gains of norms do not
    muon     Muon (torch.optim) for the weights of linear layers, AdamW for all the rest:
             embeddings, the last linear layer, which is the head, and the gains of norms

Muon makes the update of a matrix orthogonal, so that all its directions move alike; the
update is scaled to the size of AdamW's, and the same learning rate serves both (Liu et
al., arXiv 2502.16982). Its deltas agree better between workers than AdamW's (MuLoCo,
arXiv 2505.23725), and its state is half as large.

torch's Muon multiplies in bfloat16. A CPU without instructions for bfloat16 needs 18 times as
long for those products as for float32's; one that has them, half as long
(tests/bench/bench_muon.py). On CPUs the products are of float32: no machine is far too slow.
"""

import inspect
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from elastic.base.errors import ElasticError
from elastic.train.group import is_sharded
from elastic.train.inner_optimizer import refuse_odd

Muon = getattr(torch.optim, "Muon", Optimizer)  # torch has it since 2.9


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


class Float32(TorchFunctionMode):
    """While it is entered, what is asked for a copy in bfloat16 gives one in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class Placed(TorchFunctionMode):
    """While it is entered, what is added to a sharded tensor is first sharded alike. The
    update of a matrix with fewer rows than there are ranks comes whole, and DTensor does
    not add that."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.add_ and is_sharded(args[0]) and is_sharded(args[1]):
            args = (args[0], args[1].redistribute(placements=args[0].placements), *args[2:])
        return func(*args, **(kwargs or {}))


class EagerMuon(Eager, Muon):
    def step(self, closure: None = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        with ExitStack() as modes:
            if all(param.is_cpu for param in params):
                modes.enter_context(Float32())
            if any(map(is_sharded, params)):
                modes.enter_context(Placed())
            super().step()


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
    """The one that the [train] section names. Raises ElasticError if torch has none."""
    hidden = hidden_matrices(model) if train.optimizer == "muon" else []
    chosen = {id(param) for param in hidden}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    if not hidden:
        return _adamw(others, train)
    if Muon is Optimizer:
        what = f'train.optimizer = "muon" needs torch 2.9, and this is {torch.__version__}'
        raise ElasticError(what, 'train.optimizer = "adamw" is for every torch')
    muon = EagerMuon(hidden, lr=train.learning_rate, weight_decay=train.weight_decay,
                     adjust_lr_fn="match_rms_adamw")  # fmt: skip
    return Together(muon, _adamw(others, train)) if others else muon


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, but for the head's: the last one, or one that is an
    embedding's, too; and but for one that is no parameter, as of weight_norm."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = [*tables, *linear[-1:]]
    left = {id(param) for module in others for param in module.parameters(recurse=False)}
    named = (each for module in linear for each in module.named_parameters(recurse=False))
    weights = dict.fromkeys(param for name, param in named if name == "weight")
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
