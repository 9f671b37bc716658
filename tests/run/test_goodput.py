"""The goodput ledger: each second of a job is counted once, under its right name.

pytest tests/run/test_goodput.py
"""

import pytest
from hypothesis import given, strategies as st

from elastic.run.goodput import (
    PARTS,
    Allocation,
    Work,
    allocations,
    jobs_in,
    ledger,
    tokens_per_s,
    work_in,
)

ONE, TWO = (3, 1), (3, 2)  # attempts of slot 3
TIMES = st.floats(0, 100, allow_nan=False)


def parts(job: Allocation, *work: Work) -> dict[str, float]:
    """The non-zero parts of one job."""
    found = ledger([job], work)
    return {name: round(found[name], 6) for name in PARTS if found[name]}


def test_a_quiet_life():
    job = Allocation(1, 0, 10, 50, "done", ((11, ONE),))
    work = [Work(ONE, 14, 24, 100), Work(ONE, 26, 46, 200, stall_s=2.5)]
    assert parts(job, *work) == {"start-up": 4, "training": 30, "waiting": 6}
    assert ledger([job], work)["queued"] == 10


def test_what_a_round_has_beside_its_steps_is_no_training():
    """A validation of 2 s in a round of steps of 0.2 s was: 81 % in place of 6 %."""
    job = Allocation(1, 0, 0, 30, "done", ((0, ONE),))
    work = [Work(ONE, 2, 12, 100, trained_s=6.0), Work(ONE, 13, 28, 100, 1.0, trained_s=15.5)]
    assert parts(job, *work) == {"start-up": 2, "training": 21, "waiting": 7}


def test_a_crash_costs_the_open_round_and_a_new_start():
    job = Allocation(1, 0, 0, 60, "done", ((1, ONE), (30, TWO)))
    work = [Work(ONE, 5, 15, 100), Work(TWO, 34, 54, 100)]
    assert parts(job, *work) == {"start-up": 9, "training": 30, "lost": 15, "waiting": 6}


def test_what_a_crash_in_a_later_round_costs():
    job = Allocation(1, 0, 0, 40, "killed", ((1, ONE), (20, TWO)))
    assert parts(job, Work(ONE, 5, 15, 100)) == {"start-up": 5 + 20, "training": 10, "lost": 5}


def test_a_rejected_round_is_lost_and_the_wait_before_it_is_not():
    job = Allocation(1, 0, 0, 40, "done", ((0, ONE),))
    work = [Work(ONE, 2, 12, 100), Work(ONE, 30, 40, 100, stall_s=3)]
    assert parts(job, *work) == {"start-up": 2, "training": 20, "waiting": 3, "lost": 15}


def test_steps_delivered_after_a_notice_are_training():
    job = Allocation(8, 0, 0, 20, "yielded", ((0, ONE),), notice=15)
    assert parts(job, Work(ONE, 2, 16, 100)) == {"start-up": 16, "training": 112, "notice": 32}


def test_a_delta_that_a_master_took_after_the_end_of_its_job_was_trained_before():
    """The master was dead at the notice: what the next one committed was called lost."""
    job = Allocation(1, 0, 0, 100, "yielded", ((0, ONE),), notice=95)
    work = [Work(ONE, 10, 30, 100), Work(ONE, 130, 150, 100)]
    assert parts(job, *work) == {"start-up": 10, "training": 40, "waiting": 45, "notice": 5}


def test_a_job_that_is_killed_had_lost_what_was_not_committed():
    job = Allocation(1, 0, 0, 20, "killed", ((0, ONE),))
    assert parts(job, Work(ONE, 2, 12, 100)) == {"start-up": 2, "training": 10, "lost": 8}


def test_a_job_at_work_has_an_open_round_and_a_new_one_is_starting_up():
    job = Allocation(1, 0, 0, 20, "", ((0, ONE),))
    assert parts(job, Work(ONE, 2, 12, 100)) == {"start-up": 2, "training": 10, "open": 8}
    assert parts(job) == {"start-up": 20}


def test_steps_of_sync_mode_that_come_again_are_replay():
    steps = [(1, 3, 1), (2, 4, 1), (3, 5, 1), (3, 9, 2), (4, 10, 2)]
    lines = [{"step": step, "tokens": 10 * step, "time": at, "seconds": 1.0, "attempt": attempt}
             for step, at, attempt in steps]
    work = work_in([], lines)
    job = Allocation(4, 0, 1, 11, "done", ((1, (0, 1)), (6, (0, 2))))
    assert parts(job, *work) == {
        "start-up": 4 * (1 + 2), "training": 16, "replay": 4, "lost": 4, "waiting": 4,
    }
    assert sum(each.tokens for each in work) == 40


def test_what_a_trainer_does_between_two_steps_is_no_loss():
    """It saves, validates or loads: in one attempt nothing that it trained is lost."""
    lines = [{"step": step, "tokens": 10 * step, "time": at, "seconds": 1.0, "attempt": 1}
             for step, at in ((1, 3), (2, 4), (3, 9), (3, 12))]
    job = Allocation(2, 0, 1, 13, "done", ((1, (0, 1)),))
    assert parts(job, *work_in([], lines)) == {
        "start-up": 2, "training": 6, "replay": 2, "waiting": 2 * (4 + 2 + 1),
    }


@given(
    st.lists(st.tuples(TIMES, TIMES, st.integers(1, 3), TIMES, st.booleans()), max_size=8),
    st.lists(TIMES, min_size=3, max_size=3), st.tuples(TIMES, TIMES), st.none() | TIMES,
    st.sampled_from(["", "done", "stopped", "yielded", "killed", "failed", "lost"]),
)
def test_whatever_clocks_say_the_parts_add_up_to_what_was_allocated(
    rounds, begun, span, notice, outcome
):
    work = [Work((0, n), start, stop, 1, stall, again) for start, stop, n, stall, again in rounds]
    attempts = tuple((at, (0, n)) for n, at in enumerate(sorted(begun), 1))
    job = Allocation(2, 0, min(span), max(span), outcome, attempts, notice)
    found = ledger([job], work)
    assert all(found[name] >= -1e-9 for name in PARTS), found
    assert sum(found[name] for name in PARTS) == pytest.approx(found["allocated"], abs=1e-6)


def test_jobs_are_known_by_their_events_and_exit_records():
    key = {"role": "worker", "slot": 3}
    events = [
        {"kind": "start", "time": 5, "job_id": "7", "attempt": 1, **key},
        {"kind": "notice", "time": 30, "job_id": "7", "attempt": 1, **key},
        {"kind": "end", "time": 99, "job_id": "7", "submitted": 1, "started": 4, "ended": 33,
         "gpus": 2, "outcome": "yielded", **key},
        {"kind": "end", "time": 99, "job_id": "8", "submitted": 1, "started": None, "ended": 33,
         "gpus": 2, "outcome": "cancelled", **key},
        {"kind": "start", "time": 41, "job_id": "9", "attempt": 2, **key},
    ]
    endings = [
        {"job_id": "7", "state": "ended", "started": 5, "time": 33, "outcome": "yielded", **key},
        {"job_id": "9", "state": "started", "started": 41, "time": 41, **key},
        {"job_id": "6", "state": "started", "started": 2, "time": 2, "role": "master", "slot": 0},
        {"job_id": "5", "state": "ended", "started": 6, "time": 20, "outcome": "done", "gpus": 1,
         "role": "trainer", "slot": 0},
    ]
    assert sorted(allocations(events, endings, 2, 50), key=lambda job: job.start) == [
        Allocation(2, 1, 4, 33, "yielded", ((5, (3, 1)),), 30),
        Allocation(1, 6, 6, 20, "done"),  # no pass has come by since it ended
        Allocation(2, 41, 41, 50, "", ((41, (3, 2)),)),
    ]


def test_a_requeued_job_has_had_nodes_twice():
    end = {"kind": "end", "job_id": "7", "role": "worker", "slot": 3, "started": 10, "ended": 20}
    ends = [end, {**end, "started": 30, "ended": 40}]
    assert [job["started"] for job in jobs_in(ends, [], 99)] == [10, 30]


def test_a_job_that_was_killed_is_not_there_twice():
    """Its exit record still says that it started."""
    key = {"job_id": "7", "role": "worker", "slot": 3}
    record = {**key, "state": "started", "started": 10, "time": 10}
    end = {"kind": "end", "started": 10, "ended": 20, **key}
    assert [job["ended"] for job in jobs_in([end], [record], 99)] == [20]


def test_tokens_come_evenly_over_a_round():
    work = [Work(ONE, 0, 10, 100), Work(TWO, 5, 15, 50)]
    assert tokens_per_s(work, 0, 15) == pytest.approx(10)
    assert tokens_per_s(work, 5, 10) == pytest.approx(15)
    assert tokens_per_s(work, 20, 30) == 0
