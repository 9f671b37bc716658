"""`make records`: every arm spends the same tokens, and a table says what came out.

    pytest tests/lab/test_records.py
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from elastic.tasks import ByteText
from helpers import ROOT
from validate import records, report
from validate.records import ARMS, SIZES, Point, Trial

REF = records.REFERENCE
PAGE = ROOT / "docs" / "records.md"
TOKENS = 5 * records.GLOBAL_BATCH * records.CONTEXT
SMALL = ("task.dim=32", "task.layers=1", "task.heads=2")  # of a model that learns nothing
FEW = replace(SIZES["0.5M"], tokens=TOKENS)


@pytest.mark.parametrize("point", ["2x4", "3x1", "2xswing"])
def test_workers_share_the_tokens_to_the_last_one(point, monkeypatch):
    steps = []
    monkeypatch.setattr(ByteText, "validate", lambda self, model: {"validation_loss": 0.0})

    def noted(simulator, crew):
        deltas = real(simulator, crew)
        steps.extend(delta.steps for delta in deltas)
        assert len({sample for delta in deltas for sample in delta.samples}) == len(deltas)
        return deltas

    real = records.works
    monkeypatch.setattr(records, "works", noted)
    row = records.run(Trial("muon", Point.read(point), 0, FEW, SMALL))
    batch = Point.read(point).batch
    assert sum(steps) * batch * records.CONTEXT == TOKENS
    assert row["versions"] > 1
    assert len(row["curve"]) == records.PARTS


@pytest.mark.parametrize("arm", ARMS)
def test_a_look_on_the_way_changes_nothing(arm, monkeypatch):
    losses = set()
    for parts in (1, records.PARTS):
        monkeypatch.setattr(records, "PARTS", parts)
        row = records.run(Trial(arm, Point(2, "2"), 0, FEW, SMALL))
        assert len(row["curve"]) == parts
        losses.add(row["loss"])
    assert len(losses) == 1


def test_a_synchronous_arm_is_one_trial_for_all_points():
    keys = {Trial("sync-adamw", point, 0, FEW).key for point in records.POINTS}
    assert len(keys) == 1
    assert len({Trial("muon", point, 0, FEW).key for point in records.POINTS}) == 6


def test_a_row_has_the_paired_difference_and_its_bound():
    point, losses = Point(30, "4"), {REF: [1.0, 1.2, 1.1], "muon": [0.9, 1.1, 1.0]}
    results = {
        Trial(arm, point, seed, FEW): {
            "loss": loss, "curve": [5 * loss, loss], "versions": 9, "bytes_per_token": 1234.5,
            "minutes": 3.04}
        for arm, of_seed in losses.items() for seed, loss in enumerate(of_seed)
    }
    *_, reference, muon = records.table(results).splitlines()
    assert reference == "| 30 | 4 | synchronous AdamW | 1.1000 |  |  |  | 4,938 | 3.0 |"
    assert muon == "| 30 | 4 | local mode, Muon | 1.0000 | -0.1000 | -0.1000 | 9 | 1,234 | 3.0 |"
    assert records.curves(results).endswith("| 30 | 4 | local mode, Muon | 5.000 | 1.000 |\n")


def test_the_command_runs_each_trial_once_and_prints_the_table(tmp_path, capsys, monkeypatch):
    (line,) = re.findall(r"^    make records RECORDS_ARGS='(.*)'$", PAGE.read_text(), re.M)
    small = " ".join(f"--set {setting}" for setting in SMALL)
    few = f"{line} --seeds 1 --tokens {TOKENS} --processes 1 --build {tmp_path} {small}"
    command = ["make", "-s", "records", f"RECORDS_ARGS={few}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    monkeypatch.setattr(sys, "argv", ["records", *few.split()])
    # One of processes would leave a process that keeps track of its semaphores.
    monkeypatch.setattr(records, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    assert records.main() == 0
    for said, trials in ((answer.stdout, 2), (capsys.readouterr().out, 0)):
        assert f"2 trials, {trials} to run" in said
        assert said.count("| 30 | 4 |") == 2 * 2


def test_a_table_that_has_no_place_in_the_page_is_not_written_there():
    with pytest.raises(SystemExit, match="write <!-- from make records, 3M -->"):
        report.replaced(PAGE.read_text(), "a table", "records, 3M")


def test_the_published_table_is_of_arms_and_points_that_there_are():
    head, line, *rows = report.published(PAGE.read_text(), "records, 0.5M").splitlines()
    assert f"{head}\n{line}\n" == records.HEADER
    assert rows
    titles = {arm.title for arm in ARMS.values()}
    for row in rows:
        steps, workers, title = [cell.strip() for cell in row.split("|")[1:4]]
        assert Point.read(f"{steps}x{workers}") in records.POINTS
        assert title in titles
