"""elastic-doctor --try: one real job of two nodes, which shows what this cluster does to
ranks.

    tried(config)    here: submits it as a trainer's, waits, and removes it
    lead(folder)     there, in the launcher's place: starts four ranks of sbatch/probe.sh,
                     and does to them what happens to ranks; four of train/trial.py train
                     beside them

They share a folder beside the runs: what each rank sees (rank-N.json), a file that all
ranks wait for (word), and what came of it (report.json). What a rank does later it says
on stderr, which srun passes on at once. So one clock, the launcher's, measures
everything, and the filesystem's delay is measured by itself. All waiting has an end: a
job that nobody could cancel is over within minutes. diagnosis.py judges the report.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from elastic.base import durable, proc, signals
from elastic.base.config import Config, load_written
from elastic.base.environment import clean_environment, env, environment, runs_root, torch_program
from elastic.base.errors import ElasticError
from elastic.base.network import bind_address, free_port
from elastic.jobs import sched_slurm
from elastic.jobs.history import LISTING_LAG_S, TRAINER, Job
from elastic.jobs.sched import JobSpec, end_jobs
from elastic.people import submission
from elastic.people.diagnosis import Unknown
from elastic.sync import launch

NODES, RANKS = 2, 4
LIMIT_S = 600.0  # in the queue, and then for the job
QUERY_S = 10.0  # most time between two looks at the job
PATIENCE_S = 65.0  # for each thing that ranks do: NFS clients trust their cache for 60 s


def tried(config: Config, cluster: Mapping[str, str]) -> dict | Unknown:
    """What the job reports. Job and folder are gone afterwards, whatever happens. (The
    parameter `cluster` has the doctor leave this out if there is no cluster.)"""
    slurm = config.slurm
    gpus, limit = NODES * slurm.gpus_per_node, slurm.time and f"{LIMIT_S / 60:.0f}"
    config = submission.with_shares(replace(
        config, slurm=replace(slurm, time=limit, signal=""),
        train=replace(config.train, epochs=1, max_tokens=0),  # a run has one of the two
    ), None)
    scheduler = sched_slurm.SlurmScheduler()
    given = clean_environment() | {"ELASTIC_TRY": "1"}
    durable.check_private(there := submission.nearest(runs_root()), is_above=True)
    place = {"prefix": "elastic-try-", "dir": there}
    with tempfile.TemporaryDirectory(**place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "run.toml").write_text(config.to_toml())
        spec = JobSpec(folder, folder.name, TRAINER, 0, config, given, gpus=(gpus, gpus))
        try:
            return _watched(scheduler, scheduler.submit(spec), folder)
        finally:
            end_jobs(spec.run, scheduler)


def _watched(scheduler, job_id: str, folder: Path) -> dict | Unknown:
    began, job, is_there = time.time(), Job(job_id, TRAINER, 0, "PENDING"), True
    while is_there and not job.ended:
        wait_s = time.time() - (job.started_at or began)
        if wait_s > LIMIT_S:
            seen = f"job {job_id} is {job.state} ({job.reason}) after {wait_s / 60:.0f} minutes"
            return Unknown(seen, "try again when two nodes are free")
        time.sleep(min(QUERY_S, launch.POLL_S + wait_s / 10))
        jobs = durable.patiently(scheduler.jobs, for_s=LIMIT_S)
        row = next((each for each in jobs if each.job_id == job_id), None)
        # Where MinJobAge is short Slurm forgets a job before its end is seen.
        is_there = bool(row) or (not job.submitted_at and wait_s < LISTING_LAG_S)
        job = row or job
    if not (report := durable.read_json(folder / "report.json")):
        words = last_words(folder / "logs/trainer-0000.log")
        raise ElasticError(f"it is {job.state if is_there else 'gone'}: {words}")
    started_at = job.started_at or report["up"]
    waited_s, startup_s = started_at - (job.submitted_at or began), report["up"] - started_at
    return report | {"waited_s": waited_s, "startup_s": startup_s}


def last_words(log: Path) -> str:
    return " / ".join(proc.read(log).split("\n")[-4:-1])


# ---- in the launcher's place


class Step:
    """Tasks under srun, which gets the site's own options. What srun and the tasks say on
    stderr goes into a file."""

    def __init__(self, nodes: list[str], command: list[str], said: Path):
        self.said, config = said, load_written(said.with_name("run.toml"))
        argv = sched_slurm.step_argv(nodes, RANKS // NODES, command, config.slurm.srun_options)
        address = bind_address(config.sync.bind, sched_slurm.node_address(), "sync.bind")
        meet = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address))}
        with said.open("w") as file:
            self.process = subprocess.Popen(
                argv, env=environment() | meet, stdin=subprocess.DEVNULL, stderr=file
            )

    def heard(self, words: str, wanted: int, limit_s=PATIENCE_S) -> tuple[int, float]:
        """Wait until `wanted` lines begin with `words`, the step is over, or `limit_s`
        have passed. Returns how many do, and the seconds waited."""
        began = time.time()
        while True:
            is_over = self.process.poll() is not None or time.time() - began > limit_s
            count = len(re.findall(f"^{words}", proc.read(self.said), re.MULTILINE))
            if count >= wanted or is_over:
                return count, time.time() - began
            time.sleep(launch.POLL_S)


def lead(folder: Path) -> dict:
    """Do to ranks what happens to ranks, and report what came of it. Exits if they do not
    start."""
    signals.install()  # as the launcher does: a notice does not end this process either
    home, job_id = env("ELASTIC_HOME"), env("SLURM_JOB_ID")
    nodes = sched_slurm.expand_hostlist(env("SLURM_JOB_NODELIST"))
    rank = [f"{home}/sbatch/rank.sh", *load_written(folder / "run.toml").slurm.rank_prefix]
    step = Step(nodes, [*rank, f"{home}/sbatch/probe.sh", str(folder)], folder / "said")
    if (here := step.heard("rank . is here", RANKS, LIMIT_S / 2)[0]) < RANKS:
        sys.exit(f"{here} of {RANKS} ranks started: {last_words(step.said)}")
    ranks = [durable.read_json(folder / f"rank-{number}.json") for number in range(RANKS)]
    training = Step(nodes, [*rank, *torch_program("trial"), str(folder)], folder / "trained")
    report = {"up": time.time(), "ranks": ranks} | _trained(training)
    durable.write_atomic(folder / "word", b"")
    report["seen"] = step.heard("rank . sees it", RANKS)
    report["locks"], _ = step.heard("rank . sees it, and that it is locked", 0)
    step.heard("rank . kills itself", 1)
    report["killed"] = step.heard(launch.BAD_EXIT.pattern, 1)
    sched_slurm.SlurmScheduler().cancel(job_id)
    report["told"] = step.heard("rank . hears the notice", RANKS - 1)
    report["saved"] = training.heard("rank . has saved", RANKS)
    time.sleep(1)  # in which srun would have ended
    report["lives"] = "live on" if step.process.poll() is None else "do not both live on"
    began = time.time()
    sched_slurm.end_steps(job_id)
    report["ended_s"] = time.time() - began
    return report | _shrunk(job_id, nodes[:1], folder)


def _trained(training: Step) -> dict:
    """Ranks of both nodes train one model, in a step beside the other, until the
    notice."""
    count, _ = training.heard("rank . trains", RANKS, LIMIT_S / 4)
    how = re.search(r"trains: (.*)", proc.read(training.said))
    return {"trained": count, "how": how[1] if how else last_words(training.said)}


def _shrunk(job_id: str, kept: list[str], folder: Path) -> dict:
    """Let the other node go, and start a step on this one."""
    try:
        sched_slurm.release_nodes(job_id, 1)
        step, began = Step(kept, ["true"], folder / "next"), time.time()
        if step.process.wait(PATIENCE_S):
            raise ElasticError(f"no step starts on what is left: {last_words(step.said)}")
    except ElasticError as error:
        return {"shrunk": error.what, "is_stuck": True}
    return {"shrunk": f"a step on one node took {time.time() - began:.1f} s", "is_stuck": False}


if __name__ == "__main__":
    given = Path(sys.argv[1])
    durable.write_atomic(given / "report.json", durable.to_json(lead(given)))
