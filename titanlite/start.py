"""Start a job: check it on this machine, run it on its ranks, and report errors.

All checks run before any rank starts; torch is imported only for those that look at the model.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from titanlite.config import JobConfig, Reading, ResolvedJob, check_machine
from titanlite.config.data import prepare_data
from titanlite.config.degrees import DEGREES
from titanlite.config.resolve import finish
from titanlite.errors import (
    ConfigError,
    LostWorldError,
    OutputClosedError,
    RankError,
    TitanliteError,
    collecting,
)
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.observe.terminal import folded
from titanlite.parallelize.steps import features_on
from titanlite.quantities import ITEMSIZE
from titanlite.ranks.launch import ALONE, Place, choose_device, count_gpus, spawn
from titanlite.ranks.machine import check_local_memory, check_local_ranks, needs_threads, room_bytes
from titanlite.ranks.signals import StopRequest, interrupt_status, unwinding_at_sigterm
from titanlite.registry import MODELS

T = TypeVar("T")

MOMENTS = {"AdamW": 2, "Adam": 2, "Muon": 1}
OWN_MODELS = "titanlite.models."

LARGE_SHARE = 0.2  # of a machine's memory: from there on, a job's plan is looked up
# How long a rank that does not print the error waits for torchrun to end it.
SILENT_SECONDS = 5.0


class Planner(Protocol):
    """What a planner tells of a job that does not run; titanlite/tools/planner/local.py is one."""

    def planned_bytes(self, job: ResolvedJob, /) -> int:
        """The bytes of all ranks at their peaks; 0 if unknown."""

    def print_memory(self, reading: Reading, num_ranks: int | None, /, *, is_first: bool) -> None:
        """Print the memory of each pipeline stage's ranks at the peak of a step."""


class Tools(NamedTuple):
    """What commands hand to a run, which knows no tools."""

    planner: Planner
    artist: Any
    """Draws the pictures (titanlite.observe.reporter.Artist, whose job needs torch)."""


@dataclass(frozen=True)
class Start:
    """A job that has passed all checks, and the device of its ranks, "cpu" or "cuda".

    If `threads`, local ranks are threads of this process.
    """

    job: ResolvedJob
    device_type: str
    threads: bool = False


def check_start(
    read: Reading | JobConfig,
    place: Place | None = None,
    *,
    key: str = "",
    trains: bool = False,
    threads: bool | None = False,
    planner: Planner | None = None,
) -> Start:
    """Check a job for the world of `place`, or if that is None, for local ranks of its own.

    Raises ConfigError with all problems: in the values, across keys, and with this machine. `key`
    is the key or option that set the number of ranks, if it is not in [parallelism]. `trains` also
    checks that a training step can fit this machine's memory, with a `planner` also by its plan.
    With `threads`, the local ranks are threads of this process, whatever comm.mode says; if it is
    None, they are if comm.mode says so, or if they are too many for processes and on the CPU.
    """
    reading = Reading(read) if isinstance(read, JobConfig) else read
    config = reading.config
    is_open = threads is None and not config.comm.has_threads
    threads = bool(threads) or config.comm.has_threads
    num_gpus = 0 if config.job.device == "cpu" or threads else count_gpus()
    draft = reading.draft(None if place is None else place.world_size, num_gpus)
    num_local_ranks = draft.dims.world_size if place is None else place.local_world_size
    if is_open and place is None and not num_gpus:
        threads = needs_threads(num_local_ranks, config.job.max_local_ranks)
    device_type = ""
    with collecting(reading.problems):
        if place is None:
            _check_own_ranks(config, draft.dims, key, are_threads=threads)
    with collecting(reading.problems):
        device_type = _choose_device(config, num_local_ranks, place, are_threads=threads)
        check_machine(config, device_type)
    if trains and threads and config.profiling.enable_profiling:
        reading.problems.append(
            "profiling.enable_profiling: torch's profiler runs on one thread at a time, and these "
            "ranks are threads; give false, or run them as processes"
        )
    are_all_here = place is None or place.local_world_size == place.world_size
    needs_memory = trains and are_all_here and device_type == "cpu"
    # With CPU offload, a GPU's parameters, gradients and optimizer state are in this memory, too.
    holds_weights = needs_memory or (trains and are_all_here and config.training.enable_cpu_offload)
    least = 0
    with collecting(reading.problems):
        if holds_weights and draft.model is not None:
            least = least_bytes(config, draft.model, draft.dims)
            allowed_gb = config.job.max_local_memory_gb
            what = "parameters, gradients and optimizer state"
            check_local_memory(least, what, allowed_gb=allowed_gb)
    reading.require()
    job = finish(draft)
    if needs_memory and planner is not None:
        _check_planned_memory(job, least, planner)
    prepare_data(config, job.model, job.seq_len)
    check_layers(job)
    return Start(job, device_type, threads)


def check_layers(job: ResolvedJob) -> None:
    """Raises ConfigError if the model's layers do not suit a feature; torch only if one looks."""
    looked_at = [feature for feature in features_on(job.config) if feature.checks_model]
    if looked_at or not job.config.training.attend_across_documents:
        from titanlite.plain_job import check_plain_model

        check_plain_model(job, looked_at)


def run_job(
    function: Callable[..., T], start: Start, world: Place | None = None, *arguments: Any
) -> T:
    """Call `function(place, job, device_type, *arguments)` on each rank; return rank 0's result.

    If `world` is this process's place in a world, call it here. If it is None, call it in this
    process for a job of one rank, else on local ranks. The first SIGINT or SIGTERM asks a run that
    saves checkpoints to stop.
    """
    job, config = start.job, start.job.config
    if world is not None:
        return function(world, job, start.device_type, *arguments)
    if job.dims.world_size == 1:
        with unwinding_at_sigterm():
            return function(ALONE, job, start.device_type, *arguments)
    with unwinding_at_sigterm(), StopRequest(enabled=config.checkpoint.saves) as stop:
        return spawn(
            function,
            job.dims.world_size,
            job,
            start.device_type,
            *arguments,
            stop=stop,
            max_ranks=config.job.max_local_ranks,
            threads=start.threads,
        )[0]


@dataclass
class ExitStatus:
    """The exit status of a job; `place` is this process's place in torchrun's world."""

    place: Place | None = None
    status: int = 0


@contextlib.contextmanager
def reporting_errors() -> Iterator[ExitStatus]:
    """Print an error raised inside to stderr once, and set the exit status.

    An error that a user can act on is one line.
    """
    ended = ExitStatus()
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            # train.py sets SIG_DFL during its imports.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield ended
    except RankError as error:
        print(f"{error.rank_traceback}\n{error}".strip(), file=sys.stderr)
        ended.status = 1
    except LostWorldError:
        ended.status = 1
    except OutputClosedError:
        raise
    except TitanliteError as error:
        # Before the rendezvous every rank raises the same error; one rank per machine prints it.
        prints = error.is_printed_here
        if prints or (prints is None and (ended.place is None or ended.place.local_rank == 0)):
            print(folded(f"{error}", sys.stderr), file=sys.stderr)
        elif prints is None:
            # torchrun ends all ranks once one has failed: wait until the error has been printed.
            threading.Event().wait(SILENT_SECONDS)
        ended.status = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        ended.status = interrupt_status(stop)


def least_bytes(config: JobConfig, model: Any, dims: ParallelDims) -> int:
    """The bytes that all ranks of a job hold at least in a step; 0 if the model is of unknown size.

    They are those of the parameters, once for each replica of DDP or HSDP. titanlite's own models
    train all parameters, which adds their gradients and the optimizer's state.
    """
    num_parameters = getattr(model, "num_parameters", None)
    if not isinstance(num_parameters, int):
        return 0
    tensors, optimizer = 1, config.optimizer
    source = MODELS[config.model.name].config
    is_own = isinstance(source, str) and source.startswith(OWN_MODELS)
    if is_own and not config.checkpoint.create_seed_checkpoint:
        tensors += 1 + MOMENTS.get(optimizer.name, 1 if optimizer.momentum else 0)
        tensors += config.weight_averaging.num_copies
    return num_parameters * ITEMSIZE[config.training.dtype] * tensors * dims.num_replicas


def _check_planned_memory(job: ResolvedJob, least: int, planner: Planner) -> None:
    """Raises ConfigError if the peaks of a planned job exceed this machine's memory.

    Only a job that may not fit is looked up: a small one starts without delay.
    """
    allowed = job.config.job.max_local_memory_gb
    if least > LARGE_SHARE * room_bytes(allowed):
        planned, what = planner.planned_bytes(job), "by its plan, the ranks"
        check_local_memory(planned, what, allowed_gb=allowed, key="training")


def _choose_device(
    config: JobConfig, num_local_ranks: int, place: Place | None, *, are_threads: bool
) -> str:
    """The device of the ranks, "cpu" or "cuda"; ranks that are threads share a GPU if asked to."""
    if not are_threads:
        return choose_device(config.job.device, num_local_ranks)
    if place is not None:
        raise ConfigError(
            "comm.mode: ranks that are threads run in one process, and torchrun has started "
            f"{place.world_size}; start the job without torchrun, or run them as processes"
        )
    if config.job.device != "cuda":
        return "cpu"
    if config.parallelism.overlap_backend("cuda") == "symmetric_memory":
        raise ConfigError(
            "parallelism.async_tensor_parallel_backend: symmetric memory needs a process for each "
            'rank, and the ranks of this job are threads of one; give "ring"'
        )
    return choose_device("cuda", 1)


def _check_own_ranks(config: JobConfig, dims: ParallelDims, key: str, *, are_threads: bool) -> None:
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
        are_threads=are_threads,
    )
