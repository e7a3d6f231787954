"""This rank's parts of the model, with their initial values, and the trainer that trains them."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from titanlite.config import ResolvedJob, load_model_spec
from titanlite.errors import ConfigError
from titanlite.mesh.device_mesh import Meshes, build_meshes
from titanlite.mesh.parallel_dims import ParallelDims, axes_where
from titanlite.models.build import initial_model
from titanlite.modules.draws import Draws, separate_draws
from titanlite.modules.experts import Balancer, RoutedLayer, expert_layers
from titanlite.modules.names import canonical_name
from titanlite.parallelize import ParallelPlan, tensor_account
from titanlite.parallelize.compile.apply import keep_caches_apart
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.parallelize.parallelize import (
    Parallelized,
    split_and_parallelize,
    uses_loss_parallel,
)
from titanlite.parallelize.part import DTYPES
from titanlite.parallelize.tensor_account import TensorAccount
from titanlite.parallelize.tensor_parallel.apply import shards_sequence
from titanlite.plain_job import Builders, PlainJob, as_config_error
from titanlite.plan_row import PlanRow
from titanlite.ranks.order import OrderCheck
from titanlite.ranks.peers import Peers
from titanlite.ranks.world import World
from titanlite.registry import METRICS, OPTIMIZERS, SCHEDULERS, is_over_batch
from titanlite.training.averaging import WeightAverage
from titanlite.training.generators import Generators
from titanlite.training.initial_weights import (
    LARGEST_WHOLE,
    draws_by_name,
    initialize,
    move_buffers,
    whole_values,
)
from titanlite.training.loss import BatchLoss
from titanlite.training.optimizer import build_optimizer, build_scheduler
from titanlite.training.step import Trainer

KEYS = {"name", "lr", "beta1", "beta2", "eps", "weight_decay"}
KEYS |= {"nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn"}


def build_parts(
    resolved: ResolvedJob, world: World, plain: PlainJob, builders: Builders
) -> tuple[Meshes, Parallelized, dict[str, TensorAccount]]:
    """The meshes, this rank's parts of the plain model with their values, and their account."""
    by_name = draws_by_name(plain.model)
    meshes = _open_meshes(resolved, world, plain, builders.dims or resolved.dims)
    with as_config_error():
        of_plain = plain.model, plain.plan, plain.example
        made = split_and_parallelize(resolved, meshes, *of_plain, builders.ddp)
    made.applied += _separate_draws(resolved, world, made.parts, plain.draws, plain.plan)
    keep_caches_apart(meshes.world["tp"] if resolved.dims.tp_enabled else None)
    stages = (0,) if made.pipeline is None else made.pipeline.numbers
    parts = dict(zip(stages, made.parts, strict=True))
    tensors = tensor_account.account_of(parts, resolved.dims, plain.plan, plain.tied)
    if builders.materialize is not None:
        builders.materialize(made.parts)
        return meshes, made, tensors
    if meshes.pp is not None:
        tensors = tensor_account.merged(Peers(meshes.pp.get_group()).gathered(tensors))
    tensor_account.require_whole(tensors, plain.tensors)
    made.applied += tensor_account.summed_row(tensors)
    made.applied += _initialize(resolved, world, made.parts, plain, by_name=by_name)
    return meshes, made, tensors


def build_trainer(
    resolved: ResolvedJob, world: World, meshes: Meshes, made: Parallelized, plain: PlainJob
) -> Trainer:
    """The trainer: this rank's parts of the model with optimizer, scheduler and loss."""
    config, dims = resolved.config, resolved.dims
    followers = set() if made.pipeline is None else set(made.pipeline.copies.followers())
    names = {p: canonical_name(n) for part in made.parts for n, p in part.named_parameters()}
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


def _open_meshes(
    resolved: ResolvedJob, world: World, plain: PlainJob, dims: ParallelDims
) -> Meshes:
    """The meshes of `dims`, whose axes reports then name; experts learn their place."""
    config = resolved.config
    meshes = build_meshes(
        dims,
        world.device.type,
        has_experts=bool(plain.experts),
        has_tokens=FLOAT8.is_on(config) and dims.fsdp_enabled,
    )
    world.name_groups(meshes.axes_of_groups())
    for layer in plain.experts.values():
        layer.force_balance = config.debug.moe_force_load_balance
        if dims.cp_enabled:
            place = dims.token_rank(world.rank)
            places = plain.layout.positions(place, resolved.seq_len)
            layer.held_places = places.to(world.device)
    return meshes


def _initialize(
    resolved: ResolvedJob, world: World, parts: list[nn.Module], plain: PlainJob, *, by_name: bool
) -> list[PlanRow]:
    """Give this rank's parts storage and initial values; a row of the effective plan, if any."""
    config, seed = resolved.config, resolved.config.debug.seed
    device = torch.device("cpu") if config.training.enable_cpu_offload else world.device
    spec = load_model_spec(config)
    if not by_name and plain.model_bytes > LARGEST_WHOLE:
        size, limit = (n / 2**30 for n in (plain.model_bytes, LARGEST_WHOLE))
        raise ConfigError(
            f"model.name: {spec.name} has {size:.0f} GiB of parameters, too many to build it whole "
            f"on one machine (the limit is {limit:.0f} GiB); give its class "
            "init_parameter(name, parameter, generator), and init_buffers() if it has buffers"
        )
    dtype = DTYPES[config.training.dtype]
    whole = whole_values(lambda: initial_model(spec, resolved.model, dtype, seed), world)
    with contextlib.nullcontext() if by_name else whole as values:
        for part in parts:
            initialize(part, seed, device, plain.tied, values)
            move_buffers(part, world.device)
    way = "the whole model is built on the CPU of each machine, then sharded"
    return [] if by_name else [PlanRow("initial values", "whole", "whole", way)]


def _separate_draws(
    resolved: ResolvedJob, world: World, parts: list[nn.Module], draws: Draws, plan: ParallelPlan
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
