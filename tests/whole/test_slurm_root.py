"""`make slurm`: what it would run, what it refuses, and the table that it writes.

pytest tests/whole/test_slurm_root.py; what it does for real: make slurm SLURM=24.11
"""

import os
import subprocess

import pytest

import slurm_table
from helpers import ROOT

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.lab.test_sandbox" name="a"/>
<testcase classname="tests.lab.test_sandbox" name="b"><failure message="no"/></testcase>
<testcase classname="tests.people.test_doctor" name="c"/>
</testsuite></testsuites>"""


def test_another_slurm_is_asked_for_by_its_version():
    def plan(*more: str) -> str:
        command = ["make", "--dry-run", "--always-make", "-C", ROOT, "slurm", *more]
        asked = {"env": {"PATH": os.environ["PATH"]}, "capture_output": True, "text": True}
        return subprocess.run(command, check=True, **asked).stdout

    here, other = plan(), plan("SLURM=24.11")
    assert "slurm-root" not in here
    assert "-m slurm --junit-xml=build/slurm-installed.xml" in here
    assert "tests/slurm-root make 24.11" in other
    assert "tests/slurm-root run 24.11 .venv/bin/python -m pytest" in other


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, as slurm-root does")
@pytest.mark.parametrize(("words", "said"), [(["make", "9"], 'no Slurm "9"'), ([], 'no Slurm ""')])
def test_a_slurm_that_is_not_known_is_refused(words, said):
    program = ROOT / "tests" / "slurm-root"
    done = subprocess.run([program, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: slurm-root: {said} is known\n  hint: 24.11 or 26.05")


def test_the_table_says_what_came_out_on_each(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_table, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "slurm-24.11.xml").write_text(RESULTS)
    (tmp_path / "build" / "slurm-26.05.xml").write_text("<testsuites/>")
    slurm_table.main()
    lines = (tmp_path / "docs" / "slurm-versions.md").read_text().splitlines()
    assert lines[-6:] == [
        "| tests | 24.11 | 26.05 |", "| --- | --- | --- |",
        "| test_doctor | 1 passed |  |", "| test_sandbox | 1 failed, 1 passed |  |",
        "", "- 24.11: `b` failed",
    ]
