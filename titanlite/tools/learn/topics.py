"""The topics of parallel training: a question, a formula, and its number simulated and measured.

Each topic computes the formula from the sizes of a small job, simulates the same number (on
simulated GPUs, or by tracing the job in a fake world), and measures it: counted on four real
processes, or timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING

from titanlite.models.image_transformer.config import ImageTransformerConfig
from titanlite.tools.learn import jobs, processes
from titanlite.tools.learn.ladder.rungs import RUNGS, run_rung
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Operator, Site
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.simulate.collectives import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from titanlite.tools.simulate.gpu import ETHERNET, GPU, Cluster
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.schemes import Workload, run_scheme
from titanlite.tools.simulate.train_step import StepWorkload

if TYPE_CHECKING:
    from titanlite.tools.lab import VirtualCluster

WORD = 4  # bytes of a float32


@dataclass(frozen=True)
class Numbers:
    """The number of a topic in `unit`, three times, and what the job or program is."""

    formula: float
    simulated: float
    measured: float
    unit: str
    of: str


@dataclass(frozen=True)
class Topic:
    """A topic: `formula` is text, `run` finds the numbers.

    `jobs` are those of jobs.py that it needs. `page` is where the topic is explained.
    """

    title: str
    question: str
    formula: str
    run: Callable[[Runs], Numbers]
    page: str
    jobs: tuple[str, ...] = ()


class Runs(ExitStack):
    """Runs what topics need, each at most once; close it to end its processes."""

    def __init__(self, job_names: tuple[str, ...]) -> None:
        super().__init__()
        self._names = tuple(dict.fromkeys(job_names))

    @cached_property
    def measured(self) -> Mapping[str, list[jobs.Figures]]:
        """The figures of each rank of the jobs."""
        return jobs.measured(self._names)

    @cached_property
    def cluster(self) -> VirtualCluster:
        """Four processes of the lab, which use ring collectives."""
        from titanlite.tools.lab import Mesh, VirtualCluster

        mesh = Mesh(rank=processes.NUM_RANKS)
        return self.enter_context(VirtualCluster(mesh, algorithm="ring"))


def _sent(
    runs: Runs,
    formula: float,
    job: str,
    *kinds: str,
    of: str,
    axis: str | None = None,
    ranks: Sequence[int] = (0,),
) -> Numbers:
    """The bytes that a rank of a job sends in `kinds`: a mean of planned `ranks`, and of all."""
    planned, measured = (
        mean(rank.sent_by(*kinds, axis=axis) for rank in each)
        for each in ([jobs.planned(job, rank) for rank in ranks], runs.measured[job])
    )
    return Numbers(formula, planned, measured, "bytes", of)


def _model() -> ImageTransformerConfig:
    from titanlite.models.image_transformer.config import FLAVORS

    return FLAVORS["debug"]


# Collectives

SUMMED_BYTES = 1 << 20


def _summed(runs: Runs, program: Callable[[GPU], object], *collectives: str) -> Numbers:
    """What a rank sends to sum a tensor: simulated, its time, if a unit takes one second."""
    n = processes.NUM_RANKS
    cluster = Cluster(n, Network(Link(0, 1)))
    cluster.run(program)
    return Numbers(
        2 * (n - 1) / n * SUMMED_BYTES,
        float(cluster.gpus[0].time_in("send")),
        processes.sent_bytes(runs.cluster, *collectives, num_bytes=SUMMED_BYTES),
        "bytes",
        "1 MiB on 4 ranks",
    )


def _collectives(runs: Runs) -> Numbers:
    def program(gpu: GPU) -> None:
        n = processes.NUM_RANKS
        ring_all_reduce(gpu, range(n), "all-reduce", SUMMED_BYTES, [1] * n)

    return _summed(runs, program, "all_reduce")


def _sequence(runs: Runs) -> Numbers:
    def program(gpu: GPU) -> None:
        n = processes.NUM_RANKS
        own = ring_reduce_scatter(gpu, range(n), "reduce-scatter", SUMMED_BYTES, [[1]] * n)
        ring_all_gather(gpu, range(n), "all-gather", SUMMED_BYTES / n, own)

    return _summed(runs, program, "reduce_scatter", "all_gather")


# Data parallelism


def _data_parallel(runs: Runs) -> Numbers:
    work, link, n = StepWorkload(), ETHERNET.between, processes.NUM_RANKS
    rung = next(rung for rung in RUNGS if rung.name == "1D DP, ring")
    row, _ = run_rung(rung)
    units = float(work.gradient_units)
    latency, per_unit = float(link.latency_seconds), float(link.seconds_per_unit)
    compute = work.items / n * float(work.compute_units_per_item) * 0.1
    return Numbers(
        compute + 2 * (n - 1) * (latency + units / n * per_unit),
        row.seconds,
        processes.data_parallel_seconds(runs.cluster, compute, units, latency, per_unit),
        "s",
        f'"1D DP, ring"; measured at 1/{processes.SCALE}, times {processes.SCALE}',
    )


def _sharded_bytes() -> int:
    """The bytes of FSDP's parameters, each with its rows filled up to a multiple of the ranks."""
    n = jobs.NUM_RANKS
    shapes = jobs.parameter_shapes("fsdp")
    return WORD * sum(math.ceil(rows / n) * n * math.prod(rest) for rows, *rest in shapes)


def _zero(runs: Runs) -> Numbers:
    planned, measured = (
        sum(figures.held[what] for what in ("parameters", "gradients", "optimizer state"))
        for figures in (jobs.planned("fsdp"), runs.measured["fsdp"][0])
    )
    formula = 4 * _sharded_bytes() / jobs.NUM_RANKS
    return Numbers(formula, planned, measured, "bytes", "FSDP 4, rank 0")


def _fsdp(runs: Runs) -> Numbers:
    sent = 3 * (jobs.NUM_RANKS - 1) / jobs.NUM_RANKS * _sharded_bytes()
    of = "FSDP 4, resharded after forward"
    return _sent(runs, sent, "fsdp", "all_gather", "reduce_scatter", of=of)


# Splitting a sample


def _tensor_parallel(runs: Runs) -> Numbers:
    model, n = _model(), jobs.NUM_RANKS
    tokens = jobs.GLOBAL_BATCH_SIZE * model.seq_len
    sent = 2 * (n - 1) / n * (4 * model.num_layers + 1) * WORD * tokens * model.dim
    of = f"TP 4, {model.num_layers} blocks"
    return _sent(runs, sent, "tp", "all_gather", "reduce_scatter", of=of, axis="tp")


def _context_parallel(runs: Runs) -> Numbers:
    model, n = _model(), jobs.NUM_RANKS
    tokens = jobs.GLOBAL_BATCH_SIZE * model.seq_len // n
    keys_and_values = 2 * WORD * tokens * model.kv_heads * model.head_dim
    # Forward the keys and values, backward both again with their gradients; a causal mask lets a
    # rank of the layout "headtail" leave out a quarter.
    sent = 3 / 4 * (n - 1) * 3 * keys_and_values * model.num_layers
    of = f"CP 4, {model.num_layers} blocks, mean of the ranks"
    return _sent(runs, sent, "cp", "send", of=of, axis="cp", ranks=range(n))


NUM_MICROBATCHES = 8
FORWARD_SECONDS = 0.1


def _pipeline(runs: Runs) -> Numbers:
    n, m = processes.NUM_RANKS, NUM_MICROBATCHES
    simulation = run_scheme("1F1B", Workload(workers=n, batches=m))
    bubble, _ = processes.pipeline_step(runs.cluster, "1F1B", m, FORWARD_SECONDS)
    return Numbers(
        100 * (n - 1) / (m + n - 1),
        100 * float(simulation.bubble_fraction),
        100 * bubble,
        "%",
        f"1F1B, {n} stages, {m} microbatches",
    )


def _schedules(runs: Runs) -> Numbers:
    n, m = processes.NUM_RANKS, NUM_MICROBATCHES
    simulation = run_scheme("1F1B", Workload(workers=n, batches=m))
    _, most_kept = processes.pipeline_step(runs.cluster, "1F1B", m, FORWARD_SECONDS / 10)
    of = f"1F1B, {n} stages; GPipe would keep all {m}"
    return Numbers(n, max(simulation.peak_activations), most_kept, "microbatches", of)


def _expert_parallel(runs: Runs) -> Numbers:
    from titanlite.models.llama3.config import FLAVORS

    model, n = FLAVORS["moe_debug"], jobs.NUM_RANKS
    tokens = jobs.GLOBAL_BATCH_SIZE // n * jobs.EXPERT_TOKENS
    rows = 4 * tokens * model.moe_top_k * model.dim * WORD
    layers = model.n_layers - model.moe_n_dense_layers
    sent = (n - 1) / n * layers * (8 * model.moe_num_experts + rows)
    of = f"EP 4, {layers} layers of {model.moe_num_experts} experts, mean of the ranks"
    return _sent(runs, sent, "ep", "all_to_all", of=of)


# Compute and memory


def _recomputation(runs: Runs) -> Numbers:
    model = _model()
    # A product has 2 operations per weight and token forward, 4 backward. Attention has 2 products
    # of 2 T D operations per token forward; a flash kernel has 5 backward.
    blocks = sum(math.prod(shape) for shape in _block_weights(model))
    head = model.vocab_size * model.dim
    attention = model.num_layers * 2 * model.seq_len * model.dim
    forward = 2 * blocks + 2 * attention
    step = 3 * 2 * (blocks + head) + 7 * attention
    return Numbers(
        (step + forward) / step,
        jobs.planned("recompute").flops / jobs.planned("ddp").flops,
        runs.measured["recompute"][0].flops / runs.measured["ddp"][0].flops,
        "times the operations",
        f"{model.num_layers} blocks, each recomputed whole",
    )


def _block_weights(model: ImageTransformerConfig) -> list[tuple[int, int]]:
    kv_dim, hidden = model.kv_heads * model.head_dim, model.ffn_hidden_dim
    attention = [(model.dim, model.dim)] * 2 + [(kv_dim, model.dim)] * 2
    return (attention + [(hidden, model.dim)] * 3) * model.num_layers


ROWS, SIDE = 256, 4096  # the weights, 64 MiB, are larger than caches


def _roofline(runs: Runs) -> Numbers:
    del runs
    hardware = load_hardware("cpu")
    cost = Cost(hardware)

    def product_seconds(rows: int) -> float:
        flops, written = 2 * rows * SIDE * SIDE, WORD * rows * SIDE
        read, shape = WORD * SIDE * SIDE + written, (1, rows, SIDE, SIDE)
        place = Site("", "forward")
        return cost.price(Operator("aten::mm", flops, read, written, place, "float32", shape))[0]

    bandwidth = hardware.operators["aten::mm:float32"].bytes_per_second
    assert bandwidth is not None, "the CPU's file has the rate of products"
    return Numbers(
        WORD * hardware.peak("float32") / (2 * bandwidth),
        product_seconds(1) / (product_seconds(ROWS) / ROWS),
        _measured_product_seconds(1) / (_measured_product_seconds(ROWS) / ROWS),
        "rows",
        f"{SIDE} x {SIDE} weights, float32, one thread of this CPU",
    )


def _measured_product_seconds(rows: int) -> float:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weights = torch.randn(rows, SIDE), torch.randn(SIDE, SIDE)
        times = []
        for _ in range(8):
            start = time.thread_time()
            torch.mm(x, weights)
            times.append(time.thread_time() - start)
        return min(times)
    finally:
        torch.set_num_threads(before)


TOPICS = {
    "collectives": Topic(
        "Collectives",
        "How much does each rank send to sum B bytes over n ranks?",
        "2 (n-1)/n B",
        _collectives,
        "lab/2-collectives.md",
    ),
    "dp": Topic(
        "DP",
        "How long is a step whose gradients G are summed after the backward pass?",
        "compute + 2 (n-1) (latency + G / (n bandwidth))",
        _data_parallel,
        "data_parallel.md",
    ),
    "zero": Topic(
        "ZeRO, memory",
        "What do P parameters, gradients and AdamW's moments take on each of n ranks?",
        "16 P / n",
        _zero,
        "fsdp.md",
        ("fsdp",),
    ),
    "fsdp": Topic(
        "FSDP, communication",
        "What does a rank send to gather w P bytes twice and reduce-scatter their gradients?",
        "3 (n-1)/n w P",
        _fsdp,
        "fsdp.md",
        ("fsdp",),
    ),
    "tp": Topic(
        "TP",
        "What does a rank send for L blocks of width D and N tokens?",
        "2 (4 L + 1) (n-1)/n w N D: 4 all-reduces per block, 1 for the output",
        _tensor_parallel,
        "tensor_parallel.md",
        ("tp",),
    ),
    "sp": Topic(
        "SP",
        "What does a rank send if the activations between two products, B bytes, are sharded?",
        "2 (n-1)/n B, as much as without",
        _sequence,
        "tensor_parallel.md",
    ),
    "cp": Topic(
        "CP",
        "What does a rank send around the ring, with K bytes of keys and values in each of L "
        "blocks?",
        "3 x 3/4 (n-1) K L: three times around; headtail sends the 3/4 that a causal mask needs",
        _context_parallel,
        "context_parallel.md",
        ("cp",),
    ),
    "pp": Topic(
        "PP",
        "What fraction of a step is the bubble, with p stages and m microbatches?",
        "(p-1) / (m+p-1)",
        _pipeline,
        "pipeline_parallel.md",
    ),
    "schedules": Topic(
        "PP, schedules",
        "How many microbatches does the first of p stages keep under 1F1B?",
        "p",
        _schedules,
        "pipeline_parallel.md",
    ),
    "ep": Topic(
        "EP",
        "What does a rank send to the experts and back, for N tokens with k of E experts each?",
        "(n-1)/n L (8 E + 4 N k D w): counts, then rows there and back, twice",
        _expert_parallel,
        "expert_parallel.md",
        ("ep",),
    ),
    "recomputation": Topic(
        "Recomputation",
        "How much more is computed if the backward pass repeats the forward pass F?",
        "1 + F / (all operations), about 4/3",
        _recomputation,
        "activation_checkpoint.md",
        ("ddp", "recompute"),
    ),
    "roofline": Topic(
        "Roofline",
        "From how many rows on does a product take longer to compute than to read its weights?",
        "w peak / (2 memory bandwidth)",
        _roofline,
        "plan.md",
    ),
}
