"""GPT models trained with Megatron-LM on A100: published runs, and what is predicted of each.

One block of each model is traced under its tensor parallelism, microbatch and recomputation; the
pipeline, data parallelism and optimizer are composed by formula. The fitted figures of the A100 are
from Korthikanti et al. 2022, table 5 (arXiv 2205.05198); Narayanan et al. 2021, table 1 (arXiv
2104.04473) is predicted with them.

Megatron-LM's elementwise operators are fused and its attention stores its scores. Its dropout is
not traced. Without sequence parallelism each rank computes norms, dropout and residual sums of the
whole sequence, and an all-reduce stands for an all-gather and a reduce-scatter. The number of
stages of a rank is 1 where the paper gives none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from titanlite.config import JobConfig, resolve_job
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Allocation, Communication, Event, Operator, Site, Trace
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.timing import time_events
from titanlite.tools.planner.trace import trace_rank

SEQ_LEN, VOCABULARY = 2048, 51200
BYTES_A_PARAMETER = 28
"""Adam reads a gradient of 2 bytes, and reads and writes three fp32 tensors and a half one."""


@dataclass(frozen=True)
class Shape:
    """A GPT: heads, width and layers."""

    heads: int
    width: int
    layers: int

    @property
    def block_parameters(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    @property
    def table_parameters(self) -> int:
        return (VOCABULARY + SEQ_LEN) * self.width


@dataclass(frozen=True)
class Run:
    """A published run: its name, model, degrees and batch."""

    name: str
    shape: Shape
    gpus: int
    tp: int
    pp: int
    interleave: int
    batch: int
    microbatch: int = 1
    recomputes: bool = True
    """Full recomputation without sequence parallelism; else both are selective and sequence."""

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.dp // self.microbatch

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(pp=self.pp, dp_replicate=self.dp, tp=self.tp)


KORTHIKANTI: list[tuple[Run, float, float]] = [
    # Seconds a step with full recomputation; with sequence parallelism and selective recomputation.
    (Run("22B", Shape(64, 6144, 48), 8, 8, 1, 1, 4, 4), 1.42, 1.10),
    (Run("175B", Shape(96, 12288, 96), 64, 8, 8, 3, 64), 18.13, 13.75),
    (Run("530B", Shape(128, 20480, 105), 280, 8, 35, 3, 280), 49.05, 37.83),
    (Run("1T", Shape(160, 25600, 128), 512, 8, 64, 1, 512), 94.42, 71.49),
]
# GiB of activations: as above, without recomputation; with sequence parallelism and selective
# recomputation (section 6.2 and figure 1 of the same paper).
KORTHIKANTI_ACTIVATIONS = {
    "22B": (59.25, 9.56),
    "175B": (66.84, 12.35),
    "530B": (114.02, 23.08),
    "1T": (131.25, 26.56),
}
NARAYANAN: list[tuple[Run, float]] = [
    # TFLOP/s of a GPU, with those of the recomputation.
    (Run("1.7B", Shape(24, 2304, 24), 32, 1, 1, 1, 512), 137),
    (Run("3.6B", Shape(32, 3072, 30), 64, 2, 1, 1, 512), 138),
    (Run("7.5B", Shape(32, 4096, 36), 128, 4, 1, 1, 512), 142),
    (Run("18.4B", Shape(48, 6144, 40), 256, 8, 1, 1, 1024), 135),
    (Run("39.1B", Shape(64, 8192, 48), 512, 8, 2, 1, 1536), 138),
    (Run("76.1B", Shape(80, 10240, 60), 1024, 8, 4, 1, 1792), 140),
    (Run("145.6B", Shape(96, 12288, 80), 1536, 8, 8, 1, 2304), 148),
    (Run("310.1B", Shape(128, 16384, 96), 1920, 8, 16, 1, 2160), 155),
    (Run("529.6B", Shape(128, 20480, 105), 2520, 8, 35, 1, 2520), 163),
    (Run("1008B", Shape(160, 25600, 128), 3072, 8, 64, 1, 3072), 163),
]
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Pieces:
    """The events of one block, and of everything else but the optimizer, of one microbatch."""

    block: list[Event]
    ends: list[Event]


@cache
def trace_blocks(shape: Shape, tp: int, microbatch: int, recomputes: bool) -> Trace:
    """A step of two blocks."""
    config = JobConfig.from_dict(
        {
            "model": {
                "name": "gpt2",
                "flavor": "tiny",
                "dim": shape.width,
                "n_heads": shape.heads,
                "n_layers": 2,
                "vocab_size": VOCABULARY,
                "max_seq_len": SEQ_LEN,
            },
            "training": {
                "dataset": "synthetic",
                "seq_len": SEQ_LEN,
                "local_batch_size": microbatch,
                # As in Megatron-LM, no cast of the weights in each microbatch.
                "global_batch_size": microbatch,
                "dtype": "bfloat16",
            },
            "parallelism": {"tensor_parallel_degree": tp, "data_parallel_shard_degree": 1},
            "activation_checkpoint": {"mode": "full" if recomputes else "none"},
        }
    )
    return trace_rank(resolve_job(config, None), 0)


@cache
def trace_pieces(shape: Shape, tp: int, microbatch: int, recomputes: bool) -> Pieces:
    """The second of two traced blocks."""
    block: list[Event] = []
    ends: list[Event] = []
    for event in trace_blocks(shape, tp, microbatch, recomputes).events:
        place: Site | None = getattr(event, "place", None)
        if isinstance(event, Allocation) or (place is not None and place.phase == "optimizer"):
            continue
        if isinstance(event, Operator) and event.name == "aten::cat":
            # Joins the weights of several products, which Megatron-LM stores as one.
            continue
        if place is None:
            # A wait belongs to what was issued before it.
            block.append(event)
            ends.append(event)
        elif _is_in_block(place):
            block.append(event)
        elif not place.module.startswith("layers."):
            ends.append(event)
    return Pieces(block, ends)


def _is_in_block(place: Site) -> bool:
    return f"{place.module}.".startswith("layers.1.")


def _is_of_sequence(place: Site) -> bool:
    """Whether a tensor of this module has all features: norms and residual sums."""
    leaf = place.module.rsplit(".", 1)[-1]
    return leaf.endswith("_norm") or leaf.isdigit()


def without_sequence_parallelism(events: Iterable[Event], tp: int) -> list[Event]:
    """Norms and residual sums of the whole sequence on each rank."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Operator) and not event.flops and _is_of_sequence(event.place):
            event = replace(
                event, bytes_read=event.bytes_read * tp, bytes_written=event.bytes_written * tp
            )
        found.append(event)
    return found


def step_seconds(run: Run, hardware: Hardware) -> float:
    """The seconds of a step: m microbatches on the slowest stage, and the bubble of the others."""
    attention = "unfused" if run.recomputes else "unfused, recomputed"
    cost = Cost(
        hardware,
        run.dims,
        is_compiled=True,
        attention=attention,
        head_dim=run.shape.width // run.shape.heads,
    )
    pieces = trace_pieces(run.shape, run.tp, run.microbatch, run.recomputes)
    block = pieces.block
    if run.recomputes and run.tp > 1:
        block = without_sequence_parallelism(block, run.tp)
    block_seconds = time_events(block, cost).seconds
    ends = time_events(pieces.ends, cost).seconds
    stage = block_seconds * run.shape.layers / run.pp
    message = 0.0
    if run.pp > 1:
        # Forward and backward of each chunk wait for a message, of the sequence's shard.
        place = Site("", "forward")
        num_bytes = 2 * SEQ_LEN * run.microbatch * run.shape.width // run.tp
        one = Communication("send", "pp", num_bytes, run.pp, place, 1, peer=1)
        message = 2 * run.interleave * cost.communication(one).seconds
    parameters = run.shape.block_parameters * run.shape.layers // run.pp
    parameters = (parameters + run.shape.table_parameters) // run.tp
    share = hardware.memory.share(1e9) * hardware.memory.bytes_per_second
    optimizer = BYTES_A_PARAMETER * parameters / share
    reduction = 0.0
    if run.dp > 1:
        place = Site("", "backward")
        one = Communication("all_reduce", "dp_replicate", 2 * parameters, run.dp, place, 1)
        reduction = cost.communication(one).seconds
    slowest, mean = stage + message + ends, stage + message + ends / run.pp
    bubble = (run.pp - 1) / run.interleave * mean
    return run.num_microbatches * slowest + bubble + optimizer + reduction


def flops(run: Run) -> float:
    """The operations of a step with full recomputation (Narayanan et al. 2021, equation 3)."""
    width, layers = run.shape.width, run.shape.layers
    lengths = 1 + SEQ_LEN / (6 * width) + VOCABULARY / (16 * layers * width)
    return 96 * run.batch * SEQ_LEN * layers * width**2 * lengths


def activation_bytes(run: Run) -> float:
    """Inputs of the blocks of all microbatches in flight, and one block's own activations."""
    tokens = SEQ_LEN * run.microbatch
    inputs = 2 * tokens * run.shape.width * run.shape.layers / run.pp * run.pp
    scores = 5 * run.shape.heads * SEQ_LEN / run.shape.width
    block = tokens * run.shape.width * (10 + (24 + scores) / run.tp)
    return inputs + block


def fits(run: Run, hardware: Hardware) -> bool:
    """Whether a rank's parameters, gradients, Adam's states and activations fit."""
    parameters = run.shape.block_parameters * run.shape.layers / run.pp
    parameters = (parameters + run.shape.table_parameters) / run.tp
    return 18 * parameters + activation_bytes(run) < 0.92 * hardware.memory.num_bytes


def predict_narayanan(run: Run, hardware: Hardware) -> tuple[Run, float]:
    """The microbatch that is predicted to be the fastest, and TFLOP/s of a GPU."""
    options = [replace(run, microbatch=size) for size in MICROBATCHES]
    options = [
        one for one in options if one.batch // one.dp % one.microbatch == 0 and fits(one, hardware)
    ]
    best = min(options, key=lambda one: step_seconds(one, hardware))
    return best, flops(best) / step_seconds(best, hardware) / best.gpus / 1e12


def kept_activation_bytes(run: Run, *, saves_memory: bool) -> float:
    """The activations of a rank of the first stage, at their most, without full recomputation.

    `saves_memory`: with sequence parallelism and selective recomputation (Korthikanti et al. 2022,
    sections 4 and 5). The traced tensors are those of a block with both, but that Megatron-LM
    gathers an input again in the backward pass and does not copy weights to join them. Dropout's
    masks, one byte each, and the scores of stored attention are added.
    """
    trace = trace_blocks(run.shape, run.tp, run.microbatch, recomputes=False)
    tokens, share = SEQ_LEN * run.microbatch, run.tp if saves_memory else 1
    block = 2.0 * tokens * run.shape.width / share
    for at, event in enumerate(trace.events):
        if not isinstance(event, Allocation) or not event.num_bytes:
            continue
        is_kept = trace.category_of[event.block] == "activations"
        if not (is_kept and event.place.phase == "forward" and _is_in_block(event.place)):
            continue
        maker = next(one for one in trace.events[at:] if not isinstance(one, Allocation))
        if isinstance(maker, Operator) and maker.name == "aten::cat":
            continue
        whole = event.num_bytes
        if _is_of_sequence(event.place):
            whole *= run.tp // share
        elif isinstance(maker, Communication):
            whole //= share
        block += whole
    if not saves_memory:
        # The softmax and its dropout, two bytes each, and dropout's mask.
        block += 5 * run.shape.heads * SEQ_LEN * tokens / run.tp
    # The first stage starts more microbatches than there are stages if it has several.
    early = 1 + (run.pp - 1) / (run.pp * run.interleave) if run.interleave > 1 else 1.0
    return block * run.shape.layers * early


def korthikanti_runs() -> list[tuple[Run, float]]:
    """The eight runs, with their seconds."""
    rows: list[tuple[Run, float]] = []
    for run, full, selective in KORTHIKANTI:
        rows += [(run, full), (replace(run, recomputes=False), selective)]
    return rows
