"""What the first rounds' length costs: from random parameters, at equal tokens.

    .venv/bin/python tests/bench/bench_cold_start.py [--seeds 2] [--tokens 3276800]

Byte-level transformer of the demo (475,776 parameters) on the standard library's sources, four
workers of batch 8 and 128 bytes, K = 20, AdamW 1e-3, cosine, in the simulator of `make validate`.
Beside each other: synchronous AdamW of the same global batch, and `local_sgd.cold_start_steps` of
10, 2 and 1. Printed are the validation loss in nats a byte, and the versions it took.

Predicted: 10 loses 0.3 nats to synchronous training, 2 loses 0.05, 1 loses 0.02, for a third more
versions.
"""

import argparse
import sys

import torch
from figures import ROOT, record

sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests")]
from elastic.base import config as configuration  # noqa: E402
from elastic.tasks import ByteText  # noqa: E402
from validate import rig  # noqa: E402
from validate.simulator import Simulator  # noqa: E402

WORKERS, BATCH = 4, 8
SETTINGS = (f"train.batch_size={BATCH}", "train.learning_rate=1e-3", "train.warmup_fraction=0.05",
            "local_sgd.compression=int8")  # fmt: skip
SYNCHRONOUS = (f"train.batch_size={WORKERS * BATCH}", *rig.PLAIN, "local_sgd.compression=none",
               "local_sgd.cold_start_steps=0")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=3_276_800)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        steps = options.tokens // (WORKERS * BATCH * 128)
        whole = (*SYNCHRONOUS, f"local_sgd.inner_steps={steps}")
        base = report(seed, "synchronous", options.tokens, whole, workers=1)
        for first in (1, 2, 10):
            cold = (f"local_sgd.cold_start_steps={first}",)
            report(seed, f"cold_start_steps {first}", options.tokens, cold, WORKERS, base)


def report(seed: int, name: str, tokens: int, settings, workers: int, base: float = 0.0) -> float:
    """Train once; prints and returns the validation loss."""
    chosen = [f"run.seed={seed}", f"train.max_tokens={tokens}", *SETTINGS, *settings]
    config = configuration.load(rig.HERE / "parity.toml", chosen, rig.NO_SITE)
    task = ByteText(config.task)
    start = rig.untrained(task, config)
    simulator = Simulator(task, config, start, len(task.dataset()), tokens)
    while simulator.versions[simulator.version].tokens < tokens:
        for _ in simulator.replay([commit(simulator, workers)]):
            pass
    loss = simulator.validate()["validation_loss"]
    case = f"seed {seed}, {name}, {simulator.version} versions"
    record("cold", case, loss, "nats", "synchronous" if base else "", base)
    return loss


def commit(simulator: Simulator, workers: int) -> dict:
    """What everybody trains in the next round; of the last round what is left."""
    now = simulator.versions[simulator.version]
    batch = simulator.config.train.batch_size
    left = (simulator.total_tokens - now.tokens) // (128 * batch * workers)
    steps, first = max(1, min(now.steps, left)), now.tokens // 128
    deltas = [
        {"slot": slot, "attempt": 1, "base": simulator.version, "steps": steps, "inner": "start",
         "samples": [(0, first + slot * steps * batch, first + (slot + 1) * steps * batch)]}
        for slot in range(workers)
    ]  # fmt: skip
    return {"deltas": deltas}


if __name__ == "__main__":
    main()
