"""A run in plain words: a sentence about it, its events, what a scheduler's reason means.
Pure.

Text from the dictionaries of `status.observe` and from events. How the text looks on a
screen or on a page is up to views.py and report.py.
"""

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic.base import units
from elastic.run.ledger import count
from elastic.run.records import Delta


class EventKind(enum.StrEnum):
    """What events.jsonl tells of, and in which words."""

    words: str

    def __new__(cls, kind: str, words: str) -> "EventKind":
        self = str.__new__(cls, kind)
        self._value_, self.words = kind, words
        return self

    SUBMIT = "submit", "{who} is queued as job {job_id}: {reason}"
    CANCEL = "cancel", "{who} is cancelled: {reason}"
    START = "start", "{who} starts on {node}"
    JOIN = "join", "slot {slot} is there, on {node} (attempt {attempt})"
    NOTICE = "notice", "{who} is told to leave ({signal})"
    PREEMPT = "preempt", "{who} had to leave: {reason}; {steps} steps in all"
    LEAVE = "leave", "{who} left: {reason}"
    LOST = "lost", "{who} is lost: {node} was silent after step {steps}"
    END = "end", "job {job_id} of {who} ended ({outcome}): {reason}"
    RESTART = "restart", "{who} starts again in its job: {reason}"
    HANG = "hang", "{who} showed no life for {seconds} s and was killed"
    DELTA = "delta", "slot {slot} delivered {steps} steps on version {base}"
    LAST_CALL = "last-call", "last call of round {version}: {reason}"
    OUTER_STEP = "outer-step", "version {version} from {workers}, loss {loss}"
    REJECT = "reject", "a delta of slot {slot} is refused: {reason}"
    TAKEN_BACK = "taken-back", "version {version} was taken back: {reason}"
    INNER_STATE = "inner-state", "inner state of slot {slot}: {reason}"
    MASTER = "master", "master {epoch} is at work on {node}"
    REDIS_LOST = "redis-lost", "the Redis of master {epoch} is gone: {reason}"
    SCALE = "scale", "wanted from now on: {min} to {max} GPUs, mode {mode}"
    STOP = "stop", "elastic-stop was called"
    FAIL = "fail", "the run failed: {reason}"
    DONE = "done", "the run is done: {done}"
    MODE = "mode", "mode {mode} from version {version}"
    CHAOS = "chaos", "fault {fault}: {what}"
    WARNING = "warning", "warning: {reason}"
    DISK = "disk", "the disk refused a write: {reason}"
    NODES_LOST = "nodes-lost", "nodes lost: {nodes}; {left} are left"
    NODES_RELEASED = "nodes-released", "{nodes} nodes given back; {left} are left"
    RESTORE = "restore", "training goes on from {from} on {world} GPUs"
    CHECKPOINT_REFUSED = "checkpoint-refused", "a checkpoint was not used: {reason}"
    CHECKPOINT_FAILED = "checkpoint-failed", "the checkpoint of step {step} was not saved: {reason}"
    NOT_FINITE = "not-finite", "not finite at {reason}"


AS_WANTED = "nothing: all is as wanted"  # what the next pass will do
STARTED = "started, for {min} to {max} GPUs on {scheduler}"  # of a run, not of a job
CRASHED = "{who} failed: {reason}"  # of a job that says itself that it is lost

# What a job waits for (the words of Slurm, as a pattern), and what to do about it.
PENDING = (
    ("Resources", "no node is free; it starts when one is"),
    ("Priority", "others come first; nothing to do"),
    ("BeginTime", "it was requeued and starts in a minute or two"),
    ("(QOS|Assoc)MaxWall|(Partition|QOS)TimeLimit", "longer than allowed: lower slurm.time"),
    (".*PerJob", "a job is too large: lower --max in sync mode, else slurm.gpus_per_worker"),
    ("(QOS|Assoc)Grp.*Minutes", "the account's hours are used up: ask for more"),
    ("QOSMax|AssocMax|MaxJobs|MaxSubmit", "your limit is reached: lower --max, or ask for more"),
    ("QOSGrp|AssocGrp", "your group's limit is reached: it waits for colleagues"),
    ("QOSMin|.*MinGRES", "the QOS wants larger jobs: choose another slurm.qos"),
    ("PartitionNodeLimit|PartitionConfig", "more than the partition gives: see slurm.partition"),
    ("Partition(Down|Inactive)", "the partition is closed: ask its admin"),
    (".*maintenance", "it would take longer: see --time-min in INSTALL.md"),
    ("ReqNodeNotAvail|NodeDown|Reservation", "nodes are down, drained or reserved: ask the admin"),
    ("BadConstraints", "no node fits: see slurm.gpus_per_node and slurm.options"),
    ("Invalid(Account|QOS)|(Account|QOS)NotAllowed", "not yours: see slurm.account, slurm.qos"),
    ("JobHeldUser", "held by its owner: release it, or cancel it and it is replaced"),
    ("JobHeldAdmin", "an admin holds it: ask why"),
    (".*held|DependencyNeverSatisfied", "held: elastic-reconcile replaces it"),
    ("Dependency", "it waits for another job"),
    ("Licenses", "no licence is free"),
)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What a terminal obeys, or what turns the direction of reading: C0 but for tab and end of
# line, DEL, C1, marks of direction, separators, halves of characters.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e"
                     "\u2066-\u2069\ud800-\udfff]")
# As torchrun begins a line, and Python one of a group of exceptions.
RANK = re.compile(r"^\[rank\d+\]: ?|^ *[|+] ?")
ERROR = re.compile(r"(?!srun: )\S.*(\berror: |\[Errno |: command not found)|\w*(Error|Exception)\b")
OURS = re.compile(r"^elastic\.[\w.]+: ")  # the class of an error that says all
LAUNCHED = re.compile(r"ChildFailedError|CalledProcessError")  # torchrun's, of its ranks' crash


def way_out(reason: str) -> str:
    """What a pending job's reason means for its owner; empty for one that is not
    known."""
    return next((words for pattern, words in PENDING if re.match(pattern, reason)), "")


def event_words(event: Mapping[str, Any]) -> str:
    """One event as a sentence; an event of an unknown kind as its fields."""
    try:
        kind = EventKind(event.get("kind"))
    except ValueError:
        fields = [f"{name}={brief(v)}" for name, v in event.items() if name not in ("time", "kind")]
        return one_line(f"{event.get('kind', '?')} {' '.join(fields)}")
    words = kind.words
    if kind == EventKind.SUBMIT and "role" not in event:
        words = STARTED
    elif kind == EventKind.LOST and "reason" in event:
        words = CRASHED
    if "steps" not in event:  # of a program whose steps nobody knows
        words = words.removesuffix("; {steps} steps in all")
    if event.get("loss") is None:  # nobody told it
        words = words.removesuffix(", loss {loss}")
    fields = {name: brief(value) for name, value in {**event, **_derived(event)}.items()}
    return words.format_map(defaultdict(lambda: "?", fields))


def _derived(event: Mapping[str, Any]) -> dict[str, Any]:
    """What sentences need beside the fields."""
    again = "what the program itself finds" if event.get("attempt", 1) > 1 else "the beginning"
    step = f"step {event['step']}" if "step" in event else again
    derived = {
        "who": who(event),
        "done": event.get("reason", "nothing is left to train"),
        "from": event.get("resume") or step,
    }
    if "workers" in event:
        derived["workers"] = counted(event["workers"], "worker")
    return derived


def who(event: Mapping[str, Any]) -> str:
    """The place that an event, or a job, is about."""
    role, slot = event.get("role", "worker"), event.get("slot", "?")
    return f"slot {slot}" if role == "worker" else f"the {role}"


def brief(value: object) -> str:
    """A value of an event in at most 100 characters."""
    return one_line(f"{value:.4g}" if isinstance(value, float) else str(value), 100)


def plain(words: Any) -> Any:
    """Anybody's words (a string, or data with strings in it) as a terminal may show them:
    without colours, and with a mark where a control character was."""
    if isinstance(words, str):
        return _OBEYED.sub("\ufffd", _COLOUR.sub("", words))
    if isinstance(words, dict):
        return {plain(name): plain(value) for name, value in words.items()}
    return [plain(each) for each in words] if isinstance(words, list | tuple) else words


def one_line(text: str, most: int = 300) -> str:
    """Anybody's words in one line of at most `most` characters."""
    text = plain(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---- the sentence


def sentence(seen: Mapping[str, Any], upcoming: str, now: float) -> str:
    """A run in one sentence: what it does, how far and how fast, what it waits for, and
    what the next pass will do (`upcoming`; "" if all is as wanted)."""
    if seen["state"] == "running" and seen.get("program"):
        return seen["program"]
    following = upcoming and f"next: {upcoming}"
    if seen["state"] not in ("running", "waiting"):
        is_told = seen["state"] in ("failed", "unknown")
        ended = f"{seen['state']}: {seen['reason']}" if is_told else seen["state"]
        ended = ", ".join([ended, *_progress(seen)])
        return f"{ended}; {following}" if following and seen["state"] != "done" else ended
    gpus = f"{_doing(seen)} {seen['gpus']} of {seen['min']}..{seen['max']} GPUs"
    doing = ", ".join([gpus, *_progress(seen)])
    return "; ".join(filter(None, [doing, seen.get("trouble"), _pending(seen, now), following]))


def _doing(seen: Mapping[str, Any]) -> str:
    """What the workers do, if they all do the same; else those that train count."""
    states = {"failing" if each.get("trouble") else each["state"] for each in seen["workers"]}
    words = {"unknown": "nobody says how it goes, on", "loading": "starting on",
             "failing": "failing on", "stalled": "standing still, with", "": "waiting, with"}
    return words.get(", ".join(states), "training on")


def _progress(seen: Mapping[str, Any]) -> list[str]:
    unit = "step" if seen["mode"] == "sync" else "round"
    words = [f"{unit} {seen['version']}"] if seen["version"] is not None else []
    if seen["loss"] is not None:
        words.append(f"loss {seen['loss']:.2f}")
    if seen["state"] == "running" and seen["tokens_per_s"]:
        words.append(f"{si(seen['tokens_per_s'])} {seen['unit']}/s")
    return words


def awaited(jobs: Iterable[dict], workers: Sequence[dict]) -> list[dict]:
    """The pending jobs that hold the run up. A trainer that waits behind one at work does
    not."""
    pending = [job for job in jobs if job["state"] == "PENDING"]
    return [job for job in pending if job["role"] != "trainer" or not workers]


def _pending(seen: Mapping[str, Any], now: float) -> str:
    waiting = awaited(seen["jobs"], seen["workers"])
    if not waiting:
        return ""
    since = min((job["submitted"] for job in waiting if job["submitted"]), default=now)
    reason = waiting[0]["reason"] or "no reason yet"
    return f"{counted(len(waiting), 'job')} pending for {span(now - since)}: {reason}"


def unit(deltas: Iterable[Delta], progress: Mapping[str, Any] | None = None) -> str:
    """What a run counts: "samples" where its task has no tokens(), else "tokens". Known
    by the deltas of a version, or by the last step of sync mode."""
    trained = [(delta.tokens, count(delta.samples)) for delta in deltas]
    if not trained and progress:
        trained = [(progress["tokens"], progress.get("samples", (0, 0))[1])]
    return "samples" if any(tokens == samples > 0 for tokens, samples in trained) else "tokens"


def last_error(said: str) -> str:
    """Why a program died, by its last words: the line of its newest exception, else the
    last line that calls itself an error; "" if there is neither."""
    lines = [RANK.sub("", line) for line in said.splitlines()]
    starts = [at for at, line in enumerate(lines) if re.match("[A-Za-z ]*Traceback", line)]
    ends = (lines[at + 1 :] for at in starts)
    named = [next((line for line in end if line and not line[0].isspace()), "") for end in ends]
    named = named or [line for line in lines if ERROR.match(line)]
    first_hand = [line for line in named if not LAUNCHED.search(line)]
    return one_line(OURS.sub("", (first_hand or named or [""])[-1]))


def counted(number: int, noun: str) -> str:
    """1 job, 2 jobs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(seconds: float) -> str:
    """A length of time in one unit or two: 12 s, 4 min, 3 h 20 min, 2 d 5 h."""
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return f"{max(0.0, seconds):.0f} s"
    days, hours = minutes // 1440, minutes // 60 % 24
    parts = [(days, "d"), (hours, "h"), (0 if days else minutes % 60, "min")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def si(number: float | None) -> str:
    """A count in four characters or so, if it is known."""
    return "-" if number is None else units.si(number)
