"""Deltas as files: RUN/deltas/BASE/SLOT.ATTEMPT.FRAGMENT. Renamed when whole, not fsynced."""

import contextlib
import os
import time

from elastic.durable import AGAIN_S, insist, make_folder, replace_quickly
from elastic.errors import TryAgain
from elastic.rounds import Fragment
from elastic.rundir import RunDir
from elastic.transport import Damaged, checksum, verify


class FileTransport:
    def __init__(self, run: RunDir):
        self._root = run.path / "deltas"

    def put(self, name: str, data: memoryview) -> Fragment:
        path = self._root / name
        make_folder(path.parent)
        # The master may just have pruned the folder: of a base that nothing is merged of any more.
        with contextlib.suppress(FileNotFoundError):
            replace_quickly(path, data)
        return Fragment(len(data), checksum(data))

    def get(self, name: str, fragment: Fragment, into: memoryview) -> None:
        try:
            self._get(name, fragment, into)
        except Damaged:  # by a look at the file, maybe, that this machine had kept
            time.sleep(AGAIN_S[0])
            self._get(name, fragment, into)

    def _get(self, name: str, fragment: Fragment, into: memoryview) -> None:
        try:
            with insist((self._root / name).open, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != fragment.bytes or file.readinto(into) != size:
                    raise Damaged(f"truncated: {name} has {size} of {fragment.bytes} bytes")
        except (OSError, TryAgain) as error:
            raise Damaged(f"unreadable: {name}: {error}") from None
        verify(name, fragment, into)

    def drop(self, parts: list[tuple[str, int]]) -> None:
        for name, _ in parts:  # the folders go with their versions (versions.prune)
            (self._root / name).unlink(missing_ok=True)
