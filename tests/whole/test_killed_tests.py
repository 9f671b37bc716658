"""A session of tests that is killed leaves nothing behind, as one that ends."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, wait_until
from running import TESTS, members

ENDLESS = """
import time
from running import running

def test_that_takes_for_ever(tmp_path):
    with running(tmp_path, {"elastic.max": 1}) as run:
        run.until(lambda: run.pids("trainer"), 60, "a worker's process")
        (tmp_path.parent / "trains").touch()
        time.sleep(600)
"""


def test_the_run_of_a_test_ends_when_the_session_is_killed(tmp_path: Path):
    """Workers trained on for as long as they had samples."""
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    folder = tmp_path / "inner"
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "conftest", "test_endless.py",
         "--basetemp", folder], cwd=tmp_path, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{TESTS}", "PYTEST_ADDOPTS": ""},
    )
    try:
        trains = folder / "trains"
        wait_until(lambda: trains.exists() or session.poll() is not None, 60, "a run is there")
        assert trains.exists()
    finally:
        session.kill()
        session.wait()
    wait_until(lambda: not members(folder), 30, "nothing is left")
