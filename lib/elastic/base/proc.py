"""The processes of this machine, as /proc shows them: which live, to whom they belong,
and how to end them.

A process that is started for something (a job, a node) is marked by a variable
NAME=FOLDER:OWNER in its environment, which its children inherit. A process that has
overwritten its environment, as Redis does, belongs to the owner of its nearest ancestor.
"""

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from signal import SIGABRT, SIGCONT, SIGKILL, SIGSTOP
from typing import NamedTuple

from elastic.base.errors import ElasticError

END_TIMEOUT_S = 10.0
STACKS_S = 5.0  # for processes to print their stacks
POLL_S = 0.02


class Process(NamedTuple):
    """One process; `start` (clock ticks after boot) tells it from a later one with its
    number."""

    pid: int
    parent: int
    start: str

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process `pid` if it lives. A zombie does not live, unless it has threads
        left: they still hold its files and sockets."""
        stat = read(f"/proc/{pid}/stat")
        state, *fields = fields_of(stat) or ["X"]
        is_gone = state == "X" or (state == "Z" and fields[16] == "1")
        return None if is_gone else cls(pid, int(fields[0]), fields[18])


def fields_of(stat: str) -> list[str]:
    """What a line of /proc/PID/stat has after the name, which may hold anything."""
    return stat.rpartition(")")[2].split()


def families(mark: str, folder: Path, job_id: str = "") -> dict[str, set[int]]:
    """All living processes by owner, each with its descendants. `job_id`: only processes
    of this Slurm job, because jobs that a process submits inherit its mark.

    Only this user's processes count: other users may mark theirs as they like.
    """
    numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
    parents = {process.pid: process.parent for process in map(Process.of, numbers) if process}

    def owner(pid: int) -> str:
        if f"\nUid:\t{os.getuid()}\t" not in read(f"/proc/{pid}/status"):
            return ""
        words = read(f"/proc/{pid}/environ").split("\0")
        given = dict(word.split("=", 1) for word in words if "=" in word)
        where, _, name = given.get(mark, "").rpartition(":")
        is_of_job = not job_id or given.get("SLURM_JOB_ID", job_id) == job_id
        return name if is_of_job and where == str(folder) else ""

    owners = {pid: owner(pid) for pid in parents}
    found: dict[str, set[int]] = defaultdict(set)
    for pid in parents:
        ancestor = pid
        while ancestor in parents and not owners[ancestor]:
            ancestor = parents[ancestor]
        if ancestor in parents:
            found[owners[ancestor]].add(pid)
    return found


def kill_all(find: Callable[[], set[int]]) -> None:
    """SIGKILL the processes that `find` returns. They are stopped first, so that none can
    fork and get away. Raises ElasticError if one does not end."""
    deadline = time.monotonic() + END_TIMEOUT_S
    stopped: set[int] = set()
    while more := find() - stopped:
        send(more, SIGSTOP)
        stopped |= more
    send(stopped, SIGKILL)
    while left := list(filter(Process.of, stopped)):
        if time.monotonic() > deadline:
            raise ElasticError(f"cannot kill processes {left}", "are they another user's?")
        time.sleep(POLL_S)


def abort(pids: Iterable[int], meanwhile: Callable[[], object] = lambda: None) -> None:
    """SIGABRT these processes, but for those that ignore it. One after the other, the
    newest first: the stacks that they print would mix where they share a pipe. All are
    stopped before, so that none reacts to the end of another; the caller kills those that
    are left. `meanwhile` is called again and again."""
    asked = sorted(filter(_hears_abort, pids), reverse=True)
    send(asked, SIGSTOP)
    for pid in asked:
        send([pid], SIGABRT)
        send([pid], SIGCONT)
        deadline = time.monotonic() + STACKS_S / len(asked)
        while Process.of(pid) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(POLL_S)


def _hears_abort(pid: int) -> bool:
    ignored = re.search(r"(?m)^SigIgn:\s*(\w+)", read(f"/proc/{pid}/status"))
    return bool(ignored) and not int(ignored[1], 16) >> (SIGABRT - 1) & 1


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to those processes that are still there, and this user's."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def read(path: Path | str) -> str:
    """The file's text; empty if the file is gone, or may not be read."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""
