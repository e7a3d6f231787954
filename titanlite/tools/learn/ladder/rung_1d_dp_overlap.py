"""1D: data parallelism that sums gradients during the backward pass, as PyTorch's DDP does.

Concept   The gradients of a layer are complete before the backward pass of the layers below it
          starts. They can be sent while these are computed.
Workflow  All items of a rank are one batch: a forward pass, then a backward pass, layer by layer.
          After the backward pass of a layer, a ring all-reduce of its gradients starts beside the
          computation. The update waits for the last of them.
Pros      Communication is hidden behind compute, as far as the backward pass lasts.
Cons      Messages are smaller, so there are more latencies. The activations of all items are kept
          at the same time. (With items one by one, only the last one's backward pass hides
          anything, since gradients are complete only then.)

Run it: titanlite ladder 1d-overlap --gradient-units 200
"""

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    ranks, here = grid.degrees["dp"], gpu.global_rank
    model = integers.make_layers(range(work.layers), work.width)
    weight_units = work.layer_gradient_units
    gpu.allocate("model", 4 * weight_units * work.layers)

    own = work.items // ranks
    batch = range(here * own, (here + 1) * own)
    gpu.allocate("activations", work.activation_units * work.layers * own)
    xs = {item: integers.make_input(item, work.tokens, work.width) for item in batch}
    for part in model:
        units, memory = part.share * work.layer_units("F") * own, part.share * weight_units
        gpu.compute("forward", units, memory_units=memory, work=("F", part.layer, batch[0]))
        xs = {item: integers.add(x, part.forward(item, x)) for item, x in xs.items()}
    outcome = Outcome(losses={item: integers.loss_of(x) for item, x in xs.items()})

    gradients = {item: integers.loss_gradient(x) for item, x in xs.items()}
    for number in reversed(range(len(model))):
        part = model[number]
        units, memory = part.share * work.layer_units("B") * own, part.share * weight_units
        gpu.compute("backward", units, memory_units=memory, work=("B", part.layer, batch[0]))
        gradients = {item: integers.add(g, part.backward(item, g)) for item, g in gradients.items()}

        # A layer has two parts. After the first one's backward pass, its gradients are complete.
        if number % 2 == 0:
            layer = model[number : number + 2]
            with gpu.overlapped():
                total = ring_all_reduce(
                    gpu, range(ranks), "gradients", weight_units, integers.gradients_of(layer)
                )
            integers.set_gradients(layer, total)
    gpu.free("activations")

    # The part of the communication that the backward pass did not hide.
    gpu.join("gradients")
    outcome.store(model)
    return outcome
