"""README.md, INSTALL.md and docs/ are true: every command in them is run, here or by a named test.

Also what they say about options, error messages, settings, links and the task protocol.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from elastic import __version__
from elastic.base import config as configuration
from elastic.commands import main
from elastic.people import evaluation
from elastic.saved.checkpoint import Checkpoints, find_newest
from elastic.saved.layout import Layout
from elastic.saved.replica import shapes
from elastic.saved.versions import VersionDraft
from elastic.train import task
from elastic.train.group import Group
from helpers import PATIENCE, ROOT, checkout, commit_of, elastic_here, pretended_python
from running import running

README, INSTALL = ROOT / "README.md", ROOT / "INSTALL.md"
PROGRAMS, SECURITY, WHICH = (
    ROOT / "docs" / name for name in ("own-programs.md", "security.md", "modes.md")
)
DOCUMENTS = [README, INSTALL, *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"make\b|bin/e|\.ci/run +#|git |ln |\$EDITOR|\*/2 |[A-Z_]+=\S+ make|"
                     r"(\w+=\S+ )?sbatch -|sbatch/i")

FIRST = "test_the_first_lines_of_the_readme_do_it"
DEMO = "test_the_demo_survives_all_it_does_and_leaves_nothing_running"
ADMIN = "test_an_admin_installs_and_uninstalls_by_the_book"
VENV = "test_a_venv_is_asked_for_what_is_pinned"
QUICK = "test_some_tests_lint_and_gpu_check_run"
CHAOS = "test_the_command_does_faults_to_a_live_run_and_reports_them"
MODES = "test_local_sync_local_trains_every_sample_once_and_the_loss_goes_on"
NODES = "test_several_nodes_train_obey_a_notice_come_back_and_stay_cancelled"
NODE = "test_one_node_trains_under_srun_and_under_torchrun"
VALIDATE = "test_the_command_trains_compares_and_goes_on"
PLAN = "test_the_forecast_in_the_manual_is_what_the_command_says"
RECORDS = "test_the_command_runs_each_trial_once_and_prints_the_table"
ALL = "all of them"

# Every command line of the documents (without its comment), and the test that runs it.
SHOWN_BY = {
    "bin/elastic-submit 7b.toml --min 8 --max 32": FIRST,
    "*/2 * * * * bin/elastic-reconcile": FIRST,
    "bin/elastic-scale 7b --mode local": MODES,
    "bin/elastic-chaos demo --every 29s --for 30m --seed 1": CHAOS,
    "bin/elastic-validate etc/demo.toml --arms int8,int4 --seeds 3": VALIDATE,
    "bin/elastic-plan etc/125m.toml --set elastic.max=32"
    " --trace etc/traces/spot-addremove-aws-p3.csv": PLAN,
    "make records RECORDS_ARGS='--seeds 3 --points 30x4 --arms sync-adamw,muon'": RECORDS,
    "make demo": DEMO,
    "make demo-slurm": DEMO,
    "git clone … elastic && cd elastic": DEMO,
    "make install PREFIX=/opt/elastic": ADMIN,
    "make switch PREFIX=/opt/elastic VERSION=0.1.0": ADMIN,
    "$EDITOR /opt/elastic/etc/site.toml": ADMIN,
    "ln -s /opt/elastic/bin/elastic* /usr/local/bin/": ADMIN,
    "*/2 * * * * /opt/elastic/bin/elastic-reconcile --jitter": ADMIN,
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make venv": VENV,
    "make venv": VENV,
    "make test PYTEST_ARGS='-n 0 -k audit tests/run'": QUICK,
    "make lint": QUICK,
    "make check": QUICK,
    "make gpu-check": QUICK,
    "make slurm": "test_another_slurm_is_asked_for_by_its_version",
    "sbatch --nodes=4 --gres=gpu:8 -c 64 $ELASTIC_HOME/sbatch/multi-node.sbatch python train.py":
        NODES,
    "LAUNCHER=torchrun sbatch --gres=gpu:8 $ELASTIC_HOME/sbatch/single-node.sbatch python train.py":
        NODE,
    "make test": ALL,
    ".ci/run": ALL,
}


def blocks(document: Path) -> Iterator[str]:
    """The indented blocks, with their indentation removed."""
    for block in re.findall(r"(?:^    .*\n(?:[ \t]*\n(?=    ))*)+", document.read_text(), re.M):
        yield textwrap.dedent(block)


def commands(document: Path) -> list[str]:
    lines = [line for block in blocks(document) for line in block.splitlines()]
    return [" ".join(line.split("  #")[0].split()) for line in lines if COMMAND.match(line)]


def block(document: Path, words: str) -> str:
    (found,) = [each for each in blocks(document) if words in each]
    return found


def run(line: str, folder: Path, **environ: str) -> subprocess.CompletedProcess:
    """A line as somebody types it, with an environment that has little in it."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    return subprocess.run(
        ["bash", "-euc", line], cwd=folder, env=kept | environ, capture_output=True, text=True,
        timeout=300 * PATIENCE,
    )


def test_every_command_in_the_documents_has_its_test():
    documented = {line for document in DOCUMENTS for line in commands(document)}
    assert documented == set(SHOWN_BY)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for line, test in SHOWN_BY.items():
        assert test == ALL or f"def {test}(" in tests, line


def test_a_model_gets_out_of_a_run_as_the_page_says(make_run, monkeypatch):
    run_dir, trained = make_run(name="7b"), torch.nn.Linear(3, 2, dtype=torch.bfloat16).float()
    monkeypatch.chdir(run_dir.path.parents[1])
    layout = Layout.of(shapes(trained), 20)  # a fragment for each tensor
    draft, tensors = VersionDraft(run_dir, 123, "1"), trained.parameters()
    files = [file for index, tensor in enumerate(tensors) for file in
             draft.write_fragment(layout, index, *[tensor.detach().flatten()] * 2)]
    assert draft.commit(layout, files, commit_of(123))
    optimizer = torch.optim.SGD(trained.parameters())
    Checkpoints(run_dir, Group(), "1", 1).save(123, trained, optimizer, {})
    of_version, of_checkpoint = (
        block(PROGRAMS, words) for words in ("versions/000123", "dcp_to_torch")
    )
    command, load = of_checkpoint.replace("python", sys.executable).split("\n\n")
    for code in (of_version, load):
        if code is load:
            subprocess.run(shlex.split(command), check=True, capture_output=True)
        model = torch.nn.Linear(3, 2)
        exec(code, {"model": model, "Path": Path, "torch": torch, "safetensors": safetensors})
        assert torch.equal(model.weight, trained.weight), code
        assert torch.equal(model.bias, trained.bias), code


class Wave(torch.nn.Module):
    """Complex weights, and a mask."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(5) < 0.5)


def test_what_is_scored_of_a_checkpoint_is_all_of_its_model(make_run, monkeypatch):
    """Complex weights lost a part, and buffers of other types were those of a new model."""
    run, wave, scored = make_run(), Wave(), []
    saved = Checkpoints(run, Group(), "1", 1)
    saved.save(1, wave, torch.optim.SGD(wave.parameters()), {})
    task = SimpleNamespace(model=Wave, validate=lambda model: scored.append(model) or {"loss": 0.0})
    monkeypatch.setattr(evaluation, "load", lambda _config: task)
    evaluation.of_checkpoint(run, find_newest(run, Group())[0])
    assert torch.equal(scored[0].weight, wave.weight)
    assert torch.equal(scored[0].mask, wave.mask)


def test_the_first_lines_of_the_readme_do_it(tmp_path):
    folder = checkout(tmp_path)
    seven = (ROOT / "etc/7b.toml").read_text().replace('"slurm"', '"local"')
    (folder / "7b.toml").write_text(seven.replace('"200gb"', '"1gb"'))
    own = {name: str(tmp_path / name) for name in ("ELASTIC_HOME_DIR", "ELASTIC_RUNS")}
    submit, cron, _ = commands(README)[:3]
    planned = run(f"{submit} --dry-run", folder, **own)
    assert planned.returncode == 0, planned.stderr
    for words in ("run 7b on 8..32 GPUs", "6,738,415,616 parameters", "a delta is 6.79 GB (int8)"):
        assert words in planned.stdout
    assert not (tmp_path / "ELASTIC_RUNS").exists()
    passed = run(cron.removeprefix("*/2 * * * * "), folder, **own)
    assert (passed.returncode, passed.stderr) == (0, "")


def test_an_admin_installs_and_uninstalls_by_the_book(tmp_path):
    """Everybody can read it, though the admin has a narrow umask: commands of others found no
    Python."""
    prefix, links = tmp_path / "elastic", tmp_path / "links"
    links.mkdir()

    def here(line: str) -> str:
        line = line.removeprefix("*/2 * * * * ").removesuffix(" --jitter")
        return line.replace("/opt/elastic", str(prefix)).replace("/usr/local/bin", str(links))

    lines = [here(line) for line in commands(INSTALL) if "/opt/elastic" in line]
    python = pretended_python(tmp_path)
    for line in lines:
        line += f" PYTHON={python}" if line.startswith("make install") else ""
        done = run(f"umask 077; {line}", ROOT, EDITOR="grep -q slurm",
                   ELASTIC_HOME_DIR=str(tmp_path))
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert len(done.stdout) < 1000, "shell is not echoed"
    everybody_can_read(prefix)
    answer = run(f"{links}/elastic-config {prefix}/current/etc/demo.toml", tmp_path)
    assert 'max = ' in answer.stdout, answer.stderr
    done = run(here("make uninstall PREFIX=/opt/elastic"), ROOT)
    assert (done.returncode, prefix.exists()) == (0, False), done.stderr


def a_newer_version(folder: Path) -> Path:
    """A copy of this source tree whose version is 9.9."""
    new = checkout(folder)
    first = new / "lib" / "elastic" / "__init__.py"
    first.write_text(re.sub(r'(__version__ = ).*', r'\1"9.9"', first.read_text()))
    return new


def test_a_new_version_is_switched_to_once_it_works_and_the_old_one_stays(tmp_path):
    """Runs that began with the old one go on with it; the site file is that of both."""
    prefix, new = tmp_path / "elastic", a_newer_version(tmp_path)
    (network := tmp_path / "network").touch()
    note = f"readlink '{prefix}/current' >>'{tmp_path}/was' || true"
    python = pretended_python(tmp_path, f"test -e '{network}' || exit 1; {note}")
    install = f"make install PREFIX={prefix} PYTHON={python}"
    old = run(install, ROOT)
    assert old.returncode == 0, old.stderr
    site = prefix / "etc" / "site.toml"
    site.write_text('[slurm]\npartition = "theirs"\n')
    network.unlink()
    an_upgrade_that_fails_leaves_everybody_with_the_version_before(install, prefix, new)
    network.touch()
    assert run(install, new).returncode == 0
    assert os.readlink(prefix / "current") == "9.9"
    assert set((tmp_path / "was").read_text().split()) == {__version__}
    back = run(f"make switch PREFIX={prefix} VERSION={__version__}", new)
    assert (back.returncode, os.readlink(prefix / "current")) == (0, __version__), back.stderr
    ask = "from elastic.base.environment import commands; print(commands())"
    said = run(f"PYTHONPATH={prefix}/{__version__}/lib {sys.executable} -c '{ask}'", new)
    assert said.stdout == f"{prefix}/bin\n", "crontabs follow the current version"
    pins = prefix / "9.9" / "requirements.txt"
    os.utime(pins, (1, 1))
    assert run(install, new).returncode == 0
    assert pins.stat().st_mtime == 1, "what has not changed asks for no new venv"
    for version in (__version__, "9.9"):
        assert (prefix / version / "etc" / "site.toml").read_text() == site.read_text()
        module = prefix / "modulefiles" / "tcl" / "elastic" / version
        assert f"{prefix}/{version}/bin" in module.read_text()
    assert run(f"make uninstall PREFIX={prefix}", new).returncode == 0
    assert not (prefix / "9.9").exists()
    assert os.readlink(prefix / "current") == __version__
    assert run(f"make uninstall PREFIX={prefix}", ROOT).returncode == 0
    assert [path.name for path in prefix.rglob("*") if path.is_file()] == ["site.toml"]


def an_upgrade_that_fails_leaves_everybody_with_the_version_before(
    install: str, prefix: Path, new: Path
) -> None:
    """Its pip finds no network; its venv is not whole, and nothing switches to it."""
    assert run(install, new).returncode != 0
    assert os.readlink(prefix / "current") == __version__
    asked = run(f"{prefix}/bin/elastic-config {prefix}/current/etc/demo.toml", prefix)
    assert asked.returncode == 0, asked.stderr
    for version in ("9.9", "8.8"):
        refused = run(f"make switch PREFIX={prefix} VERSION={version}", new)
        assert refused.returncode != 0
        assert f"version {version} does not work" in refused.stderr
    assert os.readlink(prefix / "current") == __version__


def test_users_of_an_installation_without_a_venv_get_the_admins_python(tmp_path):
    """Their commands found none, and could not make one."""
    prefix, python = tmp_path / "elastic", pretended_python(tmp_path)
    done = run(f"ELASTIC_PYTHON={python} make install PREFIX={prefix}", ROOT)
    assert done.returncode == 0, done.stderr
    modules = [*prefix.glob("modulefiles/*/elastic/*")]
    assert len(modules) == 2
    for module in modules:
        assert re.search(rf'^setenv.*ELASTIC_PYTHON.*"{python}"', module.read_text(), re.MULTILINE)


def test_no_installation_is_in_a_folder_that_depends_on_where_a_user_is():
    """The module file put it into PATH as it was."""
    done = run("make install PREFIX=rel/elastic", ROOT)
    assert done.returncode != 0
    assert "PREFIX=rel/elastic is not a whole path" in done.stderr
    assert not (ROOT / "rel").exists()


def test_everybody_can_read_what_is_packaged_and_gets_its_venv_later(tmp_path):
    prefix, stage = tmp_path / "elastic", tmp_path / "stage"
    done = run(f"umask 077; make install DESTDIR={stage} PREFIX={prefix}", ROOT)
    assert done.returncode == 0, done.stderr
    (stage / prefix.relative_to("/")).rename(prefix)
    (told,) = re.findall("next, there: (.*)", done.stdout)
    python = pretended_python(tmp_path)
    made = run(f"umask 077; export MAKEFLAGS=PYTHON={python}; {told}", tmp_path)
    assert made.returncode == 0, made.stderr
    everybody_can_read(prefix)


def everybody_can_read(prefix: Path) -> None:
    paths = [path for path in prefix.rglob("*") if not path.is_symlink()]
    assert any(path.name == ".ready" for path in paths)
    for path in (prefix, *paths):
        assert path.stat().st_mode & 0o044 == 0o044, path
        assert path.is_file() or path.stat().st_mode & 0o011 == 0o011, path


def test_uninstall_removes_nothing_but_a_version(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years")
    done = run(f"make uninstall PREFIX={tmp_path} VERSION=thesis", ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: no version of elastic: '{tmp_path}/thesis'\n")
    assert (tmp_path / "thesis" / "chapter1").read_text() == "years"


def test_every_command_is_completed():
    lab = main.elastic.commands["lab"].commands
    programs = {f"elastic-{name}" for name in main.elastic.commands.keys() - {"lab"} | lab.keys()}
    completed = (ROOT / "etc" / "completion.bash").read_text()
    names = re.search(r"elastic-\{([a-z,]+)\}", completed)[1].split(",")
    assert {f"elastic-{name}" for name in names} == programs
    assert programs <= {path.name for path in (ROOT / "bin").iterdir()}


def test_bash_completes_commands_options_and_runs(tmp_path):
    registry = tmp_path / "home" / "runs"
    registry.mkdir(parents=True)
    (tmp_path / "seven").mkdir()
    (tmp_path / "seven" / "control.json").write_text("{}")
    (registry / "seven").symlink_to(tmp_path / "seven")
    ask = """source etc/completion.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1))
    _elastic; echo "${{COMPREPLY[@]}}" """
    hostile = tmp_path / "elastic"  # beside what is typed: a key that asks runs nothing of that
    hostile.write_text(f"#!/bin/sh\ntouch {tmp_path}/PWNED\n")
    hostile.chmod(0o755)
    for words, wanted in (("bin/elastic sta", "status"), ("bin/elastic-status --wa", "--watch"),
                          ("bin/elastic-stop se", "seven"), ("elastic sta", "status"),
                          (f"{tmp_path}/elastic-stop se", "seven")):
        done = run(ask.format(words=words), ROOT, ELASTIC_HOME_DIR=str(tmp_path / "home"))
        assert done.stdout.split() == [wanted], done.stderr
    assert not (tmp_path / "PWNED").exists()


def test_a_venv_is_asked_for_what_is_pinned(tmp_path):
    """`.ci/run` makes one for real, which takes minutes and a network; pip stands aside here."""
    folder = checkout(tmp_path)
    (folder / ".venv").unlink()
    said = {target: run(f"make -n {target} PYTHON=/usr/bin/python3", folder)
            for target in ("demo", "venv", "venv TORCH=site", "lint")}
    files = {target: re.findall(r"-r (\S+)", answer.stdout) for target, answer in said.items()}
    assert files["demo"] == [".venv/wanted.txt"], said["demo"].stderr
    assert files["venv"] == [*files["demo"], "requirements-report.txt"]
    assert files["lint"] == [*files["venv"], "requirements-test.txt"]
    assert "--system-site-packages" in said["venv TORCH=site"].stdout
    assert "^(torch|numpy)==" in said["venv TORCH=site"].stdout
    lines = "".join(file.read_text() for file in ROOT.glob("requirements*.txt")).splitlines()
    pins = [line for line in lines if line and not line.strip().startswith("#")]
    assert [pin for pin in pins if "==" not in pin] == []
    assert not re.search("matplotlib|pytest", (ROOT / "requirements.txt").read_text())


def test_a_venv_over_a_site_sees_its_torch_though_the_site_is_a_venv(tmp_path):
    folder = checkout(tmp_path)
    (folder / ".venv").unlink()
    (quick := tmp_path / "python").write_text(f"""#!/bin/sh
        test "$2" != venv || set -- "$@" --without-pip
        exec "{sys.executable}" "$@"
    """)
    quick.chmod(0o755)
    made = run(f"make .venv/.ready TORCH=site PYTHON={quick} PIP=:", folder)
    assert made.returncode == 0, made.stderr  # it has imported torch and all else
    find = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    where = run(f'.venv/bin/python -c "{find}"', folder)
    assert Path(where.stdout).is_relative_to(sys.prefix)


@pytest.mark.timeout(1800)
def test_some_tests_lint_and_gpu_check_run(tmp_path):
    """In a copy, so that no cache of the checkout is written by two at once."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    folder = checkout(tmp_path)
    test = "make test PYTEST_ARGS='-n 0 -k audit tests/run'"  # to collect all takes 10 s more
    check = "make check PYTEST_ARGS='-n 0 -k audit tests/run'"  # which begins with `make lint`
    for line in (test, check, "make gpu-check"):
        done = run(f"unset MAKEFLAGS; {line}", folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_the_forecast_in_the_manual_is_what_the_command_says():
    (line,) = [line for line, test in SHOWN_BY.items() if test == PLAN]
    said = run(line, ROOT)
    assert said.returncode == 0, said.stderr
    _, _, *shown = block(WHICH, "take --mode").splitlines()
    assert [each.split() for each in said.stdout.splitlines()] == [each.split() for each in shown]


def test_the_costs_in_the_readme_have_the_columns_that_are_printed():
    said = (ROOT / "tests" / "screens" / "chaos-120.txt").read_text()
    shown, printed = (" ".join(re.search("(?m)^ *fault .*", text)[0].split())
                      for text in (block(README, "steps lost"), said))
    assert printed.startswith(shown)


@pytest.mark.parametrize("row", re.findall(r"^\| `elastic-(\w+).*", README.read_text(), re.M))
def test_options_in_the_readme_are_those_of_the_help(row):
    (line,) = [each for each in README.read_text().splitlines() if f"| `elastic-{row}" in each]
    answer = elastic_here(row, "--help")
    assert answer.exit_code == 0
    for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line):
        assert option in answer.stdout, option


def test_the_site_file_in_the_manual_is_understood(tmp_path):
    site = tmp_path / "site.toml"
    site.write_text(block(INSTALL, "master_partition"))
    loaded = configuration.load(ROOT / "etc/125m.toml", [], site)
    assert (loaded.slurm.account, loaded.redis.bind) == ("project42", "ib0")
    assert loaded.origin("slurm.account") == str(site)


def test_every_key_and_message_that_the_documents_name_exists():
    sources = "".join(path.read_text() for path in ROOT.glob("lib/elastic/**/*.py"))
    programs = (ROOT / "bin/elastic").read_text()
    keys = {row[0] for row in configuration.load(ROOT / "etc/demo.toml").rows()}
    sections = {key.partition(".")[0] for key in keys}
    for document in DOCUMENTS:
        text = document.read_text()
        named = re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", text)
        unknown = [key for key in named if key.split(".")[0] in sections and key not in keys]
        assert [key for key in unknown if not key.endswith(".py")] == []
    for message in re.findall(r"^\| `((?:error|failed|cannot)[^`]*)`", INSTALL.read_text(), re.M):
        parts = re.split(r"\d+|…", message.removeprefix("error: ").removeprefix("failed: "))
        assert [part for part in parts if part not in sources + programs] == [], message


def test_the_task_in_the_readme_is_the_protocol():
    (shown,) = ast.parse(block(README, "class Task:")).body
    source = ast.parse(Path(task.__file__).read_text())
    (protocol,) = [node for node in source.body if getattr(node, "name", "") == "Task"]

    def methods(node: ast.ClassDef) -> dict[str, list[str]]:
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        return {each.name: [arg.arg for arg in each.args.args] for each in functions}

    assert methods(protocol).items() <= methods(shown).items()
    optional = methods(shown).keys() - methods(protocol).keys() - {"__init__"}
    assert [name for name in optional if f"{name}(" not in ast.get_docstring(protocol)] == []


def loop_of(document: Path, batches: int) -> str:
    """The loop for steps of so many batches, as the manual has it."""
    whole = block(document, "elastic.LocalSGD.from_env")
    if batches == 1:
        return whole
    return whole.splitlines()[0] + "\n" + textwrap.indent(block(document, "sgd.ends_step"), "    ")


@pytest.mark.parametrize("batches", [1, 2])
def test_the_loop_in_the_manual_trains(batches, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent("""\
        import sys, torch, elastic
        from elastic.train.optimizers import EagerAdamW
        from tiny_task import Net, Tiny
        task = Tiny({"pace": sys.argv[1], "samples": 200})
        dataset, model = task.dataset(), Net()
        loss = task.loss
        inner_optimizer = EagerAdamW(model.parameters(), lr=0.01)
        """) + loop_of(PROGRAMS, batches))
    command = [sys.executable, str(script), str(tmp_path / "pace")]
    settings = {"run.command": command, "elastic.max": 1, "train.accumulate": batches}
    with running(tmp_path, settings, step_s=0) as started:
        started.finish()
        assert started.commits()[-1].tokens == 200
        assert started.commits()[-1].loss > 0


def test_each_threat_in_the_manual_names_the_test_that_shows_what_is_said():
    table = SECURITY.read_text().partition("| against | there is |")[2]
    rows = table.strip().partition("\n\n")[0].splitlines()[1:]
    assert len(rows) > 12
    for row in rows:
        tests = re.findall(r"`(test_\w+\.py)`", row)
        assert tests, row
        assert [name for name in tests if not [*(ROOT / "tests").rglob(name)]] == []


def anchors(document: Path) -> set[str]:
    """The names of a document's headings in links, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        if not name.startswith("https://"):
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short_and_names_every_page():
    text = README.read_text()
    assert len(text.splitlines()) <= 250
    assert [page.name for page in DOCUMENTS if f"(docs/{page.name})" not in text
            and page.parent.name == "docs"] == []
