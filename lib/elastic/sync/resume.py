"""The checkpoints of a synchronous run, and the one that run.command goes on from."""

import os
from pathlib import Path

from elastic.run import wording
from elastic.run.rundir import RunDir
from elastic.sync.resumable import resume_paths


class Resume:
    """`path`: the checkpoint that run.command was given; `older`: how many of the newest
    ones it is not given, as it died on them."""

    def __init__(self, run: RunDir):
        self._run, config = run, run.config()
        own = config.sync.checkpoints if config.run.command else ""
        # A relative path is one below the run file's folder.
        self.folder = Path(config.run.folder, own) if own else run.path / "checkpoints"
        self.path: Path | None = None
        self.older = 0
        self._at_start = self.there()

    def there(self) -> dict[Path, int]:
        """The whole checkpoints, and when each was written; the one to go on from comes
        first."""
        return resume_paths(self.folder, self._run.config().sync.resume)

    def has_progressed(self, before: dict[Path, int] | None = None) -> bool:
        """Is there a checkpoint that was not there `before` (None: at the job's start), or
        has the one that was resumed from been written anew? Others may be written again on
        the way to where the ranks died, and again: that is no progress."""
        before = self._at_start if before is None else before
        return any(written > before.get(path, 0) and (path not in before or path == self.path)
                   for path, written in self.there().items())  # fmt: skip

    def choose(self) -> str:
        """Choose the newest checkpoint on which the program has not died at once, else the
        oldest; "": there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there, names = [*self.there()], sorted(os.listdir(self.folder))
        self.path = there[min(self.older, len(there) - 1)] if there else None
        if names and not there:
            what = f"nothing in {self.folder} looks like a whole checkpoint"
            listed = wording.brief(", ".join(names))
            self._run.event("warning", reason=f"{what} (there are: {listed}): see sync.resume")
        return str(self.path or "")
