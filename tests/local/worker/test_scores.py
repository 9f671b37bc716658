"""Versions of local mode are validated on their way, and whoever looks is told.

    pytest tests/local/worker/test_scores.py
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic.base.durable import append_line
from elastic.base.signals import Notice
from elastic.local.worker.in_hand import InHand
from elastic.local.worker.line import Line, News, Place
from elastic.local.worker.validation import Validation, is_due
from elastic.people import metrics, report, status
from elastic.people.status import Listing
from elastic.run.membership import Slot
from elastic.run.sound import SCORES
from elastic.train.group import Group
from elastic.train.task import score
from helpers import commit_of, delta_of, elastic, environment
from running import TESTS, Running, running

EVERY = {"train.validate_every": 10, "local_sgd.inner_steps": 5}  # every second version


def numbers(run: Running) -> list[int]:
    return [line["version"] for line in run.run.lines(SCORES)]


def evaluated(run: Running, number: int) -> dict[str, float]:
    shown = elastic("evaluate", run.run.path, "--version", number, "--json",
                    env=environment(run.home, PYTHONPATH=str(TESTS)))
    assert shown.returncode == 0, shown.stderr
    return {name: value for name, value in json.loads(shown.stdout).items() if name != "version"}


@pytest.mark.parametrize(("version", "slot", "due"), [(4, 2, True), (4, 5, False), (3, 2, False)])
def test_the_lowest_slot_in_it_scores_a_version_now_and_then(version, slot, due):
    commit = commit_of(version, deltas=(delta_of(5), delta_of(2)))
    assert is_due(commit, slot, every_versions=2) == due
    assert not is_due(commit, slot, every_versions=0)


def test_a_version_that_nobody_made_is_not_scored():
    assert not is_due(commit_of(0), 0, every_versions=1)


ASLEEP = """
from tiny_task import Tiny

class Asleep(Tiny):
    def __init__(self, config):
        super().__init__(config)
        self.config = config

    def model(self):
        return super().model().eval()  # as from_pretrained() does

    def loss(self, model, batch):
        assert all(module.training for module in model.modules()), "without dropout"
        return super().loss(model, batch)

    def validate(self, model):
        return Tiny(self.config).validate(model.eval())
"""


@pytest.mark.parametrize("overlap", ["off", "rebase"])
def test_versions_are_scored_on_their_way_and_all_who_look_are_told(tmp_path: Path, overlap):
    """As they are, without steps ahead. And a model trains in its training mode, in whatever
    mode it came and was scored."""
    (tmp_path / "asleep.py").write_text(ASLEEP)
    settings = {**EVERY, "run.task": "asleep:Asleep", "elastic.max": 1, "checkpoint.keep": 1000,
                "local_sgd.overlap": overlap}
    with running(tmp_path, settings, samples=600, step_s=0.02) as run:
        run.until(lambda: numbers(run), 60, "the first one is validated")
        run.finish()
        found, log = run.run.scores.read(), tmp_path / "rows.jsonl"
        assert numbers(run) == sorted({*numbers(run)})
        assert all(number % 2 == 0 for number in numbers(run))
        assert len(found) == len(numbers(run)) > 2
        assert found[-1].loss < found[0].loss
        commits = {commit.version: commit for commit in run.commits()}
        for delta in (delta for commit in commits.values() for delta in commit.deltas):
            assert 0 < delta.trained_s <= delta.seconds
        assert [each.tokens for each in found] == [commits[n].tokens for n in numbers(run)]

        for number, each in list(zip(numbers(run), found, strict=True))[-2:]:
            assert each.values == pytest.approx(evaluated(run, number), rel=1e-5)

        seen = status.observe(run.run)
        assert seen["scores"] == [[each.tokens, each.loss] for each in found]
        assert seen["validated"] == {"tokens": found[-1].tokens, **found[-1].values}
        shown = elastic("status", run.run.path, env=environment(run.home)).stdout
        curve = r"\n +[\d.]+ [▁-█]+ [\d.]+ *\n"
        row = rf"validated +validation_loss [\d.]+, at [\d.]+k? samples *{curve}"
        assert re.search(row, shown), shown
        metrics.tell(run.run, metrics.sinks(run.run, log, None, None))
        told = [json.loads(line) for line in log.read_text().splitlines()]
        told = [row["score/tokens"] for row in told if "score/tokens" in row]
        assert told == [each.tokens for each in found][: len(told)]
        assert len(told) >= len(found) - 1  # of the last version there may be no row after it
        facts = report.gather(run.run)
        assert facts.scores == found
        assert "dots: validation" in report.page(facts)


def test_a_task_may_call_its_scores_what_it_likes(make_run):
    run, values = make_run(), {"time": 1.0, "kind": 2.0, "loss": 3.0, "tokens": 4.0}
    run.scores.add(9, values, step=7)
    line = {"step": 8, "time": 2e9, "tokens": 99, "loss": 0.5, "world": 1}
    line |= {"seconds": 1.0, "attempt": 1}
    append_line(run.path / "metrics.jsonl", line)
    (found,) = run.scores.read()
    assert (found.loss, found.tokens, found.values) == (3.0, 9, values)
    (row,) = metrics.rows(run, after=0)
    assert (row["loss"], row["tokens"]) == (0.5, 99)
    assert (row["score/loss"], row["score/tokens"]) == (3.0, 9)
    assert status.observe(run, Listing())["validated"] == {**values, "tokens": 9}


def test_a_validation_puts_each_part_back_into_its_mode():
    """A part that is frozen, BatchNorm mostly, trained from the first validation on."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1).eval())
    score(SimpleNamespace(validate=lambda model: model.eval() and {"a": 1}), model)
    assert [part.training for part in model] == [True, False]


def test_a_long_validation_keeps_one_worker_and_ends_at_a_notice(tmp_path: Path):
    two = {**EVERY, "elastic.max": 2, "health.lease": "30s"}
    with running(tmp_path, two, samples=10**6, step_s=0.02, validation_passes=5000) as run:
        def at_it() -> list[Slot]:
            return [slot for slot in run.slots().values() if slot.state == "validating"]

        # Not two that train: one may validate before the other has begun.
        run.until(lambda: len(run.slots()) == 2, 60, "two workers")
        run.until(at_it, 60, "a validation")
        run.versions(6)
        [validates] = at_it()
        run.scheduler.preempt(validates.job_id)
        assert run.ended(validates.job_id)["outcome"] == "yielded"
        assert numbers(run) == []
        run.pace(0)
        run.until(lambda: numbers(run), 60, "a score")
        run.versions(2)


def test_a_new_master_is_told_in_a_validation_what_is_held(run):
    """It waits for a minute, and then gives the samples to others; a validation may be longer."""
    told, line = [], Line(Place(run, 0, 1, "7"), Notice())
    line.declare, line.commit = lambda held: told.append(held) or line.news.epoch, commit_of
    hand = InHand(line, run.config())
    hand.queue = [(0, 4, 8)]
    validation = Validation(hand, None, Group(), 0)
    for epoch in (1, 1, 2):
        line.news = News(5, state="running", epoch=epoch)
        validation._before_pass()
    assert told == [[(0, 4, 8)]] * 2
