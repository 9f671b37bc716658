"""Files that are not there or whole, under kills, races, full disks and lost answers.

    pytest tests/base/test_durable.py
"""

import contextlib
import errno
import itertools
import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.base.durable import (
    append_line,
    create_once,
    in_background,
    make_folder,
    own,
    read_json,
    to_json,
    write_atomic,
)
from elastic.base.errors import ElasticError
from forks import KILLED, at_nth_step, in_children, killed_at


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.json"


def names(path):
    return sorted(each.name for each in path.parent.iterdir())


def fail_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


# ---- replacing ----------------------------------------------------------------------------------


def test_a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it(path):
    write_atomic(path, b"one")
    write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(path) == ["file.json"]


def test_a_writer_killed_at_any_step_leaves_the_old_bytes_or_the_new(path):
    old, seen = b"first", []
    write_atomic(path, old)
    for number in itertools.count(1):
        new = b"%d" % number * 1000
        code = killed_at(number, lambda data=new: write_atomic(path, data) or True)
        assert path.read_bytes() in (old, new)
        seen.append(path.read_bytes() == new)
        old = path.read_bytes()
        if code != KILLED:
            break
    assert seen == sorted(seen)
    assert (len(seen) > 4, seen[0], seen[-1]) == (True, False, True)
    assert all(name == "file.json" or name.startswith(".file.json.") for name in names(path))


@pytest.mark.parametrize("number", range(1, 6))
def test_a_failing_write_is_heard_of_and_leaves_the_old_file_alone(path, number):
    write_atomic(path, b"old")
    patch = at_nth_step(number, fail_with(errno.ENOSPC))
    with contextlib.suppress(OSError):
        write_atomic(path, b"new")
        assert number == 5, "an error before the rename was swallowed"
    patch.undo()
    assert path.read_bytes() == (b"new" if number == 5 else b"old")
    assert names(path) == ["file.json"]


@pytest.mark.parametrize("write", [write_atomic, create_once])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, write):
    wanted = tmp_path / "not-there" / "file.json"
    with pytest.raises(FileNotFoundError) as caught:
        write(wanted, b"{}")
    assert str(caught.value).endswith(f": '{wanted}'")


def test_a_reader_never_sees_half_a_file(path):
    write_atomic(path, to_json({"n": 0, "pad": "x" * 5000}))
    stop = threading.Event()

    def write():
        for n in itertools.count(1):
            if stop.is_set():
                return
            write_atomic(path, to_json({"n": n, "pad": "x" * (n % 7) * 3000}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [read_json(path)["n"] for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)


# ---- once ---------------------------------------------------------------------------------------


def test_of_many_who_make_a_name_one_does_and_its_bytes_stay(path):
    for round_ in range(5):
        target = path.with_name(f"{round_}.json")
        makers = [lambda n=n, t=target: create_once(t, b"%d" % n * 500) for n in range(4)]
        codes = in_children(makers)
        assert sorted(codes) == [0, 1, 1, 1]
        assert target.read_bytes() == b"%d" % codes.index(0) * 500
    assert names(path) == [f"{round_}.json" for round_ in range(5)]


def test_a_name_that_is_taken_stays_as_it_is(path):
    assert create_once(path, b"first")
    assert not create_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert names(path) == ["file.json"]


def test_a_link_that_was_made_counts_whatever_the_answer_was(path, monkeypatch):
    real = os.link

    def link(source, target, error=errno.EIO):
        real(source, target)
        raise OSError(error, "lost")

    monkeypatch.setattr(os, "link", link)
    assert create_once(path, b"mine")
    monkeypatch.setattr(os, "link", lambda a, b: link(a, b, errno.EEXIST))  # the client retried
    assert create_once(path.with_name("other.json"), b"mine")


def test_a_link_that_was_not_made_is_an_error(path, monkeypatch):
    monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    with pytest.raises(OSError, match="not permitted"):
        create_once(path, b"mine")
    assert names(path) == []


def test_a_name_that_is_made_is_made_even_if_the_folder_cannot_be_synced(path, monkeypatch):
    real, synced = os.fsync, []

    def fsync(descriptor):
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if synced[-1]:
            raise OSError(errno.EIO, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert create_once(path, b"mine")
    assert synced == [False, True]


# ---- lines --------------------------------------------------------------------------------------


def test_lines_of_many_processes_stay_whole(path):
    def write(who):
        for n in range(50):
            append_line(path, {"who": who, "n": n, "pad": "x" * (n * 37 % 900)})
        return True

    assert in_children([lambda w=w: write(w) for w in range(3)]) == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for who in range(3):
        assert [line["n"] for line in lines if line["who"] == who] == list(range(50))


def test_a_line_after_a_torn_one_is_whole(path):
    append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "reas')
    append_line(path, {"n": 3})
    append_line(path, {"n": 4})
    assert path.read_bytes() == b'{"n":1}\n{"n": 2, "reas\n{"n":3}\n{"n":4}\n'


def test_lines_are_written_where_files_cannot_be_locked(path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", fail_with(errno.ENOLCK))
    append_line(path, {"n": 1})
    assert path.read_text() == '{"n":1}\n'


HOLD = """
import fcntl, os, signal, sys
with open(sys.argv[1], "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_line_does_not_wait_for_one_who_stands_still_with_the_lock(path):
    command = [sys.executable, "-c", HOLD, str(path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    with holder, ThreadPoolExecutor() as threads:
        try:
            assert holder.stdout.readline() == b"held\n"
            for n in (1, 2):
                threads.submit(append_line, path, {"n": n}).result(20)
        finally:
            holder.kill()
    assert path.read_text() == '{"n":1}\n{"n":2}\n'


# ---- reading ------------------------------------------------------------------------------------


def test_a_table_that_is_not_there_is_none(path):
    assert read_json(path) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b'{"a": 1} x'])
def test_a_damaged_table_is_named_with_the_way_out(path, data):
    path.write_bytes(data)
    with pytest.raises(ElasticError) as caught:
        read_json(path)
    assert str(path) in caught.value.what
    assert caught.value.hint


def test_a_table_survives(path):
    table = {"a": [1, 2.5, None, "é\n"], "b": {"c": True}}
    path.write_bytes(to_json(table))
    assert read_json(path) == table


def test_a_file_is_given_its_mode_once_though_it_stays_empty(path, monkeypatch):
    """That is a write, which a full quota refuses even where nothing changes."""
    path.touch(0o600)
    open(path, "ab", opener=own).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    monkeypatch.setattr(os, "fchmod", fail_with(errno.EDQUOT))
    open(path, "ab", opener=own).close()


# ---- folders ------------------------------------------------------------------------------------


def test_a_folder_in_a_projects_folder_stays_the_projects(tmp_path):
    """Quotas go by groups: a run that lost its project's would be in its user's own quota, which
    is small where projects have theirs."""
    tmp_path.chmod(0o2755)
    make_folder(tmp_path / "runs" / "7b" / "versions", 0o700, parents=True)
    for name, mode in (("runs/7b/versions", 0o2700), ("runs/7b", 0o2755), ("runs", 0o2755)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


# ---- in the background --------------------------------------------------------------------------


def test_what_is_done_in_the_background_comes_or_its_error():
    assert in_background(lambda: 7).result(20) == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(20)
