"""What a round costs beside the inner steps: the stall of a worker, bytes, and memory.

    .venv/bin/python tests/bench/bench_round.py [--params 1,10,100] [--workers 2,4,8]
                                                [--compression none]

stall   seconds from the end of a worker's last inner step to the first one of the next round:
        delta, delivery, checks, merge, outer step, durable commit, pull. Median over workers and
        over the rounds that all workers are in, without the first of these.
copy    in the same run, right after: every worker's delta (float32) and every worker's parameters
        (bf16) copied once by `cp`, as many processes at a time as there are workers.
commit  likewise: the bytes of a version, written once and fsynced. A version is announced
        when it is durable, so no round can take less than copy and commit together.
up      bytes of a round's deltas, as the commit says; down: its parameters' files, once per worker.
memory  peak resident size, less that of a process that has only imported torch (master) or done one
        step of a tiny model (worker: an optimizer of torch's brings along 80 MB).

Predicted before the first measurement: stall 2.5 x copy (each delta byte is written once and read
twice, twelve bytes per parameter are committed durably); master 3.3 models; eight workers on two
cores 4 x the stall of two.
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from figures import BUILD, ROOT, available_bytes, record, scratch, status_bytes

sys.path.insert(0, str(ROOT / "lib"))
from elastic.run.records import Commit  # noqa: E402
from elastic.run.rundir import RunDir  # noqa: E402

ROUNDS = 5
OURS = (9, 15)  # bytes per parameter that a worker and the master need at least
PATIENCE_S = 600.0
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
cold_start = 0
inner_steps = 5
inner_state_every = 0
thin_rounds = false
[checkpoint]
min_free = "1gb"
[health]
heartbeat = "1s"
lease = "60s"
"""


@dataclass(frozen=True)
class Size:
    parameters: int
    workers: int

    def __str__(self) -> str:
        return f"{self.parameters // 1_000_000}M parameters, {self.workers} workers"

    @property
    def float32_bytes(self) -> int:
        """Of all workers' deltas."""
        return 4 * self.parameters * self.workers


def main() -> None:
    parser = size_options()
    parser.add_argument("--compression", default="none", help="some, with commas")
    options = parser.parse_args()
    idle = idle_bytes()
    for size in sizes(options):
        if fits(size, OURS, idle, "ours"):
            for compression in options.compression.split(","):
                measure(size, options.folder, idle, compression)


def size_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", default="1,10,100", help="millions of parameters")
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--folder", type=Path, default=BUILD, help="where the runs are made")
    return parser


def sizes(options) -> list[Size]:
    every = [map(int, text.split(",")) for text in (options.params, options.workers)]
    return [Size(millions * 1_000_000, workers) for millions, workers in itertools.product(*every)]


def fits(size: Size, needs: tuple[int, int], idle: dict[str, int], what: str) -> bool:
    """Is there memory for so many bytes per parameter of worker and master? If not, say so."""
    worker, master = needs
    each = idle["worker"] + worker * size.parameters
    needed = size.workers * each + idle["master"] + master * size.parameters
    there = available_bytes()
    if needed > there:
        print(f"left out: {what}: {size}: {needed / 1e9:.0f} GB of memory, {there / 1e9:.0f} free")
    return needed < there


def measure(size: Size, where: Path, idle: dict[str, int], compression: str = "none") -> float:
    """Records the figures of one size; returns the seconds of the plain copy."""
    with scratch(where) as name:
        folder = Path(name)
        try:
            run = start(folder, size, {"local_sgd.compression": compression})
            peaks = follow(run, size.workers)
            stop(run)
            copy_s, commit_s = copy_seconds(folder, size), commit_seconds(folder, size.parameters)
        finally:
            kill(folder)
        report_stall(f"{size}, {compression}", median_stall_s(run, size.workers), copy_s, commit_s)
        report_bytes(f"{size}, {compression}", size, full_rounds(run, size.workers))
    for role, peak in peaks.items():
        case, model = f"{size}, {compression}: {role}", 4 * size.parameters
        record("round", case, (peak - idle[role]) / 1e6, "MB", "model", model / 1e6)
    return copy_s


def report_stall(case: str, stall_s: float, copy_s: float, commit_s: float) -> None:
    record("round", f"{case}: copy", copy_s, "s")
    record("round", f"{case}: commit", commit_s, "s", "copy", copy_s)
    record("round", f"{case}: stall", stall_s, "s", "copy", copy_s)
    record("round", f"{case}: stall", stall_s, "s", "copy + commit", copy_s + commit_s)


def report_bytes(case: str, size: Size, commits: list[Commit]) -> None:
    up = statistics.median(commit.bytes for commit in commits)
    pulled = [f["bytes"] for f in commits[-1].files if Path(f["path"]).name.startswith("params")]
    down, dense = size.workers * sum(pulled), size.float32_bytes / 1e6
    record("round", f"{case}: up", up / 1e6, "MB", "float32", dense)
    record("round", f"{case}: down", down / 1e6, "MB", "float32", dense)


def start(folder: Path, size: Size, settings: dict[str, object]) -> RunDir:
    (folder / "round.toml").write_text(
        TOML.format(parameters=size.parameters, workers=size.workers)
    )
    shutil.copy(Path(__file__).with_name("bench_task.py"), folder)
    command = [str(ROOT / "bin/elastic-submit"), str(folder / "round.toml"), "--name", "round"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run(command, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
    return RunDir(folder / "runs" / "round")


def environment(folder: Path) -> dict[str, str]:
    own = {"ELASTIC_HOME_DIR": str(folder / "home"), "ELASTIC_RUNS": str(folder / "runs"),
           "ELASTIC_SITE": os.devnull, "ELASTIC_PYTHON": sys.executable}
    return {**os.environ, **own}


def follow(run: RunDir, workers: int) -> dict[str, int]:
    """Wait for the rounds; returns the peak resident bytes of the master and of a worker."""
    peaks = {"master": 0, "worker": 0}
    deadline = time.monotonic() + PATIENCE_S
    while len(full_rounds(run, workers)) < ROUNDS:
        for role in peaks:
            for pid in pids(run.path.parent.parent, f"elastic.train.start {role}"):
                peaks[role] = max(peaks[role], status_bytes(pid, "VmHWM"))
        if run.failed():
            sys.exit(f"the run failed: {run.failed()}")
        if time.monotonic() > deadline:
            sys.exit(f"{ROUNDS} rounds of {workers} workers took over {PATIENCE_S:.0f} s")
        time.sleep(0.2)
    return peaks


def full_rounds(run: RunDir, workers: int) -> list[Commit]:
    """The commits with a delta of every worker, but the first: somebody had just come."""
    return [commit for commit in run.commits.all() if len(commit.deltas) == workers][1:]


def stop(run: RunDir) -> None:
    run.set_control(state="stopped")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not pids(run.path.parent.parent, "elastic.train.start master"):
            return
        time.sleep(0.2)


def median_stall_s(run: RunDir, workers: int) -> float:
    deltas = [delta for commit in full_rounds(run, workers) for delta in commit.deltas]
    return statistics.median(delta.stall_s for delta in deltas if delta.stall_s > 0)


def copy_seconds(folder: Path, size: Size) -> float:
    """Median of three: the same bytes, copied by as many `cp` as there are workers."""
    sources = [(folder / "delta.bin", 4), (folder / "params.bin", 2)]
    for path, width in sources:
        path.write_bytes(os.urandom(1 << 20) * (width * size.parameters >> 20 or 1))
    times = []
    for _ in range(3):
        began = time.monotonic()
        for path, _width in sources:
            copies = [
                subprocess.Popen(["cp", str(path), str(folder / f"copy-{i}")])
                for i in range(size.workers)
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
    for module in (
        "elastic.train.start master",
        "elastic.local.worker.agent",
        "elastic.train.start worker",
    ):
        for pid in pids(folder, module):
            os.kill(pid, signal.SIGKILL)


def idle_bytes() -> dict[str, int]:
    """Peak resident bytes of processes that do nothing else."""
    step = (
        "from bench_task import Flat; task = Flat({'parameters': 64}); model = task.model();"
        "task.loss(model, torch.zeros(1)).backward(); task.optimizer(model).step()"
    )
    return {"master": peak_bytes("import torch"), "worker": peak_bytes(f"import torch; {step}")}


def peak_bytes(code: str) -> int:
    command = [sys.executable, "-c", f"{code}; import sys; print(1, flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent
    ) as process:
        process.stdout.readline()
        return status_bytes(process.pid, "VmHWM")


if __name__ == "__main__":
    main()
