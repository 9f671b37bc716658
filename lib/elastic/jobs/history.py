"""What is known about the jobs of a run, how it grows from pass to pass, and how a job
says that it ends. Pure.

A listing of the scheduler is a moment's view, Slurm forgets ended jobs within minutes,
and a job's own exit record says nothing if it was killed before it could write. Memory
joins the three: which jobs existed at the last pass, how they ended, which submissions
may or may not have succeeded.

- A job exists unless its state is a known ended one; a word never seen before is no end.
- A job is its name (role, slot) and its id; ids alone are reused after a controller
  crash.
- Absence from a listing is an end only for a job old enough to be missed
(`LISTING_LAG_S`). - Every end becomes news exactly once, and is kept while it can matter.
"""

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import format_exception

from elastic.base.errors import ElasticError, Exit, TryAgain
from elastic.run.records import ORDERLY, Outcome
from elastic.run.wording import EventKind

MASTER = "master"
WORKER = "worker"
TRAINER = "trainer"  # the one job of a run in sync mode
ALONE = (MASTER, TRAINER)  # roles of which a run has one

LOST_STATES = frozenset({"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "TIMEOUT"})
ENDED_STATES = LOST_STATES | {"CANCELLED", "COMPLETED", "ENDED", "FAILED", "OUT_OF_MEMORY"}
QUEUED_STATES = frozenset({"EXPEDITING", "PENDING", "REQUEUED", "REQUEUE_FED"})
QUEUED_STATES |= {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
STARTED_STATES = frozenset({"CONFIGURING", "RUNNING", "SIGNALING", "STOPPED", "SUSPENDED"})
LEAVING_STATES = frozenset({"COMPLETING", "STAGE_OUT"})
# Holds after which a job never starts by itself (compared without blanks, underscores and
# case). A hold that the user or an admin asked for is respected.
BROKEN_HOLDS = ("dependencyneversatisfied", "jobholdmaxrequeue", "launchfailedrequeuedheld",
                "launchfailurelimit", "wasdeleted")  # its reservation

LISTING_LAG_S = 30.0  # a job this young may be missing from a listing that is a little behind
CANCEL_AGAIN_S = 60.0  # how long a cancelled job may take to go
CLOCK_SKEW_S = 300.0  # an exit record older than its job by more is another job's
RECENT_S = 1800.0  # how long an end counts for its node
WORKED_S = 1800.0  # a job that lasted this long, and took a step, was not part of a crash loop

BAD = {Outcome.FAILED: Exit.ERROR, Outcome.KILLED: Exit.TRY_AGAIN}
EXIT_CODES = {  # of a role, by outcome; all others: 0
    MASTER: {**BAD, Outcome.FENCED: Exit.DO_NOT_RESTART},
    WORKER: {**BAD, Outcome.STOPPED: Exit.DO_NOT_RESTART},
    TRAINER: {**BAD, **dict.fromkeys((Outcome.STOPPED, Outcome.FENCED), Exit.DO_NOT_RESTART)},
}
# The event that tells of an outcome; of all others "leave" tells.
EVENTS = {**dict.fromkeys(BAD, EventKind.LOST), Outcome.YIELDED: EventKind.PREEMPT}


def has_ended(state: str) -> bool:
    """True for a known ended state only: `CANCELLED by 0` and `COMPLETED+` are, `FOO` is
    not."""
    return _word(state) in ENDED_STATES


class _Placed:
    """Something with a role and a slot."""

    @property
    def place(self) -> tuple[str, int]:
        """What at most one job may occupy: a worker's slot, or the one master or
        trainer."""
        return (self.role, 0 if self.role in ALONE else self.slot)

    @property
    def key(self) -> tuple[str, str, int]:
        """Which job it is (a submission that is unsure has no id, and so no key)."""
        return (self.job_id, self.role, self.slot)


@dataclass(frozen=True)
class Job(_Placed):
    """A job as a listing showed it, or as it was submitted a moment ago, and what memory
    knows of it. Times are seconds since the epoch; node "" before the start."""

    job_id: str
    role: str
    slot: int
    state: str
    reason: str = ""
    submitted_at: float = 0.0
    started_at: float | None = None
    node: str = ""
    cancelled_at: float | None = None  # when reconcile asked it to leave
    # The outcome that it has written itself: its ranks have left, whatever `state` says.
    over: str = ""
    ended_at: float | None = None
    limit_at: float | None = None  # when its time limit ends it, if it runs
    is_headless: bool = False  # the node of its script has left it: nothing will end it
    asked: tuple[int, int] | None = None  # of a trainer: the fewest and the most GPUs
    grows_until: float = 0.0  # it waits for the GPUs of a growth, but not for longer
    run: str = ""

    @property
    def ended(self) -> bool:
        return has_ended(self.state)

    @property
    def queued(self) -> bool:
        return _word(self.state) in QUEUED_STATES

    @property
    def started(self) -> bool:
        return _word(self.state) in STARTED_STATES

    @property
    def broken_hold(self) -> str:
        """The reason for which this job will never start by itself, or ""."""
        plain = self.reason.replace("_", "").replace(" ", "").lower()
        return self.reason if any(hold in plain for hold in BROKEN_HOLDS) else ""

    def leaving(self, now: float) -> bool:
        """On its way out: nothing more needs to be done about it for the moment."""
        asked = self.cancelled_at is not None and now - self.cancelled_at < CANCEL_AGAIN_S
        return asked or _word(self.state) in LEAVING_STATES


@dataclass(frozen=True)
class Ended(_Placed):
    """How a job ended. Outcomes of the exit record, and: lost, killed, cancelled, held,
    refused."""

    job_id: str
    role: str
    slot: int
    outcome: str
    at: float  # when a pass noticed
    node: str = ""
    submitted_at: float = 0.0
    reason: str = ""
    detail: str = ""
    worked: bool = False  # it did some of what it was there for
    started_at: float | None = None
    ended_at: float = 0.0
    unfit: tuple[str, ...] = ()  # nodes of which the job says that nobody can train there

    @property
    def crashed(self) -> bool:
        return self.outcome == Outcome.FAILED


@dataclass(frozen=True)
class UnsureSubmission(_Placed):
    """A submission whose client saw an error, or died: a job may or may not turn up."""

    role: str
    slot: int
    until: float


@dataclass(frozen=True)
class Memory:
    """What one pass leaves to the next. Ends of jobs submitted before `born` do not
    count."""

    born: float
    jobs: tuple[Job, ...] = ()
    ended: tuple[Ended, ...] = ()  # oldest first
    unsure: tuple[UnsureSubmission, ...] = ()
    closing: str = ""  # "", or why nothing is submitted any more: done, failed, stopped
    closing_since: float = 0.0  # when `closing`, or `mode`, last changed
    # A pause after the scheduler took no more jobs of this run, and why. It holds from one
    # place on: a site may allow so many jobs, and those for the places before may be had.
    later_until: float = 0.0
    later_reason: str = ""
    later_role: str = ""  # the first place of the pause
    later_slot: int = 0
    later_host: str = ""  # the host that may not submit; "": none may
    later_s: float = 0.0  # how long the last refusal's pause was; the next is twice as long
    mode: str = ""
    # Passes in a row that found more GPUs for a trainer at work; negative: to be left out.
    spare_passes: int = 0
    missed_growths: int = 0  # restarts for more GPUs that did not come free
    # Sync mode: the most GPUs to ask for, where a limit of Slurm's allows no more; 0: --max.
    cap_gpus: int = 0
    cap_until: float = 0.0
    said: tuple[str, ...] = ()  # the reasons for empty places that the last pass told

    def is_closed(self, closing: str) -> bool:
        """Is the run over for this reason, and no job of it left?"""
        return self.closing == closing and not (self.jobs or self.unsure)


def enter(memory: Memory, closing: str, now: float, mode: str = "") -> Memory:
    """Note what the run is wanted to do. One that is started again starts with a clean
    record."""
    if mode not in ("", memory.mode):
        memory = replace(memory, mode=mode, closing_since=now)
    if closing == memory.closing:
        return memory
    memory = replace(memory, closing=closing, closing_since=now)
    return memory if closing else replace(memory, born=now, ended=(), missed_growths=0)


def gone(memory: Memory, listed: Sequence[Job], now: float) -> list[Job]:
    """Jobs whose end is news, with what was last known of them and the state they ended
    in."""
    known = {job.key: job for job in memory.jobs}
    rows = {row.key: row for row in listed}
    told = {(*end.key, end.submitted_at) for end in memory.ended}
    news = [replace(job, state="VANISHED") for key, job in known.items()
            if key not in rows and now - job.submitted_at >= LISTING_LAG_S]
    for key, row in rows.items():
        if row.ended and key in known:
            news.append(_with_memory(row, known[key]))
        elif row.ended and (*key, row.submitted_at) not in told and row.submitted_at >= memory.born:
            # It is in no memory and never had a node: a refused sbatch may leave such a job.
            was_refused = _word(row.state) == "FAILED" and not row.node
            news.append(replace(row, state="REFUSED") if was_refused else row)
    return news


def learn(memory: Memory, listed: Sequence[Job], endings: Sequence[Ended], now: float,
          keep: int) -> Memory:
    """The next memory: jobs that exist, and how the `gone` ones ended (`keep` or more per
    slot)."""
    known = {job.key: job for job in memory.jobs}
    rows = {row.key for row in listed}
    jobs = [_with_memory(row, known.get(row.key)) for row in listed if not row.ended]
    jobs += [j for j in memory.jobs if j.key not in rows and now - j.submitted_at < LISTING_LAG_S]
    old = known.keys() | {end.key for end in memory.ended}
    arrived = {each.place for each in (*jobs, *endings) if each.key not in old}
    unsure = tuple(u for u in memory.unsure if u.until > now and u.place not in arrived)
    kept: list[Ended] = []
    count: dict[tuple[str, int], int] = defaultdict(int)
    for end in reversed((*memory.ended, *endings)):
        count[end.place] += 1
        is_listed = end.key in rows  # forgotten, it would be news again
        if is_listed or now - end.at < RECENT_S or count[end.place] <= keep:
            kept.append(end)
    return replace(memory, jobs=tuple(jobs), ended=tuple(reversed(kept)), unsure=unsure)


def ending(job: Job, record: Mapping | None, now: float) -> Ended:
    """How a `gone` job ended: by its exit record, else by the state it was last seen
    in."""
    record = _own(job, record)
    outcome, reason = _outcome(job, record)
    age_s, ended_at = now - job.started_at if job.started_at else 0.0, now
    if record.get("state") == "ended":
        ended_at = record.get("time", 0.0)
        age_s = ended_at - record.get("started", ended_at)
    # None: nobody knows. Agents say their steps alone, and so did launchers of older versions.
    progressed = job.role == MASTER or record.get("progressed", record.get("steps"))
    # It is no proof of work that the job is old: a hang at the first step is found late.
    is_idle = outcome == Outcome.FAILED and progressed in (False, 0)
    said = record.get("outcome", "") if outcome == Outcome.CANCELLED else outcome
    return Ended(
        *(job.job_id, job.role, job.slot, outcome, now),
        node=str(record.get("node") or job.node),
        submitted_at=job.submitted_at, started_at=job.started_at,
        reason=reason, detail=str(record.get("detail") or ""),
        unfit=tuple(map(str, record.get("unfit") or ())),
        worked=(age_s >= WORKED_S and not is_idle) or (bool(progressed) and said in ORDERLY),
        ended_at=job.ended_at or ended_at,
    )


def said_at_end(job: Job, record: Mapping) -> str:
    """The outcome that this very job has written, or "" if it has not ended."""
    own = _own(job, record)
    return str(own.get("outcome", "ended")) if own.get("state") == "ended" else ""


def _own(job: Job, record: Mapping | None) -> Mapping:
    """`record` if this very job wrote it: its id may have been another job's before."""
    if not record or (record.get("role"), record.get("slot")) != (job.role, job.slot):
        return {}
    return record if record.get("time", 0.0) >= job.submitted_at - CLOCK_SKEW_S else {}


def _outcome(job: Job, record: Mapping) -> tuple[str, str]:
    state, held = _word(job.state), job.broken_hold
    said = record.get("outcome", "") if record.get("state") == "ended" else ""
    is_cancelled = job.cancelled_at is not None or _cancelled_by_owner(job, said, bool(record))
    if said and not (is_cancelled and said in (Outcome.FAILED, Outcome.YIELDED)):
        return said, str(record.get("reason") or said)
    if is_cancelled:
        return (Outcome.HELD, held) if held else (Outcome.CANCELLED, "cancelled")
    if state in LOST_STATES:
        return Outcome.LOST, state
    if state == "REFUSED":
        return Outcome.REFUSED, job.reason
    if state == "OUT_OF_MEMORY":
        return Outcome.FAILED, "killed: out of memory"
    if record:
        return Outcome.KILLED, f"it left no word ({state})"
    why = f": {job.reason}" if job.reason not in ("", "None") else ""
    return Outcome.FAILED, f"it ended before it could start ({state}{why})"


def _cancelled_by_owner(job: Job, said: str, has_record: bool) -> bool:
    """No preemption ends in the state CANCELLED. A failed prolog does, and its job had a
    node."""
    had_node = bool(job.started_at and job.node)
    is_clear = said == Outcome.YIELDED or not (has_record or had_node)
    return _word(job.state) == "CANCELLED" and is_clear


def _with_memory(row: Job, known: Job | None) -> Job:
    """A listing's row, with what only memory knows of the job. (Slurm forgets the reason
    and the node of a job that has ended.)"""
    if known is None:
        return row
    reason = known.reason if row.ended and known.reason else row.reason
    return replace(row, reason=reason, cancelled_at=known.cancelled_at, node=row.node or known.node,
                   started_at=row.started_at or known.started_at, asked=known.asked,
                   grows_until=known.grows_until)


def _word(state: str) -> str:
    return state.split()[0].rstrip("+") if state.strip() else ""


# ---- how a job ends, in its own words


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
    name = {each.value: each.name for each in signal.Signals}.get(-exit_code, -exit_code)
    return f"code {exit_code}" if exit_code >= 0 else f"signal {name}"


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


def judge(
    code: int, error: str, closing: str, told: str, notice: str, fenced_by: int, is_own: bool
) -> End:
    """The end of an attempt of a synchronous job, once its ranks have ended. An attempt
    that has crashed need not be the end of the job.

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
        why = f"notice: {notice}" if notice else "the ranks left on a notice"
        return End(Outcome.YIELDED, why)
    if not closing and code == Exit.DO_NOT_RESTART and not is_own:
        closing = "going on in sync mode again"
    if closing:
        return end_of_run(closing)
    ended = f"the ranks ended with {name_of(code)}"
    if notice and not 0 <= code <= 128:  # by a signal
        return End(Outcome.YIELDED, f"notice, and {ended}")
    return End(Outcome.CRASHED, f"{error} ({ended})" if error else ended)
