"""A scheduler of processes on this machine, so that all of elasticity can be lived on a
laptop.

There is no daemon: jobs are files in a state directory, and whoever calls starts what
fits.

    jobs/17.json   the job as submitted; never changes; written before all else
    jobs/17.claim  made once, by the job's first process (its line of /proc/PID/stat) or by
                   whoever cancels it before it starts: whichever makes it decides what the
                   job becomes
    jobs/17.cause  why it ends: CANCELLED or PREEMPTED (it was sent away), else ENDED
    jobs/17.swept  it has ended, and so have all its processes
    capacity.json  {"gpus": N} in place of what configurations say, if somebody writes it

A caller may be killed at any point: a job without a claim is pending and gets started
(again), and of two processes for one job the second finds the claim made and leaves. A
process is identified by pid and start time. Every process of a job carries the job in its
environment, so that killing a job leaves nothing behind, as a cgroup would; what outlives
a job's first process is killed by the next caller. A job that was told to go is killed
when its grace is over, even if nobody calls again.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGTERM

from elastic.base import durable, proc
from elastic.base.config import Config
from elastic.base.durable import create_once, make_folder, own, read_json, to_json, write_atomic
from elastic.base.environment import elastic_home, environment, registry_dir
from elastic.jobs.history import Job
from elastic.jobs.sched import Elsewhere, JobSpec, parse_job_name
from elastic.run.rundir import RunDir

# Becomes the job: the redirection fails where the claim exists (set -C opens with
# O_EXCL).
CLAIM = 'set -C; read -r me < /proc/$$/stat; echo "$me" 2>/dev/null > "$0" && exec "$@"'
NEVER = b"-"  # the claim of whoever cancelled a pending job
START_S = 5.0  # for a new process to make its claim
POLL_S = 0.01
KEEP_S = 3600.0  # how long an ended job is listed
VISIBLE = "CUDA_VISIBLE_DEVICES"
MARK = "ELASTIC_LOCAL_JOB"  # STATE_DIR:JOB_ID in the environment of all its processes


class LocalScheduler:
    """Jobs as processes of this machine. `config` gives GPUs and grace."""

    def __init__(self, config: Config | None = None, state: Path | None = None):
        self.state = (state or registry_dir() / "local").absolute()
        self.grace_s = config.local_scheduler.grace_s if config else 10.0
        make_folder(self.state / "jobs", 0o700, parents=True)

    def jobs(self, within_s: float = 0.0) -> list[Job]:
        """All jobs, pending, running and lately ended; starts pending ones that fit.
        Raises TryAgain where another machine has to be asked."""
        with self._locked():
            self._check_host()
            reason = "Resources"
            try:
                self._start_pending()
            except OSError as error:  # a full disk: they stay pending, and say so
                reason = f"{error.strerror}: {self.state}"
            return [self._job(job_id, reason) for job_id in self._ids()]

    def submit(self, spec: JobSpec) -> str:
        """Queue a job, start it if it fits. Never refuses."""
        with self._locked():
            job_id = self._new_id(spec)
            record = {
                "name": spec.name, "command": spec.command(),
                "environment": dict(spec.environment), "folder": str(spec.run_dir),
                "log": str(RunDir(spec.run_dir).log_path(spec.role, spec.slot)),
                "least_gpus": spec.gpus[0], "gpus": spec.gpus[1],
                "capacity": spec.config.local_scheduler.gpus, "submit_time": time.time(),
                "host": os.uname().nodename,
            }
            write_atomic(self._path(job_id, "json"), to_json(record), 0o600)
            # It is queued: whoever lists it says why it waits.
            with contextlib.suppress(OSError):
                self._start_pending()
        return job_id

    def cancel(self, job_id: str, kill: bool = False) -> None:
        """A pending job never starts. A running one gets a notice, and is killed after
        its grace."""
        try:
            if self._record(job_id) and create_once(self._path(job_id, "claim"), NEVER):
                create_once(self._path(job_id, "cause"), b"CANCELLED")
        finally:  # also on a full disk
            self._send_away(job_id, b"CANCELLED", 0.0 if kill else self.grace_s)

    def wait_for(self, job_id: str, spec: JobSpec) -> None:
        """Nothing to do: here GPUs are free as soon as their job has ended."""

    def preempt(self, job_id: str, grace_s: float | None = None) -> None:
        """Take a running job away with notice, as a partition with GraceTime does."""
        self._send_away(job_id, b"PREEMPTED", self.grace_s if grace_s is None else grace_s)

    def kill(self, job_id: str) -> None:
        """End all processes of a running job without notice, as a lost node does; but
        this one."""
        leader = self._leader(job_id)
        first = {leader.pid} if leader else set()  # it shows no mark in the middle of an exec
        proc.kill_all(lambda: (first | proc.families(MARK, self.state)[job_id]) - {os.getpid()})

    def spare_gpus(self, spec: JobSpec, most: int) -> int:
        """GPUs, at most `most`, that nobody uses."""
        with self._locked():
            used = sum(given.get("count", 0) for given in self._given().values())
            return max(0, min(most, self._limit(spec.config.local_scheduler.gpus) - used))

    # ---- files

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Appended to, not cut to 0 bytes, which a full disk may refuse. Another user could
        # hold what he may read.
        with open(self.state / "lock", "ab", opener=partial(os.open, mode=0o600)) as file:
            if os.fstat(file.fileno()).st_mode & 0o077:  # an older version made it
                os.fchmod(file.fileno(), 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, job_id: str, kind: str) -> Path:
        return self.state / "jobs" / f"{job_id}.{kind}"

    def _ids(self) -> list[str]:
        names = (path.stem for path in (self.state / "jobs").glob("[0-9]*.json"))
        return sorted(filter(str.isdecimal, names), key=int)

    def _new_id(self, spec: JobSpec) -> str:
        """The next number that neither this directory nor the run has seen."""
        number = (read_json(self.state / "last.json") or {"id": 0})["id"] + 1
        while (spec.run_dir / "exit" / f"{number}.json").exists():
            number += 1
        write_atomic(self.state / "last.json", to_json({"id": number}))
        return str(number)

    def _job(self, job_id: str, why_pending: str) -> Job:
        record, claim = self._record(job_id), self._path(job_id, "claim")
        run, role, slot = parse_job_name(record["name"])
        job = Job(job_id, role, slot, "PENDING", why_pending, record["submit_time"], run=run)
        if not claim.exists():
            return job
        ended = "" if self._leader(job_id) else _read(self._path(job_id, "cause")) or "ENDED"
        started_at = None if claim.read_bytes() == NEVER else claim.stat().st_mtime
        return replace(job, state=ended or "RUNNING", reason="", started_at=started_at,
                       node=os.uname().nodename)

    def _check_host(self) -> None:
        """Raise Elsewhere if jobs here are another machine's (several may share a home):
        they would seem to have ended, or be started again."""
        for job_id in self._ids():
            is_swept = self._path(job_id, "swept").exists()
            host = "" if is_swept else self._record(job_id).get("host", "")
            if host not in ("", os.uname().nodename):
                hint = f"ask there; or, where that is no more, remove {self.state}"
                raise Elsewhere(f"the jobs in {self.state} are of {host}", hint)

    def _record(self, job_id: str) -> dict:
        return read_json(self._path(job_id, "json")) or {}

    # ---- starting

    def _start_pending(self) -> None:
        """Clear up after ended jobs, then start what fits, oldest first."""
        running, everything = self._given(), self._ids()
        pending = [job_id for job_id in everything if not self._path(job_id, "claim").exists()]
        self._clear_up([job_id for job_id in everything if job_id not in {*running, *pending}])
        # One of each name at a time, as Slurm's singleton has it.
        names = {self._record(job_id)["name"] for job_id in running}
        used = sum(given.get("count", 0) for given in running.values())
        devices = [str(gpu) for given in running.values() for gpu in given.get("gpus", ())]
        for job_id in pending:
            record = self._record(job_id)
            count = min(record["gpus"], max(0, self._limit(record["capacity"]) - used))
            if count >= record["least_gpus"] and record["name"] not in names:
                names.add(record["name"])
                used += count
                devices += self._start(job_id, record, count, devices)

    def _given(self) -> dict[str, dict]:
        """Running jobs, and what each was given: `count` GPUs, and the names of real
        ones."""
        running = filter(self._leader, self._ids())
        return {job_id: read_json(self._path(job_id, "devices")) or {} for job_id in running}

    def _limit(self, configured: int) -> int:
        capacity = (read_json(self.state / "capacity.json") or {}).get("gpus")
        return capacity if capacity is not None else configured or sys.maxsize

    def _clear_up(self, ended: Sequence[str]) -> None:
        for job_id in ended:
            if not self._path(job_id, "swept").exists():
                self.kill(job_id)
                create_once(self._path(job_id, "cause"), b"ENDED")
                create_once(self._path(job_id, "swept"), b"")
            if time.time() - self._path(job_id, "cause").stat().st_mtime > KEEP_S:
                # The claim last: while it is there no late first process can make one.
                for kind in ("json", "devices", "cause", "swept", "claim"):
                    self._path(job_id, kind).unlink(missing_ok=True)

    def _start(self, job_id: str, record: Mapping, count: int, in_use: Sequence[str]) -> list[str]:
        """Start a job's first process on `count` GPUs. Returns the devices among them: a
        machine may have fewer, or none."""
        devices = _least_used(in_use, count, record["environment"].get(VISIBLE))
        environment = {
            **record["environment"], "ELASTIC_JOB_ID": job_id, "ELASTIC_GPUS": str(count),
            "ELASTIC_HOME_DIR": str(registry_dir(record["environment"])),
            MARK: f"{self.state}:{job_id}",
        }
        write_atomic(self._path(job_id, "devices"), to_json({"count": count, "gpus": devices}))
        environment |= {VISIBLE: ",".join(devices)} if devices else {}
        claim = self._path(job_id, "claim")
        try:
            with open(record["log"], "ab", opener=own) as log:
                command = ["/bin/sh", "-c", CLAIM, str(claim), *record["command"]]
                detached(command, environment, log, record["folder"])
        except OSError:  # its run directory is gone: it ends without having started
            create_once(claim, NEVER)
        deadline = time.monotonic() + START_S
        while not claim.exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return devices

    # ---- ending

    def _send_away(self, job_id: str, cause: bytes, grace_s: float) -> None:
        """Send a notice to a running job's process group. A process of its own kills the
        job after the grace, even if this one is gone by then."""
        if not (leader := self._leader(job_id)):
            return
        try:
            create_once(self._path(job_id, "cause"), cause)
        finally:
            if not grace_s:
                self.kill(job_id)
        if grace_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, SIGTERM)
            program = (sys.executable, "-P", "-m", "elastic.jobs.sched_local")
            # Without the mark: it must outlive the job that calls this.
            given = {name: value for name, value in environment().items() if name != MARK}
            given |= {"PYTHONPATH": str(elastic_home() / "lib")}
            detached([*program, str(self.state), job_id, str(grace_s)], given)

    def kill_after(self, job_id: str, grace_s: float) -> None:
        """Kill a job if it is still there when its grace is over."""
        deadline = time.monotonic() + grace_s
        while self._leader(job_id) and time.monotonic() < deadline:
            time.sleep(min(10 * POLL_S, grace_s))
        self.kill(job_id)

    def _leader(self, job_id: str) -> proc.Process | None:
        """The job's first process if it lives. If it is just making its claim, wait for it."""
        path = self._path(job_id, "claim")
        while not (claim := _read(path)) and path.exists():
            if time.time() - path.stat().st_mtime > START_S:
                break  # it died at that very moment
            time.sleep(POLL_S)
        if claim in ("", NEVER.decode()):
            return None
        now = proc.Process.of(int(claim.split()[0]))
        return now if now and now.start == proc.fields_of(claim)[19] else None


def _read(path: Path) -> str:
    """What a file says; "" if it is not there. Raises TryAgain if it cannot be read now:
    a job at work must not be taken for one without a claim."""
    with contextlib.suppress(FileNotFoundError):
        return durable.insist(path.read_text)
    return ""


def detached(command: Sequence[str], environment=None, output=None, folder: str = "/") -> None:
    """Run `command` in a session of its own, as nobody's child. Raises OSError if it
    cannot."""
    output = output or subprocess.DEVNULL
    subprocess.run(["setsid", "--fork", *command], env=environment, cwd=folder,
                   stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _least_used(in_use: Sequence[str], count: int, visible: str | None) -> list[str]:
    """`count` GPUs of this machine, or of those `visible` to the user: those with the
    fewest jobs. Fewer, or none, if there are no more."""
    here = map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    mine = here if visible is None else filter(None, visible.replace(" ", "").split(","))
    return sorted(mine, key=in_use.count)[:count]


if __name__ == "__main__":
    LocalScheduler(state=Path(sys.argv[1])).kill_after(sys.argv[2], float(sys.argv[3]))
