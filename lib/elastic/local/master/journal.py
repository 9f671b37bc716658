"""What a master logs and writes, with patience.

A full disk does not end the run: the master waits, and goes on when there is space again.
"""

import time
from collections.abc import Callable

from elastic.base.durable import STUCK_S
from elastic.base.errors import ElasticError
from elastic.base.signals import Notice
from elastic.run.rundir import RunDir


class Leaving(ElasticError):
    """A notice came while the master was waiting for something."""


class Journal:
    """What the master logs and writes. `meanwhile` is called again and again while there
    is no space. The master sets `least_bytes` with each version, and tells `reason` to
    whoever asks Redis."""

    def __init__(self, run: RunDir, notice: Notice, meanwhile: Callable):
        self.run, self.notice = run, notice
        self.reason = ""  # why nothing can be written, as of the last look
        self.least_bytes = run.config().checkpoint.min_free_bytes  # that have to be free
        self._meanwhile = meanwhile
        self._last_line = ""

    def say(self, text: str) -> None:
        """Log a line, unless it is the same as the one before."""
        if text != self._last_line:
            self._last_line = text
            print(f"master  {text}", flush=True)

    def written(self, write: Callable, *args):
        """What `write(*args)` returns, once the disk takes it."""
        while True:
            try:
                return write(*args)
            except OSError as error:
                self.run.event("disk", reason=f"not written: {error.strerror}")
                self.wait_for_space(f"waiting to write to {self.run.path}: {error.strerror}")

    def wait_for_space(self, refused: str = "") -> None:
        """Return when there is space. `refused`: what a write has found, though the
        filesystem may say that there is some (a quota). Raises Leaving at a notice."""
        self.reason = self.run.shortage(self.least_bytes) or refused
        while self.reason:
            if self.notice:
                raise Leaving(f"notice: {self.notice.signal_name}, while {self.reason}")
            self.say(self.reason)
            self._meanwhile()
            time.sleep(STUCK_S)
            self.look_for_space()

    def look_for_space(self) -> None:
        """Note in `reason` why nothing can be written, or ""."""
        self.reason = self.run.shortage(self.least_bytes)
