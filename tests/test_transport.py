"""Transports: one contract, two back ends, the second over a real redis-server.

    pytest tests/test_transport.py
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic import transport_redis
from elastic.errors import ElasticError
from elastic.rounds import Fragment
from elastic.transport import Damaged, fragment_name, open_transport, transport_of
from elastic.transport_fs import FileTransport
from elastic.transport_redis import RedisTransport

NAME = fragment_name((7, 2, 123), 4)


def view(size, seed=1):
    return memoryview(bytes((seed * 131 + at * 7) % 256 for at in range(size)))


def get(transport, name, fragment):
    into = bytearray(fragment.bytes)
    transport.get(name, fragment, memoryview(into))
    return bytes(into)


class TransportContract:
    """What a transport promises. A subclass gives `transport` and ways to damage what it holds."""

    @pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
    def test_what_was_put_is_got(self, transport, size):
        fragment = transport.put(NAME, view(size))
        assert fragment.bytes == size
        assert get(transport, NAME, fragment) == view(size)
        assert get(transport, NAME, fragment) == view(size)  # and again

    def test_names_do_not_touch_each_other(self, transport):
        names = [fragment_name(key, i) for key in [(0, 1, 5), (0, 2, 5), (1, 1, 6)] for i in (0, 1)]
        put = {name: transport.put(name, view(150, seed)) for seed, name in enumerate(names)}
        transport.drop([(names[0], 150)])
        for seed, name in enumerate(names[1:], 1):
            assert get(transport, name, put[name]) == view(150, seed)

    def test_a_second_put_replaces_the_first(self, transport):
        first = transport.put(NAME, view(250, 1))
        second = transport.put(NAME, view(120, 2))
        assert get(transport, NAME, second) == view(120, 2)
        with pytest.raises(Damaged):
            get(transport, NAME, first)

    def test_what_is_missing_is_damaged(self, transport):
        with pytest.raises(Damaged, match=NAME):
            get(transport, NAME, Fragment(10, "00"))

    def test_what_was_dropped_is_missing_and_dropping_it_again_does_not_matter(self, transport):
        fragment = transport.put(NAME, view(250))
        transport.drop([(NAME, 250), (fragment_name((9, 9, 9), 0), 10)])
        transport.drop([(NAME, 250)])
        transport.drop([])
        with pytest.raises(Damaged):
            get(transport, NAME, fragment)
        assert get(transport, NAME, transport.put(NAME, view(250))) == view(250)

    def test_what_was_truncated_is_damaged(self, transport):
        fragment = transport.put(NAME, view(250))
        self.truncate(transport)
        with pytest.raises(Damaged, match="truncated: .* of "):
            get(transport, NAME, fragment)

    @pytest.mark.parametrize("at", [0, 130, 249])
    def test_what_was_altered_is_damaged(self, transport, at):
        fragment = transport.put(NAME, view(250))
        self.alter(transport, at)
        with pytest.raises(Damaged, match="altered: .* its header says " + fragment.xxh3):
            get(transport, NAME, fragment)

    def test_a_header_that_lies_about_the_checksum_is_found_out(self, transport):
        fragment = transport.put(NAME, view(250))
        with pytest.raises(Damaged, match="altered"):
            get(transport, NAME, Fragment(250, fragment.xxh3[::-1]))

    def test_many_at_once(self, transport):
        def work(slot):
            for base in range(10):
                name = fragment_name((slot, 1, base), 0)
                fragment = transport.put(name, view(300, slot))
                assert get(transport, name, fragment) == view(300, slot)
                transport.drop([(name, 300)])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


class TestFileTransport(TransportContract):
    @pytest.fixture
    def transport(self, run):
        self.root = run.path / "deltas"
        return FileTransport(run)

    def truncate(self, _):
        os.truncate(self.root / NAME, 249)

    def alter(self, _, at):
        with (self.root / NAME).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))

    def test_what_is_longer_than_announced_is_damaged(self, transport):
        fragment = transport.put(NAME, view(250))
        with (self.root / NAME).open("ab") as file:
            file.write(b"x")
        with pytest.raises(Damaged, match="truncated: .* has 251 of 250 bytes"):
            get(transport, NAME, fragment)

    def test_a_put_that_fails_leaves_nothing(self, transport, monkeypatch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            transport.put(NAME, view(250))
        assert list((self.root / NAME).parent.iterdir()) == []

    def test_a_run_directory_that_is_gone_is_an_error(self, transport, run):
        (run.path / "deltas").rmdir()
        with pytest.raises(FileNotFoundError):
            transport.put(NAME, view(10))


class TestRedisTransport(TransportContract):
    @pytest.fixture
    def transport(self, store, run, monkeypatch):
        monkeypatch.setattr(transport_redis, "CHUNK_BYTES", 100)
        return RedisTransport(store, FileTransport(run))

    def truncate(self, transport):
        chunk = transport._store.get_bytes(f"{NAME}:2", 100)
        transport._store.put_bytes(f"{NAME}:2", chunk[:-1], 60)

    def alter(self, transport, at):
        chunk = bytearray(transport._store.get_bytes(f"{NAME}:{at // 100}", 100))
        chunk[at % 100] ^= 1
        transport._store.put_bytes(f"{NAME}:{at // 100}", bytes(chunk), 60)

    def test_of_a_chunk_that_is_too_long_no_more_is_read_than_shows_it(self, transport):
        fragment = transport.put(NAME, view(250))
        transport._store.put_bytes(f"{NAME}:1", bytes(1 << 20), 60)
        with pytest.raises(Damaged, match=":1 has 101 bytes of 100 bytes"):
            get(transport, NAME, fragment)

    def test_all_chunks_or_none_are_there(self, transport):
        assert not transport.has(NAME, 250)
        transport.put(NAME, view(250))
        assert transport.has(NAME, 250)
        transport._store.drop_bytes([f"{NAME}:1"])
        assert not transport.has(NAME, 250)

    def test_a_lost_chunk_is_damaged(self, transport):
        fragment = transport.put(NAME, view(250))
        transport._store.drop_bytes([f"{NAME}:1"])
        with pytest.raises(Damaged, match=":1 has nothing of 100 bytes"):
            get(transport, NAME, fragment)

    def test_what_is_dropped_leaves_nothing_in_redis(self, transport, redis_server):
        def keys():
            return redis_server.client().keys(transport._store._key("*"))

        transport.put(NAME, view(250))
        assert len(keys()) == 3
        transport.drop([(NAME, 250)])
        assert keys() == []

    def test_what_nobody_drops_expires(self, transport, redis_server, monkeypatch):
        monkeypatch.setattr(transport_redis, "KEEP_S", 0.05)
        fragment = transport.put(NAME, view(250))
        time.sleep(0.1)
        with pytest.raises(Damaged):
            get(transport, NAME, fragment)

    @pytest.fixture
    def small_redis(self, redis_server):
        """Room for a megabyte more than is used now."""
        client = redis_server.client()
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        client.config_set("maxmemory-policy", "noeviction")
        yield client
        client.config_set("maxmemory", 0)

    def test_what_does_not_fit_is_refused_before_a_byte_is_sent(self, transport, small_redis):
        before = small_redis.keys("*:delta:*")  # leases of other tests may expire meanwhile
        with pytest.raises(ElasticError, match="a delta of 9000000 bytes does not fit") as caught:
            transport.put(NAME, memoryview(bytes(9_000_000)))
        assert 'local_sgd.transport = "filesystem"' in caught.value.hint
        assert small_redis.keys("*:delta:*") == before
        fragment = transport.put(NAME, view(250))  # and what fits still goes through
        assert get(transport, NAME, fragment) == view(250)


def test_a_folder_that_is_pruned_while_one_writes_to_it_is_no_crash(run, monkeypatch):
    """Only the deltas of a base go from which nothing is merged any more."""
    def pruned(path, _data):
        path.parent.rmdir()
        raise FileNotFoundError(str(path))

    monkeypatch.setattr("elastic.transport_fs.replace_quickly", pruned)
    fragment = FileTransport(run).put(NAME, view(10))
    with pytest.raises(Damaged):
        get(FileTransport(run), NAME, fragment)


def test_the_first_commit_names_the_transport(run, store):
    def opened(commit):
        return open_transport(transport_of(commit), run, store)

    assert isinstance(opened({"transport": "filesystem"}), FileTransport)
    assert isinstance(opened({"transport": "redis"}), RedisTransport)
    assert isinstance(opened({}), FileTransport)  # of a run from before there was a choice


def test_a_name_follows_from_the_delta_and_stays_below_the_folder_of_deltas():
    assert fragment_name((7, 2, 123), 4) == "000123/0007.2.004"
    keys = [(slot, attempt, base) for slot in (1, 11) for attempt in (1, 11) for base in (1, 11)]
    assert len({fragment_name(key, index) for key in keys for index in (1, 11, 111)}) == 24
