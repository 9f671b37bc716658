"""The table "On paper" of docs/algorithm.md: what a round moves and takes (elastic.run.estimate).

    PYTHONPATH=lib .venv/bin/python tests/bench/on_paper.py

A step takes 7 s (7B on one GPU, at 40 % of an H100's peak), K = 100; the master's job has 16 cores.
"""

from elastic.base.units import size
from elastic.run.estimate import Model, Rates, cost

MODELS = {"7B": (7e9, 7.0)}
WORKERS = (32, 128)
PLACES = {"Lustre": Rates(5e9, 50e9), "InfiniBand": Rates(25e9, 200e9)}
K = 100


def table() -> str:
    names = "".join(f" {place} |" for place in PLACES)
    head = f"| model | workers | up | down |{names}"
    lines = [head, "| --- " * (4 + len(PLACES)) + "|"]
    for name, (numel, step_s) in MODELS.items():
        for workers in WORKERS:
            model = Model(int(numel), int(numel * (1 + 2 / 256)), 110, 0, 0)
            stalls = [cost(model, workers, rates=rates).stall_s for rates in PLACES.values()]
            parts = [f"{s:.0f} s, {s / (K * step_s + s):.0%}" for s in stalls]
            up, down = size(workers * model.delta_bytes), size(2 * numel * workers)
            lines.append(f"| {name} | {workers} | {up} | {down} | {' | '.join(parts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
