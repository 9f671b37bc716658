"""Workers of unlike speed: each does as many steps as fit into a round, and holds nobody up."""

from running import running

SETTINGS = {
    "elastic.min": 1,
    "elastic.max": 4,
    "local_sgd.inner_steps": 20,
    "local_sgd.min_deadline": "0.5s",
    "local_sgd.deadline_k": 1000,  # no last call because of slowness
}


def test_a_slow_worker_does_fewer_steps_and_the_round_does_not_wait_for_more(tmp_path):
    (tmp_path / "pace.3").write_text("0.4")
    with running(tmp_path, SETTINGS, samples=10**6, step_s=0.1) as run:
        run.until(lambda: run.version >= 7, 120, "seven versions")
    # In the first round nobody knows a pace; before the first, not all four were there.
    steps = [
        {delta["slot"]: delta["steps"] for delta in commit["deltas"]}
        for commit in run.run.commits(3)
        if len(commit["deltas"]) == 4
    ]
    assert len(steps) >= 3
    for each in steps:
        assert 1 <= each[3] <= 10 < each[0] <= 20, steps
    calls = [event for event in run.run.events() if event["kind"] == "last-call"]
    assert not [call for call in calls if "took longer" in call["reason"]]


def test_a_round_whose_workers_died_is_due_no_more(tmp_path):
    """Whoever comes then does all steps: it would wait for ever for those that are gone."""
    settings = SETTINGS | {"elastic.max": 2, "local_sgd.deadline_k": 0}
    with running(tmp_path, settings, samples=10**6, step_s=0.1) as run:
        run.until(lambda: run.version >= 3, 120, "three versions, and so a pace")
        for slot in (0, 1):
            run.kill("trainer", slot)
        version = run.version
        run.until(lambda: run.version >= version + 2, 60, "the run goes on")
    assert run.run.commit(version + 2)["deltas"][0]["steps"] > 1
