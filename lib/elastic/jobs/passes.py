"""Reconcile passes beside a job, between cron's: the same command, in a process of its own."""

import contextlib
import subprocess
import threading
import time

from elastic.base.environment import elastic_home
from elastic.jobs.plan import AFTER_LEAVE_S
from elastic.run.rundir import RunDir

PASS_S = 60.0  # for a pass
SHARED_S = 30.0  # age of an answer of squeue that many jobs and status share


class Passes:
    """One at a time, in a thread: the next job waits in the queue where there is no cron,
    too."""

    def __init__(self, run: RunDir, every_s: float, first_s: float):
        self._run, self._every_s = run, every_s
        self._at, self._within_s = time.monotonic() + first_s, min(SHARED_S, first_s / 2)
        self._turn, self._is_over = threading.Condition(), False
        self._thread = threading.Thread(target=self._pass_over, daemon=True)
        self._thread.start()

    def soon(self) -> None:
        """A worker has left: look again once its job has had time to end."""
        with self._turn:
            self._at, self._within_s = min(self._at, time.monotonic() + AFTER_LEAVE_S), 0.0
            self._turn.notify()

    def close(self) -> None:
        """Wait for a pass under way; there is no other one."""
        with self._turn:
            self._is_over = True
            self._turn.notify()
        self._thread.join(PASS_S)

    def _pass_over(self) -> None:
        while (within_s := self._wait()) is not None:
            reconcile_now(self._run, within_s)

    def _wait(self) -> float | None:
        """For the next pass's time: how old an answer of the scheduler will do for it."""
        with self._turn:
            while not self._is_over and (wait_s := self._at - time.monotonic()) > 0:
                self._turn.wait(wait_s)
            within_s, self._within_s = self._within_s, min(SHARED_S, self._every_s / 2)
            self._at = time.monotonic() + self._every_s
            return None if self._is_over else within_s


def reconcile_now(run: RunDir, within_s: float = 0.0) -> None:
    """See to the job's successor, or to the end of the run; an answer of the scheduler that
    is `within_s` old will do."""
    command = [str(elastic_home() / "bin" / "elastic-reconcile"), str(run.path)]
    command += [f"--within={within_s:g}"] if within_s else []
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # no memory for a process, say
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PASS_S)
