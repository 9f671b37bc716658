"""A training loop of one's own in local mode: an ordinary PyTorch program with four lines more.

    run.command = ["python", "own_loop.py"]
"""

import sys

import torch
from torch import nn

import elastic
from tiny_task import Net, Tiny


def main(pace: str, samples: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = Tiny({"pace": pace, "samples": int(samples)}).dataset()
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:
        for x, y in sgd.batches(dataset):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sgd.step(loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
