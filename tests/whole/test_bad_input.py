"""What is wrong is said at once, clearly, and nothing is left behind."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import start_redis
from elastic.base import config as configuration, durable
from elastic.base.errors import UsageError
from elastic.people import status
from elastic.run.rundir import RunDir
from helpers import ROOT, elastic, environment, wait_until
from running import SETTINGS, TESTS, kill_all, members, running, toml


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def submit(home: Path, *arguments: str, text: str = "", env: dict | None = None, **settings):
    """Submit a file of `text` or `settings` and return the finished command."""
    config = home / "bad.toml"
    named = {key.replace("__", "."): value for key, value in settings.items()}
    config.write_text(text or "\n".join(toml(SETTINGS | {"task.pace": "pace"} | named)))
    env = environment(home, PYTHONPATH=str(TESTS)) | (env or {})
    return elastic("submit", config, *arguments, env=env)


def assert_clean(home: Path, *others: str) -> None:
    """No process, no registered run, no run directory."""
    assert members(home) == []
    assert not list((home / "registry" / "runs").glob("*"))
    assert not list((home / "runs").glob("*"))


WRONG = {
    "malformed TOML": ({"text": "[run\nname = 'x'"}, 2, ["bad.toml", "line 1"]),
    "an unknown key": ({"local_sgd__inner_step": 5}, 2, ["inner_step", "inner_steps"]),
    "an unknown section": ({"text": "[runn]\nname = 'x'"}, 2, ["runn", "run"]),
    "a wrong type": ({"elastic__max": "many"}, 2, ["elastic.max", "many"]),
    "min above max": ({"elastic__min": 3, "elastic__max": 2}, 2, ["min", "max"]),
    "no steps in a round": ({"local_sgd__inner_steps": 0}, 2, ["inner_steps"]),
    "no partition": ({"run__scheduler": "slurm"}, 2, ["slurm.partition"]),
    "no redis-server": ({"redis__server": "/nonexistent"}, 1, ["redis-server", "/nonexistent"]),
    "no such module": ({"run__task": "not_there:Task"}, 1, ["not_there", "PYTHONPATH"]),
    "no class": ({"run__task": "tiny_task"}, 2, ["run.task", "module:Class"]),
    "too little space": ({"checkpoint__min_free": "1000000gb"}, 1, ["min_free"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_run_file_is_refused_before_anything_is_made(home: Path, case: str):
    settings, code, words = WRONG[case]
    done = submit(home, **settings)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert_clean(home)


NAMES = ["two words", "a'b", 'a"b', "a;b", "$(a)", "../up", "-x", "a\nb", "x" * 80]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_plain_word_is_refused(home: Path, name: str):
    done = submit(home, f"--name={name}")
    assert done.returncode == 2, done.stderr
    assert "run.name" in done.stderr
    assert "Traceback" not in done.stderr
    assert_clean(home)


def test_a_run_file_in_a_folder_with_spaces_and_quotes_is_no_trouble(home: Path):
    folder = home / "it's a \"folder\"; really"
    folder.mkdir()
    with running(folder, samples=40) as run:
        run.finish()


def test_a_name_that_is_taken_is_refused_and_the_run_that_has_it_is_left_alone(home: Path):
    with running(home, samples=100) as run:
        before = (run.run.path / "run.toml").read_bytes()
        again = submit(home, "--name", "tiny")
        assert again.returncode == 2
        assert "tiny" in again.stderr
        assert (run.run.path / "run.toml").read_bytes() == before


def test_a_controller_that_does_not_answer_means_try_again(home: Path):
    """Client commands that fail as they do without slurm.conf."""
    commands = home / "commands"
    commands.mkdir()
    words = "error: Could not establish a configuration source"
    for name in ("squeue", "sbatch", "scancel", "scontrol", "sacct"):
        path = commands / name
        path.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        path.chmod(0o755)
    env = {"PATH": f"{commands}:{os.environ['PATH']}"}
    done = submit(home, env=env, run__scheduler="slurm", slurm__partition="p")
    assert done.returncode == 75, (done.returncode, done.stderr)
    assert "squeue" in done.stderr
    assert_clean(home)


# ---- Redis --------------------------------------------------------------------------------------


def test_a_port_that_is_taken_fails_the_run_with_the_servers_own_words(home: Path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = {"redis.port": taken.getsockname()[1], "elastic.max_failures": 1}
        with running(home, settings) as run:
            failed = run.until_failed(60)
    assert "redis-server did not start" in failed["reason"]
    assert "in use" in failed["reason"]
    assert members(home) == []


def test_a_server_that_cannot_do_what_is_asked_of_it_fails_the_run(home: Path):
    """One that has served is replaced; one that never could would be replaced for ever."""
    server = home / "redis-server"
    server.write_text("""#!/bin/bash
        if [ "${1:-}" = --version ]; then exec redis-server --version; fi
        exec redis-server - < <(cat; echo 'rename-command hset ""')
    """)
    server.chmod(0o755)
    with running(home, {"redis.server": str(server), "elastic.max_failures": 1}) as run:
        failed = run.until_failed(60)
        assert run.events("redis-lost") == []
    assert "of no use" in failed["reason"]


def test_a_wrong_password_fails_the_run_and_is_not_repeated(home: Path):
    server = start_redis(home)
    port = server.endpoint.port
    try:
        settings = {"redis.url": f"redis://:guessed@127.0.0.1:{port}/0", "elastic.max_failures": 1}
        with running(home, settings) as run:
            failed = run.until_failed(60)
            seen = str(status.observe(run.run)) + run.story()
    finally:
        server.process.kill()
        server.process.wait()
    assert "refused the password" in failed["reason"]
    assert f"127.0.0.1:{port}" in failed["reason"]
    assert "guessed" not in seen


def test_a_server_that_the_site_provides_serves_as_well(home: Path):
    """Also a second run of that name, once the first one's folder is gone: its keys are there."""
    server = start_redis(home)
    settings = {"redis.url": f"redis://:{server.password}@127.0.0.1:{server.endpoint.port}/0"}
    try:
        with running(home, settings, samples=400, step_s=0.2) as run:
            run.until(lambda: run.version >= 2, 60, "two versions")
            run.kill("master")
            run.versions(1)
            run.finish()
            shutil.rmtree(run.run.path)
        with running(home, settings, samples=80) as run:
            run.finish()
    finally:
        server.process.kill()
        server.process.wait()


# ---- the user's code ----------------------------------------------------------------------------


def test_a_task_that_raises_stops_the_run_with_its_traceback(home: Path):
    with running(home, {"elastic.max_failures": 1}, raise_at_step=5, step_s=0.6) as run:
        failed = run.until_failed(200)
        seen = status.observe(run.run)
        assert (seen["state"], seen["reason"].startswith(failed["reason"])) == ("failed", True)
        assert "worker 0 failed 1 times in a row" in seen["reason"]
        for words in ("RuntimeError: planted: step 5", "tiny_task.py", "Traceback"):
            assert words in failed["detail"]
        assert run.jobs() == {}
        assert members(home) == []
        run.audit()


def test_a_task_that_does_not_import_stops_the_run_and_names_the_line(home: Path):
    (home / "broken_task.py").write_text("import torch\n\nimport no_such_module_at_all\n")
    settings = {"run.task": "broken_task:Task", "elastic.max_failures": 1}
    with running(home, settings) as run:
        failed = run.until_failed(90)
    assert "no_such_module_at_all" in failed["detail"]
    assert "broken_task.py:3" in failed["detail"]


TYPO = """
from tiny_task import Tiny

class Typo(Tiny):
    def loss(self, model, batch):
        return torch.zeros(())
"""
NAME_ERROR = "NameError: name 'torch' is not defined"


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_the_same_exception_twice_before_the_first_step_stops_the_run(home: Path, mode: str):
    (home / "typo_task.py").write_text(TYPO)
    settings = {"run.task": "typo_task:Typo", "run.mode": mode, "elastic.max": 2,
                "elastic.backoff": "30s", "local_scheduler.gpus": 2}  # fmt: skip
    with running(home, settings) as run:
        run.until(lambda: run.events("restart"), 60, "a restart")
        (first, *_) = run.events("restart")
        assert first["reason"].startswith(NAME_ERROR)
        wait_until(lambda: NAME_ERROR in status.observe(run.run)["summary"], 60, "it is told")
        failed = run.until_failed(120)
        assert NAME_ERROR in failed["reason"]
        assert "twice at its start" in failed["reason"]
        assert failed["detail"].rstrip().endswith(NAME_ERROR) or mode == "sync"
        seen = status.observe(run.run)
        assert NAME_ERROR in seen["summary"]
        assert max(event["attempt"] for event in run.events("start")) == 2
        assert run.jobs() == {}


def test_a_sample_that_is_not_a_number_is_skipped_and_weighs_nothing(home: Path):
    """It was merged like the others, and drew the mean towards where it began. Its trace in
    BatchNorm's statistics made all deltas that followed no numbers."""
    with running(home, {"run.task": "tiny_task:Normed"}, samples=400, nan_sample=123) as run:
        run.finish()
        deltas = [delta for commit in run.commits() for delta in commit.deltas]
        assert "left out" in " ".join(event["reason"] for event in run.events("warning"))
    lacking = [sum(stop - start for _, start, stop in each.samples) - each.tokens
               for each in deltas]  # fmt: skip
    batch = run.config.train.batch_size
    assert sorted(lacking)[-2:] == [0, batch - 1], "one token is the least of a step"


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_parameters_that_round_small_steps_to_nothing_are_named(home: Path, mode):
    """As from_pretrained() may load them: at a learning rate of 1e-5, 85 to 98 % of such weights
    had not moved after 100 steps of AdamW."""
    settings = {"run.task": "tiny_task:Halved", "run.mode": mode}
    with running(home, settings, samples=40, step_s=0) as run:
        run.until(run.run.done, 60, "the end of the run")
        reasons = {event["reason"] for event in run.events("warning")}
    assert any("layers.0.weight" in reason and "float32" in reason for reason in reasons)


# ---- disks --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a tmpfs")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        yield folder
    finally:
        kill_all(tmp_path)
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """A file that takes all space but so much."""
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while (free := shutil.disk_usage(disk).free) > leave_bytes or not leave_bytes:
            file.write(bytes(max(1, min(1 << 16, free - leave_bytes))))
    return path


@pytest.mark.root
def test_a_nearly_full_disk_stops_the_clock_and_not_the_run(small_disk: Path):
    """A full one: test_limits.py."""
    with running(small_disk, {"elastic.max": 2}, samples=600, step_s=0.2) as run:
        run.workers(2)
        run.versions(1)
        trainers = run.pids("trainer")
        filler = fill(small_disk, leave_bytes=500_000)
        waits = "no space on the filesystem of"
        run.until(lambda: waits in status.observe(run.run)["reason"], 30, "status says why")
        version = run.version
        still = {("waiting", "waiting"), ("blocked", "blocked"), ("waiting", "blocked"),
                 ("blocked", "waiting")}  # fmt: skip
        why = "both have delivered, and a commit is due, or they cannot even deliver"
        run.until(lambda: tuple(s.state for s in run.slots().values()) in still, 30, why)
        assert run.version <= version + 1  # which had its room before
        filler.unlink()
        run.versions(2)
        assert run.pids("trainer") == trainers
        run.finish()
    assert run.events("fail") == []


@pytest.mark.root
def test_a_disk_that_turns_read_only_is_waited_for_and_named(small_disk: Path):
    """So the kernel mounts one anew that has failed: every worker died of it, delta and all."""
    path, told = small_disk / "delta", []

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    def tell(error: Exception) -> None:
        told.append((str(error), RunDir(small_disk).shortage(1)))
        remount("rw")

    remount("ro")
    durable.until_written(lambda: durable.write_atomic(path, b"delta"), lambda: False, tell)
    assert path.read_bytes() == b"delta"
    ((refused, shown),) = told
    assert f"Read-only file system: '{path}'" in refused
    assert shown == f"the filesystem of {small_disk} is read-only here: ask its admin"
    assert RunDir(small_disk).shortage(1) == ""


@pytest.mark.root
def test_a_read_only_run_root_is_refused_before_anything_is_made(small_disk: Path, home: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = submit(home, env={"ELASTIC_RUNS": str(small_disk / "runs")})
    assert done.returncode == 1, done.stderr
    assert f"cannot write to {small_disk}" in done.stderr
    assert "ELASTIC_RUNS" in done.stderr
    assert_clean(home)


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [(["{python}", "there.py", "{steps}"], 2, "run.command says {steps}"),
     (["bash", "-c", "echo ${ckpt}"], 2, "run.command says ${ckpt}"),
     (["no-such-program", "there.py"], 1, "no program 'no-such-program'"),
     (["./missing"], 1, "no program './missing'"),
     (["{python}", "missing.py"], 1, "no program 'missing.py'"),
     (["{python}", "there.py", "--out={checkpoints}", "{resume?--resume}"], 0, "would start")],
)  # fmt: skip
def test_a_command_that_cannot_be_run_is_refused_at_submission(tmp_path, command, code, told):
    (tmp_path / "there.py").touch()
    text = f'[run]\nmode = "sync"\nscheduler = "local"\ncommand = {json.dumps(command)}\n'
    (tmp_path / "own.toml").write_text(text)  # how long to train is the program's own affair
    env = environment(tmp_path)
    done = elastic("submit", tmp_path / "own.toml", "--dry-run", env=env)
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True), done
    assert "Traceback" not in done.stderr


def test_a_pattern_of_checkpoints_stays_below_their_folder(tmp_path):
    for pattern in ("/scratch/*", "../x*", "**/x"):
        with pytest.raises(UsageError, match="sync.resume"):
            configuration.load(ROOT / "etc" / "demo.toml", [f"sync.resume={pattern}"])
