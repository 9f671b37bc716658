"""From one mode to the other: exactly the same parameters, once, whoever is killed when.

pytest tests/saved/test_handover.py
"""

import itertools
import os

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpoint_ranks import make, train
from elastic.base.errors import ElasticError
from elastic.run.audit import audit
from elastic.run.rundir import RunDir
from elastic.saved import inner_state, storage
from elastic.saved.checkpoint import Checkpoints
from elastic.saved.handover import to_local, to_sync
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.saved.versions import VersionDraft, read_exactly, read_params, remove_drafts
from elastic.train.group import Group
from forks import KILLED, killed_at
from helpers import commit_of

SAMPLES = 100


@pytest.fixture
def begun(run: RunDir) -> RunDir:
    """A run with version 0, of the model that `make(1)` gives."""
    net, _ = make(1)
    layout = Layout.of(shapes(net), 200)
    assert len(layout.fragments) > 2
    replica, draft, files = Replica(net, layout), VersionDraft(run, 0, "slot0.1"), []
    for index in range(len(layout.fragments)):
        params = replica.whole(index)
        files += draft.write_fragment(layout, index, params, torch.ones_like(params))
    draft.commit(layout, files, commit_of(
        master_epoch=0, epochs=1, layout=layout.hash, dataset_samples=SAMPLES,
        total_tokens=SAMPLES, running={"loss": 2.5, "weight": 8.0},
    ))
    return run


def trained(run: RunDir, step: int, base: int = 0, tokens: int = 10):
    """Train on from `base` and save; the model as it is then."""
    net, optimizer = make(2)
    to_sync(run, base, net)
    train(net, optimizer)
    before = run.commits.of(base).tokens
    samples = [[0, before, tokens]] if tokens > before else []
    who = {"role": "trainer", "slot": 0, "attempt": 1}
    delta = {**who, "steps": 1, "samples": samples, "loss": 1.0}
    extra = {
        "base_version": base, "tokens": tokens, "samples": samples, "skipped": [], "loss": 1.0,
        "deltas": [{**delta, "tokens": tokens - before}], "dataset_samples": SAMPLES,
        "epochs": 1, "total_tokens": SAMPLES,
    }
    Checkpoints(run, Group(), f"job{step}").save(step, net, optimizer, extra)
    return net


def assert_is(run: RunDir, version: int, net) -> None:
    """The version holds exactly the parameters of `net`, and what workers pull is their bf16."""
    commit, layout = run.commits.of(version), Layout.of(shapes(net), 200)
    replica = Replica(net, layout)
    for index in range(len(layout.fragments)):
        params, momentum = read_exactly(run, commit, layout, index)
        assert torch.equal(params, replica.whole(index))
        assert torch.equal(read_params(run, commit, layout, index), params.bfloat16())
        assert not momentum.any()


def test_parameters_go_there_and_back_bit_for_bit(begun):
    net, _ = make(3)
    to_sync(begun, 0, net)
    for one, other in zip(net.parameters(), make(1)[0].parameters(), strict=True):
        assert torch.equal(one, other)
    net = trained(begun, 5)
    commit, refused = to_local(begun, begun.commits.newest(), 3)
    assert (commit.version, commit.master_epoch, commit.tokens, refused) == (1, 3, 10, [])
    assert_is(begun, 1, net)
    again, _ = make(4)
    to_sync(begun, 1, again)
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert audit(begun.path, keep=2)["problems"] == []


def grown(net) -> None:
    net.more = torch.nn.Parameter(torch.zeros(3))


def shrunk(net) -> None:
    del net.head


def reshaped(net) -> None:
    net.head = torch.nn.Linear(7, 5)


@pytest.mark.parametrize(
    ("change", "name"), [(grown, "more"), (shrunk, "head.bias"), (reshaped, "head.bias")]
)
def test_a_model_that_is_not_the_runs_any_more_is_refused_by_name(begun, change, name):
    """What it had grown went on as it was made, which may be memory that nobody has set."""
    net, _ = make(1)
    change(net)
    with pytest.raises(ElasticError, match=f"model of the task is not the run's: {name}"):
        to_sync(begun, 0, net)


def test_what_was_before_sync_mode_is_compared_with_nothing_after_it(begun):
    """The loss of the last round before it took all of sync mode back; moments were called new."""
    net = trained(begun, 5)
    state = inner_state.Pointer(1, 1, 0, ())
    inner_state.publish(begun, state)
    assert inner_state.choose(begun, 1, 0, 3)[0] == state
    commit, _ = to_local(begun, begun.commits.newest(), 3)
    assert commit.running == {"loss": 0.0, "weight": 8.0}
    assert inner_state.choose(begun, 1, commit.version, 3) == (None, "fresh")
    state = inner_state.Pointer(1, 1, commit.version, ())
    inner_state.publish(begun, state)
    assert inner_state.choose(begun, 1, commit.version, 3)[0] == state
    assert_is(begun, 1, net)


def test_a_model_in_a_wrapper_leaves_sync_mode_too(run):
    """torch.compile and activation checkpointing put words into names, which DCP leaves out."""
    net = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 1))
    net = torch.compile(net, backend="eager")
    layout, draft = Layout.of(shapes(net), 1 << 20), VersionDraft(run, 0, "slot0.1")
    zeros = torch.zeros(layout.numels[0])
    commit = commit_of(layout=layout.hash, dataset_samples=SAMPLES)
    draft.commit(layout, draft.write_fragment(layout, 0, zeros, zeros.clone()), commit)
    extra = {"base_version": 0, "tokens": 10, "samples": [[0, 0, 10]], "loss": 1.0, "deltas": []}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, extra)
    commit, refused = to_local(run, run.commits.newest(), 1)
    assert (commit.version, refused) == (1, [])
    assert_is(run, 1, net)


def test_only_what_was_trained_on_top_of_the_newest_version_counts(begun):
    trained(begun, 1)
    first, _ = to_local(begun, begun.commits.newest(), 1)
    assert to_local(begun, first, 2)[0].version == 1  # it has been taken
    trained(begun, 9, base=0, tokens=90)  # by a trainer that does not know it yet
    trained(begun, 2, base=1, tokens=10)  # that has trained nothing
    assert to_local(begun, first, 2)[0].version == 1
    trained(begun, 3, base=1, tokens=30)
    assert to_local(begun, first, 2)[0].tokens == 30
    assert audit(begun.path)["problems"] == []


def test_what_a_checkpoint_consists_of_is_read_once(begun, monkeypatch):
    """And not for each fragment: of 256 ranks that took minutes."""
    made, unpickler = [], storage._Unpickler
    trained(begun, 1)
    monkeypatch.setattr(storage, "_Unpickler", lambda file: made.append(file) or unpickler(file))
    assert to_local(begun, begun.commits.newest(), 1)[0].version == 1
    assert len(made) == 1


def test_a_damaged_checkpoint_is_not_taken_but_the_one_before(begun):
    net = trained(begun, 1)
    trained(begun, 2, tokens=20)
    (begun.path / "checkpoints/step-00000002/.metadata").write_bytes(b"\x80")
    commit, (reason,) = to_local(begun, begun.commits.newest(), 1)
    assert commit.tokens == 10
    assert "step 2: committed file is damaged" in reason
    assert_is(begun, 1, net)


def test_killed_at_any_moment_it_is_done_again_and_once(begun, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    outcomes = []
    for epoch in itertools.count(1):
        before = begun.commits.newest()
        net = trained(begun, epoch, before.version, before.tokens + 1)
        code = killed_at(epoch, lambda c=before, e=epoch: to_local(begun, c, e)[0])
        assert code in (0, KILLED)
        outcomes.append(begun.commits.newest_version() > before.version)
        newest = begun.commits.newest()
        remove_drafts(begun, newest.version)
        commit, refused = to_local(begun, newest, epoch)
        assert (commit.version, refused) == (before.version + 1, [])
        assert_is(begun, commit.version, net)
        if code == 0:
            break
    assert outcomes == sorted(outcomes)  # first not committed, from one call on committed
    assert 2 < sum(outcomes) < epoch - 10
    assert audit(begun.path, keep=begun.commits.newest_version())["problems"] == []


def test_closing_says_why_the_processes_of_a_mode_leave(run):
    mode, other = ("local", "sync") if run.control().mode == "local" else ("sync", "local")
    assert [run.closing(), run.closing(mode)] == ["", ""]
    assert run.closing(other) == f"going on in {mode} mode"
    run.set_control(mode=other)
    assert [run.closing(), run.closing(mode)] == ["", f"going on in {other} mode"]
    run.set_control(state="stopped")
    assert [run.closing(), run.closing(mode)] == ["stopped", "stopped"]
    run.mark_done({"version": 1})
    assert run.closing() == "done"
