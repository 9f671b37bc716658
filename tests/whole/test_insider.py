"""A worker's password in the wrong hands beside an honest run: it costs the run time, and no more.

Real processes, over the run's own Redis; tests/insider.py does what that password can do, for
4 seconds, or as many as ELASTIC_INSIDER_S says. pytest tests/whole/test_insider.py
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import torch
from torch.nn import functional
from torch.utils.data import default_collate

from elastic.base.errors import TryAgain
from elastic.local.store import WorkerStore
from elastic.saved.versions import read_layout, read_params, split
from helpers import ROOT
from insider import ATTACKS
from running import Running, running
from tiny_task import Net, Samples

SECONDS = float(os.environ.get("ELASTIC_INSIDER_S", "4"))
SAMPLES = 4_000
LOSS = 0.028  # begins at 3; six undisturbed runs of 4,000 or 12,000 samples ended at 0.007 to 0.009
SETTINGS = {"elastic.max": 2, "elastic.min": 2, "local_sgd.inner_steps": 20,
            "health.hang_timeout": "15s"}


def loss(run: Running) -> float:
    """Of the last version, on samples of the data set."""
    commit, net = run.run.commits.newest(), Net()
    layout = read_layout(run.run, commit.version)
    state = {}
    for index in range(len(layout.fragments)):
        state |= split(layout, index, read_params(run.run, commit, layout, index).float())
    net.load_state_dict(state)
    samples = Samples(SAMPLES, -1)
    x, y = default_collate([samples[i] for i in range(0, SAMPLES, 20)])
    with torch.no_grad():
        return functional.mse_loss(net(x), y).item()


@pytest.mark.timeout(900)
def test_a_run_ends_as_ever_after_the_worst_that_a_workers_password_can_do(tmp_path):
    with running(tmp_path, SETTINGS, samples=SAMPLES, step_s=0.05) as run:
        run.workers(2)
        run.versions(1)
        before = run.version
        said = attack(run, SECONDS)
        during = run.version - before
        report = run.finish(200)
        assert not run.run.failed()
        disturbed = loss(run)
        masters = run.run.masters.newest()
        deltas = [delta for commit in run.commits() for delta in commit.deltas]
        events = (run.run.path / "events.jsonl").read_bytes()
    print(json.dumps({"disturbed": disturbed, "versions": during, "masters": masters,
                      "events": len(events), **said}))
    assert said["tried"].keys() == {attack.__name__ for attack in ATTACKS}
    assert said["refused"]["play_the_master"] == said["tried"]["play_the_master"]
    assert {delta.slot for delta in deltas} == {0, 1}
    assert report["repeated"] == report["missing"] == 0
    assert masters == 1
    assert b"\\u001b" not in events
    assert disturbed < LOSS


def attack(run: Running, seconds: float) -> dict:
    """Let an insider work, while passes go on as ever; what it says that it has done."""
    endpoint = run.run.endpoint()
    password = run.run.password("worker", endpoint)
    where = [endpoint.host, endpoint.port, password, run.run.key, endpoint.certificate, seconds]
    program = subprocess.Popen([sys.executable, ROOT / "tests/insider.py", *map(str, where)],
                               stdout=subprocess.PIPE, text=True, cwd=Path("/"))
    run.until(lambda: program.poll() is not None, seconds + 30, "the end of the insider")
    return json.loads(program.communicate()[0])


def fill(client: redis.Redis, key: str) -> None:
    """Until there is no room for a heartbeat."""
    for size in (1 << 20, 1 << 10):
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            while True:
                client.hset(f"{key}offers:0", secrets.token_hex(8), bytes(size))


def spoil(client: redis.Redis, key: str) -> None:
    """What takes answers to asks is a table now."""
    for name in (f"{key}grant:{slot}:{attempt}" for slot in (0, 1) for attempt in (1, 2)):
        client.delete(name)
        client.hset(name, "x", "y")


def test_a_server_of_no_use_any_more_is_replaced_and_shuts_out_who_did_it(tmp_path):
    settings = SETTINGS | {"redis.maxmemory": "16mb", "elastic.max": 1, "elastic.min": 1}
    with running(tmp_path, settings, samples=1 << 20, step_s=0.02) as run:
        run.workers(1)
        run.versions(1)
        trainers = run.pids("trainer")
        for attack in (fill, spoil):
            replaced_after(attack, run)
            assert run.pids("trainer") == trainers
        assert len(run.events("redis-lost")) == 2
        run.audit()


def replaced_after(attack: Callable, run: Running) -> None:
    before = run.run.endpoint()
    password = run.run.password("worker", before)

    def is_replaced() -> bool:
        with contextlib.suppress(redis.RedisError):  # it goes meanwhile
            attack(client, f"elastic:{run.run.key}:")
        return run.run.endpoint() != before

    with WorkerStore.connect(before, password, "")._redis as client:
        run.until(is_replaced, 60, "another server")
    run.versions(2)
    after = run.run.endpoint()
    with pytest.raises(TryAgain, match="refused the password"):
        WorkerStore.connect(after, password, "").now()
    assert "is of no use" in run.events("redis-lost")[-1]["reason"]
    assert after.epoch == before.epoch
