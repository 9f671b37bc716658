"""The layout: how the model's parameters are laid out in fragments.

A fragment is a contiguous slice of the flattened model: whole parameters, in the model's order, up
to `fragment_bytes` of float32 (a larger parameter is a fragment by itself). Fragments are
published, averaged and pulled each on its own. A delta is checked against the layout's hash.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """A named parameter and its place in its fragment (in elements)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    fragments: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], fragment_bytes: float) -> "Layout":
        """Pack parameters in order; 4 bytes each."""
        fragments: list[list[Tensor]] = []
        size = 0
        for name, shape in shapes:
            numel = math.prod(shape)
            if not fragments or 4 * (size + numel) > fragment_bytes:
                fragments.append([])
                size = 0
            fragments[-1].append(Tensor(name, tuple(shape), size))
            size += numel
        return cls(tuple(map(tuple, fragments)))

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(sum(tensor.numel for tensor in fragment) for fragment in self.fragments)

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> list:
        return [[[t.name, list(t.shape)] for t in fragment] for fragment in self.fragments]

    @classmethod
    def from_json(cls, data: list) -> "Layout":
        return cls(tuple(cls.of(fragment, math.inf).fragments[0] for fragment in data))
