"""Slurm's host lists, which scontrol cannot expand without a slurm.conf. Pure."""

import itertools
import re

from elastic.base.errors import ElasticError


def expand_hostlist(text: str) -> list[str]:
    """From "n[01-03,7],m4" to n01, n02, n03, n7, m4, in this order. Raises
    ElasticError."""
    if not re.fullmatch(r"(\[\d+(-\d+)?(,\d+(-\d+)?)*\]|[^\[\]])*", text):
        raise ElasticError(f"not a Slurm host list: {text!r}", "echo $SLURM_JOB_NODELIST")
    hosts = []
    # Up to a comma outside of brackets.
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[]+)", part)
        choices = [numbers(inside) if inside else [plain] for inside, plain in pieces]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def numbers(text: str) -> list[str]:
    """From "01-03,7" to 01, 02, 03, 7."""
    spans = [(low, int(high or low)) for low, high in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return [str(n).zfill(len(low)) for low, high in spans for n in range(int(low), high + 1)]
