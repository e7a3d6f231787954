"""The plain job, before any rank does its part: model, plan, data and loss, without storage.

    ResolvedJob -> build_plain_job -> PlainJob

Everything here is the same on every rank. What is random in the model, what is tied, and what a
token costs are found here, on "meta".
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titanlite.config import ResolvedJob, load_model_spec
from titanlite.config.data import source_arguments, spec_for
from titanlite.config.degrees import DEGREES
from titanlite.config.schema import JobConfig
from titanlite.data.sampler import read_batch
from titanlite.data.spec import NEXT_TOKEN_KEYS, Dataset, DatasetSpec
from titanlite.errors import ConfigError, TitanliteError, user_line
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.build import build_model, count_flops, plan_of
from titanlite.modules.attention import Layout, make_layout
from titanlite.modules.batch import Batch, call_model, check_forward, join, takes
from titanlite.modules.draws import Draws, find_draws
from titanlite.modules.experts import RoutedLayer, expert_layers
from titanlite.modules.names import canonical_name
from titanlite.modules.tied import find_tied
from titanlite.parallelize import ParallelPlan
from titanlite.parallelize.ddp.apply import DDPReport, apply_ddp
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.parallelize import step_of, uses_loss_parallel
from titanlite.parallelize.part import DTYPES
from titanlite.parallelize.plan import NEEDED, lacks_plan
from titanlite.parallelize.steps import STEPS
from titanlite.parallelize.tensor_account import tensors_of
from titanlite.parallelize.tensor_parallel.apply import check_tied_placements
from titanlite.plan_row import PlanRow
from titanlite.ranks.settings import as_one_process
from titanlite.registry import LOSSES, is_over_batch, load
from titanlite.training.loss import NEXT_TOKEN, Loss, batch_dims, load_loss
from titanlite.training.muon import find_matrices
from titanlite.training.optimizer import Rule, find_rules

# How torch begins its error for a batch norm of one sample.
NO_VARIANCE = "Expected more than 1 value per channel when training"


def build_plain_model(resolved: ResolvedJob, data: DatasetSpec) -> tuple[nn.Module, ParallelPlan]:
    """The plain model on the "meta" device, and its parallel plan."""
    spec = load_model_spec(resolved.config)
    with torch.device("meta"):
        model = build_model(spec, resolved.model, DTYPES[resolved.config.training.dtype])
    with as_config_error():
        check_forward(model, ["positions", "token_numbers", "sample_keys", *data.fields])
        plan = plan_of(spec, model)
        for feature in STEPS:
            if feature.is_on(resolved.config) and (convert := step_of(feature).convert) is not None:
                convert(model, plan, resolved.config)
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


@dataclass(frozen=True)
class Builders:
    """What a job is made of; a tool that needs another model, data set or reducer hands it in."""

    model: Callable[[ResolvedJob, DatasetSpec], tuple[nn.Module, ParallelPlan]] = build_plain_model
    """Builds the plain model on the "meta" device, and its plan."""
    dataset: Callable[[ResolvedJob, str], Dataset] = build_dataset
    """Builds the data set of a split."""
    ddp: Callable[..., DDPReport] = apply_ddp
    """Replicates a model, as apply_ddp does."""
    dims: ParallelDims | None = None
    """The degrees of the meshes, if not all ranks of the job are needed."""
    materialize: Callable[[Sequence[nn.Module]], None] | None = None
    """Allocates the parts of the model, without initial values; None: they are drawn."""


@dataclass(frozen=True)
class PlainJob:
    """What a job trains, before it is cut: everything without storage."""

    model: nn.Module
    plan: ParallelPlan
    """How the model is to be sharded."""
    data: DatasetSpec
    dataset: Dataset
    layout: Layout
    """Which tokens each rank of the cp axis holds."""
    example: Batch
    """One microbatch of a rank, from which a pipeline infers shapes."""
    loss: Loss
    output_dims: Any
    """For a loss over the whole batch: the batch dimension of each output, else None."""
    draws: Draws
    """The modules that draw from torch's own generators."""
    experts: Mapping[str, RoutedLayer]
    """The layers of experts, by name."""
    tied: Mapping[str, str]
    """The further names of tied weights: further name -> first name."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name -> (kind, shape)."""
    rules: Mapping[str, Rule]
    """How each trained parameter is optimized, by name."""
    model_bytes: int
    """Memory of the parameters."""
    flops_per_token: float | None
    """Forward and backward FLOPs; None if they could not be counted."""
    rows: list[PlanRow]
    """Of the effective plan: parameter groups and frozen tensors, if there are any."""


def build_plain_job(resolved: ResolvedJob, builders: Builders) -> PlainJob:
    """The plain job; raises ConfigError if its model or data set cannot be used."""
    config, dims = resolved.config, resolved.dims
    data, dataset = spec_for(config), builders.dataset(resolved, "train")
    # Where code of the model or the loss is only tried, no rank must wait for others.
    with as_one_process():
        model, plan = builders.model(resolved, data)
        layout = make_layout(
            config.parallelism.context_parallel_load_balancer, dims.num_token_shards
        )
        tied = {canonical_name(n): canonical_name(first) for n, first in find_tied(model).items()}
        trained = [canonical_name(n) for n, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ConfigError(
                f"model.name: {config.model.name} has no parameter to train, since requires_grad "
                "is False for all; train at least one"
            )
        rules = find_rules(
            trained,
            config.optimizer.no_weight_decay,
            config.optimizer.lr_multipliers,
            config.optimizer.adamw,
            _matrices(config, model, plan),
        )
        rows = [*_describe_groups(config, rules), *_describe_frozen(model)]
        example, loss = _example(resolved, data, dataset, layout), _loss_of(config, data)
        keys = {key: value for key in NEXT_TOKEN_KEYS if (value := getattr(config.training, key))}
        output_dims = None
        if is_over_batch(config.training.loss):
            output_dims = batch_dims(model, _on_meta(read_batch(dataset, [0], data.fields), config))
        return PlainJob(
            model,
            plan,
            data,
            dataset,
            layout,
            example,
            replace(loss, total=partial(loss.total, **keys)) if keys else loss,
            output_dims,
            draws=_find_draws(resolved, model, example, loss),
            experts=expert_layers([model]),
            tied=tied,
            tensors=tensors_of(model, tied),
            rules=rules,
            model_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            flops_per_token=_count_flops(resolved, model, data, dataset),
            rows=rows,
        )


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


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """Inside, a TitanliteError about the model becomes a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except TitanliteError as error:
        raise ConfigError(f"model.name: {error}") from error.__cause__


def _on_meta(batch: Batch, config: JobConfig) -> Batch:
    return batch.to(torch.device("meta"), DTYPES[config.training.dtype])


def _example(resolved: ResolvedJob, data: DatasetSpec, dataset: Dataset, layout: Layout) -> Batch:
    """One microbatch of a rank, without storage, from which a pipeline infers shapes."""
    size = 1 if resolved.pipeline is None else resolved.pipeline.microbatch_size
    batch = read_batch(dataset, [0] * size, data.fields)
    return _on_meta(batch.shard(layout, 0), resolved.config)


def _loss_of(config: JobConfig, data: DatasetSpec) -> Loss:
    own = config.training.loss
    loss: Loss = load(data.loss) if own is None else load_loss(LOSSES[own])
    return loss


def _find_draws(resolved: ResolvedJob, model: nn.Module, example: Batch, loss: Loss) -> Draws:
    """What the plain model draws for a microbatch of a rank; `example` has some rows of one."""
    is_own = type(model).__module__.startswith("titanlite.models.") and loss is NEXT_TOKEN
    if is_own and not resolved.config.lora.dropout:
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


def _count_flops(
    resolved: ResolvedJob, model: nn.Module, data: DatasetSpec, dataset: Dataset
) -> float | None:
    """The FLOPs of a token, from the model's configuration or else counted on "meta"."""
    if hasattr(resolved.model, "flops_per_token"):
        return resolved.model.flops_per_token(resolved.seq_len)
    total = count_flops(model, _on_meta(read_batch(dataset, [0], data.fields), resolved.config))
    return None if total is None else total / resolved.seq_len


def _matrices(config: JobConfig, model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """What Muon updates; raises ConfigError if that is nothing."""
    section = config.optimizer
    if section.name != "Muon":
        return {}
    found = find_matrices(model, plan.is_in_block, section.adamw)
    if not found:
        what = "give other" if section.adamw else "the plan names no blocks with matrices: give"
        raise ConfigError(
            f"optimizer.adamw: no weight is left to Muon; {what} patterns of AdamW's weights"
        )
    return found


def _describe_groups(config: JobConfig, rules: Mapping[str, Rule]) -> list[PlanRow]:
    """A row of the effective plan for the parameters that decay or learn differently, if any."""
    of_all = f"of {len(rules)} tensors"
    parts = []
    if config.optimizer.no_weight_decay:
        parts.append(f"no weight decay: {sum(not rule.decays for rule in rules.values())} {of_all}")
    counts = Counter(rule.lr_multiplier for rule in rules.values() if rule.lr_multiplier != 1.0)
    parts += [f"learning rate x {factor:g}: {count} {of_all}" for factor, count in counts.items()]
    if matrices := [rule.matrices for rule in rules.values() if rule.matrices]:
        parts.append(f"Muon: {len(matrices)} {of_all}, AdamW: the others")
    number = str(len(set(rules.values())))
    row = PlanRow("parameter groups", number, number, "; ".join(parts))
    return [row] if parts else []


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
