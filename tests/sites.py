"""A cluster unlike the usual sandbox in all it can: `pytest_plugins = ["sites"]` brings `cluster`.

Nodes of two GPUs call themselves by names that Slurm does not know, and may not submit jobs. Each
sees the runs' folder through a cache of its own, up to a minute late. The filesystem has no flock.
Jobs start and end slowly, hold whole nodes, are given cores and memory, and are killed when they
use more. A QOS says who preempts whom, and with which notice. KillWait is what sites have. A
plugin wants an account and a time limit, and renames every job. Nodes are reserved for others,
drained, powered down until somebody needs them, and die.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from helpers import ROOT, elastic
from running import TESTS
from test_sync_slurm import Cluster

pytest_plugins = ["slurm_sandbox"]
NEEDS = [
    pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, for nodes with names of their own"),
    pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs, for files seen late"),
]

# A node that comes back before its end was done would be killed then: one after the other.
POWER = """
exec 9>> "$SLURM_CONF.power"
flock 9
export ELASTIC_PYTHON={python}
box=$(dirname "$SLURM_CONF")
for node in $(scontrol show hostnames "$1"); do
    {home}/bin/elastic-sandbox {command} --dir "${{box%/*}}" --name "${{box##*/}}" "$node"
done
"""
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
}


@pytest.fixture
def cluster(new_sandbox, tmp_path) -> Cluster:
    power = partial(POWER.format, home=ROOT, python=sys.executable)
    scripts = {
        "prolog": "sleep 1\n", "epilog": "sleep 1\n",
        "suspend": power(command="kill-node"), "resume": power(command="revive-node"),
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "rules.lua").write_text(RULES)
    of_jobs = "OverSubscribe=EXCLUSIVE DefCpuPerGPU=4 DefMemPerCPU=200 DefaultTime=30"
    settings = (
        f"Prolog={tmp_path}/prolog", f"Epilog={tmp_path}/epilog", "PrologFlags=Alloc",
        "KillWait=30", "SlurmdTimeout=15", "MessageTimeout=5", "MinJobAge=3600",
        "SelectTypeParameters=CR_CPU_Memory", "PreemptType=preempt/qos",
        "JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=task=1",
        "JobAcctGatherParams=OverMemoryKill",
        f"PartitionName=preempt {of_jobs} AllocNodes=localhost",
        "PartitionName=cpu AllocNodes=localhost",
        f"SuspendProgram={tmp_path}/suspend", f"ResumeProgram={tmp_path}/resume",
        "SuspendTime=3600", "SuspendTimeout=5", "ResumeTimeout=120",
    )
    shape = {"nodes": 2, "gpus": 2, "grace_s": 0, "accounting": True, "stale": tmp_path}
    rules = tmp_path / "rules.lua"
    box = new_sandbox(settings=settings, job_submit=rules, **shape)
    define = ("sacctmgr", "--immediate", "add", "qos")
    box.run(*define, "low", "set", "PreemptMode=REQUEUE", "GraceTime=20")
    box.run(*define, "high", "set", "Preempt=low")
    unlocked = {"PYTHONPATH": f"{TESTS}/unlocked"}
    lock = "import fcntl; fcntl.flock(0, fcntl.LOCK_EX)"
    tried = subprocess.run([sys.executable, "-P", "-c", lock], env=unlocked, capture_output=True)
    assert b"Function not implemented" in tried.stderr
    return Cluster(box, tmp_path, unlocked)


def taken(cluster: Cluster) -> tuple[str, str]:
    """A job of a higher QOS takes a node: the job, and the node."""
    where = ("--partition=high", "--qos=high", "--nodes=1", "--exclusive")
    job = cluster.box.run("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *where,
                          "--wrap=exec sleep 3600").strip()
    asked = ("squeue", "--noheader", "--jobs", job, "--states=RUNNING", "--format=%N")
    return job, cluster.until(lambda: cluster.box.run(*asked).strip(), "a preemption")


def taken_reserved_and_drained(cluster: Cluster, meanwhile: Callable[[], None]) -> None:
    """A job of a higher QOS takes a node; when it leaves, the node is somebody else's for a while,
    and is repaired then. `meanwhile` is called in each state."""
    box = cluster.box
    taker, node = taken(cluster)
    meanwhile()
    box.run("scontrol", "create", "reservation", "ReservationName=repair", f"Nodes={node}",
            "StartTime=now", "Duration=60", "Users=games", "Flags=IGNORE_JOBS")
    box.run("scancel", taker)
    becomes(cluster, node, "reserved")
    meanwhile()
    box.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=repair")
    box.run("scontrol", "delete", "ReservationName=repair")
    becomes(cluster, node, "drained")
    meanwhile()
    box.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def becomes(cluster: Cluster, node: str, state: str) -> None:
    asked = ("sinfo", "--noheader", f"--nodes={node}", "--partition=preempt", "--format=%T")
    cluster.until(lambda: cluster.box.run(*asked).strip() == state, f"{node} is {state}")


def powered_down(cluster: Cluster, node: str) -> None:
    """Slurm takes the node from its job and turns it off; a job that wants it turns it on again."""
    cluster.box.run("scontrol", "update", f"NodeName={node}", "State=POWER_DOWN_FORCE")
    cluster.until(lambda: not cluster.box.daemons.members(node), f"{node} is off")


def finished(cluster: Cluster, *incidents: str) -> None:
    assert "unlocked" in cluster.run.environment()["PYTHONPATH"]  # of all its jobs
    cluster.pace.write_text("0")
    cluster.until(lambda: cluster.run.done() and not cluster.jobs(), "the end of the run")
    env = {"PATH": os.environ["PATH"], "HOME": str(cluster.home), "ELASTIC_SITE": os.devnull}
    assert elastic("audit", "story", "--files", env=env).returncode == 0
    lost = [event for event in cluster.run.events() if event["kind"] in ("fail", "restart")]
    assert [event["kind"] for event in lost] == list(incidents), lost
