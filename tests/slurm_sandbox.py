"""A private Slurm for tests: `pytest_plugins = ["slurm_sandbox"]` in a test module brings these.

`slurm`: one sandbox for the whole session (4 nodes with 2 GPUs each, and c1; 2 s of notice), that a
test must leave with its nodes up. `new_sandbox(nodes=…, …)`: one of the test's own, for breaking
things. `slurm_here` is `slurm`, with this process's SLURM_CONF pointing at it for the test. Where
the daemons are not installed the tests skip, naming the packages; with ELASTIC_FORBID_SKIPS=1 they
fail.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.base.errors import ElasticError
from elastic.lab import sandbox
from elastic.lab.sandbox import Sandbox, Shape
from helpers import ROOT

# A lost node is noticed after 20 s instead of 300: not sooner, the machine may be busy.
FAST = ("SlurmdTimeout=20", "KillWait=2")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Sandbox]:
    """The session's sandbox."""
    _require_slurm()
    with _folder() as folder:
        yield _up(folder, grace_s=2)


@pytest.fixture
def new_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """Start a sandbox of the test's own: `new_sandbox(nodes=2, accounting=True, …)` as in Shape."""
    with _folder() as folder:

        def start(**shape) -> Sandbox:
            _require_slurm(shape.get("accounting", False))
            return _up(folder, **shape)

        yield start


@pytest.fixture
def slurm_here(slurm: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The session's sandbox as the Slurm of this process and of those it starts."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    return slurm


def _require_slurm(accounting: bool = False) -> None:
    try:
        sandbox.programs(accounting)
    except ElasticError as error:
        if os.environ.get("ELASTIC_FORBID_SKIPS") == "1":
            pytest.fail(f"no private Slurm: {error}")
        pytest.skip(f"no private Slurm: {error.what} ({error.hint})")


AFTERWARDS = """
tail --pid="$0" -s 0.5 -f /dev/null
for box in "$1"/*; do "$2" down --dir "$1" --name "${box##*/}"; done
rmdir "$1"
"""


class _folder:
    """A short folder (sockets!) whose sandboxes all end with it, however the test ends: also if
    this process is killed, and nobody calls `__exit__`."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
        self.path.chmod(0o711)
        what = [str(os.getpid()), str(self.path), str(ROOT / "bin/elastic-sandbox")]
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.watcher = subprocess.Popen(
            ["sh", "-c", AFTERWARDS, *what], start_new_session=True, cwd="/",
            env={**os.environ, "ELASTIC_PYTHON": sys.executable}, **nothing,
        )  # fmt: skip
        return self.path

    def __exit__(self, *_: object) -> None:
        os.killpg(self.watcher.pid, signal.SIGKILL)
        self.watcher.wait()
        for path in self.path.iterdir():
            Sandbox(path).down()
        shutil.rmtree(self.path)


def _up(folder: Path, **shape) -> Sandbox:
    box = Sandbox(folder / str(len(list(folder.iterdir()))))
    settings = (*FAST, *shape.pop("settings", ()))
    box.up(Shape(settings=settings, **shape))
    return box
