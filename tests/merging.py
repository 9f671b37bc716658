"""Rounds made by hand: a run directory, deltas as real files, and the master's own averager.

Workers are vectors: the whole model as one flat float32 tensor, in layout order. A worker of
version v starts from `base(v)` (bf16, as published) and ends wherever a test wants it to be.
"""

from dataclasses import dataclass, replace

import torch

from elastic.local.master.averaging import Averager
from elastic.local.master.open_round import Checked, Part, merged
from elastic.local.transport import Transport
from elastic.run.records import Commit, Header
from elastic.run.rundir import RunDir
from elastic.saved.codec import CODECS, Codec
from elastic.saved.layout import Layout
from elastic.saved.merge import outer_step
from elastic.saved.versions import VersionDraft, read_exactly, read_layout, read_params
from helpers import commit_of

SHAPES = [("a.weight", (3, 4)), ("a.bias", (5,)), ("b.weight", (2, 3, 2)), ("scale", ())]
FRAGMENT_BYTES = 64  # three fragments: 12, 5 and 13 elements
COMMIT = commit_of(total_tokens=1000)  # of version 0


@dataclass
class Outer:
    """What the master holds, per fragment and flat: parameters and outer momentum."""

    layout: Layout
    params: list[torch.Tensor]
    momentum: list[torch.Tensor]
    mu: float

    def step(self, index: int, mean: torch.Tensor, lr: float) -> None:
        outer_step(self.params[index], self.momentum[index], mean, lr, self.mu)


def read_outer(run: RunDir, commit: Commit, mu: float) -> Outer:
    """The master's state as of a commit, with outer momentum `mu`."""
    layout = read_layout(run, commit.version)
    parts = [read_exactly(run, commit, layout, index) for index in range(len(layout.fragments))]
    return Outer(layout, *map(list, zip(*parts, strict=True)), mu)


def decoded(chosen: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    """All elements of a fragment at once."""
    values = torch.empty(numel)
    for start, tile in chosen.tiles(data, numel):
        values[start : start + tile.numel()] = tile
    return values


def step(outer: Outer, means: list[torch.Tensor], lr: float) -> None:
    """The outer step of every fragment."""
    for index, mean in enumerate(means):
        outer.step(index, mean, lr)


class Rounds:
    """The life of a run's versions, one `deliver` and one `close` at a time."""

    def __init__(self, run: RunDir, start: torch.Tensor, shapes=SHAPES, fragment_bytes=64):
        self.run, self.config = run, run.config()
        self.layout = Layout.of(shapes, fragment_bytes)
        draft = VersionDraft(run, 0, "slot0.1")
        files = [
            entry
            for index, flat in enumerate(self.parts(start))
            for entry in draft.write_fragment(self.layout, index, flat, torch.zeros_like(flat))
        ]
        assert draft.commit(self.layout, files, COMMIT)
        self.new_master()

    def new_master(self) -> None:
        """Forget everything but the run directory."""
        commit = self.run.commits.newest()
        self.averager = Averager(self.run, self.config, commit.version)
        self.version = commit.version

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for part in flat.float().split(list(self.layout.numels))]

    def base(self, version: int | None = None) -> torch.Tensor:
        """What a worker of `version` (default: the newest) starts from, as float32."""
        commit = self.run.commits.of(self.version if version is None else version)
        indices = range(len(self.layout.fragments))
        return torch.cat([read_params(self.run, commit, self.layout, i).float() for i in indices])

    @property
    def theta(self) -> torch.Tensor:
        """The master's float32 parameters."""
        return torch.cat(self.averager.params)

    @property
    def momentum(self) -> torch.Tensor:
        return torch.cat(self.averager.momentum)

    def put(self, slot: int, local: torch.Tensor, tokens: int, **changes) -> Header:
        """Write the delta of a worker that went from its base to `local`; returns its header."""
        base = changes.get("base", self.version)
        transport, encode = Transport(self.run), CODECS[self.config.local_sgd.compression].encode
        attempt = changes.get("attempt", 1)
        fragments = [
            transport.put((slot, attempt, base), index, encode(delta))
            for index, delta in enumerate(self.parts(self.base(base) - local))
        ]
        defaults = {
            "run": self.run.key, "slot": slot, "attempt": attempt, "job_id": "1", "base": base,
            "layout": self.layout.hash, "codec": self.config.local_sgd.compression, "steps": 10,
            "tokens": tokens, "samples": (), "loss": 1.0, "first_loss": 1.0,
            "fragments": tuple(fragments), "lr_sum": 0.01,
        }
        return Header(**(defaults | changes))

    def deliver(self, slot: int, local: torch.Tensor, tokens: int, **changes) -> Checked:
        """`put`, and the master's look at the bytes."""
        return self.averager.check(self.put(slot, local, tokens, **changes))

    def weigh(self, accepted: list[Checked]) -> tuple[Commit, list[Part]]:
        """The next version's commit, as far as it is known before that is made, and the deltas
        that it is made of."""
        newest = self.run.commits.of(self.version)
        parts, said = merged(accepted, newest, self.config.local_sgd)
        return self.next(**said), parts

    def close(self, accepted: list[Checked]) -> Commit:
        """Merge and commit the next version; returns the commit."""
        self.version = self.averager.commit(*self.weigh(accepted)).version
        return self.run.commits.of(self.version)

    def next(self, **said) -> Commit:
        """The commit of the next version, as far as it is known before that is made."""
        return replace(COMMIT, version=self.version + 1, **said)
