"""What Muon's step costs on a CPU: ours (products of float32), torch's own (of bfloat16), AdamW's;
and where ranks share the matrices: ours, and torch's own with products of float32.

    .venv/bin/python tests/bench/bench_muon.py [--width 512] [--ranks 4] [--matrices 8]

One matrix and its gradient, one thread. Predicted before the first measurement: 20 x, on a CPU
without instructions for bfloat16 (AMD EPYC with AVX2). Measured there: 92.9 ms in float32, 1,674 ms
in bfloat16 (18 x), AdamW 9.8 ms. On a CPU that has them (AVX512-BF16, beside other work): 130 ms in
float32, 60 ms in bfloat16, AdamW 3.2 ms; with nothing beside it: 120 to 124, 30, 2.1 to 3.4 ms.
Four ranks took 0.30 of torch's time; 0.4 to 0.5 was predicted.
"""

import argparse
import sys
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from figures import ROOT, medians_s, record
from torch import multiprocessing
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(ROOT / "lib"))
from elastic.train.optimizers import Muon  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512, help="rows; four times as many columns")
    parser.add_argument("--ranks", type=int, default=4, help="that share matrices")
    parser.add_argument("--matrices", type=int, default=8, help="that they share")
    args = parser.parse_args()
    torch.set_num_threads(1)
    one, kinds = [matrix(args.width)], (ours, torchs, torch.optim.AdamW)
    mine, theirs, adamw = medians_s(*(kind(one, lr=1e-3).step for kind in kinds))
    record("muon", "a step in float32", 1e3 * mine, "ms", "bfloat16", 1e3 * theirs)
    record("muon", "a step in bfloat16", 1e3 * theirs, "ms", "AdamW", 1e3 * adamw)
    with tempfile.NamedTemporaryFile() as meeting:
        multiprocessing.spawn(rank_of, (meeting.name, args), args.ranks)


torchs = partial(torch.optim.Muon, weight_decay=0.1)


def ours(weights: list[torch.nn.Parameter], lr: float) -> Muon:
    return Muon({weight: [len(weight)] for weight in weights}, lr, weight_decay=0.1)


def matrix(width: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.randn(width, 4 * width))
    made.grad = torch.randn(width, 4 * width)
    return made


class Float32(TorchFunctionMode):
    """While it is entered, torch's Muon multiplies in float32, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def rank_of(rank: int, meeting: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=args.ranks)
    mesh = dist.init_device_mesh("cpu", (args.ranks,))
    shared = [sharded(matrix(args.width), mesh) for _ in range(args.matrices)]
    mine, theirs = (kind(shared, lr=1e-3).step for kind in (ours, torchs))

    def in_float32() -> None:
        with Float32():
            theirs()

    took_s, took_torch_s = medians_s(mine, in_float32)
    if rank == 0:
        case = f"{args.ranks} ranks, a step of {args.matrices} matrices"
        record("muon", case, 1e3 * took_s, "ms", "torch's", 1e3 * took_torch_s)
    dist.destroy_process_group()


def sharded(whole: torch.nn.Parameter, mesh) -> torch.nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    made = torch.nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)]))
    made.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
    return made


if __name__ == "__main__":
    main()
