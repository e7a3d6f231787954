"""What Muon adds to the update of a composed step: training/muon.py, in the sizes of a job.

No torch. The pieces of a job are traced with AdamW in its place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from titanlite.config import ResolvedJob
from titanlite.mesh.parallel_dims import expert_shard_dim
from titanlite.quantities import ITEMSIZE
from titanlite.tools.planner.composition import Weight
from titanlite.tools.planner.data_parallel import Replication
from titanlite.tools.planner.events import Communication, Event, Operator, Site

PLACE = Site("", "optimizer")
ELEMENTWISE = "aten::_foreach_lerp_"  # stands for all that Muon does to each element


class MuonUpdate:
    """The update of a job's matrices on its first rank, which has the largest shards."""

    def __init__(self, resolved: ResolvedJob, data: Replication) -> None:
        self._section, self._data = resolved.config.optimizer, data
        self._tp = resolved.dims.tp

    def key(self, weights: Iterable[Weight]) -> tuple[object, ...]:
        """Jobs with the same pieces have the same events if it is equal."""
        return *(w for w in weights if w.matrices), self._tp, *self._data.key

    def events(self, weights: Iterable[Weight]) -> Iterator[Event]:
        """The exchanges, products and other operators, in order."""
        together: dict[tuple[str, bool, str], list[Weight]] = defaultdict(list)
        for weight in weights:
            if weight.matrices:
                # Of two dimensions: the axis with the most ranks. Of one: FSDP's cuts last.
                cuts = self._cuts(weight)
                is_same = self._shards(weight)[1] == weight.tp_dim and len(cuts) > 1
                axes = [axis for axis in cuts if not (is_same and axis == "tp")]
                axis = max(axes, key=lambda axis: cuts[axis], default="")
                together[weight.matrices, weight.is_expert, axis].append(weight)
        for (_, _, axis), some in together.items():
            some.sort(key=lambda weight: weight.numel * self._tp_cut(weight))
            size = self._cuts(some[0]).get(axis, 1)
            for first in range(0, len(some), size):
                yield from self._batch(some[first : first + size], axis, size)

    def _batch(self, batch: list[Weight], axis: str, size: int) -> Iterator[Event]:
        itemsize, shard = ITEMSIZE[self._section.ns_dtype], self._data.shard_numel
        own = batch[0]
        whole, others = self._whole(own), self._cuts(own)
        if axis:
            sent = sum(map(shard, batch)) * itemsize
            yield Communication("all_to_all", axis, sent, size, PLACE, 0)
            others.pop(axis)
        for other, degree in others.items():
            yield Communication("all_gather", other, whole * itemsize, degree, PLACE, 0)
        yield from self._products(own, whole, itemsize)
        if axis:
            back = shard(own) * size if axis == "tp" else own.numel
            yield Communication("all_to_all", axis, back * itemsize, size, PLACE, 0)
        moved = sum(shard(weight) * weight.itemsize for weight in batch)
        dtype, on_host = self._section.ns_dtype, self._data.is_offloaded
        yield Operator(ELEMENTWISE, 0, 6 * moved, 3 * moved, PLACE, dtype, is_on_host=on_host)

    def _cuts(self, weight: Weight) -> dict[str, int]:
        """The axes that cut what must be whole, with their numbers of ranks; FSDP's first."""
        shards, dim = self._shards(weight)
        cuts = {}
        if shards > 1 and (dim or weight.matrices == "matrix"):
            cuts[self._data.axis_of(weight)] = shards
        if weight.tp_dim is not None and self._tp > 1:
            cuts["tp"] = self._tp
        return cuts

    def _shards(self, weight: Weight) -> tuple[int, int]:
        """The shards of FSDP, and the dimension that they cut."""
        shards = self._data.num_shards_of(weight) if self._data.is_fsdp else 1
        return shards, expert_shard_dim(weight.shape[0], shards) if weight.is_expert else 0

    def _tp_cut(self, weight: Weight) -> int:
        return 1 if weight.tp_dim is None else self._tp

    def _whole(self, weight: Weight) -> int:
        """The elements of a matrix, or of the whole matrices of this rank's part of a stack."""
        shards, dim = self._shards(weight)
        is_cut = weight.matrices == "stack" and dim == 0 and shards > 1
        own = self._data.shard_numel(weight) if is_cut else weight.numel
        return own * self._tp_cut(weight)

    def _products(self, own: Weight, whole: int, itemsize: int) -> Iterator[Operator]:
        """Newton-Schulz on the matrices of a weight."""
        shape = [*own.shape]
        if own.tp_dim is not None:
            shape[own.tp_dim] *= self._tp
        rows, columns = shape[-2:] if own.matrices == "stack" else (shape[0], math.prod(shape[1:]))
        batch, (m, n) = whole // (rows * columns), sorted((rows, columns))
        for _ in range(self._section.ns_steps):
            for name, out, inner in (("bmm", m, n), ("baddbmm", m, m), ("baddbmm", n, m)):
                read, written = batch * (m * inner + inner * out), batch * m * out
                read += written if name == "baddbmm" else 0
                yield Operator(
                    f"aten::{name}",
                    2 * batch * m * out * inner,
                    read * itemsize,
                    written * itemsize,
                    PLACE,
                    self._section.ns_dtype,
                    (batch, m, out, inner),
                )
