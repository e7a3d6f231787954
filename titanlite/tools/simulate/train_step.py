"""One training step of a small workload on simulated GPUs, with any mix of parallel dimensions.

Every rank runs the same program; its coordinates determine its items, layers, tokens and shards.
The model is that of integer_model.py, so losses, gradients and new weights must be exactly those of
`single_process`, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial

from titanlite.mesh.parallel_dims import Grid
from titanlite.schedule import make_schedule
from titanlite.tools.simulate.collectives import (
    all_to_all,
    gather_rows,
    ring_all_reduce,
    scatter_rows,
)
from titanlite.tools.simulate.exact import Number, exact
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.integer_model import (
    Matrix,
    Shard,
    add,
    flatten,
    gradients_of,
    loss_gradient,
    loss_of,
    make_input,
    make_layers,
    set_gradients,
    split,
    unflatten,
    update,
)
from titanlite.tools.simulate.work import SimulationError

FORWARD = Fraction(1, 3)  # of a layer's compute; the rest is the backward pass
STATES = 4  # weights, gradients and Adam's two moments, each the size of the weights

GRID_AXES = ("pp", "dp", "ep", "cp", "tp")

SumGradients = Callable[[GPU, Sequence[int], str, Number, Sequence[int]], list[int]]


@dataclass(frozen=True)
class StepWorkload:
    """The work of one step: an amount of compute and of data, and the size of the integer model.

    Units are stored as Fractions, so times are exact. `tokens` and `width` determine the numbers
    that are computed, and no time.
    """

    items: int = 16
    layers: int = 4
    compute_units_per_item: Number = 20
    gradient_units: Number = 500
    activation_units: Number = 8  # per item, at a layer boundary
    key_value_units: Number = 4  # per item and layer
    experts: int = 4  # per layer, replacing the feed-forward if ep > 1
    tokens: int = 4  # per item
    width: int = 4  # numbers per token

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("units") or "units_per" in name:
                object.__setattr__(self, name, Fraction(exact(value, name)))
            elif value < 1:
                raise SimulationError(f"{name} is {value}; it must be at least 1")

    @property
    def multiplications(self) -> int:
        """Multiplications of integers in one step of one process: 27 per token and square of width.

        A layer has 9 x `width`^2 weights; a forward pass takes one multiplication for each, a
        backward pass two.
        """
        return 27 * self.items * self.layers * self.tokens * self.width**2

    def layer_units(self, kind: str) -> Fraction:
        """Compute units of one layer for one item, in the forward ("F") or backward ("B") pass."""
        share = FORWARD if kind == "F" else 1 - FORWARD
        return share * Fraction(self.compute_units_per_item) / self.layers

    @property
    def layer_gradient_units(self) -> Fraction:
        """The size of the gradients, or of the weights, of one layer."""
        return Fraction(self.gradient_units) / self.layers


@dataclass
class Outcome:
    """The outcome of a step on one rank.

    `losses[item]` is this rank's part of the loss of an item; the parts sum to the loss.
    `gradients` are summed over all items, and `weights` are those after the update. Both are of
    the rank's own shards, by name.
    """

    losses: dict[int, int] = field(default_factory=dict)
    gradients: dict[str, Matrix] = field(default_factory=dict)
    weights: dict[str, list[list[Fraction]]] = field(default_factory=dict)

    def store(self, parts: Iterable[Shard]) -> None:
        """Store the gradients of `parts` and their weights after one step of gradient descent."""
        for part in parts:
            self.gradients.update(zip(part.names, part.gradients, strict=True))
            self.weights.update(update([part]))


@lru_cache
def single_process(workload: StepWorkload, uses_experts: bool = False) -> Outcome:
    """The step in one process, without GPUs: what every plan must equal."""
    outcome = Outcome()
    experts = range(workload.experts if uses_experts else 0)
    model = make_layers(range(workload.layers), workload.width, experts=experts)
    for item in range(workload.items):
        x = make_input(item, workload.tokens, workload.width)
        parts = [part for part in model if part.expert in (None, item % workload.experts)]
        for part in parts:
            x = add(x, part.forward(item, x))
        outcome.losses[item] = loss_of(x)
        gradient = loss_gradient(x)
        for part in reversed(parts):
            gradient = add(gradient, part.backward(item, gradient))
    outcome.store(model)
    return outcome


def make_train_step(
    grid: Grid,
    workload: StepWorkload,
    sum_gradients: SumGradients = ring_all_reduce,
    *,
    overlap: bool = False,
    microbatch_items: int | None = 1,
) -> Callable[[GPU], Outcome]:
    """The program of one rank, to pass to `Cluster.run`.

    `grid` has the axes of GRID_AXES. The pipeline runs 1F1B over microbatches of
    `microbatch_items` items (None: all items of a rank). The experts of a layer are sharded over
    ep; for everything else, ep is a data-parallel axis. With `overlap`, the gradients of a layer
    are summed as soon as its last backward pass is done, beside the backward passes of the layers
    before it. Raises SimulationError if the workload does not divide evenly.
    """
    per_microbatch = check_divides(grid, workload, microbatch_items)

    def step(gpu: GPU) -> Outcome:
        return _StepOfRank(gpu, grid, workload, sum_gradients, overlap).step(per_microbatch)

    return step


def check_divides(grid: Grid, workload: StepWorkload, microbatch_items: int | None = 1) -> int:
    """The number of items in a microbatch; SimulationError if the workload does not divide."""
    degrees = grid.degrees
    own_items = workload.items // (degrees["dp"] * degrees["ep"])
    per_microbatch = own_items if microbatch_items is None else microbatch_items
    for count, name, over, reason in (
        (workload.items, "items", degrees["dp"] * degrees["ep"], "dp x ep"),
        (workload.layers, "layers", degrees["pp"], "pp"),
        (workload.experts, "experts", degrees["ep"], "ep"),
        (workload.tokens, "tokens", degrees["cp"], "cp"),
        (workload.width, "channels", degrees["tp"], "tp"),
        (own_items, "items of a rank", per_microbatch, "microbatches of size"),
    ):
        if over < 1 or count % over:
            raise SimulationError(f"{count} {name} do not divide evenly over {reason} = {over}")
    return per_microbatch


def run_pipeline(
    gpu: GPU,
    grid: Grid,
    workload: StepWorkload,
    microbatches: Sequence[Sequence[int]],
    run: Callable[[str, Sequence[int], list[Matrix]], list[Matrix]],
    outcome: Outcome,
) -> None:
    """The pipeline, in the order of 1F1B; adds the losses to the outcome.

    `run` is the forward ("F") or backward ("B") pass of a microbatch through this rank's layers,
    with a matrix for each of its items. With cp, a rank has a part of the tokens.
    """
    at, stages = grid.coordinates(gpu.global_rank), grid.group(gpu.global_rank, "pp")
    stage, parts = at["pp"], grid.degrees["cp"]
    outputs: dict[int, Matrix] = {}  # of the last stage, for the backward pass
    for action in make_schedule("1F1B", len(stages), len(microbatches)).actions[stage]:
        items, is_forward = microbatches[action.microbatch or 0], action.kind == "F"
        size = workload.activation_units / parts * len(items)
        kept = f"activations of microbatch {action.microbatch}"
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if is_forward:
            gpu.allocate(kept, size * (workload.layers // len(stages)))
        if 0 <= source < len(stages):
            values = gpu.receive(stages[source], str(action), size)
        elif is_forward:
            wholes = [make_input(item, workload.tokens, workload.width) for item in items]
            values = [list(split(x, at["cp"], parts)) for x in wholes]
        else:
            values = [loss_gradient(outputs.pop(item)) for item in items]
        values = run(action.kind, items, values)
        if not is_forward:
            gpu.free(kept)
        if 0 <= target < len(stages):
            gpu.send(stages[target], str(action), size, values)
        elif is_forward:
            for item, x in zip(items, values, strict=True):
                outcome.losses[item], outputs[item] = loss_of(x), x


class _StepOfRank:
    """The step on one rank: forward and backward of its items through its layers."""

    def __init__(
        self,
        gpu: GPU,
        grid: Grid,
        workload: StepWorkload,
        sum_gradients: SumGradients,
        overlap: bool,
    ) -> None:
        self.gpu, self.grid, self.workload, self.degrees = gpu, grid, workload, grid.degrees
        self.sum_gradients, self.overlap = sum_gradients, overlap
        self.at = grid.coordinates(gpu.global_rank)
        self.group = {axis: grid.group(gpu.global_rank, axis) for axis in grid.degrees}
        self.replicas = grid.group(gpu.global_rank, "dp", "ep", "cp")
        self.expert_replicas = grid.group(gpu.global_rank, "dp", "cp")
        self.layers = split(range(workload.layers), self.at["pp"], self.degrees["pp"])
        self.uses_experts = self.degrees["ep"] > 1
        self.experts_here = workload.experts // self.degrees["ep"]
        self.boundary = Fraction(workload.activation_units) / self.degrees["cp"]
        self.shard_units = workload.layer_gradient_units / self.degrees["tp"]
        self.outcome = Outcome()
        self.last_items: Sequence[int] = ()
        self.model = self._make_model()

    def _make_model(self) -> list[Shard]:
        """The rank's shards: of its layers, its heads and hidden units, and its experts."""
        around = self.group["cp"]
        size = Fraction(self.workload.key_value_units) / self.degrees["tp"]
        experts = range(self.workload.experts if self.uses_experts else 0)
        return make_layers(
            self.layers,
            self.workload.width,
            self.at["tp"],
            self.degrees["tp"],
            experts=split(experts, self.at["ep"], self.degrees["ep"]),
            first=self.at["cp"] * self.workload.tokens // len(around),
            gather_keys=lambda keys: gather_rows(self.gpu, around, "keys", size, keys),
            scatter_gradients=lambda gradients: scatter_rows(
                self.gpu, around, "gradients of keys", size, gradients
            ),
        )

    def step(self, microbatch_items: int) -> Outcome:
        weight_units = self.shard_units * sum(part.share for part in self.model)
        self.gpu.allocate("weights, gradients, optimizer", STATES * weight_units)
        items = self._items()
        microbatches = [
            items[start : start + microbatch_items]
            for start in range(0, len(items), microbatch_items)
        ]
        self.last_items = microbatches[-1]
        run_pipeline(
            self.gpu, self.grid, self.workload, microbatches, self._run_layers, self.outcome
        )
        if not self.overlap:
            self._sum_gradients(self.layers)
        self.gpu.join("gradients")
        self.outcome.store(self.model)
        return self.outcome

    def _items(self) -> list[int]:
        """This rank's items, starting with those routed to its own experts.

        At any time, the ranks of an ep group therefore work on items of different experts.
        """
        parts = self.degrees["dp"] * self.degrees["ep"]
        items = split(
            range(self.workload.items), self.at["dp"] * self.degrees["ep"] + self.at["ep"], parts
        )
        first = self.at["ep"] * self.experts_here % len(items) if self.uses_experts else 0
        return [*items[first:], *items[:first]]

    def _run_layers(self, kind: str, items: Sequence[int], values: list[Matrix]) -> list[Matrix]:
        """Run one pass of one microbatch through the rank's layers."""
        for layer in self.layers if kind == "F" else reversed(self.layers):
            values = self._layer(kind, layer, items, values)
            if self.overlap and kind == "B" and items == self.last_items:
                with self.gpu.overlapped():
                    self._sum_gradients([layer])
        return values

    def _layer(
        self, kind: str, layer: int, items: Sequence[int], values: list[Matrix]
    ) -> list[Matrix]:
        """Run attention and feed-forward of one layer, or their backwards in reverse order."""
        attention, *others = [part for part in self.model if part.layer == layer]
        runs = [
            partial(self._tensor_parallel, attention),
            partial(self._experts, others)
            if self.uses_experts
            else partial(self._tensor_parallel, others[0]),
        ]
        for run in runs if kind == "F" else reversed(runs):
            added = run((kind, layer), items, values)
            values = [add(*each) for each in zip(values, added, strict=True)]
        return values

    def _experts(
        self, own: list[Shard], work: tuple[str, int], items: Sequence[int], values: list[Matrix]
    ) -> list[Matrix]:
        """Send each item to the rank of its expert, compute it there, and send it back."""
        ranks, here, experts = self.group["ep"], self.experts_here, self.workload.experts
        outgoing: list[list[tuple[int, Matrix]]] = [[] for _ in ranks]
        for item, x in zip(items, values, strict=True):
            outgoing[item % experts // here].append((item, x))
        arrived = all_to_all(self.gpu, ranks, f"dispatch {work}", self.boundary, outgoing)
        returning = [
            [
                (item, self._tensor_parallel(own[item % experts % here], work, [item], [x])[0])
                for item, x in visitors
            ]
            for visitors in arrived
        ]
        back = all_to_all(self.gpu, ranks, f"combine {work}", self.boundary, returning)
        found = dict(visitor for visitors in back for visitor in visitors)
        return [found[item] for item in items]

    def _tensor_parallel(
        self, part: Shard, work: tuple[str, int], items: Sequence[int], values: list[Matrix]
    ) -> list[Matrix]:
        """Compute this rank's partial sums of the matrix products, then all-reduce them."""
        ranks = self.group["tp"]
        ways = len(ranks) * self.degrees["cp"]
        units = part.share * self.workload.layer_units(work[0]) * len(items) / ways
        weights = part.share * self.shard_units
        self.gpu.compute(f"{work}", units, memory_units=weights, work=(*work, items[0]))
        run = part.forward if work[0] == "F" else part.backward
        sums = [run(item, x) for item, x in zip(items, values, strict=True)]
        size = self.boundary * len(items)
        total = ring_all_reduce(self.gpu, ranks, f"all-reduce {work}", size, flatten(sums))
        return unflatten(total, sums)

    def _sum_gradients(self, layers: Sequence[int]) -> None:
        """Sum the gradients of `layers` over the ranks that have the same weights."""
        here = [part for part in self.model if part.layer in layers]
        for expert in dict.fromkeys(part.expert for part in here):
            parts = [part for part in here if part.expert == expert]
            ranks = self.replicas if expert is None else self.expert_replicas
            name = "gradients" if expert is None else f"gradients of expert {expert}"
            units = self.shard_units * sum(part.share for part in parts)
            total = self.sum_gradients(self.gpu, ranks, name, units, gradients_of(parts))
            set_gradients(parts, total)
