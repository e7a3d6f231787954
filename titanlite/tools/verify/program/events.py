"""On a rank: records what every module receives and returns in a step, and the gradients of both.

The input of a module is aliased, so that its gradient is that which this module alone returns: the
gradient of the tensor itself also has what other readers return. Errors of the code between modules
then show up between the output of one and the input of the next.

On one process the graph of the backward pass says which of these tensors each is computed from.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import stage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import is_pending
from titanlite.tools.verify.outputs import Outputs, hookable, tensor_of
from titanlite.tools.verify.record import is_input, name_call, name_input

# Code in these folders, and what comes from no file, is not the caller's.
FOREIGN = (
    "<",
    str(Path(__file__).parents[3]),
    *(str(Path(m.__file__ or "").parent) for m in (torch, contextlib)),
)


class Events(Outputs):
    """The tensors of one step: `first` has what modules receive (`name_input`) and return."""

    def __init__(self, *, finds_flow: bool = False) -> None:
        super().__init__()
        self.flow: dict[str, dict[str, None]] = {}
        """For each tensor, those that it is computed from directly, if that is looked for."""
        self.requires_grad: dict[str, bool] = {}
        self.arrived: set[str] = set()
        """The tensors of which some gradient arrives."""
        self.lines: dict[str, tuple[str, ...]] = {}
        self.lines_backward: dict[str, tuple[str, ...]] = {}
        """The lines of the caller's code that ran just before a tensor, or its gradient."""
        self.finds_flow = finds_flow
        self._nodes: dict[Any, str] = {}
        self._without_gradient: dict[str, list[str]] = {}
        self._depth = 0
        self._is_validation = False
        self._is_own = False
        self._now: dict[str, None] = {}

    def enter(
        self, module: nn.Module, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep what a call receives; returns its arguments with aliases in place of tensors."""
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            self._depth += 1
            if self._depth == 1:
                # A forward pass without gradients, such as a validation, is no part of training.
                self._is_validation = not torch.is_grad_enabled() or _infers_shapes()
            if self._is_validation:
                return None
        elif _infers_shapes():
            # What is recomputed must do what the forward pass did.
            return None
        with self._own_code():
            aliases: dict[int, Tensor] = {}
            for argument, value in _tensors(module, args, kwargs):
                if isinstance(module, OptimizedModule) and isinstance(value, AsyncCollectiveTensor):
                    self.pending_inputs[call] = None
                read = torch.ops.aten.alias(value) if _can_be_aliased(value) else value
                if read is not value:
                    aliases[id(value)] = read
                if not is_again and not is_pending(value):
                    event = name_input(call, argument)
                    if not value.requires_grad:
                        self._without_gradient.setdefault(call, []).append(event)
                    self._note(event, value, read)
        if not aliases:
            return None
        return (
            tuple(aliases.get(id(value), value) for value in args),
            {name: aliases.get(id(value), value) for name, value in kwargs.items()},
        )

    def leave(self, name: str, output: Any, num_calls: Counter[str]) -> None:
        """Keep what a call returns."""
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            self._depth -= 1
            if self._is_validation:
                return
        elif _infers_shapes():
            return
        value = tensor_of(output)
        if value is None or is_pending(value):
            # DTensor reduces a Partial where it is used: its local part equals nothing.
            num_calls[name] += not is_again
            return
        with self._own_code():
            if is_again:
                self.again[name].append(local_part(value.detach()).detach().cpu().clone())
                return
            num_calls[name] += 1
            call = name_call(name, num_calls[name])
            self._note(call, value, value)
            if self.finds_flow:
                self.flow[call] |= dict.fromkeys(self._without_gradient.get(call, ()))

    def _note(self, event: str, value: Tensor, read: Tensor) -> None:
        place = len(self.first[event])
        self.first[event].append(local_part(value.detach()).detach().cpu().clone())
        self.requires_grad[event] = value.requires_grad
        self.lines.setdefault(event, tuple(self._now))
        self._now.clear()
        if self.finds_flow:
            self.flow.setdefault(event, {}).update(dict.fromkeys(self._sources(value)))
            if read.grad_fn is not None:
                self._nodes[read.grad_fn] = event
        if not read.requires_grad:
            return
        if read is value and is_input(event):
            # The gradient of the tensor also has what its other readers return.
            self.arrived.add(event)
            return

        def keep_gradient(gradient: Tensor) -> None:
            with self._own_code():
                self.arrived.add(event)
                self.lines_backward.setdefault(event, tuple(self._now))
                self._now.clear()
                if not is_pending(gradient):
                    own = local_part(gradient.detach()).detach().cpu().clone()
                    self.gradients[event][place] = own

        read.register_hook(keep_gradient)

    def _sources(self, value: Tensor) -> Iterator[str]:
        """The recorded tensors from which the graph computes a tensor directly."""
        stack, seen = [value.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._nodes:
                yield self._nodes[node]
            else:
                stack += [before for before, _ in node.next_functions]

    @contextlib.contextmanager
    def _own_code(self) -> Iterator[None]:
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def note_line(self) -> None:
        """Note the line of the caller's code that runs an operator."""
        if not self._is_own and (line := _line_of_caller()):
            self._now[line] = None


class Watch(TorchDispatchMode):
    """Notes the line of the caller's code at every operator."""

    def __init__(self, kept: Events) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kept.note_line()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded(
    parts: Sequence[nn.Module],
    is_whole: Sequence[bool],
    name_of: Callable[[nn.Module, str], str],
    kept: Events,
) -> Iterator[Events]:
    """Inside, `kept` records every module of the parts of a model, as `outputs.recorded` does."""
    hooks = []
    for index, part in enumerate(parts):
        # A module and its wrappers share a canonical name; the innermost comes last and is kept.
        named = {name_of(part, name): module for name, module in hookable(part)}
        if not is_whole[index]:
            named.pop(name_of(part, ""), None)
        num_calls: Counter[str] = Counter()
        hooks.append(part.register_forward_pre_hook(lambda *_, calls=num_calls: calls.clear()))
        for name, module in named.items():
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name, calls=num_calls: kept.enter(
                        module, name_call(name, calls[name] + 1), args, kwargs
                    ),
                    with_kwargs=True,
                )
            )
            hooks.append(
                module.register_forward_hook(
                    lambda module, args, output, name=name, calls=num_calls: kept.leave(
                        name, output, calls
                    )
                )
            )
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call passes, by the name of the argument."""
    with contextlib.suppress(TypeError, ValueError):
        # A plan may wrap the forward of a module, which hides the names of its arguments.
        own = type(module).forward
        forward = module.forward if own is nn.Module.forward else own.__get__(module)
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor) and value.numel():
                yield name, value


def _can_be_aliased(value: Tensor) -> bool:
    """Whether an alias has a gradient of its own, and nothing is lost."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return False
    return type(value) is DTensor or (type(value) is Tensor and not value.__dict__)


def _infers_shapes() -> bool:
    """Whether torch's PipelineStage calls the module on memory without values, to learn shapes."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == stage.__file__ and "inference" in code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _line_of_caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(FOREIGN):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{Path(file).name}:{frame.f_lineno} ({text})" if text else ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""
