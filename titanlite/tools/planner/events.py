"""What a traced step does, in program order, as plain data. No torch.

A Trace has the events of one rank. Computation runs on the rank's main stream; a Communication
runs beside it from where it is issued until the Wait of the same number, if there is one, and
otherwise holds the main stream until it ends. What runs ahead on a GPU is known of composed steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from titanlite.plan_row import PlanRow
from titanlite.tools.planner.allocator import Allocator

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "gathered parameters",
    "communication buffers",
    "temporary",
)
"""What memory is used for. Activations are what the forward pass keeps for the backward pass."""

FROM_RANK_TO_RANK = ("send", "receive")
HOST_LINK = "offload"
"""The axis of copies between a device and its host, whose kinds are these."""
TO_DEVICE, TO_HOST = "to_device", "to_host"


class Site(NamedTuple):
    """Where an event happens: a module of the plain model ("" for none), and a phase."""

    module: str
    phase: str


@dataclass(frozen=True)
class Operator:
    """One operator: its floating-point operations, and the bytes that it reads and writes."""

    name: str
    flops: int
    bytes_read: int
    bytes_written: int
    place: Site
    dtype: str
    shape: tuple[int, ...] = ()
    """(batch, m, n, k) of a matrix product; () for others."""
    is_beside: bool = False
    """Whether it runs on another stream than the main one: FSDP2's copies, on a GPU."""
    causal: tuple[int, ...] = ()
    """(queries, keys) of causal attention, whose masked half a kernel can skip; () for others.

    Where a window slides, also its size, and only its scores are counted.
    """
    is_strided: bool = False
    """Whether an input has gaps between its elements, such as a part of each row of a matrix."""
    is_on_host: bool = False
    """Whether it runs on the host of a GPU: the update of offloaded parameters."""


@dataclass(frozen=True)
class Communication:
    """One collective, or one side of a P2P message.

    `num_bytes` are those of its whole tensor: the output of a gather, the input of a reduction.
    The axis is "world" for the sums of a step. `number` is what a Wait refers to. CPU offload's
    copies between a rank's device and its host are communications of the axis HOST_LINK, too.
    """

    kind: str
    axis: str
    num_bytes: int
    num_ranks: int
    place: Site
    number: int
    peer: int = -1
    """The other rank of a P2P message, counted along the axis; -1 for a collective."""
    ready: int = -1
    """How many events of its segment the main stream must have done before it can start; -1: all
    events before it. On a GPU, FSDP2's collectives are issued ahead of the main stream."""
    after: tuple[int, ...] = ()
    """The numbers of the communications that must end before it starts."""

    def renumbered(self, number: int) -> Communication:
        """The same communication with another number."""
        # As replace, but a search calls it millions of times.
        return Communication(
            self.kind,
            self.axis,
            self.num_bytes,
            self.num_ranks,
            self.place,
            number,
            self.peer,
            self.ready,
            self.after,
        )


@dataclass(frozen=True)
class Wait:
    """The main stream waits for a communication."""

    number: int


@dataclass(frozen=True)
class Allocation:
    """Bytes that a block of memory has from now on; 0 frees it."""

    block: int
    num_bytes: int
    place: Site
    stream: int = 0
    """The stream of a GPU that allocates it; 0 for the main one."""


Event = Operator | Communication | Wait | Allocation


@dataclass(frozen=True)
class Peak:
    """The most memory that a step holds: where, and how many bytes of each category."""

    place: Site
    bytes_of: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())


@dataclass
class Trace:
    """The events of one rank in one step, and what the rank holds.

    `held` has the bytes of each category that is there before the step. `sizes` has the size of the
    blocks that are there then and that the step may free, which are part of `held`. `category_of`
    has the category of each block of memory. `applied` is the effective plan. With CPU offload on a
    GPU, `on_host` has the blocks in the memory of the host, and `held_on_host` is `held` there.
    """

    rank: int
    coordinates: dict[str, int]
    events: list[Event] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    category_of: dict[int, str] = field(default_factory=dict)
    applied: tuple[PlanRow, ...] = ()
    on_host: set[int] = field(default_factory=set)
    held_on_host: dict[str, int] = field(default_factory=dict)

    @property
    def communications(self) -> list[Communication]:
        return [event for event in self.events if isinstance(event, Communication)]

    @property
    def operators(self) -> list[Operator]:
        return [event for event in self.events if isinstance(event, Operator)]

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, axis) -> (number of communications, total bytes)."""
        return totals((one, 1) for one in self.communications)

    @property
    def flops(self) -> int:
        return sum(operator.flops for operator in self.operators)

    def peak(self) -> Peak:
        """The peak of the step, with parameters and optimizer state, which are always there."""
        return self._peak(self.held, is_on_host=False)

    def reserved(self, *, is_exact: bool = False) -> int:
        """The bytes that torch's allocator takes of a GPU, in pages unless `is_exact`."""
        allocator = Allocator(is_exact=is_exact)
        # What stays where it is, in one block.
        allocator.resize(-1, sum(self.held.values()) - sum(self.sizes.values()), 0)
        for block, num_bytes in self.sizes.items():
            allocator.resize(block, num_bytes, 0)
        for event in self._on_device():
            allocator.resize(event.block, event.num_bytes, event.stream)
        return allocator.reserved

    def gaps(self) -> int:
        """The bytes in gaps: what it takes beyond the sum of each stream's own peak."""
        sizes = {block: (num_bytes, 0) for block, num_bytes in self.sizes.items()}
        now = Counter({0: sum(self.held.values())})
        most = Counter(now)
        for event in self._on_device():
            before, stream = sizes.get(event.block, (0, 0))
            now[stream] -= before
            now[event.stream] += event.num_bytes
            sizes[event.block] = event.num_bytes, event.stream
            most[event.stream] = max(most[event.stream], now[event.stream])
        return max(0, self.reserved(is_exact=True) - most.total())

    def _on_device(self) -> Iterator[Allocation]:
        for event in self.events:
            if isinstance(event, Allocation) and event.block not in self.on_host:
                yield event

    def host_peak(self) -> Peak:
        """The peak of the host's memory; nothing without CPU offload."""
        return self._peak(self.held_on_host, is_on_host=True)

    def _peak(self, held: dict[str, int], *, is_on_host: bool) -> Peak:
        sizes = dict(self.sizes)
        now: Counter[str] = Counter(held)
        best, total, most = Peak(Site("", "other"), dict(now)), now.total(), now.total()
        for event in self.events:
            if not isinstance(event, Allocation) or (event.block in self.on_host) != is_on_host:
                continue
            change = event.num_bytes - sizes.get(event.block, 0)
            sizes[event.block] = event.num_bytes
            now[self.category_of[event.block]] += change
            total += change
            if total > most:
                best, most = Peak(event.place, dict(now)), total
        return best


def totals(
    communications: Iterable[tuple[Communication, int]],
) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (number of communications, total bytes); each happens a number of times."""
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for one, times in communications:
        counts[one.kind, one.axis] += times
        num_bytes[one.kind, one.axis] += times * one.num_bytes
    return {key: (counts[key], num_bytes[key]) for key in sorted(counts)}
