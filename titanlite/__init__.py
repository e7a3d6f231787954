"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

    train, make_config, load_config     train a job from Python (docs/own_model.md)
    register_model, register_dataset, register_loss, register_metric    make your own known to a job
    compare, assert_parallel_equals_reference    verify any parallel code (docs/compare.md)
    export, load_weights                Hugging Face folders (docs/huggingface.md)

The names below are imported when they are first used, so `import titanlite` is fast and does not
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.callbacks import Event, TrainResult
    from titanlite.checkpoint.by_hand import export, load_weights
    from titanlite.config import JobConfig, load_config, make_config
    from titanlite.equivalence.comparison import (
        Comparer,
        Comparison,
        assert_parallel_equals_reference,
        compare,
    )
    from titanlite.errors import ConfigError, RankError
    from titanlite.from_python import train
    from titanlite.registry import register_dataset, register_loss, register_metric, register_model

__all__ = [
    "Comparer",
    "Comparison",
    "ConfigError",
    "Event",
    "JobConfig",
    "RankError",
    "TrainResult",
    "assert_parallel_equals_reference",
    "compare",
    "export",
    "load_config",
    "load_weights",
    "make_config",
    "register_dataset",
    "register_loss",
    "register_metric",
    "register_model",
    "train",
]

_MODULES = {
    "callbacks": ("Event", "TrainResult"),
    "checkpoint.by_hand": ("export", "load_weights"),
    "config": ("JobConfig", "load_config", "make_config"),
    "equivalence.comparison": (
        "Comparer",
        "Comparison",
        "assert_parallel_equals_reference",
        "compare",
    ),
    "errors": ("ConfigError", "RankError"),
    "from_python": ("train",),
    "registry": ("register_dataset", "register_loss", "register_metric", "register_model"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"titanlite.{module}"), name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
