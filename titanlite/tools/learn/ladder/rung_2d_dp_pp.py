"""2D: data parallelism x pipeline parallelism.

Concept   The layers are split into stages, one per rank. Items move through them in a pipeline,
          and there are several such pipelines, each with its own items.
Workflow  A rank receives an item's activation from the stage before it, runs its layers, and sends
          the result on; gradients take the way back. In the order 1F1B, a rank runs a few forward
          passes to fill the pipeline, then one forward and one backward pass in turn. Then the
          ranks with the same stage sum their gradients.
Pros      The weights are divided by the number of stages. Messages are small, and between
          neighbours only.
Cons      Ranks wait while the pipeline fills and drains: the bubble, (stages - 1) / items.

Run it: titanlite ladder 2d-pp --pp 4 --dp 1
"""

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_0d import run_layers
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    at, stages = grid.coordinates(gpu.global_rank), grid.degrees["pp"]
    pipeline, replicas = grid.group(gpu.global_rank, "pp"), grid.group(gpu.global_rank, "dp")
    stage, last = at["pp"], stages - 1

    # This rank's layers and items.
    layers = integers.split(range(work.layers), stage, stages)
    items = integers.split(range(work.items), at["dp"], grid.degrees["dp"])
    model = integers.make_layers(layers, work.width)
    weight_units = work.layer_gradient_units
    gpu.allocate("model", 4 * weight_units * len(layers))

    def forward(item: int) -> None:
        gpu.allocate(f"activations {item}", work.activation_units * len(layers))
        if stage == 0:
            x = integers.make_input(item, work.tokens, work.width)
        else:
            x = gpu.receive(pipeline[stage - 1], "activation", work.activation_units)
        x = run_layers(gpu, model, work, "F", item, x)
        if stage == last:
            outcome.losses[item], outputs[item] = integers.loss_of(x), x
        else:
            gpu.send(pipeline[stage + 1], "activation", work.activation_units, x)

    def backward(item: int) -> None:
        if stage == last:
            gradient = integers.loss_gradient(outputs.pop(item))
        else:
            gradient = gpu.receive(pipeline[stage + 1], "gradient", work.activation_units)
        gradient = run_layers(gpu, model, work, "B", item, gradient)
        gpu.free(f"activations {item}")
        if stage > 0:
            gpu.send(pipeline[stage - 1], "gradient", work.activation_units, gradient)

    # 1F1B: the later the stage, the fewer forward passes come first.
    outcome = Outcome()
    outputs: dict[int, integers.Matrix] = {}  # of the items between their passes
    warmup = min(last - stage, len(items))
    for number in range(len(items) + warmup):
        if number < len(items):
            forward(items[number])
        if number >= warmup:
            backward(items[number - warmup])

    size = weight_units * len(layers)
    total = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, total)
    outcome.store(model)
    return outcome
