"""What tests share: waiting with a deadline, a small run, and processes that always end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from click.testing import CliRunner, Result

from elastic.base.errors import TryAgain
from elastic.commands import main
from elastic.run.records import Commit, Delta

ROOT = Path(__file__).resolve().parents[1]
SESSION = "ELASTIC_TESTS"  # carried by what a session of tests starts: its folder
PATIENCE = 4  # a deadline is there to end a hang; a busy machine is no failure


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> object:
    """Poll until `condition()` is true and return its value; fail naming `what` otherwise. Where
    somebody does not answer just now (TryAgain), it is asked again."""
    deadline = time.monotonic() + PATIENCE * timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(TryAgain):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@contextlib.contextmanager
def afterwards(script: str, *words: str) -> Iterator[None]:
    """Should this process be killed meanwhile, the shell runs `script` with these words ($1, …)."""
    wait = 'tail --pid="$0" -s 0.5 -f /dev/null'
    places = {"ELASTIC_PYTHON": sys.executable, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT / 'tests'}"}
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    watcher = subprocess.Popen(
        ["sh", "-c", f"{wait}\n{script}", str(os.getpid()), *words], start_new_session=True,
        cwd="/", env={"PATH": os.environ["PATH"], **places}, **nothing,
    )
    try:
        yield
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.wait()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """With a short name (sockets!), which everybody may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    folder.chmod(0o755)
    with afterwards('rm -rf "$1"', str(folder)):
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def commit_of(version: int = 0, **told) -> Commit:
    """A commit made by hand: of nothing, but for what is told."""
    nothing = {"master_epoch": 1, "time": 0.0, "tokens": 0, "samples": (), "deltas": ()}
    return Commit(**{"version": version, **nothing, **told})


def delta_of(slot: int = 0, **told) -> Delta:
    """Likewise a delta, of one step."""
    return Delta(**{"slot": slot, "attempt": 1, "steps": 1, "tokens": 0, "samples": (), **told})


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A clean environment whose runs and registry are below `home`."""
    names = ("PATH", "HOME", "LANG", "TMPDIR", SESSION)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept | {
        "ELASTIC_HOME_DIR": str(home / "registry"),
        "ELASTIC_RUNS": str(home / "runs"),
        "ELASTIC_SITE": os.devnull,
        "ELASTIC_PYTHON": sys.executable,
        **extra,
    }


def elastic(command: str, *args: object, env: dict[str, str], timeout_s: float = 60):
    """Run bin/elastic-COMMAND to its end."""
    return subprocess.run(
        [str(ROOT / "bin" / f"elastic-{command}"), *map(str, args)],
        env=env, capture_output=True, text=True, timeout=PATIENCE * timeout_s,
    )


def elastic_here(*words: object, env: dict[str, str] | None = None) -> Result:
    """Run a command in this process. An exception that it does not expect is the test's."""
    given = [str(word) for word in words]
    return CliRunner().invoke(main.elastic, given, env=env, catch_exceptions=False)


def borrowing_venv(folder: Path) -> Path:
    """A new venv with its own `bin`, which sees the packages of this one; none are installed."""
    make = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(make, check=True, timeout=60 * PATIENCE)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    (folder / ".ready").touch()
    return folder


def pretended_python(folder: Path, at_pip: str = "true") -> Path:
    """A Python for `make install`: the venv that it makes runs this one, and its pip only `at_pip`.
    """
    program = folder / "python3"
    program.write_text(f"""#!/usr/bin/env bash
case "$1 $2" in
    "-m venv") for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
    "-m pip") {at_pip} ;;
    *) exec "{sys.executable}" "$@" ;;
esac
""")
    program.chmod(0o755)
    return program


def checkout(folder: Path) -> Path:
    """A clean copy of this source tree, with this venv, in a folder that nobody would name so."""
    copy = folder / "it's my $HOME; a clone"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of the processes listens."""
    inodes = set()
    for each in (each for pid in pids for each in Path("/proc").glob(f"{pid}/fd/*")):
        with contextlib.suppress(OSError):  # it has just been closed
            link = os.readlink(each)
            inodes |= {link[8:-1]} if link.startswith("socket:[") else set()
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, port = local.split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8
                           else "::", int(port, 16)))
    return found
