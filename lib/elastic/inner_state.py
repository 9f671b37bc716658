"""A slot's inner state: optimizer moments, random numbers, and what its deltas have left out so
far (error feedback), outliving the jobs that occupy it.

    slots/0007/inner.json                      pointer: version, attempt, files, checksums
    slots/0007/inner-000012.2.0.safetensors    one file per rank of the worker

Losing it costs a short learning-rate ramp, never correctness: so the pointer is replaced atomically
after the files, the files are not fsynced, and what does not fit or verify is left alone with its
reason. Scalars travel as JSON in the file's header; nothing is unpickled.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from elastic.durable import checksum, read_json, to_json, write_atomic
from elastic.group import is_sharded
from elastic.rundir import RunDir
from elastic.versions import save_tensors

RNG = "rng.cpu"
RESIDUAL = "residual."


def save(
    folder: Path, stem: str, optimizer: torch.optim.Optimizer, rank: int,
    residuals: dict[int, torch.Tensor],
) -> dict:  # fmt: skip
    """Write this rank's file. Returns its entry: name, bytes, xxh3."""
    tensors, scalars = {RNG: torch.get_rng_state()}, {}
    tensors |= {f"{RESIDUAL}{index}": each for index, each in residuals.items()}
    for index, param in enumerate(_params(optimizer)):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                local = value.to_local() if is_sharded(value) else value
                tensors[f"{index}.{key}"] = local.contiguous()
            else:
                scalars[f"{index}.{key}"] = value
    path = folder / f"{stem}.{rank}.safetensors"
    temporary = folder / f".{path.name}"
    try:
        save_tensors(tensors, temporary, {"scalars": json.dumps(scalars)})
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
    run: RunDir, pointer: dict, optimizer: torch.optim.Optimizer, rank: int,
    residuals: dict[int, torch.Tensor] | None,
) -> str:  # fmt: skip
    """Set the optimizer's state; if it is the slot's own (`residuals` is a table to be filled),
    the random numbers and the residuals as well.

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
            scalars = json.loads(file.metadata()["scalars"])
        rng = tensors.pop(RNG)
        names = [name for name in tensors if name.startswith(RESIDUAL)]
        left_out = {int(name.removeprefix(RESIDUAL)): tensors.pop(name) for name in names}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        return f"{path.name}: {getattr(error, 'strerror', None) or error}"
    if refused := _restore(optimizer, tensors, scalars):
        return refused
    if residuals is not None:
        torch.set_rng_state(rng)
        residuals |= left_out
    return ""


def _restore(optimizer: torch.optim.Optimizer, tensors: dict, scalars: dict) -> str:
    params = _params(optimizer)
    states: dict[int, dict] = {index: {} for index in range(len(params))}
    for name, value in {**tensors, **scalars}.items():
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) not in states:
            return "it is another optimizer's"
        param = params[int(index)]
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            value = _sharded_like(param, value)
            if value.shape != param.shape:
                return "it is another model's"
        states[int(index)][key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return ""


def _sharded_like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not is_sharded(param):
        return value
    local = value.to(param.to_local().device)
    return type(param.data).from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
