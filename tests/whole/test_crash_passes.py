"""Crash-only everything, of what users and cron call: a pass, the making of a run, its control.

pytest tests/whole/test_crash_passes.py

As test_crash_points.py, without torch. The scheduler is a file: what was submitted is in it,
whoever died; a listing is LAG_S behind. To submit, to cancel and to ask are operations like the
others: killed before or after, refused, or done with the answer lost.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import crashing
from crashing import KILLED, REFUSED, UNANSWERED, WAYS, Edge, Point, World, report, try_all
from elastic.base import config
from elastic.base.durable import to_json, write_atomic
from elastic.base.environment import clean_environment
from elastic.base.errors import TryAgain
from elastic.jobs.history import LISTING_LAG_S, Job
from elastic.jobs.reconcile import UNSURE_S, _Pass, run_pass
from elastic.jobs.sched import parse_job_name
from elastic.people import submission
from elastic.run import rundir
from elastic.run.rundir import Control, RunDir

NOW, LAG_S, PASS_S = 1_800_000_000.0, 5.0, 2.0
WAYS |= dict.fromkeys(("submit", "cancel"), (KILLED, REFUSED, UNANSWERED)) | {
    "list": (KILLED, REFUSED)
}


def _job(row: dict) -> Job:
    run, role, slot = parse_job_name(row["name"])
    fields = {name: value for name, value in row.items() if name != "name"}
    return Job(run=run, role=role, slot=slot, **fields)


class Filed:
    """A scheduler without processes, kept in a file."""

    def __init__(self, path: Path):
        self.path, self.now = path, NOW

    def open(self, *_) -> "Filed":
        return self

    def rows(self) -> list[dict]:
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def write(self, rows: list[dict]) -> None:
        with crashing.quietly(), self.path.open("w") as file:
            file.write(json.dumps(rows))
            file.flush()
            os.fsync(file.fileno())  # a machine that is lost was another one

    def add(self, name: str, state: str = "PENDING", at: float | None = None) -> str:
        rows = self.rows()
        at = self.now if at is None else at
        started = at if state != "PENDING" else None
        rows.append({"job_id": str(len(rows) + 1), "name": name, "state": state,
                     "submitted_at": at, "started_at": started})
        self.write(rows)
        return rows[-1]["job_id"]

    def jobs(self, within_s: float = 0.0) -> list[Job]:
        return [_job(row) for row in self.rows() if row["submitted_at"] <= self.now - LAG_S]

    def submit(self, spec) -> str:
        return self.add(spec.name)

    def cancel(self, job_id: str, kill: bool = False) -> None:
        rows = self.rows()
        for row in rows:
            if row["job_id"] == job_id:
                row["state"] = "CANCELLED"
        self.write(rows)

    def live(self) -> Counter:
        """How many jobs each place has."""
        rows = (row for row in self.rows() if row["state"] in ("PENDING", "RUNNING"))
        return Counter(parse_job_name(row["name"])[1:] for row in rows)

    def edges(self, edge: Edge) -> None:
        """From now on its verbs are operations."""
        verbs = {"submit": TryAgain("sbatch: timed out"), "cancel": TryAgain("scancel: timed out"),
                 "jobs": TryAgain("squeue: timed out")}
        for verb, error in verbs.items():
            real, name = getattr(self, verb), "list" if verb == "jobs" else verb

            def call(*args, real=real, name=name, error=error, **kwargs):
                return edge.operation(name, lambda: real(*args, **kwargs), error=error)

            setattr(self, verb, call)


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    folder = tmp_path / "world"
    folder.mkdir()
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(folder / "registry"))
    monkeypatch.setenv("ELASTIC_RUNS", str(folder / "runs"))
    monkeypatch.setenv("ELASTIC_SITE", "/dev/null")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here
    return World(folder)


@pytest.fixture
def settings(world) -> config.Config:
    path = world.folder.with_name("run.toml")
    path.write_text('[run]\nname = "tiny"\nscheduler = "local"\n[train]\nepochs = 1\n'
                    "[elastic]\nmin = 1\nmax = 4\n")
    return config.load(path)


@pytest.fixture
def run(world, settings) -> RunDir:
    return RunDir.create(world.folder / "runs", settings, Control("local", "running", 1, 4), {})


@pytest.fixture
def slurm(world) -> Filed:
    return Filed(world.folder / "jobs.json")


def one_pass(run: RunDir, slurm: Filed, after_s: float):
    slurm.now += after_s
    found = run_pass([run], slurm.now, scheduler=slurm.open)
    assert not found.errors, found.errors
    return found


def act(run: RunDir, slurm: Filed) -> None:
    """A pass; what goes wrong in it is in its report, which must not raise."""
    run_pass([run], slurm.now, scheduler=slurm.open)


def passes(run: RunDir, slurm: Filed) -> None:
    """Cron goes on, soon and late; never are there two jobs in a place."""
    for after_s in (PASS_S, PASS_S, 2 * LISTING_LAG_S, UNSURE_S, PASS_S, 2 * LISTING_LAG_S):
        one_pass(run, slurm, after_s)
        assert max(slurm.live().values(), default=0) <= 1, slurm.live()


def ended(run: RunDir, job_id: str, slot: int, outcome: str, at: float) -> None:
    record = {"role": "worker", "slot": slot, "outcome": outcome, "reason": "planted", "code": 1,
              "job_id": job_id, "time": at, "started": at, "state": "ended"}
    write_atomic(run.path / "exit" / f"{job_id}.json", to_json(record))


@pytest.fixture
def changing(run, slurm) -> RunDir:
    """The master is lost, worker 0 has yielded, and of four slots two are no more."""
    one_pass(run, slurm, 0.0)
    rows = slurm.rows()
    for row in rows:
        row |= {"state": "RUNNING", "started_at": NOW}
    slurm.write(rows)
    one_pass(run, slurm, 100.0)
    rows[0]["state"] = "PREEMPTED"
    rows[1]["state"] = "ENDED"
    slurm.write(rows)
    ended(run, rows[1]["job_id"], 0, "yielded", slurm.now)
    run.set_control(max=2)
    slurm.now += 100.0
    return run


def test_the_first_pass(world, run, slurm, request):
    """It submits a master and four workers."""

    def check(_: Point) -> None:
        passes(run, slurm)
        assert slurm.live() == {("master", 0): 1, **{("worker", slot): 1 for slot in range(4)}}

    report(request, try_all(world, lambda: act(run, slurm), check, slurm.edges))


def test_a_pass_that_submits_and_cancels(world, changing, slurm, request):
    def check(_: Point) -> None:
        passes(changing, slurm)
        assert slurm.live() == {("master", 0): 1, ("worker", 1): 1, ("worker", 2): 1}

    tally = try_all(world, lambda: act(changing, slurm), check, slurm.edges)
    report(request, tally)


def test_a_pass_that_gives_up(world, run, slurm, request):
    run.set_control(max=1)  # with others at work it would go on
    for _ in range(run.config().elastic.max_failures - 1):
        fail_worker_0(run, slurm)
        one_pass(run, slurm, 4000.0)
    fail_worker_0(run, slurm)

    def check(_: Point) -> None:
        passes(run, slurm)
        assert run.failed(), [event for event in run.events() if event["kind"] == "end"]
        assert run.failed()["reason"].startswith("worker 0 failed")
        assert slurm.live() == {}

    slurm.now += 4000.0
    report(request, try_all(world, lambda: act(run, slurm), check, slurm.edges))


def fail_worker_0(run: RunDir, slurm: Filed) -> None:
    """Its job ends with a crash; the pass before has submitted it."""
    one_pass(run, slurm, 4000.0)
    rows = slurm.rows()
    for row in rows:
        if row["state"] == "PENDING":
            row |= {"state": "RUNNING", "started_at": slurm.now}
    last = [row for row in rows if parse_job_name(row["name"])[1:] == ("worker", 0)][-1]
    last["state"] = "ENDED"
    slurm.write(rows)
    ended(run, last["job_id"], 0, "failed", slurm.now)


# ---- the making of a run, and its control -------------------------------------------------------


def test_the_making_of_a_run(world, settings, slurm, request):
    """It is there, registered, or its name is free."""
    root, given = world.folder / "runs", clean_environment()

    def check(point: Point) -> None:
        found = rundir.registered()
        for run in found:  # what cron sees is whole
            assert run.config().run.name == "tiny"
            assert (run.control().max, run.environment(), len(run.secret())) == (4, given, 48)
        if not found:
            submission.start(settings, root)
            (run,) = rundir.registered()
        passes(run, slurm)
        assert len(slurm.live()) == 5

    report(request, try_all(world, lambda: submission.start(settings, root), check))


def test_a_change_of_what_is_wanted(world, run, slurm, request):
    """elastic-scale, elastic-stop: the old word or the new one, and a run that obeys it."""

    def change() -> None:
        run.set_control(max=2)
        run.event("scale", max=2)
        run.set_control(state="stopped")
        run.event("stop", now=False)

    def check(_: Point) -> None:
        said = run.control()
        assert (said.state, said.max) in (("running", 4), ("running", 2), ("stopped", 2))
        passes(run, slurm)
        expected = 0 if said.state == "stopped" else said.max + 1
        assert len(slurm.live()) == expected
        change()
        passes(run, slurm)
        assert (run.control().state, run.control().max, len(slurm.live())) == ("stopped", 2, 0)

    report(request, try_all(world, change, check))


# ---- the harness can fail -----------------------------------------------------------------------


def test_a_submission_that_is_not_noted_first_is_found(world, run, slurm, monkeypatch):
    monkeypatch.setattr(_Pass, "_note_unsure", lambda *_: None)
    tally = try_all(world, lambda: act(run, slurm), lambda _: passes(run, slurm), slurm.edges, 2)
    assert len(tally.violations) == 2
    assert all("assert 2 <= 1" in each for each in tally.violations)


def test_a_control_file_written_in_place_is_found(world, run, monkeypatch):
    def write(path: Path, data: bytes, mode: int = 0o644) -> None:
        path.write_bytes(data)

    monkeypatch.setattr(rundir, "write_atomic", write)
    tally = try_all(world, lambda: run.set_control(max=2), lambda _: run.control())
    assert {each.split(" at ")[0] for each in tally.violations} >= {"torn", "killed"}
