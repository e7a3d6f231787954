"""What a step of a job of TorchTitan takes on each rank, from a trace of TorchTitan's own code.

Its Trainer is built for one rank at a time in the planner's fake world, at the job's full size. The
second step is recorded, as tools/planner/trace.py records one of titanlite's.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage

from titanlite.errors import ConfigError, TitanliteError
from titanlite.mesh.parallel_dims import EXPERT_SHARDS, ParallelDims, axes_of, axes_where
from titanlite.ranks.settings import ignore_warnings, own_settings
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.planner.compose import END, Composition
from titanlite.tools.planner.composition import representatives
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Trace
from titanlite.tools.planner.fake_world import fake_world, stand_ins
from titanlite.tools.planner.fsdp_streams import on_streams
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.offload import OffloadRecorder
from titanlite.tools.planner.planning import WHOLE, JobPlan, RankPlan, find_warnings
from titanlite.tools.planner.predict import WAIT_FOR_SENDS, Prediction, run_compositions
from titanlite.tools.planner.recorder import StepRecorder
from titanlite.tools.planner.scratch import CUDA, num_bytes
from titanlite.tools.planner.segments import Shared
from titanlite.tools.planner.timing import mesh_dims, step_time, time_events
from titanlite.tools.planner.trace import record_step
from titanlite.tools.torchtitan.job import OWN_DTYPE, TitanJob, TitanPlan, kernels_of
from titanlite.tools.torchtitan.options import Options
from titanlite.tools.torchtitan.pipeline import Marks, composition_of, marking
from titanlite.tools.torchtitan.stand_ins import (
    PLANNED,
    attribute_of,
    clipping,
    require_torchtitan,
    standing_in,
    without_values,
)
from titanlite.tools.torchtitan.trainer import state_of

# Flex attention's backward pass keeps a number for each query; FLASH of kernels.py stands for it.
SCRATCH = replace(
    CUDA,
    kernels={
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, _: num_bytes(
            args[5]
        )
    },
)
SEED = 0


@dataclass(frozen=True)
class Traced:
    """A rank's step, the Trainer's count of operations for a token, and a pipeline's actions."""

    trace: Trace
    flops_per_token: float
    composition: Composition | None


def plan_job(options: Options, hardware: Hardware | None) -> tuple[JobPlan, list[tuple[str, str]]]:
    """The plan of a job, and lines about what was planned. Raises ConfigError for bad input."""
    require_torchtitan()
    with standing_in(plans=True):
        job = TitanJob(options.name, tuple(options.titan), OWN_DTYPE, is_full=True)
        plan = job.plan(options.ranks)
        dims = dims_of(plan)
        is_compiled = plan.config.compile.enable
        if dims.pp_enabled and plan.config.parallelism.spmd_backend != "spmd_types":
            raise ConfigError(
                "parallelism.pipeline_parallel_degree: stages are planned with the backend "
                "spmd_types alone, which needs torch 2.14; give 1"
            )
        shown = representatives(dims)
        # A pipeline's time needs every stage.
        places = [dims.rank(pp=place) for place in range(dims.pp)] if hardware else shown
        traced = [trace_rank(job, options.ranks, rank) for rank in places]
    ranks = [
        RankPlan(
            one.trace.rank,
            one.trace.coordinates,
            one.trace.held,
            one.trace.peak(),
            # What a group of one rank does stays on the rank.
            {key: of for key, of in one.trace.totals().items() if key[1]},
            one.trace.flops,
            one.trace.host_peak() if one.trace.on_host else None,
            one.trace.held_on_host,
            one.trace.reserved(),
        )
        for one in traced
        if one.trace.rank in shown
    ]
    found = JobPlan(dims, ranks, WHOLE, hardware)
    if hardware is not None:
        cost = Cost(hardware, dims, is_compiled=is_compiled)
        found = replace(found, prediction=_predict(plan, traced, cost), cost=cost)
    found.warnings.extend(find_warnings(found))
    return found, list(_describe(job, plan, traced))


def dims_of(plan: TitanPlan) -> ParallelDims:
    """The degrees as titanlite has them, whose axes have the same names and order."""
    return ParallelDims(**plan.degrees, ep=plan.config.parallelism.expert_parallel_degree)


def trace_rank(job: TitanJob, ranks: int | None, rank: int) -> Traced:
    """The second step of `rank`, inside of `standing_in`. No process group may exist."""
    plan = job.plan(ranks)
    config, dims = plan.config, dims_of(plan)
    config.debug.seed = SEED
    config.compile.enable = False
    # A step that does not log.
    config.metrics.log_freq = sys.maxsize
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_settings())
        ignore_warnings(category=UserWarning)
        stack.enter_context(fake_world(rank, dims.world_size))
        stack.enter_context(stand_ins("cuda"))
        gc.freeze()  # see run_threads
        stack.callback(gc.unfreeze)
        row = config.training.seq_len // dims.cp
        stack.enter_context(without_values(mode, row, _stage_of(plan)))
        try:
            trainer = config.build()
            return _record(trainer, mode, rank, dims)
        except TitanliteError:
            raise
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{job.name}: rank {rank} does not run on tensors without values: "
                f"{type(error).__name__}: {text}; give `titanlite debug torchtitan:{job.name}` to "
                "see whether it runs on tensors with values"
            ) from error


def _record(trainer: Any, mode: FakeTensorMode, rank: int, dims: ParallelDims) -> Traced:
    kind = OffloadRecorder if trainer.config.training.enable_cpu_offload else StepRecorder
    recorder = kind(_axes(trainer, dims, rank), scratch=SCRATCH)
    parts = list(trainer.model_parts)
    parameters = [one for part in parts for one in part.parameters()]
    # The first step logs in any case.
    trainer.step = 2
    with mode, recorder.watching(parts):
        trainer.train_step(zeros(trainer))
        # Its next step would begin so.
        trainer.optimizers.zero_grad(set_to_none=True)
    trace = Trace(rank, dims.coordinates(rank), recorder.events)
    marks: Marks = []

    def run(on_gradients: Callable[[], None]) -> None:
        def noted() -> None:
            marks.append((len(trace.events), END, -1, -1))
            on_gradients()

        batches = list(zeros(trainer))
        recorder.note(one for inputs, labels in batches for one in (*inputs.values(), labels))
        with clipping(before=noted), marking(recorder, marks):
            trainer.train_step(iter(batches))

    record_step(trace, recorder, mode, parts, parameters, state_of(trainer.optimizers), run)
    processor = trainer.metrics_processor
    flops = float(attribute_of(processor, "num_flops_per_token"))
    number = attribute_of(trainer, "num_pipeline_parallel_microbatches")
    return Traced(trace, flops, composition_of(trace, marks, number) if dims.pp_enabled else None)


def zeros(trainer: Any) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The microbatches of a rank's step: tokens, positions and labels."""
    training = trainer.config.training
    passes = attribute_of(trainer, "num_pipeline_parallel_microbatches")
    shape = training.local_batch_size // passes, training.seq_len
    for _ in range(trainer.gradient_accumulation_steps * passes):
        tokens, positions, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        yield {"input": tokens, "positions": positions}, labels


def _axes(trainer: Any, dims: ParallelDims, rank: int) -> dict[Any, tuple[str, ...]]:
    """The ranks of each group of this rank -> its axis; a group of one rank has none.

    Groups of experts can have the ranks of others, so they go by their names.
    """
    groups = {name: axes_of(name) for name in mesh_dims() if name != "ep"}
    groups["batch"] = axes_where(batch="samples")
    groups["loss"] = (*groups["batch"], *axes_where(batch="tokens"))
    found: dict[Any, tuple[str, ...]] = {(rank,): ("",)}
    # The plainest name of the same ranks.
    for name, axes in sorted(groups.items(), key=lambda one: len(one[1])):
        found.setdefault(tuple(dims.group(rank, *axes)), (name,))
    for name in ("ep", EXPERT_SHARDS):
        mesh = trainer.parallel_dims.get_optional_mesh(name)
        if mesh is not None and mesh.size() > 1:
            found[mesh.get_group().group_name] = (name,)
    return found


def _stage_of(plan: TitanPlan) -> Callable[..., Any]:
    """What makes a stage of a pipeline, which is told what it receives and returns.

    Without values, stages cannot ask each other.
    """
    from torchtitan.components import loss

    config, degrees = plan.config, plan.degrees
    is_chunked = isinstance(config.loss, attribute_of(loss, "ChunkedLossWrapper").Config)
    model, training, parallelism = config.model_spec.model, config.training, config.parallelism
    rows, length = parallelism.pipeline_parallel_microbatch_size, training.seq_len // degrees["cp"]
    dtype = getattr(torch, training.mixed_precision_param)

    def stage(part: Any, index: int, number: int, device: Any, **others: Any) -> PipelineStage:
        sharded = degrees["tp"] if parallelism.enable_sequence_parallel else 1
        hidden = torch.empty(rows, length // sharded, model.dim, dtype=dtype, device="meta")
        hidden.requires_grad_()
        logits = torch.empty(rows, length, model.vocab_size // degrees["tp"], device="meta")
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        is_last = index == number - 1 and not is_chunked
        return PipelineStage(
            part,
            index,
            number,
            device,
            input_args=hidden if index else tokens,
            output_args=logits.to(dtype).requires_grad_() if is_last else hidden,
            **others,
        )

    return stage


def _predict(plan: TitanPlan, traced: list[Traced], cost: Cost) -> Prediction:
    training, one = plan.config.training, traced[0]
    tokens = training.global_batch_size * training.seq_len
    of_step: dict[str, Any] = {
        "tokens": tokens,
        "model_flops": one.flops_per_token * tokens,
        "dtype": training.mixed_precision_param,
    }
    if compositions := [of.composition for of in traced if of.composition]:
        waits = plan.config.parallelism.pipeline_parallel_schedule in WAIT_FOR_SENDS
        return run_compositions(compositions, cost, Shared(), waits_for_sends=waits, **of_step)
    rank = one.trace.rank
    step = step_time({rank: time_events(on_streams(one.trace.events), cost, rank)}, cost, **of_step)
    return Prediction(step, Timeline("predicted step", [], [], unit="s"), 0.0)


def _describe(job: TitanJob, plan: TitanPlan, traced: list[Traced]) -> Iterator[tuple[str, str]]:
    """What was planned, and what stood in for what."""
    config, dims = plan.config, dims_of(plan)
    training = config.training
    ranks = ", ".join(str(one.trace.rank) for one in traced)
    ep = f", ep {dims.ep}" if dims.ep_enabled else ""
    yield "plan", f"torchtitan:{job.name}: {dims.describe()}{ep}, {dims.world_size:,} ranks"
    kind = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    text = (
        f"{training.local_batch_size} x {training.seq_len:,} tokens per rank, global batch "
        f"{training.global_batch_size:,}; {training.dtype}, computed in "
        f"{training.mixed_precision_param}; "
        f"activation checkpointing: {'none' if kind == 'NoneType' else kind}"
    )
    yield "job", text
    text = (
        f"Trainer.train_step of TorchTitan {metadata.version('torchtitan')} on torch "
        f"{torch.__version__}, by the backend {config.parallelism.spmd_backend}; the second "
        f"step of rank {ranks}"
    )
    yield "runs", text
    for name in _stand_ins(plan):
        yield "replaced", f"{name}: {PLANNED[name]}"


def _stand_ins(plan: TitanPlan) -> Iterator[str]:
    yield from ("device", "data", "weights", "graphs", "norm")
    if plan.is_other_backend:
        yield "backend"
    if plan.config.compile.enable:
        yield "compile"
    yield from (name for name in kernels_of(plan) if name in PLANNED)
