"""apply_tp: shard a model's modules over the tp axis by the styles of its plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from titanlite.errors import TitanliteError
from titanlite.parallelize.arguments import Plan, as_plan, check_flags, check_mesh
from titanlite.parallelize.plan import match_modules, refuse_tied_weights
from titanlite.parallelize.styles import EmbeddingLocal, RingStyle


@dataclass(frozen=True)
class TensorParallelReport:
    """What apply_tp did: modules parallelized, tables replicated, plan keys without a module.

    `rings` maps the modules whose collective and product overlap in a ring to the names of their
    styles.
    """

    parallelized: tuple[str, ...]
    replicated: tuple[str, ...]
    unmatched: tuple[str, ...]
    rings: Mapping[str, str] = field(default_factory=dict)


def apply_tp(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    loss_parallel: bool = False,
    rings: bool = False,
    known_unmatched: frozenset[str] = frozenset(),
) -> TensorParallelReport:
    """Shard `model` in place over the 1-D mesh `tp_mesh`, each module by its style in the plan.

    `plan` is a ParallelPlan or a plain dictionary of module name to style, and defaults to the plan
    registered for the model's class. A key that matches no module is skipped with a warning, as in
    `parallelize_module`; keys in `known_unmatched` give no warning. With `rings`, GatherColwise and
    RowwiseLocal overlap their collectives with their products.

    An embedding table with fewer rows than ranks is replicated, because FSDP2 refuses the empty
    shard of a rank without rows.

    Raises TitanliteError for an invalid argument, and for tied weights, which would silently become
    two parameters.
    """
    plan = as_plan("apply_tp", model, plan)
    check_mesh("apply_tp", "tp_mesh", tp_mesh)
    check_flags("apply_tp", loss_parallel=loss_parallel)
    refuse_tied_weights(model)
    styles = dict(plan.tensor_parallel)
    if loss_parallel:
        styles.update(plan.loss_parallel)
    parallelized: list[str] = []
    replicated: list[str] = []
    unmatched: list[str] = []
    made_rings: dict[str, str] = {}
    for pattern, style in styles.items():
        matches = match_modules(model, pattern)
        if rings and isinstance(style, RingStyle):
            style = style.as_ring()
            made_rings |= dict.fromkeys(matches, type(style).__name__)
        if not matches:
            unmatched.append(pattern)
            if pattern not in known_unmatched:
                warnings.warn(
                    f"tensor-parallel plan key '{pattern}' matches no module of "
                    f"{type(model).__name__}; skipped",
                    stacklevel=2,
                )
        for name, module in matches.items():
            whole = _style_of_short_table(module, style, tp_mesh.size())
            try:
                parallelize_module(module, tp_mesh, whole or style)
            except TitanliteError as error:
                raise TitanliteError(
                    f"tensor-parallel plan, {name or 'the model'}: {error}"
                ) from None
            (replicated if whole else parallelized).append(name)
    return TensorParallelReport(
        tuple(parallelized), tuple(replicated), tuple(unmatched), made_rings
    )


def _style_of_short_table(
    module: nn.Module, style: ParallelStyle, num_ranks: int
) -> EmbeddingLocal | None:
    """The style that replaces row-wise sharding of a table with fewer rows than ranks."""
    if not isinstance(module, nn.Embedding) or not isinstance(style, RowwiseParallel):
        return None
    if module.num_embeddings >= num_ranks:
        return None
    (layout,) = style.output_layouts
    return EmbeddingLocal(layout.dim if isinstance(layout, Shard) else None)
