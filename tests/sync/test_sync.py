"""Sync mode on the local scheduler: one job that loses its GPUs and goes on as if it never had.

pytest tests/sync/test_sync.py
"""

import contextlib
import json
import math
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic.base import durable
from elastic.base.config import load
from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.signals import Notice
from elastic.jobs import cadence
from elastic.people.evaluation import evaluate
from elastic.run.audit import audit
from elastic.run.rundir import Control, RunDir
from elastic.run.shuffle import index
from elastic.run.sound import SCORES
from elastic.saved.checkpoint import (
    Checkpoints,
    find_newest,
    read_params,
    reader_of,
    steps as saved_steps,
)
from elastic.saved.layout import Layout
from elastic.saved.replica import shapes
from elastic.sync.batches import Batches
from elastic.sync.rank import Rank, Wish, Wishes
from elastic.sync.saving import Saving, State
from elastic.sync.trainer import Trainer
from elastic.train.group import Group
from elastic.train.inner_optimizer import InnerOptimizer
from helpers import commit_of, elastic, environment, wait_until
from running import SETTINGS, Running, members, running, toml
from tiny_task import Net, Tiny

BATCH, INTERVAL = 10, 10
SYNC = {
    "run.mode": "sync",
    "elastic.min": 1,
    "elastic.max": 1,
    "elastic.backoff": "0.2s",
    "sync.global_batch_size": BATCH,
    "train.batch_size": 2,
    "checkpoint.interval": f"{INTERVAL} steps",
    "health.hang_timeout": "60s",
    "local_scheduler.gpus": 4,
}


@contextlib.contextmanager
def synchronous(home: Path, settings: dict | None = None, **task) -> Iterator[Running]:
    """So slow, until `finish`, that the run is not over before the test has acted: a rank makes
    five passes a step where it is alone, and three where it is one of two."""
    task = {"samples": 600, "step_s": 0.2, **task}
    with running(home, {**SYNC, **(settings or {})}, **task) as run:
        yield run


def lines_of(run: RunDir) -> list[dict]:
    """What rank 0 wrote of every step that was taken, in the order of writing."""
    path = run.path / "metrics.jsonl"
    # The last line may be on its way.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps(run: Running) -> list[dict]:
    return lines_of(run.run)


def step(run: Running) -> int:
    return max((line["step"] for line in steps(run)), default=0)


def is_past_a_checkpoint(run: Running) -> bool:
    return step(run) > max(saved_steps(run.run), default=math.inf)


def at_work(run: RunDir) -> str:
    """What the ranks are at, by what they tell."""
    return (run.jobs.progress() or {}).get("state", "")


def further(run: Running, count: int, timeout_s: float = 60) -> None:
    """Wait for steps beyond the newest."""
    goal = step(run) + count
    run.until(lambda: step(run) >= goal, timeout_s, f"step {goal}")


def finish(run: Running) -> list[dict]:
    """Let the run end; its steps. The audit must be clean."""
    run.pace(0)
    run.until(lambda: run.run.done() and not run.jobs(), 90, "the end of the run")
    report = elastic("audit", run.run.path, "--json", env=environment(run.home))
    assert (report.returncode, json.loads(report.stdout)["problems"]) == (0, []), report.stdout
    wait_until(lambda: not members(run.home), 10, "no process is left")
    return steps(run)


# ---- the one rank of a job, in this process


def made(home: Path, settings: dict | None = None, **task) -> RunDir:
    """A run that no job has yet."""
    task = {"samples": 600, "pace": "", **task}
    settings = {**SETTINGS, **SYNC, **(settings or {})}
    settings |= {f"task.{key}": value for key, value in task.items()}
    (config := home / f"{home.name}.toml").write_text("\n".join(toml(settings)))
    control = Control("sync", "running", 1, settings["elastic.max"])
    return RunDir.create(home / "runs", load(config), control, {})


def trainer_of(run: RunDir, attempt: int = 1) -> Trainer:
    return Trainer(Rank(run, run.config(), Group(), attempt, "7"), Notice())


def told_at(step: int, run: RunDir, when: Callable[[], object] = lambda: True) -> int:
    """Train until a notice comes, in the first pass after this step; the exit status. `when`: what
    has to be true by then."""
    trainer = trainer_of(run)
    task, loss = trainer.learner.task, trainer.learner.task.loss

    def hears(model, batch):
        if trainer.state.step == step and not trainer.notice:
            wait_until(when, 30, f"what is to be before the notice at step {step}")
            trainer.notice.arrived(signal.SIGTERM)
        return loss(model, batch)

    task.loss = hears
    return trainer.main()


def events(run: RunDir, kind: str) -> list[dict]:
    return [event for event in run.events() if event["kind"] == kind]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: more wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    """The steps of a run that nothing happens to, on one GPU."""
    run = made(tmp_path_factory.mktemp("undisturbed"))
    assert trainer_of(run).main() == Exit.OK
    return lines_of(run)


# ---- what is the same however a run has come there


def assert_same_run(found: list[dict], wanted: list[dict]) -> None:
    """The same samples in the same steps, each trained once, with the same losses."""
    assert [(line["step"], line["samples"]) for line in found] == [
        (line["step"], line["samples"]) for line in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4), one


def repeated(found: list[dict], wanted: list[dict]) -> list[int]:
    """How many steps came again in each attempt after the first. Else it is the same run."""
    last = {line["step"]: line for line in found}
    assert_same_run([last[number] for number in sorted(last)], wanted)
    return [one["step"] + 1 - other["step"] for one, other in pairwise(found)
            if other["attempt"] > one["attempt"]]


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """Where processes make temporary files; a short path, for sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_a_run_that_is_resized_trains_the_same_samples_in_the_same_steps(
        tmp_path, undisturbed, temporary):
    """By itself, when GPUs become free, and with notice. Nothing is left on its nodes: every
    process that loaded samples left a folder there."""
    settings = {"elastic.max": 3, "local_scheduler.gpus": 1, "train.loader_workers": 1,
                "sync.grow_after": "1s"}
    with synchronous(tmp_path, settings) as run:
        further(run, 3)
        assert not run.events("cancel")
        run.set_capacity(3)
        run.until(lambda: steps(run)[-1]["world"] == 3, 60, "three ranks train")
        (grown,) = run.events("cancel")
        further(run, 3)
        assert len(run.pids("elastic.train.start trainer")) == 3 + 3  # each rank with its loader
        job = run.jobs()["trainer", 0]
        run.set_capacity(1)
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        lines = finish(run)
    assert grown["reason"] == "it has 1 GPUs, and 3 are to be had"
    assert_same_run(lines, undisturbed)  # notice: no step is lost, none repeated
    assert [world for world, _ in groupby(line["world"] for line in lines)] == [1, 3, 1]
    assert [*temporary.glob("pymp-*")] == []


def test_a_rank_that_dies_or_hangs_costs_no_job_and_a_later_job_ends_all_alike(
        tmp_path, undisturbed):
    """Of a later job rank 0 left alone, the other died of that, and the launcher took the run
    back."""
    with synchronous(tmp_path, {"elastic.max": 2, "health.hang_timeout": "15s"}) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "a checkpoint, and a step more")
        job_id = run.jobs()["trainer", 0].job_id
        for attempt, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
            run.kill("elastic.train.start trainer", how)
            run.until(lambda n=attempt: steps(run)[-1]["attempt"] == n, 60, "they train again")
            assert run.jobs()["trainer", 0].job_id == job_id
        run.set_capacity(1)
        run.run.slots.claim(0, {"job_id": "another", "node": "n", "pid": 1, "time": 0.0})
        end = run.ended(job_id)
        assert (end["outcome"], end["reason"]) == ("fenced", "attempt 4 has the run now")
        assert len(run.events("restart")) == 2
        lines = finish(run)
    lost = repeated(lines, undisturbed)
    assert len(lost) == 3
    assert all(0 <= each <= 2 * INTERVAL for each in lost)  # one, and what was being written


def test_a_run_goes_on_after_a_crash_a_kill_and_a_stop(tmp_path, undisturbed):
    settings = {"sync.crash_retries": 0, "elastic.backoff": "2s"}
    with synchronous(tmp_path, settings, step_s=0.1) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "a checkpoint, and a step more")
        first, (pid,) = run.jobs()["trainer", 0].job_id, run.pids("elastic.train.start trainer")
        assert b"ELASTIC_NOTICE_S=30.0\0" in Path(f"/proc/{pid}/environ").read_bytes()
        run.kill("elastic.train.start trainer")
        run.until(lambda: steps(run)[-1]["attempt"] == 2, 60, "another job")
        assert run.run.jobs.ending(first)["outcome"] == "failed"
        run.scheduler.kill(run.jobs()["trainer", 0].job_id)
        run.until(lambda: steps(run)[-1]["attempt"] == 3, 60, "a third job")
        assert elastic("stop", run.run.path, env=environment(run.home)).returncode == 0
        run.until(lambda: not run.jobs(), 60, "the job leaves")
        reached = step(run)
        time.sleep(0.5)
        run.reconcile()
        assert (run.jobs(), step(run)) == ({}, reached)
        assert elastic("scale", run.run.path, env=environment(run.home)).returncode == 0
        lines = finish(run)
    crashed, killed, stopped = repeated(lines, undisturbed)
    assert 0 < crashed <= 2 * INTERVAL  # one, and what was being written
    assert 0 < killed <= 2 * INTERVAL
    assert stopped == 0


BAD_STEP = 13  # trains the sample that is not a number
SPOILED = {"nan_sample": index(300, 0, 0, BAD_STEP * BATCH + 3), "samples": 300}


def assert_left_out(lines: list[dict]) -> None:
    """The bad batch, and no other one."""
    last = {line["step"]: tuple(line["samples"]) for line in lines}
    wanted = [(at, at + BATCH) for at in range(0, 300, BATCH) if at != BAD_STEP * BATCH]
    assert [last[number] for number in sorted(last)] == wanted


@pytest.mark.parametrize("action", ["skip", "rollback", "warn"])
def test_a_batch_that_is_not_finite_is_dealt_with_as_the_run_says(tmp_path, action):
    settings = {"health.nan_action": action, "run.task": "tiny_task:Normed",
                "checkpoint.interval": "5 steps", "train.validate_every": 20}
    run = made(tmp_path, settings, **SPOILED)
    if action == "warn":  # the step is taken, and all that follow are lost: the run is stopped
        with pytest.raises(ElasticError, match="stop: bad step 6 in a row, 5 are allowed"):
            trainer_of(run).main()
    else:
        assert trainer_of(run).main() == Exit.OK
        assert_left_out(lines_of(run))
        [score] = run.scores.read()
        assert math.isfinite(score.loss)
    told = events(run, "not-finite")
    assert (told[0]["step"], told[0]["action"]) == (BAD_STEP, action)
    assert len(told) == (6 if action == "warn" else 1)
    reached = [line["step"] for line in lines_of(run)]
    assert (len(reached) > len({*reached})) == (action == "rollback")  # steps 11 to 13 again


def test_a_run_that_its_trainer_stops_has_failed_in_its_words(tmp_path):
    settings = {"health.nan_action": "stop", "elastic.max_failures": 1, "sync.crash_retries": 0}
    with synchronous(tmp_path, settings, **SPOILED, step_s=0.02) as run:
        failed = run.until_failed(120)
        (told,) = run.events("not-finite")
    assert (told["step"], told["action"]) == (BAD_STEP, "stop")
    assert re.search(f"step {BAD_STEP}: .*gradient norm nan", failed["detail"])
    assert "hint: lower train.learning_rate" in failed["detail"]


def test_a_batch_that_is_skipped_at_the_end_is_not_missing(tmp_path):
    """The last checkpoint was of the step before, and knew nothing of it."""
    settings = {"train.validate_every": 9, "health.nan_action": "skip"}
    run = made(tmp_path, settings, samples=100, nan_sample=index(100, 0, 0, 97))
    assert trainer_of(run).main() == Exit.OK
    assert events(run, "not-finite")
    found = audit(run.path, 1, durable.checksum)
    assert (found["problems"], found["finished"]) == ([], True)


def test_a_run_that_begins_anew_takes_all_its_steps(tmp_path):
    """Its only checkpoint is damaged. The steps that it had counted as steps of the new beginning,
    and the run was done too early."""
    run = made(tmp_path, {"train.max_steps": 30})
    assert told_at(25, run, lambda: saved_steps(run)) == Exit.TRY_AGAIN
    for file in (run.path / "checkpoints").glob("step-*/*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    trained = len(lines_of(run))
    assert trainer_of(run, 2).main() == Exit.OK
    assert len(lines_of(run)) - trained == 30


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_of_padding_alone_has_no_loss_and_spoils_none(tmp_path, size):
    """Its batches were skipped, and of too many in a row the run ended; here sample 0 is all
    padding, and tokens do not count it, and batches are of one or two samples."""
    settings = {"run.task": "tiny_task:Masked", "sync.global_batch_size": size,
                "train.batch_size": 1}
    run = made(tmp_path, settings, samples=100)
    assert trainer_of(run).main() == Exit.OK
    assert not events(run, "not-finite")
    losses = [line["loss"] for line in lines_of(run)]
    assert len(losses) == 100 / size
    assert all(map(math.isfinite, losses))
    assert len({*losses}) > len(losses) / 2


def refuse_a_checkpoint(run: Running) -> None:
    """By a disk that takes no file, until there is word of it."""
    folder, away = run.run.path / "checkpoints", run.home / "away"
    folder.rename(away)
    folder.write_text("no folder: every write fails")
    run.until(lambda: run.events("checkpoint-failed"), 60, "a checkpoint that fails")
    folder.unlink()
    away.rename(folder)


def test_ranks_go_through_a_full_disk_a_bad_batch_and_a_notice_together(tmp_path):
    """And through looks after their health, each step: two of the three that there are, as no
    other size is allowed. What one is refused or told, both must know."""
    settings = {"elastic.max": 3, "sync.sizes": [1, 2], "local_scheduler.gpus": 3,
                "health.liveness_interval": "0.1s", "health.nan_action": "rollback",
                "checkpoint.interval": "5 steps", "train.validate_every": 20}
    with synchronous(tmp_path, settings, **SPOILED, step_s=0.5, validation_passes=100) as run:
        run.until(lambda: step(run) > 0, 60, "the first step")
        answer = elastic("status", run.run.path, "--json", env=environment(run.home))
        seen = json.loads(answer.stdout)
        refuse_a_checkpoint(run)
        run.pace(0.2)
        run.until(lambda: at_work(run.run) == "validating", 60, "a validation")
        assert step(run) == 20
        job = run.jobs()["trainer", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        assert not run.run.scores.read()
        lines = finish(run)
        (told,) = run.events("not-finite")
        assert not run.events("restart")
    assert (seen["mode"], seen["state"], len(seen["workers"])) == ("sync", "running", 2)
    assert (seen["reason"], seen["tokens_goal"]) == ("every 5 steps: checkpoint.interval", 300)
    assert (told["step"], told["action"]) == (BAD_STEP, "rollback")
    assert_left_out(lines)
    reached = [line["step"] for line in lines]
    assert reached == [*range(1, 14), *range(reached[13], 30)]  # the disk has cost no step
    assert reached[13] in (6, 11)  # the rollback, to the newest checkpoint
    assert {line["world"] for line in lines} == {2}
    assert [line["step"] for line in run.run.lines(SCORES)] == [20]  # it came again


@pytest.fixture
def rank(tmp_path, make_config) -> Rank:
    return Rank(RunDir(tmp_path / "a"), make_config(), Group(), 1, "7")


def test_a_trainer_leaves_when_a_master_commits_what_it_was_about_to(run):
    """On top of an older version its checkpoints count for nothing: not even at the end."""
    run.commits.link(commit_of())
    wishes = Wishes(Rank(run, run.config(), Group(), 1, "7"), Notice())
    wishes.claim_epoch()
    wishes.fence()
    run.commits.link(commit_of(1))
    with pytest.raises(Fenced):
        wishes.fence()


def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path, undisturbed):
    run = made(tmp_path)
    assert told_at(25, run, lambda: saved_steps(run)) == Exit.TRY_AGAIN
    newest = sorted((run.path / "checkpoints").glob("step-*/"))[-1]
    victim = next(newest.glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert trainer_of(run, 2).main() == Exit.OK
    (refused,) = events(run, "checkpoint-refused")
    assert victim.name in refused["reason"]
    (lost,) = repeated(lines_of(run), undisturbed)
    assert 0 < lost <= 2 * INTERVAL


def test_where_the_notice_is_shorter_than_a_save_the_newest_checkpoint_has_to_do(
    tmp_path, undisturbed, monkeypatch, capsys
):
    """The scheduler says 1 s, which is no time at all, with the margin."""
    monkeypatch.setenv("ELASTIC_NOTICE_S", "1")
    run = made(tmp_path)
    assert told_at(12, run, lambda: saved_steps(run)) == Exit.TRY_AGAIN
    assert "s are left, and it takes" in capsys.readouterr().out
    assert trainer_of(run, 2).main() == Exit.OK
    assert repeated(lines_of(run), undisturbed) == [3]


def test_a_checkpoint_that_is_being_written_is_finished_before_the_ranks_leave(rank):
    """It was thrown away where another one did not fit, and ended two seconds too early."""
    saving, disk, writing = Saving(rank, None, None, ()), [], threading.Event()
    saving.checkpoints.save = disk.append
    saving.checkpoints.save_s = 45.0
    saving.checkpoints._flight = SimpleNamespace(since=time.monotonic() - 40)
    assert 45 < saving.checkpoints.needs_s <= 45 + 5
    saving.checkpoints.finish = writing.set
    saving.save_within(State(), lambda needed_s: 27.0)
    assert writing.is_set()
    assert disk == []  # no other one is begun


def test_checkpoints_write_no_more_in_a_second_than_a_site_allows(rank, make_config):
    files = [{"path": "a", "bytes": 3_000_000}, {"path": "b", "bytes": 1_000_000}]
    (rank.run.path / "checkpoints").mkdir(parents=True)
    (rank.run.path / "checkpoints/step-00000010.json").write_text(json.dumps({"files": files}))
    config = make_config("checkpoint.max_rate=100kb", "checkpoint.interval=1 steps")
    saving = Saving(replace(rank, config=config), None, None, ())
    saving.begin_at(10)
    assert saving.is_due(11)  # nothing is known of their size yet
    saving.choose_cadence()
    assert saving.words == "at most every 39 s: checkpoint.max_rate"
    assert not saving.is_due(11)
    saving._at -= 40
    assert saving.is_due(11)


def saving_of(rank: Rank) -> Saving:
    """Of a small model that never stepped."""
    (rank.run.path / "checkpoints").mkdir(parents=True)
    net, samples = torch.nn.Linear(2, 2), Batches(Tiny({"pace": ""}), rank.config, rank.group)
    inner = InnerOptimizer(torch.optim.SGD(net.parameters()), sets_rates=True)
    return Saving(rank, net, inner, samples)


class Noise(Tiny):
    """Samples that are changed by chance as they are loaded."""

    def dataset(self):
        return self

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.rand(()).item(), random.random()])


@pytest.mark.parametrize("workers", [0, 1])
def test_no_two_ranks_or_attempts_change_their_samples_alike(make_config, workers):
    config = make_config("sync.global_batch_size=4", f"train.loader_workers={workers}")
    seen = []
    for rank, trained in ((0, 0), (1, 0), (0, 32), (0, 0)):
        torch.manual_seed(0)  # as of the model
        random.seed(0)
        samples = Batches(Noise({"pace": ""}), config, Group(rank, 2))
        samples.set(trained=[(0, 0, trained)])
        [(_, values)] = samples.next().passes
        seen.append(values.tolist())
    assert seen.pop() == seen[0], "it follows from where the run is"
    values = [value for pairs in seen for pair in pairs for value in pair]
    assert len({*values}) == len(values) == 12


@pytest.mark.parametrize(("world", "size"), [(1, 8), (4, 2)])
def test_no_pass_is_over_a_single_sample_and_each_sample_counts_once(make_config, world, size):
    """A BatchNorm has no statistics of one: the last step of a run failed, at each restart."""
    settings = ("sync.global_batch_size=9", f"train.batch_size={size}", "train.epochs=1")
    counted = 0.0
    for rank in range(world):
        samples = Batches(Noise({"pace": ""}), make_config(*settings), Group(rank, world))
        while batch := samples.next():
            shares, data = zip(*batch.passes, strict=True)
            assert min(map(len, data)) > 1
            counted += sum(share * len(each) for share, each in zip(shares, data, strict=True))
    assert counted == len(Noise({"pace": ""}))


class Stream(Noise):
    """Shorter than it says: it raises StopIteration from its tenth sample on."""

    def __init__(self, options: dict):
        super().__init__(options)
        self._samples = iter(torch.arange(9.0))

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(self._samples)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_stream_that_ends_early_is_an_error_and_no_end_of_the_run(make_config, size):
    """The run was done, with samples that were never trained."""
    settings = ("sync.global_batch_size=8", f"train.batch_size={size}")
    samples = Batches(Stream({"pace": ""}), make_config(*settings), Group())
    assert len([*samples.next().passes]) == 8 // size
    with pytest.raises((ElasticError, ValueError), match="StopIteration|shorter"):
        assert [*samples.next().passes]


@pytest.mark.parametrize("interval", ["auto", "1 steps"])
def test_no_checkpoint_is_due_while_one_is_being_written(rank, make_config, monkeypatch, interval):
    """Where a save took longer than the shortest interval, one followed another, and training
    stood still in between: how long they took was never learned."""
    monkeypatch.setattr(cadence, "LEAST_S", 0.0)
    begun, may_end, commit = [], threading.Event(), Checkpoints._commit

    def slow(checkpoints, draft, step, *args):
        begun.append(step)
        may_end.wait(1.0 if len(begun) > 1 else 60.0)
        commit(checkpoints, draft, step, *args)

    monkeypatch.setattr(Checkpoints, "_commit", slow)
    saving = saving_of(replace(rank, config=make_config(f"checkpoint.interval={interval}")))
    saving.begin_at(0)
    for number in range(1, 10):
        saving.begin(State(number), saving.is_due(number))
    saving.checkpoints._flight.since -= 3600  # as if it hung: whoever waits for it is ended
    is_due = saving.is_due(10)
    may_end.set()
    saving.begin(State(10), is_due)
    assert saving._auto_s >= 36_000  # a tenth of the time
    saving.checkpoints.finish()
    assert begun == [1, 10]


@pytest.mark.parametrize(("setting", "said"), [
    ("10m", "every 10m: checkpoint.interval"), ("50 steps", "every 50 steps: checkpoint.interval"),
    ("auto", "every 5 s: a save stalls 0 s, an interruption comes every 240 min"),
])
def test_status_tells_the_interval_that_is_used(rank, make_config, setting, said):
    config = make_config(f"checkpoint.interval={setting}")
    saving = Saving(replace(rank, config=config), None, None, ())
    saving.choose_cadence()
    assert saving.words == said


def test_a_filesystem_that_is_silent_is_no_wish_of_anybody(run, monkeypatch):
    """Rank 0 left its job, without a checkpoint, and as if after a notice."""

    def silent(*_):
        raise TryAgain("Stale file handle")

    monkeypatch.setattr(RunDir, "closing", silent)
    rank = Rank(run, run.config(), Group(), 1, "7")
    assert Wishes(rank, Notice()).mine() is Wish.GO_ON


def test_a_filesystem_that_is_silent_costs_a_checkpoint_and_no_run(
    rank, make_config, monkeypatch
):
    """The run ended, as if after a notice; where it was asked for the size of the newest one,
    rank 0 ended alone."""
    saving = saving_of(replace(rank, config=make_config("checkpoint.max_rate=1kb")))
    assert saving.save(State(1))

    def silent(*_):
        raise TryAgain("Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "insist", silent)
        saving.choose_cadence()
        assert not saving.save(State(2))
        saving.begin(State(3), True)
    assert saving.words == "checkpoint of step 3 not saved: Stale file handle"
    assert saving.save(State(3))


def test_slurm_is_asked_what_a_notice_is_for_where_time_seems_short(rank, monkeypatch):
    """Before a time limit there is more of it. A controller that preempts many answers late."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ELASTIC_NOTICE_S", "30")
    asked, notice = [], Notice()
    notice.since = time.time()

    def kill_at() -> float:
        asked.append(notice)
        return notice.since + 330

    monkeypatch.setattr("elastic.sync.rank.kill_at", kill_at)
    wishes = Wishes(rank, notice)
    assert (20 < wishes.left_s(20.0) <= 28, asked) == (True, [])
    assert 300 < wishes.left_s(45.0) <= 328
    assert asked == [notice]
    monkeypatch.setattr("elastic.sync.rank.kill_at", lambda: None)  # Slurm does not say
    assert 0 < wishes.left_s(45.0) <= 28


def test_a_notice_during_validation_ends_it_and_it_comes_again(tmp_path):
    run = made(tmp_path, {"train.max_steps": 30, "train.validate_every": 10})
    assert told_at(10, run) == Exit.TRY_AGAIN
    assert (lines_of(run)[-1]["step"], run.scores.read()) == (10, [])
    assert trainer_of(run, 2).main() == Exit.OK
    assert at_work(run) == "saving"
    assert [line["step"] for line in lines_of(run)] == list(range(1, 31))
    assert [line["step"] for line in run.lines(SCORES)] == [10, 20, 30]
    found = run.scores.read()
    assert found[-1].loss < found[0].loss


def test_a_validation_that_a_notice_ends_leaves_no_other_parameters(tmp_path, undisturbed):
    """A task may validate an average: the checkpoint had that, and the run trained on from it."""
    settings = {"train.validate_every": 7, "run.task": "tiny_task:Swapping"}
    run = made(tmp_path, settings, samples=700)
    assert told_at(7, run) == Exit.TRY_AGAIN
    saved, _, _ = find_newest(run, Group())
    (tensors,) = Layout.of(shapes(Net()), math.inf).fragments
    held = read_params(reader_of(run, saved), tensors)
    assert (saved.step, held.count_nonzero()) == (7, len(held)), "those of the task are all 0"
    assert trainer_of(run, 2).main() == Exit.OK
    samples = {line["step"]: line["samples"] for line in lines_of(run)}
    assert samples == {line["step"]: line["samples"] for line in undisturbed}
    told = []
    for _ in range(2):
        torch.seed()
        told.append(evaluate(run))
    assert told[0] == told[1], "what is drawn, is drawn alike"
    assert told[0]["step"] == 60


def test_settings_of_the_optimizer_are_those_that_run_toml_has_now(tmp_path):
    """They came back from the checkpoint, whatever somebody had mended, the learning rate apart."""
    settings = {"train.weight_decay": 0.5, "train.beta2": 0.9, "train.optimizer": "adamw"}
    run = made(tmp_path, settings)
    assert told_at(10, run) == Exit.TRY_AGAIN
    path = run.path / "run.toml"
    text = re.sub(r"\nweight_decay = .*", "\nweight_decay = 0.0", path.read_text())
    path.write_text(re.sub(r"\nbeta2 = .*", "\nbeta2 = 0.5", text))
    trainer = trainer_of(RunDir(run.path), 2)
    assert trainer.main() == Exit.OK
    for group in trainer.learner.optimizer.param_groups:
        assert (group["weight_decay"], group["betas"][1]) == (0.0, 0.5)


def test_a_score_is_the_same_on_the_way_and_at_the_end(tmp_path):
    """In train.precision: evaluated in float32 it was another one."""
    settings = {"train.precision": "bf16", "train.max_steps": 10, "train.validate_every": 10}
    run = made(tmp_path, settings)
    assert trainer_of(run).main() == Exit.OK
    assert evaluate(run) == {"step": 10, **run.scores.read()[-1].values}


def test_a_step_that_a_notice_ends_leaves_nothing_in_the_statistics(run, make_config):
    """What had begun of it comes again; its traces were in the checkpoint."""
    config = make_config("run.mode=sync", "run.task=tiny_task:Normed", "task.pace=''",
                         "train.batch_size=4", "sync.global_batch_size=8")
    notice = Notice()
    trainer = Trainer(Rank(run, config, Group(), 1, "7"), notice)
    before = {name: buffer.clone() for name, buffer in trainer.learner.model.named_buffers()}

    def passes(batch):
        for each in batch.passes:
            yield each
            notice.arrived(signal.SIGTERM)

    real = trainer.batches.next
    trainer.batches.next = lambda: replace(batch := real(), passes=passes(batch))
    assert (trainer.main(), trainer.state.step) == (Exit.TRY_AGAIN, 0)
    torch.testing.assert_close(dict(trainer.learner.model.named_buffers()), before)


def test_a_data_set_that_is_drawn_is_the_same_in_every_attempt(run, make_config):
    """As a random part of all samples is; without a seed each attempt trained on another."""
    found = []
    for _ in range(2):
        torch.seed()
        config = make_config("run.mode=sync", "run.task=tiny_task:Swapping", "task.pace=''")
        trainer = Trainer(Rank(run, config, Group(), 1, "7"), Notice())
        found.append([data[0].tolist() for _, data in trainer.batches.next().passes])
    assert found[0] == found[1]


def test_an_optimizer_whose_rate_is_0_is_refused(run, make_config, monkeypatch):
    """What a schedule multiplies by 0 trains nothing; local mode has refused it."""
    at_rest = lambda _, model: torch.optim.SGD(model.parameters(), lr=0.0)  # noqa: E731
    monkeypatch.setattr(Tiny, "optimizer", at_rest, raising=False)
    config = make_config("run.mode=sync", "run.task=tiny_task:Tiny", "task.pace=''")
    with pytest.raises(ElasticError, match="the learning rate of the optimizer is 0"):
        Trainer(Rank(run, config, Group(), 1, "7"), Notice())


def test_a_notice_is_heard_between_the_passes_of_a_step(tmp_path, undisturbed):
    """A step of many passes may take longer than the notice: nothing of it was used then."""
    (tmp_path / "pace").write_text("0.2")
    run = made(tmp_path, pace=str(tmp_path / "pace"))
    assert told_at(2, run) == Exit.TRY_AGAIN
    assert ([line["step"] for line in lines_of(run)], saved_steps(run)) == ([1, 2], [2])
    (tmp_path / "pace").write_text("0")
    assert trainer_of(run, 2).main() == Exit.OK
    assert_same_run(lines_of(run), undisturbed)


def test_an_optimizer_that_goes_on_from_copies_of_its_own_is_refused(tmp_path):
    """Its first step undid all training, at every restart."""
    run = made(tmp_path, {"run.task": "tiny_task:Copies"})
    assert told_at(30, run) == Exit.TRY_AGAIN
    said = "Copied does not train from the parameters that are loaded"
    with pytest.raises(ElasticError, match=said):
        trainer_of(run, 2).main()


def test_a_data_set_of_another_size_is_not_gone_on_with(tmp_path):
    """The order of the samples depends on the size: some would be trained twice, others never."""
    run = made(tmp_path)
    assert told_at(3, run) == Exit.TRY_AGAIN
    settings = run.path / "run.toml"
    settings.write_text(settings.read_text().replace("samples = 600", "samples = 700"))
    with pytest.raises(ElasticError, match="data set has 700 samples, the run's has 600") as caught:
        trainer_of(RunDir(run.path), 2).main()
    assert "submit a new run" in caught.value.hint
