"""3D: data x pipeline x tensor parallelism.

Concept   A rank has some layers (its stage) and of each weight a shard. Groups of ranks share
          their items (tp), pass them on (pp), or have other items (dp).
Workflow  As in both 2D scripts: all-reduces inside a layer, messages between stages, and at the
          end a sum of the gradients over the replicas.
Pros      The weights per rank are divided by stages x shards. Each dimension has a small degree,
          at which it is efficient, and the links that suit it: tp inside a node.
Cons      Each rank is in three groups, and the costs of all three add up.

Run it: titanlite ladder 3d --workers-per-node 2
"""

from collections.abc import Callable, Sequence

from titanlite.mesh.parallel_dims import Grid
from titanlite.schedule import make_schedule
from titanlite.tools.learn.ladder.rung_0d import run_layers
from titanlite.tools.simulate import integer_model as integers
from titanlite.tools.simulate.collectives import all_reduce_matrix, ring_all_reduce
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.train_step import Outcome, StepWorkload


def train(gpu: GPU, grid: Grid, work: StepWorkload) -> Outcome:
    at, ways = grid.coordinates(gpu.global_rank), grid.degrees["tp"]
    replicas, group = grid.group(gpu.global_rank, "dp"), grid.group(gpu.global_rank, "tp")
    layers = integers.split(range(work.layers), at["pp"], grid.degrees["pp"])
    items = integers.split(range(work.items), at["dp"], grid.degrees["dp"])

    model = integers.make_layers(layers, work.width, at["tp"], ways)
    size = work.layer_gradient_units / ways * len(layers)
    gpu.allocate("model", 4 * size)

    def complete(partial: integers.Matrix) -> integers.Matrix:
        return all_reduce_matrix(gpu, group, "output", work.activation_units, partial)

    def run(kind: str, item: int, x: integers.Matrix) -> integers.Matrix:
        """The forward or backward pass of this rank's layers, with the all-reduces of tp."""
        return run_layers(gpu, model, work, kind, item, x, weight_shards=ways, complete=complete)

    outcome = run_pipeline(gpu, grid, work, items, run)
    total = ring_all_reduce(gpu, replicas, "gradients", size, integers.gradients_of(model))
    integers.set_gradients(model, total)
    outcome.store(model)
    return outcome


def run_pipeline(
    gpu: GPU,
    grid: Grid,
    work: StepWorkload,
    items: Sequence[int],
    run: Callable[[str, int, integers.Matrix], integers.Matrix],
) -> Outcome:
    """The pipeline, in the order of 1F1B. An item passes the stages forward, then backward.

    `run` is a pass of an item through this rank's layers. With cp, a rank has a part of the tokens.
    """
    at, pipeline = grid.coordinates(gpu.global_rank), grid.group(gpu.global_rank, "pp")
    stage, stages, parts = at["pp"], len(pipeline), grid.degrees["cp"]
    size, num_layers = work.activation_units / parts, work.layers // stages
    outcome = Outcome()
    outputs: dict[int, integers.Matrix] = {}  # of the last stage, for the backward pass
    for action in make_schedule("1F1B", stages, len(items)).actions[stage]:
        item, is_forward = items[action.microbatch or 0], action.kind == "F"
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if is_forward:
            gpu.allocate(f"activations {item}", size * num_layers)
        if 0 <= source < stages:
            x = gpu.receive(pipeline[source], str(action), size)
        elif is_forward:
            whole = integers.make_input(item, work.tokens, work.width)
            x = list(integers.split(whole, at["cp"], parts))
        else:
            x = integers.loss_gradient(outputs.pop(item))
        x = run(action.kind, item, x)
        if 0 <= target < stages:
            gpu.send(pipeline[target], str(action), size, x)
        elif is_forward:
            outcome.losses[item], outputs[item] = integers.loss_of(x), x
        if not is_forward:
            gpu.free(f"activations {item}")
    return outcome
