"""Versions: a commit is whole or it is not there, whoever dies when, and whatever else fails.

    pytest tests/saved/test_versions.py

Processes are really killed: a forked child runs until its nth call into the filesystem and is gone,
without a `finally`, for every n. Then the next master starts from what is on disk.
"""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from elastic.base import durable
from elastic.base.errors import ElasticError
from elastic.saved import inner_state, versions
from elastic.saved.drafts import Measured
from elastic.saved.layout import Layout
from elastic.saved.versions import (
    VersionDraft,
    prune,
    read_exactly,
    read_layout,
    read_params,
    remove_drafts,
)
from forks import KILLED, at_nth_step, in_children, killed_at
from helpers import commit_of
from merging import Rounds, read_outer

LAYOUT = Layout.of([("w", (3, 4)), ("b", (5,)), ("s", ())], 52)  # two fragments: 12 and 6


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """The order of calls is what counts here; that the disk obeys is the kernel's business."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def tensors(version):
    """What version `version` holds in these tests: parameters and momentum, per fragment."""
    fill = [torch.full((n,), version + 1 / 3) + torch.arange(n) for n in LAYOUT.numels]
    return fill, [part / 7 for part in fill]


def write(run, version, writer="epoch1"):
    """Write a draft up to the point before its commit."""
    draft = VersionDraft(run, version, writer)
    params, momentum = tensors(version)
    files = []
    for index in range(len(LAYOUT.fragments)):
        files += draft.write_fragment(LAYOUT, index, params[index], momentum[index])
    return draft, files


def commit(run, version, writer="epoch1"):
    draft, files = write(run, version, writer)
    return bool(draft.commit(LAYOUT, files, commit_of(version, tokens=100 * version)))


def assert_whole(run, version):
    """The version is committed, and every bit of it can be read."""
    record = run.commits.of(version)
    assert (record.version, record.tokens) == (version, 100 * version)
    outer = read_outer(run, record, 0.9)
    assert outer.layout == LAYOUT
    params, momentum = tensors(version)
    for index in range(len(LAYOUT.fragments)):
        assert torch.equal(outer.params[index], params[index])
        assert torch.equal(outer.momentum[index], momentum[index])
        published = read_params(run, record, LAYOUT, index)
        assert torch.equal(published, params[index].bfloat16())


def drafts(run):
    return sorted(path.name for path in (run.path / "versions").glob(".*"))


SAVE = (versions, "parts_of_file")  # a step like those of `os`


# ---- what a version is --------------------------------------------------------------------------


def test_a_version_is_safetensors_by_parameter_name_for_anybody_to_load(run):
    assert commit(run, 0)
    folder = run.path / "versions/000000"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "outer-00.safetensors", "outer-01.safetensors",
        "params-00.safetensors", "params-01.safetensors",
    ]
    loaded = load_file(folder / "params-00.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in loaded.items()} == {
        "w": ((3, 4), torch.bfloat16)
    }
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert read_layout(run, 0) == LAYOUT
    entries = run.commits.of(0).files
    assert {entry["path"] for entry in entries} == {
        str(path.relative_to(run.path)) for path in folder.iterdir()
    }
    for entry in entries:
        assert (run.path / entry["path"]).stat().st_size == entry["bytes"]


def test_bytes_are_durable_before_the_commit_points_to_them(run, monkeypatch):
    done = []
    link, rename = os.link, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "link", lambda a, b: (done.append("LINK"), link(a, b)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("RENAME"), rename(a, b)))
    draft, files = write(run, 0)
    written = [path.stat().st_ino for path in draft.folder.iterdir()]
    folder, versions = (path.stat().st_ino for path in (draft.folder, draft.folder.parent))
    at = len(done)
    draft.commit(LAYOUT, files, commit_of())
    before = done[: done.index("LINK")]
    assert set(written) <= set(before[:at])
    assert {folder, versions} < set(before[at:])  # the names in them
    between = done[done.index("LINK") : done.index("RENAME")]
    assert (run.path / "commits").stat().st_ino in between


# ---- death at every step ------------------------------------------------------------------------


def test_a_writer_killed_at_any_step_loses_nothing_that_was_committed(run):
    version, outcomes = 0, []
    for number in itertools.count(1):
        records = {v: run.commits.path(v).read_bytes() for v in range(version)}
        code = killed_at(number, lambda v=version: commit(run, v), SAVE)
        assert code in (0, KILLED)
        newest = run.commits.newest()
        assert run.commits.newest_version() in (version - 1, version)
        outcomes.append(run.commits.newest_version() == version)
        if newest:
            remove_drafts(run, newest.version)
            assert_whole(run, newest.version)
        if not outcomes[-1]:
            assert commit(run, version, writer=f"epoch{number + 1}")
        assert_whole(run, version)
        assert {v: run.commits.path(v).read_bytes() for v in range(version)} == records
        version += 1
        if code == 0:
            break
    assert number > 20
    assert outcomes == sorted(outcomes)  # first not committed, from one step on committed
    assert 2 < sum(outcomes) < number - 15
    for each in range(version):
        assert_whole(run, each)
    remove_drafts(run, run.commits.newest_version())
    assert drafts(run) == []


def test_a_version_is_read_where_a_full_quota_refuses_its_folder_a_name(run, monkeypatch):
    """Its writer did not live to give the name. A trainer that came to read died of the rename."""

    def refused(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        assert commit(run, 0)
        assert len(drafts(run)) == 1
        assert_whole(run, 0)
        assert read_layout(run, 0) == LAYOUT
    assert_whole(run, 0)
    assert drafts(run) == []


def as_often_as_it_takes(rounds: Rounds, accepted: list, wait=lambda: None) -> dict:
    """Commit as the master does."""
    following = rounds.weigh(accepted)
    while True:
        try:
            return rounds.averager.commit(*following)
        except OSError:
            wait()


def test_a_commit_that_fails_at_any_step_is_tried_again_and_loses_nothing(make_run):
    """What the master does about a full disk, at every place where it can show."""
    rounds, smooth = (Rounds(make_run(name=name), torch.zeros(30)) for name in ("a", "b"))
    for number in itertools.count(1):
        smooth.close([smooth.deliver(0, smooth.base() + 1, 10)])
        accepted, fired = [rounds.deliver(0, rounds.base() + 1, 10)], []

        def fail(fired=fired):
            fired.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch = at_nth_step(number, fail, SAVE)
        newest = as_often_as_it_takes(rounds, accepted)
        patch.undo()
        rounds.new_master()
        assert rounds.version == newest.version == number
        assert torch.equal(rounds.theta, smooth.theta)
        assert torch.equal(rounds.momentum, smooth.momentum)
        if not fired:
            break
    assert number > 25
    remove_drafts(rounds.run, rounds.run.commits.newest_version())
    assert drafts(rounds.run) == []
    rounds.averager.close()


def test_a_link_whose_answer_was_lost_is_still_the_writers_own(run, monkeypatch):
    """NFS: the link is made, the client hears of an error, and tries again."""
    real = os.link

    def link(source, target):
        real(source, target)
        raise OSError(errno.EIO, "answer lost")

    monkeypatch.setattr(os, "link", link)
    assert commit(run, 0)
    assert_whole(run, 0)
    draft, files = write(run, 1)
    run.commits.link(commit_of(1, writer="epoch1"))  # its own first try
    assert draft.commit(LAYOUT, files, commit_of())


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_never_hears_of_its_link_throws_nothing_away(make_run, monkeypatch, goes_on):
    """The link is made, and neither its answer comes nor that of the question after it."""
    rounds = Rounds(make_run(), torch.zeros(30))
    accepted = [rounds.deliver(0, rounds.base() + 1, 10)]
    with monkeypatch.context() as patch:
        deaf = deaf_after_link(patch)
        with pytest.raises(OSError, match="no answer"):
            rounds.close(accepted)
        assert deaf == ["link"]
    if goes_on:  # as after a full disk
        assert rounds.averager.commit(*rounds.weigh(accepted)) is None
    remove_drafts(rounds.run, rounds.run.commits.newest_version())
    rounds.new_master()
    assert rounds.version == 1
    assert torch.equal(rounds.base(), read_whole(rounds))
    rounds.averager.close()


def read_whole(rounds):
    commit, indices = rounds.run.commits.of(1), range(len(rounds.layout.fragments))
    outer = [versions.read_exactly(rounds.run, commit, rounds.layout, i)[0] for i in indices]
    return torch.cat(outer).bfloat16().float()


def deaf_after_link(patch) -> list:
    """From the link of a commit on no call is answered; what was linked so far."""
    link, stat, read, linked = os.link, os.stat, Path.read_bytes, []

    def deaf(real):
        def call(*args, **options):
            if linked:
                raise OSError(errno.EIO, "no answer")
            return real(*args, **options)

        return call

    def lost(source, target):
        link(source, target)
        linked.append("link")
        raise OSError(errno.EIO, "no answer")

    patch.setattr(os, "link", lost)
    patch.setattr(os, "stat", deaf(stat))
    patch.setattr(Path, "read_bytes", deaf(read))
    return linked


def test_a_draft_of_a_committed_version_is_not_begun_anew(run):
    draft, files = write(run, 0)
    run.commits.link(commit_of(writer="epoch1", files=files))
    VersionDraft(run, 0, "epoch1")
    draft.discard()
    assert drafts(run) == [".000000.epoch1"]
    VersionDraft(run, 0, "epoch2").discard()
    assert drafts(run) == [".000000.epoch1"]


def test_a_committed_version_that_did_not_get_its_name_gets_it_later(run, monkeypatch):
    commit(run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        assert commit(run, 1)
    assert commit(run, 2)
    assert drafts(run) == [".000001.epoch1"]
    remove_drafts(run, run.commits.newest_version())
    assert drafts(run) == []
    assert run.version_path(1).exists()
    assert_whole(run, 1)


def failing(*_):
    raise OSError(errno.EIO, "rename failed")


# ---- two writers --------------------------------------------------------------------------------


def test_of_two_that_write_the_same_version_one_wins(run):
    for version in range(8):
        writers = [lambda w=w, v=version: commit(run, v, w) for w in ("epoch1", "epoch2")]
        assert sorted(in_children(writers)) == [0, 1]
        assert_whole(run, version)
        assert drafts(run) == []


def test_who_is_late_with_the_same_version_changes_nothing(run):
    (first, files), (second, more) = write(run, 0, "epoch1"), write(run, 0, "epoch2")
    assert first.commit(LAYOUT, files, commit_of())
    before = run.commits.path(0).read_bytes()
    assert not second.commit(LAYOUT, more, commit_of(tokens=999))
    assert run.commits.path(0).read_bytes() == before
    assert_whole(run, 0)
    assert drafts(run) == []


def test_a_new_master_does_not_take_the_draft_that_an_old_one_is_about_to_commit(run):
    commit(run, 0)
    draft, files = write(run, 1, "epoch1")
    remove_drafts(run, run.commits.newest_version())
    assert draft.commit(LAYOUT, files, commit_of(1, tokens=100))
    assert_whole(run, 1)


def test_a_worker_still_writing_version_0_when_another_has_made_it_just_loses(run):
    slow = VersionDraft(run, 0, "slot1.1")
    params, momentum = tensors(0)
    files = slow.write_fragment(LAYOUT, 0, params[0], momentum[0])
    commit(run, 0, "slot0.1")
    remove_drafts(run, run.commits.newest_version())
    assert slow.folder.exists()  # its writer lives, and would trip over its absence
    for version in range(1, 6):
        commit(run, version)
        prune(run, version, keep=3, keep_every=0)
    assert drafts(run) == []
    files += slow.write_fragment(LAYOUT, 1, params[1], momentum[1])
    assert not slow.commit(LAYOUT, files, commit_of())
    assert_whole(run, 5)
    assert drafts(run) == []


def test_drafts_of_dead_writers_go_when_their_version_is_history(run):
    write(run, 1, "epoch1")
    write(run, 3, "epoch1")
    (run.path / "versions/.nfs000123abc").write_text("an NFS client's own")
    for version in range(3):
        commit(run, version, "epoch2")
    remove_drafts(run, run.commits.newest_version())
    assert drafts(run) == [".000003.epoch1", ".nfs000123abc"]
    for version in range(3, 5):
        commit(run, version, "epoch2")
    prune(run, 4, keep=3, keep_every=0)
    assert drafts(run) == [".000003.epoch1", ".nfs000123abc"]
    commit(run, 5, "epoch2")
    commit(run, 6, "epoch2")
    prune(run, 6, keep=3, keep_every=0)
    assert drafts(run) == [".nfs000123abc"]


# ---- what is damaged is refused -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["params-01.safetensors", "outer-00.safetensors", "manifest.json"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is damaged"),
        (lambda path: os.truncate(path, 0), "0 bytes"),
        (lambda path: path.write_bytes(flipped(path.read_bytes())), "is damaged"),
        (lambda path: path.unlink(), "is gone"),
    ],
    ids=["truncated", "empty", "altered", "missing"],
)
def test_a_damaged_file_is_refused_with_its_path_and_what_it_should_be(run, name, damage, words):
    commit(run, 0)
    path = run.path / "versions/000000" / name
    entry = next(e for e in run.commits.of(0).files if e["path"].endswith(name))
    damage(path)
    read = read_params if name.startswith("params") else read_outer
    rest = (LAYOUT, 1) if read is read_params else (0.9,)
    with pytest.raises(ElasticError, match=words) as caught:
        read(run, run.commits.of(0), *rest)
    assert str(path) in caught.value.what
    assert caught.value.hint
    if path.exists():
        assert f"the commit says {entry['bytes']} bytes, xxh3 {entry['xxh3']}" in caught.value.what


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_a_version_that_is_pruned_while_it_is_read_is_refused_as_one_that_is_gone(
    run, monkeypatch
):
    """safetensors raised a FileNotFoundError, of which a worker died: it had come too late for
    this version, and there was a newer one."""
    commit(run, 0)
    checksum = durable.checksum

    def slow(path: Path) -> str:
        told = checksum(path)
        prune(run, 5, 3, 0)
        return told

    monkeypatch.setattr(durable.damage, "__defaults__", (slow,))
    with pytest.raises(ElasticError, match="it is gone"):
        read_params(run, run.commits.of(0), LAYOUT, 0)


def test_a_file_that_cannot_be_opened_for_a_moment_is_opened_again(run, monkeypatch):
    """safetensors calls each such error a missing file. A link to itself stands for the stale
    handle of a network filesystem."""
    commit(run, 0)
    path = run.version_path(0) / "outer-00.safetensors"
    real, tries = versions.load_file, []

    def load(where: Path) -> dict:
        tries.append(where)
        if len(tries) > 1:
            return real(where)
        aside = path.rename(path.with_name("aside"))
        path.symlink_to(path)
        try:
            return real(where)
        finally:
            aside.rename(path)

    monkeypatch.setattr(versions, "load_file", load)
    read_exactly(run, run.commits.of(0), LAYOUT, 0)
    assert len(tries) == 2


def test_a_file_that_the_commit_does_not_name_is_never_read(run):
    commit(run, 0)
    with pytest.raises(ElasticError, match="version 0 has no file params-07"):
        read_params(run, run.commits.of(0), LAYOUT, 7)


# ---- pruning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "every", "kept"),
    [(3, 0, [9, 10, 11]), (1, 0, [11]), (2, 4, [0, 4, 8, 10, 11]), (20, 0, list(range(12)))],
)
def test_the_last_versions_and_every_mth_are_kept_and_every_record(run, keep, every, kept):
    for version in range(12):
        commit(run, version)
        prune(run, version, keep, every)
    assert [v for v in range(12) if run.version_path(v).exists()] == kept
    assert [record.version for record in run.commits.all()] == list(range(12))
    for version in kept:
        assert_whole(run, version)
    newest = [int(path.name) for path in (run.path / "deltas").iterdir()]
    assert sorted(newest) == list(range(max(0, 12 - keep), 12))


def test_a_copy_beside_the_versions_is_left_alone(run):
    """`cp -r versions/000001 versions/000001.bak`: from then on nothing was pruned."""
    for version in range(2):
        commit(run, version)
    copies = ("000001.bak", "000001 (copy)", ".1st.try", "2nd")
    for name in copies:
        shutil.copytree(run.version_path(1), run.path / "versions" / name)
        (run.path / "deltas" / name).mkdir()
        (run.path / "slots" / name).mkdir()
        shutil.copy(run.commits.path(1), run.path / "commits" / f"{name}.json")
    for version in range(2, 6):
        commit(run, version)
        remove_drafts(run, run.commits.newest_version())
        prune(run, version, keep=2, keep_every=0)
    assert {*os.listdir(run.path / "versions")} == {*copies, "000004", "000005"}
    assert {*os.listdir(run.path / "deltas")} == {*copies, "000004", "000005"}
    assert (run.commits.newest_version(), run.slots.all()) == (5, [])


def test_a_smaller_keep_catches_up_and_a_pruned_version_says_so(run):
    for version in range(6):
        commit(run, version)
    for _ in range(2):
        prune(run, 5, keep=2, keep_every=0)
        assert [v for v in range(6) if run.version_path(v).exists()] == [4, 5]
    with pytest.raises(ElasticError, match="is gone"):
        read_params(run, run.commits.of(1), LAYOUT, 0)


def test_pruning_cut_short_leaves_whole_versions_and_is_finished_later(run, monkeypatch):
    for version in range(5):
        commit(run, version)
    rmtree = shutil.rmtree

    def cut_short(folder, **options):
        files = list(folder.glob("*.safetensors"))
        if folder.name.endswith("000001") and files:
            files[0].unlink()
            raise KeyboardInterrupt
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        prune(run, 4, keep=2, keep_every=0)
    for folder in (run.path / "versions").glob("[0-9]*"):
        assert_whole(run, int(folder.name))
    monkeypatch.undo()
    prune(run, 4, keep=2, keep_every=0)
    assert sorted(path.name for path in (run.path / "versions").iterdir()) == ["000003", "000004"]


# ---- a full disk --------------------------------------------------------------------------------


class Tmpfs:
    """A real disk of half a megabyte."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass

    def make_space(self):
        (self.folder / "filler").unlink(missing_ok=True)


class Pretended(Tmpfs):
    """Where nobody may mount."""

    def fill(self):
        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Measured, "write", refuse)

    def make_space(self):
        self.patch.undo()


@pytest.fixture
def small_disk(home):
    """The runs root of this test, on a disk that can be full."""
    folder = Path(os.environ["ELASTIC_RUNS"])
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield Tmpfs(folder) if mounted else Pretended(folder)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_delays_a_version_and_loses_nothing(small_disk, make_run):
    rounds, waits = Rounds(make_run(), torch.zeros(30)), []
    commits = [rounds.close([rounds.deliver(0, rounds.base() + 1, 10)])]
    accepted = [rounds.deliver(0, rounds.base() + 1, 10)]

    def wait_for_space():
        waits.append(drafts(rounds.run))
        assert rounds.run.commits.newest_version() == 1
        if len(waits) == 3:
            small_disk.make_space()

    small_disk.fill()
    as_often_as_it_takes(rounds, accepted, wait_for_space)
    commits.append(rounds.run.commits.of(2))
    assert waits == [[], [], []]  # what did not fit was removed each time
    expected = rounds.theta
    rounds.new_master()
    assert rounds.version == 2
    assert torch.equal(rounds.theta, expected)
    assert all(read_outer(rounds.run, record, 0.9) for record in commits)
    rounds.averager.close()


def test_a_full_disk_is_an_os_error_for_an_inner_state_too(run, monkeypatch):
    def refuse(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(inner_state, "save_file", refuse)
    with pytest.raises(OSError, match="No space left on device") as caught:
        inner_state.save(run.path, "inner", [], 0)
    assert caught.value.errno == errno.ENOSPC
