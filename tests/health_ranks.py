"""Processes for test_health.py: `python health_ranks.py STORY`, lines of text on stdout.

Each waits for a line on stdin where the test has to do something to it first.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from elastic.base.errors import Exit  # noqa: E402
from elastic.train.group import Group  # noqa: E402
from elastic.train.health import (  # noqa: E402
    HangDetector,
    NaNDetector,
    ShutdownHandler,
    check_nccl_health,
    shield_workers,
)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def wait() -> None:
    say("ready")
    sys.stdin.readline()


def ranks() -> None:
    """Judge three steps of which rank 1 sees a bad one, then ping before and after a fault."""
    dist.init_process_group("gloo")
    group = Group.here(dist.get_world_size(), "cpu")
    detector = NaNDetector("skip", group, max_bad=1)
    losses = [1.0, float("nan"), float("inf")] if group.rank == 1 else [1.0, 1.0, 1.0]
    say([detector.check(torch.tensor(loss), 1.0) for loss in losses])
    say(detector.reason)
    say(check_nccl_health(group, 30))
    wait()
    before = time.monotonic()
    said = check_nccl_health(group, 1.5)
    say([said, time.monotonic() - before])
    sys.stdout.flush()
    os._exit(0)


def hang() -> None:
    """Steps, then one that never comes."""

    def the_step_that_hangs() -> None:
        threading.Event().wait()

    with HangDetector(3, functools.partial(os._exit, Exit.TRY_AGAIN)) as detector:
        for _ in range(4):
            time.sleep(0.9)
            detector.tick()
        wait()  # stopped here for longer than the limit
        detector.tick()
        say("alive")
        the_step_that_hangs()


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def shield(method: str, then: str = "end") -> None:
    """A loader whose worker gets every notice, and that ends with the loader still alive.
    `method`: how the worker is started."""
    global loader  # alive at exit, when multiprocessing ends its children
    handler = ShutdownHandler()
    loader = iter(torch.utils.data.DataLoader(
        Slow(), num_workers=1, prefetch_factor=1, worker_init_fn=shield_workers,
        multiprocessing_context=method,
    ))
    worker = int(next(loader))
    say(worker)
    wait()
    say([int(next(loader)) == worker, bool(handler), handler.deadline_s(time.time()) > 1e9])
    os.kill(os.getpid(), signal.SIGTERM)
    say([bool(handler), handler.deadline_s(time.time())])
    if then == "stay":
        wait()


if __name__ == "__main__":
    {"ranks": ranks, "hang": hang, "shield": shield}[sys.argv[1]](*sys.argv[2:])
