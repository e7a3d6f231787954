"""The facts of the first screen, from plain values: device, model, data, batch, steps, output.

The steps in titanlite/parallelize report the parallel features.
"""

import math
from pathlib import Path
from typing import Any

from titanlite.config.data import has_tokens
from titanlite.config.keys import job_keys
from titanlite.config.model import flavor_of, load_model_spec
from titanlite.config.resolve import ResolvedJob
from titanlite.config.schema import JobConfig
from titanlite.observe.first_screen import Fact

# The changes of the batch size that are shown.
MOST_SIZES = 4


def run_facts(
    resolved: ResolvedJob,
    device: Fact,
    torch_version: str,
    num_training: int | None,
    num_validation: int | None = None,
    *,
    num_parameters: int,
    folder: Path,
    fingerprint: str = "",
    first_step: int = 1,
    starts_from: Path | None = None,
) -> list[Fact]:
    """The main facts about a run, one line each; `device` is a device_fact.

    `num_training` and `num_validation` are the sequences of an epoch: None if the data is endless
    or, for validation, not used. `fingerprint` identifies data whose name does not.
    `num_parameters` counts the whole model, `folder` is the output folder, `starts_from` the
    checkpoint or weights that were loaded.
    """
    config = resolved.config
    return [
        device,
        Fact("torch", torch_version),
        _model(resolved, num_parameters),
        *_sequence(resolved),
        _data(config, num_training, num_validation, fingerprint),
        _dtype(config),
        _batch(resolved),
        _steps(resolved, num_training, first_step),
        _optimizer(config),
        _learning_rate(config),
        Fact("output", str(folder)),
        _start(config, starts_from),
        _saving(config, folder),
    ]


def name_idle_keys(config: JobConfig) -> str:
    """A line that lists the keys that the job sets without effect; "" if there are none."""
    idle = []
    for key in job_keys().values():
        if key.inert:
            section: Any = config
            for name in key.section.split("."):
                section = getattr(section, name)
            if getattr(section, key.leaf) != key.default:
                idle.append(key.name)
    if not idle:
        return ""
    return f"no effect here, because their TorchTitan feature is off: {', '.join(idle)}"


def device_fact(
    resolved: ResolvedJob,
    active: str,
    backend: str,
    num_local_ranks: int,
    num_gpus: int,
    device_name: str = "",
    num_threads: int = 1,
) -> Fact:
    """The hardware of a run on `active`, "cpu" or "cuda"; the counts are of this machine."""
    asked, num_ranks = resolved.config.job.device, resolved.dims.world_size
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    text = f"{active}, {ranks} with {backend}"
    if device_name:
        text += f", {device_name}"
    elif num_threads > 1:
        text += f", {num_threads} threads each"
    if asked != "auto" or active == "cuda":
        return Fact("device", text)
    if num_gpus == 0:
        return Fact("device", f"{text}; this machine has no GPU")
    gpus = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
    why = f"not cuda: {num_local_ranks} ranks need more than {gpus}"
    return Fact("device", f"{text}; {why}", differs=True)


def _model(resolved: ResolvedJob, num_parameters: int) -> Fact:
    section = resolved.config.model
    flavor = flavor_of(resolved.config, load_model_spec(resolved.config).load_flavors())
    text = f"{section.name}, flavor {flavor}: {num_parameters:,} parameters"
    if section.overrides:
        text += f"; with {', '.join(f'{key} {value}' for key, value in section.overrides.items())}"
    return Fact("model", text)


def _sequence(resolved: ResolvedJob) -> list[Fact]:
    """The length of a sequence; no fact if a sample has none."""
    if resolved.seq_len == 1 and not has_tokens(resolved.config):
        return []
    text = f"{resolved.seq_len:,} token{'s' * (resolved.seq_len != 1)}"
    if vocabulary := getattr(resolved.model, "vocab_size", None):
        text += f" of a vocabulary of {vocabulary:,}"
    return [Fact("sequence", text)]


def _data(
    config: JobConfig, num_training: int | None, num_validation: int | None, fingerprint: str
) -> Fact:
    word = "sequences" if has_tokens(config) else "samples"
    size = "endless" if num_training is None else f"{num_training:,} {word}"
    text = f"{config.training.dataset}: {size}"
    if config.validation.enable:
        kept = "" if num_validation is None else f"{num_validation:,} "
        other = config.validation_dataset
        where = "" if other == config.training.dataset else f" of {other}"
        text += f", {kept}for validation{where} every {config.validation.freq} steps"
    if fingerprint:
        text += f"; {fingerprint}"
    return Fact("data", text)


def _dtype(config: JobConfig) -> Fact:
    training = config.training
    kinds = {
        "parameters": training.dtype,
        "compute": training.param_dtype,
        "reductions": training.reduce_dtype,
    }
    if len(set(kinds.values())) == 1:
        return Fact("dtype", f"{training.dtype} for {', '.join(kinds)}")
    return Fact("dtype", ", ".join(f"{kind} {dtype}" for kind, dtype in kinds.items()))


def _batch(resolved: ResolvedJob) -> Fact:
    training, dims = resolved.config.training, resolved.dims
    local, ((_, size), *later) = training.local_batch_size, resolved.batch_sizes
    ranks = f"{dims.dp} data rank{'s' * (dims.dp > 1)}"
    count = size // (local * dims.dp)
    text = f"global {size} = {ranks} x {local} x {count} accumulation"
    for start, other in later[:MOST_SIZES]:
        text += f"; {other} from step {start} on"
    if len(later) > MOST_SIZES:
        text += f"; {len(later) - MOST_SIZES} more changes, up to {resolved.global_batch_size}"
    if training.global_batch_size == -1:
        text += "; it depends on the plan: give training.global_batch_size to fix it"
        return Fact("batch", text, differs=True)
    return Fact("batch", text)


def _steps(resolved: ResolvedJob, num_training: int | None, first_step: int) -> Fact:
    last = resolved.config.training.steps
    count = max(0, last - first_step + 1)
    if not count:
        return Fact("steps", f"none: {last} of {last} are done")
    unit, word = (resolved.seq_len, "tokens") if has_tokens(resolved.config) else (1, "samples")
    sizes = [size * unit for _, size in resolved.batch_sizes]
    ends = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    text = f"{first_step} to {last} of {ends} {word}"
    if num_training:
        epochs = resolved.num_sequences(first_step, last) / num_training
        text += f", {epochs:.0f} epochs" if epochs >= 100 else f", {epochs:.3g} epochs"
    return Fact("steps", text)


def _optimizer(config: JobConfig) -> Fact:
    section, norm = config.optimizer, config.training.max_norm
    clipped = f"gradients clipped to norm {norm:g}" if math.isfinite(norm) else "not clipped"
    return Fact("optimizer", f"{section.name}, weight decay {section.weight_decay:g}, {clipped}")


def _learning_rate(config: JobConfig) -> Fact:
    section, total = config.lr_scheduler, config.schedule_steps
    warmup, decay, peak = config.warmup_steps, config.decay_steps, config.optimizer.lr
    parts = []
    if warmup:
        parts.append(f"{warmup} step{'s' * (warmup > 1)} of warm-up")
    if hold := total - warmup - decay:
        parts.append(f"{hold} at the peak")
    if decay:
        end = peak * section.min_lr_factor
        parts.append(f"{decay} of {section.decay_type} decay to {end:g}")
    text = f"peak {peak:g}: {', '.join(parts)}"
    if section.total_steps is not None and total != config.training.steps:
        text += f", a schedule of {total} steps"
    # A default that is shortened is not reported, since the job did not request it.
    is_set = "warmup_steps" in section.model_fields_set
    asked_warmup = section.warmup_steps if is_set else warmup
    asked_decay = decay if section.decay_ratio is None else round(total * section.decay_ratio)
    pairs = {"warm-up": (asked_warmup, warmup), "decay": (asked_decay, decay)}
    cut = [f"{name} cut from {asked}" for name, (asked, now) in pairs.items() if asked > now]
    if cut:
        of = "run" if section.total_steps is None else "schedule"
        text += f"; {' and '.join(cut)} to fit the {total} steps of the {of}"
    return Fact("learning rate", text, differs=bool(cut))


def _start(config: JobConfig, starts_from: Path | None) -> Fact:
    if starts_from is None:
        return Fact("starts from", f"random weights of seed {config.debug.seed}")
    return Fact("starts from", str(starts_from))


def _saving(config: JobConfig, folder: Path) -> Fact:
    section = config.checkpoint
    if not section.saves:
        of_loading = {name for name in type(section).model_fields if "load" in name} | {"folder"}
        left_out = {"enable", *of_loading} if section.enable else None
        ignored = ", ".join(section.model_dump(exclude_defaults=True, exclude=left_out))
        text = f"none are saved, so these keys have no effect: {ignored}"
        return Fact("checkpoints", text if ignored else "none are saved", differs=bool(ignored))
    text = f"every {section.interval} steps and at the end, in {folder / section.folder}"
    if section.async_mode != "disabled":
        text += ", while training goes on"
    return Fact("checkpoints", text)
