"""What torch.distributed.checkpoint (DCP) writes and reads, made durable, and harmless.

Every rank writes its own file and takes its checksum. Rank 0 commits in DCP's last step,
so every rank learns of the same success or failure.

DCP's .metadata, and the few values in its files that are no tensors, are pickles. No
pickle may name anything but DCP's own records and torch's plain values, whatever became
of the file since its checksum was compared. DCP also pickles the messages between the
ranks of a job.
"""

import contextlib
import errno
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from elastic.base.durable import sync_path
from elastic.base.errors import ElasticError, TryAgain
from elastic.saved.drafts import Draft, Measured

METADATA, RANKS_FILE = ".metadata", "__{}_0.distcp"
# The records that .metadata consists of, by module.
RECORDS = {
    "torch": ["Size", *(name for name, it in vars(torch).items() if isinstance(it, torch.dtype))],
    "torch.serialization": ["_get_layout"], f"{dcp.__name__}.filesystem": ["_StorageInfo"],
    "pathlib": ["PosixPath"], "pathlib._local": ["PosixPath"],  # Python 3.13's
    dcp.metadata.__name__: [*dcp.metadata.__all__, "_MEM_FORMAT_ENCODING"],
}


def file_names(world: int) -> list[str]:
    """The names of the files that DCP writes with so many ranks."""
    return [METADATA, *map(RANKS_FILE.format, range(world))]


def cause(error: CheckpointException) -> tuple[str, int | None]:
    """What failed, on which rank, and the errno if it was the disk (one that was silent,
    too). If several ranks failed, that of the disk is told."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    refused = [rank for rank, cause in causes.items() if isinstance(cause, OSError | TryAgain)]
    rank = min(refused or causes)
    number = getattr(causes[rank], "errno", errno.EIO if refused else None)
    return f"rank {rank}: {causes[rank]}", number


# ---- writing ---------------------------------------------------------------------------


class Writer(dcp.FileSystemWriter):
    """DCP's writer of files, which are measured and durable, and then committed.

    Each method is one of DCP's steps: a failure in it reaches all ranks.
    """

    def __init__(self, draft: Draft, commit: Callable[[list[dict]], object]):
        # DCP would sync a file before its buffer is written.
        super().__init__(draft.folder, sync_files=False)
        self.draft, self.fs, self._commit = draft, _Files(draft), commit

    def write_data(self, plan, planner):
        try:
            for item in plan.items:
                if item.type.name == "BYTE_IO":
                    # What would not be read is not written.
                    plain(planner.resolve_data(item))
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save, about a position in the file
            refused = error.__context__
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(self.path)) from None
            raise
        sync_path(self.path)
        [entry] = self.fs.entries.values()  # of this rank's file; .metadata comes after all
        return written.then(lambda done: (done.value(), entry))

    def finish(self, metadata, results) -> None:
        """Rank 0, with what every rank has returned."""
        written, entries = zip(*results, strict=True)
        super().finish(metadata, written)
        self._commit([*entries, self.fs.entries[METADATA]])


class _Files(FileSystem):
    """DCP's files: their sizes and checksums are those of the bytes that DCP gave."""

    def __init__(self, draft: Draft):
        self._draft = draft
        self.entries: dict[str, dict] = {}  # of the commit record, by name

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str):
        with Measured(path) as file:
            yield file
        name = path.name.removesuffix(".tmp")  # DCP gives .metadata its name afterwards
        self.entries[name] = self._draft.entry(name, file)


# ---- reading ---------------------------------------------------------------------------


class Reader(dcp.FileSystemReader):
    """DCP's reader, of files that were verified."""

    @functools.cached_property
    def metadata(self):
        """Read once: of 256 ranks it takes more than a second."""
        with (self.path / METADATA).open("rb") as file:
            return _Unpickler(file).load()

    def read_metadata(self):
        return self.metadata

    def fill(self, state: dict, **how) -> None:
        """Read into the tensors of `state`; `how` is for dcp.load."""
        try:
            dcp.load(state, storage_reader=self, planner=_Planner(), **how)
        except CheckpointException as error:
            what = f"the checkpoint {self.path} cannot be loaded: {cause(error)[0]}"
            raise ElasticError(what, "is the model still that of the run?") from None


class _Unpickler(pickle.Unpickler):
    """Reads .metadata. It makes nothing but the records that DCP's metadata consists of."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):  # Python 3.11, of an Enum's member
            return lambda kind, member: kind[member]
        if name in RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise ElasticError(f".metadata names {module}.{name}", "it is none of DCP's: remove it")


class _Planner(dcp.DefaultLoadPlanner):
    """DCP's planner would unpickle anything. This one gives it the values that were read,
    if they are plain, pickled anew."""

    def load_bytes(self, read_item, value):
        super().load_bytes(read_item, plain(value))


def plain(data: io.BytesIO) -> io.BytesIO:
    """A value as torch.save writes it, made again of what was read; raises if that is not
    made of plain values alone."""
    value = torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    torch.save(value, anew := io.BytesIO())
    return io.BytesIO(anew.getvalue())
