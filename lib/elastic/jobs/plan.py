"""The plan of a reconcile pass: what to submit, cancel or give up, each with its reason.
Pure.

Invariants, whatever the world looks like:
- a job that exists, in whatever state, occupies its slot; so does a submission that is
  unsure;
- at most one job per slot, one master or, in sync mode, one trainer; of several the one
  furthest along stays. Behind a trainer at work one successor waits in the queue, held
  back by Slurm's `singleton`: it starts within a second of the other's end, whoever ended
  it and however;
- nothing starts in one mode while a job of the other mode is there and has not said its
  last word;
- worker jobs <= slots, queued jobs <= max_pending (only a missing master may exceed it);
- nothing is submitted for a run that is done, failed or stopped;
- in the world that carrying out a plan leads to, the next plan does nothing.

A job that was taken away (preempted, timed out, killed, its node lost) is replaced at
once. A crash waits `backoff_s`, doubling; `max_failures` crashes of one slot in a row end
the run, unless another worker has been training all the while: then the fault is that
slot's, and it goes on backing off. A node is avoided while workers crash on it and work
elsewhere, and those crashes do not count; it is avoided at once if a job itself says that
the node is unfit, but that crash counts, as all nodes may be so. A master is one of a
kind: it avoids a node where two crashed, and all its crashes count. A job in a broken
hold is cancelled, and replaced with the same backing off.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic.jobs.history import ALONE, MASTER, RECENT_S, TRAINER, WORKER, Ended, Job, Memory
from elastic.run.records import Outcome

SUBMIT, CANCEL, GROW, FAIL, WAIT = "submit", "cancel", "grow", "fail", "wait"

# Time to leave by themselves: the master leaves last, a trainer saves a checkpoint first.
# A hang is their own to find, so this is on top of `hang_timeout_s`.
LEAVE_S = {WORKER: 60.0, MASTER: 120.0, TRAINER: 300.0}
AFTER_LEAVE_S = 2.0  # from a worker's leave to the pass that replaces it: its job has to end
MAX_BACKOFF_S = 3600.0
NEXT_MASTER_S = 3600.0  # before the old one's time is up
MAX_EXCLUDED = 8  # nodes; more than that is not the nodes' fault

Place = tuple[str, int]


@dataclass(frozen=True)
class World:
    """All that a plan may depend on. `slots` is max // gpus_per_worker; 0 in sync
    mode."""

    slots: int
    memory: Memory
    max_pending: int = 8
    max_failures: int = 3
    backoff_s: float = 30.0
    hang_timeout_s: float = 0.0
    mode: str = "local"
    growth: int = 0  # sync mode: GPUs for which a restart pays now; 0: there are none
    limits_of_gpus: tuple[int, int] | None = None  # sync mode: fewest and most, now
    gpus: int = 0  # sync mode: of the trainer at work
    node_gpus: int = 1  # that a trainer has at least, whatever the limits are

    def own(self, role: str) -> bool:
        """Is this a role of the run's mode?"""
        return (role == TRAINER) == (self.mode == "sync")

    @property
    def places(self) -> list[Place]:
        """Where jobs should be, the most important first."""
        if self.mode == "sync":
            return [(TRAINER, 0)]
        return [(MASTER, 0), *((WORKER, slot) for slot in range(self.slots))]


@dataclass(frozen=True)
class Action:
    verb: str  # WAIT does nothing: it says why nothing is done
    role: str
    slot: int
    reason: str
    job_id: str = ""  # CANCEL, GROW
    now: bool = False  # CANCEL: kill it, because it was asked before and is still there
    detail: str = ""  # FAIL: the last log lines
    exclude: tuple[str, ...] = ()  # SUBMIT: nodes to avoid
    gpus: int = 0  # GROW: that the job is to wait for


def plan(world: World, now: float) -> list[Action]:
    """What to do about `world`, to be carried out in this order."""
    memory = world.memory
    closing_s = now - memory.closing_since - world.hang_timeout_s
    if memory.closing:
        return list(_close(memory.jobs, memory.closing, closing_s, now))
    chains = _chains(memory, _blamed(memory, now)[:MAX_EXCLUDED])
    for place, chain in sorted(chains.items()):
        if reason := _hopeless(world, chain):
            failure = Action(FAIL, *place, reason, detail=chain[0].detail)
            return [failure, *_close(memory.jobs, "failed", 0.0, now)]
    return [
        *_close([job for job in memory.jobs if not world.own(job.role)],
                f"going on in {world.mode} mode", closing_s, now),
        *_cancel(world, now), *_resize(world, now), *_fill(world, chains, now),
    ]


# ---- what went wrong, and whose fault it is


def bad_nodes(memory: Memory, now: float, role: str = WORKER) -> tuple[str, ...]:
    """Nodes of which a job has lately said that nobody can train there, and those that
    are blamed."""
    unfit = [node for end in reversed(memory.ended) for node in end.unfit
             if role != MASTER and now - end.at < RECENT_S]
    bad = dict.fromkeys([*unfit, *_blamed(memory, now, role)])
    return tuple(sorted([*bad][:MAX_EXCLUDED]))


def _blamed(memory: Memory, now: float, role: str = WORKER) -> list[str]:
    """Nodes on which two or more workers crashed lately while workers elsewhere
    worked; or two or more masters, or trainers, of which there is one at a time."""
    crashes: dict[str, list[Ended]] = defaultdict(list)
    for end in memory.ended:
        is_there = end.node in (end.unfit or (end.node,)) and end.node
        if end.crashed and end.role == role and is_there and now - end.at < RECENT_S:
            crashes[end.node].append(end)
    return [node for node, ends in sorted(crashes.items(), key=lambda item: -item[1][-1].at)
            if len(ends) >= 2
            and (role != WORKER or _works_elsewhere(memory, node, ends[0].at))]


def _works_elsewhere(memory: Memory, node: str, since: float) -> bool:
    witnesses = [job.node for job in _training_since(memory, since)]
    ended = (end for end in memory.ended if end.role == WORKER)
    witnesses += [end.node for end in ended if end.worked and end.at > since]
    return any(witness not in ("", node) for witness in witnesses)


def _training_since(memory: Memory, since: float) -> list[Job]:
    workers = (job for job in memory.jobs if job.role == WORKER and job.started)
    return [job for job in workers if job.started_at is not None and job.started_at <= since]


def _chains(memory: Memory, blamed: Sequence[str]) -> dict[Place, list[Ended]]:
    """Per place its latest crashes and broken holds in a row, newest first."""
    chains: dict[Place, list[Ended]] = defaultdict(list)
    complete: set[Place] = set()
    for end in reversed(memory.ended):
        is_nodes_fault = end.role == WORKER and end.node in blamed
        counts = end.outcome == Outcome.HELD or (end.crashed and not is_nodes_fault)
        if counts and end.place not in complete:
            chains[end.place].append(end)
        if end.worked:
            complete.add(end.place)
    return dict(chains)


def _hopeless(world: World, chain: Sequence[Ended]) -> str:
    """Why the crashes of this place end the run, or ""."""
    crashes = [end for end in chain if end.crashed]
    if len(crashes) < world.max_failures:
        return ""
    last, first = crashes[0], crashes[-1]
    who = last.role if last.role in ALONE else f"{last.role} {last.slot}"
    others = [j for j in _training_since(world.memory, first.at) if j.place != last.place]
    if last.role == WORKER and others:
        return ""
    return f"{who} failed {len(crashes)} times in a row: {last.reason}"


# ---- what has to go


def _close(jobs: Sequence[Job], why: str, closing_s: float, now: float) -> Iterator[Action]:
    """Queued jobs go at once; started ones may leave by themselves first."""
    for job in sorted(jobs, key=lambda job: (not job.queued, job.role == MASTER, -job.slot)):
        is_over = job.queued or closing_s >= LEAVE_S[job.role]
        if is_over and not job.leaving(now):
            yield _notice_or_kill(job, f"the run is {why}")


def _resize(world: World, now: float) -> Iterator[Action]:
    """Cancel a queued successor whose limits are outdated. Else restart the trainer, with
    notice, if it has more GPUs than the run may have, or if more are free and worth a
    restart."""
    jobs = [job for job in world.memory.jobs if job.role == TRAINER and not job.over]
    # A trainer that got its notice between two attempts has not heard it: it gets another.
    started = [job for job in jobs if job.started
               and now - (job.cancelled_at or -math.inf) >= LEAVE_S[TRAINER]]
    limits, waiting = world.limits_of_gpus, [job for job in jobs if job.queued]
    if outdated := [job for job in waiting if limits and _is_outdated(job, limits, now)]:
        for job in (each for each in outdated if not each.leaving(now)):
            missed = f"{job.asked[0]} GPUs have not become free"
            other = f"the run asks for {limits[0]} to {limits[1]} GPUs now"
            yield _notice_or_kill(job, missed if job.grows_until else other)
    elif len(started) == 1 and waiting:
        if limits and world.gpus > max(limits[1], world.node_gpus):
            reason = f"it has {world.gpus} GPUs, and the run may have {limits[1]} now"
            yield _notice(started[0], reason)
        elif world.growth:
            reason = f"it has {world.gpus} GPUs, and {world.growth} are to be had"
            yield Action(GROW, TRAINER, 0, reason, waiting[0].job_id, gpus=world.growth)
            yield _notice(started[0], reason)


def _is_outdated(successor: Job, limits: tuple[int, int], now: float) -> bool:
    """Does it ask for other GPUs than the run may have? One that waits for GPUs to grow
    may wait, but not for those beyond a limit of the user's, which never come free."""
    if not successor.asked or [*successor.asked] == [*limits]:
        return False
    is_beyond_limit = any(word in successor.reason for word in ("QOS", "Assoc"))  # Slurm's words
    return is_beyond_limit or now >= successor.grows_until


def _cancel(world: World, now: float) -> Iterator[Action]:
    """Jobs that are held for good, second in their place, or too many; each at most once.
    A job in a state that is not understood is left alone."""
    places: dict[Place, list[Job]] = defaultdict(list)
    for job in filter(lambda job: world.own(job.role), world.memory.jobs):
        if job.queued and job.broken_hold and not job.leaving(now):
            yield _notice_or_kill(job, f"held: {job.reason}")
        elif job.is_headless and not job.leaving(now):
            yield replace(_notice_or_kill(job, "the node of its script is gone"), now=True)
        elif not (job.leaving(now) or job.over):
            places[job.place].append(job)
    workers = []
    for place, jobs in places.items():
        if failed := _failing(world.memory, place):
            queued = [job for job in jobs if job.queued]
            yield from (_notice_or_kill(job, f"job {failed} has failed") for job in queued)
            continue
        first, *others = sorted(jobs, key=_seniority)
        surplus = [job for job in others if job.queued or job.started]
        if first.started and _may_be_followed(first, now):
            successor = next((job for job in surplus if job.queued or place[0] == MASTER), None)
            surplus = [job for job in surplus if job is not successor]
        for job in surplus:
            yield _notice_or_kill(job, f"job {first.job_id} has its place")
        if place[0] == WORKER:
            workers += [job for job in jobs if job not in surplus]
    yield from _shrink(workers, world.slots)


def _failing(memory: Memory, place: Place) -> str:
    """The id of a job in this place that has failed and is still listed, or "". Its
    successor has to wait."""
    there = [job for job in memory.jobs if job.place == place]
    return next((job.job_id for job in there if job.over == Outcome.FAILED), "")


def _shrink(workers: Sequence[Job], slots: int) -> Iterator[Action]:
    """Cancel jobs queued for slots that no longer exist, then the highest slots of too
    many jobs, queued ones first. A worker at work in a slot that no longer exists may
    stay as long as there are not too many."""
    too_many = len(workers) - slots
    known = [job for job in workers if job.queued or job.started]
    for job in sorted(known, key=lambda job: (not job.queued, -job.slot)):
        if too_many > 0 or (job.queued and job.slot >= slots):
            yield _notice_or_kill(job, f"the run has {slots} slots now")
            too_many -= 1


def _seniority(job: Job) -> tuple:
    rank = 0 if job.started else 2 if job.queued else 1
    return (rank, job.submitted_at, len(job.job_id), job.job_id)


def _notice(job: Job, reason: str) -> Action:
    """Ask the job to leave, however often it was asked before."""
    return Action(CANCEL, job.role, job.slot, reason, job.job_id)


def _notice_or_kill(job: Job, reason: str) -> Action:
    """Ask the job to leave; the second time kill it."""
    return replace(_notice(job, reason), now=job.cancelled_at is not None)


# ---- what is missing


def _fill(world: World, chains: dict[Place, list[Ended]], now: float) -> Iterator[Action]:
    """The master first, then the lowest free slots, as far as the limits allow."""
    memory = world.memory
    there = [job for job in memory.jobs if not job.over]
    taken = {job.place for job in there if not _may_be_followed(job, now)}
    if len([job for job in there if job.role == MASTER]) > 1:
        taken.add((MASTER, 0))
    unsure = {submission.place for submission in memory.unsure} - taken
    workers = sum(job.role == WORKER for job in memory.jobs)
    workers += sum(role == WORKER for role, _ in unsure)
    pending = sum(job.queued for job in memory.jobs) + len(unsure)
    # But not a successor that was cancelled with the job that it was to follow.
    told = (end for end in memory.ended if end.started_at or end.outcome != Outcome.CANCELLED)
    last = {end.place: end for end in told}
    foreign = [job.job_id for job in memory.jobs if not (world.own(job.role) or job.over)]
    foreign += ["that may have been submitted" for u in memory.unsure if not world.own(u.role)]
    for place in world.places:
        is_worker = place[0] == WORKER
        if place in taken or (is_worker and workers >= world.slots and place not in unsure):
            continue
        failed, is_full = _failing(memory, place), is_worker and pending >= world.max_pending
        waits = (
            foreign and f"the other mode's job {foreign[0]} is still there",
            failed and f"job {failed} has failed, and is leaving",
            "a job may have been submitted already" if place in unsure else "",
            _backing_off(chains.get(place, ()), world.backoff_s, now),
            _put_off(memory, place, now),
            is_full and f"max_pending ({world.max_pending}) jobs are queued",
        )
        if wait := next(filter(None, waits), ""):  # the weightiest
            yield Action(WAIT, *place, wait)
            continue
        ahead = sorted((job for job in memory.jobs if job.place == place), key=_seniority)
        follows = ahead and f"to follow job {ahead[0].job_id} at once"
        reason = follows or _occasion(last.get(place))
        yield Action(SUBMIT, *place, reason, exclude=bad_nodes(memory, now, place[0]))
        workers, pending = workers + is_worker, pending + 1


def _may_be_followed(job: Job, now: float) -> bool:
    """May a second job be in the queue for its place? Behind a trainer at work, or one
    that is to leave, yes. Behind a master near its time limit, too: the next one then
    takes over as soon as it starts, and no worker waits."""
    if job.role == TRAINER:
        return job.started or job.cancelled_at is not None
    if job.role != MASTER or not job.started or job.limit_at is None:
        return False
    whole_s = job.limit_at - (job.started_at or now)
    return job.limit_at - now <= min(NEXT_MASTER_S, whole_s / 4)


def _backing_off(chain: Sequence[Ended], backoff_s: float, now: float) -> str:
    delay_s = min(backoff_s * 2 ** min(len(chain) - 1, 30), MAX_BACKOFF_S)
    if not chain or now >= chain[0].at + delay_s:
        return ""
    return f"waits {delay_s:g} s after failure {len(chain)}: {chain[0].reason}"


def _put_off(memory: Memory, place: Place, now: float) -> str:
    """Why the scheduler is not asked again yet, from the place on that it took no job for."""
    is_before = (place[0] == WORKER, place[1]) < (memory.later_role == WORKER, memory.later_slot)
    return "" if is_before or now >= memory.later_until else memory.later_reason


def _occasion(last: Ended | None) -> str:
    return f"job {last.job_id} {last.outcome}: {last.reason}" if last else "no job is there"
