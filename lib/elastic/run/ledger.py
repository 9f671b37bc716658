"""The ledger: which samples are committed, held, offered or free. Pure.

A sample is a position in the shuffled order of an epoch; work is counted in half-open
ranges `(epoch, start, stop)` of positions. Each position is in exactly one of four
places:

    free ──grant──▶ held by a worker ──offer──▶ offered in a delta ──commit──▶ committed
      ▲                    │ give_back                  │ withdraw
      └────────────────────┴────────────────────────────┘

The master is the only writer. What it holds is rebuilt from the commits plus what the
workers say they hold, so nothing here has to survive it. A range that is committed never
leaves that state: `refusal` is what keeps a sample from being committed twice, whatever
else went wrong.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int, int]  # epoch, first position, one past the last position
EPOCHS_AHEAD = 10_000  # where epochs are not bounded: a range further on is nonsense


class Ranges:
    """A set of sample positions, kept as sorted, disjoint, non-touching ranges per
    epoch."""

    def __init__(self, ranges: Iterable[Range] = ()):
        self._epochs: dict[int, list[tuple[int, int]]] = {}
        self.add(ranges)

    def __iter__(self) -> Iterator[Range]:
        for epoch in sorted(self._epochs):
            for start, stop in self._epochs[epoch]:
                yield (epoch, start, stop)

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self)

    def add(self, ranges: Iterable[Range]) -> None:
        """Add every position of `ranges`; those already here stay."""
        for epoch, start, stop in ranges:
            if start >= stop:
                continue
            spans = self._epochs.setdefault(epoch, [])
            first = bisect_left(spans, start, key=lambda span: span[1])
            last = bisect_right(spans, stop, key=lambda span: span[0])
            if first < last:
                start, stop = min(start, spans[first][0]), max(stop, spans[last - 1][1])
            spans[first:last] = [(start, stop)]

    def remove(self, ranges: Iterable[Range]) -> None:
        """Remove every position of `ranges`; those not here do not matter."""
        for epoch, start, stop in ranges:
            spans = self._epochs.get(epoch, [])
            first, last = self._touching(spans, start, stop)
            if first < last and start < stop:
                rest = [(spans[first][0], start), (stop, spans[last - 1][1])]
                spans[first:last] = [span for span in rest if span[0] < span[1]]

    def common(self, ranges: Iterable[Range]) -> list[Range]:
        """The positions of `ranges` that are here, as ranges."""
        found = []
        for epoch, start, stop in ranges:
            spans = self._epochs.get(epoch, [])
            first, last = self._touching(spans, start, stop)
            found += [(epoch, max(start, a), min(stop, b)) for a, b in spans[first:last]]
        return found

    @staticmethod
    def _touching(spans: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
        """Slice bounds of the spans that share a position with [start, stop)."""
        first = bisect_right(spans, start, key=lambda span: span[1])
        last = bisect_left(spans, stop, key=lambda span: span[0])
        return first, last


def count(ranges: Iterable[Range]) -> int:
    """Positions in `ranges`, which may repeat."""
    return sum(max(0, stop - start) for _, start, stop in ranges)


def take(queue: list[Range], want: int) -> list[Range]:
    """Remove the first `want` positions of a queue, in its order (which is the order
    trained)."""
    taken = []
    while want > 0 and queue:
        epoch, start, stop = queue.pop(0)
        end = min(stop, start + want)
        taken.append((epoch, start, end))
        if end < stop:
            queue.insert(0, (epoch, end, stop))
        want -= end - start
    return taken


Owner = tuple[int, int]  # slot, attempt
Key = tuple[int, int, int]  # of a delta: slot, attempt, base version


class Ledger:
    """Where each sample of the run is. `epochs == 0` means as many epochs as it takes; an
    epoch that has begun counts, whatever `epochs` is."""

    def __init__(self, samples: int, epochs: int, committed: Iterable[Range] = ()):
        self.samples, self.committed = samples, Ranges(committed)
        begun = max((epoch for epoch, _, _ in self.committed), default=0) + 1
        self.epochs = epochs and max(epochs, begun)
        self.held: dict[Owner, Ranges] = {}
        self.offered: dict[Key, Ranges] = {}
        self.free = Ranges()
        self._opened = 0  # epochs whose samples have been put on offer
        self._open_epochs(self.committed)

    @property
    def complete(self) -> bool:
        """Every sample of every epoch is committed (never, when epochs are not
        bounded)."""
        return self.epochs > 0 and len(self.committed) == self.samples * self.epochs

    def grant(self, owner: Owner, want: int, sharers: int = 1, least: int = 1) -> list[Range]:
        """Hand up to `want` free samples to `owner`.

        Near the end of the last epoch the rest is divided among `sharers`, in multiples
        of `least` (a batch), so that all workers finish together.
        """
        while len(self.free) < want and self._open_epoch():
            pass
        if self._opened == self.epochs:
            want = min(want, least * -(-len(self.free) // (least * max(1, sharers))))
        ranges = take(list(self.free), want)
        self.free.remove(ranges)
        self.held.setdefault(owner, Ranges()).add(ranges)
        return ranges

    def hold(self, owner: Owner, ranges: Iterable[Range]) -> None:
        """Believe `owner` that it holds `ranges`, as far as nobody else has them.

        Used when Redis or the master is new: workers say again what they were granted.
        """
        ranges = [each for each in ranges if self._legal(each)]
        self._open_epochs(ranges)
        mine = self.free.common(ranges)
        self.free.remove(mine)
        self.held.setdefault(owner, Ranges()).add(mine)

    def keep(self, owner: Owner, ranges: Iterable[Range]) -> None:
        """`owner` says that it holds `ranges` and nothing else: the rest of its own is
        free."""
        self.give_back(owner)
        self.hold(owner, ranges)

    def refusal(self, owner: Owner, ranges: Sequence[Range]) -> str:
        """Why `owner` may not commit `ranges`; empty if it may."""
        if any(not self._legal(each) for each in ranges):
            return "samples outside the data set"
        if len(Ranges(ranges)) != count(ranges):
            return "the same sample twice in one delta"
        if self.committed.common(ranges):
            return "samples already committed"
        if any(taken.common(ranges) for taken in self.offered.values()):
            return "samples already in another delta of this round"
        for other, taken in self.held.items():
            if other != owner and taken.common(ranges):
                return f"samples were handed to slot {other[0]} since"
        return ""

    def offer(self, key: Key, ranges: Sequence[Range]) -> None:
        """Move `ranges` (not refused) from held or free to offered in the delta `key`."""
        self._open_epochs(ranges)
        self.free.remove(ranges)
        self.held.get(key[:2], Ranges()).remove(ranges)
        self.offered[key] = Ranges(ranges)

    def withdraw(self, key: Key) -> None:
        """The delta was not merged after all: its samples are free again."""
        self.free.add(self.offered.pop(key, Ranges()))

    def commit(self, key: Key) -> None:
        """The delta is in a committed version."""
        self.committed.add(self.offered.pop(key))

    def give_back(self, owner: Owner) -> None:
        """`owner` is gone: what it held is free again."""
        self.free.add(self.held.pop(owner, ()))

    def _legal(self, each: Range) -> bool:
        epoch, start, stop = each
        in_epochs = 0 <= epoch < (self.epochs or self._opened + EPOCHS_AHEAD)
        return in_epochs and 0 <= start < stop <= self.samples

    def _open_epochs(self, ranges: Iterable[Range]) -> None:
        """Put on offer every epoch that `ranges` touch."""
        last = max((epoch for epoch, _, _ in ranges), default=0)
        while self._opened <= last and self._open_epoch():
            pass

    def _open_epoch(self) -> bool:
        if not self.samples or (self.epochs and self._opened >= self.epochs):
            return False
        whole = [(self._opened, 0, self.samples)]
        self.free.add(whole)
        self.free.remove(self.committed.common(whole))
        self._opened += 1
        return True
