"""The figures of a device that time depends on, read from a TOML file; torch-free.

The files in hardware/ are those of known devices; `titanlite plan --calibrate`
writes one for the machine it runs on. Each figure's source is a comment in its file. The figures
under [fitted] are not from a data sheet: they were fitted to published or measured step times.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from titanlite.config.toml import TOML_ERRORS, parse_toml
from titanlite.errors import ConfigError

FOLDER = Path(__file__).with_suffix("")
KINDS = ("gpu", "cpu")


@dataclass(frozen=True)
class Curve:
    """A function of a positive quantity, by its points (x ascending), all positive.

    Between two points it is a straight line of the logarithms; outside, it is constant.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, x: float) -> float:
        points = self.points
        at = bisect.bisect_left(points, (x,))
        if at == 0:
            return points[0][1]
        if at == len(points):
            return points[-1][1]
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        share = math.log(x / x0) / math.log(x1 / x0)
        return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


@dataclass(frozen=True)
class DeviceMemory:
    """The device's memory. `share` gives the share of the bandwidth by an operator's bytes."""

    num_bytes: float
    bytes_per_second: float
    share: Curve


@dataclass(frozen=True)
class Interconnect:
    """A rank's port: bandwidth in each direction, latency of a message, share of it by bytes."""

    bytes_per_second: float
    latency_seconds: float
    share: Curve


@dataclass(frozen=True)
class Node(Interconnect):
    """The ranks of a node, and the links between them."""

    num_ranks: int


@dataclass(frozen=True)
class Host:
    """The share of a node's host that a GPU has, for CPU offload.

    `num_bytes` is memory. `bytes_per_second` is that of copies between the host's pinned memory and
    the device, in each direction, when all GPUs of the node copy at once; each takes
    `latency_seconds` more. The update of parameters reads and writes the host's memory with the
    share `memory_share` of `memory_bytes_per_second`.
    """

    num_bytes: float
    bytes_per_second: float
    latency_seconds: float
    memory_bytes_per_second: float
    memory_share: float


@dataclass(frozen=True)
class Products:
    """How close matrix products come to the peak.

    `share` of the peak is reached by a large product. The output is computed in tiles of `tile_m` x
    `tile_n`, `num_units` of them at a time, so a last wave can be partly idle. A product whose
    dimension m, n or k is `half_m`, `half_n` or `half_k` reaches half of that (0: no limit).
    """

    share: float
    tile_m: float
    tile_n: float
    num_units: float
    half_m: float
    half_n: float
    half_k: float


@dataclass(frozen=True)
class AttentionShares:
    """The shares of the peak of attention kernels.

    They count what is computed. The trace counts whole products; with `is_causal_halved`, a kernel
    skips the upper triangle of a sequence's scores.
    """

    forward_share: float
    backward_share: float
    is_causal_halved: bool


@dataclass(frozen=True)
class Overhead:
    """Seconds that do not depend on size.

    `launch_seconds` is the host's time for an eager operator: on a CPU it adds to the operator's,
    and the host of a GPU runs ahead of the device. `kernel_seconds` is the least time of an
    operator on a GPU. `collective_seconds` is the host's for a communication. On a CPU it is
    measured by caller: `unshard_seconds` for FSDP's, `message_seconds` for a P2P message of a
    pipeline and `exchange_seconds` for one of a ring. Each rank beyond two adds `peer_seconds` to a
    collective. `recomputed_seconds` is what activation checkpointing costs a CPU for each operator
    that it recomputes, beside the operator. `step_seconds` is what a step costs a CPU, however
    small it is. `probe_seconds` is what the probe of the calibration took (measure.py), to compare
    the CPU's speed with that at another time.
    """

    launch_seconds: float
    kernel_seconds: float
    collective_seconds: float
    unshard_seconds: float | None = None
    message_seconds: float | None = None
    exchange_seconds: float | None = None
    peer_seconds: float = 0.0
    recomputed_seconds: float = 0.0
    step_seconds: float = 0.0
    probe_seconds: float = 0.0


@dataclass(frozen=True)
class OperatorCost:
    """A measured operator: seconds of a call, for its bytes (read and written), and for its FLOPs.

    The three add up. A rate of None does not limit it.
    """

    seconds: float
    bytes_per_second: float | None = None
    flops_per_second: float | None = None

    def __call__(self, num_bytes: float, flops: float) -> float:
        found = self.seconds
        found += num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return found + (flops / self.flops_per_second if self.flops_per_second else 0.0)


@dataclass(frozen=True)
class CollectiveCost:
    """A measured collective: seconds of a call, of each other rank, and of bytes that are sent."""

    seconds: float
    seconds_per_peer: float
    bytes_per_second: float


@dataclass(frozen=True)
class Hardware:
    """A device, its node, and the network between nodes.

    `flops_per_second` is the peak by dtype. `operators` and `collectives` are measured costs that
    replace the formulas, by name and by kind; only `--calibrate` writes them.
    """

    name: str
    kind: str
    flops_per_second: Mapping[str, float]
    memory: DeviceMemory
    node: Node
    fabric: Interconnect
    products: Products
    attention: AttentionShares
    overhead: Overhead
    host: Host | None = None
    """Needed only for GPUs, and only by jobs with CPU offload."""
    product_share: Mapping[str, float] = field(default_factory=dict)
    """Dtype -> what replaces products.share for it."""
    operators: Mapping[str, OperatorCost] = field(default_factory=dict)
    collectives: Mapping[str, CollectiveCost] = field(default_factory=dict)
    fitted: Mapping[str, str] = field(default_factory=dict)
    """Key -> what it was fitted to."""

    @property
    def offload_host(self) -> Host | None:
        """The host, for CPU offload; None for a CPU, which has one memory.

        Raises ConfigError if the file of a GPU has none.
        """
        if self.host is None and self.kind != "cpu":
            raise ConfigError(
                f"--hardware: {self.name} has no [host], which training.enable_cpu_offload needs; "
                "add the figures of its host's memory and link, or turn offload off"
            )
        return self.host if self.kind != "cpu" else None

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of `dtype`, or of the next wider dtype that the file has."""
        for name in (dtype, *WIDER.get(dtype, ())):
            if name in self.flops_per_second:
                return self.flops_per_second[name]
        return max(self.flops_per_second.values())


WIDER = {
    "float8_e4m3fn": ("float8", "bfloat16", "float32"),
    "float8_e5m2": ("float8", "bfloat16", "float32"),
    "float8": ("bfloat16", "float32"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    "float64": ("float32",),
}


def known_hardware() -> list[str]:
    """The names of the devices that come with titanlite."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name_or_path: str) -> Hardware:
    """The device of a known name, or of a TOML file.

    Raises ConfigError with one line for each mistake: an unknown name, a missing or unknown key, a
    value of a wrong type, a negative figure.
    """
    path = FOLDER / f"{name_or_path}.toml"
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    elif not path.exists():
        raise ConfigError(
            f"--hardware: {name_or_path!r} is not known; give one of "
            f"{', '.join(known_hardware())}, or a TOML file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--hardware: {path} cannot be read ({error.strerror}); give another file"
        ) from error
    return parse_hardware(text, path.name)


def parse_hardware(text: str, name: str) -> Hardware:
    """The device of a TOML text; `name` is that of its file, for errors (see load_hardware)."""
    try:
        values = parse_toml(text)
    except TOML_ERRORS as error:
        raise ConfigError(f"--hardware: {name} is not TOML: {error}") from error
    problems: list[str] = []
    found = _table(Hardware, values, "", problems)
    if found is not None and not found.flops_per_second:
        problems.append("flops_per_second: has no dtype; give at least one, such as bfloat16")
    if found is not None and found.kind not in KINDS:
        problems.append(f"kind: {found.kind!r} is neither gpu nor cpu; give one of them")
    if problems:
        raise ConfigError(*(f"{name}: {problem}" for problem in problems))
    assert found is not None
    return found


def _table(kind: Any, values: Any, where: str, problems: list[str]) -> Any:
    """A dataclass from a table of the file; None if something is wrong."""
    if not isinstance(values, dict):
        problems.append(f"{where.rstrip('.')}: is not a table; give one")
        return None
    hints, before = get_type_hints(kind), len(problems)
    known = {one.name: one for one in fields(kind)}
    for key in values.keys() - known.keys():
        problems.append(f"{where}{key}: is not a known key; remove it")
    found = {}
    for key, one in known.items():
        if key in values:
            found[key] = _value(hints[key], values[key], where + key, problems)
        elif one.default is MISSING and one.default_factory is MISSING:
            problems.append(f"{where}{key}: is missing; give it")
    return kind(**found) if len(problems) == before else None


def _value(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    if hint is Curve:
        return _curve(value, key, problems)
    if hint in (str, bool):
        if type(value) is not hint:
            problems.append(f"{key}: {value!r} is not a {'text' if hint is str else 'boolean'}")
        return value
    if hint in (int, float, float | None):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (hint is int and not isinstance(value, int)):
            wanted = "a whole number" if hint is int else "a number"
            problems.append(f"{key}: {value!r} is not {wanted}; give one")
        elif not math.isfinite(value) or value < 0 or (value == 0 and not _may_be_zero(key)):
            bound = "at least 0" if _may_be_zero(key) else "above 0"
            problems.append(f"{key}: {value!r} is not {bound}; give another")
        return value
    if getattr(hint, "__origin__", None) is Mapping:
        inner = hint.__args__[1]
        if not isinstance(value, dict):
            problems.append(f"{key}: is not a table; give one")
            return {}
        return {name: _value(inner, of, f"{key}.{name}", problems) for name, of in value.items()}
    return _table(Host if hint == Host | None else hint, value, f"{key}.", problems)


def _may_be_zero(key: str) -> bool:
    """Times and half-lengths can be 0; rates, sizes and shares cannot."""
    name = key.rsplit(".", 1)[-1]
    return name.endswith(("seconds", "seconds_per_peer")) or name.startswith("half_")


def _curve(value: Any, key: str, problems: list[str]) -> Curve:
    """A number for a constant, or a list of [x, y]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [[1.0, value]]
    try:
        points = tuple((float(x), float(y)) for x, y in value)
        is_right = bool(points) and all(x > 0 and y > 0 and math.isfinite(x * y) for x, y in points)
        is_right = is_right and all(a[0] < b[0] for a, b in itertools.pairwise(points))
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        problems.append(
            f"{key}: {value!r} is not a positive number or a list of [bytes, share] with ascending "
            "bytes; give one"
        )
        return Curve(((1.0, 1.0),))
    return Curve(points)
