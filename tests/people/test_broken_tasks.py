"""What a dry run finds of tasks that cannot work: a table of them, each found by name.

pytest tests/people/test_broken_tasks.py
"""

import sys
from pathlib import Path

import pytest

from elastic.base.errors import Exit
from elastic.base.signals import Notice
from elastic.people import describe
from helpers import ROOT, elastic, environment

GOOD = {
    "top": "import torch",
    "init": "self.table = table",
    "model": "return torch.nn.Linear(4, 1)",
    "dataset": "return [torch.ones(4) for _ in range(64)]",
    "loss": "return model(batch).mean()",
    "more": "pass",
}
SOURCE = """
{top}

class Task:
    def __init__(self, table):
        {init}
    def model(self):
        {model}
    def dataset(self):
        {dataset}
    def loss(self, model, batch):
        {loss}
    {more}
"""
TOKENS = "def tokens(self, batch): return {}"
OPTIMIZER = "def optimizer(self, model): return {}"
BROKEN = {  # part of the task, what it is instead, what is said
    "no syntax": ("top", "import torch torch", "SyntaxError"),
    "not defined": ("top", "import torch\nprint(nowhere)", "nowhere"),
    "raises at import": ("top", "import torch\n1 / 0", "ZeroDivisionError"),
    "ends at import": ("top", "import torch, sys\nsys.exit(0)", "SystemExit"),
    "raises when made": ("init", "raise ValueError('planted')", "planted"),
    "wants a key": ("init", "self.x = table['width']", "width"),
    "reads an unknown key": ("init", "read_options(table, context=1)", "read_options"),
    "ends when made": ("init", "raise SystemExit(0)", "SystemExit"),
    "no model": ("model", "return None", "a torch.nn.Module, not None"),
    "a model that raises": ("model", "raise RuntimeError('planted')", "planted"),
    "a model that ends": ("model", "import sys; sys.exit(0)", "SystemExit"),
    "a misspelled layer": ("model", "return torch.nn.Linaer(4, 1)", "Linaer"),
    "a model without parameters": ("model", "return torch.nn.ReLU()", "no parameters"),
    "a model of negative size": ("model", "return torch.nn.Linear(-4, 1)", "-4"),
    "a frozen model": ("model", "return torch.nn.Linear(4, 1).requires_grad_(False)", "param"),
    "a model in a list": (
        "model", "return [torch.nn.Linear(4, 1)] * 50", "a torch.nn.Module, not [Linear("),
    "a number as a model": ("model", "return 3", "a torch.nn.Module, not 3"),
    "an empty data set": ("dataset", "return []", "the data set is empty"),
    "no data set": ("dataset", "return None", "NoneType"),
    "a generator": ("dataset", "return (x for x in [torch.ones(4)])", "generator"),
    "a loader": ("dataset", "return torch.utils.data.DataLoader([1])", "DataLoader"),
    "samples that differ": ("dataset", "return [torch.ones(i + 4) for i in range(9)]", "size"),
    "samples of no type": ("dataset", "return [object()] * 9", "object"),
    "an empty sample": ("dataset", "return [None] * 9", "NoneType"),
    "a last sample that is not there": (
        "dataset", "return type('D', (), {'__len__': lambda s: 9, '__getitem__':"
        " lambda s, i: [torch.ones(4)][i]})()", "IndexError"),
    "a negative length": (
        "dataset", "return type('D', (), {'__len__': lambda s: -1, '__getitem__':"
        " lambda s, i: torch.ones(4)})()", "__len__"),
    "a data set that raises": ("dataset", "raise KeyError('planted')", "planted"),
    "a data set that ends": ("dataset", "raise SystemExit(0)", "SystemExit"),
    "a loss of another shape": (
        "loss", "return model(batch) * torch.ones(99)", "one finite number"),
    "a loss that is no number": ("loss", "return model(batch).mean() / 0", "one finite number"),
    "a loss that is none": ("loss", "return None", "one finite number as a tensor, not None"),
    "a loss that is a float": ("loss", "return model(batch).mean().item()", "as a tensor, not "),
    "a loss without the model": ("loss", "return batch.mean()", "grad"),
    "a loss that raises": ("loss", "raise AssertionError('planted')", "planted"),
    "a loss that does not fit": ("loss", "return model(batch[:, :2]).mean()", "mat1"),
    "a loss with a typo": ("loss", "return modle(batch).mean()", "modle"),
    "a loss of too few arguments": (
        "more", "def loss(self, model): return model.weight.sum()", "loss()"),
    "no tokens": ("more", TOKENS.format("None"), "tokens(batch)"),
    "tokens that are a share": ("more", TOKENS.format("0.5"), "tokens(batch)"),
    "tokens that are zero": ("more", TOKENS.format("0"), "tokens(batch)"),
    "tokens that raise": ("more", TOKENS.format("batch['x']"), "batch['x']"),
    "an optimizer of nothing": ("more", OPTIMIZER.format("torch.optim.SGD([])"), "empty"),
    "an optimizer that is none": ("more", OPTIMIZER.format("torch.optim.Adan(1)"), "Adan"),
    "an optimizer of a wrong rate": (
        "more", OPTIMIZER.format("torch.optim.SGD(model.parameters(), lr=-1)"), "-1"),
    "an optimizer of more than the model": (
        "more", OPTIMIZER.format("torch.optim.SGD(torch.nn.Linear(3, 2).parameters())"), "(2, 3)"),
    "an attribute for a method": ("more", "loss = 3", "no method loss"),
    "another class": ("top", "import torch\nTask = 3\nclass Other: pass\nraise Exception", "Exce"),
}


def write(folder: Path, name: str, **parts: str) -> Path:
    (folder / f"{name}.py").write_text(SOURCE.format(**{**GOOD, **parts}))
    path = folder / f"{name}.toml"
    path.write_text(f'[run]\ntask = "{name}:Task"\nscheduler = "local"\n[train]\nepochs = 1\n')
    return path


def tried(path: Path, monkeypatch, capfd, *how: str) -> tuple[int, str]:
    """What the child of a dry run says, without its start."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["describe", "--try", *how, str(path)])
    monkeypatch.chdir(path.parents[1])  # it goes to the task's folder by itself
    code = describe.run(Notice())
    said = capfd.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(("name", "more", "counted"), [
    ("sound_task", "", 0), ("counting_task", TOKENS.format("4 * len(batch)"), 4),
])
def test_a_task_that_works_is_found_to_work(tmp_path, monkeypatch, capfd, name, more, counted):
    """And its tokens are known, if it counts any: of its samples nobody knows the size."""
    code, said = tried(write(tmp_path, name, more=more), monkeypatch, capfd)
    assert (code, '"untried": ""' in said) == (Exit.OK, True), said
    assert f'"tokens_per_sample": {counted}' in said


@pytest.mark.parametrize("case", BROKEN)
def test_a_task_that_cannot_work_is_found_by_name(tmp_path, monkeypatch, capfd, case: str):
    part, instead, told = BROKEN[case]
    name = f"broken_{list(BROKEN).index(case)}"
    code, said = tried(write(tmp_path, name, **{part: instead}), monkeypatch, capfd)
    assert (code, told in said) == (Exit.USAGE, True), said


def test_a_task_that_lacks_a_file_may_find_it_elsewhere_but_not_where_its_jobs_run(
    tmp_path, monkeypatch, capfd
):
    path = write(tmp_path, "lacking", dataset="return [torch.load('none.pt')]")
    code, said = tried(path, monkeypatch, capfd)
    assert (code, '"untried": "[Errno 2] No such file' in said) == (Exit.OK, True), said
    code, said = tried(path, monkeypatch, capfd, "--here")
    assert (code, "No such file or directory: 'none.pt'" in said) == (Exit.USAGE, True), said


def test_a_first_step_is_tried_in_the_precision_of_the_run(tmp_path, monkeypatch, capfd):
    """A layer for 16 bits was refused."""
    linear = "(out := torch.nn.functional.linear(batch, model.weight))"
    only = f"assert {linear}.dtype is torch.bfloat16; return out.mean()"
    path = write(tmp_path, "of_16_bits", loss=only)
    path.write_text(path.read_text() + 'precision = "bf16"\n')
    code, said = tried(path, monkeypatch, capfd)
    assert (code, '"untried": ""' in said) == (Exit.OK, True), said


@pytest.mark.parametrize(("most", "code"), [(1, Exit.OK), (2, Exit.USAGE)])
def test_a_scalar_parameter_is_for_one_gpu(tmp_path, monkeypatch, capfd, most, code):
    """FSDP2 shards none: such a run failed when it was to grow, days later."""
    path = write(tmp_path, f"scaled_{most}", model=(
        "net = torch.nn.Linear(4, 1); net.scale = torch.nn.Parameter(torch.ones(())); return net"))
    run = f'mode = "sync"\n[elastic]\nmax = {most}\n[train]'
    path.write_text(path.read_text().replace("[train]", run))
    found, said = tried(path, monkeypatch, capfd)
    assert (found, "parameter scale is a scalar" in said) == (code, most > 1), said


def test_a_package_that_is_missing_here_may_be_on_the_nodes_whatever_its_name(
    tmp_path, monkeypatch, capfd
):
    """"lightly_task" begins with "lightly", and was said to be missing itself."""
    for name, code in (("lightly_task", Exit.ERROR), ("lightly", Exit.USAGE)):
        path = write(tmp_path, name, top="import lightly")
        if name == "lightly":
            path.with_suffix(".py").unlink()
        assert tried(path, monkeypatch, capfd)[0] == code


def test_the_relative_paths_of_a_task_begin_in_its_folder(tmp_path, monkeypatch, capfd):
    """They did in the folder that a user happened to be in, and for jobs in the run's."""
    dataset = "return [torch.ones(int(open('count.txt').read()))] * 9"
    path = write(tmp_path, "relative", dataset=dataset)
    (tmp_path / "count.txt").write_text("4")
    code, said = tried(path, monkeypatch, capfd, "--here")
    assert (code, '"untried": ""' in said) == (Exit.OK, True), said


def test_a_dry_run_says_so_and_fails(tmp_path):
    env = environment(tmp_path)
    path = write(tmp_path, "no_data", dataset="return []")
    done = elastic("submit", path, "--dry-run", env=env)
    assert (done.returncode, "the data set is empty" in done.stderr) == (1, True), done
    path = write(tmp_path, "noisy", top="import atexit, torch\natexit.register(print, 'bye')")
    done = elastic("submit", path, "--dry-run", "--set=checkpoint.min_free=1000000tb", env=env)
    assert (done.returncode, "would start run noisy" in done.stdout) == (0, True), done
    assert "warning: no space on the filesystem of" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_may_print_what_is_not_utf8(tmp_path):
    """The submission ended in a traceback of its own."""
    says = r"import os; os.write(1, b'caf\xe9\n'); os.write(2, b'\xe9'); "
    path = write(tmp_path, "latin", model=says + GOOD["model"])
    done = elastic("submit", path, "--dry-run", env=environment(tmp_path))
    assert (done.returncode, "would start run latin" in done.stdout) == (0, True), done


def test_files_for_validations_on_the_way_are_looked_for_before_they_are_due(tmp_path):
    """A worker would have found out after 500 steps, each time."""
    env = environment(tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(4096))
    (tmp_path / "valid.bin").write_bytes(bytes(4096))
    small = "{dim=32, layers=1, heads=2, vocabulary=64, context=16}"
    words = [ROOT / "etc/125m.toml", "--dry-run", "--set", "task.context=16",
             "--set", f"task.files=['{tmp_path}/train.bin']", "--set", f"task.model={small}"]
    done = elastic("submit", *words, env=env)
    assert "warning: no step of the task was tried here: token file /path/to/valid" in done.stderr
    given = f"task.validation_files=['{tmp_path}/valid.bin']"
    done = elastic("submit", *words, "--set", given, env=env)
    assert "no step of the task was tried here" not in done.stderr, done.stderr
    done = elastic("submit", *words, "--set", "train.validate_every=0", env=env)
    assert "no step of the task was tried here" not in done.stderr, done.stderr


PRINTS = """
import os, sys, torch
assert os.environ["OMP_WAIT_POLICY"] == "passive"
class Tee:
    def write(self, text): sys.__stdout__.write(text)
    def flush(self): pass
sys.stdout = Tee()
print("hello")
"""


def test_a_task_that_prints_in_its_own_way_is_described(tmp_path):
    """And its first step waits for no core of others on a busy machine: it took five seconds in
    place of one, as threads that waited did not sleep."""
    env = environment(tmp_path, PYTHONUNBUFFERED="")
    done = elastic("submit", write(tmp_path, "prints", top=PRINTS), "--dry-run", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "parameters" in done.stdout


def test_a_first_step_that_dies_in_c_is_told_by_its_signal(tmp_path):
    path = write(tmp_path, "aborts", loss="import os; os.abort()")
    done = elastic("submit", path, "--dry-run", env=environment(tmp_path))
    assert (done.returncode, "exit -6" in done.stderr) == (0, True), done.stderr
    assert "Extension modules" not in done.stderr
