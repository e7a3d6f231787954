"""The cost of a transfer: a link has a latency and a bandwidth, a network has two kinds of link."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.simulate.work import SimulationError


@dataclass(frozen=True)
class Link:
    """A message takes `latency_seconds` plus its size times `seconds_per_unit`."""

    latency_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.seconds_per_unit < 0:
            raise SimulationError(f"{self}: the times of a link must not be negative")

    def seconds(self, size_units: float) -> float:
        return self.latency_seconds + size_units * self.seconds_per_unit


@dataclass(frozen=True)
class Network:
    """Workers in nodes of `workers_per_node` consecutive workers.

    `between` links workers of different nodes, `inside` links workers of the same node. Without
    `inside`, all links are `between`.
    """

    between: Link
    inside: Link | None = None
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise SimulationError(
                f"workers_per_node is {self.workers_per_node}; it must be at least 1"
            )

    def link(self, source: int, target: int) -> Link:
        same_node = source // self.workers_per_node == target // self.workers_per_node
        return self.inside if same_node and self.inside is not None else self.between

    def slowest_link(self, workers: list[int]) -> Link:
        """The slowest link of a ring through `workers`: `between` if they span several nodes."""
        nodes = {worker // self.workers_per_node for worker in workers}
        return self.between if len(nodes) > 1 or self.inside is None else self.inside


def ring_all_reduce_seconds(link: Link, num_workers: int, size_units: float) -> float:
    """The time of a ring all-reduce: 2 (N - 1) steps, each of 1/N of the data.

    Patarasu and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    return 2 * (num_workers - 1) * link.seconds(size_units / num_workers)


def ring_reduce_seconds(link: Link, num_workers: int, size_units: float) -> float:
    """The time of a reduction to one owner over N - 1 links, pipelined in small pieces."""
    return (num_workers - 1) * link.latency_seconds + size_units * link.seconds_per_unit
