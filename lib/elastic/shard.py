"""A shard: the averaging of some of a run's fragments, in this process or in one of its own.

It checks its part of deltas as they arrive, and takes its fragments one version further: for each
one, in a pool of threads, read the deltas, add them up, step, write. So while one fragment is read
the next is added and the one before is written, and beside parameters and momentum a shard holds
one fragment of a mean and one of a delta per thread.

What it holds follows from a commit and a recipe. One that dies is started again, loads the commit
that it had, and answers the same question with the same bits: nothing else has to be done for it.

    master --  {"do": "check", ...}  -->  python -m elastic.start shard RUN INDEX OF
           <--  {"answer": ...}  ------   lines of JSON over its standard input and output;
                                          where the input ends the process ends
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from elastic import merge
from elastic.codec import Tile, accepted, as_bytes, codec_of
from elastic.config import Config
from elastic.errors import ElasticError, Exit, TryAgain
from elastic.estimate import THREADS
from elastic.rounds import Header
from elastic.rundir import RunDir
from elastic.signals import Notice
from elastic.store import Store
from elastic.transport import Damaged, fragment_name, open_transport, transport_of
from elastic.versions import Draft, read_exactly, read_layout, read_params

MOST_DEATHS = 5  # of a shard, over one question


class DeltaLost(ElasticError):
    """A delta's bytes were good when it was checked and are not any more."""

    def __init__(self, key: tuple[int, int, int], what: str):
        super().__init__(what)
        self.key = key


@dataclass(frozen=True)
class Recipe:
    """How version `base` becomes the next one. `factors`: what each delta is multiplied by."""

    base: int
    headers: tuple[Header, ...] = ()
    factors: tuple[float, ...] = ()
    lr: float = 0.0
    momentum: float = 0.0  # mu
    restore: int = -1  # take back to this version, with momentum 0, instead

    @classmethod
    def from_json(cls, data: dict) -> "Recipe":
        headers = tuple(map(Header.from_json, data.pop("headers")))
        return cls(headers=headers, factors=tuple(data.pop("factors")), **data)


@dataclass(frozen=True)
class Part:
    """A fragment of the next version: `merge.Outer.products`, and its files' entries."""

    index: int
    products: merge.Products
    files: list[dict]


class Averages(Protocol):
    """A shard, wherever it runs."""

    def check(self, header: Header) -> dict[int, merge.Products] | str:
        """By fragment, of the outer momentum and a delta; or why that is refused."""

    def advance(self, recipe: Recipe, writer: str) -> list[Part]:
        """Write its fragments of the next version into the draft of `writer`.

        May be asked again. Raises DeltaLost; OSError, as of a full disk; TryAgain.
        """

    def use(self, store: Store) -> None:
        """Read deltas through this store from now on, where they travel through Redis."""

    def close(self) -> None:
        """End what it runs on."""


class Shard:
    """The fragments `indices` of a run, held in this process."""

    def __init__(
        self, run: RunDir, config: Config, base: int, indices: Sequence[int], store: Store
    ):
        self.run, self.config, self.indices = run, config, indices
        self.layout = read_layout(run, base)
        self.transport = transport_of(run.commit(base))
        self._codecs = {each.name: each for each in accepted(config.local_sgd.compression)}
        empty = [torch.empty(0)] * len(self.layout.fragments)
        self._outer = merge.Outer(self.layout, list(empty), list(empty), mu=0.0)
        self._recipe: Recipe | None = None
        self._begun: set[int] = set()  # fragments that may not be those of `base` any more
        self._stepped: dict[int, merge.Products] = {}  # those of the next version
        self._own = threading.local()
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        # One thread of torch's in each: sums have the same bits on every machine.
        self._pool = ThreadPoolExecutor(threads, "shard", torch.set_num_threads, (1,))
        self.use(store)
        self._base = base
        self._all(lambda index: self._load(index, base))

    def use(self, store: Store) -> None:
        self._transport = open_transport(self.transport, self.run, store)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- as deltas arrive

    def check(self, header: Header) -> dict[int, merge.Products] | str:
        def products(index: int) -> merge.Products:
            tiles = self._read(header, index)
            told = merge.added(self._outer.products(index, tile, at) for at, tile in tiles)
            if self.layout.has_buffers(index):
                return (0.0, 0.0, 0.0 * told[2])  # judged by nothing but being finite: 0 · inf
            return told

        try:
            return dict(zip(self.indices, self._all(products), strict=True))
        except (Damaged, ValueError) as error:
            return str(error)

    def _read(self, header: Header, index: int) -> Iterator[Tile]:
        """A fragment of a delta, from this thread's buffer: valid until its next read."""
        place, fragment = self.layout.fragments[index], header.fragments[index]
        chosen = codec_of(place, self._codecs[header.codec])
        data = self._buffer("data", fragment.bytes, torch.uint8)
        self._transport.get(fragment_name(header.key, index), fragment, as_bytes(data))
        return chosen.tiles(data, place)

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This thread's own; fresh memory of that size costs as much as the arithmetic."""
        kept = getattr(self._own, name, None)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype)
            setattr(self._own, name, kept)
        return kept[:numel]

    # ---- when the round closes

    def advance(self, recipe: Recipe, writer: str) -> list[Part]:
        self._be_at(recipe)
        draft = Draft(self.run, recipe.base + 1, writer, is_shared=True)
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
        return Part(index, self._stepped[index], files)

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
                raise DeltaLost(header.key, str(error)) from None
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


# ---- in a process of its own --------------------------------------------------------------------


class RemoteShard:
    """The handle of a shard's process: starts it, asks it, starts it again when it has died."""

    def __init__(self, run: RunDir, index: int, command: list[str], notice: Notice):
        self.run, self.index, self._command, self._notice = run, index, command, notice
        self._lock = threading.Lock()
        self._process = self._started()

    def check(self, header: Header) -> dict[int, merge.Products] | str:
        found = self._ask({"do": "check", "header": header.to_json()})
        return found if isinstance(found, str) else {int(i): tuple(p) for i, p in found.items()}

    def advance(self, recipe: Recipe, writer: str) -> list[Part]:
        found = self._ask({"do": "advance", "recipe": asdict(recipe), "writer": writer})
        return [Part(index, tuple(products), files) for index, products, files in found]

    def use(self, store: Store) -> None:
        """It finds the server by itself."""

    def close(self) -> None:
        with self._lock:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def _ask(self, question: dict) -> object:
        with self._lock:
            for _ in range(MOST_DEATHS):
                if said := self._said(question):
                    return _answered(said)
                if self._notice:
                    raise TryAgain(f"notice: shard {self.index} has gone first")
                code = self._process.wait()
                self.run.event("shard-lost", shard=self.index, code=code)
                self._process = self._started()
        raise ElasticError(f"shard {self.index} died {MOST_DEATHS} times over one question",
                           "the master's log has its last words; more memory: slurm.master_options")

    def _started(self) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(self._command, text=True, **pipes)

    def _said(self, question: dict) -> dict:
        """The process's answer; empty if it has died."""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            return {}
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else {}


def _answered(said: dict) -> object:
    """The answer in a shard's line. Raises what it says was raised there."""
    raised = {
        "lost": lambda key, what: DeltaLost(tuple(key), what),
        "os": lambda number, what: OSError(number, what),
        "again": TryAgain,
        "error": ElasticError,
    }
    for name, error in raised.items():
        if name in said:
            raise error(*said[name])
    return said["answer"]


def run(notice: Notice) -> int:
    """Answer the master's questions until there are no more."""
    notice.exit_code = None  # the master decides when to leave
    run, (index, of) = RunDir(Path(sys.argv[1])), map(int, sys.argv[2:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not answer
    shard = Answering(run, index, of)
    for line in sys.stdin:
        answers.write(json.dumps(shard.answer(json.loads(line))) + "\n")
    return Exit.OK


class Answering:
    """A shard that is asked in JSON."""

    def __init__(self, run: RunDir, index: int, of: int):
        self.run, self.config = run, run.config()
        newest = run.newest_version()
        indices = range(len(read_layout(run, newest).fragments))[index::of]
        self._shard = Shard(run, self.config, newest, indices, None)
        self._store: Store | None = None
        self._is_through_redis = self._shard.transport == "redis"

    def answer(self, question: dict) -> dict:
        try:
            self._find_redis()
            return {"answer": getattr(self, f"_{question.pop('do')}")(**question)}
        except DeltaLost as error:
            return {"lost": [error.key, error.what]}
        except TryAgain as error:
            self._store = None
            return {"again": [error.what, error.hint]}
        except ElasticError as error:
            return {"error": [error.what, error.hint]}
        except OSError as error:
            return {"os": [error.errno, error.strerror]}

    def _check(self, header: dict) -> dict[int, merge.Products] | str:
        return self._shard.check(Header.from_json(header))

    def _advance(self, recipe: dict, writer: str) -> list[tuple]:
        parts = self._shard.advance(Recipe.from_json(recipe), writer)
        return [(part.index, part.products, part.files) for part in parts]

    def _find_redis(self) -> None:
        if self._is_through_redis and not self._store:
            self._store = Store.open(self.run, role="master")
            self._shard.use(self._store)
