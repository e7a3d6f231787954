"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

    register_model, register_dataset, register_loss    make your own known to a job by name
    compare, assert_parallel_equals_reference          verify any parallel code (docs/compare.md)

The latter are imported at their first use, so that importing titanlite stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titanlite.registry import register_dataset, register_loss, register_model

if TYPE_CHECKING:
    from titanlite.equivalence.comparison import (
        Comparer,
        Comparison,
        assert_parallel_equals_reference,
        compare,
    )

LAZY = {
    "Comparer": "titanlite.equivalence.comparison",
    "Comparison": "titanlite.equivalence.comparison",
    "assert_parallel_equals_reference": "titanlite.equivalence.comparison",
    "compare": "titanlite.equivalence.comparison",
}
"""Names that are imported at their first use, and the modules that have them."""

__all__ = [
    "Comparer",
    "Comparison",
    "assert_parallel_equals_reference",
    "compare",
    "register_dataset",
    "register_loss",
    "register_model",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(LAZY[name]), name)
