"""1D: data parallelism, with the simplest sum of gradients: a relay from rank to rank.

Concept   Every rank has the whole model and its own items; gradients are summed over ranks.
Workflow  Each rank runs forward and backward passes of its items. Rank 0 sends its gradients to
          rank 1, which adds its own and sends the sum to rank 2, and so on, back to rank 0.
Pros      Simple. Compute is divided by the number of ranks.
Cons      One rank sends at a time and all others wait. Ranks 1 to N - 2 never have the sum.

Run it: titanlite ladder 1d-relay --dp 8
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

    # The relay: ranks - 1 hops add up the gradients, and one more brings the sum to rank 0.
    gradients = integers.gradients_of(model)
    before, after = (here - 1) % ranks, (here + 1) % ranks
    if here > 0:
        received = gpu.receive(before, "sum so far", work.gradient_units)
        gradients = [a + b for a, b in zip(gradients, received, strict=True)]
    if ranks > 1:
        gpu.send(after, "sum so far", work.gradient_units, gradients)
    if ranks > 1 and here == 0:
        gradients = gpu.receive(before, "sum", work.gradient_units)
    integers.set_gradients(model, gradients)

    outcome.store(model)
    return outcome
