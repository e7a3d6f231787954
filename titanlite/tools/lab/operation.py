"""Operation: a job on global inputs that a cluster distributes; and one on sharded tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.sharding import ShardingError, TensorSharding


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


class ShardedOperation(Operation):
    """An operation whose inputs and outputs are tensors, each with a TensorSharding.

    A subclass names its tensors and their shardings, and computes on shards in `run`. `check` runs
    on the host and raises ShardingError for invalid inputs.
    """

    @property
    @abstractmethod
    def inputs(self) -> dict[str, TensorSharding]:
        """The names and shardings of the inputs, in the order of the arguments."""

    @property
    @abstractmethod
    def outputs(self) -> dict[str, TensorSharding]:
        """The names and shardings of the outputs, in the order in which `run` returns them."""

    @abstractmethod
    def check(self, mesh: Mesh, *tensors: torch.Tensor) -> None:
        """Raise ShardingError unless the inputs match each other, their shardings and the mesh."""

    def shares(self, mesh: Mesh, *tensors: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        if len(tensors) != len(self.inputs):
            raise ShardingError(
                f"{type(self).__name__} needs {', '.join(self.inputs)}, not {len(tensors)} tensors"
            )
        self.check(mesh, *tensors)
        split = [
            sharding.split(mesh, tensor, name)
            for tensor, (name, sharding) in zip(tensors, self.inputs.items(), strict=True)
        ]
        return list(zip(*split, strict=True))

    def join(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        """The whole output, or a tuple if there are several."""
        if len(self.outputs) == 1:
            results = [(result,) for result in results]
        joined = tuple(
            sharding.join(mesh, shards)
            for sharding, shards in zip(
                self.outputs.values(), zip(*results, strict=True), strict=True
            )
        )
        return joined if len(joined) > 1 else joined[0]
