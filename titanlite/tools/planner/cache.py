"""Pieces on disk, so that a job whose pieces are known is planned without torch.

The name of a file is a hash of all that its pieces depend on: the reduced job, the version of
torch, and the source code of titanlite and of the job's own modules.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config import ResolvedJob
from titanlite.errors import ConfigError
from titanlite.plan_row import PlanRow
from titanlite.tools.planner.composition import Pieces, smaller
from titanlite.tools.planner.hardware import Software
from titanlite.tools.planner.software import TODAY, on_software

SOURCE = Path(__file__).parents[2]
# Sections of a job that change nothing of its step.
UNUSED = (
    *("job", "metrics", "profiling", "checkpoint", "validation", "sampling", "comm", "debug"),
    "memory_estimation",
)


def load_pieces(
    resolved: ResolvedJob,
    software: Software = TODAY,
    *,
    use_cache: bool = True,
    is_compiled: bool = False,
) -> Pieces:
    """The pieces of a job on `software`: from the cache, or traced and stored there.

    They are of eager code, unless `is_compiled` and the job compiles its blocks. A cache that
    cannot be read or written is not used.
    """
    small = smaller(resolved, is_compiled=is_compiled)
    traced = ("-n" * (software.rms_norm != "fused")) + ("-r" * (software.fsdp_root != "the rest"))
    path = folder() / f"{key_of(small)}{traced}.pieces"
    pieces: Pieces | None = _read(path) if use_cache else None
    if pieces is None:
        from titanlite.tools.planner.pieces import trace_pieces

        pieces = trace_pieces(small, software, is_compiled=is_compiled)
        if use_cache:
            _write(path, pieces)
    return pieces if software == TODAY else on_software(pieces, software, resolved)


def known_pieces(resolved: ResolvedJob) -> Pieces | None:
    """The pieces of a job, compiled as it is, if the cache has them; nothing is traced."""
    try:
        found: Pieces | None = _read(
            folder() / f"{key_of(smaller(resolved, is_compiled=True))}.pieces"
        )
    except ConfigError:
        # The reduced job is not legal, so it was never traced.
        return None
    return found


def load_applied(resolved: ResolvedJob) -> tuple[PlanRow, ...]:
    """The effective plan of a job: from the cache, or from the job's parts, built and stored there.

    It is that of the first rank, as in a run.
    """
    path = folder() / f"{key_of(resolved)}.rows"
    rows: tuple[PlanRow, ...] | None = _read(path)
    if rows is None:
        from titanlite.tools.planner.trace import applied_plan

        rows = applied_plan(resolved)
        _write(path, rows)
    return rows


def _write(path: Path, value: object) -> None:
    """Write a file of the cache if that is possible."""
    # Written under another name first: a reader never sees half a file.
    part = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(zlib.compress(pickle.dumps(value), 1))
        part.replace(path)


def _read(path: Path) -> Any:
    """The value in a file; None if it does not exist or cannot be read."""
    try:
        return pickle.loads(zlib.decompress(path.read_bytes()))
    except (OSError, EOFError, pickle.UnpicklingError, zlib.error):
        return None


def folder() -> Path:
    """Where pieces are stored: below $XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "titanlite", "plan")


def key_of(small: ResolvedJob) -> str:
    """The hash of all that the pieces of a reduced job depend on."""
    config = small.config.model_dump(mode="json", exclude=set(UNUSED))
    code = _code(SOURCE, *_own_modules(small.config.experimental.custom_import))
    # The kernels of a GPU allocate other memory than those of the CPU.
    is_on_gpu = small.config.job.device == "cuda"
    what = [config, repr(small.model), small.dims.degrees, small.seq_len, is_on_gpu]
    text = json.dumps([*what, importlib.metadata.version("torch"), code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _code(*paths: Path) -> str:
    """A hash of the Python files at `paths`, files or folders."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(_python_files(path)):
            digest.update(str(file.relative_to(path.parent)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _python_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for parent, _, names in os.walk(path, followlinks=True):
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _own_modules(name: str) -> list[Path]:
    """The file of a module, or the folder of its package."""
    spec = importlib.util.find_spec(name.partition(".")[0]) if name else None
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return [origin.parent if origin.name == "__init__.py" else origin]
