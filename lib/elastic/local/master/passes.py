"""The reconcile pass between cron's ticks: the same command, in a process of its own."""

import contextlib
import subprocess
import time

from elastic.base.config import Config
from elastic.jobs.plan import AFTER_LEAVE_S
from elastic.jobs.program import PASS_S, pass_command, reconcile_now
from elastic.run.rundir import RunDir

SHARED_S = 30.0  # age of an answer of squeue that many masters and status share


class Reconcile:
    def __init__(self, run: RunDir, config: Config):
        self._run = run
        self._every_s = config.elastic.reconcile_interval_s
        self._within_s = min(SHARED_S, self._every_s / 2)
        self._next = time.monotonic() + self._every_s
        self._process: subprocess.Popen | None = None

    def tick(self) -> None:
        """Start a pass if it is time; never two."""
        if self._process and self._process.poll() is None:
            return
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            command = pass_command(self._run, self._within_s)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            self._within_s = min(SHARED_S, self._every_s / 2)

    def soon(self) -> None:
        """A worker has left: look again once its job has had time to end."""
        self._next = min(self._next, time.monotonic() + AFTER_LEAVE_S)
        self._within_s = 0.0

    def close(self) -> None:
        """Wait for a pass under way."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process:
                self._process.wait(PASS_S)

    def last(self) -> None:
        """After the master's last word: nothing is left pending, and the other mode's
        job is submitted, also where there is no cron."""
        reconcile_now(self._run)
