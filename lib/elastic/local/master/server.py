"""The run's Redis as its master has it: its own or the site's, and who has leases there.

Redis may be gone at any time; the master then opens another one, and goes on. So if a
lease has lapsed, its worker is lost only if Redis answered all the time: else the master
has doubts.
"""

import contextlib
import secrets
import time
from concurrent.futures import Future
from dataclasses import replace

from elastic.base.config import Config
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.network import bind_address
from elastic.jobs import sched_slurm
from elastic.local.master.redis_server import RedisServer, start
from elastic.local.store import MasterStore, Useless, WorkerStore
from elastic.run.membership import Slot, live
from elastic.run.rundir import Endpoint, RunDir

TICK_S = 0.5
LOOK_S = 0.02  # between two looks at the deltas that are being checked
MOST_SLOTS = 10_000
CROWD = 32  # workers; if there are more, a burst of their deliveries is one turn, not hundreds


class Server:
    def __init__(self, run: RunDir, config: Config):
        self.run, self.config = run, config
        self.endpoint: Endpoint | None = None
        self.store: MasterStore | None = None
        self._redis: RedisServer | None = None  # the run's own
        self.attempts: dict[int, int] = {}  # slot -> its newest attempt
        self.has_doubts = False  # a worker without a lease may live
        self.workers: dict[int, Slot] = {}  # those with a lease, as of the last turn
        self._ahead_s = 0.0  # how far Redis TIME is before the clock of this process
        self._looked_at = 0.0  # Redis TIME

    def open(self, epoch: int) -> None:
        """Start the run's server (or use the site's), in place of the one before."""
        self.stop()
        if self.config.redis.url:
            nonce = secrets.token_hex(16)
            self.endpoint = Endpoint("", 0, epoch, self.config.redis.url, nonce=nonce)
        else:
            is_local = self.config.run.scheduler == "local"
            known_as = "127.0.0.1" if is_local else sched_slurm.node_address()
            address = bind_address(self.config.redis.bind, known_as)
            self._redis = start(self.run, self.config, address, epoch)
            self.endpoint = self._redis.endpoint
        self.store = MasterStore.of(self.run, self.endpoint)

    def stop(self) -> None:
        if self._redis:
            self._redis.stop()

    def is_lost(self, error: Exception) -> bool:
        """Is the run's own server gone, or of no use, as `error` says? Not the site's:
        that comes back."""
        own = self._redis
        return own is not None and (isinstance(error, Useless) or not own.alive())

    # ---- the clock

    def read_clock(self) -> float:
        """Redis TIME."""
        now = self.store.now()
        self._ahead_s = now - time.monotonic()
        return now

    def now(self) -> float:
        """Redis TIME, by this process's clock since the last look: it needs no answer."""
        return self._ahead_s + time.monotonic()

    # ---- the ear

    def wait(self, checks: list[Future]) -> list[str]:
        """Wake-ups since the last turn; returns at the first, or when a delta has been
        checked. Raises TryAgain if the run's own server is gone: anybody may have its
        port now, and would be given the password."""
        if self._redis and not self._redis.alive():
            raise TryAgain("redis-server is gone")
        words, until = [], time.monotonic() + TICK_S
        # While a big delta is being checked the master still hears what others ask.
        while not (words or any(check.done() for check in checks) or time.monotonic() > until):
            words = self.store.hear("wake", LOOK_S if checks else TICK_S)
        if words and len(self.attempts) > CROWD:
            time.sleep(min(0.05, 0.0005 * len(self.attempts)))
        return words + self.store.hear("wake", 0)

    # ---- leases

    def introduce(self) -> None:
        """Tell a new server all attempts, so that it fences older ones; also those of
        slots that the run no longer has: their workers may have left deltas."""
        newest = {slot: self.run.slots.latest(slot) for slot in self.run.slots.all()}
        self.attempts |= {slot: attempt for slot, attempt in newest.items() if attempt}
        self.store.set_attempts(self.attempts)

    def disown_older(self) -> None:
        """Make workers leave the server before this one: if its master hangs, it answers
        for hours."""
        with contextlib.suppress(ElasticError):  # it is gone, or is this one (the site's)
            older = WorkerStore.open(self.run)
            older.disown()
            older.close()

    def look(self, now: float) -> dict[int, Slot]:
        """The leases that count, by slot. Also learns new attempts, notes doubts, and
        writes an event for each worker that has joined."""
        slots = self.store.slots()
        self._learn_attempts()
        slots = live(slots, self.attempts, now, self.config.health.hang_timeout_s)
        self.doubt_lapsed_leases(slots, now)
        return self._greet(slots)

    def _learn_attempts(self) -> None:
        """Note new attempts. An attempt counts if its record exists; Redis says only when
        to look for it."""
        told, known = self.store.attempts(), self.attempts
        newer = [slot for slot, attempt in told.items() if attempt > known.get(slot, 0)]
        for slot in [slot for slot in newer if 0 <= slot < MOST_SLOTS]:
            if newest := self.run.slots.latest(slot):
                known[slot] = newest
        if any(told.get(slot, 0) < newest for slot, newest in known.items()):
            self.has_doubts = True  # the server was emptied
        if told != known:
            self.store.set_attempts(known)

    def doubt_lapsed_leases(self, slots: dict[int, Slot], now: float) -> None:
        """Set `has_doubts` if leases have lapsed while Redis answered nobody, or as its
        clock was put back: that says nothing of their workers."""
        before, self._looked_at = self._looked_at, now
        answers_s = self.config.health.lease_s - self.config.health.heartbeat_s
        if before <= now and self.now() - before <= answers_s:
            return  # Redis has answered all the time, and its clock went on
        for slot, known in self.workers.items():
            lease = slots.get(slot)
            has_claimed = lease and lease.attempt == known.attempt and lease.joined > before
            if has_claimed or (not lease and not self._has_left(known)):
                self.has_doubts = True

    def _has_left(self, worker: Slot) -> bool:
        """Has the worker's job written how it ended?"""
        with contextlib.suppress(TryAgain):
            return (self.run.jobs.ending(worker.job_id) or {}).get("state") == "ended"
        return False

    def _greet(self, slots: dict[int, Slot]) -> dict[int, Slot]:
        """The leases, each with the time at which its worker joined first; an event for
        each new worker."""
        for slot, worker in slots.items():
            known = self.workers.get(slot)
            if known and known.attempt == worker.attempt:  # it may have claimed again
                slots[slot] = replace(worker, joined=min(known.joined, worker.joined))
            else:
                self.run.event("join", slot=slot, attempt=worker.attempt,
                               node=worker.node, job_id=worker.job_id)
        self.workers |= slots
        return slots

    def dismiss(self, slots: dict[int, Slot]) -> None:
        """Forget workers without a lease; one that has not said that it left is lost."""
        for slot in [slot for slot in self.workers if slot not in slots]:
            worker = self.workers.pop(slot)
            if not self._has_left(worker):
                self.run.event("lost", slot=slot, attempt=worker.attempt, job_id=worker.job_id,
                               node=worker.node, steps=worker.step)
