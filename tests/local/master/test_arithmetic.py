"""Averaging in threads: the bits of one, whatever goes wrong on the way."""

import itertools
import os
from dataclasses import replace

import pytest
import torch

from elastic.base.errors import ElasticError
from elastic.local.transport import Damaged, fragment_name
from merging import Rounds

SIZE = 30
EXACT = ("local_sgd.compression=none", "local_sgd.cold_start=0")


@pytest.fixture
def open_rounds(make_run, monkeypatch):
    """open_rounds(cores, those of its job) -> Rounds of a new run."""
    opened, names = [], (f"run-{number}" for number in itertools.count())

    def open_(cores: int, given: str = "") -> Rounds:
        torch.manual_seed(3)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", given)
        opened.append(Rounds(make_run(*EXACT, name=next(names)), torch.randn(SIZE)))
        return opened[-1]

    yield open_
    for each in opened:
        each.averager.close()


def one_round(rounds: Rounds, seed: int) -> list[tuple[str, str]]:
    """Three deltas, one an outlier and one late; what the commit says of its files."""
    torch.manual_seed(seed)
    late = []
    if seed:
        late = [rounds.deliver(2, torch.randn(SIZE), 50, base=rounds.version - 1)]
    fresh = [rounds.deliver(s, torch.randn(SIZE) * 9**s, 100 + s) for s in range(2)]
    commit = rounds.close([*fresh, *late])
    return [(entry["path"], entry["xxh3"]) for entry in commit.files]


def test_the_bits_do_not_depend_on_the_number_of_threads(open_rounds):
    """Files, momentum and norms, over three rounds."""
    found = []
    for cores in (1, 2, 5):
        rounds = open_rounds(cores)
        found.append([one_round(rounds, seed) for seed in range(3)])
        assert rounds.averager.threads._max_workers == cores
    assert found[0] == found[1] == found[2]


def test_a_master_keeps_to_the_cores_of_its_job_where_the_site_does_not_confine_it(open_rounds):
    assert open_rounds(5, "3").averager.threads._max_workers == 3


def test_lost_bytes_and_full_disks_leave_the_next_try_the_same_bits(open_rounds):
    rounds, smooth = open_rounds(2), open_rounds(1)
    good, bad = (rounds.deliver(slot, torch.full((SIZE,), slot + 1.0), 10) for slot in range(2))
    path = rounds.run.path / "deltas" / fragment_name(bad.header.key, 1)
    body = path.read_bytes()
    path.write_bytes(bytes(len(body)))
    with pytest.raises(Damaged) as error:
        rounds.close([good, bad])
    assert error.value.key == bad.header.key
    altered = replace(bad.header, fragments=bad.header.fragments[::-1])
    with pytest.raises(Damaged, match="^truncated: "):
        rounds.averager.check(altered)
    # A file where the draft belongs, as good as a disk that takes nothing.
    blocked = rounds.run.path / "versions"
    held = blocked.rename(blocked.with_name("held"))
    blocked.write_bytes(b"")
    following = rounds.weigh([good])
    with pytest.raises((OSError, ElasticError)):
        rounds.averager.commit(*following)
    blocked.unlink()
    held.rename(blocked)
    assert rounds.averager.commit(*following).version == 1
    smooth.close([smooth.deliver(0, torch.full((SIZE,), 1.0), 10)])
    files = [[each["xxh3"] for each in one.run.commits.of(1).files] for one in (rounds, smooth)]
    assert files[0] == files[1]
