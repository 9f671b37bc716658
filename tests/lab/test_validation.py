"""Local mode against sync mode at equal tokens: the statistics, and real runs of a tiny task.

pytest tests/lab/test_validation.py
"""

import errno
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import stdev

import pytest
from click.testing import CliRunner

from elastic.base import durable
from elastic.base.errors import ElasticError, Exit, TryAgain, UsageError
from elastic.commands import main
from elastic.jobs import sched_slurm
from elastic.jobs.reconcile import PassReport
from elastic.lab import validation
from elastic.lab.validation import verdicts
from elastic.people import evaluation, steering
from elastic.run.rundir import RunDir
from helpers import elastic, environment
from running import SETTINGS, TESTS, kill_all, toml

SAID = {"reason": "nothing is left to train"}
BASE = {0: 2.00, 1: 2.02, 2: 1.98}


def judged(arm: dict[int, float], margin: float = 0.02, base: dict = BASE) -> dict:
    return list(verdicts({"sync": base, "int8": arm}, margin))[1]


def shifted(by: float, noise: float = 0.0) -> dict[int, float]:
    return {seed: loss + by + noise * (seed - 1) for seed, loss in BASE.items()}


def test_the_noise_of_the_seeds_does_not_count_where_they_are_paired():
    verdict = judged(shifted(0.01))
    assert verdict["gap"] == pytest.approx(0.01)
    assert verdict["bound"] == pytest.approx(0.01)
    assert verdict["words"].startswith("ok")


def test_a_gap_above_the_margin_is_worse():
    assert judged(shifted(0.05))["words"].startswith("WORSE")


def test_where_noise_hides_the_answer_there_is_none():
    """Gaps of -0.03, 0 and 0.03: by the t of 3 seeds the bound is 0 + 2.92 · 0.03 / √3."""
    verdict = judged(shifted(0.0, noise=0.03))
    assert verdict["bound"] == pytest.approx(2.92 * 0.03 / 3**0.5)
    assert verdict["words"].startswith("undecided")


def test_one_seed_gives_no_bound():
    verdict = judged({0: 2.0}, base={0: 2.0})
    assert (verdict["bound"], verdict["words"][:8]) == (None, "one seed")


def test_better_is_ok():
    assert judged(shifted(-0.5))["words"].startswith("ok")


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_an_arm_without_a_finite_loss_is_told_of_and_not_ok(lost: float):
    """After hours of training, statistics would have ended it without any verdict."""
    sync, int8, none = verdicts({"sync": BASE, "int8": BASE | {1: lost}, "none": BASE}, 0.02)
    assert (int8["words"], int8["gap"], int8["bound"]) == ("a loss is not finite", None, None)
    assert sync["words"] == "what the others are compared with"
    assert none["words"] == "ok: within 0.02"
    every = [*verdicts({"sync": BASE | {1: lost}, "int8": BASE}, 0.02)]
    assert [verdict["words"] for verdict in every] == ["a loss is not finite"] * 2
    assert every[1]["spread"] == stdev(BASE.values())


def test_the_command_succeeds_if_every_arm_is_ok(make_config, monkeypatch):
    runs = {"sync": 2.0, "int8": 2.0, "int4": 3.0, "none": math.nan}
    monkeypatch.setattr(evaluation, "load", lambda _config: None)
    monkeypatch.setattr(validation, "load", lambda _path, settings: make_config(*settings))
    monkeypatch.setattr(validation, "train", lambda trials, _folder: [
        (arm, seed, arm) for arm, seed, _ in trials])
    monkeypatch.setattr(validation, "final_loss", lambda arm, _metric: runs[arm])
    monkeypatch.setattr(validation, "curve", lambda _arm: [])

    def compare(arms: str) -> tuple[int, str]:
        return called("x.toml", "--arms", arms, "--seeds", 2, COLUMNS="100")

    code, said = compare("int8")
    assert (code, "ok: within 0.02" in said) == (Exit.OK, True)
    code, said = compare("int8,int4")
    assert (code, "WORSE by more than 0.02" in said) == (Exit.ERROR, True)
    code, said = compare("int8,none")
    assert (code, "a loss is not finite" in said) == (Exit.ERROR, True)


def called(*words: object, **env: str) -> tuple[int, str]:
    """`elastic validate` in this process: its exit code, and what it says."""
    done = CliRunner().invoke(main.elastic, ["validate", *map(str, words)], env=env)
    return done.exit_code, done.output


def test_a_step_of_sync_mode_has_the_samples_of_all_workers_steps(make_config):
    def load(settings: list[str]):
        given = ("elastic.max=8", "slurm.gpus_per_worker=4", "train.batch_size=6")
        return make_config(*given, "train.accumulate=5", *settings)

    (_, _, sync), (_, _, local) = validation.trials(load, ["int8"], 1)
    assert sync.sync.global_batch_size == 2 * local.step_samples == 8 * 6 * 5


# ---- one after the other


@pytest.fixture
def two(make_config) -> list[validation.Trial]:
    return [("int8", seed, make_config("elastic.reconcile_interval=1s", name=f"t{seed}"))
            for seed in (0, 1)]


@pytest.fixture
def passes(monkeypatch) -> Callable[[Callable[[RunDir], None]], None]:
    """passes(act): each pass over a run is act(run)."""

    def patch(act: Callable[[RunDir], None]) -> None:
        def a_pass(runs: list[RunDir], _now: float) -> PassReport:
            for run in runs:
                act(run)
            return PassReport()

        monkeypatch.setattr(validation, "run_pass", a_pass)
        monkeypatch.setattr(steering, "run_pass", a_pass)

    monkeypatch.setattr(steering, "WAIT_S", 0.0)
    return patch


def names(runs: list[tuple[str, int, RunDir]]) -> list[str]:
    return [run.name for _, _, run in runs]


def test_a_trial_that_has_failed_is_tried_again(two, home: Path, passes):
    """Called again, its mistake mended meanwhile: what is done stays as it is."""
    mistaken, passed = {"t1"}, Counter()

    def act(run: RunDir) -> None:
        passed[run.name] += 1
        run.mark_failed("no such file") if run.name in mistaken else run.mark_done(SAID)

    passes(act)
    with pytest.raises(ElasticError, match="run t1 failed: no such file"):
        validation.train(two, home / "runs")
    assert RunDir(home / "runs" / "t1").control().state == "stopped"
    mistaken.clear()
    again = validation.train(two, home / "runs")
    assert names(again) == ["t0", "t1"]
    assert all(run.done() and not run.failed() for _, _, run in again)
    assert again[1][2].control().state == "running"
    assert passed["t1"] == 2 + 1  # the last but one has stopped its jobs


def test_a_trial_is_stopped_at_ctrl_c_and_goes_on_when_it_is_called_again(two, home, passes):
    states, pressed = [], {"t1"}

    def act(run: RunDir) -> None:
        states.append((run.name, run.control().state))
        if run.name not in pressed:
            run.mark_done(SAID)
        elif run.control().state == "running":
            raise KeyboardInterrupt

    passes(act)
    with pytest.raises(KeyboardInterrupt):
        validation.train(two, home / "runs")
    assert states == [("t0", "running"), ("t1", "running"), ("t1", "stopped")]
    pressed.clear()
    assert names(validation.train(two, home / "runs")) == ["t0", "t1"]
    assert states[-1] == ("t1", "running")


def test_a_trial_gets_its_share_of_the_nodes_as_other_runs_do(
    make_config, home, passes, monkeypatch
):
    """It had one CPU for a GPU, where the site has no default."""
    monkeypatch.setattr(sched_slurm, "share_of_gpu", lambda _: (8, "9000M"))
    monkeypatch.setattr(sched_slurm, "cluster", lambda: {"ClusterName": "c"})
    monkeypatch.setattr(validation.submission, "check", lambda *_: None)
    passes(lambda run: run.mark_done(SAID))
    given = ("run.scheduler=slurm", "slurm.partition=gpu", "elastic.reconcile_interval=1s")
    trial = [("int8", 0, make_config(*given, name="t0"))]
    ((_, _, run),) = validation.train(trial, home / "runs")
    assert run.config().slurm.cpus_per_gpu == 8
    assert names(validation.train(trial, home / "runs")) == ["t0"]  # it is the same one
    other = [("int8", 0, make_config(*given, "slurm.qos=low", name="t0"))]
    with pytest.raises(UsageError, match="trained with another configuration"):
        validation.train(other, home / "runs")


def test_a_silence_ends_no_trial(two, home: Path, passes, monkeypatch):
    """Three seconds of it ended all runs, after hours of training."""
    passed, silent, real = Counter(), Counter(), os.listdir

    def act(run: RunDir) -> None:
        passed[run.name] += 1
        if passed[run.name] == 2:
            run.mark_done(SAID)

    def listdir(path):
        silent[name := Path(path).name] += 1
        if name in ("t0", "t1") and silent[name] % 20 < 9:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    def check(config, root) -> None:
        silent["slurm"] += 1
        if config.run.name == "t1" and silent["slurm"] < 4:
            raise TryAgain("squeue: Socket timed out")

    passes(act)
    for where, name, value in (
        (os, "listdir", listdir), (durable, "AGAIN_S", ()), (durable, "STUCK_S", 0.0),
        (durable, "UNREAD_S", -1.0), (validation.submission, "check", check),
    ):
        monkeypatch.setattr(where, name, value)
    assert names(validation.train(two, home / "runs")) == ["t0", "t1"]
    assert silent["slurm"] == 4
    assert passed == {"t0": 2, "t1": 2}


def test_who_begins_while_slurm_is_silent_is_told_so_at_once(two, home: Path, monkeypatch):
    def check(_config, _root) -> None:
        raise TryAgain("squeue: Socket timed out")

    monkeypatch.setattr(validation.submission, "check", check)
    with pytest.raises(TryAgain, match="Socket timed out"):
        validation.train(two, home / "runs")
    assert not (home / "runs" / "t0").exists()


# ---- for real


@pytest.fixture
def tiny(tmp_path: Path):
    (tmp_path / "pace").write_text("0")
    settings = {**SETTINGS, "task.samples": 320, "task.pace": str(tmp_path / "pace"),
                "elastic.max": 1, "local_sgd.inner_steps": 10}
    (tmp_path / "of-a-task").mkdir()
    config = tmp_path / "tiny.toml"
    config.write_text("".join(f"{line}\n" for line in toml(settings)))
    yield config
    kill_all(tmp_path)


def starts(runs: Path) -> int:
    """How often a job of any of these runs has started."""
    return sum(path.read_text().count('"kind":"start"') for path in runs.glob("*/events.jsonl"))


def test_the_command_trains_compares_and_goes_on(tiny: Path, tmp_path: Path, monkeypatch):
    env = environment(tmp_path, PYTHONPATH=str(TESTS))
    # Its task's relative paths begin elsewhere than those of its user.
    tiny = tiny.rename(tiny.with_name("of-a-task") / tiny.name)
    tiny = Path(os.path.relpath(tiny))
    done = elastic("validate", tiny, "--seeds", 1, "--json", env=env, timeout_s=300)
    found = json.loads(done.stdout)
    assert {arm: len(seeds) for arm, seeds in found["losses"].items()} == {"sync": 1, "int8": 1}
    assert done.returncode == Exit.ERROR, "one seed tells nothing of the noise"
    runs = Path(found["runs"])
    assert sorted(path.name for path in runs.iterdir()) == ["tiny-int8-0", "tiny-sync-0"]
    before = starts(runs)
    assert before > 0
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(Path.cwd())  # it may go to the task's folder by itself
    code, said = called(tiny, "--seeds", 1, **env)  # all is there
    assert (code, starts(runs)) == (Exit.ERROR, before), said
    assert "one seed tells nothing" in said
    assert "int8: training loss " in said
    changed = ("--set", "train.learning_rate=0.5")
    code, said = called(tiny, "--seeds", 1, *changed, **env)
    assert (code, "with another configuration" in said) == (Exit.USAGE, True), said
    assert "--set run.name=NAME" in said
