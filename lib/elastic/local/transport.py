"""Transport: how the bytes of deltas get from a worker to the master.

They are files: RUN/deltas/BASE/SLOT.ATTEMPT.FRAGMENT, renamed when whole. The name
follows from the delta's key, so nobody can point the master at a file of their choice.
What is read is checked against the size and checksum in the header. A lost delta costs
its own steps and nothing else, so nothing here is fsynced.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

from elastic.base.durable import AGAIN_S, insist, make_folder, names, naming, replace_quickly
from elastic.local.rounds import Rule, refusal
from elastic.run.ledger import Key
from elastic.run.records import Fragment
from elastic.run.rundir import RunDir


class Damaged(Exception):
    """Bytes of the delta `key` are missing, truncated, altered or of no use; `why` says
    which, and so does str()."""

    def __init__(self, key: Key, rule: Rule, what: str):
        self.key, self.why = key, refusal(rule, what)
        super().__init__(self.why.reason)


class Transport:
    def __init__(self, run: RunDir):
        self._root = run.path / "deltas"

    def put(self, key: Key, index: int, data: memoryview) -> Fragment:
        """Store the bytes of a delta's fragment, replacing what was there."""
        path = self._root / fragment_name(key, index)
        # Its folder is missing if there was no room for that as the version was committed.
        if path.parent.name not in names(self._root):
            make_folder(path.parent)
        # The master may just have pruned the folder, as nothing on that base is merged any more.
        with contextlib.suppress(FileNotFoundError):
            replace_quickly(path, data)
        return Fragment(len(data), xxhash.xxh3_128_hexdigest(data))

    def get(self, key: Key, index: int, fragment: Fragment, into: memoryview) -> None:
        """Fill `into` (of fragment.bytes) with a delta's fragment and verify it. Raises
        Damaged; TryAgain where the filesystem does not say."""
        try:
            self._get(key, index, fragment, into)
        except Damaged:  # perhaps only in an older state of the file that this machine cached
            time.sleep(AGAIN_S[0])
            self._get(key, index, fragment, into)

    def _get(self, key: Key, index: int, fragment: Fragment, into: memoryview) -> None:
        name = fragment_name(key, index)
        try:
            size = insist(_fill, into, self._root / name)
        except OSError as error:
            raise Damaged(key, Rule.UNREADABLE, f"{name}: {error}") from None
        if size != fragment.bytes:
            raise Damaged(key, Rule.TRUNCATED, f"{name} has {size} of {fragment.bytes} bytes")
        xxh3 = xxhash.xxh3_128_hexdigest(into)
        if xxh3 != fragment.xxh3:
            what = f"{name} has xxh3 {xxh3}, its header says {fragment.xxh3}"
            raise Damaged(key, Rule.ALTERED, what)

    def drop(self, unwanted: Iterable[str]) -> None:
        """Remove fragments by name; those that are not there do not matter. Their folders
        are removed with the versions."""
        for name in unwanted:
            (self._root / name).unlink(missing_ok=True)


def _fill(into: memoryview, path: Path) -> int:
    """Read a file that is as long as `into`; its size, or what was read of it."""
    with naming(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return file.readinto(into) if size == len(into) else size


def fragment_name(key: Key, index: int) -> str:
    """The name of a delta's fragment; `key` is (slot, attempt, base)."""
    slot, attempt, base = key
    return f"{base:06d}/{slot:04d}.{attempt}.{index:03d}"
