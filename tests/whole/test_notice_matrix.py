"""What a preemption costs, for every way in which a Slurm can be set up to announce it.

    pytest -s tests/whole/test_notice_matrix.py    a part that covers all pairs

With ELASTIC_FULL_MATRIX=1: all 72 (make matrix)

A cell: GraceTime of the partition, preempt_send_user_signal, the job's --signal, the program, and
the partition's PreemptMode. Every cell is a run of its own, on a real Slurm of this machine; cells
of one slurmctld setting are preempted at the same time. A table says what each lost, and what
happened next.
"""

import itertools
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from counting import EVERY
from elastic.base.durable import read_json
from elastic.jobs.sched_slurm import SlurmScheduler
from elastic.lab.sandbox import Sandbox
from elastic.run.rundir import RunDir
from helpers import PATIENCE, elastic, elastic_here
from running import SETTINGS, TESTS, toml
from slurm_sandbox import nodes_and_jobs

pytest_plugins = ["slurm_sandbox"]
pytestmark = pytest.mark.slurm

PATIENCE_S = 240.0 * PATIENCE
CRON_S = 3.0
GRACE_S = 30  # who leaves in time pays nothing for it
INTERVAL = 40  # steps between two checkpoints; inner steps of a round
EVERY_CELL = os.environ.get("ELASTIC_FULL_MATRIX") == "1"
PAIRS = [  # every value of an axis meets every value of every other
    (0, "off", "", "trainer", "REQUEUE"),
    (GRACE_S, "on", "", "command", "REQUEUE"),
    (0, "on", "", "worker", "CANCEL"),
    (GRACE_S, "off", "USR1@60", "trainer", "REQUEUE"),
    (GRACE_S, "on", "USR1@60", "command", "CANCEL"),  # USR1 to a program that knows only TERM
    (0, "off", "USR1@60", "worker", "REQUEUE"),
    (0, "on", "B:USR1@60", "trainer", "CANCEL"),
    (0, "off", "B:USR1@60", "command", "REQUEUE"),
    (GRACE_S, "off", "B:USR1@60", "worker", "CANCEL"),
]
COMMON = {
    **SETTINGS,
    "run.scheduler": "slurm",
    "slurm.master_partition": "cpu",
    "slurm.gpus_per_node": 1,
    "local_sgd.inner_steps": INTERVAL,
    "checkpoint.interval": f"{INTERVAL} steps",
    "task.samples": 1_000_000,
    "elastic.reconcile_interval": "60s",
    "health.lease": "10s",
    "health.hang_timeout": "200s",
}
OF_PROGRAM = {
    "trainer": {"run.mode": "sync", "sync.global_batch_size": 4},
    "command": {"run.mode": "sync"},
    "worker": {"run.mode": "local"},
}


def all_cells() -> list[tuple]:
    signals, programs = ("", "USR1@60", "B:USR1@60"), ("trainer", "command", "worker")
    modes = ("REQUEUE", "CANCEL")
    return list(itertools.product((0, GRACE_S), ("off", "on"), signals, programs, modes))


@dataclass
class Cell:
    """One run, what happened to it, and what that cost."""

    name: str
    run: RunDir
    grace_s: int
    user_signal: str
    signal: str
    program: str
    mode: str
    job_id: str = ""  # that is preempted
    node: str = ""
    gone_at: float = 0.0
    outcome: str = ""
    lost: int = -1
    back_s: float = field(default=0.0)

    @property
    def role(self) -> str:
        return "worker" if self.program == "worker" else "trainer"

    def steps(self) -> list[int]:
        """The steps that were taken, in this order, by whatever counts them."""
        if self.program == "command":
            path = self.run.path / "steps.log"
            return [int(line) for line in path.read_text().split()] if path.exists() else []
        path = self.run.path / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def moved(self) -> int:
        """Grows with the work that is done."""
        if self.program != "worker":
            return len(self.steps())
        return sum(event["kind"] == "delta" for event in self.run.events())

    def steps_lost(self) -> int:
        """Trained and not kept: trained again later, or never part of a delta."""
        if self.program != "worker":
            steps = self.steps()
            return len(steps) - len(set(steps))
        record = read_json(self.run.path / "exit" / f"{self.job_id}.json")
        mine = [e for e in self.run.events() if e.get("attempt") == record["attempt"]]
        kept = sum(event["steps"] for event in mine if event["kind"] == "delta")
        if record["state"] == "ended":  # it has said how many it did
            return record["steps"] - kept
        return next(event["steps"] for event in mine if event["kind"] == "lost")

    def row(self) -> str:
        words = (self.program, self.grace_s, self.user_signal, self.signal or "none", self.mode)
        left = "".join(f"{word!s:<11}" for word in words)
        return f"{left}{self.outcome:<10}{self.lost:>4}{self.back_s:>9.1f} s"


HEAD = "program    grace      user_sig   --signal   mode       end       lost   back in"


class Site:
    """A Slurm with a partition for each GraceTime and PreemptMode, and the user's cron."""

    def __init__(self, box: Sandbox, home: Path, nodes: int):
        self.box, self.home = box, home
        self.cron = {"HOME": str(home), "PATH": "/usr/bin:/bin", "ELASTIC_PYTHON": sys.executable}
        self._asks = SlurmScheduler({**os.environ, **box.environment()})
        self.pace = home / "pace"
        self.pace.write_text("0.1")
        for grace_s, mode in itertools.product((0, GRACE_S), ("REQUEUE", "CANCEL")):
            self.box.run(
                "scontrol", "create", f"PartitionName=g{grace_s}{mode}", f"Nodes=n[1-{nodes}]",
                "PriorityTier=1", f"PreemptMode={mode}", f"GraceTime={grace_s}",
            )

    def submit(self, number: int, axes: tuple) -> Cell:
        grace_s, user_signal, signal, program, mode = axes
        run = RunDir(self.home / "runs" / f"cell{number}")
        settings = {
            **COMMON, **OF_PROGRAM[program], "slurm.partition": f"g{grace_s}{mode}",
            "slurm.signal": signal, "task.pace": str(self.pace),
        }
        if program == "command":
            script = [sys.executable, str(TESTS / "counting.py")]
            settings["run.command"] = [*script, "{checkpoints}", str(self.pace), "{resume}"]
            settings.pop("task.pace")
        path = self.home / f"{run.name}.toml"
        path.write_text("".join(f"{line}\n" for line in toml(settings)))
        environment = {
            **self.cron, **self.box.environment(), "PATH": os.environ["PATH"],
            "ELASTIC_RUNS": str(run.path.parent), "ELASTIC_SITE": os.devnull,
        }
        done = elastic("submit", path, "--max", 1, "--parsable", "--no-try", env=environment)
        assert done.returncode == 0, done.stderr
        return Cell(run.name, run, *axes[:1], user_signal, signal, program, mode)

    def until(self, condition, what: str) -> None:
        """Let time pass, with its cron, until `condition()` is true."""
        deadline, next_pass = time.monotonic() + PATIENCE_S, 0.0
        while not condition():
            if time.monotonic() >= next_pass:
                done = elastic_here("reconcile")
                assert done.exit_code in (0, 75), done.output
                next_pass = time.monotonic() + CRON_S
            if time.monotonic() > deadline:
                logs = [log.read_text()[-2000:] for log in self.home.glob("runs/*/logs/*.log")]
                pytest.fail("\n".join([f"not: {what}", *logs, nodes_and_jobs(self.box)]))
            time.sleep(0.5)

    def jobs(self) -> dict[tuple[str, str], list]:
        """Jobs that have not ended, by run and role, running ones first."""
        found: dict[tuple[str, str], list] = {}
        for job in self._asks.jobs():
            if not job.ended:
                found.setdefault((job.run, job.role), []).append(job)
        for jobs in found.values():
            jobs.sort(key=lambda job: job.state != "RUNNING")
        return found

    def preempt(self, cell: Cell) -> None:
        job = self.jobs()[cell.name, cell.role][0]
        cell.job_id, cell.node, cell.gone_at = job.job_id, job.node, time.time()
        where = ("--partition=high", f"--nodelist={job.node}", "--exclusive", "--output=/dev/null")
        self.box.run("sbatch", "--parsable", "--chdir=/", *where, "--wrap=exec sleep 1")

    def has_ended(self, cell: Cell) -> bool:
        for event in cell.run.events():
            if event["kind"] == "end" and event["job_id"] == cell.job_id:
                cell.outcome = event["outcome"]
        return bool(cell.outcome)

    def clear(self, cells: list[Cell]) -> None:
        """Make room for the next ones."""
        for cell in cells:
            environment = {**self.cron, **self.box.environment()}
            assert elastic("stop", cell.name, "--now", env=environment).returncode == 0
        self.until(lambda: not self.jobs(), "all are gone")


def play(site: Site, cells: list[Cell]) -> None:
    """All at the same time: train past a checkpoint, lose the job, come back."""
    enough = {"trainer": INTERVAL + 5, "command": EVERY + 5, "worker": 2}
    site.until(lambda: all(c.moved() >= enough[c.program] for c in cells), "all train")
    for cell in cells:
        site.preempt(cell)
    site.until(lambda: all([site.has_ended(cell) for cell in cells]), "all have lost their job")
    before = {cell.name: cell.moved() for cell in cells}

    def back() -> bool:
        for cell in cells:
            if not cell.back_s and cell.moved() > before[cell.name]:
                cell.back_s = time.time() - cell.gone_at
        return all(cell.back_s for cell in cells)

    site.until(back, "all train again")
    for cell in cells:
        cell.lost = cell.steps_lost()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("user_signal", ["off", "on"])
def test_what_a_preemption_costs(new_sandbox, tmp_path, user_signal, monkeypatch):
    monkeypatch.setenv("ELASTIC_HOME_DIR", str(tmp_path / ".elastic"))
    wanted = [axes for axes in (all_cells() if EVERY_CELL else PAIRS) if axes[1] == user_signal]
    shutil.copy(TESTS / "tiny_task.py", tmp_path)
    settings = ["SlurmdTimeout=30", "MinJobAge=3600", "KillWait=5"]
    if user_signal == "on":
        settings.append("SlurmctldParameters=preempt_send_user_signal")
    nodes = min(7, len(wanted))  # a part that covers all pairs: at once
    box = new_sandbox(nodes=nodes, gpus=1, settings=tuple(settings))
    site, played = Site(box, tmp_path, nodes), []
    for start in range(0, len(wanted), nodes):
        part = list(enumerate(wanted))[start : start + nodes]
        cells = [site.submit(number, axes) for number, axes in part]
        play(site, cells)
        played += cells
        if start + nodes < len(wanted):
            site.clear(cells)
    print("\n".join(["", HEAD, *(cell.row() for cell in played)]))
    for cell in played:
        assert not cell.run.failed(), cell.row()
        if cell.grace_s:
            assert (cell.outcome, cell.lost) == ("yielded", 0), cell.row()
        else:  # KillWait is all there is
            assert 0 <= cell.lost <= INTERVAL, cell.row()
