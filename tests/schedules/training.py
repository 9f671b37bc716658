"""Local mode: real masters, agents, lines and training loops on edges made of dictionaries.

Real: `Master` and its parts, `Averager.commit`, the stores, `Line`, `LocalSGD`, `Agent.beat` and
all that they decide with. Not real: Redis, the run directory, bytes and arithmetic, the clock.

A schedule says who runs how far, and what goes wrong. What must always hold is checked where it
would break: at the link() of a commit, at a call of somebody who is fenced. When the schedule is
over, nothing goes wrong any more, and the run has to come to its end within a bound.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import redis
import torch

from elastic.base import durable, signals
from elastic.base.errors import ElasticError, Fenced
from elastic.local.master import averaging, journal, master, server
from elastic.local.master.averaging import Averager
from elastic.local.master.master import Master
from elastic.local.master.open_round import Checked, Part
from elastic.local.rounds import Rule
from elastic.local.store import Store
from elastic.local.transport import Damaged
from elastic.local.worker import adopt, agent, deliver, in_hand, line, local_sgd
from elastic.local.worker.agent import SILENT, Agent
from elastic.local.worker.line import Line, Place
from elastic.local.worker.local_sgd import LocalSGD
from elastic.run.claims import Masters, Slots
from elastic.run.commits import Commits
from elastic.run.ledger import count
from elastic.run.records import Commit, Fragment, Header, restored
from elastic.run.rundir import Control, Endpoint, RunDir
from elastic.run.told import Jobs, Offers
from elastic.train.group import Group
from schedules.actors import Actor, Cast, Violation, must, operations
from schedules.memory_redis import Client, Server

SLOTS, SAMPLES, EPOCHS = 3, 9, 2
PAUSE_TURNS = 6  # longer than a lease
QUIET_TURNS = 8  # after which nothing of what went wrong is left
MOST_TURNS = 120  # of everybody, until the run is done
TURN_S = 1.5
LATE_S = 20.0  # that a master may see names late, as where NFS remembers that they were not there
LAYOUT = SimpleNamespace(hash="abc", fragments=[0])
CONFIG = SimpleNamespace(
    run=SimpleNamespace(seed=1, scheduler="local"),
    train=SimpleNamespace(batch_size=1, accumulate=1, max_tokens=0, epochs=EPOCHS, schedule="own",
                          loader_workers=0),
    step_samples=1,
    local_sgd=SimpleNamespace(
        inner_steps=2, max_staleness=1, compression="none", overlap="off",
        cold_start=0, clip_norm=2.0, canary=0.3, outer_lr=0.7, thin_rounds=True,
        quorum=0.5, deadline_k=4.0,
        min_deadline_s=2.0, last_call_s=3.0, outer_momentum=0.5,
    ),
    health=SimpleNamespace(heartbeat_s=2.0, lease_s=6.0, stall_after_s=20.0,
                           hang_timeout_s=600.0, max_bad_batches=5),
    checkpoint=SimpleNamespace(min_free_bytes=1, keep=3, keep_every=0),
    slurm=SimpleNamespace(gpus_per_worker=1),
    elastic=SimpleNamespace(reconcile_interval_s=60.0),
    redis=SimpleNamespace(url="", bind=""),
)
SITE = SimpleNamespace(url="redis://site")
SITE_REDIS = SimpleNamespace(**vars(CONFIG) | {"redis": SITE})
EDGES = ("link a commit", "link a commit", "write a version", "look for a newer epoch",
         "write endpoint.json", "write DONE", "claim an epoch", "blpop")
STEPS = (1, 2, 3, 5, 8, 13, 25, 60)  # edges that a turn lasts
TABLE = (
    *["all turn"] * 14, *["turn"] * 30, *["time"] * 6, *["news"] * 5, *["start worker"] * 5, "kill",
    "kill", *["notice"] * 2, *["start master"] * 4, "flush", "kill redis", *["lose a call"] * 4,
    *["forge"] * 4, "disk", *["freeze"] * 3,
    *["freeze master"] * 3, "stop",
    "silence", *["see late"] * 3,
)


def positions(ranges: list) -> Iterator[tuple[int, int]]:
    return ((epoch, at) for epoch, start, stop in ranges for at in range(start, stop))


@dataclass
class View:
    """What a master sees that sees new names late: how many there were."""

    until: float
    epochs: int
    commits: int
    where: Endpoint | None


class MemoryRun(RunDir):
    """A run directory in which link() and rename() are the only ways to write, too."""

    def __init__(self, world: "Training"):
        super().__init__(Path("/nowhere/run-a"))
        self.private, self.key = self.path, "run-a"
        self.commits, self.slots = MemoryCommits(self), MemorySlots(self)
        self.masters, self.jobs = MemoryMasters(self), MemoryJobs(self)
        self.offers, self.world = MemoryOffers(self), world
        self.epochs, self.attempts = 0, {}
        self.linked: dict[int, str] = {}
        self.left: dict[tuple[int, int, int], bytes] = {}
        self.end = self.where = None
        self.wanted = Control("local", "running", 1, SLOTS)

    def config(self):
        return self.world.config

    def secret(self, role="master"):
        return ""

    def control(self):
        return self.wanted

    def done(self):
        return self.end

    def failed(self):
        return None

    def event(self, kind, **fields):
        if kind == "reject":
            self.world.rejected.append(fields)

    def endpoint(self):
        self.world.edge("read endpoint.json")
        view = self.world.view()
        return view.where if view else self.where

    def seen(self) -> int:
        """How many commits whoever acts can see."""
        view = self.world.view()
        return min(view.commits, len(self.linked)) if view else len(self.linked)

    def set_endpoint(self, endpoint):
        self.world.changes("write endpoint.json")
        self.where = endpoint

    def mark_done(self, record):
        self.world.changes("write DONE")
        self.end = record

    def shortage(self, least_bytes):
        return "the disk is full" if self.world.full else ""


class MemoryMasters(Masters):
    def claim(self, record):
        self.run.world.edge("claim an epoch")
        self.run.epochs += 1
        return self.run.epochs

    def newest(self):
        world = self.run.world
        world.edge("look for a newer epoch")
        view = world.view()
        newest = view.epochs if view else self.run.epochs
        if newest > world.epoch_of_acting():
            world.fenced()
        return newest


class MemorySlots(Slots):
    def claim(self, slot, record):
        attempts = self.run.attempts
        attempts[slot] = attempts.get(slot, 0) + 1
        return attempts[slot]

    def all(self):
        return sorted(self.run.attempts)

    def latest(self, slot):
        return self.run.attempts.get(slot, 0)

    def fence(self, slot, attempt):
        if self.latest(slot) > attempt:
            self.run.world.fenced()
        super().fence(slot, attempt)


class MemoryJobs(Jobs):
    def write_ending(self, job_id, record):
        pass

    def ending(self, job_id):
        return None


class MemoryOffers(Offers):
    def leave(self, header):
        self.run.world.changes("leave an offer")
        self.run.left[header.key] = json.dumps(asdict(header)).encode()

    def left(self, base):
        self.run.world.edge("look for offers that were left")
        return [(f"{slot}:{attempt}", body)
                for (slot, attempt, of), body in sorted(self.run.left.items()) if of == base]


class MemoryCommits(Commits):
    def of(self, version):
        run = self.run
        run.world.edge("read a commit")
        return restored(Commit, json.loads(run.linked[version])) if version < run.seen() else None

    def newest_version(self):
        self.run.world.edge("look for the newest version")
        return self.run.seen() - 1

    told_version = newest_version

    def link(self, commit):
        run, world = self.run, self.run.world
        world.changes("link a commit")
        if view := world.view():  # the server decides, and then the name is known here
            view.commits = max(view.commits, commit.version + 1)
            world.linked_late.add(commit.version)
        if commit.version in run.linked:
            return False
        run.linked[commit.version] = json.dumps(commit.to_json())
        return True


class MemoryDraft:
    """A `VersionDraft` without tensors."""

    def __init__(self, run: MemoryRun, version: int, writer: str):
        self.run, self.version, self.writer = run, version, writer

    def commit(self, layout, files: list, commit: Commit) -> Commit | None:
        commit = replace(commit, writer=self.writer, files=tuple(files))
        won = self.run.commits.link(commit)
        won = won or self.run.commits.of(self.version).writer == self.writer
        return commit if won else None

    def discard(self) -> None:
        pass


class MemoryAverager(Averager):
    """What is merged is written down. The bytes of a delta are the samples it has trained."""

    def __init__(self, run, config, version):
        self.run, self.layout = run, LAYOUT

    def close(self):
        pass

    @property
    def fragment_bytes(self):
        return (4,)

    def check_later(self, header: Header) -> Future:
        """Done at once."""
        future = Future()
        try:
            future.set_result(self.check(header))
        except Exception as error:
            future.set_exception(error)
        return future

    def check(self, header: Header) -> Checked:
        self.run.world.edge("read a delta")
        if self.run.world.bytes.get(header.key) != header.fragments[0].xxh3:
            raise Damaged(header.key, Rule.ALTERED, "other bytes")
        return Checked(header, 1.0)

    def advance(self, commit: Commit, parts: list[Part], draft) -> tuple:
        for header, _ in parts:
            self.check(header)
        self.run.world.edge("write a version")
        if self.run.world.full:
            raise OSError(28, "No space left on device")
        return [], None

    def clean_up_later(self, version: int, merged: list) -> None:
        self.drop(merged)

    def drop(self, keys: list) -> None:
        for key in keys:
            self.run.world.bytes.pop(key, None)


class Notice(signals.Notice):
    """Without a pipe."""

    def __init__(self):
        self.since, self.signal_name, self.exit_code = None, "SIGTERM", None
        self.window_s = signals.KILL_WAIT_S


class HeardLine(Line):
    """A line whose watcher looks when it is told to."""

    def __init__(self, place: Place, notice: Notice):
        super().__init__(place, notice)
        self._watched: Store | None = None
        idle = place.run.world.idle
        self._closed = SimpleNamespace(wait=lambda _s: idle("lost line"), set=lambda: None)

    def open(self) -> None:
        pass

    def say(self, **progress) -> None:
        self._said |= progress

    def wait(self, until):
        if not (until(self.news) or self.notice):
            self.run.world.idle("wait for news")
            self.hear()
        return self.news

    def hear(self) -> None:
        """One round of `_watch`."""
        try:
            self._watched = self._watched or Store.open(self.run)
            self._note(self._watched.master(), self._watched.now())
        except ElasticError:
            self._watched = None
            if over := self.run.closing("local"):
                state = "done" if over == "done" else "stopping"
                self._note({"state": state, "version": "-1"})


class MemoryExchange:
    """No tensors. The bytes of a delta are the samples it has trained."""

    group, replica = Group(), SimpleNamespace(layout=LAYOUT, restore=lambda: None, delta=None)
    codec = SimpleNamespace(name="none")

    def __init__(self, world: "Training", hand: in_hand.InHand):
        self.world, self.hand = world, hand

    def adopt(self, commit: dict, _fetched) -> None:
        pass

    def send(self, _delta_of, _put) -> tuple[list[Fragment], float]:
        self.world.edge("write a delta")
        done, place = self.hand.round, self.hand.line.place
        text, key = str(done.samples), (place.slot, place.attempt, done.base)
        self.world.bytes[key], self.world.sent[key] = text, list(positions(done.samples))
        return [Fragment(4, text)], 0.0


class NoMoments:
    """`moments.Moments`, without an optimizer."""

    origin, save_s = "", 0.0

    def nothing(self, *_args) -> None:
        pass

    set_rates = step = forget = begin = save = save_if_due = nothing


class Life(LocalSGD):
    """The life of a worker, without a model."""

    run = property(lambda self: self.place.run)

    def open(self, dataset) -> None:
        if self.run.commits.newest_version() < 0:
            first = adopt.first_commit(LAYOUT, self.config, len(dataset), 1)
            self.run.commits.link(replace(first, writer=self.place.job_id))
        self.train_with(MemoryExchange(self.run.world, self._hand), NoMoments())

    def live(self) -> None:
        with self:
            for _ in self.batches(range(SAMPLES), list):
                self.run.world.edge("train a step")
                self.step()


class Worker:
    """One job: an agent and its training process."""

    def __init__(self, world: "Training", slot: int):
        run = world.run
        self.notice, self.next_beat = Notice(), world.now
        self.agent = Agent(run, slot, self.notice)
        self.agent.program.job_id = f"{slot}"
        self.agent.program.attempt = self.attempt = run.slots.claim(slot, {})
        place = Place(run, slot, self.attempt, f"{slot}.{self.attempt}")
        optimizer = SimpleNamespace(param_groups=[], state={})
        self.life = Life(torch.nn.Linear(1, 1), optimizer, place, self.notice, Group())
        self.slot, self.line = slot, self.life.line
        self.actor = Actor(f"worker {slot}.{self.attempt}", self.life.live)

    def beat(self, world: "Training") -> None:
        """The agent's turn: a heartbeat, or the last word when its training process has ended."""
        said = {name: self.line._said.get(name, SILENT[name]) for name in SILENT}
        training = agent.Training([SimpleNamespace(pid=1)], -1, said, heard=world.now)
        if not self.actor.alive:
            self.agent.lease.give_up()
            return
        self.next_beat = world.now + world.config.health.heartbeat_s
        try:
            self.agent.beat(training)
        except Fenced:
            world.cast.kill(self.actor)


@dataclass
class Started:
    """`redis_server.RedisServer`, of a server in memory."""

    server: Server
    endpoint: Endpoint

    def alive(self) -> bool:
        return self.server.alive

    def stop(self) -> None:
        self.server.alive = False


class Training:
    """The world of one schedule."""

    def __init__(self, schedule: bytes):
        self.cast, self.log, self.now = Cast(), [], 1000.0
        self.config = SITE_REDIS if schedule[:1] > b"\xaa" else CONFIG
        self.run, self.bytes, self.full, self.calm = MemoryRun(self), {}, False, False
        self.servers = {0: Server(lambda: self.now)}
        self.forged: set[tuple[int, int, int]] = set()
        self.masters: list[tuple[Actor, Master, Notice]] = []
        self.workers: list[Worker] = []
        self.faults: list[int] = []  # what happens to the next calls of Redis
        self.rejected: list[dict] = []
        self.sent: dict[tuple[int, int, int], list] = {}  # the samples of each delta
        self.paused: Worker | None = None
        self.views: dict[Actor, View] = {}
        self.linked_late: set[int] = set()  # versions
        self.over: set[tuple[int, int]] = set()  # samples committed before all was quiet
        self.seen: dict[int, str] = {}
        self.committed: dict[tuple[int, int], int] = {}
        self.late: dict[int, int] = {}
        self.merged: set[tuple[int, int, int]] = set()
        self._schedule = schedule[1:]

    # ---- the edges

    def edge(self, where: str) -> None:
        self.cast.edge(where)

    def idle(self, where: str) -> None:
        self.cast.idle(where)

    def changes(self, where: str) -> None:
        """An edge behind which the world is changed: nothing that a fenced program may do."""
        self.edge(where)
        self.refuse_the_fenced(where)

    def refuse_the_fenced(self, where: str) -> None:
        actor = self.cast.acting
        must(not (actor and actor.fenced), f"{actor and actor.name} goes on, fenced: {where}")

    def view(self) -> View | None:
        """What whoever acts sees, if that is not what is there."""
        view = self.views.get(self.cast.acting)
        if view and view.until <= self.now:
            del self.views[self.cast.acting]
            return None
        return view

    def fenced(self) -> None:
        """Whoever is acting has been told that a higher number has taken over."""
        if self.cast.acting:
            self.cast.acting.fenced = True

    def call(self, name: str, action):
        """A call of Redis: it may be lost, its answer may be lost, or it may be made twice."""
        (self.idle if name in ("blpop", "wait") else self.edge)(name)
        self.refuse_the_fenced(name)
        fault = self.faults.pop() if self.faults and self.cast.acting else None
        if fault == 0:
            raise redis.exceptions.ConnectionError("the call is lost")
        answer = action()
        if fault == 1:
            raise redis.exceptions.ConnectionError("the answer is lost")
        answer = action() if fault == 2 else answer
        if (name, answer) == ("master", 0):
            self.fenced()
        return answer

    def connect(self, kind: type[Store], endpoint: Endpoint, _password, run_name: str, *_) -> Store:
        server = self.servers[endpoint.port]
        client, where = Client(server, self.call), f"server {endpoint.port}"
        return kind(client, run_name, where, endpoint.epoch)

    def start_redis(self, _run, _config, _address: str, epoch: int):
        self.edge("start Redis")
        port, server = len(self.servers), Server(lambda: self.now)
        self.servers[port] = server
        return Started(server, Endpoint("", port, epoch))

    def epoch_of_acting(self) -> int:
        """Of the master that is at its turn, from its birth in mind to the end of its life."""
        epochs = [boss.epoch for actor, boss, _ in self.masters if actor is self.cast.acting]
        return epochs[0] if epochs and epochs[0] else 1 << 30

    # ---- what goes on

    def play(self) -> None:
        """The schedule, and then a good end. Raises Violation."""
        try:
            self.start_master()
            for slot in range(2):
                self.start_worker(slot)
            for _ in range(2):
                self.on_all_turn(7)
            for name, how in operations(self._schedule, TABLE):
                if note := getattr(self, "on_" + name.replace(" ", "_"))(how):
                    self.log.append(f"{name}: {note}")
                self.check()
                self.check_rejected()
            self.end_well()
        finally:
            self.cast.close()

    def living(self) -> list[Actor]:
        return [actor for actor in self.cast.actors if actor.alive and not actor.frozen]

    def on_turn(self, how: int) -> str:
        actors = self.living()
        if not actors:
            return ""
        actor, steps = actors[how % 8 % len(actors)], STEPS[how // 8 % 8]
        self.cast.turn(actor, steps)
        return f"{steps} edges of {actor.name}, now at {actor.where!r}"

    def on_all_turn(self, how: int) -> str:
        steps = STEPS[how % 8]
        for actor in self.living():
            self.cast.turn(actor, steps)
        self.pass_time(TURN_S)
        return f"{steps} edges of each, then {TURN_S} s"

    def on_time(self, how: int) -> str:
        seconds = (0.5, 1.0, 2.5, 7.0)[how % 4]
        self.pass_time(seconds)
        return f"{seconds} s"

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers:
            if not worker.actor.frozen and worker.next_beat <= self.now:
                worker.beat(self)
        self.reap()

    def reap(self) -> None:
        for worker in [each for each in self.workers if not each.actor.alive]:
            self.workers.remove(worker)
            if not worker.actor.killed:
                worker.beat(self)
        for actor, boss, _ in [each for each in self.masters if not each[0].alive]:
            self.masters = [each for each in self.masters if each[0] is not actor]
            boss.server.stop()  # it dies with its parent

    def on_news(self, how: int) -> str:
        if not self.workers:
            return ""
        worker = self.workers[how % len(self.workers)]
        worker.line.hear()
        return f"{worker.actor.name} hears {worker.line.news}"

    def on_start_worker(self, how: int) -> str:
        """Slurm may take a job for dead that is not: two at most are in one slot."""
        slot = how % SLOTS
        if sum(worker.slot == slot for worker in self.workers) > 1:
            return ""
        return self.start_worker(slot)

    def start_worker(self, slot: int) -> str:
        worker = Worker(self, slot)
        self.workers.append(worker)
        self.cast.enter(worker.actor)
        worker.beat(self)
        return worker.actor.name

    def on_start_master(self, _how: int) -> str:
        return self.start_master() if len(self.masters) < 2 else ""

    def start_master(self) -> str:
        notice = Notice()
        boss = Master(self.run, notice)
        actor = self.cast.enter(Actor(f"master {len(self.cast.actors)}", boss.main))
        self.masters.append((actor, boss, notice))
        return actor.name

    def on_kill(self, how: int) -> str:
        actors = [actor for actor in self.cast.actors if actor.alive]
        if not actors:
            return ""
        actor = actors[how % len(actors)]
        self.cast.kill(actor)
        self.reap()
        return f"{actor.name}, which was at {actor.where!r}"

    def on_notice(self, how: int) -> str:
        notices = [(w.actor.name, w.notice) for w in self.workers]
        notices += [(actor.name, notice) for actor, _, notice in self.masters]
        if not notices:
            return ""
        name, notice = notices[how % len(notices)]
        notice.since = notice.since or self.now
        return name

    def on_flush(self, _how: int) -> str:
        for one in self.servers.values():
            one.flushall()
        return "all"

    def on_kill_redis(self, _how: int) -> str:
        if self.config is SITE_REDIS:
            return self.on_flush(0)  # its operators bring it back, empty
        self.servers[len(self.servers) - 1].alive = False
        return "the newest"

    def on_lose_a_call(self, how: int) -> str:
        self.faults.append(how % 3)
        return ("before it is made", "its answer", "it is made twice")[how % 3]

    def on_silence(self, how: int) -> str:
        """Redis answers nobody until all leases have lapsed; some agents then call again later."""
        health = self.config.health
        self.now += health.lease_s + 1.0
        for number, worker in enumerate(self.workers):
            worker.next_beat = self.now + health.heartbeat_s * (how >> number & 1)
        return "of a lease and more"

    def on_disk(self, how: int) -> str:
        self.full = how % 2 > 0
        return "full" if self.full else "has space"

    def on_freeze(self, how: int) -> str:
        """A whole node stands still, or goes on as if nothing had been."""
        actors = [actor for actor in self.cast.actors if actor.alive]
        if not actors:
            return ""
        actor = actors[how % len(actors)]
        actor.frozen = not actor.frozen
        return f"{actor.name} {'stands still' if actor.frozen else 'goes on'} at {actor.where!r}"

    def on_freeze_master(self, how: int) -> str:
        """A master will stand still when it gets to a certain edge; another one is started."""
        if not self.masters:
            return ""
        actor = self.masters[how % len(self.masters)][0]
        actor.freezes_at = EDGES[how // 2 % len(EDGES)]
        return f"{actor.name} will stand still at {actor.freezes_at!r}"

    def on_see_late(self, how: int) -> str:
        """A master sees no new name for a while, and its workers stay with it; there is another
        one, that may be it, too."""
        if not self.masters:
            return ""
        actor = self.masters[how % len(self.masters)][0]
        run, seconds = self.run, LATE_S * (1 + how // 2 % 3) / 3
        self.views[actor] = View(self.now + seconds, run.epochs, len(run.linked), run.where)
        other = self.on_start_master(how) if how // 8 % 2 else ""
        return f"{actor.name} sees no new names for {seconds:.0f} s; {other}"

    def on_stop(self, how: int) -> str:
        state = "stopped" if self.run.wanted.state == "running" else "running"
        self.run.wanted = replace(self.run.wanted, state=state)
        return state

    def on_forge(self, how: int) -> str:
        """A header that no honest worker would offer, by the name of one that is there."""
        if not (self.workers and self.masters):
            return ""
        worker = self.workers[how % len(self.workers)]
        server = self.servers[len(self.servers) - 1 if self.config is CONFIG else 0]
        version, kind = len(self.run.linked) - 1, how // 8 % 5
        at = how % SAMPLES
        base = version + (0, 0, 1, -2, 0)[kind]
        attempt = worker.attempt + (0, 1, 0, 0, 0)[kind]
        header = Header(
            run="run-b" if kind == 4 else "run-a", slot=worker.slot, attempt=attempt,
            job_id="of run-b" if kind == 4 else "",
            base=base, layout="abc", codec="none", steps=1, tokens=1,
            samples=((EPOCHS - 1, at, at + 1),), loss=0.0, first_loss=0.0,
            fragments=(Fragment(4, "forged"),),
        )
        if base < 0:
            return ""
        self.bytes.setdefault(header.key, "forged")
        self.forged.add(header.key)  # of a version to come: it is judged when that is there
        store, name = Store(Client(server, self.call), "run-a", ""), f"{header.slot}:{attempt}"
        store.seal, key = self.run.secret("seal"), f"elastic:run-a:offers:{base}"
        server.hset(key, name, store._sealed(key, name, asdict(header)))
        what = ("again, other samples", "never claimed", "future", "stale", "other run")[kind]
        return f"{header.key}, {what}"

    # ---- what must hold

    def check(self) -> None:
        linked = self.run.linked
        for version, text in self.seen.items():
            must(linked.get(version) == text, f"commit {version} has changed")
        for version in range(len(self.seen), len(linked)):
            must(version in linked, f"commit {version} is missing")
            self.seen[version] = linked[version]
            self.check_commit(version, restored(Commit, json.loads(linked[version])))

    def check_commit(self, version: int, commit: Commit) -> None:
        deltas, epoch = commit.deltas, commit.master_epoch
        before = json.loads(self.seen[version - 1])["tokens"] if version else 0
        must(commit.tokens == before + sum(d.tokens for d in deltas), "tokens: not the sum")
        keys = {(delta.slot, delta.attempt, delta.base) for delta in deltas}
        must(len(keys) == len(deltas), f"version {version} has the same delta twice")
        must(version == 0 or deltas, f"version {version} is made of nothing")
        self.merged |= keys
        for delta in deltas:
            who = f"the delta of {delta.slot}.{delta.attempt} in version {version}"
            must(delta.attempt <= self.run.attempts.get(delta.slot, 0), f"{who}: no such one")
            must(delta.job_id != "of run-b", f"{who}: it is another run's")
            must(0 <= version - 1 - delta.base <= 1, f"{who} is based on {delta.base}")
            must(delta.tokens == count(delta.samples), f"{who}: tokens are not samples")
            for e, at in positions(delta.samples):
                first = self.committed.setdefault((e, at), version)
                must(first == version, f"sample {e}:{at} is in versions {first} and {version}")
                self.committed[e, at] = -version
        before = json.loads(self.seen[version - 1])["master_epoch"] if version else 0
        must(epoch >= before, f"version {version} is of epoch {epoch}, the one before of {before}")
        if version and epoch < self.run.epochs and version not in self.linked_late:
            self.late[epoch] = self.late.get(epoch, 0) + 1
            must(self.late[epoch] == 1, f"master epoch {epoch} goes on committing, fenced")

    def check_rejected(self) -> None:
        """Who has adopted a version that its master does not see yet has done nothing wrong."""
        for rejected in self.rejected:
            key = tuple(rejected[name] for name in ("slot", "attempt", "base"))
            ahead = rejected["reason"].startswith("future") and key in self.sent
            must(not ahead, f"a delta is rejected that is ahead of its master: {rejected}")

    # ---- the end

    def end_well(self) -> None:
        """Nothing goes wrong any more: first until all is quiet, then with one clean loss."""
        self.faults.clear()
        self.full = False
        self.run.wanted = replace(self.run.wanted, state="running")
        for actor in self.cast.actors:
            actor.frozen, actor.freezes_at = False, ""
        done, quiet, since = len(self.run.linked), MOST_TURNS, 0
        for turn in range(MOST_TURNS):
            if self.run.end:
                break
            if any(view.until > self.now for view in self.views.values()):
                since = turn  # two masters may hand out the same samples, and only one be right
            is_quiet = turn - since >= QUIET_TURNS and len(self.run.linked) > done
            if not self.calm and is_quiet:
                self.calm, self.rejected, quiet = True, [], turn
                self.over = set(self.committed)
                self.log.append("all is quiet")
            if turn == quiet + 1:
                self.one_clean_loss(self._schedule[-1] % 5)
            if self.paused and turn == quiet + PAUSE_TURNS:
                self.paused.actor.frozen = False
            self.fair_turn()
            self.check()
            self.check_rejected()
            lost = [r for r in self.rejected if self.calm and self.was_good(r)]
            must(not lost, f"a good delta is rejected: {lost}")
        must(self.run.end, f"the run does not end: {len(self.committed)} samples committed; "
             + ", ".join(f"{a.name} at {a.where!r}" for a in self.living()))
        must(len(self.committed) == SAMPLES * EPOCHS, "a sample is missing")

    def was_good(self, rejected: dict) -> bool:
        """Is its work lost, though its samples were nobody else's when all became quiet?"""
        key = tuple(rejected[name] for name in ("slot", "attempt", "base"))
        old = self.over.intersection(self.sent.get(key, ()))
        is_late = self.paused and key[:2] == (self.paused.slot, self.paused.attempt)
        is_honest = key in self.sent and key not in self.merged | self.forged
        is_lost = rejected["rule"] is Rule.SAMPLES and is_honest
        return is_lost and not old and not is_late

    def one_clean_loss(self, what: int) -> None:
        """Of a kind of which a good worker must not feel anything."""
        if what == 0:
            self.log.append(f"silence: {self.on_silence(self._schedule[-2])}")
        elif what == 1:
            self.log.append("a new master")
            for actor, _, _ in self.masters:
                self.cast.kill(actor)
        elif what == 2:
            self.log.append(f"flush: {self.on_flush(0)}")
        elif what == 3:
            self.log.append(f"another Redis: {self.on_kill_redis(0)}")
        elif what == 4:
            self.paused = self.workers[self._schedule[-2] % len(self.workers)]
            self.paused.actor.frozen = True
            self.log.append(f"{self.paused.actor.name} stands still at {self.paused.actor.where!r}")

    def fair_turn(self) -> None:
        self.pass_time(TURN_S)
        if not self.masters:
            self.start_master()
        for slot in range(SLOTS):
            if not any(worker.slot == slot for worker in self.workers):
                self.start_worker(slot)
        for actor in self.living():  # once all is quiet, a round takes several turns
            self.cast.turn(actor, 7 if self.calm and "worker" in actor.name else 60)
        for worker in self.workers:
            worker.line.hear()


class Clock:
    """`time`, of the world that is being played."""

    world: Training

    def time(self) -> float:
        return self.world.now

    monotonic = time

    def time_ns(self) -> int:
        return int(self.world.now * 1e9)

    def sleep(self, _seconds: float) -> None:
        self.world.idle("sleep")


CLOCK = Clock()
WORKER = (line, in_hand, deliver, adopt)


class NoPass:
    """`master.Passes`: no jobs here."""

    def __init__(self, *_args):
        pass

    soon = close = lambda self: None


@contextlib.contextmanager
def in_memory():
    """The modules' outside replaced by that of `CLOCK.world`, for the time of the tests."""
    def quiet(*_args, **_options) -> None:
        pass

    def world(name: str) -> Callable:
        return lambda *args, **options: getattr(CLOCK.world, name)(*args, **options)

    replaced = {
        master: {
            "Averager": MemoryAverager, "Passes": NoPass, "reconcile_now": quiet,
            "remove_drafts": quiet, "time": CLOCK,
        },
        server: {"start": world("start_redis"), "bind_address": quiet, "time": CLOCK},
        journal: {"print": quiet, "time": CLOCK},
        averaging: {"VersionDraft": MemoryDraft},
        Store: {"connect": classmethod(world("connect"))},
        **{module: {"print": quiet, "time": CLOCK} for module in WORKER},
        local_sgd: {"Line": HeardLine, "time": CLOCK},
        agent: {"print": quiet, "time": CLOCK},
        signals: {"time": CLOCK}, durable: {"time": CLOCK},
    }
    with contextlib.ExitStack() as stack:
        for target, names in replaced.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


def play(schedule: bytes) -> Training:
    """The world after a schedule. A Violation carries what happened as notes."""
    CLOCK.world = world = Training(schedule)
    try:
        world.play()
    except Violation as violation:
        violation.log = world.log
        raise
    return world
