"""What FSDP2 and DDP add to a step: the gathers and reductions of each unit, and their memory.

compose.py puts these between the pieces of a step. With CPU offload, the shards of parameters,
their gradients and the optimizer state are on the host; each shard is copied to the device before
it is gathered, and each reduced gradient back. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titanlite.config import ResolvedJob
from titanlite.mesh.parallel_dims import EXPERT_SHARDS, axes_where, flat_name
from titanlite.quantities import ITEMSIZE
from titanlite.tools.planner.composition import (
    GATHER,
    MAIN,
    REDUCE,
    TIED,
    Builder,
    ModelPart,
    Pieces,
    Weight,
    offloads,
    uses_fsdp,
)
from titanlite.tools.planner.events import HOST_LINK, TO_DEVICE, TO_HOST, Event, Operator, Site
from titanlite.tools.planner.float8_cast import add_cast, amaxes_in_advance

DDP_BUCKET_BYTES = 100 << 20
ENDS = ("before", "after")
BUFFERS, GATHERED, TEMPORARY = "communication buffers", "gathered parameters", "temporary"
COPY_IN, COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
CHUNK, CAST = "fsdp::chunk_cat", "aten::_to_copy"


class PendingReduction(NamedTuple):
    """The reduction of a unit that is under way.

    `number` and `num_bytes` are those of the reduction that the next unit waits for, and of its
    buffer. `after` is the copy to the host that it comes after. `last` has the last reduction over
    replicas and the last copy, 0 for none. `kept` has the bytes of reduced gradients on the device
    that the backward pass frees at its end.
    """

    number: int = 0
    num_bytes: int = 0
    after: int = 0
    last: tuple[int, int] = (0, 0)
    kept: int = 0


class Replication:
    """How the weights of a job are sharded and replicated over the data-parallel axes."""

    def __init__(self, resolved: ResolvedJob, pieces: Pieces) -> None:
        config, dims = resolved.config, resolved.dims
        training, policy = config.training, config.parallelism.fsdp_reshard_after_forward
        self.dims, self._pieces = dims, pieces
        self.is_fsdp = uses_fsdp(resolved)
        self._is_mixed = training.is_mixed
        pipeline = resolved.pipeline
        self.splits_backward = pipeline is not None and pipeline.schedule.splits_backward
        self.is_on_gpu = config.job.device == "cuda"
        self.is_runtime = pipeline is not None and (
            pipeline.is_from_file or pipeline.schedule.num_stages > pipeline.schedule.num_ranks
        )
        """Whether PyTorch's runtime of schedules with several stages a rank runs the pipeline."""
        # The runtime gathers a stage on the main stream (FSDPModule.unshard with async_op).
        self._gather_stream = GATHER if self.is_on_gpu and not self.is_runtime else MAIN
        self._reduce_stream = REDUCE if self.is_on_gpu else MAIN
        self.is_offloaded = offloads(resolved)
        self._is_pinned = training.cpu_offload_pin_memory
        self._dtype, self._reduce_dtype = training.param_dtype, training.reduce_dtype
        is_summed = pipeline is not None and pipeline.schedule.num_microbatches > 1
        is_cast = training.is_mixed and training.param_dtype != training.reduce_dtype
        self.sums_apart = self.splits_backward and self.is_fsdp and is_summed and is_cast
        """Whether FSDP2 adds a microbatch's gradients to their sum in the next one's backward."""
        self.num_shards, self._num_expert_shards = dims.num_weight_shards, dims.num_expert_shards
        sharded = [axis for axis in axes_where(weights="sharded") if dims.degrees[axis] > 1]
        self._shard_axis = sharded[0] if len(sharded) == 1 else flat_name(tuple(sharded))
        self._casts = pieces.casts if self.num_shards > 1 else {}
        self._always = policy == "always"
        self._reshards = self._always or (policy == "default" and not dims.pp_enabled)
        self.regathers = self._always and dims.pp_enabled and self.is_fsdp
        """Whether each forward pass of a pipeline's stage frees its weights."""

    @property
    def key(self) -> tuple[object, ...]:
        """Jobs with the same pieces have the same units, gathers and reductions if it is equal."""
        shards = self.is_fsdp, self.num_shards, self._num_expert_shards, self.dims.num_replicas
        policy = self.sums_apart, self._always, self._reshards
        return *shards, *policy, self.is_offloaded, self._is_pinned

    @property
    def token_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes over which the tokens of a microbatch are spread, and their numbers of ranks."""
        axes = (self.dims.replica_dim, self.dims.num_replicas), (self._shard_axis, self.num_shards)
        return tuple((axis, num_ranks) for axis, num_ranks in axes if num_ranks > 1)

    def num_shards_of(self, weight: Weight) -> int:
        return self._num_expert_shards if weight.is_expert else self.num_shards

    def shard_numel(self, weight: Weight) -> int:
        """The elements of a weight on this rank."""
        return weight.shard_numel(self.num_shards_of(weight))

    def axis_of(self, weight: Weight) -> str:
        return EXPERT_SHARDS if weight.is_expert else self._shard_axis

    def frees(self, *, is_needed_first: bool) -> bool:
        """Whether a unit is freed after the forward pass; the backward needs some of them first."""
        return self._always if is_needed_first else self._reshards

    def start_gather(
        self, builder: Builder, weights: Sequence[Weight], place: Site
    ) -> tuple[int, ...]:
        """Start to gather a unit; returns the numbers to wait for, none if nothing is gathered.

        It depends on the rank's own shards alone. In the forward pass of a GPU, it can start after
        the gather before it, when the unit before that has been copied out of the buffer that both
        use. In the backward pass FSDP issues it early by itself.
        """
        shards, axis = self.num_shards_of(weights[0]), self.axis_of(weights[0])
        if shards == 1:
            return ()
        num_bytes = self._gathered_bytes(weights)
        ready = builder.ready if place.phase == "forward" else -1
        copied, cast_bytes, stream = 0, 0, self._gather_stream
        if self.is_offloaded:
            copied = self._copy_in(builder, weights, place, ready, stream)
        elif self._is_mixed:
            cast_bytes = self._cast_shards(builder, weights, place, is_beside=ready >= 0)
            builder.allocate(TEMPORARY, cast_bytes, stream=stream)
        numbers, float8_bytes = self._add_casts(builder, weights, place, ready)
        builder.operator(COPY_IN, num_bytes // shards, self._dtype, place, is_beside=ready >= 0)
        builder.allocate(BUFFERS, num_bytes, stream=stream)
        builder.allocate(TEMPORARY, -cast_bytes - float8_bytes, stream=stream)
        if copied:
            left = sum(self._cast_bytes(w) for w in weights if w.name not in self._casts)
            builder.allocate(TEMPORARY, -left, stream=stream)
        after = _some(copied)
        number = builder.start(
            "all_gather", axis, num_bytes, shards, place, ready=ready, after=after
        )
        self._copy(builder, num_bytes, place)
        return *after, *numbers, number

    def _copy(self, builder: Builder, num_bytes: int, place: Site) -> None:
        """The tensor of its own into which gloo gathers, or which it reduces."""
        if not self.is_on_gpu:
            builder.allocate(BUFFERS, num_bytes, place)
            builder.allocate(BUFFERS, -num_bytes)

    def _copy_in(
        self, builder: Builder, weights: Sequence[Weight], place: Site, ready: int, stream: int
    ) -> int:
        """Copy the shards of a unit to the device, and cast them; returns the last copy's number.

        What is left is a tensor in the compute dtype for each shard that is not cast to float8.
        Without pinned memory the host waits for each copy: in the forward pass it has launched the
        unit before by then, in the backward pass it has not.
        """
        number = 0
        for weight in weights:
            size, cast = self._copied_numel(weight) * weight.itemsize, self._cast_bytes(weight)
            number = builder.start(
                TO_DEVICE, HOST_LINK, size, 1, place, ready=ready, after=_some(number)
            )
            if not self._is_pinned and place.phase == "backward":
                builder.wait(number)
            builder.allocate(TEMPORARY, size, stream=stream)
            if weight.name in self._casts:
                builder.allocate(TEMPORARY, -size, stream=stream)
            elif cast != size:
                builder.operator(CAST, size, self._dtype, place, is_beside=ready >= 0)
                builder.allocate(TEMPORARY, cast, stream=stream)
                builder.allocate(TEMPORARY, -size, stream=stream)
        return number

    def _copied_numel(self, weight: Weight) -> int:
        """The elements of a shard as FSDP2 stores it."""
        shards = self.num_shards_of(weight)
        return weight.padded_numel(shards) // shards

    def _cast_bytes(self, weight: Weight) -> int:
        """The bytes of a shard in the compute dtype."""
        return self._copied_numel(weight) * self._itemsize(weight, self._dtype)

    def _add_casts(
        self, builder: Builder, weights: Sequence[Weight], place: Site, ready: int
    ) -> tuple[list[int], int]:
        """Cast the weights that are gathered in float8; returns what is not waited for, and bytes.

        A GPU's main stream waits for the reductions of their amaxes when it needs the weights.
        """
        numbers: list[int] = []
        kept = 0
        for weight in weights:
            if weight.name in self._casts:
                cast, numel = self._casts[weight.name], self.shard_numel(weight)
                over = self.axis_of(weight), self.num_shards
                stream = self._gather_stream
                started, left = add_cast(builder, cast, numel, over, place, ready, stream)
                kept += left
                if self.is_on_gpu:
                    numbers += started
                else:
                    for number in started:
                        builder.wait(number)
        return numbers, kept

    def amaxes_in_advance(self, weights: Sequence[Weight]) -> list[Event]:
        """The amaxes of the weights of a stage after the update, if they are computed there."""
        found = [
            (self._casts[weight.name], self.shard_numel(weight))
            for weight in weights
            if weight.name in self._casts and self._casts[weight.name].amax.events
        ]
        over = self._shard_axis, self.num_shards
        return list(amaxes_in_advance(found, over, self.dims.tp))

    def finish_gather(
        self,
        builder: Builder,
        weights: Sequence[Weight],
        numbers: Sequence[int],
        place: Site,
        *,
        defers: bool = False,
    ) -> None:
        """Wait for the all-gather, and copy its output into the parameters.

        FSDP2 frees the buffer then, or in a forward pass (`defers`) once the next one is copied.
        """
        num_bytes, issued = self._gathered_bytes(weights), len(builder.events)
        if numbers:
            for number in numbers:
                builder.wait(number)
            builder.allocate(GATHERED, num_bytes)
            builder.operator(COPY_OUT, num_bytes, self._dtype, place)
            builder.ready = max(builder.copied_out, issued if builder.ready < 0 else 0)
            builder.copied_out = len(builder.events)
            freed = builder.deferred if defers else num_bytes
            builder.deferred += num_bytes - freed
            builder.allocate(BUFFERS, -freed, stream=self._gather_stream)
        elif self.is_offloaded:
            for weight in weights:
                # Copied on the main stream, and into the parameter that computes.
                builder.wait(self._copy_in(builder, (weight,), place, -1, MAIN))
                cast = self._cast_bytes(weight)
                builder.allocate(GATHERED, cast)
                builder.operator("aten::copy_", cast, self._dtype, place)
                builder.allocate(TEMPORARY, -cast)
        else:
            # FSDP2 copies what it would gather, even from one rank.
            if self._is_mixed:
                self._cast_shards(builder, weights, place)
            builder.operator("aten::copy_", num_bytes, self._dtype, place)
            builder.allocate(GATHERED, num_bytes)

    def _cast_shards(
        self, builder: Builder, weights: Sequence[Weight], place: Site, *, is_beside: bool = False
    ) -> int:
        """Cast a unit's shards to the compute dtype, but for those cast to float8; their bytes."""
        plain = [w for w in weights if w.name not in self._casts]
        size = sum(self._copied_numel(w) * w.itemsize + self._cast_bytes(w) for w in plain)
        if not any(w.itemsize != self._itemsize(w, self._dtype) for w in plain):
            return 0
        builder.operator(CAST, size // 2, self._dtype, place, is_beside=is_beside)
        return sum(map(self._cast_bytes, plain))

    def free_deferred(self, builder: Builder) -> None:
        builder.allocate(BUFFERS, -builder.deferred, stream=self._gather_stream)
        builder.deferred = 0

    def free(self, builder: Builder, weights: Sequence[Weight]) -> None:
        builder.allocate(GATHERED, -self._gathered_bytes(weights))

    def reduce(
        self,
        builder: Builder,
        weights: Sequence[Weight],
        place: Site,
        pending: PendingReduction,
        *,
        is_first: bool,
        is_last: bool,
    ) -> PendingReduction:
        """Reduce a unit's gradients over its shards, and in the last batch over replicas.

        `pending` is the reduction before, which is waited for. Returns this one.
        """
        trained = [weight for weight in weights if weight.is_trained]
        if not trained:
            return pending
        self._await(builder, pending)
        shards, replicas = self.num_shards_of(weights[0]), self.dims.num_replicas
        num_bytes = sum(
            w.padded_numel(shards) * self._itemsize(w, self._reduce_dtype) for w in trained
        )
        for weight in trained:
            if weight.is_partial:
                # A pipeline adds up whole gradients of microbatches, in the reduction's dtype.
                dtype = self._reduce_dtype if self.dims.pp_enabled else self._dtype
                size = weight.numel * self._itemsize(weight, dtype)
                builder.wait(builder.start("all_reduce", "tp", size, self.dims.tp, place))
        builder.allocate(BUFFERS, num_bytes)
        builder.operator(CHUNK, num_bytes, self._reduce_dtype, place)
        number, (reduced, copied), kept = 0, pending.last, pending.kept
        if shards > 1:
            # FSDP2 copies gradients to the host on the stream of the last reduction.
            after = _some(copied) if replicas == 1 else ()
            axis = self.axis_of(weights[0])
            number = builder.start("reduce_scatter", axis, num_bytes, shards, place, after=after)
            self._copy(builder, num_bytes, place)
        output, beside = num_bytes // shards, self.is_on_gpu
        if shards == 1:
            builder.operator("aten::copy_", output, self._reduce_dtype, place, is_beside=beside)
        if not (is_first or self.is_offloaded):
            added = output * 3 // 2  # it reads two tensors and writes one
            builder.operator("aten::add_", added, self._reduce_dtype, place, is_beside=beside)
        stream = self._reduce_stream
        if self.is_offloaded:
            builder.allocate(BUFFERS, output, stream=stream)
        elif is_first:
            gradients = sum(w.shard_numel(shards) * w.itemsize for w in trained)
            builder.allocate("gradients", gradients, stream=stream)
        if not self.is_offloaded and (not is_first or (shards == 1 < replicas)):
            # What is added to the gradients of earlier batches, or one rank's, divided.
            builder.allocate(BUFFERS, output, place, stream)
            builder.allocate(BUFFERS, -output, stream=stream)
        if replicas > 1 and is_last:
            after = *_some(number), *_some(copied)
            reduced = builder.start(
                "all_reduce", self.dims.replica_dim, output, replicas, place, after=after
            )
        if not self.is_offloaded:
            return PendingReduction(number, num_bytes, last=(reduced, 0))
        if replicas == 1 or is_last:
            is_added = replicas == 1 and not is_first
            before = reduced if replicas > 1 else number
            copied = self._copy_out(builder, trained, place, before, is_added=is_added)
        if replicas == 1 or not is_first:
            # On one replica this is the output; else that of the batches before, or added to it.
            builder.allocate(BUFFERS, -output, stream=stream)
        if replicas > 1 and is_last:
            kept += output
        former = pending.last[1] if replicas == 1 else 0
        return PendingReduction(number, num_bytes, former, (reduced, copied), kept)

    def _copy_out(
        self,
        builder: Builder,
        weights: Sequence[Weight],
        place: Site,
        before: int,
        *,
        is_added: bool,
    ) -> int:
        """Copy reduced gradients to the host, after the reduction `before`.

        The host waits for a copy that it adds to the gradients of earlier batches, and for one
        into memory that is not pinned. Returns the last copy's number.
        """
        number = before
        for weight in weights:
            size = self.shard_numel(weight) * weight.itemsize
            number = builder.start(TO_HOST, HOST_LINK, size, 1, place, after=_some(number))
            if is_added or not self._is_pinned:
                builder.wait(before)
                builder.wait(number)
            if is_added:
                dtype = self._reduce_dtype
                adds = Operator("aten::add_", 0, 2 * size, size, place, dtype, is_on_host=True)
                builder.events.append(adds)
        return number

    def _await(self, builder: Builder, pending: PendingReduction) -> None:
        """Wait for a reduction, and for the copy before it; free its buffer."""
        for number in (pending.after, pending.number):
            if number:
                builder.wait(number)
        if pending.num_bytes:
            builder.allocate(BUFFERS, -pending.num_bytes)

    def end_reduce(self, builder: Builder, pending: PendingReduction) -> None:
        """The end of a backward pass, which waits for all reductions and copies."""
        self._await(builder, pending)
        for number in pending.last:
            if number:
                builder.wait(number)
        if pending.kept:
            builder.allocate(BUFFERS, -pending.kept, stream=self._reduce_stream)

    def _gathered_bytes(self, weights: Sequence[Weight]) -> int:
        return sum(
            w.padded_numel(self.num_shards_of(w))
            * (1 if w.name in self._casts else self._itemsize(w, self._dtype))
            for w in weights
        )

    def _itemsize(self, weight: Weight, dtype: str) -> int:
        return ITEMSIZE[dtype] if self._is_mixed else weight.itemsize

    def units(self, name: str, part: ModelPart) -> Iterator[tuple[str, tuple[Weight, ...]]]:
        """(unit, parameters) of a part; blocks of one kind have the same parameters.

        The second unit of a block has its experts.
        """
        for index, (unit, weights) in enumerate(part.units.items()):
            yield (unit if name in ENDS else f"{name} {index}"), weights

    def reduced_units(self, name: str, part: ModelPart) -> list[tuple[str, tuple[Weight, ...]]]:
        """The units in the order in which their gradients are complete."""
        return list(self.units(name, part))[:: 1 if name in ENDS else -1]

    def is_shared(self, unit: str) -> bool:
        """Whether the unit has what embeddings and head share."""
        of_both = unit in self._pieces.before.units and unit in self._pieces.after.units
        return of_both or unit == TIED

    def buckets(self, parts: list[tuple[str, ModelPart]]) -> dict[str, list[int]]:
        """Part -> DDP's buckets that are complete after its backward pass, in bytes.

        DDP fills buckets in reverse order of the parameters.
        """
        if self.dims.num_replicas == 1:
            return {}
        found: dict[str, list[int]] = {}
        size, at = 0, ""
        for name, part in reversed(parts):
            for weight in reversed(part.weights):
                if weight.is_trained:
                    size += weight.numel * weight.itemsize
                    at = name
                    if size >= DDP_BUCKET_BYTES:
                        found.setdefault(name, []).append(size)
                        size = 0
        if size:
            found.setdefault(at, []).append(size)
        return found

    def all_reduce_bucket(self, builder: Builder, num_bytes: int, place: Site) -> None:
        builder.operator("aten::copy_", num_bytes, self._dtype, place)
        number = builder.start(
            "all_reduce", self.dims.replica_dim, num_bytes, self.dims.num_replicas, place
        )
        builder.wait(number)
        builder.operator("aten::copy_", num_bytes, self._dtype, place)

    def keep_gradients(
        self, builder: Builder, part: ModelPart, place: Site, num_earlier: int
    ) -> None:
        """Keep whole gradients until the stage reduces them, in the dtype of the reduction.

        If they are summed apart, a microbatch's own stay until the next one adds them to the sum.
        """
        whole, own = self.whole_gradient_bytes(part), self.computed_gradient_bytes(part)
        if num_earlier and self.is_on_gpu and not self.sums_apart:
            # A CPU casts them to the sum's dtype first.
            return
        freed = own if self.sums_apart else whole
        builder.allocate("gradients", whole if num_earlier == 1 else freed, place)
        builder.allocate("gradients", -freed if num_earlier else 0)

    def computed_gradient_bytes(self, part: ModelPart) -> int:
        """The bytes of FSDP2's whole gradients of a part as the backward pass computes them."""
        return self._gradient_bytes(part, self._dtype)

    def whole_gradient_bytes(self, part: ModelPart) -> int:
        whole = self._gradient_bytes(part, self._reduce_dtype)
        return whole + (self.computed_gradient_bytes(part) if self.sums_apart else 0)

    def _gradient_bytes(self, part: ModelPart, dtype: str) -> int:
        if not self.is_fsdp:
            return 0
        return sum(w.numel * self._itemsize(w, dtype) for w in part.weights if w.is_trained)


def _some(number: int) -> tuple[int, ...]:
    """The number of a communication; () for none."""
    return (number,) if number else ()
