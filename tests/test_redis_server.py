"""The run's own redis-server: where it listens, who may in, and how it says what is wrong."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import redis

from elastic import redis_server
from elastic.errors import ElasticError
from elastic.network import bind_address, free_port, interfaces
from helpers import ROOT, wait_until


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
    run, server = start()
    where = {"host": server.endpoint.host, "port": server.endpoint.port}
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(**where).ping()
    assert redis.Redis(**where, password=run.secret()).ping()


def test_its_password_is_in_no_command_line_and_in_no_readable_file(start):
    run, server = start()
    with open(f"/proc/{server.process.pid}/cmdline") as file:
        assert run.secret() not in file.read()
    modes = {path.stat().st_mode & 0o077 for path in (server.folder, server.folder / "redis.conf")}
    assert modes == {0}


def test_it_listens_on_one_address_with_bounded_memory(start):
    run, server = start("redis.maxmemory=64mb")
    client = redis.Redis(server.endpoint.host, server.endpoint.port, password=run.secret())
    assert client.config_get("bind")["bind"] == "127.0.0.1"
    assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert client.config_get("save")["save"] == ""


def test_stopping_it_leaves_nothing(start):
    _, server = start()
    server.stop()
    assert not server.alive()
    assert not server.folder.exists()


def test_a_taken_port_is_named_with_the_way_out(make_run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = make_run(f"redis.port={port}")
        with pytest.raises(ElasticError, match=f"127.0.0.1:{port}") as caught:
            redis_server.start(run, run.config(), "127.0.0.1", epoch=1)
    assert "redis.port = 0" in caught.value.hint
    assert not list(run.path.glob("redis-*"))


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


def test_it_dies_with_the_process_that_started_it(make_run):
    run = make_run()
    code = (
        "import sys, time; from pathlib import Path; from elastic import redis_server;"
        "from elastic.rundir import RunDir; run = RunDir(Path(sys.argv[1]));"
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
    wait_until(lambda: not os.path.exists(f"/proc/{server}/exe"), 10, "redis-server is gone")


def test_where_to_listen_is_an_address_an_interface_or_how_the_node_is_known():
    assert bind_address("auto", "localhost") == "127.0.0.1"
    assert bind_address("10.1.2.3", "localhost") == "10.1.2.3"
    assert bind_address("lo", "elsewhere") == interfaces()["lo"] == "127.0.0.1"
    with pytest.raises(ElasticError, match="ib9") as caught:
        bind_address("ib9", "localhost")
    assert "lo (127.0.0.1)" in caught.value.hint
    assert 0 < free_port("127.0.0.1") < 65536
