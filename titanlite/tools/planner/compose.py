"""A step of a job of any size, put together from its pieces. No torch.

    ResolvedJob + Pieces -> compose -> a Composition for each stage of the pipeline

A step is a list of actions; actions that are alike share one segment (segments.py). Without a
pipeline an action is the forward and backward pass of a batch. With one, the schedule's table has
the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titanlite.config import ResolvedJob
from titanlite.schedule import Schedule
from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
)
from titanlite.schedule.generators import without_garbage_collection
from titanlite.tools.planner.composition import Pieces, Segment, Weight
from titanlite.tools.planner.data_parallel import ENDS
from titanlite.tools.planner.events import Communication, Operator, Peak, Site, totals
from titanlite.tools.planner.lower import add_communication
from titanlite.tools.planner.segments import BATCH, Row, Segments, Shared, Stage, Variant

START, HOLD, RELEASE, END = "start", "hold", "release", "end"


class Done(NamedTuple):
    """One action of a step: its kind, its stage and microbatch (-1 for none), and its segment.

    Microbatches are counted over all batches that the step accumulates.

    The kind is one of the schedule's, or START, BATCH, HOLD, RELEASE or END.
    """

    kind: str
    stage: int
    microbatch: int
    segment: Segment


@dataclass(frozen=True)
class Composition:
    """The step of one rank: the bytes that it holds before the step, and its actions in order.

    With CPU offload, `on_host` has the bytes of each category in the host's memory at its peak, and
    those before the step in `held_on_host`; else both are empty. `gaps` are the bytes that a GPU's
    allocator takes beyond the sum of each stream's own peak.
    """

    rank: int
    coordinates: dict[str, int]
    held: dict[str, int]
    actions: list[Done]
    held_on_host: dict[str, int] = field(default_factory=dict)
    on_host: dict[str, int] = field(default_factory=dict)
    is_on_gpu: bool = False
    gaps: int = 0

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, axis) -> (number of communications, total bytes)."""
        return totals(
            (event, times)
            for done, times in self.repeated()
            for event in done.segment.events
            if isinstance(event, Communication)
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of products in the step."""
        return sum(
            times * event.flops
            for done, times in self.repeated()
            for event in done.segment.events
            if isinstance(event, Operator)
        )

    def peak(self) -> Peak:
        """The peak of the step, with parameters and optimizer state, which are always there."""
        now: Counter[str] = Counter(self.held)
        total = most = now.total()
        best, where = dict(now), Site("", "")
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

    def below_zero(self) -> str:
        """The first action that frees more of a kind, or on a stream, than there is; else "".

        Then the pieces of the model do not fit together, and the peak may be too low.
        """
        now, of_streams = Counter(self.held), [sum(self.held.values()), 0, 0]
        for action in self.actions:
            now.update(action.segment.net)
            for stream, (net, _) in enumerate(action.segment.uses):
                of_streams[stream] += net
            if min(*now.values(), *of_streams) < 0:
                return f"{action.kind} of stage {action.stage}"
        return ""

    def reserved(self) -> int:
        """About the bytes that torch takes of the device: on a GPU, see Trace.reserved."""
        if not self.is_on_gpu:
            return self.peak().num_bytes
        now = [sum(self.held.values()), 0, 0]
        most = [*now]
        # A search asks this of millions of actions, of few segments.
        known: dict[int, list[tuple[int, int, int]]] = {}
        for action in self.actions:
            segment = action.segment
            uses = known.get(id(segment))
            if uses is None:
                uses = [(at, *use) for at, use in enumerate(segment.uses) if any(use)]
                known[id(segment)] = uses
            for at, net, more in uses:
                if now[at] + more > most[at]:
                    most[at] = now[at] + more
                now[at] += net
        return sum(most) + self.gaps

    def host_peak(self) -> Peak:
        """The peak of the host's memory, in the update; nothing without CPU offload."""
        return Peak(Site("", "optimizer"), self.on_host)

    def repeated(self) -> Iterator[tuple[Done, int]]:
        """An action of each segment, and how often it runs."""
        times = Counter(id(action.segment) for action in self.actions)
        by_id = {id(action.segment): action for action in self.actions}
        for key, count in times.items():
            yield by_id[key], count


def peaks(compositions: Sequence[Composition]) -> tuple[int, int]:
    """What the ranks take at most of a device's memory, and of the host's for one rank.

    The latter is 0 without CPU offload.
    """
    return (
        max(one.reserved() for one in compositions),
        max(one.host_peak().num_bytes for one in compositions),
    )


@without_garbage_collection()
def compose(
    resolved: ResolvedJob,
    pieces: Pieces,
    places: Sequence[int] | None = None,
    *,
    shared: Shared | None = None,
    is_quick: bool = False,
) -> list[Composition]:
    """The step of the first rank of each stage of the pipeline, or of those at `places` on pp.

    `shared` keeps segments for other jobs with the same pieces. If `is_quick`, segments with many
    equal blocks have no events, only their memory and what their time follows from.
    """
    composer = _Composer(resolved, pieces, shared or Shared(), is_quick=is_quick)
    return [composer.rank(place) for place in places or range(resolved.dims.pp)]


def parts_of(pieces: Pieces, names: Sequence[str] | None) -> Stage:
    """The parts of a stage with the modules `names`; of the whole model if that is None."""
    blocks = [
        (name, pieces.blocks[kind])
        for name, kind in zip(pieces.names, pieces.kinds, strict=True)
        if names is None or name in names
    ]
    outer = set(names or ()) - set(pieces.names)
    is_first = names is None or bool(outer & set(pieces.before_names))
    is_last = names is None or bool(outer & set(pieces.after_names))
    before, after = (pieces.before, pieces.after) if names is None else pieces.ends_apart
    first, last = [("before", before)], [("after", after)]
    return [*(first if is_first else []), *blocks, *(last if is_last else [])]


class _Composer:
    """Puts the actions of each rank in order."""

    def __init__(
        self, resolved: ResolvedJob, pieces: Pieces, shared: Shared, *, is_quick: bool
    ) -> None:
        self._resolved, self._pieces = resolved, pieces
        self._segments = segments = Segments(resolved, pieces, shared, is_quick=is_quick)
        self._dims, self._pipeline, self._data = resolved.dims, resolved.pipeline, segments.data
        self._stages = segments.stages
        self._start = Done(START, -1, -1, segments.start())
        self._known: dict[tuple[object, ...], tuple[dict[str, int], list[Weight], Segment]] = {}
        self._tables = shared.tables
        self._table: list[Row] = []
        if self._pipeline is not None:
            of = self._pipeline
            self._table = self._rows(of.schedule, is_from_file=of.is_from_file)

    def rank(self, place: int) -> Composition:
        """The step of the first rank at `place` of the pipeline."""
        dims, pipeline = self._dims, self._pipeline
        rank = dims.rank(pp=place)
        numbers = [0] if pipeline is None else pipeline.stages_of(place)
        for number in numbers:
            names = None if pipeline is None else pipeline.stages[number]
            self._stages[number] = parts_of(self._pieces, names)
        at_once = self._resolved.config.training.local_batch_size * dims.dp
        batches = self._resolved.global_batch_size // at_once
        actions = [self._start]
        for index in range(batches):
            is_first, is_last = index == 0, index == batches - 1
            if pipeline is None:
                segment = self._segments.of(BATCH, Variant(0, is_first, is_last))
                actions.append(Done(BATCH, 0, index, segment))
            else:
                actions += self._pipelined(place, index, is_first=is_first, is_last=is_last)
        held, weights, end = self._ends(numbers)
        actions.append(Done(END, -1, -1, end))
        coordinates = dims.coordinates(rank)
        on_gpu, gaps = self._data.is_on_gpu, self._gaps(numbers)
        if not self._data.is_offloaded:
            return Composition(rank, coordinates, held, actions, is_on_gpu=on_gpu, gaps=gaps)
        device, host, most = self._split(held, weights, batches)
        return Composition(rank, coordinates, device, actions, host, most, on_gpu, gaps)

    def _gaps(self, numbers: Sequence[int]) -> int:
        """The bytes in gaps of a rank with these stages."""
        if self._pipeline is None:
            return self._pieces.gaps
        first, middle, last = self._pieces.gaps_of_stages
        ends = {name for number in numbers for name, _ in self._stages[number] if name in ENDS}
        return max(middle, first if "before" in ends else 0, last if "after" in ends else 0)

    def _split(
        self, held: dict[str, int], weights: list[Weight], batches: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """What the device and the host hold of `held`, and what the host holds at its peak.

        That is in the update, or while the last gradient of a further batch is added.
        """
        sizes = [(self._data.shard_numel(w) * w.itemsize, w.is_trained) for w in weights]
        parameters = sum(size for size, _ in sizes)
        host = {"parameters": parameters, "optimizer state": held["optimizer state"]}
        device = {**held, "parameters": held["parameters"] - parameters, "optimizer state": 0}
        trained = [size for size, is_trained in sizes if is_trained]
        added = max(trained, default=0) if batches > 1 and self._dims.num_replicas == 1 else 0
        temporary = max(added, self._segments.update_bytes(weights))
        return device, host, {**host, "gradients": sum(trained), "temporary": temporary}

    def _ends(self, numbers: Sequence[int]) -> tuple[dict[str, int], list[Weight], Segment]:
        """What a rank with these stages holds before a step, its weights, and its update."""
        parts = tuple(id(part) for number in numbers for _, part in self._stages[number])
        last = 0 if self._pipeline is None else self._pipeline.schedule.num_stages - 1
        key = parts, len(numbers), 0 in numbers, last in numbers
        if key not in self._known:
            of_stages, exchanged = self._weights(numbers), self._exchanged(numbers)
            weights = [weight for of_stage in of_stages for weight in of_stage]
            peer = 0 if last in numbers else self._dims.pp - 1
            end = self._segments.end(of_stages, exchanged, peer)
            self._known[key] = self._held(weights, numbers), weights, end
        return self._known[key]

    # What a rank has

    def _weights(self, numbers: Sequence[int]) -> list[list[Weight]]:
        """The parameters of each of these stages; what embeddings and head share counts once."""
        known: set[str] = set()
        of_stages: list[list[Weight]] = []
        for number in numbers:
            of_stages.append([])
            for name, part in self._stages[number]:
                # Blocks of one kind have weights of one name.
                new = [w for w in part.weights if name not in ENDS or w.name not in known]
                of_stages[-1] += new
                known.update(weight.name for weight in new if name in ENDS)
        return of_stages

    def _exchanged(self, numbers: Sequence[int]) -> int:
        """The bytes of gradients of tied weights that a rank with these stages sends to another."""
        ends = {name for number in numbers for name, _ in self._stages[number] if name in ENDS}
        if self._pipeline is None or len(ends) != 1:
            return 0
        tied = self._pieces.tied
        return sum(self._data.shard_numel(w) * w.itemsize for w in tied if w.is_trained)

    def _held(self, weights: list[Weight], numbers: Sequence[int]) -> dict[str, int]:
        """The bytes of each category before a step."""
        pieces, numel = self._pieces, self._data.shard_numel
        parts = [part for number in numbers for _, part in self._stages[number]]
        buffers = len(numbers) * pieces.buffer_bytes + sum(part.buffer_bytes for part in parts)
        trained = [weight for weight in weights if weight.is_trained]
        held = {
            "parameters": buffers + sum(numel(w) * w.itemsize for w in weights),
            "optimizer state": sum(
                pieces.state_bytes_of(w, numel(w) * w.itemsize) for w in trained
            ),
        }
        if not self._data.is_fsdp and self._dims.num_replicas > 1:
            held["communication buffers"] = sum(w.numel * w.itemsize for w in trained)
        if self._pipeline is not None:
            # PyTorch's stages allocate a buffer for what each microbatch receives.
            schedule = self._pipeline.schedule
            received = sum((n > 0) + (n < schedule.num_stages - 1) for n in numbers)
            held["communication buffers"] = (
                received * schedule.num_microbatches * pieces.boundary_bytes
            )
        return held

    # Actions

    def _pipelined(
        self, place: int, index: int, *, is_first: bool, is_last: bool
    ) -> Iterator[Done]:
        """The actions of one batch on a rank, in the order of the schedule's table."""
        assert self._pipeline is not None
        schedule = self._pipeline.schedule
        before = index * schedule.num_microbatches
        held = sent = num_outputs = 0
        output_bytes = self._segments.kept_output_bytes
        # A stage that is alone on its rank holds its newest output, and the gradient that it sent.
        alone = -1 if self._segments.is_runtime else place
        last_stage, holds_saved = schedule.num_stages - 1, False
        newest: int | None = None
        made: Counter[int] = Counter()
        # The stages whose weights are gathered.
        whole: set[int] = set()
        known: dict[tuple[str, int, int, bool, bool], Segment] = {}
        for kind, stage, microbatch in self._table[place]:
            # FSDP2 has reduced the whole gradients of the batch before.
            num_gradients = made[stage] or not (is_first or self._data.is_fsdp)
            if kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                made[stage] = min(made[stage] + 1, 2 if self._data.sums_apart else 1)
            regathers = self._data.regathers
            # A pass of a stage that keeps its weights gathers none.
            is_gathered = stage in whole or (kind in COMPUTE_KINDS and not regathers)
            # Only PyTorch's runtime gathers a stage before its first action needs it.
            is_early = regathers and not self._segments.is_runtime
            is_done = is_gathered or is_early if kind == UNSHARD else not is_gathered
            if kind in (UNSHARD, RESHARD) and is_done:
                continue
            if kind == UNSHARD or (kind == FULL_BACKWARD and regathers):
                whole.add(stage)
            elif kind in (RESHARD, REDUCE_GRAD) or (kind == FORWARD and regathers):
                whole.discard(stage)
            holds = False
            if stage == alone == last_stage and kind == FORWARD:
                holds, holds_saved, newest = holds_saved, False, microbatch
            elif stage == alone == last_stage and kind == FULL_BACKWARD:
                holds = holds_saved = microbatch == newest
            of_output = stage == last_stage and output_bytes > 0
            if of_output and kind in (FULL_BACKWARD, BACKWARD_INPUT):
                # It lets go of the output of the backward pass before.
                if (freed := held - num_outputs * output_bytes) > 0:
                    held -= freed
                    yield Done(HOLD, -1, -1, self._segments.hold(-freed))
                num_outputs -= 1
            key = kind, stage, num_gradients, is_gathered, holds
            segment = known.get(key)
            if segment is None:
                variant = Variant(stage, is_first, is_last, num_gradients, is_gathered, holds)
                segment = known[key] = self._segments.of(kind, variant)
            number = -1 if microbatch is None else before + microbatch
            yield Done(kind, stage, number, segment)
            if of_output and kind == FORWARD:
                num_outputs += 1
                if (more := num_outputs * output_bytes - held) > 0:
                    held += more
                    yield Done(HOLD, -1, -1, self._segments.hold(more))
            if kind == SEND_B and stage == alone and not sent:
                sent = self._pieces.boundary_bytes
                yield Done(HOLD, -1, -1, self._segments.hold(sent))
        kinds = [kind for kind, _, _ in self._table[place] if self._segments.is_runtime]
        num_sent = kinds.count(SEND_F), kinds.count(SEND_B)
        held += sent + holds_saved * self._pieces.saved_output_bytes
        if held or any(num_sent):
            yield Done(RELEASE, -1, -1, self._segments.hold(-held, num_sent))

    def _rows(self, schedule: Schedule, *, is_from_file: bool) -> list[Row]:
        """The actions of each rank, with those that communicate."""
        key = schedule.name, schedule.num_microbatches, schedule.stage_to_rank
        rows = None if is_from_file else self._tables.get(key)
        if rows is None:
            is_lowered = any(a.kind not in COMPUTE_KINDS for row in schedule.actions for a in row)
            table = schedule if is_lowered else add_communication(schedule)
            rows = [
                [
                    (part.kind, part.stage, part.microbatch)
                    for action in row
                    for part in action.parts
                ]
                for row in table.actions
            ]
            if not is_from_file:
                self._tables[key] = rows
        return rows
