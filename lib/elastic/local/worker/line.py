"""A training process's line to the run: what the master says, samples, offers; and
progress to the agent.

The line may break at any time: Redis is restarted, the master moves to another node. Then
every call looks the newest endpoint up again and repeats itself (`reach`); all of them
are safe to repeat. A thread keeps `news` fresh; it only reads. Of the ranks of a worker
only rank 0 has a `Line`; the others have a `RankLine`, which reads and writes files as
patiently, and tells the agent that a disk is full, but says and hears nothing else.
"""

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

from elastic.base.durable import STUCK_S, patiently, until_written
from elastic.base.environment import env
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.signals import KILL_WAIT_S, Notice
from elastic.local.store import Ask, Store, WorkerStore
from elastic.run.ledger import Range
from elastic.run.records import Commit, Header
from elastic.run.rundir import RunDir

POLL_S = 1.0
RETRY_S = 0.5
LOOK_S = 0.5  # between two looks at what may change at any time
SAY_S = 0.5  # between two reports to the agent, without news
UNSEEN_S = 120.0  # how long a filesystem may hide a version

S, T = TypeVar("S", bound=Store), TypeVar("T")


class Place(NamedTuple):
    """Who this process is: the agent says so in the environment."""

    run: RunDir
    slot: int
    attempt: int
    job_id: str
    rank: int = 0
    world: int = 1
    progress_fd: int = -1
    notice_s: float = KILL_WAIT_S

    @property
    def owner(self) -> tuple[int, int]:
        """Who owns this process's deltas and lease."""
        return self.slot, self.attempt

    @classmethod
    def from_env(cls) -> "Place":
        """As the agent says. Raises ElasticError if no agent has started this process."""
        folder = env("ELASTIC_RUN_DIR")
        if folder is None:
            what = "ELASTIC_RUN_DIR is not set: `elastic agent` did not start this process"
            hint = 'set run.command = ["{python}", "train.py"] and use elastic-submit'
            raise ElasticError(what, hint)
        return cls(
            RunDir(Path(folder)), int(env("ELASTIC_SLOT")), int(env("ELASTIC_ATTEMPT")),
            env("ELASTIC_JOB_ID", ""), int(env("RANK", "0")), int(env("WORLD_SIZE", "1")),
            _opened(env("ELASTIC_PROGRESS")), float(env("ELASTIC_NOTICE_S") or KILL_WAIT_S),
        )


def _opened(path: str | None) -> int:
    """The pipe that the agent reads, also if a launcher is between; -1: nobody reads."""
    try:
        return os.open(path, os.O_WRONLY) if path else -1
    except OSError as error:
        inherited = int(path.rpartition("/")[2])
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(inherited).st_mode):
                return inherited
        what, hint = f"no way to the agent: {error}", "a container has to show the node's /proc"
        raise ElasticError(what, hint) from None


class News(NamedTuple):
    """What the master last said."""

    version: int = -1
    called: int = -1  # the version whose round is about to close
    state: str = "unknown"  # unknown | running | stopping | done
    epoch: int = -1
    due: float = inf  # when the open round is, on this process's monotonic clock

    @property
    def over(self) -> bool:
        return self.state in ("stopping", "done")


class RankLine:
    """What every rank has; all that a rank has that does not lead. It hears nothing, and
    says nothing but to its agent that it is blocked."""

    def __init__(self, place: Place, notice: Notice):
        self.place, self.run, self.notice = place, place.run, notice
        self.news = News()
        self._blocked_s = 0.0

    open = close = say = moved = event = warn = offer = lambda *_args, **_fields: None

    def written(self, write: Callable[[], T]) -> T:
        """What `write()` returns, once the disk has room. Raises TryAgain at a notice."""
        def say_why(error: OSError | TryAgain) -> None:
            self._blocked_s += STUCK_S
            self.tell_agent({"state": "blocked", "trouble": str(error)})

        return until_written(write, self.notice.has_run_out, say_why)

    def tell_agent(self, said: dict) -> None:
        """Any rank may: if one is blocked the others wait for it, and say nothing."""
        if self.place.progress_fd >= 0:
            with contextlib.suppress(BrokenPipeError):  # no agent: so are we, soon
                os.write(self.place.progress_fd, json.dumps(said).encode() + b"\n")

    def clock(self) -> float:
        """Seconds; it stands still while the disk has no room."""
        return time.monotonic() - self._blocked_s

    def commit(self, version: int) -> Commit:
        """The commit of a version that somebody has seen: on NFS this machine may see it
        half a minute later. Raises ElasticError after UNSEEN_S, and TryAgain at a notice."""
        def is_leaving() -> bool:
            self.say(state="loading")
            return bool(self.notice)

        try:
            return patiently(self.run.commits.known, version, hurry=is_leaving, for_s=UNSEEN_S)
        except TryAgain as silence:
            if self.notice:
                raise
            hint = f"is {self.run.path} the same folder on all nodes?"
            raise ElasticError(silence.what, hint) from None


class Line(RankLine):
    """Rank 0's line. To be opened and closed: it owns a thread and connections."""

    def __init__(self, place: Place, notice: Notice):
        super().__init__(place, notice)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._stores: dict[type[Store], Store] = {}  # by role
        self._sequence = 0
        self._said: dict = {}
        self._said_at = 0.0
        self._moves = 0
        self._warned: set[str] = set()

    def open(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="line").start()

    def close(self) -> None:
        self._closed.set()
        self._stores.clear()

    # ---- calls that survive a lost line

    def reach(self, action: Callable[[S], T], kind: type[S] = WorkerStore) -> T | None:
        """`action(store)`, again and again until Redis answers; None if it is time to leave
        before: what is in hand can be left in the run directory, and needs the time."""
        while True:
            self.say()
            try:
                return action(self._store(kind))
            except TryAgain:
                if self._said.get("state") == "training":  # and cannot go on without a master
                    self.say(state="waiting")
                self._stores.clear()  # not closed: a courier may be using one
                if self.is_leaving():
                    return None
                self._closed.wait(RETRY_S)

    def is_leaving(self) -> bool:
        """Has a notice come, or is the run over?"""
        return bool(self.notice) or self.news.over

    def _store(self, kind: type[S]) -> S:
        """The store at the newest known master: an older master's server may still
        answer."""
        store = self._stores.get(kind)
        if store is None or store.epoch < self.news.epoch:
            store = self._stores[kind] = kind.open(self.run)
        return store

    def offer(self, header: Header) -> None:
        """Announce a delta, once this attempt has its lease. If it is time to leave
        before, the header has to be left in the run directory. Raises Fenced if files say
        that a higher attempt has the slot."""
        while not self.reach(lambda store: store.offer(*header.key, asdict(header))):
            with contextlib.suppress(TryAgain):
                self.run.slots.fence(*self.place.owner)
            if self.is_leaving():
                return
            time.sleep(RETRY_S)  # the agent claims the lease again within a heartbeat

    def ask(self, want: int, held: list[Range], enough: Callable) -> list[Range] | None:
        """Ask for samples, and wait for the answer; None if `enough()` is true before."""
        ask = self._ask(want, held)
        while not enough():
            granted = self.reach(lambda store: (store.ask(ask), store.granted(ask, POLL_S))[1])
            if granted is not None:
                return granted
            self.say(state="waiting")  # to wait for the master is no hang
        return None

    def declare(self, held: list[Range]) -> int | None:
        """Tell a master which samples are still held, wanting none. Returns its epoch;
        None if it is time to leave before."""
        ask = self._ask(0, held)
        return self.reach(lambda store: store.ask(ask))

    def _ask(self, want: int, held: list[Range]) -> Ask:
        self._sequence += 1
        return Ask(*self.place.owner, self._sequence, want, tuple(held))

    # ---- news

    def wait(self, until: Callable[[News], bool]) -> News:
        """Wait a moment for news that satisfy `until`, or for a notice."""
        with self._changed:
            self._changed.wait_for(lambda: until(self.news) or self.notice, LOOK_S)
            return self.news

    def refresh(self) -> News:
        """Read the master's word now, as a reader: a worker's password does not open the
        master's hash (redis_server.ROLES)."""
        if said := self.reach(lambda store: (store.master(), store.now()), kind=Store):
            self._note(*said)
        return self.news

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                store, lease_s = Store.open(self.run), self.run.config().health.lease_s
                while not self._closed.is_set():
                    store.meet()  # fails if a newer master has made it leave this one
                    self._note(store.master(), store.now())
                    if not store.has_master(lease_s):  # a site's server, say
                        self._note_if_over()
                    store.hear("ctl", POLL_S)
            except (ElasticError, OSError):  # OSError: too many files are open
                self._note_if_over()
                self._closed.wait(RETRY_S)

    def _note_if_over(self) -> None:
        with contextlib.suppress(ElasticError, OSError):
            if over := self.run.closing("local"):
                state = "done" if over == "done" else "stopping"
                self._note({"state": state, "version": "-1"})

    def _note(self, master: dict[str, str], now: float = 0.0) -> None:
        """Make `news` of the master's word, whose times are Redis TIME, as `now` is."""
        if "version" not in master:
            return  # Redis was emptied, or has had no master yet: the old news stay
        version, called = int(master["version"]), int(master.get("call", -1))
        with self._changed:
            is_new = version >= self.news.version
            left_s = float(master.get("due", inf)) - now if is_new else inf
            version, epoch = max(version, self.news.version), int(master.get("epoch", -1))
            self.news = News(version, called, master["state"], epoch, time.monotonic() + left_s)
            self._changed.notify_all()

    # ---- to the agent, and to people

    def event(self, kind: str, **fields) -> None:
        """An event of this slot."""
        self.run.event(kind, slot=self.place.slot, **fields)

    def warn(self, reason: str) -> None:
        """Print the reason and write a warning event, once; "" is none."""
        if reason and reason not in self._warned:
            self._warned.add(reason)
            print(f"worker  {reason}", flush=True)
            self.event("warning", reason=reason)

    def moved(self) -> None:
        """Note that a fragment went out or came in: that is no hang."""
        self._moves += 1
        self.say(moves=self._moves)

    def say(self, **progress) -> None:
        """Report progress, or just being alive, to the agent: at once if the state
        changed, else every SAY_S."""
        before = self._said.get("state")
        self._said |= progress
        is_news = self._said.get("state") != before or "end" in progress
        if not is_news and time.monotonic() - self._said_at < SAY_S:
            return
        self._said_at = time.monotonic()
        self.tell_agent(self._said)
