"""What can be wrong with a job on this machine, all of it found before any rank starts.

torch is imported here only to look up a compile backend whose name is not known.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.config import JobConfig, check_job, check_machine, make_parallel_dims
from titanlite.config.degrees import DEGREES
from titanlite.config.keys import one_of
from titanlite.config.toml import quote
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.ranks.launch import Place, choose_device, count_gpus
from titanlite.ranks.machine import check_local_ranks

# Of those that torch registers (torch._dynamo.list_backends), the ones that need nothing more.
BACKENDS = (
    *("inductor", "eager", "aot_eager", "aot_eager_decomp_partition"),
    *("aot_eager_default_partitioner", "cudagraphs", "eager_noexcept", "ts", "aot_ts"),
)


@dataclass(frozen=True)
class Start:
    """How a job starts: its degrees, and the device of its ranks, "cpu" or "cuda"."""

    dims: ParallelDims
    device_type: str


def check_start(config: JobConfig, place: Place | None = None, *, key: str = "") -> Start:
    """How the job starts: in the world that `place` is in, or on ranks of its own where it is None.

    Raises ConfigError with everything that keeps it from starting. `key` is what asked for the
    number of ranks, where that is not [parallelism].
    """
    num_gpus = 0 if config.job.device == "cpu" else count_gpus()
    dims = make_parallel_dims(config, None if place is None else place.world_size, num_gpus)
    num_local_ranks = dims.world_size if place is None else place.local_world_size
    problems: list[str] = []
    device_type = ""
    with _collecting(problems):
        check_job(config, dims)
    with _collecting(problems):
        if place is None:
            _check_own_ranks(config, dims, key)
    with _collecting(problems):
        device_type = choose_device(config.job.device, num_local_ranks)
        check_machine(config, device_type)
    with _collecting(problems):
        if config.compile.enable:
            check_backend(config.compile.backend)
    if problems:
        raise ConfigError(*problems)
    return Start(dims, device_type)


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


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """What a ConfigError inside says joins `problems`."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
