"""The local scheduler, with real processes.

    pytest tests/jobs/test_sched_local.py

A job here is a shell script that does what the test says; it tells its story in files.
"""

import contextlib
import errno
import os
import random
import stat
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace

import pytest

from elastic.base import proc
from elastic.base.config import load
from elastic.base.errors import TryAgain
from elastic.jobs import sched_local
from elastic.jobs.sched import Elsewhere, JobSpec, cluster_of, scheduler_of
from elastic.jobs.sched_local import LocalScheduler
from elastic.people import submission
from elastic.run.rundir import Control, RunDir
from helpers import ROOT, wait_until

# They write `starts` once their trap is set: from then on a notice is heard, or ignored.
WAITS = "echo $ELASTIC_JOB_ID >> starts; while :; do sleep 0.05; done"
PATIENT = f'trap "echo notice >> told; exit 0" TERM; {WAITS}'
DEAF = f'trap "" TERM; sleep 1000 & setsid sleep 1000 & {WAITS}'


class Site:
    """A state directory, an installation whose agent runs `script`, and a run directory."""

    def __init__(self, home: Path, gpus: int = 0, grace: str = "10s"):
        self.home, self.folder = home, home / "run"
        (home / "bin").mkdir()
        (self.folder / "logs").mkdir(parents=True)
        toml = home / "run.toml"
        toml.write_text(
            '[run]\nscheduler = "local"\n[train]\nepochs = 1\n[elastic]\nmax = 9\n'
            f'[local_scheduler]\ngpus = {gpus}\ngrace = "{grace}"\n'
        )
        self.config = load(toml, site=Path(os.devnull))
        self.scheduler = LocalScheduler(self.config, home / "state")

    def script(self, text: str) -> None:
        path = self.home / "bin" / "elastic"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def submit(self, slot: int = 0, role: str = "worker", folder: Path | None = None) -> str:
        environment = {"PATH": os.environ["PATH"], "GREETING": "a b\n'c'",
                       "ELASTIC_HOME": str(self.home)}
        where = (folder or self.folder, "run", role, slot)
        each = self.config.slurm.gpus_per_worker if role == "worker" else 0
        return self.scheduler.submit(JobSpec(*where, self.config, environment, gpus=(each, each)))

    def states(self) -> dict[str, str]:
        return {job.job_id: job.state for job in self.scheduler.jobs()}

    def state(self, job_id: str) -> str:
        return self.states()[job_id]

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def alive(self) -> dict[str, list[int]]:
        return proc.families(sched_local.MARK, self.scheduler.state)

    def started(self, job_id: str) -> None:
        wait_until(lambda: job_id in self.lines("starts"), 10, f"job {job_id} runs its command")


@pytest.fixture
def make_site(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    sites = []

    def make(**options):
        sites.append(Site(tmp_path, **options))
        return sites[-1]

    yield make
    for site in sites:
        for job_id in site.states():
            site.scheduler.cancel(job_id, kill=True)
        wait_until(lambda site=site: not site.alive(), 10, "nothing is left behind")


@pytest.fixture
def site(make_site):
    site = make_site()
    site.script(PATIENT)
    return site


# ---- a job's life


def test_a_job_gets_its_arguments_its_environment_and_a_log_that_is_appended(site):
    site.script('echo "$@|$ELASTIC_JOB_ID|$GREETING|$PWD|${USER-none}"; echo oops >&2')
    job_id = site.submit(slot=7)
    wait_until(lambda: site.state(job_id) == "ENDED", 10, "the job ends")
    wait_until(lambda: site.state(site.submit(slot=7)) == "ENDED", 10, "another one ends")
    log = (site.folder / "logs" / "worker-0007.log").read_text()
    assert log.startswith(f"agent {site.folder} 7|{job_id}|a b\n'c'|{site.folder}|none\noops\n")
    assert log.count("oops") >= 2


def test_a_job_is_listed_from_its_submission_to_long_after_its_end(site):
    before = time.time()
    job_id = site.submit(slot=3)
    (job,) = site.scheduler.jobs()
    assert (job.run, *job.place) == ("run", "worker", 3)
    assert (job.job_id, job.state, job.ended) == (job_id, "RUNNING", False)
    assert before - 1 <= job.submitted_at <= job.started_at + 1 <= time.time() + 2
    assert job.node == os.uname().nodename
    site.scheduler.kill(job_id)
    (job,) = site.scheduler.jobs()
    assert (job.state, job.ended) == ("ENDED", True)


def test_an_ended_job_is_forgotten_in_the_end_and_its_id_is_not_used_again(site, monkeypatch):
    first = site.submit()
    site.scheduler.kill(first)
    assert site.state(first) == "ENDED"
    monkeypatch.setattr(sched_local, "KEEP_S", -1.0)
    assert site.states() == {}
    assert site.submit() != first
    assert {path.stem for path in (site.home / "state" / "jobs").iterdir()} != {first}


def test_ids_that_the_run_has_seen_are_not_used_again_when_the_state_directory_was_lost(site):
    (site.folder / "exit").mkdir()
    for job_id in ("1", "2"):
        (site.folder / "exit" / f"{job_id}.json").write_text('{"state": "ended"}')
    assert site.submit() == "3"


# ---- GPUs


def test_a_job_that_does_not_fit_is_pending_until_another_ends(make_site):
    site = make_site(gpus=2)
    site.script(PATIENT)
    a, b, c = (site.submit(slot) for slot in range(3))
    assert site.states() == {a: "RUNNING", b: "RUNNING", c: "PENDING"}
    assert site.scheduler.jobs()[2].reason == "Resources"
    site.scheduler.kill(b)
    assert site.states() == {a: "RUNNING", b: "ENDED", c: "RUNNING"}


def test_nobody_else_can_hold_the_lock_also_an_older_versions(make_site):
    """Who may read a file may lock it: another user could stop all runs of this one."""
    scheduler = make_site().scheduler
    lock = scheduler.state / "lock"
    for _ in range(2):
        scheduler.jobs()
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        lock.chmod(0o644)


def test_a_master_needs_no_gpu(make_site):
    site = make_site(gpus=1)
    site.script(PATIENT)
    worker, master = site.submit(), site.submit(role="master")
    assert set(site.states().values()) == {"RUNNING"}
    assert worker != master


def test_the_number_of_gpus_can_change_and_ends_no_job(make_site):
    site = make_site(gpus=1)
    site.script(PATIENT)
    a, b = site.submit(0), site.submit(1)
    capacity = site.scheduler.state / "capacity.json"
    capacity.write_text('{"gpus": 2}')
    assert site.states() == {a: "RUNNING", b: "RUNNING"}
    capacity.write_text('{"gpus": 0}')
    assert site.states() == {a: "RUNNING", b: "RUNNING"}
    c = site.submit(2)
    assert site.state(c) == "PENDING"


@pytest.mark.parametrize(
    ("here", "visible", "in_use", "count", "mine"),
    [
        ((), None, "", 1, ""), ((0,), None, "0", 1, "0"), ((2, 0, 1), None, "010", 2, "21"),
        ((0, 1), None, "", 0, ""), ((7, 5), None, "", 2, "01"), ((0, 1, 2, 3), "3,2", "", 1, "3"),
        ((0, 1, 2, 3), "2, 3", "2", 1, "3"), ((0, 1), "", "", 2, ""),
    ],
)
def test_gpus_of_the_machine_are_shared_out(monkeypatch, here, visible, in_use, count, mine):
    """Or those that the user has chosen. In a container /dev has the numbers of outside."""
    names = [Path(f"/dev/nvidia{number}") for number in here]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lambda self, pattern: names)
        assert sched_local._least_used([*in_use], count, visible) == [*mine]


def test_a_local_run_keeps_to_the_gpus_of_its_user(make_site, monkeypatch, tmp_path):
    """In an allocation, too, where no other job is to have that variable. It got 0 and 1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1,3")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    site = make_site(gpus=2)
    given = submission.start(site.config, tmp_path / "runs").environment()
    site.script(f'echo "$CUDA_VISIBLE_DEVICES" >> gpus; {PATIENT}')
    home = {"ELASTIC_HOME": str(site.home)}
    for slot in range(2):
        job = JobSpec(site.folder, "run", "worker", slot, site.config, given | home, gpus=(1, 1))
        site.scheduler.submit(job)
    wait_until(lambda: sorted(site.lines("gpus")) == ["3", "GPU-a1"], 10, "each has its own")


# ---- ends


def test_a_preempted_job_gets_notice_and_may_leave_in_time(site):
    job_id = site.submit()
    site.started(job_id)
    site.scheduler.preempt(job_id, grace_s=10)
    wait_until(lambda: site.state(job_id) == "PREEMPTED", 5, "the job leaves")
    assert site.lines("told") == ["notice"]


def test_a_job_that_ignores_the_notice_is_killed_though_nobody_calls_again(site):
    site.script(DEAF)
    job_id = site.submit()
    site.started(job_id)
    wait_until(lambda: len(site.alive().get(job_id, ())) >= 3, 10, "all its processes")
    begin = time.monotonic()
    site.scheduler.preempt(job_id, grace_s=3)
    assert site.state(job_id) == "RUNNING", "the grace is not over"
    claim = site.scheduler._path(job_id, "claim").read_text()
    pid = int(claim.split()[0])
    wait_until(lambda: not _is_running(pid), 10, "the kill")
    assert time.monotonic() - begin >= 3
    wait_until(lambda: job_id not in site.alive(), 5, "its children, too")


def _is_running(pid):
    return proc.Process.of(pid) is not None


def test_a_cancelled_job_that_is_pending_never_starts(make_site):
    site = make_site(gpus=1)
    site.script(PATIENT)
    running, pending = site.submit(0), site.submit(1)
    site.scheduler.cancel(pending)
    site.scheduler.kill(running)
    assert site.states() == {running: "ENDED", pending: "CANCELLED"}
    site.scheduler.cancel(pending)
    site.scheduler.cancel("4711")
    assert site.lines("starts") in ([running], [])


def test_a_cancelled_job_is_told_first_and_killed_at_once_only_on_request(site):
    a, b = site.submit(0), site.submit(1)
    site.started(a)
    site.started(b)
    site.scheduler.cancel(a)
    wait_until(lambda: site.state(a) == "CANCELLED", 5, "it leaves")
    assert site.lines("told") == ["notice"]
    site.scheduler.cancel(b, kill=True)
    assert site.state(b) == "CANCELLED"
    assert site.lines("told") == ["notice"]


def test_a_job_is_killed_on_request_though_the_disk_is_full(site, monkeypatch):
    """What became of it could not be noted, and so it went on."""
    site.script(DEAF)
    job_id = site.submit()
    wait_until((site.folder / "starts").exists, 20, "it runs")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sched_local, "create_once", full)
        with pytest.raises(OSError, match="No space left"):
            site.scheduler.cancel(job_id, kill=True)
    assert site.state(job_id) == "ENDED"


def test_a_job_is_killed_that_shows_no_mark_just_then(site, monkeypatch):
    """In the middle of an exec a process has no environment; the job lived on."""
    job_id = site.submit()
    site.started(job_id)
    with monkeypatch.context() as patch:
        patch.setattr(proc, "families", lambda *_: defaultdict(set))
        site.scheduler.kill(job_id)
    assert site.state(job_id) == "ENDED"


def test_a_kill_takes_children_in_other_sessions_and_with_another_environment(site):
    site.script("setsid env -i sleep 1000 & (sleep 1000 &) ; setsid --fork sleep 1000; sleep 1000")
    job_id = site.submit()
    wait_until(lambda: len(site.alive().get(job_id, ())) >= 5, 10, "five processes")
    site.scheduler.kill(job_id)
    assert site.alive() == {}
    assert site.state(job_id) == "ENDED"


def test_what_outlives_the_first_process_of_a_job_is_killed_by_the_next_caller(site):
    site.script("setsid --fork sleep 1000; exit 3")
    job_id = site.submit()
    wait_until(lambda: site.state(job_id) == "ENDED", 10, "its end")
    wait_until(lambda: site.states() and not site.alive(), 5, "the orphan's end")


def test_a_pid_that_now_belongs_to_another_process_is_not_the_job(site):
    job_id = site.submit()
    site.started(job_id)
    claim = site.scheduler._path(job_id, "claim")
    fields = claim.read_text().split()
    fields[21] = str(int(fields[21]) - 1)
    site.scheduler.kill(job_id)
    claim.write_text(" ".join([str(os.getpid()), *fields[1:]]))
    assert site.state(job_id) == "ENDED"


def test_jobs_of_another_machine_with_the_same_home_are_left_alone(site, monkeypatch):
    """Its processes are not to be seen here: taken to have ended, they were started again."""
    job_id = site.submit()
    here = os.uname()
    other = SimpleNamespace(nodename="host-b")
    with monkeypatch.context() as patch:
        patch.setattr("elastic.jobs.sched_local.os.uname", lambda: other)
        with pytest.raises(Elsewhere, match=f"are of {here.nodename}"):
            site.scheduler.jobs()
    assert not (site.scheduler.state / "jobs" / f"{job_id}.swept").exists()
    assert [job.state for job in site.scheduler.jobs()] == ["RUNNING"]
    site.scheduler.kill(job_id)
    site.scheduler.jobs()
    monkeypatch.setattr("elastic.jobs.sched_local.os.uname", lambda: other)
    assert [job.ended for job in site.scheduler.jobs()] == [True], "nothing is left of it there"


def test_a_job_whose_claim_cannot_be_read_now_goes_on(site, monkeypatch):
    """The home may be on a network filesystem, and that fail for some seconds."""
    job_id = site.submit()
    site.started(job_id)
    claim = site.scheduler._path(job_id, "claim")
    os.utime(claim, (0, 0))  # it is no new one that is just being written
    real = Path.read_text

    def stale(self, **how):
        if self == claim:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self, **how)

    with monkeypatch.context() as patch:
        patch.setattr("elastic.base.durable.AGAIN_S", ())
        patch.setattr(Path, "read_text", stale)
        with pytest.raises(TryAgain, match="fails for now"):
            site.states()
    assert site.states() == {job_id: "RUNNING"}


def test_a_job_whose_run_directory_is_gone_ends(site):
    job_id = site.submit(folder=site.home / "nowhere")
    assert site.state(job_id) == "ENDED"


def test_the_jobs_of_a_run_are_looked_up_where_it_was_submitted(make_config, home, monkeypatch):
    """By a path, from another home, each had vanished: a pass submitted all of them again."""
    there = {"ELASTIC_HOME_DIR": str(home / "demo")}
    run = RunDir.create(home / "runs", make_config(), Control("local", "running", 1, 4), there)
    assert scheduler_of(run).state == home / "demo" / "local"
    assert cluster_of("local", there) != cluster_of("local", {})
    monkeypatch.chdir(home)
    monkeypatch.setenv("ELASTIC_HOME_DIR", "demo")
    typed = submission.start(make_config(name="run-b"), home / "runs")
    monkeypatch.chdir(typed.path)  # where its jobs work
    assert scheduler_of(typed).state == home / "demo" / "local"
    monkeypatch.setenv("ELASTIC_HOME_DIR", f"{home}/registry")
    assert cluster_of("local", {}) == cluster_of("local", {"ELASTIC_HOME_DIR": f"{home}/registry"})


# ---- callers that die, callers that meet


def test_of_two_first_processes_of_a_job_one_leaves_without_a_trace(site):
    job_id = site.submit()
    site.started(job_id)
    claim = site.scheduler._path(job_id, "claim")
    before = claim.read_bytes()
    shim = ["/bin/sh", "-c", sched_local.CLAIM, str(claim), "/bin/echo", "twice"]
    second = subprocess.run(shim, capture_output=True, text=True)
    assert second.returncode != 0
    assert second.stdout == ""
    assert claim.read_bytes() == before


CALLER = """
import sys
from pathlib import Path
from elastic.base.config import load
from elastic.jobs.sched import JobSpec
from elastic.jobs.sched_local import LocalScheduler
home, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = load(home / "run.toml", site=Path("/dev/null"))
scheduler = LocalScheduler(config, home / "state")
environment = {"PATH": "/usr/bin:/bin", "ELASTIC_HOME": str(home)}
print("ready", flush=True)
for slot in range(first, first + count):
    spec = JobSpec(home / "run", "run", "worker", slot, config, environment, gpus=(1, 1))
    print(scheduler.submit(spec), flush=True)
"""


@contextlib.contextmanager
def caller(site, first, count):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    command = [sys.executable, "-c", CALLER, str(site.home), str(first), str(count)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_caller_killed_at_any_moment_leaves_every_job_started_once_or_pending(make_site):
    site = make_site()
    site.script(PATIENT)
    rng = random.Random(7)
    told = []
    for turn in range(8):
        with caller(site, 10 * turn, 6) as process:
            process.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.0, 0.25))
            process.send_signal(SIGKILL)
            told += process.stdout.read().split()
    wait_until(lambda: set(site.states().values()) <= {"RUNNING"}, 30, "all jobs run")
    jobs = site.scheduler.jobs()
    assert set(told) <= {job.job_id for job in jobs}
    assert max(Counter((job.run, job.place) for job in jobs).values()) == 1
    for job in jobs:
        site.started(job.job_id)
    assert Counter(site.lines("starts")) == Counter(job.job_id for job in jobs)


def test_callers_at_the_same_time_give_every_job_an_id_and_never_exceed_the_gpus(make_site):
    site = make_site(gpus=3)
    site.script(PATIENT)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(caller(site, 10 * i, 3)) for i in range(4)]
        ids = [line for each in callers for line in each.stdout.read().split()[1:]]
    assert len(ids) == len(set(ids)) == 12
    states = Counter(site.states().values())
    assert states == {"RUNNING": 3, "PENDING": 9}
    for job_id in ids:
        site.scheduler.cancel(job_id, kill=True)
    assert set(site.states().values()) == {"CANCELLED"}
