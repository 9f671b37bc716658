"""`elastic`: the commands that people and cron type, in the order in which they are
listed.

A command is its options, what is checked before it starts, and its exit code; what it
prints comes from views, what it knows and does from people/, run/, jobs/ and lab/. Errors
(ElasticError, OSError) become "error: what", "hint: way out" and a code, in one place.
torch, and everything that needs it, is imported by `evaluate` and `validate` alone: the
others run under cron and on login nodes, where seconds and memory count.
"""

import sys
from pathlib import Path

import click

from elastic import __version__
from elastic.base.durable import PASSING, naming
from elastic.base.environment import tidy
from elastic.base.errors import ElasticError, Exit
from elastic.commands import looking, runs
from elastic.commands.lab import lab
from elastic.commands.shared import SETTINGS, Ordered, say

LISTED = [runs.submit, runs.reconcile, looking.status, looking.logs, runs.scale, runs.stop,
          looking.audit, looking.report, looking.metrics, looking.evaluate, looking.config,
          looking.doctor, lab]


class Commands(Ordered):
    """All commands. Those of the laboratory may be called without `lab`: elastic-chaos.
    """

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, name) or lab.get_command(ctx, name)

    def invoke(self, ctx: click.Context):
        try:
            with naming("the working directory"):  # which somebody may have removed
                Path.cwd()
            return super().invoke(ctx)
        except ElasticError as error:
            say(f"error: {error}", err=True)
            ctx.exit(error.code)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise  # click's own affair: nobody reads on
            where = f": {error.filename}" if error.filename else ""
            say(f"error: {error.strerror or error}{where}", err=True)
            ctx.exit(Exit.TRY_AGAIN if error.errno in PASSING else Exit.ERROR)


@click.group(cls=Commands, commands=LISTED, context_settings=SETTINGS)
@click.version_option(__version__, message="%(version)s")
def elastic():
    """Train on preemptible Slurm partitions without losing work. Every command
    is also a program: elastic-submit. "elastic demo" shows it all."""


def main() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed one is none
        stream.reconfigure(errors="replace")  # an 8-bit locale has no bars
    tidy()
    elastic(prog_name="elastic")


if __name__ == "__main__":
    main()
