"""What goes into a model: tokens, and the fields of a batch that its forward asks for by name.

One place knows which fields there are and how each is cut: over the ranks of the cp axis where a
batch enters, and into microbatches where a pipeline runs it. Every stage of a pipeline asks for
fields in the same way as a whole model, so that none of them is for the first stage alone.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from titanlite.errors import TitanliteError

FIELDS = ("positions",)
"""What a batch has beside its tokens."""


@dataclass(frozen=True)
class FieldDims:
    """Which dimension of a field counts the sequences of a batch and which their tokens."""

    batch: int | None
    sequence: int | None


def dims_of(name: str, field: Tensor) -> FieldDims:
    """The dimensions of a field: `positions` are [T], alike for all sequences, or [B, T]."""
    assert name in FIELDS, name
    return FieldDims(None, 0) if field.ndim == 1 else FieldDims(0, 1)


def asked_for(module: nn.Module, **fields: Tensor) -> dict[str, Tensor]:
    """Those of `fields` that the module's forward takes by name."""
    parameters = inspect.signature(module.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: field for name, field in fields.items() if takes_all or name in parameters}


def check_forward(module: nn.Module) -> None:
    """Raises TitanliteError where the module's forward needs an argument that no batch has."""
    _, *others = inspect.signature(module.forward).parameters.values()
    for parameter in others:
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and parameter.name not in FIELDS:
            raise TitanliteError(
                f"forward of {type(module).__name__} needs `{parameter.name}`, and beside the "
                f"tokens a batch has {' and '.join(f'`{name}`' for name in FIELDS)}, by that name"
            )


def call_model(module: nn.Module, x: Tensor, **fields: Tensor) -> Any:
    """What a model puts out for tokens [B, T]; or a stage of it, for what the stage before has."""
    return module(x, **asked_for(module, **fields))
