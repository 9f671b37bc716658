"""How a job ends: the outcomes that exit records name, and the exit codes of the
programs. Pure."""

from dataclasses import dataclass

from elastic.base.errors import Exit
from elastic.jobs.history import MASTER, TRAINER, WORKER
from elastic.run.records import EventKind, Outcome

EXIT_CODES = {  # others: 0
    MASTER: {Outcome.FENCED: Exit.DO_NOT_RESTART, Outcome.FAILED: Exit.ERROR},
    WORKER: {Outcome.STOPPED: Exit.DO_NOT_RESTART, Outcome.FAILED: Exit.ERROR},
    TRAINER: {Outcome.STOPPED: Exit.DO_NOT_RESTART, Outcome.FENCED: Exit.DO_NOT_RESTART,
              Outcome.FAILED: Exit.ERROR},
}  # fmt: skip
# For all others: leave.
EVENTS = {Outcome.YIELDED: EventKind.PREEMPT, Outcome.FAILED: EventKind.LOST}


@dataclass(frozen=True)
class End:
    """How a job, or one attempt of it, has ended; `detail`: the last words of what
    failed."""

    outcome: Outcome
    reason: str
    detail: str = ""


def end_of_run(closing: str) -> End:
    """Of a job whose run does not go on; `closing`: why, as RunDir says."""
    outcome = Outcome.DONE if closing == "done" else Outcome.STOPPED
    return End(outcome, f"the run is {closing}")
