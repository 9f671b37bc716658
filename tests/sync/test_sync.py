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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic.base import durable
from elastic.base.durable import read_json
from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.signals import Notice
from elastic.jobs import cadence
from elastic.run.rundir import RunDir
from elastic.run.shuffle import index
from elastic.run.sound import SCORES
from elastic.saved.checkpoint import Checkpoints, find_newest, read_params, reader_of
from elastic.saved.layout import Layout
from elastic.saved.replica import shapes
from elastic.sync.batches import Batches
from elastic.sync.rank import Rank, Wish, Wishes
from elastic.sync.saving import Saving, State
from elastic.sync.trainer import Trainer
from elastic.train.group import Group
from helpers import commit_of, elastic, environment, wait_until
from running import TESTS, Running, members, running
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


TWO = {"elastic.max": 2}


@contextlib.contextmanager
def synchronous(home: Path, settings: dict | None = None, **task) -> Iterator[Running]:
    """So slow, until `finish`, that the run is not over before the test has acted: a rank makes
    five passes a step where it is alone, and three where it is one of two."""
    task = {"samples": 600, "step_s": 0.2, **task}
    with running(home, {**SYNC, **(settings or {})}, **task) as run:
        yield run


def steps(run: Running) -> list[dict]:
    """What rank 0 wrote of every step that was taken, in the order of writing."""
    path = run.run.path / "metrics.jsonl"
    # The last line may be on its way.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def step(run: Running) -> int:
    return max((line["step"] for line in steps(run)), default=0)


def checkpoints(run: Running) -> list[int]:
    """The steps of those that are there."""
    return sorted(int(path.stem[5:]) for path in run.run.path.glob("checkpoints/step-*.json"))


def is_past_a_checkpoint(run: Running) -> bool:
    return step(run) > max(checkpoints(run), default=math.inf)


def at_work(run: Running) -> str:
    """What the ranks are at, by what they tell."""
    return (run.run.jobs.progress() or {}).get("state", "")


def further(run: Running, count: int, timeout_s: float = 60) -> None:
    """Wait for steps beyond the newest."""
    goal = step(run) + count
    run.until(lambda: step(run) >= goal, timeout_s, f"step {goal}")


def resize(run: Running, gpus: int) -> None:
    """Take the job away with notice; from now on there are so many GPUs."""
    job = run.jobs()["trainer", 0]
    run.set_capacity(gpus)
    run.scheduler.preempt(job.job_id)
    assert run.ended(job.job_id)["outcome"] == "yielded"
    run.until(lambda: steps(run)[-1]["world"] == gpus, 60, f"{gpus} ranks train")


def finish(run: Running) -> list[dict]:
    """Let the run end; its steps. The audit must be clean."""
    run.pace(0)
    run.until(lambda: run.run.done() and not run.jobs(), 90, "the end of the run")
    report = elastic("audit", run.run.path, "--json", env=environment(run.home))
    assert (report.returncode, json.loads(report.stdout)["problems"]) == (0, []), report.stdout
    wait_until(lambda: not members(run.home), 10, "no process is left")
    return steps(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    """The steps of a run that nothing happens to, on one GPU."""
    home = tmp_path_factory.mktemp("undisturbed")
    with synchronous(home, {"elastic.max": 1}, step_s=0) as run:
        return finish(run)


def assert_same_run(found: list[dict], wanted: list[dict]) -> None:
    """The same samples in the same steps, each trained once, with the same losses."""
    assert [(line["step"], line["samples"]) for line in found] == [
        (line["step"], line["samples"]) for line in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4), one


def test_another_job_follows_a_crash_where_nobody_has_cron(tmp_path):
    """The pass after the job had to wait, and nobody made another one."""
    with synchronous(tmp_path, {"sync.crash_retries": 0, "elastic.backoff": "2s"}) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "steps")
        first = run.jobs()["trainer", 0].job_id
        run.reconcile = lambda: None
        run.kill("elastic.train.start trainer")
        run.until(lambda: (run.run.jobs.progress() or {})["job_id"] != first, 60, "another job")
        assert run.run.jobs.ending(first)["outcome"] == "failed"
        finish(run)


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """Where processes make temporary files; a short path, for sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_a_run_that_is_resized_trains_the_same_samples_in_the_same_steps(
        tmp_path, undisturbed, temporary):  # fmt: skip
    """Nothing is left on its nodes: every process that loaded samples left a folder there."""
    settings = {"elastic.max": 3, "local_scheduler.gpus": 2, "train.loader_workers": 1}
    with synchronous(tmp_path, settings) as run:
        further(run, 5)
        assert len(run.pids("elastic.train.start trainer")) == 2 + 2  # each rank with its loader
        for gpus in (1, 3):
            resize(run, gpus)
            further(run, 4)
        lines = finish(run)
    assert_same_run(lines, undisturbed)  # notice: no step is lost, none repeated
    worlds = [line["world"] for line in lines]
    changes = [now for now, then in zip(worlds, [0, *worlds], strict=False) if now != then]
    assert changes == [2, 1, 3]
    assert [*temporary.glob("pymp-*")] == []


def test_a_run_grows_by_itself_when_gpus_become_free(tmp_path, undisturbed):
    settings = {"elastic.max": 3, "local_scheduler.gpus": 1, "sync.grow_after": "1s"}
    with synchronous(tmp_path, settings) as run:
        further(run, 5)
        assert not run.events("cancel")
        run.set_capacity(2)
        run.until(lambda: steps(run)[-1]["world"] == 2, 60, "two ranks train")
        (grown,) = run.events("cancel")
        lines = finish(run)
    assert grown["reason"] == "it has 1 GPUs, and 2 are to be had"
    assert_same_run(lines, undisturbed)


def test_without_a_notice_at_most_one_checkpoint_interval_is_repeated(tmp_path, undisturbed):
    with synchronous(tmp_path, TWO) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "a checkpoint, and a step more")
        run.scheduler.kill(run.jobs()["trainer", 0].job_id)
        lines = finish(run)
    last = {line["step"]: line for line in lines}
    assert_same_run([last[number] for number in sorted(last)], undisturbed)
    assert 0 < len(lines) - len(last) <= 2 * INTERVAL  # one, and what was being written


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_rank_that_dies_or_hangs_costs_no_job(tmp_path, undisturbed, how):
    settings = {**TWO, **({"health.hang_timeout": "15s"} if how == signal.SIGSTOP else {})}
    with synchronous(tmp_path, settings) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "a checkpoint, and a step more")
        job = run.jobs()["trainer", 0]
        before, attempt = len(run.events("restart")), steps(run)[-1]["attempt"]
        run.kill("elastic.train.start trainer", how)
        run.until(lambda: len(run.events("restart")) > before, 60, "the ranks are started again")
        run.until(lambda: steps(run)[-1]["attempt"] > attempt, 60, "they train")
        assert run.jobs()["trainer", 0].job_id == job.job_id
        lines = finish(run)
    last = {line["step"]: line for line in lines}
    assert_same_run([last[number] for number in sorted(last)], undisturbed)


def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path, undisturbed):
    with synchronous(tmp_path, step_s=0.1) as run:
        run.until(lambda: is_past_a_checkpoint(run), 60, "one that the next is on top of")
        job = run.jobs()["trainer", 0]
        run.set_capacity(0)
        run.scheduler.preempt(job.job_id)
        run.ended(job.job_id)
        newest = sorted((run.run.path / "checkpoints").glob("step-*/"))[-1]
        victim = next(newest.glob("*.distcp"))
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        before = len(steps(run))
        run.set_capacity(1)
        run.until(lambda: len(steps(run)) > before, 60, "it goes on")
        (refused,) = run.events("checkpoint-refused")
        assert victim.name in refused["reason"]
        lines = finish(run)
    last = {line["step"]: line for line in lines}
    assert_same_run([last[number] for number in sorted(last)], undisturbed)


BAD_STEP = 13  # trains the sample that is not a number


@pytest.mark.parametrize("action", ["skip", "rollback", "stop", "warn"])
def test_a_batch_that_is_not_finite_is_dealt_with_as_the_run_says(tmp_path, action):
    bad = index(300, 0, 0, BAD_STEP * BATCH + 3)
    settings = {"health.nan_action": action, "elastic.max_failures": 1, "sync.crash_retries": 0,
                "checkpoint.interval": "5 steps", "train.validate_every": 20}
    # A part of one sample has no statistics; two ranks have such a part.
    settings |= {"elastic.max": 2} if action == "rollback" else {"run.task": "tiny_task:Normed"}
    with synchronous(tmp_path, settings, samples=300, nan_sample=bad, step_s=0.02) as run:
        if action in ("stop", "warn"):
            failed = run.until_failed(120)
            events = run.events("not-finite")
        else:
            lines, events = finish(run), run.events("not-finite")
            [score] = run.run.scores.read()
            assert math.isfinite(score.loss)
    assert (events[0]["step"], events[0]["action"]) == (BAD_STEP, action)
    if action == "stop":
        assert re.search(f"step {BAD_STEP}: .*gradient norm nan", failed["detail"])
        assert len(events) == 1
    elif action == "warn":  # the step is taken, and all that follow are lost: the run is stopped
        assert [event["action"] for event in events] == ["warn"] * 5 + ["stop"]
    else:
        last = {line["step"]: tuple(line["samples"]) for line in lines}
        left_out = (BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH)
        wanted = [(at, at + BATCH) for at in range(0, 300, BATCH) if at != left_out[0]]
        assert [last[number] for number in sorted(last)] == wanted
        assert (len(lines) > len(last)) == (action == "rollback")  # steps 11 to 13 again


def test_a_batch_of_padding_alone_has_no_loss_and_spoils_none(tmp_path):
    """Its batches were skipped, and of too many in a row the run ended; here sample 0 is all
    padding, and tokens do not count it, and batches are of one or two samples."""
    for size in (1, 2):
        (home := tmp_path / str(size)).mkdir()
        settings = {"run.task": "tiny_task:Masked", "sync.global_batch_size": size,
                    "train.batch_size": 1}  # fmt: skip
        with synchronous(home, settings, samples=100, step_s=0) as run:
            lines = finish(run)
            assert not run.events("not-finite")
        losses = [line["loss"] for line in lines]
        assert len(losses) == 100 / size
        assert all(map(math.isfinite, losses))
        assert len({*losses}) > len(losses) / 2


def test_a_full_disk_costs_a_checkpoint_and_no_step(tmp_path):
    with synchronous(tmp_path, TWO) as run:  # what one is refused, both must know
        run.until(lambda: step(run) >= 5, 60, "the first steps")
        folder = run.run.path / "checkpoints"
        folder.rename(tmp_path / "away")
        folder.write_text("no folder: every write fails")
        run.until(lambda: run.events("checkpoint-failed"), 60, "a checkpoint that fails")
        folder.unlink()
        (tmp_path / "away").rename(folder)
        lines = finish(run)
    assert [line["step"] for line in lines] == list(range(1, 61))


def test_a_later_job_of_the_run_ends_all_ranks_alike(tmp_path):
    """Rank 0 left alone, the other died of that, and the launcher took the run back."""
    with synchronous(tmp_path, TWO) as run:
        run.until(lambda: step(run) >= 5, 60, "the first steps")
        job_id = run.jobs()["trainer", 0].job_id
        run.run.slots.claim(0, {"job_id": "another", "node": "n", "pid": 1, "time": 0.0})

        def end() -> dict | None:
            said = run.run.jobs.ending(job_id)
            return said if said["state"] == "ended" else None

        run.until(end, 30, "its end")
        why = "attempt 2 has the run now"
        assert (end()["outcome"], end()["reason"]) == ("fenced", why)
        assert not run.events("restart")
        finish(run)


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


def test_where_the_notice_is_shorter_than_a_save_the_newest_checkpoint_has_to_do(
    tmp_path, undisturbed
):
    """The scheduler says 1 s (which is no time at all, with the margin), and gives more."""
    with synchronous(tmp_path, {"local_scheduler.grace": "1s"}, step_s=0.1) as run:
        run.until(lambda: checkpoints(run), 60, "a checkpoint")
        run.pace(1)  # the next one is far away
        run.until(lambda: is_past_a_checkpoint(run), 60, "a checkpoint, and a step more")
        run.scheduler.preempt(run.jobs()["trainer", 0].job_id, grace_s=60)
        run.until(lambda: run.events("preempt"), 30, "the ranks leave")
        lines = finish(run)
        log = run.run.log_path("trainer", 0).read_text()
    assert "s are left, and it takes" in log
    last = {line["step"]: line for line in lines}
    assert_same_run([last[number] for number in sorted(last)], undisturbed)
    assert 0 < len(lines) - len(last) <= 2 * INTERVAL


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
    return Saving(rank, net, torch.optim.SGD(net.parameters()), samples)


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
])  # fmt: skip
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


def test_a_run_of_so_many_steps_is_looked_after(tmp_path):
    settings = {"elastic.max": 3, "sync.sizes": [1, 2], "local_scheduler.gpus": 3,
                "train.max_steps": 30, "health.liveness_interval": "0.1s"}  # fmt: skip
    with synchronous(tmp_path, settings, step_s=0.02) as run:
        lines = finish(run)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert {line["world"] for line in lines} == {2}  # of the 3 that it may have


def test_a_notice_during_validation_ends_it_and_it_comes_again(tmp_path):
    settings = {**TWO, "train.max_steps": 30, "train.validate_every": 10}
    with synchronous(tmp_path, settings, step_s=0.1, validation_passes=300) as run:
        run.until(lambda: at_work(run) == "validating", 60, "a validation")
        assert step(run) == 10
        job = run.jobs()["trainer", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        lines = finish(run)
        assert at_work(run) == "saving"
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["step"] for line in run.run.lines(SCORES)] == [10, 20, 30]
    found = run.run.scores.read()
    assert found[-1].loss < found[0].loss


def test_a_validation_that_a_notice_ends_leaves_no_other_parameters(tmp_path, undisturbed):
    """A task may validate an average: the checkpoint had that, and the run trained on from it."""
    settings = {"train.validate_every": 7, "run.task": "tiny_task:Swapping"}
    with synchronous(tmp_path, settings, samples=700, step_s=0.1, validation_passes=20) as run:
        run.until(lambda: step(run) == 7 and at_work(run) == "validating", 60, "a validation")
        run.pace(0.5)
        job = run.jobs()["trainer", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        saved, _, _ = find_newest(run.run, Group())
        (tensors,) = Layout.of(shapes(Net()), math.inf).fragments
        held = read_params(reader_of(run.run, saved), tensors)
        lines = finish(run)
        env = environment(run.home, PYTHONPATH=str(TESTS))
        told = [elastic("evaluate", run.run.path, env=env) for _ in range(2)]
    assert told[0].stdout == told[1].stdout != "", "what is drawn, is drawn alike"
    assert (saved.step, held.count_nonzero()) == (7, len(held)), "those of the task are all 0"
    samples = {line["step"]: line["samples"] for line in lines}
    assert samples == {line["step"]: line["samples"] for line in undisturbed}


def test_a_step_that_a_notice_ends_leaves_nothing_in_the_statistics(run, make_config):
    """What had begun of it comes again; its traces were in the checkpoint."""
    config = make_config("run.mode=sync", "run.task=tiny_task:Normed", "task.pace=''",
                         "train.batch_size=4", "sync.global_batch_size=8")  # fmt: skip
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
    with synchronous(tmp_path) as run:
        further(run, 2)
        run.pace(8)  # seconds of a pass: 40 s of a step
        time.sleep(0.5)  # till after the last short step, mostly: else nothing is shown
        job = run.jobs()["trainer", 0]
        run.scheduler.preempt(job.job_id, grace_s=25)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        assert checkpoints(run)[-1] == step(run)
        lines = finish(run)
    assert_same_run(lines, undisturbed)


def test_an_optimizer_that_goes_on_from_copies_of_its_own_is_refused(tmp_path):
    """Its first step undid all training, at every restart."""
    settings = {"run.task": "tiny_task:Copies", "elastic.max_failures": 1,
                "sync.crash_retries": 0}  # fmt: skip
    with synchronous(tmp_path, settings, samples=6000, step_s=0.02) as run:
        further(run, 30)
        run.scheduler.preempt(run.jobs()["trainer", 0].job_id)
        failed = run.until_failed(60)
    assert "Copied does not train from the parameters that are loaded" in failed["reason"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path, undisturbed):
    with synchronous(tmp_path) as run:
        further(run, 3)
        assert elastic("stop", run.run.path, env=environment(run.home)).returncode == 0
        run.until(lambda: not run.jobs(), 60, "the job leaves")
        reached = step(run)
        time.sleep(0.5)
        run.reconcile()
        assert (run.jobs(), step(run)) == ({}, reached)
        assert elastic("scale", run.run.path, env=environment(run.home)).returncode == 0
        lines = finish(run)
    assert_same_run(lines, undisturbed)


def test_a_data_set_of_another_size_is_not_gone_on_with(tmp_path):
    """The order of the samples depends on the size: some would be trained twice, others never."""
    settings = {"sync.crash_retries": 0, "elastic.max_failures": 1}
    with synchronous(tmp_path, settings) as run:
        further(run, 3)
        assert elastic("stop", run.run.path, env=environment(run.home)).returncode == 0
        run.until(lambda: not run.jobs(), 60, "the job leaves")
        settings = run.run.path / "run.toml"
        settings.write_text(settings.read_text().replace("samples = 600", "samples = 700"))
        assert elastic("scale", run.run.path, env=environment(run.home)).returncode == 0
        failed = run.until_failed(60)
    assert "data set has 700 samples, the run's has 600" in failed["reason"]
    assert "submit a new run" in failed["detail"]


def test_status_says_how_many_gpus_train_and_when_it_saves(tmp_path):
    with synchronous(tmp_path, {**TWO, "checkpoint.interval": "auto"}) as run:
        further(run, 5)
        run.until(lambda: read_json(run.run.path / "progress.json"), 20, "progress")
        answer = elastic("status", run.run.path, "--json", env=environment(run.home))
        seen = json.loads(answer.stdout)
    assert (seen["mode"], seen["state"], len(seen["workers"])) == ("sync", "running", 2)
    assert "a save stalls" in seen["reason"]
    assert seen["tokens_goal"] == 600
