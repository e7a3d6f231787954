"""On a rank: finds modules that round to a narrower dtype or are random, and what mixes samples.

They are found in forward passes of the model on one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config import ResolvedJob
from titanlite.job import Job
from titanlite.modules.batch import Batch, call_model, join
from titanlite.modules.draws import inside_modules
from titanlite.parallelize.float8.linear import Float8Linear
from titanlite.ranks.world import World
from titanlite.tools.verify.opened import open_job
from titanlite.tools.verify.parts import first_tensors
from titanlite.tools.verify.record import is_input


def find_narrowed(job: Job, batches: list[Batch]) -> tuple[str, ...]:
    """The modules whose forward pass converts a tensor to a narrower dtype, with both dtypes.

    Inputs that differ in the last bit can round to different narrow values. A plan may then differ
    by far more than the rounding error of its own dtype. The casts of
    float8 layers are not counted: in float64, practically no value is at the edge of two float8
    values.
    """
    model = job.parts[0]
    # Two sequences, since a batch norm has no variance of one value.
    few = batches[0].rows(0, min(2, batches[0].num_sequences))
    return narrowed_in(model, lambda: call_model(model, few))


def narrowed_in(model: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """The modules of `model` that convert a tensor to a narrower dtype while `run` runs it."""
    with torch.no_grad(), unchanged_buffers(model), watched(model) as found:
        run()
    return tuple(found)


@contextlib.contextmanager
def watched(model: nn.Module, outside: str = "the model") -> Iterator[Collection[str]]:
    """Inside, conversions to a narrower dtype are added to what it yields.

    They have the name of the innermost module, or else `outside`. Backward passes are left out.
    """
    layers = model.named_modules()
    watch = _Conversions({n for n, layer in layers if isinstance(layer, Float8Linear)}, outside)
    with inside_modules(model) as watch.inside, watch:
        yield watch.found


def find_mixing(world: World, resolved: ResolvedJob) -> tuple[str, str]:
    """What depends on the other sequences of the batch: a module, or else how the loss does.

    A module's output for the first sequence is compared between the batch and a batch of copies of
    that sequence; the sum of the losses, between the batch and its sequences one by one.
    """
    with open_job(world, resolved) as job, torch.no_grad():
        batch = job.draw()[0]
        model = job.parts[0]
        number = batch.num_sequences
        copies = join([batch.rows(0, 1)] * (3 if number == 2 else 2))
        with unchanged_buffers(model):
            whole, alone = first_tensors(model, batch), first_tensors(model, copies)
        for name, output in whole.items():
            if not is_input(name) and _differs(output, alone.get(name)):
                module = model.get_submodule(name)
                return f"{name or 'the model'} ({type(module).__name__})", ""
        loss = job.trainer.loss
        together = float(loss.total(call_model(model, batch), batch))
        rows = [batch.rows(row, row + 1) for row in range(number)]
        each = [float(loss.total(call_model(model, row), row)) for row in rows]
        counts = [float(loss.count(row)) for row in rows]
    difference = abs(together - sum(each)) / max(abs(together), abs(sum(each)), 1e-300)
    if difference <= 1e-9 or number == 1:
        return "", ""
    weighted = sum(count * one for count, one in zip(counts, each, strict=True))
    mean_over = {
        "samples": together * number / (sum(each) or 1.0),
        "weights or targets of the samples": together * sum(counts) / (weighted or 1.0),
    }
    for what, ratio in mean_over.items():
        # Weights that are divided by their mean count as many as there are samples.
        if round(ratio, 9) in (1, number):
            return "", (
                f"the loss is a mean over the {what} that it is given, so it depends on how the "
                "batch is split; let total(outputs, batch) return their sum (docs/losses.md)"
            )
    return "", (
        "the loss of one sample depends on other samples: on one process, the losses of the "
        f"samples one by one differ from those together by {difference:.1e}. A rank or microbatch "
        "has only some of the batch, so plans train on other losses; register the loss with "
        'over="batch" (docs/losses.md)'
    )


def _differs(whole: Tensor, copies: Tensor | None) -> bool:
    """Whether the outputs for the first sequence differ."""
    if copies is None or whole.ndim != copies.ndim:
        return False
    # The dimension of the sequences is the one whose size is another.
    dims = [dim for dim in range(whole.ndim) if whole.size(dim) != copies.size(dim)]
    if len(dims) != 1:
        return False
    one, other = whole.narrow(dims[0], 0, 1), copies.narrow(dims[0], 0, 1)
    return not torch.allclose(one, other, rtol=1e-6, atol=1e-12)


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes may change the buffers; they are restored at the end."""
    found = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in found:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)


def find_random(world: World, resolved: ResolvedJob) -> str:
    """The modules that draw from torch's own generators, in words; "" if none is found."""
    with open_job(world, resolved) as job:
        return f"{job.draws.describe()} {job.draws.verb}" if job.draws.shapes else ""


class _Conversions(TorchDispatchMode):
    """Records conversions to a narrower floating-point dtype, by innermost module."""

    def __init__(self, left_out: Collection[str], outside: str) -> None:
        super().__init__()
        self.left_out, self.outside = left_out, outside
        self.found: dict[str, None] = {}
        self.inside: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        if (
            func is torch.ops.aten._to_copy.default
            and isinstance(given, Tensor)
            and given.is_floating_point()
            and output.is_floating_point()
            and output.dtype.itemsize < given.dtype.itemsize
            and torch._C._current_graph_task_id() == -1
        ):
            where = self.inside[-1][0] if self.inside else ""
            if where in self.left_out:
                return output
            dtypes = f"{given.dtype} to {output.dtype}".replace("torch.", "")
            self.found[f"{where or self.outside} ({dtypes})"] = None
        return output
