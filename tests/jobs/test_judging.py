"""What the end of the ranks of a synchronous job means, and the exit code that says so.

pytest tests/jobs/test_judging.py
"""

import pytest

from elastic.jobs.history import judge
from elastic.run.records import Outcome

CRASH = {
    "code": 1, "error": "", "closing": "", "told": "", "notice": "", "fenced_by": 0,
    "is_own": False,
}


@pytest.mark.parametrize(
    ("facts", "outcome", "reason"),
    [
        ({}, "crashed", "the ranks ended with code 1"),
        ({"error": "KeyError: 'a'"}, "crashed", "KeyError: 'a' (the ranks ended with code 1)"),
        ({"notice": "SIGTERM"}, "crashed", "the ranks ended with code 1"),
        ({"code": -9, "notice": "SIGTERM"}, "yielded",
         "notice, and the ranks ended with signal SIGKILL"),
        ({"code": -9}, "crashed", "the ranks ended with signal SIGKILL"),
        ({"code": -40}, "crashed", "the ranks ended with signal 40"),  # it has no name
        ({"code": 0, "closing": "done"}, "done", "run done"),
        ({"code": 75, "notice": "SIGUSR1"}, "yielded", "notice: SIGUSR1"),
        ({"code": 75}, "yielded", "the ranks left on a notice"),
        ({"code": 93, "fenced_by": 3}, "fenced", "attempt 3 has the run now"),
        # Its ranks die of the one that knows.
        ({"fenced_by": 3}, "fenced", "attempt 3 has the run now"),
        ({"code": -6, "fenced_by": 3}, "fenced", "attempt 3 has the run now"),
        ({"code": 93}, "stopped", "the run is going on in sync mode again"),
        ({"code": 93, "closing": "stopped"}, "stopped", "the run is stopped"),
        ({"closing": "stopped"}, "stopped", "the run is stopped"),
        ({"closing": "done"}, "done", "the run is done"),
        # run.command
        ({"code": 0, "is_own": True}, "done", "run done"),
        ({"code": 0, "is_own": True, "notice": "SIGTERM"}, "yielded",
         "notice, and the ranks ended with 0"),
        ({"code": 0, "is_own": True, "notice": "SIGTERM", "closing": "done"}, "done", "run done"),
        ({"code": 0, "is_own": True, "told": "stopped", "closing": "stopped"}, "stopped",
         "the run is stopped"),
        ({"code": 93, "is_own": True}, "crashed", "the ranks ended with code 93"),
    ],
)
def test_the_end_of_the_ranks_is_judged_by_facts_alone(facts, outcome, reason):
    end = judge(**CRASH | facts)
    assert (end.outcome, end.reason) == (Outcome(outcome), reason)
