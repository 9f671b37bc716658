"""Checkpoints of the sync mode: bit for bit at any number of ranks, whole or not there.

    pytest tests/saved/test_checkpoint.py

Ranks are real processes (checkpoint_ranks.py); writers are really killed, as in test_versions.py.
"""

import errno
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import checkpoint_ranks
from checkpoint_ranks import assert_equal, everything, make, noted, train
from elastic.base import durable
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.network import free_port
from elastic.base.signals import die_with_parent
from elastic.saved import inner_state, storage
from elastic.saved.checkpoint import Checkpoints, steps
from elastic.saved.drafts import Draft
from elastic.train.group import Group
from forks import at_nth_step, in_children
from helpers import wait_until

SAVE = (torch, "save")  # a step like those of `os`


@pytest.fixture
def fast(monkeypatch):
    """The order of calls is what counts here; that the disk obeys is the kernel's business."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def trained(step):
    """The model and optimizer that a checkpoint of `step` holds in these tests."""
    net, optimizer = make(seed=step)
    train(net, optimizer)
    return net, optimizer


def save(run, step, writer="job1", keep=2, **extra):
    Checkpoints(run, Group(), writer, keep).save(step, *trained(step), {"at": step, **extra})
    return True


def load(run, checkpoints=None):
    """What is loaded, by a model of its own; why others were not."""
    net, optimizer = make(seed=8)
    train(net, optimizer)
    saved, reasons = (checkpoints or Checkpoints(run, Group(), "reader")).load(net, optimizer)
    if saved:
        assert saved.extra["at"] == saved.step
        assert_equal(everything(net, optimizer), everything(*trained(saved.step)))
    return saved, reasons


def names(run, pattern="*"):
    return sorted(path.name for path in (run.path / "checkpoints").glob(pattern))


def record_path(run, step):
    return run.path / f"checkpoints/step-{step:08d}.json"


# ---- ranks --------------------------------------------------------------------------------------


def ranks(world, what, run):
    """Forked from here, where torch is imported."""
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(free_port("127.0.0.1"))}

    def play(rank):
        die_with_parent()
        os.environ |= {**meeting, "RANK": str(rank)}
        sys.argv[1:] = [what, str(run.path)]
        try:
            checkpoint_ranks.main()
        except BaseException:
            traceback.print_exc()
            raise
        return True

    assert in_children([partial(play, rank) for rank in range(world)]) == [0] * world


def test_a_checkpoint_is_the_same_bit_for_bit_at_another_number_of_ranks(run):
    net, optimizer = trained(3)
    Checkpoints(run, Group(), "job0").save(1, net, optimizer, {"tokens": 10})
    save_file(everything(net, optimizer), run.path / "expected-1")
    ranks(2, "write", run)
    assert read_by_one(run) == (5, {"tokens": 50}, 2)
    flip(run.path / "checkpoints/step-00000005/__1_0.distcp")
    record_path(run, 4).unlink()
    ranks(3, "read", run)
    assert read_by_one(run) == (5, {"tokens": 55}, 3)


def read_by_one(run):
    net, optimizer = make(seed=9)
    saved, reasons = Checkpoints(run, Group(), "one").load(net, optimizer)
    assert reasons == []
    assert_equal(everything(net, optimizer), noted(run, saved.step))
    return saved.step, saved.extra, saved.world


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- one rank -----------------------------------------------------------------------------------


def test_an_optimizer_that_never_stepped_is_saved_and_loaded_without_state(run):
    net, optimizer = make(seed=1)
    Checkpoints(run, Group(), "job1").save(0, net, optimizer, {"at": 0})
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in net.parameters())
    other, stepped = make(seed=2)
    train(other, stepped)
    saved, _ = Checkpoints(run, Group(), "job2").load(other, stepped)
    assert saved.step == 0
    assert not stepped.state
    assert_equal(everything(other, stepped), everything(net, optimizer))
    torch.manual_seed(3)
    train(net, optimizer, 2)
    torch.manual_seed(3)
    train(other, stepped, 2)
    assert_equal(everything(other, stepped), everything(net, optimizer))


def test_the_learning_rate_and_the_other_settings_of_the_optimizer_come_back(run):
    net, optimizer = trained(1)
    optimizer.param_groups[0] |= {"lr": 0.025, "momentum": 0.9}
    optimizer.param_groups[1] |= {"lr": 0.05, "betas": (0.8, 0.9)}
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    other, fresh = make(seed=2)
    Checkpoints(run, Group(), "job2").load(other, fresh)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (0.025, 0.9)
    assert (fresh.param_groups[1]["lr"], fresh.param_groups[1]["betas"]) == (0.05, (0.8, 0.9))
    torch.manual_seed(3)
    train(net, optimizer)
    torch.manual_seed(3)
    train(other, fresh)
    assert_equal(everything(other, fresh), everything(net, optimizer))


def test_numbers_of_numpy_are_saved_as_those_of_python(run):
    """Decay by layer, say: no checkpoint could be read again, so none was ever saved."""
    net, optimizer = trained(1)
    own = {"weight_decay": np.float64(0.1), "betas": (np.float32(0.5), 0.9)}
    optimizer.param_groups[1] |= own
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    other, fresh = make(seed=2)
    Checkpoints(run, Group(), "job2").load(other, fresh)
    assert {name: fresh.param_groups[1][name] for name in own} == own


class Exact(torch.optim.SGD):
    """Has float32 copies of bfloat16 parameters, in its state; takes no closure."""

    def step(self):
        for param in self.param_groups[0]["params"]:
            master = self.state[param].setdefault("master", param.detach().float())
            param.data.copy_(master.add_(param.grad.float(), alpha=-1e-4))


def test_state_that_is_more_exact_than_its_parameter_stays_so(run):
    """torch's load_state_dict casts it to the type of the parameter, for good."""
    net = torch.nn.Linear(8, 8).bfloat16()
    optimizer = Exact(net.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 8).bfloat16()).sum().backward()
        optimizer.step()
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    wanted = [state["master"].clone() for state in optimizer.state.values()]
    other = torch.nn.Linear(8, 8).bfloat16()
    again = Exact(other.parameters(), lr=1.0)
    Checkpoints(run, Group(), "job2").load(other, again)
    found = [state["master"] for state in again.state.values()]
    assert [each.dtype for each in found] == [torch.float32] * 2
    assert all(map(torch.equal, found, wanted))
    entry = inner_state.save(run.path, "inner-1.1", [optimizer], 0)
    fresh = Exact(other.parameters(), lr=1.0)
    (run.path / "slots/0000").mkdir(parents=True)
    (run.path / entry["name"]).rename(run.path / "slots/0000" / entry["name"])
    pointer = inner_state.Pointer(0, 1, 1, (entry,))
    assert inner_state.load(run, pointer, [fresh], 0, 2) == "it was saved by 1 ranks"
    assert inner_state.load(run, pointer, [fresh], 0) == ""
    assert all(map(torch.equal, [state["master"] for state in fresh.state.values()], wanted))


class OwnWords(torch.optim.SGD):
    def load_state_dict(self, given):
        super().load_state_dict(given)


class ModelOfOwnWords(torch.nn.Linear):
    """As many have it: from before there was `assign`."""

    def load_state_dict(self, given, strict=True):
        return super().load_state_dict(given, strict)


def test_what_loads_a_state_may_name_it_as_it_likes(run):
    def made(seed):
        torch.manual_seed(seed)
        net = ModelOfOwnWords(3, 2)
        return net, OwnWords(net.parameters(), lr=0.1, momentum=0.9)

    (net, optimizer), (other, fresh) = made(1), made(2)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    assert Checkpoints(run, Group(), "job2").load(other, fresh)[0].step == 1
    assert_equal(everything(other, fresh), everything(net, optimizer))


def test_two_ranks_share_no_state_that_is_each_ranks_own(run):
    ranks(2, "odd", run)


def test_a_number_of_the_state_is_saved_as_it_was_when_the_save_began(run):
    """torch shares a DTensor without dimensions with the training while it writes."""
    ranks(2, "numbers", run)


@pytest.mark.parametrize("world", [1, 2])
def test_state_that_a_first_step_does_not_make_comes_back(run, world):
    """It was left out without a word, or the run could never go on: "is the model still that of
    the run?\""""
    ranks(world, "late", run)


def test_a_save_takes_until_its_commit_however_late_somebody_asks(run):
    """The ranks ask at the end of a step, which may take longer than the save, or a notice."""
    checkpoints = Checkpoints(run, Group(), "job1")
    began = time.monotonic()
    checkpoints.begin(1, *trained(1), {"at": 1})
    wait_until((run.path / "checkpoints" / "step-00000001").exists, 60, "the commit")
    wrote_s = time.monotonic() - began
    time.sleep(2)
    assert checkpoints.poll()
    assert checkpoints.save_s < wrote_s + 1


def test_a_step_that_is_committed_is_not_written_again(run):
    save(run, 1)
    before = record_path(run, 1).read_bytes()
    checkpoints = Checkpoints(run, Group(), "job1")
    checkpoints.save(1, *trained(2), {"at": 1})
    checkpoints.begin(1, *trained(2), {"at": 1})
    assert checkpoints.finish() is None
    assert record_path(run, 1).read_bytes() == before
    assert load(run)[0].step == 1
    assert names(run, ".*") == []


def test_a_checkpoint_that_does_not_fit_the_model_is_an_error_and_no_fresh_start(run):
    save(run, 1)
    net = torch.nn.Linear(3, 3)
    with pytest.raises(ElasticError, match="cannot be loaded.*Missing key") as caught:
        Checkpoints(run, Group(), "job2").load(net, torch.optim.AdamW(net.parameters()))
    assert "step-00000001" in caught.value.what
    assert caught.value.hint


def test_bytes_are_durable_before_the_commit_points_to_them(run, monkeypatch):
    done = []
    link, rename = os.link, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "link", lambda a, b: (done.append("LINK"), link(a, b)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(f"RENAME {b}"), rename(a, b)))
    save(run, 1)
    draft = f"{run.path}/checkpoints/.step-00000001.job1"
    before = done[: done.index("LINK")]
    assert f"{draft}/__0_0.distcp" in before
    files = [f"{draft}/.metadata.tmp", f"RENAME {draft}/.metadata", f"{draft}/extra.json"]
    # The last files, the names in the draft, its own name; then the record's bytes.
    assert before[-6:-1] == [*files, draft, f"{run.path}/checkpoints"]
    after = done[done.index("LINK") :]
    assert after.index(f"{run.path}/checkpoints") < after.index(
        f"RENAME {run.path}/checkpoints/step-00000001"
    )


@pytest.mark.parametrize("name", ["step-00000001", ".step-00000001.job1"])
def test_a_filesystem_that_is_silent_at_a_commit_is_a_disk_that_refuses(run, monkeypatch, name):
    """It was an error that ends the run, even where the record was linked already."""
    written = run.path / "checkpoints/.step-00000001.job1/.metadata"

    def silent(real, asked, path, *args, **how):
        if asked(Path(str(path))).name == name and os.access(written, os.F_OK):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *args, **how)

    monkeypatch.setattr(durable, "AGAIN_S", ())
    is_linked = name[0] != "."
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", partial(silent, os.stat, Path))
        patch.setattr(os, "open", partial(silent, os.open, attrgetter("parent")))
        with nullcontext() if is_linked else pytest.raises(OSError, match="Stale file handle"):
            save(run, 1)
    assert steps(run) == [1] * is_linked
    assert save(run, 1)
    assert load(run)[0].step == 1


def test_a_draft_that_another_attempt_has_swept_away_is_not_committed(run, monkeypatch):
    """Its last file made the folder anew: a record stood for a checkpoint without tensors."""
    real, swept = Draft.write, []

    def sweep_first(draft, name, *parts):
        if not swept:
            net, optimizer = trained(0)
            swept.append(Checkpoints(run, Group(), "job2").load(net, optimizer))
        return real(draft, name, *parts)

    monkeypatch.setattr(Draft, "write", sweep_first)
    with pytest.raises(OSError, match="No such file"):
        save(run, 1)
    assert (len(swept), steps(run)) == (1, [])
    assert save(run, 1)
    assert load(run)[0].step == 1


def test_a_parameter_that_trained_later_gets_its_moments_whatever_the_optimizer_had(run):
    net, optimizer = trained(1)
    net.untrained.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    other, without = trained(2)
    assert other.untrained not in without.state
    Checkpoints(run, Group(), "job2").load(other, without)
    assert_equal(everything(other, without), everything(net, optimizer))


# ---- what is damaged is skipped -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["2/__0_0.distcp", "step-00000002", "step-00000002.json"])
def test_a_file_that_cannot_be_read_now_is_waited_for(run, monkeypatch, name):
    """The checkpoint before it was taken: steps were repeated, and the next save removed it."""
    save(run, 1)
    save(run, 2)
    monkeypatch.setattr(durable, "AGAIN_S", (0.0,))
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    fails = [errno.EIO] * 7
    for opening in ("stat", "open"):
        real = getattr(os, opening)

        def silent(path, *args, real=real, **how):
            if fails and not isinstance(path, int) and os.fspath(path).endswith(name):
                raise OSError(fails.pop(), "no answer", str(path))
            return real(path, *args, **how)

        monkeypatch.setattr(os, opening, silent)
    monkeypatch.setattr(Path, "read_bytes", lambda path: _read(os.open(path, os.O_RDONLY)))
    saved, reasons = load(run)
    assert (saved.step, reasons, fails) == (2, [], [])


@pytest.mark.parametrize("name", ["2/__0_0.distcp", "step-00000002.json"])
def test_one_that_cannot_be_read_for_minutes_is_passed_over_and_stays(run, monkeypatch, name):
    """A block of it may be bad for good; a filesystem that is away comes back."""
    for step in (1, 2):
        save(run, step)
    group = Group()
    group.patience_s = -1.0
    checkpoints, real = Checkpoints(run, group, "reader"), durable.insist

    def silent(action, *args):
        path = args[0] if args else action.__self__  # as of path.stat
        if str(path).endswith(name):
            raise TryAgain("the filesystem fails for now")
        return real(action, *args)

    monkeypatch.setattr(durable, "insist", silent)
    saved, (reason,) = load(run, checkpoints)
    assert (saved.step, reason[:7]) == (1, "step 2:")
    (run.path / "checkpoints/step-00000001.json").unlink()
    with pytest.raises(TryAgain):  # rather than begin anew
        load(run, checkpoints)
    monkeypatch.setattr(durable, "insist", real)
    assert load(run, checkpoints)[0].step == 2


def test_an_old_one_that_cannot_be_read_does_not_matter(run, monkeypatch):
    for step in (1, 2):
        save(run, step)
    real = durable.read_json

    def silent(path):
        if path == record_path(run, 1):
            raise TryAgain("the filesystem fails for now")
        return real(path)

    monkeypatch.setattr(durable, "read_json", silent)
    assert load(run)[0].step == 2


def _read(descriptor):
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra.json"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "committed file is damaged: "),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "committed file is damaged: "),
        (lambda path: path.unlink(), "committed file cannot be read: "),
    ],
    ids=["flipped", "truncated", "removed"],
)
def test_a_damaged_file_is_skipped_with_a_reason_and_never_read(
    run, monkeypatch, name, damage, words
):
    save(run, 1)
    save(run, 2)
    path = run.path / "checkpoints/step-00000002" / name
    damage(path)
    opened, real = [], storage.Reader
    monkeypatch.setattr(storage, "Reader", lambda path: (opened.append(path), real(path))[1])
    saved, (reason,) = load(run)
    assert saved.step == 1
    assert reason.startswith(f"step 2: {words}{path}")
    assert opened == [run.path / "checkpoints/step-00000001"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "extra.json"])
def test_checksums_are_of_the_bytes_in_memory_and_not_of_what_came_to_the_disk(
    run, monkeypatch, name
):
    """A write-back that fails leaves holes, and says so to a descriptor that is closed by then."""
    save(run, 1)
    real, lost = os.fsync, []

    def lossy(descriptor: int) -> None:
        real(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name in (name, f"{name}.tmp") and not lost:
            lost.append(path)
            with path.open("r+b") as file:
                half = path.stat().st_size // 2
                file.seek(half)
                file.write(bytes(half))

    monkeypatch.setattr(os, "fsync", lossy)
    save(run, 2)
    assert lost
    saved, (reason,) = load(run)
    assert saved.step == 1
    assert reason.startswith("step 2: committed file is damaged: ")
    assert f"/{name}: " in reason


def edited(**changes):
    def edit(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "there is no commit record: "),
        (lambda path: os.truncate(path, 100), "damaged file: "),
        (lambda path: path.write_bytes(b"\xff\xfe"), "damaged file: "),
        (lambda path: path.write_text("[]"), "damaged file: "),
        (lambda path: path.write_text("{}"), "damaged commit record: "),
        (edited(files=[]), "damaged commit record: "),
        (edited(files=[{"path": 5}]), "damaged commit record: "),
        (edited(step=3), "damaged commit record: "),
        (edited(world="many"), "damaged commit record: "),
    ],
    ids=["removed", "torn", "binary", "list", "empty", "no files", "no path", "step", "world"],
)
def test_without_a_sound_commit_record_a_step_is_skipped_with_a_reason(run, damage, words):
    save(run, 1)
    save(run, 2)
    damage(record_path(run, 2))
    saved, (reason,) = load(run)
    assert saved.step == 1
    assert reason.startswith(f"step 2: {words}{record_path(run, 2)}")


def test_with_none_that_is_sound_the_reasons_are_all_there_is(run):
    assert load(run) == (None, [])
    save(run, 1)
    save(run, 2)
    flip(run.path / "checkpoints/step-00000001/extra.json")
    record_path(run, 2).write_text("")
    saved, reasons = load(run)
    assert saved is None
    assert [reason.split(":")[0] for reason in reasons] == ["step 2", "step 1"]


@pytest.mark.parametrize("damage", ["record", "file", "name"])
def test_a_skipped_step_is_replaced_when_it_is_saved_again(run, damage):
    save(run, 1)
    save(run, 2)
    if damage == "record":
        record_path(run, 2).unlink()
    elif damage == "file":
        flip(run.path / "checkpoints/step-00000002/.metadata")
    else:
        os.truncate(record_path(run, 2), 10)
    checkpoints = Checkpoints(run, Group(), "job2")
    assert load(run, checkpoints)[0].step == 1
    checkpoints.save(2, *trained(2), {"at": 2, "again": True})
    saved, reasons = load(run)
    assert (saved.step, saved.extra["again"], reasons) == (2, True, [])
    assert names(run, ".*") == []


# ---- a failure at every step; death: tests/whole/test_crash_points.py ---------------------------


def small(seed):
    """A model of few files, which trains as that of `make`, and its optimizer."""
    torch.manual_seed(seed)
    net = torch.nn.Linear(7, 1)
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def test_a_commit_that_fails_at_any_step_raises_and_loses_nothing(run, fast, monkeypatch):
    monkeypatch.setitem(globals(), "make", small)
    save(run, 1)
    for number in itertools.count(1):
        fired, raised = [], False

        def fail(fired=fired):
            fired.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch = at_nth_step(number, fail, SAVE)
        try:
            save(run, number + 1)
        except OSError as error:
            raised = error.errno == errno.ENOSPC
        patch.undo()
        assert raised == (number + 1 not in steps(run))
        if raised:
            assert steps(run)[0] == number
            assert names(run, f".step-{number + 1:08d}.job1") == []
            save(run, number + 1)
        saved, reasons = load(run)
        assert (saved.step, reasons) == (number + 1, [])
        if not fired:
            break
    assert number > 20


def test_a_committed_checkpoint_that_did_not_get_its_name_is_read_and_gets_it_later(
    run, monkeypatch
):
    """A full quota refuses a rename, too. To take the checkpoint before would repeat its steps."""
    rename = os.rename

    def refuse(source, target):
        if str(target).endswith("step-00000001"):
            raise OSError(errno.EDQUOT, "rename failed")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        save(run, 1)
        saved, reasons = load(run)
        assert (saved.step, reasons) == (1, [])
        save(run, 2)
    assert names(run, ".*") == [".step-00000001.job1"]
    save(run, 3, keep=3)
    assert names(run, ".*") == []
    flip(run.path / "checkpoints/step-00000003/.metadata")
    flip(run.path / "checkpoints/step-00000002/.metadata")
    assert load(run)[0].step == 1


# ---- two writers, pruning -----------------------------------------------------------------------


def test_of_two_that_write_the_same_step_one_wins(run, fast):
    for step in range(1, 7):
        writers = ["job1", "job2"]
        ended = in_children([lambda w=w, s=step: save(run, s, w, by=w) for w in writers])
        assert ended == [0, 0]
        saved, reasons = load(run)
        assert (saved.step, reasons) == (step, [])
        assert saved.extra["by"] == json.loads(record_path(run, step).read_text())["writer"]
        assert names(run, ".*") == []


def test_who_is_late_with_the_same_step_changes_nothing(run):
    slow = Checkpoints(run, Group(), "slow")
    slow.begin(1, *trained(1), {"at": 1})
    save(run, 1, "fast")
    before = record_path(run, 1).read_bytes()
    assert slow.finish() == 1
    assert record_path(run, 1).read_bytes() == before
    assert load(run)[0].step == 1
    assert names(run, ".*") == []


def test_the_last_checkpoints_are_kept_and_the_drafts_of_the_dead_go(run):
    dead = run.path / "checkpoints/.step-00000003.dead"
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"part")
    for step in range(1, 5):
        assert dead.exists()
        save(run, step)
        assert steps(run) == [step, step - 1][: min(step, 2)]
    assert names(run) == [
        "step-00000003", "step-00000003.json", "step-00000004", "step-00000004.json"
    ]


def test_who_loads_a_checkpoint_removes_what_dead_writers_have_begun(run):
    """It took the room of the next one, which was to remove it once it is saved: none ever was."""
    save(run, 1)
    dead = [run.path / f"checkpoints/.step-0000000{step}.dead" for step in (1, 2, 3)]
    for folder in dead:
        folder.mkdir()
    os.rename(run.path / "checkpoints/step-00000001", dead[0] / "step")  # no name: it is whole
    os.rename(dead[0] / "step", run.path / "checkpoints/.step-00000001.job1")
    assert load(run)[0].step == 1
    assert names(run) == ["step-00000001", "step-00000001.json"]


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(run):
    for step in (1, 2, 4):
        save(run, step, keep=3)
    flip(run.path / "checkpoints/step-00000004/.metadata")
    checkpoints = Checkpoints(run, Group(), "job2", keep=2)
    assert load(run, checkpoints)[0].step == 2
    checkpoints.save(3, *trained(3), {"at": 3})
    assert steps(run) == [4, 3, 2]  # who knows: 4 may be read again
    checkpoints.save(5, *trained(5), {"at": 5})
    assert steps(run) == [5, 3]


# ---- a full disk --------------------------------------------------------------------------------


def test_a_full_disk_fails_the_checkpoint_alone(run):
    folder = run.path / "checkpoints"
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let one mount a small disk")
    try:
        save(run, 1)
        checkpoints, big = Checkpoints(run, Group(), "job2"), torch.nn.Linear(300, 300)
        state = (big, torch.optim.AdamW(big.parameters()))
        with pytest.raises(OSError, match="step 2 was not saved: .*No space left") as caught:
            checkpoints.save(2, *state, {})
        assert caught.value.errno == errno.ENOSPC
        checkpoints.begin(2, *state, {})
        with pytest.raises(OSError, match="step 2 was not saved: .*No space left"):
            checkpoints.finish()
        assert names(run) == ["step-00000001", "step-00000001.json"]
        assert load(run)[0].step == 1
        checkpoints.save(2, *trained(2), {"at": 2})
        assert load(run)[0].step == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)
