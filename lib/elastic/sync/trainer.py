"""A rank of a synchronous job: one process per GPU.

    restore   the newest checkpoint that verifies, resharded to the ranks there are; if
              none is on top of the newest version (handover.py), that version
    step      the next global batch (batches.py), shared by all ranks; one agreement at
              its end
    save      when due (saving.py), in the background; at a notice at once, if there is
              time

All that a step depends on, its samples, its learning rate, its random numbers, follows
from the state that checkpoints carry, so a run that comes back at another size goes on
with the same steps. The ranks agree once per step, in one reduction of numbers: the
loss, the tokens, and whether anybody wants to stop, or rank 0 wants to save or to look
after everybody's health. Between the passes of a long step they agree on whether to
stop. Rank 0 alone writes: metrics.jsonl (a line per step),
progress.json (for status), DONE.

Exit status: 0 the run is done; 75 a notice was obeyed; 93 the run is stopped, or this
attempt is fenced; anything else is a crash, and the launcher knows what to do about it.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from elastic.base.config import Config
from elastic.base.durable import STUCK_S, append_line, patiently, until_written
from elastic.base.environment import env
from elastic.base.errors import ElasticError, Exit, Fenced
from elastic.base.signals import Notice
from elastic.run.ledger import Range, Ranges
from elastic.run.rundir import RunDir
from elastic.run.shuffle import check_size
from elastic.saved import handover
from elastic.saved.checkpoint import Saved, steps
from elastic.saved.replica import Statistics
from elastic.sync.batches import Batch, Batches
from elastic.sync.rank import Rank, Wish, Wishes
from elastic.sync.saving import Saving, State
from elastic.train import device
from elastic.train.group import Group, clip_gradients, rescale_gradients
from elastic.train.health import HangDetector, NaNDetector, check_nccl_health, require_gpu
from elastic.train.inner_optimizer import InnerOptimizer, Probe
from elastic.train.optimizers import optimizer_of
from elastic.train.schedule import share_of_peak
from elastic.train.task import Interrupted, count_tokens, go_to, load_task, score, weighed

PROGRESS_S = 1.0
AGREE_S = 0.2  # of passes between two agreements: each waits for the GPUs


class Trainer:
    def __init__(self, rank: Rank, notice: Notice):
        config, group = rank.config, rank.group
        self.rank, self.notice, self.train = rank, notice, config.train
        # Where the run is, and where it was at the newest version.
        self.state = self._base = State()
        go_to(Path(config.run.folder))
        task = load_task(config.run.task, config.task, Path(config.run.folder))
        # Before the data set, which may be a random part of another one: it seeds torch.
        self.learner = Learner(task, config, group)
        self.batches = Batches(task, config, group)
        self.probe = Probe(self.learner.model, near=0.1, may_ignore=0)
        self._passes, self._pass_s = 1, AGREE_S  # of the newest step, on this rank
        self._agree_every = 1  # passes; the same on all ranks
        self.saving = Saving(rank, self.learner.model, self.learner.rates, self.batches)
        self.wishes, self.log = Wishes(rank, notice), StepLog(rank)
        health = config.health
        self.nans = NaNDetector(health.nan_action, group, health.max_bad_batches)
        self._checked_at = time.monotonic()

    # ---- the program

    def main(self) -> int:
        """Train to the end of the run, or until a notice; returns the exit status."""
        self._restore()
        for doubt in self.learner.rates.doubts(self.learner.model):
            self.rank.event("warning", reason=doubt)
        self.notice.exit_code = None
        wish = self._train()
        # No longer within the HangDetector: a save may take longer than any step.
        self.log.turn_to("saving")
        while wish == Wish.GO_ON and not self.saving.save(self.state):
            self.log.turn_to("saving", cadence=self.saving.words)
            time.sleep(STUCK_S)  # not done before the last step is on the disk
            wish = Wish(self.rank.group.broadcast(self.wishes.mine()))
        if wish != Wish.GO_ON:
            return self._leave(wish)
        if self.rank.group.leads:
            self._mark_done()
        return Exit.OK

    def _train(self) -> Wish:
        """Step by step, until a rank wants to stop: returns that wish, or GO_ON if
        nothing is left to train."""
        timeout_s = self.rank.config.health.hang_timeout_s
        with HangDetector(timeout_s, functools.partial(device.leave, Exit.ERROR)) as hangs:
            wish = self._validate_if_due(hangs)  # a notice may have broken one off
            while wish == Wish.GO_ON and not self._budget_is_spent():
                if (batch := self.batches.next()) is None:
                    break
                wish = self._step(batch) or self._validate_if_due(hangs)
                hangs.tick()
        return wish

    def _budget_is_spent(self) -> bool:
        state, train = self.state, self.train
        # A run that begins anew, as no checkpoint is sound, counts on from their steps.
        steps = state.step - (0 if state.base_version else state.base_step)
        return 0 < train.max_tokens <= state.tokens or 0 < train.max_steps <= steps

    def _leave(self, wish: Wish) -> int:
        if wish == Wish.FENCED:
            raise Fenced(f"attempt {self.rank.attempt}: it leaves, as rank 0 was fenced")
        self.saving.save_within(self.state, self.wishes.left_s)
        why = "notice" if wish == Wish.NOTICE else "stopped"
        self.rank.say(f"leaves at step {self.state.step}: {why}")
        return Exit.TRY_AGAIN if wish == Wish.NOTICE else Exit.DO_NOT_RESTART

    def _mark_done(self) -> None:
        self.wishes.fence()
        reached = {"version": self.state.step, "tokens": self.state.tokens}
        reached["skipped"] = list(self.batches.skipped)
        until_written(lambda: self.rank.run.mark_done(reached), self.notice.__bool__)

    # ---- where the run is

    def _restore(self) -> None:
        began, rank = time.time(), self.rank
        base, committed = rank.group.decide(self._find_base)
        self._base = State(**base)
        self.batches.set(committed)
        version = self._base.base_version
        self.probe.before()
        saved, refused = self.saving.load(version)
        self._go_on_from(saved)
        if version and not saved:
            read = functools.partial(handover.to_sync, rank.run, version, self.learner.model)
            rank.group.all_do(lambda: patiently(read, for_s=rank.group.patience_s))
        elif not saved:
            device.set_initial_values(self.learner.task, self.learner.model)
        at = "" if saved else f"version {version}" if version else "the beginning"
        where = at or f"step {self.state.step}"
        self.probe.placed(self.state.step)
        self.saving.begin_at(self.state.step)
        rank.say(f"{rank.group.world} ranks, attempt {rank.attempt}: goes on at {where}")
        for reason in refused:
            rank.say(f"checkpoint not used: {reason}")
            rank.event("checkpoint-refused", reason=reason)
        self.saving.choose_cadence()
        rank.event("restore", step=self.state.step, world=rank.group.world, attempt=rank.attempt,
                   job_id=rank.job_id, load_s=round(time.time() - began, 3), resume=at)

    def _find_base(self) -> tuple[dict, list[Range]]:
        """Rank 0: the state of the run at the newest version, and the samples of all
        versions up to it."""
        self.wishes.claim_epoch()
        run = self.rank.run
        newest = run.commits.newest()
        version, tokens = (newest.version, newest.tokens) if newest else (0, 0)
        check_size(self.batches.dataset_samples, newest and newest.dataset_samples)
        commits = run.commits.all(last=version) if newest else ()
        samples = Ranges(span for commit in commits for span in commit.samples)
        step = max(steps(run), default=0)
        base = {"base_version": version, "base_step": step, "base_tokens": tokens}
        return asdict(State(step, tokens, **base)), list(samples)

    def _go_on_from(self, saved: Saved | None, skipped: Iterable[Range] = ()) -> None:
        """Go on from a checkpoint, or from the base if there is none, without the samples
        that are `skipped`."""
        extra = saved.extra if saved else {"samples": (), "skipped": ()}
        check_size(self.batches.dataset_samples, extra.get("dataset_samples"))
        self.state = State(**extra["state"]) if saved else replace(self._base)
        skipped = [*extra["skipped"], *skipped]
        self.batches.set(self.batches.committed, extra["samples"], skipped)

    # ---- a step

    def _step(self, batch: Batch) -> Wish:
        """Train one global batch; returns what the ranks want to do now."""
        began, learner = time.monotonic(), self.learner
        expected = len(batch.samples) * self.batches.tokens_each
        self._prepare_step()
        try:
            losses, tokens = learner.backward(self._unless_told(batch.passes), expected)
        except Interrupted as interruption:  # what has begun of the batch comes again
            learner.drop_batch()
            return interruption.wish
        loss, tokens, wish, save, check = self._agree(losses, tokens)
        self._pass_s = (time.monotonic() - began) / self._passes  # the GPUs are done with them
        if wish == Wish.FENCED:
            return wish
        rescale_gradients(learner.model, expected / max(tokens, 1))
        norm = clip_gradients(learner.model, self.train.grad_clip)
        if self._may_step(batch, loss, norm):
            learner.optimizer.step()
            self.probe.check([learner.optimizer])
            self._count(batch, loss, tokens)
            self._tell(batch, norm, time.monotonic() - began)
        learner.optimizer.zero_grad(set_to_none=True)
        if wish == Wish.GO_ON:
            self.saving.begin(self.state, save)
        if check:
            self._check_health()
        return wish

    def _unless_told(self, passes: Iterable) -> Iterator:
        """The passes of a step. Between them, too, the ranks agree on whether to stop: a
        long step may take longer than a notice leaves."""
        for self._passes, each in enumerate(passes, 1):
            if self._passes > 1 and (self._passes - 1) % self._agree_every == 0:
                self.wishes.interrupt()
            yield each

    def _prepare_step(self) -> None:
        """Learning rate and random numbers: functions of where the run is, not of how it
        came."""
        state = self.state
        progress = state.tokens / self.batches.total_tokens(state.tokens)
        self.learner.rates.set_rates(share_of_peak(progress, self.train) * self._ramp())
        device.seed_by(f"{self.rank.config.run.seed}/{state.step}/{self.rank.group.rank}")

    def _ramp(self) -> float:
        """A factor of the learning rate, below 1 for the first steps on top of a version:
        the optimizer has no moments yet."""
        done = self.state.step - self.state.base_step
        most = self.rank.config.local_sgd.join_ramp
        return (done + 1) / most if self.state.base_version and done < most else 1.0

    def _agree(self, losses: torch.Tensor, tokens: int) -> tuple[float, float, Wish, bool, bool]:
        """Learn from all ranks, in one sum, the batch's mean loss and tokens, what they
        want, and whether rank 0 finds it time for a checkpoint, or for a look at
        everybody's health."""
        group = self.rank.group
        silent_s = time.monotonic() - self._checked_at
        check = group.leads and silent_s > self.rank.config.health.liveness_interval_s
        save = self.saving.is_due(self.state.step + 1)
        mine = [*losses.tolist(), tokens, self._pass_s * group.leads, save, check]
        wish, (loss, told, tokens, pass_s, save, check) = self.wishes.of_all(*mine)
        self._agree_every = math.ceil(AGREE_S / max(pass_s, 1e-3))
        loss = loss / told if told else math.nan
        return loss, tokens, wish, save > 0, check > 0

    def _may_step(self, batch: Batch, loss: float, norm: float) -> bool:
        """May the optimizer step? If not, the batch is skipped, or steps are rolled back.
        ElasticError ends the run."""
        verdict = self.nans.judge(not math.isfinite(norm))
        if verdict == "ok":
            return True
        numbers = f"step {self.state.step}: loss {loss:g}, gradient norm {norm:g}"
        reason = f"{numbers}: {verdict}: {self.nans.reason}"
        self.rank.say(reason)
        self.rank.event("not-finite", step=self.state.step, action=verdict, reason=reason)
        if verdict == "stop":
            raise ElasticError(reason, "lower train.learning_rate, or look at the data")
        if verdict != "warn":
            self.learner.drop_batch()
            self.batches.skipped.add(batch.samples)
        if verdict == "rollback":
            self._roll_back()
        return verdict == "warn"

    def _roll_back(self) -> None:
        """Go on from the newest checkpoint. The samples that are skipped are left out
        when they come round again."""
        saved, _ = self.saving.load(self.state.base_version)
        if saved:
            self._go_on_from(saved, self.batches.skipped)
            self.rank.say(f"rolled back to step {saved.step}")
        else:  # the bad step was not taken: to leave its batch out is as good
            self.rank.say("no checkpoint to roll back to yet: the batch is left out")

    def _count(self, batch: Batch, loss: float, tokens: float) -> None:
        self.state.step += 1
        self.state.tokens += int(tokens)
        self.state.loss = loss if math.isfinite(loss) else self.state.loss
        self.batches.trained.add(batch.samples)

    def _tell(self, batch: Batch, norm: float, seconds: float) -> None:
        state, size = self.state, self.batches.dataset_samples
        (first, start, _), (last, _, stop) = list(batch.samples)[0], list(batch.samples)[-1]
        line = {"step": state.step, "time": round(time.time(), 3), "loss": state.loss,
                "norm": norm, "samples": [first * size + start, last * size + stop],
                "tokens": state.tokens, "world": self.rank.group.world,
                "attempt": self.rank.attempt, "seconds": round(seconds, 4)}
        more = {"cadence": self.saving.words, "base_version": state.base_version,
                "total_tokens": self.batches.total_tokens(state.tokens)}
        self.log.write(line, more)

    def _check_health(self) -> None:
        """Does everybody answer, and does the GPU still compute? All ranks, at the same
        step."""
        self._checked_at = time.monotonic()
        group, timeout_s = self.rank.group, self.rank.config.health.liveness_timeout_s
        if problem := check_nccl_health(group, timeout_s):
            raise ElasticError(f"rank {group.rank}: {problem}", "see logs/ranks of the run")
        require_gpu(group.device)

    # ---- validation

    def _validate_if_due(self, hangs: HangDetector) -> Wish:
        """Let the task validate, all ranks alike; returns what the ranks want to do now.

        They agree at each pass over the model, too: validation ends at a notice, and
        comes again.
        """
        state, task = self.state, self.learner.task
        every = self.train.validate_every if hasattr(task, "validate") else 0
        if not every or state.step // every == state.validated_step // every:
            return Wish.GO_ON

        def before_pass() -> None:
            self.wishes.interrupt()
            hangs.tick()

        # After a notice nobody knows what parameters validate() has left in the model.
        self.saving.begin(state, True)
        self.log.turn_to("validating")
        try:
            with self.learner.autocast():
                measured = score(task, self.learner.model, before_pass)
        except Interrupted as interruption:
            return interruption.wish
        state.validated_step = state.step
        if self.rank.group.leads:
            self.rank.run.scores.add(state.tokens, measured, step=state.step)
        return Wish.GO_ON


class Learner:
    """What a rank computes: the model, its optimizer, the passes of a step. All ranks
    call every method alike."""

    def __init__(self, task, config: Config, group: Group):
        self.task, self._group, self._train = task, group, config.train
        self.model = device.build_model(task, config, group.device, group)
        self.optimizer = optimizer_of(task, self.model, self._train)
        self.rates = InnerOptimizer(self.optimizer, sets_rates=True)
        self._statistics = Statistics(self.model)
        self.autocast = device.precision(self._train.precision, group.device)

    def backward(self, passes: Iterator, expected: int) -> tuple[torch.Tensor, int]:
        """Compute the gradients of the mean over a batch, if it has the `expected` tokens
        (else `rescale_gradients` mends them). Returns this rank's sum of losses and the
        tokens that these are of, in one tensor, and its tokens. A part of nothing but
        padding has no loss, and its gradients are 0.

        FSDP takes the mean over ranks, hence the factor `world`.
        """
        place = self._group.device
        losses, tokens = torch.zeros(2, dtype=torch.float64, device=place), 0
        self._statistics.note()
        for share, data in passes:
            count = round(count_tokens(self.task, data) * share)
            with self.autocast():
                loss = self.task.loss(self.model, device.to_device(data, place))
            (loss * (self._group.world * count / expected)).backward()
            losses += weighed(loss, count)
            tokens += count
        return losses, tokens

    def drop_batch(self) -> None:
        """Forget what `backward` has left in the model."""
        self.optimizer.zero_grad(set_to_none=True)
        self._statistics.put_back()


class StepLog:
    """What rank 0 writes of the steps: a line for each, and progress.json."""

    def __init__(self, rank: Rank):
        self._rank = rank
        self._progress_at, self._counted = 0.0, 0  # of the newest progress.json: when, and tokens
        self._startup_s = 0.0  # from the launcher's start of the ranks to the first step's end
        self._told: dict = {}

    def write(self, line: dict, more: dict) -> None:
        """Write the line of a step. `more`: what status wants to know beside it."""
        if not self._rank.group.leads:
            return
        now, path = time.monotonic(), self._rank.run.path / "metrics.jsonl"
        started = float(env("ELASTIC_STARTED", "0")) or time.time()
        self._startup_s = self._startup_s or time.time() - started
        with contextlib.suppress(OSError):  # a full disk loses the line, and nothing else
            append_line(path, line)
        if now - self._progress_at < PROGRESS_S:
            return
        more_tokens = line["tokens"] - self._counted if self._counted else 0
        speed = more_tokens / (now - self._progress_at)
        self._progress_at, self._counted = now, line["tokens"]
        measured = {"tokens_per_s": round(speed, 1), "startup_s": round(self._startup_s, 3)}
        self._told = {**line, "job_id": self._rank.job_id, **measured, **more}
        self.turn_to("training")

    def turn_to(self, state: str, **more) -> None:
        """Say in progress.json what the ranks do now: a validation or a save may take
        long."""
        if self._told:
            self._rank.run.jobs.write_progress({**self._told, "state": state, **more})


def run(notice: Notice) -> int:
    """Be a rank of the job until the run is over or a notice comes."""
    run_dir = RunDir(Path(sys.argv[1]))
    config = run_dir.config()
    number, world = int(env("RANK", "0")), int(env("WORLD_SIZE", "1"))
    group = device.join(config, number, world, config.health.hang_timeout_s)
    attempt, job_id = int(env("ELASTIC_ATTEMPT", "1")), env("ELASTIC_JOB_ID", "")
    return Trainer(Rank(run_dir, config, group, attempt, job_id), notice).main()
