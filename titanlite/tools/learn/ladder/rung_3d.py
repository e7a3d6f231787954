"""3D: data x pipeline x tensor parallelism.

Concept   A rank has some layers (its stage) and of each weight a shard. Groups of ranks share
          their items (tp), pass them on (pp), or have other items (dp).
Workflow  As in both 2D scripts: all-reduces inside a layer, messages between stages, and at the
          end a sum of the gradients over the replicas.
Pros      The weights per rank are divided by stages x shards. Each dimension has a small degree,
          at which it is efficient, and the links that suit it: tp inside a node.
Cons      Each rank is in three groups, and the costs of all three add up.

Run it: titanlite ladder 3d --workers-per-node 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_0d import run_layers
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import all_reduce_matrix, ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload, run_pipeline


def train(gpu: GPU, grid: Grid, work: StepWorkload, **context_parallel: Any) -> Outcome:
    """`context_parallel` are options of the attentions, which rung_4d_cp.py gives."""
    at, ways, parts = grid.coordinates(gpu.global_rank), grid.degrees["tp"], grid.degrees["cp"]
    replicas, group = grid.group(gpu.global_rank, "dp", "cp"), grid.group(gpu.global_rank, "tp")
    layers = integers.split(range(work.layers), at["pp"], grid.degrees["pp"])
    items = integers.split(range(work.items), at["dp"], grid.degrees["dp"])

    model = integers.make_layers(layers, work.width, at["tp"], ways, **context_parallel)
    size = work.layer_gradient_units / ways * len(layers)
    gpu.allocate("model", 4 * size)
    shards = {"weight_shards": ways, "token_shards": parts}

    def complete(partial: integers.Matrix) -> integers.Matrix:
        return all_reduce_matrix(gpu, group, "output", work.activation_units / parts, partial)

    def run(kind: str, item: int, x: integers.Matrix) -> integers.Matrix:
        """The forward or backward pass of this rank's layers, with the all-reduces of tp."""
        return run_layers(gpu, model, work, kind, item, x, **shards, complete=complete)

    outcome = run_items(gpu, grid, work, items, run)
    total = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, total)
    outcome.store(model)
    return outcome


def run_items(
    gpu: GPU,
    grid: Grid,
    work: StepWorkload,
    items: Sequence[int],
    run: Callable[[str, int, integers.Matrix], integers.Matrix],
) -> Outcome:
    """The items one by one through the pipeline; `run` is a pass through this rank's layers."""

    def run_one(kind: str, one: Sequence[int], xs: list[integers.Matrix]) -> list[integers.Matrix]:
        return [run(kind, one[0], xs[0])]

    outcome = Outcome()
    run_pipeline(gpu, grid, work, [[item] for item in items], run_one, outcome)
    return outcome
