"""A rank of the job of `elastic-doctor --try` that trains: do all ranks meet, and step together?

    python -m elastic.train.start trial FOLDER      a few steps of a small model, sharded over all

The device, the precision and where ranks meet are as in a run: FOLDER/run.toml has the settings.
"""

import sys
import time
from pathlib import Path

import torch

from elastic.base.config import load_written
from elastic.base.environment import env
from elastic.base.signals import Notice
from elastic.train.device import choose_device, join_group, shard

STEPS, WIDTH, SAMPLES = 20, 512, 8
TIMEOUT_S = 60.0


def run(_notice: Notice) -> int:
    """Train, and say on stderr how long a step takes. Raises ElasticError if the ranks do not
    meet."""
    config, rank = load_written(Path(sys.argv[1]) / "run.toml"), int(env("RANK"))
    device = choose_device(config)
    join_group(rank, int(env("WORLD_SIZE")), device, TIMEOUT_S)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    shard(model, config, device)
    optimizer = torch.optim.AdamW(model.to(device).parameters())
    _steps(model, optimizer, device, 1)  # what happens once
    seconds = _steps(model, optimizer, device, STEPS) / STEPS
    print(f"rank {rank} trains: {1000 * seconds:.0f} ms a step on {device.type}", file=sys.stderr)
    return 0


def _steps(model, optimizer: torch.optim.Optimizer, device: torch.device, count: int) -> float:
    """Seconds of so many steps."""
    began = time.perf_counter()
    for _ in range(count):
        loss = model(torch.randn(SAMPLES, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
    return time.perf_counter() - began
