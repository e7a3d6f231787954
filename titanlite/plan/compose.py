"""A step of a job of any size, put together from its pieces. No torch.

    ResolvedJob + Pieces -> compose -> a Composition for each stage of the pipeline

A step is a list of actions; actions that are alike share one segment. Without a pipeline an action
is the forward and backward pass of a batch. With one, the schedule's table has the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titanlite.config import ResolvedJob
from titanlite.plan.composition import Builder, Part, Pieces, Segment, Weight
from titanlite.plan.data_parallel import ENDS, Replication
from titanlite.plan.events import Communication, Event, Operator, Peak, Place
from titanlite.schedule import Schedule, add_communication
from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
)

FORWARD_PHASE, BACKWARD_PHASE = "forward", "backward"
START, BATCH, END = "start", "batch", "end"
P2P = (SEND_F, RECV_F, SEND_B, RECV_B)
Stage = list[tuple[str, Part]]
"""The parts of a stage in the order of the forward pass, by name."""


class Done(NamedTuple):
    """One action of a step: its kind, its stage and microbatch (-1 for none), and its segment.

    Microbatches are counted over all batches that the step accumulates.

    The kind is one of the schedule's, or START, BATCH or END.
    """

    kind: str
    stage: int
    microbatch: int
    segment: Segment


@dataclass(frozen=True)
class Composition:
    """The step of one rank: the bytes that it holds before the step, and its actions in order."""

    rank: int
    coordinates: dict[str, int]
    held: dict[str, int]
    actions: list[Done]

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, axis) -> (number of communications, total bytes)."""
        counts: Counter[tuple[str, str]] = Counter()
        num_bytes: Counter[tuple[str, str]] = Counter()
        for segment, times in self.segments():
            for event in segment.events:
                if isinstance(event, Communication):
                    counts[event.kind, event.axis] += times
                    num_bytes[event.kind, event.axis] += times * event.num_bytes
        return {key: (counts[key], num_bytes[key]) for key in sorted(counts)}

    @property
    def flops(self) -> int:
        """Floating-point operations of products in the step."""
        return sum(
            times * event.flops
            for segment, times in self.segments()
            for event in segment.events
            if isinstance(event, Operator)
        )

    def peak(self) -> Peak:
        """The peak of the step, with parameters and optimizer state, which are always there."""
        now: Counter[str] = Counter(self.held)
        total = most = now.total()
        best, where = dict(now), Place("", "")
        for action in self.actions:
            segment = action.segment
            if total + segment.peak_bytes > most:
                most = total + segment.peak_bytes
                best = dict(now)
                for name, num_bytes in segment.peak.items():
                    best[name] = best.get(name, 0) + num_bytes
                where = segment.peak_place
            for name, num_bytes in segment.net.items():
                now[name] += num_bytes
                total += num_bytes
        return Peak(where, best)

    def segments(self) -> Iterator[tuple[Segment, int]]:
        """Each segment, and how often it runs."""
        times = Counter(id(action.segment) for action in self.actions)
        by_id = {id(action.segment): action.segment for action in self.actions}
        for key, count in times.items():
            yield by_id[key], count


def compose(
    resolved: ResolvedJob, pieces: Pieces, places: Sequence[int] | None = None
) -> list[Composition]:
    """The step of the first rank of each stage of the pipeline, or of those at `places` on pp."""
    composer = _Composer(resolved, pieces)
    return [composer.rank(place) for place in places or range(resolved.dims.pp)]


class _Variant(NamedTuple):
    """What actions of a kind differ in: they are alike if this is equal.

    `is_first` and `is_last`: of the batches that a step accumulates. `has_gradients`: an earlier
    microbatch has left gradients.
    """

    stage: int
    is_first: bool
    is_last: bool
    has_gradients: bool = False


class _Composer:
    """Makes the segments of a job; those that are alike are made once."""

    def __init__(self, resolved: ResolvedJob, pieces: Pieces) -> None:
        self._resolved, self._pieces = resolved, pieces
        self._dims, self._pipeline = resolved.dims, resolved.pipeline
        self._data = Replication(resolved.config, resolved.dims, pieces)
        self._stages: dict[int, Stage] = {}
        self._known: dict[tuple[Any, ...], Segment] = {}
        self._table: Schedule | None = None

    def rank(self, place: int) -> Composition:
        """The step of the first rank at `place` of the pipeline."""
        dims, pipeline = self._dims, self._pipeline
        rank = dims.rank(pp=place)
        numbers = [0] if pipeline is None else pipeline.stages_of(place)
        for number in numbers:
            names = None if pipeline is None else pipeline.stages[number]
            self._stages[number] = self._parts(names)
        copies, exchanged = self._copies(numbers)
        weights = [*self._weights(numbers), *copies]
        actions = [Done(START, -1, -1, self._in_world(self._pieces.start))]
        at_once = self._resolved.config.training.local_batch_size * dims.dp
        batches = self._resolved.global_batch_size // at_once
        for index in range(batches):
            of_batch = _Variant(0, index == 0, index == batches - 1)
            if pipeline is None:
                actions.append(Done(BATCH, 0, index, self._segment(BATCH, of_batch)))
            else:
                actions += self._pipelined(place, index, of_batch)
        actions.append(
            Done(END, -1, -1, self._end(weights, exchanged, 0 if copies else dims.pp - 1))
        )
        return Composition(rank, dims.coordinates(rank), self._held(weights, numbers), actions)

    # What a rank has

    def _parts(self, names: Sequence[str] | None) -> Stage:
        """The parts of a stage; of the whole model if `names` is None."""
        pieces = self._pieces
        blocks = [
            (name, pieces.blocks[kind])
            for name, kind in zip(pieces.names, pieces.kinds, strict=True)
            if names is None or name in names
        ]
        outer = set(names or ()) - set(pieces.names)
        is_first = names is None or bool(outer & set(pieces.before_names))
        is_last = names is None or bool(outer & set(pieces.after_names))
        before, after = ("before", pieces.before), ("after", pieces.after)
        return [*([before] if is_first else []), *blocks, *([after] if is_last else [])]

    def _weights(self, numbers: Sequence[int]) -> list[Weight]:
        """The parameters of these stages; a unit of embeddings and head counts once."""
        of_units: dict[str, tuple[Weight, ...]] = {}
        for number in numbers:
            for name, part in self._stages[number]:
                of_units |= dict(self._data.units(name, part))
        return [weight for weights in of_units.values() for weight in weights]

    def _copies(self, numbers: Sequence[int]) -> tuple[list[Weight], int]:
        """This rank's copies of tied weights, and the bytes of gradients that it exchanges.

        Of two stages that share weights, the later one has copies.
        """
        ends = {name for number in numbers for name, _ in self._stages[number] if name in ENDS}
        if self._pipeline is None or len(ends) != 1:
            return [], 0
        tied, shards = self._pieces.tied, self._data.num_shards
        exchanged = sum(w.shard_numel(shards) * w.itemsize for w in tied if w.is_trained)
        return (list(tied) if ends == {"after"} else []), exchanged

    def _held(self, weights: list[Weight], numbers: Sequence[int]) -> dict[str, int]:
        """The bytes of each category before a step."""
        pieces, shards = self._pieces, self._data.num_shards
        parts = [part for number in numbers for _, part in self._stages[number]]
        buffers = len(numbers) * pieces.buffer_bytes + sum(part.buffer_bytes for part in parts)
        trained = [weight for weight in weights if weight.is_trained]
        held = {
            "parameters": buffers + sum(w.shard_numel(shards) * w.itemsize for w in weights),
            "optimizer state": sum(
                pieces.moments * w.shard_numel(shards) * w.itemsize + pieces.state_bytes
                for w in trained
            ),
        }
        if not self._data.is_fsdp and self._dims.dp_replicate > 1:
            held["communication buffers"] = sum(w.numel * w.itemsize for w in trained)
        if self._pipeline is not None:
            # PyTorch's stages allocate a buffer for what each microbatch receives.
            schedule = self._pipeline.schedule
            received = sum((n > 0) + (n < schedule.num_stages - 1) for n in numbers)
            held["communication buffers"] = (
                received * schedule.num_microbatches * pieces.boundary_bytes
            )
        return held

    # Segments

    def _segment(self, kind: str, variant: _Variant) -> Segment:
        # Stages of the same parts are alike, but for whom they send to.
        parts = self._stages[variant.stage]
        of_stage = variant.stage if kind in P2P else tuple(id(part) for _, part in parts)
        key = kind, of_stage, variant[1:]
        if key not in self._known:
            make = self._whole if kind == BATCH else self._action
            self._known[key] = make(kind, variant)
        return self._known[key]

    def _whole(self, _: str, variant: _Variant) -> Segment:
        """The forward and backward pass of one batch, without a pipeline."""
        parts, data = self._stages[0], self._data
        builder = Builder()
        if not data.is_fsdp:
            buckets = data.buckets(parts) if variant.is_last else {}
            for name, part in parts:
                builder.add(part.forward, part=name)
            for name, part in reversed(parts):
                builder.add(part.backward, part=name, adds_to_gradients=not variant.is_first)
                for num_bytes in buckets.get(name, ()):
                    data.all_reduce_bucket(builder, num_bytes, Place(name, BACKWARD_PHASE))
            return builder.segment()
        last_block = next((name for name, _ in reversed(parts) if name not in ENDS), "")
        here: set[str] = set()
        for name, part in parts:
            place = Place(name, FORWARD_PHASE)
            for unit, weights in data.units(name, part):
                if unit not in here:
                    data.finish_gather(
                        builder, weights, data.start_gather(builder, weights, place), place
                    )
                    here.add(unit)
            builder.add(part.forward, part=name)
            if data.frees(is_needed_first=name in ("after", last_block)):
                for unit, weights in data.units(name, part):
                    if not (name == "before" and data.is_shared(unit)):
                        data.free(builder, weights)
                        here.discard(unit)
        started: dict[str, int] = {}
        pending = 0, 0
        for index, (name, part) in reversed(list(enumerate(parts))):
            place = Place(name, BACKWARD_PHASE)
            for unit, weights in data.units(name, part):
                if unit not in here:
                    number = started.get(unit) or data.start_gather(builder, weights, place)
                    data.finish_gather(builder, weights, number, place)
            if index:
                # The units of the part before are gathered meanwhile.
                for unit, weights in data.units(*parts[index - 1]):
                    if unit not in here:
                        started[unit] = data.start_gather(builder, weights, place)
            builder.add(part.backward, part=name)
            for unit, weights in data.units(name, part):
                if name == "after" and data.is_shared(unit):
                    here.add(unit)
                    continue
                data.free(builder, weights)
                pending = data.reduce(
                    builder,
                    weights,
                    place,
                    pending,
                    is_first=variant.is_first,
                    is_last=variant.is_last,
                )
        data.end_reduce(builder, pending)
        return builder.segment()

    def _pipelined(self, place: int, index: int, of_batch: _Variant) -> Iterator[Done]:
        """The actions of one batch on a rank, in the order of the schedule's table."""
        assert self._pipeline is not None
        schedule = self._pipeline.schedule
        if self._table is None:
            is_lowered = any(a.kind not in COMPUTE_KINDS for row in schedule.actions for a in row)
            self._table = schedule if is_lowered else add_communication(schedule)
        made: set[int] = set()
        for action in self._table.actions[place]:
            for part in action.parts:
                variant = of_batch._replace(
                    stage=part.stage, has_gradients=not of_batch.is_first or part.stage in made
                )
                if part.kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                    made.add(part.stage)
                microbatch = -1
                if part.microbatch is not None:
                    microbatch = index * schedule.num_microbatches + part.microbatch
                segment = self._segment(part.kind, variant)
                yield Done(part.kind, part.stage, microbatch, segment)

    def _action(self, kind: str, variant: _Variant) -> Segment:
        """An action of a pipeline."""
        parts, data, builder = self._stages[variant.stage], self._data, Builder()
        has_gradients = variant.has_gradients
        if kind == FORWARD:
            for _, part in parts:
                builder.add(part.forward)
        elif kind == FULL_BACKWARD:
            for _, part in reversed(parts):
                builder.add(part.backward, adds_to_gradients=has_gradients and not data.is_fsdp)
                data.keep_gradients(builder, part, has_gradients)
        elif kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
            for _, part in reversed(parts):
                builder.add(_half(part, kind, has_gradients or data.is_fsdp))
                if kind == BACKWARD_WEIGHT:
                    data.keep_gradients(builder, part, has_gradients)
        elif kind in P2P:
            name = "send" if kind in (SEND_F, SEND_B) else "receive"
            place = Place("", FORWARD_PHASE if kind in (SEND_F, RECV_F) else BACKWARD_PHASE)
            assert self._pipeline is not None
            other = variant.stage + (1 if kind in (SEND_F, RECV_B) else -1)
            peer = self._pipeline.schedule.stage_to_rank[other]
            num_bytes = self._pieces.boundary_bytes
            builder.start(name, "pp", num_bytes, self._dims.pp, place, peer)
        elif kind == UNSHARD and data.is_fsdp:
            for name, part in parts:
                place = Place(name, FORWARD_PHASE)
                for _, weights in data.units(name, part):
                    number = data.start_gather(builder, weights, place)
                    data.finish_gather(builder, weights, number, place)
        elif kind == REDUCE_GRAD and data.is_fsdp:
            self._reduce_stage(builder, parts, variant)
        if kind in COMPUTE_KINDS:
            # Tensors of the model's own forward, and the gradient that is sent, end here.
            builder.free("temporary")
        return builder.segment()

    def _reduce_stage(self, builder: Builder, parts: Stage, variant: _Variant) -> None:
        pending = 0, 0
        for name, part in reversed(parts):
            place = Place(name, BACKWARD_PHASE)
            for _, weights in self._data.units(name, part):
                self._data.free(builder, weights)
                pending = self._data.reduce(
                    builder,
                    weights,
                    place,
                    pending,
                    is_first=variant.is_first,
                    is_last=variant.is_last,
                )
            builder.allocate("gradients", -self._data.whole_gradient_bytes(part))
        self._data.end_reduce(builder, pending)

    def _end(self, weights: list[Weight], exchanged: int, peer: int) -> Segment:
        """The gradient norm, clipping and the update, for these weights."""
        pieces = self._pieces
        traced = sum(w.shard_numel(pieces.num_shards) for w in pieces.end_weights if w.is_trained)
        own = sum(w.shard_numel(self._data.num_shards) for w in weights if w.is_trained)
        ratio = own / max(1, traced)
        events: list[Event] = []
        for event in self._in_world(pieces.end).events:
            if isinstance(event, Operator) and event.bytes_read > traced:
                event = replace(
                    event,
                    bytes_read=round(event.bytes_read * ratio),
                    bytes_written=round(event.bytes_written * ratio),
                )
            elif isinstance(event, Communication) and event.axis == "tp":
                partial = sum(w.numel * w.itemsize for w in weights if w.is_partial)
                event = replace(event, num_bytes=partial)
            if isinstance(event, Communication) and exchanged:
                # The gradients of a tied weight are summed over its two stages.
                for kind in ("send", "receive"):
                    place = Place("", "optimizer")
                    size = self._dims.pp
                    events.append(Communication(kind, "pp", exchanged, size, place, 0, peer))
                exchanged = 0
            events.append(event)
        return replace(pieces.end, events=tuple(events), net={})

    def _in_world(self, segment: Segment) -> Segment:
        """The segment with sums over the ranks of this job."""
        events = tuple(
            replace(event, num_ranks=self._dims.world_size)
            if isinstance(event, Communication) and event.axis == "world"
            else event
            for event in segment.events
        )
        return replace(segment, events=events)


def _half(part: Part, kind: str, has_gradients: bool) -> Segment:
    """The backward pass of a part up to its input (BACKWARD_INPUT), or of its weights.

    The products of weight gradients, which have a weight's shape, are left for the second half.
    Until it has run, PyTorch keeps the graph of the first half: its activations, and the gradients
    from which those of the weights are computed. Under activation checkpointing it recomputes in
    both halves; the recomputation is counted once.
    """
    whole = part.backward
    shapes = {weight.shape for weight in part.weights if len(weight.shape) == 2}
    shapes |= {shape[::-1] for shape in shapes}
    events: list[Event] = []
    read = 0
    for event in whole.events:
        is_later = (
            isinstance(event, Operator)
            and event.shape[1:3] in shapes
            and event.place.phase == BACKWARD_PHASE
        )
        if is_later == (kind == BACKWARD_WEIGHT):
            events.append(event)
        if is_later and isinstance(event, Operator):
            _, outputs, inputs, _ = event.shape
            read += event.bytes_read * outputs // (outputs + inputs)
    kept = whole.net.get("activations", 0)
    if kind == BACKWARD_WEIGHT:
        gradients = 0 if has_gradients else whole.net.get("gradients", 0)
        net = {"activations": kept - read, "gradients": gradients}
        return replace(whole, events=tuple(events), net=net, peak={})
    without = ("gradients", "activations")
    net = {name: num_bytes for name, num_bytes in whole.net.items() if name not in without}
    peak = {name: num_bytes for name, num_bytes in whole.peak.items() if name not in without}
    net["activations"] = read
    return replace(whole, events=tuple(events), net=net, peak=peak)
