"""What a round costs beside the inner steps: the stall of a worker, and memory.

    .venv/bin/python tests/bench/bench_round.py [--params 1,10,100] [--workers 2,4]

stall   seconds from the end of a worker's last inner step to the first one of the next round:
        delta, delivery, checks, merge, outer step, durable commit, pull. Median over rounds and
        workers, without the first round.
copy    in the same run, right after: every worker's delta (float32) and every worker's parameters
        (bf16) copied once by `cp`, as many processes at a time as there are workers.
commit  likewise: the bytes of a version, written once and fsynced. A version is announced
        when it is durable, so no round can take less than copy and commit together.
memory  peak resident size, less that of a process that has only imported torch.

Predicted before the first measurement: stall 2.5 x copy (each delta byte is written once and read
twice, twelve bytes per parameter are committed durably); master 3.3 models.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import ROOT, record, status_bytes

sys.path.insert(0, str(ROOT / "lib"))
from elastic.rundir import RunDir  # noqa: E402

ROUNDS = 6
TOML = """
[run]
task = "bench_task:Flat"
scheduler = "local"
[task]
parameters = {parameters}
[elastic]
max = {workers}
reconcile_interval = "1m"
[train]
max_tokens = 1_000_000
batch_size = 1
threads = 1
schedule = "constant"
[local_sgd]
compression = "none"
inner_steps = 5
inner_state_every = 0
thin_rounds = false
[checkpoint]
min_free = "1gb"
[health]
heartbeat = "1s"
lease = "60s"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", default="1,10,100", help="millions of parameters")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--folder", default=ROOT / "build", help="where the run directory is made")
    options = parser.parse_args()
    idle = idle_bytes()
    for millions in map(int, options.params.split(",")):
        for workers in map(int, options.workers.split(",")):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                measure(Path(folder), millions * 1_000_000, workers, idle)


def measure(folder: Path, parameters: int, workers: int, idle: int) -> None:
    run = start(folder, parameters, workers)
    try:
        peaks = follow(run, workers)
        stop(run)
        stall_s = median_stall_s(run)
        copy_s = copy_seconds(folder, parameters, workers)
        commit_s = commit_seconds(folder, parameters)
    finally:
        kill(folder)
    case = f"{parameters // 1_000_000}M parameters, {workers} workers"
    model = 4 * parameters
    record("round", f"{case}: copy", copy_s, "s")
    record("round", f"{case}: commit", commit_s, "s", "copy", copy_s)
    record("round", f"{case}: stall", stall_s, "s", "copy", copy_s)
    record("round", f"{case}: stall", stall_s, "s", "copy + commit", copy_s + commit_s)
    record("round", f"{case}: master", (peaks["master"] - idle) / 1e6, "MB", "model", model / 1e6)
    record("round", f"{case}: worker", (peaks["worker"] - idle) / 1e6, "MB", "model", model / 1e6)


def start(folder: Path, parameters: int, workers: int) -> RunDir:
    (folder / "round.toml").write_text(TOML.format(parameters=parameters, workers=workers))
    shutil.copy(Path(__file__).with_name("bench_task.py"), folder)
    command = [str(ROOT / "bin/elastic-submit"), str(folder / "round.toml"), "--name", "round"]
    subprocess.run(command, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
    return RunDir(folder / "runs" / "round")


def environment(folder: Path) -> dict[str, str]:
    own = {"ELASTIC_HOME_DIR": str(folder / "home"), "ELASTIC_RUNS": str(folder / "runs"),
           "ELASTIC_SITE": os.devnull, "ELASTIC_PYTHON": sys.executable}  # fmt: skip
    return {**os.environ, **own}


def follow(run: RunDir, workers: int) -> dict[str, int]:
    """Wait for the rounds; returns the peak resident bytes of the master and of a worker."""
    peaks = {"master": 0, "worker": 0}
    deadline = time.monotonic() + 600
    while run.newest_version() < ROUNDS and time.monotonic() < deadline:
        for role in peaks:
            for pid in pids(run.path.parent.parent, f"elastic.start {role}"):
                peaks[role] = max(peaks[role], status_bytes(pid, "VmHWM"))
        if run.failed():
            sys.exit(f"the run failed: {run.failed()}")
        time.sleep(0.2)
    return peaks


def stop(run: RunDir) -> None:
    run.set_control(state="stopped")
    deadline = time.monotonic() + 60
    while pids(run.path.parent.parent, "elastic.start master") and time.monotonic() < deadline:
        time.sleep(0.2)


def median_stall_s(run: RunDir) -> float:
    deltas = [d for commit in run.commits() if commit["version"] > 2 for d in commit["deltas"]]
    return statistics.median(delta["stall_s"] for delta in deltas if delta["stall_s"] > 0)


def copy_seconds(folder: Path, parameters: int, workers: int) -> float:
    """Median of three: the same bytes, copied by as many `cp` as there are workers."""
    delta, params = folder / "delta.bin", folder / "params.bin"
    delta.write_bytes(os.urandom(1 << 20) * (4 * parameters >> 20 or 1))
    params.write_bytes(os.urandom(1 << 20) * (2 * parameters >> 20 or 1))
    times = []
    for _ in range(3):
        began = time.monotonic()
        for source in (delta, params):
            copies = [
                subprocess.Popen(["cp", str(source), str(folder / f"copy-{i}")])
                for i in range(workers)
            ]
            for copy in copies:
                copy.wait()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def commit_seconds(folder: Path, parameters: int) -> float:
    """Median of three: ten bytes per parameter, written and fsynced."""
    times, block = [], os.urandom(1 << 20)
    for _ in range(3):
        began = time.monotonic()
        with (folder / "version").open("wb") as file:
            for _ in range(10 * parameters >> 20 or 1):
                file.write(block)
            os.fsync(file.fileno())
        times.append(time.monotonic() - began)
    return statistics.median(times)


def pids(folder: Path, module: str) -> list[int]:
    """Processes of this benchmark's run that execute `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            marked = str(folder).encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if module.encode() in line and marked:
            found.append(int(entry.name))
    return found


def kill(folder: Path) -> None:
    for module in ("elastic.start master", "elastic.agent", "elastic.start worker"):
        for pid in pids(folder, module):
            os.kill(pid, signal.SIGKILL)


def idle_bytes() -> int:
    code = (
        "import torch, time; import torch.distributed.tensor;"
        "torch.optim.SGD([torch.zeros(1)], lr=1); print(1, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    size = status_bytes(process.pid, "VmHWM")
    process.kill()
    return size


if __name__ == "__main__":
    main()
