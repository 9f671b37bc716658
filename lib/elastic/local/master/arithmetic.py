"""The arithmetic of averaging: what deltas measure, and a version's parameters from the one before.

It checks deltas as they arrive, and takes a run's fragments one version further: for each one, in a
pool of threads, read the deltas, add them up, step, write. So while one fragment is read the next
is added and the one before is written, and beside parameters and momentum it holds one fragment of
a mean and one of a delta per thread. The bits do not depend on the number of threads.

Processes in their place were no faster: torch lets go of Python's lock in its kernels, and Python's
own part of a tile is 26 microseconds of a millisecond (tests/bench/bench_codec.py).
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from elastic.base.config import Config
from elastic.base.errors import ElasticError
from elastic.local.rounds import Judgement
from elastic.local.transport import Damaged, Transport, fragment_name
from elastic.run.estimate import THREADS
from elastic.run.records import Header
from elastic.run.rundir import RunDir
from elastic.saved import merge
from elastic.saved.codec import Tile, accepted, as_bytes, codec_of
from elastic.saved.versions import Draft, read_exactly, read_layout, read_params


class DeltaLost(ElasticError):
    """A delta's bytes were good when it was checked and are not any more."""

    def __init__(self, key: tuple[int, int, int], why: Judgement):
        super().__init__(why.reason)
        self.key, self.why = key, why


@dataclass(frozen=True)
class Recipe:
    """How version `base` becomes the next one. `factors`: what each delta is multiplied by."""

    base: int
    headers: tuple[Header, ...] = ()
    factors: tuple[float, ...] = ()
    lr: float = 0.0
    momentum: float = 0.0  # mu
    restore: int = -1  # take back to this version, with momentum 0, instead


Part = tuple[merge.Products, list[dict]]  # of a fragment: `Outer.products`, its files' entries


class Arithmetic:
    """A run's parameters and outer momentum, and how they go on."""

    def __init__(self, run: RunDir, config: Config, base: int):
        self.run, self.config = run, config
        self.layout = read_layout(run, base)
        self.indices = range(len(self.layout.fragments))
        self._codecs = {each.name: each for each in accepted(config.local_sgd.compression)}
        empty = [torch.empty(0)] * len(self.layout.fragments)
        self._outer = merge.Outer(self.layout, list(empty), list(empty), mu=0.0)
        self._recipe: Recipe | None = None
        self._begun: set[int] = set()  # fragments that may not be those of `base` any more
        self._stepped: dict[int, merge.Products] = {}  # those of the next version
        self._own = threading.local()
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        # One thread of torch's in each: sums have the same bits on every machine.
        self._pool = ThreadPoolExecutor(threads, "arithmetic", torch.set_num_threads, (1,))
        self.transport = Transport(run)
        self._base = base
        self._all(lambda index: self._load(index, base))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- as deltas arrive

    def square(self, header: Header) -> float:
        """The squared norm of a delta. Raises Damaged, and ValueError where its codec does."""

        def of_one(index: int) -> float:
            norms = [merge.norm(tile) for _, tile in self._read(header, index)]
            square = sum(norm**2 for norm in norms)
            # What a fragment of buffers holds is judged by nothing but being finite: 0 · inf
            return 0.0 * square if self.layout.has_buffers(index) else square

        return sum(self._all(of_one))

    def _read(self, header: Header, index: int) -> Iterator[Tile]:
        """A fragment of a delta, from this thread's buffer: valid until its next read."""
        place, fragment = self.layout.fragments[index], header.fragments[index]
        chosen = codec_of(place, self._codecs[header.codec])
        data = self._buffer("data", fragment.bytes, torch.uint8)
        self.transport.get(fragment_name(header.key, index), fragment, as_bytes(data))
        return chosen.tiles(data, place)

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This thread's own; fresh memory of that size costs as much as the arithmetic."""
        kept = getattr(self._own, name, None)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype)
            setattr(self._own, name, kept)
        return kept[:numel]

    # ---- when the round closes

    def advance(self, recipe: Recipe, draft: Draft) -> list[Part]:
        """Write the next version's fragments into a draft; may be asked again.

        Raises DeltaLost; OSError, as of a full disk; TryAgain.
        """
        self._be_at(recipe)
        return self._all(lambda index: self._advance_one(index, recipe, draft))

    def _be_at(self, recipe: Recipe) -> None:
        """Hold version `recipe.base`, or what became of it by this very recipe."""
        if recipe.base == self._base + 1 and len(self._stepped) == len(self.indices):
            self._base, self._begun, self._stepped = recipe.base, set(), {}
        elif recipe != self._recipe or recipe.base != self._base:
            if recipe.base != self._base:
                self._begun = set(self.indices)
            self._base, self._recipe, self._stepped = recipe.base, None, {}
            again = [self._pool.submit(self._load, index, recipe.base) for index in self._begun]
            wait_for(again)  # where one fails, all of them are still to be loaded
            self._begun = set()
        self._recipe, self._outer.mu = recipe, recipe.momentum

    def _load(self, index: int, version: int) -> None:
        """Hold a fragment as of a version."""
        params, momentum = read_exactly(self.run, self.run.commit(version), self.layout, index)
        self._outer.params[index], self._outer.momentum[index] = params, momentum

    def _advance_one(self, index: int, recipe: Recipe, draft: Draft) -> Part:
        if index not in self._stepped:
            if index in self._begun:
                self._load(index, recipe.base)
            self._begun.add(index)
            self._stepped[index] = self._step(index, recipe)
        params, momentum = self._outer.params[index], self._outer.momentum[index]
        files = draft.write_fragment(self.layout, index, params, momentum)
        return self._stepped[index], files

    def _step(self, index: int, recipe: Recipe) -> merge.Products:
        products = (0.0, 0.0, 0.0)
        if recipe.restore >= 0:
            self._load(index, recipe.restore)
            self._outer.momentum[index].zero_()
        else:
            params, terms = self._outer.params[index], self._terms(index, recipe)
            mean = self._buffer("mean", params.numel(), torch.float32)
            if self.layout.has_buffers(index):  # the mean of what the workers have
                params.sub_(merge.mean_delta(params, terms, 1.0, mean))
            else:
                merge.mean_delta(params, terms, self.config.local_sgd.reanchor, mean)
                products = self._outer.products(index, mean)
                self._outer.step_one(index, mean, recipe.lr)
        return products

    def _terms(self, index: int, recipe: Recipe) -> Iterator[merge.Term]:
        for header, factor in zip(recipe.headers, recipe.factors, strict=True):
            try:
                delta = self._read(header, index)
            except Damaged as error:
                raise DeltaLost(header.key, error.why) from None
            anchor = None
            if header.base < recipe.base:
                base = self.run.commit(header.base)
                anchor = read_params(self.run, base, self.layout, index)
            yield merge.Term(delta, factor, anchor)

    def _all(self, work: Callable[[int], object]) -> list:
        """`work` for every fragment, to its end also where one fails; DeltaLost comes first."""
        return wait_for([self._pool.submit(work, index) for index in self.indices])


def wait_for(futures: Sequence[Future]) -> list:
    """All results, when all are done. Of several errors DeltaLost is raised before any other."""
    wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((each for each in errors if isinstance(each, DeltaLost)), errors[0])
    return [future.result() for future in futures]
