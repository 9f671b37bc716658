"""What status asks of others, and what it does not: a table of many runs must cost little."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from elastic.jobs.sched import Job, job_name
from elastic.people import status
from elastic.run.rundir import Control, Endpoint, RunDir
from elastic.run.wording import unit


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
    jobs = [Job(f"{run.name}.{slot}", job_name(run.name, "worker", slot), state, node="n1")
            for run in made for slot, state in enumerate(["RUNNING", "PENDING"])]  # fmt: skip
    monkeypatch.setattr(status, "listing", lambda *_: status.Listing(jobs))
    return made


def test_of_many_runs_workers_are_counted_by_jobs_and_no_redis_is_asked(runs):
    came = []
    with hanging_up(came) as endpoint:
        for run in runs:
            run.set_endpoint(endpoint)
        many = status.observe_all(runs, brief=True)
        assert not came
        few = status.observe_all(runs[:-1], brief=True)
        assert len(came) >= len(few)
    assert [(row["run"], len(row["workers"]), row["asked"]) for row in many] == [
        (run.name, 1, False) for run in runs]  # fmt: skip
    assert {row["reason"] for row in many} == {"1 job waits (PENDING)"}
    assert all("not reachable" in row["reason"] for row in few)


def test_a_run_that_no_pass_has_looked_at_for_minutes_says_so(runs):
    assert "no pass" not in status.observe_all(runs)[0]["reason"]  # it was just made
    lock = runs[0].path / "reconcile.lock"
    lock.touch()
    assert "no pass" not in status.observe_all(runs)[0]["reason"]
    os.utime(lock, (0, time.time() - 200))
    said = "no pass since 3 min: is elastic-reconcile in your crontab?"
    assert said in status.observe_all(runs)[0]["reason"]


def test_a_run_counts_samples_where_its_task_counts_no_tokens():
    delta = {"tokens": 30, "samples": [[0, 0, 20], [1, 40, 50]]}  # epoch, from, to
    assert unit({"deltas": [delta]}) == "samples"
    assert unit({"deltas": [{**delta, "tokens": 30 * 128}]}) == "tokens"
    assert unit({"deltas": []}, {"tokens": 50, "samples": [40, 50]}) == "samples"
    assert unit({}, {"tokens": 6400, "samples": [40, 50]}) == unit({}) == "tokens"


def test_a_damaged_run_does_not_hide_the_others(runs):
    (runs[0].path / "run.toml").write_text("no toml")
    states = [row["state"] for row in status.observe_all(runs, brief=True)]
    assert states == ["damaged"] + ["running"] * status.ASKED
