"""What a plan takes at least, without composing it: a lower bound of its step and of its peak.

A search drops a plan whose bounds cannot be better than what it has found. The bounds follow from
the same pieces and costs as the plan itself:

- The main stream of a rank runs its operators one after another, and waits for each communication
  that nothing overlaps. So the passes of a part take at least the sum of these.
- A rank computes all microbatches of its stages. Before its first forward pass, a microbatch goes
  through all earlier stages. After its last backward pass, a gradient goes back through them; a
  schedule that splits the backward pass can compute weight gradients meanwhile.
- A rank holds its parameters and optimizer state, unless its host does. Without a pipeline, it also
  holds all activations of a batch at the end of the forward pass. With one, it has all weights of a
  stage gathered while it runs it, and after a first backward pass the gradients of the whole stage.

Idle time inside a pipeline, FSDP's communication and the update are left out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from titanlite.config import ResolvedJob
from titanlite.tools.planner.compose import parts_of
from titanlite.tools.planner.composition import TOKENS, Builder, ModelPart, Pieces, Segment, Weight
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.data_parallel import GATHERED, Replication
from titanlite.tools.planner.events import FROM_RANK_TO_RANK, Communication, Operator, Site, Wait
from titanlite.tools.planner.fuse import is_fusible
from titanlite.tools.planner.segments import Stage
from titanlite.tools.planner.space import Changes, sizes_of

SLACK = 0.02
"""Extrapolated times, which a search compares, are at most this share too low."""


class Floor(NamedTuple):
    """The least seconds of a step, and the least bytes of its peak on the fullest rank."""

    seconds: float
    num_bytes: int


class Frontier:
    """The seconds and peaks of the plans found so far: the `count` fastest, and the front.

    Of plans of one kind, only the fastest is among the fastest.
    """

    def __init__(self, count: int, found: Iterable[tuple[Hashable, float, int]] = ()) -> None:
        self._count = count
        self._fastest: dict[Hashable, float] = {}
        self._limit = math.inf
        self._front: list[tuple[float, int]] = []
        for kind, seconds, num_bytes in found:
            self.add(kind, seconds, num_bytes)

    def add(self, kind: Hashable, seconds: float, num_bytes: int) -> None:
        if seconds < self._fastest.get(kind, math.inf):
            self._fastest[kind] = seconds
            if len(self._fastest) >= self._count:
                self._limit = sorted(self._fastest.values())[self._count - 1]
        if not any(s <= seconds and m <= num_bytes for s, m in self._front):
            self._front = [(s, m) for s, m in self._front if not (seconds <= s and num_bytes <= m)]
            self._front.append((seconds, num_bytes))

    def excludes(self, floor: Floor) -> bool:
        """Whether a plan that takes at least this is neither among the fastest nor on the front."""
        return floor.seconds > self._limit * (1 + SLACK) and any(
            seconds * (1 + SLACK) < floor.seconds and num_bytes <= floor.num_bytes
            for seconds, num_bytes in self._front
        )


class TooLarge:
    """Plans that do not fit in memory, and so no plan that takes more.

    It has larger microbatches or recomputes less, and nothing else differs.
    """

    def __init__(self) -> None:
        self._sizes: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)

    def add(self, plan: Changes) -> None:
        others, size, recomputed = sizes_of(plan)
        self._sizes[others].append((size, recomputed))

    def __contains__(self, plan: Changes) -> bool:
        others, size, recomputed = sizes_of(plan)
        return any(s <= size and r >= recomputed for s, r in self._sizes[others])


class _Passes(NamedTuple):
    """The least seconds of the forward and backward pass of a part or stage."""

    forward: float
    backward: float


class _Bytes(NamedTuple):
    """The bytes of a part on a rank: held before a step, gathered, of gradients, of activations."""

    held: int
    gathered: int
    gradients: int
    activations: int


class Bounds:
    """The bounds of plans that share their pieces."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._passes: dict[int, _Passes] = {}
        self._bytes: dict[tuple[object, ...], _Bytes] = {}
        self._stages: dict[tuple[str, ...] | None, tuple[Stage, _Passes]] = {}

    def floor(self, resolved: ResolvedJob, cost: Cost, num_microbatches: int) -> Floor:
        """The bounds of a plan with that many microbatches in a batch."""
        data = Replication(resolved, self._pieces)
        batch = resolved.config.training.local_batch_size * resolved.dims.dp
        batches = resolved.global_batch_size // batch
        if resolved.pipeline is None:
            parts, passes = self._stage(None, cost)
            of = self._stage_bytes(parts, data)
            return Floor(batches * sum(passes), of.held + max(0, of.activations))
        pipeline, boundary = resolved.pipeline, self._pieces.boundary_bytes
        stages = [self._stage(names, cost) for names in pipeline.stages]
        before = [0.0, *itertools.accumulate(passes.forward for _, passes in stages)]
        after = [0.0] * len(before)
        if not data.splits_backward:
            after = [0.0, *itertools.accumulate(passes.backward for _, passes in stages)]
        seconds, most = 0.0, 0
        for place in range(resolved.dims.pp):
            numbers = pipeline.stages_of(place)
            first = min(numbers)
            busy = batches * num_microbatches * sum(sum(stages[number][1]) for number in numbers)
            seconds = max(seconds, before[first] + busy + after[first])
            received = sum((n > 0) + (n + 1 < len(stages)) for n in numbers)
            held, largest = received * num_microbatches * boundary, 0
            for number in numbers:
                of = self._stage_bytes(stages[number][0], data)
                held += of.held
                activations = of.activations - boundary
                if not data.regathers:
                    activations += of.gathered
                largest = max(largest, activations, of.gathered + of.gradients)
            most = max(most, held + largest)
        return Floor(seconds, most)

    def _stage(self, names: tuple[str, ...] | None, cost: Cost) -> tuple[Stage, _Passes]:
        if names not in self._stages:
            parts = parts_of(self._pieces, names)
            passes = [self._part_passes(part, cost) for _, part in parts]
            total = _Passes(sum(one.forward for one in passes), sum(one.backward for one in passes))
            self._stages[names] = parts, total
        return self._stages[names]

    def _stage_bytes(self, parts: Stage, data: Replication) -> _Bytes:
        key = id(parts), data.key
        if key not in self._bytes:
            of = [self._part_bytes(name, part, data) for name, part in parts]
            self._bytes[key] = _Bytes(*map(sum, zip(*of, strict=True)))
        return self._bytes[key]

    def _part_passes(self, part: ModelPart, cost: Cost) -> _Passes:
        key = id(part)
        if key not in self._passes:
            forward, backward = (least_seconds(one, cost) for one in (part.forward, part.backward))
            self._passes[key] = _Passes(forward, backward)
        return self._passes[key]

    def _part_bytes(self, name: str, part: ModelPart, data: Replication) -> _Bytes:
        pieces = self._pieces
        key = id(part), name == "after", data.key
        if key not in self._bytes:
            # Embeddings and head can share a unit, which counts as that of the embeddings.
            units = [
                weights
                for unit, weights in data.units(name, part)
                if not (name == "after" and data.is_shared(unit))
            ]
            held = 0
            # With CPU offload, the host holds the shards.
            for weight in itertools.chain.from_iterable(() if data.is_offloaded else units):
                size = data.shard_numel(weight) * weight.itemsize
                held += size
                if weight.is_trained:
                    held += pieces.state_bytes_of(weight, size)
            self._bytes[key] = _Bytes(
                held,
                sum(_gathered_bytes(weights, data) for weights in units),
                data.whole_gradient_bytes(part),
                part.forward.net.get("activations", 0),
            )
        return self._bytes[key]


def _gathered_bytes(weights: tuple[Weight, ...], data: Replication) -> int:
    """The bytes that a gathered unit takes beside its shards."""
    if not data.is_fsdp:
        return 0
    builder, place = Builder(), Site("", "forward")
    data.finish_gather(builder, weights, data.start_gather(builder, weights, place), place)
    return builder.segment().net.get(GATHERED, 0)


def least_seconds(segment: Segment, cost: Cost) -> float:
    """The least seconds of a segment on the main stream, whatever precedes and follows it.

    Of a compiled job, elementwise operators count nothing: they can be fused with others. Messages
    from rank to rank count nothing either, since their links depend on the rank, nor do the sums of
    float8's scales, whose ranks depend on the plan.
    """
    waited = {event.number for event in segment.events if isinstance(event, Wait)}
    seconds = 0.0
    for event in segment.events:
        if isinstance(event, Operator):
            if not (cost.is_compiled and is_fusible(event)):
                seconds += cost.operator(event)
        elif isinstance(event, Communication):
            is_unknown = event.kind in FROM_RANK_TO_RANK or event.axis == TOKENS
            if not is_unknown and event.number not in waited:
                seconds += cost.communication(event).seconds
    return seconds
