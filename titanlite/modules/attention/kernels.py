"""Attention kernels for one block, which also return the log-sum-exp needed to merge blocks.

PyTorch's fused kernels are called directly, not through `scaled_dot_product_attention`, which
neither returns the log-sum-exp nor has a backward pass for a subset of the keys. `choose_kernel`
picks the kernel for a device, dtype and head size; `explain_choice` explains the choice.

Shapes: B batch, H query heads, K key/value heads (H a multiple of K), T queries, S keys, E head
size; lse is [B, H, T] in the accumulator's dtype; a mask is [B, 1, T, S], and true where a query
attends to a key.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.modules.attention.documents import Rows
from titanlite.modules.device_support import support

aten = torch.ops.aten


def choose_kernel(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, masked: bool = False
) -> "Kernel":
    """The fastest kernel that supports these inputs; the plain kernel supports all."""
    inputs = torch.device(device), dtype, head_dim
    kernels = (kernel for kernel in support().kernels(KERNELS) if kernel.takes_masks or not masked)
    return next(kernel for kernel in kernels if not kernel.refusal(*inputs))


def explain_choice(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> str:
    """One line: the kernel that `choose_kernel` picks, and why the faster ones do not apply."""
    chosen = choose_kernel(device, dtype, head_dim)
    device = torch.device(device)
    kernels = support().kernels(KERNELS)
    refusals = [
        f"not {kernel.name}, which {kernel.refusal(device, dtype, head_dim)}"
        for kernel in kernels[: kernels.index(chosen)]
        if kernel.device_type == device.type
    ]
    if not refusals and isinstance(chosen, Plain):
        refusals = [f"no fused kernel is used on {device.type}"]
    return f"{chosen.name} ({'; '.join(refusals)})" if refusals else chosen.name


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all other dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Scoring(NamedTuple):
    """How the scores of a block are computed: the factor on q k, and which scores are left out.

    With `causal` (T = S), each query attends to the keys up to its own index. A `mask` excludes
    `causal`. A `softcap` c, which only Plain takes, replaces a score s by c tanh(s / c). Kernels
    without masks take a `reach` (T <= S): query i attends only to keys from i - reach on; and if it
    is causal, `rows`: each query attends only to keys of its own sequence.
    """

    causal: bool
    scale: float
    mask: Tensor | None = None
    softcap: float | None = None
    reach: int | None = None
    rows: Rows | None = None


class Kernel(ABC):
    """Attention of T queries to S keys, forward and backward, without dropout.

    `smallest_triangle` is the number of keys down to which splitting a causal square into two
    triangles and a square is faster; None if the kernel skips the masked half by itself.
    `takes_masks`: whether it supports a mask; if not, it takes a reach and sequences in a row.
    """

    name: ClassVar[str]
    device_type: ClassVar[str | None] = None
    smallest_triangle: ClassVar[int | None] = None
    takes_masks: ClassVar[bool] = True

    @abstractmethod
    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """Why this kernel does not support these inputs; empty if it does."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        """(out [B, H, T, E], lse [B, H, T]) of q [B, H, T, E], k and v [B, K, S, E].

        With a mask, a query may have no key: its out is 0 and its lse -inf.
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The contribution of these keys to (dq, dk, dv), given out and lse over all keys.

        With the final lse, exp(score - lse) are the weights of the full softmax; with the final
        out, rowsum(grad * out) is its full correction. Hence the blocks' gradients sum.
        """


class CpuFlash(Kernel):
    """PyTorch's tiled CPU kernel; supports grouped heads (K < H) directly."""

    name = "CPU flash"
    device_type = "cpu"
    # It computes keys in blocks of 512 and does not skip the masked half within a block.
    smallest_triangle: ClassVar[int | None] = 256
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        if device.type != "cpu":
            return "runs on cpu"
        return "" if dtype in self.dtypes else "needs float16, bfloat16, float32 or float64"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        bias = _bias_of(how.mask, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.causal, attn_mask=bias, scale=how.scale
        )
        # The kernel returns an lse of 0 for a query without keys.
        return _hide_empty_rows(out, lse, how.mask)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = _bias_of(how.mask, q)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, how.causal, attn_mask=bias, scale=how.scale
        )


class CudaFlash(Kernel):
    """PyTorch's FlashAttention-2; supports grouped heads (K < H) directly."""

    name = "CUDA flash"
    device_type = "cuda"
    takes_masks = False

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        if device.type != "cuda":
            return "runs on cuda"
        if dtype not in (torch.float16, torch.bfloat16):
            return "needs float16 or bfloat16"
        if head_dim % 8 or head_dim > 256:
            return "needs a head size that is a multiple of 8, up to 256"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs compute capability 8.0"
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        inputs, options = for_flash(how, (q, k, v), q, k)
        out, lse, *_ = aten._flash_attention_forward(*inputs, 0.0, how.causal, False, **options)
        if how.rows is not None:
            lse = lse.unflatten(1, (q.size(0), -1)).transpose(0, 1)
            lse = lse.masked_fill(how.rows.is_out[:, None], -torch.inf)
        return heads_first(out, q), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        if how.rows is not None:
            # An lse of inf makes exp(score - lse) 0.
            lse = lse.masked_fill(how.rows.is_out[:, None], torch.inf).transpose(0, 1).flatten(1)
        # Without dropout, the kernel does not read the random state but checks its shape.
        states = (torch.zeros(s, dtype=torch.uint64, device=q.device) for s in ((2,), ()))
        inputs, options = for_flash(how, (grad, q, k, v, out), q, k, lse.contiguous())
        dq, dk, dv = aten._flash_attention_backward(*inputs, 0.0, how.causal, *states, **options)
        return heads_first(dq, q), heads_first(dk, q), heads_first(dv, q)


class CudaEfficient(Kernel):
    """The memory-efficient kernel (from xFormers); also supports float32 and older GPUs."""

    name = "CUDA memory-efficient"
    device_type = "cuda"
    # The kernel reads the log-sum-exp in blocks of this many rows.
    lse_alignment = 32

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        if device.type != "cuda":
            return "runs on cuda"
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return "needs float16, bfloat16 or float32"
        multiple = 16 // dtype.itemsize
        return f"needs a head size that is a multiple of {multiple}" if head_dim % multiple else ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(how.mask, q), True, 0.0, how.causal, scale=how.scale
        )
        lse = lse.narrow(2, 0, q.size(2))
        return _hide_empty_rows(out, lse, how.mask)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = k.size(1)
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        # Padding rows get lse = inf, so exp(score - lse) is 0 there.
        lse = F.pad(lse, (0, -lse.size(2) % self.lse_alignment), value=torch.inf)
        no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, self._bias(how.mask, q), out, lse, no_seed, no_seed,
            0.0, [True, True, True, False], how.causal, scale=how.scale,
        )  # fmt: skip
        return dq, _sum_heads(dk, num_kv_heads), _sum_heads(dv, num_kv_heads)

    def _bias(self, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """The bias [B, H, T, S]; rows start at multiples of 16 elements, as the kernel requires."""
        if mask is None:
            return None
        num_keys = mask.size(3)
        bias = _bias_of(F.pad(mask, (0, -num_keys % 16)), q)
        return bias.narrow(3, 0, num_keys).expand(-1, q.size(1), -1, -1)


class Plain(Kernel):
    """Matrix products and a softmax, on any device and dtype; materializes a block's scores."""

    name = "plain"

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, how)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        out = (weights @ _repeat_heads(v, q).to(weights.dtype)).to(q.dtype)
        return _hide_empty_rows(out, lse, how.mask)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(q, k, how)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        grad = grad.to(weights.dtype)
        correction = (grad * out.to(weights.dtype)).sum(-1, keepdim=True)
        grad_weights = grad @ _repeat_heads(v, q).to(weights.dtype).mT
        grad_scores = weights * (grad_weights - correction) * how.scale
        if how.softcap is not None:
            # Of a masked score, the weight is 0.
            capped = scores.masked_fill_(scores == -torch.inf, 0) / how.softcap
            grad_scores *= 1 - capped.square()
        dq = grad_scores @ _repeat_heads(k, q).to(weights.dtype)
        dk = _sum_heads(grad_scores.mT @ q.to(weights.dtype), k.size(1))
        dv = _sum_heads(weights.mT @ grad, v.size(1))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, how: Scoring) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        scores = q.to(dtype) @ _repeat_heads(k, q).to(dtype).mT * how.scale
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap).mul_(how.softcap)
        if how.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(future, -torch.inf)
        if how.mask is not None:
            scores.masked_fill_(~how.mask, -torch.inf)
        return scores


def for_flash(
    how: Scoring, tensors: tuple[Tensor, ...], q: Tensor, k: Tensor, *lse: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`tensors` with tokens before heads, `lse` and the bounds; the scale and the window."""
    bounds: tuple[Any, ...] = None, None, q.size(2), k.size(2)
    packed = [x.transpose(1, 2) for x in tensors]
    if how.rows is not None:
        packed, bounds = [x.flatten(0, 1) for x in packed], how.rows.bounds
    # The kernel counts from the key beside a query if the last key is beside the last query.
    left = None if how.reach is None else how.reach + k.size(2) - q.size(2)
    return (*packed, *lse, *bounds), {"scale": how.scale, "window_size_left": left}


def heads_first(x: Tensor, like: Tensor) -> Tensor:
    """[B, T, H, E] or [B x T, H, E] -> [B, H, T, E]."""
    return x.view(like.size(0), -1, *x.shape[-2:]).transpose(1, 2)


def _bias_of(mask: Tensor | None, q: Tensor) -> Any:
    """A mask as values to add to the scores: 0 where a query attends to a key, else -inf."""
    if mask is None:
        return None
    bias = torch.zeros_like(mask, dtype=q.dtype)
    return bias.masked_fill_(mask.logical_not(), -torch.inf)


def _hide_empty_rows(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with the values 0 and -inf for queries without keys, so that `merge` is exact."""
    if mask is None:
        return out, lse
    is_empty = mask.any(-1).logical_not()
    return out.masked_fill(is_empty.unsqueeze(-1), 0), lse.masked_fill(is_empty, -torch.inf)


def _repeat_heads(kv: Tensor, q: Tensor) -> Tensor:
    """[B, K, S, E] -> [B, H, S, E]: repeat each key/value head for each of its query heads."""
    return kv.repeat_interleave(q.size(1) // kv.size(1), dim=1) if kv.size(1) < q.size(1) else kv


def _sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of `_repeat_heads`: [B, H, S, E] -> [B, K, S, E]."""
    if grad.size(1) == num_kv_heads:
        return grad
    dtype = accumulator_dtype(grad.dtype)
    return grad.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=dtype).to(grad.dtype)


KERNELS: tuple[Kernel, ...] = (CpuFlash(), CudaFlash(), CudaEfficient(), Plain())
