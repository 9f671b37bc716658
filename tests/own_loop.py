"""A training loop of one's own in local mode: an ordinary PyTorch program with four lines more.

    run.command = ["python", "own_loop.py"]
"""

import sys

import torch

import elastic
from elastic.train.optimizers import EagerAdamW
from tiny_task import Net, Tiny


def main(pace: str, samples: str, batches: str = "inf") -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = EagerAdamW(model.parameters(), lr=0.01)
    task = Tiny({"pace": pace, "samples": int(samples)})
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:
        for count, batch in enumerate(sgd.batches(task.dataset())):
            if count >= float(batches):
                break
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sgd.step(loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
