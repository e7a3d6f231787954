"""Checks of the arguments of apply_*: an error is one line that says what to give instead.

A job's arguments come from its configuration, which is already checked. Arguments given by hand are
not.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.errors import TitanliteError, one_of, suggest
from titanlite.parallelize.plan import ParallelPlan, find_plan, lacks_plan

Plan: TypeAlias = ParallelPlan | Mapping[str, ParallelStyle]


def as_plan(
    step: str, model: nn.Module, plan: Plan | None, *, axis: str | None = None
) -> ParallelPlan:
    """`plan` as a ParallelPlan; if None, that of find_plan for the model's class.

    A dictionary of module name to style becomes a plan with that tensor parallelism and blocks in
    `layers`. Raises TitanliteError for anything else, and for a derived plan if the step is for
    `axis`, which needs more than blocks.
    """
    check_model(step, model)
    if plan is None:
        plan = find_plan(model)
    if isinstance(plan, ParallelPlan):
        if axis is not None and plan.is_derived:
            raise TitanliteError(f"{step}: {lacks_plan(model, axis)}")
        return plan
    if not isinstance(plan, Mapping):
        raise TitanliteError(
            f"{step}: plan is {_a(plan)}; give a ParallelPlan, or a dictionary of module name to "
            "style"
        )
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise TitanliteError(
                f"{step}: plan[{name!r}] is {_a(style)}, not a style; give a ParallelStyle, such "
                "as ColwiseParallel()"
            )
    return ParallelPlan(tensor_parallel=plan)


def check_model(step: str, model: object) -> None:
    """Raises TitanliteError unless `model` is an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TitanliteError(f"{step}: model is {_a(model)}; give an nn.Module")


def check_mesh(step: str, name: str, mesh: object, most_axes: int = 1) -> None:
    """Raises TitanliteError unless `mesh` is a DeviceMesh with at most `most_axes` axes."""
    if not isinstance(mesh, DeviceMesh):
        raise TitanliteError(
            f'{step}: {name} is {_a(mesh)}; give an axis of a DeviceMesh, as in mesh["tp"]'
        )
    if mesh.ndim > most_axes:
        axes = mesh.mesh_dim_names or ()
        example = f'mesh["{axes[0]}"]' if axes else "a mesh of its own"
        takes = "one" if most_axes == 1 else f"at most {most_axes}"
        raise TitanliteError(
            f"{step}: {name} has {mesh.ndim} axes and takes {takes}; give one of them, as in "
            f"{example}"
        )


def check_choice(step: str, name: str, value: object, legal: Sequence[str]) -> None:
    """Raises TitanliteError unless `value` is one of `legal`."""
    if value in legal:
        return
    word = value if isinstance(value, str) else ""
    advice = suggest(word, legal, f"give {one_of(map(_quoted, legal))}", _quoted)
    raise TitanliteError(f"{step}: {name} {_quoted(value)} is not one of its values; {advice}")


def check_flags(step: str, **flags: object) -> None:
    """Raises TitanliteError for a flag that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TitanliteError(f"{step}: {name} is {_quoted(value)}; give True or False")


def check_dtypes(step: str, **dtypes: object) -> None:
    """Raises TitanliteError for a value that is neither a floating-point dtype nor None."""
    for name, value in dtypes.items():
        is_dtype = isinstance(value, torch.dtype) and value.is_floating_point
        if value is not None and not is_dtype:
            raise TitanliteError(
                f"{step}: {name} is {_quoted(value)}; give a floating-point dtype, such as "
                "torch.bfloat16, or None"
            )


def check_names(step: str, name: str, value: object) -> None:
    """Raises TitanliteError unless `value` is a collection of strings; a string is not."""
    is_names = isinstance(value, Collection) and not isinstance(value, (str, Mapping))
    if not is_names or not all(isinstance(item, str) for item in value):  # type: ignore[attr-defined]
        raise TitanliteError(f"{step}: {name} is {_quoted(value)}; give a tuple of names")


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _a(value: object) -> str:
    name = "None" if value is None else type(value).__name__
    if value is None:
        return name
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
