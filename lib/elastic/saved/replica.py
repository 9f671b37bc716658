"""A worker's replica: the model's parameters, and the buffers that a checkpoint would
hold, against the base they started the round from.

The base is what the worker loaded: in bf16 as published (buffers in float32), kept on the
host (pinned if the model is on a GPU), and sharded as the parameters are: with FSDP2
each rank holds its own part. So rounding never biases the delta, and a delta can be made
one fragment at a time.
"""

import contextlib
from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import nn

from elastic.base.errors import ElasticError
from elastic.saved.layout import Layout
from elastic.train.group import drop_copies, is_sharded, own_part, part_like, sharded_like

HELD = (torch.float32, torch.bfloat16, torch.float16)  # types that float32 holds exactly


def shapes(model: nn.Module) -> list[tuple]:
    """(name, whole shape) of every parameter, in the model's order, and (name, shape,
    True) of the buffers."""
    parameters = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    return [*parameters, *((name, tuple(b.shape), True) for name, b in buffers(model).items())]


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are averaged: persistent ones of floats, and counters. Other
    integers, such as tables and masks, stay as the model's code has made them."""
    kept = model.state_dict(keep_vars=True) if next(model.buffers(), None) is not None else {}
    return {name: buffer for name, buffer in model.named_buffers()
            if name in kept and (is_float(buffer) or buffer.numel() == 1)}


class Statistics:
    """A model's `buffers` before the passes of a step, as BatchNorm's statistics: a step
    that is skipped leaves nothing there, except in those that it has made anew."""

    def __init__(self, model: nn.Module):
        self._model, self._names = model, buffers(model).keys()
        self._before: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        self._before = {name: buffer.clone() for name, buffer in self._now()}

    @torch.no_grad()
    def put_back(self) -> None:
        for name, buffer in self._now():
            before = self._before.get(name, buffer)
            buffer.copy_(before if before.shape == buffer.shape else buffer)

    def _now(self) -> list[tuple[str, torch.Tensor]]:
        """The model's code may have put a new one in its place."""
        return [each for each in self._model.named_buffers() if each[0] in self._names]


def is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def refuse_inexact(model: nn.Module) -> None:
    """Raise ElasticError naming a tensor that a version would not hold as it is."""
    floats = [(name, buffer) for name, buffer in buffers(model).items() if is_float(buffer)]
    for name, tensor in [*model.named_parameters(), *floats]:
        if tensor.dtype not in HELD:
            kind = str(tensor.dtype).removeprefix("torch.")
            what = f"{name} is {kind}: local mode averages float32, bfloat16 and float16"
            other = "what is not trained can be a buffer with persistent=False"
            raise ElasticError(what, f"convert it (model.float(), torch.view_as_real); {other}")


def refuse_other(model: nn.Module, layout: Layout) -> None:
    """Raise ElasticError naming a tensor if the model is not the one that was laid out."""
    own, of_run = shapes(model), sum(layout.to_json(), [])
    # An older run's layout has no buffers.
    if of_run not in (own, [shape for shape in own if len(shape) == 2]):
        odd = min((name for name, *_ in {*own} ^ {*of_run}), default="the order of its parameters")
        what = f"the model of the task is not the run's: {odd}"
        raise ElasticError(what, "a run keeps its model; submit a new run for another one")


def _put(param: torch.Tensor, values: torch.Tensor) -> None:
    """Set this rank's part of a tensor. float32 does not hold every integer, and a mean
    of ones may be 0.9999999: an integer that float32 cannot tell from its new value
    stays, others are rounded."""
    own = own_part(param)
    if not is_float(own):
        values = values.to(own.device)
        rounded = values.round() if is_float(values) else values
        values = torch.where(own.float() == values, own, rounded.to(own.dtype))
    own.copy_(values, non_blocking=True)


class Replica:
    def __init__(self, model: nn.Module, layout: Layout):
        self.model, self.layout = model, layout
        self._params = dict(model.named_parameters())  # FSDP has others while it computes
        self.base: dict[str, torch.Tensor] = {}
        # Where a base is not finite, as a mask with -inf: constants, the same in all versions.
        self._constant: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter, or a buffer as it is now: the model's code may have put a new one
        in its place."""
        return self._params[name] if name in self._params else attrgetter(name)(self.model)

    @torch.no_grad()
    def adopt(self, index: int, values: torch.Tensor) -> None:
        """Set a fragment's parameters, and its base, to a published fragment (flat,
        bf16)."""
        for tensor, param, shard in self._shards(index, values):
            if tensor.name not in self.base:
                pinned = own_part(param).is_cuda
                kind = torch.float32 if tensor.is_buffer else torch.bfloat16
                self.base[tensor.name] = torch.empty(shard.shape, dtype=kind, pin_memory=pinned)
                if not shard.sum().isfinite():
                    self._constant[tensor.name] = ~shard.isfinite()
            _put(param, self.base[tensor.name].copy_(shard))

    @torch.no_grad()
    def load(self, index: int, values: torch.Tensor) -> None:
        """Set a fragment's parameters (flat) as exactly as their types can. They get no
        base."""
        for _, param, shard in self._shards(index, values):
            _put(param, shard)

    @torch.no_grad()
    def rebase(self, index: int, values: torch.Tensor, delta: torch.Tensor) -> None:
        """Put the steps taken since `delta` was made on top of a published fragment, the
        new base.

        Those steps are θ − (A − d), so the next delta holds each of them once.
        """
        for tensor, param, shard in self._shards(index, values):
            base, local = self.base[tensor.name], own_part(param)
            new = shard.to(base.device)
            if tensor.is_buffer:  # what buffers have seen since may be lost
                _put(param, new)
            else:
                since = tensor.of(delta).to(base.device) + (new.float() - base.float())
                local.add_(self._moved(tensor.name, since).to(local.device))
            base.copy_(new)

    def _shards(self, index: int, values: torch.Tensor) -> Iterator[tuple]:
        """Each tensor of a fragment, its parameter, and this rank's part of its values."""
        for tensor in self.layout.fragments[index]:
            param = self.tensor(tensor.name)
            yield tensor, param, part_like(param, tensor.of(values))

    def restore(self) -> None:
        """Go back to the base: this round's steps are void."""
        self._put_all(self.base)

    @torch.no_grad()
    def _put_all(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            _put(self.tensor(name), value)
        drop_copies(self.model)

    @contextlib.contextmanager
    def at_base(self) -> Iterator[None]:
        """Hold the base for a while, without this round's steps."""
        held = {name: own_part(self.tensor(name)).detach().clone() for name in self.base}
        self.restore()
        try:
            yield
        finally:
            self._put_all(held)

    @torch.no_grad()
    def delta(self, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """base - local of a fragment: flat, float32, on the parameters' device, or in
        `into`. Collective with FSDP2."""
        if into is None:
            device = own_part(self.tensor(self.layout.fragments[index][0].name)).device
            into = torch.empty(self.layout.numels[index], device=device)
        for tensor in self.layout.fragments[index]:
            param = self.tensor(tensor.name)
            local, base = own_part(param), self.base[tensor.name]
            part = tensor.of(into)
            if not is_sharded(param) and not local.is_cuda:
                self._moved(tensor.name, torch.sub(base, local.float(), out=part))
            else:
                # Without waiting: else the CPU converts it first, into memory that is not pinned.
                shard = base.to(local.device, torch.float32, non_blocking=True).sub_(local.float())
                shard = self._moved(tensor.name, shard)
                whole = sharded_like(param, shard).full_tensor() if is_sharded(param) else shard
                part.copy_(whole)
        return into

    def _moved(self, name: str, by: torch.Tensor) -> torch.Tensor:
        """`by`, in place, but 0 for constants."""
        constant = self._constant.get(name)
        return by if constant is None else by.masked_fill_(constant.to(by.device), 0.0)

    def empty(self, index: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Room for the values of a published fragment."""
        dtype = torch.float32 if self.layout.has_buffers(index) else torch.bfloat16
        return torch.empty(self.layout.numels[index], dtype=dtype, device=device)

    @torch.no_grad()
    def whole(self, index: int) -> torch.Tensor:
        """A fragment's parameters as they are: flat, float32, on the CPU. Collective with
        FSDP2."""
        params = [self.tensor(tensor.name) for tensor in self.layout.fragments[index]]
        whole = (param.full_tensor() if is_sharded(param) else param for param in params)
        return torch.cat([param.float().flatten().cpu() for param in whole])
