"""The master: runs Redis, closes rounds, averages, commits.

    observe   control.json, asks, leases, offers               Server, Intake
    decide    judge, wait or call or close; grant, reclaim      OpenRound, Samples
    act       grant, last call, merge, commit, announce         Averager

Everything it knows can be rebuilt from the run directory, so it may be killed anywhere.
Its epoch, taken by link(), fences older masters; a version is committed by link(), so
that even two masters that both believe in themselves commit each version once. A master
that loses that race, or sees a higher epoch, leaves and changes nothing more.
"""

import contextlib
import errno
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path

from elastic.base.durable import PASSING, exists
from elastic.base.errors import Fenced, TryAgain
from elastic.base.network import node_name
from elastic.base.signals import Notice
from elastic.jobs.history import MASTER, End, end_of_run
from elastic.jobs.passes import Passes, reconcile_now
from elastic.jobs.program import Program, run_job
from elastic.local.master.averaging import Averager
from elastic.local.master.intake import Intake
from elastic.local.master.journal import Journal, Leaving
from elastic.local.master.open_round import OpenRound
from elastic.local.master.samples import Samples
from elastic.local.master.server import TICK_S, Server
from elastic.local.rounds import Facts, Move
from elastic.local.store import Ask
from elastic.local.transport import Damaged
from elastic.run.ledger import Owner
from elastic.run.membership import Slot, expected
from elastic.run.records import Commit, Outcome
from elastic.run.rundir import RunDir
from elastic.saved.versions import remove_drafts

CONTROL_S = 1.0
# Errors after which the master goes on: at worst the files of merged deltas stay on the
# disk. Not EMFILE and ENFILE: another process may do better.
BEARABLE = (*PASSING, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class Master:
    def __init__(self, run: RunDir, notice: Notice):
        self.run, self.notice, self.config = run, notice, run.config()
        self.program, self.state = Program(run, MASTER), "running"
        self.journal = Journal(run, notice, self.stay)
        self.server = Server(run, self.config)
        self.samples = Samples()
        # Taken from Redis, and not answered yet. They are kept: a worker declares only once.
        self.asks: dict[Owner, Ask] = {}
        self.commit: Commit | None = None  # the newest version's
        self.averager: Averager | None = None  # holds the newest version
        self.intake: Intake | None = None  # of the open round
        self.passes: Passes | None = None  # while it is at work
        self.controlled_at = -CONTROL_S  # by this process's clock
        self.meets_at = 0.0  # Redis TIME
        self.ending_since = 0.0  # Redis TIME

    @property
    def epoch(self) -> int:
        """Its number; 0: it has not taken over yet."""
        return self.program.attempt

    # ---- the program

    def main(self) -> int:
        every_s = self.config.elastic.reconcile_interval_s
        self.passes = Passes(self.run, every_s, every_s)
        try:
            self.take_over()
            while self.state != "over":
                if self.notice:
                    raise Leaving(f"notice: {self.notice.signal_name}")
                self.step()
        except Leaving as error:
            return self.end(End(Outcome.YIELDED, str(error)))
        except Fenced as error:
            return self.end(End(Outcome.FENCED, str(error)))
        finally:
            self.close()
        return self.end(end_of_run(self.program.closing(self.notice) or "stopped"))

    def take_over(self) -> None:
        self.journal.wait_for_space()
        # It may take minutes: the master before goes on meanwhile.
        with contextlib.suppress(TryAgain):
            self.read_commits(self.run.commits.newest_version())
        job_id = self.program.job_id
        record = {"job_id": job_id, "node": node_name(), "time": time.time()}
        self.program.attempt = self.journal.written(self.run.masters.claim, record)
        self._open_redis()
        self.run.event("master", epoch=self.epoch, node=node_name(), job_id=job_id)
        self.journal.say(f"epoch {self.epoch}, Redis at {self.server.store.where}")

    def step(self) -> None:
        """One turn. If it fails as the run's Redis is gone or of no use, open another."""
        try:
            checks = list(self.intake.checks.values()) if self.intake else []
            self._tick(self.server.wait(checks))
        except (TryAgain, OSError) as error:
            if isinstance(error, OSError) and error.errno not in BEARABLE:
                raise
            if self.notice:
                return  # a scheduler that ends this job signals its Redis, too
            if self.server.is_lost(error):
                self.run.event("redis-lost", epoch=self.epoch, reason=str(error))
                self._open_redis()
            else:
                self.journal.say(str(error))
                time.sleep(TICK_S)

    def _tick(self, words: list[str]) -> None:
        """Read asks, then leases, then offers: so a worker whose ask is here has its
        lease read (or asks again), and one that has asked or left has its offer read."""
        now = self.observe_control()
        if self.intake:  # there is no answer before there is a version
            self.asks |= {(ask.slot, ask.attempt): ask for ask in self.server.store.take_asks()}
        slots = self.server.look(now)
        is_one_gone = self.server.workers.keys() > slots.keys()
        # Who was cut off may leave a delta that it could not offer, at any time.
        if self.intake and (self.server.has_doubts or is_one_gone or now >= self.meets_at):
            self.intake.meet()
            self.meets_at = now + self.config.health.lease_s
        if self.server.has_doubts:
            self._shut_samples()
        if self.intake is None and self.state == "running":
            self.open_run()
        if self.intake:
            self.intake.take_offers()
            self.intake.collect_checked()
            self.samples.open_early(slots, now)
            if now >= self.samples.open_at:
                self.samples.reclaim(slots, now - self.config.health.hang_timeout_s)
                self.server.dismiss(slots)
            self.answer(self.asks.values(), slots, now)
            self.asks.clear()
            if self.state == "running" and now >= self.samples.open_at:
                self._move(slots, now)
        self.finish_if_over(slots, now)
        if any(word.startswith("leave") for word in words):
            self.passes.soon()

    # ---- observe

    def observe_control(self) -> float:
        """Publish the state and, once a second, do as the run directory says; returns
        Redis TIME."""
        self.publish_state()
        now, passed = self.server.read_clock(), time.monotonic()  # Redis TIME may be put back
        if passed - self.controlled_at < CONTROL_S:
            return now
        self.controlled_at = passed
        self.fence()
        if self.run.endpoint() != self.server.endpoint:  # an older master's came last
            self.journal.written(self.run.set_endpoint, self.server.endpoint)
        if self.commit and self.run.commits.told_version() < self.commit.version:
            self.run.commits.tell(self.commit.version)  # an older master told last, or none did
        self.journal.look_for_space()
        if self.intake and self.state == "running" and self.is_behind():
            self._start_over()
        if self.state == "running" and (over := self.run.closing("local")):
            self.state = "stopping"
            self.journal.say(f"leaving: the run is {over}")
            self.publish_state(wake="stop")
        return now

    def fence(self, newest: int = 0) -> None:
        """Raise Fenced if a higher epoch is there, or has made the commit of epoch
        `newest`."""
        newest = max(newest, self.run.masters.newest())
        if newest > self.epoch > 0:
            raise Fenced(f"master epoch {self.epoch}: epoch {newest} has taken over")

    def is_behind(self) -> bool:
        """Has another master committed a version? One that was replaced may do so once
        more, and for another minute where NFS does not show it the new master's claim."""
        return self.run.commits.newest_version() > self.intake.round.version

    def _start_over(self) -> None:
        """Another master has committed the next version: go on from that, with all
        that it left."""
        version = self.intake.round.version + 1
        self.journal.say(f"version {version} was committed by another master")
        self.averager.close()
        self.averager = self.intake = None
        self.samples.granted.clear()

    def _shut_samples(self) -> None:
        deltas = self.commit.deltas if self.commit else ()
        self.samples.shut(self.server.now(), deltas, self.config.health)
        self.server.has_doubts = False

    # ---- open Redis, the run, a round

    def _open_redis(self) -> None:
        """Start the run's server (or use the site's) and tell everybody where it is."""
        self.fence()
        self.journal.written(self.server.open, self.epoch)
        self.server.has_doubts |= self.samples.ledger is not None
        self.publish_state()
        self.server.introduce()
        self.server.disown_older()
        self.journal.written(self.run.set_endpoint, self.server.endpoint)

    def open_run(self) -> None:
        """Load the newest commit, once there is a version, and what came of sync mode."""
        commit = self.run.commits.newest()
        if commit is None:
            return
        self.fence(commit.master_epoch)
        self.journal.written(remove_drafts, self.run, commit.version)
        if any((self.run.path / "checkpoints").glob("step-*.json")):
            self.fence()
            commit = self.journal.written(from_sync, self.run, commit, self.epoch)
        newest, train = commit.version, self.config.train  # somebody may have edited run.toml
        goal = {"epochs": train.epochs, "total_tokens": train.max_tokens or commit.total_tokens}
        commit = replace(commit, **goal)
        self.read_commits(newest)
        self.samples.begin(commit)
        self.averager = Averager(self.run, self.config, newest)
        settings = self.config.local_sgd
        facts = Facts(
            run=self.run.key, version=newest, layout=self.averager.layout.hash,
            codec=settings.compression, fragment_bytes=self.averager.fragment_bytes,
            max_staleness=settings.max_staleness, attempts=self.server.attempts,
            reverted=frozenset(self.samples.reverted), most_steps=settings.inner_steps,
            most_samples=settings.inner_steps * self.config.step_samples,
        )
        round_ = OpenRound(
            commit=commit, opened=self.server.now(), is_own=commit.master_epoch == self.epoch,
            ledger=self.samples.ledger, facts=facts, settings=settings, paces_s={},
        )
        is_first = self.epoch == 1 and not self.commit
        self.begin_round(round_)
        # Only now, as it hears workers from here on: to load all of that may take minutes.
        if not is_first:
            self._shut_samples()
        self.publish_state(wake=f"version {newest}")
        self.intake.meet()

    def read_commits(self, last: int) -> None:
        """Read the commits that are not known yet, up to version `last`."""
        self.samples.learn(self.run.commits.all(self.samples.known, last))

    def begin_round(self, round_: OpenRound) -> None:
        """Open a round, or mark the run as done if it was trained to its end. Needs no
        Redis."""
        self.commit, self.intake = round_.commit, Intake(self.server, self.averager, round_)
        version_bytes = sum(entry["bytes"] for entry in self.commit.files)
        self.journal.least_bytes = max(self.config.checkpoint.min_free_bytes, version_bytes)
        most = self.config.train.max_tokens
        if self.samples.ledger.complete or (most and self.commit.tokens >= most):
            reached = {"version": self.commit.version, "tokens": self.commit.tokens}
            self.journal.written(self.run.mark_done, reached)
            self.state = "done"

    # ---- act

    def publish_state(self, wake: str = "") -> None:
        """Tell Redis everything that workers need, also if its keys were lost."""
        said = {"version": -1, "call": -1, "due": inf}
        if self.intake:
            said = self.intake.round.said(self.server.workers, self.server.now())
        said |= {"state": self.state, "node": node_name(), "job_id": self.program.job_id,
                 "reason": self.journal.reason}
        self.server.store.set_master(self.epoch, said, wake)

    def answer(self, asks: Iterable[Ask], slots: dict[int, Slot], now: float) -> None:
        """Grant samples to workers whose lease is there."""
        grants, samples, least = {}, self.samples, self.config.step_samples
        for ask in sorted(asks, key=lambda each: each.slot):
            owner = (ask.slot, ask.attempt)
            if ask.attempt < self.server.attempts.get(ask.slot, 0):
                continue
            if samples.hear(owner, ask.sequence, ask.held):
                has_lease = ask.slot in slots and slots[ask.slot].attempt == ask.attempt
                if not (ask.want and has_lease) or now < samples.open_at:
                    continue  # it only tells what it holds, or will ask again
                want = min(ask.want, least * self.intake.round.inner_steps)
                ranges = samples.ledger.grant(owner, want, len(slots), least)
                if ranges or ask.held:
                    self.intake.forget_pass(owner)
                samples.granted[owner] = (ask.sequence, ranges)
            grants[owner] = samples.granted[owner]
        self.server.store.grant(grants)

    def _move(self, slots: dict[int, Slot], now: float) -> None:
        """Wait, call or close."""
        round_, preparing = self.intake.round, len(self.intake.checks)
        present = expected(list(slots.values()), now, self.config.health.stall_after_s)
        live, open_at = self.server.workers, self.samples.open_at
        move, reason = round_.decide(present, live, preparing, open_at, now)
        if not preparing:
            self.journal.say(f"round {round_.version}: {reason}")
        if move is Move.CALL:
            self.run.event("last-call", version=round_.version, reason=reason)
            self.publish_state(wake=f"last-call {round_.version}")
        elif move is Move.CLOSE:
            self.close_round(reason)

    def close_round(self, why: str) -> None:
        """Merge, commit, announce. A delta whose bytes are lost is left out."""
        intake, round_ = self.intake, self.intake.round
        before = self.run.version_path(round_.version - 1)
        can_revert = self.state == "running" and exists(before)
        commit, parts, reverts = round_.close(can_revert, self.epoch, round(self.server.now(), 3))
        self.journal.wait_for_space()
        self.fence()
        try:
            commit = self.journal.written(self.averager.commit, commit, parts)
        except Damaged as error:
            intake.withdraw(error.key, error.why)
            return
        except TryAgain:
            intake.check_accepted()
            raise
        if commit is None:
            self.fence()
            self._start_over()
            return
        self._after_commit(commit, reverts or why)
        if reverts:
            # The next round refuses the deltas that were made on it, and tells their workers.
            self.run.event("taken-back", version=commit.taken_back, reason=reverts)

    def _after_commit(self, commit: Commit, reason: str) -> None:
        """Open the next round, then announce: the commit stands, also without Redis."""
        before = self.intake.round
        self.begin_round(before.after(commit, self.server.now()))
        with contextlib.suppress(TryAgain):
            self.publish_state(wake=f"version {commit.version}")
            self.run.event(
                "outer-step", version=commit.version, tokens=commit.tokens,
                loss=commit.loss, workers=commit.workers,
                seconds=round(self.intake.round.opened - before.opened, 3), reason=reason,
            )
            for base, names in before.seen.items():
                self.server.store.drop_offers(base, names)
        self.averager.clean_up_later(commit.version, list(before.accepted))

    def stay(self) -> None:
        """What the master still does while a full disk keeps it waiting."""
        self.fence()
        with contextlib.suppress(TryAgain):
            if self.server.store:
                self.publish_state()

    # ---- the end

    def finish_if_over(self, slots: dict[int, Slot], now: float) -> None:
        """Wait for the workers to leave, then merge what they left behind."""
        if self.state == "running":
            return
        self.ending_since = self.ending_since or now
        health, intake = self.config.health, self.intake
        most_s = health.lease_s if self.state == "done" else health.hang_timeout_s
        is_checking = bool(intake and intake.checks)
        if is_checking or may_deliver(slots, self.ending_since, most_s, now):
            return
        if self.state == "stopping" and intake and intake.round.accepted:
            self.close_round("the run is being stopped")
            if self.intake is intake:
                return  # a delta was damaged: the others are merged the next time
        self.state = "over"

    def close(self) -> None:
        if self.averager:
            self.averager.close()
        with contextlib.suppress(TryAgain):
            if self.server.store and self.state == "over":
                self.state = "done" if self.run.done() else "stopping"
                self.publish_state(wake="stop")
        self.server.stop()

    def end(self, end: End) -> int:
        """Say how it ended; the exit code."""
        code = self.program.record_end(end, steps=self.commit.version if self.commit else 0)
        self.journal.say(f"{end.outcome}: {end.reason}")
        if self.passes:
            self.passes.close()
        if end.outcome != Outcome.FAILED:
            reconcile_now(self.run)
        return code


def from_sync(run: RunDir, commit: Commit, epoch: int) -> Commit:
    """The newest version, which is the newest checkpoint if sync mode went on from
    `commit`."""
    from elastic.saved import handover  # a second of imports: seldom used

    newest, refused = handover.to_local(run, commit, epoch)
    for reason in refused:
        run.event("checkpoint-refused", reason=reason)
    if newest.version > commit.version:
        run.event("mode", mode="local", version=newest.version, tokens=newest.tokens)
    return newest


def may_deliver(slots: dict[int, Slot], since: float, most_s: float, now: float) -> bool:
    """Is there a worker that may still deliver, as it has moved within `most_s`? One that
    hangs is ended by its agent."""
    still_s = [now - max(s.moved, since) for s in slots.values() if s.state != "loading"]
    return min(still_s, default=most_s) < most_s


def run(notice: Notice) -> int:
    """Be the run's master until the run is over, a notice comes, or another takes
    over."""
    notice.exit_code = None
    return run_job(Master, RunDir(Path(sys.argv[1])), notice)
