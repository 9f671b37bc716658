"""What status asks of others, and what it does not: a table of many runs must cost little."""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs.history import Job
from elastic.jobs.sched import Elsewhere
from elastic.people import status
from elastic.people.metrics import prometheus
from elastic.run import rundir
from elastic.run.rundir import Control, Endpoint, RunDir
from elastic.run.wording import unit
from helpers import ROOT, commit_of, delta_of


@contextlib.contextmanager
def hanging_up(came: list) -> Iterator[Endpoint]:
    """A server that counts who comes, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, address = server.accept()
                    came.append(address)
                    line.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint("127.0.0.1", server.getsockname()[1], 1)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def runs(tmp_path, make_config, monkeypatch) -> list[RunDir]:
    """As many as are asked, and one more; each with a worker's job that runs and one that waits."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    names = [f"run{number}" for number in range(status.ASKED + 1)]
    control = Control("local", "running", 1, 4)
    made = [RunDir.create(tmp_path / "runs", make_config(name=name), control, {}) for name in names]
    jobs = [Job(f"{run.name}.{slot}", "worker", slot, state, node="n1", run=run.name)
            for run in made for slot, state in enumerate(["RUNNING", "PENDING"])]
    scheduler = SimpleNamespace(jobs=lambda _within_s: jobs)
    monkeypatch.setattr(status, "open_scheduler", lambda *_: scheduler)
    return made


OPENED: list[str] = []  # files, as long as somebody looks
LOOKS: list[bool] = []


def note(event: str, arguments: tuple) -> None:
    if LOOKS and event == "open":
        OPENED.append(str(arguments[0]))


sys.addaudithook(note)  # there is no way to remove one


@contextlib.contextmanager
def reads_of(run: RunDir) -> Iterator[Counter]:
    """How often each file of a run is opened meanwhile, by its path in the run."""
    reads: Counter = Counter()
    LOOKS.append(True)
    try:
        yield reads
    finally:
        LOOKS.clear()
        inside = [path for path in OPENED if path.startswith(f"{run.path}/")]
        reads.update(str(Path(path).relative_to(run.path)) for path in inside)
        OPENED.clear()


def lived(run: RunDir) -> RunDir:
    """A run with something in each of its files."""
    for version in range(4):
        told = {"tokens": 10 * version, "total_tokens": 99, "loss": 2.0}
        run.commits.link(commit_of(version, time=time.time(), **told))
    for slot in range(2):
        who = {"role": "worker", "slot": slot, "attempt": 1, "node": "n1"}
        run.jobs.write_ending(f"{run.name}.{slot}", {"state": "started", **who})
        run.event("start", job_id=f"{run.name}.{slot}", **who)
    run.jobs.write_progress({"time": 1.0, "job_id": "1", "base_version": 9, "tokens": 40})
    (run.path / "reconcile.json").write_text('{"memory": {}}')
    return RunDir(run.path)  # it has read nothing yet


@pytest.mark.parametrize("is_row", [False, True])
def test_a_look_reads_each_file_of_a_run_once(runs, is_row: bool):
    """A later answer to the same question could be another one, and makes no sense beside it."""
    run = lived(runs[0])
    with reads_of(run) as reads:
        status.observe_all([run, runs[1]] if is_row else [run], is_row)
    assert {name: count for name, count in reads.items() if count > 1} == {}
    always = {"run.toml", "control.json", "environment.json", "newest.json", "progress.json",
              "commits/000003.json"}
    whole = {"events.jsonl", "reconcile.json", "exit/run0.0.json", "commits/000000.json",
             "commits/000001.json", "commits/000002.json"}
    wanted = always if is_row else always | whole
    assert {name for name in reads if reads[name]} >= wanted
    assert not is_row or not {"events.jsonl", "reconcile.json"} & {*reads}


def test_what_the_next_pass_would_do_is_what_it_does(runs):
    run = runs[0]
    foreseen = status.observe(run, status.Listing())["next"]
    why = "no job is there"
    assert foreseen.startswith(f"submit master 0 ({why}); submit worker 0 ({why})")
    assert foreseen.endswith("; 2 more")
    assert status.observe(run, status.Listing(trouble="silent"))["next"] == (
        "nothing, until the scheduler answers")
    run.set_control(state="stopped")
    stopped = status.observe(run, status.Listing())
    to_go_on = f"nothing, until elastic-scale {run.name}"
    assert (stopped["state"], stopped["next"]) == ("stopped", to_go_on)
    assert stopped["summary"].endswith(f"; next: {to_go_on}")


@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize(
    ("silence", "said"),
    [(TryAgain("squeue gave no answer", "later"),
      "the scheduler does not answer: squeue gave no answer"),
     (Elsewhere("this is cluster a, and the run's jobs are on b", "ask there"),
      "this is cluster a, and the run's jobs are on b: ask there")],
)
def test_where_nobody_can_list_the_jobs_nobody_says_that_there_is_none(
    runs, monkeypatch, silence, said, is_row: bool
):
    """A run that trains is not to look idle, nor a dashboard to count no GPU."""
    trains = runs[0]
    trains.set_control(mode="sync")
    now, saved = time.time(), {"step": 40, "writer": "attempt1", "files": []}
    saved["extra"] = {"base_version": 0, "tokens": 400, "loss": 2.5, "samples": [], "deltas": []}
    path = trains.path / "checkpoints" / "step-00000040.json"
    told = {"base_version": 0, "step": 45, "tokens": 450, "total_tokens": 999, "loss": 2.0,
            "tokens_per_s": 7.0, "time": now, "world": 2, "attempt": 1, "cadence": "",
            "job_id": f"{trains.name}.0"}
    trains.jobs.write_progress(told)

    def silent(_within_s: float) -> list[Job]:
        raise silence

    monkeypatch.setattr(status, "open_scheduler", lambda *_: SimpleNamespace(jobs=silent))
    for saved_ago_s, step in ((60, 45), (-60, 40)):  # the newer one counts
        path.write_text(json.dumps(saved | {"time": now - saved_ago_s}))
        found = status.observe_all(runs, is_row)
        assert {(seen["state"], seen["gpus"]) for seen in found} == {("unknown", None)}
        assert all("no worker" not in seen["reason"] for seen in found)
        assert all(said in seen["reason"] for seen in found)
        assert (found[0]["version"], found[0]["tokens"]) == (step, 10 * step)
        if not is_row:
            assert found[0]["summary"].startswith(f"unknown: {said}")
            assert "elastic_gpus{" not in prometheus(found)


def test_of_many_runs_that_live_some_are_asked_and_of_the_others_jobs_are_counted(runs):
    """Each silent one takes its time; those that are over are no reason to ask none."""
    came = []
    with hanging_up(came) as endpoint:
        for run in runs:
            run.set_endpoint(endpoint)
        *some, last = status.observe_all(runs, are_rows=True)
        assert len(came) >= len(some)
        runs[0].mark_done({"version": 1, "tokens": 1, "time": 0.0})
        done, *others = status.observe_all(runs, are_rows=True)
    assert (last["run"], len(last["workers"]), last["asked"]) == (runs[-1].name, 1, False)
    assert last["reason"] == "1 job waits (PENDING)"
    assert done["state"] == "done"
    assert all(row["asked"] and "not reachable" in row["reason"] for row in (*some, *others))


@pytest.mark.parametrize("is_row", [False, True])
def test_of_a_run_that_is_over_no_redis_is_asked(runs, monkeypatch, is_row: bool):
    """In a table, each would cost the seconds for which a silent one is waited for."""
    done, failed, stopped, leaving = runs[:4]
    done.mark_done({"reason": "nothing is left to train"})
    failed.mark_failed("no such file")
    stopped.set_control(state="stopped")
    leaving.set_control(state="stopped")
    job = Job("1", "worker", 0, "RUNNING", node="n1", run=leaving.name)
    scheduler = SimpleNamespace(jobs=lambda _within_s: [job])

    def silent(_within_s: float) -> list[Job]:
        raise TryAgain("squeue gave no answer")

    monkeypatch.setattr(status, "open_scheduler", lambda *_: scheduler)
    came = []
    with hanging_up(came) as endpoint:
        for run in runs[:4]:
            run.set_endpoint(endpoint)
        rows = status.observe_all(runs[:3], is_row)
        assert [row["state"] for row in rows] == ["done", "failed", "stopped"]
        assert (came, any(row["asked"] for row in rows)) == ([], False)
        status.observe_all([leaving, done], is_row)
        assert came
        came.clear()
        scheduler.jobs = silent  # who knows who is there
        status.observe_all([stopped], is_row)
        assert came


def test_where_there_is_no_slurm_a_run_is_not_said_to_be_damaged(runs, monkeypatch):
    """A host for transfers, or a cron without Slurm on PATH."""

    def missing(_within_s: float) -> list[Job]:
        raise ElasticError("Command not found: squeue", "is PATH right?")

    monkeypatch.setattr(status, "open_scheduler", lambda *_: SimpleNamespace(jobs=missing))
    runs[0].mark_done({"reason": "nothing is left to train"})
    rows = status.observe_all(runs[:2])
    assert [row["state"] for row in rows] == ["done", "unknown"]
    assert "Command not found: squeue" in rows[1]["reason"]


def test_a_run_that_no_pass_has_looked_at_for_minutes_says_so(runs):
    assert "no pass" not in status.observe_all(runs)[0]["reason"]  # it was just made
    lock = runs[0].path / "reconcile.lock"
    lock.touch()
    assert "no pass" not in status.observe_all(runs)[0]["reason"]
    os.utime(lock, (0, time.time() - 310))  # scrontab's pass is on its way
    assert "no pass" not in status.observe_all(runs)[0]["reason"]
    os.utime(lock, (0, time.time() - 400))
    said = "no pass since 6 min: is elastic-reconcile in your crontab?"
    assert said in status.observe_all(runs)[0]["reason"]


def test_a_run_counts_samples_where_its_task_counts_no_tokens():
    delta = delta_of(tokens=30, samples=((0, 0, 20), (1, 40, 50)))  # epoch, from, to
    assert unit([delta]) == "samples"
    assert unit([replace(delta, tokens=30 * 128)]) == "tokens"
    assert unit([], {"tokens": 50, "samples": [40, 50]}) == "samples"
    assert unit([], {"tokens": 6400, "samples": [40, 50]}) == unit([]) == "tokens"


@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize("said", [37, 45])
def test_where_no_trainer_works_the_newest_checkpoint_is_what_there_is(runs, is_row, said: int):
    """After a notice a step was saved that was told no more; of a kill, told and then lost."""
    run = runs[0]
    run.set_control(mode="sync")
    extra = {"base_version": 0, "tokens": 400, "loss": 2.5, "samples": [], "deltas": []}
    saved = {"step": 40, "writer": "attempt1", "extra": extra, "files": []}
    (run.path / "checkpoints" / "step-00000040.json").write_text(json.dumps(saved))
    told = {"base_version": 0, "step": said, "tokens": 10 * said, "total_tokens": 999,
            "loss": 3.0, "tokens_per_s": 7.0, "time": time.time(), "world": 1, "attempt": 1,
            "cadence": "", "job_id": f"{run.name}.0"}
    for job_id, step, tokens, loss in (("x", 40, 400, 2.5), (told["job_id"], said, 10 * said, 3)):
        run.jobs.write_progress(told | {"job_id": job_id})
        seen = status.observe_all(runs[:2], is_row)[0]
        assert (seen["version"], seen["tokens"], seen["loss"]) == (step, tokens, loss)
        assert is_row or seen["tokens_goal"] == 999


def test_the_speed_is_not_that_of_a_night_for_which_the_run_was_stopped(runs, monkeypatch):
    run, now = runs[0], time.time()
    monkeypatch.setattr(status.time, "time", lambda: now)
    who = {"role": "worker", "slot": 0, "attempt": 1, "node": "n1"}
    run.jobs.write_ending(f"{run.name}.0", {"state": "started", **who})
    for version, ago_s in enumerate((36_030, 36_000, 20, 10)):
        run.commits.link(commit_of(version, time=now - ago_s, tokens=1000 * version, loss=2.0))
    (run.path / "reconcile.json").write_text(json.dumps({"memory": {"born": now - 60}}))
    assert status.observe_all(runs[:1])[0]["tokens_per_s"] == pytest.approx(1000 / 20)


def test_the_speed_is_not_that_of_the_sync_mode_before(runs, monkeypatch):
    """Version 1 holds all that the trainers of a week have done, seconds after version 0."""
    run, now = runs[0], time.time()
    monkeypatch.setattr(status.time, "time", lambda: now)
    who = {"role": "worker", "slot": 0, "attempt": 1, "node": "n1"}
    run.jobs.write_ending(f"{run.name}.0", {"state": "started", **who})
    (run.path / "reconcile.json").write_text(json.dumps({"memory": {"born": now - 60}}))
    for version, (ago_s, tokens, step) in enumerate([(32, 0, None), (30, 10**9, 5000)]):
        run.commits.link(commit_of(version, time=now - ago_s, tokens=tokens, loss=2.0, step=step))
    assert status.observe_all(runs[:1])[0]["tokens_per_s"] is None
    run.commits.link(commit_of(2, time=now - 10, tokens=10**9 + 600, loss=2.0))
    assert status.observe_all(runs[:1])[0]["tokens_per_s"] == pytest.approx(600 / 30)


@pytest.mark.parametrize("is_row", [False, True])
def test_a_trainer_that_stands_still_is_not_said_to_train(runs, is_row: bool):
    run, ago_s = runs[0], 150.0
    run.set_control(mode="sync")
    told = {"base_version": 0, "step": 45, "tokens": 450, "total_tokens": 999, "loss": 2.0,
            "tokens_per_s": 7.0, "time": time.time() - ago_s, "world": 2, "attempt": 1,
            "cadence": "every 9 s", "job_id": f"{run.name}.0"}
    for step_s, said, gpus, state, why in (
        (0.1, "training", 0, "stalled", "no step since 2 min"),
        (100.0, "training", 2, "training", "every 9 s"),
        (0.1, "validating", 2, "validating", "every 9 s"),
    ):
        run.jobs.write_progress(told | {"seconds": step_s, "state": said})
        seen = status.observe_all(runs[:2], is_row)[0]
        assert {rank["state"] for rank in seen["workers"]} == {state}
        assert (seen["state"], seen["gpus"]) == ("running", gpus)
        assert (bool(seen["tokens_per_s"]), why in seen["reason"]) == (gpus > 0, True)
        assert "beat" not in seen["reason"]
        words = "training on 2" if gpus else "standing still, with 0"
        begins = f"{words} of 1..4 GPUs, step 45, loss 2.00"
        assert is_row or seen["summary"].startswith(begins)
        assert is_row or ("7 tokens/s" in seen["summary"]) == (gpus > 0)


def test_a_damaged_run_does_not_hide_the_others(runs):
    (runs[0].path / "run.toml").write_text("no toml")
    states = [row["state"] for row in status.observe_all(runs, are_rows=True)]
    assert states == ["damaged"] + ["waiting"] * status.ASKED
    damaged, other = status.observe_all(runs[:2])
    assert damaged.keys() == other.keys()  # what scripts read


@pytest.mark.parametrize("is_row", [False, True])
def test_a_trainer_before_its_first_step_is_said_to_start(runs, monkeypatch, is_row: bool):
    """Also one that follows another: what that said last are not its own steps."""
    run, job_id = runs[0], "4711"
    run.set_control(mode="sync")
    jobs = [Job(job_id, "trainer", 0, "RUNNING", node="n1", run=run.name)]
    slurm = SimpleNamespace(jobs=lambda _within_s: jobs)
    monkeypatch.setattr(status, "open_scheduler", lambda *_: slurm)
    who = {"role": "trainer", "slot": 0, "attempt": 2, "job_id": job_id, "node": "n1"}
    before = {"base_version": 0, "step": 45, "tokens": 450, "total_tokens": 999, "loss": 2.0,
              "tokens_per_s": 7.0, "time": time.time() - 9, "world": 2, "attempt": 1,
              "cadence": "", "job_id": "earlier"}
    run.jobs.write_ending(job_id, {**who, "state": "training", "gpus": 3})
    for step in (0, 40):
        if step:
            run.jobs.write_progress(before)
            record = {"step": step, "writer": "a", "time": 1.0, "files": [], "world": 2, "extra": {
                "base_version": 0, "tokens": 400, "samples": [], "deltas": []}}
            (run.path / "checkpoints/step-00000040.json").write_text(json.dumps(record))
        seen = status.observe_all(runs[:2], is_row)[0]
        assert (seen["state"], seen["gpus"], seen.get("tokens_per_s")) == ("running", 3, None)
        assert [rank["state"] for rank in seen["workers"]] == ["loading"] * 3
        assert "no worker" not in seen["reason"]
        assert (seen["version"] or 0, seen["tokens"]) == (step, 10 * step)
        assert is_row or seen["summary"].startswith("starting on 3 of 1..4 GPUs")
    # Its own ranks have trained, and start again after a crash.
    run.jobs.write_progress(before | {"job_id": job_id})
    run.jobs.write_ending(job_id, {**who, "state": "training", "gpus": 3, "trouble": "no shard"})
    seen = status.observe_all(runs[:2], is_row)[0]
    assert [rank["state"] for rank in seen["workers"]] == ["loading"] * 3
    assert seen["trouble"] == "starting again after no shard"


def test_a_run_on_a_dead_server_does_not_hide_the_others(runs, monkeypatch):
    for run in runs[:2]:
        control = run.path / "control.json"
        control.unlink()
        os.mkfifo(control)  # who reads it waits for ever
    monkeypatch.setattr(rundir, "LOOK_S", 0.5)
    seen = {each["run"]: each for each in status.observe_all(rundir.registered(), are_rows=True)}
    assert len(seen) == len(runs)
    for run in runs[:2]:
        hung = seen.pop(run.name)
        assert hung["state"] == "unknown"
        assert hung["reason"] == "the filesystem has not answered for 0.5 s"
    assert {each["state"] for each in seen.values()} == {"waiting"}


def test_the_manual_names_every_key_of_the_json(runs):
    manual = (ROOT / "README.md").read_text().partition("`--json` prints everything")[2]
    named = {*re.findall(r"`(\w+)`", manual.partition("\n\n")[0])}
    assert status.observe(runs[0]).keys() <= named
