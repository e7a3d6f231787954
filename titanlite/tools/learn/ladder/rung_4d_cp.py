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
from titanlite.schedule import make_schedule
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
    pipeline, group, ring = (grid.group(gpu.global_rank, axis) for axis in ("pp", "tp", "cp"))
    replicas = grid.group(gpu.global_rank, "dp", "cp")
    stage, stages = at["pp"], grid.degrees["pp"]
    layers = integers.split(range(work.layers), stage, stages)
    items = integers.split(range(work.items), at["dp"], grid.degrees["dp"])

    # This rank's tokens, and how it exchanges the keys of its heads.
    here = work.tokens // len(ring)
    tokens = slice(at["cp"] * here, (at["cp"] + 1) * here)
    boundary, key_units = work.activation_units / len(ring), work.key_value_units / ways
    model = integers.make_layers(
        layers,
        work.width,
        at["tp"],
        ways,
        first=tokens.start,
        gather_keys=lambda keys: gather_rows(gpu, ring, "keys", key_units, keys),
        scatter_gradients=lambda grads: scatter_rows(gpu, ring, "key gradients", key_units, grads),
    )
    weight_units = work.layer_gradient_units / ways
    gpu.allocate("model", 4 * weight_units * len(layers))

    def run(kind: str, item: int, x: integers.Matrix) -> integers.Matrix:
        """The forward or backward pass of this rank's layers, with the all-reduces of tp."""
        for part in model if kind == "F" else reversed(model):
            units = part.share * work.layer_units(kind) / ways / len(ring)
            memory = part.share * weight_units
            gpu.compute(kind, units, memory_units=memory, work=(kind, part.layer, item))
            partial = part.forward(item, x) if kind == "F" else part.backward(item, x)
            x = integers.add(x, all_reduce_matrix(gpu, group, kind, boundary, partial))
        return x

    # The pipeline, in the order of 1F1B. An item passes the stages forward, then backward.
    outcome = Outcome()
    outputs: dict[int, integers.Matrix] = {}  # of the last stage, for the backward pass
    for action in make_schedule("1F1B", stages, len(items)).actions[stage]:
        item, is_forward = items[action.microbatch or 0], action.kind == "F"
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if is_forward:
            gpu.allocate(f"activations {item}", boundary * len(layers))
        if 0 <= source < stages:
            x = gpu.receive(pipeline[source], str(action), boundary)
        elif is_forward:
            x = integers.make_input(item, work.tokens, work.width)[tokens]
        else:
            x = integers.loss_gradient(outputs.pop(item))
        x = run(action.kind, item, x)
        if 0 <= target < stages:
            gpu.send(pipeline[target], str(action), boundary, x)
        elif is_forward:
            outcome.losses[item], outputs[item] = integers.loss_of(x), x
        if not is_forward:
            gpu.free(f"activations {item}")

    size = weight_units * len(layers)
    total = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, total)
    outcome.store(model)
    return outcome
