"""The launcher of a synchronous job: starts the ranks, starts them again, and says how it ended.

    python -m elastic.sync.launch RUNDIR      (`elastic launch`, the command of a trainer job)

It claims an attempt, which fences older jobs of the run, and starts one trainer per GPU:
on this machine as child processes, in a Slurm job through one `srun`. A notice goes to the ranks
(Slurm itself sends it to the step); they save and leave. When ranks crash they are started again
here, from the newest checkpoint, without going back to the queue: on the nodes that still answer,
if those are enough, and as long as a new checkpoint was committed in between or
`sync.crash_retries` allow. Where they die of the same error twice before the run's first step, the
run has failed. The last act is a reconcile pass. No torch in this process.
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
from pathlib import Path
from typing import TextIO

from elastic.base.durable import log_what_fits, until_written
from elastic.base.environment import elastic_home, env, environment, torch_program
from elastic.base.errors import ElasticError, Exit, TryAgain
from elastic.base.network import bind_address, free_port, node_name
from elastic.base.signals import Notice, die_with_parent, install, name_of
from elastic.jobs import cadence, sched_local, sched_slurm, sizing
from elastic.jobs.command import STACKS, expand
from elastic.jobs.slurm_info import (
    get_slurm_info,
    log_job_info,
    notice_here,
    resume_paths,
    with_end_time,
)
from elastic.run import wording
from elastic.run.rundir import RunDir
from elastic.sync.keepalive import Keepalive

TAIL_LINES = 60
MOST_LINE = 8192  # characters that are copied, and kept, as one line
LINGER_S = 10.0  # for the others to end after a rank has crashed; where they hang, they never do
POLL_S = 0.1
CONTROL_S = 2.0  # between looks at what the user wants; trainers look themselves
PASS_S = 60.0
SUCCESSOR_S = 5.0  # after the start: the scheduler lists this job as running by then
AT_ONCE_S = 300.0  # a program that dies so soon may have died of the checkpoint that it was given
ABORT_S = 0.5  # to print stack traces
BAD_EXIT = re.compile(
    r"srun: error: (Node failure on |"
    r"\S+: tasks? [\d,-]+: (Killed|Abort|Seg|Exited with exit code (?!75|93)))"
)
LEFT = (Exit.OK, Exit.TRY_AGAIN, Exit.DO_NOT_RESTART)  # exit codes of ranks that did not crash
EXIT_CODES = {"stopped": Exit.DO_NOT_RESTART, "fenced": Exit.DO_NOT_RESTART, "failed": Exit.ERROR}


class Launcher:
    def __init__(self, run: RunDir, notice: Notice):
        self.run, self.notice, self.config = run, notice, run.config()
        self.job_id = env("ELASTIC_JOB_ID") or f"pid-{os.getpid()}"
        self.attempt = self.gpus = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._crashes = 0
        self._at_start = self._checkpoints_there()
        self._error = self._failure = ""  # what the ranks died of; and the time before
        self._began = 0.0  # the attempt
        self._resume: Path | None = None  # what run.command was given
        self._follower: subprocess.Popen | None = None  # who passes when this has ended
        self._older = 0  # so many checkpoints are passed over: it died on them at once
        self._rendezvous: TextIO | None = None  # of the ranks
        self._bad_exit_at = math.inf  # when srun said that a rank had crashed
        self._lines: Keepalive | None = None  # to the nodes
        self._over = ""  # why the run does not go on, as run.command has been told
        info = get_slurm_info()
        self._nodes = list(info.nodes) if info else [node_name()]

    # ---- the program

    def main(self) -> int:
        """Train until the run is over, a notice has been obeyed, or nothing helps."""
        self._record({"state": "started"})
        if info := get_slurm_info():
            log_job_info(with_end_time(info), lambda said: print(f"trainer  {said}", flush=True))
        if over := self.run.closing("sync"):
            return self._end("done" if over == "done" else "stopped", f"the run is {over}")
        self._release_nodes()
        self._have_successors()
        while True:
            before = self._checkpoints_there()
            outcome, reason = self._judge(self._train())
            if outcome != "crashed":
                return self._end(outcome, reason)
            is_same, self._failure = self._error and self._error == self._failure, self._error
            progressed = self._has_progressed(before)
            self._crashes = 1 if progressed else self._crashes + 1
            lost = self._lost_nodes()
            at_once = time.time() - self._began < AT_ONCE_S and not (progressed or lost)
            self._older = self._older + 1 if at_once else 0
            if lost:
                if not (nodes := self._fitting(self.config.slurm.gpus_per_node, len(self._nodes))):
                    return self._end("yielded", f"only {len(self._nodes)} nodes still answer")
                self._nodes, self._crashes = self._nodes[:nodes], 0
            if self._crashes > self.config.sync.crash_retries or self.notice:
                return self._end("failed", reason)
            if is_same and not (before or self.run.progress() or self.run.newest_version() > 0):
                told = "\n".join(self._tail)
                self.run.mark_failed(f"the trainer failed twice at its start: {reason}", told)
                return self._end("failed", reason)
            self._event("restart", reason=reason)

    def _fitting(self, gpus_per_node: int, nodes: int) -> int:
        """How many of the nodes make a size that the run may have; 0: they are too few."""
        gpus = (self.run.control().min, self.run.control().max)
        return sizing.fit(sizing.node_counts(gpus, gpus_per_node, self.config.sync.sizes), nodes)

    def _release_nodes(self) -> None:
        """Give back the nodes that make no size: Slurm before 23.02 takes no list of sizes."""
        count = len(self._nodes)
        kept = self._fitting(self.config.slurm.gpus_per_node, count)
        if 0 < kept < count:
            self._nodes, over = self._nodes[:kept], count - kept
            try:
                sched_slurm.release_nodes(self.job_id, kept)
                self.run.event("nodes-released", nodes=over, left=kept, job_id=self.job_id)
            except ElasticError as error:
                print(f"trainer  {over} nodes stay idle, not given back: {error}", flush=True)

    def _lost_nodes(self) -> list[str]:
        """Go on without those nodes of the job that no longer answer; which these are."""
        if len(self._nodes) < 2:
            return []
        before, self._nodes = self._nodes, sched_slurm.answering(self._nodes)
        lost = [node for node in before if node not in self._nodes]
        if lost:
            self.run.event("nodes-lost", nodes=lost, left=len(self._nodes), job_id=self.job_id)
        return lost

    def _judge(self, code: int) -> tuple[str, str]:
        """What the end of the ranks means: (done | yielded | stopped | fenced | crashed, why)."""
        if self._over and code in (Exit.OK, Exit.TRY_AGAIN) and not self.run.done():
            return "stopped", f"the run is {self._over}"
        if code == Exit.OK and self.config.run.command and not self.run.done():
            if self.notice:  # many save and leave with 0; one that was done says so again
                return "yielded", "notice, and the ranks ended with 0"
            self.run.mark_done({"reason": "run.command has ended", "time": time.time()})
            self.run.event("done", reason="run.command has ended")
        if code == Exit.OK and self.run.done():
            return "done", "run done"
        if code == Exit.DO_NOT_RESTART and self.run.latest_attempt(0) > self.attempt:
            return "fenced", f"a higher attempt than {self.attempt} has the run"
        if code == Exit.TRY_AGAIN and self.notice:
            return "yielded", f"notice: {self.notice.signal_name}"
        if code == Exit.TRY_AGAIN:
            return "yielded", "the ranks left on a notice"
        over = self.run.closing("sync")
        if not over and code == Exit.DO_NOT_RESTART and not self.config.run.command:
            over = "going on in sync mode again"
        if over:
            return ("done" if over == "done" else "stopped"), f"the run is {over}"
        if self.notice and not 0 <= code <= 128:  # a signal, as Popen or a shell writes it
            return "yielded", f"notice, and the ranks ended with {name_of(code)}"
        end = f"the ranks ended with {name_of(code)}"
        if 0 < code < 128:
            self._error = wording.last_error("\n".join(self._tail))
        return "crashed", f"{self._error} ({end})" if self._error else end

    def _has_progressed(self, before: dict[Path, int]) -> bool:
        """Is there a checkpoint that was not there before, or the one resumed from, written anew?
        Others are written again on the way to where the ranks died: that has no end."""
        return any(written > before.get(path, 0) and (path not in before or path == self._resume)
                   for path, written in self._checkpoints_there().items())  # fmt: skip

    def _checkpoints_there(self) -> dict[Path, int]:
        """The whole ones and when they were written, the one to go on from first."""
        return resume_paths(self._checkpoints(), self.config.sync.resume)

    def _choose_resume(self) -> str:
        """The newest checkpoint on which the program has not died at once; else the oldest."""
        there, names = [*self._checkpoints_there()], sorted(os.listdir(self._checkpoints()))
        self._resume = there[min(self._older, len(there) - 1)] if there else None
        if names and not there:
            what = f"nothing in {self._checkpoints()} looks like a whole checkpoint"
            found = wording.brief(", ".join(names))
            self.run.event("warning", reason=f"{what} (there are: {found}): see sync.resume")
        return str(self._resume or "")

    def _checkpoints(self) -> Path:
        """Where they are; a relative path is one below the run file's folder."""
        settings = self.config
        own = settings.sync.checkpoints if settings.run.command else ""
        return Path(settings.run.folder, own) if own else self.run.path / "checkpoints"

    # ---- the ranks

    def _train(self) -> int:
        """Start the ranks and wait for their end; the exit status of the first that failed."""
        who = {"job_id": self.job_id, "node": node_name(), "pid": os.getpid(), "time": time.time()}
        self.attempt = until_written(lambda: self.run.claim_attempt(0, who), self.notice.__bool__)
        self._event("start", node=node_name())
        self._tail.clear()
        self._error, self._bad_exit_at, self._began = "", math.inf, time.time()
        processes = self._start_in_slurm() if env("SLURM_JOB_ID") else self._start_here()
        readers = [threading.Thread(target=self._copy, args=[p.stderr]) for p in processes]
        for reader in readers:
            reader.start()
        code = self._wait(processes)
        for reader in readers:
            reader.join()
        return code

    def _shared(self, nodes: int) -> dict[str, str]:
        """What every rank finds in its environment; they meet on this node, and where there is no
        other one in a file that only this user can open."""
        address, file = "127.0.0.1", ""
        if nodes > 1:
            known_as = sched_slurm.node_address()
            address = bind_address(self.config.sync.bind, known_as, "sync.bind")
            self._lines = Keepalive(address)
        else:
            self._rendezvous = os.fdopen(os.memfd_create("rendezvous"))  # as long as the attempt
            file = f"/proc/{os.getpid()}/fd/{self._rendezvous.fileno()}"
        return {"ELASTIC_RENDEZVOUS": file,
                "ELASTIC_KEEPALIVE": self._lines.place if self._lines else "",
                "ELASTIC_ATTEMPT": str(self.attempt), "ELASTIC_JOB_ID": self.job_id,
                "ELASTIC_STARTED": str(time.time()), "ELASTIC_RUN_DIR": str(self.run.path),
                "ELASTIC_NOTICE_S": str(notice_here(self.config) or ""),
                "MASTER_ADDR": address, "MASTER_PORT": str(free_port(address))}  # fmt: skip

    def _start_here(self) -> list[subprocess.Popen]:
        given = int(env("ELASTIC_GPUS", "1"))
        gpus = self._fitting(1, given) or given
        ranks, shared = self._ranks(gpus), self._shared(1)
        command = self._rank_command(1, gpus, shared)
        shared["WORLD_SIZE"] = str(ranks)
        own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
        return [self._spawn(command, {**shared, **each}) for each in own]

    def _start_in_slurm(self) -> list[subprocess.Popen]:
        gpus, nodes = self.config.slurm.gpus_per_node, self._nodes
        shared = self._shared(len(nodes))
        command = self._rank_command(len(nodes), gpus, shared)
        options = self.config.slurm.srun_options
        step = sched_slurm.step_argv(nodes, self._ranks(gpus), command, options)
        return [self._spawn(step, shared)]

    def _ranks(self, gpus: int) -> int:
        """How many processes a node of so many GPUs gets."""
        return (self.config.run.command and self.config.sync.ranks_per_node) or gpus

    def _rank_command(self, nodes: int, gpus_per_node: int, shared: dict[str, str]) -> list[str]:
        """What every rank runs; adds what a program of the user's may read to `shared`."""
        self.gpus = nodes * gpus_per_node
        # Reconcile compares the GPUs with what there might be.
        self._record({"state": "training", "trouble": self._failure})
        program = [str(elastic_home() / "sbatch/rank.sh"), *self.config.slurm.rank_prefix]
        if not self.config.run.command:
            return [*program, *torch_program("trainer"), str(self.run.path)]
        checkpoints = self._checkpoints()
        checkpoints.mkdir(parents=True, exist_ok=True)
        values = {
            "resume": self._choose_resume(), "checkpoints": str(checkpoints),
            "python": sys.executable, "run": str(self.run.path), "attempt": str(self.attempt),
            "mtbi_s": f"{cadence.observed_mtbi_s(self.run.endings()):.0f}",
            "master_addr": shared["MASTER_ADDR"], "master_port": shared["MASTER_PORT"],
            "nodes": str(nodes), "gpus_per_node": str(gpus_per_node), "gpus": str(self.gpus),
        }  # fmt: skip
        shared |= {f"ELASTIC_{name.upper()}": value for name, value in values.items()}
        shared["ELASTIC_NOTICE_SIGNAL"] = self.config.sync.notice_signal
        self.run.event("restore", resume=values["resume"], world=self.gpus,
                       attempt=self.attempt, job_id=self.job_id)  # fmt: skip
        return [*program, *expand(self.config.run.command, values)]

    def _spawn(self, command: list[str], extra: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            command, env=STACKS | environment() | extra, stdin=subprocess.DEVNULL,
            stdout=sys.stdout, cwd=self.config.run.folder if self.config.run.command else None,
            stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=die_with_parent,
            process_group=0,  # so that a program's own children go with it
        )  # fmt: skip

    def _copy(self, stream) -> None:
        for line in iter(lambda: stream.readline(MOST_LINE), ""):
            print(line, end="", file=sys.stderr, flush=True)
            self._tail.append(line.rstrip("\n"))
            if BAD_EXIT.match(line):
                self._bad_exit_at = min(self._bad_exit_at, time.monotonic())

    def _wait(self, processes: list[subprocess.Popen]) -> int:
        """Until all have left, or one has crashed: the others cannot go on without it."""
        told, looked = False, time.monotonic()
        while True:
            codes = [process.poll() for process in processes]
            crashed = [code for code in codes if code not in (None, *LEFT)]
            if crashed or None not in codes:
                break
            if self.config.run.command and time.monotonic() - looked > CONTROL_S:
                looked, self._over = time.monotonic(), self.run.closing("sync")
            if (self.notice or self._over) and not told:
                told = True
                self._event("notice", signal=self.notice.signal_name or self._over)
                self._tell(processes)
            if self._is_silent():
                self._abort(processes)
                crashed = [-signal.SIGABRT]
                break
            if time.monotonic() - self._bad_exit_at > LINGER_S or self._is_a_node_gone():
                crashed = [-signal.SIGKILL]
                break
            time.sleep(POLL_S)
        if crashed and (job_id := env("SLURM_JOB_ID")):
            with contextlib.suppress(TryAgain):
                sched_slurm.end_steps(job_id)  # before srun: the next ones need their GPUs
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._lines:
            self._lines.close()
            self._lines = None
        return crashed[0] if crashed else max(codes)

    def _is_a_node_gone(self) -> bool:
        """Has a line to a node timed out, and does the node start no step either?"""
        node = self._lines.lost() if self._lines else ""
        if not node or sched_slurm.answering([node]):
            return False
        self._error = f"node {node} is silent"
        return True

    def _is_silent(self) -> bool:
        """Has run.command neither said nor saved anything for `sync.silent_timeout`?"""
        limit_s = self.config.sync.silent_timeout_s if self.config.run.command else 0.0
        heard = max(self._began, os.fstat(sys.stdout.fileno()).st_mtime)  # the job's log
        if not limit_s or time.time() - heard < limit_s:
            return False
        return time.time() - max(self._checkpoints_there().values(), default=0) / 1e9 > limit_s

    def _abort(self, processes: list[subprocess.Popen]) -> None:
        """End ranks that hang; they print their stacks."""
        limit_s = self.config.sync.silent_timeout_s
        self._error = f"no output and no new checkpoint for {limit_s:g} s (sync.silent_timeout)"
        self._event("hang", seconds=round(limit_s))
        if job_id := env("SLURM_JOB_ID"):
            sched_slurm.signal_steps(job_id, "ABRT")
        for process in processes if not job_id else ():
            os.killpg(process.pid, signal.SIGABRT)
        time.sleep(ABORT_S)

    def _tell(self, processes: list[subprocess.Popen]) -> None:
        """Pass a notice on. Never through srun, which would kill its tasks at once."""
        if job_id := env("SLURM_JOB_ID"):
            sched_slurm.signal_steps(job_id)
            return
        for process in processes:
            process.send_signal(signal.SIGTERM)

    # ---- the end

    def _end(self, outcome: str, reason: str) -> int:
        code = EXIT_CODES.get(outcome, Exit.OK)
        detail = "\n".join(self._tail) if outcome == "failed" else ""
        kind = {"yielded": "preempt", "failed": "lost"}.get(outcome, "leave")
        progress = self.run.progress() or {}
        mine = progress if progress.get("job_id") == self.job_id else {}
        measured = {name: mine.get(name) for name in ("tokens_per_s", "startup_s")}
        steps = {} if self.config.run.command else {"steps": progress.get("step", 0)}
        worked = {"steps": int(self._has_progressed(self._at_start)), **steps}
        self._event(kind, reason=reason, **steps)
        self._record({"state": "ended", "outcome": outcome, "code": code, "reason": reason,
                      "detail": detail, **worked, **measured})  # fmt: skip
        print(f"trainer  {outcome}: {reason}", flush=True)
        if self._follower and outcome in ("done", "stopped", "fenced"):
            os.killpg(self._follower.pid, signal.SIGKILL)
        self._reconcile()
        return code

    def _have_successors(self) -> None:
        """Without cron, too: one waits in the queue soon, and is started however this one ends."""
        timer = threading.Timer(SUCCESSOR_S, self._reconcile)
        timer.daemon = True
        timer.start()
        if self.config.run.scheduler == "local":
            self._follower = sched_local.pass_after_me(self.run.path)

    def _reconcile(self) -> None:
        """See to the successor now, or to the end of the run; cron would come later."""
        command = [str(elastic_home() / "bin" / "elastic-reconcile"), str(self.run.path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PASS_S)

    def _event(self, kind: str, **fields) -> None:
        who = {"role": "trainer", "slot": 0, "attempt": self.attempt, "job_id": self.job_id}
        self.run.event(kind, **who, **fields)

    def _record(self, fields: dict) -> None:
        who = {"role": "trainer", "slot": 0, "attempt": self.attempt, "node": node_name(),
               "gpus": self.gpus}  # fmt: skip
        self.run.write_ending(self.job_id, {**who, **fields})


def main() -> int:
    log_what_fits()
    return Launcher(RunDir(Path(sys.argv[1])), install()).main()


if __name__ == "__main__":
    sys.exit(main())
