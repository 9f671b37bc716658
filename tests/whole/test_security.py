"""What other users of the machine may try, and what a worker may not: each is refused.

A run of a worker goes on over TLS under a umask of 0, below a folder that everybody may enter,
and whose default ACL would let a group write to all that is made there.
The other user is `nobody`, also as a member of the owner's group; to become that takes root.
pytest tests/whole/test_security.py
"""

import contextlib
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import redis
from redis.connection import parse_url

from elastic.base import config as configuration, durable
from elastic.base.environment import elastic_home, keep_compiled
from elastic.base.errors import ElasticError, TryAgain, UsageError
from elastic.commands import shared
from elastic.jobs.sched import JobSpec
from elastic.jobs.sched_local import LocalScheduler
from elastic.jobs.sched_slurm import SlurmScheduler
from elastic.lab import sandbox
from elastic.local.master import redis_server
from elastic.local.store import Ask, Store, WorkerStore
from elastic.people import doctor, tryout
from elastic.run.rundir import SECRETS, Control, Endpoint, RunDir
from elastic.saved import inner_state
from forks import GROUP, NOBODY, as_nobody, share
from helpers import ROOT, elastic, elastic_here, environment, listening, short_folder, wait_until
from running import Running, command_line, members, running
from stores import BothSides, who_says_it_all

RUN = 'run.scheduler = "local"\ntrain.epochs = 1\n'
TOKEN = "a-token-of-the-users-5f1c"
LEASE = {"job_id": "1", "node": "n", "pid": 1, "state": "training", "version": 0, "step": 0,
         "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0}
root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


def works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (PermissionError, FileNotFoundError):  # gone: the master prunes
        return False
    return True


def below(top: Path) -> Iterator[Path]:
    """All that is in a folder, at any depth; what the master prunes meanwhile is passed over."""
    for folder, folders, files in os.walk(top):
        yield from (Path(folder, name) for name in (*folders, *files))


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def run(open_folder: Path) -> Iterator[Running]:
    """A worker over TLS, with a secret in the user's environment, in a folder whose default ACL
    is no better than the umask; others may enter the run."""
    share(open_folder)
    before = os.umask(0)
    settings = {"elastic.max": 1, "redis.tls": True}
    patch = pytest.MonkeyPatch()
    patch.setattr("running.environment", lambda home, **extra: environment(
        home, MY_TOKEN=TOKEN, **extra))
    try:
        with running(open_folder, settings, samples=1 << 20, step_s=0.2) as found:
            found.workers(1)
            found.versions(1)
            found.run.path.chmod(0o755)
            yield found
    finally:
        patch.undo()
        os.umask(before)


@pytest.fixture
def server(make_run) -> Iterator[tuple[RunDir, Callable[[str], BothSides]]]:
    """A run's server by itself, and a store on it as any of the roles; without TLS."""
    run = make_run("redis.tls=false")
    started = redis_server.start(run, run.config(), "127.0.0.1", 1)
    run.set_endpoint(started.endpoint)
    stores = [BothSides.of(run, started.endpoint)]
    stores[0].set_master(0, {})

    def connect(role: str) -> BothSides:
        stores.append(who_says_it_all(role).open(run, 5.0))
        return stores[-1]

    yield run, connect
    for store in stores:
        store.close()
    started.stop()


# ---- the network --------------------------------------------------------------------------------


def answers(where: tuple[str, int], said: bytes, tls: bool) -> bytes:
    """What a server says to bytes, without any password; empty if it hangs up."""
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(where, timeout=5) as plain:
            line = blind.wrap_socket(plain) if tls else plain
            line.sendall(said)
            return line.recv(4096)
    except OSError:
        return b""


@root
def test_every_port_of_the_run_is_bound_to_one_address_and_refuses_who_has_no_password(run):
    ports = listening(members(run.home))
    endpoint = run.run.endpoint()
    assert (endpoint.host, endpoint.port) in ports
    assert {address for address, _ in ports} == {"127.0.0.1"}
    prefix = f"elastic:{run.run.key}"
    said = ["PING", f"HGETALL {prefix}:master", f"HSET {prefix}:master version 9",
            f"PUBLISH {prefix}:ctl stop",
            "FLUSHALL", "AUTH default x", "AUTH master x", "HELLO 3",
            "SHUTDOWN NOSAVE"]

    def scan() -> list:
        found = [(where, line, answers(where, f"{line}\r\n".encode(), tls).decode())
                 for where in ports for line in said for tls in (False, True)]
        return [each for each in found if each[2][:1] not in ("", "-")]

    assert as_nobody(scan) == []
    answer = answers((endpoint.host, endpoint.port), b"PING\r\n", tls=True)
    assert answer.startswith(b"-NOAUTH")  # it does answer: the scan has reached it


@root
def test_without_tls_nobody_gets_in_either(server):
    run, _ = server
    where = (run.endpoint().host, run.endpoint().port)
    said = ["PING", f"HSET elastic:{run.key}:master version 9", "SHUTDOWN NOSAVE"]
    found = as_nobody(lambda: [answers(where, f"{s}\r\n".encode(), False).decode() for s in said])
    assert [each.split()[0] for each in found] == ["-NOAUTH"] * 3


@pytest.mark.parametrize("signer", ["nobody", "an authority that this machine believes"])
def test_a_server_with_another_certificate_is_hung_up_on_before_a_password_is_sent(
    run, tmp_path, monkeypatch, signer
):
    redis_server._make_certificate(tmp_path, "127.0.0.2")
    if signer != "nobody":
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def serve() -> None:
            with contextlib.suppress(OSError):  # until it is shut down
                while line := middle.accept()[0]:
                    try:
                        with context.wrap_socket(line, server_side=True) as tls:
                            heard.append(tls.recv(4096))
                    except ssl.SSLError as error:
                        heard.append(error.reason)

        thread = threading.Thread(target=serve)
        thread.start()
        real = run.run.endpoint()
        port = middle.getsockname()[1]
        fake = Endpoint("127.0.0.1", port, real.epoch, certificate=real.certificate)
        store = WorkerStore.connect(fake, run.run.password("worker", real), "tiny", 2.0)
        with pytest.raises(TryAgain, match="certificate verify failed"):
            store.now()
        middle.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert heard
    assert all("ALERT" in each for each in heard)


def test_the_run_goes_on_over_tls_and_its_key_is_private(run):
    run.versions(1)
    (key,) = run.run.path.glob("redis-*/key.pem")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "PRIVATE" in key.read_text()
    assert "PRIVATE" not in run.run.endpoint().certificate


def test_no_openssl_is_named_with_the_way_out(make_run, monkeypatch):
    run = make_run("redis.tls=true")
    monkeypatch.setattr(redis_server, "find", lambda configured: "/usr/bin/redis-server")
    monkeypatch.setattr(redis_server, "version", lambda path: (7, 0))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ElasticError, match="openssl") as caught:
        redis_server.start(run, run.config(), "127.0.0.1", 1)
    assert "redis.tls = false" in caught.value.hint


def test_tls_of_ones_own_and_a_server_of_the_sites_are_two_things(make_config):
    with pytest.raises(UsageError, match="redis.tls = true is for the master's own server"):
        make_config("redis.tls=true", "redis.url=redis://site")


# ---- roles --------------------------------------------------------------------------------------

DANGEROUS = [
    "FLUSHALL", "FLUSHDB", "CONFIG SET maxmemory 0", "CONFIG GET *", "DEBUG SLEEP 0", "KEYS *",
    "SHUTDOWN NOSAVE", "MODULE LIST", "REPLICAOF no one", "ACL LIST", "ACL SETUSER worker ~*",
    "CLIENT KILL TYPE normal", "CLIENT LIST", "MONITOR", "SAVE", "SCRIPT FLUSH", "SWAPDB 0 1",
    "SELECT 1", "FUNCTION FLUSH", "SLAVEOF no one", "MIGRATE h 1 k 0 1", "LATENCY RESET",
    "EVAL return(1) 0", "SET elastic:another:master x", "GETRANGE elastic:another:master 0 1",
    "PUBLISH elastic:another:ctl stop",
]
OF_THE_MASTER = [
    "PUBLISH {ctl} version~9", "HSET {master} version 9", "DEL {master}", "RENAME {slot} {master}",
    "UNLINK {master}", "PEXPIRE {master} 1", "SET {master} x", "HDEL {master} version",
    "RPUSH {grant} x", "XADD {events} * a b", "COPY {slot} {master}", "SUBSCRIBE {another}",
    "SCRIPT LOAD return~1",
]
A_READER_WRITES = [
    "HSET {slot} step 9", "DEL {slot}", "HSET {offers} 3:1 x",
    "PUBLISH {wake} offer~3", "PUBLISH {ctl} stop", "BLPOP {grant} 1", "EVALSHA x 0",
    "MULTI",
]


def refused(store: Store, line: str) -> bool:
    names = {"slot": "slot:3", "offers": "offers:5", "grant": "grant:3:1"}
    keys = {name: store._key(names.get(name, name))
            for name in ("master", "ctl", "wake", "events", "another", *names)}
    words = [word.replace("~", " ") for word in line.format_map(keys).split()]
    try:
        store._redis.execute_command(*words)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.exceptions.ResponseError as error:  # Redis 7 allows nobody to DEBUG
        return "not allowed" in str(error)
    return False


@pytest.mark.parametrize(
    ("role", "lines"),
    [("worker", [*DANGEROUS, *OF_THE_MASTER]), ("master", DANGEROUS),
     ("reader", [*DANGEROUS, *OF_THE_MASTER, *A_READER_WRITES])],
)
def test_a_role_is_refused_what_is_not_its_own(server, role, lines):
    _, connect = server
    master, store = connect("master"), connect(role)
    master.set_master(3, {"version": 5, "state": "running"})
    before = master.master()
    assert [line for line in lines if not refused(store, line)] == []
    assert master.master() == before


def test_a_worker_cannot_publish_a_version(server):
    _, connect = server
    master, worker, reader = connect("master"), connect("worker"), connect("reader")
    reader.hear("ctl", 0.05)
    for attempt in (lambda: worker.set_master(9, {"version": 9}, "version 9"),
                    lambda: worker.announce("version 9"), worker.master):
        with pytest.raises(ElasticError, match="refuses") as caught:
            attempt()
        assert not isinstance(caught.value, TryAgain)
    master.announce("version 1")
    assert wait_until(lambda: reader.hear("ctl", 0.1), 5, "the master's word") == ["version 1"]
    assert master.master().keys() == {"epoch", "beat"}


def test_a_role_may_do_its_own_work(server):
    _, connect = server
    master, worker, reader = connect("master"), connect("worker"), connect("reader")
    master.hear("wake", 0.05)
    master.set_attempts({3: 1})
    assert worker.lease(3, 1, LEASE, 60.0)
    assert worker.offer(3, 1, 5, {"a": 1})
    assert worker.offered(3, 1, 5)
    ask = Ask(3, 1, 1, 8, ())
    worker.ask(ask)
    assert master.take_asks() == [ask]
    master.grant({(3, 1): (1, [[0, 0, 8]])})
    assert worker.granted(ask, 1.0) == [(0, 0, 8)]
    master.set_verdict("3:1", {"base": 5})
    assert worker.take_verdict(3, 1) == {"base": 5}
    assert master.offers([5]) == {5: {"3:1": b'{"a": 1}'}}
    master.drop_offers(5, ["3:1"])
    assert list(reader.slots()) == [3]
    worker.release(3, 1)
    assert (reader.slots(), reader.attempts()) == ({}, {3: 1})
    assert wait_until(lambda: master.hear("wake", 0.1), 5, "wake-ups")


def test_a_redis_that_knows_no_channels_is_not_told_of_any(run):
    endpoint = run.run.endpoint()
    assert "&" not in redis_server._users(run.run, endpoint, (6, 0))
    assert f"&elastic:{run.run.key}:wake" in redis_server._users(run.run, endpoint, (6, 2))


# ---- secrets ------------------------------------------------------------------------------------


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # an old version goes
        return b""


@root
def test_every_file_with_a_secret_is_unreadable_for_others(run):
    secrets = [run.run.secret(role).encode() for role in SECRETS] + [TOKEN.encode()]
    files = [path for path in below(run.home) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if any(secret in content(path) for secret in secrets)]
    expected = {*SECRETS.values(), "environment.json"}
    assert expected <= {path.name for path in files}
    more = [run.run.path / name for name in ("endpoint.json", "run.toml")]
    paths = [str(path) for path in (*files, *more)]
    for group in (NOBODY, 0):
        read = as_nobody(lambda: [path for path in paths if works(Path(path).read_bytes)], group)
        assert read == []
    assert as_nobody(lambda: works((run.run.path / "control.json").read_bytes))  # it gets there


@root
def test_no_secret_is_in_a_command_line_and_no_environment_can_be_read(run):
    pids = members(run.home)
    assert len(pids) >= 4  # agent, trainer, master and Redis
    lines = "\n".join(command_line(pid) for pid in pids)
    assert not [role for role in SECRETS if run.run.secret(role) in lines]
    assert TOKEN not in lines

    def readable() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()
                and works(Path(f"/proc/{pid}/environ").read_bytes)]

    assert as_nobody(readable) == []


def test_no_password_of_redis_is_in_an_environment(run):
    endpoint = run.run.endpoint()
    words = [(run.run.secret(role), run.run.password(role, endpoint)) for role in SECRETS]
    passwords = [word.encode() for word in sum(words, ())]
    for pid in members(run.home):
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has just ended
            continue
        assert not [password for password in passwords if password in found]


def test_a_password_in_redis_url_is_printed_by_nothing(home):
    file = home / "site.toml"
    file.write_text('[run]\nscheduler = "local"\n[train]\nepochs = 1\n[redis]\n'
                    'url = "redis://me:hunter2@site:6379/0?password=hunter2"\n')
    for command, code in ((["config", file], 0), (["config", file, "--json"], 0),
                          (["config", file, "--set", "redis.url=3", "--set", "redis.prt=1"], 2),
                          (["config", file, "--set", "redis.tls=true"], 2)):
        done = elastic_here(*command)
        assert done.exit_code == code, done.stderr
        assert "hunter2" not in done.output
    done = elastic("submit", file, "--dry-run", env=environment(home))  # with the task's process
    assert (done.returncode, "hunter2" in done.stdout + done.stderr) == (0, False), done
    run = RunDir.create(home / "runs", configuration.load(file), Control("local", "running", 1, 1),
                        {})
    assert "hunter2" in run.config().redis.url  # and it is not lost
    assert stat.S_IMODE((run.path / "run.toml").stat().st_mode) == 0o600
    store = Store.connect(Endpoint("", 0, 1, run.config().redis.url), "", "a", 0.1)
    assert store.where == "site:6379/0"


@pytest.mark.parametrize("url", [
    "redis://me:hun/ter2@site", "redis://me:12?hunter2@site", "redis://me:12#hunter2@site",
    "redis://me:hunter2@site:port", "redis://:hunter2", "redis://me:hunter2@site:65536",
    "redis://me:hunter2@site:0", "redis://me:hunter2@site/x", "redis://me:1/2@hunter2",
    "me:hunter2@site:6379", "unix://me:hunter2@/tmp/socket", "http://me:hunter2@site",
    "redis://me:hunter2@site?foo=bar", "redis://site?pass%77ord=hunter2", "redis://site\\n:hunter2",
    "redis://me:hunter2@site?socket_timeout=1000", "redis://me:hunter2@site?ssl_ca_certs=/a",
])
def test_a_redis_url_that_redis_would_take_for_another_is_refused_unquoted(home, url):
    file = home / "site.toml"
    file.write_text(f'{RUN}redis.url = "{url}"\n')
    with pytest.raises(UsageError) as caught:
        configuration.load(file)
    assert 'site.toml: redis.url: expected "redis://USER:PASSWORD@' in str(caught.value)
    assert "%2F" in str(caught.value)
    with pytest.raises(UsageError) as again:  # what a damaged endpoint.json may say
        Store.connect(Endpoint("", 0, 1, url), "", "a", 0.1)
    for error in (caught.value, again.value):
        assert not re.search("hun|ter2", "".join(traceback.format_exception(error)))


def test_a_dry_run_finds_a_bad_redis_url_and_does_not_repeat_it(home):
    file = home / "site.toml"
    file.write_text(f'{RUN}redis.url = "redis://me:hun/ter2@site"\n')
    done = elastic_here("submit", file, "--dry-run")
    assert done.exit_code == 2
    assert "site.toml: redis.url: expected" in done.stderr
    assert not re.search("hun|ter2", done.output)


def test_no_error_quotes_a_password_of_a_redis_url_at_another_place(home):
    file = home / "site.toml"
    for line in ('redis = "redis://:hunter2@site"', 'redis.url = ["redis://:hunter2@site"]',
                 'redis.url = {password = "hunter2"}', 'redis.urll = "redis://:hunter2@site"',
                 'url = "redis://:hunter2@site"'):
        file.write_text(f"{line}\n{RUN}")
        with pytest.raises(UsageError) as caught:
            configuration.load(file)
        assert "hunter2" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(("url", "shown", "password"), [
    ("redis://site", "redis://site", None),
    ("redis://:hun%2Fter2@site:6380", "redis://site:6380", "hun/ter2"),
    ("redis://me:hun@ter2@[::1]/3", "redis://[::1]/3", "hun@ter2"),
    ("redis://site/0?password=hun@ter2", "redis://site/0", "hun@ter2"),
    ("rediss://me:hunter2@site/1?ssl_ca_certs=/ca&ssl_cert_reqs=none", "rediss://site/1",
     "hunter2"),
])
def test_of_a_redis_url_only_the_server_is_shown(home, url, shown, password):
    (home / "site.toml").write_text(f'{RUN}redis.url = "{url}"\n')
    config = configuration.load(home / "site.toml")
    assert config.shown().redis.url == shown
    store = Store.connect(Endpoint("", 0, 1, config.redis.url), "", "a", 0.1)
    assert store.where == shown.partition("//")[2]
    assert parse_url(config.redis.url).get("password") == password


def test_a_password_on_the_command_line_is_refused_and_not_repeated(make_config):
    for url in ("redis://me:hunter2@site", "redis://site?password=hunter2"):
        with pytest.raises(UsageError, match="on the command line") as caught:
            make_config(f"redis.url={url}")
        assert "hunter2" not in str(caught.value)


# ---- folders ------------------------------------------------------------------------------------


@root
def test_nobody_can_put_or_move_anything_into_a_folder_of_the_run(run):
    tops = (run.run.path, run.home / "registry")
    inside = [path for top in tops for path in (top, *below(top))]
    names = sorted({str(path) for path in inside if path.is_dir() and not path.is_symlink()})
    assert str(run.run.path / "slots" / "0000") in names
    files = [str(path) for path in inside if path.is_file()]
    assert str(run.run.path / "events.jsonl") in files

    def planted() -> list[str]:
        found = []
        for name in names:
            folder = Path(name)
            found += [name for act in (
                lambda: (folder / "planted").touch(), lambda: (folder / "planted").mkdir(),  # noqa: B023
                lambda: (folder / "planted").symlink_to("/etc/passwd"),  # noqa: B023
                lambda: os.rename(folder, f"{folder}-away"),  # noqa: B023
            ) if works(act)]
        return found + [name for name in files if works(lambda: Path(name).open("r+b").close())]  # noqa: B023

    for group in (NOBODY, 0):
        assert as_nobody(planted, group) == []


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_run_directory_that_others_may_write_to_is_refused(make_run, home, mode):
    run = make_run()
    run.path.chmod(mode)
    with pytest.raises(ElasticError, match=f"others may write to .*{mode:04o}") as caught:
        run.config()
    assert f"chmod go-w {run.path}" in caught.value.hint


def test_no_job_begins_in_a_run_directory_that_others_may_write_to(make_run, home):
    run = make_run()
    run.path.chmod(0o775)
    for words in (["agent", run.path, "0"], ["master", run.path], ["launch", run.path],
                  ["reconcile", run.path]):
        done = subprocess.run([ROOT / "bin" / "elastic", *words], env=environment(home),
                              capture_output=True, text=True)
        assert done.returncode not in (0, 75)
        assert "others may write to" in done.stdout + done.stderr


@root
def test_a_run_directory_of_another_user_is_refused(make_run):
    run = make_run()
    os.chown(run.path, NOBODY, NOBODY)
    with pytest.raises(ElasticError, match=f"another user's .uid {NOBODY}, not 0."):
        run.config()


@root
@pytest.mark.parametrize("planted", ["owner", "mode"])
def test_a_folder_of_local_jobs_that_somebody_else_has_made_is_refused(home, planted):
    jobs = home / "registry" / "local" / "jobs"
    jobs.mkdir(parents=True)
    registry = home / "registry"
    os.chown(registry, NOBODY, NOBODY) if planted == "owner" else registry.chmod(0o777)
    with pytest.raises(ElasticError, match="another user's|others may write"):
        LocalScheduler()


@root
@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_file_for_others_is_not_written_through_what_another_user_planted(open_folder, planted):
    for_all, victim = open_folder / f"all-{planted}", open_folder / f"thesis-{planted}"
    file = for_all / "a"
    for_all.mkdir()
    for_all.chmod(0o1777)
    victim.write_text("mine")
    os.symlink(victim, file) if planted == "link" else os.mkfifo(file)
    os.lchown(file, NOBODY, NOBODY)
    shared.put(file, b"a report")  # root may replace what is another's, others may not
    assert (victim.read_text(), file.read_text()) == ("mine", "a report")


@root
def test_the_doctor_makes_nothing_where_others_could_exchange_it(home, make_config, monkeypatch):
    project = home / "project"
    project.mkdir()
    os.chown(project, 0, GROUP)
    project.chmod(0o2775)
    monkeypatch.setenv("ELASTIC_RUNS", str(project / "runs"))
    for makes in (lambda: doctor._disk(make_config(), {}), lambda: tryout.tried(make_config(), {})):
        with pytest.raises(ElasticError, match=f"others may write to {project}"):
            makes()
    assert not list(project.iterdir())


@root
def test_a_pass_over_another_users_run_makes_nothing(make_run, home):
    run, victim = make_run(), home / "nologin"
    run.mark_done({})
    (run.path / "reconcile.lock").unlink(missing_ok=True)
    (run.path / "reconcile.lock").symlink_to(victim)
    os.chown(run.path, NOBODY, NOBODY)
    assert "another user's" in elastic_here("reconcile", run.path).output
    assert not victim.exists()


@root
def test_a_run_folder_that_another_user_has_planted_gets_no_words(open_folder):
    """The templates' own choice is runs/NAME-JOB, whose name can be guessed."""
    planted, victim = open_folder / "planted-4712", open_folder / "bashrc"
    (planted / "logs/ranks").mkdir(parents=True)
    victim.write_text("mine")
    (planted / "logs/ranks/rank-000.log").symlink_to(victim)
    for folder in (planted, planted / "logs", planted / "logs/ranks"):
        os.chown(folder, NOBODY, NOBODY)
    given = os.environ | {"ELASTIC_RUN_DIR": str(planted), "ELASTIC_HOME": str(ROOT),
                          "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    rank = [ROOT / "sbatch/rank.sh", "echo", "words"]
    done = subprocess.run(rank, env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "words\n")
    assert "rank 0 has no log of its own" in done.stderr
    step = ["bash", "-c", 'source "${ELASTIC_HOME}/sbatch/step.sh"; elastic::environment']
    given |= {"SLURM_JOB_ID": "4712"}
    done = subprocess.run(step, env=given, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{planted} is another user's" in done.stderr
    assert victim.read_text() == "mine"


@root
def test_compiled_code_is_kept_where_nobody_else_can_put_any(open_folder, monkeypatch):
    """torch unpickles it. Its own choice is a name in /tmp, whoever made that folder."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    for_all = open_folder / "compiled"
    for_all.mkdir()
    for_all.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(for_all))
    planted = for_all / f"elastic-compiled-{os.getuid()}"
    for is_taken in (False, True):
        monkeypatch.delenv(name, raising=False)
        os.chown(planted, NOBODY, NOBODY) if is_taken else None
        keep_compiled()
        chosen = Path(os.environ[name])
        assert (chosen == planted) is not is_taken
        assert stat.S_IMODE(durable.check_private(chosen).stat().st_mode) == 0o700
    keep_compiled()
    assert os.environ[name] == str(chosen)  # what is set stays
    monkeypatch.delenv(name)


def test_a_link_planted_as_the_folder_of_sandboxes_leads_nowhere(open_folder, monkeypatch):
    victim, planted = open_folder / "victim" / "default", open_folder / "planted"
    victim.mkdir(parents=True)
    planted.symlink_to(victim.parent)
    os.lchown(planted, NOBODY, NOBODY) if os.getuid() == 0 else pytest.skip("needs root")
    monkeypatch.setattr(sandbox, "default_folder", lambda: planted)
    box = sandbox.Sandbox(planted / "default")
    with pytest.raises(ElasticError, match="is another user's"):
        box._make_folders(sandbox.Shape())
    assert victim.exists()


# ---- names --------------------------------------------------------------------------------------

HOSTILE = "x; touch PWNED $(touch PWNED) `touch PWNED` | touch PWNED & 'touch PWNED' \"\n#"


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "-x", ".x", "a b", "a;b", "a$(b)", "a\n"])
def test_a_name_that_is_a_path_or_a_command_is_refused(make_config, name):
    with pytest.raises(UsageError, match="letters, digits"):
        make_config(f"run.name={json.dumps(name)}")


def test_what_sbatch_gets_is_words_and_no_shell_reads_them(make_config, tmp_path):
    """A recorder in sbatch's place, then the batch script itself with what it was handed."""
    place = tmp_path / HOSTILE.replace("/", "").replace("\n", "")
    place.mkdir()
    keys = ("partition", "account", "qos", "time", "exclude", "gres")
    config = make_config(*(f"slurm.{key}={json.dumps(HOSTILE)}" for key in keys))
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("sbatch", "srun"):
        program = bin_ / name
        said = tmp_path / f"{name}.said"
        program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >{said}\necho 17\n')
        program.chmod(0o755)
    env = {"PATH": f"{bin_}:{os.environ['PATH']}"}
    spec = JobSpec(place, "a", "worker", 3, config, env, (HOSTILE,), (1, 1))
    assert SlurmScheduler(env).submit(spec) == "17"
    words = (tmp_path / "sbatch.said").read_text().split("\0")[:-1]
    for name in ("partition", "account", "qos", "time"):
        assert f"--{name}={HOSTILE}" in words
    assert f"--exclude={HOSTILE},{HOSTILE}" in words
    assert words[-2:] == [str(place), "3"]
    script = str(elastic_home() / "sbatch" / "worker.sbatch")
    arguments = words[words.index(script) :]
    done = subprocess.run(["bash", *arguments], env={**env, "SLURM_JOB_ID": "17"}, cwd=place,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    handed = (tmp_path / "srun.said").read_text().split("\0")[:-1]
    assert handed[-2:] == [str(place), "3"]
    assert not list(tmp_path.rglob("PWNED"))


POINTER = {"slot": 1, "attempt": 1, "version": 5,
           "files": [{"name": "x.safetensors", "bytes": 3, "xxh3": "0"}]}
NO_POINTERS = [
    {}, POINTER | {"slot": "../.."}, POINTER | {"slot": True},
    POINTER | {"version": "9"}, POINTER | {"files": {}}, POINTER | {"files": ["x"]},
    POINTER | {"files": [{"name": 3, "bytes": 3, "xxh3": ""}]}, POINTER | {"files": [{}]},
    *(POINTER | {"files": [{"name": name, "bytes": 3, "xxh3": ""}]}
      for name in ("../../secret", "/etc/passwd", "\0", "x" * 300)),
]


def test_a_pointer_that_is_none_is_passed_by(make_run):
    run = make_run()
    file = run.slots.path(1) / "inner.json"
    for pointer in NO_POINTERS:
        file.write_text(json.dumps(pointer))
        assert inner_state.choose(run, 1, 5, 3) == (None, "fresh")
    for text in ("", "3", "[]", "[" * 100_000):
        file.write_text(text)
        assert inner_state.choose(run, 1, 5, 3) == (None, "fresh")
    file.write_text(json.dumps(POINTER))
    chosen, origin = inner_state.choose(run, 1, 5, 3)
    assert asdict(chosen) | {"files": [*chosen.files]} == POINTER
    assert origin == "own of version 5"
    assert inner_state.choose(run, 1, 9, 3) == (None, "fresh")
    assert inner_state.choose(run, 0, 5, 3) == (None, "fresh"), "that is another slot's"


def test_a_pointer_that_cannot_be_read_now_is_not_passed_by(make_run, monkeypatch):
    def silent(_path):
        raise TryAgain("the filesystem fails for now")

    monkeypatch.setattr(inner_state, "hint", silent)
    with pytest.raises(TryAgain):
        inner_state.choose(make_run(), 1, 5, 3)  # it will be there


@pytest.mark.parametrize("name", ["..", "."])
def test_a_pointer_cannot_lead_out_of_its_slot(make_run, name):
    run = make_run()
    run.slots.path(1)
    pointer = inner_state.Pointer(1, 1, 5, ({"name": name, "bytes": 0, "xxh3": ""},))
    assert inner_state.load(run, pointer, None, 0)
