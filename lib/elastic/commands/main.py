"""`elastic`: the commands that people and cron type, in the order in which they are listed.

A command is its options, what is checked before it starts, and its exit code; what it prints comes
from views, what it knows and does from people/, run/, jobs/ and lab/. Errors (ElasticError,
OSError) become "error: what", "hint: way out" and a code, in one place. torch, and everything that
needs it, is imported by `evaluate` and `validate` alone: the others run under cron and on login
nodes, where seconds and memory count.
"""

import click

from elastic import __version__
from elastic.commands import lab, looking, runs
from elastic.commands.shared import SETTINGS, Commands

LISTED = [runs.submit, runs.reconcile, looking.status, looking.logs, runs.scale, runs.stop,
          looking.audit, looking.report, looking.metrics, looking.evaluate, lab.validate,
          looking.config, looking.doctor, lab.plan, lab.chaos, lab.sandbox]  # fmt: skip


@click.group(cls=Commands, commands=LISTED, context_settings=SETTINGS)
@click.version_option(__version__, message="%(version)s")
def elastic():
    """Train on preemptible Slurm partitions without losing work.

    Every command is also a program: elastic-submit. "elastic demo" shows it all.
    """


def main() -> None:
    elastic(prog_name="elastic")


if __name__ == "__main__":
    main()
