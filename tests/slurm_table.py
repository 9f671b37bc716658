"""docs/slurm-versions.md from what `make slurm` has left in build: one column per Slurm.

python tests/slurm_table.py
"""

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# What was run on which Slurm

`make slurm SLURM=24.11` (or 26.05; without SLURM: the installed one) runs every test that is marked
`slurm` on a real Slurm of that version, several nodes on one machine, and writes its column here.
The other versions are Debian's, in a folder of their own: see `tests/slurm-root`. Beside a version
stands the commit that was tested. `test_demo` is `make demo-slurm`; `test_notice_matrix` plays 9
ways to announce a preemption, or all 72 with ELASTIC_FULL_MATRIX=1.

`test_sites` is the whole life of a run in either mode with all switches of the sandbox at once.
Nodes have four GPUs, and host names that are no node names. Compute nodes may not submit jobs
(AllocNodes). Each node sees the shared folder through a cache of a minute, and the filesystem has
no flock. preempt/qos takes GraceTime from the QOS. Prolog and epilog take their time, KillWait is
30 s. Jobs have whole nodes, with DefCpuPerGPU and DefMemPerCPU, and are killed when they use more
memory. A job_submit.lua refuses and renames. Nodes are taken by other jobs, reserved for others,
drained, powered down and turned on again; and nodes die: the first one of a synchronous run, and
the one of the master.

"""
LIVES = ("test_sites", "test_sites_local")  # their tests have a row each


def outcome(case: ElementTree.Element) -> str:
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return next((word for kind, word in kinds.items() if case.find(kind) is not None), "passed")


def column(path: Path) -> dict[str, str]:
    """What came out, by the name of the file of tests."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        where = case.get("classname") or case.get("name")  # the file, if it was not even loaded
        name = re.search(r"test_\w+", where)[0]
        if name in LIVES:
            name = LIVES[0] + ": " + case.get("name", "").removeprefix("test_").replace("_", " ")
        counts.setdefault(name, Counter())[outcome(case)] += 1
    return {name: ", ".join(f"{n} {word}" for word, n in sorted(found.items()))
            for name, found in counts.items()}


def title(path: Path) -> str:
    """The version, and the commit if it was said: make has it in the name of the suite."""
    suite = ElementTree.parse(path).find("testsuite")
    commit = suite.get("name", "pytest") if suite is not None else "pytest"
    return path.stem.removeprefix("slurm-") + (f" ({commit})" if commit != "pytest" else "")


def failures(path: Path) -> list[str]:
    """A line for each test that failed."""
    cases = ElementTree.parse(path).iter("testcase")
    return [f"- {title(path)}: `{case.get('name')}` failed"
            for case in cases if outcome(case) == "failed"]


def main() -> None:
    paths = sorted((ROOT / "build").glob("slurm-*.xml"))
    columns = {title(path): column(path) for path in paths}
    rows = [["tests", *columns], ["---"] * (len(columns) + 1)]
    for name in sorted(set().union(*columns.values())):
        rows.append([name, *(found.get(name, "") for found in columns.values())])
    (ROOT / "docs").mkdir(exist_ok=True)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    failed = "".join(f"\n{line}" for path in paths for line in failures(path))
    text = f"{HEAD}{table}\n{failed}".rstrip() + "\n"
    (ROOT / "docs" / "slurm-versions.md").write_text(text)


if __name__ == "__main__":
    main()
