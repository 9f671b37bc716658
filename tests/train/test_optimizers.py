"""The inner optimizers that come along: who trains which parameter, with whose arithmetic.

    pytest tests/train/test_optimizers.py
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.base.errors import ElasticError
from elastic.train import models
from elastic.train.inner_optimizer import InnerOptimizer
from elastic.train.optimizers import (
    Muon,
    Together,
    default_optimizer,
    hidden_matrices,
    optimizer_of,
)

TRAIN = SimpleNamespace(
    optimizer="muon", learning_rate=0.02, weight_decay=0.1, beta1=0.9, beta2=0.95
)


class Net(nn.Module):
    def __init__(self, is_tied: bool = False):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.inner = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def net(**kind) -> Net:
    torch.manual_seed(1)
    return Net(**kind)


def train(model: nn.Module, optimizers: list, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        x = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_has_a_matrix_that_two_layers_share_once():
    """It stepped twice."""
    model = net()
    model.inner[1].weight = model.inner[0].weight
    assert [id(param) for param in hidden_matrices(model)] == [id(model.inner[0].weight)]


def test_muon_leaves_complex_weights_to_adamw():
    """It dropped what is imaginary of their gradients."""
    model = net()
    model.inner[0] = torch.nn.Linear(8, 8, dtype=torch.complex64)
    assert [id(param) for param in hidden_matrices(model)] == [id(model.inner[1].weight)]


@pytest.mark.parametrize("is_tied", [False, True])
def test_muon_trains_the_matrices_between_the_embedding_and_the_head(is_tied):
    model = net(is_tied=is_tied)
    assert [id(p) for p in hidden_matrices(model)] == [id(layer.weight) for layer in model.inner]
    groups = default_optimizer(model, TRAIN).param_groups
    held = [id(param) for group in groups for param in group["params"]]
    assert sorted(held) == sorted(id(param) for param in model.parameters())
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_frozen_matrices_are_left_alone():
    model = net()
    model.inner[0].weight.requires_grad = False
    assert [id(p) for p in hidden_matrices(model)] == [id(model.inner[1].weight)]


def test_what_is_no_matrix_is_adamws():
    model = net()
    model.inner[0].weight = nn.Parameter(torch.ones(2, 6, 6))  # as of two experts
    assert [id(p) for p in hidden_matrices(model)] == [id(model.inner[1].weight)]


def test_a_model_without_such_matrices_gets_adamw():
    assert type(default_optimizer(nn.Linear(2, 2), TRAIN)).__name__ == "EagerAdamW"


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, as LoRA has it; `last` has the head's place."""

    def __init__(self, rank: int):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, rank, bias=False), nn.Linear(rank, 6, bias=False)
        self.last = nn.Linear(6, 7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(x, 7)[..., :6].float()
        return self.last(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("rank", [1, 3])
def test_muon_trains_adapters_alone(rank):
    """AdamW had no parameter left, and is not made without."""
    model = Adapted(rank)
    optimizer = default_optimizer(model, TRAIN)
    assert [*hidden_matrices(model)] == optimizer.param_groups[0]["params"]
    before = [model.down.weight.detach().clone(), model.up.weight.detach().clone()]
    train(model, [optimizer])
    assert not any(map(torch.equal, before, (model.down.weight, model.up.weight)))
    assert torch.stack([p.isfinite().all() for p in model.parameters()]).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("place", ["hidden", "head", "table", "all"])
@pytest.mark.parametrize("norm", ["old", "new", "spectral", "scalar"])
def test_what_a_parametrization_computes_is_no_parameter(norm, place):
    kinds = {
        "old": nn.utils.weight_norm, "new": nn.utils.parametrizations.weight_norm,
        "spectral": nn.utils.parametrizations.spectral_norm,
        "scalar": lambda layer: nn.utils.parametrizations.weight_norm(layer, dim=None),
    }
    model = net()
    places = {"hidden": [model.inner[0]], "head": [model.head], "table": [model.table]}
    for layer in places.get(place) or [*model.inner, model.head, model.table]:
        kinds[norm](layer)
    optimizer = default_optimizer(model, TRAIN)
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert sorted(held) == sorted(id(param) for param in model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    assert not any(map(torch.equal, before, train(model, [optimizer])))


def test_a_frozen_model_has_no_optimizer():
    with pytest.raises(ValueError, match="empty parameter list"):
        default_optimizer(net().requires_grad_(False), TRAIN)


def test_both_move_as_torchs_own():
    """Muon to the digits of bfloat16, in which torch's own multiplies; AdamW to the bit."""
    mine, theirs = net(), net()
    hidden = [layer.weight for layer in theirs.inner]
    rest = [p for p in theirs.parameters() if not any(p is h for h in hidden)]
    muon = torch.optim.Muon(hidden, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.dim() == dim], "weight_decay": 0.1 * (dim == 2)}
         for dim in (2, 1)], lr=0.02, betas=(0.9, 0.95))
    ours = train(mine, [default_optimizer(mine, TRAIN)], steps=1)
    torchs = train(theirs, [muon, adamw], steps=1)
    for start, our, torchs_own in zip(net().parameters(), ours, torchs, strict=True):
        close = 0.03 * (torchs_own - start).abs().max() if is_hidden(start, net()) else 0.0
        assert (our - torchs_own).abs().max() <= close


def is_hidden(parameter: torch.Tensor, model: Net) -> bool:
    return any(torch.equal(parameter, layer.weight) for layer in model.inner)


class Products(TorchDispatchMode):
    """The types of what is multiplied while it is entered."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes |= {tensor.dtype for tensor in args}
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_muon_multiplies_in_float32():
    """Most CPUs have no instructions for bfloat16."""
    layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
    optimizer = default_optimizer(layer, TRAIN)
    layer(torch.ones(3, 6)).sum().backward()
    with Products() as products:
        optimizer.step()
    assert products.dtypes == {torch.float32}


@pytest.mark.parametrize("rows", [4, [1, 7, 4]])
def test_each_matrix_that_a_layer_stacks_moves_for_itself(rows):
    """As q, k and v do: of their layer's whole matrix they learned less in local mode."""
    torch.manual_seed(1)
    stacked = nn.Sequential(nn.Linear(6, 12, bias=False), nn.Linear(12, 2))
    stacked[0].matrix_rows = rows
    apart = [nn.Parameter(part.detach().clone()) for part in stacked[0].weight.split(rows)]
    given = torch.randn(3, 6)
    alone = Muon({part: [len(part)] for part in apart}, TRAIN.learning_rate, TRAIN.weight_decay)
    optimizer = default_optimizer(stacked, TRAIN)
    for _ in range(3):
        stacked(given).square().sum().backward()
        for part, grad in zip(apart, stacked[0].weight.grad.split(rows), strict=True):
            part.grad = grad.clone()
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
    assert torch.allclose(stacked[0].weight, torch.cat(apart), atol=1e-6)


@pytest.mark.parametrize("rows", [5, 0, -1, [4, 4], [12, 0], []])
def test_matrices_that_do_not_make_a_layer_are_refused(rows):
    """In the first step; where ranks share the layer all but one of them waited for ever."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 2))
    model[0].matrix_rows = rows
    with pytest.raises(ElasticError, match="a layer has 12 rows, and its matrix_rows are"):
        default_optimizer(model, TRAIN)


def test_q_k_and_v_are_three_matrices():
    model = models.create(models.Shape(dim=8, layers=1, heads=2, vocabulary=5, context=4))
    weight = model.layers[0].attention.qkv.weight
    assert [len(part) for part in weight.split(hidden_matrices(model)[weight])] == [8, 8, 8]


def test_the_rate_and_what_is_loaded_reach_both():
    model, other = net(), net()
    optimizer, fresh = default_optimizer(model, TRAIN), default_optimizer(other, TRAIN)
    assert isinstance(fresh, Together)
    InnerOptimizer(optimizer, sets_rates=True).set_rates(0.5)
    train(model, [optimizer])
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {group["lr"] for group in fresh.param_groups} == {0.01}
    assert all(map(torch.equal, train(model, [optimizer]), train(other, [fresh])))
    fresh.state.clear()  # as where moments are suspect
    train(other, [fresh], steps=1)
    assert len(fresh.state) == len([*other.parameters()])


class Both(torch.optim.Optimizer):
    """Two in one, whose moments no checkpoint ever sees."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def test_a_task_may_have_several_optimizers_and_hides_none():
    """Every save changed the moments of the hidden ones, and no restart had them."""
    model = net()
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix]
                      for is_matrix in (True, False))

    def made():
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.1)]

    hidden = SimpleNamespace(optimizer=lambda model: Both(*made()))
    with pytest.raises(ElasticError, match="Both hides the state of its SGD\n.*as a list"):
        optimizer_of(hidden, model, TRAIN)
    optimizer = optimizer_of(SimpleNamespace(optimizer=lambda model: made()), model, TRAIN)
    train(model, [optimizer])
    kinds = {key for param in model.parameters() for key in optimizer.state[param]}
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    assert len(optimizer.param_groups) == 2


def test_an_update_of_muon_is_as_large_as_one_of_adamw():
    """RMS 0.2 of the learning rate, which is what AdamW's updates mostly have."""
    layer = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 200))
    before = layer[0].weight.detach().clone()
    train = SimpleNamespace(**vars(TRAIN) | {"weight_decay": 0.0})
    optimizer = default_optimizer(layer, train)
    layer(torch.randn(128, 64)).square().sum().backward()
    optimizer.step()
    moved = (layer[0].weight - before).square().mean().sqrt().item()
    assert 0.5 < moved / (0.2 * 0.02) < 1.5
