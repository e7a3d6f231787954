"""Saving and loading for a training loop that is not a job (docs/by_hand.md).

checkpoints.py   save_checkpoint and load_checkpoint, in the format of a job's
huggingface.py   save_hf and load_hf: Hugging Face folders
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.tools.by_hand.checkpoints import Loaded as Loaded

PUBLIC = {"checkpoints": ("Loaded",)}
"""The public names, by module."""

lazy(__name__, PUBLIC)
