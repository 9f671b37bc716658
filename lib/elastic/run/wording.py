"""A run in plain words: a sentence about it, its events, what a scheduler's reason means. Pure.

Pure text, from the dictionaries of `status.observe` and from events; what it looks like on a
screen or a page is up to views.py and report.py.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

EVENTS = {
    "submit": "{who} is queued as job {job_id}: {reason}",
    "cancel": "{who} is cancelled: {reason}",
    "start": "{who} starts on {node}",
    "join": "slot {slot} is there, on {node} (attempt {attempt})",
    "notice": "{who} is told to leave ({signal})",
    "preempt": "{who} had to leave: {reason}; {steps} steps in all",
    "leave": "{who} left: {reason}",
    "lost": "{who} is lost: {node} was silent after step {steps}",
    "crash": "{who} failed: {reason}",
    "end": "job {job_id} of {who} ended ({outcome}): {reason}",
    "restart": "{who} starts again in its job: {reason}",
    "hang": "{who} showed no life for {seconds} s and was killed",
    "delta": "slot {slot} delivered {steps} steps on version {base}",
    "last-call": "last call of round {version}: {reason}",
    "outer-step": "version {version} from {workers}, loss {loss}",
    "reject": "a delta of slot {slot} is refused: {reason}",
    "taken-back": "version {version} was taken back: {reason}",
    "master": "master {epoch} is at work on {node}",
    "redis-lost": "the Redis of master {epoch} is gone: {reason}",
    "scale": "wanted from now on: {min} to {max} GPUs, mode {mode}",
    "stop": "elastic-stop was called",
    "fail": "the run failed: {reason}",
    "done": "the run is done: {done}",
    "chaos": "fault {fault}: {what}",
    "warning": "warning: {reason}",
    "disk": "the disk refused a write: {reason}",
    "mode": "mode {mode} from version {version}",
    "nodes-lost": "nodes lost: {nodes}; {left} are left",
    "restore": "training goes on from {from} on {world} GPUs",
}
STARTED = "started, for {min} to {max} GPUs on {scheduler}"

# What a job waits for (the words of Slurm, as a pattern), and what to do about it.
PENDING = (
    ("Resources", "no node is free; it starts when one is"),
    ("Priority", "others come first; nothing to do"),
    ("BeginTime", "it was requeued and starts in a minute or two"),
    ("(QOS|Assoc)MaxWall", "longer than allowed: lower slurm.time"),
    ("QOSMax|AssocMax|MaxJobs|MaxSubmit", "your limit is reached: lower --max, or ask for more"),
    ("QOSGrp|AssocGrp", "your group's limit is reached: it waits for colleagues"),
    ("QOSMin|.*MinGRES", "the QOS wants larger jobs: choose another slurm.qos"),
    ("PartitionTimeLimit|QOSTimeLimit", "longer than allowed: lower slurm.time"),
    ("PartitionNodeLimit|PartitionConfig", "more than the partition gives: see slurm.partition"),
    ("Partition(Down|Inactive)", "the partition is closed: ask its admin"),
    ("ReqNodeNotAvail|NodeDown|Reservation", "nodes are down, drained or reserved: ask the admin"),
    ("BadConstraints", "no node fits: see slurm.gpus_per_node and slurm.options"),
    ("Invalid(Account|QOS)", "not yours to use: see slurm.account and slurm.qos"),
    ("JobHeldUser", "held by its owner: release it, or cancel it and it is replaced"),
    ("JobHeldAdmin|.*held", "held: elastic-reconcile replaces it"),
    ("DependencyNeverSatisfied", "what it waits for will never come: cancel it"),
    ("Dependency", "it waits for another job"),
    ("Licenses", "no licence is free"),
)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What a terminal obeys, or what turns the direction of reading: C0 but for tab and end of line,
# DEL, C1, marks of direction, separators, halves of characters.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e"
                     "\u2066-\u2069\ud800-\udfff]")  # fmt: skip
RANK = re.compile(r"^\[rank\d+\]: ?")  # as torchrun begins a line
ERROR = re.compile(r"(?!srun: )\S.*(\berror: |\[Errno |: command not found)|\w*(Error|Exception)\b")
LAUNCHED = re.compile(r"ChildFailedError|CalledProcessError")  # torchrun's, of its ranks' crash


def way_out(reason: str) -> str:
    """What a pending job's reason means for its owner; empty for one that is not known."""
    return next((words for pattern, words in PENDING if re.match(pattern, reason)), "")


def event_words(event: Mapping[str, Any]) -> str:
    """One event as a sentence; one of an unknown kind as its fields."""
    kind = event.get("kind", "?")
    if kind not in EVENTS:
        rest = (f"{name}={brief(v)}" for name, v in event.items() if name not in ("time", "kind"))
        return one_line(" ".join([str(kind), *rest]))
    if kind == "lost" and "reason" in event:  # it said so itself
        kind = "crash"
    words = EVENTS[kind] if kind != "submit" or "role" in event else STARTED
    if "steps" not in event:  # of a program whose steps nobody knows
        words = words.removesuffix("; {steps} steps in all")
    fields = {name: brief(value) for name, value in {**event, **_derived(event)}.items()}
    return words.format_map(defaultdict(lambda: "?", fields))


def _derived(event: Mapping[str, Any]) -> dict[str, Any]:
    """What sentences need beside the fields."""
    again = "what the program itself finds" if event.get("attempt", 1) > 1 else "the beginning"
    step = f"step {event['step']}" if "step" in event else again
    found = {"who": who(event), "done": event.get("reason", "nothing is left to train"),
             "from": event.get("resume") or step}  # fmt: skip
    if "workers" in event:
        found["workers"] = counted(event["workers"], "worker")
    return found


def who(event: Mapping[str, Any]) -> str:
    """The place that an event, or a job, is about."""
    role, slot = event.get("role", "worker"), event.get("slot", "?")
    return f"slot {slot}" if role == "worker" else f"the {role}"


def brief(value: object) -> str:
    """A value of an event in at most 100 characters."""
    return one_line(f"{value:.4g}" if isinstance(value, float) else str(value), 100)


def plain(words: Any) -> Any:
    """Anybody's words (a string, or data with strings in it) as a terminal may show them: without
    colours, and with a mark where a control character was."""
    if isinstance(words, str):
        return _OBEYED.sub("\ufffd", _COLOUR.sub("", words))
    if isinstance(words, dict):
        return {plain(name): plain(value) for name, value in words.items()}
    return [plain(each) for each in words] if isinstance(words, list | tuple) else words


def one_line(text: str, most: int = 300) -> str:
    """Anybody's words in at most so many characters."""
    text = plain(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---- the sentence


def sentence(seen: Mapping[str, Any], now: float) -> str:
    """A run in one sentence: what it does, how far and how fast, and what it waits for."""
    if seen["state"] == "running" and seen.get("program"):
        return seen["program"]
    if seen["state"] not in ("running", "waiting"):
        ended = f"failed: {seen['reason']}" if seen["state"] == "failed" else seen["state"]
        return ", ".join([ended, *_progress(seen)])
    gpus = f"{_doing(seen)} {seen['gpus']} of {seen['min']}..{seen['max']} GPUs"
    following = "" if seen["next"].startswith("nothing: ") else f"next: {seen['next']}"
    doing = ", ".join([gpus, *_progress(seen)])
    return "; ".join(filter(None, [doing, seen.get("trouble"), _pending(seen, now), following]))


def _doing(seen: Mapping[str, Any]) -> str:
    """What the workers do, if they all do the same; else those that train count."""
    states = {"failing" if each.get("trouble") else each["state"] for each in seen["workers"]}
    words = {"unknown": "nobody says how it goes, on", "loading": "starting on",
             "failing": "failing on"}  # fmt: skip
    usual = "training on" if states else "waiting, with"
    return words.get(min(states), usual) if len(states) == 1 else usual


def _progress(seen: Mapping[str, Any]) -> list[str]:
    unit = "step" if seen["mode"] == "sync" else "round"
    words = [f"{unit} {seen['version']}"] if seen["version"] is not None else []
    if seen["loss"] is not None:
        words.append(f"loss {seen['loss']:.2f}")
    if seen["state"] == "running" and seen["tokens_per_s"]:
        words.append(f"{si(seen['tokens_per_s'])} {seen['unit']}/s")
    return words


def awaited(seen: Mapping[str, Any]) -> list[dict]:
    """The pending jobs that matter: a successor in sync mode waits for the end of a job at work."""
    pending = [job for job in seen["jobs"] if job["state"] == "PENDING"]
    return [job for job in pending if job["role"] != "trainer" or not seen["workers"]]


def _pending(seen: Mapping[str, Any], now: float) -> str:
    waiting = awaited(seen)
    if not waiting:
        return ""
    since = min((job["submitted"] for job in waiting if job["submitted"]), default=now)
    reason = waiting[0]["reason"] or "no reason yet"
    return f"{counted(len(waiting), 'job')} pending for {span(now - since)}: {reason}"


def unit(commit: Mapping[str, Any], progress: Mapping[str, Any] | None = None) -> str:
    """What "tokens" counts in a run: "samples" where its task has no tokens(). By the deltas of a
    version, or by the last step of sync mode."""
    deltas = [(each["tokens"], sum(stop - start for *_, start, stop in each["samples"]))
              for each in commit.get("deltas", ())]  # fmt: skip
    if not deltas and progress:
        deltas = [(progress["tokens"], progress.get("samples", (0, 0))[1])]
    return "samples" if any(tokens == samples > 0 for tokens, samples in deltas) else "tokens"


def last_error(said: str) -> str:
    """The line of a program's last words that says why it died: that of the newest exception, else
    one that calls itself an error; "" if there is none."""
    lines = [RANK.sub("", line) for line in said.splitlines()]
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    ends = (lines[at + 1 :] for at in starts)
    named = [next((line for line in end if line and not line[0].isspace()), "") for end in ends]
    named = named or [line for line in lines if ERROR.match(line)]
    first_hand = [line for line in named if not LAUNCHED.search(line)]
    return one_line((first_hand or named or [""])[-1])


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
    """A count in four characters or so: 950, 12.3k, 4.56M, 7.89G."""
    if number is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # or it would print as 1e+03
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
