"""What the end of the ranks of a synchronous job means. Pure."""

from dataclasses import dataclass

from elastic.base.errors import Exit
from elastic.jobs.ending import End, end_of_run
from elastic.run.records import Outcome


@dataclass(frozen=True)
class Facts:
    """Of the job and its run, once the ranks of an attempt have ended."""

    code: int  # as Popen or a shell writes it
    left: str  # the same in words
    error: str  # the exception that they died of, if it is known
    closing: str  # why the run does not go on in this mode, as RunDir says
    told: str  # … as run.command has been told: then it ends like after a notice
    notice: str  # the signal
    attempt: int
    newest_attempt: int
    is_own: bool  # the ranks are run.command's


def judge(facts: Facts) -> End:
    """The outcome, and why. An attempt that crashed need not be the end of the job."""
    code, is_done, closing = facts.code, facts.closing == "done", facts.closing
    if facts.told and code in (Exit.OK, Exit.TRY_AGAIN) and not is_done:
        return End(Outcome.STOPPED, f"the run is {facts.told}")
    if code == Exit.OK and facts.is_own and not is_done and facts.notice:
        # Many save and leave with 0; one that was done says so again.
        return End(Outcome.YIELDED, "notice, and the ranks ended with 0")
    if code == Exit.OK and (facts.is_own or is_done):
        return End(Outcome.DONE, "run done")
    if code != Exit.OK and facts.newest_attempt > facts.attempt:  # whatever its ranks died of
        return End(Outcome.FENCED, f"a higher attempt than {facts.attempt} has the run")
    if code == Exit.TRY_AGAIN:
        notice = f"notice: {facts.notice}" if facts.notice else "the ranks left on a notice"
        return End(Outcome.YIELDED, notice)
    if not closing and code == Exit.DO_NOT_RESTART and not facts.is_own:
        closing = "going on in sync mode again"
    if closing:
        return end_of_run(closing)
    ended = f"the ranks ended with {facts.left}"
    if facts.notice and not 0 <= code <= 128:  # by a signal
        return End(Outcome.YIELDED, f"notice, and {ended}")
    return End(Outcome.CRASHED, f"{facts.error} ({ended})" if facts.error else ended)
