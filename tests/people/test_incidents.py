"""What happened, out of events and commits; and the words for it."""

import ast
import math

import pytest

from elastic.jobs import plan
from elastic.people import report
from elastic.people.report import Point
from elastic.run import wording
from elastic.run.records import ORDERLY, Outcome
from elastic.run.wording import EventKind
from helpers import ROOT, commit_of


def event(kind: str, time: float, **fields) -> dict:
    return {"kind": kind, "time": time, **fields}


WORKER = {"role": "worker", "slot": 3, "job_id": "7", "node": "n1"}
END = event("end", 20.5, **WORKER, submitted=1.0, started=10.0, ended=20.0, outcome="yielded",
            reason="notice: SIGTERM")


def test_a_worker_that_was_asked_to_leave_is_no_incident():
    asked = event("cancel", 19.0, role="worker", slot=3, job_id="7", reason="2 slots now")
    left = event("preempt", 20.0, **WORKER, attempt=1, reason="notice", steps=5)
    assert report.incidents([asked, left, {**END, "outcome": "cancelled"}]) == []
    taken = {**left, "slot": 4, "job_id": "9"}
    assert report.incidents([asked, left, taken]) == [taken]


def test_a_master_that_was_killed_is_an_incident_and_its_successor_is_none():
    death = event("end", 20.0, role="master", slot=0, job_id="1", outcome="killed", reason="gone")
    new = event("master", 22.0, epoch=2, node="n1")
    step = event("outer-step", 25.0, version=7, workers=2, loss=1.0)
    first = event("master", 1.0, epoch=1, node="n1")
    assert report.incidents([first, death, new, step]) == [death]


def test_a_master_that_hands_over_in_time_is_no_incident():
    """Its time limit came, or the mode was changed and changed back: nothing went wrong."""
    left = event("end", 21.0, role="master", slot=0, job_id="1", outcome="yielded", reason="notice")
    taken = [event("master", at, epoch=epoch, node="n1") for at, epoch in ((1.0, 1), (20.0, 2))]
    assert report.incidents([*taken, left]) == []


def test_an_end_that_was_announced_is_no_second_incident():
    assert report.incidents([END]) == []


def test_points_have_the_speed_since_the_one_before():
    commits = [commit_of(), commit_of(1, time=2.0, tokens=100, loss=3.0),
               commit_of(2, time=4.0, tokens=300, loss=2.0)]
    assert report.points(commits) == [Point(2.0, 100, 3.0, 50.0), Point(4.0, 300, 2.0, 100.0)]


def test_points_have_their_speed_where_nobody_told_a_loss():
    (point,) = report.points([commit_of(), commit_of(1, time=2.0, tokens=100, loss=None)])
    assert (point.tokens_per_s, math.isnan(point.loss)) == (50.0, True)


def test_of_steps_that_were_trained_again_the_second_time_counts():
    steps = [(1.0, 10, 5.0), (2.0, 20, 4.0), (3.0, 30, 3.0), (9.0, 20, 4.5), (10.0, 30, 3.5)]
    lines = [{"time": time, "tokens": tokens, "loss": loss} for time, tokens, loss in steps]
    assert [(p.time, p.tokens) for p in report.points([], lines)] == [(9.0, 20), (10.0, 30)]


# ---- words


# Kinds that are chosen when a job has ended, or as a pass acts.
CHOSEN = ("preempt", "lost", "leave", plan.SUBMIT, plan.CANCEL)


def emitted() -> set[str]:
    """The kinds of events that are spelled where they are emitted."""
    kinds = set()
    for path in (ROOT / "lib/elastic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in ("event", "_event") and node.args:
                words = (part for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
                kinds |= {word.value for word in words}
    return kinds


def test_every_kind_of_event_that_is_emitted_is_known_and_has_words():
    assert len(emitted()) > 20
    assert emitted() | {*CHOSEN} <= {*EventKind}
    assert all(kind.words for kind in EventKind)


def test_an_outcome_is_its_word_and_the_word_of_a_later_version_is_no_incident():
    assert (Outcome("yielded"), f"{Outcome.YIELDED}") == (Outcome.YIELDED, "yielded")
    assert "yielded" in ORDERLY
    ends = [{**END, "outcome": word} for word in (*Outcome, "eaten by a later version")]
    outcomes = {incident["outcome"] for incident in report.incidents(ends)}
    assert outcomes == {"killed", "lost", "failed", "refused", "held"}


@pytest.mark.parametrize(("event", "words"), [
    (event("checkpoint-failed", 1.0, step=40, reason="no space"),
     "the checkpoint of step 40 was not saved: no space"),
    (event("validate", 1.0, version=4, loss=2.34567), "validate version=4 loss=2.346"),
    (event("nodes-released", 1.0, nodes=2, left=4, job_id="7"), "2 nodes given back; 4 are left"),
])
def test_an_event_is_told_in_words(event: dict, words: str):
    assert wording.event_words(event) == words


@pytest.mark.parametrize("kind", EventKind)
def test_an_event_without_its_fields_is_told_all_the_same(kind: str):
    words = wording.event_words({"time": 0.0, "kind": kind, "role": "worker"})
    assert words
    assert "{" not in words


def test_what_is_not_short_is_cut():
    words = wording.event_words({"kind": "reject", "slot": 1, "reason": "x" * 5000})
    assert len(words) < 200


@pytest.mark.parametrize(
    ("reason", "words"),
    [("Priority", "others"), ("Resources", "no node"), ("QOSMaxJobsPerUserLimit", "--max"),
     ("ReqNodeNotAvail, Reserved for maintenance", "--time-min"),
     ("ReqNodeNotAvail, UnavailableNodes:n1", "drained"), ("PartitionTimeLimit", "slurm.time"),
     ("AssocGrpGRES", "group"), ("launch failed requeued held", "held"), ("BeginTime", "minute"),
     ("InvalidQOS", "slurm.qos"), ("Whatever", ""), ("", "")],
)
def test_what_a_pending_job_waits_for_is_said_in_plain_words(reason: str, words: str):
    assert words in wording.way_out(reason)
    assert bool(wording.way_out(reason)) == bool(words)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
     (3600 * 3 + 1200, "3 h 20 min"), (86400 * 2 + 3600 * 5, "2 d 5 h"), (-5, "0 s")],
)
def test_a_span_has_one_unit_or_two(seconds: float, text: str):
    assert wording.span(seconds) == text
