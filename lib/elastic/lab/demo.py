"""A minute in the life of a run, for reading and for running: `make demo`.

`story` is the manual in one page: start a run, let cron reconcile it, and while it trains
kill a training process, add a worker, preempt a job with notice, kill the master. It ends
with the loss curve, the audit, the validation loss, and what each fault cost. Exit 0
means that all of it held: every sample trained once, no delta refused but what a fault
explains, and more learned than how frequent each byte is. All three hold however fast or
slow the rounds were.

bin/elastic-demo sets the stage (folders, for --slurm a private Slurm) and clears it, at
Ctrl-C too.
"""

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from elastic.base import config as configuration, signals
from elastic.base.environment import elastic_home, runs_root
from elastic.base.errors import ElasticError
from elastic.jobs.reconcile import run_pass
from elastic.lab.chaos import Chaos
from elastic.local.rounds import Rule
from elastic.people import submission, views
from elastic.people.evaluation import of_version
from elastic.run import wording
from elastic.run.rundir import RunDir

# Deltas may be refused by these rules because a machine is slow, or a worker was killed,
# or the master with its Redis.
EXPLAINED = (Rule.STALE, Rule.FENCED, Rule.SAMPLES, Rule.DUPLICATE, Rule.UNREADABLE)
LEARNED = 0.58  # of the loss of version 0: less than what the frequencies of the bytes give
LONGEST_S = 600.0
CRON_S = 2.0
SETTINGS = [
    "run.name=demo", "elastic.min=2", "elastic.max=4",
    "checkpoint.keep_every=1000000",  # version 0 stays, to compare with
]
ON_SLURM = ["run.scheduler=slurm", "slurm.partition=preempt", "slurm.master_partition=cpu",
            "train.device=cpu"]  # the sandbox's GPUs are pretended
TOLD = ("submit", "join", "outer-step", "end", "lost", "preempt", "restart", "master",
        "redis-lost", "reject", "taken-back", "leave", "scale", "fail", "done")


def story(demo: "Demo") -> bool:
    """The demo from beginning to end; True if everything held."""
    run = demo.start()
    demo.say("a run on 2 to 4 GPUs:  bin/elastic-submit etc/demo.toml --min 2 --max 4")

    demo.train_until(version=3)
    demo.fault("kill-worker")

    demo.train_until(version=6)
    demo.say("one more worker:  bin/elastic-scale demo --max 5")
    run.set_control(max=5)

    demo.train_until(version=9)
    demo.fault("preempt")

    demo.train_until(version=12)
    demo.fault("kill-master")

    demo.train_until(done=True)
    return demo.conclude()


class Demo:
    """The run, whoever plays cron, and the record of what was done to it."""

    def __init__(self, on_slurm: bool, notice: signals.Notice):
        self.on_slurm, self.notice = on_slurm, notice
        self.began = time.time()
        self._told = 0
        self._next_pass = 0.0

    # ---- what the story does

    def start(self) -> RunDir:
        file = elastic_home() / "etc" / "demo.toml"
        self.config = configuration.load(file, SETTINGS + ON_SLURM * self.on_slurm)
        submission.check(self.config, runs_root())
        self.run = submission.start(self.config, runs_root())
        self.chaos = Chaos(self.run)
        return self.run

    def train_until(self, version: int = 0, done: bool = False) -> None:
        """Play cron, and tell what happens, until the version is committed (or the run
        done)."""
        while not (self.run.done() or (not done and self.run.commits.newest_version() >= version)):
            self._breathe()
            if failed := self.run.failed():
                raise ElasticError(f"the run failed: {failed['reason']}", failed["detail"])
        self._tell_events()

    def fault(self, kind: str) -> None:
        """Do a fault of this kind as soon as a worker says that it trains."""
        while not (self.chaos.training() or self.run.closing()):
            self._breathe()
        self.say(f"{kind}: {self.chaos.inject(kind).what}")

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
            what = f"the demo is not over after {LONGEST_S:.0f} s"
            raise ElasticError(what, str(self.run.path))
        time.sleep(0.1)

    def _tell_events(self) -> None:
        events = self.run.events()
        for event in events[self._told :]:
            if event["kind"] in TOLD:
                at_s = event["time"] - self.began
                print(f"{at_s:6.1f}s  {wording.event_words(event)}"[:98], flush=True)
        self._told = len(events)

    def say(self, text: str) -> None:
        self._tell_events()
        print(f"{time.time() - self.began:6.1f}s  ## {text}", flush=True)

    # ---- the end

    def conclude(self) -> bool:
        """Print curve, audit, validation loss and costs; True if nothing was lost or
        wrong."""
        commits = list(self.run.commits.all())
        losses = views.sparkline([commit.loss for commit in commits[1:]])
        print(f"\ntraining loss (nats per byte) {losses}\n")
        ends = (commits[0], commits[-1])
        first, last = (of_version(self.run, each)["validation_loss"] for each in ends)
        bound = LEARNED * first
        verdict = f"to be below {bound:.2f}: {'ok' if last < bound else 'WRONG'}"
        print(f"validation loss: version 0 {first:.3f}, at the end {last:.3f}, {verdict}\n")
        wrong = unexplained(self.run.events())
        for event in wrong:
            print(f"WRONG: {views.event_line(event)}")
        pauses = [after.time - before.time for before, after in pairwise(commits)]
        print(f"what the faults cost (a round usually takes {median(pauses):.1f} s)\n")
        report = self.chaos.report(self.began)
        views.show(views.chaos_view, report)
        print(f"\nthe run: {self.run.path}\nit took {time.time() - self.began:.0f} s")
        has_held = not report["audit"]["problems"] and not wrong and last < bound
        print("Through all of it, every sample was trained once, and nothing stopped."
              if has_held else "Something did not hold: see WRONG above.")
        return has_held


def unexplained(events: Sequence[dict]) -> list[dict]:
    """The refusals of deltas, and of versions, that no fault of the story explains."""
    refusals = [event for event in events if event["kind"] in ("reject", "taken-back")]
    return [event for event in refusals if event.get("rule") not in EXPLAINED]


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
