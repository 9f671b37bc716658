"""Tasks are found, checked and explained; their samples are the same everywhere; they can learn."""

import importlib
import json
import os
import pickle
import subprocess
import sys
from array import array
from collections import UserDict, namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from elastic.base.errors import ElasticError, UsageError
from elastic.tasks import ByteText, TokenFiles
from elastic.train.device import precision, to_device
from elastic.train.optimizers import default_optimizer
from elastic.train.task import count_tokens, load_task, score
from helpers import ROOT

TRAIN = SimpleNamespace(
    optimizer="adamw", learning_rate=4e-3, weight_decay=0.1, beta1=0.9, beta2=0.95
)
TINY = {"context": 8, "dim": 16, "layers": 1, "heads": 2}
Pair = namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the given name and source beside an imaginary run file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    written = []

    def write(name: str, source: str) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        written.append(name)
        return tmp_path

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path):
    """Thirty small files, each of one letter; the hashes of numbers 3 and 18 hold these out."""
    for i in range(30):
        (tmp_path / f"page-{i:02}.txt").write_bytes(bytes([65 + i]) * 40)
    return tmp_path


def tokens_file(path: Path, ids, code: str = "H") -> str:
    path.write_bytes(array(code, ids).tobytes())
    return str(path)


# -----------------------------------------------------------------------------
# Loading

GOOD = """
class Mine:
    def __init__(self, config): self.config = config
    def model(self): pass
    def dataset(self): pass
    def loss(self, model, batch): pass
"""


def test_a_task_beside_the_run_file_gets_its_table(module):
    search = module("task_good", GOOD)
    assert load_task("task_good:Mine", {"width": 3}, search).config == {"width": 3}


def test_a_task_of_the_toolkit_loads_without_a_folder():
    assert isinstance(load_task("elastic.tasks:ByteText", TINY), ByteText)


def test_a_module_on_the_path_wins_over_one_beside_the_run_file(module):
    search = module("json", GOOD)
    with pytest.raises(ElasticError, match="no class Mine in .*json/__init__.py"):
        load_task("json:Mine", {}, search)


def test_an_absent_module_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ElasticError, match="No module named 'task_absent'") as caught:
        load_task("task_absent:Mine", {}, tmp_path)
    assert str(tmp_path) in caught.value.hint
    assert "PYTHONPATH" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*task_bad.py:2\)"),
        ("import no_such_thing\n", r"No module named 'no_such_thing' \(.*task_bad.py:1\)"),
        ("def f(:\n", r"SyntaxError: .*task_bad.py, line 1"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*task_bad.py:2\)"),
    ],
)
def test_a_module_that_does_not_import_shows_the_exception_and_its_line(module, source, message):
    search = module("task_bad", source)
    with pytest.raises(ElasticError, match="task module task_bad does not import.*" + message):
        load_task("task_bad:Mine", {}, search)


def test_a_missing_class_lists_those_there_are(module):
    search = module("task_other", GOOD)
    with pytest.raises(ElasticError, match=r"no class Min in .*task_other.py") as caught:
        load_task("task_other:Min", {}, search)
    assert caught.value.hint == "classes there: Mine"


def test_missing_methods_are_named(module):
    search = module("task_partial", "class Mine:\n    def model(self): pass\n")
    with pytest.raises(ElasticError, match="has no method dataset, loss"):
        load_task("task_partial:Mine", {}, search)


def test_a_constructor_that_raises_is_explained(module):
    search = module("task_raises", GOOD.replace("self.config = config", "config['data']"))
    with pytest.raises(ElasticError, match=r"cannot be made: KeyError: 'data' \(.*raises.py:3\)"):
        load_task("task_raises:Mine", {}, search)


# -----------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("task", "table", "message"),
    [
        (ByteText, {"contxt": 8}, "unknown key 'contxt' in .task.: context?"),
        (ByteText, {"context": "8"}, "context = '8' is no int"),
        (ByteText, {"layers": True}, "layers = True is no int"),
        (ByteText, {"heads": 5}, "dim 128 is not a multiple of its 5 heads"),
        (TokenFiles, {"model": "13b"}, "model = '13b'"),
        (TokenFiles, {"model": 7}, "model = 7"),
        (TokenFiles, {"model": {"depth": 3}}, "unknown key 'depth'"),
        (TokenFiles, {"dtype": "int8"}, "dtype = 'int8'"),
        (TokenFiles, {"files": "a.bin"}, "files = 'a.bin' is no list"),
    ],
)
def test_a_wrong_option_is_a_usage_error(task, table, message):
    with pytest.raises(UsageError, match=message):
        task(table)


# -----------------------------------------------------------------------------
# ByteText


def test_the_default_data_are_the_sources_of_the_standard_library():
    task = ByteText({})
    samples = task.dataset()
    held_out = task.windows(held_out=True)
    assert len(samples) > 50_000
    assert 0.01 < len(held_out) / len(samples) < 0.1
    assert b"import" in bytes(torch.cat([samples[i] for i in range(200)]).tolist())


def test_samples_are_windows_over_the_files_in_order_of_their_names(folder):
    task = ByteText({**TINY, "data": str(folder)})
    samples, held_out = task.dataset(), task.windows(held_out=True)
    text = bytes(samples.sources[0].tolist())
    assert text == b"".join(sorted(text[i : i + 40] for i in range(0, len(text), 40)))
    assert len(text) == 28 * 40
    assert bytes(held_out.sources[0].tolist()) == bytes([65 + 3]) * 40 + bytes([65 + 18]) * 40
    for i in (0, 1, len(samples) - 1):
        assert bytes(samples[i].tolist()) == text[8 * i : 8 * i + 9]


def test_whole_files_are_held_out_by_name_wherever_the_folder_lies(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    first, second = (ByteText({**TINY, "data": str(f)}) for f in (folder, other))
    assert torch.equal(first.windows(True).sources[0], second.windows(True).sources[0])


def test_hidden_files_are_no_data(folder):
    before = len(ByteText({**TINY, "data": str(folder)}).dataset().sources[0])
    (folder / ".git").mkdir()
    (folder / ".git" / "object").write_bytes(b"x" * 1000)
    assert len(ByteText({**TINY, "data": str(folder)}).dataset().sources[0]) == before


def test_a_limit_on_samples_keeps_the_first(folder):
    limited = ByteText({**TINY, "data": str(folder), "samples": 5}).dataset()
    assert len(limited) == 5
    with pytest.raises(IndexError, match="sample 5 of 5"):
        limited[5]


def test_few_files_are_all_trained_on(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"abc" * 30)
    task = ByteText({**TINY, "data": str(tmp_path)})
    assert len(task.dataset()) == 11
    assert task.validate(task.model()) == {}


def test_a_folder_that_is_absent_or_empty_is_an_error(tmp_path):
    with pytest.raises(ElasticError, match="nowhere' is not a folder"):
        ByteText({"data": str(tmp_path / "nowhere")}).dataset()
    with pytest.raises(ElasticError, match="no data with 129 tokens"):
        ByteText({"data": str(tmp_path)}).dataset()


def test_tokens_of_a_batch_are_the_bytes_that_are_predicted(folder):
    task = ByteText({**TINY, "data": str(folder)})
    batch = default_collate([task.dataset()[i] for i in range(3)])
    assert count_tokens(task, batch) == 3 * 8


def test_validation_is_repeatable_and_leaves_the_model_as_it_was(folder):
    task = ByteText({**TINY, "data": str(folder), "validation_windows": 4})
    torch.manual_seed(0)
    model = task.model().train()
    first = task.validate(model)
    assert first == task.validate(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert first["validation_loss"] == pytest.approx(5.545, abs=0.5)  # ln 256


def test_the_byte_model_learns_the_standard_library():
    task = ByteText({"context": 64, "dim": 64, "validation_windows": 64})
    torch.manual_seed(0)
    model, samples = task.model(), task.dataset()
    optimizer = default_optimizer(model, TRAIN)
    for step in range(60):
        batch = default_collate([samples[(step * 16 + i) * 97 % len(samples)] for i in range(16)])
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.validate(model)["validation_loss"] < 3.2


# -----------------------------------------------------------------------------
# TokenFiles

SMALL = {"dim": 16, "layers": 1, "heads": 2, "vocabulary": 100, "context": 4}


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "H"), ("uint32", "I")])
def test_samples_go_through_the_files_in_order_and_span_none(tmp_path, dtype, code):
    files = [
        tokens_file(tmp_path / "a.bin", range(10), code),  # two windows, and a rest
        tokens_file(tmp_path / "short.bin", range(3), code),  # none
        tokens_file(tmp_path / "b.bin", range(50, 55), code),  # exactly one
    ]
    samples = TokenFiles({"files": files, "dtype": dtype, "model": SMALL}).dataset()
    expected = [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [50, 51, 52, 53, 54]]
    assert [samples[i].tolist() for i in range(len(samples))] == expected


def test_a_file_may_be_larger_than_the_memory(tmp_path):
    """A private mapping of it was refused, and with it the run."""
    file = tmp_path / "a.bin"
    file.touch()
    os.truncate(file, 1 << 40)
    samples = TokenFiles({"files": [str(file)], "model": SMALL}).dataset()
    assert samples[len(samples) - 1].tolist() == [0] * 5
    os.truncate(file, 1 << 20)
    with pytest.raises(ElasticError, match="shorter than it was"):
        samples[len(samples) - 1]


def test_a_pattern_stands_for_its_files_in_the_order_of_their_names(tmp_path):
    for number in (2, 0, 1):
        tokens_file(tmp_path / f"train-{number}.bin", range(10 * number, 10 * number + 5))
    last = tokens_file(tmp_path / "last.bin", range(90, 95))
    files = [str(tmp_path / "train-*.bin"), last]
    samples = TokenFiles({"files": files, "model": SMALL}).dataset()
    assert [int(samples[i][0]) for i in range(len(samples))] == [0, 10, 20, 90]
    with pytest.raises(ElasticError, match=r"none-\*.bin: No such file"):
        TokenFiles({"files": [str(tmp_path / "none-*.bin")], "model": SMALL}).dataset()


def test_read_only_files_do_and_stay_as_they_are(tmp_path):
    path = Path(tokens_file(tmp_path / "a.bin", range(9)))
    path.chmod(0o400)
    before = path.read_bytes()
    TokenFiles({"files": [str(path)], "model": SMALL}).dataset()[0].fill_(7)
    assert path.read_bytes() == before


def test_a_dataset_travels_to_another_process_as_names_alone(tmp_path):
    file = tokens_file(tmp_path / "a.bin", [i % 100 for i in range(100_000)])
    samples = TokenFiles({"files": [file], "model": SMALL}).dataset()
    samples[0]
    packed = pickle.dumps(samples)
    assert len(packed) < 2000
    assert torch.equal(pickle.loads(packed)[7], samples[7])


def test_presets_take_context_vocabulary_and_checkpointing_from_the_table():
    shape = TokenFiles(
        {"model": "7b", "context": 64, "vocabulary": 50304, "checkpointing": True}
    ).shape
    assert (shape.dim, shape.context, shape.vocabulary, shape.checkpointing) == (
        4096,
        64,
        50304,
        True,
    )


def test_a_missing_file_is_named():
    with pytest.raises(ElasticError, match="token file /no/such.bin: No such file"):
        TokenFiles({"files": ["/no/such.bin"], "model": SMALL}).dataset()


def test_a_truncated_file_is_named_with_its_size(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0" * 11)
    with pytest.raises(ElasticError, match="a.bin: 11 bytes are no multiple of 4, as uint32"):
        TokenFiles(
            {"files": [str(tmp_path / "a.bin")], "dtype": "uint32", "model": SMALL}
        ).dataset()


def test_a_token_beyond_the_vocabulary_is_named_with_its_file(tmp_path):
    file = tokens_file(tmp_path / "a.bin", [*range(6), 100, 1, 1])
    samples = TokenFiles({"files": [file], "model": SMALL}).dataset()
    assert len(samples[0]) == 5
    with pytest.raises(ElasticError, match="a.bin: id 100 after token 4, .* vocabulary of 100"):
        samples[1]


def test_no_data_is_an_error():
    with pytest.raises(ElasticError, match="no data with 5 tokens"):
        TokenFiles({"model": SMALL}).dataset()


def test_validation_reads_its_own_files(tmp_path):
    table = {"files": [tokens_file(tmp_path / "a.bin", range(9))], "model": SMALL}
    task = TokenFiles(table)
    assert task.validate(task.model()) == {}
    table["validation_files"] = [tokens_file(tmp_path / "v.bin", range(40))]
    task = TokenFiles(table)
    assert task.validate(task.model())["validation_loss"] == pytest.approx(4.605, abs=0.5)


# -----------------------------------------------------------------------------
# Defaults


def test_only_matrices_decay():
    model = ByteText(TINY).model()
    groups = default_optimizer(model, TRAIN).param_groups
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [
        (0.1, {2}),
        (0.0, {1}),
    ]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    assert groups[0]["betas"] == (0.9, 0.95)


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(3, 3, bias=False)
    optimizer = default_optimizer(torch.nn.Sequential(model), TRAIN)
    assert len(optimizer.param_groups) == 1
    frozen = torch.nn.Sequential(torch.nn.Linear(3, 3).requires_grad_(False), model)
    assert sum(len(g["params"]) for g in default_optimizer(frozen, TRAIN).param_groups) == 1


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        [torch.zeros(5, 2), torch.zeros(5)],
        {"x": (torch.zeros(5), torch.zeros(5))},
        {"id": ["a", "b", "c", "d", "e"], "scale": torch.tensor(2.0), "x": torch.zeros(5, 2)},
        UserDict(x=torch.zeros(5, 2)),
        Pair(["a", "b", "c", "d", "e"], torch.zeros(5)),
    ],
)
def test_without_a_count_of_its_own_a_task_counts_samples(batch):
    """It looked for a tensor in the first string, for ever."""
    assert count_tokens(object(), batch) == 5


def test_what_has_no_tensor_needs_a_count_of_its_own():
    with pytest.raises(ElasticError, match="no tensor to count its samples by") as caught:
        count_tokens(object(), {"text": ["a", "b"]})
    assert "tokens()" in caught.value.hint


def test_a_batch_of_any_kind_comes_to_the_device_and_keeps_its_names():
    """What was no dict stayed where it was, and a namedtuple lost its names."""
    meta, x = torch.device("meta"), torch.zeros(5)
    pair = to_device(Pair("a", {"x": x}), meta)
    assert (pair.first, pair.second["x"].device) == ("a", meta)
    assert to_device(UserDict(x=[x]), meta)["x"][0].device == meta
    packed = torch.nn.utils.rnn.pack_sequence([x])  # has a `to`, and is a namedtuple
    assert to_device(packed, meta).data.device == meta


def scores(said) -> dict[str, float]:
    return score(SimpleNamespace(validate=lambda model: said), torch.nn.Linear(1, 1))


def test_scores_are_numbers_whatever_kind_the_task_returns():
    """A tensor ended rank 0, as it cannot be written as JSON."""
    found = scores({"loss": torch.tensor([0.5]), "accuracy": np.float32(0.25), "right": 3})
    assert json.dumps(found) == '{"loss": 0.5, "accuracy": 0.25, "right": 3.0}'


@pytest.mark.parametrize("said", [0.5, None, {"losses": torch.zeros(2)}, {"loss": "low"}])
def test_scores_that_are_no_numbers_are_shown(said):
    with pytest.raises(ElasticError, match=r"validate\(\) has returned") as caught:
        scores(said)
    assert str(said)[:10] in caught.value.what
    assert caught.value.hint


def test_what_validation_puts_into_the_model_is_scored_in_bf16_too():
    """Autocast had kept a copy of what was there before."""
    model, given = torch.nn.Linear(4, 4), torch.ones(1, 4)

    @torch.no_grad()
    def validate(model) -> dict:
        before = model(given).abs().sum()
        for param in model.parameters():
            param.zero_()
        return {"before": before, "after": model(given).abs().sum()}

    with precision("bf16", torch.device("cpu"))():
        found = score(SimpleNamespace(validate=validate), model)
    assert (found["before"] > 0, found["after"]) == (True, 0.0)


# ---- the optimizer


def trained(make) -> list[torch.Tensor]:
    """The parameters after some steps with the optimizer of a model."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 1)
    )
    optimizer = make(model)
    for _ in range(20):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return list(model.parameters())


def test_the_default_optimizer_has_the_bits_of_torch_adamw():
    settings = SimpleNamespace(**vars(TRAIN) | {"learning_rate": 0.01})

    def plain(model):
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
             "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))

    mine = trained(lambda model: default_optimizer(model, settings))
    assert all(map(torch.equal, mine, trained(plain)))


def test_a_worker_does_not_import_the_compiler():
    script = """if True:
        import sys, torch
        from types import SimpleNamespace
        from elastic.local.worker import worker
        from elastic.train.group import clip_gradients
        from elastic.train.optimizers import default_optimizer
        from elastic.tasks import ByteText
        model = ByteText({}).model()
        train = SimpleNamespace(
            optimizer="muon", weight_decay=0.1, learning_rate=0.01, beta1=0.9, beta2=0.95)
        optimizer = default_optimizer(model, train)
        model(torch.ones(1, 2, dtype=torch.long)).sum().backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        optimizer.load_state_dict(optimizer.state_dict())
        assert "torch._dynamo" not in sys.modules
    """
    environment = {"PYTHONPATH": str(ROOT / "lib")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
