"""Reconcile passes beside a job and at its end, between cron's: the same command, in a
process of its own."""

import contextlib
import subprocess
import threading

from elastic.base.environment import elastic_home
from elastic.jobs.plan import AFTER_LEAVE_S
from elastic.run.rundir import RunDir

PASS_S = 60.0  # for a pass
SHARED_S = 30.0  # age of an answer of squeue that many jobs and status share


class Passes:
    """A thread that runs one pass after another, so that the next job waits in the queue
    even where there is no cron."""

    def __init__(self, run: RunDir, every_s: float, first_s: float):
        self._run, self._every_s = run, every_s
        self._has_left, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pass_over, args=[first_s], daemon=True)
        self._thread.start()

    def soon(self) -> None:
        """A worker has left: look again once its job has had time to end."""
        self._has_left.set()

    def close(self) -> None:
        """Wait for a pass under way; start no other."""
        self._is_over.set()
        self._has_left.set()
        self._thread.join(PASS_S)

    def _pass_over(self, wait_s: float) -> None:
        while True:
            within_s, after_s = min(SHARED_S, wait_s / 2), 0.0
            if self._has_left.wait(wait_s):
                self._has_left.clear()
                within_s, after_s = 0.0, AFTER_LEAVE_S
            if self._is_over.wait(after_s):
                return
            reconcile_now(self._run, within_s)
            wait_s = self._every_s


def reconcile_now(run: RunDir, within_s: float = 0.0) -> None:
    """Run one pass, for the job's successor or for the end of the run. An answer of the
    scheduler that is `within_s` old will do."""
    command = [str(elastic_home() / "bin" / "elastic-reconcile"), str(run.path)]
    command += [f"--within={within_s:g}"] if within_s else []
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # no memory for a process, say
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PASS_S)
