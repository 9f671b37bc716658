"""The master's averaging: who checks which fragments, what each delta weighs, and the commit.

The arithmetic is done by shards (shard.py): by one in this process, or, where the master's job has
more cores or nodes than that one can use, by several in processes of their own. Shards share the
fragments; each writes its part of a version, and the version is committed when all parts are there.
The bits of a version do not depend on how many shards there are.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter

from elastic import guards, merge, rounds
from elastic.codec import accepted, codec_of
from elastic.config import Config, elastic_home, env
from elastic.estimate import THREADS
from elastic.guards import Moved, Running
from elastic.rounds import Header
from elastic.rundir import RunDir
from elastic.shard import Averages, Part, Recipe, RemoteShard, Shard, wait_for
from elastic.signals import Notice
from elastic.store import Store
from elastic.transport import fragment_name, open_transport, transport_of
from elastic.versions import Draft, read_layout


@dataclass(frozen=True)
class Checked:
    """A delta whose bytes were read once: what was measured, or why it is refused."""

    header: Header
    norm: float = 0.0
    refused: str = ""
    along: float = 0.0  # its cosine with the outer momentum; 0: unknown

    @property
    def moved(self) -> Moved:
        return Moved(self.norm, self.header.steps, self.header.lr_sum, self.along)


class Averager:
    """The global parameters as of a commit, and how they go on."""

    def __init__(self, run: RunDir, config: Config, commit: dict, store: Store, notice: Notice):
        self.run, self.config, self._commit = run, config, commit
        self.layout = read_layout(run, commit["version"])
        # What a delta's fragments must have, in each codec in which it may come.
        self.fragment_bytes = {
            codec.name: tuple(codec_of(f, codec).size_bytes(f) for f in self.layout.fragments)
            for codec in accepted(config.local_sgd.compression)
        }
        self.shards = self._open_shards(store, notice)
        self._asking = ThreadPoolExecutor(len(self.shards), "asking")
        self.use(store)
        self.running = self._next_running = Running.of(commit)

    def _open_shards(self, store: Store, notice: Notice) -> list[Averages]:
        nodes = _nodes(self.config)
        of = min(self.config.local_sgd.shards or _enough(len(nodes)), len(self.layout.fragments))
        if of == 1:
            every = range(len(self.layout.fragments))
            return [Shard(self.run, self.config, self._commit["version"], every, store)]
        return [
            RemoteShard(self.run, i, _command(self.run, nodes[i % len(nodes)], i, of), notice)
            for i in range(of)
        ]

    def use(self, store: Store) -> None:
        """Read deltas through this store from now on, where they travel through Redis."""
        self._transport = open_transport(transport_of(self._commit), self.run, store)
        for shard in self.shards:
            shard.use(store)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self._asking.shutdown(wait=True, cancel_futures=True)

    # ---- as deltas arrive

    def check(self, header: Header) -> Checked:
        """Read a delta once: are its bytes whole, is it finite, how long is it, and where to?"""
        products: dict[int, merge.Products] = {}
        for found in self._ask(lambda shard: shard.check(header)):
            if isinstance(found, str):
                return Checked(header, refused=found)
            products |= found
        told = [products[index] for index in sorted(products)]
        square = sum(delta for _, _, delta in told)
        if not square < math.inf:
            return Checked(header, refused="non-finite: an element is nan or inf, or overflows")
        return Checked(header, square**0.5, along=merge.cosine(told))

    def _ask(self, question) -> list:
        """Every shard's answer, all asked at once."""
        if len(self.shards) == 1:
            return [question(self.shards[0])]
        return wait_for([self._asking.submit(question, shard) for shard in self.shards])

    # ---- when the round closes

    def weigh(self, checked: list[Checked]) -> tuple[Recipe, dict]:
        """How these deltas become the next version, and what the commit says about it."""
        checked = sorted(checked, key=lambda each: each.header.key)
        headers, moves = [each.header for each in checked], [each.moved for each in checked]
        settings, base = self.config.local_sgd, self._commit["version"]
        shares = rounds.shares(headers, moves, base, settings.clip_norm, self.running)
        weight = sum(share.weight for share in shares)
        factors = [share.weight * share.clip / weight for share in shares]
        lr = rounds.outer_lr(settings.outer_lr, weight, self.running, settings.thin_rounds)
        steps = rounds.inner_steps(self._commit, settings)
        momentum = rounds.momentum(steps, settings)
        loss = guards.round_loss(headers, base)
        self._next_running = self.running.after(moves, weight, loss)
        said = {
            "outer_lr": lr, "outer_momentum": momentum, "inner_steps": steps,
            "clipped": sum(share.clip < 1 for share in shares),
            "running": self._next_running.to_json(),
            "bytes": sum(part.bytes for header in headers for part in header.fragments),
        }  # fmt: skip
        return Recipe(base, tuple(headers), tuple(factors), lr, momentum), said

    def take_back(self) -> tuple[Recipe, dict]:
        """How the version before becomes the next one, as `weigh` does. Without momentum: what
        made this version bad may be in it."""
        base = self._commit["version"]
        self._next_running = self.running.after_taking_back()
        said = {"taken_back": base, "suspect": guards.suspect(self._commit["deltas"]),
                "running": self._next_running.to_json(), "bytes": 0}  # fmt: skip
        return Recipe(base, restore=base - 1), said

    def commit(self, epoch: int, recipe: Recipe, record: dict) -> dict | None:
        """Take every fragment one version further, write and link it; None if it is committed
        already: by another master, or by a try whose answer was lost. Raises DeltaLost if a delta's
        bytes went bad meanwhile.

        OSError (a full disk) leaves nothing behind and loses nothing: call it again.
        """
        version, writer = recipe.base + 1, f"epoch{epoch}"
        if self.run.commit(version):
            return None
        draft = Draft(self.run, version, writer)
        try:
            record = record | self._advance(recipe, writer)
            files = record.pop("files")
            if not draft.commit(self.layout, files, record):
                return None
        except Exception:
            draft.discard()
            raise
        self.running = self._next_running
        self._commit = {"version": version, **record}
        return self._commit

    def _advance(self, recipe: Recipe, writer: str) -> dict:
        answers = self._ask(lambda shard: shard.advance(recipe, writer))
        unsorted = (part for parts in answers for part in parts)
        parts: list[Part] = sorted(unsorted, key=attrgetter("index"))
        cos = merge.cosine(part.products for part in parts)
        files = sorted((entry for part in parts for entry in part.files), key=lambda e: e["path"])
        gain = rounds.outer_gain(recipe.lr, recipe.momentum, cos)
        return {"cos": cos, "outer_gain": gain, "files": files}

    def drop(self, keys: list[tuple[int, int, int]]) -> None:
        """Forget the bytes of deltas that have been dealt with."""
        sizes = [max(each) for each in zip(*self.fragment_bytes.values(), strict=True)]
        parts = [(fragment_name(key, i), size) for key in keys for i, size in enumerate(sizes)]
        self._transport.drop(parts)


def _enough(nodes: int) -> int:
    """As many shards as there is work for on the cores of `nodes` like this one."""
    return nodes * math.ceil(len(os.sched_getaffinity(0)) / THREADS)


def _nodes(config: Config) -> list[str]:
    """The nodes of the master's job; one without a name where it is not Slurm's."""
    if config.run.scheduler != "slurm":
        return [""]
    from elastic.slurm_info import job_nodes

    return job_nodes() or [""]


def _command(run: RunDir, node: str, index: int, of: int) -> list[str]:
    """What starts shard `index` of `of` on a node of this job."""
    program = str(elastic_home() / "bin" / "elastic")
    command = [program, "shard", str(run.path), str(index), str(of)]
    if not node or node == env("SLURMD_NODENAME"):
        return command
    from elastic.sched_slurm import step_argv

    return step_argv([node], 1, command)
