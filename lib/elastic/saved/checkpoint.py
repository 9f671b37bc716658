"""Checkpoints of the sync mode: model and optimizer, resharded when the number of ranks changes.

    checkpoints/.step-00000100.WRITER/   being written; WRITER is one attempt of one job
    checkpoints/step-00000100/           torch.distributed.checkpoint's files (DCP), and extra.json
    checkpoints/step-00000100.json       made last, by link(): its existence is the commit

The rules are those of versions.py: a draft of one's own, everything fsynced, the link, the rename;
a crash before the rename is mended by whoever reads next (`settle`). Every rank writes, and takes
the checksum of, its own file; rank 0 commits, as DCP's last step: what came of it is the same on
every rank. A step that does not verify is skipped with a reason, and stays until its like is saved
again or newer ones push it out.

DCP's .metadata, and the few values in its files that are no tensors, are pickles. Nothing of a
checkpoint is read before its sizes and checksums are those in the commit record, .metadata from the
very bytes; and no pickle may name anything but DCP's own records and torch's plain values. DCP also
pickles the messages between the ranks of a job; they go through a gloo group of their own, so that
writing in the background never meets a collective of the training.
"""

import contextlib
import functools
import io
import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.rundir import RunDir
from elastic.saved.layout import Tensor
from elastic.train.group import Group

SLOWEST = timedelta(days=1)  # for a write: filesystems get stuck; hangs are found elsewhere
OF_RANK_0 = [".metadata", "extra.json"]
# What .metadata consists of.
RECORDS = {
    "torch": ["Size", *(name for name, it in vars(torch).items() if isinstance(it, torch.dtype))],
    "torch.serialization": ["_get_layout"], f"{dcp.__name__}.filesystem": ["_StorageInfo"],
    "pathlib": ["PosixPath"], "pathlib._local": ["PosixPath"],  # Python 3.13's
    dcp.metadata.__name__: [*dcp.metadata.__all__, "_MEM_FORMAT_ENCODING"],
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was loaded."""

    step: int
    extra: dict  # as it was given to save()
    path: Path
    world: int  # ranks that wrote it


@dataclass
class _Flight:
    """A checkpoint being written."""

    step: int
    writer: "_Writer"
    since: float
    waited_s: float = 0.0  # training, for the copy
    future: Future | None = None


class Checkpoints:
    """The checkpoints of a run, for all ranks of a trainer: every method is called by each of them.

    `save_s`: seconds that the last one took to its commit; `stall_s`: the part of them in which
    training waited. Both are rank 0's, so that all ranks decide the same by them.
    """

    def __init__(self, run: RunDir, group: Group, writer: str, keep: int = 2):
        self.save_s = self.stall_s = 0.0
        self._run, self._group, self._writer, self._keep = run, group, writer, keep
        self._flight: _Flight | None = None
        self._skipped: set[int] = set()
        several = group.world > 1
        ranks = dist.new_group(backend="gloo", timeout=SLOWEST) if several else None
        self._how = {"process_group": ranks, "no_dist": not several}
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def save(self, step: int, model, optimizer, extra: dict) -> None:
        """Write and commit a checkpoint, unless this step has one.

        On a failure every rank raises: OSError if the disk refused. What was committed stays, and
        nothing else does. The end of one that began before is waited for; its failure is not told.
        """
        with contextlib.suppress(OSError, ElasticError):
            self.finish()
        if flight := self._open(step, extra):
            state = _state(model, optimizer)
            self._close(flight, lambda: dcp.save(state, storage_writer=flight.writer, **self._how))

    def begin(self, step: int, model, optimizer, extra: dict) -> None:
        """Copy the state to the host and write it in the background, unless this step has one.

        finish() comes first: if that raises, nothing new has begun.
        """
        self.finish()
        if flight := self._open(step, extra):
            state = _state(model, optimizer)
            flight.future = dcp.async_save(state, storage_writer=flight.writer, **self._how)
            flight.waited_s = time.monotonic() - flight.since
            self._flight = flight

    @property
    def needs_s(self) -> float:
        """How long a save would take from now: what is being written has to be finished first."""
        flight = self._flight
        rest_s = self.save_s - (time.monotonic() - flight.since) if flight else 0.0
        return self.save_s + max(0.0, rest_s)

    def poll(self) -> bool:
        """True once what began is committed. Raises like save()."""
        flight = self._flight
        if flight is None or not self._group.broadcast(flight.future.done()):
            return False
        return self.finish() is not None

    def finish(self) -> int | None:
        """Wait until what began is committed, and return its step, if any. Raises like save()."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        self._close(flight, flight.future.result)
        return flight.step

    def load(self, model, optimizer, base: int = 0) -> tuple[Saved | None, list[str]]:
        """Load the `newest` checkpoint, if any; why each newer one was skipped.

        ElasticError if it is whole and does not fit the model.
        """
        record, reasons = self.newest(base)
        return self._read(record, model, optimizer) if record else None, reasons

    def newest(self, base: int = 0) -> tuple[dict | None, list[str]]:
        """The record of the newest checkpoint on top of version `base` that verifies, if any; why
        each newer one was skipped."""
        with contextlib.suppress(OSError, ElasticError):
            self.finish()
        reasons = []
        for step in self._group.decide(lambda: _on_top_of(self._run, base)):
            record, reason = self._verify(step)
            if not reason:
                return record, reasons
            reasons.append(f"step {step}: {reason}")
            self._skipped.add(step)
        return None, reasons

    # ---- writing

    def _open(self, step: int, extra: dict) -> _Flight | None:
        """A draft, for all ranks at the same time; None if the step is committed."""
        since, committed = time.monotonic(), None
        draft = durable.draft_of(_final_path(self._run, step), self._writer)
        if self._group.leads:
            committed = durable.exists(_record_path(self._run, step)) and step not in self._skipped
            if not committed:
                shutil.rmtree(draft, ignore_errors=True)
                durable.make_folder(draft)
        if self._group.broadcast(committed):
            return None
        commit = functools.partial(self._commit, step, extra)
        return _Flight(step, _Writer(draft, commit), since)

    def _close(self, flight: _Flight, write: Callable[[], object]) -> None:
        """Let the write and the commit end, and raise on every rank what failed on any."""
        since, failure = time.monotonic(), ""
        try:
            write()
        except CheckpointException as error:  # the same on every rank
            failure, errno = _cause(error)
        if self._group.leads and failure:
            record = _record_path(self._run, flight.step)
            durable.discard(flight.writer.path, record, self._writer)
        elif self._group.leads:
            _prune(self._run, flight.step, self._keep, self._skipped)
        now = time.monotonic()
        seconds = self._group.broadcast([now - flight.since, flight.waited_s + now - since])
        if failure:
            what = f"the checkpoint of step {flight.step} was not saved: {failure}"
            if errno:
                raise OSError(errno, what)
            raise ElasticError(what, "the last one that was committed is untouched")
        self.save_s, self.stall_s = seconds

    def _commit(self, step: int, extra: dict, draft: Path, files: list[dict]) -> None:
        """Rank 0: link the record. Another writer of this step may have been first: as good."""
        final = _final_path(self._run, step).relative_to(self._run.path)
        measured = durable.write_measured(draft / "extra.json", [durable.to_json(extra)])
        files.append({"path": "extra.json", **measured})
        record = {
            "step": step, "writer": self._writer, "time": time.time(),
            "world": self._group.world, "extra": extra,
            "files": [{**entry, "path": str(final / entry["path"])} for entry in files],
        }  # fmt: skip
        durable.sync_path(draft)
        durable.sync_path(draft.parent)
        if step in self._skipped:
            _remove(self._run, step)
            self._skipped.discard(step)
        if durable.create_once(_record_path(self._run, step), durable.to_json(record)):
            with contextlib.suppress(OSError):  # then whoever reads it does it
                durable.settle(_final_path(self._run, step), record["writer"])
        else:
            shutil.rmtree(draft, ignore_errors=True)

    # ---- reading

    def _verify(self, step: int) -> tuple[dict, str]:
        """The record, and what is wrong with it or a file, else "". The ranks share the work."""
        record, reason = _read_record(self._run, step) if self._group.leads else (None, "")
        if record:
            with contextlib.suppress(OSError):  # then its files are found missing
                durable.settle(_final_path(self._run, step), record["writer"])
        record, reason = self._group.broadcast([record, reason])
        if not reason:
            own = record["files"][self._group.rank :: self._group.world]
            folder = _final_path(self._run, step)
            reasons = (durable.damage(folder / Path(entry["path"]).name, entry) for entry in own)
            told = self._group.gather(next(filter(None, reasons), ""))
            reason = next(filter(None, told), "")
        return record, reason

    def _read(self, record: dict, model, optimizer) -> Saved:
        path = _final_path(self._run, record["step"])
        optimizer.zero_grad()
        optimizer.state.clear()  # get_state_dict fills it for every parameter, as places to read to
        model_state, optimizer_state = states.get_state_dict(model, optimizer)
        reader = _Reader(path, record)
        held = _prefixes(reader.read_metadata().state_dict_metadata)
        optimizer_state["state"] = {
            name: values for name, values in optimizer_state["state"].items()
            if f"optimizer.state.{name}" in held
        }  # fmt: skip
        _fill({"model": model_state, "optimizer": optimizer_state}, reader, self._how)
        states.set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state,
            options=states.StateDictOptions(strict=False),  # what never trained has no moments
        )  # fmt: skip
        return Saved(record["step"], record["extra"], path, record["world"])


def read_params(run: RunDir, record: dict, tensors: Sequence[Tensor]) -> torch.Tensor:
    """Parameters out of a checkpoint whose `record` came from `newest`: flat, float32."""
    found = {tensor.name: torch.empty(tensor.shape) for tensor in tensors}
    reader = _Reader(_final_path(run, record["step"]), record)
    _fill({"model": found}, reader, {"no_dist": True})
    return torch.cat([values.flatten() for values in found.values()])


def _fill(state: dict, reader: dcp.FileSystemReader, how: dict) -> None:
    try:
        dcp.load(state, storage_reader=reader, planner=_Planner(), **how)
    except CheckpointException as error:
        what = f"the checkpoint {reader.path} cannot be loaded: {_cause(error)[0]}"
        raise ElasticError(what, "is the model still that of the run?") from None


class _Unpickler(pickle.Unpickler):
    """For .metadata: it calls nothing that a record of DCP's does not consist of."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11 writes an Enum's member
            return lambda kind, member: kind[member]
        if name in RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise ElasticError(f".metadata names {module}.{name}", "it is none of DCP's: remove it")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, of .metadata as it was committed, whatever the file may be by now."""

    def __init__(self, path: Path, record: dict):
        super().__init__(path)
        (entry,) = (each for each in record["files"] if Path(each["path"]).name == ".metadata")
        self._data = (path / ".metadata").read_bytes()
        if xxhash.xxh3_128_hexdigest(self._data) != entry["xxh3"]:
            raise ElasticError(f"{path / '.metadata'} was changed just now", "who writes there?")

    def read_metadata(self):
        return _Unpickler(io.BytesIO(self._data)).load()


class _Planner(dcp.DefaultLoadPlanner):
    """DCP's, which would unpickle anything: it gets what plain values were read, pickled anew."""

    def load_bytes(self, read_item, value):
        super().load_bytes(read_item, _plain(value))


def _plain(data: io.BytesIO) -> io.BytesIO:
    """A value that is no tensor, as torch.save writes it, from plain values alone."""
    plain = torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    torch.save(plain, anew := io.BytesIO())
    return io.BytesIO(anew.getvalue())


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, which are measured and durable, and then committed.

    Each method is one of DCP's steps: a failure in it reaches all ranks.
    """

    def __init__(self, folder: Path, commit: Callable[[Path, list[dict]], None]):
        super().__init__(folder, sync_files=False)  # it would, before its buffer is written
        self.fs, self._commit = _Files(), commit

    def write_data(self, plan, planner):
        try:
            for item in plan.items:
                if item.type.name == "BYTE_IO":
                    _plain(planner.resolve_data(item))  # what would not be read is not written
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save, about a position in the file
            refused = error.__context__
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(self.path)) from None
            raise
        durable.sync_path(self.path)
        entry = self.fs.entries[_rank_file(self.rank)]
        return written.then(lambda done: (done.value(), entry))

    def finish(self, metadata, results) -> None:  # rank 0, with what every rank has returned
        written, files = zip(*results, strict=True)
        super().finish(metadata, written)
        self._commit(self.path, [*files, self.fs.entries[".metadata"]])


class _Files(FileSystem):
    """DCP's files: their sizes and checksums are those of the bytes that DCP gave."""

    def __init__(self):
        self.entries: dict[str, dict] = {}  # of the commit, by name

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str):
        with durable.Measured(path) as file:
            yield file
        name = path.name.removesuffix(".tmp")  # DCP gives .metadata its name afterwards
        self.entries[name] = {"path": name, **file.measured}


def _state(model, optimizer) -> dict:
    """What is saved. An optimizer that never stepped has no state, and is left without."""
    stepped = bool(optimizer.state)
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    if not stepped:  # get_state_dict made some up
        optimizer.state.clear()
        optimizer_state["state"] = {}
    return {"model": model_state, "optimizer": optimizer_state}


def _prefixes(names) -> set[str]:
    """All that stands before a dot in any of the names."""
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


def _cause(error: CheckpointException) -> tuple[str, int | None]:
    """What failed, on which rank, and the errno if it was the disk: of several the disk."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    refused = [rank for rank, cause in causes.items() if isinstance(cause, OSError)]
    rank = min(refused or causes)
    return f"rank {rank}: {causes[rank]}", getattr(causes[rank], "errno", None)


# ---- the files ----------------------------------------------------------------------------------


def steps(run: RunDir) -> list[int]:
    """Steps whose checkpoint is committed, newest first."""
    return [step for step in _found(run) if durable.exists(_record_path(run, step))]


def _on_top_of(run: RunDir, base: int) -> list[int]:
    """Steps of the checkpoints on top of version `base`, and of those that do not say, newest
    first. A version 0 is what sync mode begins with, be it written down or not."""
    records = {step: _read_record(run, step)[0] for step in _found(run)}
    bases = {s: each["extra"].get("base_version", 0) for s, each in records.items() if each}
    return [step for step in records if bases.get(step, base) == base]


def _found(run: RunDir) -> list[int]:
    """Steps that have a commit record or a folder, newest first."""
    names = (re.fullmatch(r"step-(\d+)(\.json)?", name) for name in os.listdir(_folder(run)))
    return sorted({int(name[1]) for name in names if name}, reverse=True)


def _read_record(run: RunDir, step: int) -> tuple[dict | None, str]:
    """A commit record, if it can be relied on; what is wrong with it, else ""."""
    path = _record_path(run, step)
    try:
        record = durable.read_json(path)
        if record is None:
            return None, f"there is no commit record: {path}"
        named = {Path(entry["path"]).name for entry in record["files"]}
        wanted = {*OF_RANK_0, *map(_rank_file, range(record["world"]))}
        if record["step"] != step or named != wanted:
            raise ValueError(f"it names step {record['step']} and {sorted(named)}")
    except ElasticError as error:
        return None, error.what
    except (OSError, KeyError, TypeError, ValueError) as error:
        return None, f"damaged commit record: {path}: {error!r}"
    return record, ""


def _rank_file(rank: int) -> str:
    """DCP's name for what a rank wrote."""
    return f"__{rank}_0.distcp"


def _prune(run: RunDir, newest: int, keep: int, skipped: set[int]) -> None:
    """Remove what is older than `newest` and not among the last `keep` that are sound."""
    folder = _folder(run)
    with contextlib.suppress(OSError, TryAgain):  # the commit stands; the next one tries again
        sound = [step for step in steps(run) if step <= newest and step not in skipped]
        for path in folder.glob(".step-[0-9]*"):  # drafts, and records on their way
            step = int(re.match(r"\.step-(\d+)", path.name)[1])
            record, _ = _read_record(run, step)
            if record:
                # A committed one may still be without its name.
                durable.settle(_final_path(run, step), record["writer"])
            if step < newest and (record or not _record_path(run, step).exists()):
                _discard(path)
        for path in folder.glob(".pruned.*"):
            _discard(path)
        for step in _found(run):
            if step < newest and step not in sound[:keep]:
                _remove(run, step)
                skipped.discard(step)


def _remove(run: RunDir, step: int) -> None:
    _record_path(run, step).unlink(missing_ok=True)  # first: what it names is there
    durable.remove(_final_path(run, step))


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _folder(run: RunDir) -> Path:
    return run.path / "checkpoints"


def _final_path(run: RunDir, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}"


def _record_path(run: RunDir, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}.json"
