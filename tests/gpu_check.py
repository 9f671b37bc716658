"""What runs only where there is a GPU: `make gpu-check`. On a machine without one it says so.

    one GPU     the demo run on CUDA in bf16: base parameters pinned on the host, loss falls, audit;
                the same with Muon; the loops of etc/examples/ that are for local mode
    two GPUs    the same with slurm.gpus_per_worker = 2: FSDP2 over NCCL inside the worker

Prints one line per check with its figures. Exit 1 if one of them fails.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from elastic.saved.codec import CODECS  # noqa: E402
from elastic.saved.layout import Layout  # noqa: E402
from elastic.saved.replica import Replica, shapes  # noqa: E402
from elastic.tasks import ByteText  # noqa: E402
from helpers import ROOT, elastic, environment  # noqa: E402


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: skipped, torch sees no CUDA device here")
        return 0
    gpus = torch.cuda.device_count()
    print(f"gpu-check: {gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    check_pinned()
    check_codecs()
    check_run("one GPU, bf16", gpus_per_worker=1)
    check_run("one GPU, bf16, Muon", gpus_per_worker=1, optimizer="muon")
    for name in ("plain_loop", "hf_loop"):
        check_example(name)
    if gpus > 1:
        check_run("two GPUs, FSDP2 over NCCL", gpus_per_worker=2)
        check_run("two GPUs, FSDP2, Muon", gpus_per_worker=2, optimizer="muon")
    else:
        print("two GPUs, FSDP2 over NCCL: skipped, this machine has one GPU")
    return 0


def check_pinned() -> None:
    """A delta made on the GPU is the difference of what was adopted and what was trained."""
    model = ByteText({"context": 64, "dim": 64, "layers": 2, "heads": 2}).model().cuda()
    layout = Layout.of(shapes(model), 1 << 20)
    replica = Replica(model, layout)
    for index, numel in enumerate(layout.numels):
        replica.adopt(index, torch.randn(numel).bfloat16())
    assert all(base.is_pinned() for base in replica.base.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.25)
    for index in range(len(layout.fragments)):
        delta = replica.delta(index)
        assert delta.is_cuda
        assert torch.allclose(delta.cpu(), torch.tensor(0.25), atol=1e-5)
    print("base pinned, delta made on the GPU exact: ok")


def check_codecs() -> None:
    """What the GPU encodes is what the CPU encodes."""
    fragment = Layout.of([("a", (2048, 2048)), ("b", (1000,))], 1e9).fragments[0]
    delta = torch.randn(2048 * 2048 + 1000, generator=torch.Generator().manual_seed(1))
    for name, codec in CODECS.items():
        on_cpu, on_gpu = (bytes(codec.encode(each, fragment)) for each in (delta, delta.cuda()))
        assert len(on_cpu) == len(on_gpu) == codec.size_bytes(fragment)
        assert on_cpu == on_gpu, name
        torch.cuda.synchronize()
        began = time.monotonic()
        codec.encode(delta.cuda(), fragment)
        print(f"{name}: the GPU's bytes are the CPU's, {time.monotonic() - began:.3f} s: ok")


def check_run(what: str, gpus_per_worker: int, optimizer: str = "adamw") -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder))
        settings = ["train.device=cuda", "train.precision=bf16", "task.samples=24000",
                    f"train.optimizer={optimizer}",
                    f"slurm.gpus_per_worker={gpus_per_worker}"]  # fmt: skip
        options = [part for setting in settings for part in ("--set", setting)]
        size = ("--min", gpus_per_worker, "--max", gpus_per_worker)
        began = time.monotonic()
        submitted = elastic(
            "submit", ROOT / "etc/demo.toml", "--name", "gpu", *size, *options, "--wait",
            env=env, timeout_s=540,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        seconds = time.monotonic() - began
        audit = elastic("audit", "gpu", env=env)
        assert audit.returncode == 0, audit.stdout
        answer = elastic("evaluate", "gpu", "--json", env=env, timeout_s=120)
        loss = json.loads(answer.stdout)["validation_loss"]
        assert loss < 3.0, f"validation loss {loss} nats per byte"
        commits = sorted((Path(folder) / "runs/gpu/commits").glob("*.json"))
        rows = [json.loads(path.read_text()) for path in commits]
        stalls = sorted(d["stall_s"] for row in rows for d in row["deltas"] if d["stall_s"])
        tokens = rows[-1]["tokens"] / (rows[-1]["time"] - rows[0]["time"])
        print(f"{what}: ok; {len(rows) - 1} versions in {seconds:.0f} s, {tokens:.0f} tokens/s, "
              f"median stall {stalls[len(stalls) // 2]:.3f} s, loss {loss:.3f}")  # fmt: skip


def check_example(name: str) -> None:
    """A loop that puts its model on the GPU, and gets its batches there."""
    with tempfile.TemporaryDirectory() as folder:
        env, example = environment(Path(folder)), ROOT / "etc/examples" / name / "run.toml"
        size = ("--min", 1, "--max", 1, "--set", "run.scheduler=local")
        submitted = elastic("submit", example, *size, "--wait", env=env, timeout_s=300)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        print(f"{name}: ok")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT / "lib"))
    subprocess.run(["nvidia-smi", "-L"], check=False) if torch.cuda.is_available() else None
    sys.exit(main())
