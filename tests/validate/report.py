"""What `make validate` found, for readers: one table and one picture of the arms that are shown.

`shown` says which arms those are, in their order, and what a reader calls them. Plain data comes
in, text and a file go out; arms that were not run are left out.
"""

import shutil
from pathlib import Path
from statistics import mean

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PAGE, PICTURE = HERE.parents[1] / "docs/measurements.md", HERE / "curves.svg"
BEGIN, END = "<!-- from make {} -->\n", "<!-- until here -->\n"
HEADER = """\
| | loss | − local SGD | bound | margin | − synchronous | bound | margin | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
COMPARED = ("base", "dp")
WIDTH_INCHES, HEIGHT_INCHES = 9.0, 4.6
CLOSE_UP = (-0.05, 0.05)  # nats per byte; who is further from base is seen at the left
LOOKS = {
    "dp": ("black", "--"), "base": ("black", "-"),
    "int8": ("tab:blue", "--"), "int4": ("tab:green", ":"),
    "rebase": ("tab:purple", "-"), "rebase_less": ("tab:purple", ":"),
}

Losses = dict[str, dict[int, float]]  # arm -> seed -> nats per byte, at the end
Curves = dict[str, dict[int, list[tuple[int, float]]]]  # arm -> seed -> (tokens, nats per byte)


def table(shown: dict[str, str], losses: Losses, rules: list[dict]) -> str:
    """Markdown: of each arm its mean loss, and what the rules of `rig.check_rules` say of it."""
    rows = [row(arm, shown[arm], losses[arm], rules) for arm in shown if arm in losses]
    return HEADER + "".join(rows)


def row(arm: str, name: str, by_seed: dict[int, float], rules: list[dict]) -> str:
    found = {each["against"]: each for each in rules if each["arm"] == arm}
    cells = [name, f"{mean(by_seed.values()):.4f}"]
    for against in COMPARED:
        cells += ["", "", ""]
        if rule := found.get(against):
            cells[-3:] = [f"{rule['mean']:+.4f}", f"{rule['bound']:+.4f}", f"{rule['margin']:.3f}"]
    judged = [found[against]["ok"] for against in COMPARED if against in found]
    cells.append(("ok" if all(judged) else "BROKEN") if judged else "")
    return f"| {' | '.join(cells)} |\n"


def averaged(by_seed: dict[int, list[tuple[int, float]]]) -> tuple[list[int], list[float]]:
    """Tokens, and the mean over the seeds of the losses there."""
    points = list(zip(*by_seed.values(), strict=True))
    return [each[0][0] for each in points], [mean(loss for _, loss in each) for each in points]


def draw(shown: dict[str, str], curves: Curves, path: Path) -> None:
    """Left the losses along the tokens, right how far each is from base. Drawn again, it is the
    same file."""
    drawn = {arm: averaged(curves[arm]) for arm in shown if arm in curves}
    style = {"svg.fonttype": "none", "svg.hashsalt": "elastic", "axes.spines.top": False,
             "axes.spines.right": False, "font.size": 9}
    with rc_context(style):
        figure = Figure((WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
        left, right = figure.subplots(1, 2)
        for arm, (tokens, losses) in drawn.items():
            color, line = LOOKS[arm]
            thousands = [each / 1000 for each in tokens]
            looks = {"color": color, "linestyle": line, "label": shown[arm], "linewidth": 1.3}
            left.plot(thousands, losses, **looks)
            if "base" in drawn:
                gaps = [a - b for a, b in zip(losses, drawn["base"][1], strict=True)]
                right.plot(thousands, gaps, **looks)
        left.set(xlabel="thousand tokens", ylabel="validation loss, nats per byte")
        right.set(xlabel="thousand tokens", ylabel="minus that of local SGD, dense, no overlap",
                  ylim=CLOSE_UP)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4,
                      frameon=False)
        figure.savefig(path, metadata={"Date": None})


def publish(build: Path) -> None:
    """Put the table into its page, and the picture where the page shows it from."""
    PAGE.write_text(replaced(PAGE.read_text(), (build / "validate.md").read_text()))
    shutil.copyfile(build / "validate.svg", PICTURE)


def replaced(text: str, table: str, target: str = "validate") -> str:
    """The text with another table of `make TARGET` between the marks."""
    before, begin, rest = text.partition(BEGIN.format(target))
    if not begin:
        raise SystemExit(f"the page has no place for it: write {BEGIN.format(target)}, then {END}")
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}"


def published(text: str, target: str = "validate") -> str:
    """The table between the marks."""
    return text.partition(BEGIN.format(target))[2].partition(END)[0].strip("\n") + "\n"
