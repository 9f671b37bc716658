"""Figures of a benchmark: printed as a table, appended to build/bench.jsonl, one object each."""

import json
import statistics
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
TRIES = 11


def scratch(where: Path = BUILD) -> tempfile.TemporaryDirectory:
    """A folder for what is measured, on this checkout's disk."""
    where.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=where)


def record(bench: str, case: str, value: float, unit: str, against: str = "", base: float = 0.0):
    """One figure; with `against`, its ratio to `base`, measured in the same run."""
    ratio = float(f"{value / base:.4g}") if base else None
    row = {"bench": bench, "case": case, "value": round(value, 6), "unit": unit,
           "against": against, "ratio": ratio}
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "bench.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    beside = f"   {ratio:8.4g} x {against}" if base else ""
    print(f"{bench:10} {case:52} {value:12.4f} {unit:6}{beside}", flush=True)


def medians_s(*works) -> list[float]:
    """The middle of several tries of each, after one to warm up; by turns, so that what else the
    machine does meets all of them."""
    times = [[] for _ in works]
    for _ in range(TRIES + 1):
        for took, work in zip(times, works, strict=True):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
    return [statistics.median(took[1:]) for took in times]


def status_bytes(pid: int, key: str) -> int:
    """A size from /proc/PID/status (VmHWM, VmRSS), 0 if the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def available_bytes() -> int:
    """Memory that processes can still have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
