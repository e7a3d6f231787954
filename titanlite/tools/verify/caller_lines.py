"""Which line of a caller's code is running; torch-free."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path

from titanlite.ranks.hang_state import TORCH, is_standard

PACKAGE = Path(__file__).parents[2]
# Code of torch, and what comes from no file, is never the caller's; nor is that of the library in
# which plans of TorchTitan name their collectives.
# torch decorates functions with typing_extensions.
BESIDE_TORCH = (f"spmd_types{os.sep}", "typing_extensions.py")
OF_PYTHON = ("<", TORCH, *(str(Path(TORCH).parent) + os.sep + name for name in BESIDE_TORCH))
FOREIGN = (*OF_PYTHON, f"{PACKAGE}{os.sep}")
"""Code in these folders is not that of a caller of titanlite."""


def is_running(path: str, part: str = "") -> bool:
    """Whether a function of a file or folder, with `part` in its name, is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(path) and part in frame.f_code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def line_of_caller(foreign: tuple[str, ...]) -> str:
    """The line of code that is running, outside the folders `foreign`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_standard(file) and not file.startswith(foreign):
            text, path = linecache.getline(file, frame.f_lineno).strip(), Path(file)
            shown = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name
            return f"{shown}:{frame.f_lineno} ({text})" if text else ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""
