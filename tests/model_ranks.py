"""Ranks that build a model: `python model_ranks.py TASK OUT`, over gloo. Each writes what it has.

OUT/RANK.pt: the values of the whole model, and how many bytes more the rank had than before.
"""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from elastic.train.device import build_model, join_group, set_initial_values
from elastic.train.group import is_sharded
from elastic.train.models import Shape, create

CONFIG = SimpleNamespace(run=SimpleNamespace(seed=5),
                         train=SimpleNamespace(compile=False, precision="float32"))
LARGE = Shape(vocabulary=64, dim=1024, layers=12, heads=16)  # 600 MB, a layer 50 MB
SMALL = Shape(vocabulary=61, dim=24, layers=3, heads=2)


class Whole:
    """Every rank has the whole model first."""

    shape = SMALL

    def model(self):
        return create(self.shape)


class Bare(Whole):
    def initial_values(self, model):
        yield from model.initial_values(torch.initial_seed())


class LargeBare(Bare):
    shape = LARGE


def most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(rank: int, world: int, kind: str, out: str) -> None:
    device, task = torch.device("cpu"), globals()[kind]()
    group = join_group(rank, world, device, 60.0)
    build_model(Bare(), CONFIG, device, group)  # what FSDP itself takes is there before
    before = most_bytes()
    model = build_model(task, CONFIG, device, group)
    set_initial_values(task, model)
    more = most_bytes() - before
    whole = {} if task.shape is LARGE else {
        name: each.full_tensor() if is_sharded(each) else each
        for name, each in model.state_dict().items()
    }
    torch.save({"values": whole, "bytes": more}, Path(out, f"{rank}.pt"))


if __name__ == "__main__":
    from elastic.base.environment import env

    main(int(env("RANK")), int(env("WORLD_SIZE")), *sys.argv[1:])
