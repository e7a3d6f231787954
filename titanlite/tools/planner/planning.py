"""The plan of a job: what its step takes on each rank, and how long it lasts. Torch-free.

    ResolvedJob [+ Hardware] -> plan_job -> JobPlan: memory, communication, operations, time

A small job is traced whole (trace.py). A large one is composed from pieces (pieces.py, compose.py),
whose communication is the same and whose peaks differ by a few percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, parse_args, resolve_job
from titanlite.config.data import has_tokens
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.plan_row import PlanRow
from titanlite.quantities import format_bytes
from titanlite.start import check_layers
from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.compose import Composition, compose
from titanlite.tools.planner.composition import has_experts, offloads, representatives
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Peak, Trace
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.predict import Prediction, predict
from titanlite.tools.planner.software import TODAY

WHOLE, PIECES = "whole", "pieces"
# A job is traced whole up to so many passes of a block through a microbatch, and so many ranks:
# FSDP2 cuts each parameter into as many shards.
MOST_PASSES, MOST_RANKS = 200, 256
LARGE_BUBBLE = 0.25
LOW = "bfloat16"


@dataclass(frozen=True)
class RankPlan:
    """The step of one rank, which stands for all ranks of its pipeline stage.

    `held` has the bytes of each category before the step. `totals` maps (kind, axis) to the number
    of communications and the bytes of their whole tensors. With CPU offload on a GPU, `host` is the
    peak of what the rank takes of the host's memory, and `held_on_host` what it holds there.
    `reserved` are the bytes that torch takes of the device for the peak.
    """

    rank: int
    coordinates: dict[str, int]
    held: dict[str, int]
    peak: Peak
    totals: dict[tuple[str, str], tuple[int, int]]
    flops: int
    host: Peak | None = None
    held_on_host: dict[str, int] = field(default_factory=dict)
    reserved: int = 0


@dataclass(frozen=True)
class Advice:
    """A change of a job ("section.key" -> value), why it was planned, and what the plan says."""

    why: str
    changes: dict[str, Any]
    seconds: float
    device_bytes: int
    text: str


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job on its number of ranks.

    `method` is WHOLE or PIECES. `prediction` is None without hardware. `warnings` are about the
    plan, `notes` about the planning.
    """

    dims: ParallelDims
    ranks: list[RankPlan]
    method: str
    hardware: Hardware | None = None
    prediction: Prediction | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cost: Cost | None = field(default=None, repr=False)
    """The cost of the prediction."""
    applied: tuple[PlanRow, ...] = ()
    """The effective plan of a job that was traced whole; cache.load_applied has that of others."""
    sample_tokens: int = 0
    """The length of a sample of data without tokens, whose throughput is in samples."""
    advice: list[Advice] = field(default_factory=list)
    """What to change next; advice.py adds it."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all ranks."""
        return max(one.peak.num_bytes for one in self.ranks)

    @property
    def reserved_bytes(self) -> int:
        """The most that torch takes of a device; on a CPU, the largest peak."""
        return max(one.reserved or one.peak.num_bytes for one in self.ranks)

    @property
    def device_bytes(self) -> int:
        """What a rank takes of its device, with what is there beside torch's memory."""
        beside = 0 if self.hardware is None else self.hardware.memory.beside_bytes
        return round(self.reserved_bytes + beside)

    @property
    def bytes_range(self) -> tuple[float, float] | None:
        """The least and the most that a rank takes of its device; None if that is not known."""
        if self.hardware is None or self.hardware.accuracy is None:
            return None
        least, most = self.hardware.accuracy.memory
        beside = self.device_bytes - self.reserved_bytes
        return self.reserved_bytes * least + beside, self.reserved_bytes * most + beside

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step; None if that is not known."""
        if self.prediction is None or self.hardware is None or self.hardware.accuracy is None:
            return None
        least, most = self.hardware.accuracy.step
        return self.prediction.step.seconds * least, self.prediction.step.seconds * most

    @property
    def host_bytes(self) -> int:
        """The most that a rank takes of its host's memory; 0 without CPU offload on a GPU."""
        return max(0 if one.host is None else one.host.num_bytes for one in self.ranks)


def plan_job(
    resolved: ResolvedJob,
    hardware: Hardware | None = None,
    *,
    is_compiled: bool = False,
    method: str | None = None,
    use_cache: bool = True,
) -> JobPlan:
    """The plan of a job; `method` chooses how, by default by the job's size.

    `is_compiled` says that the time is of compiled blocks. Experts are assumed to have equally many
    tokens.
    """
    check_layers(resolved)
    config, dims, offloaded = resolved.config, resolved.dims, offloads(resolved)
    if offloaded and hardware is not None:
        _ = hardware.offload_host
    is_small = passes(resolved) <= MOST_PASSES and dims.world_size <= MOST_RANKS
    method = method or (WHOLE if is_small else PIECES)
    prediction, cost = None, None
    applied: tuple[PlanRow, ...] = ()
    software = hardware.software if hardware else TODAY
    compositions: list[Composition] = []
    eager: dict[int, Composition] = {}
    if method == PIECES or hardware is not None:
        pieces = load_pieces(resolved, software, use_cache=use_cache)
        compositions = compose(resolved, pieces)
        if hardware is not None:
            cost = Cost(hardware, dims, is_compiled, getattr(resolved.model, "head_dim", 128))
            prediction = predict(resolved, compositions, cost, pieces)
    if config.compile.enable and config.job.device == "cuda":
        eager = {one.rank: one for one in compositions}
    if method == PIECES and config.compile.enable:
        # Time is that of eager pieces, with operators fused by rule: the hardware files are fitted
        # to it.
        compiled = load_pieces(resolved, software, use_cache=use_cache, is_compiled=True)
        compositions = compose(resolved, compiled)
    shown = representatives(dims)
    steps: list[Trace | Composition] = [one for one in compositions if one.rank in shown]
    if method == WHOLE:
        from titanlite.tools.planner.trace import trace_rank

        layout = config.parallelism.context_parallel_load_balancer
        traces = [trace_rank(resolved, rank, software) for rank in representatives(dims, layout)]
        steps, applied = [*traces], traces[0].applied
    ranks = [
        RankPlan(
            one.rank,
            one.coordinates,
            one.held,
            _of_any_block(_smaller_of(one, eager).peak(), resolved, method),
            one.totals(),
            one.flops,
            one.host_peak() if offloaded else None,
            one.held_on_host,
            _smaller_of(one, eager).reserved() if config.job.device == "cuda" else 0,
        )
        for one in steps
    ]
    about = dims, ranks, method, hardware, prediction
    samples = 0 if has_tokens(config) else resolved.seq_len
    plan = JobPlan(*about, cost=cost, applied=applied, sample_tokens=samples)
    found = (one.below_zero() for one in steps if isinstance(one, Composition))
    if where := next(filter(None, found), ""):
        plan.warnings.append(
            f"memory: {where} frees more than the parts of the model took; the peak may be too low"
        )
    if compositions:
        plan.notes.extend(_notes_on_halves(resolved))
    if hardware is not None and hardware.accuracy is not None:
        rows = hardware.accuracy.rows
        plan.notes.append(f"ranges: of about four in five runs in {rows}, as shares of their plans")
    elif hardware is not None and hardware.kind == "gpu":
        plan.notes.append(
            f"hardware: not calibrated; no run on {hardware.name} was compared with its plan"
        )
    if has_experts(resolved):
        plan.notes.append("experts: planned as if all had equally many tokens")
    plan.warnings.extend(find_warnings(plan))
    dtype = config.training.param_dtype
    if hardware and hardware.kind == "gpu" and hardware.peak(LOW) > 2 * hardware.peak(dtype):
        rates = (f"{hardware.peak(name) / 1e12:.0f} TFLOP/s in {name}" for name in (dtype, LOW))
        plan.warnings.append(
            f"products reach {' and '.join(rates)} at most; set training.mixed_precision_param = "
            f'"{LOW}"'
        )
    return plan


def resolve(
    job: Sequence[str], hardware: Hardware | None, ranks: int | None = None
) -> tuple[ResolvedJob, list[str]]:
    """The job of a file, or of keys alone, and further keys as it is planned, and notes."""
    file, *keys = job
    first = file if file.startswith("--") else f"--job.config_file={file}"
    config, notes = plannable(*_load([first, *keys]), hardware)
    return resolve_job(config, ranks), notes


def _load(arguments: list[str]) -> tuple[JobConfig, list[str]]:
    """The job, and notes; a step does not depend on a tokenizer, so that may be missing."""
    key = "model.hf_assets_path"
    try:
        return parse_args(arguments), []
    except ConfigError as error:
        if not all(problem.startswith(f"{key}:") for problem in error.problems):
            raise
        note = f"{key}: there is no tokenizer, so its vocabulary is not compared with the model's"
        return parse_args([*arguments, f"--{key}="]), [note]


def plannable(
    config: JobConfig, notes: Sequence[str] = (), hardware: Hardware | None = None
) -> tuple[JobConfig, list[str]]:
    """The job as it can be traced on this machine, and what that changes, after `notes`.

    With job.device = "auto", a job on a GPU's `hardware` runs on the GPU.
    """
    notes, device = list(notes), config.job.device
    if device == "auto" and hardware is not None and hardware.kind == "gpu":
        device = "cuda"
        job = config.job.model_copy(update={"device": device})
        # A copy: a job that is searched for another number of ranks need not be legal as it is.
        config = config.model_copy(update={"job": job})
    if config.compile.enable:
        notes.append("compile: operators are counted one by one; the compiler fuses some of them")
    training = config.training
    if schedule := dict(training.batch_size_schedule):
        # A microbatch is as large in every step, so the largest batch takes as much memory.
        size = max({1: training.global_batch_size, **schedule}.values())
        changes = {"batch_size_schedule": (), "global_batch_size": size}
        config = config.model_copy(update={"training": training.model_copy(update=changes)})
        notes.append(f"batch: time and memory are of the steps with the largest, {size} sequences")
    if training.enable_cpu_offload and device != "cuda":
        notes.append("offload: planned on CPU, where device and host are one: nothing is copied")
    elif training.enable_cpu_offload and not training.cpu_offload_pin_memory:
        notes.append("offload: copies are planned at the rate of pinned memory; others are slower")
    if config.comm.mode != "default":
        comm = config.comm.model_copy(update={"mode": "default"})
        config = config.model_copy(update={"comm": comm})
    if device == "cuda":
        notes.append("device: without a GPU here, traced on the kernels of the CPU")
    return config, notes


def _notes_on_halves(resolved: ResolvedJob) -> Iterator[str]:
    """What a split backward pass repeats."""
    config, pipeline = resolved.config, resolved.pipeline
    if pipeline is None or not pipeline.schedule.splits_backward:
        return
    splits = "schedule: it splits the backward pass, and"
    if config.activation_checkpoint.mode != "none":
        yield (
            f"{splits} PyTorch recomputes a block once for each of its weights, and keeps all that "
            "until the last; without activation checkpointing it may take less memory"
        )
    if FLOAT8.is_on(config):
        yield (
            f"{splits} each half runs float8 products again; composed steps count this once, so "
            "their time and peak are too low"
        )


def _smaller_of(step: Trace | Composition, eager: Mapping[int, Composition]) -> Trace | Composition:
    """The step, or the eager one of its rank if that takes less of a GPU.

    A traced graph runs operator by operator. The inductor has no more than eager code between two
    of them, and keeps no more than the graph for the backward pass (docs/gpu.md has measured two).
    """
    other = eager.get(step.rank)
    return step if other is None or step.reserved() <= other.reserved() else other


def _of_any_block(peak: Peak, resolved: ResolvedJob, method: str) -> Peak:
    """The peak in a block without its number: the stages of a pipeline share their pieces."""
    if resolved.pipeline is None or method == WHOLE:
        return peak
    names = peak.place.module.split(".")
    place = peak.place._replace(module=".".join("*" if n.isdigit() else n for n in names))
    return replace(peak, place=place)


def passes(resolved: ResolvedJob) -> int:
    """How often the ranks that are traced run a block in a step, about."""
    config, dims, pipeline = resolved.config, resolved.dims, resolved.pipeline
    batches = resolved.global_batch_size // (config.training.local_batch_size * dims.dp)
    if pipeline is None:
        return batches * getattr(resolved.model, "n_layers", 1)
    blocks = max(len(stage) for stage in pipeline.stages)
    schedule, ranks = pipeline.schedule, len(representatives(dims))
    # A rank can have several stages.
    blocks *= schedule.num_stages // schedule.num_ranks
    return batches * ranks * blocks * schedule.num_microbatches


def find_warnings(plan: JobPlan) -> Sequence[str]:
    """What is wrong with a plan on its hardware: one line each."""
    hardware, prediction, dims = plan.hardware, plan.prediction, plan.dims
    if hardware is None:
        return []
    found = []
    if plan.device_bytes > hardware.memory.num_bytes:
        found.append(
            f"does not fit: a rank needs {format_bytes(plan.device_bytes)}, and {hardware.name} "
            f"has {format_bytes(hardware.memory.num_bytes)}"
        )
    elif hardware.accuracy and (plan.bytes_range or (0, 0))[1] > hardware.memory.num_bytes:
        found.append(
            f"may not fit: {hardware.name} has {format_bytes(hardware.memory.num_bytes)}, and runs "
            f"took up to {hardware.accuracy.memory[1]:.2f} times their plan"
        )
    host = hardware.offload_host if plan.host_bytes else None
    if host is not None and plan.host_bytes > host.num_bytes:
        found.append(
            f"does not fit: CPU offload needs {format_bytes(plan.host_bytes)} of the host's memory "
            f"for a rank, whose share of it is {format_bytes(host.num_bytes)}"
        )
    if dims.tp > hardware.node.num_ranks:
        found.append(
            f"tensor parallelism over {dims.tp} ranks leaves the node, which has "
            f"{hardware.node.num_ranks}: its collectives use the slower links between nodes"
        )
    if prediction is not None and prediction.bubble > LARGE_BUBBLE:
        found.append(
            f"the pipeline's ranks are idle for {prediction.bubble:.0%} of the step; give more "
            "microbatches, or an interleaved schedule"
        )
    return found
