"""A slot's inner state: optimizer moments, and what its deltas have left out so far (error
feedback), outliving the jobs that occupy it.

    slots/0007/inner.json                      pointer: version, attempt, files, checksums
    slots/0007/inner-000012.2.0.safetensors    one file per rank of the worker

Losing it costs a short learning-rate ramp, never correctness: so the pointer is replaced atomically
after the files, the files are not fsynced, and what does not fit or verify is left alone with its
reason. What is no tensor travels as JSON in the file's header; nothing is unpickled.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from elastic.base.durable import checksum, read_json, to_json, write_atomic
from elastic.run.rundir import RunDir
from elastic.saved.versions import save_tensors
from elastic.train.group import is_sharded, own_part, sharded_like

RESIDUAL = "residual."
UNFIT = (TypeError, ValueError, RuntimeError)  # of what is neither a tensor nor JSON


def save(
    folder: Path, stem: str, optimizers: Sequence[torch.optim.Optimizer], rank: int,
    residuals: dict[int, torch.Tensor],
) -> dict:  # fmt: skip
    """Write this rank's file. Returns its entry: name, bytes, xxh3. Raises OSError, or one of
    UNFIT."""
    tensors = {f"{RESIDUAL}{index}": each for index, each in residuals.items()}
    states = [
        [_packed(optimizer.state.get(param, {}), tensors) for param in _params(optimizer)]
        for optimizer in optimizers
    ]
    said = {"states": json.dumps(states), "whose": json.dumps(_whose(optimizers))}
    path = folder / f"{stem}.{rank}.safetensors"
    temporary = folder / f".{path.name}"
    try:
        save_tensors(tensors, temporary, said)
        entry = {"name": path.name, "bytes": temporary.stat().st_size, "xxh3": checksum(temporary)}
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # half of it would fill a full disk further
    return entry


def publish(run: RunDir, slot: int, attempt: int, version: int, entries: list[dict]) -> dict:
    """Replace the slot's pointer and remove what it does not name: also what a death has left."""
    folder = run.slot_path(slot)
    pointer = {"slot": slot, "attempt": attempt, "version": version, "files": entries}
    write_atomic(folder / "inner.json", to_json(pointer))
    current = {entry["name"] for entry in entries}
    for path in folder.glob("*inner-*"):
        if path.name not in current:
            path.unlink(missing_ok=True)
    return pointer


def choose(
    run: RunDir, slot: int, offered: dict[int, dict], version: int, max_age: int
) -> tuple[dict | None, str]:
    """The pointer to start from, and what it is: own, a donor's, or none that is recent."""

    def recent(pointer: dict | None) -> bool:
        return pointer is not None and version - pointer["version"] <= max_age

    own = read_json(run.slot_path(slot) / "inner.json")
    if recent(own):
        return own, f"own of version {own['version']}"
    donors = [offered[other] for other in sorted(offered) if other != slot]
    donors = [pointer for pointer in donors if _is_whole(pointer) and recent(pointer)]
    if not donors:
        return None, "fresh"
    donor = max(donors, key=lambda pointer: (pointer["version"], -pointer["slot"]))
    whose = f"donor slot {donor['slot']} attempt {donor['attempt']}"
    return donor, f"{whose} of version {donor['version']}"


def _is_whole(pointer: object) -> bool:
    """Is it what `publish` makes? A donor may have put anything into Redis."""
    if not isinstance(pointer, dict) or not isinstance(pointer.get("files"), list):
        return False
    numbers = [pointer.get(name) for name in ("slot", "attempt", "version")]
    return all(type(number) is int for number in numbers) and all(
        isinstance(entry, dict) and set(entry) == {"name", "bytes", "xxh3"}
        and isinstance(entry["name"], str) for entry in pointer["files"]
    )  # fmt: skip


def load(
    run: RunDir, pointer: dict, optimizers: Sequence[torch.optim.Optimizer], rank: int,
    residuals: dict[int, torch.Tensor] | None,
) -> str:  # fmt: skip
    """Set the optimizers' state; if it is the slot's own (`residuals` is a table to be filled),
    the residuals as well.

    Returns why it could not be used; empty if it was.
    """
    if rank >= len(pointer["files"]):
        return f"it was saved by {len(pointer['files'])} ranks"
    entry = pointer["files"][rank]
    path = run.path / "slots" / f"{pointer['slot']:04d}" / Path(entry["name"]).name
    try:
        if path.stat().st_size != entry["bytes"] or checksum(path) != entry["xxh3"]:
            return f"{path.name} is damaged"
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = {name: json.loads(file.metadata()[name]) for name in ("states", "whose")}
        names = [name for name in tensors if name.startswith(RESIDUAL)]
        left_out = {int(name.removeprefix(RESIDUAL)): tensors.pop(name) for name in names}
        if refused := _restore(optimizers, tensors, **said):
            return refused
    except Exception as error:  # a donor, or an optimizer, may have put anything there
        return f"{path.name}: {getattr(error, 'strerror', None) or error}"
    if residuals is not None:
        residuals |= left_out
    return ""


def _restore(optimizers: Sequence, tensors: dict, states: list, whose: list) -> str:
    if not len(states) == len(whose) == len(optimizers):
        return "it is another optimizer's"
    for (kind, shapes), (own, needed) in zip(whose, _whose(optimizers), strict=True):
        if kind != own or len(shapes) != len(needed):
            return "it is another optimizer's"
        if shapes != needed:
            return "it is another model's"
    for optimizer, packed in zip(optimizers, states, strict=True):
        params = _params(optimizer)
        state = {i: _unpacked(each, tensors, params[i]) for i, each in enumerate(packed)}
        state = {index: each for index, each in state.items() if each}  # else it was never trained
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return ""


def _whose(optimizers: Sequence) -> list:
    """What a state fits: each optimizer's class, and the shapes of its parameters."""
    return [[type(each).__name__, [list(param.shape) for param in _params(each)]]
            for each in optimizers]  # fmt: skip


def _packed(value: object, tensors: dict[str, torch.Tensor]) -> object:
    """As JSON has it, with tensors by name; they are put into `tensors`."""
    if isinstance(value, torch.Tensor):
        kind, name = "sharded" if is_sharded(value) else "tensor", str(len(tensors))
        tensors[name] = own_part(value).contiguous()
        return {kind: name}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[key, _packed(each, tensors)] for key, each in pairs]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_packed(each, tensors) for each in value]}
    return value


def _unpacked(packed: object, tensors: dict[str, torch.Tensor], param: torch.Tensor) -> object:
    if not isinstance(packed, dict):
        return packed
    [(kind, held)] = packed.items()
    if kind in ("tensor", "sharded"):
        return _sharded_like(param, tensors[held]) if kind == "sharded" else tensors[held]
    if kind == "dict":
        return {key: _unpacked(each, tensors, param) for key, each in held}
    values = [_unpacked(each, tensors, param) for each in held]
    return tuple(values) if kind == "tuple" else values


def _sharded_like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not is_sharded(param):
        raise ValueError("it is a shard's, and this model is whole")
    return sharded_like(param, value.to(own_part(param).device))


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
