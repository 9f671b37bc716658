"""Transport: how the bytes of deltas get from a worker to the master.

    transport_fs.py      over the shared filesystem (the default)
    transport_redis.py   through Redis, in chunks; refuses what does not fit

Opaque bytes under a name; the name follows from the delta's key, so nobody can point the master at
a file of their choice. What is read is checked against the size and checksum in the header. A lost
delta costs its own steps and nothing else, so nothing here is fsynced.
"""

from typing import Protocol

import xxhash

from elastic.rounds import Fragment
from elastic.rundir import RunDir
from elastic.store import Store


class Damaged(Exception):
    """Bytes are missing, truncated or altered; str() says which."""


class Transport(Protocol):
    def put(self, name: str, data: memoryview) -> Fragment:
        """Store bytes under a name, replacing what was there."""

    def get(self, name: str, fragment: Fragment, into: memoryview) -> None:
        """Fill `into` (of fragment.bytes) and verify it. Raises Damaged."""

    def drop(self, parts: list[tuple[str, int]]) -> None:
        """Forget (name, bytes); those not there do not matter."""


def transport_of(commit: dict) -> str:
    """The name of the transport that a run's first commit has settled; older runs had but one."""
    return commit.get("transport", "filesystem")


def open_transport(name: str, run: RunDir, store: Store | None) -> Transport:
    """The transport of that name."""
    from elastic.transport_fs import FileTransport

    files = FileTransport(run)
    if name == "redis":
        from elastic.transport_redis import RedisTransport

        return RedisTransport(store, files)
    return files


def fragment_name(key: tuple[int, int, int], index: int) -> str:
    """The name of a delta's fragment; `key` is (slot, attempt, base)."""
    slot, attempt, base = key
    return f"{base:06d}/{slot:04d}.{attempt}.{index:03d}"


def checksum(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def verify(name: str, fragment: Fragment, data: memoryview) -> None:
    """Raise Damaged unless the bytes are those of the header."""
    found = checksum(data)
    if found != fragment.xxh3:
        raise Damaged(f"altered: {name} has xxh3 {found}, its header says {fragment.xxh3}")
