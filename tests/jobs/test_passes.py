"""The passes beside a job: when, how fresh, one at a time. Real processes of a stand-in command.

pytest tests/jobs/test_passes.py
"""

import threading
import time
from pathlib import Path

import pytest

from elastic.jobs import passes
from elastic.jobs.passes import Passes
from helpers import wait_until

NEVER_S = 1000.0


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The list of passes that were started, by their options, and a file that holds them back."""
    script = tmp_path / "bin" / "elastic-reconcile"
    script.parent.mkdir()
    script.write_text(f"""#!/bin/sh
echo "begin $2" >> {tmp_path}/said
while test -e {tmp_path}/hold; do sleep 0.05; done
echo end >> {tmp_path}/said
""")
    script.chmod(0o755)
    (tmp_path / "said").touch()
    monkeypatch.setattr(passes, "elastic_home", lambda: tmp_path)
    return lambda: (tmp_path / "said").read_text().splitlines()


def test_passes_go_on_at_their_pace_and_take_an_answer_that_others_had(run, command):
    beside = Passes(run, 0.4, 0.2)
    wait_until(lambda: len(command()) >= 6, 30, "three passes")
    beside.close()
    assert command()[:4:2] == ["begin --within=0.1", "begin --within=0.2"]


def test_after_a_leave_comes_a_pass_that_asks_itself(run, command, monkeypatch):
    monkeypatch.setattr(passes, "AFTER_LEAVE_S", 0.1)
    beside = Passes(run, NEVER_S, NEVER_S)
    beside.soon()
    wait_until(lambda: command() == ["begin ", "end"], 30, "the pass")
    beside.close()


def test_who_closes_waits_for_the_pass_under_way_and_there_is_no_other(
    run, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(passes, "AFTER_LEAVE_S", 0.0)
    hold, threads = Path(tmp_path / "hold"), threading.active_count()
    hold.touch()
    beside = Passes(run, 0.01, 0.0)
    wait_until(command, 30, "a pass begins")
    beside.soon()
    time.sleep(0.1)  # for a second one to do harm
    assert len(command()) == 1
    hold.unlink()
    beside.close()
    assert command()[-1] == "end"
    assert threading.active_count() == threads  # nobody is left who could begin another


def test_passes_that_are_closed_at_once_never_begin(run, command):
    Passes(run, NEVER_S, NEVER_S).close()
    assert command() == []
