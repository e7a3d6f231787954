"""`titanlite plan --calibrate FILE`: measure this machine's CPU and write its hardware file.

All figures are CPU-seconds of one rank with one thread, since wall time on shared cores is noise.
They are measured in units of a probe that runs beside, and multiplied by its median CPU-seconds, so
they hold for the machine's median speed during the calibration.
Operators are timed where they run: in the steps of small models, by a dispatch mode, and each one's
time is fitted to its bytes and FLOPs. Collectives of gloo are timed on local ranks. What is left of
the steps of tiny jobs is the host's time for operators, collectives and messages. measure.py
measures; here are the jobs, the fits and the file.
"""

import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any

import numpy as np

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import spawn
from titanlite.ranks.machine import memory_bytes, most_local_ranks, num_cores
from titanlite.tools.options import require_writable, write
from titanlite.tools.planner import measure
from titanlite.tools.planner.composition import representatives
from titanlite.tools.planner.cost import (
    CALLERS,
    COLLECTIVE,
    FREE,
    MEMORY_BOUND,
    Cost,
    caller,
    computed_flops,
    key_of,
)
from titanlite.tools.planner.events import FROM_RANK_TO_RANK, Communication, Operator
from titanlite.tools.planner.hardware import Hardware, parse_hardware
from titanlite.tools.simulate.network import bytes_sent

Step = tuple[float, JobConfig]
"""A job, and the CPU-seconds of its step over all ranks."""

# The operators of these steps are timed.
MODELS: list[tuple[dict[str, Any], int | None, int, str]] = [
    # The model, the sequence length, the batch, and the dtype.
    ({"flavor": "digits"}, None, 32, "float32"),
    ({"flavor": "digits"}, None, 16, "bfloat16"),
    ({"name": "gpt2", "flavor": "tiny"}, 512, 2, "float32"),
    ({"name": "llama3", "flavor": "tiny"}, 1024, 1, "float32"),
    ({"name": "llama3", "flavor": "tiny"}, 256, 4, "bfloat16"),
    ({"name": "llama3", "flavor": "small"}, 128, 4, "float32"),
    ({"flavor": "debug", "num_layers": 2}, None, 4, "float32"),
]
RINGS = {"enable_async_tensor_parallel": True, "async_tensor_parallel_backend": "ring"}
# And of these plans of the first one, on two ranks: copies and sums that one rank has not.
SHARED: list[dict[str, Any]] = [
    {"data_parallel_shard_degree": 2},
    {"data_parallel_shard_degree": 2, "dtype": "bfloat16"},
    {"context_parallel_degree": 2},
    {"tensor_parallel_degree": 2, **RINGS},
]
# (m, n, k) of products, so that they do not depend on the models alone.
PRODUCTS = ((512, 512, 512), (1024, 1024, 256), (256, 1024, 1024), (32, 32, 2048), (2048, 32, 32))
# Steps of these jobs, with different numbers of blocks, give the host's times: ranks -> plans.
SELECTIVE = {"recomputes": "selective"}
TINY: dict[int, list[dict[str, Any]]] = {
    1: [{}, SELECTIVE],
    2: [
        {"tensor_parallel_degree": 2},
        {"tensor_parallel_degree": 2, **RINGS},
        {"data_parallel_shard_degree": 2},
        {"context_parallel_degree": 2},
        {"pipeline_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
    ],
    4: [
        {"tensor_parallel_degree": 4},
        {"data_parallel_shard_degree": 4},
        {"context_parallel_degree": 4},
    ],
}
TINY_BLOCKS = (2, 6)
TINY_STEPS = 8
# Operators with less than this share of the steps' time are taken as one.
LEAST_SHARE = 0.0005
# What the shortest operators take.
LEAST_SECONDS = 4e-6
# An operator that was seen with few bytes only is taken to move more of them as others do: one
# sample of so many bytes at the common rate, with this weight.
COMMON_BYTES, COMMON_WEIGHT = 1 << 20, 0.1
# How often a fit is repeated, with errors relative to what the fit before gives.
FITS = 4


def calibrate(path: str, say: Callable[[str], None] = print) -> None:
    """Measure this machine and write its hardware file. Takes under two minutes on two cores.

    Raises ConfigError if the file cannot be written.
    """
    require_writable(path, "--calibrate")
    started = time.monotonic()
    say("operators: the steps of small models")
    alone = [_job(model, length, size, dtype) for model, length, size, dtype in MODELS]
    # Two at a time, so that both compete for caches and memory as the ranks of a job do.
    of_ranks = spawn(measure.time_operators_alone, 2, alone, PRODUCTS)
    model, length, size, dtype = MODELS[0]
    shared = [_job(model, length, size, **{"dtype": dtype, **plan}) for plan in SHARED]
    of_ranks += spawn(measure.time_operators, 2, shared)
    samples = [sample for one in of_ranks for sample in one.values]
    probes = [seconds for one in of_ranks for seconds in one.probes]
    steps: list[Step] = []
    transfers: measure.Transfers = []
    for num_ranks, plans in TINY.items():
        say(f"host and collectives: the steps of tiny jobs on {num_ranks} ranks")
        configs = [
            _job({"flavor": "debug", "num_layers": blocks}, None, 4, "float32", **plan)
            for plan in plans
            for blocks in TINY_BLOCKS
        ]
        of_ranks = spawn(measure.time_steps, num_ranks, configs, TINY_STEPS)
        probes += [seconds for one in of_ranks for seconds in one.probes]
        of_jobs = zip(*(one.values for one in of_ranks), strict=True)
        for config, of_job in zip(configs, of_jobs, strict=True):
            steps.append((typical_step(of_job), config))
        if num_ranks > 1:
            of_ranks = spawn(measure.time_collectives, num_ranks)
            probes += [seconds for one in of_ranks for seconds in one.probes]
            for same in zip(*(one.values for one in of_ranks), strict=True):
                transfers.append((*same[0][:3], statistics.fmean(one[3] for one in same)))
    unit = statistics.median(probes)
    text = hardware_text(
        [(operator, unit * taken) for operator, taken in samples],
        [(unit * taken, config) for taken, config in steps],
        [(*transfer, unit * taken) for *transfer, taken in transfers],
        unit,
    )
    write(path, text)
    say(f"wrote {path} after {time.monotonic() - started:.0f} s")


def typical_step(of_ranks: Iterable[Sequence[float]]) -> float:
    """The CPU time of a step of all ranks; `of_ranks` has that of each step of each rank."""
    return measure.typical(list(map(sum, zip(*of_ranks, strict=True))))


def _job(
    model: dict[str, Any],
    seq_len: int | None,
    batch_size: int,
    dtype: str,
    recomputes: str = "none",
    **plan: Any,
) -> JobConfig:
    parallelism = {"data_parallel_shard_degree": 1, **plan}
    training: dict[str, Any] = {
        "dataset": "synthetic",
        "global_batch_size": batch_size,
        "local_batch_size": batch_size // parallelism["data_parallel_shard_degree"],
        "mixed_precision_param": dtype,
    }
    if seq_len is not None:
        training["seq_len"] = seq_len
    return JobConfig.from_dict(
        {
            "model": model,
            "training": training,
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": recomputes, "selective_ac_option": "op"},
        }
    )


# Fitting


def _fit(
    rows: Iterable[Sequence[float]],
    seconds: Sequence[float],
    relative_to: Sequence[float] | None = None,
    weights: float | Sequence[float] = 1.0,
) -> list[float]:
    """Factors of the columns, none negative, with the least squares of the relative errors.

    The errors are relative to `relative_to`; by default, to what the factors give. Relative to the
    measured seconds, the factors would be too small: of two times of the same thing, the shorter
    one would count more.
    """
    from scipy.optimize import nnls

    matrix, wanted = np.asarray(list(rows), dtype=float), np.asarray(seconds, dtype=float)
    whole = np.asarray(wanted if relative_to is None else relative_to, dtype=float)
    for _ in range(1 if relative_to is not None else FITS):
        each = np.asarray(weights) / np.maximum(whole, 1e-7)
        weighted = matrix * each[:, None]
        scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
        factors, _ = nnls(weighted / scale, wanted * each)
        factors /= scale
        whole = matrix @ factors
    return [float(factor) for factor in factors]


def _fit_operators(samples: Sequence[measure.Sample]) -> dict[str, list[float]]:
    """Operator and dtype -> seconds of a call, of a byte, of a FLOP."""
    by_name: dict[str, list[measure.Sample]] = defaultdict(list)
    total = sum(seconds for _, seconds in samples)
    per_byte = _per_byte(samples)
    for operator, seconds in samples:
        if Cost.kind(operator) != FREE:
            by_name[key_of(operator)].append((operator, seconds))
    found = {}
    for name, of in sorted(by_name.items()):
        if sum(seconds for _, seconds in of) < LEAST_SHARE * total:
            continue
        rows = [
            (1.0, operator.bytes_read + operator.bytes_written, computed_flops(operator, "cpu"))
            for operator, _ in of
        ]
        # Where all samples are of one size, this tells a call's time from that of its bytes.
        rows.append((1.0, 0, 0))
        times = [*(seconds for _, seconds in of), LEAST_SECONDS]
        weights = [1.0] * len(times)
        if Cost.kind(of[0][0]) == MEMORY_BOUND:
            rows.append((0.0, COMMON_BYTES, 0))
            times.append(COMMON_BYTES * per_byte)
            weights.append(COMMON_WEIGHT)
        found[name] = _fit(rows, times, weights=weights)
    # Under a dispatch mode short operators find cold caches. What all have is the host's time,
    # which the tiny jobs give.
    common = statistics.median(factors[0] for factors in found.values())
    for factors in found.values():
        factors[0] = max(0.0, factors[0] - common)
    return found


def _per_byte(samples: Sequence[measure.Sample]) -> float:
    """The seconds of a byte that a memory-bound operator moves."""
    plain = [
        (one.bytes_read + one.bytes_written, seconds)
        for one, seconds in samples
        if Cost.kind(one) == MEMORY_BOUND and one.bytes_read
    ]
    return _fit([(1.0, num_bytes) for num_bytes, _ in plain], [s for _, s in plain])[1]


def _fit_collectives(transfers: measure.Transfers) -> dict[str, list[float]]:
    """Kind -> seconds of a call, of each other rank, of a byte that is sent."""
    found = {}
    for kind in measure.COLLECTIVES:
        of = [one for one in transfers if one[0] == kind]
        rows = [(1.0, n - 1.0, bytes_sent(kind, num_bytes, n)) for _, num_bytes, n, _ in of]
        found[kind] = _fit(rows, [one[3] for one in of])
    found["receive"] = found["send"]
    return found


def _fit_host(steps: Sequence[Step], hardware: Hardware) -> dict[str, float]:
    """The host's seconds for a step, for an operator, and for each caller of communications."""
    from titanlite.tools.planner.trace import trace_rank

    rows, seconds, wholes = [], [], []
    for measured, config in steps:
        resolved = resolve_job(config, None)
        cost = Cost(hardware, resolved.dims)
        ranks = representatives(resolved.dims)
        events = [event for rank in ranks for event in trace_rank(resolved, rank).events]
        operators = [e for e in events if isinstance(e, Operator) and cost.kind(e) != FREE]
        calls = [event for event in events if isinstance(event, Communication)]
        sent = [one for one in calls if one.num_ranks > 1]
        explained = sum(map(cost.operator, operators))
        explained += sum(cost.communication(one).seconds for one in sent)
        callers = [sum(caller(one) == name for one in sent) for name in CALLERS]
        peers = sum(one.num_ranks - 2 for one in sent if one.kind not in FROM_RANK_TO_RANK)
        recomputed = sum(one.place.phase == "recomputation" for one in operators)
        rows.append((len(ranks), len(operators), recomputed, peers, *callers))
        wholes.append(measured * len(ranks) / resolved.dims.world_size)
        seconds.append(wholes[-1] - explained)
    names = ("step", "launch", "recomputed", "peer", *CALLERS)
    return dict(zip(names, _fit(rows, seconds, wholes), strict=True))


# Writing


def hardware_text(
    samples: Sequence[measure.Sample],
    steps: Sequence[Step],
    transfers: measure.Transfers,
    probe_seconds: float,
) -> str:
    """The hardware file of these measurements.

    `samples` are operators with their seconds, `steps` jobs with the CPU-seconds of a step over
    all ranks, `transfers` collectives with the CPU-seconds of a rank; `probe_seconds` are those of
    the probe.
    """
    peaks: dict[str, float] = {}
    for one, seconds in samples:
        if one.name == "aten::mm" and seconds:
            peaks[one.dtype] = max(peaks.get(one.dtype, 0.0), one.flops / seconds)
    collectives = _fit_collectives(transfers)
    link_seconds, _, link_byte = collectives["all_gather"]
    general = _general_text(peaks, 1 / max(_per_byte(samples), 1e-15), link_seconds, 1 / link_byte)
    operators = "\n".join(
        _inline(f'"{name}"', ("seconds", "bytes_per_second", "flops_per_second"), factors)
        for name, factors in _fit_operators(samples).items()
    )
    measured = "\n".join(
        _inline(kind, ("seconds", "seconds_per_peer", "bytes_per_second"), factors)
        for kind, factors in collectives.items()
    )
    tables = (
        "\n# Measured in the steps of small models, one thread.\n[operators]\n"
        f"{operators}\n\n# Measured with gloo on 2 and 4 local ranks.\n[collectives]\n{measured}\n"
    )
    nothing = "".join(f"{name}_seconds = 0.0\n" for name in ("launch", "kernel", COLLECTIVE))
    before = parse_hardware(f"{general}\n[overhead]\n{nothing}{tables}", "calibration")
    host = _fit_host(steps, before)
    overhead = "".join(f"{name}_seconds = {seconds:.4g}\n" for name, seconds in host.items())
    why = "# What is left of the steps of tiny jobs."
    probe = f"# Of the calibration's probe.\nprobe_seconds = {probe_seconds:.4g}\n"
    return f"{general}\n{why}\n[overhead]\nkernel_seconds = 0.0\n{overhead}{probe}{tables}"


def _general_text(
    peaks: dict[str, float], bytes_per_second: float, link_seconds: float, link_rate: float
) -> str:
    import torch

    machine = f"{platform.processor() or platform.machine()}, {num_cores()} cores"
    rates = "".join(f"{dtype} = {rate:.4g}\n" for dtype, rate in sorted(peaks.items()))
    return f"""\
# Measured by `titanlite plan --calibrate` on {date.today()}, torch {torch.__version__}.
# Seconds are CPU-seconds of a rank with one thread.
name = "CPU ({machine})"
kind = "cpu"

# The fastest product that was measured.
[flops_per_second]
{rates}
# Of the machine. The rate is that of elementwise operators, whose data are partly in caches.
[memory]
num_bytes = {memory_bytes()}
bytes_per_second = {bytes_per_second:.4g}
share = 1.0

# All ranks are on this machine. [collectives] has what was measured.
[node]
num_ranks = {most_local_ranks()}
bytes_per_second = {link_rate:.4g}
latency_seconds = {link_seconds:.4g}
share = 1.0

[fabric]
bytes_per_second = {link_rate:.4g}
latency_seconds = {link_seconds:.4g}
share = 1.0

# For operators that [operators] does not have.
[products]
share = 0.9
tile_m = 1
tile_n = 1
num_units = 1
half_m = 0
half_n = 0
half_k = 0

[attention]
forward_share = 0.5
backward_share = 0.5
is_causal_halved = false
"""


def _inline(name: str, keys: Sequence[str], factors: Sequence[float]) -> str:
    """One line of a table: times as they are, and rates as their inverse; none for 0."""
    parts = []
    for key, factor in zip(keys, factors, strict=True):
        if not key.endswith("_per_second"):
            parts.append(f"{key} = {factor:.4g}")
        elif factor:
            parts.append(f"{key} = {1 / factor:.4g}")
    return f"{name} = {{ {', '.join(parts)} }}"
