"""`make soak`: chaos on a private Slurm, measured against the same run before any of it.

    python tests/soak.py --workers 16 --kills 10m --all 30m

Two runs on one sandbox, one after the other: the first has workers killed and preempted, one every
29 s on average; the second has every kind of fault that can be done here. Both are watched
undisturbed for a while first (`--before`). What is outside a run and no fault of a user's goes
wrong beside the second: Slurm's controller hangs, the clocks of the jobs are off. Inner steps take
a fixed wall time, most of it waiting: that stands in for a GPU, so that 16 workers fit on two
cores and what is measured is the time that faults cost, not how CPUs are shared.

The clocks of the jobs go wrong by a trick (skewed/sitecustomize.py): one machine has one clock.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.base.errors import TryAgain
from elastic.base.keys import TIME, parse
from elastic.jobs.reconcile import remembered
from elastic.lab.sandbox import Sandbox, Shape
from elastic.local.store import Store
from elastic.people import views
from elastic.run.rundir import RunDir
from helpers import ROOT, elastic, environment, wait_until
from running import TESTS, toml
from slurm_sandbox import hang_controller

FAST = ("MessageTimeout=5", "SlurmdTimeout=15", "KillWait=2", "MinJobAge=3600")
CRON_S = 5.0
CALM_S = 15.0  # between two troubles outside the run
HUNG_S = 10.0
SKEW_S, SKEWED_S = 90, 20.0
SETTINGS = {
    "run.task": "tiny_task:Tiny",
    "run.scheduler": "slurm",
    "slurm.partition": "preempt",
    "slurm.master_partition": "cpu",
    "elastic.min": 1,
    "elastic.backoff": "0.2s",
    "elastic.max_failures": 50,
    "elastic.reconcile_interval": "5s",
    "train.batch_size": 4,
    "train.threads": 1,
    "train.epochs": 1,
    "checkpoint.min_free": "1mb",
    "health.heartbeat": "1s",
    "health.lease": "5s",
    "health.stall_after": "5s",
}


class Stage:
    """A sandbox, a place for runs, and the cron of their user."""

    def __init__(self, folder: Path, workers: int):
        self.folder, self.workers = folder, workers
        self.box = Sandbox(folder / "box")
        self.box.up(Shape(nodes=workers, gpus=1, grace_s=5, settings=FAST))
        self.env = environment(folder, PYTHONPATH=str(TESTS), **self.box.environment())
        self.pace, self._over = folder / "pace", threading.Event()
        self._clock = folder / "clock"
        self._clock.write_text("+0\n")
        self.in_jobs = {"PYTHONPATH": f"{TESTS}/skewed:{TESTS}",
                        "FAKETIME_TIMESTAMP_FILE": str(self._clock)}

    def submit(self, name: str, step_s: float, samples: int, **settings) -> RunDir:
        """Start a run whose inner steps take `step_s`."""
        self.pace.write_text(str(step_s))
        file = self.folder / f"{name}.toml"
        every = SETTINGS | {"task.pace": str(self.pace), "task.samples": samples,
                            "elastic.max": self.workers, **settings}
        file.write_text("".join(f"{line}\n" for line in toml(every)))
        answer = elastic("submit", file, "--no-try", env=self.env | self.in_jobs, timeout_s=120)
        if answer.returncode != 0:
            raise SystemExit(answer.stdout + answer.stderr)
        return RunDir(self.folder / "runs" / name)

    def chaos(self, run: RunDir, **options: object) -> dict:
        """Do faults to a run once all its workers train; the report."""
        wait_until(lambda: len(_training(run)) == self.workers, 120, "all workers train")
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [str(ROOT / "bin/elastic-chaos"), run.name, *words, "--json"]
        answer = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, text=True)
        if not answer.stdout:
            raise SystemExit(f"elastic-chaos ended with {answer.returncode}")
        return json.loads(answer.stdout)

    def finish(self, run: RunDir) -> dict:
        """Let a run come to its end at full speed; its audit, checksums included."""
        self.pace.write_text("0")
        wait_until(lambda: _settled(run), 300, "the end of the run and of its jobs")
        return json.loads(elastic("audit", run.name, "--files", "--json", env=self.env).stdout)

    def cron(self) -> None:
        """What a crontab does, more often than one can."""
        while not self._over.wait(CRON_S):
            elastic("reconcile", env=self.env)

    @contextlib.contextmanager
    def troubled(self) -> Iterator[None]:
        """Around the run, something goes wrong again and again."""
        over = threading.Event()
        trouble = threading.Thread(target=self._trouble, args=[over])
        trouble.start()
        try:
            yield
        finally:
            over.set()
            trouble.join()

    def _trouble(self, over: threading.Event) -> None:
        for skew_s in itertools.cycle((SKEW_S, -SKEW_S)):
            if over.wait(CALM_S):
                return
            hang_controller(self.box, HUNG_S)
            if over.wait(HUNG_S + CALM_S):
                return
            self._clock.write_text(f"{skew_s:+d}\n")
            over.wait(SKEWED_S)
            self._clock.write_text("+0\n")

    def close(self) -> None:
        self._over.set()
        self.box.down()


def _settled(run: RunDir) -> bool:
    """Is it over, and does the reconcile pass know the ends of all its jobs?"""
    memory = remembered(run, time.time())
    return bool(memory.closing) and memory.is_closed(memory.closing)


def _training(run: RunDir) -> list:
    with contextlib.suppress(TryAgain), contextlib.closing(Store.open(run)) as store:
        return [slot for slot in store.slots().values() if slot.state == "training"]
    return []


@contextlib.contextmanager
def stage(workers: int) -> Iterator[Stage]:
    """A stage that ends with everything on it, however that comes."""
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    folder.chmod(0o711)
    (folder / "runs").mkdir()
    there = None
    try:
        there = Stage(folder, workers)
        threading.Thread(target=there.cron, daemon=True).start()
        yield there
    finally:
        if there:
            there.close()
        shutil.rmtree(folder, ignore_errors=True)


def soak(there: Stage, name: str, step_s: float, settings: dict, **options: object) -> dict:
    """One run under chaos, to its end. Its size is what it would train in that time undisturbed."""
    seconds = sum(parse(TIME, options[each]) for each in ("before", "for"))
    per_s = there.workers * SETTINGS["train.batch_size"] / step_s
    run = there.submit(name, step_s, int(per_s * seconds), **settings)
    with there.troubled() if "faults" not in options else contextlib.nullcontext():
        report = there.chaos(run, **options)
    report["audit"] = there.finish(run)
    views.console().print(f"\n{name}: {there.workers} workers, steps of {step_s} s")
    views.console().print(views.chaos_view(report))
    return report


def main() -> int:
    ask = argparse.ArgumentParser()
    ask.add_argument("--workers", type=int, default=16)
    ask.add_argument("--kills", default="10m", help="how long workers are killed; 0: not at all")
    ask.add_argument("--all", default="30m", help="how long everything is done; 0: not at all")
    ask.add_argument("--before", default="3m", help="how long each is watched undisturbed")
    ask.add_argument("--seed", type=int, default=1)
    given = ask.parse_args()
    often = {"before": given.before, "every": "29s", "seed": given.seed}
    with stage(given.workers) as there:
        steady = {"local_sgd.inner_steps": 10}
        wanted = {"kills": {"for": given.kills, "faults": "kill-worker,preempt"},
                  "all": {"for": given.all}}
        reports = [
            soak(there, name, 0.5, steady, **options, **often)
            for name, options in wanted.items()
            if parse(TIME, options["for"]) > 0
        ]
    return int(any(report["audit"]["problems"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
