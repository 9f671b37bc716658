"""The architecture, held: imports point down, outside things have one home, the budgets stand."""

import ast
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
    ("core", "errors ledger rounds membership shuffle schedule history plan layout"),
    ("numerics", "codec merge models tasks replica group"),
    ("edges", "config durable rundir store redis_server transport transport_fs transport_redis "
              "sched sched_local sched_slurm signals network sandbox versions inner_state"),
    ("processes", "averaging link local_sgd agent worker master reconcile"),
    ("people", "submission status audit views cli demo"),
]  # fmt: skip
# What a layer may import at module level from outside the package. Numerics is beside the edges:
# versions and inner_state write tensors; tasks is handed its table and reads no configuration.
NOT_IN_CORE = {"time", "os", "random", "logging", "torch", "redis", "socket", "subprocess",
               "pathlib"}  # fmt: skip
ONE_HOME = {
    r"^\s*(import|from) redis\b": {"store"},
    r"signal\.signal\(": {"signals"},
    r"^\s*(import|from) rich\b": {"views", "cli"},
    r"\"(squeue|sbatch|scancel|scontrol|sacct|sinfo)\"": {"sched_slurm", "sandbox"},
}
MOST_CODE_LINES = 8000
MOST_SHELL_LINES = 1000
MOST_FUNCTION_LINES = 60


def modules() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.glob("*.py"))
    return {f.stem: ast.parse(f.read_text()) for f in files if f.stem != "__init__"}


def imports(tree: ast.Module, deep: bool = True) -> set[str]:
    """Dotted names imported; only those at module level if not `deep`."""
    nodes = ast.walk(tree) if deep else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "elastic":
            names |= {f"elastic.{alias.name}" for alias in node.names if alias.name[0] != "_"}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


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
    used = {each.split(".")[0] for each in imports(modules()[name])}
    assert not used & NOT_IN_CORE
    assert all(each.split(".")[1] in LAYERS[0][1].split() for each in used if "elastic." in each)


@pytest.mark.parametrize("pattern", ONE_HOME)
def test_outside_things_have_one_home(pattern: str):
    found = {
        path.stem for path in PACKAGE.glob("*.py")
        if re.search(pattern, path.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert found
    assert found <= ONE_HOME[pattern]


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


@pytest.mark.parametrize("module", ["elastic", "elastic.status", "elastic.reconcile",
                                    "elastic.submission", "elastic.cli", "elastic.agent",
                                    "elastic.sandbox"])  # fmt: skip
def test_what_answers_fast_never_loads_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "lib")})
    assert done.returncode == 0


def test_nothing_from_another_process_is_unpickled():
    unpickling = re.compile(r"import pickle|torch\.load\(|weights_only|object_list")
    assert [path for path in PACKAGE.glob("*.py") if unpickling.search(path.read_text())] == []


def test_functions_are_short():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MOST_FUNCTION_LINES, f"{name}.{node.name}: {lines} lines"


def test_the_budgets_stand():
    assert sum(code_lines(path) for path in PACKAGE.glob("*.py")) < MOST_CODE_LINES
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
