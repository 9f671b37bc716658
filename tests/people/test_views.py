"""What people see: everything fits 80 columns, is plain without a terminal, and leaves nothing out.

pytest tests/people/test_views.py
"""

import io

import pytest

from elastic.people import views
from elastic.run.wording import event_words, last_error, one_line

WORKER = {
    "slot": 7, "attempt": 2, "job_id": "4711", "node": "node0123.cluster", "pid": 1, "version": 3,
    "state": "training", "step": 40, "tokens_per_s": 12345.6, "loss": 2.5, "last_beat_s": 1.2,
}
SEEN = {
    "summary": "", "losses": [], "preemptions_per_h": 4.0, "inner_steps": 100, "gpus": 1,
    "run": "demo", "path": "/runs/demo", "mode": "local", "state": "running", "detail": "",
    "reason": "2 workers, fewer than the 4 wanted; 3 jobs wait (Resources)", "next": "nothing",
    "version": 12, "tokens": 1234567, "tokens_goal": 5000000, "loss": 2.3456, "tokens_per_s": 999.9,
    "unit": "tokens", "min": 4, "max": 8, "workers": [WORKER, {**WORKER, "state": "stalled"}],
    "jobs": [{"job_id": "9", "role": "worker", "slot": 3, "state": "PENDING", "reason": "[Prio]"}],
    "events": [{"time": 0.0, "kind": "lost", "slot": 1, "node": "x" * 200}],
}
EMPTY = {
    **SEEN, "state": "waiting", "version": None, "tokens": 0, "tokens_goal": None, "loss": None,
    "tokens_per_s": None, "workers": [], "jobs": [], "events": [],
}
ON_RECORD = {**WORKER, "pid": None, "version": None, "loss": None, "last_beat_s": None,
             "state": "unknown"}


def plain(renderable) -> str:
    """What a pipe gets."""
    file = io.StringIO()
    views.console(file=file, width=80).print(renderable)
    text = file.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_run_shows_progress_workers_jobs_reasons_and_events():
    text = plain(views.run_view(SEEN))
    for words in ("version 12", "1.23M tokens of 5M", "loss 2.346", "4 preemptions/h",
                  "1 alive, on 1 of 4..8 GPUs", "fewer than the 4 wanted", "4711", "stalled",
                  "node0123.cluster", "12.3k", "PENDING", "[Prio]", "slot 1 is lost"):
        assert words in text


def test_a_run_about_which_little_is_known_is_shown_all_the_same():
    assert "version - · 0 tokens · loss -" in plain(views.run_view(EMPTY))
    assert "unknown" in plain(views.run_view({**SEEN, "workers": [ON_RECORD]}))


def test_a_failed_run_shows_the_last_log_lines():
    text = plain(views.run_view({**SEEN, "state": "failed", "detail": "ValueError: [no] such"}))
    assert "ValueError: [no] such" in text


def test_the_list_of_runs_has_a_line_for_each():
    text = plain(views.runs_table([SEEN, {**EMPTY, "run": "other"}]))
    assert "demo" in text
    assert "1 of 4..8" in text
    assert "other" in text
    assert "no runs" in plain(views.runs_table([]))


def test_markup_in_names_and_reasons_is_printed_as_it_is():
    assert "[red]x[/red]" in plain(views.run_view({**SEEN, "reason": "[red]x[/red]"}))


EVIL = "[/x] [link=http://e.example]y[/link] \x1b]0;OWNED\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("field", ["state", "node", "job_id"])
def test_no_words_of_a_worker_are_obeyed(field: str, capsys):
    worker = {**WORKER, field: EVIL, "step": 10**400}
    views.show(views.run_view, {**SEEN, "workers": [worker], "reason": EVIL, "events": [
        {"time": 0.0, "kind": EVIL, "slot": EVIL}, {"time": 0.0, "kind": "lost", "node": EVIL}]})
    text = capsys.readouterr().out
    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert "[/x] [link=http://e.example]y[/link]" in " ".join(text.split())


def test_an_audit_says_what_is_wrong_and_its_verdict():
    counts = {"committed": 90, "repeated": 1, "missing": 0, "open": 2, "not_reached": 8}
    report = {
        "commits": 3, "deltas": 5, "tokens": 1000, "unit": "tokens", "masters": 1, "files": 6,
        "finished": False,
        "epochs": [{"epoch": 0, **counts}], "problems": ["epoch 0: 1 samples [twice]"],
    }
    text = plain(views.audit_view("demo", report))
    assert "wrong: epoch 0: 1 samples [twice]" in text
    assert "audit of demo (not finished): WRONG" in text
    assert "audit of demo (finished): ok" in plain(
        views.audit_view("demo", {**report, "finished": True, "problems": []})
    )
    assert "WRONG" in plain(views.audit_view("x", {"epochs": [], "problems": ["none"]}))


def test_a_terminal_gets_colour():
    file = io.StringIO()
    views.console(file=file, width=80, force_terminal=True).print(views.run_view(SEEN))
    assert "\x1b[" in file.getvalue()



@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.7, "1k"), (12345, "12.3k"), (7.89e9, "7.89G"), (None, "-")],
)
def test_counts_are_short(number, text):
    assert views.si(number) == text


def test_gpus_are_counted_not_workers():
    of_eight = {**SEEN, "gpus": 8, "max": 32}
    assert "1 alive, on 8 of 4..32 GPUs" in plain(views.run_view(of_eight))
    assert "8 of 4..32" in plain(views.runs_table([of_eight]))


def test_a_name_that_is_to_be_copied_is_whole():
    name = "a-run-with-a-name-that-is-rather-long"
    lines = plain(views.runs_table([{**SEEN, "run": name}])).splitlines()
    assert name in "".join(line.split(" ")[0] for line in lines)


@pytest.mark.parametrize(("event", "words"), [
    ({"kind": "lost", "role": "worker", "slot": 3, "reason": "exit 1", "steps": 4},
     "slot 3 failed: exit 1"),
    ({"kind": "lost", "slot": 3, "node": "n1", "steps": 4},
     "slot 3 is lost: n1 was silent after step 4"),
    ({"kind": "done", "version": 4, "tokens": 9}, "the run is done: nothing is left to train"),
    ({"kind": "restore", "step": 40, "world": 8}, "training goes on from step 40 on 8 GPUs"),
    ({"kind": "restore", "resume": "", "world": 8},
     "training goes on from the beginning on 8 GPUs"),
    ({"kind": "restore", "resume": "", "world": 8, "attempt": 3},
     "training goes on from what the program itself finds on 8 GPUs"),
    ({"kind": "preempt", "role": "trainer", "reason": "notice"},
     "the trainer had to leave: notice"),
    ({"kind": "restore", "resume": "x/y", "world": 8}, "training goes on from x/y on 8 GPUs"),
    ({"kind": "outer-step", "version": 4, "workers": 1, "loss": 2.5},
     "version 4 from 1 worker, loss 2.5"),
    ({"kind": "outer-step", "version": 4, "workers": 1, "loss": None}, "version 4 from 1 worker"),
])
def test_an_event_says_what_happened(event, words):
    assert event_words(event) == words


def test_anybodys_words_are_one_line_of_limited_length():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("word " * 100, 20) == "word word word wo..."


@pytest.mark.parametrize(
    ("said", "why"),
    [("Traceback (most recent call last):\n  File x\n    loss()\nValueError: a banana\nbye\n",
      "ValueError: a banana"),
     ("[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: KeyError: 'x'\n",
      "KeyError: 'x'"),
     ("Traceback (most recent call last):\n  File x\nKeyError: 'x'\nTraceback (most recent call "
      "last):\n  File run\nsubprocess.CalledProcessError: Command died\n", "KeyError: 'x'"),
     ("Traceback (most recent call last):\n  File x\nOSError: Caught OSError in DataLoader worker "
      "process 0.\nOriginal Traceback (most recent call last):\n  File y\nOSError: no shard 7\n",
      "OSError: no shard 7"),
     ("  + Exception Group Traceback (most recent call last):\n  |   File x\n  | ExceptionGroup: "
      "both (1 sub-exception)\n  +-+------ 1 ------\n    | OSError: no shard 7\n    +---\n",
      "ExceptionGroup: both (1 sub-exception)"),
     ("usage: t.py [-h]\nt.py: error: unrecognized arguments: --resume\n",
      "t.py: error: unrecognized arguments: --resume"),
     ("Traceback (most recent call last):\n  File x\nelastic.base.errors.ElasticError: no port\n",
      "no port"),
     ("python: can't open file '/x/t.py': [Errno 2] No such file\n",
      "python: can't open file '/x/t.py': [Errno 2] No such file"),
     ("step 3\nsrun: error: n1: task 0: Exited with exit code 1\n", ""), ("", "")],
)
def test_the_last_words_of_a_program_say_why_it_died(said: str, why: str):
    assert last_error(said) == why
