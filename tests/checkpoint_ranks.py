"""Ranks that write and read checkpoints: `python checkpoint_ranks.py WHAT RUN`, over gloo.

Started once per rank by test_checkpoint.py, which also uses the model here in one process.
"""

import errno
import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.run.rundir import RunDir
from elastic.saved import storage
from elastic.saved.checkpoint import Checkpoints, steps
from elastic.train.group import Group
from elastic.train.optimizers import default_optimizer

TRAIN = SimpleNamespace(
    optimizer="muon", learning_rate=0.1, weight_decay=0.01, beta1=0.9, beta2=0.999
)


class Net(nn.Module):
    """What is awkward to save: odd sizes, tied, frozen and untrained parameters, buffers that no
    two ranks have alike."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 7, bias=False)])
        self.head = nn.Linear(7, 2)
        self.table = nn.Embedding(2, 7)
        self.table.weight = self.head.weight
        self.untrained = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("known", torch.zeros(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer += 1 + (dist.get_rank() if dist.is_initialized() else 0)
        x = x + self.table(torch.zeros(len(x), dtype=torch.long))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def make(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model of its own, sharded where there are several ranks, and its optimizer: Muon for the
    matrices of its layers, AdamW for all the rest."""
    torch.manual_seed(seed)
    net = Net()
    if dist.is_initialized():
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    return net, default_optimizer(net, TRAIN)


def train(net: Net, optimizer: torch.optim.Optimizer, number: int = 1) -> None:
    for _ in range(number):
        net(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and moment, whole, by name."""
    found = dict(net.state_dict())
    for name, param in net.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state.get(param, {}).items()}
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    return {key: value.detach().clone() for key, value in whole.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def note(run: RunDir, step: int, state: dict[str, torch.Tensor]) -> None:
    """Keep, beside the run, what a checkpoint has to hold."""
    if dist.get_rank() == 0:
        save_file(state, run.path / f"expected-{step}")
    dist.barrier()


def noted(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.path / f"expected-{step}")


@contextmanager
def full_disk(rank: int):
    """torch.save says on this rank what it says where there is no space."""
    def refuse(*_):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as torch does)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(torch, "save", refuse)
        yield


def fail(rank: int) -> None:
    raise OSError(errno.EIO, "of 1") if rank else TryAgain("of 0")


@contextmanager
def silent_files(rank: int):
    """The filesystem gives this rank nothing, for longer than anybody waits."""
    def silent(*_):
        raise TryAgain("the filesystem fails for now")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(durable, "insist", silent)
        yield


def write(run: RunDir, group: Group) -> None:
    checkpoints = Checkpoints(run, group, "job1", keep=9)
    net, optimizer = make(seed=1)
    saved, reasons = checkpoints.load(net, optimizer)
    assert (saved.step, saved.extra, saved.world, reasons) == (1, {"tokens": 10}, 1, [])
    assert_equal(everything(net, optimizer), noted(run, 1))

    train(net, optimizer)
    note(run, 2, everything(net, optimizer))
    checkpoints.save(2, net, optimizer, {"tokens": 20})
    assert 0 < checkpoints.stall_s <= checkpoints.save_s

    train(net, optimizer)
    note(run, 3, everything(net, optimizer))
    checkpoints.begin(3, net, optimizer, {"tokens": 30})
    train(net, optimizer)  # while it is being written
    while not checkpoints.poll():
        train(net, optimizer)
    assert steps(run) == [3, 2, 1]
    assert not checkpoints.poll()
    assert checkpoints.finish() is None

    note(run, 4, everything(net, optimizer))
    checkpoints.begin(4, net, optimizer, {"tokens": 40})
    train(net, optimizer)
    while steps(run) != [4, 3, 2, 1]:  # written and committed when the disk gets full
        time.sleep(0.01)
    with full_disk(rank=1):
        refused(lambda: checkpoints.save(5, net, optimizer, {}))  # on both ranks; it finished 4
        checkpoints.begin(5, net, optimizer, {})
        refused(checkpoints.finish)
    assert steps(run) == [4, 3, 2, 1]
    assert not list((run.path / "checkpoints").glob(".*"))
    note(run, 5, everything(net, optimizer))
    checkpoints.begin(5, net, optimizer, {"tokens": 50})
    assert checkpoints.finish() == 5
    seconds = [checkpoints.save_s, checkpoints.stall_s]
    assert group.gather(seconds) == [seconds] * group.world


def refused(action) -> None:
    with pytest.raises(OSError, match="step 5 was not saved: rank 1: .*No space left") as caught:
        action()
    assert caught.value.errno == errno.ENOSPC


def read(run: RunDir, group: Group) -> None:
    checkpoints = Checkpoints(run, group, "job2", keep=9)
    net, optimizer = make(seed=2)
    train(net, optimizer, 2)
    with pytest.raises(TryAgain, match="of 0"):  # the first by rank, on both
        group.all_do(lambda: fail(group.rank))
    group.patience_s = -1.0
    for rank in (0, 1):
        with silent_files(rank), pytest.raises(TryAgain, match="fails for now"):
            checkpoints.load(net, optimizer)
    saved, reasons = checkpoints.load(net, optimizer)
    assert group.gather(reasons) == [reasons] * group.world
    assert [reason.split(":")[0] for reason in reasons] == ["step 5", "step 4"]
    assert "__1_0.distcp" in reasons[0]
    assert (saved.step, saved.extra, saved.world) == (3, {"tokens": 30}, 2)
    assert_equal(everything(net, optimizer), noted(run, 3))
    train(net, optimizer)
    note(run, 5, everything(net, optimizer))
    checkpoints.save(5, net, optimizer, {"tokens": 55})  # in place of the damaged one


class Own(torch.optim.SGD):
    """Keeps a sum for every element of this rank's part alone."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["sum"] = torch.zeros_like(param.to_local())


def odd(run: RunDir, group: Group) -> None:
    checkpoints = Checkpoints(run, group, "job3", keep=9)
    net, _ = make(seed=3)
    optimizer = Own(net.parameters(), lr=0.1)
    train(net, optimizer)
    with pytest.raises(ElasticError, match=r"sum of layers.0.weight is of one rank's part"):
        checkpoints.save(2, net, optimizer, {})


class Counting(torch.optim.SGD):
    """Keeps the steps of a parameter: one number, changed in place, that all ranks have."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param].setdefault("steps", param.new_zeros(())).add_(1)
                self.state[param].setdefault("plain", torch.zeros(())).add_(1)


@contextmanager
def held_disk():
    """What is written in the background is written when this ends."""
    goes_on, write = threading.Event(), storage.Writer.write_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.Writer, "write_data", lambda *a: goes_on.wait(60) and write(*a))
        yield
        goes_on.set()


def of_optimizer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if "/" in name}


def numbers(run: RunDir, group: Group) -> None:
    checkpoints = Checkpoints(run, group, "job4", keep=9)
    net, _ = make(seed=3)
    optimizer = Counting(net.parameters(), lr=0.1)
    train(net, optimizer)
    assert isinstance(optimizer.state[net.head.weight]["steps"], DTensor)
    before = of_optimizer(everything(net, optimizer))
    with held_disk():
        checkpoints.begin(2, net, optimizer, {})
        train(net, optimizer)
    assert checkpoints.finish() == 2
    assert checkpoints.load(net, optimizer)[0].step == 2
    assert_equal(of_optimizer(everything(net, optimizer)), before)


class Late(torch.optim.SGD):
    """Has state that a first step does not make: of the second, in a list, of another size. And
    a count for all parameters, as MADGRAD has."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.state["k"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.state["k"] += 1
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if "recent" in state:
                    state.setdefault("slow", param.clone()).lerp_(param, 0.5)
                state.setdefault("recent", []).append(param.grad.clone())
                state["norms"] = torch.cat([state.get("norms", torch.ones(90)), torch.ones(1)])


def late(run: RunDir, group: Group) -> None:
    """Loaded by an optimizer that has never stepped, and one that has the state already."""
    checkpoints = Checkpoints(run, group, "job5", keep=9)
    net, _ = make(seed=3)
    optimizer = Late(net.parameters())
    checkpoints.save(1, net, optimizer, {})  # it has never stepped
    train(net, optimizer, 3)
    checkpoints.save(2, net, optimizer, {})
    for steps_before in (0, 4):
        other, _ = make(seed=4)
        fresh = Late(other.parameters())
        train(other, fresh, steps_before)
        assert checkpoints.load(other, fresh)[0].step == 2
        assert (fresh.state["k"], optimizer.state["k"]) == (3, 3)
        for name, param in net.named_parameters():
            state = fresh.state.get(other.get_parameter(name), {})
            assert flat(state).keys() == flat(optimizer.state.get(param, {})).keys(), name
            assert_equal(flat(state), flat(optimizer.state.get(param, {})))


def flat(state: dict) -> dict[str, torch.Tensor]:
    lists = {f"recent {at}": value for at, value in enumerate(state.get("recent", ()))}
    found = {name: value for name, value in state.items() if name != "recent"} | lists
    found = {name: value for name, value in found.items() if value is not None}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = Group(dist.get_rank(), dist.get_world_size())
    what = {"write": write, "read": read, "odd": odd, "numbers": numbers, "late": late}[sys.argv[1]]
    what(RunDir(Path(sys.argv[2])), group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
