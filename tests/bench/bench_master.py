"""The master under many workers: round time and CPU with 64, 256 and 1,024 simulated ones.

    .venv/bin/python tests/bench/bench_master.py [--workers 64,256,1024]

The master, its Redis and the run directory are real. One process plays all workers through the
same store and transport: it renews every lease each five seconds, asks for samples, delivers a
tiny delta (64 parameters) and waits for the next version. `player` is that process's own share of
the time: a round cannot be shorter than it takes to play it.

Predicted before the first measurement: 1,024 workers in 3 s a round, 40 % of one core.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from figures import ROOT, cpu_seconds, record, scratch

sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests")]
from elastic.base import config as configuration  # noqa: E402
from elastic.base.errors import TryAgain  # noqa: E402
from elastic.local.store import Ask  # noqa: E402
from elastic.local.transport import Transport  # noqa: E402
from elastic.run.records import Header  # noqa: E402
from elastic.run.rundir import Control, RunDir  # noqa: E402
from elastic.saved.codec import CODECS  # noqa: E402
from elastic.saved.layout import Layout  # noqa: E402
from elastic.saved.versions import VersionDraft  # noqa: E402
from helpers import commit_of  # noqa: E402
from stores import BothSides  # noqa: E402

ROUNDS = 5
LAYOUT = Layout.of([("weight", (64,))], 1 << 20)
TOML = """
[run]
name = "crowd"
scheduler = "local"
task = "bench_task:Flat"
[elastic]
max = {workers}
reconcile_interval = "1h"
[train]
max_tokens = 1_000_000_000
[local_sgd]
compression = "none"
cold_start = 0
min_deadline = "5m"
last_call = "5m"
[checkpoint]
min_free = "100mb"
[health]
heartbeat = "5s"
lease = "60s"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="64,256,1024")
    for workers in map(int, parser.parse_args().workers.split(",")):
        with scratch() as folder:
            measure(Path(folder), workers)


def measure(folder: Path, workers: int) -> None:
    os.environ["ELASTIC_HOME_DIR"] = str(folder / "home")
    run = make_run(folder, workers)
    log = (folder / "log").open("wb")
    master = subprocess.Popen(
        [sys.executable, "-m", "elastic.train.start", "master", str(run.path)],
        stdout=log, stderr=log,
        env={**os.environ, "PYTHONPATH": str(ROOT / "lib")}, start_new_session=True,
    )
    try:
        crowd = Crowd(run, workers)
        crowd.join()
        crowd.round()  # the first one waits for the master to load
        before, began, played = cpu_seconds(master.pid), time.monotonic(), time.process_time()
        times = [crowd.round() for _ in range(ROUNDS)]
        seconds = time.monotonic() - began
        cpu = (cpu_seconds(master.pid) - before) / seconds
        player = (time.process_time() - played) / ROUNDS
    finally:
        os.killpg(master.pid, signal.SIGKILL)
        master.wait()
    case = f"{workers} workers"
    record("master", f"{case}: player, per round", player, "s")
    record("master", f"{case}: round", statistics.median(times), "s", "player", player)
    record("master", f"{case}: master's CPU", cpu, "cores")


def make_run(folder: Path, workers: int) -> RunDir:
    path = folder / "crowd.toml"
    path.write_text(TOML.format(workers=workers))
    config = configuration.load(path, site=Path(os.devnull))
    control = Control("local", "running", 1, workers)
    run = RunDir.create(folder / "runs", config, control, {})
    draft = VersionDraft(run, 0, "bench")
    files = draft.write_fragment(LAYOUT, 0, torch.zeros(64), torch.zeros(64))
    draft.commit(LAYOUT, files, commit_of(
        time=time.time(), layout=LAYOUT.hash, dataset_samples=10**9, total_tokens=10**9
    ))
    return run


class Crowd:
    """All workers of the run, one after the other."""

    def __init__(self, run: RunDir, workers: int):
        self.run, self.workers, self.sequence = run, workers, 0
        self.store = self._connect()
        self.transport = Transport(run)
        self.data = CODECS["none"].encode(torch.full((64,), 1e-3))
        self.version = 0
        self.beaten = 0.0

    def _connect(self) -> BothSides:
        deadline = time.monotonic() + 60
        while True:
            try:
                return BothSides.open(self.run)
            except TryAgain:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def fields(self, state: str) -> dict:
        return {"job_id": "0", "node": "bench", "pid": 0, "state": state, "version": self.version,
                "step": 1, "steps_total": 1, "tokens_per_s": 1.0, "loss": 1.0}

    def join(self) -> None:
        for slot in range(self.workers):
            self.run.slots.claim(slot, {"time": time.time()})
            self.store.lease(slot, 1, self.fields("training"), 60.0)

    def beat(self) -> None:
        if time.monotonic() - self.beaten < 5.0:
            return
        self.beaten = time.monotonic()
        for slot in range(self.workers):
            self.store.lease(slot, 1, self.fields("training"), 60.0)

    def round(self) -> float:
        """One round of everybody; returns its seconds."""
        began = time.monotonic()
        self.sequence += 1
        asks = [Ask(slot, 1, self.sequence, 4, ()) for slot in range(self.workers)]
        for ask in asks:
            self.store.ask(ask)
        for ask in asks:
            self.beat()
            while (granted := self.store.granted(ask, 1.0)) is None:
                self.beat()
                self.store.ask(ask)
            self.deliver(ask.slot, granted)
        while int(self.store.master()["version"]) == self.version:
            self.beat()
            time.sleep(0.01)
        self.version = int(self.store.master()["version"])
        return time.monotonic() - began

    def deliver(self, slot: int, samples: list) -> None:
        part = self.transport.put((slot, 1, self.version), 0, self.data)
        header = Header(
            run=self.run.key, slot=slot, attempt=1, job_id="0", base=self.version,
            layout=LAYOUT.hash, codec="none", steps=1, tokens=4, samples=tuple(samples), loss=1.0,
            first_loss=1.0, fragments=(part,),
        )
        self.store.offer(slot, 1, self.version, asdict(header))


if __name__ == "__main__":
    main()
