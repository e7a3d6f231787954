"""Sends the caller's own operators to ranks by their names: torch cannot pickle operators."""

import runpy
import sys
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from titanlite import pickles

_RUN: dict[str, dict[str, Any]] = {}
"""Script -> its globals. With a torch.library.Library among them its operators would go."""


class OperatorPickler(pickles.Pickler):
    """Pickles operators of torch.ops and torch.library, which the receiver must have, or which
    running the script that defines them makes.
    """

    def reducer_override(self, obj: Any) -> Any:
        script = getattr(sys.modules["__main__"], "__file__", None)
        if isinstance(obj, CustomOpDef):
            return _definition, (obj._qualname, obj._init_fn.__code__.co_filename)
        if isinstance(obj, OpOverloadPacket):
            return _operator, (obj._qualified_op_name, "", script)
        if isinstance(obj, OpOverload):
            return _operator, (obj._name.partition(".")[0], obj._overloadname, script)
        return super().reducer_override(obj)


def _definition(name: str, script: str) -> CustomOpDef:
    if name not in OPDEFS:
        _run(script)
    return OPDEFS[name]


def _operator(name: str, overload: str, script: str | None) -> Any:
    namespace, _, operator = name.partition("::")
    if not hasattr(getattr(torch.ops, namespace), operator) and script:
        _run(script)
    packet = getattr(getattr(torch.ops, namespace), operator)
    return getattr(packet, overload) if overload else packet


def _run(script: str) -> None:
    """Run a script as multiprocessing does for a spawned process."""
    if script not in _RUN:
        _RUN[script] = {}
        _RUN[script] |= runpy.run_path(script, run_name="__mp_main__")
