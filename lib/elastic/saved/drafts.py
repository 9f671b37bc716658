"""Drafts: a folder whose files become true together, by one record.

    versions/.000123.WRITER/   being written; WRITER is one master, or one attempt of one job
    versions/000123/           committed, and whole
    commits/000123.json        the record, made last, by link(): its existence is the commit

Every file is fsynced before the link, and the folder gets its name after it. So two
writers of the same thing never touch each other's files, and one of them gets the link.
A crash between the link and the rename is mended by whoever reads the record next
(`settle`): the record names the writer.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from elastic.base.durable import draft_of, exists, own, read_json, sync_path
from elastic.base.errors import ElasticError, TryAgain


class Draft:
    """A folder being written; nobody reads it until its record is linked."""

    def __init__(self, final: Path, record: Path, writer: str):
        self.final, self.record, self.writer = final, record, writer
        self.folder = draft_of(final, writer)

    def write(self, name: str, *parts: bytes | memoryview) -> dict:
        """Write a file, durably; returns its entry for the record."""
        with Measured(self.folder / name) as file:
            for part in parts:
                file.write(part)
        return self.entry(name, file)

    def entry(self, name: str, file: "Measured") -> dict:
        """What the record says of a file: its path in the run directory, its size and its
        checksum."""
        path = f"{self.final.parent.name}/{self.final.name}/{name}"
        return {"path": path, "bytes": file.size, "xxh3": file.hash.hexdigest()}

    def commit_by(self, link: Callable[[], bool]) -> bool:
        """`link` the record, now that each file is durable. False if another writer was
        first."""
        sync_path(self.folder)
        sync_path(self.folder.parent)
        # A link may be made and the answer lost: the writer that the record names decides.
        if not link() and not self._is_committed():
            self.discard()
            return False
        with contextlib.suppress(OSError, TryAgain):  # whoever reads it next tries again
            settle(self.final, self.writer)
        return True

    def discard(self) -> None:
        """Remove the draft, unless it is committed. If that cannot be told now, it stays."""
        with contextlib.suppress(OSError, ElasticError):
            if not self._is_committed():
                drop(self.folder)

    def _is_committed(self) -> bool:
        return (read_json(self.record) or {}).get("writer") == self.writer


def settle(final: Path, writer: str) -> None:
    """Give a committed folder its name, if its writer did not live to do it."""
    if not exists(final):
        # Another process was faster, or the folder has been removed.
        with contextlib.suppress(FileNotFoundError):
            os.rename(draft_of(final, writer), final)


def place(final: Path, writer: str) -> Path:
    """Where a committed folder is read. A full quota may keep it from getting its name."""
    draft = draft_of(final, writer)
    return draft if not exists(final) and exists(draft) else final


def remove(final: Path) -> None:
    """Remove a folder, its name first: a folder that has its name is always whole."""
    gone = final.with_name(f".pruned.{final.name}")
    drop(gone)  # left by one that was killed
    with contextlib.suppress(OSError):  # another process was faster, or the next call does it
        os.rename(final, gone)
    drop(gone)


def drop(path: Path) -> None:
    """Remove a draft, or a record that was on its way: nobody reads them."""
    if os.path.isfile(path):
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class Measured(io.BufferedWriter):
    """A file that is durable once it is closed. `size` and `hash` are of the bytes as
    they were in memory: a filesystem may lose some, and say so only to this descriptor's
    fsync or close."""

    def __init__(self, path: Path):
        self.size, self.hash = 0, xxhash.xxh3_128()
        super().__init__(open(path, "wb", buffering=0, opener=own))  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        self.size += (size := super().write(data))
        return size

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()
