"""The script of plain_requeue.sh: FOLDER STEP_S SAVE_EVERY. A line of steps.log per step."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from bench_task import Paced

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see plain_requeue.sh
folder, step_s, every = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
task = Paced({"parameters": 1_000_000, "step_s": step_s})
model = task.model()
optimizer = task.optimizer(model)
path, step = folder / "latest.pt", 0
if path.exists():
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
with (folder / "steps.log").open("a") as log:
    while True:
        step += 1
        task.loss(model, torch.zeros(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, time.time(), file=log, flush=True)
        if step % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
