"""On a rank: records every module's outputs in a step, and the gradients of these outputs."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.modules.names import unwrapped_name
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.record import module_of, name_call


class Outputs:
    """The module outputs of one step: of the forward pass, recomputed ones, and gradients."""

    def __init__(self) -> None:
        self.first: dict[str, list[Tensor]] = defaultdict(list)
        self.again: dict[str, list[Tensor]] = defaultdict(list)
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)
        """Call -> index in its list in `first` -> gradient of that output."""
        self.pending_inputs: dict[str, None] = {}
        self.positions: dict[int, list[Tensor | None]] = defaultdict(list)
        """Index of a part of the model on this rank -> the positions that it received."""
        self.num_runs: dict[str, int] = {}
        """Every module that is watched -> how often it ran."""
        self.readers: dict[str, dict[str, None]] = defaultdict(dict)
        """Call -> the modules that are given its output itself."""
        self._makers = WeakTensorKeyDictionary()

    def note_inputs(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note which outputs a module is given."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value in self._makers:
                self.readers[self._makers[value]][name] = None

    def keep(self, name: str, output: Any, num_calls: Counter[str]) -> None:
        """Keep an output; `num_calls` counts each module's calls in this forward pass."""
        self.num_runs[name] += 1
        output = tensor_of(output)
        if output is None:
            return
        if isinstance(output, DTensor) and any(p.is_partial() for p in output.placements):
            # DTensor reduces it where it is used, so its local part equals nothing on one process.
            return
        local = local_part(output.detach()).detach().cpu().clone()
        if torch._C._current_graph_task_id() != -1:
            # A module that runs inside a backward pass is recomputed.
            self.again[name].append(local)
            return
        num_calls[name] += 1
        call = name_call(name, num_calls[name])
        place = len(self.first[call])
        self.first[call].append(local)
        self._makers[output] = call
        if output.requires_grad:

            def keep_gradient(gradient: Tensor) -> None:
                own = local_part(gradient.detach()).detach().cpu().clone()
                self.gradients[call][place] = own

            output.register_hook(keep_gradient)

    @property
    def idle(self) -> tuple[str, ...]:
        """The watched modules that never ran."""
        return tuple(name for name, number in self.num_runs.items() if not number)

    def gradients_of(self, call: str) -> list[Tensor] | None:
        """The gradients of a module's outputs in the order of its calls; None if one is missing."""
        found = self.gradients.get(call, {})
        count = len(self.first[call])
        return [found[i] for i in range(count)] if len(found) == count else None

    def recomputed_difference(self, name: str) -> float:
        """The largest difference of a recomputed output from the closest forward output.

        The schedule may recompute microbatches in another order, so calls are not paired by index.
        """
        worst = 0.0
        forward = [f for call in self.first if module_of(call) == name for f in self.first[call]]
        for again in self.again.get(name, ()):
            same = [first for first in forward if first.shape == again.shape]
            if same:
                worst = max(worst, min(agreement(again, f, f).difference for f in same))
        return worst

    def up_to(self, most_bytes: int) -> tuple[dict[str, list[Tensor]], int]:
        """The outputs of the forward pass that fit into `most_bytes`, and how many do not."""
        kept, num_bytes = {}, 0
        for call, tensors in self.first.items():
            num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if num_bytes <= most_bytes:
                kept[call] = tensors
        return kept, len(self.first) - len(kept)


def tensor_of(output: Any) -> Tensor | None:
    """The tensor in a module's output that is compared: the first, of a mapping or a tuple."""
    if isinstance(output, Mapping):
        output = next((v for v in output.values() if isinstance(v, Tensor) and v.ndim), None)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


@contextlib.contextmanager
def recorded(
    parts: Sequence[nn.Module],
    is_whole: Sequence[bool],
    name_of: Callable[[nn.Module, str], str] = unwrapped_name,
) -> Iterator[Outputs]:
    """Inside, the outputs of every module of the parts of a model are recorded, by the name that
    `name_of` gives from a part and a name in it.

    The output of a part itself is recorded only if `is_whole`: if it is the model's output.
    """
    kept = Outputs()
    hooks = []
    for index, part in enumerate(parts):
        hooks.append(
            part.register_forward_pre_hook(
                lambda part, args, kwargs, given=kept.positions[index]: given.append(
                    _argument(part, "positions", args, kwargs)
                ),
                with_kwargs=True,
            )
        )
        # A module and its wrappers share a canonical name; the innermost comes last and is kept.
        named = {name_of(part, name): module for name, module in hookable(part)}
        if not is_whole[index]:
            named.pop(name_of(part, ""), None)
        num_calls: Counter[str] = Counter()
        hooks.append(part.register_forward_pre_hook(lambda *_, calls=num_calls: calls.clear()))
        kept.num_runs |= dict.fromkeys(named, 0)
        for name, module in named.items():
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: kept.note_inputs(name, args, kwargs),
                    with_kwargs=True,
                )
            )
            hooks.append(
                module.register_forward_hook(
                    lambda module, inputs, output, name=name, calls=num_calls: kept.keep(
                        name, output, calls
                    )
                )
            )
            if isinstance(module, OptimizedModule):
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda module, inputs, name=name: _note_pending(kept, name, inputs)
                    )
                )
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _argument(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The tensor that a call passes for the argument `name`, by keyword or by position."""
    with contextlib.suppress(TypeError):
        value = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(name)
        return value if isinstance(value, Tensor) else None
    return None


def hookable(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can have hooks; those inside a compiled module are part of its graph.

    An Identity is none: it gives what it receives, and may stand for a module of another stage.
    """
    compiled: list[str] = []
    for name, module in part.named_modules():
        is_inside = any(name.startswith(prefix) for prefix in compiled)
        if not is_inside and not (name and isinstance(module, nn.Identity)):
            yield name, module
            if isinstance(module, OptimizedModule):
                compiled.append(f"{name}." if name else "")


def _note_pending(kept: Outputs, name: str, inputs: tuple[Any, ...]) -> None:
    if any(isinstance(value, AsyncCollectiveTensor) for value in inputs):
        kept.pending_inputs[name] = None
