"""The private Slurm itself: up, faults, down without a trace; as root and as an ordinary user."""

import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.base import network
from elastic.base.errors import ElasticError, UsageError
from elastic.commands.main import elastic
from elastic.lab import sandbox
from elastic.lab.sandbox import Sandbox, Shape
from forks import NOBODY, USER
from helpers import PATIENCE, ROOT, short_folder, wait_until
from running import command_line
from slurm_sandbox import MORE_PACKAGES, Site

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

COMMAND = str(ROOT / "bin/elastic-sandbox")
BARE = {"PATH": "/usr/bin:/bin", "ELASTIC_PYTHON": sys.executable}  # what cron gives
# A job whose orphans nothing in Slurm finds: no parent, no session, no environment.
ORPHANS = "srun sh -c '(setsid sleep {0} &); (setsid env -i sleep {0} &); sleep {0}'"


def elastic_sandbox(*args: object, **options) -> str:
    done = subprocess.run(
        [COMMAND, *map(str, args)], env=BARE, capture_output=True, text=True,
        timeout=60 * PATIENCE, **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sleepers(seconds: str) -> list[str]:
    """The command lines of live `sleep SECONDS`."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [line for line in map(command_line, pids) if line == f"sleep {seconds} "]


def test_no_other_daemon_draws_the_port_of_slurmdbd(tmp_path):
    site = Site(tmp_path, accounting=True, job_submit=None, stale=None)
    port = re.search(r"AccountingStoragePort=(\d+)", " ".join(site.settings()))[1]
    assert int(port) not in network.free_ports("", len(network.PORTS))


def run_orphans(box: Sandbox, node: str, job: str = ORPHANS) -> str:
    """Have a job on the node start three sleepers, two of them orphans; returns their seconds."""
    seconds = f"987.{os.getpid()}{time.monotonic_ns() % 1_000_000}"
    where = ("--partition=preempt", f"--nodelist={node}", "--output=/dev/null", "--chdir=/")
    box.run("sbatch", *where, f"--wrap={job.format(seconds)}")
    wait_until(lambda: len(sleepers(seconds)) == 3, 20, "the job's sleepers")
    return seconds


def state(box: Sandbox, node: str) -> str:
    return box.run("sinfo", "--noheader", "--partition=high", f"--nodes={node}", "--format=%T")


def test_the_partitions_are_as_promised(slurm):
    preempt = slurm.run("scontrol", "show", "partition", "preempt")
    assert "PreemptMode=REQUEUE" in preempt
    assert "GraceTime=2" in preempt
    assert "Nodes=n[1-4]" in preempt
    assert "Nodes=n[1-4]" in slurm.run("scontrol", "show", "partition", "high")
    assert "Nodes=c1" in slurm.run("scontrol", "show", "partition", "cpu")
    assert slurm.run("sinfo", "--noheader", "--nodes=n1", "--format=%P").startswith("preempt*")


def test_jobs_get_distinct_gpus(slurm, tmp_path):
    until = f"until [ -e {tmp_path}/seen ]; do sleep 0.1; done"
    show = f"--wrap=srun sh -c 'echo $CUDA_VISIBLE_DEVICES; {until}'"
    outputs = [tmp_path / f"{number}.out" for number in (1, 2)]
    for output in outputs:
        slurm.run("sbatch", "--nodelist=n1", "--gres=gpu:1", f"--output={output}", "-D/", show)
    wait_until(lambda: all(o.exists() and o.read_text() for o in outputs), 20, "both jobs run")
    (tmp_path / "seen").touch()
    assert {output.read_text().split()[0] for output in outputs} == {"0", "1"}


def test_slurm_runs_what_scrontab_is_given(slurm, tmp_path):
    """As a batch job with the same options: scrontab itself is not in Debian."""
    lines = (ROOT / "etc/scrontab.example").read_text().splitlines()
    options = [line.removeprefix("#SCRON ") for line in lines if line.startswith("#SCRON ")]
    (line,) = [line for line in lines if not line.startswith("#")]
    command = line.split(None, 5)[5].removesuffix(" --jitter")  # which would take its time
    command = command.replace("/opt/elastic", str(ROOT))
    output = tmp_path / "log"
    where = (f"--output={output}", f"--chdir={tmp_path}", "--wait",
             f"--export=ELASTIC_HOME_DIR={tmp_path},ELASTIC_PYTHON={sys.executable}")
    slurm.run("sbatch", *options, *where, f"--wrap={command} --json")
    said = json.loads(output.read_text())
    assert (said["runs"], said["errors"]) == ([], [])


def test_its_daemons_listen_on_loopback_only_where_that_is_the_hosts_address(slurm):
    if socket.gethostbyname(socket.gethostname()) != "127.0.0.1":
        pytest.skip("this machine's name does not mean 127.0.0.1; Slurm then listens on all")
    conf = slurm.conf.read_text()
    port = int(conf.partition("SlurmctldPort=")[2].split()[0])
    listeners = Path("/proc/net/tcp").read_text().splitlines()
    assert [line.split()[1] for line in listeners if f":{port:04X} 00000000:0000" in line] == [
        f"0100007F:{port:04X}"
    ]


def test_who_looks_at_it_from_a_job_is_no_member(slurm):
    """`down` would have ended an editor beside it."""
    leads = {"SLURM_CONF": str(slurm.conf), "PATH": os.environ["PATH"]}
    nodes = ("n1", "r07c12")
    beside = [subprocess.Popen(["sleep", "60"], env=leads | {"SLURMD_NODENAME": node})
              for node in nodes]
    try:
        for process in beside:  # before its exec it has the environment of this one
            wait_until(lambda pid=process.pid: command_line(pid).startswith("sleep"), 5, "it runs")
        members = slurm.daemons.members()
    finally:
        for process in beside:
            process.kill()
            process.wait()
    assert not members & {process.pid for process in beside}


def test_from_the_command_line_and_a_bare_environment():
    name = f"cli-{os.getpid()}"
    try:
        said = elastic_sandbox("up", "--nodes", 1, "--name", name)
        exports = elastic_sandbox("env", "--name", name)
        assert said.endswith(exports)
        shell = f"{exports}\nsinfo --noheader --partition=preempt --format='%D %T %G'"
        done = subprocess.run(["sh", "-c", shell], env=BARE, capture_output=True, text=True)
        assert done.stdout.strip() == "1 idle gpu:2"
        again = subprocess.run(
            [COMMAND, "up", "--name", name], env=BARE, capture_output=True, text=True
        )
        where = sandbox.default_folder()
        assert (again.returncode, again.stderr) == (
            2, f"error: a sandbox is up in {where / name}\n"
               f"  hint: elastic-sandbox down --name {name} --dir {where}\n",
        )
    finally:
        elastic_sandbox("down", "--name", name)
    assert not (sandbox.default_folder() / name).exists()
    elastic_sandbox("down", "--name", name)  # again: nothing to do


def test_two_at_once_are_apart_and_down_leaves_no_process_and_no_file(new_sandbox):
    one, two = new_sandbox(nodes=1, gpus=1), new_sandbox(nodes=2, gpus=0)
    assert (one.idle_nodes(), two.idle_nodes()) == ({"n1", "c1"}, {"n1", "n2", "c1"})
    seconds = run_orphans(one, "n1")
    one.down()
    assert sleepers(seconds) == []
    assert one.daemons.members() == set()
    assert not one.path.exists()
    assert two.idle_nodes() == {"n1", "n2", "c1"}


def test_a_killed_node_loses_everything_on_it_goes_down_and_comes_back(new_sandbox):
    box = new_sandbox(nodes=2, settings=("SlurmdTimeout=10", "MessageTimeout=5"))
    lost, kept = run_orphans(box, "n1"), run_orphans(box, "n2")
    box.kill_node("n1")
    assert sleepers(lost) == []
    assert len(sleepers(kept)) == 3
    wait_until(lambda: state(box, "n1").startswith("down"), 40, "Slurm notices")
    box.revive_node("n1")
    wait_until(lambda: "n1" in box.idle_nodes(), 20, "the node is back")
    for name, fault in (("n1", box.revive_node), ("n3", box.kill_node)):
        with pytest.raises(UsageError, match=name):
            fault(name)
    box.kill_node("n2")
    box.down()
    assert sleepers(kept) == []


def test_preempt_takes_nodes_from_the_jobs_on_them(slurm):
    job = ("--partition=preempt", "--nodes=4", "--exclusive", "--no-requeue", "-D/", "-o/dev/null")
    victim = slurm.run("sbatch", "--parsable", *job, "--wrap=srun sleep 60").strip()
    wait_until(lambda: slurm.idle_nodes() == {"c1"}, 20, "the job runs")
    slurm.preempt(nodes=1, seconds=1)
    ask = ("squeue", "--noheader", "--states=all", f"--jobs={victim}", "--format=%T")
    wait_until(lambda: slurm.run(*ask).strip() not in ("RUNNING", "COMPLETING"), 30, "it loses")
    wait_until(lambda: len(slurm.idle_nodes()) == 5, 30, "the nodes are free again")


def test_a_start_that_fails_shows_the_log_and_leaves_nothing(new_sandbox):
    with pytest.raises(ElasticError, match="(?s)did not start.*slurmctld.*select/nonsense"):
        new_sandbox(nodes=1, settings=("SelectType=select/nonsense",))


def test_a_slurm_that_was_built_for_one_slurmd_a_host_is_named(new_sandbox, tmp_path, monkeypatch):
    """Of Debian's none is: a slurmctld that ends with the words of such a one."""
    fake = tmp_path / "slurmctld"
    fake.write_text("#!/bin/sh\necho fatal: At least as many NodeAddr are required as NodeName\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ElasticError, match="did not start") as caught:
        new_sandbox(nodes=1)
    assert "--enable-multiple-slurmd" in caught.value.hint


JOB_SUBMIT = """
function slurm_job_submit(job, partitions, uid)
   if job.time_limit == slurm.NO_VAL then
      slurm.log_user("this site wants a --time")
      return slurm.ERROR
   end
   job.comment = "rewritten"
   return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
"""


def test_a_job_submit_lua_refuses_and_rewrites(new_sandbox, tmp_path):
    script = tmp_path / "rules.lua"
    script.write_text(JOB_SUBMIT)
    box = new_sandbox(nodes=1, job_submit=script)
    job = ("sbatch", "--parsable", "--chdir=/", "--output=/dev/null", "--wrap=true")
    with pytest.raises(ElasticError, match="this site wants a --time"):
        box.run(*job)
    number = box.run(*job, "--time=1").strip()
    assert "Comment=rewritten" in box.run("scontrol", "show", "job", number)


# Of most machines: this one's is hidden. cgroup2 alone, of which no systemd gives a part, and none.
OTHER_CGROUPS = {
    "v2": "mount -t cgroup2 none /sys/fs/cgroup",
    "none": "! mountpoint --quiet /sys/fs/cgroup || umount --recursive --lazy /sys/fs/cgroup",
}


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize(("cgroups", "user"), [("v2", "root"), ("none", USER)])
def test_it_starts_whatever_cgroups_there_are(cgroups, user):
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    shutil.chown(folder, user)
    run, place = " ".join(become(user)), f"--dir {folder} --name x"
    script = f"""set -e
    {OTHER_CGROUPS[cgroups]}
    trap '{run} {COMMAND} down {place}' EXIT
    {run} {COMMAND} up --nodes 1 {place}
    eval "$({run} {COMMAND} env {place})"
    {run} srun --chdir=/ echo it runs
    cat {folder}/x/log/*.log
    """
    try:
        done = subprocess.run(["unshare", "--mount", "bash", "-c", script], env=BARE, cwd="/",
                              capture_output=True, text=True)
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert "it runs" in done.stdout.splitlines()
    assert not re.search("defunct|deprecated", done.stdout)


def test_down_clears_what_a_killed_up_left(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    args = [COMMAND, "up", "--dir", str(folder), "--name", "x"]
    box = Sandbox(folder / "x")
    try:
        starting = subprocess.Popen(args, env=BARE, start_new_session=True)
        wait_until(lambda: (box.path / "slurmctld.pid").exists(), 30, "slurmctld starts")
        os.killpg(starting.pid, signal.SIGKILL)
        starting.wait()
        assert box.daemons.members()
    finally:
        box.down()
    assert box.daemons.members() == set()
    folder.rmdir()


KILLED = """
import os, signal, slurm_sandbox
with slurm_sandbox._folder() as folder:
    slurm_sandbox._up(folder, nodes=1)
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_test_that_is_killed_leaves_no_sandbox():
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "lib")])
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    wait_until(lambda: not folder.exists(), 30, "the sandbox is gone")
    assert Sandbox(folder / "0").daemons.members() == set()


# ---- of an ordinary user, and what another one tries

root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


def become(user: str) -> list[str]:
    found = pwd.getpwnam(user)
    return ["setpriv", f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"]


def as_user(user: str, *argv: object, timeout: float = 60 * PATIENCE, **extra: str):
    return subprocess.run(
        [*become(user), *map(str, argv)], env=BARE | extra, cwd="/", timeout=timeout,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )


@pytest.fixture(scope="module")
def nobodys() -> Iterator[Sandbox]:
    """Another user's sandbox, in a folder that everybody may enter."""
    if as_user(USER, sys.executable, "-c", "import click").returncode != 0:
        pytest.skip(f"{USER} may not run {sys.executable}")
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    folder.chmod(0o755)
    shutil.chown(folder, USER)
    place = ("--dir", folder, "--name", "x")
    try:
        done = as_user(USER, COMMAND, "up", "--nodes", 1, *place)
        assert done.returncode == 0, done.stderr
        yield Sandbox(folder / "x")
    finally:
        down = as_user(USER, COMMAND, "down", *place)
        left = list(folder.iterdir())
        shutil.rmtree(folder)
    assert (down.returncode, left) == (0, [])


@pytest.mark.root
@root
def test_an_ordinary_user_can_have_one(nobodys):
    where = ("--quiet", "--gres=gpu:2", "--chdir=/", "--job-name=mine")
    srun = as_user(USER, "srun", *where, "bash", "-c", "id -un; printenv CUDA_VISIBLE_DEVICES",
                   **nobodys.environment())
    assert (srun.stdout, srun.stderr) == (f"{USER}\n0,1\n", "")


@pytest.mark.root
@root
def test_its_user_in_another_group_cannot_end_it_and_removes_nothing(nobodys):
    """newgrp, and /proc shows no environment: the files went, and the daemons stayed."""
    place = ("--dir", str(nobodys.path.parent), "--name", "x")
    in_group = [word.replace(f"={pwd.getpwnam(USER).pw_gid}", "=0") for word in become(USER)]
    done = subprocess.run([*in_group, COMMAND, "down", *place], env=BARE, cwd="/",
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot see the processes" in done.stderr
    assert nobodys.conf.exists()


@pytest.mark.root
@root
def test_another_user_gets_nothing_of_it_and_runs_nothing_in_it(nobodys):
    """Not even with a copy of its slurm.conf. That the same words get in where its owner has opened
    the folder shows that they are right."""
    assert stat.S_IMODE(nobodys.path.stat().st_mode) == 0o700
    names = ("munge.socket", "slurm.conf", "log/slurmctld.log", "spool/c1")
    parts = [str(nobodys.path / name) for name in names]
    show = ("bash", "-c", 'for part; do test ! -e "$part" || echo "$part"; done', "", *parts)
    assert as_user(USER, *show).stdout.split() == parts
    assert as_user("daemon", *show).stdout == ""

    with tempfile.NamedTemporaryFile("w", prefix="es-", dir="/tmp") as copy:
        copy.write(nobodys.conf.read_text())
        copy.flush()
        os.fchmod(copy.fileno(), 0o644)
        leads = {"SLURM_CONF": copy.name}
        for command in (("squeue",), ("srun", "-p", "cpu", "id", "-un")):
            done = as_user("daemon", "timeout", 10, *command, **leads)
            assert (done.returncode != 0, done.stdout) == (True, "")
            assert f'Failed to access "{nobodys.path}/munge.socket": Permission den' in done.stderr
        nobodys.path.chmod(0o711)
        try:
            done = as_user("daemon", "srun", "--quiet", "-p", "cpu", "id", "-un", **leads)
        finally:
            nobodys.path.chmod(0o700)
    assert (done.stdout, done.stderr) == (f"{USER}\n", "")


@pytest.mark.root
@root
def test_root_runs_and_removes_nothing_in_another_users_folder(nobodys):
    """Where Slurm's commands would load the plugins that slurm.conf names."""
    place = ("--dir", nobodys.path.parent, "--name", nobodys.path.name)
    for command in ("env", "preempt", "kill-node n1", "up", "down"):
        said = CliRunner().invoke(elastic, ["sandbox", *command.split(), *map(str, place)])
        assert said.exit_code == 1
        assert said.output.startswith(f"error: {nobodys.path} is another user's\n")
    assert as_user(USER, "squeue", **nobodys.environment()).returncode == 0  # as before


@pytest.mark.root
@root
def test_a_process_that_another_user_has_marked_is_no_member(tmp_path):
    """A marked process once made a sandbox of any folder, and root its caller."""
    box = Sandbox(tmp_path / "x")
    for number in (NOBODY, 0):
        mark = {"ELASTIC_SANDBOX_MEMBER": f"{box.path}:slurmctld"}
        other = subprocess.Popen(["sleep", "60"], env=mark, user=number)
        try:
            wait_until(lambda pid=other.pid: command_line(pid).startswith("sleep"), 5, "it runs")
            assert box.daemons.members("slurmctld") == (set() if number else {other.pid})
        finally:
            other.kill()
            other.wait()


@pytest.mark.root
@root
def test_a_link_on_the_way_that_another_user_can_change_is_refused():
    with short_folder() as folder:
        (folder / "real").mkdir()
        (folder / "link").symlink_to(folder / "real")
        os.lchown(folder / "link", NOBODY, NOBODY)
        with pytest.raises(ElasticError, match="link is another user's"):
            Sandbox(folder / "link" / "x").up(Shape())
        assert list((folder / "real").iterdir()) == []


# ---- what is none


@pytest.mark.parametrize("command", ["up", "down"])
@pytest.mark.parametrize("name", ["thesis", "empty", "link", "file"])
def test_what_is_no_sandbox_is_neither_removed_nor_replaced(command, name):
    with short_folder() as folder:
        (folder / "thesis").mkdir()
        (folder / "thesis" / "chapter1").write_text("years")
        (folder / "thesis" / "slurm.conf").write_text("# Slurm of a private sandbox")
        (folder / "empty").mkdir()
        (folder / "link").symlink_to(folder / "linked")
        (folder / "linked").mkdir()
        (folder / "linked" / ".elastic-sandbox").touch()  # by that name it may be up
        (folder / "file").write_text("years")
        before = sorted(folder.rglob("*"))
        place = ["--dir", str(folder), "--name", name]
        said = CliRunner().invoke(elastic, ["sandbox", command, *place])
        assert said.exit_code == 2
        assert said.output == (f"error: not a sandbox: {folder / name}\n"
            "  hint: choose another --name or --dir, or remove it yourself\n")
        assert sorted(folder.rglob("*")) == before
        assert (folder / "thesis" / "chapter1").read_text() == "years"


@pytest.mark.parametrize("command", ["up", "down", "env"])
@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "", "..", ".", "a b"])
def test_a_name_that_is_a_path_is_refused(tmp_path, command, name):
    (tmp_path / "D").mkdir()
    place = ["--dir", str(tmp_path / "D"), "--name", name]
    said = CliRunner().invoke(elastic, ["sandbox", command, *place])
    assert said.exit_code == 2
    assert said.output.startswith(f"error: unfit name of a sandbox: {name!r}\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["D"]


def test_down_finishes_what_a_killed_down_began(tmp_path):
    """The mark goes last; a link in the folder leads nowhere."""
    box = Sandbox(tmp_path / "x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    box.path.mkdir(mode=0o700)
    (box.path / "link").symlink_to(outside)
    (box.path / "log").mkdir()
    (box.path / "log" / "slurmctld.log").touch()
    (box.path / ".elastic-sandbox").touch()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = Path.unlink
        patch.setattr(Path, "unlink", lambda path: (seen.append(path.name), real(path)))
        box.down()
    assert (seen[-1], sorted(seen)) == (".elastic-sandbox", [".elastic-sandbox", "link"])
    assert not box.path.exists()
    assert (outside / "kept").exists()


def test_missing_programs_are_named_with_their_packages(monkeypatch, tmp_path):
    (tmp_path / "sbatch").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_DAEMON_PATH", "/nonexistent")
    with pytest.raises(ElasticError, match="Command not found: munged, slurmctld, slurmd") as error:
        sandbox.programs()
    assert error.value.hint == "apt-get install munge slurmctld slurmd util-linux"
    with pytest.raises(ElasticError) as error:
        sandbox.programs(MORE_PACKAGES)
    assert "mariadb-server" in error.value.hint


@pytest.mark.parametrize("name", ["with blank", "quote'", "x" * 100])
def test_a_folder_that_slurm_cannot_take_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="unfit folder"):
        Sandbox(Path("/tmp") / name).up(Shape())
    assert not (Path("/tmp") / name).exists()


def test_every_help_fits_80_columns():
    for command in ("", "up", "env", "preempt", "kill-node", "down"):
        said = CliRunner().invoke(elastic, ["sandbox", *command.split(), "--help"])
        assert (said.exit_code, max(map(len, said.output.splitlines())) <= 80) == (0, True)
