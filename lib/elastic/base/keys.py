"""The keys of a configuration: one table, `KEYS`, says everything about each of them.

A row has a key's kind, default, unit, meaning and legal values. Parsing, errors, the resolved
run.toml, `Config.explain` and etc/keys.toml all come from it, so that a key is added in one place.
In a file, durations and sizes are written as people say them ("90s", "256mb"); inside, the field
carries its unit (`heartbeat_s`, `fragment_bytes`).
"""

import ipaddress
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from elastic.base import units
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

    @property
    def field(self) -> str:
        """Its name inside."""
        return self.name + self.kind.suffix


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


def reference() -> str:
    """The text of etc/keys.toml: every key once, commented out, with its default and meaning."""
    lines = [
        "# Every key of a run's file and of the site file, with default, unit and meaning.",
        "# Written by: PYTHONPATH=lib python3 -m elastic.base.keys > etc/keys.toml",
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


def written(kind: Kind, value: Any) -> Any:
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
        return f"{{{', '.join(f'{toml_key(k)} = {toml_value(v)}' for k, v in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_key(name: str) -> str:
    """`name` as TOML writes a key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def check_value(name: str, value: Any) -> None:
    """Raise UsageError if the key "section.key" cannot be `value`."""
    section, _, last = name.partition(".")
    try:
        checked(next(key for key in KEYS[section] if key.name == last), value)
    except UsageError as error:
        raise UsageError(f"{name}: {error.what}") from None


def checked(key: Key, value: Any) -> Any:
    """`value`, as TOML has it, as the field has it inside. UsageError: the key cannot have it."""
    parsed = parse(key.kind, value)
    if key.check and not key.check.holds(parsed):
        raise UsageError(f"must be {key.check.text}, is {_brief(value)}")
    return parsed


if __name__ == "__main__":
    print(reference())
