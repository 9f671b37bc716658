"""A slot's inner state, the optimizer's moments: it outlives the jobs that occupy the
slot.

    slots/0007/inner.json                      pointer: version, attempt, files, checksums
    slots/0007/inner-000012.2.0.safetensors    one file per rank of the worker

To lose it costs a short ramp of the learning rate, never correctness. So the pointer is
replaced atomically after the files, and the files are not fsynced. State that does not
fit or verify is not used, and the reason is told. Values that are no tensors travel as
JSON in the file's header; nothing is unpickled.
"""

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from elastic.base.durable import checksum, to_json, write_atomic
from elastic.run.records import Name, restored
from elastic.run.rundir import RunDir
from elastic.run.sound import hint
from elastic.train.group import is_sharded, own_part, sharded_like
from elastic.train.inner_optimizer import keep_types, numbers, shared_state

NAME = "inner.json"
FILE = re.compile(r"\.?inner-(\d{6,})\..*")  # of a version
UNFIT = (TypeError, ValueError, RuntimeError)  # a value is neither a tensor nor JSON


class Entry(TypedDict):
    """The file of one rank."""

    name: Name
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Pointer:
    """Where a slot's inner state is, and which version it is of."""

    slot: int
    attempt: int
    version: int
    files: tuple[Entry, ...]


def save(
    folder: Path, stem: str, optimizers: Sequence[Optimizer], rank: int, counted: Sequence = ()
) -> Entry:
    """Write this rank's file; `counted` is the part of the state that is in the parameter
    groups. Returns the file's entry. Raises OSError, or one of UNFIT."""
    tensors: dict[str, torch.Tensor] = {}
    said = {
        "states": [[_pack(each.state.get(param, {}), tensors) for param in _params(each)]
                   for each in optimizers],
        "whose": _whose(optimizers), "counted": [_pack(each, tensors) for each in counted],
        "shared": [_pack(shared_state(each), tensors) for each in optimizers],
    }
    header = {name: json.dumps(value) for name, value in said.items()}
    path = folder / f"{stem}.{rank}.safetensors"
    temporary = folder / f".{path.name}"
    try:
        save_file(tensors, temporary, header)
        temporary.chmod(0o644)
        entry = {"name": path.name, "bytes": temporary.stat().st_size, "xxh3": checksum(temporary)}
        os.replace(temporary, path)
    except SafetensorError as error:  # a full disk is an OSError here as everywhere else
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, str(error), str(temporary)) from None
    finally:
        temporary.unlink(missing_ok=True)  # half of it would fill a full disk further
    return entry


def publish(run: RunDir, pointer: Pointer) -> None:
    """Replace the slot's pointer, and remove files that it does not name, also those that
    a process which died has left."""
    folder = run.slots.path(pointer.slot)
    write_atomic(folder / NAME, to_json(asdict(pointer)))
    current = {entry["name"] for entry in pointer.files}
    for path in folder.glob("*inner-*.safetensors"):
        if path.name not in current:
            path.unlink(missing_ok=True)


def forget(run: RunDir, oldest: int) -> None:
    """Remove the inner states of versions before `oldest`: nobody begins with them any
    more."""
    for path in (run.path / "slots").glob("*/*inner-*"):
        if (of := FILE.fullmatch(path.name)) and int(of[1]) < oldest:
            path.unlink(missing_ok=True)


def choose(run: RunDir, slot: int, version: int, max_age: int) -> tuple[Pointer | None, str]:
    """The slot's pointer to start from, and what it is, in words. None if it is damaged or
    too old. State saved before a version that came from sync mode counts as too old."""
    made = filter(None, map(run.commits.of, range(max(0, version - max_age), version + 1)))
    oldest = max([version - max_age, *(each.version for each in made if each.step)])
    try:
        own = restored(Pointer, hint(run.path / "slots" / f"{slot:04d}" / NAME))
    except ValueError:
        return None, "fresh"
    return (own, f"own of version {own.version}") if own.version >= oldest else (None, "fresh")


def load(run: RunDir, pointer: Pointer, optimizers: Sequence, rank: int, world: int = 1) -> str:
    """Set the optimizers' state. Returns why it could not be used; empty if it was."""
    if len(pointer.files) != world:
        return f"it was saved by {len(pointer.files)} ranks"
    entry = pointer.files[rank]
    path = run.path / "slots" / f"{pointer.slot:04d}" / entry["name"]
    try:
        if path.stat().st_size != entry["bytes"] or checksum(path) != entry["xxh3"]:
            return f"{path.name} is damaged"
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            said = {name: json.loads(text) for name, text in file.metadata().items()}
        return _restore(optimizers, tensors, said)
    except Exception as error:  # an optimizer may have put anything there
        return f"{path.name}: {getattr(error, 'strerror', None) or error}"


def _restore(optimizers: Sequence, tensors: dict, said: dict) -> str:
    counted = iter(said.get("counted", ()))  # an older file has none
    if said["whose"] != _whose(optimizers):
        return "it is another optimizer's, or another model's"
    shared = said.get("shared") or [{"dict": []}] * len(optimizers)
    for optimizer, packed, of_all in zip(optimizers, said["states"], shared, strict=True):
        params = _params(optimizer)
        values = (_unpack(value, tensors, params[i]) for i, value in enumerate(packed))
        # What never trained has none.
        state = {i: value for i, value in enumerate(values) if value}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        for i, values in state.items():
            keep_types(optimizer.state[params[i]], values)
        optimizer.state.update(_on_device(_unpack(of_all, tensors, params[0]), params[0]))
        for group, held in zip(optimizer.param_groups, counted, strict=False):
            group |= _on_device(numbers(_unpack(held, tensors, params[0])), params[0])
    return ""


def _on_device(values: dict, param: torch.Tensor) -> dict:
    return {name: value.to(own_part(param).device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()}


def _whose(optimizers: Sequence) -> list:
    """Which optimizers a state fits: the class of each, and its parameters' shapes."""
    return [[type(optimizer).__name__, [list(param.shape) for param in _params(optimizer)]]
            for optimizer in optimizers]


def _pack(value: object, tensors: dict) -> object:
    """A value as JSON can hold it. Its tensors are put into `tensors`, and named here."""
    if isinstance(value, torch.Tensor):
        kind, name = "sharded" if is_sharded(value) else "tensor", str(len(tensors))
        tensors[name] = own_part(value).contiguous()
        return {kind: name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(item, tensors) for item in value]}
    return value


def _unpack(packed: object, tensors: dict, param: torch.Tensor) -> object:
    if not isinstance(packed, dict):
        return packed
    [(kind, held)] = packed.items()
    if kind in ("tensor", "sharded"):
        value, own = tensors[held], own_part(param)
        if value.shape == own.shape:  # in its memory format, too: fused steps rely on that
            value = torch.empty_like(own, dtype=value.dtype, device="cpu").copy_(value)
        return sharded_like(param, value.to(own.device)) if kind == "sharded" else value
    if kind == "dict":
        return {key: _unpack(item, tensors, param) for key, item in held}
    values = [_unpack(item, tensors, param) for item in held]
    return tuple(values) if kind == "tuple" else values


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
