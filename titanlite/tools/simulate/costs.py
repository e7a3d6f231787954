"""The costs of a simulation, in any one unit of time; the defaults are the notebook's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from titanlite.tools.simulate.exact import Exact, Number, Ticks, exact, is_fraction, simplest
from titanlite.tools.simulate.network import Network
from titanlite.tools.simulate.work import SimulationError, ask

PerStage: TypeAlias = Number | Sequence[Number] | Callable[[int], Number]


@dataclass(frozen=True)
class Costs:
    """Durations and sizes of one stage's work on one batch.

    A `PerStage` value is a number, a list with one value per stage, or a function of the stage. All
    numbers are exact: integers, Fractions and Decimals as they are, a float as its shortest decimal
    (0.1 is one tenth). The times of a simulation are integers where they are whole. Other times are
    Fractions if one of its costs is a Fraction or a Decimal, else the nearest floats.

    `backward` is the whole backward pass. `weight_gradient` is the part of it that no other stage
    waits for (default: half); a schedule that splits the pass runs that part separately.

    Without a `network`, communication is free. With one, a message of `activation_units` crosses
    every edge between workers. A worker sends one message at a time; with `overlap_transfers`, it
    can compute while it sends.

    A work item whose weights are stored on another worker first fetches `weight_units`. The fetch
    may start together with the `prefetch`-th work item before it; with `prefetch=0`, the worker
    must be idle first. An owner, the worker that stores weights, sends those of one fetch at a time
    over each of its links (between and inside nodes); without `fetch_contention`, all at once.

    `reduce_gradients` reduces each stage's gradient over the workers that hold it, with a ring
    all-reduce, or to one owner if only one worker stores the weights. The reduction overlaps
    compute, or runs after it if transfers do not overlap.

    `gradient_units` (default: as the weights) and `optimizer_units` are sizes of a stage's
    gradients and optimizer state, `kept_units` (default: `activation_units`) the size of what a
    forward keeps for its backward. They give the memory of a simulation, and take no time. If times
    are in seconds and sizes in bytes, `time_unit="s"` and `size_unit="B"` say so where they are
    shown.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    weight_gradient: PerStage | None = None
    activation_units: Number = 0
    weight_units: PerStage = 0
    network: Network | None = None
    overlap_transfers: bool = True
    prefetch: int = 1
    reduce_gradients: bool = False
    fetch_contention: bool = True
    gradient_units: PerStage | None = None
    optimizer_units: PerStage = 0
    kept_units: PerStage | None = None
    time_unit: Literal["", "s"] = ""
    size_unit: Literal["", "B"] = ""

    def __post_init__(self) -> None:
        if self.time_unit not in ("", "s") or self.size_unit not in ("", "B"):
            raise SimulationError(
                f"costs: time_unit is {self.time_unit!r} and size_unit {self.size_unit!r}; they "
                "must be '' or 's', and '' or 'B'"
            )
        exact(self.activation_units, "costs: activation_units")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise SimulationError(
                f"costs: prefetch is {self.prefetch!r}; it must be an integer of at least 0"
            )
        if self.network is not None and not isinstance(self.network, Network):
            raise SimulationError(f"costs: network is {self.network!r}; it must be a Network")
        if self.reduce_gradients and self.network is None:
            raise SimulationError("costs: reduce_gradients needs a network; give one")

    @property
    def has_sizes(self) -> bool:
        """Whether anything has a size, so that a simulation has memory to show."""
        names = ("activation_units", "weight_units", "gradient_units", "optimizer_units")
        return any(getattr(self, name) not in (0, None) for name in (*names, "kept_units"))

    def per_stage(self, name: str, num_stages: int) -> tuple[list[Exact], bool]:
        """The values of field `name`, one per stage, and whether one is a Fraction or a Decimal.

        Raises SimulationError for a wrong number of values, for one that is no duration or size,
        and for a function that raises or changes its answer.
        """
        given: Any = getattr(self, name)
        if given is None:
            whole, as_fractions = self.per_stage("backward", num_stages)
            return [Fraction(value, 2) for value in whole], as_fractions
        if callable(given):
            values = [_answer(name, given, stage) for stage in range(num_stages)]
        elif isinstance(given, Iterable) and not isinstance(given, str):
            values = list(given)
            if len(values) != num_stages:
                raise SimulationError(
                    f"costs: {name} has {len(values)} values for {num_stages} stages; "
                    "give one value, or one per stage"
                )
        else:
            return [exact(given, f"costs: {name}")] * num_stages, is_fraction(given)
        numbers = [exact(v, f"costs: {name} of stage {stage}") for stage, v in enumerate(values)]
        return numbers, any(map(is_fraction, values))


def _answer(name: str, function: Callable[[int], Any], stage: int) -> Any:
    first, second = (ask(f"costs: {name}", function, stage, f"stage {stage}") for _ in range(2))
    if repr(first) != repr(second):
        raise SimulationError(
            f"costs: {name} of stage {stage} is first {first!r} and then {second!r}; "
            "a function of the stage must not change its answer"
        )
    return first


@dataclass(frozen=True)
class LinkTicks:
    """The times of one link in ticks.

    A message occupies its sender for `transfer` and arrives `latency` later. `fetches[stage]` is
    the time to fetch the weights of a stage.
    """

    latency: int
    transfer: int
    fetches: list[int]


class TickCosts:
    """The costs of `num_stages` stages in whole ticks, with which the engine computes.

    `weight_units` are sizes, not times. Without a network, `between` and `inside` take no time.
    """

    def __init__(self, costs: Costs, num_stages: int) -> None:
        network = costs.network
        names = ("forward", "backward", "weight_gradient", "weight_units")
        numbers: dict[str, list[Exact]] = {}
        as_fractions = is_fraction(costs.activation_units)
        for name in names:
            numbers[name], has_fractions = costs.per_stage(name, num_stages)
            as_fractions |= has_fractions
        _check_durations(numbers)
        self.weight_units = numbers.pop("weight_units")
        sizes = [0, exact(costs.activation_units, "activation_units"), *self.weight_units]
        links: list[list[Exact]] = []
        if network is not None:
            for link in (network.between, network.inside or network.between):
                links.append([link.seconds(size) for size in sizes])
                as_fractions |= link.has_fractions
        times = (time for group in (*numbers.values(), *links) for time in group)
        self.ticks = Ticks(times, as_fractions)
        whole = [[self.ticks.ticks(time) for time in group] for group in numbers.values()]
        self.forward, self.backward, self.weight_gradient = whole
        in_ticks = [[self.ticks.ticks(time) for time in group] for group in links]
        self.between, self.inside = (
            LinkTicks(latency, message - latency, fetches)
            for latency, message, *fetches in in_ticks or [[0] * len(sizes)] * 2
        )


def _check_durations(numbers: Mapping[str, list[Exact]]) -> None:
    if not any(numbers["forward"]) and not any(numbers["backward"]):
        raise SimulationError("costs: forward and backward are both 0; some work must take time")
    for stage, (part, whole) in enumerate(
        zip(numbers["weight_gradient"], numbers["backward"], strict=True)
    ):
        if part > whole:
            raise SimulationError(
                f"costs: weight_gradient of stage {stage} is {simplest(part)}; it must not exceed "
                f"the backward time, {simplest(whole)}"
            )
