"""From a preemption to the first new step, and useful steps, beside a plain `--requeue` script.

    .venv/bin/python tests/bench/bench_restart.py [--preemptions 3] [--every 60]

A real Slurm of this machine takes the job's node away every 60 s for a second. Both programs train
the same model (1M parameters) on one CPU rank; a step waits 50 ms, which stands in for a GPU. Ours
is a run in sync mode with its defaults. The plain script saves every 100 steps and leaves the rest
to Slurm, whose requeue delay is 12 s here and 121 s on a site that has not changed cred_expire:
`useful steps` counts it as it is here, which favours the plain script.

The split of a restart: Slurm's wait (from the last step to the launcher's start), start-up
(launcher, imports, rendezvous), load, first step. Our share is all but Slurm's wait.

Predicted before the first measurement: our share 5 s, 1.8 times `import torch` and reading the
checkpoint; 90 % of the steps of an undisturbed run, the plain script 70 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import ROOT, record

sys.path.insert(0, str(ROOT / "lib"))
from elastic.lab.sandbox import Sandbox, Shape  # noqa: E402
from elastic.run.rundir import RunDir  # noqa: E402

HERE = Path(__file__).parent
STEP_S, SAVE_EVERY, GRACE_S = 0.05, 100, 5
PARAMETERS = 1_000_000
TOML = f"""
[run]
task = "bench_task:Paced"
mode = "sync"
folder = "{HERE}"
[task]
parameters = {PARAMETERS}
step_s = {STEP_S}
[train]
max_tokens = 1_000_000_000
batch_size = 1
device = "cpu"
threads = 1
[checkpoint]
min_free = "100mb"
[slurm]
partition = "preempt"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preemptions", type=int, default=3)
    parser.add_argument("--every", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eb-", dir="/tmp") as folder:
        home = Path(folder)
        home.chmod(0o711)
        box = Sandbox(home / "s")
        try:
            box.up(Shape(nodes=1, gpus=1, grace_s=GRACE_S))
            ours, events, checkpoint = run_ours(box, home, options)
            plain = run_plain(box, home, options)
        finally:
            box.down()
        report(ours, events, seconds_to_import_and_read(checkpoint), plain)


def run_ours(box: Sandbox, home: Path, options) -> tuple[list, list[dict], list[bytes]]:
    """Steps as (number, time), restarts as the events tell them, and the checkpoint's files."""
    path = home / "ours.toml"
    path.write_text(TOML)
    environment = {
        "HOME": str(home), "PATH": os.environ["PATH"], "ELASTIC_PYTHON": sys.executable,
        "ELASTIC_RUNS": str(home / "runs"), "ELASTIC_SITE": os.devnull, **box.environment(),
    }
    subprocess.run([ROOT / "bin/elastic-submit", path], env=environment, check=True)
    run = RunDir(home / "runs" / "ours")
    metrics = run.path / "metrics.jsonl"
    cron = [str(ROOT / "bin/elastic-reconcile")]

    def steps() -> list[tuple[int, float]]:
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return [(line["step"], line["time"]) for line in map(json.loads, lines)]

    def tick() -> None:
        subprocess.run(cron, env=environment, stdout=subprocess.DEVNULL)

    preempt_repeatedly(box, options, steps, tick)
    subprocess.run([ROOT / "bin/elastic-stop", "ours", "--now"], env=environment, check=True)
    newest = max(path for path in (run.path / "checkpoints").glob("step-*") if path.is_dir())
    files = [path for path in newest.iterdir() if path.is_file()]
    restarts = run.events()
    for event in restarts:
        if event["kind"] == "restore":
            event["launched"] = run.jobs.ending(event["job_id"])["started"]
    taken = steps()
    copy = [home / f"copy-{path.name}" for path in files]
    for source, target in zip(files, copy, strict=True):
        target.write_bytes(source.read_bytes())
    return taken, restarts, copy


def run_plain(box: Sandbox, home: Path, options) -> list:
    folder = home / "plain"
    folder.mkdir()
    script = [str(HERE / "plain_requeue.sh"), sys.executable, str(HERE / "plain_steps.py")]
    where = ("--partition=preempt", "--gres=gpu:1", f"--chdir={HERE}", f"--output={folder}/log")
    box.run("sbatch", *where, *script, str(folder), str(STEP_S), str(SAVE_EVERY))

    def steps() -> list[tuple[int, float]]:
        path = folder / "steps.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(number), float(at)) for number, at in map(str.split, lines)]

    preempt_repeatedly(box, options, steps, lambda: None)
    return steps()


def preempt_repeatedly(box: Sandbox, options, steps, tick) -> None:
    """Let it train, take the node away now and then, and once more train as long."""
    while not steps():
        tick()
        time.sleep(0.2)
    began = time.monotonic()
    for number in range(1, options.preemptions + 2):
        while time.monotonic() < began + number * options.every:
            tick()
            time.sleep(2.0)
        if number <= options.preemptions:
            where = ("--partition=high", "--exclusive", "--output=/dev/null", "--chdir=/")
            box.run("sbatch", *where, "--nodes=1", "--wrap=exec sleep 1")


def seconds_to_import_and_read(files: list[Path]) -> float:
    """`python -c "import torch"`, and reading a checkpoint's bytes once; the best of three."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        for path in files:
            path.read_bytes()
        took.append(time.monotonic() - began)
    return min(took)


def report(ours: list, events: list[dict], floor_s: float, plain: list) -> None:
    against = "import torch, read checkpoint"
    record("restart", against, floor_s, "s")
    restores = [event for event in events if event["kind"] == "restore"]
    parts = [split(ours, each) for each in restores if each["time"] > ours[0][1]]
    for name in ("Slurm's wait", "start-up", "load", "first step"):
        value = statistics.median(part[name] for part in parts)
        record("restart", f"{name}, median of {len(parts)}", value, "s", against, floor_s)
    shares = [sum(part.values()) - part["Slurm's wait"] for part in parts]
    record("restart", "our share", statistics.median(shares), "s", against, floor_s)
    gap = statistics.median(gaps(plain))
    mine = statistics.median(sum(part.values()) for part in parts)
    record("restart", "from last to first step", mine, "s", "plain --requeue", gap)
    possible = "undisturbed run"
    for name, taken in (("ours", ours), ("plain --requeue", plain)):
        hours = (taken[-1][1] - taken[0][1]) / 3600
        useful = len({number for number, _ in taken}) / hours
        rate = 3600 / statistics.median(b[1] - a[1] for a, b in zip(taken, taken[1:], strict=False))
        record("restart", f"useful steps per hour, {name}", useful, "1/h", possible, rate)


def split(steps: list, restore: dict) -> dict[str, float]:
    """Where the time between two steps went, over one restart."""
    before = max(at for _, at in steps if at < restore["time"])
    after = min(at for _, at in steps if at > restore["time"])
    loaded = restore["time"] - restore["load_s"]
    return {"Slurm's wait": restore["launched"] - before, "start-up": loaded - restore["launched"],
            "load": restore["load_s"], "first step": after - restore["time"]}


def gaps(steps: list) -> list[float]:
    """Pauses so long that the program was not there."""
    return [b[1] - a[1] for a, b in zip(steps, steps[1:], strict=False) if b[1] - a[1] > 1.5]


if __name__ == "__main__":
    main()
