"""Versions: the tensors of a committed version, in safetensors files, verified by size
and xxh3.

    versions/000123/params-00.safetensors   bf16 (buffers: float32), by name: what workers pull, and
                                            what `safetensors.torch.load_file` gives anybody else
    versions/000123/outer-00.safetensors    float32 parameters and outer momentum: the master's own
    versions/000123/manifest.json           the layout: which parameter is in which fragment
    commits/000123.json                     made by link(): its existence is the commit

One file per fragment. A version is written and committed as drafts.py says.
"""

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from elastic.base import durable
from elastic.base.errors import ElasticError
from elastic.run.claims import FOLDER, numbers
from elastic.run.records import Commit
from elastic.run.rundir import RunDir
from elastic.saved import drafts
from elastic.saved.codec import as_bytes
from elastic.saved.layout import Layout

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}  # as safetensors calls them


class VersionDraft(drafts.Draft):
    """A version being written."""

    def __init__(self, run: RunDir, version: int, writer: str):
        super().__init__(run.version_path(version), run.commits.path(version), writer)
        self._run, self._version = run, version
        self.discard()

    def write(self, name: str, *parts: bytes | memoryview) -> dict:
        # It may have been swept away, where another writer was first: this one loses later.
        durable.make_folder(self.folder)
        return super().write(name, *parts)

    def write_fragment(
        self, layout: Layout, index: int, params: torch.Tensor, momentum: torch.Tensor
    ) -> list[dict]:
        """Write both files of a fragment (flat, float32); returns their entries for the
        commit."""
        published = params if layout.has_buffers(index) else params.to(torch.bfloat16)
        outer = split(layout, index, params, "param/") | split(layout, index, momentum, "momentum/")
        files = {"params": split(layout, index, published), "outer": outer}
        return [self.write(f"{kind}-{index:02d}.safetensors", *parts_of_file(tensors))
                for kind, tensors in files.items()]

    def commit(self, layout: Layout, files: list[dict], commit: Commit) -> Commit | None:
        """Write the manifest and link the commit, which is to name all files. None if
        another writer was first."""
        manifest = durable.to_json({"version": self._version, "layout": layout.to_json()})
        files = (*files, self.write("manifest.json", manifest))
        commit = replace(commit, writer=self.writer, files=files)
        return commit if self.commit_by(lambda: self._run.commits.link(commit)) else None


def remove_drafts(run: RunDir, version: int) -> None:
    """Settle the versions before this one, and remove the drafts that lost the race for
    them.

    Drafts of later versions stay: their writer may be alive, and just about to link one.
    """
    for folder in (run.path / "versions").glob(".[0-9]*.*"):
        name = re.fullmatch(rf"\.{FOLDER}\..*", folder.name)
        # Without a commit the draft stays: the commit may not be seen here yet.
        if name and int(name[1]) < version and (commit := run.commits.of(int(name[1]))):
            drafts.settle(run.version_path(commit.version), commit.writer)
            drafts.drop(folder)


def read_layout(run: RunDir, version: int) -> Layout:
    manifest = durable.read_json(verified(run, run.commits.known(version), "manifest.json"))
    return Layout.from_json(manifest["layout"])


def read_params(run: RunDir, commit: Commit, layout: Layout, index: int) -> torch.Tensor:
    """The published parameters of a fragment: flat, bf16 (buffers: float32). Raises
    ElasticError if damaged."""
    tensors = _tensors(run, commit, f"params-{index:02d}.safetensors")
    return _flat(layout, index, tensors, "")


def read_exactly(run: RunDir, commit: Commit, layout: Layout, index: int) -> list[torch.Tensor]:
    """A fragment's parameters and outer momentum: flat, float32. Raises ElasticError if
    damaged."""
    tensors = _tensors(run, commit, f"outer-{index:02d}.safetensors")
    return [_flat(layout, index, tensors, prefix) for prefix in ("param/", "momentum/")]


def _tensors(run: RunDir, commit: Commit, name: str) -> dict[str, torch.Tensor]:
    """What a committed file holds. Raises ElasticError, also if it is pruned meanwhile."""
    path = verified(run, commit, name)
    try:
        return durable.insist(_load, path)
    except FileNotFoundError:
        raise ElasticError(f"committed file cannot be read: {path}: it is gone") from None


def _load(path: Path) -> dict[str, torch.Tensor]:
    """safetensors calls every failure of open() a missing file: open it once more to see."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        path.open("rb").close()
        raise OSError(errno.ESTALE, str(error)) from None  # it has passed


def verified(run: RunDir, commit: Commit, name: str) -> Path:
    """The path of a committed file whose size and checksum are right. Raises
    ElasticError; TryAgain if the filesystem does not say."""
    entries = {Path(entry["path"]).name: entry for entry in commit.files}
    if name not in entries:
        raise ElasticError(f"version {commit.version} has no file {name}")
    path = folder_of(run, commit) / name
    if reason := durable.damage(path, entries[name]):
        raise ElasticError(reason, "restore it from a backup")
    return path


def folder_of(run: RunDir, commit: Commit) -> Path:
    """Where the files of a committed version are, or were until they were pruned. Gives
    the folder its name first, if it can."""
    folder = (run.version_path(commit.version), commit.writer)
    with contextlib.suppress(OSError):  # without a name it is read where it is
        drafts.settle(*folder)
    return drafts.place(*folder)


def parts_of_file(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file: the header's length, the header, and each tensor's own memory.

    By hand, because the library's `save` copies the file twice, and lets no other thread
    run meanwhile: a file of 268 MB took 0.53 s for 0.14 s, and others waited for 0.2 s.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": [*tensor.shape],
                        "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from map(as_bytes, tensors.values())


def split(layout: Layout, index: int, flat: torch.Tensor, prefix: str = "") -> dict:
    """Name -> view into a fragment's flat tensor."""
    return {prefix + tensor.name: tensor.of(flat) for tensor in layout.fragments[index]}


def prune(run: RunDir, newest: int, keep: int, keep_every: int) -> None:
    """Remove the tensors of old versions, except the last `keep` and every `keep_every`-th.

    Drafts and deltas that nobody came back for are removed, too. The commit records stay:
    they are the ledger.
    """
    remove_drafts(run, newest - keep + 1)
    versions, deltas = run.path / "versions", run.path / "deltas"
    old = (deltas / f"{base:06d}" for base in numbers(deltas, FOLDER) if base <= newest - keep)
    for left in (*versions.glob(".pruned.*"), *old):
        drafts.drop(left)
    for version in sorted(numbers(versions, FOLDER)):
        is_kept = keep_every and version % keep_every == 0
        if version <= newest - keep and not is_kept:
            drafts.remove(run.version_path(version))


def _flat(layout: Layout, index: int, tensors: dict[str, torch.Tensor], prefix: str):
    return torch.cat([tensors[prefix + t.name].flatten() for t in layout.fragments[index]])
