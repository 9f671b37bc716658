"""The agent: a small process that holds a slot's lease while the training process works.

    python -m elastic.local.worker.agent RUNDIR SLOT    (`elastic agent`: a worker's job)

It claims the slot (a new attempt, which fences older ones), starts the trainer (one process per
GPU), and renews the lease with the trainer's progress: liveness and progress are two things, so a
hung trainer is seen as stalled and not as live. A notice goes on to the trainer, which delivers
what it has. When everything has ended, the exit record says why, and the lease is given up.

A trainer that crashes is started again here, without going back to the queue, as long as it
delivers something between crashes. One that dies of the same error twice before its first step,
in a run in which nobody has trained yet, would do so everywhere: the run has failed. No torch in
this process: it must answer in milliseconds.
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
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from elastic.base.durable import log_what_fits, until_written
from elastic.base.environment import env, environment, torch_program
from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.network import free_port, node_name
from elastic.base.signals import KILL_WAIT_S, Notice, die_with_parent, install, name_of
from elastic.jobs.command import STACKS, expand
from elastic.jobs.slurm_info import notice_here
from elastic.local.store import Store
from elastic.run import wording
from elastic.run.rundir import RunDir

TAIL_BYTES = 8192  # the last words of a trainer
MOST_READ = 1 << 20  # more than a pipe holds; who says more is heard the next time
ABORT_S = 0.5  # to print stack traces
CRASHES_IN_PLACE = 2  # restarts in this job without a delivered delta in between
EXIT_CODES = {"stopped": Exit.DO_NOT_RESTART, "failed": Exit.ERROR}
# What a trainer reports that has not spoken yet.
SILENT = {"state": "loading", "version": -1, "step": 0, "steps_total": 0, "loss": 0.0,
          "tokens_per_s": 0.0, "trouble": "", "moves": 0}  # fmt: skip

MOVING = ("state", "step", "version", "moves")  # who changes none of them may hang


@dataclass
class Trainer:
    """The training processes of one attempt."""

    processes: list[subprocess.Popen]
    progress: int  # read end of the progress pipe
    said: dict = field(default_factory=SILENT.copy)
    tail: bytes = b""
    rest: bytes = b""
    error: str = ""  # the exception that it died of
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def exit_code(self) -> int | None:
        """None while all run; else that of the first rank that failed, or 0."""
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else (None if None in codes else 0)

    def signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


class Agent:
    def __init__(self, run: RunDir, slot: int, notice: Notice):
        self.run, self.slot, self.notice = run, slot, notice
        self.config = run.config()
        self.job_id = env("ELASTIC_JOB_ID") or f"pid-{os.getpid()}"
        self.attempt = 0
        self._store: Store | None = None
        self._next_beat = 0.0
        self._crashes = 0
        self._failure = ""  # the exception that the attempt before died of
        self._told = False  # the notice has been passed on
        self._too_short = ""  # why a notice does not suffice to deliver
        self._served = time.monotonic()  # when the master's server last answered
        self._deserted = ""  # why this job leaves its GPUs

    # ---- the program

    def main(self) -> int:
        """Train until the run is over, a notice has been obeyed, or nothing helps."""
        self._record({"state": "started"})
        if over := self.run.closing("local"):
            return self._end("done" if over == "done" else "stopped", f"the run is {over}")
        self.notice.window_s = notice_here(self.config) or KILL_WAIT_S
        while True:
            trainer = self._start()
            outcome, reason = self._judge(trainer, self._watch(trainer))
            if outcome != "crashed":
                return self._end(outcome, reason, trainer)
            if self._crashes > CRASHES_IN_PLACE or self.notice:
                return self._end("failed", reason, trainer)
            is_same, self._failure = trainer.error == self._failure != "", trainer.error
            if is_same and self._nobody_has_trained():
                what = f"worker {self.slot} failed twice at its start: {reason}"
                self.run.mark_failed(what, _tail(trainer))
                return self._end("failed", reason, trainer)
            self._event("restart", reason=reason)

    def _judge(self, trainer: Trainer, code: int) -> tuple[str, str]:
        """What the trainer's end means: (done | stopped | yielded | fenced | crashed, reason)."""
        end = trainer.said.get("end")
        if code == 0 and end:
            notice = self._deserted or f"notice: {self.notice.signal_name}"
            return end, {"yielded": notice}.get(end, f"run {end}")
        if code == Exit.DO_NOT_RESTART:
            return "fenced", f"a higher attempt than {self.attempt} has slot {self.slot}"
        if self._deserted:
            return "yielded", self._deserted
        if code == Exit.TRY_AGAIN and self.notice:
            return "yielded", "notice, with nothing to deliver, or nobody to deliver it to"
        if code < 0 and self.notice:
            return "yielded", f"notice, and the training process ended with {name_of(code)}"
        if over := self.run.closing("local"):
            return "done" if over == "done" else "stopped", f"the run is {over}"
        self._crashes = 1 if trainer.said.get("delivered") else self._crashes + 1
        end = "left before the run was over" if code == 0 else f"ended with {name_of(code)}"
        if code > 0 and code != Exit.TRY_AGAIN:
            trainer.error = wording.last_error(_tail(trainer))
        end = f"the training process {end}"
        return "crashed", f"{trainer.error} ({end})" if trainer.error else end

    def _nobody_has_trained(self) -> bool:
        """So far, in this run: then the fault is not this slot's alone."""
        with contextlib.suppress(TryAgain):
            workers = self._store.slots().values() if self._store else ()
            newest = 0 if self._store else -1
            return self.run.told_version() <= newest and not any(w.steps_total for w in workers)
        return False

    # ---- the trainer

    def _start(self) -> Trainer:
        who = {"job_id": self.job_id, "node": node_name(), "pid": os.getpid(), "time": time.time()}
        claim = functools.partial(self.run.claim_attempt, self.slot, who)
        self.attempt = until_written(claim, self.notice.__bool__)
        print(f"agent  slot {self.slot} attempt {self.attempt} job {self.job_id}", flush=True)
        self._event("start", node=node_name())
        reader, writer = os.pipe()
        rendezvous = os.memfd_create("rendezvous")  # whoever opens a port opens it to all users
        ranks = self.config.slurm.gpus_per_worker
        shared = {
            "ELASTIC_RUN_DIR": str(self.run.path), "ELASTIC_SLOT": str(self.slot),
            "ELASTIC_ATTEMPT": str(self.attempt), "ELASTIC_JOB_ID": self.job_id,
            "ELASTIC_PROGRESS_FD": str(writer), "WORLD_SIZE": str(ranks),
            "ELASTIC_NOTICE_S": str(self.notice.window_s),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")),
            "GLOO_SOCKET_IFNAME": "lo", "ELASTIC_RENDEZVOUS": f"/proc/self/fd/{rendezvous}",
        }  # fmt: skip
        names = {"python": sys.executable, "run": str(self.run.path), "slot": str(self.slot),
                 "attempt": str(self.attempt)}  # fmt: skip
        program = expand(self.config.run.command, names) or torch_program("worker")
        command = [*self.config.slurm.rank_prefix, *program]
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    command, env={**STACKS, **environment(), **shared, **own},
                    pass_fds=[writer, rendezvous],
                    cwd=self.config.run.folder if self.config.run.command else None,
                    stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=subprocess.PIPE,
                    preexec_fn=die_with_parent,
                )
            )  # fmt: skip
        os.close(writer)
        os.close(rendezvous)
        return Trainer(processes, reader)

    def _watch(self, trainer: Trainer) -> int:
        """Heartbeat until every rank has ended; returns the exit code."""
        self._next_beat = 0.0
        try:
            while trainer.exit_code() is None:
                self._wait_for_something(trainer)
                if self.notice and not self._told:
                    self._told = True
                    self._event("notice", signal=self.notice.signal_name)
                    if self._too_short:  # the last word, if the kill comes first
                        self._record({"state": "leaving", "reason": self._too_short})
                    trainer.signal(signal.SIGTERM)
                self._kill_if_hung(trainer)
                self._leave_if_deserted(trainer)
                if time.monotonic() >= self._next_beat:
                    self._beat(trainer)
            code = trainer.exit_code()
        except Fenced:
            code = Exit.DO_NOT_RESTART
        finally:
            # A rank that has failed leaves the others waiting for it: they cannot go on.
            trainer.signal(signal.SIGKILL)
            for process in trainer.processes:
                process.wait()
            self._read(trainer)
            os.close(trainer.progress)
        return code

    def _wait_for_something(self, trainer: Trainer) -> None:
        sources = [trainer.progress]
        sources += [p.stderr for p in trainer.processes if p.poll() is None]
        if not self.notice:
            sources.append(self.notice)
        timeout_s = max(0.0, min(self._next_beat - time.monotonic(), 1.0))
        select.select(sources, [], [], timeout_s)
        self._read(trainer)

    def _read(self, trainer: Trainer) -> None:
        """Take in progress lines and error output, without waiting for either."""
        for process in trainer.processes:
            said = _available(process.stderr.fileno())
            sys.stderr.buffer.write(said)
            sys.stderr.flush()
            trainer.tail = (trainer.tail + said)[-TAIL_BYTES:]
        *lines, trainer.rest = (trainer.rest + _available(trainer.progress)).split(b"\n")
        before = dict(trainer.said)
        for line in lines:
            trainer.said |= json.loads(line)
            trainer.heard = time.monotonic()
        if any(before.get(key) != trainer.said.get(key) for key in MOVING):
            trainer.moved = time.monotonic()
        if before.get("state") != trainer.said.get("state"):
            self._next_beat = 0.0

    def _kill_if_hung(self, trainer: Trainer) -> None:
        if self._store is None:  # without a line to the master there may be nothing to do
            trainer.moved = trainer.heard = time.monotonic()
        working = trainer.said["state"] in ("training", "delivering")
        still_s = time.monotonic() - (trainer.moved if working else trainer.heard)
        if trainer.said["state"] != "loading" and still_s > self.config.health.hang_timeout_s:
            self._event("hang", seconds=round(still_s))
            trainer.tail += f"agent  no sign of life for {still_s:.0f} s: killed\n".encode()
            trainer.signal(signal.SIGABRT)  # prints its stacks
            time.sleep(ABORT_S)
            trainer.signal(signal.SIGKILL)
        # After a notice it is the scheduler that kills: until then whoever moves may deliver.

    def _leave_if_deserted(self, trainer: Trainer) -> None:
        """There is nothing to train without a master, and nobody knows when there is one again. Its
        server ends with it; a site's does not, but then nothing new comes to wait for."""
        idle_s = time.monotonic() - (trainer.heard if self.config.redis.url else self._served)
        is_idle = trainer.said["state"] != "training"
        if is_idle and idle_s > self.config.health.master_wait_s and not self._deserted:
            self._deserted = f"no master for {idle_s:.0f} s (health.master_wait)"
            self._event("warning", reason=self._deserted)
            trainer.signal(signal.SIGTERM)

    # ---- the lease

    def _beat(self, trainer: Trainer) -> None:
        """Renew the lease; claim it where it is not known. A silent server is no reason to stop."""
        health = self.config.health
        self._compare_with_notice(trainer.said.get("needs_s", 0.0))
        self._next_beat = time.monotonic() + health.heartbeat_s
        try:
            if self._store is None:
                self._store = Store.open(self.run, health.heartbeat_s + 1, "worker")
            fields = self._fields(trainer)
            lease = (self.slot, self.attempt, fields, health.lease_s)
            if not self._store.beat(*lease) and not self._store.claim(*lease):
                raise TryAgain(f"slot {self.slot} has an attempt higher than {self.attempt}")
            self._served = time.monotonic()
        except (TryAgain, Fenced):
            self._drop_store()
            with contextlib.suppress(TryAgain):
                self.run.fence(self.slot, self.attempt)

    def _compare_with_notice(self, needs_s: float) -> None:
        """Say once if a preemption would cost the steps since the last delivery."""
        window_s = self.notice.window_s
        if needs_s > window_s and not self._too_short:
            self._too_short = (
                f"the notice of {window_s:g} s is too short: "
                f"a step, a delivery and the inner state take {needs_s:g} s"
            )
            self._event("warning", reason=self._too_short)

    def _fields(self, trainer: Trainer) -> dict:
        said = trainer.said
        silent_s = time.monotonic() - trainer.heard
        if said["state"] == "waiting" and silent_s > self.config.health.stall_after_s:
            said = said | {"state": "stalled"}
        return {
            "slot": self.slot, "attempt": self.attempt, "job_id": self.job_id,
            "node": node_name(), "pid": trainer.processes[0].pid,
            **{name: said[name] for name in SILENT},
            "trouble": said["trouble"] or ("" if said["steps_total"] else self._failure),
        }  # fmt: skip

    def _drop_store(self) -> None:
        if self._store:
            self._store.close()
        self._store = None

    # ---- the record

    def _end(self, outcome: str, reason: str, trainer: Trainer | None = None) -> int:
        code = EXIT_CODES.get(outcome, Exit.OK)
        detail = _tail(trainer) if trainer and outcome == "failed" else ""
        steps = trainer.said["steps_total"] if trainer else 0
        if self._too_short and outcome == "yielded":
            reason += f"; {self._too_short}"
        kind = {"yielded": "preempt", "failed": "lost"}.get(outcome, "leave")
        self._event(kind, reason=reason, steps=steps)
        self._record(
            {"state": "ended", "outcome": outcome, "code": code, "reason": reason,
             "detail": detail, "steps": steps},
        )  # fmt: skip
        print(f"agent  slot {self.slot} {outcome}: {reason}", flush=True)
        with contextlib.suppress(ElasticError):  # the last word: who sees it looks at the record
            if self._store is None and trainer:
                self._store = Store.open(self.run, role="worker")
            if self._store:
                self._store.release(self.slot, self.attempt)
        self._drop_store()
        return code

    def _event(self, kind: str, **fields) -> None:
        who = {"role": "worker", "slot": self.slot, "attempt": self.attempt, "job_id": self.job_id}
        self.run.event(kind, **who, **fields)

    def _record(self, fields: dict) -> None:
        who = {"role": "worker", "slot": self.slot, "attempt": self.attempt, "node": node_name()}
        self.run.write_ending(self.job_id, {**who, **fields})


def _tail(trainer: Trainer) -> str:
    return trainer.tail.decode(errors="replace")


def _available(descriptor: int) -> bytes:
    """What can be read now without waiting (empty at the end of the stream, too)."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, MOST_READ)
    return b""


def main() -> int:
    folder, slot = sys.argv[1:]
    log_what_fits()
    agent = Agent(RunDir(Path(folder)), int(slot), install())
    try:
        return agent.main()
    except Exception as error:
        traceback.print_exc()
        outcome = "yielded" if agent.notice else "failed"
        return agent._end(outcome, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
