"""Ranks that share a small model by FSDP2: `python sharded_ranks.py WHAT ...`, over gloo."""

import math
import sys
from types import SimpleNamespace

import torch
from torch import nn

from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.train.device import build_model, join_group
from elastic.train.group import Group, own_part
from elastic.train.models import Shape, create
from elastic.train.optimizers import default_optimizer
from elastic.train.task import score

CONFIG = SimpleNamespace(run=SimpleNamespace(seed=5),
                         train=SimpleNamespace(compile=False, precision="float32"))
MUON = SimpleNamespace(optimizer="muon", learning_rate=0.1, weight_decay=0.01, beta1=0.9, beta2=0.9)
INPUT = torch.arange(28.0).reshape(4, 7).sin()


class Task:
    """Layers of so many rows, or of matrices of so many rows each; the root has a head of
    its own."""

    def __init__(self, *rows: int | list[int]):
        self.rows = rows or (8,)

    def model(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self, *matrix_rows: int | list[int]):
                super().__init__()
                rows = [sum(each) if isinstance(each, list) else each for each in matrix_rows]
                self.layers = nn.ModuleList(map(nn.Linear, (7, *rows), rows))
                for layer, each in zip(self.layers, matrix_rows, strict=True):
                    layer.matrix_rows = each
                self.head = nn.Linear(rows[-1], 3)

            def forward(self, given: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    given = layer(given).tanh()
                return self.head(given)

        return Net(*self.rows)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model(INPUT).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def inference(group: Group) -> None:
    """The first pass of an attempt may be a validation, and that under inference_mode()."""
    task = Task()
    model = build_model(task, CONFIG, group.device, group)
    task.validate = torch.inference_mode()(lambda model: {"loss": model(INPUT).sum()})
    score(task, model)
    steps(model, torch.optim.SGD(model.parameters(), 0.1))


def other_values(group: Group) -> None:
    """validate() scores the parameters, then others, as averaged ones."""
    task = Task()
    model = build_model(task, CONFIG, group.device, group)
    params = list(model.parameters())

    @torch.no_grad()
    def validate(model: nn.Module) -> dict:
        before = model(INPUT).abs().sum()
        for param in params:
            own_part(param).zero_()
        return {"before": before, "after": model(INPUT).abs().sum()}

    task.validate = validate
    said = score(task, model)
    assert (said["before"] > 0, said["after"]) == (True, 0.0), said


def restored(group: Group) -> None:
    """A round that is void goes back to its base, also after a pass without a backward one."""
    model = build_model(Task(), CONFIG, group.device, group)
    replica = Replica(model, Layout.of(shapes(model), math.inf))
    with torch.no_grad():
        assert model(INPUT).count_nonzero()
        replica.adopt(0, torch.zeros(replica.layout.numels[0], dtype=torch.bfloat16))
        replica.restore()
        assert not model(INPUT).count_nonzero()


def muon(group: Group) -> None:
    """Matrices of fewer rows than there are ranks, and of more; fewer matrices, and more; and
    layers that stack several."""
    for rows in ((1,), (2,), (4,), (7, 7), (4, 1, 5), (5, 8, 2, 7, 3), ([3, 1, 5], 4, [2, 6])):
        task = Task(*rows)
        models = [build_model(task, CONFIG, group.device, each) for each in (Group(), group)]
        for model in models:
            steps(model, default_optimizer(model, MUON))
        alone, shared = (list(model.parameters()) for model in models)
        for one, other in zip(alone, shared, strict=True):
            assert torch.allclose(one, other.full_tensor(), atol=1e-5), (rows, one, other)


def compiled(group: Group) -> None:
    """A layer whose activations are recomputed is compiled whole; FSDP2's hooks about it left
    nothing in one piece."""
    seen = []

    def backend(module: torch.fx.GraphModule, _inputs: list):
        seen.append(sum("linear" in str(node.target) for node in module.graph.nodes
                        if node.op == "call_function"))
        return module.forward

    kept = nn.Module.compile
    nn.Module.compile = lambda module: kept(module, backend=backend)
    shape = Shape(dim=8, layers=3, heads=2, vocabulary=7, context=4, checkpointing=True)
    task, ids, losses = SimpleNamespace(model=lambda: create(shape)), torch.arange(4)[None], []
    for is_on in (False, True):
        train = SimpleNamespace(compile=is_on, precision="float32")
        config = SimpleNamespace(run=CONFIG.run, train=train)
        model = build_model(task, config, group.device, group)
        loss = model(ids).square().sum()
        loss.backward()
        losses.append(loss.item())
    nn.Module.compile = kept
    assert math.isclose(*losses, rel_tol=1e-5), losses
    assert set(seen) == {5}, seen


if __name__ == "__main__":
    from elastic.base.environment import env

    group = join_group(int(env("RANK")), int(env("WORLD_SIZE")), torch.device("cpu"), 60.0)
    for what in sys.argv[1:]:
        globals()[what](group)
