"""What loops of one's own bring along: schedulers, token counts, buffers, optimizers of all kinds,
slow samples. In real processes where the run has a part in it."""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from elastic.base.errors import ElasticError
from elastic.local.worker.in_hand import WorkerRound
from elastic.run.rundir import RunDir
from elastic.saved import inner_state
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, buffers, refuse_inexact, shapes
from elastic.saved.versions import read_layout, read_params
from elastic.sync.batches import Batches
from elastic.train import loading
from elastic.train.device import seed
from elastic.train.group import Group
from elastic.train.inner_optimizer import InnerOptimizer, Probe, refuse_odd
from elastic.train.loading import Loader
from helpers import PATIENCE
from own_loops import Normed
from running import TESTS, running

SCRIPT = TESTS / "own_loops.py"
CPU = Group()


def told(home: Path) -> dict[str, dict]:
    """What each attempt of a loop has written, by "SLOT.ATTEMPT"."""
    return {path.stem: json.loads(path.read_text()) for path in home.glob("[0-9]*.json")}


def loop(
    home: Path, kind: str, step_s: float = 0.02, **settings
) -> contextlib.AbstractContextManager:
    command = [sys.executable, str(SCRIPT), kind, str(home / "pace"), str(home)]
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    return running(home, {"run.command": command, **settings}, samples=400, step_s=step_s)


def warnings(run) -> list[str]:
    return [event["reason"] for event in run.events("warning")]


# ---- who sets the learning rate


def test_a_loop_may_set_its_rate_by_how_far_the_run_is_whatever_it_counts(tmp_path: Path):
    """Four samples of eight numbers each, counted as 32 tokens, do not run ahead of the epochs; a
    float is what .sum() makes. A step is a step of the optimizer."""
    with loop(tmp_path, "own", train__schedule="own", train__accumulate=5) as run:
        run.finish()
        assert not warnings(run)
        commits = run.commits()[1:]
    assert (commits[-1].tokens, commits[-1].total_tokens) == (3200, 3200)
    said = told(tmp_path)["0.1"]
    trained = [step / 20 for step in range(20) for _ in range(5)]
    assert said["progress"] == pytest.approx(trained)
    assert said["progress"][0] == 0.0
    assert said["rates"] == [0.02 * (1 - each) for each in said["progress"][::5]]
    assert sum(delta.steps for commit in commits for delta in commit.deltas) == 20
    assert commits[0].deltas[0].steps == 5


def test_all_ranks_of_a_loop_count_and_a_scheduler_made_before_leaves_the_peak(tmp_path: Path):
    """Only what rank 0 told was counted; and by the tokens of a run each rank had a learning rate
    of its own, though they share a model."""
    two = {"slurm__gpus_per_worker": 2, "elastic__min": 2, "elastic__max": 2}
    cosine = {"train__schedule": "cosine", "train__warmup_fraction": 0.0}
    with loop(tmp_path, "ranks", train__max_tokens=600, train__epochs=0, **cosine, **two) as run:
        run.finish()
        [said] = [each for each in warnings(run) if "a scheduler sets the learning rate" in each]
        deltas = [delta for commit in run.commits() for delta in commit.deltas]
    assert "peaks [0.01]" in said
    assert sum(delta.steps for delta in deltas) >= 50
    assert all((delta.tokens, delta.loss) == (12 * delta.steps, 1.5) for delta in deltas)
    rates = told(tmp_path)
    assert rates["0"] == rates["1"]
    middle = 0.01 * (0.1 + 0.9 * 0.5)
    assert rates["0"][25] == pytest.approx(middle, rel=0.1)
    assert rates["0"][5] > 0.009


def test_what_cannot_train_is_said_at_once():
    with pytest.raises(ElasticError, match="the learning rate of the optimizer is 0"):
        InnerOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.0), sets_rates=True)
    with pytest.raises(ElasticError, match="the data set is empty"):
        loading.check([])


def test_the_peak_is_what_a_scheduler_was_given():
    model, peaks = nn.Linear(2, 1), {}
    kinds = {
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=100),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100),
        "none": lambda o: None,
    }
    for kind, attach in kinds.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = attach(optimizer)
        inner = InnerOptimizer(optimizer, sets_rates=True)
        inner.set_rates(1.0)
        peaks[kind] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if scheduler:
            scheduler.step()
        assert bool(inner.contested()) == bool(scheduler)
    assert peaks == {"one cycle": 0.3, "cosine": 0.01, "none": 0.01}


def test_a_group_that_a_loop_adds_has_its_own_peak():
    """As where layers are unfrozen one after the other; it died of the next learning rate."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.01)
    inner = InnerOptimizer(optimizer, sets_rates=True)
    inner.set_rates(0.5)
    optimizer.add_param_group({"params": nn.Linear(2, 1).parameters(), "lr": 0.3})
    assert not inner.contested()
    inner.set_rates(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.15]
    assert not inner.contested()


def test_what_is_trained_outside_of_the_model_is_refused():
    """As the head of a loss: it began anew in every job, and no version had it."""
    model, head, frozen = nn.Linear(2, 1), nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(False)
    own = torch.optim.SGD([*model.parameters(), *frozen.parameters()], lr=0.1)
    refuse_odd(model, [own])
    with pytest.raises(ElasticError, match=r"of shape \(3, 2\) that the model"):
        refuse_odd(model, [own, torch.optim.SGD(head.parameters(), lr=0.1)])


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_a_rule_of_the_loops_own_is_noticed(when: str):
    inner = InnerOptimizer(torch.optim.SGD(Net().parameters(), lr=0.01), sets_rates=True)
    inner.set_rates(0.5)
    assert not inner.contested()
    if when == "before the step":
        inner.groups[0]["lr"] = 0.123
        assert "the loop or a scheduler sets" in inner.contested()
        return
    inner.groups[0]["lr"] = 0.123
    inner.set_rates(0.5)
    assert "the loop or a scheduler sets" in inner.contested()


# ---- whole batches, buffers, the final version


def test_a_network_with_batch_norm_survives_a_kill_and_ends_with_its_statistics(tmp_path: Path):
    """603 samples in batches of 4: the last one is filled up, and the model of every worker that
    comes to the end is the last version, running statistics included."""
    two = {"elastic__max": 2, "local_sgd__compression": "int8"}
    with loop(tmp_path, "normed", step_s=0.2, **two) as run:
        run.workers(2)
        run.versions(2)
        run.kill("own_loops")
        run.versions(1)
        run.finish()
        commits, layout = run.commits(), read_layout(run.run, run.version)
        found = {}
        for index, fragment in enumerate(layout.fragments):
            values = read_params(run.run, commits[-1], layout, index).float()
            found |= {t.name: values[t.start : t.start + t.numel].view(t.shape) for t in fragment}
    assert sum(commit.tokens - before.tokens for before, commit
               in zip(commits, commits[1:], strict=False)) == 603
    said = told(tmp_path)
    assert {size for each in said.values() for size in each["sizes"]} == {4}
    assert "table" not in found
    assert found["body.1.running_var"].mean() > 2  # of inputs with a variance of 9; it begins at 1
    assert found["body.1.num_batches_tracked"] > 10
    # Where one of the two had fewer steps the mean is no whole number, as the latter has to be.
    assert found["count"] == pytest.approx(found["body.1.num_batches_tracked"].item(), rel=0.2)
    ended = list(tmp_path.glob("[0-9]*.pt"))
    assert ended
    for path in ended:
        state = torch.load(path)
        assert torch.equal(state.pop("table"), torch.arange(8))
        assert state.keys() == found.keys()
        for name, value in state.items():
            mean = found[name] if value.is_floating_point() else found[name].round()
            assert torch.equal(value.float(), mean.to(value.dtype).float()), name
    noise = [path.read_text() for path in tmp_path.glob("*.noise")]
    assert len(set(noise)) == len(noise) > 1  # by slot and attempt


def test_the_mean_of_ones_is_one_in_a_buffer_of_integers():
    """Weights add up to 0.9999999: a flag that all had set came back as 0. And what float32 does
    not hold, as a seed, was changed by the first version."""
    model, most = nn.Linear(1, 1), torch.iinfo(torch.int64).max
    model.register_buffer("is_ready", torch.tensor(0, dtype=torch.uint8))
    model.register_buffer("seed", torch.tensor(123456789))
    model.register_buffer("none", torch.tensor(most))
    replica = Replica(model, Layout.of(shapes(model), 1000))
    _, seed, none = replica.whole(1)
    for put in (replica.adopt, replica.load, partial(replica.rebase, delta=torch.zeros(3))):
        model.is_ready.zero_()
        put(1, torch.stack([torch.tensor(0.9999999), seed, none]))
        assert (model.is_ready, model.seed, model.none) == (1, 123456789, most)
    assert replica.delta(1).abs().max() < 1e-6
    replica.adopt(1, torch.tensor([0.0, 5.0, 7.0]))
    assert (model.is_ready, model.seed, model.none) == (0, 5, 7)


def test_buffers_have_fragments_of_their_own():
    layout = Layout.of(shapes(model := Normed()), 1 << 20)
    assert [layout.has_buffers(index) for index in range(2)] == [False, True]
    assert [t.name for t in layout.fragments[1]] == list(buffers(model))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize("kind", [torch.complex64, torch.float64, torch.int32])
def test_a_parameter_that_would_be_rounded_is_refused_by_name(kind: torch.dtype):
    model = nn.Linear(2, 2)
    refuse_inexact(model)
    model.odd = nn.Parameter(torch.ones(2, dtype=kind), requires_grad=False)
    with pytest.raises(ElasticError, match=f"odd is {str(kind).removeprefix('torch.')}"):
        refuse_inexact(model)


# ---- losses


def test_a_batch_of_padding_alone_has_no_loss_and_spoils_none(tmp_path: Path):
    """The deltas with such a batch were refused, again and again, until the run failed. A round of
    nothing else was waited for without an end."""
    settings = {"run.task": "tiny_task:Masked", "train.batch_size": 1, "elastic.max": 1,
                "local_sgd.inner_steps": 2, "local_sgd.min_deadline": "1h"}
    with running(tmp_path, settings, samples=60, step_s=0) as run:
        run.finish()
        assert not run.events("reject")
        deltas = [delta for commit in run.commits() for delta in commit.deltas]
    assert sum(delta.steps for delta in deltas) == 60
    assert {delta.loss > 0 for delta in deltas} == {True, False}
    assert all((delta.loss > 0) == (delta.first_loss > 0) for delta in deltas)


def test_a_loss_that_is_none_is_no_part_of_a_mean():
    done = WorkerRound(0, 0.0)
    assert (done.mean_loss, done.first_loss) == (0.0, 0.0)
    for loss in (math.nan, 3.0, math.inf, 1.0):
        done.count(loss, 4, 0.1)
    assert (done.steps, done.mean_loss, done.first_loss) == (4, 2.0, 3.0)


# ---- optimizers of all kinds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.critic(self.generator(x))


class Nested(torch.optim.SGD):
    """Keeps lists, tables and odd shapes, as Shampoo and Adafactor do."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["rows"], state["pair"] = torch.rand(3), (torch.rand(2), 7)
            state["blocks"] = {0: [torch.rand(2, 2), None], "name": {"deep": torch.rand(1)}}


class Odd(torch.optim.SGD):
    """Keeps what nobody can write down."""

    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["open"] = object()


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def train(model: nn.Module, optimizers: list, steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.rand(8, 4)

        def closure(x=x):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss := model(x).square().mean()).backward()
            return loss

        for optimizer in optimizers:
            closure()
            optimizer.step(closure)


def plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_what_no_optimizer_trains_is_said():
    model = Net()
    one = torch.optim.SGD(model.generator.parameters(), lr=0.1)
    both = [one, torch.optim.SGD(model.critic.parameters(), lr=0.2)]
    [said] = InnerOptimizer(one, sets_rates=True).doubts(model)
    assert "critic.weight, critic.bias" in said
    inner = InnerOptimizer(both, sets_rates=True)
    assert not [*inner.doubts(model)]
    inner.set_rates(0.5)
    assert [group["lr"] for group in inner.groups] == [0.05, 0.1]


@pytest.mark.parametrize("kind", [lbfgs, torch.optim.Adafactor, torch.optim.AdamW, "nested", "gan"])
def test_the_state_of_every_optimizer_comes_back(tmp_path: Path, kind):
    def make(model: nn.Module) -> list:
        if kind == "gan":
            return [torch.optim.Adam(model.generator.parameters()),
                    torch.optim.RMSprop(model.critic.parameters())]
        return [Nested(model.parameters(), lr=0.1) if kind == "nested"
                else kind(model.parameters())]

    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()
    optimizers = make(model)
    train(model, optimizers)
    entry = inner_state.save(run.slots.path(0), "inner-1.1", optimizers, 0)
    pointer = inner_state.Pointer(0, 1, 1, (entry,))
    others = make(Net())
    assert inner_state.load(run, pointer, others, 0) == ""
    for one, other in zip(optimizers, others, strict=True):
        assert plain(other.state_dict()["state"]) == plain(one.state_dict()["state"])
    train(Net(), others)
    assert "another" in inner_state.load(run, pointer, make(Net())[:1] * 3, 0)
    wrong = [torch.optim.Rprop(Net().parameters())]
    assert "another optimizer's" in inner_state.load(run, pointer, wrong, 0)


class Counting(torch.optim.SGD):
    """Keeps state in its groups, as Prodigy does (k, d) and apex's FusedAdam (step)."""

    def __init__(self, params, lr: float, decay: float = 0.1):
        super().__init__(params, lr=lr, weight_decay=decay)
        for group in self.param_groups:
            group |= {"d": 1e-6, "k": 0, "flag": True, "sums": torch.zeros(2)}

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group |= {"d": 2 * group["d"], "k": group["k"] + 1, "flag": False}
            group |= {"step": group.get("step", 0) + 1}
            group["sums"] += 1


def test_what_an_optimizer_counts_in_its_groups_comes_back(tmp_path: Path):
    """It began anew at each restart, with moments that were not new. What the run or the user has
    set since is not undone."""
    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()

    def made(**options) -> InnerOptimizer:
        parts = (model.generator, model.critic)
        return InnerOptimizer([Counting(p.parameters(), 0.1, **options) for p in parts], True)

    one, other = made(), made(decay=0.2)
    assert one.counted() == [{}, {}]
    train(model, one.each)
    one.set_rates(0.5)
    entry = inner_state.save(run.slots.path(0), "inner-1.1", one.each, 0, one.counted())
    pointer = inner_state.Pointer(0, 1, 1, (entry,))
    assert inner_state.load(run, pointer, other.each, 0) == ""
    for group in other.groups:
        told = {name: plain(group[name]) for name in ("d", "k", "step", "sums", "lr", "flag")}
        assert told == {"d": 8e-6, "k": 3, "step": 3, "sums": [3, 3], "lr": 0.1, "flag": True}
        assert group["weight_decay"] == 0.2
    assert plain(other.counted()) == plain(one.counted())
    other.forget()
    assert other.counted() == [{}, {}]
    assert [group["k"] for group in other.groups] == [0, 0]


class CountsForAll(torch.optim.SGD):
    """Keeps a count beside the states of its parameters, as MADGRAD does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.state["k"] = 0

    def step(self, closure=None):
        super().step()
        self.state["k"] += 1
        self.state["sums"] = self.state.get("sums", torch.zeros(2)) + 1


def test_what_an_optimizer_counts_for_all_parameters_comes_back(tmp_path: Path):
    """It began anew, or was gone: then the slot could not train again."""
    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()
    one, other = (InnerOptimizer(CountsForAll(model.parameters()), True) for _ in range(2))
    train(model, one.each * 2)
    entry = inner_state.save(run.slots.path(0), "inner-1.1", one.each, 0)
    assert inner_state.load(run, inner_state.Pointer(0, 1, 1, (entry,)), other.each, 0) == ""
    [kept], [made] = other.each, one.each
    assert (kept.state["k"], kept.state["sums"].tolist()) == (made.state["k"], [6.0, 6.0])
    other.forget()
    assert kept.state == {"k": 0}


class Wrapped(torch.optim.Optimizer):
    """Shows the state of another one as its own, as ScheduleFree's wrapper does."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base, self.param_groups = base, base.param_groups

    state = property(lambda self: self.base.state)

    def state_dict(self) -> dict:
        return self.base.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.base.load_state_dict(state)


def test_a_state_comes_back_to_an_optimizer_that_wraps_another(tmp_path: Path):
    """It has no attribute for it that could be set."""
    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()
    one, other = (torch.optim.Adam(model.parameters()) for _ in range(2))
    train(model, [one])
    entry = inner_state.save(run.slots.path(0), "inner-1.1", [Wrapped(one)], 0)
    pointer = inner_state.Pointer(0, 1, 1, (entry,))
    assert inner_state.load(run, pointer, [Wrapped(other)], 0) == ""
    assert plain(other.state_dict()["state"]) == plain(one.state_dict()["state"])


def test_moments_come_back_in_the_memory_format_of_their_parameters(tmp_path: Path):
    """A fused step takes the elements as they lie in memory: it trained on other moments."""
    run = RunDir(tmp_path)
    (tmp_path / "slots").mkdir()
    torch.manual_seed(0)
    one = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    other, batch = deepcopy(one), torch.randn(4, 3, 8, 8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch).square().mean().backward()
        optimizer.step()

    first, second = (torch.optim.AdamW(m.parameters(), 0.01, fused=True) for m in (one, other))
    step(one, first)
    other.load_state_dict(one.state_dict())
    entry = inner_state.save(run.slots.path(0), "inner-1.1", [first], 0)
    assert inner_state.load(run, inner_state.Pointer(0, 1, 1, (entry,)), [second], 0) == ""
    step(one, first)
    other.weight.grad, other.bias.grad = one.weight.grad.clone(), one.bias.grad.clone()
    second.step()
    assert torch.equal(one.weight, other.weight)


def test_groups_may_be_empty_or_come_later(tmp_path: Path):
    """A split by weight decay leaves one of them empty where no parameter is 1-D."""
    run, model = RunDir(tmp_path), nn.Linear(4, 1, bias=False)
    (tmp_path / "slots").mkdir()

    def made() -> InnerOptimizer:
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": []}]
        return InnerOptimizer(torch.optim.AdamW(groups, lr=0.1), sets_rates=False)

    one, other = made(), made()
    for each in (one, other):
        each.each[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    model(torch.ones(4)).backward()
    one.each[0].step()
    entry = inner_state.save(run.slots.path(0), "inner-1.1", one.each, 0, one.counted())
    assert inner_state.load(run, inner_state.Pointer(0, 1, 1, (entry,)), other.each, 0) == ""
    assert plain(other.each[0].state_dict()["state"]) == plain(one.each[0].state_dict()["state"])
    other.forget()
    assert other.each[0].state == {}


def test_a_saved_state_sets_no_learning_rate_nor_parameters(tmp_path: Path):
    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()
    one = Counting(model.parameters(), lr=0.1)
    planted = {"lr": 9.0, "initial_lr": 9.0, "params": (), "words": "x", "k": 7}
    entry = inner_state.save(run.slots.path(0), "inner-1.1", [one], 0, [planted])
    pointer = inner_state.Pointer(0, 1, 1, (entry,))
    assert inner_state.load(run, pointer, [one], 0) == ""
    (group,) = one.param_groups
    assert (group["lr"], len(group["params"]), group["k"]) == (0.1, 4, 7)
    assert not {"words", "initial_lr"} & {*group}


def test_what_cannot_be_saved_is_no_crash(tmp_path: Path):
    run, model = RunDir(tmp_path), Net()
    (tmp_path / "slots").mkdir()
    optimizers = [Odd(model.parameters(), lr=0.1)]
    train(model, optimizers)
    with pytest.raises(inner_state.UNFIT):
        inner_state.save(run.slots.path(0), "inner-1.1", optimizers, 0)
    assert not list(run.slots.path(0).iterdir())


class Mastered(torch.optim.SGD):
    """Trains float32 copies of its own and hands them to the model, as apex's O2 does."""

    def __init__(self, params, lr: float):
        self.model_params = list(params)
        super().__init__([p.detach().clone().requires_grad_() for p in self.model_params], lr=lr)

    def step(self, closure=None):
        for own, param in zip(self.param_groups[0]["params"], self.model_params, strict=True):
            own.grad = param.grad
        super().step()
        for own, param in zip(self.param_groups[0]["params"], self.model_params, strict=True):
            param.data.copy_(own)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Mastered])
@pytest.mark.parametrize("steps", [10, 50])
def test_an_optimizer_that_no_version_reaches_is_found(kind, steps: int):
    """Each version moves the parameters by some steps' worth, as others have trained elsewhere."""
    torch.manual_seed(0)
    model, found = nn.Linear(64, 8), []
    optimizer, probe = kind(model.parameters(), lr=1e-2), Probe(model, near=0.5, may_ignore=1)
    for version in range(4):
        probe.before()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=0.05)
        probe.placed(steps if version else 0)
        for step in range(steps):
            optimizer.zero_grad()
            for param in optimizer.model_params if kind is Mastered else model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            with contextlib.suppress(ElasticError):
                probe.check([optimizer])
                continue
            found.append((version, step))
    assert bool(found) == (kind is Mastered)
    assert not any(version == 0 for version, _ in found)


def test_a_step_that_undoes_what_bfloat16_has_rounded_is_no_sign():
    """A model of two numbers that had all but converged was killed again and again."""
    model = nn.Linear(1, 1)
    optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.5), Probe(model, 0.5, may_ignore=0)
    for _ in range(3):
        before = model.weight.detach().clone()
        probe.before()
        with torch.no_grad():
            model.weight.mul_(1 + 2**-9)
        probe.placed(20)
        with torch.no_grad():
            model.weight.copy_(before)
        probe.check([optimizer])


# ---- loading ahead


class Counted(Dataset):
    """Every sample that is loaded leaves a line."""

    def __init__(self, path: Path, samples: int):
        self.path, self.samples = path, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return torch.tensor(index)


def loader(dataset: Dataset, workers: int, **settings) -> Loader:
    train = {"batch_size": 4, "accumulate": 1, "loader_workers": workers, **settings}
    config = SimpleNamespace(
        train=SimpleNamespace(**train), run=SimpleNamespace(seed=0),
        step_samples=train["batch_size"] * train["accumulate"],
    )
    return Loader(dataset, default_collate, config, CPU, pin=False)


def loaded(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE * 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def collected(monkeypatch):
    """The processes of a loader end with its test. Else Python comes by in a later one, and waits
    five seconds for each of them."""
    yield
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    gc.collect()


@pytest.mark.usefixtures("collected")
def test_samples_are_loaded_by_others_while_a_batch_is_trained(tmp_path: Path):
    path = tmp_path / "loaded"
    ahead = loader(Counted(path, 400), workers=2)
    ahead.plan([(0, 0, 100)])
    ahead.next()
    wait_for(lambda: len(loaded(path)) >= 12)  # this one, and two more, while it is at hand
    assert str(os.getpid()) not in loaded(path)


@pytest.fixture
def forkserver():
    """The default from Python 3.14 on."""
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.mark.usefixtures("collected")
def test_a_data_set_need_not_be_picklable_on_any_python(tmp_path: Path, forkserver, make_config):
    class Local(Counted):
        pass

    dataset = Local(tmp_path / "loaded", 8)
    ahead = loader(dataset, workers=1)
    ahead.plan([(0, 0, 4)])
    assert len(ahead.next()) == 4
    task = SimpleNamespace(dataset=lambda: dataset)
    config = make_config("train.loader_workers=1", "train.batch_size=4", "elastic.max=1")
    batch = Batches(task, config, CPU).next()
    assert len(next(iter(batch.passes))[1]) == 4


def test_without_workers_nothing_is_loaded_before_it_is_asked_for(tmp_path: Path):
    path = tmp_path / "loaded"
    inline = loader(Counted(path, 400), workers=0)
    inline.plan([(0, 0, 100)])
    inline.next()
    assert loaded(path) == [str(os.getpid())] * 4


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_plan_drops_what_was_loaded(tmp_path: Path, workers: int):
    dataset = Counted(tmp_path / "loaded", 40)
    one, other = loader(dataset, workers), loader(dataset, 0)
    one.plan([(0, 0, 40)])
    one.next()
    for plan in [(0, 20, 28), (1, 0, 8)]:
        one.plan([plan])
        other.plan([plan])
        assert torch.equal(one.next(), other.next())


class Drawn(Dataset):
    """Samples that are changed by chance."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2) + random.random()


def drawn(batches_of: Callable[[Loader], Iterator]) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """What a loop with random numbers of its own gets, and the state in which it leaves them."""
    seed(3)
    inline, found = loader(Drawn(), workers=0), []
    for plan in ([(0, 0, 24)], [(0, 4, 24), (1, 0, 10)]):
        inline.plan(plan)
        batches = batches_of(inline)
        found += [torch.cat([next(batches).flatten(), torch.rand(1)]) for _ in range(3)]
    return torch.stack(found), torch.get_rng_state(), random.getstate()


def test_without_workers_nothing_but_the_samples_takes_random_numbers():
    """As if the loop had loaded them by hand: runs are replayed bit for bit."""
    found, *left = drawn(lambda inline: (inline.next() for _ in range(3)))
    wanted, *known = drawn(
        lambda inline: (default_collate([Drawn()[i] for i in each]) for each in inline)
    )
    assert torch.equal(found, wanted)
    assert torch.equal(left[0], known[0])
    assert left[1] == known[1]


def test_the_last_batch_is_filled_up():
    dataset = list(range(10))
    whole = loader(dataset, 0)
    whole.plan([(0, 7, 10)])
    assert len(whole.next()) == 4
    small = loader(dataset[:3], 0)
    small.plan([(0, 0, 3)])
    assert sorted(set(small.next().tolist())) == [0, 1, 2]


@pytest.mark.parametrize("given", [DataLoader([1]), iter([1])], ids=["DataLoader", "iterator"])
def test_what_has_no_numbers_is_refused_with_the_way_out(given):
    with pytest.raises(ElasticError, match="handed out by number") as caught:
        loading.check(given)
    assert "map-style" in caught.value.hint


def test_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(ElasticError, match="a Stream has none"):
        loading.check(Stream())


def test_workers_that_load_go_with_a_killed_trainer_and_a_preempted_job(tmp_path: Path):
    """In real processes: the trainer's own loaders outlive neither a kill nor a notice."""
    settings = {"train.loader_workers": 2, "elastic.max": 1}
    with running(tmp_path, settings, samples=100_000) as run:
        run.workers(1)
        run.versions(1)
        before = set(run.pids("trainer"))
        assert len(before) == 3  # a fork has its parent's command line
        os.kill(run.trainer_of(0), signal.SIGKILL)
        run.until(lambda: not before & set(run.pids("trainer")), 30, "all of them are gone")
        run.until(lambda: len(run.pids("trainer")) == 3, 30, "they are there again")
        run.set_capacity(0)
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        run.until(lambda: not run.pids("trainer"), 30, "these are gone, too")
        run.audit()
        assert all("SIGKILL" in event["reason"] for event in run.events("restart"))
