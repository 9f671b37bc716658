"""One run in both modes: `elastic-scale RUN --mode` there and back, every sample trained once.

pytest tests/whole/test_modes.py
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import default_collate

from elastic.people import report, status
from elastic.saved.checkpoint import steps as saved_steps
from elastic.saved.replica import Replica
from elastic.saved.versions import read_layout, read_params
from helpers import elastic, environment
from running import Running, members, running
from test_sync import further, step, steps
from tiny_task import Net, Samples

BATCH = 10
BOTH = {
    "elastic.min": 1,
    "elastic.max_failures": 50,
    "elastic.reconcile_interval": "5s",
    "sync.global_batch_size": BATCH,
    "train.batch_size": 2,
    "local_sgd.inner_steps": 20,  # of 2 samples each
    "checkpoint.interval": "20 steps",
    "local_scheduler.gpus": 2,
}


@contextlib.contextmanager
def both(home: Path, mode: str = "local", most: int = 1, keep_every: int = 0):
    """`most`: workers, or ranks."""
    settings = {**BOTH, "run.mode": mode, "elastic.max": most, "checkpoint.keep_every": keep_every}
    with running(home, settings, samples=2000, step_s=0.05) as run:
        yield run


def validated(run: Running) -> list[float]:
    """The loss of each version, over samples that are always the same."""
    samples = Samples(500, -1)
    x, y = default_collate([samples[index] for index in range(500)])
    losses = []
    for version in range(run.version + 1):
        net, layout = Net(), read_layout(run.run, version)
        replica = Replica(net, layout)
        for index in range(len(layout.fragments)):
            replica.load(index, read_params(run.run, run.run.commits.of(version), layout, index))
        with torch.no_grad():
            losses.append(torch.nn.functional.mse_loss(net(x), y).item())
    return losses


def switch(run: Running, mode: str) -> None:
    """Ask for the other mode, and return at once."""
    answer = elastic("scale", run.run.path, "--mode", mode, env=environment(run.home))
    assert answer.returncode == 0, answer.stderr


def to_sync(run: Running) -> None:
    """Switch, and wait until the trainer has made a few steps."""
    before = step(run)
    switch(run, "sync")
    run.until(lambda: step(run) > before, 90, "the trainer trains")
    assert not {role for role, _ in run.jobs()} & {"master", "worker"}
    further(run, 5)


def to_local(run: Running) -> None:
    """Switch, and wait until the workers have made a few versions."""
    before = run.version
    switch(run, "local")
    run.until(lambda: run.version > before + 2, 90, "workers train")
    assert "trainer" not in {role for role, _ in run.jobs()}


def by_trainer(run: Running) -> list[dict]:
    """The commits that are checkpoints of sync mode."""
    return [c for c in run.commits() if any(d.role == "trainer" for d in c.deltas)]


def tokens(run: Running) -> int:
    answer = elastic("status", run.run.path, "--json", env=environment(run.home))
    return json.loads(answer.stdout)["tokens"]


def finish(run: Running) -> None:
    """Let the run end: every sample once, by the audit's word; no job has crashed."""
    run.pace(0)
    run.until(lambda: run.run.done() and not run.jobs(), 120, "the end of the run")
    answer = elastic("audit", run.run.path, "--json", env=environment(run.home))
    report = json.loads(answer.stdout)
    assert (report["problems"], report["missing"], report["repeated"]) == ([], 0, 0)
    assert report["committed"] == report["tokens"] == 2000
    assert run.run.done()["tokens"] == 2000
    assert not [end for end in run.events("end") if end["outcome"] == "failed"]
    assert not [pid for pid in members(run.home) if pid != os.getpid()]


def test_local_sync_local_trains_every_sample_once_and_the_loss_goes_on(tmp_path):
    with both(tmp_path, most=2, keep_every=1) as run:
        run.reconcile = lambda: None  # as a user without the line in the crontab
        run.until(lambda: run.version >= 3, 60, "versions")
        to_sync(run)
        base = run.run.commits.newest()
        assert run.events("restore")[0]["resume"] == f"version {base.version}"
        seen = [tokens(run)]
        assert seen[0] > base.tokens
        first = steps(run)[0]
        assert (first["step"], first["world"]) in ((1, 1), (1, 2))  # a worker may still be ending
        assert first["tokens"] == base.tokens + BATCH
        to_local(run)
        (folded,) = by_trainer(run)
        assert folded.version == base.version + 1
        assert folded.step == saved_steps(run.run)[0] == step(run)  # notice: no step is lost
        assert folded.tokens == steps(run)[-1]["tokens"]
        seen.append(tokens(run))
        finish(run)
        assert seen == sorted(seen)
        losses = validated(run)
        at, noise = folded.version, losses[0] / 8  # one round may undo the last ones' gain
        assert losses[at] < losses[at - 1] + noise
        assert max(losses[at + 1 : at + 4]) < losses[at] + noise
        assert losses[-1] < 2 * noise


def test_what_its_user_asks_for_is_no_preemption(tmp_path):
    def taken() -> tuple[float, set[str]]:
        kinds = {each["kind"] for each in report.incidents(run.events())}
        return status.observe(run.run)["preemptions_per_h"], kinds - {"reject"}

    with both(tmp_path, most=2) as run:
        run.until(lambda: run.version >= 2, 60, "versions")
        answer = elastic("scale", run.run.path, "--max", 1, env=environment(run.home))
        assert answer.returncode == 0, answer.stderr
        run.until(lambda: run.events("preempt") and run.events("end"), 60, "a worker leaves")
        assert taken() == (0.0, set())
        ((_, slot),) = (place for place in run.jobs() if place[0] == "worker")
        run.scheduler.preempt(run.jobs()["worker", slot].job_id)
        run.until(lambda: len(run.events("end")) == 2, 60, "the other one is taken away")
        run.until(lambda: taken() == (2.0, {"preempt"}), 30, "a pass has counted it")


def kill_all_of(run: Running, kind: str) -> None:
    for pid in run.pids(kind):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_kill_at_any_switch_loses_and_repeats_nothing(tmp_path):
    """Of those who work or of those who lead, when one mode ends and when the other does."""
    kills = (("trainer", "elastic.train.start trainer"), ("master", "elastic.sync.launch"))
    with both(tmp_path) as run:
        run.until(lambda: run.version >= 2, 60, "versions")
        for round_, victims in enumerate(kills):
            before = step(run)
            switch(run, "sync")
            kill_all_of(run, victims[0])
            run.until(lambda n=before: step(run) >= n + 3, 90, "the trainer trains")
            reached = run.version
            run.until(lambda n=before: max(saved_steps(run.run), default=0) > n, 90, "a checkpoint")
            further(run, 3)
            switch(run, "local")
            kill_all_of(run, victims[1])
            run.until(lambda n=reached: run.version >= n + 3, 90, "workers train")
            assert by_trainer(run)[round_].version == reached + 1
        assert len(by_trainer(run)) == 2
        finish(run)


def test_a_run_may_begin_and_end_in_sync_mode_and_its_master_die_while_it_takes_over(tmp_path):
    with both(tmp_path, "sync") as run:
        run.until(lambda: step(run) >= 5, 60, "steps")
        switch(run, "local")
        # One that dies before its first word has failed to start.
        run.until(lambda: has_spoken(run, "master"), 60, "a master's first word")
        for moment in ("version 0", "a draft of version 1", "version 1"):
            deadline = time.monotonic() + 60
            while not reached(run, moment) and time.monotonic() < deadline:
                run.reconcile()
                time.sleep(0.001)
            kill_all_of(run, "master")
        run.until(lambda: run.version >= 4, 90, "workers train")
        assert [commit.version for commit in by_trainer(run)] == [1]
        assert run.run.commits.of(0).tokens == 0
        to_sync(run)
        finish(run)
        assert len(by_trainer(run)) == 1  # what came after is the newest checkpoint


def has_spoken(run: Running, role: str) -> bool:
    return any(record.get("role") == role for record in run.run.jobs.endings())


def reached(run: Running, moment: str) -> bool:
    draft = (run.run.path / "versions" / f".000001.epoch{run.run.masters.newest()}").exists()
    return run.version >= int(moment[-1]) or (moment.startswith("a draft") and draft)


def test_there_and_back_quickly_and_often(tmp_path):
    with both(tmp_path) as run:
        run.until(lambda: run.version >= 2, 60, "versions")
        for wait_s in (0, 0.5, 3):
            for mode in ("sync", "local"):
                switch(run, mode)
                end = time.monotonic() + wait_s
                run.until(lambda end=end: time.monotonic() > end, 10, "some time passes")
        run.versions(2, 90)
        finish(run)


def test_a_switch_that_cannot_be_is_refused_with_its_reason(tmp_path):
    own = {"run.command": ["sleep", "1000"], "run.task": "tiny_task:Tiny"}
    with running(tmp_path, {**BOTH, **own}) as run:
        env = environment(run.home)
        answer = elastic("scale", run.run.path, "--mode", "sync", env=env)
        assert (answer.returncode, run.run.control().mode) == (2, "local")
        assert "run.command is a loop for one mode" in answer.stderr
        assert elastic("scale", run.run.path, "--mode", "fast", env=env).returncode == 2
