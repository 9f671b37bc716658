"""Redis as a dictionary: what the real Store asks of a client, and its scripts in Python.

`tests/whole/test_random_schedules.py` holds it to a real redis-server: the same calls, the
same answers.
"""

import hashlib
from collections.abc import Callable

import redis

from elastic.local import scripts


class Server:
    """The keys of one server. `clock()` is its TIME."""

    def __init__(self, clock: Callable[[], float]):
        self.alive, self._clock = True, clock
        self._keys: dict[str, dict | list | bytes] = {}
        self._expires: dict[str, float] = {}

    def flushall(self) -> None:
        self._keys.clear()
        self._expires.clear()

    def _live(self, key: str, kind: Callable = dict):
        if self._expires.get(key, self._clock() + 1) <= self._clock():
            self.delete(key)
        return self._keys.setdefault(key, kind())

    def time(self) -> tuple[int, int]:
        now = self._clock()
        return int(now), round((now - int(now)) * 1e6)

    def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    def delete(self, key: str) -> None:
        self._keys.pop(key, None)
        self._expires.pop(key, None)

    def pexpire(self, key: str, ms: int) -> None:
        self._expires[key] = self._clock() + int(ms) / 1000

    def hset(self, key: str, *pairs) -> None:
        table = self._live(key)
        for field, value in zip(pairs[::2], pairs[1::2], strict=True):
            table[_bytes(field)] = _bytes(value)

    def hget(self, key: str, field) -> bytes | None:
        return self._live(key).get(_bytes(field))

    def hdel(self, key: str, *fields) -> None:
        for field in fields:
            self._live(key).pop(_bytes(field), None)

    def hexists(self, key: str, field) -> bool:
        return _bytes(field) in self._live(key)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return dict(self._live(key))

    def rpush(self, key: str, value) -> None:
        self._live(key, list).append(_bytes(value))

    def blpop(self, key: str, _timeout: float) -> tuple[bytes, bytes] | None:
        waiting = self._live(key, list)
        return (_bytes(key), waiting.pop(0)) if waiting else None

    def publish(self, channel: str, word: str) -> None:
        pass  # wake-ups only; whoever waits looks again

    # ---- the scripts of elastic.local.scripts

    def lease(self, keys: list[str], args: list) -> int:
        slot, attempt, lease_ms, *fields = args
        if int(self.hget(keys[1], slot) or 0) > int(attempt):
            return 0
        self.hset(keys[1], slot, attempt)
        before = self._progress(keys[0])
        if before[0] != _bytes(attempt):
            self.delete(keys[0])
            self.hset(keys[0], "joined", self._stamp())
        self.hset(keys[0], "beat", self._stamp(), *fields)
        if before != self._progress(keys[0]):
            self.hset(keys[0], "moved", self._stamp())
        self.pexpire(keys[0], lease_ms)
        return 1

    def release(self, keys: list[str], args: list) -> int:
        if self.hget(keys[1], args[0]) != _bytes(args[1]):
            return 0
        self.delete(keys[0])
        return 1

    def offer(self, keys: list[str], args: list) -> int:
        if self.hget(keys[1], args[0]) != _bytes(args[1]):
            return 0
        self.hset(keys[0], f"{args[0]}:{args[1]}", args[2])
        return 1

    def master(self, keys: list[str], args: list) -> int:
        if int(self.hget(keys[0], "epoch") or 0) > int(args[0]):
            return 0
        self.hset(keys[0], "epoch", args[0], "beat", self._stamp(), *args[4:])
        self._keys[keys[1]] = _bytes(args[3])
        return 1

    def _stamp(self) -> str:
        seconds, micros = self.time()
        return f"{seconds}.{micros:06d}"

    def _progress(self, key: str) -> list:
        moving = ("attempt", "state", "step", "version", "moves")
        return [self.hget(key, name) for name in moving]


SCRIPTS = {
    hashlib.sha1(getattr(scripts, name).encode()).hexdigest(): name.lower()
    for name in ("LEASE", "RELEASE", "OFFER", "MASTER")
}


class Client:
    """A connection. `call(name, action)` stands between it and the server, and may lose things."""

    def __init__(self, server: Server, call: Callable):
        self._server, self._call = server, call

    def __getattr__(self, name: str) -> Callable:
        command = getattr(self._server, name)
        return lambda *args, **options: self._reach(name, lambda: command(*args, **options))

    def _reach(self, name: str, action: Callable):
        return self._call(name, lambda: action() if self._server.alive else _refuse())

    def evalsha(self, digest: str, count: int, *words) -> int:
        name = SCRIPTS[digest]
        script = getattr(self._server, name)
        return self._reach(name, lambda: script(list(words[:count]), list(words[count:])))

    def pipeline(self, transaction: bool) -> "Pipeline":
        return Pipeline(self)

    def pubsub(self, **_options) -> "PubSub":
        return PubSub(self)

    def close(self) -> None:
        pass


class Pipeline:
    def __init__(self, client: Client):
        self._client, self._commands = client, []

    def __getattr__(self, name: str) -> Callable:
        def add(*args):
            self._commands.append((name, args))
            return self

        return add

    def execute(self) -> list:
        client = self._client
        if not self._commands:
            return []
        server, name = client._server, self._commands[0][0]
        return client._reach(name, lambda: [getattr(server, n)(*a) for n, a in self._commands])


class PubSub:
    """Hears nothing: a word that got lost must cost no more than the wait."""

    def __init__(self, client: Client):
        self._client = client

    def subscribe(self, _channel: str) -> None:
        self._client._reach("subscribe", lambda: None)

    def get_message(self, timeout: float) -> None:
        if timeout:
            self._client._reach("wait", lambda: None)


def _bytes(value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _refuse():
    raise redis.exceptions.ConnectionError("it is gone")
