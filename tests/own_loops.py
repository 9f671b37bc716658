"""Loops of one's own that do what people do; each writes what it saw into a folder.

    run.command = ["python", "own_loops.py", KIND, PACE, FOLDER]
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import elastic
from elastic.train.optimizers import EagerAdamW
from tiny_task import WIDTH, Net, Tiny


class Normed(nn.Module):
    """With running statistics, and constants: a table that its code has made; masks, one of them
    a frozen parameter; and a minimum that, as an observer's, begins at infinity; and a
    count that its code makes anew."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.register_buffer("table", torch.arange(8))
        mask = torch.full((2, 2), -torch.inf).triu(1)
        self.register_buffer("mask", mask)
        self.frozen = nn.Parameter(mask.clone(), requires_grad=False)
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least.copy_(torch.minimum(self.least, x.detach().min()))
        self.count = self.count + 1  # a new tensor
        return self.body(5 + 3 * x).squeeze(-1)


def scheduled(optimizer: torch.optim.Optimizer):
    """As transformers' get_linear_schedule_with_warmup: the rate begins at 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))


def of_ranks(pace: str, folder: str) -> None:
    """Two ranks of a worker, each with the whole model and a scheduler; the second has twice the
    tokens and a loss of its own."""
    torch.manual_seed(0)
    task = Tiny({"pace": pace, "samples": 400})
    dist.init_process_group("gloo")
    model, rank = Net(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule, rates = scheduled(optimizer), []
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:
        for batch in sgd.batches(task.dataset()):
            rates.append(optimizer.param_groups[0]["lr"])
            task.loss(model, batch).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            sgd.step(1.0 + rank, tokens=(1 + rank) * len(batch[0]))
    Path(folder, f"{rank}.json").write_text(json.dumps(rates))


def main(kind: str, pace: str, folder: str) -> None:
    torch.manual_seed(0)
    model = Normed() if kind == "normed" else Net()
    optimizer = EagerAdamW(model.parameters(), lr=0.01)
    task = Tiny({"pace": pace, "samples": 603 if kind == "normed" else 400})
    said = {"rates": [], "progress": [], "sizes": []}
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:
        name = f"{sgd.slot}.{sgd.place.attempt}"
        assert sgd.progress == 0.0, "as for a scheduler, which asks before there is a version"
        try:
            for x, y in sgd.batches(task.dataset()):
                if kind == "own":
                    optimizer.param_groups[0]["lr"] = 0.02 * (1 - sgd.progress)
                if not said["sizes"]:
                    Path(folder, f"{name}.noise").write_text(f"{torch.rand(4).tolist()}")
                said["progress"].append(sgd.progress)
                said["sizes"].append(len(x))
                (task.loss(model, (x, y)) / sgd.accumulate).backward()
                if not sgd.ends_step:
                    continue
                said["rates"].append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                sgd.step(1.0, tokens=float(x.numel() * sgd.accumulate) if kind == "own" else None)
        finally:
            Path(folder, f"{name}.json").write_text(json.dumps(said | {"end": sgd.outcome}))
    if sgd.outcome == "done":
        torch.save(model.state_dict(), Path(folder, f"{name}.pt"))


if __name__ == "__main__":
    of_ranks(*sys.argv[2:]) if sys.argv[1] == "ranks" else main(*sys.argv[1:])
