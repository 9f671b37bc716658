"""An ordinary DDP script that knows nothing of this project: a checkpoint every epoch, --resume."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint_dir", type=Path, required=True)
parser.add_argument("--resume", type=Path)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--hurry", type=Path, help="an attempt waits for it from its third epoch on")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
first = 0
if options.resume:
    saved = torch.load(options.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
for epoch in range(first, options.epochs):
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(epoch))
    loss = (model(data) - data.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    while epoch >= first + 2 and not options.hurry.exists():
        time.sleep(0.1)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} of {dist.get_world_size()} ranks: {loss.item():.4f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        path = options.checkpoint_dir / f"epoch_{epoch}.pt"
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
dist.destroy_process_group()
