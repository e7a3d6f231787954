"""Metrics of a validation, such as accuracy: sums and counts, added up over all ranks and batches.

A metric is a function of a model's outputs and a batch that returns (sum, count). Its value is the
sum over the whole validation set divided by the count, so it does not depend on the plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from titanlite.errors import TitanliteError
from titanlite.modules.batch import IGNORE_INDEX, Batch

Metric = Callable[[Any, Batch], tuple[Any, Any]]


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation: the mean loss (nats per target), and each metric's value."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def accuracy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many targets have the highest logit, and how many there are that are not masked."""
    is_target = batch.targets != IGNORE_INDEX
    is_right = outputs.argmax(-1) == batch.targets
    return (is_right & is_target).sum(), is_target.sum()


def sums_of(metrics: Mapping[str, Metric], outputs: Any, batch: Batch, totals: Tensor) -> None:
    """Add each metric's sum and count for a batch to its row of `totals` [metrics, 2].

    A metric gets whole outputs: sharded ones are all-gathered, so all ranks that hold a shard must
    call this together.
    """
    if not metrics:
        return
    whole = tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, outputs)
    for row, (name, metric) in zip(totals, metrics.items(), strict=True):
        try:
            total, count = metric(whole, batch)
            row += torch.stack([_number(total, row), _number(count, row)])
        except (TypeError, ValueError) as error:
            raise TitanliteError(
                f"validation.metrics: {name} failed with {type(error).__name__} ({error}); a "
                "metric takes (outputs, batch) and returns (sum, count), two numbers"
            ) from error


def _number(value: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(value).detach().to(like).reshape(())
