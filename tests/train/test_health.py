"""Health of training processes, with real ranks over gloo, real signals and real hangs."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import elastic
import health_ranks
from elastic.base.errors import ElasticError, Exit, UnfitNode
from elastic.base.network import free_port
from elastic.base.signals import Notice
from elastic.train import device, health
from elastic.train.group import Group
from elastic.train.health import NaNDetector, ShutdownHandler, check_gpu_health
from forks import stay_alone
from helpers import PATIENCE, ROOT, wait_until

SCRIPT = ROOT / "tests" / "health_ranks.py"
PIPES = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}


class Story:
    """One process of health_ranks.py."""

    def __init__(self, *args: str):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, str(SCRIPT), *args], env=env, **PIPES)

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.process.stderr.read()}"
        return json.loads(line)

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, timeout_s: float = 20) -> int:
        return self.process.wait(timeout_s * PATIENCE)


class Forked(Story):
    """A function of it, in a child of this process, where torch is imported."""

    def __init__(self, play: Callable[[], object], **env: object):
        def act() -> None:  # and the child never comes to `true`
            os.closerange(3, 1000)  # else Popen would wait for its end
            sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), ("r", "w", "w"))
            os.environ.update({name: str(value) for name, value in env.items()})
            stay_alone()
            try:
                play()
            finally:
                traceback.print_exc()
                os._exit(1)

        self.process = subprocess.Popen(["true"], preexec_fn=act, **PIPES)


@contextlib.contextmanager
def told(*stories: Story) -> Iterator[None]:
    try:
        yield
    finally:
        for story in stories:
            story.process.kill()
            story.process.communicate()


def start_ranks(world: int) -> list[Story]:
    group = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port("127.0.0.1"),
             "GLOO_SOCKET_IFNAME": "lo"}
    return [Forked(health_ranks.ranks, RANK=rank, **group) for rank in range(world)]


def test_ranks_agree_and_the_silent_ones_are_named():
    ranks = start_ranks(3)
    with told(*ranks):
        for rank, story in enumerate(ranks):
            assert story.hear() == ["ok", "skip", "stop"]
            seen = ["1.0", "inf", "1.0"][rank]
            assert story.hear() == (
                f"bad step 2 in a row, 1 are allowed (this rank: loss {seen}, norm 1.0)"
            )
            assert story.hear() == ""
            assert story.hear() == "ready"
        ranks[1].process.send_signal(signal.SIGSTOP)
        ranks[2].process.kill()
        ranks[2].process.wait()
        ranks[0].go()
        said, took_s = ranks[0].hear()
        assert said == "no answer from rank(s) 1, 2 of 3 (within 1.5 s)"
        assert 1.4 < took_s < 10 * PATIENCE
        assert ranks[0].end() == 0


def test_a_ping_ends_when_the_rank_that_keeps_the_store_is_stopped():
    ranks = start_ranks(2)
    with told(*ranks):
        for story in ranks:
            wait_until(lambda story=story: story.hear() == "ready", 30, "the ranks have met")
        ranks[0].process.send_signal(signal.SIGSTOP)
        ranks[1].go()
        said, took_s = ranks[1].hear()
        assert said.startswith("no answer from the store (kept by rank 0 or torchrun)")
        assert 1.4 < took_s < 10 * PATIENCE


def test_a_hang_shows_all_stacks_and_ends_the_process_and_a_suspension_does_not():
    story = Forked(health_ranks.hang)
    with told(story):
        assert story.hear() == "ready"
        story.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        story.process.send_signal(signal.SIGCONT)
        story.go()
        assert story.hear() == "alive"
        assert story.end() == Exit.TRY_AGAIN
        said = story.process.stderr.read()
        assert "rank 0: no step for 3 s" in said
        assert "the_step_that_hangs" in said


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # Python's choice, until and from 3.14
def test_loader_workers_outlive_a_notice_and_go_with_their_parent_however_it_ends(method: str):
    stories = Story("shield", method), Story("shield", method, "stay")
    with told(*stories):
        workers = [story.hear() for story in stories]
        for story, worker in zip(stories, workers, strict=True):
            assert story.hear() == "ready"
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
                os.kill(worker, number)
        time.sleep(0.2)
        for story in stories:
            story.go()
            assert story.hear() == [True, False, True]
            noticed, left_s = story.hear()
            assert noticed
            assert 20 < left_s <= 28
        assert stories[1].hear() == "ready"
        stories[1].process.kill()
        assert [story.end() for story in stories] == [0, -signal.SIGKILL]
        for worker in workers:
            wait_until(lambda pid=worker: not Path(f"/proc/{pid}").exists(), 5, "the worker ends")


@given(st.sampled_from(health.ACTIONS), st.booleans(), st.integers(1, 9), st.integers(0, 9))
def test_a_bad_step_gets_the_action_and_too_many_in_a_row_stop(action, bad, in_a_row, most):
    detector = NaNDetector(action, Group(), most)
    decision = [detector.judge(bad) for _ in range(in_a_row)][-1]
    if not bad:
        assert decision == "ok"
    else:
        assert decision == ("stop" if in_a_row > most else action)
        assert detector.reason == f"bad step {in_a_row} in a row, {most} are allowed"


def test_a_good_step_ends_the_row():
    detector = NaNDetector("warn", Group(), max_bad=2)
    steps = [(1.0, math.nan), (math.nan, 1.0), (1.0, 1.0), (math.inf, 1.0)]
    assert [detector.check(*step) for step in steps] == ["warn", "warn", "ok", "warn"]
    assert detector.bad_in_a_row == 1
    assert "loss inf, norm 1.0" in detector.reason


def test_an_unknown_action_is_answered_with_the_legal_ones():
    with pytest.raises(ElasticError, match="'ignore'") as caught:
        NaNDetector("ignore", Group(), 3)
    assert "one of warn, skip, rollback, stop" in caught.value.hint


def test_what_a_loop_of_ones_own_needs_is_found_in_the_package():
    names = [name for names in elastic.HOMES.values() for name in names.split()]
    assert all(callable(getattr(elastic, name)) for name in names)
    assert elastic.shield_workers is health.shield_workers


def test_one_rank_pings_nobody():
    assert health.check_nccl_health(Group(), 0.1) == ""


def test_the_cpu_is_healthy_and_a_missing_gpu_is_one_problem():
    assert check_gpu_health("cpu") == []
    if not torch.cuda.is_available():
        (problem,) = check_gpu_health("cuda:0")
        assert problem.startswith("cuda:0 cannot be used: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPUs of this node")
def test_a_job_that_holds_gpus_does_not_train_on_cpus(make_config, tmp_path, monkeypatch):
    """A driver too old for torch was a warning, and the run trained at a hundredth of its speed."""
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    of_slurm = ("run.scheduler=slurm", "slurm.partition=gpu")
    assert device.choose_device(make_config(*of_slurm)).type == "cpu"
    (tmp_path / "nvidia0").touch()
    for without in ([], [*of_slurm, "slurm.gres="], [*of_slurm, "train.device=cpu"]):
        assert device.choose_device(make_config(*without)).type == "cpu"
    with pytest.raises(UnfitNode, match="can use no GPU of this node"):
        device.choose_device(make_config(*of_slurm))


def test_a_device_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch):
    right = torch.Tensor.__matmul__

    def one_bit_off(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(left, other)
        if product.is_floating_point():
            product[7, 7] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", one_bit_off)
    assert check_gpu_health("cpu") == ["cpu computes wrongly: 1 of 65536 products of a matmul"]


def test_what_nvml_counts_is_a_problem_and_without_nvml_there_is_none(monkeypatch):
    device = torch.device("cuda", 0)
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    nvml = types.SimpleNamespace(
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 3,
        nvmlDeviceGetRemappedRows=lambda handle: (1, 0, 1, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    ecc, pending = health._worn_memory(device)
    assert ecc == "cuda:0: 3 uncorrected memory errors (ECC)"
    assert "Xid 63" in pending
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert health._worn_memory(device) == []


def test_memory_that_others_hold_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 << 30, 80 << 30))
    assert health._taken_memory(device) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 << 30, 80 << 30))
    (problem,) = health._taken_memory(device)
    assert "50.0 of 80.0 GiB" in problem


def test_the_deadline_is_the_grace_time_less_a_margin_and_else_the_kill_wait():
    notice = Notice()
    handler = ShutdownHandler(120, notice)
    assert not handler
    assert handler.deadline_s(0) == math.inf
    notice.arrived(signal.SIGTERM)
    assert handler
    assert handler.deadline_s(notice.since + 19) == 99
    for unknown in (0, None):
        later = Notice()
        later.arrived(signal.SIGTERM)
        assert ShutdownHandler(unknown, later).deadline_s(later.since) == 28


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_during_the_imports_ends_the_process_at_once(tmp_path: Path, number: int):
    """A module that takes for ever to import stands in for torch on a busy machine."""
    (tmp_path / "torch.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-m", "elastic.train.start", "worker"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'lib'}"}
    process = subprocess.Popen(command, env=path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "imports\n"
    process.send_signal(number)
    assert process.wait(10 * PATIENCE) == Exit.TRY_AGAIN
