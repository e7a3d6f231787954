"""An average of the weights over the steps of a run: EMA, or the mean of the last k weights.

Sources: EMA as in torch.optim.swa_utils; the mean of the last k: LAWA, arXiv 2209.14981.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from titanlite.modules.shards import local_part

AVERAGE, OF_STEPS = "weight_average", "averaged_weight_"


class WeightAverage:
    """Keeps the average of each trained weight in the optimizer's state, sharded like the weight.

    It is kept in float32, or in the weight's dtype if that is wider. `method` is "ema", with
    `decay`, or "last_k", with the weights of `k` steps in the state too. Every `freq`-th step from
    `start_step` on is averaged. A weight that has never been updated has no average: it would be
    equal. Buffers are not averaged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        method: str,
        decay: float = 0.999,
        k: int = 5,
        freq: int = 1,
        start_step: int = 1,
    ) -> None:
        self._optimizer, self._decay, self._freq, self._first = optimizer, decay, freq, start_step
        self._weights = [f"{OF_STEPS}{slot}" for slot in range(k)] if method == "last_k" else []
        self.keys = (AVERAGE, *self._weights)
        """The keys in the state of a parameter."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average the weights of a step, counted from 1; call it before gradients are cleared."""
        number, rest = divmod(step - self._first, self._freq)
        if rest or number < 0:
            return
        averages, weights = [], []
        for parameter in self._parameters():
            state = self._optimizer.state[parameter]
            # Optimizers make their state where there is none, so theirs must come first.
            if not state and parameter.grad is None:
                continue
            local = local_part(parameter)
            if self._weights:
                newest = self._weights[number % len(self._weights)]
                _tensor_of(state, newest, parameter).copy_(local)
                kept = [local_part(state[key]) for key in self._weights if key in state]
                _tensor_of(state, AVERAGE, parameter).copy_(torch.stack(kept).mean(0))
            elif AVERAGE not in state:
                _tensor_of(state, AVERAGE, parameter).copy_(local)
            else:
                averages.append(_tensor_of(state, AVERAGE, parameter))
                weights.append(local.to(averages[-1].dtype))
        if averages:
            get_ema_multi_avg_fn(self._decay)(averages, weights, None)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages; after it, bit by bit its own weights again."""
        own: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for parameter in self._parameters():
                    average = self._optimizer.state.get(parameter, {}).get(AVERAGE)
                    if average is not None:
                        local = local_part(parameter.detach())
                        own.append((local, local.clone()))
                        local.copy_(local_part(average))
            yield
        finally:
            with torch.no_grad():
                for local, values in own:
                    local.copy_(values)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


def is_average(key: str) -> bool:
    """Whether a key in the state of a parameter is of an average."""
    return key == AVERAGE or key.startswith(OF_STEPS)


def average_dtype(parameter: Tensor) -> torch.dtype:
    """float32, or the parameter's dtype if that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _tensor_of(state: dict[str, Any], key: str, parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a tensor in the state of a parameter; zeros if it is new."""
    if key not in state:
        state[key] = torch.zeros_like(parameter, dtype=average_dtype(parameter))
    return local_part(state[key])
