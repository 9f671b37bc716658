"""A private Slurm for tests: `pytest_plugins = ["slurm_sandbox"]` in a test module brings these.

`slurm`: one sandbox for the whole session (4 nodes with 2 GPUs each, and c1; 2 s of notice), that a
test must leave with its nodes up. `new_sandbox(nodes=…, …)`: one of the test's own, for breaking
things. `slurm_here` is `slurm`, with this process's SLURM_CONF pointing at it for the test. Where
the daemons are not installed the tests skip, naming the packages; with ELASTIC_FORBID_SKIPS=1 they
fail.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.base.environment import user_name
from elastic.base.errors import ElasticError
from elastic.base.network import free_ports
from elastic.lab import sandbox
from elastic.lab.sandbox import ADDRESS, PACKAGES, Daemons, Sandbox, Shape
from helpers import ROOT, afterwards

MORE_PACKAGES = PACKAGES | dict.fromkeys(("mariadbd", "mariadb-install-db"), "mariadb-server")
MORE_PACKAGES |= {"slurmdbd": "slurmdbd"}
ADDRESS_OF_NODES = "127.0.0.2"  # that jobs on nodes with names of their own submit from
DOMAIN = "cluster.local"

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
    """Start a sandbox of the test's own: `new_sandbox(nodes=2, accounting=True, …)` as in Shape and
    Site."""
    with _folder() as folder:

        def start(**shape) -> Sandbox:
            _require_slurm(MORE_PACKAGES if shape.get("accounting") else PACKAGES)
            return _up(folder, **shape)

        yield start


@pytest.fixture
def slurm_here(slurm: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The session's sandbox as the Slurm of this process and of those it starts."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    return slurm


def _require_slurm(packages: dict[str, str] = PACKAGES) -> None:
    try:
        sandbox.programs(packages)
    except ElasticError as error:
        if os.environ.get("ELASTIC_FORBID_SKIPS") == "1":
            pytest.fail(f"no private Slurm: {error}")
        pytest.skip(f"no private Slurm: {error.what} ({error.hint})")


DOWN = """
for box in "$1"/*; do "$2" down --dir "$1" --name "${box##*/}"; done
rmdir "$1"
"""


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A short folder (sockets!) whose sandboxes all end with it, however the test ends."""
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    folder.chmod(0o711)
    with afterwards(DOWN, str(folder), str(ROOT / "bin/elastic-sandbox")):
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                Sandbox(path).down()
            shutil.rmtree(folder)


def _up(folder: Path, accounting=False, job_submit=None, stale=None, **shape) -> Sandbox:
    path = folder / str(len(list(folder.iterdir())))
    box = Site(path, accounting, job_submit, stale)
    settings = (*FAST, *box.settings(), *shape.pop("settings", ()))
    box.up(Shape(settings=settings, **shape))
    return box


class _Daemons(Daemons):
    """Those of a site."""

    def __init__(self, site: "Site"):
        super().__init__(site.path)
        self._site = site

    def start(self, name: str, *argv: str, ready: str | int | None = None) -> None:
        if name == "slurmctld":
            self._site.prepare()
        super().start(name, *self._site.around(name), *argv, ready=ready)


class Site(Sandbox):
    """A sandbox with what some sites have: accounting (slurmdbd and MariaDB, for sacct), a
    `job_submit` plugin (a job_submit.lua), and nodes that see the folder `stale` as it was up to a
    minute ago. These nodes have host names of their own, NAME.cluster.local; for root."""

    def __init__(self, path: Path, accounting: bool, job_submit: Path | None, stale: Path | None):
        super().__init__(path)
        self.accounting, self.job_submit, self.stale = accounting, job_submit, stale
        self.packages = MORE_PACKAGES if accounting else PACKAGES
        self.daemons = _Daemons(self)
        self._place = None
        if accounting:  # held until slurmdbd takes it: another daemon could draw the same one
            self._place = socket.create_server((ADDRESS, free_ports("", 1)[0]))

    @property
    def _port(self) -> int:
        """Of slurmdbd."""
        return self._place.getsockname()[1]

    def settings(self) -> list[str]:
        told = ["JobSubmitPlugins=lua"] if self.job_submit else []
        return told if not self.accounting else [
            *told, "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={ADDRESS}", f"AccountingStoragePort={self._port}",
            f"AccountingStoragePass={self.path}/munge.socket", "AccountingStoreFlags=job_comment",
        ]

    def prepare(self) -> None:
        """Start what its controller needs; its files are there, and munge is up."""
        paths = sandbox.programs(self.packages)
        if self.job_submit:  # where slurmctld looks for it: beside slurm.conf
            shutil.copyfile(self.job_submit, self.path / "job_submit.lua")
        if self.stale:
            self._name_nodes()
            self._fill("node.sh", STALE=shlex.quote(str(self.stale)))
            self.start_munged(paths["munged"], "munge-nodes", f"--origin={ADDRESS_OF_NODES}")
        if self.accounting:
            self._start_accounting(paths)

    def around(self, daemon: str) -> list[str]:
        """The command that starts a daemon. The controller can look up the names of nodes: that of
        Slurm 24.11 does, and where nobody knows them it stands still for ten seconds, or dies."""
        nodes = [path.name for path in (self.path / "spool").iterdir()]
        if not self.stale or daemon not in ("slurmctld", *nodes):
            return []
        if daemon == "slurmctld":
            enter = f'mount --bind {self.path}/hosts-known /etc/hosts; exec "$@"'
            return ["/usr/bin/unshare", "--mount", "sh", "-c", enter, "sh"]
        enter = ["/usr/bin/unshare", "--uts", "--mount", "sh", f"{self.path}/node.sh"]
        return [*enter, f"{daemon}.{DOMAIN}"]

    def _name_nodes(self) -> None:
        """As nodes know each other, and as their controller knows them."""
        nodes = [path.name for path in (self.path / "spool").iterdir()]
        for name, domain in (("hosts", f".{DOMAIN}"), ("hosts-known", "")):
            named = "".join(f"{ADDRESS} {node}{domain}\n" for node in nodes)
            (self.path / name).write_text(Path("/etc/hosts").read_text() + named)

    def _start_accounting(self, paths: dict[str, str]) -> None:
        password = os.urandom(16).hex()
        is_local = re.search("(?m)^Comm.*NoInAddrAny", self.conf.read_text())
        only = "CommunicationParameters=NoInAddrAny" if is_local else ""
        port = self._port
        self._fill("slurmdbd.conf", PASSWORD=password, PORT=port, ONLY=only)
        self._fill("mariadb.sql", PASSWORD=password)
        data, database = f"{self.path}/mariadb", f"{self.path}/mariadb.socket"
        common = ["--no-defaults", f"--datadir={data}", f"--user={user_name()}",
                  f"--tmpdir={self.path}/tmp"]  # it removes what others began there
        self.daemons.call("install", paths["mariadb-install-db"], *common, "--skip-test-db")
        options = ["--skip-networking", f"--socket={database}", f"--init-file={data}.sql"]
        small = ["--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]
        self.daemons.start("mariadbd", paths["mariadbd"], *common, *options, *small, ready=database)
        lead = ["/usr/bin/env", f"MYSQL_UNIX_PORT={database}"]
        self._place.close()
        self.daemons.start("slurmdbd", *lead, paths["slurmdbd"], "-D", ready=port)

    def _fill(self, template: str, **words: object) -> None:
        text, path = (ROOT / "tests/sandbox" / template).read_text(), self.path / template
        for word, value in {"DIR": self.path, "USER": user_name(), **words}.items():
            text = text.replace(f"@{word}@", str(value))
        path.touch(0o600)
        path.write_text(text)


def nodes_and_jobs(box: Sandbox) -> str:
    """What its Slurm has to say, for a test that fails."""
    jobs = box.run("squeue", "--format=%8i %9P %10T %10M %6N %30j %r")
    return box.run("sinfo", "--Node", "--format=%6N %9P %8t %5c %G") + jobs


def hang_controller(box: Sandbox, seconds: float) -> None:
    """Have slurmctld answer nobody for a while; return at once."""
    pid = int((box.path / "slurmctld.pid").read_text())
    box.daemons.start("resume", "/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}")
    os.kill(pid, signal.SIGSTOP)
