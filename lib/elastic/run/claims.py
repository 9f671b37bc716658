"""Attempts of a slot and epochs of masters: numbers that link() gives to one process each.

A higher number fences the lower ones: their processes must change nothing more.
"""

import re
from pathlib import Path

from elastic.base.durable import check_folder, create_once, make_folder, names, to_json
from elastic.base.errors import Fenced
from elastic.run.sound import Part

# Names in the folders of a run, with their number. Other names are a user's, such as copies.
RECORD, FOLDER = r"(\d{6,})\.json", r"(\d{6,})"
CHECKPOINT = r"step-(\d{8,})\.json"


class Slots(Part):
    """Each slot's folder and attempts."""

    def path(self, slot: int) -> Path:
        path = self.run.private / "slots" / f"{slot:04d}"
        make_folder(path)
        return check_folder(path)

    def claim(self, slot: int, record: dict) -> int:
        """The next attempt of `slot`; a lower one is fenced from now on."""
        return _next_number(self.path(slot), record)

    def all(self) -> list[int]:
        """The slots that have ever been claimed."""
        return [int(name) for name in names(self.run.path / "slots") if name.isdecimal()]

    def latest(self, slot: int) -> int:
        return _newest_number(self.run.path / "slots" / f"{slot:04d}")

    def fence(self, slot: int, attempt: int) -> None:
        """Raise Fenced if a record of a higher attempt exists. What Redis says of
        attempts does not count: anybody with a password can write that."""
        if (newest := self.latest(slot)) > attempt:
            raise Fenced(f"slot {slot} has attempt {newest}, which is higher than {attempt}")


class Masters(Part):
    """The epochs of a run's masters."""

    def claim(self, record: dict) -> int:
        """The next master epoch; a lower one is fenced from now on."""
        return _next_number(self.run.path / "masters", record)

    def newest(self) -> int:
        """The highest epoch in the records and in the endpoint."""
        endpoint = self.run.endpoint()
        return max(_newest_number(self.run.path / "masters"), endpoint.epoch if endpoint else 0)


def _newest_number(folder: Path) -> int:
    """The highest number that has a record; 0: none."""
    if folder.name not in names(folder.parent):
        return 0
    return max(numbers(folder), default=0)


def numbers(folder: Path, kind: str = RECORD) -> list[int]:
    """The numbers in the names of one kind in a folder."""
    found = (re.fullmatch(kind, name) for name in names(folder))
    return [int(name[1]) for name in found if name]


def _next_number(folder: Path, record: dict) -> int:
    number = _newest_number(folder) + 1
    while not create_once(folder / f"{number:06d}.json", to_json({**record, "number": number})):
        number += 1
    return number
