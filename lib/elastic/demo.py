"""Two minutes in the life of a run, for reading and for running: `make demo`, `make demo-slurm`.

`story` is the manual in one page: start a run, let cron reconcile it, and while it trains kill a
trainer, add a worker, preempt a job with notice, kill the master. It ends with the loss curve, the
audit, the validation loss, and what each fault cost. Exit 0 means that all of it held.

Everything lives under ./build/demo (run, registry, logs), nothing under ~/.elastic. With --slurm
the jobs are those of a private Slurm on this machine. Ctrl-C ends all of it.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from elastic import config as configuration
from elastic import sandbox, signals, submission, views
from elastic.audit import audit
from elastic.cli import jobs_of, validate, xxh3
from elastic.errors import ElasticError, TryAgain
from elastic.reconcile import run_pass
from elastic.rundir import RunDir, registered
from elastic.sched import open_scheduler
from elastic.store import Store

BOUND = 3.3  # nats per byte: untrained 5.55, knowing the frequency of each byte 3.35
LONGEST_S = 600.0
CRON_S = 2.0
SETTINGS = [
    "run.name=demo",
    "elastic.min=2",
    "elastic.max=4",
    "checkpoint.keep_every=1000000",  # version 0 stays, to compare with
]
ON_SLURM = ["run.scheduler=slurm", "slurm.partition=preempt", "slurm.master_partition=cpu"]
TOLD = ("submit", "join", "end", "lost", "preempt", "restart", "master", "redis-lost", "reject",
        "leave", "scale", "fail", "done")  # fmt: skip


def story(demo: "Demo") -> bool:
    """The demo from beginning to end; True if everything held."""
    demo.say("a user submits a run on 2 to 4 GPUs:  bin/elastic-submit etc/demo.toml")
    run = demo.start()

    demo.train_until(version=4)
    with demo.fault("SIGKILL of a trainer", demo.busiest()) as victim:
        os.kill(victim.pid, signal.SIGKILL)

    demo.train_until(version=8)
    demo.say("one more worker:  bin/elastic-scale demo --max 5")
    run.set_control(max=5)

    demo.train_until(version=12)
    with demo.fault("preemption with notice", demo.busiest()) as victim:
        demo.preempt(victim.job_id)

    demo.train_until(version=16)
    with demo.fault("SIGKILL of the master", None):
        demo.kill_master()

    demo.train_until(done=True)
    return demo.conclude()


@dataclass
class Fault:
    """Something bad that was done to the run, and what there was to lose at that moment."""

    name: str
    time: float = 0.0
    version: int = 0
    pid: int = 0
    job_id: str = ""
    steps: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, attempt) -> steps

    def cost(self, commits: list[dict]) -> tuple[float, int]:
        """(seconds until the next commit, steps that are in no commit)."""
        after = [commit for commit in commits if commit["time"] > self.time]
        saved = {
            (delta["slot"], delta["attempt"]) for commit in after for delta in commit["deltas"]
        }
        lost = sum(steps for owner, steps in self.steps.items() if owner not in saved)
        return (after[0]["time"] - self.time if after else float("nan")), lost


class Demo:
    """The run, whoever plays cron, and the record of what was done to it."""

    def __init__(self, box: sandbox.Sandbox | None, notice: signals.Notice):
        self.box, self.notice = box, notice
        self.began = time.time()
        self.faults: list[Fault] = []
        self._told = 0
        self._next_pass = 0.0

    # ---- what the story does

    def start(self) -> RunDir:
        settings = [*SETTINGS, *(ON_SLURM if self.box else ["run.scheduler=local"])]
        file = configuration.elastic_home() / "etc" / "demo.toml"
        self.config = configuration.load(file, settings)
        submission.check(self.config, configuration.runs_root())
        self.run = submission.start(self.config, configuration.runs_root())
        self.scheduler = open_scheduler(self.config.run.scheduler, self.config)
        return self.run

    def train_until(self, version: int = 0, done: bool = False) -> None:
        """Play cron, and tell what happens, until the version is committed (or the run done)."""
        while not (self.run.done() or (not done and self.run.newest_version() >= version)):
            self._breathe()
            if failed := self.run.failed():
                raise ElasticError(f"the run failed: {failed['reason']}", failed["detail"])
        self._tell_events()

    def busiest(self) -> Fault:
        """The live worker with the most steps in its round: it has the most to lose."""
        while True:
            with contextlib.suppress(TryAgain), contextlib.closing(Store.open(self.run)) as store:
                slots = [slot for slot in store.slots().values() if slot.state == "training"]
                if slots:
                    most = max(slots, key=lambda slot: slot.step)
                    steps = {(most.slot, most.attempt): most.step}
                    return Fault("", pid=most.pid, job_id=most.job_id, steps=steps)
            self._breathe()

    @contextlib.contextmanager
    def fault(self, name: str, victim: Fault | None) -> Iterator[Fault]:
        fault = victim or Fault(name, steps=self._steps_in_flight())
        fault.name, fault.version = name, self.run.newest_version()
        slots = ", ".join(
            f"slot {slot} at step {steps}" for (slot, _), steps in fault.steps.items()
        )
        self.say(f"{name} ({slots})")
        fault.time = time.time()
        self.faults.append(fault)
        yield fault

    def preempt(self, job_id: str) -> None:
        if self.box:  # a job of higher priority takes a node; Slurm chooses whose
            self.box.preempt(nodes=1, seconds=10)
        else:
            self.scheduler.preempt(job_id)

    def kill_master(self) -> None:
        for job in jobs_of(self.run, self.scheduler):
            if "/master/" in job.name:
                self.scheduler.cancel(job.job_id, now=True)

    # ---- meanwhile

    def _breathe(self) -> None:
        """A moment of waiting: reconcile when it is time, tell events, notice Ctrl-C."""
        if time.time() >= self._next_pass:
            run_pass([self.run], time.time())
            self._next_pass = time.time() + CRON_S
        self._tell_events()
        if self.notice:
            raise KeyboardInterrupt
        if time.time() - self.began > LONGEST_S:
            raise ElasticError(f"the demo is not over after {LONGEST_S:.0f} s", str(self.run.path))
        time.sleep(0.1)

    def _tell_events(self) -> None:
        events = self.run.events()
        for event in events[self._told :]:
            if event["kind"] in TOLD:
                print(f"{event['time'] - self.began:6.1f}s  {views.event_line(event)[9:]}"[:98])
            elif event["kind"] == "outer-step":
                print(
                    f"{event['time'] - self.began:6.1f}s  version {event['version']:>3}  "
                    f"loss {event['loss']:.3f}  {event['workers']} workers  {event['reason']}"
                )
        self._told = len(events)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:6.1f}s  ## {text}", flush=True)

    def _steps_in_flight(self) -> dict[tuple[int, int], int]:
        with contextlib.closing(Store.open(self.run)) as store:
            return {(slot.slot, slot.attempt): slot.step for slot in store.slots().values()}

    # ---- the end

    def conclude(self) -> bool:
        """Print curve, audit, validation loss and costs; True if nothing was lost or wrong."""
        commits = list(self.run.commits())
        points = [(commit["tokens"], commit["loss"]) for commit in commits[1:]]
        print(f"\ntraining loss (nats per byte) against tokens\n{views.loss_curve(points)}\n")
        report = audit(self.run.path, self.config.checkpoint.keep, xxh3)
        views.console().print(views.audit_view(self.run.name, report))
        first, last = (validate(self.run, c)["validation_loss"] for c in (commits[0], commits[-1]))
        print(
            f"validation loss: version 0 {first:.3f}, version {len(commits) - 1} {last:.3f}, ",
            end="",
        )
        print(f"to be below {BOUND}: {'ok' if last < BOUND else 'WRONG'}\n")
        pauses = [b["time"] - a["time"] for a, b in zip(commits, commits[1:], strict=False)]
        print(f"what the faults cost (a round usually takes {median(pauses):.1f} s)")
        for fault in self.faults:
            wait_s, lost = fault.cost(commits)
            print(f"  {fault.name:<24} next commit after {wait_s:4.1f} s, {lost:3} steps lost")
        print(f"\nthe run: {self.run.path}\nit took {time.time() - self.began:.0f} s")
        return not report["problems"] and last < BOUND


# ---- the stage


def end_all_jobs() -> None:
    """Stop every run of this registry and wait until no job is left."""
    for run in registered():
        config = run.config()
        scheduler = open_scheduler(config.run.scheduler, config)
        run.set_control(state="stopped")
        for job in jobs_of(run, scheduler):
            scheduler.cancel(job.job_id, now=True)
        while jobs_of(run, scheduler):
            time.sleep(0.2)


def prepare(place: Path, on_slurm: bool) -> None:
    """Lock ./build/demo, start the sandbox, and become `perform` in an environment of its own."""
    place.mkdir(parents=True, exist_ok=True)
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ElasticError(f"another demo runs in {place}", "run this one elsewhere") from None
    os.set_inheritable(lock, True)  # held until the demo ends
    environment = configuration.environment()
    environment |= {"ELASTIC_HOME_DIR": str(place / "home"), "ELASTIC_RUNS": str(place / "runs")}
    environment["ELASTIC_DEMO"] = str(place)
    if on_slurm:
        box = sandbox_of(place)
        box.down()  # what a killed demo may have left
        print("a private Slurm of 5 nodes starts")
        box.up(sandbox.Shape(nodes=5, gpus=1, grace_s=5))
        environment |= box.environment()
    os.execve(
        sys.executable, [sys.executable, "-P", "-m", "elastic.demo", *sys.argv[1:]], environment
    )


def sandbox_of(place: Path) -> sandbox.Sandbox:
    return sandbox.Sandbox(sandbox.default_folder() / f"demo-{zlib.crc32(bytes(place)):08x}")


def perform(place: Path, on_slurm: bool) -> int:
    """Clear the stage, play the story, clear up behind it."""
    notice = signals.install()
    box = sandbox_of(place) if on_slurm else None
    try:
        end_all_jobs()
        for folder in ("home", "runs"):
            shutil.rmtree(place / folder, ignore_errors=True)
        return 0 if story(Demo(box, notice)) else 1
    except KeyboardInterrupt:
        print("\ninterrupted: ending its jobs", file=sys.stderr)
        return 130
    finally:
        end_all_jobs()
        if box:
            box.down()


def main() -> int:
    on_slurm, place = "--slurm" in sys.argv[1:], configuration.env("ELASTIC_DEMO")
    try:
        if not place:
            prepare(Path.cwd() / "build" / "demo", on_slurm)
        return perform(Path(place), on_slurm)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
