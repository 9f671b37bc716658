"""The daemons of a sandbox, and all that they start.

Every daemon has a keeper as its parent: a tiny process that is the subreaper of all below
it, so that whatever loses its parent (a stepd, the orphans of a killed job, a daemon that
a job started) becomes the keeper's child. Keepers and daemons carry a variable in their
environment; they and their descendants are the processes of the sandbox, those under the
keeper of a slurmd are the processes of that node.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastic.base import proc
from elastic.base.environment import clean_environment
from elastic.base.errors import ElasticError

ADDRESS = "127.0.0.1"  # where they listen
START_TIMEOUT_S = 60.0
_MEMBER = "ELASTIC_SANDBOX_MEMBER"  # FOLDER:NAME, for keepers and daemons
_MULTIPLE = "this Slurm was built without --enable-multiple-slurmd; Debian's has it"

_KEEPER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
try:
    while True:
        os.wait()
except ChildProcessError:  # nothing is left below
    pass
"""


class Daemons:
    """The daemons of the sandbox in a folder, each by its name."""

    def __init__(self, path: Path):
        self.path = path

    def members(self, name: str = "") -> set[int]:
        """The processes of this sandbox, or of one daemon in it: jobs and orphans too, but
        not this process and its ancestors. (They are among them in a job of the sandbox,
        srun --pty say: to kill them would end this process halfway.)"""
        family = self.family(name)
        mine = proc.Process.of(os.getpid())
        while mine:
            family.discard(mine.pid)
            mine = proc.Process.of(mine.parent)
        return family

    def family(self, name: str = "") -> set[int]:
        """The same, with this process and its ancestors. (In a SuspendProgram the controller
        is one of these.)"""
        families = proc.families(_MEMBER, self.path, self._node_of)
        return families[name] if name else set().union(*families.values())

    def _node_of(self, pid: int, given: dict[str, str]) -> str:
        """The node of a job's process, or "". A slurmstepd overwrites its environment: it is
        known by the log that it has open."""
        is_ours = given.get("SLURM_CONF") == str(self.path / "slurm.conf")
        node = given.get("SLURMD_NODENAME", "")  # of a real cluster, for who looks here from there
        if is_ours and node and (self.path / "spool" / node).exists():
            return node
        logs = map(Path, _files_of_stepd(pid))
        return next((log.stem for log in logs if log.parent == self.path / "log"), "")

    def start(self, name: str, *argv: str, ready: str | int | None = None) -> None:
        """Start a command below a keeper, with its output in log/NAME.out; wait for its
        socket."""
        self.call(name, "setsid", "--fork", sys.executable, "-ISc", _KEEPER, *argv)
        if ready:
            self.wait(lambda: accepts(ready), f"{name} to listen", name)

    def call(self, name: str, *argv: str) -> None:
        """Run a command of the sandbox to its end, with its output in log/NAME.out."""
        given = clean_environment() | {
            _MEMBER: f"{self.path}:{name}",
            "SLURM_CONF": str(self.path / "slurm.conf"),
        }
        with open(self.path / f"log/{name}.out", "ab") as out:
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            done = subprocess.run(argv, env=given, cwd="/", umask=0o022, **files)
        if done.returncode != 0:
            logs = self._last_words()
            raise ElasticError(f"the sandbox did not start: {name} failed\n{logs}")

    def wait(self, condition: Callable[[], bool], what: str, name: str) -> None:
        """ElasticError when it takes too long or when the daemon `name` ends before."""
        deadline, unseen = time.monotonic() + START_TIMEOUT_S, 0
        while not condition():
            # Look more than once: in the middle of an exec a process has no environment, and
            # is not seen.
            unseen = 0 if self.members(name) else unseen + 1
            if time.monotonic() > deadline or unseen > 3:
                logs = self._last_words()
                hint = _MULTIPLE if "NodeAddr are required" in logs else ""
                why = f"the sandbox did not start: waited for {what}\n{logs}"
                raise ElasticError(why, hint)
            time.sleep(0.02)

    def _last_words(self) -> str:
        logs = sorted((self.path / "log").iterdir())
        return "\n".join(f"  {log.name}: {line}" for log in logs
                         for line in proc.read(log).splitlines()[-3:])  # fmt: skip


def accepts(where: str | int) -> bool:
    """Does somebody accept connections at a socket's path or at a port?"""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(where if isinstance(where, str) else (ADDRESS, where)) == 0


def _files_of_stepd(pid: int) -> set[str]:
    """What the process has open if it is a slurmstepd: its node's log, above all."""
    with contextlib.suppress(OSError):  # it may end meanwhile
        if proc.read(f"/proc/{pid}/comm") == "slurmstepd\n":
            return {os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return set()
