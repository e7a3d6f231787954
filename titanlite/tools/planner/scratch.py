"""Memory that kernels and communication use beside their inputs and outputs, by type of device.

Fake tensors do not show it, so the recorder adds it from these tables. `CPU` has the kernels of
ATen and oneDNN, and gloo. `CUDA` has those of a GPU, and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Args = Any
"""The positional arguments of an operator."""


@dataclass(frozen=True)
class Scratch:
    """What a type of device allocates beyond the tensors that an operator takes and returns.

    `kernels` maps operators to the bytes that they allocate and free, by arguments and threads.
    `copies` maps kinds of collectives to the number of whole tensors that one allocates until it
    ends. A collective of a kind in `holds_input` keeps its input alive until then. P2P messages and
    collectives of c10d keep their tensors until a wait, or, if not `frees_at_wait`, until their
    Work is released. `has_rng_state` says that the states of the random number generator, which
    activation checkpointing keeps, are in this device's memory; `has_streams`, that FSDP2 allocates
    on streams of its own.
    """

    kernels: Mapping[str, Callable[[Args, int], int]]
    copies: Mapping[str, int] = field(default_factory=dict)
    holds_input: frozenset[str] = frozenset()
    frees_at_wait: bool = False
    has_rng_state: bool = False
    has_streams: bool = False


def num_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


# CPU: attention. aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention and
# cpu_flash_attention_backward: each thread has buffers for one block of queries and of keys.

KEY_BLOCK = 512


def _query_block(num_queries: int) -> int:
    block = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(block, num_queries)


def _is_reduced(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _accumulator_size(tensor: Tensor) -> int:
    return 8 if tensor.element_size() == 8 else 4


def _flash(args: Args, threads: int) -> int:
    q, k = args[0], args[1]
    queries, keys = _query_block(q.size(2)), min(KEY_BLOCK, k.size(2))
    # Scores, their maximum and sum, and the output; scores in the low precision too.
    size = queries * (keys + 2 + q.size(3)) * _accumulator_size(q)
    if _is_reduced(q):
        size += queries * keys * q.element_size()
    return threads * size


def _flash_backward(args: Args, threads: int) -> int:
    grad_out, q, k = args[0], args[1], args[2]
    queries, keys = _query_block(q.size(2)), min(KEY_BLOCK, k.size(2))
    # Scores and their gradient; the sum of a query's gradient, in one thread at a time.
    size = 2 * threads * queries * keys * _accumulator_size(q) + queries * _accumulator_size(q)
    if _is_reduced(q):
        size += 2 * threads * queries * keys * q.element_size()
        size += _onednn(keys, queries, q.size(3), threads, is_transposed=True)
    # The kernel reads the layout [B, T, H, E].
    return size + (0 if grad_out.transpose(1, 2).is_contiguous() else num_bytes(grad_out))


# CPU: products in bfloat16 are oneDNN's. Its brgemm_matmul keeps, for each thread, one block of the
# result in float32 and one of the packed factors. Sizes measured with AVX-512; AMX takes less.


def _onednn(m: int, n: int, k: int, threads: int, *, is_transposed: bool) -> int:
    result = 4 * min(m, 256 * threads) * min(n, 64)
    size = result + threads * 128 * min(k, 512) + 384 + 640 * threads
    return size + (2 * min(m, 256 * threads) * k + 128 if is_transposed else 0)


def _product(a: Tensor, b: Tensor, threads: int) -> int:
    if not _is_reduced(a):
        return 0
    is_transposed = a.stride(-1) != 1
    return _onednn(a.size(-2), b.size(-1), a.size(-1), threads, is_transposed=is_transposed)


# CPU: FSDP2's copy of gradients. aten/src/ATen/native/TensorShape.cpp, _pad_chunk: a gradient whose
# first dimension is not a multiple of the ranks is copied to be padded. A copy that also casts goes
# through one more tensor.


def _chunk_cat(args: Args, _: int) -> int:
    gradients, dim, num_chunks = args[:3]
    size = 0
    for gradient in gradients:
        rows = gradient.size(dim)
        if rows % num_chunks:
            size += num_bytes(gradient) // rows * (-(-rows // num_chunks) * num_chunks)
    out = args[3] if len(args) > 3 else gradients[0]
    casts = out.dtype != gradients[0].dtype
    return size + (max(num_bytes(gradient) for gradient in gradients) if casts else 0)


CPU = Scratch(
    kernels={
        "aten::_scaled_dot_product_flash_attention_for_cpu": _flash,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
        "aten::mm": lambda args, threads: _product(args[0], args[1], threads),
        "aten::addmm": lambda args, threads: _product(args[1], args[2], threads),
        "fsdp::chunk_cat": _chunk_cat,
    },
    # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: an all-gather runs into a flat tensor; a
    # reduce-scatter all-reduces a copy of its input, and does not need the input itself.
    copies={"all_gather": 1, "reduce_scatter": 1},
    holds_input=frozenset({"all_gather", "all_to_all"}),
    has_rng_state=True,
)


# CUDA, from the source alone; not measured. The backward kernel of FlashAttention-2 accumulates dQ
# in float32, in blocks of 128 queries and 32 features, and keeps a float32 sum for each query.
# aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.


def _cuda_flash_backward(args: Args, _: int) -> int:
    q = args[1]
    batch, heads, length, features = q.shape
    if not _is_reduced(q):
        # The memory-efficient kernel takes float32; it keeps a sum for each query.
        return 4 * batch * heads * length
    rows = -(-length // 128) * 128
    return 4 * batch * heads * rows * (-(-features // 32) * 32 + 1)


def _documents_backward(args: Args, _: int) -> int:
    q, k, starts = args[1], args[2], args[6]
    if starts is None:
        return _cuda_flash_backward((None, q.transpose(1, 2)), _)
    tokens, heads, features = q.shape
    # mha_varlen_bwd pads each document by a block, and sums keys that heads share at the end.
    size = 4 * heads * (tokens + 128 * (len(starts) - 1)) * (-(-features // 32) * 32 + 1)
    return size + (2 * num_bytes(q) if k.size(1) < heads else 0)


CUDA = Scratch(
    kernels={
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cuda_flash_backward,
        "aten::_scaled_dot_product_flash_attention_backward": _cuda_flash_backward,
        "aten::_flash_attention_backward": _documents_backward,
    },
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp keeps the tensors of an asynchronous
    # collective until it is waited for, and copies none.
    holds_input=frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}),
    frees_at_wait=True,
    has_streams=True,
)
BY_DEVICE = {"cpu": CPU, "cuda": CUDA}
