"""What a codec costs and saves: bytes, and how fast a core encodes, and decodes into a mean.

    .venv/bin/python tests/bench/bench_codec.py [--millions 16]

Per codec, on one thread: bytes of a delta beside float32; encoding, and what the master does with a
delta (decode, add to the mean), beside the same additions of float32 that needs no decoding: what
the memory of this machine allows.

Predicted before the first measurement: decoding int8 0.8 x the plain additions, int4 0.3 x, topk
3 x (it touches a hundredth, but clears everything), lowrank 1 x; encoding a third of decoding. The
first answer was 0.11, 0.09, 0.12 and 0.07: fresh memory for every fragment. So they go by tiles.
"""

import argparse
import math
import statistics
import sys
import time

import torch
from figures import ROOT, record

sys.path.insert(0, str(ROOT / "lib"))
from elastic.codec import CODECS, codec  # noqa: E402
from elastic.layout import Layout  # noqa: E402

TRIES = 7
WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=16, help="of elements in a fragment")
    torch.set_num_threads(1)
    rows = parser.parse_args().millions * 1_000_000 // WIDTH
    (fragment,) = Layout.of([("weight", (rows, WIDTH))], math.inf).fragments
    numel = rows * WIDTH
    delta, mean = torch.randn(numel) * 1e-3, torch.zeros(numel)
    add_s = seconds(lambda: mean.add_(delta, alpha=0.5))
    record("codec", "add: elements a second", numel / add_s / 1e9, "G/s")
    for name in CODECS:
        measure(name, fragment, delta, mean, add_s)


def measure(name: str, fragment, delta: torch.Tensor, mean: torch.Tensor, add_s: float) -> None:
    chosen, numel = codec(name), delta.numel()
    data = torch.frombuffer(bytearray(chosen.encode(delta, fragment)), dtype=torch.uint8)
    record("codec", f"{name}: bytes of a delta", len(data) / 1e6, "MB", "float32", 4 * numel / 1e6)
    encode_s = seconds(lambda: chosen.encode(delta, fragment))
    merge_s = seconds(lambda: add(mean, chosen.tiles(data, fragment)))
    record("codec", f"{name}: encode", numel / encode_s / 1e9, "G/s", "add", numel / add_s / 1e9)
    record("codec", f"{name}: decode, add", numel / merge_s / 1e9, "G/s", "add",
           numel / add_s / 1e9)  # fmt: skip


def add(mean: torch.Tensor, tiles) -> None:
    """As merge.mean_delta does."""
    for start, tile in tiles:
        mean[start : start + tile.numel()].add_(tile, alpha=0.5)


def seconds(work) -> float:
    """The middle of several, after one to warm up."""
    times = []
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
