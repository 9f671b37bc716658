"""Leases and the records of a run directory, broken in every way: refused, or of use to readers.

100,000 inputs in all, from fixed seeds. pytest tests/whole/test_fuzz_records.py
"""

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from elastic.base.errors import ElasticError
from elastic.jobs import history
from elastic.jobs.cadence import observed_mtbi_s
from elastic.jobs.history import Job
from elastic.people import report
from elastic.run import goodput, membership, sound, wording
from elastic.run.audit import (
    check_files,
    check_sequence,
    check_sums,
    count_epochs,
    read_commits,
    taken_back,
)
from elastic.run.commits import read_checkpoints
from elastic.run.membership import Slot
from elastic.run.rundir import RunDir

LEASES, RECORDS = 76_000, 4_000  # of each of six kinds
JUNK = [None, True, -1, 0, 1, 2**31, 2**53, 2**63, 10**400, 0.5, 1e308, math.inf, math.nan, "", "a",
        "7", "../../x", "--me", "a\0b", "\x1b[2J", "\ud800", "x" * 300, [], {}, [[]], [None],
        [[0, 1]], [[0, 0, 2]], [{}], {"a": []}]


def broken(draw: random.Random, good: dict) -> dict:
    """One to three things are wrong."""
    record = json.loads(json.dumps(good))
    for _ in range(draw.randint(1, 3)):
        inside = draw.choice([record, *tables(record)])
        name = draw.choice([*inside, "more"])
        if draw.random() < 0.3:
            inside.pop(name, None)
        else:
            inside[name] = copy.deepcopy(draw.choice(JUNK))
    return record


def tables(value: object) -> list[dict]:
    """Every table in it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] * isinstance(value, dict) + [each for part in inside for each in tables(part)]


def text_of(draw: random.Random, record: dict) -> bytes:
    body = bytearray(json.dumps(record).encode())
    if draw.random() < 0.1:
        body[draw.randrange(len(body))] = draw.randrange(256)
    return bytes(body[: draw.randrange(len(body))] if draw.random() < 0.05 else body)


# ---- leases

LEASE = {"slot": 3, "attempt": 2, "job_id": "17", "node": "n1", "pid": 4711, "state": "training",
         "version": 5, "step": 9, "steps_total": 99, "tokens_per_s": 12.5, "loss": 2.5,
         "beat": 100.0, "moved": 99.5, "joined": 10.0, "trouble": "",
         "step_s": 0.5}


def test_a_broken_lease_is_nobodys_or_is_names_and_numbers_within_bounds(tmp_path):
    draw, found = random.Random(1), 0
    for _ in range(LEASES):
        fields = {n: str(v)[:500] for n, v in broken(draw, LEASE).items()}
        if (slot := Slot.from_fields(fields)) is None:
            continue
        found += 1
        assert "/" not in slot.job_id + slot.node
        assert slot.job_id[0] not in "-."
        assert (slot.job_id + slot.node + slot.state).isprintable()
        assert len(slot.job_id + slot.node + slot.trouble) < 1000
        numbers = [v for n, v in asdict(slot).items() if not isinstance(v, str) and n != "loss"]
        assert all(-1 <= number < 2**53 for number in numbers)
        live = membership.live({3: slot}, {3: 2}, 101.0, 60.0)
        for each in membership.expected(list(live.values()), 101.0, 60.0).values():
            assert each.attempt == 2
    assert 0 < found < LEASES
    good = Slot.from_fields({name: str(value) for name, value in LEASE.items()})
    assert asdict(good) == LEASE


def test_a_lease_counts_while_it_is_the_newest_attempts_and_somebody_beats():
    slot = Slot.from_fields({name: str(value) for name, value in LEASE.items()})
    assert membership.live({3: slot}, {3: 2}, 159.0, 60.0) == {3: slot}
    for attempts, now in [({3: 1}, 101), ({3: 3}, 101), ({}, 101), ({3: 2}, 161), ({3: 2}, 39)]:
        assert membership.live({3: slot}, attempts, now, 60.0) == {}


# ---- records of the run directory

WHO = {"role": "worker", "slot": 1, "attempt": 1, "job_id": "7", "node": "n1"}
END = {**WHO, "time": 40.0, "kind": "end", "submitted": 1.0, "started": 2.0, "ended": 39.0,
       "gpus": 1, "outcome": "failed", "reason": "because"}
EVENTS = [
    {**WHO, "time": 3.0, "kind": "start"}, {**WHO, "time": 4.0, "kind": "join"},
    {**WHO, "time": 5.0, "kind": "notice", "signal": "SIGTERM"}, END,
    {"time": 6.0, "kind": "master", "epoch": 2, "node": "n1", "job_id": "1"},
    {"time": 7.0, "kind": "outer-step", "version": 3, "tokens": 5, "loss": 2.0, "workers": 2,
     "seconds": 1.0, "reason": "all"},
    {"time": 8.0, "kind": "reject", "slot": 1, "attempt": 1, "base": 2, "reason": "stale: x"},
    {"time": 9.0, "kind": "fail", "reason": "x"}, {"time": 9.0, "kind": "cancel", "job_id": "7"},
    {"time": 9.5, "kind": "chaos", "fault": "kill-worker", "what": "x"},
    {**WHO, "time": 10.0, "kind": "preempt", "reason": "x", "steps": 5},
]
ENDING = {**WHO, "time": 39.0, "started": 2.0, "state": "ended", "outcome": "failed", "code": 1,
          "reason": "x", "detail": "", "steps": 7}
DELTA = {"slot": 1, "attempt": 1, "job_id": "7", "base": 0, "codec": "none", "steps": 5,
         "tokens": 4, "loss": 2.0, "inner": "", "first_loss": 2.5, "samples": [[0, 0, 4]],
         "norm": 1.0, "lr_sum": 0.1, "seconds": 2.0, "stall_s": 0.1, "delivered": 30.0}
FIRST = {"version": 0, "writer": "slot0.1", "master_epoch": 0, "time": 20.0, "tokens": 0,
         "samples": [], "deltas": [], "layout": "abc", "dataset_samples": 100,
         "epochs": 1, "total_tokens": 100, "workers": 1, "files": []}
FILE = {"path": "versions/000001/manifest.json", "bytes": 10, "xxh3": "aa"}
COMMIT = {**FIRST, "version": 1, "master_epoch": 1, "time": 31.0, "tokens": 4,
          "samples": [[0, 0, 4]], "deltas": [DELTA], "loss": 2.0, "step": 3,
          "rejected": {"stale": 1}, "outer_lr": 0.7, "outer_momentum": 0.5, "inner_steps": 5,
          "clipped": 0, "taken_back": 0, "bytes": 8,
          "files": [FILE]}
EXTRA = {"state": {}, "base_version": 0, "tokens": 4, "loss": 2.0, "samples": [[0, 0, 4]],
         "deltas": [DELTA], "skipped": [[0, 4, 8]], "dataset_samples": 100,
         "epochs": 1}
CHECKPOINT = {"step": 3, "writer": "attempt1", "extra": EXTRA, "files": [FILE]}


def of_use_as_control(run: RunDir, path: Path) -> None:
    control = run.control()
    run.closing("local")
    assert range(max(0, control.max) // 2) is not None
    assert f"{control.min}–{control.max} {control.state}"


def of_use_as_endpoint(run: RunDir, path: Path) -> None:
    endpoint = run.endpoint()
    assert f"{endpoint.host}:{endpoint.port + 1}{endpoint.url}{endpoint.certificate}"
    assert run.masters.newest() >= endpoint.epoch
    assert run.password("worker", endpoint)


def of_use_as_ending(run: RunDir, path: Path) -> None:
    endings = [*run.jobs.endings(), *filter(None, [run.jobs.ending("7")])]
    if not endings:
        raise ElasticError("it says nothing")
    job = Job("7", "worker", 1, "FAILED", "", 1.0, started_at=2.0)
    history.ending(job, endings[0], 50.0)
    history.said_at_end(job, endings[0])
    report.newest_jobs([], endings, 50.0)
    goodput.ledger(goodput.allocations([], endings, 1, 50.0), [])
    observed_mtbi_s(endings)
    assert next(end.get("gpus", 0) for end in endings) is not None


def of_use_as_event(run: RunDir, path: Path) -> None:
    events = run.events()
    if not events:
        raise ElasticError("nothing of it is left")
    report.incidents(events)
    report.newest_jobs(events, [], 50.0)
    goodput.ledger(goodput.allocations(events, [], 1, 50.0), [])
    assert all(isinstance(wording.event_words(event), str) for event in events)


def of_use_as_commit(run: RunDir, path: Path) -> None:
    commits, problems = read_commits(path.parent)
    if len(commits) == 2:
        list(check_sequence(commits))
        list(check_sums(*commits))
        count_epochs(commits, False, ())
        check_files(run.path, commits, [], 1, None)
        assert len(taken_back(commits)) <= 2
    found = list(run.commits.all())
    if len(commits) != 2:
        assert problems
        raise ElasticError(problems[0])
    report.points(found)
    goodput.ledger([], goodput.work_in(found))
    run.commits.newest_version()


def of_use_as_checkpoint(run: RunDir, path: Path) -> None:
    saved = read_checkpoints(run.path, 0)
    if not saved:
        raise ElasticError("it says nothing")
    commits, _ = read_commits(run.path / "commits")
    list(check_sums(*commits, *saved))
    count_epochs([*commits, *saved], False, saved[0].skipped)
    check_files(run.path, [], saved, 1, None)
    assert wording.unit(saved[0].deltas)


KINDS: dict[str, tuple[str, list[dict], Callable]] = {
    "control": ("control.json", [{"mode": "local", "state": "running", "min": 1, "max": 4,
                                  "time": 1.0}], of_use_as_control),
    "endpoint": ("endpoint.json", [{"host": "10.0.0.1", "port": 6379, "epoch": 3, "url": "",
                                    "certificate": "", "nonce": "a"}], of_use_as_endpoint),
    "exit record": ("exit/7.json", [ENDING], of_use_as_ending),
    "event": ("events.jsonl", EVENTS, of_use_as_event),
    "commit": ("commits/000001.json", [COMMIT], of_use_as_commit),
    "checkpoint": ("checkpoints/step-00000003.json", [CHECKPOINT], of_use_as_checkpoint),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_record_is_refused_or_of_use_to_everything_that_reads_it(make_run, kind):
    run, draw, outcomes = make_run(), random.Random(2), Counter()
    (run.path / "commits" / "000000.json").write_text(json.dumps(FIRST))
    name, goods, of_use = KINDS[kind]
    path = run.path / name
    for good in goods:
        path.write_text(json.dumps(good) + "\n")
        of_use(run, path)
    for _ in range(RECORDS):
        body = text_of(draw, broken(draw, draw.choice(goods)))
        path.unlink()  # ext4 writes a file to the disk at once if it was cut off before
        path.write_bytes(body + b"\n")  # as each line of a log ends
        try:
            of_use(run, path)
            outcomes["of use"] += 1
        except ElasticError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(body[:1000]) from error
    assert min(outcomes["of use"], outcomes["refused"]) > RECORDS / 20, outcomes


def test_what_a_later_version_adds_to_a_record_is_taken_as_it_is(make_run):
    run = make_run()
    path = run.path / "control.json"
    path.write_text(json.dumps({**asdict(run.control()), "note": "x"}))
    assert run.control().max == 4
    (run.path / "endpoint.json").write_text(json.dumps(KINDS["endpoint"][1][0] | {"more": 1}))
    assert run.endpoint().port == 6379


def test_the_word_for_a_damaged_record_names_file_field_and_value(make_run):
    run = make_run()
    path = run.path / "control.json"
    path.write_text('{"mode": "local", "state": "running", "min": 1, "max": "many"}')
    with pytest.raises(ElasticError, match=r"control\.json: max is 'many'"):
        run.control()
    path.write_text('{"mode": "local"}')
    with pytest.raises(ElasticError, match="no (state|min|max) in it"):
        run.control()


@pytest.mark.parametrize(("field", "value", "said"), [
    ("inner_steps", "5", "inner_steps is '5'"),
    ("files", [{**FILE, "bytes": "10"}], "bytes is '10'"), ("deltas", [DELTA, 5], "deltas is "),
    ("files", [{"path": "a"}], "no bytes in it"), ("deltas", [DELTA | {"norm": []}], "norm is "),
    ("writer", "../../x", "writer is '../../x'"), ("layout", None, "layout is 'None'"),
])
def test_whatever_is_wrong_in_a_commit_is_said_with_its_path(make_run, field, value, said):
    run = make_run()
    path = run.commits.path(1)
    path.write_text(json.dumps(COMMIT | {field: value}))
    with pytest.raises(ElasticError, match=f"damaged file: {path}: {said}"):
        run.commits.of(1)


@pytest.mark.parametrize("job_id", ["../x", "a\0b", "j" * 300, "", "-1", ".."])
def test_a_job_id_that_is_no_name_has_no_record(make_run, job_id):
    assert make_run().jobs.ending(job_id) is None


def test_fields_of_every_record_are_known_by_one_kind():
    assert {sound.KINDS[name] for name in ("time", "slot", "kind", "samples")} == {
        sound.NUMBER, int, str, list}
