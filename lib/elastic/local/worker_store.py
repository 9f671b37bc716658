"""The store as an agent and its training process speak to it: leases, offers, asks."""

import json

from elastic.local.scripts import LEASE, OFFER, RELEASE
from elastic.local.store import Ask, Store, reaches_redis


@reaches_redis
class WorkerStore(Store):
    role = "worker"

    # ---- a slot's lease

    def lease(self, slot: int, attempt: int, fields: dict, lease_s: float) -> bool:
        """Take the slot's lease, or renew it. False if a higher attempt has claimed it."""
        words = {"slot": slot, "attempt": attempt, **fields}
        return self._of_lease(LEASE, slot, attempt, int(lease_s * 1000), words) == 1

    def release(self, slot: int, attempt: int) -> None:
        """Give the lease up; nothing happens if a higher attempt has it."""
        self._of_lease(RELEASE, slot, attempt, self._key("wake"))

    def _of_lease(self, script: str, slot: int, attempt: int, how, fields=()) -> int:
        keys = [self._key("slot", slot), self._key("attempts")]
        return self._run(script, keys, [slot, attempt, how], fields)

    # ---- a delta

    def offer(self, slot: int, attempt: int, base: int, header: dict) -> bool:
        """Announce a delta. False: on this server the attempt has no lease, or a higher
        attempt has it."""
        keys = [self._key("offers", base), self._key("attempts")]
        body = self._sealed(keys[0], f"{slot}:{attempt}", header)
        return self._run(OFFER, keys, [slot, attempt, body, self._key("wake")]) == 1

    def offered(self, slot: int, attempt: int, base: int) -> bool:
        """Is the offer still known? A flushed or new server has forgotten it."""
        return bool(self._redis.hexists(self._key("offers", base), f"{slot}:{attempt}"))

    def take_verdict(self, slot: int, attempt: int) -> dict | None:
        """The verdict on this attempt's delta, if there is one; it is removed."""
        key, name = self._key("verdicts"), f"{slot}:{attempt}"
        pipe = self._redis.pipeline(transaction=True)
        body, _ = pipe.hget(key, name).hdel(key, name).execute()
        text = self._unsealed(key, name, body or b"")
        return json.loads(text) if text else None

    # ---- samples

    def ask(self, ask: Ask) -> int:
        """Ask for samples, or (want 0) say which ones are held. Returns the epoch of the
        master that hears it."""
        key, name = self._key("asks"), f"{ask.slot}:{ask.attempt}"
        body = self._sealed(key, name, [ask.sequence, ask.want, ask.held])
        self._redis.hset(key, name, body)
        self._redis.publish(self._key("wake"), f"ask {ask.slot}")
        return self.epoch

    def granted(self, ask: Ask, timeout_s: float) -> list | None:
        """The ranges granted to `ask`, or None if no answer came within `timeout_s`."""
        answer = self._redis.blpop(self._key("grant", ask.slot, ask.attempt), timeout_s)
        sequence, ranges = json.loads(answer[1]) if answer else (None, ())
        return [tuple(each) for each in ranges] if sequence == ask.sequence else None
