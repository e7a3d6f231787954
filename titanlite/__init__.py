"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

`titanlite.compare` verifies any parallel code; see docs/compare.md. It is imported at its first
use, so that importing titanlite stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.equivalence.comparison import (
        Comparer,
        Comparison,
        assert_parallel_equals_reference,
        compare,
    )

__all__ = ["Comparer", "Comparison", "assert_parallel_equals_reference", "compare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titanlite.equivalence import comparison

    return getattr(comparison, name)
