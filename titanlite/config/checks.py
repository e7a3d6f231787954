"""What has to fit together: degrees and model, model and data, batch, schedule, features.

A check names the keys it reads, so that it stays silent while one of them is wrong by itself, or
not known yet: before the ranks are counted, a shard degree of -1 is unknown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.checkpoint import checkpoint_problems
from titanlite.config.data import fit_problems, shape_of, source_problems
from titanlite.config.degrees import make_parallel_dims
from titanlite.config.model import ResolvedModel, make_model_config, resolve_model
from titanlite.config.pipeline import make_pipeline_plan
from titanlite.config.schema import JobConfig
from titanlite.config.toml import quote
from titanlite.errors import ConfigError, nearest
from titanlite.mesh.parallel_dims import ParallelDims, divisors


def check_job(config: JobConfig, dims: ParallelDims) -> None:
    """Raises ConfigError with everything in `config` that does not fit together over `dims`."""
    problems = list(_run_checks(config, dims, make_model_config(config), ()))
    if problems:
        raise ConfigError(*problems)


def check_machine(config: JobConfig, device_type: str) -> None:
    """Raises ConfigError where this machine lacks what `config` asks for on that device."""
    compiled = config.compile
    if compiled.enable and compiled.backend == "inductor" and device_type == "cpu":
        # As PyTorch's inductor chooses it.
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise ConfigError(
                f'compile.backend: "inductor" needs a C++ compiler on CPU, and there is no '
                f"{compiler} on the PATH; install it, or set compile.enable = false"
            )


def find_problems(config: JobConfig, wrong: Collection[str]) -> list[str]:
    """What can be said before the number of ranks is known; `wrong` names keys in doubt."""
    model, unknown = ResolvedModel(), set(wrong)
    if not {"model", "model.name", "experimental", "experimental.custom_import"} & unknown:
        model = resolve_model(config, flavor_is_known="model.flavor" not in unknown)
    unknown |= model.doubtful
    if config.parallelism.data_parallel_shard_degree == -1:
        unknown.add("parallelism.data_parallel_shard_degree")
    dims = make_parallel_dims(config, None)
    return model.problems + list(_run_checks(config, dims, model.sizes, unknown))


Check = Callable[[JobConfig, ParallelDims, Any], Iterator[str]]
CHECKS: list[tuple[Check, tuple[str, ...]]] = []
MODEL = "the model"  # what `reads` calls the resolved configuration of the model


def reads(*names: str) -> Callable[[Check], Check]:
    """Registers a check with the keys and sections it reads."""

    def enter(check: Check) -> Check:
        CHECKS.append((check, names))
        return check

    return enter


def _run_checks(
    config: JobConfig, dims: ParallelDims, model: Any, unknown: Collection[str]
) -> Iterator[str]:
    missing = {MODEL, *unknown} if model is None else set(unknown)
    for check, names in CHECKS:
        if not any(_overlap(name, read) for name in missing for read in names):
            yield from check(config, dims, model)


def _overlap(one: str, other: str) -> bool:
    """Whether two keys or sections are the same, or one holds the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


@reads("comm")
def _recorder(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """Comparing what the ranks called takes a flight recorder that keeps it."""
    if config.comm.mode == "debug" and config.comm.trace_buf_size == 0:
        yield (
            'comm.trace_buf_size: 0 keeps no collectives, and comm.mode = "debug" compares them; '
            "give 2000"
        )


@reads(MODEL, "parallelism.tensor_parallel_degree")
def _split(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The model's own sizes, and the degrees that split them: tensor parallelism divides heads,
    key and value heads, the SwiGLU's hidden width and the tokens, and is at most the vocabulary."""
    for key, message in model.problems(dims):
        yield f"{key}: {message}"


@reads("training.dataset", "training.dataset_path")
def _source(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The data set exists; one that is read from disk has its folder, and no other has one."""
    yield from source_problems("training", config.training.dataset, config.training.dataset_path)


@reads("validation", "training.dataset", "training.dataset_path")
def _validation_source(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The same for a data set of [validation]'s own."""
    own = config.validation.dataset or config.validation.dataset_path
    if config.validation.enable and own:
        dataset, path = config.validation_dataset, config.validation_dataset_path
        yield from source_problems("validation", dataset, path)


@reads(MODEL, "training.dataset")
def _data(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The images and pixel values of the data set are those the model takes."""
    yield from fit_problems("training", config.training.dataset, config, model)


@reads(MODEL, "validation", "training.dataset")
def _validation_data(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The same for the validation data."""
    if config.validation.enable and config.validation_dataset != config.training.dataset:
        yield from fit_problems("validation", config.validation_dataset, config, model)


@reads(MODEL, "training.seq_len", "validation.enable", "validation.seq_len")
def _sequence(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """A sequence, where its length is given, is one image."""
    lengths = {"training": config.training.seq_len}
    if config.validation.enable:
        lengths["validation"] = config.validation.seq_len
    for section, given in lengths.items():
        if given not in (None, model.num_tokens):
            yield (
                f"{section}.seq_len: {given} is not the pixel count of {shape_of(model)} images; "
                f"leave it out or give {model.num_tokens}"
            )


@reads(
    MODEL,
    "parallelism.context_parallel_degree",
    "parallelism.context_parallel_load_balancer",
    "parallelism.tensor_parallel_degree",
)
def _context_parallel(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The sequence is cut evenly: by CP, in twice as many chunks for "headtail", then by TP."""
    if not dims.cp_enabled:
        return
    layout = config.parallelism.context_parallel_load_balancer
    chunks = 2 if layout == "headtail" else 1
    if model.num_tokens % (dims.cp * chunks * dims.tp):
        # TP alone is checked with the model's other sizes.
        legal = [
            degree
            for degree in divisors(model.num_tokens)
            if model.num_tokens % (degree * chunks * dims.tp) == 0
        ]
        factors = " x ".join(
            [f"context_parallel_degree {dims.cp}"]
            + (['2 ("headtail")'] if chunks == 2 else [])
            + ([f"tensor_parallel_degree {dims.tp}"] if dims.tp > 1 else [])
        )
        advice = f"give {nearest(dims.cp, legal)}" if legal else "use fewer ranks"
        yield (
            f"parallelism.context_parallel_degree: the {model.num_tokens} tokens of an image "
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
def _pipeline(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """Blocks make up the stages, microbatches the batch, and the schedule runs with them."""
    if dims.pp_enabled:
        try:
            make_pipeline_plan(config, dims, model)
        except ConfigError as error:
            yield from error.problems


RESHARD = "parallelism.fsdp_reshard_after_forward"


@reads(MODEL, "compile", "activation_checkpoint", RESHARD, *PIPELINE_KEYS)
def _split_backward(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """A backward pass in two parts goes with neither compile, "op" nor "always": PyTorch cannot."""
    if not dims.pp_enabled:
        return
    with contextlib.suppress(ConfigError):
        schedule = make_pipeline_plan(config, dims, model).schedule
        ac, compiled = config.activation_checkpoint, config.compile
        if schedule.splits_backward and ac.mode == "selective" and ac.selective_ac_option == "op":
            yield (
                f'activation_checkpoint.selective_ac_option: "op" does not go with '
                f"{schedule.name}, which runs input and weight gradients apart, since what it "
                'saves is there once; give "1" or another number, or mode "none"'
            )
        if schedule.splits_backward and compiled.enable and "model" in compiled.components:
            yield (
                f'compile.components: "model" does not go with {schedule.name}, which runs input '
                'and weight gradients apart; take "model" out, or set '
                'parallelism.pipeline_parallel_schedule to "1F1B" or "Interleaved1F1B"'
            )
        if schedule.splits_backward and config.parallelism.fsdp_reshard_after_forward == "always":
            yield (
                f'{RESHARD}: "always" does not go with {schedule.name}, which runs input and '
                "weight gradients apart, since FSDP loses a microbatch's weight gradients where it "
                'frees the weights in between; give "default" or "never"'
            )


@reads(MODEL, "parallelism.tensor_parallel_degree", "parallelism.disable_loss_parallel")
def _loss_parallel(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """Each tensor-parallel rank has a part of the logits that the loss is split over."""
    vocab, tp = model.vocab_size, dims.tp
    if tp == 1 or config.parallelism.disable_loss_parallel or model.problems(dims):
        return

    def count_parts(degree: int) -> int:
        return math.ceil(vocab / math.ceil(vocab / degree))

    if count_parts(tp) < tp:
        legal = [n for n in divisors(tp) if count_parts(n) == n]
        yield (
            f"parallelism.tensor_parallel_degree: {tp} leaves {tp - count_parts(tp)} ranks without "
            f"any of model.vocab_size {vocab}, and a loss in parallel needs some on each; "
            f"give {nearest(tp, legal)}, or set parallelism.disable_loss_parallel = true"
        )


@reads(
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "training.local_batch_size",
    "training.global_batch_size",
)
def _batch(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """global_batch_size is a multiple of local_batch_size times the data-parallel degree."""
    local, batch = config.training.local_batch_size, config.training.global_batch_size
    at_once = local * dims.dp
    if batch != -1 and batch % at_once:
        legal = nearest(batch, range(at_once, batch + at_once + 1, at_once))
        yield (
            f"training.global_batch_size: {batch} is not a multiple of {at_once} "
            f"(local_batch_size {local} x data-parallel degree {dims.dp}); give {legal}"
        )


@reads("lr_scheduler", "training.steps")
def _schedule(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The run does not outlast its learning-rate schedule. Warm-up and decay are cut to fit."""
    total, steps = config.schedule_steps, config.training.steps
    if total < steps:
        yield (
            f"lr_scheduler.total_steps: {total} is less than training.steps {steps}; "
            f"give at least {steps}"
        )


@reads("activation_checkpoint", "compile")
def _recomputation(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """Memory budgets come with compile; recording recomputation goes without "op"."""
    ac, compiled = config.activation_checkpoint, config.compile
    if ac.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        yield (
            'activation_checkpoint.mode: "memory_budget" is carried out by the compiler; '
            'set compile.enable = true with "model" in compile.components, or give another mode'
        )
    if ac.debug and ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            'activation_checkpoint.debug: PyTorch cannot record under selective_ac_option "op"; '
            'set it to false, or selective_ac_option to "1"'
        )


@reads("compile")
def _compilation(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """What is enabled compiles something."""
    if config.compile.enable and not config.compile.components:
        yield (
            'compile.components: is empty, so nothing would be compiled; add "model" or "loss", '
            "or set compile.enable = false"
        )


@reads("optimizer")
def _optimizer(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """Only SGD takes a momentum, and PyTorch's fused SGD takes no sharded weights."""
    optimizer = config.optimizer
    if optimizer.momentum and optimizer.name != "SGD":
        yield (
            f"optimizer.momentum: {optimizer.momentum} is for SGD, and optimizer.name is "
            f"{quote(optimizer.name)}; leave it out"
        )
    if optimizer.name == "SGD" and optimizer.implementation == "fused":
        yield (
            'optimizer.implementation: PyTorch\'s "fused" SGD takes no sharded weights; give '
            '"foreach", or leave it out'
        )


@reads("job.dump_folder")
def _dump_folder(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The output can be written."""
    name = f"job.dump_folder: {quote(config.job.dump_folder)}"
    folder = Path(config.job.dump_folder).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        yield f"{name} cannot be made, as {quote(str(folder))} is not a folder; give another"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"{name} cannot be written, for lack of permission in {quote(str(folder))}"


@reads("profiling", "parallelism.pipeline_parallel_degree")
def _profiling(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """A trace and its warm-up fit between two traces; a timeline needs a pipeline."""
    profiling = config.profiling
    if profiling.enable_pipeline_timeline and not dims.pp_enabled:
        yield (
            "profiling.enable_pipeline_timeline: there is no pipeline to draw; set it to false, "
            "or parallelism.pipeline_parallel_degree to 2 or more"
        )
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        yield (
            f"profiling.profile_freq: {profiling.profile_freq} is less than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}; "
            f"give at least {cycle}"
        )


@reads("checkpoint")
def _checkpoints(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """What a checkpoint is loaded from exists; a .safetensors file holds weights alone."""
    yield from checkpoint_problems(config)


@reads("metrics")
def _loggers(config: JobConfig, dims: ParallelDims, model: Any) -> Iterator[str]:
    """The packages that [metrics] asks for are installed."""
    for asked, package in (
        (config.metrics.enable_tensorboard, "tensorboard"),
        (config.metrics.enable_wandb, "wandb"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            yield (
                f"metrics.enable_{package}: the package {package} is not installed; "
                f'pip install "titanlite[{package}]"'
            )
