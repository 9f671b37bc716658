"""The checkpoints of a synchronous job: when one is due, what is in it, and what becomes
of it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from torch.nn import Module

from elastic.base.errors import TryAgain
from elastic.jobs import cadence
from elastic.saved.checkpoint import Checkpoints, Saved, size_bytes
from elastic.sync.batches import Batches
from elastic.sync.rank import Rank
from elastic.train.inner_optimizer import InnerOptimizer


@dataclass
class State:
    """Where the run is; travels with every checkpoint."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None  # of the last step
    # What sync mode began with: a version, and where the run was then.
    base_version: int = 0
    base_step: int = 0
    base_tokens: int = 0
    validated_step: int = 0


class Saving:
    """Saves checkpoints. All ranks call every method alike, except `is_due`. If the disk
    refuses, that costs a checkpoint and nothing else."""

    def __init__(self, rank: Rank, model: Module, inner: InnerOptimizer, batches: Batches):
        self._rank, self._model, self._inner, self._batches = rank, model, inner, batches
        keep = max(2, rank.config.checkpoint.keep)
        self.checkpoints = Checkpoints(rank.run, rank.group, f"attempt{rank.attempt}", keep)
        self.words = ""  # how often, and why, for status; or what was refused
        self._auto_s, self._least_s = cadence.LEAST_S, 0.0
        self._mtbi_s = cadence.PRIOR_S
        self.step, self._at = 0, 0.0  # of the newest one

    def load(self, base_version: int) -> tuple[Saved | None, list[str]]:
        """Load the newest checkpoint on top of a version, if any; why each newer one was
        skipped."""
        saved, refused = self.checkpoints.load(self._model, *self._inner.each, base_version)
        if saved:  # run.toml may say other settings now; an older record has not what steps count
            self._inner.keep_settings(saved.extra.get("counted", ()))
        return saved, refused

    def begin_at(self, step: int) -> None:
        """Count the time and the steps to the next checkpoint from now, after this step."""
        self.step, self._at = step, time.monotonic()

    def choose_cadence(self) -> None:
        if not self._rank.group.leads:
            return
        # If this rank cannot read now, it goes on as before; the others do not wait for it.
        with contextlib.suppress(OSError, TryAgain):
            self._mtbi_s = cadence.observed_mtbi_s(self._rank.run.jobs.endings())
            if most := self._rank.config.checkpoint.max_rate_bytes:
                self._least_s = size_bytes(self._rank.run, self.step) / most
        stall_s, save_s = self.checkpoints.stall_s, self.checkpoints.save_s
        self._auto_s, self.words = cadence.interval(stall_s, self._mtbi_s, save_s)
        if self._least_s > self._auto_s:
            self.words = f"at most every {self._least_s:.0f} s: checkpoint.max_rate"
        elif (setting := self._rank.config.checkpoint.interval) != "auto":
            self.words = f"every {setting}: checkpoint.interval"

    def is_due(self, step: int) -> bool:
        """Rank 0: is it time for a checkpoint, once this step is taken? Not while one is
        being written. But if that takes as long as a hang, begin the next one: it waits
        for the other, and so the hang is found."""
        config, seconds = self._rank.config, time.monotonic() - self._at
        is_busy = 0 < self.checkpoints.writing_s < config.health.hang_timeout_s
        if is_busy or seconds < self._least_s or not self._rank.group.leads:
            return False
        return cadence.is_due(config.checkpoint.interval, step - self.step, seconds, self._auto_s)

    def begin(self, state: State, due: bool) -> None:
        """Begin a checkpoint in the background if it is due. Learn from the one before
        it, once that is committed, how often they are worth it."""
        with self._surviving_refusals(state):
            ended = self.checkpoints.finish() if due else self.checkpoints.poll()
            if ended:
                self.choose_cadence()
            if due:
                self.begin_at(state.step)
                self.checkpoints.begin(*self._content(state))

    def save(self, state: State) -> bool:
        """Save this step, unless it is saved already, and wait for that. False: the disk
        refused."""
        with self._surviving_refusals(state):
            self.checkpoints.save(*self._content(state))
            self.begin_at(state.step)
            return True
        return False

    def save_within(self, state: State, left_s: Callable[[float], float]) -> None:
        """Save if there is time: `left_s`, which rank 0 calls with the seconds needed,
        returns those that are left. Else wait for the checkpoint that is being written:
        it may need little more."""
        group, needed_s = self._rank.group, self.checkpoints.needs_s
        has_s = left_s(needed_s) if group.leads else 0.0
        if group.broadcast(has_s >= needed_s):
            self.save(state)
            return
        self._rank.say(f"no new checkpoint: {has_s:.1f} s are left, and it takes {needed_s:.1f} s")
        with self._surviving_refusals(state):
            self.checkpoints.finish()

    @contextlib.contextmanager
    def _surviving_refusals(self, state: State) -> Iterator[None]:
        try:
            yield
        except (OSError, TryAgain) as error:
            self.words = f"checkpoint of step {state.step} not saved: {error}"
            self._rank.say(self.words)
            self._rank.event("checkpoint-failed", step=state.step, reason=str(error))

    def _content(self, state: State) -> tuple:
        """What a checkpoint is made of: step, model, optimizer, and its record, which has
        the state, and all that a commit would have."""
        samples, train = list(self._batches.trained), self._rank.config.train
        delta = {"role": "trainer", "slot": 0, "attempt": self._rank.attempt,
                 "job_id": self._rank.job_id, "steps": state.step - state.base_step,
                 "tokens": state.tokens - state.base_tokens, "loss": state.loss,
                 "samples": samples}
        extra = {"state": asdict(state), "base_version": state.base_version,
                 "tokens": state.tokens, "loss": state.loss, "samples": samples,
                 "deltas": [delta], "skipped": list(self._batches.skipped),
                 "dataset_samples": self._batches.dataset_samples,
                 "epochs": 0 if train.max_steps else train.epochs,
                 "counted": list(map(list, self._inner.counted()))}
        return state.step, self._model, *self._inner.each, extra
