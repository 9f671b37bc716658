"""The audit finds everything that can be wrong with a ledger, and nothing in one that is right."""

import json
import random
import shutil
from pathlib import Path

import pytest

from elastic.base import durable
from elastic.run import audit as auditing
from elastic.run.audit import PATIENCE, audit
from elastic.run.commits import read_checkpoints

SAMPLES = 100


def delta(samples: list, slot: int = 0) -> dict:
    tokens = sum(stop - start for _, start, stop in samples) * 8
    return {"slot": slot, "attempt": 1, "job_id": "1", "steps": 5, "tokens": tokens, "loss": 2.0,
            "samples": samples}


class Ledger:
    """A run directory with commits that are right until a test breaks one of them."""

    def __init__(self, path: Path, epochs: int = 0):
        self.path, self.tokens, self.version = path, 0, -1
        (path / "commits").mkdir(parents=True)
        (path / "versions").mkdir()
        self.carried = {"dataset_samples": SAMPLES, "epochs": epochs, "total_tokens": 0}
        self.commit([])

    def commit(self, deltas: list[dict], **changes) -> None:
        self.version += 1
        self.tokens += sum(each["tokens"] for each in deltas)
        folder = self.path / "versions" / f"{self.version:06d}"
        folder.mkdir()
        (folder / "params-00.safetensors").write_bytes(b"x" * 10)
        file = {"path": f"versions/{folder.name}/params-00.safetensors", "bytes": 10, "xxh3": "aa"}
        record = {
            "version": self.version, "master_epoch": 1, "time": 1.0, "tokens": self.tokens,
            "samples": [span for each in deltas for span in each["samples"]],
            "deltas": deltas, "files": [file], **self.carried, **changes,
        }
        (self.path / "commits" / f"{self.version:06d}.json").write_text(json.dumps(record))

    def save(self, step: int, base: int, tokens: int, samples: list, skipped: list = ()) -> None:
        """A checkpoint of sync mode on top of version `base`."""
        folder = self.path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "extra.json").write_bytes(b"x" * 10)
        gained = {**delta(samples), "tokens": tokens - self.tokens}
        extra = {"base_version": base, "tokens": tokens, "samples": samples, "deltas": [gained],
                 "state": {"of": "the trainer"}, "skipped": skipped, "dataset_samples": SAMPLES,
                 "epochs": 1}
        file = {"path": f"checkpoints/{folder.name}/extra.json", "bytes": 10, "xxh3": "aa"}
        record = {"step": step, "writer": "attempt1", "extra": extra, "files": [file]}
        folder.with_suffix(".json").write_text(json.dumps(record))

    def prune(self, name: str) -> None:
        """A version, or a checkpoint, with its record."""
        (self.path / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.path / name)

    def finish(self, **reached) -> None:
        (self.path / "DONE").write_text(json.dumps(reached))

    def problems(self, **options) -> str:
        return "\n".join(audit(self.path, **options)["problems"])


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "run")


def test_a_complete_epoch_by_several_slots_in_any_order_is_right(tmp_path):
    ledger = Ledger(tmp_path / "run", epochs=2)
    starts = [(epoch, start) for epoch in range(2) for start in range(0, SAMPLES, 10)]
    random.Random(4).shuffle(starts)
    for epoch, start in starts:
        spans = [[epoch, start, start + 4], [epoch, start + 4, start + 10]]
        ledger.commit([delta(spans, slot=start % 3)])
    ledger.finish()
    report = audit(ledger.path)
    assert report["problems"] == []
    assert (report["committed"], report["repeated"], report["missing"]) == (2 * SAMPLES, 0, 0)
    assert report["tokens"] == 2 * SAMPLES * 8


def test_touching_ranges_are_no_repetition_but_one_shared_sample_is(ledger):
    ledger.commit([delta([[0, 0, 50]], slot=0), delta([[0, 50, 60]], slot=1)])
    assert ledger.problems() == ""
    ledger.commit([delta([[0, 59, 70]])])
    assert audit(ledger.path)["repeated"] == 1
    assert "epoch 0: 1 samples committed more than once" in ledger.problems()


def test_a_sample_that_is_trained_three_times_counts_twice_as_repeated(ledger):
    for _ in range(3):
        ledger.commit([delta([[0, 5, 6]])])
    assert audit(ledger.path)["repeated"] == 2


def test_the_same_range_in_another_epoch_is_no_repetition(ledger):
    ledger.commit([delta([[0, 0, SAMPLES], [1, 0, 10]])])
    assert ledger.problems() == ""


def test_what_a_running_run_lacks_is_open_or_not_reached_but_not_missing(ledger):
    ledger.commit([delta([[0, 0, 10], [0, 30, 40]])])
    report = audit(ledger.path)
    assert (report["open"], report["not_reached"], report["missing"]) == (20, 60, 0)
    assert report["problems"] == []


def test_a_hole_is_missing_once_its_epoch_is_long_over(ledger):
    ledger.commit([delta([[0, 0, 60], [0, 61, SAMPLES], [1, 0, 1]])])
    for start in range(1, PATIENCE):
        ledger.commit([delta([[1, start, start + 1]])])
    assert audit(ledger.path)["missing"] == 0
    ledger.commit([delta([[1, PATIENCE, PATIENCE + 1]])])
    assert "epoch 0: 1 samples never committed" in ledger.problems()


def test_a_run_that_finished_its_epochs_owes_every_sample_of_each(tmp_path):
    ledger = Ledger(tmp_path / "run", epochs=2)
    ledger.commit([delta([[0, 0, SAMPLES]])])
    assert ledger.problems() == ""
    ledger.finish()
    assert f"epoch 1: {SAMPLES} samples never committed" in ledger.problems()


def test_a_run_that_stopped_on_tokens_may_end_inside_an_epoch(ledger):
    ledger.commit([delta([[0, 0, 70]])])
    ledger.finish()
    assert audit(ledger.path)["not_reached"] == 30
    assert ledger.problems() == ""


def test_a_run_that_lost_its_last_versions_is_wrong_also_where_tokens_bound_it(ledger):
    for start in (0, 10, 20):
        ledger.commit([delta([[0, start, start + 10]])])
    ledger.finish(version=3, tokens=240)
    assert ledger.problems() == ""
    for version in (2, 3):
        (ledger.path / "commits" / f"{version:06d}.json").unlink()
    said = "the run ended with 240 tokens, and what is left of it has 80"
    assert ledger.problems() == said


def test_what_cannot_be_read_of_the_end_of_a_run_is_said(ledger):
    (ledger.path / "DONE").write_text('{"version": 3, "tokens": "240"}')
    assert "DONE: tokens is '240'" in ledger.problems()


@pytest.mark.parametrize("span", [[0, 90, 120], [0, -5, 5]])
def test_samples_outside_the_data_set_are_wrong(ledger, span):
    ledger.commit([delta([span])])
    assert "samples outside the data set" in ledger.problems()


def test_a_gap_in_the_versions_is_wrong(ledger):
    ledger.commit([delta([[0, 0, 10]])])
    ledger.commit([delta([[0, 10, 20]])])
    (ledger.path / "commits" / "000001.json").unlink()
    assert "version 0 is followed by 2" in ledger.problems()


def test_a_commit_by_an_earlier_master_is_wrong(ledger):
    ledger.commit([delta([[0, 0, 10]])], master_epoch=3)
    ledger.commit([delta([[0, 10, 20]])], master_epoch=2)
    assert "version 2 was committed by a fenced master" in ledger.problems()


def test_tokens_that_do_not_add_up_are_wrong(ledger):
    ledger.commit([delta([[0, 0, 10]])], tokens=81)
    assert "version 1 adds 81 tokens, its deltas 80" in ledger.problems()


def test_samples_that_are_in_no_delta_are_wrong(ledger):
    ledger.commit([delta([[0, 0, 10]])], samples=[[0, 0, 11]])
    assert "version 1: its samples are not those of its deltas" in ledger.problems()


def test_a_commit_that_cannot_be_read_is_named(ledger):
    ledger.commit([delta([[0, 0, 10]])])
    (ledger.path / "commits" / "000001.json").write_text('{"version": 1, ')
    assert "000001.json cannot be read" in ledger.problems()


def test_a_copy_of_a_record_is_none(ledger):
    ledger.commit([delta([[0, 0, 10]])])
    ledger.save(4, base=1, tokens=160, samples=[[0, 10, 20]])
    ledger.save(5, base=1, tokens=240, samples=[[0, 10, 30]])
    for place in ("commits/000001.json", "checkpoints/step-00000004.json"):
        record = ledger.path / place
        for name in (f"{record.stem}.bak.json", f"{record.stem} (copy).json", f"old {record.name}"):
            shutil.copy(record, record.with_name(name))
    shutil.copy(ledger.path / "checkpoints/step-00000004.json",
                ledger.path / "checkpoints/step-00000005.old.json")
    assert ledger.problems() == ""
    assert audit(ledger.path)["commits"] == 2
    assert [saved.step for saved in read_checkpoints(ledger.path, 1)] == [4, 5]


def test_no_commit_at_all_is_said_so(tmp_path):
    (tmp_path / "commits").mkdir()
    assert audit(tmp_path)["problems"] == []  # it may come yet
    (tmp_path / "versions" / "000012").mkdir(parents=True)
    assert audit(tmp_path)["problems"] == ["no version is committed"]
    (tmp_path / "versions" / "000012").rmdir()
    assert audit(tmp_path)["problems"] == []
    (tmp_path / "DONE").write_text('{"reason": "run done", "time": 1.0}')
    assert audit(tmp_path)["problems"] == ["no version is committed"]


def test_files_of_kept_versions_must_be_there_and_whole(ledger):
    for start in (0, 10, 20):
        ledger.commit([delta([[0, start, start + 10]])])
    files = sorted(ledger.path.glob("versions/*/*"))
    assert ledger.problems(keep=2) == ""
    for path in files[:2]:  # pruned with their folders
        path.unlink()
        path.parent.rmdir()
    assert ledger.problems(keep=2) == ""
    assert "000001/params-00.safetensors: it is gone" in ledger.problems(keep=3)
    files[3].write_bytes(b"short")
    assert "00.safetensors: 5 bytes, xxh3 aa; the commit says 10 bytes" in ledger.problems(keep=2)


def test_a_version_whose_writer_died_before_the_last_rename_is_whole(ledger):
    ledger.commit([delta([[0, 0, 10]])], writer="epoch2")
    folder = ledger.path / "versions" / "000001"
    folder.rename(folder.with_name(".000001.epoch2"))
    assert ledger.problems() == ""


def test_a_checkpoint_whose_writer_died_before_the_last_rename_is_whole(ledger):
    ledger.save(1, 0, 800, [[0, 0, 100]])
    folder = ledger.path / "checkpoints" / "step-00000001"
    folder.rename(folder.with_name(".step-00000001.attempt1"))
    assert ledger.problems() == ""


# ---- a run that goes on while it is audited


def when_it_reads(ledger: Ledger, happens, first: str = "000000") -> str:
    """The problems, where all this happens once it opens the first file of a folder."""
    todo = [happens]

    def checksum(path: Path) -> str:
        while path.parent.name.endswith(first) and todo:
            todo.pop()()
        durable.checksum(path)
        return "aa"

    said = ledger.problems(checksum=checksum)
    assert not todo
    return said


@pytest.mark.parametrize("first", ["000000", "000001"])
def test_a_version_that_is_pruned_meanwhile_is_not_missing(ledger, first):
    ledger.commit([delta([[0, 0, 10]])])

    def goes_on() -> None:
        ledger.commit([delta([[0, 10, 20]])])
        ledger.prune("versions/000001")

    assert when_it_reads(ledger, goes_on, first) == ""


def test_a_version_that_is_lost_meanwhile_is_missing(ledger):
    ledger.commit([delta([[0, 0, 10]])])
    said = when_it_reads(ledger, lambda: ledger.prune("versions/000001"))
    assert "000001/params-00.safetensors: it is gone" in said


def test_a_version_that_gets_its_last_name_meanwhile_is_whole(ledger):
    ledger.commit([delta([[0, 0, 10]])], writer="epoch2")
    folder = ledger.path / "versions" / "000001"
    draft = folder.rename(folder.with_name(".000001.epoch2"))
    assert when_it_reads(ledger, lambda: draft.rename(folder), draft.name) == ""


@pytest.mark.parametrize("first", ["000000", "step-00000001"])
def test_a_checkpoint_that_is_pruned_meanwhile_is_not_missing(ledger, first):
    ledger.save(1, 0, 400, [[0, 0, 50]])

    def goes_on() -> None:
        ledger.save(2, 0, 800, [[0, 0, 100]])
        ledger.prune("checkpoints/step-00000001")

    assert when_it_reads(ledger, goes_on, first) == ""


def test_a_run_that_ends_meanwhile_owes_nothing(tmp_path, monkeypatch):
    ledger, read = Ledger(tmp_path / "run", epochs=1), auditing.read_commits

    def and_then_it_ends(folder: Path):
        found = read(folder)
        ledger.commit([delta([[0, 0, SAMPLES]])])
        ledger.finish(version=1, tokens=SAMPLES * 8)
        return found

    monkeypatch.setattr(auditing, "read_commits", and_then_it_ends)
    assert ledger.problems() == ""


def test_an_altered_file_is_found_by_its_checksum(ledger):
    assert ledger.problems(checksum=lambda _path: "aa") == ""
    problem = "10 bytes, xxh3 bb; the commit says 10 bytes, xxh3 aa"
    assert problem in ledger.problems(checksum=lambda _path: "bb")


def test_a_checkpoint_counts_on_top_of_the_newest_version_alone(tmp_path):
    ledger = Ledger(tmp_path / "run", epochs=1)
    ledger.commit([delta([[0, 0, 40]])])
    ledger.save(1, 0, 240, [[0, 0, 30]])  # overtaken by version 1
    ledger.save(2, 1, 400, [[0, 40, 50]])
    ledger.save(3, 1, 800, [[0, 40, 90], [0, 95, SAMPLES]], skipped=[[0, 90, 95]])
    ledger.finish()
    report = audit(ledger.path)
    assert (report["problems"], report["version"], report["tokens"]) == ([], 1, 800)
    assert (report["committed"], report["missing"], report["repeated"]) == (SAMPLES - 5, 0, 0)


@pytest.mark.parametrize(
    ("base", "samples", "tokens", "problem"),
    [
        (1, [[0, 39, SAMPLES]], 800, "epoch 0: 1 samples committed more than once"),
        (1, [[0, 40, 99]], 800, "epoch 0: 1 samples never committed"),
        (0, [[0, 40, SAMPLES]], 800, "epoch 0: 60 samples never committed"),
    ],
)
def test_what_is_wrong_across_the_modes_is_found(tmp_path, base, samples, tokens, problem):
    ledger = Ledger(tmp_path / "run", epochs=1)
    ledger.commit([delta([[0, 0, 40]])])
    ledger.save(1, base, tokens, samples)
    ledger.finish()
    assert problem in ledger.problems()


def test_a_file_of_a_checkpoint_that_counts_must_be_there(ledger):
    ledger.save(1, 0, 800, [[0, 0, 100]])
    assert ledger.problems() == ""
    (ledger.path / "checkpoints/step-00000001/extra.json").unlink()
    assert "step-00000001/extra.json: it is gone" in ledger.problems()


def test_a_checkpoint_is_read_without_its_trainers_state(ledger):
    ledger.save(1, 0, 400, [[0, 0, 50]])
    (saved,) = read_checkpoints(ledger.path, 0)
    assert (saved.step, saved.tokens, saved.samples) == (1, 400, ((0, 0, 50),))
    assert "the trainer" not in str(saved)


@pytest.mark.parametrize(("samples", "is_wrong"), [
    ([[0, 3, 10], [0, 0, 3]], False), ([[0, 0, 10], [0, 5, 5]], False),
    ([[0, 0, 10], [0, 4, 6]], True), ([[0, 0, 9]], True), ([[0, 0, 10], [0, 3, 9]], True),
])
def test_samples_may_be_written_in_several_ways(ledger, samples, is_wrong):
    ledger.commit([delta([[0, 0, 10]])], samples=samples)
    assert ("its samples are not" in ledger.problems()) == is_wrong
