"""Published step times against predicted ones.

    python tests/benchmarks/published.py [--fit]

One block of each model is traced under its tensor parallelism, microbatch and recomputation; the
pipeline, data parallelism and optimizer are composed by formula. The fitted figures of the A100 are
from Korthikanti et al. 2022, table 5 (arXiv 2205.05198); Narayanan et al. 2021, table 1 (arXiv
2104.04473) is predicted with them.

TorchTitan's Llama 3 8B in bfloat16 gives the two fitted figures of its H100; its 70B and Llama 3's
405B (arXiv 2407.21783, table 4) are predicted. These are composed by titanlite.plan itself, from
eager traces whose elementwise operators are fused. Llama 3's stages are taken to have one block
(the paper gives no number), its all-gather for context parallelism is titanlite's, and TFLOP/s
count attention as PaLM does, without causal masking.

The two older papers ran Megatron-LM, whose elementwise operators are fused and whose attention
stores its scores. Its dropout is not traced. Without sequence parallelism each rank computes norms,
dropout and residual sums of the whole sequence, and an all-reduce stands for an all-gather and a
reduce-scatter. The number of stages of a rank is 1 where the paper gives none.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from titanlite.config import ResolvedJob, make_config, resolve_job
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.plan.cost import Cost
from titanlite.plan.events import Communication, Event, Memory, Operator, Place
from titanlite.plan.hardware import Hardware, load_hardware
from titanlite.plan.planning import PIECES, plan_job
from titanlite.plan.timing import time_events
from titanlite.plan.trace import trace_rank

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


@dataclass(frozen=True)
class Llama:
    """A published run of Llama 3: tokens/s of a GPU, or TFLOP/s if `is_tflops`."""

    name: str
    hardware: str
    flavor: str
    parallelism: dict[str, Any]
    local_batch: int
    recomputes: str
    is_compiled: bool
    published: float
    seq_len: int = 8192
    is_tflops: bool = False

    def resolve(self) -> ResolvedJob:
        degrees = self.parallelism
        dp = degrees["data_parallel_shard_degree"]
        return resolve_job(
            make_config(
                {
                    "model": {"name": "llama3", "flavor": self.flavor},
                    "training": {
                        "dataset": "synthetic",
                        "seq_len": self.seq_len,
                        "local_batch_size": self.local_batch,
                        "global_batch_size": self.local_batch * dp,
                        "mixed_precision_param": "bfloat16",
                        "mixed_precision_reduce": "float32",
                    },
                    "parallelism": degrees,
                    "activation_checkpoint": {
                        "mode": self.recomputes,
                        **({"selective_ac_option": "op"} if self.recomputes == "selective" else {}),
                    },
                }
            ),
            None,
        )


def _fsdp(shards: int, tp: int = 1) -> dict[str, Any]:
    return {"data_parallel_shard_degree": shards, "tensor_parallel_degree": tp}


def _llama_405b(shards: int, cp: int = 1) -> dict[str, Any]:
    return {
        **_fsdp(shards, 8),
        "context_parallel_degree": cp,
        "context_parallel_rotate_method": "allgather",
        "pipeline_parallel_degree": 16,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_layers_per_stage": 1,
    }


TITAN = "h100_96gb"
LLAMA_FITTED = [
    Llama("8B, 8 GPUs", TITAN, "8B", _fsdp(8), 2, "selective", False, 5762),
    Llama("8B, 8 GPUs, compiled", TITAN, "8B", _fsdp(8), 2, "selective", True, 6667),
    Llama("8B, 128 GPUs", TITAN, "8B", _fsdp(128), 2, "selective", False, 5605),
    Llama("8B, 128 GPUs, compiled", TITAN, "8B", _fsdp(128), 2, "selective", True, 6514),
]
LLAMA_PREDICTED = [
    Llama("70B, 256 GPUs, compiled", TITAN, "70B", _fsdp(32, 8), 16, "full", True, 597.3),
    Llama("405B, 8,192 GPUs", "h100", "405B", _llama_405b(64), 32, "none", True, 430, 8192, True),
    Llama("405B, 16,384 GPUs", "h100", "405B", _llama_405b(128), 16, "none", True, 400, 8192, True),
    Llama(
        *("405B, 16,384 GPUs, CP 16", "h100", "405B", _llama_405b(8, 16), 16, "none", True, 380),
        *(131072, True),
    ),
]


def predict_llama(row: Llama, hardware: Hardware | None = None) -> float:
    """Tokens/s or TFLOP/s of a GPU, as the row gives."""
    hardware = hardware or load_hardware(row.hardware)
    plan = plan_job(row.resolve(), hardware, is_compiled=row.is_compiled, method=PIECES)
    assert plan.prediction is not None
    step = plan.prediction.step
    if not row.is_tflops:
        return step.tokens_per_second
    assert step.mfu is not None
    return step.mfu * hardware.peak("bfloat16") / 1e12


@cache
def trace_pieces(shape: Shape, tp: int, microbatch: int, recomputes: bool) -> Pieces:
    """Trace two blocks and take the second."""
    config = make_config(
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
    block: list[Event] = []
    ends: list[Event] = []
    for event in trace_rank(resolve_job(config, None), 0).events:
        place: Place | None = getattr(event, "place", None)
        if isinstance(event, Memory) or (place is not None and place.phase == "optimizer"):
            continue
        if isinstance(event, Operator) and event.name == "aten::cat":
            # Joins the weights of several products, which Megatron-LM stores as one.
            continue
        if place is None:
            # A wait belongs to what was issued before it.
            block.append(event)
            ends.append(event)
        elif f"{place.module}.".startswith("layers.1."):
            block.append(event)
        elif not place.module.startswith("layers."):
            ends.append(event)
    return Pieces(block, ends)


def without_sequence_parallelism(events: Iterable[Event], tp: int) -> list[Event]:
    """Norms and residual sums of the whole sequence on each rank."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Operator) and not event.flops:
            leaf = event.place.module.rsplit(".", 1)[-1]
            if leaf.endswith("_norm") or leaf.isdigit():
                event = replace(
                    event,
                    bytes_read=event.bytes_read * tp,
                    bytes_written=event.bytes_written * tp,
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
        place = Place("", "forward")
        num_bytes = 2 * SEQ_LEN * run.microbatch * run.shape.width // run.tp
        one = Communication("send", "pp", num_bytes, run.pp, place, 1, peer=1)
        message = 2 * run.interleave * cost.communication(one).seconds
    parameters = run.shape.block_parameters * run.shape.layers // run.pp
    parameters = (parameters + run.shape.table_parameters) // run.tp
    share = hardware.memory.share(1e9) * hardware.memory.bytes_per_second
    optimizer = BYTES_A_PARAMETER * parameters / share
    reduction = 0.0
    if run.dp > 1:
        place = Place("", "backward")
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


def korthikanti_runs() -> list[tuple[Run, float]]:
    """The eight runs, with their seconds."""
    rows: list[tuple[Run, float]] = []
    for run, full, selective in KORTHIKANTI:
        rows += [(run, full), (replace(run, recomputes=False), selective)]
    return rows


# The figures of the A100 that are fitted, with their bounds.
A100_FIGURES = {
    "products.share": (0.6, 1.0),
    "memory.share": (0.4, 0.95),
    "node.share": (0.4, 0.95),
}


def with_figures(hardware: Hardware, figures: dict[str, float]) -> Hardware:
    """The hardware with other figures; a curve is scaled to reach the figure."""
    for key, value in figures.items():
        section, name = key.split(".")
        of: Any = getattr(hardware, section)
        old = getattr(of, name)
        new: Any = value
        if hasattr(old, "points"):
            scale = value / old.points[-1][1]
            new = replace(old, points=tuple((x, y * scale) for x, y in old.points))
        hardware = replace(hardware, **{section: replace(of, **{name: new})})
    return hardware


LLAMA_FIGURES = {"products.share": (0.3, 1.0), "memory.share": (0.4, 0.95)}


def fit(
    hardware: Hardware,
    bounds: dict[str, tuple[float, float]],
    ratios: Callable[[Hardware], list[float]],
) -> dict[str, float]:
    """The figures with the least squares of the logarithms of predicted over published."""
    import numpy as np
    from scipy.optimize import least_squares

    keys = list(bounds)
    low, high = (np.array([bounds[key][side] for key in keys]) for side in (0, 1))

    def errors(values: Any) -> Any:
        figures = dict(zip(keys, map(float, values), strict=True))
        return np.log(ratios(with_figures(hardware, figures)))

    start = low + 0.6 * (high - low)
    found = least_squares(errors, start, bounds=(low, high), x_scale=high - low, diff_step=1e-3)
    return dict(zip(keys, map(float, found.x), strict=True))


def show(title: str, rows: Iterable[tuple[str, float, float]]) -> None:
    """A table of (name, published, predicted)."""
    print(title)
    errors = []
    for name, published, predicted in rows:
        errors.append(abs(predicted / published - 1))
        print(f"  {name:28}{published:9.5g}{predicted:9.4g}{predicted / published - 1:+8.1%}")
    print(f"  mean error {statistics.fmean(errors):.1%}, worst {max(errors):.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the figures again")
    arguments = parser.parse_args()
    a100, titan = load_hardware("a100"), load_hardware(TITAN)
    runs = korthikanti_runs()
    if arguments.fit:
        of_a100 = fit(a100, A100_FIGURES, lambda of: [step_seconds(run, of) / s for run, s in runs])
        of_titan = fit(
            titan,
            LLAMA_FIGURES,
            lambda of: [predict_llama(row, of) / row.published for row in LLAMA_FITTED],
        )
        print(of_a100, of_titan)
        a100, titan = with_figures(a100, of_a100), with_figures(titan, of_titan)
    show(
        "A100, fitted: Korthikanti et al. 2022, table 5, seconds a step",
        (
            (f"{run.name}, {'full' if run.recomputes else 'selective'}", s, step_seconds(run, a100))
            for run, s in runs
        ),
    )
    narayanan = ((predict_narayanan(run, a100), measured) for run, measured in NARAYANAN)
    show(
        "A100, predicted: Narayanan et al. 2021, table 1, TFLOP/s of a GPU",
        (
            (f"{best.name}, microbatch {best.microbatch}", measured, predicted)
            for (best, predicted), measured in narayanan
        ),
    )
    show(
        "H100, fitted: TorchTitan, tokens/s of a GPU",
        ((row.name, row.published, predict_llama(row, titan)) for row in LLAMA_FITTED),
    )
    show(
        "H100, predicted: TorchTitan, tokens/s; Llama 3, TFLOP/s of a GPU",
        ((row.name, row.published, predict_llama(row)) for row in LLAMA_PREDICTED),
    )


if __name__ == "__main__":
    main()
