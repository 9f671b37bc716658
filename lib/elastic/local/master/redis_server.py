"""The run's own redis-server: found, started by the master, stopped with it.

Bound to one address, memory bounded, its files in RUN/redis-EPOCH, no persistence: the
run directory is the durable truth. `noeviction` turns a full server into an error that
the writer sees, instead of keys that quietly vanish.

Nobody gets in without one of three passwords. The server knows only their hashes, and not
from its command line. They are for this server only, and the master sends its own to no
server before it has seen that a process of this user listens there. Each role has its
commands, keys and channels, so that a worker's password makes nobody a master. With TLS
(if openssl and the server can do it) every server has a new certificate; clients find it
beside the address and accept no other.
"""

import contextlib
import hashlib
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.base.config import Config
from elastic.base.durable import make_folder, write_atomic
from elastic.base.errors import ElasticError
from elastic.base.network import free_port, listens
from elastic.base.signals import die_with_parent
from elastic.local.store import MasterStore
from elastic.run.rundir import SECRETS, Endpoint, RunDir

OLDEST = (6, 0)
# Before 6.2 Redis has no rights on channels: a worker can send false wake-ups, each of
# which costs the others one look.
KNOWS_CHANNELS = (6, 2)
START_S = 20.0
HEARD = {"capture_output": True, "errors": "replace"}
# After which a connection is closed that is not subscribed; every client connects again.
IDLE_S = 60
# More than the ports of one address: so one machine alone keeps nobody out.
MOST_CLIENTS = 50_000

_WORKER = "time ping get multi exec evalsha publish del pexpire"
_WORKER += " hget hmget hset hdel hexists hgetall blpop"
_MASTER = f"{_WORKER} set script|load rpush scan unlink subscribe unsubscribe"
_OF_WORKERS = "slot:* attempts offers:* verdicts asks grant:* proof"
# Role -> its commands, and its keys and channels, all of them after the run's prefix.
ROLES = {
    "master": (_MASTER, "*", "*"),
    "worker": (_WORKER, _OF_WORKERS, "wake"),
    "reader": ("time ping get hgetall subscribe unsubscribe", "*", "ctl"),
}


def find(configured: str = "") -> str:
    """Path of a redis-server, version 6 or newer. ElasticError says how to get one."""
    own = Path(sys.prefix) / "bin" / "redis-server"  # where `make venv` puts one
    programs = [configured] if configured else ["redis-server", "valkey-server", str(own)]
    for program in programs:
        path = shutil.which(program)
        if path and version(path) >= OLDEST:
            return path
    raise ElasticError(
        f"no redis-server (6.0 or newer): looked for {', '.join(programs)}",
        "apt-get install redis-server, or module load redis, or make redis (x86_64), "
        "or set redis.server in etc/site.toml",
    )


def version(path: str) -> tuple[int, ...]:
    """(major, minor) from `redis-server --version`; (0,) if it says something else."""
    try:
        answer = subprocess.run([path, "--version"], timeout=10, **HEARD)
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    parts = answer.stdout.partition("v=")[2].split(".")[:2]
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else (0,)


@dataclass
class RedisServer:
    """A running server. `stop` ends it and removes its folder."""

    process: subprocess.Popen
    endpoint: Endpoint
    folder: Path

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        # It has nothing to save, and while a script runs it obeys no other signal.
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(run: RunDir, config: Config, address: str, epoch: int) -> RedisServer:
    """Start the server of master `epoch` on `address`; returns when it answers.

    Raises ElasticError with the server's last words (a port that is taken, say).
    """
    deadline = time.monotonic() + START_S
    while listens(address, config.redis.port) and time.monotonic() < deadline:
        time.sleep(0.1)  # a master on this node has it, until it sees that it is replaced
    if config.redis.tls == "auto":
        try:
            return _start(run, config, address, epoch, tls=True)
        except ElasticError as error:  # no openssl, a server without TLS, or a full disk
            run.event("warning", reason=f"Redis runs without TLS: {error.what}")
    return _start(run, config, address, epoch, tls=config.redis.tls is True)


def _start(run: RunDir, config: Config, host: str, epoch: int, tls: bool) -> RedisServer:
    port = config.redis.port or free_port(host)
    folder = _folder(run, epoch)
    make_folder(folder, 0o700)
    # What a master that was killed has left.
    shutil.rmtree(_folder(run, epoch - 1), ignore_errors=True)
    program = find(config.redis.server)
    certificate = _make_certificate(folder, host) if tls else ""
    nonce = secrets.token_hex(16)
    endpoint = Endpoint(host, port, epoch, certificate=certificate, nonce=nonce)
    settings = folder / "redis.conf"
    text = _settings(config, endpoint) + _users(run, endpoint, version(program))
    write_atomic(settings, text.encode(), mode=0o600)
    log = folder / "log"
    with log.open("ab") as output, settings.open("rb") as said:
        # On stdin: redis-server takes the name of a file for a pattern, and a run's path
        # may look like one.
        process = subprocess.Popen(
            [program, "-"], cwd=folder, stdin=said, stdout=output, stderr=output,
            preexec_fn=die_with_parent,
        )
    server = RedisServer(process, endpoint, folder)
    if _answers(run, server):
        return server
    words = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    server.stop()
    raise ElasticError(
        f"redis-server did not start on {host}:{port}:\n{words}",
        "set redis.port = 0 for a free port, redis.bind to an address of this node, "
        "and redis.tls = false if this redis-server was built without TLS",
    )


def _folder(run: RunDir, epoch: int) -> Path:
    return run.path / f"redis-{epoch:06d}"


def trial(config: Config, folder: Path) -> bool:
    """Start a server on loopback with its files in `folder`, see that it answers, and
    stop it. True: over TLS. Raises ElasticError."""
    run = RunDir(folder)
    for name in ("id", *SECRETS.values()):
        write_atomic(folder / name, secrets.token_hex(24).encode(), mode=0o600)
    on_any_port = replace(config, redis=replace(config.redis, port=0))
    server = start(run, on_any_port, "127.0.0.1", 0)
    server.stop()
    return bool(server.endpoint.certificate)


def _answers(run: RunDir, server: RedisServer) -> bool:
    deadline = time.monotonic() + START_S
    while server.alive() and time.monotonic() < deadline:
        # Not another user's process, on a port that ours could not bind.
        if listens(server.endpoint.host, server.endpoint.port):
            with contextlib.suppress(ElasticError):
                store = MasterStore.of(run, server.endpoint, timeout_s=1.0)
                store.load_scripts()
                store.close()
                return True
        time.sleep(0.02)
    return False


def _make_certificate(folder: Path, address: str) -> str:
    """Write a key and a self-signed certificate for `address` into `folder`; the
    certificate as PEM."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    write_atomic(key, b"", mode=0o600)  # for openssl to fill
    command = [
        "openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", "/CN=elastic",
        "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-addext", f"subjectAltName=IP:{address}",
        "-keyout", str(key), "-out", str(certificate),
    ]
    try:
        subprocess.run(command, check=True, timeout=START_S, **HEARD)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or error
        raise ElasticError(
            f"redis.tls = true, and openssl makes no certificate: {said}",
            "install openssl where the master runs, or set redis.tls = false",
        ) from None
    return certificate.read_text()


def _settings(config: Config, endpoint: Endpoint) -> str:
    """The settings that are not Redis's defaults. The certificate is in the same folder."""
    lines = {
        "bind": endpoint.host,
        "port": endpoint.port,
        "timeout": IDLE_S,
        "maxclients": MOST_CLIENTS,
        "maxmemory": config.redis.maxmemory_bytes,
        "maxmemory-policy": "noeviction",
        # Else the answers to a client without a password that reads none fill the memory.
        "client-output-buffer-limit": "normal 64mb 0 0",
        "save": '""',
        "loglevel": "warning",
    }
    if endpoint.certificate:
        lines |= {"port": 0, "tls-port": endpoint.port, "tls-auth-clients": "no"}
        lines |= {"tls-key-file": "key.pem", "tls-cert-file": "certificate.pem"}
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def _users(run: RunDir, endpoint: Endpoint, known: tuple[int, ...]) -> str:
    lines = ["user default off"]
    for role, (commands, keys, channels) in ROLES.items():
        password = run.password(role, endpoint)
        rules = ["on", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
        rules += [f"~elastic:{run.key}:{key}" for key in keys.split()]
        if known >= KNOWS_CHANNELS:
            rules += ["resetchannels", f"&elastic:{run.key}:{channels}"]
        rules += [f"+{command}" for command in commands.split()]
        lines.append(f"user {role} {' '.join(rules)}")
    return "\n".join(lines) + "\n"
