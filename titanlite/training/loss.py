"""The loss: summed over targets, and divided by the number of targets of the whole step.

A Loss is two functions, so that the number is known before the backward pass: what a task adds up,
and what it divides by. A data set's spec names the loss that it is trained with.
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
    """What a task is trained to make small.

    `total(outputs, batch)` is the sum of the losses (nats), a scalar, of what the model puts out
    for a batch or for some of its sequences; `count(batch)` is how many losses that sum has, an
    integer scalar, known without the outputs.
    """

    total: Callable[[Any, Batch], Tensor]
    count: Callable[[Batch], Tensor]

    def compiled(self, backend: str) -> Loss:
        """The same, its sum compiled."""
        return replace(self, total=torch.compile(self.total, backend=backend))


def next_token_loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """The sum of the cross-entropies (nats) of the batch's targets."""
    return token_loss_sum(logits_BTV, batch.targets)


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of the cross-entropies (nats) at the positions whose target is not IGNORE_INDEX.

    At least float32, whatever the logits' dtype. Logits that are sharded over the vocabulary must
    be inside `loss_context(True)`, the backward pass too.
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1).to(dtype),
        targets_BT.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


NEXT_TOKEN = Loss(next_token_loss, Batch.count_targets)
"""The cross-entropy of each next token."""


def loss_context(logits_are_sharded: bool) -> AbstractContextManager[None]:
    """What a forward and backward pass has to be inside, depending on the logits."""
    return loss_parallel() if logits_are_sharded else contextlib.nullcontext()
