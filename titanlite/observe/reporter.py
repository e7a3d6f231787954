"""The output of a run: the plan at its start, its progress, and the pictures at its end.

Every rank calls the same methods, because some values are gathered from all ranks. Only rank 0
prints and writes.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from titanlite.config.data import spec_for
from titanlite.config.document import format_config
from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.mesh.parallel_dims import Grid
from titanlite.observe.first_screen import in_brief, render_screen
from titanlite.observe.metrics import MetricsLog, StepRecord, mfu, peak_process_bytes
from titanlite.observe.profiling import profile_steps, snapshot_memory
from titanlite.observe.progress import Progress
from titanlite.observe.run_facts import device_fact, name_idle_keys, run_facts
from titanlite.ranks.peers import Peers
from titanlite.ranks.turns import is_rank
from titanlite.training.metrics import ValidationResult
from titanlite.training.step import StepResult

if TYPE_CHECKING:
    # It imports Dynamo, which takes seconds, so it is imported only if something is compiled.
    from titanlite.observe.compiling import CompileMonitor

FIRST_SCREEN, CURVE, LOADS = "first_screen.txt", "loss.png", "expert_loads.png"


class Artist(Protocol):
    """What draws the pictures of a run, which draws none itself; titanlite.tools.gallery is one."""

    def draw_end(
        self, job: Job, folder: Path, say: Callable[[str], None], is_stopped: Callable[[], bool], /
    ) -> None:
        """Draw the loss and samples in `folder`; every rank calls this, and rank 0 draws."""

    def draw_steps(
        self, job: Job, folder: Path, say: Callable[[str], None], first_step: int, /
    ) -> Callable[[int], None]:
        """Record what each rank of a pipeline does; returns what to call after each step, on all.

        That draws the step's timeline in `folder`, if the job asks for it.
        """

    def draw_mesh(self, dims: Grid, /) -> str:
        """The position of each rank on the axes, as text."""


class Reporter:
    """Shows and records a run: `with Reporter(job) as reporter: ... reporter.record(...)`.

    `starts_from` is the checkpoint or file of weights that the run has loaded, `first_step` its
    first step, and `notes` are lines to print at the start.
    Files are written to job.dump_folder, which only one run at a time may use, or if `is_guest`, to
    a new folder load_only-N in it. Raises ConfigError if another run uses the folder, or if a file
    cannot be written.
    """

    def __init__(
        self,
        job: Job,
        first_step: int = 1,
        notes: Sequence[str] = (),
        *,
        starts_from: Path | None = None,
        is_guest: bool = False,
        artist: Artist | None = None,
    ) -> None:
        config, world = job.config, job.world
        self._artist = artist
        self._starts_from = starts_from
        self._job, self._first_step, self._notes = job, first_step, list(notes)
        self._folder, self._is_guest = Path(config.job.dump_folder), is_guest
        self._color = not config.metrics.disable_color_printing
        self._progress = Progress(
            config.training.steps,
            first_step=first_step,
            enabled=world.is_first,
            color=self._color,
            log_freq=config.metrics.log_freq,
        )
        self._exits = contextlib.ExitStack()
        self._log: MetricsLog | None = None  # on rank 0

    def __enter__(self) -> "Reporter":
        with contextlib.ExitStack() as exits, self._writing():
            # If the rest fails, close what is already open.
            exits.callback(self._exits.close)
            self._enter()
            exits.pop_all()
        return self

    def _enter(self) -> None:
        config, world = self._job.config, self._job.world
        if self._is_guest:
            self._folder = Peers().from_first(lambda: _make_own_folder(self._folder))
            self._notes.append(f"checkpoint: load_only: this run writes to {self._folder}")
        # First, because it refuses a second run in the same folder.
        Peers().from_first(self._open_log)
        if world.is_first:
            self._introduce()
            if config.job.save_config_file:
                written = self._folder / config.job.save_config_file
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(format_config(config), encoding="utf-8")
        enter = self._exits.enter_context
        of_run = config.profiling, self._folder, world.rank, world.device, self._first_step
        self._after_profiled_step = enter(profile_steps(*of_run))
        self._after_recorded_step = enter(snapshot_memory(*of_run, on_note=self._progress.print))
        enter(self._progress)
        self._compiling = self._report_compiling()
        self._draw_pipeline = self._record_pipeline()

    def _report_compiling(self) -> "CompileMonitor | None":
        """The report on compilation; None if nothing is compiled, and on ranks other than 0."""
        row = next((row for row in self._job.applied if row.feature == "compile"), None)
        if row is None or row.active == "off" or not self._job.world.is_first:
            return None
        from titanlite.observe.compiling import CompileMonitor

        return self._exits.enter_context(CompileMonitor(row.note, self._progress.print))

    def _open_log(self) -> None:
        config = self._job.config
        self._log = self._exits.enter_context(
            MetricsLog(
                self._folder,
                enable_tensorboard=config.metrics.enable_tensorboard,
                save_tb_folder=config.metrics.save_tb_folder,
                enable_wandb=config.metrics.enable_wandb,
                job_config=config.model_dump(mode="json"),
                first_step=self._first_step,
                pictures=(CURVE, LOADS, self._job.data.samples_file),
            )
        )

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def record(
        self, step: int, result: StepResult, validation: ValidationResult | None = None
    ) -> None:
        """Record and show a completed step, with its validation if there is one."""
        job, resolved = self._job, self._job.resolved
        samples_per_second = resolved.num_sequences(step, step) / result.seconds
        tokens_per_second = samples_per_second * resolved.seq_len
        flops = job.flops_per_token
        flops_per_second = None if flops is None else tokens_per_second * flops
        is_first, is_last = step == self._first_step, step == job.config.training.steps
        if is_first or is_last or step % job.config.metrics.log_freq == 0:
            self._read_most()
        record = StepRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_per_second=tokens_per_second if job.data.has_tokens else None,
            samples_per_second=None if job.data.has_tokens else samples_per_second,
            seconds=result.seconds,
            memory_bytes=self._process_bytes or self._own_bytes,
            validation_loss=None if validation is None else validation.loss,
            measures=self._measures(validation),
            validation_metrics={} if validation is None else validation.metrics,
            flops_per_second=flops_per_second,
            mfu=_mfu(flops_per_second, job),
            auxiliary_loss=result.auxiliary_loss,
            **_expert_load(job),
        )
        with self._writing():
            moved = "" if self._log is None else self._log.log(record)
        if moved:
            self._progress.print(moved)
        if self._compiling is not None:
            self._compiling.end_step()
        if result.note:
            self._progress.print(result.note)
        if is_first and job.recomputation.tally is not None:
            self._progress.print(f"each block {job.recomputation.tally.describe()}")
        if is_first and job.fusions is not None:
            self._progress.print(f"async tensor parallel: {job.fusions.describe()}")
            self.warn(job.fusions.require())
        if is_first and self._any_draws:
            # The model did not run on "meta", so the effective plan does not say it.
            self._progress.print(
                "plan invariance does not hold: the model draws from torch's own generators "
                "(docs/randomness.md)"
            )
        self._progress.update(record, of_all_ranks=is_rank() and self._process_bytes > 0)
        with self._writing():
            self._after_profiled_step()
            self._after_recorded_step()
            self._draw_pipeline(step)

    def _read_most(self) -> None:
        """Agree on the peak memory of any rank, and whether a step of any has drawn numbers."""
        world, generators = self._job.world, self._job.trainer.generators
        draws = generators is not None and generators.has_drawn and not self._job.draws.shapes
        own_bytes = world.watch.peak_bytes(world.device)
        process_bytes = peak_process_bytes() if own_bytes is None else 0
        most = torch.tensor([own_bytes or 0, process_bytes, int(draws)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self._own_bytes, self._process_bytes, self._any_draws = most.tolist()

    def _measures(self, validation: ValidationResult | None) -> Mapping[str, float]:
        """Further figures of a validation loss; none for a loss that the job has chosen itself."""
        job = self._job
        if validation is None or job.validation_dataset is None or job.config.training.loss:
            return {}
        data = spec_for(job.config, job.config.validation_dataset)
        return data.measures(validation.loss, job.validation_dataset)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._progress.print(line)

    def warn(self, text: str) -> None:
        """Print a warning; "" is none."""
        if text:
            self.say(f"warning: {text}")

    def note_collected(self, num_objects: int) -> None:
        """Print the number of collected objects, if `training.gc_debug` is set."""
        if self._job.config.training.gc_debug:
            self._progress.print(f"garbage collection: {num_objects} unreachable objects")

    def finish(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Draw the loss curve, and samples of the trained model beside real ones.

        Sampling ends early once `is_stopped` returns True on a rank.
        """
        with self._writing():
            if self._artist is not None:
                self._artist.draw_end(self._job, self._folder, self._progress.print, is_stopped)

    def _record_pipeline(self) -> Callable[[int], None]:
        job, profiling = self._job, self._job.config.profiling
        if self._artist is None or not profiling.enable_pipeline_timeline:
            return lambda step: None
        folder = self._folder / profiling.save_traces_folder
        return self._artist.draw_steps(job, folder, self._progress.print, self._first_step)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError inside into a ConfigError with one line."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder: writing {error.filename or self._folder} failed with "
                f"{error.strerror or error}; free some space, or give another folder"
            ) from error

    def _introduce(self) -> None:
        job, say = self._job, self._progress.print
        if job.config.job.print_config:
            say(format_config(job.config))
        world, validation = job.world, job.validation_dataset
        device = device_fact(
            job.resolved,
            world.device.type,
            dist.distributed_c10d._get_default_group()._get_backend(world.device).name(),
            world.local_size,
            torch.cuda.device_count(),
            torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "",
            torch.get_num_threads(),
        )
        facts = run_facts(
            job.resolved,
            device,
            torch.__version__,
            job.dataset.num_samples,
            None if validation is None else validation.num_samples,
            fingerprint=getattr(job.dataset, "fingerprint", ""),
            num_parameters=sum(shape.numel() for shape in job.parameter_shapes().values()),
            folder=self._folder,
            first_step=self._first_step,
            starts_from=self._starts_from,
        )
        mesh = f"mesh: {job.dims.describe()}"
        if self._artist is not None:
            mesh = self._artist.draw_mesh(job.dims)
        content = job.config.job.description, facts, job.applied, mesh
        shown = content if job.config.metrics.verbose else in_brief(*content)
        say(render_screen(*shown, stream=sys.stdout, color=self._color))
        written = self._folder / FIRST_SCREEN
        written.write_text(render_screen(*content) + "\n", encoding="utf-8")
        if idle := name_idle_keys(job.config):
            say(idle)
        if job.config.model.hf_assets_path and not job.data.reads_tokenizer:
            say(f'no effect here, because "{job.data.name}" is not text: model.hf_assets_path')
        say("")
        for note in (*job.notes, *self._notes):
            say(note)


def _make_own_folder(folder: Path) -> Path:
    """Create a new folder load_only-N in `folder`."""
    for number in itertools.count(1):
        own = folder / f"load_only-{number}"
        with contextlib.suppress(FileExistsError):
            own.mkdir()
            break
    return own


def _expert_load(job: Job) -> dict[str, Any]:
    """The fields of a StepRecord about the load of experts; empty for a dense model."""
    balancer, ep = job.trainer.balancer, job.dims.ep
    if balancer is None or not balancer.counts:
        return {}

    def busiest(num_parts: int) -> float:
        """The largest share of `num_parts` equal parts of the experts, as a mean over layers."""
        shares = []
        for counts in balancer.counts.values():
            size = len(counts) // num_parts
            parts = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
            shares.append(max(parts) / max(1, sum(counts)))
        return sum(shares) / len(shares)

    experts = min(len(counts) for counts in balancer.counts.values())
    return {
        "expert_counts": balancer.counts,
        "dropped_tokens": balancer.num_dropped,
        "busiest_expert_share": busiest(experts),
        "busiest_rank_share": busiest(ep) if ep > 1 else None,
    }


def _mfu(flops_per_second: float | None, job: Job) -> float | None:
    if flops_per_second is None or job.world.device.type != "cuda":
        return None
    return mfu(flops_per_second, torch.cuda.get_device_name(job.world.device), job.world.size)
