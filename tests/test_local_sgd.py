"""What a worker does about what has happened elsewhere, one decision at a time.

The worker is a stand-in with the few things that the decision reads; whole workers are in
test_rejections.py, test_faults.py and test_overlap.py.
"""

from types import SimpleNamespace

import pytest

from elastic import local_sgd
from elastic.errors import ElasticError
from elastic.link import Link
from elastic.local_sgd import LocalSGD


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
        _round=SimpleNamespace(base=5, steps=0), group=SimpleNamespace(share=lambda said: said),
        _exchange=SimpleNamespace(encoder=SimpleNamespace(residuals=residuals)),
        _replica=SimpleNamespace(restore=lambda: None),
    )  # fmt: skip
    assert LocalSGD._adopt_newest(worker)
    assert residuals == ({} if was_void else {0: "most of the delta"})
    assert not worker._was_void


@pytest.mark.parametrize(("reason", "kept"), [("samples: already committed", False),
                                              ("altered: 3 bytes", True)])  # fmt: skip
def test_samples_that_came_with_those_of_others_are_not_trained(reason, kept):
    verdict = {"base": 5, "reason": reason}
    store = SimpleNamespace(take_verdict=lambda slot, attempt: verdict)
    worker = SimpleNamespace(
        _link=SimpleNamespace(still_offered=lambda base: False, reach=lambda act: act(store)),
        place=SimpleNamespace(slot=0, attempt=1), _queue=[(0, 4, 8)],
    )  # fmt: skip
    assert not LocalSGD._stands(worker, SimpleNamespace(base=5, steps=3), None)
    assert worker._queue == ([(0, 4, 8)] if kept else [])


def test_who_hangs_up_does_not_close_a_line_that_another_thread_uses():
    closed = []
    store = SimpleNamespace(close=lambda: closed.append(True))
    link = SimpleNamespace(_stores={"worker": store})
    Link._hang_up(link)
    assert not link._stores
    assert not closed
