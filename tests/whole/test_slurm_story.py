"""A run on a private Slurm outlives its GPUs, its master and its controller; reconcile is cron's.

pytest tests/whole/test_slurm_story.py
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs.history import Job, has_ended
from elastic.jobs.sched import job_name, parse_job_name
from elastic.jobs.sched_slurm import SlurmScheduler
from elastic.lab.sandbox import Sandbox
from elastic.local.store import Store
from elastic.run.membership import WORKING, Slot
from elastic.run.rundir import RunDir
from forks import GROUP, USER, as_nobody
from helpers import ROOT, elastic, elastic_here, pretended_python, wait_until
from running import SETTINGS, TESTS, toml
from slurm_sandbox import hang_controller, nodes_and_jobs

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

CRON_S = 2.0
STEPS = 40
SLOW, BRISK = 0.2, 0.03  # seconds of an inner step
REFUSED = ("FAILED", "")  # state and node of what a refused sbatch leaves behind
PATIENCE_S = 150.0
ON_SLURM = {
    **SETTINGS,
    "run.scheduler": "slurm",
    "slurm.partition": "preempt",
    "slurm.master_partition": "cpu",
}
STORY = {
    **ON_SLURM,
    "task.samples": 10_000,
    "elastic.reconcile_interval": "10s",
    "local_sgd.inner_steps": STEPS,
    "local_sgd.min_deadline": "30s",
    "local_sgd.last_call": "10s",
    "health.heartbeat": "0.5s",
    "health.lease": "5s",
}


@dataclass(frozen=True)
class Life:
    """When there was a job, queued or running, by Slurm's own books, in whole seconds."""

    job_id: str
    submitted: int
    ended: int | None

    def number(self) -> int:
        return int(self.job_id)


@dataclass(frozen=True)
class Process:
    """A trainer and whose it is. A pid may come again, a pid with its start time does not."""

    job_id: str
    attempt: int
    pid: int
    started: str

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


class Story:
    """A run on a sandbox, what happens to it, and the cron that looks after it."""

    def __init__(self, box: Sandbox, home: Path):
        self.box, self.home = box, home
        self.run = RunDir(home / "runs" / "story")
        self.cron_environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
        if not (ROOT / ".venv/bin/python").exists():
            self.cron_environment["ELASTIC_PYTHON"] = sys.executable
        self._asks = SlurmScheduler({**os.environ, **box.environment()})
        self.followed = ""  # a master near its time limit, behind which the next one may wait
        self._pace = home / "pace"
        self._next_pass = 0.0

    # ---- what there is

    @property
    def version(self) -> int:
        return self.run.commits.newest_version()

    def jobs(self) -> dict[tuple[str, int], Job]:
        """(role, slot) -> its job; there is never more than one."""
        jobs = [job for job in self._asks.jobs() if not job.ended]
        found = {job.place: job for job in jobs}
        assert len(found) == len(jobs), jobs
        return found

    def workers(self) -> list[set[int]]:
        """Per version the slots that took part in it."""
        return [{delta.slot for delta in commit.deltas} for commit in self.run.commits.all()]

    def slots(self) -> dict[int, Slot]:
        """The workers that are past their start-up, as the master sees them."""
        try:
            with contextlib.closing(Store.open(self.run)) as store:
                return {n: slot for n, slot in store.slots().items() if slot.state in WORKING}
        except TryAgain:
            return {}

    def processes(self) -> dict[int, Process]:
        return {
            n: Process(slot.job_id, slot.attempt, slot.pid, start_time(slot.pid))
            for n, slot in self.slots().items()
        }

    def node_of(self) -> dict[int, str]:
        return {slot: job.node for (role, slot), job in self.jobs().items() if role == "worker"}

    def outcome(self, job_id: str) -> str:
        return (self.run.jobs.ending(job_id) or {}).get("outcome", "")

    def outcomes(self) -> list[str]:
        """What reconcile made of the ends of jobs."""
        return [event["outcome"] for event in self.run.events() if event["kind"] == "end"]

    def actions(self) -> list[dict]:
        kinds = ("submit", "cancel", "fail")
        return [event for event in self.run.events() if event["kind"] in kinds]

    def steps_of(self, job_id: str) -> list[int]:
        """Of its deltas that are committed."""
        deltas = (delta for commit in self.run.commits.all() for delta in commit.deltas)
        return [delta.steps for delta in deltas if delta.job_id == job_id]

    # ---- what happens

    def submit(self, least: int, most: int) -> None:
        self.pace(BRISK)
        shutil.copy(TESTS / "tiny_task.py", self.home)
        settings = {**STORY, "task.pace": str(self._pace)}
        (self.home / "story.toml").write_text("".join(f"{line}\n" for line in toml(settings)))
        environment = {
            **self.cron_environment, **self.box.environment(), "PATH": os.environ["PATH"],
            "ELASTIC_RUNS": str(self.run.path.parent), "ELASTIC_SITE": os.devnull,
            "ELASTIC_PYTHON": sys.executable,
        }
        limits = ("--min", least, "--max", most, "--parsable", "--no-try")
        done = elastic("submit", self.home / "story.toml", *limits, env=environment)
        assert (done.returncode, done.stdout) == (0, "story\n"), done.stderr

    def pace(self, seconds: float) -> None:
        """From now on an inner step takes so long."""
        self._pace.with_suffix(".new").write_text(str(seconds))
        self._pace.with_suffix(".new").rename(self._pace)

    def cron(self, times: int = 1) -> list[tuple[int, str]]:
        """So many passes at the same moment, as cron would start them: exit code and output."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [ROOT / "bin" / "elastic-reconcile"]
        passes = [
            subprocess.Popen(command, env=self.cron_environment, cwd="/", **options)
            for _ in range(times)
        ]
        said = [each.communicate(timeout=PATIENCE_S)[0] for each in passes]
        codes = [each.returncode for each in passes]
        assert set(codes) <= {0, 75}, said
        return list(zip(codes, said, strict=True))

    def until(self, condition: Callable[[], object], what: str) -> object:
        """Let time pass, with its cron, until `condition()` is true; its value."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if time.monotonic() >= self._next_pass:
                done = elastic_here("reconcile")
                assert done.exit_code in (0, 75), done.output
                self._next_pass = time.monotonic() + CRON_S
            with contextlib.suppress(TryAgain):  # Slurm may be slow where all else is
                if value := condition():
                    return value
            if self.run.failed() or time.monotonic() > deadline:
                pytest.fail(f"not within {PATIENCE_S} s: {what}\n{self.told()}")
            time.sleep(0.1)

    def take(self, *where: str) -> tuple[str, str]:
        """Have a job of high priority take GPUs; its id, and the node that it got."""
        options = ("--parsable", "--partition=high", "--output=/dev/null", "--chdir=/", *where)
        job_id = self.box.run("sbatch", *options, "--wrap=exec sleep 3600").strip()
        ask = ("squeue", "--noheader", f"--jobs={job_id}", "--states=RUNNING", "--format=%N")
        return job_id, self.until(lambda: self.box.run(*ask).strip(), "the job takes its GPUs")

    def told(self) -> str:
        """What the run and Slurm have to say, for a test that fails."""
        with contextlib.suppress(ElasticError):
            return f"{told(self.run)}\n{nodes_and_jobs(self.box)}"
        return told(self.run)

    # ---- what must hold

    def lives(self) -> dict[tuple[str, int], list[Life]]:
        """Per (role, slot) the jobs there have been, in their order, as Slurm has them."""
        ask = ("squeue", "--states=all", "--noheader", "--format=%j|%i|%T|%V|%e|%N")
        found = defaultdict(list)
        for line in self.box.run(*ask).splitlines():
            name, job_id, state, *times, node = line.split("|")
            if (place := parse_job_name(name)) and (state, node) != REFUSED:
                ended = int(times[1]) if has_ended(state) else None
                found[place[1:]].append(Life(job_id, int(times[0]), ended))
        return {place: sorted(lives, key=Life.number) for place, lives in found.items()}

    def one_job_at_a_time(self) -> None:
        """No place has ever had two jobs, running or queued, but for the next master."""
        for place, lives in self.lives().items():
            for before, after in pairwise(lives):
                assert before.ended is not None, (place, before, after)
                is_in_time = before.ended <= after.submitted
                assert is_in_time or before.job_id == self.followed, (place, before, after)

    def attempts_are_in_order(self) -> None:
        """One per job that came to start, one after the other, with deltas of its own."""
        lives = {life.job_id: life for each in self.lives().values() for life in each}
        claims = {}
        for slot in range(3):
            paths = sorted((self.run.path / "slots" / f"{slot:04d}").glob("[0-9]*.json"))
            records = [json.loads(path.read_text()) for path in paths]
            assert [record["number"] for record in records] == list(range(1, len(records) + 1))
            assert len({record["job_id"] for record in records}) == len(records), records
            for before, after in pairwise(records):
                assert lives[before["job_id"]].ended <= after["time"] + 1, (slot, before, after)
            claims |= {(slot, record["number"]): record["job_id"] for record in records}
        newest = Counter()
        for delta in (delta for commit in self.run.commits.all() for delta in commit.deltas):
            slot, attempt = delta.slot, delta.attempt
            assert claims[slot, attempt] == delta.job_id
            assert attempt >= newest[slot], delta
            newest[slot] = attempt


@pytest.fixture
def story(new_sandbox, tmp_path, monkeypatch) -> Story:
    """Three GPUs on three nodes; Slurm forgets no job."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / ".elastic"))
    calm = ("MessageTimeout=5", "MinJobAge=3600", "SlurmdTimeout=30")  # on a busy machine
    return Story(new_sandbox(nodes=3, gpus=1, grace_s=20, settings=calm), tmp_path)


@pytest.mark.timeout(900)
def test_a_run_outlives_all_that_happens_on_a_cluster(story):
    story.submit(1, 3)
    story.until(lambda: len(story.slots()) == 3 and story.version >= 1, "three workers train")
    story.pace(SLOW)
    first, node_of = story.processes(), story.node_of()
    assert set(node_of.values()) == {"n1", "n2", "n3"}
    passes_with_nothing_to_do_are_silent(story)
    a_refused_submission_is_no_crash(story)

    preemptor, node = preempt_a_node_in_mid_round(story, first, node_of)
    lost_node, last_node = sorted({"n1", "n2", "n3"} - {node})
    assert {s for s in first if first[s].is_alive()} == {s for s in first if node_of[s] != node}

    story.box.kill_node(lost_node)
    (alone,) = [slot for slot, process in first.items() if process.is_alive()]
    assert node_of[alone] == last_node
    story.until(lambda: story.workers()[-3:] == [{alone}] * 3, "three versions of one worker")
    story.pace(SLOW)

    the_next_master_takes_over_before_the_time_of_the_old_one_is_up(story)
    passes_at_the_same_moment_fill_a_slot_once(story)
    nothing_is_done_while_the_controller_hangs(story)
    assert first[alone].is_alive()

    version = story.version
    story.box.run("scancel", preemptor)
    story.box.revive_node(lost_node)
    story.until(lambda: {0, 1, 2} in story.workers()[version:], "three workers deliver")
    assert first[alone].is_alive()

    story.pace(0)
    story.until(lambda: story.run.done() and not story.jobs(), "the run is done, no job is left")
    assert story.run.slots.latest(alone) == first[alone].attempt == 1
    the_books_are_clean(story)


def passes_with_nothing_to_do_are_silent(story: Story) -> None:
    """Cron mails whatever is printed."""
    assert "".join(said for code, said in story.cron(3) if code == 0) == ""


def a_refused_submission_is_no_crash(story: Story) -> None:
    """Some refusals leave a job in the list that has failed before it had a node."""
    name = job_name("story", "worker", 0)
    job = (f"--job-name={name}", "--partition=preempt", "--chdir=/", "--wrap=true")
    with pytest.raises(ElasticError, match="not available"):
        story.box.run("sbatch", "--nodes=1", "--gres=gpu:3", *job)
    story.until(lambda: "refused" in story.outcomes(), "reconcile sees it")


def preempt_a_node_in_mid_round(story: Story, first: dict, node_of: dict) -> tuple[str, str]:
    """Its worker delivers the steps it has, and leaves. Returns preemptor and node."""
    story.until(lambda: all_in_mid_round(story), "all three are in the middle of a round")
    story.pace(1)  # and stay there until they are told
    preemptor, node = story.take("--nodes=1", "--exclusive")
    story.pace(BRISK)
    (job_id,) = [first[slot].job_id for slot, where in node_of.items() if where == node]
    assert story.outcome(job_id) == "yielded"
    steps = story.run.jobs.ending(job_id)["steps"]
    story.until(lambda: sum(story.steps_of(job_id)) == steps > 0, "its steps count")
    assert 0 < story.steps_of(job_id)[-1] < STEPS
    return preemptor, node


def all_in_mid_round(story: Story) -> bool:
    slots = story.slots().values()
    places = {(slot.state, slot.version, 0 < slot.step < STEPS // 4) for slot in slots}
    return len(slots) == 3 and places == {("training", story.version, True)}


def the_next_master_takes_over_before_the_time_of_the_old_one_is_up(story: Story) -> None:
    old, epoch = story.jobs()["master", 0], story.run.commits.newest().master_epoch
    story.followed = old.job_id
    minutes = max(2, int(time.time() - old.started_at + 30) // 60 + 1)
    story.box.run("scontrol", "update", f"JobId={old.job_id}", f"TimeLimit={minutes}")
    story.until(lambda: story.outcome(old.job_id), "the old master leaves")
    assert story.outcome(old.job_id) == "fenced", story.told()
    story.until(lambda: story.run.commits.newest().master_epoch > epoch, "a new master commits")
    reasons = [each["reason"] for each in story.actions() if each.get("role") == "master"]
    assert reasons == ["no job is there", f"to follow job {old.job_id} at once"]


def passes_at_the_same_moment_fill_a_slot_once(story: Story) -> None:
    """Both that wait are cancelled by hand; three passes see it at once."""

    def queued() -> list[str]:
        return [job.job_id for job in story.jobs().values() if job.state == "PENDING"]

    story.until(lambda: len(queued()) == 2, "two jobs wait")
    before = queued()
    story.box.run("scancel", *before)
    wait_until(lambda: story.cron(3) and len(queued()) == 2, PATIENCE_S, "two jobs wait again")
    assert not set(before) & set(queued())
    story.one_job_at_a_time()


def nothing_is_done_while_the_controller_hangs(story: Story) -> None:
    """Though there would be something to do: a job is missing. Training goes on."""
    place, job = next((p, job) for p, job in story.jobs().items() if job.state == "PENDING")
    story.box.run("scancel", job.job_id)
    hang_controller(story.box, PATIENCE_S)
    try:
        wait_until(lambda: story.cron()[0][0] == 75, PATIENCE_S, "a pass hears nothing")
        version, actions = story.version, story.actions()
        wait_until(lambda: story.cron()[0][0] == 75, PATIENCE_S, "nor does another one")
        wait_until(lambda: story.version > version, PATIENCE_S, "training goes on")
        assert story.actions() == actions
    finally:
        os.kill(int((story.box.path / "slurmctld.pid").read_text()), signal.SIGCONT)
    story.until(lambda: place in story.jobs(), "the missing job is submitted")


def the_books_are_clean(story: Story) -> None:
    """Slurm's, the run's, and the ledger."""
    story.one_job_at_a_time()
    story.attempts_are_in_order()
    assert set(story.outcomes()) == {"cancelled", "done", "fenced", "lost", "refused", "yielded"}
    assert [event for event in story.run.events() if event["kind"] in ("fail", "restart")] == []
    said = elastic("audit", "story", "--files", "--json", env=story.cron_environment)
    report = json.loads(said.stdout)
    assert (said.returncode, report["problems"], report["finished"]) == (0, [], True)
    assert (report["committed"], report["masters"]) == (STORY["task.samples"], 2)


# ---- as an ordinary user ------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_an_ordinary_user_trains_with_what_root_installed(users_folder):
    user = pwd.getpwnam(USER)
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    needs = [sys.executable, "-c", "import click, redis, rich, torch"]
    if subprocess.run([*become, *needs], cwd="/", capture_output=True).returncode != 0:
        pytest.skip(f"{USER} may not run {sys.executable}")
    prefix, home = users_folder / "elastic", users_folder / "home"
    python = pretended_python(users_folder)
    install = ["make", "--silent", "-C", ROOT, "install", f"PREFIX={prefix}", f"PYTHON={python}"]
    subprocess.run(install, check=True, umask=0o022, stdout=subprocess.DEVNULL)
    shutil.copy(TESTS / "tiny_task.py", home)
    (home / "pace").write_text("0")
    settings = {**ON_SLURM, "task.samples": 200, "task.pace": str(home / "pace")}
    (home / "tiny.toml").write_text("\n".join(toml(settings)))
    shutil.chown(home, user.pw_uid, user.pw_gid)
    script = f"""set -e
    PATH={prefix}/bin:$PATH
    elastic-sandbox up --nodes 1 --dir {home} --name x
    eval "$(elastic-sandbox env --dir {home} --name x)"
    elastic-submit tiny.toml --min 1 --max 1 --wait --no-try
    elastic-audit tiny --files
    """
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "ELASTIC_PYTHON": sys.executable,
        "ELASTIC_SITE": os.devnull,
    }
    done = subprocess.run(
        [*become, "timeout", "300", "bash", "-c", script],
        env=environment, cwd=home, capture_output=True, text=True,
    )
    run = RunDir(home / "runs" / "tiny")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{told(run)}"
    assert (run.path / "DONE").stat().st_uid == user.pw_uid


@pytest.fixture
def users_folder() -> Iterator[Path]:
    """With an empty home in it, and nothing left of the user's sandbox afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "home").mkdir()
    yield folder
    as_nobody(Sandbox(folder / "home" / "x").down, GROUP)
    shutil.rmtree(folder)


def told(run: RunDir) -> str:
    """The last events and log lines."""
    parts = [str(event) for event in run.events(last=80)]
    for path in sorted((run.path / "logs").glob("*.log")):
        parts += [f"---- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
    return "\n".join(parts)


def start_time(pid: int) -> str:
    """In what tick of the kernel a live process started; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
