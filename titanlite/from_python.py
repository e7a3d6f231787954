"""`titanlite.train`: a training run from a script or a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.callbacks import Callback, Callbacks, TrainResult
from titanlite.cli import tools
from titanlite.config import JobConfig
from titanlite.config.load import read_any
from titanlite.errors import ConfigError, RankError
from titanlite.ranks.fork_server import prepared_environment
from titanlite.ranks.launch import collect_on_gpu, torchrun_place
from titanlite.run import train_on_rank
from titanlite.start import check_start, run_job


def train(
    config: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path,
    *,
    threads: bool = False,
    on_step: Callback | None = None,
    on_validation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    on_end: Callback | None = None,
    on_start: Callback | None = None,
) -> TrainResult:
    """Train a job as `python train.py` does; returns its losses, gradient norms and metrics.

    `config` is a JobConfig, a dict of sections, or the path of a TOML file. The job can use
    whatever the calling script has registered. Every rank calls the callbacks with an Event: before
    the first step, after each step, after its validation, after each complete checkpoint, and at
    the end. With `threads`, the ranks are threads of this process, so a breakpoint stops all of
    them. Under torchrun every process calls this, and each gets the same result.

    Raises ConfigError with all mistakes of the job, and RankError if a rank or a callback fails.
    """
    place = torchrun_place()
    world = None if place is None or place.world_size == 1 else place
    callbacks = Callbacks(on_step, on_validation, on_checkpoint, on_end, on_start)
    try:
        with prepared_environment():
            start = check_start(
                read_any(config), world, trains=True, threads=threads, planner=tools().planner
            )
            if start.job.config.memory_estimation.enable:
                raise ConfigError(
                    "memory_estimation.enable: true estimates memory and does not train; call "
                    "`titanlite train`, or write false"
                )
            result = run_job(train_on_rank, start, world, callbacks, tools().artist)
        collect_on_gpu()
        return result
    except RankError as error:
        if error.rank_traceback and error.__cause__ is None:
            raise error from _RankTraceback(error.rank_traceback)
        raise


class _RankTraceback(Exception):
    """The traceback of a rank, shown above the RankError that it caused."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
