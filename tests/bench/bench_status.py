"""What a look at 50 runs with 1,024 workers costs: elastic-status and a reconcile pass.

    .venv/bin/python tests/bench/bench_status.py [--runs 50] [--workers 1024]

CPU of the whole process, that of Redis and of Slurm's commands not counted, against a Python that
does nothing; and how much of it is there without any run. Real: the commands, run directories with
commits, events and exit records, a redis-server with every worker's lease. Not real: squeue, which
prints a listing from a file, and the workers.

Aim: 0.3 s beyond Python itself to start. Predicted before the first measurement: 0.25 s to start,
0.8 s for status of all (50 connections to Redis, 50 dry passes), 0.5 s for a pass.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "lib"), str(HERE.parent)]

from figures import ROOT, record  # noqa: E402

from conftest import start_redis  # noqa: E402
from elastic.base import config as configuration  # noqa: E402
from elastic.jobs.sched import job_name  # noqa: E402
from elastic.run.rundir import Control, Endpoint, RunDir  # noqa: E402
from helpers import commit_of, delta_of, environment  # noqa: E402
from stores import BothSides  # noqa: E402

TRIES = 5
VERSIONS, EVENTS = 60, 400
NOTHING = "pass"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        env = environment(home, PATH=f"{home}:{os.environ['PATH']}")
        del env["ELASTIC_PYTHON"]  # it would be looked at first, at the cost of a second Python
        nothing_s = cpu_s([sys.executable, "-c", NOTHING], env)
        record("status", "python: nothing", nothing_s, "s CPU")
        for command in ("status", "reconcile"):
            measure(f"no runs: {command}", [command], env, nothing_s)
        os.environ.update(env)
        server = start_redis(home)
        try:
            url = f"redis://:{server.password}@127.0.0.1:{server.endpoint.port}"
            make(home, url, options.runs, options.workers)
            words = f"{options.runs} runs, {options.workers} workers"
            for command in (["status"], ["status", "run-00"], ["reconcile", "--dry-run"]):
                measure(f"{words}: {' '.join(command)}", command, env, nothing_s)
        finally:
            server.process.kill()
            server.process.wait()


def measure(case: str, command: list[str], env: dict[str, str], nothing_s: float) -> None:
    taken_s = cpu_s([str(ROOT / "bin" / "elastic"), *command], env)
    record("status", case, taken_s - nothing_s, "s CPU", "python", nothing_s)


def cpu_s(command: list[str], env: dict[str, str]) -> float:
    """The least CPU of several tries, after one to warm up."""
    found = []
    for _ in range(TRIES + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found[1:])


# ---- the runs


def make(home: Path, url: str, runs: int, workers: int) -> None:
    """Run directories, leases, and a squeue that knows their jobs."""
    each, jobs = workers // runs, []
    for number in range(runs):
        extra = workers % runs if number == 0 else 0
        jobs += make_run(home, f"run-{number:02}", url, each + extra, 1000 * (number + 1))
    listing = home / "listing"
    listing.write_text("".join(jobs))
    squeue = home / "squeue"
    squeue.write_text(f"#!/bin/sh\nexec cat '{listing}'\n")
    squeue.chmod(0o755)


def make_run(home: Path, name: str, url: str, workers: int, first_id: int) -> list[str]:
    now = time.time()
    config = home / f"{name}.toml"
    config.write_text(
        f'[run]\nname = "{name}"\ntask = "x:Y"\n[train]\nmax_tokens = 1000000\n'
        f'[elastic]\nmin = 1\nmax = {workers}\n'
        f'[redis]\nurl = "{url}"\n[slurm]\npartition = "p"\nmaster_partition = "c"\n'
    )
    control = Control("local", "running", 1, workers)
    run = RunDir.create(home / "runs", configuration.load(config), control, {})
    for version in range(VERSIONS):
        deltas = tuple(
            delta_of(slot, job_id=str(first_id + slot), base=version - 1, steps=100, tokens=1000,
                     loss=2.0, samples=((0, slot, slot + 1),), seconds=50.0, stall_s=1.0,
                     delivered=now) for slot in range(workers)
        )
        told = {"tokens": 1000 * version, "total_tokens": 10**6, "loss": 2.0, "workers": workers}
        run.commits.link(commit_of(version, time=now - 60 + version, deltas=deltas, **told))
    for number in range(EVENTS):
        run.event("delta", slot=number % workers, attempt=1, base=1, steps=100, tokens=1000)
    run.set_endpoint(Endpoint("", 0, 1, url))
    with_leases(run, workers, first_id)
    for slot in range(workers):
        fields = {"role": "worker", "slot": slot, "attempt": 1, "node": f"n{slot}"}
        run.jobs.write_ending(str(first_id + slot), {"state": "started", **fields})
    run.jobs.write_ending(str(first_id - 1), {"state": "started", "role": "master", "slot": 0})
    places = [("worker", slot, first_id + slot) for slot in range(workers)]
    places.append(("master", 0, first_id - 1))
    return [row(job_id, job_name(name, role, slot), now, slot) for role, slot, job_id in places]


def with_leases(run: RunDir, workers: int, first_id: int) -> None:
    store = BothSides.open(run, 5.0)
    store.load_scripts()
    for slot in range(workers):
        fields = {"job_id": str(first_id + slot), "node": f"n{slot}", "pid": 1, "version": 59,
                  "state": "training", "step": 40, "steps_total": 4000, "loss": 2.0,
                  "tokens_per_s": 900.0}
        store.lease(slot, 1, fields, 3600.0)
    master = {"version": 59, "state": "running", "reason": "", "job_id": str(first_id - 1)}
    store.set_master(1, master)
    store.close()


def row(job_id: int, name: str, now: float, node: int) -> str:
    """A record of squeue, in the format that sched_slurm asks for."""
    times = (str(int(now) - 600), str(int(now) - 500), "N/A")
    fields = [str(job_id), "RUNNING", *times, f"n{node}", "None", f"n{node}", name, name]
    return "\x1f".join(fields) + "\x1e\n"


if __name__ == "__main__":
    main()
