"""0D: one GPU runs all items, one after the other.

Concept   One device has the whole model and all data.
Workflow  For each item: the forward pass through all layers, the loss, the backward pass, which
          adds to the gradients. Then one update of the weights.
Pros      No messages, no waiting.
Cons      Time grows with the data and memory with the model; one device limits both.

Run it: titanlite ladder 0d --items 8
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    model, outcome = run_items(gpu, work, range(work.items))

    # One step of gradient descent.
    outcome.store(model)
    return outcome


def run_items(
    gpu: GPU, work: StepWorkload, items: Sequence[int]
) -> tuple[list[integers.Shard], Outcome]:
    """Both passes of these items through the whole model."""
    # The model: for each layer an attention and a feed-forward.
    model = integers.make_layers(range(work.layers), work.width)

    # Weights, gradients and the two moments of Adam, all of the same size.
    gpu.allocate("model", 4 * work.layer_gradient_units * work.layers)

    outcome = Outcome()
    for item in items:
        run_item(gpu, model, work, item, outcome)
    return model, outcome


def run_item(
    gpu: GPU,
    model: Sequence[integers.Shard],
    work: StepWorkload,
    item: int,
    outcome: Outcome,
    **shards: Any,
) -> None:
    """Both passes of an item through all layers; `shards` are options of `run_layers`."""
    gpu.allocate("activations", work.activation_units * work.layers)
    x = integers.make_input(item, work.tokens, work.width)
    x = run_layers(gpu, model, work, "F", item, x, **shards)
    outcome.losses[item] = integers.loss_of(x)
    run_layers(gpu, model, work, "B", item, integers.loss_gradient(x), **shards)
    gpu.free("activations")


def run_layers(
    gpu: GPU,
    model: Sequence[integers.Shard],
    work: StepWorkload,
    kind: str,
    item: int,
    x: integers.Matrix,
    *,
    weight_shards: int = 1,
    token_shards: int = 1,
    complete: Callable[[integers.Matrix], integers.Matrix] = lambda output: output,
) -> integers.Matrix:
    """The forward ("F") or backward ("B") pass of an item: every part adds to its input.

    A backward pass goes from the last part to the first, and each adds to its own gradients. Where
    a rank has shards of the weights, its output is a partial sum; `complete` makes it whole.
    """
    for part in model if kind == "F" else reversed(model):
        units = part.share * work.layer_units(kind) / weight_shards / token_shards
        memory = part.share * work.layer_gradient_units / weight_shards
        gpu.compute(kind, units, memory_units=memory, work=(kind, part.layer, item))
        output = part.forward(item, x) if kind == "F" else part.backward(item, x)
        x = integers.add(x, complete(output))
    return x
