"""Codecs and the layout: exact sizes, exact values, and a hash that tells models apart.

    pytest tests/saved/test_codec_layout.py
"""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from elastic.saved.codec import CODECS, as_bytes
from elastic.saved.layout import Layout
from elastic.saved.versions import split
from merging import decoded

floats = st.lists(st.floats(width=32, allow_nan=False), max_size=40)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12)
SIZES = [0, 1, 2, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 10_000]


def journey(name, values):
    """Encode, copy the bytes as a transport does, decode."""
    chosen, numel = CODECS[name], values.numel()
    encoded = chosen.encode(values)
    assert len(encoded) == chosen.size_bytes(numel)
    received = torch.empty(len(encoded), dtype=torch.uint8)
    as_bytes(received)[:] = encoded
    return decoded(chosen, received, numel)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(floats)
@settings(max_examples=50)
def test_float32_deltas_arrive_bit_for_bit(values):
    sent = torch.tensor(values, dtype=torch.float32)
    received = journey("none", sent)
    assert received.dtype == torch.float32
    assert torch.equal(received.view(torch.int32), sent.view(torch.int32))


def test_what_is_not_finite_arrives_as_such():
    """The master has to see it to refuse it."""
    sent = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    received = journey("none", sent)
    assert received.isnan().tolist() == [True, False, False, False]
    assert received[1:].tolist() == [math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_arrive_as_finite(name, bad):
    sent = normal(1000)
    sent[700] = bad
    assert not journey(name, sent).isfinite().all()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("none", {1: 4, 1000: 4000}),
        ("int8", {1: 3, 256: 258, 257: 261, 1_000_000: 1_000_000 + 2 * 3907}),
        ("int4", {1: 3, 128: 66, 129: 69, 1_000_000: 500_000 + 2 * 7813}),
    ],
)
def test_sizes_are_known_before_anything_is_encoded(name, sizes):
    known = CODECS[name]
    assert known.size_bytes(0) == 0
    assert {n: known.size_bytes(n) for n in sizes} == sizes


def test_bytes_are_little_endian_in_layout_order():
    sent = torch.tensor([1.0, -2.0])
    hexes = {name: CODECS[name].encode(sent).hex() for name in CODECS}
    scale = "823c"  # 2/127, rounded up
    assert hexes["none"] == "0000803f000000c0"
    assert hexes["int8"] == scale + "3f" + "82"  # 63 and -126 of 0.01587
    assert hexes["int4"] == "933e" + "93"  # 3 and -7 of 0.2871


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_every_length_makes_the_journey(name, numel):
    received = journey(name, normal(numel))
    assert received.shape == (numel,)
    assert received.dtype == torch.float32


@pytest.mark.parametrize("name", CODECS)
def test_nothing_arrives_as_nothing(name):
    assert not journey(name, torch.zeros(2700)).any()


@pytest.mark.parametrize(("name", "block", "steps"), [("int8", 256, 127), ("int4", 128, 7)])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_an_integer_is_at_most_half_a_step_off(name, block, steps, scale):
    """A bfloat16 scale, rounded up, is at most a part in 128 longer than the exact one."""
    sent = normal(10 * block) * scale
    off = (journey(name, sent) - sent).abs().view(10, block)
    largest = sent.abs().view(10, block).amax(1, keepdim=True)
    assert (off <= largest / steps / 2 * (1 + 1 / 128)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_are_as_often_above_as_below(name):
    """The mean error of 2,000 deltas is nothing beside that of one: no bias that adds up."""
    sent = torch.stack([normal(256, seed=seed) for seed in range(2000)])
    off = torch.stack([journey(name, each) for each in sent]) - sent
    assert off.mean().abs() < 4 * off.std() / off.numel() ** 0.5


def test_bytes_of_a_tensor_are_its_memory():
    tensor = torch.zeros(4)
    as_bytes(tensor)[4:8] = bytes.fromhex("0000803f")
    assert tensor.tolist() == [0.0, 1.0, 0.0, 0.0]


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
    ]
    assert layout.numels == (2, 100, 3)
