"""The architecture, held: imports point down the listing, outside things have one home, budgets."""

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
# The folders in the order of reading, each with the most lines of code that it may have. A raise
# names, in the same commit, what was deleted for it.
FOLDERS = {
    "base": 1010,  # one home for each thing outside: files, settings, signals, processes, network
    "run": 1407,  # one run on disk: its folder, its records, its samples, its proof
    "jobs": 1751,  # jobs on a cluster: what is there, what should be, one pass
    "train": 1099,  # a process with torch: the task, its ranks, its device, its health
    "saved": 1025,  # tensors on disk, committed by link(): what both modes begin with
    "local": 551,  # local mode: what both sides of the wire speak
    "local/worker": 1391,  # one slot: hold the lease, train, deliver
    "local/master": 1090,  # one master: Redis, samples, rounds, commits
    "sync": 1017,  # sync mode: one job that resizes
    "people": 2139,  # what a person asks and sees
    "lab": 1094,  # trying and proving; nothing imports it
    "commands": 458,  # click: options, checks, exit codes
    ".": 187,  # the public names, and the tasks that come along
}
APART = [("local/worker", "local/master"), ("sync", "local"), ("sync", "local/worker"),
         ("sync", "local/master")]
NOT_PURE = {"time", "os", "random", "logging", "torch", "redis", "socket", "subprocess", "pathlib"}
ONE_HOME = {"redis": {"store"}, "rich": {"views"}}
WITHOUT_TORCH = ("base", "run", "jobs", "commands")
FAST = ("status", "submission", "views", "agent", "launch", "sandbox")
MOST_SHELL_LINES = 720
MOST_FUNCTION_LINES = 60


@functools.cache
def modules() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.stem: ast.parse(f.read_text()) for f in files if f.stem != "__init__"}


@functools.cache
def folder_of() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.stem: f.parent.relative_to(PACKAGE).as_posix() for f in files}


def imports(tree: ast.Module, deep: bool = True) -> set[str]:
    """Names of outside packages, and `elastic.NAME` of modules of this one, whatever its folder;
    only what is imported at module level if not `deep`."""
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


def own(names: set[str]) -> set[str]:
    """The modules of this package among them."""
    return {name.split(".")[1] for name in names if name.startswith("elastic.")}


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def is_pure(tree: ast.Module) -> bool:
    """It says so in the first paragraph of its docstring."""
    return "Pure." in (ast.get_docstring(tree) or "").split("\n\n")[0]


PURE = sorted(name for name, tree in modules().items() if is_pure(tree))


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_file_imports_its_own_folder_and_those_above_it(name: str):
    place, mine = [*FOLDERS].index, folder_of()[name]
    for other in own(imports(modules()[name])):
        theirs = folder_of()[other]
        assert place(theirs) <= place(mine), f"{mine}/{name} imports {theirs}/{other}"
        assert (mine, theirs) not in APART + [pair[::-1] for pair in APART], f"{name}, {other}"


@pytest.mark.parametrize("name", PURE)
def test_what_is_pure_touches_nothing_of_the_world(name: str):
    wanted = imports(modules()[name])
    assert not {each.split(".")[0] for each in wanted} & NOT_PURE
    assert own(wanted) <= {*PURE}
    called = {ast.unparse(call.func) for call in calls(modules()[name])}
    assert not called & {"open", "print", "input", "__import__", "exec", "eval"}


@pytest.mark.parametrize("package", ONE_HOME)
def test_outside_packages_have_one_home(package: str):
    homes = {name for name, tree in modules().items()
             if package in {each.split(".")[0] for each in imports(tree)}}
    assert homes
    assert homes <= ONE_HOME[package]


def test_signal_handlers_have_one_home():
    homes = {name for name, tree in modules().items() for call in calls(tree)
             if ast.unparse(call.func).endswith(("signal.signal", "signal.sigaction"))}
    assert homes == {"signals"}


def test_slurm_commands_have_one_home():
    """The sandbox asks its own private cluster for its state; nobody else runs one by name."""
    commands = re.compile(r"(\S*/)?(squeue|sbatch|scancel|scontrol|sacct|sinfo|srun|salloc)( -.*)?")
    homes = {
        name for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and commands.fullmatch(node.value)
    }
    assert homes == {"sched_slurm", "sandbox"}


def test_the_environment_has_one_reader():
    readers = {
        name for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"environment"}


def test_there_is_no_cycle():
    graph = {
        name: own(imports(tree, deep=False)) for name, tree in modules().items()
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
    fast = [name for name, folder in folder_of().items() if folder in WITHOUT_TORCH]
    places = [(folder_of()[name], name) for name in (*fast, *FAST)]
    names = [f"elastic.{folder.replace('/', '.')}.{name}" for folder, name in places]
    done = subprocess.run(
        [sys.executable, "-c", code, "elastic", *names],
        env={"PYTHONPATH": str(ROOT / "lib")}, capture_output=True, text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_unpickled_can_name_plain_values_only():
    """By storage alone: with an Unpickler that knows a few names, or torch's with its own."""
    for name, tree in modules().items():
        roots = {each.split(".")[0] for each in imports(tree)}
        assert not roots & {"cPickle", "dill", "cloudpickle", "joblib", "shelve"}, name
        assert "pickle" not in roots or name == "storage"
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_to_its_budget(folder: str):
    assert sum(map(code_lines, (PACKAGE / folder).glob("*.py"))) <= FOLDERS[folder]


def test_the_wrappers_stay_thin():
    shell = [*(ROOT / "bin").iterdir(), *(ROOT / "sbatch").iterdir()]
    texts = [path.read_text() for path in shell if not path.is_symlink()]
    assert sum(len(text.splitlines()) for text in texts) < MOST_SHELL_LINES


def code_lines(path: Path) -> int:
    """Lines that hold code: neither blank nor comment nor docstring."""
    source, lines = path.read_text(), set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)
