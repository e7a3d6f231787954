"""Where a run starts from: its newest good checkpoint, another's, given weights, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import state
from titanlite.checkpoint.folder import CheckpointFolder, Found, look_at
from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.manifest import (
    SAFETENSORS,
    BrokenCheckpointError,
    Manifest,
    check_files,
)
from titanlite.checkpoint.storage import first_failure, load, stored_tensors, told
from titanlite.checkpoint.weights import load_safetensors
from titanlite.config.changes import changed_keys, changed_sizes
from titanlite.config.toml import quote
from titanlite.errors import ConfigError, TitanliteError
from titanlite.job import Job


@dataclass(frozen=True)
class Started:
    """Where a run starts from."""

    last_step: int
    """The step that was done last; 0 for a new run."""
    notes: list[str]
    """Lines for a person."""
    source: Path | None = None
    """The checkpoint or weights that were loaded."""


def start_from(job: Job, folder: CheckpointFolder, ranks: CheckpointGroup) -> Started:
    """Load what the job is to start from.

    The newest checkpoint of `folder` that is whole, or the one that checkpoint.load_step asks for;
    else checkpoint.initial_load_path; else nothing. One that is torn is left for the one before,
    and named. Raises ConfigError where nothing of what there is can be used, or it does not fit.
    """
    section = job.config.checkpoint
    candidates = ranks.from_first(lambda: _candidates(job, folder))
    if candidates and section.create_seed_checkpoint:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint: {quote(str(folder.path))} has checkpoints "
            "already; give another checkpoint.folder"
        )
    refused: list[str] = []
    for found in candidates:
        if _is_weights(found) and found.step < job.config.training.steps:
            problem = "it holds the weights alone"
        else:
            problem = problem_of(found, ranks)
        if not problem:
            return _go_on(job, found, refused, ranks)
        refused.append(f"{found.path.name} is refused: {problem}")
    if refused:
        there = next((found.path.name for found in candidates if _is_weights(found)), "")
        start = f"; checkpoint.initial_load_path then takes the weights of {there}" if there else ""
        raise ConfigError(
            f"checkpoint.folder: no checkpoint in {quote(str(folder.path))} can be used "
            f"({'; '.join(refused)}); move them away to start anew{start}"
        )
    if section.initial_load_path:
        return _load_initial(job, Path(section.initial_load_path).expanduser(), ranks)
    return Started(0, [f"checkpoint: none in {folder.path} yet; a new run"])


def problem_of(found: Found, ranks: CheckpointGroup) -> str:
    """Why a checkpoint cannot be used, "" where it can; each rank checks some of its files."""
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
    """The weights of the checkpoint in `path`, which has been checked.

    Raises ConfigError where it is of another model.
    """
    _check_model(job, path, manifest)
    if manifest.stored_as == "safetensors":
        # What else may be in the folder was not checked.
        load_safetensors(job, path / SAFETENSORS, ranks)
    else:
        _read(state.weight_pieces(job), path, ranks)


def _candidates(job: Job, folder: CheckpointFolder) -> list[Found]:
    """What may be loaded, in order; on the first rank."""
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
        notes.append(f"checkpoint: {path.name} is the end of this run")
        return Started(manifest.step, notes, path)
    step = _load_training(job, path, manifest, ranks)
    instead = " instead" if refused else ""
    notes.append(f"checkpoint: going on from {path.name}{instead}, saved by {manifest.plan}")
    if changes := changed_keys(manifest.config, job.config):
        notes.append(f"checkpoint: changed since: {', '.join(changes)}")
    return Started(step, notes, path)


def _load_initial(job: Job, path: Path, ranks: CheckpointGroup) -> Started:
    section = job.config.checkpoint
    if section.initial_load_in_hf:
        load_safetensors(job, path, ranks)
        return Started(0, [f"checkpoint: a new run from the weights in {path}"], path)
    found = ranks.from_first(lambda: look_at(path))
    if problem := problem_of(found, ranks):
        raise ConfigError(
            f"checkpoint.initial_load_path: {quote(str(path))} is no good checkpoint ({problem}); "
            "give the folder step-N of one"
        )
    manifest = _manifest(found)
    if section.initial_load_model_only:
        load_weights(job, path, manifest, ranks)
        notes = [f"checkpoint: a new run from the weights of {path}"]
        if changes := changed_sizes(manifest.config, job.config):
            notes.append(f"checkpoint: changed since: {', '.join(changes)}")
        return Started(0, notes, path)
    if manifest.holds == "weights":
        raise ConfigError(
            f"checkpoint.initial_load_model_only: {path} holds the weights alone; set it to true"
        )
    step = _load_training(job, path, manifest, ranks)
    return Started(step, [f"checkpoint: going on from {path}, saved by {manifest.plan}"], path)


def _load_training(job: Job, path: Path, manifest: Manifest, ranks: CheckpointGroup) -> int:
    """Everything but what is to be left out; the step it was saved after."""
    left_out = job.config.checkpoint.exclude_from_loading
    _check_same_model(job, path, manifest)
    if manifest.dtype != job.config.training.dtype:
        raise ConfigError(
            f"training.dtype: {path} is in {manifest.dtype}; give that, or load its weights alone "
            "into a new run: checkpoint.initial_load_path"
        )
    numbers, pieces = manifest.training_state, state.weight_pieces(job)
    stored = stored_tensors(path, manifest.files)
    if "optimizer" not in left_out:
        state.check_optimizer(job, numbers.optimizer.name)
        _use(path, ranks, lambda: pieces.update(state.make_optimizer_state(job, stored)))
    # A generator belongs to a rank: under another plan there is no telling which is whose.
    rng = state.rng_pieces(job) if manifest.plan == job.dims.describe() else {}
    # What was saved on CPU has none of a GPU's.
    rng = {name: piece for name, piece in rng.items() if name in stored}
    _read(pieces | rng, path, ranks)
    _use(path, ranks, lambda: state.check_counts(job))
    _use(path, ranks, lambda: state.restore_rng(job, rng))
    if "lr_scheduler" not in left_out:
        state.restore_schedule(job, numbers.lr_scheduler)
    if "dataloader" not in left_out:
        job.sampler.state = numbers.dataloader
    return 0 if "train_state" in left_out else manifest.step


def _read(pieces: state.Pieces, path: Path, ranks: CheckpointGroup) -> None:
    try:
        load(pieces, path, ranks.group)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        line = f"checkpoint: loading {path} failed on rank {rank}: {told(cause)}"
        raise TitanliteError(line) from error


def _use(path: Path, ranks: CheckpointGroup, function: Callable[[], None]) -> None:
    """On every rank; a line on all of them where the checkpoint in `path` does not allow it."""
    try:
        ranks.all_do(function)
    except BrokenCheckpointError as error:
        raise ConfigError(
            f"checkpoint: {path} cannot be used: {error}; give another checkpoint"
        ) from error


def _check_same_model(job: Job, path: Path, manifest: Manifest) -> None:
    """Heads or an epsilon change no shape, and yet what the weights mean."""
    _check_model(job, path, manifest)
    if changes := changed_sizes(manifest.config, job.config):
        raise ConfigError(
            f"checkpoint: {path} is of another model: {', '.join(changes)}; give the [model] it "
            "was trained with, or load its weights alone into a new run: "
            "checkpoint.initial_load_path"
        )


def _check_model(job: Job, path: Path, manifest: Manifest) -> None:
    own = {name: list(shape) for name, shape in job.parameter_shapes().items()}
    for name in sorted({*own, *manifest.shapes}):
        here, there = own.get(name, "none"), manifest.shapes.get(name, "none")
        if here != there:
            raise ConfigError(
                f"checkpoint: {path} is of another model: {name} is {there} there and {here} "
                "here; give the [model] it was trained with, or another checkpoint"
            )


def _is_weights(found: Found) -> bool:
    return found.manifest is not None and found.manifest.holds == "weights"


def _manifest(found: Found) -> Manifest:
    assert found.manifest is not None
    return found.manifest
