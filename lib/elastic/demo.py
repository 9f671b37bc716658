"""A minute in the life of a run, for reading and for running: `make demo`.

`story` is the manual in one page: start a run, let cron reconcile it, and while it trains kill a
trainer, add a worker, preempt a job with notice, kill the master. It ends with the loss curve, the
audit, the validation loss, and what each fault cost. Exit 0 means that all of it held.

bin/elastic-demo sets the stage (folders, for --slurm a private Slurm) and clears it, at Ctrl-C too.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

from elastic import config as configuration
from elastic import signals, submission, views
from elastic.audit import audit
from elastic.cli import validate
from elastic.durable import checksum
from elastic.errors import ElasticError, TryAgain
from elastic.membership import Slot
from elastic.reconcile import run_pass
from elastic.rundir import RunDir
from elastic.sandbox import Sandbox
from elastic.sched import open_scheduler
from elastic.store import Store

BOUND = 2.6  # nats per held-out byte; untrained 5.55, knowing how frequent each byte is 3.36
AT_STAKE = 10  # inner steps a victim has done in its round
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
    run = demo.start()
    demo.say("a run on 2 to 4 GPUs:  bin/elastic-submit etc/demo.toml --min 2 --max 4")

    demo.train_until(version=4)
    with demo.fault("SIGKILL of a trainer") as victim:
        os.kill(victim.pid, signal.SIGKILL)

    demo.train_until(version=8)
    demo.say("one more worker:  bin/elastic-scale demo --max 5")
    run.set_control(max=5)

    demo.train_until(version=12)
    with demo.fault("preemption with notice", of_all=demo.on_slurm) as victim:
        demo.preempt(victim.job_id)

    demo.train_until(version=16)
    with demo.fault("SIGKILL of the master", of_all=True):
        demo.kill_master()

    demo.train_until(done=True)
    return demo.conclude()


@dataclass
class Fault:
    """Something bad that was done to the run, and the work that was at stake at that moment."""

    name: str
    time: float
    at_stake: list[Slot]

    def cost(self, commits: list[dict]) -> tuple[float, float, int]:
        """Seconds until the next commit, until all who were hit are in one, and steps lost."""
        after = [commit for commit in commits if commit["time"] > self.time]
        deltas = [(commit["time"], delta) for commit in after for delta in commit["deltas"]]
        saved = {(delta["slot"], delta["attempt"], delta["base"]) for _, delta in deltas}
        lost = sum(s.step for s in self.at_stake if (s.slot, s.attempt, s.version) not in saved)
        again = [
            # work of the slot begun after it was hit
            min((at for at, d in deltas if d["slot"] == s.slot and d["base"] > s.version),
                default=inf)
            for s in self.at_stake
        ]  # fmt: skip
        next_s = after[0]["time"] - self.time if after else inf
        return next_s, max(again) - self.time, lost


class Demo:
    """The run, whoever plays cron, and the record of what was done to it."""

    def __init__(self, on_slurm: bool, notice: signals.Notice):
        self.on_slurm, self.notice = on_slurm, notice
        self.began = time.time()
        self.faults: list[Fault] = []
        self._told = 0
        self._next_pass = 0.0

    # ---- what the story does

    def start(self) -> RunDir:
        settings = [*SETTINGS, *(ON_SLURM if self.on_slurm else [])]
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

    @contextlib.contextmanager
    def fault(self, name: str, of_all: bool = False) -> Iterator[Slot]:
        """Wait until a worker is in the middle of a round, name it, and note what is at stake."""
        while not (slots := self._training()) or slots[0].step < AT_STAKE:
            self._breathe()
        at_stake = slots if of_all else slots[:1]
        where = ", ".join(f"slot {slot.slot} at step {slot.step}" for slot in at_stake[:2])
        self.say(f"{name}  ({where}{', ...' if len(at_stake) > 2 else ''})")
        self.faults.append(Fault(name, time.time(), at_stake))
        yield slots[0]

    def _training(self) -> list[Slot]:
        """Workers in a round of the newest version, those with most steps first."""
        with contextlib.suppress(TryAgain), contextlib.closing(Store.open(self.run)) as store:
            version = self.run.newest_version()
            found = [s for s in store.slots().values() if s.version == version]
            found = [slot for slot in found if slot.state == "training"]
            return sorted(found, key=lambda slot: -slot.step)
        return []

    def preempt(self, job_id: str) -> None:
        if self.on_slurm:  # a job of higher priority takes a node; Slurm chooses whose
            Sandbox(Path(configuration.env("SLURM_CONF")).parent).preempt(nodes=1, seconds=10)
        else:
            self.scheduler.preempt(job_id)

    def kill_master(self) -> None:
        """SIGKILL of all that the master's job is, its Redis included."""
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = cmdline.read_bytes().decode(errors="replace").split("\0")
                of_run = any(word.startswith(str(self.run.path)) for word in words)
                if of_run and ("master" in words or "redis-server" in words[0]):
                    os.kill(int(cmdline.parent.name), signal.SIGKILL)

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
        self._tell_events()
        print(f"{time.time() - self.began:6.1f}s  ## {text}", flush=True)

    # ---- the end

    def conclude(self) -> bool:
        """Print curve, audit, validation loss and costs; True if nothing was lost or wrong."""
        commits = list(self.run.commits())
        points = [(commit["tokens"], commit["loss"]) for commit in commits[1:]]
        print(f"\ntraining loss (nats per byte) against tokens\n{views.loss_curve(points)}\n")
        report = audit(self.run.path, self.config.checkpoint.keep, checksum)
        views.console().print(views.audit_view(self.run.name, report))
        first, last = (validate(self.run, c)["validation_loss"] for c in (commits[0], commits[-1]))
        verdict = f"to be below {BOUND}: {'ok' if last < BOUND else 'WRONG'}"
        print(f"validation loss: version 0 {first:.3f}, at the end {last:.3f}, {verdict}\n")
        pauses = [b["time"] - a["time"] for a, b in zip(commits, commits[1:], strict=False)]
        print(f"what the faults cost (a round usually takes {median(pauses):.1f} s)\n")
        print(f"{'':24}{'steps lost':>12}{'next commit after':>20}{'all back after':>18}")
        for fault in self.faults:
            next_s, back_s, lost = fault.cost(commits)
            print(f"{fault.name:<24}{lost:>12}{next_s:>18.1f} s{back_s:>16.1f} s")
        print(f"\nthe run: {self.run.path}\nit took {time.time() - self.began:.0f} s")
        return not report["problems"] and last < BOUND


def main() -> int:
    try:
        return 0 if story(Demo("--slurm" in sys.argv, signals.install())) else 1
    except KeyboardInterrupt:
        print("\ninterrupted: everything ends", file=sys.stderr)
        return 130
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
