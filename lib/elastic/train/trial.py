"""A rank of the job of `elastic-doctor --try` that trains: do all ranks meet, step
together, and save what they have at a notice?

    python -m elastic.train.start trial FOLDER      a small model, sharded over all

The device, the precision and where ranks meet are as in a run: FOLDER/run.toml has the
settings.
"""

import itertools
import sys
import time
from pathlib import Path

import torch

from elastic.base.config import load_written
from elastic.base.durable import write_atomic
from elastic.base.environment import env
from elastic.base.signals import Notice
from elastic.train.device import join, precision, shard
from elastic.train.optimizers import default_optimizer

STEPS, WIDTH, SAMPLES = 20, 512, 8
TIMEOUT_S = 60.0


def run(notice: Notice) -> int:
    """Train until the notice, and say on stderr how long a step takes, and what was
    saved. Raises ElasticError if the ranks do not meet."""
    folder, rank = Path(sys.argv[1]), int(env("RANK"))
    config = load_written(folder / "run.toml")
    group = join(config, rank, int(env("WORLD_SIZE")), TIMEOUT_S)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    shard(model, config, group.device)
    # The run's own: Muon's ranks hand parts of matrices to each other.
    optimizer, began = default_optimizer(model.to(group.device), config.train), 0.0
    notice.exit_code, autocast = None, precision(config.train.precision, group.device)
    for step in itertools.count():
        with autocast():
            loss = model(torch.randn(SAMPLES, WIDTH, device=group.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if group.sum(bool(notice)) != [0]:
            break  # all ranks hear the same
        began = began or time.perf_counter()  # without what happens once
        if step == STEPS:
            ms = 1000 * (time.perf_counter() - began) / STEPS
            words = f"trains: {ms:.0f} ms a step on {group.device.type}"
            print(f"rank {rank} {words}", file=sys.stderr, flush=True)
    write_atomic(folder / f"saved-{rank}", str(step).encode())
    print(f"rank {rank} has saved its last step", file=sys.stderr, flush=True)
    return 0
