"""Checkpoints of a training loop written by hand, in the format of a job's (docs/by_hand.md).

A checkpoint loads under any plan, is complete or absent, and has checksums. `titanlite convert`
reads it, and a job can start from its weights (checkpoint.initial_load_path). Random generators are
not saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titanlite.checkpoint import state
from titanlite.checkpoint.folder import CheckpointFolder, Found, make_token
from titanlite.checkpoint.manifest import BrokenCheckpointError, FileRecord, Manifest, check_files
from titanlite.checkpoint.storage import load, naming_rank, save, stored_tensors
from titanlite.errors import TitanliteError
from titanlite.modules.shards import buffers_of, parameters_of
from titanlite.ranks.peers import Peers
from titanlite.version import VERSION


class Loop(Protocol):
    """What a loop trains with: a titanlite Trainer, or any object with these three."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The model, or this rank's pipeline stages of it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's Adam, AdamW or SGD."""

    @property
    def scheduler(self) -> LRScheduler:
        """The learning rate schedule, a LambdaLR."""


@dataclass(frozen=True)
class Loaded:
    """The step of a checkpoint, and the `samples_read` that save_checkpoint was given."""

    step: int
    samples_read: int


def save_checkpoint(
    folder: str | Path,
    step: int,
    loop: Loop,
    *,
    samples_read: int = 0,
    tied: Mapping[str, str] | None = None,
    keep_latest: int = 0,
) -> Path:
    """Save weights, persistent buffers, optimizer and schedule as `folder`/step-`step`.

    `loop` is a Trainer, or any object with `parts` (the model, or this rank's pipeline stages of
    it), `optimizer` (torch's Adam, AdamW or SGD) and `scheduler` (a LambdaLR). Every rank of the
    default process group, if there is one, must call this, with the same folder. `samples_read` is
    stored for load_checkpoint. Under pipeline parallelism, `tied` is
    `titanlite.modules.tied.find_tied` of the plain model. All but the `keep_latest` last
    checkpoints are removed; 0 keeps all. Raises TitanliteError on every rank if any rank failed.
    """
    place, ranks = CheckpointFolder(Path(folder)), Peers()
    token = ranks.from_first(make_token)
    trained = _Trained(loop, tied or {})
    shapes = {name: list(tensor.shape) for name, tensor in trained.parameters.items()}
    dtypes = {tensor.dtype for tensor in trained.parameters.values()}
    everywhere: dict[str, list[int]] = {}
    for of_rank in ranks.gathered(shapes):
        everywhere |= of_rank
    unfinished, final = place.unfinished(step, token), place.at(step)

    def seal(files: Mapping[str, FileRecord]) -> None:
        manifest = Manifest(
            step=step,
            serial=place.next_serial(),
            holds="training",
            stored_as="dcp",
            shapes=everywhere,
            dtype=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            plan="a loop by hand",
            num_ranks=ranks.size,
            config={},
            titanlite=VERSION,
            torch=torch.__version__,
            state=state.numbers_of(trained, samples_read),
            files=dict(files),
        )
        place.commit(unfinished, final, manifest, token)
        place.keep_latest(keep_latest, token)

    ranks.from_first(lambda: place.path.mkdir(parents=True, exist_ok=True))
    with naming_rank(f"saving {final}"):
        pieces = {**state.weight_pieces(trained), **state.optimizer_pieces(trained)}
        # Ranks may have other values of a buffer: those of the first are saved.
        held = ranks.gathered(list(trained.buffers))
        for name in trained.buffers:
            if any(name in of_rank for of_rank in held[: ranks.rank]):
                del pieces[f"{state.MODEL}.{name}"]
        save(pieces, unfinished, ranks.group, seal)
    return final


def load_checkpoint(
    folder: str | Path,
    loop: Loop,
    *,
    step: int | None = None,
    tied: Mapping[str, str] | None = None,
) -> Loaded | None:
    """Load the checkpoint of `step`, or without `step` the newest valid one of `folder`.

    Returns None if `step` is not given and there are no checkpoints. Every rank must call this with
    the model already sharded; the degrees of parallelism may differ from those at saving.
    Parameters, buffers, optimizer state and schedule are set in place. Raises TitanliteError if
    there is no valid checkpoint of `step`, or of any step although some exist, or if it is from
    another model or optimizer.
    """
    ranks, trained = Peers(), _Trained(loop, tied or {})
    found = ranks.from_first(lambda: _choose(CheckpointFolder(Path(folder)), step))
    if found is None:
        return None
    manifest, path = found.manifest, found.path
    assert manifest is not None
    own: dict[str, list[int]] = {}
    for of_rank in ranks.gathered({n: list(t.shape) for n, t in trained.parameters.items()}):
        own |= of_rank
    for name in sorted({*own, *manifest.shapes}):
        here, there = own.get(name, "none"), manifest.shapes.get(name, "none")
        if here != there:
            raise TitanliteError(
                f"{path} is from another model: {name} is {there} there and {here} here"
            )
    state.check_optimizer(trained, manifest.training_state.optimizer.name)
    pieces = state.weight_pieces(trained)
    stored = stored_tensors(path, manifest.files)
    ranks.all_do(lambda: pieces.update(state.make_optimizer_state(trained, stored)))
    with naming_rank(f"loading {path}"):
        load(pieces, path, ranks.group)
    ranks.all_do(lambda: state.check_counts(trained))
    state.restore_schedule(trained, manifest.training_state.lr_scheduler)
    return Loaded(manifest.step, manifest.training_state.dataloader)


@dataclass
class _Trained:
    """A loop as state.Trained."""

    trainer: Loop
    tied: Mapping[str, str]
    parameters: dict[str, nn.Parameter] = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.trainer.scheduler, LambdaLR):
            kind = type(self.trainer.scheduler).__name__
            raise TitanliteError(f"a schedule must be a LambdaLR, not a {kind}")
        self.parameters = parameters_of(self.trainer.parts, self.tied)
        self.buffers = buffers_of(self.trainer.parts)


def _choose(folder: CheckpointFolder, step: int | None) -> Found | None:
    """The checkpoint to load; its files are checked."""
    candidates = folder.newest_first()
    if step is not None:
        candidates = [found for found in candidates if found.step == step]
        if not candidates:
            raise TitanliteError(f"there is no step-{step} in {folder.path}")
    refused = []
    for found in candidates:
        problem = found.reason
        if found.manifest is not None:
            try:
                if found.manifest.holds != "training":
                    raise BrokenCheckpointError("it holds only weights")
                check_files(found.path, found.manifest.files, found.manifest.files)
                stored_tensors(found.path, found.manifest.files)
                return found
            except BrokenCheckpointError as error:
                problem = str(error)
        refused.append(f"{found.path.name} cannot be used: {problem}")
    if refused:
        raise TitanliteError(f"no checkpoint in {folder.path} can be used: {'; '.join(refused)}")
    return None
