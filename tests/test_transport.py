"""One contract, two ways for a delta's bytes: over the filesystem and through Redis."""

import dataclasses

import pytest

from elastic.errors import ElasticError
from elastic.rounds import Fragment
from elastic.transport import Damaged, checksum, fragment_name, open_transport
from elastic.transport_redis import CHUNK_BYTES

NAME = fragment_name((7, 2, 123), 0)


@pytest.fixture(params=["filesystem", "redis"])
def transport(request, make_run, make_config, store):
    config = make_config(f'local_sgd.transport="{request.param}"')
    return open_transport(config, make_run(), store)


def fetch(transport, name: str, fragment: Fragment) -> bytes:
    into = bytearray(fragment.bytes)
    transport.get(name, fragment, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK_BYTES, CHUNK_BYTES + 5])
def test_what_is_put_comes_back_whole(transport, size: int):
    data = bytes(range(256)) * (size // 256 + 1)
    fragment = transport.put(NAME, memoryview(data)[:size])
    assert fragment == Fragment(size, checksum(memoryview(data)[:size]))
    assert fetch(transport, NAME, fragment) == data[:size]


def test_putting_again_replaces(transport):
    transport.put(NAME, memoryview(b"before"))
    fragment = transport.put(NAME, memoryview(b"afterwards"))
    assert fetch(transport, NAME, fragment) == b"afterwards"


def test_what_was_never_put_is_damaged(transport):
    with pytest.raises(Damaged, match="000123/0007.2.000"):
        fetch(transport, NAME, Fragment(4, checksum(memoryview(b"1234"))))


def test_what_was_dropped_is_damaged_and_dropping_twice_is_nothing(transport):
    fragment = transport.put(NAME, memoryview(b"1234"))
    for _ in range(2):
        transport.drop([(NAME, 4)])
    with pytest.raises(Damaged):
        fetch(transport, NAME, fragment)


@pytest.mark.parametrize("wrong", [3, 5])
def test_another_size_than_the_header_says_is_truncated(transport, wrong: int):
    fragment = transport.put(NAME, memoryview(b"1234"))
    with pytest.raises(Damaged, match="truncated"):
        fetch(transport, NAME, dataclasses.replace(fragment, bytes=wrong))


def test_every_altered_byte_is_noticed(transport):
    data = bytes(range(64))
    fragment = transport.put(NAME, memoryview(data))
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1
        transport.put(NAME, memoryview(altered))
        with pytest.raises(Damaged, match="altered"):
            fetch(transport, NAME, fragment)


def test_redis_refuses_what_does_not_fit(make_run, make_config, store, redis_server):
    client = redis_server.client()
    used = client.info("memory")["used_memory"]
    transport = open_transport(make_config('local_sgd.transport="redis"'), make_run(), store)
    client.config_set("maxmemory", used + 4_000_000)
    try:
        with pytest.raises(ElasticError, match="does not fit") as caught:
            transport.put(NAME, memoryview(bytes(5_000_000)))
    finally:
        client.config_set("maxmemory", 0)
    assert 'transport = "filesystem"' in caught.value.hint


def test_names_follow_from_the_key_alone():
    names = {fragment_name((s, a, b), i) for s in (0, 11) for a in (1, 2) for b in (3, 4)
             for i in (0, 1)}  # fmt: skip
    assert len(names) == 16
    assert all(".." not in name and not name.startswith("/") for name in names)
