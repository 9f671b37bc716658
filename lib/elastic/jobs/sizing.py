"""How many GPUs a synchronous job asks for, and when more are worth a restart. Pure."""

from collections.abc import Sequence

WORTH = 2.0  # a restart must gain so many times what it costs


def node_counts(gpus: tuple[int, int], gpus_per_node: int, sizes: Sequence[int] = ()) -> list[int]:
    """How many whole nodes a job may have, for a range of GPUs and, if any of them is in
    it, the `sizes` (in GPUs) that are allowed; [1] where a node has more than wanted."""
    most = max(1, gpus[1] // gpus_per_node)
    counts = range(min(most, max(1, -(-gpus[0] // gpus_per_node))), most + 1)
    return [count for count in counts if count * gpus_per_node in sizes] or list(counts)


def fit(counts: Sequence[int], available: int) -> int:
    """The largest of `counts` that is available; 0 if none is."""
    return max((count for count in counts if count <= available), default=0)


def pays(gpus: int, more: int, restart_s: float, horizon_s: float) -> bool:
    """Is it worth a restart of `restart_s` to train on `more` GPUs instead of `gpus`, if
    that is likely to last for `horizon_s`?"""
    gain = more / gpus
    return horizon_s * (gain - 1) > WORTH * restart_s * gain
