"""The whole life of a run in sync mode on an awkward cluster (tests/sites.py).

pytest tests/whole/test_sites.py
"""

import json
import os
import re

import pytest

from elastic.base.errors import ElasticError
from elastic.jobs.slurm_info import expand_hostlist
from helpers import elastic, wait_until
from sites import ASKED, NEEDS, becomes, finished, powered_down, taken_reserved_and_drained

pytest_plugins = ["sites"]
pytestmark = NEEDS

TWO = {"slurm.gpus_per_node": 2, "task.samples": 6_000,
       "sync.global_batch_size": 16, "train.batch_size": 2}  # twice the GPUs: half the passes
SYNC = {**ASKED, **TWO}


def test_a_run_without_what_the_site_wants_is_refused_in_its_words(cluster):
    for mode in ({}, {"run.mode": "local", "slurm.gpus_per_worker": 2}):
        done = cluster.try_to_submit(2, 4, **TWO, **mode)
        assert done.returncode != 0
        assert "this site wants --account and --time" in done.stderr
    takes_more = ("python3", "-c", "held = b'x' * (400 << 20); __import__('time').sleep(60)")
    asked = ("--partition=preempt", "--account=project", "--time=5", "--qos=low", "--mem=100")
    with pytest.raises(ElasticError, match="Exceeded job memory limit|[Oo]ut [Oo]f [Mm]emory"):
        cluster.box.run("srun", *asked, *takes_more)


def test_the_doctor_tells_what_is_unusual_there(cluster, tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(cluster.home), "ELASTIC_SITE": os.devnull,
           "ELASTIC_RUNS": str(tmp_path), **cluster.box.environment()}
    asked = [f"--set={key}={value}" for key, value in ASKED.items() if "slurm." in key]
    asked += ["--set=slurm.partition=preempt", "--set=slurm.master_partition=cpu"]
    answer = elastic("doctor", "--json", *asked, env=env)
    seen = {each["check"]: each["seen"] for each in json.loads(answer.stdout)["checks"]}
    assert seen["partition"].startswith("preempt: UP, 2 nodes, 4 GPUs")
    assert "a job gets whole nodes" in seen["partition"]
    assert seen["preemption"] == "QOS low: REQUEUE (preempt/qos)"
    assert seen["notice"].startswith("48 s (GraceTime=20, KillWait=30)")
    assert "JobSubmitPlugins lua; Prolog /" in seen["habits"]
    assert "DefCpuPerGPU=4; DefMemPerCPU 200" in seen["habits"]
    assert "only localhost may submit jobs (AllocNodes)" in seen["cron"]


def test_a_preemption_ends_a_job_when_the_grace_of_its_qos_is_over(cluster):
    submit = ("sbatch", "--parsable", "--chdir=/", "--output=/dev/null")
    asked = ("--partition=preempt", "--account=project", "--time=50", "--qos=low", "--nodes=2")
    deaf = "--wrap=trap '' TERM; while :; do sleep 1; done"
    job = cluster.box.run(*submit, *asked, "--exclusive", deaf).strip()

    def shown(words: str) -> re.Match | None:
        return re.search(words, cluster.box.run("scontrol", "--oneliner", "show", "job", job))

    wait_until(lambda: shown("JobState=RUNNING"), 60, "the job runs")
    cluster.box.run(*submit, "--partition=high", "--qos=high", "--nodes=1", "--wrap=sleep 60")
    told = wait_until(lambda: shown(r"EndTime=(\S+) .*PreemptTime=(\d\S+)"), 60, "a preemption")
    end, preempted = map(int, told.groups())
    assert 19 <= end - preempted <= 21


def test_a_synchronous_run_lives_there(cluster):
    cluster.submit(2, 4, **SYNC)
    cluster.trains_on(4)
    shrunk = []

    def on_what_is_left() -> None:
        cluster.trains_on(2)
        shrunk.append(cluster.running().job_id)

    taken_reserved_and_drained(cluster, meanwhile=on_what_is_left)
    assert shrunk == [shrunk[0]] * 3  # it does not leave for what is not there
    cluster.trains_on(4)
    first, last = expand_hostlist(cluster.running().node)
    powered_down(cluster, last)
    cluster.trains_on(2)  # in the same job, which does not stand still while the node boots
    becomes(cluster, last, "idle~")
    cluster.box.run("scontrol", "update", f"NodeName={last}", "State=POWER_UP")
    cluster.trains_on(4)
    cluster.box.kill_node(first)
    cluster.trains_on(2)
    finished(cluster, "restart")  # of the ranks in a job that a node was taken from
