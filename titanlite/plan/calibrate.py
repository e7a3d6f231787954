"""`titanlite plan --calibrate FILE`: measure this machine's CPU and write its hardware file.

All figures are CPU-seconds of one rank with one thread, since wall time on shared cores is noise.
Operators are timed where they run: in the steps of small models, by a dispatch mode, and each one's
time is fitted to its bytes and FLOPs. Collectives of gloo are timed on local ranks. What is left of
the steps of tiny jobs is the host's time for operators, collectives and messages.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config import JobConfig, make_config, resolve_job
from titanlite.errors import ConfigError
from titanlite.plan.cost import (
    CALLERS,
    COLLECTIVE,
    FREE,
    MEMORY_BOUND,
    Cost,
    bytes_sent,
    caller,
    computed_flops,
)
from titanlite.plan.events import FROM_RANK_TO_RANK, Communication, Operator
from titanlite.plan.hardware import Hardware, parse_hardware
from titanlite.plan.planning import representatives
from titanlite.ranks.launch import ALONE, run_ranks
from titanlite.ranks.machine import memory_bytes, most_local_ranks, num_cores

Sample = tuple[Operator, float]
Transfers = list[tuple[str, int, int, float]]
"""Kind, bytes of the whole tensor, ranks, and CPU-seconds of a rank."""
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
NUM_STEPS = 4
# (m, n, k) of products, so that they do not depend on the models alone.
PRODUCTS = ((512, 512, 512), (1024, 1024, 256), (256, 1024, 1024), (32, 32, 2048), (2048, 32, 32))
# Steps of these jobs, with different numbers of blocks, give the host's times: ranks -> plans.
TINY: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [
        {"tensor_parallel_degree": 2},
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
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
SIZES = (1 << 12, 1 << 18, 1 << 22)
REPETITIONS = {1 << 12: 20, 1 << 18: 10, 1 << 22: 3}


def calibrate(path: str, say: Callable[[str], None] = print) -> None:
    """Measure this machine and write its hardware file. Takes under two minutes on two cores.

    Raises ConfigError if the file cannot be written.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigError(
            f"--calibrate: {path} cannot be written ({error.strerror}); give another file"
        ) from error
    started = time.monotonic()
    say("operators: the steps of small models")
    # Two at a time, so that both compete for caches and memory as the ranks of a job do.
    samples = [sample for one in run_ranks(_time_operators, 2) for sample in one]
    steps: list[Step] = []
    transfers: Transfers = []
    for num_ranks, plans in TINY.items():
        say(f"host and collectives: the steps of tiny jobs on {num_ranks} ranks")
        configs = [
            _job({"flavor": "debug", "num_layers": blocks}, None, 4, "float32", **plan)
            for plan in plans
            for blocks in TINY_BLOCKS
        ]
        of_ranks = run_ranks(_time_ranks, num_ranks, configs)
        for config, *seconds in zip(configs, *(of[0] for of in of_ranks), strict=True):
            steps.append((sum(seconds), config))
        for same in zip(*(of[1] for of in of_ranks), strict=True):
            transfers.append((*same[0][:3], statistics.fmean(one[3] for one in same)))
    Path(path).write_text(hardware_text(samples, steps, transfers), encoding="utf-8")
    say(f"wrote {path} after {time.monotonic() - started:.0f} s")


# Measuring, on ranks


def _time_operators(_: Any) -> list[Sample]:
    """The operators of the steps of MODELS and some products, with their CPU-seconds."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found: list[Sample] = []
    with open_world(ALONE) as world:
        torch.set_num_threads(1)
        for model, seq_len, batch_size, dtype in MODELS:
            job = build_job(resolve_job(_job(model, seq_len, batch_size, dtype), 1), world)
            job.step()
            runs = [_record(job.step) for _ in range(NUM_STEPS)]
            found += _medians(runs)
    for kind in (torch.float32, torch.bfloat16):
        for m, n, k in PRODUCTS:
            a, b = torch.randn(m, k, dtype=kind), torch.randn(k, n, dtype=kind)
            found += _medians([_record(partial(torch.mm, a, b)) for _ in range(NUM_STEPS)])
    return found


def _record(function: Callable[[], object]) -> list[Sample]:
    """Call a function; the operators that it ran, with the CPU-seconds of each."""
    from titanlite.plan.recorder import Recorder

    class Timed:
        """An operator that measures its calls."""

        def __init__(self, function: Any) -> None:
            self.function, self.seconds = function, 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.function, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = self.function(*args, **kwargs)
            self.seconds = time.thread_time() - start
            return result

    samples: list[Sample] = []

    class Timer(Recorder):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            timed, before = Timed(function), len(self.events)
            result = super().__torch_dispatch__(timed, types, args, kwargs)
            for event in self.events[before:]:
                if isinstance(event, Operator):
                    samples.append((event, timed.seconds))
            return result

    with Timer({}, is_fake=False):
        function()
    return samples


def _medians(runs: Sequence[list[Sample]]) -> list[Sample]:
    """The operators of several equal runs, each with its median."""
    same = zip(*runs, strict=False)
    return [(of[0][0], statistics.median(seconds for _, seconds in of)) for of in same]


def _time_ranks(place: Any, configs: list[JobConfig]) -> tuple[list[float], Transfers]:
    """The CPU-seconds of a step of each job on this rank, and those of collectives."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world:
        torch.set_num_threads(1)
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            seconds = []
            for _ in range(TINY_STEPS + 2):
                start = time.process_time()
                job.step()
                seconds.append(time.process_time() - start)
            found.append(statistics.median(seconds[2:]))
        return found, _time_collectives(world.rank, world.size) if world.size > 1 else []


def _time_collectives(rank: int, num_ranks: int) -> Transfers:
    """The CPU-seconds of this rank for each collective, by bytes."""
    import torch
    import torch.distributed as dist

    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def exchange(whole: torch.Tensor, other: torch.Tensor) -> None:
        operations = [
            dist.P2POp(dist.isend, whole, right),
            dist.P2POp(dist.irecv, other, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    # torch 2.13 renames both, and warns of the old names.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    found: Transfers = []
    for num_bytes in SIZES:
        whole, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        part = torch.zeros(num_bytes // 4 // num_ranks)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": partial(gather, whole, part),
            "reduce_scatter": partial(reduce_scatter, part, whole),
            "all_reduce": partial(dist.all_reduce, whole),
            "all_to_all": partial(dist.all_to_all_single, other, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
            "send": partial(exchange, whole, other),
        }
        for kind in COLLECTIVES:
            call, seconds = calls[kind], []
            call()
            for _ in range(REPETITIONS[num_bytes]):
                start = time.process_time()
                call()
                seconds.append(time.process_time() - start)
            # Of an exchange, half is the message that is sent.
            share = 0.5 if kind == "send" else 1.0
            found.append((kind, num_bytes, num_ranks, share * statistics.median(seconds)))
    return found


def _job(
    model: dict[str, Any], seq_len: int | None, batch_size: int, dtype: str, **plan: int
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
    return make_config(
        {
            "model": model,
            "training": training,
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": "none"},
        }
    )


# Fitting


def _fit(
    rows: Iterable[Sequence[float]],
    seconds: Sequence[float],
    relative_to: Sequence[float] | None = None,
) -> list[float]:
    """Factors of the columns, none negative, with the least squares of the relative errors."""
    from scipy.optimize import nnls

    whole = np.maximum(np.asarray(seconds if relative_to is None else relative_to), 1e-7)
    matrix = np.asarray(list(rows), dtype=float) / whole[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    factors, _ = nnls(matrix / scale, np.asarray(seconds) / whole)
    return [float(factor) for factor in factors / scale]


def _fit_operators(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Operator and dtype -> seconds of a call, of a byte, of a FLOP."""
    by_name: dict[str, list[Sample]] = defaultdict(list)
    total = sum(seconds for _, seconds in samples)
    for operator, seconds in samples:
        if Cost.kind(operator) != FREE:
            by_name[f"{operator.name}:{operator.dtype}"].append((operator, seconds))
    found = {}
    for name, of in sorted(by_name.items()):
        if sum(seconds for _, seconds in of) < LEAST_SHARE * total:
            continue
        rows = [
            (
                1.0,
                operator.bytes_read + operator.bytes_written,
                computed_flops(operator, "cpu"),
            )
            for operator, _ in of
        ]
        # Where all samples are of one size, this tells a call's time from that of its bytes.
        rows.append((1.0, 0, 0))
        found[name] = _fit(rows, [*(seconds for _, seconds in of), LEAST_SECONDS])
    # Under a dispatch mode short operators find cold caches. What all have is the host's time,
    # which the tiny jobs give.
    common = statistics.median(factors[0] for factors in found.values())
    for factors in found.values():
        factors[0] = max(0.0, factors[0] - common)
    return found


def _fit_collectives(transfers: Transfers) -> dict[str, list[float]]:
    """Kind -> seconds of a call, of each other rank, of a byte that is sent."""
    found = {}
    for kind in COLLECTIVES:
        of = [one for one in transfers if one[0] == kind]
        rows = [(1.0, n - 1.0, bytes_sent(kind, num_bytes, n)) for _, num_bytes, n, _ in of]
        found[kind] = _fit(rows, [one[3] for one in of])
    found["receive"] = found["send"]
    return found


def _fit_host(steps: Sequence[Step], hardware: Hardware) -> dict[str, float]:
    """The host's seconds for a step, for an operator, and for each caller of communications."""
    from titanlite.plan.trace import trace_rank

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
        rows.append((len(ranks), len(operators), peers, *callers))
        wholes.append(measured * len(ranks) / resolved.dims.world_size)
        seconds.append(wholes[-1] - explained)
    names = ("step", "launch", "peer", *CALLERS)
    return dict(zip(names, _fit(rows, seconds, wholes), strict=True))


# Writing


def hardware_text(
    samples: Sequence[Sample],
    steps: Sequence[Step],
    transfers: Transfers,
) -> str:
    """The hardware file of these measurements.

    `samples` are operators with their seconds, `steps` jobs with the CPU-seconds of a step over
    all ranks, `transfers` collectives with the CPU-seconds of a rank.
    """
    plain = [
        (one.bytes_read + one.bytes_written, seconds)
        for one, seconds in samples
        if Cost.kind(one) == MEMORY_BOUND and one.bytes_read
    ]
    per_byte = _fit([(1.0, num_bytes) for num_bytes, _ in plain], [s for _, s in plain])[1]
    peaks: dict[str, float] = {}
    for one, seconds in samples:
        if one.name == "aten::mm" and seconds:
            peaks[one.dtype] = max(peaks.get(one.dtype, 0.0), one.flops / seconds)
    collectives = _fit_collectives(transfers)
    link_seconds, _, link_byte = collectives["all_gather"]
    general = _general_text(peaks, 1 / max(per_byte, 1e-15), link_seconds, 1 / link_byte)
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
    return f"{general}\n{why}\n[overhead]\nkernel_seconds = 0.0\n{overhead}{tables}"


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
