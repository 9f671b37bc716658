"""What runs only where there is a GPU: `make gpu-check`. On a machine without one it says so.

    one GPU     the demo run on CUDA in bf16: base parameters pinned on the host, loss falls, audit;
                the same with Muon, and in sync mode, whose job is preempted; a model that FSDP2
                shards over NCCL learns as the whole one, and its checkpoint is exact; the loops
                of etc/examples/ that are for local mode
    two GPUs    the runs with two ranks: FSDP2 over NCCL between them

Prints one line per check with its figures. Exit 1 if one of them fails.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from elastic.base.config import Config, load  # noqa: E402
from elastic.jobs.sched_local import LocalScheduler  # noqa: E402
from elastic.people.steering import is_done  # noqa: E402
from elastic.run.rundir import RunDir  # noqa: E402
from elastic.saved.checkpoint import Checkpoints  # noqa: E402
from elastic.saved.codec import CODECS  # noqa: E402
from elastic.saved.layout import Layout  # noqa: E402
from elastic.saved.replica import Replica, shapes  # noqa: E402
from elastic.tasks import ByteText  # noqa: E402
from elastic.train.device import build_model, precision, set_initial_values, shard  # noqa: E402
from elastic.train.group import Group  # noqa: E402
from elastic.train.optimizers import default_optimizer  # noqa: E402
from helpers import ROOT, elastic, environment, wait_until  # noqa: E402

CONFIG = ROOT / "etc/demo.toml"
ON_GPU = ("train.device=cuda", "train.precision=bf16", "task.samples=24000", "train.batch_size=16")


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: skipped, torch sees no CUDA device here")
        return 0
    gpus = torch.cuda.device_count()
    print(f"gpu-check: {gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    check_pinned()
    check_codecs()
    check_sharded()
    check_run("one GPU, bf16")
    check_run("one GPU, bf16, Muon", optimizer="muon")
    check_sync("one GPU, sync mode, Muon", gpus=1)
    for name in ("plain_loop", "hf_loop"):
        check_example(name)
    if gpus > 1:
        check_run("two GPUs, FSDP2 over NCCL", gpus_per_worker=2)
        check_run("two GPUs, FSDP2, Muon", gpus_per_worker=2, optimizer="muon")
        check_sync("two GPUs, sync mode, Muon", gpus=2)
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
    delta = torch.randn(2048 * 2048 + 1000, generator=torch.Generator().manual_seed(1))
    for name, codec in CODECS.items():
        on_cpu, on_gpu = (bytes(codec.encode(each)) for each in (delta, delta.cuda()))
        assert len(on_cpu) == len(on_gpu) == codec.size_bytes(delta.numel())
        assert on_cpu == on_gpu, name
        torch.cuda.synchronize()
        began = time.monotonic()
        codec.encode(delta.cuda())
        print(f"{name}: the GPU's bytes are the CPU's, {time.monotonic() - began:.3f} s: ok")


def check_sharded() -> None:
    """FSDP2 on CUDA, with NCCL: what it trains, what it saves. One rank is enough for both."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    group, task = Group(0, 1, "cuda"), ByteText({"dim": 64, "layers": 2, "heads": 2})
    losses = {}
    for name in ("float32", "bf16"):
        config = load(CONFIG, [f"train.precision={name}", "train.optimizer=muon"], None)
        whole, sharded, again = (
            Learner(task, config, group, is_sharded) for is_sharded in (False, True, True)
        )
        losses[name] = [whole.train(20), sharded.train(20)]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "checkpoints").mkdir()
            checkpoints = Checkpoints(RunDir(Path(folder)), group, "job1")
            checkpoints.save(20, sharded.model, sharded.optimizer, {})
            saved, _ = checkpoints.load(again.model, again.optimizer)
        assert saved.step == 20
        assert sharded.train(5) == again.train(5)
    dist.destroy_process_group()
    for name, tolerance in (("float32", 1e-3), ("bf16", 3e-2)):
        assert math.isclose(*losses[name], abs_tol=tolerance), losses
    print(f"FSDP2 over NCCL, one rank: loss whole and sharded {losses}, checkpoint exact: ok")


class Learner:
    """A model of a task and its optimizer, whole or sharded, from the same seed."""

    def __init__(self, task, config: Config, group: Group, is_sharded: bool):
        self.task, self.autocast = task, precision(config.train.precision, group.device)
        self.model = build_model(task, config, group.device, group)
        if is_sharded:
            shard(self.model, config, group.device)
        set_initial_values(task, self.model)
        self.optimizer = default_optimizer(self.model, config.train)
        self.batches = torch.utils.data.DataLoader(task.dataset(), batch_size=16)

    def train(self, steps: int) -> float:
        """The last loss, in nats."""
        for _, batch in zip(range(steps), self.batches, strict=False):
            with self.autocast():
                loss = self.task.loss(self.model, batch.to("cuda"))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


@contextlib.contextmanager
def submitted(config: Path, *settings: str, gpus: int = 1) -> Iterator[tuple[dict, RunDir]]:
    """A run that has begun on this machine's GPUs; no process of it is left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder))
        options = [part for each in ("run.scheduler=local", *settings) for part in ("--set", each)]
        size = ("--min", gpus, "--max", gpus)
        try:
            answer = elastic("submit", config, "--name", "gpu", *size, *options, env=env)
            assert answer.returncode == 0, answer.stdout + answer.stderr
            yield env, RunDir(Path(folder) / "runs/gpu")
        finally:
            elastic("stop", "gpu", "--now", "--wait", env=env)


def wait_for_end(run: RunDir, timeout_s: float = 120) -> None:
    wait_until(lambda: is_done(run), timeout_s, "the end of the run")


def validated(env: dict, run: RunDir) -> float:
    """The validation loss in nats per byte, when the run is over and audited."""
    wait_for_end(run)
    audit = elastic("audit", "gpu", env=env)
    assert audit.returncode == 0, audit.stdout
    answer = elastic("evaluate", "gpu", "--json", env=env, timeout_s=120)
    loss = json.loads(answer.stdout)["validation_loss"]
    assert loss < 3.0, f"validation loss {loss} nats per byte"
    return loss


def check_run(what: str, gpus_per_worker: int = 1, optimizer: str = "adamw") -> None:
    settings = (f"train.optimizer={optimizer}", f"slurm.gpus_per_worker={gpus_per_worker}")
    with submitted(CONFIG, *ON_GPU, *settings, gpus=gpus_per_worker) as (env, run):
        loss, commits = validated(env, run), list(run.commits.all())
        stalls = sorted(d.stall_s for commit in commits for d in commit.deltas if d.stall_s)
        tokens_per_s = commits[-1].tokens / (commits[-1].time - commits[0].time)
        print(f"{what}: ok; {len(commits) - 1} versions, {tokens_per_s:.0f} tokens/s, "
              f"median stall {stalls[len(stalls) // 2]:.3f} s, loss {loss:.3f}")


def check_sync(what: str, gpus: int) -> None:
    """A job that is told to leave goes on where it was: no step is lost, and none comes twice."""
    settings = ("run.mode=sync", "train.optimizer=muon")
    with submitted(CONFIG, *ON_GPU, *settings, gpus=gpus) as (env, run):
        scheduler = LocalScheduler(run.config(), Path(env["ELASTIC_HOME_DIR"]) / "local")
        for goal in (100, 500):
            wait_until(lambda: newest_step(run) > goal, 120, f"step {goal}")  # noqa: B023
            (job,) = [job for job in scheduler.jobs() if job.state == "RUNNING"]
            scheduler.preempt(job.job_id)
        loss, lines = validated(env, run), list(run.lines("metrics.jsonl"))
        steps, attempts = [line["step"] for line in lines], {line["attempt"] for line in lines}
        assert sorted(steps) == [*range(1, len(steps) + 1)]
        assert len(attempts) == 3, attempts
        print(f"{what}: ok; {len(steps)} steps, two preemptions, loss {loss:.3f}")


def newest_step(run: RunDir) -> int:
    return max((line["step"] for line in run.lines("metrics.jsonl", 1)), default=0)


def check_example(name: str) -> None:
    """A loop that puts its model on the GPU, and gets its batches there."""
    with submitted(ROOT / "etc/examples" / name / "run.toml") as (_, run):
        wait_for_end(run)
        print(f"{name}: ok")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT / "lib"))
    subprocess.run(["nvidia-smi", "-L"], check=False) if torch.cuda.is_available() else None
    sys.exit(main())
