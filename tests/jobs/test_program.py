"""How the programs of jobs end when an error ends them.

pytest tests/jobs/test_program.py
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.signals import Notice
from elastic.jobs import program
from elastic.jobs.history import MASTER, TRAINER, WORKER, end_of_error
from elastic.local.worker.agent import Agent
from helpers import PATIENCE, ROOT, environment
from running import kill_all, running

SILENT = TryAgain("no answer", "wait a bit")


@pytest.mark.parametrize(("error", "role", "has_notice", "outcome"), [
    (SILENT, WORKER, False, "killed"),
    (SILENT, TRAINER, False, "killed"),
    (SILENT, MASTER, False, "failed"),  # a site's Redis may be of no use for ever
    (SILENT, WORKER, True, "yielded"),
    (SILENT, MASTER, True, "yielded"),
    (ElasticError("no answer", "wait a bit"), WORKER, False, "failed"),
])
def test_what_does_not_answer_is_no_crash_of_the_users_program(error, role, has_notice, outcome):
    end = end_of_error(error, role, has_notice)
    assert (end.outcome, end.reason, end.detail) == (outcome, "no answer", "wait a bit")


@pytest.fixture
def ended(home, make_run):
    """ended(program, mode, setting…, **environment) -> its record, its exit status, its words."""

    def run_it(program: str, mode: str, *settings: str, **extra: str) -> tuple[dict, int, str]:
        run = make_run(*settings)
        run.set_control(mode=mode)
        command = [ROOT / "bin" / "elastic", program, run.path, *(["0"] * (program == "agent"))]
        env = environment(home, ELASTIC_JOB_ID="7", **extra)
        done = subprocess.run(command, env=env, capture_output=True, text=True,
                              timeout=60 * PATIENCE)
        return run.jobs.ending("7"), done.returncode, done.stdout + done.stderr

    yield run_it
    kill_all(home)  # what the last pass of a launcher has started


@pytest.mark.parametrize(("program", "mode"), [("agent", "local"), ("launch", "sync")])
def test_an_error_that_nobody_foresaw_is_in_the_record_with_its_traceback(ended, program, mode):
    record, code, said = ended(program, mode, 'run.command=["true"]', "run.folder=/no/such/folder")
    assert (record["state"], record["outcome"], record["code"], code) == ("ended", "failed", 1, 1)
    assert record["reason"].startswith("FileNotFoundError: ")
    assert record["detail"] in said
    assert "Traceback (most recent call last)" in record["detail"]


def test_an_error_that_is_known_is_in_the_record_with_its_way_out(ended):
    record, code, said = ended("master", "local", "redis.server=/no/such/server")
    assert (record["state"], record["outcome"], record["code"], code) == ("ended", "failed", 1, 1)
    assert "/no/such/server" in record["reason"]
    assert record["detail"]
    assert record["detail"] in said
    assert "Traceback" not in said


def test_a_launcher_that_slurm_does_not_answer_counts_as_killed(ended, tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
           "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    record, code, said = ended("launch", "sync", **job)
    assert (record["state"], record["outcome"], record["code"], code) == ("ended", "killed", 75, 75)
    assert record["reason"] == "scontrol failed: Unable to contact"
    assert "is slurmctld up" in record["detail"]
    assert "Traceback" not in said


def test_an_agent_outlives_a_moments_silence_of_the_filesystem(run, monkeypatch):
    monkeypatch.setattr(durable, "AGAIN_S", ())
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    run.set_control(state="stopped")
    real, tries = os.listdir, iter(range(3))

    def silent(folder):
        if Path(folder) == run.path and next(tries, None) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(folder)

    monkeypatch.setattr(os, "listdir", silent)
    agent = Agent(run, 0, Notice())
    assert agent.main() == 93
    assert next(tries, None) is None
    assert run.jobs.ending(agent.program.job_id)["outcome"] == "stopped"


@pytest.mark.parametrize(("sharers", "environment", "said"), [
    (1, {}, None),  # all cores are for one: torch knows best
    (2, {}, "3"),
    (4, {}, "1"),
    (9, {}, "1"),
    (2, {"OMP_NUM_THREADS": "5"}, "5"),  # the user's word
    (2, {"OMP_NUM_THREADS": ""}, "3"),
    (1, {"SLURM_JOB_CPUS_PER_NODE": "8,4(x2),16"}, "4"),  # where a site confines no job
    (2, {"SLURM_JOB_CPUS_PER_NODE": "8,4(x2),16"}, "2"),
    (2, {"SLURM_JOB_CPUS_PER_NODE": "64"}, "3"),
])
def test_processes_that_share_cores_have_equal_parts_of_them(
    monkeypatch, capfd, sharers: int, environment: dict, said: str | None
):
    """Else each has a thread for every core, and threads that wait keep cores from the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    for name in ("OMP_NUM_THREADS", "SLURM_JOB_CPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"]
    assert program.start_rank(command, {}, None, sharers).wait(PATIENCE) == 0
    assert capfd.readouterr().out.split() == [str(said)]


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_all_jobs_of_a_machine_share_its_cores(tmp_path, monkeypatch, mode: str):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (said := tmp_path / "threads").touch()
    command = ["sh", "-c", f"echo part $OMP_NUM_THREADS >> {said}; exec sleep 60"]
    settings = {"run.mode": mode, "run.command": command, "elastic.min": 2, "elastic.max": 2}
    with running(tmp_path, settings) as run:
        run.until(lambda: said.read_text().count("\n") == 2, 30, "the words of both")
    cores = len(os.sched_getaffinity(0))
    assert {*said.read_text().splitlines()} == {f"part {cores // 2}" if cores > 1 else "part"}
