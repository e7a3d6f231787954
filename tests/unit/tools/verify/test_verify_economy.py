"""What `titanlite.compare` tells of parallel code that agrees, but sends or reads needlessly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import titanlite
from titanlite.config import JobConfig, resolve_job
from titanlite.job import build_job
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world
from titanlite.tools.verify.watching import StepWatch

NUM_MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.gate(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def accumulate(model: Any, part: Tensor, before: Callable[[bool], Any] = lambda _: None) -> Tensor:
    """Forward and backward passes of the microbatches of a part."""
    total = torch.zeros(())
    for index, rows in enumerate(part.chunk(NUM_MICROBATCHES)):
        with before(index == NUM_MICROBATCHES - 1) or contextlib.nullcontext():
            value = loss(model, rows) / NUM_MICROBATCHES
            value.backward()
        total += value.detach()
    return total


# Data parallel.


def with_ddp() -> Any:
    return nn.parallel.DistributedDataParallel(Model())


def reduces_once(model: Any, part: Tensor) -> Tensor:
    return accumulate(model, part, lambda is_last: None if is_last else model.no_sync())


def with_hooks() -> Any:
    model = Model()

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(average)
    return model


def averages_again(model: Any, part: Tensor) -> Tensor:
    value = loss(model, part)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    return value


def averages_each_microbatch(model: Any, part: Tensor) -> Tensor:
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rows in part.chunk(NUM_MICROBATCHES):
        model.zero_grad()
        (loss(model, rows) / NUM_MICROBATCHES).backward()
        for total, parameter in zip(kept, model.parameters(), strict=True):
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            total += parameter.grad
    for total, parameter in zip(kept, model.parameters(), strict=True):
        parameter.grad = total
    return loss(model, part).detach()


def with_hsdp(mesh: Any) -> Any:
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp", "shard"])
    return fully_shard(model, mesh=mesh["dp", "shard"])


def reduces_shards_once(model: Any, part: Tensor) -> Tensor:
    return accumulate(model, part, model.set_requires_all_reduce)


def reads_each_loss(model: Any, part: Tensor) -> Tensor:
    total = 0.0
    for index, rows in enumerate(part.chunk(NUM_MICROBATCHES)):
        with contextlib.nullcontext() if index == 3 else model.no_sync():
            value = loss(model, rows) / NUM_MICROBATCHES
            value.backward()
            total += value.item()
    return torch.tensor(total)


def reads_at_the_end(model: Any, part: Tensor) -> Tensor:
    value = reduces_once(model, part)
    print(end="" if value.item() < 1e9 else "large")
    return value


# Tensor parallel, with the sequence sharded between blocks.


def with_a_gather_for_each_layer(mesh: Any) -> Any:
    plan: dict[str, Any] = {
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(0),
            output_layouts=Shard(0),
            desired_output_layouts=Replicate(),
            use_local_input=True,
        )
    }
    for name in ("blocks.0", "blocks.1"):
        plan[f"{name}.up"] = plan[f"{name}.gate"] = ColwiseParallel(input_layouts=Shard(0))
        plan[f"{name}.down"] = RowwiseParallel(output_layouts=Shard(0))
    return parallelize_module(Model(), mesh["tp"], plan)


class Gather(torch.autograd.Function):
    """Gathers rows; the gradient is that of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Mixed(nn.Module):
    """Mixes rows of the batch, which are split over the ranks."""

    def __init__(self, gathers: int = 0, recomputes: bool = False) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gathers, self.recomputes = gathers, recomputes

    def whole(self, x: Tensor) -> Tensor:
        return Gather.apply(x) if self.gathers else x

    def mix(self, x: Tensor) -> Tensor:
        rows = self.whole(x)
        again = self.whole(x) if self.gathers > 1 else rows
        return x + (x @ self.key(rows).T).softmax(-1) @ self.value(again)

    def forward(self, x: Tensor) -> Tensor:
        x = self.key(x)
        return checkpoint(self.mix, x, use_reentrant=False) if self.recomputes else self.mix(x)


class Ring(nn.Module):
    """The same, with the rows passed on around a ring."""

    def __init__(self, hops: int) -> None:
        super().__init__()
        self.key, self.value, self.hops = nn.Linear(8, 8), nn.Linear(8, 8), hops

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.value(_Rounds.apply(self.key(x), self.hops)))


class _Rounds(torch.autograd.Function):
    """The sum of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hops: int) -> Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        own, total = x.contiguous(), x.clone()
        for hop in range(hops):
            came = torch.empty_like(own)
            ops = [
                dist.P2POp(dist.isend, own, (rank + 1) % size),
                dist.P2POp(dist.irecv, came, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if hop < size - 1:
                total += came
            own = came
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient, None


def sums_parts() -> Any:
    """The plain model of a ring."""

    class Whole(Ring):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.key(x)
            total = sum(rows.chunk(4))
            return x + torch.relu(self.value(total.repeat(4, 1)))

    return Whole(0)


def averaged(model: Any) -> Callable[[], Any]:
    def build() -> Any:
        return nn.parallel.DistributedDataParallel(model())

    return build


DP: dict[str, Any] = {"ranks": {"dp": 2}, "split": "dp"}
HSDP: dict[str, Any] = {
    "ranks": {"dp": 2, "shard": 2},
    "split": lambda b, m: b.chunk(4)[dist.get_rank()],
}
RING: dict[str, Any] = {"ranks": {"dp": 4}, "split": "dp", "reference": sums_parts}
MIXED: dict[str, Any] = {**DP, "reference": Mixed}


def compared(
    parallel: Callable[..., Any], options: dict[str, Any], **more: Any
) -> titanlite.tools.verify.Comparison:
    given = {
        "reference": Model,
        "batches": BATCHES,
        "loss": loss,
        "threads": True,
        **options,
        **more,
    }
    return titanlite.compare(given.pop("reference"), parallel, **given).check()


NEEDLESS = {
    "DDP reduces each microbatch": (
        with_ddp,
        {**DP, "step": accumulate},
        r"communicates 4 times what it must over dp: all_reduce of .* in each of 4 backward passes",
    ),
    "a hook reduces each microbatch": (
        with_hooks,
        {**DP, "step": accumulate},
        r"communicates 4 times what it must over dp: all_reduce of .* in average sums the same",
    ),
    "a loop reduces each microbatch": (
        Model,
        {**DP, "step": averages_each_microbatch},
        r"communicates 4 times what it must over dp: all_reduce of .* in each of 4 backward passes",
    ),
    "gradients are averaged twice": (
        with_ddp,
        {**DP, "step": averages_again},
        r"communicates 1.96 times .* in averages_again reduces or gathers what all its ranks",
    ),
    "HSDP reduces shards each microbatch": (
        with_hsdp,
        {**HSDP, "step": accumulate},
        r"communicates 4 times what it must over dp: all_reduce of .* in each of 4 backward passes",
    ),
    "rows are gathered twice": (
        averaged(lambda: Mixed(gathers=2)),
        MIXED,
        r"times what it must over dp: all_gather of \[8, 8\] float64 at .* sent before",
    ),
    "each layer gathers its input": (
        with_a_gather_for_each_layer,
        {"ranks": {"tp": 2}},
        r"times what it must over tp: all_gather of \[8, 8\] float64 at .* sent before",
    ),
    "a ring goes all the way round": (
        averaged(lambda: Ring(4)),
        RING,
        r"receive of \[4, 8\] float64 at .* in forward brings what no operator reads",
    ),
    "each loss is read": (
        with_ddp,
        {**DP, "step": reads_each_loss},
        r"reads the device 3 times in the middle of a step.*: item\(\) at .* in reads_each_loss",
    ),
}


@pytest.mark.parametrize("name", NEEDLESS)
def test_what_is_needless_is_told(name: str) -> None:
    parallel, options, words = NEEDLESS[name]
    found = compared(parallel, options)
    assert re.search(words, " ".join(found.needless)), found.needless or found.traffic[0].totals
    assert "but the plan" in str(found)


ECONOMICAL = {
    "DDP reduces once": (with_ddp, {**DP, "step": reduces_once}),
    "a loss is read at the end": (with_ddp, {**DP, "step": reads_at_the_end}),
    "HSDP reduces shards once": (with_hsdp, {**HSDP, "step": reduces_shards_once}),
    "rows are gathered once": (averaged(lambda: Mixed(gathers=1)), MIXED),
    "rows are gathered again": (averaged(lambda: Mixed(gathers=1, recomputes=True)), MIXED),
    "a ring stops": (averaged(lambda: Ring(3)), RING),
}


@pytest.mark.parametrize("name", ECONOMICAL)
def test_an_economical_step_is_told_nothing(name: str) -> None:
    found = compared(*ECONOMICAL[name])
    assert found.traffic
    assert not found.needless


def reads_of_a_step(place: Place, degrees: dict[str, int]) -> tuple[list[str], list[str]]:
    """What a step of a job reads of the device until its backward pass ends, and altogether."""
    dataset = {"dataset": "synthetic", "local_batch_size": 4, "global_batch_size": 8}
    sections = {"model": {"flavor": "debug"}, "training": dataset, "parallelism": degrees}
    if "context_parallel_degree" in degrees:
        sections["model"] = {"name": "llama3", "flavor": "tiny", "n_layers": 2}
        dataset |= {"dataset": "pydoc", "seq_len": 64, "attend_across_documents": False}
    with open_world(place) as world:
        job = build_job(resolve_job(JobConfig.from_dict(sections), world.size), world)
        job.step(1)
        watch = StepWatch({}, job.parameters)
        batches = job.draw()
        with watch.seeing():
            job.trainer.step(batches, 2)
        named, early = (
            sorted(f"{read.operation} in {read.site.split()[-1]}" for read in reads)
            for reads in (watch.reads, watch.traffic().reads)
        )
        return early, named


@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard_degree": 2},
        {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
        {"context_parallel_degree": 1, "data_parallel_shard_degree": 2},
        {"context_parallel_degree": 2, "data_parallel_shard_degree": 1},
        {"context_parallel_degree": 1, "pipeline_parallel_degree": 2},
    ],
    ids=["fsdp", "tp", "documents", "documents, cp", "documents, pp"],
)
def test_a_step_of_a_job_reads_the_device_once_before_its_backward_pass_ends(
    degrees: dict[str, int],
) -> None:
    """The number of targets, by which the loss is divided; then the loss and the norm together."""
    for early, found in spawn(reads_of_a_step, 2, degrees, threads=True):
        assert early == ["item() in _count_targets"]
        assert found == ["item() in _count_targets", "tolist() in _read"]
