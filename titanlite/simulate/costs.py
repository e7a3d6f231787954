"""The costs of a simulation, in any one unit of time; the defaults are the notebook's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from titanlite.simulate.network import Network
from titanlite.simulate.work import SimulationError

PerStage: TypeAlias = "float | Sequence[float] | Callable[[int], float]"


@dataclass(frozen=True)
class Costs:
    """Durations and sizes of one stage's work on one batch.

    A `PerStage` value is a number, a list with one value per stage, or a function of the stage.

    `backward` is the whole backward pass. `weight_gradient` is the part of it that no other stage
    waits for (default: half); a schedule that splits the pass runs that part separately.

    Without a `network`, communication is free. With one, a message of `activation_units` crosses
    every edge between workers. A worker sends one message at a time; with `overlap_transfers`, it
    can compute while it sends.

    A work item whose weights are stored on another worker first fetches `weight_units`. The fetch
    may start together with the `prefetch`-th work item before it; with `prefetch=0`, the worker
    must be idle first. `reduce_gradients` reduces each stage's gradient over the workers that hold
    it, with a ring all-reduce, or to one owner if only one worker stores the weights. The reduction
    overlaps compute, or runs after it if transfers do not overlap.
    """

    forward: PerStage = 1
    backward: PerStage = 2
    weight_gradient: PerStage | None = None
    activation_units: float = 0.0
    weight_units: PerStage = 0.0
    network: Network | None = None
    overlap_transfers: bool = True
    prefetch: int = 1
    reduce_gradients: bool = False

    def __post_init__(self) -> None:
        if self.activation_units < 0 or self.prefetch < 0:
            raise SimulationError("costs: activation_units and prefetch must not be negative")
        if self.reduce_gradients and self.network is None:
            raise SimulationError("costs: reduce_gradients needs a network; give one")

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """The values of field `name`, one per stage. Raises SimulationError if one is negative."""
        given = getattr(self, name)
        if given is None:
            return [full / 2 for full in self.per_stage("backward", num_stages)]
        if callable(given):
            values = [given(stage) for stage in range(num_stages)]
        elif isinstance(given, Sequence):
            values = list(given)
            if len(values) != num_stages:
                raise SimulationError(
                    f"costs: {name} has {len(values)} values for {num_stages} stages; "
                    "give one value, or one per stage"
                )
        else:
            values = [given] * num_stages
        for stage, value in enumerate(values):
            if not value >= 0:
                raise SimulationError(
                    f"costs: {name} of stage {stage} is {value}; it must not be negative"
                )
        return values
