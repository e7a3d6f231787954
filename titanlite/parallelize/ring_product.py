"""All-gather with the product that reads it, and product with the reduce-scatter of its result,
each as a ring: the next chunk travels from rank to rank while the present one is multiplied.

    gather_product     the product of the gathered input with a weight, and the gathered input
    product_scatter    this rank's part of the sum over ranks of their products

They are custom operators, so that the compiler sees one opaque call and a checkpoint policy can
name them, and each is the other's backward pass. It takes nothing but P2P transfers: gloo on CPU,
NCCL on GPUs.

Letters: x [.., D, .., K] with D the gathered or scattered dimension, weight [N, K] as nn.Linear's.
Source: S. Wang et al., Overlap Communication with Dependent Computation via Decomposition, 2023
(https://doi.org/10.1145/3567955.3567959).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import record_function
from torch.utils.flop_counter import register_flop_formula

from titanlite.errors import TitanliteError


def gather_product(x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """all_gather(x, dim) @ weight.T, each rank's chunk multiplied while the next one travels.

    x is this rank's shard along `dim`, of the same size on every rank; the last dimension cannot be
    gathered. Equal to the last bit to the product of the gathered input wherever the matrix product
    does not depend on the number of rows, as with a chunk of more than a few rows it does not. Its
    gradients are a ring of product_scatter for x, and one product for the weight, for which the
    gathered input is kept.
    """
    dim = _checked_dim(x, dim, "gathered")
    return torch.ops.titanlite.gather_product(x, weight, dim, group.size(), group.group_name)[0]


def product_scatter(x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """reduce_scatter(x @ weight.T, dim): this rank's chunk of the sum over all ranks.

    A chunk's sum goes round the ring and gains each rank's product, the last one on the rank that
    keeps it: added in the order of the ring. Its gradients are a ring of gather_product for x, and
    one product for the weight. Raises TitanliteError where the ranks' chunks would not be of one
    size.
    """
    dim = _checked_dim(x, dim, "scattered")
    if x.size(dim) % group.size():
        raise TitanliteError(
            f"a ring of {group.size()} ranks cannot share out {x.size(dim)} evenly (dimension "
            f"{dim} of {list(x.shape)}); give a sequence length that is a multiple of "
            f"{group.size()}, or do without asynchronous tensor parallelism"
        )
    return torch.ops.titanlite.product_scatter(x, weight, dim, group.size(), group.group_name)


def _checked_dim(x: Tensor, dim: int, verb: str) -> int:
    dim %= x.dim()
    if dim == x.dim() - 1:
        raise TitanliteError(
            f"the last dimension of {list(x.shape)} is multiplied, and cannot be {verb} chunk by "
            "chunk; give another one"
        )
    return dim


@dataclass(frozen=True)
class Ring:
    """Who holds what at which step; a chunk is known by the rank whose part of the whole it is."""

    rank: int
    size: int

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    def gathered(self, step: int) -> int:
        """The chunk that a gather has here at a step: its own, then what the one before had."""
        return (self.rank - step) % self.size

    def summed(self, step: int) -> int:
        """The chunk that a scatter adds to here at a step: its own at the last."""
        return (self.rank - 1 - step) % self.size


@dataclass
class Transfer:
    """A tensor on its way to the next rank, and one that comes from the rank before.

    Both are posted as one batch, so that even batches that run in order cannot deadlock. On CPU
    gloo's own thread moves them, on a GPU NCCL's own stream.
    """

    group: dist.ProcessGroup
    ring: Ring
    pending: list[dist.Work] = field(default_factory=list)

    def post(self, sent: Tensor, received: Tensor) -> None:
        """Begin; neither tensor may be touched before `wait` has returned."""
        self.pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.ring.next),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.ring.previous),
            ]
        )

    def wait(self) -> None:
        """Return when both are there; on a GPU, have what follows wait for them."""
        for work in self.pending:
            work.wait()


def multiply(chunk: Tensor, weight: Tensor, out: Tensor) -> None:
    """A chunk [.., K] times weight [N, K], into `out` [.., N]."""
    torch.mm(chunk.flatten(0, -2), weight.t(), out=out.view(-1, out.size(-1)))


def add(total: Tensor, product: Tensor) -> None:
    """One rank's product onto the sum that has come from the rank before."""
    total.add_(product)


@torch.library.custom_op("titanlite::gather_product", mutates_args=())
def _gather_product(
    x: Tensor, weight: Tensor, dim: int, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """(the product, the gathered input)."""
    group = _find_group(group_name)
    ring = Ring(group.rank(), num_ranks)
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
    group = _find_group(group_name)
    ring = Ring(group.rank(), num_ranks)
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
    """[n, t, ..] as one tensor with n t at `dim`."""
    return chunks.flatten(0, 1).movedim(0, dim).contiguous()


def _find_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


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
    # In a backward pass of two parts, the second finds here what the first has gathered.
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
    """What a gradient is when gathered, as long as it is the same gradient."""

    grad: Tensor
    version: int
    whole: Tensor

    def of(self, grad: Tensor) -> Tensor | None:
        own = self.grad
        # As `grad` is held here, no other tensor can have come to lie in its place.
        same = (own.data_ptr(), own.shape, own.stride()) == (
            grad.data_ptr(),
            grad.shape,
            grad.stride(),
        )
        return self.whole if same and grad._version == self.version else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _is_wanted(ctx: Any, index: int) -> bool:
    """Whether this backward pass asks for the gradient of an input.

    A pipeline schedule may take the gradients of inputs and weights in two passes; autograd says so
    to its own functions alone.
    """
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf, in torch.autograd.grad
        return True


PRODUCT_SCATTER = torch.ops.titanlite.product_scatter.default
"""The operator, as a checkpoint policy sees it."""

_gather_product.register_autograd(_differentiate_gather, setup_context=_save_gathered)
_product_scatter.register_autograd(_differentiate_scatter, setup_context=_save_scattered)


@register_flop_formula(torch.ops.titanlite.gather_product)
def _count_gather(x: torch.Size, weight: torch.Size, dim: int, num_ranks: int, *_, **__) -> int:
    return 2 * math.prod(x) * num_ranks * weight[0]


@register_flop_formula(torch.ops.titanlite.product_scatter)
def _count_scatter(x: torch.Size, weight: torch.Size, *_, **__) -> int:
    return 2 * math.prod(x) * weight[0]
