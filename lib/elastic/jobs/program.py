"""What the programs of all jobs do for their run: claim a number, say what happens, say
the end.

A job's exit record says first that it has started, and last how it has ended; a job that
leaves none was killed. Reconcile reads it, and the exit code where there is nothing else.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from elastic.base import proc
from elastic.base.durable import patiently, until_written
from elastic.base.environment import env, environment
from elastic.base.errors import Exit
from elastic.base.network import node_name
from elastic.base.signals import Notice, die_with_parent
from elastic.jobs.command import STACKS
from elastic.jobs.ending import EVENTS, EXIT_CODES, End, end_of_error
from elastic.run.rundir import RunDir

MARK = "ELASTIC_RANK"  # RUN_DIR:JOB_ID.ATTEMPT.RANK, in the environment of all its processes
SILENT_S = 600.0  # then the GPUs may go to a node whose filesystem answers
ABORT_S = 0.5  # for a rank to print its stacks, between SIGABRT and SIGKILL


@dataclass
class Crashes:
    """The crashes of a job's ranks, in a row: since it last got on."""

    count: int = 0
    error: str = ""  # that the ranks died of the last time; "": there was none, or it is not known

    def add(self, error: str, has_progressed: bool) -> bool:
        """Note one more. Did the ranks die of the same error as the time before?"""
        is_same = bool(error) and error == self.error
        self.count = 1 if has_progressed else self.count + 1
        self.error = error
        return is_same


class Program:
    """A job in the run directory: the newest attempt of its slot, once it has claimed
    one."""

    def __init__(self, run: RunDir, role: str, slot: int = 0):
        self.run, self.role, self.slot, self.attempt = run, role, slot, 0
        self.job_id = env("ELASTIC_JOB_ID") or f"pid-{os.getpid()}"

    def claim(self, notice: Notice) -> None:
        """A new attempt, which fences older ones."""
        who = {"job_id": self.job_id, "node": node_name(), "pid": os.getpid(), "time": time.time()}
        claim = functools.partial(self.run.slots.claim, self.slot, who)
        self.attempt = until_written(claim, notice.__bool__)
        self.event("start", node=node_name())

    @property
    def _who(self) -> dict:
        return {"role": self.role, "slot": self.slot, "attempt": self.attempt}

    def event(self, kind: str, **fields) -> None:
        self.run.event(kind, **self._who, job_id=self.job_id, **fields)

    def record(self, state: str, **fields) -> None:
        """What becomes of the job: started | training | leaving | ended."""
        record = {**self._who, "node": node_name(), "state": state, **fields}
        self.run.jobs.write_ending(self.job_id, record)

    def end(self, end: End, steps: int | None, **measured) -> int:
        """Say how the job ended after `steps` (None: nobody knows), in an event and in its
        last record; the exit code."""
        known = {} if steps is None else {"steps": steps}
        self.event(EVENTS.get(end.outcome, "leave"), reason=end.reason, **known)
        return self.record_end(end, **known, **measured)

    def record_end(self, end: End, **fields) -> int:
        """Write the job's last record; the exit code."""
        code = EXIT_CODES[self.role].get(end.outcome, Exit.OK)
        self.record("ended", **asdict(end), code=code, **fields)
        return code

    def mark(self, rank: str) -> dict[str, str]:
        """The environment by which `family` knows the processes of a rank."""
        return {MARK: f"{self.run.path}:{self.job_id}.{self.attempt}.{rank}"}

    def family(self, *ranks: str) -> set[int]:
        """All processes of these ranks (none: of all) on this node, also where a launcher
        has started them in a session of their own, and has died."""
        mine = f"{self.job_id}.{self.attempt}."
        found = proc.families(MARK, self.run.path, job_id=env("SLURM_JOB_ID", "")).items()
        return set().union(*(pids for owner, pids in found if owner.startswith(mine)
                             and (not ranks or owner.removeprefix(mine) in ranks)))  # fmt: skip

    def closing(self, mode: str, notice: Notice) -> str:
        """Why the run does not go on in this mode, once the filesystem answers. Raises
        TryAgain at a notice, and after a silence of SILENT_S."""
        return patiently(self.run.closing, mode, hurry=notice.__bool__, for_s=SILENT_S)


def run_job(kind: Callable, run: RunDir, notice: Notice, *slot: int) -> int:
    """The exit code of an agent, a launcher or a master (its `kind`), whose record says
    how it ended, also if that was by an error."""
    patiently(run.config, hurry=notice.__bool__, for_s=SILENT_S)
    job = kind(run, *slot, notice)
    try:
        return job.main()
    except Exception as error:
        end = end_of_error(error, job.program.role, bool(job.notice))
        print(end.detail or end.reason, file=sys.stderr, flush=True)
        return job.end(end)


def start_rank(
    command: Sequence[str], extra: Mapping[str, str], folder: str | None, **options
) -> subprocess.Popen:
    """A process that goes with this one; its stderr is a pipe."""
    return subprocess.Popen(
        command, env={**STACKS, **environment(), **extra}, cwd=folder, stdin=subprocess.DEVNULL,
        stdout=sys.stdout, stderr=subprocess.PIPE, preexec_fn=die_with_parent, **options,
    )  # fmt: skip
