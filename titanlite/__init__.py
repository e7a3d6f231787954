"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

The names below are imported when they are first used, so `import titanlite` is fast and does not
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.callbacks import Event, TrainResult
    from titanlite.config import JobConfig, load_config, make_config
    from titanlite.errors import ConfigError, RankError
    from titanlite.from_python import train
    from titanlite.registry import register_dataset, register_loss, register_metric, register_model

__all__ = [
    "ConfigError",
    "Event",
    "JobConfig",
    "RankError",
    "TrainResult",
    "load_config",
    "make_config",
    "register_dataset",
    "register_loss",
    "register_metric",
    "register_model",
    "train",
]

_MODULES = {
    "callbacks": ("Event", "TrainResult"),
    "config": ("JobConfig", "load_config", "make_config"),
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
