"""The loss: a sum over targets, divided by the number of targets in the whole step.

A Loss is a pair of functions, the sum and the count, so that the count is known before the backward
pass. The spec of a data set names its loss.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from titanlite.errors import TitanliteError
from titanlite.modules.batch import IGNORE_INDEX, Batch, call_model, join
from titanlite.modules.device_support import support
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

    def compiled(self, backend: str) -> "Loss":
        """The same loss with `total` compiled."""
        return replace(self, total=torch.compile(self.total, backend=backend))


def next_token_loss(logits_BTV: Tensor, batch: Batch, **keys: Any) -> Tensor:
    """The token_loss_sum of the batch's targets; without gradients, as in a validation, no keys."""
    return token_loss_sum(logits_BTV, batch.targets, **(keys if torch.is_grad_enabled() else {}))


def weighted_loss(outputs: Tensor, batch: Batch, **keys: Any) -> Tensor:
    """The next_token_loss in which each target counts with its weight, the field "weights"."""
    used = keys if torch.is_grad_enabled() else {}
    return token_loss_sum(outputs, batch.targets, weights_BT=batch["weights"], **used)


def sum_of_weights(batch: Batch) -> Tensor:
    """The sum of the weights of the targets, a float64 scalar."""
    return batch["weights"].where(batch.targets != IGNORE_INDEX, 0.0).double().sum()


def squared_error(outputs: Tensor, batch: Batch) -> Tensor:
    """The sum of (output - target)^2 where the target is not IGNORE_INDEX, in at least float32.

    Outputs have the shape of the targets, or one more dimension of size 1. Raises TitanliteError
    for another shape.
    """
    targets = batch.targets
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise TitanliteError(
            f"training.loss: squared_error needs outputs of the shape of the targets, "
            f"{list(targets.shape)}, but they have {list(outputs.shape)}; change the model or the "
            "data set"
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    errors = (outputs.to(dtype) - targets.to(dtype)).square()
    return errors.where(targets != IGNORE_INDEX, 0.0).sum()


def contrastive(outputs: Any, batch: Batch) -> Tensor:
    """The sum over pairs of embeddings of CLIP's loss (arXiv 2103.00020, figure 3).

    Outputs are two tensors [B, E], whose rows i are pair i, and a factor on their products, if any.
    Of both, each row is to be matched with its pair among all B. A pair whose target is
    IGNORE_INDEX is only a negative. Raises TitanliteError for other shapes.
    """
    both, number = list(outputs)[:2], tuple(batch.targets.shape)
    shapes = [tuple(getattr(one, "shape", ())) for one in both]
    if len(both) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2 or number != shapes[0][:1]:
        raise TitanliteError(
            "training.loss: contrastive needs two outputs [B, E] and targets [B], but they are "
            f"{' and '.join(str(list(shape)) for shape in shapes)}, and {list(number)}; change the "
            "model or the data set"
        )
    logits = math.prod(outputs[2:]) * both[0] @ both[1].T
    pairs = torch.arange(number[0], device=logits.device)
    pairs = pairs.where(batch.targets != IGNORE_INDEX, IGNORE_INDEX)
    return (token_loss_sum(logits, pairs) + token_loss_sum(logits.T, pairs)) / 2


def token_loss_sum(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum of the cross-entropies (nats) at the positions whose target is not IGNORE_INDEX.

    Each is multiplied by its weight, if there are `weights_BT`.

    A classifier has logits [B, V] and targets [B]. Computed in at least float32, some rows of large
    logits at a time. A DTensor stays sharded over V. `label_smoothing` is that of
    torch.nn.functional.cross_entropy. `z_loss` times log(sum(exp(logits)))^2 is added at each
    position (PaLM, arXiv 2204.02311, section 5).
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    shards = ("", 0, 1, logits_BTV.size(-1))
    if isinstance(logits_BTV, DTensor):
        group = logits_BTV.device_mesh.get_group()
        shards = (group.group_name, group.rank(), group.size(), logits_BTV.size(-1))
        logits_BTV = logits_BTV.redistribute(placements=[Shard(logits_BTV.ndim - 1)]).to_local()
    logits, targets = logits_BTV.flatten(0, -2), targets_BT.flatten()
    weights = None if weights_BT is None else weights_BT.flatten().to(dtype)
    share = 64 if prefers_small_chunks(logits) else 4
    is_large = logits.numel() * dtype.itemsize > LARGEST_CHUNK // share
    # torch's own is faster for small logits, and where the compiler fuses the casts.
    if not (shards[0] or z_loss or (is_large and not torch.compiler.is_compiling())):
        wide, each = logits.to(dtype), "sum" if weights is None else "none"
        losses = F.cross_entropy(wide, targets, reduction=each, label_smoothing=label_smoothing)
        return losses if weights is None else (losses * weights).sum()
    keys = (label_smoothing, z_loss)
    return whole_loss(_CrossEntropyByRows.apply(logits, targets, weights, dtype, shards, keys))


class _CrossEntropyByRows(torch.autograd.Function):
    """The sum of the losses of logits [N, V'] in `dtype`, of some rows at a time.

    `shards` is the group that shares the vocabulary ("": none), this rank in it, its size, and V.
    The backward pass computes the probabilities from the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        dtype: torch.dtype,
        shards: Any,
        keys: Any,
    ) -> Tensor:
        (group, rank, number, vocab_size), (label_smoothing, z_loss) = shards, keys
        is_target, size = targets != IGNORE_INDEX, -(-vocab_size // number)
        # A target that is no value belongs to the first or last rank, whose gather raises.
        is_own = is_target & ((targets // size).clamp(0, number - 1) == rank)
        index = (targets - rank * size).where(is_own, 0).unsqueeze(-1)
        found = logits.new_empty((len(logits), 3), dtype=dtype)
        for rows, out in chunks(dtype, logits, found):
            # Of masked logits, all are -inf.
            most = rows.amax(-1, keepdim=True).to(dtype).clamp_min(torch.finfo(dtype).min)
            sums = torch.sub(rows, most).exp_().sum(-1)
            means = rows.sum(-1, dtype=dtype) / vocab_size if label_smoothing else sums
            out.copy_(torch.stack([most.squeeze(-1), sums, means], -1))
        own, sums, means = found.T.contiguous()
        most = _reduced(own, "max", group)
        chosen = (logits.gather(-1, index).squeeze(-1).to(dtype) - most).where(is_own, 0.0)
        if label_smoothing:
            chosen = chosen.lerp(means - most * (logits.size(1) / vocab_size), label_smoothing)
        sums, chosen = _reduced(torch.stack([sums * (own - most).exp(), chosen]), "sum", group)
        logs = sums.log() + most
        losses = sums.log() - chosen + z_loss * logs.square()
        share = is_target.to(dtype) if weights is None else weights.where(is_target, 0.0)
        ctx.save_for_backward(logits, index, is_own * (1 - label_smoothing), share, logs)
        ctx.keys, ctx.vocab_size = keys, vocab_size
        return (losses * share).where(is_target, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, own, share, logs = ctx.saved_tensors
        (label_smoothing, z_loss), found = ctx.keys, torch.empty_like(logits)
        columns = [one.unsqueeze(-1) for one in (own, gradient * share, logs)]
        for rows, out, at, one, factor, log in chunks(logs.dtype, logits, found, index, *columns):
            parts = torch.sub(rows, log).exp_()
            if z_loss:
                parts.mul_(1 + 2 * z_loss * log)
            if label_smoothing:
                parts.sub_(label_smoothing / ctx.vocab_size)
            parts.scatter_(-1, at, parts.gather(-1, at) - one)
            torch.mul(parts, factor, out=out)
            del parts  # before there are the next ones
        return found, None, None, None, None, None


def _reduced(tensor: Any, operator: str, group: str) -> Any:
    calls = torch.ops._c10d_functional
    return calls.wait_tensor(calls.all_reduce(tensor, operator, group)) if group else tensor


def prefers_small_chunks(logits: Tensor) -> bool:
    """Whether small chunks are faster, since they fit into a CPU's cache."""
    return logits.is_cpu and support().capability(logits.device) == (0, 0)


def chunks(dtype: torch.dtype, logits: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Rows of logits [N, V], at most LARGEST_CHUNK bytes at a time, and of others [N, ...]."""
    if torch.compiler.is_compiling():
        # The compiler fuses what is done with all rows.
        return [(logits, *others)]
    most = LARGEST_CHUNK // (logits.size(1) * dtype.itemsize)
    if prefers_small_chunks(logits):
        most = min(most, max(most // 128, logits.size(0) // 64))
    return support().chunks(max(1, most), (logits, *others))


def whole_loss(loss: Any) -> Any:
    """A user's loss of logits that are sharded over the vocabulary, as a plain tensor."""
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
        tensors = _tensors(outputs)
        dims = self._dims
        if dims is None or len(dims) != len(tensors):
            own = batch.num_sequences
            dims = [0 if tensor.ndim and tensor.size(0) == own else None for tensor in tensors]
        kept = None
        if not torch.is_grad_enabled():
            targets = self._gather(batch.targets, batch.dims["targets"].batch)
            has_target = (targets != IGNORE_INDEX).reshape(targets.size(0), -1).any(1)
            kept = has_target.nonzero().flatten()
        pairs = zip(tensors, dims, strict=True)
        gathered = iter([self._gather(tensor, dim, kept) for tensor, dim in pairs])
        everyone = tree_map_only(Tensor, lambda _: next(gathered), outputs)
        whole = Batch(
            {n: self._gather(f, batch.dims[n].batch, kept) for n, f in batch.fields.items()},
            batch.dims,
        )
        number = math.prod(group.size() for group in self._groups)
        return self._total(everyone, whole) / number

    def _gather(self, tensor: Tensor, dim: int | None, kept: Tensor | None = None) -> Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if dim is None:
            return tensor
        for group in reversed(self._groups):
            tensor = _GatherSamples.apply(tensor, dim, group)
        return tensor if kept is None else tensor.index_select(dim, kept)


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
                sizes.append([tensor.shape for tensor in _tensors(outputs)])
    except Exception:  # whatever a user's model raises on tensors without values
        return None
    return [
        next((dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if a != b), None)
        for two, three in zip(*sizes, strict=True)
    ]


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
