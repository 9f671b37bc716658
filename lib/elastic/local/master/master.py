"""The master: runs Redis, closes rounds, averages, commits.

    observe   slots, asks, offers, control.json
    decide    rounds.judge, rounds.decide, Ledger.grant
    act       grant samples, check a delta's bytes, last call, merge, commit, announce

Everything it knows can be rebuilt from the run directory, so it may be killed anywhere. Its epoch,
taken by link(), fences older masters; a version is committed by link(), so that even two masters
that both believe in themselves commit each version once. A master that loses that race, or sees a
higher epoch, leaves and changes nothing more.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from math import inf
from pathlib import Path

from elastic.base.config import Config
from elastic.base.durable import PASSING, SPACE_S, exists
from elastic.base.environment import elastic_home, env
from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.network import bind_address, node_name
from elastic.base.signals import Notice
from elastic.local import guards, rounds
from elastic.local.master.arithmetic import DeltaLost
from elastic.local.master.averaging import Averager, Checked
from elastic.local.master.redis_server import RedisServer, connect, start
from elastic.local.rounds import Facts, Judgement, Move, Rule, Verdict
from elastic.local.store import Ask, Listener, Store, Useless
from elastic.run.estimate import THREADS
from elastic.run.ledger import Ledger, count
from elastic.run.membership import Slot, expected, live
from elastic.run.records import Header
from elastic.run.rundir import Endpoint, RunDir
from elastic.saved.versions import carried, prune, remove_drafts

TICK_S = 0.5
LOOK_S = 0.02  # at what is being checked
CONTROL_S = 1.0
MOST_SLOTS = 10_000
MOST_REASON = 300  # characters: it may quote what is wrong
AFTER_LEAVE_S = 2.0
PASS_S = 60.0
SHARED_S = 30.0  # age of an answer of squeue that many masters and status share


class Leaving(ElasticError):
    """A notice came while the master was waiting for something."""


class Round:
    """The open round: who offered what, and what came of it."""

    def __init__(self, version: int, opened: float):
        self.version, self.opened = version, opened
        self.called: float | None = None
        self.due_s = inf
        self.seen: dict[tuple[int, str], bytes] = {}  # (base, name) -> header as it came
        self.judged: set[tuple[int, int, int]] = set()
        self.accepted: dict[tuple[int, int, int], Checked] = {}
        self.arrived: dict[tuple[int, int, int], float] = {}  # Redis TIME
        self.checking: dict[tuple[int, int, int], Future] = {}
        self.answered: set[tuple[int, int, int]] = set()
        self.rejected: dict[str, int] = {}


class Master:
    def __init__(self, run: RunDir, notice: Notice):
        self.run, self.notice, self.config = run, notice, run.config()
        self.job_id = env("ELASTIC_JOB_ID") or f"master-{node_name()}-{time.time_ns()}"
        self.epoch = 0
        self.server: RedisServer | None = None
        self.endpoint: Endpoint | None = None
        self.store: Store | None = None
        self._listener: Listener | None = None
        self.pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
        self.averager: Averager | None = None
        self._cleaning: Future | None = None
        self.ledger: Ledger | None = None
        self.round: Round | None = None
        self.commit: dict = {}
        self.taken_back: set[int] = set()  # versions
        self.attempts: dict[int, int] = {}
        self.granted: dict[tuple[int, int], tuple[int, list]] = {}
        self.paces_s: dict[int, float] = {}  # of a step, by slot: its newest delta's
        self.state = "running"
        self._reason = self._said = ""
        self.workers: dict[int, Slot] = {}
        self.has_told: set[tuple[int, int]] = set()  # who has asked this master, or declared
        self._clock = self.control_at = self.ending_since = 0.0
        self._settle_from = self.settle_until = 0.0
        self.looked_at = 0.0
        self.reconcile = Reconcile(run, self.config)

    # ---- the program

    def main(self) -> int:
        self.record({"state": "started"})
        if self.run.closing("local"):
            return self._end_as_the_run()
        try:
            self.take_over()
            while self.state != "over":
                if self.notice:
                    return self.end("yielded", Exit.OK, f"notice: {self.notice.signal_name}")
                self.step()
        except Leaving as error:
            return self.end("yielded", Exit.OK, str(error))
        except Fenced as error:
            return self.end("fenced", Exit.DO_NOT_RESTART, str(error))
        finally:
            self.close()
        return self._end_as_the_run()

    def step(self) -> None:
        """One turn. A Redis that is gone or of no use is replaced, and the turn tried again."""
        try:
            self._tick(self.wait())
        except (TryAgain, OSError) as error:
            if isinstance(error, OSError) and error.errno not in PASSING:
                raise
            if self.notice:
                return  # a scheduler that ends this job signals its Redis, too
            if self.server and (isinstance(error, Useless) or not self.server.alive()):
                self.run.event("redis-lost", epoch=self.epoch, reason=str(error))
                self._open_redis()
            else:
                self._say(str(error))
                time.sleep(TICK_S)

    def _tick(self, words: list[str]) -> None:
        now = self.observe_control()
        asks = self.store.take_asks() if self.round else []  # without one, nobody answers
        slots = self.store.slots()  # after asks: who asked before its lease was there asks again
        self._remember_attempts()
        slots = live(slots, self.attempts, now, self.config.health.hang_timeout_s)
        self.allow_for_silence(slots, now)
        self._remember_workers(slots)
        if self.round is None and self.state == "running":
            self.open_run()
        if self.round:
            self.take_offers()  # after slots and asks: a worker offers before it leaves or asks
            self.collect_checked()
            self.settle_early(slots, now)
            self._take_back(slots, now)
            self.answer(asks, slots, now)
            if self.state == "running" and now >= self.settle_until:
                self._move(slots, now)
        self.finish_if_over(slots, now)
        if any(word.startswith("leave") for word in words):
            self.reconcile.soon()
        self.reconcile.tick()

    # ---- taking over

    def take_over(self) -> None:
        self._wait_for_space()
        record = {"job_id": self.job_id, "node": node_name(), "time": time.time()}
        self.epoch = self._written(self.run.claim_epoch, record)
        self._open_redis()
        if self.epoch > 1:
            self.settle()
        self.run.event("master", epoch=self.epoch, node=node_name(), job_id=self.job_id)
        self._say(f"epoch {self.epoch}, Redis at {self.store.where}")

    def settle(self) -> None:
        """Nothing is granted or taken back, and no round closes, until agents could claim their
        leases again, and workers, between two steps, say what they hold."""
        commit = self.commit or self.run.newest_commit() or {"deltas": []}
        # What sync mode has committed says nothing of seconds.
        steps_s = [d.get("seconds", 0.0) / d["steps"] for d in commit["deltas"] if d["steps"]]
        health = self.config.health
        self._settle_from = self.store.now() + 2 * health.heartbeat_s + 1.0
        wait_s = max(health.stall_after_s, min(max(steps_s, default=0.0), health.hang_timeout_s))
        self.settle_until = self._settle_from + wait_s

    def settle_early(self, slots: dict[int, Slot], now: float) -> None:
        """Everybody who may hold samples has told this master."""
        holders = {(s.slot, s.attempt) for s in slots.values() if s.state != "loading"}
        if now >= self._settle_from and holders <= self.has_told:
            self.settle_until = min(self.settle_until, now)

    def _open_redis(self) -> None:
        """Start the run's server (or use the site's) and tell everybody where it is."""
        self.fence()
        if self.server:
            self.server.stop()
        if self.config.redis.url:
            self.endpoint = Endpoint("", 0, self.epoch, self.config.redis.url)
        else:
            address = bind_address(self.config.redis.bind, self._node_address())
            self.server = self._written(start, self.run, self.config, address, self.epoch)
            self.endpoint = self.server.endpoint
        self.store = connect(self.run, self.endpoint)
        self._listener = self.store.listen("wake")
        if self.ledger:
            self.settle()
        self.publish_state()
        self.store.set_attempts(self._known_attempts())
        self._written(self.run.set_endpoint, self.endpoint)

    def _node_address(self) -> str:
        if self.config.run.scheduler == "local":
            return "127.0.0.1"
        from elastic.jobs.sched_slurm import node_address

        return node_address()

    def _known_attempts(self) -> dict[int, int]:
        """Slot -> newest attempt, from the run directory."""
        slots = self.run.control().max // self.config.slurm.gpus_per_worker
        found = {slot: self.run.latest_attempt(slot) for slot in range(slots)}
        self.attempts |= {slot: number for slot, number in found.items() if number}
        return self.attempts

    def open_run(self) -> None:
        """Load the newest commit, once a worker has made version 0, and what came of sync mode."""
        commit = self.run.newest_commit()
        if commit is None:
            return
        self.fence(commit["master_epoch"])
        remove_drafts(self.run, commit)
        if any((self.run.path / "checkpoints").glob("step-*.json")):
            commit = self._take_over_from_sync(commit)
        committed, self.taken_back, newest = [], set(), -1
        for record in self.run.commits():
            newest = record["version"]
            committed += map(tuple, record["samples"])
            self.taken_back |= {record["taken_back"]} if "taken_back" in record else set()
        if newest != commit["version"]:  # some are not seen here yet
            return
        if self.run.told_version() < newest:  # the master before died before it told
            self.run.tell_version(newest)
        if self.averager:
            self.averager.close()
        self.averager = Averager(self.run, self.config, commit)
        held = self.ledger.held if self.ledger else {}  # nobody would say it again
        self.ledger = Ledger(commit["dataset_samples"], commit["epochs"], committed)
        for owner, ranges in held.items():
            self.ledger.hold(owner, ranges)
        self.begin_round(commit)
        self.publish_state(wake=f"version {newest}")
        self._meet_offers(range(max(0, newest - self.config.local_sgd.max_staleness), newest + 1))

    def _meet_offers(self, versions: range) -> None:
        """Those that are merged by now go. Those of workers that have left went with their server:
        nobody brings them again but the run directory."""
        merged = {
            (delta["base"], f"{delta['slot']}:{delta['attempt']}") for version in versions
            for delta in self.run.commit(version)["deltas"] if "base" in delta  # else sync mode's
        }  # fmt: skip
        for base, name in merged:
            self.store.drop_offers(base, [name])
        for base in versions:
            for name, body in self.run.left_offers(base):
                if (base, name) not in merged:
                    self.round.seen[(base, name)] = body
                    self.judge(base, name, body)

    def is_behind(self) -> bool:
        """A master that has been replaced may commit for another minute, where names that were not
        there are remembered (NFS), and just once more anywhere."""
        return self.run.newest_version() > self.round.version

    def _start_over(self) -> None:
        """Another master has committed the next version: go on from that, with all that it left."""
        self._say(f"version {self.round.version + 1} was committed by another master")
        self.round = None
        self.granted.clear()
        self.settle()

    def _take_over_from_sync(self, commit: dict) -> dict:
        """The newest version, which is the newest checkpoint if sync mode went on from `commit`."""
        from elastic.saved import handover  # a second of imports, that most masters have no use for

        self.fence()
        newest, refused = self._written(handover.to_local, self.run, commit, self.epoch)
        for reason in refused:
            self.run.event("checkpoint-refused", reason=reason)
        if newest["version"] > commit["version"]:
            self._event("mode", mode="local", version=newest["version"], tokens=newest["tokens"])
        return newest

    def begin_round(self, commit: dict) -> None:
        """Open the round on top of `commit`, or see that it was the last. Needs no Redis."""
        self.commit, self.round = commit, Round(commit["version"], self.now())
        told = {d["slot"]: d["seconds"] / d["steps"] for d in commit["deltas"] if d.get("seconds")}
        self.paces_s = told | self.paces_s  # a new master knows no others
        if self._budget_is_spent():
            reached = {name: commit[name] for name in ("version", "tokens")} | {"time": time.time()}
            self._written(self.run.mark_done, reached)
            self.state = "done"
            self.run.event("done", **reached)

    @property
    def _inner_steps(self) -> int:
        """K of the open round."""
        return rounds.inner_steps(self.commit, self.config.local_sgd)

    def _budget_is_spent(self) -> bool:
        most = self.config.train.max_tokens
        return self.ledger.complete or bool(most and self.commit["tokens"] >= most)

    def fence(self, newest: int = 0) -> None:
        newest = max(newest, self.run.newest_epoch())
        if newest > self.epoch > 0:
            raise Fenced(f"master epoch {self.epoch}: epoch {newest} has taken over")

    def publish_state(self, wake: str = "") -> None:
        """Say everything workers need; also mends a server that was emptied."""
        round_ = self.round
        fields = {
            "version": round_.version if round_ else -1, "state": self.state,
            "call": round_.version if round_ and round_.called is not None else -1,
            "due": self._due(),
            "node": node_name(), "job_id": self.job_id, "reason": self._reason,
        }  # fmt: skip
        self.store.set_master(self.epoch, fields, wake)

    def _due(self) -> float:
        """Redis TIME at which the open round is due; inf: whenever. One that nobody has delivered
        to by its deadline has lost its workers, and those that come are to do all steps."""
        if not self.round:
            return inf
        due_s, waited_s = self.due_s(), self.now() - self.round.opened
        if not self.round.accepted and waited_s > rounds.deadline_s(due_s, self.config.local_sgd):
            return inf
        return round(self.round.opened + due_s, 3)

    def due_s(self) -> float:
        """After the opening. It is put off no more in a round: who has stopped would wait."""
        paces_s = [pace_s for slot, pace_s in self.paces_s.items() if slot in self.workers]
        due_s = rounds.due_s(paces_s, self._inner_steps, self.config.local_sgd)
        self.round.due_s = min(self.round.due_s, due_s)
        return self.round.due_s

    def _note_pace(self, header: Header) -> None:
        """The time since the opening counts where both saw it: not of a delta that waited for this
        master, nor of one for a round before."""
        took_s, round_ = header.seconds, self.round
        if header.base == round_.version and self.commit["master_epoch"] == self.epoch:
            took_s = round_.arrived[header.key] - round_.opened
        self.paces_s[header.slot] = rounds.pace_s(header, took_s, self._inner_steps)

    # ---- observe

    def wait(self) -> list[str]:
        """Wake-ups since the last turn; returns at the first, or when a delta has been checked."""
        if self.round and self.round.checking:
            return self._wait_for_checks(list(self.round.checking.values()))
        words = self._listener.wait(TICK_S)
        if words and len(self.attempts) > 32:  # a burst of deliveries is one turn, not hundreds
            time.sleep(min(0.05, 0.0005 * len(self.attempts)))
            words += self._listener.wait(0)
        return words

    def _wait_for_checks(self, checks: list[Future]) -> list[str]:
        """While deltas are checked, workers may ask: a big delta must not keep them waiting."""
        until = time.monotonic() + TICK_S
        while not any(check.done() for check in checks) and time.monotonic() < until:
            if words := self._listener.wait(LOOK_S):
                return words
        return self._listener.wait(0)

    def observe_control(self) -> float:
        self.publish_state()
        now = self.store.now()
        self._clock = now - time.monotonic()
        if now - self.control_at >= CONTROL_S:
            self.control_at = now
            self.fence()
            if self.run.endpoint() != self.endpoint:  # an older master was just writing its own
                self._written(self.run.set_endpoint, self.endpoint)
            self.is_short_of_space()
            if self.round and self.state == "running" and self.is_behind():
                self._start_over()
            if self.state == "running" and (over := self.run.closing("local")):
                self.state = "stopping"
                self._say(f"leaving: the run is {over}")
                self.publish_state(wake="stop")
        return now

    def now(self) -> float:
        """Redis TIME as of the last turn, moved on: for when Redis may not answer."""
        return self._clock + time.monotonic()

    def allow_for_silence(self, slots: dict[int, Slot], now: float) -> None:
        """Leases that lapse while Redis answers nobody say nothing of those who held them."""
        before, self.looked_at = self.looked_at, now
        health = self.config.health
        if self.now() - before <= health.lease_s - health.heartbeat_s:
            return
        for slot, known in self.workers.items():
            lease = slots.get(slot)
            has_claimed = lease and lease.attempt == known.attempt and lease.joined > before
            if has_claimed or (not lease and not self._has_left(known)):
                self.settle()

    def _has_left(self, worker: Slot) -> bool:
        """Has its job said how it ended?"""
        with contextlib.suppress(TryAgain):
            return (self.run.ending(worker.job_id) or {}).get("state") == "ended"
        return False

    def _remember_attempts(self) -> None:
        """An attempt is there if its record is: what Redis says of it is only why to look."""
        told, known = self.store.attempts(), self.attempts
        for slot in [s for s, n in told.items() if n > known.get(s, 0) and 0 <= s < MOST_SLOTS]:
            if newest := self.run.latest_attempt(slot):
                known[slot] = newest
        if any(told.get(slot, 0) < newest for slot, newest in known.items()):
            self.settle()  # the server was emptied
        if told != known:
            self.store.set_attempts(known)

    def _remember_workers(self, slots: dict[int, Slot]) -> None:
        for slot, worker in slots.items():
            known = self.workers.get(slot)
            if known and known.attempt == worker.attempt:  # it may have had to claim again
                slots[slot] = replace(worker, joined=min(known.joined, worker.joined))
            else:
                self._event("join", slot=slot, attempt=worker.attempt, node=worker.node,
                            job_id=worker.job_id)  # fmt: skip
        self.workers |= slots

    def take_offers(self) -> None:
        version, late = self.round.version, self.config.local_sgd.max_staleness
        # Further back than may be merged, so that too stale a delta is told apart from a lost one.
        # One that is based on a version which is not seen here yet waits for it.
        bases = range(max(0, version - late - 2), version + 1)
        for base, offers in self.store.offers(bases).items():
            for name, body in sorted(offers.items()):
                if self.round.seen.get((base, name)) != body:
                    self.round.seen[(base, name)] = body
                    self.judge(base, name, body)

    def judge(self, base: int, name: str, body: bytes) -> None:
        round_, ledger = self.round, self.ledger
        try:
            header = rounds.credited(Header.from_json(json.loads(body)), self._tokens_per_sample)
            if (f"{header.slot}:{header.attempt}", header.base) != (name, base):
                raise ValueError(f"it says {header.key}, and came from {name} for version {base}")
        except (ValueError, RecursionError) as error:
            self._reject(name, rounds.refusal(Rule.MALFORMED, str(error)), base)
            return
        owner = (header.slot, header.attempt)
        judged = rounds.judge(header, self._facts(), ledger.refusal(owner, header.samples))
        if judged.verdict is Verdict.REJECT:
            if judged.rule is Rule.STALE:
                self.averager.drop([header.key])  # nobody else would
            self._reject(name, judged, base)
        elif judged.verdict is Verdict.PASS:
            round_.answered.add(header.key)
        else:
            round_.judged.add(header.key)
            ledger.offer(header.key, header.samples)
            round_.checking[header.key] = self.pool.submit(self.averager.check, header)

    def _facts(self) -> Facts:
        averager, settings = self.averager, self.config.local_sgd
        return Facts(
            run=self.run.key, version=self.round.version, layout=averager.layout.hash,
            fragment_bytes=averager.fragment_bytes, max_staleness=settings.max_staleness,
            attempts=self.attempts, judged=frozenset(self.round.judged),
            taken_back=frozenset(self.taken_back), most_steps=settings.inner_steps,
            most_samples=settings.inner_steps * self.config.step_samples,
        )  # fmt: skip

    @property
    def _tokens_per_sample(self) -> float:
        """So far in this run; 0: none is trained."""
        return self.commit.get("tokens", 0) / max(1, len(self.ledger.committed))

    def collect_checked(self) -> None:
        for key, future in list(self.round.checking.items()):
            if not future.done():
                continue
            del self.round.checking[key]
            try:
                checked = future.result()
            except TryAgain:  # Redis went away with the bytes: judge it again
                self.forget(key)
                raise
            if checked.refused:
                self.withdraw(key, checked.refused)
                continue
            self.round.accepted[key], self.round.arrived[key] = checked, self.now()
            header = checked.header
            if header.base == self.round.version:
                self.round.answered.add(key)
            self._note_pace(header)
            self._event("delta", slot=header.slot, attempt=header.attempt, base=header.base,
                        steps=header.steps, tokens=header.tokens)  # fmt: skip

    def forget(self, key: tuple[int, int, int]) -> None:
        """Take back what a delta's header led to."""
        round_ = self.round
        self.ledger.withdraw(key)
        round_.accepted.pop(key, None)
        round_.judged.discard(key)
        round_.answered.discard(key)
        round_.seen.pop((key[2], f"{key[0]}:{key[1]}"), None)
        if not round_.accepted:  # a called worker trains no more: there would never be another
            round_.called = None

    def withdraw(self, key: tuple[int, int, int], why: Judgement) -> None:
        """A delta that was accepted by its header is not merged after all."""
        self.forget(key)
        self._reject(f"{key[0]}:{key[1]}", why, key[2])

    def _reject(self, name: str, why: Judgement, base: int) -> None:
        """Tell the worker, who starts the round again, and everybody who reads events.

        The offer goes after the verdict has come: a worker that finds neither may bring it again.
        """
        rule, reason = why.rule, why.reason[:MOST_REASON]
        self.round.rejected[rule] = self.round.rejected.get(rule, 0) + 1
        self.round.seen.pop((base, name), None)
        is_sound = re.fullmatch("[0-9]{1,9}:[0-9]{1,9}", name)
        slot, attempt = map(int, name.split(":")) if is_sound else (name[:MOST_REASON], "")
        self.store.set_verdict(name, {"base": base, "rule": rule, "reason": reason})
        self.store.drop_offers(base, [name])
        self._event("reject", slot=slot, attempt=attempt, base=base, rule=rule, reason=reason)

    def _take_back(self, slots: dict[int, Slot], now: float) -> None:
        """Samples of workers that are gone are free again."""
        if now < self.settle_until:
            return
        alive = {(worker.slot, worker.attempt) for worker in slots.values()}
        for owner in [owner for owner in self.ledger.held if owner not in alive]:
            self.ledger.give_back(owner)
            self.granted.pop(owner, None)
        for slot in [slot for slot in self.workers if slot not in slots]:
            worker = self.workers.pop(slot)
            if not self._has_left(worker):
                self._event("lost", slot=slot, attempt=worker.attempt, job_id=worker.job_id,
                            node=worker.node, steps=worker.step)  # fmt: skip

    # ---- act

    def answer(self, asks: list[Ask], slots: dict[int, Slot], now: float) -> None:
        """Grant samples. A repeated ask gets the same answer, so that none is granted twice."""
        grants = {}
        for ask in sorted(asks, key=lambda each: each.slot):
            owner = (ask.slot, ask.attempt)
            if ask.attempt < self.attempts.get(ask.slot, 0):
                continue
            self.has_told.add(owner)
            last, ranges = self.granted.get(owner, (-1, []))
            if ask.sequence != last:
                self.ledger.keep(owner, ask.held)
                has_lease = ask.slot in slots and slots[ask.slot].attempt == ask.attempt
                if not (ask.want and has_lease) or now < self.settle_until:
                    continue  # it only tells; or it will ask again
                least = self.config.step_samples
                want = min(ask.want, least * self._inner_steps)
                ranges = self.ledger.grant(owner, want, len(slots), least)
                if ranges or ask.held:
                    self._forget_pass(owner)
                self.granted[owner] = (ask.sequence, ranges)
            grants[owner] = (ask.sequence, ranges)
        self.store.grant(grants)

    def _forget_pass(self, owner: tuple[int, int]) -> None:
        """A worker that had nothing to give goes on: the round is not to close without it. If it
        does not go on after all it finds its offer gone, and brings it again."""
        round_, (slot, attempt) = self.round, owner
        key, name = (slot, attempt, round_.version), f"{slot}:{attempt}"
        if key in round_.answered and key not in round_.judged:
            self.store.drop_offers(round_.version, [name])
            round_.answered.discard(key)
            round_.seen.pop((round_.version, name), None)

    def _move(self, slots: dict[int, Slot], now: float) -> None:
        round_ = self.round
        present = expected(list(slots.values()), now, self.config.health.stall_after_s)
        view = rounds.View(
            opened=round_.opened, called=round_.called,
            # Who claims again after a server's end has not joined late.
            expected={slot: round_.opened if record.joined <= self.settle_until else record.joined
                      for slot, record in present.items()},
            answered=frozenset(slot for slot, worker in present.items()
                               if (slot, worker.attempt, round_.version) in round_.answered),
            accepted=len(round_.accepted), preparing=len(round_.checking),
            due_s=self.due_s(),
        )  # fmt: skip
        move, reason = rounds.decide(view, self.config.local_sgd, now)
        if not view.preparing:
            self._say(f"round {round_.version}: {reason}")
        if move is Move.CALL:
            round_.called = now
            self._event("last-call", version=round_.version, reason=reason)
            self.publish_state(wake=f"last-call {round_.version}")
        elif move is Move.CLOSE:
            self.close_round(reason)

    def close_round(self, why: str) -> None:
        """Merge, commit, announce. On a damaged delta the round goes on without it."""
        round_ = self.round
        headers = [checked.header for checked in round_.accepted.values()]
        newer = rounds.refusal(Rule.SUPERSEDED, "the slot delivered a newer delta")
        for header in rounds.superseded(headers):
            self.withdraw(header.key, newer)
        headers = [checked.header for checked in round_.accepted.values()]
        if reason := self._is_bad(guards.round_loss(headers, round_.version)):
            accepted, (recipe, said) = {}, self.averager.take_back()
        else:
            accepted = round_.accepted
            recipe, said = self.averager.weigh(list(accepted.values()))
        record = self._commit_record(said, accepted)
        self._wait_for_space()
        self.fence()
        try:
            commit = self._written(self.averager.commit, self.epoch, recipe, record)
        except DeltaLost as error:
            self.withdraw(error.key, error.why)
            return
        if commit is None:
            self.fence()
            self._start_over()
            return
        if not accepted:
            for header in headers:
                self.forget(header.key)
        bad = self.commit
        self._after_commit(commit, reason or why)
        if not accepted:
            self._tell_what_was_taken_back(bad["version"], reason, headers)

    def _is_bad(self, loss: float) -> str:
        """Why the newest version is to be taken back, or "". Only one that deltas have made can be,
        and the one before must still be there."""
        commit, settings = self.commit, self.config.local_sgd
        before = self.run.version_path(commit["version"] - 1)
        if not commit["deltas"] or not exists(before) or self.state != "running":
            return ""
        return guards.canary(loss, self.averager.running, settings.canary)

    def _tell_what_was_taken_back(self, version: int, reason: str, headers: list[Header]) -> None:
        """To those who trained on it. Nothing depends on it: there is a newer version for all."""
        self.taken_back.add(version)
        with contextlib.suppress(TryAgain):
            suspect = self.commit["suspect"] or []
            self._event("taken-back", version=version, reason=reason, suspect=suspect)
            for header in headers:
                what = f"version {version} is taken back: {reason}"
                refused = rounds.refusal(Rule.TAKEN_BACK, what)
                self._reject(f"{header.slot}:{header.attempt}", refused, header.base)

    def _commit_record(self, said: dict, accepted: dict[tuple, Checked]) -> dict:
        round_ = self.round
        deltas = [
            {
                "slot": h.slot, "attempt": h.attempt, "job_id": h.job_id, "base": h.base,
                "codec": h.codec,
                "steps": h.steps, "tokens": h.tokens, "loss": h.loss, "inner": h.inner,
                "first_loss": h.first_loss, "samples": [list(each) for each in h.samples],
                "norm": checked.norm, "lr_sum": h.lr_sum,
                "seconds": h.seconds, "stall_s": h.stall_s,
                "delivered": round(round_.arrived[h.key], 3),
            }
            for checked in sorted(accepted.values(), key=lambda c: c.header.key)
            for h in [checked.header]
        ]  # fmt: skip
        tokens = sum(delta["tokens"] for delta in deltas)
        return {
            "master_epoch": self.epoch, "time": round(self.now(), 3),
            "tokens": self.commit["tokens"] + tokens,
            "samples": sorted(each for delta in deltas for each in delta["samples"]),
            "deltas": deltas,
            "workers": len({delta["slot"] for delta in deltas}) or self.commit["workers"],
            "loss": sum(d["loss"] * d["tokens"] for d in deltas) / tokens if tokens
                    else self.commit.get("loss"),
            "rejected": round_.rejected, **carried(self.commit), **said,
            "total_tokens": self._total_tokens(tokens, deltas),
        }  # fmt: skip

    def _total_tokens(self, tokens: int, deltas: list[dict]) -> int:
        """What the run comes to: by epochs, as many tokens a sample as there were so far."""
        ledger, told = self.ledger, self.commit["tokens"] + tokens
        seen = len(ledger.committed) + sum(count(delta["samples"]) for delta in deltas)
        if not (ledger.epochs and seen and told):
            return self.commit["total_tokens"]
        return round(told / seen * ledger.samples * ledger.epochs)

    def _after_commit(self, commit: dict, reason: str) -> None:
        """Open the next round, then announce it: the commit stands, even if Redis is gone."""
        before = self.round
        for key in before.accepted:
            self.ledger.commit(key)
        self.begin_round(commit)
        with contextlib.suppress(TryAgain):
            self.publish_state(wake=f"version {commit['version']}")
            self._event(
                "outer-step", version=commit["version"], tokens=commit["tokens"],
                loss=commit["loss"], workers=commit["workers"],
                seconds=round(self.round.opened - before.opened, 3), reason=reason,
            )  # fmt: skip
            names: dict[int, list[str]] = {}
            for base, name in before.seen:
                names.setdefault(base, []).append(name)
            for base, group in names.items():
                self.store.drop_offers(base, group)
        # Gigabytes take their time to go, and workers wait for samples by now.
        drop = (self.averager, list(before.judged))
        self._cleaning = self.pool.submit(self.clean_up, commit["version"], *drop)

    def clean_up(self, version: int, averager: Averager, merged: list) -> None:
        with contextlib.suppress(TryAgain):
            averager.drop(merged)
        keep = max(self.config.checkpoint.keep, self.config.local_sgd.max_staleness + 1)
        prune(self.run, version, keep, self.config.checkpoint.keep_every)

    # ---- the end

    def finish_if_over(self, slots: dict[int, Slot], now: float) -> None:
        """Done or stopping: wait for the workers to leave, then merge what they left behind."""
        if self.state == "running":
            return
        self.ending_since = self.ending_since or now
        round_ = self.round
        if self._are_leaving(slots, now) or (round_ and round_.checking):
            return
        if self.state == "stopping" and round_ and round_.accepted:
            self.close_round("the run is being stopped")
            if self.round is round_:
                return  # without a delta that was damaged: the others are merged the next time
        self.state = "over"

    def _are_leaving(self, slots: dict[int, Slot], now: float) -> bool:
        """Is there a worker that may still deliver? One that hangs is ended by its agent."""
        health = self.config.health
        most_s = health.lease_s if self.state == "done" else health.hang_timeout_s
        still_s = [now - max(s.moved, self.ending_since) for s in slots.values()
                   if s.state != "loading"]  # fmt: skip
        return min(still_s, default=most_s) < most_s

    def is_short_of_space(self, failed: OSError | None = None) -> bool:
        refused = f"waiting to write to {self.run.path}: {failed.strerror}" if failed else ""
        self._reason = self.run.shortage(self.config.checkpoint.min_free_bytes) or refused
        return bool(self._reason)

    def _wait_for_space(self, failed: OSError | None = None) -> None:
        """A full disk stops the clock, not the run: go on when there is space again.

        `failed`: what a write said, whatever the filesystem says is free (a quota, say).
        """
        while self.is_short_of_space(failed):
            failed = None
            if self.notice:
                raise Leaving(f"notice: {self.notice.signal_name}, while {self._reason}")
            self._say(self._reason)
            self.fence()
            with contextlib.suppress(TryAgain):
                if self.store:
                    self.publish_state()
            time.sleep(SPACE_S)

    def _written(self, write: Callable, *args):
        """`write(*args)`, as often as it takes."""
        while True:
            try:
                return write(*args)
            except OSError as error:
                self.run.event("disk", reason=f"not written: {error.strerror}")
                self._wait_for_space(error)

    def close(self) -> None:
        if self._cleaning:
            wait([self._cleaning])
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self.averager:
            self.averager.close()
        with contextlib.suppress(TryAgain):
            if self.store and self.state == "over":
                self.publish_state(wake="stop")
        self.reconcile.close()
        if self.server:
            self.server.stop()

    def _end_as_the_run(self) -> int:
        outcome = "done" if self.run.done() else "stopped"
        return self.end(outcome, Exit.OK, f"the run is {self.run.closing('local') or outcome}")

    def end(self, outcome: str, code: int, reason: str, detail: str = "") -> int:
        said = {"outcome": outcome, "code": code, "reason": reason, "detail": detail}
        self.record({"state": "ended", **said})
        self._say(f"{outcome}: {reason}")
        if outcome != "failed":
            self.reconcile.last()
        return code

    def record(self, fields: dict) -> None:
        steps = self.commit.get("version", 0)
        who = {"role": "master", "slot": 0, "attempt": self.epoch, "node": node_name()}
        self.run.write_ending(self.job_id, {**who, "steps": steps, **fields})

    def _event(self, kind: str, **fields) -> None:
        self.run.event(kind, **fields)
        self.store.add_event({"time": time.time(), "kind": kind, **fields})

    def _say(self, text: str) -> None:
        """Log a line when it changes, not while it is true."""
        if text != self._said:
            self._said = text
            print(f"master  {text}", flush=True)


class Reconcile:
    """The reconcile pass between cron's ticks: the same command, in a process of its own."""

    def __init__(self, run: RunDir, config: Config):
        self._command = [str(elastic_home() / "bin" / "elastic-reconcile"), str(run.path)]
        self._every_s = config.elastic.reconcile_interval_s
        self._within_s = min(SHARED_S, self._every_s / 2)
        self._next = time.monotonic() + self._every_s
        self._process: subprocess.Popen | None = None

    def tick(self) -> None:
        """Start a pass if it is time; never two."""
        if self._process and self._process.poll() is None:
            return
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            command = [*self._command, f"--within={self._within_s:g}"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            self._within_s = min(SHARED_S, self._every_s / 2)

    def soon(self) -> None:
        """A worker has left: look again once its job has had time to end."""
        self._next = min(self._next, time.monotonic() + AFTER_LEAVE_S)
        self._within_s = 0.0

    def close(self) -> None:
        """Wait for a pass under way."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process:
                self._process.wait(PASS_S)

    def last(self) -> None:
        """After the master's last word: nothing is left pending, and the other mode's job is
        submitted, also where there is no cron."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(self._command, stdin=subprocess.DEVNULL, timeout=PASS_S)


def run(notice: Notice) -> int:
    """Be the run's master until the run is over, a notice comes, or another one takes over."""
    notice.exit_code = None
    master = Master(RunDir(Path(sys.argv[1])), notice)
    try:
        return master.main()
    except Exception as error:
        known = isinstance(error, ElasticError)
        said = (str(error), "") if known else (repr(error), traceback.format_exc())
        master.end("failed", error.code if known else Exit.ERROR, *said)
        raise
