"""apply_tp: shard a model's modules over the tp axis by the styles of its plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.errors import TitanliteError
from titanlite.modules.experts import ExpertLayer, RoutedExperts, expert_layers
from titanlite.modules.gradient_sums import sum_gradient
from titanlite.modules.lora import LoRALinear, without_adapters
from titanlite.modules.tied import find_tied
from titanlite.parallelize.arguments import Plan, as_plan, check_flags, check_mesh
from titanlite.parallelize.plan import ParallelPlan, match_modules, matches
from titanlite.parallelize.tensor_parallel.styles import (
    EmbeddingLocal,
    EmbeddingRowwise,
    GatherColwise,
    NormLocal,
    RingStyle,
    RowwiseLocal,
    TokenDropoutLocal,
)


@dataclass(frozen=True)
class TensorParallelReport:
    """What apply_tp did: modules parallelized, tables replicated, plan keys without a module.

    `rings` maps the modules that overlap in a ring to their styles. `summed` are the trained
    parameters without a style whose gradients the step sums.
    """

    parallelized: tuple[str, ...]
    replicated: tuple[str, ...]
    unmatched: tuple[str, ...]
    rings: Mapping[str, str] = field(default_factory=dict)
    summed: tuple[str, ...] = ()


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

    `plan` is a ParallelPlan or a dict from module name to style, by default the plan registered for
    the model's class. A key that matches no module is skipped with a warning, unless it is in
    `known_unmatched`. With `rings`, GatherColwise and RowwiseLocal run each collective as a ring of
    P2P messages that overlap with the matrix product (async TP).

    An embedding table with fewer rows than ranks is replicated, because FSDP2 refuses an empty
    shard. A tied weight keeps one DTensor. A trained parameter without a style stays replicated.
    Inside a block whose sequence is sharded, its gradient is a part of a sum, and is marked for
    GradientSums (gradient_sums.py), as are those that the plan names in `partial_gradients`. Any
    other is taken to be whole on each rank.

    Raises TitanliteError for an invalid argument, for a tied weight with different placements, and
    for a module without a style that mixes the tokens of a sharded sequence.
    """
    plan = as_plan("apply_tp", model, plan, axis="tp")
    check_mesh("apply_tp", "tp_mesh", tp_mesh)
    check_flags("apply_tp", loss_parallel=loss_parallel)
    styles = _styles_of(plan, loss_parallel)
    tied = find_tied(model)
    check_tied_placements(model, plan, tp_mesh.size(), loss_parallel=loss_parallel)
    parallelized: list[str] = []
    replicated: list[str] = []
    unmatched: list[str] = []
    made_rings: dict[str, str] = {}
    for pattern, style in styles.items():
        matched = match_modules(model, pattern)
        if rings and isinstance(style, RingStyle):
            style = style.as_ring()
            made_rings |= dict.fromkeys(matched, type(style).__name__)
        if not matched:
            unmatched.append(pattern)
            if pattern not in known_unmatched:
                warnings.warn(
                    f"tensor-parallel plan key '{pattern}' matches no module of "
                    f"{type(model).__name__}; skipped",
                    stacklevel=2,
                )
        for name, module in matched.items():
            whole = _style_of_short_table(module, style, tp_mesh.size())
            try:
                with without_adapters(module):
                    parallelize_module(module, tp_mesh, whole or style)
            except Exception as error:  # a style may raise anything
                what = name or "the model"
                if isinstance(error, TitanliteError):
                    raise TitanliteError(f"tensor-parallel plan, {what}: {error}") from None
                raise TitanliteError(
                    f"tensor-parallel plan, {describe_entry(pattern, style)} on {what} "
                    f"({type(module).__name__}): "
                    f"{' '.join(str(error).split()) or type(error).__name__}; "
                    f"{_instead(name, module, style)}"
                ) from error
            _share_distributed(model, tied)
            (replicated if whole else parallelized).append(name)
    for layer in model.modules():
        if isinstance(layer, LoRALinear) and isinstance(layer.weight, DTensor):
            layer.shard(tp_mesh)
    summed = _partial_gradients(model, plan, styles)
    for name in summed:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        differs = not isinstance(module, RoutedExperts)
        sum_gradient(module, leaf, "tp", tp_mesh.get_group(), differs=differs)
    return TensorParallelReport(
        tuple(parallelized), tuple(replicated), tuple(unmatched), made_rings, summed
    )


# Modules whose output for a token depends on other tokens.
MIXING = (nn.MultiheadAttention, nn.RNNBase, nn.modules.batchnorm._BatchNorm)


def _partial_gradients(
    model: nn.Module, plan: ParallelPlan, styles: Mapping[str, ParallelStyle]
) -> tuple[str, ...]:
    """The trained parameters without a style of which each rank computes a part of the gradient."""
    modules = dict(model.named_modules())
    styled = {
        name: style for pattern, style in styles.items() for name in match_modules(model, pattern)
    }
    layers = expert_layers([model]).items()
    experts = tuple(f"{name}.experts." for name, _ in layers)
    routers = tuple(f"{n}.router." for n, layer in layers if isinstance(layer, ExpertLayer))
    is_sharded = shards_sequence(plan)
    found = []
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if isinstance(parameter, DTensor):
            continue
        is_partial = any(matches(name, pattern) for pattern in plan.partial_gradients)
        if not is_partial and not any(matches(name, pattern) for pattern in plan.whole_gradients):
            # A router has the tokens of this rank (apply_ep), and so have experts.
            is_partial = name.startswith(routers) or (is_sharded and name.startswith(experts))
            if is_sharded and not is_partial and plan.is_in_block(name):
                above = _gathered_by(owner, styled)
                if above is None:
                    _refuse_mixing(owner, modules[owner])
                # In a module whose input is gathered and nothing is sharded, all ranks compute the
                # same.
                is_partial = above is None or any(
                    isinstance(p, DTensor) for p in modules[above].parameters()
                )
        if is_partial and parameter.requires_grad:
            found.append(name)
    return tuple(found)


def shards_sequence(plan: ParallelPlan) -> bool:
    """Whether the plan's styles leave activations in blocks sharded over the sequence."""
    in_blocks = [style for name, style in plan.tensor_parallel.items() if plan.is_in_block(name)]
    return plan.sequence_dim is not None and any(map(_has_sequence_shards, in_blocks))


def _has_sequence_shards(style: ParallelStyle) -> bool:
    sharding = isinstance(style, GatherColwise | RowwiseLocal | NormLocal | SequenceParallel)
    if sharding or not isinstance(style, KNOWN_STYLES):
        return True
    layouts: list[object] = []
    for name in ("input_layouts", "output_layouts"):
        value = getattr(style, name, None)
        layouts += value if isinstance(value, tuple | list) else [value]
    return any(isinstance(layout, Shard) and layout.dim != -1 for layout in layouts)


def _gathered_by(name: str, styled: Mapping[str, ParallelStyle]) -> str | None:
    """The innermost module around `name`, or itself, whose input its style gathers."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        above = ".".join(parts[:count])
        style = styled.get(above)
        if isinstance(style, PrepareModuleInputOutput):
            style = style.prepare_module_input
        if isinstance(style, PrepareModuleInput):
            by_name = style.desired_input_kwarg_layouts.values()
            desired = (*(style.desired_input_layouts or ()), *by_name)
            if any(isinstance(layout, Replicate) for layout in desired):
                return above
    return None


def _refuse_mixing(name: str, module: nn.Module) -> None:
    convolves = isinstance(module, nn.modules.conv._ConvNd) and max(module.kernel_size) > 1
    if convolves or isinstance(module, MIXING):
        raise TitanliteError(
            f"{name}: a {type(module).__name__} mixes the tokens of a sequence, which the "
            "tensor-parallel plan shards between blocks, and has no style; give it one that "
            "gathers its input, such as PrepareModuleInput, or leave activations whole with "
            "sequence_dim=None and styles without sequence shards"
        )


def describe_entry(pattern: str, style: ParallelStyle) -> str:
    """An entry of a tensor-parallel plan in words, such as '"head": RowwiseParallel(...)'."""
    shown = [
        f"{key}={value}"
        for key in ("input_layouts", "output_layouts", "dim", "scatter_dim", "layers")
        if (value := getattr(style, key, None)) is not None
    ]
    return f'"{pattern}": {type(style).__name__}({", ".join(shown)})'


def _instead(name: str, module: nn.Module, style: ParallelStyle) -> str:
    """What to do if `style` refuses `module`."""
    leave = "leave it out of the plan, and it is replicated"
    is_for_layers = isinstance(style, ColwiseParallel | RowwiseParallel)
    if not is_for_layers or isinstance(module, nn.Linear | nn.Embedding):
        return f"correct the entry, or {leave}"
    inside = [
        f"{name}.{child}" if name else child
        for child, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding)
    ]
    if inside:
        return f"name linear layers and embeddings, such as {', '.join(inside[:3])}, or {leave}"
    return leave


def check_tied_placements(
    model: nn.Module, plan: ParallelPlan, num_ranks: int, *, loss_parallel: bool = False
) -> None:
    """Check that `plan` places every name of a tied weight alike on `num_ranks` ranks.

    Raises TitanliteError otherwise. Only reads the plan, so the model may be plain and without
    storage. The placement of a style that titanlite does not know is not checked.
    """
    if not (tied := find_tied(model)):
        return
    placed: dict[str, tuple[str, str]] = {}
    unknown: list[str] = []
    for pattern, style in _styles_of(plan, loss_parallel).items():
        for name, module in match_modules(model, pattern).items():
            used = _style_of_short_table(module, style, num_ranks) or style
            for layer, how in weight_placements(name, module, used).items():
                placed[f"{layer}.weight"] = how, type(used).__name__
            if not isinstance(used, KNOWN_STYLES):
                unknown.append(f"{name}." if name else "")
    for name, first in tied.items():
        if any(one.startswith(tuple(unknown)) for one in (name, first)):
            continue
        (how, style_name), (first_how, first_style) = (
            placed.get(one, ("replicated", "no style")) for one in (name, first)
        )
        if how != first_how:
            raise TitanliteError(
                f"{name} and {first} of {type(model).__name__} are one parameter, but the "
                f"tensor-parallel plan has the first {how} ({style_name}) and the second "
                f"{first_how} ({first_style}); give both one placement, such as RowwiseParallel "
                "for the embedding table and ColwiseParallel for the output layer"
            )


BY_ROWS = "sharded by rows"


def weight_placements(name: str, module: nn.Module, style: ParallelStyle) -> dict[str, str]:
    """Layer -> how a style places its weight, in words, for the styles that shard weights."""
    if isinstance(style, GatherColwise):
        return {f"{name}.{layer}" if name else layer: BY_ROWS for layer in style.layers}
    if isinstance(style, EmbeddingLocal):
        return {name: "replicated"}
    if isinstance(style, EmbeddingRowwise):
        return {name: BY_ROWS}
    if isinstance(style, ColwiseParallel | RowwiseParallel | RowwiseLocal):
        of_rows = RowwiseParallel if isinstance(module, nn.Embedding) else ColwiseParallel
        return {name: BY_ROWS if isinstance(style, of_rows) else "sharded by columns"}
    return {}


KNOWN_STYLES = (
    *(ColwiseParallel, RowwiseParallel, SequenceParallel),
    *(PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput),
    *(GatherColwise, RowwiseLocal, EmbeddingLocal, EmbeddingRowwise, NormLocal, TokenDropoutLocal),
)
"""The styles of which `check_tied_placements` knows which weights they shard."""


def _share_distributed(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Give all names of a tied weight the DTensor that one of them has; `tied` is find_tied's."""
    for first in dict.fromkeys(tied.values()):
        names = [first, *(name for name, one in tied.items() if one == first)]
        parameters = [model.get_parameter(name) for name in names]
        shared = next((p for p in parameters if isinstance(p, DTensor)), None)
        for name in names if shared is not None else ():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, shared)


def _styles_of(plan: ParallelPlan, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """The styles of `plan` by pattern, in the order in which they are applied."""
    return {**plan.tensor_parallel, **(plan.loss_parallel if loss_parallel else {})}


def _style_of_short_table(
    module: nn.Module, style: ParallelStyle, num_ranks: int
) -> EmbeddingLocal | None:
    """The style that replaces row-wise sharding of a table with fewer rows than ranks."""
    if not isinstance(module, nn.Embedding) or module.num_embeddings >= num_ranks:
        return None
    if isinstance(style, EmbeddingRowwise):
        return EmbeddingLocal(style.scatter_dim)
    if not isinstance(style, RowwiseParallel):
        return None
    (layout,) = style.output_layouts
    return EmbeddingLocal(layout.dim if isinstance(layout, Shard) else None)
