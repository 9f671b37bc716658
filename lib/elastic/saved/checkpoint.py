"""Checkpoints of sync mode: model and optimizer, resharded for another number of ranks.

    checkpoints/.step-00000100.WRITER/   being written; WRITER is one attempt of one job
    checkpoints/step-00000100/           torch.distributed.checkpoint's files (DCP), and extra.json
    checkpoints/step-00000100.json       made last, by link(): its existence is the commit

They are written and committed as drafts.py says. Nothing of a checkpoint is read before
its sizes and checksums are found to be those in the commit record. A step that does not
verify is skipped with a reason. It stays until the same step is saved again or newer
ones push it out.

The ranks talk about a checkpoint in a gloo group of its own, so that writing in the
background never meets a collective of the training.
"""

import contextlib
import functools
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic.base import durable
from elastic.base.durable import patiently
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.claims import CHECKPOINT, numbers
from elastic.run.records import File, Name, restored
from elastic.run.rundir import RunDir
from elastic.saved import storage
from elastic.saved.drafts import Draft, drop, place, remove, settle
from elastic.saved.layout import Tensor
from elastic.train.group import Group, is_sharded, own_part
from elastic.train.inner_optimizer import keep_types, shared_state

# A filesystem may be stuck for so long in a write; hangs are found elsewhere.
SLOWEST = timedelta(days=1)
EXTRA = "extra.json"
# In names of torch's modules that hold another one; DCP leaves them out.
_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")
BEGUN = r"step-(\d{8,})(?:\.json)?"  # a step of which there is a record or a folder
# What DCP says of one rank without a group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, by its record."""

    step: int
    writer: Name
    time: float
    world: int  # ranks that wrote it
    extra: dict  # as it was given to save()
    files: tuple[File, ...]


@dataclass
class _Flight:
    """A checkpoint being written."""

    step: int
    writer: storage.Writer
    since: float
    waited_s: float = 0.0  # by the training, for the copy
    ended: float = 0.0  # when it was committed, even if nobody has asked since
    future: Future | None = None

    def end(self) -> None:
        self.ended = time.monotonic()


class Checkpoints:
    """Saves and loads the checkpoints of a run, on all ranks of a trainer: each of them
    calls every method.

    `save_s`: seconds that the last one took to its commit; `stall_s`: those in which
    training waited. Both are rank 0's, so that all ranks decide the same by them.
    """

    def __init__(self, run: RunDir, group: Group, writer: str, keep: int = 2):
        self.save_s = self.stall_s = 0.0
        self._run, self._group, self._writer, self._keep = run, group, writer, keep
        self._flight: _Flight | None = None
        self._skipped: set[int] = set()
        # With one rank DCP finds no group, and needs none.
        self._ranks = dist.new_group(backend="gloo", timeout=SLOWEST) if group.world > 1 else None

    def save(self, step: int, model, optimizer, extra: dict) -> None:
        """Write and commit a checkpoint, unless this step has one.

        On a failure every rank raises: OSError if the disk refused. Checkpoints that are
        committed stay, and nothing else does. If one is being written, that ends first;
        its failure is not told.
        """
        with contextlib.suppress(OSError, ElasticError):
            self.finish()
        if flight := self._open(step, extra):
            self._close(flight, lambda: dcp.save(_state(model, optimizer), **self._ways(flight)))

    def begin(self, step: int, model, optimizer, extra: dict) -> None:
        """Copy the state to the host and write it in the background, unless this step has
        a checkpoint.

        finish() comes first: if that raises, nothing new has begun.
        """
        self.finish()
        if flight := self._open(step, extra):
            flight.future = dcp.async_save(_state(model, optimizer), **self._ways(flight))
            flight.future.add_done_callback(lambda _: flight.end())
            flight.waited_s = time.monotonic() - flight.since
            self._flight = flight

    @property
    def writing_s(self) -> float:
        """For how many seconds a checkpoint is being written by now; 0: none is."""
        return time.monotonic() - self._flight.since if self._flight else 0.0

    @property
    def needs_s(self) -> float:
        """How many seconds a save would take from now; what is being written has to be
        finished first."""
        rest_s = self.save_s - self.writing_s if self._flight else 0.0
        return self.save_s + max(0.0, rest_s)

    def poll(self) -> bool:
        """Has what began been committed, by this call? Raises like save()."""
        if self._flight is None or not self._group.broadcast(self._flight.future.done()):
            return False
        return self.finish() is not None

    def finish(self) -> int | None:
        """Wait until what began is committed, and return its step; None if nothing began.
        Raises like save()."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        self._close(flight, flight.future.result)
        return flight.step

    def load(self, model, optimizer, base: int = 0) -> tuple[Saved | None, list[str]]:
        """Load the newest checkpoint on top of version `base`, if any; why each newer one
        was skipped. Drafts that dead writers have left are removed: they may have taken
        all the room there was.

        ElasticError if the checkpoint is whole and does not fit the model.
        """
        with contextlib.suppress(OSError, ElasticError):
            self.finish()
        saved, reasons, damaged = find_newest(self._run, self._group, base)
        self._skipped |= damaged
        if self._group.leads:
            with contextlib.suppress(OSError, TryAgain):
                _drop_drafts(self._run, sys.maxsize)
        if saved:
            self._restore(saved, model, optimizer)
        return saved, reasons

    # ---- writing

    def _open(self, step: int, extra: dict) -> _Flight | None:
        """A draft, for all ranks at the same time; None if the step is committed."""
        since = time.monotonic()
        draft = Draft(_final_path(self._run, step), record_path(self._run, step), self._writer)
        if not self._group.decide(lambda: self._draft_unless_committed(step, draft)):
            return None
        commit = functools.partial(self._commit, draft, step, extra)
        return _Flight(step, storage.Writer(draft, commit), since)

    def _ways(self, flight: _Flight) -> dict:
        """Arguments for DCP. Rank 0 writes what every rank has, as a BatchNorm's
        statistics."""
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        return {"storage_writer": flight.writer, "planner": planner, "process_group": self._ranks}

    def _draft_unless_committed(self, step: int, draft: Draft) -> bool:
        """Rank 0: make the folder of the draft. False, and nothing is made, if the step
        is committed already."""
        if durable.exists(draft.record) and step not in self._skipped:
            return False
        draft.discard()
        durable.make_folder(draft.folder)
        return True

    def _commit(self, draft: Draft, step: int, extra: dict, files: list[dict]) -> None:
        """Rank 0: link the record. If another writer of this step was first, that is as
        good."""
        files = [*files, draft.write(EXTRA, durable.to_json(extra))]
        saved = Saved(step, self._writer, time.time(), self._group.world, extra, tuple(files))
        draft.commit_by(lambda: self._link(draft.record, saved))

    def _link(self, record: Path, saved: Saved) -> bool:
        if saved.step in self._skipped:
            _remove(self._run, saved.step)
            self._skipped.discard(saved.step)
        return durable.create_once(record, durable.to_json(asdict(saved)))

    def _close(self, flight: _Flight, write: Callable[[], object]) -> None:
        """Let the write and the commit end; raise on every rank what failed on any."""
        since, failure = time.monotonic(), ""
        try:
            write()
        except CheckpointException as error:  # the same on every rank
            failure, errno = storage.cause(error)
        if self._group.leads and failure:
            flight.writer.draft.discard()
        elif self._group.leads:
            with contextlib.suppress(OSError, TryAgain):  # the next one tries again
                _prune(self._run, flight.step, self._keep, self._skipped)
        now = time.monotonic()
        save_s, stall_s = (flight.ended or now) - flight.since, flight.waited_s + now - since
        seconds = self._group.broadcast([save_s, stall_s])
        if failure:
            what = f"the checkpoint of step {flight.step} was not saved: {failure}"
            if errno:
                raise OSError(errno, what)
            raise ElasticError(what, "the last one that was committed is untouched")
        self.save_s, self.stall_s = seconds

    # ---- reading

    def _restore(self, saved: Saved, model, optimizer) -> None:
        optimizer.zero_grad()
        shared = shared_state(optimizer)
        optimizer.state.clear()
        with _of_params(optimizer):
            model_state, fresh = states.get_state_dict(model, optimizer)
        names = [name for group in fresh["param_groups"] for name in group["params"]]
        reader = reader_of(self._run, saved)
        state = {"model": model_state, **_room(reader.read_metadata(), model_state)}
        reader.fill(state, process_group=self._ranks)
        saved_state = state["optimizer"]["state"]
        # A parameter that never trained has no moments; torch before 2.9 wants its name
        # all the same.
        state["optimizer"]["state"] = {n: saved_state.get(n, {}) for n in names if saved_state}
        with _of_params(optimizer), _by_place(model), _by_place(optimizer):
            states.set_state_dict(
                model, optimizer, model_state_dict=model_state, optim_state_dict=state["optimizer"],
                options=states.StateDictOptions(strict=False),
            )
        params = {_WRAPPER.sub("", name): param for name, param in model.named_parameters()}
        for name, values in saved_state.items():
            keep_types(optimizer.state[params[name]], values)
        optimizer.state.update(shared | state["shared"])


def find_newest(run: RunDir, group: Group, base: int = 0) -> tuple[Saved | None, list, set]:
    """The newest checkpoint on top of version `base` that verifies, if any; why each
    newer one was skipped; the steps of those that are damaged. All ranks of the group
    call it alike. TryAgain if there is none but one that cannot be read now."""
    reasons, damaged = [], set()
    silent: TryAgain | None = None
    for step, record, reason in group.decide(lambda: _on_top_of(run, base, group.patience_s)):
        saved = restored(Saved, record) if record else None
        try:
            reason = reason or _damage_by_all(run, group, saved)
            if not reason:
                return saved, reasons, damaged
            damaged.add(step)
        except TryAgain as silence:  # for minutes; it may be sound, and stays
            silent, reason = silence, silence.what
        reasons.append(f"step {step}: {reason}")
    if silent:
        raise silent
    return None, reasons, damaged


def _on_top_of(run: RunDir, base: int, for_s: float) -> list[tuple[int, dict | None, str]]:
    """The checkpoints on top of version `base`, and those that do not say, newest first:
    the step, the record, and what is wrong with that (neither: it cannot be read within
    `for_s`). Sync mode begins with version 0 whether that is written down or not."""
    candidates, read = [], functools.partial(patiently, _read, for_s=for_s)
    for step in patiently(steps, run, BEGUN, for_s=for_s):
        try:
            saved, reason = read(run, step)
        except TryAgain:
            saved, reason = None, ""
        if saved is None:
            candidates.append((step, None, reason))
        elif saved.extra.get("base_version", 0) == base:
            with contextlib.suppress(OSError, TryAgain):  # then it is read where it is
                settle(_final_path(run, step), saved.writer)
            candidates.append((step, asdict(saved), ""))
            read = _read  # an older one is not needed, if all goes well: no patience
    return candidates


def _damage_by_all(run: RunDir, group: Group, saved: Saved | None) -> str:
    """What is wrong with a file of the checkpoint, else "". The ranks share the work.
    TryAgain, on all of them, if the filesystem does not say."""
    if saved is None:
        raise TryAgain("its record cannot be read now")
    own = saved.files[group.rank :: group.world]
    look = functools.partial(patiently, _damage, run, saved, own, for_s=group.patience_s)
    return next(filter(None, group.all_do(look)), "")


def read_params(reader: storage.Reader, tensors: Sequence[Tensor]) -> torch.Tensor:
    """Parameters out of a checkpoint: flat, float32."""
    values = {_WRAPPER.sub("", tensor.name): torch.empty(tensor.shape) for tensor in tensors}
    reader.fill({"model": values}, no_dist=True)
    return torch.cat([value.flatten() for value in values.values()])


def _state(model, optimizer) -> dict:
    """What is saved. An optimizer that never stepped has no state, and is left without."""
    with _of_params(optimizer):
        model_state, optimizer_state = states.get_state_dict(model, optimizer)
    held = optimizer_state["state"]
    for name, values in held.items():
        _check_sharding(name, model_state[name], values)
        # torch would share a DTensor without dimensions with the training while it writes.
        held[name] = {key: value.clone() if is_sharded(value) and not value.dim() else _plain(value)
                      for key, value in values.items()}
    optimizer_state["param_groups"] = [{key: _plain(value) for key, value in group.items()}
                                       for group in optimizer_state["param_groups"]]
    return {"model": model_state, "optimizer": optimizer_state, "shared": shared_state(optimizer)}


def _plain(value: object) -> object:
    """A number of numpy's as one of Python's: no checkpoint may hold others."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    is_numpys = type(value).__module__ == "numpy" and not value.shape
    return value.item() if is_numpys else value


@contextlib.contextmanager
def _of_params(optimizer) -> Iterator[None]:
    """torch fills an empty state by a step, and knows the state of parameters alone: do
    without both."""
    own, shared = optimizer.step, shared_state(optimizer)
    for name in shared:
        del optimizer.state[name]
    optimizer.step = lambda closure=None: None
    yield
    optimizer.step = own
    optimizer.state.update(shared)


@contextlib.contextmanager
def _by_place(owner) -> Iterator[None]:
    """torch calls load_state_dict with the names state_dict=, and for a model also strict=
    and assign=, which not every such method has: pass the arguments by their place."""
    own = owner.load_state_dict
    owner.load_state_dict = lambda state_dict, assign=False, **how: own(state_dict, *how.values())
    yield
    owner.load_state_dict = own


def _check_sharding(name: str, param: torch.Tensor, state: dict) -> None:
    """Raise ElasticError for state that belongs to this rank's part alone and is no
    DTensor: DCP would take one rank's for that of all."""
    for key, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
        if is_plain and own_part(param).shape == value.shape != param.shape:
            what = f"the optimizer's {key} of {name} is of one rank's part, and no DTensor"
            raise ElasticError(what, "make state like the parameter: torch.zeros_like(param)")


def reader_of(run: RunDir, saved: Saved) -> storage.Reader:
    """The reader of a checkpoint that `find_newest` has found."""
    return storage.Reader(place(_final_path(run, saved.step), saved.writer))


def _room(metadata, params: dict) -> dict:
    """Where all but the model is read to: for a tensor of a parameter's size one like the
    parameter."""
    paths = {name: path for name, path in metadata.planner_data.items() if path[0] != "model"}
    room = dict.fromkeys(paths)
    for name, path in paths.items():
        saved, param = metadata.state_dict_metadata[name], params.get(path[2]) if path[2:] else None
        if isinstance(saved, TensorStorageMetadata):
            # A number (a step) stays on the CPU until the optimizer takes it.
            is_like = saved.size and saved.size == getattr(param, "shape", None)
            like = param if is_like else torch.empty(saved.size)
            room[name] = torch.empty_like(like, dtype=saved.properties.dtype)
    found = {"shared": {}, **unflatten_state_dict(room, paths)}
    found["optimizer"].setdefault("state", {})
    return found


# ---- the files -------------------------------------------------------------------------


def steps(run: RunDir, kind: str = CHECKPOINT) -> list[int]:
    """Steps whose checkpoint is committed (or, with BEGUN, damaged), newest first."""
    return sorted({*numbers(_folder(run), kind)}, reverse=True)


def size_bytes(run: RunDir, step: int) -> int:
    """The bytes of a committed checkpoint; 0 if there is none of this step."""
    record = durable.read_json(record_path(run, step)) or {}
    return sum(entry["bytes"] for entry in record.get("files", ()))


def _damage(run: RunDir, saved: Saved, files: Sequence[dict]) -> str:
    """What is wrong with one of these `files` of a checkpoint, else "". TryAgain if the
    filesystem does not say: that is no damage."""
    folder = place(_final_path(run, saved.step), saved.writer)
    reasons = (durable.damage(folder / Path(entry["path"]).name, entry) for entry in files)
    return next(filter(None, reasons), "")


def _read(run: RunDir, step: int) -> tuple[Saved | None, str]:
    """A checkpoint by its record, if that can be relied on; what is wrong with the
    record, else "". TryAgain if the filesystem does not say."""
    path = record_path(run, step)
    try:
        record = durable.read_json(path)
        if record is None:
            return None, f"there is no commit record: {path}"
        saved = restored(Saved, record)
        names = {Path(entry["path"]).name for entry in saved.files}
        if saved.step != step or names != {EXTRA, *storage.file_names(saved.world)}:
            raise ValueError(f"it names step {saved.step} and {sorted(names)}")
    except TryAgain:
        raise
    except (OSError, ValueError, ElasticError) as error:
        return None, getattr(error, "what", f"damaged commit record: {path}: {error!r}")
    return saved, ""


def _prune(run: RunDir, newest: int, keep: int, skipped: set[int]) -> None:
    """Remove the checkpoints that are older than `newest` and not among the last `keep`
    that are sound."""
    sound = [step for step in steps(run) if step <= newest and step not in skipped]
    _drop_drafts(run, newest)
    for path in _folder(run).glob(".pruned.*"):
        drop(path)
    for step in steps(run, BEGUN):
        if step < newest and step not in sound[:keep]:
            _remove(run, step)
            skipped.discard(step)


def _drop_drafts(run: RunDir, newest: int) -> None:
    """Remove the drafts of steps before `newest`, and records that were on their way."""
    for path in _folder(run).glob(".step-[0-9]*"):
        step = int(re.match(r"\.step-(\d+)", path.name)[1])
        saved, _ = _read(run, step)
        if saved:
            settle(_final_path(run, step), saved.writer)
        # By the folder: this node may remember a name that was not there.
        if step < newest and (saved or step not in steps(run)):
            drop(path)


def _remove(run: RunDir, step: int) -> None:
    record_path(run, step).unlink(missing_ok=True)  # first: a record's files are all there
    remove(_final_path(run, step))


def _folder(run: RunDir) -> Path:
    return run.path / "checkpoints"


def _final_path(run: RunDir, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}"


def record_path(run: RunDir, step: int) -> Path:
    return _folder(run) / f"step-{step:08d}.json"
