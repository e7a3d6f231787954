"""Ring products: matrix products that overlap with an all-gather or a reduce-scatter.

    gather_product     all-gather of the input, then its product with a weight
    product_scatter    product with a weight, then reduce-scatter of the output

Both run as a ring of P2P transfers (gloo on CPU, NCCL on GPUs): the next chunk is transferred while
the current one is multiplied. They are custom operators, so the compiler sees one opaque call and a
checkpoint policy can name them. The backward pass of each is the other.

Shapes: x [.., D, .., K], where D is the gathered or scattered dimension; weight [N, K] as in
nn.Linear.
Source: S. Wang et al., Overlap Communication with Dependent Computation via Decomposition, 2023
(https://doi.org/10.1145/3567955.3567959).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.profiler import record_function
from torch.utils.flop_counter import register_flop_formula

from titanlite.errors import TitanliteError


def gather_product(x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """all_gather(x, dim) @ weight.T; each chunk is multiplied while the next one is transferred.

    x is this rank's shard along `dim`, of the same size on every rank. The result is bitwise equal
    to the product of the gathered input, unless a chunk has so few rows that the matrix product
    takes another kernel. The gradient of x is a product_scatter ring. The gradient of the weight is
    one product, for which the gathered input is saved. Raises TitanliteError if `dim` is the last
    dimension.
    """
    dim = _checked_dim(x, dim, "gathered")
    return torch.ops.titanlite.gather_product(x, weight, dim, group.size(), group.group_name)[0]


def product_scatter(x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """reduce_scatter(x @ weight.T, dim): this rank's chunk of the sum over all ranks.

    The partial sum of a chunk passes around the ring. Each rank adds its product, and the rank that
    keeps the chunk is last, so the order of additions is that of the ring. The gradient of x is a
    gather_product ring, that of the weight is one product. Raises TitanliteError if `dim` is the
    last dimension, or if the number of ranks does not divide its size.
    """
    dim = _checked_dim(x, dim, "scattered")
    if x.size(dim) % group.size():
        raise TitanliteError(
            f"a ring of {group.size()} ranks cannot split {x.size(dim)} evenly (dimension "
            f"{dim} of {list(x.shape)}); give a sequence length that is a multiple of "
            f"{group.size()}, or disable asynchronous tensor parallelism"
        )
    return torch.ops.titanlite.product_scatter(x, weight, dim, group.size(), group.group_name)


def _checked_dim(x: Tensor, dim: int, verb: str) -> int:
    dim %= x.dim()
    if dim == x.dim() - 1:
        raise TitanliteError(
            f"the last dimension of {list(x.shape)} is multiplied and cannot be {verb} chunk by "
            "chunk; give another dimension"
        )
    return dim


@dataclass(frozen=True)
class ChunkRing:
    """Which chunk this rank has at each step; a chunk's number is the rank of its shard."""

    rank: int
    size: int

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    def gathered(self, step: int) -> int:
        """The chunk a gather has at `step`: its own, then the previous rank's last chunk."""
        return (self.rank - step) % self.size

    def summed(self, step: int) -> int:
        """The chunk a scatter adds to at `step`; its own chunk is last."""
        return (self.rank - 1 - step) % self.size


@dataclass
class Transfer:
    """A send to the next rank and a receive from the previous one.

    Both are posted in one batch, so they cannot deadlock even if batches run in order. They run
    beside the computation: in gloo's thread on CPU, on NCCL's stream on a GPU.
    """

    group: dist.ProcessGroup
    ring: ChunkRing
    pending: list[dist.Work] = field(default_factory=list)

    def post(self, sent: Tensor, received: Tensor) -> None:
        """Start the transfer; do not read or write either tensor before `wait` returns."""
        self.pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.ring.next),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.ring.previous),
            ]
        )

    def wait(self) -> None:
        """Wait for both; on a GPU, only later work on the current stream waits."""
        for work in self.pending:
            work.wait()


def multiply(chunk: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write chunk [.., K] @ weight.T into `out` [.., N], for weight [N, K]."""
    torch.mm(chunk.flatten(0, -2), weight.t(), out=out.view(-1, out.size(-1)))


def add(total: Tensor, product: Tensor) -> None:
    """Add this rank's product to the sum received from the previous rank."""
    total.add_(product)


@torch.library.custom_op("titanlite::gather_product", mutates_args=())
def _gather_product(
    x: Tensor, weight: Tensor, dim: int, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Returns (the product, the gathered input)."""
    group = _resolve_process_group(GroupName(group_name))
    ring = ChunkRing(group.rank(), num_ranks)
    shard = x.movedim(dim, 0)
    whole = x.new_empty((num_ranks, *shard.shape))
    out = x.new_empty((*whole.shape[:-1], weight.size(0)))
    whole[ring.rank] = shard
    for step in range(num_ranks):
        held, is_last = ring.gathered(step), step == num_ranks - 1
        transfer = Transfer(group, ring)
        if not is_last:
            transfer.post(whole[held], whole[ring.gathered(step + 1)])
        with record_function(f"gather_product: product of chunk {held}"):
            multiply(whole[held], weight, out[held])
        if not is_last:
            with record_function("gather_product: wait for the next chunk"):
                transfer.wait()
    return _joined(out, dim), _joined(whole, dim)


@torch.library.custom_op("titanlite::product_scatter", mutates_args=())
def _product_scatter(
    x: Tensor, weight: Tensor, dim: int, num_ranks: int, group_name: str
) -> Tensor:
    group = _resolve_process_group(GroupName(group_name))
    ring = ChunkRing(group.rank(), num_ranks)
    chunks = x.movedim(dim, 0).unflatten(0, (num_ranks, -1))
    shape = (*chunks.shape[1:-1], weight.size(0))

    def product(step: int) -> Tensor:
        summed, out = ring.summed(step), x.new_empty(shape)
        with record_function(f"product_scatter: product of chunk {summed}"):
            multiply(chunks[summed], weight, out)
        return out

    total = product(0)
    for step in range(1, num_ranks):
        transfer, coming = Transfer(group, ring), x.new_empty(shape)
        transfer.post(total, coming)
        own = product(step)
        with record_function("product_scatter: wait for the sum"):
            transfer.wait()
        add(coming, own)
        total = coming
    return total.movedim(0, dim).contiguous()


def _joined(chunks: Tensor, dim: int) -> Tensor:
    """Merge the first two dimensions of [n, t, ..] and move the result, n * t, to `dim`."""
    return chunks.flatten(0, 1).movedim(0, dim).contiguous()


@_gather_product.register_fake
def _(
    x: Tensor, weight: Tensor, dim: int, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] *= num_ranks
    return x.new_empty([*shape[:-1], weight.size(0)]), x.new_empty(shape)


@_product_scatter.register_fake
def _(x: Tensor, weight: Tensor, dim: int, num_ranks: int, group_name: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= num_ranks
    return x.new_empty([*shape[:-1], weight.size(0)])


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, *ctx.settings = inputs
    _, whole = output
    ctx.mark_non_differentiable(whole)
    ctx.save_for_backward(whole, weight)


def _differentiate_gather(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    whole, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if _is_wanted(ctx, 0):
        grad_x = torch.ops.titanlite.product_scatter(grad, weight.t(), *ctx.settings)
    if _is_wanted(ctx, 1):
        grad_weight = _weight_gradient(grad, whole)
    return grad_x, grad_weight, *(None for _ in ctx.settings)


def _save_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.settings = inputs
    ctx.save_for_backward(x, weight)
    ctx.kept = None


def _differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    wants_x, wants_weight = _is_wanted(ctx, 0), _is_wanted(ctx, 1)
    # If the backward pass is split, its second part reuses the gradient that the first gathered.
    whole_grad = None if wants_x or ctx.kept is None else ctx.kept.of(grad)
    if whole_grad is None:
        grad_x, whole_grad = torch.ops.titanlite.gather_product(grad, weight.t(), *ctx.settings)
    ctx.kept = None
    if wants_weight:
        grad_weight = _weight_gradient(whole_grad, x)
    elif ctx.needs_input_grad[1]:
        ctx.kept = _Kept(grad, grad._version, whole_grad)
    return grad_x if wants_x else None, grad_weight, *(None for _ in ctx.settings)


@dataclass(frozen=True)
class _Kept:
    """A gathered gradient, kept for a second backward pass with the same gradient."""

    grad: Tensor
    version: int
    whole: Tensor

    def of(self, grad: Tensor) -> Tensor | None:
        # Fake tensors, which a plan traces, have a storage but no address.
        same = _memory_of(self.grad) == _memory_of(grad)
        return self.whole if same and grad._version == self.version else None


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's elements are; equal only for the same memory, while both tensors exist."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride()


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _is_wanted(ctx: Any, index: int) -> bool:
    """Whether this backward pass needs the gradient of an input.

    A pipeline schedule may compute the gradients of inputs and weights in two passes. Custom
    operators see no difference in `ctx.needs_input_grad`, so this asks the autograd engine.
    """
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf in torch.autograd.grad
        return True


PRODUCT_SCATTER = torch.ops.titanlite.product_scatter.default
"""The operator that a checkpoint policy compares with."""

_gather_product.register_autograd(_differentiate_gather, setup_context=_save_gathered)
_product_scatter.register_autograd(_differentiate_scatter, setup_context=_save_scattered)


@register_flop_formula(torch.ops.titanlite.gather_product)
def _count_gather(x: torch.Size, weight: torch.Size, dim: int, num_ranks: int, *_, **__) -> int:
    return 2 * math.prod(x) * num_ranks * weight[0]


@register_flop_formula(torch.ops.titanlite.product_scatter)
def _count_scatter(x: torch.Size, weight: torch.Size, *_, **__) -> int:
    return 2 * math.prod(x) * weight[0]
