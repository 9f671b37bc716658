"""The inner optimizer of a worker, or several that share its model, as the two of a GAN:
who sets its learning rates, and whether it trains on the parameters of a version."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import zip_longest

import torch
from torch import nn
from torch.optim import Optimizer

from elastic.base.errors import ElasticError
from elastic.train.group import own_part

PROBED = 4096  # elements of a parameter
RATES = {"lr", "initial_lr", "max_lr", "min_lr"}  # of a group: a schedule sets them
HALVES = (torch.bfloat16, torch.float16)
ROUNDING = 2**-8  # of a number, by bfloat16: a good step may undo it
FEW_STEPS = 8  # so few steps may end by chance close to where the parameters were before


class InnerOptimizer:
    def __init__(self, given: Optimizer | Sequence[Optimizer], sets_rates: bool):
        """`sets_rates`: the run's schedule does, not the user's loop."""
        self.each = list(given) if isinstance(given, list | tuple) else [given]
        self.sets_rates = sets_rates
        self._peaks = list(map(peak, self.groups))
        self._made_with = deepcopy(list(map(numbers, self.groups)))
        self._began_with = deepcopy(list(map(shared_state, self.each)))
        self._rates: list[float] = []  # as they were set last
        self._has_others = False
        if sets_rates and not any(self._peaks):
            hint = 'give it the peak of train.schedule, or set train.schedule = "own"'
            raise ElasticError("the learning rate of the optimizer is 0", hint)

    @property
    def groups(self) -> list[dict]:
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def forget(self) -> None:
        """Clear its state: moments that are suspect, or another model's."""
        for optimizer, began_with in zip(self.each, self._began_with, strict=True):
            optimizer.state.clear()
            optimizer.state.update(deepcopy(began_with))
        for group, made_with in self._with_beginnings():
            for name in numbers(group):
                del group[name]
            group |= deepcopy(made_with)

    def counted(self) -> list[dict]:
        """The part of its state that is in its groups: a step, a distance. These are the
        numbers that it was not made with."""
        return [{name: number for name, number in numbers(group).items()
                 if name not in made_with or torch.as_tensor(number != made_with[name]).any()}
                for group, made_with in self._with_beginnings()]

    def keep_settings(self, counted: Iterable[Sequence[str]]) -> None:
        """After a load: have the numbers that it was made with, but for the names that the
        loaded state has `counted`, by group."""
        for group, made_with, names in zip(self.groups, self._made_with, counted, strict=False):
            group |= deepcopy({n: number for n, number in made_with.items() if n not in names})

    def _with_beginnings(self) -> Iterator[tuple[dict, dict]]:
        """Every group with the numbers that it was made with; a loop may have added some."""
        return zip_longest(self.groups, self._made_with, fillvalue={})

    def set_rates(self, factor: float) -> None:
        """Every group's peak times `factor`; a loop may have added some groups."""
        self._notice_others()
        self._peaks += map(peak, self.groups[len(self._peaks) :])
        self._rates = [most * factor for most in self._peaks]
        for group, rate in zip(self.groups, self._rates, strict=True):
            group["lr"] = rate

    def doubts(self, model: nn.Module) -> Iterator[str]:
        """Sentences that say which parameters will not train, or hardly."""
        held = {id(param) for group in self.groups for param in group["params"]}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if left := [name for name, param in trained.items() if id(param) not in held]:
            yield f"no optimizer has {', '.join(left[:3])}: give Elastic all optimizers, as a list"
        if halves := [name for name, param in trained.items() if param.dtype in HALVES]:
            yield (f"{', '.join(halves[:3])} and all in all {len(halves)} trained parameters have"
                   " 16 bits, which round most small steps to nothing: train them in float32"
                   ' (model.float()); train.precision = "bf16" computes in bfloat16 all the same')

    def contested(self) -> str:
        """After a step: a sentence that says that somebody else sets the rates; "" if
        nobody does."""
        self._notice_others()
        if not self._has_others:
            return ""
        return ("the loop or a scheduler sets the learning rate, and so does train.schedule before"
                f' each batch (peaks {self._peaks}): remove one, or set it to "own"')

    def _notice_others(self) -> None:
        rates = [float(group["lr"]) for group in self.groups[: len(self._rates)]]
        self._has_others |= self._rates != rates


def refuse_odd(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ElasticError if the optimizers train parameters, or keep moments, that no
    version or checkpoint would hold."""
    for optimizer in optimizers:
        for part in filter(lambda part: part.state is not optimizer.state, _parts(optimizer)):
            what = f"{type(optimizer).__name__} hides the state of its {type(part).__name__}"
            raise ElasticError(what, "give the optimizers that it is made of, as a list")
    own = {id(param) for param in model.parameters()}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    held = (param for group in groups for param in group["params"] if param.requires_grad)
    for shape in [tuple(param.shape) for param in held if id(param) not in own]:
        what = f"the optimizer trains a parameter of shape {shape} that the model has not"
        raise ElasticError(what, "make it a part of the model, whose forward() uses it")


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that an optimizer holds."""
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value
        for each in held if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(each, Optimizer):
                yield each


def peak(group: dict) -> float:
    """The rate that a parameter group is to reach. A scheduler made before has changed
    `lr` and says what it was, or what it is to be."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def keep_types(held: dict, saved: dict) -> None:
    """Give the state of a parameter the values that were `saved`, where `load_state_dict`
    has changed their type: float32 moments of a bf16 parameter stay what they were."""
    for name, value in saved.items():
        if isinstance(value, torch.Tensor) and value.dtype != held[name].dtype:
            held[name] = value.to(held[name].device)


def shared_state(optimizer: Optimizer) -> dict:
    """What its state has for all parameters together, by name: a count of steps."""
    return {name: value for name, value in optimizer.state.items() if isinstance(name, str)}


def numbers(group: dict) -> dict:
    """The numbers of a parameter group, also in tuples, except the learning rates."""
    kinds = int | float | torch.Tensor | tuple
    return {name: value for name, value in group.items() if name not in (*RATES, "params")
            and isinstance(value, kinds) and not isinstance(value, bool)}


class Probe:
    """Finds out whether steps start from where a version has put the parameters.

    An optimizer with float32 copies of its own starts them from its copies, and no
    version is ever trained on: its first step brings the parameters back to where they
    were before.
    """

    def __init__(self, model: nn.Module, near: float, may_ignore: int):
        """A step has gone back if it ends near where the parameters were before: `near`
        is a part of the way that the version has moved them. `may_ignore`: of so many
        versions in a row that may happen by chance."""
        self._near, self._may_ignore = near, may_ignore
        self._param = max(model.parameters(), key=lambda p: p.numel() if p.requires_grad else -1)
        self._before = self._placed = None
        self._counts = False
        self._ignored = 0  # versions in a row

    def before(self) -> None:
        """A version, or a checkpoint, is about to be loaded."""
        self._before = self._values()

    def placed(self, steps: int) -> None:
        """It is in the model, and its parameters are so many steps away from those
        before; 0: nobody knows how many."""
        self._placed, self._counts = self._values(), not 0 < steps < FEW_STEPS

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """After a step: ElasticError if too many versions have been ignored. Only the
        first step after each version is looked at."""
        if self._before is None:
            return
        way, back = (self._placed - self._before).norm(), (self._values() - self._before).norm()
        if self._counts and way > ROUNDING * self._placed.norm():
            self._ignored = self._ignored + 1 if back < way * self._near else 0
        self._before = None
        if self._ignored > self._may_ignore:
            names = ", ".join(type(each).__name__ for each in optimizers)
            what = f"{names} does not train from the parameters that are loaded: its first step"
            what += " brings them back to where they were before"
            raise ElasticError(what, "it keeps copies of its own (master weights): use another")

    def _values(self) -> torch.Tensor:
        return own_part(self._param.detach()).flatten()[:PROBED].float().clone()
