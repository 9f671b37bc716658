"""Proof of the ledger from the commit records alone: `RUN/commits/*.json` and the files
they name, and the newest checkpoint on top of the newest version.

Checked: versions follow each other without a gap, and no earlier master epoch follows a
later one; tokens and sample ranges of a commit are those of its deltas; no sample of an
epoch is committed twice; every epoch that is over is complete; the files of kept versions
exist with their size and, on request, their checksum.

What an epoch lacks is `missing` once it is over: the run has finished its epochs, or made
PATIENCE versions since the next epoch began. Until then it is `open` below the highest
committed sample (handed out, or given back) and `not_reached` above. Nothing here asks
Redis, a process or the scheduler, and nothing is written. A run may go on meanwhile: what
it prunes is not missing.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from elastic.base.durable import damage, draft_of, read_json
from elastic.base.errors import ElasticError
from elastic.run import goodput
from elastic.run.claims import numbers
from elastic.run.commits import read_checkpoints, read_commit
from elastic.run.ledger import Range, Ranges, count
from elastic.run.records import Checkpoint, Commit
from elastic.run.rundir import RunDir
from elastic.run.sound import typed, whole
from elastic.run.wording import unit

PATIENCE = 10  # versions; no delta is merged so late, and samples that come back go out first


def audit(run_dir: Path, keep: int = 1, checksum: Callable[[Path], str] | None = None) -> dict:
    """What the commits say: counts, one entry per epoch, and `problems` (sentences; empty
    is good).

    The `keep` newest versions must have their files; `checksum` gives a file's xxh3, None
    skips it.
    """
    # DONE first: of a run that is over by then, every commit is there to be read.
    end, problems = read_end(run_dir)
    finished = end is not None
    commits, unread = read_commits(run_dir / "commits")
    problems += unread
    newest = commits[-1].version if commits else 0
    saved = read_checkpoints(run_dir, newest)
    if not (commits or saved):
        is_lost = finished or any((run_dir / "versions").glob("[0-9]*"))
        problems = problems or ["no version is committed"] * is_lost
        return {"commits": 0, "epochs": [], "finished": finished, "problems": problems}
    # The newest checkpoint says all that was trained since the newest version.
    trained = [*commits, *(replace(last, version=newest + 1) for last in saved[-1:])]
    problems += check_sequence(commits)
    for before, after in pairwise(trained):
        problems += check_sums(before, after)
    for before, after in pairwise(saved):
        if after.tokens < before.tokens:
            problems.append(f"step {after.step} has fewer tokens than step {before.step}")
    problems += check_end(end or {}, trained[-1])
    # A batch that was skipped after the last checkpoint is in DONE alone.
    skipped = (end or {}).get("skipped") or (saved[-1].skipped if saved else ())
    epochs = count_epochs(trained, finished, skipped)
    problems += [problem for epoch in epochs for problem in check_epoch(epoch)]
    files, altered = check_files(run_dir, commits, saved, keep, checksum)
    totals = ("committed", "repeated", "missing", "open", "not_reached")
    return {
        "commits": len(commits) or len(saved),
        "version": newest if commits else saved[-1].step,
        "tokens": trained[-1].tokens,
        "unit": unit(trained[-1].deltas),
        "deltas": sum(len(commit.deltas) for commit in commits),
        "masters": len({commit.master_epoch for commit in commits[1:]}),
        "finished": finished,
        "taken_back": taken_back(commits),
        **{name: sum(epoch[name] for epoch in epochs) for name in totals},
        "files": files,
        "epochs": epochs,
        "problems": problems + altered,
    }


def has_ledger(run: RunDir) -> bool:
    """False for a program in sync mode: nobody here knows which samples it has
    trained."""
    return not run.config().run.command or run.control().mode == "local"


def gpu_seconds(run: RunDir) -> dict[str, float]:
    """What the GPUs of a run were used for, from its commits and events: see goodput.
    Nothing, of a program that counts its steps itself."""
    if not has_ledger(run):
        return {}
    events, per_worker = run.events(), run.config().slurm.gpus_per_worker
    jobs = goodput.allocations(events, run.jobs.endings(), per_worker, time.time())
    commits, _ = read_commits(run.path / "commits")
    return goodput.ledger(jobs, goodput.work_in(commits, run.lines("metrics.jsonl")))


def read_end(run_dir: Path) -> tuple[dict | None, list[str]]:
    """What is written of the end of a run that is done, and what could not be read."""
    path = run_dir / "DONE"
    try:
        end = whole(path, read_json(path))
        typed(tuple[Range, ...], path, (end or {}).get("skipped"))
        return end, []
    except ElasticError as error:
        return {}, [str(error)]


def read_commits(commits_dir: Path) -> tuple[list[Commit], list[str]]:
    """Every readable commit in order of its version, and what could not be read."""
    commits, problems = [], []
    for version in sorted(numbers(commits_dir)):
        path = commits_dir / f"{version:06d}.json"
        try:
            commit = read_commit(path)
        except (OSError, ElasticError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
            continue
        if commit and commit.version != version:
            problems.append(f"{path.name} says it is version {commit.version}")
        commits += [commit] if commit else []
    return sorted(commits, key=lambda commit: commit.version), problems


def check_sequence(commits: Sequence[Commit]) -> Iterator[str]:
    """Versions are 0, 1, 2 …, and master epochs never fall."""
    if commits and commits[0].version != 0:
        yield f"the first commit is version {commits[0].version}, not 0"
    for before, after in pairwise(commits):
        if after.version != before.version + 1:
            yield f"version {before.version} is followed by {after.version}"
        if after.master_epoch < before.master_epoch:
            yield f"version {after.version} was committed by a fenced master"


def check_sums(before: Commit, after: Commit) -> Iterator[str]:
    """A commit adds exactly the tokens and the samples of its deltas."""
    gained = after.tokens - before.tokens
    claimed = sum(delta.tokens for delta in after.deltas)
    if gained != claimed:
        yield f"version {after.version} adds {gained} tokens, its deltas {claimed}"
    samples = [span for delta in after.deltas for span in delta.samples]
    own, theirs = Ranges(after.samples), Ranges(samples)
    if list(own) != list(theirs) or count(after.samples) != count(samples):
        yield f"version {after.version}: its samples are not those of its deltas"


def check_end(end: Mapping, last: Commit) -> Iterator[str]:
    """A run that is done has all that it ended with: of one that is bounded by tokens,
    nothing else tells of versions that are lost."""
    if last.tokens < (ended := end.get("tokens", 0)):
        yield f"the run ended with {ended} tokens, and what is left of it has {last.tokens}"


def taken_back(commits: Sequence[Commit]) -> list[tuple[int, int]]:
    """Versions that were taken back, and how many committed samples are in no parameters
    so."""
    reverted = {commit.taken_back for commit in commits}
    return [(commit.version, count(commit.samples)) for commit in commits
            if commit.version in reverted]


def count_epochs(commits: Sequence[Commit], finished: bool, skipped: Sequence[Range]) -> list[dict]:
    """What is committed, repeated, missing, open and not reached in every epoch begun or
    owed. Batches that were not finite are `skipped` on purpose, and not missing."""
    size, owed = commits[0].dataset_samples, commits[-1].epochs if finished else 0
    spans = defaultdict(list)
    for span in (span for commit in commits for span in commit.samples):
        spans[span[0]].append(span)
    # By epoch, the version that first has samples of it.
    begun = {epoch: each.version for each in reversed(commits) for epoch, _, _ in each.samples}
    counts = []
    for epoch in range(max([owed, *(number + 1 for number in begun)])):
        next_begun = min((v for number, v in begun.items() if number > epoch), default=None)
        late = next_begun is not None and commits[-1].version - next_begun >= PATIENCE
        left_out = count(span for span in skipped if span[0] == epoch)
        counts.append(count_epoch(epoch, spans[epoch], size, bool(owed) or late, left_out))
    return counts


def count_epoch(epoch: int, spans: list[Range], size: int, is_over: bool, left_out: int) -> dict:
    """The counts of one epoch of `size` samples."""
    covered, highest = Ranges(spans), max((stop for _, _, stop in spans), default=0)
    inside = count(covered.common([(epoch, 0, size)]))
    return {
        "epoch": epoch,
        "dataset_samples": size,
        "committed": inside,
        "repeated": count(spans) - len(covered),
        "missing": max(0, size - inside - left_out) if is_over else 0,
        "open": 0 if is_over else min(highest, size) - inside,
        "not_reached": 0 if is_over else max(0, size - highest),
        "outside": len(covered) - inside,
    }


def check_epoch(epoch: dict) -> list[str]:
    """What is wrong with the counts of one epoch."""
    wrong = {"repeated": "committed more than once", "outside": "outside the data set",
             "missing": "never committed, and the epoch is over"}
    return [f"epoch {epoch['epoch']}: {epoch[name]} samples {words}"
            for name, words in wrong.items() if epoch[name]]


def check_files(
    run_dir: Path, commits: Sequence[Commit], saved: Sequence[Checkpoint], keep: int, checksum
) -> tuple[int, list[str]]:
    """Number of files of kept versions and checkpoints, and those that are absent or
    altered."""
    found: list[str] = []
    for commit in commits:
        folder = run_dir / "versions" / f"{commit.version:06d}"
        is_kept = partial(is_recent, commit.version, commits[-1].version, keep, run_dir)
        found += damages(folder, commit.writer, commit.files, is_kept, checksum)
    for checkpoint in saved:
        folder = run_dir / "checkpoints" / f"step-{checkpoint.step:08d}"
        is_kept = folder.with_suffix(".json").exists
        found += damages(folder, checkpoint.writer, checkpoint.files, is_kept, checksum)
    return len(found), [*filter(None, found)]


def is_recent(version: int, newest: int, keep: int, run_dir: Path) -> bool:
    """Is it among the last `keep` versions: by the newest that was read, and as of now?"""
    return version > newest - keep and version > max(numbers(run_dir / "commits"), default=0) - keep


def damages(folder: Path, writer: str, files, is_kept: Callable, checksum, before=()) -> list[str]:
    """What is wrong with each file of a committed folder, "" for nothing. What may be
    pruned and is gone has no files.

    Two looks have to agree (`before`: what the last one found), as meanwhile a folder
    gets its last name, or is pruned.
    """
    draft = draft_of(folder, writer)
    place = draft if draft.exists() else folder  # its writer died before the last rename
    if not place.exists() and not is_kept():  # in this order: it is pruned once it is old
        return []
    found = [damage(place / Path(entry["path"]).name, entry, checksum) for entry in files]
    if any(found) and found != before:
        return damages(folder, writer, files, is_kept, checksum, found)
    return found
