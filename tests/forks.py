"""Real processes for tests, forked and killed: what a `finally` would mend is not mended."""

import contextlib
import itertools
import json
import os
import pwd
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

STEPS = ("link", "rename", "replace", "fsync", "open", "mkdir", "unlink", "rmdir", "fchmod")
KILLED = 9
USER = "games"  # any but this one; from 25.11 on Slurm takes the user `nobody` for no user
NOBODY, GROUP = pwd.getpwnam(USER)[2:4]  # its number, and that of its group, which is another
NO_ID = 0xFFFFFFFF  # of an entry of an ACL


def start_child(action: Callable[[], object]) -> int:
    """Fork; the child's exit code is 0 if `action()` is true, 1 if not, 2 if it raised."""
    child = os.fork()
    if child == 0:
        code = 2
        with contextlib.suppress(BaseException):
            stay_alone()
            code = 0 if action() else 1
        os._exit(code)
    return child


def stay_alone() -> None:
    """In a child: torch's other threads stayed behind, and it would wait for them for ever."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(action: Callable[[], object]) -> int:
    return exit_code(start_child(action))


def in_children(actions: Iterable[Callable[[], object]]) -> list[int]:
    """All at once; their exit codes."""
    return [exit_code(child) for child in [start_child(action) for action in actions]]


def as_nobody(action: Callable[[], object], group: int = NOBODY) -> object:
    """What `action()` returns where another user calls it."""
    reader, writer = os.pipe()

    def act() -> bool:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os.write(writer, json.dumps(action()).encode())
        return True

    child = start_child(act)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    assert exit_code(child) == 0
    return json.loads(said)


def share(folder: Path, group: int = NOBODY) -> None:
    """What `setfacl -d -m g:GROUP:rwx` does: all that is made in the folder is the group's, too."""
    entries = [(0x01, 7, NO_ID), (0x04, 5, NO_ID), (0x08, 7, group), (0x10, 7, NO_ID),
               (0x20, 5, NO_ID)]
    acl = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(folder, "system.posix_acl_default", struct.pack("<I", 2) + acl)


def at_nth_step(number: int, act: Callable[[], None], *more: tuple[object, str]):
    """From now on the `number`th call into the filesystem runs `act` first; .undo() ends that."""
    count, patch = itertools.count(1), pytest.MonkeyPatch()

    def counted(real):
        def call(*args, **kwargs):
            if next(count) == number:
                act()
            return real(*args, **kwargs)

        return call

    for owner, name in [*((os, name) for name in STEPS), *more]:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return patch


def killed_at(number: int, action: Callable[[], object], *more: tuple[object, str]) -> int:
    """Run `action` in a child that is gone before its `number`th call into the filesystem."""
    return in_child(lambda: at_nth_step(number, lambda: os._exit(KILLED), *more) and action())
