"""How long an operator or a communication takes on a device; torch-free.

An operator is limited by the FLOP/s of its dtype or by memory (a roofline), with the efficiencies
of its shape (hardware.py). A communication has a latency and a time on a link. The trace was made
on the CPU; TRANSLATION says by name what other kernels do on a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titanlite.mesh.parallel_dims import AXES, EXPERT_SHARDS, ParallelDims, axes_of, axes_where
from titanlite.tools.planner.events import FROM_RANK_TO_RANK, HOST_LINK, Communication, Operator
from titanlite.tools.planner.hardware import Hardware, Interconnect
from titanlite.tools.simulate.network import bytes_sent

PRODUCT, ATTENTION, MEMORY_BOUND, OPTIMIZER, ON_HOST, FREE = (
    "products",
    "attention",
    "memory-bound",
    "optimizer",
    "optimizer on the host",
    "free",
)
CALLERS = COLLECTIVE, UNSHARD, MESSAGE, EXCHANGE = "collective", "unshard", "message", "exchange"
"""Who issues a communication: DTensor or a step, FSDP, a pipeline, or a ring."""
NODE, FABRIC = "node", "fabric"
"""The links of a rank: to the ranks of its node, and to other nodes; HOST_LINK is a third one."""


class OperatorRule(NamedTuple):
    """What an operator of the trace is on a device: its kind, and how its bytes change."""

    kind: str
    read_factor: float = 1.0
    written_factor: float = 1.0
    written_per_read: float = 0.0
    """Bytes that are written beside those of the trace, per byte read."""


# Operator -> what it is. Operators that are not listed are memory-bound.
TRANSLATION = {
    **{
        f"aten::{name}": OperatorRule(PRODUCT)
        for name in (
            *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"),
            *("linear", "convolution"),
        )
    },
    # The flash kernel of the CPU; on a GPU, FlashAttention with the same inputs and outputs.
    "aten::_scaled_dot_product_flash_attention_for_cpu": OperatorRule(ATTENTION),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": OperatorRule(ATTENTION),
    "aten::_flash_attention_forward": OperatorRule(ATTENTION),
    "aten::_flash_attention_backward": OperatorRule(ATTENTION),
    # The trace counts the parameters alone as written; both moments are, too: three of the four
    # lists that are read.
    "aten::_fused_adamw_": OperatorRule(OPTIMIZER, written_factor=0.0, written_per_read=0.75),
    "aten::_fused_adam_": OperatorRule(OPTIMIZER, written_factor=0.0, written_per_read=0.75),
    # The gradient's rows, and the table of zeros that they are added to.
    "aten::embedding_dense_backward": OperatorRule(MEMORY_BOUND),
    # The rows that are looked up, not the whole table.
    "aten::embedding": OperatorRule(MEMORY_BOUND, read_factor=0.0, written_factor=2.0),
    # Each moves no data: a query of fake tensors, a view that is not called one, or a check.
    **dict.fromkeys(
        (
            *("aten::_unsafe_view", "aten::empty_like", "aten::promote_types", "aten::alias"),
            *("aten::is_same_size", "aten::_local_scalar_dense", "aten::record_stream"),
        ),
        OperatorRule(FREE),
    ),
}
FREE_NAMESPACES = ("prim", "profiler", "_c10d_functional")
OPTIMIZER_PREFIX = "aten::_foreach"
BACKWARD_SUFFIX = "_backward"


class LinkLoad(NamedTuple):
    """A communication: seconds before data flow, and seconds at the full rate of `link`."""

    latency_seconds: float
    transfer_seconds: float
    link: str

    @property
    def seconds(self) -> float:
        return self.latency_seconds + self.transfer_seconds


@dataclass(frozen=True)
class Geometry:
    """How a group of ranks lies on nodes: `per_node` of its ranks in each of `num_nodes`."""

    num_ranks: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.per_node)


@dataclass(frozen=True)
class Cost:
    """The times of a job's operators and communications on `hardware`.

    `dims` are the job's degrees: ranks are numbered with tp innermost and fill one node after
    another. `is_compiled` says that elementwise operators are fused; apply fuse.py to the events.
    Attention that is not fused has heads of `head_dim`.
    """

    hardware: Hardware
    dims: ParallelDims = field(default_factory=ParallelDims)
    is_compiled: bool = False
    head_dim: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", {})
        object.__setattr__(self, "_loads", {})

    # Operators

    @staticmethod
    def kind(operator: Operator) -> str:
        """What the operator is: one of PRODUCT, ATTENTION, ..., ON_HOST, FREE."""
        kind = rule_of(operator.name).kind
        return ON_HOST if operator.is_on_host and kind != FREE else kind

    def price(self, operator: Operator) -> tuple[float, str, float]:
        """Seconds on the device, the kind, and seconds of a GPU's host to launch the operator.

        On a CPU, the seconds include the host's overhead, and the last is 0.
        """
        key = (
            operator.name,
            operator.flops,
            operator.bytes_read,
            operator.bytes_written,
            operator.dtype,
            operator.shape,
            operator.causal,
            operator.is_strided,
            operator.place.phase == "recomputation",
            operator.is_on_host,
        )
        known: dict[object, tuple[float, str, float]] = self._known  # type: ignore[attr-defined]
        if key not in known:
            kind = self.kind(operator)
            is_launched = self.hardware.kind != "cpu" and kind not in (ON_HOST, FREE)
            launch = self.hardware.overhead.launch_seconds if is_launched else 0.0
            known[key] = self._operator(operator), kind, launch
        return known[key]

    def operator(self, operator: Operator) -> float:
        """Seconds on the device. On a CPU they include the host's overhead."""
        return self.price(operator)[0]

    def launch(self, operator: Operator) -> float:
        """Seconds of the host of a GPU to launch the operator; 0 on a CPU."""
        return self.price(operator)[2]

    def host(self, one: Communication) -> float:
        """Seconds of the host for a communication."""
        overhead = self.hardware.overhead
        if one.num_ranks < 2:
            is_copy = one.axis == HOST_LINK and self.hardware.kind != "cpu"
            return overhead.launch_seconds if is_copy else 0.0
        measured = {
            MESSAGE: overhead.message_seconds,
            EXCHANGE: overhead.exchange_seconds,
            UNSHARD: overhead.unshard_seconds,
        }
        found = measured.get(caller(one))
        found = overhead.collective_seconds if found is None else found
        is_collective = one.kind not in FROM_RANK_TO_RANK
        return found + (overhead.peer_seconds * (one.num_ranks - 2) if is_collective else 0.0)

    def on(self, dims: ParallelDims) -> Cost:
        """The costs for other degrees; those of operators are shared."""
        other = replace(self, dims=dims)
        object.__setattr__(other, "_known", self._known)  # type: ignore[attr-defined]
        return other

    def _operator(self, operator: Operator) -> float:
        rule, hardware = rule_of(operator.name), self.hardware
        if rule.kind == FREE:
            return 0.0
        fixed = hardware.overhead.kernel_seconds
        if hardware.kind == "cpu":
            fixed = hardware.overhead.launch_seconds
            if operator.place.phase == "recomputation":
                fixed += hardware.overhead.recomputed_seconds
        num_bytes = (
            operator.bytes_read * (rule.read_factor + rule.written_per_read)
            + operator.bytes_written * rule.written_factor
        )
        if operator.is_on_host and (host := hardware.offload_host) is not None:
            rate = host.memory_bytes_per_second * host.memory_share
            return hardware.overhead.launch_seconds + num_bytes / rate
        measured = hardware.operators.get(key_of(operator))
        if measured is None:
            measured = hardware.operators.get(f"{operator.name}:{operator.dtype}")
        if measured is not None:
            recorded = operator.bytes_read + operator.bytes_written
            return fixed + measured(recorded, computed_flops(operator, hardware.kind))
        if rule.kind == PRODUCT and operator.flops:
            return fixed + max(self._product(operator), self._moving(num_bytes))
        if rule.kind == ATTENTION and operator.flops:
            return fixed + self._attention(operator, num_bytes)
        return fixed + self._moving(num_bytes)

    def _moving(self, num_bytes: float) -> float:
        """Seconds to read and write `num_bytes`."""
        memory = self.hardware.memory
        if num_bytes <= 0:
            return 0.0
        return num_bytes / (memory.bytes_per_second * memory.share(num_bytes))

    def _product(self, operator: Operator) -> float:
        dtype = "float8" if operator.name == "aten::_scaled_mm" else operator.dtype
        shape = operator.shape or (1, 1, 1, 1)
        efficiency = product_efficiency(self.hardware, *shape) if operator.shape else 1.0
        share = self.hardware.product_share.get(dtype, self.hardware.products.share)
        return operator.flops / (self.hardware.peak(dtype) * share * efficiency)

    def _attention(self, operator: Operator, num_bytes: float) -> float:
        is_backward = operator.name.endswith(BACKWARD_SUFFIX)
        if self.hardware.software.attention != "flash":
            return self._unfused(operator, is_backward)
        efficiencies = self.hardware.attention
        share = efficiencies.backward_share if is_backward else efficiencies.forward_share
        skips_masked = efficiencies.is_causal_halved
        flops = computed_flops(operator, self.hardware.kind) if skips_masked else operator.flops
        return max(flops / (self.hardware.peak(operator.dtype) * share), self._moving(num_bytes))

    def _unfused(self, operator: Operator, is_backward: bool) -> float:
        """Attention whose scores are stored.

        Forward: q k^T, a fused scale, mask and softmax, dropout, and the product with v. A fused
        kernel reads and writes the scores once; dropout also writes a mask of one byte each.
        """
        # Two products of 2 E operations for each score; the flash kernel's backward pass has five.
        num_scores = operator.flops / ((10 if is_backward else 4) * self.head_dim)
        itemsize = 2 if operator.dtype in ("bfloat16", "float16") else 4
        rate = self.hardware.peak(operator.dtype) * self.hardware.products.share
        half_k = self.hardware.products.half_k
        products = (
            4 * self.head_dim * num_scores / (rate * self.head_dim / (self.head_dim + half_k))
        )
        # Written by the product, read and written by the softmax and by dropout, and read again.
        forward = products + self._moving(num_scores * (6 * itemsize + 1))
        if not is_backward:
            return forward
        # Two products for each of the forward pass; the scores' gradients go the same way, and
        # dropout and softmax read what they kept.
        backward = 2 * products + self._moving(num_scores * (8 * itemsize + 1))
        is_again = self.hardware.software.attention == "unfused, recomputed"
        return backward + (forward if is_again else 0.0)

    # Communication

    def geometry(self, axis: str, num_ranks: int) -> Geometry:
        """How the group of `axis` lies on nodes. A group without an axis is of adjacent ranks."""
        # The ranks that hold the same experts are a whole group of ep apart.
        stride = self.dims.ep if axis == EXPERT_SHARDS else 1
        innermost = axes_of(axis)[-1] if axis != EXPERT_SHARDS else axis
        if innermost in AXES:
            inner = AXES[AXES.index(innermost) + 1 :]
            stride = self.dims.degree_of(inner)
        per_node = max(1, self.hardware.node.num_ranks // stride)
        return Geometry(num_ranks, min(num_ranks, per_node))

    def communication(self, one: Communication, rank: int = 0) -> LinkLoad:
        """The latency of a communication, and its time on a link of `rank` at full rate."""
        key = one.kind, one.axis, one.num_bytes, one.num_ranks, one.peer, rank
        known: dict[object, LinkLoad] = self._loads  # type: ignore[attr-defined]
        if key not in known:
            known[key] = self._load(one, rank)
        return known[key]

    def _load(self, one: Communication, rank: int) -> LinkLoad:
        hardware = self.hardware
        if one.axis == HOST_LINK and (host := hardware.offload_host) is not None:
            return LinkLoad(host.latency_seconds, one.num_bytes / host.bytes_per_second, HOST_LINK)
        if one.num_ranks < 2:
            return LinkLoad(0.0, 0.0, NODE)
        sent = bytes_sent(one.kind, one.num_bytes, one.num_ranks)
        measured = hardware.collectives.get(one.kind)
        if measured is not None:
            latency = measured.seconds + measured.seconds_per_peer * (one.num_ranks - 1)
            return LinkLoad(latency, sent / measured.bytes_per_second, NODE)
        if one.peer >= 0:
            link, name = self._link_to(one, rank)
            share = link.share(max(1, sent))
            return LinkLoad(link.latency_seconds, sent / (link.bytes_per_second * share), name)
        group = self.geometry(one.axis, one.num_ranks)
        node, fabric = hardware.node, hardware.fabric
        inside = sent / (node.bytes_per_second * node.share(max(1, one.num_bytes)))
        between = 0.0
        if group.num_nodes > 1:
            # The ring leaves a node by the ports of all its ranks in the group.
            rate = fabric.bytes_per_second * fabric.share(max(1, one.num_bytes)) * group.per_node
            between = sent / rate
        latency = self._latency(one.kind, group)
        if between > inside:
            return LinkLoad(latency, between, FABRIC)
        return LinkLoad(latency, inside, NODE)

    def _latency(self, kind: str, group: Geometry) -> float:
        node, fabric = self.hardware.node.latency_seconds, self.hardware.fabric.latency_seconds
        hops_between = group.num_nodes if group.num_nodes > 1 else 0
        ring = (group.num_ranks - 1 - hops_between) * node + hops_between * fabric
        if kind == "all_to_all":
            return fabric if hops_between else node
        if kind != "all_reduce":
            return max(ring, 0.0)
        # A ring, or a tree over the nodes with a chain inside each.
        tree = 2 * ((group.per_node - 1) * node + math.log2(max(1, group.num_nodes)) * fabric)
        return min(2 * max(ring, 0.0), tree)

    def _link_to(self, one: Communication, rank: int) -> tuple[Interconnect, str]:
        own = self.dims.coordinates(rank) if rank < self.dims.world_size else {}
        other = {**own, one.axis: one.peer}
        is_near = True
        if one.axis in own and one.peer < self.dims.degrees[one.axis]:
            per_node = self.hardware.node.num_ranks
            is_near = rank // per_node == self.dims.rank(**other) // per_node
        if is_near:
            return self.hardware.node, NODE
        return self.hardware.fabric, FABRIC


def caller(one: Communication) -> str:
    """Who issues a communication: one of CALLERS."""
    if one.kind in FROM_RANK_TO_RANK:
        return MESSAGE if one.axis in axes_where(weights="stages") else EXCHANGE
    is_sharded = set(axes_of(one.axis)) <= set(axes_where(weights="sharded"))
    is_of_fsdp = is_sharded and one.kind in ("all_gather", "reduce_scatter")
    return UNSHARD if is_of_fsdp else COLLECTIVE


def key_of(operator: Operator) -> str:
    """The name of a measured operator: with its dtype, and whether elementwise inputs have gaps."""
    is_slower = operator.is_strided and rule_of(operator.name).kind == MEMORY_BOUND
    return f"{operator.name}:{operator.dtype}{':strided' if is_slower else ''}"


# The blocks of the CPU's flash kernel: FlashAttentionKernel.cpp, as in scratch.py.
CPU_KEYS = 512
CPU_QUERIES = ((768, 256), (192, 64), (0, 32))


def computed_flops(operator: Operator, device_kind: str) -> float:
    """The operations that a kernel computes on a "gpu" or "cpu": causal attention skips some.

    A GPU's kernel skips the masked half. The CPU's computes, for a block of queries, each block of
    512 keys that has one that is not masked.
    """
    if not operator.causal:
        return operator.flops
    queries, keys, *window = operator.causal
    if window or device_kind != "cpu":
        # The first queries have fewer keys before them.
        return operator.flops * (1 - (min([keys, *window]) - 1) / (2 * keys))
    block = min(queries, next(size for least, size in CPU_QUERIES if queries >= least))
    pairs = 0
    for start in range(0, queries, block):
        visible = min(keys, -(-min(start + block, keys) // CPU_KEYS) * CPU_KEYS)
        pairs += min(block, queries - start) * visible
    return operator.flops * pairs / (queries * keys)


def product_efficiency(hardware: Hardware, batch: int, m: int, n: int, k: int) -> float:
    """The share of a large product's speed that a product of this shape reaches.

    The last wave of tiles leaves units idle (tile and wave quantization:
    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication). A kernel
    can also take tiles of half the width or a quarter, so the best of these counts.
    """
    of = hardware.products
    filled = 0.0
    for split in (1, 2, 4):
        tiles = batch * math.ceil(m / of.tile_m) * math.ceil(n * split / of.tile_n)
        waves = math.ceil(tiles / of.num_units)
        computed = waves * of.num_units * of.tile_m * of.tile_n / split
        # A smaller tile loads more bytes per operation.
        filled = max(filled, batch * m * n / computed * SMALL_TILE[split])
        if of.tile_n == 1:
            break
    return filled * (m / (m + of.half_m)) * (n / (n + of.half_n)) * (k / (k + of.half_k))


# The speed of a tile of that part of the width, relative to a whole tile. Same source.
SMALL_TILE = {1: 1.0, 2: 0.9, 4: 0.75}


@functools.cache
def rule_of(name: str) -> OperatorRule:
    rule = TRANSLATION.get(name)
    if rule is not None:
        return rule
    if name.partition("::")[0] in FREE_NAMESPACES:
        return OperatorRule(FREE)
    if name.startswith(OPTIMIZER_PREFIX):
        return OperatorRule(OPTIMIZER)
    return OperatorRule(MEMORY_BOUND)
