"""One read of the shared filesystem per node: the first process that wants a committed file copies
it into a folder of the node (`local_sgd.node_cache`, say /dev/shm), the others wait for the copy.

    FOLDER/elastic-UID/RUN-HASH/000123/params-00.safetensors

Only for filesystems that do not keep what was read in the node's memory for all processes: most do.
It is a cache: what does not fit, or is damaged, is read from where it belongs. A version's copies
go when somebody copies of the version after the next.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from elastic.durable import check_private, damage
from elastic.errors import ElasticError

COPY_BYTES = 16 << 20


def on_node(path: Path, entry: dict, folder: str) -> Path:
    """The node's copy of RUN/versions/NUMBER/NAME, or `path` itself where there is none."""
    with contextlib.suppress(OSError, ElasticError):
        copy = _folder_of(path, Path(folder)) / path.name
        with open(f"{copy}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if copy.exists() or _copied(path, copy, entry):
                return copy
    return path


def _folder_of(path: Path, folder: Path) -> Path:
    """Of this version, made if need be; earlier versions' go, but for the one before."""
    own = folder / f"elastic-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    check_private(own)
    version = path.parent
    run = own / hashlib.sha256(str(version.parent.resolve()).encode()).hexdigest()[:16]
    target = run / version.name
    if not target.exists():
        target.mkdir(parents=True, exist_ok=True)
        for other in run.iterdir():
            if int(other.name) < int(version.name) - 1:
                shutil.rmtree(other, ignore_errors=True)
    return target


def _copied(path: Path, copy: Path, entry: dict) -> bool:
    """Was it copied, whole?"""
    partial = copy.with_name(f".{copy.name}")
    try:
        with path.open("rb") as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
        if damage(partial, entry):
            return False
        partial.rename(copy)
        return True
    finally:
        partial.unlink(missing_ok=True)
