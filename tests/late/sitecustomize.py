"""On PYTHONPATH, this makes a process remember for LATE_S that a name was not there.

A stand-in for NFS, whose client believes so until it asks for the folder's attributes again
(acdirmax: a minute). What is in a file that is there is always new, as it is on NFS.
"""

import os
import time
from pathlib import Path

LATE_S = 12.0
FOLDERS = ("masters", "commits")
_exists, _read_bytes, _link = Path.exists, Path.read_bytes, os.link
_missed: dict[str, float] = {}  # name -> when it was looked for in vain


def _is_hidden(path: Path) -> bool:
    return time.monotonic() - _missed.get(str(path), -LATE_S) < LATE_S


def _late_exists(path: Path, **options) -> bool:
    found = not _is_hidden(path) and _exists(path, **options)
    if not found and path.parent.name in FOLDERS:
        _missed.setdefault(str(path), time.monotonic())
        if not _is_hidden(path):
            _missed[str(path)] = time.monotonic()
    return found


def _late_read_bytes(path: Path) -> bytes:
    if _is_hidden(path):
        raise FileNotFoundError(str(path))
    return _read_bytes(path)


def _link_of_ours(source, target, **options) -> None:
    _missed.pop(str(target), None)  # whoever makes a name asks the server
    _link(source, target, **options)


Path.exists, Path.read_bytes, os.link = _late_exists, _late_read_bytes, _link_of_ours
