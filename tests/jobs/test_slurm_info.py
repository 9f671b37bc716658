"""What Slurm says about a job: environments and answers as Slurm writes them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from elastic.base.errors import ElasticError
from elastic.jobs.slurm_info import (
    SLURMInfo,
    end_time,
    expand_hostlist,
    get_slurm_info,
    kill_at,
    log_job_info,
    notice_s,
    with_end_time,
)

INFO = SLURMInfo("4711", 2, ("n1", "n2"), 4, (4, 4), "gpu", 1_790_000_000.0)
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_END_TIME": "1790000000",
}
PARTITION = (
    "PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime={} Hidden=NO"
)
JOB = (
    "JobId=7 JobName=wrap UserId=root(0) JobState=RUNNING Reason=None RunTime=00:00:01 "
    "SubmitTime=1785751200 StartTime=1785751200 EndTime=1785754800 "
    "PreemptTime=None Partition=low AllocNode:Sid=lab:1 NodeList=n1"
)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """job(NAME=value, ...): the environment of a job, and nothing else of Slurm."""

    def set_environment(**variables: str) -> None:
        for name in STEP:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    monkeypatch.delenv("SLURM_JOB_GPUS", raising=False)
    set_environment()
    return set_environment


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """scontrol(script): a command of this name that runs it."""

    def write(script: str) -> None:
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_outside_of_slurm_there_is_no_job(job):
    assert get_slurm_info() is None


def test_a_step_sees_its_own_nodes_and_tasks(job):
    job(**STEP)
    assert get_slurm_info() == INFO


def test_a_batch_shell_sees_the_job(job):
    job(**{name: value for name, value in STEP.items() if "STEP" not in name})
    info = get_slurm_info()
    assert info.nodes == ("n1", "n2", "n3", "n4")
    assert info.tasks_per_node == (1, 1, 1, 1)


def test_a_bare_srun_and_an_old_slurm_say_less(job):
    job(SLURM_JOB_ID="7", SLURM_STEP_GPUS="0,2-3")
    assert get_slurm_info() == SLURMInfo("7", gpus_on_node=3)


def test_the_end_time_is_in_seconds_or_unknown():
    """Of a local time nobody knows which one it is, in the hour that comes twice."""
    assert end_time(JOB) == 1785754800
    assert end_time(JOB.replace("1785754800", "Unknown")) is None
    assert end_time(JOB.replace("1785754800", "2026-08-03T11:00:00")) is None
    assert end_time("") is None


@pytest.mark.parametrize(("said", "seconds"), [("5", 45), ("130", 170), ("0", 40), ("", None)])
def test_the_notice_is_the_grace_time_and_kill_wait(scontrol, said, seconds: float | None):
    """Measured: GraceTime=6, KillWait=15: TERM, once more 23 s later, KILL after another 14.5 s."""
    scontrol(f'''case "$3 $4" in
        "partition low") echo "{PARTITION.format(said)}";;
        "config ") echo "KillWait                = 40 sec";;
    esac''')
    assert notice_s("low") == seconds
    assert notice_s("high") is None


def test_where_the_qos_says_the_notice_only_kill_wait_is_sure(scontrol):
    scontrol(f'''case "$3 $4" in
        "partition low") echo "{PARTITION.format(300)}";;
        "config ") printf 'KillWait = 30 sec\nPreemptType = preempt/qos\n';;
    esac''')
    assert notice_s("low") == 30


@pytest.mark.parametrize(("end", "left_s"), [("1785754800", 300 + 30), ("Unknown", None)])
def test_a_job_is_killed_kill_wait_after_its_end_time(scontrol, job, end, left_s):
    """USR2@300 bought nothing before a time limit: GraceTime was taken for the end of everything.
    That a preemption moves EndTime is seen on a real Slurm, in test_sites."""
    told = JOB.replace("1785754800", end)
    scontrol(f'''case "$3" in
        job) echo "{told}";;
        config) echo "KillWait                = 30 sec";;
    esac''')
    assert kill_at() is None
    job(**STEP)
    assert kill_at() == (left_s and 1785754500 + left_s)


def test_slurm_is_asked_for_what_the_environment_does_not_hold(scontrol):
    partition = 'partition) echo "PartitionName=$4 GraceTime=7";;'
    scontrol(f'case "$3" in job) echo "{JOB}";; {partition} esac')
    assert with_end_time(replace(INFO, end_time=None)).end_time == end_time(JOB)
    assert with_end_time(INFO) is INFO
    assert notice_s("low") == 7


@pytest.mark.parametrize("answer", ["echo 'Invalid job id' >&2; exit 1", "echo", "kill $$"])
def test_what_slurm_does_not_say_stays_unknown(scontrol, answer: str):
    scontrol(answer)
    unknown = replace(INFO, end_time=None)
    assert with_end_time(unknown) == unknown
    assert notice_s("low") is None


def test_a_machine_without_slurm_knows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert notice_s("low") is None


def test_the_banner_holds_job_size_time_and_nccl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    lines = []
    log_job_info(replace(INFO, end_time=time.time() + 3601), lines.append)
    assert lines == [
        "job 4711, restarts 2: 2 nodes x 4 GPUs, partition gpu, time left 60 min, NCCL_DEBUG WARN"
    ]
    monkeypatch.delenv("NCCL_DEBUG")
    log_job_info(replace(INFO, end_time=None), lines.append)
    assert "time left unknown, NCCL_DEBUG not set" in lines[1]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n[1-3,7],m4", "n1 n2 n3 n7 m4"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
        ("gpu-a[3],gpu-b,c[001-002,010]", "gpu-a3 gpu-b c001 c002 c010"),
        ("n[99-101]", "n99 n100 n101"),
    ],
)
def test_a_host_list_is_expanded_in_its_order(text: str, hosts: str):
    assert expand_hostlist(text) == hosts.split()


@given(
    st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r2c"]), st.integers(1, 4),
                       st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9)), min_size=1)))
)
def test_every_range_gives_its_numbers_at_its_width(groups):
    parts, hosts = [], []
    for prefix, width, spans in groups:
        ranges = [(f"{low:0{width}d}", low, low + more) for low, more in spans]
        parts.append(f"{prefix}[{','.join(f'{low}-{high}' for low, _, high in ranges)}]")
        hosts += [f"{prefix}{number:0{len(text)}d}"
                  for text, low, high in ranges for number in range(low, high + 1)]
    assert expand_hostlist(",".join(parts)) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n1-3]", "n[]", "n[a-b]", "n[1-2[3]]", "n[1-2-3]"])
def test_a_damaged_host_list_is_an_error(text: str):
    with pytest.raises(ElasticError, match="not a Slurm host list"):
        expand_hostlist(text)
