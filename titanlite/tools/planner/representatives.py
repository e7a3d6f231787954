"""Which ranks of a job stand for all; torch-free."""

from __future__ import annotations

from titanlite.mesh.parallel_dims import ParallelDims


def representatives(dims: ParallelDims, layout: str | None = None) -> list[int]:
    """One rank per pipeline stage, those with the largest shards: the first of other axes.

    Of more than four stages: the first two, the middle one and the last. In context parallelism
    with contiguous shards (layout "none") the last rank attends to the most keys.
    """
    last = {"cp": dims.cp - 1} if layout == "none" else {}
    places = list(range(dims.pp)) if dims.pp <= 4 else [0, 1, dims.pp // 2, dims.pp - 1]
    return [dims.rank(pp=place, **last) for place in places]
