"""What is known about a run, as one dictionary: for people (views) and for scripts (--json).

Workers come from Redis when it answers, else from what the jobs wrote into the run directory, and
the reason says so. Jobs come from one question to the scheduler for all runs; the same listing,
through a dry reconcile pass, tells what that pass would do next. Nothing is changed by looking.
A table of many runs costs little for each: it has workers by their jobs, and asks no Redis.

    state    running   workers train (or load, or deliver)      done     finished
             waiting   it wants to run, and no worker is there  failed   `reason` says why
             stopped   by elastic-stop
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter

from elastic.base.config import Config
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs import reconcile
from elastic.jobs.history import MASTER, RECENT_S, TRAINER, WORKER
from elastic.jobs.sched import Job, cluster_of, parse_job_name, scheduler_of
from elastic.local.rounds import inner_steps
from elastic.run import membership, wording
from elastic.run.audit import read_checkpoints
from elastic.run.records import EventKind, Outcome
from elastic.run.rundir import RunDir
from elastic.run.wording import counted, one_line

EVENTS, LOOKED_AT = 20, 300
CURVE = 60  # newest versions whose loss is shown
WINDOW = 10  # newest versions over which speed is measured
NO_PASS_S = 180.0  # cron passes every two minutes
# A worker that says nothing of itself.
UNKNOWN = {"attempt": 0, "pid": None, "version": None, "step": 0, "tokens_per_s": 0.0,
           "loss": None, "state": "unknown", "last_beat_s": None}  # fmt: skip
NOT_REACHED_S = 2.0  # how long a master that does not answer is waited for
ASKED = 8  # of so many runs at most each one's Redis is asked for a row of the table


@dataclass(frozen=True)
class Listing:
    """One answer of a scheduler, or the trouble there was in getting it. A Scheduler that only
    lists: a dry pass plans over it without asking again."""

    listed: Sequence[Job] = ()
    trouble: str = ""

    def jobs(self, within_s: float = 0.0) -> list[Job]:
        if self.trouble:
            raise TryAgain(self.trouble)
        return list(self.listed)

    def spare_gpus(self, *_) -> int:
        return 0

    @functools.cached_property
    def by_run(self) -> dict[str, list[dict]]:
        """The jobs that have not ended, as `observe` tells them, by run, role and slot."""
        named = [(parse_job_name(job.name), job) for job in self.listed if not job.ended]
        found: dict[str, list[dict]] = {}
        for (run, role, slot), job in sorted(filter(itemgetter(0), named), key=itemgetter(0)):
            row = {"job_id": job.job_id, "role": role, "slot": slot, "state": job.state,
                   "reason": "" if job.reason == "None" else job.reason, "node": job.node,
                   "submitted": job.submit_time or None}  # fmt: skip
            found.setdefault(run, []).append(row)
        return found


def listing(run: RunDir, within_s: float = 0.0) -> Listing:
    """Ask the run's scheduler once."""
    try:
        return Listing(scheduler_of(run).jobs(within_s))
    except TryAgain as silence:
        return Listing(trouble=silence.what)


def observe_all(
    runs: Sequence[RunDir], brief: bool = False, within_s: float = 0.0
) -> list[dict]:
    """`observe` of every run, with one question per scheduler, or its answer of `within_s` ago; of
    several, if `brief`, `row`."""
    listings: dict[tuple[str, str], Listing] = {}
    seen = []
    is_one = len(runs) == 1
    look = functools.partial(observe, whole=is_one)
    if brief and not is_one:
        look = functools.partial(row, asks=len(runs) <= ASKED)
    for run in runs:
        try:
            cluster = cluster_of(run.config().run.scheduler, run.environment())
            if cluster not in listings:
                listings[cluster] = listing(run, within_s)
            seen.append(look(run, listings[cluster]))
        except (ElasticError, OSError) as error:
            if is_one:
                raise
            seen.append(_damaged(run, str(error)))  # it must not hide the others
    return seen


def _damaged(run: RunDir, trouble: str) -> dict:
    """What there is to say of a run whose directory cannot be read."""
    unknown = dict.fromkeys(("version", "tokens_goal", "loss", "tokens_per_s",
                             "inner_steps", "min", "max"))  # fmt: skip
    return {**unknown, "run": run.name, "path": str(run.path), "mode": "", "state": "damaged",
            "reason": trouble, "summary": f"damaged: {trouble}", "detail": "", "next": "nothing",
            "tokens": 0, "unit": "tokens", "losses": [], "preemptions_per_h": 0.0,
            "gpus": 0, "workers": [], "jobs": [], "events": []}  # fmt: skip


def row(run: RunDir, jobs: Listing, asks: bool) -> dict:
    """Of what `observe` says the part that a table of runs shows. `asks`: ask Redis for workers,
    else they are those whose job runs."""
    config, control, newest = run.config(), run.control(), run.commit(run.told_version()) or {}
    mine, is_sync = jobs.by_run.get(run.name, []), control.mode == "sync"
    if is_sync:
        workers, master = _ranks(run, mine)
    else:
        workers, master = _workers(run, config, mine) if asks else (_by_jobs(mine), {})
    short = run.shortage(config.checkpoint.min_free_bytes)
    gpus = len(workers) * (1 if is_sync else config.slurm.gpus_per_worker)
    seen = {"jobs": mine, "workers": workers, "gpus": gpus, "min": control.min, "master": master,
            "newest": newest, "short": short, "pass_s": reconcile.since_last(run)}  # fmt: skip
    state, reason = judge(run, seen, jobs.trouble)
    return {
        "run": run.name, "state": state, "reason": reason, "version": newest.get("version"),
        "tokens": newest.get("tokens", 0), "unit": wording.unit(newest, run.progress()),
        "loss": newest.get("loss"),
        "trouble": next((f"slot {worker['slot']}: {worker['trouble']}" for worker in workers
                         if worker.get("trouble")), master.get("crash", "")),
        **_on_top(run, newest.get("version", 0), is_sync),
        "min": control.min, "max": control.max, "gpus": gpus, "workers": workers,
        "program": master.get("program", ""), "asked": is_sync or asks,
    }  # fmt: skip


def observe(run: RunDir, jobs: Listing | None = None, whole: bool = True) -> dict:
    """All about one run; of one among many not its `losses` and `events`, which would have to be
    read. Raises ElasticError only if its directory is damaged."""
    mode, now, jobs = run.control().mode, time.time(), jobs or listing(run)
    is_sync, found = mode == "sync", row(run, jobs, asks=True)
    last, most = run.told_version(), CURVE if whole else WINDOW
    history = [*filter(None, map(run.commit, range(max(0, last - most), last + 1)))]
    events = run.events(last=LOOKED_AT) if whole else ()
    commits = history[-WINDOW - 1 :]
    newest = commits[-1] if commits else {}
    found = {
        "tokens_per_s": _speed(commits, 0.0 if is_sync else now),
        "tokens_goal": newest.get("total_tokens"),
        **found,
        **({} if found["state"] == "running" else {"tokens_per_s": None}),
        "path": str(run.path),
        "mode": mode,
        "detail": (run.failed() or {}).get("detail", "") if found["state"] == "failed" else "",
        "next": _next(run, jobs, now),
        "losses": [[commit["tokens"], commit["loss"]] for commit in history
                   if whole and commit.get("loss") is not None],
        "preemptions_per_h": _preemptions_per_h(run, now),
        "inner_steps": None if is_sync or not newest
                       else inner_steps(newest, run.config().local_sgd),
        "jobs": jobs.by_run.get(run.name, []),
        # A delta is no news, as its round is told.
        "events": [each for each in events if each["kind"] != EventKind.DELTA][-EVENTS:],
    }
    return {**found, "summary": wording.sentence(found, now)}


def _on_top(run: RunDir, version: int, is_sync: bool) -> dict:
    """What sync mode has trained on top of a version, in words of `observe`; there, a version is a
    step. In its own time it is what rank 0 said last, else what the newest checkpoint says."""
    progress = run.progress() or {}
    if is_sync and progress.get("base_version") == version:
        names = {"version": "step", "tokens": "tokens", "tokens_goal": "total_tokens",
                 "loss": "loss", "tokens_per_s": "tokens_per_s"}  # fmt: skip
        return {name: progress.get(field) for name, field in names.items()}
    return {name: record["extra"][name] for record in read_checkpoints(run.path, version)[-1:]
            for name in ("tokens", "loss")}  # fmt: skip


# ---- why


def judge(run: RunDir, seen: dict, trouble: str) -> tuple[str, str]:
    """(state, one sentence why). `seen` is what was observed; `trouble` is the scheduler's."""
    jobs, workers = seen["jobs"], seen["workers"]
    leaving = f"; still leaving: {counted(len(jobs), 'job')}" if jobs else ""
    if done := run.done():
        return "done", f"finished: {done.get('reason', 'nothing is left to train')}{leaving}"
    if failed := run.failed():
        return "failed", f"{one_line(failed['reason'])}{leaving}"
    if run.control().state == "stopped":
        return "stopped", f"stopped by elastic-stop{leaving}"
    state = "running" if workers else "waiting"
    return state, "; ".join(filter(None, _reasons(seen, trouble)))


def _reasons(seen: dict, trouble: str) -> Iterator[str]:
    """What holds a run that is not over, the most telling first."""
    workers, gpus, least = seen["workers"], seen["gpus"], seen["min"]
    if silence := seen["master"].get("trouble"):
        yield f"the master is not reachable{_since(seen['newest'])}: {silence}"
    else:
        there = counted(gpus, "GPU")
        yield f"{there}, fewer than the {least} wanted" if gpus < least and workers else ""
        yield "" if workers else "no worker is there"
    if still_s := seen["master"].get("still_s"):
        yield (f"the master has stood still for {wording.span(still_s)}: to have another, "
               f"end its job {seen['master']['job_id']}")  # fmt: skip
    # A full disk is looked at from here, too: with it, nobody else may be able to say so.
    yield seen["short"] or seen["master"].get("reason", "")
    stalled = [str(worker["slot"]) for worker in workers if worker["state"] == "stalled"]
    yield f"slots {', '.join(stalled)} beat but do not advance" if stalled else ""
    troubled = [worker for worker in workers if worker.get("trouble")]
    slots = ", ".join(str(worker["slot"]) for worker in troubled)
    waits = "cannot write, and wait: " if any(w["state"] == "blocked" for w in troubled) else ""
    yield f"slots {slots}: {waits}{troubled[0]['trouble']}" if troubled else ""
    pending = wording.awaited(seen)
    waits = f"{counted(len(pending), 'job')} {'waits' if len(pending) == 1 else 'wait'}"
    yield f"{waits} ({pending[0]['reason'] or 'PENDING'})" if pending else ""
    yield f"the scheduler does not answer: {trouble}" if trouble else ""
    if not (workers or seen["jobs"] or trouble):
        yield "no job is queued or running"
    if seen["pass_s"] > NO_PASS_S:
        yield (f"no pass since {wording.span(seen['pass_s'])}: is elastic-reconcile in your "
               "crontab?")  # fmt: skip


def _since(newest: dict) -> str:
    if not newest:
        return " yet"
    clock = time.strftime("%H:%M:%S", time.localtime(newest["time"]))
    return f" (it committed version {newest['version']} at {clock})"


def _next(run: RunDir, jobs: Listing, now: float) -> str:
    """What the next reconcile pass would do, and what it waits for."""
    report = reconcile.run_pass([run], now, True, lambda *_: jobs)
    if report.unknown:
        return "nothing, until the scheduler answers"
    if not report.runs:
        return "; ".join(report.errors) or "nothing"
    one = report.runs[0]
    words = [f"{each.verb} {each.role} {each.slot} ({each.reason})" for each in one.actions]
    if len(words) > 3:
        words[3:] = [f"{len(words) - 3} more"]
    return "; ".join([*words, *one.waiting]) or "nothing: all is as wanted"


# ---- who


def _workers(run: RunDir, config: Config, jobs: list[dict]) -> tuple[list[dict], dict]:
    """The workers and the master's own words; both from Redis, if that answers."""
    from elastic.local.store import Store  # a third of the time that status takes, and only here

    try:
        with contextlib.closing(Store.open(run, NOT_REACHED_S)) as store:
            now, slots, master = store.now(), store.slots(), store.master()
    except TryAgain as silence:
        return _workers_on_record(run, jobs), {"trouble": silence.what}
    stall_after_s = config.health.stall_after_s
    if not master:
        master = {"trouble": f"Redis at {store.where} knows no master"}
    elif (still_s := now - float(master["beat"])) > stall_after_s:
        master["still_s"] = still_s
    return [_worker(slots[n], now, stall_after_s) for n in sorted(slots)], master


def _ranks(run: RunDir, jobs: list[dict]) -> tuple[list[dict], dict]:
    """One row per GPU of the trainer that runs now, from what its rank 0 wrote last."""
    if run.config().run.command:
        return _ranks_of_program(run, jobs)
    progress = run.progress() or {}
    running = {job["job_id"]: job for job in jobs if job["state"] == "RUNNING"}
    job = running.get(progress.get("job_id"))
    if job is None:
        records = filter(None, map(run.ending, running))
        troubles = [each["trouble"] for each in records if each.get("trouble")]
        return [], {"crash": f"starting again after {troubles[0]}" if troubles else ""}
    beat_s = round(max(0.0, time.time() - progress["time"]), 3)
    world = progress["world"]
    row = {"attempt": progress["attempt"], "job_id": job["job_id"], "node": job["node"],
           "pid": None, "version": progress["step"], "step": progress["step"],
           "tokens_per_s": progress["tokens_per_s"] / world, "loss": progress["loss"],
           "state": "training", "last_beat_s": beat_s}  # fmt: skip
    return [{"slot": rank, **row} for rank in range(world)], {"reason": progress["cadence"]}


def _ranks_of_program(run: RunDir, jobs: list[dict]) -> tuple[list[dict], dict]:
    """The same of a program that says nothing of its progress, by its job's record alone."""
    running = [job for job in jobs if job["role"] == TRAINER and job["state"] == "RUNNING"]
    record = run.ending(running[0]["job_id"]) if running else None
    if not record or record["state"] != "training":
        return [], {}
    now, log = time.time(), run.log_path(TRAINER, 0)
    row = {**UNKNOWN, "attempt": record["attempt"], "job_id": record["job_id"],
           "node": running[0]["node"], "state": "running"}  # fmt: skip
    gpus, since = counted(record["gpus"], "GPU"), wording.span(now - record["started"])
    words = f"running job {record['job_id']} on {row['node']}, {gpus}, since {since}"
    silent_s = now - log.stat().st_mtime if log.exists() else 0.0
    if silent_s > run.config().health.hang_timeout_s:
        words += f", without output for {wording.span(silent_s)}"
    rows = [{**row, "slot": rank} for rank in range(record["gpus"])]
    return rows, {"program": f"{words}; its progress is its own (elastic-logs)"}


def _worker(slot: membership.Slot, now: float, stall_after_s: float) -> dict:
    state = membership.state(slot, now, stall_after_s)
    return {**asdict(slot), "state": state, "last_beat_s": round(max(0.0, now - slot.beat), 3)}


def _by_jobs(jobs: list[dict]) -> list[dict]:
    """Workers whose job is running; their progress is not known."""
    return [{**UNKNOWN, **{name: job[name] for name in ("slot", "job_id", "node")}}
            for job in jobs if job["role"] == WORKER and job["state"] == "RUNNING"]  # fmt: skip


def _workers_on_record(run: RunDir, jobs: list[dict]) -> list[dict]:
    """Those of them that have written that they started."""
    found = {worker["job_id"]: worker for worker in _by_jobs(jobs)}
    own = (record for record in run.endings() if record.get("role") == WORKER)
    return [{**found[record["job_id"]], "attempt": record.get("attempt", 0),
             "node": record.get("node", "")} for record in own if record["job_id"] in found]


# ---- how fast


def _preemptions_per_h(run: RunDir, now: float) -> float:
    """Of the last half hour, by what reconcile passes remember."""
    memory = reconcile.remembered(run, now)
    taken = [end for end in memory.ended
             if Outcome(end.outcome).is_preemption and end.role != MASTER
             and end.started_at and now - end.at < RECENT_S]  # fmt: skip
    return len(taken) * 3600 / RECENT_S


def _speed(commits: list[dict], now: float) -> float | None:
    """Committed tokens per second over the window, up to now for a run that is running."""
    if len(commits) < 2:
        return None
    passed_s = max(now, commits[-1]["time"]) - commits[0]["time"]
    return (commits[-1]["tokens"] - commits[0]["tokens"]) / passed_s if passed_s > 0 else None
