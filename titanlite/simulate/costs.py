"""How long things take in a simulation, in any one unit of time; the default is the notebook's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from titanlite.simulate.network import Network
from titanlite.simulate.work import SimulationError

PerStage: TypeAlias = "float | Sequence[float] | Callable[[int], float]"


@dataclass(frozen=True)
class Costs:
    """Durations and sizes of one stage's work on one batch: a number, a list, or a function of it.

    `backward` is the whole backward pass and `weight_gradient` the part of it that no other stage
    waits for (half of it unless given): where a schedule splits the pass, that part is a work of
    its own. Without a `network` nothing is sent. With one, an `activation_units` message crosses
    every edge between workers; it delays only the receiver, but that a worker sends one message
    after the other, unless `overlap_transfers` is off: then the sender can do nothing else
    meanwhile. A work whose weights are kept elsewhere fetches `weight_units` first, at the
    earliest when the `prefetch`-th work before it started, and with 0 when the worker has nothing
    else to do. `reduce_gradients` adds the sum of each stage's gradient over the workers that
    hold it: a ring all-reduce to all of them, or a reduction to the only one; beside the compute,
    or after all of it where transfers don't overlap.
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
            raise SimulationError("costs: activation_units and prefetch cannot be negative")
        if self.reduce_gradients and self.network is None:
            raise SimulationError("costs: reduce_gradients needs a network to reduce over")

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """The durations or sizes called `name`, one a stage; SimulationError if any is negative."""
        given = getattr(self, name)
        if given is None:
            return [full / 2 for full in self.per_stage("backward", num_stages)]
        if callable(given):
            values = [given(stage) for stage in range(num_stages)]
        elif isinstance(given, Sequence):
            values = list(given)
            if len(values) != num_stages:
                raise SimulationError(
                    f"costs: {name} has {len(values)} values for {num_stages} stages"
                )
        else:
            values = [given] * num_stages
        for stage, value in enumerate(values):
            if not value >= 0:
                raise SimulationError(
                    f"costs: {name} of stage {stage} is {value}; it cannot be negative"
                )
        return values
