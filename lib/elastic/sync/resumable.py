"""The checkpoints in a folder that a program may go on from, found by the names that
programs usually choose, and whether they are whole; and the one that run.command goes
on from.
"""

import contextlib
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

from elastic.run import wording
from elastic.run.rundir import RunDir

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
               "adapter_model.safetensors", "pytorch_model_fsdp_0"}
_WRITTEN_LAST = ("trainer_state.json", "random_states_0.pkl")


def resolve_resume_path(folder: Path, pattern: str = "") -> Path | None:
    """The checkpoint to resume from: the first of `resume_paths`; None if there is
    none."""
    return next(iter(resume_paths(folder, pattern)), None)


def resume_paths(folder: Path, pattern: str = "") -> dict[Path, int]:
    """The whole checkpoints in `folder`, the one to resume from first, and when each was
    written.

    `pattern` says what is a checkpoint; if it is empty, anything is that has a name such as
    programs usually choose. Among names that differ in numbers alone the one that a link
    (`latest`) leads to comes first, then the highest epoch, and in it the highest step.
    Among other names (last.ckpt, epoch=3.ckpt) the one that was written last comes first.
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
    """A key to sort by: the highest epoch first, as steps may begin anew in each epoch;
    then the highest step, then the shortest name. Names without a number come last, the
    newest of them first."""
    found = sorted(_NUMBERED.findall(path.name), key=lambda match: match[0] == "")
    place = ([-int(number) for _, number in found], len(path.name), path.name)
    return (*(place if found else ([1], 0, "")), -_written(path))


def _is_named_so(name: str) -> bool:
    is_known = any(pattern.search(name) for pattern in (_POINTER, _NUMBERED, _PLAIN))
    return is_known and not (_TEMPORARY.search(name) or _OTHER.search(name))


def _comes_along(stem: str, stems: Set[str]) -> bool:
    """Does a file belong to another one's checkpoint? step_5.optimizer.pt and
    step_5_ema.pt belong to step_5.pt; step_5.5.pt does not."""
    return any(re.fullmatch(rf"{re.escape(each)}[-_.]\D+", stem) for each in stems)


def _may_hold_state(path: Path) -> bool:
    """Is there anything but pictures and text? A file without a suffix is a note that
    names a checkpoint; inside of a folder it may be anything."""
    if not path.is_dir():
        name = path.resolve().name
        return "." in name and not (_MEDIA.search(name) or _OTHER.search(name))
    return any(not (_MEDIA.search(part.name) or part.suffix in (".txt", ".json"))
               for part in _below(path))


def _is_whole(path: Path) -> bool:
    """Is the checkpoint complete, as far as it can be read now?"""
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
    """The files in a folder, and in its folders. One that is being removed may be missing."""
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def _written(path: Path) -> int:
    """When a checkpoint was written, in ns; 0 for one that is being removed."""
    with contextlib.suppress(OSError):
        return max(part.stat().st_mtime_ns for part in (path, *_parts(path)))
    return 0


def _parts(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [*path.iterdir()]
    return []


# ---- those of a run


class Resume:
    """`path`: the checkpoint that run.command was given; `older`: how many of the newest
    ones it is not given, as it died on them."""

    def __init__(self, run: RunDir):
        self.run, config = run, run.config()
        own = config.sync.checkpoints if config.run.command else ""
        # A relative path is one below the run file's folder.
        self.folder = Path(config.run.folder, own) if own else run.path / "checkpoints"
        self.path: Path | None = None
        self.older = 0
        self._at_start = self.there()

    def there(self) -> dict[Path, int]:
        """The whole checkpoints, and when each was written; the one to go on from comes
        first."""
        return resume_paths(self.folder, self.run.config().sync.resume)

    def has_progressed(self, before: dict[Path, int] | None = None) -> bool:
        """Is there a checkpoint that was not there `before` (None: at the job's start),
        or has the one that was resumed from been written anew? Others may be written
        again on the way to where the ranks died, and again: that is no progress."""
        before = self._at_start if before is None else before
        return any(written > before.get(path, 0) and (path not in before or path == self.path)
                   for path, written in self.there().items())

    def choose(self) -> str:
        """Choose the newest checkpoint on which the program has not died at once, else
        the oldest; "": there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there, names = [*self.there()], sorted(os.listdir(self.folder))
        self.path = there[min(self.older, len(there) - 1)] if there else None
        if names and not there:
            what = f"nothing in {self.folder} looks like a whole checkpoint"
            listed = wording.brief(", ".join(names))
            self.run.event("warning", reason=f"{what} (there are: {listed}): see sync.resume")
        return str(self.path or "")
