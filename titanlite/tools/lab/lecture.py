"""Shared code of the parallelisms built by hand: the model, its initialization, and setup.

Function names follow "Parallelism 2", lecture 8 of Stanford's CS336. The model is a chain of square
layers, x <- gelu(x W), and the loss is the mean square of the output. Initial weights depend only
on the layer, not on the rank or the sharding, so every parallelism starts from the weights of a
single process and must end with its results.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titanlite.ranks.launch import Place, torchrun_place
from titanlite.ranks.world import open_world
from titanlite.tools.lab.cluster import VirtualCluster
from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh

LEARNING_RATE = 1e-3
RENDEZVOUS = "tcp://127.0.0.1:15623"

# `cleanup` closes only a process group that `setup` opened.
_opened = contextlib.ExitStack()


@dataclass
class TrainingRecord:
    """The results of one rank: the loss of each step (on its own data), and its part of the model.

    `gradients` are those of the first step, as passed to the optimizer; `params` are those after
    the last step. Both are by layer and contain only what this rank holds. `seconds` is the time of
    all steps except the first, `waited_seconds` the part of it spent waiting for communication.
    `peak_micro_batches` is the most microbatches that a pipeline stage held at once. `held_bytes`
    is the memory at the optimizer step, by kind; data-parallel ranks have all kinds.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    params: dict[int, torch.Tensor] = field(default_factory=dict)
    num_steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    peak_micro_batches: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting."""
        start = time.perf_counter()
        yield
        self.waited_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the time of the block as a step. The first step is a warmup and not counted."""
        start = time.perf_counter()
        yield
        self.num_steps += 1
        if self.num_steps == 1:
            self.waited_seconds = 0.0
        else:
            self.seconds += time.perf_counter() - start


def spawn(
    main: Callable[..., Any], world: int | VirtualCluster, *args: Any, **options: Any
) -> list[Any]:
    """Call `main(rank, world_size, *args, **options)` on every rank; return the results by rank.

    `world` is the number of ranks, or a VirtualCluster. Raises like VirtualCluster.run.
    """
    if isinstance(world, int):
        with VirtualCluster(Mesh(rank=world)) as cluster:
            return spawn(main, cluster, *args, **options)

    def on_device(device: VirtualDevice, *args: Any) -> Any:
        return main(device.rank, device.mesh.size, *args, **options)

    return world.run(on_device, *args)


def setup(rank: int, world_size: int) -> None:
    """Join the process group: one that is already open, torchrun's, or a local one."""
    if not dist.is_initialized():
        place = torchrun_place() or Place(rank, world_size, rank, world_size, RENDEZVOUS)
        has_gpus = torch.cuda.device_count() >= place.local_world_size
        _opened.enter_context(open_world(place, "cuda" if has_gpus else "cpu"))
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"not rank {rank} of {world_size}"
        )


def cleanup() -> None:
    """Leave the process group, if `setup` opened it."""
    dist.barrier()
    _opened.close()


def get_device(rank: int) -> torch.device:
    """The device of this rank: its own GPU if the process group runs on GPUs, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def int_divide(a: int, b: int) -> int:
    """a / b. Raises ValueError if it is not an integer."""
    if a % b:
        raise ValueError(f"{a} does not divide into {b} equal parts")
    return a // b


def get_init_params(
    num_inputs: int,
    num_outputs: int,
    rank: int,
    *,
    layer: int = 0,
    shard: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> nn.Parameter:
    """One shard of the columns of a layer's weight, of shape (num_inputs, num_outputs).

    The whole weight is drawn from a generator seeded by the layer, then sharded. A common mistake
    is to use the same seed on every rank and draw only the shard: all shards and layers then have
    the same weights, and every shard computes the same result.
    """
    generator = torch.Generator().manual_seed(layer)
    num_columns = num_outputs * num_shards
    full = torch.randn(num_inputs, num_columns, generator=generator, dtype=torch.float64)
    columns = full[:, shard * num_outputs : (shard + 1) * num_outputs] / math.sqrt(num_columns)
    return nn.Parameter(columns.to(get_device(rank), dtype).contiguous())


def get_layers(
    data: torch.Tensor, layers: Iterable[int], rank: int, *, shard: int = 0, num_shards: int = 1
) -> dict[int, nn.Parameter]:
    """The square weights of these layers, or one shard of the columns of each, by layer.

    They have the features of `data` (batch, num_dim) and its dtype. Raises ValueError if num_dim
    does not divide evenly.
    """
    num_dim, dtype = data.size(1), data.dtype
    columns = num_dim, int_divide(num_dim, num_shards), rank
    return {
        i: get_init_params(*columns, layer=i, shard=shard, num_shards=num_shards, dtype=dtype)
        for i in layers
    }


def chain(x: torch.Tensor, params: Iterable[torch.Tensor]) -> torch.Tensor:
    """The output of whole layers, one after the other: x <- gelu(x W)."""
    return functools.reduce(lambda x, param: F.gelu(x @ param), params, x)


def train(
    record: TrainingRecord,
    params: Mapping[int, nn.Parameter],
    num_steps: int,
    forward_and_backward: Callable[[], torch.Tensor | float | None],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train `params`, by layer, with AdamW, and fill the record.

    `forward_and_backward` leaves the gradients on the parameters, and returns the loss if this rank
    has one. `after_step` is called after each step of the optimizer.
    """
    optimizer = torch.optim.AdamW(params.values(), lr=LEARNING_RATE)
    for step in range(num_steps):
        with record.step():
            optimizer.zero_grad()
            loss = forward_and_backward()
            if step == 0:
                record.gradients = {
                    i: param.grad.clone() for i, param in params.items() if param.grad is not None
                }
            optimizer.step()
            after_step()
        record.held_bytes["optimizer"] = state_bytes(optimizer)
        if loss is not None:
            record.losses.append(float(loss))
    record.params = {i: param.detach().clone() for i, param in params.items()}


def single_process_main(data: torch.Tensor, num_layers: int, num_steps: int) -> TrainingRecord:
    """The reference for every parallelism: train the whole model on all data in one process."""
    params = get_layers(data, range(num_layers), 0)
    record = TrainingRecord()

    def forward_and_backward() -> torch.Tensor:
        loss = chain(data, params.values()).square().mean()
        loss.backward()
        return loss.detach()

    train(record, params, num_steps, forward_and_backward)
    return record


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the optimizer state that grows with the model: two moments for AdamW."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
