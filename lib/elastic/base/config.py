"""Configuration: the only reader of TOML. A value comes from the command line, else the
run's file, else the site file, else the table of keys, and its origin is kept.

Everything wrong with a configuration is reported in one UsageError, before anything
starts. What depends on other values ("auto", an empty name) is filled in here, once;
nobody asks again.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from elastic.base import keys
from elastic.base.environment import env, expanded, site_file
from elastic.base.errors import UsageError
from elastic.base.keys import KEYS, NAME, TEXT, URL, parse, toml_value

SECTIONS = [*KEYS, "task"]
BEFORE = {"train": {"optimizer": "adamw"}}  # of a file written before there was such a key


# ---- what is resolved ------------------------------------------------------------------

_SECTION_TYPES = {name: make_dataclass(name, [key.field for key in rows], frozen=True)
                  for name, rows in KEYS.items()}
_Sections = make_dataclass("_Sections", KEYS, frozen=True)


class Row(NamedTuple):
    """A key of a resolved configuration; `value` is as TOML has it."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Config(_Sections):
    """A resolved configuration: a frozen dataclass per section, and the [task] table."""

    task: dict[str, Any]
    origins: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def step_samples(self) -> int:
        """Samples of a worker's inner step."""
        train = self.train
        return train.batch_size * train.accumulate * self.slurm.gpus_per_worker

    def workers(self, gpus: int) -> int:
        """Of local mode with so many GPUs, at least one."""
        return max(1, gpus // self.slurm.gpus_per_worker)

    def origin(self, name: str) -> str:
        """Where "section.key" got its value: "default", a file or "command line"."""
        return self.origins.get(name, "default")

    def shown(self) -> "Config":
        """This without a secret: of redis.url only the server is there."""
        return replace(self, redis=replace(self.redis, url=keys.shown_url(self.redis.url)))

    def to_toml(self) -> str:
        """This as TOML; `load` without a site file makes an equal Config of it."""
        lines: dict[str, list[str]] = {}
        for row in self.rows():
            section, name = row.key.split(".", 1)
            shown = row.origin if row.origin.isprintable() else repr(row.origin)
            remark = "" if row.origin == "default" else f"  # {shown}"
            line = f"{keys.toml_key(name)} = {toml_value(row.value)}{remark}"
            lines.setdefault(section, [f"[{section}]"]).append(line)
        return "\n\n".join(map("\n".join, lines.values())) + "\n"

    def rows(self) -> Iterator[Row]:
        """Every key."""
        for section, rows in KEYS.items():
            for key in rows:
                name = f"{section}.{key.name}"
                value = keys.written(key.kind, getattr(getattr(self, section), key.field))
                yield Row(name, value, self.origin(name))
        for name, value in self.task.items():
            yield Row(f"task.{name}", value, self.origin(f"task.{name}"))


def load(path: Path, overrides: Sequence[str] = (), site: Path | None = None,
         left_open: Set[str] = frozenset()) -> Config:
    """The configuration of a run's file, over the site file, under "section.key=value"
    overrides.

    `site`, unless given, is $ELASTIC_SITE or etc/site.toml of the installation. What is
    `left_open` need not be set.
    """
    layers = [*_shell_layers(), _read(site or site_file()), _read(Path(path)),
              _override_layer(overrides)]
    return _resolve(layers, Path(path), left_open)


def load_written(path: Path, overrides: Sequence[str] = ()) -> Config:
    """What `to_toml` wrote, complete in itself, under `overrides`. It may be another
    version's, that the run goes on with: what is not known here is for that one."""
    layer = _read(path)
    tables = {section: layer.tables[section] for section in SECTIONS if section in layer.tables}
    for section in KEYS.keys() & tables.keys():
        if isinstance(table := tables[section], dict):
            known = {key.name: table[key.name] for key in KEYS[section] if key.name in table}
            tables[section] = BEFORE.get(section, {}) | known
    # A run that exists goes on, whatever was asked of the numbers that it was submitted with.
    left_open = frozenset() if overrides else {"slurm.gpus_per_node"}
    layers = [layer._replace(tables=tables), _override_layer(overrides)]
    return _resolve(layers, path, left_open)


def load_site(overrides: Sequence[str] = (), site: Path | None = None) -> Config:
    """What every run inherits: the site file over the defaults, under `overrides`. What
    that leaves to a run's file, such as how long to train, is left open."""
    site = site or site_file()
    layers = [_read(site), _override_layer(overrides)]
    return _resolve(layers, site, {"train.epochs", "slurm.partition"})


# ---- layers: the site file, the run's file, the command line ---------------------------


class _Layer(NamedTuple):
    tables: dict[str, Any]  # by section
    place: str  # where that is written


def _read(path: Path) -> _Layer:
    try:
        # Some editors begin a file with a mark.
        text = path.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text)
        toml_value(tables)  # raises where a run could not write it down again
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    return _Layer(tables, str(path))


def _shell_layers() -> Iterator[_Layer]:
    """What the user's shell tells sbatch: the jobs of a pass would not have it."""
    variables = {"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT",
                 "qos": "SBATCH_QOS", "time": "SBATCH_TIMELIMIT"}
    for name, variable in variables.items():
        if value := env(variable):
            yield _Layer({"slurm": {name: value}}, variable)


def _override_layer(overrides: Iterable[str]) -> _Layer:
    tables: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, _, key = map(str.strip, name.partition("."))
        if not (equals and section and key and TEXT.accepts(override)):
            raise UsageError(f"not an override: {override[:100]!r}", "write section.key=value")
        if (section, key) == ("redis", "url") and ("@" in text or "password=" in text):
            raise UsageError("a password on the command line is no secret: redis.url",
                             "write it into the run's file, with mode 0600")
        tables.setdefault(section, {})[key] = _override_value(section, key, text.strip())
    return _Layer(tables, "command line")


def _override_value(section: str, name: str, text: str) -> Any:
    """A TOML value. Quotes may be left out: 02:00:00 is text to a key that takes text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        toml_value(value)
    except (ValueError, RecursionError):
        return text
    is_text = any(key.name == name and key.kind.expected in (TEXT.expected, URL.expected)
                  for key in KEYS.get(section, ()))
    return text if is_text and not isinstance(value, str) else value


# ---- resolving -------------------------------------------------------------------------

_Problem = tuple[str, str]  # the key or section in question, what is wrong with it


def _resolve(layers: Sequence[_Layer], path: Path, left_open: Set[str] = frozenset()) -> Config:
    values = {section: {key.field: parse(key.kind, key.default) for key in rows}
              for section, rows in KEYS.items()}
    task: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[_Problem] = []
    for tables, place in layers:
        for section, table in tables.items():
            if not isinstance(table, dict) or section not in SECTIONS:
                problems.append(_bad_section(section, place))
                continue
            origins |= {f"{section}.{name}": place for name in table}
            if section == "task":
                task |= table
            else:
                problems += _take(section, table, place, values[section])
    _fill_in(values, path)
    problems += _conflicts(values, {name for name, _ in problems} | left_open)
    if problems:
        texts = [text for _, text in problems]
        raise UsageError("\n  ".join([f"{path} cannot be used:", *texts]))
    sections = {name: _SECTION_TYPES[name](**fields) for name, fields in values.items()}
    return Config(**sections, task=task, origins=origins)


def _take(section: str, table: dict, place: str, fields: dict) -> Iterator[_Problem]:
    """Put a layer's `table` into the `fields` of its section; yield the problems."""
    known = {key.name: key for key in KEYS[section]}
    for name, value in table.items():
        where = f"{place}: {section}.{name}"
        if name not in known:
            near, guess = _nearest(name, known)
            text = f"{where}: unknown key{guess}; [{section}] has {', '.join(known)}"
            yield f"{section}.{near}", text
            continue
        try:
            fields[known[name].field] = parse(known[name].kind, value)
        except UsageError as error:
            yield f"{section}.{name}", f"{where}: {error.what}"


def _bad_section(section: str, place: str) -> _Problem:
    if section in SECTIONS:
        return section, f"{place}: {section} is a section, not a key"
    near, guess = _nearest(section, SECTIONS)
    return near, f"{place}: unknown section {section}{guess}; there are {', '.join(SECTIONS)}"


def _nearest(name: str, legal: Iterable[str]) -> tuple[str, str]:
    near = difflib.get_close_matches(name, legal, 1, cutoff=0.5)
    return (near[0], f", did you mean {near[0]}?") if near else (name, "")


def _fill_in(values: dict[str, dict[str, Any]], path: Path) -> None:
    """Replace what is left open ("auto", an empty name) by what it comes to."""
    run, sgd, slurm = values["run"], values["local_sgd"], values["slurm"]
    run["name"] = run["name"] or path.stem
    run["folder"] = str(path.resolve().parent / expanded(run["folder"], "run.folder"))
    steps = sgd["inner_steps"]
    if values["train"]["optimizer"] == "adamw":  # with Muon each round has its own
        momentum = 0.9 if steps >= 100 else 0.8 if steps > 10 else 0.5
        for name, value in (("outer_lr", 0.7), ("outer_momentum", momentum)):
            sgd[name] = value if sgd[name] == "auto" else sgd[name]
    for name in ("partition", "account", "qos"):
        slurm[f"master_{name}"] = slurm[f"master_{name}"] or slurm[name]


# ---- rules between keys ----------------------------------------------------------------


def _conflicts(values: dict[str, dict[str, Any]], bad: set[str]) -> Iterator[_Problem]:
    """What is wrong between values; what is `bad` in itself breaks no further rule."""
    flat = {f"{section}.{key.name}": values[section][key.field]
            for section, rows in KEYS.items() for key in rows}
    for names, holds, text in _RULES:
        given = [flat[name] for name in names]
        is_open = bad.intersection([*names, *(name.split(".")[0] for name in names)])
        if not is_open and not holds(*given):
            said = text if isinstance(text, str) else text(*given)
            yield names[0], said.format(*map(toml_value, given))


def _not_whole(low: int, high: int, gpus: int, *_) -> str:
    nearest = f"set elastic.min to {high // gpus * gpus} or elastic.max to {-(-low // gpus) * gpus}"
    return f"no nodes of {{2}} GPUs make elastic.min ({{0}}) to elastic.max ({{1}}): {nearest}"


_RULES: tuple[tuple[tuple[str, ...], Callable[..., bool], str | Callable[..., str]], ...] = (
    (("run.name",), NAME.holds, f"run.name must be {NAME.rule}, is {{}}"),
    (("run.folder",), TEXT.accepts, "the folder {} has a name that is not UTF-8"),
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
    (("elastic.min", "elastic.max", "slurm.gpus_per_node", "run.mode", "run.scheduler"),
     lambda low, high, n, *how: how != ("sync", "slurm") or high // n * n >= low or high < n,
     _not_whole),
    (("local_sgd.overlap", "slurm.gpus_per_worker"), lambda how, n: how == "off" or n == 1,
     "local_sgd.overlap = {} is for workers of one GPU: slurm.gpus_per_worker is {}"),
    (("redis.tls", "redis.url"), lambda tls, url: not (tls is True and url),
     "redis.tls = {} is for the master's own server: for TLS to a site's, redis.url is rediss://…"),
    (("slurm.partition", "run.scheduler"), lambda name, scheduler: scheduler == "local" or name,
     "slurm.partition is not set: give --set slurm.partition=NAME, or write it into the run's file"
     " or the site's (elastic-doctor names them); on this machine alone: --scheduler local"),
)
