"""The language models that come with the toolkit: one decoder-only transformer in two
styles.

Tokens become vectors; each layer adds what attention finds in earlier tokens and what a
small feed-forward network makes of each token by itself; a linear head scores the next
token.

    gpt     LayerNorm, learned positions, GELU   the byte-level model of the demo
    llama   RMSNorm, rotary positions, SwiGLU    the presets 125m, 1b3 and 7b

Neither has biases, buffers or tied weights: the parameters are the whole state of a
model, which is what is published, averaged and pulled. `Transformer` builds only
structure, so under `torch.device("meta")` a 7B model costs nothing; `initial_values`
draws what it begins with, one parameter at a time, from a seed and without touching the
global random state. `model.layers` is a ModuleList, the unit by which FSDP shards and
activations are recomputed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic.base.errors import UsageError

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0

# -----------------------------------------------------------------------------
# Shapes


@dataclass(frozen=True)
class Shape:
    """All that determines a model's parameters and how it computes. Raises UsageError."""

    style: str = "llama"
    vocabulary: int = 32_000
    context: int = 2048  # tokens; the longest sequence
    dim: int = 768  # of the vector that represents a token
    layers: int = 12
    heads: int = 12
    checkpointing: bool = False  # recompute activations in the backward pass to save memory

    def __post_init__(self):
        if self.style not in ("gpt", "llama"):
            raise UsageError(f"model style {self.style!r}", hint="gpt or llama")
        for name in ("vocabulary", "context", "dim", "layers", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"model {name} = {getattr(self, name)}: at least 1 is needed")
        if self.dim % self.heads:
            raise UsageError(f"model dim {self.dim} is not a multiple of its {self.heads} heads")
        if self.style == "llama" and self.head_dim % 2:
            raise UsageError(f"rotary positions need an even dim/heads, not {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def width(self) -> int:
        """Of the feed-forward network; SwiGLU has three matrices, so 2/3 of 4 dim,
        rounded up."""
        return 4 * self.dim if self.style == "gpt" else -(-8 * self.dim // 3 // 256) * 256


PRESETS = {
    "125m": Shape(dim=768, layers=12, heads=12),
    "1b3": Shape(dim=2048, layers=24, heads=16),
    "7b": Shape(dim=4096, layers=32, heads=32, context=4096),
}

# -----------------------------------------------------------------------------
# Layers


def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, head_dim/2) each: position times a frequency per pair.

    Made anew in every layer: it is cheap.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * ROPE_BASE**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of x by its angle: scores then depend on
    distance."""
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.rotary = shape.style == "llama"
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.qkv.matrix_rows = shape.dim  # three matrices for Muon
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # batch head time d
        q, k, v = heads.chunk(3, dim=1)
        if self.rotary:
            table = rotary_table(x.shape[1], self.head_dim, x.device)
            q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Widen, bend, narrow: GELU in GPT; in Llama (SwiGLU) one half opens a gate for the
    other."""

    def __init__(self, shape: Shape):
        super().__init__()
        gated = shape.style == "llama"
        self.gate = nn.Linear(shape.dim, shape.width, bias=False) if gated else None
        self.up = nn.Linear(shape.dim, shape.width, bias=False)
        self.down = nn.Linear(shape.width, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * up if self.gate else F.gelu(up))


def norm(shape: Shape) -> nn.Module:
    if shape.style == "gpt":
        return nn.LayerNorm(shape.dim, eps=NORM_EPS, bias=False)
    return nn.RMSNorm(shape.dim, eps=NORM_EPS)


def table(rows: int, dim: int) -> nn.Embedding:
    """One without values: torch draws them by code that imports its compiler, a second
    and more at every start of a worker."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


class Layer(nn.Module):
    """Attention, then the feed-forward network, each normalised before and added
    after."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.attention_norm = norm(shape)
        self.attention = Attention(shape)
        self.feed_forward_norm = norm(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


# -----------------------------------------------------------------------------
# The model


class Transformer(nn.Module):
    """(batch, time) token ids to (batch, time, vocabulary) scores of the token that
    follows."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = table(shape.vocabulary, shape.dim)
        self.positions = table(shape.context, shape.dim) if shape.style == "gpt" else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.shape.context:
            raise UsageError(f"{length} tokens exceed the model's context of {self.shape.context}")
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        recompute = self.shape.checkpointing and self.training
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return self.head(self.norm(x))

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and, on the CPU, its values: norms are one, matrices
        small normal numbers.

        Their spread is that of Nguyen and Salazar (2019), and smaller still for what
        layers add to the sum, the more layers there are (GPT-2).
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.empty(parameter.shape, device="cpu")
            if parameter.dim() < 2:
                yield name, values.fill_(1.0)
                continue
            std = math.sqrt(2 / (5 * self.shape.dim))
            if name.endswith(("output.weight", "down.weight")):
                std /= math.sqrt(2 * self.shape.layers)
            yield name, values.normal_(0.0, std, generator=generator)


def create(shape: Shape, seed: int | None = None) -> Transformer:
    """A model with its values, on the default device; without a seed,
    torch.initial_seed() is it.

    So the same `torch.manual_seed` gives the same parameters, however often this is
    called. Under torch.device("meta") nothing is allocated and there are no values to
    set.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = Transformer(shape)
    if device.type != "meta":
        model.to_empty(device=device)
        seed = torch.initial_seed() if seed is None else seed
        model.load_state_dict(dict(model.initial_values(seed)))
    return model
