"""The agent: a small process that holds a slot's lease while the training process works.

    python -m elastic.local.worker.agent RUNDIR SLOT    (`elastic agent`: a worker's job)

It claims the slot (a new attempt, which fences older ones), starts the training process
(one per GPU), and renews the lease with its progress: to live and to make progress are
two things, so a training process that hangs is seen as stalled. The agent passes a notice
on to it, and it delivers what it has. When everything has ended, the exit record says
why, and the lease is given up.

A training process that crashes is started again here, without going back to the queue, as
long as it delivers something between crashes. One that dies of the same error twice
before its first step, in a run in which nobody has trained yet, would do so everywhere:
the run has failed. No torch in this process: it must answer in milliseconds.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from elastic.base import proc
from elastic.base.durable import log_what_fits
from elastic.base.environment import torch_program
from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.network import free_port, node_name
from elastic.base.signals import KILL_WAIT_S, NOTICES, Notice, install
from elastic.jobs.command import expand
from elastic.jobs.history import WORKER, End, end_of_run, name_of
from elastic.jobs.program import Program, run_job, start_rank
from elastic.jobs.slurm_info import notice_here
from elastic.local.store import WorkerStore
from elastic.run import wording
from elastic.run.records import Outcome
from elastic.run.rundir import RunDir

TAIL_BYTES = 8192  # the last words of a training process
HEARD_BYTES = 1 << 18  # enough for a rank's error, behind which many others tell of its loss
MOST_READ = 1 << 20  # at once: more than a pipe holds; the rest is read the next time
NOTICE_LAG_S = 1.0  # how much later than the training process the agent may get the notice
CRASHES_IN_PLACE = 2  # restarts in this job without a delivered delta in between
# The report of a training process that has not said anything yet.
SILENT = {"state": "loading", "version": -1, "step": 0, "steps_total": 0, "loss": 0.0,
          "step_s": 0.0, "tokens_per_s": 0.0, "trouble": "", "moves": 0}

MOVING = ("state", "step", "version", "moves")  # if none of them changes it may hang


@dataclass
class Training:
    """The training processes of one attempt, one per GPU, and what they say."""

    processes: list[subprocess.Popen]
    pipe: int  # read end of what they report through
    report: dict = field(default_factory=SILENT.copy)  # the newest
    said: bytes = b""  # the end of their error output
    rest: bytes = b""  # the part of a progress line that has come so far
    error: str = ""  # the exception that they died of
    moved: float = field(default_factory=time.monotonic)  # when the report last moved
    heard: float = field(default_factory=time.monotonic)  # when they last reported
    kill_at: float = inf
    files: tuple[int, ...] = ()  # descriptors that they may open as long as they live
    family: Callable[..., set[int]] = lambda *_: set()  # all processes of these ranks
    told: set[int] = field(default_factory=set)  # orphans that have had the notice

    def exit_code(self) -> int | None:
        """That of the first rank that crashed, else of the first that a notice ended,
        else 0. None while all ranks run, and while a notice has left orphans."""
        codes = [process.poll() for process in self.processes]
        failed = [_as_signal(code) for code in codes if code]
        if crashes := [code for code in failed if -code not in NOTICES]:
            return crashes[0]
        if failed:
            return None if self.orphans() else failed[0]
        return None if None in codes else 0

    def orphans(self) -> set[int]:
        """The processes that a rank's launcher (bash, conda run) has left behind, as it
        died of a notice."""
        codes = [_as_signal(process.poll() or 0) for process in self.processes]
        ended = [str(rank) for rank, code in enumerate(codes) if -code in NOTICES]
        return self.family(*ended) if ended else set()

    def tell_orphans(self) -> None:
        """Send the notice, once, to those orphans that none of the others has started:
        they may still deliver."""
        orphans = self.orphans()
        for process in filter(None, map(proc.Process.of, orphans - self.told)):
            if process.parent not in orphans:
                self.told.add(process.pid)
                proc.send([process.pid], signal.SIGTERM)

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def pids(self) -> set[int]:
        """Those that live, and all that they have started."""
        return {process.pid for process in self.processes if process.poll() is None} | self.family()

    def kill(self) -> None:
        proc.send(self.pids(), signal.SIGKILL)

    def send_away(self, within_s: float) -> None:
        """Send them a notice, once; they are killed if they still live after `within_s`."""
        if self.kill_at == inf:
            self.kill_at = time.monotonic() + within_s
            self.signal(signal.SIGTERM)

    def sources(self) -> list:
        """For select(): what becomes readable when they say something."""
        return [self.pipe, *self._streams()]

    def _streams(self) -> list:
        """The error outputs that have not come to their end."""
        return [p.stderr for p in self.processes if not p.stderr.closed]

    def read(self) -> bool:
        """Take in progress lines and error output, without waiting. Has the state
        changed?"""
        for stream in self._streams():
            words = _available(stream.fileno(), stream.close)  # else select() never waits again
            sys.stderr.buffer.write(words)
            sys.stderr.flush()
            self.said = (self.said + words)[-HEARD_BYTES:]
        *lines, self.rest = (self.rest + _available(self.pipe)).split(b"\n")
        before = dict(self.report)
        for line in lines:
            self.report |= json.loads(line)
            self.heard = time.monotonic()
        if any(before.get(key) != self.report.get(key) for key in MOVING):
            self.moved = time.monotonic()
        return before.get("state") != self.report.get("state")

    def still_s(self) -> float:
        """Seconds without a sign of life: while they work, without a move; else without a
        report. While they load they may be silent."""
        if self.report["state"] == "loading":
            return 0.0
        works = self.report["state"] in ("training", "delivering")
        return time.monotonic() - (self.moved if works else self.heard)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ElasticError):
            proc.kill_all(self.family)  # orphans would train on, unseen
        for process in self.processes:
            process.wait()
        self.read()
        for descriptor in (self.pipe, *self.files):
            os.close(descriptor)

    def last_words(self) -> str:
        return self.said[-TAIL_BYTES:].decode(errors="replace")


class Lease:
    """The slot's lease at the master's server; held by an agent that has reached the
    server."""

    def __init__(self, program: Program):
        self._program, config = program, program.run.config()
        self._health, self._is_sites = config.health, bool(config.redis.url)
        self.store: WorkerStore | None = None
        self.served = time.monotonic()  # when there last was a master's server

    def renew(self, fields: dict) -> None:
        """Renew the lease, or claim it on a server that does not know it. A silent server is
        no reason to stop. Raises Fenced if files say that a higher attempt has the slot."""
        run, slot, attempt = self._program.run, self._program.slot, self._program.attempt
        try:
            if self.store is None:
                self.store = WorkerStore.open(run, self._health.heartbeat_s + 1)
            self.store.meet()  # a server whose master hangs may answer for hours
            if not self.store.lease(slot, attempt, fields, self._health.lease_s):
                raise TryAgain(f"slot {slot} has an attempt higher than {attempt}")
            # The run's own server ends with the master; a site's does not.
            if not self._is_sites or self.store.has_master(self._health.lease_s):
                self.served = time.monotonic()
        except TryAgain:
            self.drop()
            with contextlib.suppress(TryAgain):
                run.slots.fence(slot, attempt)

    def has_nobody_trained(self) -> bool:
        """So far, in this run: then a fault is not this slot's alone. False also if
        nobody knows."""
        with contextlib.suppress(TryAgain):
            told = self._program.run.commits.told_version()
            if self.store is None:  # no server to ask who trains on version 0
                return told < 0
            return told <= 0 and not any(s.steps_total for s in self.store.slots().values())
        return False

    def give_up(self) -> None:
        """Give the lease up. If no server is at hand it lapses, and the exit record says
        why."""
        if self.store:
            with contextlib.suppress(ElasticError):
                self.store.release(self._program.slot, self._program.attempt)
        self.drop()

    def drop(self) -> None:
        if self.store:
            self.store.close()
        self.store = None


class Agent:
    def __init__(self, run: RunDir, slot: int, notice: Notice):
        self.notice, self.config = notice, run.config()
        self.program = Program(run, WORKER, slot)
        self.lease = Lease(self.program)
        self._next_beat = 0.0
        self._steps = 0  # of this job's newest earlier attempt that took any
        self._has_told = False  # the notice has been passed on
        self._too_short = ""  # why a notice does not suffice to deliver
        self._deserted = ""  # why this job leaves its GPUs

    # ---- the program

    def main(self) -> int:
        """Train until the run is over, a notice has been obeyed, or nothing helps."""
        self.notice.window_s = notice_here(self.config) or KILL_WAIT_S
        while True:
            training = self._start()
            end = self._judge(training, self._watch(training))
            if end.outcome == Outcome.CRASHED:
                end = self._after_crash(end, training)
            if end:
                return self.end(end, training)

    def _judge(self, training: Training, code: int) -> End:
        """What the end of the training process means."""
        end, program = training.report.get("end"), self.program
        if code == Exit.TRY_AGAIN or -code in NOTICES or end == Outcome.YIELDED:
            self.notice.wait(NOTICE_LAG_S)
        is_sent_away = end == Outcome.YIELDED and not (self.notice or self._deserted)
        has_left = code == 0 or -code in NOTICES  # of which its launcher may have died
        if has_left and end and not is_sent_away:
            notice = self._deserted or f"notice: {self.notice.signal_name}"
            return End(Outcome(end), notice if end == Outcome.YIELDED else f"run {end}")
        if code == Exit.DO_NOT_RESTART:
            why = f"a higher attempt than {program.attempt} has slot {program.slot}"
            return End(Outcome.FENCED, why)
        if self._deserted:
            return End(Outcome.YIELDED, self._deserted)
        if code == Exit.TRY_AGAIN and self.notice:
            nothing = "notice, with nothing to deliver, or nobody to deliver it to"
            return End(Outcome.YIELDED, nothing)
        if code and self.notice:
            ended = f"notice, and the training process ended with {name_of(code)}"
            return End(Outcome.YIELDED, ended)
        if closing := program.closing(self.notice):
            return end_of_run(closing)
        if code > 0 and code != Exit.TRY_AGAIN:
            training.error = wording.last_error(training.said.decode(errors="replace"))
        how = f"ended with {name_of(code)}" if code else "left before the run was over"
        how = f"the training process {how}"
        if training.error:
            how = f"{training.error} ({how})"
        return End(Outcome.CRASHED, how)

    def _after_crash(self, end: End, training: Training) -> End | None:
        """None: it is worth another attempt."""
        unfit = (node_name(),) if training.exit_code() == Exit.UNFIT_NODE else ()
        failed = replace(end, outcome=Outcome.FAILED, detail=training.last_words(), unfit=unfit)
        is_same = self.program.note_crash(training.error, bool(training.report.get("delivered")))
        if unfit or self.program.crashes > CRASHES_IN_PLACE or self.notice:
            return failed
        self._steps = training.report["steps_total"] or self._steps
        is_doomed = is_same and self.lease.has_nobody_trained()
        return self.program.restart(failed, f"worker {self.program.slot}" if is_doomed else "")

    def end(self, end: End, training: Training | None = None) -> int:
        """Say how it ended, and give the slot up; the exit code."""
        steps = (training.report["steps_total"] if training else 0) or self._steps
        if self._too_short and end.outcome == Outcome.YIELDED:
            end = replace(end, reason=f"{end.reason}; {self._too_short}")
        code = self.program.end(end, steps)
        print(f"agent  slot {self.program.slot} {end.outcome}: {end.reason}", flush=True)
        self.lease.give_up()
        return code

    # ---- the training process

    def _start(self) -> Training:
        program, ranks = self.program, self.config.slurm.gpus_per_worker
        program.claim(self.notice)
        who = f"slot {program.slot} attempt {program.attempt} job {program.job_id}"
        print(f"agent  {who}", flush=True)
        reader, writer = os.pipe()
        # A file, as any user may connect to a port.
        rendezvous = os.memfd_create("rendezvous")
        # By name: `conda run` and others do not pass descriptors on. In a container with
        # users of its own a process may not open another one's, but has inherited them.
        places = f"/proc/{os.getpid()}/fd/"
        shared = {
            "ELASTIC_SLOT": str(program.slot), "WORLD_SIZE": str(ranks),
            "ELASTIC_PROGRESS": f"{places}{writer}", "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")),
            "ELASTIC_RENDEZVOUS": f"{places}{rendezvous}",
        }
        files = (writer, rendezvous)
        processes = [self._start_rank(rank, shared, files) for rank in range(ranks)]
        return Training(processes, reader, files=files, family=program.family)

    def _start_rank(self, rank: int, shared: dict, files: tuple[int, ...]) -> subprocess.Popen:
        program, own = self.program, {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        names = {"python": sys.executable, "run": str(program.run.path),
                 "slot": str(program.slot), "attempt": str(program.attempt)}
        words = expand(self.config.run.command, names) or torch_program("worker")
        folder = self.config.run.folder if self.config.run.command else None
        command = [*self.config.slurm.rank_prefix, *words]
        given = {**shared, **own, **program.variables(str(rank), self.notice.window_s)}
        return start_rank(command, given, folder, self._sharers(), pass_fds=files)

    def _sharers(self) -> int:
        """The ranks that share the cores of this job, or of this machine."""
        if self.config.run.scheduler == "slurm":
            return self.config.slurm.gpus_per_worker
        most = self.program.run.control().max
        return min(most, self.config.local_scheduler.gpus or most)

    def _watch(self, training: Training) -> int:
        """Heartbeat until every rank has ended; returns the exit code."""
        self._next_beat = 0.0
        try:
            while (code := training.exit_code()) is None:
                training.tell_orphans()
                self._wait_for_something(training)
                if self.notice and not self._has_told:
                    self._tell(training)
                self.kill_if_hung(training)
                self._leave_if_deserted(training)
                if time.monotonic() >= self._next_beat:
                    self._leave_if_over(training)
                    self.beat(training)
                if time.monotonic() > training.kill_at:
                    training.kill()
        except Fenced:
            code = Exit.DO_NOT_RESTART
        finally:
            training.end()  # a rank that has failed leaves the others waiting for it
        return code

    def _wait_for_something(self, training: Training) -> None:
        sources = training.sources() + ([] if self.notice else [self.notice])
        timeout_s = max(0.0, min(self._next_beat - time.monotonic(), 1.0))
        began = time.monotonic()
        select.select(sources, [], [], timeout_s)
        # If it took longer the whole job was suspended, and nothing in it has hung.
        lost_s = max(0.0, time.monotonic() - began - timeout_s)
        training.moved, training.heard = training.moved + lost_s, training.heard + lost_s
        self.lease.served += lost_s
        if training.read():
            self._next_beat = 0.0

    def _tell(self, training: Training) -> None:
        """Pass the notice on to the training process."""
        self._has_told = True
        self.program.event("notice", signal=self.notice.signal_name)
        if self._too_short:  # if the kill comes first, there is no other record
            self.program.record("leaving", reason=self._too_short)
        training.signal(signal.SIGTERM)

    def kill_if_hung(self, training: Training) -> None:
        """Kill a training process without a sign of life. One that moves may go on to
        deliver, also after a notice, until the scheduler kills it."""
        if not self.lease.store:  # without a master there may be nothing to do, so it is no hang
            training.moved = training.heard = time.monotonic()
        if (still_s := training.still_s()) > self.config.health.hang_timeout_s:
            self.program.event("hang", seconds=round(still_s))
            training.said += b"agent  no sign of life for %.0f s: killed\n" % still_s
            proc.abort(training.pids(), meanwhile=training.read)
            training.kill()
            # Processes that a dead filesystem holds outlive that: they are told of again.
            training.moved = training.heard = time.monotonic()

    def _leave_if_deserted(self, training: Training) -> None:
        """Give the GPUs back if there has been no master for `health.master_wait`, and so
        nothing to train. If its loop has ended, it may have something of its own to do."""
        idle_s, report = time.monotonic() - self.lease.served, training.report
        is_idle = report["state"] != "training" and not report.get("end")
        if is_idle and idle_s > self.config.health.master_wait_s and not self._deserted:
            self._deserted = f"no master for {idle_s:.0f} s (health.master_wait)"
            self.program.event("warning", reason=self._deserted)
            training.send_away(self.config.health.hang_timeout_s)

    def _leave_if_over(self, training: Training) -> None:
        """Send away a training process that is still loading when the run is over: it may
        never open LocalSGD, and so hear of it from nobody else."""
        with contextlib.suppress(ElasticError):  # a silence, or a file that is damaged for now
            if training.report["state"] == "loading" and self.program.run.closing("local"):
                training.send_away(self.notice.window_s)

    # ---- heartbeats

    def beat(self, training: Training) -> None:
        """Renew the lease with what there is to report. Raises Fenced."""
        self._compare_with_notice(training.report.get("needs_s", 0.0))
        self._next_beat = time.monotonic() + self.config.health.heartbeat_s
        self.lease.renew(self._fields(training))

    def _compare_with_notice(self, needs_s: float) -> None:
        """Say once if a preemption would cost the steps since the last delivery."""
        window_s = self.notice.window_s
        if needs_s > window_s and not self._too_short:
            needs = f"a step, a delivery and the inner state take {needs_s:g} s"
            self._too_short = f"the notice of {window_s:g} s is too short: {needs}"
            self.program.event("warning", reason=self._too_short)

    def _fields(self, training: Training) -> dict:
        report, program = training.report, self.program
        silent_s = time.monotonic() - training.heard
        trouble = report["trouble"] if report["state"] == "blocked" else ""
        failure = "" if report["steps_total"] else self.program.failure
        if report["state"] == "waiting" and silent_s > self.config.health.stall_after_s:
            report = report | {"state": "stalled"}
        return {
            "slot": program.slot, "attempt": program.attempt, "job_id": program.job_id,
            "node": node_name(), "pid": training.processes[0].pid,
            **{name: report[name] for name in SILENT}, "trouble": trouble or failure,
        }


def _as_signal(code: int) -> int:
    """An exit code as Python has it: a shell's 143, as its child died of a notice, is -15."""
    return 128 - code if code - 128 in NOTICES else code


def _available(descriptor: int, at_end: Callable[[], None] = lambda: None) -> bytes:
    """What can be read now without waiting; `at_end` is called at the end of the stream."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, MOST_READ) or at_end() or b""
    return b""


if __name__ == "__main__":
    log_what_fits()
    make = functools.partial(Agent, slot=int(sys.argv[2]))
    sys.exit(run_job(make, RunDir(Path(sys.argv[1])), install()))
