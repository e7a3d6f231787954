"""Build a job: the model, data and trainer of one rank, from a resolved job and a world.

    ResolvedJob + World -> build_job -> Job: step, evaluate, parameters, whole_parameters

This module combines configuration, mesh, model, parallelize steps, data and training. train.py,
verification, sampling and benchmarks all run on a Job.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config import ResolvedJob, load_model_spec
from titanlite.config.data import source_arguments, spec_for
from titanlite.config.degrees import DEGREES
from titanlite.config.schema import JobConfig
from titanlite.data.sampler import GlobalBatchSampler, iterate_once, read_batch
from titanlite.data.spec import Dataset, DatasetSpec
from titanlite.errors import ConfigError, TitanliteError, user_line
from titanlite.mesh.device_mesh import Meshes, build_meshes
from titanlite.mesh.parallel_dims import ParallelDims, axes_where
from titanlite.models.build import build_model, count_flops, initial_model, plan_of
from titanlite.modules.attention import Layout, make_layout
from titanlite.modules.batch import Batch, call_model, check_forward, join, takes
from titanlite.modules.draws import Draws, find_draws, separate_draws
from titanlite.modules.experts import Balancer, expert_layers
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import buffers_of, parameters_of, whole_tensor
from titanlite.modules.tied import find_tied
from titanlite.parallelize import ParallelPlan, PipelineRunner, find_blocks
from titanlite.parallelize.activation_checkpoint.apply import RecomputationReport
from titanlite.parallelize.async_tensor_parallel.apply import (
    Fusions,
    ring_products,
    warn_of_small_chunks,
)
from titanlite.parallelize.compile.apply import keep_caches_apart
from titanlite.parallelize.ddp.apply import apply_ddp
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.parallelize import (
    Parallelized,
    split_and_parallelize,
    step_of,
    uses_loss_parallel,
)
from titanlite.parallelize.part import DTYPES, Hardware
from titanlite.parallelize.plan import NEEDED, lacks_plan
from titanlite.parallelize.steps import STEPS
from titanlite.parallelize.tensor_account import (
    BUFFER,
    TensorAccount,
    account_of,
    merged,
    require_whole,
    summed_row,
    tensors_of,
)
from titanlite.parallelize.tensor_parallel.apply import check_tied_placements, shards_sequence
from titanlite.plan_row import PlanRow
from titanlite.ranks.order import OrderCheck
from titanlite.ranks.settings import start_settings
from titanlite.ranks.world import World
from titanlite.registry import LOSSES, METRICS, is_over_batch, load
from titanlite.training.generators import Generators
from titanlite.training.initialize import (
    LARGEST_WHOLE,
    draws_by_name,
    initialize,
    move_buffers,
    whole_values,
)
from titanlite.training.loss import NEXT_TOKEN, BatchLoss, Loss, batch_dims, load_loss
from titanlite.training.metrics import Validation
from titanlite.training.optimizer import Rule, build_optimizer, build_scheduler, find_rules
from titanlite.training.step import StepResult, Trainer

# How torch begins its error for a batch norm of one sample.
NO_VARIANCE = "Expected more than 1 value per channel when training"


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
        """The stage number of each part."""
        return [0] if self.pipeline is None else self.pipeline.numbers

    @property
    def held_positions(self) -> Tensor:
        """The positions in a sequence of this rank's tokens, int64 [T]."""
        seq_len = self.resolved.seq_len
        if not self.dims.cp_enabled:
            return torch.arange(seq_len)
        return self.layout.positions(self.dims.token_rank(self.world.rank), seq_len)

    def step(self, number: int | None = None) -> StepResult:
        """Train on the next global batch; `number` is the step of the run."""
        result = self.trainer.step(self.draw(), number)
        if self.fusions is not None:
            self.fusions.require()
        return result

    def draw(self) -> list[Batch]:
        """This rank's part of the next global batch, as one batch per accumulation step."""
        if self.trainer.generators is not None:
            self.trainer.generators.start_reading(self.sampler.state)
        return [self._own_part(batch) for batch in self.sampler.draw()]

    def evaluate(self) -> float:
        """The mean validation loss, in nats per target."""
        return self.validate().loss

    def validate(self) -> Validation:
        """The mean validation loss and the metrics of `validation.metrics`."""
        return self.trainer.evaluate(self.validation_batches())

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, parameter at its full shape); a collective call."""
        return self.whole(lambda parameter: parameter.detach())

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Like `whole_parameters`, for the gradients; call it after `trainer.compute_gradients`."""
        return self.whole(lambda parameter: parameter.grad)

    def whole_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, persistent buffer), the first of all copies; a collective call."""
        own = {name: whole_tensor(buffer) for name, buffer in self.buffers.items()}
        if self.pipeline is None:
            yield from own.items()
            return
        device, group = self.world.device, self.pipeline.group
        for name, one in self.tensors.items():
            if one.kind != BUFFER:
                continue
            place = self.pipeline.table.stage_to_rank[one.stages[0]]
            is_here = one.stages[0] in self.stage_numbers
            found: list[Any] = [own[name].cpu() if is_here else None]
            # Of a buffer of another stage neither shape nor dtype is known here.
            dist.broadcast_object_list(found, group=group, group_src=place)
            yield name, found[0].to(device)

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
        batch = batch.to(self.world.device, DTYPES[self.config.training.dtype])
        if not self.dims.cp_enabled:
            return batch
        return batch.shard(self.layout, self.dims.token_rank(self.world.rank))

    def validation_batches(self) -> Iterator[Batch]:
        """This rank's part of the validation set, or of its first `validation.steps` batches."""
        section, dataset = self.config.validation, self.validation_dataset
        assert dataset is not None
        # As in TorchTitan, but counted in global batches, so that every plan uses the same samples.
        num_samples = None
        if section.steps != -1:
            num_samples = section.steps * self.resolved.global_batch_size
        batches = iterate_once(
            dataset,
            local_batch_size=section.local_batch_size,
            dp_degree=self.dims.dp,
            dp_rank=self.dims.data_rank(self.world.rank),
            num_samples=num_samples,
            fields=self.data.fields,
        )
        for batch in batches:
            yield self._own_part(batch)


@dataclass(frozen=True)
class Builders:
    """What a job is made of; a tool that needs another model, data set or reducer hands it in."""

    model: Callable[[ResolvedJob, DatasetSpec], tuple[nn.Module, ParallelPlan]]
    """Builds the plain model on the "meta" device, and its plan."""
    dataset: Callable[[ResolvedJob, str], Dataset]
    """Builds the data set of a split."""
    ddp: Callable[..., int] = apply_ddp
    """Replicates a model, as apply_ddp does."""
    hardware: Hardware = field(default_factory=Hardware)
    """What the job's device can do."""
    materialize: Callable[[Sequence[nn.Module]], None] | None = None
    """Allocates the parts of the model, without initial values; None: they are drawn."""


def build_job(resolved: ResolvedJob, world: World, builders: Builders | None = None) -> Job:
    """Build this rank's part of the job; every rank of the world must call this.

    The model is built without storage, sharded, and then materialized and initialized. So a rank
    holds only its shards, and one whole parameter at a time while it draws their values. A tool
    gives `builders` to make a job of other parts.
    """
    config, dims = resolved.config, resolved.dims
    start_settings(
        deterministic=config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
    )
    world.name_places(dims.describe_place)
    data = spec_for(config)
    builders = builders or Builders(build_plain_model, build_dataset)
    model, plan = builders.model(resolved, data)
    layers = expert_layers([model])
    meshes = build_meshes(dims, world.device.type, has_experts=bool(layers))
    axes = meshes.axes_of_groups()
    world.name_groups(axes)
    dataset = builders.dataset(resolved, "train")
    layout = make_layout(config.parallelism.context_parallel_load_balancer, dims.num_token_shards)
    for layer in layers.values():
        layer.force_balance = config.debug.moe_force_load_balance
        if dims.cp_enabled:
            place = dims.token_rank(world.rank)
            layer.held_places = layout.positions(place, resolved.seq_len)
    num_experts = {name: layer.num_experts for name, layer in layers.items()}
    slow = _warn_of_slow_rings(resolved, world, model, plan)
    tied = {canonical_name(n): canonical_name(first) for n, first in find_tied(model).items()}
    plain = tensors_of(model, tied)
    trained = [canonical_name(n) for n, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            f"model.name: {config.model.name} has no parameter to train, since requires_grad is "
            "False for all; train at least one"
        )
    frozen = _describe_frozen(model)
    rules = find_rules(trained, config.optimizer.no_weight_decay, config.optimizer.lr_multipliers)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    by_name = draws_by_name(model)
    flops_per_token = _count_flops(resolved, model, data, dataset)
    output_dims = None
    if is_over_batch(config.training.loss):
        sample = read_batch(dataset, [0], data.fields)
        output_dims = batch_dims(
            model, sample.to(torch.device("meta"), DTYPES[config.training.dtype])
        )
    example, loss = _example(resolved, data, dataset, layout), _loss_of(config, data)
    draws = _find_draws(resolved, model, example, loss)
    with _as_config_error():
        made = split_and_parallelize(
            model,
            config,
            dims,
            meshes,
            resolved.pipeline,
            example,
            plan,
            builders.ddp,
            builders.hardware,
        )
    made.applied += _separate_draws(resolved, world, made.parts, draws, plan)
    keep_caches_apart(meshes.world["tp"] if dims.tp_enabled else None)
    stages = (0,) if made.pipeline is None else made.pipeline.numbers
    tensors = account_of(dict(zip(stages, made.parts, strict=True)), dims, plan, tied)
    row = None
    if builders.materialize is not None:
        builders.materialize(made.parts)
    else:
        tensors = _whole_account(tensors, meshes)
        require_whole(tensors, plain)
        made.applied += summed_row(tensors)
        row = _initialize(resolved, world, made.parts, model_bytes, by_name=by_name, tied=tied)
    if row is not None:
        made.applied.append(row)
    made.applied += [*_describe_groups(config, rules), *frozen]
    trainer = _build_trainer(resolved, world, meshes, made, loss, axes, rules, tied)
    if is_over_batch(config.training.loss):
        groups = [
            meshes.world[axis].get_group()
            for axis in axes_where(batch="samples")
            if dims.degrees[axis] > 1
        ]
        total = BatchLoss(trainer.loss.total, groups, output_dims)
        trainer.loss = replace(trainer.loss, total=total)
        where = " x ".join(axis for axis in axes_where(batch="samples") if dims.degrees[axis] > 1)
        note = f"outputs gathered over {where}" if groups else "nothing to gather"
        made.applied.append(PlanRow("loss", "whole batch", "whole batch", note))
    if num_experts:
        trainer.balancer = Balancer(
            expert_layers(made.parts),
            num_experts,
            world.device,
            has_loss=any(layer.loss_factor for layer in layers.values()),
            can_drop=any(layer.capacity_factor is not None for layer in layers.values()),
        )
    for step in STEPS:
        if step.feature.is_on(config) and (finish := step_of(step.feature).finish) is not None:
            finish(config, made.parts, trainer.optimizer)
    return Job(
        resolved=resolved,
        world=world,
        meshes=meshes,
        parts=made.parts,
        plan=plan,
        pipeline=made.pipeline,
        model_bytes=model_bytes,
        trainer=trainer,
        data=data,
        sampler=GlobalBatchSampler(
            dataset,
            global_batch_size=resolved.global_batch_size,
            dp_degree=dims.dp,
            dp_rank=dims.data_rank(world.rank),
            local_batch_size=config.training.local_batch_size,
            fields=data.fields,
            seed=config.debug.seed,
        ),
        dataset=dataset,
        validation_dataset=(
            builders.dataset(resolved, "validation") if config.validation.enable else None
        ),
        applied=made.applied,
        recomputation=made.recomputation,
        layout=layout,
        fusions=_watch_fusions(config, world, made.parts, plan),
        notes=(slow,) if slow else (),
        flops_per_token=flops_per_token,
        tied=tied,
        tensors=tensors,
        plain_tensors=plain,
        draws=draws,
    )


def _whole_account(own: dict[str, TensorAccount], meshes: Meshes) -> dict[str, TensorAccount]:
    """The accounts of all pipeline stages, from those of this rank's; a collective over pp."""
    everyone: list[Any] = [own]
    if meshes.pp is not None:
        everyone = [None] * meshes.pp.size()
        dist.all_gather_object(everyone, own, group=meshes.pp.get_group())
    return merged(everyone)


def _count_flops(
    resolved: ResolvedJob, model: nn.Module, data: DatasetSpec, dataset: Dataset
) -> float | None:
    """The FLOPs of a token, from the model's configuration or else counted on "meta"."""
    if hasattr(resolved.model, "flops_per_token"):
        return resolved.model.flops_per_token(resolved.seq_len)
    dtype = DTYPES[resolved.config.training.dtype]
    batch = read_batch(dataset, [0], data.fields).to(torch.device("meta"), dtype)
    total = count_flops(model, batch)
    return None if total is None else total / resolved.seq_len


def _warn_of_slow_rings(
    resolved: ResolvedJob, world: World, model: nn.Module, plan: ParallelPlan
) -> str:
    config, dims, device = resolved.config, resolved.dims, world.device.type
    compiled = config.compile.enable and "model" in config.compile.components
    is_ring = config.parallelism.overlap_backend(device) == "ring"
    if device != "cpu" or not compiled or not is_ring:
        return ""
    at_once = config.training.local_batch_size
    if resolved.pipeline is not None:
        at_once = resolved.pipeline.microbatch_size
    num_tokens = at_once * resolved.seq_len // dims.num_token_shards
    return warn_of_small_chunks(ring_products(model, plan, dims.tp, num_tokens))


def _watch_fusions(
    config: JobConfig, world: World, parts: list[nn.Module], plan: ParallelPlan
) -> Fusions | None:
    """None if the compiler is not asked to fuse, or if this rank's stages have no blocks."""
    backend = config.parallelism.overlap_backend(world.device.type)
    has_blocks = any(find_blocks(part, plan) for part in parts)
    return Fusions() if backend == "symmetric_memory" and has_blocks else None


def check_plain_model(resolved: ResolvedJob, features: Iterable[Feature]) -> None:
    """Raises ConfigError if the job's model does not fit its documents or one of these features.

    Uses the model on the meta device, so it can run before any rank starts.
    """
    model, plan = build_plain_model(resolved, spec_for(resolved.config))
    if not resolved.config.training.attend_across_documents and not takes(model, "documents"):
        raise ConfigError(
            f"training.attend_across_documents: forward of {type(model).__name__} takes no "
            "`documents`, so tokens would attend to other documents; set it to true, or use "
            "another model"
        )
    for feature in features:
        if (check_model := step_of(feature).check_model) is not None:
            check_model(model, plan, resolved.config, resolved.dims)


def build_plain_model(resolved: ResolvedJob, data: DatasetSpec) -> tuple[nn.Module, ParallelPlan]:
    """The plain model on the "meta" device, and its parallel plan."""
    spec = load_model_spec(resolved.config)
    with torch.device("meta"):
        model = build_model(spec, resolved.model, DTYPES[resolved.config.training.dtype])
    with _as_config_error():
        check_forward(model, ["positions", "token_numbers", "sample_keys", *data.fields])
        plan = plan_of(spec, model)
        for axis in NEEDED if plan.is_derived else ():
            if resolved.dims.degrees[axis] > 1:
                why = lacks_plan(model, axis)
                raise ConfigError(f"parallelism.{DEGREES[axis]}: {why}, or give 1")
        if resolved.dims.tp_enabled:
            check_tied_placements(
                model,
                plan,
                resolved.dims.tp,
                loss_parallel=uses_loss_parallel(resolved.config, resolved.dims),
            )
    return model, plan


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    """Inside, a TitanliteError about the model becomes a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except TitanliteError as error:
        raise ConfigError(f"model.name: {error}") from error.__cause__


def _initialize(
    resolved: ResolvedJob,
    world: World,
    parts: list[nn.Module],
    whole_bytes: int,
    *,
    by_name: bool,
    tied: Mapping[str, str],
) -> PlanRow | None:
    """Give this rank's parts storage and initial values; the row of the effective plan, if any."""
    config = resolved.config
    seed = config.debug.seed
    device = torch.device("cpu") if config.training.enable_cpu_offload else world.device
    if by_name:
        for part in parts:
            initialize(part, seed, device, tied)
            move_buffers(part, world.device)
        return None
    spec = load_model_spec(config)
    if whole_bytes > LARGEST_WHOLE:
        raise ConfigError(
            f"model.name: {spec.name} has {whole_bytes / 2**30:.0f} GiB of parameters, too many to "
            f"build it whole on one machine (the limit is {LARGEST_WHOLE >> 30} GiB); give its "
            "class init_parameter(name, parameter, generator), and init_buffers() if it has buffers"
        )
    dtype = DTYPES[config.training.dtype]
    with whole_values(lambda: initial_model(spec, resolved.model, dtype, seed), world) as values:
        for part in parts:
            initialize(part, seed, device, tied, values)
            move_buffers(part, world.device)
    way = "the whole model is built on the CPU of each machine, then sharded"
    return PlanRow("initial values", "whole", "whole", way)


def _example(resolved: ResolvedJob, data: DatasetSpec, dataset: Dataset, layout: Layout) -> Batch:
    """One microbatch of a rank, without storage, from which a pipeline infers shapes."""
    size = 1 if resolved.pipeline is None else resolved.pipeline.microbatch_size
    batch = read_batch(dataset, [0] * size, data.fields)
    dtype = DTYPES[resolved.config.training.dtype]
    return batch.shard(layout, 0).to(torch.device("meta"), dtype)


def _build_trainer(
    resolved: ResolvedJob,
    world: World,
    meshes: Meshes,
    made: Parallelized,
    loss: Loss,
    axes: dict[str, str],
    rules: Mapping[str, Rule],
    tied: Mapping[str, str],
) -> Trainer:
    """The trainer: this rank's parts of the model with optimizer, scheduler and loss."""
    config, dims = resolved.config, resolved.dims
    followers = set() if made.pipeline is None else set(made.pipeline.copies.followers())
    names = {
        parameter: canonical_name(name)
        for part in made.parts
        for name, parameter in part.named_parameters()
    }
    optimizer = build_optimizer(
        [parameter for parameter in names if parameter not in followers],
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        beta1=config.optimizer.beta1,
        beta2=config.optimizer.beta2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        momentum=config.optimizer.momentum,
        implementation=config.optimizer.kernels,
        rules={p: rule for p, n in names.items() if (rule := rules.get(tied.get(n, n)))},
    )
    scheduler = build_scheduler(
        optimizer,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        total_steps=config.schedule_steps,
        decay_type=config.lr_scheduler.decay_type,
        min_lr_factor=config.lr_scheduler.min_lr_factor,
    )
    if config.compile.enable and "loss" in config.compile.components:
        loss = loss.compiled(config.compile.backend)
    return Trainer(
        parts=made.parts,
        stages=made.pipeline,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=loss,
        world_mesh=meshes.world,
        max_norm=config.training.max_norm,
        is_counted=dims.counts_loss(world.rank)
        and (made.pipeline is None or made.pipeline.has_last),
        logits_are_sharded=uses_loss_parallel(config, dims),
        non_finite=config.debug.non_finite,
        before_update=OrderCheck(axes) if config.comm.mode == "debug" and world.size > 1 else None,
        metrics={name: METRICS[name].load() for name in config.validation.metrics},
        generators=Generators(
            config.debug.seed,
            dims.data_rank(world.rank),
            dims.token_rank(world.rank),
            dims.place_on(axes_where(weights="stages"), world.rank),
            world.device,
        ),
    )


def _loss_of(config: JobConfig, data: DatasetSpec) -> Loss:
    own = config.training.loss
    loss: Loss = load(data.loss) if own is None else load_loss(LOSSES[own])
    return loss


def _find_draws(resolved: ResolvedJob, model: nn.Module, example: Batch, loss: Loss) -> Draws:
    """What the plain model draws for a microbatch of a rank; `example` has some rows of one."""
    if type(model).__module__.startswith("titanlite.models.") and loss is NEXT_TOKEN:
        # titanlite's own models draw nothing; running a large one takes seconds.
        return Draws()
    size, key = resolved.config.training.local_batch_size, "training.local_batch_size"
    if resolved.pipeline is not None:
        key = "parallelism.pipeline_parallel_microbatch_size"
        size = resolved.pipeline.microbatch_size
    batch = join([example.rows(0, 1)] * size)

    def run(model: nn.Module) -> Callable[[], Any]:
        try:
            outputs = call_model(model, batch)
        except ValueError as error:
            if size > 1 or not str(error).startswith(NO_VARIANCE):
                raise
            where = f" ({line})" if (line := user_line(error)) else ""
            raise ConfigError(
                f"{key}: 1 gives a batch norm one value per channel, which has no variance{where}; "
                "give 2 or more"
            ) from None
        return lambda: loss.total(outputs, batch)

    return find_draws(model, run)


def _separate_draws(
    resolved: ResolvedJob,
    world: World,
    parts: list[nn.Module],
    draws: Draws,
    plan: ParallelPlan,
) -> list[PlanRow]:
    """Make ranks of tp draw as they should; a row of the effective plan if the model draws."""
    if not draws.shapes:
        return []
    notes = [
        f"{draws.describe()} {draws.verb} from torch's own generators, which depends on the plan; "
        "TokenDropout and keyed_normal do not (docs/randomness.md)"
    ]
    if resolved.dims.tp_enabled:
        sharded = shards_sequence(plan)
        place = resolved.dims.coordinates(world.rank)["tp"]
        undecided = separate_draws(
            parts, draws, place, world.device, blocks=plan.blocks or "", blocks_are_sharded=sharded
        )
        notes += [undecided] if undecided else []
    return [PlanRow("plan invariance", "on", "off", "; ".join(notes))]


def _describe_groups(config: JobConfig, rules: Mapping[str, Rule]) -> list[PlanRow]:
    """A row of the effective plan for the parameters that decay or learn differently, if any."""
    of_all = f"of {len(rules)} tensors"
    parts = []
    if config.optimizer.no_weight_decay:
        parts.append(f"no weight decay: {sum(not rule.decays for rule in rules.values())} {of_all}")
    counts = Counter(rule.lr_multiplier for rule in rules.values() if rule.lr_multiplier != 1.0)
    parts += [f"learning rate x {factor:g}: {count} {of_all}" for factor, count in counts.items()]
    number = len(set(rules.values()))
    return (
        [PlanRow("parameter groups", f"{number}", f"{number}", "; ".join(parts))] if parts else []
    )


def _describe_frozen(model: nn.Module) -> list[PlanRow]:
    """A row of the effective plan for parameters without requires_grad, if there are any."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if len(trained) == len(parameters):
        return []
    number = f"{len(parameters) - len(trained)} of {len(parameters)}"
    sizes = [sum(p.numel() for p in some) for some in (trained, parameters)]
    note = f"{sizes[0]:,} of {sizes[1]:,} parameters are trained"
    return [PlanRow("frozen tensors", number, number, note)]


def build_dataset(resolved: ResolvedJob, split: str) -> Dataset:
    """The data set of the split "train" or "validation"; raises ConfigError if its code fails."""
    config = resolved.config
    name = config.training.dataset if split == "train" else config.validation_dataset
    arguments = source_arguments(config, resolved.model, resolved.seq_len, split)
    key = f"{arguments['path_key'].partition('.')[0]}.dataset"
    try:
        dataset = spec_for(config, name).make(**arguments)
    except TitanliteError:
        raise
    except Exception as error:  # a user's data set may raise anything
        where = f" ({line})" if (line := user_line(error)) else ""
        raise ConfigError(
            f"{key}: building {name} fails with {type(error).__name__}: {error}{where}; correct it"
        ) from error
    for needed in ("sample", "num_samples"):
        if not hasattr(dataset, needed):
            raise ConfigError(
                f"{key}: {name} is a {type(dataset).__name__}, which has no `{needed}`; give it "
                "sample(index) and num_samples, the number of samples or None"
            )
    return dataset
