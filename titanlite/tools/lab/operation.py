"""Operation: a job on global inputs that a cluster distributes over its devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh


class Operation(ABC):
    """An operation in three parts: split on the host, run on every device, join on the host.

    Calling it with a cluster and the global inputs does all three: `matmul(cluster, a, b)`.
    """

    @abstractmethod
    def shares(self, mesh: Mesh, *inputs: Any) -> Sequence[Sequence[Any]]:
        """The part of the inputs for each device, in mesh order. Raises for invalid inputs."""

    @abstractmethod
    def run(self, device: VirtualDevice, *share: Any) -> Any:
        """Run on one device with its part of the inputs."""

    @abstractmethod
    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """The global result from the results of all devices, in mesh order."""

    def __call__(self, cluster: Any, *inputs: Any, **options: Any) -> Any:
        return self.join(cluster.mesh, cluster.run(self, *inputs, **options))
