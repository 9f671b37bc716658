"""A rank of a synchronous job: who it is, what it wants, and whether it is still wanted
itself."""

import contextlib
import time
from dataclasses import dataclass
from enum import IntEnum

from elastic.base.config import Config
from elastic.base.durable import until_written
from elastic.base.environment import env
from elastic.base.errors import Fenced, TryAgain
from elastic.base.signals import KILL_WAIT_S, Notice
from elastic.base.units import NOTICE_MARGIN_S
from elastic.jobs.slurm_info import kill_at
from elastic.run.rundir import RunDir
from elastic.train.group import Group
from elastic.train.task import Interrupted

CONTROL_S = 2.0  # between looks at what the user wants


class Wish(IntEnum):
    """What a rank wants to do now; of the wishes of all ranks the largest wins."""

    GO_ON = 0
    NOTICE = 1
    STOPPED = 2
    FENCED = 3


@dataclass(frozen=True)
class Rank:
    """One process of the job. Rank 0 alone speaks: `say` and `event` do nothing
    elsewhere."""

    run: RunDir
    config: Config
    group: Group
    attempt: int
    job_id: str

    def say(self, text: str) -> None:
        if self.group.leads:
            print(f"trainer  {text}", flush=True)

    def event(self, kind: str, **fields) -> None:
        if self.group.leads:
            self.run.event(kind, **fields)


class Wishes:
    """What this rank wants, and how much time a notice leaves."""

    def __init__(self, rank: Rank, notice: Notice):
        self._rank, self.notice = rank, notice
        notice.window_s = float(env("ELASTIC_NOTICE_S", "0")) or KILL_WAIT_S
        self._epoch = self._version = 0
        self._control_at = 0.0

    def mine(self) -> Wish:
        """The wish of this rank. Rank 0 also looks at what the user wants, and whether
        another attempt has the run. While the filesystem is silent nothing changes."""
        if self.notice:
            return Wish.NOTICE
        now = time.monotonic()
        if self._rank.group.leads and now - self._control_at >= CONTROL_S:
            self._control_at = now
            with contextlib.suppress(TryAgain):
                try:
                    self.fence()
                except Fenced:
                    return Wish.FENCED
                if self._rank.run.closing("sync"):
                    return Wish.STOPPED
        return Wish.GO_ON

    def of_all(self, *numbers: float) -> tuple[Wish, list[float]]:
        """The largest wish of all ranks, and the sums of their `numbers`. Each of them
        has to call."""
        mine = self.mine()
        sums = self._rank.group.sum(*(mine is wish for wish in Wish), *numbers)
        return max(wish for wish in Wish if sums[wish]), sums[len(Wish) :]

    def interrupt(self) -> None:
        """Raise Interrupted, on all ranks, if any of them wants to stop: each of them has
        to call."""
        wish, _ = self.of_all()
        if wish != Wish.GO_ON:
            raise Interrupted(wish)

    def left_s(self, needed_s: float) -> float:
        """Seconds until the kill, less a margin for the last words. Slurm knows what the
        notice is for, and may leave more time than it does at a preemption. It is asked
        only if that is too short, as the answer may take half a minute."""
        left_s = self.notice.left_s(time.time())
        if left_s < needed_s and (known_at := kill_at()):
            left_s = known_at - NOTICE_MARGIN_S - time.time()
        return left_s

    # ---- rank 0: one writer of the run

    def claim_epoch(self) -> None:
        """Trainers claim an epoch, too, and so fence masters: from here on a master may
        still make the commit that it is about to make, and no other."""
        rank = self._rank
        who = {"job_id": rank.job_id, "attempt": rank.attempt, "time": time.time()}
        self._epoch = until_written(lambda: rank.run.masters.claim(who), self.notice.__bool__)
        self._version = rank.run.commits.newest_version()

    def fence(self) -> None:
        """Raise Fenced if a later attempt, or a master, has the run, or there is a newer
        version: checkpoints on top of the older one count for nothing."""
        run, attempt = self._rank.run, self._rank.attempt
        is_other = run.slots.latest(0) > attempt or run.masters.newest() > self._epoch
        if is_other or run.commits.newest_version() > self._version:
            raise Fenced(f"attempt {attempt}: a later one, or a master, has taken over")
