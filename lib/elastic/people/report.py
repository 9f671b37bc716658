"""A run as one page, to look at and to send: `elastic-report`.

    incidents   what happened, in the order of time: by events, commits and steps
    gather      reads the run directory once, into `Contents`
    draw_*      each draws a panel with matplotlib, whose one importer this file is
    page        the panels as SVG inside one HTML file: no script, no network, text that
                can be searched
"""

import html
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from elastic.base.errors import ElasticError
from elastic.people import status
from elastic.run import wording
from elastic.run.audit import gpu_seconds
from elastic.run.goodput import job_key, jobs_in, shares
from elastic.run.records import SURPRISES, WANTED, Commit, Outcome
from elastic.run.rundir import RunDir
from elastic.run.told import Score
from elastic.run.wording import EventKind

BLUE, LIGHT, ORANGE, RED, GREY = "#0072b2", "#7fb8d8", "#e69f00", "#d55e00", "#999999"
# How the end of a job is marked, by its outcome.
MARKS = {Outcome.YIELDED: ("v", ORANGE), Outcome.CANCELLED: ("|", GREY)}
# Incidents that all workers felt, beside those of a master.
OF_ALL = (EventKind.CHAOS, EventKind.TAKEN_BACK, EventKind.REDIS_LOST)
# One for each part of a goodput ledger.
COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#e69f00", "#d55e00", "#bbbbbb")
WIDTH, HEIGHT = 9.0, 3.0  # inches of a panel
MOST_POINTS = 2000  # of a curve: more than a screen can show
MOST_JOBS = 5000  # that are drawn
MOST_INCIDENTS = 500  # rows of the table: the newest
HEAD = """<!doctype html>
<html lang='en'><head><meta charset='utf-8'><title>{run}</title><style>{style}</style>
</head><body><h1>{run}</h1>"""
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
svg { max-width: 100% } table { border-collapse: collapse }
td, th { text-align: left; padding: .15rem 1rem .15rem 0 }
td { border-top: 1px solid #ddd; vertical-align: top }
"""
INCIDENTS = (
    EventKind.CHAOS, EventKind.LOST, EventKind.HANG, EventKind.RESTART, EventKind.REJECT,
    EventKind.TAKEN_BACK, EventKind.REDIS_LOST, EventKind.DISK, EventKind.WARNING,
    EventKind.NODES_LOST, EventKind.FAIL,
)


@dataclass(frozen=True)
class Point:
    """A version, or a step of sync mode, with the rate since the one before. A loss that
    is not known is NaN."""

    time: float
    tokens: int
    loss: float
    tokens_per_s: float


def incidents(events: Sequence[Mapping]) -> list[Mapping]:
    """What a reader should know of, oldest first."""
    # A job that a pass asked to leave was not preempted.
    asked = {job_key(event) for event in events if event["kind"] == EventKind.CANCEL}
    return [event for event in events if event["kind"] in INCIDENTS
            or (event["kind"] == EventKind.END and event["outcome"] in SURPRISES)
            or (event["kind"] == EventKind.PREEMPT and job_key(event) not in asked)]


def points(commits: Iterable[Commit], metrics: Iterable[Mapping] = ()) -> list[Point]:
    """Loss and speed along the run, over versions of local mode and steps of sync mode."""
    versions = [(commit.time, commit.tokens, commit.loss) for commit in commits]
    steps = [(line["time"], line["tokens"], line.get("loss")) for line in metrics]
    # By tokens, not by time: machines may disagree about that. Of a step that was trained
    # twice the later line counts.
    rows = {row[1]: row for row in versions + steps}
    return list(_rates([rows[tokens] for tokens in sorted(rows)]))


def _rates(rows: Sequence[tuple]) -> Iterator[Point]:
    for (before, fewer, _), (now, tokens, loss) in pairwise(rows):
        passed_s = now - before if now > before else math.nan
        loss = math.nan if loss is None else loss
        yield Point(now, tokens, loss, (tokens - fewer) / passed_s)


@dataclass(frozen=True)
class Contents:
    """All that a page shows."""

    seen: dict
    began: float
    points: Sequence[Point]
    scores: Sequence[Score]
    jobs: Sequence[Mapping]  # as `jobs_in` tells them
    incidents: Sequence[Mapping]  # events
    gpu_seconds: dict[str, float]


def gather(run: RunDir) -> Contents:
    """Read a run. Raises ElasticError if nothing has happened in it yet."""
    now, commits, events = time.time(), list(run.commits.all()), run.events()
    if not events:
        raise ElasticError(f"nothing is known of run {run.name}", f"{run.path} has no events.jsonl")
    return Contents(
        seen=status.observe(run),
        began=events[0]["time"],
        points=thinned(points(commits, run.lines("metrics.jsonl"))),
        scores=thinned([each for each in run.scores.read() if each.loss is not None]),
        jobs=newest_jobs(events, run.jobs.endings(), now),
        incidents=incidents(events),
        gpu_seconds=gpu_seconds(run),
    )


def newest_jobs(events: Iterable[Mapping], endings: Iterable[Mapping], now: float) -> list[Mapping]:
    """The MOST_JOBS that ended last, by role, slot and start."""
    jobs = sorted(jobs_in(events, endings, now), key=itemgetter("ended"))[-MOST_JOBS:]
    return sorted(jobs, key=itemgetter("role", "slot", "started"))


def thinned(points: Sequence[Any]) -> Sequence[Any]:
    """At most MOST_POINTS of them, evenly, and the last one."""
    step = -(-len(points) // MOST_POINTS) or 1
    return [*points[:-1:step], *points[-1:]]


# ---- panels


def draw_loss(axes: Any, contents: Contents) -> None:
    """A line for training, a dot for each validation on the way."""
    for points, colour, mark in ((contents.points, BLUE, "-"), (contents.scores, ORANGE, "o")):
        axes.plot([p.tokens for p in points], [p.loss for p in points], mark, color=colour)
    axes.set(ylabel="loss (dots: validation)" if contents.scores else "training loss")
    axes.set(xlabel=f"committed {contents.seen['unit']}")
    axes.xaxis.set_major_formatter(lambda value, _place: wording.si(value))


def draw_throughput(axes: Any, contents: Contents) -> None:
    _along_time(axes, contents)
    rates = [p.tokens_per_s for p in contents.points]
    axes.step([_at(p.time) for p in contents.points], rates, where="pre", color=BLUE)
    axes.set(ylabel=f"{contents.seen['unit']}/s", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _place: wording.si(value))


def draw_jobs(axes: Any, contents: Contents) -> None:
    """A Gantt chart: a row per place, a bar per job, a line per fault."""
    _along_time(axes, contents)
    places = list(dict.fromkeys(map(wording.who, contents.jobs)))
    axes.figure.set_figheight(1.2 + 0.18 * min(60, len(places)))
    for job in contents.jobs:
        row, start, end = places.index(wording.who(job)), _at(job["started"]), _at(job["ended"])
        axes.barh(row, end - start, left=start, height=0.6, color=LIGHT)
        if job["outcome"] and job["outcome"] not in WANTED:
            marker, colour = MARKS.get(job["outcome"], ("X", RED))
            axes.plot(end, row, marker=marker, color=colour, markersize=6, clip_on=False)
    for event in contents.incidents:
        if event.get("role") == "master" or event["kind"] in OF_ALL:
            axes.axvline(_at(event["time"]), color=RED, linewidth=0.7, linestyle=":")
    shown = range(0, len(places), 1 + len(places) // 40)
    axes.set_yticks(shown, [places[at] for at in shown])
    axes.invert_yaxis()


def draw_goodput(axes: Any, contents: Contents) -> None:
    """One bar of all GPU-seconds, cut by what they went into."""
    axes.figure.set_figheight(1.8)
    left = 0.0
    for colour, (part, share) in zip(COLOURS, shares(contents.gpu_seconds).items(), strict=True):
        axes.barh(0, 100 * share, left=left, color=colour, label=f"{part} {share:.1%}")
        left += 100 * share
    axes.set(xlim=(0, 100), ylim=(-0.6, 2.0), yticks=())
    axes.set(xlabel=f"% of {wording.si(contents.gpu_seconds['allocated'])} GPU-seconds")
    axes.legend(ncols=4, loc="upper center", frameon=False)


def _along_time(axes: Any, contents: Contents) -> None:
    from dateutil.tz import tzlocal  # comes with matplotlib

    axes.xaxis_date(tzlocal())
    times = [job["ended"] for job in contents.jobs] + [point.time for point in contents.points[-1:]]
    last = max(times, default=contents.began + 1)
    axes.set(xlim=(_at(contents.began), _at(last)), xlabel="time")


def _at(time_: float) -> float:
    """Where a time is on the axes: days since 1970. (Not local time, in which the ticks
    are: an hour of that may come twice.)"""
    return time_ / 86400


PANELS: dict[str, Callable[[Any, Contents], None]] = {
    "Loss": draw_loss,
    "Throughput": draw_throughput,
    "Jobs (triangle: preempted with notice; cross: without; bar: as asked; dotted: a fault)":
        draw_jobs,
    "What the time of the GPUs went into, from the first job on": draw_goodput,
}


# ---- the page


def page(contents: Contents) -> str:
    """The whole HTML file."""
    seen = contents.seen
    words = (seen["summary"], seen["reason"], f"Looked at {_clock(time.time())}; {seen['path']}")
    parts = [HEAD.format(run=html.escape(seen["run"]), style=STYLE)]
    parts += [f"<p>{html.escape(each)}</p>" for each in words]
    for title, draw in PANELS.items():
        if contents.gpu_seconds or draw != draw_goodput:  # a program counts its steps itself
            parts += [f"<h2>{html.escape(title)}</h2>", _svg(title, contents)]
    parts += [f"<h2>Incidents ({len(contents.incidents)})</h2>", _table(contents)]
    return "\n".join([*parts, "</body></html>", ""])


def _svg(title: str, contents: Contents) -> str:
    axes = _figure(title).subplots()
    PANELS[title](axes, contents)
    if not axes.dataLim.width > 0:
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color="gray")
    file = io.StringIO()
    axes.figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]


def _figure(title: str) -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "make venv (a venv of make demo is without), or pip install matplotlib"
        raise ElasticError(f"elastic-report draws with matplotlib: {error}", hint) from None
    matplotlib.rcParams.update({
        "svg.hashsalt": title,  # names inside one page must differ
        "svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False,
        "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
        "date.converter": "concise",
    })
    return Figure(figsize=(WIDTH, HEIGHT), layout="constrained")


def _table(contents: Contents) -> str:
    rows = []
    for event in contents.incidents[-MOST_INCIDENTS:]:
        kind = event.get("fault") or event.get("outcome") or event["kind"]
        rows.append(f"<tr><td>{_clock(event['time'])}<td>{html.escape(kind)}"
                    f"<td>{html.escape(wording.event_words(event))}")
    if not rows:
        return "<p>None.</p>"
    return "\n".join(["<table><tr><th>when<th>kind<th>what", *rows, "</table>"])


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
