"""The Slurm back end: its pure parts on literal text, and its three verbs on a private Slurm."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.base import config
from elastic.base.environment import clean_environment, elastic_home, user_name
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs import history, sched, sched_slurm
from elastic.jobs.history import Job
from elastic.jobs.sched import Elsewhere, JobSpec, Refused, RetryLater, parse_job_name
from elastic.jobs.sched_slurm import (
    SlurmScheduler,
    _job_python,
    parse_squeue,
    refusal,
    sbatch_argv,
    slurm_command,
)
from elastic.jobs.slurm_text import Node
from elastic.people import submission
from elastic.run import estimate
from elastic.sync.launch import Ranks
from forks import as_nobody
from helpers import PATIENCE, ROOT, wait_until

pytest_plugins = ["slurm_sandbox"]

# squeue --me --states=all, 22.05.8: a worker runs, one waits, one was preempted, a trainer's first
# node has died, the master was cancelled, one is leaving; two had been renamed by the site;
# others' jobs with a newline, a separator, and names only nearly like ours.
SQUEUE = """\
41|RUNNING|1795257556|1795257557|1795343957|n1|None|n1|big/w3@elastic|big/w3@elastic;
42|PENDING|1795257558|1795259999|1795346399||Nodes are DOWN, DRAINED|n/a|(null)|big/w4@elastic;
22|PENDING|1795257762|N/A|N/A||None|n/a|a b"
 d|x|y;
23|RUNNING|1795257762|1795257763|N/A|c1|None|c1|(null)|big/w3;
24|RUNNING|1795257762|1795257763|N/A|c1|None|c1|big/w@elastic|big/x3@elastic;
40|PREEMPTED|1795257500|1795257501|1795257540|n2|None|n2|big/w5@elastic|preempt me;
38|RUNNING|1795257480|1795257481|1795343957|n[2-3]|None|n1|big/t0@elastic|big/t0@elastic;
39|CANCELLED|1795257490|1795257491|1795257499|c1|None|c1|big/m0@elastic|site-big/m0@elastic;
37|COMPLETING|1795257480|1795257481|1795257499|n4|None|n4|big/w1@elastic|big/w1@elastic;
""".replace("|", "\x1f").replace(";", "\x1e")


def test_squeue_answer_becomes_the_elastic_jobs_in_it():
    assert parse_squeue(SQUEUE) == [
        Job("41", "worker", 3, "RUNNING", "None", 1795257556.0, 1795257557.0, "n1",
            limit_at=1795343957.0, run="big"),
        Job("42", "worker", 4, "PENDING", "Nodes are DOWN, DRAINED", 1795257558.0, run="big"),
        Job("40", "worker", 5, "PREEMPTED", "None", 1795257500.0, 1795257501.0, "n2",
            ended_at=1795257540.0, run="big"),
        Job("38", "trainer", 0, "RUNNING", "None", 1795257480.0, 1795257481.0, "n[2-3]",
            is_headless=True, limit_at=1795343957.0, run="big"),
        Job("39", "master", 0, "CANCELLED", "None", 1795257490.0, 1795257491.0, "c1",
            ended_at=1795257499.0, run="big"),
        Job("37", "worker", 1, "COMPLETING", "None", 1795257480.0, 1795257481.0, "n4",
            ended_at=1795257499.0, run="big"),
    ]
    assert [job.ended for job in parse_squeue(SQUEUE)] == [False, False, True, False, True, False]


def test_a_job_is_found_by_its_name_alone(tmp_path):
    spec = make_spec(tmp_path, SLURM_TOML, role="trainer", slot=0)
    assert spec.name == "big/t0@elastic"
    whose = ("big", "trainer", 0)
    assert parse_job_name(spec.name) == whose
    for other in ("big/t0", "t0@elastic", "big/t@elastic", "big/t00@elastic", "big/x0@elastic",
                  "elastic:big/trainer/0", "a/b/t0@elastic", "big/t0@elastic2"):
        assert parse_job_name(other) is None, other


def test_no_jobs_is_an_answer():
    assert parse_squeue("") == []


@pytest.mark.parametrize("length", range(1, 80, 7))
def test_an_answer_that_is_cut_short_is_no_answer(length):
    with pytest.raises(TryAgain, match="squeue"):
        parse_squeue(SQUEUE[:length])


def test_a_record_with_too_few_fields_is_no_answer():
    with pytest.raises(TryAgain, match="squeue: the answer cannot be read"):
        parse_squeue("41\x1fRUNNING\x1f1795257556\x1e\n")


@pytest.mark.parametrize("said", ["Welcome!\n{}", "{}Bye.\n", "Welcome!\n{}Bye.\n", "No jobs\n"])
def test_words_of_a_sites_own_command_are_no_answer_and_no_jobs(tmp_path, monkeypatch, said):
    """The first job had the greeting in its id: nobody's, it was taken to be gone."""
    rest = SQUEUE if "{}" in said else ""
    with pytest.raises(TryAgain, match="squeue: the answer cannot be read"):
        parse_squeue(said.format(rest))
    path = fake_command(tmp_path, "sinfo", "echo 'Welcome = to n1'; printf 'a\\037n1\\n'")
    monkeypatch.setenv("PATH", path["PATH"])
    with pytest.raises(TryAgain, match="sinfo: the answer cannot be read"):
        sched_slurm.nodes()
    fake_command(tmp_path, "scontrol", "echo 'Welcome=1'; echo 'PartitionName=gpu State=UP'")
    assert sched_slurm.partitions() == {"gpu": {"PartitionName": "gpu", "State": "UP"}}
    fake_command(tmp_path, "scontrol", "echo 'No partitions in the system'")
    with pytest.raises(TryAgain, match="scontrol: the answer cannot be read"):
        sched_slurm.partitions()


SLURM_TOML = """
[run]
scheduler = "slurm"
[slurm]
partition = "gpu"
master_partition = "cpu"
account = "lab"
qos = "low"
time = "1-00:00:00"
master_time = "7-00:00:00"
gpus_per_worker = 4
gres = "gpu:a100"
cpus_per_gpu = 8
mem_per_gpu = "60G"
master_cpus = 3
signal = "B:USR2@60"
options = ["--constraint=nvlink", "--nice=100"]
master_options = ["--nice=1"]
exclude = "n[7-9]"
[elastic]
max = 4
[train]
epochs = 1
"""


MINIMAL_TOML = """
[run]
scheduler = "slurm"
[slurm]
partition = "gpu"
[train]
epochs = 1
"""


def make_spec(folder: Path, toml: str, role: str = "worker", slot: int = 7, **fields) -> JobSpec:
    file = folder / "big.toml"
    file.write_text(toml)
    settings = config.load(file, site=Path(os.devnull))
    environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "99", "SBATCH_PARTITION": "nosuch"}
    each = settings.slurm.gpus_per_worker if role == "worker" else 0
    fields = {"run_dir": Path("/runs/big"), "environment": environment} | fields
    fields = {"gpus": (each, each)} | fields
    return JobSpec(run="big", role=role, slot=slot, config=settings, **fields)


@pytest.mark.parametrize(("given", "passed"), [
    ("B:USR2@60", "USR2@60"), ("RB:USR2@60", "R:USR2@60"), ("BR:USR2@60", "R:USR2@60"),
    ("R:USR2@60", "R:USR2@60"), ("USR2@60", "USR2@60")])
def test_no_signal_goes_to_the_batch_shell(tmp_path, given, passed):
    """It would end the shell, and the step with it."""
    spec = make_spec(tmp_path, SLURM_TOML.replace("B:USR2@60", given))
    assert f"--signal={passed}" in sbatch_argv(spec, Path("/opt/elastic"), "python")


def test_sbatch_command_of_a_worker_with_every_option(tmp_path):
    spec = make_spec(tmp_path, SLURM_TOML, run_dir=Path("/runs/5% off/big"), exclude=("n1", "n2"))
    assert sbatch_argv(spec, Path("/opt/elastic"), "/opt/venv/bin/python") == [
        "sbatch", "--parsable",
        "--job-name=big/w7@elastic", "--comment=big/w7@elastic",
        "--no-requeue", "--dependency=singleton", "--export=ALL",
        "--chdir=/runs/5% off/big", "--open-mode=append",
        "--output=/runs/5%% off/big/logs/worker-0007.log",
        "--nodes=1", "--ntasks=1", "--partition=gpu", "--account=lab", "--qos=low",
        "--time=1-00:00:00", "--gres=gpu:a100:4", "--cpus-per-task=32", "--mem=240G",
        "--signal=USR2@60", "--exclude=n[7-9],n1,n2", "--constraint=nvlink", "--nice=100",
        "/opt/elastic/sbatch/worker.sbatch",
        "/opt/elastic", "/opt/venv/bin/python", "/runs/5% off/big", "7",
    ]


def test_sbatch_command_of_a_master_asks_for_no_gpus(tmp_path):
    spec = make_spec(tmp_path, SLURM_TOML, role="master", slot=0)
    assert sbatch_argv(spec, Path("/opt/elastic"), "python3")[7:] == [
        "--chdir=/runs/big", "--open-mode=append", "--output=/runs/big/logs/master.log",
        "--nodes=1", "--ntasks=1", "--partition=cpu", "--account=lab", "--qos=low",
        "--time=7-00:00:00", "--cpus-per-task=3", "--signal=USR2@60", "--exclude=n[7-9]",
        "--nice=1", "/opt/elastic/sbatch/master.sbatch",
        "/opt/elastic", "python3", "/runs/big", "0",
    ]


def test_the_master_has_an_account_a_qos_and_memory_of_its_own(tmp_path):
    """Of sites where what is preempted is a QOS, and GPUs are another account's."""
    own = 'master_account = "lab-cpu"\nmaster_qos = "normal"\nmaster_mem = "96G"\n[elastic]'
    toml = SLURM_TOML.replace("[elastic]", own)
    argv = sbatch_argv(make_spec(tmp_path, toml, "master", 0), Path("/opt/elastic"), "python3")
    assert {"--account=lab-cpu", "--qos=normal", "--mem=96G"} <= {*argv}
    argv = sbatch_argv(make_spec(tmp_path, toml), Path("/opt/elastic"), "python3")
    assert {"--account=lab", "--qos=low", "--mem=240G"} <= {*argv}


def test_workers_get_the_sites_own_options_of_srun(tmp_path):
    options = 'srun_options = ["--container-image=a b.sqsh"]\n[elastic]'
    toml = SLURM_TOML.replace("[elastic]", options)
    argv = sbatch_argv(make_spec(tmp_path, toml), Path("/opt/elastic"), "python3")
    assert argv[-2:] == ["7", "--container-image=a b.sqsh"]
    argv = sbatch_argv(make_spec(tmp_path, toml, "master", 0), Path("/opt/elastic"), "python3")
    assert argv[-1] == "0"


@pytest.mark.parametrize(
    ("cores", "words"),
    [("64(x2)", "--cpus-per-task=8"), ("1(x2)", "--overcommit"), ("32,16", "--cpus-per-task=2"),
     ("32(x2),16,128(x16)", "--cpus-per-task=2")],
)
def test_ranks_share_the_smallest_nodes_cores_however_few(monkeypatch, cores, words):
    """A smaller node than the first had not what each rank asked for: no step was started."""
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", cores)
    argv = sched_slurm.step_argv(["n1", "n2"], 8, ["rank"], ["--container-image=x"])
    assert {words, "--ntasks-per-node=8", "--wait=0"} <= {*argv}
    assert argv[-2:] == ["--container-image=x", "rank"]


NODE = ("NodeName={0} CPUTot={1} CPUEfctv={2} RealMemory={3} MemSpecLimit={4} Gres=gpu:a100:{5} "
        "OS=Linux 6.1 #1 SMP State=IDLE")


@pytest.mark.parametrize(
    ("partition", "settings", "options", "share"),
    [
        ("DefMemPerNode=UNLIMITED JobDefaults=(null)", "", [], (15, "124000M")),
        ("DefMemPerNode=UNLIMITED JobDefaults=DefCpuPerGPU=8", "", [], (0, "124000M")),
        ("DefMemPerCPU=2000 JobDefaults=(null)", "", [], (15, "")),
        ("JobDefaults=(null)", "DefMemPerCPU            = 4000\n", [], (15, "")),
        ("JobDefaults=(null)", "JobDefaults = DefCpuPerGPU=2,DefMemPerGPU=9\n", [], (0, "")),
        ("JobDefaults=(null)", "", ["--mem-per-gpu=64G", "--nice"], (15, "")),
        ("JobDefaults=(null)", "", ["--mem-per-cpu", "4G"], (15, "")),
        ("JobDefaults=(null)", "", ["--mem-bind=local"], (15, "124000M")),
        ("JobDefaults=(null)", "", ["--cpus-per-gpu=4"], (0, "124000M")),
        ("JobDefaults=(null)", "", ["-c", "4"], (0, "124000M")),
        ("JobDefaults=(null)", "", ["--hint=nomultithread"], (0, "124000M")),
        ("JobDefaults=(null)", "", ["--threads-per-core=1"], (0, "124000M")),
        ("JobDefaults=(null)", "", ["--constraint=few"], (15, "150000M")),
        ("JobDefaults=(null)", "", ["--constraint=[few|big]"], (15, "124000M")),
    ],
)
def test_a_gpus_share_of_its_node_is_what_slurm_has_no_default_for(
    tmp_path, monkeypatch, partition, settings, options, share
):
    """1 CPU a GPU over DefCpuPerGPU it was. Cores and memory that a site keeps are not shared.
    Slurm refuses a job that says the same in two ways, --mem and --mem-per-gpu."""
    rows = [NODE.format("big", 128, 126, 1000000, 8000, 8),
            NODE.format("few", 64, 60, 600000, 0, 4)]
    said = {"partition": f"PartitionName=gpu {partition}\nPartitionName=cpu",
            "config": f"Configuration data as of 1767225600\n{settings}"
                      "SLURM_VERSION           = 24.11.5\n",
            "node": "\n".join(rows)}
    listed = [Node("gpu", name, name, name, "idle", f"gpu:a100:{gpus}(S:0-1)", name)
              for name, gpus in (("big", 8), ("few", 4))]
    monkeypatch.setattr(sched_slurm, "nodes", lambda: [*listed, Node("cpu", *"ccc", "idle", "")])
    monkeypatch.setattr(sched_slurm, "slurm_command", lambda argv, **_: subprocess.CompletedProcess(
        argv, 0, next(text for what, text in said.items() if what in argv), ""))
    slurm = replace(make_spec(tmp_path, SLURM_TOML).config.slurm, options=options)
    for names in ("gpu", "gpu,cpu", "cpu,gpu"):  # a job may get any of them
        assert sched_slurm.share_of_gpu(replace(slurm, partition=names)) == share


@pytest.mark.parametrize(
    ("options", "memory"), [([], "5G"), (["--nice=1"], "5G"), (["--mem-per-cpu=4G"], "")]
)
def test_a_masters_own_options_say_its_memory_alone(tmp_path, monkeypatch, options, memory):
    monkeypatch.setattr(sched_slurm, "share_of_gpu", lambda slurm: (0, ""))
    monkeypatch.setattr(estimate, "held_bytes", lambda model, cores: 1e9)
    settings = make_spec(tmp_path, MINIMAL_TOML).config
    settings = replace(settings, slurm=replace(settings.slurm, master_options=options))
    assert submission.with_shares(settings, object()).slurm.master_mem == memory


@pytest.mark.slurm
def test_a_real_gpus_share_of_its_node(slurm_here, tmp_path):
    slurm = make_spec(tmp_path, TOML).config.slurm
    assert sched_slurm.share_of_gpu(slurm) == (16, "32768M")
    assert sched_slurm.share_of_gpu(replace(slurm, partition="cpu")) == (0, "")
    assert sched_slurm.share_of_gpu(replace(slurm, partition="nosuch")) == (0, "")


def test_a_run_keeps_the_version_that_it_was_submitted_with(tmp_path, monkeypatch):
    monkeypatch.delenv("ELASTIC_PYTHON", raising=False)
    mine, other = elastic_home(), tmp_path / "0.9"
    spec = make_spec(tmp_path, SLURM_TOML, environment={"ELASTIC_HOME": str(other)})
    assert (spec.home, _job_python(spec)) == (mine, sys.executable), "it is uninstalled"
    (other / "bin").mkdir(parents=True)
    (other / "bin/elastic").touch()
    assert (spec.home, _job_python(spec)) == (other, "")
    chosen = {"ELASTIC_HOME": str(other), "ELASTIC_PYTHON": "/opt/python"}
    assert _job_python(replace(spec, environment=chosen)) == "/opt/python"


def test_options_that_are_not_set_are_not_passed(tmp_path):
    spec = make_spec(
        tmp_path, "[run]\nscheduler = 'slurm'\n[slurm]\npartition = 'gpu'\n[train]\nepochs = 1\n"
    )
    assert sbatch_argv(spec, Path("/opt/elastic"), "python3")[10:-5] == [
        "--nodes=1", "--ntasks=1", "--partition=gpu", "--gres=gpu:1",
    ]


@pytest.mark.parametrize(
    ("version", "nodes"),
    [("slurm 23.02.1", "1,2,4"), ("slurm-wlm 24.11.0", "1,2,4"), ("slurm-wlm 22.05.8", "1-4"),
     ("Welcome to cluster 90.1\nslurm 22.05.8", "1-4")],
)
def test_a_list_of_sizes_goes_to_a_slurm_that_knows_lists(tmp_path, version, nodes):
    """With a pretended sbatch: no newer Slurm is to be had here."""
    script = f'[ "$1" = --version ] && echo "{version}" && exit; echo "$@" >&2; exit 255'
    environment = fake_command(tmp_path, "sbatch", script)
    more = "gpus_per_node = 8\n[elastic]\nmax = 40\n[sync]\nsizes = [8, 16, 32, 64]\n[train]"
    toml = MINIMAL_TOML.replace("[train]", more)
    spec = make_spec(tmp_path, toml, "trainer", 0, gpus=(6, 40), environment=environment)
    with pytest.raises(Refused) as refused:
        SlurmScheduler().submit(spec)
    assert f" --nodes={nodes} --no-kill " in refused.value.what


def test_nodes_that_slurm_does_not_take_back_are_try_again(tmp_path, monkeypatch):
    refuses = fake_command(tmp_path, "scontrol", "echo 'Job is not running' >&2; exit 1")
    monkeypatch.setenv("PATH", refuses["PATH"])
    with pytest.raises(TryAgain, match="scontrol failed: Job is not running"):
        sched_slurm.release_nodes("7", 2)


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("expected", "first", "last"),
    [
        (Refused, "invalid partition specified: x", "Invalid partition name specified"),
        (Refused, "", "Invalid account or account/partition combination specified"),
        (Refused, "", "Invalid qos specification"),
        (Refused, "", "Requested node configuration is not available"),
        (Refused, "", "Invalid generic resource (gres) specification"),
        (Refused, "QOSMaxGRESPerJob", POLICY),
        (RetryLater, "QOSMaxSubmitJobPerUserLimit", POLICY),
        (RetryLater, "AssocMaxSubmitJobLimit", POLICY),
        (RetryLater, "", "Required partition not available (inactive or drain)"),
        (RetryLater, "", "Requested partition configuration not available now"),
        (RetryLater, "AssocGrpSubmitJobsLimit", POLICY),
        (Refused, "You must specify an account (--account=NAME)", "Unspecified error"),
        (Refused, "Time limit specification required, but not provided", "Unspecified error"),
        (Refused, "", "Access/permission denied"),
    ],
)
def test_a_failed_submission_is_final_or_for_later(expected, first, last):
    lines = [f"sbatch: error: {first}"] if first else []
    lines += [f"sbatch: error: Batch job submission failed: {last}", ""]
    error = refusal(1, "\n".join(lines))
    assert type(error) is expected
    assert last in error.what
    assert first in error.what


@pytest.mark.parametrize("words", [
    "Socket timed out on send/recv operation", "Unexpected message received",
    "Unable to contact slurm controller (connect failure)", "exit status -11",
])
def test_a_command_without_an_answer_is_try_again_and_a_submission_unsure(tmp_path, words):
    says = f"echo 'sbatch: error: Batch job submission failed: {words}' >&2; exit 1"
    gone = fake_command(tmp_path, "sbatch", "kill -SEGV $$" if words.endswith("-11") else says)
    with pytest.raises(TryAgain, match=re.escape(words)):
        slurm_command(["sbatch"], environment=gone)
    with pytest.raises(TryAgain, match=re.escape(words)):
        SlurmScheduler().submit(make_spec(tmp_path, SLURM_TOML, environment=gone))


def test_a_bad_option_is_final_and_success_without_an_id_is_unsure():
    assert type(refusal(255, "sbatch: error: Invalid --time specification")) is Refused
    assert type(refusal(1, "sbatch: error: Unable to open file /x/worker.sbatch")) is Refused
    exclusive = "sbatch: fatal: --cpus-per-gpu and --cpus-per-task are mutually exclusive"
    assert type(refusal(1, exclusive)) is Refused
    assert type(refusal(0, "")) is TryAgain


BANNER = "Welcome to cluster 7!\\nYour project has 1200 hours left\\n"


@pytest.mark.parametrize(("said", "job_id"), [
    ("123\\n", "123"), ("123;west\\n", "123"), (BANNER + "123\\n", "123"),
    (BANNER + "123;west\\nSee https://site/123\\n", "123"), ("Submitted\\r\\n123\\r\\n", "123"),
])
def test_the_id_is_found_among_the_words_of_a_sites_own_sbatch(tmp_path, said, job_id):
    """It was lost: the run waited ten minutes for a job of which it had been told."""
    environment = fake_command(tmp_path, "sbatch", f"printf '{said}'")
    spec = make_spec(tmp_path, SLURM_TOML, environment=environment)
    assert SlurmScheduler().submit(spec) == job_id


NOT_ONE = ("", "Submitted batch job 123", "job 123;west", "job=123", "123\\n40")


@pytest.mark.parametrize("said", NOT_ONE)
def test_words_without_one_id_leave_a_submission_unsure(tmp_path, said):
    environment = fake_command(tmp_path, "sbatch", f"printf '{said}'")
    with pytest.raises(TryAgain):
        SlurmScheduler().submit(make_spec(tmp_path, SLURM_TOML, environment=environment))


def test_commands_lose_what_leaks_from_jobs_and_shapes_answers(tmp_path):
    kept = {"SLURM_CONF": os.devnull, "A": "b"} | fake_command(tmp_path, "squeue", "exec env")
    lost = ("SLURM_NTASKS", "SLURMD_NODENAME", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SCANCEL_STATE")
    said = slurm_command(["squeue"], environment=kept | dict.fromkeys(lost, "1")).stdout
    assert {line for line in said.splitlines() if not line.startswith(("SLURM_TIME", "PWD"))} == {
        "SQUEUE_ALL=1", *(f"{name}={value}" for name, value in kept.items())
    }


def test_commands_are_found_where_they_are_now_when_those_of_the_run_are_gone(
    tmp_path, monkeypatch
):
    """/opt/slurm/23.11/bin was in PATH, and the configuration in a node's cache."""
    monkeypatch.setenv("PATH", fake_command(tmp_path, "squeue", "exec env")["PATH"])
    gone = {"PATH": "/opt/slurm/23.11/bin", "SLURM_CONF": "/var/spool/slurmd/conf-cache/slurm.conf"}
    assert "SLURM_CONF" not in slurm_command(["squeue"], environment=gone).stdout


def fake_command(folder: Path, name: str, script: str) -> dict[str, str]:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_of_two_clusters_with_one_home_each_sees_to_its_own_runs(tmp_path, monkeypatch):
    """Both have /etc/slurm/slurm.conf. On the other one a run's jobs are not to be seen: taken to
    be gone, they were submitted again there."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path))
    path = fake_command(tmp_path, "squeue", f"echo asked >> {tmp_path}/asks")
    asks = tmp_path / "asks"
    settings = "data as of 1795680000\nClusterName = $(cat {0})\nSLURM_VERSION = 24.11.0"
    fake_command(tmp_path, "scontrol", f'echo "{settings.format(tmp_path / "here")}"')
    (tmp_path / "here").write_text("a")
    ours = SlurmScheduler(path | {"SLURM_CLUSTER_NAME": "a"})
    theirs = SlurmScheduler(path | {"SLURM_CLUSTER_NAME": "b"})
    of_before = SlurmScheduler(path)
    assert (ours.jobs(), of_before.jobs()) == ([], [])
    before = asks.read_text()
    with pytest.raises(Elsewhere, match="this is cluster a, and the run's jobs are on b"):
        theirs.jobs(within_s=30)
    assert asks.read_text() == before
    (tmp_path / "here").write_text("b")
    assert theirs.jobs() == []
    assert ours.jobs(within_s=30) == [], "an answer on a's jobs is one everywhere"


def test_a_command_that_hangs_is_try_again_after_its_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(sched_slurm, "COMMAND_TIMEOUT_S", 0.3)
    before = time.monotonic()
    with pytest.raises(TryAgain, match="squeue gave no answer in 0.3 s"):
        slurm_command(["squeue"], fake_command(tmp_path, "squeue", "exec sleep 30"))
    assert time.monotonic() - before < 5 * PATIENCE


def test_a_full_queue_of_which_sbatch_tells_while_it_waits_is_no_silence(tmp_path, monkeypatch):
    """At MaxJobCount it tries again for minutes; the slot waited ten for a job that never was."""
    monkeypatch.setattr(sched_slurm, "COMMAND_TIMEOUT_S", 1.0)
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    fake = fake_command(tmp_path, "sbatch", f"echo '{said}' >&2; exec sleep 30")
    with pytest.raises(RetryLater, match="temporarily unable to accept job"):
        slurm_command(["sbatch"], fake)


def test_a_notice_that_slurm_did_not_take_has_not_been_passed_on(tmp_path, monkeypatch):
    """A launcher told its ranks once, whatever came of that."""
    fake_command(tmp_path, "scancel", """
cd "$(dirname "$0")" && echo "$@" >> tries
case "$(wc -l < tries)" in
    1 | 2) echo "scancel: error: Socket timed out on send/recv operation" >&2 ;;
    *) echo "scancel: error: Job/step already completing or completed" >&2 ;;
esac
exit 1""")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ranks = Ranks([], None, 0.0, None, set())
    assert [ranks.tell() for _ in range(3)] == [False, False, True]
    assert (tmp_path / "tries").read_text() == 3 * "--signal=TERM 7\n"


def test_a_missing_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ElasticError, match="Command not found: squeue"):
        slurm_command(["squeue"], environment={"PATH": "/nonexistent"})


def test_a_failed_squeue_is_try_again_not_an_empty_queue(tmp_path):
    said = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    scheduler = SlurmScheduler(fake_command(tmp_path, "squeue", said))
    with pytest.raises(TryAgain, match="Unable to contact"):
        scheduler.jobs()


def test_who_looks_in_a_loop_shares_an_answer_until_something_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path))
    (tmp_path / "answer").write_text(SQUEUE)
    count = f"echo >>{tmp_path}/asked; cat {tmp_path}/answer"
    both = fake_command(tmp_path, "squeue", count) | fake_command(tmp_path, "sbatch", "echo 9")
    asked = [SlurmScheduler(both) for _ in range(3)]

    def questions() -> int:
        return len((tmp_path / "asked").read_text())

    everybody = asked[0].jobs()
    assert [each.jobs(within_s=30) for each in asked] == [everybody] * 3
    assert questions() == 1
    asked[1].jobs()  # cron wants to know
    assert questions() == 2
    assert SlurmScheduler(both | {"SLURM_CONF": "/other"}).jobs(within_s=30) == everybody
    assert questions() == 3
    asked[2].submit(make_spec(tmp_path, SLURM_TOML, environment=both))
    assert asked[0].jobs(within_s=30) == everybody
    assert questions() == 4
    assert asked[0].jobs(within_s=1e-9) == everybody
    assert questions() == 5
    os.utime(asked[0]._listing, (time.time() + 3600,) * 2)  # the clock was an hour ahead
    assert asked[0].jobs(within_s=30) == everybody
    assert questions() == 6


def test_a_slow_answer_of_before_does_not_hide_what_has_changed_since(tmp_path, monkeypatch):
    """Somebody had asked a busy controller: a job that had ended ran again, and its successor was
    cancelled."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path))
    for name in ("before", "after"):
        (tmp_path / name).write_text(SQUEUE.replace("RUNNING", "PREEMPTED" * (name == "after")))
    after = fake_command(tmp_path, "squeue", f"cat {tmp_path}/$ANSWER")
    fake_command(tmp_path, "scancel", "true")
    mine = SlurmScheduler(after | {"ANSWER": "after"})
    real = sched_slurm.ask

    def slow(*argv, **of):
        answer = real(*argv, **of)
        if of["environment"]["ANSWER"] == "before":
            meanwhile.pop()()
        return answer

    monkeypatch.setattr(sched_slurm, "ask", slow)
    seen, meanwhile = mine.jobs(), []
    for happens in (mine.jobs, lambda: mine.cancel("1")):
        meanwhile.append(happens)
        SlurmScheduler(after | {"ANSWER": "before"}).jobs()
        assert mine.jobs(within_s=30) == seen


def test_an_sbatch_that_answers_nothing_usable_leaves_it_unsure(tmp_path):
    spec = make_spec(tmp_path, SLURM_TOML, environment=fake_command(tmp_path, "sbatch", "echo ok"))
    with pytest.raises(TryAgain):
        SlurmScheduler().submit(spec)


# ---- on a private Slurm

# The agent says who it is and what it hears; it leaves with the code found in the file `leave`.
AGENT = """#!/bin/sh
role="$1" && shift  # elastic agent RUN_DIR SLOT, elastic master RUN_DIR
said="$1/agent-${2:-$role}"
gpus="$CUDA_VISIBLE_DEVICES"
trap 'echo TERM >>"$said"; exit 5' TERM
echo "start job=$ELASTIC_JOB_ID home=$ELASTIC_HOME gpus=$gpus tasks=$SLURM_NTASKS" >>"$said"
while :; do
    [ -e "$1/leave" ] && exit "$(cat "$1/leave")"
    sleep 0.1
done
"""
TOML = """
[run]
scheduler = "slurm"
[slurm]
partition = "preempt"
master_partition = "cpu"
gpus_per_worker = 2
cpus_per_gpu = 2
[elastic]
max = 8
[train]
epochs = 1
"""


class Stage:
    """A run directory, an installation with a pretended agent, and the scheduler under test."""

    def __init__(self, folder: Path, box):
        self.box = box
        self.run_dir = folder / 'it\'s 100% "mine"; really'
        (self.run_dir / "logs").mkdir(parents=True)
        self.home = folder / "home"
        (self.home / "bin").mkdir(parents=True)
        shutil.copytree(ROOT / "sbatch", self.home / "sbatch")
        (self.home / "bin/elastic").write_text(AGENT)
        (self.home / "bin/elastic").chmod(0o755)
        self.scheduler = SlurmScheduler()
        self.folder = folder

    def submit(self, toml: str = TOML, **fields) -> str:
        environment = dict(os.environ) | {"SLURM_NTASKS": "99", "SLURM_CPUS_PER_TASK": "7"}
        fields = {"run_dir": self.run_dir, "environment": environment} | fields
        return self.scheduler.submit(make_spec(self.folder, toml, **fields))

    def job(self, job_id: str) -> Job:
        def listed() -> list[Job]:
            return [job for job in self.scheduler.jobs() if job.job_id == job_id]

        return wait_until(listed, 20, f"Slurm tells of job {job_id}")[0]

    def said(self, who: object = 7) -> str:
        path = self.run_dir / f"agent-{who}"
        return path.read_text() if path.exists() else ""

    def started(self, job_id: str) -> None:
        wait_until(lambda: f"job={job_id} " in self.said(), 20, f"agent of job {job_id} starts")

    def ended(self, job_id: str) -> Job:
        wait_until(lambda: self.job(job_id).ended, 20, f"job {job_id} ends")
        return self.job(job_id)

    def exit_code(self, job_id: str) -> str:
        return self.box.run("scontrol", "show", "job", job_id).partition("ExitCode=")[2].split()[0]


@pytest.fixture
def make_stage(tmp_path, monkeypatch):
    def make(box) -> Stage:
        monkeypatch.setenv("SLURM_CONF", str(box.conf))
        stage = Stage(tmp_path, box)
        for module in (sched, sched_slurm):
            monkeypatch.setattr(module, "elastic_home", lambda: stage.home)
        return stage

    return make


@pytest.fixture
def stage(slurm_here, make_stage):
    stage = make_stage(slurm_here)
    yield stage
    slurm_here.run("scancel", f"--user={os.getuid()}")
    everywhere = {"n1", "n2", "n3", "n4", "c1"}
    wait_until(lambda: slurm_here.idle_nodes() == everywhere, 30, "the sandbox is idle again")


@pytest.fixture
def long_notice(stage):
    """So long that an agent of a busy machine, too, can write what it hears."""
    grace = ("scontrol", "update", "PartitionName=preempt")
    stage.box.run(*grace, "GraceTime=8")
    yield
    stage.box.run(*grace, "GraceTime=2")


@pytest.mark.slurm
def test_a_job_runs_the_agent_as_a_step_and_ends_with_its_code(stage):
    before = time.time()
    job_id = stage.submit()
    stage.started(job_id)
    job = stage.job(job_id)
    assert (job.run, *job.place, job.state, job.ended) == ("big", "worker", 7, "RUNNING", False)
    assert job.node in ("n1", "n2", "n3", "n4")
    assert before - 2 < job.submitted_at <= job.started_at < time.time() + 2
    assert stage.said() == f"start job={job_id} home={stage.home} gpus=0,1 tasks=1\n"

    twin = stage.submit()
    wait_until(lambda: stage.job(twin).reason == "Dependency", 10, "the second of a name waits")
    assert stage.job(twin).started_at is None
    stage.scheduler.cancel(twin)
    assert stage.ended(twin).state == "CANCELLED"

    stage.box.run("scancel", "--batch", "--signal=TERM", job_id)  # the shell survives a TERM
    time.sleep(0.5)
    (stage.run_dir / "leave").write_text("93")
    assert stage.ended(job_id).state == "FAILED"
    assert stage.exit_code(job_id) == "93:0"
    assert "Exited with exit code 93" in (stage.run_dir / "logs/worker-0007.log").read_text()


@pytest.mark.slurm
def test_a_master_runs_in_its_own_partition_without_gpus(stage):
    job_id = stage.submit(role="master", slot=0)
    wait_until(lambda: stage.said("master"), 20, "the master starts")
    assert stage.said("master") == f"start job={job_id} home={stage.home} gpus= tasks=1\n"
    assert stage.job(job_id).node == "c1"
    (stage.run_dir / "leave").write_text("0")
    assert stage.ended(job_id).state == "COMPLETED"


@pytest.mark.slurm
def test_a_run_knows_the_name_of_its_cluster(slurm_here, make_config, home):
    settings = make_config("run.scheduler=slurm", "slurm.partition=preempt")
    run = submission.start(settings, home / "runs")
    assert isinstance(sched.scheduler_of(run).jobs(), list)
    named = run.environment()
    assert named["SLURM_CLUSTER_NAME"] == sched_slurm.cluster()["ClusterName"]
    assert "SLURM_CLUSTER_NAME" not in clean_environment(named), "no job is given it"
    elsewhere = named | {"SLURM_CLUSTER_NAME": "another"}
    with pytest.raises(Elsewhere, match="the run's jobs are on another"):
        SlurmScheduler(elsewhere).jobs()


@pytest.mark.slurm
def test_cancel_gives_notice_to_the_agent_whose_code_comes_through(stage):
    job_id = stage.submit()
    stage.started(job_id)
    stage.scheduler.cancel(job_id)
    assert stage.ended(job_id).state == "FAILED"
    assert (stage.said().count("TERM"), stage.exit_code(job_id)) == (1, "5:0")
    for kill in (False, True):
        stage.scheduler.cancel(job_id, kill=kill)  # gone already: no error
        stage.scheduler.cancel("999999", kill=kill)


@pytest.mark.slurm
def test_cancel_now_ends_the_job_and_the_agent_still_hears_it(make_stage, new_sandbox):
    stage = make_stage(new_sandbox(nodes=1, settings=("KillWait=10",)))
    job_id = stage.submit()
    stage.started(job_id)
    stage.scheduler.cancel(job_id, kill=True)
    assert stage.ended(job_id).state == "CANCELLED"
    wait_until(lambda: "TERM" in stage.said(), 10, "the agent hears TERM")


@pytest.mark.slurm
@pytest.mark.usefixtures("long_notice")
def test_a_preempted_agent_has_notice_and_leaves_with_its_own_code(stage):
    job_id = stage.submit()
    stage.started(job_id)
    stage.box.preempt(nodes=4, seconds=1)
    end = (stage.ended(job_id).state, stage.exit_code(job_id))
    assert end in (("FAILED", "5:0"), ("PREEMPTED", "0:0"))  # before 24.05 it left by itself
    assert stage.said().count("TERM") == 1


@pytest.mark.slurm
@pytest.mark.usefixtures("long_notice")
def test_a_job_that_does_not_leave_in_its_notice_ends_preempted_and_is_not_requeued(stage):
    agent = stage.home / "bin/elastic"
    agent.write_text(AGENT.replace("; exit 5'", "'"))
    job_id = stage.submit()
    stage.started(job_id)
    stage.box.preempt(nodes=4, seconds=1)
    wait_until(lambda: stage.job(job_id).ended, 30, "the job is killed")
    assert stage.job(job_id).state == "PREEMPTED"
    assert "TERM" in stage.said()


@pytest.mark.slurm
@pytest.mark.parametrize("change", ['partition = "preempt"|partition = "nosuch"',
                                    "gpus_per_worker = 2|gpus_per_worker = 3",
                                    'cpus_per_gpu = 2|time = "soon"'])
def test_what_slurm_can_never_run_is_refused_and_does_not_wait(stage, change):
    with pytest.raises(Refused, match="sbatch: "):
        stage.submit(TOML.replace(*change.split("|")), slot=6)
    # Some refusals leave a record of a job that ended where it began (FAILED, BadConstraints).
    assert all(job.ended for job in stage.scheduler.jobs() if job.slot == 6)


@pytest.mark.slurm
def test_a_closed_partition_is_for_later(stage):
    stage.box.run("scontrol", "update", "PartitionName=preempt", "State=DRAIN")
    try:
        with pytest.raises(RetryLater):
            stage.submit()
    finally:
        stage.box.run("scontrol", "update", "PartitionName=preempt", "State=UP")


@pytest.mark.slurm
def test_while_the_controller_hangs_nothing_is_known_and_the_job_may_exist_afterwards(
    make_stage, new_sandbox
):
    stage = make_stage(new_sandbox(nodes=1, settings=("MessageTimeout=2",)))
    controller = int((stage.box.path / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        with pytest.raises(TryAgain, match="timed out"):
            stage.scheduler.jobs()
        with pytest.raises(TryAgain, match="timed out"):
            stage.submit()
        with pytest.raises(TryAgain):
            stage.scheduler.cancel("1", kill=True)
    finally:
        os.kill(controller, signal.SIGCONT)

    def ghost() -> list[Job]:
        return [job for job in stage.scheduler.jobs() if job.place == ("worker", 7)]

    assert len(wait_until(ghost, 20, "the job that sbatch had given up on")) >= 1


@pytest.mark.slurm
def test_spare_is_what_is_idle_while_nobody_else_waits(stage):
    spec = make_spec(stage.folder, TOML, run_dir=stage.run_dir, role="trainer", slot=0)

    def spare(most: int = 99) -> int:
        return wait_until(lambda: [stage.scheduler.spare_gpus(spec, most)], 20, "an answer")[0]

    assert (spare(), spare(most=3)) == (4, 3)
    stage.box.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        assert spare() == 3
        job_id = stage.submit()
        stage.started(job_id)
        waiting = stage.submit()  # of the run itself
        assert spare() == 2
        stage.box.run("sbatch", "--partition=preempt", "--hold", "--comment=of\ntwo lines",
                      "--output=/dev/null", "--wrap=true")
        assert spare() == 2
        stage.box.run("sbatch", "--partition=preempt", "--nodes=3", "--exclusive",
                      "--output=/dev/null", "--wrap=true")
        wait_until(lambda: spare() == 0, 30, "somebody else waits")
        stage.scheduler.cancel(waiting)
    finally:
        stage.box.run("scontrol", "update", "NodeName=n4", "State=RESUME")


@pytest.mark.parametrize(("options", "spare"), [
    ([], 5), (["--constraint=a"], 2), (["-C", "a"], 2), (["-Ca", "--nice"], 2),
    (["--cons=a", "--constraint=c,d"], 1), (["--constraint=c&d|a"], 3), (["-Ca|b&d"], 0),
    (["--constraint=a|c"], 4), (["--constraint=[a|c]"], 0), (["--constraint=a*2"], 0),
    (["--constraint=(a|c)&d"], 0), (["--constraint=x"], 0), (["--exclude=n[1-2]"], 3),
    (["-x", "n1"], 4), (["--reservation=mine"], 0), (["-w", "n1"], 0), (["--exclusive"], 5),
])
def test_spare_are_nodes_that_the_jobs_own_options_let_it_have(tmp_path, options, spare):
    """All idle nodes of the partition were: a job was started anew, again and again, for GPUs
    without the feature that it wants. Slurm reads a|d&c as (a|d)&c."""
    features = ("a", "a,b", "c,d", "c", "(null)")
    rows = [("gpu", f"n{i}", "", "", "idle", "gpu:2", of) for i, of in enumerate(features, 1)]
    listing = "\n".join(map("\x1f".join, rows))
    fake_command(tmp_path, "sinfo", f"echo '{listing}'")
    given = fake_command(tmp_path, "squeue", "true")
    spec = make_spec(tmp_path, MINIMAL_TOML, "trainer", 0)
    for partition, expected in (("gpu", spare), ("gpu,gpu2", 0)):  # of two a job has one
        slurm = replace(spec.config.slurm, options=options, partition=partition)
        spec = replace(spec, config=replace(spec.config, slurm=slurm))
        assert SlurmScheduler(given).spare_gpus(spec, 99) == expected


@pytest.mark.parametrize(("row", "spare"), [
    (("Resources", "{me}", "job", ""), 0), (("Priority", "{me}", "a/t0@elastic", ""), 1),
    (("Priority", "4711", "a/t0@elastic", ""), 0), (("Dependency", "4711", "job", ""), 1),
    (("JobHeldUser", "4711", "job", '{\n "project": 7\n}'), 1),
    (("Priority", "4711", "job", '{\n "project": 7\n}'), 0),
])
def test_another_users_elastic_waits_as_anybody_does(tmp_path, row, spare):
    """Its name made it one of our own: we took the nodes that it was waiting for."""
    listing = "\x1f".join(row).replace("{me}", str(os.getuid()))
    fake_command(tmp_path, "sinfo", "echo 'gpu\x1fn1\x1f\x1f\x1fidle\x1fgpu:2\x1fa'")
    rows = f"'Dependency\x1f1\x1fa\x1f' '{listing}'"
    given = fake_command(tmp_path, "squeue", rf"printf '%s\036\n' {rows}")
    spec = make_spec(tmp_path, MINIMAL_TOML, "trainer", 0)
    slurm = replace(spec.config.slurm, partition="gpu")
    spec = replace(spec, config=replace(spec.config, slurm=slurm))
    assert SlurmScheduler(given).spare_gpus(spec, 99) == spare


SAVING = ("SuspendProgram=/bin/true", "ResumeProgram=/bin/true", "SuspendTime=3600")


@pytest.mark.slurm
def test_nodes_that_are_reserved_or_powered_down_are_not_spare(new_sandbox, tmp_path, monkeypatch):
    box = new_sandbox(nodes=3, settings=SAVING)
    monkeypatch.setenv("SLURM_CONF", str(box.conf))
    spec = make_spec(tmp_path, TOML, role="trainer", slot=0)
    assert SlurmScheduler().spare_gpus(spec, 99) == 3
    box.run("scontrol", "create", "reservation", "ReservationName=repair", "Nodes=n3",
            "StartTime=now", "Duration=60", "Users=games", "Flags=IGNORE_JOBS")
    box.run("scontrol", "update", "NodeName=n2", "State=POWER_DOWN")
    wait_until(lambda: SlurmScheduler().spare_gpus(spec, 99) == 1, 30, "one is left")


@pytest.fixture
def private(new_sandbox, monkeypatch):
    """Start a sandbox of root's that other users may ask, who are not shown everything."""

    def start(*settings: str) -> None:
        box = new_sandbox(nodes=1, settings=settings)
        box.path.chmod(0o711)
        box.conf.chmod(0o644)
        monkeypatch.setenv("SLURM_CONF", str(box.conf))
        monkeypatch.setenv("ELASTIC_HOME_DIR", "/nonexistent")

    return start


of_users = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to whom all is shown")


@pytest.mark.slurm
@pytest.mark.root
@of_users
def test_jobs_in_a_hidden_partition_are_seen(private):
    """A run saw none of its own there, and submitted them again in every pass."""
    private("PartitionName=preempt Hidden=YES")

    def seen() -> list:
        options = ("--chdir=/", "--output=/dev/null", "--job-name=big/w1@elastic")
        told = slurm_command(("sbatch", *options, "--partition=preempt", "--wrap=true"))
        listed = SlurmScheduler().jobs()
        known = (sched_slurm.partitions(), {node.partition for node in sched_slurm.nodes()})
        return [told.returncode, len(listed), *("preempt" in names for names in known)]

    assert as_nobody(seen) == [0, 1, True, True]


@pytest.mark.slurm
@pytest.mark.root
@of_users
def test_where_nodes_are_shown_to_nobody_a_node_has_its_name(private, monkeypatch):
    """A master asked Slurm for its address, was refused and left, for ever."""
    private("PrivateData=nodes")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def seen() -> list:
        with pytest.raises(TryAgain) as hidden:
            sched_slurm.nodes()
        return [sched_slurm.node_address(), hidden.value.hint]

    assert as_nobody(seen) == ["n1", "this site shows it to nobody (PrivateData in slurm.conf)"]


def test_that_no_node_is_shown_does_not_mean_that_there_is_none(tmp_path):
    with pytest.raises(TryAgain, match="sinfo shows no node"):
        sched_slurm.nodes(fake_command(tmp_path, "sinfo", ""))


@pytest.mark.slurm
def test_a_job_whose_prolog_fails_is_told_from_one_that_was_cancelled(
    new_sandbox, tmp_path, monkeypatch
):
    (tmp_path / "prolog").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "prolog").chmod(0o755)
    box = new_sandbox(nodes=1, settings=(f"Prolog={tmp_path / 'prolog'}",))
    monkeypatch.setenv("SLURM_CONF", str(box.conf))
    stage = Stage(tmp_path, box)
    failed, waits = stage.submit(), stage.submit()
    ends = [stage.ended(failed)]
    box.run("scancel", waits)
    ends.append(stage.ended(waits))
    assert [job.state for job in ends] == ["CANCELLED"] * 2
    outcomes = [history.ending(job, None, time.time()).outcome for job in ends]
    assert outcomes == ["failed", "cancelled"]


@pytest.mark.slurm
def test_a_job_whose_reservation_is_gone_never_starts(stage):
    box = stage.box
    box.run("scontrol", "create", "reservation", "ReservationName=mine", "Nodes=n1",
            "StartTime=now", "Duration=60", f"Users={user_name()}")
    options = 'options = ["--reservation=mine", "--begin=now+1hour"]'
    job_id = stage.submit(TOML.replace("cpus_per_gpu = 2", options))
    box.run("scontrol", "update", "ReservationName=mine", "EndTime=now+2")
    wait_until(lambda: stage.job(job_id).state != "PENDING", 60, "the end of the reservation")
    job = stage.job(job_id)
    assert (job.queued, job.broken_hold) == (True, "Reservation mine was deleted")


@pytest.mark.slurm
def test_the_address_of_a_node_is_slurms_own(stage, monkeypatch):
    assert sched_slurm.node_address() == ""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert sched_slurm.node_address().startswith("127.")


@pytest.mark.slurm
def test_a_bare_environment_finds_slurm_by_that_of_the_run(stage, monkeypatch):
    job_id, run_environment = stage.submit(), dict(os.environ)
    with monkeypatch.context() as bare:
        bare.delenv("SLURM_CONF")
        bare.setenv("PATH", "/nonexistent")
        assert job_id in [job.job_id for job in SlurmScheduler(run_environment).jobs()]


@pytest.mark.parametrize("script", ["worker", "master"])
def test_batch_scripts_pass_shellcheck(script):
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck (apt-get install shellcheck)")
    subprocess.run(["shellcheck", ROOT / f"sbatch/{script}.sbatch"], check=True)
