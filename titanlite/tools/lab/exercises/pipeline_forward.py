"""Note 6: microbatches through stages, one message each."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def pipeline_forward(device, micro_batches, weight):
    """The list of outputs on the last rank, [] on the others: each rank multiplies by its weight.

    Stage 0 reads `micro_batches`, a list of (batch, k) tensors; the others use it only for shapes.
    `weight` is (k, k). While a stage works on microbatch m, the one before it works on m + 1.
    """
    is_last = device.rank == device.mesh.size - 1
    outputs, sending = [], []
    for micro_batch in micro_batches:
        x = micro_batch
        if device.rank > 0:
            x = device.channel(device.rank - 1).recv(torch.empty_like(micro_batch))
        y = x @ weight
        if is_last:
            outputs.append(y)
        else:
            sending.append(device.channel(device.rank + 1).isend(y))
    for transfer in sending:
        transfer.wait()
    return outputs


def inputs(rank):
    batches = [torch.full((2, 2), m + 1.0) for m in range(3)]
    weight = torch.tensor([[1.0, rank], [0.0, 1.0]])
    # Only stage 0 has the data.
    return batches if rank == 0 else [torch.zeros(2, 2) for _ in batches], weight


def expected(inputs):
    outputs = []
    for x in inputs[0][0]:
        for _, weight in inputs:
            x = x @ weight
        outputs.append(x)
    return [[], [], [], outputs]


EXERCISE = Exercise(
    solution=pipeline_forward,
    hint="For each microbatch: receive from rank - 1, multiply, isend to rank + 1. Keep the "
    "transfers and wait for them at the end.",
    inputs=inputs,
    expected=expected,
    forbidden=("broadcast", "all_gather", "gather", "scatter"),
)
