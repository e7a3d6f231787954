"""On a rank: finds modules that round to a narrower dtype, mix sequences, or are random.

They are found in forward passes of the model on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.batch import Batch, call_model
from titanlite.config import ResolvedJob
from titanlite.draws import inside_modules
from titanlite.job import Job
from titanlite.parallelize.float8_linear import Float8Linear
from titanlite.ranks.world import World


def find_narrowed(job: Job, batches: list[Batch]) -> tuple[str, ...]:
    """The modules whose forward pass converts a tensor to a narrower dtype, with both dtypes.

    Inputs that differ in the last bit can round to different narrow values. A plan may then differ
    by far more than the rounding error of its own dtype. The casts of
    float8 layers are not counted: in float64, practically no value is at the edge of two float8
    values.
    """
    model = job.parts[0]
    return narrowed_in(model, lambda: call_model(model, batches[0].rows(0, 1)))


def narrowed_in(model: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """The modules of `model` that convert a tensor to a narrower dtype while `run` runs it."""
    layers = model.named_modules()
    watch = _Conversions({name for name, layer in layers if isinstance(layer, Float8Linear)})
    with torch.no_grad(), inside_modules(model) as watch.inside, watch:
        run()
    return tuple(watch.found)


def find_mixing(world: World, resolved: ResolvedJob) -> str:
    """The first module whose output for a sequence depends on the rest of the batch, or ""."""
    from titanlite.verify.run import open_job

    with open_job(world, resolved) as job:
        batch = job.draw()[0]
        model = job.parts[0]
        whole, alone = _outputs(model, batch), _outputs(model, batch.rows(0, 1))
    for name, output in whole.items():
        own = alone.get(name)
        for dim in range(output.ndim):
            # The batch dimension is the one that is smaller.
            if own is not None and own.ndim == output.ndim and own.size(dim) != output.size(dim):
                first = output.narrow(dim, 0, own.size(dim))
                if own.shape == first.shape and not torch.allclose(own, first, rtol=1e-6, atol=0):
                    return name or type(model).__name__
    return ""


def find_random(world: World, resolved: ResolvedJob) -> str:
    """The modules that draw from torch's own generators, in words; "" if none is found."""
    from titanlite.verify.run import open_job

    with open_job(world, resolved) as job:
        return f"{job.draws.describe()} {job.draws.verb}" if job.draws.shapes else ""


class _Conversions(TorchDispatchMode):
    """Records conversions to a narrower floating-point dtype, by innermost module."""

    def __init__(self, left_out: Collection[str]) -> None:
        super().__init__()
        self.left_out = left_out
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
        ):
            where = self.inside[-1][0] if self.inside else ""
            if where in self.left_out:
                return output
            dtypes = f"{given.dtype} to {output.dtype}".replace("torch.", "")
            self.found[f"{where or 'the model'} ({dtypes})"] = None
        return output


@torch.no_grad()
def _outputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The output of every module's first call, in the order in which the calls end."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        if isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor):
            outputs.setdefault(name, output.detach().clone())

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: keep(name, output))
        for name, module in model.named_modules()
    ]
    try:
        call_model(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
