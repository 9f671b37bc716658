"""A plain PyTorch loop around elastic.LocalSGD, run by `run.command`."""

import sys
from pathlib import Path

from helpers import ROOT
from running import running

EXAMPLES = ROOT / "etc" / "examples"
SCRIPT = Path(__file__).with_name("own_loop.py")


def test_a_loop_of_ones_own_trains_survives_a_kill_and_leaves_on_notice(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pace"), "1200"]
    settings = {"run.command": command, "elastic.max": 2, "local_sgd.inner_steps": 10}
    with running(tmp_path, settings) as run:
        run.workers(2)
        run.versions(2)
        run.pace(1.0)  # the other one is not to finish the run meanwhile
        (first, *_) = run.pids("own_loop")
        run.kill("own_loop")
        run.until(lambda: len(run.pids("own_loop")) == 2, 30, "the killed one is started again")
        assert first not in run.pids("own_loop")
        run.workers(2)
        job = run.jobs()["worker", 1]
        run.scheduler.preempt(job.job_id)
        record = run.ended(job.job_id)
        assert (record["outcome"], record["code"]) == ("yielded", 0)
        run.finish()
        commits = run.commits()
    assert commits[-1]["tokens"] == 1200
    assert commits[-1]["loss"] < commits[1]["loss"] / 4


def example(name: str, batch: int) -> dict:
    return {"run.command": [sys.executable, str(EXAMPLES / name)], "train.batch_size": batch,
            "elastic.max": 2, "local_sgd.inner_steps": 10,
            "local_sgd.compression": "int8"}  # fmt: skip


def test_the_plain_example_learns_to_the_end_through_a_kill(tmp_path: Path):
    with running(tmp_path, example("plain_loop.py", 8)) as run:
        run.workers(2)
        run.versions(2)
        run.kill("plain_loop.py")
        run.finish(200)
        commits = run.commits()
    assert commits[-1]["loss"] < 0.5 * commits[1]["loss"]


def test_the_example_in_hugging_faces_style_learns_through_a_kill(tmp_path: Path):
    with running(tmp_path, example("hf_loop.py", 4)) as run:
        run.workers(2)
        run.versions(2)
        killed, first = run.kill("hf_loop.py"), run.commits()[1]["loss"]
        run.until(lambda: len({*run.pids("hf_loop.py")} - {killed}) == 2, 30, "started again")
        run.workers(2)
        run.versions(2)
        run.until(lambda: run.commits()[-1]["loss"] < 0.6 * first, 100, "it has learnt")
        run.audit()


def test_a_loop_that_breaks_off_fails_the_run_and_says_so(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pace"), "1200", "3"]
    settings = {"run.command": command, "elastic.max_failures": 1, "elastic.backoff": "0.1s"}
    with running(tmp_path, settings) as run:
        failed = run.until_failed(60)
    assert "left before the run was over" in failed["reason"]
