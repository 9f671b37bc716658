"""What a worker does about what has happened elsewhere, one decision at a time.

Its line and what moves its tensors are stand-ins with the few things that the decision reads; whole
workers are in test_rejections.py, test_faults.py and test_overlap.py.
"""

import contextlib
import errno
import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import default_collate

from elastic.base import durable
from elastic.base.errors import ElasticError, Exit, TryAgain
from elastic.base.signals import Notice, die_with_parent
from elastic.jobs.history import End
from elastic.local.store import WorkerStore
from elastic.local.transport import Transport
from elastic.local.worker import agent, deliver, line
from elastic.local.worker.adopt import Adoption, layout_of_run
from elastic.local.worker.agent import Agent, Training
from elastic.local.worker.deliver import Delivery
from elastic.local.worker.exchange import Put
from elastic.local.worker.in_hand import InHand, WorkerRound
from elastic.local.worker.line import Line, Place, RankLine
from elastic.local.worker.local_sgd import LocalSGD
from elastic.local.worker.moments import Moments
from elastic.local.worker.worker import train
from elastic.run.commits import Commits
from elastic.run.records import Commit, Fragment, Header, Outcome
from elastic.saved import inner_state
from elastic.saved.layout import Layout
from elastic.train.group import Group
from elastic.train.inner_optimizer import InnerOptimizer
from helpers import PATIENCE, commit_of, wait_until
from tiny_task import Masked


def hidden(for_looks: int, notice=False, answers=True) -> tuple[RankLine, list[int]]:
    """The line of a worker whose filesystem shows a version only after so many looks at it (and
    `answers` none of them); and what it has looked at."""
    looks = []

    def commit(version: int) -> Commit | None:
        looks.append(version)
        if not answers and len(looks) <= for_looks:
            raise TryAgain("the filesystem fails for now")
        return commit_of(version) if len(looks) > for_looks else None

    run = SimpleNamespace(path=Path("/runs/a"))
    run.commits = Commits(run)
    run.commits.of = commit
    return RankLine(Place(run, 0, 1, "7"), notice), looks


@pytest.mark.parametrize("answers", [True, False])
def test_a_version_that_is_announced_before_it_is_seen_is_waited_for(monkeypatch, answers):
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    late, looks = hidden(for_looks=3, answers=answers)
    assert late.commit(7) == commit_of(7)
    assert looks == [7] * 4


@pytest.mark.parametrize("notice", [False, True])
def test_it_is_not_waited_for_without_end_nor_after_a_notice(monkeypatch, notice):
    """After a notice that is no fault of the program, nor of the run."""
    monkeypatch.setattr(line, "UNSEEN_S", 3600.0 if notice else 1e-9)
    monkeypatch.setattr(durable, "STUCK_S", 0.0)
    late, _ = hidden(for_looks=10**9, notice=notice)
    with pytest.raises(ElasticError, match="not seen here yet: .*000007.json") as caught:
        late.commit(7)
    assert notice or "/runs/a" in caught.value.hint
    assert isinstance(caught.value, TryAgain) == notice


def lives(slot: int, state: str = "loading") -> SimpleNamespace:
    return SimpleNamespace(slot=slot, state=state, moved=0.0)


@pytest.mark.parametrize("happens", ["it makes it", "it is lost", "it hangs"])
def test_of_workers_that_live_the_lowest_slot_makes_version_0(run, happens):
    """Each wrote its own: of many the disk was full, and none of them was ever whole. Of one that
    hung in its data set the others waited for ever, as it had its lease."""
    model, waits, notice = torch.nn.Linear(2, 1), threading.Event(), Notice()
    live, hang_s = {2: lives(2), 5: lives(5, "waiting")}, run.config().health.hang_timeout_s
    clock = [0.0]

    def opened(slot: int) -> Layout:
        mine = Line(Place(run, slot, 1, "7"), notice)
        store = SimpleNamespace(slots=lambda: dict(live), now=lambda: clock[0])
        mine.reach = lambda action: action(store)
        mine.say = lambda **said: waits.set() if said.get("state") == "waiting" else None
        return layout_of_run(mine, Group(), model, 10, 1)

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(notice.arrived, signal.SIGTERM)
        fifth = pool.submit(opened, 5)
        assert waits.wait(20 * PATIENCE)
        assert not list((run.path / "versions").iterdir())
        if happens == "it is lost":
            del live[2]
        elif happens == "it hangs":
            clock[0] = hang_s
        else:
            opened(2)
        assert fifth.result(20 * PATIENCE).numels == (3,)
    assert run.commits.of(0).writer == ("slot2.1" if happens == "it makes it" else "slot5.1")


def test_a_notice_ends_the_wait_for_version_0(run):
    waiting = Line(Place(run, 5, 1, "7"), True)
    store = SimpleNamespace(slots=lambda: {2: lives(2)}, now=lambda: 0.0)
    waiting.reach = lambda action: action(store)
    with pytest.raises(TryAgain, match="no version 0"):
        layout_of_run(waiting, Group(), torch.nn.Linear(2, 1), 10, 1)


class Worker:
    """What a worker has in hand in round `base`, and what acts on it; `store` answers its line."""

    def __init__(self, base: int, store: object = None, told=lambda: -1):
        commits = SimpleNamespace(told_version=told)
        run = SimpleNamespace(key="a", path=Path("/nowhere"), commits=commits)
        self.line = Line(Place(run, 0, 1, "7"), False)
        self.line.reach = lambda action, kind=None: action(store)
        self.line.commit = commit_of
        health = SimpleNamespace(max_bad_batches=3)
        self.hand = InHand(self.line, SimpleNamespace(health=health))
        self.hand.round = WorkerRound(base, 0.0)
        self.exchange = SimpleNamespace(
            group=Group(), adopt=lambda commit, fetched: None,
            replica=SimpleNamespace(restore=lambda: None),
        )
        moments = SimpleNamespace(begin=lambda version: None, origin="fresh", save_s=1.0)
        self.deliver = Delivery(self.hand, self.exchange, moments)
        model = torch.nn.Linear(1, 1)
        self.adopt = Adoption(self.hand, moments, self.deliver, model)

    def hears_of(self, version: int) -> None:
        self.line.news = line.News(version, state="running")


@pytest.mark.parametrize(("reason", "kept"), [("samples: already committed", False),
                                              ("altered: 3 bytes", True)])
def test_samples_that_came_with_those_of_others_are_not_trained(reason, kept):
    verdict = {"base": 5, "rule": reason.partition(":")[0], "reason": reason}
    worker = Worker(5, SimpleNamespace(take_verdict=lambda *_: verdict, offered=lambda *_: False))
    worker.hand.queue = [(0, 4, 8)]
    worker.hand.round.steps = 3
    assert not worker.deliver.keep_offered(worker.hand.round)
    assert worker.hand.queue == ([(0, 4, 8)] if kept else [])


HEADER = Header(
    run="a", slot=0, attempt=1, job_id="7", base=5, layout="l", codec="none", steps=1,
    tokens=2, samples=((0, 0, 2),), loss=0.0, first_loss=0.0, fragments=(),
)


def worker_that_has_delivered(store: object = None) -> Worker:
    """Two samples trained on version 5."""
    worker = Worker(5, store)
    worker.hand.round.samples, worker.hand.queue = [(0, 0, 2)], [(0, 4, 8)]
    worker.hand.round.header = HEADER
    return worker


def test_a_loop_gets_its_batches_on_the_device_of_its_model(run):
    """They came on the CPU: a loop that had put its model on a GPU died in its first step."""
    model = torch.nn.Linear(1, 1, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd = LocalSGD(model, optimizer, Place(run, 0, 1, "7"), Notice(), Group())
    sgd.batches_on_cpu = lambda *_: iter([{"x": torch.ones(2, 1), "name": ["a", "b"]}])
    (batch,) = sgd.batches([])
    assert (batch["x"].device.type, batch["name"]) == ("meta", ["a", "b"])
    assert model(batch["x"]).shape == (2, 1)


def find_no_master(run, courier: bool) -> None:
    """A worker's end, with a delta of version 5 delivered; steps ahead of it, if by courier."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delivered, ahead = WorkerRound(5, 0.0, steps=1, header=HEADER), WorkerRound(5, 0.0, steps=1)
    with LocalSGD(model, optimizer, Place(run, 0, 1, "7"), Notice(), Group()) as sgd:
        hand = sgd._hand
        hand.round, hand.sent = (ahead, delivered) if courier else (delivered, None)
        raise TryAgain("Redis does not answer")


@pytest.mark.parametrize("courier", [False, True])
def test_who_finds_no_master_until_its_end_leaves_what_it_has_delivered(run, courier):
    (run.path / "deltas" / "000005").mkdir(parents=True)
    with pytest.raises(TryAgain):
        find_no_master(run, courier)
    assert run.offers.left(5) == [("0:1", json.dumps(asdict(HEADER)).encode())]


class Steps:
    """A LocalSGD of one rank, whose batches are given; it notes what its steps are told."""

    def __init__(self, config, batches):
        self.config, self.group, self._batches, self.told = config, Group(), batches, []

    @property
    def expected_tokens(self) -> float:
        return self.config.step_samples * self.tokens_per_sample

    def batches_on_cpu(self, dataset):
        for number, batch in enumerate(self._batches, 1):
            self.ends_step = number % self.config.train.accumulate == 0
            yield batch

    def step(self, loss, tokens):
        self.told.append((float(loss), tokens))


class Padded(Masked):
    tokens = None  # its samples are counted, also those that its loss leaves out


@pytest.mark.parametrize("kind", [Masked, Padded])
def test_a_batch_of_padding_alone_has_no_part_in_the_loss_that_is_told(make_config, kind):
    """Its tokens had: a step of it alone had a loss of 0, which the canary took for good."""
    task = kind({"pace": ""})
    dataset, model = task.dataset(), task.model()
    whole = next(i for i in range(9) if task.counted(dataset[i][1]))
    padding, other = (default_collate([dataset[i]] * 2) for i in (0, whole))
    config = make_config("train.batch_size=2", "train.accumulate=2", "train.optimizer=adamw")
    still = SimpleNamespace(step=lambda: None, zero_grad=lambda set_to_none: model.zero_grad())
    sgd = Steps(config, [padding, padding, padding, other, other, other])
    train(task, model, still, sgd, torch.device("cpu"))
    (empty, _), (half, _), (full, tokens) = sgd.told
    assert (math.isnan(empty), tokens) == (True, 4)
    assert half == full == task.loss(model, other).item() > 0


def test_a_delta_is_offered_again_to_a_server_that_does_not_know_it(make_store):
    """Redis may die after the bytes and before the header, or be emptied at any time."""
    store = make_store("new-server")
    store.lease(0, 1, {"job_id": "7"}, 60.0)
    worker = worker_that_has_delivered(store)
    for _ in range(2):
        assert worker.deliver.keep_offered(worker.hand.round)
        assert store.offered(0, 1, 5)
        store.drop_offers(5, ["0:1"])


def test_what_a_worker_waits_for_is_no_part_of_what_a_delivery_takes(monkeypatch):
    """Two seconds to encode, four for a disk that is full, and ninety for a master: it would have
    been too slow for its notice ever after, and have ended its next round far too early."""
    clock, refusals = SimpleNamespace(now=0.0), [OSError(errno.ENOSPC, "full")] * 2

    def passes(seconds: float) -> None:
        clock.now += seconds

    def put(_self, _key: tuple, _index: int, data: memoryview) -> Fragment:
        if refusals:
            raise refusals.pop()
        return Fragment(len(data), "")

    def send(_delta_of: object, put: Put) -> tuple[list[Fragment], float]:
        passes(2.0)
        return [put(0, memoryview(b"a"))], 1.0

    for module in (deliver, durable, line):
        told = SimpleNamespace(monotonic=lambda: clock.now, sleep=passes)
        monkeypatch.setattr(module, "time", told)
    monkeypatch.setattr(Transport, "put", put)
    worker = Worker(5)
    worker.hand.commit, worker.hand.step_s = commit_of(5), 0.5
    worker.hand.config.local_sgd = SimpleNamespace(max_staleness=1, inner_steps=9, cold_start=0)
    worker.hears_of(5)
    worker.line.notice = Notice()
    worker.hand.tell_new_master = lambda: None
    worker.line.offer = lambda _header: passes(90.0)
    worker.exchange.send, worker.exchange.codec = send, SimpleNamespace(name="none")
    worker.exchange.replica = SimpleNamespace(delta=None, layout=SimpleNamespace(hash="l"))
    worker.deliver.deliver(WorkerRound(5, 0.0, steps=1, lr_sum=0.1))
    assert clock.now == 2 + 2 * durable.STUCK_S + 90
    assert (worker.hand.deliver_s, worker.line._said["needs_s"]) == (2.0, 0.5 + 2.0 + 1.0)


def test_who_was_slow_to_deliver_once_passes_one_round_and_not_all():
    """A delivery of 45 s, as of a disk that was busy, in rounds of 40 s: such a worker would have
    to stop before its first step, and never find out that it is fast again."""
    worker = Worker(5)
    worker.hand.config.local_sgd = SimpleNamespace(max_staleness=1)
    worker.line.offer = lambda _header: None
    worker.exchange.codec = SimpleNamespace(name="none")
    worker.exchange.replica = SimpleNamespace(delta=None, layout=SimpleNamespace(hash="l"))
    worker.hand.deliver_s = 45.0
    worker.line.news = line.News(5, state="running", due=time.monotonic() + 40)
    assert worker.hand.is_over()
    worker.deliver.deliver(worker.hand.round)
    assert not worker.hand.is_over()


@pytest.mark.parametrize(("version", "is_offered"), [(6, True), (7, False)])
def test_a_delta_that_comes_too_late_for_any_master_is_told_of(version, is_offered):
    """A worker that was suspended offered it on a version where no master looks any more."""
    worker, offers, events = Worker(5), [], []
    worker.hand.config.local_sgd = SimpleNamespace(max_staleness=1)
    worker.line.offer = offers.append
    worker.line.event = lambda kind, **said: events.append((kind, said["reason"]))
    worker.exchange.codec = SimpleNamespace(name="none")
    worker.exchange.replica = SimpleNamespace(delta=None, layout=SimpleNamespace(hash="l"))
    worker.hears_of(version)
    worker.deliver.deliver(worker.hand.round)
    assert len(offers) == is_offered
    assert events == ([] if is_offered else [("reject", "2 behind: no master looks back so far")])


def test_samples_of_a_delta_that_is_delivered_are_still_held_for_a_new_master():
    assert worker_that_has_delivered().hand.held() == [(0, 4, 8), (0, 0, 2)]


def test_a_new_master_is_told_while_a_delta_is_being_written():
    told, worker = [], worker_that_has_delivered()
    worker.line.declare = lambda held: told.append(held) or 3
    worker.line.written = lambda write: None
    worker.line.news = line.News(5, state="running", epoch=3)
    for _ in range(2):
        worker.deliver.put(5, 0, memoryview(b""))
    assert told == [[(0, 4, 8), (0, 0, 2)]]


@pytest.mark.parametrize("newest", [9, 2])
def test_who_is_told_of_a_version_that_is_pruned_adopts_the_newest_there_is(newest):
    """A master may be behind for a while: no reason to ask it again and again."""
    looked = iter([2000 - 1, 2000, newest + 2000])
    worker = Worker(-1, told=lambda: next(looked))

    def adopt(commit: Commit, _fetched: object) -> None:
        if commit.version < newest + 2000:
            raise ElasticError("pruned")

    worker.exchange.adopt = adopt
    worker.hears_of(2)
    assert worker.adopt.newest() == ""
    assert worker.hand.round.base == newest + 2000


def test_the_last_version_is_the_masters_where_its_note_could_not_be_written():
    worker, loaded = Worker(1, told=lambda: 1), []
    worker.exchange.adopt = lambda commit, _fetched: loaded.append(commit.version)
    worker.hears_of(2)
    worker.adopt.final()
    assert loaded == [2]


def test_who_is_told_of_a_version_that_is_damaged_ends():
    worker = Worker(-1, told=lambda: 2)

    def adopt(_commit: dict, _fetched: object) -> None:
        raise ElasticError("damaged")

    worker.exchange.adopt = adopt
    worker.hears_of(2)
    with pytest.raises(ElasticError, match="damaged"):
        worker.adopt.newest()


@pytest.mark.parametrize(
    ("workers", "samples", "now"), [(4, 10, 1080), (0, 10, 1020), (4, 10**6, 1000 + 4 * 2 * 40)]
)
def test_the_schedule_counts_on_all_workers_for_at_most_a_round(workers, samples, now):
    """0: the master knows of none yet."""
    settings = SimpleNamespace(inner_steps=5, cold_start=0)
    hand = InHand(None, SimpleNamespace(local_sgd=settings, step_samples=8))
    hand.commit = commit_of(3, tokens=1000, workers=workers, total_tokens=10_000)
    hand.round = WorkerRound(3, 0.0, tokens=2 * samples, sample_count=samples)
    assert hand.progress == now / 10_000


class Keeping:
    """The inner state of a worker of slot 0 that has done three steps."""

    def __init__(self, run):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        inner = InnerOptimizer(optimizer, sets_rates=True)
        model(torch.ones(2)).backward()
        optimizer.step()
        optimizer.param_groups[0]["step"] = 3
        one = Line(Place(run, 0, run.slots.claim(0, {}), "7"), False)
        self.hand = InHand(one, run.config())
        self.hand.round, self.hand.steps_total = WorkerRound(5, 0.0, steps=3), 3
        self.moments = Moments(self.hand, SimpleNamespace(group=Group()), inner)


def test_inner_state_is_saved_once_for_the_same_steps(run):
    """A notice while a worker waits comes after the round's own save, and its time is short."""
    worker, file = Keeping(run), run.slots.path(0) / "inner.json"
    worker.moments.save()
    assert json.loads(file.read_bytes())["version"] == 5
    pointer, _ = inner_state.choose(run, 0, 5, 0)
    other = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters())
    assert inner_state.load(run, pointer, [other], 0) == ""
    assert (other.param_groups[0]["step"], len(other.state)) == (3, 2)
    file.unlink()
    worker.moments.save()
    assert not file.exists()
    worker.moments.forget()
    worker.moments.save()
    assert json.loads(file.read_bytes())["version"] == 5
    worker.hand.round, worker.hand.steps_total = WorkerRound(6, 0.0, steps=1), 4
    worker.moments.save()
    assert json.loads(file.read_bytes())["version"] == 6


def test_inner_state_that_cannot_be_saved_ends_no_worker(run, monkeypatch):
    worker = Keeping(run)

    def fail(_folder: Path) -> None:
        raise OSError(errno.EIO, "silent")

    with monkeypatch.context() as silent:
        silent.setattr(durable, "AGAIN_S", ())
        silent.setattr(os, "listdir", fail)
        worker.moments.save()
    assert not (run.slots.path(0) / "inner.json").exists()
    worker.moments.save()
    assert (run.slots.path(0) / "inner.json").exists()


def test_who_asks_for_samples_where_no_master_is_does_not_train(run):
    """The master died before it had granted any: the worker kept its GPUs, as one at work."""
    own, told = Line(Place(run, 0, 1, "7"), Notice()), []
    own.tell_agent = lambda said: told.append(said["state"])
    own.say(state="training")
    own.news = line.News(3, state="stopping")  # else it asks again
    assert own.ask(8, [], lambda: len(told) > 1) is None
    assert told == ["training", "waiting"]


def test_who_waits_for_samples_where_no_master_is_leaves_with_its_steps(run):
    """It went on to ask until the notice had run out, and had no time left to deliver them."""
    notice = Notice()
    own = Line(Place(run, 0, 1, "7"), notice)
    own.tell_agent = lambda said: said["state"] == "waiting" and notice.arrived(signal.SIGTERM)
    own.say(state="training")
    assert own.ask(8, [], lambda: bool(notice)) is None
    assert own.declare([(0, 0, 8)]) is None  # and that a new master said a word before it died
    assert not notice.has_run_out()


def test_who_hangs_up_does_not_close_a_line_that_another_thread_uses():
    closed, store = [], SimpleNamespace(close=lambda: closed.append(True))
    own = Line(Place(None, 0, 1, "7"), False)
    own._stores[WorkerStore] = store
    own.close()
    assert not own._stores
    assert not closed


@pytest.mark.parametrize(
    ("codes", "left", "said"),
    [((-15, None), {9}, None), ((143, None), {9}, None), ((143, 0), set(), -15),
     ((-15, 1), {9}, 1), ((255, None), {9}, 255), ((0, 0), {9}, 0), ((0, None), {9}, None)],
)
def test_a_launcher_that_dies_of_the_notice_has_not_crashed(monkeypatch, codes, left, said):
    """As it is (-15), or as a shell tells of its child's death (143)."""
    monkeypatch.setattr(agent.proc, "send", lambda *_: None)
    processes = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    assert Training(processes, -1, family=lambda *_: left).exit_code() == said


def test_a_job_that_took_steps_and_died_at_starts_has_taken_steps(run):
    """Else three such jobs, days apart, ended the run as a crash loop."""
    one = Agent(run, 0, Notice())
    for steps in (500, 0, 0):
        training = Training([], -1)
        training.report["steps_total"] = steps
        end = one._after_crash(End(Outcome.CRASHED, "it died"), training)
    assert one.end(end, training) == Exit.ERROR
    record = run.jobs.ending(one.program.job_id)
    assert (record["outcome"], record["steps"]) == ("failed", 500)


def test_an_agent_sleeps_though_a_training_process_has_closed_its_error_output():
    """`exec python … > log 2>&1`: its agent took half a core for as long as it lived."""
    reader, writer = os.pipe()
    command = ["bash", "-c", "echo hello >&2; exec sleep 600 2> /dev/null"]
    how = {"stderr": subprocess.PIPE, "preexec_fn": die_with_parent}
    with subprocess.Popen(command, **how) as process:
        training = Training([process], reader)
        try:
            wait_until(lambda: training.read() or training.sources() == [reader], 5.0, "its end")
            assert training.last_words() == "hello\n"
            assert select.select(training.sources(), [], [], 0.1)[0] == []
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_the_time_of_a_suspension_is_not_counted_as_that_of_a_hang(run, monkeypatch):
    """Of a job that is suspended for hours the agent may wake first: it killed its own trainer."""
    clock = SimpleNamespace(now=1000.0)

    def suspended(_read, _write, _errors, timeout_s: float) -> None:
        clock.now += timeout_s + 7200.0

    told = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(agent, "time", told)
    monkeypatch.setattr(agent, "select", SimpleNamespace(select=suspended))
    reader, writer = os.pipe()
    training, one = Training([], reader, moved=990.0, heard=995.0), Agent(run, 0, Notice())
    training.report["state"], one.lease.served, one._next_beat = "training", 998.0, 1000.5
    one._wait_for_something(training)
    assert clock.now == 8200.5
    assert (training.still_s(), clock.now - one.lease.served) == (10.5, 2.5)
    os.close(writer)
    os.close(reader)


def learner(run) -> LocalSGD:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LocalSGD(model, optimizer, Place(run, 0, 1, "7"), Notice(), Group())


def test_a_step_without_a_batch_says_where_batches_come_from(run):
    with pytest.raises(ElasticError, match="without a batch") as caught:
        learner(run).step(1.0)
    assert "sgd.batches(dataset)" in caught.value.hint


def test_a_loop_that_breaks_off_has_crashed_and_its_agent_says_so(run):
    reader, writer = os.pipe()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = Place(run, 0, 1, "7", progress_fd=writer)
    with LocalSGD(model, optimizer, place, Notice(), Group()):
        pass
    training = Training([], reader, files=(writer,))
    training.read()
    assert training.report["end"] == ""
    end = Agent(run, 0, Notice())._judge(training, 0)
    assert end == End(Outcome.CRASHED, "the training process left before the run was over")
    training.end()


def test_batches_that_were_left_before_the_end_are_not_begun_again(run):
    one = learner(run)
    one._hand.commit = commit_of(1)
    with pytest.raises(ElasticError, match=r"batches\(\) was left before the run was over"):
        next(one.batches([1]))


@pytest.mark.parametrize("calls", [0, 2])
def test_a_step_that_is_not_called_once_is_told_how_often_it_was(run, calls):
    one = learner(run)
    batches = one._batches_of_step(SimpleNamespace(next=lambda: None))
    next(batches)
    one._hand.round.steps += calls
    with pytest.raises(ElasticError, match=rf"called {calls} times up to batch 1 of 1"):
        next(batches)
