"""What other users put where a run reads, and how what Elastic makes keeps them out.

The other user is `nobody`, in a group that may write to a project's folder: to become that takes
root. What each attack plants would make the folder `loot`; nothing ever does.
pytest tests/whole/test_planted.py
"""

import ctypes
import json
import os
import pickle
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import test_versions
from checkpoint_ranks import make, train
from elastic.base import config as configuration
from elastic.base.durable import append_line, check_private, checksum, make_folder, write_atomic
from elastic.base.environment import registry_dir
from elastic.base.errors import ElasticError
from elastic.jobs.sched_local import LocalScheduler
from elastic.local.master import redis_server
from elastic.local.transport import Transport
from elastic.run.rundir import FOLDERS, SECRETS, Control, RunDir
from elastic.saved import checkpoint, inner_state, storage
from elastic.saved.checkpoint import Checkpoints
from elastic.train.group import Group
from forks import NOBODY, as_nobody, share, start_child
from helpers import elastic, environment, short_folder

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")

EXCHANGE, HERE = 2, -100  # renameat2(2)


@pytest.fixture
def project(monkeypatch) -> Iterator[Path]:
    """A folder that everybody may enter, with the registry, runs and site of a user in it."""
    with short_folder() as folder:
        monkeypatch.setenv("ELASTIC_HOME_DIR", str(folder / "registry"))
        monkeypatch.setenv("ELASTIC_RUNS", str(folder / "runs"))
        monkeypatch.setenv("ELASTIC_SITE", os.devnull)
        yield folder


def create(project: Path, name: str = "r") -> RunDir:
    """A run that others may enter."""
    file = project / f"{name}.toml"
    file.write_text('[run]\nscheduler = "local"\n[train]\nepochs = 1\n')
    given, control = {"PATH": os.environ["PATH"]}, Control("local", "running", 1, 1)
    run = RunDir.create(project / "runs", configuration.load(file), control, given)
    run.path.chmod(0o755)
    return run


# ---- what is made has a mode of its own ---------------------------------------------------------


def everything(run: RunDir) -> None:
    """Make at least one of each kind of file and folder."""
    LocalScheduler().jobs()
    run.slots.claim(3, {})
    run.masters.claim({})
    run.event("x")
    run.jobs.write_ending("7", {"role": "worker", "state": "started"})
    run.jobs.write_progress({})
    run.mark_failed("x")
    test_versions.commit(run, 0)
    Transport(run).put((1, 1, 0), 0, memoryview(b"abc"))
    net, optimizer = make(seed=1)
    train(net, optimizer)
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {})
    entry = inner_state.save(run.slots.path(3), "inner-1", [optimizer], 0)
    inner_state.publish(run, inner_state.Pointer(3, 1, 0, (entry,)))


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize("acl", [False, True], ids=["plain", "acl"])
def test_whatever_umask_and_default_acl_say_files_and_folders_have_their_own_mode(
    project, umask, acl
):
    if acl:
        share(project)
    before = os.umask(umask)
    try:
        run = create(project)
        everything(run)
    finally:
        os.umask(before)
    private = {"run.toml", "environment.json", "lock", *SECRETS.values()}
    for path in (*run.path.rglob("*"), *(project / "registry").rglob("*")):
        mode, name = stat.S_IMODE(path.lstat().st_mode), path.relative_to(project)
        if path.is_symlink():
            continue
        wanted = 0o755 if path.is_dir() else 0o600 if path.name in private else 0o644
        assert mode == (0o700 if path.name == "jobs" else wanted), name
        assert "system.posix_acl_default" not in os.listxattr(path), name
    assert as_nobody(lambda: planted(run.path)) == []
    assert check_private(run.path) == run.path


def planted(top: Path) -> list[str]:
    """Which folders and files below one somebody else can change."""
    found = []
    for folder, _, files in os.walk(top):
        acts: list[tuple[str, Callable]] = [(f"{folder}/planted", Path.mkdir)]
        acts += [(f"{folder}/{name}", lambda path: path.open("ab")) for name in files]
        for name, act in acts:
            try:
                act(Path(name))
            except PermissionError:
                continue
            found.append(name)
    return found


def test_a_new_run_is_its_owners_alone(project):
    run = create(project)
    found = RunDir.create(project / "runs", configuration.load(project / "r.toml", ["run.name=s"]),
                          Control("local", "running", 1, 1), {})
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o700
    assert as_nobody(lambda: [os.access(each, os.X_OK) for each in (run.path, found.path)]) == [
        True, False,
    ]


def test_a_server_keeps_its_folder_to_itself_below_a_default_acl(project):
    run = create(project)
    share(run.path)
    server = redis_server.start(run, run.config(), "127.0.0.1", 1)
    try:
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        assert as_nobody(lambda: os.access(server.folder, os.X_OK)) is False
    finally:
        server.stop()


def test_a_line_is_added_to_a_file_whose_mode_the_user_chose(tmp_path):
    path = tmp_path / "events.jsonl"
    append_line(path, {})
    path.chmod(0o640)
    append_line(path, {})
    assert (stat.S_IMODE(path.stat().st_mode), len(path.read_text().splitlines())) == (0o640, 2)


def test_a_secret_is_never_open_to_others_not_even_empty(project, monkeypatch):
    seen, real = [], os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: (
        seen.append(stat.S_IMODE(os.fstat(fd).st_mode)), real(fd, mode)))
    before = os.umask(0)
    write_atomic(project / "secret", b"x", 0o600)
    os.umask(before)
    assert seen == [0o600]


# ---- a place where others could put something ---------------------------------------------------


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_a_run_whose_folder_others_may_write_to_is_refused_by_whatever_is_read_first(
    project, folder
):
    path = create(project).path
    (path / folder).chmod(0o775)
    for read in (RunDir.config, RunDir.environment, RunDir.control, RunDir.secret, RunDir.endpoint):
        with pytest.raises(ElasticError, match="others may write to .*0775") as caught:
            read(RunDir(path))
        assert f"chmod go-w {(path / folder).resolve()}" == caught.value.hint


def test_a_slots_folder_that_others_may_write_to_is_refused(project):
    run = create(project)
    run.slots.path(3).chmod(0o775)
    with pytest.raises(ElasticError, match="others may write to .*0003"):
        run.slots.path(3)


@pytest.mark.parametrize("folder", [".", "runs", "local/jobs"])
def test_a_registry_that_others_may_write_to_is_refused(project, folder):
    create(project)
    LocalScheduler()
    (project / "registry" / folder).chmod(0o775)
    with pytest.raises(ElasticError, match="others may write to"):
        registry_dir()


ABOVE = [  # owner, group, mode of the folder above a run; what is wrong with it
    (0, 0, 0o755, ""), (0, NOBODY, 0o755, ""), (0, NOBODY, 0o2750, ""), (0, 0, 0o1777, ""),
    (0, NOBODY, 0o3775, ""), (0, NOBODY, 0o2775, "others may write"),
    (0, NOBODY, 0o770, "others may write"), (0, 0, 0o777, "others may write"),
    (NOBODY, NOBODY, 0o755, "another user's"), (NOBODY, NOBODY, 0o1777, "another user's"),
]


@pytest.mark.parametrize(("owner", "group", "mode", "wrong"), ABOVE)
def test_a_folder_above_is_fit_if_nobody_else_can_change_what_is_in_it(
    project, owner, group, mode, wrong
):
    run, above = create(project), project / "runs"
    os.chown(above, owner, group)
    above.chmod(mode)

    def take_away() -> bool:
        try:
            os.rename(run.path, above / "away")
        except PermissionError:
            return False
        return True

    if not wrong:
        assert RunDir(run.path).config().run.name == "r"
        assert as_nobody(take_away) is False
        return
    submit = elastic("submit", project / "r.toml", "--name", "another",
                     env=environment(project, ELASTIC_RUNS=str(above)))
    assert (submit.returncode, wrong in submit.stderr) == (1, True), submit.stderr
    with pytest.raises(ElasticError, match=wrong) as caught:
        RunDir(run.path).config()
    assert str(above) in str(caught.value)
    assert "or +t, or choose another place" in caught.value.hint or wrong == "another user's"
    with pytest.raises(ElasticError, match=wrong):
        make_folder(above / "new")
    assert not (above / "new").exists()
    assert as_nobody(take_away) is True  # it was no idle word


def enter_container() -> None:
    """A user namespace that knows no root, as that of an image that an ordinary user starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self is the user's own
    assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {NOBODY} 1")


def test_in_a_container_without_root_the_folders_above_may_be_roots(project):
    """They are shown as nobody's, and no run could be started there."""
    mine, theirs, wide = (project / name for name in ("mine", "theirs", "wide"))
    for folder in (mine, theirs, wide):
        folder.mkdir()
    os.chown(mine, NOBODY, NOBODY)
    wide.chmod(0o777)

    def judged() -> list:
        before = outcome(mine, False), outcome(theirs, True)
        enter_container()
        assert Path("/").stat().st_uid not in (0, NOBODY)
        return [*before, outcome(mine, False), outcome(theirs, True), outcome(theirs, False),
                outcome(wide, True)]

    def outcome(folder: Path, is_above: bool) -> str:
        try:
            check_private(folder, is_above)
        except ElasticError as error:
            return error.what.split(" (")[0].replace(str(project), "")
        return "fit"

    refused = ["/theirs is another user's", "others may write to /wide"]
    assert as_nobody(judged) == ["fit"] * 4 + refused


def thief(one: Path, other: Path) -> int:
    """A process that exchanges two folders for as long as it lives."""
    libc = ctypes.CDLL(None, use_errno=True)

    def steal() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        while True:
            libc.renameat2(HERE, bytes(one), HERE, bytes(other), EXCHANGE)

    return start_child(steal)


def test_a_run_that_somebody_exchanges_all_the_time_is_never_read(project):
    """The race of a pass of cron's: what it runs `squeue` by is in environment.json."""
    run = create(project)
    folder = project / "runs"
    os.chown(folder, 0, NOBODY)
    folder.chmod(0o2775)
    evil = folder / "evil"

    def plant() -> None:
        evil.mkdir()
        for name in FOLDERS:
            (evil / name).mkdir()
        (evil / "environment.json").write_text(json.dumps({"PATH": "evil"}))

    as_nobody(plant)
    stolen = folder / ".evil"
    evil.rename(stolen)
    child = thief(run.path, stolen)
    refused = 0
    try:
        began = time.monotonic()
        while (gone_s := time.monotonic() - began) < 1.0 or (refused <= 10 and gone_s < 60.0):
            try:
                assert RunDir(run.path).environment() is None, "read where others may write"
            except ElasticError:
                refused += 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert refused > 10


def test_a_link_on_the_way_to_a_run_is_followed_once(project):
    run = create(project)
    theirs = project / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    evil = theirs / "evil"
    as_nobody(lambda: os.symlink(run.path, theirs / "link"))
    found = RunDir(theirs / "link")
    found.config()

    def swap() -> None:
        evil.mkdir()
        (evil / "environment.json").write_text('{"PATH": "evil"}')
        os.unlink(theirs / "link")
        os.symlink(evil, theirs / "link")

    as_nobody(swap)
    assert found.environment() == {"PATH": os.environ["PATH"]}
    assert found.path == run.path


# ---- pickles ------------------------------------------------------------------------------------


class Evil:
    """Calls something when it is unpickled, if what unpickles lets it."""

    def __init__(self, call: Callable, *args: object):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def saved(run: RunDir, optimizer_has: object = 0.5) -> Path:
    """A committed checkpoint; its folder."""
    net, optimizer = make(seed=1)
    train(net, optimizer)
    optimizer.param_groups[0]["more"] = optimizer_has
    Checkpoints(run, Group(), "job1").save(1, net, optimizer, {"base_version": 0})
    return run.path / "checkpoints" / "step-00000001"


def loaded(run: RunDir) -> tuple:
    net, optimizer = make(seed=2)
    train(net, optimizer)
    optimizer.param_groups[0]["more"] = 0
    found, reasons = Checkpoints(run, Group(), "job2").load(net, optimizer)
    return found and optimizer.param_groups[0].get("more"), reasons


def forge(path: Path) -> None:
    """Let the commit record say of a file what is true of it now."""
    record_path = path.parent.with_suffix(".json")
    record = json.loads(record_path.read_text())
    (entry,) = (each for each in record["files"] if Path(each["path"]).name == path.name)
    entry |= {"bytes": path.stat().st_size, "xxh3": checksum(path)}
    record_path.write_text(json.dumps(record))


def chained(module: str, name: str, *args: object) -> bytes:
    """A pickle that calls what it finds by a dotted name."""
    words = b"".join(b"V%s\n" % str(each).encode() for each in args)
    return f"\x80\x04V{module}\nV{name}\n\x93(".encode("latin-1") + words + b"tR."


def test_plain_values_of_an_optimizer_come_back(run):
    for number, value in enumerate([0.25, (1, None), True, "x", torch.float32], 1):
        net, optimizer = make(seed=1)
        train(net, optimizer)
        optimizer.param_groups[0]["more"] = value
        Checkpoints(run, Group(), "job1").save(number, net, optimizer, {})
        found, reasons = loaded(run)
        assert (found, type(found), reasons) == (value, type(value), [])


def test_a_planted_pickle_is_skipped_for_what_it_is(run, tmp_path):
    path = saved(run) / ".metadata"
    path.write_bytes(pickle.dumps(Evil(os.mkdir, str(tmp_path / "loot"))))
    found, (reason,) = loaded(run)
    assert (found, "committed file is damaged" in reason) == (None, True)
    assert not (tmp_path / "loot").exists()


def test_a_pickle_that_is_planted_after_the_check_calls_nothing(run, tmp_path, monkeypatch):
    path, real = saved(run) / ".metadata", checkpoint.find_newest

    def checked(*which):
        answer = real(*which)
        path.write_bytes(pickle.dumps(Evil(os.mkdir, str(tmp_path / "loot"))))
        return answer

    monkeypatch.setattr(checkpoint, "find_newest", checked)
    with pytest.raises(ElasticError, match=r"\.metadata names posix\.mkdir"):
        loaded(run)
    assert not (tmp_path / "loot").exists()


DCP = "torch.distributed.checkpoint"


@pytest.mark.parametrize(
    "evil",
    [
        lambda loot: pickle.dumps(Evil(os.mkdir, loot)),
        lambda loot: pickle.dumps(Evil(eval, f"__import__('os').mkdir({loot!r})")),
        lambda loot: chained(f"{DCP}.filesystem", "os.mkdir", loot),
        lambda loot: chained(f"{DCP}.metadata", "os.mkdir", loot),
        lambda loot: chained("torch", "serialization.os.mkdir", loot),
        lambda loot: chained("torch.serialization", "os.mkdir", loot),
        lambda loot: chained("torch", "load", loot),
        lambda loot: chained("builtins", "getattr", "x", "y"),
    ],
    ids=["os", "eval", "storage", "metadata", "torch", "serialization", "load", "words"],
)
def test_a_pickle_with_a_forged_record_calls_nothing(run, tmp_path, evil):
    path = saved(run) / ".metadata"
    path.write_bytes(evil(str(tmp_path / "loot")))
    forge(path)
    with pytest.raises((ElasticError, TypeError)):
        loaded(run)
    assert not (tmp_path / "loot").exists()


def test_a_value_that_is_a_pickle_is_neither_saved_nor_loaded(run, tmp_path, monkeypatch):
    evil = Evil(os.mkdir, str(tmp_path / "loot"))
    with pytest.raises(ElasticError, match="not saved: .*(weights_only|WeightsUnpickler)"):
        saved(run, evil)
    assert checkpoint.steps(run) == []
    with monkeypatch.context() as patch:
        patch.setattr(storage, "plain", lambda data: data)
        saved(run, evil)
    with pytest.raises(ElasticError, match="cannot be loaded: .*(weights_only|WeightsUnpickler)"):
        loaded(run)
    assert not (tmp_path / "loot").exists()
