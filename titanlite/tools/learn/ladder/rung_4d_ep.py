"""4D with expert parallelism: data x pipeline x tensor x expert.

Concept   Each feed-forward becomes several experts, of which an item uses one (here the one with
          its number modulo the number of experts). The experts are split over ranks.
Workflow  As in the 3D script, but ep ranks have other items, like dp ranks, and other experts. An
          all-to-all sends each item to the rank of its expert, another brings the result back;
          both passes do this. The gradients of an expert are complete on its rank, up to the sum
          over dp; all others are summed over dp x ep.
Pros      Several times the weights at the same compute.
Cons      Two all-to-alls per layer and pass, and all ranks wait for the most popular expert. Here
          each rank starts with the items of its own experts, so the load is even.

Run it: titanlite ladder 4d-ep --experts 8
"""

from __future__ import annotations

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rung_3d import run_items
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import all_reduce_matrix, all_to_all, ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    at, ways = grid.coordinates(gpu.global_rank), grid.degrees["tp"]
    group, peers = grid.group(gpu.global_rank, "tp"), grid.group(gpu.global_rank, "ep")
    layers = integers.split(range(work.layers), at["pp"], grid.degrees["pp"])

    # This rank's experts, and its items: first those of its own experts.
    here = integers.split(range(work.experts), at["ep"], len(peers))
    own = work.items // grid.degrees["dp"] // len(peers)
    start = (at["dp"] * len(peers) + at["ep"]) * own
    items = [start + (here[0] + number) % own for number in range(own)]

    model = integers.make_layers(layers, work.width, at["tp"], ways, experts=here)
    part_of = {(part.layer, part.expert): part for part in model}  # attention: no expert
    weight_units = work.layer_gradient_units / ways
    gpu.allocate("model", 4 * weight_units * sum(part.share for part in model))

    def run_part(kind: str, part: integers.Shard, item: int, x: integers.Matrix) -> integers.Matrix:
        units, memory = part.share * work.layer_units(kind) / ways, part.share * weight_units
        gpu.compute(kind, units, memory_units=memory, work=(kind, part.layer, item))
        partial = part.forward(item, x) if kind == "F" else part.backward(item, x)
        return all_reduce_matrix(gpu, group, kind, work.activation_units, partial)

    def run_attention(kind: str, layer: int, item: int, x: integers.Matrix) -> integers.Matrix:
        return run_part(kind, part_of[layer, None], item, x)

    def run_experts(kind: str, layer: int, item: int, x: integers.Matrix) -> integers.Matrix:
        """Send the item to its expert's rank, run those that arrive here, send them back."""
        outgoing: list[list[tuple[int, integers.Matrix]]] = [[] for _ in peers]
        outgoing[item % work.experts // len(here)].append((item, x))
        arrived = all_to_all(gpu, peers, "dispatch", work.activation_units, outgoing)
        answers = [
            [(i, run_part(kind, part_of[layer, i % work.experts], i, y)) for i, y in visitors]
            for visitors in arrived
        ]
        returned = all_to_all(gpu, peers, "combine", work.activation_units, answers)
        return next(y for answer in returned for _, y in answer)

    order = [(layer, one) for layer in layers for one in (run_attention, run_experts)]

    def run(kind: str, item: int, x: integers.Matrix) -> integers.Matrix:
        for layer, one in order if kind == "F" else reversed(order):
            x = integers.add(x, one(kind, layer, item, x))
        return x

    outcome = run_items(gpu, grid, work, items, run)
    # The gradients of an expert are summed over dp alone, those of attentions over dp x ep.
    for expert in (None, *here):
        parts = [part for part in model if part.expert == expert]
        ranks = grid.group(gpu.global_rank, "dp", *(["ep"] if expert is None else []))
        size = weight_units * sum(part.share for part in parts)
        integers.set_gradients(
            parts, ring_all_reduce(gpu, ranks, "sum", size, integers.gradients_of(parts))
        )
    outcome.store(model)
    return outcome
