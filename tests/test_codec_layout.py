"""Codecs and the layout: exact sizes, exact values, and a hash that tells models apart.

    pytest tests/test_codec_layout.py
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.codec import CODECS, as_bytes, codec
from elastic.errors import UsageError
from elastic.layout import Layout
from elastic.versions import split

floats = st.lists(st.floats(width=32, allow_nan=False), max_size=40)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12)


def journey(name, values):
    """Encode, copy the bytes as a transport does, decode."""
    chosen = codec(name)
    encoded = chosen.encode(values)
    assert len(encoded) == chosen.size_bytes(values.numel())
    received = torch.empty(len(encoded), dtype=torch.uint8)
    as_bytes(received)[:] = encoded
    return chosen.decode(received)


@given(floats)
@settings(max_examples=50)
def test_float32_deltas_arrive_bit_for_bit(values):
    sent = torch.tensor(values, dtype=torch.float32)
    received = journey("none", sent)
    assert received.dtype == torch.float32
    assert torch.equal(received.view(torch.int32), sent.view(torch.int32))


@given(floats)
@settings(max_examples=50)
def test_bf16_deltas_arrive_rounded_to_nearest_even(values):
    sent = torch.tensor(values, dtype=torch.float32)
    received = journey("bf16", sent)
    assert received.dtype == torch.float32
    assert torch.equal(received, sent.bfloat16().float())


@given(st.integers(-120, 120), st.integers(0, 255), st.booleans())
@settings(max_examples=50)
def test_bf16_loses_at_most_one_part_in_256(exponent, mantissa, exact):
    value = math.ldexp(1 + mantissa / (128 if exact else 256), exponent)
    received = journey("bf16", torch.tensor([value])).item()
    assert abs(received - value) <= value / 256


def test_a_bf16_tie_goes_to_the_even_neighbour():
    ties = torch.tensor([1 + 1 / 256, 1 + 3 / 256])
    assert journey("bf16", ties).tolist() == [1.0, 1 + 4 / 256]


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_arrives_as_such(name):
    """The master has to see it to refuse it."""
    sent = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    received = journey(name, sent)
    assert received.isnan().tolist() == [True, False, False, False]
    assert received[1:].tolist() == [math.inf, -math.inf, 0.0]


@pytest.mark.parametrize(("name", "size_bytes"), [("none", 4), ("bf16", 2)])
def test_sizes_are_known_before_anything_is_encoded(name, size_bytes):
    assert [codec(name).size_bytes(numel) for numel in (0, 1, 1000)] == [
        0, size_bytes, 1000 * size_bytes,
    ]  # fmt: skip


def test_bytes_are_little_endian_in_layout_order():
    sent = torch.tensor([1.0, -2.0])
    assert codec("none").encode(sent).hex() == "0000803f000000c0"
    assert codec("bf16").encode(sent).hex() == "803f00c0"


def test_bytes_of_a_tensor_are_its_memory():
    tensor = torch.zeros(4)
    as_bytes(tensor)[4:8] = bytes.fromhex("0000803f")
    assert tensor.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_an_unknown_codec_is_named_with_the_legal_ones():
    with pytest.raises(UsageError, match="'zip'") as caught:
        codec("zip")
    assert caught.value.hint == "legal: none, bf16"


# ---- the layout ---------------------------------------------------------------------------------


def named(list_of_shapes):
    return [(f"p{index}", shape) for index, shape in enumerate(list_of_shapes)]


@given(shapes, st.integers(1, 400))
@settings(max_examples=100)
def test_fragments_hold_whole_parameters_in_order_and_no_more_than_fits(list_of_shapes, limit):
    layout = Layout.of(named(list_of_shapes), limit)
    tensors = [tensor for fragment in layout.fragments for tensor in fragment]
    assert [(t.name, t.shape) for t in tensors] == named(list_of_shapes)
    for fragment, numel in zip(layout.fragments, layout.numels, strict=True):
        assert [t.start for t in fragment] == [
            sum(before.numel for before in fragment[:index]) for index in range(len(fragment))
        ]
        assert numel == sum(t.numel for t in fragment)
        assert 4 * numel <= limit or len(fragment) == 1 or 4 * numel == 4 * fragment[0].numel
    for fragment, after in zip(layout.fragments, layout.fragments[1:], strict=False):
        assert 4 * (sum(t.numel for t in fragment) + after[0].numel) > limit  # no needless cut


@given(shapes, st.integers(1, 400))
@settings(max_examples=50)
def test_a_layout_survives_being_written_and_read(list_of_shapes, limit):
    layout = Layout.of(named(list_of_shapes), limit)
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).hash == layout.hash


@given(shapes, st.integers(1, 400))
@settings(max_examples=50)
def test_a_fragment_splits_into_its_parameters_without_copying(list_of_shapes, limit):
    layout = Layout.of(named(list_of_shapes), limit)
    for index, numel in enumerate(layout.numels):
        flat = torch.arange(numel, dtype=torch.float32)
        parts = split(layout, index, flat)
        assert {name: tuple(part.shape) for name, part in parts.items()} == {
            t.name: t.shape for t in layout.fragments[index]
        }
        assert torch.equal(torch.cat([part.flatten() for part in parts.values()]), flat)
        for part in parts.values():
            assert part.numel() == 0 or part.untyped_storage().data_ptr() == flat.data_ptr()


def test_the_hash_tells_models_apart():
    base = [("a", (2, 3)), ("b", (4,))]
    others = [
        Layout.of([("a", (3, 2)), ("b", (4,))], 1000),  # a shape
        Layout.of([("a", (2, 3)), ("c", (4,))], 1000),  # a name
        Layout.of([("b", (4,)), ("a", (2, 3))], 1000),  # the order
        Layout.of(base, 30),  # the fragments
        Layout.of(base[:1], 1000),
    ]
    hashes = {layout.hash for layout in [Layout.of(base, 1000), *others]}
    assert len(hashes) == 6
    assert Layout.of(base, 1000).hash == Layout.of(iter(base), 2000).hash


def test_a_parameter_larger_than_a_fragment_is_one_by_itself():
    layout = Layout.of([("a", (2,)), ("big", (100,)), ("b", (2,)), ("c", ())], 40)
    assert [[t.name for t in fragment] for fragment in layout.fragments] == [
        ["a"], ["big"], ["b", "c"],
    ]  # fmt: skip
    assert layout.numels == (2, 100, 3)
