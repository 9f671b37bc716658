"""The templates for any command, on a private Slurm: multi-node, single-node, and interactive.

pytest tests/whole/test_templates.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.lab.sandbox import Sandbox
from forks import NOBODY, USER
from helpers import ROOT, wait_until

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

PRINT = [sys.executable, str(ROOT / "tests" / "print_ranks.py")]


class Folder:
    """Where a user submits from; the installation is elsewhere."""

    def __init__(self, path: Path, box: Sandbox):
        self.path = path
        self.env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self.env |= {"ELASTIC_HOME": str(ROOT), "OMP_NUM_THREADS": "1", **box.environment()}

    def run(self, *argv: object, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(each) for each in argv], cwd=self.path, env=self.env | extra, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=240,
        )

    def submit(self, template: str, *options: str, command=PRINT, **extra: str) -> str:
        script = ROOT / "sbatch" / f"{template}.sbatch"
        done = self.run("sbatch", "--parsable", *options, script, *command, **extra)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def attach(self, job: str, *command: object, **extra: str) -> subprocess.CompletedProcess[str]:
        return self.run(ROOT / "sbatch" / "interactive.sh", job, *command, **extra)

    def of_job(self, job: str, key: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        found = re.search(rf"\b{key}=(\S*)", shown)
        return found[1] if found else ""

    def log(self, job: str) -> str:
        paths = list(self.path.glob(f"*-{job}.log"))
        return paths[0].read_text() if paths else ""

    def ranks(self, job: str) -> list[str]:
        """The rank logs of a job, in the default place."""
        paths = sorted(self.path.glob(f"runs/*-{job}/logs/ranks/rank-*.log"))
        return [path.read_text() for path in paths]

    def until_ended(self, job: str) -> str:
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_until(lambda: self.of_job(job, "JobState") in ended, 60, f"{job} ends")
        return self.of_job(job, "JobState")


@pytest.fixture
def folder(tmp_path: Path, slurm: Sandbox) -> Folder:
    return Folder(tmp_path, slurm)


def said(text: str, name: str) -> list[int]:
    return sorted(int(number) for number in re.findall(rf"\b{name}=(\d+)", text))


def test_several_nodes_train_obey_a_notice_come_back_and_stay_cancelled(tmp_path, new_sandbox):
    slurm = new_sandbox(nodes=2, grace_s=120)  # who leaves does so in time
    folder = Folder(tmp_path, slurm)
    shell = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "gone",
             "GLOO_SOCKET_IFNAME": "gone"}  # a rank's, as interactive.sh gives one
    options, stay = ("--nodes=2", "--gres=gpu:2"), [*PRINT, "stay"]
    job = folder.submit("multi-node", *options, command=stay, **shell)
    wait_until(lambda: "total=4" in folder.log(job), 60, "the ranks have met")
    wait_until(lambda: all("total" in log for log in folder.ranks(job)), 5, "all say so")
    logs = "".join(folder.ranks(job))
    assert said(logs, "RANK") == [0, 1, 2, 3]
    assert said(logs, "LOCAL_RANK") == [0, 0, 1, 1]
    assert set(re.findall(r"node=(\w+)", logs)) == {"n1", "n2"}
    assert "GLOO_SOCKET_IFNAME=lo" in logs
    assert said(folder.log(job), "RANK") == [0]  # who speaks for all

    inside = folder.attach(job, "printenv", "RANK", MASTER_PORT="1")
    assert (inside.returncode, sorted(inside.stdout.split())) == (0, ["0", "1", "2", "3"])
    one = folder.attach(job, "printenv", "WORLD_SIZE", NODES="1", RANKS_PER_NODE="1")
    assert (one.returncode, one.stdout) == (0, "1\n")

    preemptor = slurm.preempt(2, 3600)
    wait_until(lambda: "a notice was obeyed" in folder.log(job), 60, "the ranks leave")
    wait_until(lambda: folder.of_job(job, "Restarts") == "1", 30, "it is in the queue again")
    slurm.run("scancel", preemptor)
    assert sorted(re.findall(r"rank (\d) saves", folder.log(job))) == ["0", "1", "2", "3"]
    wait_until(lambda: folder.log(job).count("total=4") == 2, 60, "the ranks have met again")
    banners = re.findall(r"== .* job \d+ restart (\d) attempt (\d) ", folder.ranks(job)[3])
    assert banners == [("0", "1"), ("1", "2")]
    slurm.run("scancel", job)
    assert folder.until_ended(job) == "CANCELLED"
    assert folder.of_job(job, "Restarts") == "1"
    gone = folder.attach(job, "true")
    assert gone.returncode == 1
    assert f"error: job {job} has expired: it is CANCELLED\n  hint: " in gone.stderr


def test_who_has_nothing_to_save_may_leave_before_who_saves(tmp_path, new_sandbox):
    """The first of them ended the step: the one that saved was killed KillWait later."""
    slurm = new_sandbox(nodes=2, grace_s=60, settings=("WaitTime=2",))  # KillWait, too
    folder = Folder(tmp_path, slurm)
    save = ("trap '((RANK)) || sleep 6; echo rank $RANK has left >&2; exit' TERM; echo here >&2;"
            " while :; do sleep 0.1; done")
    job = folder.submit("multi-node", command=["bash", "-c", save])
    wait_until(lambda: folder.log(job).count("here") == 2, 60, "the ranks are there")
    slurm.preempt(2, 3600)
    wait_until(lambda: folder.of_job(job, "JobState") in ("PENDING", "FAILED"), 60, "they leave")
    assert folder.of_job(job, "Restarts") == "1"
    left = re.findall(r"rank (\d) has left", folder.log(job))  # each once for each TERM
    assert [*dict.fromkeys(left)] == ["1", "0"]
    assert "a notice was obeyed" in folder.log(job)


SAVES = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print("here", file=sys.stderr, flush=True)
while not heard:
    time.sleep(0.1)
time.sleep(4)
print("told and saved", len(heard), file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("launcher", ["", "; true"], ids=["", "launched"])
def test_a_program_saves_though_its_launcher_dies_of_the_notice(tmp_path, new_sandbox, launcher):
    """Its shell's end was taken for its own: the step ended, and the program in its save."""
    slurm = new_sandbox(nodes=1, grace_s=60)
    folder = Folder(tmp_path, slurm)
    (tmp_path / "train.py").write_text(SAVES)
    command = ["bash", "-c", f"{sys.executable} {tmp_path}/train.py{launcher}"]
    job = folder.submit("single-node", command=command)
    wait_until(lambda: "here" in folder.log(job), 60, "it trains")
    slurm.preempt(1, 3600)
    wait_until(lambda: folder.of_job(job, "JobState") in ("PENDING", "FAILED"), 60, "it leaves")
    assert "told and saved 1\n" in folder.log(job)
    assert "a notice was obeyed" in folder.log(job)


def test_a_rank_that_crashes_ends_the_others_and_the_job(folder):
    """They leave as on a notice, which is none: the job goes back to no queue."""
    crash = ("((RANK)) || { until [ -e there ]; do sleep 0.1; done; exit 3; }; "
             "trap 'exit 0' TERM; touch there; while :; do sleep 0.1; done")
    job = folder.submit("multi-node", command=["bash", "-c", crash])
    assert folder.until_ended(job) == "FAILED"
    # On a busy machine Slurm kills the other rank before it has left.
    assert folder.of_job(job, "ExitCode") in ("3:0", "137:0")
    assert not list(folder.path.rglob("noticed-*"))


def test_a_job_that_has_ended_with_0_is_not_run_again(folder):
    """Slurm 24.11 starts one again that has left on a notice before."""
    job = folder.submit("single-node", "--gres=gpu:1", command=["bash", "-c", "echo trained >&2"])
    assert folder.until_ended(job) == "COMPLETED"
    assert folder.run("scontrol", "requeue", job).returncode == 0
    wait_until(lambda: "nothing is left to do" in folder.log(job), 60, "it is started again")
    assert folder.until_ended(job) == "COMPLETED"
    assert (folder.of_job(job, "Restarts"), folder.log(job).count("trained")) == ("1", 1)


def test_a_notice_ends_a_job_for_good_that_wants_it(tmp_path, new_sandbox):
    slurm = new_sandbox(nodes=1, grace_s=120)
    folder = Folder(tmp_path, slurm)
    job = folder.submit(
        "multi-node", "--nodes=1", "--gres=gpu:1", command=[*PRINT, "stay"], ELASTIC_REQUEUE="0"
    )
    wait_until(lambda: "total=1" in folder.log(job), 60, "the rank is there")
    slurm.preempt(1, 1)
    wait_until(lambda: folder.of_job(job, "JobState") in ("FAILED", "PREEMPTED"), 60, "it ends")
    assert folder.of_job(job, "Restarts") == "0"
    assert "back to the queue" not in folder.log(job)


def test_a_task_of_an_array_obeys_a_notice_alone(folder, slurm):
    """The last one has the id of the array, by which it told all of them."""
    train = "trap 'exit 0' TERM; echo here; while :; do sleep 0.1; done"
    array = folder.submit("single-node", "--array=0-2", command=["bash", "-c", train])
    first, second, last = (f"{array}_{number}" for number in range(3))
    logs = "runs/*/logs/ranks/rank-000.log"
    try:
        wait_until(lambda: sum("here\n" in log.read_text() for log in folder.path.glob(logs)) == 3,
                   60, "all tasks are there")
        assert folder.of_job(last, "JobId") == array
        slurm.run("scancel", "--batch", "--signal=USR1", last)
        wait_until(lambda: folder.of_job(last, "Restarts") == "1", 60, "it is in the queue again")
        for task in (first, second):
            assert folder.of_job(task, "JobState") == "RUNNING"
            assert folder.of_job(task, "Restarts") == "0"
    finally:
        slurm.run("scancel", array)


def test_a_job_goes_back_although_the_controller_is_busy_and_an_older_one_had_its_id(folder, slurm):
    """Who had this id before has ended with 0; and `scontrol requeue` was tried once."""
    programs, tries = folder.path / "bin", folder.path / "tries"
    programs.mkdir()
    scontrol = shutil.which("scontrol", path=folder.env["PATH"])
    (programs / "scontrol").write_text(f"""#!/bin/sh
[ "$1" != requeue ] || echo again >> {tries}
[ "$1" != requeue ] || [ "$(wc -l < {tries})" -gt 1 ] || {{ echo "Socket timed out" >&2; exit 1; }}
exec {scontrol} "$@"
""")
    (programs / "scontrol").chmod(0o755)
    train = "trap 'exit 0' TERM; echo here >&2; while :; do sleep 0.1; done"
    job = folder.submit("single-node", "--hold", command=["bash", "-c", train],
                        PATH=f"{programs}:{folder.env['PATH']}")
    try:
        run = folder.path / "runs" / f"single-node-{job}"
        run.mkdir(parents=True)
        (run / f"over-{job}").touch()
        slurm.run("scontrol", "release", job)
        wait_until(lambda: "here" in folder.log(job), 60, "it trains")
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: folder.log(job).count("here") == 2, 60, "it trains again")
    finally:
        slurm.run("scancel", job)
    assert tries.read_text().split() == ["again"] * 2


def test_ranks_hear_of_a_notice_also_when_the_controller_was_busy(folder, slurm):
    """What its shell alone was told got to the ranks by one scancel, whatever came of that."""
    programs, tries = folder.path / "bin", folder.path / "tries"
    programs.mkdir()
    scancel = shutil.which("scancel", path=folder.env["PATH"])
    (programs / "scancel").write_text(f"""#!/bin/sh
echo again >> {tries}
[ "$(wc -l < {tries})" -gt 2 ] || {{ echo "Socket timed out" >&2; exit 1; }}
exec {scancel} "$@"
""")
    (programs / "scancel").chmod(0o755)
    job = folder.submit(
        "single-node", "--gres=gpu:1", command=[*PRINT, "stay"], ELASTIC_REQUEUE="0",
        PATH=f"{programs}:{folder.env['PATH']}",
    )
    try:
        wait_until(lambda: "total=1" in folder.log(job), 60, "the rank is there")
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: "rank 0 saves" in folder.log(job), 30, "the rank is told")
        assert tries.read_text().split() == ["again"] * 3  # and not once more
    finally:
        slurm.run("scancel", job)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_one_node_trains_under_srun_and_under_torchrun(folder, launcher):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    ours = {"LAUNCHER": launcher, "TORCHRUN": torchrun, "TMPDIR": str(folder.path)}
    job = folder.submit("single-node", "--gres=gpu:2", **ours)
    assert folder.until_ended(job) == "COMPLETED", folder.log(job)
    logs = "".join(folder.ranks(job))
    assert said(logs, "LOCAL_RANK") == [0, 1]
    assert logs.count("WORLD_SIZE=2") == logs.count("total=2") == 2


@pytest.mark.parametrize("asked", ["--gres=gpu:2", "--gpus-per-node=2", "--gpus=4"])
def test_gpus_may_be_asked_for_in_any_way(folder, asked):
    """The template's own --gres came on top: one rank a node, or none was started at all."""
    job = folder.submit("multi-node", "--nodes=2", asked)
    assert folder.until_ended(job) == "COMPLETED", folder.log(job)
    logs = "".join(folder.ranks(job))
    assert said(logs, "RANK") == [0, 1, 2, 3]
    assert logs.count("total=4") == 4


def test_a_layout_that_is_not_one_rank_per_gpu_ends_with_the_way_out(folder):
    wrong = folder.submit("multi-node", "--gres=gpu:2", "--ntasks-per-node=1", command=["true"])
    uneven = folder.submit("multi-node", "--gpus=3", command=["true"])
    nothing = folder.submit("single-node", command=[])
    assert {folder.until_ended(job) for job in (wrong, uneven, nothing)} == {"FAILED"}
    assert "error: 1 tasks per node, 2 GPUs per node" in folder.log(wrong)
    assert re.search("error: node n[1-4]: [12] ranks, [12] GPUs", folder.log(uneven))
    assert "usage: " in folder.log(nothing)


def test_nodes_need_not_have_as_many_cores_as_the_first(folder):
    """Slurm refused the step: "More processors requested than permitted"."""
    options = ("--ntasks=3", "--cpus-per-task=4", "--gres=none")  # 8 cores here, 4 there
    job = folder.submit("multi-node", *options, command=["printenv", "SLURM_CPUS_PER_TASK"])
    assert folder.until_ended(job) == "COMPLETED", folder.log(job)
    assert [log.split()[-1] for log in folder.ranks(job)] == ["4", "4"]


def test_a_job_that_is_submitted_inside_of_another_has_its_own_gpus_and_memory(folder):
    """sbatch hands on what salloc has set; srun asked for that, of a job that has less."""
    outer = {"SLURM_GPUS": "2", "SLURM_GPUS_PER_NODE": "2", "SLURM_MEM_PER_CPU": "100"}
    command = ["printenv", "SLURM_GPUS_ON_NODE"]
    job = folder.submit("single-node", "--gres=gpu:1", "--mem=200M", command=command, **outer)
    assert folder.until_ended(job) == "COMPLETED", folder.log(job)
    assert folder.ranks(job)[0].split()[-1] == "1"


def test_what_is_no_job_of_mine_is_said_plainly(folder, slurm):
    unknown = folder.attach("99999", "true")
    assert unknown.stderr.startswith("error: no job 99999: ")
    assert folder.attach("here", "true").returncode == 2
    held = folder.submit("single-node", "--hold", command=["true"])
    pending = folder.attach(held, "true")
    assert pending.stderr.startswith(f"error: job {held} has not started\n")
    slurm.run("scancel", held)
    programs = folder.path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text("#!/bin/sh\necho '54321 RUNNING 1 n1'\n")
    (programs / "squeue").chmod(0o755)
    others = folder.attach("7", "true", PATH=f"{programs}:{folder.env['PATH']}")
    assert others.stderr.startswith("error: job 7 is not yours but uid 54321's\n")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to submit as another user")
def test_the_name_of_another_users_job_says_nothing(folder, slurm):
    """It was read for fields of the job; this one ran a command as who attached to it."""
    proof = folder.path / "PWNED"
    name = (f"x UserId=root({os.getuid()}) JobState=RUNNING"
            f" NumNodes=BASH_VERSINFO[$(touch {proof})] NumCPUs=1 NodeList=n1")
    hostile = (f"--uid={USER}", "--hold", "--chdir=/", "--job-name", name, "--wrap=true")
    job = slurm.run("sbatch", "--parsable", *hostile).strip()
    try:
        steered = {"SQUEUE_FORMAT": "%j", "SQUEUE_FORMAT2": "Name", "SQUEUE_USERS": "root"}
        for extra in ({}, steered):
            refused = folder.attach(job, "true", **extra)
            assert refused.stderr.startswith(f"error: job {job} is not yours but uid {NOBODY}'s\n")
    finally:
        slurm.run("scancel", job)
    assert not proof.exists()
