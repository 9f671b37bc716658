"""What people see: the one importer of rich. Takes the plain dictionaries of status and audit.

Text fits 80 columns; colour and width come from the terminal, and where there is none (a pipe, a
cron mail) the same words come plain. Nothing here reads a file, asks Redis or decides anything.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from elastic.goodput import PARTS

STATE_STYLES = {
    "running": "green", "training": "green", "done": "green", "ok": "green",
    "waiting": "yellow", "stalled": "yellow", "stopped": "yellow", "loading": "cyan",
    "failed": "red", "WRONG": "red", "blocked": "red",
}  # fmt: skip
LOSS, BEAT = "{:.3f}", "{:.0f}s"


def console() -> Console:
    """A console on standard output that leaves words and numbers uncoloured by itself."""
    return Console(highlight=False)


@contextmanager
def live() -> Iterator[Callable[[RenderableType], None]]:
    """A screen that is redrawn with whatever the yielded function is given."""
    with Live(console=console(), auto_refresh=False, vertical_overflow="crop") as screen:
        yield lambda renderable: screen.update(renderable, refresh=True)


# ---- status -------------------------------------------------------------------------------------


def runs_table(observations: Sequence[dict]) -> RenderableType:
    """One line per run."""
    if not observations:
        return Text("no runs: elastic-submit CONFIG starts one")
    table = _table("run", "state", ">version", ">tokens", ">loss", ">workers", "why")
    for seen in observations:
        limits = f"{len(_alive(seen))} of {seen['min']}..{seen['max']}"
        table.add_row(
            escape(seen["run"]), _state(seen["state"]), _number(seen["version"]),
            si(seen["tokens"]), _number(seen["loss"], LOSS), limits, escape(seen["reason"]),
        )  # fmt: skip
    return table


def run_view(seen: dict) -> RenderableType:
    """Everything about one run, on about one screen."""
    parts: list[RenderableType] = [_summary(seen)]
    if seen.get("detail"):
        parts += ["", Text(seen["detail"].rstrip(), style="red")]
    if seen["workers"]:
        parts += ["", _workers_table(seen["workers"])]
    if seen["jobs"]:
        parts += ["", _jobs_table(seen["jobs"])]
    if seen["events"]:
        lines = map(event_line, seen["events"][-8:])
        parts += ["", *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]
    return Group(*parts)


def _summary(seen: dict) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    goal = f" of {si(seen['tokens_goal'])}" if seen.get("tokens_goal") else ""
    numbers = (
        f"version {_number(seen['version'])} · {si(seen['tokens'])} tokens{goal}"
        f" · loss {_number(seen['loss'], LOSS)}"
    )
    speed = f"{len(_alive(seen))} alive of {seen['min']}..{seen['max']} wanted"
    if seen.get("tokens_per_s"):
        speed += f" · {si(seen['tokens_per_s'])} tokens/s"
    if seen.get("goodput") is not None:
        speed += f" · goodput {seen['goodput']:.0%}"
    for name, text in (
        (escape(seen["run"]), f"{_state(seen['state'])} · mode {seen['mode']}"),
        ("progress", numbers),
        ("workers", speed),
        ("why", escape(seen["reason"])),
        ("next", escape(seen["next"])),
        ("where", escape(seen.get("path", ""))),
    ):
        if text:
            rows.add_row(name, text)
    return rows


def _workers_table(workers: Sequence[dict]) -> Table:
    columns = (">slot", ">try", "job", "node", "state", ">version", ">step", ">tok/s", ">beat")
    table = _table(*columns)
    for worker in workers:
        table.add_row(
            str(worker["slot"]), str(worker["attempt"]), escape(str(worker["job_id"])),
            escape(worker["node"]), _state(worker["state"]), _number(worker["version"]),
            str(worker["step"]), si(worker["tokens_per_s"]), _number(worker["last_beat_s"], BEAT),
        )  # fmt: skip
    return table


def _jobs_table(jobs: Sequence[dict]) -> Table:
    table = _table("job", "role", ">slot", "scheduler says", "because")
    for job in jobs:
        reason = "" if job["reason"] in ("None", "none") else job["reason"]
        table.add_row(
            escape(str(job["job_id"])), job["role"], str(job["slot"]), job["state"], escape(reason)
        )
    return table


def event_line(event: dict) -> str:
    """One event as one line: time, kind, then its fields."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
    fields = " ".join(
        f"{name}={_brief(value)}" for name, value in event.items() if name not in ("time", "kind")
    )
    return f"{clock} {event.get('kind', '?'):<10} {fields}"


# ---- audit, configuration -----------------------------------------------------------------------


def audit_view(run: str, report: dict) -> RenderableType:
    """The counts of an audit, then its verdict and everything that is wrong."""
    parts: list[RenderableType] = []
    if report["epochs"]:
        columns = ("committed", "repeated", "missing", "open", "not_reached")
        table = _table(">epoch", *(f">{name.replace('_', ' ')}" for name in columns))
        for epoch in report["epochs"]:
            table.add_row(str(epoch["epoch"]), *(f"{epoch[name]:,}" for name in columns))
        parts.append(table)
        parts.append(
            f"{report['commits']} versions, {report['deltas']} deltas, {report['tokens']:,} tokens,"
            f" {report['masters']} masters, {report['files']} files"
        )
    if report.get("gpu_seconds"):
        parts.append(_gpu_seconds(report["gpu_seconds"]))
    parts += [Text(f"wrong: {problem}", style="red") for problem in report["problems"]]
    state = "finished" if report.get("finished") else "not finished"
    verdict = _state("WRONG") if report["problems"] else _state("ok")
    parts.append(f"audit of {escape(run)} ({state}): {verdict}")
    return Group(*parts)


def chaos_view(report: dict) -> RenderableType:
    """What faults cost a run: a row per kind, then the sums."""
    table = _table("fault", ">times", ">steps lost", ">next commit after (worst)",
                   ">all back after (worst)", ">kept")  # fmt: skip
    for row in report["kinds"]:
        spans = [" ".join([_number(middle, "{:.1f} s"), f"({_number(worst, '{:.1f}')})"])
                 for middle, worst in (row["next_commit_s"], row["back_s"])]  # fmt: skip
        kept = _number(row["kept"], "{:.1%}")
        table.add_row(row["kind"], str(row["count"]), str(row["steps_lost"]), *spans, kept)
    parts: list[RenderableType] = [table, ""]
    parts.append(f"{report['faults']} faults in {report['seconds']:.0f} s, "
                 f"{report['restarts']} restarts, {report['steps_lost']} steps lost; "
                 f"{si(report['tokens_per_s'])} tokens/s, "
                 f"{_number(report['kept'], '{:.1%}')} of those without faults")  # fmt: skip
    if report["worst"]:
        parts.append(f"the longest to recover from: {escape(report['worst'])}")
    return Group(*parts, "", audit_view(report["run"], report["audit"]))


def _gpu_seconds(ledger: dict[str, float]) -> str:
    """The goodput ledger in a line or two."""
    whole = ledger["allocated"] or 1.0
    parts = [f"{name} {ledger[name] / whole:.1%}" for name in PARTS if ledger[name]]
    return (f"{si(ledger['allocated'])} GPU-seconds: {', '.join(parts)}; "
            f"{si(ledger['queued'])} more were waited for")  # fmt: skip


def config_view(rows: Sequence[dict]) -> RenderableType:
    """Effective values with unit and origin, one key a line."""
    columns = ("key", "value", "unit", "origin")
    table = _table(*columns)
    for row in rows:
        style = "dim" if row["origin"] == "default" else ""
        table.add_row(*(Text(str(row[column]), style=style) for column in columns))
    return table


# ---- small parts --------------------------------------------------------------------------------


def loss_curve(points: Sequence[tuple[float, float]], width: int = 64, height: int = 12) -> str:
    """A curve through (x, y), x ascending, drawn in braille dots; y labelled at the left edge."""
    import numpy

    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) < 2:
        return "(no curve: fewer than two points)"
    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    drawn = numpy.interp(numpy.linspace(xs[0], xs[-1], columns), xs, ys)
    for column, y in enumerate(drawn):
        row = round((high - y) / ((high - low) or 1) * (rows - 1))
        cells[row // 4][column // 2] |= _BRAILLE[column % 2][row % 4]
    lines = ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
    labels = [f"{high:8.3f} ┤", *["         │"] * (height - 2), f"{low:8.3f} ┤"]
    axis = f"         └{'─' * width}\n{'':10}{si(xs[0]):<{width // 2}}{si(xs[-1]):>{width // 2}}"
    return "\n".join([a + b for a, b in zip(labels, lines, strict=True)] + [axis])


_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then row of a cell


def si(number: float | None) -> str:
    """A count in four characters or so: 950, 12.3k, 4.56M, 7.89G."""
    if number is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # or it would print as 1e+03
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _table(*columns: str) -> Table:
    """A borderless table; a leading ">" aligns a column to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left")
    return table


def _alive(seen: dict) -> list[dict]:
    return [worker for worker in seen["workers"] if worker["state"] != "stalled"]


def _state(state: str) -> str:
    style = STATE_STYLES.get(state)
    return f"[{style}]{state}[/{style}]" if style else escape(state)


def _number(value: float | None, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _brief(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
