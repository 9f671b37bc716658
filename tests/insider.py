"""Who has a worker's password of a run's Redis, and nothing else, doing the worst for a while.

    python tests/insider.py HOST PORT PASSWORD KEY SECONDS [SEED [PAUSE_S]]

It knows where the server is and the run's name and id, as somebody does who has read them from a
network. It holds no slot, and can read no file of the run. One attack after the other, drawn from
a seed, with `PAUSE_S` between two; prints how often each was made, and refused by the server.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import redis

SLOTS, VERSIONS = 4, 150  # that the run may have
WORDS = ["", "x", "../../../../tmp/x", "a\0b", "--me", "-1", "j" * 300, "\x1b]0;OWNED\x07\x1b[2J",
         "[/x]", "[link=https://evil.example]y[/link]", b"\xff\xfe",
         "9" * 400, "nan", "1e999", "n" * 100_000]
NUMBERS = [-1, 0, 1, 2**31, 2**53, 2**61, 10**30, "many", "nan", "inf", b"\xff"]
FIELDS = ["slot", "attempt", "job_id", "node", "pid", "state", "version", "step", "steps_total",
          "tokens_per_s", "loss", "beat", "moved", "joined", "trouble"]
STATES = ["loading", "training", "delivering", "waiting", "blocked", "[/x]"]


class Insider:
    def __init__(self, client: redis.Redis, key: str, seed: int):
        self.client, self.key, self.draw = client, f"elastic:{key}:", random.Random(seed)
        self.run = key

    def owner(self) -> tuple[int, int]:
        return self.draw.randrange(-1, SLOTS), self.draw.choice([1, 1, 1, 2, 3, 99])

    def offers(self) -> str:
        return f"{self.key}offers:{self.draw.randrange(VERSIONS)}"

    def seal(self, text: str) -> bytes:
        """What looks like one."""
        marks = [b"", b"0" * 64, self.draw.randbytes(32).hex().encode()]
        return self.draw.choice(marks) + text.encode()

    # ---- attacks

    def offer_a_delta(self) -> None:
        """All there is, for nothing, in anybody's name; and of any version at once."""
        slot, attempt = self.owner()
        header = {
            "run": self.run, "slot": slot, "attempt": attempt, "job_id": "1", "base": 0,
            "layout": "x", "codec": "none", "steps": 2**61, "tokens": 2**61,
            "samples": self.draw.choice([[], [[0, 0, 10_000]]]), "loss": 0.0, "first_loss": 0.0,
            "fragments": [], "inner": "A" * 10_000, "lr_sum": 1e9,
        }
        pipe = self.client.pipeline(transaction=False)
        for base in range(VERSIONS):
            body = self.seal(json.dumps(header | {"base": base}))
            pipe.hset(f"{self.key}offers:{base}", f"{slot}:{attempt}", body)
        pipe.execute()

    def offer_nonsense(self) -> None:
        name = self.draw.choice([b"\xff", b"", b"a:b", b"0:1", b"9" * 5000 + b":1"])
        self.client.hset(self.offers(), name, self.draw.randbytes(100))

    def forget_offers(self) -> None:
        for base in range(VERSIONS):
            self.client.unlink(f"{self.key}offers:{base}")

    def ask_for_others(self) -> None:
        """So that what they hold is given to others."""
        slot, attempt = self.owner()
        ask = self.seal(json.dumps([self.draw.randrange(1000), 10_000, []]))
        self.client.hset(f"{self.key}asks", f"{slot}:{attempt}", ask)

    def forget_asks(self) -> None:
        self.client.unlink(f"{self.key}asks")

    def take_grants(self) -> None:
        slot, attempt = self.owner()
        self.client.unlink(f"{self.key}grant:{slot}:{attempt}")

    def tell_a_verdict(self) -> None:
        """So that work is thrown away."""
        slot, attempt = self.owner()
        verdict = json.dumps({"base": self.draw.randrange(VERSIONS), "reason": "samples: x"})
        body = self.seal(self.draw.choice(["{}", "no json", verdict, verdict]))
        self.client.hset(f"{self.key}verdicts", f"{slot}:{attempt}", body)

    def forge_a_lease(self) -> None:
        """One that never ends, for a worker that is none or another's."""
        slot, attempt = self.owner()
        lease = {"slot": slot, "attempt": attempt, "job_id": "1", "node": "n", "pid": -1,
                 "state": self.draw.choice(STATES), "version": 10**6, "step": 9, "steps_total": 9,
                 "tokens_per_s": 1e300, "loss": 0.0, "beat": 2**52, "moved": 2**52,
                 "joined": 0.0}
        for _ in range(self.draw.randrange(3)):
            lease[self.draw.choice(FIELDS)] = self.draw.choice([*WORDS, *NUMBERS])
        self.client.hset(f"{self.key}slot:{slot}", mapping=lease)

    def spoil_a_lease(self) -> None:
        slot, _ = self.owner()
        field = self.draw.choice([*FIELDS, b"\xff", ""])
        self.client.hset(f"{self.key}slot:{slot}", field, self.draw.choice([*WORDS, *NUMBERS]))

    def end_a_lease(self) -> None:
        self.client.unlink(f"{self.key}slot:{self.owner()[0]}")

    def fence(self) -> None:
        """Every slot, by attempts that there are not."""
        for slot in range(SLOTS):
            self.client.hset(f"{self.key}attempts", slot, self.draw.choice([2, 999_999, 2**61]))

    def invent_slots(self) -> None:
        first = self.draw.choice([SLOTS, 9_000, 10**9])
        attempts = {first + number: 1 for number in range(100)} | {b"\xff": b"\xff", "x": "many"}
        self.client.hset(f"{self.key}attempts", mapping=attempts)

    def forget_attempts(self) -> None:
        self.client.unlink(f"{self.key}attempts")

    def fill_memory(self) -> None:
        """With what nobody reads, until there is no room for a heartbeat."""
        key = f"{self.key}offers:{self.draw.randrange(10**6)}"
        self.client.hset(key, "x", self.draw.randbytes(1 << 20))

    def cry_out(self) -> None:
        words = [self.draw.choice([b"leave 0", b"offer \xff", b"x" * 1000]) for _ in range(300)]
        pipe = self.client.pipeline(transaction=False)
        for word in words:
            pipe.publish(f"{self.key}wake", word)
        pipe.execute()

    def play_the_master(self) -> None:
        line = self.draw.choice([
            ["HSET", f"{self.key}master", "version", "9"], ["DEL", f"{self.key}master"],
            ["PUBLISH", f"{self.key}ctl", "stop"], ["RPUSH", f"{self.key}grant:0:1", "[1, []]"],
            ["FLUSHALL"], ["SHUTDOWN"], ["CONFIG", "GET", "*"], ["ACL", "LIST"],
            ["KEYS", "*"], ["DEBUG", "SLEEP", "9"], ["CLIENT", "KILL", "TYPE", "normal"],
        ])
        self.client.execute_command(*line)


ATTACKS: list[Callable[[Insider], None]] = [
    value for name, value in vars(Insider).items()
    if callable(value) and not name.startswith("_") and name not in ("owner", "offers", "seal")
]


def main() -> None:
    host, port, password, key, certificate, seconds, *more = sys.argv[1:]
    seed, pause_s = int(more[0]) if more else 1, float(more[1]) if more[1:] else 0.0
    client = redis.Redis(host, int(port), username="worker", password=password, ssl=True,
                         ssl_ca_data=certificate)
    insider, until = Insider(client, key, seed), time.monotonic() + float(seconds)
    tried, refused = Counter(), Counter()
    while time.monotonic() < until:
        attack = insider.draw.choice(ATTACKS)
        tried[attack.__name__] += 1
        time.sleep(pause_s)
        try:
            attack(insider)
        except redis.RedisError:
            refused[attack.__name__] += 1
    print(json.dumps({"tried": tried, "refused": refused}))


if __name__ == "__main__":
    main()
