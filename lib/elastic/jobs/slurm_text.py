"""What Slurm's words mean: host lists (which scontrol cannot expand without a
slurm.conf), nodes, and GPUs in a Gres or a limit. Pure.
"""

import itertools
import re
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Node:
    """A node in a partition, as Slurm lists it."""

    partition: str
    name: str
    host: str
    address: str
    state: str
    gres: str
    features: str = ""


def gpus_of(gres: str, wanted: str) -> int:
    """How many of `wanted` ("gpu", or with a type "gpu:a100") a node's Gres has."""
    found = re.findall(r"([\w:.-]+):(\d+)(?=\(|,|$)", gres)
    return sum(int(n) for kind, n in found if kind == wanted or kind.startswith(f"{wanted}:"))


def most_gpus(tres: str, wanted: str) -> list[int]:
    """The limits on `wanted`, or on GPUs of every type, in a limit as Slurm writes it:
    "cpu=64,gres/gpu=8,gres/gpu:a100=4"."""
    found = re.findall(r"\bgres/([\w:.-]+)=(\d+)", tres)
    return [int(n) for kind, n in found if wanted == kind or wanted.startswith(f"{kind}:")]
