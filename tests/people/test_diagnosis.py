"""What the doctor makes of facts: a good cluster is OK, and every misconfiguration is named."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.base import config as configuration
from elastic.jobs.slurm_text import Node, gpus_of, most_gpus
from elastic.people.diagnosis import (
    FAIL,
    OK,
    SKIP,
    WARN,
    Disk,
    Unknown,
    diagnose,
    limit_s,
    preempt_mode,
)
from elastic.people.doctor import off_s
from elastic.run.estimate import Save

CLUSTER = {
    "SLURM_VERSION": "22.05.8", "ClusterName": "lab", "PreemptType": "preempt/partition_prio",
    "KillWait": "30 sec", "AuthInfo": "cred_expire=10,socket=/run/munge",
    "AccountingStorageEnforce": "associations,limits", "MaxJobCount": "10000",
    "SchedulerParameters": "bf_interval=2",
}
PARTITION = {"State": "UP", "PreemptMode": "REQUEUE", "GraceTime": "30", "MaxTime": "1-00:00:00",
             "QoS": "N/A"}
PARTITIONS = {"gpu": PARTITION, "cpu": {**PARTITION, "PreemptMode": "OFF", "GraceTime": "0"}}
NODES = [
    Node("gpu", "n1", "n1.site", "n1", "idle", "gpu:a100:4(S:0-1)"),
    Node("gpu", "n2", "n2.site", "n2", "down*", "gpu:a100:4(S:0-1)"),
    Node("cpu", "c1", "c1.site", "c1", "mixed", "(null)"),
]
ALONE = [Node("gpu", "n1", "login1.site", "n1", "idle", "gpu:8"),
         Node("cpu", "c1", "login1.site", "c1", "idle", "(null)")]
DISK = Disk("/runs", "lustre", "", (), 1e12, 1e9)
TORCH = {"python": "3.11.2", "version": "2.6.0", "import_s": 3.0, "gpus": 2, "problems": [],
         "unfit": False}
LOOPBACK = {"address": "127.0.0.1", "interface": "lo", "up": True, "routed": "ib0"}


def settings(*overrides: str) -> configuration.Config:
    here = ("slurm.partition=gpu", "slurm.master_partition=cpu", "elastic.max=8")
    return configuration.load_site([*here, *overrides], Path(os.devnull))


def facts(*overrides: str, **changes) -> dict:
    """Those of a good cluster, but for the changes."""
    return {
        "config": settings(*overrides), "cluster": CLUSTER, "partitions": PARTITIONS,
        "nodes": NODES, "limits": {"the account lab": {"MaxSubmit": "100"}}, "disk": DISK,
        "qos": Unknown("PreemptType is not preempt/qos"),
        "redis": "7.0, /usr/bin/redis-server",
        "network": {"address": "10.0.0.1", "interface": "ib0", "up": True, "routed": "ib0"},
        "clocks": {"slurmctld": 0.0, "run folder": -0.004}, "torch": TORCH, "save": Save(1e9, 1e9),
        "cron": "*/2 * * * * /opt/elastic/bin/elastic-reconcile\n",
        "cron_line": "*/2 * * * * /opt/elastic/bin/elastic-reconcile --jitter",
        "here": "login1", **changes,
    }


def partition(name: str = "gpu", **changes: str) -> dict:
    return {"partitions": {**PARTITIONS, name: {**PARTITIONS[name], **changes}}}


def cluster(**changes: str) -> dict:
    return {"cluster": {**CLUSTER, **changes}}


def not_ok(found: dict) -> list[tuple[str, str]]:
    return [(each.check, each.verdict) for each in diagnose(found) if each.verdict != OK]


@pytest.mark.parametrize("changes", [
    {}, partition(GraceTime="0"), {"save": Save(0, 0)}, {"cron": "5 * * * * elastic reconcile"},
])
def test_on_a_good_cluster_everything_is_ok(changes):
    assert not_ok(facts(**changes)) == []


def test_several_partitions_are_looked_at_as_one():
    """sbatch takes "a,b"; the doctor said that there was no such partition."""
    both = {**PARTITIONS, "more": {**PARTITION, "State": "DOWN"}}
    more = [Node("more", "n1", "n1.site", "n1", "idle", "gpu:a100:4"), *NODES]
    assert not_ok(facts("slurm.partition=gpu,more", partitions=both, nodes=more)) == []
    found = diagnose(facts("slurm.partition=gpu,more", partitions=both, nodes=more))
    assert "gpu,more: UP, 2 nodes, 8 GPUs" in [each.seen for each in found]


def test_a_finding_says_what_was_seen_why_it_matters_and_what_to_do():
    short = {**partition(GraceTime="3"), **cluster(KillWait="0 sec")}
    found = {each.check: each for each in diagnose(facts(**short))}
    assert found["notice"] == (
        "notice", WARN, "1 s (GraceTime=3, KillWait=0); a save takes 1 s: 1 GB at 1 GB/s",
        "what is not saved before the kill is lost",
        "GraceTime=4 for gpu, or a faster filesystem",
    )


def test_jobs_may_be_in_one_of_several_partitions():
    """The master's, too: where it has none of its own it is in the workers'."""
    several = ["slurm.partition=gpu,gpu2", "slurm.master_partition="]
    nodes = [*NODES, replace(NODES[0], partition="gpu2", name="n3")]
    there = {"partitions": {**PARTITIONS, "gpu2": PARTITION}, "nodes": nodes}
    found = {each.check: each for each in diagnose(facts(*several, **there))}
    assert found["master partition"].seen.startswith("gpu,gpu2: UP, 3 nodes")
    assert found["time limit"].verdict == OK
    assert not [each for each in found.values() if each.verdict == FAIL]


def test_a_site_without_a_partition_has_one_thing_to_mend():
    neither = ["slurm.partition=", "slurm.master_partition="]
    found = {each.check: each for each in diagnose(facts(*neither))}
    assert [name for name, each in found.items() if each.verdict == FAIL] == ["partition"]
    assert "gpu (REQUEUE), cpu (OFF)" in found["partition"].fix
    assert found["partition"].seen == "slurm.partition is not set"
    assert not {"master partition", "time limit", "preemption", "notice"} & {*found}


# Changed settings of the run, changed facts, and the one finding that they give.
MISCONFIGURED = {
    "an old Slurm": ([], cluster(SLURM_VERSION="21.08.5"), "slurm", WARN, "21.08.5"),
    "no partition named": (["slurm.partition="], {}, "partition", FAIL, "slurm.partition is not"),
    "no such partition": (["slurm.master_partition=gone"], {}, "master partition", FAIL, "gone"),
    "partition down": ([], partition(State="DOWN"), "partition", FAIL, "DOWN"),
    "master partition draining": (
        [], partition("cpu", State="DRAIN"), "master partition", FAIL, "DRAIN"),
    "no node up": (
        [], {"nodes": [*NODES[1:]]}, "partition", FAIL, "none of 1 nodes is up (down*)"),
    "partition without GPUs": (
        ["slurm.gres=gpu:h100"], {}, "partition", FAIL, "no node with gpu:h100:1"),
    "too few GPUs on a node": (
        ["slurm.gpus_per_worker=8"], {}, "partition", FAIL, "no node with gpu:8"),
    "fewer GPUs than wanted": (["elastic.max=9"], {}, "partition", WARN, "elastic.max is 9"),
    "a master that is preempted": (
        ["slurm.master_partition=gpu"], {}, "master partition", WARN, "PreemptMode=REQUEUE"),
    "time over the limit": (["slurm.time=25:00:00"], {}, "time limit", FAIL, "MaxTime=1-00"),
    "master's time over the limit": (
        ["slurm.master_time=2-0"], {}, "time limit", FAIL, "slurm.master_time = 2-0"),
    "a short DefaultTime": (
        [], partition(DefaultTime="01:00:00"), "time limit", WARN, "DefaultTime=01:00:00"),
    "a master's short DefaultTime": (
        ["slurm.time=8:00:00"], partition("cpu", DefaultTime="00:30:00"), "time limit", WARN,
        "cpu: MaxTime=1-00:00:00, DefaultTime=00:30:00"),
    "whole nodes for one GPU": (
        [], partition(OverSubscribe="EXCLUSIVE"), "partition", WARN, "a job gets whole nodes"),
    "whole nodes, as newer Slurms say it": (
        [], partition(Exclusive="NODE"), "partition", WARN, "Exclusive=NODE: a job gets whole"),
    "one of the master's partitions is none": (
        ["slurm.master_partition=cpu,gone"], {}, "master partition", FAIL, "no partition gone"),
    "time over the limit of one of two partitions": (
        ["slurm.partition=long,gpu", "slurm.time=25:00:00"],
        {"partitions": {**PARTITIONS, "long": {**PARTITION, "MaxTime": "2-0"}},
         "nodes": [*NODES, replace(NODES[0], partition="long")]},
        "time limit", FAIL, "gpu: MaxTime=1-00"),
    "one of two partitions is none": (
        ["slurm.partition=gpu,gone"], {}, "partition", FAIL, "no partition gone"),
    "PreemptMode=CANCEL": ([], partition(PreemptMode="CANCEL"), "preemption", WARN, "CANCEL"),
    "PreemptMode=SUSPEND": (
        [], partition(PreemptMode="SUSPEND"), "preemption", FAIL, "SUSPEND"),
    "a notice that is shorter than a save": (
        [], {"save": Save(80e9, 120e9)}, "notice", FAIL, "58 s (GraceTime=30, KillWait=30);"
        " a save takes 1.2e+02 s (80 s for what counts): 120 GB at 1 GB/s"),
    "a notice that is hardly longer": (
        [], {"save": Save(40e9, 40e9)}, "notice", WARN, "40 s: 40 GB"),
    "a notice for the work, and not for inner state": (
        [], {"save": Save(7e9, 60e9)}, "notice", WARN, "60 s (7 s for what counts)"),
    "no grace, and a short KillWait": (
        [], {**partition(GraceTime="0"), **cluster(KillWait="3 sec"), "save": Save(3e9, 3e9)},
        "notice", FAIL, "1 s (GraceTime=0, KillWait=3)"),
    "preemption by priority": (
        [], partition(PreemptMode="PRIORITY,SUSPEND"), "preemption", FAIL, "SUSPEND"),
    "MaxSubmitJobs below max": (
        [], {"limits": {"the account lab": {"MaxSubmit": "8"}}}, "limits", WARN,
        "8, the run has up"),
    "MaxSubmitJobs below min": (
        ["elastic.min=8"], {"limits": {"the QOS low": {"MaxSubmitPU": "8"}}}, "limits", FAIL,
        "QOS"),
    "a limit on GPUs below max": (
        [], {"limits": {"the account lab": {"GrpTRES": "cpu=9,gres/gpu=4"}}}, "limits", WARN,
        "GrpTRES of the account lab is 4, the run has up to"),
    "MaxJobCount": ([], {**cluster(MaxJobCount="5"), "limits": Unknown("no accounting")},
                    "limits", WARN, "MaxJobCount of the cluster is 5"),
    "one job where sync mode has two": (
        ["run.mode=sync"], {"limits": {"lab": {"MaxSubmit": "1"}}}, "limits", WARN, "up to 2 jobs"),
    "a folder that cannot be written": (
        [], {"disk": Unknown("cannot write to /runs: Permission denied", "set ELASTIC_RUNS", FAIL)},
        "run folder", FAIL, "Permission denied"),
    "a filesystem without link": (
        [], {"disk": Disk("/r", "beegfs", "", ("link or fsync: not supported",), 1e9, 1e9)},
        "run folder", FAIL, "link or fsync"),
    "no space": ([], {"disk": Disk("/r", "nfs", "no space on /r", (), 1e3, 1e9)},
                 "run folder", FAIL, "no space on /r"),
    "a folder of one machine": ([], {"disk": Disk("/tmp", "tmpfs", "", (), 1e9, 1e9)},
                                "run folder", WARN, "; c1.site and n1.site may not see it"),
    "a slow filesystem": (
        [], {"disk": Disk("/r", "nfs", "", (), 1e9, 5e6), "save": Save(1, 1)},
        "run folder", WARN, "writes 5 MB/s"),
    "no redis-server": ([], {"redis": Unknown("no redis-server (6.0 or newer)", "apt-get …", FAIL)},
                        "redis", FAIL, "no redis-server"),
    "no such interface": (
        ["redis.bind=ib7"],
        {"network": Unknown("redis.bind = 'ib7' is no interface here"), "nodes": ALONE},
        "interface", FAIL, "'ib7'"),
    "an interface that a login node has not": (
        ["redis.bind=ib0"],
        {"network": Unknown("no ib0 here", "set it")},
        "interface", WARN, "no ib0 here; the master's node may have it"),
    "an interface that is down": (
        ["redis.bind=ib0"], {"network": {**LOOPBACK, "up": False}}, "interface", FAIL, "is down"),
    "loopback, and several machines": (
        [], {"network": LOOPBACK}, "interface", WARN, "other machines cannot reach it"),
    "a clock that is off": ([], {"clocks": {"slurmctld": -2.0}}, "clock", WARN, "-2.0 s"),
    "a clock that is wrong": ([], {"clocks": {"slurmctld": 0.0, "redis": 31.0}}, "clock", FAIL,
                              "redis +31.0 s"),
    "a slow import": ([], {"torch": {**TORCH, "import_s": 40.0}}, "torch", WARN, "in 40.0 s"),
    "a sick GPU": ([], {"torch": {**TORCH, "problems": ["cuda:1 computes wrongly"], "unfit": True}},
                   "gpus", FAIL, "cuda:1"),
    "a worn GPU": ([], {"torch": {**TORCH, "problems": ["cuda:0: 3 uncorrected errors"]}},
                   "gpus", WARN, "cuda:0"),
    "no crontab at all": ([], {"cron": None}, "cron", WARN, "no crontab and no scrontab here"),
    "no line in the crontab": (
        [], {"cron": "# */2 * * * * elastic-reconcile\n"}, "cron", WARN, "not in the crontab"),
}


@pytest.mark.parametrize("what", MISCONFIGURED)
def test_what_is_wrong_is_named_and_nothing_else(what):
    overrides, changes, check, verdict, words = MISCONFIGURED[what]
    found = diagnose(facts(*overrides, **changes))
    bad = [each for each in found if each.verdict in (WARN, FAIL)]
    assert [(each.check, each.verdict) for each in bad] == [(check, verdict)]
    assert words in bad[0].seen
    assert bad[0].why
    assert bad[0].fix or "Unknown" in repr(changes)


def test_where_nothing_is_preempted_there_is_no_notice():
    off = [("preemption", WARN), ("notice", SKIP)]
    assert not_ok(facts(**partition(PreemptMode="OFF"))) == off
    assert not_ok(facts(**cluster(PreemptType="preempt/none"))) == off


def test_what_a_qos_decides_is_not_guessed_where_nobody_knows_it():
    found = facts("slurm.master_qos=normal", **cluster(PreemptType="preempt/qos"))
    assert not_ok(found) == [("preemption", SKIP)]


def test_what_a_qos_decides_is_judged_as_a_partitions():
    low = {"Name": "low", "PreemptMode": "requeue", "GraceTime": "00:00:20"}
    by_qos = cluster(PreemptType="preempt/qos", KillWait="30 sec")
    ours = facts("slurm.master_qos=normal", **by_qos, qos=low)
    assert not_ok(ours) == []
    seen = {each.check: each.seen for each in diagnose(ours)}
    assert seen["preemption"] == "QOS low: REQUEUE (preempt/qos)"
    assert seen["notice"].startswith("48 s (GraceTime=20, KillWait=30)")
    as_the_cluster = {**low, "PreemptMode": "cluster"}
    other = facts(**cluster(PreemptType="preempt/qos", PreemptMode="SUSPEND"), qos=as_the_cluster)
    assert ("preemption", FAIL) in not_ok(other)


@pytest.mark.parametrize(("changes", "delay"), [
    (cluster(AuthInfo=""), "121 s"), (cluster(SchedulerParameters="requeue_delay=60"), "61 s"),
    (cluster(SlurmctldParameters="enable_expedited_requeue"), "1 s"),
])
def test_a_site_is_told_how_long_a_requeued_job_waits(changes, delay):
    told = {each.check: each.seen for each in diagnose(facts(**changes))}["habits"]
    assert told.endswith(f"a requeued job waits for {delay}")


def test_what_a_site_does_to_every_job_is_told():
    changes = partition(JobDefaults="DefCpuPerGPU=4", DefMemPerCPU="200")
    changes |= cluster(JobSubmitPlugins="lua", Prolog="/etc/prolog", Epilog="(null)")
    told = {each.check: each.seen for each in diagnose(facts(**changes))}["habits"]
    assert told == ("JobSubmitPlugins lua; Prolog /etc/prolog; JobDefaults DefCpuPerGPU=4;"
                    " DefMemPerCPU 200; a requeued job waits for 11 s")


def test_without_slurm_one_line_says_so_for_all_that_slurm_knows():
    silence = Unknown("Command not found: scontrol", "is Slurm's bin directory in PATH?", FAIL)
    lost = dict.fromkeys(("cluster", "partitions", "nodes", "limits", "qos"), silence)
    found = diagnose(facts(**lost))
    assert [each.check for each in found if each.verdict == FAIL] == ["slurm"]
    assert [each.seen for each in found].count(silence.why) == 1
    assert found[0].fix == silence.fix


def test_on_the_local_scheduler_slurm_is_nobodys_business():
    nobody = Unknown('run.scheduler = "local"')
    lost = dict.fromkeys(("cluster", "partitions", "nodes", "limits", "qos"), nobody)
    assert {verdict for _, verdict in not_ok(facts(**lost))} == {SKIP}


def test_a_limit_on_gpus_counts_in_either_mode_and_for_its_type():
    low = {"the QOS low": {"MaxTRESPU": "cpu=9,gres/gpu=2"}}
    for mode in ("sync", "local"):
        found = not_ok(facts(f"run.mode={mode}", "elastic.min=4", limits=low))
        assert ("limits", FAIL) in found, mode
    tres = "cpu=64,gres/gpu=8,gres/gpu:a100=4,gres/gpu:h100=1,gres/shard=2"
    assert [most_gpus(tres, gres) for gres in ("gpu", "gpu:a100", "gpu:l4", "")] == [
        [8], [8, 4], [8], []]


def test_where_the_qos_decides_the_master_needs_one_of_its_own():
    by_qos = cluster(PreemptType="preempt/qos")
    low = {"Name": "low", "PreemptMode": "requeue", "GraceTime": "00:00:30"}
    shared = not_ok(facts("slurm.qos=low", **by_qos, qos=low))
    assert shared == [("master partition", WARN)]
    assert not_ok(facts("slurm.qos=low", "slurm.master_qos=normal", **by_qos, qos=low)) == []


def test_limits_that_slurm_does_not_enforce_are_none():
    lax = cluster(AccountingStorageEnforce="associations")
    assert not_ok(facts(**lax, limits={"lab": {"MaxSubmit": "1"}})) == []


def test_in_sync_mode_one_job_runs_and_the_other_waits():
    assert not_ok(facts("run.mode=sync", limits={"lab": {"MaxJobs": "1", "MaxSubmit": "2"}})) == [
        ("master partition", SKIP)]


def test_a_save_that_cannot_be_weighed_leaves_the_notice_known():
    found = {each.check: each for each in diagnose(facts(save=Unknown("no module x")))}
    assert found["notice"].verdict == OK
    assert found["notice"].seen == (
        "58 s (GraceTime=30, KillWait=30); what a save takes is not known: no module x"
    )


@pytest.mark.parametrize(("text", "seconds"), [
    ("30", 1800), ("30:15", 1815), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400),
    ("1-00:00:01", 86401), ("UNLIMITED", float("inf")), ("INFINITE", float("inf")),
])
def test_time_limits_as_slurm_writes_them(text, seconds):
    assert limit_s(text) == seconds


@pytest.mark.parametrize(("gres", "wanted", "count"), [
    ("gpu:2", "gpu", 2), ("gpu:a100:4(S:0-1)", "gpu", 4), ("gpu:a100:4(S:0,1)", "gpu:a100", 4),
    ("gpu:a100:2,gpu:h100:1(S:0),shard:8", "gpu", 3), ("gpu:a100:4", "gpu:h100", 0),
    ("(null)", "gpu", 0),
])
def test_gpus_of_a_node_as_slurm_writes_them(gres, wanted, count):
    assert gpus_of(gres, wanted) == count


def test_a_clock_is_off_only_as_far_as_it_must_be():
    assert off_s(105.0, 100.0, 101.0) == 4.0
    assert off_s(95.0, 100.0, 101.0) == -5.0
    assert off_s(100.5, 100.0, 101.0) == 0.0
    assert off_s(99.0, 99.9, 100.0, within_s=1.0) == 0.0


@pytest.mark.parametrize(("name", "found", "said"), [
    ("habits", cluster(AuthInfo="", SlurmctldParameters="enable_expedited_requeue"),
     "a requeued job waits for 1 s"),
    ("preemption", partition(PreemptMode="WITHIN,REQUEUE"), "gpu: REQUEUE"),
    ("preemption", partition(PreemptMode="PRIORITY,REQUEUE"), "gpu: REQUEUE"),
])
def test_words_of_newer_slurms_are_understood(name, found, said):
    (finding,) = [each for each in diagnose(facts(**found)) if each.check == name]
    assert finding.verdict == OK
    assert said in finding.seen


def test_only_a_partition_of_a_higher_tier_on_the_same_nodes_preempts():
    tiers = {"gpu": {**PARTITION, "PriorityTier": "1"}, "cpu": {**PARTITION, "PriorityTier": "1"},
             "high": {**PARTITION, "PriorityTier": "10"}}
    nodes = [*NODES, Node("high", "n1", "n1.site", "n1", "idle", "gpu:a100:4(S:0-1)")]
    modes = {name: preempt_mode(CLUSTER, name, tiers, nodes) for name in tiers}
    assert modes == {"gpu": "REQUEUE", "cpu": "OFF", "high": "OFF"}
    assert not_ok(facts(partitions=tiers, nodes=nodes)) == []


@pytest.mark.parametrize(
    ("mode", "wanted"), [("GANG,REQUEUE", "REQUEUE"), ("GANG", "OFF"), ("SUSPEND,GANG", "SUSPEND")]
)
def test_gang_alone_takes_nothing(mode: str, wanted: str):
    found = partition(PreemptMode=mode)["partitions"]
    assert preempt_mode(CLUSTER, "gpu", found, NODES) == wanted


def test_a_time_that_slurm_does_not_know_is_named():
    assert ("time limit", FAIL) in not_ok(facts("slurm.time=12h"))


# ---- a job that was tried


def rank(node: str, **changes) -> dict:
    seen = {"view": f"{node} (hostname {node}.site): 8 cores, 64GB of memory, GPUs 0,1"}
    return {**seen, "cores": 8, "given_cores": 8, "gpus": 2, "given_gpus": 2, **changes}


TRIED = {
    "waited_s": 12.4, "startup_s": 3.2, "ranks": [*map(rank, ("n1", "n1", "n2", "n2"))],
    "trained": 4, "how": "12 ms a step on cpu", "saved": [4, 0.2], "seen": [4, 0.11], "locks": 3,
    "killed": [1, 0.2], "ended_s": 0.6, "told": [3, 0.1],
    "lives": "live on", "shrunk": "a step on one node took 0.3 s", "is_stuck": False,
}


def tried(**changes) -> dict[str, tuple[str, str]]:
    found = diagnose(facts(tried={**TRIED, **changes}))
    return {each.check: (each.verdict, each.seen) for each in found if "try " in each.check}


def test_a_job_that_was_tried_is_told_in_seven_lines():
    assert tried() == {
        "try job": (OK, "2 nodes after 12 s, their ranks 3 s later"),
        "try ranks": (OK, "n1 (hostname n1.site): 8 cores, 64GB of memory, GPUs 0,1; "
                          "n2 (hostname n2.site): 8 cores, 64GB of memory, GPUs 0,1"),
        "try train": (OK, "4 of 4 ranks train together: 12 ms a step on cpu"),
        "try files": (OK, "4 of 4 ranks see a file after 0.1 s; 3 of 3 find one locked"),
        "try kill": (OK, "srun tells 1 of 1 death within 0.2 s; steps end in 0.6 s"),
        "try notice": (OK, "3 of 3 ranks hear TERM within 0.1 s; srun and batch script live on;"
                           " 4 of 4 that train save their last step within 0.2 s"),
        "try shrink": (OK, "a step on one node took 0.3 s"),
    }


@pytest.mark.parametrize(("changes", "name", "verdict"), [
    ({"startup_s": 90.0}, "try job", WARN),
    ({"ranks": [*TRIED["ranks"][:3], rank("n2", gpus=1)]}, "try ranks", FAIL),
    ({"ranks": [rank("n1", cores=1), *TRIED["ranks"][1:]]}, "try ranks", WARN),
    ({"trained": 2, "how": "n1 cannot reach n2"}, "try train", FAIL),
    ({"saved": [3, 65.0]}, "try notice", FAIL),
    ({"seen": [2, 65.0]}, "try files", FAIL),
    ({"seen": [4, 30.0]}, "try files", WARN),
    ({"locks": 2}, "try files", WARN),
    ({"killed": [0, 65.0]}, "try kill", FAIL),
    ({"ended_s": 15.0}, "try kill", WARN),
    ({"told": [2, 65.0]}, "try notice", FAIL),
    ({"lives": "do not both live on"}, "try notice", FAIL),
    ({"shrunk": "scontrol failed: no", "is_stuck": True}, "try shrink", WARN),
])
def test_what_a_tried_job_shows_to_be_wrong_is_named(changes, name, verdict):
    assert {each: found[0] for each, found in tried(**changes).items() if found[0] != OK} == {
        name: verdict}


@pytest.mark.parametrize(("reason", "verdict"), [
    (Unknown("sbatch: no such account", "see [slurm]", FAIL), FAIL),
    (Unknown("job 7 is PENDING (Resources) after 10 minutes"), SKIP),
])
def test_where_no_job_could_be_tried_one_line_says_why(reason, verdict):
    found = [each for each in diagnose(facts(tried=reason)) if "try " in each.check]
    assert [(each.check, each.verdict, each.seen, each.fix) for each in found] == [
        ("try job", verdict, reason.why, reason.fix)]
