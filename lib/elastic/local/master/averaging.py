"""Averaging: what deltas measure, a version's parameters from the one before, and its
commit.

It checks deltas as they arrive, and takes a run's fragments one version further: each in
one of several threads, which reads the deltas, adds them up, steps and writes. So while
one fragment is read another one is added up or written, and beside parameters and
momentum there are one fragment of a mean and one of a delta per thread in memory. The
bits do not depend on the number of threads.

Processes in their place were no faster: torch lets go of Python's lock in its kernels,
and Python's own part of a tile is 26 microseconds of a millisecond
(tests/bench/bench_codec.py). Twice as many threads, to use the time that they wait for
the disk, were predicted to save a third; they saved 5 % (a stall of 3.63 s for 3.81, with
134M parameters on two cores).
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from elastic.base.config import Config
from elastic.base.errors import ElasticError, TryAgain
from elastic.jobs.program import cores
from elastic.local.master.open_round import Checked, Part
from elastic.local.rounds import Rule
from elastic.local.transport import Damaged, Transport, fragment_name
from elastic.run.estimate import THREADS
from elastic.run.ledger import Key
from elastic.run.records import Commit, Header
from elastic.run.rundir import RunDir
from elastic.saved import inner_state, merge
from elastic.saved.codec import CODECS, Tile, as_bytes, codec_of
from elastic.saved.versions import VersionDraft, prune, read_exactly, read_layout


class Averager:
    """A run's parameters and outer momentum, and how the next version is made of them."""

    def __init__(self, run: RunDir, config: Config, base: int):
        self.run, self.config = run, config
        self.layout = read_layout(run, base)
        self.indices = range(len(self.layout.fragments))
        chosen = CODECS[config.local_sgd.compression]
        self._codecs = [codec_of(self.layout.has_buffers(index), chosen) for index in self.indices]
        pairs = zip(self._codecs, self.layout.numels, strict=True)
        # What a delta's fragments must have.
        self.fragment_bytes = tuple(codec.size_bytes(numel) for codec, numel in pairs)
        empty = [torch.empty(0)] * len(self.layout.fragments)
        self.params, self.momentum = list(empty), list(empty)  # flat, float32
        self._own = threading.local()
        threads = min(THREADS, cores())
        # One thread of torch's in each: sums have the same bits on every machine.
        self.threads = ThreadPoolExecutor(threads, "sums", torch.set_num_threads, (1,))
        self._pool = ThreadPoolExecutor(threads)  # for work that waits for those threads
        self._cleaning: Future | None = None
        self.transport = Transport(run)
        self._hold(base)

    def close(self) -> None:
        if self._cleaning:
            wait([self._cleaning])
        for pool in (self._pool, self.threads):
            pool.shutdown(wait=True, cancel_futures=True)

    # ---- as deltas arrive

    def check_later(self, header: Header) -> Future:
        return self._pool.submit(self.check, header)

    def check(self, header: Header) -> Checked:
        """Read a delta once: how long is it? Raises Damaged if its bytes are not whole, or
        not finite."""

        def square(index: int) -> float:
            has_buffers = self.layout.has_buffers(index)
            norms = (merge.norm(tile) for _, tile in self.read(header, index))
            return sum(merge.length_squared(norm, has_buffers) for norm in norms)

        total = sum(self._all(square))
        if not total < math.inf:
            what = "an element is nan or inf, or overflows"
            raise Damaged(header.key, Rule.NON_FINITE, what)
        return Checked(header, total**0.5)

    def read(self, header: Header, index: int) -> Iterator[Tile]:
        """A fragment of a delta, from this thread's buffer: valid until its next read."""
        fragment = header.fragments[index]
        data = self._buffer("data", fragment.bytes, torch.uint8)
        self.transport.get(header.key, index, fragment, as_bytes(data))
        return self._codecs[index].tiles(data, self.layout.numels[index])

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of this thread's own, used again and again: fresh memory costs as much
        as the arithmetic."""
        kept = getattr(self._own, name, None)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype)
            setattr(self._own, name, kept)
        return kept[:numel]

    # ---- when the round closes

    def commit(self, commit: Commit, parts: list[Part]) -> Commit | None:
        """Take every fragment one version further, write and link it. None if that
        version is committed already: by another master, or by a try whose answer was
        lost. Raises Damaged if a delta's bytes went bad meanwhile.

        After an OSError (a full disk) nothing is left behind or lost: call it again.
        """
        if self.run.commits.of(commit.version):
            return None
        draft = VersionDraft(self.run, commit.version, f"epoch{commit.master_epoch}")
        try:
            files, agreement = self.advance(commit, parts, draft)
            return draft.commit(self.layout, files, replace(commit, agreement=agreement))
        except Exception:
            draft.discard()
            raise

    def advance(self, commit: Commit, parts: list[Part], draft: VersionDraft) -> tuple:
        """Write the next version into a draft; the entries of its files, and the
        agreement of the round. After an error it may be called again, and begins with the
        base's files. Raises Damaged, TryAgain, and OSError, as of a full disk."""
        if self._held != commit.version - 1:
            self._hold(commit.version - 1)
        self._held = -1
        done = self._all(lambda index: self._advance_one(index, commit, parts, draft))
        self._held = commit.version
        files, products = zip(*done, strict=True)
        files = sorted(sum(files, []), key=lambda entry: entry["path"])
        return files, merge.cosine(torch.stack(products))

    def _hold(self, version: int) -> None:
        self._held = -1  # no whole version is in memory
        self._all(lambda index: self._load(index, version))
        self._held = version

    def _load(self, index: int, version: int) -> None:
        """Hold a fragment as of a version."""
        found = read_exactly(self.run, self.run.commits.of(version), self.layout, index)
        self.params[index], self.momentum[index] = found

    def _advance_one(self, index: int, commit: Commit, parts: list[Part], draft) -> tuple:
        products = torch.zeros(3)
        if commit.taken_back is not None:  # its momentum may hold what made that version bad
            self._load(index, commit.taken_back - 1)
            self.momentum[index].zero_()
        else:
            params, terms = self.params[index], self._terms(index, commit.version - 1, parts)
            mean = self._buffer("mean", params.numel(), torch.float32)
            if self.layout.has_buffers(index):  # the mean of what the workers have
                params.sub_(merge.mean_delta(params, terms, 1.0, mean))
            else:
                merge.mean_delta(params, terms, self.config.local_sgd.reanchor, mean)
                products = merge.outer_step(params, self.momentum[index], mean,
                                            commit.outer_lr, commit.outer_momentum)
        tensors = self.params[index], self.momentum[index]
        return draft.write_fragment(self.layout, index, *tensors), products

    def _terms(self, index: int, newest: int, parts: list[Part]) -> Iterator[merge.Term]:
        anchors: dict[int, torch.Tensor] = {}  # by version
        for header, factor in parts:
            if header.base < newest and header.base not in anchors:
                anchors[header.base] = self._anchor(header, index)
            yield merge.Term(self.read(header, index), factor, anchors.get(header.base))

    def _anchor(self, header: Header, index: int) -> torch.Tensor:
        """The fragment that a late delta began with. Raises Damaged if that old version cannot
        be read any more: the newest one can, and the run goes on without the delta."""
        base = self.run.commits.of(header.base)
        try:
            # Not as published: late deltas would pull the parameters towards bf16's values.
            return read_exactly(self.run, base, self.layout, index)[0]
        except TryAgain:
            raise
        except ElasticError as error:
            raise Damaged(header.key, Rule.UNREADABLE, error.what) from None

    def _all(self, work: Callable[[int], object]) -> list:
        """The results of `work` for every fragment. If one fails the others still end."""
        futures = [self.threads.submit(work, index) for index in self.indices]
        wait(futures)
        return [future.result() for future in futures]

    # ---- afterwards

    def clean_up_later(self, version: int, merged: list[Key]) -> None:
        """In a thread: to remove gigabytes takes its time, and workers wait for samples."""
        self._cleaning = self._pool.submit(self.clean_up, version, merged)

    def clean_up(self, version: int, merged: list[Key]) -> None:
        """Forget the bytes of what is merged, and what is too old for anybody."""
        with contextlib.suppress(TryAgain):
            self.drop(merged)
        keep = max(self.config.checkpoint.keep, self.config.local_sgd.max_staleness + 1)
        prune(self.run, version, keep, self.config.checkpoint.keep_every)
        inner_state.forget(self.run, version - self.config.local_sgd.inner_state_max_age)

    def drop(self, keys: list[Key]) -> None:
        """Forget the bytes of deltas that have been dealt with."""
        self.transport.drop(fragment_name(key, i) for key in keys for i in self.indices)
