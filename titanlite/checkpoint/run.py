"""The checkpoints of a run: loading at the start, and when and what it saves.

Every rank makes the same calls and writes its own shards; only rank 0 creates, renames and removes
folders. start.py loads what the run starts from.
"""

import concurrent.futures
import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint import state
from titanlite.checkpoint.folder import CheckpointFolder, look_at, make_token
from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.huggingface import kind_of_files, save_model_files
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.checkpoint.staging import CpuStager
from titanlite.checkpoint.start import start_from
from titanlite.checkpoint.storage import Seal, cause_line, first_failure, save, save_async
from titanlite.errors import ConfigError, NonFiniteError, TitanliteError
from titanlite.job import Job
from titanlite.parallelize.part import DTYPES
from titanlite.quantities import format_bytes
from titanlite.ranks.turns import is_rank
from titanlite.self_check import check_copies
from titanlite.version import VERSION

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16}
# How long a failing run waits for a background save.
LAST_WAIT_SECONDS = 60


class Checkpoints:
    """`with Checkpoints(job) as checkpoints: ... checkpoints.after_step(step, ...)`.

    Entering it loads the checkpoint, which every rank must do. `first_step` is then the next step,
    and `notes` are lines to print. Without checkpoint.enable it does nothing. Raises ConfigError if
    a checkpoint does not fit the job, or a file cannot be written.
    """

    def __init__(self, job: Job) -> None:
        section = job.config.checkpoint
        self.first_step = 1
        self.notes: list[str] = []
        self.source: Path | None = None
        """The checkpoint or weights that were loaded."""
        self.kept: dict[str, Any] = {}
        """What callbacks keep (Event.state), which is saved and loaded."""
        self.is_guest = False
        """Whether the run only reads the checkpoints of another run, which may still be training.

        True for checkpoint.load_only with checkpoints in the folder.
        """
        self._job, self._section = job, section
        self._folder = CheckpointFolder(Path(job.config.job.dump_folder) / section.folder)
        self._saves = section.enable and not section.load_only
        self._copies = CpuStager(
            job.world.device, lasting=section.async_mode == "async_with_pinned_mem"
        )
        self._saving: concurrent.futures.Future[Any] | None = None
        self._saving_to = Path()
        self._exits = contextlib.ExitStack()
        self._has_gone_on = False
        # The start and end times of a background save, and its line that is not printed yet.
        self._times: list[float] = []
        self._ended = ""
        self._saved: list[Path] = []

    def __enter__(self) -> "Checkpoints":
        if self._section.enable:
            seconds = self._job.config.comm.checkpoint_timeout_seconds
            self._ranks = CheckpointGroup(self._job.world, seconds)
            if self._section.async_mode != "disabled" and is_rank():
                self.notes.append(
                    "checkpoint.async_mode: ranks that are threads wait until a save is done"
                )
            with contextlib.ExitStack() as exits, self._ranks.with_long_timeout():
                self._token = self._ranks.from_first(make_token)
                if self._saves:
                    self.notes += self._ranks.from_first(lambda: self._prepare(exits))
                if self._section.load_only:
                    self.is_guest = self._ranks.from_first(self._folder.has_any)
                started = start_from(self._job, self._folder, self._ranks)
                self._exits = exits.pop_all()
            self.first_step = started.last_step + 1
            self.source = started.source
            self.kept.update(started.kept)
            self.notes += started.notes
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._exits:
            if error is None:
                self.wait()
            elif self._saving is not None and isinstance(error, Exception):
                # The save may still succeed. If it fails too, `error` is raised anyway.
                concurrent.futures.wait([self._saving], LAST_WAIT_SECONDS)
        if isinstance(error, NonFiniteError) and self.first_step > 1 and not self._has_gone_on:
            # Extend this error instead of raising another: the ranks have decided who prints it.
            error.args = (f"{error}; {self._advice()}",)

    @property
    def has_failed(self) -> bool:
        """Whether a background save has failed on this rank.

        The run then stops, which the ranks agree on, and `wait` raises the error on every rank.
        """
        return self._saving is not None and self._saving.done() and bool(self._saving.exception())

    @property
    def is_seed(self) -> bool:
        """Whether the run only saves the initial weights (checkpoint.create_seed_checkpoint)."""
        return self._section.enable and self._section.create_seed_checkpoint

    def after_step(self, step: int, *, is_last: bool = False, stops: bool = False) -> str:
        """Save after the last step, after a step at which the run stops, and at each interval.

        Returns lines to print about this save and a finished background save, or "". Every rank
        must pass the same arguments.
        """
        self._has_gone_on = True
        section, line = self._section, ""
        is_first = step == 1 and section.enable_first_step_checkpoint
        is_due = stops or is_last or is_first or step % section.interval == 0
        # A save waits for the background save before it.
        if self._saves and is_last and section.last_save_model_only:
            line = self.save_weights(step)
        elif self._saves and is_due:
            line = self.save(step, in_background=not (is_last or stops))
        elif self._saving is not None and self._all_are_done(self._saving):
            self.wait()
        ended, self._ended = self._ended, ""
        return "\n".join(filter(None, (ended, line)))

    def pop_saved(self) -> list[Path]:
        """The checkpoints completed since the last call; every rank gets them at the same step."""
        saved, self._saved = self._saved, []
        return saved

    def save(self, step: int, *, in_background: bool = False) -> str:
        """Save the training state after `step`; in the background only in an asynchronous mode."""
        warning, start = self._begin(step), time.perf_counter()
        job = self._job
        pieces = {**self._weights(), **state.optimizer_pieces(job)}
        folder = self._folder.unfinished(step, self._token)
        seal = self._sealer(
            folder,
            step=step,
            holds="training",
            stored_as="dcp",
            dtype=job.config.training.dtype,
            state=state.numbers_of(
                job, job.sampler.state, data=state.data_of(job), callbacks=self._json_kept()
            ),
        )
        self._saving_to = self._folder.at(step)
        if in_background and self._section.async_mode != "disabled" and not is_rank():
            with self._ranks.with_long_timeout():
                self._saving = save_async(pieces, folder, self._ranks.group, seal, self._copies)
            self._times = times = [start]
            self._saving.add_done_callback(lambda _: times.append(time.perf_counter()))
            seconds = time.perf_counter() - start
            line = f"checkpoint: saving step-{step} in the background; copied in {seconds:.2g} s"
            return f"{warning}{line}"
        with self._explaining(), self._ranks.with_long_timeout():
            save(pieces, folder, self._ranks.group, seal)
        return f"{warning}{self._said(self._saving_to, start)}"

    def _json_kept(self) -> Any:
        try:
            return json.loads(json.dumps(self.kept))
        except (TypeError, ValueError) as error:
            raise TitanliteError(
                f"callbacks: event.state cannot be saved as JSON ({error}); keep numbers, strings, "
                "lists and dicts in it"
            ) from error

    def save_weights(self, step: int) -> str:
        """Save only the weights, or their averages, in checkpoint.export_dtype."""
        warning, start = self._begin(step), time.perf_counter()
        job, section = self._job, self._section
        dtype = EXPORT_DTYPES[section.export_dtype]
        folder = self._folder.unfinished(step, self._token)
        seal = self._sealer(
            folder,
            step=step,
            holds="weights",
            stored_as=kind_of_files(job) if section.last_save_in_hf else "dcp",
            dtype=section.export_dtype,
        )
        self._saving_to = self._folder.at(step)
        with self._explaining(), self._ranks.with_long_timeout(), job.trainer.averaged():
            if section.last_save_in_hf:
                self._ranks.all_do(lambda: save_model_files(job, folder, dtype, seal, self._ranks))
            else:
                save(self._weights(dtype), folder, self._ranks.group, seal)
        said = self._said(self._saving_to, start)
        return f"{warning}{said}: only weights, {section.export_dtype}"

    def _weights(self, dtype: torch.dtype | None = None) -> state.Pieces:
        """This rank's shards of the weights; of a buffer, only one rank saves its copy."""
        job = self._job
        left_out = {f"{state.MODEL}.{n}" for n in job.buffers if not job.holds_first(n)}
        pieces = state.weight_pieces(job, dtype)
        return {name: piece for name, piece in pieces.items() if name not in left_out}

    def _begin(self, step: int) -> str:
        """Wait for the last save, and compare the copies of tensors; a line of warning, or ""."""
        self.wait()
        warning = check_copies(self._job, f"before step-{step} is saved")
        return f"warning: {warning}\n" if warning else ""

    @staticmethod
    def _all_are_done(saving: concurrent.futures.Future[Any]) -> bool:
        """Whether a background save is done on every rank; a collective call.

        The ranks finish at different times, but must act at the same step: on_checkpoint may
        communicate. They agree over training's group, since the saving thread uses the other one.
        """
        is_pending = torch.tensor(int(not saving.done()))
        dist.all_reduce(is_pending, op=dist.ReduceOp.MAX)
        return not is_pending.item()

    def wait(self) -> None:
        """Wait until the background save, if any, is done; raises its error."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with self._explaining(), self._ranks.with_long_timeout():
                saving.result()
            self._ended = self._said(self._saving_to, *self._times)

    def _sealer(self, folder: Path, **of_manifest: Any) -> Seal:
        """A function, called only on rank 0, that turns the files in `folder` into a checkpoint."""
        job = self._job
        about = {
            **of_manifest,
            "shapes": {name: list(shape) for name, shape in job.parameter_shapes().items()},
            "plan": job.dims.describe(),
            "num_ranks": job.world.size,
            "config": job.config.model_dump(mode="json", exclude_unset=True),
            "titanlite": VERSION,
            "torch": torch.__version__,
        }

        def seal(files: Mapping[str, FileRecord]) -> None:
            serial = self._folder.next_serial()
            manifest = Manifest(serial=serial, files=dict(files), **about)
            self._folder.commit(folder, self._folder.at(manifest.step), manifest, self._token)
            self._folder.keep_latest(self._section.keep_latest_k, self._token)

        return seal

    def _said(self, path: Path, start: float, end: float | None = None) -> str:
        seconds = (end or time.perf_counter()) - start
        self._saved.append(path)
        size = ""
        if self._job.world.is_first:
            manifest = look_at(path).manifest
            size = f", {format_bytes(manifest.size_bytes)}" if manifest else ""
        return f"checkpoint: {path.name} saved{size} in {seconds:.2g} s"

    def _advice(self) -> str:
        """The advice if the first step after loading a checkpoint is not finite."""
        own = self._folder.at(self.first_step - 1)
        path = own if own.exists() else self._section.initial_load_path
        return (
            f"this is the first step from {path}, whose weights may be bad: move it away, or "
            "give another checkpoint"
        )

    def _prepare(self, exits: contextlib.ExitStack) -> list[str]:
        """Create and lock the folder, and remove what a killed run left; on rank 0."""
        path = self._folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f"probe-{self._token}"
            probe.touch()
            probe.unlink()
            exits.enter_context(self._folder.holding())
            removed = self._folder.clean()
            if there := self._folder.in_the_way():
                raise ConfigError(
                    f"checkpoint.folder: {there} has the name of a checkpoint but is not a "
                    "folder; move it away"
                )
        except OSError as error:
            raise ConfigError(
                f"checkpoint.folder: {path} cannot be written: {error.strerror or error}; "
                "give another folder, or set checkpoint.load_only"
            ) from error
        return [f"checkpoint: removed the unfinished {path.name}" for path in removed]

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn the error of a save inside into one line; earlier checkpoints are kept."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            rank, cause = self._job.world.rank, error
            if isinstance(error, CheckpointException):
                rank, cause = first_failure(error)  # type: ignore[assignment]
            if self._job.world.is_first:
                name = f"{self._saving_to.name}.new-{self._token}"
                shutil.rmtree(self._saving_to.with_name(name), ignore_errors=True)
            line = f"saving {self._saving_to} failed on rank {rank}: {cause_line(cause)}"
            if isinstance(cause, OSError):
                raise ConfigError(
                    f"checkpoint.folder: {line}; free some space, or give another folder. Earlier "
                    "checkpoints are complete: the same command resumes from the newest"
                ) from error
            raise TitanliteError(f"checkpoint: {line}") from error
