"""Who waits for a run goes on waiting while nobody answers.

pytest tests/people/test_steering.py
"""

import errno
import itertools
import os
from types import SimpleNamespace

import pytest

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs.history import Job
from elastic.jobs.reconcile import PassReport
from elastic.jobs.sched import Elsewhere
from elastic.people import steering


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


def test_who_waits_for_the_end_hears_of_another_one(run, monkeypatch):
    silent(monkeypatch, 9, lambda: run.mark_failed("no such file"))
    with pytest.raises(ElasticError, match="failed: no such file"):
        steering.wait_for_end(run)
    run.clear_failed()
    silent(monkeypatch, 9, lambda: run.set_control(state="stopped"))
    with pytest.raises(ElasticError, match="was stopped"):
        steering.wait_for_end(run)


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
