"""Codecs: a delta's fragment as bytes, and back.

A codec is stateless and knows the exact number of bytes of `n` elements, so that the master can
refuse a header before it allocates anything. Bytes are little-endian, elements in layout order.

    none   float32, 4n bytes
    bf16   bfloat16, round to nearest even, 2n bytes
"""

import torch

from elastic.errors import UsageError


class Codec:
    """Every element, in one floating-point type."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self.dtype = name, dtype

    def size_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, delta: torch.Tensor) -> memoryview:
        """Bytes of a 1-D float32 tensor on the CPU; may share its memory."""
        return as_bytes(delta.to(self.dtype))

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """1-D float32 tensor from a 1-D uint8 one; may share its memory."""
        return data.view(self.dtype).float()


CODECS = {"none": Codec("none", torch.float32), "bf16": Codec("bf16", torch.bfloat16)}


def codec(name: str) -> Codec:
    """The codec of that name (config key local_sgd.compression)."""
    if name not in CODECS:
        legal = ", ".join(CODECS)
        raise UsageError(f"local_sgd.compression = {name!r} is not known", f"legal: {legal}")
    return CODECS[name]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy())
