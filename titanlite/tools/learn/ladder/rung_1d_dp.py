"""1D: data parallelism, with a ring all-reduce of the gradients.

Concept   Every rank has the whole model and its own items; gradients are summed over ranks.
Workflow  Each rank runs forward and backward passes of its items. The gradients are cut into as
          many parts as there are ranks. In every step of the ring, each rank sends a part to the
          next rank and receives another from the one before: first to add up, then to pass on.
Pros      Compute is divided by the number of ranks, and all ranks send at the same time: each
          sends 2 (N - 1) / N of the gradients, however many ranks there are.
Cons      No memory is saved, and the gradients are sent in every step.

Run it: titanlite ladder 1d --dp 8
"""

from __future__ import annotations

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_0d import run_items
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    ranks, here = grid.degrees["dp"], gpu.global_rank
    own = work.items // ranks
    model, outcome = run_items(gpu, work, range(here * own, (here + 1) * own))

    # The ring all-reduce.
    gradients = integers.gradients_of(model)
    parts = [integers.split(gradients, part, ranks) for part in range(ranks)]
    size = work.gradient_units / ranks
    before, after = (here - 1) % ranks, (here + 1) % ranks
    for step in range(2 * (ranks - 1)):
        sent, received = (here - step) % ranks, (here - step - 1) % ranks
        message = gpu.exchange(after, before, "gradients", size, parts[sent])
        if step < ranks - 1:  # reduce-scatter: add up
            parts[received] = [a + b for a, b in zip(parts[received], message, strict=True)]
        else:  # all-gather: pass on
            parts[received] = message
    integers.set_gradients(model, [number for part in parts for number in part])

    outcome.store(model)
    return outcome
