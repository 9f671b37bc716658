"""What a rank finds and leaves behind: its network, its log, its peers. No Slurm here.

The InfiniBand, RoCE and Ethernet below are fakes: files planted where sysfs has such things, and an
`ip` that prints what was written down for it. Nodes are pretended, too: by SLURMD_NODENAME and
LOCAL_RANK.

pytest tests/sync/test_launch_env.py
"""

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import peer_ranks
from elastic.base.network import free_port
from forks import as_nobody, exit_code, start_child
from helpers import PATIENCE, ROOT, elastic, environment, wait_until

RANK = str(ROOT / "sbatch" / "rank.sh")
RANKS: list[subprocess.Popen] = []  # that a test has started
NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE",
         "NCCL_IB_GID_INDEX", "NCCL_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
ETHERNET, INFINIBAND = 1, 32
ETH = ("eth0", "10.0.0.2", ETHERNET)
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0002"


def given(**extra: str) -> dict[str, str]:
    """What a rank starts from: rank 0 of 1, and nothing that this machine has set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **extra}


class Node:
    """A fake of a machine's network, below a folder."""

    def __init__(self, folder: Path):
        self.folder, self.sysfs = folder, folder / "sys"
        (folder / "bin").mkdir()
        self._has_ip = False

    def interfaces(self, *rows: tuple[str, str, int], route: str = "eth0") -> None:
        """(name, IPv4 address or "", type); `route` leads to all other machines."""
        lines = ["1: lo    inet 127.0.0.1/8 scope host lo"]
        for number, (name, address, kind) in enumerate(rows, 2):
            self._write(f"class/net/{name}/type", kind)
            self._write(f"class/net/{name}/operstate", "up")
            if address:
                lines.append(f"{number}: {name}    inet {address}/24 brd 10.0.0.255 scope global")
        answer = f"10.0.0.1 dev {route} src 10.0.0.2 uid 0" if route else ""
        self._ip(f'case "$*" in *route*) echo {shlex.quote(answer)} ;; '
                 f"*) echo {shlex.quote(chr(10).join(lines))} ;; esac")

    def port(self, device: str, link: str, state="4: ACTIVE", gids=()) -> None:
        """A port of an RDMA device; `gids`: (address, type) by index."""
        where = f"class/infiniband/{device}/ports/1"
        self._write(f"{where}/link_layer", link)
        self._write(f"{where}/state", state)
        for index, (address, kind) in enumerate(gids):
            self._write(f"{where}/gids/{index}", address)
            self._write(f"{where}/gid_attrs/types/{index}", kind)

    def no_ip(self) -> None:
        self._ip("exit 127")

    def chosen(
        self, master: str = "10.0.0.1", names: Sequence[str] = NAMES, **extra: str
    ) -> tuple[dict[str, str], str]:
        """What a command under rank.sh finds, of `names`; and what was said."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = given(PATH=path, ELASTIC_SYSFS=str(self.sysfs), MASTER_ADDR=master) | extra
        done = subprocess.run([RANK, "env"], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        return {name: found[name] for name in names if name in found}, done.stderr

    def _ip(self, body: str) -> None:
        program = self.folder / "bin" / "ip"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def _write(self, path: str, text: object) -> None:
        (self.sysfs / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sysfs / path).write_text(f"{text}\n")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def sockets(found: dict[str, str]) -> tuple[str | None, str | None]:
    return found.get("NCCL_SOCKET_IFNAME"), found.get("GLOO_SOCKET_IFNAME")


def test_ranks_start_under_the_bash_of_older_systems(node, tmp_path):
    """RHEL 8 has 4.4, which knows no such variable: each rank of each job died of that. A newer
    Bash forgets them once they are unset."""
    (tmp_path / "older").write_text("unset EPOCHSECONDS EPOCHREALTIME SRANDOM BASH_ARGV0\n")
    node.interfaces(ETH)
    assert node.chosen(BASH_ENV=str(tmp_path / "older"))[0]["NCCL_SOCKET_IFNAME"] == "eth0"


def test_what_a_shell_says_of_its_rank_does_not_count_in_a_step(node):
    """Left over from a test of torch, or from the step that a shell was started in: each of the
    ranks was rank 0 of 1."""
    node.interfaces(ETH)
    step = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    found, _ = node.chosen(**step, names=("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert found == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def test_without_rdma_it_is_the_interface_that_routes_to_the_master(node):
    node.interfaces(("eth1", "10.1.0.2", ETHERNET), ETH)
    found, said = node.chosen()
    assert found == {
        "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert said == ""


def test_on_the_masters_own_node_it_is_the_one_that_carries_the_address(node):
    node.interfaces(("eth1", "10.1.0.2", ETHERNET), ETH, route="lo")
    assert sockets(node.chosen("10.1.0.2")[0]) == ("eth1", "eth1")
    assert sockets(node.chosen("127.0.0.1")[0]) == ("lo", "lo")


def test_infiniband_goes_first_where_it_has_an_ipv4_address_and_is_up(node):
    node.interfaces(ETH, ("ib0", "", INFINIBAND), ("ib1", "10.2.0.2", INFINIBAND))
    assert sockets(node.chosen()[0]) == ("ib1", "ib1")
    node.interfaces(ETH, ("ib1", "", INFINIBAND))
    assert sockets(node.chosen()[0]) == ("eth0", "eth0")
    node.interfaces(ETH, ("ib1", "10.2.0.2", INFINIBAND))
    node._write("class/net/ib1/operstate", "down")
    assert sockets(node.chosen()[0]) == ("eth0", "eth0")
    rows = ("ib1", "10.2.0.2", INFINIBAND), ("ibs7", "10.3.0.2", INFINIBAND)
    node.interfaces(*rows, route="ibs7")
    assert sockets(node.chosen()[0]) == ("ibs7", "ibs7")


def test_a_name_that_begins_another_is_said_exactly_to_nccl(node):
    node.interfaces(("bond0", "10.0.0.2", ETHERNET), ("bond0.7", "", ETHERNET), route="bond0")
    assert sockets(node.chosen()[0]) == ("=bond0", "bond0")


def test_active_ports_are_named_and_native_infiniband_only_where_there_is_some(node):
    node.interfaces(ETH)
    node.port("mlx5_0", "InfiniBand")
    node.port("mlx5_1", "InfiniBand", "1: DOWN")
    node.port("mlx5_2", "Ethernet", gids=[(MAPPED, "RoCE v2")])
    node.port("mlx5_10", "InfiniBand")
    found, said = node.chosen()
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_10:1"
    assert not {"NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"} & set(found)
    assert said == ""


def test_only_roce_gets_a_gid_index_that_of_version_2_over_ipv4(node):
    node.interfaces(ETH)
    link_local = "fe80:0000:0000:0000:0000:0000:0000:0001"
    gids = [(link_local, "IB/RoCE v1"), (link_local, "RoCE v2"), (MAPPED, "IB/RoCE v1"),
            (MAPPED, "RoCE v2")]
    for device in ("mlx5_0", "mlx5_1"):
        node.port(device, "Ethernet", gids=gids)
    found, said = node.chosen()
    assert (found["NCCL_IB_HCA"], found["NCCL_IB_GID_INDEX"]) == ("=mlx5_0:1,mlx5_1:1", "3")
    assert said == ""
    node.port("mlx5_2", "Ethernet", gids=[(MAPPED, "RoCE v2")])
    found, said = node.chosen()
    assert "NCCL_IB_GID_INDEX" not in found
    assert "set NCCL_IB_GID_INDEX" in said


def test_what_the_environment_says_stays_and_debugging_is_switched_on(node):
    node.interfaces(ETH)
    own = {"NCCL_SOCKET_IFNAME": "ib7", "NCCL_IB_HCA": "mlx5_9", "NCCL_DEBUG": "WARN",
           "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    found, _ = node.chosen(ELASTIC_NCCL_DEBUG="INFO", **own)
    assert found == {**own, "GLOO_SOCKET_IFNAME": "eth0"}
    assert node.chosen(ELASTIC_NCCL_DEBUG="INFO")[0]["NCCL_DEBUG"] == "INFO"
    assert node.chosen(NCCL_IB_DISABLE="0")[0]["NCCL_IB_DISABLE"] == "0"


def test_what_is_not_found_stays_unset_with_one_line_that_says_the_way_out(node):
    def nothing(why: str, **extra: str) -> None:
        found, said = node.chosen(**extra)
        assert sockets(found) == (None, None)
        assert why in said
        assert said.count("\n") == 1
        assert "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" in said

    node.no_ip()
    nothing("no answer from `ip`")
    node.interfaces(("eth0", "", ETHERNET))  # a route without an address of its own
    nothing("none with an IPv4 address routes to 10.0.0.1")
    node.interfaces(ETH, route="")
    nothing("none with an IPv4 address routes to 10.0.0.1")
    nothing("MASTER_ADDR is not set", master="")
    nothing("no-such-host.invalid, which has no IPv4 address", master="no-such-host.invalid")


def test_this_machine_can_say_it_of_itself():
    env = given(MASTER_ADDR="127.0.0.1", PATH="/usr/bin:/bin")  # an ordinary user's, on Debian
    done = subprocess.run([RANK, "env"], env=env, capture_output=True, text=True)
    assert "GLOO_SOCKET_IFNAME=lo\n" in done.stdout
    assert done.stderr == ""


# ---- logs


def log_of(run: Path, rank: int) -> list[str]:
    return (run / "logs" / "ranks" / f"rank-{rank:03d}.log").read_text().splitlines()


def rank_of(run: Path, script: str, rank: int = 0, **extra: str) -> subprocess.Popen:
    env = given(ELASTIC_RUN_DIR=str(run), MASTER_ADDR="127.0.0.1", SLURM_JOB_ID="12",
                SLURMD_NODENAME="n7", **extra)
    env |= {"RANK": str(rank), "WORLD_SIZE": "4"}
    # A shell makes what it starts in the background deaf to Ctrl-C, and so may be these tests.
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [RANK, "bash", "-c", script], env=env, text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears,
    )
    RANKS.append(process)
    return process


@pytest.fixture(autouse=True)
def _no_rank_is_left():
    yield
    while RANKS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(RANKS.pop().pid, signal.SIGKILL)


def test_a_rank_has_its_own_log_over_restarts_and_rank_0_speaks_for_all(tmp_path):
    script = "echo out; echo err >&2; exit 3"
    for rank, spoken in ((0, "out\n"), (2, "")):
        for restart in ("0", "1"):
            rank_process = rank_of(tmp_path, script, rank, SLURM_RESTART_COUNT=restart,
                                   ELASTIC_ATTEMPT=f"4{restart}")
            assert rank_process.communicate() == (spoken, "err\n")
            assert rank_process.returncode == 3
        lines = log_of(tmp_path, rank)
        assert [line for line in lines if "==" not in line].count("out") == 2
        banners = [line.split(" ", 2)[2] for line in lines if line.startswith("== ")]
        assert banners == [
            f"job 12 restart {n} attempt 4{n} node n7 rank {rank}/4" for n in (0, 1)
        ]


def test_the_last_words_are_in_the_log_when_the_rank_has_ended(tmp_path):
    script = "for ((i = 0; i < 20000; i++)); do echo line $i; done; echo last >&2"
    rank = rank_of(tmp_path, script)
    out, err = rank.communicate()
    assert rank.returncode == 0
    assert (out.splitlines()[-1], err) == ("line 19999", "last\n")
    lines = log_of(tmp_path, 0)
    assert len(lines) == 1 + 20000 + 1
    # Two pipes have no order, and a full one is copied up to the middle of a line.
    assert any(line.endswith("last") for line in lines)


def test_a_notice_to_every_process_leaves_time_for_the_last_words(tmp_path):
    script = "trap 'sleep 0.3; echo saved; echo gone >&2; exit 0' TERM; echo up; " \
             "while :; do sleep 0.1; done"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        run = tmp_path / number.name
        rank = rank_of(run, script)
        assert rank.stdout.readline() == "up\n"
        os.killpg(rank.pid, number)  # as Slurm does it to a step
        out, err = rank.communicate()
        assert (rank.returncode, out) == (75, "saved\n")
        assert err.endswith("gone\n")  # its `sleep` may have been killed, too: Terminated
        assert {"up", "saved", "gone"} < set(log_of(run, 0))


def test_a_command_that_is_told_first_and_leaves_at_once_has_obeyed_a_notice(tmp_path):
    """proctrack/linuxproc tells the deepest process first, and writes a line of its log between
    two: the job counted as done, and was not trained on. Here its turn comes as it waits for it."""
    fake = tmp_path / "sleep"
    waits = '[ "${1#0.}" != "$1" ] || { kill -TERM "$PPID"; exit; }'
    fake.write_text(f'#!/bin/sh\n{waits}\nexec {shutil.which("sleep")} "$@"\n')
    fake.chmod(0o755)
    script = "trap 'exit 0' TERM; echo $$; while :; do sleep 0.1; done"
    path = f"{tmp_path}:{os.environ['PATH']}"
    rank = rank_of(tmp_path, script, SLURM_STEP_ID="0", ELASTIC_ATTEMPT="1", PATH=path)
    os.kill(int(rank.stdout.readline()), signal.SIGTERM)
    rank.communicate(timeout=10 * PATIENCE)
    assert rank.returncode == 75


def test_what_a_rank_leaves_behind_does_not_keep_it(tmp_path):
    began = time.monotonic()
    rank = rank_of(tmp_path, "sleep 300 & echo $!")
    child = int(rank.stdout.readline())
    assert rank.wait(30) == 0
    os.kill(child, signal.SIGKILL)
    assert time.monotonic() - began < 10 * PATIENCE
    rank.communicate()


SAVES = """
import multiprocessing, signal, time
helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], daemon=True)
helper.start()
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print("up", flush=True)
while not heard:
    time.sleep(0.05)
time.sleep(1.5)
print("saved", len(heard), helper.is_alive(), flush=True)
"""


@pytest.mark.parametrize("step", ["", "0"])
def test_what_a_launcher_that_dies_of_the_notice_leaves_at_work_may_save(tmp_path, step: str):
    """`bash train.sh` and `conda run` die of it, and their program was killed in its save."""
    (tmp_path / "train.py").write_text(SAVES)
    script = f"bash -c '{sys.executable} {tmp_path}/train.py; true'; true"
    rank = rank_of(tmp_path, script, SLURM_STEP_ID=step)
    assert rank.stdout.readline() == "up\n"
    if step:  # Slurm gives it to every process
        os.killpg(rank.pid, signal.SIGTERM)
    else:
        rank.send_signal(signal.SIGTERM)
    out, _ = rank.communicate(timeout=20 * PATIENCE)
    assert (rank.returncode, out) == (75, f"saved 1 {not step}\n")


@pytest.mark.parametrize("launcher", ["", "; true"])
def test_a_rank_whose_step_a_cgroup_tracks_passes_the_notice_on(tmp_path, launcher: str):
    """proctrack/cgroup signals the task alone, which is rank.sh: no program heard of it. Here
    grep says that a cgroup does. At the end of its grace comes another one, in the save."""
    fake = tmp_path / "grep"
    real = shutil.which("grep")
    fake.write_text(f'#!/bin/sh\n[ "${{*#*self/cgroup}}" != "$*" ] || exec {real} "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "train.py").write_text(SAVES)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = f"{sys.executable} {tmp_path}/train.py{launcher}"
    rank = rank_of(tmp_path, script, SLURM_STEP_ID="0", PATH=path)
    assert rank.stdout.readline() == "up\n"
    rank.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    rank.send_signal(signal.SIGTERM)
    out, _ = rank.communicate(timeout=20 * PATIENCE)
    assert (rank.returncode, out) == (75, "saved 1 True\n")


def test_who_saves_on_a_warning_and_goes_on_hears_of_the_preemption(tmp_path):
    script = "trap 'echo saves' TERM; echo up; while :; do sleep 0.1; done"
    rank = rank_of(tmp_path, script)
    assert rank.stdout.readline() == "up\n"
    stat = Path(f"/proc/{rank.pid}/stat")
    # The last two are from a keyboard.
    for warning in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        wait_until(lambda: stat.read_text().split()[2] == "S", 10, "it waits for its command")
        rank.send_signal(warning)
        assert rank.stdout.readline() == "saves\n"


def test_a_step_does_not_end_in_a_save_however_often_it_is_told(tmp_path):
    """A notice ended the very processes by which rank.sh looked for those at work; on a large
    node they take as long as this grep."""
    (tmp_path / "grep").write_text(f'#!/bin/sh\nsleep 0.2\nexec {shutil.which("grep")} "$@"\n')
    (tmp_path / "grep").chmod(0o755)
    (tmp_path / "train.py").write_text(SAVES + f"open('{tmp_path}/whole', 'x')\n")
    script = f"bash -c '{sys.executable} {tmp_path}/train.py; true'; true"
    path = f"{tmp_path}:{os.environ['PATH']}"
    rank = rank_of(tmp_path, script, SLURM_STEP_ID="0", PATH=path)
    assert rank.stdout.readline() == "up\n"
    while rank.poll() is None:
        os.killpg(rank.pid, signal.SIGTERM)
        time.sleep(0.1)
    assert rank.returncode == 75
    assert (tmp_path / "whole").exists()


def test_what_a_rank_has_submitted_is_left_alone(tmp_path):
    """Another job of the same node inherits its mark, and would be waited for, for ever."""
    other = f"SLURM_JOB_ID=4800 setsid sleep 600 >/dev/null 2>&1 & echo $! >{tmp_path}/other"
    script = f"{other}; echo up; sleep 600"
    rank = rank_of(tmp_path, script)
    assert rank.stdout.readline() == "up\n"
    other = int((tmp_path / "other").read_text())
    try:
        wait_until(lambda: b"SLURM_JOB_ID=4800" in Path(f"/proc/{other}/environ").read_bytes(), 5,
                   "it is of the other job")
        rank.send_signal(signal.SIGTERM)
        rank.communicate(timeout=10 * PATIENCE)
        assert rank.returncode == 75
        os.kill(other, 0)
    finally:
        os.kill(other, signal.SIGKILL)


def test_what_is_typed_reaches_the_command(tmp_path):
    """In an allocation it is a shell, which ended at once: it was given /dev/null."""
    for extra in ({}, {"ELASTIC_RUN_DIR": str(tmp_path)}):
        done = subprocess.run([RANK, "bash"], env=given(MASTER_ADDR="127.0.0.1", **extra),
                              input="echo typed\n", capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "typed\n")


def test_a_log_that_cannot_be_written_costs_the_rank_nothing(tmp_path):
    (tmp_path / "logs").write_text("no folder")
    rank = rank_of(tmp_path, "echo out", 1)
    out, err = rank.communicate()
    assert (rank.returncode, out) == (0, "out\n")
    assert "rank 1 has no log of its own" in err


def test_the_logs_of_ranks_are_no_logs_of_jobs(make_run):
    run = make_run()
    rank_of(run.path, "echo rank").communicate()
    run.log_path("trainer", 0).write_text("job\n")
    done = elastic("logs", run.path, env=environment(run.path))
    assert (done.returncode, "job" in done.stdout, "rank" in done.stdout) == (0, True, False)


def test_as_many_ranks_as_gpus_or_it_does_not_start(tmp_path):
    layout = {"ELASTIC_RANKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "2"}
    rank = rank_of(tmp_path, "echo started", **layout)
    out, err = rank.communicate()
    assert (rank.returncode, out) == (2, "")
    assert "error: node n7: 4 ranks, 2 GPUs\n  hint: " in err
    assert rank_of(tmp_path, "exit 9", **{**layout, "SLURM_GPUS_ON_NODE": "4"}).wait() == 9


# ---- the job


def test_who_attaches_to_a_job_drops_an_outer_one_and_finds_the_cluster(tmp_path):
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/bash\necho "${!SLURM_@}"\n')
    squeue.chmod(0o755)
    env = given(SLURM_JOB_ID="1", SLURM_CONF="/c", SLURM_CONF_SERVER="head:6817")
    done = subprocess.run([ROOT / "sbatch" / "interactive.sh", "4711", "bash"], text=True,
                          env=env | {"PATH": f"{tmp_path}:{env['PATH']}"},
                          capture_output=True)
    assert done.stderr.startswith("error: no job 4711: SLURM_CONF SLURM_CONF_SERVER\n")


def test_who_attaches_to_unequal_nodes_takes_what_the_smallest_has(tmp_path):
    """With the mean srun refused the smaller one."""
    job = "JobId=4711 NumCPUs=65 Nodes=n[1-2] CPU_IDs=0-11,24-58 Mem=0 GRES=gpu:2(IDX:0-1)"
    answers = {"squeue": f"{os.getuid()} RUNNING 3 n[1-3]", "srun": '"$@"',
               "scontrol": f"'{job} Nodes=n3 CPU_IDs=0-15,20 Mem=0 GRES='"}
    for name, words in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\necho {words}\n")
        (tmp_path / name).chmod(0o755)
    script = [ROOT / "sbatch" / "interactive.sh", "4711", "bash"]
    for more, cpus in (({}, 8), ({"RANKS_PER_NODE": "40"}, 1), ({"CPUS_PER_RANK": "3"}, 3)):
        env = given(MASTER_ADDR="n1", MASTER_PORT="4000", **more)
        done = subprocess.run(script, env=env | {"PATH": f"{tmp_path}:{env['PATH']}"},
                              text=True, capture_output=True)
        assert f"--cpus-per-task={cpus} " in done.stdout, done.stderr


# ---- peers


def meet(*stories: str, timeout_s=30.0, nodes=9, **extra: str) -> list[dict]:
    """What the ranks of peer_ranks.py say, each on a pretended node or all on one. They are forked
    from here, where torch is imported."""
    env = given(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port("127.0.0.1")), SLURM_JOB_ID="7",
        WORLD_SIZE=str(len(stories)), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
        SLURM_JOB_NODELIST=f"n[1-{len(stories)}]", SLURM_TASKS_PER_NODE=f"1(x{len(stories)})",
    ) | extra
    reader, writer = os.pipe()

    def play() -> bool:
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = [str(timeout_s), str(nodes), *stories]
        with os.fdopen(writer, "w") as sys.stdout:
            peer_ranks.main()
        return True

    child = start_child(play)
    os.close(writer)
    try:
        with os.fdopen(reader) as answer:
            said = answer.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = exit_code(child)
    assert said, f"exit code {code}"
    return json.loads(said)


@pytest.fixture
def place() -> Iterator[str]:
    """A file as ranks of one node get one: no other user can open it."""
    with open(os.memfd_create("rendezvous")) as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def test_nodes_that_reach_each_other_train():
    assert meet("ok", "ok") == [{"total": 2.0}] * 2


def test_the_store_of_several_nodes_listens_at_master_addr_and_nowhere_else():
    port = free_port("127.0.0.2")
    looks, other = meet("looks", "ok", MASTER_ADDR="127.0.0.2", MASTER_PORT=str(port))
    assert (looks["total"], other) == (2.0, {"total": 2.0})
    assert ["127.0.0.2", port] in looks["listens"]
    assert {address for address, _ in looks["listens"]} <= {"127.0.0.1", "127.0.0.2"}, "Gloo: lo"


def test_a_port_that_somebody_has_taken_is_no_place_to_meet():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = meet("ok", "absent", timeout_s=5, MASTER_PORT=str(taken.getsockname()[1]))
    assert "(rank 0) has no answer" in said[0]["error"]
    assert "Address already in use" in said[0]["error"]


def test_ranks_of_one_node_meet_in_a_file_where_a_stranger_has_their_port(place):
    """He answers what he likes, as a store of his own: nobody asks."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        looks, other = meet("looks", "ok", nodes=1, MASTER_PORT=port, ELASTIC_RENDEZVOUS=place)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        if os.getuid() == 0:
            assert not as_nobody(lambda: os.access(place, os.R_OK) or os.access(place, os.W_OK))
    assert (looks["total"], other) == (2.0, {"total": 2.0})
    assert {address for address, _ in looks["listens"]} <= {"127.0.0.1"}, "Gloo: lo"


def test_a_rank_that_does_not_come_to_the_file_is_named(place):
    (said,) = meet("ok", "absent", nodes=1, timeout_s=2, ELASTIC_RENDEZVOUS=place)
    assert said["error"].endswith("of 2 ranks did not come within 1.8 s")


def test_without_rank_0_the_others_leave_the_file(place):
    (said,) = meet("absent", "ok", nodes=1, timeout_s=2, ELASTIC_RENDEZVOUS=place)
    assert "(rank 1) has no answer from rank 0" in said["error"]


def test_every_rank_names_the_pairs_of_nodes_that_cannot_talk():
    said = meet("ok", "nobody", "ok")
    where = "cannot reach node n2 at 127.0.0.1 (lo): Connection refused"
    assert [each["error"] for each in said] == [f"node n1 {where}; node n3 {where}"] * 3
    assert "GLOO_SOCKET_IFNAME" in said[0]["hint"]


def test_a_node_that_answers_nothing_is_named_after_the_timeout():
    said = meet("deaf", "ok")
    wanted = "node n2 cannot reach node n1 at 127.0.0.1 (lo): timed out"
    assert [each["error"] for each in said] == [wanted] * 2


def test_a_rank_that_does_not_come_is_named_with_its_node():
    said = meet("ok", "absent", timeout_s=5)
    wanted = "rank 1 (node n2) of 2 ranks did not come within 4.5 s"
    assert [each["error"] for each in said] == [wanted]


def test_an_interface_that_is_not_there_is_named_and_the_others_listed():
    (said,) = meet("ok", "absent", GLOO_SOCKET_IFNAME="ib9")
    assert said["error"].endswith("GLOO_SOCKET_IFNAME = 'ib9' has no IPv4 address")
    assert "lo" in said["hint"]


def test_a_job_on_one_node_opens_no_connection():
    """Its one leader is not connected to: a port at which nobody listens does not matter."""
    assert meet("nobody", "ok", nodes=1) == [{"total": 2.0}] * 2


@pytest.mark.parametrize(
    ("known_as", "here", "master"),
    [("deb", "deb", "10.0.0.2"), ("deb", "other", "deb"), ("127.0.0.1", "deb", "127.0.0.1"),
     ("localhost", "deb", "localhost"), ("10.9.9.9", "deb", "10.9.9.9")],
)
def test_a_name_that_means_loopback_on_its_own_node_is_no_place_to_meet(
    node, known_as, here, master
):
    """Debian has `127.0.1.1 deb` in /etc/hosts: rank 0 took lo, and nobody else could reach it."""
    node.interfaces(ETH)
    for name, script in (("getent", '[ "$2" != deb ] || echo "127.0.1.1 STREAM deb"'),
                         ("scontrol", f"case $* in *hostnames*) echo deb ;; "
                                      f"*) echo NodeName=deb NodeAddr={known_as} x ;; esac")):
        (node.folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (node.folder / "bin" / name).chmod(0o755)
    env = given(PATH=f"{node.folder / 'bin'}:{os.environ['PATH']}", SLURMD_NODENAME=here)
    line = f'source "{ROOT}/sbatch/network.sh"; elastic::master_addr "deb,n2"'
    assert subprocess.check_output(["bash", "-euc", line], env=env, text=True) == f"{master}\n"


def test_the_first_port_of_a_job_that_nobody_has(tmp_path):
    def port(job: int) -> int:
        line = f'source "{ROOT}/sbatch/network.sh"; elastic::master_port {job} 127.0.0.1'
        return int(subprocess.check_output(["bash", "-euc", line]))

    job = free_port("127.0.0.1") * 20000 + 4711
    first = port(job)
    assert 12000 + 4711 <= first < 32768
    with socket.create_server(("127.0.0.1", first)):
        assert port(job) > first
    wait_until(lambda: port(job) == first, 5, "the port is free again")
