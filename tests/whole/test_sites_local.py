"""The whole life of a run in local mode on an awkward cluster (tests/sites.py).

pytest tests/whole/test_sites_local.py
"""

from sites import ASKED, NEEDS, finished, powered_down, taken
from test_sync_slurm import Cluster

pytest_plugins = ["sites"]
pytestmark = NEEDS

LOCAL = {
    **ASKED, "run.mode": "local", "task.samples": 8_000, "slurm.gpus_per_worker": 2,
    "slurm.master_partition": "cpu",
    "local_sgd.inner_steps": 4, "elastic.reconcile_interval": "5s", "health.heartbeat": "0.5s",
    "health.lease": "5s", "local_sgd.min_deadline": "20s", "local_sgd.last_call": "5s",
}


def newest(cluster) -> int:
    return cluster.run.commits.newest_version()


def workers_of(cluster: Cluster, version: int) -> set[int]:
    """The slots that took part in versions after this one."""
    commits = list(cluster.run.commits.all())[version + 1 :]
    return {delta.slot for commit in commits for delta in commit.deltas}


def test_a_local_run_lives_there(cluster):
    cluster.submit(4, 4, **LOCAL)
    cluster.pace.write_text("0.75")  # each step of ranks that share a model takes its CPU

    def both_deliver(after: int) -> None:
        cluster.until(lambda: workers_of(cluster, after) == {0, 1}, "both workers deliver")

    def the_other_goes_on() -> None:
        before = newest(cluster)
        cluster.until(lambda: newest(cluster) > before + 1, "the other one goes on")

    both_deliver(0)
    taker, _ = taken(cluster)
    cluster.until(lambda: [job.node for job in cluster.jobs()].count("") == 1, "one waits")
    the_other_goes_on()
    cluster.box.run("scancel", taker)
    both_deliver(newest(cluster))
    powered_down(cluster, "n1")
    both_deliver(newest(cluster))

    workers = [job for job in cluster.jobs() if job.node in ("n1", "n2")]
    cluster.box.kill_node(workers[0].node)
    the_other_goes_on()
    epoch = cluster.run.commits.newest().master_epoch
    cluster.box.kill_node("c1")  # with the master and its Redis
    cluster.until(lambda: "c1" not in [job.node for job in cluster.jobs()], "the loss is known")
    cluster.box.revive_node("c1")
    cluster.until(lambda: cluster.run.commits.newest().master_epoch > epoch, "a new master")
    cluster.box.revive_node(workers[0].node)
    both_deliver(newest(cluster))
    finished(cluster)
