"""Build a job: the model, data and trainer of one rank, from a resolved job and a world.

    ResolvedJob -> build_plain_job -> PlainJob                  titanlite/plain_job.py
    PlainJob + World -> build_job -> Job: step, evaluate, parameters, whole_parameters

This module combines configuration, mesh, model, parallelize steps, data and training. train.py,
verification, sampling and benchmarks all run on a Job.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config import ResolvedJob
from titanlite.config.schema import JobConfig
from titanlite.data.sampler import GlobalBatchSampler, iterate_once
from titanlite.data.spec import Dataset, DatasetSpec
from titanlite.job_parts import build_parts, build_trainer
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.modules.attention import Layout
from titanlite.modules.batch import Batch
from titanlite.modules.draws import Draws, states_of_generators
from titanlite.modules.lora import adapted_layer, merged
from titanlite.modules.shards import buffers_of, parameters_of, whole_tensor
from titanlite.parallelize import ParallelPlan, PipelineRunner
from titanlite.parallelize.activation_checkpoint.apply import RecomputationReport
from titanlite.parallelize.async_tensor_parallel.apply import Fusions
from titanlite.parallelize.async_tensor_parallel.step import warn_of_slow_rings, watch_fusions
from titanlite.parallelize.parallelize import step_of
from titanlite.parallelize.part import DTYPES
from titanlite.parallelize.steps import STEPS
from titanlite.parallelize.tensor_account import TensorAccount
from titanlite.plain_job import Builders, build_plain_job
from titanlite.plan_row import PlanRow
from titanlite.ranks.settings import start_settings
from titanlite.ranks.turns import is_rank
from titanlite.ranks.world import World
from titanlite.registry import is_over_batch
from titanlite.training.metrics import ValidationResult
from titanlite.training.step import StepResult, Trainer


@dataclass
class Job:
    """One rank's part of a training job."""

    resolved: ResolvedJob
    world: World
    meshes: Meshes
    parts: list[nn.Module]
    """The model, or with a pipeline, this rank's stages."""
    plan: ParallelPlan
    """How the model is sharded."""
    pipeline: PipelineRunner | None
    model_bytes: int
    """Memory of the whole model's parameters."""
    trainer: Trainer
    data: DatasetSpec
    sampler: GlobalBatchSampler
    dataset: Dataset
    validation_dataset: Dataset | None
    applied: list[PlanRow]
    recomputation: RecomputationReport
    layout: Layout
    """Which tokens each rank of the cp axis holds; batches are sharded by it."""
    fusions: Fusions | None = None
    """The fusions of async TP by the compiler; None if it is not asked to fuse."""
    notes: tuple[str, ...] = ()
    """Lines to print at the start."""
    flops_per_token: float | None = None
    """Forward and backward FLOPs; None if they could not be counted."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The further names of tied weights: further name -> first name."""
    tensors: Mapping[str, TensorAccount] = field(default_factory=dict)
    """The account of each tensor of the model; of a planned job, those of this rank's stages."""
    plain_tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """The tensors of the plain model: name -> (kind, shape)."""
    draws: Draws = field(default_factory=Draws)
    """The modules that draw from torch's own generators."""
    _reader: ThreadPoolExecutor | None = None
    _ahead: tuple[int, Future[list[Batch]]] | None = None

    @property
    def config(self) -> JobConfig:
        return self.resolved.config

    @property
    def dims(self) -> ParallelDims:
        return self.resolved.dims

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, or its shards of them, by canonical name.

        A tied weight has its first name. If this rank has several copies of it, the first is here.
        """
        return parameters_of(self.parts, self.tied)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers, by canonical name."""
        return buffers_of(self.parts)

    def holds_first(self, name: str) -> bool:
        """Whether this rank has the first of all copies of a buffer, the one that is saved."""
        position = self.dims.coordinates(self.world.rank)
        is_first = all(at == 0 for axis, at in position.items() if axis != "pp")
        return is_first and self.tensors[name].stages[0] in self.stage_numbers

    @property
    def stage_numbers(self) -> Sequence[int]:
        return [0] if self.pipeline is None else self.pipeline.numbers

    def step(self, number: int | None = None) -> StepResult:
        """Train on the next global batch; `number` is the step of the run."""
        batches = self.draw(number)
        if self._reader is not None and number and number < self.config.training.steps:
            size = self.resolved.num_sequences(number + 1, number + 1)
            ahead = copy.copy(self.sampler)
            self._ahead = ahead.state, self._reader.submit(self._read, ahead, size)
        return self.trainer.step(batches, number)

    def draw(self, number: int | None = None) -> list[Batch]:
        """This rank's part of the next global batch, as one batch per accumulation step.

        `number` is the step of the run, by default that of the learning-rate schedule.
        """
        number = number or self.trainer.scheduler.last_epoch + 1
        size = self.resolved.num_sequences(number, number)
        first, ahead, self._ahead = self.sampler.state, self._ahead, None
        if self.trainer.generators is not None:
            self.trainer.generators.start_reading(first)
        if ahead is not None and ahead[0] == first:
            self.sampler.state += size
            return ahead[1].result()
        before = states_of_generators(self.world.device)
        batches = self._read(self.sampler, size)
        if states_of_generators(self.world.device) != before:
            self._reader = None  # it would draw from the generators of the running step
        return batches

    def _read(self, sampler: GlobalBatchSampler, size: int) -> list[Batch]:
        batches = [self._own_part(batch) for batch in sampler.draw(size)]
        if sampler is not self.sampler and self.world.device.type == "cuda":
            # A step has read its loss, so the next copies may take the memory of its batch.
            torch.cuda.current_stream().synchronize()
        return batches

    @contextlib.contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Inside, each step but the last reads the next one's batches on a thread meanwhile.

        Not if samples draw from the generators of the process, and not on ranks that are threads,
        which share these. The sampler's state is that of the step.
        """
        if not self.config.training.prefetch or is_rank():
            yield
            return
        own_stream: tuple[Any, ...] = ()
        if self.world.device.type == "cuda":
            own_stream = torch.cuda.set_stream, (torch.cuda.Stream(self.world.device),)
        with ThreadPoolExecutor(1, "reading ahead", *own_stream) as self._reader:
            yield

    def evaluate(self) -> float:
        """The mean validation loss, in nats per target."""
        return self.validate().loss

    def validate(self) -> ValidationResult:
        """The mean validation loss and the metrics of `validation.metrics`."""
        return self.trainer.evaluate(self.validation_batches())

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, parameter at its full shape); a collective call."""
        return self.whole(lambda parameter: parameter.detach())

    def merged_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Like `whole_parameters`, with the adapters of LoRA added to the weights."""
        layers = filter(None, map(adapted_layer, self.parameter_shapes()))
        return merged(self.whole_parameters(), dict.fromkeys(layers, self.config.lora.scale))

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Like `whole_parameters`, for the gradients; call it after `trainer.compute_gradients`."""
        return self.whole(lambda parameter: parameter.grad)

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """The full shape of every parameter of the model, by canonical name."""
        if self.pipeline is not None:
            return {name: parameter.shape for name, _, parameter in self.pipeline.parameters()}
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    def whole(self, tensor_of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, `tensor_of(parameter)` at its full shape); a collective call.

        `tensor_of` returns a tensor of the parameter's shape and dtype, or None to skip it.
        """
        own = {name: tensor_of(parameter) for name, parameter in self.parameters.items()}
        if self.pipeline is None:
            for name, tensor in own.items():
                if tensor is not None:
                    yield name, whole_tensor(tensor)
            return
        device, group = self.world.device, self.pipeline.group
        for name, place, parameter in self.pipeline.parameters():
            tensor = own.get(name)
            exists = torch.tensor(tensor is not None, dtype=torch.int, device=device)
            dist.broadcast(exists, group=group, group_src=place)
            if not exists:
                continue
            if tensor is None:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            else:
                whole = whole_tensor(tensor).to(device).contiguous()
            dist.broadcast(whole, group=group, group_src=place)
            yield name, whole

    def _own_part(self, batch: Batch) -> Batch:
        """The batch on this rank's device; with CP, only this rank's tokens."""
        if self.dims.cp_enabled:
            batch = batch.shard(self.layout, self.dims.token_rank(self.world.rank))
        return batch.to(self.world.device, DTYPES[self.config.training.dtype])

    def validation_batches(self) -> Iterator[Batch]:
        """This rank's part of the validation set, or of its first `validation.steps` batches."""
        section, dataset = self.config.validation, self.validation_dataset
        assert dataset is not None
        # As in TorchTitan, but counted in global batches, so that every plan uses the same samples.
        num_samples = section.steps * self.resolved.global_batch_size
        batches = iterate_once(
            dataset,
            local_batch_size=section.local_batch_size,
            dp_degree=self.dims.dp,
            dp_rank=self.dims.data_rank(self.world.rank),
            num_samples=None if section.steps == -1 else num_samples,
            fields=self.data.fields,
        )
        yield from map(self._own_part, batches)


def build_job(resolved: ResolvedJob, world: World, builders: Builders | None = None) -> Job:
    """Build this rank's part of the job; every rank of the world must call this.

    The model is built without storage, sharded, and then materialized and initialized. So a rank
    holds only its shards, and one whole parameter at a time while it draws their values. A tool
    gives `builders` to make a job of other parts.
    """
    config, dims, debug = resolved.config, resolved.dims, resolved.config.debug
    start_settings(deterministic=debug.deterministic, warn_only=debug.deterministic_warn_only)
    world.name_places(dims.describe_place)
    builders = builders or Builders()
    plain = build_plain_job(resolved, builders)
    slow = warn_of_slow_rings(resolved, world.device, plain.model, plain.plan)
    meshes, made, tensors = build_parts(resolved, world, plain, builders)
    made.applied += plain.rows
    trainer = build_trainer(resolved, world, meshes, made, plain)
    if is_over_batch(config.training.loss):
        where = " x ".join(dims.sample_axes)
        note = f"outputs gathered over {where}" if where else "nothing to gather"
        made.applied.append(PlanRow("loss", "whole batch", "whole batch", note))
    for feature in STEPS:
        if feature.is_on(config) and (finish := step_of(feature).finish) is not None:
            finish(config, made.parts, trainer.optimizer)
    return Job(
        resolved=resolved,
        world=world,
        meshes=meshes,
        parts=made.parts,
        plan=plain.plan,
        pipeline=made.pipeline,
        model_bytes=plain.model_bytes,
        trainer=trainer,
        data=plain.data,
        sampler=GlobalBatchSampler(
            plain.dataset,
            dp_degree=dims.dp,
            dp_rank=dims.data_rank(world.rank),
            local_batch_size=config.training.local_batch_size,
            fields=plain.data.fields,
            seed=debug.seed,
        ),
        dataset=plain.dataset,
        validation_dataset=(
            builders.dataset(resolved, "validation") if config.validation.enable else None
        ),
        applied=made.applied,
        recomputation=made.recomputation,
        layout=plain.layout,
        fusions=watch_fusions(config, world.device, made.parts, plain.plan),
        notes=(slow,) if slow else (),
        flops_per_token=plain.flops_per_token,
        tied=plain.tied,
        tensors=tensors,
        plain_tensors=plain.tensors,
        draws=plain.draws,
    )
