"""A private multi-node Slurm on one machine: for trying things, for demos, and for the tests.

A sandbox is a folder: configuration, munge key, spool and logs. Every daemon is a child of one
small process, the keeper. It is the subreaper of all that runs in the sandbox: whatever loses its
parent (a stepd, the orphans of a killed job, a daemon that a job started) becomes the keeper's
child. So the processes of a sandbox are the keeper's descendants, and `down` leaves none of them.
Should the keeper itself be killed, the daemons are known by a variable in their environment.

Nodes n1..nN have pretended GPUs and are in the partitions `preempt` and `high`; c1 has many CPUs
and is `cpu`, where masters run and nothing is preempted. No root is needed; an ordinary user's
sandbox runs that user's jobs only. Nothing in /etc/slurm is read or written: all is in etc/sandbox.
"""

import contextlib
import ctypes
import functools
import json
import os
import pwd
import random
import re
import select
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import click

from elastic import config
from elastic.errors import ElasticError, UsageError
from elastic.sched_slurm import slurm_command

MEMBER = "ELASTIC_SANDBOX_MEMBER"  # in the daemons' environment: the folder of their sandbox
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
_PORTS = range(10_000, 32_000)  # below those that the kernel hands out to clients
_PATH_BYTES = 80  # of the folder; a Unix socket's path has 107 at most
_NO_DRIVER = 240  # a major device number from the range for local use
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_DAEMON_PATH = "/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/opt/slurm/sbin:/opt/slurm/bin"
_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
_ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
Where = str | tuple[str, int]  # a socket: its path, or its address and port


@dataclass(frozen=True)
class Shape:
    """What a sandbox looks like. `settings`: Key=Value lines of slurm.conf, over the template's."""

    nodes: int = 4
    gpus: int = 2  # of each node
    grace_s: int = 5
    accounting: bool = False
    settings: tuple[str, ...] = ()

    @property
    def gpu_nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def all_nodes(self) -> list[str]:
        return [*self.gpu_nodes, "c1"]


class Sandbox:
    """One sandbox, by its folder. Raises ElasticError; TryAgain when its Slurm is silent."""

    def __init__(self, path: Path):
        self.path = path
        self.conf = path / "slurm.conf"

    # ---- use

    def environment(self) -> dict[str, str]:
        """The variables that lead Slurm's client commands to this sandbox."""
        path = config.env("PATH", "/usr/bin:/bin")
        more = "" if shutil.which("sbatch", path=path) else f":{Path(programs()['sbatch']).parent}"
        return {"SLURM_CONF": str(self.conf)} | ({"PATH": path + more} if more else {})

    def run(self, *argv: str) -> str:
        """What a Slurm client command says in this sandbox; ElasticError if it fails."""
        given = config.clean_environment() | self.environment()
        answer = slurm_command(argv, environment=given)
        if answer.returncode != 0:
            raise ElasticError(f"{shlex.join(argv)}: {answer.stderr.strip()}")
        return answer.stdout

    def env(self) -> str:
        """Print the variables that lead Slurm's commands to it, for eval."""
        self._check_up()
        variables = self.environment().items()
        return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables)

    def status(self) -> str:
        """Show nodes and jobs."""
        self._check_up()
        nodes = self.run("sinfo", "--Node", "--format=%6N %9P %8t %5c %G")
        return nodes + "\n" + self.run("squeue", "--format=%8i %9P %10T %10M %6N %30j %r").rstrip()

    def idle_nodes(self) -> set[str]:
        """The nodes that could take a job now."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return {node for node, state in map(str.split, lines) if state == "idle"}

    # ---- faults

    def preempt(self, nodes: int, seconds: float) -> str:
        """Take whole nodes with a job of high priority; print its id."""
        options = ("--parsable", "--job-name=preemptor", "--output=/dev/null", "--chdir=/")
        where = ("--partition=high", f"--nodes={nodes}", "--exclusive")
        return self.run("sbatch", *options, *where, f"--wrap=exec sleep {seconds:g}").strip()

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and all that runs there, as if the power went."""
        self._check_node(node)
        _kill_all(lambda: self._on_node(node))

    def revive_node(self, node: str) -> None:
        """Start a killed node again; its jobs are gone."""
        self._check_node(node)
        if self._on_node(node):
            raise UsageError(f"node is up already: {node}")
        self._start(node, programs()["slurmd"], "-D", "-N", node)

    def hang_controller(self, seconds: float) -> None:
        """Have slurmctld answer nobody for a while; returns at once."""
        self._check_up()
        pid = int(_read(self.path / "pid/slurmctld"))
        self._start("resume", "/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}")
        os.kill(pid, SIGSTOP)

    # ---- up and down

    def up(self, shape: Shape) -> None:
        """Start everything and wait until all nodes are idle; a failure leaves nothing behind."""
        found = programs(shape.accounting)
        if self.members():
            raise UsageError(f"a sandbox is up in {self.path}", "elastic-sandbox down")
        self._make_folders(shape)
        try:
            self._start_keeper()
            self._start_daemons(found, shape)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Kill all its processes, jobs included, and remove its files."""
        keeper = self._keeper()  # last, or orphans would escape
        _kill_all(lambda: self.members() - {keeper})
        _kill_all(self.members)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            raise ElasticError(f"cannot remove {self.path}", "is it another user's?")
        if self.path.parent == default_folder():
            with contextlib.suppress(OSError):  # not empty: others are in it
                self.path.parent.rmdir()

    def members(self) -> set[int]:
        """The processes of this sandbox: the daemons, the jobs, and what those left behind."""
        daemon, conf = f"\0{MEMBER}={self.path}\0", f"\0SLURM_CONF={self.conf}\0"
        environs = {pid: _environ(pid) for pid in _parents()}
        return _with_descendants(
            {
                pid
                for pid, environ in environs.items()
                if daemon in environ or (conf in environ and "\0SLURM_JOB_ID=" in environ)
            }
        )

    def _on_node(self, node: str) -> set[int]:
        log = str(self.path / f"log/{node}.log")  # slurmd and its stepds hold it open
        mark = f"\0SLURMD_NODENAME={node}\0"
        members = self.members()
        found = {pid for pid in members if mark in _environ(pid) or log in _open_files(pid)}
        return _with_descendants(found)

    def _check_up(self) -> None:
        if self._keeper() is None:
            raise UsageError(f"no sandbox is up in {self.path}", "elastic-sandbox up")

    def _check_node(self, node: str) -> None:
        self._check_up()
        nodes = sorted(path.name for path in (self.path / "spool").iterdir())
        if node not in nodes:
            raise UsageError(f"no such node: {node!r}", f"one of {', '.join(nodes)}")

    # ---- starting

    def _make_folders(self, shape: Shape) -> None:
        if not re.fullmatch(r"/[\w./+-]+", str(self.path)) or len(str(self.path)) > _PATH_BYTES:
            hint = f"letters, digits and ./_+- only, {_PATH_BYTES} characters at most; see --dir"
            raise UsageError(f"unfit folder for a sandbox: {str(self.path)!r}", hint)
        shutil.rmtree(self.path, ignore_errors=True)  # of a sandbox that a reboot ended
        self.path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.path.parent == default_folder() and self.path.parent.stat().st_uid != os.getuid():
            raise ElasticError(f"{self.path.parent} is another user's", "use --dir")
        spool = [f"spool/{node}" for node in shape.all_nodes]
        for part in ["", "log", "state", "pid", "dev", "spool", *spool]:
            (self.path / part).mkdir()
            (self.path / part).chmod(0o711)  # munge and other users' jobs go through here

    def _start_keeper(self) -> None:
        os.mkfifo(self.path / "keeper.fifo", 0o600)
        command = [sys.executable, "-P", "-m", "elastic.sandbox", "keep", str(self.path)]
        quiet = ["sh", "-c", 'exec "$@" >log/keeper.out 2>&1', "sh"]
        self._run_program("setsid", "--fork", *quiet, *command)
        self._await(lambda: self._keeper() is not None, "keeper")

    def _run_program(self, *argv: str) -> None:
        """Run a program that is no client of Slurm, as a member of the sandbox."""
        given = config.clean_environment() | {
            MEMBER: str(self.path),
            "SLURM_CONF": str(self.conf),
            "PYTHONPATH": str(config.elastic_home() / "lib"),
            "MYSQL_UNIX_PORT": f"{self.path}/mariadb.socket",  # where slurmdbd looks for MariaDB
        }
        done = subprocess.run(argv, env=given, cwd=self.path, capture_output=True, text=True)
        if done.returncode != 0:
            raise ElasticError(f"{argv[0]} failed: {done.stdout}{done.stderr}".strip())

    def _keeper(self) -> int | None:
        pid = _read(self.path / "pid/keeper")
        mark = f"\0{MEMBER}={self.path}\0"
        return int(pid) if pid and mark in _environ(int(pid)) else None

    def _start(self, name: str, *argv: str, ready: Where | None = None) -> None:
        """Have the keeper start a command, with its output in log/NAME.out; wait for its socket."""
        record = self.path / "pid" / name
        record.unlink(missing_ok=True)
        with open(self.path / "keeper.fifo", "w") as fifo:  # a line is too short to be torn
            fifo.write(json.dumps({"name": name, "argv": argv}) + "\n")
        self._await(record.exists, name)
        self._await(lambda: ready is None or _listens(ready), name)

    def _await(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            pid = _read(self.path / "pid" / name)
            if time.monotonic() > deadline or (pid and int(pid) not in _parents()):
                raise ElasticError(f"the sandbox did not start: no {name}\n{self._last_words()}")
            time.sleep(0.02)

    def _last_words(self) -> str:
        logs = sorted((self.path / "log").iterdir())
        lines = [(log.name, line) for log in logs for line in _read(log).decode().splitlines()[-3:]]
        return "\n".join(f"  {name}: {line}" for name, line in lines)

    def _start_daemons(self, found: dict[str, str], shape: Shape) -> None:
        address, ports = _loopback_address(), _free_ports(len(shape.all_nodes) + 2)
        _write_configuration(self.path, shape, address, ports)
        munge = f"{self.path}/munge"
        own = [f"--{what}-file={munge}.{what}" for what in ("key", "pid", "log", "seed")]
        # --force: it refuses a folder that some other user cannot enter.
        daemon = [found["munged"], "--foreground", "--force", f"--socket={munge}.socket"]
        self._start("munged", *daemon, *own, ready=f"{munge}.socket")
        if shape.accounting:
            self._start_accounting(found, (address, ports[1]))
        self._start("slurmctld", found["slurmctld"], "-D", ready=(address, ports[0]))
        for node in shape.all_nodes:
            self._start(node, found["slurmd"], "-D", "-N", node)
        self._await(lambda: self.idle_nodes() == set(shape.all_nodes), "idle nodes")

    def _start_accounting(self, found: dict[str, str], where: Where) -> None:
        data, database = f"{self.path}/mariadb", f"{self.path}/mariadb.socket"
        common = ["--no-defaults", f"--datadir={data}", f"--user={_user()}"]
        self._run_program(found["mariadb-install-db"], *common, "--skip-test-db")
        options = ["--skip-networking", f"--socket={database}", f"--init-file={data}.sql"]
        small = ["--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]
        self._start("mariadbd", found["mariadbd"], *common, *options, *small, ready=database)
        self._start("slurmdbd", found["slurmdbd"], "-D", ready=where)


# ---- configuration


def _write_configuration(path: Path, shape: Shape, address: str, ports: list[int]) -> None:
    words = {
        "DIR": path,
        "USER": _user(),
        "HOST": _host(),
        "ADDRESS": address,
        "CONTROLLER_PORT": ports[0],
        "DATABASE_PORT": ports[1],
        "CPU_PORT": ports[2],
        "NODE_PORTS": ",".join(map(str, ports[3:])),
        "NODES": ",".join(shape.gpu_nodes),
        "GPUS": shape.gpus,
        "DEVICES": ",".join(_gpu_devices(path / "dev", shape.gpus)),
        "GRACE": shape.grace_s,
        "PASSWORD": os.urandom(16).hex(),
    }
    # Slurm binds to what the host's name means (LOCAL): right where that is loopback, else fatal.
    local = address == _host_address()
    drop = {"ACCOUNTING": not shape.accounting, "LOCAL": not local, "GPU": not shape.gpus}
    for template in (config.elastic_home() / "etc/sandbox").iterdir():
        text = template.read_text()
        for tag, is_off in drop.items():
            text = re.sub(rf"^@IF_{tag}@ (.*\n)", "" if is_off else r"\1", text, flags=re.MULTILINE)
        text = re.sub(r"@([A-Z_]+)@", lambda match: str(words[match[1]]), text)
        for setting in shape.settings if template.name == "slurm.conf" else ():
            key = re.escape(setting.partition("=")[0])
            text = re.sub(rf"(?im)^{key}=.*\n", "", text) + setting + "\n"
        _write(path / template.name, text.encode(), 0o600 if "Pass" in text else 0o644)
    _write(path / "munge.key", os.urandom(1024), 0o600)


def _gpu_devices(folder: Path, count: int) -> list[str]:
    """Paths of `count` character devices: Slurm takes nothing else for GPUs, but opens none.

    Root makes some that lead nowhere; others borrow what the machine has.
    """
    made = [folder / f"gpu{number}" for number in range(count)]
    try:
        for number, device in enumerate(made):
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(_NO_DRIVER, number))
        return [str(device) for device in made]
    except PermissionError:
        found = sorted(str(path) for path in Path("/dev").rglob("*") if path.is_char_device())
    if len(found) < count:
        raise ElasticError(f"/dev has {len(found)} character devices, not {count}", "see --gpus")
    return sorted(found, key=lambda name: not name.startswith("/dev/tty"))[:count]


def _free_ports(count: int) -> list[int]:
    ports = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ElasticError(f"fewer than {count} TCP ports are free in {_PORTS}")


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _host_address() -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(_host())
    return ""


def _loopback_address() -> str:
    return _host_address() if _host_address().startswith("127.") else "127.0.0.1"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ElasticError(f"uid {os.getuid()} has no name", "Slurm needs a passwd entry") from None


# ---- programs, processes, files


def programs(accounting: bool = False) -> dict[str, str]:
    """Where each needed program is; ElasticError with the packages that bring the missing ones."""
    packages = _PACKAGES | (_ACCOUNTING_PACKAGES if accounting else {})
    path = f"{config.env('PATH', '/bin')}:{_DAEMON_PATH}"
    found = {name: shutil.which(name, path=path) for name in packages}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        names = " ".join(sorted({packages[name] for name in missing}))
        raise ElasticError(f"Command not found: {', '.join(missing)}", f"apt-get install {names}")
    return found


def _listens(where: Where) -> bool:
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(where) == 0


def _parents() -> dict[int, int]:
    """Every live process and its parent; a zombie has ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _read(folder / "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            found[int(folder.name)] = int(fields[1])
    return found


def _with_descendants(roots: set[int]) -> set[int]:
    """`roots` and their descendants, but for this process and its ancestors: not to be killed."""
    parents = _parents()
    family = roots & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    pid = os.getpid()
    while pid in parents:
        family.discard(pid)
        pid = parents[pid]
    return family


def _kill_all(find: Callable[[], set[int]]) -> None:
    """SIGKILL what `find` returns. They are stopped first, so that none can fork and get away."""
    stopped: set[int] = set()
    while more := find() - stopped:
        _send(more, SIGSTOP)
        stopped |= more
    _send(stopped, SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := stopped & _parents().keys():
        if time.monotonic() > deadline:
            raise ElasticError(f"cannot kill processes {sorted(left)}", "are they another user's?")
        time.sleep(0.02)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


def _environ(pid: int) -> str:
    return "\0" + _read(Path(f"/proc/{pid}/environ")).decode(errors="replace")


def _read(path: Path) -> bytes:
    """The file's content; empty where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _write(path: Path, content: bytes, mode: int) -> None:
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(content)


# ---- the keeper


def _keep(path: Path) -> None:
    """Parent of all daemons and of every orphan; starts what the FIFO asks for; never returns."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    fifo = os.open(path / "keeper.fifo", os.O_RDWR)
    os.umask(0o022)
    _write(path / "pid/keeper", str(os.getpid()).encode(), 0o644)
    while True:
        if select.select([fifo], [], [], 0.2)[0]:
            for line in os.read(fifo, 65536).splitlines():
                _spawn(path, **json.loads(line))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _spawn(path: Path, name: str, argv: list[str]) -> None:
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(path / f"log/{name}.out", "ab") as log:
        child = subprocess.Popen(argv, cwd="/", stdout=log, start_new_session=True, **pipes)
    (path / "pid" / name).write_text(str(child.pid))


# ---- command line


def default_folder() -> Path:
    """The same for a login shell, a job and cron; therefore not in TMPDIR or XDG_RUNTIME_DIR."""
    return Path(f"/tmp/elastic-sandbox-{os.getuid()}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """A private multi-node Slurm on this machine.

    \b
    Example:
      elastic-sandbox up --nodes 4 --gpus 2
      eval "$(elastic-sandbox env)"
      elastic-sandbox preempt --nodes 2 --seconds 30
      elastic-sandbox down
    """


def _command(method: Callable[..., str | None], *parameters: Callable) -> None:
    """Make a subcommand of a function of a sandbox; what it returns is printed."""

    @functools.wraps(method)
    def call(name: str, folder: Path | None, **given: Any) -> None:
        said = method(Sandbox((folder or default_folder()).absolute() / name), **given)
        if said:
            click.echo(said)

    name = click.option("--name", default="default", show_default=True, help="Which sandbox.")
    folder = click.option("--dir", "folder", type=Path, help="Folder of sandboxes.")
    for parameter in (folder, name, *reversed(parameters)):
        call = parameter(call)
    cli.command(method.__name__.strip("_").replace("_", "-"))(call)


def _up(sandbox: Sandbox, **shape: Any) -> str:
    """Start it and wait until its nodes are idle."""
    sandbox.up(Shape(**shape))
    return f'up in {sandbox.path}; to use it: eval "$(elastic-sandbox env)"'


def _number(flag: str, default: float, least: float, what: str) -> Callable:
    kind = click.IntRange(least) if isinstance(default, int) else click.FloatRange(least)
    return click.option(*flag.split(), type=kind, default=default, show_default=True, help=what)


_NODE, _SECONDS = click.argument("node"), _number("--seconds", 30.0, 0.0, "For how long.")
_command(
    _up,
    _number("--nodes", Shape.nodes, 1, "Nodes with GPUs."),
    _number("--gpus", Shape.gpus, 0, "GPUs of each."),
    _number("--grace grace_s", Shape.grace_s, 0, "Seconds of notice before a preemption."),
    click.option("--accounting", is_flag=True, help="With slurmdbd and MariaDB, for sacct."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="In slurm.conf."),
)
_command(Sandbox.env)
_command(Sandbox.status)
_command(Sandbox.preempt, _number("--nodes", 1, 1, "How many."), _SECONDS)
_command(Sandbox.kill_node, _NODE)
_command(Sandbox.revive_node, _NODE)
_command(Sandbox.hang_controller, _SECONDS)
_command(Sandbox.down)


def main() -> None:
    """The command; or the keeper, which `up` starts as `keep FOLDER`."""
    if sys.argv[1:2] == ["keep"]:
        _keep(Path(sys.argv[2]))
    try:
        cli(prog_name="elastic-sandbox")
    except ElasticError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.code)


if __name__ == "__main__":
    main()
