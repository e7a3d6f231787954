"""How a job starts: what can be wrong with it on this machine, its ranks, and how it ends.

Everything that can be wrong is found before any rank starts. torch is imported here only to look up
a compile backend whose name is not known.
"""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from titanlite.config import JobConfig, Reading, ResolvedJob, check_machine
from titanlite.config.degrees import DEGREES
from titanlite.config.keys import one_of
from titanlite.config.resolve import finish
from titanlite.config.toml import quote
from titanlite.errors import (
    ConfigError,
    LostWorldError,
    OutputClosedError,
    RankError,
    TitanliteError,
    collecting,
)
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.ranks.launch import ALONE, Place, choose_device, count_gpus, run_ranks
from titanlite.ranks.machine import check_local_ranks
from titanlite.ranks.signals import StopRequest, told_of_interrupt, unwinding_at_sigterm

# Of those that torch registers (torch._dynamo.list_backends), the ones that need nothing more.
BACKENDS = (
    *("inductor", "eager", "aot_eager", "aot_eager_decomp_partition"),
    *("aot_eager_default_partitioner", "cudagraphs", "eager_noexcept", "ts", "aot_ts"),
)


T = TypeVar("T")

# How long a rank that is not the one to say what is wrong waits to be ended by torchrun.
SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class Start:
    """A job that can start, and the device of its ranks, "cpu" or "cuda"."""

    job: ResolvedJob
    device_type: str


def check_start(read: Reading | JobConfig, place: Place | None = None, *, key: str = "") -> Start:
    """How the job starts: in the world that `place` is in, or on ranks of its own where it is None.

    Raises ConfigError with everything that keeps it from starting: in what was read, in what does
    not fit together, and on this machine. `key` is what asked for the number of ranks, where that
    is not [parallelism].
    """
    reading = Reading(read) if isinstance(read, JobConfig) else read
    config = reading.config
    num_gpus = 0 if config.job.device == "cpu" else count_gpus()
    draft = reading.draft(None if place is None else place.world_size, num_gpus)
    num_local_ranks = draft.dims.world_size if place is None else place.local_world_size
    device_type = ""
    with collecting(reading.problems):
        if place is None:
            _check_own_ranks(config, draft.dims, key)
    with collecting(reading.problems):
        device_type = choose_device(config.job.device, num_local_ranks)
        check_machine(config, device_type)
    with collecting(reading.problems):
        if config.compile.enable:
            check_backend(config.compile.backend)
    reading.require()
    job = finish(draft)
    if config.converts_to_float8:
        # Which layers there are, the model alone knows.
        from titanlite.job import check_float8

        check_float8(job)
    return Start(job, device_type)


def run_job(
    function: Callable[[Place, ResolvedJob, str], T], start: Start, world: Place | None = None
) -> T:
    """Call `function(place, job, device_type)` on each rank of the job; what it gives on the first.

    On the place that this process has in `world`; where that is None, in this process if one rank
    is all, else on local ranks. A first SIGINT or SIGTERM asks a run that saves to stop.
    """
    job, config = start.job, start.job.config
    if world is not None:
        return function(world, job, start.device_type)
    if job.dims.world_size == 1:
        with unwinding_at_sigterm():
            return function(ALONE, job, start.device_type)
    with unwinding_at_sigterm(), StopRequest(enabled=config.checkpoint.saves) as stop:
        return run_ranks(
            function,
            job.dims.world_size,
            job,
            start.device_type,
            stop=stop,
            max_ranks=config.job.max_local_ranks,
        )[0]


@dataclass
class Told:
    """How a job has ended, in an exit status; `place` is this process's in torchrun's world."""

    place: Place | None = None
    status: int = 0


@contextlib.contextmanager
def telling_errors() -> Iterator[Told]:
    """What ends the job inside is said on stderr, once, in a line where a user can act on it."""
    told = Told()
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            # The command has it so while it imports.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield told
    except RankError as error:
        print(f"{error.rank_traceback}\n{error}".strip(), file=sys.stderr)
        told.status = 1
    except LostWorldError:
        told.status = 1
    except OutputClosedError:
        raise
    except TitanliteError as error:
        # Before ranks have met, each makes the same mistake: one a machine says so.
        is_told = error.is_told_here
        if is_told or (is_told is None and (told.place is None or told.place.local_rank == 0)):
            print(error, file=sys.stderr)
        elif is_told is None:
            # torchrun ends all ranks as soon as one has failed: not before one has said why.
            threading.Event().wait(SILENT_SECONDS)
        told.status = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        told.status = told_of_interrupt(stop)


def check_backend(name: str) -> None:
    """Raises ConfigError where torch.compile has no backend `name`."""
    if name in BACKENDS:
        return
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        match = difflib.get_close_matches(name, BACKENDS, n=1)
        advice = f"did you mean {quote(match[0])}?" if match else f"give {one_of(BACKENDS)}"
        raise ConfigError(f"compile.backend: there is no {quote(name)}; {advice}")


def _check_own_ranks(config: JobConfig, dims: ParallelDims, key: str) -> None:
    axes = [axis for axis, degree in dims.degrees.items() if degree > 1]
    of_plan = f"parallelism.{DEGREES[axes[0]]}" if len(axes) == 1 else "parallelism"
    ways = (
        f", start them with torchrun on more machines, or set job.max_local_ranks = "
        f"{dims.world_size}"
    )
    check_local_ranks(
        dims.world_size,
        allowed=config.job.max_local_ranks,
        key=key or of_plan,
        ways="" if key else ways,
    )
