"""Rounds: each rule of judge and decide with its reason; weights against numbers by hand.

    pytest tests/local/test_rounds.py

`decide` is asked with a stepped clock; nothing here sleeps or reads one.
"""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from elastic.local import rounds
from elastic.local.master.open_round import Checked, OpenRound
from elastic.local.rounds import (
    MEMORY_ROUNDS,
    Facts,
    Move,
    Refusal,
    Rule,
    Running,
    View,
)
from elastic.run import membership
from elastic.run.ledger import Ledger
from elastic.run.records import Delta, Fragment, Header
from helpers import commit_of, delta_of

HEADER = Header(
    run="a", slot=1, attempt=2, job_id="17", base=7, layout="abc", codec="none", steps=20,
    tokens=640, samples=((0, 0, 32),), loss=2.5, first_loss=2.6,
    fragments=(Fragment(400, "00ff"), Fragment(80, "11ee")),
)
DATA = json.loads(json.dumps(asdict(HEADER)))
FACTS = Facts(
    run="a", version=7, layout="abc", codec="none", fragment_bytes=(400, 80), max_staleness=2,
    attempts={1: 2},
)


def header(slot=1, **changes):
    return replace(HEADER, slot=slot, **changes)


# ---- judge --------------------------------------------------------------------------------------


def test_a_whole_delta_on_this_version_is_accepted():
    assert rounds.judge(HEADER, FACTS, (), "") is None
    assert not HEADER.is_pass


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_delta_that_is_late_by_up_to_max_staleness_is_accepted(late):
    assert rounds.judge(HEADER, replace(FACTS, version=7 + late), (), "") is None


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_an_earlier_attempt_delivered_before_it_left_counts(attempt):
    """The store refuses offers of a fenced attempt; what it took before that is good work."""
    assert rounds.judge(header(attempt=attempt), FACTS, (), "") is None


REJECTIONS = [
    (header(run="b"), FACTS, "", "other-run: it is a delta of run 'b'"),
    (header(base=4), FACTS, "", "stale: based on version 4, 3 behind"),
    (header(base=6), replace(FACTS, max_staleness=0), "", "stale: based on version 6, 1 behind"),
    (header(attempt=3), FACTS, "", "fenced: attempt 3 never claimed slot 1"),
    (header(slot=9), FACTS, "", "fenced: attempt 2 never claimed slot 9"),
    (header(layout="xyz"), FACTS, "", "shape: layout xyz, not abc"),
    (header(codec="bf16"), FACTS, "", "shape: codec bf16, not none"),
    (HEADER, replace(FACTS, fragment_bytes=(400, 84)), "", "shape: the fragments' sizes"),
    (header(fragments=HEADER.fragments[:1]), FACTS, "", "shape: the fragments' sizes"),
    (header(loss=math.nan), FACTS, "", "non-finite: the loss is nan"),
    (header(loss=-math.inf), FACTS, "", "non-finite: the loss is -inf"),
    (HEADER, FACTS, "samples already committed", "samples: samples already committed"),
]


@pytest.mark.parametrize(
    ("bad", "facts", "refused", "reason"), REJECTIONS, ids=[case[3] for case in REJECTIONS]
)
def test_a_delta_is_rejected_with_its_reason(bad, facts, refused, reason):
    why = rounds.judge(bad, facts, (), refused)
    assert why.reason.startswith(reason)
    assert why.rule == reason.partition(":")[0]


def test_a_delta_that_was_judged_before_is_rejected():
    why = rounds.judge(HEADER, FACTS, {(1, 2, 7)}, "")
    assert why.rule is Rule.DUPLICATE
    assert why.reason.startswith("duplicate: slot 1")


BOUND = replace(FACTS, most_steps=20, most_samples=32)
TOO_MUCH = [
    ({"samples": ()}, "samples: 0 are not those of a round"),
    ({"samples": ((0, 0, 33),)}, "samples: 33 are not those of a round"),
    ({"steps": 21}, "shape: 21 steps"), ({"steps": 2**61}, "shape: 2305843009213693952 steps"),
]


@pytest.mark.parametrize(("changes", "reason"), TOO_MUCH)
def test_a_delta_has_samples_and_steps_and_no_more_than_a_round_has(changes, reason):
    assert rounds.judge(HEADER, BOUND, (), "") is None
    why = rounds.judge(header(**changes), BOUND, (), "")
    assert why.reason.startswith(reason)
    assert why.rule == reason.partition(":")[0]


def test_tokens_count_as_far_as_the_samples_can_hold_them():
    assert rounds.credited(HEADER, 20.0) == HEADER
    assert rounds.credited(header(tokens=2**61), 20.0).tokens == 32 * 20 * rounds.MORE_TOKENS
    assert rounds.credited(header(tokens=2**61), 0.0).tokens == 32 * rounds.MOST_TOKENS
    assert rounds.credited(header(tokens=2**61, samples=()), 20.0).tokens == 0


@pytest.mark.parametrize("name", ["run", "job_id", "layout", "codec"])
@pytest.mark.parametrize("value", ["x" * 201, "a\x1b[2J", "a\nb", "\u202e"])
def test_words_of_a_header_are_short_and_printable(name, value):
    with pytest.raises(ValueError, match=name):
        Header.from_json({**DATA, name: value})
    assert len(Header.from_json({**DATA, "inner": value + "y" * 300}).inner) <= 200


@pytest.mark.parametrize("nothing", [{"tokens": 0}, {"steps": 0}, {"steps": 0, "fragments": ()}])
def test_a_worker_without_steps_has_answered_and_gives_nothing(nothing):
    assert rounds.judge(header(**nothing), FACTS, (), "") is None
    assert header(**nothing).is_pass


def test_a_worker_without_steps_is_still_judged_by_where_it_stands():
    assert rounds.judge(header(tokens=0, run="b"), FACTS, (), "").rule is Rule.OTHER_RUN
    assert rounds.judge(header(tokens=0, base=1), FACTS, (), "").rule is Rule.STALE


# ---- an open round ------------------------------------------------------------------------------

LOCAL_SGD = SimpleNamespace(
    inner_steps=20, cold_start=0, outer_lr=0.7, outer_momentum=0.9, thin_rounds=True,
    clip_norm=2.0, canary=0.3, min_deadline_s=5.0, deadline_k=4.0, quorum=0.5, last_call_s=5.0,
)
COMMIT = commit_of(7, total_tokens=20_000, workers=2)
OF_A_DELTA = {
    "slot", "attempt", "job_id", "base", "codec", "steps", "tokens", "loss", "inner", "first_loss",
    "samples", "norm", "lr_sum", "seconds", "stall_s", "trained_s", "delivered",
}


def opened(**commit) -> OpenRound:
    facts = replace(FACTS, attempts={1: 2, 4: 2})
    return OpenRound(replace(COMMIT, **commit), 100.0, True, Ledger(1000, 1), facts, LOCAL_SGD, {})


def offered(round_: OpenRound, **changes) -> Refusal | None:
    one = header(**changes)
    body = json.dumps(asdict(one)).encode()
    why, told = round_.read(one.base, f"{one.slot}:{one.attempt}", body)
    if not (why or told.is_pass):
        round_.accept(Checked(one, 1.5), 110.0)
    return why


def test_a_round_goes_from_its_offers_to_its_commit_and_the_round_after():
    round_ = opened()
    assert offered(round_) is None
    assert offered(round_).rule is Rule.DUPLICATE
    assert offered(round_, slot=4).rule is Rule.SAMPLES
    commit, [(_, factor)], reverts = round_.close(True, 3, 120.0)
    assert (reverts, commit.version, factor) == ("", 8, 1.0)
    (delta,) = commit.deltas
    assert commit.to_json()["deltas"][0].keys() == OF_A_DELTA
    assert (delta.slot, delta.norm, delta.delivered) == (1, 1.5, 110.0)
    told = {"master_epoch": 3, "time": 120.0, "tokens": 640, "loss": 2.5, "workers": 1,
            "version": 8, "total_tokens": 640 / 32 * 1000}
    assert commit.to_json().items() >= told.items()
    later = round_.after(commit, 125.0)
    assert list(later.ledger.committed) == [(0, 0, 32)]
    assert (later.version, later.opened, later.accepted) == (8, 125.0, {})


def test_a_loss_that_no_loop_has_told_is_none():
    """`sgd.step()` says 0; it was shown as a loss that is there."""
    round_ = opened()
    offered(round_, loss=0.0, first_loss=0.0)
    offered(round_, slot=4, samples=((0, 32, 64),), loss=0.0, first_loss=0.0)
    assert round_.close(True, 3, 120.0)[0].loss is None
    offered(round_, base=6, samples=((0, 64, 96),), loss=2.5)
    assert round_.close(True, 3, 120.0)[0].loss == 2.5


def test_two_deltas_of_an_attempt_both_count_though_one_is_late():
    """Who joins as a round closes delivers to the next one, and then again: on other samples, from
    another base. As two workers would have done."""
    round_ = opened()
    assert offered(round_, base=6, samples=((0, 32, 64),)) is None
    assert offered(round_) is None
    commit, parts, _ = round_.close(True, 3, 120.0)
    assert [(delta.slot, delta.base) for delta in commit.deltas] == [(1, 6), (1, 7)]
    assert [factor for _, factor in parts] == pytest.approx([0.8 / 1.8, 1 / 1.8])
    assert (commit.tokens, commit.workers) == (1280, 1)
    assert list(round_.after(commit, 125.0).ledger.committed) == [(0, 0, 64)]


def test_a_round_does_not_wait_for_who_takes_longer_than_it_for_a_step():
    """The last call went out for its delta in every round, for ever: a tax for nearly nothing."""
    round_ = opened()
    offered(round_)
    present = {number: slot(slot=number) for number in (1, 4)}
    round_.paces_s |= {1: 0.2, 4: 0.2}
    assert round_.decide(present, {1, 4}, 0, 1000.0, 101.0)[0] is Move.WAIT
    round_.paces_s[4] = 1e6
    assert round_.decide(present, {1, 4}, 0, 1000.0, 101.0)[0] is Move.CLOSE


def test_a_round_that_finds_its_version_bad_reverts_it_and_frees_its_samples():
    running = asdict(Running(loss=2.0, unrest=0.0001, rounds=50))
    made_of = tuple(delta_of(s, attempt=2, norm=n) for s, n in ((1, 1.0), (4, 5.0)))
    round_ = opened(running=running, deltas=made_of)
    offered(round_, loss=9.0, samples=((0, 0, 128),))
    assert round_.close(False, 3, 120.0)[2] == "", "the version before is not there"
    commit, parts, reverts = round_.close(True, 3, 120.0)
    assert reverts.startswith("the loss rose from 2.000 to 9.000")
    assert (commit.version, commit.taken_back, parts) == (8, 7, [])
    told = {"taken_back": 7, "deltas": [], "samples": (), "workers": 2}
    assert commit.to_json().items() >= told.items()
    later = round_.after(commit, 125.0)
    assert list(later.ledger.free) == [(0, 0, 1000)]
    late = offered(later, samples=((0, 0, 128),))
    assert late.rule is Rule.TAKEN_BACK


# ---- headers from outside -----------------------------------------------------------------------


def test_a_header_survives_the_journey():
    assert Header.from_json(DATA) == HEADER


def test_what_an_older_worker_does_not_say_has_a_default():
    data = dict(DATA)
    for name in ("inner", "seconds", "stall_s"):
        del data[name]
    assert Header.from_json(data) == HEADER


def test_what_a_newer_worker_tells_more_is_passed_over():
    """An installation may be renewed while a master of before it runs on."""
    assert Header.from_json({**DATA, "surprise": 1}) == HEADER


MALFORMED = [
    ("slot", -1), ("slot", True), ("slot", 1.0), ("slot", "1"), ("slot", None), ("slot", 2**62),
    ("tokens", -1), ("base", [7]), ("run", 5), ("loss", "2"), ("loss", None), ("loss", True),
    ("loss", 10**400), ("seconds", -1.0), ("seconds", math.nan), ("seconds", math.inf),
    ("stall_s", -0.5), ("samples", {}), ("samples", [[0, 1]]), ("samples", [[0, 1, "2"]]),
    ("samples", [[0, -1, 2]]), ("samples", [[0, 1.0, 2]]), ("samples", [5]), ("fragments", 3),
    ("fragments", 3), ("fragments", [{"bytes": 4}]), ("fragments", [{"bytes": 4, "xxh3": 5}]),
    ("fragments", [{"bytes": True, "xxh3": ""}]),
]


@pytest.mark.parametrize(("name", "value"), MALFORMED)
def test_a_malformed_field_is_named(name, value):
    with pytest.raises(ValueError, match=r"\S"):
        Header.from_json({**DATA, name: value})


@pytest.mark.parametrize("name", ["run", "slot", "samples", "loss"])
def test_a_missing_field_is_named(name):
    data = dict(DATA)
    del data[name]
    with pytest.raises(ValueError, match=name):
        Header.from_json(data)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from([*DATA, "surprise"]), anything, max_size=3)


@given(anything | changes.map(lambda change: {**DATA, **change}))
@example({**DATA, "loss": 10**400})
def test_whatever_comes_is_refused_or_can_be_judged(data):
    text = json.dumps(data)
    try:
        parsed = Header.from_json(json.loads(text))
    except ValueError:
        return
    why = rounds.judge(parsed, FACTS, (), "")
    assert why is None or why.reason.startswith(f"{why.rule}: ")
    if not math.isnan(parsed.loss) and not math.isnan(parsed.first_loss):
        assert Header.from_json(json.loads(json.dumps(asdict(parsed)))) == parsed


# ---- decide -------------------------------------------------------------------------------------

PATIENCE = SimpleNamespace(quorum=0.5, deadline_k=4.0, min_deadline_s=5.0, last_call_s=10.0)


def view(expected=(0, 1, 2, 3), answered=(), accepted=None, **changes):
    """A round opened at 100; expected workers joined at 50 unless `joined` says otherwise."""
    joined = changes.pop("joined", {})
    return View(
        opened=100.0, called=changes.pop("called", None),
        expected={slot: joined.get(slot, 50.0) for slot in expected},
        answered=frozenset(answered),
        accepted=len(answered) if accepted is None else accepted,
        preparing=changes.pop("preparing", 0), due_s=changes.pop("due_s", math.inf),
    )


def decide(seen, now, patience=PATIENCE):
    return rounds.decide(seen, patience, now)


def test_with_no_worker_the_round_stays_open_for_ever():
    assert decide(view(expected=()), 1e9) == (Move.WAIT, "no worker")


def test_with_no_delta_the_round_stays_open_for_ever():
    assert decide(view(), 1e9) == (Move.WAIT, "no delta yet")
    assert decide(view(answered=(0, 1, 2, 3), accepted=0), 1e9) == (Move.WAIT, "no delta yet")


def test_one_worker_is_enough():
    move, reason = decide(view(expected=(2,), answered=(2,)), 100.1)
    assert (move, reason) == (Move.CLOSE, "all 1 live workers have answered")


def test_the_round_closes_when_all_have_delivered():
    assert decide(view(answered=(0, 1, 2, 3)), 101)[0] is Move.CLOSE


def test_a_worker_that_delivered_and_left_is_enough():
    """A preempted worker's steps count, even if it was the last."""
    assert decide(view(expected=(), accepted=1), 101)[0] is Move.CLOSE


def test_a_delta_whose_bytes_are_being_read_is_waited_for():
    move, reason = decide(view(answered=(0, 1, 2, 3), preparing=1, called=100.0), 1e9)
    assert (move, reason) == (Move.WAIT, "checking the bytes of a delta")


def test_below_the_quorum_there_is_no_deadline():
    seen = view(answered=(0,), due_s=10.0)
    move, reason = decide(seen, 1e9)
    assert (move, reason) == (Move.WAIT, "waiting for slots 1, 2, 3")


@pytest.mark.parametrize(
    ("quorum", "workers", "enough"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.0, 4, 1), (1.0, 4, 4), (0.25, 4, 1), (0.26, 4, 2)],
)
def test_the_quorum_is_a_part_of_the_live_workers_rounded_up(quorum, workers, enough):
    patience = SimpleNamespace(**{**vars(PATIENCE), "quorum": quorum})
    for answered in range(1, workers):
        seen = view(range(workers), range(answered), due_s=10.0)
        assert (decide(seen, 1e9, patience)[0] is Move.CALL) == (answered >= enough)


def test_a_slow_worker_gets_a_last_call_and_then_the_round_closes_without_it():
    """A story with a stepped clock: three have come by 21 s, the fourth does not."""
    seen = view(answered=(0, 1, 2), due_s=21.0)
    deadline = 100.0 + 21.0 + 4 * 21 / 20
    move, reason = decide(seen, deadline - 0.01)
    assert (move, reason) == (Move.WAIT, "waiting for slots 3, at most 25.2 s")
    move, reason = decide(seen, deadline)
    assert (move, reason) == (Move.CALL, "slots 3 took longer than 25.2 s")
    called = replace(seen, called=126.0)
    assert decide(called, 135.9) == (Move.WAIT, "last call: waiting for slots 3")
    move, reason = decide(called, 136.0)
    assert (move, reason) == (Move.CLOSE, "last call is over, without slots 3")
    answered = replace(called, answered=frozenset({0, 1, 2, 3}), accepted=4)
    assert decide(answered, 126.5)[0] is Move.CLOSE


def test_a_lost_worker_is_not_waited_for():
    assert decide(view(expected=(0, 1, 2), answered=(0, 1, 2)), 101)[0] is Move.CLOSE


def test_who_joined_in_mid_round_does_not_hold_up_the_others():
    seen = view(answered=(0, 1, 2), joined={3: 110.0}, due_s=20.0)
    move, reason = decide(seen, 120.0)
    assert move is Move.CALL
    assert reason == "only workers that joined late are missing: slots 3"
    assert decide(replace(seen, called=120.0), 129.9)[0] is Move.WAIT
    assert decide(replace(seen, called=120.0), 130.0)[0] is Move.CLOSE


def test_who_joined_before_the_round_opened_is_waited_for():
    seen = view(answered=(0, 1, 2), joined={3: 100.0})
    assert decide(seen, 120.0)[0] is Move.WAIT


def test_a_joiner_beside_a_slow_worker_changes_nothing():
    seen = view(answered=(0, 1), joined={3: 110.0}, due_s=20.0)
    assert decide(seen, 111.0)[0] is Move.WAIT
    assert decide(seen, 124.0)[0] is Move.CALL


def test_a_reason_stays_short_when_many_are_missing():
    _, reason = decide(view(range(1000), (0,)), 101.0)
    assert reason == "waiting for slots 1, 2, 3, 4, 5, 6, 7, 8 and 991 more"


def test_the_deadline_follows_the_due_time_and_before_there_is_one_there_is_none():
    assert rounds.deadline_s(20.0, PATIENCE) == 20 + 4 * 1.0
    exact = SimpleNamespace(**{**vars(PATIENCE), "deadline_k": 0.0})
    assert rounds.deadline_s(20.0, exact) == 20.0
    assert decide(view(answered=(0, 1, 2)), 1e9) == (Move.WAIT, "waiting for slots 3")


# ---- pace ---------------------------------------------------------------------------------------


def trained(steps, seconds, stall_s=0.0):
    return replace(header(), steps=steps, seconds=seconds, stall_s=stall_s)


def test_every_delta_tells_the_pace_of_its_worker():
    """10 s pass before it begins: they come once, however many steps there are."""
    whole, part = trained(100, 50.0, stall_s=12.0), trained(10, 5.0, stall_s=12.0)
    assert rounds.pace_s(whole, 60.0, 100) == pytest.approx(0.6)
    assert rounds.pace_s(part, 15.0, 100) == pytest.approx(0.6)


def test_who_joined_in_mid_round_is_not_taken_for_slow():
    assert rounds.pace_s(trained(10, 5.0), 45.0, 100) == 0.5


def test_steps_ahead_of_the_round_were_no_part_of_its_time():
    """It came 40 s after the opening; it had begun 10 s before."""
    assert rounds.pace_s(trained(100, 50.0, stall_s=0.1), 40.0, 100) == pytest.approx(0.4)


def test_a_round_is_due_when_the_fastest_quarter_is_through():
    assert rounds.due_s([], 10, PATIENCE) == math.inf
    assert rounds.due_s([0.9], 10, PATIENCE) == 9.0
    assert rounds.due_s([4.0, 1.0, 1.1, 1.2], 10, PATIENCE) == 10.0
    assert rounds.due_s([4.0, 1.0, 1.1, 1.2, 5.0], 10, PATIENCE) == 11.0
    assert rounds.due_s([0.01], 10, PATIENCE) == 5.0  # for rounds so short nobody hurries


def test_of_many_workers_one_odd_one_does_not_set_the_pace():
    assert rounds.due_s([0.1, *[2.0] * 15], 10, PATIENCE) == 20.0
    assert rounds.due_s([20.0, *[2.0] * 15], 10, PATIENCE) == 20.0


def test_a_worker_stops_at_the_step_nearest_to_the_due_time():
    assert not rounds.is_due(0.6, 10, 10.0)
    assert rounds.is_due(0.4, 10, 10.0)
    assert not rounds.is_due(math.inf, 10, 10.0)
    assert not rounds.is_due(0.1, 0, 0.0)  # its own pace is not known yet: it tries one step
    assert rounds.is_due(-0.1, 0, 0.0)


@given(
    paces=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=16),
    inner_steps=st.integers(2, 100),
)
def test_workers_of_any_pace_end_a_round_within_half_a_step_of_each_other(paces, inner_steps):
    """Played to the end: round by round, until the pace has settled."""
    known = paces  # in the first round, which has no due time, all do all steps
    patience = SimpleNamespace(min_deadline_s=0.0)
    for _ in range(3):
        due = rounds.due_s(known, inner_steps, patience)
        turns = []
        for pace in paces:
            steps = 0
            while steps < inner_steps:
                if rounds.is_due(due - steps * pace, steps, steps * pace):
                    break
                steps += 1
            turns.append((steps, steps * pace))
        for (steps, took), pace in zip(turns, paces, strict=True):
            assert steps in (1, inner_steps) or abs(took - due) <= pace / 2 + 1e-9
        known = [rounds.pace_s(trained(n, took), took, inner_steps) for n, took in turns if n]
    # It does not run away: however often, it is the pace of one of the workers.
    assert min(abs(due - pace * inner_steps) for pace in paces) < 1e-6


@given(
    known_s=st.floats(0.001, 10.0), pace_s=st.floats(0.01, 1.0), once_s=st.floats(0.0, 5.0),
    inner_steps=st.integers(1, 200),
)
def test_a_round_that_is_due_too_early_or_too_late_does_not_stay_so(
    known_s, pace_s, once_s, inner_steps
):
    """Else rounds stay short for ever after workers have become much slower. `once_s` is what a
    delivery takes; the worker keeps it free."""
    patience = SimpleNamespace(min_deadline_s=0.0)
    for _ in range(4):
        due = rounds.due_s([known_s], inner_steps, patience) - once_s
        steps = 0
        while steps < inner_steps and not rounds.is_due(
            due - steps * pace_s, steps, steps * pace_s
        ):
            steps += 1
        took_s = max(1, steps) * pace_s + once_s
        known_s = rounds.pace_s(trained(max(1, steps), took_s), took_s, inner_steps)
    assert steps == inner_steps
    assert known_s * inner_steps == pytest.approx(inner_steps * pace_s + once_s)


# ---- weights ------------------------------------------------------------------------------------

NEVER = Running()


def moved(norm: float, steps: int = 20, lr: float = 1e-3, tokens=0, base=7) -> Delta:
    return Delta(slot=0, attempt=1, base=base, steps=steps, tokens=tokens, samples=(), norm=norm,
                 lr_sum=steps * lr)


def shares(headers, norms, clip=2.0, running=NEVER):
    deltas = [moved(norm, each.steps, tokens=each.tokens, base=each.base)
              for norm, each in zip(norms, headers, strict=True)]
    clips = rounds.clips(deltas, clip, running.reach)
    return list(zip(rounds.weights(deltas, 7), clips, strict=True))


def test_weights_are_tokens_and_a_late_delta_weighs_less():
    headers = [header(0, tokens=100), header(1, tokens=300, base=6), header(2, tokens=30, base=5)]
    assert shares(headers, [1, 1, 1]) == [(100, 1.0), (240, 1.0), (20, 1.0)]


def test_a_delta_that_is_too_long_is_clipped():
    headers = [header(slot) for slot in range(5)]
    clips = [clip for _, clip in shares(headers, [1.0, 2.0, 3.0, 4.0, 60.0])]
    assert clips == [1.0, 1.0, 1.0, 1.0, pytest.approx(0.1)]  # 2 x 3 / 60


def test_a_thin_round_steps_less_and_a_thick_one_no_more():
    running, set_ = Running(weight=400.0), settings_of()
    assert rounds.outer_lr(0.9, 100.0, running, set_) == pytest.approx(0.35)
    assert rounds.outer_lr(0.9, 400.0, running, set_) == 0.7
    assert rounds.outer_lr(0.9, 1600.0, running, set_) == 0.7
    assert rounds.outer_lr(0.9, 100.0, running, settings_of(thin_rounds=False)) == 0.7
    assert rounds.outer_lr(0.9, 100.0, NEVER, set_) == 0.7


def test_one_delta_alone_is_applied_as_it_is_and_more_momentum_goes_with_shorter_steps():
    auto = settings_of(outer_lr="auto", outer_momentum="auto")
    for n, eta in ((1, 1.0), (2, 0.9), (4, 0.8), (8, 0.72), (100, 0.68)):
        mu = rounds.momentum(200, [1 / n] * n, auto)
        assert rounds.outer_lr(mu, 400.0, NEVER, auto) == pytest.approx(eta)
    assert rounds.momentum(200, [1.0], auto) == 0.0


def test_a_lone_worker_gets_the_full_step_back_within_its_horizon():
    running = Running(weight=800.0)
    for _ in range(3 * MEMORY_ROUNDS):
        running = running.after([moved(1.0)], 100.0, 0.0)
    assert rounds.outer_lr(0.9, 100.0, running, settings_of()) > 0.55
    assert rounds.outer_lr(0.9, 100.0, Running(weight=800.0), settings_of()) < 0.25


# ---- who is there -------------------------------------------------------------------------------

SLOT = {
    "slot": "3", "attempt": "2", "job_id": "17", "node": "n1", "pid": "99", "state": "training",
    "version": "7", "step": "12", "steps_total": "212", "tokens_per_s": "81.5", "loss": "2.5",
    "beat": "1000.5", "moved": "990.25", "joined": "500.0",
}


def slot(**changes):
    return replace(membership.Slot.from_fields(SLOT), **changes)


def test_a_slots_record_is_read_with_its_types():
    read = slot()
    assert (read.slot, read.step, read.loss, read.moved) == (3, 12, 2.5, 990.25)
    assert membership.Slot.from_fields({k: v for k, v in SLOT.items() if k != "joined"}) is None
    assert membership.Slot.from_fields({**SLOT, "step": "x"}) is None


@pytest.mark.parametrize(
    ("state", "quiet_s", "seen"),
    [
        ("training", 60.0, "training"),
        ("training", 60.1, "stalled"),
        ("delivering", 61.0, "stalled"),
        ("waiting", 1e6, "waiting"),  # for the others: that is no fault of its own
        ("loading", 1e6, "loading"),
    ],
)
def test_a_worker_that_beats_and_does_not_move_is_stalled(state, quiet_s, seen):
    assert membership.state(slot(state=state), 990.25 + quiet_s, 60.0) == seen


def test_a_round_waits_for_workers_that_will_deliver_and_for_no_others():
    slots = [slot(slot=0), slot(slot=1, state="loading"), slot(slot=2, moved=10.0),
             slot(slot=3, state="waiting"), slot(slot=4, state="delivering")]
    assert sorted(membership.expected(slots, 1000.0, 60.0)) == [0, 3, 4]


# ---- a cold start -------------------------------------------------------------------------------


def settings_of(**changes) -> SimpleNamespace:
    sgd = {"inner_steps": 200, "cold_start": 0.35, "outer_momentum": 0.9, "clip_norm": 2.0}
    return SimpleNamespace(**sgd | {"outer_lr": 0.7, "thin_rounds": True} | changes)


def at(version: int, share: float = 0.0) -> dict:
    return commit_of(version, tokens=int(share * 1e6), total_tokens=1_000_000)


def lengths(inner_steps: int, whole: int) -> list[int]:
    """Steps of each round of a run with the tokens of so many whole ones."""
    steps, total, found = settings_of(inner_steps=inner_steps), inner_steps * whole, []
    while sum(found) < total:
        now = commit_of(len(found), tokens=sum(found), total_tokens=total)
        found.append(rounds.inner_steps(now, steps))
    return found


@pytest.mark.parametrize(("inner_steps", "whole"), [(10, 80), (20, 40), (30, 27), (200, 100)])
def test_a_cold_start_begins_with_one_step_and_has_so_many_rounds_more(inner_steps, whole):
    found = lengths(inner_steps, whole)
    assert found[0] == 1
    assert found == sorted(found)
    assert len(found) == pytest.approx(1.35 * whole, rel=0.07)
    assert sum(found[: found.index(inner_steps)]) < 0.2 * inner_steps * whole


def test_the_cold_start_of_a_long_run_is_a_small_part_of_it():
    found = lengths(200, 10_000)
    assert found.index(200) == 306
    assert len(found) < 1.03 * 10_000
    assert rounds.inner_steps(at(10**9), settings_of()) == 200


def test_there_may_be_no_cold_start():
    assert rounds.inner_steps(at(0), settings_of(cold_start=0)) == 200
    assert rounds.inner_steps(at(1, 0.5), settings_of(cold_start=1e-307)) == 200
    assert lengths(1, 10) == [1] * 10
    assert rounds.inner_steps(commit_of(0), settings_of()) == 1  # nobody knows how long the run is


def test_momentum_is_less_while_rounds_are_short_because_it_is_early():
    assert rounds.momentum(10, [1.0], settings_of()) == 0.5
    assert rounds.momentum(20, [1.0], settings_of()) == 0.9
    assert rounds.momentum(5, [1.0], settings_of(inner_steps=5, outer_momentum=0.7)) == 0.7
    assert rounds.momentum(10, [1.0], settings_of(outer_momentum=0.3)) == 0.3
    assert rounds.momentum(10, [0.125] * 8, settings_of(outer_momentum="auto")) == 0.5


@given(st.integers(1, 11), st.floats(0.0, 1.0))
def test_momentum_grows_with_the_deltas_that_the_mean_is_made_of(n, small):
    """A delta of a few steps makes it no larger than a whole one does."""
    auto = settings_of(outer_momentum="auto")
    parts = [1 / (n + small)] * n + [small / (n + small)]
    assert rounds.momentum(200, [1 / n] * n, auto) == pytest.approx((n - 1) / (n + 2))
    assert rounds.momentum(200, parts, auto) <= n / (n + 3) + 1e-9
    assert rounds.momentum(200, [0.01] * 100, auto) == 0.8


# ---- versions that were taken back -------------------------------------------------------------


def test_deltas_on_a_version_that_was_taken_back_are_refused():
    facts = replace(FACTS, reverted=frozenset({5}))
    assert rounds.judge(header(1, base=5), facts, (), "").reason.startswith("taken-back: version 5")
