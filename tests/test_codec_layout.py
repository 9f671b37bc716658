"""How a model becomes fragments, and a fragment bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.codec import CODECS, as_bytes, codec
from elastic.errors import UsageError
from elastic.layout import Layout

SHAPES = st.lists(
    st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=12
).map(lambda shapes: [(f"p{i}", shape) for i, shape in enumerate(shapes)])


@given(SHAPES, st.integers(4, 4000))
def test_every_parameter_is_in_one_fragment_in_the_models_order(shapes, fragment_bytes):
    layout = Layout.of(shapes, fragment_bytes)
    placed = [(t.name, t.shape) for fragment in layout.fragments for t in fragment]
    assert placed == shapes
    for fragment, numel in zip(layout.fragments, layout.numels, strict=True):
        assert 4 * numel <= fragment_bytes or len(fragment) == 1
        assert [t.start for t in fragment][0] == 0
        for before, after in zip(fragment, fragment[1:], strict=False):
            assert after.start == before.start + before.numel


@given(SHAPES, st.integers(4, 4000))
def test_a_layout_survives_json_and_its_hash_tells_layouts_apart(shapes, fragment_bytes):
    layout = Layout.of(shapes, fragment_bytes)
    assert Layout.from_json(layout.to_json()) == layout
    other = Layout.of([*shapes, ("more", (1,))], fragment_bytes)
    assert other.hash != layout.hash
    renamed = Layout.of([(name + "x", shape) for name, shape in shapes], fragment_bytes)
    assert renamed.hash != layout.hash


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [0, 1, 255, 4096])
def test_a_codec_knows_its_size_and_comes_back(name: str, numel: int):
    one = codec(name)
    delta = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    data = bytes(one.encode(delta))
    assert len(data) == one.size_bytes(numel)
    back = one.decode(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[
        : len(data)])  # fmt: skip
    assert back.dtype == torch.float32
    exact = torch.equal(back, delta)
    assert exact if name == "none" else torch.equal(back, delta.bfloat16().float())


def test_float32_is_little_endian_in_layout_order():
    assert bytes(codec("none").encode(torch.tensor([1.0, -2.0]))) == bytes.fromhex(
        "0000803f000000c0"
    )


def test_an_unknown_codec_names_the_known_ones():
    with pytest.raises(UsageError, match="zip"):
        codec("zip")


def test_bytes_of_a_tensor_are_its_memory():
    tensor = torch.zeros(4)
    as_bytes(tensor)[0:4] = bytes.fromhex("0000803f")
    assert tensor[0] == 1.0
