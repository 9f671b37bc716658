"""A run on the local scheduler, with a registry and a run root of its own, that always ends.

    with running(tmp_path, max=2, samples=2000) as run:
        run.until(lambda: run.version >= 3, 30, "three versions")
        run.kill("trainer", 0)
        run.finish()

`until` calls the reconcile pass as cron would. At the end everything that carries the run's folder
in its environment is killed, whatever the test did.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.base import proc
from elastic.base.durable import checksum, replace_quickly, to_json, write_atomic
from elastic.base.errors import TryAgain
from elastic.jobs import reconcile
from elastic.jobs.history import Job
from elastic.jobs.sched_local import LocalScheduler
from elastic.run.audit import audit
from elastic.run.membership import WORKING, Slot
from elastic.run.records import Commit
from elastic.run.rundir import Endpoint, RunDir
from elastic.saved.drafts import settle
from helpers import PATIENCE, ROOT, elastic, environment, wait_until
from stores import BothSides

TESTS = Path(__file__).resolve().parent
PASS_S = 0.5  # between two passes of reconcile
# A master may not FLUSHALL. All keys at once, as nobody else puts any there.
EMPTY = """
local keys = redis.call('SCAN', 0, 'COUNT', 1000000)[2]
for _, key in ipairs(keys) do redis.call('UNLINK', key) end
return #keys
"""
LOOK_S = 0.1  # between two looks at a condition: one may ask Redis, or every process there is
SETTINGS = {
    "run.task": "tiny_task:Tiny",
    "run.scheduler": "local",
    "elastic.backoff": "0.2s",
    "elastic.reconcile_interval": "60s",
    "train.batch_size": 4,
    "train.threads": 1,
    "train.epochs": 1,
    "train.learning_rate": 0.01,
    "local_sgd.inner_steps": 5,
    "local_sgd.cold_start": 0,
    "local_sgd.min_deadline": "1s",
    "local_sgd.last_call": "1s",
    "checkpoint.min_free": "1mb",
    "health.heartbeat": "0.2s",
    "health.lease": "3s",
    "local_scheduler.grace": "30s",
}


class NoLease(KeyError):
    """The slot has none, or there is no master to ask."""


class Leases(dict[int, Slot]):
    def __missing__(self, number: int):
        raise NoLease(number)


class Running:
    """A submitted run and what a test does to it."""

    def __init__(self, home: Path, run: RunDir, pace: Path):
        self.home, self.run, self.config = home, run, run.config()
        self.scheduler = LocalScheduler(self.config, home / "registry" / "local")
        self._pace = pace
        self._next_pass = 0.0
        self._commits: dict[int, bytes] = {}
        self._held: list[int] = []
        self._asked: BothSides | None = None
        self._asked_at: Endpoint | None = None

    # ---- what there is

    @property
    def version(self) -> int:
        return self.run.commits.newest_version()

    def folder(self, version: int) -> Path:
        """Of a version's files. It gets its name here, if it has none yet."""
        folder = self.run.version_path(version)
        settle(folder, self.run.commits.of(version).writer)
        return folder

    def events(self, kind: str = "") -> list[dict]:
        return [event for event in self.run.events() if kind in ("", event["kind"])]

    def commits(self) -> list[Commit]:
        return list(self.run.commits.all())

    @contextlib.contextmanager
    def store(self) -> Iterator[BothSides]:
        store = BothSides.open(self.run, 5.0)
        try:
            yield store
        finally:
            store.close()

    def slots(self) -> dict[int, Slot]:
        """Slots whose lease is valid; none while no master can be asked."""
        try:
            return Leases(self._connected().slots())
        except TryAgain:
            return Leases()

    def _connected(self) -> BothSides:
        """The newest master's store. It stays open: to connect costs 29 ms of CPU, with TLS."""
        if self._asked is None or self._asked_at != self.run.endpoint():
            self._asked_at = self.run.endpoint()
            self._asked = BothSides.open(self.run, 5.0)
        return self._asked

    def slot(self, number: int) -> Slot:
        """One of them, once it is there."""
        return self.until(lambda: self.slots()[number], 30, f"the lease of slot {number}")

    def jobs(self) -> dict[tuple[str, int], Job]:
        """(role, slot) -> its running job."""
        running = [job for job in self.scheduler.jobs() if job.state == "RUNNING"]
        return {job.place: job for job in running}

    def pids(self, kind: str) -> list[int]:
        """The processes of a kind: trainer, agent, master or redis, or a word of their command."""
        known = {
            "trainer": "elastic.train.start worker",
            "master": "elastic.train.start master",
            "agent": "elastic.local.worker.agent",
            "redis": "redis-server",
        }
        words = known.get(kind, kind)
        lines = ((pid, command_line(pid)) for pid in members(self.home))
        found = [pid for pid, line in lines if words in line and "sbatch/rank.sh" not in line]
        # Until it runs a command of its own, what one of them starts looks like it.
        once = kind in ("master", "agent", "redis")
        return [pid for pid in found if not (once and parent(pid) in found)]

    def trainer_of(self, slot: int) -> int:
        return self.slot(slot).pid

    # ---- what happens to it

    def hold(self, number: int = 0) -> None:
        """Stop a slot's ranks amid a round on the newest version. The round does not close without
        them, if the slot is the only one, or if `min_deadline` and `stall_after` are long."""
        self.pace(0.3, number)

        def is_amid_a_round() -> bool:
            if not self._trains(number):
                return False
            self._held = self._ranks(number)
            self._signal_held(signal.SIGSTOP)
            for _ in range(3):  # the third beat tells what was said before the stop
                last = self.slot(number).beat
                self.until(lambda last=last: self.slots()[number].beat > last, 30, "a beat")
            if self._held and self._trains(number):
                return True
            self._signal_held(signal.SIGCONT)
            return False

        self.until(is_amid_a_round, 60, "the middle of a round")

    def go_on(self) -> None:
        """Let the ranks that are held go on, at the pace of the others."""
        self.even_pace()
        self._signal_held(signal.SIGCONT)

    def _trains(self, number: int) -> bool:
        slot = self.slots()[number]
        return slot.state == "training" and slot.step > 0 and slot.version == self.version

    def _ranks(self, number: int) -> list[int]:
        agent = parent(self.trainer_of(number))
        return [pid for pid in self.pids("trainer") if parent(pid) == agent]

    def _signal_held(self, number: int) -> None:
        for pid in self._held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pace(self, step_s: float, slot: int | None = None) -> None:
        """From now on an inner step takes so long (of one slot, or of all the others)."""
        path = self._pace if slot is None else self._pace.with_name(f"{self._pace.name}.{slot}")
        replace_quickly(path, memoryview(str(step_s).encode()))

    def even_pace(self) -> None:
        """No slot has a pace of its own any more."""
        for path in self._pace.parent.glob(f"{self._pace.name}.*"):
            path.unlink()

    def set_capacity(self, gpus: int) -> None:
        """From now on this machine has so many GPUs. Ends no job."""
        write_atomic(self.scheduler.state / "capacity.json", to_json({"gpus": gpus}))

    def flush(self) -> None:
        """Empty its Redis, once the master has said there who it is."""
        def is_emptied() -> bool:
            with self.store() as store:
                return store._redis.register_script(EMPTY)() > 0

        wait_until(is_emptied, 30, "Redis is emptied")

    def reconcile(self) -> None:
        """One pass, if it is time for one."""
        if time.monotonic() >= self._next_pass:
            report = reconcile.run_pass([self.run], time.time())
            assert not report.errors, report.errors
            self._next_pass = time.monotonic() + PASS_S

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> object:
        """Reconcile until `condition()` is true; its value."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        while True:
            self.reconcile()
            with contextlib.suppress(NoLease, TryAgain):
                if value := condition():
                    return value
            if failed := self.run.failed():
                pytest.fail(f"the run failed, waiting for: {what}\n{failed}\n{self.story()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s} s: {what}\n{self.story()}")
            time.sleep(LOOK_S)

    def until_failed(self, timeout_s: float) -> dict:
        """Reconcile until the run has failed and its jobs are gone; failed.json."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        while not self.run.failed() or self.jobs():
            assert time.monotonic() < deadline, f"it does not fail\n{self.story()}"
            self.reconcile()
            time.sleep(LOOK_S)
        return self.run.failed()

    def versions(self, more: int = 2, timeout_s: float = 40) -> None:
        """Wait for so many further versions."""
        goal = self.version + more
        self.until(lambda: self.version >= goal, timeout_s, f"version {goal}")

    def workers(self, count: int = 2) -> None:
        """Wait until so many workers have begun."""
        def are_there() -> bool:
            slots = self.slots().values()
            begun = [slot for slot in slots if slot.state in WORKING and slot.version >= 0]
            return len(begun) == count

        self.until(are_there, 60, f"{count} workers train")

    def ended(self, job_id: str, timeout_s: float = 40) -> dict:
        """Wait for a job's exit record."""
        def record() -> dict | None:
            found = self.run.jobs.ending(job_id) or {}
            return found if found.get("state") == "ended" else None

        return self.until(record, timeout_s, f"the exit record of job {job_id}")

    def kill(self, kind: str, number: int = signal.SIGKILL) -> int:
        """Signal the first process of that kind; its pid."""
        pid = self.until(lambda: self.pids(kind), 30, f"a process of kind {kind}")[0]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def witness(self) -> None:
        """Remember every commit; none seen before may have changed."""
        for path in sorted((self.run.path / "commits").glob("[0-9]*.json")):
            body = path.read_bytes()
            assert self._commits.setdefault(int(path.stem), body) == body, path

    def finish(self, timeout_s: float = 80) -> dict:
        """Let the run end; the audit's report, which must be clean."""
        self.pace(0)
        self.even_pace()
        self.until(lambda: self.run.done() and not self.jobs(), timeout_s, "the end of the run")
        return self.audit()

    def audit(self) -> dict:
        self.witness()
        version = None
        while version != self.run.commits.newest_version():  # else files were pruned
            version = self.run.commits.newest_version()
            report = audit(self.run.path, self.config.checkpoint.keep, checksum)
        assert not report["problems"], report["problems"]
        if self.run.done() and self.config.train.epochs:
            samples = self.run.commits.of(0).dataset_samples * self.config.train.epochs
            assert report["committed"] == samples
        return report

    def story(self) -> str:
        """The last events and log lines, for a test that fails."""
        parts = [json.dumps(event) for event in self.run.events(last=60)]
        for path in sorted((self.run.path / "logs").glob("*.log")):
            parts += [f"---- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(parts)


@contextlib.contextmanager
def running(
    home: Path, settings: dict | None = None, first: Path = TESTS, **task
) -> Iterator[Running]:
    """Submit a run of tiny_task; `settings` are configuration keys, `task` the [task] table, and
    `first` is where its processes look for modules first."""
    pace = home / "pace"
    pace.write_text(str(task.pop("step_s", 0.02)))
    settings = {**SETTINGS, **{f"task.{key}": value for key, value in task.items()},
                "task.pace": str(pace), **(settings or {})}
    config = home / "tiny.toml"
    config.write_text("".join(f"{line}\n" for line in toml(settings)))
    before = os.environ.copy()
    os.environ.update(env := environment(home, PYTHONPATH=f"{first}:{TESTS}"))
    try:
        done = elastic("submit", config, "--no-try", "--name", "tiny", "--parsable", env=env)
        assert done.returncode == 0, done.stderr
        yield Running(home, RunDir(home / "runs" / "tiny"), pace)
    finally:
        os.environ.clear()
        os.environ.update(before)
        kill_all(home)


def toml(settings: dict) -> Iterator[str]:
    """Lines of a file that sets "section.key" to values."""
    for section in dict.fromkeys(key.partition(".")[0] for key in settings):
        yield f"[{section}]"
        for key, value in settings.items():
            if key.partition(".")[0] == section:
                yield f"{key.partition('.')[2]} = {json.dumps(value)}"


def second_master(run: Running, first: Path = TESTS) -> subprocess.Popen:
    """A master beside the one that reconcile started. `first`: as for `running`."""
    return subprocess.Popen(
        [str(ROOT / "bin" / "elastic"), "master", str(run.run.path)],
        env={**environment(run.home, PYTHONPATH=f"{first}:{TESTS}"), "ELASTIC_JOB_ID": "by-hand"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )


# ---- processes


def members(home: Path) -> list[int]:
    """Processes that carry `home` in their environment, and their descendants; not this one."""
    mark, parents, owned = str(home).encode(), {}, set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if stat[0] not in "ZX":
                parents[int(name)] = int(stat[1])
                if mark in Path("/proc", name, "environ").read_bytes():
                    owned.add(int(name))
        except OSError:  # it has just ended
            continue
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in owned} - owned
        grown = bool(children)
        owned |= children
    return sorted(owned - {os.getpid()})


def command_line(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def parent(pid: int) -> int:
    process = proc.Process.of(pid)
    return process.parent if process else 0


def kill_all(home: Path) -> None:
    """End every process that belongs to `home`, those included that are being started."""
    deadline = time.monotonic() + 20 * PATIENCE
    while pids := members(home):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"cannot be killed: {pids}"
        time.sleep(0.05)


if __name__ == "__main__":
    kill_all(Path(sys.argv[1]))
