"""How ranks share a step: the same samples whatever the number of ranks, and equally many passes.

pytest tests/test_sizing.py
"""

from hypothesis import given
from hypothesis import strategies as st

from elastic.sizing import Stream, nodes, passes, share

sizes, worlds, micro = st.integers(0, 200), st.integers(1, 40), st.integers(1, 9)


@given(st.integers(0, 10**9), sizes, worlds)
def test_shares_are_the_batch_in_order_and_differ_by_one_at_most(start, size, world):
    batch = range(start, start + size)
    parts = [share(batch, rank, world) for rank in range(world)]
    assert [position for part in parts for position in part] == list(batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes, worlds, micro)
def test_every_rank_makes_as_many_passes_over_its_share_and_none_is_too_large(size, world, most):
    batch = range(7, 7 + size)
    of_rank = [passes(batch, rank, world, most) for rank in range(world)]
    assert len({len(parts) for parts in of_rank}) == 1
    for rank, parts in enumerate(of_rank):
        assert [p for part in parts for p in part] == list(share(batch, rank, world))
        assert max(map(len, parts)) <= most


@given(sizes, worlds, micro)
def test_no_pass_is_made_that_no_rank_needs(size, world, most):
    largest = -(-size // world)
    assert len(passes(range(size), 0, world, most)) == max(1, -(-largest // most))


def test_a_batch_smaller_than_the_ranks_leaves_some_idle():
    assert [list(passes(range(2), rank, 3, 4)[0]) for rank in range(3)] == [[0], [1], []]


@given(st.integers(1, 50), st.integers(0, 4), st.integers(1, 70))
def test_the_stream_is_every_position_of_every_epoch_once(samples, epochs, size):
    stream, cursor, seen = Stream(samples, epochs), 0, []
    while batch := stream.batch(cursor, size):
        seen += [stream.place(position) for position in batch]
        cursor = batch.stop
        if not epochs and len(seen) > 100:
            break
    whole = [(epoch, at) for epoch in range(epochs) for at in range(samples)]
    assert seen == whole if epochs else seen[: 2 * samples] == [
        (epoch, at) for epoch in range(2) for at in range(samples)
    ][: len(seen)]


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_ranges_are_the_positions_epoch_by_epoch(samples, start, count):
    stream = Stream(samples)
    ranges = stream.ranges(start, start + count)
    unrolled = [(epoch, at) for epoch, first, stop in ranges for at in range(first, stop)]
    assert unrolled == [stream.place(position) for position in range(start, start + count)]
    assert len({epoch for epoch, _, _ in ranges}) == len(ranges)


@given(st.integers(1, 50), st.integers(0, 150), st.sets(st.integers(0, 160)))
def test_ranges_leave_out_what_was_skipped(samples, stop, holes):
    stream, gaps = Stream(samples), [[hole, hole + 1] for hole in holes]
    ranges = stream.ranges(0, stop, gaps)
    unrolled = [(epoch, at) for epoch, first, last in ranges for at in range(first, last)]
    assert unrolled == [stream.place(p) for p in range(stop) if p not in holes]


def test_gpus_become_whole_nodes_that_are_no_more_than_allowed():
    assert nodes(8, 32, 8) == (1, 4)
    assert nodes(9, 31, 8) == (2, 3)
    assert nodes(1, 4, 1) == (1, 4)
    assert nodes(2, 2, 4) == (1, 1)
    assert nodes(9, 15, 8) == (1, 1)  # two nodes would be 16
