"""What is known about a run, as one dictionary: for people (views) and for scripts
(--json).

    Look       what there is of a run, each file read once; of a row of a table, less
    observe    all about the run, and `row` what a table of runs shows, from a Look

Workers come from Redis when it answers, else from what the jobs wrote into the run
directory, and the reason says so. Jobs come from one question to the scheduler for all
runs; what the next pass would do follows from the same listing. Nothing is changed by
looking. A table of many runs costs little for each: of most it counts workers by their
jobs, and asks no Redis.

    state    running   workers train (or load, or deliver)      done     finished
             waiting   it wants to run, and no worker is there  failed   `reason` says why
             stopped   by elastic-stop                          damaged  cannot be read
             unknown   its filesystem does not answer; or the scheduler, and no worker says more
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from elastic.base.durable import PASSING
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs import reconcile
from elastic.jobs.history import MASTER, RECENT_S, TRAINER, WORKER, Job, Memory
from elastic.jobs.plan import WAIT
from elastic.jobs.reconcile import Facts
from elastic.jobs.sched import Elsewhere, cluster_of, open_scheduler
from elastic.local.rounds import inner_steps
from elastic.run import membership, wording
from elastic.run.commits import read_checkpoints
from elastic.run.records import PREEMPTIONS, Commit
from elastic.run.rundir import RunDir, check_answers
from elastic.run.wording import EventKind, counted, one_line

EVENTS, LOOKED_AT = 20, 300  # so many are shown, of so many read: most are no news
VERSIONS = 60  # before the newest one, that are read of a run that is not a row of a table
WINDOW = 10  # newest versions over which speed is measured
NO_PASS_S = 360.0  # cron passes every two minutes, scrontab every five
# A worker that says nothing of itself.
UNKNOWN = {"attempt": 0, "pid": None, "version": None, "step": 0, "tokens_per_s": 0.0,
           "loss": None, "state": "unknown", "last_beat_s": None}
ASKED = 8  # in a table the Redis of so many runs is asked
MOST_ACTIONS = 3  # so many actions of the next pass are named


# ---- what there is


class Listing(NamedTuple):
    """The jobs that a scheduler listed, or why it gave no answer."""

    listed: Sequence[Job] = ()
    trouble: str = ""


class Crew(NamedTuple):
    """A row for each worker (or rank), as `observe` has them, and words on all of them."""

    workers: Sequence[dict] = ()
    words: str = ""  # of the master, or of rank 0
    silence: str = ""  # why the master cannot be asked
    hang: str = ""  # what to do about a master that stands still
    crash: str = ""  # the crash after which the ranks start again
    program: str = ""  # what run.command is at


class Look:
    """All that was read of one run, each file once. `facts` is what a pass plans by.
    `is_row`: only what a table shows, nothing of the next pass. `asks`: its Redis is
    asked, too."""

    def __init__(self, run: RunDir, listing: Listing, is_row: bool, asks: bool = True):
        self.now, self.trouble = time.time(), listing.trouble  # the scheduler's
        config, control = run.config(), run.control()
        ours = [job for job in listing.listed if job.run == run.name]
        listed = sorted(ours, key=attrgetter("role", "slot"))
        self.jobs = [_job(job) for job in listed if not job.ended]  # as `observe` tells them
        done, last = run.done(), run.commits.told_version()
        self.progress = run.jobs.progress() or {}  # of sync mode
        self.record = done or run.failed() or {}
        over = "done" if done else "failed" if self.record else ""
        closing = over or ("stopped" if control.state == "stopped" else "")
        self.memory = Memory(born=self.now) if is_row else reconcile.remembered(run, self.now)
        self.facts = facts = Facts(run.name, config, control, closing, before=self.memory,
                                   jobs=listed, ending=functools.cache(run.jobs.ending))
        versions = range(max(0, last if is_row else last - VERSIONS), last + 1)
        self.commits = [*filter(None, map(run.commits.of, versions))]  # the newest ones
        self.newest = self.commits[-1] if self.commits else None
        # A run that is over has no master to ask. If its jobs are not known, it may have one.
        asks = asks and bool(self.jobs or listing.trouble or not facts.closing)
        if not _is_sync(facts):
            self.crew = _workers(run, facts, self.jobs) if asks else Crew(_by_jobs(self.jobs))
        elif config.run.command:
            self.crew = _program(facts, self.jobs, self.now)
        else:
            self.crew = _ranks(facts, self.jobs, self.progress, self.now)
        self.is_asked = asks or _is_sync(facts)  # or are workers counted by their jobs?
        version = self.newest.version if self.newest else 0
        self.on_top = _on_top(run.path, facts, self.progress, version, self.crew, listing.trouble)
        self.shortage = run.shortage(config.checkpoint.min_free_bytes)
        self.pass_s = reconcile.since_last(run)

    @property
    def gpus(self) -> int | None:
        """How many are at work; None if nobody knows."""
        each = 1 if _is_sync(self.facts) else self.facts.config.slurm.gpus_per_worker
        count = sum(worker["state"] != "stalled" for worker in self.crew.workers)
        return count * each if self.crew.workers or not self.trouble else None


def _is_sync(facts: Facts) -> bool:
    return facts.control.mode == "sync"


def _on_top(path: Path, facts: Facts, told: Mapping, base: int, crew: Crew, trouble: str) -> dict:
    """What sync mode has trained on top of version `base`, with the keys of `observe`; its
    "version" is a step. A trainer at work says it. If there is none, the newest checkpoint
    does: what an earlier trainer said last is less than it saved, or tells of steps that
    are lost. If nobody knows whether one is at work, the newer of the two counts."""
    is_sync = _is_sync(facts)
    said = told if is_sync and told.get("base_version") == base else {}
    goal = {"tokens_goal": said.get("total_tokens")} if said else {}
    is_at_work = bool(said) and any(rank["step"] for rank in crew.workers)
    checkpoints = [] if is_at_work else read_checkpoints(path, base)
    saved = checkpoints[-1] if checkpoints else None
    is_said_last = bool(trouble) and (saved is None or saved.time < said.get("time", 0.0))
    if said and (is_at_work or is_said_last):
        speed = round(sum(rank["tokens_per_s"] for rank in crew.workers), 1)
        return goal | {"version": said.get("step"), "tokens": said.get("tokens"),
                       "loss": said.get("loss"), "tokens_per_s": speed}
    if saved:
        step = {"version": saved.step} if is_sync else {}
        return goal | step | {"tokens": saved.tokens, "loss": saved.loss}
    return goal


def _job(job: Job) -> dict:
    return {"job_id": job.job_id, "role": job.role, "slot": job.slot, "state": job.state,
            "reason": "" if job.reason == "None" else job.reason, "node": job.node,
            "submitted": job.submitted_at or None}


def ask(run: RunDir, environment: Mapping[str, str], within_s: float = 0.0) -> Listing:
    """Ask the run's scheduler once."""
    try:
        return Listing(open_scheduler(run.config(), environment).jobs(within_s))
    except Elsewhere as other:
        return Listing(trouble=f"{other.what}: {other.hint}")
    except ElasticError as silence:  # there may be no Slurm on this machine
        return Listing(trouble=f"the scheduler does not answer: {silence.what}")


# ---- one run, or many


def observe_all(runs: Sequence[RunDir], are_rows: bool = False, within_s: float = 0.0,
                is_named: bool = False) -> list[dict]:
    """`observe` of every run (`row`, if they `are_rows` of a table), with one question per
    scheduler, or its answer of `within_s` ago. If a run cannot be read, its row says so;
    an error is raised only if the user named the run (`is_named`), or if no filesystem
    answers."""
    listings: dict[tuple[str, str], Listing] = {}
    observations = []
    trouble, asked = None, 0
    for run in runs:
        try:
            check_answers(run)
            environment = run.environment()
            cluster = cluster_of(run.config().run.scheduler, environment)
            if cluster not in listings:
                listings[cluster] = ask(run, environment, within_s)
            if are_rows:
                look = Look(run, listings[cluster], is_row=True, asks=asked < ASKED)
                asked += not look.facts.closing
                observations.append(row(look))
            else:
                observations.append(observe(run, listings[cluster]))
        except (ElasticError, OSError) as error:
            trouble = error
            observations.append(_unread(run, error))  # one run must not hide the others
    is_silent = all((seen["state"], seen["min"]) == ("unknown", None) for seen in observations)
    if trouble and (is_named or is_silent):
        raise trouble
    return observations


def _unread(run: RunDir, trouble: ElasticError | OSError) -> dict:
    """The observation of a run whose directory cannot be read, now or ever."""
    is_silent = isinstance(trouble, TryAgain) or getattr(trouble, "errno", None) in PASSING
    state = "unknown" if is_silent else "damaged"
    unknown = dict.fromkeys(("version", "tokens", "tokens_goal", "loss", "tokens_per_s",
                             "inner_steps", "min", "max", "gpus", "validated",
                             "preemptions_per_h"))
    nothing = {name: [] for name in ("losses", "scores", "workers", "jobs", "events")}
    return {**unknown, **nothing, "run": run.name, "path": str(run.path), "asked": False,
            "state": state, "reason": str(trouble), "summary": f"{state}: {trouble}",
            "mode": "", "detail": "", "trouble": "", "program": "", "next": "nothing",
            "unit": "tokens"}


def row(look: Look) -> dict:
    """The part of `observe` that a table of runs shows."""
    newest, control, crew = look.newest, look.facts.control, look.crew
    state, reason = judge(look)
    troubles = (f"slot {worker['slot']}: {worker['trouble']}" for worker in crew.workers
                if worker.get("trouble"))
    return {
        "run": look.facts.run, "state": state, "reason": reason,
        "version": newest and newest.version, "tokens": newest.tokens if newest else 0,
        "unit": wording.unit(newest.deltas if newest else (), look.progress),
        "loss": newest and newest.loss,
        "trouble": next(troubles, crew.crash), **look.on_top,
        "min": control.min, "max": control.max, "gpus": look.gpus,
        "workers": list(crew.workers), "program": crew.program, "asked": look.is_asked,
    }


def observe(run: RunDir, listing: Listing | None = None) -> dict:
    """All about one run. Raises ElasticError only if its directory is damaged."""
    look = Look(run, listing or ask(run, run.environment()), is_row=False)
    events, scores = run.events(last=LOOKED_AT), run.scores.read(last=LOOKED_AT)
    brief, upcoming, newest = row(look), _upcoming(look), look.newest
    is_sync, is_running = _is_sync(look.facts), brief["state"] == "running"
    seen = {
        **brief,
        "tokens_per_s": look.on_top.get("tokens_per_s", _speed(look)) if is_running else None,
        "tokens_goal": look.on_top.get("tokens_goal", newest and newest.total_tokens),
        "path": str(run.path),
        "mode": look.facts.control.mode,
        "detail": look.record.get("detail", "") if brief["state"] == "failed" else "",
        "next": upcoming or wording.AS_WANTED,
        "losses": [[commit.tokens, commit.loss] for commit in look.commits
                   if commit.loss is not None],
        "scores": [[score.tokens, score.loss] for score in scores if score.loss is not None],
        # The newest validation on the way, with the task's own names and numbers.
        "validated": {**scores[-1].values, "tokens": scores[-1].tokens} if scores else None,
        "preemptions_per_h": _preemptions_per_h(look),
        "inner_steps": None if is_sync or not newest
                       else inner_steps(newest, look.facts.config.local_sgd),
        "jobs": list(look.jobs),
        # Without deltas: the event of their round tells enough.
        "events": [event for event in events if event["kind"] != EventKind.DELTA][-EVENTS:],
    }
    return {**seen, "summary": wording.sentence(seen, upcoming, look.now)}


# ---- why


def judge(look: Look) -> tuple[str, str]:
    """(state, one sentence why)."""
    count, closing, record = len(look.jobs), look.facts.closing, look.record
    leaving = f"; still leaving: {counted(count, 'job')}" if count else ""
    words = {"done": f"finished: {record.get('reason', 'nothing is left to train')}",
             "failed": one_line(record.get("reason", "")), "stopped": "stopped by elastic-stop"}
    if closing:
        return closing, words[closing] + leaving
    state = "running" if look.crew.workers else "unknown" if look.trouble else "waiting"
    return state, "; ".join(filter(None, _reasons(look, look.crew)))


def _reasons(look: Look, crew: Crew) -> Iterator[str]:
    """What keeps a run from training as wanted, the most telling first; "" says nothing."""
    workers, gpus, least = crew.workers, look.gpus, look.facts.control.min
    if crew.silence:
        yield f"the master is not reachable{_since(look.newest)}: {crew.silence}"
    else:
        there = counted(gpus, "GPU")
        yield f"{there}, fewer than the {least} wanted" if workers and gpus < least else ""
        yield "" if workers or look.trouble else "no worker is there"
    yield crew.hang
    # The disk is looked at from here, too: if it is full, nobody else may be able to say so.
    yield look.shortage or crew.words
    # Workers alone: a rank, which has no pid here, does not beat, and crew.words tell of it.
    stalled = [str(each["slot"]) for each in workers if each["state"] == "stalled" and each["pid"]]
    yield f"slots {', '.join(stalled)} beat but do not advance" if stalled else ""
    troubled = [worker for worker in workers if worker.get("trouble")]
    slots = ", ".join(str(worker["slot"]) for worker in troubled)
    is_blocked = any(worker["state"] == "blocked" for worker in troubled)
    waits = "cannot write, and wait: " if is_blocked else ""
    yield f"slots {slots}: {waits}{troubled[0]['trouble']}" if troubled else ""
    pending = wording.awaited(look.jobs, workers)
    waits = f"{counted(len(pending), 'job')} {'waits' if len(pending) == 1 else 'wait'}"
    yield f"{waits} ({pending[0]['reason'] or 'PENDING'})" if pending else ""
    yield look.trouble
    if not (workers or look.jobs or look.trouble):
        yield "no job is queued or running"
    if look.pass_s > NO_PASS_S:
        since = wording.span(look.pass_s)
        yield f"no pass since {since}: is elastic-reconcile in your crontab?"


def _since(newest: Commit | None) -> str:
    if not newest:
        return " yet"
    clock = time.strftime("%H:%M:%S", time.localtime(newest.time))
    return f" (it committed version {newest.version} at {clock})"


def _upcoming(look: Look) -> str:
    """What the next reconcile pass would do, and what it waits for; "" if nothing."""
    closing, run = look.facts.closing, look.facts.run
    at_rest = "nothing" + f", until elastic-scale {run}" * (closing in ("failed", "stopped"))
    if closing and look.memory.is_closed(closing):
        return at_rest
    if look.trouble:
        return "nothing, until the scheduler answers"
    try:
        plan = reconcile.plan_of(look.facts, look.now)
    except (ElasticError, KeyError) as error:  # an unread exit record, a role of another version
        return f"nothing: {error!r}"
    words = [f"{each.verb} {each.role} {each.slot} ({each.reason})" for each in plan
             if each.verb != WAIT]
    if len(words) > MOST_ACTIONS:
        words[MOST_ACTIONS:] = [f"{len(words) - MOST_ACTIONS} more"]
    waits = reconcile.reasons_of([each for each in plan if each.verb == WAIT])
    return "; ".join([*words, *waits.values()]) or (at_rest if closing else "")


# ---- who


def _workers(run: RunDir, facts: Facts, jobs: Sequence[dict]) -> Crew:
    """What workers and master say in Redis, if that answers."""
    from elastic.local.store import Store  # a third of the time that status takes

    try:
        with contextlib.closing(Store.open(run)) as store:
            now, slots, master = store.now(), store.slots(), store.master()
    except TryAgain as silence:
        return Crew(_on_record(facts, jobs), silence=silence.what)
    silence = "" if master else f"Redis at {store.where} knows no master"
    stall_after_s, hang = facts.config.health.stall_after_s, ""
    if master and (still_s := now - float(master["beat"])) > stall_after_s:
        hang = f"the master has stood still for {wording.span(still_s)}: to have another,"
        hang += f" end its job {master['job_id']}"
    workers = [{**asdict(slot), "state": membership.state(slot, now, stall_after_s),
                "last_beat_s": round(max(0.0, now - slot.beat), 3)}
               for _, slot in sorted(slots.items())]
    return Crew(workers, master.get("reason", ""), silence, hang)


def _by_jobs(jobs: Sequence[dict]) -> list[dict]:
    """Workers by their running jobs, without their progress."""
    return [{**UNKNOWN, **{name: job[name] for name in ("slot", "job_id", "node")}}
            for job in _running(jobs, WORKER)]


def _running(jobs: Sequence[dict], role: str) -> list[dict]:
    return [job for job in jobs if job["role"] == role and job["state"] == "RUNNING"]


def _on_record(facts: Facts, jobs: Sequence[dict]) -> list[dict]:
    """Workers by their running jobs, if they have written that they started."""
    records = ((worker, facts.ending(worker["job_id"])) for worker in _by_jobs(jobs))
    return [{**worker, "attempt": record.get("attempt", 0), "node": record.get("node", "")}
            for worker, record in records if record and record["role"] == WORKER]


def _ranks(facts: Facts, jobs: Sequence[dict], progress: Mapping, now: float) -> Crew:
    """A row for each GPU of the trainer at work, by what its rank 0 wrote last."""
    running = {job["job_id"]: job for job in jobs if job["state"] == "RUNNING"}
    job = running.get(progress.get("job_id"))
    newest = (facts.ending(job["job_id"]) or {}).get("attempt", 0) if job else 0
    if job is None or newest > progress["attempt"]:
        rows, record = _by_record(facts, jobs, "loading")
        trouble = record.get("trouble")
        return Crew(rows, crash=f"starting again after {trouble}" if trouble else "")
    count, beat_s = progress["world"], round(max(0.0, now - progress["time"]), 3)
    state, speed = progress.get("state", "training"), progress["tokens_per_s"] / count
    words, health = progress["cadence"], facts.config.health
    most_s = max(health.stall_after_s, membership.STALL_STEPS * progress.get("seconds", 0.0))
    if beat_s > (most_s if state == "training" else max(most_s, health.hang_timeout_s)):
        state, speed, words = "stalled", 0.0, f"no step since {wording.span(beat_s)}"
    rank = {"attempt": progress["attempt"], "job_id": job["job_id"], "node": job["node"],
            "pid": None, "version": progress["step"], "step": progress["step"], "state": state,
            "tokens_per_s": speed, "loss": progress["loss"], "last_beat_s": beat_s}
    return Crew([{"slot": number, **rank} for number in range(count)], words)


def _program(facts: Facts, jobs: Sequence[dict], now: float) -> Crew:
    """A row for each GPU of run.command, which says nothing of its progress."""
    rows, record = _by_record(facts, jobs, "running")
    if not rows:
        return Crew()
    gpus, since = counted(len(rows), "GPU"), wording.span(now - record["started"])
    words = f"running job {record['job_id']} on {rows[0]['node']}, {gpus}, since {since}"
    return Crew(rows, program=f"{words}; its progress is its own (elastic-logs)")


def _by_record(facts: Facts, jobs: Sequence[dict], state: str) -> tuple[list[dict], Mapping]:
    """A row for each GPU of a trainer that has written no more than on how many GPUs its
    ranks have started; and that record."""
    for job in _running(jobs, TRAINER):
        record = facts.ending(job["job_id"]) or {}
        if record.get("state") == "training":
            rank = {**UNKNOWN, "attempt": record["attempt"], "job_id": job["job_id"],
                    "node": job["node"], "state": state}
            return [{**rank, "slot": number} for number in range(record["gpus"])], record
    return [], {}


# ---- how fast


def _preemptions_per_h(look: Look) -> float:
    """Preemptions in the last half hour, as a rate, by what reconcile passes remember."""
    taken = [end for end in look.memory.ended
             if end.outcome in PREEMPTIONS and end.role != MASTER
             and end.started_at and look.now - end.at < RECENT_S]
    return len(taken) * 3600 / RECENT_S


def _speed(look: Look) -> float | None:
    """Committed tokens per second: of the newest WINDOW versions since the run was last
    started, until now. None in sync mode, where the trainer tells its own speed."""
    # A version that was made of a checkpoint holds what sync mode had trained before.
    of_sync = [commit.time for commit in look.commits if commit.step is not None]
    since = max([look.memory.born, *of_sync])
    commits = [commit for commit in look.commits[-WINDOW - 1 :] if commit.time >= since]
    if _is_sync(look.facts) or len(commits) < 2:
        return None
    first, last = commits[0], commits[-1]
    passed_s = max(look.now, last.time) - first.time
    return (last.tokens - first.tokens) / passed_s if passed_s > 0 else None
