"""Train a model from one TOML file: torchrun train.py --job.config_file=configs/tp2_fsdp2.toml

A world of one whose plan needs more starts that many local ranks itself; a larger world, started
by torchrun, is used as it is. `--help` lists every key.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while Python still imports ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from titanlite.config import load_config, make_parallel_dims
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, LostWorldError, RankError, TitanliteError
from titanlite.ranks.launch import (
    ALONE,
    Place,
    prepare_environment,
    run_ranks,
    torchrun_place,
)
from titanlite.ranks.signals import StopRequest, told_of_interrupt, unwinding_at_sigterm
from titanlite.start import check_start

# How long a rank that is not the one to say what is wrong waits to be ended by torchrun.
SILENT_SECONDS = 5.0
EXAMPLE = "python train.py --job.config_file=configs/tp2_fsdp2.toml"


def main(argv: list[str]) -> int:
    """Check everything that can be checked, then train; the exit status."""
    prepare_environment()
    place = None
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        place = torchrun_place()
        config = load_config(argv, needs_file=EXAMPLE)
        world = None if place is None or place.world_size == 1 else place
        start = check_start(config, world)
        if world:
            train(world, config, start.device_type)
        elif start.dims.world_size == 1:
            with unwinding_at_sigterm():
                train(ALONE, config, start.device_type)
        else:
            with unwinding_at_sigterm(), StopRequest(enabled=config.checkpoint.saves) as stop:
                run_ranks(
                    train,
                    start.dims.world_size,
                    config,
                    start.device_type,
                    stop=stop,
                    max_ranks=config.job.max_local_ranks,
                )
    except RankError as error:
        print(f"{error.rank_traceback}\n{error}".strip(), file=sys.stderr)
        return 1
    except LostWorldError:
        return 1
    except TitanliteError as error:
        # Before ranks have met, each makes the same mistake: one a machine says so.
        is_told = error.is_told_here
        if is_told or (is_told is None and (place is None or place.local_rank == 0)):
            print(error, file=sys.stderr)
        elif is_told is None:
            # torchrun ends all ranks as soon as one has failed: not before one has said why.
            threading.Event().wait(SILENT_SECONDS)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        return told_of_interrupt(stop)
    return 0


def train(place: Place, config: JobConfig, device_type: str) -> None:
    """One rank's run: open the world, build the job, step to the end, draw the pictures.

    A run that saves checkpoints goes on from its newest one, and ends early when it is asked to.
    """
    from titanlite.checkpoint.run import Checkpoints
    from titanlite.job import build_job
    from titanlite.ranks.watch import Traces
    from titanlite.ranks.world import open_world
    from titanlite.reporter import Reporter

    comm = config.comm
    folder = Path(config.job.dump_folder) / comm.save_traces_folder
    with (
        StopRequest(place.orders, enabled=config.checkpoint.saves) as stop,
        open_world(
            place,
            device_type,
            init_timeout_seconds=comm.init_timeout_seconds,
            trace_buf_size=config.num_recorded_collectives,
            traces=Traces(folder, comm.save_traces_file_prefix) if comm.trace_buf_size else None,
        ) as world,
    ):
        dims = make_parallel_dims(config, world.size)
        job = build_job(config, dims, world)
        # Collected at the same steps on every rank, so that none waits for another's collection.
        gc.disable()
        with (
            Checkpoints(job) as checkpoints,
            Reporter(
                job, checkpoints.first_step, checkpoints.notes, is_guest=checkpoints.is_guest
            ) as reporter,
            world.explaining(),
        ):
            if checkpoints.is_seed:
                reporter.say(checkpoints.save(0))
                return
            for step in range(checkpoints.first_step, config.training.steps + 1):
                result = job.step(step)
                if step == checkpoints.first_step:
                    world.set_timeout(comm.train_timeout_seconds)
                if step % config.training.gc_freq == 0 or config.training.gc_debug:
                    reporter.note_collected(gc.collect(1))
                is_last = step == config.training.steps
                validates = step % config.validation.freq == 0 or is_last
                validation_loss = job.evaluate() if config.validation.enable and validates else None
                wants_stop = stop.is_asked or checkpoints.has_failed
                stops = reporter.record(step, result, validation_loss, stops=wants_stop)
                if said := checkpoints.after_step(step, is_last=is_last, stops=stops):
                    reporter.say(said)
                if stops:
                    reporter.say("stopped as asked; the same command goes on from here")
                    return
            reporter.finish(lambda: stop.is_asked)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        # Everything is closed. torch's own threads now and then abort a process as it unloads.
        os._exit(status)
    sys.exit(status)
