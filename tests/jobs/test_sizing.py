"""How ranks share a step: the same samples whatever the number of ranks, and equally many passes.

pytest tests/jobs/test_sizing.py
"""

from hypothesis import given, strategies as st

from elastic.jobs.sizing import fit, node_counts, part, passes, pays

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


def test_gpus_become_whole_nodes_that_are_no_more_than_allowed():
    assert node_counts((8, 32), 8) == [1, 2, 3, 4]
    assert node_counts((9, 31), 8) == [2, 3]
    assert node_counts((1, 4), 1) == [1, 2, 3, 4]
    assert node_counts((2, 2), 4) == [1]
    assert node_counts((9, 15), 8) == [1]  # two nodes would be 16


def test_of_the_sizes_allowed_the_largest_that_is_there_is_taken():
    counts = node_counts((8, 64), 8, sizes=(8, 16, 32, 128))
    assert counts == [1, 2, 4]
    assert [fit(counts, nodes) for nodes in (1, 3, 4, 7)] == [1, 2, 4, 4]
    assert fit([2, 4], 1) == 0
    assert node_counts((40, 48), 8, sizes=(8, 16)) == [5, 6]  # after elastic-scale: none is in it


def test_a_restart_pays_where_it_gains_twice_what_it_costs():
    assert pays(2, 4, restart_s=60, horizon_s=3600)
    assert not pays(2, 4, restart_s=60, horizon_s=240)
    assert not pays(20, 21, restart_s=60, horizon_s=2500)
    for more in (0, 1, 2):
        assert not pays(2, more, restart_s=0, horizon_s=3600)
