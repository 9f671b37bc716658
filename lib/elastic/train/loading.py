"""The batches of one rank of a worker, in the order in which samples were granted to it.

With `train.loader_workers` processes load what is ahead in the plan, while the batch
before is trained. What they have loaded is nobody's until it is trained: a plan that has
changed drops it. All batches are whole, so that shapes never change and a BatchNorm
always has its samples: the last one of a run is filled up with samples from the beginning
of its epoch, which do not count.
"""

from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elastic.base.config import Config
from elastic.base.errors import ElasticError
from elastic.run.ledger import Range, take
from elastic.run.shuffle import index
from elastic.train.group import Group
from elastic.train.health import shield_workers


def check(dataset: Dataset) -> Dataset:
    """Raise ElasticError if samples cannot be handed out by number."""
    is_numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, DataLoader | IterableDataset) or not is_numbered:
        what = f"samples are handed out by number, and a {type(dataset).__name__} has none"
        made = "by train.batch_size, and by the collate of sgd.batches(dataset, collate)"
        hint = f"give a map-style data set (len() and [i]); batches are made {made}"
        raise ElasticError(what, hint)
    if not len(dataset):
        raise ElasticError("the data set is empty", "are its files on this machine?")
    return dataset


def processes(count: int) -> dict:
    """Arguments for a DataLoader that loads samples ahead in so many processes."""
    if not count:
        return {}
    get_temp_dir()  # so theirs is the one that `device.leave` removes
    # By fork, as data sets need not be picklable.
    return {"num_workers": count, "worker_init_fn": shield_workers,
            "multiprocessing_context": "fork"}


class Loader:
    def __init__(
        self, dataset: Dataset, collate: Callable, config: Config, group: Group, pin: bool
    ):
        """`pin`: the batches go to a GPU."""
        self._config, self._group, self._size = config, group, len(dataset)
        self._plan: list[Range] = []
        self._batches: Iterator = iter(())
        workers = config.train.loader_workers
        self._loader = DataLoader(
            dataset, batch_sampler=self, collate_fn=collate, pin_memory=pin,
            persistent_workers=workers > 0, **processes(workers),
            # It takes no random numbers of the loop's.
            generator=torch.Generator().manual_seed(torch.initial_seed()),
        )

    def plan(self, queue: list[Range]) -> None:
        """These are the samples to come, for all ranks together."""
        self._plan = [tuple(each) for each in queue]
        self._batches = iter(self._loader)

    def next(self) -> object:
        return next(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of each batch of the plan, as a DataLoader asks for them."""
        queue, size, seed = list(self._plan), self._config.train.batch_size, self._config.run.seed
        while taken := take(queue, self._config.step_samples):
            places = [(epoch, at) for epoch, start, stop in taken for at in range(start, stop)]
            lacking = range(self._config.step_samples - len(places))
            places += [(places[0][0], at % self._size) for at in lacking]
            mine = places[self._group.rank :: self._group.world]
            for first in range(0, len(mine), size):
                yield [index(self._size, seed, *place) for place in mine[first : first + size]]
