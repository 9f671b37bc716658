"""The whole life of a run, in both modes, on a cluster unlike the usual sandbox in all it can.

pytest tests/test_sites.py

Nodes of two GPUs call themselves by names that Slurm does not know. Each sees the runs' folder
through a cache of its own, up to a minute late, and none sees another's locks. Jobs start and end
slowly, hold whole nodes, and are given cores and memory. A QOS says who preempts whom, and with
which notice. KillWait is what sites have. A plugin wants an account and a time limit, and renames
every job. Nodes die, are reserved for others, and come back.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.base.errors import ElasticError
from elastic.jobs.slurm_info import expand_hostlist
from helpers import elastic
from test_sync_slurm import Cluster

pytest_plugins = ["slurm_sandbox"]
pytestmark = [
    pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, for nodes with names of their own"),
    pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs, for files seen late"),
]  # fmt: skip

RULES = """
function slurm_job_submit(job, partitions, uid)
   if job.partition ~= "high" and (job.account == nil or job.time_limit == slurm.NO_VAL) then
      slurm.log_user("this site wants --account and --time")
      return slurm.ERROR
   end
   job.name = "site-" .. (job.name or "job")
   return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
"""
ASKED = {
    "slurm.account": "project", "slurm.time": "60", "slurm.master_time": "60",
    "slurm.qos": "low", "slurm.master_qos": "normal",
}  # fmt: skip
LOCAL = {
    **ASKED, "run.mode": "local", "task.samples": 20_000, "slurm.gpus_per_worker": 2,
    "slurm.master_partition": "cpu",
    "local_sgd.inner_steps": 10, "elastic.reconcile_interval": "5s", "health.heartbeat": "0.5s",
    "health.lease": "5s", "local_sgd.min_deadline": "20s", "local_sgd.last_call": "5s",
}  # fmt: skip
SYNC = {**ASKED, "slurm.gpus_per_node": 2}


@pytest.fixture
def cluster(new_sandbox, tmp_path) -> Cluster:
    for name in ("prolog", "epilog"):
        script = tmp_path / name
        script.write_text("#!/bin/sh\nsleep 2\n")
        script.chmod(0o755)
    (tmp_path / "rules.lua").write_text(RULES)
    of_jobs = "OverSubscribe=EXCLUSIVE DefCpuPerGPU=4 DefMemPerCPU=200 DefaultTime=30"
    settings = (
        f"Prolog={tmp_path}/prolog", f"Epilog={tmp_path}/epilog", "PrologFlags=Alloc",
        "KillWait=30", "SlurmdTimeout=15", "MessageTimeout=5", "MinJobAge=3600",
        "SelectTypeParameters=CR_CPU_Memory", "PreemptType=preempt/qos",
        f"PartitionName=preempt {of_jobs}",
    )  # fmt: skip
    shape = {"nodes": 2, "gpus": 2, "grace_s": 0, "accounting": True, "stale": tmp_path}
    rules = tmp_path / "rules.lua"
    box = new_sandbox(settings=settings, job_submit=rules, **shape)
    define = ("sacctmgr", "--immediate", "add", "qos")
    box.run(*define, "low", "set", "PreemptMode=REQUEUE", "GraceTime=20")
    box.run(*define, "high", "set", "Preempt=low")
    return Cluster(box, tmp_path)


def taken_and_reserved(cluster: Cluster, meanwhile: Callable[[], None]) -> None:
    """A job of a higher QOS takes a node; when it leaves, the node is somebody else's for a while.
    `meanwhile` is called in either state."""
    box = cluster.box
    where = ("--partition=high", "--qos=high", "--nodes=1", "--exclusive")
    taker = box.run("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *where,
                    "--wrap=exec sleep 3600").strip()  # fmt: skip
    node = cluster.until(lambda: box.run("squeue", "--noheader", "--jobs", taker,
                                         "--states=RUNNING", "--format=%N").strip(), "a preemption")
    meanwhile()
    box.run("scontrol", "create", "reservation", "ReservationName=repair", f"Nodes={node}",
            "StartTime=now", "Duration=60", "Users=games", "Flags=IGNORE_JOBS")  # fmt: skip
    box.run("scancel", taker)
    state = ("sinfo", "--noheader", f"--nodes={node}", "--partition=preempt", "--format=%T")
    cluster.until(lambda: box.run(*state).strip() == "reserved", "an empty node that is reserved")
    meanwhile()
    box.run("scontrol", "delete", "ReservationName=repair")


def finished(cluster: Cluster) -> None:
    cluster.pace.write_text("0")
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    env = {"PATH": os.environ["PATH"], "HOME": str(cluster.home), "ELASTIC_SITE": os.devnull}
    assert elastic("audit", "story", "--files", env=env).returncode == 0
    lost = [event for event in cluster.run.events() if event["kind"] in ("fail", "restart")]
    assert lost == []


def test_a_run_without_what_the_site_wants_is_refused_in_its_words(cluster, tmp_path: Path):
    done = cluster.try_to_submit(2, 4, **{"slurm.gpus_per_node": 2})
    assert done.returncode != 0
    assert "this site wants --account and --time" in done.stderr


def test_a_synchronous_run_lives_there(cluster):
    cluster.submit(2, 4, **SYNC)
    cluster.trains_on(4)
    shrunk = []

    def on_what_is_left() -> None:
        cluster.trains_on(2)
        shrunk.append(cluster.running().job_id)

    taken_and_reserved(cluster, meanwhile=on_what_is_left)
    assert shrunk == [shrunk[0]] * 2  # it does not leave for what is not there
    cluster.trains_on(4)
    first, _ = expand_hostlist(cluster.running().node)
    cluster.box.kill_node(first)
    cluster.trains_on(2)
    finished(cluster)


def workers_of(cluster: Cluster, version: int) -> set[int]:
    """The slots that took part in versions after this one."""
    commits = list(cluster.run.commits())[version + 1 :]
    return {delta["slot"] for commit in commits for delta in commit["deltas"]}


def test_a_local_run_lives_there(cluster):
    cluster.submit(4, 4, **LOCAL)

    def both_deliver(after: int) -> None:
        cluster.until(lambda: workers_of(cluster, after) == {0, 1}, "both workers deliver")

    both_deliver(0)

    def the_other_goes_on() -> None:
        cluster.until(lambda: [job.node for job in cluster.jobs()].count("") == 1, "one waits")
        before = cluster.run.newest_version()
        cluster.until(lambda: cluster.run.newest_version() > before + 1, "the other one goes on")

    taken_and_reserved(cluster, meanwhile=the_other_goes_on)
    both_deliver(cluster.run.newest_version())

    workers = [job for job in cluster.jobs() if job.node in ("n1", "n2")]
    cluster.box.kill_node(workers[0].node)
    before = cluster.run.newest_version()
    cluster.until(lambda: cluster.run.newest_version() > before + 1, "the other one goes on")
    (master,) = [job for job in cluster.jobs() if job.node == "c1"]
    epoch = cluster.run.newest_commit()["master_epoch"]

    def has_a_new_master() -> bool:
        with contextlib.suppress(ElasticError):  # a controller that a dead node keeps busy
            cluster.box.run("scancel", master.job_id)
        return cluster.run.newest_commit()["master_epoch"] > epoch

    cluster.until(has_a_new_master, "a new master")
    cluster.box.revive_node(workers[0].node)
    both_deliver(cluster.run.newest_version())
    finished(cluster)
