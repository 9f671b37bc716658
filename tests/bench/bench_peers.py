"""Our round beside torchft's DiLoCo and hivemind's averager: stall, memory, bytes.

    .venv/bin/python tests/bench/bench_peers.py [--params 1,10,100] [--workers 2,4,8]

For each size, one after the other on this machine: our round (bench_round.py) and the plain copy,
then the same round of each other system (peer_replica.py): float32 parameters of as many replicas,
averaged over the loopback, with the outer step.

stall   from the end of a replica's last inner step to its first of the next round; median over
        replicas and rounds, without the first round. They keep all in memory; our master has
        committed a version durably by then.
moved   bytes over the loopback in a round, whoever sent them.
memory  peak resident size of a replica, less that of a process that has done one step of a tiny
        model; for the processes that hivemind starts beside it, of all together, nothing is
        subtracted, and what they share counts in each.

They are installed into build/peers, on top of this Python's packages, as peers.txt pins them. What
cannot be installed, or does not run, is skipped by name.

Predicted before the first measurement, 10M parameters and two replicas: torchft 3 x the copy (64
all-reduces by gloo at 1 GB/s, a handful of passes over the parameters), hivemind 15 x (its bytes
go through protobuf and a daemon with TLS), ours without overlap 4 x; in memory torchft 6 models a
replica, hivemind 5.
"""

import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_round
from bench_round import OURS, Size, fits, idle_bytes, size_options, sizes
from figures import BUILD, record, status_bytes

HERE = Path(__file__).parent
VENV = BUILD / "peers"
PYTHON = VENV / "bin" / "python"
# Bytes of a replica, and bytes per parameter, with the processes beside it: what was found.
NEEDS = {"torchft": (0, 25), "hivemind": (700_000_000, 48)}
ROUNDS = 4
PATIENCE_S = 120.0


class Skipped(Exception):
    """It cannot be measured here, and why."""


def main() -> None:
    options = size_options().parse_args()
    idle, there = idle_bytes(), [system for system in NEEDS if is_there(system)]
    for size in sizes(options):
        copy_s = 0.0
        if fits(size, OURS, idle, "ours"):
            copy_s = bench_round.measure(size, options.folder, idle)
        for system in there:
            fixed, each = NEEDS[system]
            if fits(size, (each, 0), {"worker": idle["worker"] + fixed, "master": 0}, system):
                with skipping(f"{system}, {size}"):
                    report(system, size, measure(system, size), idle["worker"], copy_s)


@contextlib.contextmanager
def skipping(what: str):
    try:
        yield
    except Skipped as error:
        print(f"skipped: {what}: {error}", flush=True)


# ---- their venv ---------------------------------------------------------------------------------


def is_there(system: str) -> bool:
    """Install it unless it is; if that fails, or it cannot be imported, say so."""
    with skipping(system):
        make_venv()
        where = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        call([*where, "--constraint", str(HERE / "peers.txt"), system], "not installed")
        call([str(PYTHON), "-c", f"import torch, {system}"], "not imported")
        return True
    return False


def make_venv() -> None:
    """A venv that finds this Python's packages, too; anew when peers.txt has changed."""
    ready = VENV / "ready"
    pins = hashlib.sha256((HERE / "peers.txt").read_bytes()).hexdigest()
    if ready.exists() and ready.read_text() == pins:
        return
    call([sys.executable, "-m", "venv", "--clear", str(VENV)], "no venv")
    own, ours = (subprocess.check_output([python, "-c", SITE], text=True).strip()
                 for python in (PYTHON, sys.executable))
    Path(own, "ours.pth").write_text(ours)
    ready.write_text(pins)


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def call(command: list[str], trouble: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise Skipped(f"{trouble}: {(answer.stderr.strip() or '?').splitlines()[-1]}")


# ---- a round of theirs --------------------------------------------------------------------------


def measure(system: str, size: Size) -> list[dict]:
    """What each replica answers, and the memory of its processes."""
    with (
        tempfile.TemporaryDirectory(prefix="peers-", dir="/tmp") as name,
        contextlib.ExitStack() as end,
    ):
        folder = Path(name)
        replicas = [start(system, size, rank, folder) for rank in range(size.workers)]
        for replica in replicas:
            end.callback(kill, replica)
        answers = wait_for(folder, replicas)
        if len({round(answer["sum"], 3) for answer in answers}) > 1:
            raise Skipped("its replicas differ")
        for answer, replica in zip(answers, replicas, strict=True):
            answer["peak"] = status_bytes(replica.pid, "VmHWM")
            others = [pid for pid in session(replica.pid) if pid != replica.pid]
            answer["others"] = sum(status_bytes(pid, "VmHWM") for pid in others)
    return answers


def start(system: str, size: Size, rank: int, folder: Path) -> subprocess.Popen:
    given = {"folder": folder, "rank": rank, "workers": size.workers,
             "parameters": size.parameters, "rounds": ROUNDS}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [str(PYTHON), str(HERE / "peer_replica.py"), system, *words], stdin=subprocess.PIPE,
            stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )


def wait_for(folder: Path, replicas: list[subprocess.Popen]) -> list[dict]:
    deadline = time.monotonic() + PATIENCE_S
    paths = [folder / f"answer-{rank}.json" for rank in range(len(replicas))]
    while not all(path.exists() for path in paths):
        for rank, replica in enumerate(replicas):
            if replica.poll() is not None:
                lines = (folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()
                raise Skipped(f"replica {rank} ended: {lines[-1] if lines else replica.returncode}")
        if time.monotonic() > deadline:
            raise Skipped(f"not done in {PATIENCE_S:.0f} s")
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in paths]


def kill(replica: subprocess.Popen) -> None:
    """With all that it has started, also what made a process group of its own."""
    for pid in session(replica.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    replica.wait()


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


def report(system: str, size: Size, answers: list[dict], idle: int, copy_s: float) -> None:
    case, model = f"{size}, {system}", 4 * size.parameters
    stall_s = statistics.median(stall for answer in answers for stall in answer["stalls_s"])
    record("peers", f"{case}: stall", stall_s, "s", "copy" if copy_s else "", copy_s)
    moved = statistics.median(answer["bytes"] for answer in answers)
    record("peers", f"{case}: moved", moved / 1e6, "MB", "float32", size.float32_bytes / 1e6)
    peak, others = (max(answer[key] for answer in answers) for key in ("peak", "others"))
    record("peers", f"{case}: replica", (peak - idle) / 1e6, "MB", "model", model / 1e6)
    if others:
        record("peers", f"{case}: beside it", others / 1e6, "MB", "model", model / 1e6)


if __name__ == "__main__":
    main()
