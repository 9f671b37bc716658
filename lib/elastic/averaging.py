"""The master's arithmetic: check deltas as they arrive, merge them, write the next version.

It holds the float32 parameters and the outer momentum, and while it merges one mean delta: three
copies of the model, plus one fragment of one delta at a time. Fragments are independent.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from elastic import merge, rounds
from elastic.codec import Tile, accepted, as_bytes
from elastic.config import Config
from elastic.errors import ElasticError
from elastic.rounds import Header, Running
from elastic.rundir import RunDir
from elastic.store import Store
from elastic.transport import Damaged, fragment_name, open_transport
from elastic.versions import Draft, read_outer, read_params


@dataclass(frozen=True)
class Checked:
    """A delta whose bytes were read once: its norm, or why it is refused."""

    header: Header
    norm: float = 0.0
    refused: str = ""


class DeltaLost(ElasticError):
    """A delta's bytes were good when it was checked and are not any more."""

    def __init__(self, key: tuple[int, int, int], what: str):
        super().__init__(what)
        self.key = key


class Averager:
    def __init__(
        self, run: RunDir, config: Config, commit: dict, pool: ThreadPoolExecutor, store: Store
    ):
        self.run, self.config, self._commit, self._pool = run, config, commit, pool
        self._outer = read_outer(run, commit, config.local_sgd.outer_momentum)
        self.layout = self._outer.layout
        self._codecs = {codec.name: codec for codec in accepted(config.local_sgd.compression)}
        # What a delta's fragments must have, in each codec in which it may come.
        self.fragment_bytes = {
            name: tuple(map(codec.size_bytes, self.layout.fragments))
            for name, codec in self._codecs.items()
        }
        # Kept from round to round: fresh memory of this size costs as much as the arithmetic.
        self._means = [torch.empty_like(params) for params in self._outer.params]
        self._buffers = threading.local()
        self.use(store)
        self._running = Running(**commit.get("running", {}))

    def use(self, store: Store) -> None:
        """Read deltas through this store from now on, where they travel through Redis."""
        self._transport = open_transport(self.config, self.run, store)

    # ---- as deltas arrive

    def check(self, header: Header) -> Checked:
        """Read a delta once: are its bytes whole, is it finite, how long is it?"""
        squares = 0.0
        try:
            for index in range(len(header.fragments)):
                squares += sum(merge.norm(tile) ** 2 for _, tile in self._read(header, index))
        except (Damaged, ValueError) as error:
            return Checked(header, refused=str(error))
        if not squares < float("inf"):
            return Checked(header, refused="non-finite: an element is nan or inf, or overflows")
        return Checked(header, squares**0.5)

    def _read(self, header: Header, index: int) -> Iterator[Tile]:
        """A fragment of a delta, from this thread's buffer: valid until its next read."""
        fragment = header.fragments[index]
        if not hasattr(self._buffers, "data"):
            most = max(map(max, self.fragment_bytes.values()))
            self._buffers.data = torch.empty(most, dtype=torch.uint8)
        data = self._buffers.data[: fragment.bytes]
        self._transport.get(fragment_name(header.key, index), fragment, as_bytes(data))
        return self._codecs[header.codec].tiles(data, self.layout.fragments[index])

    # ---- when the round closes

    def merge(self, accepted: list[Checked]) -> dict:
        """Apply the outer step. Returns what the commit says about it.

        Raises DeltaLost, with nothing applied, if a delta's bytes went bad meanwhile.
        """
        accepted = sorted(accepted, key=lambda checked: checked.header.key)
        headers = [checked.header for checked in accepted]
        norms = [checked.norm for checked in accepted]
        settings, version = self.config.local_sgd, self._commit["version"]
        shares = rounds.shares(headers, norms, version, settings.clip_norm, self._running)
        weight = sum(share.weight for share in shares)
        factors = [share.weight * share.clip / weight for share in shares]
        work = [(index, headers, factors) for index in range(len(self.layout.fragments))]
        products = list(self._pool.map(self._mean, *zip(*work, strict=True)))
        cos = merge.cosine(products)
        lr = rounds.outer_lr(settings.outer_lr, weight, self._running, settings.thin_rounds)
        steps = (range(len(self._means)), self._means, [lr] * len(self._means))
        list(self._pool.map(self._outer.step_one, *steps))
        whole = rounds.whole_norms(headers, norms)
        self._running = self._running.after(sum(whole) / len(whole), weight)
        return {
            "outer_lr": lr, "cos": cos, "clipped": sum(share.clip < 1 for share in shares),
            "outer_gain": rounds.outer_gain(lr, settings.outer_momentum, cos),
            "running": {"norm": self._running.norm, "weight": self._running.weight},
            "bytes": sum(part.bytes for header in headers for part in header.fragments),
        }  # fmt: skip

    def _mean(self, index: int, headers: list[Header], factors: list[float]) -> tuple:
        """Fill the fragment's mean; returns its products."""
        params, mean = self._outer.params[index], self._means[index]
        terms = self._terms(index, headers, factors)
        merge.mean_delta(params, terms, self.config.local_sgd.reanchor, mean)
        return self._outer.products(index, mean)

    def _terms(self, index: int, headers: list[Header], factors: list[float]):
        for header, factor in zip(headers, factors, strict=True):
            try:
                delta = self._read(header, index)
            except Damaged as error:
                raise DeltaLost(header.key, str(error)) from None
            anchor = None
            if header.base < self._commit["version"]:
                base = self.run.commit(header.base)
                anchor = read_params(self.run, base, self.layout, index)
            yield merge.Term(delta, factor, anchor)

    def commit(self, epoch: int, record: dict) -> dict | None:
        """Write and link the next version; None if another master committed it first.

        OSError (a full disk) leaves nothing behind and loses nothing: the version is complete in
        memory, to be committed by another call.
        """
        version = self._commit["version"] + 1
        draft = Draft(self.run, version, f"epoch{epoch}")
        try:
            if not draft.commit(self.layout, self._write(draft), record):
                return None
        except OSError:
            draft.discard()
            raise
        self._commit = {"version": version, **record}
        return self._commit

    def _write(self, draft: Draft) -> list[dict]:
        """Every file of the version, as many at a time as the pool has threads."""
        outer, layout = self._outer, self.layout
        writes = []
        for index, params in enumerate(outer.params):
            momentum = outer.momentum[index]
            writes.append(self._pool.submit(draft.write_outer, layout, index, params, momentum))
            writes.append(self._pool.submit(draft.write_params, layout, index, params))
        wait(writes)  # also when one fails: the draft is removed then
        return sorted((write.result() for write in writes), key=lambda entry: entry["path"])

    def drop(self, keys: list[tuple[int, int, int]]) -> None:
        """Forget the bytes of deltas that have been dealt with."""
        sizes = [max(each) for each in zip(*self.fragment_bytes.values(), strict=True)]
        parts = [(fragment_name(key, i), size) for key in keys for i, size in enumerate(sizes)]
        self._transport.drop(parts)
