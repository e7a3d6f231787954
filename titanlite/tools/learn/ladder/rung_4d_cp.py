"""4D with context parallelism: data x pipeline x tensor x context.

Concept   The tokens of an item are split over ranks too. Everything but attention treats each
          token on its own; for attention, a rank needs the keys of all tokens before its own.
Workflow  As in the 3D script, with a share of the tokens. In the forward pass, the keys of the
          rank's heads go around the ring of the cp ranks until all have all (an all-gather). In
          the backward pass, the gradients of the keys go around and are summed for the rank that
          made them (a reduce-scatter). Weights are replicated over cp, so their gradients are
          summed over dp x cp.
Pros      Activations and messages are divided, so sequences may exceed the memory of one device.
Cons      Two more exchanges per layer and item. The memory of the weights stays the same.

Run it: titanlite ladder 4d-cp --activation-units 400 --key-value-units 200
"""

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_0d import run_layers
from titanlite.tools.learn.ladder.rung_3d import run_pipeline
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import (
    all_reduce_matrix,
    gather_rows,
    ring_all_reduce,
    scatter_rows,
)
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    at, ways = grid.coordinates(gpu.global_rank), grid.degrees["tp"]
    group, ring = grid.group(gpu.global_rank, "tp"), grid.group(gpu.global_rank, "cp")
    replicas = grid.group(gpu.global_rank, "dp", "cp")
    layers = integers.split(range(work.layers), at["pp"], grid.degrees["pp"])
    items = integers.split(range(work.items), at["dp"], grid.degrees["dp"])

    # How this rank exchanges the keys of its heads: those of its own tokens with those of others.
    boundary, key_units = work.activation_units / len(ring), work.key_value_units / ways
    model = integers.make_layers(
        layers,
        work.width,
        at["tp"],
        ways,
        first=at["cp"] * work.tokens // len(ring),
        gather_keys=lambda keys: gather_rows(gpu, ring, "keys", key_units, keys),
        scatter_gradients=lambda grads: scatter_rows(gpu, ring, "key gradients", key_units, grads),
    )
    size = work.layer_gradient_units / ways * len(layers)
    gpu.allocate("model", 4 * size)
    shards = {"weight_shards": ways, "token_shards": len(ring)}

    def complete(partial: integers.Matrix) -> integers.Matrix:
        return all_reduce_matrix(gpu, group, "output", boundary, partial)

    def run(kind: str, item: int, x: integers.Matrix) -> integers.Matrix:
        return run_layers(gpu, model, work, kind, item, x, **shards, complete=complete)

    outcome = run_pipeline(gpu, grid, work, items, run)
    total = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, total)
    outcome.store(model)
    return outcome
