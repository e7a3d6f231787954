"""Canonical names: the name of a module or parameter in the plain model, the same in every plan."""

from __future__ import annotations

# Prefixes added by activation checkpointing, torch.compile, FSDP1 and DistributedDataParallel.
WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "module.")


def canonical_name(name: str) -> str:
    """`name` without the prefixes of wrappers: the name in the unwrapped model."""
    parts = [part for part in name.split(".") if f"{part}." not in WRAPPER_PREFIXES]
    return ".".join(parts)
