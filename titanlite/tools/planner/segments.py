"""The segments of a step: the forward and backward passes of stages and batches, and the update.

compose.py puts them in order. Segments that are alike are made once, and those that all jobs with
the same pieces share can be kept from one job to the next. No torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from titanlite.config import ResolvedJob
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.schedule import actions
from titanlite.tools.planner.composition import NOTHING, Builder, ModelPart, Pieces, Segment, Weight
from titanlite.tools.planner.data_parallel import BUFFERS, ENDS, PendingReduction, Replication
from titanlite.tools.planner.events import Communication, Event, Operator, Site
from titanlite.tools.planner.muon import MuonUpdate
from titanlite.tools.planner.split_backward import BACKWARD_PHASE, half_of

FORWARD_PHASE = "forward"
BATCH = "batch"
FUSED = ("aten::_fused_adamw_", "aten::_fused_adam_")
P2P = (actions.SEND_F, actions.RECV_F, actions.SEND_B, actions.RECV_B)
Stage = list[tuple[str, ModelPart]]
"""The parts of a stage in the order of the forward pass, by name."""

Row = list[tuple[str, int, int | None]]
"""(kind, stage, microbatch) of each action of a rank of a pipeline."""

# Equal blocks of a batch from which on the time of each further one is the same.
FEW_BLOCKS = 5


@dataclass
class Shared:
    """What jobs with the same pieces, number of ranks and hardware share: segments and their times.

    `times` is filled by predict.py, by the `id` of a segment, or by what a message is. All that are
    timed are in `segments`: a new one could have the `id` of one that is gone. `tables` has the
    actions of generated schedules, by name, number of microbatches and the ranks of the stages; all
    jobs can share them.
    """

    segments: dict[tuple[Any, ...], Segment] = field(default_factory=dict)
    times: dict[Any, Any] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], list[Row]] = field(default_factory=dict)


class Variant(NamedTuple):
    """What actions of a kind differ in: they are alike if this is equal.

    `is_first` and `is_last`: of the batches that a step accumulates. `num_gradients`: how many
    earlier microbatches have left gradients, as far as that matters. `is_gathered`: the weights of
    the stage are whole before it. `holds_output`: the stage holds the output that this backward
    pass needs beyond it, or, in a forward pass, that of the microbatch before, until it has the
    next one.
    """

    stage: int
    is_first: bool
    is_last: bool
    num_gradients: int = 0
    is_gathered: bool = True
    holds_output: bool = False


class Segments:
    """Makes the segments of a job; those that are alike are made once.

    If `is_quick`, the segment of a batch with many equal blocks has no events: only its memory and,
    in `fewer`, segments with less blocks from which its time follows.
    """

    def __init__(
        self, resolved: ResolvedJob, pieces: Pieces, shared: Shared, *, is_quick: bool = False
    ) -> None:
        self._pieces, self._dims, self._pipeline = pieces, resolved.dims, resolved.pipeline
        self.data = Replication(resolved, pieces)
        self._muon = MuonUpdate(resolved, self.data)
        of = resolved.pipeline
        size = resolved.config.training.local_batch_size if of is None else of.microbatch_size
        self._num_microbatches = resolved.global_batch_size // (resolved.dims.dp * size)
        self.stages: dict[int, Stage] = {}
        axes = self.data.token_axes if FLOAT8.is_on(resolved.config) else ()
        self._token_axes: tuple[tuple[str, int], ...] = axes
        self._shared, self._is_quick = shared.segments, is_quick
        # PyTorch's runtime waits for sends at the end. Its stage of several keeps an output until
        # its backward pass, and that of a single stage until the next backward pass.
        self.is_runtime = self.data.is_runtime
        self.kept_output_bytes = 0 if self.is_runtime else pieces.output_bytes
        self._known: dict[tuple[Any, ...], Segment] = {}
        self._stage_keys: dict[int, tuple[int, ...]] = {}

    def of(self, kind: str, variant: Variant) -> Segment:
        """The segment of an action, or of a BATCH."""
        if kind in P2P:
            # Stages send to others.
            key: tuple[Any, ...] = (kind, variant.stage)
            if key not in self._known:
                self._known[key] = self._message(kind, variant.stage)
            return self._known[key]
        stage = variant.stage
        if stage == 0 and kind == actions.BACKWARD_INPUT:
            return NOTHING
        if stage == 0 and kind == actions.BACKWARD_WEIGHT:
            # The first stage sends no gradient; PyTorch runs its whole backward pass then.
            kind = actions.FULL_BACKWARD
        parts = self._stage_keys.get(stage)
        if parts is None:
            # Stages of the same parts are alike.
            parts = self._stage_keys[stage] = tuple(id(part) for _, part in self.stages[stage])
        boundaries = self._boundaries(kind, stage)
        gathers = kind in (actions.UNSHARD, actions.RESHARD, actions.REDUCE_GRAD, BATCH)
        communicates = gathers or self.data.regathers
        reduces = self.data.key if communicates else self.data.is_fsdp
        key = (kind, parts, variant[1:], reduces, boundaries, self._is_quick)
        key = *key, self._token_axes, self.is_runtime, self.data.sums_apart
        if key not in self._shared:
            make = self._batch if kind == BATCH else self._action
            self._shared[key] = make(kind, variant)
        return self._shared[key]

    def _batch(self, _: str, variant: Variant) -> Segment:
        """The forward and backward pass of one batch, without a pipeline."""
        parts = self.stages[0]
        short = shortened(parts) if self._is_quick else None
        if short is None:
            return self._whole(parts, variant, Builder(self._token_axes))
        fewer, more, times = short
        whole = self._whole(parts, variant, Builder(keeps_events=False))
        shorter, longer = (
            self._whole(one, variant, Builder(self._token_axes)) for one in (fewer, more)
        )
        return replace(whole, fewer=(shorter, longer, times))

    def _whole(self, parts: Stage, variant: Variant, builder: Builder) -> Segment:
        data = self.data
        if not data.is_fsdp:
            buckets = data.buckets(parts) if variant.is_last else {}
            for index in range(len(parts)):
                self._add_forward(builder, parts, index)
            for name, part in reversed(parts):
                builder.add(part.backward if variant.is_first else part.backward_again, part=name)
                for num_bytes in buckets.get(name, ()):
                    data.all_reduce_bucket(builder, num_bytes, Site(name, BACKWARD_PHASE))
            return self._ended(builder, parts)
        here: set[str] = set()
        self._gathered_forward(builder, parts, here)
        started: dict[str, tuple[int, ...]] = {}
        pending = PendingReduction()
        reduce = functools.partial(
            data.reduce, builder, is_first=variant.is_first, is_last=variant.is_last
        )

        def end(name: str, unit: str, weights: tuple[Weight, ...]) -> None:
            nonlocal pending
            if name == "after" and data.is_shared(unit):
                here.add(unit)
                return
            data.free(builder, weights)
            pending = reduce(weights, Site(name, BACKWARD_PHASE), pending)

        for index in reversed(range(len(parts))):
            self._gathered_backward(builder, parts, index, here, started, end)
        data.end_reduce(builder, pending)
        data.free_deferred(builder)
        return self._ended(builder, parts)

    def _ended(self, builder: Builder, parts: Stage) -> Segment:
        """The segment of a batch, which nothing that its parts left outlives."""
        for category in ("temporary", BUFFERS):
            nets = (half.net for _, part in parts for half in (part.forward, part.backward))
            builder.allocate(category, -sum(net.get(category, 0) for net in nets))
        return builder.segment()

    def _add_forward(self, builder: Builder, parts: Stage, index: int) -> None:
        """The forward pass of a part."""
        name, part = parts[index]
        builder.add(part.forward, part=name)
        if self._pieces.keeps_embeddings and parts[0][0] == "before":
            blocks = [at for at, (other, _) in enumerate(parts) if other not in ENDS]
            # The first block has freed its input.
            kept = (index == blocks[0]) - (index == blocks[-1]) if blocks else 0
            builder.allocate("temporary", kept * self._pieces.boundary_bytes)

    def _gathered_forward(self, builder: Builder, parts: Stage, here: set[str]) -> None:
        """A forward pass that gathers the units which are not `here`, and updates `here`."""
        data = self.data
        last_block = next((name for name, _ in reversed(parts) if name not in ENDS), "")
        has_head = parts[-1][0] == "after"
        for index, (name, part) in enumerate(parts):
            place = Site(name, FORWARD_PHASE)
            for unit, weights in data.units(name, part):
                if unit not in here:
                    numbers = data.start_gather(builder, weights, place)
                    data.finish_gather(builder, weights, numbers, place, defers=True)
                    here.add(unit)
            self._add_forward(builder, parts, index)
            if data.frees(is_needed_first=name in ("after", last_block)):
                for unit, weights in data.units(name, part):
                    if not (name == "before" and has_head and data.is_shared(unit)):
                        data.free(builder, weights)
                        here.discard(unit)
        data.free_deferred(builder)

    def _gathered_backward(
        self,
        builder: Builder,
        parts: Stage,
        index: int,
        here: set[str],
        started: dict[str, tuple[int, ...]],
        end: Callable[[str, str, tuple[Weight, ...]], None] = lambda *_: None,
    ) -> None:
        """The backward pass of a part, with gathers of the units that are not `here`.

        FSDP2 starts the gather of a unit as the backward pass of the one after it begins: `started`
        has the numbers. Experts are a unit inside their block. `end` is called with each unit whose
        gradients are complete.
        """
        name, part = parts[index]
        place, data = Site(name, BACKWARD_PHASE), self.data
        units = list(data.units(name, part))

        def start(units: Iterable[tuple[str, tuple[Weight, ...]]]) -> None:
            for unit, weights in units:
                if unit not in here:
                    started[unit] = data.start_gather(builder, weights, place)

        def finish(units: Iterable[tuple[str, tuple[Weight, ...]]], defers: bool = False) -> None:
            for unit, weights in units:
                if unit not in here:
                    numbers = started.get(unit) or data.start_gather(builder, weights, place)
                    data.finish_gather(builder, weights, numbers, place, defers=defers)

        before: list[tuple[str, tuple[Weight, ...]]] = []
        if index:
            of_former, former = parts[index - 1]
            before = list(data.units(of_former, former))[: 1 if former.around_experts else None]
        if not part.around_experts:
            finish(units)
            start(before)
            builder.add(part.backward, part=name)
            for unit in data.reduced_units(name, part):
                end(name, *unit)
            return
        outer, experts = units[:1], units[1:]
        finish(outer)
        start(experts)
        shift = builder.reserve(part.backward)
        until, recomputed, own, rest = part.around_experts
        builder.add(until, part=name, shift=shift)
        finish(experts, defers=bool(recomputed.events))
        builder.add(recomputed, part=name, shift=shift)
        start(before)
        builder.add(own, part=name, shift=shift)
        for unit in experts:
            end(name, *unit)
        builder.add(rest, part=name, shift=shift)
        end(name, *outer[0])

    def _action(self, kind: str, variant: Variant) -> Segment:
        parts, data = self.stages[variant.stage], self.data
        if kind == actions.FULL_BACKWARD:
            # PyTorch's stage holds its output while the backward pass runs.
            parts = [(name, part.holding if name == "after" else part) for name, part in parts]
        builder = Builder(self._token_axes)
        earlier = variant.num_gradients
        held = self._pieces.saved_output_bytes if variant.holds_output else 0
        here: set[str] = set()
        if variant.is_gathered:
            here.update(unit for name, part in parts for unit, _ in data.units(name, part))
        if kind == actions.FORWARD and data.regathers:
            self._gathered_forward(builder, parts, here)
        elif kind == actions.FORWARD:
            for index in range(len(parts)):
                self._add_forward(builder, parts, index)
        elif kind == actions.FULL_BACKWARD:
            if parts[-1][0] != "after":
                # What a part frees of the one after it, which is in another stage.
                for category in ("temporary", BUFFERS):
                    freed = -self._pieces.before.backward.net.get(category, 0)
                    builder.allocate(category, max(0, freed))
            started: dict[str, tuple[int, ...]] = {}
            for index, (name, part) in reversed(list(enumerate(parts))):
                if data.is_fsdp:
                    self._gathered_backward(builder, parts, index, here, started)
                else:
                    builder.add(part.backward_again if earlier else part.backward)
                data.keep_gradients(builder, part, Site(name, BACKWARD_PHASE), earlier)
                if name == "after":
                    builder.allocate("temporary", self._pieces.saved_output_bytes)
        elif kind in (actions.BACKWARD_INPUT, actions.BACKWARD_WEIGHT):
            for name, part in reversed(parts):
                builder.add(self._half_of(part, kind, bool(earlier) or data.is_fsdp))
                if kind == actions.BACKWARD_WEIGHT:
                    data.keep_gradients(builder, part, Site(name, BACKWARD_PHASE), earlier)
        elif kind == actions.UNSHARD and data.is_fsdp:
            for name, part in parts:
                place = Site(name, FORWARD_PHASE)
                for _, weights in data.units(name, part):
                    numbers = data.start_gather(builder, weights, place)
                    # Without PyTorch's runtime, the first forward pass gathers.
                    data.finish_gather(builder, weights, numbers, place, defers=not self.is_runtime)
            data.free_deferred(builder)
        elif kind == actions.RESHARD and data.is_fsdp:
            for name, part in parts:
                for _, weights in data.units(name, part):
                    data.free(builder, weights)
        elif kind == actions.REDUCE_GRAD and data.is_fsdp:
            self._reduce_stage(builder, parts, variant)
        if kind in actions.COMPUTE_KINDS:
            # Tensors of the model's own forward, and the gradient that is sent, end here.
            for category in ("temporary", BUFFERS):
                builder.free(category)
            if self.is_runtime and parts[-1][0] == "after" and kind != actions.BACKWARD_INPUT:
                sign = 1 if kind == actions.FORWARD else -1
                builder.allocate("temporary", sign * self._pieces.output_bytes)
            builder.allocate("temporary", -held if kind == actions.FORWARD else held)
        if boundaries := self._boundaries(kind, variant.stage):
            builder.allocate("activations", boundaries * self._pieces.boundary_bytes)
        return builder.segment()

    def _half_of(self, part: ModelPart, kind: str, has_gradients: bool) -> Segment:
        """Half of the backward pass of a part; made once for all jobs with these pieces."""
        of_weights = self.data.computed_gradient_bytes(part)
        key = "half", id(part), kind, of_weights, has_gradients
        if key not in self._shared:
            boundary = self._pieces.boundary_bytes
            self._shared[key] = half_of(
                part, kind, boundary, of_weights, has_gradients=has_gradients
            )
        return self._shared[key]

    def _message(self, kind: str, stage: int) -> Segment:
        """A message between two stages."""
        assert self._pipeline is not None
        name = "send" if kind in (actions.SEND_F, actions.SEND_B) else "receive"
        place = Site(
            "", FORWARD_PHASE if kind in (actions.SEND_F, actions.RECV_F) else BACKWARD_PHASE
        )
        other = stage + (1 if kind in (actions.SEND_F, actions.RECV_B) else -1)
        peer = self._pipeline.schedule.stage_to_rank[other]
        builder = Builder()
        builder.start(name, "pp", self._pieces.boundary_bytes, self._dims.pp, place, peer)
        if kind == actions.SEND_B and self.is_runtime:
            builder.allocate(BUFFERS, self._pieces.boundary_bytes)
        return builder.segment()

    def hold(self, output_bytes: int, num_sent: tuple[int, int] = (0, 0)) -> Segment:
        """The model's output stays there beyond its action in a pipeline.

        A negative number frees it; `num_sent` outputs and gradients that were sent are freed.
        """
        key = "hold", output_bytes, num_sent
        if key not in self._shared:
            builder = Builder()
            builder.allocate("temporary", output_bytes)
            for category, number in zip(("activations", BUFFERS), num_sent, strict=True):
                builder.allocate(category, -number * self._pieces.boundary_bytes)
            self._shared[key] = builder.segment()
        return self._shared[key]

    def _boundaries(self, kind: str, stage: int) -> int:
        """How many activations between stages an action leaves beside those of its parts.

        The parts of a model free their input after one of their passes. A stage keeps its input,
        which is in a buffer, and frees its output: then, or what was sent at the end of the batch.
        An output that stays on the rank takes the place of the next stage's buffer.
        """
        if self._pipeline is None:
            return 0
        ranks = self._pipeline.schedule.stage_to_rank
        is_last = stage + 1 == len(ranks)
        is_local = not is_last and ranks[stage] == ranks[stage + 1]
        parts = self.stages[stage]
        frees_input = parts[0][1].frees_input
        if kind == actions.FORWARD:
            # With more stages than blocks, norm and head can be apart; their piece gives logits.
            is_norm = parts[-1][0] == "after" and not is_last
            return (stage > 0 and frees_input) - is_local + is_norm
        if kind == actions.BACKWARD_INPUT:
            # The gradient of its output, which it keeps for the weights, is in a buffer.
            return -(not is_last)
        if kind not in (actions.FULL_BACKWARD, actions.BACKWARD_WEIGHT):
            return 0
        frees_output = not (is_last or is_local or self.is_runtime)
        had_gradient = kind == actions.BACKWARD_WEIGHT and not is_last
        return (stage > 0 and not frees_input) - frees_output + had_gradient

    def _reduce_stage(self, builder: Builder, parts: Stage, variant: Variant) -> None:
        pending = PendingReduction()
        reduce = functools.partial(
            self.data.reduce, builder, is_first=variant.is_first, is_last=variant.is_last
        )
        # PyTorch's stage goes through the units as the model has them, the root's first.
        is_of_root = [any(map(self.data.is_shared, part.units)) for _, part in parts]
        for at in sorted(range(len(parts)), key=lambda at: not is_of_root[at]):
            name, part = parts[at]
            place = Site(name, BACKWARD_PHASE)
            for _, weights in self.data.units(name, part):
                if variant.is_gathered:
                    self.data.free(builder, weights)
                pending = reduce(weights, place, pending)
            builder.allocate("gradients", -self.data.whole_gradient_bytes(part))
        self.data.end_reduce(builder, pending)

    def update_bytes(self, weights: list[Weight]) -> int:
        """What the update of these weights allocates at most."""
        own, traced = self._updated(weights)
        return round(self._pieces.end.peak_bytes * own / max(1, traced))

    def _updated(self, weights: list[Weight]) -> tuple[int, int]:
        """The elements that are updated: of these weights, and of those that were traced."""
        pieces = self._pieces
        traced = sum(
            w.shard_numel(pieces.num_expert_shards if w.is_expert else pieces.num_shards)
            for w in pieces.end_weights
            if w.is_trained
        )
        return sum(self.data.shard_numel(w) for w in weights if w.is_trained), traced

    def end(self, of_stages: Sequence[Sequence[Weight]], exchanged: int, peer: int) -> Segment:
        """The gradient norm, clipping and the update, for the weights of these stages."""
        weights = [weight for of_stage in of_stages for weight in of_stage]
        pieces = self._pieces
        own, traced = self._updated(weights)
        partial = sum(w.numel * w.itemsize for w in weights if w.is_partial)
        names = tuple(tuple(w.name for w in of_stage) for of_stage in of_stages)
        in_advance = (names, self.data.key) if pieces.casts else ()
        is_offloaded = self.data.is_offloaded
        muon = self._muon.key(weights)
        key = ("end", own, partial, exchanged, peer, self._dims.pp, is_offloaded, in_advance, muon)
        if key in self._shared:
            return self._shared[key]
        ratio = own / max(1, traced)
        of_adamw = self._updated([w for w in weights if not w.matrices])[0] / max(1, traced)
        events: list[Event] = []
        for event in self.in_world(pieces.end).events:
            if isinstance(event, Operator) and event.bytes_read > traced:
                share = of_adamw if event.name in FUSED else ratio
                event = replace(
                    event,
                    bytes_read=round(event.bytes_read * share),
                    bytes_written=round(event.bytes_written * share),
                )
            elif isinstance(event, Communication) and event.axis == "tp":
                event = replace(event, num_bytes=partial)
            if isinstance(event, Communication) and exchanged:
                # The gradients of a tied weight are summed over its two stages.
                for kind in ("send", "receive"):
                    place = Site("", "optimizer")
                    size = self._dims.pp
                    events.append(Communication(kind, "pp", exchanged, size, place, 0, peer))
                exchanged = 0
            events.append(event)
        for of_stage in of_stages:
            events += self.data.amaxes_in_advance(of_stage)
        if is_offloaded:
            events = [replace(e, is_on_host=True) if isinstance(e, Operator) else e for e in events]
        events += self._muon.events(weights)
        if is_offloaded:
            # What it allocates is on the host: compose.py.
            self._shared[key] = Segment(tuple(events), {}, {}, pieces.end.peak_place)
        else:
            self._shared[key] = replace(pieces.end, events=tuple(events), net={})
        return self._shared[key]

    def start(self) -> Segment:
        """What a step does first; then it has the samples of all its microbatches."""
        key = "start", self._num_microbatches
        if key not in self._shared:
            builder = Builder()
            builder.add(self.in_world(self._pieces.start))
            samples = self._pieces.start.net.get("activations", 0)
            builder.allocate("activations", (self._num_microbatches - 1) * samples)
            self._shared[key] = builder.segment()
        return self._shared[key]

    def in_world(self, segment: Segment) -> Segment:
        """The segment with sums over the ranks of this job, and of all its experts."""
        counts, whole_counts = self._pieces.balance_bytes
        events: list[Event] = []
        for event in segment.events:
            if isinstance(event, Communication) and event.axis == "world":
                size = whole_counts if event.num_bytes == counts else event.num_bytes
                event = replace(event, num_ranks=self._dims.world_size, num_bytes=size)
            events.append(event)
        return replace(segment, events=tuple(events))


def shortened(parts: Stage) -> tuple[Stage, Stage, int] | None:
    """The parts with FEW_BLOCKS - 1 and with FEW_BLOCKS of the longest run of equal ones.

    Also how many are left out of the latter. None if no run is that long.
    """
    start = best = longest = 0
    for index, (_, part) in enumerate(parts):
        if part is not parts[start][1]:
            start = index
        if index + 1 - start > longest:
            best, longest = start, index + 1 - start
    if longest <= FEW_BLOCKS:
        return None
    after = parts[best + longest :]
    return (
        [*parts[: best + FEW_BLOCKS - 1], *after],
        [*parts[: best + FEW_BLOCKS], *after],
        longest - FEW_BLOCKS,
    )
