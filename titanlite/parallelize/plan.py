"""ParallelPlan: how a model can be parallelized, as data in plan.py beside the model."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.errors import TitanliteError, suggest


@dataclass(frozen=True)
class ParallelPlan:
    """How a model class is parallelized.

    `tensor_parallel` maps module names of the plain model to TP styles; `*` stands for one part of
    a name. `loss_parallel` overrides its entries if the logits are sharded over the vocabulary.
    `blocks` names the container of the repeated blocks, which are checkpointed, compiled and
    sharded one by one; None if there are none. `embeddings` and `head` name the modules before and
    after them; each group is one FSDP unit, or unless `has_outer_units` part of the root unit,
    which then stays gathered after the forward pass. `attention` is the name, within a block, of
    the module that takes q, k and v, causal if `is_causal`. `sequence_dim` is the dimension along
    which TP shards the activations between blocks; None if they are replicated. In a pipeline
    stage, the modules of other stages are None, or not in the list of blocks (split_model): if the
    model's own forward cannot skip those, `stage_forward(stage, x, ...)` is that of a stage.
    `is_derived`: nobody wrote the plan; it has only the blocks that derive_plan has found.

    For parameters without a style (apply_tp), patterns can say what each rank's gradient is:
    `partial_gradients`, a part of the sum over the tensor axis; `whole_gradients`, complete.
    `local_buffers` names persistent buffers that may differ between ranks with different data, such
    as a moving average of activations.
    """

    tensor_parallel: "Mapping[str, ParallelStyle]" = field(default_factory=dict)
    loss_parallel: "Mapping[str, ParallelStyle]" = field(default_factory=dict)
    blocks: str | None = "layers"
    embeddings: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    has_outer_units: bool = True
    attention: str = "attention.inner"
    is_causal: bool = True
    sequence_dim: int | None = 0
    stage_forward: Callable[..., Any] | None = None
    partial_gradients: tuple[str, ...] = ()
    whole_gradients: tuple[str, ...] = ()
    local_buffers: tuple[str, ...] = ()
    is_derived: bool = False

    def is_in_block(self, name: str) -> bool:
        """Whether a name, or a pattern of names, is that of something inside a block."""
        return self.blocks is not None and name.startswith(f"{self.blocks}." if self.blocks else "")

    def block_name(self, key: str) -> str:
        """The name of a block in the model, from its key in the container."""
        return f"{self.blocks}.{key}" if self.blocks else key


def find_plan(model: nn.Module) -> ParallelPlan:
    """The plan registered for the model's class: `PLANS[class]` in plan.py beside its module.

    It is a ParallelPlan, or a function from the model to one; without it, `derive_plan(model)`.
    """
    # FSDP2 and replicate insert their own class before the model's.
    for cls in type(model).__mro__:
        package = getattr(sys.modules.get(cls.__module__), "__package__", None)
        if package and find_spec(package) and find_spec(f"{package}.plan"):
            plans = getattr(import_module(f"{package}.plan"), "PLANS", {})
            if cls in plans:
                found = plans[cls]
                return found(model) if callable(found) else found
    return derive_plan(model)


def derive_plan(model: nn.Module) -> ParallelPlan:
    """A plan for a model without one: its blocks, if the model has one obvious list of them.

    FSDP, activation checkpointing and compile need no more. The list holds more than half of the
    parameters that are in lists of blocks (see block_lists). `embeddings` and `head` are empty:
    FSDP leaves all outside the blocks to the root unit.
    """
    sizes = {name: sum(p.numel() for p in found.parameters()) for name, found in _lists(model)}
    most = max(sizes, key=sizes.__getitem__, default=None)
    if most is not None and 2 * sizes[most] <= sum(sizes.values()):
        most = None
    return ParallelPlan(blocks=most, sequence_dim=None, is_derived=True)


def block_lists(model: nn.Module) -> dict[str, str]:
    """The lists of `model` that may be its blocks: name -> their number and classes, in words.

    They are the outermost nn.ModuleList, nn.ModuleDict and nn.Sequential whose children all have
    parameters and repeat their classes: [A, A, A], [A, B, A, B] and [A, B, B, B], but not [A, B].
    If the model itself is one, its name here is that of its class.
    """
    words = {}
    for name, found in _lists(model):
        children = list(found.children())
        classes = dict.fromkeys(type(child).__name__ for child in children)
        words[name or type(model).__name__] = f"{len(children)} of {' and '.join(classes)}"
    return words


def _lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The names and modules of block_lists."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        if any(name.startswith(f"{outer}.") if outer else name for outer, _ in found):
            continue
        children = list(module.children())
        classes = {type(child) for child in children}
        repeats = len(classes) == 1 or 0 < 2 * len(classes) <= len(children)
        if repeats and all(any(True for _ in child.parameters()) for child in children):
            found.append((name, module))
    return found


NEEDED = {
    "tp": ("tensor", "`tensor_parallel`, the style of each module that is sharded"),
    "pp": ("pipeline", "`embeddings`, `blocks` and `head`, between which it is split"),
    "cp": ("context", "`attention`, the name of the attention in each block"),
}
"""Axes for which a plan must be written -> (kind of parallelism, what it needs of the plan)."""


def lacks_plan(model: nn.Module, axis: str) -> str:
    """Why a model whose plan is derived cannot be parallelized over `axis`, and what to do."""
    kind, needed = NEEDED[axis]
    return (
        f"{type(model).__name__} has no plan, and {kind} parallelism needs one with {needed}; "
        "write a ParallelPlan and give it as `plan`"
    )


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches `pattern`; `*` stands for one part of a name, or within one."""
    own, parts = name.split("."), pattern.split(".")
    return len(own) == len(parts) and all(map(fnmatchcase, own, parts))


def check_plan(model: nn.Module, plan: ParallelPlan) -> None:
    """Raises TitanliteError if `embeddings` or `head` names a module that `model` lacks.

    `blocks` may name none: FSDP and DDP then work without, and other steps raise an error.
    """
    known = dict(model.named_modules())
    for group in ("embeddings", "head"):
        names = getattr(plan, group)
        if isinstance(names, str):
            raise TitanliteError(
                f"`{group}` of the plan of {type(model).__name__} is {names!r}; give a tuple of "
                f"names, ({names!r},)"
            )
        for name in names:
            if plan.blocks is not None and f"{plan.blocks}.".startswith(f"{name}." if name else ""):
                raise TitanliteError(
                    f"`{group}` of the plan of {type(model).__name__} names "
                    f"{repr(name) if name else 'the whole model'}, which has the blocks "
                    f"'{plan.blocks}' in it; name the modules outside the blocks"
                )
            if name not in known:
                children = ", ".join(child for child, _ in model.named_children())
                advice = suggest(name, known, f"its modules are {children}", repr)
                raise TitanliteError(
                    f"`{group}` of the plan of {type(model).__name__} names '{name}', and the "
                    f"model has no such module; {advice}"
                )


def match_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The submodules whose names match `pattern`, as in `matches`."""
    return {name: module for name, module in model.named_modules() if matches(name, pattern)}


def find_container(model: nn.Module, plan: ParallelPlan, step: str) -> nn.Module:
    """The module that contains the blocks; in a pipeline stage it may be empty.

    Raises TitanliteError if `model` lacks it, because `step` would then do nothing.
    """
    name = plan.blocks
    containers = {} if name is None else match_modules(model, name)
    if name in containers:
        return containers[name]
    lists = ", ".join(f"{name} ({what})" for name, what in block_lists(model).items())
    if name is None:
        why = "no obvious list of blocks" if plan.is_derived else "no blocks, as its plan says"
        raise TitanliteError(
            f"{type(model).__name__} has {why}, and {step} works on blocks; "
            + (f"its lists are {lists}: " if lists else "")
            + "give a ParallelPlan whose `blocks` names a container of blocks"
        )
    raise TitanliteError(
        f"{type(model).__name__} has no module '{name}', whose children are the blocks "
        f"that {step} works on; name it in the plan's `blocks`"
        + (f"; its lists are {lists}" if lists else "")
    )


def find_blocks(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The repeated blocks of `model` by their key in the container; empty if it has none."""
    containers = {} if plan.blocks is None else match_modules(model, plan.blocks)
    return dict(containers[plan.blocks].named_children()) if plan.blocks in containers else {}
