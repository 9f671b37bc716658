"""Does local SGD learn, and would the validation notice if it did not? In seconds, on a tiny task.

The long answer is `make validate` (tests/validate/rig.py); here its simulator and its verdicts are
held to what is known exactly, and a commit to what it must survive.
"""

import itertools
import os
from functools import partial

import pytest
import torch
from torch.utils.data import default_collate

from elastic.run.shuffle import index
from elastic.saved.layout import Layout
from elastic.saved.replica import Replica, shapes
from elastic.saved.versions import remove_drafts
from elastic.train.optimizers import default_optimizer
from elastic.train.schedule import share_of_peak
from merging import Rounds
from validate import report, rig
from validate.noisy_task import Noisy
from validate.simulator import Simulator, Start, seeded_model

SAMPLES = 2000
TASK = {"samples": SAMPLES, "dropout": 0.0}
SETTINGS = ("train.batch_size=4", "train.learning_rate=0.02", "train.schedule=cosine",
            "train.optimizer=adamw", "local_sgd.inner_steps=5", "local_sgd.cold_start=0",
            "local_sgd.outer_momentum=0.8", "local_sgd.compression=none")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Stateless(Noisy):
    """Its inner optimizer knows nothing but the gradient."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.02)


class Slope(Stateless):
    """Its gradient is the same everywhere."""

    def loss(self, model, batch):
        return sum(param.sum() for param in model.parameters())


def tiny(config, kind: type[Simulator] = Simulator, task: type[Noisy] = Noisy) -> Simulator:
    """At version 0 of a run whose parameters bf16 holds."""
    task = task(TASK)
    model = seeded_model(task, config)
    replica = Replica(model, layout := Layout.of(shapes(model), config.local_sgd.fragment_bytes))
    params = [replica.whole(i).bfloat16().float() for i in range(len(layout.fragments))]
    return kind(task, config, Start(params), SAMPLES, SAMPLES)


def loss(simulator: Simulator, count: int = 200) -> float:
    """Of the published parameters, on samples that nobody trains."""
    simulator.adopt(simulator.versions[simulator.version].published)
    batch = default_collate([simulator.task.dataset()[10**6 + i] for i in range(count)])
    with torch.no_grad():
        return simulator.task.loss(simulator.model, batch).item()


def spend(simulator: Simulator, crew, steps: int, ahead: int | None = None) -> Simulator:
    """`ahead`: steps while a delta travels; None: a trace that knows nothing of such."""
    batch = simulator.config.train.batch_size
    commits = rig.trace(crew, 0, steps, batch)
    if ahead is not None:
        commits = rig.overlapping(commits, ahead * batch)
    for _ in simulator.replay(commits):
        pass
    return simulator


def ends_alike(one: Simulator, other: Simulator, atol: float = 0.0) -> bool:
    ends = zip(one.outer.params, other.outer.params, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in ends)


# ---- the simulator ------------------------------------------------------------------------------


def test_one_worker_in_one_round_is_plain_training(make_config):
    config = make_config(*SETTINGS, *rig.PLAIN, "local_sgd.inner_steps=40")
    simulated = spend(tiny(config), rig.steady(1, 40), 40)
    model, order = seeded_model(Noisy(TASK), config), partial(index, SAMPLES, config.run.seed, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    optimizer, dataset = default_optimizer(model, config.train), Noisy(TASK).dataset()
    for step in range(40):
        for group in optimizer.param_groups:
            share = share_of_peak(4 * step / SAMPLES, config.train)
            group["lr"] = config.train.learning_rate * share
        batch = default_collate([dataset[order(i)] for i in range(4 * step, 4 * step + 4)])
        Noisy(TASK).loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.allclose(torch.cat(simulated.outer.params), plain, atol=1e-6)


def test_the_parameters_do_not_depend_on_how_the_model_is_cut_into_fragments(make_config):
    whole, cut = (
        spend(tiny(make_config(*SETTINGS, f"local_sgd.fragment={size}")), rig.cut(5, 1), 60)
        for size in ("1mb", "64b")
    )
    assert len(whole.outer.params) == 1 < len(cut.outer.params)
    assert torch.allclose(whole.outer.params[0], torch.cat(cut.outer.params), atol=1e-6)


def test_four_workers_learn(make_config):
    simulator = tiny(make_config(*SETTINGS))
    before = loss(simulator)
    assert loss(spend(simulator, rig.steady(4, 5), 240)) < before / 4


@pytest.mark.parametrize(
    "kind", [rig.WrongSign, rig.Sum, rig.NeverReload, rig.StaleAnchor, rig.Unguarded]
)
def test_four_workers_that_are_badly_averaged_do_not(make_config, kind):
    simulator = tiny(make_config(*SETTINGS), kind)
    before = loss(simulator)
    after = loss(spend(simulator, rig.steady(4, 5), 240))
    assert not after < before  # it may be no number


# ---- steps ahead --------------------------------------------------------------------------------


@pytest.mark.parametrize("crew", [rig.cut(5, 0), rig.churn(5, 0, "ramp")])
def test_steps_ahead_are_the_first_of_the_workers_next_delta(crew):
    commits = list(rig.overlapping(rig.trace(crew, 10, 300, 2), 3 * 2))
    deltas = {(d.slot, d.attempt, d.base): d for c in commits for d in c.deltas}
    found = 0
    for (slot, attempt, base), delta in deltas.items():
        later = deltas.get((slot, attempt, base + 1))
        samples = later.samples if later else ()
        found += len(samples)
        assert delta.ahead == tuple((0, start, min(start + 6, stop)) for _, start, stop in samples)
    assert found > 20


def test_no_steps_ahead_are_no_overlap_bit_for_bit(make_config):
    rebase = make_config(*SETTINGS, "local_sgd.overlap=rebase")
    off = spend(tiny(make_config(*SETTINGS)), rig.cut(5, 0), 60)
    none = spend(tiny(rebase), rig.cut(5, 0), 60, 0)
    some = spend(tiny(rebase), rig.cut(5, 0), 60, 1)
    assert ends_alike(off, none)
    assert not ends_alike(off, some, 1e-4)


def test_steps_ahead_along_a_constant_gradient_end_where_others_do(make_config):
    """Every step counts once: with the others silent, it does not matter where it was done."""
    settings = (*SETTINGS, "train.schedule=constant", "local_sgd.overlap=rebase")
    off, on, twice = (
        spend(tiny(make_config(*settings), kind, Slope), rig.steady(1, 5), 60, ahead)
        for kind, ahead in ((Simulator, 0), (Simulator, 2), (rig.LateApply, 2))
    )
    assert ends_alike(off, on, 1e-4)
    assert not ends_alike(off, twice, 0.1)


@pytest.mark.parametrize(("kind", "learns"), [(Simulator, True), (rig.LateApply, False)])
def test_four_workers_learn_while_their_deltas_travel(make_config, kind, learns):
    simulator = tiny(make_config(*SETTINGS, "local_sgd.overlap=rebase"), kind)
    before = loss(simulator)
    assert (loss(spend(simulator, rig.steady(4, 5), 240, 1)) < before / 4) == learns


# ---- the validation's own verdicts --------------------------------------------------------------


@pytest.mark.parametrize("crew", [rig.steady(4, 5), rig.cut(5, 0), rig.churn(5, 0, "ramp"),
                                  rig.forgetful(5), rig.late(5)])
def test_every_participation_spends_the_same_samples_once(crew):
    deltas = [delta for commit in rig.trace(crew, 10, 300, 2) for delta in commit.deltas]
    positions = [at for d in deltas for _, start, stop in d.samples for at in range(start, stop)]
    assert sorted(positions) == list(range(10, 610))
    assert sum(delta.steps for delta in deltas) == 300


LEVELS = {"dp": 1.62, "quarter": 1.75, "plain": 1.68, "lone": 1.5, "lone_plain": 1.6,
          "churn": 1.65, "churn_ramp": 1.65}


def losses(**changes: float) -> rig.Losses:
    """As they should be, over three seeds that agree but for a little."""
    levels = dict.fromkeys(rig.ARMS, 1.61) | LEVELS
    levels |= {fault.arm: 1.7 for fault in rig.FAULTS if fault.arm not in LEVELS} | changes
    return {a: {seed: level + seed / 10 for seed in range(3)} for a, level in levels.items()}


def broken(found: list[dict]) -> set[str]:
    return {each.get("rule", "") for each in found if not each["ok"]}


def test_rules_hold_and_faults_are_seen_where_all_is_as_it_should_be():
    assert broken(rig.check_rules(losses())) == set()
    assert all(each["ok"] for each in rig.check_faults(losses()))
    assert len(rig.check_faults(losses())) == len(rig.FAULTS)


@pytest.mark.parametrize(
    ("arm", "level", "rules"),
    [
        ("dp", 1.5, {"R1"}),
        ("quarter", 1.62, {"R2"}),
        ("plain", 1.62, {"R3"}),
        ("lone", 1.6, {"R4"}),
        ("int8", 1.65, {"R5"}),
        ("cut", 1.65, {"R6"}),
        ("churn_ramp", 1.7, {"R7"}),
        ("no_clip", 1.611, {"R8"}),
        ("int4", 1.68, {"R1", "R5"}),
        ("rebase", 1.8, {"R1", "R10"}),
        ("churn_ramp", 6.0, {"R7", "R9"}),
        ("poison", float("nan"), {"R8", "R9"}),
    ],
)
def test_an_arm_that_is_off_breaks_its_rule(arm, level, rules):
    assert broken(rig.check_rules(losses(**{arm: level}))) == rules


def test_a_difference_that_the_seeds_do_not_agree_on_breaks_a_rule():
    found = losses()
    found["base"] = {0: 1.61, 1: 1.80, 2: 1.72}  # on average within the margin
    assert "R1" in broken(rig.check_rules(found))


def test_a_fault_without_effect_is_reported_as_unseen():
    (unseen,) = [each for each in rig.check_faults(losses(heavy_ball=1.61)) if not each["ok"]]
    assert unseen["arm"] == "heavy_ball"


# ---- the table and the picture ------------------------------------------------------------------


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


def test_the_table_has_every_arm_that_is_shown_and_what_its_rules_say():
    header, _, *rows = cells(report.table(rig.SHOWN, losses(), rig.check_rules(losses())))
    assert [row[0] for row in rows] == list(rig.SHOWN.values())
    assert all(len(row) == len(header) and all(row) for row in rows[2:])
    worse = losses(int8=1.7)
    _, _, *rows = cells(report.table(rig.SHOWN, worse, rig.check_rules(worse)))
    assert [row[0] for row in rows if row[-1] == "BROKEN"] == ["int8"]


def test_the_published_table_is_of_all_arms_and_of_the_rules_as_they_are():
    """What was measured is for `make validate --publish` to say; here its form."""

    def form(table: str) -> list[list[str]]:
        return [[row[0], row[4], row[7], row[8]] for row in cells(table)]

    now = report.table(rig.SHOWN, losses(), rig.check_rules(losses()))
    text = report.PAGE.read_text()
    assert form(report.published(text)) == form(now)
    assert report.published(report.replaced(text, now)) == now
    assert report.replaced(text, report.published(text)) == text


def test_the_picture_shows_all_arms_and_is_the_same_when_drawn_again(tmp_path):
    found = {arm: {seed: [(100, 2.0), (200, 1.5 + seed)] for seed in range(3)} for arm in rig.SHOWN}
    pictures = [tmp_path / name for name in ("one.svg", "other.svg")]
    for path in pictures:
        report.draw(rig.SHOWN, found, path)
    drawn, again = (path.read_text() for path in pictures)
    assert drawn == again
    for picture in (drawn, report.PICTURE.read_text()):
        assert [name for name in rig.SHOWN.values() if f">{name}</text>" not in picture] == []
        assert len(picture) < 150_000


# ---- a commit -----------------------------------------------------------------------------------


class Killed(BaseException):
    """The master is gone."""


def test_a_master_killed_between_any_two_system_calls_of_a_commit_changes_nothing(
    make_run, monkeypatch
):
    """Parameters, momentum and running means become true together, and once."""
    ends = []
    for calls in itertools.count():
        run = Rounds(make_run(name=f"killed-{calls}"), torch.arange(30) / 16)
        run.close([run.deliver(slot, run.base() + slot / 8, 100) for slot in range(3)])
        headers = [run.put(slot, run.base() - slot / 4, 100 + slot) for slot in range(3)]
        with monkeypatch.context() as patch:
            survived = kill_at(patch, calls, lambda run=run, h=headers: close(run, h))
        run.new_master()
        remove_drafts(run.run, run.run.commits.newest_version())
        if run.version < 2:
            close(run, headers)
        run.new_master()  # reads, and verifies, what is on disk
        assert run.version == 2
        ends.append(torch.cat([run.theta, run.momentum]))
        run.averager.close()
        if survived:
            break
    assert len(ends) > 10
    assert all(torch.equal(end, ends[-1]) for end in ends)


def close(run: Rounds, headers: list) -> None:
    run.close([run.averager.check(header) for header in headers])


def kill_at(patch, calls: int, action) -> bool:
    """Run `action`, dying instead of making the system call after so many; True if it got through.

    The clean-up that a killed process does not do is kept from happening.
    """
    made = itertools.count()
    dead = []

    def mortal(call):
        def die_or_do(*args, **kwargs):
            if dead or next(made) == calls:
                dead.append(call)
                raise Killed
            return call(*args, **kwargs)

        return die_or_do

    for name in ("open", "fsync", "link", "replace", "rename", "unlink", "mkdir"):
        patch.setattr(os, name, mortal(getattr(os, name)))
    try:
        action()
    except Killed:
        return False
    return True
