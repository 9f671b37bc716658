"""What Slurm says about the job around this process.

The environment answers at once, on every rank; in a step the step's nodes and tasks
count. The end time (Slurm 22.05 does not set it) and the notice before a preemption are
asked of the controller, once, by the caller's wish; None where it does not say. Parsing
is pure.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.base.config import Config
from elastic.base.environment import env
from elastic.base.errors import ElasticError
from elastic.jobs import sched_slurm
from elastic.jobs.slurm_text import expand_hostlist, numbers


@dataclass(frozen=True)
class SLURMInfo:
    """A job as one of its processes sees it; `tasks_per_node` by node, `end_time` since
    1970."""

    job_id: str
    restart_count: int = 0
    nodes: tuple[str, ...] = ()
    gpus_on_node: int = 0
    tasks_per_node: tuple[int, ...] = ()
    partition: str = ""
    end_time: float | None = None


def get_slurm_info() -> SLURMInfo | None:
    """The job around this process, from its environment alone; None outside of Slurm."""
    if not (job_id := env("SLURM_JOB_ID")):
        return None
    # A bare srun has no SLURM_GPUS_ON_NODE.
    gpus = _either("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
    layout = _either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # 2(x3),1
    tasks = [(int(n), int(x or 1)) for n, x in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout)]
    until = env("SLURM_JOB_END_TIME", "")
    return SLURMInfo(
        job_id=job_id,
        restart_count=int(env("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(expand_hostlist(_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))),
        gpus_on_node=int(env("SLURM_GPUS_ON_NODE") or len(numbers(gpus))),
        tasks_per_node=tuple(count for count, times in tasks for _ in range(times)),
        partition=env("SLURM_JOB_PARTITION", ""),
        end_time=float(until) if until.isdigit() else None,
    )


def with_end_time(info: SLURMInfo) -> SLURMInfo:
    """`info` with its end time asked of Slurm, if it has none."""
    return info if info.end_time else replace(info, end_time=end_time(_ask("job", info.job_id)))


def end_time(job_text: str) -> float | None:
    """EndTime in what `scontrol show job` printed, in seconds since the epoch."""
    end = re.search(r"\bEndTime=(\d+)(?:\s|$)", job_text)  # or Unknown
    return float(end[1]) if end else None


def notice_s(partition: str) -> float | None:
    """Seconds from TERM to KILL at a preemption in `partition`: GraceTime (after which
    Slurm sends TERM again) and KillWait. With preempt/qos the QOS has the GraceTime, so
    only KillWait is sure."""
    grace = re.search(r"\bGraceTime=(\d+)", _ask("partition", partition))
    settings = _ask("config")
    if not grace:
        return None
    by_qos = re.search(r"\bPreemptType *= *preempt/qos", settings)
    return float((0 if by_qos else int(grace[1])) + _kill_wait_s(settings)) or None


def _kill_wait_s(settings: str) -> int:
    wait = re.search(r"\bKillWait *= *(\d+)", settings)
    return int(wait[1]) if wait else 0


def kill_at() -> float | None:
    """When Slurm kills the job around this process, which has had a notice: KillWait
    after its end time. At a preemption Slurm moves this time to the end of the GraceTime,
    the partition's or the QOS'. None: there is no such job, or Slurm does not say."""
    info = get_slurm_info()
    limit = end_time(_ask("job", info.job_id)) if info else None
    return limit and limit + _kill_wait_s(_ask("config"))


def notice_here(config: Config) -> float | None:
    """`notice_s` for the job around this process, which is of the run with this
    configuration."""
    info = get_slurm_info()
    return notice_s(info.partition) if info else config.local_scheduler.grace_s


def log_job_info(info: SLURMInfo, say: Callable[[str], object] = print) -> None:
    """One line: job, restarts, nodes and GPUs, partition, time left, NCCL_DEBUG."""
    left = f"{(info.end_time - time.time()) / 60:.0f} min" if info.end_time else "unknown"
    size = f"{len(info.nodes)} nodes x {info.gpus_on_node} GPUs, partition {info.partition}"
    job = f"job {info.job_id}, restarts {info.restart_count}"
    say(f"{job}: {size}, time left {left}, NCCL_DEBUG {env('NCCL_DEBUG', 'not set')}")


def _ask(*what: str) -> str:
    try:
        return sched_slurm.show(*what)
    except ElasticError:
        return ""


def _either(step: str, job: str) -> str:
    return env(step) or env(job, "")
