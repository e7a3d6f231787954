"""The pictures of the lab's notes, each drawn from a run.

python docs/lab_pictures.py docs/images/lab          # as SVG
python docs/lab_pictures.py --html FOLDER            # as pages to step through
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.tools.figures.messages import MessagePicture, draw_page, draw_svg
from titanlite.tools.lab.cluster import VirtualCluster
from titanlite.tools.lab.context_parallel import ring_attention, shard_sequence
from titanlite.tools.lab.data_parallel import data_parallelism_main
from titanlite.tools.lab.exercises.exercise import load_exercise
from titanlite.tools.lab.expert_parallel import Experts, expert_parallel_layer
from titanlite.tools.lab.lecture import spawn
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.mlp import MLP
from titanlite.tools.lab.pictures import (
    Part,
    Record,
    name_parts,
    parts_of,
    picture_of,
    size,
    tagged,
)
from titanlite.tools.lab.pipeline_parallel import pipeline_parallelism_main
from titanlite.tools.lab.pipelining import Pipeline
from titanlite.tools.lab.record import Message
from titanlite.tools.lab.resharding import reshard
from titanlite.tools.lab.sharding import TensorSharding
from titanlite.tools.lab.tensor_parallel import tensor_parallelism_main
from titanlite.tools.lab.three_d_parallel import three_d_parallelism_main
from titanlite.tools.lab.zero import zero_parallelism_main

COLLECTIVES = {
    **dict.fromkeys(("broadcast", "scatter", "gather", "reduce"), "naive"),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "ring"),
}


def draw_all() -> dict[str, MessagePicture]:
    """Every picture, by the name of its file without the suffix."""
    pictures = {}
    for num_ranks, part in PICTURES.items():
        # The collectives of torch.distributed need all processes of a cluster.
        with VirtualCluster(Mesh(rank=num_ranks)) as cluster:
            for name, draw in part.items():
                pictures[name] = draw(cluster)
    return pictures


def shift(cluster: VirtualCluster) -> MessagePicture:
    def main(device: Any) -> list[float]:
        mine = torch.full((2,), float(device.rank))
        sending = device.channel((device.rank + 1) % 6).isend(mine)
        received = device.channel((device.rank - 1) % 6).recv(torch.empty(2))
        sending.wait()
        return received.tolist()

    cluster.mesh = Mesh(x=2, y=3)
    results = cluster.run(main, record=True)
    return picture_of(
        cluster.record,
        "Each rank sends its tensor to the next one",
        "Rows are ranks, time goes to the right. An arrow is a message.",
        before=[f"[{rank} {rank}]" for rank in range(6)],
        after=["[" + " ".join(f"{value:g}" for value in result) + "]" for result in results],
    )


def collective(kind: str, algorithm: str) -> Callable[[VirtualCluster], MessagePicture]:
    def draw(cluster: VirtualCluster) -> MessagePicture:
        cluster.mesh = Mesh(rank=4)
        return collective_picture(cluster, kind, algorithm)

    return draw


def tree(cluster: VirtualCluster) -> MessagePicture:
    exercise = load_exercise("tree_broadcast")
    cluster.mesh = exercise.mesh

    def main(device: Any) -> Any:
        return exercise.solution(device, *exercise.inputs(device.rank))

    cluster.run(main)
    return picture_of(
        cluster.record,
        "broadcast, tree: 8 ranks",
        "7 messages in log2(8) = 3 steps. In each step, twice as many ranks have rank 0's tensor.",
        name=lambda message: f"a, {message.tensor.nbytes} B",
    )


def torch_collectives(cluster: VirtualCluster) -> MessagePicture:
    def main(device: Any) -> None:
        tensor = torch.arange(4.0) + device.rank
        dist.all_reduce(tensor)
        output = torch.empty(1)
        dist.reduce_scatter(output, list((torch.arange(4.0) + device.rank).chunk(4)))
        dist.all_gather([torch.empty(1) for _ in range(4)], output)

    return _of_training(
        cluster,
        lambda: cluster.run(main),
        "Collectives of torch.distributed",
        "A bar is a collective whose messages are not visible; its bytes are those of each rank's "
        "part.",
        Mesh(rank=4),
    )


def _data(num_rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, 8, generator=generator)


def _of_training(
    cluster: VirtualCluster, run: Callable[[], object], title: str, caption: str, mesh: Mesh
) -> MessagePicture:
    cluster.mesh = mesh
    run()
    return picture_of(cluster.record, title, caption, name=lambda message: message.label)


def data_parallel(cluster: VirtualCluster) -> MessagePicture:
    return _of_training(
        cluster,
        lambda: spawn(data_parallelism_main, cluster, _data(), 3, 1, bucket_bytes=256),
        "Data parallelism: one step, 3 layers of 8 x 8",
        "A box is computation, a bar an all-reduce of a bucket of gradients.",
        Mesh(rank=4),
    )


def tensor_parallel(cluster: VirtualCluster) -> MessagePicture:
    return _of_training(
        cluster,
        lambda: spawn(tensor_parallelism_main, cluster, _data(), 2),
        "Tensor parallelism: one step, 2 layers of 8 x 8, batch 8",
        "Forward (blue): columns, then an all-gather. Backward: the input's gradient (orange) is "
        "all-reduced, A's (green) is not.",
        Mesh(rank=4),
    )


def pipeline(schedule: str) -> Callable[[VirtualCluster], MessagePicture]:
    def draw(cluster: VirtualCluster) -> MessagePicture:
        return _of_training(
            cluster,
            lambda: spawn(
                pipeline_parallelism_main, cluster, _data(), 4, 4, num_steps=1, schedule=schedule
            ),
            f"{'GPipe' if schedule == 'gpipe' else '1F1B'}: one step, 4 stages, 4 microbatches",
            "F2 is the forward pass of microbatch 2, y2 its activation; B2 its backward pass, dy2 "
            "the gradient. Each message has 64 B.",
            Mesh(rank=4),
        )

    return draw


def zero(cluster: VirtualCluster) -> MessagePicture:
    return _of_training(
        cluster,
        lambda: spawn(zero_parallelism_main, cluster, _data(), 2, 1, stage=3),
        "ZeRO stage 3: one step, 2 layers of 8 x 8",
        "Each weight is gathered before its forward pass F and its backward pass B; its gradient "
        "dW is reduce-scattered.",
        Mesh(rank=4),
    )


def three_d(cluster: VirtualCluster) -> MessagePicture:
    mesh = Mesh(pp=2, dp=2, tp=2)
    return _of_training(
        cluster,
        lambda: spawn(three_d_parallelism_main, cluster, _data(), 2, 2),
        "Pipeline, data and tensor parallelism: one step, 2 x 2 x 2 ranks, 2 microbatches",
        "Blue: forward; orange, green: backward. Bars over neighbours: tp; arrows: pp, 64 B each; "
        "bars at the end: dp (ranks 0 and 2, 1 and 3, and so on).",
        mesh,
    )


def resharded(cluster: VirtualCluster) -> MessagePicture:
    cluster.mesh = Mesh(x=4)
    rows, columns = TensorSharding("x", None), TensorSharding(None, "x")
    matrix = 10 * torch.arange(4).unsqueeze(1) + torch.arange(4)

    def main(device: Any) -> torch.Tensor:
        return reshard(device, matrix.chunk(4)[device.rank], rows, columns)

    results = cluster.run(main, record=True)
    return picture_of(
        cluster.record,
        "reshard from [x, _] to [_, x]: a 4 x 4 matrix, from rows to columns",
        "Element (i, j) is 10 i + j. Every rank sends each other rank only what it needs.",
        before=[" ".join(map(str, row.tolist())) for row in matrix],
        after=[" ".join(map(str, result.flatten().tolist())) for result in results],
    )


def clocked_pipeline(cluster: VirtualCluster) -> MessagePicture:
    cluster.mesh = Mesh(stage=4)
    mlp = MLP(Pipeline(cluster.mesh, num_runs=3, num_stages=4))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 3, 4, 16, generator=generator)
    targets = torch.randn(1, 3, 4, 8, generator=generator)
    mlp(cluster, mlp.build_parameters(), inputs, targets)
    return picture_of(
        cluster.record,
        "The pipelined MLP: one step, 4 stages, 3 microbatches",
        "All forward passes, then all backward passes. y1 is the activation of microbatch 1, "
        "dy1 its gradient.",
        name=lambda message: message.label,
    )


def ring(layout: str) -> Callable[[VirtualCluster], MessagePicture]:
    captions = {
        "headtail": "A box q k3 is the attention of the rank's queries to the keys of rank 3. "
        "The next keys and values arrive meanwhile.",
        "none": "Rank 0 needs only its own keys, and waits; only rank 3 needs all of them.",
    }

    def name(message: Message) -> str:
        # Shift s sends what came from s ranks before.
        owner = (message.source - int(message.within.split()[1])) % 4
        return f"k, v of {owner}"

    def draw(cluster: VirtualCluster) -> MessagePicture:
        cluster.mesh = Mesh(rank=4)
        shards = shard_sequence(torch.zeros(3, 1, 16, 4), 4, layout)
        cluster.run(lambda device: ring_attention(device, *shards[device.rank], layout=layout))
        title = f"Ring attention, {layout} layout, causal: forward pass, 4 ranks"
        return picture_of(cluster.record, title, captions[layout], name=name)

    return draw


def experts(cluster: VirtualCluster) -> MessagePicture:
    cluster.mesh = Mesh(rank=4)
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(16, 4, generator=generator), torch.randn(4, 8, generator=generator)
    shapes = (8, 4, 8), (8, 8, 4), (8, 4, 8)
    every = Experts(*(torch.randn(shape, generator=generator) for shape in shapes))

    def main(device: Any) -> None:
        tokens, own = x.chunk(4)[device.rank], every.shard(device.rank, 4)
        expert_parallel_layer(device, tokens, gate, own, top_k=2)

    def name(message: Message) -> str:
        if message.label == "counts":
            return "counts"
        number = message.tensor.shape[0]
        what = "row" if message.within == "all_to_all 1" else "output"
        return f"{number} {what}{'s' if number > 1 else ''}"

    cluster.run(main)
    return picture_of(
        cluster.record,
        "Experts: forward pass, 4 ranks with 2 experts and 4 tokens each, top 2",
        "An all-to-all of counts, one of rows to the experts, and one of their outputs back.",
        name=name,
    )


# By the number of ranks of their cluster.
PICTURES: dict[int, dict[str, Callable[[VirtualCluster], MessagePicture]]] = {
    4: {
        **{kind: collective(kind, algorithm) for kind, algorithm in COLLECTIVES.items()},
        "torch_collectives": torch_collectives,
        "data_parallel": data_parallel,
        "tensor_parallel": tensor_parallel,
        "pipeline_gpipe": pipeline("gpipe"),
        "pipeline_1f1b": pipeline("1f1b"),
        "zero_3": zero,
        "reshard": resharded,
        "pipelined_mlp": clocked_pipeline,
        "ring_headtail": ring("headtail"),
        "ring_none": ring("none"),
        "experts": experts,
    },
    8: {"shift": shift, "tree": tree, "three_d": three_d},
}


def main(arguments: Sequence[str]) -> None:
    """Write every picture into a folder."""
    draw, suffix = (draw_page, "html") if "--html" in arguments else (draw_svg, "svg")
    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in draw_all().items():
        (folder / f"{name}.{suffix}").write_text(draw(picture), encoding="utf-8")


def collective_picture(
    cluster: VirtualCluster,
    kind: str,
    algorithm: str,
    *,
    num_parts: int | None = None,
    label: str = "",
) -> MessagePicture:
    """A collective of the virtual device, run with tagged values on all devices of the cluster."""
    num_ranks = cluster.mesh.size
    count = num_parts or (1 if kind in ("gather", "all_gather") else num_ranks)

    def job(device: Any) -> Any:
        return getattr(device, kind)(tagged(device.rank, count))

    results = cluster.run(job, algorithm=algorithm, record=True)
    record = cluster.record
    own = [[(i, frozenset([rank])) for i in range(count)] for rank in range(num_ranks)]
    if kind in ("broadcast", "scatter"):
        own = [own[0], *([] for _ in range(num_ranks - 1))]
    ends = [[] if result is None else parts_of(result.tolist()) for result in results]
    total = sum(message.tensor.nbytes for message in record.messages)
    return picture_of(
        record,
        f"{kind}, {label or algorithm}: {num_ranks} ranks",
        f"{len(record.messages)} messages, {total} B in {record.steps.length} steps. "
        "a2 is part 2 of rank 0's tensor, b2 of rank 1's, and so on.",
        name=lambda message: _tagged_name(message, count),
        before=[name_parts(parts, count) for parts in own],
        after=[name_parts(parts, count) for parts in ends],
        held=_held(record, own, ends, count),
    )


def _tagged_name(message: Message, num_parts: int) -> str:
    values = message.tensor.values or ()
    return f"{name_parts(parts_of(values), num_parts)}, {size(message.tensor.nbytes)}"


def _held(
    record: Record, own: Sequence[Sequence[Part]], ends: Sequence[Sequence[Part]], count: int
) -> list[list[list[str]]]:
    """What each rank holds at each step: sums replace the parts that they contain."""
    held = []
    for step in range(record.steps.length + 1):
        of_step = []
        for rank in range(record.num_ranks):
            parts = list(own[rank])
            for flight in record.steps.flights:
                message = flight.message
                has_sent = message.source == rank and flight.start <= step
                if has_sent or (message.target == rank and flight.start < step):
                    parts += parts_of(message.tensor.values or ())
            if step == record.steps.length:
                parts += ends[rank]
            of_step.append([name_parts([part], 0) for part in _largest(parts)])
        held.append(of_step)
    return held


def _largest(parts: Sequence[Part]) -> list[Part]:
    unique = sorted(set(parts), key=lambda part: (part[0], sorted(part[1])))
    return [
        (number, ranks)
        for number, ranks in unique
        if not any(number == other and ranks < more for other, more in unique)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
