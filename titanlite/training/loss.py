"""The loss: summed over tokens, and divided by the tokens of the whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

IGNORE_INDEX = -100


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


def loss_context(logits_are_sharded: bool) -> AbstractContextManager[None]:
    """What a forward and backward pass has to be inside, depending on the logits."""
    return loss_parallel() if logits_are_sharded else contextlib.nullcontext()


def make_loss_function(compiled: bool, backend: str) -> Callable[[Tensor, Tensor], Tensor]:
    """`token_loss_sum`, compiled where asked for."""
    return torch.compile(token_loss_sum, backend=backend) if compiled else token_loss_sum
