"""What is wrong is said at once, clearly, and nothing is left behind."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import start_redis
from elastic.base import config as configuration, durable
from elastic.base.errors import ElasticError, UsageError
from elastic.base.signals import Notice
from elastic.local.master.master import Master
from elastic.local.store import Useless
from elastic.people import status, submission
from elastic.run.rundir import RunDir
from helpers import ROOT, elastic_here, environment, wait_until
from running import kill_all, members, running


@pytest.fixture
def home(home: Path) -> Iterator[Path]:
    yield home
    kill_all(home)


# ---- Redis --------------------------------------------------------------------------------------


def test_a_server_that_cannot_do_what_is_asked_of_it_ends_its_master(make_run, tmp_path):
    """One that has served is replaced; one that never could would be replaced for ever."""
    server = tmp_path / "redis-server"
    server.write_text("""#!/bin/bash
        if [ "${1:-}" = --version ]; then exec redis-server --version; fi
        exec redis-server - < <(cat; echo 'rename-command hset ""')
    """)
    server.chmod(0o755)
    run = make_run(f"redis.server={server}")
    master = Master(run, Notice())
    try:
        with pytest.raises(Useless, match="of no use"):
            master.take_over()
    finally:
        master.close()
    assert not [event for event in run.events() if event["kind"] in ("redis-lost", "master")]


def test_a_wrong_password_fails_the_run_and_is_not_repeated(home: Path):
    server = start_redis(home)
    port = server.endpoint.port
    try:
        settings = {"redis.url": f"redis://:guessed@127.0.0.1:{port}/0",
                    "elastic.max": 1, "elastic.max_failures": 1}
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
    """Also a second run of that name, once the first one's folder is gone: its keys are there.
    Nor are spaces and quotes in the name of a folder any trouble."""
    folder = home / "it's a \"folder\"; really"
    folder.mkdir()
    server = start_redis(home)
    settings = {"redis.url": f"redis://:{server.password}@127.0.0.1:{server.endpoint.port}/0",
                "elastic.max": 1}
    try:
        with running(folder, settings, samples=300, step_s=0.1) as run:
            run.until(lambda: run.version >= 2, 60, "two versions")
            run.kill("master")
            run.versions(1)
            run.finish()
            shutil.rmtree(run.run.path)
        with running(folder, settings, samples=40) as run:
            run.finish()
    finally:
        server.process.kill()
        server.process.wait()


# ---- the user's code ----------------------------------------------------------------------------


def test_a_task_that_raises_stops_the_run_with_its_traceback(home: Path):
    settings = {"elastic.max": 1, "elastic.max_failures": 1}
    with running(home, settings, raise_at_step=5, step_s=0.6) as run:
        failed = run.until_failed(200)
        seen = status.observe(run.run)
        assert (seen["state"], seen["reason"].startswith(failed["reason"])) == ("failed", True)
        assert "worker 0 failed 1 times in a row" in seen["reason"]
        for words in ("RuntimeError: planted: step 5", "tiny_task.py", "Traceback"):
            assert words in failed["detail"]
        assert run.jobs() == {}
        assert members(home) == []
        run.audit()


NO_MODULE = "import torch\n\nimport no_such_module_at_all\n"
TYPO = """
from tiny_task import Tiny

class Task(Tiny):
    def loss(self, model, batch):
        return torch.zeros(())
"""


@pytest.mark.parametrize(("mode", "source", "error", "place"), [
    ("local", NO_MODULE, "task module broken does not import", "broken.py:3"),
    ("sync", TYPO, "NameError: name 'torch' is not defined", "broken.py"),
], ids=["local", "sync"])
def test_the_same_exception_twice_before_the_first_step_stops_the_run(
    home: Path, mode: str, source: str, error: str, place: str
):
    (home / "broken.py").write_text(source)
    settings = {"run.task": "broken:Task", "run.mode": mode, "elastic.max": 1,
                "elastic.backoff": "30s"}
    with running(home, settings) as run:
        run.until(lambda: run.events("restart"), 60, "a restart")
        (first, *_) = run.events("restart")
        assert error in first["reason"]
        wait_until(lambda: error in status.observe(run.run)["summary"], 60, "it is told")
        failed = run.until_failed(120)
        assert error in failed["reason"]
        assert "twice at its start" in failed["reason"]
        assert place in failed["detail"]
        assert error in status.observe(run.run)["summary"]
        assert max(event["attempt"] for event in run.events("start")) == 2
        assert run.jobs() == {}


ROUNDED = """
import torch
from tiny_task import Normed

class Task(Normed):
    def model(self):
        net = super().model()
        net.spare = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        return net
"""


def test_a_sample_that_is_not_a_number_is_skipped_and_weighs_nothing(home: Path):
    """It was merged like the others, and drew the mean towards where it began. Its trace in
    BatchNorm's statistics made all deltas that followed no numbers."""
    (home / "rounded.py").write_text(ROUNDED)
    settings = {"run.task": "rounded:Task", "elastic.max": 1}
    with running(home, settings, samples=80, nan_sample=33) as run:
        run.finish()
        deltas = [delta for commit in run.commits() for delta in commit.deltas]
        warned = " ".join(event["reason"] for event in run.events("warning"))
    assert "left out" in warned
    assert_told_of_rounding("spare", warned)
    lacking = [sum(stop - start for _, start, stop in each.samples) - each.tokens
               for each in deltas]
    batch = run.config.train.batch_size
    assert sorted(lacking)[-2:] == [0, batch - 1], "one token is the least of a step"


def test_parameters_that_round_small_steps_to_nothing_are_named(home: Path):
    settings = {"run.task": "tiny_task:Halved", "run.mode": "sync", "elastic.max": 1}
    with running(home, settings, samples=20, step_s=0) as run:
        run.until(run.run.done, 60, "the end of the run")
        assert_told_of_rounding("layers.0.weight", str(run.events("warning")))


def assert_told_of_rounding(name: str, warned: str) -> None:
    """Such parameters, as from_pretrained() may load them, hardly train: at a learning rate of
    1e-5, 85 to 98 % had not moved after 100 steps of AdamW."""
    assert re.search(rf"\b{name}.* have 16 bits, .* train them in float32", warned), warned


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
def test_a_read_only_run_root_is_refused_before_anything_is_made(small_disk: Path, make_config):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ElasticError, match=f"cannot write to {small_disk}") as caught:
        submission.check(make_config(), small_disk / "runs")
    assert "ELASTIC_RUNS" in caught.value.hint


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [(["{python}", "there.py", "{steps}"], 2, "run.command says {steps}"),
     (["bash", "-c", "echo ${ckpt}"], 2, "run.command says ${ckpt}"),
     (["no-such-program", "there.py"], 1, "no program 'no-such-program'"),
     (["./missing"], 1, "no program './missing'"),
     (["{python}", "missing.py"], 1, "no program 'missing.py'"),
     (["{python}", "there.py", "--out={checkpoints}", "{resume?--resume}"], 0, "would start")],
)
def test_a_command_that_cannot_be_run_is_refused_at_submission(tmp_path, command, code, told):
    (tmp_path / "there.py").touch()
    text = f'[run]\nmode = "sync"\nscheduler = "local"\ncommand = {json.dumps(command)}\n'
    (tmp_path / "own.toml").write_text(text)  # how long to train is the program's own affair
    done = elastic_here("submit", tmp_path / "own.toml", "--dry-run", env=environment(tmp_path))
    assert (done.exit_code, told in done.output) == (code, True), done.output


def test_a_pattern_of_checkpoints_stays_below_their_folder(tmp_path):
    for pattern in ("/scratch/*", "../x*", "**/x"):
        with pytest.raises(UsageError, match="sync.resume"):
            configuration.load(ROOT / "etc" / "demo.toml", [f"sync.resume={pattern}"])
