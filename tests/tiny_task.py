"""A task that trains in seconds: a small network learns a fixed linear function of 8 numbers.

The [task] table can make it slow (`pace`: a file holding seconds per inner step, which a test may
change while the run goes on; `pace.SLOT` is for one slot) and make it fail: `raise_at_step` (of
every attempt) and `nan_sample` (it is not a number).
A validation makes `validation_passes` over the same samples.
"""

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate, random_split

WIDTH = 8


class Samples(Dataset):
    """Sample i is drawn with seed i: the same everywhere."""

    def __init__(self, count: int, nan_sample: int):
        self._count, self._nan_sample = count, nan_sample

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=draw)
        y = (x * torch.arange(1, WIDTH + 1) / WIDTH).sum()
        return (x * torch.nan, y * torch.nan) if index == self._nan_sample else (x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).squeeze(-1).clone()  # FSDP warns of views


class Tiny:
    def __init__(self, config: dict):
        paces = [f"{config['pace']}.{os.environ.get('ELASTIC_SLOT')}", config["pace"]]
        self._paces, self._pace = [Path(path) for path in paces], 0.0
        self._samples = Samples(config.get("samples", 2000), config.get("nan_sample", -1))
        self._raise_at_step = config.get("raise_at_step", 0)
        self._passes = config.get("validation_passes", 1)
        self._steps = 0

    def model(self) -> nn.Module:
        return Net()

    def dataset(self) -> Dataset:
        return self._samples

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        self._steps += 1
        if self._steps == self._raise_at_step:
            raise RuntimeError(f"planted: step {self._steps}")
        with contextlib.suppress(OSError):  # no more files may be open: as before
            text = next(path.read_text() for path in self._paces if path.exists())
            self._pace = float(text or self._pace)  # "": a test is just writing it
        time.sleep(self._pace)
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        batch = default_collate([self._samples[i] for i in range(32)])
        losses = [self.loss(model, batch).item() for _ in range(self._passes)]
        return {"validation_loss": sum(losses) / len(losses)}


class Normed(Tiny):
    """Has statistics, by which it validates."""

    def model(self) -> nn.Module:
        net = Net()
        net.layers[0] = nn.Sequential(net.layers[0], nn.BatchNorm1d(16))
        return net

    def validate(self, model: nn.Module) -> dict[str, float]:
        return super().validate(model.eval())


class Halved(Tiny):
    """Its weights have 16 bits each."""

    def model(self) -> nn.Module:
        return Net().bfloat16()

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().loss(model, [part.bfloat16() for part in batch])


class Masked(Tiny):
    """Leaves out samples whose sum is near that of sample 0, as a batch of padding alone is: the
    mean over nothing is nan, and its gradient 0. The loss is a vector of one element."""

    def counted(self, y: torch.Tensor) -> torch.Tensor:
        return (y - self._samples[0][1]).abs() > 0.5

    def tokens(self, batch: list[torch.Tensor]) -> int:
        return int(self.counted(batch[1]).sum())

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        one = super().loss(lambda x: model(x)[self.counted(y)], (x, y[self.counted(y)]))
        return one.unsqueeze(0)


class Copies(Tiny):
    """Its optimizer has float32 copies, made with it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Copied(model.parameters(), lr=1e-2)


class Copied(torch.optim.SGD):
    def __init__(self, params, lr: float):
        super().__init__(params, lr)
        self.own = [param.detach().clone() for param in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for own, param in zip(self.own, self.param_groups[0]["params"], strict=True):
            param.data.copy_(own.add_(param.grad, alpha=-1e-2))


class Swapping(Tiny):
    """Validates other parameters, as an average of the newest, and takes every error of a batch for
    the batch's. Its data set is a random part of all samples."""

    def dataset(self) -> Dataset:
        return random_split(self._samples, [600, len(self._samples) - 600])[0]

    def validate(self, model: nn.Module) -> dict[str, float]:
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        for _ in range(self._passes):
            with contextlib.suppress(Exception):
                super().validate(model)
        model.load_state_dict(own)
        return {"drawn": float(self.dataset().indices[0])}
