"""Versions: the tensors of a committed version, in safetensors files, verified by size and xxh3.

    versions/000123/params-00.safetensors   bf16 (buffers: float32), by name: what workers pull, and
                                            what `safetensors.torch.load_file` gives anybody else
    versions/000123/outer-00.safetensors    float32 parameters and outer momentum: the master's own
    versions/000123/manifest.json           the layout: which parameter is in which fragment
    commits/000123.json                     made by link(): its existence is the commit

One file per fragment. A version is written and fsynced in `versions/.000123.WRITER`, then its
commit is linked, then the folder gets its name. Two masters that write the same version never
touch each other's files, one of them gets the link, and a crash before the rename is mended by
whoever reads the commit next (`settle`), which names the writer.
"""

import contextlib
import errno
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from elastic.base import durable
from elastic.base.errors import ElasticError
from elastic.run.rundir import RunDir
from elastic.saved.layout import Layout

# What each commit takes over from the one before.
CARRIED = ("layout", "dataset_samples", "epochs", "total_tokens")


def carried(commit: dict) -> dict:
    return {name: commit[name] for name in CARRIED if name in commit}


class Draft:
    """A version being written; nobody reads it until it is committed."""

    def __init__(self, run: RunDir, version: int, writer: str):
        self.run, self.version, self.writer = run, version, writer
        self.folder = durable.draft_of(run.version_path(version), writer)
        self.discard()

    def write_fragment(
        self, layout: Layout, index: int, params: torch.Tensor, momentum: torch.Tensor
    ) -> list[dict]:
        """Write both files of a fragment (flat, float32); returns their entries for the commit."""
        whole = params if layout.has_buffers(index) else params.to(torch.bfloat16)
        state = {f"param/{name}": part for name, part in split(layout, index, params).items()}
        parts = split(layout, index, momentum)
        state |= {f"momentum/{name}": part for name, part in parts.items()}
        files = {"params": split(layout, index, whole), "outer": state}
        return [self._write(f"{kind}-{index:02d}.safetensors", save(tensors))
                for kind, tensors in files.items()]  # fmt: skip

    def commit(self, layout: Layout, files: list[dict], record: dict) -> bool:
        """Write the manifest and link the commit. False if another writer was first."""
        manifest = durable.to_json({"version": self.version, "layout": layout.to_json()})
        files = [*files, self._write("manifest.json", manifest)]
        durable.sync_path(self.folder)
        durable.sync_path(self.folder.parent)
        record = {"version": self.version, "writer": self.writer, **record, "files": files}
        # A link may be made and its answer lost: the name in the commit decides.
        if self.run.link_commit(record) or self.run.commit(self.version)["writer"] == self.writer:
            with contextlib.suppress(OSError):  # then whoever reads it does it
                settle(self.run, record)
            return True
        self.discard()
        return False

    def discard(self) -> None:
        """Remove it, unless it is committed."""
        durable.discard(self.folder, self.run.commit_path(self.version), self.writer)

    def _write(self, name: str, data: bytes) -> dict:
        path = self.folder / name
        durable.make_folder(path.parent)
        try:
            measured = durable.write_measured(path, [data])
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        final = self.run.version_path(self.version) / name
        return {"path": str(final.relative_to(self.run.path)), **measured}


def settle(run: RunDir, commit: dict) -> None:
    """Give a committed version's folder its name, if its writer did not live to do it."""
    durable.settle(run.version_path(commit["version"]), commit["writer"])


def remove_drafts(run: RunDir, newest: dict) -> None:
    """Settle the newest version and remove what lost the race for those before it.

    Drafts of later versions stay: their writer may be alive, and just about to link one.
    """
    settle(run, newest)
    _remove_drafts_below(run, newest["version"])


def _remove_drafts_below(run: RunDir, version: int) -> None:
    for folder in (run.path / "versions").glob(".[0-9]*.*"):
        number = int(folder.name[1:].partition(".")[0])
        if number < version and (commit := run.commit(number)):  # else it is not seen here yet
            settle(run, commit)
            shutil.rmtree(folder, ignore_errors=True)


def read_layout(run: RunDir, version: int) -> Layout:
    manifest = durable.read_json(verified(run, run.commit(version), "manifest.json"))
    return Layout.from_json(manifest["layout"])


def read_params(run: RunDir, commit: dict, layout: Layout, index: int) -> torch.Tensor:
    """The published parameters of a fragment: flat, bf16 (buffers: float32). Raises ElasticError
    if damaged."""
    tensors = _tensors(verified(run, commit, f"params-{index:02d}.safetensors"))
    return _flat(layout, index, tensors, "")


def read_exactly(run: RunDir, commit: dict, layout: Layout, index: int) -> list[torch.Tensor]:
    """A fragment's parameters and outer momentum: flat, float32. Raises ElasticError if damaged."""
    tensors = _tensors(verified(run, commit, f"outer-{index:02d}.safetensors"))
    return [_flat(layout, index, tensors, prefix) for prefix in ("param/", "momentum/")]


def verified(run: RunDir, commit: dict, name: str) -> Path:
    """The path of a committed file whose size and checksum are right. Raises ElasticError."""
    entries = {Path(entry["path"]).name: entry for entry in commit["files"]}
    if name not in entries:
        raise ElasticError(f"version {commit['version']} has no file {name}")
    path = run.path / entries[name]["path"]
    settle(run, commit)
    if reason := durable.damage(path, entries[name]):
        raise ElasticError(reason, "restore it from a backup")
    return path


def split(layout: Layout, index: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> view into a fragment's flat tensor."""
    tensors = layout.fragments[index]
    return {t.name: flat[t.start : t.start + t.numel].view(t.shape) for t in tensors}


def prune(run: RunDir, newest: int, keep: int, keep_every: int) -> list[int]:
    """Remove the tensors of versions that are neither among the last `keep` nor an Mth one.

    With them go drafts and deltas that nobody came back for. The commit records stay: they are the
    ledger. Returns the versions removed.
    """
    removed = []
    _remove_drafts_below(run, newest - keep + 1)
    versions, deltas = run.path / "versions", (run.path / "deltas").glob("[0-9]*")
    old = (folder for folder in deltas if int(folder.name) <= newest - keep)
    for left in (*versions.glob(".pruned.*"), *old):
        shutil.rmtree(left, ignore_errors=True)
    for folder in sorted(versions.glob("[0-9]*")):
        version = int(folder.name)
        if version > newest - keep or (keep_every and version % keep_every == 0):
            continue
        durable.remove(folder)
        removed.append(version)
    return removed


def save_tensors(tensors: dict, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk is an OSError here as everywhere else."""
    try:
        save_file(tensors, path, metadata)
        path.chmod(0o644)
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        raise OSError(int(told[1]) if told else errno.EIO, str(error), str(path)) from None


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return durable.insist(load_file, path)


def _flat(layout: Layout, index: int, tensors: dict[str, torch.Tensor], prefix: str):
    return torch.cat([tensors[prefix + t.name].flatten() for t in layout.fragments[index]])
