"""What FSDP2 and DDP add to a step: the gathers and reductions of each unit, and their memory.

compose.py puts these between the pieces of a step. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titanlite.config import ResolvedJob
from titanlite.mesh.parallel_dims import EXPERT_SHARDS, axes_where, flat_name
from titanlite.plan.composition import Builder, Part, Pieces, Weight, uses_fsdp
from titanlite.plan.events import ITEMSIZE, Place

DDP_BUCKET_BYTES = 100 << 20
ENDS = ("before", "after")
BUFFERS, GATHERED = "communication buffers", "gathered parameters"
COPY_IN, COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
CHUNK = "fsdp::chunk_cat"


class Replication:
    """How the weights of a job are sharded and replicated over the data-parallel axes."""

    def __init__(self, resolved: ResolvedJob, pieces: Pieces) -> None:
        config, dims = resolved.config, resolved.dims
        training, policy = config.training, config.parallelism.fsdp_reshard_after_forward
        self.dims, self._pieces = dims, pieces
        self.is_fsdp = uses_fsdp(resolved)
        self._is_mixed = training.is_mixed
        self._dtype, self._reduce_dtype = training.param_dtype, training.reduce_dtype
        self.num_shards, self._num_expert_shards = dims.num_weight_shards, dims.num_expert_shards
        sharded = [axis for axis in axes_where(weights="sharded") if dims.degrees[axis] > 1]
        self._shard_axis = sharded[0] if len(sharded) == 1 else flat_name(tuple(sharded))
        self._always = policy == "always"
        self._reshards = self._always or (policy == "default" and not dims.pp_enabled)

    @property
    def key(self) -> tuple[object, ...]:
        """Jobs with the same pieces have the same units, gathers and reductions if it is equal."""
        replicas = self.dims.dp_replicate
        shards = self.num_shards, self._num_expert_shards
        return self.is_fsdp, *shards, replicas, self._always, self._reshards

    def num_shards_of(self, weight: Weight) -> int:
        return self._num_expert_shards if weight.is_expert else self.num_shards

    def shard_numel(self, weight: Weight) -> int:
        """The elements of a weight on this rank."""
        return weight.shard_numel(self.num_shards_of(weight))

    def _axis_of(self, weight: Weight) -> str:
        return EXPERT_SHARDS if weight.is_expert else self._shard_axis

    def frees(self, *, is_needed_first: bool) -> bool:
        """Whether a unit is freed after the forward pass; the backward needs some of them first."""
        return self._always if is_needed_first else self._reshards

    def start_gather(self, builder: Builder, weights: Sequence[Weight], place: Place) -> int:
        """Start to gather a unit; returns the number of the all-gather, or 0 without one.

        It depends on the rank's own shards alone. In the forward pass of a GPU, it can start when
        the unit before has been copied out of the buffer that both use. In the backward pass FSDP
        issues it early by itself.
        """
        shards, axis = self.num_shards_of(weights[0]), self._axis_of(weights[0])
        if shards == 1:
            return 0
        num_bytes = self._gathered_bytes(weights)
        ready = builder.ready if place.phase == "forward" else -1
        builder.operator(COPY_IN, num_bytes // shards, self._dtype, place, is_beside=ready >= 0)
        builder.allocate(BUFFERS, num_bytes)
        return builder.start("all_gather", axis, num_bytes, shards, place, ready=ready)

    def finish_gather(
        self, builder: Builder, weights: Sequence[Weight], number: int, place: Place
    ) -> None:
        """Wait for the all-gather, and copy its output into the parameters."""
        num_bytes = self._gathered_bytes(weights)
        if number:
            builder.wait(number)
            builder.allocate(GATHERED, num_bytes)
            builder.operator(COPY_OUT, num_bytes, self._dtype, place)
            builder.ready = len(builder.events)
            builder.allocate(BUFFERS, -num_bytes)
        elif self._is_mixed:
            builder.allocate(GATHERED, num_bytes)

    def free(self, builder: Builder, weights: Sequence[Weight]) -> None:
        if self.num_shards_of(weights[0]) > 1 or self._is_mixed:
            builder.allocate(GATHERED, -self._gathered_bytes(weights))

    def reduce(
        self,
        builder: Builder,
        weights: Sequence[Weight],
        place: Place,
        pending: tuple[int, int],
        *,
        is_first: bool,
        is_last: bool,
    ) -> tuple[int, int]:
        """Reduce a unit's gradients over its shards, and in the last batch over replicas.

        `pending` is the reduction before, which is waited for: its number and bytes. Returns that
        of this one.
        """
        trained = [weight for weight in weights if weight.is_trained]
        if not trained:
            return pending
        self.end_reduce(builder, pending)
        shards, replicas = self.num_shards_of(weights[0]), self.dims.dp_replicate
        num_bytes = sum(
            w.padded_numel(shards) * self._itemsize(w, self._reduce_dtype) for w in trained
        )
        for weight in trained:
            if weight.is_partial:
                size = weight.numel * self._itemsize(weight, self._dtype)
                builder.wait(builder.start("all_reduce", "tp", size, self.dims.tp, place))
        builder.allocate(BUFFERS, num_bytes)
        builder.operator(CHUNK, num_bytes, self._reduce_dtype, place)
        number = 0
        if shards > 1:
            axis = self._axis_of(weights[0])
            number = builder.start("reduce_scatter", axis, num_bytes, shards, place)
        if is_first:
            builder.allocate("gradients", sum(w.shard_numel(shards) * w.itemsize for w in trained))
        if replicas > 1 and is_last:
            if number:
                builder.wait(number)
            number = builder.start(
                "all_reduce", "dp_replicate", num_bytes // shards, replicas, place
            )
        return number, num_bytes

    def end_reduce(self, builder: Builder, pending: tuple[int, int]) -> None:
        number, num_bytes = pending
        if number:
            builder.wait(number)
        if num_bytes:
            builder.allocate(BUFFERS, -num_bytes)

    def _gathered_bytes(self, weights: Sequence[Weight]) -> int:
        return sum(
            w.padded_numel(self.num_shards_of(w)) * self._itemsize(w, self._dtype) for w in weights
        )

    def _itemsize(self, weight: Weight, dtype: str) -> int:
        return ITEMSIZE[dtype] if self._is_mixed else weight.itemsize

    def units(self, name: str, part: Part) -> Iterator[tuple[str, tuple[Weight, ...]]]:
        """(unit, parameters) of a part; blocks of one kind have the same parameters.

        The second unit of a block has its experts.
        """
        for index, (unit, weights) in enumerate(part.units.items()):
            yield (unit if name in ENDS else f"{name} {index}"), weights

    def reduced_units(self, name: str, part: Part) -> list[tuple[str, tuple[Weight, ...]]]:
        """The units in the order in which their gradients are complete."""
        return list(self.units(name, part))[:: 1 if name in ENDS else -1]

    def is_shared(self, unit: str) -> bool:
        """Whether the unit has both embeddings and head, which share a weight."""
        return unit in self._pieces.before.units and unit in self._pieces.after.units

    def buckets(self, parts: list[tuple[str, Part]]) -> dict[str, list[int]]:
        """Part -> DDP's buckets that are complete after its backward pass, in bytes.

        DDP fills buckets in reverse order of the parameters.
        """
        if self.dims.dp_replicate == 1:
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

    def all_reduce_bucket(self, builder: Builder, num_bytes: int, place: Place) -> None:
        builder.operator("aten::copy_", num_bytes, self._dtype, place)
        number = builder.start(
            "all_reduce", "dp_replicate", num_bytes, self.dims.dp_replicate, place
        )
        builder.wait(number)
        builder.operator("aten::copy_", num_bytes, self._dtype, place)

    def keep_gradients(self, builder: Builder, part: Part, has_gradients: bool) -> None:
        """Keep whole gradients until the stage reduces them, in the dtype of the reduction."""
        num_bytes = self.whole_gradient_bytes(part)
        builder.allocate("gradients", num_bytes)
        if has_gradients:
            builder.allocate("gradients", -num_bytes)

    def whole_gradient_bytes(self, part: Part) -> int:
        if not self.is_fsdp:
            return 0
        return sum(
            weight.numel * self._itemsize(weight, self._reduce_dtype)
            for weight in part.weights
            if weight.is_trained
        )
