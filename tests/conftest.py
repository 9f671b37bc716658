"""Fixtures for all tests: an empty home, a run directory, a Redis server, a store of one's own.

Nothing outlives the tests, however this process ends.
"""

import contextlib
import os
import socket
import subprocess
import uuid
from dataclasses import dataclass

import pytest
import redis
from hypothesis import settings

from elastic.base import config as configuration, network
from elastic.base.network import free_port
from elastic.base.signals import die_with_parent
from elastic.run.rundir import Control, Endpoint, RunDir
from helpers import SESSION, afterwards, wait_until
from running import TESTS, command_line, kill_all, members
from stores import Anybody

os.umask(0o022)  # as bin/elastic has it: what others may write to is refused

pytest.register_assert_rewrite("sites")

settings.register_profile("elastic", deadline=None, print_blob=True)
settings.load_profile("elastic")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where ELASTIC_FORBID_SKIPS is set, a skipped test is a failed one.

    But for what no package can mend: a reason that begins with "this machine".
    """
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    mendable = skipped and "this machine" not in str(report.longrepr)
    if mendable and os.environ.get("ELASTIC_FORBID_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and ELASTIC_FORBID_SKIPS is set: {report.longrepr}"
    return report


# Files of more than 14 s, the longest first, but one that mostly waits beside one that computes.
# `make check` runs the others.
LONGEST = (
    "test_sync_slurm", "test_sync", "test_sites", "test_crash_points", "test_sites_local",
    "test_programs", "test_slurm_story", "test_faults", "test_templates", "test_demo",
    "test_chaos", "test_own_loops", "test_doctor", "test_modes", "test_forecast_slurm",
    "test_notice_matrix", "test_sandbox", "test_random_schedules", "test_limits",
    "test_bad_input", "test_documents", "test_own_loop", "test_insider", "test_checkpoint",
    "test_pace", "test_cli", "test_multi_rank", "test_models", "test_crash_passes", "test_waits",
    "test_validation", "test_redis_server", "test_trace", "test_command", "test_guards",
    "test_reconcile", "test_rejections", "test_scores", "test_overlap", "test_sched_slurm",
    "test_damaged_runs", "test_odd_words", "test_launch_env", "test_fuzz_records", "test_health",
    "test_records", "test_report", "test_failing_files", "test_security",
)


def pytest_collection_modifyitems(items):
    """None of the long files is left for the end, when the others are idle."""
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if item.path.stem in place:
            item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def own_ports():
    """Ports that no other session takes between the moment when they are found free and that when
    a daemon listens there. (What runs choose themselves is above these.)"""
    for first in range(3000, 10_000, 700):
        with socket.socket(socket.AF_UNIX) as sign, contextlib.suppress(OSError):
            sign.bind(f"\0elastic-tests-{first}")  # of this machine, for as long as it is open
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(network, "PORTS", range(first, first + 700))
                yield
                return
    yield


@pytest.fixture(scope="session", autouse=True)
def nobodys_home(tmp_path_factory):
    """What tests ask themselves leaves nothing in the user's home, and no process."""
    folder = tmp_path_factory.getbasetemp()
    kill = ('"$ELASTIC_PYTHON" "$1" "$2"', str(TESTS / "running.py"), str(folder))
    with afterwards(*kill), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_HOME_DIR", str(folder / "nobodys"))
        patch.setenv(SESSION, str(folder))
        yield
    with contextlib.suppress(AssertionError):  # one may be about to end
        wait_until(lambda: not members(folder), 2, "nobody is left")
    left = [command_line(pid) for pid in members(folder)]
    kill_all(folder)
    assert not left


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty registry, runs root and site: nothing of the user's is read or written."""
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / "registry"))
    monkeypatch.setenv("ELASTIC_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ELASTIC_SITE", os.devnull)
    return tmp_path


@pytest.fixture
def make_config(home):
    """make_config("key=value", ..., name=...) -> a resolved Config on the local scheduler."""

    def make(*overrides: str, name: str = "run-a") -> configuration.Config:
        path = home / f"{name}.toml"
        path.write_text('[run]\nscheduler = "local"\n[train]\nepochs = 1\n')
        return configuration.load(path, overrides)

    return make


@pytest.fixture
def make_run(home, make_config):
    """make_run("key=value", ..., name=...) -> a fresh run directory."""

    def make(*overrides: str, name: str = "run-a") -> RunDir:
        config = make_config(*overrides, name=name)
        return RunDir.create(home / "runs", config, Control("local", "running", 1, 4), {"A": "b"})

    return make


@pytest.fixture
def run(make_run) -> RunDir:
    return make_run()


@dataclass
class Server:
    """A redis-server that tests share, and where it is."""

    endpoint: Endpoint
    password: str
    process: subprocess.Popen

    def client(self) -> redis.Redis:
        return redis.Redis(self.endpoint.host, self.endpoint.port, password=self.password)


def start_redis(folder, *options: str) -> Server:
    """A redis-server on a free loopback port, with a password; the caller kills its process."""
    password = uuid.uuid4().hex
    for _ in range(5):  # the port may be taken between finding it and using it
        port = free_port("127.0.0.1")
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "",
                   "--requirepass", password, "--dir", str(folder), *options]
        with open(folder / "redis.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )
        server = Server(Endpoint("127.0.0.1", port, 1), password, process)

        def answers(server=server):
            if server.process.poll() is not None:
                return "ended"
            with contextlib.suppress(redis.RedisError):
                return server.client().ping()

        if wait_until(answers, 20, "redis-server answers") is True:
            return server
    raise AssertionError(f"redis-server does not start: {(folder / 'redis.log').read_text()}")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """One real server for the session."""
    server = start_redis(tmp_path_factory.mktemp("redis"))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def make_store(redis_server):
    """make_store(name) -> a store on the session's server; by default under a name of its own."""
    stores = []
    unique = f"run-{uuid.uuid4().hex[:12]}"

    def make(name: str = unique) -> Anybody:
        stores.append(Anybody.connect(redis_server.endpoint, redis_server.password, name))
        stores[-1].load_scripts()
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store) -> Anybody:
    return make_store()
