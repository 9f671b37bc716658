"""A run as one page, to look at and to send: `elastic-report`.

    timeline    what happened, as plain records
    draw_*      each a panel of matplotlib, the one importer of it
    page        the panels as SVG inside one HTML file: no script, no network, text that can be
                found; what a bar of the chart of jobs stands for is its tooltip

Everything comes from the run directory. What is read once is held in `Facts`.
"""

import functools
import html
import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.base.errors import ElasticError
from elastic.people import status, timeline
from elastic.people.timeline import Incident, Point, Stay
from elastic.run import wording
from elastic.run.audit import gpu_seconds, read_metrics
from elastic.run.goodput import PARTS
from elastic.run.rundir import RunDir

BLUE, LIGHT, ORANGE, RED, GREY = "#0072b2", "#7fb8d8", "#e69f00", "#d55e00", "#999999"
ENDS = {"yielded": ("v", ORANGE), "cancelled": ("|", GREY)}  # marks; none where all is well
FINE, DEATH = ("", "done", "stopped"), ("X", RED)
UNITS = ((300, 1, "seconds"), (3 * 3600, 60, "minutes"), (5 * 86400, 3600, "hours"))
PART_COLOURS = dict(zip(PARTS, ("#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#e69f00", "#d55e00",
                                "#bbbbbb"), strict=True))  # fmt: skip
WIDTH = 9.0  # inches of a picture
MOST_POINTS = 2000  # of a curve: more than a screen can show
MOST_STAYS = 5000  # jobs drawn
MOST_INCIDENTS = 500  # in the table: the newest
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } svg { max-width: 100% }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1rem .15rem 0 }
td { border-top: 1px solid #ddd; vertical-align: top } .number { text-align: right }
"""


@dataclass(frozen=True)
class Facts:
    """All that a page shows."""

    seen: dict
    began: float
    points: Sequence[Point]
    stays: Sequence[Stay]
    incidents: Sequence[Incident]
    gpu_seconds: dict[str, float]

    @functools.cached_property
    def last(self) -> float:
        times = [stay.end for stay in self.stays] + [point.time for point in self.points[-1:]]
        return max(times, default=self.began + 1)

    @functools.cached_property
    def unit(self) -> tuple[float, str]:
        """Seconds, and the name, of what the time axes count."""
        length_s = self.last - self.began
        units = ((unit_s, name) for most_s, unit_s, name in UNITS if length_s < most_s)
        return next(units, (86400, "days"))

    def at(self, time_: float) -> float:
        """Where a time is on the axes."""
        return (time_ - self.began) / self.unit[0]


def gather(run: RunDir) -> Facts:
    """Read a run. Raises ElasticError if nothing has happened in it yet."""
    now, commits, events = time.time(), list(run.commits()), run.events()
    if not events:
        raise ElasticError(f"nothing is known of run {run.name}", f"{run.path} has no events.jsonl")
    return Facts(
        seen=status.observe(run),
        began=events[0]["time"],
        points=thinned(timeline.points(commits, read_metrics(run))),
        stays=newest(timeline.stays(events, run.endings(), now)),
        incidents=timeline.incidents(events),
        gpu_seconds=gpu_seconds(run),
    )


def newest(stays: Sequence[Stay]) -> list[Stay]:
    """As many as are drawn, in their order."""
    ended = sorted(stay.end for stay in stays)[-MOST_STAYS:]
    return [stay for stay in stays if stay.end >= ended[0]]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """As many as are drawn: every nth, and the last one."""
    step = -(-len(points) // MOST_POINTS) or 1
    return [*points[:-1:step], *points[-1:]]


# ---- panels


def draw_loss_by_tokens(axes: Any, facts: Facts) -> None:
    axes.plot([p.tokens for p in facts.points], [p.loss for p in facts.points], color=BLUE)
    axes.set(xlabel=f"committed {facts.seen['unit']}", ylabel="training loss")
    axes.xaxis.set_major_formatter(lambda value, _at: wording.si(value))


def draw_loss_by_time(axes: Any, facts: Facts) -> None:
    axes.plot([facts.at(p.time) for p in facts.points], [p.loss for p in facts.points], color=BLUE)
    axes.set(ylabel="training loss")
    _along_time(axes, facts)


def draw_throughput(axes: Any, facts: Facts) -> None:
    axes.step([facts.at(p.time) for p in facts.points], [p.tokens_per_s for p in facts.points],
              where="pre", color=BLUE)  # fmt: skip
    axes.set(ylabel=f"{facts.seen['unit']}/s", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _at: wording.si(value))
    steps = timeline.workers_over_time(facts.stays)
    other = axes.twinx()
    other.step([facts.at(at) for at, _ in steps], [count for _, count in steps],
               where="post", color=ORANGE)  # fmt: skip
    other.set(ylabel="jobs that train", ylim=(0, None))
    other.yaxis.label.set_color(ORANGE)
    _along_time(axes, facts)


def draw_jobs(axes: Any, facts: Facts) -> None:
    """A Gantt chart: a row per place, a bar per job, a line per fault."""
    places = list(dict.fromkeys(stay.place for stay in facts.stays))
    for number, stay in enumerate(facts.stays):
        row, start, end = places.index(stay.place), facts.at(stay.start), facts.at(stay.end)
        axes.barh(row, end - start, left=start, height=0.6, gid=f"job-{number}", color=LIGHT)
        if stay.outcome not in FINE:
            marker, colour = ENDS.get(stay.outcome, DEATH)
            axes.plot(end, row, marker=marker, color=colour, markersize=6, clip_on=False)
    for incident in facts.incidents:
        if incident.kind in ("master", "redis-lost", "taken-back") or "fault" in incident.words:
            axes.axvline(facts.at(incident.time), color=RED, linewidth=0.7, linestyle=":")
    shown = range(0, len(places), 1 + len(places) // 40)
    axes.set_yticks(shown, [places[at] for at in shown])
    axes.invert_yaxis()
    _along_time(axes, facts)


def draw_goodput(axes: Any, facts: Facts) -> None:
    """One bar of all GPU-seconds, cut by what they went into."""
    whole, left = facts.gpu_seconds["allocated"] or 1.0, 0.0
    for part in PARTS:
        share = 100 * facts.gpu_seconds[part] / whole
        axes.barh(0, share, left=left, color=PART_COLOURS[part], label=f"{part} {share:.1f} %")
        left += share
    axes.set(xlim=(0, 100), ylim=(-0.6, 2.0), yticks=())
    axes.set(xlabel=f"% of {wording.si(whole)} GPU-seconds")
    axes.legend(ncols=4, loc="upper center", frameon=False)


def _along_time(axes: Any, facts: Facts) -> None:
    axes.set(xlim=(0, facts.at(facts.last)), xlabel=f"{facts.unit[1]} since {_clock(facts.began)}")


@dataclass(frozen=True)
class Panel:
    title: str
    content: Callable[[Any, Facts], None]
    height: Callable[[Facts], float]  # in inches

    def draw(self, axes: Any, facts: Facts) -> None:
        self.content(axes, facts)
        if not axes.dataLim.width > 0:
            axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color="gray")


PANELS = (
    Panel("Loss against tokens", draw_loss_by_tokens, lambda _: 3.0),
    Panel("Loss against time", draw_loss_by_time, lambda _: 3.0),
    Panel("Throughput", draw_throughput, lambda _: 2.6),
    Panel("Jobs (triangle: preempted with notice; cross: died without; bar: as asked;"
          " dotted: a fault)",
          draw_jobs, lambda f: 1.2 + 0.18 * min(60, len({s.place for s in f.stays}))),
    Panel("What the time of the GPUs went into, from the first job on",
          draw_goodput, lambda _: 1.8),
)  # fmt: skip


# ---- the page


def page(facts: Facts) -> str:
    """The whole HTML file."""
    seen = facts.seen
    titles = {f"job-{number}": stay.words for number, stay in enumerate(facts.stays)}
    said = (seen["summary"], seen["reason"], f"Looked at {_clock(time.time())}; {seen['path']}")
    parts = [f"<h1>{_safe(seen['run'])}</h1>", *(f"<p>{_safe(words)}</p>" for words in said)]
    for panel in PANELS:
        parts += [f"<h2>{_safe(panel.title)}</h2>", with_titles(_svg(panel, facts), titles)]
    parts += [f"<h2>Incidents ({len(facts.incidents)})</h2>", _table(facts)]
    head = f"<meta charset='utf-8'><title>{_safe(seen['run'])}</title><style>{STYLE}</style>"
    return "\n".join(["<!doctype html>", f"<html lang='en'><head>{head}</head><body>", *parts,
                      "</body></html>", ""])  # fmt: skip


def _svg(panel: Panel, facts: Facts) -> str:
    pyplot = _pyplot()
    pyplot.rcParams["svg.hashsalt"] = panel.title  # names inside one page must differ
    figure, axes = pyplot.subplots(figsize=(WIDTH, panel.height(facts)), layout="constrained")
    panel.draw(axes, facts)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return file.getvalue()[file.getvalue().index("<svg") :]


def with_titles(svg: str, titles: dict[str, str]) -> str:
    """Tooltips for the groups of these names."""

    def titled(match: re.Match) -> str:
        words = titles.get(match[1])
        return f"{match[0]}<title>{_safe(words)}</title>" if words else match[0]

    return re.sub(r'<g id="([\w-]+)">', titled, svg)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        hint = "make venv (a venv of make demo is without), or pip install matplotlib"
        raise ElasticError(f"elastic-report draws with matplotlib: {error}", hint) from None
    matplotlib.use("agg")  # no display
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif",
                            "axes.spines.top": False, "axes.grid": True, "grid.alpha": 0.3,
                            "axes.axisbelow": True})  # fmt: skip
    return pyplot


def _table(facts: Facts) -> str:
    rows = []
    for incident in facts.incidents[-MOST_INCIDENTS:]:
        back = "" if incident.back_s is None else wording.span(incident.back_s)
        rows.append(f"<tr><td>{_clock(incident.time)}<td>{_safe(incident.kind)}"
                    f"<td>{_safe(incident.words)}<td class='number'>{back}")  # fmt: skip
    if not rows:
        return "<p>None.</p>"
    return "\n".join(["<table><tr><th>when<th>kind<th>what<th>back after", *rows, "</table>"])


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _safe(text: object) -> str:
    return html.escape(str(text))
