"""A private multi-node Slurm on one machine: for trying things, for demos, and for the
tests.

A sandbox is a folder (configuration, key, spool, logs) and its daemons, which know all
that they have started. So `down` leaves nothing, and `kill-node` kills what a lost
machine would.

Every daemon has a keeper as its parent: a tiny process that is the subreaper of all below
it, so that whatever loses its parent (a stepd, the orphans of a killed job, a daemon that
a job started) becomes the keeper's child. Keepers and daemons carry a variable in their
environment; they and their descendants are the processes of the sandbox, those under the
keeper of a slurmd are the processes of that node.

Nodes n1..nN have pretended GPUs and are in the partitions `preempt` and `high`; c1 has
many CPUs and is `cpu`, where masters run and nothing is preempted. No root is needed.
What Slurm reads is in etc/sandbox; /etc/slurm is not touched.

The folder is its owner's alone, whoever that is. slurmd of an ordinary user runs all jobs
and steps as that user, and Slurm believes whoever gets to munge's socket.
"""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.base import proc
from elastic.base.durable import check_private, is_ours, write_atomic
from elastic.base.environment import clean_environment, elastic_home, env, user_name
from elastic.base.errors import ElasticError, UsageError
from elastic.base.network import free_ports
from elastic.jobs.sched_slurm import slurm_command

ADDRESS = "127.0.0.1"  # where its daemons listen
_PATH_BYTES = 80  # of the folder; a Unix socket's path has 107 at most
_DAEMON_PATH = "/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/opt/slurm/sbin:/opt/slurm/bin"
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd",
            "sbatch": "slurm-client", "setsid": "util-linux"}
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


@dataclass(frozen=True)
class Shape:
    """What a sandbox looks like. `settings`: Key=Value lines of slurm.conf, over the
    template's; with more words (PartitionName=preempt DefCpuPerGPU=4), these are added to
    such a line."""

    nodes: int = 4
    gpus: int = 2  # of each node
    grace_s: int = 5
    settings: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The nodes: those with GPUs, then the one of the CPU partition."""
        return [*(f"n{number}" for number in range(1, self.nodes + 1)), "c1"]


class Daemons:
    """The daemons of the sandbox in a folder, each by its name."""

    def __init__(self, path: Path):
        self.path = path

    def members(self, name: str = "") -> set[int]:
        """The processes of this sandbox, or of one daemon in it: jobs and orphans too,
        but not this process and its ancestors. (They are among them in a job of the
        sandbox, srun --pty say: to kill them would end this process halfway.)"""
        family = self.family(name)
        mine = proc.Process.of(os.getpid())
        while mine:
            family.discard(mine.pid)
            mine = proc.Process.of(mine.parent)
        return family

    def family(self, name: str = "") -> set[int]:
        """The same, with this process and its ancestors. (In a SuspendProgram the
        controller is one of these.)"""
        families = proc.families(_MEMBER, self.path)
        return families[name] if name else set().union(*families.values())

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
            # Look more than once: in the middle of an exec a process has no environment,
            # and is not seen.
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
                         for line in proc.read(log).splitlines()[-3:])


def accepts(where: str | int) -> bool:
    """Does somebody accept connections at a socket's path or at a port?"""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(where if isinstance(where, str) else (ADDRESS, where)) == 0


class Sandbox:
    """One sandbox, by its folder. Raises ElasticError; TryAgain when its Slurm is
    silent."""

    def __init__(self, path: Path):
        self.path = path
        self.conf = path / "slurm.conf"
        self.daemons = Daemons(path)
        self._mark = path / ".elastic-sandbox"

    def environment(self) -> dict[str, str]:
        """The variables that lead Slurm's client commands to this sandbox."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *argv: str) -> str:
        """What a Slurm client command says in this sandbox; ElasticError if it fails."""
        answer = slurm_command(argv, environment=clean_environment() | self.environment())
        if answer.returncode != 0:
            said = answer.stderr.strip() or f"exit status {answer.returncode}"
            raise ElasticError(f"{shlex.join(argv)}: {said}")
        return answer.stdout

    def env(self) -> str:
        """Lines of a shell that set its `environment`."""
        self._check_up()
        return "\n".join(f"export {name}={value}" for name, value in self.environment().items())

    def idle_nodes(self) -> set[str]:
        """The nodes that could take a job now."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return {node for node, state in map(str.split, lines) if state == "idle"}

    def preempt(self, nodes: int, seconds: float) -> str:
        """Take whole nodes with a job of high priority; its id."""
        self._check_up()
        options = ("--job-name=preemptor", "--output=/dev/null", "--chdir=/")
        where = ("--partition=high", f"--nodes={nodes}", "--exclusive")
        what = f"--wrap=exec sleep {seconds:g}"
        return self.run("sbatch", "--parsable", *options, *where, what).strip()

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and all that runs there, as if the power went."""
        self._check_node(node)
        proc.kill_all(lambda: self.daemons.members(node))

    def revive_node(self, node: str) -> None:
        """Start a killed node again; its jobs are gone."""
        self._check_node(node)
        if self.daemons.members(node):
            raise UsageError(f"node is up already: {node}")
        self._start_node(node, programs())

    # ---- up and down

    def up(self, shape: Shape) -> None:
        """Start everything and wait until all nodes are idle; a failure leaves nothing
        behind."""
        paths = programs()
        if self.daemons.members():
            down = f"elastic-sandbox down --name {self.path.name} --dir {self.path.parent}"
            raise UsageError(f"a sandbox is up in {self.path}", down)
        self._make_folders(shape)
        try:
            self._start_daemons(paths, shape)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Kill all its processes, jobs included, and remove its folder if it is there,
        the mark last. UsageError if the folder has none."""
        proc.kill_all(self.daemons.members)
        if not self._exists():
            return
        if self.path.is_symlink() or not self._mark.exists():
            hint = "choose another --name or --dir, or remove it yourself"
            raise UsageError(f"not a sandbox: {self.path}", hint)
        if accepts(f"{self.path}/munge.socket"):  # /proc hides them from another group
            hint = "call this as the user and the group that started it"
            raise ElasticError(f"cannot see the processes of {self.path}", hint)
        for part in set(self.path.iterdir()) - {self._mark}:
            shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
        self._mark.unlink()
        self.path.rmdir()

    def _exists(self) -> bool:
        """Is something at its path? ElasticError if others could have put it, or a link on the
        way, there: Slurm's commands load what is in a sandbox, and `down` removes it."""
        there = [path for path in (self.path, *self.path.parents) if os.path.lexists(path)]
        for path in there:
            if not is_ours(path.lstat().st_uid, is_above=path != self.path):
                raise ElasticError(f"{path} is another user's", "choose another --dir")
        check_private(there[0], is_above=there[0] != self.path)
        return there[0] == self.path

    def _check_up(self) -> None:
        if not self._exists() or not self.daemons.family("slurmctld"):
            raise UsageError(f"no sandbox is up in {self.path}", "elastic-sandbox up")

    def _check_node(self, node: str) -> None:
        self._check_up()
        nodes = sorted(path.name for path in (self.path / "spool").iterdir())
        if node not in nodes:
            raise UsageError(f"no such node: {node!r}", f"one of {', '.join(nodes)}")

    def _make_folders(self, shape: Shape) -> None:
        path = str(self.path)
        if not re.fullmatch(r"/[\w./+-]+", path) or len(path) > _PATH_BYTES:
            hint = f"letters, digits and ./_+- only, {_PATH_BYTES} at most; see --dir"
            raise UsageError(f"unfit folder for a sandbox: {path!r}", hint)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.down()  # a sandbox that a reboot ended
        self.path.mkdir(0o700)
        self._mark.touch()
        for part in ["log", "state", "spool", "tmp", *(f"spool/{node}" for node in shape.names)]:
            (self.path / part).mkdir()

    def _start_daemons(self, paths: dict[str, str], shape: Shape) -> None:
        ports = free_ports("", len(shape.names) + 1)
        _write_configuration(self.path, shape, ports, _cgroup_plugin(paths["slurmctld"]))
        self.start_munged(paths["munged"], "munge")
        self.daemons.start("slurmctld", paths["slurmctld"], "-D", ready=ports[0])
        for node in shape.names:
            self._start_node(node, paths)
        self.daemons.wait(lambda: self._are_idle(shape.names), "all nodes to be idle", "slurmctld")

    def _are_idle(self, names: Sequence[str]) -> bool:
        """Are exactly these nodes idle? False also if slurmctld cannot say yet: it
        listens before its plugins are loaded."""
        with contextlib.suppress(ElasticError):
            return self.idle_nodes() == set(names)
        return False

    def start_munged(self, program: str, name: str, *more: str) -> None:
        stem = f"{self.path}/{name}"
        own = [f"--{what}-file={stem}.{what}" for what in ("pid", "log", "seed")]
        # --force: it refuses a folder that some other user cannot enter.
        own += [f"--key-file={self.path}/munge.key", f"--socket={stem}.socket", *more]
        daemon = [program, "--foreground", "--force", *own]
        self.daemons.start(name, *daemon, ready=f"{stem}.socket")

    def _start_node(self, node: str, paths: dict[str, str]) -> None:
        # -b: as if the node had just booted.
        self.daemons.start(node, paths["slurmd"], "-D", "-b", "-N", node)


# ---- configuration


def _cgroup_plugin(slurmctld: str) -> str:
    """The plugin that needs no cgroups. (slurmd always loads one, and cgroup/v2 would
    want systemd to delegate it a subtree.)"""
    answer = subprocess.run([slurmctld, "-V"], capture_output=True, text=True).stdout
    version = [int(part) for part in re.findall(r"\d+", answer)[:2]]
    return "disabled" if version >= [24, 5] else "cgroup/v1"


def _write_configuration(path: Path, shape: Shape, ports: list[int], cgroup: str) -> None:
    """Fill the templates of etc/sandbox into the folder."""
    host = socket.gethostname().split(".")[0]
    is_local = False
    with contextlib.suppress(OSError):
        is_local = socket.gethostbyname(host) == ADDRESS
    words = dict(
        DIR=path, USER=user_name(), HOST=host, GRACE=shape.grace_s,
        ADDRESS=ADDRESS, CONTROLLER_PORT=ports[0], CPU_PORT=ports[1],
        NODE_PORTS=",".join(map(str, ports[2:])), NODES=",".join(shape.names[:-1]),
        GPUS=shape.gpus, DEVICES=",".join(_gpu_devices(shape.gpus)),
        CGROUP=cgroup, IF_LOCAL="" if is_local else "# ", IF_GPU="" if shape.gpus else "# ",
    )
    for template in (elastic_home() / "etc/sandbox").iterdir():
        text = template.read_text()
        text = re.sub(r"@([A-Z_]+)@", lambda match: str(words[match[1]]), text)
        for setting in shape.settings if template.name == "slurm.conf" else ():
            text = _with_setting(text, setting)
        write_atomic(path / template.name, text.encode(), 0o600)
    write_atomic(path / "munge.key", os.urandom(1024), 0o600)


def _with_setting(text: str, setting: str) -> str:
    """slurm.conf with another line for a key, or with more words in a line."""
    begin, _, more = setting.partition(" ")
    if more:
        return re.sub(rf"(?m)^{re.escape(begin)} .*", lambda line: f"{line[0]} {more}", text)
    key = re.escape(setting.partition("=")[0])
    return re.sub(rf"(?im)^{key}=.*\n", "", text) + setting + "\n"


def _gpu_devices(count: int) -> list[str]:
    """`count` character devices of this machine, which is all that Slurm takes for
    GPUs."""
    devices = sorted(str(path) for path in Path("/dev").rglob("*") if path.is_char_device())
    if len(devices) < count:
        what = f"/dev has {len(devices)} character devices, not {count}"
        raise ElasticError(what, f"--gpus {len(devices)}")
    return sorted(devices, key=lambda name: not name.startswith("/dev/tty"))[:count]


# ---- programs, processes, files


def programs(packages: Mapping[str, str] = PACKAGES) -> dict[str, str]:
    """Where each needed program is; ElasticError with the packages that bring the missing
    ones."""
    path = f"{env('PATH', '/bin')}:{_DAEMON_PATH}"
    paths = {name: shutil.which(name, path=path) for name in packages}
    if missing := [name for name, where in paths.items() if where is None]:
        names = " ".join(sorted({packages[name] for name in missing}))
        what = f"Command not found: {', '.join(missing)}"
        raise ElasticError(what, f"apt-get install {names}")
    return paths


def default_folder() -> Path:
    """The folder of all sandboxes. A login shell, a job and cron have to find the same
    one, so TMPDIR and XDG_RUNTIME_DIR do not count."""
    return Path(f"/tmp/elastic-sandbox-{os.getuid()}")
