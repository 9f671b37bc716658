"""What a run costs on a GPU, beside a bare loop: tokens per second of etc/125m.toml in both modes.

    .venv/bin/python tests/bench/bench_gpu.py [--tokens 40] [--cases 'sync mode,local mode']

One GPU, random tokens, bf16, compiled. The bare loop is the same model with the same optimizer, and
has nothing else. Rounds have K = 20 steps, so that there are many; without a setting they have 200.

Predicted before the first measurement: a round stands still for 0.8 s, as the dry run of
elastic-submit said, which measured no disk then. Measured on one H100 with a virtual disk (torch
2.11, --tokens 12): the bare loop 247,594 tokens/s, local mode 125,622. A round stands still for
2.42 s and trains for 2.65 s, as long as the bare loop takes for it: the GPU loses nothing else. On
another machine, without a GPU, 2.1 of 4.6 s were the disk's: a version of 134M parameters is
1.34 GB, and durable before anybody trains on it.

Sync mode with a checkpoint every 100 steps, on another H100 (--tokens 8), trains 0.917 of what the
bare loop does (223,741 of 243,873 tokens/s). At a checkpoint it stands still for 1.12 s, which
is nearly all of the difference. Local mode with overlap did not end within the time on the GPU.
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy
import torch
from figures import ROOT, record, scratch

sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests")]
from elastic.base.config import Config, load  # noqa: E402
from elastic.run.rundir import RunDir  # noqa: E402
from elastic.tasks import TokenFiles  # noqa: E402
from elastic.train.device import build_model, precision, set_initial_values  # noqa: E402
from elastic.train.group import Group, clip_gradients  # noqa: E402
from elastic.train.optimizers import default_optimizer  # noqa: E402
from gpu_check import submitted, wait_for_end  # noqa: E402

CONFIG, VOCABULARY, WARM, STEPS = ROOT / "etc/125m.toml", 32_000, 20, 100
CASES = {
    "sync mode": ("run.mode=sync", "sync.global_batch_size=32"), "local mode": (),
    "local mode with overlap": ("local_sgd.overlap=rebase",),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=40, help="of each run, in millions")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    tokens = 1_000_000 * options.tokens
    with scratch() as name:
        folder = Path(name)
        numpy.random.default_rng(0).integers(
            0, VOCABULARY, tokens + 1_000_000, dtype=numpy.uint16
        ).tofile(folder / "tokens.bin")
        settings = [f'task.files=["{folder}/tokens.bin"]', "task.validation_files=[]",
                    f"train.max_tokens={tokens}", "run.scheduler=local", "train.optimizer=muon",
                    "local_sgd.inner_steps=20", "checkpoint.interval=100 steps"]
        bare = bare_loop(load(CONFIG, settings, None))
        record("gpu", "a bare loop", bare, "tok/s")
        for case in options.cases.split(","):
            with submitted(CONFIG, *settings, *CASES[case]) as (_, run):
                wait_for_end(run, 10 + tokens / 20_000)
                rate, stall_s = sync_rate(run) if "sync" in case else local_rate(run)
            record("gpu", case, rate, "tok/s", "the bare loop", bare)
            record("gpu", f"{case}: it stands still", 1e3 * stall_s, "ms")


def bare_loop(config: Config) -> float:
    """Tokens per second."""
    task, device = TokenFiles(config.task), torch.device("cuda")
    model = build_model(task, config, device, Group())
    set_initial_values(task, model)
    optimizer = default_optimizer(model, config.train)
    autocast = precision(config.train.precision, device)
    loader = torch.utils.data.DataLoader(task.dataset(), config.train.batch_size, pin_memory=True)
    for step, batch in zip(range(WARM + STEPS), loader, strict=False):
        if step == WARM:
            torch.cuda.synchronize()
            began = time.perf_counter()
        with autocast():
            loss = task.loss(model, batch.to(device, non_blocking=True))
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return STEPS * task.tokens(batch) / (time.perf_counter() - began)


def local_rate(run: RunDir) -> tuple[float, float]:
    """Tokens per second between commits, the first round left out, and the stall of a round."""
    commits = list(run.commits.all())[1:]
    stalls = [d.stall_s for commit in commits for d in commit.deltas if d.stall_s]
    rates = [(b.tokens - a.tokens) / (b.time - a.time) for a, b in pairwise(commits)]
    return statistics.median(rates), statistics.median(stalls)


def sync_rate(run: RunDir) -> tuple[float, float]:
    """Likewise over the steps, checkpoints and all; and the longest pause between two steps."""
    lines = run.lines("metrics.jsonl")[WARM:]
    gaps = [b["time"] - a["time"] for a, b in pairwise(lines)]
    tokens = lines[-1]["tokens"] - lines[0]["tokens"]
    return tokens / sum(gaps), max(gaps) - statistics.median(gaps)


if __name__ == "__main__":
    main()
