"""A task of any size with next to no arithmetic: what is left of a round is moving bytes."""

import time

import torch
from torch import nn


class Flat:
    """`parameters` frozen float32 parameters in `tensors` tensors, and a small head that trains."""

    def __init__(self, table: dict):
        self.table = table

    def model(self) -> nn.Module:
        return _Model(self.table["parameters"], self.table.get("tensors", 64))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.head], lr=1e-3)

    def dataset(self) -> "_Samples":
        return _Samples()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return ((model.head.sum() - batch) ** 2).mean()


class Paced(Flat):
    """All parameters train, and a step waits: what a GPU would need the time for."""

    def model(self) -> nn.Module:
        model = super().model()
        model.requires_grad_(True)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.table["step_s"])
        return sum(param.square().mean() for param in model.parameters()) + batch.sum() * 0


class Waiting(Flat):
    """A step waits for `step_s`, in place of a GPU's work, and costs the CPU next to nothing.

    `moments`: each parameter has AdamW's two, which an inner state holds; all but the head are
    trained in a process's first step alone.
    """

    def __init__(self, table: dict):
        super().__init__(table)
        self._begun = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if not self.table.get("moments"):
            return super().optimizer(model)
        model.requires_grad_(True)
        return torch.optim.AdamW(model.parameters())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.table["step_s"])
        loss, first, self._begun = super().loss(model, batch), not self._begun, True
        if first and self.table.get("moments"):
            loss = loss + sum(param.sum() for param in model.parameters()) * 0
        return loss


class _Samples:
    """Nothing that would be counted as memory of the round."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index % 7)])


class _Model(nn.Module):
    def __init__(self, parameters: int, tensors: int):
        super().__init__()
        size = parameters // tensors
        body = [nn.Parameter(torch.full((size,), 0.5), requires_grad=False) for _ in range(tensors)]
        self.body = nn.ParameterList(body)
        self.head = nn.Parameter(torch.zeros(16))
