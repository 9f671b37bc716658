"""Codecs: a delta's fragment as bytes, and back.

A codec knows the exact number of bytes from the number of elements, so that the master
can refuse a header before it allocates anything. Bytes are little-endian, elements in
layout order.

    none     float32, 4 bytes an element
    int8     blocks of 256: a bfloat16 scale each, then a byte per element          1.008 bytes
    int4     blocks of 128: a bfloat16 scale each, then two elements per byte       0.516 bytes

int8 and int4 round to the nearest of evenly spaced values: the error of an element is at
most half a step, as often up as down, so that none is kept for the next delta.
(INTELLECT-1, arXiv 2412.01152, sends int8 without feedback, too.)
"""

from collections.abc import Iterator

import torch

Tile = tuple[int, torch.Tensor]  # where it starts in its fragment, and its elements

# Elements of a tile. So many fit a shared cache; with smaller tiles threads would wait
# for each other's turn in Python. Fresh memory for a whole fragment would cost more than
# the arithmetic.
TILE = 1 << 20
TINY = 1e-38


class Floats:
    """Every element, as it is."""

    name = "none"

    def size_bytes(self, numel: int) -> int:
        """Exactly as many bytes as `encode` makes of so many elements."""
        return 4 * numel

    def encode(self, delta: torch.Tensor) -> memoryview:
        """Bytes of a 1-D float32 tensor; may share its memory."""
        return as_bytes(delta)

    def tiles(self, data: torch.Tensor, numel: int) -> Iterator[Tile]:
        """The elements in 1-D float32 pieces, of a 1-D uint8 tensor of the right size.

        A piece is good until the next one is asked for: they may share memory.
        """
        return _cut(data.view(torch.float32), TILE)


class Blocks:
    """Integers of a few bits, in blocks that share a scale. First come all scales, then
    all integers."""

    def __init__(self, name: str, bits: int, block: int):
        self.name, self.bits, self.block = name, bits, block
        self._most = 2 ** (bits - 1) - 1

    def size_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) + -(-numel * self.bits // 8)

    def encode(self, delta: torch.Tensor) -> memoryview:
        data = delta.new_empty(self.size_bytes(delta.numel()), dtype=torch.uint8)
        scales, packed = self._parts(data, delta.numel())
        for start, tile in _cut(delta):
            blocks = _rows(tile, self.block)
            scale = _bf16_above(blocks.abs().amax(1) / self._most)
            scales[start // self.block :][: len(scale)] = scale
            numbers = (blocks / scale.float().clamp_min_(TINY)[:, None]).round_().to(torch.int8)
            numbers = numbers.flatten()[: tile.numel()]
            body = numbers.view(torch.uint8) if self.bits == 8 else _paired(numbers)
            packed[start * self.bits // 8 :][: len(body)] = body
        return as_bytes(data)

    def tiles(self, data: torch.Tensor, numel: int) -> Iterator[Tile]:
        scales, packed = self._parts(data, numel)
        room = torch.empty(min(2 * packed.numel(), TILE), device=packed.device)
        for start, body in _cut(packed, TILE * self.bits // 8):
            start = start * 8 // self.bits
            numbers = body.view(torch.int8) if self.bits == 8 else _unpaired(body)
            numbers = numbers[: numel - start]
            values = room[: len(numbers)].copy_(numbers)
            scale = scales[start // self.block :][: -(-values.numel() // self.block)].float()
            whole = values.numel() // self.block
            values[: whole * self.block].view(whole, self.block).mul_(scale[:whole, None])
            values[whole * self.block :].mul_(scale[whole:])
            yield start, values

    def _parts(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of scales and integers in a fragment's bytes."""
        scales = 2 * -(-numel // self.block)
        return data[:scales].view(torch.bfloat16), data[scales:]


Codec = Floats | Blocks
# By local_sgd.compression.
CODECS = {each.name: each for each in (Floats(), Blocks("int8", 8, 256), Blocks("int4", 4, 128))}


def codec_of(has_buffers: bool, chosen: Codec) -> Codec:
    """The codec of a fragment. Buffers travel as they are: a block of them may hold a
    mean of 0.01 and a variance of 1e4."""
    return CODECS["none"] if has_buffers else chosen


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, on the CPU."""
    return memoryview(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())


def _cut(values: torch.Tensor, most: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Where each piece starts, and the piece, of a size that fits a cache; on a GPU all
    at once."""
    most = most or (len(values) if values.is_cuda else TILE) or 1
    return ((start, values[start : start + most]) for start in range(0, len(values), most))


def _rows(values: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of `width`, the last one filled up with zeros; a view if nothing is missing."""
    rows = -(-values.numel() // width)
    return torch.nn.functional.pad(values, (0, rows * width - values.numel())).view(rows, width)


def _bf16_above(values: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is not below each of these (none is negative)."""
    near = values.bfloat16()
    above = (near.view(torch.int16) + 1).view(near.dtype)
    return torch.where(near.float() < values, above, near)


def _paired(numbers: torch.Tensor) -> torch.Tensor:
    """Two 4-bit integers per byte, the first in the low half."""
    halves = _rows(numbers.view(torch.uint8) & 15, 2)
    return halves[:, 0] | halves[:, 1] << 4


def _unpaired(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([packed << 4, packed & 0xF0], 1).view(torch.int8)
    return pairs.flatten() >> 4  # with their sign
