"""How long workers stand still in a round, with and without `local_sgd.overlap`, side by side.

    .venv/bin/python tests/bench/bench_overlap.py [--millions 10] [--step 0.1]

Two workers, rounds of K = 100 inner steps; a step waits a fixed wall time, in place of a GPU.

stall   as in bench_round.py: what a worker waits between its steps, all pauses of a round together
round   from one commit to the next, beside the K steps themselves: what the stall leaves out
        (steps that became slower) is in it

A case "moments" saves AdamW's moments every round (the default of inner_state_every), eight bytes
a parameter; the others have none to save.

Predicted before the first measurement, of 10 s: off 2.5 %, rebase 0.6 %; with
moments 2 % more, as they are written while nobody trains; the rounds of `rebase` as long as their
steps.

A third way, to do the steps ahead again (`discard`), stood still as little and took 1.13 times its
steps, where `off` took 1.11: there is nothing that it was good for.
"""

import argparse
import statistics
from itertools import pairwise
from pathlib import Path

from bench_round import Size, follow, full_rounds, kill, median_stall_s, start, stop
from figures import record, scratch

K, WORKERS = 100, 2
CASES = {
    "off": {"local_sgd.overlap": "off"},
    "rebase": {"local_sgd.overlap": "rebase"},
    "off, moments": {"local_sgd.overlap": "off", "task.moments": "true"},
    "rebase, moments": {"local_sgd.overlap": "rebase", "task.moments": "true"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=10, help="of parameters")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an inner step")
    options = parser.parse_args()
    size, off_s = Size(options.millions * 1_000_000, WORKERS), 0.0
    for name, settings in CASES.items():
        stall_s, round_s = measure(size, options.step, settings)
        off_s, case = off_s or stall_s, f"{size}, {name}"
        record("overlap", f"{case}: stall", stall_s, "s", "off", off_s)
        record("overlap", f"{case}: stall", 100 * stall_s / round_s, "%", "aim", 1.0)
        record("overlap", f"{case}: round", round_s, "s", "its steps", K * options.step)


def measure(size: Size, step_s: float, settings: dict) -> tuple[float, float]:
    """Seconds of stall, and from commit to commit; medians."""
    given = {"run.task": "bench_task:Waiting", "task.step_s": step_s, "local_sgd.inner_steps": K,
             "local_sgd.inner_state_every": int("task.moments" in settings)}
    with scratch() as name:
        folder = Path(name)
        try:
            run = start(folder, size, given | settings)
            follow(run, WORKERS)
            stop(run)
        finally:
            kill(folder)
        commits = full_rounds(run, WORKERS)
        rounds = [after.time - before.time for before, after in pairwise(commits)]
        return median_stall_s(run, WORKERS), statistics.median(rounds)


if __name__ == "__main__":
    main()
