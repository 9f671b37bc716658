"""The scheduler as the rest of the toolkit sees it: five verbs, one job, one name.

    jobs(within_s)          this user's elastic jobs, live and recently ended; an answer that is
                            `within_s` old will do
    submit(spec)            once; the job's id. Raises Refused, RetryLater, or TryAgain: then the
                            job may exist all the same, and is looked for by its name
    cancel(job_id, kill)    ask the job to leave, or `kill` it; one that is gone is no error
    wait_for(job_id, spec)  have a trainer that is queued wait for all GPUs of `spec`
    spare_gpus(spec, most)  how many more GPUs a job like this would likely have if it started
                            anew now

All raise TryAgain if the scheduler does not say. `SlurmScheduler` and `LocalScheduler`
have these verbs; nobody else knows how jobs come to be. A job is identified by its name
(`job_name`: run, role, slot), which its comment repeats for where a site has changed
that, together with its id and its submit time, because ids are reused after a controller
crash and a submission can succeed while its client sees an error. States are Slurm's
words; a word that is not in `ENDED_STATES`, one never seen before included, is a job that
still exists.

`jobs` answers completely or raises `TryAgain`: a partial answer is no answer.
"""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.base.config import Config
from elastic.base.durable import patiently
from elastic.base.environment import LEADS, elastic_home, registry_dir
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs.history import MASTER, TRAINER, WORKER, Job
from elastic.run.rundir import RunDir, check_name

CLUSTER = "SLURM_CLUSTER_NAME"  # Slurm's own; in a run's environment since its submission
END_S = 30.0  # in which the jobs that `end_jobs` kills have to go
_NAME = re.compile("([A-Za-z0-9][A-Za-z0-9._-]{0,62})/([mtw])(0|[1-9][0-9]*)@elastic")
_ROLES = {role[0]: role for role in (MASTER, TRAINER, WORKER)}


class Refused(ElasticError):
    """The scheduler does not accept this job as it is, or not from this host: wrong
    partition, account, option …"""


class RetryLater(ElasticError):
    """Not now: a submit limit is reached or the partition is closed. Nothing was
    submitted."""


class Elsewhere(TryAgain):
    """The run's jobs are on another cluster or machine, which shares this home: a pass
    there takes care of them."""


@dataclass(frozen=True)
class JobSpec:
    """What to submit. `environment` is the job's whole environment; `exclude` names
    nodes."""

    run_dir: Path
    run: str
    role: str
    slot: int
    config: Config
    environment: Mapping[str, str] = field(repr=False)  # may hold secrets: never printed
    exclude: tuple[str, ...] = ()
    gpus: tuple[int, int] = (0, 0)  # the fewest and the most that it takes
    after: str = ""  # the id of a job that has to start first: without it, GPUs would idle
    alone: bool = True  # it waits for the end of a job of the same name

    @property
    def name(self) -> str:
        return job_name(self.run, self.role, self.slot)

    @property
    def home(self) -> Path:
        """The installation that the run was submitted with, as long as it exists: a run
        keeps its version, whichever version the pass is that submits its jobs."""
        given = Path(self.environment.get("ELASTIC_HOME", os.devnull))
        return given if (given / "bin/elastic").exists() else elastic_home()

    def command(self) -> list[str]:
        """What the job runs, of that installation."""
        word = {MASTER: "master", TRAINER: "launch", WORKER: "agent"}[self.role]
        slot = [str(self.slot)] if self.role == WORKER else []
        return [str(self.home / "bin/elastic"), word, str(self.run_dir), *slot]


def job_name(run: str, role: str, slot: int) -> str:
    """squeue shows eight characters of it, so run and slot come first: 7b/w3@elastic."""
    return f"{run}/{role[0]}{slot}@elastic"


def parse_job_name(text: str) -> tuple[str, str, int] | None:
    """(run, role, slot) of a name that `job_name` made; else None."""
    match = _NAME.fullmatch(text)
    return (match[1], _ROLES[match[2]], int(match[3])) if match else None


def open_scheduler(config: Config, environment: Mapping[str, str] | None = None):
    """The scheduler of a configuration, which a run's `environment` leads to (None: this
    process's).

    Only the one that is used gets imported.
    """
    if config.run.scheduler == "slurm":
        from elastic.jobs.sched_slurm import SlurmScheduler

        return SlurmScheduler(environment)
    from elastic.jobs.sched_local import LocalScheduler

    return LocalScheduler(config, registry_dir(environment) / "local")


def scheduler_of(run: RunDir):
    """The scheduler that a run was submitted to: cron's environment does not lead to it.
    Raises UsageError for a copy of a run: the jobs are the original's."""
    check_name(run)
    return open_scheduler(run.config(), run.environment())


def cluster_of(kind: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Which cluster a run's jobs are on; runs for which this is equal share a listing."""
    if kind == "local":
        return kind, str(registry_dir(environment))
    return kind, " ".join(filter(None, map(environment.get, (*LEADS, CLUSTER))))


def jobs_of(run: str, scheduler) -> list[Job]:
    """The jobs of the run of that name that have not ended. Raises TryAgain."""
    return [job for job in scheduler.jobs() if job.run == run and not job.ended]


def end_jobs(run: str, scheduler) -> bool:
    """Kill the jobs of the run of that name; whether they are gone. Raises TryAgain."""
    until = time.monotonic() + END_S
    while (jobs := patiently(jobs_of, run, scheduler, for_s=END_S)) and time.monotonic() < until:
        with contextlib.suppress(TryAgain):
            for job in jobs:
                scheduler.cancel(job.job_id, kill=True)
        time.sleep(0.5)
    return not jobs
