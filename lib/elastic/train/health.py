"""Ranks that agree, bad steps, silent ranks, hangs, sick GPUs.

Ranks must do the same in the same step, or the next collective never ends. So a gradient
that is not finite on one of them counts as bad on all, by one small all_reduce a step.
`check_nccl_health` asks the store which ranks are there before it tries a collective:
that names the ranks that are gone, and leaves no collective behind that cannot end.
HangDetector counts the time that this process ran, not the clock: a suspended job has
not hung. It cannot act while C code holds the GIL.
"""

import contextlib
import faulthandler
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process

import torch
import torch.distributed as dist

from elastic.base.durable import in_background
from elastic.base.environment import env
from elastic.base.errors import ElasticError, UnfitNode
from elastic.base.signals import Notice, die_with_parent, ignore_notices, install
from elastic.train.group import Group, is_sharded

ACTIONS = ("warn", "skip", "rollback", "stop")
POLL_S, LATE_S = 0.02, 2.0  # a busy node runs the thread that asks so much later
# What a process may hold of a GPU's memory outside of torch's allocator.
FOREIGN_SHARE = 0.2


class NaNDetector:
    """Judges steps alike on all ranks; `reason` says why the last verdict is not "ok".

    A verdict is "ok" or the action: "warn" (step all the same), "skip", "rollback",
    "stop". More than `max_bad` bad steps in a row are "stop", whatever the action.
    """

    def __init__(self, action: str, group: Group, max_bad: int):
        if action not in ACTIONS:
            raise ElasticError(f"no action: {action!r}", f"one of {', '.join(ACTIONS)}")
        self.action, self.group, self.max_bad = action, group, max_bad
        self.bad_in_a_row = 0
        self.reason = ""

    def check(self, loss: torch.Tensor | float, norm: torch.Tensor | float) -> str:
        """The verdict on this step, after one all_reduce."""
        norm = norm.full_tensor() if is_sharded(norm) else norm
        is_good = math.isfinite(loss) and math.isfinite(norm)
        [bad] = self.group.sum(not is_good)
        return self.judge(bad > 0, f"loss {loss}, norm {norm}")

    def judge(self, bad: bool, seen: str = "") -> str:
        """`check` for a caller that has agreed with the other ranks already."""
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        if not bad:
            return "ok"
        self.reason = f"bad step {self.bad_in_a_row} in a row, {self.max_bad} are allowed"
        self.reason += f" (this rank: {seen})" if seen else ""
        return "stop" if self.bad_in_a_row > self.max_bad else self.action


def check_nccl_health(group: Group, timeout_s: float) -> str:
    """Empty if all ranks of the default group answer and a collective ends, else a
    sentence on what does not.

    All ranks call it at the same point. After a sentence the group is of no more use:
    leave.
    """
    if group.world == 1:
        return ""
    deadline, longest_s = time.monotonic() + timeout_s, timeout_s + LATE_S
    try:
        asked = in_background(lambda: _roll_call(group, deadline) or _ping(group, deadline))
        problem = asked.result(longest_s)
    except TimeoutError:  # a store whose host is stopped never answers, nor NCCL while it connects
        problem = "no answer from the store (kept by rank 0 or torchrun), or from NCCL's start"
    except RuntimeError as error:  # what torch.distributed raises when a peer is gone
        problem = f"the group is broken: {str(error).splitlines()[0]}"
    return f"{problem} (within {timeout_s:g} s)" if problem else ""


def _roll_call(group: Group, deadline: float) -> str:
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"elastic/roll-call/{group.rank}", 1)
    missing = list(range(group.world))
    while missing := [r for r in missing if store.add(f"elastic/roll-call/{r}", 0) < number]:
        if time.monotonic() > deadline:
            return f"no answer from rank(s) {', '.join(map(str, missing))} of {group.world}"
        time.sleep(POLL_S)
    return ""


def _ping(group: Group, deadline: float) -> str:
    ones = torch.ones(1, device=group.device)
    work = dist.all_reduce(ones, async_op=True)
    while not work.is_completed():  # NCCL's wait(timeout) does not wait
        if time.monotonic() > deadline:
            return "all ranks are there, but an all_reduce does not end: is it the network?"
        time.sleep(POLL_S)
    work.wait()  # raises if it failed
    total = ones.item()
    return "" if total == group.world else f"an all_reduce of {group.world} ones gave {total:g}"


def check_gpu_health(device: torch.device | str) -> list[str]:
    """What is wrong with the device, a sentence each; on the CPU only the arithmetic is
    tried."""
    return examine_gpu(device)[0]


def examine_gpu(device: torch.device | str) -> tuple[list[str], bool]:
    """What is wrong with the device, and whether it is fit to compute on all the same."""
    device, problems = torch.device(device), []
    try:
        problems += _wrong_arithmetic(device)
        is_fit = not problems
        if device.type == "cuda":
            problems += _taken_memory(device) + _worn_memory(device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch without CUDA
        return [*problems, f"{device} cannot be used: {str(error).splitlines()[0]}"], False
    return problems, is_fit


def require_gpu(device: torch.device) -> None:
    """Say on stderr what `check_gpu_health` finds; UnfitNode if the device is not fit to
    compute on."""
    problems, is_fit = examine_gpu(device)
    for problem in problems:
        print(f"rank {env('RANK', '0')}: {problem}", file=sys.stderr, flush=True)
    if not is_fit:
        raise UnfitNode("; ".join(problems), "keep away from the node: slurm.exclude")


def _wrong_arithmetic(device: torch.device) -> list[str]:
    # Exact in every precision.
    numbers = torch.arange(256 * 256).reshape(256, 256) % 5 - 2
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        product = numbers.float().to(device) @ numbers.T.float().to(device)
    wrong = int((product.cpu() != (numbers @ numbers.T).float()).sum())
    problem = f"{device} computes wrongly: {wrong} of 65536 products of a matmul"
    return [problem] if wrong else []


def _taken_memory(device: torch.device) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    sizes = f"{foreign / 2**30:.1f} of {total / 2**30:.1f} GiB"
    problem = f"{device}: others hold {sizes} of its memory, see nvidia-smi"
    return [problem] if foreign > FOREIGN_SHARE * total else []


def _worn_memory(device: torch.device) -> list[str]:
    """What NVML counts: ECC errors, and the row remaps that Xid 63 and 64 stand for."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        kind, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_boot)
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except Exception:  # no NVML, no ECC, a MIG slice: nothing is known
        return []
    counts = {
        f"{errors} uncorrected memory errors (ECC)": errors,
        "a memory row waits to be remapped (Xid 63): reset the GPU": pending,
        "a memory row cannot be remapped (Xid 64): replace the GPU": failed,
    }
    return [f"{device}: {problem}" for problem, count in counts.items() if count]


class HangDetector(contextlib.AbstractContextManager):
    """A thread that prints all stacks and calls `on_hang` when no `tick` comes for
    `timeout_s`."""

    def __init__(self, timeout_s: float, on_hang: Callable[[], object]):
        self.timeout_s, self.on_hang = timeout_s, on_hang
        self._ticks = 0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="hang detector", daemon=True).start()

    def tick(self) -> None:
        self._ticks += 1

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _watch(self) -> None:
        beat_s = self.timeout_s / 20
        ticks, silent_s = self._ticks, 0.0
        while silent_s < self.timeout_s:
            if self._closed.wait(beat_s):
                return
            silent_s = 0.0 if self._ticks != ticks else silent_s + beat_s
            ticks = self._ticks
        rank = dist.get_rank() if dist.is_initialized() else 0
        headline = f"rank {rank}: no step for {self.timeout_s:g} s; all threads:"
        print(headline, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        self.on_hang()


class ShutdownHandler:
    """True after a notice; `notice_s` as slurm_info.notice_s says."""

    def __init__(self, notice_s: float | None = None, notice: Notice | None = None):
        self.notice = install() if notice is None else notice
        self.notice.window_s = notice_s or self.notice.window_s

    def __bool__(self) -> bool:
        return bool(self.notice)

    def deadline_s(self, now: float) -> float:
        """Seconds until the kill, less a margin for the last words; infinite before a notice."""
        return self.notice.left_s(now)


def shield_workers(worker_id: int = 0) -> None:
    """A DataLoader's `worker_init_fn`. The worker ignores notices, which are for its
    parent, and ends when the parent dies."""
    ignore_notices()
    parent = parent_process()
    if parent is None or parent.pid == os.getppid():
        die_with_parent()
    else:  # the kernel would tell of the end of the fork server, which has started this process
        threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent) -> None:
    parent.join()
    os._exit(0)
