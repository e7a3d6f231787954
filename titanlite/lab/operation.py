"""What a cluster can run: an operation on global inputs, of which each device gets its share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from titanlite.lab.device import VirtualDevice
from titanlite.lab.mesh import Mesh


class Runner(Protocol):
    """What an operation needs of a VirtualCluster: a mesh, and to run on all of its devices."""

    @property
    def mesh(self) -> Mesh: ...

    def run(self, job: Operation, /, *inputs: Any, **options: Any) -> list[Any]: ...


class Operation(ABC):
    """An operation in three parts: share out on the host, run on every device, join on the host.

    Calling it with a cluster and the global inputs does all three: `matmul(cluster, a, b)`.
    """

    @abstractmethod
    def shares(self, mesh: Mesh, *inputs: Any) -> Sequence[Sequence[Any]]:
        """What each device gets of the inputs, in mesh order; raises where that cannot work."""

    @abstractmethod
    def run(self, device: VirtualDevice, *share: Any) -> Any:
        """What one device does with its share."""

    @abstractmethod
    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """The global result from every device's, in mesh order."""

    def __call__(self, cluster: Runner, *inputs: Any, **options: Any) -> Any:
        return self.join(cluster.mesh, cluster.run(self, *inputs, **options))
