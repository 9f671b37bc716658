"""A delta on its way: encoded, stored, offered; and what the master says of it.

With `local_sgd.overlap`, in a worker of one rank, a thread (the courier) delivers a copy
of it and fetches the next version; the steps that are done meanwhile (the steps ahead)
are put on top of that.
"""

import contextlib
import math
import time
from concurrent.futures import Future
from functools import partial

import torch

from elastic.base.durable import in_background
from elastic.base.errors import ElasticError
from elastic.local import rounds
from elastic.local.transport import Transport
from elastic.local.worker.exchange import Exchange
from elastic.local.worker.in_hand import Ahead, InHand, WorkerRound, joined
from elastic.local.worker.moments import Moments
from elastic.run.records import Fragment, Header
from elastic.saved.merge import norm


class Delivery:
    def __init__(self, hand: InHand, exchange: Exchange, moments: Moments):
        self._hand, self._line = hand, hand.line
        self.exchange, self._moments = exchange, moments
        self._transport = Transport(hand.line.run)
        self._memory: list[torch.Tensor] = []  # kept: a new one costs more than a copy

    def deliver(self, done: WorkerRound, deltas: list | None = None) -> None:
        """Encode, store and offer base - local of a round. `deltas`: copies taken when
        the round ended, else it is that of the replica now. If it is not finite the round
        is void instead. Collective among the worker's ranks."""
        line, hand, began = self._line, self._hand, self._line.clock()
        hand.is_dry = False
        delta_of = deltas.__getitem__ if deltas else self.exchange.replica.delta
        fragments = self._send(done, delta_of) if done.steps else []
        if fragments is None:
            return
        took_s = line.clock() - began
        # Before it is offered: if no master hears of it, it is left in the run directory.
        done.header = self._header(done, fragments)
        if (late := line.news.version - done.base) > hand.config.local_sgd.max_staleness:
            line.event("reject", attempt=line.place.attempt, base=done.base, rule=rounds.Rule.STALE,
                       reason=f"{late} behind: no master looks back so far")
        else:
            line.offer(done.header)
        # Near 0 if there were no steps: a worker whose delivery took long once trains again.
        hand.deliver_s = took_s
        if done.steps:
            needs_s = hand.step_s + took_s + self._moments.save_s
            line.say(delivered=True, needs_s=round(needs_s, 1))

    def _send(self, done: WorkerRound, delta_of) -> list[Fragment] | None:
        """Encode and store the fragments. If they are not finite go back to the base, and
        return None."""
        fragments, length = self.exchange.send(delta_of, partial(self.put, done.base))
        if math.isfinite(length):
            return fragments
        # The samples are trained again, with fresh moments.
        reason = f"{rounds.Rule.NON_FINITE}: its own delta"
        self._line.event("reject", reason=reason, base=done.base)
        self._hand.queue = done.samples + self._hand.queue
        self._moments.forget()
        self._hand.void("were no good")
        return None

    def put(self, base: int, index: int, data: memoryview) -> Fragment:
        """Store a fragment's bytes, once the disk has room. Raises TryAgain at a
        notice."""
        if not self._hand.sent:  # a courier does not: the worker trains on, and tells itself
            self._hand.tell_new_master()
        key = (*self._line.place.owner, base)
        return self._line.written(partial(self._transport.put, key, index, data))

    def _header(self, done: WorkerRound, fragments: list) -> Header:
        """What the master is told. Only that of rank 0 is sent, which knows all of it."""
        place, exchange = self._line.place, self.exchange
        return Header(
            run=place.run.key, slot=place.slot, attempt=place.attempt, job_id=place.job_id,
            base=done.base, layout=exchange.replica.layout.hash, codec=exchange.codec.name,
            steps=done.steps, tokens=done.tokens, samples=tuple(joined(done.samples)),
            loss=done.mean_loss, first_loss=done.first_loss, fragments=tuple(fragments),
            inner=self._moments.origin, seconds=round(time.monotonic() - done.started, 3),
            stall_s=round(done.stall_s, 4), trained_s=round(done.trained_s, 3), lr_sum=done.lr_sum,
        )

    def keep_offered(self, done: WorkerRound) -> bool:
        """Rank 0: offer the delta again if a new server does not know it. False: it was
        rejected."""
        line, owner = self._line, self._line.place.owner
        told = line.reach(lambda s: (s.offered(*owner, done.base), s.take_verdict(*owner)))
        is_known, verdict = told or (True, None)  # None: it is time to leave
        if verdict and verdict["base"] == done.base and done.steps:
            print(f"worker  delta rejected: {verdict['reason']}", flush=True)
            if verdict.get("rule") == rounds.Rule.SAMPLES:
                self._hand.queue.clear()  # samples that came with those are others' as well
            return False
        if not is_known and line.refresh().version <= done.base and not line.news.over:
            line.offer(done.header)
        return True

    # ---- by courier

    def send_ahead(self) -> Future | None:
        """Send the open round's delta by a courier, and open a round for the steps ahead.
        None: there is none to send ahead; deliver the round as it is."""
        hand, done, news = self._hand, self._hand.round, self._line.news
        is_late = self._line.notice or news.over or news.version > done.base
        if hand.config.local_sgd.overlap == "off" or not done.steps or is_late:
            return None
        deltas = self._copied()
        if not all(math.isfinite(norm(delta)) for delta in deltas):
            return None
        hand.sent, hand.round = done, WorkerRound(done.base, time.monotonic())
        hand.ahead = Ahead(hand.round, deltas)
        return in_background(partial(self._courier, done, deltas))

    def _copied(self) -> list[torch.Tensor]:
        replica = self.exchange.replica
        if not self._memory:
            self._memory = [torch.empty(numel) for numel in replica.layout.numels]
        return [replica.delta(index, into) for index, into in enumerate(self._memory)]

    def _courier(self, sent: WorkerRound, deltas: list) -> tuple[bool, dict[int, list]]:
        """In its own thread: deliver, then wait for the next version and read it. False:
        the delta was rejected. The fragments by version; none: there is none to come."""
        line, base = self._line, sent.base
        self.deliver(sent, deltas)
        while sent.header and not (line.notice or line.news.over):
            version = line.wait(lambda news: news.version > base or news.over).version
            if version > base:
                with contextlib.suppress(ElasticError):
                    return True, {version: self.exchange.fetch(line.commit(version))}
                break  # it is pruned by now, or damaged: to adopt it will tell
            if not self.keep_offered(sent):
                return False, {}
        return True, {}

    def come_back(self, is_kept: bool, fetched: dict[int, list[torch.Tensor]]) -> None:
        """End the steps ahead, with what the courier says. The round whose delta was sent
        is the open one again, until the steps ahead are put on top of the next version."""
        hand = self._hand
        hand.round, hand.sent = hand.sent, None
        hand.ahead.fetched = fetched
        if not is_kept:
            hand.queue = hand.ahead.round.samples + hand.queue
            hand.ahead = None
            hand.void("were rejected")
