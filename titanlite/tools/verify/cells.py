"""On a rank: writes gradients as weighted sums of the gradients of the batch's cells.

A cell is the targets of one microbatch on one data- and context-parallel rank. If a gradient is a
sum of cells' gradients with weights other than one, the cells were computed correctly and summed
incorrectly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from titanlite.config import ResolvedJob
from titanlite.job import Job
from titanlite.modules.attention import make_layout
from titanlite.modules.batch import Batch
from titanlite.modules.shards import local_part, shard_of
from titanlite.tools.verify.jobs import microbatch_size
from titanlite.tools.verify.record import Cell, Fit
from titanlite.tools.verify.tracing import fit

# With more cells, microbatches are merged: each cell costs a backward pass and a gradient copy.
MOST_CELLS = 48


def cells_file(folder: str) -> Path:
    """The file of the cells' gradients, stacked by parameter."""
    return Path(folder) / "cells.pt"


def shares_of(
    job: Job, names: list[str], record: Mapping[str, Tensor], folder: str
) -> dict[str, Fit]:
    """This rank's part of each gradient as a sum of those of the cells."""
    by_cell = torch.load(cells_file(folder), mmap=True, weights_only=True)
    parameters = job.parameters
    shares = {}
    for name in names:
        parameter = parameters.get(name)
        if parameter is None or parameter.grad is None or name not in by_cell:
            continue
        cells = [shard_of(cell, parameter) for cell in by_cell[name]]
        own, known = local_part(parameter.grad).detach().cpu(), shard_of(record[name], parameter)
        if (found := fit(cells, own, known)) is not None:
            shares[name] = found
    return shares


def cells_of(plan: ResolvedJob, total: int) -> tuple[Cell, ...]:
    """The cells of a plan's batch of `total` sequences; too many microbatches are merged."""
    dims = plan.dims
    count = total // dims.dp // microbatch_size(plan)
    if dims.dp * count * dims.cp > MOST_CELLS:
        count = 1
    return tuple(
        (data, microbatch, part)
        for data in range(dims.dp)
        for microbatch in range(count)
        for part in range(dims.cp)
    )


def cut_cells(batch: Batch, cells: tuple[Cell, ...], plan: ResolvedJob) -> Iterator[Batch]:
    """For each cell, its sequences with all targets of other cells masked."""
    dims, seq_len = plan.dims, plan.seq_len
    layout = make_layout(plan.config.parallelism.context_parallel_load_balancer, dims.cp)
    count = 1 + max(microbatch for _, microbatch, _ in cells)
    size = batch.num_sequences // dims.dp // count
    for data, microbatch, part in cells:
        first = data * batch.num_sequences // dims.dp + microbatch * size
        is_out = torch.ones(1, seq_len, dtype=torch.bool)
        is_out[:, layout.positions(part, seq_len) if dims.cp_enabled else slice(None)] = False
        if (dim := batch.dims["targets"].sequence) is not None:
            is_out = is_out[:, : batch.targets.size(dim)]
        yield batch.rows(first, first + size).leave_out(is_out)
