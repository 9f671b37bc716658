"""The global batches of a synchronous run, and how its ranks share them.

Step s trains the global batch, the next `global_batch_size` samples that are free in the
ledger, in the order of the shuffled epochs, whatever the number of ranks: a rank's part
depends on (step, rank, world) only through a partition of that batch, so a run that is
resized trains the same samples in the same steps as one that never was.

Parts differ by at most one sample. All ranks make equally many passes over the model,
because each pass is a collective: a rank that has fewer samples than passes makes one
over a sample that counts nothing.

With train.loader_workers processes load ahead. What they have is counted as trained only
when it is: a checkpoint knows nothing of it.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import DataLoader, default_collate

from elastic.base.config import Config
from elastic.base.errors import ElasticError
from elastic.run.ledger import Ledger, Range, Ranges
from elastic.run.shuffle import index
from elastic.train.device import seed_by
from elastic.train.group import Group
from elastic.train.loading import check, processes
from elastic.train.task import count_tokens

RANKS = (0, 0)  # the only owner in the ledger: a batch is handed to all of them


def part(whole: Sequence, index: int, count: int) -> Sequence:
    """Part `index` of `count` nearly equal contiguous ones, the longer ones first."""
    size, longer = divmod(len(whole), count)
    start = index * size + min(index, longer)
    return whole[start : start + size + (index < longer)]


def passes(batch: Sequence, rank: int, world: int, most: int) -> list[Sequence]:
    """The rank's part in passes of at most `most` samples, equally many on every rank.

    An empty one is a pass over a sample that counts nothing.
    """
    largest = -(-len(batch) // world)
    count = max(1, -(-largest // most))
    mine = part(batch, rank, world)
    return [part(mine, index, count) for index in range(count)]


@dataclass(frozen=True)
class Batch:
    """A global batch, and this rank's passes over its part: for each, how much of its
    data counts, and the data.

    `passes` reads from the loader of the whole run: take all of them before the next call
    of `Batches.next`, or never make that call (after an interruption the ranks leave).
    Otherwise the batches after it would have each other's samples.
    """

    samples: Ranges
    passes: Iterator[tuple[float, object]]


class Batches:
    """The batches to come, and where all other samples of the run are: in a version
    (`committed`), `trained` since then, or left out (`skipped`)."""

    def __init__(self, task, config: Config, group: Group):
        self._config, self._group = config, group
        self._dataset = check(task.dataset())
        self.dataset_samples = len(self._dataset)
        # The tokens of the first sample stand for all, unless it is all padding.
        self.tokens_each = max(1, count_tokens(task, default_collate([self._dataset[0]])))
        most = config.train.batch_size * config.elastic.max
        self.batch_size = config.sync.global_batch_size or most
        self.set()

    def set(self, committed: Iterable[Range] = (), trained: Iterable[Range] = (),
            skipped: Iterable[Range] = ()) -> None:
        """Go on as if these samples were done, and no others."""
        self.committed, self.trained = Ranges(committed), Ranges(trained)
        self.skipped = Ranges(skipped)
        done = [*self.committed, *self.trained, *self.skipped]
        self._batches = self._load(Ledger(self.dataset_samples, self._config.train.epochs, done))

    def next(self) -> Batch | None:
        """The next batch; None if there are no more samples."""
        return next(self._batches, None)

    def total_tokens(self, tokens: int) -> int:
        """The tokens of the whole run, of which `tokens` are trained: an estimate, by the
        tokens per sample so far."""
        train, samples = self._config.train, len(self.committed) + len(self.trained)
        each = tokens / samples if samples and tokens else self.tokens_each
        total = train.max_tokens or train.epochs * self.dataset_samples * each
        if train.max_steps:
            total = min(total, train.max_steps * self.batch_size * each)
        return round(total)

    def _load(self, ledger: Ledger) -> Iterator[Batch]:
        planned = deque()
        train, seed, group = self._config.train, self._config.run.seed, self._group

        def draw() -> Iterator[list[int]]:
            while ledger.grant(RANKS, self.batch_size):
                batch = ledger.held.pop(RANKS)
                places = [(epoch, at) for epoch, start, stop in batch for at in range(start, stop)]
                parts = passes(places, group.rank, group.world, train.batch_size)
                drawn = [_filled(part or places[:1], train.batch_size) for part in parts]
                sizes = zip(map(len, parts), map(len, drawn), strict=True)
                planned.append((batch, [counting / loaded for counting, loaded in sizes]))
                for each in drawn:
                    yield [index(len(self._dataset), seed, *place) for place in each]

        # Otherwise the random changes of samples would be the same on all ranks, and in
        # each attempt.
        done = len(self.committed) + len(self.trained) + len(self.skipped)
        seed_by(f"{seed}/{done} samples/{group.rank}")
        loader = iter(DataLoader(
            self._dataset, batch_sampler=draw(), pin_memory=group.device.type == "cuda",
            **processes(train.loader_workers),
        ))
        for first in loader:
            batch, shares = planned.popleft()
            others = itertools.islice(loader, len(shares) - 1)
            yield Batch(batch, zip(shares, itertools.chain([first], others), strict=True))
        if planned:
            what = "the data set has raised StopIteration"
            raise ElasticError(what, "is it shorter than its len()?")


def _filled(part: Sequence, most: int) -> Sequence:
    """What a pass of at most `most` samples loads. A single sample comes twice, and
    counts once: a BatchNorm has no statistics of one."""
    return [*part, *part] if len(part) == 1 < most else part
