"""Deltas as Redis strings, in chunks; they expire by themselves.

Every byte passes Redis twice and sits in its memory until the round closes, so this is for small
models. What cannot fit into `redis.maxmemory` is refused before a byte is sent; what does not fit
now is an OSError, as on a full disk. What a worker has delivered goes into files when it leaves:
the master's Redis may end before the round does, and nobody would bring it again.
"""

import errno

from elastic.errors import ElasticError
from elastic.rounds import Fragment
from elastic.store import Store
from elastic.transport import Damaged, Transport, checksum, verify

CHUNK_BYTES = 16 << 20
KEEP_S = 3600.0


class RedisTransport:
    def __init__(self, store: Store, left: Transport):
        self._store, self._left = store, left

    def put(self, name: str, data: memoryview) -> Fragment:
        used, allowed = self._store.memory_bytes()
        if allowed and len(data) > allowed / 2:  # the other half is for whoever reads and writes it
            raise ElasticError(
                f"a delta of {len(data)} bytes does not fit: Redis uses {used} of {allowed} bytes",
                'set local_sgd.transport = "filesystem", or raise redis.maxmemory',
            )
        for key, start in _chunks(name, len(data)):
            if not self._store.put_bytes(key, bytes(data[start : start + CHUNK_BYTES]), KEEP_S):
                self.drop([(name, len(data))])
                raise OSError(errno.ENOSPC, f"redis.maxmemory = {allowed}: it is full", name)
        return Fragment(len(data), checksum(data))

    def has(self, name: str, size: int) -> bool:
        """Is all of it there?"""
        return self._store.has_bytes([key for key, _ in _chunks(name, size)])

    def get(self, name: str, fragment: Fragment, into: memoryview) -> None:
        for key, start in _chunks(name, fragment.bytes):
            space = into[start : start + CHUNK_BYTES]
            chunk = self._store.get_bytes(key, len(space))
            if fragment.bytes and not (chunk or start):
                self._left.get(name, fragment, into)
                return
            if len(chunk) != len(space):
                have = f"{len(chunk)} bytes" if chunk else "nothing"
                raise Damaged(f"truncated: {key} has {have} of {len(space)} bytes")
            space[:] = chunk
        verify(name, fragment, into)

    def drop(self, parts: list[tuple[str, int]]) -> None:
        self._store.drop_bytes([key for name, size in parts for key, _ in _chunks(name, size)])


def _chunks(name: str, size: int) -> list[tuple[str, int]]:
    """(key, offset) of every chunk of a fragment; at least one."""
    starts = range(0, max(size, 1), CHUNK_BYTES)
    return [(f"{name}:{start // CHUNK_BYTES}", start) for start in starts]
