"""The launcher of a synchronous job: starts the ranks, starts them again, and says how it
ended.

    python -m elastic.sync.launch RUNDIR    (`elastic launch`, what a trainer job runs)

It claims an attempt, which fences older jobs of the run, and starts one trainer per GPU:
on this machine as child processes, in a Slurm job through one `srun`. A notice goes to
the ranks (Slurm itself sends it to the step); they save and leave. Ranks that crash are
started again here, from the newest checkpoint, without going back to the queue: on the
nodes that still answer, if those are enough, and as long as a new checkpoint was
committed in between or `sync.crash_retries` allows it. If they die of the same error
twice before the run's first step, the run has failed. The last act is a reconcile pass.
No torch in this process.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from elastic.base import proc
from elastic.base.durable import log_what_fits, patiently, until_written
from elastic.base.environment import elastic_home, env, torch_program
from elastic.base.errors import ElasticError, Exit, TryAgain
from elastic.base.network import bind_address, free_port, node_name
from elastic.base.signals import Notice, install
from elastic.jobs import cadence, sched_slurm, sizing
from elastic.jobs.command import expand
from elastic.jobs.history import TRAINER, End, judge
from elastic.jobs.passes import Passes, reconcile_now
from elastic.jobs.program import SILENT_S, Program, run_job, start_rank
from elastic.jobs.slurm_info import get_slurm_info, log_job_info, notice_here, with_end_time
from elastic.jobs.slurm_text import expand_hostlist
from elastic.run import wording
from elastic.run.records import Outcome
from elastic.run.rundir import RunDir
from elastic.sync.keepalive import Keepalive
from elastic.sync.resumable import Resume

TAIL_LINES = 60  # the last words of the ranks
# Lines of stderr that are kept: many ranks complain of a peer that is gone, at more
# length than the peer said what it died of.
HEARD_LINES = 2000
MOST_LINE = 8192  # characters that are copied, and kept, as one line
# So long the other ranks may take to end after one has crashed. If they hang, they never end.
LINGER_S = 10.0
POLL_S = 0.1
CONTROL_S = 2.0  # between looks at what the user wants; trainers look themselves
PASSES_S = 300.0  # between passes of a job at work, and between its records
SUCCESSOR_S = 5.0  # from the start to the first pass: the scheduler lists this job by then
# A program that dies so soon may have died of the checkpoint that it was given.
AT_ONCE_S = 300.0
BAD_EXIT = re.compile(
    r"srun: error: (Node failure on |"
    r"\S+: tasks? [\d,-]+: (Killed|Abort|Seg|Out Of Memory|Exited with exit code (?!75|93)))"
)
UNFIT = re.compile(rf"srun: error: (\S+): tasks? [\d,-]+: Exited with exit code {Exit.UNFIT_NODE}")
# Exit codes of ranks that did not crash.
LEFT = (Exit.OK, Exit.TRY_AGAIN, Exit.DO_NOT_RESTART)


class Launcher:
    def __init__(self, run: RunDir, notice: Notice):
        self.run, self.notice, self.config = run, notice, run.config()
        self.program = Program(run, TRAINER)
        self.gpus = 0
        self._resume = Resume(run)
        self._passes: Passes | None = None
        self._rendezvous: TextIO | None = None  # the file by which the ranks meet
        self._keepalive: Keepalive | None = None  # the connections to the nodes
        self._told = ""  # why the run does not go on, as run.command has been told
        info = get_slurm_info()
        self._nodes = list(info.nodes) if info else [node_name()]
        self._unfit: set[str] = set()

    # ---- the program

    def main(self) -> int:
        """Train until the run is over, a notice has been obeyed, or nothing helps."""
        if info := get_slurm_info():
            log_job_info(with_end_time(info), _say)
        self._release_nodes()
        # So a successor waits in the queue soon, also without cron.
        self._passes = Passes(self.run, PASSES_S, SUCCESSOR_S)
        while not (end := self._attempt()):
            pass
        return self.end(end)

    def _attempt(self) -> End | None:
        """Start the ranks, and wait for their end. None: they crashed, and are worth
        another attempt."""
        before = self._resume.there()
        self.program.claim(self.notice)
        ranks = self._start()
        code = self._wait(ranks)
        closing, newest = self.program.closing(self.notice), self.run.slots.latest(0)
        end = judge(code=code, error=ranks.error_of(code), closing=closing, told=self._told,
                    notice=self.notice.signal_name, is_own=bool(self.config.run.command),
                    fenced_by=newest if newest > self.program.attempt else 0)
        if end.outcome == Outcome.DONE and not self.run.done():
            done = {"reason": "run.command has ended"}
            until_written(lambda: self.run.mark_done(done), self.notice.__bool__)
        return self._after_crash(end, ranks, before) if end.outcome == Outcome.CRASHED else end

    def _after_crash(self, end: End, ranks: "Ranks", before: dict[Path, int]) -> End | None:
        """The end of the job; None: the ranks are worth another attempt. `before`: the
        checkpoints that were there when this attempt began."""
        failed = replace(end, outcome=Outcome.FAILED, detail=ranks.last_words())
        progressed, lost = self._resume.has_progressed(before), self._lost_nodes()
        is_same = self.program.note_crash(ranks.error, progressed)
        at_once = time.time() - ranks.began < AT_ONCE_S and not (progressed or lost)
        self._resume.older = self._resume.older + 1 if at_once else 0
        is_unfit = node_name() in self._unfit  # it may be so on all nodes: that is a crash
        if lost and not is_unfit:
            left = len(self._nodes)
            if not (nodes := self._fitting(self.config.slurm.gpus_per_node, left)):
                return End(Outcome.YIELDED, f"only {left} nodes are left")
            self._nodes, self.program.crashes = self._nodes[:nodes], 0
        if is_unfit or self.program.crashes > self.config.sync.crash_retries or self.notice:
            return failed
        begun = before or self.run.jobs.progress() or self.run.commits.newest_version() > 0
        return self.program.restart(failed, "the trainer" if is_same and not begun else "")

    # ---- its nodes

    def _fitting(self, gpus_per_node: int, nodes: int) -> int:
        """How many of so many nodes the run can use, at a size that it may have; 0: they
        are too few for any."""
        gpus = (self.run.control().min, self.run.control().max)
        counts = sizing.node_counts(gpus, gpus_per_node, self.config.sync.sizes)
        return sizing.fit(counts, nodes)

    def _release_nodes(self) -> None:
        """Give back the nodes beyond the largest size that they make: Slurm before 23.02
        takes no list of sizes, and may give more."""
        count, job_id = len(self._nodes), self.program.job_id
        kept = self._fitting(self.config.slurm.gpus_per_node, count)
        if 0 < kept < count:
            self._nodes, over = self._nodes[:kept], count - kept
            try:
                sched_slurm.release_nodes(job_id, kept)
                self.run.event("nodes-released", nodes=over, left=kept, job_id=job_id)
            except ElasticError as error:
                _say(f"{over} nodes stay idle, not given back: {error}")

    def _lost_nodes(self) -> list[str]:
        """Go on without the nodes of the job that no longer answer, or are unfit. Returns
        them. Raises TryAgain at a notice, if Slurm is silent."""
        if len(self._nodes) < 2:
            return []
        before, hurry = self._nodes, self.notice.__bool__
        up = patiently(sched_slurm.answering, before, hurry=hurry, for_s=SILENT_S)
        self._nodes = [node for node in up if node not in self._unfit]
        lost = [node for node in before if node not in self._nodes]
        if lost:
            self.program.event("nodes-lost", nodes=lost, left=len(self._nodes))
        return lost

    # ---- the ranks

    def _start(self) -> "Ranks":
        """Start the ranks of an attempt: one process for each, or the `srun` that stands
        for all of them."""
        config, gpus_per_node = self.config, self._gpus_per_node()
        meeting = self._meet()
        self.gpus = len(self._nodes) * gpus_per_node
        self._record()
        shared = self.program.variables("", notice_here(config)) | meeting
        shared["ELASTIC_STARTED"] = str(time.time())
        program = [str(elastic_home() / "sbatch/rank.sh"), *config.slurm.rank_prefix]
        if not config.run.command:
            command = [*program, *torch_program("trainer"), str(self.run.path)]
            return self._start_ranks(command, gpus_per_node, shared)
        values = self._values(self._resume.choose(), gpus_per_node, meeting)
        shared |= {f"ELASTIC_{name.upper()}": value for name, value in values.items()}
        shared["ELASTIC_NOTICE_SIGNAL"] = config.sync.notice_signal
        self.program.event("restore", resume=values["resume"], world=self.gpus)
        command = [*program, *expand(config.run.command, values)]
        return self._start_ranks(command, config.sync.ranks_per_node or gpus_per_node, shared)

    def _gpus_per_node(self) -> int:
        if env("SLURM_JOB_ID"):
            return self.config.slurm.gpus_per_node
        given = int(env("ELASTIC_GPUS", "1"))
        return self._fitting(1, given) or given  # no size fits: all that were given

    def _meet(self) -> dict[str, str]:
        """Make the place where the ranks meet: a port of this node, or, if there is no
        other node, a file that only this user can open. Returns the variables by which
        the ranks find it."""
        if len(self._nodes) > 1:
            address = bind_address(self.config.sync.bind, sched_slurm.node_address(), "sync.bind")
            self._keepalive = Keepalive(address)
            places = {"ELASTIC_RENDEZVOUS": "", "ELASTIC_KEEPALIVE": self._keepalive.place}
        else:
            address, self._keepalive = "127.0.0.1", None
            # It lives as long as the attempt.
            self._rendezvous = os.fdopen(os.memfd_create("rendezvous"))
            file = f"/proc/{os.getpid()}/fd/{self._rendezvous.fileno()}"
            places = {"ELASTIC_RENDEZVOUS": file, "ELASTIC_KEEPALIVE": ""}
        return {**places, "MASTER_ADDR": address, "MASTER_PORT": str(free_port(address))}

    def _values(self, resume: str, gpus_per_node: int, meeting: dict[str, str]) -> dict[str, str]:
        """The values of the placeholders in run.command, which it also finds in its
        environment."""
        mtbi_s = cadence.observed_mtbi_s(self.run.jobs.endings())
        return {"python": sys.executable, "run": str(self.run.path),
                "attempt": str(self.program.attempt), "mtbi_s": f"{mtbi_s:.0f}",
                "resume": resume, "checkpoints": str(self._resume.folder),
                "master_addr": meeting["MASTER_ADDR"], "master_port": meeting["MASTER_PORT"],
                "nodes": str(len(self._nodes)), "gpus": str(self.gpus),
                "gpus_per_node": str(gpus_per_node)}

    def _start_ranks(self, command: list[str], per_node: int, shared: dict[str, str]) -> "Ranks":
        """In a process group of their own, so that a program's own children go with it."""
        config, is_in_slurm = self.config, bool(env("SLURM_JOB_ID"))
        if is_in_slurm:
            options, places = config.slurm.srun_options, [{}]
            command = sched_slurm.step_argv(self._nodes, per_node, command, options)
        else:
            places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(per_node)}
                      for rank in range(per_node)]
        folder = config.run.folder if config.run.command else None
        sharers = max(per_node, self.gpus // len(self._nodes))  # torchrun's ranks, too
        ways = {"sharers": sharers, "text": True, "errors": "replace", "process_group": 0}
        processes = [start_rank(command, shared | place, folder, **ways) for place in places]
        limit_s = config.sync.silent_timeout_s if config.run.command else 0.0
        here = set if is_in_slurm else self.program.family
        return Ranks(processes, self._keepalive, limit_s, self._resume, self._unfit, here)

    def _record(self) -> None:
        """Say that the job is at work, and on how many GPUs: a reconcile pass compares
        them with those that it might have."""
        self.program.record("training", gpus=self.gpus, trouble=self.program.failure)

    def _wait(self, ranks: "Ranks") -> int:
        """Wait until all ranks have left, or one has crashed: the others cannot go on
        without it. Returns the exit status of the first that failed."""
        has_told, code = False, None
        looked = recorded = time.monotonic()
        try:
            while code is None and (code := ranks.code()) is None:
                if self.config.run.command and time.monotonic() - looked > CONTROL_S:
                    looked = time.monotonic()
                    with contextlib.suppress(TryAgain):
                        self._told = self.run.closing("sync")
                if time.monotonic() - recorded > PASSES_S:  # so that a kill leaves a time
                    recorded = time.monotonic()
                    self._record()
                if (self.notice or self._told) and not has_told and (has_told := ranks.tell()):
                    self.program.event("notice", signal=self.notice.signal_name or self._told)
                if ranks.are_silent():
                    self.program.event("hang", seconds=round(self.config.sync.silent_timeout_s))
                    code = ranks.abort()
                elif ranks.are_stuck():
                    code = -signal.SIGKILL
                time.sleep(POLL_S)
        finally:
            ranks.end(code)
        return code

    # ---- the end

    def end(self, end: End) -> int:
        """Say how the job ended, and see to its successor; the exit code."""
        is_own, progress = bool(self.config.run.command), self.run.jobs.progress() or {}
        is_mine = progress.get("job_id") == self.program.job_id
        measured = {"startup_s": progress.get("startup_s") if is_mine else None}
        if not is_own or self._resume.there():  # else nobody knows
            measured["progressed"] = self._resume.has_progressed()
        steps = None if is_own else progress.get("step", 0)  # of the run, not of this job
        end = replace(end, unfit=tuple(sorted(self._unfit)))
        code = self.program.end(end, steps, gpus=self.gpus, **measured)
        _say(f"{end.outcome}: {end.reason}")
        if self._passes:
            self._passes.close()
        reconcile_now(self.run)
        return code


def _say(line: str) -> None:
    print(f"trainer  {line}", flush=True)


class Ranks:
    """The processes of one attempt, what they say on stderr, and whether they still live.
    In a Slurm job one `srun` stands for all of them."""

    def __init__(self, processes: list[subprocess.Popen], keepalive: Keepalive | None,
                 limit_s: float, resume: Resume, unfit: set[str],
                 here: Callable[[], set[int]] = set):
        """`limit_s`: how long they may neither say nor save anything; 0: for ever.
        `here`: returns all their processes, if Slurm does not look after them. `unfit`
        gets the nodes on which a rank finds that it cannot train."""
        self.began, self.error = time.time(), ""  # what they died of, if that is known
        self._heard: deque[str] = deque(maxlen=HEARD_LINES)
        self._processes, self._keepalive = processes, keepalive
        self._limit_s, self._resume, self._here, self._unfit = limit_s, resume, here, unfit
        # When srun said that a rank had crashed, and a node whose line has timed out.
        self._bad_exit_at, self._suspect = math.inf, ""
        self._readers = [threading.Thread(target=self._copy, args=[p.stderr]) for p in processes]
        for reader in self._readers:
            reader.start()

    def _copy(self, stream: TextIO) -> None:
        for line in iter(lambda: stream.readline(MOST_LINE), ""):
            print(line, end="", file=sys.stderr, flush=True)
            self._heard.append(line.rstrip("\n"))
            if unfit := UNFIT.match(line):
                self._unfit.update(expand_hostlist(unfit[1]))
            if BAD_EXIT.match(line):
                self._bad_exit_at = min(self._bad_exit_at, time.monotonic())

    def code(self) -> int | None:
        """The exit status of the attempt; None while no rank has crashed and some are at
        work."""
        codes = [process.poll() for process in self._processes]
        crashed = [code for code in codes if code not in (None, *LEFT)]
        if crashed or None in codes:
            return crashed[0] if crashed else None
        return max(codes)

    def error_of(self, code: int) -> str:
        """What they died of, once the last word is read."""
        has_spoken = self._bad_exit_at < math.inf  # a rank that crashed while others hung
        if 0 < code < 128 or (has_spoken and not self.error):
            self.error = wording.last_error("\n".join(self._heard))
        return self.error

    def last_words(self) -> str:
        return "\n".join([*self._heard][-TAIL_LINES:])

    def are_stuck(self) -> bool:
        """Do the ranks that are left wait for one that is gone?"""
        return time.monotonic() - self._bad_exit_at > LINGER_S or self._is_a_node_gone()

    def _is_a_node_gone(self) -> bool:
        """Has a line to a node timed out, and does the node start no step either?"""
        if self._keepalive:  # it tells of a node once
            self._suspect = self._suspect or self._keepalive.lost()
        with contextlib.suppress(TryAgain):
            if self._suspect and not sched_slurm.answering([self._suspect]):
                self.error = f"node {self._suspect} is silent"
                return True
            self._suspect = ""
        return False

    def are_silent(self) -> bool:
        """Has run.command neither said nor saved anything for `sync.silent_timeout`?"""
        heard = max(self.began, os.fstat(sys.stdout.fileno()).st_mtime)  # the job's log
        if not self._limit_s or time.time() - heard < self._limit_s:
            return False
        saved = max(self._resume.there().values(), default=0) / 1e9
        logs = (self._resume.run.path / "logs/ranks").glob("*.log")
        return time.time() - max([saved, *map(os.path.getmtime, logs)]) > self._limit_s

    def tell(self) -> bool:
        """Pass a notice on to the ranks, never through srun, which would kill its tasks
        at once. False: Slurm has not taken it."""
        if job_id := env("SLURM_JOB_ID"):
            return sched_slurm.signal_steps(job_id)
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        return True

    def abort(self) -> int:
        """Let the ranks that hang print their stacks, and say that they died of it. In
        Slurm all are asked at once: their stacks are whole in the logs of the ranks."""
        limit_s = f"{self._limit_s:g} s (sync.silent_timeout)"
        self.error = f"no output and no new checkpoint for {limit_s}"
        if job_id := env("SLURM_JOB_ID"):
            sched_slurm.signal_steps(job_id, "ABRT")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(proc.STACKS_S)
        else:
            alive = {process.pid for process in self._processes if process.poll() is None}
            proc.abort(alive | self._here())
        return -signal.SIGABRT

    def end(self, code: int | None) -> None:
        """End what is left of the attempt, whose exit status is `code` (None: not known)."""
        if code not in LEFT and (job_id := env("SLURM_JOB_ID")):
            with contextlib.suppress(TryAgain):
                # Before srun ends: the next ranks need the GPUs.
                sched_slurm.end_steps(job_id)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(ElasticError):
            proc.kill_all(self._here)  # those that a launcher has put into other sessions
        if self._keepalive:
            self._keepalive.close()
        for reader in self._readers:
            reader.join()


if __name__ == "__main__":
    log_what_fits()
    sys.exit(run_job(Launcher, RunDir(Path(sys.argv[1])), install()))
