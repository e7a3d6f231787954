"""The communication of a plan: the collectives of one training step that rank 0 issues, counted.

    python tests/benchmarks/communication.py [--flavor F] [--microbatches M] [--order] [plan ...]

Prints one line for each kind of collective and mesh axis: the number of collectives, their total
bytes, and the bytes that the rank sends. P2P messages, such as those between pipeline stages, are a
"send" on one rank and a "receive" on the other. A ring of asynchronous TP counts as the collective
that it replaces. The bytes of a collective are those of its whole tensor: the output of a gather,
the input of a reduction. Of these, each of n ranks sends (n-1)/n in a gather or scatter, and twice
as much in an all-reduce, which is the minimum. The bytes of an all-to-all are those of its input,
of which a rank sends (n-1)/n if its tokens are spread evenly. Plans in OF_EXPERTS have the
model "moe_debug". A plan is a name in PARALLELISM or OF_EXPERTS, optionally with "+" and a name in
CHECKPOINTING, such as "tp4+full". Counted is step 2, after all lazy initialization.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.ranks.launch import Place, spawn

PP, TP, REPLICATE, SHARD = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
)
EP = "expert_parallel_degree"
SCHEDULE = "pipeline_parallel_schedule"
PARALLELISM: dict[str, dict[str, Any]] = {
    "ddp4": {REPLICATE: 4, SHARD: 1},
    "fsdp4": {SHARD: 4},
    "fsdp4_always": {SHARD: 4, "fsdp_reshard_after_forward": "always"},
    "fsdp4_never": {SHARD: 4, "fsdp_reshard_after_forward": "never"},
    "fsdp4_bf16": {SHARD: 4},
    "fsdp4_offload": {SHARD: 4},
    "hsdp2x2": {REPLICATE: 2, SHARD: 2},
    "tp4": {TP: 4, SHARD: 1},
    "tp4_async": {TP: 4, SHARD: 1, "enable_async_tensor_parallel": True},
    "tp4_gathered": {TP: 4, SHARD: 1, "disable_loss_parallel": True},
    "tp2_fsdp2": {TP: 2, SHARD: 2},
    "tp2_ddp2": {TP: 2, REPLICATE: 2, SHARD: 1},
    "pp2_ddp2": {PP: 2, REPLICATE: 2, SHARD: 1},
    "pp2_fsdp2": {PP: 2, SHARD: 2},
    "pp2_tp2": {PP: 2, TP: 2, SHARD: 1},
    "pp4": {PP: 4, SHARD: 1},
    "pp2_interleaved": {PP: 2, REPLICATE: 2, SHARD: 1, SCHEDULE: "Interleaved1F1B"},
    "pp2_zbv": {PP: 2, REPLICATE: 2, SHARD: 1, SCHEDULE: "ZBVZeroBubble"},
}
# Plans of the model "moe_debug".
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ep4": {SHARD: 4, EP: 4},
    "ep2_fsdp4": {SHARD: 4, EP: 2},
    "ep4_tp2": {SHARD: 2, TP: 2, EP: 4},
}
TRAINING: dict[str, dict[str, Any]] = {
    "fsdp4_bf16": {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"},
    "fsdp4_offload": {"enable_cpu_offload": True},
}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "": {"mode": "none"},
    "full": {"mode": "full"},
    "early": {"mode": "full", "early_stop": True},
    "2": {"mode": "selective", "selective_ac_option": "2"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
}
GLOBAL_BATCH_SIZE = 8

# The part of a whole tensor's bytes that each of n ranks sends, in units of (n-1)/n.
SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
SENT |= {"gather ring": 1, "scatter ring": 1, "all_to_all": 1}
FROM_RANK_TO_RANK = ("send", "receive")


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, its mesh axis, and the bytes of its whole tensor.

    The axis is "world" for the sums of a step (tokens, loss, gradient norm), and "none" if the
    group is not an axis of the mesh.
    """

    kind: str
    axis: str
    num_bytes: int


def make_job_config(plan: str, *, flavor: str = "debug", microbatches: int = 1) -> Any:
    """The job of a plan, such as "fsdp4" or "tp4+full", with `microbatches` per step and rank."""
    parallelism, _, checkpointing = plan.partition("+")
    degrees = {**PARALLELISM, **OF_EXPERTS}[parallelism]
    dp = degrees.get(REPLICATE, 1) * degrees.get(SHARD, 1)
    experts = {"name": "llama3", "flavor": "moe_debug"}
    return JobConfig.from_dict(
        {
            "model": experts if EP in degrees else {"flavor": flavor},
            "training": {
                "dataset": "synthetic",
                **({"seq_len": 32} if EP in degrees else {}),
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "local_batch_size": GLOBAL_BATCH_SIZE // dp // microbatches,
                **TRAINING.get(parallelism, {}),
            },
            "parallelism": degrees,
            "activation_checkpoint": CHECKPOINTING[checkpointing],
        }
    )


def count_plans(place: Place, configs: list[Any]) -> list[tuple[list[Collective], int]]:
    """For each job: its collectives in order, and the number that CommDebugMode counted."""
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        return [count_step(config, world) for config in configs]


def count_step(config: Any, world: Any) -> tuple[list[Collective], int]:
    """count_plans for one job."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from titanlite.job import build_job

    job = build_job(resolve_job(config, world.size), world)
    mesh = job.meshes.world
    axis_of = {
        tuple(dist.get_process_group_ranks(mesh.get_group(axis))): axis
        for axis in mesh.mesh_dim_names or ()
    }
    if (experts := job.meshes.experts) is not None:
        # An axis of both meshes keeps the name that it has in the mesh of all parameters.
        for axis in experts.mesh_dim_names or ():
            ranks = tuple(dist.get_process_group_ranks(experts.get_group(axis)))
            axis_of.setdefault(ranks, axis)
    found: list[Collective] = []

    class Recorder(TorchDispatchMode):
        """Records communication operators, below autograd and DTensor."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                # DTensor handles it first; this mode then sees the collectives that it calls.
                return NotImplemented
            result = function(*args, **(kwargs or {}))
            if function._schema.name in RINGS:
                _, _, _, n, group_name = args
                ranks = dist.get_process_group_ranks(_resolve(group_name))
                whole = result[1].nbytes if isinstance(result, tuple) else n * result.nbytes
                axis = axis_of.get(tuple(ranks), "none")
                found.append(Collective(RINGS[function._schema.name], axis, whole))
            if function._schema.name in OPERATORS:
                kind, tensor, ranks = _as_collective(function, args, result)
                is_world_sum = kind == "all_reduce" and tensor.dtype.itemsize == 8
                axis = "world" if is_world_sum else axis_of.get(tuple(ranks), "none")
                axis = "ep" if kind == "all_to_all" else axis
                found.append(Collective(kind, axis, tensor.numel() * tensor.element_size()))
            return result

    class CountAlone(CommDebugMode):
        """CommDebugMode without its module hooks, which fail at a second forward pass."""

        def __enter__(self):
            self.advanced_module_tracker.name = "Global"
            self.advanced_module_tracker.module_parents_dict["Global"] = set()
            return TorchDispatchMode.__enter__(self)

        def __exit__(self, *error):
            TorchDispatchMode.__exit__(self, *error)

    if job.dims.pp > 1 or job.dims.dp_replicate > 1 or config.model.converters:
        job.step()  # the first step of pipelines, DDP and float8 is unlike the others
    with CountAlone() as debug_mode, Recorder():
        job.step()
    return found, debug_mode.get_total_counts()


# Operator -> kind, and the positions of the whole tensor (-1: the result) and the group among its
# arguments. If one is missing here, the total differs from that of CommDebugMode.
OPERATORS = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1, 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    # CommDebugMode does not count these.
    "c10d::send": ("send", 0, 1),
    "c10d::recv_": ("receive", 0, 1),
}
# The second result of a gather ring is the gathered input; a scatter ring returns a rank's part.
RINGS = {"titanlite::gather_product": "gather ring", "titanlite::product_scatter": "scatter ring"}


def _as_collective(function: Any, args: Any, result: Any) -> tuple[str, Any, list[int]]:
    """(kind, whole tensor, ranks of the group) of a call of an operator in OPERATORS."""
    import torch.distributed as dist

    kind, whole_at, group_at = OPERATORS[function._schema.name]
    whole = result if whole_at == -1 else args[whole_at]
    whole = whole[0] if isinstance(whole, list) else whole
    group = args[group_at]
    group = _resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    return kind, whole, dist.get_process_group_ranks(group)


def _resolve(group_name: str) -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._resolve_process_group(group_name)


def totals(collectives: list[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (number of collectives, total bytes)."""
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for collective in collectives:
        counts[collective.kind, collective.axis] += 1
        num_bytes[collective.kind, collective.axis] += collective.num_bytes
    return {key: (counts[key], num_bytes[key]) for key in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flavor", default="debug")
    parser.add_argument("--microbatches", type=int, default=1, help="per step, on each rank")
    parser.add_argument("--order", action="store_true", help="one line per collective, in order")
    parser.add_argument("plans", nargs="*", default=[*PARALLELISM, *OF_EXPERTS])
    arguments = parser.parse_args()
    configs = [
        make_job_config(plan, flavor=arguments.flavor, microbatches=arguments.microbatches)
        for plan in arguments.plans
    ]
    for config in configs:
        resolve_job(config)
    counted = spawn(count_plans, 4, configs)[0]
    print(f"{'plan':16} {'collective':15} {'axis':13} {'count':>5} {'bytes':>13} {'sent':>13}")
    for plan, config, (collectives, _) in zip(arguments.plans, configs, counted, strict=True):
        degrees = make_parallel_dims(config, None).degrees
        each = [((c.kind, c.axis), (1, c.num_bytes)) for c in collectives]
        for (kind, axis), (count, num_bytes) in (
            each if arguments.order else totals(collectives).items()
        ):
            n = config.parallelism.expert_parallel_degree if axis == "ep" else degrees.get(axis, 4)
            sent = num_bytes * (kind == "send")
            if kind not in FROM_RANK_TO_RANK:
                sent = SENT[kind] * num_bytes * (n - 1) // n
            print(f"{plan:16} {kind:15} {axis:13} {count:5} {num_bytes:13,} {sent:13,}")


if __name__ == "__main__":
    main()
