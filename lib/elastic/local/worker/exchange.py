"""What a worker moves: the fragments of its deltas out, and those of new versions in.

Each fragment belongs to one of the worker's ranks, which encodes and stores it, or reads
and checks it, and hands it to the other ranks over the node's own links. So the ranks
share the work, and a worker reads each fragment once. While one fragment is stored the
next is encoded, and while one is adopted the next is read.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import astuple
from functools import partial

import torch

from elastic.base.config import Config
from elastic.base.durable import patiently
from elastic.run.records import Commit, Fragment
from elastic.run.rundir import RunDir
from elastic.saved.codec import CODECS, codec_of
from elastic.saved.merge import length_squared, norm
from elastic.saved.replica import Replica
from elastic.saved.versions import read_params
from elastic.train.group import Group, drop_copies

Put = Callable[[int, memoryview], Fragment]


class Exchange:
    def __init__(self, run: RunDir, config: Config, replica: Replica, group: Group, beat: Callable):
        """`beat` is called for each fragment that goes out or comes in: a sign of life."""
        self.run, self.replica, self.group, self.beat = run, replica, group, beat
        self.codec = CODECS[config.local_sgd.compression]
        self._indices = range(len(replica.layout.fragments))

    def _is_mine(self, index: int) -> bool:
        return index % self.group.world == self.group.rank

    # ---- out

    def send(self, delta_of: Callable, put: Put) -> tuple[list[Fragment], float]:
        """Encode every fragment and `put` it. Returns what a header says of them, and the
        norm of the delta. If that is not finite, some have not been put. Collective."""
        square, put_yet = 0.0, {}
        with ThreadPoolExecutor(1, "sender") as sender:
            for index in self._indices:
                delta = delta_of(index)
                if not self._is_mine(index):
                    continue
                has_buffers = self.replica.layout.has_buffers(index)
                square += length_squared(norm(delta), has_buffers)
                if math.isfinite(square):
                    data = codec_of(has_buffers, self.codec).encode(delta)
                    self.beat()
                    wait(put_yet.values())  # errors are raised below, where all ranks meet
                    put_yet[index] = sender.submit(put, index, data)
        entries = self.group.all_do(lambda: [[i, *astuple(put_yet[i].result())] for i in put_yet])
        fragments = [Fragment(size, xxh3) for _, size, xxh3 in sorted(sum(entries, []))]
        return fragments, sum(self.group.gather(square)) ** 0.5

    # ---- in

    def adopt(self, commit: Commit, fetched: list[torch.Tensor] | None = None) -> None:
        """Set the replica to a version (`fetched`: its fragments, if they are here
        already). Collective. Raises ElasticError, on all ranks, if it cannot be read."""
        read = partial(self._read, commit)
        if fetched or self.group.world == 1:
            for index, values in enumerate(fetched or read_ahead(read, self._indices)):
                self.replica.adopt(index, values)
        else:
            self._adopt_together(read)
        drop_copies(self.replica.model)

    def _adopt_together(self, read: Callable[[int], torch.Tensor]) -> None:
        """Every rank reads its own fragments, and hands them to the others."""
        own: dict[int, torch.Tensor] = {}
        indices = filter(self._is_mine, self._indices)
        self.group.all_do(lambda: own.update({index: read(index) for index in indices}))
        for index in self._indices:
            data = own.pop(index) if index in own else self.replica.empty(index, self.group.device)
            self.replica.adopt(index, self.group.hand_out(data, index % self.group.world))

    def rebase(self, deltas: list, fetched: list[torch.Tensor]) -> None:
        """Set the replica to a version's fragments, with the steps that were done since
        `deltas` were taken on top. Only for a worker of one rank."""
        for index, values in enumerate(fetched):
            self.replica.rebase(index, values, deltas[index])

    def fetch(self, commit: Commit) -> list[torch.Tensor]:
        """All of a version's fragments. Raises ElasticError."""
        return [self._read(commit, index) for index in self._indices]

    def _read(self, commit: Commit, index: int) -> torch.Tensor:
        self.beat()
        return patiently(read_params, self.run, commit, self.replica.layout, index)


def read_ahead(read: Callable, indices: Sequence[int]) -> Iterator:
    """`read` of each, in order; the next one while the caller is at work with one."""
    with ThreadPoolExecutor(1, "reader") as pool:
        coming = pool.submit(read, indices[0])
        for index in indices[1:]:
            here, coming = coming, pool.submit(read, index)
            yield here.result()
        yield coming.result()
