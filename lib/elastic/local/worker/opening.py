"""Before a worker's first round: find version 0, or make it from the worker's model.

A data set or a model that is not the run's is refused.
"""

import time
from functools import partial

from torch.nn import Module

from elastic.base.config import Config
from elastic.base.errors import TryAgain
from elastic.local.worker.line import Line
from elastic.run.records import Commit
from elastic.run.shuffle import check_size
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, refuse_other, shapes
from elastic.saved.versions import VersionDraft, read_layout
from elastic.train.group import Group


def layout_of_run(
    line: Line, group: Group, model: Module, samples: int, tokens_per_sample: int
) -> Layout:
    """The layout of the run's versions; version 0 is made if there is none. Collective.

    Raises ElasticError if the run has another number of samples, or another model.
    """
    run = line.run
    if group.decide(lambda: _is_to_create(line)):
        config = run.config()
        layout = Layout.of(shapes(model), config.local_sgd.fragment_bytes)
        commit = first_commit(layout, config, samples, tokens_per_sample)
        _create(line, group, Replica(model, layout), commit)
    newest = line.commit(run.commits.told_version())
    layout = read_layout(run, newest.version)
    check_size(samples, newest.dataset_samples)
    refuse_other(model, layout)
    return layout


def _is_to_create(line: Line) -> bool:
    """Rank 0: is version 0 this worker's to make? The live worker with the lowest slot
    makes it, and the others wait for it here: if each made one they would fill the disk.
    Raises TryAgain at a notice, or if the run is over."""
    while line.run.commits.told_version() < 0:
        slots = line.reach(lambda store: store.slots())
        if slots is not None and line.place.slot <= min(slots, default=line.place.slot):
            return True
        line.say(state="waiting")
        if line.wait(lambda news: news.version >= 0 or news.over).over or line.notice:
            raise TryAgain("there is no version 0 yet", "its workers make it, once they are there")
    return False


def _create(line: Line, group: Group, replica: Replica, commit: Commit) -> None:
    """Commit version 0, with an outer momentum of 0, unless another worker is first.
    Collective."""
    layout, draft, files = replica.layout, None, []
    if group.leads:
        draft = VersionDraft(line.run, 0, f"slot{line.place.slot}.{line.place.attempt}")
    for index in range(len(layout.fragments)):
        params = replica.whole(index)
        if draft:
            zeros = params.new_zeros(params.shape)
            files += line.written(partial(draft.write_fragment, layout, index, params, zeros))
    if draft:
        line.written(lambda: draft.commit(layout, files, commit))
    group.broadcast("version 0 is there")


def first_commit(layout: Layout, config: Config, samples: int, per_sample: int) -> Commit:
    """The commit of version 0."""
    train = config.train
    total = max(1, train.max_tokens or train.epochs * samples * per_sample)
    return Commit(
        version=0, master_epoch=0, time=time.time(), layout=layout.hash, dataset_samples=samples,
        epochs=train.epochs, total_tokens=total, tokens=0, samples=(), deltas=(), workers=1,
    )  # fmt: skip
