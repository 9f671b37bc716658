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
from torch.utils.data import default_collate

from elastic.base import durable
from elastic.base.signals import Notice
from elastic.local.worker.agent import Agent, Training
from elastic.local.worker.line import Line, Place, RankLine
from elastic.saved import inner_state
from helpers import listening
from running import Running, running
from tiny_task import Masked

EXACT = {"local_sgd.outer_lr": 1.0, "local_sgd.outer_momentum": 0.0, "checkpoint.keep_every": 1,
         "local_sgd.thin_rounds": False, "local_sgd.clip_norm": 0.0,
         "local_sgd.min_deadline": "1h"}
ONE = {**EXACT, "train.batch_size": 8}
TWO = {**EXACT, "slurm.gpus_per_worker": 2, "elastic.min": 2, "elastic.max": 2}
TWO_BATCHES = {**TWO, "train.batch_size": 2, "train.accumulate": 2}


def parameters(run: Running, version: int) -> dict[str, torch.Tensor]:
    """The master's float32 parameters of a version."""
    state = load_file(run.folder(version) / "outer-00.safetensors")
    return {name: value for name, value in state.items() if name.startswith("param/")}


def test_two_ranks_of_two_batches_deliver_the_delta_of_one_and_score_it_together(tmp_path: Path):
    """With Muon, and so with AdamW, which has the parameters that are no matrices. Batches
    differ in tokens: a step was a mean of their means, and the tokens of sample 0 stood for those
    of every sample. The last batch is filled up, and its tokens are counted in proportion."""
    found, scores, tokens = [], [], []
    for name, settings in (("one", ONE), ("two", TWO_BATCHES)):
        (tmp_path / name).mkdir()
        settings = {**settings, "train.optimizer": "muon", "run.task": "tiny_task:Masked",
                    "train.validate_every": 5}
        with running(tmp_path / name, settings, samples=91, step_s=0) as run:
            run.finish(120)
            found.append([parameters(run, version) for version in range(3)])
            scores.append([score.loss for score in run.run.scores.read()])
            steps = [delta.steps for commit in run.commits() for delta in commit.deltas]
            assert sum(steps) == -(-91 // 8)
            tokens.append(run.commits()[-1].tokens)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    before, after = found[0][:2]
    assert max((after[key] - before[key]).abs().max() for key in before) > 0.01
    assert tokens[0] == tokens[1] == pytest.approx(tokens_of(91), abs=8)
    assert len(scores[0]) > 1
    assert scores[1] == pytest.approx(scores[0], rel=1e-3)


def tokens_of(samples: int) -> int:
    task = Masked({"pace": "", "samples": samples})
    return task.tokens(default_collate([task.dataset()[number] for number in range(samples)]))


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


def test_two_ranks_train_a_refused_round_again_survive_a_kill_and_leave_on_notice(tmp_path: Path):
    settings = {**TWO, "elastic.max_failures": 50, "local_sgd.inner_steps": 10,
                "local_sgd.inner_state_max_age": 1000, "train.schedule": "constant",
                "local_sgd.min_deadline": "1s"}
    with running(tmp_path, settings, samples=10**6, step_s=0.05) as run:
        run.workers(1)
        go_back_to_the_base(run)

        run.even_pace()
        ranks = run.pids("trainer")
        assert len(ranks) == 2
        assert {address for address, _ in listening(ranks)} <= {"127.0.0.1"}, "Gloo, and no store"
        os.kill(ranks[1], signal.SIGKILL)
        run.until(lambda: len(set(run.pids("trainer")) - set(ranks)) == 2, 30, "two new ranks")
        run.versions(1, 90)
        (delta,) = run.run.commits.of(run.version).deltas
        assert delta.inner.startswith("own of version")

        run.pace(0.5)  # the round is not to be over before they are told
        run.until(lambda: 2 <= run.slots()[0].step <= 6, 60, "the middle of a round")
        slot, job = run.slots()[0], run.jobs()["worker", 0]
        run.set_capacity(0)
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        run.until(lambda: run.version > slot.version, 30, "its steps count")
        (delta,) = run.run.commits.of(slot.version + 1).deltas
        assert slot.step <= delta.steps < 10
        assert delta.tokens == 8 * delta.steps
        kept, _ = inner_state.choose(run.run, 0, run.version, 1000)
        assert (kept.version, len(kept.files)) == (slot.version, 2), "one of each rank"
        run.audit()


def go_back_to_the_base(run: Running) -> None:
    """Each rank holds half the rows. Adam moves all alike, so twice the way would be seen."""
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
    name = next(key for key in before if "layers.1.weight" in key)
    moved = (after[name] - before[name]).abs().mean(dim=1)
    assert moved[8:].mean() == pytest.approx(moved[:8].mean().item(), rel=0.4)
