"""The shuffle is a bijection for every size, seed and epoch, the same everywhere, and it mixes."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from elastic.run.shuffle import index


def excess(counts: Counter, cells: int) -> float:
    """How far counts are from uniform: the chi-square statistic in its own standard deviations."""
    expected = counts.total() / cells
    chi_square = sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))
    return (chi_square - (cells - 1)) / (2 * (cells - 1)) ** 0.5


def indices(order: tuple[int, int, int], start: int, stop: int) -> list[int]:
    """The samples at positions start to stop - 1."""
    return [index(*order, position) for position in range(start, stop)]


@given(st.integers(0, 400), st.integers(), st.integers(0, 1000))
def test_every_sample_appears_exactly_once(size, seed, epoch):
    order = indices((size, seed, epoch), 0, size)
    assert sorted(order) == list(range(size))


@pytest.mark.parametrize("size", [4095, 4096, 4097, 65537])
def test_sizes_around_powers_of_two_are_covered(size):
    assert set(indices((size, 7, 3), 0, size)) == set(range(size))


@given(st.integers(10**9, 10**15), st.integers(0, 10**9), st.data())
def test_huge_datasets_need_no_list_and_have_no_repeats(size, seed, data):
    start = data.draw(st.integers(0, size - 500))
    part = indices((size, seed, 0), start, start + 500)
    assert len(set(part)) == 500
    assert all(0 <= each < size for each in part)


def test_the_order_is_the_same_on_every_machine_and_python():
    assert indices((10, 0, 0), 0, 10) == [4, 8, 3, 7, 2, 5, 9, 0, 6, 1]
    part = indices((10**9, 1234, 5), 10**8, 10**8 + 4)
    assert part == [290611794, 906238593, 657859438, 998531406]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(indices((50, seed, epoch), 0, 50)) for seed in range(10) for epoch in range(10)
    }
    assert len(orders) == 100


@pytest.mark.parametrize("size", [2, 3, 7, 10, 16, 100])
def test_each_position_sees_every_sample_equally_often_over_seeds(size):
    for position in (0, size // 2, size - 1):
        seen = Counter(index(size, seed, 0, position) for seed in range(2000))
        assert excess(seen, size) < 5


@pytest.mark.parametrize("size", [1000, 10**5, 10**9])
@pytest.mark.parametrize("lag", [1, 2, 31, 316])
def test_neighbours_in_the_order_are_unrelated_samples(size, lag):
    order = indices((size, 5, 2), 0, min(size, 10_000))
    gaps = Counter((b - a) % size * 50 // size for a, b in zip(order, order[lag:], strict=False))
    assert excess(gaps, 50) < 5


def test_the_same_position_in_two_epochs_holds_unrelated_samples():
    size = 10**5
    first, second = (indices((size, 5, epoch), 0, 10_000) for epoch in (0, 1))
    gaps = Counter((b - a) % size * 50 // size for a, b in zip(first, second, strict=True))
    assert excess(gaps, 50) < 5


@pytest.mark.parametrize("position", [-1, 10, 11])
def test_a_position_outside_the_epoch_is_an_index_error(position):
    with pytest.raises(IndexError, match=f"position {position} of 10 samples"):
        index(10, 0, 0, position)
