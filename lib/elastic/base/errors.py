"""Errors and exit codes, which all layers share. Pure.

An error says what is wrong, with the value that was seen, and (`hint`) the way out. The
command line turns it into one message and one exit code; nothing else catches it broadly.
"""

from enum import IntEnum


class Exit(IntEnum):
    """What a process says with its exit status."""

    OK = 0
    ERROR = 1
    USAGE = 2
    # EX_TEMPFAIL of sysexits: preempted, or Redis or Slurm cannot be reached.
    TRY_AGAIN = 75
    UNFIT_NODE = 69  # EX_UNAVAILABLE of sysexits: another node may do it
    DO_NOT_RESTART = 93  # the job asks not to be replaced: the run is done or was stopped


class ElasticError(Exception):
    """An error that a person can act on: `what` happened, and `hint`, the way out."""

    code = Exit.ERROR

    def __init__(self, what: str, hint: str = ""):
        super().__init__(what)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}\n  hint: {self.hint}" if self.hint else self.what


class UsageError(ElasticError):
    """The command or the configuration is wrong; nothing was started."""

    code = Exit.USAGE


class TryAgain(ElasticError):
    """Redis, the scheduler or the filesystem did not answer. Nothing was changed, but for
    a submission, which may have succeeded."""

    code = Exit.TRY_AGAIN


class UnfitNode(ElasticError):
    """This node is at fault: the same may well work on another one."""

    code = Exit.UNFIT_NODE


class Fenced(ElasticError):
    """A higher attempt or master epoch has taken over: this process must not change
    anything any more."""

    code = Exit.DO_NOT_RESTART
