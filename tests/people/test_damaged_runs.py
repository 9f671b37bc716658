"""Odd files in a run's folder: what is said of it, and that the others go on.

pytest tests/people/test_damaged_runs.py
"""

import json
import os
import time

import pytest
from click.testing import CliRunner

from elastic.base.errors import Exit
from elastic.commands import main
from elastic.jobs import reconcile
from elastic.jobs.sched_local import LocalScheduler
from elastic.run.rundir import Control, RunDir

FILES = ["control.json", "endpoint.json", "failed.json", "newest.json", "commits/000000.json",
         "exit/4711.json", "events.jsonl", "metrics.jsonl", "run.toml"]  # fmt: skip
DEEP = "[" * 100_000
CONTENTS = ["", "null", "{}", "[]", DEEP, "{\"version\": \"x\", \"kind\": 1}", "{\"time\": NaN}",
            None]  # fmt: skip
COMMANDS = ["status", "status --json", "reconcile --dry-run", "audit", "audit --files", "logs",
            "report", "metrics", "evaluate", "chaos --for 1s", "scale --max 2", "stop"]  # fmt: skip


@pytest.fixture
def runs(tmp_path, make_config, monkeypatch) -> list[RunDir]:
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalScheduler, "submit", lambda *_: "4712")  # else scale starts a run
    control = Control("local", "stopped", 1, 1)
    return [RunDir.create(tmp_path / "runs", make_config(name=name), control, {})
            for name in ("odd", "sound")]  # fmt: skip


def test_more_names_than_are_known_are_a_later_versions(runs):
    path = runs[0].path / "control.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "x"}))
    assert runs[0].control() == runs[1].control()


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("name", FILES)
def test_an_odd_file_is_said_and_the_other_run_goes_on(runs, name: str, content: str | None):
    path = runs[0].path / name
    path.unlink(missing_ok=True)
    path.mkdir() if content is None else path.write_text(content)
    report = reconcile.run_pass(runs, time.time())
    assert os.path.exists(runs[1].path / reconcile.LOCK)
    assert not [line for line in report.errors if "fault of Elastic" in line or "sound" in line]
    assert not report.errors or name in report.errors[0]
    for command in COMMANDS:
        first, *rest = command.split()
        done = CliRunner().invoke(main.elastic, [first, "odd", *rest])
        assert isinstance(done.exception, SystemExit | None), (command, done.exception)
        assert "Traceback" not in done.output, command
    done = CliRunner().invoke(main.elastic, ["status"])
    assert (done.exit_code, "sound" in done.output) == (Exit.OK, True), done.output
