"""What Slurm says about the job around this process, and where its work is resumed.

The environment answers at once, on every rank; in a step the step's nodes and tasks count. The end
time (Slurm 22.05 does not set it) and the notice before a preemption are asked of the controller,
once, by the caller's wish; None where it does not say. Parsing is pure. Host lists are expanded
here, because scontrol cannot do it without a slurm.conf.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from elastic import sched_slurm
from elastic.config import env
from elastic.errors import ElasticError

_TEMPORARY = re.compile(r"^\.|^tmp|\.(tmp|partial)\b|~$")
_WORDS = "(step)|iteration|iter|checkpoint|ckpt|epoch"
_NUMBERED = re.compile(rf"(?:(?:{_WORDS})[-_=.]?|^(?=\d+(?:\.|$)))(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class SlurmInfo:
    """A job as one of its processes sees it; `tasks_per_node` by node, `end_time` since 1970."""

    job_id: str
    restart_count: int = 0
    nodes: tuple[str, ...] = ()
    gpus_on_node: int = 0
    tasks_per_node: tuple[int, ...] = ()
    partition: str = ""
    end_time: float | None = None


SLURMInfo = SlurmInfo


def get_slurm_info() -> SlurmInfo | None:
    """The job around this process, from its environment alone; None outside of Slurm."""
    if not (job_id := env("SLURM_JOB_ID")):
        return None
    gpus = _either("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # a bare srun has no SLURM_GPUS_ON_NODE
    layout = _either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # 2(x3),1
    tasks = [(int(n), int(x or 1)) for n, x in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout)]
    until = env("SLURM_JOB_END_TIME", "")
    return SlurmInfo(
        job_id=job_id,
        restart_count=int(env("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(expand_hostlist(_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))),
        gpus_on_node=int(env("SLURM_GPUS_ON_NODE") or len(_numbers(gpus))),
        tasks_per_node=tuple(count for count, times in tasks for _ in range(times)),
        partition=env("SLURM_JOB_PARTITION", ""),
        end_time=float(until) if until.isdigit() else None,
    )


def job_nodes() -> list[str]:
    """All nodes of the job around this process, whatever of them its step has."""
    return expand_hostlist(env("SLURM_JOB_NODELIST", ""))


def with_end_time(info: SlurmInfo) -> SlurmInfo:
    """`info` with its end time asked of Slurm, if it has none."""
    return info if info.end_time else replace(info, end_time=end_time(_ask("job", info.job_id)))


def end_time(job_text: str) -> float | None:
    """EndTime in what `scontrol show job` printed (local time), in seconds since the epoch."""
    found = re.search(r"\bEndTime=(\d{4}-\S+)", job_text)  # or Unknown
    return datetime.fromisoformat(found[1]).timestamp() if found else None


def notice_s(partition: str) -> float | None:
    """From TERM to KILL at a preemption in `partition`, as Slurm says: GraceTime, else KillWait."""
    found = re.search(r"\bGraceTime=([\d:]+)", _ask("partition", partition))
    if not found:
        return None
    seconds = sum(int(n) * 60**i for i, n in enumerate(reversed(found[1].split(":"))))
    if not seconds and (found := re.search(r"\bKillWait *= *(\d+)", _ask("config"))):
        seconds = int(found[1])
    return float(seconds) or None


def log_job_info(info: SlurmInfo, say: Callable[[str], object] = print) -> None:
    """One line: job, restarts, nodes and GPUs, partition, time left, NCCL_DEBUG."""
    left = f"{(info.end_time - time.time()) / 60:.0f} min" if info.end_time else "unknown"
    size = f"{len(info.nodes)} nodes x {info.gpus_on_node} GPUs, partition {info.partition}"
    job = f"job {info.job_id}, restarts {info.restart_count}"
    say(f"{job}: {size}, time left {left}, NCCL_DEBUG {env('NCCL_DEBUG', 'not set')}")


def check_layout(info: SlurmInfo, gpus_per_node: int) -> str:
    """Empty if every node has one task per GPU, else how many each has and what to do."""
    count, tasks = len(info.nodes), ",".join(map(str, info.tasks_per_node))
    if info.tasks_per_node == (gpus_per_node,) * count:
        return ""
    way_out = f"one task per GPU: srun --nodes={count} --ntasks-per-node={gpus_per_node}"
    return f"{tasks} tasks per node, {gpus_per_node} GPUs per node; {way_out}"


def expand_hostlist(text: str) -> list[str]:
    """From "n[01-03,7],m4" to n01, n02, n03, n7, m4, in this order. Raises ElasticError."""
    if not re.fullmatch(r"(\[\d+(-\d+)?(,\d+(-\d+)?)*\]|[^\[\]])*", text):
        raise ElasticError(f"not a Slurm host list: {text!r}", "echo $SLURM_JOB_NODELIST")
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):  # up to a comma outside of brackets
        pieces = re.findall(r"\[([^\]]*)\]|([^\[]+)", part)
        choices = [_numbers(inside) if inside else [plain] for inside, plain in pieces]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def resolve_resume_path(folder: Path) -> Path | None:
    """The newest whole checkpoint: `latest` or `last`, else the highest step; else None."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pointers = [name for name in names if re.fullmatch(r"(latest|last)(\.[a-z]+)?", name)]
    paths = [folder / name for name in [*pointers, *resume_order(names)]]
    # A link may move while the checkpoint is read: what it names now.
    named = [folder / path.readlink() if path.is_symlink() else path for path in paths]
    return next(filter(_is_whole, named), None)


def resume_order(names: Iterable[str]) -> list[str]:
    """Those with a step number, the highest first, then the shortest name; no temporary ones."""
    kept = [name for name in names if not _TEMPORARY.search(name) and _NUMBERED.search(name)]
    return sorted(kept, key=lambda name: (-_step(name), len(name), name))


def _step(name: str) -> int:
    found = max(_NUMBERED.findall(name), key=lambda match: match[0] != "")  # epoch=3-step=1200
    return int(found[1])


def _is_whole(path: Path) -> bool:
    if path.is_file():  # without a suffix it is a note that names one
        return path.suffix != "" and path.stat().st_size > 0
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    sharded = any(name.endswith(".distcp") for name in names)
    return ".metadata" in names if sharded else bool(names)  # DCP writes .metadata last


def _ask(*what: str) -> str:
    try:
        return sched_slurm.show(*what)
    except ElasticError:
        return ""


def _either(step: str, job: str) -> str:
    return env(step) or env(job, "")


def _numbers(text: str) -> list[str]:
    spans = [(low, int(high or low)) for low, high in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return [str(n).zfill(len(low)) for low, high in spans for n in range(int(low), high + 1)]
