"""TorchTitan's distributed Muon on the reference: its functions on whole, plain tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

FUNCTIONS = (
    *("_prepare_muon_input", "_matrix_batch_view_from_compute_layout"),
    *("_compute_muon_direction", "_apply_muon_update", "_initialize_dist_muon"),
)
"""Those of TorchTitan that a step of plain tensors calls, and the one that is replaced."""


def initialize(functions: Sequence[Any], optimizer: Any, **kwargs: Any) -> None:
    """What the last function does, or give the optimizer of plain tensors a step of its own."""
    prepare, matrices_of, compute, update, given = functions

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> None:
        (group,) = self.param_groups
        for name, whole in zip(group["param_names"], group["params"], strict=True):
            state, change = self.state[whole], torch.empty_like(whole)
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(whole))
            _call(prepare, group, whole.grad, momentum, out=change)
            view = matrices_of(name, whole, kwargs["compute_sharding_by_fqn"][name])
            matrices = change if view is None else view.view_as_matrix_batch(change)
            _call(compute, group, matrices, out=matrices)
            _call(update, group, whole, change, compute_matrix_shape=matrices.shape)

    if any(isinstance(one, DTensor) for one in optimizer.param_groups[0]["params"]):
        given(optimizer, **kwargs)
    else:
        optimizer.step = MethodType(step, optimizer)


def _call(function: Callable[..., Any], group: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Call it with those of its arguments that the group has."""
    own = inspect.signature(function).parameters.keys() & group.keys()
    function(*args, **kwargs, **{key: group[key] for key in own})
