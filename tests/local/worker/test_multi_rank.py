"""A worker of two ranks (`slurm.gpus_per_worker = 2`): FSDP2, here over gloo on CPUs.

Two ranks of batch 4 have to do the same as one process of batch 8.
"""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from elastic.base import durable
from elastic.base.signals import Notice
from elastic.local.worker.agent import Agent, Training
from elastic.local.worker.line import Line, Place, RankLine
from helpers import listening
from running import Running, running
from tiny_task import Samples

EXACT = {"local_sgd.outer_lr": 1.0, "local_sgd.outer_momentum": 0.0, "checkpoint.keep_every": 1,
         "local_sgd.thin_rounds": False, "local_sgd.clip_norm": 0.0,
         "local_sgd.min_deadline": "1h"}  # fmt: skip
ONE = {**EXACT, "train.batch_size": 8}
TWO_BATCHES = {**EXACT, "train.accumulate": 2}
TWO = {**EXACT, "slurm.gpus_per_worker": 2, "elastic.min": 2, "elastic.max": 2}


def parameters(run: Running, version: int) -> dict[str, torch.Tensor]:
    """The master's float32 parameters of a version."""
    state = load_file(run.folder(version) / "outer-00.safetensors")
    return {name: value for name, value in state.items() if name.startswith("param/")}


def test_two_ranks_or_two_batches_deliver_the_delta_of_one(tmp_path: Path):
    """With Muon, and so with AdamW, which has the parameters that are no matrices. Batches
    differ in tokens: a step was a mean of their means."""
    found = []
    for name, settings in (("one", ONE), ("two", TWO), ("accumulated", TWO_BATCHES)):
        (tmp_path / name).mkdir()
        settings = {**settings, "train.optimizer": "muon", "run.task": "tiny_task:Masked"}
        with running(tmp_path / name, settings, samples=203, step_s=0) as run:
            run.finish(120)
            found.append([parameters(run, version) for version in range(3)])
            steps = [delta.steps for commit in run.commits() for delta in commit.deltas]
            assert sum(steps) == -(-203 // 8)
    for one, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    before, after = found[0][:2]
    assert max((after[key] - before[key]).abs().max() for key in before) > 0.01


RAGGED = """
from tiny_task import Tiny

class Ragged(Tiny):
    def tokens(self, batch):
        return int((batch[0] > 0).sum())
"""


def test_the_tokens_of_all_ranks_count(tmp_path: Path):
    """Those of sample 0 stood for those of every sample."""
    (tmp_path / "ragged.py").write_text(RAGGED)
    settings = {**TWO, "run.task": "ragged:Ragged"}
    with running(tmp_path, settings, samples=200, step_s=0) as run:
        run.finish(120)
        samples = Samples(200, -1)
        assert run.commits()[-1].tokens == sum(int((samples[i][0] > 0).sum()) for i in range(200))


def test_a_disk_that_is_full_for_a_rank_that_does_not_lead_is_told_of_until_it_is_not(
    run, monkeypatch
):
    """Rank 0 waits for it and says nothing: as it "delivered" without a move it was killed."""
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    reader, writer = os.pipe()
    first, second = (Place(run, 0, 1, "7", rank, 2, writer) for rank in (0, 1))
    leading, other = Line(first, Notice()), RankLine(second, Notice())
    training, agent = Training([], reader), Agent(run, 0, Notice())

    def told() -> tuple[str, str]:
        training.read()
        seen = replace(training, processes=[SimpleNamespace(pid=1)])
        fields = agent._fields(seen)
        return fields["state"], fields["trouble"]

    def write() -> str:
        if not (seen := told())[1]:
            raise OSError(errno.EDQUOT, "quota exceeded")
        return seen

    leading.say(state="delivering")
    assert told() == ("delivering", "")
    assert other.written(write) == ("blocked", "[Errno 122] quota exceeded")
    leading.say(state="waiting")
    assert told() == ("waiting", "")
    os.close(writer)
    training.end()


def test_two_ranks_leave_on_notice_and_come_back_after_the_loss_of_one(tmp_path: Path):
    settings = {**TWO, "elastic.max_failures": 50, "local_sgd.inner_steps": 20,
                "local_sgd.inner_state_max_age": 1000}  # fmt: skip
    with running(tmp_path, settings, samples=3000, step_s=0.05) as run:
        run.workers(1)
        run.versions(1)
        run.pace(0.5)  # the round is not to be over before they are told
        run.until(lambda: 2 <= run.slots()[0].step <= 6, 60, "the middle of a round")
        slot, job = run.slots()[0], run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        run.pace(0.1)
        run.until(lambda: run.version > slot.version, 30, "its steps count")
        (delta,) = run.run.commits.of(slot.version + 1).deltas
        assert slot.step <= delta.steps < 20
        assert delta.tokens == 8 * delta.steps

        run.versions(1, 90)
        (delta,) = run.run.commits.of(run.version).deltas
        assert delta.inner == f"own of version {slot.version}"

        ranks = run.pids("trainer")
        assert len(ranks) == 2
        assert {address for address, _ in listening(ranks)} <= {"127.0.0.1"}, "Gloo, and no store"
        os.kill(ranks[1], signal.SIGKILL)
        run.until(lambda: len(set(run.pids("trainer")) - set(ranks)) == 2, 30, "two new ranks")
        run.versions(1, 90)
        (delta,) = run.run.commits.of(run.version).deltas
        assert delta.inner.startswith("own of version")
        run.finish(120)


def test_both_ranks_go_back_to_the_base_when_their_delta_is_refused(tmp_path: Path):
    """Each rank holds half the rows. Adam moves all alike, so twice the way would be seen."""
    settings = {**TWO, "local_sgd.inner_steps": 10, "train.schedule": "constant",
                "checkpoint.keep_every": 1}  # fmt: skip
    with running(tmp_path, settings, samples=800, step_s=0.3) as run:
        run.workers(1)
        run.hold()
        (master,) = run.pids("master")
        os.kill(master, signal.SIGSTOP)
        base = run.slot(0).version
        run.go_on()
        deltas = run.run.path / "deltas" / f"{base:06d}"
        found = run.until(lambda: list(deltas.glob("0000.*")), 30, "a delta")
        data = bytearray(found[0].read_bytes())
        data[-1] ^= 1
        found[0].write_bytes(data)
        os.kill(master, signal.SIGCONT)
        run.until(lambda: run.events("reject"), 30, "it is refused")
        run.until(lambda: run.version > base, 60, "the round is trained again")
        before, after = parameters(run, base), parameters(run, base + 1)
        run.pace(0)
        run.finish(120)
    name = next(key for key in before if "layers.1.weight" in key)
    moved = (after[name] - before[name]).abs().mean(dim=1)
    assert moved[8:].mean() == pytest.approx(moved[:8].mean().item(), rel=0.4)
