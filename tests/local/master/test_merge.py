"""Merging, through the master's own averager and real files: identities that must hold exactly.

    pytest tests/local/master/test_merge.py

Values that are small multiples of 1/16 make float32 exact, so that "equal" can mean bit for bit;
elsewhere the tolerance is a few units in the last place.
"""

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from elastic.local import rounds
from elastic.local.master import averaging
from elastic.local.rounds import Facts, Rule
from elastic.local.transport import Damaged, fragment_name
from elastic.saved import merge, versions
from elastic.saved.versions import VersionDraft
from helpers import ROOT, commit_of
from merging import Outer, Rounds, read_outer, step

SIZE = 30
PLAIN = ("local_sgd.outer_lr=1.0", "local_sgd.outer_momentum=0.0")
DILOCO = ("local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9")


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    torch.manual_seed(17)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # test_versions.py is about that


def sixteenths(low=-16, high=16):
    """A vector of small multiples of 1/16: bf16 holds it, and float32 sums of it are exact."""
    return torch.randint(low, high, (SIZE,)) / 16


@pytest.fixture
def open_rounds(make_run):
    """open_rounds(start, "key=value", ...) -> Rounds of a new run; each call makes another run."""
    names = (f"run-{number}" for number in itertools.count())
    opened = []

    def open_(start, *overrides):
        exact = ("local_sgd.compression=none", "local_sgd.cold_start=0", *overrides)
        opened.append(Rounds(make_run(*exact, name=next(names)), start))
        return opened[-1]

    yield open_
    for each in opened:
        each.averager.close()


# ---- identities ---------------------------------------------------------------------------------


def test_one_worker_without_outer_optimizer_is_plain_training(open_rounds):
    """Sign, base and dtype: the new version is where the worker ended, round after round."""
    runs = open_rounds(sixteenths(), *PLAIN)
    for _ in range(4):
        local = sixteenths()
        runs.close([runs.deliver(3, local, tokens=77)])
        assert torch.equal(runs.theta, local)
        assert torch.equal(runs.base(), local)
    start, local = torch.randn(SIZE).bfloat16(), torch.randn(SIZE)
    runs = open_rounds(start, *PLAIN)
    runs.close([runs.deliver(3, local, tokens=77)])
    assert torch.allclose(runs.theta, local, rtol=0, atol=2**-22)


def test_the_new_version_is_the_plain_mean_of_the_workers(open_rounds):
    runs = open_rounds(sixteenths(), *PLAIN)
    for _ in range(3):
        locals_ = [sixteenths() for _ in range(4)]
        runs.close([runs.deliver(slot, local, 640) for slot, local in enumerate(locals_)])
        assert torch.equal(runs.theta, torch.stack(locals_).mean(0))


def test_partial_deltas_weigh_by_their_tokens(open_rounds):
    runs = open_rounds(sixteenths(), *PLAIN)
    locals_, tokens = [sixteenths() for _ in range(3)], [640, 64, 256]
    partial = [
        runs.deliver(slot, local, n, steps=n // 64)
        for slot, (local, n) in enumerate(zip(locals_, tokens, strict=True))
    ]
    runs.close(partial)
    weighted = sum(n * local.double() for n, local in zip(tokens, locals_, strict=True)) / 960
    assert torch.allclose(runs.theta.double(), weighted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_identical_workers_are_one_worker_whatever_they_weigh(open_rounds, workers):
    start, local = sixteenths(), sixteenths()
    one, many = open_rounds(start, *DILOCO), open_rounds(start, *DILOCO)
    for _ in range(2):
        one.close([one.deliver(0, local, 640)])
        many.close([many.deliver(slot, local, 100 + 37 * slot) for slot in range(workers)])
        assert torch.allclose(one.theta, many.theta, rtol=0, atol=1e-6)


def test_one_step_of_sgd_per_round_is_synchronous_data_parallel_training(open_rounds):
    runs = open_rounds(torch.zeros(SIZE), *PLAIN)
    features, lr = torch.randn(4, 16, SIZE), 0.05
    targets = features @ torch.randn(SIZE)
    theta = runs.theta.double()
    for _ in range(5):
        base = runs.base()
        gradients = [x.T @ (x @ base - y) / 16 for x, y in zip(features, targets, strict=True)]
        locals_ = [base - lr * gradient for gradient in gradients]
        runs.close([runs.deliver(slot, local, 16) for slot, local in enumerate(locals_)])
        together, wanted = features.flatten(0, 1).double(), targets.flatten().double()
        theta = theta - lr * together.T @ (together @ base.double() - wanted) / 64
        assert (runs.theta - theta).abs().max() < 1e-6 * max(1.0, theta.norm().item())


def test_a_late_delta_and_a_newer_one_of_a_worker_are_those_of_two(open_rounds):
    """Neither knows of the other: the newer one began at a version without the late one."""
    start, *locals_ = [sixteenths() for _ in range(4)]
    merged = []
    for slots in ((0, 0), (0, 1)):
        runs = open_rounds(start, *DILOCO)
        late = runs.put(slots[0], locals_[0], 256)
        runs.close([runs.deliver(2, locals_[1], 512)])
        newer = runs.deliver(slots[1], locals_[2], 512)
        runs.close([runs.averager.check(late), newer])
        merged.append(runs.theta.clone())
    assert torch.equal(*merged)


def test_two_deltas_weigh_as_one_of_all_their_tokens(open_rounds):
    start, local, other = sixteenths(), sixteenths(), sixteenths()
    whole, halves = open_rounds(start, *DILOCO), open_rounds(start, *DILOCO)
    whole.close([whole.deliver(0, local, 512), whole.deliver(2, other, 256)])
    halves.close([halves.deliver(0, local, 256), halves.deliver(1, local, 256),
                  halves.deliver(2, other, 256)])
    assert torch.allclose(whole.theta, halves.theta, rtol=0, atol=1e-6)


def test_a_worker_without_tokens_never_changes_the_result_or_the_divisor(open_rounds):
    start, local, ghost = sixteenths(), sixteenths(), sixteenths()
    without, beside = open_rounds(start, *DILOCO), open_rounds(start, *DILOCO)
    without.close([without.deliver(1, local, 640)])
    silent = beside.deliver(0, ghost, 0, steps=0)
    beside.close([beside.deliver(1, local, 640), silent])
    assert torch.equal(without.theta, beside.theta)
    header = silent.header
    sizes = beside.averager.fragment_bytes
    facts = Facts(header.run, 0, header.layout, header.codec, sizes, 2, {0: 1})
    assert rounds.judge(header, facts, (), "") is None
    assert header.is_pass  # so it does not even come this far


# ---- the outer optimizer ------------------------------------------------------------------------


def test_fifty_rounds_equal_torch_sgd_on_the_weighted_mean(open_rounds):
    """In float64 beside it; a new master takes over in the middle, and again near the end."""
    runs = open_rounds(torch.randn(SIZE), *DILOCO, "local_sgd.thin_rounds=false",
                       "local_sgd.clip_norm=0")
    reference = runs.theta.double().requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(50):
        if number in (20, 21, 44):
            runs.new_master()
        base, accepted = runs.base(), []
        gradient, weight = torch.zeros(SIZE).double(), 0
        for slot in range(1 + number % 4):
            local, tokens = base + 0.1 * torch.randn(SIZE), int(torch.randint(1, 999, ()))
            accepted.append(runs.deliver(slot, local, tokens))
            gradient += tokens * (base - local).double()
            weight += tokens
        runs.close(accepted)
        reference.grad = gradient / weight
        sgd.step()
        assert torch.allclose(runs.theta.double(), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_the_outer_step_has_the_bits_of_torch_sgd_across_a_restart(run, mu):
    """Momentum and parameters survive being written and read exactly."""
    layout = Rounds(run, torch.zeros(SIZE)).layout
    start = [torch.randn(n) for n in layout.numels]
    momentum = [torch.zeros(n) for n in layout.numels]
    outer = Outer(layout, [part.clone() for part in start], momentum, mu)
    fused, plain = (TorchSgd(start, mu, **which) for which in ({"fused": True}, {"foreach": False}))
    for number in range(1, 51):
        means = [torch.randn(n) for n in layout.numels]
        lr = 0.7 if number % 3 else 0.35
        step(outer, [mean.clone() for mean in means], lr)
        for optimizer in (fused, plain):
            optimizer.step([mean.clone() for mean in means], lr)
        if number in (17, 18, 40):
            outer = written_and_read(run, outer, number, mu)
        for mine, close, exact in zip(outer.params, fused.params, plain.params, strict=True):
            assert torch.equal(mine, exact)
            assert torch.allclose(mine, close, rtol=1e-5, atol=1e-4)


class TorchSgd:
    """torch.optim.SGD itself, with its own momentum."""

    def __init__(self, start, mu, **which):
        self.params = [part.clone().requires_grad_() for part in start]
        self.sgd = torch.optim.SGD(self.params, momentum=mu, nesterov=mu > 0, **which)

    def step(self, means, lr):
        self.sgd.param_groups[0]["lr"] = lr
        for param, mean in zip(self.params, means, strict=True):
            param.grad = mean
        self.sgd.step()


def test_a_master_does_not_import_the_compiler():
    """It would take every new master a second and a half, at its first commit."""
    script = """if True:
        import sys, torch
        import elastic.local.master.master, elastic.local.master.averaging
        from elastic.saved.merge import outer_step
        outer_step(torch.ones(3), torch.zeros(3), torch.ones(3), 0.7, 0.9)
        assert "torch._dynamo" not in sys.modules
    """
    environment = {"PYTHONPATH": str(ROOT / "lib")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_the_bits_do_not_depend_on_the_number_of_threads(run):
    """Masters on nodes of different sizes continue each other's runs."""
    numel, results, before = 1_000_003, set(), torch.get_num_threads()
    params, deltas = torch.randn(numel), [torch.randn(numel) for _ in range(3)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        stepped, momentum = params.clone(), params / 7
        terms = [merge.Term([(0, delta)], 0.3, params.bfloat16()) for delta in deltas]
        mean = merge.mean_delta(params, terms, 0.5, torch.empty(numel))
        merge.outer_step(stepped, momentum, mean, 0.7, 0.9)
        results.add(hash((stepped.numpy().tobytes(), momentum.numpy().tobytes())))
    torch.set_num_threads(before)
    assert len(results) == 1


def written_and_read(run, outer, version, mu):
    draft = VersionDraft(run, version, "epoch1")
    files = []
    for index, (params, momentum) in enumerate(zip(outer.params, outer.momentum, strict=True)):
        files += draft.write_fragment(outer.layout, index, params, momentum)
    draft.commit(outer.layout, files, commit_of(version))
    return read_outer(run, run.commits.of(version), mu)


def test_masters_that_change_every_round_do_what_one_master_does(open_rounds):
    """Momentum, running means and thin rounds are all in the commit: bit for bit the same."""
    start = torch.randn(SIZE)
    one, many = open_rounds(start, *DILOCO), open_rounds(start, *DILOCO)
    for number in range(8):
        many.new_master()
        sizes = [0.1, 0.1, 0.1, 0.5, 0.1][: 1 + number % 5]
        moves = [size * torch.randn(SIZE) for size in sizes]
        commits = [
            runs.close(
                [runs.deliver(s, runs.base() + move, 50 * (s + 1)) for s, move in enumerate(moves)]
            )
            for runs in (one, many)
        ]
        assert torch.equal(one.theta, many.theta)
        assert torch.equal(one.momentum, many.momentum)
        first, second = (replace(commit, writer="") for commit in commits)
        assert first == second
    assert any(commit.outer_lr < 0.7 for commit in one.run.commits.all() if commit.version)


def test_the_first_commit_says_what_the_outer_step_did(open_rounds):
    runs = open_rounds(torch.zeros(SIZE), *DILOCO)
    ones = torch.ones(SIZE)
    commit = runs.close([runs.deliver(slot, -ones, 100) for slot in range(3)])
    assert (commit.clipped, commit.outer_lr) == (0, 0.7)
    assert commit.bytes == 3 * 4 * SIZE
    assert commit.running["reach"]["straight"] == pytest.approx(SIZE**0.5 / 0.01)
    assert commit.running["weight"] == 300.0
    assert (commit.inner_steps, commit.outer_momentum) == (200, 0.9)
    assert torch.allclose(runs.theta, -0.7 * 1.9 * ones)  # b = g; eta (g + mu b)


def test_each_round_steps_with_the_momentum_of_its_deltas(open_rounds):
    runs = open_rounds(torch.zeros(SIZE))
    theta = b = torch.zeros(SIZE)
    for count, mu, eta in [(1, 0.0, 1.0), (4, 0.5, 0.8), (20, 0.8, 0.68)]:
        commit = runs.close([runs.deliver(i, runs.base() - 1.0, 100) for i in range(count)])
        b = mu * b + 1.0
        theta = theta - eta * (1.0 + mu * b)
        assert commit.outer_momentum == pytest.approx(mu)
        assert torch.allclose(runs.momentum, b)
        assert torch.allclose(runs.theta, theta)


def test_a_commit_says_how_far_its_round_agrees_with_those_before(open_rounds):
    runs = open_rounds(torch.zeros(SIZE), *DILOCO)
    assert runs.close([runs.deliver(0, runs.base() + 1.0, 100)]).agreement is None  # no momentum
    for _ in range(3):
        moves, before = [torch.randn(SIZE), torch.randn(SIZE)], runs.momentum
        deltas = [runs.deliver(slot, runs.base() + move, 100) for slot, move in enumerate(moves)]
        agreement = runs.close(deltas).agreement
        assert agreement == pytest.approx(torch.cosine_similarity(-sum(moves), before, 0).item())
        assert 0.02 < abs(agreement) < 1  # not by chance: the numbers are seeded


# ---- the order of arrival -----------------------------------------------------------------------


def test_the_result_is_bitwise_the_same_for_every_order_of_arrival(open_rounds):
    """Four workers and a late delta, with and without threads to race: all 120 orders."""
    runs = open_rounds(torch.randn(SIZE), *DILOCO)
    late = runs.put(4, torch.randn(SIZE), 321, base=0)
    runs.close([runs.deliver(0, torch.randn(SIZE), 640)])
    headers = [runs.put(slot, torch.randn(SIZE), 100 + 7 * slot) for slot in range(4)]
    results = set()
    for order in itertools.permutations([late, *headers]):
        runs.new_master()
        commit, parts = runs.weigh([runs.averager.check(header) for header in order])
        draft = VersionDraft(runs.run, commit.version, "epoch2")
        written, _ = runs.averager.advance(commit, parts, draft)  # checksums of all files
        state = torch.cat([runs.theta, runs.momentum])
        results.add((state.numpy().tobytes(), str(commit), str(written)))
    assert len(results) == 1


def test_the_order_would_matter_without_the_sorting():
    """The check above can fail: float addition is not associative."""
    zero, terms = torch.zeros(SIZE), [merge.Term([(0, torch.randn(SIZE))], 0.2) for _ in range(5)]
    sums = {
        merge.mean_delta(zero, order, 0.5, torch.empty(SIZE)).numpy().tobytes()
        for order in itertools.permutations(terms)
    }
    assert len(sums) > 1


def test_the_files_of_a_version_are_the_same_for_every_order_of_arrival(open_rounds):
    start, locals_ = torch.randn(SIZE), [torch.randn(SIZE) for _ in range(3)]
    sums = []
    for order in ([0, 1, 2], [2, 0, 1]):
        runs = open_rounds(start, *DILOCO)
        commit = runs.close([runs.deliver(slot, locals_[slot], 100 + slot) for slot in order])
        sums.append([(entry["path"], entry["xxh3"]) for entry in commit.files])
    assert sums[0] == sums[1]


# ---- late deltas --------------------------------------------------------------------------------


def late_round(open_rounds, kappa):
    """Slot 0 makes version 1; then slot 0 on version 1 and slot 1, late, on version 0."""
    runs = open_rounds(sixteenths(), *PLAIN, f"local_sgd.reanchor={kappa}")
    late_local, fresh_local, first = sixteenths(), sixteenths(), sixteenths()
    late = runs.put(1, late_local, 250)  # weighs 200, being one version late
    start = runs.base()
    runs.close([runs.deliver(0, first, 100)])
    runs.close([runs.deliver(0, fresh_local, 200), runs.averager.check(late)])
    return runs.theta, start, first, late_local, fresh_local


def test_a_late_delta_fully_reanchored_is_the_mean_of_absolute_snapshots(open_rounds):
    theta, _, _, late, fresh = late_round(open_rounds, 1.0)
    assert torch.equal(theta, (late + fresh) / 2)


def test_late_deltas_of_one_base_read_it_once(open_rounds, monkeypatch):
    """Of a large model each time was as much as all deltas, while everybody waits."""
    runs, read = open_rounds(sixteenths(), *PLAIN), []
    late = [runs.put(slot, sixteenths(), 250) for slot in (1, 2, 3)]
    runs.close([runs.deliver(0, sixteenths(), 100)])

    def counted(run, commit, *which):
        read.append((commit.version, which[-1]))
        return versions.read_exactly(run, commit, *which)

    monkeypatch.setattr(averaging, "read_exactly", counted)
    runs.close([runs.averager.check(header) for header in late])
    assert sorted(read) == [(0, index) for index in runs.averager.indices]


def test_a_late_delta_not_reanchored_counts_from_its_base(open_rounds):
    theta, start, first, late, fresh = late_round(open_rounds, 0.0)
    assert torch.equal(theta, (first + (late - start) + fresh) / 2)


def test_late_deltas_let_parameters_move_by_less_than_bf16_can_tell(open_rounds):
    """They pulled the parameters back to what was published: a worker that is always late froze
    the gains of norms for all."""
    by = 2e-4  # bf16 has steps of 4e-3 there
    runs, late = open_rounds(torch.ones(SIZE), *PLAIN), []
    for _ in range(30):
        deltas = [runs.deliver(0, runs.base() - by, 640), *map(runs.averager.check, late)]
        late = [runs.put(1, runs.base() - by, 640)]
        runs.close(deltas)
    assert (1 - runs.theta > 20 * by).all()  # of 30: who is late has seen less of the others


def test_a_late_delta_half_reanchored_lies_between(open_rounds):
    theta, start, first, late, fresh = late_round(open_rounds, 0.5)
    assert torch.equal(theta, (late + (first - start) / 2 + fresh) / 2)


def test_a_constant_that_is_infinite_stays_where_a_delta_is_late():
    now, then = torch.tensor([-torch.inf, 3.0]), torch.tensor([-torch.inf, 1.0]).bfloat16()
    late = merge.Term([(0, torch.tensor([0.0, 8.0]))], 0.5, then)
    assert merge.mean_delta(now, [late], 1.0, torch.empty(2)).tolist() == [0.0, 0.5 * (8 + 3 - 1)]


# ---- deltas that are no good --------------------------------------------------------------------


def path_of(runs, header, index=1):
    return runs.run.path / "deltas" / fragment_name(header.key, index)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_delta_that_is_not_finite_is_refused_before_it_is_added(open_rounds, value):
    runs = open_rounds(torch.zeros(SIZE), *DILOCO)
    local = torch.zeros(SIZE)
    local[-1] = value
    with pytest.raises(Damaged, match="^non-finite: "):
        runs.averager.check(runs.put(0, local, 10))


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda path: os.truncate(path, 7), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated"),
        (lambda path: path.write_bytes(bytes(20)), "altered"),
        (lambda path: path.unlink(), "unreadable"),
    ],
)
def test_bytes_that_went_bad_are_refused_and_later_stop_only_their_own_delta(
    open_rounds, damage, rule
):
    runs = open_rounds(torch.zeros(SIZE), *DILOCO)
    good, bad = (runs.deliver(slot, torch.randn(SIZE), 10) for slot in range(2))
    damage(path_of(runs, bad.header))
    with pytest.raises(Damaged, match=f"^{rule}: "):
        runs.averager.check(bad.header)
    with pytest.raises(Damaged) as lost:  # it was whole when it was checked first
        runs.close([good, bad])
    assert lost.value.key == bad.header.key
    assert not list((runs.run.path / "versions").glob("*1*"))
    alone = open_rounds(torch.zeros(SIZE), *DILOCO)
    alone.close([alone.deliver(0, -runs_delta(runs, good), 10)])
    runs.close([good])
    assert torch.equal(runs.theta, alone.theta)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_late_delta_whose_version_cannot_be_read_any_more_stops_no_run(open_rounds, is_there):
    """Every master died of it: the newest version was whole, and no other was ever made."""
    runs = open_rounds(torch.zeros(SIZE), *DILOCO)
    late = runs.put(0, torch.randn(SIZE), 10)
    runs.close([runs.deliver(1, torch.randn(SIZE), 10)])
    file = runs.run.version_path(0) / "outer-00.safetensors"
    file.write_bytes(b"x") if is_there else shutil.rmtree(file.parent)
    checked = [runs.averager.check(late), runs.deliver(1, torch.randn(SIZE), 10)]
    with pytest.raises(Damaged) as lost:
        runs.close(checked)
    assert (lost.value.key, lost.value.why.rule) == (late.key, Rule.UNREADABLE)
    runs.close(checked[1:])


def runs_delta(runs, checked):
    averager = runs.averager
    tiles = [t.clone() for i in range(3) for _, t in averager.read(checked.header, i)]
    return torch.cat(tiles)


def test_an_outlier_is_clipped(open_rounds):
    """Five deltas of norm 1 and one of 50: it counts as one of norm 2."""
    runs = open_rounds(torch.zeros(SIZE), *PLAIN)
    unit = torch.zeros(SIZE)
    unit[0] = 1.0
    accepted = [runs.deliver(slot, unit, 100) for slot in range(5)]
    commit = runs.close([*accepted, runs.deliver(5, 50 * unit, 100)])
    assert commit.clipped == 1
    assert runs.theta[0].item() == pytest.approx(7 / 6)


def test_an_inner_state_goes_when_nobody_would_begin_with_it(open_rounds):
    """Slots that are used no more, as after a smaller --max, kept theirs for ever."""
    runs = open_rounds(torch.zeros(SIZE), "local_sgd.inner_state_max_age=3")
    names = ["inner-000001.1.0.safetensors", ".inner-000008.2.1.safetensors",
             "inner-000009.2.0.safetensors", ".inner-000012.3.0.safetensors"]
    for name in (*names, "inner-copy.safetensors", "inner.json"):
        (runs.run.slots.path(7) / name).touch()
    runs.averager.clean_up(12, [])
    left = {path.name for path in runs.run.slots.path(7).iterdir()}
    assert left == {*names[2:], "inner-copy.safetensors", "inner.json"}
