"""The store: coordination through Redis. The only importer of redis.

Redis is fast, not durable: every key can be rebuilt from the run directory and from what
live workers say again, so a flushed or replaced server costs a moment and no work.

key (after `elastic:RUN:ID:`)
                            type     content
master                      hash     epoch, version, call (version being called), state, beat, ...
slot:N                      hash/TTL the lease and last heartbeat of a slot (membership.Slot)
attempts                    hash     slot -> newest attempt; a lower one is fenced
offers:V                    hash     "slot:attempt" -> header of a delta based on version V
verdicts                    hash     "slot:attempt" -> why its delta was rejected
asks                        hash     "slot:attempt" -> sample ranges wanted and held
grant:SLOT:ATTEMPT          list     sample ranges granted to the newest ask; expires
inner                       hash     slot -> pointer to its saved inner optimizer state
proof                       string   what nobody but the run's own master could tell the server
events                      stream   the live copy of events.jsonl, capped
ctl                         pub/sub  the master's wake-ups for all: version V, last-call V, stop
wake                        pub/sub  wake-ups for the master alone: offer, ask, leave

Who connects as what (a server of the site's has the user and the password of its URL
instead): the master, an agent or a trainer as `worker`, everybody who only looks as
`reader`. What a role may do is in redis_server.py.

Offers, verdicts, asks and pointers are sealed with a key that no server ever hears of:
who has a worker's password alone can neither make one nor change one, and what is not
sealed is dropped.

A server that was started later may have the port of one that is gone, and be somebody
else's. So passwords are for one server only (RunDir.password), and what answers is asked
for the proof first.

Pub/sub only wakes; what counts is in the keys. Times are Redis TIME. Changes that must be
checked and made in one step are the few Lua scripts below. The master loads them; a
worker has none of its own.
"""

import contextlib
import functools
import hashlib
import hmac
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from elastic.base.errors import ElasticError, Fenced, TryAgain
from elastic.base.keys import check_value, shown_url
from elastic.run.membership import Slot
from elastic.run.rundir import Endpoint, RunDir

EVENTS_KEPT = 1000
GRANT_KEPT_MS = 60_000
MOST_WORDS = 10_000  # that are heard at once
MARK_BYTES = 64  # of a seal
ANY_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: this node's clock may be behind the master's
MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)  # what parsing nonsense raises

NOW = """
local t = redis.call('TIME')
local now = t[1] .. '.' .. string.format('%06d', t[2])
"""

# Whether the attempt ARGV[2] holds slot ARGV[1]. -1: fenced. 0: unknown here, claim
# again.
HELD = """
local newest = redis.call('HGET', KEYS[2], ARGV[1])
if newest and tonumber(newest) > tonumber(ARGV[2]) then return -1 end
if newest ~= ARGV[2] then return 0 end
"""

# Take a slot's lease for an attempt. 0: a higher attempt has it.
CLAIM = f"""{NOW}
local newest = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
if newest > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'beat', now, 'moved', now, 'joined', now, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# Renew a lease and note progress.
BEAT = f"""{NOW}{HELD}
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local before = redis.call('HMGET', KEYS[1], 'state', 'step', 'version', 'moves')
redis.call('HSET', KEYS[1], 'beat', now, unpack(ARGV, 4))
local after = redis.call('HMGET', KEYS[1], 'state', 'step', 'version', 'moves')
if before[1] ~= after[1] or before[2] ~= after[2] or before[3] ~= after[3]
    or before[4] ~= after[4] then
  redis.call('HSET', KEYS[1], 'moved', now)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# Give a lease up, if it is still this attempt's.
RELEASE = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[3], 'leave ' .. ARGV[1])
return 1
"""

# Offer a delta.
OFFER = f"""{HELD}
redis.call('HSET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], ARGV[3])
redis.call('PUBLISH', ARGV[4], 'offer ' .. ARGV[1])
return 1
"""

# Be the master with this epoch, if no higher one is. Also every later change of the
# master's hash. A SET replaces whatever is there, of any type.
MASTER = f"""{NOW}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'beat', now, unpack(ARGV, 5))
redis.call('SET', KEYS[2], ARGV[4])
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return 1
"""


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
            raise TryAgain(f"Redis at {self.where} refused the password: {error}") from None
        except redis.exceptions.NoPermissionError as error:
            raise ElasticError(f"Redis at {self.where} refuses: {error}") from None
        except redis.exceptions.ResponseError as error:
            raise Useless(f"Redis at {self.where} is of no use: {error}") from None
        except redis.exceptions.RedisError as error:
            raise TryAgain(
                f"cannot reach Redis at {self.where}: {error}",
                "is the master job running? elastic-status RUN",
            ) from None

    return wrapper


@dataclass(frozen=True)
class Ask:
    """A worker's request for samples: `want` more, beside those it holds. `sequence`
    numbers it."""

    slot: int
    attempt: int
    sequence: int
    want: int
    held: tuple[tuple[int, int, int], ...]

    @classmethod
    def parse(cls, name: bytes, body: bytes) -> "Ask":
        """Raises one of MALFORMED if it is none."""
        sequence, want, held = json.loads(body)
        ranges = tuple((int(epoch), int(start), int(stop)) for epoch, start, stop in held)
        slot, attempt = map(int, name.split(b":"))
        return cls(slot, attempt, int(sequence), int(want), ranges)


@reaches_redis
class Store:
    """One run's keys on one server. `epoch` is of the master that said where the server
    is."""

    seal = ""  # the key that a worker and the master of a run share
    proof = ""  # that a server is this run's own

    def __init__(self, client: redis.Redis, run_key: str, where: str, epoch: int = 0):
        self._redis, self.where, self.epoch = client, where, epoch
        self._prefix = f"elastic:{run_key}:"

    @classmethod
    def connect(
        cls, endpoint: Endpoint, password: str, run_key: str, timeout_s=5.0, user="default"
    ) -> "Store":
        """A store on the server at `endpoint`; the first call connects."""
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        # Callers know when to try again, and what to do first.
        limits["retry"] = Retry(NoBackoff(), 1)
        if endpoint.url:
            check_value("redis.url", endpoint.url)
            client = redis.Redis.from_url(endpoint.url, **limits)
            where = shown_url(endpoint.url).partition("//")[2]
            return cls(client, run_key, where, endpoint.epoch)
        if endpoint.certificate:  # redis-py believes every authority, too, but of no such address
            limits |= {"ssl": True, "ssl_ca_data": endpoint.certificate}
            limits |= {"ssl_check_hostname": True, "ssl_include_verify_flags": [ANY_TIME]}
        who = {"username": user, "password": password}
        client = redis.Redis(endpoint.host, endpoint.port, **who, **limits)
        return cls(client, run_key, f"{endpoint.host}:{endpoint.port}", endpoint.epoch)

    @classmethod
    def open(cls, run: RunDir, timeout_s: float = 2.0, role: str = "reader") -> "Store":
        """The store of the run's newest master, answering. Raises TryAgain; also where
        somebody else's server answers."""
        endpoint = run.endpoint()
        if endpoint is None:
            raise TryAgain(f"run {run.name} has had no master yet", "elastic-status RUN says why")
        store = cls.connect(endpoint, run.password(role, endpoint), run.key, timeout_s, role)
        store.seal = "" if role == "reader" else run.secret("seal")
        store.proof = run.password("seal", endpoint)
        store.meet() if endpoint.nonce else store.now()
        return store

    def meet(self) -> None:
        """Raise TryAgain unless the server has been told the proof."""
        if self._redis.get(self._key("proof")) != self.proof.encode():
            raise TryAgain(f"Redis at {self.where} does not know this run's master (yet)")

    def load_scripts(self) -> None:
        """Before anybody calls them. A server that was restarted has forgotten them."""
        for text in (CLAIM, BEAT, RELEASE, OFFER, MASTER):
            self._redis.script_load(text)

    def _run(self, script: str, keys: list[str], arguments: list) -> int:
        digest = hashlib.sha1(script.encode()).hexdigest()  # Redis's name of a script
        return self._redis.evalsha(digest, len(keys), *keys, *arguments)

    def close(self) -> None:
        self._redis.close()

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(str(part) for part in parts)

    def _tables(self, kind: str, numbers: list[int]) -> dict[int, dict[bytes, bytes]]:
        """Number -> the hash kind:NUMBER, all asked for at once."""
        pipe = self._redis.pipeline(transaction=False)
        for number in numbers:
            pipe.hgetall(self._key(kind, number))
        return dict(zip(numbers, pipe.execute(), strict=True))

    def _sealed(self, key: str, name: str, data: object) -> bytes:
        """JSON for the field `name` of a hash, and nowhere else, that this run's own have
        made."""
        text = json.dumps(data).encode()
        return self._mark(key, name, text) + text

    def _unsealed(self, key: str, name: str, body: bytes) -> bytes:
        """The JSON, or b"" if none of this run's own has put it there."""
        mark, text = body[:MARK_BYTES], body[MARK_BYTES:]
        return text if hmac.compare_digest(mark, self._mark(key, name, text)) else b""

    def _mark(self, key: str, name: str, text: bytes) -> bytes:
        place = f"{key} {name}\n".encode(errors="replace")
        return hmac.digest(self.seal.encode(), place + text, "sha256").hex().encode()

    def now(self) -> float:
        """Redis TIME in seconds: the one clock that decisions compare."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6

    # ---- slots

    def claim(self, slot: int, attempt: int, fields: dict, lease_s: float) -> bool:
        """Take the slot's lease. False if a higher attempt has claimed it."""
        keys = [self._key("slot", slot), self._key("attempts")]
        words = _flat({"slot": slot, "attempt": attempt, **fields})
        return bool(self._run(CLAIM, keys, [slot, attempt, int(lease_s * 1000), *words]))

    def beat(self, slot: int, attempt: int, fields: dict, lease_s: float) -> bool:
        """Renew the lease. False: this server does not know it, claim again. Raises
        Fenced."""
        keys = [self._key("slot", slot), self._key("attempts")]
        head = [slot, attempt, int(lease_s * 1000)]
        return _held(self._run(BEAT, keys, head + _flat(fields)), slot, attempt)

    def release(self, slot: int, attempt: int) -> None:
        """Give the lease up; nothing happens if a higher attempt has it."""
        keys = [self._key("slot", slot), self._key("attempts")]
        self._run(RELEASE, keys, [slot, attempt, self._key("wake")])

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

    def set_attempts(self, attempts: dict[int, int]) -> None:
        """Tell a server what the run directory knows, so that it fences what is older.
        Who has just claimed, and is not known there yet, claims again."""
        key = self._key("attempts")
        pipe = self._redis.pipeline(transaction=True).delete(key)
        for slot, attempt in attempts.items():
            pipe.hset(key, slot, attempt)
        pipe.execute()

    # ---- deltas and versions

    def offer(self, slot: int, attempt: int, base: int, header: dict) -> bool:
        """Announce a delta. False: this server does not know the lease. Raises Fenced."""
        keys = [self._key("offers", base), self._key("attempts")]
        body = self._sealed(keys[0], f"{slot}:{attempt}", header)
        arguments = [slot, attempt, body, self._key("wake")]
        return _held(self._run(OFFER, keys, arguments), slot, attempt)

    def offers(self, bases: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """Base version -> {"slot:attempt": header as JSON}. What nobody has sealed is
        removed."""
        found = {}
        for base, table in self._tables("offers", list(bases)).items():
            key, names = self._key("offers", base), {k.decode("latin-1"): k for k in table}
            texts = {name: self._unsealed(key, name, table[k]) for name, k in names.items()}
            found[base] = {name: text for name, text in texts.items() if text}
            self.drop_offers(base, names.keys() - found[base].keys())
        return found

    def offered(self, slot: int, attempt: int, base: int) -> bool:
        """Is the offer still known? A flushed or new server has forgotten it."""
        return bool(self._redis.hexists(self._key("offers", base), f"{slot}:{attempt}"))

    def set_verdict(self, name: str, verdict: dict) -> None:
        """Say why the newest delta of "slot:attempt" is not merged."""
        key = self._key("verdicts")
        self._redis.hset(key, name.encode("latin-1"), self._sealed(key, name, verdict))

    def take_verdict(self, slot: int, attempt: int) -> dict | None:
        """The verdict on this attempt, if there is one; it is told once."""
        key, name = self._key("verdicts"), f"{slot}:{attempt}"
        pipe = self._redis.pipeline(transaction=True)
        body, _ = pipe.hget(key, name).hdel(key, name).execute()
        text = self._unsealed(key, name, body or b"")
        return json.loads(text) if text else None

    def drop_offers(self, base: int, names: Iterable[str]) -> None:
        """Forget offers by name ("slot:attempt"); one that came meanwhile stays."""
        names = list(names)
        if names:
            self._redis.hdel(self._key("offers", base), *(n.encode("latin-1") for n in names))

    def set_master(self, epoch: int, fields: dict, wake: str = "") -> None:
        """Change the master's hash and announce `wake`. Raises Fenced under a higher
        epoch."""
        keys = [self._key("master"), self._key("proof")]
        arguments = [epoch, self._key("ctl"), wake, self.proof, *_flat(fields)]
        try:
            is_done = self._run(MASTER, keys, arguments)
        except redis.exceptions.NoScriptError:
            self.load_scripts()
            is_done = self._run(MASTER, keys, arguments)
        if not is_done:
            raise Fenced(f"master epoch {epoch}: a higher one has taken over")

    def master(self) -> dict[str, str]:
        return _text(self._redis.hgetall(self._key("master")))

    # ---- samples

    def ask(self, ask: Ask) -> None:
        """Ask for samples, or (want 0) say which ones are held."""
        key, name = self._key("asks"), f"{ask.slot}:{ask.attempt}"
        body = self._sealed(key, name, [ask.sequence, ask.want, ask.held])
        self._redis.hset(key, name, body)
        self._redis.publish(self._key("wake"), f"ask {ask.slot}")

    def take_asks(self) -> list[Ask]:
        """All waiting requests, removed. One that gets lost is asked again by its
        worker."""
        pipe = self._redis.pipeline(transaction=True)
        key, asks = self._key("asks"), []
        for name, body in pipe.hgetall(key).delete(key).execute()[0].items():
            with contextlib.suppress(*MALFORMED):
                asks.append(Ask.parse(name, self._unsealed(key, name.decode(), body)))
        return asks

    def grant(self, grants: dict[tuple[int, int], tuple[int, list]]) -> None:
        """(slot, attempt) -> (sequence of the ask, ranges)."""
        pipe = self._redis.pipeline(transaction=False)
        for (slot, attempt), answer in grants.items():
            key = self._key("grant", slot, attempt)
            pipe.rpush(key, json.dumps(answer)).pexpire(key, GRANT_KEPT_MS)
        pipe.execute()

    def granted(self, ask: Ask, timeout_s: float) -> list | None:
        """The ranges granted to `ask`, or None if no answer came within `timeout_s`."""
        answer = self._redis.blpop(self._key("grant", ask.slot, ask.attempt), timeout_s)
        if answer is None:
            return None
        sequence, ranges = json.loads(answer[1])
        return [tuple(each) for each in ranges] if sequence == ask.sequence else None

    # ---- inner state, events, wake-ups

    def set_inner(self, slot: int, pointer: dict) -> None:
        key = self._key("inner")
        self._redis.hset(key, str(slot), self._sealed(key, str(slot), pointer))

    def inner(self) -> dict[int, dict]:
        """Slot -> what its worker has said, whatever that is."""
        found, key = {}, self._key("inner")
        for slot, body in self._redis.hgetall(key).items():
            with contextlib.suppress(*MALFORMED):
                found[int(slot)] = json.loads(self._unsealed(key, slot.decode(), body))
        return found

    def add_event(self, record: dict) -> None:
        self._redis.xadd(self._key("events"), {"json": json.dumps(record)}, maxlen=EVENTS_KEPT)

    def forget_everything(self) -> int:
        """Remove every key of the run, as a server that was replaced has none."""
        keys = list(self._redis.scan_iter(self._prefix + "*", count=1000))
        return self._redis.unlink(*keys) if keys else 0

    def announce(self, wake: str) -> None:
        self._redis.publish(self._key("ctl"), wake)

    def listen(self, channel: str) -> "Listener":
        """Wake-ups of "ctl" or "wake"."""
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        return Listener(pubsub, self._key(channel), self.where)


@reaches_redis
class Listener:
    """Wake-ups of one channel. Losing one costs a poll interval, nothing else."""

    def __init__(self, pubsub: redis.client.PubSub, channel: str, where: str):
        self._pubsub, self._channel, self.where = pubsub, channel, where
        self._subscribed = False

    def wait(self, timeout_s: float) -> list[str]:
        """The wake-ups that came within `timeout_s`; returns at the first, with all
        behind it."""
        if not self._subscribed:
            self._pubsub.subscribe(self._channel)
            self._subscribed = True
        words = []
        message = self._pubsub.get_message(timeout=timeout_s)
        while message is not None and len(words) < MOST_WORDS:
            words.append(message["data"].decode(errors="replace"))
            message = self._pubsub.get_message(timeout=0)
        return words


def _held(answer: int, slot: int, attempt: int) -> bool:
    """What HELD answered."""
    if answer < 0:
        raise Fenced(f"slot {slot}: an attempt higher than {attempt} has claimed it")
    return answer == 1


def _flat(fields: dict) -> list:
    return [part for pair in fields.items() for part in pair]


def _text(table: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, v in table.items()}
