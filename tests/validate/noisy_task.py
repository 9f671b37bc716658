"""tiny_task with dropout, so that a worker which does not inherit its random numbers is found out.

And with gates: while the file `gate`, or `gate`-SLOT for one worker, exists, no step is done.
"""

import os
import time
from pathlib import Path

import torch
from tiny_task import Net, Tiny
from torch import nn


class Noisy(Tiny):
    def __init__(self, config: dict):
        super().__init__(config)
        gate = config.get("gate", "")
        self._gates = [Path(gate), Path(f"{gate}-{os.environ['ELASTIC_SLOT']}")] if gate else []

    def model(self) -> nn.Module:
        net = Net()
        net.layers[1] = nn.Sequential(net.layers[1], nn.Dropout(0.2))
        return net

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        while any(gate.exists() for gate in self._gates):
            time.sleep(0.01)
        return super().loss(model, batch)
