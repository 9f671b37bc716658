"""What people look at, on a run to which things happened: the page in a browser, the
live screen in a terminal of 80 columns, the numbers for other tools.

pytest tests/people/test_report.py
"""

import contextlib
import getpass
import html
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from elastic.base import durable
from elastic.base.errors import ElasticError, UsageError
from elastic.lab.chaos import Chaos
from elastic.people import metrics, report
from elastic.run.rundir import RunDir
from helpers import ROOT, commit_of, elastic_here, environment
from running import Running, running

FAULTS = ("kill-worker", "preempt", "kill-master")
SETTINGS = {"elastic.min": 1, "elastic.max": 2, "local_sgd.inner_steps": 20}
CONSOLE = "CONSOLE"  # what Chromium logs of a page begins with


class Screen:
    """A terminal of its own: what somebody at a slow line sees."""

    def __init__(self, home: Path, command: str, columns: int, lines: int):
        self._tmux = ["tmux", "-S", str(home / "tmux"), "-f", os.devnull]
        size = ["-x", str(columns), "-y", str(lines)]
        subprocess.run([*self._tmux, "new-session", "-d", *size, command], check=True)

    def text(self) -> str:
        shown = [*self._tmux, "capture-pane", "-p"]
        return subprocess.run(shown, capture_output=True, text=True).stdout

    def press(self, key: str) -> None:
        subprocess.run([*self._tmux, "send-keys", key], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)


@contextlib.contextmanager
def watching(run: Running) -> Iterator[tuple[Screen, list[str]]]:
    """`elastic-status --watch`, and everything that was on its screen."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed: apt-get install tmux")
    command = f"{ROOT}/bin/elastic-status tiny --watch; echo it has left; sleep 600"
    screen, seen, is_over = Screen(run.home, command, 80, 60), [], threading.Event()

    def look() -> None:
        while not is_over.wait(0.3):
            seen.append(screen.text())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield screen, seen
    finally:
        is_over.set()
        looking.join()
        screen.close()


def call(*words: object, home: Path) -> Result:
    """A command in this process."""
    return elastic_here(*words, env=environment(home))


def rounds_on(seen: list[str]) -> set[int]:
    return {int(found) for found in re.findall(r"round (\d+), loss", "\n".join(seen))}


@pytest.fixture(scope="module")
def lived(tmp_path_factory) -> Iterator[tuple[Running, list[str]]]:
    """A run to which faults happened while somebody watched; and the screens of that."""
    with running(tmp_path_factory.mktemp("run"), SETTINGS, samples=10**6, step_s=0.15) as run:
        run.workers(2)
        with watching(run) as (screen, seen):
            chaos = Chaos(run.run, seed=3)
            for kind in FAULTS:
                chaos.inject(kind)
                run.versions(1, 90)
                run.workers(2)
            newest = run.version
            run.until(lambda: max(rounds_on(seen), default=-1) >= newest, 60, "it on the screen")
            screen.press("C-c")
            run.until(lambda: "it has left" in seen[-1], 20, "the end of the watching")
        yield run, seen


# ---- the live screen


def test_a_watched_run_shows_what_happens_to_it(lived):
    _, seen = lived
    everything = "\n".join(seen)
    assert re.search(r"training on [12] of 1\.\.2 GPUs, round \d+", everything)
    for words in ("samples/s", "steps ", " workers, loss ", "training"):
        assert words in everything, seen[-1]
    newest: dict[str, int] = {}
    for slot, attempt in re.findall(r"^ +(\d+) +(\d+) +\d+ ", everything, re.M):
        newest[slot] = max(newest.get(slot, 0), int(attempt))
    assert sum(newest.values()) >= len(newest) + 2, "of a worker killed, and of one preempted"
    assert len(rounds_on(seen)) > 1, "it was redrawn"


def test_a_watched_run_never_breaks_its_screen(lived):
    _, seen = lived
    for screen in seen:
        assert "Traceback" not in screen
        assert max(map(len, screen.splitlines()), default=0) <= 80
        assert screen.count("progress ") <= 2, screen  # not one below the other


# ---- the page


def browse(page: Path, *options: str) -> subprocess.CompletedProcess:
    """Open a page in a headless Chromium that has no network."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        pytest.skip("chromium is not installed: apt-get install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               f"--user-data-dir={page.parent / 'browser'}", "--proxy-server=127.0.0.1:9",
               "--virtual-time-budget=5000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def page(lived, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    done = call("report", "tiny", "-o", path, home=lived[0].home)
    assert (done.exit_code, done.stdout.strip()) == (0, str(path)), done.stderr
    return path


def test_the_page_needs_nothing_else(page: Path):
    text = page.read_text()
    assert not re.findall(r"<script|<link|<iframe|<img|@import|url\((?!#)", text)
    fetched = [each for each in re.findall(r'(?:href|src)="([^"]*)"', text) if each[0] != "#"]
    assert not fetched


def test_a_browser_opens_the_page_without_a_word_and_shows_what_happened(page: Path, lived):
    run, _ = lived
    done = browse(page, "--dump-dom")
    assert done.returncode == 0, done.stderr
    assert CONSOLE not in done.stderr
    shown = html.unescape(re.sub(r"<[^>]*>", "", done.stdout))
    for event in run.events("chaos"):
        assert f"fault {event['fault']}: {event['what']}" in shown
    for words in ("committed samples", "samples/s", "slot 0", "slot 1", "master", "training ",
                  "start-up", "had to leave", "Incidents"):
        assert words in shown, words


def test_a_word_of_the_browser_would_have_been_heard(tmp_path: Path):
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('x')</script><img src='http://127.0.0.1:9/x.png'>")
    assert CONSOLE in browse(page, "--dump-dom").stderr


def test_the_page_is_drawn(page: Path):
    shot = page.with_suffix(".shot.png")
    browse(page, f"--screenshot={shot}", "--window-size=1100,2400")
    image = pixels(shot)
    assert image.shape[1] == 1100
    assert len({tuple(color) for color in image[::7, ::7].reshape(-1, image.shape[2])}) > 20


def pixels(path: Path):
    from matplotlib import image

    return (image.imread(path) * 255).astype("uint8")


def job_of(**told) -> dict:
    """The event of its end."""
    return {"kind": "end", "time": 0.0, "job_id": "1", "role": "worker", "slot": 0, "started": 1.0,
            "ended": 2.0, "outcome": "done", **told}


def test_nothing_in_a_run_can_become_part_of_the_page(lived):
    facts = report.gather(lived[0].run)
    evil = "<script>alert(1)</script>"
    event = {"kind": "warning", "time": facts.began, "reason": evil}
    seen = facts.seen | {"run": evil, "summary": evil, "reason": evil, "path": evil}
    jobs = [job_of(role=evil, started=facts.began, ended=facts.began + 9, outcome=evil)]
    incidents = report.incidents([event])
    found = report.Contents(seen, facts.began, facts.points, facts.scores, jobs, incidents,
                         facts.gpu_seconds)
    text = report.page(found)
    assert "<script" not in text
    assert text.count(html.escape(evil)) >= 5


def test_what_all_workers_felt_is_a_line_through_all_jobs(lived):
    from matplotlib.figure import Figure

    told = ({"kind": "end", "role": "master"}, {"kind": "chaos"}, {"kind": "redis-lost"},
            {"kind": "end", "role": "worker"}, {"kind": "warning"})
    facts, axes = report.gather(lived[0].run), Figure().subplots()
    incidents = [{"time": facts.began, **event} for event in told]
    report.draw_jobs(axes, replace(facts, jobs=[], incidents=incidents))
    assert len(axes.get_lines()) == 3


def test_a_run_that_has_only_begun_is_drawn(lived):
    facts = report.gather(lived[0].run)
    none = dict.fromkeys(facts.gpu_seconds, 0.0)
    empty = report.Contents(facts.seen, facts.began, [], [], [], [], none)
    drawn = report.page(empty)
    assert "None." in drawn
    assert drawn.count(">nothing yet<") == len(report.PANELS)
    assert "nothing yet" not in report.page(facts)


def test_of_a_program_that_counts_its_own_steps_no_goodput_is_told(make_run):
    run = make_run("run.command=['train']", "run.mode=sync", "train.max_tokens=9")
    run.set_control(mode="sync")
    who = {"role": "trainer", "slot": 0, "job_id": "1", "attempt": 1}
    run.event("start", **who)
    run.jobs.write_ending("1", {"state": "training", "started": 1.0, "gpus": 4, "node": "n", **who})
    drawn = report.page(report.gather(run))
    assert "GPU-seconds" not in drawn
    assert "Throughput" in drawn


def test_of_too_many_jobs_the_newest_are_drawn(monkeypatch):
    monkeypatch.setattr(report, "MOST_JOBS", 2)
    ends = [job_of(slot=slot, ended=ended) for slot, ended in enumerate((9.0, 3.0, 8.0))]
    assert [job["ended"] for job in report.newest_jobs(ends, [], 99.0)] == [9.0, 8.0]
    assert report.newest_jobs([], [], 99.0) == []


def test_a_job_of_the_hour_that_comes_twice_is_drawn_forwards(lived, monkeypatch):
    """In Berlin: it is 2:50 when it begins, and 2:10 twenty minutes later."""
    from matplotlib.figure import Figure

    began = datetime(2026, 10, 25, 0, 50, tzinfo=UTC).timestamp()
    job = job_of(started=began, ended=began + 1200)
    facts = replace(report.gather(lived[0].run), began=began, points=[], scores=[], jobs=[job],
                    incidents=[])
    with monkeypatch.context() as berlin:
        berlin.setenv("TZ", "Europe/Berlin")
        time.tzset()
        axes = Figure().subplots()
        report.draw_jobs(axes, facts)
        drawn = report.page(facts)
    time.tzset()
    (bar,) = axes.patches
    assert bar.get_width() * 86400 == pytest.approx(1200)
    assert {label[:2] for label in re.findall(r">(\d\d:\d\d)<", drawn)} == {"02"}  # its clock


def test_long_curves_are_thinned_and_keep_their_end():
    points = [report.Point(i, i, 1.0, 1.0) for i in range(10_001)]
    few = report.thinned(points)
    assert len(few) <= report.MOST_POINTS + 1
    assert (few[0], few[-1]) == (points[0], points[-1])


# ---- numbers for other tools


def test_json_lines_go_on_where_they_end(lived, tmp_path: Path):
    run, path = lived[0].run, tmp_path / "run.jsonl"
    newest = run.commits.newest_version()
    first = [row for row in metrics.rows(run, 0) if row["version"] <= newest - 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in first) + '{"version": 9')
    done = call("metrics", "tiny", "--jsonl", path, home=lived[0].home)
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["version"] for row in rows][:newest] == list(range(1, newest + 1))
    third = run.commits.of(3)
    assert rows[2] == {**rows[2], "loss": third.loss, "tokens": third.tokens}


def test_prometheus_reads_all_runs(lived, tmp_path: Path):
    path = tmp_path / "elastic.prom"
    done = call("metrics", "--prometheus", path, home=lived[0].home)
    assert done.exit_code == 0, done.stderr
    sample = re.compile(r'elastic_[a-z_]+\{run="tiny",user="\w+"(,state="\w+")?\} -?[0-9.e+-]+')
    lines = path.read_text().splitlines()
    assert all(line[0] == "#" or sample.fullmatch(line) for line in lines)
    user = f'run="tiny",user="{getpass.getuser()}"'  # of two users' runs each is its own series
    assert f'elastic_state{{{user},state="running"}} 1' in lines
    assert any(line.startswith("elastic_tokens_per_second") for line in lines)


def test_a_run_of_tensorboard_goes_on(lived, tmp_path: Path, monkeypatch):
    """What was written before a crash, and never marked, is there once all the same."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = lived[0].run
    with monkeypatch.context() as crash:
        crash.setattr(metrics, "write_atomic", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            metrics.TensorBoard(tmp_path, run).add(list(metrics.rows(run, 0))[:3])
    for _ in range(2):
        metrics.tell(run, [metrics.TensorBoard(tmp_path, run)])
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    points = read.Scalars("loss")
    commits = [run.commits.of(version + 1) for version in range(len(points))]
    assert [point.step for point in points] == [commit.tokens for commit in commits]
    assert points[2].value == pytest.approx(run.commits.of(3).loss)


def test_steps_of_sync_mode_and_versions_follow_each_other_by_tokens(tmp_path: Path):
    commits = [commit_of(n, tokens=tokens, loss=2.0) for n, tokens in enumerate((0, 100, 300))]
    steps = [{"step": n, "tokens": 10 * n + 100, "time": 2.0, "loss": 3.0, "world": 4}
             for n in (1, 2, 1, 2, 3)]
    commits = SimpleNamespace(newest_version=lambda: 2, of=commits.__getitem__)

    run = SimpleNamespace(commits=commits, scores=SimpleNamespace(read=list),
                          lines=lambda _name: steps)
    rows = metrics.rows(run, 0)
    found = [(row.get("version"), row.get("step"), row["tokens"]) for row in rows]
    assert found == [(1, None, 100), (None, 1, 110), (None, 2, 120), (None, 3, 130), (2, None, 300)]


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff", b"hello", b"[1, 2]\n", b"{}\n",
                                     b'{"lr": 0.1}'])
def test_a_file_of_something_else_is_left_alone(run, tmp_path: Path, content: bytes):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="something else"):
        metrics.JsonLines(path, run)
    assert path.read_bytes() == content


# ---- told as it comes


def told_rows(run: RunDir, sink: Any) -> list[dict]:
    metrics.tell(run, [sink])
    return [json.loads(line, parse_constant=pytest.fail)
            for line in sink.path.read_text().splitlines()]


def commit(run: RunDir, version: int, **told) -> None:
    run.commits.link(commit_of(version, **{"time": time.time(), "tokens": 100 * version,
                                           "loss": 2.0, **told}))


def test_a_score_is_told_once_however_often_a_version_is(run, tmp_path: Path):
    sink = metrics.JsonLines(tmp_path / "rows.jsonl", run)
    commit(run, 1)
    run.scores.add(100, {"loss": 3.0})
    for version in (2, 3, 4):
        commit(run, version)
        told = told_rows(run, sink)
    assert [row.get("score/tokens") for row in told] == [None, 100, None, None]


def test_the_last_score_of_a_run_that_is_done_is_told_once(run, tmp_path: Path):
    """By it runs are compared, and no step came after it."""
    sink = metrics.JsonLines(tmp_path / "rows.jsonl", run)
    for number in (1, 2):
        step(run, number)
    run.scores.add(20, {"loss": 3.0})
    assert [row.get("score/tokens") for row in told_rows(run, sink)] == [None, None]
    run.mark_done({"reason": "nothing is left to train"})
    for _ in range(2):
        told = told_rows(run, sink)
        assert [row.get("score/tokens") for row in told] == [None, None, 20]
        assert told[2] == {**told[1], "score/tokens": 20, "score/loss": 3.0}
        sink = metrics.JsonLines(tmp_path / "rows.jsonl", run)


def test_a_number_that_json_has_none_for_is_null_in_its_lines(run, tmp_path: Path):
    commit(run, 1, loss=math.nan)
    (row,) = told_rows(run, metrics.JsonLines(tmp_path / "rows.jsonl", run))
    assert row == {**row, "loss": None, "tokens": 100}


def step(run: RunDir, number: int, **told) -> None:
    line = {"step": number, "time": float(number), "seconds": 1.0, "tokens": 10 * number,
            "attempt": 1, "world": 1, "loss": 3.0}
    durable.append_line(run.path / "metrics.jsonl", line | told)


def test_a_step_is_told_once_its_line_is_whole(run, tmp_path: Path):
    sinks = [metrics.JsonLines(tmp_path / name, run) for name in ("a", "b")]

    def told() -> list[int]:
        metrics.tell(run, sinks)
        (told,) = {sink.path.read_text() for sink in sinks}
        return [json.loads(line)["step"] for line in told.splitlines()]

    assert told() == []
    for number in (1, 2, 3):
        step(run, number)
    assert told() == [1, 2, 3]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "time": 4.0, "seconds": 1.0, "tokens": 40, "attempt": 1,')
    assert told() == [1, 2, 3]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'"world": 1, "loss": 3.0}\n')
    assert told() == told() == [1, 2, 3, 4]


def test_a_score_between_steps_that_are_done_again_is_told(run, tmp_path: Path):
    sink = metrics.JsonLines(tmp_path / "rows.jsonl", run)
    for number, at in ((1, 1.0), (2, 2.0), (2, 3e9)):
        step(run, number, time=at)
    run.scores.add(20, {"loss": 3.0})
    assert [row.get("score/tokens") for row in told_rows(run, sink)] == [None, None]
    step(run, 3, time=3e9 + 1)
    assert [row.get("score/tokens") for row in told_rows(run, sink)] == [None, None, 20]


def test_rows_for_which_there_was_no_room_come_whole_when_there_is(run, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    sink, limits = metrics.JsonLines(path, run), resource.getrlimit(resource.RLIMIT_FSIZE)
    for version in (1, 2, 3):
        commit(run, version)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))):
            metrics.tell(run, [sink])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [row["version"] for row in told_rows(run, sink)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_of_tensorboard_that_had_no_room_goes_on_where_there_is(run, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for version in (1, 2, 3):
        commit(run, version)
    sink, limits = metrics.TensorBoard(tmp_path, run), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            metrics.tell(run, [sink])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    metrics.tell(run, [sink])
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert len(read.Scalars("loss")) == 3


@pytest.mark.parametrize(("words", "place"), [
    (["metrics", "--prometheus", "/dev/full"], "/dev/full"), (["status"], "standard output"),
    (["config", ROOT / "etc/demo.toml", "--json"], "standard output")])
def test_a_full_disk_is_told_of_by_name(tmp_path: Path, words: list, place: str):
    with open("/dev/full", "w") as full:
        done = subprocess.run([ROOT / "bin/elastic", *words], env=environment(tmp_path), text=True,
                              stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: No space left on device: {place}\n")


class FakeWandb:
    """Stands in for wandb, which wants an account: it keeps what it is given, as a run there."""

    def __init__(self):
        self.summary, self.steps = {}, []

    def init(self, project: str, id: str, name: str, resume: str):
        assert resume == "allow"
        assert re.fullmatch(rf"{name}-[0-9a-f]{{16}}", id)
        return self

    def log(self, values: dict, step: int) -> None:
        self.steps.append(step)
        self.summary.update(values)


def test_a_run_of_wandb_goes_on(lived, monkeypatch):
    lived[0].until(lambda: lived[0].version > 4, 60, "some versions")
    run, fake = lived[0].run, FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        metrics.tell(run, [metrics.WandB("project", run)])
    assert fake.steps == sorted(set(fake.steps))
    assert len(fake.steps) > 3


def test_data_of_another_run_of_the_same_name_is_left_alone(make_run, tmp_path: Path, monkeypatch):
    """Their tokens say nothing of each other: some would be missing, and some be mixed."""
    ids = []
    fake = SimpleNamespace(init=lambda id, **_: ids.append(id) or SimpleNamespace(summary={}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    places = {"jsonl": tmp_path / "x.jsonl", "tensorboard": tmp_path / "tb", "wandb": None}
    for number in range(2):
        run = make_run()
        for _ in range(2):
            metrics.sinks(run, None, None, "project")
        if number == 0:
            commit(run, 1)
            metrics.tell(run, metrics.sinks(run, **places))
            assert [sink.told[0] for sink in metrics.sinks(run, **places)] == [100, 100]
            shutil.rmtree(run.path)
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert ids[0] != ids[2]
    kept = places["jsonl"].read_bytes()
    for name in ("jsonl", "tensorboard"):
        with pytest.raises(UsageError, match="is of another run: run-a:"):
            metrics.sinks(run, **{**dict.fromkeys(places), name: places[name]})
    assert places["jsonl"].read_bytes() == kept


def test_a_package_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Exception, match="Weights & Biases") as caught:
        metrics.WandB("project", run)
    assert caught.value.hint == "pip install wandb"


def test_without_matplotlib_the_way_to_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ElasticError, match="draws with matplotlib") as caught:
        report._figure("x")
    assert caught.value.hint.startswith("make venv")


def test_nowhere_to_write_to_is_wrong_usage(tmp_path: Path):
    assert call("metrics", home=tmp_path).exit_code == 2
    assert "which RUN?" in call("metrics", "--jsonl", tmp_path / "x", home=tmp_path).stderr
