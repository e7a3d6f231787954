"""On a rank: an exception of a step gets the module that raised it, its inputs and plan entry."""

import contextlib
import logging
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.errors import TitanliteError, user_line
from titanlite.job import Job
from titanlite.modules.batch import Batch
from titanlite.modules.names import canonical_name
from titanlite.parallelize.plan import matches
from titanlite.parallelize.tensor_parallel.apply import describe_entry
from titanlite.parallelize.tensor_parallel.styles import RingStyle
from titanlite.ranks.watch import is_communication_error

# torch logs the stack of an error that it raises, too, if shapes under a style do not fit.
LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _is_new(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("failed while attempting to run meta")


@contextlib.contextmanager
def naming_failures(job: Job, *, every: bool = False) -> Iterator[None]:
    """Inside, an exception of a step names the module or loss that raised it, and its inputs.

    They are read from the traceback, so that the model needs no hooks. An exception of the loss, of
    a module under tensor parallelism, or of FSDP2 or DDP becomes a TitanliteError, one line: its
    traceback leads into torch. Others are bugs in the model's own code, and are left as they are,
    or with `every` become a RuntimeError that names the module. An error of communication is left
    as it is, since another rank has its cause.
    """
    LOGGER.addFilter(_is_new)
    try:
        yield
    except Exception as error:
        if is_communication_error(error):
            raise
        # A pipeline schedule and DTensor raise errors of their own from the one in the module.
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        own_error = next((one for one in chain if isinstance(one, TitanliteError)), None)
        if own_error is not None and not every:
            raise own_error from None
        frames = [frame for one in chain for frame, _ in traceback.walk_tb(one.__traceback__)]
        line = next(filter(None, map(user_line, reversed(chain))), "")
        message = " ".join(str(chain[-1]).split())
        what = f"fails with {type(chain[-1]).__name__}: {message}" + (f" ({line})" if line else "")
        kind: type[Exception] = TitanliteError
        if not isinstance(error, TitanliteError) and (where := _loss_of(frames)):
            raise TitanliteError(_explain_loss(job, *where, what)) from error
        if (found := _module_of(job, frames)) is None:
            raise
        name, inputs = found
        style = styles_of(job).get(name)
        if style:
            entry, advice = f" (tensor-parallel plan: {style})", "correct the entry"
        elif job.dims.tp_enabled:
            entry = " (not in the tensor-parallel plan)"
            advice = (
                "a module may get a shard under this plan: read sizes such as the number of heads "
                "from the tensors"
            )
        elif MIXED in message:
            entry = ""
            advice = (
                "a weight that FSDP2 shards is whole only while its own module computes: call the "
                "module instead of using its weight"
            )
        else:
            entry = advice = ""
            if not isinstance(error, TitanliteError):
                kind = RuntimeError
        if kind is RuntimeError and not every:
            raise
        given = ", ".join(map(_shape_of, inputs)) or "nothing"
        text = f"{name or 'the model'}{entry} receives {given} and {what}"
        raise kind(f"{text}; {advice}" if advice else text) from error
    finally:
        LOGGER.removeFilter(_is_new)


MIXED = "mixed torch.Tensor and DTensor"
"""In a message of DTensor."""


def _module_of(job: Job, frames: Sequence[FrameType]) -> tuple[str, tuple[Any, ...]] | None:
    """The innermost module of the model that was called, and its inputs; None if there is none."""
    names = {
        module: canonical_name(name) for part in job.parts for name, module in part.named_modules()
    }
    for frame in reversed(frames):
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                return names[module], frame.f_locals.get("args", ())
    return None


def _loss_of(frames: Sequence[FrameType]) -> tuple[Any, Batch] | None:
    """The outputs and the batch of the call of the loss that failed; None if it was not called."""
    for frame in frames:
        values, place = frame.f_locals, frame.f_globals.get("__name__")
        if frame.f_code.co_name == "loss_function" and place == "titanlite.training.step":
            return values["outputs"], values["batch"]
    return None


def _explain_loss(job: Job, outputs: Any, batch: Batch, what: str) -> str:
    if not isinstance(outputs, Tensor) and job.config.training.loss is None:
        # FSDP2 and replicate insert a class of torch before the model's.
        classes = type(job.parts[-1]).__mro__
        name = next(cls.__name__ for cls in classes if not cls.__module__.startswith("torch."))
        what = "None" if outputs is None else f"a {type(outputs).__name__}"
        return (
            f"the loss needs logits, but forward of {name} returns {what}; register the "
            "model with `output`, a function from what it returns to the logits"
        )
    fields = [f"the outputs {_shape_of(outputs)}"]
    advice = "correct the loss, or what it gets"
    if (targets := batch.fields.get("targets")) is not None:
        fields.append(f"targets {_shape_of(targets)}")
        if targets.device.type == "cpu" and targets.numel():
            fields[-1] += f" from {targets.min().item()} to {targets.max().item()}"
        if job.config.training.loss is None:
            advice = "targets are int64, the number of a class of the logits, or -100 for none"
    return f"the loss gets {' and '.join(fields)}, and {what}; {advice}"


def _shape_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "DTensor " if isinstance(value, DTensor) else ""
    return f"{kind}{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def styles_of(job: Job) -> dict[str, str]:
    """Module -> its entry in the tensor-parallel plan, in words."""
    if not job.dims.tp_enabled:
        return {}
    styles: dict[str, str] = {}
    entries = dict(job.plan.tensor_parallel)
    rings = job.config.parallelism.overlap_backend(job.world.device.type) == "ring"
    if not job.config.parallelism.disable_loss_parallel:
        entries.update(job.plan.loss_parallel)
    for part in job.parts:
        names = [canonical_name(name) for name, _ in part.named_modules()]
        for pattern, style in entries.items():
            text = describe_entry(pattern, style)
            if rings and isinstance(style, RingStyle):
                text += " as a ring"
            inside = [f".{child}" for child in getattr(style, "layers", ())]
            for name in names:
                if matches(name, pattern):
                    styles |= {f"{name}{own}": text for own in ("", *inside)}
    return styles
