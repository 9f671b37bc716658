"""A worker of two ranks: FSDP2 over gloo inside one job, one delta to the outside."""

import os
import signal
from pathlib import Path

import torch

from elastic.versions import read_layout, read_params
from running import running

TWO_RANKS = {"slurm.gpus_per_worker": 2, "elastic.max": 2, "local_scheduler.gpus": 2}
EXACT = {
    "local_sgd.inner_steps": 5, "local_sgd.outer_lr": 1.0, "local_sgd.outer_momentum": 0.0,
    "local_sgd.thin_rounds": False, "train.weight_decay": 0.0,
}  # fmt: skip


def parameters(run, version: int) -> torch.Tensor:
    commit = run.run.commit(version)
    layout = read_layout(run.run, version)
    parts = [read_params(run.run, commit, layout, i) for i in range(len(layout.fragments))]
    return torch.cat(parts).float()


def first_version_of(folder: Path, settings: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    folder.mkdir()
    keep = {"checkpoint.keep": 1000}
    with running(folder, {**EXACT, **settings, **keep}, samples=160, step_s=0.0) as run:
        run.finish(timeout_s=120)
        return parameters(run, 0), parameters(run, 1), run.run.commit(1)


def test_two_ranks_make_the_delta_that_one_makes_with_the_same_batches(tmp_path: Path):
    two = first_version_of(tmp_path / "two", {**TWO_RANKS, "train.batch_size": 2})
    one = first_version_of(tmp_path / "one", {"elastic.max": 1, "train.batch_size": 4})
    assert torch.equal(two[0], one[0])
    assert two[2]["samples"] == one[2]["samples"]
    moved = (one[1] - one[0]).norm()
    assert moved > 0.01
    assert (two[1] - one[1]).norm() < 0.02 * moved  # bf16 publication is the coarsest step


def test_two_ranks_deliver_at_a_notice_and_go_on_with_their_inner_state(tmp_path: Path):
    settings = {**TWO_RANKS, "elastic.max_failures": 50, "local_sgd.inner_steps": 20}
    with running(tmp_path, settings, samples=4000, step_s=0.05) as run:
        run.until(lambda: run.version >= 1, 90, "version 1")
        job = run.jobs()[("worker", 0)]
        run.scheduler.preempt(job.job_id, 20)
        ending = run.ended(job.job_id, 60)
        assert ending["outcome"] == "yielded"
        run.versions(2, timeout_s=90)
        inner = [delta["inner"] for commit in run.commits() for delta in commit["deltas"]]
        assert any(text.startswith("own of version") for text in inner)


def test_a_lost_rank_restarts_the_worker(tmp_path: Path):
    settings = {**TWO_RANKS, "elastic.max_failures": 50}
    with running(tmp_path, settings, samples=2000, step_s=0.02) as run:
        run.until(lambda: run.version >= 1, 90, "version 1")
        os.kill(run.pids("trainer")[-1], signal.SIGKILL)
        run.until(lambda: run.events("restart"), 60, "the agent restarts both ranks")
        run.finish(timeout_s=120)
