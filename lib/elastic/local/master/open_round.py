"""The open round: the deltas offered to it, and when it is over. Pure.

    read       a header as it came
    hear       once it is read: it is rejected, passed, or judged good, its samples offered
    accept     its bytes are good, too
    forget     as if the delta had never come
    decide     wait, call or close?
    close      the commit of the next version, and the deltas that it is made of
    after      the round on top of that version

It moves samples in the run's ledger as it judges. Of what it has learned only the ledger
and the paces of workers are handed on to the next round.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf

from elastic.local import rounds
from elastic.local.rounds import Facts, Move, Refusal, Rule, Running
from elastic.run.ledger import Key, Ledger, Owner, count
from elastic.run.membership import Slot
from elastic.run.records import Commit, Delta, Header

UNTOLD = ("run", "layout", "fragments")  # in a commit, of a delta's header


@dataclass(frozen=True)
class Checked:
    """A delta whose bytes were read once, and are good: what was measured of them."""

    header: Header
    norm: float = 0.0
    arrived: float = 0.0  # Redis TIME

    @property
    def delta(self) -> Delta:
        """What the commit says of it."""
        told = {name: it for name, it in vars(self.header).items() if name not in UNTOLD}
        return Delta(**told, norm=self.norm, delivered=round(self.arrived, 3))


Part = tuple[Header, float]  # a delta, and the factor by which it is in the mean


def merged(deltas: Sequence[Checked], commit: Commit, settings) -> tuple[list[Part], dict]:
    """How deltas become the version after `commit`, and what its commit says of that; in
    which order they came does not matter."""
    deltas = sorted(deltas, key=lambda checked: checked.header.key)
    told, running = [checked.delta for checked in deltas], Running.of(commit)
    weights = rounds.weights(told, commit.version)
    clips = rounds.clips(told, settings.clip_norm, running.reach)
    total = sum(weights)
    parts = [(checked.header, weight * clip / total)
             for checked, weight, clip in zip(deltas, weights, clips, strict=True)]
    steps = rounds.inner_steps(commit, settings)
    momentum = rounds.momentum(steps, [weight / total for weight in weights], settings)
    return parts, {
        "outer_lr": rounds.outer_lr(momentum, total, running, settings),
        "outer_momentum": momentum, "inner_steps": steps,
        "clipped": sum(clip < 1 for clip in clips),
        "running": asdict(running.after(told, total, rounds.round_loss(told, commit.version))),
        "bytes": sum(part.bytes for header, _ in parts for part in header.fragments),
    }


@dataclass
class OpenRound:
    """The round on top of `commit`; `opened` is Redis TIME."""

    commit: Commit
    opened: float
    is_own: bool  # this master made the commit, and so knows when the round was opened
    ledger: Ledger
    facts: Facts
    settings: object  # config section local_sgd
    paces_s: dict[int, float]  # slot -> seconds a step, by its newest delta
    called: float | None = None  # when the last call went out
    due_s: float = inf  # how long after its opening it is due
    # Base -> "slot:attempt" -> header, as it came.
    seen: dict[int, dict[str, bytes]] = field(default_factory=dict)
    accepted: dict[Key, Checked] = field(default_factory=dict)
    answered: set[Key] = field(default_factory=set)
    rejected: dict[Rule, int] = field(default_factory=dict)

    def __post_init__(self):
        # A new master knows no paces but those of the newest commit.
        told = {delta.slot: delta.seconds / delta.steps
                for delta in self.commit.deltas if delta.seconds}
        self.paces_s |= told | self.paces_s

    @property
    def version(self) -> int:
        return self.commit.version

    @property
    def inner_steps(self) -> int:
        return rounds.inner_steps(self.commit, self.settings)

    # ---- a delta

    def read(self, base: int, name: str, body: bytes) -> tuple[Refusal | None, Header | None]:
        """Judge the header that "slot:attempt" offers for `base`; no header if it is
        malformed."""
        self.seen.setdefault(base, {})[name] = body
        try:
            header = Header.from_json(json.loads(body))
            if (f"{header.slot}:{header.attempt}", header.base) != (name, base):
                where = f"from {name} for version {base}"
                raise ValueError(f"it says {header.key}, and came {where}")
        except (ValueError, RecursionError) as error:
            return rounds.refusal(Rule.MALFORMED, str(error)), None
        return self.hear(header)

    def hear(self, header: Header) -> tuple[Refusal | None, Header]:
        """Judge a header; its tokens are believed as far as its samples can hold them."""
        tokens, samples = self.commit.tokens, len(self.ledger.committed)
        header = rounds.credited(header, tokens / max(1, samples))
        refused = self.ledger.refusal(header.key[:2], header.samples)
        why = rounds.judge(header, self.facts, self.ledger.offered, refused)
        if not why and header.is_pass:
            self.answered.add(header.key)
        elif not why:
            self.ledger.offer(header.key, header.samples)
        return why, header

    def accept(self, checked: Checked, now: float) -> None:
        """A delta that was judged good has good bytes, too."""
        header = checked.header
        self.accepted[header.key] = replace(checked, arrived=now)
        took_s = header.seconds
        if header.base == self.version:
            self.answered.add(header.key)
            # As this master has measured it, if it has seen the opening.
            took_s = now - self.opened if self.is_own else took_s
        self.paces_s[header.slot] = rounds.pace_s(header, took_s, self.inner_steps)

    def forget(self, key: Key) -> None:
        """Undo what a delta's header led to."""
        self.ledger.withdraw(key)
        self.accepted.pop(key, None)
        self._unanswer(key)
        # Workers that were called have stopped: let them train for another delta.
        if not self.accepted:
            self.called = None

    def forget_pass(self, owner: Owner) -> bool:
        """Forget that a worker has answered that it has nothing to give. False: it has not."""
        key = (*owner, self.version)
        if has_passed := key in self.answered and key not in self.ledger.offered:
            self._unanswer(key)
        return has_passed

    def _unanswer(self, key: Key) -> None:
        self.answered.discard(key)
        self.seen.get(key[2], {}).pop(f"{key[0]}:{key[1]}", None)

    def note_rejected(self, base: int, name: str, rule: Rule) -> None:
        self.rejected[rule] = self.rejected.get(rule, 0) + 1
        self.seen.get(base, {}).pop(name, None)

    # ---- its end

    def said(self, live: Collection[int], now: float) -> dict:
        """What workers are told of the round; `live`: slots whose paces count."""
        called, due_s = self.version if self.called is not None else -1, self._put_due(live)
        # A round without a delta by its deadline has lost its workers, and new ones are to
        # do all steps: it is due at no time.
        is_late = now - self.opened > rounds.deadline_s(due_s, self.settings)
        due = inf if is_late and not self.accepted else round(self.opened + due_s, 3)
        return {"version": self.version, "call": called, "due": due}

    def _put_due(self, live: Collection[int]) -> float:
        """How long after its opening the round is due. It never becomes longer while the
        round is open: workers that have stopped would wait."""
        paces_s = [pace_s for slot, pace_s in self.paces_s.items() if slot in live]
        due_s = rounds.due_s(paces_s, self.inner_steps, self.settings)
        self.due_s = min(self.due_s, due_s)
        return self.due_s

    def decide(
        self, present: dict[int, Slot], live: Collection[int], preparing: int,
        open_at: float, now: float,
    ) -> tuple[Move, str]:
        """Wait, call or close, and why. The round waits for each of `present`, except a
        worker whose single step takes longer than the deadline: its delta would be late
        anyhow. `preparing` deltas are being checked."""
        due_s = self._put_due(live)
        most_s = rounds.deadline_s(due_s, self.settings)
        view = rounds.View(
            opened=self.opened, called=self.called,
            # A worker that claims its lease again, after a server's end, has not joined late.
            expected={slot: self.opened if worker.joined <= open_at else worker.joined
                      for slot, worker in present.items()
                      if self.paces_s.get(slot, 0.0) <= most_s},
            answered=frozenset(slot for slot, worker in present.items()
                               if (slot, worker.attempt, self.version) in self.answered),
            accepted=len(self.accepted), preparing=preparing, due_s=due_s,
        )
        move, reason = rounds.decide(view, self.settings, now)
        if move is Move.CALL:
            self.called = now
        return move, reason

    def close(self, can_revert: bool, epoch: int, now: float) -> tuple[Commit, list[Part], str]:
        """End the round as the master of `epoch`: the commit of the next version, but for
        its files, the deltas in it, and why it reverts the newest version instead, else
        "". `can_revert`: the version before the newest is still there."""
        deltas = [self.accepted[key] for key in sorted(self.accepted)]
        loss = rounds.round_loss([checked.header for checked in deltas], self.version)
        running, reverts, parts = Running.of(self.commit), "", []
        if can_revert and self.commit.deltas:  # only what deltas have made can be bad
            reverts = rounds.canary(loss, running, self.settings.canary)
        if reverts:  # there is no loss to compare the next round's with
            said = {"taken_back": self.version, "running": asdict(replace(running, loss=0.0))}
            deltas, said = [], said | {"bytes": 0}
        else:
            parts, said = merged(deltas, self.commit, self.settings)
        commit = self._following(tuple(checked.delta for checked in deltas), epoch, now)
        return replace(commit, **said), parts, reverts

    def _following(self, deltas: tuple[Delta, ...], epoch: int, now: float) -> Commit:
        """The commit of the next version, with these deltas in it."""
        newest, tokens = self.commit, sum(delta.tokens for delta in deltas)
        # A loss of exactly 0 means that the worker did not tell one.
        loss = sum(delta.loss * delta.tokens for delta in deltas)
        told = sum(delta.tokens for delta in deltas if delta.loss)
        return newest.following(
            master_epoch=epoch, time=now, tokens=newest.tokens + tokens,
            epochs=self.ledger.epochs, total_tokens=self._total_tokens(tokens, deltas),
            samples=tuple(sorted(each for delta in deltas for each in delta.samples)),
            deltas=deltas, workers=len({delta.slot for delta in deltas}) or newest.workers,
            loss=loss / told if told else None if tokens else newest.loss,
            rejected=dict(self.rejected),
        )

    def _total_tokens(self, tokens: int, deltas: Sequence[Delta]) -> int:
        """How many tokens the run will have had: if it counts epochs, as many a sample as
        so far; else as the newest commit says."""
        ledger, tokens = self.ledger, self.commit.tokens + tokens
        samples = len(ledger.committed) + sum(count(delta.samples) for delta in deltas)
        if not (ledger.epochs and samples and tokens):
            return self.commit.total_tokens
        return round(tokens / samples * ledger.samples * ledger.epochs)

    def after(self, commit: Commit, now: float) -> "OpenRound":
        """The round on top of the version that this one has made."""
        reverted = {commit.taken_back} - {None}
        finish = self.forget if reverted else self.ledger.commit
        for key in list(self.accepted):
            finish(key)
        facts = replace(self.facts, version=commit.version,
                        reverted=self.facts.reverted | reverted)
        kept = (self.ledger, facts, self.settings, self.paces_s)
        return OpenRound(commit, now, True, *kept)
