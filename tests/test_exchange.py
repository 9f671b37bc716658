"""What workers move: differences instead of versions, one read per node, the choice of transport,
and who of a worker's ranks moves what."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from elastic import transport, versions
from elastic.errors import ElasticError
from elastic.estimate import choose_transport
from elastic.exchange import Exchange, read_ahead
from elastic.group import Group
from elastic.merge import moved
from elastic.replica import Replica
from elastic.versions import read_exactly, read_params
from merging import SHAPES, Rounds
from running import running

SIZE = 30
EXACT = ("local_sgd.compression=none", "local_sgd.cold_start_steps=0")


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
    return Exchange(rounds.run, rounds.config, replica, Group(), 1)


def base(exchange: Exchange) -> torch.Tensor:
    params = [exchange.replica._base[t.name] for f in exchange.replica.layout.fragments for t in f]
    return torch.cat([each.flatten() for each in params])


# ---- differences --------------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["bf16", "int8", "int4"])
def test_every_worker_ends_on_bitwise_the_same_base(open_rounds, down, monkeypatch):
    """One that follows by differences, one that misses versions, one that comes late; masters
    change meanwhile."""
    rounds = open_rounds(f"local_sgd.downlink={down}")
    read = Counter()
    for name in ("read_params", "read_difference"):
        real = getattr(versions, name)

        def counted(*args, name=name, real=real):
            read[name] += 1
            return real(*args)

        monkeypatch.setattr(f"elastic.exchange.{name}", counted)
    follows, misses = exchange_of(rounds), exchange_of(rounds)
    for number in range(8):
        rounds.close([rounds.deliver(s, rounds.base() + torch.randn(SIZE), 9) for s in range(2)])
        if number == 4:
            rounds.new_master()
        commit = rounds.run.newest_commit()
        follows.adopt(commit)
        if number in (0, 3, 4, 7):
            misses.adopt(commit)
            late = exchange_of(rounds)
            late.adopt(commit)
            published = rounds.base().bfloat16()
            assert all(torch.equal(base(each), published) for each in (follows, misses, late))
    if down == "bf16":
        assert not read["read_difference"]
    else:
        assert read["read_difference"] == 3 * (7 + 1)


@pytest.mark.parametrize(("down", "step"), [("int8", 1 / 254), ("int4", 1 / 14)])
def test_what_a_difference_leaves_out_is_in_the_next_one(open_rounds, down, step):
    """The distance between parameters and what is published is that of one rounding, for ever."""
    rounds = open_rounds(f"local_sgd.downlink={down}")
    for _ in range(20):
        before, old = rounds.base(), rounds.theta
        rounds.close([rounds.deliver(0, rounds.base() + torch.randn(SIZE), 9)])
        largest = (rounds.theta - before).abs().max()
        off = (rounds.theta - rounds.base()).abs()
        assert off.max() <= 1.01 * step * largest + off.new_tensor(2.0**-8) * old.abs().max()
    assert off.max() > 0


def test_a_damaged_difference_is_refused_and_half_adopted_is_no_base(open_rounds):
    """The next version is then read whole, and right."""
    rounds = open_rounds("local_sgd.downlink=int8")
    exchange = exchange_of(rounds)
    exchange.adopt(rounds.run.newest_commit())
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    path = rounds.run.version_path(1) / "difference-02.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ElasticError, match="difference-02.safetensors"):
        exchange.adopt(rounds.run.newest_commit())
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    exchange.adopt(rounds.run.newest_commit())
    assert torch.equal(base(exchange), rounds.base().bfloat16())


def test_a_difference_is_half_of_the_bytes(open_rounds):
    rounds = open_rounds("local_sgd.downlink=int8")
    rounds.close([rounds.deliver(0, rounds.base() + 1, 9)])
    folder = rounds.run.version_path(1)
    for index, numel in enumerate(rounds.layout.numels):
        with safe_open(folder / f"difference-{index:02d}.safetensors", "pt") as file:
            assert file.get_tensor("data").numel() == numel + 2  # one block, one scale


def test_the_parameters_themselves_are_taken_up_by_the_next_master(open_rounds):
    """float32, as before: what is published in between rounds, the master does not."""
    rounds = open_rounds("local_sgd.downlink=int8")
    rounds.close([rounds.deliver(0, rounds.base() + torch.randn(SIZE), 9)])
    commit = rounds.run.newest_commit()
    exact = [read_exactly(rounds.run, commit, rounds.layout, i)[0] for i in range(3)]
    assert torch.equal(torch.cat(exact), rounds.theta)
    whole = [read_params(rounds.run, commit, rounds.layout, i) for i in range(3)]
    assert not torch.equal(torch.cat(whole), rounds.theta.bfloat16())


def test_adding_a_difference_rounds_once():
    base_, difference = torch.randn(999).bfloat16(), torch.randn(999)
    assert torch.equal(moved(base_, difference), (base_.double() + difference).bfloat16())


@pytest.mark.parametrize("overlap", ["off", "rebase"])
def test_a_run_with_differences_trains_as_ever(tmp_path, overlap):
    settings = {"elastic.max": 2, "local_sgd.downlink": "int8", "local_sgd.overlap": overlap}
    with running(tmp_path, settings, samples=2400) as run:
        run.workers(2)
        run.versions(3)
        run.kill("trainer")
        run.kill("master")
        run.versions(2)
        run.finish()
        commits = run.commits()
    assert commits[-1]["loss"] < commits[1]["loss"] / 2
    assert any("/difference-" in entry["path"] for entry in commits[-1]["files"])


# ---- the choice of transport --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "delta_bytes", "workers", "maxmemory", "url", "expected"),
    [
        ("auto", 1_000_000, 8, 10**9, "", "redis"),
        ("auto", 8_000_000, 8, 10**9, "", "redis"),
        ("auto", 8_000_001, 8, 10**9, "", "filesystem"),
        ("auto", 1_000_000, 8, 31_999_999, "", "filesystem"),
        ("auto", 10, 1, 10**9, "redis://site", "filesystem"),
        ("redis", 10**9, 99, 10**9, "", "redis"),
        ("filesystem", 1, 1, 10**9, "", "filesystem"),
    ],
)
def test_few_bytes_go_through_redis(configured, delta_bytes, workers, maxmemory, url, expected):
    settings = SimpleNamespace(
        local_sgd=SimpleNamespace(transport=configured),
        redis=SimpleNamespace(maxmemory_bytes=maxmemory, url=url),
    )
    name, reason = choose_transport(settings, delta_bytes, workers)
    assert name == expected
    assert reason


# ---- ranks --------------------------------------------------------------------------------------


class Ranks:
    """Groups of threads that talk as ranks do."""

    def __init__(self, world: int):
        self.world, self._barrier, self._said = world, threading.Barrier(world, timeout=30), {}

    def group(self, rank: int) -> Group:
        group = Group(rank, self.world)
        group.share = lambda message=None, source=0: self._from(rank, message, source)
        group.hand_out = group.share
        return group

    def _from(self, rank: int, message: object, source: int) -> object:
        if rank == source:
            self._said = message
        self._barrier.wait()
        found = self._said
        self._barrier.wait()
        return found


def test_each_rank_moves_its_own_fragments(open_rounds, monkeypatch):
    rounds, ranks = open_rounds("local_sgd.downlink=int8"), Ranks(2)
    put, read, found = {}, {}, {}
    real = versions.read_params

    def rank(number: int) -> None:
        replica = Replica(Shapes(), rounds.layout)
        exchange = Exchange(rounds.run, rounds.config, replica, ranks.group(number), 2)
        exchange.adopt(rounds.run.newest_commit())
        with torch.no_grad():
            for param in replica._params.values():
                param.sub_(1.0)

        def stored(index: int, data: memoryview):
            put[index] = number
            return transport.Fragment(len(data), transport.checksum(data))

        found[number] = exchange.send(replica.delta, False, stored), base(exchange)

    def counted(run, commit, layout, index):
        read[index] = read.get(index, 0) + 1
        return real(run, commit, layout, index)

    monkeypatch.setattr("elastic.exchange.read_params", counted)
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
            overlapped.append(adopting.wait(20))
        return index

    found = []
    for index in read_ahead(read, range(3)):
        if index == 0:
            assert reading.wait(20)
            adopting.set()
        found.append(index)
    assert found == [0, 1, 2]
    assert overlapped == [True]
