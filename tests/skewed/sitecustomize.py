"""On PYTHONPATH, this sets a process's clock wrong by what the file $FAKETIME_TIMESTAMP_FILE says.

A stand-in for a node whose clock is off: one machine has one clock, and libfaketime, whose file
this is, stops both Redis's allocator and Python's sleep. time.time() is all that Elastic reads.
"""

import os
import time
from pathlib import Path

_right, _file = time.time, Path(os.environ.get("FAKETIME_TIMESTAMP_FILE", os.devnull))


def _wrong() -> float:
    return _right() + float(_file.read_text() or 0)


time.time = _wrong
