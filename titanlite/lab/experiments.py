"""The experiments of `python -m titanlite.lab`: each runs in seconds and prints one small table.

An experiment is a function that opens its own cluster and returns a Table. The first line of its
docstring is its description. Imports are inside the functions, so that listing them is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from titanlite.lab.counts import Counts
    from titanlite.lab.lecture import TrainingRecord


@dataclass(frozen=True)
class Table:
    """The result of an experiment: a caption, named columns, and rows of text."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def collectives() -> Table:
    """every collective on 4 devices, built from send and receive: naive and ring"""
    import torch

    from titanlite.lab import Mesh, VirtualCluster

    kinds = ["broadcast", "scatter", "gather", "reduce", "all_scatter"]
    kinds += ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "barrier"]

    def main(device: Any, kind: str) -> Any:
        tensor = torch.arange(4) + device.rank
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
    with VirtualCluster(Mesh(rank=4)) as cluster:
        for kind in kinds:
            row = [kind]
            for algorithm in ("naive", "ring"):
                results = cluster.run(main, kind, algorithm=algorithm)
                row.append(f"{cluster.counts.d2d_messages} / {cluster.counts.d2d_bytes} B")
            result = "" if results[2] is None else str(results[2].tolist())
            rows.append((*row, result or "nothing"))
    return Table(
        "Rank r holds [0, 1, 2, 3] + r (int64); the root is 0. Messages / bytes over all devices.",
        ("collective", "naive", "ring", "result on rank 2"),
        rows,
    )


def bandwidth() -> Table:
    """bandwidth of 16 MiB collectives, torch's and by hand: bytes * 2 (W-1) / (W t)"""
    from titanlite.lab import Mesh, VirtualCluster, measure_bandwidth

    rows = []
    with VirtualCluster(Mesh(rank=4)) as cluster:
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for form in ("torch", "naive", "ring"):
                measured = cluster.run(_measure, measure_bandwidth, kind, form)
                slowest = min(each.bytes_per_second for each in measured)
                cpu_seconds = sum(each.cpu_seconds for each in measured)
                rows.append((kind, form, f"{slowest / 1e9:.2f}", f"{cpu_seconds * 1e3:.0f}"))
    columns = ("collective", "form", "GB/s", "CPU-ms, all ranks")
    return Table("4 ranks, float32; fastest of 5 trials on the slowest rank.", columns, rows)


def _measure(device: Any, measure: Callable[..., Any], kind: str, form: str) -> Any:
    return measure(device, kind, 1 << 24, form=form)


def matmul() -> Table:
    """a matrix product under every sharding policy: collectives, flops, messages, bytes"""
    import torch

    from titanlite.lab import MatMul, MatMulSharding, Mesh, TensorSharding, VirtualCluster

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
    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        for sharding in shardings:
            naive, ring = _naive_and_ring(cluster, MatMul(sharding), a, b)
            where = f"{sharding.a} {sharding.b}"
            policy = sharding.policy.name.removesuffix("Sharding")
            rows.append((where, policy, *_cost(naive, ring)))
    return Table(
        "A (4096 x 2048) times B (2048 x 4096), float32; totals over 2 x 4 devices (x, y).\n"
        "C is replicated, except in the last row, where it is [x, _].\n"
        "MiB: with naive collectives. ring: MiB with ring collectives.",
        ("A B", "policy", *COST_COLUMNS),
        rows,
    )


def feed_forward() -> Table:
    """a feed-forward layer, replicated and in GSPMD's layout, forward and backward"""
    import torch

    from titanlite.lab import (
        FeedForward,
        FeedForwardBackward,
        FeedForwardSharding,
        Mesh,
        VirtualCluster,
    )

    shapes = [(8, 128, 1024), (1024, 4096), (4096,), (4096, 1024), (1024,)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    rows = []
    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        for sharding in (FeedForwardSharding(), FeedForwardSharding.gspmd("x", "y")):
            for operation, tensors in (
                (FeedForward(sharding), inputs),
                (FeedForwardBackward(sharding), [*inputs, inputs[0]]),
            ):
                naive, ring = _naive_and_ring(cluster, operation, *tensors)
                name = "forward" if isinstance(operation, FeedForward) else "backward"
                rows.append((sharding.policy.name, name, *_cost(naive, ring)))
    return Table(
        "Batch 8, sequence 128, model 1024, hidden 4096, float32; totals over 2 x 4 devices.\n"
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


def data() -> Table:
    """data parallelism by hand, 4 ranks, compared with one process"""
    from titanlite.lab import data_parallelism_main

    return _training([("data parallel", data_parallelism_main, (3,), {})])


def tensor() -> Table:
    """tensor parallelism by hand, 4 ranks, compared with one process"""
    from titanlite.lab import tensor_parallelism_main

    return _training([("tensor parallel", tensor_parallelism_main, (), {"num_steps": 3})])


def pipeline() -> Table:
    """pipeline parallelism by hand, 4 stages, 8 microbatches, GPipe and 1F1B"""
    from titanlite.lab import pipeline_parallelism_main

    return _training(
        [
            (name, pipeline_parallelism_main, (8,), {"num_steps": 3, "schedule": name})
            for name in ("gpipe", "1f1b")
        ]
    )


def zero() -> Table:
    """ZeRO stages 1, 2 and 3 by hand: the same results with less and less memory"""
    from titanlite.lab import (
        Mesh,
        VirtualCluster,
        data_parallelism_main,
        spawn,
        zero_parallelism_main,
    )

    inputs, num_layers = _inputs()
    rows = []
    with VirtualCluster(Mesh(rank=4)) as cluster:
        for stage in range(4):
            if stage == 0:
                records = spawn(data_parallelism_main, cluster, inputs, num_layers, 3)
            else:
                records = spawn(zero_parallelism_main, cluster, inputs, num_layers, 3, stage=stage)
            held = records[0].held_bytes
            moved = _ring_bytes(cluster.counts, 4) / 3
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


def three_d() -> Table:
    """data, tensor and pipeline parallelism together: 2 x 2 x 2 ranks"""
    from titanlite.lab import three_d_parallelism_main

    return _training([("2 x 2 x 2", three_d_parallelism_main, (4,), {"num_steps": 3})], 8, 2)


def _inputs() -> tuple[torch.Tensor, int]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator, dtype=torch.float64), 8


# Name, main function, positional arguments after the number of layers, keyword arguments.
Run = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def _training(runs: Sequence[Run], world: int = 4, group_size: int = 4) -> Table:
    """Each run's difference from one process, and its traffic on rings of `group_size`."""
    from titanlite.lab import Mesh, VirtualCluster, single_process_main, spawn

    inputs, num_layers = _inputs()
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


def overlap() -> Table:
    """overlapped communication: step time and waiting time, with and without overlap"""
    import torch

    from titanlite.lab import (
        Mesh,
        VirtualCluster,
        data_parallelism_main,
        pipeline_parallelism_main,
        spawn,
        tensor_parallelism_main,
        zero_parallelism_main,
    )

    inputs, num_steps = torch.randn(512, 384), 8
    runs: list[Run] = [
        ("data parallel", data_parallelism_main, (num_steps,), {}),
        ("tensor parallel", tensor_parallelism_main, (), {"num_steps": num_steps}),
        ("pipeline 1f1b", pipeline_parallelism_main, (8,), {"num_steps": num_steps}),
        ("ZeRO 2", zero_parallelism_main, (num_steps,), {"stage": 2}),
        ("ZeRO 3", zero_parallelism_main, (num_steps,), {"stage": 3}),
    ]
    rows = []
    with VirtualCluster(Mesh(rank=2)) as cluster:
        for name, main, args, options in runs:
            row = [name]
            for overlapped in (False, True):
                records = spawn(main, cluster, inputs, 8, *args, overlap=overlapped, **options)
                steps = len(records) * (num_steps - 1) / 1e3
                row += [
                    f"{sum(record.seconds for record in records) / steps:.1f}",
                    f"{sum(record.waited_seconds for record in records) / steps:.1f}",
                ]
            rows.append(tuple(row))
    columns = ("", "step", "waiting", "step, overlapped", "waiting, overlapped")
    return Table("Wall ms per step, 2 ranks, 8 layers of 384 x 384, batch 512.", columns, rows)


def mlp() -> Table:
    """the pipelined MLP: four layers on 1, 2 and 4 stages, with the same losses"""
    import torch

    from titanlite.lab import MLP, Mesh, Pipeline, VirtualCluster

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 6, 4, 16, generator=generator)
    targets = torch.randn(3, 6, 4, 8, generator=generator)
    rows = []
    clock = ""
    with VirtualCluster(Mesh(stage=4)) as cluster:
        for num_stages in (1, 2, 4):
            line = Pipeline(cluster.mesh, num_runs=6, num_stages=num_stages)
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
    return Table(f"6 runs of 4 rows; with 4 stages:\n\n{clock}\n", columns, rows)


EXPERIMENTS: dict[str, Callable[[], Table]] = {
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
}
