"""Versions are validated while the run goes on (`train.validate_every`), so that nobody
trains blind: between two rounds, by the worker with the lowest slot of those whose deltas
are in the version. The others do not wait for it: their round goes on, and none of them
validates meanwhile, so that a long validation costs the run one worker.
"""

import contextlib
import math

from elastic.local.worker.in_hand import InHand
from elastic.run.records import Commit
from elastic.saved.replica import Replica
from elastic.train.device import precision
from elastic.train.group import Group
from elastic.train.task import Interrupted, Task, score


def is_due(commit: Commit, slot: int, every_versions: int) -> bool:
    """Is the version to be validated, and by this slot? 0: none is."""
    if not every_versions or not commit.deltas or commit.version % every_versions:
        return False
    return slot == min(delta.slot for delta in commit.deltas)


class Validation:
    def __init__(self, hand: InHand, task: Task, group: Group, slot: int):
        self._hand, self._task, self._group, self._slot = hand, task, group, slot
        self._every_steps = hand.config.train.validate_every
        self._newest = -1  # that this worker has validated

    def if_due(self, replica: Replica) -> None:
        """Score the version just adopted, if it is due, on all ranks alike: without the
        steps ahead on top of it. A notice ends that."""
        if not self._group.decide(self._is_due):
            return
        commit = self._hand.commit
        self._newest = commit.version
        whole = replica.at_base() if self._hand.round.steps else contextlib.nullcontext()
        try:
            with whole, precision(self._hand.config.train.precision, self._group.device)():
                said = score(self._task, replica.model, self._before_pass)
        except Interrupted:
            return
        if self._group.leads:
            run = self._hand.line.run
            run.scores.add(commit.tokens, said, version=commit.version, slot=self._slot)

    def _is_due(self) -> bool:
        """Rank 0: is the version this worker's to validate?"""
        commit = self._hand.commit
        every_versions = math.ceil(self._every_steps / self._hand.inner_steps)
        if commit.version == self._newest or not is_due(commit, self._slot, every_versions):
            return False
        slots = self._hand.line.reach(lambda store: store.slots())
        return slots is not None and all(s.state != "validating" for s in slots.values())

    def _before_pass(self) -> None:
        """Say that this worker validates, and tell a new master what it holds: a pass may
        take longer than the master waits to be told. Raises Interrupted at a notice."""
        self._hand.line.say(state="validating")
        self._group.decide(self._hand.tell_new_master)
        if self._group.decide(lambda: bool(self._hand.line.notice)):
            raise Interrupted
