"""The store against a real redis-server: leases, fencing, grants, and a server that forgets."""

import pytest

from elastic.errors import Fenced, TryAgain
from elastic.network import free_port
from elastic.rundir import Endpoint
from elastic.store import Ask, Store
from helpers import wait_until

FIELDS = {
    "job_id": "4711", "node": "n1", "pid": 42, "state": "training", "version": 3, "step": 1,
    "steps_total": 1, "tokens_per_s": 10.0, "loss": 2.5,
}  # fmt: skip
LEASE_S = 30.0


def test_a_claimed_slot_is_there_with_all_its_fields(store: Store):
    assert store.claim(7, 1, FIELDS, LEASE_S)
    slot = store.slots()[7]
    assert (slot.attempt, slot.job_id, slot.pid, slot.loss) == (1, "4711", 42, 2.5)
    assert slot.beat == slot.joined == slot.moved
    assert store.attempts() == {7: 1}


def test_a_lease_that_is_not_renewed_is_lost_and_its_attempt_is_remembered(store: Store):
    store.claim(0, 1, FIELDS, 0.05)
    wait_until(lambda: not store.slots(), 5, "the lease expires")
    assert store.attempts() == {0: 1}


def test_a_beat_renews_the_lease_and_moves_only_with_progress(store: Store):
    store.claim(0, 1, FIELDS, 0.2)
    first = store.slots()[0]
    assert store.beat(0, 1, FIELDS, LEASE_S)
    same = store.slots()[0]
    assert same.beat > first.beat
    assert same.moved == first.moved
    assert store.beat(0, 1, {**FIELDS, "step": 2}, LEASE_S)
    assert store.slots()[0].moved > first.moved


def test_a_higher_attempt_fences_a_lower_one_everywhere(store: Store):
    assert store.claim(0, 2, FIELDS, LEASE_S)
    assert not store.claim(0, 1, FIELDS, LEASE_S)
    with pytest.raises(Fenced):
        store.beat(0, 1, FIELDS, LEASE_S)
    with pytest.raises(Fenced):
        store.offer(0, 1, 3, {"tokens": 1})
    store.release(0, 1)
    assert store.slots()[0].attempt == 2
    assert store.offers([3]) == {3: {}}


def test_an_offer_counts_even_when_the_next_attempt_has_come(store: Store):
    """A preempted worker delivers, leaves, and its replacement is there before the master looks."""
    store.claim(0, 1, FIELDS, LEASE_S)
    assert store.offer(0, 1, 3, {"tokens": 1})
    store.release(0, 1)
    store.claim(0, 2, FIELDS, LEASE_S)
    assert store.offer(0, 2, 3, {"tokens": 2})
    assert set(store.offers([3])[3]) == {"0:1", "0:2"}


def test_a_server_that_was_emptied_asks_to_be_told_again(store: Store, redis_server):
    store.claim(0, 1, FIELDS, LEASE_S)
    store.offer(0, 1, 3, {"tokens": 1})
    client = redis_server.client()
    client.delete(*client.keys(f"{store._prefix}*"))
    assert not store.beat(0, 1, FIELDS, LEASE_S)
    assert not store.offer(0, 1, 3, {"tokens": 1})
    assert not store.offered(0, 1, 3)
    assert store.claim(0, 1, FIELDS, LEASE_S)
    assert store.offer(0, 1, 3, {"tokens": 1})
    assert store.offered(0, 1, 3)


def test_attempts_told_to_a_new_server_fence_what_is_older(store: Store):
    store.set_attempts({0: 5})
    assert not store.claim(0, 4, FIELDS, LEASE_S)
    assert store.claim(0, 5, FIELDS, LEASE_S)


def test_an_older_master_can_change_nothing(store: Store):
    store.set_master(4, {"version": 7, "state": "running"})
    with pytest.raises(Fenced):
        store.set_master(3, {"version": 8, "state": "done"})
    assert store.master()["version"] == "7"
    store.set_master(4, {"version": 8})
    store.set_master(5, {"version": 8})
    assert store.master()["epoch"] == "5"


def test_an_ask_is_taken_once_and_answered_by_its_number(store: Store):
    first, second = Ask(0, 1, 1, 8, ((0, 4, 6),)), Ask(0, 1, 2, 8, ())
    store.ask(first)
    assert store.take_asks() == [first]
    assert store.take_asks() == []
    store.grant({(0, 1): (1, [(0, 0, 4)])})
    assert store.granted(first, 1.0) == [(0, 0, 4)]
    store.grant({(0, 1): (1, [(0, 0, 4)])})
    assert store.granted(second, 1.0) is None  # an answer to the ask before is none
    assert store.granted(second, 0.1) is None


def test_a_verdict_is_told_once(store: Store):
    store.set_verdict("0:1", {"base": 3, "reason": "stale: so it is"})
    assert store.take_verdict(0, 1) == {"base": 3, "reason": "stale: so it is"}
    assert store.take_verdict(0, 1) is None


def test_dropping_offers_leaves_one_that_came_meanwhile(store: Store):
    for slot in (0, 1):
        store.claim(slot, 1, FIELDS, LEASE_S)
    store.offer(0, 1, 3, {})
    seen = store.offers([3])[3]
    store.offer(1, 1, 3, {})
    store.drop_offers(3, seen)
    assert set(store.offers([3])[3]) == {"1:1"}


def test_wake_ups_reach_their_channel(store: Store):
    workers, master = store.listen("ctl"), store.listen("wake")
    assert workers.wait(0.05) == master.wait(0.05) == []
    store.claim(0, 1, FIELDS, LEASE_S)
    store.offer(0, 1, 3, {})
    store.ask(Ask(0, 1, 1, 8, ()))
    store.set_master(1, {"version": 4}, wake="version 4")
    heard = {"ctl": [], "wake": []}

    def all_heard() -> bool:
        heard["ctl"] += workers.wait(0.05)
        heard["wake"] += master.wait(0.05)
        return len(heard["ctl"]) >= 2 and len(heard["wake"]) >= 2

    wait_until(all_heard, 5, "the wake-ups arrive")
    assert heard == {"ctl": ["join 0", "version 4"], "wake": ["offer 0", "ask 0"]}
    workers.close()
    master.close()


def test_a_wrong_password_and_a_silent_server_are_named(redis_server):
    endpoint = redis_server.endpoint
    with pytest.raises(TryAgain, match=f"{endpoint.port} refused the password"):
        Store.connect(endpoint, "wrong", "run").ping()
    silent = Endpoint("127.0.0.1", free_port("127.0.0.1"), 1)
    with pytest.raises(TryAgain, match=f"cannot reach Redis at 127.0.0.1:{silent.port}"):
        Store.connect(silent, "secret", "run", timeout_s=1).ping()


def test_a_run_without_a_master_says_so(run):
    with pytest.raises(TryAgain, match="no master yet"):
        Store.open(run)
