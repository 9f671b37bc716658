"""A plain PyTorch loop around elastic.LocalSGD, run by `run.command`."""

import shlex
import sys
from pathlib import Path

import pytest

from helpers import ROOT, elastic, environment
from running import TESTS, running

EXAMPLES = ROOT / "etc" / "examples"
SCRIPT = TESTS / "own_loop.py"


@pytest.mark.parametrize(
    ("script", "batch", "bound"), [("plain_loop/train.py", 8, 0.5), ("hf_loop/train.py", 4, 0.6)]
)
def test_the_examples_learn_through_a_kill(tmp_path: Path, script: str, batch: int, bound: float):
    """`bound`: of the first version's loss that is left."""
    settings = {"run.command": [sys.executable, str(EXAMPLES / script)], "train.epochs": 100,
                "train.batch_size": batch, "elastic.max": 1, "local_sgd.inner_steps": 10,
                "local_sgd.compression": "int8", "train.warmup_fraction": 0.0}
    with running(tmp_path, settings) as run:
        run.versions(2, 60)
        killed, first = run.kill(script), run.run.commits.of(1).loss
        run.until(lambda: {*run.pids(script)} - {killed}, 30, "it is started again")
        run.versions(2)
        run.until(lambda: run.run.commits.newest().loss < bound * first, 100, "it has learnt")
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


def test_a_loop_delivers_though_its_launchers_die_of_the_notice_and_it_handles_it(tmp_path: Path):
    """The agent took the end of `bash train.sh` for that of the loop, which trained on; and so it
    did where a handler of the program's own kept the notice from it. What a loop behind a launcher
    reports went into whichever file of its own had the number."""
    (tmp_path / "train.py").write_text(HANDLES)
    words = [sys.executable, "-c", LAUNCHER, sys.executable, "train.py", str(SCRIPT.parent)]
    command = ["bash", "-c", f"{shlex.join([*words, str(tmp_path / 'pace')])} 100000; true"]
    settings = {"run.command": command, "elastic.max": 1, "local_sgd.inner_steps": 1000}
    with running(tmp_path, settings, step_s=1.0) as run:
        run.until(lambda: run.slots()[0].step > 1, 60, "it trains")
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id, 30)
        record = run.ended(job.job_id)
        assert (record["outcome"], record["reason"]) == ("yielded", "notice: SIGTERM")
        delivered = run.until(lambda: [e["steps"] for e in run.events("delta")], 30, "its delta")
        assert sum(delivered) == record["steps"] > 1


def test_what_hangs_behind_a_launcher_prints_its_stacks_and_is_killed(tmp_path: Path):
    """The launcher alone was ended, and two attempts were on one GPU."""
    (tmp_path / "hang.py").write_text(HANGS)
    command = ["bash", "-c", f"{sys.executable} {tmp_path}/hang.py; true"]
    settings = {"run.command": command, "elastic.max": 1, "health.hang_timeout": "1s"}
    with running(tmp_path, settings) as run:
        run.until(lambda: len(run.events("start")) > 3, 60, "it is started again")
        assert len(run.pids("hang.py")) <= 2  # with its shell
        assert "in hangs_here" in run.run.log_path("worker", 0).read_text()


# By slot: what ends it, what does not, and what a worker says that hears of its notice before there
# is a version.
STRANGER = """
import os, signal, time
fd = os.open(os.environ["ELASTIC_PROGRESS"], os.O_WRONLY)
leave = lambda *_: (os.write(fd, b'{"end": "yielded"}\\n'), os._exit(0))
at_a_notice = [signal.SIG_DFL, signal.SIG_IGN, leave][int(os.environ["ELASTIC_SLOT"])]
signal.signal(signal.SIGTERM, at_a_notice)
print("a stranger is here", flush=True)
time.sleep(3600)
"""


def test_programs_that_never_join_their_run_end_with_it(tmp_path: Path):
    """They stayed for health.master_wait, and elastic-stop --wait with them."""
    settings = {"run.command": [sys.executable, "-c", STRANGER], "elastic.max": 3,
                "health.master_wait": "1h", "local_scheduler.grace": "1s"}
    with running(tmp_path, settings) as run:
        logs = [run.run.log_path("worker", slot) for slot in range(3)]

        def are_there() -> bool:
            return all(log.exists() and "a stranger" in log.read_text() for log in logs)

        run.until(are_there, 60, "they have started")
        jobs = [run.jobs()["worker", slot] for slot in range(3)]
        stopped = elastic("stop", run.run.path, "--wait", env=environment(tmp_path), timeout_s=120)
        assert stopped.returncode == 0, stopped.stderr
        assert [run.ended(job.job_id)["outcome"] for job in jobs] == ["stopped"] * 3
