"""Programs that take turns. One runs at a time, and only as far as the schedule lets it.

An actor is a thread that stops at every edge: each call to Redis, the run directory or the
scheduler. There it can be left alone for as long as the schedule likes, killed, or go on.
"""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from elastic.base.errors import ElasticError


class Killed(BaseException):
    """SIGKILL: nothing that the program would still do has an effect."""


class Violation(BaseException):
    """The world has seen something that must never happen: no program catches it."""


def must(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


class Stage:
    """A thread that plays one actor after the other: new ones cost more than a schedule."""

    _free: list["Stage"] = []

    def __init__(self):
        self.parts: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._play, daemon=True, name="stage").start()

    @classmethod
    def take(cls) -> "Stage":
        return cls._free.pop() if cls._free else cls()

    def _play(self) -> None:
        while True:
            self.parts.get()()


class Actor:
    """`program` runs in turns of a number of edges; `where` says at which one it stands."""

    def __init__(self, name: str, program: Callable[[], object]):
        self.name, self.where = name, "start"
        self.alive = True
        self.killed = self.fenced = self.frozen = False
        self.freezes_at = ""  # the edge at which it stands still
        self.error: BaseException | None = None
        self._program, self._steps = program, 0
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._stage = Stage.take()
        self._stage.parts.put(self._play)

    def _play(self) -> None:
        self._turn.acquire()
        try:
            if not self.killed:
                self._program()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.alive, self.where = False, "end"
        Stage._free.append(self._stage)
        self._back.release()

    def run(self, steps: int) -> None:
        """Give it the turn for `steps` edges, or until it waits. A frozen one does nothing."""
        if self.frozen and not self.killed:
            return
        self._steps = steps
        self._turn.release()
        self._back.acquire()
        if isinstance(self.error, Violation):
            raise self.error
        if self.error and not isinstance(self.error, ElasticError):
            raise Violation(f"{self.name} breaks: {self.error!r}") from self.error

    def edge(self, where: str) -> None:
        """Called by the program itself before each of its effects."""
        if self.killed:
            raise Killed
        self._steps -= 1
        if where == self.freezes_at:
            self.frozen, self.freezes_at = True, ""
        if self._steps < 0 or self.frozen:
            self._rest(where)

    def idle(self, where: str) -> None:
        """The program waits for something: its turn is over."""
        if self.killed:
            raise Killed
        self._rest(where)

    def _rest(self, where: str) -> None:
        self.where = where
        self._back.release()
        self._turn.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        self.killed = True
        if self.alive:
            self.run(0)


class Cast:
    """The actors of a world, and whose turn it is."""

    def __init__(self):
        self.actors: list[Actor] = []
        self.acting: Actor | None = None

    def enter(self, actor: Actor) -> Actor:
        self.actors.append(actor)
        return actor

    def turn(self, actor: Actor, steps: int) -> None:
        self.acting = actor
        try:
            actor.run(steps)
        finally:
            self.acting = None

    def edge(self, where: str) -> None:
        if self.acting:
            self.acting.edge(where)

    def idle(self, where: str) -> None:
        if self.acting:
            self.acting.idle(where)

    def kill(self, actor: Actor) -> None:
        before, self.acting = self.acting, actor
        try:
            actor.kill()
        finally:
            self.acting = before

    def close(self) -> None:
        for actor in self.actors:
            self.kill(actor)


def operations(schedule: bytes, table: tuple) -> Iterator[tuple[str, int]]:
    """A schedule is pairs of bytes: which operation (zero: none), and how."""
    for at in range(0, len(schedule) - 1, 2):
        if schedule[at]:
            yield table[schedule[at] % len(table)], schedule[at + 1]
