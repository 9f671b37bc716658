"""The architecture, held: imports point down, outside things have one home, the budgets stand."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from helpers import ROOT

PACKAGE = ROOT / "lib" / "elastic"
LAYERS = [
    ("core", "errors ledger guards rounds membership shuffle schedule history plan layout sizing "
             "cadence units records command goodput faults estimate wording timeline diagnosis "
             "played played_local forecast"),
    ("numerics", "codec merge models task tasks replica group inner_optimizer"),
    ("edges", "config durable rundir store redis_server transport "
              "sched sched_local sched_slurm signals network keepalive proc sandbox versions "
              "inner_state slurm_info health peers device checkpoint handover trace"),
    ("processes", "arithmetic averaging link courier exchange loading local_sgd agent worker "
                  "master trainer launch start reconcile describe evaluation doctor"),
    ("people", "submission tryout status audit views chaos validation report metrics cli demo"),
]  # fmt: skip
# What a layer may import at module level from outside the package. Numerics is beside the edges:
# versions and inner_state write tensors; tasks is handed its table and reads no configuration.
NOT_IN_CORE = {"time", "os", "random", "logging", "torch", "redis", "socket", "subprocess",
               "pathlib"}  # fmt: skip
ONE_HOME = {"redis": {"store"}, "rich": {"views", "cli"}}
FAST = ["status", "reconcile", "submission", "cli", "agent", "launch", "sandbox", "sched_slurm",
        "views"]
MOST_CODE_LINES = 13_400
MOST_SHELL_LINES = 1000
MOST_FUNCTION_LINES = 60


@functools.cache
def modules() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.stem: ast.parse(f.read_text()) for f in files if f.stem != "__init__"}


def imports(tree: ast.Module, deep: bool = True) -> set[str]:
    """Dotted names imported, of this package `elastic.NAME`, whatever folder the module is in;
    only those at module level if not `deep`."""
    nodes = ast.walk(tree) if deep else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} - {"elastic"}
        elif isinstance(node, ast.ImportFrom) and is_folder(node.module):
            names |= {f"elastic.{alias.name}" for alias in node.names if alias.name[0] != "_"}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("elastic."):
            names.add(f"elastic.{node.module.rpartition('.')[2]}")
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def is_folder(module: str) -> bool:
    return PACKAGE.parent.joinpath(*module.split(".")).is_dir()


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def layer_of() -> dict[str, int]:
    return {name: level for level, (_, names) in enumerate(LAYERS) for name in names.split()}


def test_every_module_has_a_layer():
    assert set(modules()) == set(layer_of())


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str):
    levels = layer_of()
    wanted = imports(modules()[name], deep=levels[name] < 4)
    for each in (each.split(".")[1] for each in wanted if each.startswith("elastic.")):
        assert levels[each] <= levels[name], f"{name} imports {each} from a layer above"


@pytest.mark.parametrize("name", LAYERS[0][1].split())
def test_the_core_touches_nothing_of_the_world(name: str):
    assert not {each.split(".")[0] for each in imports(modules()[name])} & NOT_IN_CORE
    called = {ast.unparse(call.func) for call in calls(modules()[name])}
    assert not called & {"open", "print", "input", "__import__", "exec", "eval"}


@pytest.mark.parametrize("package", ONE_HOME)
def test_outside_packages_have_one_home(package: str):
    homes = {name for name, tree in modules().items()
             if package in {each.split(".")[0] for each in imports(tree)}}  # fmt: skip
    assert homes
    assert homes <= ONE_HOME[package]


def test_signal_handlers_have_one_home():
    homes = {name for name, tree in modules().items() for call in calls(tree)
             if ast.unparse(call.func).endswith(("signal.signal", "signal.sigaction"))}  # fmt: skip
    assert homes == {"signals"}


def test_slurm_commands_have_one_home():
    """The sandbox asks its own private cluster for its state; nobody else runs one by name."""
    commands = re.compile(r"(\S*/)?(squeue|sbatch|scancel|scontrol|sacct|sinfo|srun|salloc)( -.*)?")
    homes = {
        name for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and commands.fullmatch(node.value)
    }  # fmt: skip
    assert homes == {"sched_slurm", "sandbox"}


def test_only_config_reads_the_environment():
    readers = {
        name for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }  # fmt: skip
    assert readers == {"config"}


def test_there_is_no_cycle():
    graph = {
        name: {e.split(".")[1] for e in imports(tree, deep=False) if e.startswith("elastic.")}
        for name, tree in modules().items()
    }
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & set(graph)}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


def test_what_answers_fast_never_loads_torch():
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'numpy'} & set(sys.modules): sys.exit(name)\n"
    )
    files = {path.stem: path for path in PACKAGE.rglob("*.py")}
    names = [".".join(files[name].relative_to(ROOT / "lib").with_suffix("").parts) for name in FAST]
    done = subprocess.run(
        [sys.executable, "-c", code, "elastic", *names],
        env={"PYTHONPATH": str(ROOT / "lib")}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_unpickled_can_name_plain_values_only():
    """By checkpoint alone: with an Unpickler that knows a few names, or torch's with its own."""
    for name, tree in modules().items():
        roots = {each.split(".")[0] for each in imports(tree)}
        assert not roots & {"cPickle", "dill", "cloudpickle", "joblib", "shelve"}, name
        assert "pickle" not in roots or name == "checkpoint"
        for call in calls(tree):
            called, given = ast.unparse(call.func), list(map(ast.unparse, call.keywords))
            assert not re.search(r"pickle\.(loads?|Unpickler)$", called), called
            assert not re.search(r"(np|numpy)\.load$|_object(_list)?$", called), called
            assert called != "torch.load" or "weights_only=True" in given, name
            assert "allow_pickle" not in {keyword.arg for keyword in call.keywords}
            assert called not in ("dcp.FileSystemReader", "DefaultLoadPlanner"), name


def test_functions_are_short():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MOST_FUNCTION_LINES, f"{name}.{node.name}: {lines} lines"


def test_the_budgets_stand():
    assert sum(code_lines(path) for path in PACKAGE.rglob("*.py")) < MOST_CODE_LINES
    shell = [*(ROOT / "bin").iterdir(), *(ROOT / "sbatch").iterdir()]
    assert sum(len(path.read_text().splitlines()) for path in shell) < MOST_SHELL_LINES


def code_lines(path: Path) -> int:
    """Lines that hold code: neither blank nor comment nor docstring."""
    source, lines = path.read_text(), set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}  # fmt: skip
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)
