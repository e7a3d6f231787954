"""From any sharding of a tensor to any other: every device gets the part it needs, once.

The step that makes an operation work for shardings it has no rule for. A gather, a slice and a
transposition of axes are all cases of it: each device works out, from the two shardings alone,
which boxes of its new shard lie on which device, and the senders work out the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from titanlite.lab.counts import Collective
from titanlite.lab.device import VirtualDevice
from titanlite.lab.group import wait_all
from titanlite.lab.mesh import Mesh, MeshIndex
from titanlite.lab.sharding import Shape, TensorSharding, at

Box = tuple[tuple[int, int], ...]


def reshard(
    device: VirtualDevice,
    shard: torch.Tensor,
    source: TensorSharding,
    target: TensorSharding,
    label: str = "",
) -> torch.Tensor:
    """This device's shard of a tensor under `target`, from its shard under `source`.

    Every device of the mesh must call it. What a device holds already it does not receive; of
    several copies it takes that of the device which differs in the split axes only, so that the
    copies share the sending.
    """
    if source == target:
        return shard
    mesh, here = device.mesh, device.index
    shape = source.whole_shape(mesh, shard.shape)
    old, new = source.box(mesh, shape, here), target.box(mesh, shape, here)
    result = shard.new_empty(target.local_shape(mesh, shape))
    moves = list(_moves(mesh, shape, source, target))
    if any(giver != taker for giver, taker, _ in moves):
        device.counts.collectives.append(Collective("reshard", label, mesh.axes))
    sending = [
        device.channel(taker).isend(at(shard, relative(box, old)))
        for giver, taker, box in moves
        if giver == here and taker != here
    ]
    for giver, taker, box in moves:
        if taker == here:
            piece = at(shard, relative(box, old)) if giver == here else None
            if piece is None:
                piece = shard.new_empty([last - first for first, last in box])
                device.channel(giver).recv(piece)
            at(result, relative(box, new)).copy_(piece)
    wait_all(sending)
    return result


def _moves(
    mesh: Mesh, shape: Shape, source: TensorSharding, target: TensorSharding
) -> Iterator[tuple[MeshIndex, MeshIndex, Box]]:
    """Every (giver, taker, box), in the same order on every device."""
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
    """The box that two boxes share; None if there is none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < last for first, last in shared) else None


def relative(box: Box, frame: Box) -> Box:
    """A box in the coordinates of the shard that holds `frame`."""
    return tuple(
        (first - start, last - start) for (first, last), (start, _) in zip(box, frame, strict=True)
    )
