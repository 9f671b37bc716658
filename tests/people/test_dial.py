"""What elastic-submit chooses of local mode, and why.

    pytest tests/people/test_dial.py
"""

import re
from pathlib import Path

import pytest

from elastic.base.config import Config, load, load_written
from elastic.people import dial
from elastic.run.estimate import ENOUGH, Model, Rates, cost
from elastic.saved.codec import CODECS
from helpers import ROOT, elastic, environment

MODEL = Model(134_105_856, 135_153_558, 14, 8_388_608, 8_454_144, 1024)
FAST, MIDDLING = Rates(), Rates(process=1.2e9)


def run_of(*settings: str) -> Config:
    return load(ROOT / "etc/125m.toml", ["slurm.partition=x", "plan.step=0.4s", *settings])


def chosen(config: Config, rates: Rates) -> dict[str, object]:
    """What is not as it was."""
    values = {each.key.partition(".")[2]: each.value for each in dial.choose(config, MODEL, rates)}
    return {name: each for name, each in values.items() if each != getattr(config.local_sgd, name)}


def said(*settings: str) -> list[str]:
    config = run_of(*settings)
    every = [*dial.choose(config, MODEL, MIDDLING), *dial.outer_step(config)]
    return [f"{each.key.partition('.')[2]}={each.value}: {each.reason}" for each in every]


@pytest.mark.parametrize(("step", "found"), [
    ("10s", {"inner_steps": dial.LEAST_STEPS}),  # they stand still for 3.17 s of a round
    ("0.4s", {"inner_steps": 159}),
    ("0.27s", {"inner_steps": 170, "compression": "int4"}),  # 2.29 s
    ("0.1s", {"inner_steps": 127, "overlap": "rebase"}),  # a quarter of a round covers 3.17 s
    ("0.05s", {"inner_steps": 184, "compression": "int4", "overlap": "rebase"}),
    ("0.02s", {"inner_steps": 459, "compression": "int4", "overlap": "rebase"}),
])
def test_few_steps_in_a_round_come_first_and_steps_ahead_last(step, found):
    assert chosen(run_of(f"plan.step={step}"), MIDDLING) == found


def test_one_step_less_and_workers_wait_too_long():
    steps = chosen(run_of(), MIDDLING)["inner_steps"]
    stall_s = cost(MODEL, 8, 8, MIDDLING).stall_s
    assert stall_s / (0.4 * steps) <= ENOUGH < stall_s / (0.4 * (steps - 1))


@pytest.mark.parametrize(("settings", "found"), [
    (("local_sgd.inner_steps=159",), {}),
    (("local_sgd.inner_steps=158",), {"compression": "int4"}),
    (("local_sgd.inner_steps=100", "plan.step=0.2s"), {"overlap": "rebase"}),
    (("local_sgd.inner_steps=99", "plan.step=0.2s"), {"compression": "int4"}),
    (("local_sgd.inner_steps=2", "local_sgd.overlap=off"), {"compression": "int4"}),
    (("slurm.gpus_per_worker=2", "plan.step=0.05s"), {"inner_steps": 732, "compression": "int4"}),
])
def test_what_is_set_stays_and_who_cannot_train_ahead_does_not(settings, found):
    assert chosen(run_of(*settings), MIDDLING) == found


def test_what_stays_as_it_is_has_its_reason_too():
    assert said() == [
        "inner_steps=159: a round is 64 s of steps and 3.2 s to deliver, merge, publish and pull,"
        " where one process writes 1.2 GB/s",
        "compression=int8: with int8 a round has to take 159 steps",
        "overlap=off: workers wait for less than 5% of a round",
        "outer_momentum=auto: 0.7 where a round has 8 workers, with outer_lr 0.72"]
    coded = said("plan.step=0.27s", "local_sgd.overlap=off", "local_sgd.outer_momentum=0.6")
    assert [each.partition("=")[0] for each in coded] == ["inner_steps", "compression"]
    assert coded[1] == "compression=int4: with int8 a round has to take 235 steps"
    assert said("slurm.gpus_per_worker=2", "plan.step=0.05s")[2] == (
        "overlap=off: workers wait for less than 5% of a round")
    assert said("local_sgd.inner_steps=2")[1:3] == [
        "overlap=off: workers wait for more than 5% of a round",
        "outer_momentum=auto: 0.7 where a round has 8 workers, with outer_lr 0.72"]
    assert said("train.optimizer=adamw", "local_sgd.inner_steps=159")[-1] == (
        "outer_momentum=0.9: for rounds of 159 steps, with outer_lr 0.7")


def test_without_the_time_of_a_step_nothing_is_chosen():
    unknown = Model(**vars(MODEL) | {"tokens_per_sample": 0})
    assert dial.has_choice(run_of("plan.step=0s"), MODEL)
    assert dial.has_choice(run_of(), unknown)
    assert not dial.has_choice(run_of("plan.step=0s"), unknown)
    assert not dial.has_choice(run_of("plan.step=0s", "run.scheduler=local"), MODEL)


def test_where_all_is_set_there_is_nothing_to_choose():
    settings = ["local_sgd.inner_steps=7", "local_sgd.overlap=off", "local_sgd.compression=int8"]
    assert dial.has_choice(run_of(*settings[:2]), MODEL)
    assert not dial.has_choice(run_of(*settings), MODEL)


def test_a_site_that_says_how_fast_it_is_is_believed(tmp_path):
    assert dial.rates(run_of("plan.process=3gb"), tmp_path).process == 3 * 2**30
    assert dial.rates(run_of(), tmp_path).process not in (0, run_of().plan.process_bytes)
    assert dial.rates(run_of(), tmp_path / "none").process == run_of().plan.process_bytes
    slow = dial.rates(run_of("plan.process=3gb", "plan.filesystem=1gb"), tmp_path)
    assert (slow.process, slow.filesystem) == (2**30, 2**30)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", list(dial.CODED))
def test_bytes_of_an_element_are_those_of_the_codec(name):
    assert CODECS[name].size_bytes(1024 * 1024) == dial.CODED[name] * 1024 * 1024


def test_a_run_has_what_was_chosen_and_says_why(tmp_path: Path):
    file, env = tmp_path / "mine.toml", environment(tmp_path)
    demo = (ROOT / "etc/demo.toml").read_text()
    file.write_text(re.sub("(?m)^inner_steps.*", "", demo))
    settings = ("--set=plan.step=0.3s", "--set=plan.process=1gb", "--set=train.optimizer=adamw")
    done = elastic("submit", file, *settings, "--name", "mine", env=env)
    assert done.returncode == 0, done.stderr
    elastic("stop", "mine", "--now", env=env)
    said = re.search(r"local_sgd\.inner_steps=(\d+): a round is 9 s of steps and", done.stdout)
    written = (tmp_path / "runs/mine/run.toml").read_text()
    assert re.search("(?m)^inner_steps = .*# elastic-submit: a round is 9 s", written)
    config = load_written(tmp_path / "runs/mine/run.toml")
    assert config.local_sgd.inner_steps == int(said[1]) == dial.LEAST_STEPS
    assert config.local_sgd.outer_momentum == 0.8  # as for so many steps
