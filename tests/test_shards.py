"""Averaging in several processes: the bits of one, whatever dies."""

import contextlib
import itertools
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.audit import audit
from elastic.errors import ElasticError, TryAgain
from elastic.rundir import RunDir
from elastic.shard import DeltaLost, RemoteShard
from elastic.transport import fragment_name
from helpers import elastic, wait_until
from merging import COMMIT, Rounds
from running import TESTS, command_line, environment, kill_all, members, running, toml
from test_slurm_story import ON_SLURM

pytest_plugins = ["slurm_sandbox"]

SIZE = 30
EXACT = ("local_sgd.compression=none", "local_sgd.cold_start_steps=0")


@pytest.fixture
def open_rounds(make_run):
    """open_rounds(shards, "key=value", ...) -> Rounds of a new run."""
    opened, names = [], (f"run-{number}" for number in itertools.count())

    def open_(shards: int, *overrides: str) -> Rounds:
        torch.manual_seed(3)
        run = make_run(*EXACT, f"local_sgd.shards={shards}", *overrides, name=next(names))
        opened.append(Rounds(run, torch.randn(SIZE)))
        return opened[-1]

    yield open_
    for each in opened:
        each.averager.close()


def one_round(rounds: Rounds, seed: int) -> list[tuple[str, str]]:
    """Three deltas, one an outlier and one late; what the commit says of its files."""
    torch.manual_seed(seed)
    late = []
    if seed:
        late = [rounds.deliver(2, torch.randn(SIZE), 50, base=rounds.version - 1)]
    fresh = [rounds.deliver(s, torch.randn(SIZE) * 9**s, 100 + s) for s in range(2)]
    commit = rounds.close([*fresh, *late])
    assert commit["cos"] if seed else commit["cos"] == 0.0
    return [(entry["path"], entry["xxh3"]) for entry in commit["files"]]


def pids(rounds: Rounds) -> list[int]:
    return [shard._process.pid for shard in rounds.averager.shards]


def lost(rounds: Rounds) -> list[int]:
    return [event["shard"] for event in rounds.run.events() if event["kind"] == "shard-lost"]


def test_the_bits_do_not_depend_on_the_number_of_shards(open_rounds):
    """Files, momentum and norms, over three rounds; more shards than fragments are not started."""
    found = []
    for shards in (1, 2, 5):
        rounds = open_rounds(shards)
        found.append([one_round(rounds, seed) for seed in range(3)])
        assert len(rounds.averager.shards) == min(shards, 3)
    assert found[0] == found[1] == found[2]
    assert isinstance(rounds.averager.shards[0], RemoteShard)


def test_a_shard_that_dies_is_started_again_alone(open_rounds):
    """Idle, with deltas checked, and while it writes: the version has the bits it would have."""
    smooth, rounds = open_rounds(1), open_rounds(2)
    assert one_round(rounds, 0) == one_round(smooth, 0)
    before = pids(rounds)
    os.kill(before[1], signal.SIGKILL)
    assert one_round(rounds, 1) == one_round(smooth, 1)
    assert lost(rounds) == [1]
    assert pids(rounds)[0] == before[0]
    assert pids(rounds)[1] != before[1]


def kills_while_it_steps(shard: RemoteShard, after_s: float) -> None:
    """The next outer step's process dies so long after it was asked."""
    asked = shard._said

    def asked_and_killed(question: dict) -> dict:
        if question["do"] != "advance":
            return asked(question)
        shard._said = asked
        killer = threading.Timer(after_s, shard._process.kill)
        killer.start()
        try:
            return asked(question)
        finally:
            killer.join()

    shard._said = asked_and_killed


def test_a_shard_killed_at_any_moment_of_an_outer_step_changes_nothing(open_rounds):
    smooth, rounds = open_rounds(1), open_rounds(2)
    for seed, after_s in enumerate((0.0, 0.001, 0.002, 0.004, 0.006, 0.01)):
        kills_while_it_steps(rounds.averager.shards[0], after_s)
        assert one_round(rounds, seed) == one_round(smooth, seed)
    assert len(lost(rounds)) >= 2


def test_a_shard_that_always_dies_is_an_error_that_says_so(open_rounds):
    rounds = open_rounds(2)
    shard = rounds.averager.shards[0]
    shard._command = ["false"]
    os.kill(pids(rounds)[0], signal.SIGKILL)
    with pytest.raises(ElasticError, match="shard 0 died 5 times"):
        one_round(rounds, 0)
    shard._notice = True
    with pytest.raises(TryAgain, match="notice"):
        shard.check(rounds.put(0, torch.randn(SIZE), 10))


def test_lost_bytes_and_full_disks_are_told_through_the_pipe(open_rounds):
    rounds, smooth = open_rounds(2), open_rounds(1)
    good, bad = (rounds.deliver(slot, torch.full((SIZE,), slot + 1.0), 10) for slot in range(2))
    path = rounds.run.path / "deltas" / fragment_name(bad.header.key, 1)
    body = path.read_bytes()
    path.write_bytes(bytes(len(body)))
    with pytest.raises(DeltaLost) as error:
        rounds.close([good, bad])
    assert error.value.key == bad.header.key
    altered = replace(bad.header, fragments=bad.header.fragments[::-1])
    assert rounds.averager.check(altered).refused.startswith("truncated")
    # A file where the draft belongs, as good as a disk that takes nothing.
    blocked = rounds.run.path / "versions"
    held = blocked.rename(blocked.with_name("held"))
    blocked.write_bytes(b"")
    recipe, said = rounds.averager.weigh([good])
    with pytest.raises((NotADirectoryError, FileExistsError)):
        rounds.averager.commit(1, recipe, COMMIT | said)
    blocked.unlink()
    held.rename(blocked)
    assert rounds.averager.commit(1, recipe, COMMIT | said)["version"] == 1
    smooth.close([smooth.deliver(0, torch.full((SIZE,), 1.0), 10)])
    files = [[each["xxh3"] for each in one.run.commit(1)["files"]] for one in (rounds, smooth)]
    assert files[0] == files[1]


@pytest.mark.parametrize("transport", ["filesystem", "redis"])
def test_a_run_goes_on_while_shards_masters_and_redis_are_killed(tmp_path, transport):
    settings = {"elastic.max": 2, "local_sgd.shards": 2, "local_sgd.fragment": "256b",
                "local_sgd.transport": transport}  # fmt: skip
    with running(tmp_path, settings, samples=2400) as run:
        run.versions(2)
        assert len(run.pids("elastic.start shard")) == 2
        for _ in range(3):
            run.kill("elastic.start shard")
            run.versions(2)
        run.kill("redis")
        run.versions(2)
        shards = set(run.pids("elastic.start shard"))
        run.kill("master")
        run.until(lambda: not shards & set(run.pids("elastic.start shard")), 30, "they go, too")
        run.versions(2)
        run.finish()
        assert len(run.events("shard-lost")) >= 3


# ---- on a cluster -------------------------------------------------------------------------------


def shards_by_node(home: Path) -> dict[str, int]:
    """Node -> the process of the shard that runs there."""
    pids = [pid for pid in members(home) if "elastic.start shard" in command_line(pid)]
    return {node_of(pid): pid for pid in pids}


def node_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = [each for each in entries if each.startswith(b"SLURMD_NODENAME=")]
        return names[0].partition(b"=")[2].decode() if names else ""
    return ""


@pytest.mark.slurm
@pytest.mark.timeout(400)
def test_a_master_of_two_nodes_averages_on_both(slurm, tmp_path):
    """A step of the job on each; one that is killed comes back there, and no one else restarts."""
    settings = {**ON_SLURM, "elastic.max": 2, "local_sgd.fragment": "256b", "local_sgd.shards": 2,
                "slurm.master_partition": "preempt", "slurm.master_nodes": 2,
                "task.samples": 3000, "task.pace": str(tmp_path / "pace")}  # fmt: skip
    (tmp_path / "pace").write_text("0.02")
    shutil.copy(TESTS / "tiny_task.py", tmp_path)
    (tmp_path / "tiny.toml").write_text("".join(f"{line}\n" for line in toml(settings)))
    env = environment(tmp_path, **slurm.environment())
    done = elastic("submit", tmp_path / "tiny.toml", "--name", "tiny", "--parsable", env=env)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / "tiny")

    def until(condition, what: str):
        def passed():
            elastic("reconcile", run.path, env=env)
            assert not run.failed(), run.failed()
            return condition()

        return wait_until(passed, 150, what)

    try:
        until(lambda: run.newest_version() >= 2, "two versions")
        before = shards_by_node(tmp_path)
        assert len(before) == 2
        assert "" not in before
        elsewhere = max(before)
        os.kill(before[elsewhere], signal.SIGKILL)
        version = run.newest_version()
        until(lambda: run.newest_version() >= version + 3, "it goes on")
        after = shards_by_node(tmp_path)
        assert after.keys() == before.keys()
        assert [node for node in after if after[node] != before[node]] == [elsewhere]
        assert [event["kind"] for event in run.events()].count("shard-lost") == 1
        assert run.newest_commit()["master_epoch"] == 1
        (tmp_path / "pace").write_text("0")
        until(lambda: run.done(), "the run is done")
        wait_until(lambda: not shards_by_node(tmp_path), 60, "the shards are gone")
        assert not audit(run.path, run.config().checkpoint.keep)["problems"]
    finally:
        slurm.run("scancel", "--me")
        kill_all(tmp_path)
