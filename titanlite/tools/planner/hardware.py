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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, StrictBool, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from titanlite.config.toml import TOML_ERRORS, parse_toml
from titanlite.errors import ConfigError, suggest

FOLDER = Path(__file__).with_suffix("")
T = TypeVar("T")
DEEPEST = 8
"""How many files may be based on each other."""


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


def _positive(value: Any) -> Any:
    if not _is_number(value) or value <= 0:
        raise PydanticCustomError("number", "is not a number above 0; give one")
    return value


def _not_negative(value: Any) -> Any:
    if not _is_number(value) or value < 0:
        raise PydanticCustomError("number", "is not a number of at least 0; give one")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _curve(value: Any) -> Curve:
    """A number for a constant, or a list of [x, y]."""
    if _is_number(value):
        value = [[1.0, value]]
    try:
        points = tuple((float(x), float(y)) for x, y in value)
        is_right = bool(points) and all(x > 0 and y > 0 and math.isfinite(x * y) for x, y in points)
        is_right = is_right and all(a[0] < b[0] for a, b in itertools.pairwise(points))
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise PydanticCustomError(
            "curve",
            "is not a positive number or a list of [bytes, share] with ascending bytes; give one",
        )
    return Curve(points)


Positive = Annotated[float, PlainValidator(_positive)]
NotNegative = Annotated[float, PlainValidator(_not_negative)]
ShareCurve = Annotated[Curve, PlainValidator(_curve)]


@dataclass(frozen=True)
class DeviceMemory:
    """The device's memory. `share` gives the share of the bandwidth by an operator's bytes.

    `beside_bytes` are taken before torch allocates anything: a GPU's context and libraries.
    """

    num_bytes: Positive
    bytes_per_second: Positive
    share: ShareCurve
    beside_bytes: NotNegative = 0.0


@dataclass(frozen=True)
class Interconnect:
    """A rank's port: bandwidth in each direction, latency of a message, share of it by bytes."""

    bytes_per_second: Positive
    latency_seconds: NotNegative
    share: ShareCurve


@dataclass(frozen=True)
class Node(Interconnect):
    """The ranks of a node, and the links between them."""

    num_ranks: Annotated[int, Field(gt=0, strict=True)]


@dataclass(frozen=True)
class Host:
    """The share of a node's host that a GPU has, for CPU offload.

    `num_bytes` is memory. `bytes_per_second` is that of copies between the host's pinned memory and
    the device, in each direction, when all GPUs of the node copy at once; each takes
    `latency_seconds` more. The update of parameters reads and writes the host's memory with the
    share `memory_share` of `memory_bytes_per_second`.
    """

    num_bytes: Positive
    bytes_per_second: Positive
    latency_seconds: NotNegative
    memory_bytes_per_second: Positive
    memory_share: Positive


@dataclass(frozen=True)
class Products:
    """How close matrix products come to the peak.

    `share` of the peak is reached by a large product. The output is computed in tiles of `tile_m` x
    `tile_n`, `num_units` of them at a time, so a last wave can be partly idle. A product whose
    dimension m, n or k is `half_m`, `half_n` or `half_k` reaches half of that (0: no limit).
    """

    share: Positive
    tile_m: Positive
    tile_n: Positive
    num_units: Positive
    half_m: NotNegative
    half_n: NotNegative
    half_k: NotNegative


@dataclass(frozen=True)
class AttentionShares:
    """The shares of the peak of attention kernels.

    They count what is computed. The trace counts whole products; with `is_causal_halved`, a kernel
    skips the upper triangle of a sequence's scores.
    """

    forward_share: Positive
    backward_share: Positive
    is_causal_halved: StrictBool


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

    launch_seconds: NotNegative
    kernel_seconds: NotNegative
    collective_seconds: NotNegative
    unshard_seconds: NotNegative | None = None
    message_seconds: NotNegative | None = None
    exchange_seconds: NotNegative | None = None
    peer_seconds: NotNegative = 0.0
    recomputed_seconds: NotNegative = 0.0
    step_seconds: NotNegative = 0.0
    probe_seconds: NotNegative = 0.0


@dataclass(frozen=True)
class OperatorCost:
    """A measured operator: seconds of a call, for its bytes (read and written), and for its FLOPs.

    The three add up. A rate of None does not limit it.
    """

    seconds: NotNegative
    bytes_per_second: Positive | None = None
    flops_per_second: Positive | None = None

    def __call__(self, num_bytes: float, flops: float) -> float:
        found = self.seconds
        found += num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return found + (flops / self.flops_per_second if self.flops_per_second else 0.0)


@dataclass(frozen=True)
class CollectiveCost:
    """A measured collective: seconds of a call, of each other rank, and of bytes that are sent."""

    seconds: NotNegative
    seconds_per_peer: NotNegative
    bytes_per_second: Positive


@dataclass(frozen=True)
class Software:
    """What a run's software does otherwise than titanlite on a PyTorch of today.

    `rms_norm` "composed" is put together from other operators, as on GPUs before PyTorch 2.9.
    `fsdp_root` "embeddings and head" has them in the root unit, which stays gathered after the
    forward pass, as TorchTitan did before its pull request 1094.
    `attention` "unfused" stores its scores (Megatron-LM before FlashAttention); "unfused,
    recomputed" computes them again in the backward pass. `ring` "torch 2.6" is the context
    parallelism of TorchTitan in 2024. With `fuses_tp`, the compiler overlaps collectives over tp
    with their products on symmetric memory (asynchronous TP). Without `sequence_parallel`, each
    rank of tp has the whole sequence between products. Unless `joins_weights`, products of one
    input have one weight from the start. The first two also change the planned memory.
    """

    rms_norm: Literal["fused", "composed"] = "fused"
    fsdp_root: Literal["the rest", "embeddings and head"] = "the rest"
    attention: Literal["flash", "unfused", "unfused, recomputed"] = "flash"
    ring: Literal["titanlite", "torch 2.6"] = "titanlite"
    fuses_tp: StrictBool = False
    sequence_parallel: StrictBool = True
    joins_weights: StrictBool = True


@dataclass(frozen=True)
class Accuracy:
    """What runs took, as shares of their plans: the least and the most of about four in five.

    `memory` is what torch reserved, `step` the time of a step. `rows` says where the runs are.
    """

    memory: tuple[Positive, Positive]
    step: tuple[Positive, Positive]
    rows: str


@dataclass(frozen=True)
class Hardware:
    """A device, its node, and the network between nodes.

    `flops_per_second` is the peak by dtype. `operators` and `collectives` are measured costs that
    replace the formulas, by name and by kind; only `--calibrate` writes them.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    flops_per_second: Annotated[Mapping[str, Positive], Field(min_length=1)]
    memory: DeviceMemory
    node: Node
    fabric: Interconnect
    products: Products
    attention: AttentionShares
    overhead: Overhead
    software: Software = Software()
    accuracy: Accuracy | None = None
    """None if no run was compared with its plan."""
    host: Host | None = None
    """Needed only for GPUs, and only by jobs with CPU offload."""
    product_share: Mapping[str, Positive] = field(default_factory=dict)
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

    def without_call_costs(self) -> Hardware:
        """This device if calls took no time beside their work, and small ones the best rates."""

        def best(part: Any) -> Any:
            share = Curve(((1.0, max(share for _, share in part.share.points)),))
            latency = {} if part is self.memory else {"latency_seconds": 0.0}
            return replace(part, share=share, **latency)

        free = {"seconds": 0.0, "seconds_per_peer": 0.0}
        return replace(
            self,
            **{part: best(getattr(self, part)) for part in ("memory", "node", "fabric")},
            overhead=Overhead(0.0, 0.0, 0.0),
            operators={name: replace(one, seconds=0.0) for name, one in self.operators.items()},
            collectives={name: replace(one, **free) for name, one in self.collectives.items()},
        )

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

    With `base`, a name or a file beside it, a file gives only what differs from that. Raises
    ConfigError with one line for each mistake: an unknown name, a missing or unknown key, a value
    of a wrong type, a negative figure.
    """
    return parse_hardware(*_read(name_or_path, Path()))


def _read(name_or_path: str, folder: Path) -> tuple[str, Path]:
    """The text of a known device, or of a file relative to `folder`, and its path."""
    path = FOLDER / f"{name_or_path}.toml"
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        path = folder / name_or_path
    elif not path.exists():
        known = known_hardware()
        advice = suggest(name_or_path, known, f"give one of {', '.join(known)}, or a TOML file")
        raise ConfigError(f"--hardware: {name_or_path!r} is not known; {advice}")
    try:
        return path.read_text(encoding="utf-8"), path
    except OSError as error:
        raise ConfigError(
            f"--hardware: {path} cannot be read ({error.strerror}); give another file"
        ) from error


def parse_hardware(text: str, path: str | Path) -> Hardware:
    """The device of a TOML text; `path` is that of its file, see load_hardware."""
    return validated(Hardware, _values(text, Path(path)), Path(path).name)


def _values(text: str, path: Path, depth: int = 0) -> dict[str, Any]:
    """The values of a file, over those of its base."""
    try:
        values = parse_toml(text)
    except TOML_ERRORS as error:
        raise ConfigError(f"--hardware: {path.name} is not TOML: {error}") from error
    if (base := values.pop("base", None)) is None:
        return values
    if not isinstance(base, str) or depth == DEEPEST:
        raise ConfigError(f"{path.name}: base: {base!r} is not the name or file of another device")
    return _merged(_values(*_read(base, path.parent), depth + 1), values)


def _merged(base: Any, own: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    return base | {key: _merged(base.get(key), value) for key, value in own.items()}


def validated(kind: type[T], values: Any, name: str) -> T:
    """The values of the file `name` as `kind`; raises ConfigError, a line for each mistake."""
    try:
        # Of a dataclass itself, pydantic does not take a configuration here.
        of_one: Any = TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]
        return of_one.validate_python((values,))[0]
    except ValidationError as error:
        problems = [f"{name}: {_problem(one)}" for one in error.errors()]
    raise ConfigError(*problems)


def _problem(error: Any) -> str:
    """A line for pydantic's `error`."""
    key, kind, text = ".".join(map(str, error["loc"][1:])), error["type"], error["msg"]
    if kind == "missing":
        return f"{key}: is missing; give it"
    if kind == "unexpected_keyword_argument":
        return f"{key}: is not a known key; remove it"
    wrong = text if text.startswith("is not") else f"is refused: {text[:1].lower()}{text[1:]}"
    return f"{key}: {error['input']!r} {wrong}"
