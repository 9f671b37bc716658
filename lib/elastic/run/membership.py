"""Which workers are there: the state of a slot, from its lease alone. Pure.

    live     beating, and its inner step advances (or it waits for others, or is starting up)
    stalled  beating, but the step of a training worker has not moved for `stall_after_s`, nor for
             as long as three of its steps take
    blocked  its writes are refused (a full disk): no round waits for it, and it goes on trying
    lost     no lease: it ran out (Redis dropped the key) or was given up

All times are Redis TIME: `beat`, `moved` and `now`.
"""

import re
from dataclasses import dataclass, replace

STATES = ("loading", "training", "validating", "delivering", "waiting", "blocked", "stalled")
NAME = re.compile(r"\w[\w.@:+-]{0,254}", re.ASCII)  # of a job or a node: no path, no option
MOST = 2**53  # of any number
MOST_TROUBLE = 300  # characters
STALL_STEPS = 3  # long steps that a worker may take before it counts as stalled
WORKING = ("training", "delivering", "waiting")  # states of a worker that delivers, now or soon


@dataclass(frozen=True)
class Slot:
    """A slot's lease as the store returns it. Times are Redis TIME in seconds."""

    slot: int
    attempt: int
    job_id: str
    node: str
    pid: int
    state: str  # loading | training | validating | delivering | waiting | blocked
    version: int
    step: int  # inner steps of this round
    steps_total: int  # inner steps of this attempt
    tokens_per_s: float
    loss: float
    beat: float
    moved: float  # when `step` or `state` last changed
    joined: float
    trouble: str = ""  # why it is blocked
    step_s: float = 0.0  # that an inner step takes; 0: not known yet

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> "Slot | None":
        """The slot in a Redis hash; None if the hash is not a slot's. Anybody with a
        worker's password can have written it."""
        try:
            kinds = cls.__annotations__.items()
            found = cls(**{name: kind(fields[name]) for name, kind in kinds if name in fields})
        except (ValueError, TypeError):
            return None
        sound = all(map(NAME.fullmatch, (found.job_id, found.node))) and found.state in STATES
        # The loss may be any number: nothing is decided by it.
        numbers = [v for n, v in vars(found).items() if type(v) is not str and n != "loss"]
        if not sound or not all(-1 <= each < MOST for each in numbers):
            return None
        return replace(found, trouble=found.trouble[:MOST_TROUBLE])


def live(
    slots: dict[int, Slot], attempts: dict[int, int], now: float, most_s: float
) -> dict[int, Slot]:
    """The leases of the newest attempts, without any that was last renewed more than
    `most_s` ago. A worker's lease expires long before that; such a lease was written
    without an expiry."""
    return {number: slot for number, slot in slots.items()
            if slot.attempt == attempts.get(number) and abs(now - slot.beat) <= most_s}


def state(slot: Slot, now: float, stall_after_s: float) -> str:
    """The worker's state as people see it: its own, or "stalled"."""
    most_s = max(stall_after_s, STALL_STEPS * slot.step_s)
    is_still = slot.state in ("training", "delivering") and now - slot.moved > most_s
    return "stalled" if is_still else slot.state


def expected(slots: list[Slot], now: float, stall_after_s: float) -> dict[int, Slot]:
    """The workers a round may wait for: live, and past their start-up."""
    return {s.slot: s for s in slots if state(s, now, stall_after_s) in WORKING}
