"""The trainer of a job: this rank's parts of the model with optimizer, scheduler and loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from titanlite.config import ResolvedJob
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import axes_where
from titanlite.modules.experts import Balancer, RoutedLayer, expert_layers
from titanlite.modules.names import canonical_name
from titanlite.parallelize.parallelize import Parallelized, uses_loss_parallel
from titanlite.plain_job import PlainJob
from titanlite.ranks.order import OrderCheck
from titanlite.ranks.world import World
from titanlite.registry import METRICS, OPTIMIZERS, SCHEDULERS, is_over_batch
from titanlite.training.averaging import WeightAverage
from titanlite.training.generators import Generators
from titanlite.training.loss import BatchLoss
from titanlite.training.optimizer import build_optimizer, build_scheduler
from titanlite.training.step import Trainer

KEYS = {"name", "lr", "beta1", "beta2", "eps", "weight_decay"}
KEYS |= {"nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn"}


def build_trainer(
    resolved: ResolvedJob, world: World, meshes: Meshes, made: Parallelized, plain: PlainJob
) -> Trainer:
    """The trainer: this rank's parts of the model with optimizer, scheduler and loss."""
    config, dims = resolved.config, resolved.dims
    followers = set() if made.pipeline is None else set(made.pipeline.copies.followers())
    names = {
        parameter: canonical_name(name)
        for part in made.parts
        for name, parameter in part.named_parameters()
    }
    section, decay_type = config.optimizer, config.lr_scheduler.decay_type
    optimizer = build_optimizer(
        [parameter for parameter in names if parameter not in followers],
        **section.model_dump(include=KEYS),
        momentum=section.used_momentum,
        implementation=section.kernels,
        build=None
        if OPTIMIZERS.is_built_in(section.name)
        else partial(OPTIMIZERS[section.name].load(), settings=section),
        rules={p: r for p, n in names.items() if (r := plain.rules.get(plain.tied.get(n, n)))},
    )
    scheduler = build_scheduler(
        optimizer,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        total_steps=config.schedule_steps,
        decay_type=decay_type,
        min_lr_factor=config.lr_scheduler.min_lr_factor,
        factor=None if SCHEDULERS.is_built_in(decay_type) else SCHEDULERS[decay_type].load(),
    )
    averaging = config.weight_averaging
    loss = plain.loss
    if config.compile.enable and "loss" in config.compile.components:
        loss = loss.compiled(config.compile.backend)
    if is_over_batch(config.training.loss):
        groups = [meshes.world[axis].get_group() for axis in dims.sample_axes]
        loss = replace(loss, total=BatchLoss(loss.total, groups, plain.output_dims))
    order = None
    if config.comm.mode == "debug" and world.size > 1:
        order = OrderCheck(meshes.axes_of_groups())
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
        before_update=order,
        metrics={name: METRICS[name].load() for name in config.validation.metrics},
        average=None
        if averaging.method == "none"
        else WeightAverage(optimizer, **averaging.model_dump()),
        generators=Generators(
            config.debug.seed,
            dims.data_rank(world.rank),
            dims.token_rank(world.rank),
            dims.place_on(axes_where(weights="stages"), world.rank),
            world.device,
        ),
        balancer=_build_balancer(made.parts, plain.experts, world.device),
    )


def _build_balancer(
    parts: Sequence[nn.Module], layers: Mapping[str, RoutedLayer], device: torch.device
) -> Balancer | None:
    """What balances the experts of the whole model's layers; None if there are none."""
    if not layers:
        return None
    return Balancer(
        expert_layers(parts),
        {name: layer.num_experts for name, layer in layers.items()},
        device,
        has_loss=any(layer.loss_factor for layer in layers.values()),
        can_drop=any(layer.capacity_factor is not None for layer in layers.values()),
    )
