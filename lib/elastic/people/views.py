"""What people see: the one importer of rich. Takes the plain dictionaries of status and
audit.

Text fits 80 columns; colour and width come from the terminal, and where there is none (a
pipe, a cron mail) the same words come plain. Nothing here reads a file, asks Redis or
decides anything.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from typing import Any

from rich.console import Console, Group, RenderableType, group
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from elastic.people.diagnosis import VERDICTS
from elastic.run import wording
from elastic.run.goodput import PARTS, shares
from elastic.run.wording import brief, si

STATE_STYLES = {
    "running": "green", "training": "green", "done": "green", "ok": "green",
    "waiting": "yellow", "stalled": "yellow", "stopped": "yellow", "loading": "cyan",
    "failed": "red", "damaged": "red", "WRONG": "red", "blocked": "red",
    "OK": "green", "WARN": "yellow", "FAIL": "red", "SKIP": "dim",
}
LOSS, BEAT = "{:.3f}", "{:.0f}s"
BARS = "▁▂▃▄▅▆▇█"
SPARKS, BAR = 40, 16  # columns of a sparkline, and of a bar of progress
MOST_ROWS, MOST_EVENTS = 24, 8  # of workers, and of events, where one can scroll
HEAD_LINES = 14  # of a run, without its tables
ROOMY_LINES = 32  # a screen of so many lines shows the path of the run, too


def console(**settings: Any) -> Console:
    """A console on standard output. A string is words: nothing in it is markup, emoji or
    colour."""
    return Console(highlight=False, markup=False, emoji=False, **settings)


def show(view: Callable[[Any], RenderableType], data: Any) -> None:
    """Print a view of data in which anybody's words may be."""
    console().print(view(wording.plain(data)))


@contextmanager
def live(view: Callable[[Any, int], RenderableType]) -> Iterator[Callable[[Any], None]]:
    """A screen. Each call of the yielded function redraws it with a view of the data, as
    high as the screen."""
    with Live(console=console(), auto_refresh=False, vertical_overflow="crop") as screen:
        yield lambda data: screen.update(
            view(wording.plain(data), screen.console.height), refresh=True
        )


def busy(what: str) -> Status:
    """Show on a terminal that something is under way, as long as it is; its `update` has
    other words."""
    return console(stderr=True).status(Text(f"{what} …"))


# ---- status --------------------------------------------------------------------------


def runs_table(observations: Sequence[dict], height: int = 0) -> RenderableType:
    """A row per run; on a screen of `height` lines (0: any), of as many as it holds."""
    if not observations:
        return Text("no runs: elastic-submit CONFIG starts one")
    most = max(3, (height - 3) // 2) if height else len(observations)
    table = _table("run", "state", ">version", ">tokens", ">loss", ">GPUs", "why")
    for seen in observations[:most]:
        table.add_row(
            seen["run"], _state(seen["state"]), _number(seen["version"]),
            si(seen["tokens"]), _number(seen["loss"], LOSS), _gpus(seen), seen["reason"],
        )
    notes = _rest(observations, most)
    if any(seen["workers"] and not seen.get("asked", True) for seen in observations):
        notes.append("workers are counted by their jobs: elastic-status RUN asks them")
    return Group(table, *notes)


@group()
def run_view(seen: dict, height: int = 0) -> Iterator[RenderableType]:
    """Everything about one run; on a screen of `height` lines (0: any), the most telling
    of it."""
    yield _summary(seen, height)
    if seen.get("detail"):
        yield from ("", Text(seen["detail"].rstrip(), style="red"))
    waiting = [job for job in seen["jobs"] if job["state"] != "RUNNING"]
    tables = sum(map(bool, (seen["workers"], waiting, seen["events"])))
    rows = max(3, (height - HEAD_LINES) // max(1, tables)) if height else MOST_ROWS
    if seen["workers"]:
        yield from ("", *_workers_table(seen["workers"], rows, seen["unit"]))
    if waiting:
        yield from ("", *_jobs_table(waiting, max(2, rows // 2)))
    if seen["events"]:
        yield ""
        for event in seen["events"][-(rows if height else MOST_EVENTS) :]:
            yield Text(event_line(event), no_wrap=True, overflow="ellipsis")


def _summary(seen: dict, height: int) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    goal = f" of {si(seen['tokens_goal'])}" if seen.get("tokens_goal") else ""
    numbers = "" if seen.get("program") else (
        f"version {_number(seen['version'])} · {si(seen['tokens'])} {seen['unit']}{goal}"
        f" · loss {_number(seen['loss'], LOSS)}"
    )
    alive = sum(worker["state"] != "stalled" for worker in seen["workers"])
    alive = f"{alive} alive, on {_gpus(seen)} GPUs"
    if seen["preemptions_per_h"]:
        alive += f" · {seen['preemptions_per_h']:.0f} preemptions/h"
    for name, text in (
        (seen["run"], _state(seen["state"]) + f" · mode {seen['mode']}"),
        ("", seen["summary"]),
        ("progress", " ".join([_bar(seen["tokens"], seen["tokens_goal"]), numbers]).strip()),
        ("round", _round(seen)),
        ("loss", sparkline([loss for _, loss in seen["losses"]])),
        ("validated", _validated(seen)),
        ("", sparkline([loss for _, loss in seen.get("scores", ())])),
        ("workers", alive if seen["workers"] or seen["state"] in ("running", "waiting") else ""),
        ("why", seen["reason"]),
        ("waits", _waits(wording.awaited(seen["jobs"], seen["workers"]))),
        ("where", "" if 0 < height < ROOMY_LINES else seen["path"]),
    ):
        if text:
            rows.add_row(name, text)
    return rows


def _validated(seen: dict) -> str:
    """The newest score on the way, and when that was."""
    found = dict(seen.get("validated") or {})
    if not found:
        return ""
    where = f"at {si(found.pop('tokens'))} {seen['unit']}"
    return f"{' · '.join(f'{name} {brief(value)}' for name, value in found.items())}, {where}"


def _round(seen: dict) -> str:
    """How far the open round is, over all workers in it."""
    steps = [w["step"] for w in seen["workers"] if w["version"] == seen["version"]]
    if not (seen.get("inner_steps") and steps):
        return ""
    done, most = sum(steps), len(steps) * seen["inner_steps"]
    states = Counter(worker["state"] for worker in seen["workers"])
    words = ", ".join(f"{count} {state}" for state, count in states.most_common())
    span = f"{min(steps)}..{max(steps)} of {seen['inner_steps']}"
    return f"{_bar(done, most)} steps {span} · {words}"


def _waits(jobs: Sequence[dict]) -> str:
    """What the scheduler's reasons mean, and what to do."""
    ways_out = {job["reason"]: wording.way_out(job["reason"]) for job in jobs}
    return "; ".join(f"{reason}: {words}" for reason, words in ways_out.items() if words)


def _workers_table(workers: Sequence[dict], most: int, unit: str) -> list[RenderableType]:
    """A row per worker. If there are too many: those in trouble, then the slowest."""
    speed = {"tokens": ">tok/s"}.get(unit, f">{unit}/s")
    columns = (">slot", ">try", "job", "node", "state", ">version", ">step", speed, ">beat")
    table = _table(*columns)
    telling = sorted(workers, key=lambda w: (w["state"] == "training", w["tokens_per_s"]))
    for worker in sorted(telling[:most], key=itemgetter("slot")):
        version = None if worker["version"] == -1 else worker["version"]
        table.add_row(
            *(str(worker[name]) for name in ("slot", "attempt", "job_id", "node")),
            _state(worker["state"]), _number(version), str(worker["step"]),
            si(worker["tokens_per_s"]), _number(worker["last_beat_s"], BEAT),
        )
    are_well = all(worker["state"] == "training" for worker in telling[most:])
    return [table, *_rest(workers, most, ", none of them slower or in trouble" * are_well)]


def _jobs_table(jobs: Sequence[dict], most: int) -> list[RenderableType]:
    table = _table("job", "role", ">slot", "scheduler says", "because")
    for job in jobs[:most]:
        names = ("job_id", "role", "slot", "state", "reason")
        table.add_row(*(str(job[name]) for name in names))
    return [table, *_rest(jobs, most, " jobs that do not run")]


def event_line(event: dict) -> str:
    """One event as one line: when, and what in plain words."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
    return f"{clock} {wording.event_words(event)}"


# ---- audit, configuration ------------------------------------------------------------


@group()
def audit_view(run: str, report: dict) -> Iterator[RenderableType]:
    """The counts of an audit, then its verdict and everything that is wrong."""
    if report["epochs"]:
        columns = ("committed", "repeated", "missing", "open", "not_reached")
        table = _table(">epoch", *(f">{name.replace('_', ' ')}" for name in columns))
        for epoch in report["epochs"]:
            table.add_row(str(epoch["epoch"]), *(f"{epoch[name]:,}" for name in columns))
        yield table
        yield (f"{report['commits']} versions, {report['deltas']} deltas,"
               f" {report['tokens']:,} {report['unit']},"
               f" {report['masters']} masters, {report['files']} files")
    if report.get("gpu_seconds"):
        yield _gpu_seconds(report["gpu_seconds"])
    for version, samples in report.get("taken_back", []):
        yield f"version {version} was taken back: no parameters have its {samples:,} samples"
    if report.get("commits") == 0 and not report["problems"]:
        yield "no version is committed yet"
    for problem in report["problems"]:
        yield Text(f"wrong: {problem}", style="red")
    state = "finished" if report.get("finished") else "not finished"
    yield Text(f"audit of {run} ({state}): ") + _state("WRONG" if report["problems"] else "ok")


def chaos_view(report: dict) -> RenderableType:
    """What faults cost a run: a row per kind, then the sums."""
    kept = [">kept"] if report["kept"] is not None else []  # of the rate before any fault
    table = _table("fault", ">times", ">steps lost", ">next commit after (worst)",
                   ">all back after (worst)", *kept)
    for row in report["kinds"]:
        spans = [" ".join([_number(middle, "{:.1f} s"), f"({_number(worst, '{:.1f}')})"])
                 for middle, worst in (row["next_commit_s"], row["back_s"])]
        spans += [_number(row["kept"], "{:.1%}") for _ in kept]
        table.add_row(row["kind"], str(row["count"]), str(row["steps_lost"]), *spans)
    rate = f"{si(report['tokens_per_s'])} {report['audit'].get('unit', 'tokens')}/s"
    rate += f", {report['kept']:.1%} of those without faults" if kept else ""
    lost = f"{report['steps_lost']} steps lost"
    sums = f"{report['faults']} faults in {report['seconds']:.0f} s, {lost}; {rate}"
    return Group(table, "", sums, "", audit_view(report["run"], report["audit"]))


def doctor_view(report: dict) -> RenderableType:
    """A line per check; below what is not OK, why that matters and what to do."""
    rows = Table.grid(padding=(0, 2))
    for width in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
        rows.add_column(**width)
    for check in report["checks"]:
        verdict = check["verdict"]
        rows.add_row(_state(verdict), check["check"], check["seen"])
        if verdict in ("WARN", "FAIL"):
            rows.add_row("", Text("why", style="dim"), check["why"])
        if check["fix"]:
            rows.add_row("", Text("to do", style="dim"), check["fix"])
    counts = [f"{report[verdict]} {verdict}" for verdict in VERDICTS if report[verdict]]
    return Group(rows, "", f"{len(report['checks'])} checks: {', '.join(counts)}")


def plan_view(forecast: dict) -> RenderableType:
    """A row per way to train through a trace, and what to do."""
    trace, best = forecast["trace"], forecast["recommended"]
    columns = ("start-up", "waiting", "replay", "lost", "notice")
    table = _table("way", *(f">{name}" for name in ("GPUs", "K", "goodput", "kept", *columns)))
    for way in forecast["ways"]:
        whole, sizes = way["allocated"] or 1.0, dict.fromkeys(way["gpus"])
        table.add_row(
            "--requeue" if way["mode"] == "requeue" else way["mode"],
            "..".join(map(str, sizes)), str(way["inner_steps"] or ""),
            *(f"{way[name]:.1%}" for name in ("goodput", "kept")),
            *(f"{way[name] / whole:.1%}" for name in columns),
        )
    hours = trace["seconds"] / 3600
    return Group(
        f"{hours:.3g} hours of {trace['nodes']} nodes, up to {trace['most_gpus']} GPUs at a"
        f" time; nodes were taken {trace['taken']} times, at {trace['moments']} moments",
        "", table, "",
        f"take --mode {best['mode']} --max {best['max']}: {best['reason']}",
    )


def _gpu_seconds(ledger: dict[str, float]) -> str:
    """The goodput ledger in a line or two."""
    share = shares(ledger)
    others = [f"{part} {share[part]:.1%}" for part in PARTS[1:] if share[part]]
    goodput = f"training {share['training']:.1%} of {si(ledger['allocated'])} GPU-seconds"
    words, queued = ", ".join([goodput, *others]), si(ledger["queued"])
    return f"goodput: {words}; {queued} more passed in the queue"


def validation_view(comparison: dict, curves: dict) -> RenderableType:
    """Loss, gap and verdict of each arm, below the curves of the first seed."""
    table = _table("arm", ">loss", ">± seeds", ">gap", ">95 % below", "verdict")
    for row in comparison["verdicts"]:
        table.add_row(row["arm"], LOSS.format(row["loss"]), _number(row["spread"], LOSS),
                      _number(row["gap"], "{:+.3f}"), _number(row["bound"], "{:+.3f}"),
                      row["words"])
    drawn = (f"{arm}: training loss {sparkline(curve)}" for arm, curve in curves.items())
    return Group(*map(Text, drawn), "", table, "", Text(f"runs: {comparison['runs']}"))


# ---- small parts ---------------------------------------------------------------------


def sparkline(values: Sequence[float]) -> str:
    """First and last value, and between them a bar for each of SPARKS stretches."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2:
        return ""
    count = min(SPARKS, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, most = min(means), len(BARS) - 1
    height = (max(means) - low) or 1
    bars = "".join(BARS[round((mean - low) / height * most)] for mean in means)
    return f"{LOSS.format(values[0])} {bars} {LOSS.format(values[-1])}"


def _bar(done: float, most: float | None) -> str:
    """How much of it is done; empty where nobody knows how much it will be."""
    if not most:
        return ""
    share = max(0, min(done, most)) / most
    full = round(share * BAR)
    return f"{'━' * full}{'╌' * (BAR - full)} {share:.0%}"


def _table(*columns: str) -> Table:
    """A borderless table; a leading ">" aligns a column to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        side = "right" if column[0] == ">" else "left"
        # Folded, not cut: it may be copied.
        table.add_column(column.lstrip(">"), justify=side, overflow="fold")
    return table


def _rest(rows: Sequence[dict], most: int, words: str = "") -> list[str]:
    """A line on the rows for which there is no space."""
    return [f"and {len(rows) - most} more{words}"] if len(rows) > most else []


def _gpus(seen: dict) -> str:
    """How many GPUs are at work, and the limits."""
    return "-" if seen["gpus"] is None else f"{seen['gpus']} of {seen['min']}..{seen['max']}"


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _number(value: float | None, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)
