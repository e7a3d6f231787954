"""What the topics measure on four processes of the lab: bytes sent, and times on a slow link.

The processes sleep where they would compute, so that four of them can share any number of cores,
and a Link delays their messages. Times are those of the simulated GPUs, `SCALE` times as short, and
those of the fastest of a few repeats: what else the machine does only adds to them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from titanlite.schedule import make_schedule

if TYPE_CHECKING:
    from titanlite.tools.lab import VirtualCluster

NUM_RANKS = 4
SCALE = 10
UNIT_BYTES = 4096  # of a unit of data of the simulated GPUs
REPEATS = 3


def sent_bytes(cluster: VirtualCluster, *collectives: str, num_bytes: int) -> float:
    """The bytes that a rank sends in these collectives, of a tensor of `num_bytes` in total."""

    def run(device: Any) -> None:
        import torch

        whole = torch.zeros(num_bytes // 4)
        for kind in collectives:
            part = whole.chunk(NUM_RANKS)[device.rank]
            getattr(device, kind)(part if kind == "all_gather" else whole)

    cluster.run(run)
    return cluster.counts.d2d_bytes / NUM_RANKS


def data_parallel_seconds(
    cluster: VirtualCluster,
    compute_seconds: float,
    gradient_units: float,
    latency_seconds: float,
    seconds_per_unit: float,
) -> float:
    """The seconds of a step of the slowest rank: compute, then a ring all-reduce of gradients.

    All times are given, and returned, as those of the simulated GPUs.
    """
    from titanlite.tools.lab import Link

    def run(device: Any) -> float:
        import torch

        gradients = torch.zeros(int(gradient_units * UNIT_BYTES) // 4)
        device.barrier()
        start = time.monotonic()
        time.sleep(compute_seconds / SCALE)
        device.all_reduce(gradients)
        return time.monotonic() - start

    link = Link(latency_seconds / SCALE, UNIT_BYTES / (seconds_per_unit / SCALE))
    steps = [max(cluster.run(run, link=link)) for _ in range(REPEATS)]
    return SCALE * min(steps)


def pipeline_step(
    cluster: VirtualCluster, name: str, num_microbatches: int, forward_seconds: float
) -> tuple[float, int]:
    """The idle share of all ranks in a step of the schedule `name`, and the most inputs that rank 0
    has kept. A backward pass takes twice as long as a forward pass.
    """
    schedule = make_schedule(name, NUM_RANKS, num_microbatches)

    def run(device: Any) -> tuple[float, float, int]:
        import torch

        last, sending = NUM_RANKS - 1, []
        kept: dict[int | None, torch.Tensor] = {}
        most_kept = 0
        device.barrier()
        start = time.monotonic()
        for action in schedule.actions[device.rank]:
            is_forward = action.kind == "F"
            source, target = (-1, 1) if is_forward else (1, -1)
            message = torch.zeros(1)
            if 0 <= device.rank + source <= last:
                device.channel(device.rank + source).recv(message)
            if is_forward:
                kept[action.microbatch] = message
                most_kept = max(most_kept, len(kept))
            else:
                del kept[action.microbatch]
            time.sleep(forward_seconds * (1 if is_forward else 2))
            if 0 <= device.rank + target <= last:
                sending.append(device.channel(device.rank + target).isend(message))
        end = time.monotonic()
        for transfer in sending:
            transfer.wait()
        return start, end, most_kept

    work = 3 * forward_seconds * num_microbatches
    bubbles = []
    for _ in range(REPEATS):
        ranks = cluster.run(run)
        whole = max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks)
        bubbles.append(1 - work / whole)
    return min(bubbles), ranks[0][2]
