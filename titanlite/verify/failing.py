"""On a rank: adds to an exception the module that raised it, its inputs and its plan entry."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.names import canonical_name
from titanlite.parallelize.plan import matches
from titanlite.parallelize.styles import RingStyle


@contextlib.contextmanager
def naming_failures(job: Job) -> Iterator[None]:
    """Inside, an exception raised in a module gets the module's name, plan entry and inputs.

    They are read from the traceback, so that the verified model needs no hooks.
    """
    try:
        yield
    except Exception as error:
        names = {
            module: canonical_name(name)
            for part in job.parts
            for name, module in part.named_modules()
        }
        calls = [
            (names[module], frame.f_locals.get("args", ()))
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name == "_call_impl"
            and isinstance(module := frame.f_locals.get("self"), nn.Module)
            and module in names
        ]
        if not calls:
            raise
        name, inputs = calls[-1]
        style = styles_of(job).get(name)
        entry = f" (tensor-parallel plan: {style})" if style else ""
        if job.dims.tp_enabled and not style:
            entry = " (not in the tensor-parallel plan)"
        given = ", ".join(map(_shape_of, inputs)) or "nothing"
        kind = TitanliteError if isinstance(error, TitanliteError) else RuntimeError
        raise kind(
            f"{name or 'the model'}{entry} receives {given} and fails with "
            f"{type(error).__name__}: {error}"
        ) from error


def _shape_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "DTensor " if isinstance(value, DTensor) else ""
    return f"{kind}{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def styles_of(job: Job) -> dict[str, str]:
    """Module -> its entry in the tensor-parallel plan, in words."""
    if not job.dims.tp_enabled:
        return {}
    styles = {}
    entries = dict(job.plan.tensor_parallel)
    rings = job.config.parallelism.overlap_backend(job.world.device.type) == "ring"
    if not job.config.parallelism.disable_loss_parallel:
        entries.update(job.plan.loss_parallel)
    for part in job.parts:
        names = [canonical_name(name) for name, _ in part.named_modules()]
        for pattern, style in entries.items():
            shown = [
                f"{key}={value}"
                for key in ("input_layouts", "output_layouts", "dim", "scatter_dim", "layers")
                if (value := getattr(style, key, None)) is not None
            ]
            text = f'"{pattern}": {type(style).__name__}({", ".join(shown)})'
            if rings and isinstance(style, RingStyle):
                text += " as a ring"
            for name in names:
                if matches(name, pattern):
                    styles[name] = text
                    styles.update(
                        {f"{name}.{child}": text for child in getattr(style, "layers", ())}
                    )
    return styles
