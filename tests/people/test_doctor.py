"""elastic-doctor on a private Slurm: silent when that is good, and naming whatever is planted.

One sandbox is for all tests here: what they plant in its slurm.conf is taken out again. Slow probes
that a test is not about are left out (`quick`). pytest tests/people/test_doctor.py
"""

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.base import network
from elastic.commands.main import elastic as commands
from elastic.lab.sandbox import Sandbox
from elastic.people import doctor, tryout
from elastic.run.estimate import Save
from forks import as_nobody
from helpers import PATIENCE, ROOT, elastic, environment, short_folder, wait_until

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

SITE = '[slurm]\npartition = "preempt"\nmaster_partition = "cpu"\n'
TORCH = {"python": "3.11", "version": "2.6", "import_s": 1.0, "gpus": 0, "problems": [],
         "unfit": False}
REAL_REDIS = doctor.PROBES["redis"]
SLOW = "faster filesystem"  # what this machine is told while it is busy
CRON = "*/2 * * * * /opt/elastic/bin/elastic-reconcile\n"


@pytest.fixture
def site(slurm_here, home, monkeypatch) -> Path:
    """A site file for the sandbox, which this process uses; a crontab that is as it should be."""
    path = home / "site.toml"
    path.write_text(SITE)
    monkeypatch.setenv("ELASTIC_SITE", str(path))
    set_crontab(home, f"echo '{CRON}'")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "lib"))  # for the children that load torch
    return path


@pytest.fixture
def quick(site, monkeypatch) -> None:
    """Look at this machine's torch, Redis and disk only as far as that is fast."""
    for name, fact in (("torch", TORCH), ("redis", "not asked")):
        monkeypatch.setitem(doctor.PROBES, name, partial(lambda fact: fact, fact))
    monkeypatch.setattr(doctor, "written_per_s", lambda _: 1e9)  # this disk's may be anything


@pytest.fixture
def plant(slurm) -> Iterator[Callable[..., None]]:
    """plant((pattern, replacement), ...): change slurm.conf until the test's end."""
    good = slurm.conf.read_text()

    def change(*changes: tuple[str, str]) -> None:
        text = good
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text, flags=re.M)
            assert count, pattern
        reload(slurm, text)

    yield change
    reload(slurm, good)


def reload(box: Sandbox, text: str) -> None:
    box.conf.write_text(text)
    box.run("scontrol", "reconfigure")
    wait_until(lambda: len(box.idle_nodes()) == 5, 20, "all nodes are idle")


def set_crontab(home: Path, script: str) -> None:
    """A `crontab` before that of the machine, which is not for tests to change."""
    path = home / "bin/crontab"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def bad(*overrides: str, path: Path | None = None) -> dict[str, tuple[str, str]]:
    """What is WARN or FAIL, and what was seen there."""
    checks = doctor.report(path, overrides)["checks"]
    return {each["check"]: (each["verdict"], each["seen"]) for each in checks
            if each["verdict"] in ("WARN", "FAIL")}


def asked(*args: object, code: int = 0, **environ: str) -> dict[str, dict]:
    """What bin/elastic-doctor says as JSON, by check."""
    mine = {name: os.environ[name] for name in ("SLURM_CONF", "ELASTIC_SITE", "ELASTIC_RUNS")}
    env = environment(Path(mine["ELASTIC_RUNS"]).parent, **mine | environ)
    answer = elastic("doctor", *args, "--json", env=env)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return {each["check"]: each for each in json.loads(answer.stdout)["checks"]}


# ---- a good cluster


def test_it_is_silent_on_a_good_cluster_and_leaves_nothing_behind(site, home):
    (home / "tmp").mkdir()
    found = asked(ROOT / "etc/demo.toml", "--set", "run.scheduler=slurm", TMPDIR=str(home / "tmp"))
    notice = found["notice"]["seen"]
    for name in ("run folder", "torch", "notice"):
        if found[name]["verdict"] == "WARN" and SLOW in found[name]["fix"]:
            del found[name]
    assert {name: each["seen"] for name, each in found.items()
            if each["verdict"] in ("WARN", "FAIL")} == {}
    skipped = {name for name, each in found.items() if each["verdict"] == "SKIP"}
    assert skipped <= {"limits", "gpus"}
    weighed = r"2 s .*; a save takes \S+ s \(\S+ s for what counts\): [\d.]+ MB at .*B/s"
    assert re.fullmatch(weighed, notice)
    assert re.fullmatch(r"\d+\.\d+, \S+, over TLS", found["redis"]["seen"])
    assert not list((home / "tmp").glob("*elastic-doctor*"))
    assert not (home / "runs").exists()
    assert not list(home.glob(".elastic-doctor*"))


def test_its_screen_fits_80_columns(quick, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer = CliRunner().invoke(commands, ["doctor"])
    assert answer.exit_code == 0, answer.output
    assert max(map(len, answer.output.splitlines())) <= 80
    assert re.search(r"^OK    preemption  +preempt: REQUEUE \(preempt/part", answer.output, re.M)
    assert re.search(r"\n15 checks: \d+ OK, \d+ SKIP\n", answer.output)


def test_on_the_local_scheduler_no_slurm_is_asked(quick, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    assert bad("run.scheduler=local") == {}


# ---- Slurm as it should not be


@pytest.mark.parametrize(("changes", "overrides", "expected"), [
    ([("^(PartitionName=preempt .*)REQUEUE", r"\1CANCEL")], [],
     {"preemption": ("WARN", "preempt: CANCEL (preempt/partition_prio)")}),
    ([("^(PartitionName=preempt .*)REQUEUE", r"\1OFF")], [],
     {"preemption": ("WARN", "preempt: OFF (preempt/partition_prio)")}),
    ([("^(PartitionName=preempt .*)", r"\1 MaxTime=10")], ["slurm.time=1:00:00"],
     {"time limit": ("FAIL", "preempt: MaxTime=00:10:00, slurm.time = 1:00:00; "
                             "cpu: MaxTime=UNLIMITED")}),
    ([("^(PartitionName=cpu .*)", r"\1 State=DOWN")], [],
     {"master partition": ("FAIL", "cpu: DOWN")}),
    ([], ["slurm.partition=cpu"],
     {"partition": ("FAIL", "cpu: UP, 1 node, 0 GPUs; no node with gpu:1"),
      "preemption": ("WARN", "cpu: OFF (preempt/partition_prio)")}),
    ([], ["slurm.partition=nosuch"], {"partition": ("FAIL", "no partition nosuch")}),
    ([], ["slurm.gpus_per_worker=4", "elastic.max=4"],
     {"partition": ("FAIL", "preempt: UP, 4 nodes, 8 GPUs; no node with gpu:4")}),
    ([], ["redis.bind=nosuch0"],
     {"interface": ("FAIL", "redis.bind = 'nosuch0' is no IPv4 address and no interface here")}),
])
def test_what_is_planted_is_named_and_nothing_else(quick, plant, changes, overrides, expected):
    if changes:
        plant(*changes)
    assert bad(*overrides) == expected


def test_a_requeue_delay_is_named(quick, plant):
    plant((r",cred_expire=\d+", ",cred_expire=120"))
    habits = {each["check"]: each["seen"] for each in doctor.report(None, [])["checks"]}["habits"]
    assert "a requeued job waits for 121 s" in habits


def test_a_grace_time_that_is_shorter_than_the_save_is_named(quick, monkeypatch):
    monkeypatch.setitem(doctor.PROBES, "save", lambda: Save(60e9, 60e9))
    ((name, (verdict, seen)),) = bad().items()
    assert (name, verdict) == ("notice", "FAIL")
    notice = r"2 s \(GraceTime=2, KillWait=2\)"
    assert re.fullmatch(rf"{notice}; a save takes \S+ s: 60 GB at .*B/s", seen)


def test_no_slurm_is_one_fail_and_the_rest_is_seen_all_the_same(quick, site, monkeypatch):
    monkeypatch.setenv("PATH", str(site.parent / "bin"))
    assert bad() == {"slurm": ("FAIL", "Command not found: scontrol")}


def test_a_slurm_that_does_not_answer_is_named(quick, home, monkeypatch):
    (home / "slurm.conf").write_text("Nonsense=1\n")
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    ((verdict, seen),) = bad().values()
    assert verdict == "FAIL"
    assert seen.startswith("scontrol failed: ")


def test_submit_limits_of_account_and_qos_are_named(new_sandbox, home, quick, monkeypatch):
    tracks = ("AccountingStorageEnforce=limits", "AccountingStorageTRES=gres/gpu")
    with tempfile.NamedTemporaryFile(prefix="#sql-temptable-", dir="/tmp") as others:
        box = new_sandbox(nodes=1, accounting=True, settings=tracks)
        assert Path(others.name).exists()  # MariaDB's start removes tables of this name
    monkeypatch.setenv("SLURM_CONF", str(box.conf))
    user = pwd.getpwuid(os.getuid()).pw_name
    limit = ["slurm.account=lab", "elastic.max=2"]
    unknown = {each["check"]: each for each in doctor.report(None, limit)["checks"]}["limits"]
    assert unknown["verdict"] == "SKIP"
    assert f"accounting does not know {user} in account lab" in unknown["seen"]
    box.run("sacctmgr", "-i", "add", "account", "lab")
    box.run("sacctmgr", "-i", "add", "user", user, "account=lab")
    assert bad(*limit) == {}
    box.run("sacctmgr", "-i", "modify", "user", user, "set", "MaxSubmitJobs=2")
    seen = "MaxSubmit of the account lab is 2, the run has up to 3 jobs"
    assert bad(*limit) == {"limits": ("WARN", seen)}
    box.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=1")
    seen = "MaxSubmitPU of the QOS normal is 1, the run has up to 3 jobs"
    assert bad(*limit) == {"limits": ("FAIL", seen)}
    few = ("MaxSubmitJobsPerUser=-1", "MaxTRESPerUser=cpu=9,gres/gpu=1")
    box.run("sacctmgr", "-i", "modify", "qos", "normal", "set", *few)
    seen = "MaxTRESPU of the QOS normal is 1, the run has up to 2 GPUs"
    assert bad(*limit) == {"limits": ("WARN", seen)}
    box.run("sacctmgr", "-i", "modify", "user", user, "set", "GrpTRES=gres/gpu=0")
    seen = "GrpTRES of the account lab is 0, the run has up to 2 GPUs"
    assert bad(*limit) == {"limits": ("FAIL", seen)}


# ---- a job that is tried


def trying(*overrides: str) -> dict[str, tuple[str, str]]:
    """What is said of a job that was tried; it and its folder are gone."""
    checks = doctor.report(None, overrides, more=[("tried", tryout.tried)])["checks"]
    assert not [*Path(os.environ["ELASTIC_RUNS"]).parent.glob("*elastic-try*")]
    return {each["check"]: (each["verdict"], each["seen"]) for each in checks
            if each["check"].startswith("try ")}


def jobs(box: Sandbox) -> list[str]:
    """The jobs that have not ended."""
    return box.run("squeue", "--noheader", "--format=%j %T").splitlines()


AFTER = r"[\d.]+ s"
GOOD = {
    "try job": rf"2 nodes after {AFTER}, their ranks {AFTER} later",
    "try ranks": r"n1 \(hostname \S+\): \d+ cores, .* of memory, GPUs 0,1; n2 \(.*\): .*, GPUs 0,1",
    "try train": r"4 of 4 ranks train together: \d+ ms a step on cpu",
    "try files": rf"4 of 4 ranks see a file after {AFTER}; 3 of 3 find one locked",
    "try kill": rf"srun tells 1 of 1 death within {AFTER}; steps end in {AFTER}",
    "try notice": rf"3 of 3 ranks hear TERM within {AFTER}; srun and batch script live on;"
                  rf" 4 of 4 that train save their last step within {AFTER}",
    "try shrink": rf"a step on one node took {AFTER}",
}


def test_a_good_cluster_does_to_a_job_what_is_expected(site, home, slurm):
    found = asked("--try", "--set", "slurm.gpus_per_node=2", "--set", 'train.precision="bf16"')
    for name, words in GOOD.items():
        assert (found[name]["verdict"], found[name]["fix"]) == ("OK", ""), found[name]
        assert re.fullmatch(words, found[name]["seen"])
    assert jobs(slurm) == []
    assert not (home / "runs").exists()
    assert not list(home.glob("elastic-try-*"))


def test_it_tries_nothing_without_being_asked(quick, slurm):
    before = slurm.run("squeue", "--states=all", "--noheader", "--format=%i")
    assert not {*GOOD} & {each["check"] for each in doctor.report(None, [])["checks"]}
    assert slurm.run("squeue", "--states=all", "--noheader", "--format=%i") == before


def test_slurm_s_words_are_shown_where_it_refuses(new_sandbox, quick, home, monkeypatch):
    rules = home / "rules.lua"
    rules.write_text('''
function slurm_job_submit(job, partitions, uid)
   slurm.log_user("ask the helpdesk for an account")
   return slurm.ERROR
end
function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
''')
    monkeypatch.setenv("SLURM_CONF", str(new_sandbox(nodes=2, job_submit=rules).conf))
    ((name, (verdict, seen)),) = trying().items()
    assert (name, verdict) == ("try job", "FAIL")
    assert seen.startswith("sbatch: ask the helpdesk for an account; Batch job submission failed")


def test_ranks_that_see_one_gpu_each_and_a_slurm_that_takes_no_node_back_are_named(
    quick, plant, forgetful, home, monkeypatch
):
    """And ranks that cannot train. A long KillWait delays nothing."""
    plant(("^KillWait=.*", "KillWait=60"), (r"^(SchedulerParameters=.*)", r"\1,disable_job_shrink"))
    (home / "torch.py").write_text("raise ImportError('planted')\n")
    monkeypatch.setenv("PYTHONPATH", f"{home}:{ROOT / 'lib'}")
    found = trying("slurm.gpus_per_node=2", 'slurm.srun_options=["--gpus-per-task=1"]')
    assert found.keys() == GOOD.keys()
    verdict, seen = found.pop("try ranks")
    assert verdict == "FAIL"
    assert re.fullmatch(r"n1 \(.*, GPUs \d; n2 \(.*, GPUs \d", seen)
    assert float(re.search(r"steps end in ([\d.]+) s", found.pop("try kill")[1])[1]) < 30
    verdict, seen = found.pop("try train")
    assert (verdict, "ImportError: planted" in seen) == ("FAIL", True), seen
    verdict, seen = found.pop("try shrink")
    assert (verdict, "scontrol failed: " in seen) == ("WARN", True), seen
    assert {verdict for verdict, _ in found.values()} == {"OK"}


@pytest.fixture
def forgetful(site, home) -> None:
    """As with a short MinJobAge: a job is gone from squeue before anybody has seen its end."""
    squeue, real = home / "bin/squeue", shutil.which("squeue")
    squeue.write_text(f"""#!/bin/bash
exec {real} "${{@/--states=all/--states=PENDING,RUNNING,COMPLETING}}"
""")
    squeue.chmod(0o755)


def test_ranks_that_do_not_start_are_shown_with_what_was_said(quick):
    ((verdict, seen),) = trying('slurm.rank_prefix=["nosuch"]').values()
    assert verdict == "FAIL"
    assert seen.startswith("it is FAILED: 0 of 4 ranks started: ")
    assert "exec: nosuch: not found" in seen


def test_a_job_that_does_not_start_is_cancelled(quick, slurm, monkeypatch):
    monkeypatch.setattr(tryout, "LIMIT_S", 2.0)
    others = slurm.preempt(3, 600)
    try:
        wait_until(lambda: len(slurm.idle_nodes()) == 2, 20, "one node of four is free")
        ((verdict, seen),) = trying().values()
        assert (verdict, jobs(slurm)) == ("SKIP", ["preemptor RUNNING"])
        assert re.fullmatch(r"job \d+ is PENDING \((Resources|Priority)\) after 0 minutes", seen)
    finally:
        slurm.run("scancel", others)
        wait_until(lambda: len(slurm.idle_nodes()) == 5, 20, "all nodes are idle")


def test_a_job_that_slurm_forgets_at_once_is_not_waited_for(quick, forgetful):
    ((verdict, seen),) = trying('slurm.rank_prefix=["nosuch"]').values()
    assert (verdict, seen[:34]) == ("FAIL", "it is gone: 0 of 4 ranks started: ")


def test_who_interrupts_it_leaves_no_job_behind(site, home, slurm):
    command = [str(ROOT / "bin/elastic-doctor"), "--try", "--set", "redis.server=/bin/true"]
    own = {name: os.environ[name] for name in ("SLURM_CONF", "ELASTIC_SITE", "PATH")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # A shell makes what it starts in the background deaf to Ctrl-C, and so are these tests there.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    doing = subprocess.Popen(command, env=environment(home, **own), preexec_fn=hears, **quiet)
    wait_until(lambda: [job for job in jobs(slurm) if job.endswith("RUNNING")], 20, "the job runs")
    doing.send_signal(signal.SIGINT)
    _, said = doing.communicate(timeout=60 * PATIENCE)
    assert (doing.returncode, "Aborted!" in said) == (1, True), said
    assert (jobs(slurm), list(home.glob("elastic-try-*"))) == ([], [])


# ---- this machine as it should not be


def test_clocks_that_differ_are_named(site, home):
    offset = home / "offset"
    offset.write_text("-45")
    skewed = {"PYTHONPATH": str(ROOT / "tests/skewed"), "FAKETIME_TIMESTAMP_FILE": str(offset)}
    clock = asked(code=1, **skewed)["clock"]
    assert clock["verdict"] == "FAIL"
    offsets = dict(re.findall(r"([a-z ]+) \+(\d+)\.\d s", clock["seen"].replace(", ", ",")))
    # Less by what passes between the two looks; by how much, depends on how busy this machine is.
    assert {name: 30 < int(off) <= 45 for name, off in offsets.items()} == {
        "slurmctld": True, "run folder": True}


def test_no_redis_server_is_named(quick, site, monkeypatch):
    monkeypatch.setitem(doctor.PROBES, "redis", REAL_REDIS)
    bare = site.parent / "bin"
    for name in ("scontrol", "sinfo", "sacctmgr"):
        (bare / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(bare))
    ((name, (verdict, seen)),) = bad().items()
    assert (name, verdict) == ("redis", "FAIL")
    assert seen.startswith("no redis-server (6.0 or newer)")


def test_a_redis_server_that_does_not_start_is_named(quick, site, monkeypatch):
    monkeypatch.setitem(doctor.PROBES, "redis", REAL_REDIS)
    broken = site.parent / "redis-server"
    broken.write_text('#!/bin/sh\necho "Redis server v=7.0.0 sha=0"\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    ((name, (verdict, seen)),) = bad(f"redis.server={broken}").items()
    assert (name, verdict) == ("redis", "FAIL")
    assert "did not start" in seen


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_folder_that_cannot_be_written_is_named(quick, monkeypatch):
    with short_folder() as folder:
        monkeypatch.setenv("ELASTIC_RUNS", str(folder))
        monkeypatch.setenv("ELASTIC_SITE", os.devnull)
        found = as_nobody(lambda: doctor.report(None, ["run.scheduler=local"])["checks"])
    failed = {each["check"]: each["seen"] for each in found if each["verdict"] == "FAIL"}
    assert failed == {"run folder": f"cannot write to {folder}: Permission denied"}


def test_a_filesystem_without_links_is_named(quick, monkeypatch):
    """None is at hand: os.link answers as one would (FAT, some object stores)."""

    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    verdict, seen = bad()["run folder"]
    assert (verdict, "link or fsync: Operation not supported" in seen) == ("FAIL", True)


def test_a_full_disk_is_named(quick):
    verdict, seen = bad("checkpoint.min_free=1000000tb")["run folder"]
    assert (verdict, "; no space on" in seen) == ("FAIL", True)


def test_a_python_without_torch_is_named(quick, monkeypatch):
    monkeypatch.setitem(doctor.PROBES, "torch", doctor._torch)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert bad() == {"torch": ("FAIL", "exit 1")}


def test_a_python_that_greets_is_heard(tmp_path, monkeypatch):
    """A site's sitecustomize prints a line: torch was not known."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho welcome\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "lib"))
    assert "version" in doctor._torch()


def test_a_crontab_without_the_line_is_named(quick, site):
    set_crontab(site.parent, "echo no crontab for me >&2; exit 1")
    assert bad() == {"cron": ("WARN", "elastic-reconcile is not in the crontab")}


def test_nodes_that_may_not_submit_make_the_crontab_necessary(quick, site, plant):
    plant(("^(PartitionName=preempt .*)", r"\1 AllocNodes=localhost"))
    assert bad() == {}
    set_crontab(site.parent, "echo no crontab for me >&2; exit 1")
    ((name, (verdict, seen)),) = bad().items()
    assert (name, verdict) == ("cron", "FAIL")
    assert seen.endswith(", and only localhost may submit jobs (AllocNodes)")


@pytest.mark.parametrize(("model", "words"), [
    ("raise KeyError('weights')", "KeyError: 'weights'"),
    ("print('loading'); return __import__('torch').nn.Linear(1000, 1000)", ": 9.02 MB at"),
])
def test_a_task_may_print_or_fail_all_the_same(quick, home, model, words):
    (home / "mine.py").write_text(
        f"class Mine:\n    def __init__(self, config): ...\n    def model(self): {model}\n"
        "    def dataset(self): ...\n    def loss(self, model, batch): ...\n")
    (home / "mine.toml").write_text('[run]\ntask = "mine:Mine"\n[train]\nepochs = 1\n')
    checks = doctor.report(home / "mine.toml", [])["checks"]
    found = {each["check"]: each for each in checks}
    assert found["notice"]["verdict"] == "OK"
    assert words in found["notice"]["seen"]


def test_an_interface_is_up_or_not():
    assert network.is_up("lo")
    assert not network.is_up("nosuch0")


def test_the_type_of_a_filesystem_is_that_of_the_innermost_mount():
    assert doctor.filesystem_of(Path("/proc/self")) == "proc"
    assert doctor.filesystem_of(Path("/")) not in ("proc", "unknown")


def test_partitions_whose_nodes_nobody_is_shown_are_not_judged(quick, site):
    hidden = "#!/bin/sh\necho 'slurm_load_node: Access/permission denied' >&2; exit 1\n"
    (site.parent / "bin/sinfo").write_text(hidden)
    (site.parent / "bin/sinfo").chmod(0o755)
    checks = doctor.report(None, ["slurm.partition=preempt"])["checks"]
    (found,) = [each for each in checks if each["check"] == "partition"]
    assert (found["verdict"], "PrivateData" in found["fix"]) == ("SKIP", True)
