"""The master's averaging: what each delta weighs, and the commit."""

import math
from dataclasses import dataclass

from elastic.base.config import Config
from elastic.local import guards, rounds
from elastic.local.guards import Moved, Running
from elastic.local.master.arithmetic import Arithmetic, Recipe
from elastic.local.rounds import Judgement, Rule, Verdict
from elastic.local.transport import Damaged, fragment_name
from elastic.run.records import Header
from elastic.run.rundir import RunDir
from elastic.saved import merge
from elastic.saved.codec import accepted, codec_of
from elastic.saved.versions import Draft, read_layout


@dataclass(frozen=True)
class Checked:
    """A delta whose bytes were read once: what was measured, or why it is refused."""

    header: Header
    norm: float = 0.0
    refused: Judgement | None = None

    @property
    def moved(self) -> Moved:
        return Moved(self.norm, self.header.steps, self.header.lr_sum)


class Averager:
    """The global parameters as of a commit, and how they go on."""

    def __init__(self, run: RunDir, config: Config, commit: dict):
        self.run, self.config, self._commit = run, config, commit
        self.layout = read_layout(run, commit["version"])
        # What a delta's fragments must have, in each codec in which it may come.
        self.fragment_bytes = {
            codec.name: tuple(codec_of(f, codec).size_bytes(f) for f in self.layout.fragments)
            for codec in accepted(config.local_sgd.compression)
        }
        self.arithmetic = Arithmetic(run, config, commit["version"])
        self.running = self._next_running = Running.of(commit)

    def close(self) -> None:
        self.arithmetic.close()

    # ---- as deltas arrive

    def check(self, header: Header) -> Checked:
        """Read a delta once: are its bytes whole, is it finite, and how long is it?"""
        try:
            square = self.arithmetic.square(header)
        except Damaged as error:
            return Checked(header, refused=error.why)
        except ValueError as error:  # its codec cannot read it
            return Checked(header, refused=Judgement(Verdict.REJECT, str(error), Rule.MALFORMED))
        if not square < math.inf:
            what = "an element is nan or inf, or overflows"
            return Checked(header, refused=rounds.refusal(Rule.NON_FINITE, what))
        return Checked(header, square**0.5)

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
            record = record | self._advance(recipe, draft)
            files = record.pop("files")
            if not draft.commit(self.layout, files, record):
                return None
        except Exception:
            draft.discard()
            raise
        self.running = self._next_running
        self._commit = {"version": version, **record}
        return self._commit

    def _advance(self, recipe: Recipe, draft: Draft) -> dict:
        products, files = zip(*self.arithmetic.advance(recipe, draft), strict=True)
        cos, files = merge.cosine(products), sorted(sum(files, []), key=lambda e: e["path"])
        gain = rounds.outer_gain(recipe.lr, recipe.momentum, cos)
        return {"cos": cos, "outer_gain": gain, "files": files}

    def drop(self, keys: list[tuple[int, int, int]]) -> None:
        """Forget the bytes of deltas that have been dealt with."""
        indices = range(len(self.layout.fragments))
        self.arithmetic.transport.drop(fragment_name(key, i) for key in keys for i in indices)
