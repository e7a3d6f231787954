"""0D: one GPU runs all items, one after the other.

Concept   One device has the whole model and all data.
Workflow  For each item: the forward pass through all layers, the loss, the backward pass, which
          adds to the gradients. Then one update of the weights.
Pros      No messages, no waiting.
Cons      Time grows with the data and memory with the model; one device limits both.

Run it: titanlite ladder 0d --items 8
"""

from __future__ import annotations

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.integer_model import (
    add,
    loss_gradient,
    loss_of,
    make_input,
    make_layers,
)
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    # The model: for each layer an attention and a feed-forward.
    model = make_layers(range(work.layers), work.width)
    weight_units = work.layer_gradient_units

    # Weights, gradients and the two moments of Adam, all of the same size.
    gpu.allocate("model", 4 * weight_units * work.layers)

    outcome = Outcome()
    for item in range(work.items):
        gpu.allocate("activations", work.activation_units * work.layers)

        # Forward pass: every part of a layer is added to its input.
        x = make_input(item, work.tokens, work.width)
        for part in model:
            gpu.compute(
                "forward",
                part.share * work.layer_units("F"),
                memory_units=part.share * weight_units,
                work=("F", part.layer, item),
            )
            x = add(x, part.forward(item, x))
        outcome.losses[item] = loss_of(x)

        # Backward pass: from the last part to the first. Each adds to its own gradients.
        gradient = loss_gradient(x)
        for part in reversed(model):
            gpu.compute(
                "backward",
                part.share * work.layer_units("B"),
                memory_units=part.share * weight_units,
                work=("B", part.layer, item),
            )
            gradient = add(gradient, part.backward(item, gradient))
        gpu.free("activations")

    # One step of gradient descent.
    outcome.store(model)
    return outcome
