"""Checks of keys against each other: degrees, model, data, batch and schedule.

Those of a feature are in its spec.py (titanlite/parallelize). A check is skipped if one of the keys
that it reads has an invalid value or is not known yet: until the number of ranks is known, a shard
degree of -1 is unknown. The checks' docstrings are listed in docs/configuration.md.
"""

import functools
import importlib.util
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from titanlite.config.checkpoint import CHECKPOINT_CHECKS
from titanlite.config.data import fit_problems, source_problems, spec_for, unlike_problems
from titanlite.config.degrees import DEGREES
from titanlite.config.draft import Draft
from titanlite.config.model import size_problems
from titanlite.config.schema import JobConfig
from titanlite.data.spec import NEXT_TOKEN, NEXT_TOKEN_KEYS, WEIGHTED
from titanlite.errors import ConfigError, nearest, one_of, quote
from titanlite.fields import MODEL, Check, reads
from titanlite.mesh.parallel_dims import ParallelDims, axes_where
from titanlite.parallelize.pipeline_parallel.spec import PIPELINE_KEYS
from titanlite.parallelize.steps import FEATURES
from titanlite.registry import DATASETS, OPTIMIZERS, REGISTRIES, is_over_batch


def check_machine(config: JobConfig, device_type: str) -> None:
    """Raises ConfigError if this machine lacks something that `config` needs on `device_type`."""
    problems = [
        problem for feature in FEATURES for problem in feature.machine_problems(config, device_type)
    ]
    if problems:
        raise ConfigError(*problems)


def run_checks(
    job: Draft, unknown: Collection[str] = (), changed: Collection[str] | None = None
) -> Iterator[str]:
    """The problems of the job; checks that read one of the `unknown` keys are skipped.

    With `changed`, only the checks that read one of these keys run.
    """
    missing = {MODEL, *unknown} if job.model is None else unknown
    of_changed = None if changed is None else frozenset(changed)
    for check in _chosen(frozenset(missing), of_changed):
        yield from check.problems(job)


@functools.lru_cache
def _chosen(unknown: frozenset[str], changed: frozenset[str] | None) -> list[Check[Draft]]:
    def read_one(keys: Collection[str], names: Collection[str]) -> bool:
        return any(_overlap(key, name) for key in keys for name in names)

    return [
        check
        for check in CHECKS
        if not read_one(unknown, check.reads)
        and (changed is None or read_one(changed, check.reads))
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
    """The model's sizes fit together; the TP degree divides the heads, the key and value heads, the
    SwiGLU's width and the tokens, and is at most the vocabulary size."""
    for key, message in job.misfits:
        yield f"{key}: {message}"


@reads("training.dataset", "training.dataset_path")
def _source(job: Draft) -> Iterator[str]:
    """The training data set exists; dataset_path is set for data on disk only."""
    training = job.config.training
    yield from source_problems("training", training.dataset, training.dataset_path)


def _registered(key: str, kind: str) -> Check[Draft]:
    @reads(key, "experimental.custom_import")
    def check(job: Draft) -> Iterator[str]:
        section, _, leaf = key.partition(".")
        value, known = getattr(getattr(job.config, section), leaf), REGISTRIES[kind]
        for name in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
            if name is not None and name not in known:
                advice = f"give {one_of(map(quote, known))}, or" if known else "remove this key, or"
                yield (
                    f"{key}: no {kind} {quote(name)} is registered; {advice} set "
                    f"experimental.custom_import to a module that calls titanlite.register_{kind}"
                )

    check.problems.__doc__ = f"{key} names a registered {kind}."
    return check


@reads("training")
def _cross_entropy(job: Draft) -> Iterator[str]:
    """Only the cross-entropies of titanlite have training.label_smoothing and training.z_loss; the
    weighted one needs data with weights."""
    training, data = job.config.training, DATASETS.get(job.config.training.dataset)
    own = training.loss or (data and data.loss != NEXT_TOKEN and data.name)
    if own == WEIGHTED and data is not None and "weights" not in data.fields:
        yield (
            f"training.loss: {quote(own)} needs the field weights, which {quote(data.name)} has "
            "not; give a data set with weights, or remove this key"
        )
    for key in NEXT_TOKEN_KEYS:
        if own and own != WEIGHTED and getattr(training, key):
            yield f"training.{key}: {quote(own)} has a loss of its own; remove this key"


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
    """The training data fits the model's sequence length and vocabulary, the tokenizer can be read,
    and only text is split at documents."""
    dataset = job.config.training.dataset
    yield from fit_problems("training", dataset, job.config, job.model, job.seq_len)


@reads(MODEL, "validation", *DATA_KEYS)
def _validation_data(job: Draft) -> Iterator[str]:
    """So does the validation data, which has the fields and the loss of the training data."""
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
    own = job.own_length
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
    """If the model has a fixed sequence length, training.seq_len is that or not set;
    validation.seq_len is the training length or not set."""
    own, training = job.own_length, job.config.training.seq_len
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


BATCH = [f"training.{key}" for key in ("local_batch_size", "global_batch_size")]
BATCH.append("training.batch_size_schedule")


@reads(*(f"parallelism.{DEGREES[axis]}" for axis in axes_where(batch="samples")), *BATCH)
def _batch(job: Draft) -> Iterator[str]:
    """global_batch_size, and each size of batch_size_schedule, is a multiple of local_batch_size
    times the data-parallel degree."""
    training = job.config.training
    local, at_once = training.local_batch_size, training.local_batch_size * job.dims.dp
    first = dict(training.batch_size_schedule).get(1, training.global_batch_size)
    if training.global_batch_size not in (-1, first):
        yield (
            f"training.batch_size_schedule: step 1 has {first} sequences, but global_batch_size is "
            f"{training.global_batch_size}; give {first} for both, or leave out one"
        )
    sizes = {size: "batch_size_schedule" for _, size in training.batch_size_schedule}
    for batch, key in {**sizes, training.global_batch_size: "global_batch_size"}.items():
        if batch != -1 and batch % at_once:
            legal = nearest(batch, range(at_once, batch + at_once + 1, at_once))
            yield (
                f"training.{key}: {batch} is not a multiple of {at_once} "
                f"(local_batch_size {local} x data-parallel degree {job.dims.dp}); give {legal}"
            )


@reads(
    *("training.loss", *BATCH, "validation", "experimental.custom_import", *PIPELINE_KEYS),
    *("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"),
)
def _batch_loss(job: Draft) -> Iterator[str]:
    """A loss over the whole batch computes all samples of a step at once, and validates in batches
    of the same size."""
    name = job.config.training.loss
    if name is None or not is_over_batch(name):
        return
    (_, batch), *later = job.batch_sizes
    dp, pipeline, local = job.dims.dp, job.pipeline, job.config.training.local_batch_size
    over = f"the loss {quote(name)} is over the whole batch"
    if later:
        yield (
            f"training.batch_size_schedule: {over}, whose size decides how many samples a sample "
            "is compared with; remove this key"
        )
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


@reads("optimizer")
def _optimizer(job: Draft) -> Iterator[str]:
    """optimizer.momentum is only for SGD and Muon, and other keys are only for Muon. SGD cannot be
    "fused": PyTorch's fused SGD does not support sharded weights."""
    optimizer = job.config.optimizer
    if OPTIMIZERS.is_built_in(optimizer.name) and optimizer.name != "Muon":
        is_sgd = optimizer.name == "SGD" or not optimizer.momentum
        for key in ("nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn", "adamw", "momentum"):
            default = type(optimizer).model_fields[key].default
            if getattr(optimizer, key) != default and not (key == "momentum" and is_sgd):
                yield (
                    f"optimizer.{key}: it is only for {'SGD and ' if key == 'momentum' else ''}"
                    f"Muon, but optimizer.name is {quote(optimizer.name)}; remove this key"
                )
    if optimizer.name == "SGD" and optimizer.implementation == "fused":
        yield (
            'optimizer.implementation: PyTorch\'s "fused" SGD does not support sharded '
            'weights; give "foreach", or remove this key'
        )


@reads("weight_averaging", "training.steps")
def _averaging(job: Draft) -> Iterator[str]:
    """weight_averaging.decay is only for "ema" and k only for "last_k"; the other keys need one of
    them, and start_step is a step of the run."""
    section, steps = job.config.weight_averaging, job.config.training.steps
    for key, methods in {"decay": ("ema",), "k": ("last_k",), "freq": ("ema", "last_k")}.items():
        default = type(section).model_fields[key].default
        if getattr(section, key) != default and section.method not in methods:
            yield (
                f"weight_averaging.{key}: it is only for {' and '.join(map(quote, methods))}, but "
                f"weight_averaging.method is {quote(section.method)}; remove this key"
            )
    if section.start_step > (steps if section.method != "none" else 1):
        yield (
            f"weight_averaging.start_step: {section.start_step} is after the last step, {steps}, "
            "so nothing would be averaged; give an earlier step"
            if section.method != "none"
            else 'weight_averaging.start_step: weight_averaging.method is "none"; remove this key'
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


@reads("memory_estimation")
def _memory_estimation(job: Draft) -> Iterator[str]:
    """Memory is estimated with fake tensors only."""
    estimation = job.config.memory_estimation
    if estimation.enable and estimation.disable_fake_mode:
        yield (
            "memory_estimation.disable_fake_mode: true estimates with real tensors, which "
            "titanlite does not do; write false, or remove this line"
        )


@reads("metrics")
def _loggers(job: Draft) -> Iterator[str]:
    """The packages that [metrics] needs are installed."""
    for package in ("tensorboard", "wandb"):
        asked = getattr(job.config.metrics, f"enable_{package}")
        if asked and importlib.util.find_spec(package) is None:
            yield (
                f"metrics.enable_{package}: the package {package} is not installed; "
                f'pip install "titanlite[{package}]"'
            )


CHECKS: tuple[Check[Draft], ...] = (
    _registered("training.loss", "loss"),
    _registered("validation.metrics", "metric"),
    _registered("optimizer.name", "optimizer"),
    _registered("lr_scheduler.decay_type", "scheduler"),
    *(value for value in list(globals().values()) if isinstance(value, Check)),
    *CHECKPOINT_CHECKS,
    *(check for feature in FEATURES for check in feature.checks),
)
"""All checks: those of this module, of [checkpoint], and of the features."""
