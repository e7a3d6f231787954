"""What a run starts from: its newest valid checkpoint, another run's, given weights, or nothing.

start_from chooses and loads; problem_of validates a checkpoint; load_weights loads only weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.checkpoint import state
from titanlite.checkpoint.folder import CheckpointFolder, Found, look_at
from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.manifest import BrokenCheckpointError, Manifest, check_files
from titanlite.checkpoint.metadata import read_metadata
from titanlite.checkpoint.storage import load, naming_rank, stored_tensors, tensors_in
from titanlite.checkpoint.weights import load_safetensors
from titanlite.config.changes import changed_keys, changed_sizes
from titanlite.errors import ConfigError, quote
from titanlite.job import Job
from titanlite.modules.lora import adapted_layer


@dataclass(frozen=True)
class Started:
    """Where a run starts from."""

    last_step: int
    """The last completed step; 0 for a new run."""
    notes: list[str]
    """Lines to print."""
    source: Path | None = None
    """The checkpoint or weights that were loaded."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What callbacks have kept."""


def start_from(job: Job, folder: CheckpointFolder, ranks: CheckpointGroup) -> Started:
    """Load what the job starts from.

    That is the newest valid checkpoint of `folder`, or the one of checkpoint.load_step; else
    checkpoint.initial_load_path; else nothing (step 0). A torn checkpoint is reported, and the one
    before it is used. Raises ConfigError if there are checkpoints but none can be used, or if the
    chosen one does not fit the job.
    """
    section = job.config.checkpoint
    candidates = ranks.from_first(lambda: _candidates(job, folder))
    if candidates and section.create_seed_checkpoint:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint: {quote(str(folder.path))} already has "
            "checkpoints; give another checkpoint.folder"
        )
    refused: list[str] = []
    for found in candidates:
        if _is_weights(found) and found.step < job.config.training.steps:
            problem = "it holds only weights"
        else:
            problem = problem_of(found, ranks)
        if not problem:
            return _go_on(job, found, refused, ranks)
        refused.append(f"{found.path.name} cannot be used: {problem}")
    if refused:
        there = next((found.path.name for found in candidates if _is_weights(found)), "")
        start = f"; checkpoint.initial_load_path can load the weights of {there}" if there else ""
        raise ConfigError(
            f"checkpoint.folder: no checkpoint in {quote(str(folder.path))} can be used "
            f"({'; '.join(refused)}); move them away to start from scratch{start}"
        )
    if section.initial_load_path:
        return _load_initial(job, Path(section.initial_load_path).expanduser(), ranks)
    return Started(0, [f"checkpoint: none in {folder.path}; starting a new run"])


def problem_of(found: Found, ranks: CheckpointGroup) -> str:
    """Why a checkpoint cannot be used, or ""; each rank checks some of the files."""
    if found.manifest is None:
        return found.reason
    files, world = found.manifest.files, ranks.world
    problem = ""
    try:
        check_files(found.path, files, sorted(files)[world.rank :: world.size])
        if found.manifest.stored_as == "dcp":
            stored_tensors(found.path, files)
    except BrokenCheckpointError as error:
        problem = str(error)
    return next(filter(None, ranks.gathered(problem)), "")


def load_weights(job: Job, path: Path, manifest: Manifest, ranks: CheckpointGroup) -> None:
    """Load the weights of the checkpoint in `path`, whose files have been checked.

    They are the averages of the weights, if it has these. It may have no adapter of LoRA. Raises
    ConfigError if it is from another model.
    """
    has_none = not any(map(adapted_layer, manifest.shapes))
    _check_model(job, path, manifest, with_adapters=not has_none)
    if manifest.stored_as == "dcp":
        metadata, pieces = read_metadata(path), state.weight_pieces(job)
        if has_none:
            pieces = {name: piece for name, piece in pieces.items() if not adapted_layer(name)}
        stored = tensors_in(metadata, manifest.files)
        with naming_rank(f"checkpoint: loading {path}"):
            load(state.averaged(pieces, stored), path, ranks.group, metadata)
        return
    has_adapters = manifest.stored_as == "peft"
    if has_adapters and (base := job.config.checkpoint.initial_load_path):
        _load_initial(job, Path(base).expanduser(), ranks)
    # Only these files: others in the folder have not been checked.
    files = [path / name for name in manifest.weight_files]
    load_safetensors(job, path, ranks, files, only_adapters=has_adapters)


def _candidates(job: Job, folder: CheckpointFolder) -> list[Found]:
    """The checkpoints to try, in order; called on rank 0."""
    found, wanted = folder.newest_first(), job.config.checkpoint.load_step
    if wanted == -1:
        return found
    chosen = [one for one in found if one.step == wanted]
    if not chosen:
        there = ", ".join(str(step) for step in sorted(one.step for one in found))
        raise ConfigError(
            f"checkpoint.load_step: there is no step-{wanted} in {quote(str(folder.path))}; "
            + (f"give one of {there}, or -1 for the newest" if there else "give -1")
        )
    return chosen


def _go_on(job: Job, found: Found, refused: list[str], ranks: CheckpointGroup) -> Started:
    manifest, path = _manifest(found), found.path
    notes = [f"checkpoint: {line}" for line in refused]
    if manifest.holds == "weights":
        _check_same_model(job, path, manifest)
        load_weights(job, path, manifest, ranks)
        notes.append(f"checkpoint: {path.name} is the last step of this run")
        return Started(manifest.step, notes, path)
    step = _load_training(job, path, manifest, ranks)
    instead = " instead" if refused else ""
    notes.append(f"checkpoint: resuming from {path.name}{instead}, saved with {manifest.plan}")
    if changes := changed_keys(manifest.config, job.config):
        notes.append(f"checkpoint: changed since it was saved: {', '.join(changes)}")
    return Started(step, notes, path, manifest.training_state.callbacks)


def _load_initial(job: Job, path: Path, ranks: CheckpointGroup) -> Started:
    section = job.config.checkpoint
    if section.initial_load_in_hf:
        load_safetensors(job, path, ranks)
        return Started(0, [f"checkpoint: starting a new run from the weights in {path}"], path)
    found = ranks.from_first(lambda: look_at(path))
    if problem := problem_of(found, ranks):
        raise ConfigError(
            f"checkpoint.initial_load_path: {quote(str(path))} is not a valid checkpoint "
            f"({problem}); give the step-N folder of one"
        )
    manifest = _manifest(found)
    if section.initial_load_model_only:
        load_weights(job, path, manifest, ranks)
        notes = [f"checkpoint: starting a new run from the weights in {path}"]
        if changes := changed_sizes(manifest.config, job.config):
            notes.append(f"checkpoint: changed since it was saved: {', '.join(changes)}")
        return Started(0, notes, path)
    if manifest.holds == "weights":
        raise ConfigError(
            f"checkpoint.initial_load_model_only: {path} holds only weights; set it to true"
        )
    step = _load_training(job, path, manifest, ranks)
    notes = [f"checkpoint: resuming from {path}, saved with {manifest.plan}"]
    return Started(step, notes, path, manifest.training_state.callbacks)


def _load_training(job: Job, path: Path, manifest: Manifest, ranks: CheckpointGroup) -> int:
    """Load all but checkpoint.exclude_from_loading; returns the step after which it was saved."""
    left_out = job.config.checkpoint.exclude_from_loading
    _check_same_model(job, path, manifest)
    if manifest.dtype != job.config.training.dtype:
        raise ConfigError(
            f"training.dtype: {path} is in {manifest.dtype}; use that, or load only its weights "
            "into a new run with checkpoint.initial_load_path"
        )
    numbers, pieces = manifest.training_state, state.weight_pieces(job)
    metadata = read_metadata(path)
    stored = tensors_in(metadata, manifest.files)
    if "optimizer" not in left_out:
        state.check_optimizer(job, numbers.optimizer.name)
        average = job.trainer.average
        keys = () if average is None else average.keys
        _use(path, ranks, lambda: pieces.update(state.make_optimizer_state(job, stored, keys)))
    with naming_rank(f"checkpoint: loading {path}"):
        load(pieces, path, ranks.group, metadata)
    _use(path, ranks, lambda: state.check_counts(job))
    if "lr_scheduler" not in left_out:
        state.restore_schedule(job, numbers.lr_scheduler)
    if "dataloader" not in left_out:
        _check_same_data(job, path, manifest)
        job.sampler.state = numbers.dataloader
    return 0 if "train_state" in left_out else manifest.step


def _use(path: Path, ranks: CheckpointGroup, function: Callable[[], None]) -> None:
    """Call `function` on every rank; a BrokenCheckpointError becomes a ConfigError on all."""
    try:
        ranks.all_do(function)
    except BrokenCheckpointError as error:
        raise ConfigError(
            f"checkpoint: {path} cannot be used: {error}; give another checkpoint"
        ) from error


def _check_same_model(job: Job, path: Path, manifest: Manifest) -> None:
    """Raises ConfigError for another model, even if it differs only in keys that change no shape.

    The number of heads or an epsilon are such keys: the weights mean something else then.
    """
    _check_model(job, path, manifest)
    if changes := changed_sizes(manifest.config, job.config):
        raise ConfigError(
            f"checkpoint: {path} is from another model: {', '.join(changes)}; give the [model] it "
            "was trained with, or load only its weights into a new run with "
            "checkpoint.initial_load_path"
        )


def _check_same_data(job: Job, path: Path, manifest: Manifest) -> None:
    """Raises ConfigError if files of the training data have changed, but no key that names them."""
    before, now = manifest.training_state.data, state.data_of(job)
    changes = changed_keys(manifest.config, job.config)
    if not before or before == now or any(c.startswith("training.dataset") for c in changes):
        return
    raise ConfigError(
        f"training.dataset: the data have changed since {path.name} was saved (then: {before}; "
        f"now: {now or 'unknown'}); restore them, or set checkpoint.exclude_from_loading = "
        '["dataloader"] to read the new data from the start'
    )


def _check_model(job: Job, path: Path, manifest: Manifest, *, with_adapters: bool = True) -> None:
    own = {name: list(shape) for name, shape in job.parameter_shapes().items()}
    if not with_adapters:
        own = {name: shape for name, shape in own.items() if not adapted_layer(name)}
    for name in sorted({*own, *manifest.shapes}):
        here, there = own.get(name, "none"), manifest.shapes.get(name, "none")
        if here != there:
            raise ConfigError(
                f"checkpoint: {path} is from another model: {name} is {there} there and {here} "
                "here; give the [model] it was trained with, or another checkpoint"
            )


def _is_weights(found: Found) -> bool:
    return found.manifest is not None and found.manifest.holds == "weights"


def _manifest(found: Found) -> Manifest:
    assert found.manifest is not None
    return found.manifest
