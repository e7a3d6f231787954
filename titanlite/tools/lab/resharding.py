"""Reshard a tensor from any sharding to any other; every device receives each needed part once.

With this, an operation also works for shardings that it has no rule for. A gather, a slice and a
transposition of axes are special cases. Senders and receivers compute the same list of transfers
from the two shardings: which box of each new shard is on which device.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.group import wait_all
from titanlite.tools.lab.mesh import Mesh, MeshIndex
from titanlite.tools.lab.sharding import Shape, TensorSharding, at

Box = tuple[tuple[int, int], ...]


def reshard(
    device: VirtualDevice,
    shard: torch.Tensor,
    source: TensorSharding,
    target: TensorSharding,
    label: str = "",
) -> torch.Tensor:
    """This device's shard of a tensor under `target`, from its shard under `source`.

    Every device of the mesh must call it. A device does not receive data that it already has. If
    the source is replicated, it receives from the replica with its own coordinates on the
    replicated axes, so all replicas share the sending.
    """
    if source == target:
        return shard
    mesh, here = device.mesh, device.index
    shape = source.whole_shape(mesh, shard.shape)
    old, new = source.box(mesh, shape, here), target.box(mesh, shape, here)
    result = shard.new_empty(target.local_shape(mesh, shape))
    moves = list(_moves(mesh, shape, source, target))
    is_local = all(giver == taker for giver, taker, _ in moves)
    with nullcontext() if is_local else device.collective("reshard", label=label):
        sending = [
            device.channel(taker).isend(at(shard, relative(box, old)))
            for giver, taker, box in moves
            if giver == here and taker != here
        ]
        for giver, taker, box in moves:
            if taker != here:
                continue
            if giver == here:
                piece = at(shard, relative(box, old))
            else:
                piece = shard.new_empty([last - first for first, last in box])
                device.channel(giver).recv(piece)
            at(result, relative(box, new)).copy_(piece)
        wait_all(sending)
    return result


def _moves(
    mesh: Mesh, shape: Shape, source: TensorSharding, target: TensorSharding
) -> Iterator[tuple[MeshIndex, MeshIndex, Box]]:
    """All (giver, taker, box), in the same order on every device."""
    old = {index: source.box(mesh, shape, index) for index in mesh}
    for taker in mesh:
        wanted = target.box(mesh, shape, taker)
        for giver in mesh:
            is_own_copy = all(
                giver[axis] == taker[axis] for axis in mesh.axes if axis not in source.axes
            )
            box = overlap(old[giver], wanted)
            if is_own_copy and box is not None:
                yield giver, taker, box


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < last for first, last in shared) else None


def relative(box: Box, frame: Box) -> Box:
    """The box in the local coordinates of the shard that holds `frame`."""
    return tuple(
        (first - start, last - start) for (first, last), (start, _) in zip(box, frame, strict=True)
    )
