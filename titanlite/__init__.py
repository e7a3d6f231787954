"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs."""

from titanlite.registry import register_dataset, register_loss, register_model

__all__ = ["register_dataset", "register_loss", "register_model"]
