"""A plain PyTorch loop around elastic.LocalSGD, run by `run.command`."""

import shlex
import sys
from pathlib import Path

import pytest

from helpers import ROOT, elastic, environment
from running import TESTS, running

EXAMPLES = ROOT / "etc" / "examples"
SCRIPT = TESTS / "own_loop.py"


def test_a_loop_of_ones_own_trains_survives_a_kill_and_leaves_on_notice(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pace"), "4800"]
    settings = {"run.command": command, "elastic.max": 2, "local_sgd.inner_steps": 10}
    with running(tmp_path, settings, step_s=0.1) as run:
        run.workers(2)
        run.versions(2)
        run.pace(1.0)  # the other one is not to finish the run meanwhile
        before = {*run.pids("own_loop")}
        run.kill("own_loop")

        def are_others() -> bool:
            now = {*run.pids("own_loop")}
            return len(now) == 2 and now != before

        run.until(are_others, 30, "the killed one is started again")
        run.workers(2)
        job = run.jobs()["worker", 1]
        run.scheduler.preempt(job.job_id)
        record = run.ended(job.job_id)
        assert (record["outcome"], record["code"]) == ("yielded", 0)
        run.finish()
        commits = run.commits()
    assert commits[-1].tokens == 4800
    assert commits[-1].loss < commits[1].loss / 4


@pytest.mark.parametrize(
    ("script", "batch", "bound"), [("plain_loop/train.py", 8, 0.5), ("hf_loop/train.py", 4, 0.6)]
)
def test_the_examples_learn_through_a_kill(tmp_path: Path, script: str, batch: int, bound: float):
    """`bound`: of the first version's loss that is left."""
    settings = {"run.command": [sys.executable, str(EXAMPLES / script)], "train.epochs": 100,
                "train.batch_size": batch, "elastic.max": 2, "local_sgd.inner_steps": 10,
                "local_sgd.compression": "int8"}  # fmt: skip
    with running(tmp_path, settings) as run:
        run.workers(2)
        run.versions(2)
        killed, first = run.kill(script), run.commits()[1].loss
        run.until(lambda: len({*run.pids(script)} - {killed}) == 2, 30, "it is started again")
        run.workers(2)
        run.versions(2)
        run.until(lambda: run.commits()[-1].loss < bound * first, 100, "it has learnt")
        run.audit()


# As `conda run` does: no descriptor is passed on, and a notice ends it.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


HANDLES = """
import signal, sys
sys.path.append(sys.argv.pop(1))
import elastic, own_loop

class Late(elastic.LocalSGD):
    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: print("it is mine", flush=True))
        return super().__enter__()

elastic.LocalSGD = Late
own_loop.main(*sys.argv[1:])
"""
HANGS = """
import os, time
fd = os.open(os.environ["ELASTIC_PROGRESS"], os.O_WRONLY)
os.write(fd, b'{"state": "training"}\\n')

def hangs_here():
    time.sleep(3600)

hangs_here()
"""


def test_a_loop_behind_a_launcher_is_seen(tmp_path: Path):
    """What it reported went into whichever file of its own had the number."""
    command = [sys.executable, "-c", LAUNCHER, sys.executable, str(SCRIPT)]
    settings = {"run.command": [*command, str(tmp_path / "pace"), "400"], "elastic.max": 1}
    with running(tmp_path, settings, step_s=0.3) as run:
        run.workers(1)
        run.until(lambda: run.slots()[0].step > 0, 30, "its progress")
        run.finish()


def test_a_loop_delivers_though_its_launchers_die_of_the_notice(tmp_path: Path):
    """The agent took the end of `bash train.sh` for that of the loop, which trained on."""
    words = [sys.executable, "-c", LAUNCHER, sys.executable, str(SCRIPT), str(tmp_path / "pace")]
    command = ["bash", "-c", f"{shlex.join(words)} 100000; true"]
    settings = {"run.command": command, "elastic.max": 1, "local_sgd.inner_steps": 1000}
    with running(tmp_path, settings, step_s=0.3) as run:
        run.until(lambda: run.slots()[0].step > 1, 60, "it trains")
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id, 30)
        record = run.ended(job.job_id)
        assert (record["outcome"], record["reason"]) == ("yielded", "notice: SIGTERM")
        delivered = run.until(lambda: [e["steps"] for e in run.events("delta")], 30, "its delta")
        assert sum(delivered) == record["steps"] > 1


def test_a_handler_of_the_programs_own_does_not_keep_the_notice_from_its_loop(tmp_path: Path):
    """It trained on until the kill, and its steps were lost."""
    (tmp_path / "train.py").write_text(HANDLES)
    command = [sys.executable, "train.py", str(SCRIPT.parent), str(tmp_path / "pace"), "100000"]
    settings = {"run.command": command, "elastic.max": 1, "local_sgd.inner_steps": 1000}
    with running(tmp_path, settings, step_s=0.3) as run:
        run.until(lambda: run.slots()[0].step > 1, 60, "it trains")
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id, 30)
        assert run.ended(job.job_id)["reason"] == "notice: SIGTERM"
        run.until(lambda: run.events("delta"), 30, "its delta")


def test_what_hangs_behind_a_launcher_prints_its_stacks_and_is_killed(tmp_path: Path):
    """The launcher alone was ended, and two attempts were on one GPU."""
    (tmp_path / "hang.py").write_text(HANGS)
    command = ["bash", "-c", f"{sys.executable} {tmp_path}/hang.py; true"]
    settings = {"run.command": command, "elastic.max": 1, "health.hang_timeout": "1s"}
    with running(tmp_path, settings) as run:
        run.until(lambda: len(run.events("start")) > 3, 60, "it is started again")
        assert len(run.pids("hang.py")) <= 2  # with its shell
        assert "in hangs_here" in run.run.log_path("worker", 0).read_text()


def test_a_loop_that_breaks_off_fails_the_run_and_says_so(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pace"), "1200", "3"]
    settings = {"run.command": command, "elastic.max_failures": 1, "elastic.backoff": "0.1s"}
    with running(tmp_path, settings) as run:
        failed = run.until_failed(60)
    assert "left before the run was over" in failed["reason"]


# What a worker says that hears of its notice before there is a version.
YIELD = "lambda *_: (os.write(fd, b'{\"end\": \"yielded\"}\\n'), os._exit(0))"


@pytest.mark.parametrize("at_a_notice", ["signal.SIG_DFL", "signal.SIG_IGN", YIELD])
def test_a_program_that_never_joins_its_run_ends_with_it(tmp_path: Path, at_a_notice: str):
    """It stayed for health.master_wait, and elastic-stop --wait with it."""
    program = ("import os, signal, sys, time",
               "fd = os.open(os.environ['ELASTIC_PROGRESS'], os.O_WRONLY)",
               f"signal.signal(signal.SIGTERM, {at_a_notice})",
               "print('a stranger is here', flush=True)", "time.sleep(3600)")  # fmt: skip
    settings = {"run.command": [sys.executable, "-c", "\n".join(program)], "elastic.max": 1,
                "health.master_wait": "1h", "local_scheduler.grace": "1s"}  # fmt: skip
    with running(tmp_path, settings) as run:
        log = run.run.log_path("worker", 0)
        run.until(lambda: log.exists() and "a stranger" in log.read_text(), 60, "it has started")
        job = run.jobs()["worker", 0]
        stopped = elastic("stop", run.run.path, "--wait", env=environment(tmp_path), timeout_s=120)
        assert stopped.returncode == 0, stopped.stderr
        assert run.ended(job.job_id)["outcome"] == "stopped"
