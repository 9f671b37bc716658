"""How a job ends: the outcomes that exit records name, and the exit codes of the
programs. Pure."""

import signal
from dataclasses import dataclass
from traceback import format_exception

from elastic.base.errors import ElasticError, Exit, TryAgain
from elastic.jobs.history import MASTER, TRAINER, WORKER
from elastic.run.records import Outcome
from elastic.run.wording import EventKind

BAD = {Outcome.FAILED: Exit.ERROR, Outcome.KILLED: Exit.TRY_AGAIN}
EXIT_CODES = {  # of a role, by outcome; all others: 0
    MASTER: {**BAD, Outcome.FENCED: Exit.DO_NOT_RESTART},
    WORKER: {**BAD, Outcome.STOPPED: Exit.DO_NOT_RESTART},
    TRAINER: {**BAD, **dict.fromkeys((Outcome.STOPPED, Outcome.FENCED), Exit.DO_NOT_RESTART)},
}
# The event that tells of an outcome; of all others "leave" tells.
EVENTS = {**dict.fromkeys(BAD, EventKind.LOST), Outcome.YIELDED: EventKind.PREEMPT}


@dataclass(frozen=True)
class End:
    """How a job, or one attempt of it, has ended; `detail`: the last words of what
    failed; `unfit`: the nodes on which a rank found that it cannot train there."""

    outcome: Outcome
    reason: str
    detail: str = ""
    unfit: tuple[str, ...] = ()


def name_of(exit_code: int) -> str:
    """How a process ended, in words: "code 1" or "signal SIGKILL" (negative codes)."""
    return f"code {exit_code}" if exit_code >= 0 else f"signal {signal.Signals(-exit_code).name}"


def end_of_run(closing: str) -> End:
    """The end of a job whose run does not go on; `closing`: why, as RunDir says."""
    outcome = Outcome.DONE if closing == "done" else Outcome.STOPPED
    return End(outcome, f"the run is {closing}")


def end_of_error(error: Exception, role: str, has_notice: bool) -> End:
    """The end of a program that an error has ended. `detail` is the way out, or the
    traceback of an error that nobody foresaw.

    Silence is no crash of the user's program. But a master whose Redis is of no use may
    never have another one: that has to come to an end.
    """
    is_silence = isinstance(error, TryAgain) and role != MASTER
    outcome = Outcome.KILLED if is_silence else Outcome.FAILED
    outcome = Outcome.YIELDED if has_notice else outcome
    if isinstance(error, ElasticError):
        return End(outcome, error.what, error.hint)
    return End(outcome, f"{type(error).__name__}: {error}", "".join(format_exception(error)))
