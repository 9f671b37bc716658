"""The manual page, from the help texts: `python -m elastic.manual > etc/man/elastic.1`.

One page for all commands; the pages of the single commands are links to it. A test holds that the
file is what the commands say.
"""

import re
from collections.abc import Iterator

import click

from elastic import __version__
from elastic.cli import elastic

ENDINGS = (
    ("0", "done, or nothing to do"), ("1", "an error, which says what, and the way out"),
    ("2", "wrong usage"), ("75", "try again: Slurm or Redis did not answer, or a preemption"),
)  # fmt: skip
SURROUNDINGS = (
    ("ELASTIC_RUNS", "where run directories are made (default: ./runs)"),
    ("ELASTIC_HOME_DIR", "where runs are registered (default: ~/.elastic)"),
    ("ELASTIC_PYTHON", "a Python to use in place of the installation's own"),
)


def page() -> str:
    """The page in roff."""
    lines = [f'.TH ELASTIC 1 "" "elastic {__version__}"', ".SH NAME",
             r"elastic \- train on preemptible Slurm partitions without losing work"]  # fmt: skip
    lines += [".SH SYNOPSIS", r"\fBelastic\-\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]"]
    lines += [".SH DESCRIPTION", *_paragraphs(elastic.help or ""), ".SH COMMANDS"]
    for name, command in elastic.commands.items():
        lines += _command(["elastic", name], command)
    lines += [".SH EXIT STATUS", *_list(ENDINGS), ".SH ENVIRONMENT", *_list(SURROUNDINGS)]
    return "\n".join([*lines, ""])


def _command(path: list[str], command: click.Command) -> Iterator[str]:
    with click.Context(command, info_name="-".join(path), max_content_width=80) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        options = [each.get_help_record(context) for each in command.get_params(context)
                   if isinstance(each, click.Option)]  # fmt: skip
    yield rf".SS {_safe('-'.join(path[:2]))}{_safe(' '.join(['', *path[2:]]))} {_safe(usage)}"
    yield from _paragraphs(command.help or "")
    yield from _list(options)
    if command.epilog:
        yield from [".PP", ".nf", _safe(command.epilog.replace("\b\n", "")), ".fi"]
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from _command([*path, name], part)


def _paragraphs(text: str) -> Iterator[str]:
    for part in re.split(r"\n\s*\n", text.strip()):
        yield from [".PP", _safe(" ".join(part.replace("\b", "").split()))]


def _list(rows: Iterator[tuple[str, str]] | tuple) -> Iterator[str]:
    for name, words in rows:
        yield from [".TP", rf"\fB{_safe(name)}\fR", _safe(words)]


def _safe(text: str) -> str:
    """Text that roff prints as it is."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.M)


if __name__ == "__main__":
    print(page(), end="")
