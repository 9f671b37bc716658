"""Random schedules: the real decisions in worlds where everything is late, lost or said twice.

    pytest -s tests/whole/test_random_schedules.py    ELASTIC_SCHEDULES=100000 for more

A schedule is bytes that hypothesis draws and shrinks; a failing one is printed as what happened.
Then one decision at a time is broken, and some schedule must notice.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, note, settings, strategies as st

from elastic.base.errors import Fenced, TryAgain
from elastic.jobs import history, plan, reconcile
from elastic.local import rounds
from elastic.local.master.averaging import Averager
from elastic.local.master.intake import Intake
from elastic.local.master.master import Master
from elastic.local.master.open_round import Checked, OpenRound
from elastic.local.master.samples import Samples
from elastic.local.master.server import Server
from elastic.local.rounds import Facts, Rule
from elastic.local.store import Ask
from elastic.run.ledger import Ledger, Ranges
from elastic.run.rundir import Endpoint
from helpers import commit_of, delta_of
from schedules import jobs, training
from schedules.actors import Violation
from schedules.memory_redis import Client, Server as MemoryServer
from stores import BothSides

SCHEDULES = int(os.environ.get("ELASTIC_SCHEDULES", "6000"))
SHARE = 15  # of the schedules one in so many is of local mode: they take longer
TRAINING_BYTES, JOBS_BYTES = 121, 101
MOST_UNTIL_NOTICED = 3000


@pytest.fixture
def _in_memory():
    with training.in_memory(), jobs.in_memory():
        yield


in_memory = pytest.mark.usefixtures("_in_memory")


def over_schedules(count: int, length: int, play: Callable) -> None:
    """Play so many schedules, the same ones every time, and say how many and how long."""
    played = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=length, max_size=length))
    def each(schedule):
        try:
            played.append(len(play(schedule).log))
        except Violation as violation:
            for line in violation.log:
                note(line)
            raise AssertionError(str(violation)) from violation

    each()
    print(f"{len(played)} schedules, {sum(played) / len(played):.0f} operations in the mean")
    assert len(played) >= count


@in_memory
def test_local_mode_commits_every_sample_once_and_comes_to_its_end():
    over_schedules(SCHEDULES // SHARE, TRAINING_BYTES, training.play)


@in_memory
def test_passes_make_no_job_beside_another_and_all_that_are_wanted():
    over_schedules(SCHEDULES - SCHEDULES // SHARE, JOBS_BYTES, jobs.play)


# ---- what the schedules have found


SETTINGS = SimpleNamespace(inner_steps=8, cold_start=0, min_deadline_s=1.0, deadline_k=4.0,
                           max_staleness=0, compression="none")
FACTS = Facts("run-a", 5, "abc", "none", (4,), 2, {1: 1})


def round_5(**commit) -> OpenRound:
    """In which slot 1 has delivered on versions 4 and 5 and a call has gone out."""
    found = OpenRound(commit_of(5, **commit), 0.0, True, Ledger(100, 1), FACTS, SETTINGS, {})
    for base in (4, 5):
        found.ledger.offer((1, 1, base), [(0, base, base + 1)])
        found.accepted[1, 1, base] = Checked(SimpleNamespace(key=(1, 1, base)))
        found.answered.add((1, 1, base))
    found.called = 1.0
    return found


def test_a_worker_has_answered_though_its_delta_before_is_withdrawn():
    round_ = round_5()
    round_.forget((1, 1, 4))
    assert round_.answered == {(1, 1, 5)}
    assert round_.called == 1.0


def test_a_last_call_is_taken_back_with_the_last_delta():
    """Who has heard it trains no more in this round, and nobody else would deliver."""
    round_ = round_5()
    for base in (4, 5):
        round_.forget((1, 1, base))
    assert round_.called is None


@pytest.mark.parametrize(("is_own", "pace_s"), [(False, 40.0 / 8), (True, 42.0 / 8)])
def test_a_delta_that_waited_for_its_master_tells_the_pace_of_its_worker(is_own, pace_s):
    """Not how soon after the master it came, or rounds would be due at once from then on. Of a
    round that this master has opened itself it counts what came before the worker's start, too."""
    header = SimpleNamespace(key=(3, 1, 5), slot=3, attempt=1, base=5, steps=8, tokens=8,
                             seconds=40.0, stall_s=3.0)
    round_ = replace(round_5(), is_own=is_own, paces_s={3: 0.1})
    round_.accept(Checked(header), {False: 1.0, True: 42.0}[is_own])
    assert round_.paces_s == {3: pace_s}


def test_a_new_master_knows_the_pace_of_those_that_made_the_newest_version():
    """In a round what is due comes nearer, and is not put off."""
    told = [delta_of(slot, steps=4, seconds=2.0 * slot) for slot in (1, 3)]
    deltas = (*told, delta_of(0, steps=7))  # of sync mode, which says nothing of seconds
    round_ = round_5(deltas=deltas)
    assert round_.paces_s == {1: 0.5, 3: 1.5}
    assert round_.said([3], 0.0)["due"] == 8 * 1.5
    for pace_s, due_s in ((9.0, 8 * 1.5), (0.5, 8 * 0.5)):
        round_.paces_s[3] = pace_s
        assert round_.said([3], 0.0)["due"] == due_s


def test_only_the_paces_of_those_that_are_live_count():
    round_ = replace(round_5(), paces_s={1: 0.5, 3: 1.5})
    assert round_.said([3], 0.0)["due"] == 8 * 1.5


@pytest.fixture
def server() -> Server:
    found = Server(SimpleNamespace(event=lambda kind, **fields: None), None)
    found.store = SimpleNamespace()
    return found


@pytest.fixture
def master(server) -> Master:
    """One that has just opened round 5."""
    found = Master.__new__(Master)
    found.program = SimpleNamespace(attempt=1, job_id="7")
    found.state, found.commit, found.server = "running", None, server
    found.samples = Samples()
    found.journal = SimpleNamespace(say=lambda _: None, written=lambda write, *args: write(*args))
    found.samples.begin(commit_of(dataset_samples=100, epochs=1))
    found.averager = SimpleNamespace(close=lambda: None)
    found.intake = Intake(server, found.averager, round_5())
    found.config = SimpleNamespace(local_sgd=SETTINGS, step_samples=4,
                                   train=SimpleNamespace(max_tokens=0, epochs=1),
                                   checkpoint=SimpleNamespace(min_free_bytes=1))
    return found


def test_one_that_loses_the_race_for_a_version_still_knows_who_holds_what(master, monkeypatch):
    master.samples.ledger.hold((3, 1), [(0, 20, 30)])
    deltas = (delta_of(1, base=5, steps=2),)
    commit = commit_of(6, dataset_samples=100, epochs=1, tokens=2, samples=((0, 20, 22),),
                       deltas=deltas)
    dropped = []
    master.run = master.server.run = SimpleNamespace(
        path=Path("/nowhere"), key="run-a",
        commits=SimpleNamespace(newest=lambda: commit, all=lambda first, last: [commit],
                                of=lambda version: commit),
        masters=SimpleNamespace(newest=lambda: 1), offers=SimpleNamespace(left=lambda base: []),
    )
    master.server.store = SimpleNamespace(
        drop_offers=lambda base, names: dropped.append((base, names))
    )
    master.publish_state = lambda wake: None
    averager = SimpleNamespace(layout=SimpleNamespace(hash="abc"), fragment_bytes=())
    monkeypatch.setattr("elastic.local.master.master.remove_drafts", lambda *_: None)
    monkeypatch.setattr("elastic.local.master.master.Averager", lambda *_: averager)
    master.open_run()
    assert list(master.samples.ledger.held[3, 1]) == [(0, 22, 30)]
    assert dropped == [(5, ["1:1"])], "what is merged is not judged again"


def test_who_finds_a_newer_masters_commit_makes_none_on_top_of_it(master):
    """Whatever it can see of the newer one's claim."""
    commits = SimpleNamespace(newest=lambda: commit_of(master_epoch=2))
    master.run = SimpleNamespace(commits=commits, masters=SimpleNamespace(newest=lambda: 1))
    with pytest.raises(Fenced, match="epoch 2 has taken over"):
        master.open_run()


@pytest.mark.parametrize(("held", "free", "answered"), [((), 100, False), ((), 0, True),
                                                        (((0, 90, 94),), 0, False)])
def test_who_goes_on_after_it_had_nothing_to_give_has_not_answered(master, held, free, answered):
    """Else the round closes without it, though nobody said that it was late."""
    dropped, round_ = [], master.intake.round
    master.server.store = SimpleNamespace(
        drop_offers=lambda base, names: dropped.extend((base, name) for name in names),
        grant=lambda grants: None,
    )
    master.server.attempts = {2: 1}
    master.samples.ledger.hold((9, 1), [(0, 0, 100 - free)])
    round_.ledger.offer((1, 1, 5), ())
    round_.answered.add((2, 1, 5))
    ask = Ask(slot=2, attempt=1, sequence=1, want=4, held=held)
    master.answer([ask], {2: SimpleNamespace(attempt=1)}, 1.0)
    assert ((2, 1, 5) in round_.answered) == answered
    assert dropped == ([] if answered else [(5, "2:1")])
    assert (1, 1, 5) in round_.answered, "the others' answers stay"


@pytest.mark.parametrize(
    ("heard_s_ago", "record", "claimed", "settles"),
    [
        (5.0, {"state": "started"}, None, True), (5.0, {"state": "ended"}, None, False),
        (5.0, {}, 103.0, True), (5.0, {}, 50.0, False), (3.0, {}, None, False),
    ],
)
def test_leases_that_lapse_in_a_silence_say_nothing(server, heard_s_ago, record, claimed, settles):
    """But for those of workers that have said that they left."""
    health = SimpleNamespace(lease_s=6.0, heartbeat_s=2.0)
    server.config = SimpleNamespace(health=health)
    server.run.jobs = SimpleNamespace(ending=lambda _job_id: record)
    server.now = lambda: 100.0
    server.doubt_lapsed_leases({}, 100.0)
    server.now = lambda: 100.0 + heard_s_ago
    server.workers = {3: SimpleNamespace(attempt=1, joined=50.0, job_id="7")}
    slots = {3: SimpleNamespace(attempt=1, joined=claimed)} if claimed else {}
    server.doubt_lapsed_leases(slots, 100.0)
    assert server.has_doubts == settles


def test_the_endpoint_is_written_again_when_an_older_master_wrote_its_own_last(master):
    mine, written = Endpoint("n2", 6379, 2), []
    master.program.attempt, master.server.endpoint = 2, mine
    master.controlled_at, master.publish_state = 0.0, lambda wake="": None
    master.server.store.now = lambda: 1000.0
    master.journal = SimpleNamespace(look_for_space=lambda: None,
                                     written=lambda write, what: write(what))
    master.run = SimpleNamespace(
        masters=SimpleNamespace(newest=lambda: 2), endpoint=lambda: Endpoint("n1", 6379, 1),
        commits=SimpleNamespace(newest_version=lambda: 5), set_endpoint=written.append,
        closing=lambda mode: "",
    )
    master.observe_control()
    assert written == [mine]


def test_a_job_that_an_old_listing_brings_back_is_not_the_one_that_may_have_been_submitted():
    gone = history.Ended("1", "worker", 0, "lost", at=900.0, submitted_at=100.0)
    unsure = history.UnsureSubmission("worker", 0, until=1500.0)
    memory = history.Memory(0.0, ended=(gone,), unsure=(unsure,))
    listed = [history.Job("1", "worker", 0, "RUNNING", submitted_at=100.0)]
    assert history.learn(memory, listed, [], 1000.0, keep=4).unsure == (unsure,)
    new = history.Job("2", "worker", 0, "PENDING", submitted_at=950.0)
    assert history.learn(memory, [*listed, new], [], 1000.0, keep=4).unsure == ()


# ---- the worlds are like the real ones


def answers_of(store: BothSides, clock: Callable[[float], None]) -> list:
    """What a store answers to a thousand calls, drawn from a seed."""
    draw, answers = random.Random(5), []
    lease = {"job_id": "1", "node": "n", "pid": 1, "state": "training", "version": 0, "step": 0,
             "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0}
    calls = {
        "lease": lambda who: store.lease(*who, lease | {"step": draw.randrange(3)}, 60.0),
        "release": lambda who: store.release(*who),
        "slots": lambda who: {n: (s.attempt, s.step) for n, s in store.slots().items()},
        "attempts": lambda who: store.attempts(),
        "set_attempts": lambda who: store.set_attempts({who[0]: who[1]}),
        "offer": lambda who: store.offer(*who, draw.randrange(3), {"a": draw.randrange(3)}),
        "offers": lambda who: store.offers(range(3)),
        "offered": lambda who: store.offered(*who, draw.randrange(3)),
        "drop_offers": lambda who: store.drop_offers(draw.randrange(3), [f"{who[0]}:{who[1]}"]),
        "set_verdict": lambda who: store.set_verdict(f"{who[0]}:{who[1]}", {"base": 1}),
        "take_verdict": lambda who: store.take_verdict(*who),
        "ask": lambda who: store.ask(Ask(*who, draw.randrange(3), 2, ((0, 1, 2),))),
        "take_asks": lambda who: sorted(map(str, store.take_asks())),
        "grant": lambda who: store.grant({who: (draw.randrange(3), [(0, 1, 3)])}),
        "granted": lambda who: store.granted(Ask(*who, draw.randrange(3), 2, ()), 0.001),
        "set_master": lambda who: store.set_master(who[1], {"version": who[0]}),
        "master": lambda who: {k: v for k, v in store.master().items() if k != "beat"},
    }
    for _ in range(1000):
        name, who = draw.choice(list(calls)), (draw.randrange(2), draw.randint(1, 3))
        try:
            answers.append((name, who, calls[name](who)))
        except Fenced as error:
            answers.append((name, who, str(error)))
        if name == "master" and draw.random() < 0.1:
            clock(store)
    return answers


def test_redis_as_a_dictionary_answers_as_redis_does(store):
    server = MemoryServer(lambda: 1000.0)
    client = Client(server, lambda _name, action: action())
    memory = BothSides(client, "run-a", "memory", store.epoch)
    real = answers_of(store, lambda store: store._redis.flushall())
    assert answers_of(memory, lambda _: server.flushall()) == real


def test_a_lost_call_is_the_stores_own_error():
    server = MemoryServer(lambda: 1000.0)
    server.alive = False
    with pytest.raises(TryAgain):
        BothSides(Client(server, lambda _name, action: action()), "run-a", "memory").now()


# ---- broken decisions


def judge_without(rule: Rule):
    """`judge`, but for one rule."""
    judge = rounds.judge

    def broken(*what):
        why = judge(*what)
        return None if why and why.rule is rule else why

    return {(rounds, "judge"): broken}


def refusal_blind_to(name: str):
    refusal = Ledger.refusal

    def broken(self, owner, ranges):
        kept = getattr(self, name)
        setattr(self, name, Ranges() if name == "committed" else {})
        try:
            return refusal(self, owner, ranges)
        finally:
            setattr(self, name, kept)

    return {(Ledger, "refusal"): broken}


def offer_leaves_it_free(self, key, ranges):
    REAL_OFFER(self, key, ranges)
    self.free.add(self.offered[key])


def judges_what_is_ahead(self):
    round_ = self.round
    for base, offers in self.server.store.offers([round_.version + 1]).items():
        for name, body in offers.items():
            self.take(base, name, body)
    REAL_TAKE_OFFERS(self)


def loser_goes_on(self, commit, parts):
    won = REAL_COMMIT(self, commit, parts)
    return self.run.commits.of(commit.version) if won is None else won


def replaces_the_commit(self, commit):
    self.run.world.changes("link a commit")
    self.run.linked[commit.version] = json.dumps(commit.to_json())
    return True


def forgets_what_is_granted(self, owner, want, sharers=1, least=1):
    ranges = REAL_GRANT(self, owner, want, sharers, least)
    self.free.add(self.held.pop(owner))
    return ranges


REAL_OFFER, REAL_COMMIT, REAL_GRANT = Ledger.offer, Averager.commit, Ledger.grant
REAL_TAKE_OFFERS = Intake.take_offers
REAL_JUDGE, REAL_PLAN, REAL_PASS_OVER = rounds.judge, plan.plan, reconcile._pass_over
TRAINING = {
    "judge: any attempt": judge_without(Rule.FENCED),
    "judge: any run": judge_without(Rule.OTHER_RUN),
    "judge: any base": {
        (rounds, "judge"): lambda header, facts, *refused: REAL_JUDGE(
            header, replace(facts, max_staleness=99), *refused
        )
    },
    "judge: the same delta again": judge_without(Rule.DUPLICATE),
    "judge: whatever the ledger says": judge_without(Rule.SAMPLES),
    "refusal: committed samples": refusal_blind_to("committed"),
    "refusal: samples of this round": refusal_blind_to("offered"),
    "refusal: samples of another worker": refusal_blind_to("held"),
    "ledger: frees what is offered": {(Ledger, "offer"): offer_leaves_it_free},
    "ledger: forgets what it granted": {(Ledger, "grant"): forgets_what_is_granted},
    "ledger: keeps what is withdrawn": {
        (Ledger, "withdraw"): lambda self, key: self.offered.pop(key, None)
    },
    "ledger: keeps what the lost held": {(Ledger, "give_back"): lambda self, owner: 0},
    "master: no fence": {(Master, "fence"): lambda self, newest=0: None},
    "master: opens samples at once": {(Samples, "shut"): lambda *_: None},
    "master: never looks at the run again": {(Master, "is_behind"): lambda self: False},
    "master: judges what is ahead of it": {(Intake, "take_offers"): judges_what_is_ahead},
    "master: takes silence for a loss": {(Server, "doubt_lapsed_leases"): lambda *_: None},
    "commit: replaces one that is there": {
        (training.MemoryCommits, "link"): replaces_the_commit
    },
    "commit: the loser goes on": {(Averager, "commit"): loser_goes_on},
}


def planned(change: Callable) -> dict:
    """A plan of a world that has been changed before."""
    return {(reconcile, "plan"): lambda world, now: REAL_PLAN(change(world), now)}


def without_lock(run, wait_s):
    return training.contextlib.nullcontext(True)


def silence_is_empty(passes, scheduler, report):
    real = scheduler.jobs

    def jobs_or_none(*asked):
        try:
            return real(*asked)
        except TryAgain:
            scheduler.silent = False
            return []

    scheduler.jobs = jobs_or_none
    REAL_PASS_OVER(passes, scheduler, report)


def with_memory(world, **changes):
    return replace(world, memory=replace(world.memory, **changes))


JOBS = {
    "a queued job is no job": {(history, "ENDED_STATES"): history.ENDED_STATES | {"PENDING"}},
    "a job on its way out is gone": {
        (history, "ENDED_STATES"): history.ENDED_STATES | {"COMPLETING"}
    },
    "a suspended job is gone": {(history, "ENDED_STATES"): history.ENDED_STATES | {"SUSPENDED"}},
    "a state never seen before is an end": {
        (history, "has_ended"): lambda state: state not in jobs.KNOWN_STATES
    },
    "no answer means no jobs": {(reconcile, "_pass_over"): silence_is_empty},
    "a listing knows the youngest jobs": {(history, "LISTING_LAG_S"): 0.0},
    "an unsure submission is forgotten": planned(lambda world: with_memory(world, unsure=())),
    "a dying pass leaves no note": {(reconcile, "DYING_S"): 0.0},
    "a lost answer is waited for a minute": {(reconcile, "UNSURE_S"): 60.0},
    "max_pending is no limit": planned(lambda world: replace(world, max_pending=99)),
    "max is no limit": planned(lambda world: replace(world, slots=world.slots + 1)),
    "a run that is over goes on": planned(lambda world: with_memory(world, closing="")),
    "the other mode's jobs do not matter": {
        (plan.World, "own"): lambda self, role: True
    },
    "two passes at once": {(reconcile, "_lock"): without_lock},
    "a refusal ends all submissions": {
        (reconcile, "MOST_LATER_S"): 1e9, (reconcile, "LATER_S"): 1e9
    },
    "a job is known by its id alone": {
        (history.Job, "key"): property(lambda self: (self.job_id, "", 0))
    },
    "a broken hold is waited for": {
        (history.Job, "broken_hold"): property(lambda self: "")
    },
    "a cancelled job is taken for gone": {
        (history.Job, "place"): property(
            lambda self: ("", 0) if self.cancelled_at is not None else (self.role, self.slot)
        )
    },
}


# Where few schedules notice: the number of one that did. The search begins there.
RARE = {
    "judge: any base": 1358, "refusal: committed samples": 189,
    "ledger: keeps what the lost held": 140,
    "master: never looks at the run again": 173, "commit: replaces one that is there": 173,
    "commit: the loser goes on": 1807, "ledger: keeps what is withdrawn": 92,
    "master: takes silence for a loss": 90, "a dying pass leaves no note": 635,
    "a cancelled job is taken for gone": 424, "a listing knows the youngest jobs": 70,
    "a broken hold is waited for": 69, "a suspended job is gone": 66,
}


def noticed(name: str, broken: dict, play: Callable, length: int, monkeypatch) -> None:
    """Some schedule is violated when a decision is broken; says which one."""
    with monkeypatch.context() as patch:
        for (target, attribute), value in broken.items():
            patch.setattr(target, attribute, value)
        schedule, violation = first_violation(play, length, RARE.get(name, 1))
    assert "AttributeError" not in violation  # else what was planted is itself no code
    play(schedule)  # else it is not the broken decision that was noticed


def first_violation(play: Callable, length: int, first: int) -> tuple[bytes, str]:
    draw = random.Random(1)
    for _ in range(1, first):
        draw.randbytes(length)
    for number in range(first, first + MOST_UNTIL_NOTICED):
        schedule = draw.randbytes(length)
        try:
            play(schedule)
        except Violation as violation:
            print(f"schedule {number}: {str(violation)[:150]}")
            return schedule, str(violation)
    raise AssertionError(f"not noticed in {MOST_UNTIL_NOTICED} schedules")


@in_memory
@pytest.mark.parametrize("name", TRAINING)
def test_a_broken_decision_of_local_mode_is_noticed(name, monkeypatch):
    noticed(name, TRAINING[name], training.play, TRAINING_BYTES, monkeypatch)


@in_memory
@pytest.mark.parametrize("name", JOBS)
def test_a_broken_decision_of_reconcile_is_noticed(name, monkeypatch):
    noticed(name, JOBS[name], jobs.play, JOBS_BYTES, monkeypatch)
