"""What all ranks measured, put together, and judged by what rounding can do; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from titanlite.verify.record import Agreement, RankRun, ReferenceStep

KINDS = ("start", "loss", "norm", "gradient", "weight")
"""What is compared, in the order in which a step computes it; "start" are the first weights."""

FLOAT64_TOLERANCE = 1e-11
# How many times the reference's own rounding a plan may differ from it: sums over ranks, rings and
# stages are taken in orders that the samples of rounding do not have.
MARGIN = 10.0

Key = tuple[str, str]
"""(kind, name of the tensor; "" for loss and norm)."""


@dataclass(frozen=True)
class Failure:
    """A difference above its tolerance."""

    step: int
    kind: str
    name: str
    difference: float
    tolerance: float


@dataclass
class Tolerance:
    """How much a plan may differ: 1e-11 in float64, else a multiple of the reference's rounding.

    `rounding` holds differences of the same job on one process with its sums taken in another
    order, and from the job in float64 where that is not its dtype: step -> key -> difference. A
    tensor that holds nothing but rounding, as the gradient of a key's bias does, has a rounding as
    large as itself, and so a tolerance above it.
    """

    dtype: str
    rounding: Sequence[Mapping[Key, float]] = ()
    _found: dict[tuple[int, Key], float] = field(default_factory=dict)

    def of(self, step: int, key: Key) -> float:
        """The largest difference that is still agreement."""
        if (step, key) not in self._found:
            self._found[step, key] = self._make(step, key)
        return self._found[step, key]

    def _make(self, step: int, key: Key) -> float:
        if key[0] == "start":
            return 0.0
        # Rounding of tensors grows with the steps; two numbers agree in some by chance.
        own, all_of_kind = 0.0, [0.0]
        last = None if key[0] in ("loss", "norm") else step + 1
        for of_step in self.rounding[:last]:
            own = max(own, of_step.get(key, 0.0))
            values = [value for (kind, _), value in of_step.items() if kind == key[0]]
            all_of_kind.append(median(values) if values else 0.0)
        least = FLOAT64_TOLERANCE if self.dtype == "float64" else MARGIN * max(all_of_kind)
        return max(least, MARGIN * own)


def differences(
    runs: Sequence[RankRun], reference: Sequence[ReferenceStep]
) -> list[dict[Key, float]]:
    """For each step, from the start, the largest difference of any rank in all that is compared."""
    found = []
    for step, known in enumerate(reference):
        of_step: dict[Key, float] = {}
        seen = [run.steps[step] for run in runs]
        if step:
            of_step["loss", ""] = max(_relative(s.loss, known.loss) for s in seen)
            of_step["norm", ""] = max(_relative(s.norm, known.norm) for s in seen)
        for kind, tensors in (
            ("gradient", [s.gradients for s in seen]),
            ("weight" if step else "start", [s.weights for s in seen]),
        ):
            for name, agreement in _items(tensors):
                key = kind, name
                of_step[key] = max(of_step.get(key, 0.0), agreement.difference)
        found.append(of_step)
    return found


def badness(difference: float, tolerance: float) -> float:
    """How many times as large as allowed a difference is."""
    if tolerance == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / tolerance


def failures(found: Sequence[Mapping[Key, float]], tolerance: Tolerance) -> list[Failure]:
    """All differences above tolerance, in the order in which a run computes what they are of."""
    failed = [
        Failure(step, *key, difference, tolerance.of(step, key))
        for step, of_step in enumerate(found)
        for key, difference in of_step.items()
        if not difference <= tolerance.of(step, key)
    ]
    return sorted(failed, key=lambda failure: (failure.step, KINDS.index(failure.kind)))


@dataclass(frozen=True)
class Split:
    """Ranks that hold different values of what is replicated: {digest's ranks} of one parameter."""

    step: int
    name: str
    groups: tuple[tuple[int, ...], ...]


def split_replicas(runs: Sequence[RankRun]) -> list[Split]:
    """Parameters of which ranks that hold the same part hold different bits, at the first step."""
    for step in range(len(runs[0].steps)):
        found = []
        for name, holders in holders_of(runs).items():
            for ranks in holders.values():
                by_digest: dict[str, list[int]] = defaultdict(list)
                for rank in ranks:
                    by_digest[runs[rank].steps[step].weights[name].digest].append(rank)
                if len(by_digest) > 1:
                    found.append(Split(step, name, tuple(map(tuple, by_digest.values()))))
        if found:
            return found
    return []


def holders_of(runs: Sequence[RankRun]) -> dict[str, dict[tuple[int, ...], list[int]]]:
    """Parameter -> its place on the axes over which it is sharded -> the ranks that hold that."""
    holders: dict[str, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for name, axes in run.placements.items():
            place = tuple(
                run.coordinates[axis] for axis, how in axes.items() if how != "replicated"
            )
            holders[name][place].append(run.rank)
    return holders


def same_shards(runs: Sequence[RankRun]) -> list[str]:
    """Parameters whose shards start equal to each other where the reference's slices do not."""
    found = []
    for name, holders in holders_of(runs).items():
        ranks = [ranks[0] for ranks in holders.values()]
        own = {runs[rank].steps[0].weights[name].digest for rank in ranks}
        expected = {runs[rank].expected_shards.get(name) for rank in ranks}
        if len(own) < len(expected):
            found.append(name)
    return found


def _items(tensors: Iterable[Mapping[str, Agreement]]) -> Iterable[tuple[str, Agreement]]:
    for of_rank in tensors:
        yield from of_rank.items()


def _relative(value: float, reference: float) -> float:
    if not math.isfinite(value):
        return math.inf
    if reference == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return abs(value - reference) / abs(reference)
