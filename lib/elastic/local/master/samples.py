"""The run's samples as its master has them: the ledger, asks, who has told. Pure.

A master that is new, or has a new Redis, does not know what each worker holds. Until
every worker that may hold samples has told it, the samples are shut: the master grants
none, reclaims none, and closes no round.
"""

from collections.abc import Iterable

from elastic.run.ledger import Ledger, Owner, Range, Ranges
from elastic.run.membership import Slot
from elastic.run.records import Commit, Delta


class Samples:
    def __init__(self):
        self.ledger: Ledger | None = None
        self.known = 0  # versions whose commits the master has read
        self.reverted: set[int] = set()  # versions that a later one has reverted
        self._committed = Ranges()
        # The newest ask's number, and the answer to it.
        self.granted: dict[Owner, tuple[int, list[Range]]] = {}
        self.open_at = 0.0  # Redis TIME
        self._may_open_at = 0.0  # not earlier, whoever has told
        self._has_told: set[Owner] = set()  # workers that have asked this master, or declared

    def learn(self, commits: Iterable[Commit]) -> None:
        """Note the samples that these commits have; they follow those that are known."""
        for commit in commits:
            self._committed.add(commit.samples)
            self.reverted |= {commit.taken_back} - {None}
            self.known = commit.version + 1

    def begin(self, commit: Commit) -> None:
        """Begin a ledger as of `commit`. What workers hold stays theirs: they have told
        this master once, and would not say it again."""
        held = self.ledger.held if self.ledger else {}
        self.ledger = Ledger(commit.dataset_samples, commit.epochs, self._committed)
        for owner, ranges in held.items():
            self.ledger.hold(owner, ranges)

    def shut(self, now: float, newest: Iterable[Delta], health) -> None:
        """Shut the samples until agents have had the time to claim their leases again,
        and workers to say, between two steps, what they hold. `newest`: the deltas of the
        newest version."""
        # What sync mode has committed does not say how long a step takes.
        deltas = [delta for delta in newest if delta.steps and delta.seconds]
        step_s = max((delta.seconds / delta.steps for delta in deltas), default=0.0)
        self._may_open_at = now + 2 * health.heartbeat_s + 1.0
        wait_s = max(health.stall_after_s, min(step_s, health.hang_timeout_s))
        self.open_at = self._may_open_at + wait_s

    def open_early(self, slots: dict[int, Slot], now: float) -> None:
        """Open them now if every worker that may hold samples has told this master."""
        holders = {(s.slot, s.attempt) for s in slots.values() if s.state != "loading"}
        if now >= self._may_open_at and holders <= self._has_told:
            self.open_at = min(self.open_at, now)

    def hear(self, owner: Owner, sequence: int, held: Iterable[Range]) -> bool:
        """`owner` asks, and says what it holds. False: it repeats the ask that is in
        `granted`, and gets the same answer, so that nothing is granted twice."""
        self._has_told.add(owner)
        if owner in self.granted and self.granted[owner][0] == sequence:
            return False
        self.ledger.keep(owner, held)
        return True

    def reclaim(self, slots: dict[int, Slot], blocked_at: float) -> None:
        """Samples of workers that are gone are free again, and of those whose node has
        refused to write since before `blocked_at`: it may do so for ever."""
        alive = {(worker.slot, worker.attempt) for worker in slots.values()
                 if worker.state != "blocked" or worker.moved > blocked_at}
        for owner in [owner for owner in self.ledger.held if owner not in alive]:
            self.ledger.give_back(owner)
            self.granted.pop(owner, None)
