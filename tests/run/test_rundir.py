"""The run directory: made once, claimed by exactly one, readable whatever died.

    pytest tests/run/test_rundir.py
"""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.run import rundir, sound
from elastic.run.rundir import Control, Endpoint, RunDir, find, registered
from forks import KILLED, in_children, killed_at
from helpers import commit_of

CONTROL = Control("local", "running", 1, 4)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def everything(path):
    return sorted(each.relative_to(path).as_posix() for each in Path(path).rglob("*"))


# ---- making one ---------------------------------------------------------------------------------


def test_a_new_run_has_all_it_needs_and_is_found_by_name(home, make_config):
    config = make_config("elastic.max=4", name="7b")
    made = RunDir.create(home / "runs", config, CONTROL, {"PATH": "/bin", "X": "é"})
    assert made.config() == config
    assert made.control() == CONTROL
    assert made.environment() == {"PATH": "/bin", "X": "é"}
    assert len(made.secret()) >= 32
    assert made.commits.newest() is None
    assert (made.done(), made.failed(), made.endpoint()) == (None, None, None)
    assert (made.masters.newest(), made.slots.latest(3)) == (0, 0)
    assert find("7b").path == made.path == (home / "runs/7b").resolve()


def test_what_is_private_is_readable_by_the_user_alone(run):
    run.set_endpoint(Endpoint("10.0.0.1", 6379, 4))
    for name in ("secret", "environment.json", "endpoint.json"):
        assert mode(run.path / name) == 0o600
    assert run.endpoint() == Endpoint("10.0.0.1", 6379, 4)


def test_two_runs_never_share_a_secret(make_run):
    assert make_run(name="a").secret() != make_run(name="b").secret()


def test_a_name_is_taken_by_a_directory_or_by_a_run_elsewhere(home, make_config, make_run):
    first = make_run(name="7b")
    before = everything(home / "runs")
    with pytest.raises(UsageError, match="run name taken: '7b' is .*/runs/7b"):
        make_run(name="7b")
    with pytest.raises(UsageError, match="run name taken: '7b' is .*/runs/7b"):
        RunDir.create(home / "elsewhere", make_config(name="7b"), CONTROL, {})
    assert everything(home / "runs") == before
    assert not (home / "elsewhere").exists()
    assert find("7b").secret() == first.secret()


def test_a_run_whose_folder_is_removed_is_no_more_and_its_name_is_free(home, make_run):
    shutil.rmtree(make_run(name="7b").path)
    assert registered() == []
    with pytest.raises(UsageError, match="no such run: '7b'"):
        find("7b")
    make_run(name="7b")
    assert [run.name for run in registered()] == ["7b"]


def test_of_many_who_make_the_same_run_one_does_and_it_is_whole(home, make_config):
    for number in range(4):
        config = make_config(name=f"r{number}")

        def create(config=config):
            RunDir.create(home / "runs", config, CONTROL, {})
            return True

        codes = in_children([create] * 4)
        assert sorted(codes) == [0, 2, 2, 2]
        made = find(f"r{number}")
        assert made.config() == config
        assert made.slots.claim(0, {}) == 1


def test_who_comes_second_in_a_race_does_not_remove_the_firsts_run(make_run, monkeypatch):
    first = make_run()
    before = everything(first.path)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # it looked too early
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)
    with pytest.raises(ElasticError):
        make_run()
    monkeypatch.undo()
    assert everything(first.path) == before


def test_who_comes_second_in_a_race_is_told_that_the_name_is_taken(make_run, monkeypatch):
    first, real, looks = make_run(), rundir.place_of, []

    def look_too_early(root, name):
        looks.append(name)
        return real(root, name) if len(looks) > 1 else first.path

    monkeypatch.setattr(rundir, "place_of", look_too_early)
    with pytest.raises(UsageError, match=f"run name taken: {first.name!r}"):
        make_run()


@pytest.fixture
def read_only_root(home):
    """Where nobody may write: not even root may make a folder in /proc."""
    if os.geteuid() == 0:
        return Path("/proc/runs")
    root = home / "read-only"
    root.mkdir(mode=0o500)
    return root


def test_a_root_that_cannot_be_written_is_a_clear_error(home, read_only_root, make_config):
    with pytest.raises(ElasticError, match="cannot make the run directory") as caught:
        RunDir.create(read_only_root, make_config(), CONTROL, {})
    assert str(read_only_root) in caught.value.what
    assert "ELASTIC_RUNS" in caught.value.hint
    assert registered() == []


def test_a_home_that_cannot_be_written_is_named(home, read_only_root, make_config, monkeypatch):
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(read_only_root / "me"))
    with pytest.raises(ElasticError, match=str(read_only_root)) as caught:
        RunDir.create(home / "runs", make_config(), CONTROL, {})
    assert "ELASTIC_HOME_DIR" in caught.value.hint
    assert everything(home / "runs") == []


@pytest.mark.parametrize("file", ["run.toml", "secret", "control.json"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(home, make_run, monkeypatch, file):
    real = rundir.write_atomic

    def write(path, *rest):
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest)

    monkeypatch.setattr(rundir, "write_atomic", write)
    with pytest.raises(ElasticError, match="No space left on device"):
        make_run()
    assert everything(home / "runs") == []
    assert registered() == []
    monkeypatch.undo()
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(home / "registry"))
    monkeypatch.setenv("ELASTIC_SITE", os.devnull)
    assert make_run().control() == CONTROL  # the name is free again


# ---- finding them -------------------------------------------------------------------------------


def test_registered_runs_are_those_whose_directory_is_there(home, make_run):
    runs = [make_run(name=name) for name in ("b", "a", "gone")]
    (home / "runs/gone").rename(home / "moved")
    assert [run.name for run in registered()] == ["a", "b"]
    assert find(str(runs[0].path)).path == runs[0].path
    assert find("a").name == "a"


@pytest.mark.parametrize("name", ["nope", "", "..", "a\0b", "x" * 300, "/", "a/../b", "*", "é\n"])
def test_what_is_no_run_is_an_error_that_lists_the_runs(make_run, name):
    make_run(name="7b")
    make_run(name="125m")
    with pytest.raises(UsageError, match="no such run") as caught:
        find(name)
    assert caught.value.hint == "runs: 125m, 7b"


def test_without_any_run_the_error_says_so(home):
    with pytest.raises(UsageError) as caught:
        find("x")
    assert caught.value.hint == "runs: none"


def test_a_folder_that_is_no_run_says_so(home):
    with pytest.raises(ElasticError, match="not a run directory"):
        RunDir(home).control()


# ---- control ------------------------------------------------------------------------------------


def test_what_the_user_wants_changes_one_thing_at_a_time(run):
    changed = run.set_control(max=9)
    assert (changed.min, changed.max, changed.state) == (1, 9, "running")
    run.set_control(state="stopped")
    assert (run.control().max, run.control().state) == (9, "stopped")


def test_a_change_killed_at_any_step_is_made_or_not_made(run):
    for number in range(1, 9):
        before = run.control()
        code = killed_at(number, lambda n=number: run.set_control(max=10 + n))
        assert run.control().max in (before.max, 10 + number)
    assert code != KILLED


# ---- numbers that only go up --------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_the_latest_number_is_found(run, last):
    folder = run.slots.path(5)
    for number in range(1, last + 1):
        (folder / f"{number:06d}.json").write_text("{}")
    assert run.slots.latest(5) == last
    assert run.slots.claim(5, {"job_id": "17"}) == last + 1
    assert json.loads((folder / f"{last + 1:06d}.json").read_text()) == {
        "job_id": "17", "number": last + 1,
    }


def test_who_waits_asks_for_no_name_that_is_not_there_yet(run, monkeypatch):
    """NFS would remember for a minute that it is not, when another machine has long made it."""
    asked, real = [], durable.insist

    def watched(action, *args):
        try:
            return real(action, *args)
        except FileNotFoundError as error:
            asked.append(error.filename)
            raise

    monkeypatch.setattr(durable, "insist", watched)
    assert (run.endpoint(), run.done(), run.failed(), run.closing()) == (None, None, None, "")
    assert (run.commits.told_version(), run.slots.latest(5), run.masters.newest()) == (-1, 0, 0)
    assert run.offers.left(0) == []
    assert asked == []


def test_a_version_is_told_of_by_a_hint_or_by_the_names(run):
    for version in range(3):
        assert link(run, version)
    assert run.commits.told_version() == 2
    (run.path / "newest.json").write_text('{"version": 1}')  # a master died before it told
    assert (run.commits.told_version(), run.commits.newest_version()) == (1, 2)
    (run.path / "newest.json").unlink()
    assert run.commits.told_version() == 2


def test_processes_that_claim_at_once_get_different_numbers(run):
    def claim(who):
        return all(run.slots.claim(2, {"who": who}) for _ in range(10))

    assert in_children([lambda w=w: claim(w) for w in range(4)]) == [0] * 4
    records = [json.loads(path.read_text()) for path in run.slots.path(2).glob("*.json")]
    assert sorted(record["number"] for record in records) == list(range(1, 41))
    for who in range(4):
        assert sum(record["who"] == who for record in records) == 10
    assert run.slots.latest(2) == 40


def test_a_claim_killed_at_any_step_leaves_no_gap(run):
    for number in range(1, 12):
        code = killed_at(number, lambda: run.slots.claim(0, {}))
    assert code != KILLED
    claimed = run.slots.claim(0, {})
    names = sorted(path.name for path in run.slots.path(0).glob("[0-9]*.json"))
    assert names == [f"{n:06d}.json" for n in range(1, claimed + 1)]


def test_epochs_of_masters_and_attempts_of_slots_are_counted_apart(run):
    assert [run.masters.claim({}), run.masters.claim({}), run.slots.claim(0, {})] == [1, 2, 1]
    assert [run.slots.claim(1, {}), run.slots.claim(0, {})] == [1, 2]
    assert (run.masters.newest(), run.slots.latest(0), run.slots.latest(1)) == (2, 2, 1)


# ---- commits ------------------------------------------------------------------------------------


def link(run, version, **more):
    return run.commits.link(commit_of(version, **more))


def test_a_version_is_committed_once(run):
    assert link(run, 0, writer="a")
    assert not link(run, 0, writer="b")
    assert run.commits.of(0).writer == "a"
    assert run.commits.newest_version() == 0


@pytest.mark.parametrize("hint", [None, "", -1, 0, 3, 4])
def test_the_newest_commit_is_found_from_a_hint_that_may_be_old(run, hint):
    for version in range(5):
        link(run, version)
    if hint is None:
        (run.path / "newest.json").unlink()
    else:
        text = json.dumps({"version": hint}) if hint != "" else ""  # a crash left nothing of it
        (run.path / "newest.json").write_text(text)
    assert run.commits.newest_version() == 4
    assert run.commits.newest().version == 4
    assert [record.version for record in run.commits.all()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("hint", ["", '{"version": 3}'])
def test_a_commit_that_is_gone_is_named_with_the_way_out(run, hint):
    """A site may purge by age: without it, its samples would be trained again."""
    for version in range(4):
        link(run, version)
    (run.path / "newest.json").write_text(hint)
    gone = run.commits.path(1)
    gone.rename(run.path / "kept")
    with pytest.raises(ElasticError, match=f"version 1 is gone: {gone}") as caught:
        list(run.commits.all())
    assert type(caught.value) is ElasticError
    assert "restore it" in caught.value.hint
    assert [each.version for each in run.commits.all(2)] == [2, 3]
    (run.path / "kept").rename(gone)
    assert [each.version for each in run.commits.all(last=2)] == [0, 1, 2]


def test_of_commits_the_newest_and_the_oldest_may_be_gone(run):
    """Then the newest is not none, as that of a new run; it may be that it is not seen here yet."""
    for version in range(3):
        link(run, version)
    (run.path / "newest.json").unlink()
    run.commits.path(0).unlink()
    assert run.commits.newest_version() == 2
    run.commits.tell(2)
    run.commits.path(2).unlink()
    with pytest.raises(TryAgain, match="not seen here yet: .*/000002.json"):
        run.commits.newest()
    with pytest.raises(ElasticError, match="version 0 is gone"):
        next(run.commits.all())


def test_a_commit_that_is_not_seen_here_yet_is_not_gone(run, monkeypatch):
    """A network filesystem may remember for a minute that a name was not there."""
    link(run, 0)
    real, listed = os.listdir, []
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    of = run.commits.of
    monkeypatch.setattr(run.commits, "of", lambda version: of(version) if listed else None)
    assert [commit.version for commit in run.commits.all()] == [0]
    monkeypatch.setattr(run.commits, "of", lambda version: None)
    with pytest.raises(TryAgain, match="not seen here yet"):
        list(run.commits.all())


def test_a_commit_counts_though_the_hint_cannot_be_written(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elastic.run.commits.replace_quickly", full)
    assert link(run, 0)
    assert run.commits.newest_version() == 0


# ---- what became of jobs, and of the run --------------------------------------------------------


def test_a_job_says_that_it_started_and_then_how_it_ended(run):
    assert run.jobs.ending("4711") is None
    who, ended = {"role": "worker", "slot": 0}, {"outcome": "done", "reason": "x"}
    run.jobs.write_ending("4711", {"job_id": "4711", "state": "started", **who})
    run.jobs.write_ending("4712", {"job_id": "4712", "state": "started", **who})
    run.jobs.write_ending("4711", {"job_id": "4711", "state": "ended", **who, **ended})
    (run.path / "exit" / ".4713.json.deadbeef").write_text("{half")  # its writer was killed
    assert run.jobs.ending("4711")["outcome"] == "done"
    assert [record["state"] for record in run.jobs.endings()] == ["ended", "started"]


def test_a_copy_of_an_exit_record_is_no_other_job(run):
    run.jobs.write_ending("7", {"role": "worker", "slot": 3, "state": "started"})
    shutil.copy(run.path / "exit/7.json", run.path / "exit/7 (copy).json")
    assert [record["job_id"] for record in run.jobs.endings()] == ["7"]


def test_a_run_is_done_or_has_failed_until_somebody_clears_it(run):
    run.mark_failed("3 crashes", "Traceback ...")
    assert (run.failed()["reason"], run.failed()["detail"]) == ("3 crashes", "Traceback ...")
    run.clear_failed()
    run.clear_failed()
    assert run.failed() is None
    run.mark_done({"version": 9})
    assert run.done()["version"] == 9
    assert run.events()[-1]["kind"] == "done"


def test_events_come_back_in_order_and_the_last_ones_on_request(run):
    for number in range(5):
        run.event("join", slot=number)
    assert [event["slot"] for event in run.events()] == [0, 1, 2, 3, 4]
    assert [event["slot"] for event in run.events(2)] == [3, 4]
    assert all(event["kind"] == "join" and event["time"] > 1e9 for event in run.events())


def test_a_torn_event_is_left_out_and_the_others_tell(run):
    assert run.events() == []
    run.event("join", slot=1)
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 1790000000, "kind": "le')
    run.event("leave", slot=1)
    assert [event["kind"] for event in run.events()] == ["join", "leave"]


def test_an_event_that_does_not_fit_on_the_disk_stops_nobody(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir, "append_line", full)
    run.event("disk", reason="full")
    monkeypatch.undo()
    assert run.events() == []


def test_each_role_and_slot_has_its_log(run):
    assert run.log_path("worker", 7) == run.path / "logs/worker-0007.log"
    assert run.log_path("master", 0) == run.path / "logs/master.log"
    assert run.shortage(least_bytes=1) == ""
    short = run.shortage(least_bytes=1 << 60)
    assert str(run.path) in short
    assert "1.15e+06 TB are needed: checkpoint.min_free, or a version" in short


def test_an_exit_record_is_read_where_its_folder_lists_it(make_run, monkeypatch):
    """A network filesystem remembers for a minute that a name was not there: a job that had
    ended meanwhile had no word of its own, and counted as crashed."""
    run, read = make_run(), sound.read_json
    run.jobs.write_ending("7", {"role": "worker", "slot": 0, "state": "started"})
    remembered = iter([None, None])
    monkeypatch.setattr(sound, "read_json", lambda path: next(remembered, read(path)))
    assert run.jobs.ending("8") is None
    assert run.jobs.ending("7")["state"] == "started"
