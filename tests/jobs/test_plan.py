"""The reconcile plan: every rule over many thousand random worlds, then stories.

    pytest tests/jobs/test_plan.py

Random worlds are generated field by field, so that any combination comes up, sensible or not. A
simulated cluster then runs plan and cluster against each other for hours of stepped time, with
everything going wrong that Slurm is known for, and rules are checked from the cluster's side.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, note, settings, strategies as st

from elastic.jobs import history
from elastic.jobs.history import Ended, Job, Memory, UnsureSubmission, has_ended
from elastic.jobs.plan import CANCEL, FAIL, GROW, SUBMIT, WAIT, World, bad_nodes, plan

NOW = 100_000.0
NODES = ("n1", "n2", "n3")
ENDED = (  # the only states that free a slot, spelled out again on purpose
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "ENDED", "FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)
QUEUED = ("EXPEDITING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
STARTED = ("RUNNING", "CONFIGURING", "SIGNALING", "STOPPED", "SUSPENDED")
ODD = ("COMPLETING", "RESIZING", "A_STATE_OF_2031", "")
FOR_GOOD = ("launch failed requeued held", "DependencyNeverSatisfied",
            "Reservation mine was deleted")
REASONS = ("", "None", "Priority", "Resources,BeginTime", "JobHeldUser", "JobHeldAdmin", *FOR_GOOD)
GOOD, BAD = ("done", "stopped", "yielded", "lost", "killed", "cancelled", "fenced"), ("failed",)

BATCH = 20  # worlds per example of hypothesis, whose own work would else be most of the time
many = settings(max_examples=150, deadline=None, database=None)
AGO_S = (0.0, 1.0, 29.0, 31.0, 59.0, 61.0, 119.0, 121.0, 1799.0, 1801.0, 9000.0)


def over_worlds(closing=("", "", "", "done", "failed", "stopped")):
    """Call the test with 3,000 random worlds: hypothesis picks (and shrinks) sizes and seeds."""
    sizes = st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(0, 2))

    def decorate(rule):
        @many
        @given(st.integers(0, 2**32), sizes, st.sampled_from(closing))
        def test(seed, sizes, closing):
            for number in range(BATCH):
                world = random_world(seed + number, sizes, closing)
                try:
                    rule(world)
                except BaseException:
                    note(f"in {world}")
                    raise

        test.__name__ = test.__qualname__ = rule.__name__
        return test

    return decorate


over_open_worlds = over_worlds(closing=("",))


def random_world(seed, sizes, closing):
    rng = random.Random(seed)
    jobs, ends, unsure = sizes
    memory = Memory(
        born=0.0,
        jobs=tuple(random_job(rng, str(10 + i)) for i in range(jobs)),
        ended=tuple(
            sorted((random_end(rng, str(90 + i)) for i in range(ends)), key=lambda e: e.at)
        ),
        unsure=tuple(UnsureSubmission(*random_place(rng), NOW + 5) for _ in range(unsure)),
        closing=closing,
        closing_since=NOW - rng.choice(AGO_S),
        later_until=rng.choice((0.0, 0.0, 0.0, NOW + 10)),
        later_reason="AssocMaxSubmitJobLimit",
    )
    return World(rng.randint(0, 6), memory, rng.randint(1, 6), rng.randint(1, 4), 30.0)


def random_place(rng):
    return rng.choice([*(("worker", slot) for slot in range(6)), ("master", 0), ("master", 1)])


def random_job(rng, job_id):
    state = rng.choice((*QUEUED, *STARTED, *ODD, *["PENDING", "RUNNING"] * 4))
    at = NOW - rng.choice(AGO_S)
    where = (at, rng.choice(NODES)) if state in STARTED else (None, "")
    cancelled = rng.choice((None, None, None, NOW - rng.choice(AGO_S)))
    limit = NOW + rng.choice(AGO_S) if state in STARTED and rng.random() < 0.3 else None
    return Job(job_id, *random_place(rng), state, rng.choice(REASONS), at, *where, cancelled,
                   limit_at=limit)


def random_end(rng, job_id):
    outcome, at = rng.choice((*GOOD, *BAD * 6, "held")), NOW - rng.choice(AGO_S)
    node, worked = rng.choice(("", *NODES)), rng.random() < 0.3
    final = outcome in BAD and rng.random() < 0.1
    place = random_place(rng)
    return Ended(job_id, *place, outcome, at, node, at, "why", "log", worked, final)


def may_be_followed(job):
    """A master in the last hour, or the last quarter, of its time."""
    if job.role != "master" or job.state not in STARTED or job.limit_at is None:
        return False
    return job.limit_at - NOW <= last_part_s(job)


def last_part_s(job):
    return min(3600, (job.limit_at - job.started_at) / 4)


def place_of(thing):
    return (thing.role, 0 if thing.role in ("master", "trainer") else thing.slot)


def verbs(actions, *wanted):
    return [action for action in actions if action.verb in wanted]


def leaves(job, now=NOW):
    asked = job.cancelled_at is not None and now - job.cancelled_at < 60
    return asked or job.state in ("COMPLETING", "STAGE_OUT")


def after(world, actions, now=NOW):
    """The world that carrying out `actions` leads to, before the cluster has done anything."""
    memory = world.memory
    for number, action in enumerate(actions):
        if action.verb == SUBMIT:
            place = (action.role, action.slot)
            job = Job(f"7{number}", *place, "PENDING", submitted_at=now)
            memory = replace(memory, jobs=(*memory.jobs, job))
        elif action.verb == CANCEL:
            jobs = [
                replace(job, cancelled_at=now) if job.job_id == action.job_id else job
                for job in memory.jobs
            ]
            memory = replace(memory, jobs=tuple(jobs))
        elif action.verb == FAIL:
            memory = history.enter(memory, "failed", now)
    return replace(world, memory=memory)


# ---- rules over random worlds


@settings(many, max_examples=500)
@given(st.one_of(st.sampled_from(ENDED + QUEUED + STARTED + ODD), st.text(max_size=12)))
def test_only_a_known_ended_state_frees_a_slot(state):
    word = state.split()[0].rstrip("+") if state.split() else ""
    assert has_ended(state) == (word in ENDED)
    assert has_ended(f"{state} by 0") == (word in ENDED)


@over_worlds()
def test_nothing_is_submitted_to_an_occupied_place_whatever_the_state_of_its_job(world):
    taken = {place_of(job) for job in world.memory.jobs if not may_be_followed(job)}
    taken |= {place_of(unsure) for unsure in world.memory.unsure}
    submitted = [place_of(action) for action in verbs(plan(world, NOW), SUBMIT)]
    assert not taken & set(submitted)
    assert len(submitted) == len(set(submitted))


@over_open_worlds
def test_of_several_jobs_in_one_place_exactly_one_stays_and_it_is_a_started_one(world):
    actions = plan(world, NOW)
    if verbs(actions, FAIL):
        return
    cancelled = {action.job_id for action in verbs(actions, CANCEL)}
    groups = {}
    for job in world.memory.jobs:
        held = job.state in QUEUED and job.reason in FOR_GOOD
        if not leaves(job) and not held and job.state in QUEUED + STARTED:
            groups.setdefault(place_of(job), []).append(job)
    for jobs in groups.values():
        staying = [job for job in jobs if job.job_id not in cancelled]
        assert len(staying) <= 1 + any(map(may_be_followed, staying))
        if staying and any(job.state in STARTED for job in jobs):
            oldest = min(job.submitted_at for job in jobs if job.state in STARTED)
            assert oldest in [job.submitted_at for job in staying if job.state in STARTED]


@over_open_worlds
def test_queued_and_running_workers_never_exceed_max(world):
    actions = plan(world, NOW)
    before = [place_of(job) for job in world.memory.jobs if job.role == "worker"]
    unsure = {place_of(u) for u in world.memory.unsure if u.role == "worker"} - set(before)
    new = [action for action in verbs(actions, SUBMIT) if action.role == "worker"]
    assert not new or len(before) + len(unsure) + len(new) <= world.slots
    assert all(action.slot < world.slots for action in new)


@over_open_worlds
def test_no_more_than_max_pending_jobs_are_queued_but_for_a_missing_master(world):
    actions = verbs(plan(world, NOW), SUBMIT)
    queued = sum(job.state in QUEUED for job in world.memory.jobs)
    occupied = {place_of(job) for job in world.memory.jobs}
    queued += len({place_of(unsure) for unsure in world.memory.unsure} - occupied)
    workers = [action for action in actions if action.role == "worker"]
    assert not workers or queued + len(actions) <= world.max_pending
    if len(actions) > len(workers):
        assert actions[0].role == "master", "the master comes first"


@over_worlds(closing=("done", "failed", "stopped"))
def test_a_run_that_is_over_gets_no_job_and_lets_started_ones_leave_first(world):
    actions = plan(world, NOW)
    assert not verbs(actions, SUBMIT, FAIL)
    cancelled = {action.job_id for action in verbs(actions, CANCEL)}
    age_s = NOW - world.memory.closing_since
    for job in world.memory.jobs:
        window_s = 0 if job.state in QUEUED else 120 if job.role == "master" else 60
        assert (job.job_id in cancelled) == (age_s >= window_s and not leaves(job))


@over_worlds()
def test_every_action_has_a_reason_and_a_cancel_names_a_job_that_is_not_leaving(world):
    actions = plan(world, NOW)
    assert all(action.reason for action in actions)
    jobs = {job.job_id: job for job in world.memory.jobs}
    cancels = [action.job_id for action in verbs(actions, CANCEL)]
    assert len(cancels) == len(set(cancels))
    assert not any(leaves(jobs[job_id]) for job_id in cancels)


@over_open_worlds
def test_a_job_in_an_unknown_state_is_left_alone(world):
    if verbs(plan(world, NOW), FAIL):
        return
    unknown = {job.job_id for job in world.memory.jobs if job.state in ODD}
    assert not unknown & {action.job_id for action in verbs(plan(world, NOW), CANCEL)}


@over_worlds()
def test_a_second_pass_does_nothing(world):
    following = after(world, plan(world, NOW))
    assert verbs(plan(following, NOW), SUBMIT, CANCEL, FAIL) == []
    assert verbs(plan(following, NOW + 1), SUBMIT, CANCEL, FAIL) == [] or any(
        NOW < boundary <= NOW + 1  # something is due just then
        for boundary in due_times(following)
    )


def due_times(world):
    memory = world.memory
    yield from (memory.closing_since + 60, memory.closing_since + 120, memory.later_until)
    yield from (job.cancelled_at + 60 for job in memory.jobs if job.cancelled_at is not None)
    limited = (job for job in memory.jobs if job.limit_at is not None)
    yield from (job.limit_at - last_part_s(job) for job in limited)
    for end in memory.ended:
        yield from (end.at + 30 * 2**n for n in range(8))
        yield from (end.at + 1800, end.at + 3600)


@over_open_worlds
def test_the_plan_depends_on_what_is_not_on_the_order_of_the_listing(world):
    jobs = world.memory.jobs[::-1]
    shuffled = replace(world, memory=replace(world.memory, jobs=jobs))
    assert Counter(plan(world, NOW)) == Counter(plan(shuffled, NOW))


@over_open_worlds
def test_broken_holds_are_cancelled(world):
    actions = plan(world, NOW)
    if verbs(actions, FAIL):
        return
    cancelled = {action.job_id for action in verbs(actions, CANCEL)}
    for job in world.memory.jobs:
        if job.state in QUEUED and job.reason in FOR_GOOD:
            assert (job.job_id in cancelled) == (not leaves(job))


@over_open_worlds
def test_beyond_max_queued_jobs_go_before_running_ones_and_high_slots_first(world):
    actions = plan(world, NOW)
    if verbs(actions, FAIL):
        return
    cancelled = {a.job_id for a in verbs(actions, CANCEL) if "slots now" in a.reason}
    gone = {a.job_id for a in verbs(actions, CANCEL)}
    workers = [j for j in world.memory.jobs if j.role == "worker" and not leaves(j)]
    known = [j for j in workers if j.state in QUEUED + STARTED]
    staying = [j for j in workers if j.job_id not in gone]
    unknown = [j for j in workers if j.state in ODD]
    assert len(staying) <= max(world.slots, len(unknown))
    assert not any(j.state in QUEUED and j.slot >= world.slots for j in staying)
    for job in (j for j in known if j.job_id in cancelled):
        for other in (j for j in known if j.job_id not in gone):
            if job.state in STARTED:
                assert other.state in STARTED
                assert other.slot < job.slot
            elif other.state in QUEUED:
                assert other.slot < job.slot


@over_open_worlds
def test_a_free_slot_is_filled_or_there_is_a_reason(world):
    actions = plan(world, NOW)
    if verbs(actions, FAIL):
        return
    spoken_for = {place_of(action) for action in verbs(actions, SUBMIT, WAIT)}
    occupied = {place_of(job) for job in world.memory.jobs}
    assert ("master", 0) in spoken_for | occupied
    unsure = {place_of(u) for u in world.memory.unsure} - occupied
    workers = [job for job in world.memory.jobs if job.role == "worker"]
    workers = len(workers) + sum(role == "worker" for role, _ in unsure)
    workers += sum(action.role == "worker" for action in verbs(actions, SUBMIT))
    free = {("worker", slot) for slot in range(world.slots)} - occupied - spoken_for
    assert not free or workers >= world.slots


@over_open_worlds
def test_what_was_taken_away_is_replaced_at_once(world):
    memory = replace(world.memory, unsure=(), later_until=0.0, jobs=())
    ended = tuple(end for end in memory.ended if end.outcome in GOOD)
    world = World(6, replace(memory, ended=ended), max_pending=9)
    submitted = {place_of(action) for action in plan(world, NOW)}
    assert submitted == {("master", 0), *(("worker", slot) for slot in range(6))}


@many
@given(st.integers(1, 12), st.sampled_from((0.5, 30.0)), st.floats(0, 5000), st.booleans())
def test_the_nth_crash_in_a_row_waits_twice_as_long_as_the_one_before(n, backoff_s, age_s, worked):
    crashes = [Ended(str(i), "worker", 0, "failed", NOW - i) for i in reversed(range(n))]
    if worked:  # what lies before an ending with progress does not count
        crashes.insert(0, Ended("99", "worker", 0, "yielded", NOW - n, worked=True))
        crashes.insert(0, Ended("98", "worker", 0, "failed", NOW - n - 1))
    world = World(1, Memory(0.0, ended=tuple(crashes)), 9, 99, backoff_s)
    actions = plan(world, NOW + age_s)
    is_due = age_s >= min(backoff_s * 2 ** (n - 1), 3600)
    assert ("worker" in {action.role for action in verbs(actions, SUBMIT)}) == is_due
    assert ("worker" in {action.role for action in verbs(actions, WAIT)}) == (not is_due)


@over_open_worlds
def test_a_run_fails_only_for_crashes_in_a_row_that_nobody_outlived(world):
    failures = verbs(plan(world, NOW), FAIL)
    if not failures:
        return
    (failure,) = failures
    place = place_of(failure)
    crashes = [e for e in world.memory.ended if place_of(e) == place and e.outcome == "failed"]
    assert failure.detail == "log"
    blamed = bad_nodes(world.memory, NOW)
    counted = [end for end in crashes if place[0] == "master" or end.node not in blamed]
    assert len(counted) >= world.max_failures
    running = [j for j in world.memory.jobs if j.role == "worker" and j.state in STARTED]
    if place[0] == "worker":
        others = [job.started_at for job in running if place_of(job) != place]
        assert not any(since <= counted[0].at for since in others)


@over_open_worlds
def test_a_node_is_avoided_only_for_recent_crashes_while_work_goes_on_elsewhere(world):
    bad = bad_nodes(world.memory, NOW)
    masters = Counter(end.node for end in world.memory.ended if end.node and NOW - end.at < 1800
                      and (end.role, end.outcome) == ("master", "failed"))
    avoided = {"worker": bad, "master": tuple(sorted(n for n in masters if masters[n] >= 2))}
    for action in verbs(plan(world, NOW), SUBMIT):
        assert action.exclude == avoided.get(action.role, ())
    for node in NODES:
        crashes = [
            end.at
            for end in world.memory.ended
            if end.node == node
            and (end.role, end.outcome) == ("worker", "failed")
            and NOW - end.at < 1800
        ]
        elsewhere = [
            job
            for job in world.memory.jobs
            if job.role == "worker"
            and job.state in STARTED
            and job.node != node
            and crashes
            and job.started_at <= min(crashes)
        ]
        elsewhere += [
            end
            for end in world.memory.ended
            if end.worked
            and end.role == "worker"
            and end.node not in ("", node)
            and crashes
            and end.at > min(crashes)
        ]
        assert (node in bad) == (len(crashes) >= 2 and bool(elsewhere))


def test_a_node_where_trainers_crash_is_avoided():
    """It was idle, and so the first that Slurm gave: the run failed within minutes."""
    crashes = (Ended(str(i), "trainer", 0, "failed", NOW - 99 + i, node="n1") for i in range(2))
    (action,) = plan(World(0, Memory(0.0, ended=tuple(crashes), mode="sync"), mode="sync"), NOW)
    assert (action.verb, action.exclude) == (SUBMIT, ("n1",))


def test_at_most_eight_nodes_are_avoided():
    crashes = [
        Ended(f"{i}-{k}", "worker", i, "failed", NOW - 20 + i, node=f"n{i}")
        for i in range(12)
        for k in range(2)
    ]
    witness = Job("1", "worker", 50, "RUNNING", "", 0.0, 0.0, "good")
    bad = bad_nodes(Memory(0.0, jobs=(witness,), ended=tuple(crashes)), NOW)
    assert sorted(bad) == sorted(f"n{i}" for i in range(4, 12))


# ---- learning


listings = st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=8)


@settings(many, max_examples=300)
@given(listings, st.integers(0, 2**32))
def test_every_end_is_news_once_and_no_job_is_forgotten_while_it_is_listed(rounds, seed):
    """Jobs come, change state, end, are purged; the listing is complete at every pass."""
    rng, memory, told, ever = random.Random(seed), Memory(born=0.0), Counter(), set()
    states = {}
    for number, touched in enumerate(rounds):
        now = NOW + 40 * number
        for job in touched:
            state = states.get(job)
            if state is None:
                states[job] = (rng.choice(QUEUED + STARTED), now)
            elif has_ended(state[0]):
                states[job] = ("purged", state[1])
            elif state[0] != "purged":
                states[job] = (rng.choice(QUEUED + STARTED + ODD[:4] + ENDED), state[1])
        listed = [
            Job(str(job), "worker", job, state, submitted_at=at)
            for job, (state, at) in states.items()
            if state != "purged"
        ]
        news = history.gone(memory, listed, now)
        told.update(job.job_id for job in news)
        ends = [history.ending(job, None, now) for job in news]
        memory = history.learn(memory, listed, ends, now, keep=2)
        live = {job.job_id for job in listed if not has_ended(job.state)}
        assert {job.job_id for job in memory.jobs} == live
        ever |= {job.job_id for job in listed}
        assert set(told) == ever - live
    assert not told or max(told.values()) == 1


@many
@given(st.sampled_from((0.0, 10.0, 29.0, 31.0, 500.0)))
def test_a_job_that_a_listing_misses_is_gone_only_when_it_is_old_enough(age_s):
    job = Job("1", "worker", 0, "PENDING", submitted_at=NOW - age_s)
    memory = Memory(0.0, jobs=(job,))
    news = history.gone(memory, [], NOW)
    memory = history.learn(memory, [], [history.ending(j, None, NOW) for j in news], NOW, 4)
    assert bool(news) == (age_s >= 30)
    assert bool(memory.jobs) == (age_s < 30)


def started(**more):
    return {"role": "worker", "slot": 0, "time": NOW, "started": NOW, "state": "started", **more}


def ended(outcome, **more):
    return started(**{"state": "ended", "outcome": outcome, "steps": 0, **more})


@pytest.mark.parametrize(
    ("state", "record", "outcome"),
    [
        ("COMPLETED", ended("yielded"), "yielded"),
        ("FAILED", ended("failed"), "failed"),
        ("PREEMPTED", None, "lost"),
        ("NODE_FAIL", started(), "lost"),
        ("TIMEOUT", started(), "lost"),
        ("FAILED", started(), "killed"),
        ("VANISHED", started(), "killed"),
        ("CANCELLED by 0", started(), "killed"),
        ("CANCELLED by 0", None, "cancelled"),
        ("CANCELLED by 0", ended("yielded"), "cancelled"),
        ("PREEMPTED", ended("yielded"), "yielded"),
        ("OUT_OF_MEMORY", started(), "failed"),
        ("VANISHED", None, "failed"),
        ("FAILED", None, "failed"),
        ("COMPLETED", None, "failed"),
        ("COMPLETED", ended("yielded", slot=1), "failed"),
        ("PREEMPTED", ended("failed", time=NOW - 9000), "lost"),
    ],
)
def test_how_a_job_ended_is_told_by_its_record_else_by_its_state(state, record, outcome):
    job = Job("1", "worker", 0, state, submitted_at=NOW - 10)
    assert history.ending(job, record, NOW).outcome == outcome


def test_a_job_whose_prolog_fails_has_failed_and_one_that_never_had_a_node_is_cancelled():
    """Slurm calls both CANCELLED, and drains the node: each next job took another node."""
    queued = Job("1", "worker", 0, "CANCELLED", submitted_at=NOW - 10, started_at=NOW - 5)
    assert history.ending(queued, None, NOW).outcome == "cancelled"
    end = history.ending(replace(queued, node="n1"), None, NOW)
    assert (end.outcome, end.worked) == ("failed", False)
    assert end.reason == "it ended before it could start (CANCELLED)"
    told = replace(queued, node="n1", cancelled_at=NOW)
    assert history.ending(told, None, NOW).outcome == "cancelled"


def test_a_job_that_left_as_it_was_asked_was_not_taken_away_and_has_worked():
    job = Job("1", "worker", 0, "COMPLETED", cancelled_at=NOW - 5)
    end = history.ending(job, ended("yielded", steps=5), NOW)
    assert (end.outcome, end.worked) == ("cancelled", True)


@pytest.mark.parametrize(
    ("record", "worked"),
    [
        (ended("failed", steps=1), True),
        (ended("failed"), False),  # it hung at its first step, again and again
        (ended("killed"), True),
        (started(), True),  # nobody knows what it did
    ],
)
def test_a_crash_after_half_an_hour_without_a_step_is_part_of_a_loop(record, worked):
    job = Job("1", "worker", 0, "FAILED", submitted_at=NOW - 2000, started_at=NOW - 1900)
    assert history.ending(job, {**record, "started": NOW - 1900}, NOW).worked == worked


def test_a_crash_of_a_job_that_was_told_to_go_is_no_crash():
    job = Job("1", "worker", 0, "CANCELLED", cancelled_at=NOW - 5)
    assert history.ending(job, ended("failed"), NOW).outcome == "cancelled"


# ---- nodes that say of themselves that nobody can train there


def test_an_unfit_node_is_avoided_at_once_though_nobody_works_elsewhere():
    """The one idle node was idle as jobs die there: the slot went there until the run failed."""
    job = Job("1", "worker", 0, "FAILED", submitted_at=NOW - 60, started_at=NOW - 50, node="n7")
    end = history.ending(job, ended("failed", node="n7", unfit=["n7"]), NOW - 40)
    (action,) = (a for a in plan(World(1, Memory(0.0, ended=(end,))), NOW) if a.role == "worker")
    assert (action.verb, action.exclude) == (SUBMIT, ("n7",))
    others = [replace(end, job_id=str(n), node=f"n{n}", unfit=(f"n{n}",)) for n in (8, 9)]
    failed, *_ = plan(World(1, Memory(0.0, ended=(end, *others))), NOW)
    assert failed.verb == FAIL  # it may be so on every node


def test_the_launcher_of_a_job_with_an_unfit_node_is_on_a_healthy_one():
    ends = [Ended(job, "trainer", 0, "failed", NOW - 40, "n1", unfit=("n2",)) for job in "12"]
    assert bad_nodes(Memory(0.0, ended=tuple(ends)), NOW, "trainer") == ("n2",)
    assert bad_nodes(Memory(0.0, ended=tuple(ends)), NOW) == ("n2",)
    assert bad_nodes(Memory(0.0, ended=tuple(ends)), NOW, "master") == ()


# ---- the next master


def master(job_id="1", state="RUNNING", limit_s=None, whole_s=86_400.0):
    limit = {} if limit_s is None else {"limit_at": NOW + limit_s}
    started = {"started_at": NOW + (limit_s or 0) - whole_s} if state == "RUNNING" else {}
    return Job(job_id, "master", 0, state, submitted_at=NOW - whole_s, **limit, **started)


def masters_world(*jobs):
    return World(0, Memory(0.0, jobs=jobs))


def test_a_master_is_followed_in_the_last_hour_of_its_time():
    (action,) = plan(masters_world(master(limit_s=3599)), NOW)
    assert (action.verb, action.role, action.slot) == (SUBMIT, "master", 0)
    assert action.reason == "to follow job 1 at once"
    assert plan(masters_world(master(limit_s=3601)), NOW) == []
    assert plan(masters_world(master()), NOW) == []  # it has no limit


def test_a_short_master_is_followed_in_the_last_quarter_of_its_time():
    assert plan(masters_world(master(limit_s=1801, whole_s=7200)), NOW) == []
    assert len(plan(masters_world(master(limit_s=1799, whole_s=7200)), NOW)) == 1


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_one_master_follows_another_and_is_left_in_peace(state):
    old, new = master(limit_s=600), master("2", state)
    assert plan(masters_world(old, new), NOW) == []
    (action,) = plan(masters_world(old, new, master("3", "PENDING")), NOW)
    assert (action.verb, action.job_id) == (CANCEL, "3")
    (action,) = plan(masters_world(master(limit_s=9000), new), NOW)
    assert (action.verb, action.job_id) == (CANCEL, "2")


# ---- sync mode: a trainer, its successor, growth, the other mode


def trainer(job_id="1", state="RUNNING", **more):
    times = {"submitted_at": NOW - 900, "started_at": NOW - 900}
    return Job(job_id, "trainer", 0, state, **times, **more)


def sync_world(*jobs, ended=(), growth=0):
    return World(0, Memory(0.0, jobs=jobs, ended=ended, mode="sync"), mode="sync", growth=growth)


def test_what_a_job_follows_is_not_the_successor_that_went_with_its_predecessor():
    """The reason of a crashed run's next job was "cancelled", and the crash was told nowhere."""
    crash = Ended("1", "trainer", 0, "failed", NOW - 90, reason="no shard", started_at=NOW - 900)
    successor = Ended("2", "trainer", 0, "cancelled", NOW - 60, reason="cancelled")
    (action,) = plan(sync_world(ended=(crash, successor)), NOW)
    assert (action.verb, action.reason) == (SUBMIT, "job 1 failed: no shard")


def test_behind_a_trainer_at_work_one_successor_waits_in_the_queue():
    (action,) = plan(sync_world(trainer()), NOW)
    assert (action.verb, action.reason) == (SUBMIT, "to follow job 1 at once")
    assert plan(sync_world(trainer(), trainer("2", "PENDING")), NOW) == []
    (action,) = plan(sync_world(trainer(), trainer("2", "PENDING"), trainer("3", "PENDING")), NOW)
    assert (action.verb, action.job_id) == (CANCEL, "3")


@pytest.mark.parametrize("state", ["PENDING", "CONFIGURING", "A_STATE_OF_2031", "COMPLETING"])
def test_nothing_follows_a_trainer_that_may_not_have_begun_or_is_just_leaving(state):
    assert len(plan(sync_world(trainer(state=state)), NOW)) == (state == "CONFIGURING")


def test_the_successor_of_a_trainer_that_failed_waits_as_after_any_crash():
    failed = trainer(over="failed")
    (stop,) = plan(sync_world(failed, trainer("2", "PENDING")), NOW)
    assert (stop.verb, stop.job_id, stop.reason) == (CANCEL, "2", "job 1 has failed")
    (wait,) = plan(sync_world(failed), NOW)
    assert (wait.verb, wait.reason) == (WAIT, "job 1 has failed, and is leaving")
    crash = Ended("1", "trainer", 0, "failed", NOW - 1, reason="out of luck")
    (wait,) = plan(sync_world(ended=(crash,)), NOW)
    assert wait.reason == "waits 30 s after failure 1: out of luck"
    (again,) = plan(sync_world(ended=(crash,)), NOW + 30)
    assert again.verb == SUBMIT


def test_a_trainer_grows_once_its_successor_is_there():
    pair = (trainer(), trainer("2", "PENDING"))
    grow, action = plan(replace(sync_world(*pair, growth=4), gpus=2), NOW)
    assert (grow.verb, grow.job_id, grow.gpus) == (GROW, "2", 4)
    assert (action.verb, action.job_id, action.now) == (CANCEL, "1", False)
    assert action.reason == "it has 2 GPUs, and 4 are to be had"
    assert plan(sync_world(*pair), NOW) == []
    told = (replace(pair[0], cancelled_at=NOW - 5), pair[1])
    assert plan(sync_world(*told, growth=4), NOW) == []
    (action,) = plan(sync_world(trainer(), growth=4), NOW)
    assert action.verb == SUBMIT  # first the successor


def test_a_successor_that_waits_for_a_growth_gives_up_in_the_end():
    grows = trainer("2", "PENDING", asked=(4, 4), grows_until=NOW + 1)
    waiting = replace(sync_world(grows), limits_of_gpus=(1, 4))
    assert plan(waiting, NOW) == []
    (action,) = plan(waiting, NOW + 1)
    assert (action.job_id, action.reason) == ("2", "4 GPUs have not become free")


@pytest.mark.parametrize("limit", ["QOSMaxGRESPerUser", "AssocGrpNodeLimit"])
def test_a_successor_does_not_wait_for_a_growth_beyond_its_users_limits(limit):
    grows = trainer("2", "PENDING", asked=(4, 4), grows_until=NOW + 100, reason=limit)
    (action,) = plan(replace(sync_world(grows), limits_of_gpus=(1, 4)), NOW)
    assert (action.job_id, action.reason) == ("2", "4 GPUs have not become free")


def test_new_limits_reach_the_successor_and_a_trainer_that_is_too_large():
    """`elastic-scale --max` touched neither."""
    old, new = trainer("2", "PENDING", asked=(1, 8)), trainer("3", "PENDING", asked=[1, 4])
    small = replace(sync_world(trainer(), old), limits_of_gpus=(1, 4), gpus=8)
    (action,) = plan(small, NOW)
    assert (action.job_id, action.reason) == ("2", "the run asks for 1 to 4 GPUs now")
    told = replace(old, cancelled_at=NOW - 5)
    (action,) = plan(replace(small, memory=replace(small.memory, jobs=(trainer(), told))), NOW)
    assert action.verb == SUBMIT
    followed = replace(small, memory=replace(small.memory, jobs=(trainer(), new)))
    (action,) = plan(followed, NOW)
    assert (action.job_id, action.now) == ("1", False)
    assert action.reason == "it has 8 GPUs, and the run may have 4 now"
    assert plan(replace(followed, gpus=4), NOW) == []
    # One node is the least that a trainer has: it was started anew every two minutes, for ever.
    assert plan(replace(followed, node_gpus=8), NOW) == []


def test_a_trainer_that_has_not_heard_that_it_is_to_leave_is_told_again():
    """Between two attempts nobody is there who hears."""
    told, waiting = trainer(cancelled_at=NOW - 299), trainer("2", "PENDING", asked=(1, 4))
    large = replace(sync_world(told, waiting), limits_of_gpus=(1, 4), gpus=8)
    assert plan(large, NOW) == []
    (action,) = plan(large, NOW + 1)
    assert (action.verb, action.job_id, action.now) == (CANCEL, "1", False)


def test_a_job_of_the_other_mode_that_has_said_its_last_word_is_not_waited_for():
    """The pass that the master ends with is the last, where there is no cron."""
    at_work = Job("6", "worker", 1, "RUNNING")
    jobs = (Job("5", "master", 0, "RUNNING", over="stopped"), replace(at_work, over="stopped"))
    memory = Memory(0.0, jobs=jobs, mode="sync", closing_since=NOW - 10)
    (start,) = plan(World(0, memory, mode="sync"), NOW)
    assert (start.verb, start.role) == ("submit", "trainer")
    still_there = replace(memory, jobs=(jobs[0], at_work))
    assert [each.verb for each in plan(World(0, still_there, mode="sync"), NOW)] == [WAIT]
    may_come = replace(memory, jobs=(), unsure=(UnsureSubmission("master", 0, NOW + 9),))
    assert [each.verb for each in plan(World(0, may_come, mode="sync"), NOW)] == [WAIT]


def test_a_run_that_changes_its_mode_waits_for_the_other_modes_jobs():
    jobs = (Job("5", "master", 0, "RUNNING"), Job("6", "worker", 1, "PENDING"))
    memory = Memory(0.0, jobs=jobs, mode="sync", closing_since=NOW - 10)
    stop, wait = plan(World(0, memory, mode="sync"), NOW)
    assert (stop.verb, stop.job_id) == (CANCEL, "6")
    assert stop.reason == "the run is going on in sync mode"
    assert (wait.verb, wait.role) == (WAIT, "trainer")
    for after_s, cancelled in ((200, {"6"}), (800, {"5", "6"})):
        memory = replace(memory, closing_since=NOW - after_s)
        late = plan(World(0, memory, mode="sync", hang_timeout_s=600.0), NOW)
        assert {action.job_id for action in verbs(late, CANCEL)} == cancelled


# ---- a cluster that does everything wrong


@dataclass
class Cluster:
    """A scheduler and its users, simulated: what `plan` acts on, told apart from what it knows."""

    rng: random.Random
    slots: int = 4
    gpus: int = 4
    nodes: tuple = NODES
    now: float = NOW
    rows: dict = field(default_factory=dict)  # job id -> Job, ended ones included
    records: dict = field(default_factory=dict)
    late: list = field(default_factory=list)  # submissions that turn up later
    memory: Memory = field(default_factory=lambda: Memory(born=NOW))
    limits: dict = field(default_factory=lambda: {"max_pending": 3, "max_failures": 10**6,
                                                   "backoff_s": 5.0})
    next_id: int = 1
    calm: bool = False
    closing: str = ""
    mode: str = "local"

    def live(self):
        return [row for row in self.rows.values() if not has_ended(row.state)]

    def add(self, role, slot):
        job_id, self.next_id = str(self.next_id), self.next_id + 1
        self.rows[job_id] = Job(job_id, role, slot, "PENDING", submitted_at=self.now)
        return job_id

    def submit(self, action):
        chance = 1.0 if self.calm else self.rng.random()
        place = (action.role, action.slot)
        if chance < 0.1:
            self.late.append((self.now + self.rng.uniform(0, 90), place))
        if chance < 0.2:
            unsure = UnsureSubmission(*place, self.now + 600)
            self.memory = replace(self.memory, unsure=(*self.memory.unsure, unsure))
            return
        job = self.rows[self.add(*place)]
        self.memory = replace(self.memory, jobs=(*self.memory.jobs, job))

    def cancel(self, action):
        row = self.rows.get(action.job_id)
        if row is None:
            return  # purged already: no error
        quick = row.state in QUEUED or self.calm or self.rng.random() < 0.5
        self.rows[row.job_id] = replace(row, state="CANCELLED by 0" if quick else "COMPLETING")
        jobs = [
            replace(job, cancelled_at=self.now) if job.job_id == row.job_id else job
            for job in self.memory.jobs
        ]
        self.memory = replace(self.memory, jobs=tuple(jobs))

    def end(self, row, state, outcome):
        self.rows[row.job_id] = replace(row, state=state)
        place = {"role": row.role, "slot": row.slot}
        if outcome == "started":
            self.records[row.job_id] = started(**place, time=self.now)
        elif outcome:
            self.records[row.job_id] = ended(outcome, **place, time=self.now)

    def live_on(self):
        """Something happens to every job, mostly good."""
        ready, waiting = [item for item in self.late if item[0] <= self.now], self.late
        self.late = [item for item in waiting if item[0] > self.now]
        for _, place in ready:
            self.add(*place)
        for row in self.live():
            chance = 0.0 if self.calm else self.rng.random()
            busy = sum(r.role == "worker" and r.state in STARTED for r in self.live())
            if row.state == "COMPLETING":
                self.rows[row.job_id] = replace(row, state="COMPLETED")
            elif row.state not in QUEUED + STARTED:
                self.rows[row.job_id] = replace(row, state="RUNNING", started_at=self.now)
            elif row.state in QUEUED and self.may_start(row, busy):
                self.rows[row.job_id] = replace(
                    row, state="RUNNING", started_at=self.now, node=self.rng.choice(self.nodes)
                )
            elif chance > 0.97:
                self.end(row, "PREEMPTED", "yielded")
            elif chance > 0.95:
                self.end(row, "FAILED", "failed")
            elif chance > 0.93:
                self.end(row, "NODE_FAIL", "started")
            elif chance > 0.91 and row.state in QUEUED:
                self.rows[row.job_id] = replace(row, reason="launch failed requeued held")
            elif chance > 0.90:
                del self.rows[row.job_id]
            elif chance > 0.88:
                self.rows[row.job_id] = replace(row, state="A_STATE_OF_2031")

    def may_start(self, row, busy):
        if row.role == "trainer":  # singleton
            others = (other for other in self.live() if other.role == "trainer")
            return not any(other.state not in (*QUEUED, "COMPLETING") for other in others)
        return row.role == "master" or busy < self.gpus

    def one_pass(self):
        """Reconcile, unless the controller does not answer."""
        if not self.calm and self.rng.random() < 0.1:
            return []
        listed = list(self.rows.values())
        memory = history.enter(self.memory, self.closing, self.now, self.mode)
        news = history.gone(memory, listed, self.now)
        ends = [history.ending(job, self.records.get(job.job_id), self.now) for job in news]
        self.memory = history.learn(memory, listed, ends, self.now, keep=4)
        actions = plan(World(self.slots, self.memory, mode=self.mode, **self.limits), self.now)
        for action in actions:
            if action.verb == SUBMIT:
                self.submit(action)
            elif action.verb == CANCEL:
                self.cancel(action)
        return actions

    def step(self):
        self.now += 20
        self.live_on()
        return self.one_pass()


@settings(many, max_examples=120)
@given(st.integers(0, 2**32))
def test_hours_of_trouble_never_make_two_jobs_for_a_place_and_end_well(seed):
    rng = random.Random(seed)
    cluster = Cluster(rng)
    for _ in range(rng.randrange(20, 90)):
        if rng.random() < 0.1:
            cluster.slots = rng.randrange(0, 6)
        if rng.random() < 0.05:
            cluster.mode = rng.choice(("local", "sync"))
        cluster.gpus = rng.randrange(0, 5)
        before = Counter(place_of(row) for row in cluster.live())
        actions = cluster.step()
        for action in verbs(actions, SUBMIT):
            occupied = [row for row in cluster.live() if place_of(row) == place_of(action)]
            if action.role == "trainer":  # it may follow the one at work
                occupied = [row for row in occupied if row.state in QUEUED]
            assert len(occupied) <= 1, "a job was submitted beside another"
            assert (action.role == "trainer") == (cluster.mode == "sync")
            known = {job.role == "trainer" for job in cluster.memory.jobs}
            assert len(known) <= 1, "a job was submitted beside one of the other mode"
        workers = [row for row in cluster.live() if row.role == "worker"]
        grown = len(workers) > sum(n for (role, _), n in before.items() if role == "worker")
        arrived = len([a for a in verbs(actions, SUBMIT) if a.role == "worker"])
        assert not (grown and arrived) or len(workers) <= cluster.slots
    cluster.calm, cluster.slots, cluster.gpus, wanted = True, 3, 9, cluster.mode
    for _ in range(250):
        actions = cluster.step()
    assert verbs(actions, SUBMIT, CANCEL) == []
    running = sorted(place_of(row) for row in cluster.live() if row.state == "RUNNING")
    if wanted == "sync":
        assert running == [("trainer", 0)]
        assert sorted(row.state for row in cluster.live()) == ["PENDING", "RUNNING"]
    else:
        assert len(running) == len(cluster.live()) == 4
        assert len(set(running)) == 4
        assert running[0] == ("master", 0)
    cluster.closing = "done"
    for _ in range(20):
        cluster.step()
    assert cluster.live() == []


# ---- stories


class Story:
    """A run told in steps: `now` moves, the listing is what the teller says."""

    def __init__(self, slots=2, **limits):
        self.cluster = Cluster(random.Random(0), slots=slots, calm=True, gpus=99, nodes=("n1",))
        self.cluster.limits = {"backoff_s": 30.0, "max_failures": 3, **limits}

    def wait(self, seconds=20.0):
        self.cluster.now += seconds
        self.cluster.live_on()
        return self.cluster.one_pass()

    def job(self, role="worker", slot=0):
        (row,) = [r for r in self.cluster.live() if (r.role, r.slot) == (role, slot)]
        return row

    def crash(self, slot=0, role="worker", **record):
        row = self.job(role, slot)
        self.cluster.end(row, "FAILED", "failed")
        self.cluster.records[row.job_id] |= {"reason": "exit 1", "detail": "Traceback", **record}
        return self.cluster.one_pass()

    def running(self):
        self.wait()
        self.wait()
        return self


def said(actions, verb):
    return [(a.role, a.slot) for a in actions if a.verb == verb]


def test_story_first_the_master_then_the_workers_then_silence():
    story = Story(slots=2)
    assert said(story.wait(), SUBMIT) == [("master", 0), ("worker", 0), ("worker", 1)]
    assert story.wait() == []
    assert story.wait() == []


def test_story_a_preempted_worker_is_back_with_the_next_pass():
    story = Story().running()
    story.cluster.end(story.job(slot=1), "PREEMPTED", "yielded")
    (action,) = story.cluster.one_pass()
    assert (action.verb, action.slot) == (SUBMIT, 1)
    assert "yielded" in action.reason


def test_story_code_that_crashes_is_tried_three_times_with_growing_pauses_then_the_run_fails():
    story = Story(slots=1).running()
    assert said(story.crash(), SUBMIT) == []
    assert said(story.wait(29), SUBMIT) == []
    assert said(story.wait(1), SUBMIT) == [("worker", 0)]
    story.wait(1)
    story.crash()
    assert said(story.wait(59), SUBMIT) == []
    assert said(story.wait(1), SUBMIT) == [("worker", 0)]
    story.wait(1)
    (failure, *_) = story.crash()
    assert failure.verb == FAIL
    assert failure.reason == "worker 0 failed 3 times in a row: exit 1"
    assert failure.detail == "Traceback"


def test_story_a_run_that_is_started_again_has_a_clean_record():
    story = Story(slots=1, max_failures=1).running()
    assert story.crash()[0].verb == FAIL
    story.cluster.closing = "failed"
    story.wait()
    story.cluster.closing = ""
    assert said(story.wait(), SUBMIT)[-1] == ("worker", 0)


def test_story_a_crash_after_hours_of_work_is_the_first_one_again():
    story = Story(slots=1).running()
    for _ in range(5):
        story.wait(9000)
        last = story.crash(started=story.cluster.now - 9000, steps=5000)
        assert FAIL not in {action.verb for action in last}
        assert said(story.wait(29), SUBMIT) == []
        assert said(story.wait(1), SUBMIT) == [("worker", 0)]
        story.wait()


def test_story_one_broken_slot_does_not_end_a_run_in_which_others_train():
    story = Story(slots=2, backoff_s=1.0).running()
    for _ in range(6):
        assert FAIL not in {action.verb for action in story.crash(slot=1, node="")}
        story.wait(3600)
        story.wait(1)
    assert story.job(slot=0).state == "RUNNING"


def test_story_a_master_that_crashes_three_times_ends_the_run_though_workers_live():
    story = Story(backoff_s=1.0).running()
    verbs_seen = set()
    for _ in range(3):
        verbs_seen |= {action.verb for action in story.crash(role="master")}
        story.wait(10)
        story.wait(10)
        if FAIL in verbs_seen:
            break
    assert FAIL in verbs_seen


def test_story_a_master_that_crashed_twice_on_a_node_is_tried_on_another():
    """One broken node of many, the idlest one, took the run's three tries and ended it."""
    story, tried = Story(backoff_s=1.0).running(), []
    for node in ("c1", "c1", "c2"):
        row = story.job(role="master")
        story.cluster.rows[row.job_id] = replace(row, node=node)
        story.wait(10)
        story.crash(role="master") if node == "c1" else None
        tried += [action.exclude for action in story.wait(10) if action.verb == SUBMIT]
        story.wait(10)
    assert tried == [(), ("c1",)]
    assert story.job(role="master").state == "RUNNING"
    story.wait(1800)
    story.cluster.end(story.job(role="master"), "PREEMPTED", "yielded")
    (action,) = verbs(story.cluster.one_pass(), SUBMIT)
    assert action.exclude == ()


def test_story_two_crashes_on_a_node_while_another_works_make_it_avoided_for_a_while():
    story = Story(slots=3, max_failures=2).running()
    rows = story.cluster.rows
    for slot, node in ((0, "n1"), (1, "bad"), (2, "bad")):
        row = story.job(slot=slot)
        rows[row.job_id] = replace(row, node=node)
    story.wait()
    assert said(story.crash(slot=1), SUBMIT) == []
    submitted = story.crash(slot=2)
    assert said(submitted, SUBMIT) == [("worker", 1), ("worker", 2)], "the node's fault: no pause"
    assert {action.exclude for action in submitted} == {("bad",)}
    story.wait()
    story.wait(1800)
    story.cluster.end(story.job(slot=1), "PREEMPTED", "yielded")
    (action,) = verbs(story.cluster.one_pass(), SUBMIT)
    assert action.exclude == ()


def test_story_the_whole_cluster_is_not_excluded_when_the_code_is_broken():
    story = Story(slots=2, max_failures=2).running()
    for slot, node in ((0, "n1"), (1, "n2")):
        row = story.job(slot=slot)
        story.cluster.rows[row.job_id] = replace(row, node=node)
    story.crash(slot=0)
    story.crash(slot=1)
    assert all(action.exclude == () for action in story.wait(30))


def test_story_stop_lets_workers_deliver_then_takes_the_jobs():
    story = Story(slots=3)
    story.cluster.gpus = 2
    story.running()
    story.cluster.closing = "stopped"
    assert said(story.wait(0), CANCEL) == [("worker", 2)], "it was only queued"
    assert said(story.wait(59), CANCEL) == []
    assert said(story.wait(1), CANCEL) == [("worker", 1), ("worker", 0)]
    assert said(story.wait(59), CANCEL) == []
    assert said(story.wait(1), CANCEL) == [("master", 0)]
    story.cluster.closing = ""
    assert said(story.wait(), SUBMIT) == [("master", 0), *(("worker", s) for s in range(3))]


def test_story_a_job_that_ignores_its_cancel_is_killed_at_the_second_request():
    story = Story(slots=1).running()
    story.cluster.slots = 0
    row = story.job()
    (first,) = story.cluster.one_pass()
    story.cluster.rows[row.job_id] = row  # still there, still running
    assert story.wait(59) == []
    (second,) = story.wait(1)
    assert (first.now, second.now, second.job_id) == (False, True, row.job_id)


def test_story_scaling_down_takes_queued_jobs_first_and_spares_what_runs_in_high_slots():
    story = Story(slots=4)
    story.cluster.gpus = 0
    story.running()
    for slot in (2, 3):
        row = story.job(slot=slot)
        story.cluster.rows[row.job_id] = replace(row, state="RUNNING", started_at=story.cluster.now)
    story.cluster.slots = 2
    assert said(story.wait(), CANCEL) == [("worker", 1), ("worker", 0)]
    assert story.wait() == []
    story.cluster.end(story.job(slot=3), "PREEMPTED", "yielded")
    assert said(story.cluster.one_pass(), SUBMIT) == [("worker", 0)]


def test_story_a_job_requeued_by_an_admin_keeps_its_place_though_it_had_ended():
    story = Story(slots=1).running()
    row = story.job()
    story.cluster.end(row, "NODE_FAIL", "started")
    story.cluster.rows[row.job_id] = replace(row, state="REQUEUED")
    assert story.wait() == []


def test_story_an_id_used_again_after_a_controller_crash_is_another_job():
    story = Story(slots=2).running()
    row = story.job(slot=0)
    story.cluster.rows[row.job_id] = replace(row, slot=5, state="RUNNING")
    story.cluster.slots = 9
    actions = story.wait(40)
    assert ("worker", 5) not in said(actions, SUBMIT)
    assert ("worker", 0) in said(actions, SUBMIT) + said(actions, WAIT)


def test_story_an_unsure_submission_holds_its_place_until_it_turns_up_or_ten_minutes_pass():
    story = Story(slots=2)
    memory = story.cluster.memory
    unsure = tuple(UnsureSubmission("worker", slot, NOW + 600) for slot in (0, 1))
    story.cluster.memory = replace(memory, unsure=unsure)
    assert said(story.wait(), SUBMIT) == [("master", 0)]
    story.cluster.add("worker", 0)
    assert said(story.wait(500), SUBMIT) == []
    assert said(story.wait(100), SUBMIT) == [("worker", 1)]
    assert [place_of(u) for u in story.cluster.memory.unsure] == []
