"""What a worker does about what has happened elsewhere, one decision at a time.

The worker is a stand-in with the few things that the decision reads; whole workers are in
test_rejections.py, test_faults.py and test_overlap.py.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.base.errors import ElasticError
from elastic.local.transport import Transport
from elastic.local.worker import local_sgd
from elastic.local.worker.link import Link, Place
from elastic.local.worker.local_sgd import LocalSGD
from elastic.train.group import Group


def hidden(for_looks: int) -> SimpleNamespace:
    """A worker whose filesystem shows a version only after so many looks at it."""
    looks = []

    def commit(version: int) -> dict | None:
        looks.append(version)
        return {"version": version} if len(looks) > for_looks else None

    return SimpleNamespace(run=SimpleNamespace(commit=commit, path="/runs/a"), notice=False,
                           _link=None, looks=looks)  # fmt: skip


def test_a_version_that_is_announced_before_it_is_seen_is_waited_for(monkeypatch):
    monkeypatch.setattr(local_sgd, "DRY_S", 0.0)
    worker = hidden(for_looks=3)
    assert LocalSGD._commit_of(worker, 7) == {"version": 7}
    assert worker.looks == [7] * 4


@pytest.mark.parametrize("notice", [False, True])
def test_it_is_not_waited_for_without_end_nor_after_a_notice(monkeypatch, notice):
    monkeypatch.setattr(local_sgd, "UNSEEN_S", 3600.0 if notice else 0.0)
    monkeypatch.setattr(local_sgd, "DRY_S", 0.0)
    worker = hidden(for_looks=10**9)
    worker.notice = notice
    with pytest.raises(ElasticError, match="version 7 is announced") as caught:
        LocalSGD._commit_of(worker, 7)
    assert "/runs/a" in caught.value.hint


@pytest.mark.parametrize("was_void", [True, False])
def test_what_a_rejected_delta_has_left_out_does_not_come_again(was_void):
    residuals = {0: "most of the delta"}
    worker = SimpleNamespace(
        _link=object(), _wait_for_version=lambda: (5, ""), _was_void=was_void,
        _round=SimpleNamespace(base=5, steps=0), group=Group(),
        _exchange=SimpleNamespace(encoder=SimpleNamespace(residuals=residuals)),
        _replica=SimpleNamespace(restore=lambda: None),
    )  # fmt: skip
    assert LocalSGD._adopt_newest(worker)
    assert residuals == ({} if was_void else {0: "most of the delta"})
    assert not worker._was_void


@pytest.mark.parametrize(("reason", "kept"), [("samples: already committed", False),
                                              ("altered: 3 bytes", True)])  # fmt: skip
def test_samples_that_came_with_those_of_others_are_not_trained(reason, kept):
    verdict = {"base": 5, "rule": reason.partition(":")[0], "reason": reason}
    store = SimpleNamespace(take_verdict=lambda *_: verdict, offered=lambda *_: False)
    worker = SimpleNamespace(
        _link=SimpleNamespace(reach=lambda act: act(store)),
        place=SimpleNamespace(slot=0, attempt=1), _queue=[(0, 4, 8)],
    )  # fmt: skip
    assert not LocalSGD._stands(worker, SimpleNamespace(base=5, steps=3))
    assert worker._queue == ([(0, 4, 8)] if kept else [])


def worker_that_has_delivered(reach) -> SimpleNamespace:
    """Two samples trained on version 5."""
    place = SimpleNamespace(slot=0, attempt=1)
    link = Link(Place(None, 0, 1, "7"), False)
    link.reach = reach
    header = SimpleNamespace(to_json=lambda: {"base": 5})
    round_ = SimpleNamespace(base=5, header=header, samples=[(0, 0, 2)], answered=True)
    run = SimpleNamespace(path=Path("/nowhere"))
    return SimpleNamespace(place=place, run=run, _link=link,
                           _transport=Transport(run), _round=round_, _sent=None, _queue=[(0, 4, 8)],
                           _written=lambda write: write())  # fmt: skip


def test_a_delta_is_offered_again_to_a_server_that_does_not_know_it(make_store):
    """Redis may die after the bytes and before the header, or be emptied at any time."""
    store = make_store("new-server")
    store.claim(0, 1, {"job_id": "7"}, 60.0)
    worker = worker_that_has_delivered(lambda act: act(store))
    for _ in range(2):
        LocalSGD._offer(worker, worker._round)
        assert store.offered(0, 1, 5)
        store.drop_offers(5, ["0:1"])


def test_samples_of_a_delta_that_is_delivered_are_still_held_for_a_new_master():
    worker = worker_that_has_delivered(None)
    assert LocalSGD._held(worker) == [(0, 4, 8), (0, 0, 2)]


def test_a_new_master_is_told_while_a_delta_is_being_written():
    told, worker = [], worker_that_has_delivered(None)
    worker._tell_new_master = lambda: told.append(True)
    worker._written = lambda write: None
    LocalSGD._put(worker, "name", memoryview(b""))
    assert told


@pytest.mark.parametrize("newest", [9, 2])
def test_who_is_told_of_a_version_that_is_pruned_adopts_the_newest_there_is(newest):
    """A master may be behind for a while: no reason to ask it again and again."""
    looked = iter([2000 - 1, 2000, newest + 2000])
    worker = SimpleNamespace(
        _link=SimpleNamespace(say=lambda **_: None), _wait_for_version=lambda: (2, ""),
        _was_void=False, _round=SimpleNamespace(base=-1, steps=0), _ahead=None, _queue=[],
        group=Group(),
        run=SimpleNamespace(told_version=lambda: next(looked)),
        _commit_of=lambda version: {"version": version}, _adopt_inner_state=lambda version: None,
        _load=lambda commit: "pruned" if commit["version"] < newest + 2000 else "",
        _after_ahead=lambda version: SimpleNamespace(base=version), _steps_total=0,
        _probe=SimpleNamespace(before=lambda steps: None, placed=lambda: None),
    )  # fmt: skip
    assert LocalSGD._adopt_newest(worker)
    assert worker._round.base == newest + 2000
    worker._round, worker._load = SimpleNamespace(base=-1, steps=0), lambda commit: "damaged"
    worker.run.told_version = lambda: 2
    with pytest.raises(ElasticError, match="damaged"):
        LocalSGD._adopt_newest(worker)


def test_who_hangs_up_does_not_close_a_line_that_another_thread_uses():
    closed = []
    store = SimpleNamespace(close=lambda: closed.append(True))
    link = SimpleNamespace(_stores={"worker": store})
    Link._hang_up(link)
    assert not link._stores
    assert not closed
