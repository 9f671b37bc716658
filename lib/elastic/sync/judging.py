"""What the end of the ranks of a synchronous job means. Pure."""

from elastic.base.errors import Exit
from elastic.jobs.history import End, end_of_run, name_of
from elastic.run.records import Outcome


def judge(
    code: int, error: str, closing: str, told: str, notice: str, fenced_by: int, is_own: bool
) -> End:
    """The outcome, and why, once the ranks of an attempt have ended. An attempt that has
    crashed need not be the end of the job.

    `code` is as Popen or a shell writes it; `error`: the exception that they died of, if
    it is known; `closing`: why the run does not go on in this mode, as RunDir says;
    `told`: the same, once run.command was told, which then ends as after a notice;
    `notice`: the signal; `fenced_by`: the attempt that has the run now, 0 if it is still
    this one; `is_own`: the ranks are run.command's.
    """
    is_done = closing == "done"
    if told and code in (Exit.OK, Exit.TRY_AGAIN) and not is_done:
        return End(Outcome.STOPPED, f"the run is {told}")
    if code == Exit.OK and is_own and not is_done and notice:
        # Many save and leave with 0; one that was done says so again.
        return End(Outcome.YIELDED, "notice, and the ranks ended with 0")
    if code == Exit.OK and (is_own or is_done):
        return End(Outcome.DONE, "run done")
    if code != Exit.OK and fenced_by:  # whatever the ranks died of
        return End(Outcome.FENCED, f"attempt {fenced_by} has the run now")
    if code == Exit.TRY_AGAIN:
        return End(Outcome.YIELDED, f"notice: {notice}" if notice else "the ranks left on a notice")
    if not closing and code == Exit.DO_NOT_RESTART and not is_own:
        closing = "going on in sync mode again"
    if closing:
        return end_of_run(closing)
    ended = f"the ranks ended with {name_of(code)}"
    if notice and not 0 <= code <= 128:  # by a signal
        return End(Outcome.YIELDED, f"notice, and {ended}")
    return End(Outcome.CRASHED, f"{error} ({ended})" if error else ended)
