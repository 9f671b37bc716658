"""The store: coordination through Redis. The only importer of redis.

Redis is fast, not durable: every key can be rebuilt from the run directory and from what
live workers say again, so a flushed or replaced server costs a moment and no work.

key (after `elastic:RUN:ID:`)
                            type     content
master                      hash     epoch, version, call (that is being called), ...
slot:N                      hash/TTL the lease and last heartbeat of a slot
attempts                    hash     slot -> newest attempt; a lower one is fenced
offers:V                    hash     "slot:attempt" -> header of a delta on version V
verdicts                    hash     "slot:attempt" -> why its delta was rejected
asks                        hash     "slot:attempt" -> sample ranges wanted and held
grant:SLOT:ATTEMPT          list     sample ranges granted to the newest ask; expires
proof                       string   what only the run's own master can have put there
ctl                         pub/sub  wake-ups for all: version V, last-call V, stop
wake                        pub/sub  wake-ups for the master alone: offer, ask, leave

There is a class for each who speaks to it, which connects as the user that it calls its
`role` (a server of the site's has the user and the password of its URL instead):

    Store         reader   whoever only looks
    WorkerStore   worker   a worker's processes: leases, offers, asks
    MasterStore   master   the run's master: verdicts, grants, epochs

What a role may do is in redis_server.py.

Offers, verdicts and asks are sealed with a key that no server ever gets: so a worker's
password alone does not suffice to make or change one. What is not sealed is dropped.

Somebody else may have started a server on the port of one that is gone. So passwords are
for one server only (RunDir.password), and a server is first asked for the proof.

Pub/sub only wakes; what counts is in the keys. Times are Redis TIME. Changes that must be
checked and made in one step are the few Lua scripts of scripts.py.
"""

import contextlib
import functools
import hashlib
import hmac
import inspect
import itertools
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from elastic.base.errors import ElasticError, Fenced, TryAgain
from elastic.base.keys import URL, parse, shown_url
from elastic.local import scripts
from elastic.run.membership import Slot
from elastic.run.rundir import Endpoint, RunDir

GRANT_KEPT_MS = 60_000
MOST_WORDS = 10_000  # wake-ups that are heard at once
MARK_BYTES = 64  # of a seal
# X509_V_FLAG_NO_CHECK_TIME: this node's clock may be behind the master's.
ANY_TIME = 0x200000
# What parsing nonsense raises.
MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)


class Useless(TryAgain):
    """A server that answers, and cannot do what it is there for: it is full, or busy with
    a script, or a key has another type."""


def reaches_redis(cls: type) -> type:
    """Have every public method turn a failure to get an answer into TryAgain."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _or_try_again(method))
    return cls


def _or_try_again(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except redis.exceptions.AuthenticationError as error:
            what = f"Redis at {self.where} refused the password: {error}"
            raise TryAgain(what) from None
        except redis.exceptions.NoPermissionError as error:
            raise ElasticError(f"Redis at {self.where} refuses: {error}") from None
        except redis.exceptions.ResponseError as error:
            raise Useless(f"Redis at {self.where} is of no use: {error}") from None
        except redis.exceptions.RedisError as error:
            what = f"cannot reach Redis at {self.where}: {error}"
            raise TryAgain(what, "is the master job running? elastic-status RUN") from None

    return wrapper


class Ask(NamedTuple):
    """A worker's request for samples: `want` more, beside those it holds. `sequence`
    numbers it."""

    slot: int
    attempt: int
    sequence: int
    want: int
    held: tuple[tuple[int, int, int], ...]


@reaches_redis
class Store:
    """One run's keys on one server, for whoever only looks. `epoch`: of the master that
    said where the server is."""

    role = "reader"
    seal = ""  # the key that a worker and the master of a run share
    proof = ""  # by which a server is known as this run's own; "": by nothing

    def __init__(self, client: redis.Redis, run_key: str, where: str, epoch: int = 0):
        self._redis, self.where, self.epoch = client, where, epoch
        self._prefix = f"elastic:{run_key}:"
        self._ear: redis.client.PubSub | None = None

    # ---- the connection

    @classmethod
    def connect(cls, endpoint: Endpoint, password: str, key: str, timeout_s=5.0) -> Self:
        """A store of the run of that key, on the server at `endpoint`; the first call
        connects."""
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        # One retry: callers know better when to try again, and what to do first.
        limits["retry"] = Retry(NoBackoff(), 1)
        if endpoint.url:
            parse(URL, endpoint.url)  # it comes from a file, which may be damaged
            client = redis.Redis.from_url(endpoint.url, **limits)
            return cls(client, key, shown_url(endpoint.url).partition("//")[2], endpoint.epoch)
        # redis-py trusts all the machine's authorities as well, but none of them has
        # signed a certificate for such an address.
        if endpoint.certificate:
            limits |= {"ssl": True, "ssl_ca_data": endpoint.certificate}
            limits |= {"ssl_check_hostname": True, "ssl_include_verify_flags": [ANY_TIME]}
        who = {"username": cls.role, "password": password}
        client = redis.Redis(endpoint.host, endpoint.port, **who, **limits)
        return cls(client, key, f"{endpoint.host}:{endpoint.port}", endpoint.epoch)

    @classmethod
    def of(cls, run: RunDir, endpoint: Endpoint, timeout_s: float = 5.0) -> Self:
        """The run's store on its server at `endpoint`, whoever answers there."""
        own = cls.connect(endpoint, run.password(cls.role, endpoint), run.key, timeout_s)
        own.seal = "" if cls.role == "reader" else run.secret("seal")
        # The master of an older Elastic has no nonce, and so no proof.
        own.proof = run.password("seal", endpoint) if endpoint.nonce else ""
        return own

    @classmethod
    def open(cls, run: RunDir, timeout_s: float = 2.0) -> Self:
        """The store of the run's newest master, answering. Raises TryAgain; also where
        somebody else's server answers."""
        endpoint = run.endpoint()
        if endpoint is None:
            what = f"run {run.name} has had no master yet"
            raise TryAgain(what, "elastic-status RUN says why")
        store = cls.of(run, endpoint, timeout_s)
        store.meet()
        return store

    def meet(self) -> None:
        """Raise TryAgain unless the server answers and, if the master has a proof, knows
        that."""
        if not self.proof:
            self.now()
        elif self._redis.get(self._key("proof")) != self.proof.encode():
            raise TryAgain(f"Redis at {self.where} does not know this run's master (yet)")

    def disown(self) -> None:
        """See that nobody takes this server for the run's any more."""
        self._redis.delete(self._key("proof"))

    def close(self) -> None:
        self._redis.close()

    def _run(self, script: str, keys: list[str], arguments: list, fields=()) -> int:
        """Run one of scripts.py; `fields` of a hash come last. Raises NoScriptError if
        the server was restarted, and has forgotten them."""
        digest = hashlib.sha1(script.encode()).hexdigest()  # Redis's name of a script
        words = [*arguments, *itertools.chain.from_iterable(dict(fields).items())]
        return self._redis.evalsha(digest, len(keys), *keys, *words)

    # ---- keys, and seals

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(str(part) for part in parts)

    def _tables(self, kind: str, numbers: list[int]) -> dict[int, dict[bytes, bytes]]:
        """Number -> the hash kind:NUMBER, all asked for at once."""
        pipe = self._redis.pipeline(transaction=False)
        for number in numbers:
            pipe.hgetall(self._key(kind, number))
        return dict(zip(numbers, pipe.execute(), strict=True))

    def _sealed(self, key: str, name: str, data: object) -> bytes:
        """JSON for the field `name` of the hash `key`, marked as made by this run; the
        mark is good for no other field."""
        text = json.dumps(data).encode()
        return self._mark(key, name, text) + text

    def _unsealed(self, key: str, name: str, body: bytes) -> bytes:
        """The JSON in a field, or b"" if this run has not put it there."""
        mark, text = body[:MARK_BYTES], body[MARK_BYTES:]
        return text if hmac.compare_digest(mark, self._mark(key, name, text)) else b""

    def _mark(self, key: str, name: str, text: bytes) -> bytes:
        place = f"{key} {name}\n".encode(errors="replace")
        return hmac.digest(self.seal.encode(), place + text, "sha256").hex().encode()

    # ---- what there is

    def now(self) -> float:
        """Redis TIME in seconds: the one clock that decisions compare."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6

    def master(self) -> dict[str, str]:
        """What the master says of itself and its round."""
        return _text(self._redis.hgetall(self._key("master")))

    def has_master(self, within_s: float) -> bool:
        """Has a master spoken to this server lately?"""
        return self.now() - float(self.master().get("beat", 0.0)) < within_s

    def slots(self) -> dict[int, Slot]:
        """Every slot whose lease is valid."""
        found = self._tables("slot", sorted(self.attempts())).items()
        slots = {n: Slot.from_fields(_text(fields)) for n, fields in found}
        return {n: slot for n, slot in slots.items() if slot and slot.slot == n}

    def attempts(self) -> dict[int, int]:
        """Slot -> the newest attempt that claimed it."""
        attempts = {}
        for slot, attempt in self._redis.hgetall(self._key("attempts")).items():
            with contextlib.suppress(*MALFORMED):
                attempts[int(slot)] = int(attempt)
        return attempts

    def hear(self, channel: str, timeout_s: float) -> list[str]:
        """The wake-ups of the channel ("ctl" or "wake") that came since the last call,
        else the first that comes within `timeout_s`, with all behind it. A store hears
        only one of the two, and only from its first call on. A lost wake-up costs a poll
        interval, nothing else."""
        if self._ear is None:
            ear = self._redis.pubsub(ignore_subscribe_messages=True)
            ear.subscribe(self._key(channel))
            self._ear = ear
        words = []
        message = self._ear.get_message(timeout=timeout_s)
        while message is not None and len(words) < MOST_WORDS:
            words.append(message["data"].decode(errors="replace"))
            message = self._ear.get_message(timeout=0)
        return words


@reaches_redis
class WorkerStore(Store):
    """As an agent and its training process speak to it: leases, offers, asks."""

    role = "worker"

    # ---- a slot's lease

    def lease(self, slot: int, attempt: int, fields: dict, lease_s: float) -> bool:
        """Take the slot's lease, or renew it. False if a higher attempt has claimed it."""
        keys, kept_ms = [self._key("slot", slot), self._key("attempts")], int(lease_s * 1000)
        words = {"slot": slot, "attempt": attempt, **fields}
        return self._run(scripts.LEASE, keys, [slot, attempt, kept_ms], words) == 1

    def release(self, slot: int, attempt: int) -> None:
        """Give the lease up; nothing happens if a higher attempt has it."""
        keys = [self._key("slot", slot), self._key("attempts")]
        self._run(scripts.RELEASE, keys, [slot, attempt, self._key("wake")])

    # ---- a delta

    def offer(self, slot: int, attempt: int, base: int, header: dict) -> bool:
        """Announce a delta. False: on this server the attempt has no lease, or a higher
        attempt has it."""
        keys = [self._key("offers", base), self._key("attempts")]
        body = self._sealed(keys[0], f"{slot}:{attempt}", header)
        return self._run(scripts.OFFER, keys, [slot, attempt, body, self._key("wake")]) == 1

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
        self._redis.hset(key, name, self._sealed(key, name, [ask.sequence, ask.want, ask.held]))
        self._redis.publish(self._key("wake"), f"ask {ask.slot}")
        return self.epoch

    def granted(self, ask: Ask, timeout_s: float) -> list | None:
        """The ranges granted to `ask`, or None if no answer came within `timeout_s`."""
        answer = self._redis.blpop(self._key("grant", ask.slot, ask.attempt), timeout_s)
        sequence, ranges = json.loads(answer[1]) if answer else (None, ())
        return [tuple(each) for each in ranges] if sequence == ask.sequence else None


@reaches_redis
class MasterStore(Store):
    """As the run's master speaks to it: epochs, fences, verdicts, grants."""

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
        except redis.exceptions.NoScriptError:
            self.load_scripts()
            is_done = self._run(scripts.MASTER, keys, words, fields)
        if not is_done:
            raise Fenced(f"master epoch {epoch}: a higher one has taken over")

    def set_attempts(self, attempts: dict[int, int]) -> None:
        """Tell a server the attempts that the run directory knows, so that it fences
        older ones. A worker that has just claimed its lease, and is not known there yet,
        claims it again."""
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


def _text(table: dict[bytes, bytes]) -> dict[str, str]:
    pairs = ((key.decode(errors="replace"), value) for key, value in table.items())
    return {key: value.decode(errors="replace") for key, value in pairs}
