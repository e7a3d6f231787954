"""Canonical names: what a module or parameter is called in the plain model, under every plan."""

from __future__ import annotations

# What activation checkpointing, torch.compile and DistributedDataParallel put before a name.
WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def canonical_name(name: str) -> str:
    """`name` without the parts that wrappers add: its name in the unwrapped model."""
    parts = [part for part in name.split(".") if f"{part}." not in WRAPPER_PREFIXES]
    return ".".join(parts)
