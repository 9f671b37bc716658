"""How many nodes a synchronous job has, and when more are worth a restart.

pytest tests/jobs/test_sizing.py
"""

from elastic.jobs.sizing import fit, node_counts, pays


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
