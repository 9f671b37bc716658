"""What Muon's step costs on a CPU: ours (products of float32), torch's own (of bfloat16), AdamW's.

    .venv/bin/python tests/bench/bench_muon.py [--width 512]

One matrix and its gradient, one thread. Predicted before the first measurement: 20 x, on a CPU
without instructions for bfloat16 (AMD EPYC with AVX2). Measured there: 92.9 ms in float32, 1,674 ms
in bfloat16 (18 x), AdamW 9.8 ms. On a CPU that has them (AVX512-BF16, beside other work): 130 ms in
float32, 60 ms in bfloat16, AdamW 3.2 ms; there float32 costs a factor of two.
"""

import argparse
import sys

import torch
from figures import ROOT, medians_s, record

sys.path.insert(0, str(ROOT / "lib"))
from elastic.train.optimizers import EagerMuon  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512, help="rows; four times as many columns")
    width = parser.parse_args().width
    torch.set_num_threads(1)
    ours, theirs, adamw = medians_s(
        step(EagerMuon, width), step(torch.optim.Muon, width), step(torch.optim.AdamW, width)
    )
    record("muon", "a step in float32", 1e3 * ours, "ms", "bfloat16", 1e3 * theirs)
    record("muon", "a step in bfloat16", 1e3 * theirs, "ms", "AdamW", 1e3 * adamw)


def step(kind: type, width: int):
    matrix = torch.nn.Parameter(torch.randn(width, 4 * width))
    matrix.grad = torch.randn(width, 4 * width)
    return kind([matrix], lr=1e-3).step


if __name__ == "__main__":
    main()
