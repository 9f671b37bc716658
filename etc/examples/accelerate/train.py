"""An ordinary loop around accelerate, which saves every 50 steps. It knows nothing of Elastic."""

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", type=Path, required=True)
parser.add_argument("--resume", type=Path)
parser.add_argument("--steps", type=int, default=600)
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
x = torch.rand(1024, 16) * 6 - 3
data = DataLoader(TensorDataset(x, torch.sin(x).sum(1)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
step = 0
if options.resume:
    accelerator.load_state(options.resume)
    step = int(options.resume.name.removeprefix("step_"))


def save(step: int) -> None:
    """A folder has its name once it is whole."""
    draft, folder = options.checkpoints / ".draft", options.checkpoints / f"step_{step}"
    accelerator.save_state(draft)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
    accelerator.wait_for_everyone()


while step < options.steps:
    for inputs, wanted in data:
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            accelerator.print(f"step {step} of {accelerator.num_processes}: {loss:.4f}", flush=True)
            save(step)
        if step >= options.steps:
            break
accelerator.end_training()
