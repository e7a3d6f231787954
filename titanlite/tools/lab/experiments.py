"""The experiments of `titanlite lab`: each runs in seconds and prints one small table.

An experiment is a function that opens its own cluster and returns a Table. The first line of its
docstring is its description, and its parameters are its options (arguments.py). Imports are inside
the functions, so that listing them is fast. What is timed is in timings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.errors import TitanliteError
from titanlite.tools.lab.table import Table
from titanlite.tools.lab.timings import bandwidth, overlap

if TYPE_CHECKING:
    import torch

    from titanlite.tools.lab.counts import Counts
    from titanlite.tools.lab.lecture import TrainingRecord


def collectives(*, world: int = 4) -> Table:
    """every collective, built from send and receive: naive and ring"""
    import torch

    from titanlite.tools.lab import Mesh, VirtualCluster

    kinds = ["broadcast", "scatter", "gather", "reduce", "all_scatter"]
    kinds += ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "barrier"]

    def main(device: Any, kind: str) -> Any:
        tensor = torch.arange(device.mesh.size) + device.rank
        if kind == "barrier":
            return device.barrier()
        if kind == "all_scatter":
            sending = device.all_scatter(tensor)
            group = device.group()
            for peer in group.peers:
                group.recv(tensor, peer)
            for transfer in sending:
                transfer.wait()
            return None
        return getattr(device, kind)(tensor)

    rows = []
    with VirtualCluster(Mesh(rank=world)) as cluster:
        for kind in kinds:
            row = [kind]
            for algorithm in ("naive", "ring"):
                results = cluster.run(main, kind, algorithm=algorithm)
                row.append(f"{cluster.counts.d2d_messages} / {cluster.counts.d2d_bytes} B")
            result = "" if results[-1] is None else str(results[-1].tolist())
            rows.append((*row, result or "nothing"))
    return Table(
        f"Rank r holds {list(range(world))} + r (int64); the root is 0. Messages / bytes over all "
        "devices.",
        ("collective", "naive", "ring", f"result on rank {world - 1}"),
        rows,
    )


def matmul(*, x: int = 2, y: int = 4) -> Table:
    """a matrix product under every sharding policy: collectives, flops, messages, bytes"""
    import torch

    from titanlite.tools.lab import MatMul, MatMulSharding, Mesh, TensorSharding, VirtualCluster

    shardings = [
        MatMulSharding(TensorSharding(None, None), TensorSharding(None, None)),
        MatMulSharding(TensorSharding(None, "y"), TensorSharding("y", None)),
        MatMulSharding(TensorSharding(None, "x"), TensorSharding("x", None)),
        MatMulSharding(TensorSharding(None, ("x", "y")), TensorSharding(("x", "y"), None)),
        MatMulSharding(TensorSharding(None, "y"), TensorSharding("x", None)),
        MatMulSharding(TensorSharding("x", "y"), TensorSharding("x", None)),
        MatMulSharding(TensorSharding("x", "y"), TensorSharding("x", "y")),
        MatMulSharding(
            TensorSharding("x", "y"), TensorSharding("y", None), TensorSharding("x", None)
        ),
    ]
    # On the meta device, everything is counted at this size but nothing is sent or computed.
    a, b = torch.empty(4096, 2048, device="meta"), torch.empty(2048, 4096, device="meta")
    rows = []
    with VirtualCluster(Mesh(x=x, y=y)) as cluster:
        for sharding in shardings:
            naive, ring = _naive_and_ring(cluster, MatMul(sharding), a, b)
            where = f"{sharding.a} {sharding.b}"
            policy = sharding.policy.name.removesuffix("Sharding")
            rows.append((where, policy, *_cost(naive, ring)))
    return Table(
        f"A (4096 x 2048) times B (2048 x 4096), float32; totals over {x} x {y} devices (x, y).\n"
        "C is replicated, except in the last row, where it is [x, _].\n"
        "MiB: with naive collectives. ring: MiB with ring collectives.",
        ("A B", "policy", *COST_COLUMNS),
        rows,
    )


def feed_forward(*, x: int = 2, y: int = 4) -> Table:
    """a feed-forward layer, replicated and in GSPMD's layout, forward and backward"""
    import torch

    from titanlite.tools.lab import (
        FeedForward,
        FeedForwardBackward,
        FeedForwardSharding,
        Mesh,
        VirtualCluster,
    )

    shapes = [(8, 128, 1024), (1024, 4096), (4096,), (4096, 1024), (1024,)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    rows = []
    with VirtualCluster(Mesh(x=x, y=y)) as cluster:
        for sharding in (FeedForwardSharding(), FeedForwardSharding.gspmd("x", "y")):
            for operation, tensors in (
                (FeedForward(sharding), inputs),
                (FeedForwardBackward(sharding), [*inputs, inputs[0]]),
            ):
                naive, ring = _naive_and_ring(cluster, operation, *tensors)
                name = "forward" if isinstance(operation, FeedForward) else "backward"
                rows.append((sharding.policy.name, name, *_cost(naive, ring)))
    return Table(
        f"Batch 8, sequence 128, model 1024, hidden 4096, float32; totals over {x} x {y} devices.\n"
        "MiB: with naive collectives. ring: MiB with ring collectives.",
        ("policy", "pass", *COST_COLUMNS),
        rows,
    )


COST_COLUMNS = ("collectives", "GFLOP", "sends", "MiB", "ring")


def _naive_and_ring(cluster: Any, operation: Any, *inputs: Any) -> tuple[Counts, Counts]:
    counts = []
    for algorithm in ("naive", "ring"):
        cluster.run(operation, *inputs, algorithm=algorithm)
        counts.append(cluster.counts)
    return counts[0], counts[1]


def _cost(naive: Counts, ring: Counts) -> tuple[str, ...]:
    return (
        "\n".join(map(str, naive.collectives)) or "none",
        f"{naive.flops / 1e9:.0f}",
        str(naive.d2d_messages),
        f"{naive.d2d_bytes / 2**20:.0f}",
        f"{ring.d2d_bytes / 2**20:.0f}",
    )


def data(*, world: int = 4) -> Table:
    """data parallelism by hand, compared with one process"""
    from titanlite.tools.lab import data_parallelism_main

    return _training([("data parallel", data_parallelism_main, (3,), {})], world)


def tensor(*, world: int = 4) -> Table:
    """tensor parallelism by hand, compared with one process"""
    from titanlite.tools.lab import tensor_parallelism_main

    return _training([("tensor parallel", tensor_parallelism_main, (), {"num_steps": 3})], world)


def pipeline(*, world: int = 4, num_microbatches: int = 8) -> Table:
    """pipeline parallelism by hand, GPipe and 1F1B, compared with one process"""
    from titanlite.tools.lab import pipeline_parallelism_main

    runs: list[Run] = [
        (name, pipeline_parallelism_main, (num_microbatches,), {"num_steps": 3, "schedule": name})
        for name in ("gpipe", "1f1b")
    ]
    return _training(runs, world)


def zero(*, world: int = 4) -> Table:
    """ZeRO stages 1, 2 and 3 by hand: the same results with less and less memory"""
    from titanlite.tools.lab import (
        Mesh,
        VirtualCluster,
        data_parallelism_main,
        spawn,
        zero_parallelism_main,
    )

    inputs, num_layers = _inputs()
    rows = []
    with VirtualCluster(Mesh(rank=world)) as cluster:
        for stage in range(4):
            if stage == 0:
                records = spawn(data_parallelism_main, cluster, inputs, num_layers, 3)
            else:
                records = spawn(zero_parallelism_main, cluster, inputs, num_layers, 3, stage=stage)
            held = records[0].held_bytes
            moved = _ring_bytes(cluster.counts, world) / 3
            rows.append(
                (
                    f"ZeRO {stage}" if stage else "data parallel",
                    *(
                        f"{held[what] / 1024:.0f}"
                        for what in ("parameters", "gradients", "optimizer")
                    ),
                    f"{moved / 1024:.0f}",
                )
            )
    columns = ("", "parameters", "gradients", "optimizer", "sent per step, all ranks")
    return Table(
        "KiB held per rank at the optimizer step, and KiB sent; 8 layers of 64 x 64.", columns, rows
    )


def three_d(*, pp: int = 2, num_microbatches: int = 4) -> Table:
    """pipeline, data and tensor parallelism together: 2 x 2 x 2 ranks"""
    from titanlite.tools.lab import Mesh, three_d_parallelism_main

    mesh = Mesh(pp=pp, dp=2, tp=2)
    options = {"mesh": mesh, "num_steps": 3}
    run = (f"{pp} x 2 x 2", three_d_parallelism_main, (num_microbatches,), options)
    return _training([run], mesh.size, group_size=2)


def _inputs() -> tuple[torch.Tensor, int]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator, dtype=torch.float64), 8


# Name, main function, positional arguments after the number of layers, keyword arguments.
Run = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def _training(runs: Sequence[Run], world: int, group_size: int | None = None) -> Table:
    """Each run's difference from one process, and its traffic on rings of `group_size` (world)."""
    from titanlite.tools.lab import Mesh, VirtualCluster, single_process_main, spawn

    inputs, num_layers = _inputs()
    group_size = group_size or world
    alone = single_process_main(inputs, num_layers, 3)
    rows = []
    with VirtualCluster(Mesh(rank=world)) as cluster:
        for name, main, args, options in runs:
            records = spawn(main, cluster, inputs, num_layers, *args, **options)
            counts = cluster.counts
            rows.append(
                (
                    name,
                    f"{_difference(records, alone, 'gradients'):.0e}",
                    f"{_difference(records, alone, 'params'):.0e}",
                    ", ".join(
                        f"{count // 3} {kind}"
                        for kind, count in counts.torch_collectives.items()
                        if kind != "barrier"
                    )
                    or "none",
                    str(counts.d2d_messages // 3),
                    f"{(_ring_bytes(counts, group_size) + counts.d2d_bytes) / 3 / 1024:.0f}",
                )
            )
    return Table(
        f"8 layers of 64 x 64, batch 32, float64, {world} ranks, 3 AdamW steps.\n"
        "Largest difference from one process, relative to the tensor's maximum; traffic per step.",
        ("", "gradients", "weights", "collectives", "sends", "KiB on rings"),
        rows,
    )


def _difference(records: Sequence[TrainingRecord], alone: TrainingRecord, what: str) -> float:
    """The largest relative difference of any rank's part from the same part of `alone`."""
    worst = 0.0
    for rank, record in enumerate(records):
        for layer, part in getattr(record, what).items():
            whole = getattr(alone, what)[layer]
            # If columns are sharded, the ranks of a tensor-parallel group are consecutive.
            num_parts = whole.shape[1] // part.shape[1]
            expected = whole.chunk(num_parts, 1)[rank % num_parts]
            worst = max(worst, float((part - expected).abs().max() / whole.abs().max()))
    return worst


def _ring_bytes(counts: Counts, group_size: int) -> float:
    """The bytes that all ranks send in torch's collectives, each on a ring of `group_size`."""
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(
        num_bytes * share.get(kind, 0) * (group_size - 1) / group_size
        for kind, num_bytes in counts.torch_collective_bytes.items()
    )


def mlp(*, num_microbatches: int = 6) -> Table:
    """the pipelined MLP: four layers on 1, 2 and 4 stages, with the same losses"""
    import torch

    from titanlite.tools.lab import MLP, Mesh, Pipeline, VirtualCluster

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, num_microbatches, 4, 16, generator=generator)
    targets = torch.randn(3, num_microbatches, 4, 8, generator=generator)
    rows = []
    clock = ""
    with VirtualCluster(Mesh(stage=4)) as cluster:
        for num_stages in (1, 2, 4):
            line = Pipeline(cluster.mesh, num_microbatches, num_stages)
            network = MLP(line)
            result = network(cluster, network.build_parameters(), inputs, targets)
            rows.append(
                (
                    str(num_stages),
                    str(line.num_cycles),
                    f"{line.bubble:.0%}",
                    ", ".join(f"{loss:.6f}" for loss in result.losses),
                    str(cluster.counts.d2d_messages // 3),
                )
            )
            clock = str(line)
    columns = ("stages", "cycles", "idle", "loss of each step", "messages per step")
    return Table(f"{num_microbatches} runs of 4 rows; with 4 stages:\n\n{clock}\n", columns, rows)


def attention(*, world: int = 4, num_tokens: int = 512) -> Table:
    """ring attention by hand: the work of each rank under contiguous and zigzag layouts"""
    import torch

    from titanlite.tools.lab import Mesh, VirtualCluster, ring_attention, shard_sequence

    def run(device: Any, shards: Any, layout: str, causal: bool) -> Any:
        leaves = [part.clone().requires_grad_() for part in shards[device.rank]]
        out = ring_attention(device, *leaves, layout=layout, causal=causal)
        out.sum().backward()

    if num_tokens % (2 * world):
        raise TitanliteError(
            f"tokens: {num_tokens} tokens are not {2 * world} equal chunks; "
            f"use a multiple of {2 * world}"
        )
    qkv = torch.randn(3, 4, num_tokens, 32)
    rows = []
    with VirtualCluster(Mesh(sequence=world)) as cluster:
        for layout, causal in (("contiguous", False), ("contiguous", True), ("zigzag", True)):
            cluster.run(run, shard_sequence(qkv, world, layout), layout, causal)
            flops = [counts.flops for counts in cluster.device_counts]
            counts = cluster.counts
            rows.append(
                (
                    layout if causal else "any, no mask",
                    " ".join(f"{each / 1e6:.0f}" for each in flops),
                    f"{world * max(flops) / sum(flops):.2f}",
                    str(counts.d2d_messages),
                    f"{counts.d2d_bytes / 2**10:.0f}",
                )
            )
    return Table(
        f"{num_tokens} tokens, 4 heads of 32, float32, {world} ranks; forward and backward.",
        ("layout", "MFLOP of each rank", "busiest / mean", "sends", "KiB"),
        rows,
    )


def experts(
    *, world: int = 4, num_experts: int = 8, top_k: int = 2, num_tokens: int = 256
) -> Table:
    """experts by hand: the rows of each rank under balanced and unbalanced routers"""
    import torch

    from titanlite.tools.lab import Experts, Mesh, VirtualCluster, expert_parallel_layer

    for name, size in (("experts", num_experts), ("tokens", num_tokens)):
        if size % world:
            raise TitanliteError(f"{name}: {size} {name} do not divide among {world} ranks")
    if top_k > num_experts:
        raise TitanliteError(f"top-k: {top_k} is more than the {num_experts} experts")
    generator = torch.Generator().manual_seed(0)
    dim, hidden = 32, 64
    x = torch.randn(num_tokens, dim, generator=generator)
    x[:, 0] = 1
    gate = torch.randn(dim, num_experts, generator=generator)
    shapes = (num_experts, dim, hidden), (num_experts, hidden, dim), (num_experts, dim, hidden)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]

    def run(device: Any, gate: Any, factor: float | None) -> Any:
        own = Experts(*weights).shard(device.rank, world)
        tokens = x.chunk(world)[device.rank]
        return expert_parallel_layer(
            device, tokens, gate, own, top_k=top_k, capacity_factor=factor
        )[1]

    rows = []
    with VirtualCluster(Mesh(expert=world)) as cluster:
        for name, skew, factor in (
            ("balanced", 0.0, None),
            ("one expert preferred", 4.0, None),
            ("one expert in every token", 30.0, None),
            ("the same, capacity 1.25", 30.0, 1.25),
        ):
            gate[0] = 0
            gate[0, 0] = skew
            loads = cluster.run(run, gate, factor)
            flops = [counts.flops for counts in cluster.device_counts]
            num_dropped = sum(load.num_dropped for load in loads)
            rows.append(
                (
                    name,
                    " ".join(str(sum(load.received)) for load in loads),
                    f"{world * max(flops) / sum(flops):.2f}",
                    f"{num_dropped / (num_tokens * top_k):.0%}",
                    str(cluster.counts.d2d_messages),
                    f"{cluster.counts.d2d_bytes / 2**10:.0f}",
                )
            )
    return Table(
        f"{num_tokens} tokens of {dim} features, {num_experts} experts of {hidden}, top {top_k}, "
        f"float32, {world} ranks; forward.",
        ("router", "rows of each rank", "busiest / mean", "dropped", "sends", "KiB"),
        rows,
    )


EXPERIMENTS: dict[str, Callable[..., Table]] = {
    "collectives": collectives,
    "bandwidth": bandwidth,
    "data": data,
    "zero": zero,
    "tensor": tensor,
    "pipeline": pipeline,
    "3d": three_d,
    "overlap": overlap,
    "matmul": matmul,
    "feed-forward": feed_forward,
    "mlp": mlp,
    "attention": attention,
    "experts": experts,
}
