"""Versions of local mode are validated on their way, and whoever looks is told.

    pytest tests/local/worker/test_scores.py
"""

import json
import re
from pathlib import Path

import pytest

from elastic.local.worker.validation import is_due
from elastic.people import metrics, report, status
from elastic.run import scores
from helpers import commit_of, delta_of, elastic, environment
from running import Running, running

EVERY = {"train.validate_every": 10, "local_sgd.inner_steps": 5}  # every second version


def numbers(run: Running) -> list[int]:
    return [event["version"] for event in run.events("validate")]


@pytest.mark.parametrize(("version", "slot", "due"), [(4, 2, True), (4, 5, False), (3, 2, False)])
def test_the_lowest_slot_in_it_scores_a_version_now_and_then(version, slot, due):
    commit = commit_of(version, deltas=(delta_of(5), delta_of(2)))
    assert is_due(commit, slot, every_versions=2) == due
    assert not is_due(commit, slot, every_versions=0)


def test_a_version_that_nobody_made_is_not_scored():
    assert not is_due(commit_of(0), 0, every_versions=1)


def test_versions_are_scored_on_their_way_and_all_who_look_are_told(tmp_path: Path):
    with running(tmp_path, {**EVERY, "elastic.max": 2}, samples=2000, step_s=0.02) as run:
        run.until(lambda: numbers(run), 60, "the first one is validated")
        run.finish()
        found, log = scores.read(run.run), tmp_path / "rows.jsonl"
        assert numbers(run) == sorted({*numbers(run)})
        assert all(number % 2 == 0 for number in numbers(run))
        assert len(found) == len(numbers(run)) > 2
        assert found[-1].loss < found[0].loss
        commits = {commit.version: commit for commit in run.commits()}
        assert [each.tokens for each in found] == [commits[n].tokens for n in numbers(run)]

        seen = status.observe(run.run)
        assert seen["validated"] == {"tokens": found[-1].tokens, **found[-1].values}
        shown = elastic("status", run.run.path, env=environment(run.home)).stdout
        assert re.search(r"validated +validation_loss [\d.]+, at [\d.]+k? samples", shown), shown
        metrics.feed(run.run, metrics.sinks(run.run, log, None, None))
        told = [json.loads(line) for line in log.read_text().splitlines()]
        told = [row["validated_tokens"] for row in told if "validated_tokens" in row]
        assert told == [each.tokens for each in found][: len(told)]
        assert len(told) >= len(found) - 1  # of the last version there may be no row after it
        facts = report.gather(run.run)
        assert facts.scores == found
        assert "dots: validation" in report.page(facts)


def test_ranks_that_share_a_model_score_it_together(tmp_path: Path):
    two = {**EVERY, "slurm.gpus_per_worker": 2, "elastic.min": 2, "elastic.max": 2}
    with running(tmp_path, two, samples=400, step_s=0) as run:
        run.finish(120)
        found = scores.read(run.run)
        assert len(found) > 1
        assert found[-1].loss < found[0].loss


def test_a_notice_ends_a_validation_and_loses_nothing(tmp_path: Path):
    with running(tmp_path, EVERY, samples=400, step_s=0.02, validation_passes=100_000) as run:
        run.until(lambda: [slot for slot in run.slots().values() if slot.state == "validating"],
                  60, "a validation")  # fmt: skip
        job = run.jobs()["worker", 0]
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        assert not scores.read(run.run)
