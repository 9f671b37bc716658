"""What comes in for the open round: offers are judged, bytes checked, refusals told."""

import re
from concurrent.futures import Future

from elastic.base.durable import UNREAD_S
from elastic.base.errors import TryAgain
from elastic.local.master.averaging import Averager
from elastic.local.master.open_round import OpenRound
from elastic.local.master.server import Server
from elastic.local.rounds import Refusal, Rule, refusal
from elastic.local.transport import Damaged
from elastic.run.ledger import Key, Owner
from elastic.run.records import Header

MOST_REASON = 300  # characters: it may quote what is wrong


class Intake:
    def __init__(self, server: Server, averager: Averager, round_: OpenRound):
        self.server, self.averager, self.round = server, averager, round_
        self.checks: dict[Header, Future] = {}
        self._unread_since: dict[Header, float] = {}  # Redis TIME of the first failure
        self._met: set[tuple[int, str, bytes]] = set()  # what `meet` has taken

    def take_offers(self) -> None:
        version, late = self.round.version, self.round.facts.max_staleness
        # Further back than may be merged: so a delta that is too stale is told so, and does
        # not just get lost. A delta on a version that is not seen here yet waits for it.
        bases = range(max(0, version - late - 2), version + 1)
        for base, offers in self.server.store.offers(bases).items():
            for name, body in sorted(offers.items()):
                self.take(base, name, body)

    def take(self, base: int, name: str, body: bytes) -> None:
        if self.round.seen.get(base, {}).get(name) == body:
            return
        why, header = self.round.read(base, name, body)
        if why:
            if why.rule is Rule.STALE:
                self.averager.drop([header.key])  # nobody else would
            self.reject(name, why, base)
        elif not header.is_pass:
            self.checks[header] = self.averager.check_later(header)

    def _check_again(self, header: Header, silence: TryAgain) -> None:
        """Check a delta again that could not be read, for UNREAD_S: no round may stay
        open for ever because a block of the disk is bad."""
        since = self._unread_since.setdefault(header, self.server.now())
        if self.server.now() - since > UNREAD_S:
            self.withdraw(header.key, refusal(Rule.UNREADABLE, silence.what))
        else:
            self.checks[header] = self.averager.check_later(header)

    def check_accepted(self) -> None:
        """Check again what was to be merged: it, too, may have become unreadable."""
        for checked in self.round.accepted.values():
            self.checks[checked.header] = self.averager.check_later(checked.header)

    def collect_checked(self) -> None:
        for header, future in list(self.checks.items()):
            if not future.done():
                continue
            del self.checks[header]
            try:
                checked = future.result()
            except TryAgain as silence:  # a worker that has left does not offer it again
                self._check_again(header, silence)
                raise
            except Damaged as error:
                self._unread_since.pop(header, None)
                self.withdraw(header.key, error.why)
                continue
            self._unread_since.pop(header, None)
            if header.key not in self.round.accepted:  # else it was checked again
                self.round.accept(checked, self.server.now())
                self.server.run.event("delta", slot=header.slot, attempt=header.attempt,
                                      base=header.base, steps=header.steps, tokens=header.tokens)

    def withdraw(self, key: Key, why: Refusal) -> None:
        """Reject a delta after all whose header was judged good."""
        self.round.forget(key)
        self.reject(f"{key[0]}:{key[1]}", why, key[2])

    def reject(self, name: str, why: Refusal, base: int) -> None:
        """Tell the worker, which starts the round again, and everybody who reads events.

        First the verdict is set, then the offer removed: a worker that finds neither
        would offer the delta again.
        """
        self.round.note_rejected(base, name, why.rule)
        what = {"base": base, "rule": why.rule, "reason": why.reason[:MOST_REASON]}
        is_sound = re.fullmatch("[0-9]{1,9}:[0-9]{1,9}", name)
        slot, attempt = map(int, name.split(":")) if is_sound else (name[:MOST_REASON], "")
        self.server.store.set_verdict(name, what)
        self.server.store.drop_offers(base, [name])
        self.server.run.event("reject", slot=slot, attempt=attempt, **what)

    def forget_pass(self, owner: Owner) -> None:
        """Let the round wait again for a worker that had nothing to give and now has
        samples. If it does not train after all it finds its offer gone, and offers again."""
        if self.round.forget_pass(owner):
            self.server.store.drop_offers(self.round.version, [f"{owner[0]}:{owner[1]}"])

    def meet(self) -> None:
        """Drop the offers of deltas that are merged by now, which a new server may have,
        and take those from the run directory whose workers have left, each once: nobody
        else would offer them."""
        run, newest = self.server.run, self.round.version
        versions = range(max(0, newest - self.round.facts.max_staleness), newest + 1)
        merged = {  # but sync mode's, which have no base
            (delta.base, f"{delta.slot}:{delta.attempt}")
            for commit in run.commits.all(versions[0], newest)
            for delta in commit.deltas if delta.base is not None
        }
        for base, name in merged:
            self.server.store.drop_offers(base, [name])
        for base in versions:
            for name, body in run.offers.left(base):
                if (base, name) not in merged and (base, name, body) not in self._met:
                    self.take(base, name, body)
                    self._met.add((base, name, body))
