"""docs/slurm-versions.md from what `make slurm` has left in build: one column per Slurm.

python tests/slurm_table.py
"""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# What was run on which Slurm

`make slurm SLURM=24.11` (or 26.05; without SLURM: the installed one) runs every test that is marked
`slurm` on a real Slurm of that version, several nodes on one machine, and writes its column here.
The other versions are Debian's, in a folder of their own: see `tests/slurm-root`.

"""


def outcome(case: ElementTree.Element) -> str:
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return next((word for kind, word in kinds.items() if case.find(kind) is not None), "passed")


def column(path: Path) -> dict[str, str]:
    """What came out, by the name of the file of tests."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.")
        counts.setdefault(name, Counter())[outcome(case)] += 1
    return {name: ", ".join(f"{n} {word}" for word, n in sorted(found.items()))
            for name, found in counts.items()}  # fmt: skip


def main() -> None:
    columns = {path.stem.removeprefix("slurm-"): column(path)
               for path in sorted((ROOT / "build").glob("slurm-*.xml"))}  # fmt: skip
    rows = [["tests", *columns], ["---"] * (len(columns) + 1)]
    for name in sorted(set().union(*columns.values())):
        rows.append([name, *(found.get(name, "") for found in columns.values())])
    (ROOT / "docs").mkdir(exist_ok=True)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    (ROOT / "docs" / "slurm-versions.md").write_text(f"{HEAD}{table}\n")


if __name__ == "__main__":
    main()
