"""The two tasks that come with the toolkit, to use and to copy from: both train language
models.

    ByteText     a byte-level GPT on text files; by default the standard library's own sources
    TokenFiles   a Llama-style model on memory-mapped files of uint16 or uint32 token ids

Samples are derived from names and offsets, never from time or chance. Data is read when
it is first asked for: what needs only the model does not wait for it.
"""

import difflib
import functools
import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from elastic.base.errors import ElasticError, UsageError
from elastic.train.models import PRESETS, Shape, Transformer, create

HELD_OUT_OF = 25  # files: one of so many is kept for validation
VALIDATION_TOKENS = 8192  # at a time
NOT_STDLIB = {"test", "tests", "idlelib", "distutils", "lib2to3", "site-packages", "dist-packages",
              "__pycache__"}
OF_ONE_MACHINE = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


def read_options(table: dict, **defaults) -> SimpleNamespace:
    """The table over its defaults. UsageError: an unknown key, or not of the default's
    type."""
    for name, value in table.items():
        if name not in defaults:
            near = "".join(f": {n}?" for n in difflib.get_close_matches(name, defaults, 1))
            hint = f"legal keys: {', '.join(defaults)}"
            raise UsageError(f"unknown key {name!r} in [task]{near}", hint)
        default = defaults[name]
        if default is not None and type(value) is not type(default):
            raise UsageError(f"[task] {name} = {value!r} is no {type(default).__name__}")
    return SimpleNamespace(**{**defaults, **table})


class Windows(Dataset):
    """Consecutive windows of context + 1 tokens from each source in turn; none spans two.

    Neighbours share one token, the last target of the one and the first input of the
    other.
    """

    def __init__(self, sources: list, context: int, limit: int = 0):
        self.sources, self.context = sources, context
        self.ends = list(accumulate((max(len(s) - 1, 0) // context for s in sources), initial=0))
        self.count = min(self.ends[-1], limit) if limit > 0 else self.ends[-1]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        if not 0 <= i < self.count:
            raise IndexError(f"sample {i} of {self.count}")
        source = bisect_right(self.ends, i) - 1
        start = (i - self.ends[source]) * self.context
        return self.sources[source][start : start + self.context + 1]


class LanguageTask:
    """Next-token prediction; subclasses have `windows(held_out) -> Windows`."""

    shape: Shape
    validation_windows: int  # spread evenly over what is held out

    def model(self) -> Transformer:
        return create(self.shape)

    def initial_values(self, model: Transformer) -> Iterator[tuple[str, Tensor]]:
        return model.initial_values(torch.initial_seed())

    def dataset(self) -> Windows:
        windows = self.windows(held_out=False)
        if not len(windows):
            raise ElasticError(f"[task] names no data with {self.shape.context + 1} tokens or more")
        return windows

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean nats per predicted token."""
        scores = model(batch[:, :-1].long())
        return F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten().long())

    def tokens(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        """{"validation_loss": nats per token}, on the same windows every time."""
        held_out = self.windows(held_out=True)
        count = min(self.validation_windows, len(held_out))
        chosen = [held_out[i * len(held_out) // count] for i in range(count)]
        size = max(VALIDATION_TOKENS // self.shape.context, 1)
        device, training, total = next(model.parameters()).device, model.training, 0.0
        model.eval()
        for batch in (chosen[i : i + size] for i in range(0, count, size)):
            total += self.loss(model, default_collate(batch).to(device)).item() * len(batch)
        model.train(training)
        return {"validation_loss": total / count} if count else {}


# -----------------------------------------------------------------------------
# Bytes of text files


class ByteText(LanguageTask):
    """A byte-level GPT on text files. Of 25 or more, a hash of the name holds some
    out."""

    def __init__(self, config: dict):
        self.options = o = read_options(
            config,
            data="stdlib",  # or a folder: every file below it, but for hidden ones
            context=128,  # bytes
            dim=128,
            layers=2,
            heads=4,
            samples=0,  # train on the first so many only; 0: all
            validation_windows=384,
        )
        self.shape = Shape("gpt", 256, o.context, o.dim, o.layers, o.heads)
        self.validation_windows = o.validation_windows

    def windows(self, held_out: bool) -> Windows:
        limit = 0 if held_out else self.options.samples
        return Windows([self._bytes[held_out]], self.options.context, limit)

    @functools.cached_property
    def _bytes(self) -> tuple[Tensor, Tensor]:
        """For training and held out: whole files, in the order of their names."""
        stdlib = self.options.data == "stdlib"
        root = Path(sysconfig.get_path("stdlib") if stdlib else self.options.data)
        names = stdlib_sources(root) if stdlib else text_files(root)
        parts = bytearray(), bytearray()
        for name in names:
            digest = int(hashlib.sha1(name.encode()).hexdigest(), 16)
            held_out = digest % HELD_OUT_OF == 0 and len(names) >= HELD_OUT_OF
            parts[held_out].extend((root / name).read_bytes())
        # One byte in place of nothing, of which torch makes no tensor: no window either.
        return tuple(torch.frombuffer(part or bytearray(1), dtype=torch.uint8) for part in parts)


def text_files(root: Path, pattern: str = "*") -> list[str]:
    """The files below root, as sorted relative names, but for hidden ones."""
    if not root.is_dir():
        hint = 'give an absolute path that every node sees, or "stdlib"'
        what = f"[task] data = {str(root)!r} is not a folder (in {Path.cwd()})"
        raise ElasticError(what, hint) from NotADirectoryError()
    paths = (path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
    return sorted(p.as_posix() for p in paths if not any(x.startswith(".") for x in p.parts))


def stdlib_sources(root: Path) -> list[str]:
    """What every installation of this Python has: no tests, packages, files of one
    machine, or what Debian packages apart and Python 3.13 has no more."""
    names = [name for name in text_files(root, "*.py") if not name.startswith(OF_ONE_MACHINE)]
    return [name for name in names if not NOT_STDLIB.intersection(name.split("/"))]


# -----------------------------------------------------------------------------
# Files of token ids


class TokenFiles(LanguageTask):
    """A Llama-style model on files of token ids, whose samples are found by number."""

    def __init__(self, config: dict):
        self.options = o = read_options(
            config,
            files=[],  # paths, or patterns of them
            dtype="uint16",  # or uint32; little-endian, no header
            model=None,  # a preset (none: 125m), or a table of the fields of models.Shape
            context=0,  # tokens; 0: the model's
            vocabulary=0,  # token ids; 0: the model's
            checkpointing=False,  # recompute activations to save memory
            validation_files=[],
            validation_windows=64,
        )
        if o.dtype not in ("uint16", "uint32"):
            raise UsageError(f"[task] dtype = {o.dtype!r}", hint="uint16 or uint32")
        if isinstance(o.model, dict):
            shape = Shape(**vars(read_options(o.model, **asdict(Shape()))))
        elif (o.model or "125m") in PRESETS:
            shape = PRESETS[o.model or "125m"]
        else:
            hint = f"a table, or one of {', '.join(PRESETS)}"
            raise UsageError(f"[task] model = {o.model!r}", hint)
        given = {"context": o.context, "vocabulary": o.vocabulary, "checkpointing": o.checkpointing}
        self.shape = replace(shape, **{name: value for name, value in given.items() if value})
        self.validation_windows = o.validation_windows

    def windows(self, held_out: bool) -> Windows:
        o, vocabulary = self.options, self.shape.vocabulary
        files = o.validation_files if held_out else o.files
        paths = [path for pattern in files for path in sorted(glob.glob(pattern)) or [pattern]]
        sources = [TokenFile(Path(path), o.dtype, vocabulary) for path in paths]
        return Windows(sources, self.shape.context)


class TokenFile:
    """A sequence of token ids in a file. It opens when sliced, so it travels between
    processes."""

    def __init__(self, path: Path, dtype: str, vocabulary: int):
        self.path, self.dtype, self.vocabulary = path, getattr(torch, dtype), vocabulary
        try:
            size, each = path.stat().st_size, self.dtype.itemsize
        except OSError as error:
            raise ElasticError(f"token file {path}: {error.strerror}") from error
        if size % each:
            what = f"token file {path}: {size} bytes are no multiple of {each}, as {dtype} needs"
            raise ElasticError(what, hint="is the file complete, and is [task] dtype right?")
        self.length = size // each

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, window: slice) -> Tensor:
        start, stop, _ = window.indices(self.length)
        file, each = _opened(self.path), self.dtype.itemsize
        data = os.pread(file.fileno(), (stop - start) * each, start * each)
        if len(data) < (stop - start) * each:
            raise ElasticError(f"token file {self.path} is shorter than it was", "restore the file")
        ids = torch.frombuffer(bytearray(data), dtype=self.dtype).long()
        if (largest := int(ids.max())) >= self.vocabulary:
            what = f"token file {self.path}: id {largest} after token {window.start}, but the model"
            hint = "see vocabulary and dtype in [task]"
            raise ElasticError(f"{what} has a vocabulary of {self.vocabulary}", hint)
        return ids


@functools.lru_cache(maxsize=64)  # a process may have only so many open files
def _opened(path: Path) -> BinaryIO:
    """The file, to be read and not mapped: a mapping may not be larger than the memory."""
    return path.open("rb", buffering=0)
