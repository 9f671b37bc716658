"""What workers move: versions, and who of a worker's ranks moves what."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash
from torch import nn

from elastic.base import durable
from elastic.base.errors import ElasticError
from elastic.local import transport
from elastic.local.worker.exchange import Exchange, read_ahead
from elastic.saved import versions
from elastic.saved.replica import Replica
from elastic.train.group import Group
from helpers import PATIENCE
from merging import SHAPES, Rounds

SIZE = 30
EXACT = ("local_sgd.compression=none", "local_sgd.cold_start=0")


class Shapes(nn.Module):
    """A module with the parameters of SHAPES."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES:
            module, _, last = name.rpartition(".")
            if module and not hasattr(self, module):
                self.add_module(module, nn.Module())
            place = getattr(self, module) if module else self
            place.register_parameter(last, nn.Parameter(torch.zeros(shape)))


@pytest.fixture
def open_rounds(make_run):
    opened = []

    def open_(*overrides: str) -> Rounds:
        torch.manual_seed(3)
        opened.append(Rounds(make_run(*EXACT, *overrides), torch.randn(SIZE)))
        return opened[-1]

    yield open_
    for each in opened:
        each.averager.close()


def exchange_of(rounds: Rounds) -> Exchange:
    replica = Replica(Shapes(), rounds.layout)
    return Exchange(rounds.run, rounds.config, replica, Group(), lambda: None)


def base(exchange: Exchange) -> torch.Tensor:
    params = [exchange.replica.base[t.name] for f in exchange.replica.layout.fragments for t in f]
    return torch.cat([each.flatten() for each in params])


# ---- versions -----------------------------------------------------------------------------------


def test_every_worker_ends_on_bitwise_the_same_base(open_rounds):
    """One that reads each version, one that misses some, one that comes late; masters change."""
    rounds = open_rounds()
    follows, misses = exchange_of(rounds), exchange_of(rounds)
    for number in range(8):
        rounds.close([rounds.deliver(s, rounds.base() + torch.randn(SIZE), 9) for s in range(2)])
        if number == 4:
            rounds.new_master()
        commit = rounds.run.commits.newest()
        follows.adopt(commit)
        if number in (0, 3, 4, 7):
            misses.adopt(commit)
            late = exchange_of(rounds)
            late.adopt(commit)
            published = rounds.base().bfloat16()
            assert all(torch.equal(base(each), published) for each in (follows, misses, late))


def test_a_damaged_version_is_refused_and_half_adopted_is_no_base(open_rounds):
    """The next version is then read right."""
    rounds = open_rounds()
    exchange = exchange_of(rounds)
    exchange.adopt(rounds.run.commits.newest())
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    path = rounds.run.version_path(1) / "params-02.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ElasticError, match="params-02.safetensors"):
        exchange.adopt(rounds.run.commits.newest())
    path.write_bytes(good)
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    exchange.adopt(rounds.run.commits.newest())
    assert torch.equal(base(exchange), rounds.base().bfloat16())


@pytest.mark.parametrize("world", [1, 2])
def test_a_version_that_cannot_be_read_for_a_while_is_waited_for(open_rounds, monkeypatch, world):
    """By the rank that is to read it; before it was to be restored from a backup."""
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    rounds, ranks = open_rounds(), Ranks(world)
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    commit, wanted, found = rounds.run.commits.newest(), rounds.base().bfloat16(), {}
    fails, real = [errno.EIO] * 5, os.stat

    def stat(path, **how):
        if fails and str(path).endswith("params-01.safetensors"):
            raise OSError(fails.pop(), "no answer", str(path))
        return real(path, **how)

    def rank(number: int) -> None:
        replica = Replica(Shapes(), rounds.layout)
        exchange = Exchange(rounds.run, rounds.config, replica, ranks.group(number), lambda: None)
        exchange.adopt(commit)
        found[number] = base(exchange)

    monkeypatch.setattr(os, "stat", stat)
    with ThreadPoolExecutor(world) as pool:
        list(pool.map(rank, range(world)))
    assert (fails, len(found)) == ([], world)
    assert all(torch.equal(each, wanted) for each in found.values())


# ---- ranks --------------------------------------------------------------------------------------


class Ranks:
    """Groups of threads that talk as ranks do."""

    def __init__(self, world: int):
        self.world, self._said = world, {}
        self._barrier = threading.Barrier(world, timeout=30 * PATIENCE)

    def group(self, rank: int) -> Group:
        group = Group(rank, self.world)
        group.broadcast = lambda message=None, source=0: self._from(rank, message, source)
        group.hand_out = group.broadcast
        return group

    def _from(self, rank: int, message: object, source: int) -> object:
        if rank == source:
            self._said = message
        self._barrier.wait()
        found = self._said
        self._barrier.wait()
        return found


def test_each_rank_moves_its_own_fragments(open_rounds, monkeypatch):
    rounds, ranks = open_rounds(), Ranks(2)
    put, read, found = {}, {}, {}
    real = versions.read_params

    def rank(number: int) -> None:
        replica = Replica(Shapes(), rounds.layout)
        exchange = Exchange(rounds.run, rounds.config, replica, ranks.group(number), lambda: None)
        exchange.adopt(rounds.run.commits.newest())
        with torch.no_grad():
            for param in replica.model.parameters():
                param.sub_(1.0)

        def stored(index: int, data: memoryview):
            put[index] = number
            return transport.Fragment(len(data), xxhash.xxh3_128_hexdigest(data))

        found[number] = exchange.send(replica.delta, stored), base(exchange)

    def counted(run, commit, layout, index):
        read[index] = read.get(index, 0) + 1
        return real(run, commit, layout, index)

    monkeypatch.setattr("elastic.local.worker.exchange.read_params", counted)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert put == {0: 0, 1: 1, 2: 0}
    assert read == {0: 1, 1: 1, 2: 1}  # once per worker, not per rank
    for (fragments, length), adopted in found.values():
        assert [fragment.bytes for fragment in fragments] == [4 * n for n in rounds.layout.numels]
        assert length == pytest.approx(SIZE**0.5, rel=1e-2)
        assert torch.equal(adopted, rounds.base().bfloat16())


def test_a_fragment_is_read_while_the_one_before_is_adopted():
    reading, adopting, overlapped = threading.Event(), threading.Event(), []

    def read(index: int) -> int:
        if index == 1:
            reading.set()
            overlapped.append(adopting.wait(20 * PATIENCE))
        return index

    found = []
    for index in read_ahead(read, range(3)):
        if index == 0:
            assert reading.wait(20 * PATIENCE)
            adopting.set()
        found.append(index)
    assert found == [0, 1, 2]
    assert overlapped == [True]
