"""A node that loses its power is missed, by a line that the real rank.sh holds on it.

pytest tests/sync/test_keepalive.py; the loss itself needs root: a network of its own, switched off.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from elastic.sync import keepalive
from elastic.sync.keepalive import Keepalive
from helpers import PATIENCE, ROOT, wait_until

# In a network of its own, where "off" is what a node without power looks like from outside.
STORY = """
import subprocess, sys, time
from elastic.sync import keepalive
from test_keepalive import rank
keepalive.IDLE_S = keepalive.EVERY_S = 1
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
lines = keepalive.Keepalive("127.0.0.1")
with rank(lines, "n7", "sleep", "600"):
    while "n7" not in lines._lines.values():
        assert not lines.lost()
        time.sleep(0.05)
    time.sleep(3)
    assert not lines.lost(), "it answers"
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began = time.monotonic()
    while not (node := lines.lost()):
        time.sleep(0.05)
    print(node, round(time.monotonic() - began))
"""


@contextlib.contextmanager
def rank(lines: Keepalive, node: str, *command: str, local_rank: int = 0):
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(local_rank), "SLURMD_NODENAME": node,
           "ELASTIC_KEEPALIVE": lines.place}
    program = [ROOT / "sbatch" / "rank.sh", *command]
    process = subprocess.Popen(program, env=os.environ | own, process_group=0)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def lines():
    made = Keepalive("127.0.0.1")
    yield made
    made.close()


def knows(lines: Keepalive, *nodes: str) -> None:
    def heard() -> bool:
        assert not lines.lost()
        return sorted(lines._lines.values()) == sorted(nodes)

    wait_until(heard, 10, f"lines to {nodes}")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a network of its own")
def test_a_node_without_power_is_missed():
    paths = {"PYTHONPATH": f"{ROOT}/lib:{ROOT}/tests:{ROOT}/tests/sync"}
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--kill-child", sys.executable, "-c", STORY],
        env=os.environ | paths, capture_output=True, text=True, timeout=120 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    node, after_s = done.stdout.split()
    assert node == "n7"
    assert int(after_s) < 30  # a second of silence, and three probes a second apart


def test_a_rank_that_ends_or_is_killed_is_no_node_that_is_gone(lines, tmp_path):
    end = tmp_path / "end"
    until_then = ("sh", "-c", f"until [ -e {end} ]; do sleep 0.1; done")
    with rank(lines, "n1", "sleep", "600") as killed, rank(lines, "n2", *until_then) as ended:
        knows(lines, "n1", "n2")
        end.touch()
        ended.wait()
        knows(lines, "n1")
        killed.terminate()
        killed.wait()
        knows(lines)


def test_one_rank_of_a_node_holds_its_line_until_the_launcher_ends_it(lines):
    with (rank(lines, "n1", "sleep", "600") as first,
          rank(lines, "n1", "sleep", "600", local_rank=1) as other):
        knows(lines, "n1")
        first.kill()  # the line stays with what it has started: nobody is told
        first.wait()
        other.terminate()
        other.wait()
        knows(lines, "n1")


def test_a_stranger_and_a_launcher_that_is_gone_change_nothing(lines):
    port = int(lines.place.split(":")[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"password n3\n")
        wait_until(lambda: not lines.lost() and stranger.recv(1) == b"", 10, "it is sent away")
    lines.close()
    with rank(lines, "n1", "true") as alone:
        assert alone.wait(20 * PATIENCE) == 0


def test_lines_that_say_nothing_do_not_take_all_files(lines, monkeypatch):
    monkeypatch.setattr(keepalive, "MOST_SILENT", 8)
    port = int(lines.place.split(":")[1])
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        with rank(lines, "n1", "sleep", "600"):
            wait_until(lambda: lines.lost() or "n1" in lines._lines.values(), 10, "the node's line")
            assert len(lines._lines) <= 8 + 1


def test_the_limits_are_the_kernels(lines):
    port = int(lines.place.split(":")[1])
    with socket.create_connection(("127.0.0.1", port)):
        wait_until(lambda: lines.lost() or lines._lines, 10, "a line")
        (line,) = lines._lines
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == keepalive.PROBES
