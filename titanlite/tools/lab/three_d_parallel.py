"""Data, tensor and pipeline parallelism together, each on its own axis of one mesh.

A rank is in three groups. Its tp peers hold other columns of the same layers, its pp peers hold
other layers, and its dp peers hold replicas. This composes data_parallel.py, tensor_parallel.py and
pipeline_parallel.py; each communicates within its own group.
"""

from typing import Any

import torch
import torch.distributed as dist

from titanlite.tools.lab import lecture
from titanlite.tools.lab.communicator import TorchCommunicator
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.pipeline_parallel import SCHEDULES, run_stage
from titanlite.tools.lab.tensor_parallel import tensor_parallel_layer


def three_d_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    num_micro_batches: int,
    *,
    mesh: Mesh | None = None,
    num_steps: int = 1,
    schedule: str = "1f1b",
    overlap: bool = False,
) -> lecture.TrainingRecord:
    """Train on `data` (batch, num_dim) with the three degrees of `mesh`, by default 2 x 2 x 2.

    The axes pp, dp and tp of `mesh` divide the layers, the batch and num_dim. Raises ValueError if
    they do not divide evenly, or if the mesh does not have world_size devices. A rank's record has
    its columns of its layers. Only the last stage records losses: the mean over its dp rank's part
    of the batch.
    """
    mesh = mesh or Mesh(pp=2, dp=2, tp=2)
    if mesh.size != world_size:
        raise ValueError(f"{mesh} has {mesh.size} devices, but there are {world_size} ranks")
    lecture.setup(rank, world_size)
    here = mesh.index(rank)
    groups = open_groups(mesh, rank)
    local_batch_size = lecture.int_divide(data.size(0), mesh.sizes["dp"])
    lecture.int_divide(local_batch_size, num_micro_batches)
    local_num_layers = lecture.int_divide(num_layers, mesh.sizes["pp"])
    data = data.split(local_batch_size)[here["dp"]].to(lecture.get_device(rank))
    layers = range(here["pp"] * local_num_layers, (here["pp"] + 1) * local_num_layers)
    params = lecture.get_layers(data, layers, rank, shard=here["tp"], num_shards=mesh.sizes["tp"])
    tensor_ranks = TorchCommunicator(groups["tp"])
    stages, stage = mesh.group(here, ["pp"]), here["pp"]
    actions = SCHEDULES[schedule](stage, len(stages), num_micro_batches)
    record = lecture.TrainingRecord()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for param in params.values():
            x = tensor_parallel_layer(x, param, record, tensor_ranks, overlap=overlap)
        return x

    def forward_and_backward() -> float | None:
        loss = run_stage(
            actions,
            forward,
            data.chunk(num_micro_batches),
            TorchCommunicator(),
            previous_rank=stages[stage - 1] if stage > 0 else None,
            next_rank=stages[stage + 1] if stage + 1 < len(stages) else None,
            record=record,
            overlap=overlap,
        )
        works: list[Any] = [
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=groups["dp"], async_op=True)
            for param in params.values()
            if param.grad is not None
        ]
        with record.waiting():
            for work in works:
                work.wait()
        return loss

    lecture.train(record, params, num_steps, forward_and_backward)
    for group in groups.values():
        dist.destroy_process_group(group)
    lecture.cleanup()
    return record


def open_groups(mesh: Mesh, rank: int) -> dict[str, dist.ProcessGroup]:
    """This rank's process group on each axis. All ranks create all groups, in the same order."""
    mine: dict[str, Any] = {}
    for axis in mesh.axes:
        for ranks in sorted({mesh.group(index, [axis]) for index in mesh}):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mine[axis] = group
    return mine
