"""The layout: how parameters are laid out in fragments, and buffers in others. Pure.

A fragment is a contiguous slice of the flattened model: whole parameters, in the model's
order, up to `fragment_bytes` of float32 (a larger parameter is a fragment by itself).
Fragments are published, averaged and pulled each on its own. A delta is checked against
the layout's hash.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Tensor:
    """A named parameter, or buffer, and its place in its fragment (in elements)."""

    name: str
    shape: tuple[int, ...]
    start: int
    is_buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, flat):
        """This tensor's elements in its fragment's flat tensor: a view."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class Layout:
    fragments: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple], fragment_bytes: float) -> "Layout":
        """Pack (name, shape) of parameters, and (name, shape, True) of buffers, in order;
        4 bytes each."""
        fragments: list[list[Tensor]] = []
        size = 0
        for name, shape, *is_buffer in shapes:
            tensor = Tensor(name, tuple(shape), 0, bool(is_buffer))
            is_other = fragments and fragments[-1][0].is_buffer != tensor.is_buffer
            if not fragments or is_other or 4 * (size + tensor.numel) > fragment_bytes:
                fragments.append([])
                size = 0
            fragments[-1].append(replace(tensor, start=size))
            size += tensor.numel
        return cls(tuple(map(tuple, fragments)))

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(sum(tensor.numel for tensor in fragment) for fragment in self.fragments)

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> list[list[tuple]]:
        """What `of` was given, fragment by fragment."""
        return [[(t.name, t.shape, *[True] * t.is_buffer) for t in fragment]
                for fragment in self.fragments]

    def has_buffers(self, index: int) -> bool:
        """Is it a fragment of buffers? They travel as they are, and are averaged, not
        trained."""
        return self.fragments[index][0].is_buffer

    @classmethod
    def from_json(cls, data: list) -> "Layout":
        return cls(tuple(cls.of(fragment, math.inf).fragments[0] for fragment in data))
