"""What a codec costs and saves: bytes, and how fast one encodes, and averages what comes.

    .venv/bin/python tests/bench/bench_codec.py [--millions 16]

Per codec: bytes of a delta beside float32; encoding, on one thread; averaging, which is what the
master does with a delta (decode, add to the mean), beside the same additions of float32 that needs
no decoding, which is what the memory of this machine allows. Averaging and additions on one thread,
and on as many at a time as there are cores, each with a fragment of its own, as the master's.

The master averages in threads: processes with an RPC were no faster (docs/algorithm.md, Averaging).
Of a tile of int8 (1 ms) Python itself has 26 microseconds, by the time of a nearly empty one.

Predicted before the first measurement: decoding int8 0.8 x the plain additions, int4 0.3 x;
encoding a third of decoding. The first answer was 0.11 and 0.09: fresh memory for every fragment.
So they go by tiles.
Then, for all cores: none 0.95 x, int8 0.6 x, as the additions there are bound by memory.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from figures import ROOT, medians_s, record

sys.path.insert(0, str(ROOT / "lib"))
from elastic.saved.codec import CODECS  # noqa: E402

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=16, help="of elements in a fragment")
    torch.set_num_threads(1)
    rows = parser.parse_args().millions * 1_000_000 // WIDTH
    delta = torch.randn(rows * WIDTH) * 1e-3
    for name in CODECS:
        measure_encoding(name, delta)
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        measure_averaging(delta, threads)


def measure_encoding(name: str, delta: torch.Tensor) -> None:
    chosen, numel = CODECS[name], delta.numel()
    size = chosen.size_bytes(numel)
    record("codec", f"{name}: bytes of a delta", size / 1e6, "MB", "float32", 4 * numel / 1e6)
    (encode_s,) = medians_s(lambda: chosen.encode(delta))
    record("codec", f"{name}: encode", numel / encode_s / 1e9, "G/s")


def measure_averaging(delta: torch.Tensor, threads: int) -> None:
    means = [torch.zeros_like(delta) for _ in range(threads)]
    deltas = [delta.clone() for _ in range(threads)]
    total, words = threads * delta.numel() / 1e9, f"threads: {threads}"
    with ThreadPoolExecutor(threads) as pool:

        def additions():
            list(pool.map(plain_add, means, deltas))

        record("codec", f"{words}, add", total / medians_s(additions)[0], "G/s")
        for name in CODECS:
            chosen = CODECS[name]
            data = torch.frombuffer(bytearray(chosen.encode(delta)), dtype=torch.uint8)
            copies = [data.clone() for _ in range(threads)]

            def average(mean, data, chosen=chosen):
                add(mean, chosen.tiles(data, delta.numel()))

            def averaging(work=average, copies=copies):
                list(pool.map(work, means, copies))

            add_s, merge_s = medians_s(additions, averaging)
            record("codec", f"{words}, {name}: average", total / merge_s, "G/s", "add",
                   total / add_s)


def plain_add(mean: torch.Tensor, delta: torch.Tensor) -> None:
    mean.add_(delta, alpha=0.5)


def add(mean: torch.Tensor, tiles) -> None:
    """As merge.mean_delta does."""
    for start, tile in tiles:
        mean[start : start + tile.numel()].add_(tile, alpha=0.5)


if __name__ == "__main__":
    main()
