"""Trace a training step of a job of any size in one process, with the job's own code.

The job is built as a run builds it, by build_job, for one rank of a fake world (fake_world.py). Two
steps run on fake tensors; the second is recorded (recorder.py), since optimizer state and lazily
built parts exist only after the first. Pieces (pieces.py) have no such parts, so an update alone,
which makes the optimizer state, stands for their first step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titanlite.config import ResolvedJob
from titanlite.config.model import load_model_spec
from titanlite.job import Job, build_job
from titanlite.models.build import build_model
from titanlite.modules.shards import local_part
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.tensor_account import TensorAccount, merged, require_whole
from titanlite.plan_row import PlanRow
from titanlite.ranks.machine import num_cores
from titanlite.ranks.settings import ignore_warnings, own_settings
from titanlite.tools.planner.composition import offloads
from titanlite.tools.planner.events import Allocation, Trace
from titanlite.tools.planner.fake_world import fake_builders, fake_world, faked, stand_ins
from titanlite.tools.planner.hardware import Software
from titanlite.tools.planner.offload import OffloadRecorder
from titanlite.tools.planner.recorder import StepRecorder
from titanlite.tools.planner.scratch import BY_DEVICE
from titanlite.tools.planner.software import TODAY


def trace_rank(resolved: ResolvedJob, rank: int, software: Software = TODAY) -> Trace:
    """The second step of `rank`. No process group may exist in this process.

    A job with `job.device = "cuda"` is traced with the scratch memory of a GPU, and on its kernels
    if there is a GPU here; else on those of the CPU, as with CPU offload.
    """
    return trace_job(resolved, rank, software=software)[1]


def trace_job(
    resolved: ResolvedJob,
    rank: int,
    prepare: Callable[[Job, StepRecorder], None] | None = None,
    *,
    software: Software = TODAY,
    runs_first_step: bool = True,
    **others: Any,
) -> tuple[Job, Trace]:
    """The job of `rank` and its second step; `prepare` is called before the first one.

    Unless `runs_first_step`, only the update of the first one runs. `others` are fields of Builders
    that the job is built with.
    """
    planned = _planned_device(resolved)
    offloaded = offloads(resolved)
    with contextlib.ExitStack() as stack:
        job, mode = stack.enter_context(_built(resolved, rank, software, **others))
        recorder = (OffloadRecorder if offloaded else StepRecorder)(
            axes_of_groups(job),
            scratch=BY_DEVICE[planned],
            num_threads=max(1, num_cores() // resolved.dims.world_size),
            device_type=job.world.device.type,
        )
        if prepare is not None:
            prepare(job, recorder)
        with mode, recorder.watching(job.trainer.parts):
            if runs_first_step:
                # One batch of a step that accumulates several is enough.
                job.trainer.step([faked(batch, mode) for batch in job.draw()[:1]])
            else:
                for part in job.parts:
                    recorder.note(_local([*part.parameters(), *part.buffers()]))
                _make_optimizer_state(job)
            if (average := job.trainer.average) is not None:
                # After these steps, all that it keeps is there.
                kept = resolved.config.weight_averaging
                for number in range(max(1, len(average.keys) - 1)):
                    average.update(kept.start_step + kept.freq * number)
        return job, _record_step(job, recorder, mode)


def applied_plan(resolved: ResolvedJob) -> tuple[PlanRow, ...]:
    """The effective plan of a job's first rank; the job is built and runs no step.

    Its meshes have few data ranks: what the rows say of all of them follows from the job's degrees.
    """
    dims = few = resolved.dims
    if dims.ep == 1:
        few = replace(dims, dp_replicate=min(2, dims.dp_replicate), dp_shard=min(2, dims.dp_shard))
    with _built(resolved, 0, dims=few) as (job, _):
        return tuple(job.applied)


def tensor_account(resolved: ResolvedJob) -> dict[str, TensorAccount]:
    """The account of every tensor of a job on its number of ranks; no step runs.

    Raises TitanliteError if a tensor has no answer.
    """
    accounts: list[Mapping[str, TensorAccount]] = []
    plain: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    for place in range(resolved.dims.pp):
        with _built(resolved, resolved.dims.rank(pp=place)) as (job, _):
            accounts.append(job.tensors)
            plain = job.plain_tensors
    whole = merged(accounts)
    require_whole(whole, plain)
    return whole


@contextlib.contextmanager
def _built(
    resolved: ResolvedJob, rank: int, software: Software = TODAY, **others: Any
) -> Iterator[tuple[Job, FakeTensorMode]]:
    """The job of `rank` with fake tensors, in its fake world; `others` are fields of Builders."""
    planned = _planned_device(resolved)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_settings())
        # What torch warns of, a run of the job says too.
        ignore_warnings(category=UserWarning, module=r"torch\.")
        device = "cpu" if offloads(resolved) else planned
        num_ranks = (others.get("dims") or resolved.dims).world_size
        world = stack.enter_context(fake_world(rank, num_ranks, device))
        stack.enter_context(stand_ins(planned, fuses_norms=software.rms_norm == "fused"))
        gc.freeze()  # see run_threads
        stack.callback(gc.unfreeze)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        builders = replace(fake_builders(mode, world.device), **others)
        if software.fsdp_root == "embeddings and head":
            builders = replace(builders, model=partial(_without_outer_units, builders.model))
        yield build_job(resolved, world, builders), mode


def _without_outer_units(build: Any, *arguments: Any) -> tuple[nn.Module, ParallelPlan]:
    """The model of `build`, with a plan that leaves embeddings and head to FSDP2's root unit."""
    model, plan = build(*arguments)
    return model, replace(plan, has_outer_units=False)


def _planned_device(resolved: ResolvedJob) -> str:
    return "cuda" if resolved.config.job.device == "cuda" else "cpu"


def count_parameters(resolved: ResolvedJob) -> int:
    """The elements of all parameters of the job's model; a tied weight counts once."""
    with torch.device("meta"):
        model = build_model(load_model_spec(resolved.config), resolved.model, torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def _make_optimizer_state(job: Job) -> None:
    optimizer = job.trainer.optimizer
    for parameter in job.trainer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _record_step(job: Job, recorder: StepRecorder, mode: FakeTensorMode) -> Trace:
    def run(on_gradients: Callable[[], None]) -> None:
        batches = [faked(batch, mode) for batch in job.draw()]
        recorder.note(field for batch in batches for field in batch.fields.values())
        job.trainer.step(batches, on_gradients=on_gradients)

    rank, state = job.world.rank, job.trainer.optimizer.state
    trace = Trace(rank, job.dims.coordinates(rank), recorder.events)
    trace.applied = tuple(job.applied)
    record_step(trace, recorder, mode, job.trainer.parts, [*job.parameters.values()], state, run)
    return trace


def record_step(
    trace: Trace,
    recorder: StepRecorder,
    mode: FakeTensorMode,
    parts: list[nn.Module],
    of_parts: list[nn.Parameter],
    state: Mapping[Any, Mapping[str, Any]],
    run: Callable[[Callable[[], None]], None],
) -> None:
    """Record a step of `parts` in `trace`, whose events are the recorder's.

    `run` runs it, and calls its argument when the gradients are complete.
    """
    gc.collect()
    recorder.events.clear()
    parameters = _local(of_parts)
    values = [value for one in state.values() for value in one.values()]
    states = _local(value for value in values if isinstance(value, Tensor))
    held = [*parameters, *(buffer for part in parts for buffer in part.buffers())]
    known = recorder.blocks_of([*held, *states])
    if isinstance(recorder, OffloadRecorder):
        recorder.start([*parameters, *states])
        trace.on_host = recorder.on_host
        trace.held_on_host = {
            "parameters": _num_bytes(parameters),
            "optimizer state": _num_bytes(states),
        }
    # What else is there: parameters that stay gathered, buffers of DDP and of pipeline stages.
    trace.sizes = {b: size for b, size in recorder.sizes.items() if size and b not in known}
    recorder.buffers.update(trace.sizes.keys() - recorder.gathered)
    trace.held = {
        "parameters": _num_bytes(held) - trace.held_on_host.get("parameters", 0),
        "optimizer state": 0 if trace.on_host else _num_bytes(states),
        "gathered parameters": sum(trace.sizes.get(b, 0) for b in recorder.gathered),
        "communication buffers": sum(trace.sizes.get(b, 0) for b in recorder.buffers),
    }
    gradients: set[int] = set()

    def on_gradients() -> None:
        present = [p.grad for p in of_parts if p.grad is not None]
        gradients.update(recorder.blocks_of(_local(present)))
        recorder.phase = "optimizer"

    recorder.phase = "forward"
    with mode, recorder.watching(parts):
        run(on_gradients)
    recorder.phase = "other"
    found = {
        "gradients": gradients,
        "gathered parameters": recorder.gathered,
        "communication buffers": recorder.buffers,
        "activations": _kept_for_backward(trace),
    }
    for block in recorder.sizes:
        names = (name for name, blocks in found.items() if block in blocks)
        trace.category_of[block] = next(names, "temporary")


def _kept_for_backward(trace: Trace) -> set[int]:
    """The blocks that are allocated in a forward pass and freed in a backward pass."""
    made: dict[int, str] = {}
    kept = set()
    for event in trace.events:
        if isinstance(event, Allocation):
            if event.num_bytes:
                made.setdefault(event.block, event.place.phase)
            elif made.get(event.block) == "forward" and event.place.phase != "forward":
                kept.add(event.block)
    return kept


def axes_of_groups(job: Job) -> dict[str | tuple[int, ...], tuple[str, ...]]:
    """The name of each process group, and its ranks -> its axes.

    The group of all ranks can have two: one of the mesh, and one of the mesh of the experts.
    DTensor may use a group of the same ranks that was made for an earlier job.
    """
    axes: dict[str | tuple[int, ...], tuple[str, ...]] = {}
    for mesh in (job.meshes.world, job.meshes.dp):
        for axis in mesh.mesh_dim_names or ():
            group = mesh.get_group(axis)
            # If dp_shard has one rank, dp_shard_cp is cp: the first name is kept.
            ranks = tuple(dist.get_process_group_ranks(group))
            axes.setdefault(group.group_name, axes.setdefault(ranks, (axis,)))
    if (experts := job.meshes.experts) is not None:
        for axis in experts.mesh_dim_names or ():
            name = experts.get_group(axis).group_name
            if axis not in axes.get(name, ()):
                axes[name] = (*axes.get(name, ()), axis)
    return axes


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    return [local_part(tensor) for tensor in tensors]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in map(local_part, tensors))
