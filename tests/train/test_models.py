"""The models have the sizes they claim, compute causally, and start the same for the same seed."""

import random
from dataclasses import replace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from elastic.base.errors import ElasticError, UsageError
from elastic.train import device
from elastic.train.group import Group
from elastic.train.models import PRESETS, Shape, Transformer, create, rotary_table, rotate
from model_ranks import CONFIG, LARGE, Bare, Whole
from ranks import run_ranks

BYTES = Shape("gpt", vocabulary=256, context=128, dim=128, layers=2, heads=4)
TINY = {
    "gpt": Shape("gpt", vocabulary=64, context=16, dim=32, layers=2, heads=4),
    "llama": Shape("llama", vocabulary=64, context=16, dim=32, layers=2, heads=4),
}
every_style = pytest.mark.parametrize("shape", TINY.values(), ids=TINY)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def size_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in create(shape).parameters())


def random_tokens(shape: Shape) -> torch.Tensor:
    return torch.randint(shape.vocabulary, (2, shape.context), generator=torch.Generator())


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (BYTES, 475_776),
        (PRESETS["125m"], 134_105_856),
        (PRESETS["1b3"], 1_364_297_728),
        (PRESETS["7b"], 6_738_415_616),
    ],
)
def test_parameter_counts_without_allocating(shape, parameters):
    assert size_of(shape) == parameters


def test_parameters_are_the_whole_state():
    model = create(TINY["llama"])
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@every_style
def test_the_same_seed_gives_the_same_parameters_and_leaves_the_random_state_alone(shape):
    before = torch.get_rng_state()
    first, again, other = create(shape, 1), create(shape, 1), create(shape, 2)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.dim() < 2 or not torch.equal(a, c), name


def test_a_place_has_its_own_random_numbers_numpys_too():
    """Workers that began with np.random.seed(0) all drew the same."""
    numpy.random.seed(0)
    drawn = []
    for place in ("1/0/1", "1/1/1", "1/0/1"):
        device.seed_by(place)
        drawn.append((numpy.random.rand(), random.random(), torch.rand(()).item()))
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])


def test_without_a_seed_the_seed_of_torch_counts_however_much_was_drawn_since():
    torch.manual_seed(5)
    torch.rand(3)
    assert torch.equal(create(TINY["gpt"]).head.weight, create(TINY["gpt"], 5).head.weight)


@every_style
def test_no_score_depends_on_a_later_token(shape):
    model, tokens = create(shape, 0).eval(), random_tokens(shape)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % shape.vocabulary
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@every_style
def test_scores_depend_on_the_order_of_earlier_tokens(shape):
    model, tokens = create(shape, 0).eval(), random_tokens(shape)
    tokens[:, 0], tokens[:, 1] = 3, 4
    swapped = tokens.clone()
    swapped[:, 0], swapped[:, 1] = 4, 3
    with torch.no_grad():
        assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_rotary_scores_depend_on_the_distance_alone():
    table = rotary_table(12, 8, torch.device("cpu"))
    q, k = (
        torch.randn(8, generator=torch.Generator().manual_seed(i)).expand(12, 8) for i in (1, 2)
    )
    scores = rotate(q, table) @ rotate(k, table).T
    for distance in (-4, 0, 3):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@every_style
def test_checkpointing_changes_nothing_but_memory(shape):
    gradients = []
    for checkpointing in (False, True):
        model = create(replace(shape, checkpointing=checkpointing), 0)
        model(random_tokens(shape)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_an_untrained_model_guesses_nearly_evenly():
    model, tokens = create(BYTES, 0), random_tokens(BYTES)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.3)  # ln 256


def test_every_layer_is_a_child_of_layers_and_names_are_stable():
    model = Transformer(BYTES)
    assert len(model.layers) == 2
    assert "layers.1.attention.qkv.weight" in dict(model.named_parameters())


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match="17 tokens exceed the model's context of 16"):
        create(TINY["llama"])(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "rnn"}, "style 'rnn'"),
        ({"heads": 5}, "dim 768 is not a multiple of its 5 heads"),
        ({"layers": 0}, "layers = 0"),
        ({"dim": 12, "heads": 4}, "even dim/heads, not 3"),
    ],
)
def test_an_impossible_shape_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        Shape(**changes)


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LAYERS = {
    "list": (lambda block: torch.nn.ModuleList([block, torch.nn.Linear(4, 4)]), 3),
    "dict": (lambda block: torch.nn.ModuleDict({"0": block}), 2),
    "one block several times": (lambda block: torch.nn.ModuleList([block] * 3), 2),
    "lists in a list": (
        lambda block: torch.nn.ModuleList([torch.nn.ModuleList([block, torch.nn.ReLU()])] * 2), 1),
    "how many there are": (lambda block: 3, 1),
    "none": (lambda block: None, 1),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_whatever_a_model_calls_its_layers_it_is_sharded(alone, kind):
    make, units = LAYERS[kind]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.layers = make(torch.nn.Linear(4, 4))
    device.shard(model, CONFIG, torch.device("cpu"))
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == units


def test_a_property_says_where_the_layers_of_a_library_s_model_are(alone):
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Module()
            self.model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    model = Theirs()
    before = [*model.state_dict()]
    type(model).layers = property(lambda self: self.model.layers)
    device.shard(model, CONFIG, torch.device("cpu"))
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3 + 1
    assert [*model.state_dict()] == before


def test_shards_validate_and_train_as_a_whole_model_does_and_are_compiled():
    """A first pass under inference_mode() left tensors that never train; a second one scored the
    parameters of the first; Muon did not take a matrix with fewer rows than there are ranks. Of
    layers with activations recomputed, as etc/7b.toml has it, none was compiled."""
    whats = ("inference", "other_values", "restored", "muon", "compiled")
    run_ranks(3, "sharded_ranks.py", *whats)


def built(folder, kind: str) -> list[dict]:
    run_ranks(2, "model_ranks.py", kind, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_shards_that_were_never_one_have_the_same_values(tmp_path):
    alone = device.build_model(Whole(), CONFIG, torch.device("cpu"), Group()).state_dict()
    for rank in built(tmp_path, "Bare"):
        assert rank["values"].keys() == alone.keys()
        for name, values in alone.items():
            assert torch.equal(rank["values"][name], values), name


def test_no_rank_has_memory_for_the_whole_of_a_large_model(tmp_path):
    whole_bytes = 4 * size_of(LARGE)
    more = [rank["bytes"] for rank in built(tmp_path, "LargeBare")]
    assert min(more) > 0.4 * whole_bytes  # its own part
    assert max(more) < whole_bytes / 2 + 0.2 * whole_bytes  # and a layer's or two


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.table = torch.nn.Embedding(4, 3)
        self.table.weight = self.head.weight


class WithTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize(("model", "name"), [(Tied, "table.weight"), (WithTable, "angles")])
def test_a_model_that_lives_on_more_than_its_parameters_is_not_built_without_memory(model, name):
    task = Bare()
    task.model = model
    with pytest.raises(ElasticError, match=f"its model's {name} is a buffer or tied"):
        device.build_model(task, CONFIG, torch.device("cpu"), Group())


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "gives no tokens.weight"),
     ([("tokens.weight", torch.zeros(2, 2))], r"gives tokens.weight \[2, 2\]: not in the model"),
     ([("token", torch.zeros(2, 2))], r"gives token \[2, 2\]: not in the model")],
)
def test_initial_values_that_are_not_the_models_are_named(given, said):
    task = Bare()
    model = device.build_model(task, CONFIG, torch.device("cpu"), Group())
    task.initial_values = lambda model: iter(given)
    with pytest.raises(ElasticError, match=said):
        device.set_initial_values(task, model)


def test_a_task_without_initial_values_has_its_own():
    torch.manual_seed(5)
    expected = Whole().model().state_dict()
    model = device.build_model(Whole(), CONFIG, torch.device("cpu"), Group())
    device.set_initial_values(Whole(), model)
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
