"""Who waits for a run goes on waiting while nobody answers; who kills one is told what it costs.

pytest tests/people/test_steering.py
"""

import errno
import itertools
import os
import shutil
from types import SimpleNamespace

import pytest

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.jobs.history import Job
from elastic.jobs.reconcile import PassReport
from elastic.jobs.sched import Elsewhere, end_jobs
from elastic.people import steering
from elastic.run.rundir import RunDir, find, registered
from helpers import commit_of


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(steering, "WAIT_S", 0.0)
    monkeypatch.setattr(durable, "AGAIN_S", ())
    monkeypatch.setattr(steering, "run_pass", lambda *_: PassReport())


def silent(monkeypatch, times: int, then) -> None:
    """So many times the filesystem does not answer; then something has happened."""
    real, count = os.listdir, itertools.count(1)

    def listdir(path):
        if (now := next(count)) <= times:
            raise OSError(errno.EIO, "Input/output error", str(path))
        if now == times + 1:
            then()
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)


def test_who_waits_for_the_end_lives_through_a_silence(run, monkeypatch):
    silent(monkeypatch, 9, lambda: run.mark_done({"reason": "enough"}))
    steering.wait_for_end(run)
    assert run.done()


def test_who_waits_is_told_how_far_the_run_is_and_of_what_if_that_is_known(run):
    assert steering.progress_of(run) == f"run {run.name}: 0 tokens"
    run.commits.link(commit_of(1, tokens=2000, total_tokens=8000))
    assert steering.progress_of(run) == f"run {run.name}: 2k tokens of 8k"


def test_who_waits_for_the_end_hears_of_another_one(run, monkeypatch):
    silent(monkeypatch, 9, lambda: run.mark_failed("no such file"))
    with pytest.raises(ElasticError, match="failed: no such file"):
        steering.wait_for_end(run)
    run.clear_failed()
    silent(monkeypatch, 9, lambda: run.set_control(state="stopped"))
    with pytest.raises(ElasticError, match="was stopped"):
        steering.wait_for_end(run)


def test_a_run_that_was_done_all_the_same_is_done(run):
    """As a pass and elastic-status say."""
    run.mark_failed("no such file")
    run.mark_done({"reason": "enough"})
    run.set_control(state="stopped")
    assert steering.is_done(run)


def test_who_waits_for_the_jobs_to_go_lives_through_a_silence_of_slurm(run, monkeypatch):
    job = Job("1", "worker", 0, "RUNNING", run=run.name)
    answers = iter([[job], TryAgain("squeue: Socket timed out"), [job], TryAgain("again"), []])

    def jobs():
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(steering, "scheduler_of", lambda _: SimpleNamespace(jobs=jobs))
    steering.wait_until_gone(run)
    assert next(answers, None) is None
    answers = iter([Elsewhere("the jobs are on b")])
    with pytest.raises(Elsewhere):
        steering.wait_until_gone(run)


def test_the_jobs_of_a_run_that_is_undone_go_though_slurm_is_silent_for_a_while(run, monkeypatch):
    """The first silence left them in the queue, and their run was removed by nobody."""
    job = Job("1", "worker", 0, "PENDING", run=run.name)
    answers = iter([TryAgain("squeue: Socket timed out"), [job], [job], []])
    cancelled = []

    def jobs():
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def cancel(job_id, kill):
        cancelled.append(job_id)
        raise TryAgain("scancel: Socket timed out")

    monkeypatch.setattr(durable, "STUCK_S", 0.01)
    assert end_jobs(run.name, SimpleNamespace(jobs=jobs, cancel=cancel))
    assert cancelled == ["1", "1"]


def test_a_run_goes_on_where_its_folder_was_moved(run):
    """Its name led to where it had been: neither status nor cron found it."""
    run.set_control(state="stopped")
    there = run.path.parent / "elsewhere" / run.name
    there.parent.mkdir()
    run.path.rename(there)
    assert registered() == []
    steering.scale(find(str(there)), None, None, None)
    [found] = registered()
    assert (found.path, find(run.name).path) == (there, there)


def test_a_copy_of_a_run_does_not_take_its_name(run):
    """Jobs of both would be those of one."""
    run.set_control(state="stopped")
    copy = run.path.parent / "elsewhere" / run.name
    shutil.copytree(run.path, copy)
    with pytest.raises(UsageError, match=f"run name taken: .* is {run.path}"):
        steering.scale(RunDir(copy), None, None, None)
    with pytest.raises(UsageError, match="run name taken"):
        steering.stop(RunDir(copy), now=True)
    with pytest.raises(UsageError, match="no name for a run: 'a b'"):
        steering.scale(RunDir(copy.rename(copy.with_name("a b"))), None, None, None)
    other = copy.with_name("a b").rename(copy.with_name("other"))
    steering.scale(RunDir(other), None, None, None)
    assert sorted(found.name for found in registered()) == ["other", run.name]


def test_a_full_disk_keeps_no_gpus_from_who_kills_a_run(run, monkeypatch):
    """Neither way to stop it did anything."""
    cancelled, jobs = [], [Job("2", "worker", 1, "RUNNING", run=run.name)]
    slurm = SimpleNamespace(jobs=lambda: jobs, cancel=lambda job_id, kill: cancelled.append(job_id))
    monkeypatch.setattr(steering, "scheduler_of", lambda _: slurm)

    def full(*_args, **_how):
        raise OSError(errno.ENOSPC, "No space left on device", "control.json")

    monkeypatch.setattr(RunDir, "set_control", full)
    with pytest.raises(ElasticError, match="No space left on device") as told:
        steering.stop(run, now=False)
    assert ("--now kills its jobs" in told.value.hint, cancelled) == (True, [])
    with pytest.raises(ElasticError, match="not noted, so jobs may come back: .*No space left"):
        steering.stop(run, now=True)
    assert cancelled == ["2"]
