"""Canonical names: the name of a module or parameter in the plain model, the same in every plan."""

from typing import Any

# The parts that titanlite's own steps insert: activation checkpointing and torch.compile.
INSERTED = ("_checkpoint_wrapped_module", "_orig_mod")
# The parts that torch's other wrappers insert, by class. A part of this name in any other module is
# the model's own: a model may well have an attribute called `module`.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def canonical_name(name: str) -> str:
    """`name` without the parts that titanlite's steps insert: the name in the plain model."""
    return ".".join(part for part in name.split(".") if part not in INSERTED)


def unwrapped_name(model: Any, name: str) -> str:
    """The canonical name of `name` in `model`, also without the parts of WRAPPERS in it.

    `model` is an nn.Module that a user has wrapped, in DistributedDataParallel for example.
    """
    kept, module = [], model
    for part in name.split("."):
        if all(WRAPPERS.get(cls.__name__) != part for cls in type(module).__mro__):
            kept.append(part)
        module = getattr(module, part, None)
    return canonical_name(".".join(kept))
