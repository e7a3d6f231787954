"""The experiments of `titanlite lab`: each runs in seconds and prints one small table.

An experiment is a function that opens its own cluster and returns a Table. The first line of its
docstring is its description, and its parameters are its options (command.py). Names of the lab
are read from the package, which loads torch at the first one, so that listing the experiments is
fast. What is timed is in timings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import titanlite.tools.lab as lab
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

    kinds = ["broadcast", "scatter", "gather", "reduce", "all_scatter"]
    kinds += ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "barrier"]

    def main(device: Any, kind: str) -> Any:
        tensor = torch.arange(device.mesh.size) + device.rank
        if kind == "barrier":
            return device.barrier()
        result = getattr(device, kind)(tensor)
        if kind == "all_scatter":
            group = device.group()
            for peer in group.peers:
                group.recv(tensor, peer)
            for transfer in result:
                transfer.wait()
            return None
        return result

    rows = []
    with lab.VirtualCluster(lab.Mesh(rank=world)) as cluster:
        for kind in kinds:
            row = [kind]
            for algorithm in ("naive", "ring"):
                results = cluster.run(main, kind, algorithm=algorithm)
                row.append(f"{cluster.counts.d2d_messages} / {cluster.counts.d2d_bytes} B")
            rows.append((*row, "nothing" if results[-1] is None else str(results[-1].tolist())))
    return Table(
        f"Rank r holds {list(range(world))} + r (int64); the root is 0. Messages / bytes over all "
        "devices.",
        ("collective", "naive", "ring", f"result on rank {world - 1}"),
        rows,
    )


def matmul(*, x: int = 2, y: int = 4) -> Table:
    """a matrix product under every sharding policy: collectives, flops, messages, bytes"""
    import torch

    split = lab.TensorSharding
    shardings = [
        lab.MatMulSharding(split(None, None), split(None, None)),
        lab.MatMulSharding(split(None, "y"), split("y", None)),
        lab.MatMulSharding(split(None, "x"), split("x", None)),
        lab.MatMulSharding(split(None, ("x", "y")), split(("x", "y"), None)),
        lab.MatMulSharding(split(None, "y"), split("x", None)),
        lab.MatMulSharding(split("x", "y"), split("x", None)),
        lab.MatMulSharding(split("x", "y"), split("x", "y")),
        lab.MatMulSharding(split("x", "y"), split("y", None), split("x", None)),
    ]
    # On the meta device, everything is counted at this size but nothing is sent or computed.
    a, b = torch.empty(4096, 2048, device="meta"), torch.empty(2048, 4096, device="meta")
    rows = []
    with lab.VirtualCluster(lab.Mesh(x=x, y=y)) as cluster:
        for sharding in shardings:
            policy = sharding.policy.name.removesuffix("Sharding")
            costs = _costs(cluster, lab.MatMul(sharding), a, b)
            rows.append((f"{sharding.a} {sharding.b}", policy, *costs))
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

    shapes = [(8, 128, 1024), (1024, 4096), (4096,), (4096, 1024), (1024,)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    rows = []
    with lab.VirtualCluster(lab.Mesh(x=x, y=y)) as cluster:
        for sharding in (lab.FeedForwardSharding(), lab.FeedForwardSharding.gspmd("x", "y")):
            forward = _costs(cluster, lab.FeedForward(sharding), *inputs)
            backward = _costs(cluster, lab.FeedForwardBackward(sharding), *inputs, inputs[0])
            rows.append((sharding.policy.name, "forward", *forward))
            rows.append((sharding.policy.name, "backward", *backward))
    return Table(
        f"Batch 8, sequence 128, model 1024, hidden 4096, float32; totals over {x} x {y} devices.\n"
        "MiB: with naive collectives. ring: MiB with ring collectives.",
        ("policy", "pass", *COST_COLUMNS),
        rows,
    )


COST_COLUMNS = ("collectives", "GFLOP", "sends", "MiB", "ring")


def _costs(cluster: Any, operation: Any, *inputs: Any) -> tuple[str, ...]:
    cluster.run(operation, *inputs, algorithm="ring")
    on_ring = cluster.counts.d2d_bytes
    cluster.run(operation, *inputs, algorithm="naive")
    counts = cluster.counts
    return (
        "\n".join(map(str, counts.collectives)) or "none",
        f"{counts.flops / 1e9:.0f}",
        str(counts.d2d_messages),
        f"{counts.d2d_bytes / 2**20:.0f}",
        f"{on_ring / 2**20:.0f}",
    )


# The steps of each training.
STEPS = 3


def data(*, world: int = 4) -> Table:
    """data parallelism by hand, compared with one process"""
    return _trained({"data parallel": partial(lab.data_parallelism_main, num_steps=STEPS)}, world)


def tensor(*, world: int = 4) -> Table:
    """tensor parallelism by hand, compared with one process"""
    main = partial(lab.tensor_parallelism_main, num_steps=STEPS)
    return _trained({"tensor parallel": main}, world)


def pipeline(*, world: int = 4, num_microbatches: int = 8) -> Table:
    """pipeline parallelism by hand, GPipe and 1F1B, compared with one process"""
    options = {"num_micro_batches": num_microbatches, "num_steps": STEPS}
    mains = {
        name: partial(lab.pipeline_parallelism_main, schedule=name, **options)
        for name in ("gpipe", "1f1b")
    }
    return _trained(mains, world)


def zero(*, world: int = 4) -> Table:
    """ZeRO stages 1, 2 and 3 by hand: the same results with less and less memory"""
    mains = {"data parallel": partial(lab.data_parallelism_main, num_steps=STEPS)}
    for stage in (1, 2, 3):
        main = partial(lab.zero_parallelism_main, num_steps=STEPS, stage=stage)
        mains[f"ZeRO {stage}"] = main
    kinds = ("parameters", "gradients", "optimizer")
    rows = []
    with lab.VirtualCluster(lab.Mesh(rank=world)) as cluster:
        for name, main in mains.items():
            held = lab.spawn(main, cluster, *_inputs())[0].held_bytes
            moved = _ring_bytes(cluster.counts, world) / STEPS
            kib = [f"{num_bytes / 1024:.0f}" for num_bytes in (*map(held.get, kinds), moved)]
            rows.append((name, *kib))
    return Table(
        "KiB held per rank at the optimizer step, and KiB sent; 8 layers of 64 x 64.",
        ("", *kinds, "sent per step, all ranks"),
        rows,
    )


def three_d(*, pp: int = 2, num_microbatches: int = 4) -> Table:
    """pipeline, data and tensor parallelism together: 2 x 2 x 2 ranks"""
    mesh = lab.Mesh(pp=pp, dp=2, tp=2)
    options = {"num_micro_batches": num_microbatches, "mesh": mesh, "num_steps": STEPS}
    main = partial(lab.three_d_parallelism_main, **options)
    return _trained({f"{pp} x 2 x 2": main}, mesh.size, group_size=2)


def _inputs() -> tuple[torch.Tensor, int]:
    """The data, and the number of layers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator, dtype=torch.float64), 8


def _trained(
    mains: Mapping[str, Callable[..., Any]], world: int, group_size: int | None = None
) -> Table:
    """Each main's difference from one process, and its traffic on rings of `group_size` (world)."""
    alone = lab.single_process_main(*_inputs(), STEPS)
    rows = []
    with lab.VirtualCluster(lab.Mesh(rank=world)) as cluster:
        for name, main in mains.items():
            records = lab.spawn(main, cluster, *_inputs())
            counts = cluster.counts
            calls = dict(counts.torch_collectives)
            calls.pop("barrier")
            num_bytes = _ring_bytes(counts, group_size or world) + counts.d2d_bytes
            rows.append(
                (
                    name,
                    f"{_difference(records, alone, 'gradients'):.0e}",
                    f"{_difference(records, alone, 'params'):.0e}",
                    ", ".join(f"{calls[kind] // STEPS} {kind}" for kind in calls) or "none",
                    str(counts.d2d_messages // STEPS),
                    f"{num_bytes / STEPS / 1024:.0f}",
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

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, num_microbatches, 4, 16, generator=generator)
    targets = torch.randn(3, num_microbatches, 4, 8, generator=generator)
    rows = []
    with lab.VirtualCluster(lab.Mesh(stage=4)) as cluster:
        for num_stages in (1, 2, 4):
            line = lab.Pipeline(cluster.mesh, num_microbatches, num_stages)
            network = lab.MLP(line)
            result = network(cluster, network.build_parameters(), inputs, targets)
            losses = ", ".join(f"{loss:.6f}" for loss in result.losses)
            num_messages = cluster.counts.d2d_messages // 3
            clock = str(num_stages), str(line.num_cycles), f"{line.bubble:.0%}"
            rows.append((*clock, losses, str(num_messages)))
    columns = ("stages", "cycles", "idle", "loss of each step", "messages per step")
    return Table(f"{num_microbatches} microbatches of 4 rows, 4 stages:\n\n{line}\n", columns, rows)


def attention(*, world: int = 4, num_tokens: int = 512) -> Table:
    """ring attention by hand: the work of each rank under the layouts none and headtail"""
    import torch

    def run(device: Any, shards: Any, layout: str, causal: bool) -> Any:
        leaves = [part.clone().requires_grad_() for part in shards[device.rank]]
        out = lab.ring_attention(device, *leaves, layout=layout, causal=causal)
        out.sum().backward()

    if num_tokens % (2 * world):
        raise TitanliteError(
            f"tokens: {num_tokens} tokens are not {2 * world} equal chunks; "
            f"use a multiple of {2 * world}"
        )
    qkv = torch.randn(3, 4, num_tokens, 32)
    rows = []
    with lab.VirtualCluster(lab.Mesh(sequence=world)) as cluster:
        for layout, causal in (("none", False), ("none", True), ("headtail", True)):
            cluster.run(run, lab.shard_sequence(qkv, world, layout), layout, causal)
            flops = [counts.flops for counts in cluster.device_counts]
            each = " ".join(f"{of_rank / 1e6:.0f}" for of_rank in flops)
            rows.append((layout if causal else "any, no mask", each, *_balance(cluster)))
    return Table(
        f"{num_tokens} tokens, 4 heads of 32, float32, {world} ranks; forward and backward.",
        ("layout", "MFLOP of each rank", *BALANCE_COLUMNS),
        rows,
    )


BALANCE_COLUMNS = ("busiest / mean", "sends", "KiB")


def _balance(cluster: Any) -> tuple[str, ...]:
    """The busiest rank's work relative to the mean, messages and bytes, of the last run."""
    flops = [counts.flops for counts in cluster.device_counts]
    busiest = len(flops) * max(flops) / sum(flops)
    counts = cluster.counts
    return f"{busiest:.2f}", str(counts.d2d_messages), f"{counts.d2d_bytes / 2**10:.0f}"


def experts(
    *, world: int = 4, num_experts: int = 8, top_k: int = 2, num_tokens: int = 256
) -> Table:
    """experts by hand: the rows of each rank under balanced and unbalanced routers"""
    import torch

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
    every = lab.Experts(*(torch.randn(shape, generator=generator) for shape in shapes))

    def run(device: Any, gate: Any, factor: float | None) -> Any:
        tokens, own = x.chunk(world)[device.rank], every.shard(device.rank, world)
        options = {"top_k": top_k, "capacity_factor": factor}
        return lab.expert_parallel_layer(device, tokens, gate, own, **options)[1]

    rows = []
    with lab.VirtualCluster(lab.Mesh(expert=world)) as cluster:
        for name, skew, factor in (
            ("balanced", 0.0, None),
            ("one expert preferred", 4.0, None),
            ("one expert in every token", 30.0, None),
            ("the same, capacity 1.25", 30.0, 1.25),
        ):
            gate[0] = 0
            gate[0, 0] = skew
            loads = cluster.run(run, gate, factor)
            received = " ".join(str(sum(load.received)) for load in loads)
            dropped = sum(load.num_dropped for load in loads) / (num_tokens * top_k)
            rows.append((name, received, f"{dropped:.0%}", *_balance(cluster)))
    return Table(
        f"{num_tokens} tokens of {dim} features, {num_experts} experts of {hidden}, top {top_k}, "
        f"float32, {world} ranks; forward.",
        ("router", "rows of each rank", "dropped", *BALANCE_COLUMNS),
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
