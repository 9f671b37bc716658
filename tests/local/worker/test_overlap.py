"""Training on while the delta travels: no sample twice, no step twice, and next to no standstill.

    pytest tests/local/worker/test_overlap.py
"""

import math
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from elastic.local.worker.adopt import Adoption
from elastic.local.worker.in_hand import Ahead, InHand, WorkerRound
from elastic.run.records import Commit
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.train.group import Group
from elastic.train.task import Interrupted
from helpers import commit_of
from running import running

INNER_STEPS = 20
SETTINGS = {
    "elastic.min": 1,
    "elastic.max": 2,
    "local_sgd.inner_steps": INNER_STEPS,
    "local_sgd.min_deadline": "10s",
    "local_sgd.overlap": "rebase",
}


# ---- the replica --------------------------------------------------------------------------------


@pytest.fixture
def replica():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    layout = Layout.of(shapes(model), 64)
    replica = Replica(model, layout)
    for index, numel in enumerate(layout.numels):
        replica.adopt(index, torch.randn(numel).bfloat16())
    return SimpleNamespace(model=model, layout=layout, it=replica,
                           indices=range(len(layout.fragments)))


@torch.no_grad()
def move(replica) -> None:
    for param in replica.model.parameters():
        param.add_(torch.randn_like(param))


def deltas(replica) -> list[torch.Tensor]:
    return [replica.it.delta(index) for index in replica.indices]


def test_the_next_delta_holds_exactly_the_steps_since_the_last(replica):
    assert len(replica.indices) > 1
    move(replica)
    sent = deltas(replica)
    before = [replica.it.whole(index) for index in replica.indices]
    move(replica)
    since = [replica.it.whole(i) - whole for i, whole in zip(replica.indices, before, strict=True)]
    published = [torch.randn(numel).bfloat16() for numel in replica.layout.numels]
    for index in replica.indices:
        replica.it.rebase(index, published[index], sent[index])
    for index in replica.indices:
        assert torch.allclose(replica.it.whole(index), published[index] + since[index], atol=1e-5)
        assert torch.allclose(deltas(replica)[index], -since[index], atol=1e-5)


def test_who_looks_at_the_base_leaves_the_steps_ahead_as_they_were():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model.register_buffer("is_begun", torch.tensor(False))
    layout = Layout.of(shapes(model), 64)
    it = Replica(model, layout)
    for index in range(len(layout.fragments)):
        it.adopt(index, it.whole(index).to(it.empty(index).dtype))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.nn.init.normal_(model[0].weight)
    model(torch.randn(8, 3))  # which BatchNorm counts
    model.is_begun.fill_(True)
    ahead = {name: value.clone() for name, value in model.state_dict().items()}
    assert ahead["1.num_batches_tracked"] == 1

    def interrupted() -> None:
        with it.at_base():
            assert_equal(model.state_dict(), before)
            raise Interrupted  # by a notice

    assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    with pytest.raises(Interrupted):
        interrupted()
    assert_equal(model.state_dict(), ahead)
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("taken_back", [None, 10])
def test_steps_ahead_on_a_version_that_is_taken_back_are_not_kept(taken_back):
    """They went out in the next delta, on top of the version that was restored."""
    rebased, adopted = [], []
    exchange = SimpleNamespace(
        group=Group(), rebase=lambda deltas, fetched: rebased.append(deltas), fetch=lambda _: [],
        adopt=lambda commit, fetched: adopted.append(commit.version),
    )
    news = SimpleNamespace(version=11, over=False)
    line = SimpleNamespace(
        commit=lambda version: commit_of(version, taken_back=taken_back), notice=None,
        say=lambda **_: None, wait=lambda _: news,
    )
    hand = InHand(line, None)
    hand.round, hand.queue = WorkerRound(10, 0.0, steps=4), [(0, 8, 9)]
    ahead = WorkerRound(10, 0.0, steps=3, samples=[(0, 4, 7)])
    hand.ahead = Ahead(ahead, [torch.zeros(1)])
    Adoption(hand, None, SimpleNamespace(exchange=exchange), torch.nn.Linear(1, 1)).newest()
    assert (hand.round.base, hand.round.steps) == (11, 0 if taken_back else 3)
    assert (adopted, len(rebased)) == (([11], 0) if taken_back else ([], 1))
    assert hand.queue == ([(0, 4, 7)] if taken_back else []) + [(0, 8, 9)]


def test_a_constant_that_is_infinite_never_moves(replica):
    """As a mask: no delta of such a model was finite, and each was refused."""
    published = [torch.randn(numel).bfloat16() for numel in replica.layout.numels]
    published[0][1] = -torch.inf
    it = Replica(replica.model, replica.layout)
    for index in replica.indices:
        it.adopt(index, published[index])
    move(replica)
    sent = [it.delta(index) for index in replica.indices]
    assert (sent[0][1], sent[0].isfinite().all()) == (0.0, True)
    it.rebase(0, published[0], sent[0])
    assert (it.whole(0)[1], it.delta(0)[1]) == (-torch.inf, 0.0)
    with torch.no_grad():
        replica.model[1].bias[0] = torch.nan
    assert not it.delta(len(published) - 1).isfinite().all(), "what was trained is judged"


# ---- a run --------------------------------------------------------------------------------------


def test_a_run_with_overlap_commits_every_sample_once_whatever_dies(tmp_path):
    settings = SETTINGS | {"local_scheduler.gpus": 1}
    with running(tmp_path, settings, samples=3000, step_s=0.05) as run:
        run.versions(6)
        alone = run.commits()
        run.set_capacity(2)
        run.workers(2)
        run.versions(1)
        os.kill(run.trainer_of(1), signal.SIGKILL)
        run.versions(2)
        run.scheduler.preempt(run.jobs()["worker", 0].job_id)
        run.versions(2)
        run.kill("redis-server")
        run.pace(0)
        run.finish()  # and audits
        commits = run.commits()
    every = [delta for commit in commits[1:] for delta in commit.deltas]
    assert sum(delta.tokens for delta in every) == 3000
    assert all(1 <= delta.steps <= INNER_STEPS for delta in every)
    assert commits[-1].loss < commits[1].loss / 2
    are_begun_ahead(alone)


def are_begun_ahead(commits: list[Commit]) -> None:
    """A rebased round has its K steps with those before its base was there, and its samples are
    those that were trained for it."""
    begun = [
        delta.delivered - delta.seconds < before.time
        for before, commit in zip(commits[1:], commits[2:], strict=False)
        for delta in commit.deltas
    ]
    assert any(begun), "no round began before its base was committed"
    for commit in commits[2:6]:
        (delta,) = commit.deltas
        assert delta.steps == INNER_STEPS
        samples = sum(stop - start for _, start, stop in delta.samples)
        assert samples == delta.tokens == 4 * INNER_STEPS
        assert math.isfinite(delta.first_loss)
