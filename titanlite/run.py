"""A whole training run: check everything, start the ranks, build the job, run its steps.

The command is train.py at the top of the repository, or `titanlite train FILE`; from_python.py has
`titanlite.train`. A single process whose plan needs more ranks starts them locally. A larger world,
started by torchrun, is used as it is.
"""

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.callbacks import Callbacks, Recording, TrainResult
from titanlite.config import ResolvedJob, read_job
from titanlite.observe.terminal import tell, telling
from titanlite.ranks.fork_server import prepare_environment
from titanlite.ranks.launch import Place, torchrun_place
from titanlite.ranks.signals import StopRequest, ending_with_the_output
from titanlite.schedule.generators import without_garbage_collection
from titanlite.start import Tools, check_start, reporting_errors, run_job

EXAMPLE = "python train.py --job.config_file=configs/tp2_fsdp2.toml"


def main(argv: Sequence[str], tools: Tools, *, example: str = EXAMPLE) -> int:
    """Check the job, then train, or estimate its memory; returns the exit status.

    `example` is the command that the error message for a missing file suggests.
    """
    prepare_environment()
    with ending_with_the_output(), reporting_errors() as ended:
        ended.place = torchrun_place()
        world = None if ended.place is None or ended.place.world_size == 1 else ended.place
        is_first = world is None or world.rank == 0
        with telling("checking the job") if is_first else contextlib.nullcontext():
            read, planner = read_job(argv, needs_file=example), tools.planner
            estimates = read.config.memory_estimation.enable
            start = None if estimates else check_start(read, world, trains=True, planner=planner)
        if start is None:
            num_ranks = None if world is None else world.world_size
            planner.print_memory(read, num_ranks, is_first=is_first)
        else:
            if is_first:
                size = start.job.dims.world_size
                tell(f"starting {size} rank{'s' * (size > 1)}")
            run_job(train_on_rank, start, world, None, tools.artist)
    return ended.status


def command(arguments: Sequence[str], tools: Tools, name: str = "titanlite train") -> int:
    """`titanlite train FILE [--section.key=value ...]`, like train.py; returns the exit status."""
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words[0] = f"--job.config_file={words[0]}"
    return main(words, tools, example=f"{name} configs/tp2_fsdp2.toml")


def train_on_rank(
    place: Place,
    resolved: ResolvedJob,
    device_type: str,
    callbacks: Callbacks | None = None,
    artist: Any = None,
) -> TrainResult:
    """The run of one rank: open the world, build the job, run its steps, draw the pictures.

    `artist` (titanlite.observe.reporter.Artist) draws the pictures; with None there are none. A run
    that saves checkpoints resumes from the newest one, and stops early on request.
    """
    from titanlite.checkpoint.run import Checkpoints
    from titanlite.job import build_job
    from titanlite.observe.failing import naming_failures
    from titanlite.observe.reporter import Reporter
    from titanlite.ranks.watch import Traces
    from titanlite.ranks.world import open_world
    from titanlite.self_check import check_copies

    config = resolved.config
    comm = config.comm
    folder = Path(config.job.dump_folder) / comm.save_traces_folder
    with (
        StopRequest(place.orders, place.rank, enabled=config.checkpoint.saves) as stop,
        open_world(
            place,
            device_type,
            init_timeout_seconds=comm.init_timeout_seconds,
            trace_buf_size=config.num_recorded_collectives,
            traces=Traces(folder, comm.save_traces_file_prefix) if comm.trace_buf_size else None,
            describe_place=resolved.dims.describe_place,
        ) as world,
        world.watch.counting_memory(world.device.type),
    ):
        job = build_job(resolved, world)
        with (
            # Ranks collect it at the same steps, so that none waits for another's collection.
            without_garbage_collection(),
            Checkpoints(job) as checkpoints,
            Reporter(
                job,
                checkpoints.first_step,
                checkpoints.notes,
                starts_from=checkpoints.source,
                is_guest=checkpoints.is_guest,
                artist=artist,
            ) as reporter,
            world.watch.explaining(),
            job.reading_ahead(),
        ):
            job.trainer.wants_stop = lambda: stop.is_asked or checkpoints.has_failed
            recording = Recording(
                job, callbacks or Callbacks(), checkpoints.first_step, checkpoints.kept
            )
            reporter.warn(check_copies(job, "before the first step"))
            if checkpoints.is_seed:
                reporter.say(checkpoints.save(0))
                return recording.end()
            for step in range(checkpoints.first_step, config.training.steps + 1):
                with naming_failures(job):
                    result = job.step(step)
                if step == checkpoints.first_step:
                    reporter.warn(check_copies(job, f"after step {step}"))
                    world.set_timeout(comm.train_timeout_seconds)
                if step % config.training.gc_freq == 0 or config.training.gc_debug:
                    reporter.note_collected(gc.collect(1))
                is_last = step == config.training.steps
                validation = job.validate() if config.validates_after(step) else None
                reporter.record(step, result, validation)
                recording.after_step(step, result, validation)
                stops = result.stops or recording.stops()
                if said := checkpoints.after_step(step, is_last=is_last, stops=stops):
                    reporter.say(said)
                for path in checkpoints.pop_saved():
                    recording.after_checkpoint(path)
                if stops:
                    resumes = "; run the same command to resume" if config.checkpoint.saves else ""
                    reporter.say(f"stopped as requested{resumes}")
                    return recording.end(is_stopped=True)
            reporter.finish(lambda: stop.is_asked)
            return recording.end()
