"""The store as the run's master speaks to it: epochs, fences, verdicts, grants."""

import contextlib
import json
from collections.abc import Iterable

from elastic.base.errors import Fenced
from elastic.local import scripts
from elastic.local.store import MALFORMED, Ask, Forgetful, Store, reaches_redis

GRANT_KEPT_MS = 60_000


@reaches_redis
class MasterStore(Store):
    role = "master"

    # ---- itself, and who is fenced

    def load_scripts(self) -> None:
        """Load all scripts into the server: workers call them by their hashes."""
        for text in scripts.ALL:
            self._redis.script_load(text)

    def set_master(self, epoch: int, fields: dict, wake: str = "") -> None:
        """Change the master's hash and announce `wake`. Raises Fenced under a higher
        epoch."""
        keys = [self._key("master"), self._key("proof")]
        words = [epoch, self._key("ctl"), wake, self.proof]
        try:
            is_done = self._run(scripts.MASTER, keys, words, fields)
        except Forgetful:
            self.load_scripts()
            is_done = self._run(scripts.MASTER, keys, words, fields)
        if not is_done:
            raise Fenced(f"master epoch {epoch}: a higher one has taken over")

    def set_attempts(self, attempts: dict[int, int]) -> None:
        """Tell a server the attempts that the run directory knows, so that it fences older
        ones. A worker that has just claimed its lease, and is not known there yet, claims it
        again."""
        key = self._key("attempts")
        pipe = self._redis.pipeline(transaction=True).delete(key)
        for slot, attempt in attempts.items():
            pipe.hset(key, slot, attempt)
        pipe.execute()

    # ---- deltas

    def offers(self, bases: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """Base version -> {"slot:attempt": header as JSON}. Offers without the run's seal
        are removed."""
        found = {}
        for base, table in self._tables("offers", list(bases)).items():
            key = self._key("offers", base)
            sealed = {name.decode("latin-1"): body for name, body in table.items()}
            texts = {name: self._unsealed(key, name, sealed[name]) for name in sealed}
            found[base] = {name: text for name, text in texts.items() if text}
            self.drop_offers(base, sealed.keys() - found[base].keys())
        return found

    def drop_offers(self, base: int, names: Iterable[str]) -> None:
        """Forget offers by name ("slot:attempt"); one that came meanwhile stays."""
        names = [name.encode("latin-1") for name in names]
        if names:
            self._redis.hdel(self._key("offers", base), *names)

    def set_verdict(self, name: str, verdict: dict) -> None:
        """Say why the newest delta of "slot:attempt" is not merged."""
        key = self._key("verdicts")
        self._redis.hset(key, name.encode("latin-1"), self._sealed(key, name, verdict))

    # ---- samples

    def take_asks(self) -> list[Ask]:
        """All waiting requests, removed. One that gets lost is asked again by its
        worker."""
        pipe = self._redis.pipeline(transaction=True)
        key, asks = self._key("asks"), []
        for name, body in pipe.hgetall(key).delete(key).execute()[0].items():
            with contextlib.suppress(*MALFORMED):
                text = self._unsealed(key, name.decode(), body)
                sequence, want, held = json.loads(text)
                ranges = tuple((int(e), int(start), int(stop)) for e, start, stop in held)
                who = map(int, name.split(b":"))
                asks.append(Ask(*who, int(sequence), int(want), ranges))
        return asks

    def grant(self, grants: dict[tuple[int, int], tuple[int, list]]) -> None:
        """(slot, attempt) -> (sequence of the ask, ranges)."""
        pipe = self._redis.pipeline(transaction=False)
        for (slot, attempt), answer in grants.items():
            key = self._key("grant", slot, attempt)
            pipe.rpush(key, json.dumps(answer)).pexpire(key, GRANT_KEPT_MS)
        pipe.execute()

    # ---- everything

    def forget_everything(self) -> int:
        """Remove every key of the run, as a server that was replaced has none."""
        keys = list(self._redis.scan_iter(self._prefix + "*", count=1000))
        return self._redis.unlink(*keys) if keys else 0
