"""2D: data parallelism x tensor parallelism.

Concept   Every matrix product is split over ranks. Of the first product of a pair (queries and
          keys; up), a rank has some columns, and of the second (output; down) the same rows.
Workflow  A rank computes its heads and its hidden units without any message. Their products with
          its rows are a partial sum of the output, which an all-reduce completes. In the backward
          pass, the gradient of the input is such a partial sum. Weights need no exchange in the
          group: each rank has the whole gradient of its shards. Then the replicas sum theirs.
Pros      Weights and compute of every layer are divided, without a bubble, even for one item.
Cons      Four all-reduces per layer and item, which nothing hides: only for fast links.

Run it: titanlite ladder 2d-tp --workers-per-node 2
"""

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_0d import run_item
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import all_reduce_matrix, ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    at, ways = grid.coordinates(gpu.global_rank), grid.degrees["tp"]
    group, replicas = grid.group(gpu.global_rank, "tp"), grid.group(gpu.global_rank, "dp")

    def complete(partial: integers.Matrix) -> integers.Matrix:
        return all_reduce_matrix(gpu, group, "output", work.activation_units, partial)

    # All layers, but of each weight only shard number at["tp"].
    model = integers.make_layers(range(work.layers), work.width, at["tp"], ways)
    weight_units = work.layer_gradient_units / ways
    gpu.allocate("model", 4 * weight_units * work.layers)

    # Ranks of a group have the same items, and the same activations between two parts.
    outcome = Outcome()
    for item in integers.split(range(work.items), at["dp"], grid.degrees["dp"]):
        run_item(gpu, model, work, item, outcome, weight_shards=ways, complete=complete)

    size = weight_units * work.layers
    summed = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, summed)
    outcome.store(model)
    return outcome
