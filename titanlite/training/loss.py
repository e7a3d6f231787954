"""The loss: a sum over targets, divided by the number of targets in the whole step.

A Loss is a pair of functions, the sum and the count, so that the count is known before the backward
pass. The spec of a data set names its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.batch import IGNORE_INDEX, Batch


@dataclass(frozen=True)
class Loss:
    """A training objective.

    `total(outputs, batch)` is the sum of the losses (nats), a scalar, for the model's outputs on a
    batch or on some of its sequences. `count(batch)` is the number of terms of that sum, an integer
    scalar that does not need the outputs.
    """

    total: Callable[[Any, Batch], Tensor]
    count: Callable[[Batch], Tensor]

    def compiled(self, backend: str) -> Loss:
        """The same loss with `total` compiled."""
        return replace(self, total=torch.compile(self.total, backend=backend))


def next_token_loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """The sum of the cross-entropies (nats) of the batch's targets."""
    return token_loss_sum(logits_BTV, batch.targets)


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of the cross-entropies (nats) at the positions whose target is not IGNORE_INDEX.

    A classifier has logits [B, V] and targets [B].

    Computed in at least float32. With logits that are sharded over the vocabulary, the call and its
    backward pass must be inside `loss_context(True)`.
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    loss = F.cross_entropy(
        logits_BTV.flatten(0, -2).to(dtype),
        targets_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


NEXT_TOKEN = Loss(next_token_loss, Batch.count_targets)
"""The cross-entropy of each next token."""


def loss_context(logits_are_sharded: bool) -> AbstractContextManager[None]:
    """The context that the loss and its backward pass need if the logits are sharded."""
    return loss_parallel() if logits_are_sharded else contextlib.nullcontext()
