"""Combines the measurements of all ranks and compares them with the tolerances; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from titanlite.tools.verify.record import Agreement, RankRun, ReferenceStep

WORDS = {
    "start": "starting weight",
    "loss": "the loss",
    "auxiliary_loss": "the auxiliary loss",
    "norm": "the gradient norm",
    "gradient": "gradient",
    "load": "count of tokens by expert",
    "lr": "the learning rate",
    "weight": "weight",
    "state": "optimizer state",
    "buffer": "buffer",
    "validation": "the validation loss",
    "metric": "validation metric",
    "reloaded": "reloaded tensor",
}
"""What is compared, in the order in which a step computes it, in words.

"start" is the weights before the first step, "state" the optimizer state, and "reloaded" the
weights, state and buffers of a new job that has loaded this one's checkpoint. "metric" is one of
validation.metrics, "load" the tokens of each expert of a layer.
"""
KINDS = tuple(WORDS)
NUMBERS = ("loss", "auxiliary_loss", "norm", "lr", "validation")
"""The kinds that are one number per step; the others are tensors."""

FLOAT64_TOLERANCE = 1e-11
# In float64 the measured rounding error of the reference raises a tolerance to at most this.
MOST_ROUNDING = 1e-9
# The least tolerance if part of the model computes in float32 inside a float64 run.
NARROW_TOLERANCE = 1e-6
# A gradient below this share of the whole gradient's norm is only rounding error. The gradient of a
# key bias is an example: attention does not depend on it.
NOISE = 1e-13
# The tolerance is this many times the measured rounding error of the reference, since plans sum in
# orders (over ranks, rings, stages) that the measurement does not cover.
MARGIN = 10.0

Key = tuple[str, str]
"""(kind, name of the tensor); the name is "" for the kinds in NUMBERS."""


@dataclass(frozen=True)
class Disagreement:
    """A difference above its tolerance."""

    step: int
    kind: str
    name: str
    difference: float
    tolerance: float


@dataclass
class Tolerance:
    """How much a plan may differ: 1e-11 in float64, else ten times the reference's rounding error.

    `rounding` is that error, as step -> key -> difference: how far the reference is from the same
    job with its sums in another order and, if its dtype is not float64, from the job in float64. In
    float64 it raises a tolerance to at most MOST_ROUNDING. With `is_narrow` (some module computes
    in a narrower dtype) there is no such limit, and a tolerance is at least NARROW_TOLERANCE.
    With `loss_tolerance`, in any dtype but float64, only losses are compared, with at least that.
    """

    dtype: str
    rounding: Sequence[Mapping[Key, float]] = ()
    is_narrow: bool = False
    loss_tolerance: float | None = None
    _found: dict[tuple[int, Key], float] = field(default_factory=dict)

    def of(self, step: int, key: Key) -> float:
        """The largest difference that counts as agreement."""
        if (step, key) not in self._found:
            self._found[step, key] = self._make(step, key)
        return self._found[step, key]

    def _make(self, step: int, key: Key) -> float:
        if key[0] == "start":
            return 0.0
        if key[0] == "lr":
            return FLOAT64_TOLERANCE
        if key[0] in ("metric", "load") and (self.dtype != "float64" or self.is_narrow):
            # A metric may count, as accuracy does, and then jumps where two logits nearly tie. A
            # token whose scores nearly tie goes to another expert.
            return math.inf
        # Rounding error of tensors grows with the steps, so later steps are not used. A number can
        # agree by chance in one step, so all steps are used.
        own, usual = self._moved(key, None if key[0] in NUMBERS else step + 1)
        if self.loss_tolerance is not None and self.dtype != "float64":
            if key[0] not in ("loss", "validation"):
                return math.inf
            return max(self.loss_tolerance, 0.0 if self.dtype == "float32" else MARGIN * own)
        if self.dtype != "float64":
            return MARGIN * max(usual, own)
        if self.is_narrow:
            return max(NARROW_TOLERANCE, MARGIN * own)
        return max(FLOAT64_TOLERANCE, min(MARGIN * own, MOST_ROUNDING))

    def _moved(self, key: Key, num_steps: int | None) -> tuple[float, float]:
        """The most by which `rounding` moves a key, and half of all keys of its kind."""
        own = usual = 0.0
        for of_step in self.rounding[:num_steps]:
            own = max(own, of_step.get(key, 0.0))
            values = [value for (kind, _), value in of_step.items() if kind == key[0]]
            usual = max(usual, median(values) if values else 0.0)
        return own, usual


def differences(
    runs: Sequence[RankRun], reference: Sequence[ReferenceStep], *, by_distance: bool = False
) -> list[dict[Key, float]]:
    """For each step (0 is the start) and each key, the largest difference on any rank.

    With `by_distance`, that of a tensor is of its root mean square, not of its largest element.
    A gradient that is only rounding error counts as equal. The weight and the optimizer state that
    follow from it are compared relative to the largest weight or state of the model.
    """
    found = []
    noise: set[str] | None = None
    for step, known in enumerate(reference):
        of_step: dict[Key, float] = {}
        seen = [run.steps[step] for run in runs]
        if step:
            for kind in NUMBERS:
                value = getattr(known, kind)
                if value is not None:
                    of_step[kind, ""] = max(_relative(getattr(s, kind), value) for s in seen)
            for name, counts in known.loads.items():
                of_step["load", name] = max(_unlike(s.loads.get(name, ()), counts) for s in seen)
            for name, value in known.metrics.items():
                of_step["metric", name] = max(_relative(s.metrics[name], value) for s in seen)
            sizes = _sizes([s.gradients for s in seen])
            least = NOISE * known.norm
            small = {name for name, (size, error) in sizes.items() if size + error <= least}
            # The optimizer may itself complete what a rank has of its own.
            of_reference = {name for name, (size, _) in sizes.items() if size <= least}
            noise = of_reference if noise is None else noise & of_reference
        for kind, tensors in (
            ("gradient", [s.gradients for s in seen]),
            ("weight" if step else "start", [s.weights for s in seen]),
            ("state", [s.state for s in seen]),
            ("buffer", [s.buffers for s in seen]),
        ):
            largest = _largest(tensors)
            for name, agreement in _items(tensors):
                difference = _difference(kind, name, agreement, noise or (), largest)
                if by_distance and difference == agreement.difference:
                    difference = agreement.distance
                if step and kind == "gradient" and name in small:
                    difference = 0.0
                of_step[kind, name] = max(of_step.get((kind, name), 0.0), difference)
        found.append(of_step)
    _add_reloaded(runs, found[-1], noise or ())
    return found


def _difference(
    kind: str, name: str, agreement: Agreement, noise: Collection[str], largest: float
) -> float:
    """The difference of a tensor; `noise` are the parameters whose gradient is rounding error.

    The weight and the state of such a parameter are compared relative to `largest`, as are single
    elements of a weight, such as the key's in one bias of queries, keys and values.
    """
    parameter = name.rpartition(".")[0] if kind == "state" else name
    if kind in ("weight", "state") and parameter in noise and largest:
        return max(agreement.error, agreement.noise) / largest
    return max(agreement.difference, agreement.noise / largest if largest else 0.0)


def _largest(tensors: Iterable[Mapping[str, Agreement]]) -> float:
    return max((agreement.scale for _, agreement in _items(tensors)), default=0.0)


def _add_reloaded(runs: Sequence[RankRun], last: dict[Key, float], noise: Collection[str]) -> None:
    """Add the differences after a reload, less those that were there before the save."""
    loaded = [loaded for run in runs for loaded in (run.reloaded, run.reloaded_alone) if loaded]
    for of_job in loaded:
        for kind, of_kind in (
            ("weight", of_job.weights),
            ("state", of_job.state),
            ("buffer", of_job.buffers),
        ):
            largest = _largest([of_kind])
            for name, agreement in of_kind.items():
                difference = _difference(kind, name, agreement, noise, largest)
                more = max(0.0, difference - last.get((kind, name), 0.0))
                last["reloaded", name] = max(last.get(("reloaded", name), 0.0), more)


def _sizes(gradients: Sequence[Mapping[str, Agreement]]) -> dict[str, tuple[float, float]]:
    """The largest element of each gradient of the reference, and the largest error on any rank."""
    largest: dict[str, tuple[float, float]] = {}
    for name, agreement in _items(gradients):
        size, error = largest.get(name, (0.0, 0.0))
        largest[name] = max(size, agreement.scale), max(error, agreement.error)
    return largest


def badness(difference: float, tolerance: float) -> float:
    if tolerance == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / tolerance


def largest_of(
    runs: Iterable[Sequence[Mapping[Key, float]]], num_steps: int
) -> list[dict[Key, float]]:
    """For each step and key, the largest difference in several runs."""
    largest: list[dict[Key, float]] = [{} for _ in range(num_steps)]
    for run in runs:
        for total, of_step in zip(largest, run, strict=True):
            for key, value in of_step.items():
                total[key] = max(total.get(key, 0.0), value)
    return largest


def failures(found: Sequence[Mapping[Key, float]], tolerance: Tolerance) -> list[Disagreement]:
    """All differences above tolerance, in the order of the computation."""
    failed = [
        Disagreement(step, *key, difference, tolerance.of(step, key))
        for step, of_step in enumerate(found)
        for key, difference in of_step.items()
        if not difference <= tolerance.of(step, key)
    ]
    return sorted(failed, key=lambda failure: (failure.step, KINDS.index(failure.kind)))


@dataclass(frozen=True)
class UnequalReplicas:
    """A parameter whose replicas differ; `groups` are the ranks that hold equal bits."""

    step: int
    name: str
    groups: tuple[tuple[int, ...], ...]


def unequal_replicas(runs: Sequence[RankRun]) -> list[UnequalReplicas]:
    """Parameters whose replicas hold different bits, at the first step that has any."""
    for step in range(len(runs[0].steps)):
        found = []
        for name, holders in holders_of(runs).items():
            for ranks in holders.values():
                by_digest: dict[str, list[int]] = defaultdict(list)
                for rank in ranks:
                    by_digest[runs[rank].steps[step].weights[name].digest].append(rank)
                if len(by_digest) > 1:
                    found.append(UnequalReplicas(step, name, tuple(map(tuple, by_digest.values()))))
        if found:
            return found
    return []


def holders_of(runs: Sequence[RankRun]) -> dict[str, dict[tuple[int, ...], list[int]]]:
    """Parameter -> coordinates on the axes that shard it -> the ranks that hold that shard."""
    holders: dict[str, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for name, axes in run.placements.items():
            place = tuple(
                run.coordinates[axis] for axis, how in axes.items() if how != "replicated"
            )
            holders[name][place].append(run.rank)
    return holders


def same_shards(runs: Sequence[RankRun]) -> list[str]:
    """Parameters whose shards start with equal values though the reference's slices differ."""
    found = []
    for name, holders in holders_of(runs).items():
        ranks = [ranks[0] for ranks in holders.values()]
        own = {runs[rank].steps[0].weights[name].digest for rank in ranks}
        expected = {runs[rank].expected_shards.get(name) for rank in ranks}
        if len(own) < len(expected):
            found.append(name)
    return found


def _unlike(counts: Sequence[int], known: Sequence[int]) -> float:
    """The largest difference of a count, relative to the largest count."""
    if len(counts) != len(known):
        return math.inf
    pairs = zip(counts, known, strict=True)
    return max((abs(a - b) for a, b in pairs), default=0) / max(1, *known)


def _items(tensors: Iterable[Mapping[str, Agreement]]) -> Iterable[tuple[str, Agreement]]:
    for of_rank in tensors:
        yield from of_rank.items()


def _relative(value: float, reference: float) -> float:
    if math.isnan(value) and math.isnan(reference):
        return 0.0  # a metric of nothing
    if not math.isfinite(value):
        return math.inf
    if reference == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return abs(value - reference) / abs(reference)
