"""The buffers of a checkpointed block: recomputation sees their old values and changes none.

A forward pass may change buffers: BatchNorm's statistics, a step counter, an average that the
output uses. A BufferStates notes for each call what the buffers were before it. While the call is
recomputed, the block has copies of these in place of its buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from titanlite.modules.dropout import TokenDropout

# A comparison waits for a GPU. Up to this size, copies are kept without comparing.
SMALL_BYTES = 1 << 20

Place = tuple[nn.Module, str]


@dataclass(eq=False)
class _State:
    """A buffer with one value, shared by all calls that found it so."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None = None
    """The value, once a forward pass has replaced it."""

    def is_of(self, tensor: Tensor | None) -> bool:
        return tensor is self.tensor and (tensor is None or tensor._version == self.version)


class BufferStates:
    """What the buffers of a block were at each call whose backward pass is still to come."""

    def __init__(self) -> None:
        self._current: dict[Place, _State] = {}

    def contexts(self, block: nn.Module) -> "tuple[_Forward, _Recomputation]":
        """The contexts of one call: one for the forward pass, and one for its recomputation."""
        states: dict[Place, _State] = {}
        return _Forward(block, states, self._current), _Recomputation(states)


def places_of(block: nn.Module) -> Iterator[Place]:
    """Where the buffers of a block are registered, also those that are None.

    Without the keys of TokenDropout, which no forward pass changes.
    """
    for module in block.modules():
        for name in module._buffers if not isinstance(module, TokenDropout) else ():
            yield module, name


def has_buffers(block: nn.Module) -> bool:
    """Whether the block has a buffer, or a place for one."""
    return any(True for _ in places_of(block))


class _Forward(AbstractContextManager[None]):
    """Notes the state of each buffer, and copies those that the forward pass changes."""

    def __init__(
        self, block: nn.Module, states: dict[Place, _State], current: dict[Place, _State]
    ) -> None:
        self._block, self._states, self._current = block, states, current
        self._copies: dict[Place, Tensor | None] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        for place in places_of(self._block):
            tensor = place[0]._buffers[place[1]]
            state = self._current.get(place)
            if state is None or not state.is_of(tensor):
                state = _State(tensor, 0 if tensor is None else tensor._version)
            self._states[place] = self._current[place] = state
            self._copies[place] = None if tensor is None else tensor.detach().clone()

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for (module, name), copy in self._copies.items():
            state, tensor = self._states[module, name], module._buffers.get(name)
            # Kernels such as batch_norm's, and writes through `.data`, leave the version as it is.
            if not state.is_of(tensor) or not _are_equal(copy, tensor):
                if state.copy is None:
                    state.copy = copy
                self._current.pop((module, name), None)
        self._copies.clear()


class _Recomputation(AbstractContextManager[None]):
    """Inside, the block has the buffers that its forward pass found. It may be entered again."""

    def __init__(self, states: dict[Place, _State]) -> None:
        self._states = states
        self._own: dict[Place, Tensor | None] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        copies: dict[int, Tensor] = {}
        for (module, name), state in self._states.items():
            own = self._own[module, name] = module._buffers.get(name)
            if state.copy is not None:
                # A buffer that is registered twice stays one tensor.
                copies.setdefault(id(state.tensor), state.copy.clone())
                module._buffers[name] = copies[id(state.tensor)]
            elif own is not state.tensor:
                module._buffers[name] = state.tensor

    def __exit__(self, *error: object) -> None:
        for (module, name), own in self._own.items():
            module._buffers[name] = own
        self._own.clear()


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def around(outer: Contexts, inner: Callable[[], Contexts]) -> Contexts:
    """Contexts of a forward pass and its recomputation, with others inside."""
    forward, recomputation = inner()
    return _Both(outer[0], forward), _Both(outer[1], recomputation)


class _Both(AbstractContextManager[None]):
    """Two contexts, the first around the second; like them, it may be entered again."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]):
        self._outer, self._inner, self._exits = outer, inner, ExitStack()

    def __enter__(self) -> None:
        self._exits.enter_context(self._outer)
        self._exits.enter_context(self._inner)

    def __exit__(self, *error: Any) -> bool | None:
        return self._exits.__exit__(*error)


def _are_equal(copy: Tensor | None, tensor: Tensor | None) -> bool:
    """Whether the values are known to be equal."""
    if copy is None or tensor is None or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return True
    if isinstance(copy, DTensor) and isinstance(tensor, DTensor):
        copy, tensor = copy.to_local(), tensor.to_local()
    if tensor.device.type != "cpu" and tensor.nbytes <= SMALL_BYTES:
        return False
    return torch.equal(copy, tensor)
