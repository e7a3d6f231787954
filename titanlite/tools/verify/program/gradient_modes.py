"""On a rank: what the caller's lines do to gradients in the middle of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from titanlite.tools.verify.agreement import digest_of, values_of
from titanlite.tools.verify.caller_lines import FOREIGN, line_of_caller
from titanlite.tools.verify.events import Events

Key = tuple[str, str]
"""A call of a module, "" for none, and a line in it."""


class Cleared(TorchFunctionMode):
    """Inside, `kept` notes the lines that clear what a backward pass of this step has added."""

    def __init__(self, kept: Events, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.kept, self.parameters = kept, parameters
        self.names = {id(one): name for name, one in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        cleared: list[Any] = []
        if name == "__set__" and getattr(func.__self__, "__name__", "") == "grad":
            cleared = [args[0]] * (args[1] is None and args[0].grad is not None)
        elif name in ("zero_", "_foreach_zero_"):
            some = {id(one) for one in (args[0] if name.startswith("_") else args[:1])}
            cleared = [p for p in self.parameters.values() if id(p.grad) in some]
        names = {self.names.get(id(one), "") for one in cleared}
        if names := {one for one in names if self.kept.accumulated[one]}:
            self.kept.cleared.setdefault(line_of_caller(FOREIGN), set()).update(names)
        return func(*args, **(kwargs or {}))


class Lines(TorchFunctionMode):
    """Inside, notes the lines between two tensors, or sets to zero what comes back through one."""

    def __init__(
        self, event: str, until: Collection[str], blocked: Key | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.event, self.until, self.blocked, self.name = event, until, blocked, name
        self.last: dict[Key, str] = {}
        """Line -> the last function in it whose result has a gradient."""
        self.digests: dict[Key, str] = {}
        """Line -> a digest of that."""
        self.arriving: dict[Key, list[Tensor]] = {}
        """Line -> the gradients of what a custom autograd function gives it, if as large as the
        event on one process.
        """
        self.functions: dict[Key, str] = {}
        """Line -> that function."""
        self.size = 0
        """The number of elements of the event on one process."""
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """The gradients of the event, and what they should be."""
        self.subject: Any = None
        self.kept = Events()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return result
        tensors = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
        ]
        line = line_of_caller(FOREIGN) if tensors else ""
        key, name = (self.kept.call, line), getattr(func, "__name__", "")
        if self.blocked is None:
            is_between = self.event in self.kept.first and self.kept.first.keys().isdisjoint(
                self.until
            )
            if line and is_between:
                self._note_arriving(key, (args, kwargs))
                self.last.pop(key, None)
                self.last[key], own = name, values_of(tensors[0])
                self.digests[key] = digest_of(own)
        elif (key, name) == (self.blocked, self.name):
            for tensor in tensors:
                tensor.register_hook(torch.zeros_like)
        return result

    def _note_arriving(self, key: Key, given: Any) -> None:
        for leaf in tree_leaves(given):
            node = leaf.grad_fn if isinstance(leaf, Tensor) else None
            kind = getattr(type(node), "_forward_cls", None)
            if kind is not None and leaf.numel() == self.size and key not in self.functions:
                self.functions[key] = kind.__name__
                arriving = self.arriving.setdefault(key, [])
                leaf.register_hook(lambda one, to=arriving: to.append(values_of(one).clone()))
