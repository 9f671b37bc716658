"""A rank of a synchronous job: one process per GPU.

    restore   the newest checkpoint that verifies, resharded to the ranks there are; if none is on
              top of the newest version (handover.py), that version
    step      the next global batch (sizing.py), shared by all ranks; one agreement at its end
    save      when due (cadence.py), in the background; at a notice at once, if there is time

All that a step depends on, its samples, its learning rate, its random numbers, follows from the
state that checkpoints carry, so a run that comes back at another size goes on with the same steps.
The ranks agree once per step, in one reduction of six numbers: the loss, the tokens, and whether
anybody wants to stop, or rank 0 wants to save or to look after everybody's health. Rank 0 alone
writes: metrics.jsonl (a line per step), progress.json (for status), DONE.

Exit status: 0 the run is done; 75 a notice was obeyed; 93 the run is stopped, or this attempt is
fenced; anything else is a crash, and the launcher knows what to do about it.
"""

import contextlib
import functools
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from elastic.base.durable import SPACE_S, append_line, until_written
from elastic.base.environment import env
from elastic.base.errors import ElasticError, Exit, Fenced
from elastic.base.signals import Notice
from elastic.jobs import cadence
from elastic.jobs.sizing import passes
from elastic.jobs.slurm_info import check_layout, get_slurm_info, kill_at
from elastic.run.ledger import Ledger, Range, Ranges, count
from elastic.run.rundir import RunDir
from elastic.run.shuffle import Order
from elastic.saved import handover
from elastic.saved.checkpoint import Checkpoints, Saved, steps
from elastic.train.device import (
    Profile,
    build_model,
    choose_device,
    join_group,
    leave,
    precision,
    seed_by,
    set_initial_values,
    to_device,
)
from elastic.train.group import Group, clip_gradients
from elastic.train.health import (
    HangDetector,
    NaNDetector,
    ShutdownHandler,
    check_nccl_health,
    require_gpu,
    shield_workers,
    warn,
)
from elastic.train.loading import check
from elastic.train.schedule import learning_rate, peak
from elastic.train.task import count_tokens, default_optimizer, load_task

PROGRESS_S = 1.0
CONTROL_S = 2.0
RANKS = (0, 0)  # the only owner in the ledger: a batch is handed to all of them
GO_ON, NOTICE, STOPPED = 0.0, 1.0, 2.0  # what a rank wants; the largest wins


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


class _Interrupted(Exception):
    """Out of a validation: the wish of the ranks is its argument."""


class Trainer:
    def __init__(self, run: RunDir, notice: Notice, group: Group, device: torch.device):
        self.run, self.notice, self.group, self.device = run, notice, group, device
        self.config, self.state = run.config(), State()
        self.train = self.config.train
        self.attempt, self.job_id = int(env("ELASTIC_ATTEMPT", "1")), env("ELASTIC_JOB_ID", "")
        self.task = load_task(self.config.run.task, self.config.task, Path(self.config.run.folder))
        self.dataset = check(self.task.dataset())
        self.model = build_model(self.task, self.config, device, group)
        make = getattr(self.task, "optimizer", None)
        self.optimizer = make(self.model) if make else default_optimizer(self.model, self.train)
        keep = max(2, self.config.checkpoint.keep)
        self.checkpoints = Checkpoints(run, group, f"attempt{self.attempt}", keep)
        self._autocast = precision(self.train.precision, device)
        self._peaks = list(map(peak, self.optimizer.param_groups))
        self._sample_tokens = count_tokens(self.task, default_collate([self.dataset[0]]))
        self._order = Order(len(self.dataset), self.config.run.seed)
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._auto_s, self._checked_at = cadence.LEAST_S, time.monotonic()
        health = self.config.health
        self.nans = NaNDetector(health.nan_action, group, health.max_bad_batches)
        self.shutdown = ShutdownHandler(float(env("ELASTIC_NOTICE_S") or 0), notice)
        self._profile = Profile(self.train.profile if group.leads else "", run.path / "profile")
        self._control_at = self._progress_at = 0.0
        self._rate = (time.monotonic(), 0)
        self._startup_s = 0.0  # from the launcher's start of the ranks to the first step's end

    @property
    def batch_size(self) -> int:
        most_ranks = self.config.elastic.max
        return self.config.sync.global_batch_size or self.train.batch_size * most_ranks

    @property
    def total_tokens(self) -> int:
        samples, steps = self.train.epochs * len(self.dataset), self.train.max_steps
        seen, tokens = count(self._committed) + len(self._trained), self.state.tokens
        each = tokens / seen if seen and tokens else self._sample_tokens  # of a sample, so far
        total = self.train.max_tokens or samples * each
        return round(min(total, steps * self.batch_size * each) if steps else total)

    # ---- the program

    def main(self) -> int:
        """Train to the end of the run, or until a notice; returns the exit status."""
        self._restore()
        self.notice.exit_code = None
        self.model.train()
        timeout_s = self.config.health.hang_timeout_s
        with HangDetector(timeout_s, functools.partial(leave, Exit.ERROR)) as self._hangs:
            wish = self._validate_if_due()  # one that a notice broke off
            while wish == GO_ON and not self._budget_is_spent():
                if (batch := next(self._batches, None)) is None:
                    break
                wish = self._step(*batch) or self._validate_if_due()
                self._hangs.tick()
        # A save may take longer than a step ever should.
        while wish == GO_ON and not self._save():  # not done before the last step is on the disk
            time.sleep(SPACE_S)
            wish = self.group.broadcast(self._wish())
        if wish != GO_ON:
            return self._leave(wish)
        if self.group.leads:
            self._fence()
            where = {"version": self.state.step, "tokens": self.state.tokens}
            reached = {**where, "time": time.time()}
            until_written(lambda: self.run.mark_done(reached), self.notice.__bool__)
            self.run.event("done", **reached)
        return Exit.OK

    def _restore(self) -> None:
        began = time.time()
        # The samples are those of all versions up to it.
        self._base, self._committed = self.group.decide(self._find_base)
        version = self._base["base_version"]
        found, refused = self.checkpoints.load(self.model, self.optimizer, version)
        self._set_state(found)
        if version and not found:
            handover.to_sync(self.run, version, self.model)
        elif not found:
            set_initial_values(self.task, self.model)
        begin = f"version {version}" if version else "the beginning"
        where = f"step {self.state.step} from {found.path.name}" if found else begin
        self._saved_step, self._saved_at = self.state.step, time.monotonic()
        self._say(f"{self.group.world} ranks, attempt {self.attempt}: goes on at {where}")
        for reason in refused if self.group.leads else ():
            self._say(f"checkpoint not used: {reason}")
            self.run.event("checkpoint-refused", reason=reason)
        if self.group.leads:
            self._choose_cadence()
            self.run.event("restore", step=self.state.step, world=self.group.world,
                           attempt=self.attempt, job_id=self.job_id,
                           load_s=round(time.time() - began, 3))  # fmt: skip

    def _find_base(self) -> tuple[dict, list]:
        """Rank 0: the state at the newest version, and the samples that are committed by then.

        No master commits another one: trainers claim an epoch, too, and so fence each other.
        """
        who = {"job_id": self.job_id, "attempt": self.attempt, "time": time.time()}
        self._epoch = until_written(lambda: self.run.claim_epoch(who), self.notice.__bool__)
        newest = self.run.newest_commit() or {"version": 0, "tokens": 0}
        commits = itertools.islice(self.run.commits(), newest["version"] + 1)
        samples = Ranges(tuple(each) for commit in commits for each in commit["samples"])
        step, tokens = max(steps(self.run), default=0), newest["tokens"]
        base = {"base_version": newest["version"], "base_step": step, "base_tokens": tokens}
        return {"step": step, "tokens": tokens, **base}, list(samples)

    def _set_state(self, found: Saved | None, skipped: Iterable[Range] = ()) -> None:
        """Go on from a checkpoint, or from the base version, and leave out what is `skipped`."""
        extra = found.extra if found else {"state": self._base, "samples": [], "skipped": []}
        self.state = State(**extra["state"])
        self._trained = Ranges(extra["samples"])
        self._skipped = Ranges([*extra["skipped"], *skipped])
        over = [*self._committed, *self._trained, *self._skipped]
        self._batches = self._load(Ledger(len(self.dataset), self.train.epochs, over))

    def _leave(self, wish: float) -> int:
        needed_s = self.checkpoints.needs_s
        left_s = self._left_s(needed_s) if self.group.leads else 0.0
        if self.group.broadcast(left_s >= needed_s):
            self._save()
        else:
            self._say(f"no new checkpoint: {left_s:.1f} s are left, and it takes {needed_s:.1f} s")
            self._finish_save()
        self._profile.end()
        self._say(f"leaves at step {self.state.step}: {'notice' if wish == NOTICE else 'stopped'}")
        return Exit.TRY_AGAIN if wish == NOTICE else Exit.DO_NOT_RESTART

    def _left_s(self, needed_s: float) -> float:
        """Until the kill. Slurm knows what the notice is for; asked only where the time of a
        preemption is too short, as it may take half a minute to answer."""
        left_s, info = self.shutdown.deadline_s(time.time()), get_slurm_info()
        if left_s >= needed_s or info is None:
            return left_s
        return kill_at(info, self.notice.since, self.shutdown.window_s) - time.time()

    # ---- a step

    def _budget_is_spent(self) -> bool:
        most_tokens, most_steps = self.train.max_tokens, self.train.max_steps
        tokens_over = most_tokens and self.state.tokens >= most_tokens
        return bool(tokens_over or (most_steps and self.state.step >= most_steps))

    def _load(self, ledger: Ledger) -> Iterator[tuple[Ranges, Iterator]]:
        """The global batches to come, the first samples that are free, until there are no more;
        with each what this rank makes of it: (does it count, data) for every pass.

        With train.loader_workers processes load ahead. What they have is counted as trained only
        when it is: a checkpoint knows nothing of it.
        """
        planned = deque()

        def draw() -> Iterator[list[int]]:
            while ledger.grant(RANKS, self.batch_size):
                batch = ledger.held.pop(RANKS)
                places = [(epoch, at) for epoch, start, stop in batch for at in range(start, stop)]
                parts = passes(places, self.group.rank, self.group.world, self.train.batch_size)
                planned.append((batch, [bool(part) for part in parts]))
                for part in parts:
                    yield [self._order.index(*place) for place in part or places[:1]]

        loader = iter(DataLoader(
            self.dataset, batch_sampler=draw(), num_workers=self.train.loader_workers,
            worker_init_fn=shield_workers, pin_memory=self.device.type == "cuda",
        ))  # fmt: skip
        for first in loader:
            batch, counts = planned.popleft()
            yield batch, zip(counts, itertools.chain([first], loader), strict=False)

    def _step(self, batch: Ranges, parts: Iterator) -> float:
        """Train one global batch; returns what the ranks want to do now."""
        began = time.monotonic()
        self._profile.at(self.state.step)
        self._prepare_step()
        loss_sum, tokens = self._backward(len(batch) * self._sample_tokens, parts)
        loss, tokens, wish, due, check = self._agree(loss_sum, tokens)
        self._rescale(len(batch) * self._sample_tokens / tokens)
        norm = clip_gradients(self.model, self.train.grad_clip)
        if self._guard(batch, loss, norm):
            self.optimizer.step()
            self.state.step += 1
            self.state.tokens += int(tokens)
            self.state.loss = loss
            self._trained.add(batch)
            self._log(batch, loss, norm, time.monotonic() - began)
        self.optimizer.zero_grad(set_to_none=True)
        if wish == GO_ON:
            self._save_if_due(due)
        if check:
            self._check_health()
        return wish

    def _prepare_step(self) -> None:
        """Learning rate and random numbers: functions of where the run is, not of how it came."""
        factor = learning_rate(self.state.tokens, self.total_tokens, self.train)
        for param_group, most in zip(self.optimizer.param_groups, self._peaks, strict=True):
            param_group["lr"] = most * factor * self._ramp() / self.train.learning_rate
        place = f"{self.config.run.seed}/{self.state.step}/{self.group.rank}"
        seed_by(place)

    def _ramp(self) -> float:
        """Below 1 for the first steps on top of a version: the optimizer knows nothing yet."""
        done, most = self.state.step - self.state.base_step, self.config.local_sgd.join_ramp
        return (done + 1) / most if self.state.base_version and done < most else 1.0

    def _backward(self, expected: int, parts: Iterator) -> tuple[torch.Tensor, int]:
        """Gradients of the mean over a batch, if it has the `expected` tokens (see _rescale).

        FSDP takes the mean over ranks, hence the factor `world`.
        """
        loss_sum, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for counts, data in parts:
            count = count_tokens(self.task, data) if counts else 0
            with self._autocast():
                loss = self.task.loss(self.model, to_device(data, self.device))
            (loss * (self.group.world * count / expected)).backward()
            loss_sum += loss.detach().double() * count
            tokens += count
        return loss_sum, tokens

    def _agree(self, loss_sum: torch.Tensor, tokens: int) -> tuple:
        """Mean loss and tokens of the batch, what is wanted, and is a checkpoint or a check due.

        The same on all ranks. A wish is two numbers, so that one sum serves: how many have it.
        """
        wish = self._wish()
        check = time.monotonic() - self._checked_at > self.config.health.liveness_interval_s
        mine = [float(tokens), wish == NOTICE, wish == STOPPED, self._is_due()]
        mine.append(self.group.leads and check)
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        numbers = torch.cat([loss_sum.view(1), numbers])
        if self.group.world > 1:
            dist.all_reduce(numbers)
        loss, tokens, notice, stopped, due, check = numbers.tolist()
        wish = STOPPED if stopped else NOTICE if notice else GO_ON
        return loss / tokens, tokens, wish, due > 0, check > 0

    def _wish(self) -> float:
        if self.notice:
            return NOTICE
        now = time.monotonic()
        if self.group.leads and now - self._control_at >= CONTROL_S:
            self._control_at = now
            self._fence()
            if self.run.closing("sync"):
                return STOPPED
        return GO_ON

    def _fence(self) -> None:
        later = self.run.latest_attempt(0) > self.attempt
        if later or self.run.newest_epoch() > self._epoch:
            raise Fenced(f"attempt {self.attempt}: a later one, or a master, has taken over")

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        """Mend gradients where samples differ in tokens; mostly the factor is 1."""
        if factor != 1.0:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, factor)

    def _guard(self, batch: Ranges, loss: float, norm: float) -> bool:
        """May the step be taken? Else the batch is skipped, rolled back, or the run ends."""
        bad = not (math.isfinite(loss) and math.isfinite(norm))
        said = self.nans.judge(bad)
        if said == "ok":
            return True
        seen = f"step {self.state.step}: loss {loss:g}, gradient norm {norm:g}"
        reason = f"{seen}: {said}: {self.nans.reason}"
        self._say(reason)
        if self.group.leads:
            self.run.event("not-finite", step=self.state.step, action=said, reason=reason)
        if said == "warn":
            return True
        if said == "stop":
            raise ElasticError(reason, "lower train.learning_rate, or look at the data")
        if said == "rollback":
            self._roll_back(batch)
        else:
            self._skipped.add(batch)
        return False

    def _roll_back(self, batch: Ranges) -> None:
        """Go on from the newest checkpoint, and past this batch when it comes round again."""
        self._skipped.add(batch)
        version = self.state.base_version
        found, _ = self.checkpoints.load(self.model, self.optimizer, version)
        if found:
            self._set_state(found, self._skipped)
            self._say(f"rolled back to step {found.step}")
        else:  # the bad step was not taken: leaving it out is as good
            self._say("no checkpoint to roll back to yet: the batch is left out")

    # ---- validation

    def _validate_if_due(self) -> float:
        """Let the task validate, all ranks alike; returns what the ranks want to do now.

        They agree at each pass over the model, too: validation ends at a notice, and comes again.
        """
        state, every = self.state, self.train.validate_every
        if not every or state.step // every == state.validated_step // every:
            return GO_ON
        validate = getattr(self.task, "validate", lambda model: {})
        hook = self.model.register_forward_pre_hook(self._interrupt)
        try:
            found = validate(self.model)
        except _Interrupted as wish:
            return wish.args[0]
        finally:
            hook.remove()
            self.model.train()
        state.validated_step = state.step
        if self.group.leads:
            self.run.event("validate", step=state.step, tokens=state.tokens, **found)
        return GO_ON

    def _interrupt(self, *_pass) -> None:
        wish = torch.tensor(self._wish(), device=self.device)
        if self.group.world > 1:
            dist.all_reduce(wish, dist.ReduceOp.MAX)
        self._hangs.tick()
        if wish.item() != GO_ON:
            raise _Interrupted(wish.item())

    # ---- looking after the ranks

    def _check_health(self) -> None:
        """Does everybody answer, and does the GPU still compute? All ranks, at the same step."""
        self._checked_at = time.monotonic()
        if problem := check_nccl_health(self.group, self.config.health.liveness_timeout_s):
            raise ElasticError(f"rank {self.group.rank}: {problem}", "see logs/ranks of the run")
        require_gpu(self.device, warn)

    # ---- checkpoints

    def _is_due(self) -> bool:
        """Rank 0: is it time for a checkpoint?"""
        steps = self.state.step + 1 - self._saved_step
        seconds = time.monotonic() - self._saved_at
        setting = self.config.checkpoint.interval
        return self.group.leads and cadence.is_due(setting, steps, seconds, self._auto_s)

    def _save_if_due(self, due: bool) -> None:
        """Start a checkpoint in the background; learn from the one before once it is committed."""
        try:
            if self.checkpoints.poll():
                self._choose_cadence()
            if due:
                self._mark_saved()
                self.checkpoints.begin(*self._checkpoint())
        except OSError as error:
            self._not_saved(error)

    def _save(self) -> bool:
        """Save now and wait for it, unless this very step is saved. False: the disk refused."""
        try:
            self.checkpoints.save(*self._checkpoint())
            self._mark_saved()
        except OSError as error:
            self._not_saved(error)
            return False
        return True

    def _finish_save(self) -> None:
        """Wait for what is being written: it may need little more."""
        try:
            self.checkpoints.finish()
        except OSError as error:
            self._not_saved(error)

    def _checkpoint(self) -> tuple:
        """Step, model, optimizer, and what its record says: the state, and what a commit would."""
        state, samples = self.state, list(self._trained)
        delta = {
            "role": "trainer", "slot": 0, "attempt": self.attempt, "job_id": self.job_id,
            "steps": state.step - state.base_step, "tokens": state.tokens - state.base_tokens,
            "loss": state.loss, "samples": samples,
        }  # fmt: skip
        extra = {
            "state": asdict(state), "base_version": state.base_version, "tokens": state.tokens,
            "loss": state.loss, "samples": samples, "deltas": [delta],
            "skipped": list(self._skipped), "dataset_samples": len(self.dataset),
            "epochs": 0 if self.train.max_steps else self.train.epochs,
        }  # fmt: skip
        return self.state.step, self.model, self.optimizer, extra

    def _mark_saved(self) -> None:
        self._saved_step, self._saved_at = self.state.step, time.monotonic()

    def _not_saved(self, error: OSError) -> None:
        self._cadence = f"checkpoint of step {self.state.step} not saved: {error}"  # for status
        self._say(self._cadence)
        if self.group.leads:
            self.run.event("checkpoint-failed", step=self.state.step, reason=str(error))

    def _choose_cadence(self) -> None:
        if not self.group.leads:
            return
        mtbi_s = cadence.observed_mtbi_s(self.run.endings())
        stall_s, save_s = self.checkpoints.stall_s, self.checkpoints.save_s
        self._auto_s, self._cadence = cadence.interval(stall_s, mtbi_s, save_s)

    # ---- words

    def _log(self, batch: Ranges, loss: float, norm: float, seconds: float) -> None:
        if not self.group.leads:
            return
        state, now = self.state, time.monotonic()
        started = float(env("ELASTIC_STARTED", "0")) or time.time()
        self._startup_s = self._startup_s or time.time() - started
        ranges, size = list(batch), len(self.dataset)
        first, last = ranges[0], ranges[-1]
        line = {
            "step": state.step, "time": round(time.time(), 3), "loss": loss, "norm": norm,
            "samples": [first[0] * size + first[1], last[0] * size + last[2]],
            "tokens": state.tokens, "world": self.group.world, "attempt": self.attempt,
            "seconds": round(seconds, 4),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk loses the line, and nothing else
            append_line(self.run.path / "metrics.jsonl", line)
        if now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            before, counted = self._rate
            speed = (state.tokens - counted) / max(now - before, 1e-9) if counted else 0.0
            self._rate = (now, state.tokens)
            progress = {**line, "job_id": self.job_id, "tokens_per_s": round(speed, 1),
                        "startup_s": round(self._startup_s, 3),
                        "checkpoint_step": self._saved_step, "cadence": self._cadence,
                        "total_tokens": self.total_tokens,
                        "base_version": state.base_version}  # fmt: skip
            self.run.write_progress(progress)

    def _say(self, text: str) -> None:
        if self.group.leads:
            print(f"trainer  {text}", flush=True)


def run(notice: Notice) -> int:
    """Be a rank of the job until the run is over or a notice comes."""
    run_dir = RunDir(Path(sys.argv[1]))
    config, info = run_dir.config(), get_slurm_info()
    if info and (problem := check_layout(info, config.slurm.gpus_per_node)):
        raise ElasticError(problem)
    device = choose_device(config)
    require_gpu(device, warn)
    rank, world = int(env("RANK", "0")), int(env("WORLD_SIZE", "1"))
    group = join_group(rank, world, device, config.health.hang_timeout_s)
    return Trainer(run_dir, notice, group, device).main()
