"""Programs of others, as etc/examples starts them: preempted, killed, hung, crashing at once.

pytest tests/whole/test_programs.py     (it skips what needs a package that is not installed)
"""

import contextlib
import os
import re
import signal
import tomllib
from pathlib import Path

import pytest

from elastic.people import status
from elastic.sync.resumable import resume_paths
from helpers import ROOT, elastic_here, wait_until
from running import Running, running

EXAMPLES = ROOT / "etc" / "examples"
SYNC = {"run.mode": "sync", "elastic.max": 1, "local_scheduler.gpus": 2,
        "local_scheduler.grace": "60s"}
PROGRAM = """
import os, pathlib, sys, time
folder, resume = pathlib.Path(sys.argv[1]), sys.argv[2:]
step = int(pathlib.Path(resume[0]).stem.split("_")[1]) if resume else 0
print("from", step, flush=True)
if resume and pathlib.Path(resume[0]).read_text() != "whole":
    raise ValueError(f"not a checkpoint: {resume[0]}")
"""


# A few slow steps leave a test as much time as many quick ones, and cost less.
SLOWLY = """
import runpy, sys, time
from torch.nn import functional

def slow(real):
    def call(*args, **kwargs):
        time.sleep(0.02)
        return real(*args, **kwargs)
    return call

for name in ("mse_loss", "cross_entropy"):
    setattr(functional, name, slow(getattr(functional, name)))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def slowly(home: Path, settings: dict) -> dict:
    """The same, but each loss takes 20 ms longer."""
    (home / "slowly.py").write_text(SLOWLY)
    command = list(settings["run.command"])
    command.insert(command.index("{python}") + 1, str(home / "slowly.py"))
    return settings | {"run.command": command}


def example(name: str, *more: str) -> dict:
    """The settings of an example's run file, for `running`; `more`: arguments of the program."""
    path = EXAMPLES / name
    tables = tomllib.loads(path.read_text())
    found = {f"{section}.{key}": value for section, table in tables.items()
             for key, value in table.items() if key != "name"}
    found["run.command"] = ["env", "OMP_NUM_THREADS=1", *found["run.command"], *more]
    kind = SYNC if found.get("run.mode") == "sync" else {"local_scheduler.grace": "60s"}
    return {**kind, **found, "run.folder": str(path.parent)}


def program(home: Path, text: str, *arguments: str) -> dict:
    """Settings of a run in sync mode whose program is PROGRAM and this text."""
    (home / "program.py").write_text(PROGRAM + text)
    command = ["{python}", "program.py", "{checkpoints}", "{resume}", *arguments]
    return {**SYNC, "run.command": command}


def said(run: Running, pattern: str) -> list[str]:
    """What the program printed."""
    log = run.run.log_path("trainer", 0)
    return re.findall(pattern, log.read_text()) if log.exists() else []


def saved(run: Running, pattern: str) -> list[Path]:
    """The whole checkpoints: one that is being written is none yet."""
    return list(resume_paths(run.run.path / "checkpoints", pattern))


def preempted(run: Running, gpus: int = 1, held: list[int] = ()) -> dict:
    """Take the job's GPUs away, then let its `held` processes go on. The next job gets so many
    GPUs. Returns the exit record."""
    job = run.jobs()["trainer", 0]
    run.set_capacity(gpus)
    run.scheduler.preempt(job.job_id)
    go_on(held)
    return run.ended(job.job_id)


def go_on(held: list[int]) -> None:
    for pid in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def queue(run: Running) -> list[Path]:
    """The jobs there were so far. To ask the scheduler would start what waits."""
    return list((run.home / "registry" / "local" / "jobs").glob("*.json"))


def finished(run: Running) -> None:
    run.until(lambda: run.run.done() and not run.jobs(), 90, "the end of the run")


def held_between_saves(run: Running) -> list[int]:
    """Its processes, stopped while the checkpoint is whole: nanoGPT writes the only one in place.
    """
    def held() -> list[int]:
        pids = run.pids("train.py")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        if saved(run, "ckpt.pt"):
            return pids
        go_on(pids)
        return []

    return run.until(held, 60, "a checkpoint that is whole")


def test_a_program_of_nanogpts_shape_goes_on_by_its_flag(tmp_path: Path):
    settings = example("nanogpt/run.toml", "--max_iters=120", "--eval_interval=20")
    settings = slowly(tmp_path, settings) | {"elastic.max": 2, "local_scheduler.gpus": 1}
    with running(tmp_path, settings) as run:
        run.until(lambda: len(said(run, "saving checkpoint")) >= 2, 60, "two checkpoints")
        held = held_between_saves(run)
        assert preempted(run, gpus=2, held=held)["outcome"] == "yielded"
        finished(run)
        restores = [event["resume"] for event in run.events("restore")]
        iterations = [int(each) for each in said(run, r"iter (\d+): ")]
        worlds = said(run, r"on (\d) GPUs")
    assert [Path(each).name for each in restores] == ["", "ckpt.pt"]
    assert set(iterations) == set(range(121))
    assert len(iterations) <= 121 + 21
    assert (worlds[0], worlds[-1]) == ("1", "2")


def test_a_program_that_dies_on_a_checkpoint_gets_the_one_before(tmp_path: Path):
    text = "(folder / f'step_{step + 3}.pt').write_text('whole')\ntime.sleep(1)\n"
    folder = tmp_path / "saved"
    folder.mkdir()
    for step, content in ((10, "whole"), (20, "whole"), (30, "cut sho")):
        (folder / f"step_{step}.pt").write_text(content)
    with running(tmp_path, program(tmp_path, text) | {"sync.checkpoints": str(folder)}) as run:
        finished(run)
        assert said(run, r"from (\d+)") == ["30", "20"]
        (restart,) = run.events("restart")
    assert restart["reason"].startswith(f"ValueError: not a checkpoint: {folder}/step_30.pt")


def test_the_only_checkpoint_is_tried_again_and_the_run_says_why_it_failed(tmp_path: Path):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "step_30.pt").write_text("cut sho")
    settings = program(tmp_path, "") | {"sync.checkpoints": str(folder), "elastic.max_failures": 1}
    with running(tmp_path, settings) as run:
        failed = run.until_failed(90)
        assert set(said(run, r"from (\d+)")) == {"30"}
        seen = status.observe(run.run)
    assert "ValueError: not a checkpoint" in failed["reason"]
    assert "ValueError: not a checkpoint" in seen["summary"]


def test_a_program_that_leaves_with_0_on_a_notice_is_not_done(tmp_path: Path):
    text = """
import signal

def save(*_):
    (folder / "step_1.pt").write_text("whole")
    sys.exit(0)

if not resume:
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(600)
"""
    with running(tmp_path, program(tmp_path, text)) as run:
        run.until(lambda: said(run, "ready"), 60, "it trains")
        assert preempted(run)["outcome"] == "yielded"
        finished(run)
        assert said(run, r"from (\d+)") == ["0", "1"]


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_what_a_rank_died_of_is_known_however_much_the_others_say_of_it(tmp_path: Path, mode: str):
    text = """
import subprocess
subprocess.run([sys.executable, "-c", "raise ValueError('the cause')"])
sys.exit(1000 * ("a peer is gone, " * 12 + "a peer is gone\\n"))
"""
    settings = program(tmp_path, text) | {"run.mode": mode, "elastic.max_failures": 1}
    settings["run.command"] = ["{python}", "program.py", str(tmp_path)]
    with running(tmp_path, settings) as run:
        failed = run.until_failed(60)
    assert "ValueError: the cause" in failed["reason"]
    assert failed["detail"].rstrip().endswith("a peer is gone")
    assert len(failed["detail"]) < 20_000


def test_names_that_say_nothing_are_told(tmp_path: Path):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "weights.odd").write_text("whole")
    settings = program(tmp_path, "") | {"sync.checkpoints": str(folder)}
    with running(tmp_path, settings) as run:
        finished(run)
        (warning,) = run.events("warning")
    assert "(there are: weights.odd)" in warning["reason"]


# As torchrun starts its ranks.
IN_A_SESSION = """
import subprocess, sys
sys.exit(subprocess.Popen(sys.argv[1:], start_new_session=True).wait())
"""


def test_a_silent_program_is_ended_with_its_stacks_and_started_again(tmp_path: Path):
    text = """
def hangs_here():
    time.sleep(600)

if not resume:
    (folder / "step_1.pt").write_text("whole")
    hangs_here()
"""
    settings = program(tmp_path, text) | {"sync.silent_timeout": "5s"}
    settings["run.command"] = ["{python}", "-c", IN_A_SESSION, *settings["run.command"]]
    with running(tmp_path, settings) as run:
        run.until(lambda: run.events("restart"), 60, "it is started again")
        assert len(run.pids("program.py")) <= 2  # with its launcher
        finished(run)
        (hang,) = run.events("hang")
        (restart,) = run.events("restart")
        assert said(run, "in hangs_here")
    assert hang["seconds"] == 5
    assert "sync.silent_timeout" in restart["reason"]


def test_a_program_whose_last_rank_speaks_is_not_silent(tmp_path: Path):
    """As Megatron's do: what other ranks than the first print is in their own logs alone."""
    text = """
log = pathlib.Path(os.environ["ELASTIC_RUN_DIR"]) / "logs/ranks/rank-001.log"
for _ in range(20):
    log.write_text("it prints")
    time.sleep(0.4)
"""
    settings = program(tmp_path, text) | {"sync.silent_timeout": "3s"}
    with running(tmp_path, settings) as run:
        finished(run)
        assert not run.events("hang")


@pytest.mark.parametrize("code", [0, 75])
def test_a_program_is_told_of_a_stop_at_once_and_saves(tmp_path: Path, code: int):
    text = f"""
import signal
def leave(*_):
    (folder / "step_2.pt").write_text("whole")
    sys.exit({code})
signal.signal(signal.SIGTERM, leave)
(folder / "step_1.pt").write_text("whole")
time.sleep(600)
"""
    with running(tmp_path, program(tmp_path, text)) as run:
        run.until(lambda: saved(run, "step_1.pt"), 60, "it trains")
        job = run.jobs()["trainer", 0]
        assert elastic_here("stop", "tiny").exit_code == 0
        record = run.ended(job.job_id, 10)
        assert (record["outcome"], record["reason"]) == ("stopped", "the run is stopped")
        assert saved(run, "step_2.pt")
        assert not run.run.done()


def test_a_program_at_work_is_running_and_has_no_ledger_and_without_cron_a_successor(
    tmp_path: Path
):
    text = "(folder / f'step_{step + 1}.pt').write_text('whole')\ntime.sleep(600)\n"
    with running(tmp_path, program(tmp_path, text)) as run:
        wait_until(lambda: said(run, "from 0"), 60, "it trains")  # nobody passes from here on
        wait_until(lambda: len(queue(run)) == 2, 60, "a successor waits")
        seen = status.observe(run.run)
        job = run.jobs()["trainer", 0]
        screen, done = (elastic_here(command, "tiny") for command in ("status", "audit"))
        run.kill("elastic.sync.launch")
        run.until(lambda: said(run, "from 1"), 60, "the next pass starts the successor")
    node = os.uname().nodename
    assert (seen["state"], seen["gpus"]) == ("running", 1)
    assert re.fullmatch(rf"running job {job.job_id} on {node}, 1 GPU, since \d+ s; its progress is "
                        r"its own \(elastic-logs\)", seen["summary"])
    assert "Resources" not in seen["reason"]
    assert "it starts when one is" not in screen.output
    assert done.exit_code == 2
    assert "has no ledger" in done.stderr
    assert "WRONG" not in done.output


def test_hugging_faces_trainer_goes_on_from_its_checkpoint(tmp_path: Path):
    pytest.importorskip("transformers")
    settings = example("hf_trainer/sync.toml", "--max_steps", "150")
    with running(tmp_path, slowly(tmp_path, settings)) as run:
        run.until(lambda: saved(run, "checkpoint-*"), 90, "a checkpoint")
        assert preempted(run)["outcome"] == "yielded"
        finished(run)
        first, *later = [event["resume"] for event in run.events("restore")]
        assert saved(run, "checkpoint-150")
    assert first == ""
    assert all(re.search(r"checkpoint-\d+$", each) for each in later)
    assert later


def test_hugging_faces_trainer_trains_in_local_mode(tmp_path: Path):
    pytest.importorskip("transformers")
    settings = example("hf_trainer/local.toml") | {"elastic.max": 1, "local_sgd.inner_steps": 20}
    with running(tmp_path, settings) as run:
        run.workers(1)

        def losses() -> list[float]:
            return [commit.loss for commit in run.commits()[1:]]

        run.until(lambda: losses() and losses()[-1] < losses()[0] - 0.5, 90, "it learns")
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        report = run.audit()
    assert report["repeated"] == 0


def test_lightning_loses_no_step_on_a_notice(tmp_path: Path):
    pytest.importorskip("pytorch_lightning")
    settings = example("lightning/run.toml", "--max_steps", "240") | {"elastic.max": 2}
    with running(tmp_path, slowly(tmp_path, settings)) as run:
        run.set_capacity(2)
        run.until(lambda: said(run, r"step (\d+) of 2"), 90, "it trains on two GPUs")
        run.until(lambda: saved(run, "*.ckpt"), 90, "a checkpoint")
        assert preempted(run)["outcome"] == "yielded"
        finished(run)
        steps = [int(each) for each in said(run, r"step (\d+) of")]
        (_, resume) = [event["resume"] for event in run.events("restore")]
        worlds = said(run, r"of (\d):")
    assert re.search(r"step=\d+\.ckpt$", resume)
    assert steps == list(range(0, 240, 20))
    assert {*worlds} == {"1", "2"}


def test_lightnings_own_requeue_is_refused_and_the_run_goes_on(tmp_path: Path):
    pytest.importorskip("pytorch_lightning")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")  # a job that is not to be requeued
    (tmp_path / "scontrol").chmod(0o755)
    slurm = ["SLURM_JOB_ID=7", "SLURM_JOB_NAME=x", "SLURM_NTASKS=1", "SLURM_PROCID=0",
             "SLURM_LOCALID=0", "SLURM_NODEID=0",
             f"PATH={tmp_path}:{os.environ['PATH']}"]
    settings = slowly(tmp_path, example("lightning/run.toml", "--max_steps", "400"))
    settings |= {"run.command": ["env", *slurm, *settings["run.command"][1:]],
                 "sync.notice_signal": "USR1", "local_scheduler.grace": "3s"}
    with running(tmp_path, settings) as run:
        run.until(lambda: saved(run, "*.ckpt"), 90, "a checkpoint")
        run.scheduler.preempt(run.jobs()["trainer", 0].job_id)  # it trains on until the kill
        run.until(lambda: len(run.events("restore")) == 2, 90, "the successor")
        finished(run)
        assert said(run, "Requeuing SLURM job 7 failed")
        assert saved(run, "hpc_ckpt_1.ckpt")
        assert run.events("restore")[1]["resume"].endswith(".ckpt")
        assert {int(each) for each in said(run, r"step (\d+) of")} == set(range(0, 400, 20))


def test_accelerate_goes_on_from_its_checkpoint_on_more_gpus(tmp_path: Path):
    pytest.importorskip("accelerate")
    settings = example("accelerate/run.toml", "--steps", "300")
    settings |= {"elastic.max": 2, "local_scheduler.gpus": 1}
    with running(tmp_path, slowly(tmp_path, settings)) as run:
        run.until(lambda: said(run, r"step (\d+) of 1"), 90, "it trains on one GPU")
        assert preempted(run, gpus=2)["outcome"] == "yielded"
        finished(run)
        steps = [int(each) for each in said(run, r"step (\d+) of")]
        (_, resume) = [event["resume"] for event in run.events("restore")]
        assert said(run, r"step 300 of (\d)") == ["2"]
    assert re.search(r"step_\d+$", resume)
    assert sorted(set(steps)) == list(range(50, 301, 50))
