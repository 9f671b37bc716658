"""What the commands share: their declaration, the options of several of them, and their
output."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from elastic.base.durable import is_ours, naming, write_atomic
from elastic.base.units import finite
from elastic.run import rundir, wording

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80,
            "show_default": True}


class Ordered(click.Group):
    """A group that lists its commands in the order in which it was given them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def command(*examples: str, of: str = "elastic", cls: type[click.Command] | None = None):
    """A command of a group, named by the first word of its examples, which stand below
    its help."""
    lines = "\n".join(["\b", "Example:", *(f"  {of} {example}" for example in examples)])
    name = examples[0].split()[0]
    return click.command(name, cls=cls, epilog=lines, context_settings=SETTINGS)


overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="SEC.KEY=VALUE",
    help="Set any key of the configuration (repeatable).",
)
flag = functools.partial(click.option, is_flag=True)
json_option = flag("--json", "as_json", help="Print JSON for scripts.")


def runs_like(_ctx: click.Context, _argument: click.Parameter, typed: str) -> list[str]:
    return [run.name for run in rundir.registered() if run.name.startswith(typed)]


run_argument = functools.partial(click.argument, "run", shell_complete=runs_like)


def say(*lines: str, err: bool = False) -> None:
    """Print words, which may come from anybody: `wording.plain` takes out what would
    control the terminal."""
    with naming("standard error" if err else "standard output"):
        for line in lines:
            click.echo(wording.plain(line), err=err)


warn = functools.partial(say, err=True)


def say_json(data: Any) -> None:
    """Print data for a script."""
    with naming("standard output"):
        click.echo(json.dumps(finite(data), indent=1, allow_nan=False))


def show(as_json: bool, data: Any, view: Callable[[Any], Any]) -> None:
    """Print data for a script, or the view of it for a person."""
    if as_json:
        say_json(data)
        return
    from elastic.people import views

    with naming("standard output"):
        views.show(view, data)


def put(path: Path, data: bytes) -> None:
    """Replace a file as a whole, also where a link leads to it; write into a pipe, or
    /dev/stdout. In a folder for all users, links and pipes of others do not count: the
    file takes their name, or the folder refuses that."""
    is_device = Path("/dev") in path.absolute().parents
    is_own = not os.path.lexists(path) or is_ours(path.lstat().st_uid, is_above=False)
    if is_device or (is_own and path.exists() and not path.is_file()):
        with naming(path), path.open("ab", buffering=0) as file:
            file.write(data)
    else:
        write_atomic(path.resolve() if is_own else path, data)
