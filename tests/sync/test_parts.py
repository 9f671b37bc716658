"""How ranks share a step: the same samples whatever the number of ranks, and equally many passes.

pytest tests/sync/test_parts.py
"""

from hypothesis import given, strategies as st

from elastic.sync.batches import part, passes

sizes, worlds, micro = st.integers(0, 200), st.integers(1, 40), st.integers(1, 9)


@given(st.integers(0, 10**9), sizes, worlds)
def test_shares_are_the_batch_in_order_and_differ_by_one_at_most(start, size, world):
    batch = range(start, start + size)
    parts = [part(batch, rank, world) for rank in range(world)]
    assert [position for part in parts for position in part] == list(batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes, worlds, micro)
def test_every_rank_makes_as_many_passes_over_its_share_and_none_is_too_large(size, world, most):
    batch = range(7, 7 + size)
    of_rank = [passes(batch, rank, world, most) for rank in range(world)]
    assert len({len(parts) for parts in of_rank}) == 1
    for rank, parts in enumerate(of_rank):
        assert [p for piece in parts for p in piece] == list(part(batch, rank, world))
        assert max(map(len, parts)) <= most


@given(sizes, worlds, micro)
def test_no_pass_is_made_that_no_rank_needs(size, world, most):
    largest = -(-size // world)
    assert len(passes(range(size), 0, world, most)) == max(1, -(-largest // most))


def test_a_batch_smaller_than_the_ranks_leaves_some_idle():
    assert [list(passes(range(2), rank, 3, 4)[0]) for rank in range(3)] == [[0], [1], []]
