"""The whole life of a run, in both modes, on a cluster unlike the usual sandbox in all it can.

pytest tests/test_sites.py

Nodes of two GPUs call themselves by names that Slurm does not know; jobs start and end slowly, hold
whole nodes and are given cores and memory; KillWait is what sites have; and a plugin wants an
account and a time limit and renames every job.
"""

import os
from pathlib import Path

import pytest

from elastic.slurm_info import expand_hostlist
from helpers import elastic
from test_sync_slurm import Cluster

pytest_plugins = ["slurm_sandbox"]
pytestmark = [
    pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, for nodes with names of their own"),
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
ASKED = {"slurm.account": "project", "slurm.time": "60", "slurm.master_time": "60"}
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
        "SelectTypeParameters=CR_CPU_Memory",
        f"PartitionName=preempt {of_jobs}",
    )  # fmt: skip
    shape = {"nodes": 2, "gpus": 2, "grace_s": 20, "host_names": True}
    rules = tmp_path / "rules.lua"
    return Cluster(new_sandbox(settings=settings, job_submit=rules, **shape), tmp_path)


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
    taken = cluster.box.preempt(1, 3600)
    cluster.trains_on(2)
    cluster.box.run("scancel", taken)
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
    taken = cluster.box.preempt(1, 3600)
    cluster.until(lambda: [each.node for each in cluster.jobs()].count("") == 1, "one has to wait")
    before = cluster.run.newest_version()
    cluster.until(lambda: cluster.run.newest_version() > before + 1, "the other one goes on")
    cluster.box.run("scancel", taken)
    both_deliver(cluster.run.newest_version())

    workers = [job for job in cluster.jobs() if job.node in ("n1", "n2")]
    cluster.box.kill_node(workers[0].node)
    before = cluster.run.newest_version()
    cluster.until(lambda: cluster.run.newest_version() > before + 1, "the other one goes on")
    (master,) = [job for job in cluster.jobs() if job.node == "c1"]
    epoch = cluster.run.newest_commit()["master_epoch"]
    cluster.box.run("scancel", master.job_id)
    cluster.until(lambda: cluster.run.newest_commit()["master_epoch"] > epoch, "a new master")
    cluster.box.revive_node(workers[0].node)
    both_deliver(cluster.run.newest_version())
    finished(cluster)
