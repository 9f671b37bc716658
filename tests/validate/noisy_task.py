"""The tiny task with dropout: a worker that does not inherit its random numbers is found out.

With `gate` in the [task] table a step takes 0.1 s; and while that file exists, or `gate`-SLOT for
one worker, no step ends.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

from elastic.tasks import ByteText
from tiny_task import Net, Samples

STEP_S = 0.1


class Bytes(ByteText):
    """What records.py trains, as `running` starts it: that gives each task a pace."""

    def __init__(self, config: dict):
        super().__init__({name: value for name, value in config.items() if name != "pace"})


class Noisy:
    def __init__(self, config: dict):
        self._samples = Samples(config.get("samples", 2000), nan_sample=-1)
        self._dropout = config.get("dropout", 0.2)
        gate = config.get("gate", "")
        self._gates = [Path(gate), Path(f"{gate}-{os.environ['ELASTIC_SLOT']}")] if gate else []

    def model(self) -> nn.Module:
        net = Net()
        net.layers[1] = nn.Sequential(net.layers[1], nn.Dropout(self._dropout))
        return net

    def dataset(self) -> Samples:
        return self._samples

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if self._gates:
            time.sleep(STEP_S)
        while any(gate.exists() for gate in self._gates):
            time.sleep(0.01)
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """With dropout: it draws random numbers, which training has to go on without."""
        x, y = zip(*(self._samples[index] for index in range(32)), strict=True)
        loss = nn.functional.mse_loss(model(torch.stack(x)), torch.stack(y))
        return {"validation_loss": loss.item()}
