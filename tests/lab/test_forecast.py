"""Traces of preemptions, played by the book: each second is where arithmetic says it is.

pytest tests/lab/test_forecast.py
"""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import shown_costs
from elastic.base import config as configuration
from elastic.base.errors import UsageError
from elastic.lab import trace
from elastic.lab.forecast import _choose, costs, forecast
from elastic.lab.played import Change, Costs, Local, Nodes, Requeue, Sync
from elastic.people import views
from elastic.run import estimate
from elastic.run.goodput import PARTS, Allocation, Work
from helpers import ROOT, elastic, environment
from test_views import plain

AWS = ROOT / "etc/traces/spot-addremove-aws-p3.csv"
COSTS = Costs(step_s=1, startup_s=10, queue_s=0, requeue_s=20, notice_s=5, leave_s=1)
WHOLE = {"elastic.max": 2, "checkpoint.interval": "30s", "local_sgd.inner_steps": 10,
         "local_sgd.cold_start": 0, "local_sgd.min_deadline": "1s",
         "local_sgd.last_call": "1s"}


@functools.cache
def run_of(**changes):
    """A configuration; keys with "__" for the dot."""
    given = WHOLE | {key.replace("__", "."): value for key, value in changes.items()}
    set_to = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    path = ROOT / "etc/125m.toml"
    return configuration.load(path, ["run.scheduler=local", *set_to], Path(os.devnull))


def there(*spans: tuple[str, float, float]) -> list[Change]:
    """Nodes of one GPU, each from a time to another."""
    changes = [Change(at, node, gpus) for node, start, stop in spans
               for at, gpus in ((start, 1), (stop, 0))]
    return sorted(changes, key=lambda change: change.at)


def parts(ledger: dict[str, float]) -> dict[str, float]:
    names = (*PARTS, "allocated")
    return {name: round(ledger[name], 6) for name in names if abs(ledger[name]) > 1e-9}


# ---- by hand


def test_a_requeued_job_saves_loses_waits_and_trains_again():
    """10..40 train, ..42 save, ..70, save, 72..100, save, 102..105: killed, 3 s after its save;
    it may start at 125, and trains those 3 s again from 135 to 138."""
    found = Requeue(
        Nodes(there(("a", 0, 100), ("a", 110, 999))), run_of(), replace(COSTS, save_s=2), [1]
    )
    assert parts(found.play(200)) == {
        "training": 30 + 28 + 28 + 3 + 27 + 28 + 3, "replay": 3, "start-up": 20, "waiting": 10,
        "allocated": 105 + 75,
    }


def test_a_requeued_job_needs_all_its_nodes():
    changes = there(("a", 0, 100), ("b", 50, 999), ("c", 150, 999))
    found = Requeue(Nodes(changes), run_of(), COSTS, [2]).play(200)
    assert parts(found)["allocated"] == 2 * (55 + 50)


def test_a_trainer_saves_at_the_notice_and_goes_on_with_what_is_left():
    """On two: 10..40, 41..70, 71..95.5, where its step ends; saved at 99.5, gone at 100.5. On one:
    110.5..140.5, 141.5..170.5, 171.5..200."""
    changes = there(("a", 0, 999), ("b", 0, 95))
    found = Sync(Nodes(changes), run_of(), replace(COSTS, notice_s=30, save_s=4, stall_s=1)).play(
        200
    )
    assert parts(found) == {
        "training": 2 * (30 + 29 + 24.5) + 30 + 29 + 28.5, "start-up": 30, "waiting": 6,
        "notice": 10, "allocated": 2 * 100.5 + 99.5,
    }


def test_a_trainer_whose_notice_is_too_short_goes_back_to_its_last_checkpoint():
    """Saved at 70 s, at 59 s of training each; 71..95.5 is trained again by one GPU."""
    changes = there(("a", 0, 999), ("b", 0, 95))
    found = Sync(Nodes(changes), run_of(), replace(COSTS, save_s=6, stall_s=1)).play(200)
    assert parts(found)["replay"] == 2 * 24.5
    assert parts(found)["training"] == 2 * (30 + 29 + 24.5) + (200 - 106.5 - 3) - 2 * 24.5


def test_a_trainer_grows_when_it_pays():
    changes = there(("a", 0, 9e9), ("b", 300, 9e9))
    grown = Sync(Nodes(changes), run_of(sync__grow_after="1m"), COSTS).play(3000)
    assert parts(grown)["start-up"] == 10 + 2 * 10
    never = Sync(Nodes(changes), run_of(sync__grow_after="2h"), COSTS).play(3000)
    assert (parts(never)["start-up"], parts(never)["allocated"]) == (10, 3000)


LOCAL = replace(COSTS, deliver_s=1, deliver_alone_s=1, average_s=1, pull_s=1)


def test_a_worker_that_is_preempted_delivers_the_steps_it_has():
    """Rounds from 10, 23, 36 and 49. At 50 the second worker has done one step, delivers it until
    51, and is gone at 52; the other one delivers at 60."""
    found = Local(Nodes(there(("a", 0, 999), ("b", 0, 50))), run_of(), LOCAL).play(60.5)
    assert parts(found) == {
        "training": 40 + 31, "start-up": 20, "waiting": 9 + 9, "notice": 2, "open": 1.5,
        "allocated": 60.5 + 52,
    }


def test_a_worker_that_is_killed_loses_its_round_and_the_others_call_in_vain():
    """The other one waits from 59 on: for a deadline, 14.4 s after the round was opened at 48, then
    for an answer to the last call; the next round begins two seconds later."""
    changes = there(("a", 0, 999), ("b", 0, 50.5))
    found = Local(Nodes(changes), run_of(), replace(LOCAL, notice_s=0)).play(80)
    assert parts(found)["lost"] == 50.5 - 46  # since its last step that counts
    late_s = 62.4 + 1 + 2 - 59
    assert found["waiting"] == pytest.approx(9 + 6 + late_s, abs=0.05)
    lease = Local(Nodes(changes), run_of(health__lease="4s"), replace(LOCAL, notice_s=0)).play(80)
    assert lease["waiting"] == pytest.approx(9 + 6 + 3)


def test_a_worker_that_joins_stops_when_the_round_is_due():
    """The round of 49 is due at 60; who comes at 52 has 7 s until it must deliver."""
    changes = there(("a", 0, 999), ("b", 42, 999))
    found = Local(Nodes(changes), run_of(), LOCAL)
    found.play(65)
    steps = {(each.attempt[0], each.start): each.tokens for each in found.work}
    assert (steps[0, 49], steps[1, 52]) == (10, 7)


def test_a_worker_that_comes_too_late_for_a_step_is_asked_again():
    """The round that was opened at 48 is due at 60. By 62.4 nobody has delivered, because the one
    that was at it is dead; and the round is due no more: who came at 59.5 does 10 steps after all.
    """
    changes = there(("a", 0, 58), ("b", 49.5, 999))
    found = Local(Nodes(changes), run_of(), replace(LOCAL, notice_s=0))
    found.play(80)
    last = found.work[-1]
    assert (last.attempt[0], last.start, last.tokens) == (1, pytest.approx(62.41), 10)


def test_a_run_starts_as_many_jobs_at_once_as_may_wait_in_the_queue():
    changes = there(*((f"n{number}", 0, 9e9) for number in range(8)))
    config = run_of(elastic__max=8, elastic__max_pending=3, elastic__reconcile_interval="30s")
    found = Local(Nodes(changes), config, COSTS)
    found.play(100)
    assert sorted(job.start for job in found.jobs) == [0, 0, 0, 30, 30, 30, 60, 60]


def test_a_job_whose_node_goes_before_it_starts_waits_anew():
    """The node of a job that is about to start goes and comes back: it starts two seconds later."""
    costs, one = replace(COSTS, queue_s=2), run_of(elastic__max=1)
    found = Local(Nodes(there(("a", 0, 1), ("a", 1.5, 99))), one, costs)
    found.play(20)
    assert [job.start for job in found.jobs] == [3.5]


# ---- whatever the trace


@st.composite
def traces(draw) -> list[Change]:
    changes, at = [], 0.0
    nodes = dict.fromkeys("abc", False)
    for _ in range(draw(st.integers(1, 14))):
        node = draw(st.sampled_from(sorted(nodes)))
        nodes[node] = not nodes[node]
        changes.append(Change(at, node, int(nodes[node])))
        at += draw(st.sampled_from([0.0, 0.5, 3.0, 17.3, 61.0]))
    return changes


ALL_COSTS = st.builds(
    Costs, step_s=st.sampled_from([0.3, 1.0]), startup_s=st.sampled_from([0.0, 7.0]),
    queue_s=st.sampled_from([0.0, 1.0]), requeue_s=st.just(20.0),
    notice_s=st.sampled_from([0.0, 2.0, 30.0]), leave_s=st.sampled_from([0.0, 1.0]),
    save_s=st.sampled_from([0.0, 5.0]), stall_s=st.sampled_from([0.0, 1.0]),
    deliver_s=st.sampled_from([0.0, 0.7]), deliver_alone_s=st.just(0.3),
    average_s=st.sampled_from([0.0, 2.0]), pull_s=st.sampled_from([0.0, 0.5]),
)


def plays(changes: list[Change], costs: Costs) -> list:
    config = run_of(elastic__max=3)
    return [Requeue(Nodes(changes), config, costs, [2]), Sync(Nodes(changes), config, costs),
            Local(Nodes(changes), config, costs)]


@settings(max_examples=150, deadline=None)
@given(traces(), ALL_COSTS)
def test_parts_add_up_to_what_was_allocated_and_that_is_never_more_than_there_was(changes, costs):
    end = changes[-1].at + 100
    offered_s = sum(gpus * seconds for gpus, seconds in Nodes(changes).spans(end))
    taken = sum(change.gpus == 0 for change in changes)
    for play, again in zip(plays(changes, costs), plays(changes, costs), strict=True):
        found = play.play(end)
        assert min(found[name] for name in PARTS) >= -1e-9, found
        assert sum(found[name] for name in PARTS) == pytest.approx(found["allocated"], abs=1e-6)
        assert found["allocated"] <= offered_s + 3 * taken * costs.notice_s + 1e-6
        assert again.play(end) == found


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), ALL_COSTS)
def test_without_preemptions_all_is_training_but_for_start_up_saves_and_rounds(nodes, costs):
    changes = [Change(0.0, f"n{number}", 1) for number in range(nodes)]
    config = run_of(elastic__max=nodes, checkpoint__interval="10m")
    pause_s = costs.deliver_s + costs.average_s + costs.pull_s
    saves = 2000 / 600
    least = {Requeue: saves * costs.save_s, Sync: saves * costs.stall_s,
             Local: 2000 * pause_s / (10 * costs.step_s + pause_s)}
    for kind, other_s in least.items():
        play = kind(Nodes(changes), config, costs, *([[nodes]] if kind is Requeue else []))
        found = play.play(2000.0)
        lost_s = costs.startup_s + costs.queue_s + other_s + 20
        assert found["training"] >= nodes * (2000 - lost_s)
        assert (found["replay"], found["lost"], found["notice"]) == (0, 0, 0)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(1, 9)), st.integers(1, 9), ALL_COSTS)
def test_one_preemption_more_never_makes_plain_requeue_train_more(moments, extra, costs):
    """Where each finds the job at work, and costs more than a checkpoint can spare: one that comes
    just before another may save that. (Training by what was allocated can rise: nothing is while
    a requeued job waits.)"""
    costs, config = replace(costs, requeue_s=40.0), run_of(elastic__max=2)

    def trained(moments: set[int]) -> float:
        start = [Change(0.0, "a", 1), Change(0.0, "b", 1)]
        taken = [Change(100.5 * n, "a", gpus) for n in sorted(moments) for gpus in (0, 1)]
        return Requeue(Nodes([*start, *taken]), config, costs, [2]).play(1050)["training"]

    assert trained(moments | {extra}) <= trained(moments) + 1e-6


# ---- what to do about it


def way(mode: str, kept: float, inner_steps: int = 0) -> dict:
    return {"mode": mode, "kept": kept, "inner_steps": inner_steps}


def test_sync_mode_is_taken_where_it_is_as_good():
    requeued, sync = way("requeue", 0.5), way("sync", 0.88)
    best, why = _choose(requeued, sync, way("local", 0.9))
    assert best["mode"] == "sync"
    assert "step for step as if undisturbed, for 88%" in why
    best, why = _choose(requeued, sync, way("local", 0.95, inner_steps=500))
    assert (best["mode"], best["inner_steps"]) == ("local", 500)
    assert why == ("it trains for 95% of the GPU time that is there, sync mode for 88%,"
                   " --requeue for 50%")


def test_a_run_on_a_part_of_a_node_is_forecast_too():
    """Its sync mode has a job of that part: config allows it."""
    nodes = [Change(0.0, "a", 8), Change(0.0, "b", 8), Change(500.0, "a", 0)]
    config = run_of(elastic__max=2, slurm__gpus_per_node=8)
    found = forecast(nodes, 2000.0, config, COSTS)
    assert [each["gpus"] for each in found["ways"]] == [[2, 2], [1, 2], [1, 2]]
    assert all(0.9 < each["kept"] < 1 for each in found["ways"])
    assert found["recommended"]["max"] == 2


def test_costs_are_those_of_the_configuration_and_the_model():
    config = run_of(plan__startup="90s", plan__flops=1e14, elastic__max=4)
    model = estimate.Model(10**9, 10**9, 10, 10**8, 10**8, 1024)
    found = costs(config, model)
    assert (found.startup_s, found.pull_s > 0, found.deliver_s > 0) == (90, True, True)
    assert found.step_s == pytest.approx(6 * 1e9 * 32 * 1024 / 1e14)
    assert found.save_s == pytest.approx(12e9 / (20 * 2**30))
    assert costs(run_of(plan__step="2s"), None).step_s == 2


def test_a_trace_has_the_nodes_of_its_file():
    changes, end = trace.read(AWS, 1)
    assert len(changes) == 177 + 167
    spans = [*Nodes(changes).spans(end)]
    assert max(gpus for gpus, _ in spans) == 32
    assert sum(seconds for _, seconds in spans) == pytest.approx(end)


# ---- where traces come from


@pytest.mark.parametrize("line", ["5,add", "x,add,n1", "5,lost,n1", "5;add;n1"])
def test_a_line_that_is_no_change_is_named(line, tmp_path):
    (tmp_path / "t.csv").write_text(f"0,add,n0\n{line}\n")
    with pytest.raises(UsageError, match="t.csv:2: "):
        trace.read(tmp_path / "t.csv", 1)


def test_a_trace_without_gpus_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("0,add,n0\n")
    with pytest.raises(UsageError, match="no GPUs|no end"):
        trace.read(tmp_path / "t.csv", 1)


# ---- the command


def test_the_command_forecasts_and_recommends(tmp_path):
    (tmp_path / "t.csv").write_text("0,add,a\n0,add,b\n900000,remove,b\n1800000,add,b\n"
                                    "3600000,remove,a\n")
    given = ("plan", ROOT / "etc/demo.toml", "--trace", tmp_path / "t.csv",
             "--set", "plan.step=10s")
    answer = elastic(*given, "--json", env=environment(tmp_path))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert [each["mode"] for each in found["ways"]][:3] == ["requeue", "sync", "local"]
    assert found["costs"]["step_s"] == 10
    assert found["trace"] == {"seconds": 3600, "nodes": 2, "most_gpus": 2, "taken": 2, "moments": 2}
    text = plain(views.plan_view(found))
    assert f"take --mode {found['recommended']['mode']} --max 2: it trains" in text


def test_gpus_that_a_trace_never_has_are_not_played():
    """A max of 1,000 took minutes."""
    nodes = there(("a", 0.0, 900.0), ("b", 100.0, 900.0))
    found = forecast(nodes, 900.0, run_of(elastic__max=100_000), COSTS)
    assert found["ways"][-1]["gpus"] == [1, 2]
    assert found["recommended"]["max"] == 2


def test_no_max_below_min_is_recommended():
    """Submission refused the command that elastic-plan had printed."""
    config = run_of(elastic__min=2, elastic__max=4)
    found = forecast(there(("a", 0.0, 900.0)), 900.0, config, COSTS)
    assert found["recommended"]["max"] == 2


def test_the_command_says_what_it_lacks(tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('[run]\nscheduler = "local"\ntask = "nowhere:Task"\n[train]\nepochs = 1\n')
    answer = elastic("plan", config, "--trace", AWS, env=environment(tmp_path))
    assert answer.returncode == 2
    assert "how long a step takes cannot be known" in answer.stderr
    assert "--set plan.step=SECONDS" in answer.stderr
    known = elastic("plan", config, "--trace", AWS, "--set", "plan.step=1s", "--json",
                    env=environment(tmp_path))
    assert known.returncode == 0
    assert "saves and deltas are taken to cost no time: task module nowhere" in known.stderr
    config.write_text('[run]\nscheduler = "local"\ncommand = ["x"]\n[train]\nepochs = 1\n')
    answer = elastic("plan", config, "--trace", AWS, env=environment(tmp_path))
    assert "only run.command knows the model" in answer.stderr


def test_no_cost_that_a_run_has_shown_is_negative(run, monkeypatch):
    """Slurm tells the end of a job in whole seconds, and workers have clocks of their own: a job
    that seemed to leave before its last step was played for ever."""
    job = Allocation(1, 0.0, 9.0, 20.0, "yielded", ((9.0, (0, 1)),), notice=20.5)
    work = Work((0, 1), 8.5, 21.5, 40, 0.0)
    monkeypatch.setattr(shown_costs.goodput, "allocations", lambda *_: [job])
    monkeypatch.setattr(shown_costs.goodput, "work_in", lambda *_: [work])
    assert shown_costs.measured(run) == {"startup_s": 0.0, "leave_s": 0.0}
