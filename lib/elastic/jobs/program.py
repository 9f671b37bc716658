"""What the programs of all jobs do for their run: claim an attempt, say what happens, and
say how they ended.

A job's exit record says first that it has started, and last how it has ended; a job that
leaves none was killed. Reconcile reads it, and the exit code where there is nothing else.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from elastic.base import proc
from elastic.base.durable import patiently, until_written
from elastic.base.environment import env, environment
from elastic.base.errors import Exit
from elastic.base.network import node_name
from elastic.base.signals import Notice, die_with_parent
from elastic.jobs import sched_slurm
from elastic.jobs.history import EVENTS, EXIT_CODES, TRAINER, End, end_of_error, end_of_run
from elastic.run.rundir import RunDir

MARK = "ELASTIC_RANK"  # RUN_DIR:JOB_ID.ATTEMPT.RANK, in the environment of all its processes
SILENT_S = 600.0  # then the GPUs may go to a node whose filesystem answers


class Program:
    """A job as the run directory knows it. Once it has claimed an attempt, that is the
    newest one of its slot."""

    def __init__(self, run: RunDir, role: str, slot: int = 0):
        self.run, self.role, self.slot, self.attempt = run, role, slot, 0
        self.job_id = env("ELASTIC_JOB_ID") or f"pid-{os.getpid()}"
        self.crashes = 0  # of the ranks, since they last got on
        self.failure = ""  # what they died of the last time; "": that is not known

    def claim(self, notice: Notice) -> None:
        """Claim a new attempt, which fences older ones."""
        who = {"job_id": self.job_id, "node": node_name(), "pid": os.getpid(), "time": time.time()}
        claim = functools.partial(self.run.slots.claim, self.slot, who)
        self.attempt = until_written(claim, notice.__bool__)
        self.event("start", node=node_name())

    def note_crash(self, error: str, has_progressed: bool) -> bool:
        """Count a crash of the ranks. Did they die of the same error as the time before?"""
        is_same = bool(error) and error == self.failure
        self.crashes = 1 if has_progressed else self.crashes + 1
        self.failure = error
        return is_same

    def restart(self, failed: End, doomed: str) -> End | None:
        """None: the ranks start again. `doomed`: who has failed twice at its start, so
        that the run fails, too; "": nobody."""
        if doomed:
            what = f"{doomed} failed twice at its start: {failed.reason}"
            self.run.mark_failed(what, failed.detail)
            return failed
        self.event("restart", reason=failed.reason)
        return None

    @property
    def _who(self) -> dict:
        return {"role": self.role, "slot": self.slot, "attempt": self.attempt}

    def event(self, kind: str, **fields) -> None:
        self.run.event(kind, **self._who, job_id=self.job_id, **fields)

    def record(self, state: str, **fields) -> None:
        """Write the job's record. `state`: started | training | leaving | ended."""
        record = {**self._who, "node": node_name(), "state": state, **fields}
        self.run.jobs.write_ending(self.job_id, record)

    def end(self, end: End, steps: int | None, **measured) -> int:
        """Say how the job ended after `steps` (None: nobody knows), in an event and in
        its last record; the exit code."""
        known = {} if steps is None else {"steps": steps}
        self.event(EVENTS.get(end.outcome, "leave"), reason=end.reason, **known)
        return self.record_end(end, **known, **measured)

    def record_end(self, end: End, **fields) -> int:
        """Write the job's last record; the exit code."""
        code = EXIT_CODES[self.role].get(end.outcome, Exit.OK)
        self.record("ended", **asdict(end), code=code, **fields)
        return code

    def variables(self, rank: str, notice_s: float | None) -> dict[str, str]:
        """What a rank finds in its environment; by MARK `family` knows its processes."""
        return {MARK: f"{self.run.path}:{self.job_id}.{self.attempt}.{rank}",
                "ELASTIC_RUN_DIR": str(self.run.path), "ELASTIC_JOB_ID": self.job_id,
                "ELASTIC_ATTEMPT": str(self.attempt), "ELASTIC_NOTICE_S": str(notice_s or "")}

    def family(self, *ranks: str) -> set[int]:
        """All processes of these ranks (none given: of all ranks) on this node, also those
        that a launcher of the user's has started in a session of their own, if it is dead."""
        mine = f"{self.job_id}.{self.attempt}."
        found = proc.families(MARK, self.run.path, job_id=env("SLURM_JOB_ID", "")).items()
        return set().union(*(pids for owner, pids in found if owner.startswith(mine)
                             and (not ranks or owner.removeprefix(mine) in ranks)))

    def closing(self, notice: Notice) -> str:
        """Why the run does not go on in this job's mode, once the filesystem answers.
        Raises TryAgain at a notice, and after a silence of SILENT_S."""
        mode = "sync" if self.role == TRAINER else "local"
        return patiently(self.run.closing, mode, hurry=notice.__bool__, for_s=SILENT_S)


def run_job(make: Callable, run: RunDir, notice: Notice) -> int:
    """Make a job (an agent, a launcher or a master), of `run` and `notice`, and do it, unless
    the run is over; its exit code. A job has `program`, `notice`, main() and end(end), which
    both return that code. Its record says how it ended, after an error, too."""
    patiently(run.config, hurry=notice.__bool__, for_s=SILENT_S)
    job = make(run=run, notice=notice)
    try:
        job.program.record("started")
        if closing := job.program.closing(notice):
            return job.end(end_of_run(closing))
        return job.main()
    except Exception as error:
        end = end_of_error(error, job.program.role, bool(job.notice))
        print(end.detail or end.reason, file=sys.stderr, flush=True)
        return job.end(end)


def start_rank(
    command: Sequence[str], extra: Mapping[str, str], folder: str | None, sharers: int, **options
) -> subprocess.Popen:
    """Start one of the `sharers` processes that share the cores of this job (without
    Slurm: of this machine). It is killed when this one dies; its stderr is a pipe. It
    prints its stacks at a SIGABRT."""
    given = {"PYTHONFAULTHANDLER": "1", **environment(), **_threads(sharers), **extra}
    files = {"stdin": subprocess.DEVNULL, "stdout": sys.stdout, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=given, cwd=folder, preexec_fn=die_with_parent,
                            **files, **options)


def _threads(sharers: int) -> dict[str, str]:
    """An equal part of the cores. By default each process has a thread for every core,
    and training took four times as long where two shared two cores: threads that wait do
    not sleep, so they keep their cores from those that they wait for."""
    part = max(1, cores() // sharers)
    said = env("OMP_NUM_THREADS", str(part))  # the user knows better
    return {"OMP_NUM_THREADS": said} if part < len(os.sched_getaffinity(0)) else {}


def cores() -> int:
    """CPUs, as Slurm counts them, that this job has, of those that it may use: all of its
    node, where a site confines no job."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, sched_slurm.cores_per_node() or usable)
