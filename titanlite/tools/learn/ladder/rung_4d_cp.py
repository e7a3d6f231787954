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

from __future__ import annotations

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder import rung_3d
from titanlite.tools.simulate.collectives import gather_rows, scatter_rows
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    place, ring = grid.coordinates(gpu.global_rank)["cp"], grid.group(gpu.global_rank, "cp")
    size = work.key_value_units / grid.degrees["tp"]

    # The 3D step, but this rank exchanges the keys of its heads: those of its own tokens with those
    # of others.
    return rung_3d.train(
        gpu,
        grid,
        work,
        first=place * work.tokens // len(ring),
        gather_keys=lambda keys: gather_rows(gpu, ring, "keys", size, keys),
        scatter_gradients=lambda grads: scatter_rows(gpu, ring, "key gradients", size, grads),
    )
