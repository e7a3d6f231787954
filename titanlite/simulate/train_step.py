"""One training step of a small workload on simulated GPUs, with any mix of parallel dimensions.

Every rank runs the same program; its coordinates determine its items, layers and shards of a layer.
Layers compute the identity, and the result of an item is its square, which also serves as its
gradient. The numbers are therefore the same for every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from titanlite.schedule import Action, make_schedule
from titanlite.simulate.collectives import (
    all_to_all,
    ring_all_gather,
    ring_all_reduce,
    share,
)
from titanlite.simulate.gpu import GPU
from titanlite.simulate.grid import Grid
from titanlite.simulate.work import SimulationError

ATTENTION = 1 / 3  # of a layer's compute and parameters; the rest is the feed-forward
FORWARD = 1 / 3  # of a layer's compute; the rest is the backward pass
STATES = 4  # weights, gradients and Adam's two moments, each the size of the weights

GRID_AXES = ("pp", "dp", "ep", "cp", "tp")


@dataclass(frozen=True)
class Workload:
    """The work of one step, in units of compute and of data."""

    items: int = 16
    layers: int = 4
    compute_units_per_item: float = 20
    gradient_units: float = 500
    activation_units: float = 8  # per item, at a layer boundary
    key_value_units: float = 4  # per item and layer
    experts: int = 4  # per layer, replacing the feed-forward if ep > 1


@dataclass
class Outcome:
    """The outcome of a step on one rank.

    `results[item]` is this rank's part of the result of an item; the parts sum to the result.
    `gradient` is the summed gradient of the replicated parameters, and `expert_gradients[expert]`
    that of each expert stored on this rank.
    """

    results: dict[int, int] = field(default_factory=dict)
    gradient: int = 0
    expert_gradients: dict[int, int] = field(default_factory=dict)


def make_train_step(
    grid: Grid, workload: Workload, sum_gradients: Callable[..., int] = ring_all_reduce
) -> Callable[[GPU], Outcome]:
    """The program of one rank, to pass to `Cluster.run`.

    `grid` has the axes of GRID_AXES. An item is a microbatch; the pipeline runs 1F1B. The experts
    of a layer are sharded over ep; for everything else, ep is a data-parallel axis. Raises
    SimulationError if the workload does not divide evenly.
    """
    degrees = grid.degrees
    for count, name, axes in (
        (workload.items, "items", ("dp", "ep")),
        (workload.layers, "layers", ("pp",)),
        (workload.experts, "experts", ("ep",)),
    ):
        over = 1
        for axis in axes:
            over *= degrees[axis]
        if count % over:
            raise SimulationError(
                f"{count} {name} do not divide evenly over {' x '.join(axes)} = {over}"
            )

    def step(gpu: GPU) -> Outcome:
        return _Rank(gpu, grid, workload).step(sum_gradients)

    return step


class _Rank:
    """The step on one rank: forward and backward of its items through its layers."""

    def __init__(self, gpu: GPU, grid: Grid, workload: Workload) -> None:
        self.gpu, self.workload, self.degrees = gpu, workload, grid.degrees
        self.at = grid.coordinates(gpu.global_rank)
        self.group = {axis: grid.group(gpu.global_rank, axis) for axis in grid.degrees}
        self.replicas = grid.group(gpu.global_rank, "dp", "ep", "cp")
        self.expert_replicas = grid.group(gpu.global_rank, "dp", "cp")
        layers = workload.layers // self.degrees["pp"]
        self.layers = range(self.at["pp"] * layers, (self.at["pp"] + 1) * layers)
        self.is_last = self.at["pp"] == self.degrees["pp"] - 1
        self.uses_experts = self.degrees["ep"] > 1
        self.experts_here = workload.experts // self.degrees["ep"]
        self.outcome = Outcome()
        self.values: dict[int, int] = {}

    def step(self, sum_gradients: Callable[..., int]) -> Outcome:
        self.gpu.allocate("weights, gradients, optimizer", STATES * self._weight_units())
        items = self._items()
        schedule = make_schedule("1F1B", self.degrees["pp"], len(items))
        for action in schedule.actions[self.at["pp"]]:
            self._run(action, items)
        self._sum_gradients(sum_gradients)
        return self.outcome

    def _items(self) -> list[int]:
        """This rank's items, starting with those routed to its own experts.

        At any time, the ranks of an ep group therefore work on items of different experts.
        """
        parts = self.degrees["dp"] * self.degrees["ep"]
        part = self.at["dp"] * self.degrees["ep"] + self.at["ep"]
        count = self.workload.items // parts
        items = list(range(part * count, (part + 1) * count))
        first = self.at["ep"] * self.experts_here % count if self.uses_experts else 0
        return items[first:] + items[:first]

    def _run(self, action: Action, items: list[int]) -> None:
        assert action.microbatch is not None
        item = items[action.microbatch]
        forward = action.kind == "F"
        step, last = (1, self.degrees["pp"] - 1) if forward else (-1, 0)
        starts_here = self.at["pp"] == (0 if forward else self.degrees["pp"] - 1)
        kept = f"activations of item {item}"
        if forward:
            units = self.workload.activation_units / self.degrees["cp"] * len(self.layers)
            self.gpu.allocate(kept, units)
        if not starts_here:
            value = self.gpu.receive(self._stage_rank(-step), f"{action} input", self._boundary())
        elif forward:
            value = share(item, self.at["cp"], self.degrees["cp"])
        else:
            value = self.values.pop(item)
        for layer in self.layers if forward else reversed(self.layers):
            value = self._layer(action.kind, layer, item, value)
        if forward and self.is_last:
            value = self._result(item, value)
        if not forward:
            self.outcome.gradient += value
            self.gpu.free(kept)
        if self.at["pp"] != last:
            self.gpu.send(self._stage_rank(step), f"{action} output", self._boundary(), value)

    def _layer(self, kind: str, layer: int, item: int, value: int) -> int:
        """Run attention and feed-forward of one layer, or their backwards in reverse order."""
        total = self.workload.compute_units_per_item / self.workload.layers
        compute = total * (FORWARD if kind == "F" else 1 - FORWARD)
        parts = [
            (self._attention, ATTENTION * compute),
            (self._experts if self.uses_experts else self._feed_forward, (1 - ATTENTION) * compute),
        ]
        for part, units in parts if kind == "F" else reversed(parts):
            value = part((kind, layer, item), units, value)
        return value

    def _attention(self, work: tuple[str, int, int], units: float, value: int) -> int:
        """With context parallelism, keys and values are all-gathered around the ring."""
        around = self.group["cp"]
        size = self.workload.key_value_units / len(around)
        seen = ring_all_gather(self.gpu, around, f"keys and values {work}", size, value)
        return self._tensor_parallel(work, units, share(sum(seen), self.at["cp"], len(around)))

    def _feed_forward(self, work: tuple[str, int, int], units: float, value: int) -> int:
        return self._tensor_parallel(work, units, value)

    def _experts(self, work: tuple[str, int, int], units: float, value: int) -> int:
        """Send the item to the rank of its expert, compute it there, and send it back."""
        kind, layer, item = work
        ranks = self.group["ep"]
        outgoing: list[list[tuple[int, int]]] = [[] for _ in ranks]
        outgoing[item % self.workload.experts // self.experts_here].append((item, value))
        size = self._boundary()
        arrived = all_to_all(self.gpu, ranks, f"dispatch {work}", size, outgoing)
        returning = []
        for visitors in arrived:
            computed = []
            for visitor, x in visitors:
                computed.append((visitor, self._tensor_parallel((kind, layer, visitor), units, x)))
                if kind == "B":
                    expert = visitor % self.workload.experts
                    gradients = self.outcome.expert_gradients
                    gradients[expert] = gradients.get(expert, 0) + x
            returning.append(computed)
        back = all_to_all(self.gpu, ranks, f"combine {work}", size, returning)
        return next(x for visitors in back for visitor, x in visitors if visitor == item)

    def _tensor_parallel(self, work: tuple[str, int, int], units: float, value: int) -> int:
        """Compute this rank's partial sum of the matrix product, then all-reduce it."""
        ranks = self.group["tp"]
        here = units / (len(ranks) * self.degrees["cp"])
        memory = self._weight_units() / len(self.layers)
        self.gpu.compute(f"{work}", here, memory_units=memory, work=work)
        part = share(value, self.at["tp"], len(ranks))
        return ring_all_reduce(self.gpu, ranks, f"all-reduce {work}", self._boundary(), part)

    def _result(self, item: int, value: int) -> int:
        """The square of the item, split over the cp ranks."""
        whole = ring_all_reduce(self.gpu, self.group["cp"], f"result of item {item}", 1, value)
        part = share(whole * whole, self.at["cp"], self.degrees["cp"])
        self.outcome.results[item] = self.values[item] = part
        return part

    def _sum_gradients(self, sum_gradients: Callable[..., int]) -> None:
        shared, per_expert = self._gradient_units()
        self.outcome.gradient = sum_gradients(
            self.gpu, self.replicas, "gradients", shared, self.outcome.gradient
        )
        if self.uses_experts:
            first = self.at["ep"] * self.experts_here
            for expert in range(first, first + self.experts_here):
                mine = self.outcome.expert_gradients.get(expert, 0)
                self.outcome.expert_gradients[expert] = sum_gradients(
                    self.gpu,
                    self.expert_replicas,
                    f"gradients of expert {expert}",
                    per_expert,
                    mine,
                )

    def _stage_rank(self, step: int) -> int:
        return self.group["pp"][self.at["pp"] + step]

    def _boundary(self) -> float:
        return self.workload.activation_units / self.degrees["cp"]

    def _gradient_units(self) -> tuple[float, float]:
        """Gradient sizes of this rank's layers: the shared parameters, and one expert."""
        units = self.workload.gradient_units / self.workload.layers * len(self.layers)
        units /= self.degrees["tp"]
        return (ATTENTION * units, (1 - ATTENTION) * units) if self.uses_experts else (units, 0)

    def _weight_units(self) -> float:
        shared, per_expert = self._gradient_units()
        return shared + self.experts_here * per_expert
