"""What a trace of preemptions would do to a run, for each way to train through it. Pure.

    requeue   a job of a fixed size that Slurm requeues: it saves now and then, and heeds
              no notice
    sync      one job of the size there is, with a successor that waits behind it
    local     a job per worker, averaged in rounds

The trace is played to each (played.py, played_local.py), and what a run would do is
decided by what decides it there: plan.plan (which workers are submitted), sizing.fit and
`sizing` (the trainer's size), cadence (its checkpoints), rounds (the life of a round),
estimate (what a round moves and takes). The result goes through goodput.ledger, so its
parts are those of `elastic-audit`.

Taken for granted: all GPUs are as fast, a step of sync mode is shared out evenly and
without loss, nothing fails but by the trace, the master is never taken, Slurm gives the
run every GPU that is there, and the run lasts longer than the trace. Not played: deltas
are not judged or weighed, and nobody trains while a delta travels (local_sgd.overlap), so
local mode is better than it looks here. A round is due by what steps and deliveries cost,
not by what its workers have shown. Training are steps alone: a delta on its way is
waiting, which a run's own ledger counts as training.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from typing import Any

from elastic.base.errors import UsageError
from elastic.jobs import cadence, sizing
from elastic.lab.played import Costs, Nodes, Requeue, Sync, Trace
from elastic.lab.played_local import Local
from elastic.run import estimate

SAVED = 12  # bytes an element of a checkpoint: float32, and AdamW's two
MOSTLY = 0.9  # of the time; --min: so many GPUs are there
AS_GOOD = 0.95  # of the best: then rounds are better short: workers drift apart in them
WORTH_SYNC = 0.97  # of local mode: then it is better, because it trains as if undisturbed
KS = (25, 50, 100, 200, 500)
MOST_ROUNDS = 50_000  # that are played
LEAST_ROUND_S = 30.0  # no shorter ones are tried

Way = dict[str, Any]  # what a way to train makes of a trace, as --json has it


def costs(config, model: estimate.Model | None, shown: Mapping[str, float]) -> Costs:
    """The costs of a run by its configuration and size; what was `shown` goes before."""
    plan, names = config.plan, (field.name for field in fields(Costs))
    stated = {name: getattr(plan, name) for name in names if hasattr(plan, name)}
    return Costs(**stated | (_by_size(config, model) if model else {}) | dict(shown))


def _by_size(config, model: estimate.Model) -> dict[str, float]:
    settings, slurm, gpus = config.plan, config.slurm, config.elastic.max
    tokens = config.step_samples * (model.tokens_per_sample or 1)
    saved_bytes, workers = SAVED * model.numel, max(1, gpus // slurm.gpus_per_worker)
    rates = estimate.Rates(process=settings.process_bytes, filesystem=settings.filesystem_bytes)
    cores = slurm.master_cpus or 16
    one, alone = (estimate.cost(model, count, cores, rates) for count in (workers, 1))
    return {
        "step_s": estimate.step_s(model, config),
        "save_s": settings.save_s or saved_bytes / min(rates.filesystem, gpus * rates.process),
        "stall_s": saved_bytes / gpus / rates.process,  # into the hosts' memory
        "deliver_s": one.deliver_s, "deliver_alone_s": alone.deliver_s,
        "average_s": one.master_s, "pull_s": one.pull_s,
        "total_steps": config.train.max_tokens / tokens,
    }  # fmt: skip


class Forecaster:
    """A trace until `end`, played to a run of that configuration at those costs. Takes
    seconds."""

    def __init__(self, trace: Trace, end: float, config, costs: Costs):
        self.nodes, self.end, self.config, self.costs = Nodes(trace), end, config, costs
        self.limits = _, most = config.elastic.min, config.elastic.max
        self._offered_s = sum(s * min(gpus, most) for gpus, s in self.nodes.spans(end))

    def local(self, inner_steps: int = 0) -> Way:
        steps = inner_steps or self.config.local_sgd.inner_steps
        sgd = replace(self.config.local_sgd, inner_steps=steps)
        play = Local(self.nodes, replace(self.config, local_sgd=sgd), self.costs)
        return self._way("local", play, *self.limits, steps)

    def sync(self, least: int = 0) -> Way:
        limits = replace(self.config.elastic, min=least or self.limits[0])
        play = Sync(self.nodes, replace(self.config, elastic=limits), self.costs)
        return self._way("sync", play, limits.min, limits.max)

    def requeue(self) -> Way:
        """Of the size that turns out to be the best, of all from min to max."""
        per_node = self.config.slurm.gpus_per_node
        plays = {nodes * per_node: Requeue(self.nodes, self.config, self.costs, [nodes])
                 for nodes in sizing.node_counts(self.limits, per_node)}  # fmt: skip
        ways = (self._way("requeue", play, gpus, gpus) for gpus, play in plays.items())
        return max(ways, key=itemgetter("kept"))

    def _way(self, mode: str, play, least: int, most: int, inner_steps: int = 0) -> Way:
        """Of the shares `kept` is of all that was there to be had."""
        parts = play.play(self.end)
        closed_s = max(parts["allocated"] - parts["open"], 1e-9)
        return {"mode": mode, "gpus": [least, most], "inner_steps": inner_steps,
                "goodput": parts["training"] / closed_s,
                "kept": parts["training"] / max(self._offered_s, 1e-9), **parts}  # fmt: skip


def mostly_there(spans: Iterable[tuple[int, float]], end: float) -> int:
    """GPUs that are there for nine tenths of the time."""
    left_s = (1 - MOSTLY) * end
    for gpus, seconds in sorted(spans):
        left_s -= seconds
        if left_s < 0:
            return gpus
    return 0


def forecast(trace: Trace, end: float, config, costs: Costs) -> dict:
    """All ways to train as `config` has them, and what to change: for views and for
    scripts."""
    _check(end, config, costs)
    play = Forecaster(trace, end, config, costs)
    spans = [*play.nodes.spans(end)]
    most = max(gpus for gpus, _ in spans)
    least = max(config.slurm.gpus_per_worker, min(mostly_there(spans, end), config.elastic.max))
    ways = [play.requeue(), play.sync(), play.local()]
    if not any(way["kept"] for way in ways):
        what = f"nothing could be trained in the {end:.0f} s of the trace"
        raise UsageError(what, "a longer trace, or smaller costs: section [plan]")
    ways += _better(play, least, *ways[1:])
    best, why = _choose(ways)
    if config.run.command and best["mode"] != config.run.mode:
        best = [way for way in ways if way["mode"] == config.run.mode][-1]
        why = f"run.command keeps its mode; as a task, {why}"
    taken = [change.at for change in trace if not change.gpus]
    moments, steps = len(set(taken)), best["inner_steps"] or config.local_sgd.inner_steps
    mtbi_s = (end + cadence.PRIOR_S) / max(1, moments)
    every_s, _ = cadence.interval(costs.stall_s, mtbi_s, costs.save_s)
    if best["mode"] == "local":
        every_s = steps * costs.step_s + costs.deliver_s + costs.average_s + costs.pull_s
    return {
        "trace": {"seconds": end, "nodes": len({change.node for change in trace}),
                  "most_gpus": most, "taken": len(taken), "moments": moments},
        "costs": vars(costs),
        "ways": ways,
        "recommended": {
            "mode": best["mode"], "inner_steps": steps,
            "min": best["gpus"][0] if best["mode"] == "sync" else least,
            "max": min(most, config.elastic.max),
            "checkpoint_interval_s": every_s,  # in local mode, of versions
            "reason": why,
        },
    }  # fmt: skip


def _check(end: float, config, costs: Costs) -> None:
    """Raise UsageError for what cannot be played, or not in sensible time."""
    most, per_node = config.elastic.max, config.slurm.gpus_per_node
    if most < per_node:
        what = f"elastic.max = {most} is not one node (slurm.gpus_per_node = {per_node})"
        raise UsageError(what, "a job of sync mode has whole nodes: change one of them")
    round_s = config.local_sgd.inner_steps * costs.step_s + costs.deliver_s + costs.average_s
    if end > MOST_ROUNDS * round_s:
        what = f"a round of {round_s:.2g} s is too short to play {end:.0f} s of them"
        raise UsageError(what, "give --set plan.step=SECONDS, or --measured RUN")


def _better(play: Forecaster, least: int, sync: Way, local: Way) -> Iterator[Way]:
    """Another min in sync mode, and another K in local mode, where they gain
    something."""
    if least != sync["gpus"][0] and (other := play.sync(least))["kept"] > sync["kept"]:
        yield other
    ks = {k for k in KS if k * play.costs.step_s >= LEAST_ROUND_S} - {local["inner_steps"]}
    tried = [local, *map(play.local, sorted(ks))]
    enough = AS_GOOD * max(way["kept"] for way in tried)
    best = min((way for way in tried if way["kept"] >= enough), key=itemgetter("inner_steps"))
    if best is not local:
        yield best


def _choose(ways: Sequence[Way]) -> tuple[Way, str]:
    """The way to take, and why."""
    last = {way["mode"]: way for way in ways}
    sync, local = last["sync"], last["local"]
    best, other = (sync, local) if sync["kept"] >= WORTH_SYNC * local["kept"] else (local, sync)
    exactly = ", step for step as if undisturbed," * (best is sync)
    return best, (
        f"it trains{exactly} for {best['kept']:.0%} of the GPU time that is there,"
        f" {other['mode']} mode for {other['kept']:.0%}, --requeue for {ways[0]['kept']:.0%}"
    )
