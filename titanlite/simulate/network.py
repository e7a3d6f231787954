"""What a transfer costs: a link has a latency and a bandwidth, a network two tiers of links."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.simulate.work import SimulationError


@dataclass(frozen=True)
class Link:
    """`latency_seconds` a message and `seconds_per_unit` of its size (the inverse bandwidth)."""

    latency_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.seconds_per_unit < 0:
            raise SimulationError(f"{self}: a link cannot take negative time")

    def seconds(self, size_units: float) -> float:
        return self.latency_seconds + size_units * self.seconds_per_unit


@dataclass(frozen=True)
class Network:
    """Workers in nodes of `workers_per_node`, consecutive numbers together.

    `between` links workers of different nodes, `inside` those of one node (without it, all links
    are `between`).
    """

    between: Link
    inside: Link | None = None
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise SimulationError(
                f"workers_per_node is {self.workers_per_node}; at least 1 is needed"
            )

    def link(self, source: int, target: int) -> Link:
        same_node = source // self.workers_per_node == target // self.workers_per_node
        return self.inside if same_node and self.inside is not None else self.between

    def slowest_link(self, workers: list[int]) -> Link:
        """The slower tier if `workers` are spread over nodes, as a ring through them would meet."""
        nodes = {worker // self.workers_per_node for worker in workers}
        return self.between if len(nodes) > 1 or self.inside is None else self.inside


def ring_all_reduce_seconds(link: Link, num_workers: int, size_units: float) -> float:
    """2 (N - 1) steps, each of 1/N of the data: every worker ends with the whole sum.

    Patarasu and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    return 2 * (num_workers - 1) * link.seconds(size_units / num_workers)


def ring_reduce_seconds(link: Link, num_workers: int, size_units: float) -> float:
    """A sum passed along N - 1 links to one owner, in pieces small enough to stream."""
    return (num_workers - 1) * link.latency_seconds + size_units * link.seconds_per_unit
