"""What the recorder knows of operators: collectives, and the operations and shapes of products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titanlite.mesh.parallel_dims import EXPERT_SHARDS
from titanlite.tools.planner.scratch import num_bytes

# Operator -> kind, and the positions of the whole tensor or its parts (-1: the result), of the
# group and, for P2P messages, of the peer among its arguments.
COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1, 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::alltoall_": ("all_to_all", 1, 2),
    "c10d::broadcast_": ("broadcast", 0, 1),
    "c10d::send": ("send", 0, 1),
    "c10d::recv_": ("receive", 0, 1),
}
GROUPED = "aten::_grouped_mm"
PRODUCTS = (*("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"), GROUPED)
# Attention kernels: the number of products, each of 2 B H T T E operations, and the positions of q
# and of is_causal among the arguments. The argument before that one, from 1 on, is no share of
# dropout but the size of a sliding window, for which the operators have none. The kernel for
# documents in a row takes q [tokens, H, E], and the longest of them at a position of LONGEST.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7),
    "aten::_flash_attention_forward": (2, 0, 8),
    "aten::_flash_attention_backward": (5, 1, 11),
}
LONGEST = {"aten::_flash_attention_forward": 5, "aten::_flash_attention_backward": 8}


def axis_of(name: str, kind: str, axes: tuple[str, ...]) -> str:
    """The axis of a collective whose group has these axes.

    If one of them is of the mesh of experts: tokens are exchanged over ep, and FSDP2, which does
    not use functional collectives, gathers and reduces over efsdp.
    """
    if len(axes) > 1:
        is_of_fsdp = kind in ("all_gather", "reduce_scatter") and name.startswith("c10d::")
        own = "ep" if kind == "all_to_all" else EXPERT_SHARDS if is_of_fsdp else ""
        if own in axes:
            return own
    return axes[0] if axes else "none"


def flops_of(name: str, function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a product or of attention; 0 for others."""
    if name in ATTENTION:
        num_products, at, _ = ATTENTION[name]
        _, keys, *window = causal_of(name, args, kwargs) or _lengths(name, args, at)
        return 2 * num_products * args[at].numel() * min([keys, *window])
    if name == GROUPED:
        batch, m, n, k = _grouped_shape(args, kwargs)
        return 2 * batch * m * n * k
    formula = flop_registry.get(function._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _grouped_shape(args: Any, kwargs: Any) -> tuple[int, ...]:
    """(groups, m, n, k) of a product of each group's rows, as if all had equally many.

    The rows of the groups are along the first dimension of `a`, or in a weight's gradient along the
    dimension that is summed.
    """
    a, b = args[:2]
    ends = args[2] if len(args) > 2 else kwargs["offs"]
    groups = ends.numel()
    if b.ndim == 2:
        return groups, a.size(0), b.size(1), a.size(1) // groups
    return groups, a.size(0) // groups, b.size(-1), a.size(1)


def shape_of(name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    """(batch, m, n, k) of a matrix product."""
    if name not in PRODUCTS:
        return ()
    if name == GROUPED:
        return _grouped_shape(args, kwargs)
    # mm and bmm can have a dtype as a third argument.
    has_bias = name in ("aten::addmm", "aten::baddbmm")
    a, b = args[1:3] if has_bias else args[:2]
    batch = a.size(0) if a.ndim == 3 else 1
    return batch, a.size(-2), b.size(-1), a.size(-1)


def causal_of(name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    """(queries, keys) of causal attention, and the size of a window that is less than all keys."""
    if name not in ATTENTION:
        return ()
    _, at, causal_at = ATTENTION[name]
    if not (args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)):
        return ()
    queries, keys = _lengths(name, args, at)
    window = int(args[causal_at - 1]) if len(args) > causal_at else 0
    if (left := kwargs.get("window_size_left")) is not None:
        window = left + 1
    return (queries, keys, window) if 0 < window < keys else (queries, keys)


def _lengths(name: str, args: Any, at: int) -> tuple[int, int]:
    """The numbers of queries and keys."""
    if (longest := LONGEST.get(name)) is not None:
        return args[longest], args[longest + 1]
    return args[at].size(2), args[at + 1].size(2)


def has_gaps(tensor: Tensor) -> bool:
    """Whether the elements of a tensor, each counted once, do not fill a range of memory."""
    sizes = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    span = 1 + sum((size - 1) * step for size, step in sizes)
    return span > math.prod(size for size, _ in sizes) > 0


def bytes_of_mutated(args: Any) -> int:
    """The bytes that an operator without a result writes: its first list of tensors."""
    first = args[0] if args else []
    return sum(num_bytes(leaf) for leaf in tree_leaves(first) if isinstance(leaf, Tensor))


def body_of(function: Any) -> Callable[..., Any]:
    """The Python function of one of titanlite's own operators."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[function._schema.name]._init_fn
