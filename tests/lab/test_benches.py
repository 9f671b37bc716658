"""`make bench` takes an hour and no other test runs it: the bench that plays workers by itself.

    pytest tests/lab/test_benches.py
"""

import importlib

from helpers import ROOT


def test_the_master_takes_what_the_bench_plays(tmp_path, monkeypatch):
    """It waited for ever: attempts without a record on disk had come not to count."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path))  # the bench sets it, too
    bench, rows = importlib.import_module("bench_master"), {}
    monkeypatch.setattr(bench, "record", lambda _bench, case, value, *_: rows.update({case: value}))
    bench.measure(tmp_path, 2)
    assert rows["2 workers: round"] > 0
