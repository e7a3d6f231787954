"""VirtualDevice: the first argument of every function that runs on a virtual cluster.

It has its position on the mesh and the channels to its peers and to the host, and it runs every
collective over any axes of the mesh, built from send and receive.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

from titanlite.tools.lab import naive_collectives, ring_collectives
from titanlite.tools.lab.channel import DeviceChannel, HostChannel, Transfer
from titanlite.tools.lab.counts import Collective, Counts
from titanlite.tools.lab.group import Group
from titanlite.tools.lab.link import Link, Port
from titanlite.tools.lab.mesh import Axes, Mesh, MeshIndex
from titanlite.tools.lab.recorder import CountingMode, Recorder

ALGORITHMS: dict[str, ModuleType] = {"naive": naive_collectives, "ring": ring_collectives}


class VirtualDevice:
    """A device with its `rank` and `index` on the `mesh`, channels, counts and collectives.

    The group of a collective is all devices with the same coordinates as this one on every axis
    except `axes` (None: the whole mesh). All devices of the group must call it. `dim` is the
    dimension along which a tensor is split into equal parts, or parts are concatenated, in the
    order of `mesh.group(index, axes)`. `root` is a position in that order. `label` names the tensor
    in `counts.collectives`.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        host: HostChannel,
        algorithm: str,
        counts: Counts,
        recorder: Recorder,
        link: Link | None = None,
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.index: MeshIndex = mesh.index(rank)
        self.device = device
        self.host = host
        self.algorithm = algorithm
        self.counts = counts
        self._recorder = recorder
        port = Port(link) if link else None
        self._channels = [DeviceChannel(peer, counts, recorder, port) for peer in range(mesh.size)]

    def channel(self, peer: int | MeshIndex) -> DeviceChannel:
        """The link to another device, by its rank or its index."""
        return self._channels[peer if isinstance(peer, int) else self.mesh.rank(peer)]

    def group(self, axes: Axes = None) -> Group:
        """The group of this device along `axes`, with a channel to each of its devices."""
        ranks = self.mesh.group(self.index, axes)
        return Group(ranks.index(self.rank), [self._channels[rank] for rank in ranks])

    def broadcast(
        self, tensor: torch.Tensor, axes: Axes = None, root: int = 0, label: str = ""
    ) -> torch.Tensor:
        """The root's tensor; the other devices pass a tensor of the same shape."""
        with self.collective("broadcast", axes, label, tensor) as (group, algorithm):
            return algorithm.broadcast(group, tensor, root)

    def scatter(
        self, tensor: torch.Tensor, axes: Axes = None, dim: int = 0, root: int = 0, label: str = ""
    ) -> torch.Tensor:
        """This device's part of the root's tensor; the others pass a tensor of the same shape."""
        with self.collective("scatter", axes, label, tensor) as (group, algorithm):
            return algorithm.scatter(group, cut(tensor, group.size, dim), root)

    def gather(
        self, tensor: torch.Tensor, axes: Axes = None, dim: int = 0, root: int = 0, label: str = ""
    ) -> torch.Tensor | None:
        """Every device's tensor, concatenated along `dim`, on the root; None elsewhere."""
        with self.collective("gather", axes, label, tensor) as (group, algorithm):
            parts = algorithm.gather(group, tensor, root)
            return None if parts is None else torch.cat(parts, dim)

    def reduce(
        self, tensor: torch.Tensor, axes: Axes = None, root: int = 0, label: str = ""
    ) -> torch.Tensor | None:
        """The sum of every device's tensor on the root; None elsewhere."""
        with self.collective("reduce", axes, label, tensor) as (group, algorithm):
            return algorithm.reduce(group, tensor, root)

    def all_scatter(
        self, tensor: torch.Tensor, axes: Axes = None, label: str = ""
    ) -> list[Transfer]:
        """Start sending this device's tensor to every peer, which receives it on its channel.

        This is the sending half of the naive all-gather. Wait for the transfers after receiving.
        """
        with self.collective("all_scatter", axes, label, tensor) as (group, _):
            return naive_collectives.all_scatter(group, tensor)

    def all_gather(
        self, tensor: torch.Tensor, axes: Axes = None, dim: int = 0, label: str = ""
    ) -> torch.Tensor:
        """Every device's tensor, concatenated along `dim`."""
        return torch.cat(self.all_gather_parts(tensor, axes, label), dim)

    def all_gather_parts(
        self, tensor: torch.Tensor, axes: Axes = None, label: str = ""
    ) -> list[torch.Tensor]:
        """Every device's tensor, in group order."""
        with self.collective("all_gather", axes, label, tensor) as (group, algorithm):
            return algorithm.all_gather(group, tensor)

    def all_reduce(self, tensor: torch.Tensor, axes: Axes = None, label: str = "") -> torch.Tensor:
        """The sum of every device's tensor."""
        with self.collective("all_reduce", axes, label, tensor) as (group, algorithm):
            return algorithm.all_reduce(group, tensor)

    def reduce_scatter(
        self, tensor: torch.Tensor, axes: Axes = None, dim: int = 0, label: str = ""
    ) -> torch.Tensor:
        """This device's part of the sum of every device's tensor."""
        with self.collective("reduce_scatter", axes, label, tensor) as (group, algorithm):
            return algorithm.reduce_scatter(group, cut(tensor, group.size, dim))

    def all_to_all(
        self,
        tensor: torch.Tensor,
        axes: Axes = None,
        cut_dim: int = 0,
        join_dim: int = 0,
        label: str = "",
    ) -> torch.Tensor:
        """Split every tensor along `cut_dim`; concatenate this device's parts along `join_dim`."""
        with self.collective("all_to_all", axes, label, tensor) as (group, algorithm):
            return torch.cat(
                algorithm.all_to_all(group, cut(tensor, group.size, cut_dim)), join_dim
            )

    def barrier(self, axes: Axes = None) -> None:
        """Block until every device of the group has called it."""
        with self.collective("barrier", axes) as (group, algorithm):
            algorithm.barrier(group)

    def counting(self) -> CountingMode:
        """Count and record what another thread of this device does in a `with` block.

        The thread that runs the job does so already.
        """
        return CountingMode(self.counts, self._recorder)

    @contextlib.contextmanager
    def collective(
        self, kind: str, axes: Axes = None, label: str = "", tensor: torch.Tensor | None = None
    ) -> Iterator[tuple[Group, ModuleType]]:
        """Count and record a collective, whose messages are sent inside the `with` block.

        Gives its group and the module of this run's algorithm. If given, `tensor` must have the
        same shape and dtype on every device of the group.
        """
        axes = self.mesh.axes if axes is None else tuple(axes)
        self.counts.collectives.append(Collective(kind, label, axes))
        ranks = self.mesh.group(self.index, axes)
        with self._recorder.collective(kind, label, ranks, tensor):
            yield self.group(axes), ALGORITHMS[self.algorithm]


def cut(tensor: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
    """Split into equal parts along `dim`. Raises ValueError if the size does not divide."""
    size = tensor.shape[dim]
    if size % num_parts:
        raise ValueError(
            f"dimension {dim} of size {size} cannot be split into {num_parts} equal parts"
        )
    return list(tensor.chunk(num_parts, dim))
