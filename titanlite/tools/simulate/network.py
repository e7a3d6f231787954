"""The cost of sending: a link has a latency and a bandwidth, a network has two kinds of link."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from titanlite.tools.simulate.exact import Exact, Number, exact, is_fraction
from titanlite.tools.simulate.work import SimulationError

Size = TypeVar("Size", float, Fraction)


@dataclass(frozen=True)
class Link:
    """A message takes `latency_seconds` plus its size times `seconds_per_unit`."""

    latency_seconds: Number = 0
    seconds_per_unit: Number = 0

    def __post_init__(self) -> None:
        exact(self.latency_seconds, "link: latency_seconds")
        exact(self.seconds_per_unit, "link: seconds_per_unit")

    def seconds(self, size_units: Number) -> Exact:
        """The exact time of a message: an integer or a Fraction."""
        size = exact(size_units, "the size of a message")
        time = exact(self.latency_seconds, "latency_seconds")
        return time + size * exact(self.seconds_per_unit, "seconds_per_unit") if size else time

    @property
    def has_fractions(self) -> bool:
        """Whether one of its times is a Fraction or a Decimal."""
        return is_fraction(self.latency_seconds) or is_fraction(self.seconds_per_unit)


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
        if not isinstance(self.between, Link) or not isinstance(self.inside, Link | None):
            raise SimulationError("network: between and inside must be Links")
        if not isinstance(self.workers_per_node, int) or self.workers_per_node < 1:
            raise SimulationError(
                f"workers_per_node is {self.workers_per_node!r}; it must be an integer of at "
                "least 1"
            )

    def is_inside(self, source: int, target: int) -> bool:
        """Whether a message takes the link `inside`."""
        size = self.workers_per_node
        return self.inside is not None and source // size == target // size

    def link(self, source: int, target: int) -> Link:
        inside = self.inside if self.is_inside(source, target) else None
        return inside or self.between

    def slowest_link(self, workers: Sequence[int]) -> Link:
        """The slowest link of a ring through `workers`: `between` if they span several nodes."""
        nodes = {worker // self.workers_per_node for worker in workers}
        return self.between if len(nodes) > 1 or self.inside is None else self.inside


def bytes_sent(kind: str, num_bytes: Size, num_ranks: int) -> Size:
    """Bytes that a rank sends, of a whole tensor of `num_bytes`, in a ring of `num_ranks`.

    An all-reduce takes 2 (N - 1) steps, each of 1/N of the data: Patarasu and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002. Other kinds than collectives send the whole.
    """
    match kind:
        case "all_reduce":
            return 2 * num_bytes * (num_ranks - 1) / num_ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return num_bytes * (num_ranks - 1) / num_ranks
        case _:
            return num_bytes


def ring_seconds(kind: str, link: Link, num_ranks: int, size_units: Exact) -> Exact:
    """The time of a collective in a ring of equal links, each step of which takes a latency.

    A "reduce", to one owner, is pipelined in small pieces, so that its links send at once.
    """
    latency = link.seconds(0)
    num_steps = (num_ranks - 1) * (2 if kind == "all_reduce" else 1)
    sent = bytes_sent(kind, Fraction(link.seconds(size_units) - latency), num_ranks)
    return num_steps * latency + sent
