"""Signals become flags. The only module that installs handlers.

TERM, INT, USR1 and USR2 all mean notice: Slurm sends TERM to the steps of a job that it
preempts, and before a time limit the signal that `slurm.signal` names; a person presses
Ctrl-C. Both USR1 and USR2 count, because NCCL may use USR1, and some sites therefore
send USR2. CONT comes along with TERM, in either order, and needs no handler.
"""

import contextlib
import ctypes
import functools
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from elastic.base.proc import Process
from elastic.base.units import NOTICE_MARGIN_S

KILL_WAIT_S = 30.0  # Slurm's default between TERM and KILL
LATEST_S = 3600.0  # after a notice; a later kill is that of the time limit
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Notice:
    """Set once the scheduler has said that this process will be killed soon.

    While `exit_code` is not None a notice ends the process at once: there is nothing to
    lose yet.
    """

    def __init__(self, exit_code: int | None = None):
        self.exit_code = exit_code
        self.signal_name = ""
        self.since: float | None = None
        self.window_s = KILL_WAIT_S  # from the notice to the kill
        # Asks the scheduler when the kill comes, in seconds since 1970; None: not known.
        self.ask: Callable[[], float | None] | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def __bool__(self) -> bool:
        return self.since is not None

    def left_s(self, now: float) -> float:
        """Seconds until the kill is so near that only the last words can still be said;
        infinite before a notice."""
        if self.since is None:
            return math.inf
        return self.since + self.window_s - NOTICE_MARGIN_S - now

    def has_run_out(self) -> bool:
        """Is no time left? Halfway to the kill this asks the scheduler once, in the
        background: before a time limit there may be more time."""
        now = time.time()
        if self.ask and self.since and now - self.since > self.window_s / 2:
            ask, self.ask = self.ask, None
            threading.Thread(target=self._learn, args=[ask], daemon=True).start()
        return self.left_s(now) < 0

    def _learn(self, ask: Callable[[], float | None]) -> None:
        kill_at = ask()
        # Else the notice came from a pass, which only asks the job to leave.
        if kill_at and kill_at - self.since < LATEST_S:
            self.window_s = kill_at - self.since

    def fileno(self) -> int:
        """Becomes readable at the notice: for select()."""
        return self._reader

    def wait(self, timeout_s: float) -> None:
        """Wait for a notice, at most `timeout_s`. Slurm signals the processes of a step
        one after the other: a child may have left before this process hears of it."""
        select.select([self], [], [], timeout_s)

    def listen(self) -> None:
        """From now on this object handles the notice signals, whatever did before."""
        for number in NOTICES:
            signal.signal(number, self.arrived)

    def arrived(self, number: int, _frame=None) -> None:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        if self.since is None:
            self.since, self.signal_name = time.time(), signal.Signals(number).name
            with contextlib.suppress(OSError):
                os.write(self._writer, b"!")


def install(exit_code: int | None = None) -> Notice:
    """From now on the notice signals set the returned flag, or end the process with
    `exit_code`."""
    notice = Notice(exit_code)
    notice.listen()
    _spare_children()
    return notice


@functools.cache
def _spare_children() -> None:
    """A forked child would take its parent's TERM for a notice, and stay. So it gets the
    default handlers; a child of multiprocessing (Pool, DataLoader) also ignores notices."""
    from multiprocessing.util import register_after_fork

    held = threading.local()

    def hold() -> None:  # signals wait until the child has its own handlers
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
        # multiprocessing's children call ignore_notices() next: until then signals wait.
        held.is_shielded = sys._getframe(1).f_globals["__name__"] == "multiprocessing.popen_fork"

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def forget() -> None:
        for number in NOTICES:
            if isinstance(getattr(signal.getsignal(number), "__self__", None), Notice):
                signal.signal(number, signal.SIG_DFL)
        if not held.is_shielded:
            go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=forget)
    register_after_fork(Notice, lambda _: ignore_notices())


def ignore_notices() -> None:
    """In a process of multiprocessing, whose parent gets the notice, too: it ignores
    notices, but its parent's TERM still ends it. The signals stay blocked in programs
    that it executes: only KILL ends those.

    SIG_IGN would not do: at exit multiprocessing sends TERM to its children, and waits
    for them.
    """
    from multiprocessing import parent_process  # not the server that may have forked this

    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    inherited = {number: signal.getsignal(number) for number in NOTICES}
    parent = getattr(parent_process(), "pid", os.getppid())
    threading.Thread(target=_obey, args=(parent, inherited), daemon=True).start()


def _obey(parent: int, inherited: dict) -> None:
    while True:
        told = signal.sigwaitinfo(NOTICES)
        if told.si_pid != parent and Process.of(parent):
            continue  # a notice
        handler = signal.getsignal(told.si_signo)
        if handler is not signal.SIG_DFL and handler == inherited[told.si_signo]:
            os._exit(0)  # the handler is the parent's: it is not for this child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)  # in this thread alone
        os.kill(os.getpid(), told.si_signo)
        signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
