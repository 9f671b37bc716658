"""What a worker has done on one version: the steps of a round, counted. Pure."""

import math
from dataclasses import dataclass, field

from elastic.run.ledger import Range
from elastic.run.records import Header


@dataclass
class WorkerRound:
    """What this worker has done since it adopted `base`; times are of its own clock."""

    base: int
    started: float
    steps: int = 0
    tokens: int = 0
    sample_count: int = 0
    samples: list[Range] = field(default_factory=list)  # only rank 0 knows which
    pending: int = 0  # samples of the step under way
    losses: int = 0  # steps that had a loss
    loss_sum: float = 0.0
    lr_sum: float = 0.0
    first_loss: float = 0.0
    has_stepped: bool = False  # on this base: steps ahead were done on the one before
    stall_s: float = 0.0
    header: Header | None = None  # of its delta, once that is offered

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.losses if self.losses else 0.0

    def count(self, loss: float, tokens: int, rate: float) -> None:
        """Count a step that has ended, on the samples pending and at the learning rate
        `rate`. A loss that is not finite, as of a batch of nothing but padding, is none."""
        self.steps += 1
        self.tokens += tokens
        self.sample_count += self.pending
        self.lr_sum += rate
        if math.isfinite(loss):
            self.losses, self.loss_sum = self.losses + 1, self.loss_sum + loss
            self.first_loss = loss if self.losses == 1 else self.first_loss
        self.has_stepped = True


def joined(ranges: list[Range]) -> list[Range]:
    """The same positions in the same order, neighbours joined."""
    result: list[Range] = []
    for epoch, start, stop in ranges:
        if result and result[-1][0] == epoch and result[-1][2] == start:
            result[-1] = (epoch, result[-1][1], stop)
        else:
            result.append((epoch, start, stop))
    return result
