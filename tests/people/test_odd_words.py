"""Words and files that make no sense, at every command: a sentence, never a traceback.

Each command is called in this process, as its program calls it; what it would start is kept from
it by a run that has been stopped, a task that there is not, and folders that are empty.

    pytest tests/people/test_odd_words.py
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from elastic.base import config
from elastic.base.errors import Exit, UsageError
from elastic.base.keys import KEYS
from elastic.commands import main
from elastic.run.rundir import Control, RunDir
from helpers import ROOT

TRACE = next((ROOT / "etc/traces").glob("*.csv"))

ODD = ["", " ", "-1", "nan", "inf", "1e400", "9" * 400, "-" + "9" * 400, "lots", "\ufeff7", "a\nb",
       "\x1b[2J", "/nowhere/x", ".", "~nouser/x", "é" * 300, "null", "[" * 5000, "a.b=c", "=", "%n",
       "1,,2", "../../x"]
CONFIG = '[run]\nscheduler = "local"\ntask = "not_there:Task"\n[train]\nepochs = 1\n'
SAFE = {"submit": ["--dry-run"], "plan": ["--trace", str(TRACE)]}
FILES = {
    "nothing": b"", "a byte order mark": b"\xef\xbb\xbf[run]\n", "no text": bytes(range(256)),
    "an open bracket": b"[run", "deep": b"a = " + b"[" * 5000, "deep keys": b"a." * 3000 + b"b = 1",
    "a long number": b"[train]\nlearning_rate = " + b"9" * 400, "a list": b"[]\n", "JSON": b"{}",
    "a key twice": b"[run]\nname = 'x'\nname = 'y'\n", "a section as a key": b"run = 1\n",
    "UTF-16": "[run]\n".encode("utf-16"), "a zero byte": b"[run]\nname = 'a\0b'\n",
    "a date": b"[train]\nepochs = 2026-11-23\n", "two tables": b"[[run]]\n[[run]]\n",
    "no newline of its own": b"[run]\rname = 'x'", "an unknown key": b"[run]\nnmae = 'x'\n",
}

TRACES = {
    "one line": b"1,2\n", "no numbers": b"a,b\nc,d\n", "a time that is none": b"nan,1\n1,2\n",
    "400 digits": b"0,1\n" + b"9" * 400 + b",2\n", "backwards": b"9,1\n1,2\n3,4\n",
    "events of no time": b'{"kind": "x"}\n', "deep events": b"[" * 100_000,
}


@pytest.fixture
def place(tmp_path, make_config, monkeypatch) -> RunDir:
    """A folder with a run that was stopped ("odd") and a run file ("good.toml")."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(CONFIG)
    control = Control("local", "stopped", 1, 1)
    return RunDir.create(tmp_path / "runs", make_config(name="odd"), control, {})


def call(*words: str) -> Result:
    """The command's end: with a sentence where it is one of an error."""
    done = CliRunner().invoke(main.elastic, list(words), env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit | None), (words, done.exception)
    assert "Traceback" not in done.output, words
    assert done.exit_code in list(Exit), words
    if done.exit_code:
        assert "rror: " in done.output or "hint" in done.output, (words, done.output)
    return done


def commands(group: click.Group = main.elastic) -> Iterator[tuple[list[str], click.Command]]:
    """Every command and the words that lead to it; not what would start a cluster or a demo."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from (([name, *words], inner) for words, inner in commands(command))
        elif name not in ("up", "demo"):
            yield [name], command


def sound(parameter: click.Parameter) -> list[str]:
    """What an argument may be."""
    return {"config": ["good.toml"], "run": ["odd"], "slot": [], "runs": ["odd"],
            "node": ["n1"]}[parameter.name]


def lines() -> Iterator[list[str]]:
    """Every command with every option and argument, each of them odd in every way."""
    for name, command in commands():
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        options = [each for each in command.params if not isinstance(each, click.Argument)]
        plain = [word for each in arguments for word in sound(each)]
        safe = SAFE.get(name[-1], [])
        for word in ODD:
            for option in options:
                if not option.is_flag:
                    yield [*name, *safe, f"{option.opts[-1]}={word}", *plain]
            for argument in arguments:
                others = [w for each in arguments if each is not argument for w in sound(each)]
                yield [*name, *safe, "--", word, *others]
            yield [*name, *safe, f"--{word or 0}", *plain]


def test_odd_words_at_every_command(place):
    tried = Counter()
    for line in lines():
        call(*line)
        tried[line[0]] += 1
    print(tried)
    assert tried.keys() == main.elastic.commands.keys()
    assert tried.total() > 500
    assert place.control().state == "stopped"


@pytest.mark.parametrize("command", ["submit", "config", "validate", "doctor", "plan"])
def test_odd_run_files_at_every_command_that_reads_one(place, command):
    path = place.path.parent / "odd.toml"
    safe = SAFE.get(command, [])
    for name, content in FILES.items():
        path.write_bytes(content)
        done = call(command, *safe, str(path))
        if name != "nothing":
            assert done.exit_code == Exit.USAGE, (name, done.output)
            assert "odd.toml" in done.output, name
    path.unlink()
    path.mkdir()
    assert call(command, *safe, str(path)).exit_code == Exit.USAGE


def test_odd_traces(place):
    path = place.path.parent / "odd.csv"
    for name, content in {**FILES, **TRACES}.items():
        path.write_bytes(content)
        done = call("plan", "good.toml", "--trace", str(path))
        assert done.exit_code, name
        assert "odd.csv" in done.output, name


def loaded(override: str) -> tuple[str, list]:
    """Why it is refused, or every key."""
    try:
        return "", list(config.load("good.toml", [override]).rows())
    except UsageError as error:
        return str(error), []


def test_odd_values_of_every_key(place):
    """Refused by name, or shown: by the command for one key of each word."""
    refused, shown, accepted = 0, 0, {}
    for section, keys in KEYS.items():
        for key, word in itertools.product(keys, ODD):
            name = f"{section}.{key.name}"
            problem, rows = loaded(f"{name}={word}")
            assert not problem or key.name in problem, (name, word, problem)
            refused += bool(problem)
            shown += name in [row.key for row in rows]
            if not problem:
                accepted[word] = f"{name}={word}"
    assert refused > 500
    assert shown > len(accepted) > 10
    for override in accepted.values():
        assert call("config", "good.toml", "--set", override).exit_code == Exit.OK, override
