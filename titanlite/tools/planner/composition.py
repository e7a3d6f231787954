"""The pieces of a step as plain data, and the memory that a run of events takes. No torch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from titanlite.config import ResolvedJob, resolve_job
from titanlite.config.load import override
from titanlite.config.model import num_experts
from titanlite.errors import TitanliteError
from titanlite.mesh.parallel_dims import ParallelDims, expert_shard_dim
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.tools.planner.events import Allocation, Communication, Event, Operator, Site, Wait

NOWHERE = Site("", "")
MAIN, GATHER, REDUCE = range(3)
"""The streams that allocate: on a GPU, FSDP2 gathers and reduces on streams of their own."""
Uses = tuple[tuple[int, int], ...]
"""Of each stream: the bytes that it is left with, and those at its most."""
TOKENS = "tokens"
"""In pieces, the axes over which the tokens of a microbatch are spread: those of data parallelism,
which are others in a composed job."""
TIED = "tied"
"""The unit of the head's copies of what it shares with the embeddings, without FSDP."""


class TraceError(TitanliteError):
    """A job cannot be traced: its model's own code fails on tensors without values."""


@dataclass(frozen=True)
class Segment:
    """Events that follow each other, and the memory that they take.

    `net` has the bytes of each category that they leave allocated (negative: that they free), and
    `peak` those that are allocated at their most, both compared with their start.
    """

    events: tuple[Event, ...]
    net: Mapping[str, int]
    peak: Mapping[str, int]
    peak_place: Site = NOWHERE
    streams: Uses = ()
    """Of MAIN, GATHER and REDUCE; empty if all is the main stream's."""
    parts: tuple[tuple[int, int, str], ...] = ()
    """(index of the first event, of the one after the last, name) of each named part."""
    fewer: tuple[Segment, Segment, int] | None = None
    """If there are no events: two segments, the second with one block more, and how many more
    blocks than that this one has. Its time follows from theirs."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def uses(self) -> Uses:
        """Of each stream that allocates, MAIN first."""
        return self.streams or ((sum(self.net.values()), self.peak_bytes),)


NOTHING = Segment((), {}, {})


class Builder:
    """Puts segments together, and adds communication and memory between them.

    `token_axes` are the axes that TOKENS stands for, each with its number of ranks.
    """

    def __init__(
        self, token_axes: Sequence[tuple[str, int]] = (), *, keeps_events: bool = True
    ) -> None:
        self.events: list[Event] = []
        self._token_axes = token_axes
        self._keeps_events = keeps_events
        self.ready = -1
        """How many events precede the earliest start of FSDP's next all-gather; -1: all."""
        self.copied_out = -1
        """How many events there were when the last gathered unit had been copied out."""
        self.deferred = 0
        """The bytes of a buffer that has been copied out, and is freed after the next one."""
        self._parts: list[tuple[int, int, str]] = []
        self._now: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        self._peak_place = NOWHERE
        self._total = self._most = self._number = 0
        self._of_stream, self._most_of_stream = [0, 0, 0], [0, 0, 0]

    def reserve(self, segment: Segment) -> int:
        """Numbers for the communications of a segment that is added in pieces: their `shift`."""
        shift = self._number
        self._number += max((getattr(event, "number", 0) for event in segment.events), default=0)
        return shift

    def add(self, segment: Segment, *, part: str = "", shift: int | None = None) -> None:
        """Append a segment; its communications get new numbers, or their own and `shift`.

        `part` is the name of its part of the model: all blocks of a kind share a segment.
        """
        if self._total + segment.peak_bytes > self._most:
            self._most = self._total + segment.peak_bytes
            self._peak = dict(self._now)
            for name, num_bytes in segment.peak.items():
                self._peak[name] = self._now[name] + num_bytes
            self._peak_place = named(segment.peak_place, part)
        for stream, (net, most) in enumerate(segment.uses):
            self._use(stream, net, most)
        for name, num_bytes in segment.net.items():
            self._now[name] += num_bytes
            self._total += num_bytes
        if not self._keeps_events:
            return
        start, shift = len(self.events), self._number if shift is None else shift
        for event in segment.events:
            if isinstance(event, Communication):
                event = event.renumbered(event.number + shift)
                self._number = max(self._number, event.number)
                if event.axis == TOKENS:
                    # One after the other; without a number, each is waited for at once.
                    self.events += [
                        replace(event, axis=axis, num_ranks=num_ranks, number=0)
                        for axis, num_ranks in self._token_axes
                    ]
                    continue
            elif isinstance(event, Wait):
                event = Wait(event.number + shift)
            self.events.append(event)
        if part:
            self._parts.append((start, len(self.events), part))

    def operator(
        self, name: str, num_bytes: int, dtype: str, place: Site, *, is_beside: bool = False
    ) -> None:
        """Append an operator that reads and writes `num_bytes`."""
        self.events.append(
            Operator(name, 0, num_bytes, num_bytes, place, dtype, is_beside=is_beside)
        )

    def start(
        self,
        kind: str,
        axis: str,
        num_bytes: int,
        num_ranks: int,
        place: Site,
        peer: int = -1,
        ready: int = -1,
        after: tuple[int, ...] = (),
    ) -> int:
        """Append a communication; returns its number, for `wait`."""
        self._number += 1
        self.events.append(
            Communication(kind, axis, num_bytes, num_ranks, place, self._number, peer, ready, after)
        )
        return self._number

    def wait(self, number: int) -> None:
        self.events.append(Wait(number))

    def allocate(
        self, category: str, num_bytes: int, place: Site = NOWHERE, stream: int = MAIN
    ) -> None:
        """Add to what is allocated on a stream; a negative number frees."""
        self._now[category] += num_bytes
        self._total += num_bytes
        self._use(stream, num_bytes, num_bytes)
        if self._total > self._most:
            self._most, self._peak = self._total, dict(self._now)
            self._peak_place = place

    def _use(self, stream: int, net: int, most: int) -> None:
        """A stream has `most` bytes more for a while, and `net` from now on."""
        most += self._of_stream[stream]
        self._most_of_stream[stream] = max(self._most_of_stream[stream], most)
        self._of_stream[stream] += net

    def free(self, category: str) -> None:
        self.allocate(category, -self._now[category])

    def segment(self) -> Segment:
        net = {name: num_bytes for name, num_bytes in self._now.items() if num_bytes}
        peak = {name: num_bytes for name, num_bytes in self._peak.items() if num_bytes}
        events = tuple(self.events) if self._keeps_events else ()
        uses = tuple(zip(self._of_stream, self._most_of_stream, strict=True))
        streams = uses if any(map(any, uses[1:])) else ()
        return Segment(events, net, peak, self._peak_place, streams, tuple(self._parts))


def named(place: Site, part: str) -> Site:
    """A place in a block of the same kind, moved to the block `part`; others stay."""
    own, traced = part.split("."), place.module.split(".")
    if len(own) == 1 or len(traced) < len(own) or traced[: len(own) - 1] != own[:-1]:
        return place
    return place._replace(module=".".join([part, *traced[len(own) :]]))


def segment_of(
    events: Iterable[Event], category_of: Mapping[int, str], sizes: dict[int, int]
) -> Segment:
    """The segment of traced events; `sizes` has the size of each block, and is updated."""
    builder = Builder()
    for event in events:
        if isinstance(event, Allocation):
            change = event.num_bytes - sizes.get(event.block, 0)
            sizes[event.block] = event.num_bytes
            builder.allocate(category_of[event.block], change, event.place)
        else:
            builder.events.append(event)
    return builder.segment()


class Weight(NamedTuple):
    """One parameter of a part: its shape on a rank before FSDP shards dimension 0."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_partial: bool = False
    """Whether its gradient is summed over the tp axis after the backward pass, not by FSDP2."""
    is_expert: bool = False
    """Whether it is of experts that FSDP2 shards over a mesh of their own."""
    matrices: str = ""
    """What Muon orthogonalizes: "matrix" or "stack"; "" for AdamW's."""
    tp_dim: int | None = None
    """The dimension that the tp axis cuts."""

    # Weights are values, and a model has few different ones.
    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def shard_numel(self, num_shards: int) -> int:
        """The elements of the first shard, which is the largest."""
        if self.is_expert and expert_shard_dim(self.shape[0], num_shards):
            return self.numel // num_shards
        rows, *rest = self.shape or (1,)
        return -(-rows // num_shards) * math.prod(rest)

    def padded_numel(self, num_shards: int) -> int:
        """The elements of the gathered parameter; FSDP2 pads dimension 0 to equal shards."""
        return self.shard_numel(num_shards) * num_shards

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelPart:
    """A part of the model that computes as a whole: a block, or what is before or after them.

    `weights` has the parameters of each FSDP unit that the part computes with.
    """

    forward: Segment
    backward: Segment
    units: Mapping[str, tuple[Weight, ...]]
    buffer_bytes: int
    late_bytes: int = 0
    """The most temporary bytes after the last product of the backward pass."""
    frees_input: bool = False
    """Whether its forward pass frees its input; else the backward pass does."""
    peak_again: Mapping[str, int] = field(default_factory=dict)
    """The peak of the backward pass if the gradients exist already."""
    peaks_holding: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})
    """The peaks of the backward pass, the second as `peak_again`, if the model's output stays."""
    recomputed_bytes: int = 0
    """What is recomputed for the backward pass; of what products of weights read, the largest."""
    around_experts: tuple[Segment, ...] = ()
    """If the experts are an FSDP unit: the backward pass cut where their weights are needed, where
    their own backward pass begins, and where it ends."""

    @property
    def weights(self) -> list[Weight]:
        return [weight for unit in self.units.values() for weight in unit]

    @property
    def backward_again(self) -> Segment:
        """The backward pass if the gradients exist: each new one is added to them, and freed."""
        net = {name: size for name, size in self.backward.net.items() if name != "gradients"}
        return replace(self.backward, net=net, peak=self.peak_again)

    @property
    def holding(self) -> ModelPart:
        """This part, if the model's output stays until the end of the backward pass."""
        peak, again = self.peaks_holding
        return replace(self, backward=replace(self.backward, peak=peak), peak_again=again)


@dataclass(frozen=True)
class Float8Cast:
    """How FSDP2 casts its shard of a weight to float8 before it gathers it.

    The events are those of a shard of `numel` elements. `cast` has the reductions of the weight's
    amax, too, unless that is computed in advance, after the update: then `amax` has the operators.
    """

    numel: int
    is_cut: bool
    """Whether the tp axis shards the weight, so that its amax is reduced over tp, too."""
    cast: Segment
    amax: Segment = NOTHING


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, for one microbatch on a rank.

    `kinds` has the kind of each block of the model, an index of `blocks`. `start` and `end` are
    what a step does once; `end`, the update, is that of `end_weights` in `num_shards` shards.
    """

    before: ModelPart
    before_names: tuple[str, ...]
    """The modules of this part that a pipeline stage can have."""
    blocks: tuple[ModelPart, ...]
    after: ModelPart
    after_names: tuple[str, ...]
    kinds: tuple[int, ...]
    names: tuple[str, ...]
    """The name of each block."""
    start: Segment
    end: Segment
    buffer_bytes: int
    """Bytes of the buffers that every stage has."""
    end_weights: tuple[Weight, ...]
    num_shards: int
    num_expert_shards: int
    tied: tuple[Weight, ...]
    """The weights that `before` and `after` share."""
    boundary_bytes: int
    """Bytes of the activation between two blocks."""
    keeps_embeddings: bool
    """Whether the model holds the first block's input until its last block has run."""
    output_bytes: int
    """Bytes of the model's output, if the backward pass does not need it."""
    saved_output_bytes: int
    """Bytes of the model's output, if the backward pass needs it, and so frees it."""
    moments: int
    """Tensors of a parameter's size in its optimizer state; one less if Muon updates it."""
    state_bytes: int
    """Bytes of the other optimizer state of a parameter."""
    flops_per_token: float | None
    """Forward and backward FLOPs of the model, without recomputation."""
    gaps: int = 0
    """The bytes that a GPU's allocator takes beyond the sum of each stream's own peak."""
    gaps_of_stages: tuple[int, int, int] = (0, 0, 0)
    """The same of a pipeline's stages: the first, one with blocks alone, and the last."""
    balance_bytes: tuple[int, int] = (0, 0)
    """The bytes of the slots of each expert, which are summed in `end`; and of the whole model."""
    casts: Mapping[str, Float8Cast] = field(default_factory=dict)
    """The casts of the weights that FSDP2 gathers in float8, by name."""

    @functools.cached_property
    def ends_apart(self) -> tuple[ModelPart, ModelPart]:
        """`before` and `after` in stages of their own: of a unit of both, each has what is its own.

        What they share is in both.
        """
        before, after = self.before, self.after
        of_head = tuple(f"{name}." for name in self.after_names)
        shared = before.units.keys() & after.units.keys()
        for unit in shared:
            weights = before.units[unit]
            first = tuple(w for w in weights if not w.name.startswith(of_head))
            last = tuple(w for w in weights if w.name.startswith(of_head) or w in self.tied)
            before = replace(before, units={**before.units, unit: first})
            after = replace(after, units={**after.units, unit: last})
        if self.tied and not shared:
            after = replace(after, units={**after.units, TIED: self.tied})
        return before, after

    def state_bytes_of(self, weight: Weight, size: int) -> int:
        """The bytes of the optimizer state of a trained weight with `size` bytes."""
        if weight.matrices:
            return (self.moments - 1) * size
        return self.moments * size + self.state_bytes


AS_ADAMW: dict[str, Any] = {
    "optimizer.name": "AdamW",
    "optimizer.momentum": None,
    "optimizer.nesterov": True,
    "optimizer.ns_steps": 5,
    "optimizer.ns_dtype": "bfloat16",
    "optimizer.adjust_lr_fn": "match_rms_adamw",
    "optimizer.adamw": (),
}
"""Instead of Muon, whose part muon.py adds."""
WITHOUT_FLOAT8_GATHER: dict[str, Any] = {
    "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": False,
}
WITHOUT_A_PIPELINE: dict[str, Any] = {
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.module_fqns_per_model_part": None,
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    # What compose.py adds by itself.
    "parallelism.fsdp_reshard_after_forward": "default",
}


def uses_fsdp(resolved: ResolvedJob) -> bool:
    """Whether FSDP2 wraps the model."""
    training = resolved.config.training
    is_plain = not training.is_mixed and not training.enable_cpu_offload
    return resolved.dims.uses_fsdp(is_plain=is_plain, has_experts=has_experts(resolved))


def offloads(resolved: ResolvedJob) -> bool:
    """Whether parameters are kept in another memory than that of the device; on CPU all is one."""
    config = resolved.config
    return config.training.enable_cpu_offload and config.job.device == "cuda"


def has_experts(resolved: ResolvedJob) -> bool:
    """Whether the job's model has mixtures of experts."""
    return bool(num_experts(resolved.config, resolved.model))


def representatives(dims: ParallelDims, layout: str | None = None) -> list[int]:
    """One rank per pipeline stage, those with the largest shards: the first of other axes.

    Of more than four stages: the first two, the middle one and the last. In context parallelism
    with contiguous shards (layout "none") the last rank attends to the most keys.
    """
    last = {"cp": dims.cp - 1} if layout == "none" else {}
    places = list(range(dims.pp)) if dims.pp <= 4 else [0, 1, dims.pp // 2, dims.pp - 1]
    return [dims.rank(pp=place, **last) for place in places]


def smaller(resolved: ResolvedJob, *, is_compiled: bool = False) -> ResolvedJob:
    """The job for one microbatch, without a pipeline and on as few ranks as its pieces need.

    It compiles nothing, unless `is_compiled` and the job compiles its blocks.
    """
    config, dims = resolved.config, resolved.dims
    at_once = config.training.local_batch_size
    if resolved.pipeline is not None:
        at_once = resolved.pipeline.microbatch_size
    is_fsdp = uses_fsdp(resolved)
    shards = 2 if is_fsdp and not dims.cp_enabled else 1
    # Ranks for ep, and two shards of each expert, so that its collectives are seen.
    least = 2 * dims.ep if is_fsdp and dims.experts_are_apart(has_experts(resolved)) else 1
    while dims.cp * dims.tp * shards % least:
        shards += 1
    # Replicas of DDP reduce the amaxes of float8 over their tokens.
    has_replicas = not is_fsdp and dims.num_replicas > 1 and FLOAT8.is_on(config)
    replicas = 2 if has_replicas else 1
    changes = WITHOUT_A_PIPELINE | {
        "compile.enable": is_compiled and config.compile.enable,
        # The weights of a single shard are not gathered.
        **({} if dims.num_weight_shards > 1 else WITHOUT_FLOAT8_GATHER),
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
        "training.local_batch_size": at_once,
        "training.global_batch_size": at_once * shards * replicas,
        # data_parallel.py adds the copies.
        "training.enable_cpu_offload": False,
    }
    return resolve_job(override(config, changes), None)
