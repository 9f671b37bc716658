"""Odd files in a run's folder: what is said of it, and that the others go on.

pytest tests/people/test_damaged_runs.py
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.base import durable
from elastic.base.environment import registry_dir
from elastic.base.errors import Exit
from elastic.commands import main
from elastic.jobs import reconcile
from elastic.jobs.sched_local import LocalScheduler
from elastic.run.rundir import Control, RunDir
from forks import NOBODY, as_nobody
from helpers import short_folder

FILES = ["control.json", "endpoint.json", "failed.json", "newest.json", "commits/000000.json",
         "exit/4711.json", "events.jsonl", "metrics.jsonl", "run.toml"]
DEEP = "[" * 100_000
CONTENTS = ["", "null", "{}", "[]", DEEP, "{\"version\": \"x\", \"kind\": 1}", "{\"time\": NaN}",
            None]
COMMANDS = ["status", "status --json", "reconcile --dry-run", "audit", "audit --files", "logs",
            "report", "metrics", "evaluate", "chaos --for 1s", "scale --max 2", "stop"]


@pytest.fixture
def runs(tmp_path, make_config, monkeypatch) -> list[RunDir]:
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalScheduler, "submit", lambda *_: "4712")  # else scale starts a run
    control = Control("local", "stopped", 1, 1)
    return [RunDir.create(tmp_path / "runs", make_config(name=name), control, {})
            for name in ("odd", "sound")]


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


# ---- a folder that nobody can look into


def answers(runs: list[RunDir]) -> dict[str, list]:
    """What is said of all runs, and of the odd one: (exit code, words) by command."""
    scrape = runs[1].path.parent / "runs.prom"
    said = {}
    for command in ("status", "reconcile", f"metrics --prometheus {scrape}", "status odd"):
        done = CliRunner().invoke(main.elastic, command.split())
        kept = None if isinstance(done.exception, SystemExit) else repr(done.exception)
        said[command.split(" -")[0]] = [done.exit_code, done.output, kept]
    said["scraped"] = scrape.read_text() if scrape.exists() else ""
    said["passed"] = (runs[1].path / reconcile.LOCK).exists()
    return said


def assert_the_others_are_served(
    said: dict[str, list], why: str, code: int, state: str = "damaged"
) -> None:
    assert said["status"][0] == Exit.OK, said
    words = " ".join(said["status"][1].split())
    assert f"odd {state}" in words
    assert "sound stopped" in words
    assert (said["reconcile"][0], said["passed"]) == (code, True), said
    word = "odd: error: " if code == Exit.ERROR else "nothing done: odd: "
    assert said["reconcile"][1].startswith(word)
    assert why in said["reconcile"][1]
    assert said["metrics"][0] == Exit.OK, said
    states = re.findall(r'elastic_state{run="(.*)",user=.*,state="(.*)"} 1\n', said["scraped"])
    assert states == [("odd", state), ("sound", "stopped")]
    assert 'elastic_tokens{run="odd"' not in said["scraped"]
    assert said["status odd"][0] == code, said
    assert why in said["status odd"][1]


@contextlib.contextmanager
def failing(run: RunDir, number: int) -> Iterator[None]:
    """Whatever is asked of a file of the run fails, as where the server of its disk is gone."""
    places = (str(run.path), f"{registry_dir()}/runs/{run.name}/")

    def wrapped(real):
        def call(path, *args, **kwargs):
            if not isinstance(path, int) and os.fspath(path).startswith(places):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "stat"), (os, "lstat"), (os, "open"), (os, "listdir"),
                            (os, "scandir"), (os, "statvfs"), (io, "open")):
            patch.setattr(owner, name, wrapped(getattr(owner, name)))
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_run_whose_filesystem_fails_does_not_hide_the_others(runs, monkeypatch, number: int):
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    with failing(runs[0], number):
        said = answers(runs)
    assert_the_others_are_served(said, os.strerror(number), Exit.TRY_AGAIN, "unknown")


def test_where_no_filesystem_answers_the_last_numbers_stay(runs, monkeypatch):
    """Nothing is known of any run: an alert on damage, or on 0 tokens, would be false."""
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    scrape = runs[1].path.parent.parent / "runs.prom"
    scrape.write_text("numbers of before\n")
    with failing(runs[0], errno.ESTALE), failing(runs[1], errno.ESTALE):
        for words in (["status"], ["status", "--json"], ["metrics", "--prometheus", str(scrape)]):
            done = CliRunner().invoke(main.elastic, words)
            assert done.exit_code == Exit.TRY_AGAIN, (words, done.output)
    assert scrape.read_text() == "numbers of before\n"


def test_a_home_that_does_not_answer_is_a_reason_to_try_again(runs, monkeypatch):
    real, folder = os.listdir, registry_dir() / "runs"

    def silent(path):
        if Path(path) == folder:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    monkeypatch.setattr(durable, "AGAIN_S", ())
    monkeypatch.setattr(os, "listdir", silent)
    done = CliRunner().invoke(main.elastic, ["status"])
    assert (done.exit_code, str(folder) in done.output) == (Exit.TRY_AGAIN, True), done.output


def test_a_single_run_that_is_damaged_is_told_of_where_nobody_named_it(runs):
    shutil.rmtree(runs[1].path)
    (runs[0].path / "control.json").write_text("[]")
    scrape = runs[1].path.parent / "runs.prom"
    for words in (["status"], ["metrics", "--prometheus", str(scrape)]):
        done = CliRunner().invoke(main.elastic, words)
        assert done.exit_code == Exit.OK, done.output
    assert 'state="damaged"} 1' in scrape.read_text()
    assert "elastic_gpus{" not in scrape.read_text()
    assert CliRunner().invoke(main.elastic, ["status", "odd"]).exit_code == Exit.ERROR


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_run_in_a_folder_that_is_closed_to_its_user_is_a_damaged_one_of_several(make_config):
    configs = [make_config(name=name) for name in ("odd", "sound")]

    def act(folder: Path) -> dict[str, list]:
        os.environ["ELASTIC_HOME_DIR"] = str(folder / "registry")
        control = Control("local", "stopped", 1, 1)
        runs = [RunDir.create(folder / config.run.name, config, control, {}) for config in configs]
        runs[0].path.parent.chmod(0)
        return answers(runs)

    with short_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        said = as_nobody(lambda: act(folder))
    assert_the_others_are_served(said, "Permission denied", Exit.ERROR)
