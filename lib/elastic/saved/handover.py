"""From one mode to the other: a version is what both begin with.

    local -> sync   the trainer loads the newest version; its checkpoints name it as `base_version`
    sync -> local   the master makes the newest checkpoint on top of the newest version the next one

So at any time the newest version, and the newest checkpoint on top of it if there is one,
are what has been trained. A checkpoint's record has all that a commit has: tokens,
samples, a delta that stands for the trainer. Nobody reads the checkpoint any more once
there is a version after the one that it is based on.
"""

import time
from dataclasses import asdict

import torch
from torch import nn

from elastic.run.records import Checkpoint, Commit, as_commit
from elastic.run.rundir import RunDir
from elastic.run.sound import typed
from elastic.saved.checkpoint import find_newest, read_params, reader_of, record_path
from elastic.saved.replica import Replica, refuse_other
from elastic.saved.versions import VersionDraft, read_exactly, read_layout
from elastic.train.group import Group


def to_sync(run: RunDir, version: int, model: nn.Module) -> None:
    """Load a version's parameters, in float32, into a model that may be sharded. Raises
    ElasticError if it is another model."""
    commit, replica = run.commits.known(version), Replica(model, read_layout(run, version))
    refuse_other(model, replica.layout)
    for index in range(len(replica.layout.fragments)):
        params, _momentum = read_exactly(run, commit, replica.layout, index)
        replica.load(index, params)


def to_local(run: RunDir, commit: Commit, epoch: int) -> tuple[Commit, list[str]]:
    """Commit the newest checkpoint on top of `commit`, if it trained anything, as the
    next version.

    Returns the newest commit, and why newer checkpoints were not taken. The outer
    momentum begins anew: it remembers rounds before the checkpoint's steps.
    """
    writer = f"epoch{epoch}"
    saved, refused, _ = find_newest(run, Group(), commit.version)
    if not saved:
        return commit, refused
    trained = typed(Checkpoint, record_path(run, saved.step), as_commit(asdict(saved)))
    if not trained.samples:
        return commit, refused
    layout, files = read_layout(run, commit.version), []
    draft, reader = VersionDraft(run, commit.version + 1, writer), reader_of(run, saved)
    for index, tensors in enumerate(layout.fragments):
        params = read_params(reader, tensors)
        files += draft.write_fragment(layout, index, params, torch.zeros_like(params))
    draft.commit(layout, files, commit.following(
        master_epoch=epoch, time=time.time(), tokens=trained.tokens, samples=trained.samples,
        deltas=trained.deltas, loss=trained.loss, step=saved.step,
        # The next round's loss is not compared with those before the checkpoint's steps.
        running={**(commit.running or {}), "loss": 0.0},
    ))
    return run.commits.newest(), refused
