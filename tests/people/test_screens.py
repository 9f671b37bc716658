"""Every screen as people see it, at 80 and at 120 columns, kept in tests/screens to be looked at.

A screen that changes on purpose: ELASTIC_NEW_SCREENS=1 pytest tests/people/test_screens.py, and
read the difference before committing it.
"""

import io
import os
import time

import pytest

from elastic.people import views
from elastic.run import wording
from helpers import ROOT

SCREENS = ROOT / "tests" / "screens"
NOW = 1_790_000_000.0
WIDTHS = (80, 120)


def worker(slot: int, **changes) -> dict:
    plain = {"slot": slot, "attempt": 1, "job_id": str(4700 + slot), "node": f"node{slot:04d}",
             "pid": 1, "version": 123, "state": "training", "step": 40 + slot % 3,
             "tokens_per_s": 3700.0 + slot, "loss": 2.31, "last_beat_s": 1.2}
    return plain | changes


def job(slot: int, state: str = "RUNNING", **changes) -> dict:
    plain = {"job_id": str(4700 + slot), "role": "worker", "slot": slot, "state": state,
             "reason": "", "node": f"node{slot:04d}", "submitted": NOW - 720}
    return plain | changes


def event(kind: str, ago_s: float, **fields) -> dict:
    return {"time": NOW - ago_s, "kind": kind, **fields}


EVENTS = [
    event("notice", 300, role="worker", slot=7, attempt=2, job_id="4707", signal="SIGTERM"),
    event("preempt", 299, role="worker", slot=7, attempt=2, reason="notice: SIGTERM", steps=3400),
    event("end", 290, role="worker", slot=7, job_id="4707", outcome="yielded",
          reason="notice: SIGTERM"),
    event("submit", 289, role="worker", slot=7, job_id="4733", reason="job 4707 yielded"),
    event("join", 200, slot=3, attempt=2, node="node0003", job_id="4703"),
    event("reject", 100, slot=5, attempt=1, base=121, reason="stale: based on version 119"),
    event("outer-step", 40, version=123, workers=11, loss=2.3123, tokens=1, seconds=61.0,
          reason="all 11 live workers have answered"),
    event("something-new", 1, where="here", size=3.14159265),
]


def seen(**changes) -> dict:
    """What status.observe says of a healthy run."""
    plain = {
        "run": "7b", "path": "/lustre/project42/runs/7b", "mode": "local", "state": "running",
        "reason": "2 jobs wait (Priority)", "detail": "",
        "next": "nothing: all is as wanted", "version": 123, "tokens": 1_310_000_000,
        "tokens_goal": 7_000_000_000, "unit": "tokens", "loss": 2.3123,
        "tokens_per_s": 41_000.0,
        "losses": [[i * 10_000_000, 2.3 + 3 / (1 + i / 6)] for i in range(61)],
        "scores": [[i * 50_000_000, 2.4 + 3 / (1 + i)] for i in range(13)],
        "validated": {"validation_loss": 2.4 + 3 / 13, "tokens": 600_000_000},
        "preemptions_per_h": 4.0, "inner_steps": 100, "min": 8, "max": 32, "gpus": 11,
        "workers": [worker(slot) for slot in range(11)],
        "jobs": [job(slot) for slot in range(11)]
        + [job(slot, "PENDING", reason="Priority", node="") for slot in (11, 12)],
        "events": EVENTS,
    }
    found = plain | changes
    upcoming = changes.get("next", "")
    return found | {"summary": wording.sentence(found, upcoming, NOW)}


TROUBLED = [worker(3, state="stalled", tokens_per_s=0.0, last_beat_s=2.0),
            worker(64, state="blocked", step=0, tokens_per_s=0.0, trouble="No space left"),
            worker(90, state="loading", version=None, step=0, tokens_per_s=0.0)]
CROWD = [worker(slot) for slot in range(128) if slot not in (3, 64, 90)] + TROUBLED
ON_RECORD = [worker(slot, pid=None, version=None, step=0, loss=None, last_beat_s=None,
                    tokens_per_s=0.0, state="unknown") for slot in range(2)]
NOBODY = {"workers": [], "gpus": 0, "tokens_per_s": None}
NOT_YET = {"version": None, "tokens": 0, "tokens_goal": None, "loss": None, "losses": [],
           "scores": [], "validated": None}
WAITING = seen(
    **NOBODY, **NOT_YET, state="waiting", reason="no worker is there; 3 jobs wait (Resources)",
    next="submit worker 2 (no job is there)",
    events=[event("submit", 9, min=8, max=32, scheduler="x")],
    jobs=[job(0, "PENDING", reason="ReqNodeNotAvail, UnavailableNodes:node0001"),
          job(1, "PENDING", reason="QOSMaxJobsPerUserLimit"), job(2, "PENDING", reason="Odd")],
)
FAILED = seen(
    **NOBODY, state="failed", reason="worker 3 failed 3 times in a row", jobs=[],
    next="nothing, until elastic-scale 7b",
    detail="Traceback (most recent call last):\nValueError: [no] such file",
)
SILENT = seen(
    workers=ON_RECORD, gpus=2, jobs=[job(0), job(1)], next="nothing, until the scheduler answers",
    reason="the master is not reachable (it committed version 123 at 12:00:00): cannot reach Redis "
           "at 10.0.0.1:41234; the scheduler does not answer: timed out",
)
SYNC = seen(mode="sync", inner_steps=None, version=4700, losses=[],
            workers=[worker(rank, version=4700, step=4700) for rank in range(8)], gpus=8,
            jobs=[job(0, role="trainer")])
NAME_ERROR = "NameError: name 'torch' is not defined"
FAILING = seen(
    **NOT_YET, tokens_per_s=None, gpus=2, preemptions_per_h=0.0, unit="samples",
    workers=[worker(slot, state="loading", version=-1, step=0, tokens_per_s=0.0, attempt=2,
                    trouble=NAME_ERROR) for slot in range(2)],
    trouble=f"slot 0: {NAME_ERROR}", jobs=[job(0), job(1)],
    reason=f"2 GPUs, fewer than the 8 wanted; slots 0, 1: {NAME_ERROR}"
           "; no pass since 6 min: is elastic-reconcile in your crontab?",
    events=[event("restart", 2, slot=0, reason=f"{NAME_ERROR} (the training process ended with "
                                               "code 1)")],
)
DONE = seen(**NOBODY, state="done", reason="finished: nothing is left to train", next="nothing",
            jobs=[])
CHECKS = [
    ("slurm", "OK", "22.05.8, cluster lab", "without it nothing can be submitted", ""),
    ("notice", "FAIL", "28 s (GraceTime=0, KillWait=30); a save takes 65 s (31 s for what counts):"
     " 60.7 GB at 937 MB/s", "what is not saved before the kill is lost",
     "GraceTime=102 for preempt, or a faster filesystem"),
    ("preemption", "WARN", "preempt: CANCEL (preempt/partition_prio)",
     "what becomes of a job whose GPUs are taken", "runs go on, as elastic-reconcile in a crontab"
     " submits their jobs again. For jobs of your own: PreemptMode=REQUEUE for preempt"),
    ("limits", "SKIP", "Slurm keeps no accounts here, and so no limits", "", ""),
    ("run folder", "FAIL", "cannot write to /a/rather/long/path/that/fits/into/no/line: [Errno 13]",
     "it is the durable truth of a run", "set ELASTIC_RUNS to a folder on the shared filesystem"),
    ("gpus", "SKIP", "torch sees no GPU here", "", "on a node: srun --gres=gpu:1 elastic-doctor"),
]
SCREENS_OF = {
    "runs": lambda: views.runs_table([seen(), WAITING, FAILED, DONE | {"run": "x" * 30}]),
    "no-runs": lambda: views.runs_table([]),
    "runs-by-jobs": lambda: views.runs_table([seen(asked=False), DONE | {"asked": False}]),
    "run": lambda: views.run_view(seen()),
    "run-on-24-lines": lambda: views.run_view(seen(), 24),
    "run-128-workers": lambda: views.run_view(seen(workers=CROWD, gpus=127)),
    "run-waiting": lambda: views.run_view(WAITING),
    "run-failed": lambda: views.run_view(FAILED),
    "run-failing": lambda: views.run_view(FAILING),
    "run-done": lambda: views.run_view(DONE),
    "run-nobody-answers": lambda: views.run_view(SILENT),
    "run-sync": lambda: views.run_view(SYNC),
    "audit": lambda: views.audit_view("7b", {
        "commits": 124, "deltas": 1300, "tokens": 1_310_000_000, "unit": "tokens",
        "masters": 2, "files": 9,
        "finished": False, "problems": ["epoch 0: 64 samples are committed twice: 0..64"],
        "gpu_seconds": {"training": 9000.0, "replay": 0.0, "start-up": 400.0, "waiting": 300.0,
                        "notice": 20.0, "lost": 30.0, "open": 50.0, "allocated": 9800.0,
                        "queued": 700.0},
        "epochs": [{"epoch": 0, "committed": 1_000_000, "repeated": 64, "missing": 0,
                    "open": 12_800, "not_reached": 9_000_000}]}),
    "doctor": lambda: views.doctor_view({
        "OK": 1, "WARN": 1, "FAIL": 2, "SKIP": 2, "checks": [
            dict(zip(("check", "verdict", "seen", "why", "fix"), each, strict=True))
            for each in CHECKS]}),
    "chaos": lambda: views.chaos_view({
        "run": "7b", "faults": 3, "seconds": 600.0, "steps_lost": 9, "kept": 0.986,
        "tokens_per_s": 41_000.0,
        "kinds": [{"kind": "kill-worker", "count": 2, "steps_lost": 9, "next_commit_s": [1.6, 4.6],
                   "back_s": [7.0, 9.8], "kept": 0.993},
                  {"kind": "preempt", "count": 1, "steps_lost": 0, "next_commit_s": [2.8, 2.8],
                   "back_s": [None, None], "kept": None}],
        "audit": {"epochs": [], "problems": []}}),
    "plan": lambda: views.plan_view({
        "trace": {"seconds": 41_000.0, "nodes": 177, "most_gpus": 32, "taken": 167, "moments": 79},
        "ways": [dict.fromkeys(("start-up", "waiting", "replay", "lost", "notice"), 100.0)
                 | {"mode": mode, "gpus": gpus, "inner_steps": steps, "goodput": 0.94,
                    "kept": 0.81, "allocated": 10_000.0}
                 for mode, gpus, steps in (("requeue", [18, 18], 0), ("sync", [1, 32], 0),
                                           ("local", [1, 32], 200))],
        "recommended": {"mode": "local", "inner_steps": 200, "max": 32,
                        "reason": "it trains for 94% of the time"}}),
    "validate": lambda: views.validation_view(
        {"runs": "/lustre/project42/runs/7b-validate",
         "verdicts": [
             {"arm": "sync", "loss": 2.31, "spread": 0.004, "gap": None, "bound": None,
              "words": "what the others are compared with"},
             {"arm": "int8", "loss": 2.316, "spread": 0.005, "gap": 0.006, "bound": 0.011,
              "words": "ok: within 0.02"}]},
        {arm: [2.3 + 3 / (1 + i / 6) for i in range(61)] for arm in ("sync", "int8")}),
}


@pytest.fixture(autouse=True)
def _same_clock_everywhere(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS_OF)
def test_a_screen_looks_as_it_did(name: str, width: int):
    file = io.StringIO()
    views.console(file=file, width=width).print(SCREENS_OF[name]())
    text = "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    kept = SCREENS / f"{name}-{width}.txt"
    if os.environ.get("ELASTIC_NEW_SCREENS"):
        kept.write_text(text)
    assert text == kept.read_text()


def test_there_is_no_screen_of_the_past():
    kept = {path.name for path in SCREENS.iterdir()}
    assert kept == {f"{name}-{width}.txt" for name in SCREENS_OF for width in WIDTHS}


@pytest.mark.parametrize("height", [24, 50])
def test_a_watched_run_fits_its_screen_as_well_as_it_can(height: int):
    file = io.StringIO()
    crowded = seen(workers=CROWD, jobs=[job(slot, "PENDING") for slot in range(40)])
    views.console(file=file, width=120).print(views.run_view(crowded, height))
    assert len(file.getvalue().splitlines()) <= height


@pytest.mark.parametrize("hung", [3, 100])
def test_of_those_that_are_not_shown_nobody_is_called_well_who_hangs(hung: int):
    workers = [worker(slot, state="stalled" if slot < hung else "training") for slot in range(128)]
    file = io.StringIO()
    views.console(file=file, width=120).print(views.run_view(seen(workers=workers)))
    assert ("none of them slower or in trouble" in file.getvalue()) == (hung == 3)


@pytest.mark.parametrize(("reason", "words"), [
    ("AssocGrpCPUMinutesLimit", "hours are used up"), ("QOSMaxGRESPerJob", "a job is too large"),
    ("QOSMaxWallDurationPerJobLimit", "slurm.time"), ("QOSGrpGRES", "waits for colleagues"),
    ("QOSMaxGRESPerUser", "lower --max"), ("AccountNotAllowed", "slurm.account"),
    ("DependencyNeverSatisfied", "elastic-reconcile replaces it"), ("Odd", ""),
])
def test_what_a_schedulers_reason_means_for_its_owner(reason: str, words: str):
    assert words in wording.way_out(reason)
    assert words or not wording.way_out(reason)
