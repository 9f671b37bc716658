"""The store, against a real redis-server: leases, fences, and what an emptied server forgets.

    pytest tests/local/test_store.py
"""

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic.base.errors import ElasticError, Exit, Fenced, TryAgain
from elastic.base.network import free_port
from elastic.local.master.server import Server
from elastic.local.store import Ask, MasterStore, Store, Useless, WorkerStore
from elastic.run.rundir import SECRETS, Endpoint
from helpers import PATIENCE, wait_until
from stores import Anybody

FIELDS = {
    "job_id": "4711", "node": "n1", "pid": 99, "state": "loading", "version": -1, "step": 0,
    "steps_total": 0, "tokens_per_s": 0.0, "loss": 0.0,
}
LEASE_S = 30.0


class Timid(Store):
    role = "timid"


def claim(store, slot=3, attempt=1, lease_s=LEASE_S, **fields):
    return store.lease(slot, attempt, FIELDS | fields, lease_s)


def beat(store, slot=3, attempt=1, lease_s=LEASE_S, **fields):
    return claim(store, slot, attempt, lease_s, **{"state": "training", "step": 1} | fields)


def offer(store, slot=3, attempt=1, base=7, **header):
    return store.offer(slot, attempt, base, {"tokens": 5} | header)


@pytest.fixture
def listen(make_store):
    """listen("ctl") -> what hears, and has heard nothing so far."""

    def open_(channel):
        hear = functools.partial(make_store().hear, channel)
        hear(0.05)
        return hear

    return open_


# ---- leases -------------------------------------------------------------------------------------


def test_a_claimed_slot_is_there_with_all_that_was_said(store):
    before = store.now()
    assert claim(store, slot=3, attempt=2)
    (slot,) = store.slots().values()
    assert (slot.slot, slot.attempt, slot.job_id, slot.node, slot.pid) == (3, 2, "4711", "n1", 99)
    assert (slot.state, slot.version, slot.step, slot.loss) == ("loading", -1, 0, 0.0)
    assert before <= slot.joined == slot.beat == slot.moved <= store.now()
    assert store.attempts() == {3: 2}


def test_a_lease_that_is_not_renewed_expires(store):
    claim(store, slot=0, lease_s=60.0)
    claim(store, slot=1, lease_s=2.0)
    assert beat(store, slot=1, lease_s=60.0)
    assert sorted(store.slots()) == [0, 1]
    assert beat(store, slot=0, lease_s=0.1)
    wait_until(lambda: 0 not in store.slots(), 10, "the lease is over")
    assert sorted(store.slots()) == [1]
    assert store.attempts() == {0: 1, 1: 1}  # the fence outlives the lease
    before = store.now()
    assert beat(store, slot=0)
    again, renewed = store.slots().values()
    assert renewed.joined < before < again.joined == again.moved == again.beat


def test_a_lease_that_was_given_up_is_gone_at_once(store, listen):
    master = listen("wake")
    claim(store)
    store.release(3, 1)
    assert store.slots() == {}
    assert words(master, 1) == ["leave 3"]


def test_progress_and_liveness_are_two_things(store):
    claim(store)
    beat(store, step=1)
    (first,) = store.slots().values()
    time.sleep(0.01)
    beat(store, step=1, loss=3.5)
    (second,) = store.slots().values()
    assert first.moved == second.moved < second.beat
    assert second.loss == 3.5
    for change in ({"step": 2}, {"state": "delivering"}, {"version": 9}):
        before = store.slots()[3].moved
        time.sleep(0.01)
        beat(store, **({"step": 2} | change))
        assert store.slots()[3].moved > before


# ---- fencing by attempt -------------------------------------------------------------------------


def test_a_higher_attempt_takes_the_slot_and_fences_the_lower(store):
    claim(store, attempt=1, node="old")
    assert offer(store, attempt=1)
    assert claim(store, attempt=2, node="new")
    assert not claim(store, attempt=1)
    assert not beat(store, attempt=1, node="old", step=99)
    assert not offer(store, attempt=1, base=8)
    store.release(3, 1)
    (slot,) = store.slots().values()
    assert (slot.attempt, slot.node, slot.step) == (2, "new", 0)
    assert store.offers([7, 8]) == {7: {"3:1": b'{"tokens": 5}'}, 8: {}}


def test_the_same_attempt_may_claim_again(store):
    """As it does with each beat: that is no new lease, but where there is none."""
    assert claim(store)
    joined = store.slots()[3].joined
    assert claim(store)
    assert store.slots()[3].joined == joined
    store.set_attempts({})  # by a master that does not know it yet
    assert claim(store)
    assert store.slots()[3].joined == joined
    assert store.attempts() == {3: 1}


def test_a_lease_that_lapsed_is_not_taken_back_from_a_newer_attempt(store):
    claim(store, attempt=1, lease_s=0.01)
    wait_until(lambda: not store.slots(), 10, "the lease is over")
    claim(store, attempt=2, lease_s=0.01)
    wait_until(lambda: not store.slots(), 10, "that of the newer one, too")
    assert not beat(store, attempt=1)
    assert store.slots() == {}
    assert store.attempts() == {3: 2}


def test_attempts_are_compared_as_numbers(store):
    claim(store, attempt=9)
    assert claim(store, attempt=10)
    assert not beat(store, attempt=9)


def test_what_a_master_knows_fences_and_nothing_else_does(store):
    claim(store, slot=0, attempt=5)
    store._redis.hset(store._key("attempts"), mapping={"0": 999, "7": 1})
    assert not beat(store, slot=0, attempt=5)
    store.set_attempts({0: 5, 1: 4})
    assert store.attempts() == {0: 5, 1: 4}
    assert beat(store, slot=0, attempt=5)
    assert not claim(store, slot=1, attempt=3)
    assert not offer(store, slot=1, attempt=3)
    store.set_attempts({0: 10})
    assert not beat(store, slot=0, attempt=9)


def test_an_offer_needs_a_claim(store):
    assert not offer(store)  # unknown here
    claim(store)
    assert offer(store)


# ---- an emptied server --------------------------------------------------------------------------


@pytest.mark.parametrize("master_is_first", [False, True])
def test_an_emptied_server_takes_the_lease_anew_and_goes_on(store, redis_server, master_is_first):
    claim(store, attempt=4)
    offer(store, attempt=4)
    redis_server.client().flushall()
    assert (store.slots(), store.attempts(), store.master()) == ({}, {}, {})
    assert not offer(store, attempt=4)
    assert not store.offered(3, 4, 7)
    if master_is_first:
        store.set_attempts({3: 4})
        assert offer(store, attempt=4)
    before = store.now()
    assert beat(store, attempt=4)
    (slot,) = store.slots().values()
    assert before < slot.joined == slot.moved  # for Server.doubt_lapsed_leases
    assert offer(store, attempt=4)
    assert store.offered(3, 4, 7)


def test_scripts_that_were_forgotten_are_loaded_by_the_master(store, redis_server):
    claim(store)
    redis_server.client().script_flush()
    with pytest.raises(TryAgain):
        beat(store)
    store.set_master(1, {})
    assert beat(store)


@pytest.mark.parametrize("key", ["grant:3:1", "attempts", "slot:3", "asks"])
def test_a_key_of_another_type_makes_a_server_useless(store, redis_server, key):
    claim(store)
    client = redis_server.client()
    client.delete(store._key(key))
    client.set(store._key(key), "x")
    with pytest.raises(Useless, match="of no use: .*WRONGTYPE"):
        a_turn(store)
    client.delete(store._key(key))
    claim(store)
    a_turn(store)


def a_turn(store) -> None:
    """What a master asks of its server."""
    store.slots()
    store.take_asks()
    store.grant({(3, 1): (1, [])})
    store.offers([5])


# ---- masters ------------------------------------------------------------------------------------


def test_a_higher_epoch_fences_a_lower_one(store):
    store.set_master(1, {"version": 3, "state": "running"})
    store.set_master(1, {"version": 4})
    store.set_master(2, {"version": 4, "state": "running"})
    with pytest.raises(Fenced, match="master epoch 1"):
        store.set_master(1, {"version": 99, "state": "stopping"}, wake="stop")
    master = store.master()
    assert (master["epoch"], master["version"], master["state"]) == ("2", "4", "running")
    assert float(master["beat"]) <= store.now()


def test_epochs_are_compared_as_numbers(store):
    store.set_master(9, {"version": 1})
    store.set_master(10, {"version": 1})
    with pytest.raises(Fenced):
        store.set_master(9, {"version": 1})


def test_a_fenced_master_wakes_nobody(store, listen):
    heard = listen("ctl")
    store.set_master(2, {"version": 1}, wake="version 1")
    with pytest.raises(Fenced):
        store.set_master(1, {"version": 2}, wake="version 2")
    assert words(heard, 1) == ["version 1"]


# ---- deltas -------------------------------------------------------------------------------------


def test_offers_are_kept_by_version_slot_and_attempt(store):
    for slot, attempt in [(0, 1), (1, 1), (1, 2)]:
        claim(store, slot=slot, attempt=attempt)
        offer(store, slot=slot, attempt=attempt, base=7, tokens=slot)
    offer(store, slot=0, attempt=1, base=6, tokens=9)
    found = store.offers(range(5, 9))
    assert {base: sorted(table) for base, table in found.items()} == {
        5: [], 6: ["0:1"], 7: ["0:1", "1:1", "1:2"], 8: [],
    }
    offer(store, slot=0, attempt=1, base=7, tokens=77)
    assert store.offers([7])[7]["0:1"] == b'{"tokens": 77}'
    store.drop_offers(7, ["0:1", "1:1", "9:9"])
    store.drop_offers(7, [])
    assert sorted(store.offers([7])[7]) == ["1:2"]
    assert not store.offered(0, 1, 7)
    assert store.offered(0, 1, 6)


def test_a_verdict_is_told_once_and_only_to_whom_it_concerns(store):
    store.set_verdict("3:1", {"base": 7, "reason": "stale"})
    assert store.take_verdict(3, 2) is None
    assert store.take_verdict(3, 1) == {"base": 7, "reason": "stale"}
    assert store.take_verdict(3, 1) is None


# ---- samples ------------------------------------------------------------------------------------


def ask(sequence, slot=3, attempt=1, want=10, held=((0, 5, 9),)):
    return Ask(slot, attempt, sequence, want, held)


def test_asks_are_taken_once_and_the_newest_of_a_worker_counts(store):
    store.ask(ask(1))
    store.ask(ask(2, want=20))
    store.ask(ask(1, slot=11, attempt=12, held=()))
    assert sorted(store.take_asks(), key=lambda each: each.slot) == [
        ask(2, want=20), ask(1, slot=11, attempt=12, held=()),
    ]
    assert store.take_asks() == []


def test_a_grant_answers_the_ask_it_was_made_for(store):
    store.grant({(3, 1): (2, [(0, 10, 20), (1, 0, 5)]), (4, 1): (1, [])})
    assert store.granted(ask(2), 1.0) == [(0, 10, 20), (1, 0, 5)]
    assert store.granted(ask(1, slot=4), 1.0) == []
    assert store.granted(ask(2), 0.1) is None  # told once


def test_an_answer_to_an_earlier_ask_is_passed_over(store):
    """The worker repeated its ask, got an answer to each, and has asked anew since."""
    store.grant({(3, 1): (1, [(0, 0, 10)])})
    store.grant({(3, 1): (1, [(0, 0, 10)])})
    store.grant({(3, 1): (2, [(0, 10, 20)])})
    answers = [store.granted(ask(2), 0.1) for _ in range(3)]
    assert answers == [None, None, [(0, 10, 20)]]


def test_a_waiting_worker_gets_its_grant_at_once(make_store, redis_server):
    master, worker, got = make_store(), make_store(), []
    waiting = threading.Thread(
        target=lambda: got.append(worker.granted(ask(1), 600.0)), daemon=True
    )
    waiting.start()
    clients = redis_server.client()
    wait_until(lambda: clients.info("clients")["blocked_clients"], 10, "it waits")
    master.grant({(3, 1): (1, [(0, 0, 4)])})
    waiting.join(60)
    assert got == [[(0, 0, 4)]]


# ---- the rest -----------------------------------------------------------------------------------


def test_runs_on_one_server_do_not_see_each_other(make_store):
    one, other = make_store("run-a"), make_store("run-ab")
    claim(one)
    one.set_master(1, {"version": 3})
    one.ask(ask(1))
    assert (other.slots(), other.master(), other.take_asks()) == ({}, {}, [])
    assert len(one.take_asks()) == 1


def test_the_clock_is_the_servers(store):
    first, second = store.now(), store.now()
    assert first < second
    assert abs(first - time.time()) < 5


# ---- wake-ups -----------------------------------------------------------------------------------


def words(hear, count):
    """The next `count` wake-ups."""
    found = []
    wait_until(lambda: found.extend(hear(0.1)) or len(found) >= count, 5, "wake-ups")
    return found


def test_everybody_hears_what_is_announced_and_only_the_master_its_own(store, listen):
    everybody, another, master = listen("ctl"), listen("ctl"), listen("wake")
    claim(store)
    offer(store)
    store.ask(ask(1))
    store.set_master(1, {"version": 5}, wake="version 5")
    store.announce("stop")
    assert words(everybody, 2) == ["version 5", "stop"]
    assert words(another, 2) == ["version 5", "stop"]
    assert words(master, 2) == ["offer 3", "ask 3"]


def test_a_wait_ends_with_the_first_word_and_brings_all_behind_it(store, listen):
    heard = listen("ctl")
    for number in range(20):
        store.announce(f"version {number}")
    assert words(heard, 20) == [f"version {number}" for number in range(20)]
    started = time.monotonic()
    assert heard(0.2) == []
    assert time.monotonic() - started > 0.15


def test_a_refused_claim_wakes_nobody(store, listen):
    claim(store, attempt=2)
    heard = listen("wake")
    assert not claim(store, attempt=1)
    store.release(3, 1)
    offer(store, attempt=2)
    assert words(heard, 1) == ["offer 3"]


# ---- a server that does not answer --------------------------------------------------------------


def every_call(store):
    yield "claim", lambda: claim(store)
    yield "beat", lambda: beat(store)
    yield "offer", lambda: offer(store)
    yield "slots", store.slots
    yield "ask", lambda: store.ask(ask(1))
    yield "granted", lambda: store.granted(ask(1), 0.1)
    yield "hear", lambda: store.hear("ctl", 0.1)


def test_a_server_that_is_not_there_means_try_again_and_names_the_place():
    port = free_port("127.0.0.1")
    store = Anybody.connect(Endpoint("127.0.0.1", port, 1), "secret", "a", timeout_s=0.2)
    for _, call in every_call(store):
        with pytest.raises(TryAgain, match=f"cannot reach Redis at 127.0.0.1:{port}") as caught:
            call()
        assert caught.value.code == Exit.TRY_AGAIN
        assert "elastic-status" in caught.value.hint


def test_a_wrong_password_is_said_to_be_one_and_is_not_shown(redis_server):
    store = Anybody.connect(redis_server.endpoint, "hunter2", "a")
    for _, call in every_call(store):
        with pytest.raises(TryAgain, match="refused the password") as caught:
            call()
        assert "hunter2" not in str(caught.value)


def test_a_server_that_hangs_means_try_again_after_the_timeout(make_store, redis_server):
    store = Anybody.connect(redis_server.endpoint, redis_server.password, "a", timeout_s=1.0)
    wait_until(lambda: answers(store), 10, "the server answers")
    os.kill(redis_server.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(TryAgain, match="cannot reach Redis"):
            store.now()
    finally:
        os.kill(redis_server.process.pid, signal.SIGCONT)
    assert time.monotonic() - started < 5 * PATIENCE
    wait_until(lambda: answers(store), 10, "the server goes on")
    store.close()


def answers(store):
    try:
        store.now()
    except TryAgain:
        return False
    return True


def test_a_run_that_never_had_a_master_says_so(run):
    with pytest.raises(TryAgain, match="has had no master yet"):
        Store.open(run)


@pytest.mark.parametrize("kind", [Store, WorkerStore, MasterStore])
def test_a_run_is_opened_where_its_newest_master_says(run, redis_server, kind):
    endpoint, client = replace(redis_server.endpoint, nonce="of this start"), redis_server.client()
    role = kind.role
    run.set_endpoint(endpoint)
    password = run.password(role, endpoint)
    client.acl_setuser(role, enabled=True, passwords=[f"+{password}"], commands=["+get"],
                       keys=["*"])
    proof = f"elastic:{run.key}:proof"
    client.set(proof, run.password("seal", endpoint))
    store = kind.open(run)
    assert store.where == f"127.0.0.1:{redis_server.endpoint.port}"
    store.close()
    client.delete(proof)
    client.acl_deluser(role)


@pytest.mark.parametrize("kind", [Store, WorkerStore])
def test_a_server_of_a_master_of_before_is_looked_at_as_ever(run, redis_server, kind):
    """It has no nonce: an upgrade must not hide runs that are under way."""
    role, client = kind.role, redis_server.client()
    client.acl_setuser(role, enabled=True, passwords=[f"+{run.secret(role)}"], commands=["+time"])
    run.set_endpoint(redis_server.endpoint)
    kind.open(run).close()
    client.acl_deluser(role)


@pytest.mark.parametrize("proof", [None, "", "0" * 64, "of the server before"])
def test_somebody_elses_server_on_that_port_is_not_listened_to(run, redis_server, proof):
    """It lets everybody in, and says that the run is done."""
    before, client = redis_server.endpoint, redis_server.client()
    if proof == "of the server before":
        proof = run.password("seal", before)
    run.set_endpoint(replace(before, nonce="of a later start"))
    client.acl_setuser("worker", enabled=True, nopass=True, commands=["+@all"], keys=["*"])
    client.hset(f"elastic:{run.key}:master", mapping={"epoch": 1, "state": "done", "version": 9})
    if proof is not None:
        client.set(f"elastic:{run.key}:proof", proof)
    with pytest.raises(TryAgain, match="does not know this run's master"):
        WorkerStore.open(run)
    client.delete(*client.keys(f"elastic:{run.key}:*"))
    client.acl_deluser("worker")


def test_what_its_user_may_not_do_is_an_error_and_no_reason_to_try_again(run, redis_server):
    client = redis_server.client()
    client.acl_setuser("timid", enabled=True, nopass=True, commands=["+time"])
    store = Timid.connect(redis_server.endpoint, "any", "a")
    with pytest.raises(ElasticError, match=f"Redis at {store.where} refuses: .*hgetall") as caught:
        store.master()
    assert not isinstance(caught.value, TryAgain)
    store.close()
    client.acl_deluser("timid")


def test_a_server_of_the_site_is_reached_by_its_url_and_its_password_not_shown(redis_server):
    where = f"127.0.0.1:{redis_server.endpoint.port}"
    url = f"redis://:{redis_server.password}@{where}/0"
    store = Store.connect(Endpoint("", 0, 1, url), "not this one", "a")
    store.now()
    assert store.where == f"{where}/0"
    store.close()
    wrong = Store.connect(Endpoint("", 0, 1, f"redis://:hunter2@{where}"), "", "a")
    with pytest.raises(TryAgain, match="refused the password") as caught:
        wrong.now()
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def masters(run, redis_server) -> Iterator[list[Server]]:
    """Two masters of a run, one after the other, on a server that others use, too."""
    url = f"redis://:{redis_server.password}@127.0.0.1:{redis_server.endpoint.port}/0"
    config = replace(run.config(), redis=replace(run.config().redis, url=url))
    opened = [Server(run, config), Server(run, config)]
    for epoch, server in enumerate(opened, 1):
        server.open(epoch)
    yield opened
    opened[0].store.forget_everything()


def test_who_reads_a_sites_server_learns_no_secret_of_the_run(run, masters, redis_server):
    for epoch, server in enumerate(masters, 1):
        server.store.set_master(epoch, {"version": 7})
        run.set_endpoint(server.endpoint)
        worker = WorkerStore.open(run)
        claim(worker)
        offer(worker)
        worker.ask(ask(1))
        server.store.set_verdict("3:1", {"base": 7})
        said = everything(redis_server.client(), run.key)
        assert said.keys() >= {"master", "slot:3", "offers:7", "asks", "verdicts", "proof"}
        assert not [role for role in SECRETS if run.secret(role) in str(said)]


def everything(client, key: str) -> dict[str, object]:
    """What is on a server of the run of that key."""
    read, start = {b"string": client.get, b"hash": client.hgetall}, f"elastic:{key}:".encode()
    names = list(client.scan_iter(start + b"*"))
    return {name.removeprefix(start).decode(): read[client.type(name)](name) for name in names}


def test_each_master_on_a_sites_server_has_a_proof_of_its_own(run, masters):
    before, after = masters
    run.set_endpoint(before.endpoint)
    with pytest.raises(TryAgain, match="does not know this run's master"):
        WorkerStore.open(run)  # no master has said anything yet
    before.store.set_master(1, {"version": 7})
    WorkerStore.open(run).close()
    after.store.set_master(2, {"version": 7})
    with pytest.raises(TryAgain, match="does not know this run's master"):
        WorkerStore.open(run)
    run.set_endpoint(after.endpoint)
    WorkerStore.open(run).close()


@pytest.mark.parametrize("mark", [b"", b"0" * 64, b"\xff" * 64])
def test_what_is_not_sealed_is_dropped(store, mark):
    store.seal = "a key that no server hears of"
    texts = {"offers:7": b"{}", "asks": b"[1, 8, []]", "verdicts": b'{"base": 7}'}
    for kind, text in texts.items():
        store._redis.hset(store._key(kind), "3:1", mark + text)
    assert store.offers([7]) == {7: {}}
    assert not store.offered(3, 1, 7)
    assert (store.take_asks(), store.take_verdict(3, 1)) == ([], None)


def test_a_seal_is_of_one_run_one_place_and_one_key(make_store):
    one, other, place = make_store("run-a"), make_store("run-a"), make_store("run-b")
    one.seal, other.seal, place.seal = "key", "another", "key"
    one.set_verdict("3:1", {"base": 7})
    body = one._redis.hget(one._key("verdicts"), "3:1")
    for key, name in [("verdicts", "4:1"), ("offers:7", "3:1"), ("asks", "3:1")]:
        assert not one._unsealed(one._key(key), name, body)
    assert not place._unsealed(place._key("verdicts"), "3:1", body)
    assert other.take_verdict(3, 1) is None
    one.set_verdict("3:1", {"base": 7})
    assert one.take_verdict(3, 1) == {"base": 7}
