"""Steps: a recorded run on a clock of equal steps. Needs no torch.

Wall times of small messages are noise, and differ in every run. On this clock a message takes one
step, a device sends and receives at most one message at a time, and a message does not wait for its
receiver. Computation takes no time, except for the blocks of `torch.profiler.record_function`: one
step for each in which nothing is posted or awaited. A collective of torch.distributed, whose
messages are not visible, takes one step once all its ranks have called it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any

from titanlite.lab.record import (
    BEGIN,
    COLLECTIVE,
    END,
    ENTER,
    LEAVE,
    RECEIVE,
    SEND,
    WAIT,
    Block,
    Call,
    Event,
    Flight,
    Message,
    Record,
    Steps,
    TorchCall,
)


def make_steps(record: Record) -> Steps:
    """Run the events of all ranks on the clock; events that never happened are left out."""
    return _Clock(record).run()


class _Clock:
    def __init__(self, record: Record) -> None:
        self.record = record
        self.now = [0] * record.num_ranks
        self.place = [0] * record.num_ranks
        self.sender_free: defaultdict[int, int] = defaultdict(int)
        self.receiver_free: defaultdict[int, int] = defaultdict(int)
        self.ends: dict[int, int] = {}  # by id of a Message or Call
        self.reached: defaultdict[int, list[int]] = defaultdict(list)
        self.posts = {
            (event.rank, event.number): event
            for of_rank in record.events
            for event in of_rank
            if event.kind in (SEND, RECEIVE, COLLECTIVE)
        }
        # Open blocks of each rank: the event, its start, and whether anything was posted inside.
        self.open: list[list[list[Any]]] = [[] for _ in range(record.num_ranks)]
        self.steps = Steps()

    def run(self) -> Steps:
        """Always advance the rank whose clock is the earliest of those that can go on."""
        ready = [(0, rank) for rank in range(self.record.num_ranks)]
        blocked: list[int] = []
        while ready:
            _, rank = heapq.heappop(ready)
            events = self.record.events[rank]
            if self.place[rank] == len(events):
                continue
            if not self.advance(rank, events[self.place[rank]]):
                blocked.append(rank)
                continue
            self.place[rank] += 1
            for freed in [rank, *blocked]:
                heapq.heappush(ready, (self.now[freed], freed))
            blocked.clear()
        self.steps.length = max(
            [*self.now, *self.ends.values(), *(block.end for block in self.steps.blocks)], default=0
        )
        return self.steps

    def advance(self, rank: int, event: Event) -> bool:
        """Process one event; False if it needs an event of another rank first."""
        if event.kind == WAIT:
            awaited = self.posts[rank, event.number]
            what: Message | Call
            if awaited.kind == COLLECTIVE:
                what = self.record.call_of(awaited)
            else:
                what = self.record.message_of(awaited)
            if id(what) not in self.ends:
                return False
            self.now[rank] = max(self.now[rank], self.ends[id(what)])
        elif event.kind == SEND:
            self.send(rank, event)
        elif event.kind == COLLECTIVE:
            self.call(rank, event)
        elif event.kind == ENTER:
            self.open[rank].append([event, self.now[rank], True])
            return True
        elif event.kind == LEAVE:
            self.leave(rank)
            return True
        if event.kind not in (BEGIN, END):
            for block in self.open[rank]:
                block[2] = False
        return True

    def send(self, rank: int, event: Event) -> None:
        message = self.record.message_of(event)
        start = max(self.now[rank], self.sender_free[rank], self.receiver_free[message.target])
        self.sender_free[rank] = self.receiver_free[message.target] = start + 1
        self.ends[id(message)] = start + 1
        self.steps.flights.append(Flight(message, start))

    def call(self, rank: int, event: Event) -> None:
        call = self.record.call_of(event)
        reached = self.reached[id(call)]
        reached.append(self.now[rank])
        if len(reached) == len(call.ranks):
            start = max([*reached, *(self.sender_free[one] for one in call.ranks)])
            self.ends[id(call)] = start + 1
            for one in call.ranks:
                self.sender_free[one] = start + 1
            self.steps.calls.append(TorchCall(call, start))

    def leave(self, rank: int) -> None:
        event, start, is_work = self.open[rank].pop()
        if is_work and self.open[rank]:
            # Only the innermost block of pure work takes time.
            for block in self.open[rank]:
                block[2] = False
        if is_work:
            self.now[rank] += 1
        self.steps.blocks.append(Block(rank, event.name, start, self.now[rank], is_work))
