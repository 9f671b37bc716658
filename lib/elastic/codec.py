"""Codecs: a delta's fragment as bytes, and back.

A codec knows the exact number of bytes of a fragment from its layout, so that the master can refuse
a header before it allocates anything. Bytes are little-endian, elements in layout order.

    none     float32, 4 bytes an element
    bf16     bfloat16, round to nearest even, 2 bytes
    int8     blocks of 256: a bfloat16 scale each, then a byte per element          1.008 bytes
    int4     blocks of 128: a bfloat16 scale each, then two elements per byte       0.516 bytes
    topk     the 41 largest of each 4,096: a float32 scale, then words of 12 bits of index and 4 of
             value                                                                  0.021 bytes
    lowrank  each matrix as P Qᵀ of rank 8 in bfloat16 (PowerSGD, arXiv 1905.13727); what has not
             two dimensions, or would not shrink, in bfloat16

int8 and int4 round to the nearest of evenly spaced values: the error of an element is at most half
a step, as often up as down. topk and lowrank leave most of a delta out; what they leave out is
added to the next one (`Encoder`), so that all of it arrives in the end. They run where the delta
is, on a GPU too. (Layouts and evidence: SparseLoCo, arXiv 2508.15706; int8 without feedback:
INTELLECT-1, arXiv 2412.01152.)
"""

from typing import Protocol

import torch

from elastic.errors import UsageError
from elastic.layout import Layout, Tensor

Fragment = tuple[Tensor, ...]

CHUNK, KEPT = 4096, 41  # of topk: one in a hundred
RANK, SWEEPS = 8, 2  # of lowrank
MOST_4BIT = 7


class Codec(Protocol):
    name: str
    feedback: float = 0.0  # beta: how much of what was left out goes into the next delta

    def size_bytes(self, fragment: Fragment) -> int:
        """Exactly as many bytes as `encode` makes of it."""

    def encode(self, delta: torch.Tensor, fragment: Fragment) -> memoryview:
        """Bytes of a 1-D float32 tensor; may share its memory."""

    def decode(self, data: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        """1-D float32 tensor from a 1-D uint8 one of the right size; may share its memory.

        Raises ValueError for bytes that `encode` never makes.
        """


class Floats(Codec):
    """Every element, in one floating-point type."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self.dtype = name, dtype

    def size_bytes(self, fragment: Fragment) -> int:
        return _numel(fragment) * self.dtype.itemsize

    def encode(self, delta: torch.Tensor, fragment: Fragment) -> memoryview:
        return as_bytes(delta.to(self.dtype))

    def decode(self, data: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        return data.view(self.dtype).float()


class Blocks(Codec):
    """Integers of a few bits, in blocks that share a scale."""

    def __init__(self, name: str, bits: int, block: int):
        self.name, self.bits, self.block = name, bits, block
        self._most = 2 ** (bits - 1) - 1

    def size_bytes(self, fragment: Fragment) -> int:
        numel = _numel(fragment)
        return 2 * -(-numel // self.block) + -(-numel * self.bits // 8)

    def encode(self, delta: torch.Tensor, fragment: Fragment) -> memoryview:
        blocks = _rows(delta, self.block)
        scales = _bf16_above(blocks.abs().amax(1, keepdim=True) / self._most)
        # Of a block of zeros the scale is 0; of one that is not finite, it says so to the master.
        numbers = (blocks / scales.float()).nan_to_num_(0.0).round_().to(torch.int8)
        numbers = numbers.flatten()[: delta.numel()]
        return _end_to_end(scales, numbers if self.bits == 8 else _paired(numbers))

    def decode(self, data: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        numel = _numel(fragment)
        blocks = -(-numel // self.block)
        scales = data[: 2 * blocks].view(torch.bfloat16).float()
        packed = data[2 * blocks :]
        numbers = packed.view(torch.int8) if self.bits == 8 else _unpaired(packed)[:numel]
        values = numbers.to(torch.float32)
        whole = numel // self.block
        values[: whole * self.block].view(whole, self.block).mul_(scales[:whole, None])
        values[whole * self.block :].mul_(scales[whole:])
        return values


class TopK(Codec):
    """The largest elements of each chunk. The bytes of a fragment's chunks: scales, then words."""

    name, feedback = "topk", 0.95

    def size_bytes(self, fragment: Fragment) -> int:
        return -(-_numel(fragment) // CHUNK) * (4 + 2 * KEPT)

    def encode(self, delta: torch.Tensor, fragment: Fragment) -> memoryview:
        rows = _rows(delta, CHUNK)
        places = rows.abs().topk(KEPT).indices.sort().values
        values = rows.gather(1, places)
        scales = values.abs().amax(1, keepdim=True) / MOST_4BIT
        numbers = (values / scales).nan_to_num_(0.0).round_().int() + 8
        return _end_to_end(scales, (places.int() << 4 | numbers).to(torch.int16))

    def decode(self, data: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        numel = _numel(fragment)
        rows = -(-numel // CHUNK)
        scales = data[: 4 * rows].view(torch.float32).view(rows, 1)
        words = data[4 * rows :].view(torch.int16).view(rows, KEPT).int() & 0xFFFF
        places = (words >> 4).long()
        if not (places[:, 1:] > places[:, :-1]).all():
            raise ValueError("malformed: indices that do not ascend")
        values = ((words & 15) - 8) * scales
        return torch.zeros(rows, CHUNK).scatter_(1, places, values).flatten()[:numel]


class LowRank(Codec):
    """Each matrix as a product of two thin ones."""

    name, feedback = "lowrank", 1.0

    def size_bytes(self, fragment: Fragment) -> int:
        return sum(2 * sum(self._parts(tensor)) for tensor in fragment)

    def encode(self, delta: torch.Tensor, fragment: Fragment) -> memoryview:
        parts = []
        for tensor in fragment:
            part = delta[tensor.start : tensor.start + tensor.numel]
            is_thin = len(self._parts(tensor)) == 2
            parts += _factors(part.view(tensor.shape[0], -1)) if is_thin else [part]
        return _end_to_end(*(part.bfloat16() for part in parts))

    def decode(self, data: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        values, at, parts = data.view(torch.bfloat16).float(), 0, []
        for tensor in fragment:
            found = []
            for numel in self._parts(tensor):
                found.append(values[at : at + numel])
                at += numel
            thin = [each.view(-1, RANK) for each in found] if len(found) == 2 else []
            parts.append((thin[0] @ thin[1].T).flatten() if thin else found[0])
        return torch.cat(parts)

    @staticmethod
    def _parts(tensor: Tensor) -> tuple[int, ...]:
        """Elements of P and Q, or of the tensor itself."""
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        thin = (RANK * rows, RANK * tensor.numel // rows if rows else 0)
        return thin if rows and 2 * sum(thin) < tensor.numel else (tensor.numel,)


CODECS = {
    chosen.name: chosen
    for chosen in (
        Floats("none", torch.float32), Floats("bf16", torch.bfloat16),
        Blocks("int8", 8, 256), Blocks("int4", 4, 128), TopK(), LowRank(),
    )
}  # fmt: skip
DENSE = CODECS["int8"]  # what a last delta is encoded with where others leave something out


def codec(name: str) -> Codec:
    """The codec of that name (config key local_sgd.compression)."""
    if name not in CODECS:
        legal = ", ".join(CODECS)
        raise UsageError(f"local_sgd.compression = {name!r} is not known", f"legal: {legal}")
    return CODECS[name]


def accepted(name: str) -> list[Codec]:
    """The codecs in which deltas may come to a run of that compression."""
    chosen = codec(name)
    return [chosen, DENSE] if chosen.feedback else [chosen]


class Encoder:
    """A worker's codec with error feedback:  a = β e + d ;  send encode(a) ;  e = a − decode of it.

    `residuals` (e, float32, one per fragment) belong to the slot, and outlive the process.
    """

    def __init__(self, compression: str, layout: Layout):
        self.codec, self._layout = codec(compression), layout
        self.residuals: dict[int, torch.Tensor] = {}

    def encode(self, index: int, delta: torch.Tensor, last: bool = False) -> memoryview:
        """A fragment's bytes. `last`: nothing may follow, so send what has been left out, too."""
        fragment, chosen = self._layout.fragments[index], self.chosen(last)
        beta = self.codec.feedback
        if beta and (residual := self.residuals.get(index)) is not None:
            delta = delta.add(residual.to(delta.device), alpha=beta)
        data = chosen.encode(delta, fragment)
        if beta:
            arrives = chosen.decode(torch.frombuffer(data, dtype=torch.uint8), fragment)
            self.residuals[index] = delta.cpu().sub(arrives)
        return data

    def chosen(self, last: bool) -> Codec:
        return DENSE if last and self.codec.feedback else self.codec


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, on the CPU."""
    return memoryview(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())


def _end_to_end(*tensors: torch.Tensor) -> memoryview:
    return as_bytes(torch.cat([each.contiguous().flatten().view(torch.uint8) for each in tensors]))


def _numel(fragment: Fragment) -> int:
    return sum(tensor.numel for tensor in fragment)


def _rows(values: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of `width`, the last one filled up with zeros; a view where nothing is missing."""
    rows = -(-values.numel() // width)
    return torch.nn.functional.pad(values, (0, rows * width - values.numel())).view(rows, width)


def _bf16_above(values: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is not below each of these (none is negative)."""
    near = values.bfloat16()
    return torch.where(near.float() < values, (near.view(torch.int16) + 1).view(near.dtype), near)


def _paired(numbers: torch.Tensor) -> torch.Tensor:
    """Two 4-bit integers per byte, the first in the low half."""
    halves = _rows(numbers.view(torch.uint8) & 15, 2)
    return halves[:, 0] | halves[:, 1] << 4


def _unpaired(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([packed << 4, packed & 0xF0], 1).view(torch.int8)
    return pairs.flatten() >> 4  # with their sign


def _factors(matrix: torch.Tensor) -> list[torch.Tensor]:
    """P, orthonormal, and Q with P Qᵀ close to `matrix`: subspace iteration from a fixed start."""
    fixed = torch.Generator().manual_seed(matrix.shape[1])
    thin = torch.randn(matrix.shape[1], RANK, generator=fixed).to(matrix.device)
    for _ in range(SWEEPS):
        left = torch.linalg.qr(matrix @ thin).Q
        thin = matrix.T @ left
    return [left, thin]
