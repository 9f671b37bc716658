"""Transport: what is put is got, whole or not at all; real files.

    pytest tests/local/test_transport.py
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.local.transport import Damaged, Transport, fragment_name
from elastic.run.records import Fragment

KEY, INDEX = (7, 2, 123), 4
NAME = fragment_name(KEY, INDEX)


def view(size, seed=1):
    return memoryview(bytes((seed * 131 + at * 7) % 256 for at in range(size)))


def put(transport, data, key=KEY, index=INDEX):
    return transport.put(key, index, data)


def get(transport, fragment, key=KEY, index=INDEX):
    into = bytearray(fragment.bytes)
    transport.get(key, index, fragment, memoryview(into))
    return bytes(into)


class TestTransport:
    @pytest.fixture
    def transport(self, run):
        self.path = run.path / "deltas" / NAME
        return Transport(run)

    @pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
    def test_what_was_put_is_got(self, transport, size):
        fragment = put(transport, view(size))
        assert fragment.bytes == size
        assert get(transport, fragment) == view(size)
        assert get(transport, fragment) == view(size)  # and again

    def test_names_do_not_touch_each_other(self, transport):
        places = [(key, i) for key in [(0, 1, 5), (0, 2, 5), (1, 1, 6)] for i in (0, 1)]
        found = [transport.put(*place, view(150, seed)) for seed, place in enumerate(places)]
        transport.drop([fragment_name(*places[0])])
        for seed, place in list(enumerate(places))[1:]:
            assert get(transport, found[seed], *place) == view(150, seed)

    def test_a_second_put_replaces_the_first(self, transport):
        first = put(transport, view(250, 1))
        second = put(transport, view(120, 2))
        assert get(transport, second) == view(120, 2)
        with pytest.raises(Damaged):
            get(transport, first)

    def test_what_is_missing_is_damaged(self, transport):
        with pytest.raises(Damaged, match=NAME):
            get(transport, Fragment(10, "00"))

    def test_what_was_dropped_is_missing_and_dropping_it_again_does_not_matter(self, transport):
        fragment = put(transport, view(250))
        transport.drop([NAME, fragment_name((9, 9, 9), 0)])
        transport.drop([NAME])
        transport.drop([])
        with pytest.raises(Damaged):
            get(transport, fragment)
        assert get(transport, put(transport, view(250))) == view(250)

    def test_what_was_truncated_is_damaged(self, transport):
        fragment = put(transport, view(250))
        os.truncate(self.path, 249)
        with pytest.raises(Damaged, match="truncated: .* of "):
            get(transport, fragment)

    @pytest.mark.parametrize("at", [0, 130, 249])
    def test_what_was_altered_is_damaged(self, transport, at):
        fragment = put(transport, view(250))
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(Damaged, match="altered: .* its header says " + fragment.xxh3):
            get(transport, fragment)

    def test_a_header_that_lies_about_the_checksum_is_found_out(self, transport):
        fragment = put(transport, view(250))
        with pytest.raises(Damaged, match="altered"):
            get(transport, Fragment(250, fragment.xxh3[::-1]))

    def test_many_at_once(self, transport):
        def work(slot):
            for base in range(10):
                place = ((slot, 1, base), 0)
                fragment = transport.put(*place, view(300, slot))
                assert get(transport, fragment, *place) == view(300, slot)
                transport.drop([fragment_name(*place)])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    def test_what_is_longer_than_announced_is_damaged(self, transport):
        fragment = put(transport, view(250))
        with self.path.open("ab") as file:
            file.write(b"x")
        with pytest.raises(Damaged, match="truncated: .* has 251 of 250 bytes"):
            get(transport, fragment)

    def test_a_put_that_fails_leaves_nothing(self, transport, monkeypatch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            put(transport, view(250))
        assert list(self.path.parent.iterdir()) == []

    def test_a_run_directory_that_is_gone_is_an_error(self, transport, run):
        (run.path / "deltas").rmdir()
        with pytest.raises(FileNotFoundError):
            put(transport, view(10))


def test_a_folder_that_is_pruned_while_one_writes_to_it_is_no_crash(run, monkeypatch):
    """Only the deltas of a base go from which nothing is merged any more."""
    def pruned(path, _data):
        path.parent.rmdir()
        raise FileNotFoundError(str(path))

    monkeypatch.setattr("elastic.local.transport.replace_quickly", pruned)
    fragment = put(Transport(run), view(10))
    with pytest.raises(Damaged):
        get(Transport(run), fragment)


def test_a_name_follows_from_the_delta_and_stays_below_the_folder_of_deltas():
    assert fragment_name((7, 2, 123), 4) == "000123/0007.2.004"
    keys = [(slot, attempt, base) for slot in (1, 11) for attempt in (1, 11) for base in (1, 11)]
    assert len({fragment_name(key, index) for key in keys for index in (1, 11, 111)}) == 24
