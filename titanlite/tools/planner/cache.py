"""Pieces on disk, so that a job whose pieces are known is planned without torch.

The name of a file is a hash of all that its pieces depend on: the reduced job, the version of
torch, and the source code of titanlite and of the job's own modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.config import ResolvedJob
from titanlite.errors import ConfigError
from titanlite.plan_row import PlanRow
from titanlite.tools.planner.composition import (
    Float8Cast,
    ModelPart,
    Pieces,
    Segment,
    Weight,
    smaller,
)
from titanlite.tools.planner.events import Communication, Event, Operator, Site, Wait

SOURCE = Path(__file__).parents[1]
# Sections of a job that change nothing of its step.
UNUSED = (
    *("job", "metrics", "profiling", "checkpoint", "validation", "sampling", "comm", "debug"),
    "memory_estimation",
)


def load_pieces(
    resolved: ResolvedJob, *, use_cache: bool = True, is_compiled: bool = False
) -> Pieces:
    """The pieces of a job: from the cache, or traced and stored there.

    They are of eager code, unless `is_compiled` and the job compiles its blocks. A cache that
    cannot be read or written is not used.
    """
    small = smaller(resolved, is_compiled=is_compiled)
    path = folder() / f"{key_of(small)}.json.z"
    pieces = _read(path) if use_cache else None
    if pieces is not None:
        return pieces
    from titanlite.tools.planner.pieces import trace_pieces

    pieces = trace_pieces(small, is_compiled=is_compiled)
    if use_cache:
        _write(path, zlib.compress(json.dumps(pack(pieces)).encode(), 1))
    return pieces


def known_pieces(resolved: ResolvedJob) -> Pieces | None:
    """The pieces of a job, compiled as it is, if the cache has them; nothing is traced."""
    try:
        return _read(folder() / f"{key_of(smaller(resolved, is_compiled=True))}.json.z")
    except ConfigError:
        # The reduced job is not legal, so it was never traced.
        return None


def load_applied(resolved: ResolvedJob, *, use_cache: bool = True) -> tuple[PlanRow, ...]:
    """The effective plan of a job: from the cache, or from the job's parts, built and stored there.

    It is that of the first rank, as in a run.
    """
    path = folder() / f"{key_of(resolved)}.rows.json"
    if use_cache:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return tuple(PlanRow(*row) for row in json.loads(path.read_bytes()))
    from titanlite.tools.planner.trace import applied_plan

    rows = applied_plan(resolved)
    if use_cache:
        _write(path, json.dumps([dataclasses.astuple(row) for row in rows]).encode())
    return rows


def _write(path: Path, content: bytes) -> None:
    """Write a file of the cache if that is possible."""
    # Written under another name first: a reader never sees half a file.
    part = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)


def _read(path: Path) -> Pieces | None:
    """The pieces in a file; None if it does not exist or cannot be read."""
    try:
        return unpack(json.loads(zlib.decompress(path.read_bytes())))
    except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error):
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
    text = json.dumps([*what, _torch_version(), code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")


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


# Pieces as JSON: events are lists with one letter for their kind.


def pack(pieces: Pieces) -> dict[str, Any]:
    """Pieces as values that JSON can hold."""
    values = dict(vars(pieces))
    for name in ("before", "after"):
        values[name] = _pack_part(values[name])
    values["blocks"] = [_pack_part(part) for part in pieces.blocks]
    for name in ("start", "end"):
        values[name] = _pack_segment(values[name])
    values["casts"] = {
        name: [one.numel, one.is_cut, _pack_segment(one.cast), _pack_segment(one.amax)]
        for name, one in pieces.casts.items()
    }
    return values


def unpack(values: dict[str, Any]) -> Pieces:
    """The pieces that `pack` was given."""
    for name in ("before", "after"):
        values[name] = _unpack_part(values[name])
    values["blocks"] = tuple(_unpack_part(part) for part in values["blocks"])
    for name in ("start", "end"):
        values[name] = _unpack_segment(values[name])
    values["casts"] = {
        name: Float8Cast(numel, is_cut, _unpack_segment(cast), _unpack_segment(amax))
        for name, (numel, is_cut, cast, amax) in values["casts"].items()
    }
    for name in ("end_weights", "tied"):
        values[name] = _unpack_weights(values[name])
    for name in ("kinds", "names", "before_names", "after_names", "balance_bytes"):
        values[name] = tuple(values[name])
    return Pieces(**values)


def _pack_part(part: ModelPart) -> list[Any]:
    forward, backward = _pack_segment(part.forward), _pack_segment(part.backward)
    return [forward, backward, part.units, part.buffer_bytes, part.late_bytes]


def _unpack_part(values: Sequence[Any]) -> ModelPart:
    forward, backward, units, *rest = values
    return ModelPart(
        _unpack_segment(forward),
        _unpack_segment(backward),
        {name: _unpack_weights(weights) for name, weights in units.items()},
        *rest,
    )


def _unpack_weights(values: Sequence[Any]) -> tuple[Weight, ...]:
    return tuple(Weight(name, tuple(shape), *rest) for name, shape, *rest in values)


def _pack_segment(segment: Segment) -> list[Any]:
    events = [_pack_event(event) for event in segment.events]
    return [events, segment.net, segment.peak, segment.peak_place]


def _unpack_segment(values: Sequence[Any]) -> Segment:
    events, net, peak, place = values
    return Segment(tuple(map(_unpack_event, events)), net, peak, Site(*place))


def _pack_event(event: Event) -> list[Any]:
    return [type(event).__name__[0], *vars(event).values()]


def _unpack_event(values: list[Any]) -> Event:
    letter, *rest = values
    if letter == "W":
        return Wait(*rest)
    rest[4] = Site(*rest[4])
    if letter == "C":
        rest[8] = tuple(rest[8])
        return Communication(*rest)
    rest[6], rest[8] = tuple(rest[6]), tuple(rest[8])
    return Operator(*rest)
