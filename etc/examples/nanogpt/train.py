"""A training script of nanoGPT's shape: settings as globals, --init_from=resume, one ckpt.pt that
is written again at every evaluation, its own learning rate, DDP where RANK is set; no signal is
handled.
It knows nothing of Elastic; run.toml says how it is started.
"""

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
init_from = "scratch"  # or "resume"
eval_interval = 50
max_iters = 600
batch_size = 8
block_size = 32
gradient_accumulation_steps = 4  # of all ranks together
learning_rate, min_lr = 3e-3, 3e-4
warmup_iters = 20
for argument in sys.argv[1:]:  # as nanoGPT's configurator.py
    name, value = argument.removeprefix("--").split("=", 1)
    globals()[name] = type(globals()[name])(value)

ddp = "RANK" in os.environ and os.environ["WORLD_SIZE"] != "1"
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(device)
if ddp:
    torch.distributed.init_process_group("nccl" if device != "cpu" else "gloo")
assert gradient_accumulation_steps % world == 0
gradient_accumulation_steps //= world
torch.manual_seed(1337 + rank)

text = ("preempted at midnight, resumed at noon, and not a sample lost. " * 40).encode()
data = torch.tensor(list(text))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[start : start + block_size] for start in starts])
    y = torch.stack([data[start + 1 : start + 1 + block_size] for start in starts])
    return x.to(device), y.to(device)


def get_lr(iteration: int) -> float:
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    done = (iteration - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num, path = 0, Path(out_dir, "ckpt.pt")
if init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
raw_model = model
if ddp:
    model = DistributedDataParallel(model)

X, Y = get_batch()
while iter_num <= max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and iter_num > 0 and rank == 0:
        print(f"saving checkpoint to {out_dir}", flush=True)
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num}, path)
    for micro_step in range(gradient_accumulation_steps):
        is_last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if is_last or not ddp else model.no_sync():
            loss = nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())
            (loss / gradient_accumulation_steps).backward()
        X, Y = get_batch()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f} on {world} GPUs", flush=True)
    iter_num += 1
if ddp:
    torch.distributed.destroy_process_group()
