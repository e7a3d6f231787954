"""On a rank: records what every module receives and returns in a step, and the gradients of both.

It is the only recorder: of jobs and of other code, of the model on one process and of ranks.

The input of a module is aliased, so that its gradient is that which this module alone returns: the
gradient of the tensor itself also has what other readers return. Errors of the code between modules
then show up between the output of one and the input of the next.

On one process the graph of the backward pass says which of these tensors each is computed from.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, _compile, nn
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd import graph
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import stage
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.tools.verify.agreement import agreement, in_transform, is_pending, values_of
from titanlite.tools.verify.caller_lines import FOREIGN, PACKAGE, is_running, line_of_caller
from titanlite.tools.verify.program.received import Received
from titanlite.tools.verify.program.values import COMMUNICATION, Values
from titanlite.tools.verify.record import first_call, is_input, module_of, name_call, name_input

# The code through which an operator calls a mode.
OF_MODES = (f"{PACKAGE}{os.sep}", eval_frame.__file__, _compile.__file__)

# What counts the calls of a model itself, beside those of its modules.
MODEL = "the model"


class Events:
    """The tensors of one step, of a training step unless `is_training` is false."""

    def __init__(self, *, finds_flow: bool = False, is_training: bool = True) -> None:
        self.first: dict[str, list[Tensor]] = defaultdict(list)
        """What modules receive (`name_input`) and return (`name_call`) in the forward pass."""
        self.again: dict[str, list[Tensor]] = defaultdict(list)
        """What modules receive and return when they are recomputed, by the first call's name."""
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)
        """Name in `first` -> index in its list there -> gradient of that tensor."""
        self.pending_inputs: dict[str, None] = {}
        self.arguments: Mapping[str, Sequence[str]] = {}
        """Module -> the reference's names of what it receives, for one that names all otherwise."""
        self.num_known: Mapping[str, int] = {}
        """Module -> how often the reference calls it in a forward pass."""
        self.repeated: set[str] = set()
        """Modules that it calls several times, and that are called apart from the model here."""
        self.num_runs: dict[str, int] = {}
        """Every module that is watched -> how often it ran."""
        self.at_start: Callable[[], Any] | None = None
        self.start: Any = None
        """What `at_start` returns, which is called before the first forward pass."""
        self.evaluating: set[str] = set()
        """Modules that ran in evaluation mode."""
        self.accumulated: Counter[str] = Counter()
        """Parameter -> how often a backward pass adds to its gradient."""
        self.flow: dict[str, dict[str, None]] = {}
        """For each tensor, those that it is computed from directly, if that is looked for."""
        self.requires_grad: dict[str, bool] = {}
        self.shapes: dict[str, torch.Size] = {}
        """Of the whole, for DTensors."""
        self.arrived: dict[str, set[int]] = defaultdict(set)
        """The tensors of which some gradient arrives, and in which calls."""
        self.lines: dict[str, tuple[str, ...]] = {}
        self.lines_backward: dict[str, tuple[str, ...]] = {}
        """The lines of the caller's code that ran just before a tensor, or its gradient."""
        self.exchanged: set[str] = set()
        """What has a gradient for which the backward pass called a collective."""
        self.cleared: dict[str, set[str]] = {}
        """A line that clears gradients to which this step has added -> of which parameters."""
        self.checkpointed: set[str] = set()
        """What is computed inside a reentrant checkpoint."""
        self.overwritten: set[str] = set()
        """What was another tensor when its gradient came."""
        self.values = Values()
        self.received = Received()
        """What the backward pass receives."""
        self.finds_flow, self.is_training = finds_flow, is_training
        self._nodes: dict[Any, str] = {}
        self._lines_of: Any = WeakTensorKeyDictionary()
        self._without_gradient: dict[str, list[str]] = {}
        self._calls: list[str] = []
        self._is_left_out = self._infers = False
        self.inferred = set[str]()
        self._is_own = self._is_backward = False
        # A gradient that is held is copied when it is accumulated, which reduces a Partial one.
        self._last: tuple[Callable[[], Tensor | None], tuple[str, ...]] = (lambda: None), ()
        # Whether it calls one on the way to the next tensor, and a gradient has just arrived.
        self._has_exchanged = self._has_arrived = False
        self._now: dict[str, None] = {}

    def name(self, module: str, calls: Counter[str]) -> str:
        """The name of a module's next call. A schedule that calls the modules of a model, and not
        the model, begins anew with each microbatch.
        """
        number, known = calls[module] + 1, self.num_known.get(module)
        if known and number > known and not calls[MODEL]:
            number = (number - 1) % known + 1
            self.repeated |= {module} if known > 1 else set()
        return name_call(module, number)

    def enter(
        self, module: nn.Module, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep what a call receives; returns its arguments with aliases in place of tensors."""
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            self._calls.append(call)
            if len(self._calls) == 1:
                # A forward pass without gradients, such as a validation, is no part of training.
                is_other = not torch.is_grad_enabled() or _infers_shapes()
                self._is_left_out = self.is_training and is_other
                self._infers = _infers_shapes()
                if self.at_start is not None and not self._is_left_out:
                    with self.own_code():
                        self.start, self.at_start = self.at_start(), None
                self.values.num_passes += not self._is_left_out
            self.inferred |= {module_of(call)} if self._infers else set()
            if self._is_left_out or in_transform():
                return None
            if not module.training:
                self.evaluating.add(module_of(call))
        elif _infers_shapes():
            # What is recomputed must do what the forward pass did.
            return None
        with self.own_code():
            aliases: dict[int, Tensor] = {}
            given = dict(tensors_of(module, args, kwargs))
            names = self.arguments.get(module_of(call), ())
            if len(names) == len(given) and not given.keys() & {*names}:
                given = dict(zip(names, given.values(), strict=True))
            for argument, value in given.items():
                read = torch.ops.aten.alias(value) if _can_be_aliased(value) else value
                if read is not value:
                    aliases[id(value)] = read
                    self.values.follow(value, read)
                if is_again:
                    name = name_input(module_of(call), argument)
                    self.again[name].append(values_of(value).cpu().clone())
                elif not is_pending(value):
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
        """Keep what a call returns; `num_calls` counts each module's in this forward pass."""
        self.num_runs[name] += 1
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            self._calls.pop()
            if self._is_left_out or in_transform():
                return
        elif _infers_shapes():
            return
        value = tensor_of(output)
        if value is None or is_pending(value):
            # DTensor reduces a Partial where it is used: its local part equals nothing.
            num_calls[name] += not is_again
            return
        with self.own_code():
            if is_again:
                self.again[name].append(values_of(value).cpu().clone())
                return
            call = self.name(name, num_calls)
            num_calls[name] += 1
            self._note(call, value, value)
            self.values.note_output(call, value)
            if self.finds_flow:
                self.flow[call] |= dict.fromkeys(self._without_gradient.get(call, ()))

    @property
    def call(self) -> str:
        """The innermost call of a module that is running; "" for none."""
        return self._calls[-1] if self._calls else ""

    @property
    def idle(self) -> tuple[str, ...]:
        """The watched modules that never ran."""
        return tuple(name for name, number in self.num_runs.items() if not number)

    def gradients_of(self, event: str) -> list[Tensor] | None:
        """The gradients of a tensor in the order of its calls; None if one is missing."""
        found = self.gradients.get(event, {})
        count = len(self.first[event])
        return [found[i] for i in range(count)] if len(found) == count else None

    def recomputed_difference(self, name: str) -> float:
        """The largest difference of a recomputed tensor from the closest of the forward pass.

        The schedule may recompute microbatches in another order, so calls are not paired by index.
        """
        worst = 0.0
        forward = [
            tensor
            for event, tensors in self.first.items()
            if first_call(event) == name
            for tensor in tensors
        ]
        for again in self.again.get(name, ()):
            same = [first for first in forward if first.shape == again.shape]
            if same:
                worst = max(worst, min(agreement(again, f, f).difference for f in same))
        return worst

    def up_to(self, most_bytes: int) -> tuple[dict[str, list[Tensor]], int]:
        """The tensors of the forward pass that fit into `most_bytes`, and how many do not."""
        kept, num_bytes = {}, 0
        for event, tensors in self.first.items():
            num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if num_bytes <= most_bytes:
                kept[event] = tensors
        return kept, len(self.first) - len(kept)

    def _note(self, event: str, value: Tensor, read: Tensor) -> None:
        place = len(self.first[event])
        self.first[event].append(values_of(value).cpu().clone())
        self.requires_grad[event] = value.requires_grad
        if not torch.is_grad_enabled() and is_running(checkpoint.__file__, "forward"):
            self.checkpointed.add(event)
        if isinstance(value, DTensor):
            self.shapes[event] = value.shape
        if (lines := self._lines_of.get(value)) is not None:
            # Of what several modules receive, the lines are those before the first of them.
            self.lines.setdefault(event, lines)
        self._keep_lines(self.lines, event, self.values.lines_behind(value))
        self._lines_of[value] = self.lines.get(event, ())
        if self.finds_flow:
            self.flow.setdefault(event, {}).update(dict.fromkeys(self._sources(value)))
            if read.grad_fn is not None:
                self._nodes[read.grad_fn] = event
        if not read.requires_grad:
            return
        if read is value and is_input(event):
            # The gradient of the tensor also has what its other readers return.
            self.arrived[event].add(place)
            return

        now = values_of(value)

        def keep_gradient(gradient: Tensor) -> None:
            with self.own_code():
                self.arrived[event].add(place)
                if self._has_exchanged:
                    self.exchanged.add(event)
                self._has_arrived = True
                is_there = now.untyped_storage().nbytes() or not now.numel()
                if is_there and not torch.equal(now.cpu(), self.first[event][place]):
                    self.overwritten.add(event)
                self._keep_lines(self.lines_backward, event)
                if gradient is self._last[0]():
                    # Several modules return one tensor.
                    self.lines_backward.setdefault(event, self._last[1])
                self._last = weakref.ref(gradient), self.lines_backward.get(event, ())
                if not is_pending(gradient):
                    own = values_of(gradient).cpu().clone()
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
    def own_code(self) -> Iterator[None]:
        """Inside, no line and no value is noted."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def release(self) -> None:
        """Release the graph of the step: its hooks hold this record, a cycle that gc cannot see."""
        self._nodes.clear()
        self.values.release()

    def _keep_lines(
        self, lines: dict[str, tuple[str, ...]], event: str, behind: Container[str] = ()
    ) -> None:
        """Keep the lines since the last tensor; of them those `behind` this one, if any are."""
        if self._now:
            lines.setdefault(event, tuple(n for n in self._now if n in behind) or tuple(self._now))
            self._now.clear()

    def note_line(self, foreign: tuple[str, ...]) -> str:
        """Note the line outside the folders `foreign` that runs an operator, and return it.

        What is recomputed runs in the backward pass, but is not its code.
        """
        line = "" if self._is_own or _is_again() else line_of_caller(foreign)
        if not self._is_backward and torch._C._current_graph_task_id() != -1:
            # What comes next is no longer the code of the loss.
            self._is_backward = True
            self._now.clear()
        if line:
            self._now[line] = None
        return line

    def pass_back(self, exchanges: bool) -> None:
        """Note an operator of the backward pass, and whether it sends or receives."""
        # Hooks of one tensor, which several modules may return, follow each other.
        is_next = self._has_arrived and not self._is_own
        self._has_exchanged = exchanges or (self._has_exchanged and not is_next)
        self._has_arrived = self._has_arrived and not is_next

    def begin(self, kind: str, group: Any, inputs: Sequence[Tensor], whole_bytes: int) -> int:
        """Note a call of a collective or message."""
        if torch._C._current_graph_task_id() != -1:
            self.pass_back(True)
        else:
            # Ranks that deal out their rows need not have the same.
            sent = [] if kind == "broadcast" else inputs
            dealt = None if kind == "all_to_all" else group
            self.values.note_group(self._calls, dealt, inputs, sent)
        return -1

    def end(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Note what a call in the backward pass writes to."""
        if outputs and torch._C._current_graph_task_id() != -1:
            self.received.arrive(outputs, self.note_line(FOREIGN))

    def note_value(self, line: str, operator: Any, given: Any, result: Any) -> Any:
        """Keep what an operator of the forward pass returns, and return it."""
        is_forward = torch._C._current_graph_task_id() == -1
        if is_forward and not (self._calls and self._is_left_out):
            self.values.note(self._calls, line, operator, given, result)
            return self.values.complete(operator, given, result)
        return result

    def note_again(self, foreign: tuple[str, ...], operator: Any, result: Any) -> None:
        """Compare what an operator returns that the backward pass computes again."""
        if not self._is_own and (line := line_of_caller(foreign)):
            with self.own_code():
                self.values.note_again(line, operator, result)


def _is_again() -> bool:
    """Whether a backward pass computes again what the forward pass did.

    With `create_graph` gradients are computed with gradients, too, but by no code in Python.
    """
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OF_MODES):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename != graph.__file__


class OperatorWatch(TorchDispatchMode):
    """Notes the line of the caller's code, outside the folders `foreign`, at every operator, and
    with `keeps_values` what it returns.
    """

    def __init__(
        self, kept: Events, foreign: tuple[str, ...] = FOREIGN, *, keeps_values: bool = False
    ) -> None:
        super().__init__()
        self.kept, self.foreign, self.keeps_values = kept, foreign, keeps_values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = self.kept.note_line(self.foreign)
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:
            exchanges = func.namespace in COMMUNICATION
            self.kept.pass_back(exchanges)
            if not exchanges:
                self.kept.received.follow(func, (args, kwargs), result)
            elif "recv" in func.name():
                self.kept.received.arrive(args[0], line)
        if line and self.keeps_values:
            result = self.kept.note_value(line, func, (args, kwargs), result)
        elif self.keeps_values and _is_again():
            self.kept.note_again(self.foreign, func, result)
        return result


@contextlib.contextmanager
def recorded(
    parts: Sequence[nn.Module],
    is_whole: Sequence[bool],
    name_of: Callable[[nn.Module, str], str],
    kept: Events,
    *,
    before_hooks: bool = False,
) -> Iterator[Events]:
    """Inside, `kept` records every module of the parts of a model, by the name that `name_of` gives
    from a part and a name in it.

    A part itself is recorded only if `is_whole`: if its output is that of the model. With
    `before_hooks`, inputs are seen as the caller gives them, before other hooks have changed them.
    """
    hooks: list[Any] = []
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                known = name_of(part, name)
                hooks.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, name=known: kept.accumulated.update([name])
                    )
                )
        # A module and its wrappers share a canonical name; the innermost comes last and is kept.
        named = {name_of(part, name): module for name, module in _hookable(part)}
        if not is_whole[index]:
            named.pop(name_of(part, ""), None)
        num_calls: Counter[str] = Counter()
        kept.num_runs |= dict.fromkeys(named, 0)
        for name, module in named.items():
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name, calls=num_calls: kept.enter(
                        module, kept.name(name, calls), args, kwargs
                    ),
                    with_kwargs=True,
                    prepend=before_hooks,
                )
            )
            hooks.append(
                module.register_forward_hook(
                    lambda module, args, output, name=name, calls=num_calls: kept.leave(
                        name, output, calls
                    )
                )
            )
            if isinstance(module, OptimizedModule):
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda module, args, name=name: _note_pending(kept, name, args)
                    )
                )

        def begin(*_: Any, calls: Counter[str] = num_calls) -> None:
            calls.clear()
            calls[MODEL] = 1

        hooks.append(part.register_forward_pre_hook(begin, prepend=True))
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
        kept.release()


def _hookable(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can have hooks; those inside a compiled module are part of its graph. Those
    of TorchScript have none.

    An Identity is none: it gives what it receives, and may stand for a module of another stage.
    """
    compiled: list[str] = []
    for name, module in part.named_modules():
        is_inside = any(name.startswith(prefix) for prefix in compiled)
        is_other = isinstance(module, torch.jit.RecursiveScriptModule)
        is_other |= bool(name) and isinstance(module, nn.Identity)
        if not is_inside and not is_other:
            yield name, module
            if isinstance(module, OptimizedModule):
                compiled.append(f"{name}." if name else "")


def tensor_of(output: Any) -> Tensor | None:
    """The tensor in a module's output that is compared: the first, of a mapping or a tuple."""
    if isinstance(output, Mapping):
        output = next((v for v in output.values() if isinstance(v, Tensor) and v.ndim), None)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def _note_pending(kept: Events, name: str, args: tuple[Any, ...]) -> None:
    if any(isinstance(value, AsyncCollectiveTensor) for value in args):
        kept.pending_inputs[name] = None


def tensors_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call passes, by the name of the argument, without a suffix for its shape.

    What a plan puts in the place of a module, or of its forward, may name it otherwise.
    """
    forward: Any = module.forward
    if "forward" in vars(module) and not isinstance(module, OptimizedModule):
        forward = MethodType(type(module).forward, module)
    with contextlib.suppress(TypeError, ValueError):
        given = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
        short = {name: re.sub("_[A-Z]+$", "", name) for name in given}
        is_clear = len(set(short.values())) == len(short)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.numel():
                yield (short[name] if is_clear else name), value


def _can_be_aliased(value: Tensor) -> bool:
    """Whether an alias has a gradient of its own, and nothing is lost."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return False
    return type(value) is DTensor or (type(value) is Tensor and not value.__dict__)


def _infers_shapes() -> bool:
    """Whether torch's PipelineStage calls the module on memory without values, to learn shapes."""
    return is_running(stage.__file__, "inference")
