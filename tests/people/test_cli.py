"""The commands as people and cron meet them: help, errors, exit codes, and what they leave behind.

pytest tests/people/test_cli.py
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest
from click.testing import Result

from elastic.base import environment as installed
from elastic.base.config import load
from elastic.base.errors import Exit, UsageError
from elastic.commands import looking, main, shared
from elastic.people import evaluation, steering
from helpers import PATIENCE, ROOT, commit_of, elastic, elastic_here, environment, wait_until
from running import TESTS
from test_broken_tasks import tried
from test_layers import FOLDERS

COMMANDS = [
    "submit", "reconcile", "status", "logs", "scale", "stop", "audit", "report", "metrics",
    "evaluate", "config", "doctor",
]
LAB = ["demo", "sandbox", "chaos", "plan", "validate"]
FOR_JOBS = ["agent", "master", "launch", "story"]


def call(*words: object, env: dict[str, str]) -> Result:
    """A command in this process."""
    path = f"{ROOT / 'lib'}:{TESTS}"  # of a first step of a task, too
    return elastic_here(*words, env={**env, "PYTHONPATH": path})


@pytest.fixture
def env(tmp_path):
    """An environment whose runs end with the test, however it ends."""
    env = environment(tmp_path)
    yield env
    for link in (tmp_path / "registry" / "runs").glob("*"):
        call("stop", link.name, "--now", "--wait", env=env)


@pytest.fixture
def config(tmp_path) -> Path:
    """A run that trains nothing: its command only sleeps, its jobs are processes."""
    return write_config(tmp_path / "quiet.toml")


def write_config(path: Path, **changes: str) -> Path:
    sections = {
        "run": 'scheduler = "local"\ncommand = ["sleep", "600"]',
        "elastic": "min = 1\nmax = 2",
        "train": "max_tokens = 1000",
        "checkpoint": 'min_free = "1mb"',
        "local_scheduler": 'grace = "1s"',
        **changes,
    }
    path.write_text("\n".join(f"[{name}]\n{keys}\n" for name, keys in sections.items()))
    return path


def left_behind(tmp_path: Path) -> list[Path]:
    """Run directories and registered names."""
    return [*(tmp_path / "runs").glob("*"), *(tmp_path / "registry" / "runs").glob("*")]


def fake_slurm(folder: Path, **scripts: str) -> str:
    """A PATH on which Slurm's commands are these shell scripts."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}:{os.environ['PATH']}"


ON_SLURM = ("--scheduler", "slurm", "--set", "slurm.partition=p")


@pytest.fixture
def on_slurm(tmp_path) -> dict[str, str]:
    """An environment whose Slurm takes every job, and starts none."""
    path = fake_slurm(tmp_path / "slurm", squeue="exit 0", sbatch="echo 7", sinfo="exit 0",
                      scancel="exit 0")
    return environment(tmp_path, PATH=path)


# ---- help


@pytest.mark.parametrize("command", [*COMMANDS, *(f"lab {command}" for command in LAB)])
def test_help_of_every_command_fits_80_columns_and_has_an_example(command, env):
    answer, short = (
        call(*command.split(), option, env={**env, "COLUMNS": "200"}) for option in ("--help", "-h")
    )
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert short.stdout == answer.stdout
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    example = lines[lines.index("  Example:") + 1 :]
    assert example
    assert all(line.startswith(f"    elastic {command}") for line in example)


def test_every_option_and_command_says_what_it_does():
    group = main.elastic
    for name, command in [*group.commands.items(), *group.commands["lab"].commands.items()]:
        assert command.help, name
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, (name, option.name)


@pytest.mark.parametrize(("group", "commands"), [([], [*COMMANDS, "lab"]), (["lab"], LAB)])
def test_the_list_of_commands_fits_one_screen_and_cuts_nothing_off(group, commands, env):
    text = call(*group, env=env).output
    assert len(text.splitlines()) <= 24
    listed = text.split("Commands:")[1].splitlines()[1:]
    assert [line.split()[0] for line in listed] == commands
    assert not any(line.endswith("...") for line in listed)


def test_every_command_and_nothing_else_has_its_program_in_bin():
    programs = {path.name.removeprefix("elastic-"): path for path in (ROOT / "bin").iterdir()}
    assert programs.keys() == {"elastic", *COMMANDS, *LAB}
    assert all(os.access(path, os.X_OK) for path in programs.values())
    links = [name for name, path in programs.items() if path.is_symlink()]
    assert sorted(links) == sorted({*COMMANDS, *LAB} - {"demo"})
    assert {programs[name].resolve().name for name in links} == {"elastic"}


@pytest.mark.parametrize("command", LAB)
def test_what_is_in_the_lab_is_found_by_its_old_name(command, env):
    for words in ([command], ["lab", command]):
        answer = call(*words, "--help", env=env)
        assert answer.stdout.startswith(f"Usage: elastic {' '.join(words)} ")


# Of the links in bin, which are all to one program, one of people's and one of the lab's.
PROGRAMS = ["elastic", "elastic-submit", "elastic-chaos", "elastic-demo", "../sbatch/rank.sh",
            *(f"elastic {name}" for name in FOR_JOBS)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_answers_a_call_for_help(program, tmp_path):
    name, *words = program.split()
    for option in ("--help", "-h"):
        answer = subprocess.run([ROOT / "bin" / name, *words, option], env=environment(tmp_path),
                                capture_output=True, text=True, cwd=tmp_path)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert answer.stdout.lower().startswith(("usage: elastic", "usage: rank.sh "))
    assert list(tmp_path.iterdir()) == []


def test_the_programs_work_through_symbolic_links(env, tmp_path):
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "elastic-status"
    link.symlink_to(ROOT / "bin" / "elastic-status")
    answer = subprocess.run([link], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "no runs" in answer.stdout


def test_a_python_that_is_too_old_or_bare_gets_one_error_with_the_way_out(env, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    answer = elastic("status", env={**env, "ELASTIC_PYTHON": str(python)})
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: no Python >= 3.11")
    assert "venv" in answer.stderr


@pytest.mark.parametrize("path", ["", ":/nothing:", "/nothing::/more"])
def test_nothing_is_imported_from_where_a_command_is_typed(env, tmp_path, path):
    """Not by the look at a Python of one's own, either; an empty part of PYTHONPATH is `.`."""
    env |= {"PYTHONPATH": path} if path else {}
    for name in ("importlib", "click", "redis", "rich", "xxhash", "elastic", "encodings"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('PWNED', 'w'); raise SystemExit(7)\n")
    answer = subprocess.run([ROOT / "bin" / "elastic", "--version"], env=env, cwd=tmp_path,
                            capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert not (tmp_path / "PWNED").exists()


def in_a_python_of_its_own(code: str, *words: str, **env: str) -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), **env}
    done = subprocess.run([sys.executable, "-c", code, *words], env=given, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_what_runs_under_cron_and_on_login_nodes_never_loads_torch_and_cron_no_redis():
    in_a_python_of_its_own("""
import sys, elastic.commands.main
assert 'redis' not in sys.modules, 'a pass has no use for it'
import elastic.people.status, elastic.jobs.reconcile, elastic.jobs.sched_local
import elastic.local.worker.agent
assert not {'torch', 'numpy'} & sys.modules.keys()
""")


def test_no_command_but_evaluate_loads_torch(config, on_slurm):
    commands = (
        f"submit {config} --name a {' '.join(ON_SLURM)}", "status", "status a", "status a --json",
        "reconcile", "scale a --max 2", f"config {config}", "stop a --now", "audit a",
    )
    code = """
import sys
from click.testing import CliRunner
from elastic.commands import main
for words in sys.argv[1:]:
    done = CliRunner().invoke(main.elastic, words.split())
    assert done.exit_code == 0, (words, done.output)
    assert 'torch' not in sys.modules, words
assert 'no version is committed yet' in done.output
"""
    in_a_python_of_its_own(code, *commands, **on_slurm)


# ---- a run's life


def test_a_run_is_submitted_resized_stopped_and_started_again(config, env):
    answer = call("submit", config, "--name", "life", "--parsable", env=env)
    assert (answer.stdout, answer.stderr) == ("life\n", "")
    assert slots(env) == [0, 1]
    assert_a_second_pass_does_and_says_nothing(env)
    assert_status_has_every_field_of_its_contract(env)
    assert call("scale", "life", "--max", 1, env=env).exit_code == 0
    wait_until(lambda: slots(env) == [0], 15, "the second worker leaves")
    assert "slot 0 attempt 1" in call("logs", "life", "0", env=env).stdout
    assert [call("logs", "life", slot, env=env).exit_code for slot in ("7", "seven")] == [1, 2]
    assert "life stops" in call("stop", "life", env=env).stdout
    assert status_of(env)["state"] == "stopped"
    assert "life is stopped" in call("stop", "life", "--now", "--wait", env=env).stdout
    assert status_of(env)["jobs"] == []
    again = call("scale", "life", "--min", 2, "--max", 2, env=env)
    assert "starts again" in again.stdout
    assert slots(env) == [0, 1]


def assert_a_second_pass_does_and_says_nothing(env: dict) -> None:
    before = [job["job_id"] for job in status_of(env)["jobs"]]
    answer = call("reconcile", env=env)
    assert (answer.exit_code, answer.output) == (0, "")
    assert [job["job_id"] for job in status_of(env)["jobs"]] == before


def assert_status_has_every_field_of_its_contract(env: dict) -> None:
    seen = status_of(env)
    contract = "run mode state reason next version tokens loss min max workers jobs events"
    assert set(contract.split()) <= set(seen)
    assert (seen["run"], seen["mode"], seen["min"], seen["max"]) == ("life", "local", 1, 2)
    assert {"job_id", "role", "slot", "state", "reason"} <= set(seen["jobs"][0])
    assert {"time", "kind"} <= set(seen["events"][0])
    assert seen["reason"]
    workers = wait_until(lambda: status_of(env)["workers"], 30, "a worker registers")
    fields = "slot attempt job_id node pid state version step tokens_per_s last_beat_s"
    assert set(fields.split()) <= set(workers[0])


def status_of(env: dict) -> dict:
    answer = call("status", "life", "--json", env=env)
    assert (answer.exit_code, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


def slots(env: dict) -> list[int]:
    return sorted(job["slot"] for job in status_of(env)["jobs"] if job["role"] == "worker")


def test_a_dry_run_starts_nothing(config, env, tmp_path):
    answer = call("submit", config, "--dry-run", env=env)
    assert answer.exit_code == 0
    assert "would start run quiet on 1..2 GPUs" in answer.stdout
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("more", [
    (), ("--set=run.scheduler=slurm", "--set=plan.step=1s", "--no-try")])
def test_a_dry_run_counts_with_the_speeds_of_the_site(env, more):
    demo, site = ROOT / "etc/demo.toml", ("--set=plan.process=100mb", "--set=plan.filesystem=1gb")
    answer = call("submit", demo, "--dry-run", *site, *more, env=env)
    assert "105 MB/s per process, 1.07 GB/s for the filesystem" in answer.stdout, answer.stderr


def test_a_name_can_be_taken_only_once_and_a_dry_run_says_so_too(config, on_slurm, tmp_path):
    assert call("submit", config, *ON_SLURM, env=on_slurm).exit_code == 0
    there, file = left_behind(tmp_path), tmp_path / "runs" / "quiet" / "run.toml"
    before = file.read_bytes()
    submit = ["submit", config, *ON_SLURM]
    answers = [call(*submit, *dry, env=on_slurm) for dry in ((), ("--dry-run",))]
    assert answers[0].stderr == answers[1].stderr
    assert "run name taken: 'quiet'" in answers[1].stderr
    assert [answer.exit_code for answer in answers] == [2, 2]
    assert (left_behind(tmp_path), file.read_bytes()) == (there, before)


def test_the_command_line_overrides_the_file(config, on_slurm, tmp_path):
    options = ("--min", 2, "--max", 3, "--set=train.batch_size=5")
    call("submit", config, *ON_SLURM, *options, env=on_slurm)
    text = (tmp_path / "runs" / "quiet" / "run.toml").read_text()
    assert "batch_size = 5  # command line" in text
    assert "max = 3  # command line" in text


def test_a_run_that_is_done_ends_submit_wait_with_code_0_and_cannot_be_scaled(env, tmp_path):
    run = 'scheduler = "local"\nmode = "sync"\ncommand = ["true"]'
    config = write_config(tmp_path / "short.toml", run=run, elastic="max = 1")
    answer = call("submit", config, "--wait", env=env)
    assert answer.exit_code == 0, answer.stderr
    answer = call("scale", "short", "--max", 2, env=env)
    assert (answer.exit_code, answer.stderr.split(":")[0]) == (2, "error")


def test_logs_that_are_followed_may_still_be_to_come(make_run, home):
    """Right after submit, which recommends it, no job has begun to write."""
    run = make_run()  # of up to 4 workers
    errors = (home / "errors").open("w+")
    process = subprocess.Popen([ROOT / "bin/elastic", "logs", run.name, "-f"], text=True,
                               stdout=subprocess.PIPE, stderr=errors, env=environment(home),
                               start_new_session=True)
    watchdog = threading.Timer(30 * PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        for role, slot in (("worker", 3), ("master", 0)):
            run.log_path(role, slot).write_text(f"{role} is there\n")
            assert f"{role} is there\n" in iter(process.stdout.readline, "")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30 * PATIENCE) == 0
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    errors.seek(0)
    assert errors.read() == ""
    assert call("logs", run.name, "7", "-f", env={}).exit_code == 1
    run.set_control(mode="sync")
    assert looking.logs_to_come(run) == [run.path / "logs/trainer-0000.log"]
    rank = run.path / "logs/ranks/rank-001.log"
    rank.parent.mkdir()  # by slot 1 status means that rank
    rank.write_text("a step\n")
    assert call("logs", run.name, "1", env={}).stdout == "a step\n"


# ---- a first step of the task, before anything is made

TASKS = """
import torch as t
from tiny_task import Tiny

class Typo(Tiny):
    def loss(self, model, batch):
        return torch.zeros(())

class Elsewhere(Tiny):
    def __init__(self, config):
        raise FileNotFoundError("/scratch/of/the/compute/nodes")

class NeedsGpu(Tiny):
    def loss(self, model, batch):
        raise RuntimeError("Found no NVIDIA driver on your system")

class Big(Typo):
    def model(self):
        return t.nn.Linear(10_000, 10_000)
"""


@pytest.fixture
def task(tmp_path):
    """Writes a run of a task that is named; its file."""
    (tmp_path / "lacks.py").write_text("import missing_here\n")
    (tmp_path / "mine.py").write_text(TASKS)
    (tmp_path / "pace").write_text("0")

    def write(name: str) -> Path:
        return write_config(tmp_path / "t.toml", run=f'scheduler = "local"\ntask = "{name}"',
                            train="epochs = 1", task=f'pace = "{tmp_path}/pace"')

    return write


def test_a_task_that_cannot_train_is_refused_with_its_traceback(task, env, tmp_path):
    answer = call("submit", task("mine:Typo"), env=env)
    assert answer.exit_code == 1
    assert answer.stderr.startswith("error: the task fails:\nTraceback (most recent call last):\n")
    assert 'mine.py", line' in answer.stderr.splitlines()[2]
    assert "NameError: name 'torch' is not defined\n  hint: " in answer.stderr
    dry = call("submit", task("mine:Nobody"), "--dry-run", env=env)
    assert (dry.exit_code, "no class Nobody in" in dry.stderr) == (1, True)
    assert (answer.stdout, dry.stdout, left_behind(tmp_path)) == ("", "", [])


def test_what_only_this_machine_lacks_is_said_and_no_reason_to_refuse(task, env):
    for name, words in (("mine:Elsewhere", "/scratch/of/the/compute/nodes"),
                        ("mine:Big", "100,010,000 parameters are too many")):
        answer = call("submit", task(name), "--dry-run", env=env)
        assert answer.exit_code == 0, answer.stderr
        assert answer.stderr.startswith("warning: no step of the task was tried here: ")
        assert words in answer.stderr
        assert ("cannot be known here: " in answer.stdout) == (name != "mine:Big")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("lacks:Task", Exit.ERROR, "missing_here"),
     ("mine:NeedsGpu", Exit.OK, '"untried": "Found no NVIDIA driver')],
)
def test_a_module_or_a_gpu_may_be_elsewhere(task, monkeypatch, capfd, name, code, words):
    told, said = tried(task(name), monkeypatch, capfd)
    assert (told, words in said) == (code, True), said


def test_a_first_step_may_be_left_out(task, on_slurm, tmp_path):
    answer = call("submit", task("mine:Typo"), *ON_SLURM, "--no-try", env=on_slurm)
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert (tmp_path / "runs" / "t").exists()


def test_a_dry_run_needs_neither_a_slurm_nor_a_site_file_nor_the_space(env, tmp_path):
    config = write_config(tmp_path / "far.toml", run='command = ["sleep", "1"]',
                          checkpoint='min_free = "900tb"')
    answer = call("submit", config, "--dry-run", env={**env, "PATH": "/usr/bin:/bin"})
    assert answer.exit_code == 0, answer.stderr
    warnings = [line for line in answer.stderr.splitlines() if line.startswith("warning: ")]
    seen = ["no space" in warnings[0], "squeue" in warnings[1], "slurm.partition" in warnings[2]]
    assert seen == [True, True, True]
    site = tmp_path / "site.toml"
    site.write_text('slurm = { partition = "gpu" }')
    there = call("submit", config, "--dry-run", env={**env, "ELASTIC_SITE": str(site)})
    assert "slurm.partition" not in there.stderr


# ---- bad input: one clear error, the right code, nothing left behind

BAD = {
    "a run name with a space": (["--name", "a b"], 2, "run.name"),
    "a run name with a semicolon": (["--name", "a;b"], 2, "run.name"),
    "a run name with a quote": (["--name", "a'b"], 2, "run.name"),
    "a run name that climbs": (["--name", "../x"], 2, "run.name"),
    "min above max": (["--min", "3", "--max", "2"], 2, "elastic.min (3) is above elastic.max (2)"),
    "an unknown key": (["--set", "local_sgd.iner_steps=5"], 2, "inner_steps"),
    "an unknown section": (["--set", "locl.steps=5"], 2, "unknown section"),
    "a setting without a value": (["--set", "train.epochs"], 2, "section.key=value"),
    "no inner steps": (["--set", "local_sgd.inner_steps=0"], 2, "inner_steps"),
    "a mode that is not there": (["--mode", "async"], 2, "run.mode"),
    "a scheduler that is not there": (["--scheduler", "pbs"], 2, "run.scheduler"),
    "slurm without a partition": (["--scheduler", "slurm"], 2, "slurm.partition"),
    "a task that is no class": (["--set", "run.task=nowhere"], 2, "package.module:Class"),
    "a task that does not exist": (
        ["--set", "run.task=no.such:Task", "--set", "run.command=[]"], 1,
        "module no.such does not … PYTHONPATH",
    ),
    "no redis-server": (["--set", "redis.server=/no/redis-server"], 1, "no redis-server"),
    "a full disk": (["--set", "checkpoint.min_free=900tb"], 1, "checkpoint.min_free"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_leaves_nothing(case, config, env, tmp_path):
    options, code, words = BAD[case]
    answer = call("submit", config, *options, env=env)
    assert answer.exit_code == code
    assert answer.stderr.startswith("error: ")
    for word in words.split(" … "):
        assert word in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    assert left_behind(tmp_path) == []


def test_a_malformed_or_absent_file_is_named(env, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[run\nname = 3")
    for file in (path, tmp_path / "absent.toml"):
        answer = call("submit", file, env=env)
        assert answer.exit_code == 2
        assert file.name in answer.stderr


def test_a_run_root_that_cannot_be_written_is_named(config, env, tmp_path):
    (tmp_path / "file").write_text("")
    answer = call("submit", config, env={**env, "ELASTIC_RUNS": str(tmp_path / "file")})
    assert answer.exit_code == 1
    assert "cannot write to" in answer.stderr
    assert "ELASTIC_RUNS" in answer.stderr


def test_an_unknown_run_lists_those_there_are(run):
    for command in ("status", "scale", "stop", "logs", "audit", "evaluate", "reconcile"):
        answer = call(command, "nobody", env={})
        assert answer.exit_code == 2
        assert run.name in answer.stderr


def test_of_a_program_in_sync_mode_there_is_the_trainers_log_and_nothing_to_evaluate(make_run):
    """It was told that there is no log yet, and no version: for ever."""
    run = make_run("run.mode=sync", "run.command=['sleep']", "train.epochs=0")
    run.set_control(mode="sync")
    (log := run.path / "logs" / "trainer-0000.log").touch()
    answer = call("logs", run.name, 7, env={})
    assert (answer.exit_code, log.name in answer.stderr) == (1, True), answer.stderr
    answer = call("evaluate", run.name, env={})
    assert (answer.exit_code, "a program of its own" in answer.stderr) == (2, True), answer.stderr


def test_limits_that_make_no_sense_change_nothing(run):
    before = run.control()
    for limits in (["--min", 5], ["--max", 0], ["--min", 2, "--max", 1], ["--min", 0]):
        assert call("scale", run.name, *limits, env={}).exit_code == 2
    assert run.control() == before


def test_a_limit_below_one_worker_is_refused(on_slurm, tmp_path):
    config = write_config(tmp_path / "wide.toml", run='command = ["sleep", "600"]',
                          elastic="min = 8\nmax = 16",
                          slurm='partition = "p"\ngpus_per_worker = 8')
    call("submit", config, env=on_slurm)
    answer = call("scale", "wide", "--min", 4, "--max", 4, env=on_slurm)
    assert (answer.exit_code, "slurm.gpus_per_worker (8)" in answer.stderr) == (2, True)


def test_a_run_is_scaled_by_the_rules_by_which_it_was_submitted(make_run):
    """Of sizes none of which fit, a job would have asked for any number of nodes."""
    run = make_run("run.mode=sync", "elastic.min=4", "elastic.max=8", "sync.sizes=[4, 8]")
    with pytest.raises(UsageError, match=r"run-a cannot have .*\n  sync.sizes .* has none from"):
        steering.scale(run, 5, 7, None)
    control = run.control()
    assert (control.min, control.max) == (1, 4)
    steering.scale(run, 5, 8, None)
    run = make_run("run.mode=sync", "train.max_steps=9", name="run-b")
    run.set_control(mode="sync")
    with pytest.raises(UsageError, match=r"train.max_steps = 9 is for run.mode = \"sync\""):
        steering.scale(run, None, None, "local")


def test_a_run_that_has_odd_limits_already_starts_again(make_run):
    run = make_run("run.mode=sync", "elastic.min=4", "elastic.max=8", "sync.sizes=[4, 8]")
    run.set_control(state="stopped", mode="sync", min=5, max=7)
    steering.scale(run, None, 7, None)
    assert run.control().state == "running"


def test_where_a_terminal_has_no_bars_the_words_are_all_there(make_run, home):
    run = make_run()
    for version in range(3):
        told = {"tokens": 10 * version, "total_tokens": 40, "loss": 3.0 - version}
        run.commits.link(commit_of(version, **told))
    env = environment(home, PYTHONIOENCODING="ascii")
    answer = elastic("status", run.name, env=env)
    assert (answer.returncode, answer.stderr) == (0, "")
    for words in ("???????? 50% version 2", "3.000 ??? 1.000", "mode local"):
        assert words in answer.stdout


def test_a_screen_that_is_watched_has_no_json(env):
    answer = call("status", "--watch", "--json", env=env)
    assert (answer.exit_code, "--watch is for a screen" in answer.stderr) == (2, True)


def test_the_line_for_the_crontab_is_one_where_a_folder_has_a_space(monkeypatch):
    monkeypatch.setattr(installed, "commands", lambda: Path("/home/me/my copy/bin"))
    for name in (home := "ELASTIC_HOME_DIR", "ELASTIC_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    words = ["/home/me/my copy/bin/elastic-reconcile", "--jitter"]
    assert shlex.split(installed.cron_line())[5:] == words
    monkeypatch.setenv(home, "/data/my state")  # which cron does not have
    assert shlex.split(installed.cron_line())[5:] == [f"{home}=/data/my state", *words]


def test_what_jobs_and_cron_are_given_are_whole_paths(tmp_path, monkeypatch):
    """A relative path passed the trial; all jobs failed, which start in another folder. Cron took
    a % for the end of the line."""
    monkeypatch.chdir(tmp_path)
    for name, given, wanted in (
        ("PYTHONPATH", "/lib:src::~/a", f"/lib:{tmp_path}/src::~/a"),
        ("ELASTIC_PYTHON", "py/python3", f"{tmp_path}/py/python3"),
        ("ELASTIC_PYTHON", "python3", "python3"),
        ("SLURM_CONF", "slurm.conf", f"{tmp_path}/slurm.conf"),
        ("ELASTIC_HOME_DIR", "/a:b", "/a:b"), ("ELASTIC_HOME_DIR", "100%", f"{tmp_path}/100%"),
    ):
        monkeypatch.setenv(name, given)
        installed.tidy()
        assert os.environ[name] == wanted
    assert rf"ELASTIC_HOME_DIR={tmp_path}/100\% " in installed.cron_line()


def test_a_terminal_that_says_0_columns_is_shown_something(env):
    assert "no runs" in elastic("status", env=env | {"COLUMNS": "0"}).stdout


def test_a_shell_with_a_cd_of_its_own_starts_the_commands(env):
    """bin/elastic took what it printed for a path."""
    talks = {"BASH_FUNC_cd%%": '() { echo "now in $1"; builtin cd "$1"; }'}
    assert elastic("config", ROOT / "etc/demo.toml", env=env | talks).returncode == 0


@pytest.mark.parametrize("where", ["run file", "ELASTIC_RUNS"])
def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path, env, where):
    """One left half a run behind, the other one a run whose masters all failed."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    config = (folder if where == "run file" else tmp_path) / "tiny.toml"
    config.write_text('[run]\nscheduler = "local"\n[train]\nepochs = 1\n')
    runs = {"ELASTIC_RUNS": os.fspath(folder)} if where == "ELASTIC_RUNS" else {}
    done = elastic("submit", config, "--no-try", env=env | runs)
    assert (done.returncode, "a name that is not UTF-8" in done.stderr) == (2, True), done


def test_a_redis_server_is_named_so_that_masters_find_it(env):
    """They start in another folder than the submission."""
    named = "--set=redis.server=./rs"
    done = elastic("submit", ROOT / "etc/demo.toml", "--dry-run", named, env=env)
    assert (done.returncode, "a whole path" in done.stderr) == (2, True), done


def test_json_is_all_that_evaluate_says_on_standard_output(env, monkeypatch, make_run):
    """Also of a task that prints."""
    def evaluated(_run, _version) -> dict:
        print("validating")
        return {"version": 1}

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    answer = call("evaluate", make_run().name, "--json", env={})
    assert json.loads(answer.stdout) == {"version": 1}


def test_json_has_no_number_that_is_none():
    given = {"a": [1.5, float("nan")], "b": (float("inf"), "nan"), "c": 3}
    assert shared.finite(given) == {"a": [1.5, None], "b": [None, "nan"], "c": 3}


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    shared.put(pipe, b"whole")
    assert reader.communicate()[0] == b"whole"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_to_a_file_is_written_through_and_stays(tmp_path):
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    for data in (b"first", b"then"):
        shared.put(link, data)
        assert (link.is_symlink(), file.is_symlink(), file.read_bytes()) == (True, False, data)


def test_what_goes_to_standard_output_is_added_to_what_it_is(env, tmp_path):
    """Of root, /dev/stdout was replaced for everybody; then, a file was cut at every turn."""
    before, file = os.readlink("/dev/stdout"), tmp_path / "out"
    file.write_text("earlier\n")
    with file.open("a") as out:
        command = [ROOT / "bin/elastic-metrics", "--prometheus", "/dev/stdout"]
        subprocess.run(command, env=env, stdout=out, check=True)
    assert file.read_text().startswith("earlier\n# ")
    assert os.readlink("/dev/stdout") == before


def test_metrics_into_what_is_no_file_leave_its_mode_alone(env, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    answer = call("metrics", "--prometheus", pipe, env=env)
    assert (answer.exit_code, b"# TYPE elastic_" in reader.communicate()[0]) == (0, True)
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o600


def test_faults_without_a_pause_are_refused(run):
    answer = call("chaos", run.name, "--every", "0s", env={})
    assert (answer.exit_code, "--every 0:" in answer.stderr) == (2, True)


# ---- a scheduler that is silent or refuses


def test_a_silent_scheduler_means_try_again_and_leaves_nothing(config, env, tmp_path):
    path = fake_slurm(tmp_path / "slurm", squeue="echo 'slurm_load_jobs error' >&2; exit 1")
    answer = call("submit", config, *ON_SLURM, env={**env, "PATH": path})
    assert answer.exit_code == 75
    assert "squeue" in answer.stderr
    assert left_behind(tmp_path) == []


def test_what_a_silent_scheduler_leaves_undone_is_noted_and_exits_75(config, env, tmp_path):
    silent = tmp_path / "silent"
    script = f"[ -e '{silent}' ] || exit 0; echo 'slurm_load_jobs error' >&2; exit 1"
    path = fake_slurm(tmp_path / "slurm", squeue=script, scancel="exit 0", sbatch="echo 7")
    env = {**env, "PATH": path}
    assert call("submit", config, *ON_SLURM, env=env).exit_code == 0
    silent.touch()
    for command, noted in (("scale quiet --max 1", '"max": 1'), ("stop quiet", '"stopped"')):
        answer = call(*command.split(), env=env)
        assert answer.exit_code == 75, answer
        assert answer.stderr.startswith("run quiet: noted, and left to the next pass: squeue ")
        assert "squeue" not in answer.stdout
        assert noted in (tmp_path / "runs" / "quiet" / "control.json").read_text()
    silent.unlink()
    assert call("stop", "quiet", env=env).exit_code == 0


def test_what_another_pass_may_not_know_yet_is_noted_and_exits_75(config, on_slurm, tmp_path):
    """It exited 0, as if the jobs had been told."""
    env = on_slurm
    assert call("submit", config, *ON_SLURM, env=env).exit_code == 0
    with open(tmp_path / "runs" / "quiet" / "reconcile.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        answer = call("stop", "quiet", env=env)
    assert answer.exit_code == 75
    assert "noted, and left to the next pass: quiet: another pass is at work" in answer.stderr


def test_a_job_that_is_refused_undoes_the_run(config, env, tmp_path):
    refusal = "sbatch: error: invalid partition specified: p"
    path = fake_slurm(
        tmp_path / "slurm",
        squeue="exit 0",
        scancel="exit 0",
        sbatch=f"echo '{refusal}' >&2; exit 1",
    )
    answer = call("submit", config, *ON_SLURM, env={**env, "PATH": path})
    assert answer.exit_code == 1
    assert "invalid partition" in answer.stderr
    assert left_behind(tmp_path) == []


# ---- configuration


def test_config_prints_values_with_their_origins(config, env):
    rows = json.loads(
        call("config", config, "--set", "train.epochs=0", "--json", env=env).stdout
    )
    by_key = {row["key"]: row for row in rows}
    assert by_key["train.epochs"]["origin"] == "command line"
    assert by_key["elastic.max"]["origin"].endswith("quiet.toml")
    assert by_key["health.lease"]["origin"] == "default"


def test_config_prints_a_file_that_says_the_same(config, env, tmp_path):
    printed = call("config", config, "--set", "run.seed=3", env=env).stdout
    assert "seed = 3  # command line" in printed.splitlines()
    (tmp_path / "printed.toml").write_text(printed)
    assert load(tmp_path / "printed.toml") == load(config, ["run.seed=3"])


# ---- documentation


def test_the_readme_names_every_command_file_and_folder():
    text = (ROOT / "README.md").read_text()
    listing = text.partition("\n## Files\n")[2]
    patterns = ("bin/elastic*", "sbatch/*", "etc/*", "lib/elastic/*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in paths}
    names |= {"bin/", "sbatch/", "etc/", "lib/elastic/", "docs/", "tests/"}
    listed = {word.strip(",;:`()") for word in listing.split()}
    assert sorted(names - listed) == []
    assert [name for name in COMMANDS + LAB if f"`elastic-{name}" not in text] == []


def test_the_readme_lists_the_folders_in_the_order_in_which_they_import():
    listing = (ROOT / "README.md").read_text().partition("    lib/elastic/\n")[2]
    listed = re.findall(r"^ {6}([a-z/]+)/ ", listing.partition("\n    docs/")[0], re.M)
    assert listed == [folder for folder in FOLDERS if folder != "."]


def test_every_make_target_is_described():
    command = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", "help"]  # not as a part of make
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    described = {line.split()[0] for line in answer.stdout.split("\n\n")[0].splitlines()}
    makefile = (ROOT / "Makefile").read_text().splitlines()
    phony = [line.split()[1:] for line in makefile if line.startswith(".PHONY:")]
    assert described == set(sum(phony, []))
