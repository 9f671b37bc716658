"""The state of the inner optimizer between rounds: adopted, saved, forgotten.

A worker that has no moments of its own yet, or whose moments are suspect, begins with a
ramp of the learning rate (`local_sgd.join_ramp`).
"""

import contextlib
import time
from dataclasses import asdict

from elastic.base.durable import insist
from elastic.base.errors import TryAgain
from elastic.local.worker.exchange import Exchange
from elastic.local.worker.in_hand import InHand
from elastic.run.records import restored
from elastic.saved import inner_state
from elastic.saved.inner_state import Entry, Pointer
from elastic.train.inner_optimizer import InnerOptimizer
from elastic.train.schedule import share_of_peak


class Moments:
    def __init__(self, hand: InHand, exchange: Exchange, optimizer: InnerOptimizer):
        self._hand, self._optimizer = hand, optimizer
        self._line, self._config, self._group = hand.line, hand.config, exchange.group
        self._ramp = 0  # inner steps still to go of the learning rate's ramp
        self.origin = ""  # where the state came from
        self.save_s = 0.0  # how long it took to save it
        self._saved_at = -1  # how many steps this process had done when it was saved

    # ---- while training

    def set_rates(self) -> None:
        """The learning rates of the next step."""
        if not self._optimizer.sets_rates:
            return
        scale = share_of_peak(self._hand.progress, self._config.train)
        if self._ramp:
            most = self._config.local_sgd.join_ramp
            scale *= (most - self._ramp + 1) / most
            self._ramp -= 1
        self._optimizer.set_rates(scale)

    def forget(self) -> None:
        """Begin anew, with a ramp."""
        self._optimizer.forget()
        self._saved_at = -1
        self._ramp = self._config.local_sgd.join_ramp

    # ---- between jobs

    def begin(self, version: int) -> None:
        """Begin with the slot's state, if there is one. Collective."""
        told, origin = self._group.decide(lambda: self._choose(version))
        pointer = told and restored(Pointer, told)
        if pointer and (refused := self._load(pointer)):
            self._optimizer.forget()
            pointer, origin = None, f"fresh: {refused}"
        if pointer is None and version > 0:
            self._ramp = self._config.local_sgd.join_ramp
        self.origin = f"{origin} with a ramp" if self._ramp else origin

    def _choose(self, version: int) -> tuple[dict | None, str]:
        """Rank 0: the pointer to the state to begin with, as a table, and its origin."""
        line, oldest = self._line, self._config.local_sgd.inner_state_max_age
        pointer, origin = inner_state.choose(line.run, line.place.slot, version, oldest)
        return pointer and asdict(pointer), origin

    def _load(self, pointer: Pointer) -> str:
        """Load the state on every rank. Why a rank could not; "" if all could."""
        rank = (self._group.rank, self._group.world)
        refused = inner_state.load(self._line.run, pointer, self._optimizer.each, *rank)
        return next(filter(None, self._group.gather(refused)), "")

    def save_if_due(self) -> None:
        done, every = self._hand.round, self._config.local_sgd.inner_state_every
        is_leaving = self._group.decide(lambda: bool(self._line.notice))
        if not is_leaving and every and done.steps and done.base % every == 0:
            self.save()

    def save(self) -> None:
        """Save the state after this round's steps, unless it is saved. Collective. A
        failure costs a ramp, nothing else."""
        if self._group.decide(lambda: self._saved_at == self._hand.steps_total):
            return
        place, version, began = self._line.place, self._hand.round.base, time.monotonic()
        entries = self._group.gather(self._saved(f"inner-{version:06d}.{place.attempt}"))
        self.save_s = time.monotonic() - began
        if self._group.leads and all(entries):
            self._publish(version, entries)

    def _publish(self, version: int, entries: list[Entry]) -> None:
        run, (slot, attempt) = self._line.run, self._line.place.owner
        with contextlib.suppress(OSError, TryAgain):
            if run.slots.latest(slot) != attempt:
                return  # a successor has saved its own, or will
            insist(inner_state.publish, run, Pointer(slot, attempt, version, tuple(entries)))
            self._saved_at = self._hand.steps_total

    def _saved(self, stem: str) -> Entry | None:
        """Save this rank's file; its entry, or None if it could not be written."""
        place, optimizer = self._line.place, self._optimizer
        try:
            state = (optimizer.each, self._group.rank, optimizer.counted())
            return insist(inner_state.save, place.run.slots.path(place.slot), stem, *state)
        except (OSError, TryAgain) as error:
            place.run.event("inner-state", slot=place.slot, reason=f"not saved: {error}")
        except inner_state.UNFIT as error:
            words = "the optimizer's state is not saved, a restart begins it anew"
            self._line.warn(f"{words}: {error}")
        return None
