"""Asynchronous tensor parallelism: enable it and report what is active.

It has two backends. Rings are part of the TP styles (ring_product.py). On symmetric memory,
inductor's micro-pipeline pass replaces each all-gather and its product, and each product and its
reduce-scatter, by one fused operator where it can; `Fusions` counts these operators.
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallelize.plan import ParallelPlan, match_modules
from titanlite.parallelize.tensor_parallel.styles import GatherColwise, RingStyle, RowwiseLocal
from titanlite.ranks import settings

GATHER, SCATTER = "all-gather-matmul", "matmul-reduce-scatter"
_FUSED = {
    "fused_all_gather_matmul": GATHER,
    "fused_all_gather_scaled_matmul": GATHER,
    "fused_matmul_reduce_scatter": SCATTER,
    "fused_scaled_matmul_reduce_scatter": SCATTER,
}

LEAST_COMPILED_FLOPS = 100e6
"""Break-even size of a chunk's product in blocks compiled for CPU, if the link is not slow.

With smaller products a ring is slower than a collective (measured, docs/design_parallel.md). In
eager mode a ring is never slower."""


def has_ring_styles(model: nn.Module, plan: ParallelPlan) -> bool:
    """Whether the plan gives any module of `model` a style that has a ring form."""
    return any(
        isinstance(style, RingStyle) and match_modules(model, pattern)
        for pattern, style in plan.tensor_parallel.items()
    )


def describe_rings(rings: Mapping[str, str]) -> str:
    """How many pairs run as rings; `rings` maps module names to the names of their styles."""
    counts = Counter(rings.values())
    num_gathers = counts.pop(GatherColwise.__name__, 0)
    return f"{num_gathers} {GATHER} and {sum(counts.values())} {SCATTER} pairs are rings"


def warn_of_small_chunks(
    model: nn.Module, plan: ParallelPlan, num_ranks: int, num_tokens: int
) -> str:
    """A warning if rings in blocks compiled for CPU are likely slower than collectives, or "".

    `model` is unsharded; the tp ranks process `num_tokens` (sequences times length) at once.
    """
    rows, smallest, least = num_tokens // num_ranks, "", LEAST_COMPILED_FLOPS
    for pattern, style in plan.tensor_parallel.items():
        for name, module in match_modules(model, pattern).items():
            layer: Any = module
            if isinstance(style, GatherColwise):
                weights = [layer.get_submodule(own).weight for own in style.layers]
                num_in, num_out = weights[0].size(1), sum(map(len, weights)) // num_ranks
            elif isinstance(style, RowwiseLocal):
                num_in, num_out = layer.weight.size(1) // num_ranks, layer.weight.size(0)
            else:
                continue
            if (flops := 2 * rows * num_in * num_out) < least:
                smallest, least = f"{name}: {rows} x {num_in} x {num_out}", flops
    return smallest and (
        "warning: parallelism.enable_async_tensor_parallel: compiled for CPU, rings are likely to "
        "take up to 1.1 times as long as collectives here, unless the link is slow: a chunk's "
        f"product ({smallest}) is {least / 1e6:.2g} MFLOP; they pay off from about "
        f"{LEAST_COMPILED_FLOPS / 1e6:.0f} MFLOP"
    )


def enable_symmetric_memory(tp_mesh: DeviceMesh) -> None:
    """Let inductor fuse over `tp_mesh` from now on, and count fusions."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    settings.change(settings.FUSES_PRODUCTS, True)
    settings.change(settings.LAST_PASS, _CountFusions())
    with warnings.catch_warnings():
        # torch 2.13 deprecates this call, but the pass still checks that it was made.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)


class Fusions:
    """Counts the pairs that inductor has fused in graphs compiled since this object was created.

    A graph loaded from the disk cache counts like a newly compiled one.
    """

    def __init__(self) -> None:
        self._before = Counter(counters["inductor"])

    def counts(self) -> dict[str, int]:
        """Pair and pass -> number of fusions."""
        now = counters["inductor"]
        return {
            f"{kind} {way}": now[_counter(kind, way)] - self._before[_counter(kind, way)]
            for kind in (GATHER, SCATTER)
            for way in ("forward", "backward")
        }

    def describe(self) -> str:
        """One line, such as `2 all-gather-matmul (forward), ...`."""
        listed = ", ".join(f"{count} {what}" for what, count in self.counts().items())
        return f"pairs fused on symmetric memory in the graphs that equal blocks share: {listed}"

    def require(self) -> str:
        """A warning of the pairs of which inductor has fused none, so that they do not overlap."""
        missing = ", no ".join(what for what, count in self.counts().items() if not count)
        return missing and (
            f"parallelism.enable_async_tensor_parallel: inductor fused no {missing}, so these wait "
            'for communication; to overlap all, set async_tensor_parallel_backend = "ring"'
        )


class _CountFusions(CustomGraphPass):
    """Counts fused operators in a graph after inductor's passes.

    The counts are kept in inductor's own counters: it stores them with a compiled graph, and adds
    them again when it loads the graph from disk.
    """

    def __call__(self, graph: fx.Graph) -> None:
        tangents = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name]
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            kind = _FUSED.get("" if schema is None else schema.name.removeprefix("symm_mem::"))
            if kind is not None:
                counters["inductor"][_counter(kind, "backward" if tangents else "forward")] += 1

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _counter(kind: str, way: str) -> str:
    return f"titanlite: {kind}, {way}"
