"""What a trace of preemptions would do to a run, for each way to train through it. Pure.

    requeue   a job of a fixed size that Slurm requeues: it saves now and then, and heeds
              no notice
    sync      one job of the size there is, with a successor that waits behind it
    local     a job per worker, averaged in rounds

The trace is played to each (played.py), and what a run would do is
decided by what decides it there: plan.plan (which workers are submitted), sizing.fit and
`sizing` (the trainer's size), cadence (its checkpoints), rounds (the life of a round),
estimate (what a round moves and takes). The result goes through goodput.ledger, so its
parts are those of `elastic-audit`.

It assumes that all GPUs are equally fast, a step of sync mode is shared out evenly and
without loss, nothing fails but by the trace, the master is never taken, Slurm gives the
run every GPU that is there, and the run lasts longer than the trace. Some things are not
played: deltas are not judged or weighed, and nobody trains while a delta travels
(local_sgd.overlap), so local mode is better than it looks here. A round is due by what
steps and deliveries cost, not by what its workers have shown. Only steps count as
training: a delta on its way counts as waiting here, and as training in a run's own ledger.
"""

from dataclasses import fields, replace
from operator import itemgetter
from typing import Any

from elastic.base.errors import UsageError
from elastic.jobs import sizing
from elastic.lab.played import Costs, Local, Nodes, Requeue, Sync, Trace
from elastic.run import estimate

SAVED = 12  # bytes an element of a checkpoint, at most: float32, and AdamW's two
# With this share of what local mode keeps, sync mode is better: it trains as if undisturbed.
WORTH_SYNC = 0.97
MOST_ROUNDS = 50_000  # so many can be played

Way = dict[str, Any]  # what a way to train makes of a trace, as --json has it


def costs(config, model: estimate.Model | None) -> Costs:
    """The costs of a run by its configuration and size."""
    plan, names = config.plan, (field.name for field in fields(Costs))
    stated = {name: getattr(plan, name) for name in names if hasattr(plan, name)}
    return Costs(**stated | (_by_size(config, model) if model else {}))


def _by_size(config, model: estimate.Model) -> dict[str, float]:
    settings, slurm, gpus = config.plan, config.slurm, config.elastic.max
    tokens = config.step_samples * (model.tokens_per_sample or 1)
    saved_bytes, workers = SAVED * model.numel, config.workers(gpus)
    rates = estimate.Rates(process=settings.process_bytes, filesystem=settings.filesystem_bytes)
    cores = slurm.master_cpus or 16
    one, alone = (estimate.cost(model, count, cores, rates) for count in (workers, 1))
    return {
        "step_s": estimate.step_s(model, config),
        "save_s": settings.save_s or saved_bytes / min(rates.filesystem, gpus * rates.process),
        "stall_s": saved_bytes / gpus / rates.process,  # into the hosts' memory
        "deliver_s": one.deliver_s, "deliver_alone_s": alone.deliver_s,
        "average_s": one.merge_s + one.publish_s, "pull_s": one.pull_s,
        "total_steps": config.train.max_tokens / tokens,
    }


def ways_of(nodes: Nodes, end: float, config, costs: Costs) -> list[Way]:
    """What plain --requeue (in its best size from min to max), sync mode and local mode
    make of a trace until `end`. Takes seconds."""
    limits = config.elastic.min, config.elastic.max
    per_node = min(config.slurm.gpus_per_node, limits[1])
    offered_s = sum(s * min(gpus, limits[1]) for gpus, s in nodes.spans(end))

    def way(mode: str, play, least: int, most: int, inner_steps: int = 0) -> Way:
        """`goodput` is a share of the GPU time that the run had, `kept` of all GPU time
        that there was."""
        parts = play.play(end)
        closed_s = max(parts["allocated"] - parts["open"], 1e-9)
        return {"mode": mode, "gpus": [least, most], "inner_steps": inner_steps,
                "goodput": parts["training"] / closed_s,
                "kept": parts["training"] / max(offered_s, 1e-9), **parts}

    requeued = (way("requeue", Requeue(nodes, config, costs, [count]), *[count * per_node] * 2)
                for count in sizing.node_counts(limits, per_node))
    local = Local(nodes, config, costs)
    return [max(requeued, key=itemgetter("kept")), way("sync", Sync(nodes, config, costs), *limits),
            way("local", local, *limits, config.local_sgd.inner_steps)]


def forecast(trace: Trace, end: float, config, costs: Costs) -> dict:
    """All ways to train as `config` has them, and which to take: for views and for
    scripts."""
    _check(end, config, costs)
    nodes = Nodes(trace)
    most = max(gpus for gpus, _ in nodes.spans(end))
    used = max(config.elastic.min, min(most, config.elastic.max))  # there are no others
    ways = ways_of(nodes, end, replace(config, elastic=replace(config.elastic, max=used)), costs)
    if not any(way["kept"] for way in ways):
        what = f"nothing could be trained in the {end:.0f} s of the trace"
        raise UsageError(what, "a longer trace, or smaller costs: section [plan]")
    best, why = _choose(*ways)
    if config.run.command and best["mode"] != config.run.mode:
        best = next(way for way in ways if way["mode"] == config.run.mode)
        why = f"run.command keeps its mode; as a task, {why}"
    taken = [change.at for change in trace if not change.gpus]
    return {
        "trace": {"seconds": end, "nodes": len({change.node for change in trace}),
                  "most_gpus": most, "taken": len(taken), "moments": len(set(taken))},
        "costs": vars(costs),
        "ways": ways,
        "recommended": {
            "mode": best["mode"],
            "inner_steps": best["inner_steps"] or config.local_sgd.inner_steps,
            "max": used,
            "reason": why,
        },
    }


def _check(end: float, config, costs: Costs) -> None:
    """Raise UsageError for what cannot be played in sensible time."""
    round_s = config.local_sgd.inner_steps * costs.step_s + costs.deliver_s + costs.average_s
    if end > MOST_ROUNDS * round_s:
        what = f"a round of {round_s:.2g} s is too short to play {end:.0f} s of them"
        raise UsageError(what, "give --set plan.step=SECONDS")


def _choose(requeued: Way, sync: Way, local: Way) -> tuple[Way, str]:
    """The way to take, and why."""
    best, other = (sync, local) if sync["kept"] >= WORTH_SYNC * local["kept"] else (local, sync)
    exactly = ", step for step as if undisturbed," * (best is sync)
    return best, (
        f"it trains{exactly} for {best['kept']:.0%} of the GPU time that is there,"
        f" {other['mode']} mode for {other['kept']:.0%}, --requeue for {requeued['kept']:.0%}"
    )
