"""On PYTHONPATH, this makes a process remember for LATE_S that a name was not there.

A stand-in for NFS, whose client believes so until it asks for the folder's attributes again
(acdirmax: a minute). What is in a file that is there is always new, as it is on NFS. A file
`missed` in the run's folder tells that a name was looked for in vain, and remembered.
"""

import os
import time
from pathlib import Path

LATE_S = 12.0
FOLDERS = ("masters", "commits")
_stat, _read_bytes, _link = os.stat, Path.read_bytes, os.link
_missed: dict[str, float] = {}  # name -> when it was looked for in vain


def _is_hidden(path) -> bool:
    return time.monotonic() - _missed.get(str(path), -LATE_S) < LATE_S


def _late_stat(path, **options) -> os.stat_result:
    if _is_hidden(path):
        raise FileNotFoundError(str(path))
    try:
        return _stat(path, **options)
    except FileNotFoundError:
        if Path(str(path)).parent.name in FOLDERS:
            _missed[str(path)] = time.monotonic()
            (Path(path).parents[1] / "missed").touch()
        raise


def _late_read_bytes(path: Path) -> bytes:
    if _is_hidden(path):
        raise FileNotFoundError(str(path))
    return _read_bytes(path)


def _link_of_ours(source, target, **options) -> None:
    _missed.pop(str(target), None)  # whoever makes a name asks the server
    _link(source, target, **options)


os.stat, Path.read_bytes, os.link = _late_stat, _late_read_bytes, _link_of_ours
