"""A job: configuration and world made into something that can step, evaluate and sample.

    JobConfig + World -> build_job -> Job: step, evaluate, whole_parameters

This is where configuration, mesh, model, parallelize steps, data and training meet; train.py,
verification, sampling and benchmarks are loops over a Job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.attention import Layout, make_layout
from titanlite.batch import check_forward
from titanlite.config import load_model_spec, make_model_config
from titanlite.config.pipeline import make_pipeline_plan
from titanlite.config.schema import JobConfig
from titanlite.data.datasets import ImageDataset, build_dataset
from titanlite.data.sampler import GlobalBatchSampler, iterate_once, make_targets
from titanlite.errors import ConfigError, TitanliteError
from titanlite.mesh.device_mesh import Meshes, build_meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models import ModelSpec
from titanlite.names import canonical_name
from titanlite.parallelize import (
    DTYPES,
    Pipeline,
    split_and_parallelize,
    uses_loss_parallel,
)
from titanlite.parallelize.activation_checkpoint import CheckpointReport
from titanlite.parallelize.compile import keep_caches_apart
from titanlite.parallelize.plan import refuse_tied_weights
from titanlite.plan_row import PlanRow
from titanlite.ranks.order import OrderCheck
from titanlite.ranks.world import World
from titanlite.training.initialize import initialize
from titanlite.training.loss import make_loss_function
from titanlite.training.optimizer import build_optimizer, build_scheduler
from titanlite.training.shards import whole_tensor
from titanlite.training.step import Microbatch, StepResult, Trainer


@dataclass
class Job:
    """One rank's part of a training job."""

    config: JobConfig
    dims: ParallelDims
    world: World
    meshes: Meshes
    parts: list[nn.Module]
    """The model; with a pipeline, this rank's stages of it."""
    pipeline: Pipeline | None
    model_bytes: int
    """Memory that the whole model's parameters take."""
    model_config: Any
    trainer: Trainer
    sampler: GlobalBatchSampler
    dataset: ImageDataset
    validation_dataset: ImageDataset | None
    applied: list[PlanRow]
    checkpointing: CheckpointReport
    layout: Layout
    """Which tokens each rank of the cp axis holds; cuts a batch where it enters."""

    @property
    def global_batch_size(self) -> int:
        """Images a step, over all ranks."""
        size = self.config.training.global_batch_size
        return self.config.training.local_batch_size * self.dims.dp if size == -1 else size

    def step(self, number: int | None = None) -> StepResult:
        """Train on the next global batch, in the run's step `number`."""
        return self.trainer.step(self.draw(), number)

    def draw(self) -> list[Microbatch]:
        """This rank's microbatches of the next global batch."""
        return [self._microbatch(tokens) for tokens in self.sampler.draw()]

    def evaluate(self) -> float:
        """The mean validation loss in nats a token."""
        assert self.validation_dataset is not None
        return self.trainer.evaluate(self._validation_batches(self.validation_dataset))

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its canonical name and at its full shape; every rank must call this."""
        return self.whole(lambda parameter: parameter.detach())

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each gradient, after `trainer.compute_gradients`, as whole_parameters has the weights."""
        return self.whole(lambda parameter: parameter.grad)

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter of the whole model, by canonical name."""
        if self.pipeline is not None:
            return {name: parameter.shape for name, _, parameter in self.pipeline.parameters()}
        named = self.parts[0].named_parameters()
        return {canonical_name(name): parameter.shape for name, parameter in named}

    def whole(self, tensor_of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """What `tensor_of` gives of each parameter, of its shape and dtype; every rank must call.

        Parameters of which it gives None are left out.
        """
        own = {
            canonical_name(name): tensor_of(parameter)
            for part in self.parts
            for name, parameter in part.named_parameters()
        }
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

    def _microbatch(self, tokens_BT: Tensor, num_valid: int | None = None) -> Microbatch:
        tokens_BT = tokens_BT.to(self.world.device, non_blocking=True)
        targets_BT = make_targets(tokens_BT, num_valid)
        positions_T = torch.arange(tokens_BT.size(1), device=self.world.device)
        if not self.dims.cp_enabled:
            return Microbatch(tokens_BT, targets_BT, positions_T)
        rank = self.dims.token_rank(self.world.rank)
        return Microbatch(
            self.layout.shard(tokens_BT, 1, rank),
            self.layout.shard(targets_BT, 1, rank),
            self.layout.shard(positions_T, 0, rank),
        )

    def _validation_batches(self, dataset: ImageDataset) -> Iterator[Microbatch]:
        section = self.config.validation
        # TorchTitan's steps, counted in global batches, so that no plan validates on more.
        num_samples = None if section.steps == -1 else section.steps * self.global_batch_size
        batches = iterate_once(
            dataset,
            local_batch_size=section.local_batch_size,
            dp_degree=self.dims.dp,
            dp_rank=self.dims.data_rank(self.world.rank),
            num_samples=num_samples,
        )
        for tokens_BT, num_valid in batches:
            yield self._microbatch(tokens_BT, num_valid)


def build_job(config: JobConfig, dims: ParallelDims, world: World) -> Job:
    """Build this rank's part of the job; every rank of the world must call this.

    The model is built without storage, cut, and only then given storage and starting values, so
    that no rank ever holds more than its part.
    """
    training = config.training
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
    meshes = build_meshes(dims, world.device.type)
    axes = meshes.axes_of_groups()
    world.name_groups(dims.describe_place(world.rank), axes)
    model_config = make_model_config(config)
    spec = load_model_spec(config)
    model_class, plans = _load_model(spec)
    with torch.device("meta"):
        model = model_class(model_config).to(DTYPES[training.dtype])
    try:
        refuse_tied_weights(model)
        check_forward(model)
    except TitanliteError as error:
        raise ConfigError(f"model.name: {error}") from None
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    pipeline_plan = make_pipeline_plan(config, dims, model_config) if dims.pp_enabled else None
    made = split_and_parallelize(
        model,
        config,
        dims,
        meshes,
        pipeline_plan,
        model_config.num_tokens,
        plans.get(model_class),
    )
    storage_device = torch.device("cpu") if training.enable_cpu_offload else world.device
    for part in made.parts:
        initialize(part, config.debug.seed, storage_device)

    optimizer = build_optimizer(
        chain.from_iterable(part.parameters() for part in made.parts),
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        beta1=config.optimizer.beta1,
        beta2=config.optimizer.beta2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        momentum=config.optimizer.momentum,
        implementation=config.optimizer.kernels,
    )
    scheduler = build_scheduler(
        optimizer,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        total_steps=config.schedule_steps,
        decay_type=config.lr_scheduler.decay_type,
        min_lr_factor=config.lr_scheduler.min_lr_factor,
    )
    keep_caches_apart(meshes.world["tp"] if dims.tp_enabled else None)
    compiles_loss = config.compile.enable and "loss" in config.compile.components
    trainer = Trainer(
        parts=made.parts,
        stages=made.pipeline,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_function=make_loss_function(compiles_loss, config.compile.backend),
        world_mesh=meshes.world,
        max_norm=training.max_norm,
        is_counted=dims.counts_loss(world.rank)
        and (made.pipeline is None or made.pipeline.has_last),
        logits_are_sharded=uses_loss_parallel(config, dims),
        non_finite=config.debug.non_finite,
        before_update=OrderCheck(axes) if config.comm.mode == "debug" and world.size > 1 else None,
    )
    dataset = _dataset(config, model_config, training.dataset, training.dataset_path, "train")
    batch_size = training.global_batch_size
    sampler = GlobalBatchSampler(
        dataset,
        global_batch_size=training.local_batch_size * dims.dp if batch_size == -1 else batch_size,
        dp_degree=dims.dp,
        dp_rank=dims.data_rank(world.rank),
        local_batch_size=training.local_batch_size,
    )
    validation_dataset = None
    if config.validation.enable:
        validation_dataset = _dataset(
            config,
            model_config,
            config.validation_dataset,
            config.validation_dataset_path,
            "validation",
        )
    return Job(
        config=config,
        dims=dims,
        world=world,
        meshes=meshes,
        parts=made.parts,
        pipeline=made.pipeline,
        model_bytes=model_bytes,
        model_config=model_config,
        trainer=trainer,
        sampler=sampler,
        dataset=dataset,
        validation_dataset=validation_dataset,
        applied=made.applied,
        checkpointing=made.checkpointing,
        layout=make_layout(
            config.parallelism.context_parallel_load_balancer, dims.num_token_shards
        ),
    )


def _load_model(spec: ModelSpec) -> tuple[Any, Any]:
    """The model's class and the plans beside it."""
    try:
        return spec.load_model_class(), spec.load_plans()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.name: loading {spec.model} or {spec.plan} failed with "
            f"{type(error).__name__} ({error}); correct the ModelSpec of {spec.name}"
        ) from error


def _dataset(
    config: JobConfig, model_config: Any, name: str, path: str | None, split: str
) -> ImageDataset:
    return build_dataset(
        name,
        path=path or "",
        split=split,
        seed=config.debug.seed,
        height=model_config.image_height,
        width=model_config.image_width,
        channels=model_config.image_channels,
        vocab_size=model_config.vocab_size,
    )
