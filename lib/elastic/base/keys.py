"""The keys of a configuration: `KEYS` says everything about each of them.

A key stands in two places: etc/keys.toml has its default, meaning and unit, for people to
read as well, and `KINDS`, here, has its kind: how a value is written, and the rule that
it keeps. Parsing, errors, the resolved run.toml and elastic-config all come from these
two. In a file, durations and sizes are written as people say them ("90s", "256mb");
inside, the field carries its unit (`heartbeat_s`, `fragment_bytes`).
"""

import ipaddress
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from elastic.base import units
from elastic.base.environment import elastic_home
from elastic.base.errors import UsageError


class Kind(NamedTuple):
    """What a key may be: how a value is written, and the rule that it keeps to."""

    expected: str  # "expected ..." in the error for what is of another kind
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    units: Mapping[str, float] = {}  # name -> size, where a number may carry its unit
    suffix: str = ""  # of the field's name inside
    # "must be ..." in the error for what is of this kind, and breaks the rule.
    rule: str = ""
    holds: Callable[[Any], bool] = lambda value: True

    def that_is(self, rule: str, holds: Callable[[Any], bool]) -> "Kind":
        return self._replace(rule=rule, holds=holds)

    def at_least(self, low: int) -> "Kind":
        return self.that_is(f"at least {low}", lambda value: value >= low)

    def between(self, low: int, high: int) -> "Kind":
        return self.that_is(f"between {low} and {high}", lambda value: low <= value <= high)

    def below_one(self) -> "Kind":
        rule = "at least 0 and below 1"
        return self.that_is(rule, lambda value: value == "auto" or 0 <= value < 1)

    def above_zero(self) -> "Kind":
        return self.that_is("above 0", lambda value: value == "auto" or value > 0)

    def like(self, rule: str, pattern: str) -> "Kind":
        whole = re.compile(pattern, re.ASCII)
        return self.that_is(rule, lambda value: whole.fullmatch(value) is not None)


class Key(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    default: Any

    @property
    def field(self) -> str:
        """Its name inside."""
        return self.name + self.kind.suffix


# ---- kinds -----------------------------------------------------------------------------


def _finite(value: Any) -> bool:
    """A boolean is no number, and an integer may be larger than any float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 62  # as records.MOST


def _text(value: Any) -> bool:
    """A file and a command line can hold it: no NUL, no half of a character."""
    return type(value) is str and not re.search("[\0\ud800-\udfff]", value)


def _list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(accepts, value))


# Those of TLS are for TLS alone.
_OPTION = (r"(db=\d{1,9}|(username|password)=[^&#\s]+|(?(tls)"
           r"ssl_(ca_certs|certfile|keyfile|password|cert_reqs|check_hostname)=[^&#\s]+|(?!)))")
_URL = re.compile(
    r"(?P<scheme>redis(?P<tls>s)?://)([^/?#\[\]\s]*@)?"  # what is before the @ is secret
    r"(?P<server>([\w.-]+|\[[\da-fA-F:]+\])(:(?P<port>\d{1,5}))?(/\d{0,9})?)"
    rf"(\?{_OPTION}(&{_OPTION})*)?", re.ASCII)


def _is_url(value: Any) -> bool:
    """Empty, or of a Redis, so that every part is what redis-py takes it for."""
    match = _URL.fullmatch(value) if _text(value) and value.isascii() else None
    return 0 < int(match["port"] or 6379) < 1 << 16 if match else value == ""


def shown_url(url: str) -> str:
    """A checked redis.url without its user, password and options: they may be secret."""
    match = _URL.fullmatch(url)
    return match["scheme"] + match["server"] if match else ""


def _listens(text: str) -> bool:
    """"auto", a possible name of an interface, or an address of one machine."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return re.fullmatch(r"(?=.*[A-Za-z])[^\s/]{1,15}", text) is not None
    return not (address.is_unspecified or address.is_multicast or address.is_reserved)


def _names_a_class(text: str) -> bool:
    return all(map(str.isidentifier, re.split("[.:]", text))) and text.count(":") == 1


def _one_of(*choices: str) -> Kind:
    return TEXT.that_is(" or ".join(f'"{choice}"' for choice in choices), choices.__contains__)


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1, "ms": 0.001}
_BYTES = {"tb": 1 << 40, "gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "b": 1, "": 1}

TEXT = Kind("a string", _text)
URL = Kind('"redis://USER:PASSWORD@HOST:PORT/DB", or rediss:// for TLS (in a password / # ? [ ] as '
           "%2F %23 %3F %5B %5D; options: db, username, password; with TLS also ssl_ca_certs, "
           "ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs, ssl_check_hostname)", _is_url)
INT = Kind("an integer", _integer)
BOOL = Kind("true or false", lambda value: type(value) is bool)
IF_POSSIBLE = Kind('"auto", true or false', lambda value: value == "auto" or type(value) is bool)
REAL = Kind("a finite number", _finite, float)
AUTO = Kind('"auto" or a finite number', lambda value: value == "auto" or _finite(value))
LIST = Kind("an array of strings", _list_of(_text), tuple)
INTS = Kind("an array of integers", _list_of(_integer), tuple)
TIME = Kind('a duration up to 100000d ("90s", "5m", "2h" or seconds)',
            lambda value: _finite(value) and 0 <= value <= 100_000 * _SECONDS["d"],
            float, _SECONDS, "_s")
SIZE = Kind('a size below 2^63 bytes ("64kb", "256mb", "1gb" or bytes)',
            lambda value: _finite(value) and 0 <= value < 1 << 63,
            round, _BYTES, "_bytes")

NATURAL, COUNT, GPUS = INT.at_least(0), INT.at_least(1), INT.between(1, 100_000)
AMOUNT, POSITIVE, FRACTION = REAL.at_least(0), REAL.above_zero(), REAL.between(0, 1)
SPAN, BEAT = TIME.above_zero(), TIME.that_is("at least 10ms", lambda value: value >= 0.01)
# An empty server takes four.
ROOM = SIZE.that_is("at least 16mb", lambda value: value >= 16 << 20)
NAME = TEXT.like("letters, digits, '.', '_' and '-', at most 63, a letter or digit first",
                 r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?")
CLASS = TEXT.that_is('written "package.module:Class"', _names_a_class)
SIGNAL = TEXT.that_is("TERM, INT, USR1 or USR2", ("TERM", "INT", "USR1", "USR2").__contains__)
BIND = TEXT.that_is('"auto", an interface or the IPv4 address of one', _listens)
PROGRAM = TEXT.like("the name of a program, or a whole path", "[^~/]*|/.*")
BELOW = TEXT.like('relative, without ".." and "**"', r"(?!/)((?!\.\.|\*\*).)*")
INTERVAL = TEXT.that_is('"auto", "N steps" or a duration ("10m")',
                        lambda value: value == "auto" or units.interval(value)[0] > 0)
MEMORY = TEXT.like("written as 64G, without a fraction", r"([1-9]\d{0,8}[KMGT]?)?")
COUNTS = INTS.that_is("of integers that are at least 1", lambda value: min(value, default=1) >= 1)
OPTIONS = LIST.that_is(
    "without --clusters (squeue would never show the jobs: set SLURM_CONF to that cluster's)",
    lambda words: not any(re.match("-M|--cl", word) for word in words))

# ---- the table -------------------------------------------------------------------------

KINDS = {
    "run": {"name": NAME, "task": CLASS, "folder": TEXT, "command": LIST,
            "mode": _one_of("local", "sync"), "seed": NATURAL,
            "scheduler": _one_of("slurm", "local")},
    "elastic": {"min": GPUS, "max": GPUS, "max_pending": COUNT, "max_failures": COUNT,
                "backoff": TIME, "reconcile_interval": SPAN},
    "train": {"batch_size": COUNT, "accumulate": COUNT, "epochs": NATURAL, "max_tokens": NATURAL,
              "max_steps": NATURAL, "optimizer": _one_of("adamw", "muon"),
              "learning_rate": POSITIVE,
              "schedule": _one_of("wsd", "cosine", "constant", "own"),
              "warmup_fraction": FRACTION, "decay_fraction": FRACTION,
              "final_lr_fraction": FRACTION, "weight_decay": AMOUNT,
              "beta1": REAL.below_one(), "beta2": REAL.below_one(), "grad_clip": AMOUNT,
              "precision": _one_of("float32", "bf16"), "device": _one_of("auto", "cpu", "cuda"),
              "threads": INT.between(0, 4096), "loader_workers": NATURAL,
              "validate_every": NATURAL, "compile": BOOL},
    "local_sgd": {"inner_steps": COUNT, "cold_start": AMOUNT,
                  "outer_lr": AUTO.above_zero(), "outer_momentum": AUTO.below_one(),
                  "compression": _one_of("none", "int8", "int4"),
                  "overlap": _one_of("off", "rebase"), "max_staleness": NATURAL,
                  "reanchor": FRACTION, "clip_norm": AMOUNT, "canary": AMOUNT,
                  "thin_rounds": BOOL, "quorum": FRACTION, "deadline_k": AMOUNT,
                  "min_deadline": TIME, "last_call": TIME, "fragment": SIZE.above_zero(),
                  "join_ramp": NATURAL, "inner_state_every": NATURAL,
                  "inner_state_max_age": NATURAL},
    "sync": {"global_batch_size": NATURAL, "sizes": COUNTS, "checkpoints": TEXT, "resume": BELOW,
             "silent_timeout": TIME, "notice_signal": SIGNAL, "ranks_per_node": NATURAL,
             "bind": TEXT, "grow_after": TIME, "crash_retries": NATURAL},
    "checkpoint": {"interval": INTERVAL, "max_rate": SIZE, "min_free": SIZE,
                   "keep": COUNT, "keep_every": NATURAL},
    "health": {"heartbeat": BEAT, "lease": SPAN, "stall_after": SPAN, "hang_timeout": SPAN,
               "master_wait": SPAN, "liveness_interval": SPAN, "liveness_timeout": SPAN,
               "nan_action": _one_of("skip", "stop", "warn", "rollback"),
               "max_bad_batches": COUNT},
    "slurm": {"partition": TEXT, "master_partition": TEXT, "account": TEXT,
              "master_account": TEXT, "qos": TEXT, "master_qos": TEXT, "time": TEXT,
              "master_time": TEXT, "gpus_per_worker": COUNT, "gpus_per_node": COUNT,
              "gres": TEXT, "cpus_per_gpu": NATURAL, "mem_per_gpu": MEMORY,
              "master_cpus": NATURAL, "master_mem": MEMORY, "signal": TEXT, "options": OPTIONS,
              "master_options": OPTIONS, "srun_options": LIST, "rank_prefix": LIST,
              "exclude": TEXT},
    "redis": {"url": URL, "bind": BIND, "port": INT.between(0, 65535), "maxmemory": ROOM,
              "tls": IF_POSSIBLE, "server": PROGRAM},
    "local_scheduler": {"gpus": NATURAL, "grace": TIME},
    "plan": {"step": TIME, "flops": POSITIVE, "startup": TIME, "queue": TIME, "requeue": TIME,
             "notice": TIME, "leave": TIME, "save": TIME, "process": SIZE.above_zero(),
             "filesystem": SIZE.above_zero()},
}


def _table(text: str) -> dict[str, tuple[Key, ...]]:
    """The keys by section, of the text of etc/keys.toml."""
    defaults = tomllib.loads(text)
    return {section: tuple(Key(name, kinds[name], default)
                           for name, default in defaults[section].items())
            for section, kinds in KINDS.items()}


KEYS = _table((elastic_home() / "etc" / "keys.toml").read_text(encoding="utf-8"))


# ---- values ----------------------------------------------------------------------------


def parse(kind: Kind, value: Any) -> Any:
    """`value`, as TOML has it, as a field of this kind has it. UsageError: it cannot."""
    number = value
    if kind.units and isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *([a-z]*)", value.strip().lower())
        if match and match[2] in kind.units:
            number = float(match[1]) * kind.units[match[2]]
    if not kind.accepts(number):
        shown = "what is not shown: it may hold a password" if kind is URL else _brief(value)
        raise UsageError(f"expected {kind.expected}, got {shown}")
    parsed = kind.convert(number)
    if not kind.holds(parsed):
        raise UsageError(f"must be {kind.rule}, is {_brief(value)}")
    return parsed


def _brief(value: Any) -> str:
    """A value for a message."""
    text = toml_value(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def written(kind: Kind, value: Any) -> Any:
    """The opposite of `parse`, in the largest unit that divides the value."""
    for unit, size in kind.units.items():
        if value and size >= 1 and value % size == 0:
            return f"{value // size:.0f}{unit}"
    return list(value) if kind.convert is tuple else value


def toml_value(value: Any) -> str:
    """`value` as TOML writes it, on one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = [f"{toml_key(name)} = {toml_value(each)}" for name, each in value.items()]
        return f"{{{', '.join(pairs)}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_key(name: str) -> str:
    """`name` as TOML writes a key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
