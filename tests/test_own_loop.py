"""A training loop of one's own joins a run in a few lines (`run.command`)."""

import subprocess
import sys
from pathlib import Path

from helpers import ROOT, environment, wait_until
from running import running

LOOP = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn({samples}, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
inner_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with elastic.LocalSGD.from_env(model, inner_optimizer) as sgd:
    for features, target in sgd.batches(dataset):
        loss = nn.functional.mse_loss(model(features), target)
        loss.backward()
        inner_optimizer.step()
        inner_optimizer.zero_grad()
        sgd.step(loss)
'''


def test_a_plain_loop_with_a_few_lines_more_is_a_worker(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(samples=800))
    settings = {"run.command": [sys.executable, str(script)], "elastic.max": 2}
    with running(tmp_path, settings) as run:
        report = run.finish()
        first, last = run.run.commit(1), run.run.newest_commit()
    assert report["committed"] == 800
    assert last["loss"] < first["loss"] / 2


def test_a_loop_without_step_is_told_so(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(samples=80).replace("        sgd.step(loss)\n", ""))
    settings = {"run.command": [sys.executable, str(script)], "elastic.max": 1,
                "elastic.max_failures": 1}  # fmt: skip
    with running(tmp_path, settings) as run:
        def failed() -> dict | None:
            run.reconcile()
            return run.run.failed()

        record = wait_until(failed, 60, "the run fails")
    assert "sgd.step() was not called" in record["detail"]


def test_a_loop_that_no_agent_started_is_told_how_to(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(samples=80))
    env = environment(tmp_path, PYTHONPATH=str(ROOT / "lib"))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "was not started by elastic-agent" in done.stderr
    assert "elastic-submit" in done.stderr
