"""Configuration: the only reader of TOML and of the process environment.

One table, `KEYS`, says everything about a key: its kind, default, unit, meaning and legal values.
Parsing, errors, the resolved run.toml, `explain()` and etc/keys.toml all come from it, so that a
key is added in one place. A value comes from the command line, else the run's file, else the site
file, else the table, and its origin is kept. In a file, durations and sizes are written as people
say them ("90s", "256mb"); inside, the field carries its unit (`heartbeat_s`, `fragment_bytes`).

Everything wrong with a configuration is reported in one UsageError, before anything starts.
What depends on other values ("auto", an empty name) is settled here, once; nobody asks again.
"""

import dataclasses
import difflib
import ipaddress
import json
import os
import pwd
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import elastic
from elastic.base import units
from elastic.base.durable import check_private
from elastic.base.errors import UsageError


class Kind(NamedTuple):
    """How a value is written; `units` (name -> size) where a number may carry its unit."""

    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    units: Mapping[str, float] = {}
    suffix: str = ""  # of the field's name inside


class Check(NamedTuple):
    """A rule for one value: it `holds`, or the error says that the value must be `text`."""

    text: str
    holds: Callable[[Any], bool]


class Key(NamedTuple):
    """One row of the table; `default` is written as in TOML."""

    name: str
    kind: Kind
    default: Any
    unit: str
    doc: str
    check: Check | None = None


def _finite(value: Any) -> bool:
    """A boolean is no number; and an integer has no infinity, but may be larger than any float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _text(value: Any) -> bool:
    """A file and a command line can hold it: no NUL, no half of a character."""
    return type(value) is str and not re.search("[\0\ud800-\udfff]", value)


def _list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(accepts, value))


_OPTION = (r"(db=\d{1,9}|(username|password)=[^&#\s]+|(?(tls)"  # the others are TLS's alone
           r"ssl_(ca_certs|certfile|keyfile|password|cert_reqs|check_hostname)=[^&#\s]+|(?!)))")
_URL = re.compile(
    r"(?P<scheme>redis(?P<tls>s)?://)([^/?#\[\]\s]*@)?"  # what is before the @ is secret
    r"(?P<server>([\w.-]+|\[[\da-fA-F:]+\])(:(?P<port>\d{1,5}))?(/\d{0,9})?)"
    rf"(\?{_OPTION}(&{_OPTION})*)?", re.ASCII)  # fmt: skip


def _is_url(value: Any) -> bool:
    """Empty, or of a Redis, so that every part is what redis-py takes it for."""
    match = _URL.fullmatch(value) if _text(value) and value.isascii() else None
    return 0 < int(match["port"] or 6379) < 1 << 16 if match else value == ""


def shown_url(url: str) -> str:
    """A checked redis.url without what may be secret in it: its user, password and options."""
    match = _URL.fullmatch(url)
    return match["scheme"] + match["server"] if match else ""


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1, "ms": 0.001}
_BYTES = {"tb": 1 << 40, "gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "b": 1, "": 1}

TEXT = Kind("a string", _text)
URL = Kind('"redis://USER:PASSWORD@HOST:PORT/DB", or rediss:// for TLS (in a password / # ? [ ] as '
           "%2F %23 %3F %5B %5D; options: db, username, password; with TLS also ssl_ca_certs, "
           "ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs, ssl_check_hostname)", _is_url)
INT = Kind("an integer", _integer)
BOOL = Kind("true or false", lambda value: type(value) is bool)
WHERE_POSSIBLE = Kind('"auto", true or false', lambda value: value == "auto" or type(value) is bool)
REAL = Kind("a finite number", _finite, float)
AUTO = Kind('"auto" or a finite number', lambda value: value == "auto" or _finite(value))
LIST = Kind("an array of strings", _list_of(_text), tuple)
INTS = Kind("an array of integers", _list_of(_integer), tuple)
TIME = Kind('a duration up to 100000d ("90s", "5m", "2h" or seconds)',
            lambda value: _finite(value) and 0 <= value <= 100_000 * _SECONDS["d"],
            float, _SECONDS, "_s")  # fmt: skip
SIZE = Kind('a size below 2^63 bytes ("64kb", "256mb", "1gb" or bytes)',
            lambda value: _finite(value) and 0 <= value < 1 << 63,
            round, _BYTES, "_bytes")  # fmt: skip


def _one_of(*choices: str) -> Check:
    return Check(" or ".join(f'"{choice}"' for choice in choices), lambda value: value in choices)


NATURAL = Check("at least 0", lambda value: value >= 0)
COUNT = Check("at least 1", lambda value: value >= 1)
POSITIVE = Check("above 0", lambda value: value > 0)
SHARE = Check("between 0 and 1", lambda value: 0 <= value <= 1)
RATE = Check("above 0", lambda value: value == "auto" or value > 0)
DECAY = Check("at least 0 and below 1", lambda value: value == "auto" or 0 <= value < 1)
GPUS = Check("between 1 and 100000", lambda value: 1 <= value <= 100_000)
THREADS = Check("between 0 and 4096", lambda value: 0 <= value <= 4096)
BEAT = Check("at least 10ms", lambda value: value >= 0.01)
ROOM = Check("at least 16mb", lambda value: value >= 16 << 20)  # an empty server takes four
ALL_COUNTS = Check("of integers that are at least 1", lambda value: min(value, default=1) >= 1)
ONE_CLUSTER = Check(
    "without --clusters (squeue would never show the jobs: set SLURM_CONF to that cluster's)",
    lambda words: not any(re.match("-M|--cl", word) for word in words),
)
MEMORY = Check('written as 64G, without a fraction',
               lambda value: re.fullmatch(r"([1-9]\d{0,8}[KMGT]?)?", value, re.ASCII) is not None)
PORT = Check("between 0 and 65535", lambda value: 0 <= value <= 65535)


def _listens(text: str) -> bool:
    """"auto", a possible name of an interface, or an address of one machine."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return re.fullmatch(r"(?=.*[A-Za-z])[^\s/]{1,15}", text) is not None
    return not (address.is_unspecified or address.is_multicast or address.is_reserved)


BIND = Check('"auto", an interface or the IPv4 address of one', _listens)
NAME = Check(
    "letters, digits, '.', '_' and '-', at most 63, a letter or digit first",
    lambda value: re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?", value) is not None,
)
SIGNAL = Check("TERM, INT, USR1 or USR2", lambda value: value in ("TERM", "INT", "USR1", "USR2"))
CLASS = Check(
    'written "package.module:Class"',
    lambda value: all(map(str.isidentifier, re.split("[.:]", value))) and value.count(":") == 1,
)

BELOW = Check('relative, without ".." and "**"',
              lambda value: not (value.startswith("/") or ".." in value or "**" in value))
WINDOW = Check('written "FIRST:LAST"', lambda value: re.fullmatch(r"(\d+:\d+)?", value) is not None)
INTERVAL = Check(
    '"auto", "N steps" or a duration ("10m")',
    lambda value: value == "auto" or units.interval(value)[0] > 0,
)

# fmt: off
KEYS: dict[str, tuple[Key, ...]] = {"run": (
    Key("name", TEXT, "", "", "of the run; empty: the file's name without .toml", NAME),
    Key("task", TEXT, "elastic.tasks:ByteText", "", "class that gives model, data and loss", CLASS),
    Key("folder", TEXT, "", "", "where the task's module is looked for; empty: beside the file"),
    Key("command", LIST, [], "", "a training loop of one's own instead of the built-in one; in "
        "sync mode any program, with {resume}, {resume?--flag}, {checkpoints} and the like; "
        "{python}: this installation's"),
    Key("mode", TEXT, "local", "", "local: independent jobs, averaged; sync: one job that resizes",
        _one_of("local", "sync")),
    Key("seed", INT, 0, "", "of the first parameters and of the order of samples", NATURAL),
    Key("scheduler", TEXT, "slurm", "", "local: processes here", _one_of("slurm", "local")),
), "elastic": (
    Key("min", INT, 1, "GPUs", "with fewer the run trains on, and is reported as short", GPUS),
    Key("max", INT, 1, "GPUs", "never more, running and pending together", GPUS),
    Key("max_pending", INT, 8, "jobs", "of workers that wait in the queue at one time", COUNT),
    Key("max_failures", INT, 3, "crashes", "of the user's code in a row stop the run", COUNT),
    Key("backoff", TIME, "30s", "", "wait after a crash; doubles with every further one"),
    Key("reconcile_interval", TIME, "60s", "", "between the master's own passes", POSITIVE),
), "train": (
    Key("batch_size", INT, 8, "samples", "per GPU and pass", COUNT),
    Key("accumulate", INT, 1, "passes", "whose gradients make an inner step in local mode; sync "
        "mode accumulates what sync.global_batch_size needs", COUNT),
    Key("epochs", INT, 0, "epochs", "to train; set this or max_tokens", NATURAL),
    Key("max_tokens", INT, 0, "tokens", "to train; set this or epochs", NATURAL),
    Key("max_steps", INT, 0, "steps", "to train at most, in sync mode; 0: no limit", NATURAL),
    Key("learning_rate", REAL, 3e-4, "", "of the inner optimizer, at its peak; a run.command's "
        "has its own", POSITIVE),
    Key("schedule", TEXT, "wsd", "", "of the learning rate over the run; wsd: warm up, hold, decay;"
        " own: the loop of run.command sets it", _one_of("wsd", "cosine", "constant", "own")),
    Key("warmup_fraction", REAL, 0.01, "of the run", "learning rate rises from 0", SHARE),
    Key("decay_fraction", REAL, 0.2, "of the run", "learning rate falls at the end (wsd)", SHARE),
    Key("final_lr_fraction", REAL, 0.1, "of the peak", "learning rate at the end", SHARE),
    Key("weight_decay", REAL, 0.1, "", "of the inner AdamW", NATURAL),
    Key("beta1", REAL, 0.9, "", "of the inner AdamW", DECAY),
    Key("beta2", REAL, 0.95, "", "of the inner AdamW", DECAY),
    Key("grad_clip", REAL, 1.0, "norm", "largest gradient norm; 0: no limit", NATURAL),
    Key("precision", TEXT, "float32", "", "of the passes", _one_of("float32", "bf16")),
    Key("device", TEXT, "auto", "", "auto: cuda if there is a GPU", _one_of("auto", "cpu", "cuda")),
    Key("threads", INT, 0, "threads", "of torch on the CPU; 0: torch decides", THREADS),
    Key("loader_workers", INT, 0, "processes", "of a rank, that load samples ahead", NATURAL),
    Key("validate_every", INT, 0, "steps", "in sync mode, to the task's validate(); 0: never",
        NATURAL),
    Key("compile", BOOL, False, "", "torch.compile the model"),
    Key("profile", TEXT, "", "", 'steps traced on rank 0, in local mode those of slot 0 since its '
        'start, "100:110"; empty: none', WINDOW),
), "local_sgd": (
    Key("inner_steps", INT, 200, "steps", "K: inner steps of a worker in one round", COUNT),
    Key("cold_start_steps", INT, 1, "steps", "K of the first round; doubles every ten rounds, or "
        "faster in a short run; 0: inner_steps at once", NATURAL),
    Key("outer_lr", AUTO, "auto", "",
        "of the outer optimizer, SGD with Nesterov momentum; auto: 0.7, with topk 1", RATE),
    Key("outer_momentum", AUTO, "auto", "",
        "auto: 0.9 where inner_steps is 100 or more, 0.8 above 10, else 0.5; with topk 0", DECAY),
    Key("compression", TEXT, "int8", "", "of deltas; none: float32",
        _one_of("none", "int8", "int4", "topk")),
    Key("overlap", TEXT, "off", "", "what a worker does while its delta travels; off: it waits; "
        "rebase: more steps, which are put on top of the next version", _one_of("off", "rebase")),
    Key("max_staleness", INT, 2, "versions", "a delta that is later is rejected", NATURAL),
    Key("reanchor", REAL, 0.5, "", "kappa: how far a late delta moves to the present", SHARE),
    Key("clip_norm", REAL, 2.0, "usual norms", "of such steps: largest delta; 0: no limit",
        NATURAL),
    Key("canary", REAL, 0.3, "nats", "that a round's loss may rise by, or six times its usual "
        "change; more, and the version it was trained on is taken back; 0: any", NATURAL),
    Key("thin_rounds", BOOL, True, "", "step less in a round with fewer tokens than usual"),
    Key("quorum", REAL, 0.5, "of live", "workers that deliver before a last call", SHARE),
    Key("deadline_k", REAL, 4.0, "20ths of a round", "that a worker may be late", NATURAL),
    Key("min_deadline", TIME, "5s", "", "a round waits at least so long for the slow"),
    Key("last_call", TIME, "10s", "", "least time given to answer the last call"),
    Key("fragment", SIZE, "32mb", "", "float32 bytes delivered and averaged as one", POSITIVE),
    Key("join_ramp", INT, 20, "steps", "of rising learning rate without inner state", NATURAL),
    Key("inner_state_every", INT, 1, "versions", "between its saves; 0: only on notice", NATURAL),
    Key("inner_state_max_age", INT, 3, "versions", "an older one is not adopted", NATURAL),
), "sync": (
    Key("global_batch_size", INT, 0, "samples", "of a step; 0: train.batch_size times elastic.max",
        NATURAL),
    Key("sizes", INTS, [], "GPUs", "that a job may have, of all from min to max; empty: any",
        ALL_COUNTS),
    Key("checkpoints", TEXT, "", "", "where run.command saves; empty: RUN/checkpoints"),
    Key("resume", TEXT, "", "", 'pattern below checkpoints of what {resume} may be ("ckpt*.pt"); '
        "empty: by the names that programs usually choose", BELOW),
    Key("silent_timeout", TIME, "0s", "", "run.command without output or a new checkpoint so long: "
        "ended, with its stacks, and started again; 0: never"),
    Key("notice_signal", TEXT, "TERM", "", "what run.command gets as the notice", SIGNAL),
    Key("ranks_per_node", INT, 0, "", "of run.command; 0: one per GPU; 1: for torchrun", NATURAL),
    Key("bind", TEXT, "auto", "", "where ranks meet: an interface or an address of the first node; "
        "auto: as Slurm knows the node"),
    Key("grow_after", TIME, "10m", "", "least age of a job that is restarted to use more GPUs"),
    Key("crash_retries", INT, 2, "crashes", "without a new checkpoint before the job gives up",
        NATURAL),
), "checkpoint": (
    Key("interval", TEXT, "auto", "", 'of checkpoints in sync mode; auto: by their cost', INTERVAL),
    Key("keep", INT, 3, "versions", "the newest ones, that stay on disk", COUNT),
    Key("keep_every", INT, 0, "versions", "every Mth stays for good; 0: none", NATURAL),
    Key("min_free", SIZE, "1gb", "", "disk space needed to start; below it commits wait"),
), "health": (
    Key("heartbeat", TIME, "2s", "", "between signs of life", BEAT),
    Key("lease", TIME, "15s", "", "silent so long: lost; at least two heartbeats", POSITIVE),
    Key("stall_after", TIME, "60s", "", "beating without a step so long: stalled", POSITIVE),
    Key("hang_timeout", TIME, "10m", "", "without a step so long: ended and replaced", POSITIVE),
    Key("master_wait", TIME, "10m", "", "without a master so long: a worker leaves its GPUs",
        POSITIVE),
    Key("liveness_interval", TIME, "10m", "", "sync mode: between checks of ranks and GPUs",
        POSITIVE),
    Key("liveness_timeout", TIME, "60s", "", "for all ranks to answer such a check", POSITIVE),
    Key("nan_action", TEXT, "skip", "", "on a non-finite gradient; warn and rollback: in sync mode",
        _one_of("skip", "stop", "warn", "rollback")),
    Key("max_bad_batches", INT, 5, "batches", "skipped in a row fail the worker", COUNT),
), "slurm": (
    Key("partition", TEXT, "", "", "of workers; needed when run.scheduler is slurm"),
    Key("master_partition", TEXT, "", "", "of the master, a CPU job; empty: partition"),
    Key("account", TEXT, "", "", "charged for the jobs; empty: Slurm's default"),
    Key("master_account", TEXT, "", "", "charged for the master; empty: account"),
    Key("qos", TEXT, "", "", "of the jobs; empty: Slurm's default"),
    Key("master_qos", TEXT, "", "", "of the master, one that is not preempted; empty: qos"),
    Key("time", TEXT, "", "", "limit of a worker, as sbatch takes it; empty: the partition's"),
    Key("master_time", TEXT, "", "", "limit of the master; empty: the partition's"),
    Key("gpus_per_worker", INT, 1, "GPUs", "all on one node", COUNT),
    Key("gpus_per_node", INT, 1, "GPUs", "that a job in sync mode takes of each node", COUNT),
    Key("gres", TEXT, "gpu", "", "name of the GPUs, with a type where needed: gpu:a100"),
    Key("cpus_per_gpu", INT, 0, "CPUs", "0: the partition's default, else a GPU's share of its "
        "node", NATURAL),
    Key("mem_per_gpu", TEXT, "", "", "as sbatch takes it (64G); empty: likewise", MEMORY),
    Key("master_cpus", INT, 0, "CPUs", "of the master's job; 0: the partition's default", NATURAL),
    Key("master_mem", TEXT, "", "", "of the master's job; empty: what it holds, where that is "
        "known", MEMORY),
    Key("signal", TEXT, "", "", "before the time limit, as sbatch takes it (USR2@60); empty: "
        "TERM@120 in sync mode"),
    Key("options", LIST, [], "", "further sbatch options of workers", ONE_CLUSTER),
    Key("master_options", LIST, [], "", "further sbatch options of the master", ONE_CLUSTER),
    Key("srun_options", LIST, [], "", "further srun options of workers: --container-image=…"),
    Key("rank_prefix", LIST, [], "", "words before each rank's command: apptainer exec --nv IMAGE"),
    Key("exclude", TEXT, "", "", "nodes never to use, as sbatch takes them"),
), "redis": (
    Key("url", URL, "", "", "of a server the site provides; empty: the master starts one"),
    Key("bind", TEXT, "auto", "", "to listen on; auto: what routes to the workers", BIND),
    Key("port", INT, 0, "", "of the master's server; 0: a free one", PORT),
    Key("maxmemory", SIZE, "256mb", "", "of the master's server", ROOM),
    Key("tls", WHERE_POSSIBLE, "auto", "", "of the master's server, with a certificate that it "
        "makes itself; auto: where openssl and redis-server know it"),
    Key("server", TEXT, "", "", "path of redis-server; empty: from PATH, a module, this venv"),
), "local_scheduler": (
    Key("gpus", INT, 0, "GPUs", "that this machine pretends to have; 0: elastic.max", NATURAL),
    Key("grace", TIME, "10s", "", "from the notice of a preemption to the kill"),
), "plan": (
    Key("step", TIME, "0s", "", "of an inner step, as elastic-plan takes it; 0: by the model's "
        "size"),
    Key("flops", REAL, 1.2e14, "per s", "that training gets out of a GPU, where plan.step is 0",
        POSITIVE),
    Key("startup", TIME, "60s", "", "from a job's start to its first step"),
    Key("queue", TIME, "2s", "", "from a GPU being free to the start of the job that waits for it"),
    Key("requeue", TIME, "121s", "", "that Slurm lets a requeued job wait: cred_expire and a bit"),
    Key("notice", TIME, "30s", "", "of a preemption: GraceTime, or KillWait where that is 0"),
    Key("leave", TIME, "2s", "", "from the last delivery or save of a job to its end"),
    Key("save", TIME, "0s", "", "of a checkpoint of sync mode; 0: by the model's size"),
    Key("process", SIZE, "5gb", "per s", "that one process reads or writes", POSITIVE),
    Key("filesystem", SIZE, "20gb", "per s", "that all processes read or write together",
        POSITIVE),
)}
# fmt: on


MOST_DEEP = 16  # tables and arrays in one another


def _field(key: Key) -> str:
    return key.name + key.kind.suffix


_SECTION_TYPES = {
    section: dataclasses.make_dataclass(section, [_field(key) for key in keys], frozen=True)
    for section, keys in KEYS.items()
}


_Sections = dataclasses.make_dataclass("_Sections", KEYS, frozen=True)


@dataclasses.dataclass(frozen=True)
class Config(_Sections):
    """A resolved configuration: one frozen dataclass per section of KEYS, and the [task] table."""

    task: dict[str, Any]
    origins: Mapping[str, str] = dataclasses.field(compare=False, repr=False)

    @property
    def step_samples(self) -> int:
        """Samples of a worker's inner step."""
        train = self.train
        return train.batch_size * train.accumulate * self.slurm.gpus_per_worker

    def origin(self, name: str) -> str:
        """Where "section.key" got its value: "default", "FILE:LINE" or "command line"."""
        return self.origins.get(name, "default")

    def explain(self) -> list[tuple[str, Any, str, Any, str, str]]:
        """(key, value, unit, default, origin, meaning) for every key, values as TOML has them.

        Of redis.url only the server is there.
        """
        return [(name, shown_url(value) if name == "redis.url" else value, *rest)
                for name, value, *rest in self._rows()]  # fmt: skip

    def _rows(self) -> list[tuple[str, Any, str, Any, str, str]]:
        rows = [(f"{section}.{key.name}", _written(key.kind, getattr(table, _field(key))), key)
                for section, keys in KEYS.items() for table in [getattr(self, section)]
                for key in keys]  # fmt: skip
        rows += [(f"task.{name}", value, Key(name, TEXT, "", "", "handed to the task"))
                 for name, value in self.task.items()]  # fmt: skip
        return [(n, value, k.unit, k.default, self.origin(n), k.doc) for n, value, k in rows]

    def to_toml(self) -> str:
        """The resolved configuration as TOML; `load` without a site file makes an equal Config."""
        lines: dict[str, list[str]] = {}
        for name, value, _, _, origin, _ in self._rows():
            section, key = name.split(".", 1)
            shown = origin if origin.isprintable() else repr(origin)
            remark = "" if origin == "default" else f"  # {shown}"
            line = f"{_toml_key(key)} = {toml_value(value)}{remark}"
            lines.setdefault(section, [f"[{section}]"]).append(line)
        return "\n\n".join(map("\n".join, lines.values())) + "\n"


def load(path: Path, overrides: Sequence[str] = (), site: Path | None = None) -> Config:
    """The configuration of a run's file, over the site file, under "section.key=value" overrides.

    `site`, unless given, is $ELASTIC_SITE or etc/site.toml of the installation.
    """
    site = site or _site_file()
    below = [_read_site(site)] if site else []
    return _resolve([*below, _read(Path(path)), _override_layer(overrides)], Path(path))


def load_written(path: Path, overrides: Sequence[str] = ()) -> Config:
    """What `to_toml` wrote, complete in itself, under `overrides`. It may be another version's,
    that the run goes on with: keys that are not known here are for that one."""
    tables, places = _read(path)
    for section, table in tables.items():
        if section in KEYS and isinstance(table, dict):
            known = {key.name for key in KEYS[section]}
            tables[section] = {name: value for name, value in table.items() if name in known}
    return _resolve([(tables, places), _override_layer(overrides)], path)


def load_site(overrides: Sequence[str] = (), site: Path | None = None) -> Config:
    """What every run inherits: the site file over the defaults, under `overrides`. What that leaves
    to a run's file, such as how long to train, is left open."""
    site = site or _site_file() or Path(os.devnull)
    layers = [_read_site(site), _override_layer(overrides)]
    return _resolve(layers, site, {"train.epochs", "slurm.partition"})


def reference() -> str:
    """The text of etc/keys.toml: every key once, commented out, with its default and meaning."""
    lines = [
        "# Every key of a run's file and of the site file, with default, unit and meaning.",
        "# Written by: PYTHONPATH=lib python3 -m elastic.base.config > etc/keys.toml",
    ]
    for section, keys in KEYS.items():
        lines += ["", f"[{section}]"]
        for key in keys:
            unit = f"[{key.unit}] " if key.unit else ""
            rule = f" ({key.check.text})" if key.check else ""
            setting = f"#{key.name} = {toml_value(key.default)}"
            lines.append(f"{setting:<36} # {unit}{key.doc}{rule}")
    return "\n".join([*lines, "", "[task]", "# free-form: handed to the class that run.task names"])


def parse(kind: Kind, value: Any) -> Any:
    """`value`, as TOML has it, as the kind of key has it inside. UsageError: it is none."""
    number = value
    if kind.units and isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *([a-z]*)", value.strip().lower())
        if match and match[2] in kind.units:
            number = float(match[1]) * kind.units[match[2]]
    if kind.accepts(number):
        return kind.convert(number)
    got = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "table"}
    name = got.get(type(value), type(value).__name__)
    shown = "(not shown: it may hold a password)" if kind is URL else _brief(value)
    raise UsageError(f"expected {kind.expected}, got the {name} {shown}")


def _brief(value: Any) -> str:
    """A value for a message."""
    if type(value) is int and not _integer(value):
        return f"of {value.bit_length()} bits, and 63 are the most"  # its digits may be too many
    text = toml_value(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _written(kind: Kind, value: Any) -> Any:
    """The opposite of `parse`, in the largest unit that divides the value."""
    for unit, size in kind.units.items():
        if value and size >= 1 and value % size == 0:
            return f"{value // size:.0f}{unit}"
    return list(value) if kind in (LIST, INTS) else value


def toml_value(value: Any) -> str:
    """`value` as TOML writes it, on one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(k)} = {toml_value(v)}' for k, v in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


# --- layers: the site file, the run's file, the command line -------------------------------------

_Layer = tuple[dict[str, Any], Mapping[str, str]]  # tables by section; "section.key" -> origin


def _read(path: Path) -> _Layer:
    shown = _shown(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        tables = _parsed(text)
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{shown} is not TOML: no text in UTF-8", "save it as UTF-8") from None
    except ValueError as error:
        raise UsageError(f"{shown} is not TOML: {error}") from error
    lines = _line_numbers(text)
    names = [*tables, *(f"{s}.{k}" for s, t in tables.items() if isinstance(t, dict) for k in t)]
    return tables, {n: f"{shown}:{lines[n]}" if n in lines else shown for n in names}


def _parsed(text: str) -> dict[str, Any]:
    """TOML of a depth that all who walk it can bear. ValueError: it is none."""
    too_deep = ValueError(f"tables and arrays are nested deeper than {MOST_DEEP}")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise too_deep from None
    inside: list[Any] = [tables]
    for _ in range(MOST_DEEP):
        inside = [item for each in inside if isinstance(each, dict | list)
                  for item in (each.values() if isinstance(each, dict) else each)]  # fmt: skip
    if inside:
        raise too_deep
    return tables


def _read_site(path: Path) -> _Layer:
    layer = _read(Path(path))
    if "task" in layer[0]:
        raise UsageError(f"{_shown(path)}: [task] belongs into a run's file")
    return layer


def _line_numbers(text: str) -> dict[str, int]:
    """The line on which each section and "section.key" first appears; tomllib does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]", line):
            section = header[1].replace('"', "")
            lines.setdefault(section, number)
        elif assignment := re.match(r'\s*("[^"]+"|[\w.-]+)\s*=', line):
            lines.setdefault(f"{section}.{assignment[1]}".replace('"', "").lstrip("."), number)
    return lines


def _override_layer(overrides: Iterable[str]) -> _Layer:
    tables: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, _, key = map(str.strip, name.partition("."))
        if not (equals and section and key and _text(override)):
            raise UsageError(f"not an override: {override[:100]!r}", "write section.key=value")
        if (section, key) == ("redis", "url") and ("@" in text or "password=" in text):
            raise UsageError("a password on the command line is no secret: redis.url",
                             "write it into the run's file, with mode 0600")  # fmt: skip
        is_text = any(row.name == key and row.kind in (TEXT, URL) for row in KEYS.get(section, ()))
        tables.setdefault(section, {})[key] = _override_value(text.strip(), is_text)
    names = [*tables, *(f"{section}.{key}" for section, table in tables.items() for key in table)]
    return tables, dict.fromkeys(names, "command line")


def _override_value(text: str, is_text: bool) -> Any:
    """A TOML value; quotes may be left out, and a key that takes text takes 02:00:00 as text."""
    try:
        value = _parsed(f"value = {text}")["value"]
    except ValueError:
        return text
    return text if is_text and not isinstance(value, str) else value


# --- resolving -----------------------------------------------------------------------------------


def _resolve(layers: Sequence[_Layer], path: Path, left_open: Set[str] = frozenset()) -> Config:
    values = {s: {_field(k): parse(k.kind, k.default) for k in keys} for s, keys in KEYS.items()}
    task: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[tuple[str, str]] = []  # (the key in question, what is wrong with it)
    for tables, places in layers:
        for section, table in tables.items():
            if not isinstance(table, dict) or section not in [*KEYS, "task"]:
                problems.append(_bad_section(section, table, places[section]))
            elif section == "task":
                task |= table
            else:
                problems += _take(section, table, places, values[section])
        origins |= places
    _settle(values, path)
    problems += _conflicts(values, {name for name, _ in problems} | left_open)
    if problems:
        texts = [text for _, text in problems]
        raise UsageError("\n  ".join([f"{_shown(path)} cannot be used:", *texts]))
    sections = {section: _SECTION_TYPES[section](**fields) for section, fields in values.items()}
    return Config(**sections, task=task, origins=origins)


def _take(section: str, table: dict, places: Mapping, fields: dict) -> Iterator[tuple[str, str]]:
    """Put a layer's `table` into the `fields` of its section; yield the problems."""
    keys = {key.name: key for key in KEYS[section]}
    for name, value in table.items():
        where = f"{places[f'{section}.{name}']}: {section}.{name}"
        if name not in keys:
            near, guess = _nearest(name, keys)
            text = f"{where}: unknown key{guess}; [{section}] has {', '.join(keys)}"
            yield f"{section}.{near}", text
            continue
        try:
            fields[_field(keys[name])] = _checked(keys[name], value)
        except UsageError as error:
            yield f"{section}.{name}", f"{where}: {error.what}"


def check_value(name: str, value: Any) -> None:
    """Raise UsageError if the key "section.key" cannot be `value`."""
    section, _, last = name.partition(".")
    try:
        _checked(next(key for key in KEYS[section] if key.name == last), value)
    except UsageError as error:
        raise UsageError(f"{name}: {error.what}") from None


def _checked(key: Key, value: Any) -> Any:
    parsed = parse(key.kind, value)
    if key.check and not key.check.holds(parsed):
        raise UsageError(f"must be {key.check.text}, is {_brief(value)}")
    return parsed


def _bad_section(section: str, table: Any, place: str) -> tuple[str, str]:
    legal = [*KEYS, "task"]
    if section in legal:
        return section, f"{place}: {section} is a section, not a key"
    near, guess = _nearest(section, legal)
    return near, f"{place}: unknown section {section}{guess}; there are {', '.join(legal)}"


def _nearest(name: str, legal: Iterable[str]) -> tuple[str, str]:
    near = difflib.get_close_matches(name, legal, 1, cutoff=0.5)
    return (near[0], f", did you mean {near[0]}?") if near else (name, "")


def _settle(values: dict[str, dict[str, Any]], path: Path) -> None:
    """Replace what is left open ("auto", an empty name) by what it comes to."""
    run, sgd, slurm = values["run"], values["local_sgd"], values["slurm"]
    run["name"] = run["name"] or path.stem
    run["folder"] = str(path.resolve().parent / _path(run["folder"], "run.folder"))
    is_sparse, steps = sgd["compression"] == "topk", sgd["inner_steps"]
    if sgd["outer_lr"] == "auto":
        sgd["outer_lr"] = 1.0 if is_sparse else 0.7
    if sgd["outer_momentum"] == "auto":  # what topk leaves out and adds later is a momentum itself
        usual = 0.9 if steps >= 100 else 0.8 if steps > 10 else 0.5
        sgd["outer_momentum"] = 0.0 if is_sparse else usual
    for name in ("partition", "account", "qos"):
        slurm[f"master_{name}"] = slurm[f"master_{name}"] or slurm[name]


def _conflicts(values: dict[str, dict[str, Any]], bad: set[str]) -> Iterator[tuple[str, str]]:
    """What is wrong between values; a rule about a key or section that is `bad` is left out."""
    flat = {f"{section}.{key.name}": values[section][_field(key)]
            for section, keys in KEYS.items() for key in keys}  # fmt: skip
    for keys, holds, text in _RULES:
        is_open = bad.intersection([*keys, *(key.split(".")[0] for key in keys)])
        given = [flat[key] for key in keys]
        if not is_open and not holds(*given):
            yield keys[0], text.format(*map(toml_value, given))


_RULES: tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...] = (
    (("run.name",), NAME.holds, f"run.name must be {NAME.text}, is {{}}"),
    (("elastic.min", "elastic.max"), lambda low, high: low <= high,
     "elastic.min ({}) is above elastic.max ({})"),
    (("elastic.max", "slurm.gpus_per_worker", "run.scheduler", "run.mode"),
     lambda high, needed, where, mode: (where, mode) == ("local", "sync") or high >= needed,
     "elastic.max ({}) is below slurm.gpus_per_worker ({}): not one worker fits"),
    (("train.epochs", "train.max_tokens", "run.command", "run.mode"),
     lambda epochs, tokens, command, mode: (command and mode == "sync")
     or bool(epochs) != bool(tokens),
     "set one of train.epochs ({}) and train.max_tokens ({})"),
    (("train.warmup_fraction", "train.decay_fraction"), lambda up, down: up + down <= 1,
     "train.warmup_fraction ({}) and train.decay_fraction ({}) are more than the whole run"),
    (("health.heartbeat", "health.lease"), lambda beat, lease: lease >= 2 * beat,
     "health.lease is under two heartbeats: heartbeat {} s, lease {} s"),
    (("health.nan_action", "run.mode"), lambda do, mode: mode == "sync" or do in ("skip", "stop"),
     'health.nan_action = {} is for run.mode = "sync"'),
    (("train.max_steps", "run.mode"), lambda steps, mode: mode == "sync" or not steps,
     'train.max_steps = {} is for run.mode = "sync": in local mode set train.max_tokens'),
    (("train.schedule", "run.command"), lambda schedule, own: schedule != "own" or own,
     "train.schedule = {} is for a loop of one's own: run.command is {}"),
    (("sync.sizes", "elastic.min", "elastic.max", "slurm.gpus_per_node"),
     lambda sizes, low, high, n: not sizes or any(low <= s <= high and s % n == 0 for s in sizes),
     "sync.sizes ({}) has none from elastic.min ({}) to elastic.max ({}) in nodes of {} GPUs"),
    (("local_sgd.overlap", "slurm.gpus_per_worker"), lambda how, n: how == "off" or n == 1,
     "local_sgd.overlap = {} is for workers of one GPU: slurm.gpus_per_worker is {}"),
    (("redis.tls", "redis.url"), lambda tls, url: not (tls is True and url),
     "redis.tls = {} is for the master's own server: for TLS to a site's, redis.url is rediss://…"),
    (("slurm.partition", "run.scheduler"), lambda name, scheduler: scheduler == "local" or name,
     'slurm.partition is not set: name it in etc/site.toml, or set run.scheduler = "local"'),
)  # fmt: skip


# --- the environment -----------------------------------------------------------------------------

_OF_A_JOB = ("SLURM", "SRUN_", "PMI", "ELASTIC_JOB_ID")
# A user's settings for Slurm's commands would filter their answers or change their form.
_OF_COMMANDS = ("SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCT_")
_OF_A_SESSION = ("SSH_", "XDG_", "DBUS_", "TMUX", "TERM_", "VSCODE_", "DISPLAY", "XAUTHORITY")
# Where the session is itself a job's: its GPUs, its ranks' places, a folder that ends with it.
_OF_ITS_STEP = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT", "TMPDIR")  # fmt: skip
_OF_A_SHELL = ("STY", "WINDOW", "WINDOWID", "PWD", "OLDPWD", "SHLVL", "_")


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def env(name: str, default: str | None = None) -> str | None:
    """One environment variable; an empty one counts as not set."""
    return os.environ.get(name) or default


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a job, or for a command of Slurm's: `given`, else this process's, without
    what an outer job, a login session or the user's settings left in it. SLURM_CONF stays where
    that file is: a job's own may be in a folder of its node's slurmd."""
    given = os.environ if given is None else given
    dropped = _OF_A_JOB + _OF_COMMANDS + _OF_A_SESSION
    names = _OF_A_SHELL + (_OF_ITS_STEP if "SLURM_JOB_ID" in given else ())
    kept = {name: value for name, value in given.items()
            if not (name.startswith(dropped) or name in names)}  # fmt: skip
    conf = given.get("SLURM_CONF", "")
    return kept | ({"SLURM_CONF": conf} if os.path.exists(conf) else {})


def elastic_home() -> Path:
    """The checkout or installation: the folder that holds bin, etc, lib and sbatch."""
    return Path(elastic.__file__).resolve().parents[2]


def commands() -> Path:
    """The folder of the commands for crontabs and people: of versions side by side the one that
    leads to the current one."""
    home = elastic_home()
    follows = home.parent / "bin"
    return follows if (home.parent / "current").is_symlink() and follows.is_dir() else home / "bin"


def cron_line() -> str:
    """What a user's crontab is to have."""
    return f"*/2 * * * * {shlex.quote(str(commands() / 'elastic-reconcile'))} --jitter"


def torch_program(name: str) -> list[str]:
    """The command line of a process that uses torch; its arguments follow."""
    return [sys.executable, "-P", "-m", "elastic.train.start", name]


def runs_root() -> Path:
    """Where new run directories go: $ELASTIC_RUNS, else ./runs."""
    return _path(env("ELASTIC_RUNS", "runs"), "ELASTIC_RUNS").absolute()


def registry_dir() -> Path:
    """The user's own state, links to runs among it: $ELASTIC_HOME_DIR, else ~/.elastic."""
    folder = _path(env("ELASTIC_HOME_DIR", "~/.elastic"), "ELASTIC_HOME_DIR").resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "remove it, or set ELASTIC_HOME_DIR")
    for each in filter(Path.exists, (folder, folder / "runs", folder / "local" / "jobs")):
        check_private(each)  # what is here is run
    return folder


def _path(text: str, name: str) -> Path:
    """`text`, which a setting of that name gives, with ~ and ~user replaced."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{name}: nobody knows whose home is meant in {text!r}",
                         f"write the whole path into {name}") from None  # fmt: skip


def user_name() -> str:
    """Whose process this is; the number, where nobody has a name for it, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def site_path() -> Path:
    """Where the site file is to be: $ELASTIC_SITE, else etc/site.toml of the installation."""
    return Path(env("ELASTIC_SITE") or elastic_home() / "etc" / "site.toml")


def _site_file() -> Path | None:
    return site_path() if env("ELASTIC_SITE") or site_path().exists() else None


def _shown(path: Path) -> str:
    """Relative where it lies below the working directory, for messages and origins."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


if __name__ == "__main__":
    print(reference())
