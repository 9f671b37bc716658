"""The commits of a run: the record of each version, and which is the newest; and what
sync mode has saved on top of one.

`newest.json` is a hint. Names decide: a version is committed once its name is there.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from elastic.base import durable
from elastic.base.durable import create_once, make_folder, read_json, replace_quickly, to_json
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.claims import CHECKPOINT, numbers
from elastic.run.records import Checkpoint, Commit, as_commit, restored
from elastic.run.sound import Part, announced, typed, whole


class Commits(Part):
    """The records; versions.py has the tensors."""

    def path(self, version: int) -> Path:
        return self.run.path / "commits" / f"{version:06d}.json"

    def of(self, version: int) -> Commit | None:
        return read_commit(self.path(version))

    def told_version(self) -> int:
        """Number of the newest commit by the hint `newest.json`, else by the folder's names.

        For those who follow a master. Unlike `newest_version` it never asks for a name that
        is not there yet, which a network filesystem would remember (`durable.names`).
        """
        path = self.run.path / "newest.json"
        with contextlib.suppress(ElasticError):
            if told := whole(path, announced(path), "version"):
                return told["version"]
        return max(numbers(self.run.path / "commits"), default=-1)

    def newest_version(self) -> int:
        """Number of the newest commit, -1 if there is none. The hint may be old: names
        decide."""
        version = self.told_version()
        while durable.exists(self.path(version + 1)):
            version += 1
        return version

    def newest(self) -> Commit | None:
        version = self.newest_version()
        return self.known(version) if version >= 0 else None

    def all(self, first: int = 0, last: int | None = None) -> Iterator[Commit]:
        """The commits of versions `first` to `last` (None: the newest), oldest first.
        Raises ElasticError if one is gone."""
        last = self.newest_version() if last is None else last
        return map(self.known, range(first, last + 1))

    def known(self, version: int) -> Commit:
        """The commit of a version that was committed. Raises TryAgain if this machine does
        not see it yet, and ElasticError if it is gone although later ones are here."""
        path = self.path(version)
        if commit := self.of(version):
            return commit
        there = numbers(path.parent)  # after a listing this machine may see it
        if version not in there and version < max(there, default=-1):
            why = "it says which samples are trained: restore it from a backup"
            raise ElasticError(f"the record of version {version} is gone: {path}", why)
        if commit := self.of(version):
            return commit
        raise TryAgain(f"not seen here yet: {path}")

    def link(self, commit: Commit) -> bool:
        """Commit a version whose files are all durable. False if another master was
        first."""
        with contextlib.suppress(OSError):  # else two workers would make it at once
            make_folder(self.run.path / "deltas" / f"{commit.version:06d}")
        if not create_once(self.path(commit.version), to_json(commit.to_json())):
            return False
        self.tell(commit.version)
        return True

    def tell(self, version: int) -> None:
        """Name the newest commit, for `told_version`."""
        with contextlib.suppress(OSError):  # only a hint: the version is committed
            replace_quickly(self.run.path / "newest.json", to_json({"version": version}))


def read_commit(path: Path) -> Commit | None:
    """What a version's record says. Raises ElasticError if it is damaged."""
    return typed(Commit, path, read_json(path))


def read_checkpoints(run_dir: Path, base: int) -> list[Checkpoint]:
    """The checkpoints of sync mode on top of version `base`, in order, as the version
    after it. One that cannot be read does not count: sync mode skips it, too."""
    found = []
    for step in sorted(numbers(run_dir / "checkpoints", CHECKPOINT)):
        path = run_dir / "checkpoints" / f"step-{step:08d}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):  # pruned
            found.append(restored(Checkpoint, as_commit(json.loads(path.read_text()))))
    return [checkpoint for checkpoint in found if checkpoint.base_version == base]
