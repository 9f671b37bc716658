"""Sync mode on a private Slurm: resized by all that happens there, it is the run undisturbed.

pytest tests/sync/test_sync_slurm.py
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.base.environment import user_name
from elastic.base.errors import TryAgain
from elastic.jobs.history import Job
from elastic.jobs.sched_slurm import SlurmScheduler
from elastic.jobs.slurm_info import expand_hostlist
from elastic.lab.sandbox import Sandbox
from elastic.run.rundir import RunDir
from helpers import ROOT, elastic, wait_until
from running import SETTINGS, TESTS, toml
from slurm_sandbox import nodes_and_jobs

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

PATIENCE_S = 240.0
CRON_S = 5.0
BATCH = 12
STORY = {
    **SETTINGS,
    "run.mode": "sync",
    "run.scheduler": "slurm",
    "slurm.partition": "preempt",
    "slurm.gpus_per_node": 1,
    "sync.global_batch_size": BATCH,
    "train.batch_size": 4,
    "checkpoint.interval": "10 steps",
    "task.samples": 200 * BATCH + 5,
    "sync.grow_after": "5s",
    "slurm.signal": "USR2@10",
    "health.hang_timeout": "120s",
}


class Cluster:
    """A run on a sandbox, and the cron that looks after it, with `more` in the environment of
    both."""

    def __init__(self, box: Sandbox, home: Path, more: dict[str, str] | None = None):
        self.box, self.home = box, home
        self.run = RunDir(home / "runs" / "story")
        self.pace = home / "pace"
        self._cron = {"HOME": str(home), "PATH": "/usr/bin:/bin", "ELASTIC_PYTHON": sys.executable}
        self._cron |= more or {}
        self._asks = SlurmScheduler({**os.environ, **box.environment()})

    def submit(self, least: int, most: int, **more) -> None:
        done = self.try_to_submit(least, most, **more)
        assert (done.returncode, done.stdout) == (0, "story\n"), done.stderr

    def try_to_submit(self, least: int, most: int, **more) -> subprocess.CompletedProcess[str]:
        self.pace.write_text("0.3")
        shutil.copy(TESTS / "tiny_task.py", self.home)
        settings = {**STORY, "task.pace": str(self.pace), **more}
        (self.home / "story.toml").write_text("".join(f"{line}\n" for line in toml(settings)))
        environment = {
            **self._cron, **self.box.environment(), "PATH": os.environ["PATH"],
            "ELASTIC_RUNS": str(self.run.path.parent), "ELASTIC_SITE": os.devnull,
        }
        limits = ("--min", least, "--max", most, "--parsable", "--no-try")
        return elastic("submit", self.home / "story.toml", *limits, env=environment)

    def jobs(self) -> list[Job]:
        return [job for job in self._asks.jobs() if not job.ended]

    def running(self) -> Job:
        def found() -> Job | None:
            return next((job for job in self.jobs() if job.state == "RUNNING"), None)

        return wait_until(found, 20, "a job that runs")

    def steps(self) -> list[dict]:
        path = self.run.path / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be cut
        return [json.loads(line) for line in lines]

    def until(self, condition, what: str) -> object:
        """Let time pass, with its cron, until `condition()` is true; its value."""
        deadline, next_pass = time.monotonic() + PATIENCE_S, 0.0
        while True:
            if time.monotonic() >= next_pass:
                command = [ROOT / "bin" / "elastic-reconcile"]
                asked = {"env": self._cron, "cwd": "/", "capture_output": True, "text": True}
                cron = subprocess.run(command, **asked)
                assert cron.returncode in (0, 75), cron
                next_pass = time.monotonic() + CRON_S
            with contextlib.suppress(TryAgain):
                if value := condition():
                    return value
            if self.run.failed() or time.monotonic() > deadline:
                pytest.fail(f"not: {what}\n{self.told()}\n{cron}")
            time.sleep(0.5)

    def trains_on(self, gpus: int) -> None:
        """Wait for steps of so many ranks."""
        before = len(self.steps())

        def found() -> bool:
            return [line["world"] for line in self.steps()[before:]].count(gpus) >= 4

        self.until(found, f"training on {gpus} GPUs")

    def told(self) -> str:
        logs = [path.read_text() for path in (self.run.path / "logs").glob("*.log")]
        events = [json.dumps(event) for event in self.run.events()]
        return "\n".join([*events, *logs, nodes_and_jobs(self.box)])

    def set_time_limit(self, job: Job) -> None:
        """Let the job have one to two minutes more; its warning may come a minute early."""
        minutes = int((time.time() - job.started_at) // 60) + 2
        self.box.run("scontrol", "update", f"JobId={job.job_id}", f"TimeLimit={minutes}")

    def ended_jobs(self) -> dict[str, str]:
        ends = [event for event in self.run.events() if event["kind"] == "end"]
        return {end["job_id"]: end["outcome"] for end in ends}


@pytest.mark.timeout(1200)
def test_a_job_resized_by_slurm_trains_what_an_undisturbed_one_trains(new_sandbox, tmp_path):
    calm = ("MinJobAge=3600", "SlurmdTimeout=30")  # on a busy machine
    cluster = Cluster(new_sandbox(nodes=4, gpus=1, grace_s=20, settings=calm), tmp_path)
    cluster.submit(1, 4)
    cluster.trains_on(4)
    cluster.pace.write_text("2")  # the steps are to last until all has happened
    first = cluster.running()
    cluster.set_time_limit(first)
    cluster.until(lambda: first.job_id in cluster.ended_jobs(), "the end of its time")
    cluster.pace.write_text("1")
    cluster.trains_on(4)
    others = [cluster.box.preempt(1, 3600) for _ in range(2)]  # the whole job goes, with notice
    cluster.trains_on(2)
    cluster.box.run("scancel", others[0])
    cluster.trains_on(3)  # by a restart of its own choice
    grown = [event["reason"] for event in cluster.run.events() if event["kind"] == "cancel"]
    assert "it has 2 GPUs, and 3 are to be had" in grown

    job, nodes = cluster.running(), expand_hostlist(cluster.running().node)
    for node in nodes[1:]:
        cluster.box.kill_node(node)  # without notice
    cluster.trains_on(1)
    assert cluster.running().job_id == job.job_id, cluster.told()  # not back to the queue
    (lost,) = [event for event in cluster.run.events() if event["kind"] == "nodes-lost"]
    assert lost["nodes"] == nodes[1:]

    cluster.box.run("scancel", "--partition=high")
    for node in nodes[1:]:
        cluster.box.revive_node(node)
    cluster.trains_on(4)
    # Every one left with a checkpoint; those that made way for growth were cancelled for it.
    assert set(cluster.ended_jobs().values()) == {"cancelled", "yielded"}
    cluster.pace.write_text("0")
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")

    lines = cluster.steps()
    last = {line["step"]: line for line in lines}
    positions = [position for n in sorted(last) for position in last[n]["samples"]]
    count = STORY["task.samples"]
    starts = list(range(0, count, BATCH))
    assert positions == [p for at in starts for p in (at, min(at + BATCH, count))]
    assert len(lines) - len(last) <= 2 * 10  # nodes died without notice once: no more than that
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts)
    report = elastic("audit", cluster.run.path, "--json", env={**os.environ})
    assert json.loads(report.stdout)["problems"] == []
    losses_like_undisturbed(last, tmp_path)


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_what_a_sites_plugin_refuses_is_said_at_once_and_starts_no_run(new_sandbox, tmp_path, mode):
    """Words that nobody here knows. "run started" it said, and tried again for ever."""
    strict = ("JobSubmitPlugins=require_timelimit",)
    cluster = Cluster(new_sandbox(nodes=1, gpus=1, settings=strict), tmp_path)
    local = {"run.mode": mode, "slurm.master_partition": "cpu", "slurm.master_time": "10"}
    done = cluster.try_to_submit(1, 1, **local, **{"train.max_steps": 0} if mode == "local" else {})
    assert done.returncode == 1
    assert "Time limit specification required, but not provided" in done.stderr
    assert not cluster.run.path.exists()
    assert cluster.jobs() == []


INSIDE = """
import os, pathlib, sys
seen = [pathlib.Path("/mnt/image").exists(), os.environ.get("PROLOG"), os.environ["SLURM_JOB_ID"]]
who = ["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"]]
print(*who, *seen, file=sys.stderr, flush=True)
"""
ROOT_OF_ONES_OWN = ["unshare", "--mount", "sh", "-c",
                    'mount -t tmpfs none /mnt && touch /mnt/image && exec "$@"', "sh"]


@pytest.mark.root
def test_ranks_run_in_a_container_with_the_sites_options_and_few_cores(new_sandbox, tmp_path):
    """A rank in a root of its own; a task prolog for pyxis; more ranks than cores."""
    few = ("DefCpuPerGPU=1",)
    cluster = Cluster(new_sandbox(nodes=2, gpus=2, grace_s=20, settings=few), tmp_path)
    (tmp_path / "inside.py").write_text(INSIDE)
    (tmp_path / "prolog").write_text("#!/bin/sh\necho export PROLOG=here\n")
    (tmp_path / "prolog").chmod(0o755)
    cluster.submit(4, 4, **{
        "slurm.gpus_per_node": 2, "sync.ranks_per_node": 3, "slurm.rank_prefix": ROOT_OF_ONES_OWN,
        "slurm.srun_options": [f"--task-prolog={tmp_path}/prolog"],
        "run.command": ["{python}", "inside.py", "{checkpoints}"]})
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    (job_id,) = {event["job_id"] for event in cluster.run.events() if event["kind"] == "start"}
    logs = sorted((cluster.run.path / "logs/ranks").iterdir())
    for rank, log in zip(range(6), logs, strict=True):
        assert f"rank {rank} of 6 True here {job_id}" in log.read_text()
    assert cluster.run.config().slurm.cpus_per_gpu == 0


STUBBORN = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits in a collective call
if rank == "0" and (folder / "pid").exists():
    alive = pathlib.Path("/proc", (folder / "pid").read_text()).exists()
    print("beside one that is alive" if alive else "alone", flush=True)
    sys.exit(0)
if rank == "0":
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(600)
while not (folder / "pid").exists():
    time.sleep(0.1)
sys.exit(3 if os.environ["ELASTIC_ATTEMPT"] == "1" else 0)
"""


def test_ranks_start_when_those_before_have_ended(new_sandbox, tmp_path):
    patient = ("KillWait=60",)
    cluster = Cluster(new_sandbox(nodes=1, gpus=2, grace_s=20, settings=patient), tmp_path)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = ["{python}", "stubborn.py", "{checkpoints}"]
    cluster.submit(2, 2, **{"slurm.gpus_per_node": 2, "run.command": command})
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    assert "alone" in cluster.run.log_path("trainer", 0).read_text()
    starts = [event["job_id"] for event in cluster.run.events() if event["kind"] == "start"]
    assert len(starts) == 2
    assert len(set(starts)) == 1


CRASHES = """
import os, sys
print(os.environ["SLURM_GPUS_ON_NODE"], "GPUs here", file=sys.stderr)
sys.exit(3 if os.environ["ELASTIC_ATTEMPT"] == "1" and os.environ["RANK"] == "3" else 0)
"""


@pytest.mark.parametrize("asked", ["--gpus-per-node=2", "--gpus=4"])
def test_a_rank_that_crashes_costs_no_node_however_gpus_are_asked_for(new_sandbox, tmp_path, asked):
    """The probes asked for the GPUs of the whole job: no node answered, and the job ended."""
    cluster = Cluster(new_sandbox(nodes=2, gpus=2, grace_s=20), tmp_path)
    (tmp_path / "crashes.py").write_text(CRASHES)
    command = ["{python}", "crashes.py", "{checkpoints}"]
    cluster.submit(4, 4, **{"slurm.gpus_per_node": 2, "slurm.gres": "", "slurm.options": [asked],
                            "run.command": command})
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    starts = [event["job_id"] for event in cluster.run.events() if event["kind"] == "start"]
    assert (len(starts), len(set(starts))) == (2, 1)
    assert not [event for event in cluster.run.events() if event["kind"] == "nodes-lost"]
    assert "2 GPUs here" in (cluster.run.path / "logs/ranks/rank-003.log").read_text()
    # Nobody has said how many cores: it is a GPU's share of its node.
    assert cluster.run.config().slurm.cpus_per_gpu == 16
    assert "CPUs/Task=32 " in cluster.box.run("scontrol", "show", "job", starts[0])


UNFIT = '[ "$SLURMD_NODENAME" != n2 ] || { echo "error: no GPU" >&2; exit 69; }; exec "$@"'


def test_a_node_that_is_unfit_costs_the_others_nothing_and_is_avoided(new_sandbox, tmp_path):
    """The same error came twice at the run's start, on a node that still answers: it failed."""
    cluster = Cluster(new_sandbox(nodes=3, gpus=1, grace_s=20), tmp_path)
    cluster.submit(1, 2, **{"slurm.rank_prefix": ["sh", "-c", UNFIT, "sh"]})
    cluster.trains_on(2)
    assert "n2" not in expand_hostlist(cluster.running().node)
    lost = [event for event in cluster.run.events() if event["kind"] == "nodes-lost"]
    assert lost
    assert all(event["nodes"] == ["n2"] for event in lost)


def test_a_limit_of_gpus_below_max_is_found_and_kept_to(new_sandbox, tmp_path):
    """Of the range Slurm took all idle nodes, found that these are too many, and started none."""
    tracks = ("AccountingStorageEnforce=limits,qos", "AccountingStorageTRES=gres/gpu")
    box = new_sandbox(nodes=4, gpus=1, grace_s=20, accounting=True, settings=tracks)
    box.run("sacctmgr", "-i", "add", "account", "lab")
    box.run("sacctmgr", "-i", "add", "user", user_name(), "account=lab")
    box.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPerUser=gres/gpu=2")
    cluster = Cluster(box, tmp_path)
    cluster.submit(1, 4, **{"slurm.account": "lab"})
    cluster.trains_on(2)
    job = cluster.running()
    cluster.until(lambda: any(job.reason == "Dependency" for job in cluster.jobs()), "a successor")
    cluster.trains_on(2)
    assert cluster.running().job_id == job.job_id
    assert not [event for event in cluster.run.events() if event["kind"] == "grow"]


def test_a_job_whose_first_node_dies_is_followed_at_once(new_sandbox, tmp_path):
    quick = ("SlurmdTimeout=10", "MessageTimeout=5")
    cluster = Cluster(new_sandbox(nodes=3, gpus=1, grace_s=20, settings=quick), tmp_path)
    cluster.submit(1, 3)
    cluster.trains_on(3)
    job = cluster.running()
    cluster.box.kill_node(expand_hostlist(job.node)[0])

    def cancelled() -> list[str]:
        told = [e for e in cluster.run.events() if e["kind"] == "cancel"]
        return [e["reason"] for e in told if e["job_id"] == job.job_id]

    assert cluster.until(cancelled, "Slurm and a pass to see it") == [
        "the node of its script is gone"
    ]
    cluster.trains_on(2)


def test_nodes_that_make_no_size_that_is_allowed_are_given_back(new_sandbox, tmp_path):
    cluster = Cluster(new_sandbox(nodes=3, gpus=1, grace_s=20), tmp_path)
    cluster.submit(1, 4, **{"sync.sizes": [1, 2, 4]})
    cluster.trains_on(2)
    given_back = [e for e in cluster.run.events() if e["kind"] == "nodes-released"]
    version = [int(part) for part in re.findall(r"\d+", cluster.box.run("sinfo", "--version"))]
    if version >= [23, 2]:  # it takes the list of sizes: the third was never given
        assert given_back == []
    else:
        assert [(each["nodes"], each["left"]) for each in given_back] == [(1, 2)]
    cluster.until(lambda: "n3" in cluster.box.idle_nodes(), "the third node to be idle")
    assert expand_hostlist(cluster.running().node) == ["n1", "n2"]
    assert not list(cluster.run.path.glob("slurm_job*"))
    cluster.pace.write_text("0")
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    assert {line["world"] for line in cluster.steps()} == {2}


def losses_like_undisturbed(found: dict[int, dict], home: Path) -> None:
    """The same run on one GPU of this machine, where nothing happens."""
    from running import running

    home = home / "undisturbed"
    home.mkdir()
    settings = {**STORY, "run.scheduler": "local", "elastic.max": 1}
    with running(home, settings, step_s=0, samples=STORY["task.samples"]) as run:
        run.until(lambda: run.run.done() and not run.jobs(), 120, "the end of the run")
        lines = (run.run.path / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert found[line["step"]]["samples"] == line["samples"]
        assert found[line["step"]]["loss"] == pytest.approx(line["loss"], rel=1e-4), line
