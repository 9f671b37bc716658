"""What Slurm says about the job around this process, and where its work is resumed.

The environment answers at once, on every rank; in a step the step's nodes and tasks
count. The end time (Slurm 22.05 does not set it) and the notice before a preemption are
asked of the controller, once, by the caller's wish; None where it does not say. Parsing
is pure.
"""

import contextlib
import os
import re
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.base.config import Config
from elastic.base.environment import env
from elastic.base.errors import ElasticError
from elastic.jobs import sched_slurm
from elastic.jobs.slurm_text import expand_hostlist, numbers

_TEMPORARY = re.compile(r"^\.|^tmp|\.(tmp|partial)\b|~$")
_WORDS = r"(epoch|\bep)|step|\bba|iteration|iter|checkpoint|ckpt|snapshot|state|model(?=[-_]\d+\.)"
_NUMBERED = re.compile(rf"(?:(?:{_WORDS})[-_=.]?|^(?=\d+(?:\.|$)))(\d+)", re.IGNORECASE)
_POINTER = re.compile(r"(^|[-_.])(latest|last)([-_.]|$)", re.IGNORECASE)
_PLAIN = re.compile(r"(^|[-_.])(checkpoint|ckpt|snapshot|state)(\.(pt|pth|ckpt|tar|bin|pkl))+$")
_OTHER = re.compile(
    r"(^|[-_.])(best|ema|swa|rng)([-_.]|$)|-of-\d|\.(txt|jsonl?|ya?ml|toml|log|csv|md|py)$"
)
_MEDIA = re.compile(
    r"\.(png|jpe?g|gif|webp|svg|pdf|html?|mp4|avi|wav|mp3|flac)$|tfevents", re.IGNORECASE
)
# What Hugging Face's Trainer, alone or with PEFT or FSDP, writes first; and what it and
# accelerate write last.
_OF_TRAINER = {"training_args.bin", "config.json", "adapter_config.json",
               "adapter_model.safetensors", "pytorch_model_fsdp_0"}  # fmt: skip
_WRITTEN_LAST = ("trainer_state.json", "random_states_0.pkl")


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
    """Seconds from TERM to KILL at a preemption in `partition`: GraceTime (after which Slurm
    sends TERM again) and KillWait. With preempt/qos the QOS has the GraceTime, so only
    KillWait is sure."""
    grace = re.search(r"\bGraceTime=([\d:]+)", _ask("partition", partition))
    settings = _ask("config")
    if not grace:
        return None
    seconds = sum(int(n) * 60**i for i, n in enumerate(reversed(grace[1].split(":"))))
    if re.search(r"\bPreemptType *= *preempt/qos", settings):
        seconds = 0
    return float(seconds + _kill_wait_s(settings)) or None


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


def resolve_resume_path(folder: Path, pattern: str = "") -> Path | None:
    """The checkpoint to resume from: the first of `resume_paths`; None if there is
    none."""
    return next(iter(resume_paths(folder, pattern)), None)


def resume_paths(folder: Path, pattern: str = "") -> dict[Path, int]:
    """The whole checkpoints in `folder`, the one to resume from first, and when each was
    written.

    `pattern` says which they are; if it is empty, the names that programs usually choose.
    Among names that differ in numbers alone, what a link (`latest`) leads to comes first,
    then the highest epoch, and in it the highest step. Among different names (last.ckpt,
    epoch=3.ckpt) what was written last comes first.
    """
    alike: dict[str, list[Path]] = defaultdict(list)
    for path in _candidates(folder, pattern):
        # A link may move while the checkpoint is read: what it names now.
        target = path.parent / path.readlink() if path.is_symlink() else path
        if _is_whole(target):
            alike[re.sub(r"\d+", "#", target.name)].append(target)
    newest_first = sorted(alike.values(), key=lambda paths: _written(paths[0]), reverse=True)
    return {path: _written(path) for paths in newest_first for path in paths}


def _candidates(folder: Path, pattern: str) -> list[Path]:
    if pattern:
        paths = [path for path in folder.glob(pattern) if not _TEMPORARY.search(path.name)]
    else:  # accelerate makes a folder of its own
        there = [*_parts(folder), *_parts(folder / "checkpoints")]
        named = [path for path in there if _is_named_so(path.name) and _may_hold_state(path)]
        stems = {path.stem for path in named}
        paths = [path for path in named if not _comes_along(path.stem, stems)]
    pointers = [path for path in paths if _POINTER.search(path.name)]
    return [*pointers, *sorted(paths, key=_order)]


def _order(path: Path) -> tuple:
    """A key for sorting: the highest epoch first (steps may begin anew in each), then the
    highest step, then the shortest name. Names without numbers come last, the newest
    first."""
    found = sorted(_NUMBERED.findall(path.name), key=lambda match: match[0] == "")
    place = ([-int(number) for _, number in found], len(path.name), path.name)
    return (*(place if found else ([1], 0, "")), -_written(path))


def _is_named_so(name: str) -> bool:
    is_known = any(pattern.search(name) for pattern in (_POINTER, _NUMBERED, _PLAIN))
    return is_known and not (_TEMPORARY.search(name) or _OTHER.search(name))


def _comes_along(stem: str, stems: Set[str]) -> bool:
    """Does the file belong to another checkpoint? step_5.optimizer.pt and step_5_ema.pt
    belong to step_5.pt; step_5.5.pt does not."""
    return any(re.fullmatch(rf"{re.escape(each)}[-_.]\D+", stem) for each in stems)


def _may_hold_state(path: Path) -> bool:
    """False for pictures and words alone. A file without a suffix is taken for a note that
    names a checkpoint; inside a folder it may be anything."""
    if not path.is_dir():
        name = path.resolve().name
        return "." in name and not (_MEDIA.search(name) or _OTHER.search(name))
    return any(not (_MEDIA.search(part.name) or part.suffix in (".txt", ".json"))
               for part in _below(path))  # fmt: skip


def _is_whole(path: Path) -> bool:
    """Is the checkpoint complete? What cannot be read now counts as complete."""
    if not path.is_dir():
        try:
            with path.open("rb") as file:
                start = file.read(4)  # torch.save makes a zip, whose directory comes last
                return zipfile.is_zipfile(file) if start == b"PK\3\4" else bool(start)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
    names = {part.name for part in _parts(path)}
    shards = {part.parent for part in _below(path) if part.suffix == ".distcp"}
    is_begun = any("incomplete" in name for name in names)
    if re.fullmatch(r"checkpoint[-_]\d+", path.name) and not names & {*_WRITTEN_LAST}:
        alike = path.parent.glob("checkpoint[-_]*")
        others = any((each / name).exists() for each in alike for name in _WRITTEN_LAST)
        is_begun |= others or ("-" in path.name and bool(names & _OF_TRAINER))
    # DCP writes .metadata last.
    return bool(names) and not is_begun and all((each / ".metadata").exists() for each in shards)


def _below(path: Path) -> list[Path]:
    """All files below a folder. (Some may be removed meanwhile.)"""
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def _written(path: Path) -> int:
    """When a checkpoint was written, in ns; 0 for one that is just being removed."""
    with contextlib.suppress(OSError):
        return max(part.stat().st_mtime_ns for part in (path, *_parts(path)))
    return 0


def _parts(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [*path.iterdir()]
    return []


def _ask(*what: str) -> str:
    try:
        return sched_slurm.show(*what)
    except ElasticError:
        return ""


def _either(step: str, job: str) -> str:
    return env(step) or env(job, "")
