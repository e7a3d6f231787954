"""The input of the engine: where each work item runs, how long it takes, and what it waits for."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

from titanlite.tools.simulate.costs import Costs, LinkTicks, TickCosts
from titanlite.tools.simulate.work import Direction, SimulationError, Work


class StagePass(NamedTuple):
    """One pass through one stage: the batches, and the worker, start and end tick of each."""

    stage: int
    direction: Direction
    batches: Sequence[int]
    workers: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]


@dataclass
class Plan:
    """The input of the engine. Work items are numbered as in placement.py.

    The weight gradient of a split backward has number `num_chained + batch * num_stages + stage`.
    `is_split[number - num_chained]` says whether that backward is split. A worker picks the ready
    work item with the smallest of `keys`, or follows its list in `orders`. A key is unequal to all
    others and has its number as remainder by `modulus`; weight gradients have none.
    `max_in_flight` (by worker) limits the forwards whose backward has not ended. `needs[number]`
    lists further work items whose output a work item needs, besides its predecessor's.
    """

    num_workers: int
    num_stages: int
    num_batches: int
    compute: list[int]
    weight: list[int]
    costs: Costs
    is_split: bytearray
    keys: Sequence[int] = ()
    orders: Sequence[Sequence[int]] | None = None
    max_in_flight: Sequence[float] | None = None
    needs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    num_chained: int = field(init=False)
    modulus: int = field(init=False)
    tick_costs: TickCosts = field(init=False)
    durations: list[int] = field(init=False)
    weight_durations: list[int] = field(init=False)

    nodes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_chained = 2 * self.num_stages * self.num_batches
        # A power of two, whose remainder is quick to take.
        self.modulus = 1 << (3 * self.num_stages * self.num_batches).bit_length()
        self.tick_costs = TickCosts(self.costs, self.num_stages)
        self.durations = self.tick_costs.forward + self.tick_costs.backward[::-1]
        self.weight_durations = self.tick_costs.weight_gradient
        network = self.costs.network
        per_node = network.workers_per_node if network is not None and network.inside else 1
        self.nodes = [worker // per_node for worker in range(self.num_workers)]

    def weight_gradient(self, backward: int) -> int:
        """The number of the weight gradient that belongs to `backward`."""
        batch, k = divmod(backward, 2 * self.num_stages)
        return self.num_chained + batch * self.num_stages + 2 * self.num_stages - 1 - k

    def backward_of(self, number: int) -> int:
        """The number of the backward that matches a weight gradient or a forward."""
        if number >= self.num_chained:
            batch, stage = divmod(number - self.num_chained, self.num_stages)
        else:
            batch, stage = divmod(number, 2 * self.num_stages)
        return (batch * 2 + 2) * self.num_stages - 1 - stage

    def number_of(self, stage: int, batch: int, direction: Direction) -> int:
        """The number of a work item."""
        if direction == Direction.WEIGHT:
            return self.num_chained + batch * self.num_stages + stage
        forward = batch * 2 * self.num_stages + stage
        return forward if direction == Direction.FORWARD else self.backward_of(forward)

    def work(self, number: int) -> Work:
        if number >= self.num_chained:
            batch, stage = divmod(number - self.num_chained, self.num_stages)
            return Work(stage, batch, Direction.WEIGHT)
        batch, k = divmod(number, 2 * self.num_stages)
        if k < self.num_stages:
            return Work(k, batch, Direction.FORWARD)
        return Work(2 * self.num_stages - 1 - k, batch, Direction.BACKWARD)

    def read(self, item: object, what: str) -> int:
        """The number of a work item that the user's function lists, called `what` in an error."""
        try:
            stage, batch, direction = cast("tuple[Any, Any, Any]", item)
            if isinstance(item, tuple) and direction in tuple(Direction):
                stage, batch = operator.index(stage), operator.index(batch)
                if 0 <= stage < self.num_stages and 0 <= batch < self.num_batches:
                    return self.number_of(stage, batch, direction)
        except (TypeError, ValueError):
            pass
        raise SimulationError(
            f"{what} {item!r}; it must be a Work(stage, batch, direction) with a stage of 0 to "
            f"{self.num_stages - 1}, a batch of 0 to {self.num_batches - 1} and a Direction"
        )

    @cached_property
    def owners(self) -> list[set[int]]:
        """By stage, the workers that store its weights."""
        chain = 2 * self.num_stages
        return [
            {*self.weight[stage::chain], *self.weight[chain - 1 - stage :: chain]}
            for stage in range(self.num_stages)
        ]

    def worker(self, number: int) -> int:
        return self.compute[number if number < self.num_chained else self.backward_of(number)]

    def link(self, source: int, target: int) -> LinkTicks:
        is_inside = self.nodes[source] == self.nodes[target]
        return self.tick_costs.inside if is_inside else self.tick_costs.between

    def duration(self, number: int) -> int:
        """The compute time of a work item; a split backward excludes its weight gradient."""
        if number >= self.num_chained:
            return self.weight_durations[(number - self.num_chained) % self.num_stages]
        k = number % (2 * self.num_stages)
        if k >= self.num_stages and self.is_split[self.weight_gradient(number) - self.num_chained]:
            return self.durations[k] - self.weight_durations[2 * self.num_stages - 1 - k]
        return self.durations[k]

    def columns(self, starts: Sequence[int]) -> Iterator[StagePass]:
        """All work that ran: each stage's forwards, backwards, and separate weight gradients."""
        chain, splits = 2 * self.num_stages, any(self.is_split)
        batches = range(self.num_batches)
        for k in range(chain):
            stage = min(k, chain - 1 - k)
            workers, begun = self.compute[k::chain], starts[k : self.num_chained : chain]
            length, part = self.durations[k], self.weight_durations[stage]
            direction = Direction.FORWARD if k < self.num_stages else Direction.BACKWARD
            if not splits or k < self.num_stages:
                ends = [start + length for start in begun]
                yield StagePass(stage, direction, batches, workers, begun, ends)
                continue
            is_split = self.is_split[stage :: self.num_stages]
            ends = [start + length - part * cut for start, cut in zip(begun, is_split, strict=True)]
            yield StagePass(stage, direction, batches, workers, begun, ends)
            if any(is_split):
                cut = [batch for batch in batches if is_split[batch]]
                place = self.num_chained + stage
                begun = [starts[place + batch * self.num_stages] for batch in cut]
                ends = [start + part for start in begun]
                workers = [workers[batch] for batch in cut]
                yield StagePass(stage, Direction.WEIGHT, cut, workers, begun, ends)

    @cached_property
    def messages_needed(self) -> list[int]:
        """By worker, the outputs sent to it that only `needs` asks for."""
        sent = set()
        for number, needed in self.needs.items():
            target = self.compute[number]
            for before in needed:
                follower = before + 1
                goes_on = follower % (2 * self.num_stages) != 0
                is_sent_anyway = goes_on and self.compute[follower] == target
                if self.compute[before] != target and not is_sent_anyway:
                    sent.add((before, target))
        count = Counter(target for _, target in sent)
        return [count[worker] for worker in range(self.num_workers)]
