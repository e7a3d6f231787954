"""The loss: a sum over targets, divided by the number of targets in the whole step.

A Loss is a pair of functions, the sum and the count, so that the count is known before the backward
pass. The spec of a data set names its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from titanlite.modules.batch import IGNORE_INDEX, Batch, call_model, join
from titanlite.registry import LossSpec, load

# The bytes of logits that a loss casts at a time.
LARGEST_CHUNK = 256 << 20


@dataclass(frozen=True)
class Loss:
    """A training objective.

    `total(outputs, batch)` is the sum of the losses (nats), a scalar, of a batch or some of its
    sequences. `count(batch)` is the number of its terms, an integer scalar, known without the
    outputs.
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

    A classifier has logits [B, V] and targets [B]. Computed in at least float32. With logits that
    are sharded over the vocabulary, the call and its backward pass must be inside
    `loss_context(True)`.
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    logits, targets = logits_BTV.flatten(0, -2), targets_BT.flatten()
    is_large = logits.numel() * dtype.itemsize > LARGEST_CHUNK
    # The compiler fuses the casts, and torch has the loss of sharded logits.
    if is_large and not isinstance(logits, DTensor) and not torch.compiler.is_compiling():
        return whole_loss(_CrossEntropyByRows.apply(logits, targets, dtype))
    loss = F.cross_entropy(logits.to(dtype), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return whole_loss(loss)


class _CrossEntropyByRows(torch.autograd.Function):
    """The sum of the cross-entropies of logits [N, V] in `dtype`, of some rows at a time.

    The backward pass computes the probabilities from the logits again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.dtype, total = dtype, logits.new_zeros((), dtype=dtype)
        for rows, at in _chunks(dtype, logits, targets):
            logs, is_target = rows.to(dtype).log_softmax(-1), at != IGNORE_INDEX
            chosen = logs.gather(-1, at.where(is_target, 0).unsqueeze(-1)).squeeze(-1)
            total -= chosen.where(is_target, 0.0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        found = torch.empty_like(logits)
        for rows, at, out in _chunks(ctx.dtype, logits, targets, found):
            is_target = at != IGNORE_INDEX
            index = at.where(is_target, 0).unsqueeze(-1)
            parts = rows.to(ctx.dtype).softmax(-1)
            parts.scatter_(-1, index, parts.gather(-1, index) - 1)
            torch.mul(parts, gradient.where(is_target, 0.0).unsqueeze(-1), out=out)
        return found, None, None


def _chunks(dtype: torch.dtype, logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of logits [N, V] that take at most LARGEST_CHUNK bytes in `dtype`, and of others [N]."""
    number = max(1, LARGEST_CHUNK // (logits.size(1) * dtype.itemsize))
    yield from zip(*(one.split(number) for one in (logits, *others)), strict=True)


def whole_loss(loss: Any) -> Any:
    """A loss of logits that are sharded over the vocabulary, as a plain tensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


NEXT_TOKEN = Loss(next_token_loss, Batch.count_targets)
"""The cross-entropy of each next token."""


def load_loss(spec: LossSpec) -> Loss:
    """The Loss of a registered one."""
    return Loss(load(spec.total), load(spec.count) or Batch.count_targets)


class BatchLoss:
    """The `total` of a loss over the whole batch, on a rank that has some of its samples.

    `total` gets the outputs and fields of all samples, in the order of the global batch, gathered
    over `groups`: the process groups of the data-parallel axes, outermost first. Every rank
    computes the whole loss and returns its share of the sum over the ranks, an equal part. The
    gradient of an output is the one of the whole loss for the rank's own samples, and a share of it
    for an output without a batch dimension. `dims` are the batch dimensions of the outputs that are
    tensors (see batch_dims). Rows of a validation that have no target are left out.
    """

    def __init__(
        self,
        total: Callable[[Any, Batch], Tensor],
        groups: Sequence[dist.ProcessGroup],
        dims: Sequence[int | None] | None,
    ) -> None:
        self._total, self._groups, self._dims = total, tuple(groups), dims

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        values, spec = tree_flatten(outputs)
        tensors = _tensors(values)
        dims = self._dims
        if dims is None or len(dims) != len(tensors):
            own = batch.num_sequences
            dims = [0 if tensor.ndim and tensor.size(0) == own else None for tensor in tensors]
        gathered = iter([self._gather(*pair) for pair in zip(tensors, dims, strict=True)])
        values = [next(gathered) if isinstance(value, Tensor) else value for value in values]
        fields = {
            name: self._gather(field, batch.dims[name].batch)
            for name, field in batch.fields.items()
        }
        whole = Batch(fields, batch.dims)
        if not torch.is_grad_enabled():
            has_target = (whole.targets != IGNORE_INDEX).reshape(whole.targets.size(0), -1).any(1)
            kept = has_target.nonzero().flatten()
            rows = iter([_rows(t, d, kept) for t, d in zip(_tensors(values), dims, strict=True)])
            values = [next(rows) if isinstance(value, Tensor) else value for value in values]
            fields = {n: _rows(f, batch.dims[n].batch, kept) for n, f in fields.items()}
            whole = Batch(fields, batch.dims)
        number = 1
        for group in self._groups:
            number *= group.size()
        return self._total(tree_unflatten(values, spec), whole) / number

    def _gather(self, tensor: Tensor, dim: int | None) -> Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if dim is not None:
            for group in reversed(self._groups):
                tensor = _GatherSamples.apply(tensor, dim, group)
        return tensor


class _GatherSamples(torch.autograd.Function):
    """Concatenates the ranks' tensors; every rank has the same function of the result.

    So the gradient of a rank's own part is complete on that rank: the ranks' equal shares of it are
    added by multiplying its own.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, tensor.size(dim)
        parts = [torch.empty_like(tensor).contiguous() for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient.narrow(ctx.dim, ctx.group.rank() * ctx.size, ctx.size)
        return own * ctx.group.size(), None, None


def batch_dims(model: nn.Module, sample: Batch) -> list[int | None] | None:
    """The dimension of each output tensor that counts samples; None for one that has none.

    `sample` is a batch of one sample on "meta", as the model is. None if the model does not run
    there.
    """
    sizes = []
    try:
        with torch.no_grad():
            for number in (2, 3):
                outputs = call_model(model, join([sample] * number))
                sizes.append([tensor.shape for tensor in _tensors(tree_leaves(outputs))])
    except Exception:  # whatever a user's model raises on tensors without values
        return None
    return [
        next((dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if a != b), None)
        for two, three in zip(*sizes, strict=True)
    ]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _rows(tensor: Tensor, dim: int | None, rows: Tensor) -> Tensor:
    return tensor if dim is None else tensor.index_select(dim, rows)


def loss_context(logits_are_sharded: bool) -> AbstractContextManager[None]:
    """The context that the loss and its backward pass need if the logits are sharded."""
    return loss_parallel() if logits_are_sharded else contextlib.nullcontext()
