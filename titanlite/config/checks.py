"""Checks of keys against each other: degrees, model, data, batch, schedule and features.

Each check declares the keys it reads. It is skipped if one of them has an invalid value or is not
known yet: until the number of ranks is known, a shard degree of -1 is unknown. The checks'
docstrings are listed in docs/configuration.md.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.checkpoint import (
    checkpoint_problems,
    hf_folder_problems,
    hf_writing_problems,
)
from titanlite.config.data import (
    fit_problems,
    own_length,
    sequence_length,
    source_problems,
    spec_for,
    unlike_problems,
)
from titanlite.config.degrees import DEGREES
from titanlite.config.keys import one_of
from titanlite.config.model import num_experts, size_problems
from titanlite.config.pipeline import PipelinePlan, make_pipeline_plan
from titanlite.config.schema import JobConfig
from titanlite.config.toml import quote
from titanlite.errors import ConfigError, nearest
from titanlite.mesh.parallel_dims import ParallelDims, axes_where, divisors
from titanlite.registry import DATASETS, LOSSES, METRICS, is_over_batch


def check_machine(config: JobConfig, device_type: str) -> None:
    """Raises ConfigError if this machine lacks something that `config` needs on `device_type`."""
    compiled = config.compile
    if compiled.enable and compiled.backend == "inductor" and device_type == "cpu":
        # The same choice as PyTorch's inductor makes.
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise ConfigError(
                f'compile.backend: "inductor" needs a C++ compiler on CPU, but there is no '
                f"{compiler} on the PATH; install it, or set compile.enable = false"
            )
    parallelism = config.parallelism
    if parallelism.overlap_backend(device_type) == "symmetric_memory":
        if device_type != "cuda":
            raise ConfigError(
                'parallelism.async_tensor_parallel_backend: "symmetric_memory" needs GPUs, '
                f'but this job runs on {device_type}; give "ring" or "auto"'
            )
        # If the backend is named, `_async_tensor_parallel` has checked this already.
        if parallelism.async_tensor_parallel_backend == "auto":
            for problem in _symmetric_memory_problems(config):
                raise ConfigError(problem)


@dataclass
class Draft:
    """A job while it is checked, with the values that follow from its configuration."""

    config: JobConfig
    dims: ParallelDims
    model: Any
    """The model's own configuration; None if a mistake leaves it unknown."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per step, over all ranks."""
        training = self.config.training
        size = training.global_batch_size
        return training.local_batch_size * self.dims.dp if size == -1 else size

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return sequence_length(self.config, self.model)

    @functools.cached_property
    def num_experts(self) -> int:
        """The experts of a block; 0 without any."""
        return num_experts(self.config, self.model)

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Stages and schedule; None without a pipeline, or if it has problems."""
        return self._pipeline[0]

    @property
    def pipeline_problems(self) -> tuple[str, ...]:
        return self._pipeline[1]

    @functools.cached_property
    def _pipeline(self) -> tuple[PipelinePlan | None, tuple[str, ...]]:
        if not self.dims.pp_enabled:
            return None, ()
        try:
            return make_pipeline_plan(self.config, self.dims, self.model), ()
        except ConfigError as error:
            return None, error.problems


Check = Callable[[Draft], Iterator[str]]
CHECKS: list[tuple[Check, tuple[str, ...]]] = []
MODEL = "the model"  # the name for the model's own configuration in `reads`


def reads(*names: str) -> Callable[[Check], Check]:
    """Register a check with the keys and sections that it reads."""

    def enter(check: Check) -> Check:
        CHECKS.append((check, names))
        return check

    return enter


def run_checks(
    job: Draft, unknown: Collection[str] = (), changed: Collection[str] | None = None
) -> Iterator[str]:
    """The problems of the job; checks that read one of the `unknown` keys are skipped.

    With `changed`, only the checks that read one of these keys run.
    """
    missing = {MODEL, *unknown} if job.model is None else unknown
    of_changed = None if changed is None else frozenset(changed)
    for check in _chosen(frozenset(missing), of_changed):
        yield from check(job)


@functools.lru_cache
def _chosen(unknown: frozenset[str], changed: frozenset[str] | None) -> list[Check]:
    def read_one(keys: Collection[str], names: Collection[str]) -> bool:
        return any(_overlap(key, name) for key in keys for name in names)

    return [
        check
        for check, names in CHECKS
        if not read_one(unknown, names) and (changed is None or read_one(changed, names))
    ]


def _overlap(one: str, other: str) -> bool:
    """Whether two keys or sections are the same, or one contains the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


@reads("comm")
def _recorder(job: Draft) -> Iterator[str]:
    """comm.mode = "debug" needs torch's flight recorder: comm.trace_buf_size is not 0."""
    if job.config.comm.mode == "debug" and job.config.comm.trace_buf_size == 0:
        yield (
            'comm.trace_buf_size: 0 records no collectives, but comm.mode = "debug" compares them; '
            "give 2000"
        )


@reads(MODEL, "parallelism.tensor_parallel_degree")
def _split(job: Draft) -> Iterator[str]:
    """The model's sizes fit together, and the tensor parallel degree divides the heads, the key and
    value heads, the SwiGLU's hidden width and the tokens, and is at most the vocabulary size."""
    for key, message in size_problems(job.model, job.dims, job.seq_len):
        yield f"{key}: {message}"


@reads("training.dataset", "training.dataset_path")
def _source(job: Draft) -> Iterator[str]:
    """The training data set exists; dataset_path is set for data on disk, and for no other data."""
    training = job.config.training
    yield from source_problems("training", training.dataset, training.dataset_path)


@reads("training.loss", "experimental.custom_import")
def _loss(job: Draft) -> Iterator[str]:
    """training.loss names a registered loss."""
    name = job.config.training.loss
    if name is not None and name not in LOSSES:
        advice = f"give {one_of(map(quote, LOSSES))}, or" if LOSSES else "remove this key, or"
        yield (
            f"training.loss: no loss {quote(name)} is registered; {advice} set "
            "experimental.custom_import to a module that calls titanlite.register_loss"
        )


@reads("validation.metrics", "experimental.custom_import")
def _metrics(job: Draft) -> Iterator[str]:
    """validation.metrics names registered metrics."""
    for name in dict.fromkeys(job.config.validation.metrics):
        if name not in METRICS:
            yield (
                f"validation.metrics: no metric {quote(name)} is registered; give "
                f"{one_of(map(quote, METRICS))}, or set experimental.custom_import to a module "
                "that calls titanlite.register_metric"
            )


@reads("validation", "training.dataset", "training.dataset_path")
def _validation_source(job: Draft) -> Iterator[str]:
    """If [validation] names a data set, it exists, with the same rule for its dataset_path."""
    own = job.config.validation.dataset or job.config.validation.dataset_path
    if job.config.validation.enable and own:
        dataset, path = job.config.validation_dataset, job.config.validation_dataset_path
        yield from source_problems("validation", dataset, path)


DATA_KEYS = ("training.dataset", "training.attend_across_documents", "model.hf_assets_path")


@reads(MODEL, *DATA_KEYS)
def _data(job: Draft) -> Iterator[str]:
    """The training data has the sequence length and token values that the model takes, the
    tokenizer can be read, and only text is split at documents."""
    dataset = job.config.training.dataset
    yield from fit_problems("training", dataset, job.config, job.model, job.seq_len)


@reads(MODEL, "validation", *DATA_KEYS)
def _validation_data(job: Draft) -> Iterator[str]:
    """The validation data has them too, and the same fields and loss as the training data."""
    config, dataset = job.config, job.config.validation_dataset
    if config.validation.enable and dataset != config.training.dataset:
        yield from fit_problems("validation", dataset, config, job.model, job.seq_len)
        yield from unlike_problems(config.training.dataset, dataset, config.training.loss)


@reads(MODEL, "sampling", "training.seq_len", *DATA_KEYS)
def _sampling(job: Draft) -> Iterator[str]:
    """sampling.prompt and sampling.num_tokens are only for text, and fit the model."""
    config, section = job.config, job.config.sampling
    if config.training.dataset not in DATASETS:
        return
    prompt: list[int] = []
    try:
        spec = spec_for(config)
        prompt = spec.start_tokens(section.prompt) or []
    except ConfigError as error:
        # fit_problems reports what is wrong with the data themselves.
        yield from (line for line in error.problems if line.startswith("sampling."))
        return
    if section.num_tokens is None:
        if len(prompt) >= job.seq_len:
            yield (
                f"sampling.prompt: it has {len(prompt):,} tokens, but a sample has "
                f"{job.seq_len:,}; shorten it, or set sampling.num_tokens"
            )
        return
    # Samples are drawn by the plain model: only its own limits count, not those of the plan.
    known = size_problems(job.model, ParallelDims(), job.seq_len)
    limits = size_problems(job.model, ParallelDims(), section.num_tokens)
    own = own_length(job.model)
    if spec.end_token is None:
        yield f'sampling.num_tokens: "{spec.name}" is not text; remove this key'
    elif own is not None and section.num_tokens > own:
        yield (
            f"sampling.num_tokens: {section.num_tokens:,} is more than the {own:,} tokens that the "
            "model takes; give at most that"
        )
    elif new := [message for key, message in limits if (key, message) not in known]:
        yield f"sampling.num_tokens: {new[0]}"
    elif section.num_tokens <= len(prompt):
        yield (
            f"sampling.num_tokens: {section.num_tokens:,} is not more than the {len(prompt):,} "
            f"tokens of the prompt; give at least {len(prompt) + 1:,}"
        )


@reads(MODEL, "training.seq_len", "training.dataset", "validation.enable", "validation.seq_len")
def _sequence(job: Draft) -> Iterator[str]:
    """If the model has a fixed sequence length, training.seq_len is that length or not set;
    validation.seq_len, if set, is the training length."""
    own, training = own_length(job.model), job.config.training.seq_len
    if own is not None and training not in (None, own):
        yield (
            f"training.seq_len: {training} is not the sequence length of the model; remove this "
            f"key, or give {own}"
        )
    validation = job.config.validation
    if validation.enable and validation.seq_len not in (None, job.seq_len):
        yield (
            f"validation.seq_len: {validation.seq_len} is not the sequence length of training; "
            f"remove this key, or give {job.seq_len}"
        )


@reads(
    MODEL,
    "parallelism.context_parallel_degree",
    "parallelism.context_parallel_load_balancer",
    "parallelism.tensor_parallel_degree",
    "training.seq_len",
    "training.dataset",
)
def _context_parallel(job: Draft) -> Iterator[str]:
    """The CP degree (twice that for "headtail") times the TP degree divides the sequence length."""
    if not job.dims.cp_enabled:
        return
    spec = DATASETS.get(job.config.training.dataset)
    if spec is not None and not spec.has_tokens:
        dims = {name: dim for name, dim in spec.fields.items() if dim is not None}
        name = quote(job.config.training.dataset)
        if not dims:
            yield (
                f"parallelism.context_parallel_degree: {name} has no token dimension to split: "
                "`fields` of its registration gives None for every field; give the dimension of "
                "the tokens there, or set this degree to 1"
            )
            return
        if own_length(job.model) is None:
            what = ", ".join(f"{field} along {dim}" for field, dim in dims.items())
            yield (
                f"parallelism.context_parallel_degree: the fields of {name} are split ({what}), "
                "but their length is not known; give the model's configuration class `seq_len`"
            )
            return
    layout = job.config.parallelism.context_parallel_load_balancer
    chunks = 2 if layout == "headtail" else 1
    if job.seq_len % (job.dims.cp * chunks * job.dims.tp):
        # TP alone is checked with the model's other sizes.
        legal = [
            degree
            for degree in divisors(job.seq_len)
            if job.seq_len % (degree * chunks * job.dims.tp) == 0
        ]
        factors = " x ".join(
            [f"context_parallel_degree {job.dims.cp}"]
            + (['2 ("headtail")'] if chunks == 2 else [])
            + ([f"tensor_parallel_degree {job.dims.tp}"] if job.dims.tp > 1 else [])
        )
        advice = f"give {nearest(job.dims.cp, legal)}" if legal else "use fewer ranks"
        yield (
            f"parallelism.context_parallel_degree: the {job.seq_len} tokens of a sequence "
            f"are not a multiple of {factors}; {advice}"
        )


PIPELINE_KEYS = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.module_fqns_per_model_part",
    "training.local_batch_size",
)


@reads(MODEL, *PIPELINE_KEYS)
def _pipeline(job: Draft) -> Iterator[str]:
    """The blocks divide into the pipeline stages, local_batch_size divides into microbatches, and
    the schedule can run with them."""
    yield from job.pipeline_problems


RESHARD = "parallelism.fsdp_reshard_after_forward"
EP = "parallelism.expert_parallel_degree"


@reads(MODEL, "compile", "activation_checkpoint", RESHARD, *PIPELINE_KEYS)
def _split_backward(job: Draft) -> Iterator[str]:
    """A pipeline schedule that splits the backward pass works neither with a compiled model, nor
    with activation checkpointing by "op" or fsdp_reshard_after_forward = "always", because PyTorch
    does not support these."""
    if job.pipeline is None or not job.pipeline.schedule.splits_backward:
        return
    name = job.pipeline.schedule.name
    ac, compiled = job.config.activation_checkpoint, job.config.compile
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            f'activation_checkpoint.selective_ac_option: "op" does not work with {name}, which '
            "computes input and weight gradients separately, because PyTorch can use the saved "
            'outputs only once; give "1" or another number, or set mode = "none"'
        )
    if compiled.enable and "model" in compiled.components:
        yield (
            f'compile.components: "model" does not work with {name}, which computes input and '
            'weight gradients separately; remove "model", or set '
            'parallelism.pipeline_parallel_schedule to "1F1B" or "Interleaved1F1B"'
        )
    if job.config.parallelism.fsdp_reshard_after_forward == "always":
        yield (
            f'{RESHARD}: "always" does not work with {name}, which computes input and weight '
            "gradients separately: if FSDP frees the weights in between, it loses weight "
            'gradients; give "default" or "never"'
        )


@reads(MODEL, "activation_checkpoint", RESHARD, EP, *PIPELINE_KEYS)
def _experts_by_operator(job: Draft) -> Iterator[str]:
    """Activation checkpointing by "op" of experts that have their own shards does not work in a
    pipeline with fsdp_reshard_after_forward = "always"."""
    ac, parallelism = job.config.activation_checkpoint, job.config.parallelism
    by_operator = ac.mode == "selective" and ac.selective_ac_option == "op"
    own_shards = job.dims.ep_enabled or job.dims.tp_enabled
    always = parallelism.fsdp_reshard_after_forward == "always"
    if by_operator and own_shards and always and job.dims.pp_enabled and job.num_experts:
        yield (
            f'{RESHARD}: "always" does not work with activation_checkpoint.selective_ac_option '
            '"op" in a pipeline of blocks with experts, because PyTorch would gather the experts '
            'inside a recomputation that it checks against the forward pass; give "default" or '
            '"never"'
        )


@reads(MODEL, "parallelism.tensor_parallel_degree", "parallelism.disable_loss_parallel")
def _loss_parallel(job: Draft) -> Iterator[str]:
    """With loss parallel, each tensor parallel rank has a part of the vocabulary."""
    vocab, tp = getattr(job.model, "vocab_size", None), job.dims.tp
    is_off = tp == 1 or job.config.parallelism.disable_loss_parallel
    if vocab is None or is_off or size_problems(job.model, job.dims, job.seq_len):
        return

    def count_parts(degree: int) -> int:
        return math.ceil(vocab / math.ceil(vocab / degree))

    if count_parts(tp) < tp:
        legal = [n for n in divisors(tp) if count_parts(n) == n]
        yield (
            f"parallelism.tensor_parallel_degree: {tp} leaves {tp - count_parts(tp)} ranks without "
            f"a part of model.vocab_size {vocab}, but loss parallel needs one on each rank; "
            f"give {nearest(tp, legal)}, or set parallelism.disable_loss_parallel = true"
        )


@reads(
    MODEL,
    EP,
    *(f"parallelism.{DEGREES[axis]}" for axis in ("dp_shard", "cp", "tp")),
)
def _expert_parallel(job: Draft) -> Iterator[str]:
    """The EP degree divides the product of the FSDP, CP and TP degrees, and the number of experts;
    each expert can be sharded over the ranks that EP leaves."""
    dims = job.dims
    if not dims.ep_enabled:
        return
    experts = job.num_experts
    if not experts:
        yield f"{EP}: {dims.ep}, but the model has no experts; remove this key"
        return
    room = dims.num_expert_ranks
    legal = [degree for degree in divisors(room) if experts % degree == 0]
    product = f"data_parallel_shard_degree {dims.dp_shard} x context_parallel_degree {dims.cp} x "
    product += f"tensor_parallel_degree {dims.tp} = {room}"
    if room % dims.ep:
        yield f"{EP}: {dims.ep} does not divide {product}; give {nearest(dims.ep, legal)}"
    elif experts % dims.ep:
        yield (
            f"{EP}: {dims.ep} does not divide the {experts} experts of a block; give "
            f"{nearest(dims.ep, legal)}"
        )


@reads(MODEL, "debug.moe_force_load_balance")
def _forced_balance(job: Draft) -> Iterator[str]:
    """debug.moe_force_load_balance needs a model with experts."""
    if job.config.debug.moe_force_load_balance and not job.num_experts:
        yield "debug.moe_force_load_balance: the model has no experts; remove this key"


ASYNC_TP = "parallelism.enable_async_tensor_parallel"


@reads(
    MODEL,
    ASYNC_TP,
    "parallelism.async_tensor_parallel_backend",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "training.seq_len",
    "training.dataset",
    "compile",
)
def _async_tensor_parallel(job: Draft) -> Iterator[str]:
    """Async TP needs a tensor parallel degree above 1, and a sequence that divides into equal
    chunks; with symmetric memory it also needs a model compiled by inductor."""
    parallelism, dims = job.config.parallelism, job.dims
    if not parallelism.enable_async_tensor_parallel:
        if parallelism.async_tensor_parallel_backend != "auto":
            yield (
                "parallelism.async_tensor_parallel_backend: "
                f"{quote(parallelism.async_tensor_parallel_backend)} has no effect without async "
                f"TP; remove it, or set {ASYNC_TP} = true"
            )
        return
    if dims.tp == 1:
        yield (
            f"{ASYNC_TP}: there is no tensor parallelism to overlap; set it to false, or set "
            "parallelism.tensor_parallel_degree to 2 or more"
        )
    tokens, remainder = divmod(job.seq_len, dims.cp)
    if not remainder and tokens % dims.tp and not size_problems(job.model, dims, job.seq_len):
        yield (
            f"{ASYNC_TP}: {tokens} tokens are not a multiple of tensor_parallel_degree {dims.tp}, "
            "but async TP needs equal chunks; set tensor_parallel_degree to "
            f"{nearest(dims.tp, divisors(tokens))}, or set this key to false"
        )
    if parallelism.async_tensor_parallel_backend == "symmetric_memory":
        yield from _symmetric_memory_problems(job.config)


def _symmetric_memory_problems(config: JobConfig) -> Iterator[str]:
    """Symmetric memory needs a model compiled by inductor, which does the fusion."""
    compiled = config.compile
    if not compiled.enable or "model" not in compiled.components:
        yield (
            f"{ASYNC_TP}: symmetric memory needs the compiler, but the model is not "
            'compiled; set compile.enable = true with "model" in compile.components, or '
            'parallelism.async_tensor_parallel_backend = "ring"'
        )
    elif compiled.backend != "inductor":
        yield (
            f"{ASYNC_TP}: symmetric memory needs inductor, but compile.backend is "
            f'{quote(compiled.backend)}; set compile.backend = "inductor", or '
            'parallelism.async_tensor_parallel_backend = "ring"'
        )


@reads(
    *(f"parallelism.{DEGREES[axis]}" for axis in axes_where(batch="samples")),
    "training.local_batch_size",
    "training.global_batch_size",
)
def _batch(job: Draft) -> Iterator[str]:
    """global_batch_size is a multiple of local_batch_size times the data-parallel degree."""
    local, batch = job.config.training.local_batch_size, job.config.training.global_batch_size
    at_once = local * job.dims.dp
    if batch != -1 and batch % at_once:
        legal = nearest(batch, range(at_once, batch + at_once + 1, at_once))
        yield (
            f"training.global_batch_size: {batch} is not a multiple of {at_once} "
            f"(local_batch_size {local} x data-parallel degree {job.dims.dp}); give {legal}"
        )


@reads(
    *("training.loss", "training.local_batch_size", "training.global_batch_size", "validation"),
    *("experimental.custom_import", *PIPELINE_KEYS),
    *("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"),
)
def _batch_loss(job: Draft) -> Iterator[str]:
    """With a loss over the whole batch, all samples of a step are computed at once, and those of a
    validation in batches of the same size."""
    name = job.config.training.loss
    if name is None or not is_over_batch(name):
        return
    batch, dp, pipeline = job.global_batch_size, job.dims.dp, job.pipeline
    local = job.config.training.local_batch_size
    over = f"the loss {quote(name)} is over the whole batch"
    if batch > local * dp and batch % dp == 0:
        yield (
            f"training.global_batch_size: {over}, so it cannot be accumulated in "
            f"{batch // (local * dp)} parts; set training.local_batch_size to {batch // dp}, or "
            f"training.global_batch_size to {local * dp}"
        )
    if pipeline is not None and pipeline.microbatch_size < local:
        yield (
            f"parallelism.pipeline_parallel_microbatch_size: {over}, so a pipeline cannot cut it "
            f"into {local // pipeline.microbatch_size} microbatches; set "
            "parallelism.pipeline_parallel_degree to 1"
        )
    validation = job.config.validation
    if validation.enable and validation.local_batch_size * dp != batch and batch % dp == 0:
        yield (
            f"validation.local_batch_size: {over}, so a validation needs batches of the same "
            f"{batch} samples; give {batch // dp}"
        )


@reads("lr_scheduler", "training.steps")
def _schedule(job: Draft) -> Iterator[str]:
    """lr_scheduler.total_steps, if set, is at least training.steps."""
    total, steps = job.config.schedule_steps, job.config.training.steps
    if total < steps:
        yield (
            f"lr_scheduler.total_steps: {total} is less than training.steps {steps}; "
            f"give at least {steps}"
        )


@reads("activation_checkpoint", "compile")
def _recomputation(job: Draft) -> Iterator[str]:
    """activation_checkpoint.mode = "memory_budget" needs a compiled model, and
    activation_checkpoint.debug does not work with "op"."""
    ac, compiled = job.config.activation_checkpoint, job.config.compile
    if ac.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        yield (
            'activation_checkpoint.mode: "memory_budget" needs a compiled model; '
            'set compile.enable = true with "model" in compile.components, or give another mode'
        )
    if ac.debug and ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            'activation_checkpoint.debug: PyTorch cannot record with selective_ac_option "op"; '
            'set it to false, or set selective_ac_option to "1"'
        )


FLOAT8 = "quantize.linear.float8"


@reads("model.converters", FLOAT8, ASYNC_TP)
def _float8(job: Draft) -> Iterator[str]:
    """Float8 needs torchao and does not work with async TP; FSDP gathers in float8 only with the
    recipe "tensorwise"."""
    section = job.config.quantize.linear.float8
    if not job.config.converts_to_float8:
        return
    if importlib.util.find_spec("torchao") is None:
        yield (
            "model.converters: float8 needs the package torchao, which is not installed; "
            'pip install "titanlite[float8]"'
        )
    if job.config.parallelism.enable_async_tensor_parallel:
        yield (
            f"{ASYNC_TP}: it does not support float8 scales; set it to false, or remove "
            f'"{FLOAT8}" from model.converters'
        )
    if section.enable_fsdp_float8_all_gather and section.recipe != "tensorwise":
        yield (
            f"{FLOAT8}.enable_fsdp_float8_all_gather: {quote(section.recipe)} scales rows and "
            "columns separately, but a gathered weight has one scale; set it to false, or set "
            'recipe_name to "tensorwise"'
        )
    if (
        section.precompute_float8_dynamic_scale_for_fsdp
        and not section.enable_fsdp_float8_all_gather
    ):
        yield (
            f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp: has no effect unless weights are "
            "gathered in float8; set enable_fsdp_float8_all_gather = true, or remove this key"
        )
    if section.recipe == "rowwise_with_gw_hp" and "auto_filter_small_kn" in section.filter_fqns:
        yield (
            f'{FLOAT8}.filter_fqns: torchao does not support "auto_filter_small_kn" with '
            '"rowwise_with_gw_hp"; remove it, or set recipe_name to "rowwise"'
        )


@reads("compile")
def _compilation(job: Draft) -> Iterator[str]:
    """compile.enable = true needs at least one component."""
    if job.config.compile.enable and not job.config.compile.components:
        yield (
            'compile.components: is empty, so nothing would be compiled; add "model" or "loss", '
            "or set compile.enable = false"
        )


@reads("optimizer")
def _optimizer(job: Draft) -> Iterator[str]:
    """optimizer.momentum is only for SGD, and SGD cannot be "fused", because PyTorch's fused SGD
    does not support sharded weights."""
    optimizer = job.config.optimizer
    if optimizer.momentum and optimizer.name != "SGD":
        yield (
            f"optimizer.momentum: {optimizer.momentum} is only for SGD, but optimizer.name is "
            f"{quote(optimizer.name)}; remove this key"
        )
    if optimizer.name == "SGD" and optimizer.implementation == "fused":
        yield (
            'optimizer.implementation: PyTorch\'s "fused" SGD does not support sharded '
            'weights; give "foreach", or remove this key'
        )


@reads("job.dump_folder")
def _dump_folder(job: Draft) -> Iterator[str]:
    """dump_folder can be created and written."""
    name = f"job.dump_folder: {quote(job.config.job.dump_folder)}"
    folder = Path(job.config.job.dump_folder).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        yield f"{name} cannot be created: {quote(str(folder))} is not a folder; give another path"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield (
            f"{name} cannot be written: no permission to write in {quote(str(folder))}; change its "
            "permissions, or give another path"
        )


@reads("profiling", "parallelism.pipeline_parallel_degree")
def _profiling(job: Draft) -> Iterator[str]:
    """profile_freq is at least profiler_warmup + profiler_active; a pipeline timeline needs a
    pipeline."""
    profiling = job.config.profiling
    if profiling.enable_pipeline_timeline and not job.dims.pp_enabled:
        yield (
            "profiling.enable_pipeline_timeline: there is no pipeline to draw; set it to false, "
            "or set parallelism.pipeline_parallel_degree to 2 or more"
        )
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        yield (
            f"profiling.profile_freq: {profiling.profile_freq} is less than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}; "
            f"give at least {cycle}"
        )


@reads("checkpoint")
def _checkpoints(job: Draft) -> Iterator[str]:
    """The path to load from exists, and a .safetensors file is used only for weights."""
    yield from checkpoint_problems(job.config)


@reads("checkpoint", MODEL)
def _hf_folder(job: Draft) -> Iterator[str]:
    """The config.json of a Hugging Face folder to load from has the sizes of [model]."""
    yield from hf_folder_problems(job.config, job.model)


@reads("memory_estimation")
def _memory_estimation(job: Draft) -> Iterator[str]:
    """Memory is estimated with fake tensors only."""
    estimation = job.config.memory_estimation
    if estimation.enable and estimation.disable_fake_mode:
        yield (
            "memory_estimation.disable_fake_mode: true estimates with real tensors, which "
            "titanlite does not do; write false, or remove this line"
        )


@reads("checkpoint", MODEL)
def _written_to_hf(job: Draft) -> Iterator[str]:
    """The Hugging Face folder of the last step can hold the model."""
    yield from hf_writing_problems(job.config, job.model)


@reads("metrics")
def _loggers(job: Draft) -> Iterator[str]:
    """The packages that [metrics] needs are installed."""
    for asked, package in (
        (job.config.metrics.enable_tensorboard, "tensorboard"),
        (job.config.metrics.enable_wandb, "wandb"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            yield (
                f"metrics.enable_{package}: the package {package} is not installed; "
                f'pip install "titanlite[{package}]"'
            )
