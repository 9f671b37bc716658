"""What is short is said, the run waits or goes on, and it recovers by itself when there is more.

Disks that are really full (of bytes, of inodes, of what a quota allows), limits of open files and
of file sizes set on running processes, a full Redis, a slow filesystem, logs beyond all measure.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic.base import config as configuration, durable
from elastic.jobs import reconcile
from elastic.jobs.reconcile import PassReport
from elastic.people import status, submission
from elastic.run.rundir import RunDir
from elastic.saved.checkpoint import steps
from helpers import PATIENCE, elastic_here, environment, wait_until
from running import SETTINGS, Running, kill_all, running, second_master, toml

# ---- disks --------------------------------------------------------------------------------------


@dataclass
class Disk:
    """A small filesystem, and how it is filled to the last."""

    folder: Path
    short_of: str  # what status is to say
    fills_files: bool = False

    def fill(self) -> None:
        """Take what is left, also what is left in the last blocks of logs."""
        filler = self.folder / "filler"
        filler.mkdir(exist_ok=True)
        number = 0
        with contextlib.suppress(OSError):
            while self.fills_files:
                (filler / f"{(number := number + 1)}").touch()
        if self.fills_files:
            return
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError), (filler / "bytes").open("ab", buffering=0) as file:
                while file.write(bytes(size)) == size:
                    pass
        for log in self.folder.glob("runs/*/logs/*.log"):
            with contextlib.suppress(OSError), log.open("ab", buffering=0) as file:
                while file.write(b"\n") and file.tell() % 4096:
                    pass

    def make_room(self) -> None:
        shutil.rmtree(self.folder / "filler")


def mount(folder: Path, *options: object) -> None:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a filesystem")
    done = subprocess.run(["mount", *map(str, options), str(folder)], stderr=subprocess.DEVNULL)
    if done.returncode != 0:
        pytest.skip("this machine lets nobody mount such a filesystem")


def with_quota(folder: Path, image: Path) -> Path:
    """A folder of 16 MB by a real quota, on a filesystem that has more."""
    if os.geteuid() != 0 or not shutil.which("mkfs.btrfs"):
        pytest.skip("needs root, and btrfs-progs")
    with image.open("wb") as file:
        file.truncate(160 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, stdout=subprocess.DEVNULL)
    mount(folder, "-o", "loop", image)
    mine = folder / "mine"
    for words in (["quota", "enable", folder], ["subvolume", "create", mine],
                  ["qgroup", "limit", "16M", mine]):
        subprocess.run(["btrfs", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return mine


@contextlib.contextmanager
def a_disk(kind: str, home: Path) -> Iterator[Disk]:
    """A filesystem of its own for a home, small in one respect."""
    folder, tmpfs = home / "disk", ["-t", "tmpfs", "tmpfs", "-o"]
    try:
        if kind == "bytes":
            mount(folder, *tmpfs, "size=24m")
            yield Disk(folder, " B and ")
        elif kind == "inodes":
            mount(folder, *tmpfs, "size=24m,nr_inodes=600")
            yield Disk(folder, " inodes are free", fills_files=True)
        else:
            yield Disk(with_quota(folder, home / "image"), "Disk quota exceeded")
    finally:
        kill_all(home)
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    with a_disk("bytes", tmp_path) as disk:
        yield disk


@pytest.fixture(params=["bytes", "inodes", "quota"])
def disk(request, tmp_path: Path) -> Iterator[Disk]:
    with a_disk(request.param, tmp_path) as disk:
        yield disk


def one_pass(run: Running) -> PassReport:
    return reconcile.run_pass([run.run], time.time())


def reason(run: Running) -> str:
    """Why it waits."""
    return status.observe(run.run)["reason"]


def finish(run: Running) -> None:
    """Let the run end; the audit must be clean."""
    run.pace(0)
    run.until(lambda: run.run.done() and not run.jobs(), 80, "the end of the run")
    report = elastic_here("audit", run.run.path, "--files", "--json")
    assert (report.exit_code, json.loads(report.stdout)["problems"]) == (0, []), report.output


def until_said(run: Running, words: str, meanwhile: Callable = lambda: None) -> None:
    """Wait until the reason in status has these words."""
    deadline = time.monotonic() + 20 * PATIENCE
    while words not in (said := reason(run)):
        assert time.monotonic() < deadline, f"not {words!r} but {said!r}\n{run.story()}"
        meanwhile()
        time.sleep(0.2)


def run_is_quiet(run: Running) -> None:
    """Wait until its workers have nothing to do but to wait."""

    def states() -> set[str]:
        return {slot.state for slot in run.slots().values()}

    wait_until(lambda: states() <= {"blocked", "waiting"}, 40, "all workers wait")


@pytest.mark.root
def test_a_full_disk_stops_everything_for_a_while_and_breaks_nothing(small_disk: Disk):
    settings = {"elastic.max": 1, "elastic.max_failures": 1}
    disk = small_disk
    with running(disk.folder, settings, samples=400, step_s=0.2) as run:
        run.workers(1)
        run.versions(1)
        trainers = run.pids("trainer")
        a_nearly_full_disk_stops_the_clock(run, disk)
        disk.fill()
        until_said(run, disk.short_of, meanwhile=disk.fill)
        assert str(disk.folder) in reason(run)
        run_is_quiet(run)
        disk.fill()  # also what was on its way then, and is gone by now
        version = run.version
        control = (run.run.path / "control.json").read_bytes()
        for command in (["scale", run.run.path, "--max", "3"], ["stop", run.run.path]):
            done = elastic_here(*command)
            assert done.exit_code == 1, (done.stdout, done.stderr)
            assert done.stderr.startswith("error: ")
        assert (run.run.path / "control.json").read_bytes() == control
        assert run.pids("trainer") == trainers
        # The trainer's agent wants a new attempt, for which there is no room.
        for pid in (*run.pids("master"), *trainers):
            os.kill(pid, signal.SIGKILL)
        others = second_master(run)  # a master that was queued, and starts on a full disk
        submitted = []
        for _ in range(5):
            reports = one_pass(run).runs
            submitted += [action.role for one in reports for action in one.actions]
            time.sleep(0.5)
        assert submitted in ([], ["master"])  # a block may have become free, for one note
        assert others.poll() is None
        assert disk.short_of in reason(run)
        assert run.version in (version, version + 1)
        disk.make_room()
        run.versions(2)
        finish(run)
        others.wait(20 * PATIENCE)
    assert run.events("fail") == []


def a_nearly_full_disk_stops_the_clock(run: Running, disk: Disk) -> None:
    """For as long as there is less than a version, or `checkpoint.min_free`, may need."""
    filler = disk.folder / "nearly"
    with filler.open("wb", buffering=0) as file:
        while (left := shutil.disk_usage(disk.folder).free - 500_000) > 0:
            file.write(bytes(min(1 << 16, left)))
    run.until(lambda: "no space on the filesystem of" in reason(run), 30, "status says why")
    version = run.version
    run_is_quiet(run)  # it has delivered, and a commit is due, or it cannot even deliver
    assert run.version <= version + 1  # which had its room before
    filler.unlink()
    run.versions(1)


@pytest.mark.root
def test_on_a_full_disk_a_submission_leaves_nothing_behind_and_a_writer_waits(
    disk: Disk, monkeypatch
):
    home = disk.folder
    config = home / "tiny.toml"
    (pace := home / "pace").write_text("0")
    config.write_text("\n".join(toml(SETTINGS | {"task.pace": str(pace)})))
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    for folder in ("runs", "registry/runs", "registry/local/jobs"):
        (home / folder).mkdir(parents=True)
    (home / "registry" / "local" / "lock").touch()
    disk.fill()
    done = elastic_here("submit", config, "--no-try")
    assert done.exit_code == 1, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert str(home) in done.stderr
    assert "ELASTIC_RUNS" in done.stderr
    left = [path for folder in ("runs", "registry/runs") for path in (home / folder).iterdir()]
    assert left == []
    told = []

    def tell(error: Exception) -> None:
        told.append(f"{error} {RunDir(home).shortage(1 << 20)}")
        disk.make_room()

    file = home / "delta"
    durable.until_written(lambda: durable.write_atomic(file, bytes(1 << 20)), lambda: False, tell)
    assert (file.stat().st_size, len(told)) == (1 << 20, 1)
    assert disk.short_of in told[0]
    submission.check(configuration.load(config), home / "runs")


# ---- limits of a process ------------------------------------------------------------------------


@contextlib.contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    """A process that runs has a lower limit for a while."""
    before, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    yield
    resource.prlimit(pid, kind, (before, hard))


def test_a_limit_of_a_process_is_named_and_waited_out(tmp_path: Path):
    settings = {"elastic.max": 1, "elastic.max_failures": 1}
    with running(tmp_path, settings, samples=500, step_s=0.1) as run:
        run.workers(1)
        run.versions(1)
        trainer, master = run.pids("trainer"), run.pids("master")
        run.hold()  # not while it reads a version
        with limited(trainer[0], resource.RLIMIT_NOFILE, 3):
            run.go_on()
            until_said(run, "slots 0: cannot write, and wait: [Errno 24] Too many open files")
        run.versions(1)
        with limited(master[0], resource.RLIMIT_FSIZE, 256):
            until_said(run, "File too large")
            assert f"waiting to write to {run.run.path}: " in reason(run)
        run.versions(1)
        assert (run.pids("trainer"), run.pids("master")) == (trainer, master)
        resource.prlimit(master[0], resource.RLIMIT_NOFILE, (3, 3))  # for good: it cannot go on
        run.until(lambda: run.pids("master") not in ([], master), 40, "another master")
        assert "Too many open files" in (run.run.path / "logs" / "master.log").read_text()
        run.versions(1)
        assert run.pids("trainer") == trainer
        finish(run)


def test_a_synchronous_run_is_not_done_before_its_last_step_is_on_the_disk(tmp_path: Path):
    settings = {"run.mode": "sync", "elastic.max": 1, "train.batch_size": 2,
                "sync.global_batch_size": 10, "checkpoint.interval": "10 steps"}
    with running(tmp_path, settings, samples=300, step_s=0.1) as run:
        run.until(lambda: steps(run.run), 60, "a checkpoint")
        saved = steps(run.run)
        rank = run.pids("elastic.train.start trainer")[0]
        with limited(rank, resource.RLIMIT_FSIZE, 2048):  # DONE fits, and a checkpoint does not
            run.pace(0)
            until_said(run, "not saved")
            last = "checkpoint of step 30 not saved"
            log = run.run.path / "logs" / "trainer-0000.log"
            run.until(lambda: last in log.read_text(), 60, "the last step is taken, and not saved")
            assert not run.run.done()
            assert steps(run.run) == saved
        finish(run)
        assert max(steps(run.run)) == 30
        assert len(run.events("restore")) == 1  # nothing was trained again


# ---- a slow filesystem --------------------------------------------------------------------------

SLOW = """
import os, time

def slow(real):
    def call(*args, **kwargs):
        time.sleep(0.1)
        return real(*args, **kwargs)
    return call

for name in ("fsync", "link", "rename", "replace", "mkdir"):
    setattr(os, name, slow(getattr(os, name)))
"""


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_a_slow_filesystem_costs_time_and_nothing_else(tmp_path: Path, mode: str):
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW)
    settings = {"run.mode": mode, "elastic.max": 1, "checkpoint.interval": "10 steps"}
    with running(tmp_path, settings, first=slow, samples=60) as run:
        finish(run)
    bad = [event for event in run.events() if event["kind"] in ("lost", "fail", "hang", "reject")]
    assert bad == []


# ---- logs ---------------------------------------------------------------------------------------

NOISE = """
import os, sys, time
from pathlib import Path
here = Path(__file__).parent
for _ in range(50):
    os.write(2, b"x" * 1_000_000)
os.write(2, bytes(range(256)) * 1000)
for number in range(12_000):
    print(f"line {number}", file=sys.stderr)
(here / "said").touch()
while not (here / "go").exists():
    time.sleep(0.05)
sys.exit("last words")
"""


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_logs_beyond_all_measure_are_copied_in_bounded_memory(tmp_path: Path, mode: str):
    (tmp_path / "noise.py").write_text(NOISE)
    command = [sys.executable, str(tmp_path / "noise.py")]
    settings = {"run.mode": mode, "run.command": command, "elastic.max": 1,
                "elastic.max_failures": 1, "sync.crash_retries": 0}
    with running(tmp_path, settings) as run:
        run.until((tmp_path / "said").exists, 60, "all is said, so all has been read")
        copier = run.pids("agent" if mode == "local" else "elastic.sync.launch")[0]
        words = Path(f"/proc/{copier}/status").read_text().split()
        peak_kb = int(words[words.index("VmHWM:") + 1])
        assert peak_kb < 90_000, peak_kb
        (tmp_path / "go").touch()
        failed = run.until_failed(90)
        assert failed["detail"].rstrip().endswith("last words")
        assert "line 11999" in failed["detail"]
        assert len(failed["detail"]) < 10_000
        for command in (["status", run.run.path, "--json"], ["status", run.run.path],
                        ["logs", run.run.path, "-n", "3"]):
            began = time.monotonic()
            done = elastic_here(*command)
            assert "last words" in done.stdout
            assert len(done.stdout) < 100_000
            assert time.monotonic() - began < 5 * PATIENCE


def test_status_reads_the_end_of_the_events_and_not_all_of_them(run):
    with (run.path / "events.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # a hole: nobody could read it
    for number in range(30):
        run.event("many", number=number)
    assert [event["number"] for event in run.events(last=20)] == [*range(10, 30)]
