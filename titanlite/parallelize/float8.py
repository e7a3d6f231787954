"""apply_float8: linear layers that multiply in float8, and which of a model's those are.

A layer keeps its parameters, in their own precision: initialisation, optimizer and checkpoints are
those of the plain layer. How it multiplies is float8_linear.py, how FSDP2 gathers its weight in
float8 is float8_gather.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titanlite.errors import TitanliteError
from titanlite.names import canonical_name
from titanlite.parallelize.float8_linear import MULTIPLE, AmaxGroups, Float8Linear, Groups
from titanlite.parallelize.plan import ParallelPlan, match_modules
from titanlite.parallelize.styles import GatherColwise, RowwiseLocal
from titanlite.parallelize.torchao import find_recipe, load_torchao

AUTO_FILTER = "auto_filter_small_kn"
"""What among filter_fqns stands for torchao's own filter of layers too small to gain."""


@dataclass(frozen=True)
class Float8Report:
    """What apply_float8 did: the layers it converted, and the others, each with the reason."""

    converted: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def apply_float8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    filter_fqns: Sequence[str] = (),
    emulate: bool = False,
    token_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
    whole: nn.Module | None = None,
) -> Float8Report:
    """Let the linear layers of `model` multiply in float8, in place, by one of torchao's recipes.

    Left as they are: layers whose name contains one of `filter_fqns`, those with a dimension that
    is no multiple of 16, and subclasses of nn.Linear. Call it before apply_tp, whose styles then
    use each layer's own product. Scales are over all ranks that hold other tokens of a microbatch,
    those along the dimensions of `token_mesh`, and over those of the 1-D `tp_mesh` that hold other
    features. With `emulate` no float8 unit of a device is used.

    Raises TitanliteError where no layer is left; where `model` is a part of `whole`, of that.
    """
    chosen, skipped = choose_layers(model, recipe, filter_fqns)
    if not chosen and (whole is None or not choose_layers(whole, recipe, filter_fqns)[0]):
        raise TitanliteError(none_left(type(whole or model).__name__, skipped))
    groups = AmaxGroups(
        tokens=_groups_of(token_mesh) if token_mesh is not None else (),
        features=_groups_of(tp_mesh) if tp_mesh is not None else (),
    )
    of_recipe = find_recipe(recipe)
    for name in chosen:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        converted = Float8Linear(layer, of_recipe, groups, emulate=emulate)
        if not name:
            raise TitanliteError("a model that is one linear layer has no place for another")
        model.set_submodule(name, converted)
    if chosen:
        _require_products(model)
    return Float8Report(tuple(chosen), skipped)


def choose_layers(
    model: nn.Module, recipe: str, filter_fqns: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The linear layers to convert, by name, and why the others stay; by their whole shapes.

    So it is the same ones under every plan. The rules are TorchTitan's, and torchao's where
    `filter_fqns` has AUTO_FILTER.
    """
    load_torchao()
    names = [one for one in filter_fqns if one != AUTO_FILTER]
    is_large = None
    if AUTO_FILTER in filter_fqns:
        from torchao.float8 import _auto_filter_for_recipe

        is_large = _auto_filter_for_recipe(recipe, filter_fqns=[])
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        sizes = (layer.out_features, layer.in_features)
        odd = next((size for size in sizes if size % MULTIPLE), None)
        named = next((one for one in names if one in name), None)
        if named is not None:
            skipped[name] = f"named by {named}"
        elif odd is not None:
            skipped[name] = f"{odd} is no multiple of {MULTIPLE}"
        elif type(layer) is not nn.Linear:
            skipped[name] = f"is a {type(layer).__name__}"
        elif is_large is not None and not is_large(layer, name):
            skipped[name] = "too small to gain"
        else:
            chosen.append(name)
    return chosen, skipped


def none_left(model: str, skipped: Mapping[str, str]) -> str:
    """That no layer is converted, and why."""
    reasons = describe_skipped(skipped) or "it has none"
    return f"none of the linear layers of {model} is left to convert to float8: {reasons}"


def describe_skipped(skipped: Mapping[str, str]) -> str:
    """The layers that stay, by reason, those of equal blocks as one."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(compact(names))} ({why})" for why, names in by_reason.items())


def compact(names: Sequence[str]) -> list[str]:
    """Names in which a block's number is "*", each once."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))


def refused_shapes(model: nn.Module, plan: ParallelPlan, chosen: Sequence[str], tp: int) -> str:
    """Why float8 units would refuse a layer's shard over `tp` ranks; "" where they take all.

    The plan's styles say how a layer is cut; of one that titanlite does not know, nothing is known.
    """
    styles = {**plan.tensor_parallel, **plan.loss_parallel}
    for pattern, style in styles.items():
        for name in match_modules(model, pattern):
            for layer, dim in _cut_layers(name, style):
                if layer not in chosen:
                    continue
                linear = model.get_submodule(layer)
                assert isinstance(linear, nn.Linear)
                size = (linear.out_features, linear.in_features)[dim]
                if size % (MULTIPLE * tp):
                    what = ("output", "input")[dim]
                    return (
                        f"{compact([layer])[0]} has {size} {what} features, which over {tp} ranks "
                        f"are no multiples of {MULTIPLE}, as float8 units need them"
                    )
    return ""


def _cut_layers(name: str, style: ParallelStyle) -> list[tuple[str, int]]:
    """The linear layers that a style cuts in the module of this name, with the dimension."""
    if isinstance(style, GatherColwise):
        return [(f"{name}.{layer}" if name else layer, 0) for layer in style.layers]
    if isinstance(style, ColwiseParallel):
        return [(name, 0)]
    return [(name, 1)] if isinstance(style, RowwiseParallel | RowwiseLocal) else []


def _groups_of(mesh: DeviceMesh) -> Groups:
    """The process groups of a mesh's dimensions, but for those of one rank."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return tuple(group.group_name for group in groups)


def _require_products(model: nn.Module) -> None:
    """Have the first forward pass make sure that every float8 layer has multiplied as one.

    A tensor-parallel style or a module that uses a layer's weight by itself would train it in full
    precision, in silence. What is compiled cannot be seen here.
    """

    def check(model: nn.Module, inputs: object, output: object) -> None:
        hook.remove()
        compiled = tuple(
            f"{name}."
            for name, module in model.named_modules()
            if isinstance(module, OptimizedModule)
        )
        for name, layer in model.named_modules():
            if (
                isinstance(layer, Float8Linear)
                and not layer.was_multiplied
                and not name.startswith(compiled)
            ):
                raise TitanliteError(
                    f"{canonical_name(name)} is a float8 layer, and the forward pass did not call "
                    "its product: what computes in its place would train it in full precision; "
                    "let its tensor-parallel style, or the module that holds it, call "
                    f'product(x, weight), or name it in filter_fqns ("{canonical_name(name)}")'
                )

    hook = model.register_forward_hook(check)
