"""One reconcile pass, safe at any time: observe -> plan -> act, for every run it is
given.

Cron, the master and people run the same pass, also at the same time. A run belongs to the
pass that holds the lock on RUN/reconcile.lock (a later one skips it); the lock is taken
before the scheduler is asked, so that no pass acts on a view older than another pass's
actions. The scheduler is the one that the runs were submitted to (cron's environment
leads to none), asked once for all of them. A pass that is not urgent takes an answer of
`within_s` ago, which every submission and every cancellation makes void: what is missing
from a listing so old is missed only so much later. If the scheduler does not answer, that
is unknown, and nothing is done.

RUN/reconcile.json carries history.Memory from pass to pass. Before every submission the
pass notes that it may happen, so that a pass that dies in the middle of it submits
nothing twice. What has been said is kept there too: a pass in which nothing changes says
nothing, as cron likes it.
"""

import contextlib
import functools
import os
import re
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from elastic.base.config import Config
from elastic.base.durable import lock, read_json, to_json, write_atomic
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.network import node_name
from elastic.jobs import cadence, history, sched, sizing
from elastic.jobs.history import MASTER, TRAINER, WORKER, Ended, Job, Memory, UnsureSubmission
from elastic.jobs.plan import CANCEL, FAIL, GROW, SUBMIT, WAIT, Action, World, bad_nodes, plan
from elastic.jobs.sched import JobSpec, Refused, RetryLater
from elastic.run.records import Outcome, restored
from elastic.run.rundir import Control, RunDir, check_answers, check_name

# A submission may turn up this long after its pass was killed (more than LISTING_LAG_S),
# or after its answer was lost: the controller may hang for minutes.
DYING_S, UNSURE_S = 60.0, 600.0
# A job that is COMPLETING keeps its place this long after its last word, because one more
# job could exceed a site's limit of submitted jobs.
EPILOG_S = 120.0
WORDLESS_S = 300.0  # the same, from the end of a job without a last word: it may be writing yet
# Between tries when a submit limit is reached, or after a first refusal; most, after many.
LATER_S, MOST_LATER_S = 60.0, 1800.0
LOCK = "reconcile.lock"  # its time is that of the last pass on the run's own cluster
PERSON_S = 5.0  # for which a pass that a person asked for waits for the lock
RESTART_S = 60.0  # what a restart is taken to cost before one has been seen
SPARE_PASSES = 3  # passes in a row that must find more GPUs before a job is started anew
# Passes that look for no GPUs after some that were found did not come free: 30, then 60, …
NO_GROWTH_PASSES = 30
CAP_S = 3600.0  # for which a run asks for no more GPUs than a limit has allowed
# A limit that fewer GPUs may meet. (Of nodes Slurm itself takes fewer.)
TOO_MANY = re.compile("(QOS|Assoc)(Grp|Max)(GRES|Cpu|CPU|Mem|Billing)(?!.*Minutes)")
GROWS_S = 180.0  # until the nodes that a job has left are free: they have their epilogs


@dataclass
class RunReport:
    """What a pass did about one run (or, dry, would do), and why it left slots empty."""

    run: str
    actions: list[Action] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass
class PassReport:
    """What a pass did. `unknown`: why it knew nothing of some runs, and left them
    alone."""

    runs: list[RunReport] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unknown: str | None = None
    unknown_is_new: bool = False

    def lines(self) -> list[str]:
        """What is worth a mail: errors, what was done, and reasons that have changed."""
        unknown = [f"nothing done: {self.unknown}"] if self.unknown_is_new else []
        done = [f"{report.run}: {line}" for report in self.runs for line in report.lines]
        return self.errors + unknown + done


def run_pass(runs: Sequence[RunDir], now: float, dry_run: bool = False,
             scheduler: Callable = sched.open_scheduler,
             within_s: float = 0.0, wait_s: float = 0.0) -> PassReport:
    """One pass over `runs`. `dry_run` only plans: it takes no lock and writes nothing.
    The scheduler's answer of `within_s` ago will do. A run that another pass is at work
    on is skipped; with `wait_s` it is unknown, if that pass takes longer."""
    report = PassReport()
    with contextlib.ExitStack() as locks:
        passes: dict[tuple[str, str], list[_Pass]] = defaultdict(list)
        for run in runs:
            with _errors_of(run, report):
                check_answers(run)
                check_name(run)
                if not _is_closed(run) and (dry_run or locks.enter_context(_lock(run, wait_s))):
                    one = _Pass(run, now, dry_run, within_s)
                    passes[sched.cluster_of(one.config.run.scheduler, one.environment)].append(one)
        for mine in passes.values():
            first = mine[0]
            with _errors_of(first.run, report):
                _pass_over(mine, scheduler(first.config, first.environment), report)
    return report


def _pass_over(passes: Sequence["_Pass"], scheduler, report: PassReport) -> None:
    try:
        jobs = scheduler.jobs(passes[0].within_s)
    except TryAgain as silence:
        report.unknown = report.unknown or str(silence)
        for one in passes if not isinstance(silence, sched.Elsewhere) else ():
            with _errors_of(one.run, report):
                report.unknown_is_new |= one.left_unknown()
        return
    for one in passes:
        with _errors_of(one.run, report):
            report.runs.append(one.report)
            one.observe(jobs)
            try:
                one.act(scheduler)
            finally:
                one.save()


@contextlib.contextmanager
def _errors_of(run: RunDir, report: PassReport) -> Iterator[None]:
    """One broken run directory must not keep the others waiting."""
    try:
        yield
    except TryAgain as silence:
        why = filter(None, [report.unknown, f"{run.name}: {silence}"])
        report.unknown, report.unknown_is_new = "; ".join(why), True
    except (ElasticError, OSError) as error:
        report.errors.append(f"{run.name}: error: {error}")
    except Exception as error:  # what no reader has foreseen
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.errors.append(f"{run.name}: error: {error!r}, in {where.name}: a fault of Elastic")


@contextlib.contextmanager
def _lock(run: RunDir, wait_s: float) -> Iterator[bool]:
    """True if this pass alone has the run now, or within `wait_s`; if not even then,
    TryAgain. The kernel drops the lock of a killed pass.

    Where the filesystem has no locks (Lustre without -o flock), two passes at once may
    submit a job twice: `singleton` keeps one of the two from starting, and the next pass
    cancels it.
    """
    with os.fdopen(os.open(run.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        is_mine = lock(file.fileno(), wait_s)
        if wait_s and not is_mine:
            raise TryAgain("another pass is at work, and may know nothing of this yet")
        yield is_mine


# ---- what a pass leaves to the next


def remembered(run: RunDir, now: float) -> Memory:
    """What the newest pass over the run, of whatever version, has left to the next. A
    lost or damaged file only costs what is in it: jobs are known by their names. Raises
    TryAgain if it cannot be read now."""
    path = run.path / "reconcile.json"
    try:
        notes = read_json(path) or {}
        return restored(Memory, {"born": now, **restored(dict, notes.get("memory", {}))})
    except TryAgain:
        raise
    except (ElasticError, ValueError):
        # Not born now: a refusal would end a run that is new.
        return Memory(born=path.stat().st_mtime)


def since_last(run: RunDir) -> float:
    """Seconds since a pass last looked at the run; 0 if none ever has."""
    with contextlib.suppress(FileNotFoundError):
        return max(0.0, time.time() - (run.path / LOCK).stat().st_mtime)
    return 0.0


def _is_closed(run: RunDir) -> bool:
    return bool(closing := run.closing()) and remembered(run, 0.0).is_closed(closing)


# ---- one run


class _Pass:
    """A pass over one run, whose lock is held."""

    def __init__(self, run: RunDir, now: float, dry_run: bool, within_s: float):
        self.run, self.now, self.dry_run, self.within_s = run, now, dry_run, within_s
        self._began = time.monotonic()
        self.config, self.environment = run.config(), run.environment()
        self.report = RunReport(run.name)
        self.memory = remembered(run, now)

    def _growth(self) -> int:
        """The GPUs for which the trainer is to be started anew; 0: there are none, or it
        is not the time to ask."""
        trainer, sync = _trainer_at_work(self.memory), self.config.sync
        if trainer is None or not self._may_grow(trainer):
            return 0
        spec = self._spec(TRAINER, 0, bad_nodes(self.memory, self.now, TRAINER))
        gpus, most, costs = self.facts.gpus_of(trainer), spec.gpus[1], self._restart_costs()
        if not sizing.pays(gpus, most, *costs):
            return 0
        spare = 0
        with contextlib.suppress(TryAgain):  # a site may show its nodes to nobody
            spare = self.scheduler.spare_gpus(spec, most - gpus)
        more = sizing.fit(sizing.node_counts(spec.gpus, 1, sync.sizes), gpus + spare)
        before = self.memory.spare_passes
        passes = before + 1 if sizing.pays(gpus, more, *costs) else min(0, before)
        self.memory = replace(self.memory, spare_passes=passes)
        return more if passes >= SPARE_PASSES else 0

    def _may_grow(self, trainer: Job) -> bool:
        if trainer.started_at is None or self.dry_run or not self.facts.gpus_of(trainer):
            return False
        # A program of the user's may save as seldom as once an epoch.
        is_young = self.now - trainer.started_at < self.config.sync.grow_after_s
        return not (is_young or self.config.run.command)

    def _restart_costs(self) -> tuple[float, float]:
        """How long a start takes, and how long a job stays, in seconds."""
        endings = self.run.jobs.endings()
        restarts = [end["startup_s"] for end in endings if end.get("startup_s")] or [RESTART_S]
        return statistics.median(restarts), cadence.observed_mtbi_s(endings)

    def observe(self, jobs: Sequence[Job]) -> None:
        """Bring memory up to date with a listing and the exit records it makes
        readable."""
        self.facts = Facts(self.run.name, self.config, self.run.control(), self.run.closing(),
                           before=self.memory, jobs=jobs, within_s=self.within_s,
                           ending=functools.cache(self.run.jobs.ending))
        self.memory, endings = learned(self.facts, self.now)
        for end in endings:
            self._event(
                "end", role=end.role, slot=end.slot, job_id=end.job_id, node=end.node,
                submitted=end.submitted_at, started=end.started_at, ended=end.ended_at,
                gpus=self.facts.gpus_of(end), outcome=end.outcome, reason=end.reason,
            )

    def act(self, scheduler) -> None:
        """Plan, and carry the plan out as far as the scheduler goes along."""
        self.scheduler = scheduler
        growth = self._growth() if self.facts.control.mode == "sync" else 0
        planned = plan(world_of(self.facts, self.memory, growth), self.now)
        self._tell_waiting([action for action in planned if action.verb == WAIT])
        verbs = {FAIL: self._give_up, CANCEL: self._cancel, SUBMIT: self._submit,
                 GROW: self._grow}
        for action in [each for each in planned if each.verb != WAIT]:
            if self.dry_run:
                self._tell(action)
            elif verbs[action.verb](action) is False:  # a submission: not taken, or no answer
                break
        if not self.memory.closing and self.run.failed():
            # A first refusal has ended the run: cancel what was submitted before it.
            self.memory = history.enter(self.memory, "failed", self.now)
            self.act(scheduler)

    def left_unknown(self) -> bool:
        """Nothing is known, nothing is done. True if that is news."""
        is_news = "unknown" not in self.memory.said
        self.memory = replace(self.memory, said=("unknown",))
        self.save()
        return is_news

    def save(self) -> None:
        if self.dry_run:
            return
        with contextlib.suppress(OSError):  # a full quota costs the note, not the pass
            os.utime(self.run.path / LOCK)
        path, data = self.run.path / "reconcile.json", to_json({"memory": asdict(self.memory)})
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)

    def _clock(self) -> float:
        """`now` as it has become: a scheduler may take its time."""
        return self.now + time.monotonic() - self._began

    # ---- the verbs

    def _submit(self, action: Action) -> bool:
        """False if nothing more is to be submitted now. A pass that dies in the middle of
        it leaves a note that this job may be there."""
        before, place = self.memory, (action.role, action.slot)
        self._note_unsure(place, DYING_S)
        self.save()
        try:
            job_id = self._submitted(spec := self._spec(*place, action.exclude))
        except TryAgain as silence:
            self._note_unsure(place, UNSURE_S)
            what = f"unsure whether {place[0]} {place[1]} was submitted: {silence.what}"
            self.report.lines.append(what)
            self.report.waiting.append(what)
            return False
        except (Refused, RetryLater) as refusal:
            self.memory = before
            self._not_taken(action, refusal)
            return False
        asked = spec.gpus if action.role == TRAINER else None
        job = Job(job_id, *place, "PENDING", submitted_at=self._clock(), asked=asked)
        self.memory = replace(before, jobs=(*before.jobs, job))
        if before.later_host in ("", node_name()):
            self.memory = replace(self.memory, later_s=0.0)
        self._tell(replace(action, job_id=job_id))
        return True

    def _submitted(self, spec: JobSpec) -> str:
        try:
            return self.scheduler.submit(spec)
        except Refused:  # there may be no other node than those that are avoided
            if not spec.exclude:
                raise
        return self.scheduler.submit(replace(spec, exclude=()))

    def _grow(self, action: Action) -> None:
        """Have the successor wait for all GPUs. The nodes that its predecessor leaves are free
        only after their epilogs: a job that takes less would start on the others alone."""
        wanted = (action.gpus, action.gpus)
        self._change(action, asked=wanted, grows_until=self._clock() + GROWS_S)
        self.save()  # Slurm may do it and not say so: a job that nobody expects waits for ever
        self.scheduler.wait_for(action.job_id, replace(self._spec(TRAINER, 0), gpus=wanted))
        if any(job.started and job.grows_until for job in self.memory.jobs):
            self.memory = replace(self.memory, missed_growths=0)  # the one before came true

    def _change(self, action: Action, **fields) -> None:
        """Note something about the job of an action."""
        key = (action.job_id, action.role, action.slot)
        jobs = (replace(j, **fields) if j.key == key else j for j in self.memory.jobs)
        self.memory = replace(self.memory, jobs=tuple(jobs))

    def _spec(self, role: str, slot: int, exclude: tuple[str, ...] = ()) -> JobSpec:
        control, run = self.facts.control, self.run
        masters = [job for job in self.memory.jobs if job.role == MASTER]
        at_work = any(job.started for job in masters)
        queued = [job.job_id for job in masters if job.queued and not at_work]
        each, limits = self.config.slurm.gpus_per_worker, limits_of_gpus(control, self.memory)
        gpus = {TRAINER: limits, WORKER: (each, each)}.get(role, (0, 0))
        return JobSpec(
            run.path, run.name, role, slot, self.config, self.environment, exclude, gpus,
            after=queued[0] if queued and role == WORKER else "",
            alone=not (role == MASTER and at_work),
        )

    def _not_taken(self, action: Action, refusal: Refused | RetryLater) -> None:
        """A refusal at the run's start is a mistake in its settings. Later it may be this
        host's alone (compute nodes may not submit everywhere), or a site's of today."""
        memory, delay_s, reason, host = self.memory, LATER_S, refusal.what, ""
        if isinstance(refusal, Refused):
            reason = f"{action.role} refused: {refusal.what}"
            # While another host's pause runs, it is the site that refuses.
            is_other = self.now < memory.later_until and memory.later_host != node_name()
            host = "" if is_other else node_name()
            if memory.born == self.now:
                self._give_up(replace(action, reason=reason, detail=refusal.hint))
                return
            delay_s = min(max(LATER_S, 2 * memory.later_s), MOST_LATER_S)
            memory = replace(memory, later_s=delay_s)
        self.report.waiting.append(f"{action.role} {action.slot}: {reason}")
        until = self._clock() + delay_s
        self.memory = replace(memory, later_until=until, later_reason=reason, later_host=host,
                              later_role=action.role, later_slot=action.slot)

    def _cancel(self, action: Action) -> None:
        self.scheduler.cancel(action.job_id, kill=action.now)
        self._change(action, cancelled_at=self._clock())
        jobs, missed = self.memory.jobs, self.memory.missed_growths
        if any(job.job_id == action.job_id and job.queued and job.grows_until for job in jobs):
            passes = NO_GROWTH_PASSES * 2 ** min(missed, 5)
            self.memory = replace(self.memory, spare_passes=-passes, missed_growths=missed + 1)
        self._tell(action)

    def _give_up(self, action: Action) -> None:
        self.run.mark_failed(action.reason, action.detail)
        self.report.lines.append(f"failed: {action.reason}")

    def _note_unsure(self, place: tuple[str, int], duration_s: float) -> None:
        others = (u for u in self.memory.unsure if u.place != place)
        this = UnsureSubmission(*place, self._clock() + duration_s)
        self.memory = replace(self.memory, unsure=(*others, this))

    # ---- words

    def _tell(self, action: Action) -> None:
        self.report.actions.append(action)
        job = f" job {action.job_id}" if action.job_id else ""
        said = f"{action.verb} {action.role} {action.slot}{job}: {action.reason}"
        self.report.lines.append("would " * self.dry_run + said)
        self._event(action.verb, role=action.role, slot=action.slot, job_id=action.job_id,
                    reason=action.reason)

    def _tell_waiting(self, waits: Sequence[Action]) -> None:
        """Say every reason once, until it has gone away."""
        reasons = reasons_of(waits)
        for reason, text in reasons.items():
            self.report.waiting.append(text)
            if reason not in self.memory.said:
                self.report.lines.append(text)
        self.memory = replace(self.memory, said=tuple(reasons))

    def _event(self, kind: str, **fields) -> None:
        if not self.dry_run:
            self.run.event(kind, **fields)


# ---- what a pass plans, and what status foretells


@dataclass(frozen=True)
class Facts:
    """All that the plan for a run follows from. `before` is the memory that the pass
    before left; `jobs` may be a listing of `within_s` ago; `ending` gives the exit record
    of a job."""

    run: str
    config: Config
    control: Control
    closing: str
    before: Memory
    jobs: Sequence[Job]
    ending: Callable[[str], Mapping | None]
    within_s: float = 0.0

    def gpus_of(self, job: Job | Ended) -> int:
        """How many GPUs the job has, or had; a trainer notes it itself (0: not yet)."""
        if job.role == WORKER:
            return self.config.slurm.gpus_per_worker
        return (self.ending(job.job_id) or {}).get("gpus", 0)


def plan_of(facts: Facts, now: float) -> list[Action]:
    """What a pass would do, but for a growth: only a pass can ask for spare GPUs."""
    memory, _ = learned(facts, now)
    return plan(world_of(facts, memory), now)


def learned(facts: Facts, now: float) -> tuple[Memory, list[Ended]]:
    """Memory up to date with a listing and exit records, and the ends that are news."""
    listed = [_with_last_word(job, facts, now) for job in facts.jobs if job.run == facts.run]
    memory = history.enter(facts.before, facts.closing, now, facts.control.mode)
    listed_at = now - facts.within_s  # at the earliest
    news = history.gone(memory, listed, listed_at)
    if memory.closing in ("stopped", "done"):  # jobs that end now do as they were asked
        news = [replace(job, cancelled_at=now) for job in news]
    endings = [history.ending(job, facts.ending(job.job_id), now) for job in news]
    keep = facts.config.elastic.max_failures + 1
    memory = history.learn(memory, listed, endings, listed_at, keep)
    return _capped(facts, memory, now), endings


def _capped(facts: Facts, memory: Memory, now: float) -> Memory:
    """With fewer GPUs to ask for, where a limit holds back the only trainer: three
    quarters, but no fewer than the last one had. Of a range of nodes Slurm takes all that
    are idle, and then finds that these are too many."""
    memory = replace(memory, cap_gpus=memory.cap_gpus if now < memory.cap_until else 0)
    job, *others = [job for job in memory.jobs if job.role == TRAINER] or [None]
    is_waiting = job and job.queued and job.asked and not (others or job.leaving(now))
    if not is_waiting or not TOO_MANY.match(job.reason):
        return memory
    per_node, sizes = facts.config.slurm.gpus_per_node, facts.config.sync.sizes
    *fewer, _ = sizing.node_counts((facts.control.min, job.asked[1]), per_node, sizes)
    had = [facts.gpus_of(end) // per_node for end in memory.ended if end.role == TRAINER][-1:]
    tries = [count for count in (*had, *fewer[len(fewer) * 3 // 4 :][:1]) if count in fewer]
    gpus = max(tries, default=0) * per_node
    return replace(memory, cap_gpus=gpus, cap_until=now + CAP_S) if gpus else memory


def limits_of_gpus(control: Control, memory: Memory) -> tuple[int, int]:
    """The fewest and the most GPUs that a trainer asks for."""
    most = min(control.max, memory.cap_gpus or control.max)
    return control.min, max(control.min, most)


def world_of(facts: Facts, memory: Memory, growth: int = 0) -> World:
    """What is planned by, with the `learned` memory; sync mode: and with the GPUs for
    which a restart pays."""
    config, control = facts.config, facts.control
    if memory.later_host not in ("", node_name()):  # where jobs may not be submitted
        memory = replace(memory, later_until=0.0)
    is_sync, trainer = control.mode == "sync", _trainer_at_work(memory)
    slots = 0 if is_sync else config.workers(control.max)
    return World(
        slots, memory, mode=control.mode, growth=growth,
        max_pending=config.elastic.max_pending, max_failures=config.elastic.max_failures,
        backoff_s=config.elastic.backoff_s, hang_timeout_s=config.health.hang_timeout_s,
        limits_of_gpus=limits_of_gpus(control, memory) if is_sync else None,
        gpus=facts.gpus_of(trainer) if trainer else 0,
        node_gpus=config.slurm.gpus_per_node if config.run.scheduler == "slurm" else 1,
    )


def reasons_of(waits: Sequence[Action]) -> dict[str, str]:
    """Why places stay empty: a text for each reason."""
    places: dict[str, list[str]] = defaultdict(list)
    for wait in waits:
        places[wait.reason].append(f"{wait.role} {wait.slot}")
    return {reason: first + (f" and {len(others)} more" if others else "") + f": {reason}"
            for reason, (first, *others) in places.items()}


def _trainer_at_work(memory: Memory) -> Job | None:
    working = (job for job in memory.jobs if job.role == TRAINER and job.started)
    return next((job for job in working if not job.over), None)


def _with_last_word(job: Job, facts: Facts, now: float) -> Job:
    """The job, with the outcome that it has written itself, where that counts although
    the scheduler still lists it. A job that has been COMPLETING for too long (its epilog
    hangs, or a process cannot be killed) counts as ended."""
    record = {} if job.queued else facts.ending(job.job_id) or {}
    over = history.said_at_end(job, record)
    gone_at = record["time"] + EPILOG_S if over else (job.ended_at or now) + WORDLESS_S
    if job.state in history.LEAVING_STATES and now >= gone_at:
        return replace(job, state="ENDED")
    is_foreign = (job.role == TRAINER) != (facts.control.mode == "sync")
    if (job.role == TRAINER and job.started) or (is_foreign and over == Outcome.STOPPED):
        return replace(job, over=over)
    return job
