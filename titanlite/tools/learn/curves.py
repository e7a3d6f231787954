"""The pictures of docs/learn.md: when communication is the limit, and what fills memory.

Lines come from formulas and the data sheets in tools/planner/hardware/. Points come from the
simulated GPUs (`ladder`) or from the planner (`zero`, `recomputation`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.tools.figures.chart import ChartAxis, ReferenceLine, Series, draw_chart
from titanlite.tools.learn.jobs import most_bytes
from titanlite.tools.learn.ladder.rungs import RUNGS, run_rung
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.planning import plan_job
from titanlite.tools.simulate.train_step import StepWorkload

PARAMETERS = 8.03e9  # of Llama 3 8B
DIM, HIDDEN, KV_DIM = 4096, 14336, 1024
WORD = 2  # bytes of a bfloat16
GIGA = 1e9
_tokens = "{:,.0f}".format


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms"


def data_parallel_limit(hardware: Hardware, bytes_per_second: float) -> float:
    """The tokens of a rank above which compute takes longer than the sum of gradients.

    A token takes 6 operations per parameter. A ring sends nearly 2 times the gradients, of WORD
    bytes per parameter.
    """
    return 2 * WORD * hardware.peak("bfloat16") / (6 * bytes_per_second)


def dp() -> str:
    """Seconds of compute and of gradients, by the tokens of a GPU."""
    h100 = load_hardware("h100")
    peak = h100.peak("bfloat16")
    tokens = [2.0**power for power in range(7, 18)]
    compute = [(t, 6 * PARAMETERS * t / peak) for t in tokens]
    series = [Series("compute: 6 P tokens / peak", compute)]
    markers = []
    links = {"NVLink": h100.node.bytes_per_second, "400 Gb/s": h100.fabric.bytes_per_second}
    for color, (link, rate) in enumerate(links.items(), 1):
        name, seconds = f"gradients over {link}: 2 w P / bandwidth", 2 * WORD * PARAMETERS / rate
        ends = [(tokens[0], seconds), (tokens[-1], seconds)]
        series.append(Series(name, ends, "dashed", color))
        limit = data_parallel_limit(h100, rate)
        markers.append(ReferenceLine(f"equal at {limit:,.0f}", x=limit))
    return draw_chart(
        "Data parallelism: compute or communication?",
        series,
        ChartAxis("tokens per GPU and step", is_log=True, show=_tokens, ticks=tokens[::2]),
        ChartAxis("time per step", is_log=True, show=_seconds),
        caption="Llama 3 8B (P parameters), bfloat16 (w = 2 bytes), H100 at the data sheet's peaks",
        markers=markers,
    )


def ladder() -> str:
    """Seconds of a step of the simulated GPUs, by the items of a rank."""
    counts = (1, 2, 3, 4, 6, 8, 12)
    found: dict[str, list[tuple[float, float]]] = {}
    for name in ("1D DP, ring", "1D DP, overlap"):
        rung = next(rung for rung in RUNGS if rung.name == name)
        found[name] = [(n, run_rung(rung, StepWorkload(items=4 * n))[0].seconds) for n in counts]
    compute = [(float(n), 2.0 * n) for n in (1, 12)]
    summed = [(x, y + 7.8) for x, y in compute]
    during = "simulated, summed during the backward pass"
    return draw_chart(
        "Data parallelism on the simulated GPUs",
        [
            Series("compute: 2 s per item", compute),
            Series("with the sum of gradients: + 7.8 s", summed, color=1),
            Series("simulated, then summed", found["1D DP, ring"], "points", 1),
            Series(during, found["1D DP, overlap"], "points", 2),
        ],
        ChartAxis("items per rank, of 4 ranks"),
        ChartAxis("seconds per step"),
        caption="Lines: formulas. Points: titanlite simulate ladder",
        markers=[ReferenceLine("3.9 items: compute = communication", x=3.9)],
    )


def tensor_parallel_seconds(hardware: Hardware, degree: int, tokens: int) -> tuple[float, float]:
    """Seconds of a Llama 8B block's products on a rank, and of its four collectives (NVLink)."""
    weights = 2 * DIM * DIM + 2 * DIM * KV_DIM + 3 * DIM * HIDDEN
    compute = 6 * tokens * weights / degree / hardware.peak("bfloat16")
    sent = 4 * 2 * (degree - 1) / degree * WORD * tokens * DIM
    rate = hardware.node if degree <= hardware.node.num_ranks else hardware.fabric
    return compute, sent / rate.bytes_per_second


def tp() -> str:
    """Seconds of a block's products and collectives, by the degree of tensor parallelism."""
    h100, tokens = load_hardware("h100"), 8192
    degrees = [1, 2, 4, 8, 16, 32]
    times = {degree: tensor_parallel_seconds(h100, degree, tokens) for degree in degrees}
    compute = [(float(n), seconds) for n, (seconds, _) in times.items()]
    sent = [(float(n), seconds) for n, (_, seconds) in times.items() if n > 1]
    return draw_chart(
        "Tensor parallelism: compute or communication?",
        [
            Series("products: 6 tokens weights / (n peak)", compute),
            Series("collectives: 8 (n-1)/n w tokens D / bandwidth", sent, "dashed", 1),
        ],
        ChartAxis("tp degree n", is_log=True, ticks=degrees),
        ChartAxis("time per block, forward and backward", is_log=True, show=_seconds),
        caption="Llama 3 8B (width D), 8,192 tokens, w = 2 bytes, H100: NVLink to 8, then 400 Gb/s",
        markers=[ReferenceLine("a node", x=8)],
    )


ZERO_BYTES: dict[str, Callable[[float], float]] = {
    "DDP": lambda n: 16,
    "ZeRO 1: optimizer state / n": lambda n: 8 + 8 / n,
    "ZeRO 2: also gradients / n": lambda n: 4 + 12 / n,
    "ZeRO 3, FSDP: also parameters / n": lambda n: 16 / n,
}
"""Bytes per parameter of a rank, in float32: parameter 4, gradient 4, AdamW's moments 8."""


def planned_states(shards: int) -> float:
    """Bytes of parameters, gradients and optimizer state of a rank, as planned for FSDP."""
    job = _llama_job("8B", 2048, shards, parallelism={"data_parallel_shard_degree": shards})
    held = plan_job(job).ranks[0].held
    return held["parameters"] * 2 + held["optimizer state"]


def _llama_job(
    flavor: str, tokens: int, num_ranks: int, **sections: Mapping[str, Any]
) -> ResolvedJob:
    """A job of Llama 3 with one sequence of `tokens` on each rank."""
    training = {"dataset": "synthetic", "seq_len": tokens, "local_batch_size": 1}
    model = {"name": "llama3", "flavor": flavor}
    return resolve_job(
        JobConfig.from_dict({"model": model, "training": training, **sections}), num_ranks
    )


def zero() -> str:
    """Bytes of weights, gradients and optimizer state of a GPU, by the number of GPUs."""
    ranks = [2.0**power for power in range(11)]
    series = [
        Series(name, [(n, PARAMETERS * each(n)) for n in ranks], color=color)
        for color, (name, each) in enumerate(ZERO_BYTES.items())
    ]
    points = [(float(n), planned_states(n)) for n in (8, 64, 512)]
    series.append(Series("FSDP as planned: titanlite plan", points, "points", 3))
    return draw_chart(
        "Memory per GPU",
        series,
        ChartAxis("ranks n", is_log=True, show=_tokens, ticks=ranks[::2]),
        ChartAxis(
            "memory per rank, without activations",
            is_log=True,
            show=lambda value: f"{value / GIGA:g} GB",
        ),
        caption="Llama 3 8B in float32 with AdamW: 16 bytes per parameter",
        markers=[ReferenceLine("80 GB", y=80 * GIGA)],
    )


def roofline() -> str:
    """The rate of a product by its rows: the memory's bandwidth, then the peak."""
    rows = [2.0**power for power in range(13)]
    series = []
    for color, name in enumerate(("a100", "h100", "b200")):
        hardware = load_hardware(name)
        peak, rate = hardware.peak("bfloat16"), hardware.memory.bytes_per_second
        # Reading k n weights of WORD bytes for 2 m k n operations.
        limit = WORD * peak / (2 * rate)
        points = [(m, min(peak, 2 * m / WORD * rate)) for m in sorted([*rows, limit])]
        text = f"{hardware.name}: from {limit:,.0f} rows on, compute is the limit"
        series.append(Series(text, points, color=color))
    markers = [
        ReferenceLine("one token: decoding", x=1),
        ReferenceLine("4,096 tokens: training", x=4096),
    ]
    return draw_chart(
        "Roofline of a product with large weights",
        series,
        ChartAxis("rows of the input (tokens)", is_log=True, show=_tokens, ticks=rows[::2]),
        ChartAxis("TFLOP/s", is_log=True, show=lambda value: f"{value / 1e12:,.0f}"),
        caption="bfloat16, at the peaks of the data sheets",
        markers=markers,
    )


MODES = {
    "none": "all kept",
    "op": "selective: products and attention kept",
    "full": "full: inputs of blocks kept",
}


def planned_activations(mode: str, tokens: int) -> int:
    """The most bytes of activations in a step, as planned."""
    from titanlite.tools.planner.trace import trace_rank

    section = {"mode": "selective", "selective_ac_option": "op"} if mode == "op" else {"mode": mode}
    job = _llama_job("debugmodel", tokens, 1, activation_checkpoint=section)
    return most_bytes(trace_rank(job, 0), "activations")


def recomputation() -> str:
    """Bytes of activations by the length of a sequence, for each mode of checkpointing."""
    lengths: Sequence[int] = (256, 512, 1024, 2048)
    return draw_chart(
        "Activation memory",
        [
            Series(text, [(n, planned_activations(mode, n)) for n in lengths], color=color)
            for color, (mode, text) in enumerate(MODES.items())
        ],
        ChartAxis("tokens of a sequence", ticks=lengths, show=_tokens),
        ChartAxis("peak of activations in a step", show=lambda value: f"{value / 1e6:g} MB"),
        caption="Llama 3 debugmodel, one sequence, float32, as planned: titanlite plan",
    )


PICTURES = {
    "ladder": ladder,
    "dp": dp,
    "tp": tp,
    "zero": zero,
    "roofline": roofline,
    "recomputation": recomputation,
}
