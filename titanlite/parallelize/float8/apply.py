"""apply_float8: choose the linear layers of a model that multiply in float8, and convert them.

Parameters keep their dtype, so initialization, optimizer and checkpoints are those of the plain
layer. float8_linear.py has the layer and its products; float8_gather.py lets FSDP2 gather its
weight in float8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import TitanliteError
from titanlite.modules.names import canonical_name
from titanlite.parallelize.float8.linear import MULTIPLE, AmaxGroups, Float8Linear, Groups
from titanlite.parallelize.float8.torchao import find_recipe, load_torchao
from titanlite.parallelize.plan import ParallelPlan, match_modules
from titanlite.parallelize.tensor_parallel.apply import BY_ROWS, weight_placements

AUTO_FILTER = "auto_filter_small_kn"
"""The entry of filter_fqns that selects torchao's own filter of layers too small to gain."""


@dataclass(frozen=True)
class Float8Report:
    """What apply_float8 did: the layers it converted, and the skipped ones with the reason."""

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
    """Convert the linear layers of `model` to float8, in place, with one of torchao's recipes.

    A layer is skipped if its name contains one of `filter_fqns`, if a dimension is not a multiple
    of 16, or if its class is a subclass of nn.Linear. Call this before apply_tp, whose styles then
    call the layers' own method `product`. A scale of a whole tensor is computed over all ranks that
    have a part of it: those with other tokens of the same microbatch (every dimension of
    `token_mesh`), and those with other features of the layer (the 1-D `tp_mesh`). With `emulate`,
    the device's float8 units are not used.

    Raises TitanliteError if no layer can be converted; for a pipeline stage, if none of the `whole`
    model can.
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
            raise TitanliteError(
                "apply_float8: model is itself a linear layer and cannot be replaced in place; "
                "give a module that contains it"
            )
        model.set_submodule(name, converted)
    if chosen:
        _require_products(model)
    return Float8Report(tuple(chosen), skipped)


def choose_layers(
    model: nn.Module, recipe: str, filter_fqns: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The names of the linear layers to convert, and the others with the reason.

    The choice depends on unsharded shapes, so it is the same under every plan. The rules are those
    of TorchTitan, and of torchao if `filter_fqns` contains AUTO_FILTER.
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
            skipped[name] = f"{odd} is not a multiple of {MULTIPLE}"
        elif type(layer) is not nn.Linear:
            skipped[name] = f"is a {type(layer).__name__}"
        elif is_large is not None and not is_large(layer, name):
            skipped[name] = "too small to gain"
        else:
            chosen.append(name)
    return chosen, skipped


def none_left(model: str, skipped: Mapping[str, str]) -> str:
    """The message if no layer can be converted, with the reasons."""
    reasons = describe_skipped(skipped) or "it has none"
    return f"no linear layer of {model} is left to convert to float8: {reasons}"


def describe_skipped(skipped: Mapping[str, str]) -> str:
    """The skipped layers, grouped by reason; layers of equal blocks are listed once."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(compact(names))} ({why})" for why, names in by_reason.items())


def compact(names: Sequence[str]) -> list[str]:
    """The distinct names after each block number is replaced by "*"."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))


def refused_shapes(model: nn.Module, plan: ParallelPlan, chosen: Sequence[str], tp: int) -> str:
    """Why float8 units would refuse a layer's shard over `tp` ranks; "" if they accept all.

    The plan's styles determine how a layer is sharded. Styles that titanlite does not know are not
    checked.
    """
    styles = {**plan.tensor_parallel, **plan.loss_parallel}
    for pattern, style in styles.items():
        for name in match_modules(model, pattern):
            for layer, how in weight_placements(name, model.get_submodule(name), style).items():
                if layer not in chosen:
                    continue
                linear = model.get_submodule(layer)
                assert isinstance(linear, nn.Linear)
                is_by_rows = how == BY_ROWS
                size = linear.out_features if is_by_rows else linear.in_features
                if size % (MULTIPLE * tp):
                    what = "output" if is_by_rows else "input"
                    return (
                        f"{compact([layer])[0]} has {size} {what} features; split over {tp} ranks "
                        f"they are not a multiple of {MULTIPLE}, which float8 units require"
                    )
    return ""


def _groups_of(mesh: DeviceMesh) -> Groups:
    """The process groups of the mesh dimensions with more than one rank."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return tuple(group.group_name for group in groups)


def _require_products(model: nn.Module) -> None:
    """Check in the first forward pass that the product of every float8 layer was called.

    A tensor-parallel style or a module that multiplies by the layer's weight itself would silently
    train it in full precision. Compiled modules are not checked.
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
                    f"{canonical_name(name)} is a float8 layer, but the forward pass did not call "
                    "its product, so it would be trained in full precision; call "
                    "product(x, weight) in its tensor-parallel style or in the module that holds "
                    f'it, or name it in filter_fqns ("{canonical_name(name)}")'
                )

    hook = model.register_forward_hook(check)
