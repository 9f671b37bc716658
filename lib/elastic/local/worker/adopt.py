"""The versions that a worker trains on. Before its first round version 0 is found, or
made from the worker's model, and a data set or a model that is not the run's is refused.
The next version is waited for and loaded, and the steps ahead are put on top of it.
"""

import time
from dataclasses import replace
from functools import partial

from torch.nn import Module

from elastic.base.config import Config
from elastic.base.errors import ElasticError, TryAgain
from elastic.local.worker.deliver import Delivery
from elastic.local.worker.in_hand import InHand, WorkerRound
from elastic.local.worker.line import Line
from elastic.local.worker.moments import Moments
from elastic.run.records import Commit, Outcome
from elastic.run.shuffle import check_size
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, refuse_other, shapes
from elastic.saved.versions import VersionDraft, read_layout
from elastic.train.group import Group
from elastic.train.inner_optimizer import Probe


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
    most_s = line.run.config().health.hang_timeout_s

    def ready(store) -> list[int]:
        """One that hangs while it loads has its lease for ever: the others do not wait."""
        now, slots = store.now(), store.slots().values()
        return [each.slot for each in slots
                if each.state not in ("loading", "blocked") or now - each.moved < most_s]

    while line.run.commits.told_version() < 0:
        slots = line.reach(ready)
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
    )


class Adoption:
    def __init__(self, hand: InHand, moments: Moments, delivery: Delivery, model: Module):
        self._hand, self._line, self.probe = hand, hand.line, Probe(model, near=0.5, may_ignore=3)
        self._moments, self._delivery = moments, delivery
        self._exchange, self._group = delivery.exchange, delivery.exchange.group

    def newest(self) -> Outcome:
        """Wait for a version newer than the last one, and load it; if the round is void,
        go back to the base. Returns the worker's outcome when it is time to leave, else
        AT_WORK, which is "". Collective."""
        hand = self._hand
        version, outcome, was_void = self._group.decide(lambda: [*self._wait(), hand.was_void])
        hand.was_void = False
        if outcome:
            return Outcome(outcome)
        if version > hand.round.base:
            self._adopt(version)
        elif was_void:
            hand.round = WorkerRound(version, time.monotonic())
            self._exchange.replica.restore()
        return Outcome.AT_WORK

    def final(self) -> None:
        """The run is done: leave its last version in the model."""
        self._hand.ahead = None
        line = self._line
        told = self._group.decide(lambda: max(line.news.version, line.run.commits.told_version()))
        self._load_newest(told)

    # ---- what to train on

    def _wait(self) -> tuple[int, Outcome]:
        """Rank 0: (version, AT_WORK) once there is one to train on, (-1, outcome) to
        leave."""
        line, base = self._line, self._hand.round.base
        if base >= 0:
            line.say(state="waiting")
        while True:
            news = line.wait(lambda news: news.version > base or news.over)
            if line.notice:
                return -1, Outcome.YIELDED
            if news.over:
                return -1, Outcome.DONE if news.state == "done" else Outcome.STOPPED
            if news.version > base:
                return news.version, Outcome.AT_WORK
            if base >= 0 and self._try_to_go_on():
                return base, Outcome.AT_WORK

    def _try_to_go_on(self) -> bool:
        """Rank 0: go on with the same base. True if there is something to train; else the
        delta waits to be merged, and is offered again if a new server has forgotten it."""
        hand, done = self._hand, self._hand.round
        if not done.header:
            return True
        hand.tell_new_master()
        if not self._delivery.keep_offered(done):
            hand.void("were rejected")  # its samples are others' by now
            return True
        if done.steps or hand.is_over():
            return False
        return hand.ask_again()

    # ---- a version

    def _adopt(self, version: int) -> None:
        base = self._hand.round.base
        self.probe.before()
        self._drop_reverted(range(base + 1, version + 1))
        commit = self._load_newest(version)
        version = commit.version
        if base < 0:
            self._moments.begin(version)
        self.probe.placed(self._hand.round.steps)
        self._hand.begin(commit, self._round_on(version))
        self._line.say(state="training", version=version, step=0)

    def _drop_reverted(self, versions: range) -> None:
        """Drop the steps ahead if one of these versions reverts the one that they were
        done on: their samples are trained again."""
        hand = self._hand
        newer = map(self._line.commit, versions) if hand.ahead else ()
        if any(commit.taken_back == hand.round.base for commit in newer):
            hand.queue, hand.ahead = hand.ahead.round.samples + hand.queue, None

    def _load_newest(self, version: int) -> Commit:
        """Load a version, or the newest one if it is pruned by now: this worker or its
        master may have slept."""
        commit = self._line.commit(version)
        while True:
            try:
                self._load(commit)
                return commit
            except ElasticError:  # on all ranks
                newest = self._group.decide(self._line.run.commits.told_version)
                if newest <= commit.version:
                    raise
                commit = self._line.commit(newest)

    def _load(self, commit: Commit) -> None:
        """Load a version's parameters. Raises ElasticError if it cannot be read."""
        ahead = self._hand.ahead
        fetched = ahead.fetched.get(commit.version) if ahead else None
        if ahead and ahead.round.steps:
            # All of it first: if it cannot be read, nothing is rebased.
            fetched = fetched or self._exchange.fetch(commit)
            self._exchange.rebase(ahead.deltas, fetched)
        else:
            self._exchange.adopt(commit, fetched)

    def _round_on(self, version: int) -> WorkerRound:
        """The round on top of a version just adopted; it has the steps ahead."""
        ahead, self._hand.ahead = self._hand.ahead, None
        if ahead and ahead.round.steps:
            return replace(ahead.round, base=version, has_stepped=False)
        stall_s = ahead.round.stall_s if ahead else 0.0
        return WorkerRound(version, time.monotonic(), stall_s=stall_s)
