"""What a round costs on paper: by hand, in its limits, and in the words of --dry-run.

    pytest tests/run/test_estimate.py
"""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic.base.config import load
from elastic.base.units import size
from elastic.people.describe import measured
from elastic.run.estimate import Model, Rates, Save, cost, report, save_of, warnings
from elastic.train.task import load_task
from helpers import ROOT

MODEL = Model(7_000_000_000, 7_054_687_500, 110, 64_000_000, 64_500_000, 4096)
RATES = Rates(process=5e9, filesystem=20e9, merged=1e9, stepped=0.5e9)


def test_the_parts_of_a_round_by_hand():
    """32 workers, 7.05 GB each: the master's own 5 GB/s are the narrowest place."""
    one = cost(MODEL, 32, cores=16, rates=RATES)
    read_s = 32 * 7.0546875 / 5
    assert one.deliver_s == pytest.approx(read_s)
    assert one.merge_s == pytest.approx(read_s + 7 / 0.5 / 16)
    assert one.publish_s == pytest.approx(70 / 5)
    assert one.pull_s == pytest.approx(32 * 14 / 20)
    assert one.stall_s == pytest.approx(sum((2 * read_s, 0.875, 14, 22.4)))


def test_each_thread_of_the_master_has_had_the_largest_fragment():
    """Llama-3-8B: its embedding's 525M elements, in int8 and as a float32 mean, for 16 threads."""
    numel, largest = 8_030_000_000, 128_256 * 4096
    model = Model(numel, numel, 200, largest, largest)
    config = load(ROOT / "etc/7b.toml", ["slurm.partition=x"])
    said = float(re.search(r"master ([\d.]+) GB", report(model, 8, config))[1])
    assert said == pytest.approx(8.03 * 8 + 16 * 5 * largest / 1e9, rel=0.01)


def test_what_a_notice_has_to_get_onto_disk():
    """int8 and AdamW's moments; in sync mode a quarter of parameters and moments on each node."""
    local, sync = (load(ROOT / "etc/7b.toml", ["slurm.partition=x", f"run.mode={mode}",
                                               "elastic.min=8", "slurm.gpus_per_node=2"])
                   for mode in ("local", "sync"))
    assert save_of(MODEL, local) == Save(7_054_687_500, 7_054_687_500 + 56e9)
    assert save_of(MODEL, sync) == Save(21e9, 21e9)


def test_one_worker_is_bound_by_its_own_process():
    one = cost(MODEL, 1, rates=RATES)
    assert (one.deliver_s, one.pull_s) == (pytest.approx(7.0546875 / 5), pytest.approx(14 / 5))


def test_a_master_with_few_cores_is_bound_by_adding():
    assert cost(MODEL, 32, cores=1, rates=RATES).merge_s == pytest.approx(32 * 7 + 14)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (999, "999 B"), (7.05e9, "7.05 GB"), (999_600, "1 MB"), (3e15, "3e+03 TB")],
)
def test_sizes_as_people_read_them(amount, text):
    assert size(amount) == text


def config(origin="default", **changes):
    sgd = {"compression": "int8", "max_staleness": 2, **changes}
    return SimpleNamespace(
        local_sgd=SimpleNamespace(**sgd),
        checkpoint=SimpleNamespace(keep=3, min_free_bytes=200e9), origin=lambda _: origin,
    )


@pytest.mark.parametrize(
    ("changes", "rounds", "words"),
    [
        ({}, 300, []),
        ({}, 0, []),
        ({}, 50, ["the run has 50 rounds"]),
        ({"origin": "elastic-submit: few fit"}, 50, []),
    ],
)
def test_what_will_hurt_is_said_and_nothing_else(changes, rounds, words):
    found = [*warnings(MODEL, 32, config(**changes), rounds)]
    assert len(found) == len(words)
    assert all(text.startswith(word) for text, word in zip(found, words, strict=True))


def test_too_little_space_for_a_version_is_said():
    (found,) = warnings(replace(MODEL, numel=30_000_000_000), 1, config(), 0)
    assert "start with 200 GB free: raise checkpoint.min_free" in found
    # Four versions of 300 GB, three deltas, and an inner state of 8 bytes a parameter.
    assert "the run takes up to 1.46 TB of disk" in found


def test_the_table_on_paper_is_what_the_formulas_say():
    command = [sys.executable, str(ROOT / "tests/bench/on_paper.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(ROOT / "lib")}).stdout
    assert len(said.splitlines()) == 4
    assert said in (ROOT / "docs/algorithm.md").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("7b", ["6,738,415,616 parameters", "a delta is 6.79 GB (int8)", "13.5 GB", "668 of"]),
        ("125m", ["134,105,856 parameters", "a delta is 135 MB (int8)", "warning"]),
    ],
)
def test_the_plan_of_a_shipped_file(name, words):
    one = load(ROOT / f"etc/{name}.toml", ["run.scheduler=local"])
    model = measured(one, load_task(one.run.task, one.task))
    said = report(model, one.elastic.max // one.slurm.gpus_per_worker, one)
    assert all(word in said for word in words), said


def test_shipped_files_count_samples_per_gpu():
    """A worker of eight GPUs takes eight batches a step."""
    assert load(ROOT / "etc/7b.toml", ["slurm.partition=x"]).train.batch_size == 8
